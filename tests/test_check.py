"""A check counts what it saw, repeats itself, survives what kernels do, and says of itself when it could not decide."""

import contextlib
import dataclasses
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from oracles.tolerance import bound
from properties.laws.law import Blind
from properties.modules.domain import ModuleDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.laws import LAWS
from properties.words.example import Example
from properties.words.sizes import MOST, sized, with_drawing
from tests.answering import Answering
from tests.checking import FEW, RIGHT, checked
from tests.commands import Command
from tests.faults import different
from verify.adapters import loader
from verify.adapters.registry import AdapterError
from verify.bench.adapter_bench import AdapterBench
from verify.cli.exits import UNDECIDED, exit_code
from verify.engine import asking, explaining, law_check
from verify.engine.asking import ask, describe
from verify.engine.check import Check
from verify.engine.compile_plan import Plan
from verify.engine.compilers import Compilers
from verify.engine.profiles import BASE, PROFILES, Profile
from verify.engine.state import Settings
from verify.execution import execute as execute_module
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings import report as text
from verify.findings.law_report import ENOUGH, LawReport, overall
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.process.messages import Question, RunOne
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Worker
from verify.zoo import base

NOBODY = Compilers([], None)


def test_nothing_is_green_by_default() -> None:
    for counts, verdict in [
        ({}, Verdict.UNKNOWN),
        ({Verdict.HOLDS: 1}, Verdict.HOLDS),
        ({Verdict.HOLDS: ENOUGH - 1}, Verdict.HOLDS),
        ({Verdict.HOLDS: ENOUGH - 1, Verdict.BLIND: 1}, Verdict.UNKNOWN),
        ({Verdict.HOLDS: ENOUGH, Verdict.BLIND: 1000}, Verdict.HOLDS),
        ({Verdict.BLIND: 40}, Verdict.UNKNOWN),
        ({Verdict.UNSUPPORTED: 40}, Verdict.UNKNOWN),
        ({Verdict.KNOWN: 40}, Verdict.UNKNOWN),
        ({Verdict.HOLDS: ENOUGH, Verdict.KNOWN: 35}, Verdict.HOLDS),
        ({Verdict.HOLDS: 1000, Verdict.UNKNOWN: 1}, Verdict.UNKNOWN),
        ({Verdict.HOLDS: 1000, Verdict.UNKNOWN: 9, Verdict.BROKEN: 1}, Verdict.BROKEN),
        ({Verdict.BROKEN: 1}, Verdict.BROKEN),
    ]:
        got, reason = overall(counts, "the oracle gave up")
        assert got is verdict, counts
        if got is Verdict.UNKNOWN:
            assert reason, counts


def test_reason_of_the_undecided_comes_with_their_number() -> None:
    assert overall({Verdict.UNKNOWN: 3, Verdict.HOLDS: 9}, "the oracle gave up")[1] == "3 of 12 cases undecided: the oracle gave up"
    assert overall({Verdict.HOLDS: 2, Verdict.BLIND: 38})[1] == "only 2 of 40 cases could have shown a defect; a verdict needs 5"


def test_every_profile_has_enough_cases_to_hold() -> None:
    assert {name for name, profile in PROFILES.items() if profile.examples < ENOUGH} == {"least"}  # there all that are drawn must
    assert overall({Verdict.HOLDS: PROFILES["least"].examples}) == (Verdict.HOLDS, "")
    assert overall({Verdict.HOLDS: 1, Verdict.BLIND: PROFILES["least"].examples - 1})[0] is Verdict.UNKNOWN
    assert {name for name, profile in PROFILES.items() if not profile.fixed_seed} == {"soak"}


def drawn(seed: int, store: Store, worker: Worker) -> list[str]:
    lines: list[str] = []
    begin = store.begin
    store.begin = lambda line: (lines.append(line), begin(line))[1]  # type: ignore[method-assign]
    checked(RIGHT, ["recall"], [worker], store, seed=seed)
    return lines


@pytest.mark.slow
def test_same_seed_draws_the_same_lines_and_another_seed_others(workers: list[Worker], tmp_path: pathlib.Path) -> None:
    first, again, other = (drawn(seed, Store(tmp_path / str(n)), workers[0]) for n, seed in enumerate((3, 3, 4)))
    assert first == again
    assert len(set(first)) > 4
    fixed = len(list(LAWS["recall"].always(sized(base.Chunkwise.domain, base.Chunkwise.chunk, MOST["quick"]))))
    assert len(set(first) & set(other)) <= 1 + fixed, "but for the simplest example, and those that a law always has"


@pytest.mark.slow
def test_laws_run_in_several_workers_at_once(workers: list[Worker], store: Store) -> None:
    threads = set[int]()
    both = threading.Barrier(2, timeout=30)

    def on_case(law: str, done: int, of: int) -> None:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            both.wait()  # two laws are under way together, or this breaks

    reports = checked(RIGHT, ["recall", "pure"], workers, store, on_case=on_case)
    assert {report.law: report.verdict for report in reports} == {"recall": "holds", "pure": "holds"}
    assert len(threads) == 2


@pytest.mark.slow
def test_progress_counts_to_the_number_of_cases(workers: list[Worker], store: Store) -> None:
    steps: list[tuple[str, int, int]] = []
    (report,) = checked(RIGHT, ["recall"], workers, store, on_case=lambda *progress: steps.append(progress))
    assert [done for _, done, _ in steps] == list(range(1, len(steps) + 1))
    assert {(law, of) for law, _, of in steps} == {("recall", FEW.examples_of(LAWS["recall"]))}
    assert sum(report.counts.values()) == len(steps)


@pytest.mark.slow
def test_stop_at_first_leaves_the_other_laws(workers: list[Worker], store: Store) -> None:
    reported: list[LawReport] = []
    settings = Settings("zoo/ChangesBeta", ["pure", *[law for law in LAWS if law != "pure"]], FEW, stop_at_first=True)
    with Check(settings, 1, store, on_report=reported.append) as check:
        reports = check.run()
    assert [report.law for report in reports] == ["pure"]
    assert reports[0].verdict is Verdict.BROKEN
    assert reported == reports


@pytest.mark.slow
def test_lost_process_is_a_broken_law_with_a_small_case_and_the_rest_runs(
    workers: list[Worker], store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 10)  # a lost worker costs a second
    file = tmp_path / "fatal.py"
    file.write_text(
        "import os\nfrom tests.right import Chunkwise\nfrom verify import Domain\n"
        "class Fatal(Chunkwise):\n"
        "    domain = Domain(backward=False)\n"
        "    def run(self, x):\n"
        "        if x.qk_norm and x.q.shape[1] > 20:\n            os._exit(7)\n"
        "        return super().run(x)\n"
    )
    reports = {report.law: report for report in checked(f"{file}:Fatal", ["norm", "recall"], workers, store)}
    assert reports["recall"].verdict is Verdict.HOLDS
    lost = reports["norm"]
    assert lost.verdict is Verdict.BROKEN
    assert lost.findings[0].what == "crashed: exited with code 7"
    assert 21 <= Run.parse(lost.run).example.case.tokens < 30
    findings = (store.folder / "findings.jsonl").read_text()
    assert lost.run in findings
    assert lost.first_run in findings
    assert [path.name for path in store.folder.iterdir()] == ["findings.jsonl"]


def test_exception_is_a_broken_law_shrunk_to_its_boundary(workers: list[Worker], store: Store) -> None:
    (report,) = checked("zoo/Raises", ["pure"], workers, store, profile=PROFILES["quick"])
    assert report.verdict is Verdict.BROKEN
    assert report.shrunk
    assert report.findings[0].what == "raised RuntimeError: block size 20 exceeded"
    assert Run.parse(report.run).example.case.lengths == (21,)
    assert "lengths=20" in report.neighbours


@pytest.mark.slow
def test_hang_is_a_broken_law(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 2)
    with Check(Settings("zoo/Hangs", ["recall"], FEW, 0, deadline_s=1.0), 1, store) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.BROKEN
    assert report.findings[0].what.startswith("hung: no answer within 1 s, in run (wrong_rules.py:")
    assert not report.shrunk


def test_finding_is_on_disk_before_it_is_shrunk(workers: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise SystemExit("the machine went away")

    monkeypatch.setattr(explaining, "shrink", killed)
    with pytest.raises(SystemExit):
        checked("zoo/ChangesBeta", ["pure"], workers, store)
    (line,) = (store.folder / "findings.jsonl").read_text().splitlines()
    assert '"stage": "found"' in line
    assert "law=pure adapter=zoo/ChangesBeta" in line


def test_full_disk_stops_no_check(workers: list[Worker], tmp_path: pathlib.Path) -> None:
    (tmp_path / "findings.jsonl").symlink_to("/dev/full")
    store = Store(tmp_path)
    (report,) = checked("zoo/ChangesBeta", ["pure"], workers, store)
    assert report.verdict is Verdict.BROKEN
    assert report.run
    assert "No space left" in (store.trouble or "")


def test_law_outside_the_domain_is_unsupported_with_the_reason(workers: list[Worker], store: Store, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "narrow.py"
    file.write_text(
        "from tests.right import Chunkwise\nfrom verify import Domain\n"
        "class Narrow(Chunkwise):\n    domain = Domain(initial_state=False, packed=False)\n"
    )
    reports = checked(f"{file}:Narrow", ["cut", "packed", "recall"], workers, store)
    outcomes = {report.law: (report.verdict, report.reason) for report in reports}
    assert outcomes["cut"] == (Verdict.UNSUPPORTED, "initial state is not supported")
    assert outcomes["packed"] == (Verdict.UNSUPPORTED, "packed is not supported")
    assert outcomes["recall"][0] is Verdict.HOLDS


def test_case_outside_the_domain_is_unsupported_and_counted_apart() -> None:
    run = Run("oracle", "zoo/Exits", Example(Case((30,), backward=True)))
    outcome = execute(run)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNSUPPORTED, "backward=yes is not supported")


@pytest.mark.parametrize("error", [ValueError("no truth today"), AssertionError(), ZeroDivisionError("0 rows")])
def test_oracle_that_raises_is_unknown_and_not_the_kernels_fault(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(bound, "bounds", fail)
    outcome = execute(Run("oracle", RIGHT, Example(Case((3,)))))
    assert outcome.verdict is Verdict.UNKNOWN
    assert outcome.reason.startswith(f"gdn-verify failed: {type(error).__name__}: ")
    assert re.fullmatch(rf"{type(error).__name__} at verify/bench/memo.py:\d+ in \w+", outcome.fault)
    assert outcome.findings == []


@pytest.mark.slow
def test_a_failure_of_ours_has_its_place_in_a_checkout_behind_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(pathlib.Path(__file__).resolve().parent.parent)
    program = (
        "import sys\nsys.path.insert(0, 'link')\n"
        "ours = ('oracles', 'properties', 'verify')\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] in ours]:\n    del sys.modules[name]\n"
        "from oracles.operations import OPERATIONS\nfrom verify.execution.judging import faulted\n"
        "try:\n    OPERATIONS['l2norm'].check(None)\nexcept Exception as error:\n    print(faulted(error).fault)\n"
    )
    with Command([], tmp_path, program=program + "import verify\nprint(verify.__file__)\n") as done:
        out, _ = done.communicate(timeout=60)
    assert re.fullmatch(r"\w+ at oracles/operation.py:\d+ in \w+\n.*/link/verify/__init__.py\n", out), out


class Failing(Answering):
    """gdn-verify fails in every case of its runs that `wrong` says."""

    def __init__(self, wrong: Callable[[int], str]) -> None:
        super().__init__()
        self.wrong = wrong

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        answer = super().ask(question, deadline_s)
        if isinstance(question, RunOne) and (fault := self.wrong(len(self.asked))):
            return Outcome(Verdict.UNKNOWN, reason="gdn-verify failed: RuntimeError: mixed", fault=fault).to_json()
        return answer


def test_cases_of_modules_shrink_inside_their_domain(store: Store) -> None:
    domain = ModuleDomain("l2norm", dtypes=("bf16",))
    worker: Any = Answering(lambda run: 2.0, domain)
    (report,) = checked("zoo/L2Norm", ["oracle"], [worker], store, profile=PROFILES["few"])
    assert report.verdict is Verdict.BROKEN
    assert report.shrunk
    assert {domain.outside(Run.parse(line).example.case) for line in worker.asked} == {None}


HERE, THERE = "RuntimeError at verify/bench/path_bench.py:7 in f", "RuntimeError at verify/bench/path_bench.py:9 in f"


@pytest.mark.parametrize(
    ("wrong", "count"),
    [
        (lambda number: HERE, 3),
        (lambda number: HERE if number > 4 else "", 7),
        (lambda number: HERE if number % 3 else "", 5 * BASE),
        (lambda number: (HERE, THERE)[number % 2], 5 * BASE),
    ],
    ids=["always", "from the fifth on", "two in a row", "two by turns"],
)
def test_the_same_failure_of_ours_three_times_in_a_row_ends_the_law(wrong: Callable[[int], str], count: int, store: Store) -> None:
    worker: Any = Failing(wrong)
    (report,) = checked("fla/chunk", ["oracle"], [worker], store, profile=PROFILES["few"])
    assert report.verdict is Verdict.UNKNOWN
    assert len(worker.asked) == count
    assert report.fault == wrong(next(number for number in range(1, 9) if wrong(number)))
    assert report.fault_run in worker.asked
    assert ("the law ended after 3 such cases in a row" in report.reason) is (count < 5 * BASE)
    notice = text.fault_notice([report])
    assert notice.startswith(
        "This is a fault of gdn-verify and says nothing about fla/chunk: please report RuntimeError at verify/"
    )
    assert notice.endswith(f'gdn-verify repeat "{report.fault_run}"')
    line = text.law_line(report)
    assert line.count(report.fault) == 1
    assert f'"{report.fault_run}"' in line


def test_without_a_failure_of_ours_nothing_is_said_of_one(store: Store) -> None:
    worker: Any = Failing(lambda number: "")
    reports = checked("fla/chunk", ["oracle"], [worker], store)
    assert (reports[0].fault, text.fault_notice(reports)) == ("", "")
    assert "\n" not in text.law_line(reports[0])


def test_a_law_that_cannot_be_drawn_is_undecided_and_the_others_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("oracle", "cut"):
        monkeypatch.setitem(
            LAWS, name, dataclasses.replace(LAWS[name], draw=lambda domain: st.integers().filter(lambda number: False))
        )
    worker: Any = Answering()
    reports = {report.law: report for report in checked("fla/chunk", ["oracle", "cut", "pure"], [worker], store)}
    assert [reports[name].verdict for name in ("oracle", "cut", "pure")] == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.HOLDS]
    cut = reports["cut"]
    assert cut.reason.startswith("gdn-verify failed: Unsatisfiable: Unable to satisfy assumptions")
    assert cut.fault.startswith("Unsatisfiable at properties/seeds.py:")
    assert text.law_line(cut).endswith("\n  repeat       gdn-verify check fla/chunk --law cut --seed 0")
    assert text.fault_notice([cut]).endswith("gdn-verify check fla/chunk --law cut --seed 0")
    assert exit_code([*reports.values()]) == UNDECIDED
    plan = Plan(Domain(), ["cut", "pure"], 0, lambda law: 2, lambda law, example: Run(law, "fla/chunk", example), NOBODY)
    assert len(plan.of("pure").examples) == 2
    with pytest.raises(hypothesis.errors.Unsatisfiable):
        plan.of("cut")


def test_a_failure_of_ours_while_a_case_shrinks_leaves_the_law_broken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("min() arg is an empty sequence")

    monkeypatch.setattr(law_check, "explain_repeating", fails)
    worker: Any = Answering(lambda run: 3.0)
    broken, other = checked("fla/chunk", ["pure", "memory"], [worker], store)
    for report in (broken, other):
        assert (report.verdict, report.shrunk) == (Verdict.BROKEN, False)
        assert report.run == report.first_run == worker.asked[0 if report is broken else -1]
        assert "ValueError at " in text.failure(report)
        assert f'repeat       gdn-verify repeat "{report.run}"' in text.failure(report)


def test_a_check_that_stops_reports_one_law_even_if_two_break_at_the_same_time(store: Store) -> None:
    together = threading.Barrier(2)

    def both(run: Run) -> float:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(5.0)  # both laws have a broken case before either is reported
            together.abort()
        return 3.0

    workers: Any = [Answering(both), Answering(both)]
    reported: list[LawReport] = []
    reports = checked("fla/chunk", ["pure", "memory", "again"], workers, store, stop_at_first=True, on_report=reported.append)
    assert together.broken
    assert reported == reports
    (report,) = reports
    assert report.verdict is Verdict.BROKEN
    other = workers[report.law == Run.parse(workers[0].asked[0]).law]
    assert len(other.asked) == 1, "a law that is not reported is not shrunk"


def test_blind_law_is_blind_and_an_empty_case_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*_: object) -> Iterator[object]:
        raise Blind("dark here")
        yield

    with monkeypatch.context() as patched:
        patched.setitem(LAWS, "pure", dataclasses.replace(LAWS["pure"], check=blind))
        outcome = execute(Run("pure", RIGHT, Example(Case((3,)))))
    assert (outcome.verdict, outcome.reason) == (Verdict.BLIND, "dark here")


def test_memory_that_runs_out_is_broken_only_where_the_plain_size_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(*_: object) -> None:
        raise MemoryError("16 GiB")

    monkeypatch.setattr(base.Chunkwise, "run", greedy)
    from verify.execution.judging import adapter_of

    monkeypatch.setattr(type(adapter_of(RIGHT)), "run", greedy)
    small = execute(Run("oracle", RIGHT, Example(Case((3,)))))
    assert small.verdict is Verdict.BROKEN
    assert small.findings[0].what.startswith("ran out of memory, with ")
    with monkeypatch.context() as shared:
        shared.setattr(devices, "crowded", lambda device: True)
        assert execute(Run("oracle", RIGHT, Example(Case((3,))))).verdict is Verdict.UNKNOWN
    monkeypatch.setattr(Case, "bytes", 1 << 60)
    large = execute(Run("oracle", RIGHT, Example(Case((3,)))))
    assert (large.verdict, large.findings) == (Verdict.UNKNOWN, [])


@pytest.mark.parametrize("needy", ["run", "bounds"])
def test_a_case_whose_memory_ran_out_beside_other_processes_is_run_again_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, needy: str
) -> None:
    owner, calls = {"run": type(judging.adapter_of(RIGHT)), "bounds": AdapterBench}[needy], list[str]()
    plain, judged = getattr(owner, needy), judging.judged

    def first_fails(*words: Any) -> Any:
        calls.append("called")
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*words)

    def on_a_gpu(*words: Any, patient: bool) -> Outcome:
        assert not patient  # on a CPU
        return judged(*words, patient="room" not in calls)

    monkeypatch.setattr(owner, needy, first_fails)
    monkeypatch.setattr(execute_module, "judged", on_a_gpu)
    monkeypatch.setattr(devices, "crowded", lambda device: True)
    monkeypatch.setattr(devices, "found_room", lambda device: calls.append("room"))
    assert execute(Run("oracle", RIGHT, Example(Case((3,))))).verdict is Verdict.HOLDS
    assert calls[:3] == ["called", "room", "called"]


def test_adapter_that_cannot_be_had_is_one_line(workers: list[Worker], tmp_path_factory: pytest.TempPathFactory) -> None:
    for source, message in [
        ("import os; os._exit(0)", "importing it crashed: exited with code 0"),
        ("import sys; sys.exit('no GPU')", "importing it crashed: exited with code 1"),
        ("import cuda_thing", "ModuleNotFoundError: No module named 'cuda_thing'"),
        ("1/0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("class Other: pass", "has no Adapter called Kernel; it has none"),
        ("from tests.right import Chunkwise as Own", "has no Adapter called Kernel; it has Own"),
        ("from verify import Adapter\nclass Kernel(Adapter): pass", "Kernel() failed: TypeError: Can't instantiate abstract class"),
        (
            "from tests.right import Chunkwise\nclass Kernel(Chunkwise): algorithm = 'magic'",
            "one of chunkwise, recurrent for gated_delta_rule, got 'magic'",
        ),
        (
            "from tests.right import Chunkwise\nclass Kernel(Chunkwise): requires = {'torch': '2.*'}",
            "requires must name a version of torch such as 1.2.0, got '2.*'",
        ),
        (
            "from tests.right import Chunkwise\nclass Kernel(Chunkwise): operation = 'conv'",
            "operation is 'conv', but its domain has gated_delta_rule",
        ),
        (
            "from tests.right import Chunkwise\nclass Kernel(Chunkwise): domain = None",
            "domain must be a Domain or a ModuleDomain or a PoolDomain or a LayerDomain or a CallDomain, got None",
        ),
        ("from tests.right import Chunkwise\nclass Kernel(Chunkwise): chunk = 0", "chunk must be None or in 1..1024, got 0"),
    ]:
        file = tmp_path_factory.mktemp("own") / "unfit.py"
        file.write_text(source)
        with pytest.raises(AdapterError) as error:
            describe(f"{file}:Kernel", workers[0])
        assert message in str(error.value), source
        assert "\n" not in str(error.value), source


def test_ask_leaves_no_run_under_way_whatever_happens(workers: list[Worker], store: Store) -> None:
    for spec in ("zoo/Exits", RIGHT):
        run = Run("recall", spec, Example(Case((25,), gate="forever", beta="one", values="one_hot", backward=False)))
        ask(run, workers[0], store)
        assert all(path.read_text() == "" for path in store.folder.iterdir())


@pytest.mark.slow
def test_stopped_check_blames_nobody(store: Store) -> None:
    begun = threading.Event()
    reports: list[LawReport] = []
    with Check(Settings("zoo/Hangs", ["recall"], Profile("many", 100), 0), 1, store, on_report=reports.append) as check:
        begin = store.begin

        def slowly(line: str) -> None:
            begin(line)
            if max(Run.parse(line).example.case.lengths) > 20:
                begun.set()

        store.begin = slowly  # type: ignore[method-assign]
        stopper = threading.Thread(target=lambda: (begun.wait(30), time.sleep(0.2), check.stop()), daemon=True)
        stopper.start()
        check.run()
        stopper.join()
    assert begun.is_set()
    assert all(report.verdict is not Verdict.BROKEN for report in reports)
    assert not (store.folder / "findings.jsonl").exists()


@pytest.mark.slow
def test_oracle_that_is_slow_is_unknown_and_not_a_hang(store: Store) -> None:
    with Worker() as worker:
        worker.ask(RunOne(f"law=oracle adapter={RIGHT} lengths=1"))
        worker.deadline_s = 0.02  # which is about 1 s for so many tokens
        # This law runs the oracle before the kernel.
        slow = Case((30000, 30000), packed=True, key_dim=4, value_dim=4, gate="1000")
        outcome = ask(Run("packed", RIGHT, Example(slow, 0)), worker, store)
    assert outcome.verdict is Verdict.UNKNOWN


@pytest.mark.slow
def test_adapter_that_cannot_be_loaded_again_is_unknown(store: Store, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text("from tests.right import Chunkwise\nclass Kernel(Chunkwise): pass\n")
    run = Run("oracle", f"{file}:Kernel", Example(Case((3,))))
    with Worker() as worker:
        assert ask(run, worker, store).verdict is Verdict.HOLDS
        file.write_text("import nothing_there\n")
        worker.end()
        assert ask(run, worker, store).verdict is Verdict.UNKNOWN


def test_crash_that_does_not_repeat_is_undecided_and_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = Outcome(Verdict.BROKEN, [Finding("call", FailureKind.CRASHED, "crashed: killed by SIGSEGV")])
    answers = iter([crashed, *[Outcome(Verdict.HOLDS, rows=1)] * 100])
    for module in (asking, law_check):
        monkeypatch.setattr(module, "ask", lambda *_, **__: next(answers))
    with Worker() as worker, Check(Settings(RIGHT, ["pure"], Profile("few", 6)), [worker], store) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.UNKNOWN
    assert "SIGSEGV, but not again in a fresh worker" in report.reason
    assert "found once" in (store.folder / "findings.jsonl").read_text()


def test_versions_are_compared_as_those_of_packages() -> None:
    rows = [
        ("2.11.0+cu130", "2.8", True),
        ("5.23.0.dev0", "5.23.0", True),
        ("5.22.9", "5.23.0", False),
        ("0.6.0rc1", "0.6.0", True),
        ("2.8", "2.8.0", True),
        ("2.10", "2.9", True),
        ("main", "0.1", False),
    ]
    assert different(loader.at_least, rows) == []


def blind_at_first(monkeypatch: pytest.MonkeyPatch, blind: int) -> list[str]:
    """Makes the first `blind` cases of a law blind, without a worker. Returns the lines that are run, as they are run."""
    lines = list[str]()

    def outcome(run: Run, *_: object, **__: object) -> Outcome:
        lines.append(str(run))
        return Outcome(Verdict.BLIND if len(lines) <= blind else Verdict.HOLDS)

    monkeypatch.setattr(law_check, "ask", outcome)
    monkeypatch.setattr(law_check, "ask_all", lambda runs, *_: map(outcome, runs))
    return lines


def test_other_cases_are_drawn_in_place_of_blind_ones(workers: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = blind_at_first(monkeypatch, 6)
    (report,) = checked(RIGHT, ["cut"], workers[:1], store)
    assert (report.verdict, report.counts) == (Verdict.HOLDS, {Verdict.BLIND: 6, Verdict.HOLDS: FEW.examples - 6 + ENOUGH})
    assert len({*lines}) == len(lines), "no case is run twice"


def test_least_profile_needs_no_more_than_its_cases(workers: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    blind_at_first(monkeypatch, 1)
    (report,) = checked(RIGHT, ["cut"], workers[:1], store, profile=PROFILES["least"])
    assert (report.verdict, report.counts) == (Verdict.HOLDS, {Verdict.BLIND: 1, Verdict.HOLDS: 2})


def test_cases_in_place_of_blind_ones_end(workers: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = blind_at_first(monkeypatch, 10**6)
    (report,) = checked(RIGHT, ["cut"], workers[:1], store)
    assert report.verdict is Verdict.UNKNOWN
    assert report.reason == f"only 0 of {len(lines)} cases could have shown a defect; a verdict needs {ENOUGH}"
    assert FEW.examples < len(lines) <= (1 + law_check.REPLACEMENTS) * FEW.examples


def test_cases_in_place_of_blind_ones_have_the_compile_keys_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = list[Any]()
    monkeypatch.setattr(law_check, "seeded", lambda strategy, *_, **__: strategies.append(strategy))
    plan: Any = SimpleNamespace(strategy=lambda law, domain: f"a palette's, for {law.name} and {domain}", domain="a GPU's domain")
    described: Any = SimpleNamespace(domain="the adapter's domain")
    common: Any = SimpleNamespace(settings=Settings(RIGHT, device="cuda", profile=FEW), plan=plan, described=described)
    report = SimpleNamespace(counts={Verdict.BLIND: 3})
    check: Any = SimpleNamespace(_state=common, report=report, _drawn=["a"], _blind={"a"}, _examples=8)
    assert law_check.LawCheck._replace_blind(check, LAWS["cut"]) is False
    assert strategies == ["a palette's, for cut and a GPU's domain"]


def test_the_declarations_do_not_show_what_the_check_sets() -> None:
    described = asking.Described(RIGHT, with_drawing(Domain(backward=False), long=4096), "chunkwise", "torch")
    assert described.lines()[1] == "  domain       Domain(backward=False), other fields as by default"
