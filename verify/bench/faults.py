"""Faults: what an exception of an implementation says about it, and what says nothing about it."""

import os
import re
import sys
import traceback
import types

import torch

from verify.adapters.interface import Lacking, Unavailable, Unsupported
from verify.adapters.serving import uses_stubs
from verify.gpu import device as devices
from verify.interpreter import Race, TooManyPrograms, UnknownTriton
from verify.process.outcome import FailureKind, Finding
from verify.process.stacks import in_kernel, short_path, unmarked


class AdapterFault(Exception):
    """The implementation raised, or broke the contract of its outputs. `finding` says what happened."""

    def __init__(
        self, output: str, kind: FailureKind, what: str, worst: str = "", *, detail: str = "", port: str = "", source: str = ""
    ) -> None:
        super().__init__(what)
        self.finding = Finding(output, kind, what, worst, detail=detail, port=port, source=source)


class OutOfMemory(Exception):
    """The implementation ran out of memory."""


class NoRoom(Exception):
    """Memory ran out on a GPU of which other processes hold more than half."""


def no_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out: an error of torch, of the operating system or of a launch."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "[CUDA]: out of memory", "CUDA error: out of memory")
    )


def blamed(error: Exception, device: str, output: str = "call") -> tuple[Exception, str]:
    """The exception to raise for an exception of the implementation, and why the device is lost, or "".

    The exception is AdapterFault about `output`, OutOfMemory, UnknownTriton, Unavailable or Unsupported.
    """
    if no_memory(error):
        return OutOfMemory(str(error)), ""
    if isinstance(error, Race):
        return AdapterFault(output, FailureKind.RACE, f"race: {error}", error.place, source=_short(error.source)), ""
    if isinstance(error, TooManyPrograms):
        return Unavailable(str(error)), ""
    if isinstance(error, UnknownTriton | Unavailable | Unsupported):
        return error, ""
    if isinstance(error, ModuleNotFoundError) and uses_stubs():  # the library imports a requirement in the middle of a call
        return Unavailable(f"{short(error)} ({frame(error)})"), ""
    if _lacks_an_interface(error):
        kind = Lacking if _lacks_a_name(error) else Unavailable  # another failure may be a fault of the adapter
        return kind(f"this release cannot be asked: {short(error)} ({frame(error)})"), ""
    lost = devices.lost(device) or ""
    if lost:
        return AdapterFault(output, FailureKind.CRASHED, f"crashed: {lost}", frame(error), source=source(error)), lost
    name = type(error).__name__
    what = f"raised {name}: {short(error)}"
    return AdapterFault(output, FailureKind.RAISED, what, frame(error), detail=name, source=source(error)), lost


def _lacks_a_name(error: Exception) -> bool:
    """Whether a package that is there lacks a module, or a module a name."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, types.ModuleType)
    package, dot, _ = (getattr(error, "name", "") or "").partition(".")
    return isinstance(error, ImportError) and bool(dot) and package in sys.modules


CAUSE = re.compile(r"^[\w.]*(Error|Exception)\b|\b(fatal )?error: ")  # a line that says the cause
_ADAPTERS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "adapters", "")


def _lacks_an_interface(error: Exception) -> bool:
    """Whether a built-in adapter cannot import the implementation, or looked for a name or parameter that the release lacks.

    A missing name or parameter is an error in the adapter's own code. An import may fail inside the implementation, for example
    for lack of a package that this release requires.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    adapters = [place for place, frame in enumerate(frames) if os.path.abspath(frame.filename).startswith(_ADAPTERS)]
    if not adapters:
        return False
    line = frames[adapters[-1]].line or ""
    if line.startswith(("from ", "import ")) or (isinstance(error, ImportError) and "import_module(" in line):
        return True
    words = ("unexpected keyword argument", "'NoneType' object is not callable")
    parameter = isinstance(error, TypeError) and any(word in str(error) for word in words)
    return adapters[-1] == len(frames) - 1 and (isinstance(error, ImportError | AttributeError) or parameter)


def short(error: BaseException) -> str:
    """The first line of an error's message, at most 160 characters, and the line that says the cause if another one does.

    That is the last line which begins with the name of an exception or has the word "error:", as compilers write it. Where there
    is none and the first line ends with a colon, it is the second one.
    """
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    causes = [line for line in others if CAUSE.search(line)] or others[: first.endswith(":")]
    if CAUSE.search(first) or not causes:
        return first[:160]
    return f"{first[: max(40, 155 - len(causes[-1]))]} ... {causes[-1]}"[:160]


def frame(error: BaseException) -> str:
    """Where an error was raised, in words: the file without its folders, so that the words are the same on every machine."""
    at = _innermost(error)
    return f"{at.filename.rpartition('/')[2]}:{at.lineno} in {unmarked(at.name)}" if at else ""


def source(error: BaseException) -> str:
    """The file and line where an error was raised, with the folders below the package or the working directory."""
    at = _innermost(error)
    return _short(f"{at.filename}:{at.lineno}") if at else ""


def _short(place: str) -> str:
    file, _, line = place.rpartition(":")
    return f"{short_path(file)}:{line}"


def _innermost(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of an error, or that of the kernel's line if it was interpreted."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:  # Triton's, around that of the kernel
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    return frames[in_kernel([frame.filename for frame in frames])] if frames else None
