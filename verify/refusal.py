"""Illegal input: our contract refuses it; what an implementation does with it is reported, not judged.

A check can cost a device synchronisation, so a kernel may leave it to its caller. But its users should know.
"""

import dataclasses
from collections.abc import Callable

import torch

from oracles.case import Case
from oracles.module_case import ModuleCase
from oracles.operation import Inputs
from oracles.operations import RULES
from properties.modules import ModuleDomain
from verify.adapter import Adapter, Domain

_PACKED = Case((5, 12), packed=True, heads=2, value_heads=4, state="zero", backward=False)


def _offsets(*values: int) -> Callable[[Inputs], Inputs]:
    return lambda x: x.replaced(cu_seqlens=torch.tensor(values))


def _value_heads(x: Inputs) -> Inputs:
    heads = {name: x[name][:, :, :3] for name in ("v", "g", "beta") if x[name] is not None}
    return x.replaced(**heads, state=x.state[:, :3])


ILLEGAL: dict[str, Callable[[Inputs], Inputs]] = {
    "cu_seqlens that decrease": _offsets(0, 12, 5, 17),
    "cu_seqlens that end before the tokens do": _offsets(0, 5, 16),
    "cu_seqlens that do not start at 0": _offsets(1, 5, 17),
    "one initial state for two sequences": lambda x: x.replaced(state=x.state[:1]),
    "HV not a multiple of H": _value_heads,
    "g of another length": lambda x: x.replaced(g=x.g[:, :-1]),
    "q and k of different widths": lambda x: x.replaced(q=x.q[..., :8].contiguous()),
}


# Of a layer's modules: calls with one argument that would have to be broadcast, cut off or read beyond its end.
MODULES: dict[str, dict[str, Callable[[Inputs], Inputs]]] = {
    "causal_conv1d": {
        **{name: change for name, change in ILLEGAL.items() if name.startswith("cu_seqlens")},
        "one initial state for two sequences": lambda x: x.replaced(state=x.state[:1]),
        "an initial state of W - 1 columns": lambda x: x.replaced(state=x.state[..., 1:].contiguous()),
        "a weight of fewer channels": lambda x: x.replaced(weight=x.weight[:-1]),
        "a bias of one channel": lambda x: x.replaced(bias=x.bias[:1]),
    },
    **{
        operation: {
            "A_log of one head for two": lambda x: x.replaced(A_log=x.A_log[:1]),
            "dt_bias of one head for two": lambda x: x.replaced(dt_bias=x.dt_bias[:1]),
        }
        for operation in ("gdn_gate", "kda_gate")
    },
    "gated_rms_norm": {
        "a weight of one channel": lambda x: x.replaced(weight=x.weight[:1]),
        "z of one head for two": lambda x: x.replaced(z=x.z[:, :, :1]),
    },
}


def names_of(operation: str) -> list[str]:
    """The illegal inputs that an operation's implementations are asked about."""
    return list(ILLEGAL if operation in RULES else MODULES.get(operation, ()))


def illegal_module(name: str, domain: ModuleDomain) -> tuple[ModuleCase, Inputs]:
    """A legal call inside the domain, and its inputs with one argument made wrong."""
    if domain.operation == "causal_conv1d":
        packed = {"lengths": (5, 12), "packed": True} if domain.packed else {"lengths": (8, 8)}
        about = {**packed, "bias": domain.bias, "state": "zero" if domain.initial_state else "none"}
        about |= {"conv_width": domain.conv_widths[0], "final_state": domain.final_state}
    else:
        about = {"lengths": (8, 8), "heads": 2}
    if domain.operation in ("gdn_gate", "kda_gate"):
        about["beta"] = domain.beta
    case = ModuleCase(operation=domain.operation, dtype=domain.dtypes[0], backward=False, **about)  # type: ignore[arg-type]
    return case, MODULES[domain.operation][name](case.inputs())


def _unasked(name: str, domain: ModuleDomain) -> str | None:
    """Why a module is not asked: what its domain lacks."""
    lacks = {
        "cu_seqlens": (domain.packed, "packed input"),
        "one initial state": (domain.initial_state, "an initial state"),
        "an initial state": (domain.initial_state, "an initial state"),
        "a bias": (domain.bias, "a bias"),
    }
    found = next((what for start, (has, what) in lacks.items() if name.startswith(start) and not has), None)
    return None if found is None else f"not asked: {found} is unsupported"


def illegal(name: str, case: Case = _PACKED) -> Inputs:
    """The illegal inputs of that name: a legal packed call with one argument made wrong."""
    return ILLEGAL[name](case.inputs())


def probe(adapter: Adapter, name: str) -> str:
    """What the adapter does with illegal input: "refuses (...)" or "answers silently". It may also crash its process."""
    domain = adapter.domain
    if isinstance(domain, ModuleDomain):
        if reason := _unasked(name, domain):
            return reason
        module, inputs = illegal_module(name, domain)
        return _asked(adapter, name, module, inputs)
    if not isinstance(domain, Domain):
        return f"not asked of {domain.operation}"
    if not domain.packed or not domain.initial_state:
        return "not asked: packed input with a state is unsupported"
    if "none" not in domain.in_kernel:
        return "not asked: explicit gates are unsupported"
    if not domain.grouped_heads and ILLEGAL[name] is _value_heads:
        return "not asked: grouped heads are unsupported"
    if domain.operation == "delta_rule" and name.startswith("g "):
        return "not asked: the delta rule has no gate"
    case = dataclasses.replace(_PACKED, operation=domain.operation, dtype=domain.dtypes[0])
    if not domain.grouped_heads:
        case = dataclasses.replace(case, value_heads=case.heads)
    return _asked(adapter, name, case, illegal(name, case))


def _asked(adapter: Adapter, name: str, case: Case | ModuleCase, inputs: Inputs) -> str:
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
        strays = type(error).__name__ == "OutOfBounds"  # verify/interpreter.py, which needs Triton
        return "reads or writes outside its tensors" if strays else f"refuses ({type(error).__name__})"
    return "answers silently"
