"""The stand-in device: it refuses what CUDA refuses, right code holds every law on it, and mistakes planted in gdn-verify show."""

import copy
import ctypes
import dataclasses
import math
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oracles.rule import scores
from properties.books import book_of
from properties.paths.domain import PathDomain
from properties.paths.laws import PATH_LAWS
from properties.traces.domain import TraceDomain
from properties.traces.laws import TRACE_LAWS
from properties.words.example import Example
from tests import right, standin
from tests.together import for_each
from verify.adapters.registry import AdapterError
from verify.bench.adapter_bench import AdapterBench
from verify.bench.path_bench import RankBench
from verify.bench.shared_calls import SharedCall
from verify.engine.drawing import seeded
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.gpu import device as devices
from verify.process.outcome import Outcome, Verdict
from verify.ranks import collectives
from verify.zoo import base, modules
from verify.zoo import wrong_gates as gates
from verify.zoo import wrong_pools as pools

if torch.__version__ < (2, 13):  # a TorchVersion compares as a version
    pytest.skip("the stand-in is made of what torch 2.13 has; with 2.11 its operations call themselves", allow_module_level=True)
standin.install()
DEVICE = standin.DEVICE
DEVICES = (DEVICE, "cuda") if devices.gpus() else (DEVICE,)  # the rules are CUDA's: where there is a GPU, it follows them too


def far(device: str, *shape: int) -> Tensor:
    """The numbers 1, 2, 3 ... on a device."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device=device).view(shape)


def near(*shape: int) -> Tensor:
    """The same on the CPU."""
    return far("cpu", *shape)


INDEX, MASK, ONE = torch.tensor([0]), torch.tensor([[True, False]]), torch.tensor(1.0)


# What CUDA refuses: most of all, tensors of two devices in one operation

MIXED: dict[str, Callable[[str], Any]] = {
    "sum": lambda d: far(d, 2, 2) + near(2, 2),
    "product, the CPU first": lambda d: near(2, 2) * far(d, 2, 2),
    "comparison": lambda d: far(d, 2) == near(2),
    "a scalar of the device": lambda d: near(2, 2) * far(d),
    "two scalars of the CPU": lambda d: torch.addcmul(far(d, 2), ONE, ONE),
    "a scalar of the CPU as a factor of addcmul": lambda d: torch.addcmul(far(d, 2), ONE, far(d, 2)),
    "a scalar of the CPU in clamp": lambda d: far(d, 2).clamp(min=ONE),
    "a scalar of the CPU in logaddexp": lambda d: far(d, 2).logaddexp(ONE),
    "a scalar of the CPU in stack": lambda d: torch.stack([far(d), ONE]),
    "a scalar of the CPU as a bias": lambda d: torch.addmm(ONE, far(d, 2, 2), far(d, 2, 2)),
    "in place": lambda d: far(d, 2, 2).add_(near(2, 2)),
    "in place, on the CPU": lambda d: near(2, 2).add_(far(d, 2, 2)),
    "in place, on a scalar of the CPU": lambda d: ONE.clone().add_(far(d)),
    "an output on the CPU": lambda d: torch.add(far(d, 2), far(d, 2), out=near(2)),
    "an output on the device": lambda d: torch.add(near(2), near(2), out=far(d, 2)),
    "several at once": lambda d: torch._foreach_add([far(d, 2)], [near(2)]),
    "matrix product": lambda d: far(d, 2, 2) @ near(2, 2),
    "einsum": lambda d: torch.einsum("ij,kj->ik", near(2, 2), far(d, 2, 2)),
    "solve": lambda d: torch.linalg.solve_triangular(far(d, 1, 1), near(1, 1), upper=False),
    "linear": lambda d: torch.nn.functional.linear(far(d, 2, 2), near(2, 2)),
    "a module's weight": lambda d: torch.nn.Linear(2, 2)(far(d, 2, 2)),
    "conv1d": lambda d: torch.nn.functional.conv1d(far(d, 1, 2, 3), near(2, 1, 2), groups=2),
    "layer_norm": lambda d: torch.nn.functional.layer_norm(far(d, 2), (2,), near(2)),
    "embedding": lambda d: torch.nn.functional.embedding(INDEX, far(d, 2, 2)),
    "index_select": lambda d: far(d, 2, 2).index_select(0, INDEX),
    "index_select on the CPU": lambda d: near(2, 2).index_select(0, INDEX.to(d)),
    "index_copy": lambda d: far(d, 2, 2).index_copy(0, INDEX, far(d, 1, 2)),
    "index_add": lambda d: far(d, 2, 2).index_add(0, INDEX.to(d), near(1, 2)),
    "index_fill": lambda d: far(d, 2, 2).index_fill(0, INDEX, 0.0),
    "gather": lambda d: far(d, 2, 2).gather(0, torch.tensor([[0, 1]])),
    "scatter": lambda d: far(d, 2, 2).scatter(0, torch.tensor([[0, 1]]), far(d, 1, 2)),
    "repeat_interleave": lambda d: far(d, 1, 2).repeat_interleave(INDEX + 1, 0),
    "an index of the device into the CPU": lambda d: near(2, 2)[INDEX.to(d)],
    "a mask of the device into the CPU": lambda d: near(1, 2)[MASK.to(d)],
    "numbers of the CPU put at an index": lambda d: far(d, 2, 2).__setitem__(INDEX, near(1, 2)),
    "one number of the CPU put at a mask of the CPU": lambda d: far(d, 1, 2).index_put_((MASK,), near(1)),
    "where": lambda d: torch.where(MASK, far(d, 1, 2), far(d, 1, 2)),
    "where, scalars of the device": lambda d: torch.where(MASK, far(d), 0.0),
    "masked_fill": lambda d: far(d, 1, 2).masked_fill(MASK, 0.0),
    "masked_fill on the CPU": lambda d: near(1, 2).masked_fill(MASK, far(d)),
    "masked_select": lambda d: far(d, 1, 2).masked_select(MASK),
    "masked_scatter": lambda d: far(d, 1, 2).masked_scatter(MASK.to(d), near(2)),
    "cat": lambda d: torch.cat([far(d, 2, 2), near(2, 2)]),
    "stack": lambda d: torch.stack([near(2), far(d, 2)]),
    "equal": lambda d: torch.equal(far(d, 2), near(2)),
    "allclose": lambda d: torch.allclose(far(d, 2), near(2)),
    "searchsorted": lambda d: torch.searchsorted(far(d, 2), near(2)),
    "vmap": lambda d: torch.vmap(lambda row: row + near(2))(far(d, 2, 2)),
    "a gradient on the CPU that backward starts from": lambda d: _leaf(d).mul(2).backward(near(2)),
    "a gradient on the CPU that an autograd.Function returns": lambda d: _OnTheCpu.apply(_leaf(d)).sum().backward(),
    "a gradient on the CPU that is assigned": lambda d: setattr(_leaf(d), "grad", near(2)),
    "a generator of the CPU": lambda d: torch.rand(2, device=d, generator=torch.Generator()),
    "memory of the CPU": lambda d: far(d, 2).set_(near(2).untyped_storage()),
    "memory of the device": lambda d: near(2).set_(far(d, 2).untyped_storage()),
    "in another thread": lambda d: _in_a_thread(lambda: far(d, 2) + near(2)),
}
REFUSED: dict[str, tuple[Callable[[str], Any], type[Exception], str]] = {
    "numpy": (lambda d: far(d, 2).numpy(), TypeError, r"can't convert .*:0 device type tensor to numpy\. Use Tensor\.cpu\(\)"),
    "an array": (lambda d: far(d, 2).__array__(), TypeError, "can't convert .*:0 device type tensor to numpy"),
    "integers in a matrix product": (
        lambda d: far(d, 2, 2).long() @ far(d, 2, 2).long(),
        NotImplementedError,
        "not implemented for",
    ),
    "integers in a product of vectors": (lambda d: far(d, 2).long() @ far(d, 2).long(), NotImplementedError, "not implemented for"),
    "a leaf in place": (
        lambda d: _leaf(d).add_(1),
        RuntimeError,
        "a leaf Variable that requires grad is being used in an in-place",
    ),
    "in place on what backward needs": (lambda d: _changed(_leaf(d).exp()), RuntimeError, "modified by an inplace operation"),
    "in place on a view of what backward needs": (lambda d: _changed(_leaf(d).exp(), slice(1)), RuntimeError, "inplace operation"),
    "in place on what overlaps": (lambda d: far(d, 1).expand(2).add_(1), RuntimeError, "more than one element of the written-to"),
    "beyond the memory": (lambda d: far(d, 2).as_strided((4,), (1,)), RuntimeError, "out of bounds for storage"),
}


class _OnTheCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return torch.full(cotangents[0].shape, 2.0)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.full_like(x, 2.0) * cotangents[0]


def _leaf(device: str) -> Tensor:
    return far(device, 2).requires_grad_()


def _changed(x: Tensor, at: slice = slice(None)) -> None:
    x[at].add_(1)
    x.sum().backward()


def _in_a_thread(call: Callable[[], Any]) -> Any:
    """What a call in another thread returns or raises."""
    found: list[Any] = []

    def keep() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


@for_each("device", DEVICES)
@for_each("what", MIXED)
def test_mixing_devices_is_refused(what: str, device: str) -> None:
    with pytest.raises(RuntimeError, match="device"):
        MIXED[what](device)


@pytest.mark.parametrize("device", DEVICES)
def test_refusal_is_worded_as_cudas(device: str) -> None:
    words = f"Expected all tensors to be on the same device, but found at least two devices, {device}:0 and cpu!"
    with pytest.raises(RuntimeError, match=words):
        near(2) + far(device, 2)
    with pytest.raises(RuntimeError, match=r"indices should be either on cpu or on the same device as the indexed tensor \(cpu\)"):
        near(2)[INDEX.to(device)]


@for_each("device", DEVICES)
@for_each("what", REFUSED)
def test_what_cuda_refuses_besides_is_refused(what: str, device: str) -> None:
    call, kind, words = REFUSED[what]
    with pytest.raises(kind, match=words):
        call(device)


# What CUDA takes

TAKEN: dict[str, tuple[Callable[[str], Any], Any]] = {
    "a number": (lambda d: far(d, 2) * 2.0, [2.0, 4.0]),
    "a scalar of the CPU": (lambda d: far(d, 2) * (2 * ONE), [2.0, 4.0]),
    "a scalar of the CPU before": (lambda d: 1 / (ONE / far(d, 2)), [1.0, 2.0]),
    "a scalar of the CPU beside one of the device": (lambda d: ONE + far(d), 2.0),
    "a scalar of the CPU in place": (lambda d: far(d, 2).add_(ONE), [2.0, 3.0]),
    "a scalar of the CPU in a comparison": (lambda d: far(d, 2) > ONE, [False, True]),
    "a scalar of the CPU in maximum": (lambda d: torch.maximum(2 * ONE, far(d, 2)), [2.0, 2.0]),
    "a scalar of the CPU in where": (lambda d: torch.where(far(d, 2) > 1, far(d, 2), ONE * 0), [0.0, 2.0]),
    "scalars of the CPU in where": (lambda d: torch.where(far(d, 2) > 1, ONE, ONE * 0), [0.0, 1.0]),
    "a scalar of the CPU in masked_fill": (lambda d: far(d, 1, 2).masked_fill(MASK.to(d), 3 * ONE), [[3.0, 2.0]]),
    "a scalar of the CPU in index_fill": (lambda d: far(d, 2).index_fill(0, INDEX.to(d), 3 * ONE), [3.0, 2.0]),
    "a scalar of the CPU in lerp": (lambda d: torch.lerp(far(d, 2), far(d, 2), ONE), [1.0, 2.0]),
    "a scalar of the CPU that backward starts from": (lambda d: _gradient(_leaf(d), ONE * 2), [4.0, 8.0]),
    "an index of the CPU in brackets": (lambda d: far(d, 2, 2)[INDEX], [[1.0, 2.0]]),
    "a mask of the CPU in brackets": (lambda d: far(d, 1, 2)[MASK], [1.0]),
    "a scalar of the device as an index of the CPU": (lambda d: near(2, 2)[INDEX[0].to(d)], [1.0, 2.0]),
    "a scalar of the device as the end of a slice": (lambda d: near(2)[: INDEX[0].to(d) + 1], [1.0]),
    "a scalar of the CPU put at an index of the CPU": (lambda d: _put(far(d, 2), INDEX, 3 * ONE), [3.0, 2.0]),
    "a number put at a mask of the CPU": (lambda d: _put(far(d, 1, 2), MASK, 3.0), [[3.0, 2.0]]),
    "one number of the CPU put at a mask": (lambda d: far(d, 1, 2).index_put_((MASK.to(d),), near(1) * 3), [[3.0, 2.0]]),
    "numbers of the CPU put into a slice": (lambda d: _put(far(d, 2), slice(1), near(1) * 3), [3.0, 2.0]),
    "numbers of the device put into the CPU": (lambda d: _put(near(2), slice(1), far(d, 1) * 3), [3.0, 2.0]),
    "numbers put into the CPU at an index of the device": (lambda d: _put(near(2), INDEX.to(d), near(1) * 3), [3.0, 2.0]),
    "a copy to the CPU": (lambda d: torch.zeros(2).copy_(far(d, 2)), [1.0, 2.0]),
    "a copy from the CPU": (lambda d: torch.zeros(2, device=d).copy_(near(2)), [1.0, 2.0]),
    "filling the CPU with a scalar of the device": (lambda d: torch.zeros(2).fill_(far(d)), [1.0, 1.0]),
    "tolist": (lambda d: far(d, 2).tolist(), [1.0, 2.0]),
    "item": (lambda d: (far(d, 1).item(), bool(far(d)), int(far(d)), f"{far(d):.1f}"), (1.0, True, 1, "1.0")),
    "numbers of a list": (lambda d: torch.tensor([1.0, 2.0], device=d), [1.0, 2.0]),
    "a list of scalars of the device": (lambda d: torch.tensor([*far(d, 2)]), [1.0, 2.0]),
    "as_tensor": (lambda d: torch.as_tensor(near(2), device=d), [1.0, 2.0]),
    "new_tensor": (lambda d: far(d, 1).new_tensor([2]), [2.0]),
    "new_zeros on the CPU": (lambda d: far(d, 2).new_zeros(1, device="cpu") + near(1), [1.0]),
    "ones_like, of the CPU": (lambda d: torch.ones_like(near(2), device=d) + far(d, 2), [2.0, 3.0]),
    "a view that is written through": (lambda d: _written(far(d, 2, 2)), [[0.0, 2.0], [0.0, 4.0]]),
    "shapes changed in place": (lambda d: far(d, 1, 2).t_().squeeze_(-1), [1.0, 2.0]),
    "an output of another shape": (lambda d: torch.add(far(d, 2), 0, out=torch.empty(0, device=d)), [1.0, 2.0]),
    "data set": (lambda d: _with_data(far(d, 1), far(d, 2)), [1.0, 2.0]),
    "the whole memory": (lambda d: torch.empty(0, device=d).set_(far(d, 3)[1:].untyped_storage()), [1.0, 2.0, 3.0]),
    "as_strided": (lambda d: far(d, 4).as_strided((2, 2), (1, 2), 0), [[1.0, 3.0], [2.0, 4.0]]),
    "nothing": (lambda d: far(d, 0, 2) @ far(d, 2, 2), []),
    "solve": (lambda d: torch.linalg.solve_triangular(far(d, 1, 1), far(d, 1, 1), upper=False), [[1.0]]),
    "random numbers, seeded": (lambda d: torch.equal(_random(d), _random(d)), True),
    "gradient": (lambda d: _gradient(_leaf(d)), [2.0, 4.0]),
    "gradient of a parameter": (lambda d: _gradient(torch.nn.Parameter(far(d, 2))), [2.0, 4.0]),
    "gradient in a thread": (lambda d: _in_a_thread(lambda: _gradient(_leaf(d))), [2.0, 4.0]),
    "gradient through the CPU": (lambda d: torch.autograd.grad(((x := _leaf(d)).cpu() * near(2)).sum(), x)[0], [1.0, 2.0]),
    "gradient of an autograd.Function": (lambda d: torch.autograd.grad(_Doubled.apply(x := _leaf(d)).sum(), x)[0], [2.0, 2.0]),
    "gradient through views in place": (lambda d: _through_views(_leaf(d)), [3.0, 0.0]),
    "gradient of a gradient": (lambda d: torch.func.grad(lambda x: torch.func.grad(lambda y: y**3)(x))(far(d)), 6.0),
    "checkpoint": (lambda d: _gradient(_leaf(d), lambda x: checkpoint(torch.square, x, use_reentrant=False)), [2.0, 4.0]),
    "vmap": (lambda d: torch.vmap(torch.sum)(far(d, 2, 2)), [3.0, 7.0]),
    "functional_call": (lambda d: torch.func.functional_call(torch.nn.Linear(2, 1), _weights(d), (far(d, 2),)), [6.0]),
    "a module that moves": (lambda d: {x.device.type == d for x in torch.nn.Linear(2, 1).to(d).parameters()}, {True}),
    "inference mode": (lambda d: torch.inference_mode()(_written)(far(d, 2, 2)), [[0.0, 2.0], [0.0, 4.0]]),
    "a deep copy": (lambda d: _written(copy.deepcopy(x := far(d, 2, 2))).device == x.device and x.sum(), 10.0),
    "pickle": (lambda d: pickle.loads(pickle.dumps(far(d, 2))) * far(d, 2), [1.0, 4.0]),
}


def _put(x: Tensor, at: Any, value: Any) -> Tensor:
    x[at] = value
    return x


def _written(x: Tensor) -> Tensor:
    x.mT[0].zero_()
    return x


def _with_data(x: Tensor, data: Tensor) -> Tensor:
    x.data = data
    return x


def _random(device: str) -> Tensor:
    torch.manual_seed(0)
    return torch.rand(3, device=device)


def _weights(device: str) -> dict[str, Tensor]:
    return {"weight": far(device, 1, 2), "bias": far(device, 1)}


def _gradient(leaf: Tensor, how: Any = torch.square) -> Tensor:
    """The gradient of the sum of squares, or as many times that; or of the sum of what a function returns."""
    start = None if callable(how) else how
    (torch.square if start is not None else how)(leaf).sum().backward(start)
    assert leaf.grad is not None
    assert leaf.grad.device == leaf.device
    return leaf.grad


def _through_views(leaf: Tensor) -> Tensor:
    x = leaf * 1
    x[:1].mul_(3)
    x[1] = 0
    x.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@for_each("device", DEVICES)
@for_each("what", TAKEN)
def test_what_cuda_takes_is_taken(what: str, device: str) -> None:
    got = TAKEN[what][0](device)
    assert (got.tolist() if isinstance(got, Tensor) else got) == TAKEN[what][1]


MADE: tuple[Callable[[], Tensor], ...] = (
    *(
        lambda make=make: make(3)
        for make in (torch.zeros, torch.ones, torch.empty, torch.arange, torch.eye, torch.rand, torch.randperm)
    ),
    *(lambda make=make: make([3]) for make in (torch.tensor, torch.as_tensor, torch.asarray)),
    lambda: torch.tensor(3, dtype=torch.int64),
    lambda: torch.tensor([[True], [False]]),
    lambda: torch.linspace(0, 1, 3),
    lambda: torch.full((3,), 3.0),
    lambda: torch.tril_indices(3, 3),
    lambda: torch.zeros(3, requires_grad=True),
    lambda: torch.nn.Linear(3, 3).weight,
)


@for_each("device", DEVICES)
@for_each("make", MADE)
def test_what_names_no_device_is_made_on_the_default_one(make: Callable[[], Tensor], device: str) -> None:
    with torch.device(device):
        assert make().device == torch.device(device, 0)
        assert torch.zeros_like(near(2)).device.type == near(2).new_zeros(2).device.type == "cpu"
    torch.set_default_device(device)
    try:
        assert make().device == torch.device(device, 0)
    finally:
        torch.set_default_device(None)
    assert make().device.type == "cpu"


@pytest.mark.parametrize("device", DEVICES)
def test_strides_and_dtypes_are_those_of_the_cpu(device: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool):
        x = torch.ones(2, 3, 4).to(dtype).transpose(0, 2)
        there = x.to(device)
        assert (there.dtype, there.stride(), there.shape) == (dtype, x.stride(), x.shape)
        assert torch.equal(there.contiguous().cpu(), x)
        for view in (lambda x: x[1:, ::2], lambda x: x.mT, lambda x: x[:, :1].expand(4, 3, 2), lambda x: x[:0]):
            got, want = view(there), view(x)
            assert (got.stride(), got.storage_offset()) == (want.stride(), want.storage_offset())


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_tell_tensors_apart(device: str) -> None:
    x = far(device, 2, 2)
    assert x.data_ptr() == x.detach().data_ptr() == x[:].data_ptr()
    assert len({x.data_ptr(), x[1:].data_ptr(), x.clone().data_ptr()}) == 3
    assert x[1:].data_ptr() - x.data_ptr() == 8
    assert x[1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() == x.data_ptr()
    assert (x.untyped_storage().nbytes(), x.untyped_storage().device) == (16, x.device)
    assert far(device, 0).data_ptr() == 0


def test_addresses_lead_nowhere() -> None:
    system, pipe = ctypes.CDLL(None, use_errno=True), os.pipe()
    try:
        for x, written in ((near(2), 8), (far(DEVICE, 2), -1)):  # the system looks where a read of our own would end the process
            assert system.write(pipe[1], ctypes.c_void_p(x.data_ptr()), 8) == written
    finally:
        for end in pipe:
            os.close(end)


# Laws of right code, on a device where mixing raises


def on_device(kind: Any) -> Any:
    """A right implementation that makes its own tensors where its inputs are."""

    class OnDevice(kind):  # type: ignore[misc, valid-type]
        def run(self, x: Any) -> Any:
            with next(value.device for value in x.values() if isinstance(value, Tensor)):
                return super().run(x)

    return OnDevice()


def torch_only(kind: Any) -> Any:
    """The layer without the choices that launch Triton kernels."""
    adapter = kind()
    choices = tuple((name, tuple(value for value in values if value != "fla")) for name, values in adapter.domain.choices)
    adapter.domain = dataclasses.replace(adapter.domain, choices=choices)
    return adapter


PATH = "gdn_layer"
RELEASED = tuple(f"transformers/{name}" for name in ("conv", "conv_update", "gated_norm", "qwen3_next_layer"))
RIGHT: dict[str, Any] = {
    "rule": on_device(base.Chunkwise),
    "kda": on_device(gates.StepwiseKda),
    "delta_rule": on_device(gates.StepwiseDelta),
    "gates_inside": on_device(gates.Stepwise),
    "conv": on_device(modules.ConvMasked),
    "gate": on_device(modules.Gate),
    "kda_gate": on_device(modules.KdaGate),
    "l2norm": on_device(modules.L2Norm),
    "gated_norm": on_device(modules.GatedNorm),
    "pool": on_device(base.Serving),
    "pool_in_blocks": on_device(pools.InBlocks),
    "pool_beside": on_device(right.Gathered),
    "layer": on_device(base.Layered),
    PATH: torch_only(type(adapter_of("gdn/layer"))),
    "traces": adapter_of("gdn/pool"),
}
LEFT_OUT = ""
try:
    RIGHT |= {name: adapter_of(name) for name in RELEASED}
except AdapterError as error:  # the rules above need none of it
    LEFT_OUT = str(error)
FIELDS = {"ranks": 4, "exchange_ranks": 8}  # smaller meshes
TOKENS = {"recurrent": 12}  # at most: implementations that go token by token would take most of the time
MOST = 70  # tokens of the others: a chunk of 64 and a part of a second, as of which more only take longer
# One of each book runs under every law. The others run under the laws whose calls differ from operation to operation.
EVERY = ("rule", "conv", "pool", "layer", PATH)
SOME = (
    "oracle",
    "recurrent",
    "absent",
    "gates",
    "tokens",
    "strides",
    "repeated",
    "heads",
    "blocks",
    "scaled",
    *TRACE_LAWS,
)
PAIRS = [
    (name, law.name)
    for name, adapter in RIGHT.items()
    for law in (book_of(adapter.domain).laws[law] for law in book_of(adapter.domain).about(adapter.domain.operation))
    if law.needs(adapter.domain) is None and (name in EVERY or law.name in SOME)
]


def turn(example: Example) -> tuple[bool, bool, int]:
    """Which case runs first: one of 8 tokens or more with a backward, and of those the one with the fewest numbers."""
    case = example.case
    size = case.tokens * math.prod(getattr(case, name, 1) for name in ("value_heads", "key_dim", "value_dim", "width"))
    return case.tokens < 8, not getattr(case, "backward", True), size


def outcomes(name: str, law: str, count: int, monkeypatch: pytest.MonkeyPatch, device: str = DEVICE) -> list[tuple[Run, Outcome]]:
    """What a few cases of a law come to, more where all were blind, on the stand-in unless another device is named."""
    adapter = RIGHT[name]
    monkeypatch.setitem(judging._LOADED, name, adapter)
    domain: Any = adapter.domain
    domain = dataclasses.replace(domain, **FIELDS) if isinstance(domain, PathDomain) else domain
    found: list[tuple[Run, Outcome]] = []

    few = MOST if isinstance(domain, TraceDomain) else TOKENS.get(adapter.algorithm, MOST)  # few traces have so few tokens
    examples = list[Example]()
    seeded(book_of(domain).laws[law].draw(domain).filter(lambda example: example.case.tokens <= few), 1, 4 * count, examples.append)
    # Forward mode of torch may end the process with the stand-in, and under inference_mode torch makes no views of its tensors.
    for example in sorted((example for example in examples if example.variant not in ("transforms", "inference")), key=turn):
        if len(found) < count or all(outcome.verdict is Verdict.BLIND for _, outcome in found):
            run = Run(law, name, example, "ieee", device)
            found.append((run, execute(run)))
    return found


def failures(found: list[tuple[Run, Outcome]]) -> list[Any]:
    return [
        (str(run), outcome.verdict, outcome.reason, outcome.fault, outcome.findings[:1])
        for run, outcome in found
        if outcome.verdict not in (Verdict.HOLDS, Verdict.BLIND)
    ]


@pytest.mark.parametrize(("name", "law"), PAIRS)
@pytest.mark.slow_after_first
def test_right_code_holds_the_law_on_the_device(name: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(name, law, 1, monkeypatch)
    assert failures(found) == []
    assert Verdict.HOLDS in {outcome.verdict for _, outcome in found}, "all cases are blind"


def test_released_code_is_among_them() -> None:
    if LEFT_OUT:
        pytest.skip(LEFT_OUT)
    assert {name for name, _ in PAIRS} >= {*RELEASED}


def test_every_law_of_every_book_runs_on_the_device() -> None:
    pairs = {(type(RIGHT[name].domain), law) for name, law in PAIRS}
    for domain in {type(adapter.domain) for adapter in RIGHT.values()}:
        every = {law for adapter in RIGHT.values() if isinstance(adapter.domain, domain) for law in book_of(adapter.domain).laws}
        assert {law for kind, law in pairs if kind is domain} == every, domain


# Mistakes of gdn-verify's own, none of which shows on a CPU


def law_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of a path made its tensors on the device (the version of 20 to 23 November 2026): nothing over NCCL was decided."""
    monkeypatch.setattr(RankBench, "law_device", property(lambda self: self.device, lambda self, value: None), raising=False)


def index_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's tokens are selected on the device, by an index that is on the CPU."""
    cut, plain = SharedCall.tokens, RankBench._prepared

    def prepared(self: RankBench, *arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(SharedCall, "tokens", lambda call, x, rank: cut(call, x.to(self.device), rank))
        return plain(self, *arguments, **more)

    monkeypatch.setattr(RankBench, "_prepared", prepared)


def bounds_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are on the CPU, outputs on the device."""
    plain = AdapterBench.bounds

    def bounds(self: AdapterBench, *inputs: Any) -> Any:
        limits = plain(self, *inputs)
        return {
            name: dataclasses.replace(limit, value=limit.value.cpu(), allowed=limit.allowed.cpu()) for name, limit in limits.items()
        }

    monkeypatch.setattr(AdapterBench, "bounds", bounds)


def scalar_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A law of paths, whose tensors are on the CPU, makes a factor on the device."""
    law = PATH_LAWS["parallel"]

    def check(bench: Any, example: Example) -> Any:
        for pair in law.check(bench, example):
            yield pair._replace(got=pair.got * torch.tensor(1.0, device=bench.device, dtype=pair.got.dtype))

    monkeypatch.setitem(PATH_LAWS, "parallel", dataclasses.replace(law, check=check))


def sum_of_ranks_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks hold is added to zeros that are on the CPU."""
    monkeypatch.setattr(
        collectives, "_added", lambda xs: torch.zeros(xs.shape[1:], dtype=xs.dtype, device="cpu") + xs.sum(0, dtype=xs.dtype)
    )


def mask_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of a chunk's upper triangle is made on the CPU."""
    monkeypatch.setattr(scores, "_upper", lambda tokens, device: torch.ones(tokens, tokens, dtype=torch.bool, device="cpu").triu(1))


PLANTED = (
    (law_on_the_device, PATH, "parallel"),
    (index_on_the_cpu, PATH, "parallel"),
    (bounds_on_the_cpu, "rule", "oracle"),
    (scalar_on_the_device, PATH, "parallel"),
    (sum_of_ranks_on_the_cpu, PATH, "parallel"),
    (mask_on_the_cpu, "rule", "oracle"),
)


@pytest.mark.parametrize(("plant", "name", "law"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
@pytest.mark.slow
def test_a_mistake_that_no_cpu_shows_is_shown(
    plant: Callable[[pytest.MonkeyPatch], None], name: str, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert failures(outcomes(name, law, 2, monkeypatch, "cpu")) == []
    found = failures(outcomes(name, law, 2, monkeypatch))
    assert found
    assert all("Expected all tensors to be on the same device" in reason + str(findings) for _, _, reason, _, findings in found)
    assert all(fault.startswith("RuntimeError at ") for _, verdict, _, fault, _ in found if verdict is Verdict.UNKNOWN)
