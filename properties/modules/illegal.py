"""Illegal inputs of modules: legal calls with one argument made wrong, so that it would be broadcast, cut off or read too far."""

from collections.abc import Callable

from oracles.operation import Inputs
from properties.modules.case import ModuleCase, words_of
from properties.modules.domain import ModuleDomain
from properties.rules.illegal import OF_RULES
from properties.words.illegal import IllegalInputs, near

# For a layer's modules: calls in which one argument would have to be broadcast, cut off or read beyond its end.
OF_MODULES: dict[str, dict[str, Callable[[Inputs], Inputs]]] = {
    "causal_conv1d": {
        **{name: change for name, change in OF_RULES.items() if name.startswith("cu_seqlens")},
        "one initial state for two sequences": lambda x: x.replaced(state=x.state[:1]),
        "an initial state without its oldest column": lambda x: x.replaced(state=x.state[..., 1:].contiguous()),
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
    "norm_gate_linear": {
        "a weight of one channel": lambda x: x.replaced(weight=x.weight[:1]),
        "z of fewer channels": lambda x: x.replaced(z=x.z[..., :-1].contiguous()),
        "linear of fewer channels": lambda x: x.replaced(linear=x.linear[:, :-1].contiguous()),
        "a bias of one channel": lambda x: x.replaced(bias=x.bias[:1]),
    },
}
# Words of a module's case, and the field of a domain with their choices. The call has the first choice.
_CHOSEN = {
    "activation": "activations",
    "eps": "eps",
    "gating": "gatings",
    "lower_bound": "lower_bounds",
    "offsets": "offsets",
    "parameter_dtype": "parameter_dtypes",
    "residual": "residuals",
}


def _module_call(name: str, domain: ModuleDomain) -> tuple[ModuleCase, Inputs] | str:
    """Return a legal call inside the domain, and its inputs with one argument made wrong; or the reason why there is none."""
    if lacking := _lacking(name, domain):
        return lacking
    if domain.operation == "causal_conv1d":
        packed = {"lengths": (5, 12), "packed": True} if domain.packed else {"lengths": (8, 8)}
        about = {**packed, "bias": domain.bias, "state": "zero" if domain.initial_state else "none"}
        about |= {"conv_width": _taps(domain), "final_state": domain.final_state, "state_columns": domain.state_columns}
    elif domain.operation == "norm_gate_linear":
        about = {"lengths": (8, 8), "bias": domain.bias}
    else:
        about = {"lengths": (8, 8), "heads": 2}
    words = words_of(domain.operation)
    about |= {"beta": domain.beta} if "beta" in words else {}
    about |= {name: near(domain.has_width, 16) for name in ("width", "out_width") if name in words}
    about |= {name: getattr(domain, field)[0] for name, field in _CHOSEN.items() if name in words}
    case = ModuleCase(operation=domain.operation, dtype=domain.dtypes[0], backward=False, **about)  # type: ignore[arg-type]
    if reason := domain.outside(case):
        return f"the call is outside the domain: {reason}"
    return case, OF_MODULES[domain.operation][name](case.inputs())


def _taps(domain: ModuleDomain) -> int:
    """Return the first of the domain's conv_widths with which a state has columns, if there is one."""
    return next((width for width in domain.conv_widths if width > 1), domain.conv_widths[0])


def _lacking(name: str, domain: ModuleDomain) -> str | None:
    """Return what the domain does not support of what the input is about, or None."""
    lacks = {
        "cu_seqlens": (domain.packed, "packed input"),
        "one initial state": (domain.initial_state, "an initial state"),
        "an initial state": (domain.initial_state, "an initial state"),
        "an initial state without": (domain.state_columns == "W" or _taps(domain) > 1, "an initial state with columns"),
        "a bias": (domain.bias, "a bias"),
    }
    found = next((what for start, (has, what) in lacks.items() if name.startswith(start) and not has), None)
    return None if found is None else f"{found} is unsupported"


MODULE_INPUTS = IllegalInputs(lambda operation: list(OF_MODULES.get(operation, ())), _module_call)
