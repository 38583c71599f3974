"""The command line: every situation has its exit code, bad usage is one line before any work, and stdout is results only."""

import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from properties.books import BOOKS
from properties.paths.laws import PATH_LAWS
from properties.rules.laws import LAWS
from tests.answering import Answering
from tests.commands import VERIFY, Command
from tests.processes import family, gone
from verify.adapters import loader as adapter
from verify.cli import check_command, exits
from verify.cli.exits import exit_code
from verify.cli.main import main
from verify.engine import explaining
from verify.engine.profiles import PROFILES, Profile
from verify.findings import report as text
from verify.findings.law_report import LawReport
from verify.process import worker
from verify.process.outcome import Verdict

ROOT = pathlib.Path(__file__).resolve().parents[2]
RIGHT = f"{ROOT}/tests/right.py:Chunkwise"
BROKEN = "zoo/ChangesBeta"


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setitem(PROFILES, "quick", Profile("quick", 6))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker may start."""

    def refuse(self: worker.Worker) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker.Worker, "launch", refuse)


class Said:
    """What a command left on stdout and stderr, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def run(capfd: pytest.CaptureFixture[str], *words: str) -> Said:
    try:
        code = main(words)
    except SystemExit as left:
        code = int(left.code or 0)
    return Said(code, *capfd.readouterr())


def laws(text: str) -> list[Any]:
    """The laws of a record, which begins with the check and ends with its end."""
    first, *laws, last = map(strict, text.splitlines())
    assert (first["record"], last["record"]) == ("check", "end")
    assert {law["record"] for law in laws} <= {"law"}
    return laws


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


ON_GPU = f"law=oracle adapter={RIGHT} lengths=3 device=cuda"
PATH_LINE = "law=parallel adapter=gdn/layer lengths=4 cp=2 heads=2 value_heads=2"


BAD_USAGE: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("check",), ("check needs one adapter", "`gdn-verify list` shows them", "my_kernel.py:MyKernel")),
    (("check", RIGHT, "--adapter", RIGHT), ("check needs one adapter",)),
    (
        ("check", "fla/chonk"),
        ("unknown adapter 'fla/chonk' (did you mean fla/chunk?): `gdn-verify list` shows", "as my_kernel.py:MyKernel"),
    ),
    (("check", "missing.py:Kernel"), ("there is no file missing.py",)),
    (("check", "kernel.py"), ("adapter 'kernel.py': the class is missing, as in kernel.py:MyKernel",)),
    (("soak", RIGHT, "kernel.py:"), ("adapter 'kernel.py:': the class is missing, as in kernel.py:MyKernel",)),
    (("check", "zoo/LeaksStat"), ("'zoo/LeaksStat'", "zoo/LeaksState")),
    (("zoo", "LeaksStat"), ("'zoo/LeaksStat'", "zoo/LeaksState")),
    (("zoo", "--mutate", "fla/chonk"), ("did you mean fla/chunk?",)),
    (("check", "a b.py:Kernel"), ("spaces",)),
    (("check", RIGHT, "--law", "orcale"), ("'orcale'", "did you mean oracle?", "oracle, recurrent, packed")),
    (("check", RIGHT, "--lwa", "oracle"), ("--lwa", "did you mean --law?")),
    (("check", RIGHT, "--profile", "qick"), ("--profile", "'qick'", "did you mean quick?")),
    (("fetch", "sglnag"), ("'sglnag'", "did you mean sglang?")),
    (("check", RIGHT, "--json", "/nowhere/out.jsonl"), ("--json", "'/nowhere/out.jsonl'", "No such file")),
    (("check", RIGHT, "--profile", "fast"), ("--profile", "'fast'", "quick", "soak")),
    (("check", RIGHT, "--seed", "-1"), ("--seed", "'-1'", "0..4294967295")),
    (("check", RIGHT, "--seed", "x"), ("--seed", "'x'")),
    (("check", RIGHT, "--workers", "0"), ("--workers", "'0'", "1..256")),
    (("check", RIGHT, "--deadline", "nan"), ("--deadline", "'nan'", "over 0")),
    (("check", RIGHT, "--products", "fp8"), ("--products", "'fp8'", "ieee", "tf32")),
    (("repeat", ""), ("law=",)),
    (("repeat", "lengths=3"), ("must have law=",)),
    (("repeat", "law=oracle", f"adapter={RIGHT}", "length=3"), ("'length'", "did you mean lengths?")),
    (("repeat", "--json", "law=oracle", f"adapter={RIGHT}", "length=3", "--deadline", "9"), ("'length'", "mean lengths?")),
    (("known", "law=oracle", "adapter=fla/chonk", "lengths=3", "--reason", "x"), ("did you mean fla/chunk?",)),
    (("launches", "law=oracle", f"adapter={RIGHT}", "lengths=3"), ("launches needs a line with device=cuda, got device=cpu",)),
    (("launches", ON_GPU, "--beside", "sweep"), ("--beside must be a number or native, got sweep",)),
    (("launches", ON_GPU, "--calls", "1"), ("--calls must be 2 or more without --beside, got 1",)),
    (("launches", f"law=oracle adapter={RIGHT} device=cuda"), ("a case line must have lengths",)),
    (("check", RIGHT, "--tune", "fastest"), ("tune must be native or a number that draws",)),
    (("check", RIGHT, "--deny", "gone.jsonl"), ("--deny must name a file that can be read, got 'gone.jsonl'",)),
    (("check", RIGHT, "--deny", __file__), ("line 1 of the deny-list",)),
    (("repeat", f"law=oracle adapter={RIGHT}"), ("must have lengths",)),
    (("repeat", f"law=orcale adapter={RIGHT} lengths=3"), ("'orcale'", "oracle")),
    (("repeat", "law=oracle adapter=fla/chonk lengths=3"), ("'fla/chonk'", "fla/chunk")),
    (("repeat", f"law=oracle adapter={RIGHT} length=3"), ("'length'", "did you mean lengths?")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3 lengths=4"), ("lengths must come once",)),
    (("repeat", f"law=oracle adapter={RIGHT} lengths"), ("name=value", "'lengths'")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=-3"), ("lengths", "'-3'")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3+4"), ("packed=yes", "3+4")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=1048577"), ("at most 1048576", "1048577")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3 key_dim=0"), ("key_dim must be in 1..1024, got 0",)),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3 heads=2 value_heads=3"), ("value_heads", "multiple", "got 3")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3 dtype=fp8"), ("fp32, bf16, fp16", "'fp8'")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3 packed=maybe"), ("packed must be yes or no", "'maybe'")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3 seed={2**32}"), ("seed must be in 0..4294967295",)),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3 at=1"), ("takes no at", "at=1")),
    (("repeat", f"law=cut adapter={RIGHT} lengths=3"), ("at must be in 1..2", "None")),
    (("repeat", f"law=cut at=3 adapter={RIGHT} lengths=3"), ("at must be in 1..2", "got 3")),
    (("repeat", f"law=cut at=x adapter={RIGHT} lengths=3"), ("at must be a whole number", "'x'")),
    (("repeat", f"law=strides variant=spiral adapter={RIGHT} lengths=3"), ("variant", "sliced", "spiral")),
    (("repeat", f"law=strides adapter={RIGHT} lengths=3"), ("variant", "sliced")),
    (("repeat", f"law=oracle variant=sliced adapter={RIGHT} lengths=3"), ("variant must be absent",)),
    (("repeat", f"law=oracle products=fp8 adapter={RIGHT} lengths=3"), ("products", "ieee, tf32", "'fp8'")),
    (("repeat", f"  adapter={RIGHT} law=orcale lengths=3"), ("'orcale'", "oracle")),  # in any order, and with spaces before
    (("repeat",), ("LINE",)),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3", f"law=orcale adapter={RIGHT} lengths=4"), ("'orcale'", "oracle")),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3 device=cuda", f"law=oracle adapter={RIGHT} lengths=4"), ("one device",)),
    (("repeat", f"law=oracle adapter={RIGHT} lengths=3", f"law=oracle adapter={RIGHT} lengths=4", "--upstream", "x"), ("lines",)),
    (("reapeat", "x"), ("invalid choice", "did you mean repeat?")),
    (("check", RIGHT, "--sanitize", "leakcheck"), ("--sanitize", "'leakcheck'", "memcheck", "racecheck")),
    (("check", "gdn/layer", "--ranks", "2", "--device", "cpu", "--backend", "nccl"), ("--backend must be gloo",)),
    (("repeat", f"{PATH_LINE} device=cuda", "--ranks", "2", "--backend", "gloo"), ("--backend must be nccl",)),
    (("check", RIGHT, "--deadline", "0"), ("--deadline", "must be a number of seconds over 0")),
    ((), ("list,check,merge,draw,export,judge,repeat",)),
]


@pytest.mark.usefixtures("no_work")
def test_bad_usage_is_refused_before_any_work(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    for words, names in BAD_USAGE:
        result = run(capfd, *words)
        assert (result.code, result.out) == (exits.USAGE, ""), words
        last = result.err.splitlines()[-1]
        assert [name for name in names if name not in last] == [], result.err
        assert result.err.startswith("usage:") or re.fullmatch("gdn-verify: .*\n", result.err), result.err
        assert list(tmp_path.iterdir()) == [], words


@pytest.mark.usefixtures("no_work")
def test_missing_or_old_fla_says_what_to_install(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ("check", "fla/chunk"), ("repeat", "law=oracle adapter=fla/chunk lengths=3")
    found = ((None, "which is not installed"), ("0.3.99", "got 0.3.99"), ("main", "got main"))
    for words, (version, why) in itertools.product(commands, found):
        monkeypatch.setattr(adapter, "installed", {"fla-core": version, "torch": "99.0", "triton": "99.0"}.get)
        got = run(capfd, *words)
        message = f"adapter fla/chunk needs fla-core >= 0.4.0, {why}: pip install 'fla-core>=0.4.0'"
        assert (got.code, got.out, got.err) == (exits.USAGE, "", f"gdn-verify: {message}\n"), (words, version)


@pytest.fixture
def one_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first adapter of those that have a name is there, so that a list of all takes less time."""
    for name in [*adapter.BUILT_IN][1:]:
        monkeypatch.delitem(adapter.BUILT_IN, name)


@pytest.mark.usefixtures("one_adapter")
@pytest.mark.parametrize("have", [None, "3.6.0"])
def test_list_says_what_this_host_lacks(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, have: str | None
) -> None:
    """A distribution's metadata decides, here that of a directory before all others on the path."""
    if have is None:
        monkeypatch.setitem(adapter.BUILT_IN, "own/missing", "verify.adapters.missing:Kernel")
        result = run(capfd, "list")
        assert "own/missing" in result.out
        assert "cannot run: " in result.out
    else:
        (tmp_path / f"triton-{have}.dist-info").mkdir()
        (tmp_path / f"triton-{have}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {have}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(adapter, "installed", adapter.installed.__wrapped__)  # it remembers what it has found
        result = run(capfd, "check", "fla/chunk")
        assert result.err == f"gdn-verify: adapter fla/chunk needs triton >= 3.7.1, got {have}: pip install 'triton>=3.7.1'\n"
    assert result.code == (exits.HOLDS if have is None else exits.USAGE)


def test_help_of_every_verb_says_the_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    codes = ["0    every law holds", "1    a law is broken", "2    bad usage", "3    undecided, or nothing was compared"]
    for verb in ["check", "soak", "repeat"]:
        result = run(capfd, verb, "--help")
        assert result.code == 0, verb
        assert [line.strip() for line in result.out.splitlines()[-5:-1]] == codes, verb


@pytest.mark.slow
def test_list_names_laws_and_adapters_and_its_json_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(capfd, "list", "--json")
    data = strict(result.out)
    assert result.code == exits.HOLDS
    assert set(data["laws"]) == {name for book in BOOKS for name in book.laws}
    assert set(data["laws"]) > {*LAWS, *PATH_LAWS}
    assert set(data["adapters"]) == set(adapter.BUILT_IN)
    assert result.err == ""


def test_right_implementation_exits_0_and_says_what_it_compared(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(capfd, "check", RIGHT, "--law", "recall", "--workers", "1")
    assert result.code == exits.HOLDS
    assert result.out.startswith(f"{RIGHT}  torch ")
    assert "profile quick, seed 0" in result.out
    declared = [
        "  declares     algorithm chunkwise, chunk 64, products ieee",
        "  domain       Domain(), other fields as by default",
    ]
    assert result.out.splitlines()[1:3] == declared
    assert "HOLDS       recall" in result.out
    lines = result.out.splitlines()
    assert lines.index(text.HEAD) == 3
    assert [lines[4].index(word) for word in ("HOLDS", "recall")] == [text.HEAD.index(word) for word in ("verdict", "law")]
    assert "1 of 1 law holds; 6 cases" in result.out
    assert result.err == ""
    assert not (pathlib.Path(".gdn-verify") / "findings.jsonl").exists()


@pytest.mark.parametrize("place", ["--json=/dev/full", "stdout"])
def test_a_report_that_cannot_be_written_is_no_success(
    place: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering()])
    words = ("check", RIGHT, "--law", "recall", "--law", "pure")
    if place == "stdout":
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            code, err = main(words), capfd.readouterr().err
        assert err == "gdn-verify: cannot write to /dev/full: No space left on device\n"
    else:
        code, out, err = vars(run(capfd, *words, place)).values()
        assert err == "gdn-verify: cannot write to /dev/full: No space left on device\n"
        assert "2 of 2 laws hold" in out
    assert code == exits.UNDECIDED
    monkeypatch.undo()
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering(lambda run: 4.0)])
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 0)
    broken = run(capfd, *words, "--json=/dev/full")
    assert broken.code == exits.BROKEN, "a broken law is what matters most"
    assert text.HEAD not in broken.out, "there are no columns"


def test_half_of_the_cases_climb_if_they_are_to(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "quick", Profile("quick", 16))
    lines = []
    for words in ((), ("--climb",)):
        worker = Answering()
        monkeypatch.setattr(check_command, "workers_of", lambda *_, worker=worker: [worker])
        assert run(capfd, "check", RIGHT, "--law", "strides", *words).code == exits.HOLDS
        lines.append(worker.asked)
    plain, climbing = lines
    assert len(plain) == len(climbing) == 16
    assert plain != climbing


@pytest.mark.slow
def test_broken_implementation_exits_1_with_a_finished_report(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(capfd, "check", "--adapter", BROKEN, "--law", "pure", "--workers", "1", "--seed", "7", "--json", "-")
    assert result.code == exits.BROKEN
    assert "seed 7" in result.err
    assert "BROKEN   pure" in result.err
    assert "versions" in result.err
    assert "findings are in .gdn-verify/findings.jsonl" in result.err
    (data,) = laws(result.out)
    assert (data["law"], data["verdict"], data["seed"]) == ("pure", "broken", 7)
    assert f'gdn-verify repeat "{data["run"]}"' in result.err
    findings = [strict(line) for line in pathlib.Path(".gdn-verify/findings.jsonl").read_text().splitlines()]
    assert [finding["stage"] for finding in findings] == ["found", "shrunk"]
    again = run(capfd, "repeat", data["run"])
    assert again.code == exits.BROKEN
    assert again.out.startswith("BROKEN   pure")
    plain = run(capfd, "repeat", "--json", *data["run"].split())  # without quotes
    assert strict(plain.out)["verdict"] == "broken"
    assert plain.err == ""


@pytest.mark.slow
def test_json_file_has_a_line_a_law(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.jsonl"
    done = run(capfd, "check", BROKEN, "--law", "pure", "--law", "recall", "--workers", "1", "--json", str(file))
    assert done.code == exits.BROKEN
    lines = laws(file.read_text())
    assert {data["law"] for data in lines} == {"pure", "recall"}
    assert all(f'repeat "{data["run"]}"' in done.out for data in lines)


@pytest.mark.slow
def test_stop_runs_nothing_after_the_first_broken_law(capfd: pytest.CaptureFixture[str]) -> None:
    # The second law may begin before it is stopped. It would hold, after many cases. One that breaks at once was reported at times.
    result = run(capfd, "check", "zoo/LeaksState", "-x", "--law", "packed", "--law", "pure", "--workers", "1")
    assert result.code == exits.BROKEN
    assert "0 of 2 laws hold, 1 broken, 1 not finished" in result.out


@pytest.mark.slow
def test_right_line_repeats_with_0_and_a_blind_one_with_3(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(capfd, "repeat", f"law=oracle adapter={RIGHT} lengths=0")
    assert (result.code, result.out.split()[0]) == (exits.HOLDS, "HOLDS"), result.out
    result = run(capfd, "repeat", f"law=cut at=2 adapter={RIGHT} lengths=3 beta=zero gate=tenth backward=no seed=1")
    assert (result.code, result.out.split()[0]) == (exits.UNDECIDED, "blind"), result.out
    result = run(capfd, "repeat", f"law=future at=1 adapter={RIGHT} lengths=2 backward=no")
    assert result.code == exits.HOLDS
    assert "compared" in result.out


def test_unsupported_law_alone_exits_3(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernel.py").write_text(
        "from tests.right import Chunkwise\nfrom verify import Domain\n"
        "class Kernel(Chunkwise):\n    domain = Domain(packed=False)\n"
    )
    result = run(capfd, "check", "kernel.py:Kernel", "--law", "packed")
    assert result.code == exits.UNDECIDED
    assert "packed is not supported" in result.out
    result = run(capfd, "repeat", "law=oracle adapter=kernel.py:Kernel lengths=3 packed=yes")
    assert result.code == exits.UNDECIDED
    assert "packed=yes is not supported" in result.out


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("raise RuntimeError('two\\nlines')", ("RuntimeError: two",)),
        ("from tests.right import Chunkwise as Own", ("no Adapter called Kernel", "Own")),
        ("import os; print('last words'); os._exit(5)", ("exited with code 5", "last words")),
        ("from tests.right import Chunkwise\nclass Kernel(Chunkwise): requires = {'no-such': '1.0'}", ("pip install 'no-such>=1",)),
    ],
)  # fmt: skip
def test_own_adapter_that_cannot_be_had_is_bad_usage_in_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, text: str, names: tuple[str, ...]
) -> None:
    (tmp_path / "kernel.py").write_text(text)
    result = run(capfd, "check", "kernel.py:Kernel", "--workers", "1")
    assert (result.code, result.out) == (exits.USAGE, "")
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("gdn-verify: adapter kernel.py:Kernel")
    for name in names:
        assert name in result.err


def test_adapter_that_prints_spoils_no_output(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernel.py").write_text(
        "import sys\nfrom tests.right import Prints\nprint('{}' * 9)\nprint('oops', file=sys.stderr)\nclass Kernel(Prints): pass\n"
    )
    result = run(capfd, "check", "kernel.py:Kernel", "--law", "recall", "--json", "-", "--workers", "1")
    assert result.code == exits.HOLDS
    assert [law["verdict"] for law in laws(result.out)] == ["holds"]
    assert "oops" not in result.err
    assert "noise" not in result.err


@pytest.mark.parametrize("where", ["/dev/full", "file"])
@pytest.mark.slow
def test_bad_disk_is_said_and_the_finding_printed(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "findings").mkdir()
    (tmp_path / "findings" / "findings.jsonl").symlink_to("/dev/full")
    folder = "findings" if where == "/dev/full" else "file"
    result = run(capfd, "check", BROKEN, "--law", "pure", "--workers", "1", "--findings", folder)
    assert result.code == exits.BROKEN
    assert f"gdn-verify: cannot write to {folder}: " in result.err
    assert result.err.count("cannot write") == 1
    assert 'repeat       gdn-verify repeat "law=pure' in result.out
    assert "findings are in" not in result.out


def test_run_of_a_killed_check_is_printed_by_the_next(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / ".gdn-verify").mkdir()
    (tmp_path / ".gdn-verify" / f"under-way-{dead.pid}.txt").write_text("law=cut at=3 adapter=a.py:B lengths=9\n")
    result = run(capfd, "check", RIGHT, "--law", "recall", "--workers", "1")
    assert 'an earlier check died during: gdn-verify repeat "law=cut at=3 adapter=a.py:B lengths=9"' in result.out


def test_exit_code_is_that_of_the_worst_verdict() -> None:
    def reports(*verdicts: Verdict) -> list[LawReport]:
        return [LawReport("oracle", RIGHT, verdict) for verdict in verdicts]

    assert exit_code(reports(Verdict.HOLDS, Verdict.UNSUPPORTED)) == exits.HOLDS
    assert exit_code(reports(Verdict.HOLDS, Verdict.UNKNOWN)) == exits.UNDECIDED
    assert exit_code(reports(Verdict.UNSUPPORTED)) == exits.UNDECIDED
    assert exit_code(reports()) == exits.UNDECIDED
    assert exit_code(reports(Verdict.HOLDS, Verdict.UNKNOWN, Verdict.BROKEN)) == exits.BROKEN


NO_SMALLER = "from verify.engine import explaining\nexplaining.SHRINK_RUNS = 0\n"  # other tests look for the smallest case
BROKEN_AND_SLOW = """
import time
from verify.zoo.wrong_rules import AddsStateTwice
class Kernel(AddsStateTwice):
    def run(self, x):
        while x.qk_norm:
            time.sleep(0.05)
        return super().run(x)
"""


@pytest.mark.slow
def test_interrupt_prints_what_was_done_keeps_findings_and_leaves_no_process(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernel.py").write_text(BROKEN_AND_SLOW)
    words = ["check", "kernel.py:Kernel", "--workers", "2", "--law", "recall", "--law", "norm"]
    with Command(words, tmp_path, program=NO_SMALLER + VERIFY, imports=["verify.execution.service"]) as check:
        assert check.stdout is not None
        lines = []
        for line in check.stdout:
            lines.append(line)
            if "repeat       gdn-verify" in line:
                break
        time.sleep(1.0)
        pids = family(check.pid)
        check.send_signal(signal.SIGINT)
        out, err = check.communicate(timeout=30)
    assert check.returncode == exits.INTERRUPTED, err
    assert "Traceback" not in err
    assert "interrupted: 0 of 2 laws hold, 1 broken, 1 not finished" in out
    assert "findings are in .gdn-verify/findings.jsonl" in out
    assert sorted(path.name for path in (tmp_path / ".gdn-verify").iterdir()) == ["examples.txt", "findings.jsonl"]
    assert len(pids) == 3, "two workers, and who forked them"
    assert gone(pids, 5.0)


@pytest.mark.slow
def test_reader_that_goes_away_is_no_traceback(tmp_path: pathlib.Path) -> None:
    read, write = os.pipe()
    os.close(read)
    program = f"import sys\ntry:\n    exec({VERIFY!r})\nfinally:\n    print('it ran', file=sys.stderr)\n"
    words = ("check", RIGHT, "--law", "recall", "--workers", "1")
    with Command(words, tmp_path, program=program, imports=[], stdout=write) as check:
        os.close(write)
        _, err = check.communicate(timeout=120)
    assert "it ran" in err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert check.returncode in (exits.HOLDS, exits.UNDECIDED)


@pytest.mark.usefixtures("one_adapter")
def test_reader_that_goes_away_from_a_list_is_no_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        code = main(["list"])
    assert code in (exits.HOLDS, exits.UNDECIDED)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_module_runs_from_any_directory_with_an_adapter_beside_it(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "neighbour.py").write_text("from tests.right import Chunkwise\n")
    (folder / "kernel.py").write_text("from neighbour import Chunkwise\nclass Kernel(Chunkwise):\n    pass\n")
    # A new interpreter: the other tests fork their commands.
    command = [sys.executable, "-m", "verify", "repeat", "law=oracle adapter=elsewhere/kernel.py:Kernel lengths=3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (exits.HOLDS, "")
    assert done.stdout.startswith("HOLDS")


def test_toolkit_that_fails_is_undecided_and_not_broken(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("our own mistake")

    monkeypatch.setattr("verify.engine.check.Check.run", fail)
    result = run(capfd, "check", RIGHT, "--law", "recall", "--workers", "1")
    assert result.code == exits.UNDECIDED
    assert "our own mistake" in result.err
