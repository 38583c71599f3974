"""Soundness: how often right implementations raise an alarm, and how near their errors come to the bound.

    python -m benchmarks.soundness fla/chunk tests/right.py:Chunk16 --cases 3000
    python -m benchmarks.soundness fla/conv tests/right_modules.py:ConvInSteps --law all --cases 1500
    python -m benchmarks.soundness tests/right.py:Hopper --products tf32 --words values=one_signed

It takes any adapter of any book. For each adapter, dtype and output it prints quantiles over cases of the worst row's error in
sigma (the tolerance is KAPPA sigma) and the number of false alarms, then the line of every false alarm. Known defects are counted
apart. The exit code is 1 if there is a false alarm.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import queue
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import records
from oracles.tolerance.allowance import KAPPA
from properties.books import book_of, every_law
from properties.words.example import Example
from verify.engine.asking import ask, describe, with_sizes
from verify.engine.drawing import of_law
from verify.execution.line import Run
from verify.findings import known
from verify.findings.known import KnownDefects
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

# False alarms, verdicts, and for each dtype and output the errors of all cases in sigma.
Measured = tuple[int, collections.Counter[str], dict[tuple[str, str], list[float]]]
# Outputs with one row in the record of errors, since few cases have them.
TOGETHER = dict.fromkeys(("da", "db", "dA_log", "ddt_bias"), "da, db, dA_log, ddt_bias")


def main() -> int:
    """Measure and print. Returns 1 if a right implementation raised a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapters", nargs="+")
    parser.add_argument("--cases", type=int, default=3000, help="of all laws together")
    parser.add_argument("--law", action="append", choices=["all", *every_law()], help="default: the first of the adapter's book")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--products", default="ieee")
    parser.add_argument("--words", action="append", default=[], help="WORD=VALUE that each case gets, such as values=one_signed")
    parser.add_argument("--what", help="what the record of false alarms calls the adapters and laws")
    parser.add_argument("--json", help="write every case's ratios there, a line a case")
    options = records.options_of(parser)
    measured = {adapter: measure(adapter, options) for adapter in options.adapters}
    record(options, measured)
    return 1 if any(alarms for alarms, _, _ in measured.values()) else 0


def record(options: argparse.Namespace, measured: dict[str, Measured]) -> None:
    """Put false alarms into the file of --record; without --law, errors in sigma by the dtypes of the first adapter."""
    if options.law:
        verdicts = sum((verdicts for _, verdicts, _ in measured.values()), collections.Counter[str]())
        what = options.what or f"{', '.join(f'`{adapter}`' for adapter in measured)}: {', '.join(options.law)}"
        alarms = sum(alarms for alarms, _, _ in measured.values())
        records.put(options, "false alarms", {what: {"cases": verdicts.total(), "blind": verdicts[Verdict.BLIND], "value": alarms}})
        return
    errors = [collections.defaultdict[tuple[str, str], list[float]](list) for _ in measured]
    for sums, (_, _, ratios) in zip(errors, measured.values(), strict=True):
        for (dtype, name), values in ratios.items():
            sums[TOGETHER.get(name, name), dtype] += values
    first, *others = errors
    rows: dict[str, records.Record] = {}
    for name in sorted({name for name, _ in first}):
        value: dict[str, object] = {}
        for dtype in sorted({dtype for _, dtype in first}):
            sigmas = first.get((name, dtype))
            value[f"`{options.adapters[0]}`, {dtype}: median, largest"] = [statistics.median(sigmas), max(sigmas)] if sigmas else ""
        largest = [max(values) for sums in others for (output, _), values in sums.items() if output == name]
        rows[name] = {"value": value | ({"largest of the others": max(largest)} if largest else {})}
    records.put(options, "errors in sigma", rows, decimals=2, whole=True)


def laws_of(domain: Any, asked: list[str] | None) -> list[str]:
    """The requested laws that the domain supports; the first law of its book if none is requested, every law for "all".

    ValueError if the domain supports none of them.
    """
    book = book_of(domain)
    names = book.about(domain.operation)
    wanted = names[:1] if asked is None else names if "all" in asked else [name for name in names if name in asked]
    found = [name for name in wanted if book.laws[name].needs(domain) is None]
    if not found:
        raise ValueError(f"law must be one of {', '.join(names)} for {domain.operation}, and one that it supports, got {asked}")
    return found


def drawn(adapter: str, domain: Any, laws: list[str], options: argparse.Namespace) -> list[Run]:
    """Runs of the adapter, with the same number of cases of each law."""
    runs: list[Run] = []
    words = dict(word.split("=", 1) for word in options.words)
    for law in laws:
        of_law(
            book_of(domain).laws[law],
            domain,
            options.seed,
            -(-options.cases // len(laws)),
            lambda example, law=law: runs.append(Run(law, adapter, with_words(example, words), options.products)),
        )
    return runs


def with_words(example: Example, words: dict[str, str]) -> Example:
    """The example with these words in its case."""
    return dataclasses.replace(example, case=dataclasses.replace(example.case, **words))  # type: ignore[type-var]


def outcomes(runs: list[Run], workers: list[Worker], store: Store, defects: KnownDefects) -> Iterator[tuple[Run, Outcome]]:
    """The runs with their outcomes, in order."""
    idle: queue.Queue[Worker] = queue.Queue()
    for worker in workers:
        idle.put(worker)

    def one(run: Run) -> tuple[Run, Outcome]:
        worker = idle.get()
        try:
            return run, ask(run, worker, store, defects=defects)
        finally:
            idle.put(worker)

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        yield from pool.map(one, runs)


def measure(adapter: str, options: argparse.Namespace) -> Measured:
    """Measure one adapter and print its table."""
    start, store = time.monotonic(), Store()
    workers = [Worker() for _ in range(options.workers)]
    described = with_sizes(describe(adapter, workers[0]), "cpu")
    domain, defects = described.domain, known.of(adapter).on(described.device)
    laws = laws_of(domain, options.law)
    runs = drawn(adapter, domain, laws, options)
    ratios: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    verdicts: collections.Counter[str] = collections.Counter()
    alarms, kernel, oracle, share = [], 0.0, 0.0, []
    for done, (run, outcome) in enumerate(outcomes(runs, workers, store, defects), 1):
        if defects.explain(run, outcome):
            outcome.verdict = Verdict.KNOWN
        verdicts[outcome.verdict] += 1
        kernel, oracle = kernel + outcome.kernel_s, oracle + outcome.oracle_s
        if outcome.kernel_s:
            share.append(outcome.oracle_s / outcome.kernel_s)
        for name, ratio in outcome.ratios.items() if outcome.verdict is not Verdict.KNOWN else ():
            ratios[run.example.case.dtype, name].append(ratio * KAPPA)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps({"run": str(run), "ratios": outcome.ratios}) + "\n")
        if outcome.verdict in (Verdict.BROKEN, Verdict.UNKNOWN):
            details = "; ".join(f"{f.place} {f.what} ({f.error:.3g} of {f.allowed:.3g})" for f in outcome.findings)
            alarms.append(f"{outcome.verdict}: {details or outcome.reason}: {run}")
            print(alarms[-1], file=sys.stderr, flush=True)
        if done % 500 == 0:
            took = f"{time.monotonic() - start:.0f} s"
            print(f"{adapter}: {done} of {len(runs)}, {len(alarms)} alarms, {took}", file=sys.stderr, flush=True)
    for worker in workers:
        worker.close()
    store.close()
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print(
        f"{adapter}: {len(runs)} cases of {'+'.join(laws)} ({counts}), seed {options.seed}, {time.monotonic() - start:.0f} s; "
        f"kernels {kernel:.0f} s, oracle and bounds {oracle:.0f} s, median share {statistics.median(share or [0.0]):.2f}; "
        f"{len(alarms)} alarms"
    )
    print(f"  {'dtype':<6}{'output':<12}{'cases':>6}{'median':>8}{'99%':>8}{'99.9%':>8}{'most':>8}   in sigma; bound at {KAPPA:g}")
    for (dtype, name), values in sorted(ratios.items()):
        values.sort()
        at = [values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.99, 0.999, 1.0)]
        print(
            f"  {dtype:<6}{name:<12}{len(values):>6}"
            + "".join(f"{value:>8.2f}" if value < 1e4 else f"{value:>8.0e}" for value in at)
        )
    print("".join(f"  {alarm}\n" for alarm in alarms[:10]), end="", flush=True)
    return len(alarms), verdicts, ratios


if __name__ == "__main__":
    sys.exit(main())
