"""A device for tests on a machine without a GPU: its tensors say `standin:0`, their numbers are on the CPU.

Code that mixes devices, forgets a copy or reads a tensor where the host cannot raises on the stand-in where it raises on CUDA.
`install()` registers the device once in a process. From then on torch's calls take `device="standin"`.

A tensor on the device is a `StandIn`. It has no memory of its own: it holds a CPU tensor, `inner`, of the same shape, strides and
dtype. torch hands each operation with such a tensor to `_run`, below autograd, which runs the operation on the inner tensors.
"""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch

DEVICE = "standin"
MEMORY = 2**37  # bytes, those of a large GPU
FAR = 2**60  # added to addresses: no process has memory there, so that the host cannot read what a pointer leads to


class Memory(torch.UntypedStorage):
    """The allocation behind a tensor of the device. Addresses compare like those of tensors."""

    def data_ptr(self) -> int:
        return super().data_ptr() + FAR if self.nbytes() else 0


class StandIn(Tensor):
    """A tensor that is on the device by all that torch says of it."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # results are of this class because `_run` makes them

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
        storage: Any = self.inner.untyped_storage()  # torch keeps this object as long as the memory, also for views
        storage.__class__ = Memory
        return storage

    # torch refuses these three to every class but its own, for which CUDA has them.

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.detach().cpu()!r}"[:-1] + f", device='{self.device}')"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What `_run` knows of an operation: which arguments are written to and returned, and which may lie on the CPU."""

    written: tuple[int | str, ...]  # the place of each, or its name
    scalars: frozenset[int | str]  # places where a CPU tensor without dimensions is let through
    most: int  # as many of those at once
    hosts: frozenset[int | str]  # places where any CPU tensor is let through
    floats: bool  # no integers: CUDA has no such kernel


ANYWHERE = frozenset(range(4))
# Operations whose CUDA kernels say themselves what may lie on the CPU: TensorCompare.cpp, IndexKernel.cu, Fill.cpp, Copy.cpp.
SCALARS = {
    "where": ANYWHERE,
    "masked_fill": {2},
    "index_fill": {3},
    "index_put": {2},
    "_index_put_impl": {2},
    "_unsafe_index_put": {2},
}
HOSTS = {"copy_": ANYWHERE, "_copy_from": ANYWHERE, "fill_": ANYWHERE, "index": {1}, "_unsafe_index": {1}, "index_put": {1}}
PRODUCTS = {"mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm"}  # cuBLAS multiplies no integers


@functools.cache
def _rule(op: OpOverload) -> Rule:
    arguments, name = op._schema.arguments, op._schema.name.removeprefix("aten::")
    places = {a.name: a.name if a.kwarg_only else i for i, a in enumerate(arguments)}
    aliases = {frozenset(a.alias_info.before_set): places[a.name] for a in arguments if a.alias_info is not None}
    returns = [r.alias_info for r in op._schema.returns]
    written = tuple(aliases[frozenset(r.before_set)] for r in returns if r is not None and r.is_write)
    bare = name.removesuffix("_")
    # TensorIterator, which computes elementwise operations, takes one CPU scalar as if it were a number, but not as an output.
    elementwise = torch.Tag.pointwise in op.tags and name != "equal"
    scalars = SCALARS.get(bare, places.values() if elementwise else ())
    hosts = HOSTS.get(name, HOSTS.get(bare, ()))
    most = len(arguments) if bare in SCALARS else 1
    return Rule(written, frozenset(scalars) - set(written), most, frozenset(hosts), bare in PRODUCTS)


def _run(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the operation returns, computed on the CPU; RuntimeError where CUDA has one because of where the arguments lie."""
    rule, near = _rule(op), []
    inner = [_inner(arg, place, near) for place, arg in enumerate(args)]
    named = {name: _inner(value, name, near) for name, value in kwargs.items()} if kwargs else kwargs
    if near:
        _refuse_mixed(op, rule, near, args)
    if rule.floats and not inner[0].is_floating_point():
        raise NotImplementedError(f"\"{op}\" not implemented for '{inner[0].dtype}' on a GPU")
    place = kwargs.get("device")
    if place is not None:
        named["device"] = _CPU
    out = op(*inner, **named)
    if rule.written:
        changed = tuple(args[place] if isinstance(place, int) else kwargs[place] for place in rule.written)
        for tensor in changed:
            if isinstance(tensor, StandIn):
                _follow(tensor)
        return changed if len(changed) > 1 else changed[0]
    return out if place is not None and place.type == "cpu" else _outer(out)


def _inner(value: Any, place: int | str, near: list[tuple[int | str, Tensor]]) -> Any:
    """A value with its tensors' inner ones; CPU tensors in it are added to `near` with the argument's place."""
    if value.__class__ is StandIn:
        return value.inner
    if isinstance(value, Tensor):
        near.append((place, value))
    elif value.__class__ in (list, tuple):
        return [_inner(item, place, near) for item in value]
    elif value.__class__ is torch.Generator and value.device.type == "cpu":
        raise RuntimeError(f"Expected a '{DEVICE}' device type for generator but found 'cpu'")
    return value


def _outer(out: Any) -> Any:
    if isinstance(out, Tensor):
        return StandIn(out)
    return type(out)(map(_outer, out)) if isinstance(out, list | tuple) else out


def _refuse_mixed(op: OpOverload, rule: Rule, near: list[tuple[int | str, Tensor]], args: Sequence[Any]) -> None:
    scalars = 0
    for place, tensor in near:
        if place in rule.hosts:
            continue
        if tensor.dim() == 0 and place in rule.scalars:
            scalars += 1
            continue
        if 1 in rule.hosts:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {_PLACE} and cpu! (in {op})"
        )
    if scalars > rule.most:
        raise RuntimeError("Trying to pass too many CPU scalars to non-CPU kernel!")


def _follow(tensor: StandIn) -> None:
    """Give the tensor the shape and strides that an operation has given its inner one."""
    inner = tensor.inner
    if tensor.shape == inner.shape and tensor.stride() == inner.stride():
        return
    with no_dispatch():
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            storage = Tensor.untyped_storage(tensor)
            torch.ops.aten.set_.source_Storage_storage_offset(tensor, storage, inner.storage_offset(), inner.shape, inner.stride())
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


class Module:
    """What `torch.get_device_module` gives: of torch.cuda what there is to ask of one device."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = memory_reserved = staticmethod(lambda *_: 0)
    synchronize = empty_cache = manual_seed_all = staticmethod(lambda *_: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    device = staticmethod(lambda *_: contextlib.nullcontext())
    mem_get_info = staticmethod(lambda *_: (MEMORY, MEMORY))
    get_device_name = staticmethod(lambda *_: "stand-in")
    get_device_properties = staticmethod(lambda *_: types.SimpleNamespace(name="stand-in", total_memory=MEMORY))
    current_stream = staticmethod(lambda *_: types.SimpleNamespace(synchronize=lambda: None))


@functools.cache
def install() -> None:
    """Register the device, once in a process."""
    global _PLACE
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())
    _PLACE = torch.device(DEVICE, 0)
    LIBRARIES.append(torch.library.Library("_", "IMPL"))
    LIBRARIES[-1].fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    # torch.tensor copies and reads with dispatch to classes turned off. torch's fallback is for calls without a tensor.
    LIBRARIES.append(torch.library.Library("aten", "IMPL"))
    LIBRARIES[-1].impl(
        "_copy_from", lambda source, target, _=False: _run(torch.ops.aten.copy_.default, (target, source), {}), "PrivateUse1"
    )
    LIBRARIES[-1].impl("_local_scalar_dense", lambda tensor: tensor.inner.item(), "PrivateUse1")


LIBRARIES: list[torch.library.Library] = []
_CPU = torch.device("cpu")
_PLACE: torch.device
