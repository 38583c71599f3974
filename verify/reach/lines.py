"""Records which lines of Python run in calls of an implementation, with the package coverage.

Lines of torch, Triton, numpy, einops, the standard library and gdn-verify are not recorded. With Python 3.11, coverage sets a
trace function, which runs at each call and line. We set it only while an implementation is called, and remove it while an
interpreted kernel runs (`untraced` of verify/interpreter/launch.py). With later versions of Python, coverage records a line once,
without a trace function.
"""

import contextlib
import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import coverage
import hypothesis
import numpy
import torch

from verify.process.reach import ON_A_GPU

TRACES = sys.version_info < (3, 12)
CASES = 64  # after so many cases, we drop what coverage has recorded
KEPT = 8  # sets of files for which we keep an object of coverage; making and starting one takes 8 ms
ANOTHER = "another tool traces the Python of this process"
_ROOT = pathlib.Path(os.path.abspath(__file__)).parents[2]
OMITTED = (
    *(str(_ROOT / name / "*") for name in ("oracles", "properties", "verify")),
    *(os.path.join(os.path.dirname(module.__file__ or ""), "*") for module in (coverage, hypothesis, numpy, torch)),
    *(f"*/site-packages/{name}/*" for name in ("triton", "einops")),
)
_lock = threading.Lock()


class _Recorder:
    """Coverage of this process. `thread` is the trace function with which a thread begins, or None if there is none."""

    def __init__(self) -> None:
        self._cases: dict[frozenset[str] | None, tuple[coverage.Coverage, int]] = {}  # for each set of files, its last case too
        self._coverage: coverage.Coverage  # records this case
        self._case = 0
        self.thread: Any = None
        self._traces: dict[int, Any] = {}  # of the threads that were inside in this case
        self._inside = 0

    def begin(self, files: frozenset[str] | None) -> None:
        """Begin a case. Only `files` are recorded; None stands for all files that are not OMITTED."""
        if files not in self._cases and len(self._cases) == KEPT:
            self._cases.clear()
        self._coverage, cases = self._cases.get(files) or (_coverage(files), 0)
        if cases == CASES:
            self._coverage.erase()
            cases = 0
        self._case = cases + 1
        self._cases[files] = self._coverage, self._case
        self._coverage.start()
        self._coverage.switch_context(str(self._case))
        if TRACES:
            self.thread = threading.gettrace()
            self._traces = {threading.get_ident(): sys.gettrace()}
            sys.settrace(None)
            threading.settrace(None)

    def end(self) -> dict[str, set[int]]:
        """End the case, and return the lines of each file that ran in it."""
        self._coverage.stop()
        self._traces, self.thread = {}, None
        data = self._coverage.get_data()
        data.set_query_context(str(self._case))
        ran = {file: data.lines(file) for file in data.measured_files()}
        return {file: {int(line) for line in lines} for file, lines in ran.items() if lines}

    def enter(self) -> None:
        """Record this thread, and the threads that it starts, from now on."""
        with _lock:
            self._inside += 1
            threading.settrace(self.thread)
        sys.settrace(self._traces.get(threading.get_ident(), self.thread))

    def leave(self) -> None:
        """Record this thread no longer."""
        trace = sys.gettrace()
        sys.settrace(None)
        with _lock:
            self._traces[threading.get_ident()] = trace
            self._inside -= 1
            if not self._inside:
                threading.settrace(None)


def _coverage(files: frozenset[str] | None) -> coverage.Coverage:
    include, omit = (["*"], [*OMITTED]) if files is None else (sorted(files), None)
    made = coverage.Coverage(data_file=None, config_file=False, include=include, omit=omit, messages=False)
    made.set_option("run:core", "ctrace" if TRACES else "sysmon")
    made.set_option("run:disable_warnings", ["trace-changed", "no-data-collected", "module-not-measured", "no-ctracer"])
    return made


_recorder: _Recorder | None = None  # of this process
_running = False  # whether a case is recorded


def hindered() -> str:
    """Why lines are not recorded now, or ""."""
    if _traced():
        return ANOTHER
    # A case takes 20 ms on a GPU, and recording one takes 5 ms. Backward passes run in threads that no trace function sees.
    return ON_A_GPU if torch.cuda.is_available() else ""


def _traced() -> bool:
    if sys.gettrace() is not None:
        return True
    return sys.version_info >= (3, 12) and sys.monitoring.get_tool(sys.monitoring.COVERAGE_ID) is not None


def prepare() -> None:
    """Start and stop coverage once. Its first start looks up the files of all imported modules, 0.06 s of CPU time."""
    if not _traced():
        recorder = _Recorder()
        recorder.begin(None)
        recorder.end()


@contextlib.contextmanager
def recorded(files: frozenset[str] | None) -> Iterator[dict[str, set[int]]]:
    """Record what runs inside `called` in `files`, or in all files. Yields a dict that has the lines of each file at the end."""
    global _recorder, _running
    _recorder = _recorder or _Recorder()
    found: dict[str, set[int]] = {}
    _recorder.begin(files)
    _running = True
    try:
        yield found
    finally:
        _running = False
        found |= _recorder.end()


@contextlib.contextmanager
def called() -> Iterator[None]:
    """Record the lines that run inside, in this thread and those that it starts."""
    recorder = _recorder if TRACES and _running and sys.gettrace() is None else None
    if recorder is not None:
        recorder.enter()
    try:
        yield
    finally:
        if recorder is not None:
            recorder.leave()
