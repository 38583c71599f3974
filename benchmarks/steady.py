"""Cases a second on one GPU, once kernels are compiled: what a check's workers do with the cases of the first law, `oracle`.

    python -m benchmarks.steady fla/chunk --cases 400 --passes 4
    python -m benchmarks.steady gdn/pool --cases 100            the cases of the first law of its book, `session`
    python -m benchmarks.steady gdn/pool --workers 8            with 8 workers, as `check --workers 8` has them
    python -m benchmarks.steady fla/chunk --real 1,2,3          one case of 32,768 tokens at the widths of Qwen3-Next, by seed

The cases are those that a check draws, in the same order and the same questions. The first pass compiles and is not counted. For
each pass it prints cases per second, the seconds of the implementation and of the oracle, and the verdicts. With several workers,
a later pass may still load kernels that another worker ran first. The exit code is 3 without a GPU.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import statistics
import sys
import time

from benchmarks import records
from oracles.operation import DTYPES
from properties.books import book_of
from properties.palette import real_case
from properties.words.example import Example
from verify.engine.asking import ask_all, describe, most_at_once, of_one_key
from verify.engine.compile_plan import Plan
from verify.engine.compilers import COMPILE_S, Compilers
from verify.execution.line import Run
from verify.findings import known
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.process.cores import cores
from verify.process.messages import Describe
from verify.process.outcome import Outcome
from verify.process.worker import Worker


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", nargs="?", default="fla/chunk")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the questions")
    # The keys of seed 6 have no blocks of 16 columns, with which FLA's kernels with four warps end the process (docs/FINDINGS.md).
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--tune", default="5")
    parser.add_argument("--real", help="seeds of cases at real widths, each a pass of its own")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of cases at real widths")
    options = records.options_of(parser)
    if not devices.gpus():
        print("torch sees no GPU", file=sys.stderr)
        return 3
    with Worker(COMPILE_S, environment=devices.environment("cuda")) as worker:
        if options.real:
            seeds = [int(seed) for seed in options.real.split(",")]
            times = [told(number, [[real(options, worker, seed)]], worker)[1] for number, seed in enumerate([seeds[0], *seeds])]
            what, fields = f"one case of 32,768 tokens, {options.dtype}", records.Record(value=times[1:], unit="s")
        else:
            questions = drawn(options, worker)
            with contextlib.ExitStack() as stack:
                others = range(options.workers - 1)
                more = [stack.enter_context(Worker(COMPILE_S, environment=devices.environment("cuda"))) for _ in others]
                passes = [told(number, questions, worker, *more) for number in range(options.passes + 1)][1:]
            several = f", {options.workers} workers" if more else ""
            what, rates = f"{passes[0][0]} cases{several}, kernels compiled", [cases / seconds for cases, seconds in passes]
            fields = records.Record(value=statistics.median(rates), unit="cases a second", spread=[min(rates), max(rates)])
    records.put(options, "speed", {f"`{options.adapter}`: {what}": fields}, decimals=2 if options.real else 1)
    return 0


def told(number: int, questions: list[list[Run]], *workers: Worker) -> tuple[int, float]:
    """Run and print one pass over the questions. Pass 0 is the one that compiles. Returns the number of cases and the seconds.

    Each worker takes the next question when it has answered one.
    """
    counts: collections.Counter[str] = collections.Counter()
    device = describe(questions[0][0].adapter, workers[0]).device
    store, defects, start = Store(), known.load().on(device), time.perf_counter()
    left = iter(questions)  # the iterator of a list, from which no two threads get one question

    def answers(worker: Worker) -> list[tuple[Run, Outcome]]:
        return [pair for runs in left for pair in zip(runs, ask_all(runs, worker, store, defects), strict=True)]

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        answered = [pair for pairs in pool.map(answers, workers) for pair in pairs]
    took = time.perf_counter() - start
    for run, outcome in answered:
        counts["known" if defects.explain(run, outcome) else outcome.verdict] += 1
    kernel, oracle = (sum(getattr(outcome, name) for _, outcome in answered) for name in ("kernel_s", "oracle_s"))
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    what = f"{sum(counts.values()) / took:.1f} cases a second" if number else "compiled"
    print(f"{what}: {took:.2f} s, kernels {kernel:.2f}, oracle {oracle:.2f}; {verdicts}", flush=True)
    return sum(counts.values()), took


def real(options: argparse.Namespace, worker: Worker, seed: int) -> Run:
    """The run of the law `oracle` on one case at real widths."""
    described = describe(options.adapter, worker)
    case = dataclasses.replace(real_case(seed), dtype=options.dtype)
    return Run("oracle", options.adapter, Example(case), described.products, "cuda", options.tune)


def drawn(options: argparse.Namespace, worker: Worker) -> list[list[Run]]:
    """The runs of the first law of a book, grouped into the questions of a check. Other processes compile their keys first."""
    described = describe(options.adapter, worker)
    law = next(iter(book_of(described.domain).laws.values()))
    processes = max(1, cores() - 2)
    ahead = [Worker(COMPILE_S, environment=devices.environment("cuda")) for _ in range(processes)]
    compilers = Compilers(ahead, Describe(options.adapter))

    def run_of(name: str, example: object) -> Run:
        return Run(name, options.adapter, example, described.products, "cuda", options.tune)  # type: ignore[arg-type]

    plan = Plan(described.domain, [law.name], options.seed, lambda _: options.cases, run_of, compilers)
    planned = plan.of(law.name)
    for example in planned.examples:
        planned.wait(example)
    compilers.close()
    plan.close()
    most = most_at_once(law, worker, "cuda")
    return [[run_of(law.name, example) for example in batch] for batch in of_one_key(planned.examples, most)]


if __name__ == "__main__":
    sys.exit(main())
