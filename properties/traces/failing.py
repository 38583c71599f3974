"""Calls of an engine in which an operation fails as if memory had run out: before a trace, or in its steps."""

import functools
import math
from collections.abc import Callable
from typing import Any

from oracles.arithmetic.counter import mix_words
from properties.seeds import further_apart
from properties.traces.case import TraceCase
from properties.traces.play import Failure, Played, TraceBench, advance

FAILURES = 12  # numbers of operations that fail in engines before a trace, unless a step has fewer
ROWS = ("prefill", "decode", "verify", "commit")
CALLS = (*ROWS, "admit", "fork", "swap", "transfer", "preempt", "free")


def let_fail(bench: TraceBench, case: TraceCase) -> bool:
    """Let steps of engines fail that play a trace, and return whether any did. An engine that failed is dropped.

    Operations fail in the opening of an engine and its first step, and then in the first step of each other kind, for which a new
    engine takes the steps before. Their numbers increase, so that what is kept for ever is not yet there. Then half of them come
    again and decrease, so that a later step does not clear away what one has left.
    """
    numbers, failed = further_apart(case.seed, FAILURES), False
    kinds = {step.kind: place for place, step in reversed([*enumerate(case.plan)])}
    ends = dict.fromkeys((0, *sorted(kinds.values())), math.inf)  # by the place of a step, an operation that it has not
    first, *later = ends
    turns = [(first, at) for at in numbers]
    turns += [(place, at) for turn, place in enumerate(later) for at in numbers[turn % 2 :: 4]]
    for place, at in (*turns, *turns[::-2]):
        if at < ends[place]:
            if _fails(bench, case, place, at):
                failed = True
            else:
                ends[place] = at
    return failed


def _fails(bench: TraceBench, case: TraceCase, place: int, at: int) -> bool:
    """Let operation `at` of a step fail on a new engine, which has taken the steps before, and return whether it has as many."""
    if not place:
        with bench.failing(at) as failure:
            advance(bench.open(case.sizes()), case, case.plan[0])
        return failure.failed
    engine = bench.open(case.sizes())
    for step in case.plan[:place]:
        advance(engine, case, step)
    with bench.failing(at) as failure:
        advance(engine, case, case.plan[place])
    return failure.failed


class Retried:
    """An engine of which each call fails for lack of memory, and is made again with the same numbers, until one does not fail.

    In calls about rows, only operations that return new tensors fail, so that an engine is right which computes all rows and then
    writes them one after the other. In other calls, an operation that writes to a tensor may fail too: on a GPU its first launch
    loads a kernel, which needs memory, and an engine can change its tables last.
    """

    def __init__(self, bench: TraceBench, engine: Played, seed: int) -> None:
        self.bench, self.engine, self.seed = bench, engine, seed
        self.calls, self.failures = 0, list[Failure]()

    @property
    def failed(self) -> bool:
        """Whether any operation failed."""
        return any(failure.failed for failure in self.failures)

    def __getattr__(self, name: str) -> Any:
        """What the engine has by this name; its calls fail first."""
        found = getattr(self.engine, name)
        return functools.partial(self._again, name in ROWS, found) if name in CALLS else found

    def _again(self, rows: bool, call: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: FBT001
        self.calls += 1
        seed = mix_words(self.seed, f"call {self.calls}")
        first, *later = further_apart(seed, 16)
        for at in (first, *(later[seed % 4 :: 4] if rows else later)):  # other calls have few operations
            with self.bench.failing(at, allocations=rows) as failure:
                self.failures.append(failure)
                return call(*args, **options)
        return call(*args, **options)
