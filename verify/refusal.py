"""Illegal input: our contract refuses it; what an implementation does with it is reported, not judged.

A check can cost a device synchronisation, so a kernel may leave it to its caller. But its users should know.
"""

from collections.abc import Callable

import torch

from oracles.case import Case
from oracles.operation import Inputs
from verify.adapter import Adapter
from verify.bench import contract

_PACKED = Case((5, 12), packed=True, heads=2, value_heads=4, state="zero", backward=False)


def _offsets(*values: int) -> Callable[[Inputs], Inputs]:
    return lambda x: x.replaced(cu_seqlens=torch.tensor(values))


def _value_heads(x: Inputs) -> Inputs:
    return x.replaced(v=x.v[:, :, :3], g=x.g[:, :, :3], beta=x.beta[:, :, :3], state=x.state[:, :3])


ILLEGAL: dict[str, Callable[[Inputs], Inputs]] = {
    "cu_seqlens that decrease": _offsets(0, 12, 5, 17),
    "cu_seqlens that end before the tokens do": _offsets(0, 5, 16),
    "cu_seqlens that do not start at 0": _offsets(1, 5, 17),
    "one initial state for two sequences": lambda x: x.replaced(state=x.state[:1]),
    "HV not a multiple of H": _value_heads,
    "g of another length": lambda x: x.replaced(g=x.g[:, :-1]),
    "q and k of different widths": lambda x: x.replaced(q=x.q[..., :8].contiguous()),
}


def illegal(name: str) -> Inputs:
    """The illegal inputs of that name: a legal packed call with one argument made wrong."""
    return ILLEGAL[name](_PACKED.inputs())


def probe(adapter: Adapter, name: str) -> str:
    """What the adapter does with illegal input: "refuses (...)" or "answers silently". It may also crash its process."""
    if not adapter.domain.packed or not adapter.domain.initial_state:
        return "not asked: packed input with a state is unsupported"
    inputs = illegal(name)
    try:
        contract(_PACKED, inputs)
    except ValueError:
        pass
    else:
        raise AssertionError(f"our own contract accepts {name}")
    try:
        adapter.run(inputs)
    except Exception as error:
        return f"refuses ({type(error).__name__})"
    return "answers silently"
