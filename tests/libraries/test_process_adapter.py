"""Programs behind pipes: whatever a program does, the call ends with one clear error, and the next call has a new program."""

import os
import pathlib
import re
import sys
import time
from typing import Any

import pytest
import torch

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from tests.processes import alive, gone
from verify.adapters.interface import Unsupported
from verify.adapters.loader import make
from verify.adapters.process_adapter import ProcessAdapter, ProcessError
from verify.adapters.registry import AdapterError
from verify.engine.asking import ask, describe
from verify.execution.line import Run
from verify.execution.refusals import _refusal
from verify.findings.report import finding_lines
from verify.findings.store import Store
from verify.process import child
from verify.process.child import ProcessDied, WrongAnswer
from verify.process.outcome import FailureKind, Verdict
from verify.process.worker import Worker

# The L2 norm. In its first run, the program does what a mode says in place of its first answer; later runs are right.
PROGRAM = r"""
import math, os, signal, struct, subprocess, sys, time

mode, folder = sys.argv[1:]
questions, answers = sys.stdin.buffer, sys.stdout.buffer
with open(f"{folder}/pids", "a+") as file:
    file.write(f"{os.getpid()}\n")
    file.seek(0)
    first = len(file.read().split()) == 1

def write(data):
    answers.write(data)
    answers.flush()

def stray(**how):
    return subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"], **how).pid

if first and mode == "exits at once":
    sys.exit("no license")
if first and mode == "is slow to start":
    time.sleep(2)
for line in iter(questions.readline, b""):
    if line.startswith(b"hello"):
        if first and mode == "never says hello":
            time.sleep(600)
        write(b"ok 0\n")
        continue
    tensor, _, options = line.decode().split(";")
    if first and mode == "refuses before it reads":
        write(b"refuse no such width\n")
        time.sleep(600)
    _, _, name, _, rank, *shape = ["", *tensor.split()]
    count = math.prod(map(int, shape))
    if first and mode == "closes its stdin":
        os.close(0)
        time.sleep(600)
    values = struct.unpack(f"{count}f", questions.read(4 * count))
    width, eps = int(shape[-1]), float(dict(word.split("=") for word in options.split())["eps"])
    body = b""
    for at in range(0, count, width):
        row = values[at : at + width]
        root = math.sqrt(sum(x * x for x in row) + eps)
        body += struct.pack(f"{width}f", *(x / root for x in row))
    if not first:
        mode = "is right"
    match mode:
        case "dies":
            sys.stderr.write("kernel: no memory for the state\n")
            os._exit(3)
        case "is killed":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "prints":
            write(b"state = 1.0\n")
        case "prints without an end":
            write(b"state = 1.0")
            time.sleep(600)
        case "begins and stops":
            write(b"ok 1")
            time.sleep(600)
        case "writes an endless line":
            write(b"ok " + b"9" * 200_000)
        case "answers in half precision":
            write(b"ok %d\n" % (len(body) // 2) + body[: len(body) // 2])
        case "answers too much":
            write(b"ok 99999999999\n" + body)
        case "writes less than it says":
            write(b"ok %d\n" % len(body) + body[:-4])
            time.sleep(600)
        case "writes more than it says":
            write(b"ok %d\n" % len(body) + body + b"more")
            time.sleep(600)
        case "writes after an error":
            write(b"error no width 3\n" + body)
        case "closes its stdout":
            os.close(1)
            time.sleep(600)
        case "leaves a process with its pipes":
            open(f"{folder}/stray", "w").write(str(stray()))
            os._exit(0)
        case "errs":
            write(b"error no width 3\n")
        case "refuses":
            write(b"refuse no width 3\n")
        case "never answers":
            open(f"{folder}/stray", "w").write(str(stray(stdin=-3, stdout=-3, stderr=-3)))
            time.sleep(600)
        case "floods stderr":
            while True:
                os.write(2, b"again and again\n" * 1000)
        case "floods stderr and answers":
            for _ in range(1000):
                os.write(2, b"again and again\n" * 1000)
            write(b"ok %d\n" % len(body) + body)
        case "prints to stderr when it is not asked":
            write(b"ok %d\n" % len(body) + body)
            os.write(2, b"x" * 1_000_000)
        case _:
            write(b"ok %d\n" % len(body) + body)
"""
DOMAIN = ModuleDomain("l2norm", dtypes=("fp32",), eps=("1e-6",), backward=False)
X = Inputs(x=torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), eps=1e-6)
RIGHT = [pytest.approx(0.6), pytest.approx(0.8)]


def adapter_of(mode: str, folder: pathlib.Path, **declared: Any) -> ProcessAdapter:
    (folder / "program.py").write_text(PROGRAM)
    words = {"command": [sys.executable, "-SsE", "program.py", mode, str(folder)], "folder": str(folder), "domain": DOMAIN}
    adapter = type("Norm", (ProcessAdapter,), {**words, **declared})()
    assert isinstance(adapter, ProcessAdapter)
    return adapter


def pids(folder: pathlib.Path) -> list[int]:
    return [int(word) for name in ("pids", "stray") if (folder / name).exists() for word in (folder / name).read_text().split()]


NO_ANSWER = "where the line of an answer belongs: ok, error or refuse"
FAILURES = {
    "exits at once": (ProcessDied, "exited with code 1"),
    "never says hello": (WrongAnswer, "did not answer 'hello 1' within 0.3 s"),
    "closes its stdin": (WrongAnswer, "closed its stdin before it had answered"),
    "dies": (ProcessDied, "exited with code 3"),
    "is killed": (ProcessDied, "was killed by SIGSEGV"),
    "prints": (WrongAnswer, rf"wrote b'state = 1.0' {NO_ANSWER}"),
    "prints without an end": (WrongAnswer, rf"wrote b'state = 1.0' {NO_ANSWER}"),
    "begins and stops": (WrongAnswer, "wrote b'ok 1', and then nothing for 0.3 s"),
    "writes an endless line": (WrongAnswer, rf"wrote b'ok 9*' {NO_ANSWER}"),
    "answers in half precision": (WrongAnswer, r"answered 'ok 4', where the answer has 8 bytes: y fp32 4 1 1 1 2"),
    "answers too much": (WrongAnswer, "answered 'ok 99999999999', where the answer has 8 bytes"),
    "writes less than it says": (WrongAnswer, "wrote 4 of the 8 bytes of its answer, and then nothing for 0.3 s"),
    "writes more than it says": (WrongAnswer, "wrote b'more' beyond its answer"),
    "writes after an error": (WrongAnswer, "beyond its answer"),
    "closes its stdout": (WrongAnswer, "closed its stdout before it had answered"),
    "leaves a process with its pipes": (ProcessDied, "exited with code 0"),
}


@pytest.mark.parametrize("mode", FAILURES)
def test_a_failure_is_one_error_and_the_next_call_has_a_new_program(
    mode: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "STALL_S", 0.3)
    monkeypatch.setattr(child, "GRACE_S", 0.3)
    adapter = adapter_of(mode, tmp_path, start_s=0.3 if mode == "never says hello" else 20.0)
    kind, text = FAILURES[mode]
    with pytest.raises(kind, match=text) as raised:
        adapter.run(X)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250
    assert gone(pids(tmp_path), 0.0), "no process of the first program is left"
    type(adapter).start_s = 20.0
    assert adapter.run(X)[0].flatten().tolist() == RIGHT
    assert adapter.run(X)[0].flatten().tolist() == RIGHT
    assert len((tmp_path / "pids").read_text().split()) == 2, "a program that answers is asked again"
    adapter.close()
    assert gone(pids(tmp_path), 0.0)
    if mode == "dies":
        assert capfd.readouterr().err == "kernel: no memory for the state\n"


REFUSALS = {"errs": ProcessError, "refuses": Unsupported, "refuses before it reads": Unsupported}


@pytest.mark.parametrize(("mode", "kind"), REFUSALS.items())
def test_a_program_that_answers_in_words_goes_on(mode: str, kind: type[Exception], tmp_path: pathlib.Path) -> None:
    adapter = adapter_of(mode, tmp_path)
    x = X.replaced(x=torch.ones(1, 200_000, 1, 1)) if "before" in mode else X  # more than a pipe holds
    with pytest.raises(kind, match="no such width" if "before" in mode else "no width 3"):
        adapter.run(x)
    runs = len(pids(tmp_path))
    if "before" in mode:  # it has not read the question to its end, so it cannot be asked another
        assert gone(pids(tmp_path), 0.0)
    else:
        assert all(map(alive, pids(tmp_path)))
    adapter.close()
    assert runs == 1


@pytest.mark.parametrize("mode", ["floods stderr and answers", "prints to stderr when it is not asked"])
def test_stderr_may_be_of_any_length_and_only_its_first_bytes_are_passed_on(
    mode: str, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = adapter_of(mode, tmp_path)
    assert adapter.run(X)[0].flatten().tolist() == RIGHT
    assert len(capfd.readouterr().err) <= child.STDERR_BYTES + child.READ_BYTES
    assert adapter.run(X) is not None
    adapter.close()


def test_what_a_program_does_with_illegal_input_is_said_in_words() -> None:
    assert _refusal(ProcessDied("./kernel exited with code 3")) == "crashed"
    assert _refusal(Unsupported("no such width")) == "refuses"
    assert _refusal(ProcessError("no such width")) == "refuses (ProcessError)"


def test_many_bytes_each_way_arrive(tmp_path: pathlib.Path) -> None:
    adapter = adapter_of("is right", tmp_path)
    x = torch.randn(3, 1500, 2, 4)
    (y,) = adapter.run(X.replaced(x=x))
    adapter.close()
    assert torch.allclose(y, x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())


FILE = """
import pathlib, sys
from properties.modules.domain import ModuleDomain
from verify import ProcessAdapter

HERE = pathlib.Path(__file__).parent

class Norm(ProcessAdapter):
    command = [sys.executable, "-SsE", "program.py", (HERE / "mode").read_text(), str(HERE)]
    domain = ModuleDomain("l2norm", dtypes=("fp32",), eps=("1e-6",), backward=False)
"""


def line_in(folder: pathlib.Path, mode: str) -> Run:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "mode").write_text(mode)
    (folder / "norm.py").write_text(FILE)
    return Run.parse(f"law=oracle adapter={folder / 'norm.py'}:Norm lengths=2 op=l2norm width=3 backward=no")


@pytest.mark.parametrize("mode", ["never answers", "floods stderr"])
def test_a_hang_is_a_finding_and_leaves_no_process(mode: str, tmp_path: pathlib.Path) -> None:
    run = line_in(tmp_path, mode)
    with Worker(deadline_s=1.0) as worker:
        describe(run.adapter, worker)
        (finding,) = ask(run, worker, Store(tmp_path)).findings
        assert finding.kind is FailureKind.HUNG
        place = r"_await_program \(child" if mode == "never answers" else r"\w+ \(\w+"  # the second is busy all the time
        assert re.fullmatch(rf"hung: no answer within 1 s, in {place}.py:\d+\)", finding.what)
        assert gone(pids(tmp_path), 1.0)
        if mode == "floods stderr":
            assert finding.wrote[-1] == "again and again"
        assert ask(run, worker, Store(tmp_path)).verdict is Verdict.HOLDS
    assert gone(pids(tmp_path), 1.0)


def test_the_last_lines_and_the_exit_code_are_in_the_finding(tmp_path: pathlib.Path) -> None:
    run = line_in(tmp_path, "dies")
    with Worker() as worker:
        (finding,) = ask(run, worker, Store(tmp_path)).findings
        assert (finding.kind, finding.detail) == (FailureKind.RAISED, "ProcessDied")
        assert finding_lines([finding])[0].startswith(f"  call: raised ProcessDied: {sys.executable} exited with code 3")
        assert finding.wrote == ("kernel: no memory for the state",)


def test_a_refusal_is_no_verdict(tmp_path: pathlib.Path) -> None:
    run = line_in(tmp_path, "refuses")
    with Worker() as worker:
        outcome = ask(run, worker, Store(tmp_path))
        assert (outcome.verdict, outcome.reason) == (Verdict.UNSUPPORTED, "the implementation refuses it: no width 3")
        assert all(map(alive, pids(tmp_path)))
        worker.kill()
        assert gone(pids(tmp_path), 1.0), "a worker that is killed takes its program with it"


def test_the_start_of_a_program_is_outside_the_deadline_of_a_case(tmp_path: pathlib.Path) -> None:
    run = line_in(tmp_path, "is slow to start")
    with Worker(deadline_s=1.0) as worker:
        begin = time.monotonic()
        assert ask(run, worker, Store(tmp_path)).verdict is Verdict.HOLDS
        assert time.monotonic() - begin > 2.0


DECLARATIONS = {
    "command must be a list of words, the program and its arguments, got './kernel'": {"command": "./kernel"},
    "command must be a list of words, the program and its arguments, got ()": {"command": ()},
    "there is no program ./kernel in /: compile it first": {"command": ["./kernel"], "folder": "/"},
    "there is no program kernel-of-nobody on the PATH": {"command": ["kernel-of-nobody"]},
    "Norm has layouts = {'x': 'K H'}; did you mean layout?, or _layouts if it is a helper": {"layouts": {"x": "K H"}},
}


@pytest.mark.parametrize("text", DECLARATIONS)
def test_a_wrong_declaration_is_refused_when_the_adapter_is_loaded(text: str) -> None:
    declared = {"command": ["true"], "domain": DOMAIN, **DECLARATIONS[text]}
    with pytest.raises(AdapterError) as raised:
        make(type("Norm", (ProcessAdapter,), declared), "norm.py:Norm")
    assert str(raised.value) == f"adapter norm.py:Norm: {text}"


def test_a_file_that_may_not_be_run_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernel").write_text("")
    declared = {"command": ["./kernel"], "folder": str(tmp_path), "domain": DOMAIN}
    with pytest.raises(AdapterError, match=rf"must be executable: chmod \+x {tmp_path / 'kernel'}"):
        make(type("Norm", (ProcessAdapter,), declared), "norm.py:Norm")


def test_a_program_runs_in_the_folder_of_the_file_that_names_it() -> None:
    kind = type("Norm", (ProcessAdapter,), {"command": ["true"]})
    assert kind.folder == os.path.dirname(os.path.abspath(__file__))
    assert type("Other", (kind,), {}).folder == kind.folder
