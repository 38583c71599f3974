"""Growth: how much larger tolerances get when they come from 16 disturbed runs in place of 4, and from 64 in place of 16.

    python -m benchmarks.growth --cases 612 --workers 15

The cases are those of the law `oracle` for implementations in plain torch, which are not called: a tolerance needs none. The
program prints the largest growth, how many rows grow by more than some factors, and the case with the largest growth. From these
come CLEAR and CLEAR_OF_MORE in oracles/tolerance/bound.py, the factors by which an error must exceed a tolerance before it counts
as broken without more runs. Calls whose errors may be amplified from chunk to chunk have factors of their own, and a table of their
own.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from oracles.tolerance import bound
from properties.books import book_of
from properties.words.example import Example
from verify.adapters.base import Adapter
from verify.adapters.loader import load
from verify.engine.drawing import seeded

ZOO = "verify/zoo/"
RULES = (f"{ZOO}base.py:Chunkwise", *(f"{ZOO}wrong_gates.py:{name}" for name in ("Stepwise", "StepwiseKda", "StepwiseDelta")))
MODULES = tuple(f"{ZOO}modules.py:{name}" for name in ("ConvMasked", "Gate", "KdaGate", "L2Norm", "GatedNorm"))
# Each implementation, the class of algorithm ("" is its own), the length of chunks (None tries several), and products in float32.
KINDS = (
    *((rule, "chunkwise", None, "ieee") for rule in RULES),
    *((rule, "recurrent", None, "ieee") for rule in RULES),
    (RULES[0], "chunkwise", 64, "ieee"),
    (RULES[0], "chunkwise", None, "tf32"),
    (f"{ZOO}base.py:Serving", "", None, "ieee"),
    (f"{ZOO}base.py:Layered", "", None, "ieee"),
    *((module, "", None, "ieee") for module in MODULES),
)
COUNTS = (bound.RUNS, *bound.MORE)
FACTORS = (2, 4, 6, 8, 12, 30)
AT_ONCE = 4  # cases that a process takes
LONGEST_STEPWISE = 200  # tokens of recurrent cases; more of them take minutes one by one


@dataclasses.dataclass(frozen=True)
class Grown:
    """One tensor of a case: from which to which number of runs, how many rows grow beyond each factor, and the largest growth."""

    runs: tuple[int, int]
    amplified: bool
    rows: int
    beyond: tuple[int, ...]
    largest: float
    what: str


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=612, help="to draw; recurrent ones that are long are left out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.cases < 1:
        parser.error(f"--cases must be at least 1, got {options.cases}")
    console = Console()
    os.environ["OMP_NUM_THREADS"] = "1"
    batches = range(options.seed, options.seed + -(-options.cases // (len(KINDS) * AT_ONCE)))
    tasks = list(itertools.product(batches, range(len(KINDS))))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        found = track(pool.map(grown_of, tasks), total=len(tasks), console=Console(stderr=True))
        counts, tensors = zip(*found, strict=True)
    everything = [grown for those in tensors for grown in those]
    for runs, amplified in itertools.product(itertools.pairwise(COUNTS), (False, True)):
        show(console, [grown for grown in everything if (grown.runs, grown.amplified) == (runs, amplified)])
    console.print(f"{sum(counts):,} cases")
    return 0


def grown_of(task: tuple[int, int]) -> tuple[int, list[Grown]]:
    """Measure the cases of one seed and implementation. Returns their number, and their tensors."""
    seed, number = task
    spec, algorithm, chunk, products = KINDS[number]
    adapter = load(spec)
    assert isinstance(adapter, Adapter)
    examples: list[Example] = []
    seeded(book_of(adapter.domain).laws["oracle"].draw(adapter.domain), seed, AT_ONCE + 1, examples.append)
    cases = [example.case for example in examples[1:]]  # the first one is the simplest of all
    cases = [case for case in cases if algorithm != "recurrent" or case.tokens <= LONGEST_STEPWISE]
    return len(cases), [grown for case in cases for grown in of_case(case, algorithm or adapter.algorithm, chunk, products)]


def of_case(case: Any, algorithm: str, chunk: int | None, products: str) -> Iterator[Grown]:
    """Yield how the tolerances of each output and gradient of a case grow."""
    inputs, cotangents = case.inputs(), case.cotangents() if getattr(case, "backward", False) else None
    operation = case.spec_of(inputs)
    bounds = {count: bound.bounds(operation, inputs, cotangents, algorithm, products, chunk, first=count) for count in COUNTS}
    for few, more in itertools.pairwise(COUNTS):
        for name, one in bounds[few].items():
            growth = bounds[more][name].allowed / one.allowed
            if growth.numel():
                beyond = tuple(int((growth > factor).sum()) for factor in FACTORS)
                amplified = bounds[bound.RUNS][name].clear != bound.CLEAR
                what = f"{name} of {algorithm} products={products} {case}"
                yield Grown((few, more), amplified, growth.numel(), beyond, float(growth.max()), what)


def show(console: Console, grown: Sequence[Grown]) -> None:
    """Print a table of tensors that grow between the same numbers of runs."""
    if not grown:
        return
    (few, more), amplified = grown[0].runs, grown[0].amplified
    what = "errors may be amplified" if amplified else "errors are not amplified"
    table = Table("rows", "largest growth", *(f"over {factor}" for factor in FACTORS), title=f"{few} to {more} runs, {what}")
    largest = max(grown, key=lambda one: one.largest)
    beyond = (sum(one.beyond[place] for one in grown) for place in range(len(FACTORS)))
    table.add_row(f"{sum(one.rows for one in grown):,}", f"{largest.largest:.1f}", *map(str, beyond))
    console.print(table)
    console.print(f"the largest: {largest.what}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
