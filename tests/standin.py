"""A device for tests on a machine without a GPU: its tensors say `standin:0`, their numbers are on the CPU.

Code that mixes devices, forgets a copy or hands the host a device's memory raises here where it raises on CUDA, and works here
where it works on CUDA. `install()` registers the device once in a process. Then torch's functions take `device="standin"`.

A tensor of the device is a `StandIn`. It holds a CPU tensor, `inner`, with its numbers, shape and strides. torch gives each
operation on such a tensor to `_run`, below autograd, and `_run` calls the same operation with the inner tensors.

The rules are those of torch 2.11 on an H100: about 1,000 operations were called there with each argument on the CPU in turn.
tests/laws/test_standin.py has those that matter here, and asserts the same of CUDA where it finds a GPU.
"""

import contextlib
import copy
import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch

DEVICE = "standin"
CPU = torch.device("cpu")
MEMORY = 2**37  # bytes, as many as a large GPU has
FAR = 2**60  # added to addresses: no process has memory there, so that a host that reads through a pointer of the device fails

# Operations whose arguments may be on two devices. All others, also those that nobody tried, need all on one.
# The numbers are places where one CPU tensor without dimensions is taken for a number: TensorIteratorConfig::allow_cpu_scalars.
_BINARY = """add sub rsub mul div floor_divide fmod remainder pow atan2 hypot copysign heaviside xlogy maximum minimum fmax fmin
    eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift allclose dist""".split()  # noqa: SIM905
NUMBERS = {name: {0, 1} for name in _BINARY} | {name: {1} for name in ("logical_and", "logical_or", "logical_xor")}
NUMBERS |= {"addcmul": {2}, "lerp": {2}, "masked_fill": {2}, "where": {0, 1, 2}}
COPIES = {"copy", "fill", "is_same_size", "select_scatter", "slice_scatter", "diagonal_scatter"}  # they read from any device
INDEXES = {"index", "_unsafe_index"}  # `x[i]` copies i to the device of x, but not from a device to the CPU
PUTS = {"index_put", "_index_put_impl", "_unsafe_index_put"}  # `x[i] = y` copies i to the device of x, and y if it is one number
PRODUCTS = {"mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "addbmm", "baddbmm"}  # cuBLAS multiplies no integers


class Memory(torch.UntypedStorage):
    """The allocation behind a tensor of the device."""

    inner: torch.UntypedStorage

    def data_ptr(self) -> int:
        return self.inner.data_ptr() + FAR if self.inner.nbytes() else 0

    def nbytes(self) -> int:
        return self.inner.nbytes()


class StandIn(Tensor):
    """A tensor of the device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # it would make results of this class, which `_run` does

    @staticmethod
    def __new__(cls, inner: Tensor) -> "StandIn":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        stand_in: StandIn = Tensor._make_wrapper_subclass(cls, inner.shape, device=_PLACE, **layout)
        stand_in.inner = inner
        return stand_in

    @classmethod
    def __torch_dispatch__(cls, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr() + FAR if self.inner.numel() else 0

    def untyped_storage(self) -> Memory:
        memory: Any = super().untyped_storage()  # it has no bytes, and torch hands this very object to `set_`
        memory.__class__, memory.inner = Memory, self.inner.untyped_storage()
        return memory

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: "StandIn") -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    # What tensors of CUDA have, and torch refuses to classes of Python or does wrongly for them.

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.detach().cpu()!r}"[:-1] + f", device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.inner, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: Any) -> "StandIn":
        function, arguments = self.__reduce_ex__(None)
        return memo.setdefault(id(self), function(*copy.deepcopy(arguments, memo)))


def _rebuilt(inner: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:  # noqa: FBT001
    return torch.nn.Parameter(StandIn(inner), requires_grad) if is_parameter else StandIn(inner).requires_grad_(requires_grad)


@functools.cache
def _schema(op: OpOverload) -> tuple[str, tuple[int | str, ...]]:
    """The operation's name, without the underscore of one that works in place, and the places of what it changes and returns.

    An argument's place is its position, or its name where it is given by name only.
    """
    arguments = enumerate(op._schema.arguments)
    places = {str(a.alias_info.before_set): a.name if a.kwarg_only else place for place, a in arguments if a.alias_info}
    aliases = [result.alias_info for result in op._schema.returns]
    written = tuple(places[str(alias.before_set)] for alias in aliases if alias is not None and alias.is_write)
    return op._schema.name.removeprefix("aten::").removesuffix("_"), written


def _run(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the operation returns. RuntimeError where its CUDA kernel does not take arguments that are where these are."""
    (name, written), near = _schema(op), []
    inner = [_inner(value, place, near) for place, value in enumerate(args)]
    named = {word: _inner(value, word, near) for word, value in kwargs.items()}
    if near and not _may_mix(name, written, args, near):
        if name in INDEXES:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        both = f"{_PLACE} and cpu! (in {op})"
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {both}")
    if name in PRODUCTS and not inner[0].is_floating_point():
        raise NotImplementedError(f"\"{op}\" not implemented for '{inner[0].dtype}' on {_PLACE}")
    place = kwargs.get("device")
    if place is not None:
        named["device"] = CPU
    results = op(*inner, **named)
    if written:
        changed = tuple(args[place] if isinstance(place, int) else kwargs[place] for place in written)
        for tensor in changed:
            if isinstance(tensor, StandIn):
                _follow(tensor)
        return changed if len(changed) > 1 else changed[0]
    if (place or _PLACE).type == "cpu" or (near and near[0][0] == 0 and name in {*COPIES, *PUTS, "index_fill"}):
        return results  # the latter return a changed copy of the first argument, on its device
    return _outer(results)


def _inner(value: Any, place: int | str, near: list[tuple[int | str, Tensor]]) -> Any:
    """The value with inner tensors instead of the device's. CPU tensors in it are added to `near`, with the argument's place."""
    kind = value.__class__
    if kind is StandIn or kind is Memory:
        return value.inner
    if kind is list or kind is tuple:
        return [_inner(item, place, near) for item in value]
    if isinstance(value, Tensor):
        near.append((place, value))
    elif isinstance(value, torch.Generator | torch.UntypedStorage):
        raise RuntimeError(f"Expected a '{DEVICE}' device type for {kind.__name__} but found '{value.device.type}'")  # noqa: TRY004
    return value


def _outer(results: Any) -> Any:
    """The results, with all tensors among them on the device."""
    if isinstance(results, Tensor):
        return StandIn(results)
    return type(results)(map(_outer, results)) if isinstance(results, list | tuple) else results


def _may_mix(name: str, written: tuple[int | str, ...], args: Sequence[Any], near: list[tuple[int | str, Tensor]]) -> bool:
    """Whether CUDA takes an operation whose arguments `near` are on the CPU, while others are on the device."""
    places = {place for place, _ in near}
    if name in INDEXES:
        return 0 not in places
    if name in PUTS and (0 in places) != (2 in places) and args[2].dim():  # one number of the CPU may be put where a mask is set
        mask = args[1][0]
        return args[2].numel() == 1 and 2 in places and isinstance(mask, StandIn) and mask.dtype == torch.bool and len(args[1]) == 1
    if name == "index_fill":  # the index must be beside the tensor, the value is read as a number
        return (0 in places) == (2 in places)
    alone = len(near) == 1 or name == "where"
    numbers = alone and places <= NUMBERS.get(name, set()) - set(written) and not any(tensor.dim() for _, tensor in near)
    return numbers or name in COPIES or name in PUTS


def _follow(tensor: StandIn) -> None:
    """Give the tensor the shape and strides of its inner one, if an operation changed those."""
    layouts = [(x.storage_offset(), x.shape, x.stride()) for x in (tensor, tensor.inner)]
    if layouts[0] != layouts[1]:
        with no_dispatch(), torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Meta):  # whose `set_` touches no numbers
            torch.ops.aten.set_.source_Storage_storage_offset(tensor, Tensor.untyped_storage(tensor), *layouts[1])


class Module:
    """What `torch.get_device_module(DEVICE)` gives: of torch.cuda what there is to say of one device."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = memory_reserved = memory_allocated = staticmethod(lambda *_: 0)
    synchronize = empty_cache = manual_seed_all = staticmethod(lambda *_: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    mem_get_info = staticmethod(lambda *_: (MEMORY, MEMORY))
    get_device_name = staticmethod(lambda *_: "stand-in")
    get_device_properties = staticmethod(lambda *_: types.SimpleNamespace(name="stand-in", total_memory=MEMORY))
    current_stream = staticmethod(lambda *_: types.SimpleNamespace(synchronize=lambda: None))
    device = staticmethod(lambda *_: contextlib.nullcontext())
    # torch.utils.checkpoint needs these three. Random numbers of the device are the CPU's.
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))


def _check_gradients(gradients: Sequence[Any], devices: Sequence[torch.device | None], what: str) -> None:
    """RuntimeError for a gradient on another device. Autograd raises it too, but not for classes of Python."""
    for index, (gradient, device) in enumerate(zip(gradients, devices, strict=False)):
        if isinstance(gradient, Tensor) and gradient.dim() and device is not None and gradient.device != device:
            raise RuntimeError(f"{what} at index {index} - expected device {device} but got {gradient.device}")


def _apply(apply: Any, node: Any, *args: Any) -> Any:
    """What the backward of an autograd.Function returns."""
    gradients = apply(node, *args)
    devices = [None if edge is None else edge._input_metadata[number].device for edge, number in node.next_functions]
    returned = gradients if isinstance(gradients, tuple) else (gradients,)
    _check_gradients(returned, devices, f"Function {node.name()} returned an invalid gradient")
    return gradients


def _make_grads(make_grads: Any, outputs: Any, gradients: Any, is_grads_batched: Any) -> Any:
    """What torch.autograd makes of the gradients that a backward pass starts from."""
    _check_gradients(gradients, [getattr(output, "device", None) for output in outputs], "invalid gradient")
    return make_grads(outputs, gradients, is_grads_batched)


@functools.cache
def install() -> None:
    """Register the device, once in a process."""
    global _PLACE
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())
    _PLACE = torch.device(DEVICE, 0)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES.extend((everything, aten))
    # Functions that make tensors have none among their arguments, and torch does not ask `__torch_dispatch__`.
    everything.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    # torch.tensor switches `__torch_dispatch__` off, and the fallback ends in an assertion of torch where it meets a tensor.
    aten.impl("_copy_from", lambda source, target, _=False: _run(torch.ops.aten.copy_.default, (target, source), {}), "PrivateUse1")
    aten.impl("_local_scalar_dense", lambda tensor: tensor.inner.item(), "PrivateUse1")
    BackwardCFunction.apply = functools.partialmethod(functools.partial(_apply, BackwardCFunction.apply))
    torch.autograd._make_grads = functools.partial(_make_grads, torch.autograd._make_grads)


_LIBRARIES: list[torch.library.Library] = []  # what they register ends with them
_PLACE: torch.device
