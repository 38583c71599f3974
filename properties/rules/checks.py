"""What the laws of rules alone compare. Which cases they get is in laws.py."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oracles.norm import EPS
from oracles.operation import DTYPES, Inputs
from properties.laws.common import FACTORS, linear_in_cotangents, normal, without_options
from properties.laws.in_parts import carried_dtype, final_dtype
from properties.laws.law import (
    Bench,
    Pair,
    along,
    bounds_as,
    many_at_once,
    one_final_state,
    one_initial_state,
    pairs_of,
    present,
    reordered,
    spread,
    with_others,
)
from properties.laws.promises import to_the_bit
from properties.words.example import Example


def absent(bench: Bench, example: Example) -> Iterator[Pair]:
    """Leave an optional argument out, or ask for other gradients: the results are those of its neutral value."""
    case = example.case
    inputs, cotangents = bench.call(case)
    width, lengths = case.key_dim, case.lengths
    if example.variant == "gradients":
        bounds = bench.bounds(inputs, cotangents)
        with torch.no_grad():
            outputs = bench.run(inputs, None)
        yield from pairs_of(outputs, bounds, "under no_grad")
        return
    if example.variant == "options":
        yield from without_options(bench, example)
        return
    gates = inputs.v.shape[:-1] + inputs.k.shape[-1:] * (case.operation == "kda")
    gate_dtype = DTYPES["fp32" if case.gate_dtype == "fp32" else case.dtype]
    zeros, carried = (len(lengths), case.value_heads, width, case.value_dim), carried_dtype(bench, case, torch.float32)
    neutral = {
        "scale": lambda: inputs.replaced(scale=width**-0.5),
        "state": lambda: inputs.replaced(state=torch.zeros(zeros, dtype=carried)),
        "offsets": lambda: inputs.replaced(cu_seqlens=torch.tensor([0, lengths[0]], dtype=getattr(torch, bench.domain.offsets[0]))),
        "final_state": lambda: inputs.replaced(output_final_state=False),
        "dt_bias": lambda: inputs.replaced(dt_bias=torch.zeros(inputs.a.shape[2:], dtype=DTYPES[case.dtype_of("dt_bias")])),
        "gate": lambda: inputs.replaced(g=torch.zeros(gates, dtype=gate_dtype)),
        "beta": lambda: inputs.replaced(beta=torch.ones(inputs.v.shape[:-1], dtype=inputs.v.dtype)),
    }[example.variant or ""]()
    if example.variant == "final_state" and cotangents is not None:
        cotangents = {**cotangents, "final_state": torch.zeros_like(cotangents["final_state"])}
    bounds = bench.bounds(inputs, cotangents)
    without = bench.run(inputs, cotangents)
    yield from pairs_of(without, bounds)
    if (dtype := final_dtype(case, neutral)) != final_dtype(case, inputs):  # a final state has the initial one's dtype
        cotangents = cotangents and {**cotangents, "final_state": cotangents["final_state"].to(dtype)}
        bounds = bench.bounds(neutral, cotangents)
    detail = f"with {example.variant} {'not asked for' if example.variant == 'final_state' else 'given'}"
    got = bench.run(neutral, cotangents)
    yield from pairs_of({name: value for name, value in got.items() if name in bounds}, bounds, detail)
    if example.variant == "state":
        same = {name: value for name, value in got.items() if name in without and without[name].dtype == value.dtype}
        yield from to_the_bit(bench, "absent_state_equals_zeros", f"{detail}, bits", same, lambda: without)


def norm(bench: Bench, example: Example) -> Iterator[Pair]:
    """The norm inside the kernel equals an explicit norm.

    The explicit norm has the form and eps of the call. It stores its result in the inputs' dtype, as the chunkwise class does,
    before the implementation rounds. So the bounds of the chunkwise class are added.
    """
    case = example.case
    inputs, cotangents = bench.call(case)
    yield from pairs_of(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents))
    bounds = bounds_as(bench, inputs, cotangents, "chunkwise")
    for when, groups in (("before", 1), ("after", case.value_heads // case.heads)):
        leaves = {name: inputs[name].detach().clone().requires_grad_() for name in ("q", "k")}
        normed = {name: _normalised(leaf.repeat_interleave(groups, dim=-2), inputs) for name, leaf in leaves.items()}
        got = bench.run(inputs.replaced(qk_norm=False, **{name: x.detach() for name, x in normed.items()}), cotangents)
        for name, leaf in leaves.items():
            if cotangents is not None:
                (got[f"d{name}"],) = torch.autograd.grad(normed[name], leaf, got[f"d{name}"])
        yield from pairs_of(got, bounds, f", normalised {when} head repetition")


def gates(bench: Bench, example: Example) -> Iterator[Pair]:
    """Gate and beta inside the kernel equal explicit ones.

    The explicit ones are computed in float32 as in oracles/gates.py and given to the implementation. Their gradients go back
    through the same computation.
    """
    case = example.case
    inputs, cotangents = bench.call(case)
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.run(inputs, cotangents), bounds)
    names = [*(["a", "A_log", "dt_bias"] if case.gate_inside else []), *(["b"] if case.beta_inside else [])]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names if inputs[name] is not None}
    outside: dict[str, Tensor] = {}
    if case.gate_inside:
        raw = leaves["a"].float() + leaves.get("dt_bias", torch.zeros(()))
        speed = leaves["A_log"].float().exp().reshape(-1, *[1] * (raw.ndim - 3))
        bound = inputs.get("lower_bound")
        outside["g"] = -speed * torch.nn.functional.softplus(raw) if bound is None else bound * (speed * raw).sigmoid()
    if case.beta_inside:
        beta = leaves["b"].float().sigmoid() * (2 if inputs.allow_neg_eigval else 1)
        outside["beta"] = beta.to(inputs.q.dtype)
    # Some values round only outside, and some only inside, so the explicit call is judged by both bounds.
    none = dict.fromkeys((*names, "allow_neg_eigval", "lower_bound"))
    arguments = Inputs(**{**inputs, **none, **{name: x.detach() for name, x in outside.items()}})
    got = bench.run(arguments, cotangents)
    if cotangents is not None and leaves:
        back = [got.pop(f"d{name}") for name in outside]
        gradients = torch.autograd.grad(list(outside.values()), list(leaves.values()), back)
        got |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    explicit = bench.bounds(arguments, cotangents)
    for name, value in got.items():
        limit = bounds[name].beside(explicit[name]) if name in explicit else bounds[name].beside(bounds[name])
        yield Pair(name, "with explicit gates", value, limit)


def _normalised(x: Tensor, inputs: Inputs) -> Tensor:
    """Return rows normalised in float32 in the form and with the eps of a call."""
    wide, eps = x.float(), float(inputs.get("qk_norm_eps", EPS))
    if inputs.get("qk_norm_form") == "max":
        rows: Tensor = torch.nn.functional.normalize(wide, dim=-1, eps=eps)
        return rows.to(x.dtype)
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def recall(bench: Bench, example: Example) -> Iterator[Pair]:
    """Keys are one-hot, beta = 1, g = 0 and v small integers: each write replaces a row of the state, and nothing rounds."""
    many_at_once(bench, example.case)
    inputs, _ = bench.call(example.case)
    truth = bench.truth(inputs, None)
    for name, got in bench.run(inputs, None).items():
        one = name == "final_state" and example.case.packed and one_final_state(bench.domain)
        yield Pair(name, "", got[-1:] if one else got, truth[name][-1:] if one else truth[name])


def heads(bench: Bench, example: Example) -> Iterator[Pair]:
    """Change one head's inputs and compare the others.

    With one key head, only the value head's own inputs change. With several, those of its key head's whole group change.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    group = case.value_heads // case.heads
    other = with_others(case, bench.domain).inputs()
    values = torch.arange(case.value_heads)
    touched = values // group == at // group if case.heads > 1 else values == at
    keys = torch.arange(case.heads) == (at // group if case.heads > 1 else -1)
    spec, mixed = case.spec, {}

    def changed_heads(name: str) -> tuple[int, Tensor] | None:
        """The axis of its heads, and which of them change."""
        for letter, mask in (("H", keys), ("HV", touched)):
            if (axis := along(spec, name, letter)) is not None:
                return axis, mask
        return None

    for name in present(spec, inputs):
        if (mine := changed_heads(name)) is not None:
            mixed[name] = torch.where(spread(mine[1], inputs[name], mine[0]), other[name], inputs[name])
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
    for name, got in twice.items():
        mine = changed_heads(name)
        if mine is not None and (case.heads > 1 or mine[1] is touched):
            index: tuple[Any, ...] = (*[slice(None)] * mine[0], ~mine[1])
            yield Pair(name, "of the other heads", got[index], once[name][index])


def permuted(bench: Bench, example: Example) -> Iterator[Pair]:
    """Key heads in another order, with their value heads, give the results in that order."""
    case = example.case
    inputs, cotangents = bench.call(case)
    group = case.value_heads // case.heads
    keys = torch.arange(case.heads).roll(1)
    values = torch.arange(case.value_heads).reshape(case.heads, group).roll(1, 0).flatten()
    states = one_initial_state(bench.domain) or one_final_state(bench.domain)
    rows = torch.arange(len(case.lengths)).roll(0 if case.packed and states else 1)  # the first and last sequences stay
    permuted_inputs, turned, moved = reordered(
        case, inputs, cotangents, {"H": lambda heads: keys, "HV": lambda heads: values}, rows
    )
    got = bench.run(permuted_inputs, turned)
    if bench.domain.position_independent:
        once = bench.run(inputs, cotangents)
        for name, value in got.items():
            yield Pair(name, "permuted", value, moved(name, once[name]))
    else:
        yield from pairs_of(got, bench.bounds(permuted_inputs, turned), "permuted")


def linear(bench: Bench, example: Example) -> Iterator[Pair]:
    """A power of two rounds nothing, so it passes through every product and sum. Sums round, so the variant `sum` has a bound."""
    inputs, cotangents = bench.call(example.case)
    if example.variant == "sum":
        odd = torch.arange(inputs.v.shape[1]).reshape(1, -1, 1, 1) % 2 == 1
        parts = [
            inputs.replaced(v=torch.where(odd, inputs.v, 0)),
            inputs.replaced(v=torch.where(odd, 0, inputs.v), state=None),
        ]
        runs, limits = [bench.run(part, None) for part in parts], [bench.bounds(part, None) for part in parts]
        for name in runs[0]:
            got = runs[0][name].double() + runs[1][name].double()
            yield Pair(name, ", summed over even and odd tokens' values", got, limits[0][name].plus(limits[1][name]))
        return
    if example.variant in FACTORS:
        yield from linear_in_cotangents(bench, example)
        return
    once, factor = bench.run(inputs, cotangents), -2.0
    state = None if inputs.state is None else factor * inputs.state
    for name, got in bench.run(inputs.replaced(v=factor * inputs.v, state=state), cotangents).items():
        due = once[name] if name in ("dv", "dh0") else factor * once[name]
        yield Pair(name, "with v and state times -2", normal(got, factor), normal(due, factor))
