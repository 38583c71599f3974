"""The stand-in device: it refuses what CUDA refuses, right code holds every law on it, and mistakes planted in gdn-verify show."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import disturbed
from properties.books import book_of
from properties.paths import PATH_LAWS, PathDomain
from properties.strategies import Example
from tests import standin
from verify import comm
from verify import run as run_module
from verify.bench import AdapterBench
from verify.check import seeded
from verify.judge import Verdict
from verify.parallel import RankBench
from verify.run import Outcome, Run, adapter_of, execute
from verify.zoo import base, gates, modules, pools

standin.install()
DEVICE = standin.DEVICE
MIXED = f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE}:0 and cpu!"


def far(*shape: int) -> Tensor:
    """A tensor on the stand-in."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device=DEVICE).view(shape)


def near(*shape: int) -> Tensor:
    """The same on the CPU."""
    return far(*shape).cpu()


# What CUDA refuses, and what it takes


class _Forgets(torch.autograd.Function):
    """The identity, whose gradient is made on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.ones(gradients[0].shape)


INDEX, MASK = torch.tensor([0]), torch.tensor([[True, False]])
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "elementwise": (lambda: far(2, 2) + near(2, 2), RuntimeError, MIXED),
    "elementwise, the CPU first": (lambda: near(2, 2) * far(2, 2), RuntimeError, MIXED),
    "a scalar of the device beside the CPU": (lambda: near(2, 2) * far(1).squeeze(0), RuntimeError, MIXED),
    "in place": (lambda: far(2, 2).add_(near(2, 2)), RuntimeError, MIXED),
    "matrix product": (lambda: far(2, 2) @ near(2, 2), RuntimeError, MIXED),
    "index_select": (lambda: far(2, 2).index_select(0, INDEX), RuntimeError, MIXED),
    "index_copy": (lambda: far(2, 2).index_copy(0, INDEX, far(1, 2)), RuntimeError, MIXED),
    "gather": (lambda: far(2, 2).gather(0, torch.tensor([[0, 1]])), RuntimeError, MIXED),
    "scatter": (lambda: far(2, 2).scatter(0, torch.tensor([[0, 1]]), far(1, 2)), RuntimeError, MIXED),
    "an index of the device into the CPU": (lambda: near(2, 2)[INDEX.to(DEVICE)], RuntimeError, "indices should be either on cpu"),
    "where": (lambda: torch.where(MASK, far(2, 2), far(2, 2)), RuntimeError, MIXED),
    "masked_fill": (lambda: far(2, 2).masked_fill(MASK, 0.0), RuntimeError, MIXED),
    "cat": (lambda: torch.cat([far(2, 2), near(2, 2)]), RuntimeError, MIXED),
    "stack": (lambda: torch.stack([near(2), far(2)]), RuntimeError, MIXED),
    "equal": (lambda: torch.equal(far(2), near(2)), RuntimeError, MIXED),
    "allclose": (lambda: torch.allclose(far(2), near(2)), RuntimeError, MIXED),
    "numpy": (lambda: far(2).numpy(), TypeError, f"can't convert {DEVICE}:0 device type tensor to numpy"),
    "a CPU generator": (
        lambda: torch.rand(2, device=DEVICE, generator=torch.Generator()),
        RuntimeError,
        f"Expected a '{DEVICE}' device type for generator",
    ),
    "a gradient of the CPU": (
        lambda: torch.autograd.grad(torch.nn.Parameter(far(2)) * 2, [torch.nn.Parameter(far(2))], near(2)),
        RuntimeError,
        f"expected device {DEVICE}:0 but got cpu",
    ),
    "a backward that returns a gradient of the CPU": (
        lambda: _Forgets.apply(far(2).requires_grad_()).sum().backward(),
        RuntimeError,
        "invalid gradient",
    ),
    "integers in a matrix product": (lambda: far(2, 2).long() @ far(2, 2).long(), NotImplementedError, "not implemented for"),
}
TAKEN: dict[str, tuple[Callable[[], Any], Any]] = {
    "a number": (lambda: far(2) * 2.0, [2.0, 4.0]),
    "a scalar of the CPU": (lambda: far(2) * torch.tensor(2.0), [2.0, 4.0]),
    "a scalar of the CPU in where": (lambda: torch.where(far(2) > 1, far(2), torch.tensor(0.0)), [0.0, 2.0]),
    "an index of the CPU in brackets": (lambda: far(2, 2)[INDEX], [[1.0, 2.0]]),
    "a mask of the CPU in brackets": (lambda: far(1, 2)[MASK], [1.0]),
    "a copy to the CPU": (lambda: torch.zeros(2).copy_(far(2)), [1.0, 2.0]),
    "a copy from the CPU": (lambda: torch.zeros(2, device=DEVICE).copy_(near(2)), [1.0, 2.0]),
    "tolist": (lambda: far(2).tolist(), [1.0, 2.0]),
    "item": (lambda: far(1).item(), 1.0),
    "a list": (lambda: torch.tensor([1.0, 2.0], device=DEVICE), [1.0, 2.0]),
    "as_tensor": (lambda: torch.as_tensor(near(2), device=DEVICE), [1.0, 2.0]),
    "like": (lambda: torch.ones_like(far(2)), [1.0, 1.0]),
    "new_zeros": (lambda: far(2).new_zeros(2), [0.0, 0.0]),
    "a view that is written through": (lambda: _written(far(2, 2)), [[0.0, 2.0], [0.0, 4.0]]),
    "nothing": (lambda: far(0, 2) @ far(2, 2), []),
    "solve": (lambda: torch.linalg.solve_triangular(far(1, 1), far(1, 1), upper=False), [[1.0]]),
    "gradient": (lambda: _gradient(far(2)), [2.0, 4.0]),
}


def _written(x: Tensor) -> Tensor:
    x.mT[0].zero_()
    return x


def _gradient(x: Tensor) -> Tensor:
    leaf = torch.nn.Parameter(x)
    (gradient,) = torch.autograd.grad(leaf.square().sum(), leaf)
    assert gradient.device == x.device
    return gradient


@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_is_refused(what: str) -> None:
    call, kind, words = REFUSED[what]
    with pytest.raises(kind) as raised:
        call()
    assert words in str(raised.value)


@pytest.mark.parametrize("what", TAKEN)
def test_what_cuda_takes_is_taken(what: str) -> None:
    got = TAKEN[what][0]()
    assert (got.tolist() if isinstance(got, Tensor) else got) == TAKEN[what][1]


@pytest.mark.parametrize(
    "make", [torch.zeros, torch.ones, torch.empty, torch.arange, torch.eye, lambda n: torch.tensor([n]), torch.tensor]
)
def test_what_names_no_device_is_made_on_the_default_one(make: Callable[[int], Tensor]) -> None:
    with torch.device(DEVICE):
        assert make(3).device.type == DEVICE
    assert make(3).device.type == "cpu"


def test_strides_and_dtypes_are_those_of_the_cpu() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool):
        x = torch.ones(2, 3, 4).to(dtype).transpose(0, 2)
        there = x.to(DEVICE)
        assert (there.dtype, there.stride(), there.shape) == (dtype, x.stride(), x.shape)
        assert torch.equal(there.contiguous().cpu(), x)


def test_addresses_tell_tensors_apart_and_lead_nowhere() -> None:
    x = far(2, 2)
    assert x.data_ptr() == x.detach().data_ptr() == x[:].data_ptr()
    assert len({x.data_ptr(), x[1:].data_ptr(), x.clone().data_ptr()}) == 3
    assert x.data_ptr() >= standin.FAR


# Laws of right code, on a device where mixing raises


def on_device(kind: Any) -> Any:
    """A right implementation that makes its own tensors where its inputs are."""

    class OnDevice(kind):  # type: ignore[misc, valid-type]
        def run(self, x: Any) -> Any:
            with next(each.device for each in x.values() if isinstance(each, Tensor)):
                return super().run(x)

    return OnDevice()


def torch_only(kind: Any) -> Any:
    """The layer without the choices that launch Triton kernels."""
    made = kind()
    choices = tuple((name, tuple(value for value in values if value != "fla")) for name, values in made.domain.choices)
    made.domain = dataclasses.replace(made.domain, choices=choices)
    return made


PATH = "gdn_layer"
RIGHT: dict[str, Any] = {
    "rule": on_device(base.Chunkwise),
    "kda": on_device(gates.StepwiseKda),
    "delta_rule": on_device(gates.StepwiseDelta),
    "gates_inside": on_device(gates.Stepwise),
    "conv": on_device(modules.Conv),
    "gate": on_device(modules.Gate),
    "kda_gate": on_device(modules.KdaGate),
    "l2norm": on_device(modules.L2Norm),
    "gated_norm": on_device(modules.GatedNorm),
    "pool": on_device(base.Serving),
    "pool_in_blocks": on_device(pools.InBlocks),
    "layer": on_device(base.Layered),
    PATH: torch_only(type(adapter_of("gdn/layer"))),
}
FIELDS = {"ranks": 4, "exchange_ranks": 8}  # smaller meshes, and sequences as short as they can be drawn
PAIRS = [
    (name, law.name)
    for name, adapter in RIGHT.items()
    for law in (book_of(adapter.domain).laws[law] for law in book_of(adapter.domain).about(adapter.domain.operation))
    if law.needs(adapter.domain) is None
]


def outcomes(name: str, law: str, count: int, monkeypatch: pytest.MonkeyPatch, device: str = DEVICE) -> list[tuple[Run, Outcome]]:
    """What a few cases of a law come to, on the stand-in unless another device is named."""
    adapter = RIGHT[name]
    monkeypatch.setitem(run_module._LOADED, name, adapter)
    domain: Any = adapter.domain
    domain = dataclasses.replace(domain, **FIELDS) if isinstance(domain, PathDomain) else domain
    found: list[tuple[Run, Outcome]] = []

    def look(example: Example) -> None:
        run = Run(law, name, example, "ieee", device)
        found.append((run, execute(run)))

    seeded(book_of(domain).laws[law].draw(domain), 1, count, look)
    return found


def failures(found: list[tuple[Run, Outcome]]) -> list[Any]:
    return [
        (str(run), each.verdict, each.reason, each.fault, each.findings[:1])
        for run, each in found
        if each.verdict not in (Verdict.HOLDS, Verdict.BLIND)
    ]


@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_right_code_holds_the_law_on_the_device(name: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(name, law, 2, monkeypatch)
    assert failures(found) == []
    assert found


def test_every_law_of_every_book_is_asked_on_the_device() -> None:
    asked = {(type(RIGHT[name].domain), law) for name, law in PAIRS}
    for domain in {type(adapter.domain) for adapter in RIGHT.values()}:
        every = {law for adapter in RIGHT.values() if isinstance(adapter.domain, domain) for law in book_of(adapter.domain).laws}
        assert {law for kind, law in asked if kind is domain} == every, domain


# Mistakes of gdn-verify's own, none of which shows on a CPU


def law_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of a path made its tensors on the device (the version of 20 to 23 November 2026): nothing over NCCL was decided."""
    monkeypatch.setattr(RankBench, "law_device", property(lambda self: self.device, lambda self, value: None), raising=False)


def index_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's tokens are selected on the device, by an index that is on the CPU."""
    plain = RankBench._tokens
    monkeypatch.setattr(RankBench, "_tokens", lambda self, case, rank, x: plain(self, case, rank, x.to(self.device)))


def bounds_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are on the CPU, outputs on the device."""
    plain = AdapterBench.bounds

    def bounds(self: AdapterBench, *inputs: Any) -> Any:
        made = plain(self, *inputs)
        return {name: dataclasses.replace(each, value=each.value.cpu(), allowed=each.allowed.cpu()) for name, each in made.items()}

    monkeypatch.setattr(AdapterBench, "bounds", bounds)


def scalar_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A law of paths, whose tensors are on the CPU, makes a factor on the device."""
    law = PATH_LAWS["parallel"]

    def check(bench: Any, example: Example) -> Any:
        for name, got, want in law.check(bench, example):
            yield name, got * torch.tensor(1.0, device=bench.device, dtype=got.dtype), want

    monkeypatch.setitem(PATH_LAWS, "parallel", dataclasses.replace(law, check=check))


def sum_of_ranks_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks hold is added to zeros that are on the CPU."""
    monkeypatch.setattr(
        comm, "_added", lambda xs: torch.zeros(xs.shape[1:], dtype=xs.dtype, device="cpu") + xs.sum(0, dtype=xs.dtype)
    )


def mask_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of a chunk's upper triangle is made on the CPU."""
    monkeypatch.setattr(
        disturbed, "_upper", lambda tokens, device: torch.ones(tokens, tokens, dtype=torch.bool, device="cpu").triu(1)
    )


PLANTED = (
    (law_on_the_device, PATH, "parallel"),
    (index_on_the_cpu, PATH, "parallel"),
    (bounds_on_the_cpu, "rule", "oracle"),
    (scalar_on_the_device, PATH, "parallel"),
    (sum_of_ranks_on_the_cpu, PATH, "parallel"),
    (mask_on_the_cpu, "rule", "oracle"),
)


@pytest.mark.parametrize(("plant", "name", "law"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_mistake_that_no_cpu_shows_is_shown(
    plant: Callable[[pytest.MonkeyPatch], None], name: str, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert failures(outcomes(name, law, 4, monkeypatch, "cpu")) == []
    found = failures(outcomes(name, law, 4, monkeypatch))
    assert found
    assert all("Expected all tensors to be on the same device" in reason + str(findings) for _, _, reason, _, findings in found)
    assert all(fault.startswith("RuntimeError at ") for _, verdict, _, fault, _ in found if verdict is Verdict.UNKNOWN)
