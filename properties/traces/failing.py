"""Calls of an engine in which an operation fails as if memory had run out: before a trace, or in its steps."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from oracles.arithmetic.counter import mix_words
from properties.laws.law import Breach
from properties.seeds import further_apart
from properties.traces.case import TraceCase
from properties.traces.play import Played, Slot, TraceBench, advance, named, play

FAILURES = 12  # numbers of operations that fail in engines before a trace, unless a step has fewer
ROWS = ("prefill", "decode", "verify", "commit")
CALLS = (*ROWS, "admit", "fork", "swap", "transfer", "preempt", "free")


def let_fail(bench: TraceBench, case: TraceCase) -> bool:
    """Let steps fail in engines that play a trace, and return whether any did. An engine that failed is dropped.

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


def retried(bench: TraceBench, case: TraceCase) -> "Retried":
    """Return an engine whose calls fail in the trace of a case. Another one plays it before, to count operations."""
    counting = Retried(bench, bench.open(case.sizes()), case.seed)
    for _ in play(bench, case, engine=cast(Played, counting)):
        pass
    counts = counting.counts
    del counting  # a domain may have together=False
    return Retried(bench, bench.open(case.sizes()), case.seed, counts)


class Retried:
    """An engine whose calls fail for lack of memory, and are made again with the same numbers, until one does not fail.

    `counts` has the number of operations of each call. With those of another engine, which has played the same trace, the first
    operation of each call fails, and then two others and the last one. Without them, none does.

    Breach if an owner has another state or window after a call that failed, or if there are other owners than before it. Only
    requests that are to get slots may have them already: the call that follows gives them the same ones.

    In calls about rows, only operations that return new tensors count, so that an engine is right which computes all rows and then
    writes them one after the other. In other calls, an operation that writes to a tensor may fail too: on a GPU its first launch
    loads a kernel, which needs memory, and an engine can change its tables last.
    """

    def __init__(self, bench: TraceBench, engine: Played, seed: int, others: Sequence[int] | None = None) -> None:
        self.bench, self.engine, self.seed, self.others = bench, engine, seed, others
        self.counts, self.failed = list[int](), False

    def __getattr__(self, name: str) -> Any:
        """What the engine has by this name; its calls fail first."""
        found = getattr(self.engine, name)
        return functools.partial(self._again, name in ROWS, found) if name in CALLS else found

    def _again(self, rows: bool, call: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: FBT001
        number = len(self.counts)
        self.counts.append(0)
        places = self._places(number)
        before = self._owners() if any(places) else {}
        for at in places:
            with self.bench.failing(at, allocations=rows) as failure:
                answer = call(*args, **options)
                self.failed |= failure.failed
                self.counts[number] = failure.seen
                return answer
            self.failed |= failure.failed
            self._check(before, call.__name__, () if rows else args)
        return call(*args, **options)

    def _owners(self) -> dict[str, Slot]:
        """Return what every owner has."""
        owners = [*self.engine.slots()]
        return dict(zip(owners, self.engine.copies(owners, []), strict=True))

    def _check(self, before: Mapping[str, Slot], call: str, args: Sequence[Any]) -> None:
        """Raise Breach if a call that failed has changed what owners have. Requests that `args` name may have slots already."""
        after, failed = self._owners(), "in a call that failed for lack of memory"
        new = {*after} - {*before} - {name for arg in args for name in ([arg] if isinstance(arg, str) else arg)}
        for owner in sorted(({*before} - {*after}) | new):
            what = "has lost its slot" if owner in before else "has got a slot"
            raise Breach(f"an owner {what} {failed}", f"{named(owner)} in {call}")
        for owner, slot in before.items():
            for part, was, now in zip(("state", "window"), slot.bits(), after[owner].bits(), strict=True):
                if not torch.equal(was, now):
                    raise Breach(f"a {part} has changed {failed}", f"that of {named(owner)} in {call}")

    def _places(self, number: int) -> list[int]:
        """Return the numbers of the operations that fail in a call; 0 to count them."""
        if self.others is None:
            return [0]
        if not (count := self.others[number]):
            return []
        drawn = (1 + mix_words(self.seed, f"call {number} failure {turn}") % count for turn in range(2))
        return sorted({1, count, *drawn})
