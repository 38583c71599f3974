"""Which lines of the Python around kernels ran is measured in calls alone, and lines that no case ran have a name in the report."""

import ast
import json
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import reach_library as library
from verify.cli.main import main
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings.law_report import LawReport
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.reach import MOST_FILES, MOST_LINES, ON_A_GPU, Reach
from verify.process.worker import Worker
from verify.reach import lines as recording
from verify.reach import report as reach_report
from verify.reach import statements as findings
from verify.reach.statements import Statements, ranges, statements

LINES = pathlib.Path(library.__file__).read_text().splitlines()
GATE = "law=oracle adapter=tests/reach_adapters.py:UnrunLine op=gdn_gate lengths=5 beta=no backward=no seed=3"
NORM = "law=oracle adapter=tests/reach_adapters.py:UnrunBranch op=l2norm lengths=3 width=5 backward=no"


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    """Another tracer, such as that of pytest-cov, would leave nothing to see."""
    trace = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(trace)


def reach_of(*lines: str) -> Reach:
    reach = Reach()
    for line in lines:
        outcome = execute(Run.parse(line))
        assert outcome.verdict is Verdict.HOLDS
        reach.add(Outcome.from_json(json.loads(json.dumps(outcome.to_json()))).reach)
    return reach


def of(reach: Reach, function: str) -> Statements:
    (found,) = [found for found in statements(reach.lines) if found.function == function]
    return found


def text(lines: tuple[int, ...]) -> list[str]:
    return [LINES[line - 1].strip() for line in lines]


def test_a_wrong_line_that_no_case_runs_is_named_although_the_law_holds() -> None:
    found = of(reach_of(GATE, f"{GATE} dt_bias=no"), "long_gate")
    assert text(found.unrun) == ["wide = a.float()"]
    assert found.unrun[0] > found.ran[-2]
    assert "return -A_log.exp() * torch.nn.functional.softplus(wide)" in text(found.ran)
    assert str(found) == f"long_gate (tests/reach_library.py:{found.unrun[0]})"


def test_a_statement_of_several_lines_counts_once_and_what_raises_does_not_count() -> None:
    found = of(reach_of(GATE), "long_gate")
    assert text(found.ran) == [
        "if a.dim() < 3:",
        "wide = a.float()",
        "if dt_bias is not None:",
        "wide = torch.add(",
        "if (",
        "return -A_log.exp() * torch.nn.functional.softplus(wide)",
    ]


@pytest.mark.slow
def test_lines_after_an_interpreted_launch_count_and_those_of_kernels_do_not() -> None:
    with Worker(60.0) as worker:
        reach = Outcome.from_json(worker.ask(RunOne(NORM))).reach
    assert text(of(reach, "l2norm").ran)[-1] == "return y.reshape(x.shape)"
    assert not of(reach, "l2norm").unrun
    assert "l2norm_kernel" not in {found.function for found in statements(reach.lines)}
    assert {pathlib.Path(file).name for file in reach.lines} == {"reach_library.py", "reach_adapters.py"}


def outside_and_inside(call: Callable[[], Any], *others: Callable[[], Any]) -> set[str]:
    """The functions in which lines are recorded of a call inside, and of others outside."""
    with recording.recorded(frozenset([library.__file__])) as found:
        for other in others:
            other()
        with recording.called():
            call()
        for other in others:
            other()
    assert sys.gettrace() is None
    assert threading.gettrace() is None
    return {found.function for found in statements(found)}


@pytest.mark.skipif(not recording.TRACES, reason="this version of Python has no trace function, and records the whole case")
def test_only_calls_are_recorded_with_the_threads_that_they_start() -> None:
    def accepts() -> None:
        library.accepts(1)

    def in_a_thread() -> None:
        thread = threading.Thread(target=accepts)
        thread.start()
        thread.join()

    assert outside_and_inside(accepts) == outside_and_inside(in_a_thread) == {"accepts"}
    assert outside_and_inside(lambda: None, accepts, in_a_thread) == set()


@pytest.mark.skipif(not recording.TRACES, reason="this version of Python has no trace function, and records the whole case")
def test_simulated_ranks_are_recorded_in_their_threads() -> None:
    barrier = threading.Barrier(2)

    def rank() -> None:
        for _ in range(2):
            barrier.wait(20)
            with recording.called():
                barrier.wait(20)
                library.accepts(1)

    with recording.recorded(frozenset([library.__file__])) as found:
        ranks = [threading.Thread(target=rank) for _ in range(2)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
    assert {found.function for found in statements(found)} == {"accepts"}


def test_each_case_has_its_own_lines() -> None:
    for _ in range(recording.CASES + 2):
        with recording.recorded(frozenset([library.__file__])) as first, recording.called():
            library.accepts(1)
        with recording.recorded(frozenset([library.__file__])) as second, recording.called():
            pass
        assert first
        assert not second


def test_sets_of_files_take_turns_and_keep_their_lines_apart() -> None:
    """More sets than are kept, more cases of one than are kept, and the set of all files between them."""
    other = str(pathlib.Path(library.__file__).with_name("no_such_file.py"))
    sets = [frozenset([library.__file__, f"{other}{number}"]) for number in range(recording.KEPT + 1)]
    for files in (*sets, *sets, *[sets[0], None] * (recording.CASES + 2), sets[1]):
        with recording.recorded(files) as called, recording.called():
            library.accepts(1)
        with recording.recorded(frozenset([other])) as elsewhere, recording.called():
            library.accepts(1)
        with recording.recorded(files) as idle, recording.called():
            pass
        assert library.__file__ in called
        assert library.__file__ not in {*elsewhere, *idle}


def test_another_tracer_is_left_alone_and_the_report_says_so() -> None:
    sys.settrace(lambda frame, event, argument: None)
    try:
        reach = execute(Run.parse(GATE)).reach
        assert sys.gettrace() is not None
    finally:
        sys.settrace(None)
    assert not reach.lines
    assert reach.unrecorded == recording.ANOTHER
    assert f"{reach_report.UNRECORDED}: {recording.ANOTHER}" in reach_report.gaps_of(reach, {})


def test_lines_on_a_gpu_are_printed_as_unrecorded_and_do_not_count() -> None:
    reach = Reach(unrecorded=ON_A_GPU)
    output = f"{reach_report.UNRECORDED}: {ON_A_GPU}"
    assert output in reach_report.not_looked_at(reach, {})
    assert output not in reach_report.gaps_of(reach, {})


def test_the_lines_of_a_law_are_in_its_json() -> None:
    report = LawReport("oracle", "fla/chunk", Verdict.HOLDS, reach=reach_of(GATE))
    data = json.loads(json.dumps(report.to_json()))["reach"]
    assert "lines" not in data
    lines = data["statements"]["tests/reach_library.py:long_gate"]
    assert lines["never_ran"]
    assert {*lines} == {"ran", "never_ran"}


def test_the_report_names_the_lines_and_what_is_left_out() -> None:
    reach = reach_of(GATE)
    (gap,) = [gap for gap in reach_report.not_looked_at(reach, {}) if gap.startswith("Python")]
    assert gap == f"Python that never ran: {of(reach, 'long_gate')}"
    assert not [gap for gap in reach_report.not_looked_at(reach, {"long_gate": "of long sequences"}) if "Python" in gap]
    (left_out,) = [line for line in reach_report.report(reach, {"long_gate": "of long sequences"}) if "left out" in line]
    assert left_out.endswith("long_gate: of long sequences")


def test_ranges_are_short() -> None:
    assert ranges([]) == ""
    assert ranges([9, 3, 4, 5, 7]) == "3-5,7,9"


def test_the_size_of_what_is_recorded_is_bounded() -> None:
    reach = Reach()
    for number in range(2 * MOST_FILES):
        reach.note_lines(str(number), range(2 * MOST_LINES if number == 0 else 2))
    assert len(reach.lines) == MOST_FILES
    assert len(reach.lines["0"]) == MOST_LINES
    assert reach.full


@pytest.mark.slow
def test_another_thread_that_parses_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 raises SystemError then."""
    monkeypatch.setattr(findings, "PAUSE_S", 0.0)
    findings._functions.cache_clear()
    wanted, left = findings._functions(__file__), [None] * 3
    findings._functions.cache_clear()

    def parse(*words: Any, parse: Callable[..., Any] = ast.parse, **options: Any) -> Any:
        if left:
            left.pop()
            raise SystemError("AST constructor recursion depth mismatch (before=177, after=39)")
        return parse(*words, **options)

    monkeypatch.setattr(ast, "parse", parse)
    assert findings._functions(__file__) == wanted
    assert not left
    findings._functions.cache_clear()


@pytest.mark.slow
def test_strict_reach_counts_lines(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "check tests/reach_adapters.py:UnrunLine --profile least --law oracle --workers 1 --device cpu --strict-reach"
    assert main([*words.split(), "--findings", str(tmp_path / "findings")]) == 3
    output = " ".join(capsys.readouterr().out.split())
    assert "HOLDS oracle" in output
    assert output.index("never ran Python: long_gate (tests/reach_library.py:") < output.index("looked at up to ")
    assert "Python that never ran" not in output, "it is said once"
