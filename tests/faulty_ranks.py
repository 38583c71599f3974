"""What the ranks of tests serve: in {"planted": name, "of": [1]} those ranks misbehave and the others wait in an all-reduce."""

import ctypes
import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from verify.execution import service
from verify.process.messages import Join
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.stacks import Mark, marked


def answer(question: dict[str, Any]) -> dict[str, Any]:
    if "planted" not in question:
        answer = service.answer(question)
        if question["question"] == Join.__name__ and "PIDS" in os.environ:
            pathlib.Path(os.environ["PIDS"], str(os.getpid())).touch()
        return answer
    return call_implementation(question["planted"] if distributed.get_rank() in question["of"] else "none").to_json()


@marked(Mark.IMPLEMENTATION)
def call_implementation(fault: str) -> Outcome:
    try:
        return FAULTS.get(fault, fine)()
    except Exception as error:  # as the bench does
        return Outcome(
            Verdict.BROKEN,
            [Finding("call", FailureKind.RAISED, f"raised {type(error).__name__}: {error}", detail=type(error).__name__)],
        )


def fine() -> Outcome:
    """The ranks meet twice, and each adds what it should."""
    for _ in range(2):
        total = reduced()
    right = total == sum(range(distributed.get_world_size()))
    finding = Finding("o", FailureKind.OFF, "is off", rows=1, rows_over=1, error=1.0, allowed=0.0, origin="exact")
    return Outcome(Verdict.HOLDS if right else Verdict.BROKEN, [] if right else [finding], rows=1, ratios={"o": 0.25})


def reduced() -> float:
    rank = torch.tensor(float(distributed.get_rank()))
    distributed.all_reduce(rank)
    return float(rank)


def spends() -> Outcome:
    """As if the GPU were lost."""
    return dataclasses.replace(fine(), spent=True)


def raises() -> Outcome:
    reduced()
    raise ZeroDivisionError("head 0 / 0")


def leaves() -> Outcome:
    os._exit(7)


def dies() -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    return fine()


def spins() -> Outcome:
    while True:
        pass


def sleeps() -> Outcome:
    time.sleep(1000)
    return fine()


def holds_the_lock() -> Outcome:
    lock, pause = ctypes.PyDLL(None), 1000
    while True:
        lock.sleep(pause)


def gathers() -> Outcome:
    """It calls another collective than the others do."""
    mine = torch.zeros(1)
    distributed.all_gather([torch.zeros(1) for _ in range(distributed.get_world_size())], mine)
    return fine()


def is_not_finite() -> Outcome:
    fine()
    finding = Finding(
        "o",
        FailureKind.NOT_FINITE,
        "is not finite",
        "token 3, head 0",
        rows=4,
        rows_over=1,
        error=float("nan"),
        allowed=0.1,
        origin="kappa",
    )
    return Outcome(Verdict.BROKEN, [finding], rows=4, ratios={"o": float("inf")})


def refuses() -> Outcome:
    return Outcome(Verdict.UNSUPPORTED, reason="heads must divide by 2")


def floods() -> Outcome:
    for _ in range(1000):
        os.write(1, b"x" * 100_000)
    return fine()


FAULTS: dict[str, Callable[[], Outcome]] = {
    function.__name__: function
    for function in (
        raises,
        spends,
        leaves,
        dies,
        spins,
        sleeps,
        holds_the_lock,
        gathers,
        is_not_finite,
        refuses,
        floods,
    )
}
