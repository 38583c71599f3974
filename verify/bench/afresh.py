"""What a call gives in a process that has made no other call.

A callable without a reference is compared with other calls of itself. If an earlier call has left something wrong behind, such as a
table of the first call's dtype, then calls for comparison in the same process would be as wrong. So before a worker makes its first
call it forks a process that makes none. For each question that process forks a child, which calls the implementation, answers and
ends. Questions and answers are text and the bytes of tensors, never objects. Without a GPU only: a child of a process that has
opened one cannot use it.
"""

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.calls.case import CallCase
from properties.laws.law import Cotangents
from verify.bench.oracle_process import decoded, encoded, keep_open

MOST_S = 60  # a child that takes longer ends
Bounds = dict[str, Bound]
Ask = Callable[[str, Any, Inputs, Cotangents], Bounds]  # the bounds of a call of an adapter
Bring = Callable[[str], object]  # loads an adapter and imports what it needs, and calls nothing


class Afresh:
    """A process that makes no call itself. It brings adapters, and a new child asks for each answer."""

    def __init__(self, bring: Bring, ask: Ask) -> None:
        requests, to = os.pipe()
        source, answers = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _live(requests, answers, bring, ask)
        os.close(requests)
        os.close(answers)
        self._to, self._from = open(to, "wb"), open(source, "rb")  # noqa: SIM115 - until this process ends

    def bounds(self, spec: str, case: Any, inputs: Inputs, cotangents: Cotangents) -> Bounds:
        """The bounds of a call in a process that has made no other one. Empty if the child raised an error or took too long."""
        given = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        absent = [name for name, x in inputs.items() if x is None]
        header = {"spec": spec, "case": str(case), "absent": absent, "cotangents": cotangents is not None}
        tensors, data = _sent({**given, **{f"d {name}": x for name, x in (cotangents or {}).items()}})
        try:
            self._to.write((json.dumps({**header, "tensors": tensors, "bytes": len(data)}) + "\n").encode() + data)
            self._to.flush()
            answer = json.loads(self._from.readline())
            return decoded(answer, _read(self._from, answer["bytes"]))
        except (OSError, ValueError, EOFError):  # the process is gone
            return {}

    def end(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._to.close()
        self._from.close()
        os.waitpid(self.pid, 0)


def _sent(tensors: Mapping[str, Tensor]) -> tuple[list[Any], bytes]:
    parts = [x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for x in tensors.values()]
    return [(name, str(x.dtype).removeprefix("torch."), x.shape) for name, x in tensors.items()], b"".join(parts)


def _received(described: list[Any], data: bytearray) -> dict[str, Tensor]:
    found, at = {}, 0
    for name, dtype, shape in described:
        kind, count = getattr(torch, dtype), math.prod(shape)
        x = torch.frombuffer(data, dtype=kind, count=count, offset=at) if count else torch.empty(0, dtype=kind)
        found[name], at = x.clone().reshape(shape), at + count * kind.itemsize
    return found


def _read(source: BinaryIO, count: int) -> bytearray:
    data = bytearray(count)
    if source.readinto(data) < count:  # type: ignore[attr-defined]
        raise EOFError
    return data


def _live(requests: int, answers: int, bring: Bring, ask: Ask) -> NoReturn:
    """Run the process, which ends when its parent is gone."""
    try:
        keep_open(requests, answers)
        with open(0, "rb") as questions, open(os.dup(1), "wb") as replies:
            os.dup2(2, 1)  # what an implementation prints is no answer
            sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - until this process ends
            for line in questions:
                question = json.loads(line)
                data = _read(questions, question["bytes"])
                with contextlib.suppress(Exception):  # an error comes up again in the child
                    bring(question["spec"])
                if not (child := os.fork()):
                    signal.alarm(MOST_S)
                    _answer(question, data, ask, replies)
                if os.waitpid(child, 0)[1]:
                    _write(replies, {})
    finally:
        os._exit(0)


def _answer(question: dict[str, Any], data: bytearray, ask: Ask, replies: BinaryIO) -> NoReturn:
    """Answer in a child. Nothing is written before all is computed, so that the parent can answer for a child that fails."""
    code = 1
    try:
        case = CallCase.parse(question["case"])
        tensors = _received(question["tensors"], data)
        cotangents = {name[2:]: x for name, x in tensors.items() if name.startswith("d ")} if question["cotangents"] else None
        given = {name: x for name, x in tensors.items() if not name.startswith("d ")}
        inputs = case.inputs().replaced(**dict.fromkeys(question["absent"]), **given)
        bounds = ask(question["spec"], case, inputs, cotangents)
        _write(replies, bounds)
        code = 0
    finally:
        os._exit(code)


def _write(replies: BinaryIO, bounds: Bounds) -> None:
    header, data = encoded(bounds)
    replies.write((json.dumps(header) + "\n").encode() + data)
    replies.flush()


_process: list[Afresh] = []


def start(bring: Bring, ask: Ask) -> None:
    """Fork the process, once, where processes can be forked safely and no GPU is there."""
    if not _process and hasattr(os, "sched_getaffinity") and not torch.cuda.is_available():
        _process.append(Afresh(bring, ask))


def started() -> Afresh | None:
    """The process that makes no calls, or None if there is none."""
    return _process[0] if _process else None
