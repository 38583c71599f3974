"""A smaller case fails as the found one, so that shrinking does not go from one defect to another. Broken laws have causes."""

import argparse
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks import causes as grouping
from benchmarks import failures, pairs, planted
from properties.rules.domain import Domain
from tests.answering import Answering
from tests.faults import different
from tests.kills import Kill, assert_killed_alone
from verify.engine import explaining
from verify.engine.asking import ask
from verify.engine.check import Check
from verify.engine.explaining import explain
from verify.engine.likeness import alike, steady
from verify.engine.profiles import Profile
from verify.engine.shrink import sizes
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings import causes
from verify.findings import report as text
from verify.findings.known import NO_DEFECTS, Known, KnownDefects
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.messages import Describe, Description, Question, RunOne
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Worker

SPEC = "zoo/Conv"
LINE = f"law=oracle adapter={SPEC} lengths=30 op=causal_conv1d width=8 conv_width=4 state=random oldest=no activation=silu seed=7"


def off(**ratios: float) -> Outcome:
    """A broken outcome: outputs with their errors over their tolerances."""
    findings = [Finding(name, FailureKind.OFF, "is off", error=ratio, allowed=1.0) for name, ratio in ratios.items() if ratio > 1]
    return Outcome(Verdict.BROKEN if findings else Verdict.HOLDS, findings, rows=1, ratios=dict(ratios))


def failed(
    kind: FailureKind, what: str, place: str = "", detail: str = "", output: str = "call", ranks: tuple[int, ...] = ()
) -> Outcome:
    return Outcome(Verdict.BROKEN, [Finding(output, kind, what, place, detail=detail, ranks=ranks)])


RAISED = failed(FailureKind.RAISED, "raised ValueError: 65 rows", "run.py:3 in run", "ValueError")


def test_failures_are_alike_in_output_kind_place_rank_and_size() -> None:
    run = Run.parse(LINE)
    rows = [
        (off(o=17, dq=5), off(o=6, dq=2), True),
        (off(o=17, dq=5), off(o=6), True),
        (off(o=17, dq=5), off(o=6, dq=0.5), False),
        (off(o=17), off(o=5.5), False),
        (off(o=900), off(o=8.5), True),
        (off(o=900), off(o=7.5), False),
        (off(dx=300, dweight=40, dh0=9), off(dh0=900), False),
        (off(o=17), off(o=17, dq=3), False),
        (off(o=17), off(o=1e9), True),
        (off(o=17), failed(FailureKind.NOT_FINITE, "is not finite", output="o"), False),
        (off(o=17), off(o=0.9), False),
        (RAISED, failed(FailureKind.RAISED, "raised ValueError: 2 rows", "run.py:3 in run", "ValueError"), True),
        (RAISED, failed(FailureKind.RAISED, "raised ValueError: 2 rows", "run.py:9 in run", "ValueError"), False),
        (RAISED, failed(FailureKind.RAISED, "raised KeyError: 2", "run.py:3 in run", "KeyError"), False),
        (failed(FailureKind.BREACH, "", "", "slot 31 is lost"), failed(FailureKind.BREACH, "", "", "slot 4 is lost"), True),
        (failed(FailureKind.CRASHED, "", "stack 1"), failed(FailureKind.CRASHED, "", "stack 2"), True),
        (failed(FailureKind.OFF, "", ranks=(3,)), failed(FailureKind.OFF, "", ranks=(1,)), False),
        (failed(FailureKind.OFF, "", ranks=(1, 3)), failed(FailureKind.OFF, "", ranks=(1,)), True),
    ]
    assert different(lambda found, smaller: alike(found, run, smaller, run), rows) == []


def test_a_rank_is_the_same_only_on_the_same_mesh() -> None:
    line = "law=parallel adapter=zoo/DropsState lengths=16+8 packed=yes hidden=8 tp={} cp=2 heads=8 value_heads=8"
    run, smaller = (Run.parse(line.format(tp)) for tp in (4, 2))
    four, two = (failed(FailureKind.OFF, "", ranks=(rank,)) for rank in (7, 3))
    assert alike(four, run, two, smaller)
    assert not alike(four, run, two, run)


def test_a_step_leaves_the_error_steady() -> None:
    found, kept, grown = off(o=20), off(o=50), off(o=90)
    assert steady(found, found, kept)
    assert not steady(found, found, grown)
    assert steady(RAISED, RAISED, RAISED)
    assert not steady(found, grown, off(o=9))
    assert steady(found, grown, off(o=9), falls=True)
    assert not steady(found, off(o=9), grown, falls=True)
    assert steady(found, off(o=1e9), off(o=2e3)), "nothing but a defect makes such errors"


def test_fewer_outputs_are_like_all_of_them_if_the_first_fails() -> None:
    run = Run.parse(LINE)
    found = off(o=17, dq=5)
    assert alike(found, run, off(o=6, dq=0.5), run, every=False)
    assert not alike(found, run, off(o=0.5, dq=6), run, every=False)
    assert not alike(found, run, off(o=6, dk=6), run, every=False)


class Telling(Answering):
    """A worker that answers with the outcome that `tell` gives to a run."""

    def __init__(self, tell: Callable[[Run], Outcome], domain: Any = None, book: str = "rules") -> None:
        super().__init__()
        self.tell, self.domain, self.book = tell, domain or Domain(), book

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        if isinstance(question, Describe):
            algorithm = "chunkwise" if self.book == "rules" else "pointwise"
            return Description(self.book, self.domain.to_json(), algorithm, "ieee", "none 1.0", "").to_json()
        if isinstance(question, RunOne):
            self.asked.append(question.line)
            return self.tell(Run.parse(question.line)).to_json()
        return super().ask(question)


def smallest(tell: Callable[[Run], Outcome], line: str, folder: pathlib.Path) -> Any:
    """The case to which a found line shrinks."""
    run = Run.parse(line)
    worker: Any = Telling(tell)
    small, best = explain(run.the_law, run, tell(run), worker, Store(folder), NO_DEFECTS, threading.Event())
    assert best.verdict is Verdict.BROKEN
    return small.example.case


def gradients(run: Run) -> Outcome:
    """Two defects: with several taps, dx and dweight are wrong; and dh0 is always wrong."""
    case = run.example.case
    if not case.backward:
        return off(y=0.1)
    taps = case.conv_width > 1
    return off(dx=300.0 if taps else 0.1, dweight=50.0 if taps else 0.1, dh0=9.0)


def test_a_defect_of_three_gradients_does_not_become_one_of_a_single_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = smallest(gradients, LINE, tmp_path)
    assert case.conv_width == 2
    assert case.lengths == (0,)
    monkeypatch.setattr(explaining, "alike", lambda found, found_run, got, run, every: got.verdict is Verdict.BROKEN)
    monkeypatch.setattr(explaining, "steady", lambda *_, **__: True)
    assert smallest(gradients, LINE, tmp_path).conv_width == 1, "which is what shrinking by the kind of failure alone gives"


def by_condition(run: Run) -> Outcome:
    """Two defects of one output: one needs a state, the other needs no activation."""
    case = run.example.case
    return off(y=40.0 if case.state == "random" or case.activation == "none" else 0.1)


def test_what_simple_cases_alone_show_is_another_defect(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = smallest(by_condition, LINE, tmp_path)
    assert (case.state, case.activation) == ("random", "silu")
    monkeypatch.setattr(explaining, "restored", lambda *_: iter(()))
    case = smallest(by_condition, LINE, tmp_path)
    assert case.activation == "none", "the other defect, unless words are restored to their found values"


def by_size(run: Run) -> Outcome:
    """Two defects of one output: one needs a state, the other, whose error is larger, needs a single tap."""
    case = run.example.case
    return off(y=400.0 if case.conv_width == 1 else 40.0 if case.state == "random" else 0.1)


def test_an_error_of_another_size_is_another_defect(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = smallest(by_size, LINE, tmp_path)
    assert (case.state, case.conv_width) == ("random", 4)
    monkeypatch.setattr(explaining, "steady", lambda *_, **__: True)
    assert smallest(by_size, LINE, tmp_path).conv_width == 1, "the other defect, unless the sizes of errors are compared"


def test_widths_get_small_although_errors_of_one_channel_are_of_any_size(tmp_path: pathlib.Path) -> None:
    for one, many in ((168.0, 5.0), (9.0, 1e5)):
        case = smallest(
            lambda run, one=one, many=many: off(y=one if run.example.case.width < 40 else many),
            f"{LINE} width=40".replace(" width=8", ""),
            tmp_path,
        )
        assert case.width == 1


def test_a_packed_case_stays_packed_and_the_report_says_whether_a_batch_fails_too(tmp_path: pathlib.Path) -> None:
    run, worker = Run.parse(f"{LINE} packed=yes"), Telling(lambda _: RAISED)
    small, _ = explain(run.the_law, run, RAISED, worker, Store(tmp_path), NO_DEFECTS, threading.Event())  # type: ignore[arg-type]
    assert small.example.case.packed
    assert "packed=no" in small.others


def test_a_hang_is_shrunk_only_if_its_deadline_fits_into_the_time_left(tmp_path: pathlib.Path) -> None:
    hung = failed(FailureKind.HUNG, "hung: no answer in time")
    run, worker = Run.parse(LINE), Telling(lambda _: hung)
    for deadline_s, shrinks in ((120.0, False), (1.0, True)):
        worker.deadline_s = deadline_s
        small, _ = explain(run.the_law, run, hung, worker, Store(tmp_path), NO_DEFECTS, threading.Event())  # type: ignore[arg-type]
        assert (small.runs > 0, small.finished) == (shrinks, shrinks)


@pytest.mark.parametrize(("size", "smallest_right"), [("lengths", 4), ("conv_width", 8), ("sequences", 4)])
def test_a_small_size_that_shows_another_defect_than_large_ones_is_not_taken(
    size: str, smallest_right: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(run: Run) -> Outcome:
        """Two defects of one output: one needs a size of four or more, the other a size of one."""
        number = sizes(run.example.case)[size]
        return off(y=40.0 if number >= 4 or number == 1 else 0.1)

    line = LINE.replace("conv_width=4", "conv_width=8").replace("lengths=30", "lengths=30+30+30+30+30")
    assert sizes(smallest(tell, line, tmp_path))[size] == smallest_right
    monkeypatch.setattr(explaining, "between", lambda *_: iter(()))
    assert sizes(smallest(tell, line, tmp_path))[size] == 1, "the other defect, unless sizes between are tried"


def fails_with(fails: Callable[[tuple[int, ...]], object], run: Run) -> Outcome:
    return off(o=40.0 if fails(run.example.case.lengths) else 0.1)


def test_a_defect_of_incomplete_blocks_shrinks_in_every_word(tmp_path: pathlib.Path) -> None:
    for lengths, fails, smallest_right in [
        ("128+65", lambda lengths: any(length % 64 for length in lengths), (1,)),
        ("130", lambda lengths: any(length % 64 for length in lengths), (1,)),
        ("130", lambda lengths: any(length % 2 for length in lengths) or max(lengths) == 130, (1,)),
        ("130+64", lambda lengths: lengths[-1] < max(lengths) or max(lengths) <= 8, (130, 0)),
    ]:
        packed = " packed=yes" if "+" in lengths else ""
        words = f"lengths={lengths}{packed} heads=2 value_heads=4 key_dim=64 value_dim=32 gate=64 state=random seed=7"
        tell = functools.partial(fails_with, fails)
        case = smallest(tell, f"law=oracle adapter=tests/right.py:Chunkwise {words}", tmp_path)
        assert case.lengths == smallest_right, lengths
        assert (case.value_heads, case.key_dim, case.gate, case.state, case.seed) == (1, 1, "forever", "none", 0), lengths


def test_a_class_of_sizes_is_no_threshold_and_lists_get_short(tmp_path: pathlib.Path) -> None:
    for found, fails, smallest_right in [
        ("15+4089", lambda lengths: lengths[-1] % 64, (1,)),  # of 4087 and 4088 tokens, the last chunk is right: 55 and 56
        ("15+4089", lambda lengths: lengths[-1] % 64 and lengths[-1] % 64 not in (55, 56), (1,)),
        ("15+4089", lambda lengths: lengths[-1] > 1000 or lengths == (1,), (1001,)),
        ("58+0+9", lambda lengths: 0 in lengths, (0,)),
        ("7+7+7+7+7", lambda lengths: len(lengths) % 4, (0,)),
        ("+".join(["7"] * 20 + ["40"] + ["3"] * 37), lambda lengths: {7, 40, 3} <= {*lengths}, (7, 40, 3)),
        ("+".join(["2"] * 65), lambda lengths: len(lengths) > 1, (0, 0)),
    ]:
        line = f"law=oracle adapter=tests/right.py:Chunkwise lengths={found} packed=yes key_dim=1 value_dim=1"
        assert smallest(functools.partial(fails_with, fails), line, tmp_path).lengths == smallest_right, found


def test_a_trace_shrinks_beside_fewer_slots_that_would_not_admit_its_requests(tmp_path: pathlib.Path) -> None:
    """Put back beside one slot, the found trace would do nothing, hold, and so seem to show another defect."""

    def tell(run: Run) -> Outcome:
        steps = run.example.case.plan
        stale = {row.start for step in steps if step.kind == "d" for row in step.rows if row.real}
        return off(o=400.0 if any(start and start % 64 == 0 for start in stale) else 0.1)

    trace = "p:b5,_2/p:a64,c3/v3:_,b2,c3/d:b,c,a/s:a,_/w:c/f:b/p:d7/d:d,c,a,_/k:e<a@/d:e/r:c/p:c12"
    line = f"law=session adapter=zoo/StatesRoundToHalf op=serving trace={trace} slots=6 width=3 seed=7"
    case = smallest(tell, line, tmp_path)
    assert (case.trace, case.slots) == ("p:a64/d:a", 1)


def test_the_next_full_chunk_is_a_neighbour(tmp_path: pathlib.Path) -> None:
    run = Run.parse("law=oracle adapter=tests/right.py:Chunkwise lengths=63 key_dim=1 value_dim=1 seed=5")
    worker: Any = Telling(lambda run: off(o=40.0 if run.example.case.lengths[0] % 64 > 16 else 0.1))
    small, _ = explain(run.the_law, run, off(o=40.0), worker, Store(tmp_path), NO_DEFECTS, threading.Event())
    assert small.example.case.lengths == (17,)
    assert {"lengths=16", "lengths=64"} <= {*dict(small.neighbours)}


def test_neighbours_are_tried_also_at_the_limit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are neighbours of the last case, and not of a larger one at which shrinking looked before."""
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 16)
    line = "law=oracle adapter=tests/right.py:Chunkwise lengths=130+64+9 packed=yes value_heads=4 key_dim=64 value_dim=64 gate=64"
    run = Run.parse(f"{line} dtype=bf16 values=large state=random seed=7")
    worker: Any = Telling(
        lambda run: off(
            o=40.0 if run.example.case.dtype == "bf16" and not run.example.case.qk_norm and run.example.case.tokens else 0.1
        )
    )
    small, _ = explain(run.the_law, run, off(o=40.0), worker, Store(tmp_path), NO_DEFECTS, threading.Event())
    assert (small.finished, small.limit) == (False, "16 runs")
    assert small.runs <= 18
    for what, _ in small.neighbours:
        words = {**small.example.case.words(), **dict(word.split("=") for word in what.split())}
        one = type(small.example.case).parse(" ".join(f"{name}={value}" for name, value in words.items()))
        assert not (one.dtype == "bf16" and not one.qk_norm and one.tokens), what
    assert small.neighbours


def test_shrinking_is_limited_by_the_cpu_time_of_its_worker(tmp_path: pathlib.Path) -> None:
    """On a busy machine a run takes longer, and not more CPU time."""

    def tell(run: Run) -> Outcome:
        return dataclasses.replace(off(o=40.0 if run.example.case.tokens > 7 else 0.1), cpu_s=2.0)

    run, worker = Run.parse("law=oracle adapter=tests/right.py:Chunkwise lengths=130 state=random"), Telling(tell)
    small, _ = explain(run.the_law, run, tell(run), worker, Store(tmp_path), NO_DEFECTS, threading.Event(), 20.0)  # type: ignore[arg-type]
    assert (small.finished, small.limit) == (False, "20 s of CPU time")
    assert 10 < small.runs <= 12


def test_a_size_above_which_nothing_is_simpler_leaves_the_smallest_case_of_before(tmp_path: pathlib.Path) -> None:
    found = Run.parse(LINE)

    def tell(run: Run) -> Outcome:
        case = run.example.case
        return off(
            y=40.0 if run == found or case.lengths == (0,) or (case.lengths, case.width, case.seed) == ((30,), 1, 0) else 0.1
        )

    assert smallest(tell, LINE, tmp_path).lengths == (0,)


def test_a_value_that_prevented_the_failure_is_not_taken_later(tmp_path: pathlib.Path) -> None:
    def tell(run: Run) -> Outcome:
        """One defect needs several channels, the other certain numbers, which are tried after the widths."""
        case = run.example.case
        return off(y=40.0 if case.width > 4 or case.seed == 0 else 0.1)

    case = smallest(tell, LINE, tmp_path)
    assert case.width == 8


def test_a_finer_dtype_is_reported_and_not_taken(tmp_path: pathlib.Path) -> None:
    run = Run.parse(LINE + " dtype=bf16")
    for exact in (True, False):
        worker: Any = Telling(lambda run, exact=exact: off(y=20) if exact or run.example.case.dtype == "bf16" else off(y=0.1))
        small, _ = explain(run.the_law, run, off(y=20), worker, Store(tmp_path), NO_DEFECTS, threading.Event())
        assert small.example.case.dtype == "bf16"
        assert small.others == (("dtype=fp32",) if exact else ())
        assert ("dtype=fp32" in dict(small.neighbours)) is not exact


def test_a_case_does_not_become_one_that_looks_like_a_known_defect(tmp_path: pathlib.Path) -> None:
    known = Known(
        Run.parse("law=oracle adapter=fla/conv lengths=1 op=causal_conv1d width=1 conv_width=1"),
        {"fla-core": ("0.0.1",)},  # not the installed version, and not the adapter that is checked
        {"conv_width": "1"},
        "a call with one tap is wrong",
    )
    run, worker = Run.parse(LINE), Telling(lambda run: off(y=40.0))
    for defects, taps in ((KnownDefects([known]), 2), (NO_DEFECTS, 1)):
        small, _ = explain(run.the_law, run, off(y=40.0), worker, Store(tmp_path), defects, threading.Event())  # type: ignore[arg-type]
        assert small.example.case.conv_width == taps


# A law after a marginal case, and laws that fail at once


def checked(tell: Callable[[Run], Outcome], laws: list[str], folder: pathlib.Path, cases: int = 12) -> list[LawReport]:
    worker: Any = Telling(tell)
    with Check(Settings("tests/right.py:Chunkwise", laws, Profile("some", cases)), [worker], Store(folder), defects=[]) as check:
        return check.run()


class Counting:
    """Tells outcomes by the number of the case; the same line gets the same outcome."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self.outcomes, self.lines = outcomes, dict[str, int]()

    def __call__(self, run: Run) -> Outcome:
        number = self.lines.setdefault(str(run), len(self.lines) + 1)
        return self.outcomes.get(number, off(o=0.5))


NAN = failed(FailureKind.NOT_FINITE, "is not finite", output="dq")


@pytest.mark.parametrize(
    ("outcomes", "worst", "case"),
    [
        ({3: off(o=1.03), 7: NAN}, NAN, 7),
        ({3: off(o=1.03), 5: off(o=30), 9: NAN}, NAN, 9),
        ({3: off(o=1.03), 5: off(o=1.5)}, off(o=1.5), 5),
        ({3: off(o=1.5), 5: off(o=1.03)}, off(o=1.5), 3),
        ({3: off(o=2.5), 5: NAN}, off(o=2.5), 3),
    ],
)
def test_a_marginal_case_hides_no_worse_one(
    outcomes: dict[int, Outcome], worst: Outcome, case: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 0)
    (report,) = checked(Counting(outcomes), ["packed"], tmp_path)
    assert report.verdict is Verdict.BROKEN
    assert [finding.to_json() for finding in report.findings] == [finding.to_json() for finding in worst.findings]
    assert report.found_case == case
    broken = report.counts[Verdict.BROKEN]
    assert broken == (1 if outcomes[3].worst >= 2 else len(outcomes))
    assert (f"in case {case}, the worst of {broken} broken cases" in text.failure(report)) is (broken > 1)


@pytest.mark.slow
def test_a_call_that_fails_in_the_first_case_of_every_law_is_one_report(tmp_path: pathlib.Path) -> None:
    laws = ["packed", "cut", "future", "pure"]
    reports = checked(lambda run: RAISED, laws, tmp_path)
    assert {report.verdict for report in reports} == {Verdict.BROKEN}
    texts = [failure for report in reports if (failure := text.failure(report))]
    assert len(texts) == 1
    assert "the call fails in the first case of each of the 4 laws that were checked\n  call: raised ValueError" in texts[0]
    assert [report.same_as for report in reports] == ["", *["packed"] * 3]
    assert causes.lines(reports) == []


def test_a_law_whose_first_case_hangs_does_not_wait_for_the_others(tmp_path: pathlib.Path) -> None:
    hung = failed(FailureKind.HUNG, "hung: no answer within 120 s")
    reports = checked(lambda run: hung, ["packed", "cut", "future"], tmp_path)
    assert [report.same_as for report in reports] == [""] * 3


def test_laws_that_fail_at_once_while_others_do_not_are_reported_alone(tmp_path: pathlib.Path) -> None:
    laws = ["packed", "cut", "future", "pure"]
    reports = checked(lambda run: off(o=0.5) if run.law == "pure" else RAISED, laws, tmp_path)
    assert {report.law: str(report.verdict) for report in reports} == dict.fromkeys(laws[:3], "broken") | {"pure": "holds"}
    assert all(text.failure(report) for report in reports if report.verdict is Verdict.BROKEN)
    assert all(Run.parse(report.run).example.case.key_dim == 1 for report in reports if report.verdict is Verdict.BROKEN)
    assert causes.lines(reports)[0].startswith("probably one cause: 3 laws (cut, future, packed): call raised ValueError")


# Cases that are small enough fail in fewer outputs than the found ones, or at a much smaller error over their tolerance.
SMALLER = {"OneHeadOfOneRequest": Kill("oracle", 16, 3), "EpsAsFloor": Kill("norm", 2)}


@pytest.mark.parametrize(("name", "kill"), SMALLER.items(), ids=[*SMALLER])
@pytest.mark.slow
def test_one_of_the_outputs_that_failed_is_enough_for_a_short_case(
    name: str, kill: Kill, worker: Worker, tmp_path: pathlib.Path
) -> None:
    assert_killed_alone(name, kill, worker, tmp_path)


def broken(
    law: str, line: str, outcome: Outcome, *neighbours: str, fails_too: tuple[str, ...] = (), ordinary: str = ""
) -> LawReport:
    run = f"law={law} adapter=zoo/DropsState {line}"
    report = LawReport(law, "", Verdict.BROKEN, run=run, findings=outcome.findings, ordinary=ordinary.split())
    return dataclasses.replace(report, neighbours=[*neighbours], fails_too=[*fails_too])


def test_a_report_leaves_out_what_is_too_long_to_read() -> None:
    case = f"trace=p:{','.join(['_1'] * 200)}"
    assert "holds with   lengths=1\n" in text.failure(broken("oracle", "lengths=2", off(o=9), "lengths=1", case))
    assert "holds with" not in text.failure(broken("oracle", "lengths=2", off(o=9), case))


def test_two_causes_of_nine_laws_are_kept_apart() -> None:
    small = "key_dim=1 value_dim=1"
    values = [
        broken("oracle", f"lengths=2 {small}", off(o=9, final_state=9), "lengths=1"),
        broken("packed", f"at=0 lengths=2+1 packed=yes {small}", off(o=9), "lengths=1+1", fails_too=("dtype=fp32",)),
        broken("cut", f"at=1 lengths=3 {small}", off(o=9, final_state=90), "lengths=2"),
        broken("permuted", f"lengths=2 dtype=bf16 {small}", off(o=4), "lengths=1", fails_too=("dtype=fp32",)),
    ]
    gates = [
        broken(law, f"lengths=65 gate=1000 {small}", off(dg=50), "gate=forever", "lengths=64")
        for law in ("oracle", "permuted", "memory", "again", "pure")
    ]
    first, second = causes.groups([*values, *gates])
    assert {one.law for one in first} == {"oracle", "permuted", "memory", "again", "pure"}
    assert {one.law for one in second} == {"oracle", "packed", "cut", "permuted"}
    title, line, _ = causes.lines([*values, *gates])
    assert title == "9 broken laws fail in 2 ways; laws that fail in the same way probably have one cause:"
    assert line == "  5 laws (again, memory, oracle, permuted, pure): dg is wrong; holds with another gate"
    assert causes.lines(values[:1]) == []
    for other in (
        broken("oracle", f"lengths=2 {small}", off(dq=9), "lengths=1"),
        broken("oracle", f"lengths=2 dtype=bf16 {small}", off(o=9), "lengths=1", "dtype=fp32"),
        broken("oracle", f"lengths=65 {small}", off(o=9), "lengths=64"),
        broken("oracle", "lengths=2 key_dim=32 value_dim=1", off(o=9), "lengths=1", "key_dim=16"),
        broken("oracle", f"lengths=2 heads=2 value_heads=4 {small}", off(o=9), "heads=1 value_heads=1"),
        broken("oracle", f"lengths=2 {small}", off(o=9), "gate=forever"),
        broken("oracle", f"lengths=2 {small}", failed(FailureKind.NOT_FINITE, "", output="o"), "lengths=1"),
    ):
        assert len(causes.groups([values[2], other])) == 2, other


def test_what_numbers_hide_and_chance_decides_makes_no_other_cause() -> None:
    packed = broken("packed", "at=1 lengths=1+5 packed=yes key_dim=1 value_dim=1 gate=1000 state=random", off(o=9, final_state=9))
    for other in (
        broken(
            "oracle", "lengths=2 key_dim=1 value_dim=1 beta=zero", off(dbeta=99), "lengths=1", ordinary="dbeta dk final_state o"
        ),
        broken("again", "lengths=99 key_dim=8 value_dim=1 seed=9", off(o=30), "seed=0", "lengths=64", "key_dim=1"),
        broken("memory", "lengths=40 key_dim=8 value_dim=1", off(o=1.5), "lengths=32", "key_dim=1", "heads=1 value_heads=1"),
        broken("pure", "lengths=1 key_dim=1 value_dim=1 state=random", off(o=30), "state=none"),
    ):
        assert len(causes.groups([packed, other])) == 1, other
        assert causes.lines([packed, other])[0].startswith(
            f"probably one cause: 2 laws ({', '.join(sorted((other.law, 'packed')))}):"
        )
    for other in (
        broken("oracle", "lengths=2 key_dim=1 value_dim=1 beta=zero", off(dbeta=99), "lengths=1"),
        broken("oracle", "lengths=2 key_dim=1 value_dim=1 gate=10", off(o=9), "gate=1000"),
    ):
        assert len(causes.groups([packed, other])) == 2, other
    stateless = broken("permuted", "lengths=1+1 key_dim=1 value_dim=1", off(o=9))
    assert (
        len(causes.groups([stateless, broken("pure", "lengths=1 key_dim=1 value_dim=1 state=zero", off(o=9), "state=none")])) == 2
    )


# The benchmarks


def test_reports_in_a_file_are_grouped_as_before_and_two_causes_are_mixed(tmp_path: pathlib.Path) -> None:
    one = [broken(law, "lengths=1 key_dim=1 value_dim=1", off(o=9)) for law in ("oracle", "again")]
    other = [broken(law, "lengths=1 key_dim=1 value_dim=1", off(dg=9)) for law in ("oracle", "permuted")]
    file = tmp_path / "reports.jsonl"
    kinds = {"DropsState": one, "LeaksState": other}
    lines = [json.dumps({"name": name, "reports": [report.to_json() for report in reports]}) for name, reports in kinds.items()]
    file.write_text("\n".join(lines), encoding="utf-8")
    checked = grouping.read(file)
    assert [(kind.name, causes.groups(kind.reports)) for kind in checked] == [
        (name, causes.groups(reports)) for name, reports in kinds.items()
    ]
    options = argparse.Namespace(seed=0, pairs=9)
    assert grouping.pairs(checked, options) == (0, 1), "no group has laws of both"
    same = dataclasses.replace(checked[1], reports=tuple(broken("permuted", "lengths=1 key_dim=1", off(o=9)) for _ in range(2)))
    assert grouping.pairs([checked[0], same], options) == (1, 0)


def test_the_cpu_seconds_of_a_command_are_those_of_its_processes() -> None:
    busy = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert failures.cpu_of(process.pid) >= 0.25
        process.kill()


def test_planted_defects_are_both_there_and_can_be_mended() -> None:
    both, alone = planted.join("DropsState", "LeaksState"), planted.join("DropsState", "DropsState")
    assert both is not None
    assert both.between is not planted.join("Chunkwise", "LeaksState").between  # type: ignore[union-attr]
    assert alone is not None
    assert alone.__name__ == "DropsState"
    assert planted.join("DropsState", "ConvLeaks") is None, "of other operations"
    assert planted.join("ConvClips", "ConvWritesBeforeX") is not None, "each edit begins with the step of its base"
    assert planted.join("ConvAlwaysSilu", "ConvSiluOverflows") is None, "the first edit would hide the second"
    for name in ("DropsState__LeaksState__never", "DropsState__Nothing", "nothing"):
        with pytest.raises(AttributeError):
            getattr(planted, name)


@pytest.mark.slow
def test_the_benchmark_knows_which_defect_was_found(
    worker: Worker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs.Pair("ConvStateTooEarly", "ConvAlwaysSilu", "", "permuted")
    assert pairs.half_of(pair.first, pair.second) == pairs.half_of(pair.second, pair.first)
    words = "lengths=2+2 op=causal_conv1d dtype=fp16 values=repeated bias=yes activation=silu state=zero oldest=no seed=6423"
    run, store = Run.parse(f"law=permuted adapter={pair.broken} {words}"), Store(tmp_path)
    outcome = ask(run, worker, store)
    finding = pairs.Found(run, pair.mended[0])
    assert pairs.Found.from_json(finding.to_json()) == finding
    found = pairs.shrunk(finding, worker, store, outcome)
    assert found.right
    assert found.words <= len(str(run).split())
    monkeypatch.setattr(explaining, "alike", lambda found, found_run, got, run, every: got.verdict is Verdict.BROKEN)
    monkeypatch.setattr(explaining, "steady", lambda *_, **__: True)
    assert not pairs.shrunk(finding, worker, store, outcome).right
