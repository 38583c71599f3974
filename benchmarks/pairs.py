"""Pairs of defects: whether a case that was found by one defect still shows this defect after it was shrunk.

    python -m benchmarks.pairs --findings 200
    python -m benchmarks.pairs --findings 200 --half 1 --draw found.jsonl     draw the findings alone, and add them to a file
    python -m benchmarks.pairs --shrink found.jsonl                           shrink the findings of a file

Each implementation has two planted defects (benchmarks/planted.py). We draw cases until one is broken, and holds once one of the
two defects is mended: that defect is the found one. Then the case is shrunk, as a check does. The smallest line must hold too once
the found defect is mended. Otherwise shrinking went from the found defect to the other one. In half of the pairs, the second
defect exists only in calls that are simple in one way, so that shrinking leads there.

The names of a pair decide to which of two halves it belongs. If we improve shrinking on the findings of one half, we measure it
on the other. A file of findings has one JSON object a line, with the found line (`found`) and the implementation on which it
holds (`mended`).

It prints the share of smallest lines that show the found defect, and how small they are. With --keep, the smallest lines are added
to a file. The exit code is 1 if the share is below 98%.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import random
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

from benchmarks import planted, records
from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.laws.law import Law
from properties.words.example import Example
from verify.adapters.base import Adapter
from verify.engine.asking import ask
from verify.engine.drawing import seeded
from verify.engine.explaining import explain
from verify.execution.line import Run
from verify.findings.known import NO_DEFECTS
from verify.findings.store import Store
from verify.process.cores import cores
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker
from verify.zoo.animals import Animal, animals, right_of

TARGET = 0.98
CASES = 16  # at most so many cases of a pair are run to find one of its defects
LAWS = ("oracle", "oracle", "packed", "cut", "permuted", "strides", "heads", "samples", "future")
DEADLINE_S = 60.0
LIMIT_S = 600.0  # for shrinking a case: far more than in a check, so that other programs on the machine do not end it early
FILE = "benchmarks/planted.py:"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two defects on one path, and the condition of the second one, or "". `law` is the law that finds one of them."""

    first: str
    second: str
    condition: str
    law: str

    def spec(self, first: str, second: str) -> str:
        """The name of the implementation with these two classes in the places of the two defects."""
        return FILE + "__".join(filter(None, (first, second, self.condition)))

    @property
    def broken(self) -> str:
        """The implementation with both defects."""
        return self.spec(self.first, self.second)

    @property
    def mended(self) -> tuple[str, str]:
        """The implementations in which the first or the second defect is mended."""
        right = right_of(animals()[self.first].kind)
        assert right is not None
        return self.spec(right.__name__, self.second), FILE + f"{self.first}__{self.first}"


@dataclasses.dataclass(frozen=True)
class Found:
    """A broken run, and the name of the implementation with the found defect mended, on which it holds."""

    run: Run
    mended: str

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        return {"found": str(self.run), "mended": self.mended}

    @classmethod
    def from_json(cls, data: dict[str, str]) -> "Found":
        """The finding from the data of `to_json`."""
        return cls(Run.parse(data["found"]), data["mended"])


@dataclasses.dataclass(frozen=True)
class Smallest:
    """The smallest line of a finding, whether that line shows the found defect, and the seconds of shrinking."""

    run: Run
    right: bool
    seconds: float

    @property
    def words(self) -> int:
        """The number of words of the smallest line."""
        return len(str(self.run).split())


def main() -> int:
    """Measure and print. Returns 1 if too many smallest lines show the other defect, or if there are no findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--findings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--half", type=int, choices=(0, 1), help="use only the pairs of this half")
    parser.add_argument("--draw", type=pathlib.Path, metavar="FILE", help="add findings to this file until it has enough")
    parser.add_argument("--shrink", type=pathlib.Path, metavar="FILE", action="append", help="shrink the findings of this file")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FILE", help="add the smallest lines to this file")
    parser.add_argument("--workers", type=int, default=cores())
    options = records.options_of(parser)
    with tempfile.TemporaryDirectory(prefix="gdn-verify-pairs-") as folder:
        workers = [Worker(DEADLINE_S) for _ in range(options.workers)]
        stores = [Store(f"{folder}/{place}") for place in range(options.workers)]
        places = [*zip(workers, stores, strict=True)]
        try:
            if options.shrink:
                found = [Found.from_json(json.loads(line)) for file in options.shrink for line in file.read_text().splitlines()]
            else:
                found = draw(pairs(options.seed, options.half), options, places)
            return 0 if options.draw else measure(found, options, places)
        finally:
            for worker in workers:
                worker.close()


def draw(chosen: Iterator[Pair], options: argparse.Namespace, places: list[tuple[Worker, Store]]) -> list[Found]:
    """Findings of these pairs, in any order. With --draw they are added to its file one by one."""
    found: list[Found] = []
    lock = threading.Lock()

    def work(worker: Worker, store: Store) -> None:
        while True:
            with lock:
                pair = next(chosen, None) if len(found) < options.findings else None
            if pair is None:
                return
            if (finding := first_finding(pair, options.seed, worker, store)) is not None:
                with lock:
                    found.append(finding)
                    if options.draw:
                        with options.draw.open("a", encoding="utf-8") as file:
                            print(json.dumps(finding.to_json()), file=file)

    each(places, work)
    return found


def measure(found: list[Found], options: argparse.Namespace, places: list[tuple[Worker, Store]]) -> int:
    """Shrink the findings, print and record. Returns 1 if too many smallest lines show the other defect, or without findings."""
    smallest: list[Smallest] = []
    lock, left = threading.Lock(), iter(found)

    def work(worker: Worker, store: Store) -> None:
        while True:
            with lock:
                finding = next(left, None)
            if finding is None:
                return
            small = shrunk(finding, worker, store)
            with lock:
                smallest.append(small)
                if options.keep:
                    with options.keep.open("a", encoding="utf-8") as file:
                        told = {"smallest": str(small.run), "right": small.right, "seconds": round(small.seconds, 2)}
                        print(json.dumps(finding.to_json() | told), file=file)
                if not small.right:
                    print(f"slid: {finding.run}\n  to: {small.run}\n  which is broken without: {finding.mended}", flush=True)

    each(places, work)
    if not smallest:
        print("nothing to measure: there is no finding")
        return 1
    right = sum(small.right for small in smallest)
    seconds = [small.seconds for small in smallest]
    words = [small.words for small in smallest]
    print(
        f"{right} of {len(smallest)} smallest lines show the found defect ({right / len(smallest):.1%}); "
        f"words in a line: median {statistics.median(words):g}, mean {statistics.mean(words):.2f}; "
        f"seconds of shrinking: median {statistics.median(seconds):.2f}, longest {max(seconds):.1f}"
    )
    what = "smallest lines that show the found defect, of implementations with two defects"
    records.put(options, "defects", {what: {"value": f"{right} of {len(smallest)}"}})
    return int(right < TARGET * len(smallest))


def each(places: list[tuple[Worker, Store]], work: Any) -> None:
    """Call `work` with each worker and its store, all at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        for future in [pool.submit(work, *place) for place in places]:
            future.result()


def half_of(first: str, second: str) -> int:
    """The half, 0 or 1, of a pair of wrong implementations in any order."""
    return zlib.crc32(" ".join(sorted((first, second))).encode()) % 2


def pairs(seed: int, half: int | None = None) -> Iterator[Pair]:
    """Pairs in a random order, every second one with a condition. The laws take turns, and so do the right classes."""
    chance = random.Random(seed)
    by_right: dict[str, list[str]] = {}
    for name, animal in animals().items():
        right = right_of(animal.kind)
        if right is not None and issubclass(animal.kind, Adapter) and not remembers(animal):
            by_right.setdefault(right.__name__, []).append(name)
    orders = []
    for names in by_right.values():
        both = [
            (first, second) for first in names for second in names if first != second and half in (None, half_of(first, second))
        ]
        chance.shuffle(both)
        orders.append(iter(both))
    number = 0
    while orders:
        for order in [*orders]:
            first, second = next((pair for pair in order if planted.fits(*pair)), ("", ""))
            if not first:
                orders.remove(order)
                continue
            domain = animals()[first].kind.domain
            laws = [name for name in LAWS if (law := book_of(domain).laws.get(name)) and not law.needs(domain)]
            condition = chance.choice([*planted.CONDITIONS]) if number % 2 else ""
            yield Pair(first, second, condition, laws[number % len(laws)])
            number += 1


def remembers(animal: Animal) -> bool:
    """Whether earlier calls decide what a wrong implementation does, so that a single run does not show whether it is mended."""
    return animal.letter == "K" or getattr(animal.kind, "later_calls", False)


def first_finding(pair: Pair, seed: int, worker: Worker, store: Store) -> Found | None:
    """The first broken case of a pair that holds once one of its two defects is mended."""
    domain = animals()[pair.first].kind.domain
    law = book_of(domain).laws[pair.law]
    examples: list[Example] = []
    seeded(law.draw(domain), mix_words(seed, f"{pair}"), CASES, examples.append)
    for example in examples:
        run = Run(law.name, pair.broken, example)
        outcome = ask(run, worker, store)
        if outcome.lost or outcome.fault:
            return None
        if outcome.verdict is not Verdict.BROKEN:
            continue
        holding = [spec for spec in pair.mended if _holds(dataclasses.replace(run, adapter=spec), worker, store)]
        if len(holding) == 1:
            return Found(run, holding[0])
    return None


def _holds(run: Run, worker: Worker, store: Store) -> bool:
    """Whether a run shows no defect. A case that cannot show any counts too."""
    return ask(run, worker, store).verdict in (Verdict.HOLDS, Verdict.BLIND)


def shrunk(found: Found, worker: Worker, store: Store, outcome: Outcome | None = None) -> Smallest:
    """The smallest line of a finding, as a check would print it."""
    outcome = outcome or ask(found.run, worker, store)
    if outcome.lost:  # the first call of an adapter may take longer than the deadline, if it imports much
        outcome = ask(found.run, worker, store)
    start = time.monotonic()
    law: Law = found.run.the_law
    domain = animals()[found.run.adapter.removeprefix(FILE).partition("__")[0]].kind.domain  # both defects have the same one
    small, _ = explain(law, found.run, outcome, worker, store, NO_DEFECTS, threading.Event(), LIMIT_S, domain=domain)
    took = time.monotonic() - start
    smallest = dataclasses.replace(found.run, example=small.example)
    right = _holds(dataclasses.replace(smallest, adapter=found.mended), worker, store)
    return Smallest(smallest, right, took)


if __name__ == "__main__":
    sys.exit(main())
