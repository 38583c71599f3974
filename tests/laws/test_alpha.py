"""The decay itself, alpha = exp(g), in place of its logarithm: oracle, tolerances, cases, domains, laws and kernels."""

import dataclasses
import functools
import itertools
import math
import pathlib

import pytest
import torch
from torch import Tensor

from oracles.decode import decode
from oracles.operation import Inputs
from oracles.rule.gated_delta import in_kernel
from oracles.tolerance import bound
from properties.books import book_of
from properties.palette import draw_palette, sample
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain, pool_cases
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from properties.rules.laws import LAWS
from properties.rules.numbers import SATURATED
from properties.words.example import Example
from tests import right
from tests.faults import not_refused
from tests.judging import evaluate, worst
from tests.kills import Kill, assert_killed_alone, rows
from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker
from verify.zoo import wrong_alphas as wrong
from verify.zoo.base import ByAlpha

FEW = Profile("few", 3, large=False)
KILLED_BY = {
    wrong.AlphaAsLogarithm: (Kill("oracle", 13),),
    wrong.AlphaOfTheNextToken: (Kill("oracle", 9, 2),),
    wrong.DecaysAfterTheUpdate: (Kill("oracle", 1),),
    wrong.ServesAlphaAsLogarithm: (Kill("oracle", 13),),
}
CASES = [
    "lengths=70 value_heads=2 key_dim=5 value_dim=3 gate=10 state=random decay=linear",
    "lengths=70 value_heads=2 key_dim=5 value_dim=3 gate=saturated state=random decay=linear seed=3",
    "lengths=65+0+3 packed=yes op=kda key_dim=5 value_dim=3 gate=saturated state=random decay=linear",
    "lengths=33 op=kda key_dim=4 value_dim=3 gate=tenth state=random dtype=bf16 gate_dtype=input decay=linear",
]


def by_products(x: Inputs) -> tuple[Tensor, Tensor]:
    """The definition, which multiplies the state by alpha token by token: o [1, T, HV, V] and final states."""
    rows, states = [], []
    q, k = (t.repeat_interleave(x.v.shape[2] // t.shape[2], 2)[0] for t in (x.q, x.k))
    ends = [0, x.v.shape[1]] if x.cu_seqlens is None else x.cu_seqlens.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        state = x.state[row]
        for t in range(start, end):
            alpha = x.alpha[0, t].reshape(x.v.shape[2], -1, 1)
            state = alpha * state
            fresh = x.beta[0, t].unsqueeze(-1) * (x.v[0, t] - (k[t].unsqueeze(-1) * state).sum(-2))
            state = state + k[t].unsqueeze(-1) * fresh.unsqueeze(-2)
            rows.append(q.shape[-1] ** -0.5 * (q[t].unsqueeze(-1) * state).sum(-2))
        states.append(state)
    return torch.stack(rows).unsqueeze(0), torch.stack(states)


def named_outputs(adapter: right.Recurrent, x: Inputs) -> dict[str, Tensor | None]:
    return dict(zip(("o", "final_state"), adapter.run(x), strict=True))


def wide(x: Inputs) -> Inputs:
    return x.replaced(**{name: t.double() for name, t in x.items() if isinstance(t, Tensor) and t.is_floating_point()})


def test_truth_is_the_definition_with_products_of_alphas() -> None:
    for line in CASES:
        case = Case.parse(line)
        x, cotangents = wide(case.inputs()), {name: t.double() for name, t in case.cotangents().items()}
        want = evaluate(case.spec, lambda y: dict(zip(("o", "final_state"), by_products(y), strict=True)), x, cotangents)
        got = bound.truth(case.spec, x, cotangents)
        assert got.keys() == want.keys(), line
        zero = x.alpha == 0
        assert bool(zero.any()) == (case.gate == "saturated"), line
        for name, value in got.items():
            error = (value - want[name]).abs()
            if name == "dalpha":
                assert bool((value[zero] == 0).all()), line
                error = error.masked_fill(zero, 0.0)
            most = 1e-7 if name == "dalpha" else 1e-10  # dalpha is a difference over alpha, which may be 1e-7
            assert float(error.max()) < most * float(want[name].abs().max()), name


def test_disturbed_runs_are_near_the_truth() -> None:
    for line, algorithm in itertools.product(CASES, ["chunkwise", "recurrent"]):
        case = Case.parse(line)
        limits = bound.bounds(case.spec, case.inputs(), case.cotangents(), algorithm, chunk=16)
        for name in ("o", "final_state", "dv", "dh0"):
            limit = limits[name]
            assert float(limit.allowed.max()) < 0.5 * max(1.0, float(limit.value.abs().max())), name
            assert bool((limit.allowed > 0).all()), name


def test_a_forgotten_token_has_any_finite_gradient_and_a_nan_is_wrong() -> None:
    case = Case.parse("lengths=8 value_heads=2 gate=saturated state=random decay=linear")
    x, cotangents = case.inputs(), case.cotangents()
    zero = x.alpha == 0
    assert 0 < int(zero.sum()) < zero.numel()
    limits = bound.bounds(case.spec, x, cotangents, "recurrent")
    assert bool((limits["dalpha"].allowed[zero] == bound.ANY).all())
    assert float(limits["dalpha"].allowed[~zero].max()) < 1e-3
    results = {name: limit.value.float() for name, limit in limits.items()}
    for value, over in ((1e30, False), (math.nan, True)):
        moved = {**results, "dalpha": results["dalpha"].masked_fill(zero, value)}
        assert (worst(case.spec, limits, moved)[0] > 1) is over
    moved = {**results, "dalpha": results["dalpha"].masked_fill(~zero, 1e30)}
    assert worst(case.spec, limits, moved)[0] > 1


def test_equal_gates_that_round_before_the_kernel_are_no_error_of_the_kernel() -> None:
    """Why alpha is an input of its own: if g were the input, 64 equal roundings of exp(g) would be errors of the kernel."""
    case = Case.parse("lengths=64 gate=64 values=repeated beta=zero state=random key_dim=4 value_dim=4 backward=no seed=5")
    logs, kernel = case.inputs(), right.AlphaProducts()
    call = Inputs(**{**logs, "g": None, "alpha": logs.g.double().exp().float()})
    spec = case.spec_of(call)
    o, final = kernel.run(call)
    results = {"o": o, "final_state": final}
    assert worst(case.spec, bound.bounds(case.spec, logs, None, "chunkwise", chunk=64), results)[0] > 2
    limits = bound.bounds(spec, call, None, "chunkwise", chunk=64)
    assert worst(spec, limits, results)[0] < 0.3
    other = bound.bounds(spec, call.replaced(alpha=call.alpha * (1 + 2.0**-20)), None, "chunkwise", chunk=64)
    assert worst(spec, other, results)[0] > 1, "alpha itself has no tolerance"


def test_alpha_is_near_the_exponential_of_the_case_with_logarithms() -> None:
    gates = ("forever", "1000", "64", "10", "tenth", "mixed", "saturated")
    for operation, gate in itertools.product(("gated_delta_rule", "kda"), gates):
        case = Case((40,), operation, value_heads=3, key_dim=6, gate=gate, seed=5)
        g, alpha = case.inputs().g.double(), dataclasses.replace(case, decay="linear").inputs().alpha
        assert alpha.dtype == torch.float32, (operation, gate)
        assert alpha.shape == g.shape, (operation, gate)
        assert bool((alpha == 0).eq(g == SATURATED).all()), (operation, gate)
        relative = (alpha / g.exp() - 1).nan_to_num(0.0, 0.0, 0.0).abs()
        assert float(relative.max()) < 0.13, (operation, gate)  # 1 - g^2 / 2048, and g > -16
        assert dataclasses.replace(case, decay="linear").inputs().get("g") is None, (operation, gate)


def test_alphas_are_the_same_bits_on_every_machine() -> None:
    alpha = Case.parse("lengths=4 gate=10 decay=linear seed=1").inputs().alpha
    assert alpha.flatten().view(torch.int32).tolist() == ALPHAS


ALPHAS = [1061816103, 1065222917, 1062481342, 1063521546]


def test_halved_decays_are_in_the_dtype_of_the_inputs() -> None:
    case = Case.parse("lengths=4 gate=10 dtype=bf16 gate_dtype=input decay=linear")
    assert case.inputs().alpha.dtype == torch.bfloat16
    assert Case.parse(str(case)) == case


def test_a_decay_that_a_call_cannot_have_is_refused() -> None:
    rows = [
        ("decay=square", "decay must be one of log, linear, got 'square'"),
        ("op=delta_rule decay=linear", "decay must be log for op=delta_rule, which takes no decay, got linear"),
        ("in_kernel=gate decay=linear", "decay must be log for in_kernel=gate, which takes no decay, got linear"),
        ("in_kernel=both decay=linear", "decay must be log for in_kernel=both, which takes no decay, got linear"),
    ]
    patterns = ((words, f"^{message}$") for words, message in rows)
    assert not_refused(lambda words: Case.parse(f"lengths=3 {words}"), patterns) == []


def test_a_domain_refuses_other_decays() -> None:
    rows = [
        ({"decays": ()}, r"decays must be a tuple of some of log, linear, got \(\)"),
        ({"decays": "linear"}, "decays must be a tuple of some of log, linear, got 'linear'"),
        ({"operation": "delta_rule", "decays": ("linear",)}, "decays must be log for delta_rule, which has no gate, got linear"),
    ]
    assert not_refused(lambda fields: Domain(**fields), ((fields, f"^{message}$") for fields, message in rows)) == []


def test_a_domain_says_which_decay_is_outside() -> None:
    line, log = Case.parse("lengths=3 decay=linear"), Case.parse("lengths=3")
    assert Domain().outside(line) == "decay=linear is not among log"
    assert Domain(decays=("linear",)).outside(log) == "decay=log is not among linear"
    assert Domain(decays=("linear",), in_kernel=("both",)).outside(Case.parse("lengths=3 in_kernel=both")) is None
    domain = Domain(decays=("linear",), backward=False)
    assert Domain.from_json(domain.to_json()) == domain
    assert PoolDomain(rule=domain).outside(PoolCase.parse("lengths=3 op=decode")) == "decay=log is not among linear"


def test_illegal_decays_are_refused() -> None:
    case = Case.parse("lengths=3 decay=linear")
    rows = [
        ({"alpha": torch.full((1, 3, 1), -0.5)}, "alpha must be 0 or more, got -0.5"),
        ({"g": torch.zeros(1, 3, 1)}, "g is no input of gated_delta_rule of alpha, must be None or absent, got a tensor"),
        ({"alpha": None}, "alpha must be a tensor, got NoneType"),
    ]
    patterns = ((change, f"^{message}$") for change, message in rows)
    assert not_refused(lambda change: case.spec.check(case.inputs().replaced(**change)), patterns) == []


def test_a_decay_is_refused_where_there_is_none_or_the_gate_is_inside() -> None:
    with pytest.raises(ValueError, match=r"^linear must be False for delta_rule with no gate$"):
        in_kernel("delta_rule", gate=False, beta=False, linear=True)
    with pytest.raises(ValueError, match=r"^linear must be False for kda with its gate in the kernel$"):
        decode("kda", gate=True, linear=True)


def test_what_is_drawn_for_adapters_with_logarithms_stays() -> None:
    """A domain of alphas draws the same cases but for that word; so a domain of logarithms draws what it always drew."""
    domain = Domain(strongest_decay="tenth")  # stronger ones include log-decays for which no alpha is drawn
    served = dataclasses.replace(domain, backward=False)
    pairs = (
        (LAWS["oracle"].draw(domain), LAWS["oracle"].draw(dataclasses.replace(domain, decays=("linear",)))),
        (
            pool_cases(PoolDomain(rule=served)).map(Example),
            pool_cases(PoolDomain(rule=dataclasses.replace(served, decays=("linear",)))).map(Example),
        ),
    )
    for logs, alphas in pairs:
        plain, linear = ([example.case for example in sample(strategy, 7, 40)] for strategy in (logs, alphas))
        assert {case.decay for case in plain} == {"log"}
        assert {case.decay for case in linear} == {"linear"}
        assert [dataclasses.replace(case, decay="log") for case in linear] == plain


def test_both_decays_are_drawn_and_palettes_keep_them_apart() -> None:
    domain = Domain(decays=("log", "linear"), in_kernel=("none", "both"))
    drawn = [example.case for example in sample(cases(domain).map(Example), 7, 60)]
    assert {(case.in_kernel, case.decay) for case in drawn} == {("none", "log"), ("none", "linear"), ("both", "log")}
    keys = draw_palette(domain, 3, laws=["oracle"]).keys
    assert {dict(key)["decay"] for key in keys} == {"log", "linear"}


def test_a_case_shrinks_to_logarithms_only_where_the_domain_takes_them() -> None:
    simplest = book_of(Domain()).smaller.simplest
    assert simplest["decay"] == ("log",)
    assert Domain(decays=("linear",)).outside(dataclasses.replace(Case((3,), decay="linear"), decay="log"))


def test_explicit_gates_are_for_adapters_that_take_logarithms() -> None:
    needs = LAWS["gates"].needs
    assert needs(Domain(in_kernel=("none", "gate"), decays=("linear",))) == "neither gate nor beta is computed in the kernel"
    assert needs(Domain(in_kernel=("none", "beta"), decays=("linear",))) is None
    assert needs(Domain(in_kernel=("none", "gate"))) is None


@pytest.mark.slow
def test_right_implementations_are_within_their_bounds() -> None:
    """Cases as checks draw them; `python -m benchmarks.soundness tests/right.py:AlphaProducts --cases 600` takes more."""
    for kind in [right.AlphaRecurrent, right.AlphaRecurrentKda, right.AlphaProducts, ByAlpha]:
        adapter = kind()
        drawn = cases(adapter.domain, longest=70, total=70, value_heads=2).map(Example)
        for case in [example.case for example in sample(drawn, 5, 6)]:
            x, cotangents = case.inputs(), case.cotangents()
            got = evaluate(case.spec, functools.partial(named_outputs, adapter), x, cotangents)
            limits = bound.bounds(case.spec, x, cotangents, adapter.algorithm, chunk=adapter.chunk)
            assert worst(case.spec, limits, got)[0] < 1, case


@pytest.mark.parametrize(
    ("adapter", "laws"),
    [
        ("verify/zoo/base.py:ServingByAlpha", ("oracle", "untouched", "accept", "fresh", "history", "strides")),
        ("tests/right.py:AlphaProducts", ("cut", "absent", "linear", "recall", "heads", "strides")),
    ],
)
@pytest.mark.slow
def test_right_implementations_hold_under_laws(adapter: str, laws: tuple[str, ...], worker: Worker, tmp_path: pathlib.Path) -> None:
    with Check(Settings(adapter, list(laws), FEW, 7), [worker], Store(tmp_path)) as check:
        reports = check.run()
    assert {report.verdict for report in reports} == {Verdict.HOLDS}, [report.run or report.reason for report in reports]
    assert len(reports) == len(laws)


@pytest.mark.parametrize(("name", "kill"), rows(KILLED_BY))
@pytest.mark.slow
def test_law_alone_kills_what_takes_alpha_wrongly(name: str, kill: Kill, worker: Worker, tmp_path: pathlib.Path) -> None:
    assert_killed_alone(name, kill, worker, tmp_path)
