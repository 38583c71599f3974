"""The verb `twin`: what it says about pairs of tiny implementations, each with one planted difference."""

import dataclasses
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.arithmetic.nearest import Nearest
from oracles.arithmetic.rounding import BITS
from oracles.operation import Inputs
from properties.laws.law import Results
from properties.layers.domain import LayerDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from tests.verbs.test_across import answered, said
from verify.adapters.loader import load
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED, USAGE
from verify.engine.across import BROKEN as IS_BROKEN
from verify.engine.across import SiteVerdict, SiteWorkers, cell_of
from verify.engine.twin import pairs
from verify.engine.twin.cases import cases_of, comparable, declared_for
from verify.engine.twin.causes import BATCH, CHUNK, EPS, GATE, SPLIT, STATE, causes_of
from verify.engine.twin.measures import VOCABULARY, drift_of, log_probabilities, stretches
from verify.engine.twin.pairs import Relation, Twins
from verify.execution import twins
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.execution.twins import ALONE, PART, PARTS, STEPS, TURNED, WHOLE, TooSlow, in_parts, in_way
from verify.process.messages import Way
from verify.process.outcome import Verdict

FILE = str(pathlib.Path(__file__).parents[1] / "twin_adapters.py")
TOKENS = 72


class InProcess(SiteWorkers):
    """Answers in this process."""

    def __init__(self) -> None:
        self.described: dict[str, Any] = {}

    def here(self, run: Run) -> Run:
        return run

    def cell(self, run: Run, declared: dict[str, Any] | None = None) -> SiteVerdict:
        return cell_of(execute(run, declared=declared or {}))

    def ask(self, device: str, question: Any, kind: Any, deadline_s: float | None = None) -> Any:
        assert isinstance(question, Way)
        return twins.went(question)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Described:
    domain: Any


def found(trainer: str, server: str, folder: pathlib.Path, law: str = "again") -> Twins:
    """What `twin` finds about two classes of twin_adapters.py. The promises are judged by one line of a law."""
    sides, lines = [], []
    for name in (trainer, server):
        spec, workers = f"{FILE}:{name}", InProcess()
        domain = load(spec).domain
        workers.described[spec] = Described(domain)
        sides.append(pairs.Side(workers, spec, comparable(domain)))
        words = f"law={law} adapter={spec} gate=1000 beta=one"
        words = f"law=memory adapter={spec} op=gdn_layer" if isinstance(domain, LayerDomain) else words
        words += " in_kernel=both" * (getattr(domain, "in_kernel", ()) == ("both",))
        lines.append([Run.parse(f"{words} lengths=9 backward=no")])
    cases = cases_of([side.domain for side in sides], TOKENS, "cpu", 0)
    return pairs.twins(sides, cases, lines, ("cpu", ""), str(folder), 1, lambda *_: None)


# What twin finds


@pytest.mark.parametrize(
    ("trainer", "server", "knob", "switch", "wrong"),
    [
        ("Steps", "Eps", EPS, "server with eps 1e-6 in place of 1e-5", ["server"]),
        ("DeclaredEps", "Steps", EPS, "server with eps 1e-5 in place of 1e-6", ["server"]),
        ("HalfState", "Steps", STATE, "trainer with exact states in place of bf16 after each token", ["trainer"]),
        ("Steps", "HalfGate", GATE, "server with exact g in place of bf16", ["server"]),
        ("Whole", "HalfGates", GATE, "server with exact g and beta in place of bf16", ["server"]),
        ("Chunk48", "Parts", SPLIT, "trainer in parts of 64 tokens", []),
        ("Chunk48", "InBatches", BATCH, "server each sequence alone", []),
    ],
)
def test_a_planted_difference_is_explained(
    trainer: str, server: str, knob: str, switch: str, wrong: list[str], tmp_path: pathlib.Path
) -> None:
    result = found(trainer, server, tmp_path)
    assert result.cause is not None
    assert (result.cause.knob, result.cause.switch) == (knob, switch)
    assert result.cause.share > 0.9
    assert (result.wrong, result.answer) == (wrong, Relation.WRONG if wrong else Relation.ROUNDING)


def test_the_same_code_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    result = found("Steps", "Steps", tmp_path)
    assert (result.answer, result.causes, result.wrong) == (Relation.SAME, [], [])
    assert [{*pair.unequal.values()} for pair in result.pairs] == [{0.0}, {0.0}]


def test_two_right_algorithms_are_both_within_rounding(tmp_path: pathlib.Path) -> None:
    result = found("Chunk64", "Steps", tmp_path)
    assert (result.answer, result.wrong) == (Relation.ROUNDING, [])
    chunk = next(cause for cause in result.causes if cause.knob == CHUNK)
    assert chunk.share > 0.3 and chunk.switch == "trainer with exact operands in place of bf16 in chunks of 64"


@pytest.mark.parametrize(("trainer", "server", "wrong"), [("Steps", "Late", "server"), ("Late", "Steps", "trainer")])
def test_the_wrong_side_is_named(trainer: str, server: str, wrong: str, tmp_path: pathlib.Path) -> None:
    result = found(trainer, server, tmp_path)
    assert (result.answer, result.wrong) == (Relation.WRONG, [wrong])
    assert result.distance(result.wrong == ["server"]).ratio > 10


def test_a_side_that_fails_is_wrong_and_nothing_is_compared(tmp_path: pathlib.Path) -> None:
    result = found("Steps", "Fails", tmp_path)
    assert (result.wrong, result.distance(1).outputs, result.widest.drift) == (["server"], ("call",), None)


def test_a_promise_that_both_declare_is_judged_to_the_bit(tmp_path: pathlib.Path) -> None:
    both = {
        name: [cell.verdict for cell in kept.cells]
        for kept in found("Promises", "BreaksPromise", tmp_path, "cut at=4").promises
        for name in [kept.promise]
    }
    assert both["split_invariant"][1] == IS_BROKEN != both["split_invariant"][0]
    assert "split_invariant" not in {kept.promise for kept in found("Promises", "Steps", tmp_path).promises}


def test_a_promise_whose_law_has_no_case_leaves_it_undecided(tmp_path: pathlib.Path) -> None:
    assert found("Steps", "Steps", tmp_path, "oracle").answer is Relation.UNDECIDED


def test_a_kernel_on_a_pool_is_called_as_a_rule(tmp_path: pathlib.Path) -> None:
    assert found("Steps", "Pool", tmp_path).answer is Relation.ROUNDING
    calls = ("lengths=9", "lengths=9 packed=yes", "lengths=3+0+1 packed=yes", "lengths=2+2 state=random")
    lines = [f"law=oracle adapter={FILE}:{{}} gate=1000 backward=no {words}" for words in calls]
    assert [execute(Run.parse(line.format("Pool"))).verdict for line in lines] == [Verdict.HOLDS] * 4
    assert [execute(Run.parse(line.format("Forgets"))).verdict for line in lines] == [Verdict.BROKEN] * 4
    long = execute(Run.parse(f"law=oracle adapter={FILE}:Pool lengths=9+1 packed=yes backward=no"))
    assert (long.verdict, "3 tokens" in long.reason) == (Verdict.UNSUPPORTED, True)


def test_parts_of_a_prompt_are_passed_as_a_kernel_on_a_pool_takes_them() -> None:
    """Some tokens of each of two sequences do not lie side by side."""
    assert execute(Run.parse(f"law=oracle adapter={FILE}:Dense lengths=9+9 gate=1000 backward=no")).verdict is Verdict.HOLDS


def test_gates_that_one_kernel_computes_are_given_to_the_other_one(tmp_path: pathlib.Path) -> None:
    right, wrong = (found("Chunk48", name, tmp_path) for name in ("Inside", "NoBias"))
    assert "in_kernel=both" in right.widest.lines[0]
    assert (right.answer, wrong.wrong) == (Relation.ROUNDING, ["server"])


# Measures


def test_the_drift_of_an_output() -> None:
    truth = torch.ones(2, 4, 3, 5)
    other = truth.clone()
    other[1, 2:] += 0.5
    drift = drift_of(truth, other, truth)
    assert drift.tokens == pytest.approx([0, 0, 0.5 / math.sqrt(2), 0.5 / math.sqrt(2)])
    assert (drift.unequal, drift.first) == ([0.0, 0.0, 0.5, 0.5], 2)
    assert drift.log_max == pytest.approx(0, abs=1e-9), "the head divides by the root mean square"
    other[1, 3, 0, 0] = 9.0
    changed = drift_of(truth, other, truth)
    assert changed.log_tokens[3] > 0.1 and changed.log_tokens[2] == pytest.approx(0, abs=1e-9)
    assert 0 < changed.log_mean < changed.log_max
    same = drift_of(truth, truth, truth)
    assert (same.first, same.largest, same.log_max) == (None, 0.0, 0.0)
    assert drift_of(truth * torch.nan, truth, truth).largest == math.inf


def test_the_head_gives_log_probabilities() -> None:
    y = torch.randn(7, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y[0] = 0
    logs = log_probabilities(y)
    assert logs.shape == (7, VOCABULARY)
    assert torch.allclose(logs.exp().sum(-1), torch.ones(7, dtype=torch.float64))
    assert logs[0].std() < 1e-12
    assert 2.5 < logs[1:].std() < 3.5
    assert torch.allclose(log_probabilities(1e-6 * y), logs)


def test_tokens_are_shown_in_stretches() -> None:
    assert stretches(6) == [(0, 1), (1, 2), (2, 4), (4, 6)]
    assert stretches(1) == [(0, 1)]


# Causes


def test_the_share_of_a_cause_is_what_vanishes_with_its_switch() -> None:
    a, d, e = torch.zeros(100), torch.randn(100), torch.randn(100)
    causes = causes_of(
        a, a + d, {STATE: ({}, {"with x": a}), GATE: ({"with y": e}, {}), EPS: ({"with z": d / 2}, {"with z": a + d / 2})}
    )
    assert [cause.knob for cause in causes] == [STATE, EPS, GATE]
    assert [causes[0].share, causes[1].share] == pytest.approx([1, 1])
    assert causes[1].switch == "trainer with z, server with z"
    assert causes[2].share < 0.5
    assert causes_of(a, a, {GATE: ({"with y": e}, {})}) == []


def test_causes_are_looked_for_in_the_first_tokens(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "EXPLAINED", 20)
    cause = found("HalfState", "Steps", tmp_path).cause
    assert cause is not None and (cause.knob, cause.share > 0.9) == (STATE, True)
    assert found("Chunk48", "Parts", tmp_path).causes == [], "the first 20 tokens are equal"
    monkeypatch.setattr(twins, "EXPLAINED", 5)
    case, sizes = Case.parse("lengths=9 packed=yes backward=no"), []

    def call(x: Inputs) -> Results:
        sizes.append(x.cu_seqlens.tolist())
        return {"o": x.v}

    got = in_way(PARTS, call, case.spec, case.inputs("cpu"), lambda name, state: state)
    assert (got["o"].shape[1], sizes) == (5, [[0, 5]])


def test_arithmetic_that_rounds_at_some_places() -> None:
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    gates = Nearest.of_gates(BITS["bf16"])
    assert torch.equal(gates.single(x, "g"), x.bfloat16().double())
    assert torch.equal(gates.single(x, "softplus"), x)
    chunks, both = Nearest.in_chunks("fp16", 32), torch.stack([x, x], -3)
    assert (chunks.chunk, chunks.first, chunks.runs) == (32, 1, 1)
    rounded = chunks.stacked(both, ("U", "elsewhere"))
    assert torch.equal(rounded[..., 1, :, :], x) and torch.equal(rounded[..., 0, :, :], x.half().double())


# Ways and cases


@pytest.mark.parametrize("packed", [False, True])
def test_parts_carry_the_state_and_keep_the_order(*, packed: bool) -> None:
    case = Case.parse(
        f"lengths={PART + 6}{'' if packed else f'+{PART + 6}'} state=zero backward=no packed={'yes' if packed else 'no'}"
    )
    inputs, seen = case.inputs("cpu"), []

    def call(x: Inputs) -> Results:
        seen.append((x.v.shape[1], None if x.cu_seqlens is None else x.cu_seqlens.tolist(), float(x.state.sum())))
        return {"o": x.v.clone(), "final_state": x.state + 1}

    got = in_parts(call, case.spec, inputs, PART, lambda name, state: 2 * state)
    per = inputs.state.numel()
    assert torch.equal(got["o"], inputs.v)
    assert seen == [(PART, [0, PART] if packed else None, 0.0), (6, [0, 6] if packed else None, 2.0 * per)]


def test_other_orders_of_sequences_are_undone() -> None:
    case = Case.parse("lengths=3+3+3 state=random backward=no")
    inputs, batches = case.inputs("cpu"), []

    def call(x: Inputs) -> Results:
        batches.append(x.v.shape[0])
        return {"o": x.v.clone(), "final_state": x.state.clone()}

    def same(name: str, state: Tensor) -> Tensor:
        return state

    for way in (ALONE, TURNED, PARTS):
        got = in_way(way, call, case.spec, inputs, same)
        assert torch.equal(got["o"], inputs.v) and torch.equal(got["final_state"], inputs.state)
    assert batches == [1, 1, 1, 3, 3]


def test_a_kernel_that_gets_a_token_a_call_gets_the_first_tokens_in_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "EXPLAINED", 5)
    inputs, spec = (case := Case.parse("lengths=9+9 backward=no")).inputs("cpu"), case.spec
    for pieces, tokens in ((True, 5), (False, 9)):
        for way in (ALONE, TURNED):
            got = in_way(way, lambda x: {"o": x.v.clone()}, spec, inputs, lambda name, state: state, pieces=pieces)
            assert torch.equal(got["o"], inputs.v[:, :tokens])
        whole = in_way(WHOLE, lambda x: {"o": x.v}, spec, inputs, lambda name, state: state, pieces=pieces)
        assert torch.equal(whole["o"], inputs.v)


def test_steps_that_would_take_too_long_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("lengths=40 backward=no")
    calls = iter(range(100))
    monkeypatch.setattr("verify.execution.twins.time.monotonic", lambda: 9.0 * next(calls))
    with pytest.raises(TooSlow, match=r"a call of 1 tokens takes"):
        in_way(STEPS, lambda x: {"o": x.v}, case.spec, case.inputs("cpu"), lambda name, state: state)
    assert next(calls) < 20


def test_cases_lie_in_both_domains() -> None:
    plain, narrow = Domain(backward=False), Domain(dtypes=("fp32",), packed=True, batched=False, key_widths=(128,), qk_norm=False)
    (case,) = cases_of([plain, narrow], 50, "cpu", 3)
    assert (case.dtype, case.packed, case.lengths, case.key_dim, case.qk_norm, case.seed) == ("fp32", True, (50,), 128, False, 3)
    long, small = cases_of([plain, plain], 4096, "cuda", 0)
    assert (long.lengths, small.lengths, small.values, long.key_dim) == ((4096, 4096), (130, 130), "small", 128)
    assert cases_of([LayerDomain(), LayerDomain(dtypes=("fp32",))], 20, "cpu", 0)[0].cached
    other = Domain(qk_norm_eps=("1e-5",))
    case, _ = cases_of([plain, other], 20, "cpu", 0)
    assert (declared_for(case, plain), declared_for(case, other)["qk_norm_eps"]) == ({}, "1e-6")
    with pytest.raises(ValueError, match="no case of 20 tokens in common"):
        cases_of([plain, Domain(longest=1)], 20, "cpu", 0)


# The command


def adapter(name: str) -> str:
    return f"{FILE}:{name}"


def test_the_command_prints_a_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capfd, "twin", adapter("Chunk48"), adapter("Parts"), "--tokens", "72", "--device", "cpu")
    assert code == HOLDS
    assert [line.split()[0] for line in out.splitlines() if line][:2] == ["trainer", "server"]
    for words in (
        "64 to 71",
        "log-probs     mean",
        "gate precision",
        "cause         split: trainer in parts of 64 tokens explains 100%",
        "promise       deterministic (law again): trainer holds, server holds",
    ):
        assert words in out
    assert out.rstrip().endswith("verdict       both within rounding")


def test_a_wrong_server_exits_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    code, told = answered(capfd, "twin", adapter("Steps"), adapter("Late"), "--tokens", "9", "--seed", "5")
    assert (code, told["answer"], told["wrong"]) == (BROKEN, "wrong", ["server"])
    assert [side["name"] for side in told["sides"]] == ["trainer", "server"]
    (first, _) = told["cases"]
    assert len(first["drift"]["tokens"]) == 9 and "seed=5" in first["lines"][0]
    assert first["cells"][1]["verdict"] == IS_BROKEN


ORCHARD = """
from {tests} import Steps

class Imports(Steps):
    def bring(self):
        import orchard

    def run(self, x):
        import orchard

        return super().run(x)
"""


def test_one_place_serves_both_sides_if_one_of_them_takes_something_from_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "orchard.py").write_text("")
    monkeypatch.chdir(tmp_path)
    pathlib.Path("sides.py").write_text(ORCHARD.format(tests="tests.twin_adapters"))
    imports, plain, place = "sides.py:Imports", adapter("Steps"), ("--path", "place")
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(FILE).parent.parent))
    for pair in ((plain, imports), (imports, plain)):
        code, told = answered(capfd, "twin", *pair, *place, "--tokens", "5", "--device", "cpu")
        assert (code, told["answer"]) == (HOLDS, "same bits"), told
    code, out, err = said(capfd, "twin", plain, plain, *place, "--tokens", "5", "--device", "cpu")
    assert (code, out) == (USAGE, "")
    assert "nothing was imported from" in err and f"it lacks what {plain} imports" in err
    # Of two places each belongs to one side, which must take something from it.
    code, out, _ = said(capfd, "twin", plain, imports, *place, *place, "--tokens", "5", "--device", "cpu")
    assert code == UNDECIDED
    assert "cause         not looked for: the trainer did not run\n" in out and "there is no difference" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((adapter("Steps"), adapter("Gate")), "twin compares rules, kernels on pools and layers, got gdn_gate"),
        ((adapter("Steps"), "fla/chunk_kda"), "both must be of one operation, got gated_delta_rule of"),
        ((adapter("Steps"), "fla/chonk"), "did you mean fla/chunk"),
        ((adapter("Steps"), adapter("Steps"), "--tokens", "1"), "must be a whole number in 2.."),
        ((adapter("Steps"), adapter("Steps"), *("--path", ".") * 3), "at most two places"),
    ],
)
def test_bad_input_is_refused_in_one_line(words: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capfd, "twin", *words)
    assert (code, out) == (USAGE, "")
    assert message in err and err.count("\n") == 1
