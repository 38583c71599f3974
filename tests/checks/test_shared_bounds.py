"""Bounds of several cases at once: each case has its own truth, bit by bit nearly, and a bound of its own size."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import gates
from oracles.arithmetic.rounding import Arithmetic, summed
from oracles.gates import GDN_GATE
from oracles.operation import Inputs
from oracles.tolerance import bound, evaluation
from oracles.tolerance.bound import Bound
from properties.palette import key_of
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from properties.rules.laws import LAWS
from properties.words.example import Example
from tests.checks.test_likeness import off as off_by
from tests.together import for_each
from verify.adapters.base import Adapter
from verify.engine.asking import BATCH, GPU_TRUTHS, POOLED, TRUTHS, ask_all, most_at_once, of_one_key
from verify.engine.drawing import seeded
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.execution.shared_bounds import MOST, NUMBERS, Bounds, numbers, of_calls, together
from verify.findings import known
from verify.findings.store import Store
from verify.process.messages import RunMany, RunOne
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Worker, WorkerLost

RIGHT = "tests/right.py:Chunkwise"
SIZE = 1.6  # of 16 runs each, on other grids: how much more a tensor may be allowed together than alone, or less
SMALL = {"groups": ((1, 2),), "key_dim": 8, "value_dim": 4, "scale": "default", "gate_dtype": "fp32"}


def runs_of(*several: Case, law: str = "oracle", adapter: str = RIGHT) -> list[Run]:
    return [Run(law, adapter, Example(case)) for case in several]


def calls_of(runs: Sequence[Run]) -> list[Any]:
    """The call that each of the runs shares, or None."""
    return [None if shared is None else shared.of for shared in together(runs)]


def alike(**words: object) -> list[Case]:
    """A batch, packed sequences, an empty one and some that repeat a length, with and without a state and backward, of one kind."""
    shared = {"heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 4, "state": "random", "gate": "10", **words}
    kinds = (
        {"lengths": (20, 20)},
        {"lengths": (3, 0, 17), "packed": True, "dt_bias": False},
        {"lengths": (17,), "seed": 7, "state": "none"},
        {"lengths": (65, 2, 2), "packed": True, "offsets": "int32", "values": "correlated"},
        {"lengths": (9, 14), "packed": True, "backward": False, "state": "zero"},
        {"lengths": (0, 0)},
    )
    return [Case(**{**shared, **kind}) for kind in kinds]  # type: ignore[arg-type]


def bounds_alone(case: Case, algorithm: str = "chunkwise") -> Bounds:
    adapter = adapter_of(RIGHT)
    assert isinstance(adapter, Adapter)
    chunk = adapter.chunk if algorithm == adapter.algorithm else None
    return bound.bounds(case.spec, case.inputs(), case.cotangents() if case.backward else None, algorithm, chunk=chunk)


def off(got: Tensor, want: Tensor) -> float:
    """How far off a tensor is, relative to the whole of it."""
    return float((got - want).norm() / want.norm().clamp(min=1e-30)) if want.numel() else 0.0


@pytest.fixture
def many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 16 runs are made at the first look, as a GPU makes its four."""
    monkeypatch.setattr(evaluation, "on_a_gpu", lambda _: True)
    monkeypatch.setattr(bound, "RUNS", 16)


def compared(several: Sequence[Case], algorithm: str = "chunkwise") -> Iterator[tuple[Case, str, Bound, Bound]]:
    """Each tensor's bound as the cases have it together, and as each has it alone."""
    for case, shared in zip(several, together(runs_of(*several)), strict=True):
        assert shared is not None, case
        got, want = shared.bounds(algorithm), bounds_alone(case, algorithm)
        assert list(got) == list(want), case
        for name, one in want.items():
            assert (got[name].value.shape, got[name].allowed.shape) == (one.value.shape, one.allowed.shape), (case, name)
            yield case, name, got[name], one


def widest(several: Sequence[Case], algorithm: str = "chunkwise") -> float:
    """How much more, or less, a tensor of a case is allowed together than alone; the truth must be the same."""
    ratios = [1.0]
    for case, name, both, one in compared(several, algorithm):
        assert off(both.value, one.value) <= 1e-12, (case, name)
        if one.value.numel():
            ratios.append(float((both.allowed.square().mean() / one.allowed.square().mean()).sqrt()))
    return max(*ratios, *(1 / ratio for ratio in ratios))


KINDS: list[dict[str, object]] = [
    {},
    {"dtype": "bf16", "qk_norm": True},
    {"operation": "kda", "dtype": "fp16"},
    {"operation": "kda", "in_kernel": "both"},
    {"operation": "delta_rule", "gate": "forever", "in_kernel": "beta"},
    {"in_kernel": "beta", "beta": "two"},
    {"in_kernel": "gate", "dtype": "bf16", "gate": "mixed"},
    {"in_kernel": "both", "qk_norm": True},
    {"qk_norm": True, "qk_norm_eps": "1e-12", "qk_norm_form": "max", "values": "small"},
]


@pytest.mark.usefixtures("many_runs")
@pytest.mark.parametrize("words", KINDS, ids=str)
@pytest.mark.slow
def test_each_case_has_its_own_truth_and_a_bound_of_its_size(words: dict[str, object]) -> None:
    assert widest(alike(**words)) < SIZE


@pytest.mark.usefixtures("many_runs")
@pytest.mark.slow
def test_so_it_is_for_the_recurrent_class() -> None:
    assert widest(alike(in_kernel="both", dtype="bf16"), "recurrent") < SIZE


def drawn(count: int, **fixed: Any) -> list[Case]:
    """Cases of one kind, whatever they draw besides."""
    several: list[Case] = []
    kind = {**SMALL, "dtype": "fp32", "in_kernel": "both", "qk_norm": True, "beta": "ordinary", **fixed}
    domain = Domain(operation=str(kind.pop("operation", "gated_delta_rule")), in_kernel=(str(kind["in_kernel"]),))
    seeded(cases(domain, longest=70, total=100, **kind), 5, count, several.append)
    return several


@pytest.mark.usefixtures("many_runs")
@pytest.mark.parametrize(
    "fixed",
    [
        {"backward": (True, False)},
        {"in_kernel": "gate", "qk_norm": False, "dtype": "fp16"},
        {"in_kernel": "beta", "dtype": "bf16"},
        {"in_kernel": "none"},
        {"operation": "kda"},
        {"operation": "delta_rule", "in_kernel": "none", "qk_norm": False},
    ],
    ids=str,
)
@pytest.mark.slow
def test_so_it_is_for_drawn_cases(fixed: dict[str, Any]) -> None:
    assert widest(drawn(4, **fixed)) < SIZE


def rows_of_another(
    parameter: Tensor, like: Tensor, calls: Sequence[int] | None, arithmetic: Arithmetic, place: str, right: Any = gates.of_calls
) -> Tensor:
    """The planted fault: each call reads the next one's A_log and dt_bias."""
    values = parameter if calls is None else parameter.roll(1, 1)
    return right(values, like, calls, arithmetic, place)  # type: ignore[no-any-return]


def totals_of_all(
    parameter: Tensor, like: Tensor, calls: Sequence[int] | None, arithmetic: Arithmetic, place: str, right: Any = gates.of_calls
) -> Tensor:
    """The planted fault: the right values, and gradients that are sums over the tokens of all calls."""
    if calls is not None:
        total = parameter.sum(1, keepdim=True)
        parameter = parameter.detach() + (total - total.detach())
    return right(parameter, like, calls, arithmetic, place)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrong", [rows_of_another, totals_of_all])
def test_parameters_of_another_case_or_sums_over_all_would_be_noticed(
    wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [case for case in alike(in_kernel="gate") if case.tokens and case.dt_bias and case.backward]
    monkeypatch.setattr(gates, "of_calls", wrong)
    noticed = {(case, name) for case, name, both, one in compared(several) if off(both.value, one.value) > 1e-6}
    assert {(case, name) for case in several for name in ("dA_log", "ddt_bias")} <= noticed


def gate_inputs(tokens: int, seed: int) -> tuple[Inputs, dict[str, Tensor]]:
    """A call of the gates by themselves, and cotangents."""
    case = Case((tokens,), in_kernel="both", gate="10", heads=3, value_heads=3, seed=seed)
    x = case.inputs()
    return Inputs(a=x.a, b=x.b, A_log=x.A_log, dt_bias=x.dt_bias), {"g": x.a.flip(1), "beta": x.b.flip(1)}


@pytest.mark.usefixtures("many_runs")
def test_a_sum_rounds_as_often_as_in_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a call of many tokens, one of few is allowed as much as alone; with the depth of all, planted, far more."""
    pairs = [gate_inputs(tokens, seed) for seed, tokens in enumerate((2, 1500))]
    beside = {name: torch.cat([x[name] for x, _ in pairs], 1) for name in ("a", "b")}
    rows = {name: torch.stack([x[name] for x, _ in pairs]) for name in ("A_log", "dt_bias")}
    directions = {name: torch.cat([cotangents[name] for _, cotangents in pairs], 1) for name in ("g", "beta")}

    def excess(row: int) -> float:
        both = bound.bounds(of_calls(GDN_GATE), Inputs(**beside, **rows, calls=(2, 1500)), directions, "pointwise")
        alone = bound.bounds(GDN_GATE, *pairs[row], "pointwise")
        for name in ("dA_log", "ddt_bias"):
            assert off(both[name].value[row], alone[name].value) <= 1e-12
        ratios = [(both[name].allowed[row] / alone[name].allowed).log() for name in ("dA_log", "ddt_bias")]
        return float(torch.stack(ratios).abs().max().exp())

    assert max(excess(0), excess(1)) < 1.5
    right = gates.of_calls

    def deep(parameter: Tensor, like: Tensor, calls: Sequence[int] | None, arithmetic: Arithmetic, place: str) -> Tensor:
        monkeypatch.setattr(gates, "summed", summed if calls is None else lambda _: summed(1502))
        return right(parameter, like, calls, arithmetic, place)

    monkeypatch.setattr(gates, "of_calls", deep)
    assert excess(0) > 4


def test_rows_of_calls_must_fit_their_tokens() -> None:
    several = alike(in_kernel="gate")[:2]
    spec = of_calls(several[0].spec)
    inputs = calls_of(runs_of(*several))[0]._joined([case.inputs() for case in several])
    spec.check(inputs)
    for wrong in ((40, 19), (60,), (40, 20, 0)):
        with pytest.raises(ValueError, match=r"calls must be of C = 2 calls and add up to T = 60 tokens, got \("):
            spec.check(inputs.replaced(calls=wrong))


@pytest.mark.slow
def test_a_finer_bound_is_the_cases_own() -> None:
    several = alike(dtype="bf16", in_kernel="gate")
    for case, shared in zip(several, together(runs_of(*several)), strict=True):
        assert shared is not None
        alone = bounds_alone(case)
        for name, limit in shared.bounds("chunkwise").items():
            assert limit.finer is not None
            finer, want = limit.finer(), alone[name].finer
            assert want is not None
            # Of the same runs, around the truth that all share.
            assert torch.equal(finer.value, limit.value), (case, name)
            torch.testing.assert_close(finer.value, want().value, rtol=1e-12, atol=1e-14, msg=f"{name} of {case}")
            torch.testing.assert_close(finer.allowed, want().allowed, rtol=1e-9, atol=0.0, msg=f"{name} of {case}")
            assert (limit.sure, finer.sure) == (1.0, 1.0)


def test_only_what_is_alike_shares_a_call() -> None:
    case = Case(lengths=(20,), gate="10")
    others = [
        dataclasses.replace(case, **{name: value})  # type: ignore[arg-type]
        for name, value in {"scale": "one", "dtype": "bf16", "qk_norm": True, "key_dim": 8, "in_kernel": "gate"}.items()
    ]
    assert calls_of(runs_of(case, *others)) == [None] * 6
    assert calls_of(runs_of(case)) == [None]
    beside = [dataclasses.replace(case, state="zero"), dataclasses.replace(case, backward=False), others[0], others[0]]
    calls = calls_of(runs_of(case, *beside))
    assert calls[0] is calls[1] is calls[2]
    assert calls[3] is calls[4] is not calls[0]
    norms = [dataclasses.replace(case, qk_norm=True, **words) for words in ({}, {"qk_norm_eps": "1e-12"}, {"qk_norm_form": "max"})]
    assert calls_of(runs_of(*norms)) == [None, None, None]
    twice = [dataclasses.replace(case, in_kernel="beta", beta=beta) for beta in ("two", "ordinary")]
    assert calls_of(runs_of(*twice)) == [None, None]
    assert calls_of([Run("cut", RIGHT, Example(dataclasses.replace(case, seed=seed), at=4)) for seed in (1, 2)]) == [None, None]


def test_calls_are_no_larger_than_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(*several: Case) -> list[int]:
        calls = calls_of(runs_of(*several))
        assert all(calls)
        return [len(call.cases) for call in dict.fromkeys(calls)]

    half = (MOST + 2) // 2
    assert sizes(*[Case(lengths=(5,), seed=seed) for seed in range(MOST)]) == [MOST]
    assert sizes(*[Case(lengths=(5,), seed=seed) for seed in range(MOST + 2)]) == [half, half]
    third = NUMBERS // (3 * 8 * 256)
    wide = [Case((third - 256,), key_dim=128, value_dim=128, heads=8, value_heads=8, seed=seed) for seed in range(6)]
    assert 3 * numbers(wide[0]) <= NUMBERS < 4 * numbers(wide[0])
    assert sizes(*wide) == [3, 3]
    long = [dataclasses.replace(case, lengths=(2 * third,)) for case in wide[:2]]
    assert calls_of(runs_of(*long)) == [None, None]
    monkeypatch.setattr("verify.execution.shared_bounds.fitting", lambda most, _: 2 * most // 3)  # of a GPU with less memory
    assert sizes(*wide) == [2, 2, 2]


def test_the_numbers_of_a_case_are_those_of_its_channels_and_states() -> None:
    assert numbers(Case((10, 20), heads=1, value_heads=4, key_dim=128, value_dim=64, packed=True)) == 4 * (30 * 192 + 2 * 128 * 64)
    assert numbers(Case((10,), key_dim=2, value_dim=3)) == 10 * 64 + 6


def test_bounds_are_made_once_and_let_go_after_the_last_of_their_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    plain = bound.bounds

    def counted(*arguments: Any, **named: Any) -> Bounds:
        counts.append(len(arguments[1].get("calls", ())))
        return plain(*arguments, **named)

    monkeypatch.setattr(bound, "bounds", counted)
    several = [Case((5,), seed=seed) for seed in range(3)]
    several.insert(1, Case((5,), dtype="bf16"))  # alone
    several += [Case((6,), dtype="fp16", seed=seed) for seed in range(2)]
    tallies: list[tuple[int, int]] = []
    calls: list[Any] = []
    for shared in together(runs_of(*several)):
        if shared is not None:
            calls.append(shared.of)
            shared.bounds("chunkwise")
            assert shared.bounds("chunkwise").keys() >= {"o", "final_state", "dq"}
        tallies.append((len(counts), sum(bool(call.results) for call in dict.fromkeys(calls))))
    assert counts == [3, 2]
    assert tallies == [(1, 1), (1, 1), (1, 1), (1, 1), (2, 1), (2, 1)]
    assert [call.results for call in calls] == [{}] * 5


def test_what_nobody_uses_is_not_computed() -> None:
    for shared in together(runs_of(*alike())):
        assert shared is not None
        assert (shared.of.results, shared.of.waiting) == ({}, {})


def test_each_case_is_handed_its_own_inputs_once() -> None:
    """Those that it has alone, in memory of its own: what a kernel writes there is in no bound."""
    several = alike()
    calls = []
    for case, shared in zip(several, together(runs_of(*several)), strict=True):
        assert shared is not None
        calls.append(shared.of)
        (inputs, cotangents), case_cotangents = shared.call(), case.cotangents()
        for name, x in case.inputs().items():
            assert torch.equal(inputs[name], x) if isinstance(x, Tensor) else inputs[name] == x, name
        assert (cotangents is None) == (not case.backward)
        assert all(torch.equal(x, case_cotangents[name]) for name, x in (cotangents or {}).items())
        inputs.v.fill_(torch.nan)
        assert all(limit.value.isfinite().all() for limit in shared.bounds("chunkwise").values())
        with pytest.raises(KeyError):
            shared.call()
    assert all("_joined_call" not in vars(call) and not call.waiting for call in calls)


def verdicts(adapter: str, **fixed: Any) -> tuple[list[Verdict], list[Verdict]]:
    """What some cases come to, each alone, and with bounds that all of them share."""
    kind = {**SMALL, "value_dim": 8, "dtype": "fp32", "qk_norm": False, "gate": "64", "values": "ordinary", **fixed}
    examples: list[Example] = []
    in_kernel = (str(fixed.get("in_kernel", "none")),)
    seeded(cases(Domain(in_kernel=in_kernel), **kind).map(Example), 3, 6, examples.append)
    runs = [Run("oracle", adapter, example) for example in examples]
    assert len(runs) == 6
    assert all(calls_of(runs))
    apart = [execute(run).verdict for run in runs]
    return apart, [execute(run, shared).verdict for run, shared in zip(runs, together(runs), strict=True)]


@pytest.mark.parametrize(("adapter", "broken"), [(RIGHT, False), ("zoo/DecayOneTokenEarly", True)])
@pytest.mark.slow
def test_a_wrong_implementation_is_seen_whoever_shares_its_call(adapter: str, broken: bool) -> None:  # noqa: FBT001
    """And a right one is not blamed: of the cases only those over their bound are broken, and those run again alone."""
    apart, shared = verdicts(adapter, state="random")
    assert shared == apart
    assert (Verdict.BROKEN in apart) == broken


@pytest.mark.parametrize(("adapter", "broken"), [("verify/zoo/wrong_gates.py:Stepwise", False), ("zoo/ForgetsDtBias", True)])
@pytest.mark.slow
def test_so_is_one_with_its_gate_in_the_kernel(adapter: str, broken: bool) -> None:  # noqa: FBT001
    apart, shared = verdicts(adapter, in_kernel="gate", dt_bias=True)
    assert shared == apart
    assert (Verdict.BROKEN in apart) == broken


def test_a_bound_of_another_case_would_be_noticed() -> None:
    """The planted fault: rows of a call handed out one case too far."""
    several = [Case(lengths=(20,), gate="10", seed=seed) for seed in range(3)]
    runs = runs_of(*several)
    shifted = [shared.bounds("chunkwise") for shared in together(runs) if shared is not None][1:]
    calls = [shared.call() for shared in together(runs) if shared is not None]
    ready = [
        SimpleNamespace(bytes=0, call=lambda call=call: call, bounds=lambda _, limits=limits: limits)
        for call, limits in zip(calls, shifted, strict=False)
    ]
    found = [execute(run, shared).verdict for run, shared in zip(runs, ready, strict=False)]
    assert found == [Verdict.BROKEN] * 2


@for_each(
    ("law", "device", "most"), [("oracle", "cuda", POOLED), ("cut", "cuda", BATCH), ("future", "cuda", BATCH), ("oracle", "cpu", 1)]
)
def test_a_gpus_worker_gets_more_cases_at_once_where_bounds_are_made_together(law: str, device: str, most: int) -> None:
    assert most_at_once(LAWS[law], Worker(), device) == most


@pytest.mark.parametrize(
    ("law", "device", "most"),
    [("oracle", "cpu", TRUTHS), ("oracle", "cuda", GPU_TRUTHS), ("future", "cpu", BATCH), ("future", "cuda", BATCH)],
)
def test_as_many_ranks_are_computed_as_are_short(law: str, device: str, most: int) -> None:
    ranks: Any = object()
    assert most_at_once(LAWS[law], ranks, device) == most


def test_after_a_question_without_an_answer_every_run_is_a_question_of_its_own(tmp_path: pathlib.Path) -> None:
    questions: list[Any] = []

    class Loses:
        def ask(self, question: RunOne | RunMany) -> dict[str, Any]:
            questions.append(question)
            if isinstance(question, RunMany):
                raise WorkerLost("crashed", "killed by SIGSEGV", "")
            return Outcome(Verdict.HOLDS, rows=len(questions)).to_json()

    runs = runs_of(*[Case((5,), seed=seed) for seed in range(POOLED)])
    lines, worker = [str(run) for run in runs], Loses()
    *held, last = ask_all(runs, worker, Store(tmp_path))  # type: ignore[arg-type]
    assert [outcome.rows for outcome in held] == list(range(2, POOLED + 1))
    assert questions == [RunMany(lines), *map(RunOne, lines)]
    reason = f"the worker crashed while it ran {POOLED} cases, and none fails alone: killed by SIGSEGV"
    assert (last.verdict, last.reason) == (Verdict.UNKNOWN, reason)


@pytest.mark.parametrize(
    ("together", "alone", "verdict"),
    [
        (3.0, 0.5, Verdict.BROKEN),  # an error of another size does not come from the tolerance
        (1.5, 0.9, Verdict.HOLDS),  # the tolerance of a case alone is another one, but not by so much
        (3.0, 5.0, Verdict.BROKEN),
        (0.5, 0.5, Verdict.HOLDS),
    ],
)
def test_a_failure_among_others_that_does_not_come_again_alone_stays(
    together: float, alone: float, verdict: Verdict, tmp_path: pathlib.Path
) -> None:
    class Once:
        def ask(self, question: RunOne | RunMany) -> dict[str, Any]:
            many = isinstance(question, RunMany)
            one = off_by(o=together if many else alone).to_json()
            return {"outcomes": [Outcome(Verdict.HOLDS, rows=1).to_json(), one]} if many else one

    worker: Any = Once()
    first, second = ask_all(runs_of(Case((5,)), Case((6,))), worker, Store(tmp_path))
    assert (first.verdict, second.verdict) == (Verdict.HOLDS, verdict)
    assert (second.worst > 1) is (verdict is Verdict.BROKEN)


def test_what_is_on_file_does_not_run_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is more, or something else besides."""
    monkeypatch.setattr(known.deny_list, "installed", {"fla-core": "0.6.0"}.get)
    entry = """[[defect]]
run = "law=oracle adapter=fla/chunk lengths=5 dtype=bf16"
versions = { fla-core = ["0.6.0"] }
where = "dtype=bf16"
outputs = ["dg"]
times = 4
reason = "for a test"
"""
    (tmp_path / "defects.toml").write_text(entry)
    defects, questions = known.load(tmp_path / "defects.toml"), list[Any]()
    came = {3: [("dg", 3.9)], 4: [("dg", 4.1)], 5: [("dg", 2.0), ("dk", 1.1)], 6: []}

    def outcome(line: str) -> dict[str, Any]:
        found = came[Run.parse(line).example.case.tokens]
        findings = [Finding(name, FailureKind.OFF, "is off", error=error, allowed=1.0) for name, error in found]
        return Outcome(Verdict.BROKEN if found else Verdict.HOLDS, findings).to_json()

    class Answers:
        def ask(self, question: RunOne | RunMany) -> dict[str, Any]:
            questions.append(question)
            if isinstance(question, RunMany):
                return {"outcomes": [outcome(line) for line in question.lines]}
            return outcome(question.line)

    cases_ = [Case((tokens,), dtype="bf16") for tokens in came]
    runs, worker = runs_of(*cases_, Case((6,), dtype="fp32"), adapter="fla/chunk"), Answers()
    got = [result.verdict for result in ask_all(runs, worker, Store(tmp_path), defects)]  # type: ignore[arg-type]
    assert got == [Verdict.BROKEN] * 3 + [Verdict.HOLDS] * 2
    assert questions[0].excused == [{"dg": 4.0}] * 4 + [{}]
    assert questions[1:] == [RunOne(str(run), {}, {"dg": 4.0}) for run in runs[1:3]], "and alone it is judged by the same"
    questions.clear()
    assert [result.verdict for result in ask_all(runs[:1], worker, Store(tmp_path), defects)] == [Verdict.BROKEN]  # type: ignore[arg-type]
    assert questions == [RunMany([str(runs[0])], [{"dg": 4.0}])]


def test_a_question_is_of_one_compile_key() -> None:
    examples = [Example(Case((seed + 1,), dtype=dtype, seed=seed)) for dtype in ("bf16", "fp32") for seed in range(5)]
    got = list(of_one_key(examples, 3))
    assert [len(group) for group in got] == [3, 2, 3, 2]
    assert [example for group in got for example in group] == examples
    assert all(len({key_of(example.case) for example in group}) == 1 for group in got)


@pytest.mark.parametrize("decays", ["values", "both"])
def test_cases_whose_value_channels_become_heads_share_no_call_and_count_them(decays: str) -> None:
    case = Case((20, 20), value_heads=4, key_dim=64, value_dim=32, channel_decays=decays)
    assert calls_of(runs_of(case, dataclasses.replace(case, seed=1))) == [None, None]
    assert calls_of(runs_of(*(Case((9,), channel_decays="keys", seed=seed) for seed in range(2)))) != [None, None]
    plain = dataclasses.replace(case, channel_decays="none")
    count = evaluation.numbers_of(case.spec, case.inputs())
    assert count > 40 * 4 * 32 * 3 * 64 > 50 * evaluation.numbers_of(plain.spec, plain.inputs())
