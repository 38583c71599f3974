"""Pairs of defects: whether a case that was found by one defect still shows this defect after it was shrunk.

    python -m benchmarks.pairs --findings 200

Each implementation has two planted defects (benchmarks/planted.py). We draw cases until one is broken, and holds once one of the
two defects is mended: that defect is the found one. Then the case is shrunk, as a check does. The smallest line must hold too once
the found defect is mended. Otherwise shrinking went from the found defect to the other one. In half of the pairs, the second
defect exists only in calls that are simple in one way, so that shrinking leads there.

It prints the share of smallest lines that show the found defect, and how small they are. The exit code is 1 if the share is below
98%.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from benchmarks import planted, records
from oracles.counter import mix_words
from properties.books import book_of
from properties.laws import Law
from properties.strategies import Example
from verify.engine.asking import ask
from verify.engine.drawing import seeded
from verify.engine.explaining import explain
from verify.execution.run import Run
from verify.findings.known import NO_DEFECTS
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker
from verify.zoo.animals import animals, right_of

TARGET = 0.98
CASES = 24  # at most so many cases of a pair are run to find its defects
LAWS = ("oracle", "oracle", "packed", "cut", "permuted", "strides", "heads", "samples", "future")
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
class Finding:
    """A found case of a pair, its smallest line, whether that line shows the found defect, and the seconds of shrinking."""

    pair: Pair
    found: Run
    smallest: Run
    mended: str
    right: bool
    seconds: float

    @property
    def words(self) -> int:
        """The number of words of the smallest line."""
        return len(str(self.smallest).split())


def main() -> int:
    """Measure and print. Returns 1 if too many smallest lines show the other defect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--findings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = records.options_of(parser)
    found: list[Finding] = []
    lock, chosen = threading.Lock(), pairs(options.seed)

    def work(worker: Worker, store: Store) -> None:
        while True:
            with lock:
                if len(found) >= options.findings:
                    return
                pair = next(chosen, None)
            if pair is None:
                return
            for finding in findings(pair, options.seed, worker, store):
                with lock:
                    found.append(finding)
                    if not finding.right:
                        print(
                            f"slid: {finding.found}\n  to: {finding.smallest}\n  which is broken without: {finding.mended}",
                            flush=True,
                        )

    with tempfile.TemporaryDirectory(prefix="gdn-verify-pairs-") as folder:
        workers = [Worker(20.0) for _ in range(options.workers)]
        with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
            for future in [pool.submit(work, worker, Store(f"{folder}/{place}")) for place, worker in enumerate(workers)]:
                future.result()
        for worker in workers:
            worker.close()
    right = sum(finding.right for finding in found)
    seconds = [finding.seconds for finding in found]
    words = [finding.words for finding in found]
    print(
        f"{right} of {len(found)} smallest lines show the found defect ({right / len(found):.1%}); "
        f"words in a line: median {statistics.median(words):g}, mean {statistics.mean(words):.2f}; "
        f"seconds of shrinking: median {statistics.median(seconds):.2f}, longest {max(seconds):.1f}"
    )
    records.put(
        options,
        "defects",
        {"smallest lines that show the found defect, of implementations with two defects": {"value": f"{right} of {len(found)}"}},
    )
    return int(right < TARGET * len(found))


def pairs(seed: int) -> Iterator[Pair]:
    """Pairs in a random order, every second one with a condition. The laws take turns."""
    chance = random.Random(seed)
    every = list(planted.pairs())
    by_kind: dict[type, list[tuple[str, str]]] = {}
    for first, second in every:
        by_kind.setdefault(right_of(animals()[first].kind) or object, []).append((first, second))
    for several in by_kind.values():
        chance.shuffle(several)
    # The right classes take turns, since two of them have most of the pairs.
    turns = [pair for several in itertools.zip_longest(*by_kind.values()) for pair in several if pair is not None]
    for number, (first, second) in enumerate(turns):
        domain = animals()[first].kind.domain
        laws = [name for name in LAWS if (law := book_of(domain).laws.get(name)) and not law.needs(domain)]
        conditions = list(planted.CONDITIONS)
        yield Pair(first, second, chance.choice(conditions) if number % 2 else "", laws[number % len(laws)])


def findings(pair: Pair, seed: int, worker: Worker, store: Store) -> Iterator[Finding]:
    """The findings of a pair: at most one of each of its defects."""
    domain = animals()[pair.first].kind.domain
    law = book_of(domain).laws[pair.law]
    examples: list[Example] = []
    seeded(law.draw(domain), mix_words(seed, f"{pair}"), CASES, examples.append)
    left = {*pair.mended}
    for example in examples:
        run = Run(law.name, pair.broken, example)
        outcome = ask(run, worker, store)
        if outcome.lost or outcome.fault or not left:
            return
        if outcome.verdict is not Verdict.BROKEN:
            continue
        holding = [spec for spec in pair.mended if _holds(dataclasses.replace(run, adapter=spec), worker, store)]
        if len(holding) == 1 and holding[0] in left:
            left.discard(holding[0])
            yield shrunk(pair, law, run, outcome, holding[0], worker, store)


def _holds(run: Run, worker: Worker, store: Store) -> bool:
    return ask(run, worker, store).verdict is not Verdict.BROKEN


def shrunk(pair: Pair, law: Law, run: Run, outcome: Outcome, mended: str, worker: Worker, store: Store) -> Finding:
    """The finding of a broken run of a pair, which holds on the implementation `mended`."""
    start = time.monotonic()
    small, _ = explain(law, run, outcome, worker, store, NO_DEFECTS, threading.Event())
    took = time.monotonic() - start
    smallest = dataclasses.replace(run, example=small.example)
    right = _holds(dataclasses.replace(smallest, adapter=mended), worker, store)
    return Finding(pair, run, smallest, mended, right, took)


if __name__ == "__main__":
    sys.exit(main())
