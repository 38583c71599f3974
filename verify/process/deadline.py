"""The deadline of the question that a worker process is answering, and how to take seconds out of it.

A worker sends its supervisor a line {"deadline_s": seconds} to say how long it may still take from now on.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator

ALONE_S = 5.0  # a worker ends itself this long after its deadline, if its supervisor has not ended it
MOVED = "deadline_s"


@dataclasses.dataclass
class _Question:
    """The question that is being answered: the descriptor of the pipe of answers, and the time of its deadline."""

    answers: int
    end: float


_question: _Question | None = None


def begin(answers: int, deadline_s: float) -> None:
    """Start the clock of a question whose answer goes to the descriptor `answers`."""
    global _question
    _question = _Question(answers, 0.0)
    _move(_question, deadline_s)


def finish() -> None:
    """Stop the clock, before the answer is sent."""
    global _question
    _question = None
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def outside(limit_s: float) -> Iterator[None]:
    """What runs inside does not count for the deadline of the question. It may take `limit_s` seconds itself."""
    question = _question
    if question is None:
        yield
        return
    left = question.end - time.monotonic()
    _tell(question, limit_s)
    try:
        yield
    finally:
        _tell(question, left)


def _tell(question: _Question, seconds: float) -> None:
    _move(question, seconds)
    os.write(question.answers, (json.dumps({MOVED: seconds}) + "\n").encode())


def _move(question: _Question, seconds: float) -> None:
    question.end = time.monotonic() + seconds
    # A kernel that hangs with Python's global lock stops every thread of ours. This timer does not need the lock.
    faulthandler.dump_traceback_later(max(0.0, seconds) + ALONE_S, exit=True, file=sys.stderr)
