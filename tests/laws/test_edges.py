"""The edges of numbers: large values and gates of zero, of -inf and around exp's underflow, where the definition has an answer."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from oracles.rule.gated_delta import definition
from oracles.tolerance.bound import bounds, truth
from properties.books import book_of
from properties.modules import case as module_case
from properties.modules.case import ModuleCase
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.rules import numbers as rule_numbers
from properties.rules.case import COMPUTED_GATES, GIVEN_GATES, Case
from properties.rules.domain import Domain
from properties.words.example import Example
from tests import wrong_thresholds as thresholds
from tests.faults import not_refused
from verify.adapters.base import Adapter
from verify.engine.drawing import seeded
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict
from verify.zoo import wrong_edges as edges
from verify.zoo.animals import right_of

# Numbers


def test_gates_at_the_edges_are_zero_or_where_exp_underflows() -> None:
    for dtype in ["fp32", "bf16"]:
        g = Case((400,), value_heads=2, dtype=dtype, gate="edges", seed=3).inputs().g
        under = (g <= -80) & (g > -112)
        assert 0.15 < float((g == 0).float().mean()) < 0.35, dtype
        assert 0.15 < float(under.float().mean()) < 0.35, dtype
        assert float(g[under].double().exp().min()) < 2.0**-150 < 2.0**-126 < float(g[under].double().exp().max()), dtype
        assert bool((g[~under] > -0.1).all()), dtype


def test_closed_gates_are_infinite_for_a_quarter_of_the_tokens() -> None:
    g = Case((400,), gate="closed", seed=3).inputs().g
    assert 0.15 < float((g == -torch.inf).float().mean()) < 0.35
    assert bool((g[g > -torch.inf] > -0.1).all())


def test_edges_of_gates_need_a_log_decay_that_is_given() -> None:
    rows = [
        (f"lengths=3 gate={gate} {words}", f"gate={gate} needs a log-decay that is given: in_kernel=none or beta, decay=log")
        for gate in GIVEN_GATES
        for words in ("in_kernel=gate", "in_kernel=both", "decay=linear")
    ]
    assert not_refused(Case.parse, rows) == []


def test_great_values_are_as_large_as_results_permit() -> None:
    for dtype in ["fp32", "bf16", "fp16"]:
        for case, name in (
            (Case((300,), values="great", key_dim=64, value_dim=64, value_heads=2, dtype=dtype, state="random"), "v"),
            (ModuleCase((300,), "causal_conv1d", values="great", dtype=dtype, conv_width=8), "x"),
            (ModuleCase((300,), "l2norm", values="great", dtype=dtype), "x"),
        ):
            inputs = case.inputs()
            most = (module_case if isinstance(case, ModuleCase) else rule_numbers).GREAT[dtype]
            assert most / 2 < float(inputs[name].float().abs().max()) <= most, dtype
            for result in truth(case.spec, inputs, case.cotangents()).values():
                assert bool(result.to(inputs[name].dtype).isfinite().all()), dtype


def test_thresholds_are_numbers_around_which_softplus_is_replaced() -> None:
    x = Case((900,), value_heads=2, in_kernel="gate", gate="thresholds", seed=3).inputs()
    z = (x.a + x.dt_bias).flatten()
    for threshold in (8, 12, 15, 20):
        assert int((abs(z - threshold) < 0.5).sum()) > 10, threshold
    assert 0.2 < float((z < 0).float().mean()) < 0.3
    assert bool((abs(z) < 29).all())


def test_an_exponential_overflows_in_a_quarter_of_the_tokens_and_underflows_in_another() -> None:
    for words in ({"dtype": "bf16"}, {"operation": "kda"}, {"operation": "kda", "lower_bound": "-5"}):
        x = Case((900,), **{"value_heads": 2, "in_kernel": "gate", "gate": "overflow", "seed": 3} | words).inputs()
        z = (x.a.float() + (x.dt_bias.view(2, -1) if x.a.ndim == 4 else x.dt_bias)).flatten()
        for part in (z.exp() == torch.inf, z.exp() < torch.finfo(torch.float32).tiny):
            assert 0.2 < float(part.float().mean()) < 0.3, words


def test_some_regimes_need_a_gate_that_the_kernel_computes() -> None:
    for gate in COMPUTED_GATES:
        pattern = f"gate={gate} needs a gate in the kernel: in_kernel=gate or both"
        rows = [(f"lengths=3 gate={gate} {words}", pattern) for words in ("", "in_kernel=beta", "decay=linear")]
        assert not_refused(Case.parse, rows) == []


# The oracle


def test_a_gate_of_minus_infinity_forgets_the_state_and_has_no_gradient() -> None:
    for rule in ["gated_delta_rule", "kda"]:
        case = Case((90,), rule, gate="closed", key_dim=4, value_dim=3, state="random", seed=5)
        x, cotangents = case.inputs(), case.cotangents()
        got = truth(case.spec, x, cotangents)
        wide = {name: x[name].double() for name in ("q", "k", "v", "g", "beta", "state")}
        o, state = definition(*(wide[name][0, :, 0] for name in ("q", "k", "v", "g", "beta")), wide["state"][0, 0], 4**-0.5)
        torch.testing.assert_close(got["o"][0, :, 0], o)
        torch.testing.assert_close(got["final_state"][0, 0], state)
        assert bool((got["dg"][x.g == -torch.inf] == 0).all()), rule
        for algorithm in ("chunkwise", "recurrent"):
            for name, bound in bounds(case.spec, x, cotangents, algorithm, chunk=16).items():
                assert bool(bound.allowed.isfinite().all()), name


# What is drawn, and who is wrong there


@pytest.mark.slow
def test_infinite_gates_are_drawn_where_a_domain_has_them() -> None:
    def gates(domain: Domain | PoolDomain) -> set[str]:
        seen: set[str] = set()
        seeded(book_of(domain).laws["oracle"].draw(domain), 0, 80, lambda example: seen.add(example.case.gate))
        return seen

    assert "closed" not in gates(Domain())
    assert gates(Domain(infinite_gates=True)) >= {"closed", "edges"}
    assert gates(PoolDomain(rule=Domain(infinite_gates=True, backward=False))) >= {"closed", "edges"}
    assert not gates(Domain(in_kernel=("gate",))) & {*GIVEN_GATES}
    assert not gates(Domain(decays=("linear",))) & {*GIVEN_GATES}
    assert not gates(Domain()) & {*COMPUTED_GATES}
    assert gates(Domain(in_kernel=("gate",))) >= {*COMPUTED_GATES}
    assert gates(PoolDomain(rule=Domain(in_kernel=("both",), backward=False))) >= {*COMPUTED_GATES}
    assert Domain().outside(Case((2,), gate="closed")) == "gate=closed: a log-decay of -inf is not supported"
    assert PoolDomain().outside(PoolCase((2,), gate="closed")) == "gate=closed: a log-decay of -inf is not supported"


KILLED_BY: dict[type, str] = {
    edges.InfinityMinusInfinity: "oracle",
    edges.InfinityIsNoDecay: "oracle",
    edges.ValuesInHalf: "oracle",
    edges.ClampsCorrections: "oracle",
    edges.ConvClamps: "oracle",
    edges.NormInHalf: "oracle",
}


@functools.cache
def at_the_edges(domain: Any, law: str, seed: int) -> list[Example]:
    """The great values and closed gates among the cases that a seed draws; of some seeds none is in a half-precision dtype."""
    examples: list[Example] = []
    seeded(book_of(domain).laws[law].draw(domain), seed, 128, examples.append)
    return [example for example in examples if example.case.values == "great" or getattr(example.case, "gate", "") == "closed"]


@pytest.mark.parametrize("animal", KILLED_BY, ids=lambda animal: animal.__name__)
@pytest.mark.slow_after_first
def test_law_alone_kills_animal_and_the_right_one_holds(animal: type[Adapter]) -> None:
    law = KILLED_BY[animal]
    examples = (example for seed in range(3) for example in at_the_edges(animal.domain, law, seed))
    runs = (Run(law, f"zoo/{animal.__name__}", example) for example in examples)
    broken = next(run for run in runs if execute(run).verdict is Verdict.BROKEN)
    right = right_of(animal)
    assert right is not None
    assert execute(dataclasses.replace(broken, adapter=f"zoo/{right.__name__}")).verdict is Verdict.HOLDS


def test_every_animal_is_killed() -> None:
    found = {kind for kind in vars(edges).values() if isinstance(kind, type) and hasattr(kind, "letter")}
    assert set(KILLED_BY) == {kind for kind in found if kind.__module__ == edges.__name__}


SOFTPLUS: dict[type[Adapter], set[str]] = {
    thresholds.LinearFromTwenty: set(),
    thresholds.PlainLogarithm: set(),
    thresholds.LinearFromEight: {"thresholds"},
    thresholds.LinearFromTwelve: {"thresholds"},
    thresholds.ExpBelowMinusThree: {"thresholds", "overflow"},
    thresholds.ChosenTooLate: {"overflow"},
    thresholds.NeverLinear: {"overflow"},
}


@pytest.mark.parametrize(("rule", "shows"), SOFTPLUS.items(), ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.slow_after_first
def test_softplus_may_be_linear_from_twenty_and_no_earlier(rule: type[Adapter], shows: set[str]) -> None:
    """Linear from 15, the gate is off by 2e-8 of itself and its gradient by 3e-7, which float32 hides."""
    for gate in COMPUTED_GATES:
        line = f"lengths=40 value_heads=2 in_kernel=gate gate={gate} state=random"
        run = f"law=oracle adapter=tests/wrong_thresholds.py:{rule.__name__} {line}"
        seen = {execute(Run.parse(f"{run} seed={seed}")).verdict for seed in (1, 2)}
        assert (Verdict.BROKEN in seen) == (gate in shows), gate
        assert seen <= {Verdict.BROKEN, Verdict.HOLDS}
