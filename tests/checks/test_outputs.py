"""What shows a check elsewhere is made from its record, and hostile texts cannot break out of it."""

import contextlib
import dataclasses
import html
import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any
from xml.etree import ElementTree

import jsonschema
import junitparser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.answering import Answering
from verify.bench.faults import AdapterFault, blamed
from verify.cli import check_command, exits
from verify.cli.main import main
from verify.engine import explaining
from verify.engine.law_check import LawCheck
from verify.findings.law_report import LawReport
from verify.findings.records.entries import CONTROL, cleaned, entries, one_line
from verify.findings.records.github import MOST, annotations
from verify.findings.records.junit import junit
from verify.findings.records.markdown import markdown
from verify.findings.records.page import page
from verify.findings.records.places import place_of
from verify.findings.records.record import End, Head, Record, lines_of
from verify.findings.records.schema import schema
from verify.interpreter import Race
from verify.process.outcome import FailureKind, Finding, Verdict
from verify.process.picture import Picture
from verify.process.reach import Reach

ROOT = pathlib.Path(__file__).resolve().parents[2]
RIGHT = "tests/right.py:Chunkwise"
HEAD = Head("my.py:Kernel", "0.1.0", "torch 2.13.0", "", "few", 7, ["pure", "cut", "oracle", "gates"])
PIECES = [
    "```",
    "````\n",
    "|",
    "\\|",
    "</details>",
    "</code>",
    "<script>",
    "]]>",
    "\r\n",
    "\r",
    "\x00",
    "\x1b[31m",
    "\u2028",
    "%0A",
    "%25",
]
PIECES += ["::error::", "\n::add-mask::x", ",file=/etc/passwd", "\n\n# title\n", "&#124;", "\ud800", "\u202e", "[x](y)", "`", "\\"]
HOSTILE = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=6).map("".join)


def finding(what: str, source: str = "") -> Finding:
    return Finding("call", FailureKind.RAISED, f"raised ValueError: {what}", f"{what} in run", detail="ValueError", source=source)


def record_of(words: str = "odd", *, adapter: str = HEAD.adapter, end: End | None = None, source: str = "") -> Record:
    """A record with a law of each verdict, in which `words` is wherever an implementation can put words."""
    broken = LawReport(
        "cut",
        adapter,
        Verdict.BROKEN,
        "truth",
        words,
        {"holds": 3, "broken": 1},
        run=f"law=cut adapter={adapter} lengths=65 {words}",
        findings=[finding(words, source)],
        ratios={words: 2.5},
        wall_s=1.5,
    )
    reports = [
        LawReport("pure", adapter, Verdict.HOLDS, "exact", "a call changes nothing", {"holds": 5}),
        broken,
        LawReport("oracle", adapter, Verdict.UNKNOWN, "truth", words, {"unknown": 1}, reason=words),
        LawReport("gates", adapter, Verdict.UNSUPPORTED, "truth", words, {}, reason=words),
    ]
    head = dataclasses.replace(HEAD, adapter=adapter, versions=words, device=words)
    return Record(head, reports, end or End(1, 9.0, looked_at=["looked at      2 tokens", words]))


def test_a_case_that_fails_after_others_is_all_of_their_lines_in_summaries_and_on_the_page() -> None:
    record = record_of()
    broken = dataclasses.replace(record.reports[1], after=["law=pure first", "law=oracle second"])
    record = dataclasses.replace(record, reports=[record.reports[0], broken, *record.reports[2:]])
    lines = ["law=pure first", "law=oracle second", broken.run]
    assert "\n".join(["```text", *lines, "```"]) in markdown([record])
    assert "lines of which the last fails after the others" in markdown([record])
    command = " ".join(["gdn-verify repeat", *(f'"{line}"' for line in lines)])
    assert command in html.unescape(page([record]))
    assert command in junit([record])


# JUnit


@given(words=HOSTILE)
def test_junit_has_a_case_for_each_law_whatever_the_words_are(words: str) -> None:
    xml = junit([record_of(words, adapter=f"my.py:{words}")])
    assert not CONTROL.search(xml)
    (suite,) = junitparser.JUnitXml.fromstring(xml.encode())
    results = {case.name: [type(result).__name__ for result in case.result] for case in suite}
    assert results == {"pure": [], "cut": ["Failure"], "oracle": ["Error"], "gates": ["Skipped"]}
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 1, 1, 1)
    assert {"gdn-verify": "0.1.0", "seed": "7", "shard": "1/1"}.items() <= {
        one.name: one.value for one in suite.properties()
    }.items()
    (failure,) = next(case for case in suite if case.name == "cut").result
    assert failure.text.split() == entries(record_of(words, adapter=f"my.py:{words}"))[1].text.split()


def test_junit_has_only_what_the_usual_schema_has() -> None:
    known = {
        "testsuites": {"name", "tests", "failures", "errors", "skipped", "time"},
        "testsuite": {"name", "tests", "failures", "errors", "skipped", "time"},
        "testcase": {"name", "classname", "time"},
        **{name: {"message", "type"} for name in ("failure", "error", "skipped")},
        "property": {"name", "value"},
        **{name: set[str]() for name in ("properties", "system-out")},
    }
    records = [record_of(), record_of(adapter="other.py:Kernel")]
    tree = ElementTree.fromstring(junit(records))
    assert [suite.get("name") for suite in tree] == ["my.py:Kernel", "other.py:Kernel"]
    assert all({*node.attrib} <= known[node.tag] for node in tree.iter())


@pytest.mark.parametrize("end", [None, End(130, 1.0, interrupted=True), End(3, 1.0)])
def test_a_check_that_shows_nothing_is_never_green(end: End | None) -> None:
    holds = LawReport("pure", HEAD.adapter, Verdict.HOLDS, counts={"holds": 5})
    record = Record(dataclasses.replace(HEAD, laws=["pure"]), [holds], end)
    assert "<error" in junit([record])
    assert [line.partition(" ")[0] for line in annotations([record])] == ["::warning"]
    assert "undecided" in markdown([record])
    fine = dataclasses.replace(record, end=End(0, 1.0))
    assert "<error" not in junit([fine])
    assert annotations([fine]) == []


def test_a_law_without_cases_is_skipped_only_if_the_check_may_end_well_without_it() -> None:
    holds = LawReport("pure", HEAD.adapter, Verdict.HOLDS, counts={"holds": 5})
    for code, element in ((0, "skipped"), (3, "error")):
        record = Record(dataclasses.replace(HEAD, laws=["pure", "cut"]), [holds], End(code, 1.0, not_run=["cut"]))
        case = ElementTree.fromstring(junit([record])).find(".//testcase[@name='cut']")
        assert case is not None and [node.tag for node in case] == [element]


# Annotations


def command(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as GitHub's runner reads it: the name, the properties and the message."""
    found = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert found is not None, line
    properties = dict(pair.partition("=")[::2] for pair in found[2].split(","))
    return found[1], {name: decoded(value, ":,") for name, value in properties.items()}, decoded(found[3], "")


def decoded(words: str, more: str) -> str:
    for character in f"\r\n{more}%":
        words = words.replace(f"%{ord(character):02X}", character)
    return words


@given(words=HOSTILE)
def test_annotations_are_lines_that_say_the_same_whatever_the_words_are(words: str) -> None:
    record = record_of(words, adapter=f"my.py:{words}")
    lines = annotations([record])
    assert all(len(line.splitlines()) == 1 for line in lines)
    (error, properties, message), (warning, _, _) = map(command, lines)
    assert (error, warning) == ("error", "warning")
    assert properties == {"title": f"gdn-verify: cut is broken, {one_line(f'my.py:{words}')}"}
    entry = entries(record)[1]
    assert message == f"{entry.title}\n\n{entry.text}"


def test_at_most_ten_laws_are_annotated_and_none_twice() -> None:
    broken = record_of().reports[1]
    reports = [dataclasses.replace(broken, law=f"law{number}") for number in range(12)]
    reports += [dataclasses.replace(broken, law="alike", same_as="law0")]
    commands = [*map(command, annotations([Record(HEAD, reports, End(1, 1.0))]))]
    assert [name for name, _, _ in commands] == ["error"] * MOST + ["notice"]
    assert commands[-1][2] == "2 more laws have the same verdict as the 10 above"


KERNEL = (
    "def helper(): pass\n\ndef rule(q):\n    return q\n\nclass Kernel:\n    algorithm = 1\n\n    def run(self, x):\n        pass\n"
)


@pytest.mark.parametrize(
    ("adapter", "function", "source", "place"),
    [
        ("kernels/my.py:Kernel", "", "", ("kernels/my.py", 9)),
        ("kernels/my.py:Gone", "", "", ("kernels/my.py", 1)),
        ("kernels/my.py:Kernel", "my:rule", "", ("kernels/my.py", 3)),
        ("kernels/my.py:Kernel", "kernels.my:rule", "", ("kernels/my.py", 3)),
        ("kernels/my.py:Kernel", "package.rule:Rule.forward", "", ("src/package/rule.py", 2)),
        ("kernels/my.py:Kernel", "torch.nn:rule", "", ("kernels/my.py", 9)),
        ("kernels/my.py:Kernel", "my:rule", "kernels/my.py:4", ("kernels/my.py", 4)),
        ("kernels/my.py:Kernel", "my:rule", "fla/ops/chunk.py:4", ("kernels/my.py", 3)),
        ("kernels/my.py:Kernel", "", "/etc/hostname:1", ("kernels/my.py", 9)),
        ("kernels/my.py:Kernel", "", "kernels/my.py:x", ("kernels/my.py", 9)),
        ("kernels/odd.py:Kernel", "", "", ("kernels/odd.py", 1)),
        ("../outside.py:Kernel", "", "", None),
        ("fla/chunk", "fla.ops.chunk:rule", "", None),
    ],
)
def test_an_annotation_is_at_the_nearest_code_of_the_user(
    adapter: str,
    function: str,
    source: str,
    place: tuple[str, int] | None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = tmp_path / "work"
    (work / "kernels").mkdir(parents=True)
    (work / "src" / "package").mkdir(parents=True)
    (work / "kernels" / "my.py").write_text(KERNEL)
    (work / "kernels" / "odd.py").write_text("class (")
    (work / "src" / "package" / "rule.py").write_text("class Rule:\n    def forward(self): pass\n")
    (tmp_path / "outside.py").write_text(KERNEL)
    monkeypatch.chdir(work)
    end = End(1, 1.0, reach=Reach(functions={function: {}} if function else {}))
    record = record_of(adapter=adapter, end=end, source=source)
    assert place_of(record, entries(record)[1]) == place
    properties = command(annotations([record])[0])[1]
    assert (properties.get("file"), properties.get("line")) == ((place[0], str(place[1])) if place else (None, None))


def test_a_finding_has_the_place_of_the_code_that_raised_or_raced() -> None:
    fault, _ = blamed(Race("both write o[0]", "/opt/lib/site-packages/kernels/rule.py:7"), "cpu")
    assert isinstance(fault, AdapterFault)
    assert (fault.finding.source, fault.finding.worst) == ("kernels/rule.py:7", "rule.py:7")
    with pytest.raises(ValueError, match="odd") as raised:
        raise ValueError("odd")
    fault, _ = blamed(raised.value, "cpu")
    line = raised.traceback[-1].lineno + 1
    assert isinstance(fault, AdapterFault)
    assert fault.finding.source in (f"tests/checks/test_outputs.py:{line}", f"{__file__}:{line}")


# Markdown


def rendered(words: str) -> list[Token]:
    return MarkdownIt("commonmark", {"html": True}).enable("table").parse(words)


@given(words=HOSTILE)
def test_a_summary_has_its_tables_fences_and_folds_whatever_the_words_are(words: str) -> None:
    record = record_of(words, adapter=f"my.py:{words}")
    tokens = rendered(markdown([record]))
    kinds = [token.type for token in tokens]
    assert (kinds.count("heading_open"), kinds.count("table_open"), kinds.count("tr_open"), kinds.count("td_open")) == (1, 1, 5, 20)
    fences = [token.content.removesuffix("\n") for token in tokens if token.type == "fence"]
    (broken,) = [entry for entry in entries(record) if entry.verdict is Verdict.BROKEN]
    looked_at = cleaned("\n".join(["looked at      2 tokens", words]))
    assert broken.report is not None
    assert fences == [cleaned(broken.report.run), broken.text, looked_at]
    html = [part for token in tokens if token.type == "html_block" for part in re.findall(r"</?\w+>", token.content)]
    assert [part for part in html if "details" in part] == ["<details>", "</details>"] * 2
    inline = [child for token in tokens if token.type == "inline" for child in token.children or ()]
    assert {child.content for child in inline if child.type == "html_inline"} == {"<code>", "</code>"}
    assert {child.type for child in inline} <= {"text", "html_inline", "strong_open", "strong_close", "text_special"}


def test_a_summary_of_a_step_is_added_and_any_other_file_is_replaced(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    record = tmp_path / "record.jsonl"
    record.write_text("".join(json.dumps(line) + "\n" for line in lines_of(record_of("at=64"))))
    for name in ("summary.md", "other.md"):
        (tmp_path / name).write_text("before\n")
        assert main(["merge", str(record), "--markdown", name, "--junit", "junit.xml", "--annotations", "github"]) == exits.BROKEN
    assert (tmp_path / "summary.md").read_text() == "before\n" + (tmp_path / "other.md").read_text()
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("failures") == "1"
    assert capsys.readouterr().out.splitlines()[-2].startswith("::error title=gdn-verify%3A cut is broken%2C my.py%3AKernel::")


def test_annotations_leave_stdout_to_json_and_a_sweep_has_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering(lambda run: 4.0)])
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 0)
    words = ["check", str(ROOT / RIGHT), "--law", "pure", "--profile", "least", "--annotations", "github"]
    assert main([*words, "--json", "-"]) == exits.BROKEN
    told = capsys.readouterr()
    assert "\n::error title=" in told.err
    assert [json.loads(line)["record"] for line in told.out.splitlines()] == ["check", "law", "end"]
    for option in (["--junit", "file"], ["--markdown", "file"], ["--annotations", "github"]):
        assert main(["check", "fla/chunk", "--tune", "sweep", *option]) == exits.USAGE
        assert f"{option[0]} must be left out with --tune sweep" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--junit", "--markdown"])
def test_a_file_that_cannot_be_written_is_refused_or_no_success(
    option: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering()])
    words = ["check", str(ROOT / RIGHT), "--law", "pure", "--profile", "least"]
    assert main([*words, option, "no/such/folder/file"]) == exits.USAGE
    assert f"{option} must name a file that can be written" in capsys.readouterr().err
    assert main([*words, option, "/dev/full"]) == exits.UNDECIDED
    assert "cannot write to /dev/full: No space left on device" in capsys.readouterr().err
    assert main([*words, option, "file", "--known", "gone.toml"]) == exits.USAGE
    assert not (tmp_path / "file").exists()


# The schema


def valid(data: Any) -> bool:
    return jsonschema.Draft202012Validator(schema()).is_valid(data)


def test_the_schema_of_the_documentation_is_that_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--schema"]) == exits.HOLDS
    assert (ROOT / "docs" / "reference" / "record.schema.json").read_text() == capsys.readouterr().out
    jsonschema.Draft202012Validator.check_schema(schema())


def checked(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, ratio: Any, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the record of a check whose worker answers at once."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering(ratio)])
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 0)
    laws = ("--law", "pure", "--law", "cut", "--profile", "least", "--json", "record.jsonl")
    with contextlib.suppress(SystemExit):
        code = main(["check", str(ROOT / RIGHT), *laws, *words])
    return code, [json.loads(line, parse_constant=strictly) for line in (folder / "record.jsonl").read_text().splitlines()]


def strictly(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("case", ["holds", "broken", "interrupted", "shard"])
def test_records_of_checks_fit_the_schema_and_changed_ones_do_not(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    if case == "interrupted":
        monkeypatch.setattr(LawCheck, "run", interrupted)
    words = ("--shard", "1/2") if case == "shard" else ()
    code, lines = checked(monkeypatch, tmp_path, lambda run: 4.0 if case == "broken" else 0.5, *words)
    assert code == {"broken": exits.BROKEN, "interrupted": exits.INTERRUPTED}.get(case, exits.HOLDS)
    assert lines[0]["record"] == "check" and lines[-1]["record"] == "end"
    assert case == "interrupted" or {line["law"] for line in lines[1:-1]} == {"pure", "cut"}
    for line in lines:
        assert valid(line)
        for changed in changes(line):
            assert not valid(changed), changed


def test_a_record_with_everything_fits_the_schema_and_changed_ones_do_not() -> None:
    reach = Reach(sizes={"tokens": 9}, functions={"a:f": {}}, blocks={"k:f": {"12": True}}, lines={"my.py": {1, 3}})
    record = record_of("inf", end=End(1, 2.0, refusals={"refuses": ["odd"]}, reach=reach))
    picture = Picture("token", "head", "sequence", ((0, 0, 3), (1, 0, 3)), ((0, 1),), ((0.5, float("nan")),))
    record.reports[1].findings.append(dataclasses.replace(finding("odd"), picture=picture))
    for line in json.loads(json.dumps(lines_of(record), allow_nan=False)):
        assert valid(line)
        for changed in changes(line):
            assert not valid(changed), changed


def changes(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same line without a key, with null in place of a value, with another schema and with another kind."""
    yield {**line, "schema": 2}
    yield {**line, "record": "laws"}
    yield {key: value for key, value in line.items() if key != "record"}
    for path in paths(line):
        *before, last = path
        changed = json.loads(json.dumps(line))
        inner = changed
        for key in before:
            inner = inner[key]
        inner[last] = None
        yield changed


def paths(data: Any, before: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    """The places of all values, but for pictures and for numbers of a reach, which may be null."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        if key not in ("low", "high", "picture"):
            yield (*before, key)
        yield from paths(value, (*before, key))
