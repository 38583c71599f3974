"""Shards of any number run the lines of one, and their records merge into the verdict of one."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.rules.domain import Domain
from tests.answering import Answering
from verify.cli import exits
from verify.cli.main import main
from verify.engine import law_check
from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.shard import WHOLE, Shard
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings import report as text
from verify.findings.law_report import LawReport
from verify.findings.records.merging import merged
from verify.findings.records.record import End, Head, Record, lines_of, read
from verify.findings.store import Store
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.reach import Reach

RIGHT = "tests/right.py:Chunkwise"
HEAD = Head("my.py:Kernel", "0.1.0", "torch 2.13.0", "", "few", 0, ["pure", "cut"])
SIX = Profile("six", 6)


# Which shard runs a line


@given(lines=st.lists(st.text()), count=st.integers(1, 40))
def test_every_line_is_in_one_shard(lines: list[str], count: int) -> None:
    for line in lines:
        assert sum(Shard(number, count).owns(line) for number in range(1, count + 1)) == 1


def test_shards_are_about_equal() -> None:
    sizes = collections.Counter(number for line in range(4000) for number in range(1, 9) if Shard(number, 8).owns(str(line)))
    assert all(400 < sizes[number] < 600 for number in range(1, 9))


def test_another_folder_or_device_changes_no_shard() -> None:
    line = "lengths=65 packed=yes seed=3"
    here = Run.parse(f"law=cut at=64 adapter={RIGHT} {line}")
    there = Run.parse(f"law=cut at=64 adapter=/build/7/my.py:Kernel device=cuda tune=5 {line}", here=False)
    assert here.everywhere == there.everywhere == f"law=cut at=64 adapter=- {line}"
    other = Run.parse(f"law=cut at=63 adapter={RIGHT} {line}")
    assert other.everywhere != here.everywhere


@pytest.mark.parametrize("word", ["0/2", "3/2", "2", "2/", "/2", "1/0", "1.0/2", "one/two"])
def test_what_is_no_shard_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", RIGHT, "--shard", word])
    assert ended.value.code == exits.USAGE
    assert f"must be a shard and how many there are, such as 2/8, got '{word}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--climb",), "--shard 2/3 excludes cases that follow from the errors of others"),
        (("--profile", "soak"), "--shard 2/3 excludes cases that follow from the errors of others"),
        (("--strict-reach",), "--shard 2/3 excludes --strict-reach, which merge decides"),
        (("--tune", "sweep"), "--shard must be left out with --tune sweep"),
    ],
)
def test_what_needs_the_whole_check_excludes_shards(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", RIGHT, "--shard", "2/3", *words]) == exits.USAGE
    assert says in capsys.readouterr().err


def blind(run: Run) -> bool:
    """Whether a case is blind here: one in two, whoever runs it."""
    return hashlib.sha256(str(run.example).encode()).digest()[0] % 2 == 0


def ran(monkeypatch: pytest.MonkeyPatch, shard: Shard, outcome_of: Callable[[Run], Outcome]) -> tuple[list[str], list[LawReport]]:
    """The lines that a shard of a check runs, in their order, if these are their outcomes, and its reports."""
    lines = list[str]()

    def outcome(run: Run, *_: object, **__: object) -> Outcome:
        lines.append(str(run))
        return outcome_of(run)

    monkeypatch.setattr(law_check, "ask", outcome)
    monkeypatch.setattr(law_check, "ask_all", lambda runs, *_: map(outcome, runs))
    settings = Settings(RIGHT, ["cut", "oracle", "samples"], SIX, shard=shard)
    with Check(settings, [Answering(domain=Domain())], Store()) as checking:  # type: ignore[list-item]
        return lines, checking.run()


def outcome_of(run: Run) -> Outcome:
    return Outcome(Verdict.BLIND if blind(run) else Verdict.HOLDS, ratios={"o": len(str(run)) / 1000})


@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_shards_run_the_lines_of_the_whole_and_none_twice(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, reports = ran(monkeypatch, WHOLE, outcome_of)
    shards = [ran(monkeypatch, Shard(number, count), outcome_of) for number in range(1, count + 1)]
    lines = [line for some, _ in shards for line in some]
    assert len(whole) > 6 + 24 + 6, "some cases are blind, and have others in their place"
    assert collections.Counter(lines) == collections.Counter(whole)
    head = dataclasses.replace(HEAD, laws=["cut", "oracle", "samples"])
    records = [
        ("file", Record(dataclasses.replace(head, shard=(number, count)), found, End(0, 1.0)))
        for number, (_, found) in enumerate(shards, 1)
    ]
    (check,) = merged(records)
    of_law = {report.law: report for report in check.reports}
    for report in reports:
        other = of_law[report.law]
        assert (other.verdict, other.counts, other.ratios, other.regimes, other.planned) == (
            (report.verdict, report.counts, report.ratios, report.regimes, report.planned)
        )


def test_a_shard_whose_cases_are_all_blind_decides_nothing_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    _, reports = ran(monkeypatch, Shard(1, 2), lambda _: Outcome(Verdict.BLIND))
    assert {(report.verdict, report.reason) for report in reports} == {
        (Verdict.UNSUPPORTED, "no case of shard 1/2 could show a defect")
    }
    assert all(report.counts for report in reports)


# Merged


def report(law: str, verdict: Verdict = Verdict.HOLDS, *, planned: int = 4, **fields: object) -> LawReport:
    counts = fields.pop("counts", {str(verdict): 1} if verdict is Verdict.BROKEN else {"holds": planned})
    return LawReport(law, HEAD.adapter, verdict, counts=counts, planned=planned, **fields)  # type: ignore[arg-type]


def record(number: int, count: int, reports: Iterable[LawReport], end: End | None = End(0, 2.0), **head: object) -> Record:  # noqa: B008
    return Record(dataclasses.replace(HEAD, shard=(number, count), **head), list(reports), end)  # type: ignore[arg-type]


def written(folder: pathlib.Path, *records: Record) -> list[str]:
    """Records as files. Returns their names."""
    names = []
    for number, one in enumerate(records):
        path = folder / f"{number}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines_of(one)), encoding="utf-8")
        names.append(str(path))
    return names


BOTH = [report("pure"), report("cut")]
OFF = Finding("o", FailureKind.OFF, "is off", error=math.inf, allowed=1.0, got=(math.nan,), want=(1.0,), rows=1, rows_over=1)
BROKEN = report("cut", Verdict.BROKEN, run="law=cut adapter=my.py:Kernel lengths=65 at=64", findings=[OFF], repeats="yes")


@pytest.mark.parametrize(
    ("records", "options", "code", "says"),
    [
        ([record(1, 2, BOTH), record(2, 2, BOTH)], (), exits.HOLDS, "2 of 2 laws hold; 16 cases; the longest shard took 2 s"),
        ([record(1, 2, BOTH), record(2, 2, [report("pure"), BROKEN])], (), exits.BROKEN, "BROKEN   cut · my.py:Kernel"),
        ([record(1, 2, [report("pure"), BROKEN])], (), exits.BROKEN, "shard 2/2 is missing"),
        ([record(2, 3, BOTH)], (), exits.UNDECIDED, "shard 1/3 is missing\nshard 3/3 is missing"),
        ([record(1, 2, BOTH), record(2, 2, BOTH, None)], (), exits.UNDECIDED, "shard 2/2 never ended: "),
        ([record(1, 1, BOTH, End(130, 1.0, interrupted=True))], (), exits.UNDECIDED, "shard 1/1 was interrupted: "),
        ([record(1, 2, BOTH[:1]), record(2, 2, BOTH[:1])], (), exits.UNDECIDED, "not run in every shard: cut"),
        ([record(1, 2, BOTH[:1]), record(2, 2, BOTH[:1])], ("--budget-ok",), exits.HOLDS, "not run in every shard: cut"),
        ([record(1, 2, BOTH), record(2, 2, BOTH[:1])], (), exits.UNDECIDED, "not run in every shard: cut"),
        ([record(1, 1, [report("pure"), report("cut", cut_short=True)])], (), exits.UNDECIDED, "undecided: not all that was asked"),
        ([record(1, 1, [report("pure"), report("cut", cut_short=True)])], ("--budget-ok",), exits.HOLDS, "cut short   cut"),
        ([record(1, 1, BOTH)], ("--strict-reach",), exits.UNDECIDED, "undecided: not all that was asked for was run or looked at"),
        (
            [record(1, 2, [report("pure", counts={"holds": 1, "blind": 3})]), record(2, 2, [report("pure", counts={"blind": 4})])],
            ("--budget-ok",),
            exits.UNDECIDED,
            "only 1 of 8 cases could have shown a defect; a verdict needs 5",
        ),
        (
            [
                record(number, 2, [report("pure"), report("cut", Verdict.UNSUPPORTED, counts={}, reason="no state", planned=9)])
                for number in (1, 2)
            ],
            (),
            exits.HOLDS,
            "1 of 2 laws holds, 1 unsupported",
        ),
        (
            [record(1, 2, BOTH), record(2, 2, [report("pure"), report("cut", Verdict.UNSUPPORTED, counts={}, planned=0)])],
            (),
            exits.HOLDS,
            "HOLDS       cut          4 cases",
        ),
    ],
)
def test_merged_verdicts(
    records: list[Record],
    options: tuple[str, ...],
    code: int,
    says: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = tmp_path / "whole.jsonl"
    assert main(["merge", *written(tmp_path, *records), "--json", str(whole), *options]) == code
    assert says in capsys.readouterr().out
    (again,) = read(str(whole))
    assert again.head.shard == (1, 1)
    assert again.end is not None and again.end.exit_code == code
    assert again.verdict is {0: Verdict.HOLDS, 1: Verdict.BROKEN, 3: Verdict.UNKNOWN}[code]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([record(1, 2, BOTH)], "1.jsonl both have shard 1/2 of my.py:Kernel"),
        ([record(2, 2, BOTH, seed=7)], "records must be of one check, but seed is 0 in "),
        ([record(2, 3, BOTH)], "but the number of shards is 2 in "),
        ([record(2, 2, BOTH, versions="torch 2.14.0")], "but versions is 'torch 2.13.0' in "),
    ],
)
def test_records_of_two_checks_are_refused(
    others: list[Record], says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", *written(tmp_path, record(1, 2, BOTH), *others)]) == exits.USAGE
    assert says in capsys.readouterr().err


def test_a_missing_shard_is_told_wherever_the_check_is_shown(tmp_path: pathlib.Path) -> None:
    files = [str(tmp_path / name) for name in ("junit.xml", "summary.md", "page.html")]
    places = written(tmp_path, record(2, 3, BOTH))
    words = [word for pair in zip(("--junit", "--markdown", "--html"), files, strict=True) for word in pair]
    assert main(["merge", *places, *words]) == exits.UNDECIDED
    for file in files:
        assert "shard 1/3 is missing" in pathlib.Path(file).read_text(encoding="utf-8"), file


def test_checks_of_several_adapters_are_merged_each_alone(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = dataclasses.replace(BROKEN, adapter="other.py:Kernel")
    places = written(tmp_path, record(1, 1, BOTH), record(1, 1, [other], adapter="other.py:Kernel", laws=["cut"]))
    both = tmp_path / "both.jsonl"
    both.write_text("".join(pathlib.Path(place).read_text() for place in places))
    assert main(["merge", str(both)]) == exits.BROKEN
    out = capsys.readouterr().out
    assert out.count(text.HEAD) == 1, "the second check has no columns"
    assert "2 of 2 laws hold" in out
    assert "0 of 1 law holds, 1 broken" in out


def test_of_several_broken_shards_the_shortest_line_that_repeats_is_told(tmp_path: pathlib.Path) -> None:
    longer = dataclasses.replace(BROKEN, run=BROKEN.run + " heads=2")
    shorter = dataclasses.replace(BROKEN, run=BROKEN.run.replace("lengths=65 ", ""), repeats="no")
    records = [record(number, 3, [one]) for number, one in enumerate((longer, shorter, BROKEN), 1)]
    (check,) = merged([("file", one) for one in records])
    assert check.reports[0].run == BROKEN.run
    assert check.reports[0].counts == {"broken": 3}


# Records


def test_a_record_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    reach = Reach(sizes={"tokens": 9}, blocks={"kernels:f": {"12": True}}, lines={"my.py": {1, 3}})
    end = End(1, 3.5, refusals={"refuses (ValueError)": ["odd offsets"]}, regimes=["  dtype: bf16 4"], reach=reach)
    whole = record(1, 1, [report("pure"), BROKEN], end)
    (place,) = written(tmp_path, whole)
    (again,) = read(place)
    assert lines_of(again) == lines_of(whole)
    assert again.head == whole.head
    assert again.end == end


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no record of a check"),
        ("{", "line 1 is no JSON: the record may be cut off"),
        ("[" * 100_000, "line 1 is no JSON"),
        ("3", "line 1 is no part of a check's record"),
        ('{"record": "law", "schema": 1}', "line 1 has no check before it"),
        ('{"record": "check", "schema": 99}', "line 1 has another schema than 1"),
        ('{"record": "check", "schema": 1}', "line 1 is no part of a check's record: Object missing required field `adapter`"),
        (b"\xff\xfe", "it is not UTF-8"),
    ],
)
def test_a_file_that_is_no_record_is_one_line(
    text: str | bytes, says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "odd.jsonl"
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["merge", str(place)]) == exits.USAGE
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert main(["merge", str(tmp_path / "gone.jsonl")]) == exits.USAGE


PARTS = lines_of(record(1, 1, [report("pure"), BROKEN], End(1, 2.0, reach=Reach())))
WHOLE_RECORD = "".join(json.dumps(line) + "\n" for line in PARTS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(part=st.integers(0, len(PARTS) - 1), data=st.data())
def test_a_changed_record_is_read_or_refused(part: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    lines = [dict(line) for line in PARTS]
    lines[part][data.draw(st.sampled_from(sorted(lines[part])))] = data.draw(VALUES)
    place = tmp_path_factory.getbasetemp() / "changed.jsonl"
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["merge", str(place)]) in (exits.HOLDS, exits.BROKEN, exits.UNDECIDED, exits.USAGE)
    with contextlib.suppress(ValueError):
        assert len(read(str(place))) == 1


@given(size=st.integers(1, len(WHOLE_RECORD) - 2))
def test_a_record_that_is_cut_off_never_holds(size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.getbasetemp() / "short.jsonl"
    place.write_text(WHOLE_RECORD.replace('"broken"', '"holds"')[:size])
    assert main(["merge", str(place)]) != exits.HOLDS


# From the command line


@pytest.mark.slow
def test_shards_of_a_wrong_kernel_are_merged_from_the_command_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    places = []
    for number in (1, 2):
        words = ("--profile", "few", "--law", "pure", "--no-examples", "--json", f"{number}.jsonl")
        assert main(["check", "zoo/ChangesBeta", "--shard", f"{number}/2", *words]) in (exits.HOLDS, exits.BROKEN)
        assert f", shard {number}/2\n" in capsys.readouterr().out
        places.append(f"{number}.jsonl")
    assert main(["merge", *places]) == exits.BROKEN
    out = capsys.readouterr().out
    assert "BROKEN   pure · zoo/ChangesBeta" in out
    assert "gdn-verify repeat" in out
