"""Finds out what an implementation does with illegal input. This is reported, not judged."""

from typing import Any

import torch

from oracles.operation import Inputs
from properties.books import book_of
from properties.laws import with_one_state, with_options
from verify.adapters.base import Adapter


def probe(adapter: Adapter, name: str) -> str:
    """Call the adapter with the illegal input `name` and say what it does, such as "refuses (ValueError)" or "answers silently".

    The call may also crash the process. "not run: ..." says why the input does not exist for this domain.
    """
    call = book_of(adapter.domain).illegal.call(name, adapter.domain)
    return f"not run: {call}" if isinstance(call, str) else _reaction(adapter, name, *call)


def _reaction(adapter: Adapter, name: str, case: Any, inputs: Inputs) -> str:
    try:
        case.spec.check(inputs)
    except ValueError:
        pass
    else:
        raise AssertionError(f"the contract of gdn-verify accepts the illegal input {name}")
    # Each tensor gets memory of its own: through a view, a kernel may legally reach the rest of the tensor that it was cut from.
    whole = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    try:
        adapter.run(with_options(adapter.domain, with_one_state(adapter.domain, inputs.replaced(**whole))))
    except Exception as error:
        kind = type(error).__name__  # by name, since verify/interpreter, which defines two of them, needs Triton
        did = {"OutOfBounds": "reads or writes outside its tensors", "Race": "lets its programs race for the same memory"}
        return did.get(kind, f"refuses ({kind})")
    return "answers silently"
