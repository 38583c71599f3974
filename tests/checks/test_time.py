"""A check whose time is limited begins no case after it, and says what it did not do."""

import json
import pathlib
import re
import time
import types
from typing import Any

import pytest

from benchmarks import power
from properties.books import BOOKS, Book
from properties.rules.domain import Domain
from tests.answering import Answering
from tests.together import for_each
from verify.cli import check_command, exits
from verify.cli.main import main
from verify.engine import law_check, state
from verify.engine.check import Check
from verify.engine.power import KILLS, SECONDS, by_power
from verify.engine.profiles import BASE, PROFILES, Profile
from verify.engine.state import Settings
from verify.findings import report as text
from verify.findings.law_report import ENOUGH, LawReport, overall
from verify.findings.records.record import End, Head, Record, lines_of
from verify.findings.store import Store
from verify.process.messages import Question, Refuse, RunOne
from verify.process.outcome import Verdict

RIGHT = f"{pathlib.Path(__file__).resolve().parents[1]}/right.py:Chunkwise"


class Slow(Answering):
    """Each case takes a second of a clock of its own, and so does each illegal input."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.now, self.tried = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        if isinstance(question, Refuse):
            self.now, self.tried = self.now + 1, self.tried + 1
            self.refused = self.now
            return {"did": "returns numbers without an error"}
        answer = super().ask(question, deadline_s)
        self.now += isinstance(question, RunOne)
        return answer


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Slow:
    worker = Slow(domain=Domain(backward=False))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PROFILES, "quick", Profile("quick", 24 // BASE))
    for module in (law_check, state, check_command):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=worker.monotonic, time=time.time))
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [worker])
    return worker


def check(*words: str) -> int:
    return main(["check", RIGHT, "--no-examples", *words])


def test_a_law_that_is_cut_short_says_how_far_it_came(slow: Slow, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--law", "oracle", "--budget", "12s", "--budget-ok") == exits.HOLDS
    out = capsys.readouterr().out
    assert "cut short   oracle      12 of 24 cases, worst 0.50 o\n" in out
    assert "not run" not in out
    assert "0 of 1 law holds, 1 not finished; 12 cases in 12 s" in out
    assert len(slow.asked) == 12


def test_what_a_budget_did_not_reach_is_undecided_unless_that_is_said_to_be_right(slow: Slow) -> None:
    assert check("--law", "oracle", "--budget", "12s") == exits.UNDECIDED
    assert check("--budget", "62s", "--budget-ok") == exits.HOLDS


def test_a_law_of_which_few_cases_were_run_is_undecided(slow: Slow, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--law", "oracle", "--budget", "3s", "--budget-ok") == exits.UNDECIDED
    assert "cut short   oracle       3 of 24 cases, worst 0.50 o: only 3 cases were run; a verdict needs" in capsys.readouterr().out


def test_laws_that_did_not_run_are_named_and_the_most_powerful_came_first(slow: Slow, capsys: pytest.CaptureFixture[str]) -> None:
    laws = by_power(BOOKS[0], BOOKS[0].about("gated_delta_rule"))
    assert check("--budget", "1m") == exits.UNDECIDED
    out, runs = capsys.readouterr().out, [line.split()[0].removeprefix("law=") for line in slow.asked]
    begun = list(dict.fromkeys(runs))
    assert len(runs) == 60
    assert begun == [law for law in laws if law in begun]
    (line,) = (line for line in out.splitlines() if line.startswith("not run, because the time was up: "))
    named = re.findall(r"^(?:HOLDS|UNKNOWN|unsupported|cut short) +(\w+) ", out, re.MULTILINE)
    assert line.partition(": ")[2].split(", ") == [law for law in laws if law not in named]
    assert {*begun} <= {*named}
    assert "illegal input: not tried in full, because the time was up" in out
    assert slow.tried == 0


def test_a_broken_law_counts_more_than_laws_that_did_not_run(slow: Slow, capsys: pytest.CaptureFixture[str]) -> None:
    slow.ratio = lambda run: 2.0
    assert check("--budget", "1.2s") == exits.BROKEN
    assert "not run, because the time was up" in capsys.readouterr().out


@pytest.mark.slow
def test_illegal_input_is_printed_in_full_or_not_at_all(
    slow: Slow, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROFILES, "quick", Profile("quick", 1))
    assert check() == exits.HOLDS
    whole, enough = capsys.readouterr().out, slow.refused
    assert "illegal input, reported and not judged:" in whole
    assert slow.tried > 2
    slow.now, tried = 0.0, slow.tried
    assert check("--budget", f"{enough - 1.5}s") == exits.HOLDS, "every law ran"
    out = capsys.readouterr().out
    assert slow.tried == 2 * tried - 1
    assert "reported and not judged" not in out
    assert "illegal input: not tried in full, because the time was up" in out


def test_a_budget_is_not_for_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--budget", "1m", "--tune", "sweep") == exits.USAGE
    assert "--budget must be left out with --tune sweep" in capsys.readouterr().err


def test_a_law_whose_cases_were_all_run_is_not_cut_short(slow: Slow) -> None:
    with Check(Settings(RIGHT, ["oracle"], Profile("eight", 24 // BASE), until=24.0), [slow], Store()) as checking:  # type: ignore[list-item]
        (report,) = checking.run()
    assert (report.verdict, report.cut_short, sum(report.counts.values())) == (Verdict.HOLDS, False, 24)
    assert text.law_line(report).startswith("HOLDS       oracle      24 cases  0.50 o")


def test_a_law_under_way_when_a_check_is_stopped_says_how_far_it_came(slow: Slow) -> None:
    checking = Check(Settings(RIGHT, ["recall", "oracle"], Profile("eight", 24 // BASE)), [slow], Store())  # type: ignore[list-item]
    checking.on_case = lambda law, done, of: checking.stop() if (law, done) == ("oracle", 7) else None
    with checking:
        checking.run()
    assert [report.law for report in checking.reports] == ["recall"]
    (report,) = checking.unfinished
    assert text.law_line(report) == "cut short   oracle       7 of 24 cases, worst 0.50 o"


def test_few_cases_of_many_decide_nothing() -> None:
    counts = {str(Verdict.HOLDS): ENOUGH - 1}
    assert overall(counts)[0] is Verdict.HOLDS
    assert overall(counts, planned=ENOUGH - 1)[0] is Verdict.HOLDS
    assert overall(counts, planned=128)[0] is Verdict.UNKNOWN
    assert overall({str(Verdict.HOLDS): ENOUGH}, planned=128)[0] is Verdict.HOLDS


def test_a_law_that_was_cut_short_and_compares_bits_has_no_largest_error() -> None:
    report = LawReport("recall", RIGHT, Verdict.HOLDS, "exact", counts={Verdict.HOLDS: 7, Verdict.BLIND: 2}, planned=32)
    report.cut_short = True
    assert text.law_line(report) == "cut short   recall       9 of 32 cases (2 blind)"


def test_the_file_of_numbers_names_the_laws_that_there_are() -> None:
    said = "run `python -m benchmarks.power`, which puts a new law into verify/engine/power.json"
    assert {name: [*laws] for name, laws in KILLS.items()} == {book.name: [*book.laws] for book in BOOKS}, said
    assert {*SECONDS} <= {law for book in BOOKS for law in book.laws}, said


@for_each("book", BOOKS)
def test_the_law_that_kills_most_comes_first(book: Book) -> None:
    order = by_power(book, ["unheard of", *book.laws])
    assert order[-1] == "unheard of"
    assert KILLS[book.name][order[0]] == max(filter(None, KILLS[book.name].values())) > 0


def test_a_law_without_a_number_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = BOOKS[0]
    monkeypatch.setitem(KILLS, rules.name, {**KILLS[rules.name], "packed": None})
    order = by_power(rules, rules.laws)
    assert (order[0], order[-1]) == ("oracle", "packed")


def test_numbers_are_those_of_a_hunt_and_of_checks(tmp_path: pathlib.Path) -> None:
    """Kills in later cases do not count; laws that were not run keep their numbers."""
    ran = {"oracle": [8, 9, None], "packed": [2, 3, 1], "cut": [None, None, None]}
    animals = [
        {"book": "rules", "laws": [{"law": law, "asked": 9, "killed_at": at[number]} for law, at in ran.items()]}
        for number in range(3)
    ]
    animals[0]["laws"] += [{"law": "norm", "asked": 0, "killed_at": None}]
    assert power.killed({"animals": animals}) == {
        **{book.name: {} for book in BOOKS},
        "rules": {"oracle": 1, "packed": 2, "cut": 0},
    }
    for number, oracle_s in enumerate((1.0, 3.0)):
        reports = [LawReport("oracle", RIGHT, Verdict.HOLDS, counts={Verdict.HOLDS: 8}, kernel_s=8.0, oracle_s=8.0)]
        reports += [LawReport("cut", RIGHT, Verdict.HOLDS, counts={Verdict.HOLDS: 2}, kernel_s=1.0, oracle_s=oracle_s)]
        reports += [LawReport("norm", RIGHT, Verdict.UNSUPPORTED)]
        head = Head(RIGHT, "0", "torch 2", "", "few", 0, [report.law for report in reports])
        lines = lines_of(Record(head, reports, End(0, 1.0)))
        (tmp_path / f"{number}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    assert power.seconds(files) == {"cut": 0.75}
    merged = power.merged({"animals": animals}, files)
    assert merged["kills"] == {**KILLS, "rules": {**KILLS["rules"], "oracle": 1, "packed": 2, "cut": 0}}
    assert merged["seconds"] == {**SECONDS, "cut": 0.75}


def test_of_two_laws_that_find_as_much_the_quicker_one_comes_first() -> None:
    rules = BOOKS[0]
    assert KILLS[rules.name]["strides"] == KILLS[rules.name]["batch"]
    order = by_power(rules, rules.laws)
    assert order.index("strides") < order.index("batch")
