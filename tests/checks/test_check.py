"""A check counts what it saw, repeats itself, survives what kernels do, and says of itself when it could not decide."""

import contextlib
import pathlib
import threading
import time
from typing import Any

import pytest
import torch

from properties.modules.domain import ModuleDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.laws import LAWS
from properties.words.example import Example
from properties.words.sizes import MOST, sized, with_drawing
from tests.answering import Answering
from tests.checking import FEW, RIGHT, checked
from tests.faults import different
from verify.adapters import loader
from verify.adapters.registry import AdapterError
from verify.bench.adapter_bench import AdapterBench
from verify.engine import asking, explaining
from verify.engine.asking import ask, describe
from verify.engine.check import Check
from verify.engine.profiles import PROFILES, Profile
from verify.engine.state import Settings
from verify.execution import execute as execute_module
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings.law_report import ENOUGH, LawReport, overall
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker
from verify.zoo import base


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


def test_cases_of_modules_shrink_inside_their_domain(store: Store) -> None:
    domain = ModuleDomain("l2norm", dtypes=("bf16",))
    worker: Any = Answering(lambda run: 2.0, domain)
    (report,) = checked("zoo/L2Norm", ["oracle"], [worker], store, profile=PROFILES["few"])
    assert report.verdict is Verdict.BROKEN
    assert report.shrunk
    assert {domain.outside(Run.parse(line).example.case) for line in worker.asked} == {None}


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


def test_a_slow_import_is_told_which_option_waits_longer(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\n\ntime.sleep(60)\n")
    with Worker(2.0) as worker, pytest.raises(AdapterError, match=r"importing it hung: no answer within 2 s, .*--deadline"):
        describe(f"{file}:Kernel", worker)


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


def test_the_declarations_do_not_show_what_the_check_sets() -> None:
    described = asking.Described(RIGHT, with_drawing(Domain(backward=False), long=4096), "chunkwise", "torch")
    assert described.lines()[1] == "  domain       Domain(backward=False), other fields as by default"
