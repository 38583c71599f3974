"""Patches of Triton's interpreter: every access of a kernel must stay in the memory of its tensor."""

from typing import Any

import numpy as np

from verify.interpreter.internals import get, put
from verify.interpreter.memory import OutOfBounds, pointing, span_of, tensors_of


def patch_access() -> None:
    """Check that every access stays in the memory that its pointer was made from.

    The type of a pointer carries this memory through all arithmetic. What lies between two tensors, or after the last one, is
    chance. So an error names the tensor that the access left, not the place that it reached. Pointers made from integers are not
    checked.
    """
    convert = get("interpreter._implicit_cvt")
    accesses = ("masked_load", "masked_store", "atomic_rmw", "atomic_cas")
    plain = {name: get(f"InterpreterBuilder.create_{name}") for name in (*accesses, "bitcast", "select", "cat", "join")}

    def implicit_cvt(arg: Any) -> Any:
        result = convert(arg)
        if hasattr(arg, "data_ptr"):
            result.handle.dtype.spans = tuple(map(span_of, tensors_of(arg)))
            width = max(1, result.handle.dtype.element_ty.primitive_bitwidth // 8)
            result.handle.dtype.recast = arg.data_ptr() % width != 0  # such an argument may be a view that starts inside an element
        return result

    def check_inside(pointers: Any, mask: Any, verb: str) -> None:
        spans, data = getattr(pointers.dtype, "spans", ()), pointers.data
        if not spans or not data.size:
            return
        width = max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)
        start, end = spans[0]
        if data.size == 1:
            low = high = data.item()
        else:
            low, high = np.minimum.reduce(data, axis=None), np.maximum.reduce(data, axis=None)
        if start <= low and high <= end - width:
            return
        if mask is not None:
            data = data[np.broadcast_to(np.asarray(mask.data, dtype=bool), data.shape)]
        # Byte offsets from the start of each memory; negative before it.
        into = {span: (data - np.uint64(span[0])).view(np.int64) for span in spans}
        left = {span: np.maximum(-at, at - (span[1] - span[0] - width)) for span, at in into.items()}
        astray = np.minimum.reduce(list(left.values())) > 0
        if not astray.any():
            return
        span = min(spans, key=lambda memory: left[memory][astray].max())
        far = left[span][astray].argmax()
        side = "before" if into[span][astray][far] < 0 else "after"
        count, distance = int(astray.sum()), -(-int(left[span][astray][far]) // width)
        raise OutOfBounds(f"{verb} {count} element{'s' * (count > 1)} up to {distance} {side}", span)

    def create_masked_load(self: Any, pointers: Any, mask: Any, *others: Any, **options: Any) -> Any:
        check_inside(pointers, mask, "loads")
        return plain["masked_load"](self, pointers, mask, *others, **options)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        check_inside(pointers, mask, "stores")
        return plain["masked_store"](self, pointers, value, mask, *options)

    def create_atomic_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        check_inside(pointers, mask, "updates")
        return plain["atomic_rmw"](self, op, pointers, value, mask, *options)

    def create_atomic_cas(self: Any, pointers: Any, *others: Any) -> Any:
        check_inside(pointers, None, "updates")
        return plain["atomic_cas"](self, pointers, *others)

    def retyped(handle: Any, *sources: Any) -> Any:
        """The handle, with the memories of all `sources` if it holds pointers."""
        if handle.dtype.is_ptr():
            handle.dtype = pointing(handle.dtype, *sources)
        return handle

    def create_bitcast(self: Any, source: Any, dst_type: Any) -> Any:
        return retyped(plain["bitcast"](self, source, dst_type), source)

    def create_select(self: Any, cond: Any, lhs: Any, rhs: Any) -> Any:
        return retyped(plain["select"](self, cond, lhs, rhs), lhs, rhs)

    def create_cat(self: Any, lhs: Any, rhs: Any) -> Any:
        return retyped(plain["cat"](self, lhs, rhs), lhs, rhs)

    def create_join(self: Any, lhs: Any, rhs: Any) -> Any:
        return retyped(plain["join"](self, lhs, rhs), lhs, rhs)

    put("interpreter._implicit_cvt", implicit_cvt)
    patches: list[Any] = [create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas]
    for patch in (*patches, create_bitcast, create_select, create_cat, create_join):
        put(f"InterpreterBuilder.{patch.__name__}", patch)
