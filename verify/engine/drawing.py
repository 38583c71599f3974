"""Drawing: Hypothesis draws examples of a strategy, in the calling thread or ahead of it in another one."""

import contextlib
import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hypothesis.errors import Unsatisfiable

from oracles.arithmetic.counter import mix_words
from properties.laws.law import Law
from properties.seeds import draw as drawn_from
from properties.words.pairs import pairs_of
from properties.words.sizes import first_place, is_large, places, with_drawing

AHEAD = 64  # at most so many examples are drawn ahead, because a drawing thread takes time from the threads that run cases
TRIES = 8  # draws for each large example
CANDIDATES = 3  # draws for each ordinary example of a law that has few examples
FEW = 96  # a law of more examples has nearly all pairs of words without a choice
FIRST = 16  # the smallest of so many ordinary examples is a law's first one
Look = Callable[[Any], None]


class Enough(BaseException):
    """Ends the drawing of examples. A BaseException, because Hypothesis would take an Exception for a failure and shrink it."""


def seeded(strategy: Any, seed: int, examples: int, look: Look, seen: Iterable[Any] = ()) -> None:
    """Pass `examples` different examples of a strategy to `look`, or fewer if the strategy has fewer. The seed decides which.

    None of them is in `seen`. Hypothesis begins with the same example for every seed, so that one is passed only if there are too
    few others.
    """
    known, count, simplest = set(seen), 0, list[Any]()
    if examples == 0:
        return

    def drive(example: Any) -> None:
        nonlocal count
        if not simplest:
            simplest.append(example)
        elif example not in known and example != simplest[0]:
            look(example)
            known.add(example)
            count += 1
        if count == examples:
            raise Enough  # Hypothesis would go on to its limit

    try:
        drawn_from(strategy, seed, 2 * (examples + 1), drive)  # a quarter of Hypothesis' draws are repetitions
    except Enough:
        if count < examples:  # raised by look
            raise
        return
    if simplest and simplest[0] not in known:
        look(simplest[0])


def paired(strategy: Any, seed: int, examples: int, look: Look, seen: Iterable[Any] = ()) -> None:
    """Pass examples to `look` as `seeded` does, but of CANDIDATES draws the one with the most pairs of words that are new.

    A pair is new if neither an example before it nor one of `seen` has it. Greedy choices among few candidates come close to the
    fewest cases that have all pairs (D. M. Cohen et al., "The AETG system: an approach to testing based on combinatorial design",
    IEEE Transactions on Software Engineering 23(7), 1997).
    """
    seen = [*seen]
    had = {pair for example in seen for pair in pairs_of(example)}
    waiting, others, count = list[Any](), list[Any](), 0

    def drive(example: Any) -> None:
        nonlocal count
        waiting.append(example)
        if len(waiting) < CANDIDATES:
            return
        best = max(waiting, key=lambda one: len(pairs_of(one) - had))
        had.update(pairs_of(best))
        others.extend(one for one in waiting if one is not best)
        waiting.clear()
        count += 1
        look(best)

    seeded(strategy, seed, CANDIDATES * examples, drive, seen)
    for example in [*waiting, *others][: examples - count]:  # the strategy has few examples
        look(example)


def of_law(law: Law, domain: Any, seed: int, examples: int, look: Look, strategy: Callable[[Law, Any], Any] | None = None) -> None:
    """Pass the examples to `look` that a check with this seed has of a law, in their order, which their number decides.

    - The first example is the smallest of FIRST ordinary ones, so that the first result comes soon.
    - Large examples are at the places that properties/words/sizes.py names, if the domain has large cases.
    - The examples that a law always has (`Law.always`) come after the first large one, or where that would be.
    - Of a law that compares with the truth and has few examples, each ordinary one is chosen among several draws (`paired`).
    - The first examples of a law with `Law.turns` have its variants in turn, except for those that it always has.

    `strategy(law, domain)` returns the strategy of the examples; by default it is that of the law.
    """
    seed, special = mix_words(seed, law.name), dict[int, Any]()
    strategy = strategy or (lambda law, domain: law.draw(domain))
    long = domain.drawing.long
    always = [*law.always(domain)] if long else []
    look = _in_turn(law, domain, always, look) if law.turns(domain) else look
    kinds = places(examples, long, seed) if domain.draws_large else {}
    for kind in dict.fromkeys(kinds.values()):
        where = [place for place in kinds if kinds[place] == kind]
        large = _large(strategy(law, with_drawing(domain, large=kind)), mix_words(seed, kind), len(where))
        special |= dict(zip(where, large, strict=False))
    if long:
        free = (place for place in range(first_place(examples) + 1, examples) if place not in kinds)
        special |= dict(zip(free, always, strict=False))
    begin, done = list[Any](), 0

    def put(*ordinary: Any) -> None:
        nonlocal done
        for example in ordinary:
            while done in special:
                look(special[done])
                done += 1
            look(example)
            done += 1

    def put_first() -> None:
        smallest = min(begin, key=lambda example: (example.case.tokens == 0, example.case.tokens), default=None)
        put(*(example for example in begin if example is smallest), *(example for example in begin if example is not smallest))

    def ordinary(example: Any) -> None:
        if len(begin) == FIRST:
            put(example)
            return
        begin.append(example)
        if len(begin) == FIRST:
            put_first()

    draw = paired if law.kind == "truth" and examples <= FEW else seeded
    draw(strategy(law, domain), seed, examples - len(special), ordinary, special.values())
    if len(begin) < FIRST:
        put_first()
    for place in sorted(place for place in special if place >= done):
        look(special[place])


def _in_turn(law: Law, domain: Any, always: Sequence[Any], look: Look) -> Look:
    """A function that gives an example the first variant that did not come yet, of those that its case may have, and passes it on.

    An example that the law always has, one of `always`, keeps its variant, and so does one for which none is left.
    """
    left = [*law.turns(domain)]

    def turned(example: Any) -> None:
        possible = [variant for variant in left if law.lacks(example.case, variant) is None]
        if possible and example not in always:
            example = dataclasses.replace(example, variant=possible[0])
        if example.variant in left:
            left.remove(example.variant)
        look(example)

    return turned


def _large(strategy: Any, seed: int, count: int) -> list[Any]:
    """Return `count` examples of a strategy for large ones.

    Some laws choose among strategies, and not all of these have large examples. Where TRIES are not enough, ordinary ones are
    returned too. If no key of a palette suits a large example, there are none.
    """
    drawn: list[Any] = []

    def look(example: Any) -> None:
        drawn.append(example)
        if sum(is_large(example.case) for example in drawn) == count:
            raise Enough

    with contextlib.suppress(Enough, Unsatisfiable):
        seeded(strategy, seed, TRIES * count, look)
    return sorted(drawn, key=lambda example: not is_large(example.case))[:count]


def batches(draw: Callable[[Look], None], most: int) -> Iterator[list[Any]]:
    """The examples that `draw` passes to its argument, in lists of at most `most`.

    Meanwhile a thread draws up to AHEAD of them in advance. A list ends early if no further example is drawn yet. An exception in
    the drawing thread is raised here.
    """
    drawn: queue.Queue[Any] = queue.Queue(AHEAD)
    failed: list[BaseException] = []
    end, left = object(), threading.Event()

    def put(example: Any) -> None:
        while not left.is_set():
            with contextlib.suppress(queue.Full):
                drawn.put(example, timeout=0.5)
                return
        raise Enough

    def run() -> None:
        try:
            draw(put)
        except BaseException as error:  # raised in the caller, as if the caller had drawn
            failed.append(error)
        finally:
            with contextlib.suppress(Enough):
                put(end)

    batch: list[Any] = []
    try:
        _in_a_thread(run)
        while (example := drawn.get()) is not end:
            batch.append(example)
            if len(batch) == most or drawn.empty():
                yield batch
                batch = []
    finally:
        left.set()
    if batch:
        yield batch
    if failed:
        raise failed[0]


class _Drawer(threading.Thread):
    """A thread that draws for several callers, one after another.

    When Hypothesis first draws in a thread, it goes through all objects of the process, which takes 0.2 s in a large process. A new
    thread for each law would pay that each time, so threads are reused. They are daemons, because a thread whose caller has left
    goes on until its next example.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self.asked.get()()
            _IDLE.append(self)


_IDLE: list[_Drawer] = []
os.register_at_fork(after_in_child=_IDLE.clear)  # a child process has none of its parent's threads


def _in_a_thread(draw: Callable[[], None]) -> None:
    try:
        drawer = _IDLE.pop()
    except IndexError:
        drawer = _Drawer()
    drawer.asked.put(draw)
