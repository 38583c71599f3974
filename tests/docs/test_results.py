"""docs/results.md is what the records say, a wrong record is refused, and benchmarks put their own records into the file."""

import argparse
import collections
import contextlib
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import causes, distributed, failures, oracles, pairs, records, results, soundness, speed, steady
from tests.together import for_each
from verify.process.outcome import Verdict

RECORD = {"table": "speed", "what": "a start", "command": "`start`", "machine": "CPU", "date": "2026-11-23", "value": 1.5}
MACHINES = {
    "CPU": {"what": "two cores", "gpu": False, "versions": {"Python": "3"}},
    "H200": {"what": "one GPU", "gpu": True, "versions": {"Python": "2.7"}},
}


def written(path: pathlib.Path, *rows: Any, machines: Any = MACHINES) -> pathlib.Path:
    path.write_text(json.dumps({"machines": machines, "records": rows}), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    return written(tmp_path / "results.json", RECORD)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["results.py", *arguments])
        return results.main()

    return run


def options(monkeypatch: pytest.MonkeyPatch, module: Any, *words: object, **defaults: Any) -> argparse.Namespace:
    """The options of a benchmark, without running it. Defaults are those of its own options."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, words)])
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", nargs="?")
    parser.add_argument("--json")
    parser.set_defaults(**defaults)
    return records.options_of(parser)


def by_what(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {record["what"]: record for record in records.read(path)["records"]}


def test_the_page_is_what_the_records_say(run: Callable[..., int]) -> None:
    assert run("--check") == 0


def test_the_file_of_records_is_as_a_benchmark_writes_it() -> None:
    assert records.text(records.read(records.RECORDS)) == records.RECORDS.read_text(encoding="utf-8")


def test_every_table_is_in_a_page_for_every_machine() -> None:
    data, pages = records.read(records.RECORDS), {name: page.read_text(encoding="utf-8") for name, page in results.PAGES.items()}
    last = {(record["table"], record["machine"]): number for number, record in enumerate(data["records"])}
    assert {table for table, _ in last} == {*records.TABLES}
    for (table, machine), number in last.items():
        rest = {**data, "records": [*data["records"][:number], *data["records"][number + 1 :]]}
        if table not in ("packed", "limits of KAPPA"):  # a sentence needs these
            assert {name: results.rendered(rest, name) for name in pages} != pages, (table, machine)


def test_an_edited_page_is_seen_and_written_again(
    run: Callable[..., int], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = results.PAGES["results.md.j2"].read_text(encoding="utf-8")
    lines = page.splitlines()
    number, row = next((number, line) for number, line in enumerate(lines, 1) if " tests on the stand-in " in line)
    edited = row.replace(", target 60 |", ", target 3 |")
    assert edited != row
    (tmp_path / "results.md").write_text(page.replace(row, edited), encoding="utf-8")
    monkeypatch.setitem(results.PAGES, "results.md.j2", tmp_path / "results.md")
    assert run("--check") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"benchmarks.results: results.md:{number} must be '{row[:20]}") and ", target 3 |" in line
    assert run() == 0 == run("--check")
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == page
    (tmp_path / "results.md").write_text(page + "more\n", encoding="utf-8")
    assert run("--check") == 1


@for_each(
    ("fields", "words"),
    [
        ({"machine": None}, "must have machine, got none (what='a start')"),
        ({"date": None}, "must have date, got none (what='a start')"),
        ({"date": "23 Nov"}, "must have date as 2026-11-23, got '23 Nov' (what='a start')"),
        ({"command": ""}, "must have command, got none (what='a start')"),
        ({"what": 3}, "must have what as a text, got 3 (what=3)"),
        ({"machine": "H300"}, "must have machine, one of CPU, H200, got 'H300' (what='a start')"),
        ({"table": "speeds"}, "must have table, one of false alarms, "),
        ({"valve": 1}, "got valve (what='a start')"),
        ({"value": {"a": 1}}, "must have value, a figure, a list of figures or a text, got {'a': 1} (what='a start')"),
        ({"table": "claims"}, "must have value, figures by the heads of columns, got 1.5 (what='a start')"),
        ({"table": "false alarms"}, "must have cases, a number, got None (what='a start')"),
        ({}, "must differ from record 1 in table, what, machine or gpus, got what='a start'"),
    ],
)
def test_a_wrong_record_is_refused_in_one_line(fields: dict[str, Any], words: str, file: pathlib.Path) -> None:
    wrong = {name: value for name, value in {**RECORD, **fields}.items() if value is not None}
    with pytest.raises(ValueError, match=r"\Arecord 2 of results.json must ") as caught:
        records.read(written(file, RECORD, wrong))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_file_is_refused_in_one_line(
    file: pathlib.Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RECORDS", written(file, RECORD, 3))
    assert run("--check") == 2
    assert capsys.readouterr().err == "benchmarks.results: record 2 of results.json must be an object, got 3\n"
    for text in ("no JSON", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"\Aresults.json must have machines and records: \w+: .*\Z"):
            records.read(file)
    with pytest.raises(ValueError, match=r"\Amachine CPU of results.json must have what and versions, got \{\}\Z"):
        records.read(written(file, machines={"CPU": {}}))


def test_bad_usage_is_refused_before_anything_is_measured(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, line in (
        (["--record", file], "--machine must be one of the machines of --record, CPU; H200, got None"),
        (["--record", file, "--machine", "H300"], "--machine must be one of the machines of --record, CPU; H200, got H300"),
        (["--record", file.parent, "--machine", "CPU"], "must have machines and records: IsADirectoryError"),
    ):
        with pytest.raises(SystemExit):
            options(monkeypatch, speed, *words)
        assert line in capsys.readouterr().err.splitlines()[-1]


def test_nothing_is_recorded_by_default(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_text()
    records.put(options(monkeypatch, speed, "fla/chunk"), "speed", {"a start": {"value": 2}})
    assert file.read_text() == before


def test_a_record_replaces_its_own_and_keeps_the_target(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**RECORD, "what": "another"}
    written(file, {**RECORD, "target": 3, "note": "old"}, {**RECORD, "machine": "H200"}, other)
    here = options(monkeypatch, speed, "a/b", "--json", "x", "--record", file, "--machine", "CPU", "--shared")
    records.put(here, "speed", {"a start": {"value": 1.26, "spread": [1.2345, 2]}, "new": {"value": [2.0, 0.14]}}, decimals=1)
    first, second, third, new = records.read(file)["records"]
    today = records.datetime.date.today().isoformat()
    about = {"command": "`python -m benchmarks.speed a/b`", "machine": "CPU", "shared": True, "date": today}
    assert first == {"table": "speed", "what": "a start", **about, "value": 1.3, "spread": [1.2, 2], "target": 3}
    assert (second["machine"], third) == ("H200", other)
    assert new == {"table": "speed", "what": "new", **about, "value": [2.0, 0.1]}
    records.put(here, "speed", {"new": {"value": 3}}, whole=True)
    assert [record["what"] for record in records.read(file)["records"]] == ["new"]


def test_versions_other_than_the_machines_are_recorded(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records.put(options(monkeypatch, speed, "--record", file, "--machine", "H200"), "speed", {"new": {"value": 3}})
    record = by_what(file)["new"]
    assert record["versions"] == {"Python": records.platform.python_version()}
    assert results.machine(record) == f"H200, Python {records.platform.python_version()}"


def test_records_of_several_machines_share_a_row() -> None:
    several = [
        {**RECORD, "machine": "H200", "gpus": n, "command": f"`run --ranks {n}`", "value": n / 4, "unit": "s"} for n in (2, 4)
    ]
    (_, row, later) = results.rows([*several, {**RECORD, "date": "2027-01-02"}], "2026")
    assert row == ("a start", "`run --ranks N`", "2 x H200; 4 x H200, 23 Nov", "0.5; 1.0 s")
    assert later == ("a start", "`start`", "CPU, 2 Jan 2027", "1.5")


# What each benchmark records of what it measured


def test_speed_records_its_medians(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = options(monkeypatch, speed, "fla/chunk", "--record", file, "--machine", "CPU")
    speed.record(
        here,
        [3.0, 1.0, 2.04],
        [9.0],
        [0.1, 0.2, 0.3],
        "16 of 18 laws hold, 2 unsupported; 672 cases in 5 s (2 processes together: kernels 2 s)\n",
    )
    found = by_what(file)
    assert (found["`fla/chunk`: first law decided"]["value"], found["`fla/chunk`: first law decided"]["spread"]) == (
        2.0,
        [1.0, 3.0],
    )
    assert found["`fla/chunk`: whole check"]["sample"] == "18 laws, 672 cases"
    assert [record["value"] for record in found.values()] == [1.5, 2.0, 9.0, 0.2]


def test_steady_records_rates_and_times(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 5.0, 4.0, 2.0, 9.0, 1.046, 2.0])
    monkeypatch.setattr(steady.devices, "gpus", lambda: 1)
    monkeypatch.setattr(steady, "Worker", lambda *_, **__: contextlib.nullcontext())
    for name in ("drawn", "real"):
        monkeypatch.setattr(steady, name, lambda *_: [])
    monkeypatch.setattr(steady, "told", lambda *_: (40, next(seconds)))
    for words in (["--passes", "3"], ["--real", "1,2", "--dtype", "fp32"]):
        monkeypatch.setattr(sys, "argv", ["steady.py", *words, "--record", str(file), "--machine", "H200"])
        assert steady.main() == 0
    rate, real = list(by_what(file).values())[1:]
    assert (rate["what"], rate["value"], rate["spread"]) == ("`fla/chunk`: 40 cases, kernels compiled", 10.0, [8.0, 20.0])
    assert rate["command"] == "`python -m benchmarks.steady --passes 3`"
    assert (real["what"], real["value"]) == ("`fla/chunk`: one case of 32,768 tokens, fp32", [1.05, 2.0])


def test_distributed_records_rates_and_alarms(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"exchange": {"a_second": 7.04}, "parallel": {"a_second": 2.0}, "first_verdict_s": 8.0}
    measured["soundness"] = {"counts": {Verdict.HOLDS: 5, Verdict.BLIND: 1}, "alarms": []}
    settings = {"adapter": "gdn/layer", "simulate": 64, "soundness": 6, "law": None}
    words = ("gdn/layer", "--record", file, "--machine")
    distributed.record(options(monkeypatch, distributed, *words, "CPU", ranks=None, **settings), "gloo", measured)
    alarms = by_what(file)["`gdn/layer` on 64 simulated ranks, every law"]
    assert (alarms["cases"], alarms["blind"], alarms["value"]) == (6, 1, 0)
    assert by_what(file)["exchanges on 64 simulated ranks"]["value"] == 7.0
    distributed.record(options(monkeypatch, distributed, *words, "H200", ranks=2, **settings), "nccl", measured)
    names = ("exchanges over NCCL", "whole layers over NCCL", "first verdict over NCCL, from the command")
    assert [(by_what(file)[name]["value"], by_what(file)[name]["gpus"]) for name in names] == [(7.0, 2), (2.0, 2), (8.0, 2)]


def test_soundness_records_alarms_and_errors(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = collections.Counter({str(Verdict.HOLDS): 2, str(Verdict.BLIND): 1})
    measured = {"a/b": (1, counts, {("fp32", "o"): [1.0, 3.0], ("bf16", "da"): [2.0]}), "c/d": (0, counts, {("fp16", "o"): [4.0]})}
    settings = {"record": file, "adapters": [*measured], "what": None}
    soundness.record(options(monkeypatch, soundness, "--record", file, "--machine", "CPU", law=["all"], **settings), measured)
    alarms = by_what(file)["`a/b`, `c/d`: all"]
    assert (alarms["cases"], alarms["blind"], alarms["value"]) == (6, 2, 1)
    soundness.record(options(monkeypatch, soundness, "--record", file, "--machine", "CPU", law=None, **settings), measured)
    heads = [f"`a/b`, {dtype}: median, largest" for dtype in ("bf16", "fp32")]
    assert by_what(file)["da, db, dA_log, ddt_bias"]["value"] == {heads[0]: [2.0, 2.0], heads[1]: ""}
    assert by_what(file)["o"]["value"] == {heads[0]: "", heads[1]: [2.0, 3.0], "largest of the others": 4.0}


def test_oracles_record_seconds_ratios_and_tolerances(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = options(monkeypatch, oracles, "--record", file, "--machine", "CPU", device="cpu")
    rows = [{"what": "x", "tokens": 4096, "median_s": seconds, "spread_s": 0.25, "gib": 0.0} for seconds in (2.0, 3.0)]
    oracles.record(here, "peers", rows[:1])
    assert (by_what(file)["x, 4,096 tokens"]["value"], by_what(file)["x, 4,096 tokens"]["spread"]) == (2.0, 0.25)
    oracles.record(here, "packed", [*rows, *rows[::-1]])
    assert list(by_what(file).values())[-1]["value"] == [0.67, 1.5]
    times = {name: place + 2.0 for place, name in enumerate(oracles.ON_A_CPU.values())}
    bounds = [{"call": "y", "name": name, "times": number} for name, number in times.items()]
    oracles.record(here, "bounds", bounds)
    assert by_what(file)["y"]["value"] == dict(zip(oracles.ON_A_CPU, times.values(), strict=True))
    here.device, here.machine = "cuda", "H200"
    oracles.record(here, "bounds", bounds)
    columns = list(records.read(file)["records"])[-1]["value"]
    assert columns == {head: times[name] - 1 for head, name in oracles.ON_A_GPU.items()}


def test_without_a_failure_there_is_nothing_to_measure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "first_failure", lambda name, folder: (1.0, 1.0, ""))
    reports = tmp_path / "reports.jsonl"
    reports.touch()
    for benchmark, words in ((failures, ["--animals", "2"]), (causes, ["--reports", str(reports)])):
        monkeypatch.setattr(sys, "argv", ["benchmark", *words])
        assert benchmark.main() == 1
    assert pairs.measure([], argparse.Namespace(), [(None, None)]) == 1  # type: ignore[list-item]
    assert capsys.readouterr().out.count("nothing to measure: ") == 3


def test_a_silent_command_is_given_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, silent = subprocess.Popen, [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start(silent, **more))
    monkeypatch.setattr(failures, "GIVEN_UP_S", 0.1)
    monkeypatch.setattr(failures, "animals", lambda: {"it": argparse.Namespace(kind=Wrong)})
    begin = time.monotonic()
    assert failures.first_failure("it", tmp_path)[2] == ""
    assert time.monotonic() - begin < 50


class Wrong:
    """Any class."""
