"""Reads the stacks that faulthandler wrote: where a process was, and whose code was running.

A mark in the name of a function tells whose code the function is. Faulthandler writes the names of functions, so the mark arrives
with the stack, whichever process, host or folder the stack came from.
"""

import dataclasses
import enum
import os
import pathlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Mark(enum.StrEnum):
    """Whose code a marked frame is.

    IMPLEMENTATION: the frame calls the implementation. COLLECTIVE: one of our own collectives. ORACLE: the frame waits for the
    oracle or computes it.
    """

    IMPLEMENTATION = "implementation"
    COLLECTIVE = "collective"
    ORACLE = "oracle"


def marked(mark: Mark) -> Callable[[F], F]:
    """Decorator that adds `mark` to a function's name in every stack. Put it below other decorators: it needs a plain function."""

    def add(function: F) -> F:
        code: types.CodeType = function.__code__
        function.__code__ = code.replace(co_name=f"{code.co_name} <{mark}>")
        return function

    return add


def mark_module(namespace: Mapping[str, Any], mark: Mark) -> None:
    """Mark all functions and methods of a module. Call it at the end of the module, with its globals()."""
    definitions = [value for value in namespace.values() if getattr(value, "__module__", None) == namespace["__name__"]]
    classes = [value for value in definitions if isinstance(value, type)]
    members = [getattr(member, "__func__", member) for kind in classes for member in vars(kind).values()]
    for function in (*definitions, *members):
        if isinstance(function, types.FunctionType) and function.__code__.co_filename == namespace["__file__"]:
            marked(mark)(function)


@dataclasses.dataclass(frozen=True)
class Frame:
    """One line of a stack. `mark` is the mark of its function, or None."""

    file: str
    line: int
    function: str
    mark: Mark | None = None

    def __str__(self) -> str:
        return f"{self.function} ({os.path.basename(self.file)}:{self.line})"


_MARKED = re.compile(rf"(.*) <({'|'.join(Mark)})>")


def unmarked(name: str) -> str:
    """The name of a function without its mark, for people."""
    found = _MARKED.fullmatch(name)
    return found[1] if found else name


def _frame(file: str, line: str, function: str) -> Frame:
    found = _MARKED.fullmatch(function)
    return Frame(file, int(line), found[1], Mark(found[2])) if found else Frame(file, int(line), function)


def frames(wrote: str) -> list[Frame]:
    """The stack of the thread that works, innermost frame first; empty if faulthandler wrote no stack.

    It is the stack that faulthandler wrote last, that of the current or the main thread. If that thread waits for a backward pass
    that runs on one of autograd's own threads, it is the stack of that thread.
    """
    threads = []
    for title, lines in re.findall(r"^(Current thread|Thread) 0x.*\n((?:  File .*\n?)+)", wrote, re.MULTILINE):
        stack = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', lines, re.MULTILINE)
        threads.append((title, [_frame(*words) for words in stack]))
    threads = [(title, stack) for title, stack in threads if stack]
    current = [stack for title, stack in threads if title == "Current thread"]
    at_work = (current or [stack for _, stack in threads] or [[]])[-1]
    if at_work and at_work[0].file.endswith("torch/autograd/graph.py"):
        autograd_stacks = [stack for title, stack in threads if title == "Thread" and not stack[-1].file.endswith("threading.py")]
        at_work = autograd_stacks[-1] if autograd_stacks else at_work
    return at_work


def innermost(wrote: str) -> str:
    """Where the process was, such as "run (kernel.py:12)"; "" if faulthandler wrote no stack."""
    stack = frames(wrote)
    return str(stack[in_kernel([frame.file for frame in stack])]) if stack else ""


def short_path(file: str) -> str:
    """The path of a file, from its package or from the working directory on."""
    parts = pathlib.Path(file).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    try:
        return pathlib.Path(file).relative_to(pathlib.Path.cwd()).as_posix()
    except ValueError:
        return file


_INTERPRETER = "/verify/interpreter/"
_MACHINERY = (_INTERPRETER, "/triton/runtime/", "/triton/language/", "/numpy/")


def in_kernel(files: Sequence[str]) -> int:
    """The place in a stack, given as the files of its frames, innermost first, that tells most: 0, or a kernel's line.

    While a kernel is interpreted, the innermost frames are those of the interpreter and of what it calls. The line of the kernel
    that they work for is further out.
    """
    if not any(_INTERPRETER in file for file in files):
        return 0
    return next((place for place, file in enumerate(files) if not _is_machinery(file)), 0)


def _is_machinery(file: str) -> bool:
    """Whether a file belongs to the interpreter, to what it calls, or to Python itself."""
    of_python = file.startswith("<") or ("/lib/python3" in file and "-packages/" not in file)
    return of_python or any(part in file for part in _MACHINERY)


def in_implementation(wrote: str) -> bool:
    """Whether the stack of any thread shows a call of the implementation."""
    return f" <{Mark.IMPLEMENTATION}>\n" in wrote
