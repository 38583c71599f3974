"""Soundness: how often right implementations raise an alarm, and how near their errors come to the bound.

    python -m benchmarks.soundness fla/chunk tests/right.py:Chunk16 --cases 3000

Prints, for each adapter, dtype and output, quantiles over cases of the worst row's error in sigma (the bound is at KAPPA), and the
number of alarms; then every alarm's line. Exit 1 if there is one.
"""

import argparse
import collections
import concurrent.futures
import json
import queue
import statistics
import sys
import time

from oracles.bound import KAPPA
from properties.laws import LAWS
from properties.strategies import Example
from verify.check import ask, describe, seeded
from verify.judge import Verdict
from verify.run import Run
from verify.store import Store
from verify.worker import Worker


def main() -> int:
    """Measure; 1 if a right implementation raised an alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapters", nargs="+")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--law", action="append", choices=LAWS, help="default: oracle")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--products", default="ieee")
    parser.add_argument("--json", help="write every case's ratios there, a line a case")
    options = parser.parse_args()
    alarms = 0
    for adapter in options.adapters:
        alarms += measure(adapter, options)
    return 1 if alarms else 0


def measure(adapter: str, options: argparse.Namespace) -> int:
    """The table of one adapter; how many alarms it raised."""
    start, store = time.monotonic(), Store()
    workers = [Worker() for _ in range(options.workers)]
    idle: queue.Queue[Worker] = queue.Queue()
    for worker in workers:
        idle.put(worker)
    domain = describe(adapter, workers[0]).domain
    runs: list[Run] = []
    laws = options.law or ["oracle"]
    for law in laws:
        seeded(
            LAWS[law].draw(domain),
            options.seed,
            -(-options.cases // len(laws)),
            lambda example, law=law: runs.append(
                Run(law, adapter, Example(example.case, example.at, example.variant), options.products)
            ),
        )

    def one(run: Run):  # type: ignore[no-untyped-def]
        worker = idle.get()
        try:
            return run, ask(run, worker, store)
        finally:
            idle.put(worker)

    ratios: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    verdicts: collections.Counter[str] = collections.Counter()
    alarms, kernel, oracle, share = [], 0.0, 0.0, []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for done, (run, outcome) in enumerate(pool.map(one, runs), 1):
            verdicts[outcome.verdict] += 1
            kernel, oracle = kernel + outcome.kernel_s, oracle + outcome.oracle_s
            if outcome.kernel_s:
                share.append(outcome.oracle_s / outcome.kernel_s)
            for name, ratio in outcome.ratios.items():
                ratios[run.example.case.dtype, name].append(ratio * KAPPA)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps({"run": str(run), "ratios": outcome.ratios}) + "\n")
            if outcome.verdict in (Verdict.BROKEN, Verdict.UNKNOWN):
                said = "; ".join(f"{f.output} {f.what} ({f.error:.3g} of {f.allowed:.3g})" for f in outcome.findings)
                alarms.append(f"{outcome.verdict}: {said or outcome.reason}: {run}")
                print(alarms[-1], file=sys.stderr, flush=True)
            if done % 500 == 0:
                print(
                    f"{adapter}: {done} of {len(runs)}, {len(alarms)} alarms, {time.monotonic() - start:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    for worker in workers:
        worker.close()
    store.close()
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print(
        f"{adapter}: {len(runs)} cases of {'+'.join(laws)} ({counts}), seed {options.seed}, {time.monotonic() - start:.0f} s; "
        f"kernels {kernel:.0f} s, oracle and bounds {oracle:.0f} s, median share {statistics.median(share):.2f}; "
        f"{len(alarms)} alarms"
    )
    print(f"  {'dtype':<6}{'output':<12}{'cases':>6}{'median':>8}{'99%':>8}{'99.9%':>8}{'most':>8}   in sigma; bound at {KAPPA:g}")
    for (dtype, name), values in sorted(ratios.items()):
        values.sort()
        at = [values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.99, 0.999, 1.0)]
        print(f"  {dtype:<6}{name:<12}{len(values):>6}" + "".join(f"{value:>8.2f}" for value in at))
    print("".join(f"  {alarm}\n" for alarm in alarms[:10]), end="", flush=True)
    return len(alarms)


if __name__ == "__main__":
    sys.exit(main())
