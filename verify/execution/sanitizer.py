"""NVIDIA's compute-sanitizer around a worker: what it reports during a case is a finding of that case.

    compute-sanitizer [options] python -m verify.process.worker ...

The supervisor's side finds the program and starts workers under it. In the worker every answer is held until what the sanitizer
wrote to its log meanwhile is read. The options and the log are described in NVIDIA's Compute Sanitizer user manual.
"""

import contextlib
import dataclasses
import functools
import glob
import itertools
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from verify.execution.bench import UNPOISONED
from verify.gpu import device as devices
from verify.process.messages import QUESTIONS, Refuse, RunMany, RunOne, Watched
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Asked, Worker, WorkerLost

SANITIZER = "sanitizer"  # where other findings name an output
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRAM = "compute-sanitizer"
LOG = "GDN_VERIFY_SANITIZER_LOG"  # in a worker's environment: the file that its sanitizer writes
SERVES = "verify.execution.sanitizer:answer"
LATE_S = 0.05  # what a case did is in the log so long after its device was waited for
QUIET_S, PATIENCE_S = 0.2, 5.0  # a log that grows is read when it has not for so long, or after so long
MOST = 4  # reports of one case that are told; a kernel has one for each of its threads
MOST_BYTES = 2**20  # of the log of one case
OPTIONS = (
    # The kernel ends and its context stays, so that the worker goes on.
    *("--destroy-on-device-error", "kernel"),
    *("--print-limit", "0"),  # 100 reports otherwise, of all cases
    *("--show-backtrace", "device"),
    *("--target-processes", "all"),  # the interpreter may be a launcher
    *("--launch-timeout", "0"),  # importing takes longer than the 10 s that it waits
    *("--require-cuda-init", "no"),
)
OF_MEMCHECK = (
    *("--report-api-errors", "no"),  # torch asks for what may fail, and looks at the answer
    *("--padding", "4096"),  # bytes after each allocation, or the next one hides what goes over its end
)
# torch's allocator hands out parts of large blocks, inside which every access is legal.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


class NoSanitizer(Exception):
    """There is no compute-sanitizer on this host, or it does not work here; the message is one line."""


def find() -> str:
    """The program: on PATH, in CUDA's usual folders, or from its wheel. NoSanitizer if it is in none."""
    if found := shutil.which(PROGRAM):
        return found
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += ["/usr/local/cuda", "/opt/cuda", *sorted(glob.glob("/usr/local/cuda-*"), reverse=True)]
    homes += [each for path in sys.path for each in sorted(glob.glob(os.path.join(path, "nvidia", "*")))]
    for home in homes:
        for folder in ("bin", PROGRAM):
            if found := shutil.which(PROGRAM, path=os.path.join(home, folder)):
                return found
    raise NoSanitizer(f"--sanitize needs {PROGRAM}, which is neither on PATH nor in CUDA's folders; it comes with the CUDA toolkit")


class Sanitizer:
    """Workers under a tool of compute-sanitizer, each with a log of its own in a folder that goes with this object."""

    def __init__(self, tool: str = TOOLS[0], program: str | None = None) -> None:
        """ValueError for an unknown tool, NoSanitizer where there is no program."""
        if tool not in TOOLS:
            raise ValueError(f"tool must be one of {', '.join(TOOLS)}, got {tool!r}")
        self.tool, self.program = tool, program or find()
        self._folder = tempfile.TemporaryDirectory(prefix="gdn-verify-")
        self._count = 0

    def __enter__(self) -> "Sanitizer":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def worker(self, deadline_s: float, device: str = "cuda", place: int = 0) -> Worker:
        """A worker whose cases the tool watches."""
        self._count += 1
        log = pathlib.Path(self._folder.name) / f"{self._count}.log"
        environment = {**devices.environment(device, place), **ENVIRONMENT, LOG: str(log)}
        if self.tool == "initcheck":
            environment[UNPOISONED] = "1"
        return Worker(deadline_s, environment=environment, serves=SERVES, under=functools.partial(self._words, log))

    def prove(self, worker: Asked) -> None:
        """NoSanitizer if the worker does not run under the tool."""
        try:
            trouble = worker.ask(Watched())["trouble"]
        except WorkerLost as lost:
            trouble = f"the worker {lost.how}: {lost.detail}; {' '.join(lost.tail.split())[-300:]}"
        if trouble:
            raise NoSanitizer(f"{PROGRAM} --tool {self.tool} does not work here: {trouble}")

    def _words(self, log: pathlib.Path) -> list[str]:
        """What stands before a worker's command; its log begins anew with each process."""
        log.unlink(missing_ok=True)
        special = OF_MEMCHECK if self.tool == "memcheck" else ()
        return [self.program, "--tool", self.tool, "--log-file", str(log), *OPTIONS, *special, "--"]


@dataclasses.dataclass(frozen=True)
class Report:
    """One error: what a kernel did, of how many bytes, and the rest that was said of it."""

    what: str
    kernel: str
    size: str = ""
    more: str = ""

    def __str__(self) -> str:
        where = f" in kernel {self.kernel}" if self.kernel else ""
        return f"{self.what}{where}"


def reports(text: str) -> tuple[list[Report], str]:
    """The errors in a log, or a piece of one, and what went wrong with the sanitizer itself, "" if nothing did.

    An error is a line, and lines under it that are indented. Warnings are none, and neither are the sums at the end.
    """
    found, trouble = [], ""
    lines = [match.group(1) for match in re.finditer(r"^=+ ?(.*)$", text, re.MULTILINE)]
    starts = [place for place, line in enumerate(lines) if line.strip() and not line.startswith(" ") and not _CONTINUED.match(line)]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        title, under = lines[start].strip(), [line.strip() for line in lines[start + 1 : end] if line.strip()]
        if _OWN.match(title):
            trouble = trouble or title
        elif not _NO_ERROR.match(title):
            found.append(_report(title, under))
    return found, trouble


# Some versions do not indent what belongs to an error.
_CONTINUED = re.compile(r"(at |by thread |Address |Access to |and |Device Frame|Host Frame|Saved host backtrace|in )")
_OWN = re.compile(r"(Internal Sanitizer Error|Error: (?!Race reported|Potential|process didn't|Target application))", re.IGNORECASE)
_NO_ERROR = re.compile(
    r"(COMPUTE-SANITIZER|CUDA-MEMCHECK|Warning|Info|(ERROR|RACECHECK|LEAK|INITCHECK|SYNCCHECK) SUMMARY|Target application"
    r"|Error: (process didn't|Target application)|Program hit|No attachable process found)",
    re.IGNORECASE,
)
_ACCESS = re.compile(r"(?P<how>Invalid|Uninitialized) __(?P<space>\w+)__ (?:memory )?(?P<what>\w+)(?: of size (?P<bytes>\d+))?")
_PLACE = re.compile(r"at (?P<kernel>.+?)(?:\+|:)(?P<offset>0x[0-9a-f]+)(?: in (?P<file>.+))?$")
_OLD_PLACE = re.compile(r"at (?P<offset>0x[0-9a-f]+) in (?P<kernel>.+)$")
_FRAME = re.compile(r"Device Frame:\s*(?P<kernel>.+?)(?:\+0x| \(|$)")
_RACE = re.compile(r"Error: Race reported between (?P<access>\w+) access (?P<place>at .+)$")


def _report(title: str, under: Sequence[str]) -> Report:
    details = [line for line in under if not line.startswith(("Saved host", "Host Frame", "Device Frame"))]
    outer = [match["kernel"] for line in under if (match := _FRAME.match(line))]
    if race := _RACE.match(title):
        where = _PLACE.match(race["place"]) or _OLD_PLACE.match(race["place"])
        more = "; ".join([title.partition("between ")[2], *details])
        return Report("race", outer[-1] if outer else where["kernel"] if where else "", more=more)
    where = next((match for line in details if (match := _PLACE.match(line) or _OLD_PLACE.match(line))), None)
    kernel = outer[-1] if outer else where["kernel"] if where else ""
    kernel = kernel.removesuffix("()")
    if access := _ACCESS.match(title):
        how = "misaligned" if any("misaligned" in line for line in details) else "out of bounds"
        how = "of uninitialised memory" if access["how"] == "Uninitialized" else how
        size = f"{access['bytes']} bytes of {access['space']} memory" if access["bytes"] else f"{access['space']} memory"
        return Report(f"{access['what']} {how}", kernel, size, "; ".join(details))
    return Report(title.rstrip("."), kernel, more="; ".join(details))


def findings(several: Sequence[Report]) -> list[Finding]:
    """The reports as findings, those that are alike as one."""
    alike: dict[str, list[Report]] = {}
    for report in several:
        alike.setdefault(str(report), []).append(report)
    made = []
    for text, same in list(alike.items())[:MOST]:
        others = f" ({len(same)} times)" if len(same) > 1 else ""
        what = f"{text}: {same[0].size}{others}" if same[0].size else f"{text}{others}"
        made.append(Finding(SANITIZER, FailureKind.SANITIZER, what, same[0].more, detail=text))
    return made


class Watch:
    """The log of this process's sanitizer, read from where it was last read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.end = 0

    def size(self) -> int:
        """Bytes in the log."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_size
        return 0

    def more(self) -> tuple[list[Report], str]:
        """What has been reported since, once no more comes, and the sanitizer's own trouble.

        What comes later still is told as of the next case, which then does not show it again.
        """
        time.sleep(LATE_S)
        size, quiet, late = self.size(), time.monotonic(), time.monotonic() + PATIENCE_S
        while size > self.end and time.monotonic() - quiet < QUIET_S and time.monotonic() < late:
            time.sleep(LATE_S)
            if (now := self.size()) != size:
                size, quiet = now, time.monotonic()
        if size == 0:  # it says who it is when it starts
            return [], "it has written nothing to its log"
        with open(self.path, "rb") as file:
            file.seek(self.end)
            text = file.read(min(size - self.end, MOST_BYTES)).decode(errors="replace")
        self.end = size
        return reports(text)


@functools.cache
def _watch() -> Watch:
    return Watch(os.environ[LOG])


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """A worker's answer (verify/execution/service.py), with what its sanitizer reported meanwhile as findings of the run.

    Of several runs that were put as one question none has an outcome if anything was reported: each is asked alone.
    """
    from verify.execution import service  # in the worker alone

    watch = _watch()
    asked = QUESTIONS.get(question.get("question", ""))
    if asked is Watched:
        return {"trouble": watch.more()[1]}
    reply = service.answer(question)
    with contextlib.suppress(RuntimeError):  # its context is gone, which the reply says
        devices.settle("cuda" if torch.cuda.is_initialized() else "cpu")
    found, trouble = watch.more()
    if asked not in (RunOne, RunMany, Refuse):
        return reply
    if asked is Refuse:
        return {**reply, "did": f"{reply['did']}, and the sanitizer reports {found[0]}"} if found and "did" in reply else reply
    if trouble:
        undecided = Outcome(Verdict.UNKNOWN, reason=f"the sanitizer failed: {trouble}").to_json()
        return {**undecided, "spent": True} if asked is RunOne else {"outcomes": []}
    if not found:
        return reply
    if asked is RunMany:
        return {**reply, "outcomes": []}
    if "error" in reply:
        return reply
    said = [finding.to_json() for finding in findings(found)]
    return {**reply, "verdict": str(Verdict.BROKEN), "findings": [*said, *reply["findings"]]}
