"""A device for tests on a machine without a GPU: its tensors say `standin:0`, their numbers are on the CPU.

Code that mixes devices, forgets a copy or hands the host a device's memory raises here where it raises on CUDA, and works here
where it works on CUDA. `install()` registers the device once in a process. Then torch's functions take `device="standin"`.

A tensor of the device is a `StandIn`. It holds a CPU tensor, `inner`, with its numbers, shape and strides. torch gives each
operation on such a tensor to `_run`, below autograd, and `_run` calls the same operation with the inner tensors.

The rules are those of torch 2.11 on an H100: about 1,000 operations were called there with each argument on the CPU in turn.
tests/test_standin.py has those that matter here.
"""

import contextlib
import copy
import dataclasses
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
FAR = 2**60  # added to addresses: no process has memory there, so a host that reads through a pointer of the device fails

# Operations whose arguments may be on two devices. All others, also those that are not known here, need one device.
_BINARY = [
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "floor_divide",
    "fmod",
    "remainder",
    "pow",
    "atan2",
    "hypot",
    "copysign",
    "heaviside",
    "xlogy",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "allclose",
    "dist",
]
# Places where one CPU tensor without dimensions is taken for a number: TensorIteratorConfig::allow_cpu_scalars.
NUMBERS = {name: {0, 1} for name in _BINARY} | {name: {1} for name in ("logical_and", "logical_or", "logical_xor")}
NUMBERS |= {"addcmul": {2}, "lerp": {2}, "masked_fill": {2}, "where": {0, 1, 2}}
COPIES = {"copy", "fill", "is_same_size", "select_scatter", "slice_scatter", "diagonal_scatter"}  # read wherever a tensor is
INDEXES = {"index", "_unsafe_index"}  # `x[i]` copies i to the device of x, but never to the CPU
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
    __torch_function__ = torch._C._disabled_torch_function_impl  # it would turn results into this class, which `_run` does

    @staticmethod
    def __new__(cls, inner: Tensor) -> "StandIn":
        made: StandIn = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_PLACE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr() + FAR if self.inner.numel() else 0

    def untyped_storage(self) -> Memory:
        memory: Any = super().untyped_storage()  # without bytes; torch hands this object to `set_`
        memory.__class__, memory.inner = Memory, self.inner.untyped_storage()
        return memory

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: "StandIn") -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    # What torch refuses to every class but its own, and tensors of CUDA have.

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
        return _rebuilt, (self.inner, self.requires_grad, self.__dict__.get("_is_param", False))

    def __deepcopy__(self, memo: Any) -> "StandIn":
        function, arguments = self.__reduce_ex__(4)
        return memo.setdefault(id(self), function(*copy.deepcopy(arguments, memo)))


def _rebuilt(inner: Tensor, requires_grad: bool, is_param: bool) -> StandIn:  # noqa: FBT001
    tensor = StandIn(inner).requires_grad_(requires_grad)
    return torch.nn.Parameter(tensor, requires_grad) if is_param else tensor


@dataclasses.dataclass(frozen=True)
class Operation:
    """What `_run` reads off an operation's schema, once. A place is an argument's position, or the name of one without."""

    name: str  # without the underscore of operations that work in place
    written: tuple[int | str, ...]  # the places of arguments that are written to and returned


@functools.cache
def _operation(op: OpOverload) -> Operation:
    arguments = enumerate(op._schema.arguments)
    places = {str(a.alias_info.before_set): a.name if a.kwarg_only else place for place, a in arguments if a.alias_info}
    returned = [result.alias_info for result in op._schema.returns]
    written = tuple(places[str(alias.before_set)] for alias in returned if alias is not None and alias.is_write)
    return Operation(op._schema.name.removeprefix("aten::").removesuffix("_"), written)


def _run(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the operation returns. RuntimeError where its CUDA kernel does not take arguments that are where these are."""
    known, near = _operation(op), []
    inner = [_inner(value, place, near) for place, value in enumerate(args)]
    named = {name: _inner(value, name, near) for name, value in kwargs.items()}
    if near and not _may_mix(known, args, near):
        what = (
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            if known.name in INDEXES
            else (f"Expected all tensors to be on the same device, but found at least two devices, {_PLACE} and cpu! (in {op})")
        )
        raise RuntimeError(what)
    if known.name in PRODUCTS and not inner[0].is_floating_point():
        raise NotImplementedError(f"\"{op}\" not implemented for '{inner[0].dtype}' on {_PLACE}")
    place = kwargs.get("device")
    if place is not None:
        named["device"] = CPU
    results = op(*inner, **named)
    if known.written:
        written = tuple(args[place] if isinstance(place, int) else kwargs[place] for place in known.written)
        for tensor in written:
            if isinstance(tensor, StandIn):
                _follow(tensor)
        return written if len(written) > 1 else written[0]
    if place is not None:
        return results if place.type == "cpu" else StandIn(results)
    if near and near[0][0] == 0 and (known.name in COPIES or known.name in PUTS or known.name == "index_fill"):
        return results  # these return what they were first given, changed
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
        raise RuntimeError(f"Expected a '{DEVICE}' device type for {kind.__name__.lower()} but found '{value.device.type}'")  # noqa: TRY004 - as CUDA's
    return value


def _outer(results: Any) -> Any:
    """The results, all tensors among them on the device."""
    if isinstance(results, Tensor):
        return StandIn(results)
    return type(results)(map(_outer, results)) if isinstance(results, list | tuple) else results


def _may_mix(known: Operation, args: Sequence[Any], near: list[tuple[int | str, Tensor]]) -> bool:
    """Whether CUDA takes an operation whose arguments `near` are on the CPU, though others are on the device."""
    places = {place for place, _ in near}
    if known.name in COPIES:
        return True
    if known.name in INDEXES:
        return 0 not in places
    if known.name == "index_fill":  # `value` has no dimensions and is read as a number
        return (0 in places) == (2 in places)
    if known.name in PUTS:
        (_, indices, value), mask = args[:3], args[1][0]
        if (0 in places) == (2 in places) or value.dim() == 0:
            return True
        # CUDA fills where the only index is a mask of the device and the value is one number of the CPU.
        return value.numel() == 1 and 2 in places and isinstance(mask, StandIn) and mask.dtype == torch.bool and len(indices) == 1
    numbers = NUMBERS.get(known.name, set()) - set(known.written)
    alone = len(near) == 1 or known.name == "where"
    return alone and places <= numbers and all(tensor.dim() == 0 for _, tensor in near)


def _follow(tensor: StandIn) -> None:
    """Give the tensor the shape and strides of its inner one, if an operation changed those."""
    inner = tensor.inner
    if tensor.shape == inner.shape and tensor.stride() == inner.stride() and tensor.storage_offset() == inner.storage_offset():
        return
    layout = inner.storage_offset(), inner.shape, inner.stride()
    with no_dispatch(), torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Meta):  # where `set_` touches no numbers
        torch.ops.aten.set_.source_Storage_storage_offset(tensor, Tensor.untyped_storage(tensor), *layout)


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


def _check_gradients(gradients: Sequence[Any], expected: Sequence[torch.device | None], what: str) -> None:
    """RuntimeError for a gradient on another device. Autograd raises it too, but not for classes of Python."""
    for index, (gradient, device) in enumerate(zip(gradients, expected, strict=False)):
        if isinstance(gradient, Tensor) and gradient.dim() and device is not None and gradient.device != device:
            raise RuntimeError(f"{what} at index {index} - expected device {device} but got {gradient.device}")


def _checked_apply(apply: Any, node: Any, *args: Any) -> Any:
    """What the backward of an autograd.Function returns."""
    gradients = apply(node, *args)
    inputs = [None if edge is None else edge._input_metadata[number].device for edge, number in node.next_functions]
    returned = gradients if isinstance(gradients, tuple) else (gradients,)
    _check_gradients(returned, inputs, f"Function {node.name()} returned an invalid gradient")
    return gradients


def _checked_make_grads(make_grads: Any, outputs: Any, gradients: Any, is_grads_batched: Any) -> Any:
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
    # Functions that make tensors have no tensor among their arguments, so that torch does not ask `__torch_dispatch__`.
    everything.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    # torch.tensor switches `__torch_dispatch__` off, and the fallback ends in an assertion where it meets a tensor.
    aten.impl("_copy_from", lambda source, target, _=False: _run(torch.ops.aten.copy_.default, (target, source), {}), "PrivateUse1")
    aten.impl("_local_scalar_dense", lambda tensor: tensor.inner.item(), "PrivateUse1")
    BackwardCFunction.apply = functools.partialmethod(functools.partial(_checked_apply, BackwardCFunction.apply))
    torch.autograd._make_grads = functools.partial(_checked_make_grads, torch.autograd._make_grads)


_LIBRARIES: list[torch.library.Library] = []  # their registrations end with them
_PLACE: torch.device
