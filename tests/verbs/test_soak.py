"""A soak goes on, each round with other cases, each of which can be run again; it ends in time, and says all it saw."""

import itertools
import os
import pathlib
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from tests.answering import Answering
from tests.in_process import said
from tests.processes import family, gone
from tests.together import for_each
from verify.cli import exits, soak_command
from verify.cli import main as cli
from verify.engine import law_check, soak, state
from verify.engine.check import Check
from verify.engine.profiles import PROFILES, Profile
from verify.engine.soak import PACE, Round, Soak, merged, round_seed, summary
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings import report
from verify.findings.law_report import LawReport
from verify.findings.records.record import read
from verify.findings.regressions import Examples
from verify.findings.store import Store
from verify.process.messages import Tunings
from verify.process.outcome import Verdict
from verify.process.worker import Worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
RIGHT = f"{ROOT}/tests/right.py:Chunkwise"
OTHER = f"{ROOT}/tests/right.py:Recurrent"
LAWS = ["cut", "pure"]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Answering]:
    """Those that soaks start: one, with the ratio 0.5 for every run."""
    answerers: list[Answering] = []

    def start(device: str, count: int, deadline_s: float, *, sequential: bool) -> list[Answering]:
        answerers.append(Answering())
        return answerers[-1:]

    monkeypatch.setattr(soak, "started", start)
    for name, examples in (("few", 4), ("quick", 8), ("ci", 12)):
        monkeypatch.setitem(PROFILES, name, Profile(name, examples))
    return answerers


def rounds_of(worker: Answering, begun: list[tuple[Round, int]]) -> list[list[str]]:
    """The lines that ran in each round."""
    starts = [place for _, place in begun]
    return [worker.asked[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


@pytest.mark.slow
def test_every_round_has_its_own_cases_and_can_be_run_again(workers: list[Answering], tmp_path: pathlib.Path) -> None:
    begun: list[tuple[Round, int]] = []

    def on_round(this: Round) -> None:
        begun.append((this, len(workers[0].asked)))
        if len(begun) > len(PACE["cpu"]) + 2:
            raise KeyboardInterrupt

    with Soak([RIGHT], LAWS, seed=7, store=Store(tmp_path), on_round=on_round) as soaking, pytest.raises(KeyboardInterrupt):
        soaking.run(60)
    begun.pop()
    assert [this.profile.name for this, _ in begun] == ["few", "quick", "ci", "ci", "ci"]
    assert [this.seed for this, _ in begun] == [round_seed(7, number) for number in range(1, 6)]
    assert len({this.seed for this, _ in begun}) == len(begun)
    seen = set[str]()
    for (this, _), lines in zip(begun, rounds_of(workers[0], begun), strict=True):
        assert len(set(lines) & seen) <= len(LAWS), "but for the simplest example, which every seed begins with"
        seen |= set(lines)
        again = Answering()
        with Check(Settings(RIGHT, LAWS, this.profile, this.seed, climbs=True), [again], Store(tmp_path)) as check:
            check.run()
        assert again.asked == lines
    (cut, pure) = soaking.reports
    assert sum(cut.counts.values()) == sum(pure.counts.values()) == 4 + 8 + 3 * 12
    assert workers[0].closed


def test_a_round_is_printed_as_the_command_that_runs_it_again() -> None:
    command = str(Round(3, "fla/chunk", PROFILES["quick"], 5))
    assert command == "check fla/chunk --profile quick --seed 5 --climb"
    options = cli.parser().parse_args(command.split())
    assert (options.adapter, options.profile, options.seed, options.climb) == ("fla/chunk", "quick", 5, True)


def test_rounds_have_seeds_that_the_command_line_takes() -> None:
    seeds = {round_seed(seed, number) for seed in range(50) for number in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.slow
def test_a_law_that_broke_is_reported_once_and_does_not_run_again(workers: list[Answering], tmp_path: pathlib.Path) -> None:
    reported: list[LawReport] = []
    rounds: list[Round] = []

    def on_round(this: Round) -> None:
        if this.number > 3:
            raise KeyboardInterrupt
        rounds.append(this)

    with Soak([RIGHT, OTHER], LAWS, store=Store(tmp_path), on_report=reported.append, on_round=on_round) as soaking:
        soaking.describe()
        workers[0].ratio = lambda run: 2.0 if (run.law, run.adapter) == ("cut", OTHER) else 0.5
        with pytest.raises(KeyboardInterrupt):
            soaking.run(600)
    assert [(law_report.adapter, law_report.law, law_report.verdict) for law_report in reported] == [(OTHER, "cut", Verdict.BROKEN)]
    assert reported[0].run
    known = {(law_report.adapter, law_report.law): law_report for law_report in soaking.reports}
    assert {key for key, law_report in known.items() if law_report.verdict is Verdict.BROKEN} == {(OTHER, "cut")}
    assert sum(known[OTHER, "cut"].counts.values()) == 1
    assert known[OTHER, "cut"].run == reported[0].run
    assert sum(known[OTHER, "pure"].counts.values()) > 5, "as many as a round of five and more"
    seeds = {(this.number, this.seed) for this in rounds}
    assert len(seeds) == 3, "all adapters of a round have its seed"


def test_a_soak_ends_when_nothing_is_left_to_run(workers: list[Answering], tmp_path: pathlib.Path) -> None:
    with Soak([RIGHT], LAWS, store=Store(tmp_path)) as soaking:
        soaking.describe()
        workers[0].ratio = lambda run: 2.0
        soaking.run(600)
    assert soaking.rounds == 1
    assert all(law_report.verdict is Verdict.BROKEN for law_report in soaking.reports)


def test_a_soak_stops_at_the_first_broken_law_if_it_is_to(workers: list[Answering], tmp_path: pathlib.Path) -> None:
    with Soak([RIGHT, OTHER], LAWS, store=Store(tmp_path), stop_at_first=True) as soaking:
        soaking.describe()
        workers[0].ratio = lambda run: 2.0 if run.adapter == RIGHT else 0.5
        reports = {(law_report.adapter, law_report.law): law_report.verdict for law_report in soaking.run(600)}
    assert Verdict.BROKEN in (reports[RIGHT, "cut"], reports[RIGHT, "pure"])
    assert {reports[OTHER, law] for law in LAWS} == {Verdict.UNKNOWN}, "nothing else ran"


def test_a_soak_ends_in_time_and_counts_what_it_did_not_finish(
    workers: list[Answering], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only cases move: a slow machine draws so slowly that one adapter takes the time of both."""
    specs, adapters, now = [RIGHT, OTHER], list[str](), 0.0

    def slowly(run: Run) -> float:
        nonlocal now
        adapters.append(run.adapter)
        now += 0.02
        return 0.5

    for module in (soak, law_check, state):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    with Soak(specs, LAWS, store=Store(tmp_path), profile=Profile("endless", 10**4)) as soaking:
        soaking.describe()
        workers[0].ratio = slowly
        soaking.run(2.0)
    assert 2.0 <= now < 4.0
    assert sum(sum(law_report.counts.values()) for law_report in soaking.reports) == len(adapters)
    counts = [adapters.count(spec) for spec in specs]
    assert min(counts) > max(counts) / 4, "each adapter has its share of the time"
    verdicts = {(law_report.adapter, law_report.law): law_report.verdict for law_report in soaking.reports}
    assert verdicts[RIGHT, "cut"] is Verdict.HOLDS
    assert verdicts[RIGHT, "pure"] is Verdict.UNKNOWN
    assert exits.exit_code(soaking.reports) == exits.UNDECIDED, "a law that never ran is not green"


def test_what_broke_in_an_earlier_check_runs_first(workers: list[Answering], tmp_path: pathlib.Path) -> None:
    examples = Examples(tmp_path)
    entry = Run.parse(f"law=pure adapter={RIGHT} lengths=3")
    examples.add(entry)

    def on_round(this: Round) -> None:
        if this.number > 2:
            raise KeyboardInterrupt

    soaking = Soak([RIGHT], ["pure"], store=Store(tmp_path), examples=examples, on_round=on_round)
    with soaking, pytest.raises(KeyboardInterrupt):
        soaking.run(60)
    assert workers[0].asked[0] == str(entry)
    assert workers[0].asked.count(str(entry)) == 1, "it holds, and is forgotten"


def reported(verdict: Verdict, counts: dict[Verdict, int], **more: object) -> LawReport:
    return LawReport("cut", "a", verdict, "truth", counts={str(name): count for name, count in counts.items()}, **more)  # type: ignore[arg-type]


HOLDS, BLIND, BROKEN, UNKNOWN = Verdict.HOLDS, Verdict.BLIND, Verdict.BROKEN, Verdict.UNKNOWN


@for_each(
    ("before", "more", "verdict", "reason"),
    [
        (reported(UNKNOWN, {}, reason="no case was run"), reported(HOLDS, {HOLDS: 9}), HOLDS, ""),
        (reported(HOLDS, {HOLDS: 9}), reported(UNKNOWN, {}, reason="no case was run"), HOLDS, ""),
        (reported(HOLDS, {HOLDS: 9}), reported(BROKEN, {HOLDS: 3, BROKEN: 1}), BROKEN, ""),
        (reported(BROKEN, {BROKEN: 1}), reported(UNKNOWN, {}, reason="no case was run"), BROKEN, ""),
        (reported(UNKNOWN, {BLIND: 9}), reported(UNKNOWN, {BLIND: 8}), UNKNOWN, "only 0 of 17 cases could have shown a defect"),
        (reported(UNKNOWN, {HOLDS: 2, BLIND: 9}, reason="only 2 of 11"), reported(UNKNOWN, {HOLDS: 3}, reason="only"), HOLDS, ""),
        (
            reported(UNKNOWN, {HOLDS: 9, UNKNOWN: 1}, reason="1 of 10 cases undecided: no memory"),
            reported(UNKNOWN, {UNKNOWN: 2}, reason="2 of 2 cases undecided: it hung"),
            UNKNOWN,
            "3 of 12 cases undecided: no memory",
        ),
        (
            reported(UNKNOWN, {UNKNOWN: 1}, reason="1 of 1 cases undecided: memory"),
            reported(HOLDS, {HOLDS: 9}),
            UNKNOWN,
            "1 of 10 cases undecided: memory",
        ),
        (
            reported(UNKNOWN, {}, reason="no case was run"),
            reported(Verdict.UNSUPPORTED, {}, reason="packed is not supported"),
            Verdict.UNSUPPORTED,
            "packed is not supported",
        ),
    ],
)
def test_what_rounds_come_to_together(before: LawReport, more: LawReport, verdict: Verdict, reason: str) -> None:
    got = merged(before, more)
    assert got.verdict is verdict
    assert got.reason.startswith(reason)
    assert sum(got.counts.values()) == sum(before.counts.values()) + sum(more.counts.values())


def test_rounds_keep_the_greatest_ratio_and_the_broken_run() -> None:
    before = reported(HOLDS, {HOLDS: 9}, ratios={"o": 0.5, "dg": 0.9}, regimes={"gate=64": 3}, kernel_s=1.0, seed=1)
    more = reported(BROKEN, {BROKEN: 1}, ratios={"o": 3.0}, regimes={"gate=64": 1, "gate=10": 1}, kernel_s=0.5, run="x", seed=2)
    got = merged(before, more)
    assert got.ratios == {"dg": 0.9, "o": 3.0}
    assert got.regimes == {"gate=64": 4, "gate=10": 1}
    assert (got.kernel_s, got.run, got.seed) == (1.5, "x", 2)
    later = merged(got, reported(UNKNOWN, {}, ratios={}))
    assert (later.verdict, later.run, later.seed) == (BROKEN, "x", 2)


def test_the_table_has_a_line_a_law_and_the_greatest_ratios() -> None:
    rows = report.table(
        [
            reported(HOLDS, {HOLDS: 123, BLIND: 4}, ratios={"o": 0.5, "dg": 0.987}),
            LawReport("a-long-name", "fla/chunk", BROKEN, "exact", counts={"broken": 1}, ratios={"o": 1e300}),
            reported(BROKEN, {BROKEN: 1}, ratios={"o": 1e300}),
            reported(UNKNOWN, {UNKNOWN: 1}, ratios={"o": 0.5}, reason="1 undecided: it hung"),
        ]
    )
    words = [row.split() for row in rows]
    assert " ".join(words[0]) == "adapter law verdict cases holds blind broken unknown greatest error / allowed"
    assert words[1] == ["a", "cut", "holds", "127", "123", "4", "0", "0", "dg", "0.99", "o", "0.50"]
    assert words[2] == ["fla/chunk", "a-long-name", "broken", "1", "0", "0", "1", "0"], "of laws to the bit there is no ratio"
    assert words[3][-3:] == ["o", "over", "1e+06"]
    assert rows[4].endswith("   1  1 undecided: it hung")
    ends = [re.match(r"\S+ +\S+ +\S+ +\d+ +\d+ +\d+ +\d+ +\d+", row) for row in rows[1:]]
    assert len({end.end() for end in ends if end is not None}) == 1, "numbers stand under each other"


def test_the_summary_counts_laws_rounds_cases_and_their_rate() -> None:
    line = summary([reported(HOLDS, {HOLDS: 30}, kernel_s=4.0, oracle_s=1.0), reported(BROKEN, {BROKEN: 1})], 3, 10.0, 2)
    laws, cases = line.split("; ")
    assert laws == "1 of 2 laws of 1 adapter holds, 1 broken"
    assert cases == "3 rounds, 31 cases in 10 s, 3.1 a second (2 processes together: kernels 4 s, reference and tolerances 1 s)"


@for_each(
    ("words", "name"),
    [
        ((), "adapter"),
        ((RIGHT, "fla/chonk"), "'fla/chonk'"),
        ((RIGHT, "--minutes", "0"), "--minutes: must be a number of minutes over 0, got '0'"),
        ((RIGHT, "--minutes", "long"), "--minutes: must be a number of minutes over 0, got 'long'"),
        ((RIGHT, "--minutes", "nan"), "got 'nan'"),
        ((RIGHT, "--tune", "sweep"), "--tune must be a number or native for soak, got sweep"),
        ((RIGHT, "--law", "orcale"), "unknown law 'orcale'"),
        ((RIGHT, "--json", "no/such/folder/out"), "--json must name a file that can be written"),
    ],
)
def test_bad_usage_is_refused_before_any_work(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, words: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Worker, "launch", lambda self: pytest.fail("a worker was started"))
    code, out, err = said(capfd, "soak", *words)
    assert (code, out, err.count("\n")) == (exits.USAGE, "", 1)
    assert name in err


def test_torchrun_is_for_check(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(soak_command, "launched", object)
    assert said(capfd, "soak", RIGHT)[0] == exits.USAGE


@pytest.mark.slow
def test_the_command_line_prints_a_table_and_json_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The clock advances 0.1 s each time it is read, so the number of rounds does not depend on the machine."""
    looks = itertools.count()
    for module in (soak, law_check, state):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.1 * next(looks)))
    monkeypatch.chdir(tmp_path)
    words = ("--law", "pure", "--minutes", "0.08", "--seed", "3", "--workers", "1", "--json", "out", "--html", "page.html")
    code, out, err = said(capfd, "soak", RIGHT, "zoo/ChangesBeta", *words)
    assert code == exits.BROKEN, err
    lines = out.splitlines()
    assert lines[0].startswith(f"{RIGHT}  torch ")
    assert lines[0].endswith("soak of 0.08 minutes, seed 3")
    assert out.count("BROKEN   pure · zoo/ChangesBeta") == 1
    assert [line.split()[:3] for line in lines[-4:-1]] == [
        ["adapter", "law", "verdict"],
        [RIGHT, "pure", "holds"],
        ["zoo/ChangesBeta", "pure", "broken"],
    ]
    assert re.search(r"^1 of 2 laws of 2 adapters holds, 1 broken; \d+ rounds, \d+ cases in \d+ s, [\d.e+]+ a second", lines[-1])
    want = f"round 1: gdn-verify check {RIGHT} --profile few --seed {round_seed(3, 1)} --climb --law pure"
    assert want in err.splitlines()
    right, wrong = read(str(tmp_path / "out"))
    assert [(record.head.adapter, record.verdict, len(record.reports)) for record in (right, wrong)] == [
        (RIGHT, Verdict.HOLDS, 1),
        ("zoo/ChangesBeta", Verdict.BROKEN, 1),
    ]
    assert right.end is not None and right.end.exit_code == exits.HOLDS and right.end.looked_at
    assert wrong.end is not None and wrong.end.exit_code == exits.BROKEN
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert RIGHT in page and "zoo/ChangesBeta" in page
    assert (tmp_path / ".gdn-verify" / "examples.txt").read_text().count("\n") == 2


SLOW = """
import time
from verify.zoo.wrong_rules import AddsStateTwice
class Kernel(AddsStateTwice):
    def run(self, x):
        while x.qk_norm:
            time.sleep(0.05)
        return super().run(x)
"""


@pytest.mark.slow
def test_an_interrupt_prints_what_is_known_and_leaves_no_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, worker: Worker
) -> None:
    """In this process; for a command in a process of its own see test_cli.py."""
    worker.ask(Tunings())  # so that what forks workers is there
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(SLOW)
    words = ["kernel.py:Kernel", "--workers", "2", "--law", "recall", "--law", "norm", "--profile", "quick", "--seed", "0"]
    before, pids, left, findings = family(os.getpid()), set[int](), set[int](), tmp_path / ".gdn-verify" / "findings.jsonl"

    def interrupt() -> None:
        end = time.monotonic() + 40
        while time.monotonic() < end and not (findings.exists() and '"shrunk"' in findings.read_text()):
            time.sleep(0.05)
        time.sleep(0.5)
        pids.update(family(os.getpid()) - before)
        os.kill(os.getpid(), signal.SIGINT)
        if not gone(pids, 30.0):  # the command would wait for them
            left.update(pids)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        code, out, err = said(capfd, "soak", *words)
        interrupting.join()
    except KeyboardInterrupt:
        pytest.fail("the command had ended, or lets the interrupt through")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert code == exits.INTERRUPTED, err
    assert "Traceback" not in err
    _, *rows = [line.split() for line in out.splitlines() if line.startswith("kernel.py:Kernel")]
    assert [row[1:3] for row in rows] == [["recall", "broken"], ["norm", "unknown"]]
    assert "interrupted: 0 of 2 laws of 1 adapter hold, 1 broken, 1 unknown; 1 round," in out
    assert len(pids) == 2, "two workers"
    assert not left
