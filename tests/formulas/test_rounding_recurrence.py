"""The recurrence in chunks spreads like one in which every element rounds at every step."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.operations import RULES
from oracles.rule import disturbed, in_steps
from oracles.tolerance import bound, evaluation
from oracles.tolerance.bound import bounds
from properties.rules.case import Case
from tests.over_bounds import names

# The recurrence, whose every element rounds at every step, beside what stands for it


class Carried(torch.autograd.Function):
    """A float32 number carried from step to step; in the odd runs an element errs by the same fraction of itself every time."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, rule: Arithmetic, place: str) -> Tensor:
        ctx.back = rule, place  # type: ignore[attr-defined]
        rounded = rule.dither(x, place, 24)
        generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
        fraction = (2.0 * torch.rand(x.shape[0], *x.shape[-2:], generator=generator, dtype=x.dtype) - 1.0) * 2.0**-24
        rounded[::2] = (x * (1.0 + fraction.reshape(x.shape[0], *[1] * (x.ndim - 3), *x.shape[-2:])))[::2]
        return rounded

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        rule, place = ctx.back  # type: ignore[attr-defined]
        return Carried.apply(cotangents[0], rule, place + "'"), None, None


def step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    rule: Arithmetic,
    lengths: Sequence[int],
    *,
    linear: bool = False,
) -> tuple[Tensor, Tensor]:
    """`steps` of the only sequence."""
    assert len(lengths) == 1
    o, final = steps(*(x.transpose(1, 2) for x in (q, k, v, g, beta)), state.squeeze(1), scale, rule, linear=linear)
    return o.transpose(1, 2), final.unsqueeze(1)


def steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, rule: Arithmetic, *, linear: bool
) -> tuple[Tensor, Tensor]:
    """disturbed.recurrent as its docstring has it: the decay, the state twice, what is written and both sums round, every step.

    What is written is written apart: beta k v^T, and beta k (k^T S)^T taken off. A `linear` decay is an input and does not round.
    """
    depth, width, rows = q.shape[-1], max(q.shape[-1], v.shape[-1]), []
    decay = g.exp() if linear else rule.single(rule.single(g, "g").exp(), "decay")
    for q_t, k_t, v_t, decay_t, beta_t in zip(*(x.unbind(-2) for x in (q, k, v, decay, beta)), strict=True):
        state = Carried.apply(decay_t.unsqueeze(-1) * state, rule, "decayed")
        recalled = torch.einsum("...k,...kv->...v", k_t, rule.single(state, "recalled", depth))
        new, old = (
            rule.single(rule.sums(beta_t * k_t, f"keys of {place}", width).unsqueeze(-1) * values.unsqueeze(-2), place)
            for place, values in (("written", v_t), ("erased", recalled))
        )
        state = Carried.apply(state - old + new, rule, "state")
        rows.append(torch.einsum("...k,...kv->...v", q_t, rule.single(state, "read", depth)))
    return scale * torch.stack(rows, -2), state


def ratios(case: Case, monkeypatch: pytest.MonkeyPatch, **replaced: object) -> dict[str, float]:
    """The median over rows of what is allowed, by output: disturbed.recurrent's over that of `step_by_step`."""
    make = functools.partial(bounds, case.spec, case.inputs(), case.cotangents(), "recurrent")
    with monkeypatch.context() as patch:
        patch.setattr(bound, "RUNS", 8)
        with patch.context() as inner:
            inner.setattr(disturbed, "recurrent", step_by_step)
            want = make()
        for name, value in replaced.items():
            patch.setattr(Arithmetic, name, value)
        in_steps.drifts.cache_clear()
        got = make()
    in_steps.drifts.cache_clear()
    return {name: float((got[name].allowed / want[name].allowed).median()) for name in want}


STEPPED = "lengths=70 value_heads=2 key_dim=24 value_dim=24 dtype=fp32 state=random seed=3"


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize(
    "more",
    [
        "gate=64",
        "gate=forever",
        "gate=tenth",
        "gate=mixed beta=edges",
        "gate=10 values=correlated beta=two",
        "gate=1000 values=repeated beta=two",
        "gate=64 values=repeated",
        "gate=64 values=scaled qk_norm=yes",
    ],
)
@pytest.mark.slow_after_first
def test_recurrence_in_chunks_spreads_as_one_that_rounds_step_by_step(
    operation: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = ratios(Case.parse(f"op={operation} {STEPPED} {more}"), monkeypatch)
    assert set(got) == set(names(operation))
    assert {name: ratio for name, ratio in got.items() if not 0.6 < ratio < 2.2} == {}


@pytest.mark.parametrize("more", ["gate=64 values=repeated", "op=kda gate=mixed beta=edges"])
@pytest.mark.slow_after_first
def test_recurrence_of_alphas_spreads_as_one_that_rounds_step_by_step(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(f"{STEPPED} {more} decay=linear")
    got = ratios(case, monkeypatch)
    assert set(got) == {port.name for port in (*case.spec.outputs, *case.spec.gradients())}
    assert {name: ratio for name, ratio in got.items() if not 0.6 < ratio < 2.2} == {}


def test_a_decay_that_is_an_input_has_less_tolerance_than_one_that_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(f"{STEPPED} gate=64 values=repeated beta=zero decay=linear")
    make = functools.partial(bounds, case.spec, case.inputs(), None, "recurrent")
    monkeypatch.setattr(Arithmetic, "drift", lambda _, x, place: torch.zeros_like(x))  # so that only the decay errs
    in_steps.drifts.cache_clear()
    of_input, recurrent = make(), disturbed.recurrent
    monkeypatch.setattr(disturbed, "recurrent", lambda *arguments, **_: recurrent(*arguments))
    of_computed = make()
    in_steps.drifts.cache_clear()
    assert float((of_computed["final_state"].allowed / of_input["final_state"].allowed).median()) > 3


@pytest.mark.parametrize("operation", RULES)
@pytest.mark.parametrize("stores", [False, True])
def test_what_the_values_alone_would_give_the_keys_that_write_them_is_that(
    operation: str,
    stores: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """dS v of run 0 in chunks, of which the errors of an update that is written apart are taken, beside dS v token by token."""
    case = Case.parse(f"op={operation} lengths=150 key_dim=8 value_dim=5 gate=64 dtype=fp32 state=random seed=3")
    seen, dither = [], Arithmetic.dither

    def watched(rule: Arithmetic, x: Tensor, place: str, bits: int | None = None) -> Tensor:
        seen.extend([x[:, 0].sum(2)] if place == "dS v" else [])
        return dither(rule, x, place, bits)

    monkeypatch.setattr(Arithmetic, "dither", watched)
    arithmetic = dataclasses.replace(Arithmetic.of("recurrent", "fp32", runs=3), summed_again=11 if stores else 53)
    cotangents = {name: cotangent.double() for name, cotangent in case.cotangents().items()}
    evaluation.evaluate(case.spec, case.inputs(), cotangents, arithmetic)
    (got,) = seen
    x = evaluation.wide(case.spec, case.inputs())
    q, k, v, beta, do = (tensor[0] for tensor in (x.q, x.k, x.v, x.beta, cotangents["o"]))
    decay = torch.ones(150, 1, 1) if x.get("g") is None else x.g[0].reshape(150, 1, -1).exp()
    want, direction = torch.empty(150, 8, dtype=torch.float64), cotangents["final_state"][0, 0]
    for t in reversed(range(150)):
        direction = direction + 8**-0.5 * q[t].mT @ do[t]
        want[t] = direction @ v[t, 0]
        direction = decay[t].mT * (direction - k[t].mT @ (beta[t] * (k[t] @ direction)))
    torch.testing.assert_close(got.flatten(0, 2)[:150], want, rtol=1e-9, atol=1e-12)


def test_a_recurrence_that_does_not_drift_spreads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(f"{STEPPED} gate=forever values=repeated beta=zero")
    still = ratios(case, monkeypatch, drift=lambda _, x, place: torch.zeros_like(x))
    assert still["final_state"] < 0.4
    assert still["dh0"] < 0.4
