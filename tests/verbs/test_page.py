"""The picture of a finding shows where rows are off, and the page of a check shows everything in its record and nothing else."""

import dataclasses
import functools
import html
import io
import json
import math
import pathlib
import re
import sys
from typing import Any

import msgspec
import pytest
import torch

from oracles.tolerance.bound import Bound
from properties.laws.law import Pair
from properties.pools.case import PoolCase
from properties.rules.case import Case
from tests.answering import Answering
from verify.bench.places import layout, where
from verify.bench.trace_bench import layout_of
from verify.cli import check_command, exits
from verify.cli.main import main
from verify.cli.terminal import marks_of, print_line
from verify.engine.profiles import PROFILES, Profile
from verify.execution.execute import execute
from verify.execution.judge import judge
from verify.execution.line import Run
from verify.execution.picture import drawn
from verify.findings import report as text
from verify.findings.blocks import ASCII, BLOCKS, block_lines
from verify.findings.law_report import LawReport
from verify.findings.records import page
from verify.findings.records.record import End, Head, Record, read
from verify.process.messages import Question, RunOne
from verify.process.outcome import FailureKind, Finding, Verdict
from verify.process.picture import MOST_COLUMNS, MOST_LINES, Picture, rounded

WRONG = '''
from verify.zoo.base import Chunkwise

class OneRow(Chunkwise):
    """The last token but one of the last sequence, in head 2, is off."""

    def run(self, x):
        o, *others = super().run(x)
        o = o.clone()
        o[-1:, -2:-1, 2:3] += 1
        return o, *others
'''
HOSTILE = "</code></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}\udc80"


def of_rows(ratio: torch.Tensor, case: Any, port: str = "o") -> Picture | None:
    """The picture of rows with these errors over their tolerances, by the judge."""
    got = ratio.unsqueeze(-1)
    pair = Pair(port, "", got, Bound(torch.zeros_like(got), torch.ones_like(ratio), "one"))
    findings = judge([pair], functools.partial(where, case), lay_out=functools.partial(layout, case)).findings
    return findings[0].picture if findings else None


def over(picture: Picture | None) -> dict[str, float]:
    """The parts of a picture that are off, in words."""
    assert picture is not None
    return {
        f"{picture.column_name(x)}, {picture.line_name(y)}".removesuffix(", "): value
        for y, line in enumerate(picture.values)
        for x, value in enumerate(line)
        if not value <= 1
    }


# The picture


@pytest.mark.parametrize(
    ("lengths", "place"),
    [
        ("lengths=7+5+2 packed=yes", "sequence 2, token 0, head 2"),
        ("lengths=6+6", "sequence 1, token 4, head 2"),
        ("lengths=20", "token 18, head 2"),
    ],
)
def test_a_planted_row_is_the_only_part_that_is_off(lengths: str, place: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    words = f"{lengths} value_heads=3 key_dim=2 value_dim=2 backward=no"
    outcome = execute(Run.parse(f"law=oracle adapter={tmp_path}/wrong.py:OneRow {words}"))
    (finding,) = outcome.findings
    assert finding.worst == place
    assert over(finding.picture) == {place: rounded(finding.ratio)}
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))).picture == finding.picture


def test_only_findings_that_a_report_shows_in_full_have_pictures_and_older_findings_have_none() -> None:
    want, case = torch.zeros(1, 5, 2, 3), Case((5,), heads=2, value_heads=2)
    pairs = [Pair("o", f"of call {number}", want + 1, want) for number in range(6)]
    findings = judge(pairs, functools.partial(where, case), lay_out=functools.partial(layout, case)).findings
    assert [finding.picture is not None for finding in findings] == [True] * 4 + [False] * 2
    data = findings[0].to_json()
    del data["picture"]  # as earlier releases wrote it
    assert Finding.from_json(data) == findings[0]
    assert msgspec.convert(data, Finding, strict=False).picture is None


def test_nothing_is_drawn_where_nothing_is_broken() -> None:
    assert of_rows(torch.full((1, 5, 2), 0.9, dtype=torch.float64), Case((5,), value_heads=2)) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_drawn_as_it_is(bad: float) -> None:
    ratio = torch.zeros(1, 200, 3, dtype=torch.float64)
    ratio[0, 77, 1], ratio[0, 3, 0] = bad, 8.0
    picture = of_rows(ratio, Case((120, 80), packed=True, value_heads=3))
    parts = over(picture)
    assert parts.pop("sequence 0, tokens 0 to 4, head 0") == 8
    ((place, value),) = parts.items()
    assert place == "sequence 0, tokens 75 to 79, head 1"
    assert math.isnan(value) if math.isnan(bad) else value == bad
    data = json.dumps(Finding("o", FailureKind.OFF, "is off", picture=picture).to_json(), allow_nan=False)
    again = msgspec.convert(json.loads(data), Finding, strict=False).picture
    assert repr(again) == repr(picture) == repr(Finding.from_json(json.loads(data)).picture)


def test_bits_are_equal_or_differ_or_are_nan() -> None:
    want = torch.zeros(2, 4, 2, 3)
    got = want.clone()
    got[1, 2, 1, 0], got[0, 0, 0, 2] = 1e-30, math.nan
    case = Case((4, 4), heads=2, value_heads=2)
    (finding,) = judge([Pair("o", "", got, want)], functools.partial(where, case), lay_out=functools.partial(layout, case)).findings
    parts = over(finding.picture)
    assert parts.pop("sequence 1, token 2, head 1") == math.inf
    ((place, value),) = parts.items()
    assert (place, math.isnan(value)) == ("sequence 0, token 0, head 0", True)
    assert "· equal, █ differs, X NaN" in block_lines(finding, 116)[-1]


@pytest.mark.parametrize(
    ("case", "port", "shape", "index", "place"),
    [
        (Case((0, 3, 0, 2), packed=True, value_heads=2), "final_state", (4, 2, 8), (3, 1, 7), "sequence 3, key row 7, head 1"),
        (Case((5,)), "dh0", (1, 1, 8), (0, 0, 2), "key row 2, head 0"),
        (Case((5,), value_heads=2), "dg", (1, 5, 2), (0, 4, 0), "token 4, head 0"),
        (Case((4, 4), value_heads=2), "o", (2, 3, 2), (1, 2, 0), "row of the batch 1, token 2, head 0"),
        (PoolCase((1, 1)), "pool", (5, 1, 8), (3, 0, 1), "slot 3, key row 1, head 0"),
    ],
)
def test_states_parts_of_a_case_and_pools_have_pictures(
    case: Any, port: str, shape: tuple[int, ...], index: tuple[int, ...], place: str
) -> None:
    ratio = torch.zeros(shape, dtype=torch.float64)
    ratio[index] = 3.0
    assert over(of_rows(ratio, case, port)) == {place: 3.0}


def test_a_trace_has_pictures_of_its_outputs_and_states_and_other_things_have_none() -> None:
    def shown(port: str, shape: tuple[int, ...], index: tuple[int, ...]) -> list[str]:
        ratio = torch.zeros(shape)
        ratio[index] = 2.0
        lay = layout_of(Pair(port, "", ratio, ratio), ratio.shape)
        return [] if lay is None else [*over(drawn(ratio, lay))]

    assert shown("o", (6, 2, 4), (5, 1, 3)) == ["token 5, head 1"]
    assert shown("state", (2, 4, 4), (1, 2, 0)) == ["key row 2, head 1"]
    assert shown("window", (6, 3), (4, 0)) == ["channel 4"]
    assert shown("owners", (3,), (1,)) == []
    assert of_rows(torch.full((3,), 2.0, dtype=torch.float64), Case((3,)), "bytes") is None


@pytest.mark.slow
def test_a_rank_of_a_path_has_pictures_of_its_own_tokens() -> None:
    words = "lengths=8+8 packed=yes cp=2 heads=2 value_heads=2 backward=no"
    finding = execute(Run.parse(f"law=parallel adapter=zoo/StateAcross {words}")).findings[0]
    assert (finding.output, finding.first, [*over(finding.picture)]) == (
        "y",
        "sequence 1, token 0",
        ["local token 4", "local token 5", "local token 6", "local token 7"],
    )


def test_a_large_picture_is_small_and_no_column_has_tokens_of_two_sequences() -> None:
    lengths = (1000, 7, 1, 2000, 30)
    ratio = torch.rand(1, sum(lengths), 40, dtype=torch.float64)
    ratio[0, 1006, 39] = 1e9
    picture = of_rows(ratio, Case(lengths, packed=True, value_heads=40))
    assert picture is not None
    assert (len(picture.columns) <= MOST_COLUMNS, len(picture.lines) <= MOST_LINES) == (True, True)
    assert [sum(last - first + 1 for group, first, last in picture.columns if group == n) for n in range(5)] == [*lengths]
    assert over(picture) == {"sequence 1, tokens 0 to 6, head 39": 1e9}
    assert len(json.dumps(picture.to_json())) < 8192
    many = of_rows(2 * torch.ones(1, 100, 1, dtype=torch.float64), Case((1,) * 100, packed=True))
    assert many is not None
    assert (len(many.columns), many.columns[0], many.columns[-1]) == (34, (-1, 0, 2), (-1, 99, 99))


def test_a_ratio_keeps_its_side_of_one() -> None:
    assert [rounded(ratio) for ratio in (1.0, 1.0001, 0.99999, 123.456, math.inf)] == [1.0, 1.01, 1.0, 123.0, math.inf]


# The picture as text


def finding_with(values: list[list[float]], kind: FailureKind = FailureKind.OFF) -> Finding:
    """A finding about tokens and heads, each a part."""
    ratio = torch.tensor(values, dtype=torch.float64).T.unsqueeze(0)
    case = Case((ratio.shape[1],), value_heads=ratio.shape[2])
    shape = ratio.shape
    picture = drawn(ratio, layout(case, Pair("o", "", ratio, ratio), shape))  # type: ignore[arg-type]
    return Finding("o", kind, "is off", "token 1, head 0", "token 1, head 0", 8, 1, 1.0, 0.1, "as rounding", picture=picture)


def test_a_report_has_a_picture_of_at_most_six_lines_in_blocks_or_in_ascii() -> None:
    finding = finding_with([[0.5, 1.5, 1000.0, math.nan], [0.0, 0.0, 0.0, 0.0]])
    assert block_lines(finding, 116) == [
        "·▁█X  head 0",
        "····  head 1",
        "from token 0 to token 3",
        "o: · within the tolerance, ▁ to █ up to 1e+03 times, X NaN",
    ]
    plain = block_lines(finding, 116, ASCII)
    assert plain[0] == ".18X  head 0"
    assert "\n".join(plain).isascii()
    wide = finding_with([[float(token == 99) * 5 for token in range(100)]] * 16)
    lines = block_lines(wide, 60)
    assert len(lines) == 6
    assert lines[-3].endswith("█  heads 12 to 15")
    assert all(len(line) <= 60 for line in lines)
    assert block_lines(finding_with([[5.0]]), 116) == []
    assert block_lines(finding_with([[5.0], [0.0]]), 116)[:3] == ["█  head 0", "·  head 1", "token 0"]
    report = LawReport("oracle", "a.py:A", Verdict.BROKEN, run="law=oracle adapter=a.py:A lengths=4", findings=[finding])
    lines = text.failure(report).splitlines()
    assert "  where        ·▁█X  head 0" in lines
    assert lines[-1] == '  repeat       gdn-verify repeat "law=oracle adapter=a.py:A lengths=4"'
    assert "where" not in text.failure(report, marks="")


def test_a_stream_without_blocks_gets_ascii() -> None:
    for encoding, marks in (("utf-8", BLOCKS), ("ascii", ASCII), ("latin-1", ASCII)):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert marks_of(stream) == marks
        print_line("BROKEN · law", stream)
        stream.seek(0)
        assert stream.read() == ("BROKEN ? law\n" if encoding == "ascii" else "BROKEN · law\n")


# The page


class Here(Answering):
    """It runs each case in this process."""

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        if isinstance(question, RunOne):
            return json.loads(json.dumps(execute(Run.parse(question.line)).to_json()))
        return super().ask(question, deadline_s)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PROFILES, "quick", Profile("quick", 2, large=False))
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Here()])


@pytest.mark.usefixtures("here")
def test_a_broken_check_writes_its_page_with_report_commands_and_pictures(tmp_path: pathlib.Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    words = ("wrong.py:OneRow", "--law", "recall", "--json", "laws.jsonl", "--html", "page.html")
    assert main(["check", *words]) == exits.BROKEN
    (record,) = read("laws.jsonl")
    (broken,) = record.reports
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert written == page.page([record])
    self_contained(written)
    plain = html.unescape(written)
    assert f'gdn-verify repeat "{broken.run}"' in plain
    assert text.failure(broken, marks="") in plain
    assert "wrong.py:OneRow" in plain
    assert '<path class="differs"' in written


def self_contained(written: str) -> None:
    """No address, and nothing that a browser fetches."""
    for outside in ("http:", "https:", "//", "src=", "@import", "url(", "<link", "<img", "<iframe"):
        assert outside not in re.sub(r"(?m)^ *//.*$", "", written), outside
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', written))
    identifiers = re.findall(r' id="([^"]*)"', written)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'href="#([^"]*)"', written)) <= set(identifiers)


def canned(**more: Any) -> Record:
    """A whole check of every verdict, with pictures, illegal input and what it looked at."""
    finding = finding_with([[0.5, 1.5, 1000.0, math.nan], [0.0, math.inf, 0.0, 0.0]])
    reports = [
        LawReport(
            "oracle", "a.py:A", Verdict.HOLDS, "truth", "all is right", {"holds": 12, "blind": 1}, ratios={"o": 0.5, "dq": 0.7}
        ),
        LawReport(
            "cut",
            "a.py:A",
            Verdict.BROKEN,
            "truth",
            "it may be cut",
            {"broken": 1},
            run="law=cut adapter=a.py:A lengths=4",
            first_run="law=cut adapter=a.py:A lengths=9",
            findings=[finding],
            first_findings=[finding_with([[0.0, 0.0, math.inf]], FailureKind.DIFFERS)],
            ratios={"o": 1e300, "dq": 3.5},
        ),
        LawReport("future", "a.py:A", Verdict.BROKEN, "exact", "the past is blind", {"broken": 1}, same_as="cut"),
        LawReport("recall", "a.py:A", Verdict.UNKNOWN, "exact", "it recalls", {"unknown": 2}, "the oracle failed"),
        LawReport("norm", "a.py:A", Verdict.UNSUPPORTED, "truth", "it normalises", {}, "no norm"),
    ]
    head = Head(
        "a.py:A", "0.1", "torch 2.13", "", "quick", 7, [report.law for report in reports], shard=(2, 8), declares=["  chunk 64"]
    )
    end = End(
        1,
        75.0,
        not_run=["session"],
        refusals={"refuses (ValueError)": ["offsets that decrease", "q and k differ"]},
        regimes=["  dtype: bf16 3, fp32 9", "  every value that the domain allows was drawn"],
        looked_at=["looked at      up to 9 tokens in a sequence;", "               12 heads", "not looked at  never 13 heads"],
        left_out=["not drawn      one; in 3 cases"],
        causes=["causes:", "  cut, future"],
    )
    return dataclasses.replace(Record(head, reports, end), **more)


def test_a_page_has_everything_of_its_record() -> None:
    written = page.page([canned()])
    self_contained(written)
    plain = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", written)))
    for words in (
        "BROKEN a.py:A",
        "1 of 5 laws holds, 2 broken, 1 unknown, 1 unsupported",
        "shard 2/8",
        "time 1 min 15 s",
        "13 1 blind",
        "0.70 dq",
        "not finite o",
        "the oracle failed",
        "no norm",
        "No case was run of: session",
        "The call fails in the first case, as the report of cut says.",
        "looked at up to 9 tokens in a sequence; 12 heads not looked at never 13 heads",
        "dtype bf16 3, fp32 9",
        "refuses (ValueError) offsets that decrease; q and k differ",
        "over it, up to 1e+03 times",
    ):
        assert words in plain, words
    for name in ("over1", "over5", "nan", "infinite", "differs"):
        assert f'<path class="{name}"' in written, name
    assert len(written) < 60_000
    unfinished = page.page([canned(end=None), canned(reports=[])])
    self_contained(unfinished)
    assert "This check did not end" in unfinished
    assert "2 checks" in unfinished


def test_a_plot_ends_at_the_largest_error_and_marks_one() -> None:
    shown = page.plot(canned().reports)
    assert [(strip["output"], strip["words"], strip["end"]) for strip in shown["strips"]] == [
        ("o", "not finite", 100),
        ("dq", "3.50", pytest.approx(84.8, abs=0.1)),
    ]
    assert shown["decades"] == [(0, "0.01"), (pytest.approx(100 / 3), "0.1"), (pytest.approx(200 / 3), "1"), (100, "10")]
    assert shown["one"] == pytest.approx(200 / 3)
    assert page.plot([]) == {}


def hostile(value: Any) -> Any:
    """The same data with a hostile text in place of every text but verdicts, kinds and the names of outputs' classes."""
    if isinstance(value, Verdict | FailureKind):
        return value
    if isinstance(value, str):
        return value and value + HOSTILE
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: hostile(old) for name, old in vars(value).items() if name != "kind"})
    if isinstance(value, dict):
        return {hostile(key) if key not in [*Verdict] else key: hostile(old) for key, old in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(hostile, value))
    return value


def test_what_an_adapter_wrote_is_text_on_the_page() -> None:
    clean, written = page.page([canned()]), page.page([hostile(canned())])
    assert html.unescape(written).count("alert(1)") > 30
    assert b"{{ 7 * 7 }}?" in written.encode(), "it can be written"
    for tag in ("<script", "<img", "</script", "</code", "onerror=alert(2)>"):
        assert written.count(tag) == clean.count(tag), tag
    assert re.findall(r" on\w+=", re.sub(r'"[^"]*"|>[^<]*<', "", written)) == []


@pytest.mark.usefixtures("here")
def test_a_page_that_cannot_be_made_is_said_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(check_command, "workers_of", lambda *_: pytest.fail("work began"))
    assert main(["check", "zoo/LeaksState", "--html", f"{tmp_path}/none/page.html"]) == exits.USAGE
    assert "--html must name a file that can be written" in capfd.readouterr().err
    assert main(["check", "zoo/LeaksState", "--html", "page.html", "--tune", "sweep"]) == exits.USAGE
    assert "--html must be left out with --tune sweep" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["check", "zoo/LeaksState", "--html", "page.html"]) == exits.USAGE
    err = capfd.readouterr().err
    assert "pip install 'gdn-verify[page]'" in err
    assert err.count("\n") == 1
