"""Cases a second on one GPU, once kernels are compiled: what a check's worker does with the cases of the oracle's law.

    python -m benchmarks.steady fla/chunk --cases 400 --passes 4

The cases are those that a check draws, in its order and its questions; the first pass compiles and is not counted. Prints, for each
pass, cases a second, the seconds that the implementation and the oracle took, and what the cases came to. Exit 3 without a GPU.
"""

import argparse
import collections
import os
import sys
import time

from properties.books import book_of
from verify import device as devices
from verify import known
from verify.check import ask_all, describe, explained, most_at_once, of_one_key, seeded
from verify.plan import COMPILE_S, Compilers, Plan
from verify.run import Run
from verify.store import Store
from verify.worker import Worker


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", nargs="?", default="fla/chunk")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--tune", default="5")
    options = parser.parse_args()
    if not devices.gpus():
        print("torch sees no GPU", file=sys.stderr)
        return 3
    with Worker(COMPILE_S, environment=devices.environment("cuda")) as worker:
        questions, store, defects = drawn(options, worker), Store(), known.load()
        for number in range(options.passes + 1):
            counts: collections.Counter[str] = collections.Counter()
            kernel = oracle = 0.0
            start = time.perf_counter()
            for runs in questions:
                for run, outcome in zip(runs, ask_all(runs, worker, store, defects), strict=True):
                    counts["known" if explained(defects, run, outcome) else outcome.verdict] += 1
                    kernel, oracle = kernel + outcome.kernel_s, oracle + outcome.oracle_s
            took, count = time.perf_counter() - start, sum(counts.values())
            said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            what = f"{count / took:.1f} cases a second" if number else "compiled"
            print(f"{what}: {took:.1f} s, kernels {kernel:.1f}, oracle {oracle:.1f}; {said}", flush=True)
    return 0


def drawn(options: argparse.Namespace, worker: Worker) -> list[list[Run]]:
    """The runs of a check's oracle law, in its questions, their keys compiled by processes of their own."""
    described = describe(options.adapter, worker)
    law = book_of(described.domain).laws["oracle"]
    processes = max(1, (os.cpu_count() or 1) - 2)
    ahead = [Worker(COMPILE_S, environment=devices.environment("cuda")) for _ in range(processes)]
    compilers = Compilers(ahead, {"describe": options.adapter})

    def run_of(name: str, example: object) -> Run:
        return Run(name, options.adapter, example, described.products, "cuda", options.tune)  # type: ignore[arg-type]

    plan = Plan(described.domain, ["oracle"], options.seed, lambda _: options.cases, seeded, run_of, compilers)
    planned = plan.of("oracle")
    for example in planned.examples:
        planned.wait(example)
    compilers.close()
    plan.close()
    most = most_at_once(law, worker, "cuda")
    return [[run_of("oracle", example) for example in batch] for batch in of_one_key(planned.examples, most)]


if __name__ == "__main__":
    sys.exit(main())
