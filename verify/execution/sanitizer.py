"""Runs workers under NVIDIA's compute-sanitizer, and turns what it reports during a case into findings of that case.

    compute-sanitizer [options] python -m verify.process.worker ...

The supervisor finds the program and starts workers under it. A worker sends an answer only after it has read what the sanitizer
wrote to its log in the meantime. The options and the log are described in NVIDIA's Compute Sanitizer user manual.
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

import torch

from verify.gpu import device as devices
from verify.process.choices import TOOLS, NoSanitizer
from verify.process.environment import SANITIZER_LOG, UNPOISONED
from verify.process.messages import Answer, Data, Outcomes, Reaction, UnderSanitizer, Watching, read
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import Worker, WorkerLost
from verify.ranks.group import Answering

SANITIZER = "sanitizer"  # stands in a finding in place of an output's name
PROGRAM = "compute-sanitizer"
SERVES = "verify.execution.sanitizer:answer"
LATE_S = 0.05  # reports of a case may reach the log this long after we have waited for the device
QUIET_S, PATIENCE_S = 0.2, 5.0  # a growing log is read once it has not grown for QUIET_S, or after PATIENCE_S
MOST = 4  # different reports of one case that become findings; the sanitizer writes a report for each thread of a kernel
MOST_BYTES = 2**20  # how much of the log of one case is read
OPTIONS = (
    # An error ends the kernel and not its context, so that the worker can continue.
    *("--destroy-on-device-error", "kernel"),
    *("--print-limit", "0"),  # no limit; the default is 100 reports for all cases together
    *("--show-backtrace", "device"),
    *("--target-processes", "all"),  # the Python executable may be a launcher that starts another process
    *("--launch-timeout", "0"),  # no limit; imports take longer than the default of 10 s
    *("--require-cuda-init", "no"),
)
OF_MEMCHECK = (
    *("--report-api-errors", "no"),  # torch makes calls that may fail, and handles their errors
    *("--padding", "4096"),  # bytes after each allocation; without them, an access past its end may hit the next one and pass
)
# Switches torch's caching allocator off: it hands out parts of large blocks, and the sanitizer accepts any access inside a block.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def find() -> str:
    """Find the program on PATH, in CUDA's usual folders, or in its wheel. NoSanitizer if it is in none of them."""
    if found := shutil.which(PROGRAM):
        return found
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += ["/usr/local/cuda", "/opt/cuda", *sorted(glob.glob("/usr/local/cuda-*"), reverse=True)]
    homes += [package for path in sys.path for package in sorted(glob.glob(os.path.join(path, "nvidia", "*")))]
    for home in homes:
        for folder in ("bin", PROGRAM):
            if found := shutil.which(PROGRAM, path=os.path.join(home, folder)):
                return found
    raise NoSanitizer(f"--sanitize needs {PROGRAM}, which is neither on PATH nor in CUDA's folders; it comes with the CUDA toolkit")


class Sanitizer:
    """Makes workers that run under a tool of compute-sanitizer. Their logs are in a folder that is removed with this object."""

    def __init__(self, tool: str = TOOLS[0], program: str | None = None) -> None:
        """Raise ValueError for an unknown tool, and NoSanitizer if the program is not found."""
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
        """A worker that runs under the tool."""
        self._count += 1
        log = pathlib.Path(self._folder.name) / f"{self._count}.log"
        environment = {**devices.environment(device, place), **ENVIRONMENT, SANITIZER_LOG: str(log)}
        if self.tool == "initcheck":
            environment[UNPOISONED] = "1"
        return Worker(deadline_s, environment=environment, serves=SERVES, under=functools.partial(self._words, log))

    def prove(self, worker: Answering) -> None:
        """Raise NoSanitizer if the worker does not run under the tool."""
        try:
            reply = read(Watching, worker.ask(UnderSanitizer()))
            trouble = reply.trouble if isinstance(reply, Watching) else reply.error
        except WorkerLost as lost:
            trouble = f"the worker {lost.how}: {lost.detail}; {' '.join(lost.tail.split())[-300:]}"
        if trouble:
            raise NoSanitizer(f"{PROGRAM} --tool {self.tool} does not work here: {trouble}")

    def _words(self, log: pathlib.Path) -> list[str]:
        """The words before a worker's command. Each process begins a new log."""
        log.unlink(missing_ok=True)
        special = OF_MEMCHECK if self.tool == "memcheck" else ()
        return [self.program, "--tool", self.tool, "--log-file", str(log), *OPTIONS, *special, "--"]


@dataclasses.dataclass(frozen=True)
class Report:
    """One error that the sanitizer reports: what a kernel did, the size of the access, and further details."""

    what: str
    kernel: str
    size: str = ""
    more: str = ""

    def __str__(self) -> str:
        where = f" in kernel {self.kernel}" if self.kernel else ""
        return f"{self.what}{where}"


def reports(text: str) -> tuple[list[Report], str]:
    """The errors in a log or in a part of it, and what went wrong with the sanitizer itself ("" if nothing did).

    An error is a line with indented lines below it. Warnings, and the summaries at the end, are not errors.
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


# Some versions do not indent the lines that belong to an error.
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
    """The reports as findings. Equal reports become one finding, and there are at most MOST."""
    alike: dict[str, list[Report]] = {}
    for report in several:
        alike.setdefault(str(report), []).append(report)
    result = []
    for text, same in list(alike.items())[:MOST]:
        others = f" ({len(same)} times)" if len(same) > 1 else ""
        what = f"{text}: {same[0].size}{others}" if same[0].size else f"{text}{others}"
        result.append(Finding(SANITIZER, FailureKind.SANITIZER, what, same[0].more, detail=same[0].what))
    return result


class SanitizerLog:
    """Reads the log of this process's sanitizer, each time from where it stopped before."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.end = 0

    def size(self) -> int:
        """The bytes in the log."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_size
        return 0

    def more(self) -> tuple[list[Report], str]:
        """Wait until the log stops growing, and return the new reports and what went wrong with the sanitizer itself, or "".

        A report that comes even later is counted for the next case, which does not show it again when it is repeated.
        """
        time.sleep(LATE_S)
        size, quiet, late = self.size(), time.monotonic(), time.monotonic() + PATIENCE_S
        while size > self.end and time.monotonic() - quiet < QUIET_S and time.monotonic() < late:
            time.sleep(LATE_S)
            if (now := self.size()) != size:
                size, quiet = now, time.monotonic()
        if size == 0:  # a sanitizer that works writes its name when it starts
            return [], "it has written nothing to its log"
        with open(self.path, "rb") as file:
            file.seek(self.end)
            text = file.read(min(size - self.end, MOST_BYTES)).decode(errors="replace")
        self.end = size
        return reports(text)


@functools.cache
def _watch() -> SanitizerLog:
    return SanitizerLog(os.environ[SANITIZER_LOG])


def answer(question: Data) -> Data:
    """A worker's answer (verify/execution/service.py), with the sanitizer's reports as findings of the run."""
    return _watched_answer(question).to_json()


def _watched_answer(question: Data) -> Answer | Outcome:
    """If anything is reported during a question with several runs, none of them gets an outcome, so that each is repeated alone."""
    from verify.execution import service  # imported in the worker alone

    watch = _watch()
    if question.get("question") == UnderSanitizer.__name__:
        return Watching(watch.more()[1])
    reply = service.typed_answer(question)
    with contextlib.suppress(RuntimeError):  # the GPU's context is gone, which the reply says
        devices.settle("cuda" if torch.cuda.is_initialized() else "cpu")
    found, trouble = watch.more()
    match reply:
        case Reaction() if found or trouble:
            words = f"the sanitizer reports {found[0]}" if found else f"the sanitizer failed: {trouble}"
            return dataclasses.replace(reply, did=f"{reply.did}, and {words}")
        case Outcome() if trouble:
            return Outcome(Verdict.UNKNOWN, reason=f"the sanitizer failed: {trouble}", spent=True)
        case Outcome() if found:
            return dataclasses.replace(reply, verdict=Verdict.BROKEN, findings=[*findings(found), *reply.findings])
        case Outcomes() if trouble or found:
            return dataclasses.replace(reply, outcomes=[], spent=reply.spent and not trouble)
    return reply
