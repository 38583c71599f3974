"""Refusals: what an implementation does with illegal input. It is reported, not judged."""

from typing import Any

import torch

from oracles.operation import Inputs
from properties.books import book_of
from verify.adapters.base import Adapter


def probe(adapter: Adapter, name: str) -> str:
    """What the adapter does with illegal input: "refuses (...)" or "answers silently". It may also crash its process."""
    call = book_of(adapter.domain).illegal.call(name, adapter.domain)
    return f"not asked: {call}" if isinstance(call, str) else _asked(adapter, name, *call)


def _asked(adapter: Adapter, name: str, case: Any, inputs: Inputs) -> str:
    try:
        case.spec.check(inputs)
    except ValueError:
        pass
    else:
        raise AssertionError(f"our own contract accepts {name}")
    # Of their own memory each: a view may rightly reach the rest of what it is cut from.
    whole = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    try:
        adapter.run(inputs.replaced(**whole))
    except Exception as error:
        kind = type(error).__name__  # of verify/interpreter, which needs Triton, two say what the kernels did
        did = {"OutOfBounds": "reads or writes outside its tensors", "Race": "lets two programs write the same memory"}
        return did.get(kind, f"refuses ({kind})")
    return "answers silently"
