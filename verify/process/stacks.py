"""Stacks: where a process was, read from what faulthandler wrote, and whose code a frame is.

A function says whose code it is by a mark in its name: faulthandler writes the names of functions, so the mark arrives with the
stack, from whatever process, host or folder the stack came.
"""

import dataclasses
import enum
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Mark(enum.StrEnum):
    """Whose code a marked frame is: it calls the implementation, it is a collective of ours, or it waits for the oracle."""

    IMPLEMENTATION = "implementation"
    COLLECTIVE = "collective"
    ORACLE = "oracle"


def marked(mark: Mark) -> Callable[[F], F]:
    """Every stack that a function is on says `mark`. Goes below other decorators: it needs the function itself."""

    def add(function: F) -> F:
        code: types.CodeType = function.__code__
        function.__code__ = code.replace(co_name=f"{code.co_name} <{mark}>")
        return function

    return add


def mark_module(namespace: Mapping[str, Any], mark: Mark) -> None:
    """Mark all functions and methods of a module, whose globals() these are, at its end."""
    own = [value for value in namespace.values() if getattr(value, "__module__", None) == namespace["__name__"]]
    classes = [value for value in own if isinstance(value, type)]
    members = [getattr(each, "__func__", each) for kind in classes for each in vars(kind).values()]
    for function in (*own, *members):
        if isinstance(function, types.FunctionType) and function.__code__.co_filename == namespace["__file__"]:
            marked(mark)(function)


@dataclasses.dataclass(frozen=True)
class Frame:
    """A line of a stack; `mark` is that of its function, if it has one."""

    file: str
    line: int
    function: str
    mark: Mark | None = None

    def __str__(self) -> str:
        return f"{self.function} ({os.path.basename(self.file)}:{self.line})"


_MARKED = re.compile(rf"(.*) <({'|'.join(Mark)})>")


def _frame(file: str, line: str, function: str) -> Frame:
    found = _MARKED.fullmatch(function)
    return Frame(file, int(line), found[1], Mark(found[2])) if found else Frame(file, int(line), function)


def frames(wrote: str) -> list[Frame]:
    """The stack, innermost first, of the thread that works, if faulthandler wrote the stacks: the last that it wrote.

    That is the main thread; where it waits for a backward pass on a thread of autograd's own, it is that one.
    """
    threads = []
    for title, lines in re.findall(r"^(Current thread|Thread) 0x.*\n((?:  File .*\n?)+)", wrote, re.MULTILINE):
        stack = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', lines, re.MULTILINE)
        threads.append((title, [_frame(*words) for words in stack]))
    threads = [(title, stack) for title, stack in threads if stack]
    current = [stack for title, stack in threads if title == "Current thread"]
    at_work = (current or [stack for _, stack in threads] or [[]])[-1]
    if at_work and at_work[0].file.endswith("torch/autograd/graph.py"):
        own = [stack for title, stack in threads if title == "Thread" and not stack[-1].file.endswith("threading.py")]
        at_work = own[-1] if own else at_work
    return at_work


def innermost(wrote: str) -> str:
    """Where the process was, in words, if faulthandler wrote its stack: "run (kernel.py:12)"."""
    stack = frames(wrote)
    return str(stack[0]) if stack else ""


def in_implementation(wrote: str) -> bool:
    """Whether any thread's stack shows a call of the implementation."""
    return f" <{Mark.IMPLEMENTATION}>\n" in wrote
