"""What compute-sanitizer reports during a case is a finding of that case. Here another program stands in for it: see FAKE."""

import contextlib
import os
import pathlib
import stat
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.in_process import said
from tests.together import for_each
from verify.bench import guards
from verify.cli import check_command, exits
from verify.engine import asking, explaining
from verify.engine.asking import ask_all
from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.execution import sanitizer as sanitize
from verify.execution import service
from verify.execution.line import Run
from verify.execution.sanitizer import MOST, Report, Sanitizer, SanitizerLog, find, findings, reports
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.process.choices import NoSanitizer
from verify.process.environment import SANITIZER_LOG, UNPOISONED
from verify.process.messages import Outcomes, Question, Reaction, Refuse, RunMany, RunOne, UnderSanitizer
from verify.process.outcome import Verdict
from verify.process.worker import Worker

SLOW_FIXTURES = ("worker_under_it",)

ROOT = pathlib.Path(__file__).resolve().parents[2]
RIGHT = f"{ROOT}/tests/right.py:Chunkwise"
# It is no sanitizer and sees no kernel. It takes the options, runs the command as the real one does, pipes included, and writes a
# log in the real one's form. A file decides what it reports: a "kernel" that does wrong says so in a file beside the log, where the
# real one would learn it from the driver.
FAKE = """#!{python}
import os, subprocess, sys, time
words = sys.argv[1:]
end = words.index("--")
options = dict(zip(words[:end:2], words[1:end:2], strict=False))
if "{fault}" == "refuses":
    sys.exit("compute-sanitizer: unrecognised option --padding")
log = open(options["--log-file"], "w", buffering=1)
log.write("========= COMPUTE-SANITIZER\\n")
done = open(options["--log-file"] + ".done", "w+")
child = subprocess.Popen(words[end + 1 :], close_fds="{fault}" == "closes")
count = 0
while child.poll() is None:
    for line in done.readlines():
        name, late_s = line.split()
        time.sleep(float(late_s))
        count += 1
        log.write(
            "========= Invalid __global__ read of size 4 bytes\\n"
            f"=========     at {{name}}+0xb0 in kernels.py:12\\n"
            "=========     by thread (5,0,0) in block (1,0,0)\\n"
            "=========     Address 0x7f0000001000 is out of bounds\\n"
            "=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 4,096 bytes\\n"
            "=========\\n"
        )
    time.sleep(0.002)
log.write(f"========= ERROR SUMMARY: {{count}} errors\\n")
sys.exit(child.returncode)
"""
# Right answers, from a kernel that reads beyond its tensors where a case has more than 20 tokens.
READS_ON = """
import os
from tests.right import Chunkwise
from verify import Domain
class Kernel(Chunkwise):
    domain = Domain(backward=False)
    often = True
    def run(self, x):
        if x.q.shape[1] > 20 and self.often:
            Kernel.often = {often}
            with open(os.environ["GDN_VERIFY_SANITIZER_LOG"] + ".done", "a") as file:
                file.write("reads_on {late_s}\\n")
        return super().run(x)
"""


def fake(folder: pathlib.Path, *, fault: str = "") -> str:
    """A program that stands in for compute-sanitizer."""
    path = folder / "compute-sanitizer"
    path.write_text(FAKE.format(python=sys.executable, fault=fault))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def worker_under_it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that another program starts cannot be forked, and imports torch for seconds. Several tests share it."""
    program = fake(tmp_path_factory.mktemp("sanitizer"))
    with Sanitizer("memcheck", program) as sanitizer, sanitizer.worker(20.0, "cpu") as worker:
        sanitizer.prove(worker)
        yield worker


def sanitized(worker: Worker, folder: pathlib.Path, spec: str, law: str) -> LawReport:
    store = Store(folder / "findings")
    with Check(Settings(spec, [law], Profile("some", 12), 0, under="--sanitize memcheck"), [worker], store) as check:
        (report,) = check.run()
    return report


def kernel(folder: pathlib.Path, *, often: bool = True, late_s: float = 0.0) -> str:
    (folder / "kernel.py").write_text(READS_ON.format(often=often, late_s=late_s))
    return f"{folder / 'kernel.py'}:Kernel"


@pytest.mark.slow
def test_what_it_reports_breaks_the_law_and_is_shrunk(
    worker_under_it: Worker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 10)  # each waits for the log
    report = sanitized(worker_under_it, tmp_path, kernel(tmp_path), "pure")
    assert report.verdict is Verdict.BROKEN
    finding = report.findings[0]
    assert finding.output == "sanitizer"
    assert finding.what.startswith("read out of bounds in kernel reads_on: 4 bytes of global memory")
    assert "at reads_on+0xb0 in kernels.py:12" in finding.worst
    assert "1 bytes after the nearest allocation" in finding.worst
    assert 21 <= max(Run.parse(report.run).example.case.lengths) < max(Run.parse(report.first_run).example.case.lengths)
    from verify.findings.report import failure

    text = failure(report)
    assert "  sanitizer: read out of bounds in kernel reads_on: 4 bytes of global memory" in text
    assert f'repeat --sanitize memcheck "{report.run}"' in text
    assert '"stage": "found"' in (tmp_path / "findings" / "findings.jsonl").read_text()


@pytest.mark.slow
def test_a_right_kernel_holds_under_it_and_several_at_once_do_not_mix(worker_under_it: Worker, tmp_path: pathlib.Path) -> None:
    worker = worker_under_it
    with Check(Settings(RIGHT, ["recall"], Profile("few", 6), 0), [worker], Store(tmp_path / "a")) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.HOLDS
    spec = kernel(tmp_path)
    runs = [Run.parse(f"law=pure adapter={spec} lengths={length} backward=no") for length in (9, 30, 12)]
    outcomes = list(ask_all(runs, worker, Store(tmp_path / "b")))
    assert [outcome.verdict for outcome in outcomes] == [Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS]
    assert worker.ask(RunOne(f"law=oracle adapter={spec} lengths=3 state=nonsense"))["verdict"] == "unknown"
    assert worker.ask(RunOne("law=oracle adapter=gone.py:Kernel lengths=3")).keys() == {"error"}


@pytest.mark.slow
def test_a_report_that_is_not_given_again_blames_no_case(worker_under_it: Worker, tmp_path: pathlib.Path) -> None:
    """It may have come late, and be about the case before."""
    report = sanitized(worker_under_it, tmp_path, kernel(tmp_path, often=False, late_s=0.3), "pure")
    assert report.verdict is Verdict.UNKNOWN
    assert "read out of bounds in kernel reads_on" in report.reason
    assert "but not again when it was run again" in report.reason
    assert '"stage": "found once"' in (tmp_path / "findings" / "findings.jsonl").read_text()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuses", "the worker crashed: exited with code 1; compute-sanitizer: unrecognised option --padding"),
        ("closes", "OSError: [Errno 9] Bad file descriptor"),  # the pipes of questions and answers
    ],
)
@pytest.mark.slow
def test_a_sanitizer_that_does_not_work_is_no_clean_kernel(tmp_path: pathlib.Path, fault: str, message: str) -> None:
    program = fake(tmp_path, fault=fault)
    with Sanitizer("memcheck", program) as sanitizer, sanitizer.worker(20.0, "cpu") as worker, pytest.raises(NoSanitizer) as error:
        sanitizer.prove(worker)
    assert str(error.value).startswith("compute-sanitizer --tool memcheck does not work here: ")
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "it has written nothing to its log"),
        ("", "it has written nothing to its log"),
        ("========= COMPUTE-SANITIZER\n========= Error: No attachable process found.\n", "Error: No attachable process found."),
    ],
)
def test_a_sanitizer_that_is_not_there_or_failed_is_no_clean_kernel(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str | None, reason: str
) -> None:
    """The worker is this process."""

    class Here:
        deadline_s = 1.0

        def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, object]:
            return sanitize.answer(question.to_json())

        def close(self) -> None:
            pass

    if text is not None:
        (tmp_path / "log").write_text(text)
    monkeypatch.setenv(SANITIZER_LOG, str(tmp_path / "log"))
    sanitize._watch.cache_clear()
    with Sanitizer("synccheck", "compute-sanitizer") as sanitizer, pytest.raises(NoSanitizer) as error:
        sanitizer.prove(Here())
    assert str(error.value) == f"compute-sanitizer --tool synccheck does not work here: {reason}"
    sanitize._watch.cache_clear()


@pytest.mark.slow
def test_a_sanitizer_that_stops_working_decides_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text("========= COMPUTE-SANITIZER\n")
    monkeypatch.setenv(SANITIZER_LOG, str(log))
    sanitize._watch.cache_clear()
    line = f"law=oracle adapter={RIGHT} lengths=3"
    assert sanitize.answer(UnderSanitizer().to_json()) == {"trouble": ""}
    assert sanitize.answer(RunOne(line).to_json())["verdict"] == "holds"
    with open(log, "a") as file:
        file.write("========= Internal Sanitizer Error: The Sanitizer is out of memory\n")
    got = sanitize.answer(RunOne(line).to_json())
    assert (got["verdict"], got["spent"]) == ("unknown", True)
    assert got["reason"] == "the sanitizer failed: Internal Sanitizer Error: The Sanitizer is out of memory"
    with open(log, "a") as file:
        file.write("========= Internal Sanitizer Error: The Sanitizer is out of memory\n")
    assert sanitize.answer(RunMany([line, line]).to_json()) == Outcomes([]).to_json()
    sanitize._watch.cache_clear()


@pytest.mark.slow
def test_what_it_reports_of_illegal_input_is_printed_and_not_judged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("========= COMPUTE-SANITIZER\n")
    monkeypatch.setenv(SANITIZER_LOG, str(log))
    sanitize._watch.cache_clear()
    assert sanitize.answer(UnderSanitizer().to_json()) == {"trouble": ""}
    for text, did in (
        ("", "returns numbers without an error"),
        (OLD_READ, "returns numbers without an error, and the sanitizer reports read out of bounds in kernel k"),
        (
            "========= Internal Sanitizer Error: The Sanitizer is out of memory\n",
            "returns numbers without an error, and the sanitizer failed: Internal Sanitizer Error: The Sanitizer is out of memory",
        ),
    ):

        def probed(question: dict[str, object], text: str = text) -> Reaction:
            with open(log, "a") as file:
                file.write(text)
            return Reaction("returns numbers without an error")

        monkeypatch.setattr(service, "typed_answer", probed)
        assert sanitize.answer(Refuse(RIGHT, "g of another length").to_json())["did"] == did
    sanitize._watch.cache_clear()


OLD_READ = "========= Invalid __global__ read of size 4\n=========     at 0x148 in k\n"
BARRIER = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at [clone k(int *)] outlined()+0x11f0 in sums.cu:42
=========     by thread (32,0,0) in block (0,0,0)
=========         Device Frame: wholes(int *, int *)+0xe40 in sums.cu:60
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x8ae3] in worker
=========
"""
RACE = """========= Error: Race reported between Write access at gather_kernel+0x550 in states.py:100
=========     and Read access at gather_kernel+0x580 in states.py:107 [65536 hazards]
=========
========= Warning: Race reported between Write access at other_kernel+0x50 in states.py:1
=========     and Write access at other_kernel+0x80 in states.py:7 [8 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
FLAT = """========= Invalid __shared__ write of size 16 bytes
========= at scan_kernel(float *, int):0x160 in scan.cu:6
========= by thread (0,0,0) in block (3,0,0)
========= Address 0x41 is misaligned
========= ERROR SUMMARY: 1 error
========= ERROR SUMMARY: 157 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
OLD = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at 0x100 in sums.cl:30:sum_kernel(const int *, int *)
=========     by thread (98,0,0) in block (194,0,0)
=========     Address 0x7fbbca800000
"""


@for_each(
    ("text", "want"),
    [
        (BARRIER, ["Barrier error detected. Divergent thread(s) in block in kernel wholes(int *, int *)"]),
        (RACE, ["race in kernel gather_kernel"]),
        (FLAT, ["write misaligned in kernel scan_kernel(float *, int)"]),
        (OLD, ["read of uninitialised memory in kernel sums.cl:30:sum_kernel(const int *, int *)"]),
        (BARRIER + RACE + FLAT, ["Barrier error", "race in", "write misaligned"]),
        (
            "========= Malloc/Free error encountered : Double free\n=========     at 0x79d8\n",
            ["Malloc/Free error"],
        ),
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", []),
        ("========= Error: process didn't terminate successfully\n========= Target application returned an error\n", []),
        ('========= Program hit CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found" on CUDA API call.\n', []),
        ("what a kernel printed: Invalid __global__ read of size 4 bytes\n", []),
        ("", []),
    ],
)
def test_a_log_is_read_as_it_is_documented(text: str, want: list[str]) -> None:
    found, trouble = reports(text)
    assert trouble == ""
    assert len(found) == len(want)
    assert all(str(report).startswith(start) for report, start in zip(found, want, strict=True)), found


def test_what_is_said_besides_goes_with_the_report_and_the_hosts_stack_does_not() -> None:
    (race,), _ = reports(RACE)
    assert "Read access at gather_kernel+0x580 in states.py:107 [65536 hazards]" in race.more
    (barrier,), _ = reports(BARRIER)
    assert "by thread (32,0,0) in block (0,0,0)" in barrier.more
    assert "Host Frame" not in barrier.more


@pytest.mark.parametrize(
    "line", ["Error: No attachable process found. compute-sanitizer timed-out.", "Internal Sanitizer Error: out of memory"]
)
def test_the_sanitizers_own_failure_is_no_report(line: str) -> None:
    assert reports(f"========= {line}\n") == ([], line)


def test_reports_that_are_alike_are_one_finding_and_few_are_printed() -> None:
    same = [Report("read out of bounds", "one", "4 bytes of global memory", f"by thread ({place},0,0)") for place in range(3)]
    others = [Report("race", f"kernel {place}") for place in range(9)]
    results = findings([*same, *others])
    assert len(results) == MOST
    assert results[0].what == "read out of bounds in kernel one: 4 bytes of global memory (3 times)"
    assert results[0].worst == "by thread (0,0,0)"
    assert results[1].what == "race in kernel kernel 0"


@pytest.mark.slow
def test_a_log_is_read_from_where_it_was_read_and_once_it_is_whole(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    watch = SanitizerLog(log)
    assert watch.more() == ([], "it has written nothing to its log")
    log.write_text("========= COMPUTE-SANITIZER\n" + FLAT)
    assert [str(report) for report in watch.more()[0]] == ["write misaligned in kernel scan_kernel(float *, int)"]
    assert watch.more() == ([], "")
    with open(log, "a") as file:
        file.write(OLD)
    assert len(watch.more()[0]) == 1


def test_uninitialised_memory_stays_so_where_the_sanitizer_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty
    with guards.poisoned(float("nan")):
        assert torch.empty is not plain
    with Sanitizer("initcheck", "compute-sanitizer") as sanitizer:
        environment = sanitizer.worker(1.0, "cpu")._environment
    assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    monkeypatch.setenv(UNPOISONED, environment[UNPOISONED])
    with guards.poisoned(float("nan")):
        assert torch.empty is plain


def test_each_worker_has_a_log_of_its_own_and_the_folder_goes() -> None:
    with Sanitizer("racecheck", "compute-sanitizer") as sanitizer:
        first, second = sanitizer.worker(1.0, "cpu"), sanitizer.worker(1.0, "cpu")
        words = [list(worker._under()) for worker in (first, second)]
        logs = [pathlib.Path(command[command.index("--log-file") + 1]) for command in words]
        assert logs[0] != logs[1]
        assert logs[0] == pathlib.Path(first._environment[SANITIZER_LOG])
        assert words[0][:3] == ["compute-sanitizer", "--tool", "racecheck"]
        assert words[0][-1] == "--"
        assert "--padding" not in words[0], "only memcheck knows it"
        logs[0].write_text("of the process before")
        first._under()
        assert not logs[0].exists()
    assert not logs[0].parent.exists()


def test_an_unknown_tool_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tool must be one of memcheck, racecheck, initcheck, synccheck, got 'leakcheck'$"):
        Sanitizer("leakcheck", "compute-sanitizer")


def test_it_is_found_on_the_path_in_cudas_folders_and_in_its_wheel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize.glob, "glob", lambda pattern: [])
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    if not any(os.path.exists(f"{home}/bin/compute-sanitizer") for home in ("/usr/local/cuda", "/opt/cuda")):
        with pytest.raises(NoSanitizer, match="compute-sanitizer, which is neither on PATH nor in CUDA's folders"):
            find()
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    program = fake(tmp_path / "cuda" / "bin")
    assert find() == program
    monkeypatch.setenv("PATH", str(tmp_path))
    program = fake(tmp_path)
    assert find() == program


def test_without_the_program_or_a_gpu_it_is_one_line_and_undecided(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def missing() -> str:
        raise NoSanitizer("--sanitize needs compute-sanitizer")

    monkeypatch.setattr(sanitize, "find", missing)
    for words in (("check", RIGHT, "--sanitize"), ("repeat", f"law=oracle adapter={RIGHT} device=cuda lengths=3", "--sanitize")):
        assert said(capfd, *words) == (exits.UNDECIDED, "", "gdn-verify: --sanitize needs compute-sanitizer\n")
    monkeypatch.setattr(sanitize, "find", lambda: "compute-sanitizer")
    monkeypatch.setattr(devices, "gpus", lambda: 0)
    want = (exits.UNDECIDED, "", "gdn-verify: --sanitize needs a GPU, and torch sees none\n")
    assert said(capfd, "check", RIGHT, "--sanitize", "racecheck") == want


@pytest.mark.parametrize(
    "words",
    [
        ("check", RIGHT, "--sanitize", "--device", "cpu"),
        ("check", RIGHT, "--sanitize", "--tune", "sweep"),
        ("check", RIGHT, "--sanitize", "--ranks", "2"),
        ("check", "gdn/layer", "--sanitize"),
        ("repeat", f"law=oracle adapter={RIGHT} lengths=3", "--sanitize"),
    ],
)
def test_it_is_for_one_process_on_a_gpu(capfd: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, err = said(capfd, *words)
    assert (code, out) == (exits.USAGE, "")
    assert "--sanitize is for one process on a GPU" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_command_line_runs_workers_under_it(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which is not there: the cases run on the CPU."""
    monkeypatch.chdir(tmp_path)
    program = fake(tmp_path)
    monkeypatch.setattr(sanitize, "find", lambda: program)
    monkeypatch.setattr(devices, "gpus", lambda: 1)
    monkeypatch.setattr(check_command, "device_of", lambda device: "cpu")
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 4)
    kernel(tmp_path)
    words = ("check", "kernel.py:Kernel", "--law", "pure", "--sanitize", "--workers", "1", "--profile", "few")
    code, out, err = said(capfd, *words)
    assert code == exits.BROKEN, err
    assert "under compute-sanitizer --tool memcheck" in out
    assert "sanitizer: read out of bounds in kernel reads_on: 4 bytes of global memory" in out
    assert 'gdn-verify repeat --sanitize memcheck "law=pure adapter=kernel.py:Kernel' in out
    assert not (tmp_path / ".gdn-verify" / "examples.txt").exists(), "its line holds without the sanitizer"


PAST_THE_END = """
import torch, triton
import triton.language as tl
from tests.right import Chunkwise
from verify import Domain
@triton.jit
def past_the_end(x, y, n):
    tl.store(y, tl.load(x + n))
class Kernel(Chunkwise):
    domain = Domain(backward=False)
    def run(self, x):
        if x.q.is_cuda and x.q.shape[1] > 32:
            made = torch.zeros(1024, device=x.q.device)
            past_the_end[(1,)](made, torch.empty(1, device=x.q.device), made.numel())
        with x.q.device:
            return super().run(x)
"""


def there() -> bool:
    with contextlib.suppress(NoSanitizer):
        return bool(devices.gpus() and find())
    return False


@pytest.mark.gpu
@pytest.mark.skipif(not there(), reason="there is no GPU, or no compute-sanitizer")
def test_a_real_read_past_the_end_is_seen_by_the_real_program(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernel.py").write_text(PAST_THE_END)
    spec = f"{tmp_path / 'kernel.py'}:Kernel"
    with Sanitizer() as sanitizer, sanitizer.worker(600.0) as worker:
        sanitizer.prove(worker)
        line = f"law=oracle adapter={spec} device=cuda key_dim=16 value_dim=16 dtype=bf16 backward=no lengths="
        before, harmed, after = (asking.ask(Run.parse(f"{line}{length}"), worker, Store(tmp_path)) for length in (32, 33, 32))
    assert (before.verdict, harmed.verdict, after.verdict) == (Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS)
    assert harmed.findings[0].what.startswith("read out of bounds in kernel past_the_end: 4 bytes of global memory")
