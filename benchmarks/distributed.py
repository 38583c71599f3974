"""Speed and soundness of parallel paths: cases a second of exchanges and of whole layers, and alarms on right code.

    python -m benchmarks.distributed --simulate 64          one process, 64 simulated ranks
    python -m benchmarks.distributed --ranks 4              processes of this host: NCCL where each has a GPU, else gloo
    python -m benchmarks.distributed --ranks 2 --soundness 5000 gdn/layer

A rate counts cases that are drawn, run on all ranks, judged on each and merged, as in `check`, after a warm-up of 32 cases of
layers or 192 of exchanges. The time of the first verdict counts from the start of this program, including its imports and the
start of the ranks.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

START = time.perf_counter()

from benchmarks import records  # noqa: E402 - the clock starts before
from properties.paths.case import ParallelCase  # noqa: E402
from properties.paths.domain import PathDomain, with_forms  # noqa: E402
from properties.paths.laws import LAYOUT_ONLY, PATH_LAWS  # noqa: E402
from properties.words.example import Example  # noqa: E402
from verify.engine.asking import ask, ask_all, describe, most_at_once  # noqa: E402
from verify.engine.drawing import batches, seeded  # noqa: E402
from verify.execution.line import Run  # noqa: E402
from verify.findings.store import Store  # noqa: E402
from verify.process.choices import BACKENDS  # noqa: E402
from verify.process.outcome import Outcome, Verdict  # noqa: E402
from verify.process.worker import Worker  # noqa: E402
from verify.ranks.group import Answering, RankGroup  # noqa: E402

WARM = 32
EXCHANGES = 6  # times as many cases of exchanges as of layers, in the warm-up too: otherwise they take about a second
RunOf = Callable[[str, Example], Run]


def main() -> int:
    """Measure and print. Returns 1 if right code raised a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", nargs="?", default="gdn/layer")
    parser.add_argument("--ranks", type=int, help="processes of this host")
    parser.add_argument("--simulate", type=int, default=64, help="simulated ranks, where there are no processes")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--cases", type=int, default=200, help="cases that a rate is measured on")
    parser.add_argument("--soundness", type=int, default=0, help="cases of every law together, to count alarms")
    parser.add_argument("--law", action="append", choices=PATH_LAWS, help="laws of the soundness run (default: every one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write what was measured there")
    options = records.options_of(parser)
    import torch

    backend = options.backend or ("nccl" if options.ranks and torch.cuda.device_count() >= options.ranks else "gloo")
    report: dict[str, Any] = {
        "adapter": options.adapter,
        "ranks": options.ranks,
        "simulate": options.simulate,
        "seed": options.seed,
    }
    group: Answering = RankGroup(options.ranks, backend) if options.ranks else Worker()
    device = torch.cuda.get_device_name() if backend == "nccl" else "CPU"
    print(
        f"torch {torch.__version__}, {device}, " + (f"{options.ranks} ranks over {backend}" if options.ranks else "ranks simulated")
    )
    store, place = Store(), "cuda" if backend == "nccl" else "cpu"
    alarms = 0
    with group:
        described = describe(options.adapter, group)
        domain = described.domain
        assert isinstance(domain, PathDomain), options.adapter

        def run_of(law: str, example: Example) -> Run:
            tune = "1" if place == "cuda" else ""
            return Run(law, options.adapter, example, described.products_of(example, place), place, tune)

        domain = with_forms(domain, options.seed) if backend == "nccl" else domain
        size = options.ranks or options.simulate
        whole = dataclasses.replace(domain, ranks=size, exchange_ranks=size)
        mesh: dict[str, Any] = {"mesh": ((1, size),)}
        first = ParallelCase((2 * size,), cp=size, heads=size, value_heads=size)
        outcome = ask(run_of("exchange", Example(first, None, "heads")), group, store)
        assert outcome.verdict is Verdict.HOLDS, outcome
        report["first_verdict_s"] = time.perf_counter() - START
        print(f"  first verdict {report['first_verdict_s']:.1f} s after the command")
        fused = {**LAYOUT_ONLY, **mesh, "dtype": "fp32", "packed": True, "thd_all_to_all": "fused"}
        report["exchange"] = rate("exchange", whole, {"tokens": 400, **fused}, run_of, options, group, store, place, EXCHANGES)
        few = dataclasses.replace(whole, ranks=min(size, 8), slow=domain.slow)
        quick = {name: tuple(v for v in values if f"{name}={v}" not in domain.slow) for name, values in domain.choices}
        on_few = {"mesh": ((1, few.ranks), (few.ranks, 1)), **quick}
        report["parallel"] = rate("parallel", few, {"tokens": 100, **on_few}, run_of, options, group, store, place)
        if options.soundness:
            alarms = soundness(domain, run_of, options, group, store, report)
    record(options, backend, report)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file)
    return 1 if alarms else 0


def record(options: argparse.Namespace, backend: str, measured: dict[str, Any]) -> None:
    """Put the rates, and the false alarms if they were counted, into the file of --record."""
    ranks = f"{options.ranks} processes over gloo" if options.ranks else f"{options.simulate} simulated ranks"
    gpus = {"gpus": options.ranks} if backend == "nccl" else {}
    ranks = "NCCL" if gpus else ranks
    rates = {"exchanges": measured["exchange"]} | ({"whole layers": measured["parallel"]} if gpus else {})
    over = "over" if gpus else "on"
    values = {
        f"{what} {over} {ranks}": {"value": found["a_second"], "unit": "cases a second", **gpus} for what, found in rates.items()
    }
    if gpus:
        values["first verdict over NCCL, from the command"] = {"value": measured["first_verdict_s"], "unit": "s", **gpus}
    records.put(options, "speed", values, decimals=1)
    if options.soundness:
        counts, alarms = measured["soundness"]["counts"], measured["soundness"]["alarms"]
        what = f"`{options.adapter}` {over} {ranks}, {'laws ' + ', '.join(options.law) if options.law else 'every law'}"
        fields = {"cases": sum(counts.values()), "blind": counts.get(Verdict.BLIND, 0), "value": len(alarms), **gpus}
        records.put(options, "false alarms", {what: fields})


def rate(
    law: str,
    domain: PathDomain,
    fixed: dict[str, Any],
    run_of: RunOf,
    options: argparse.Namespace,
    group: Answering,
    store: Store,
    device: str,
    times: int = 1,
) -> dict[str, float]:
    """The number of cases and the cases per second of one law. All cases must hold or be blind.

    Both the warm-up (WARM) and the cases that are measured (--cases) are `times` as many.
    """
    from properties.paths.drawing import path_cases

    most = most_at_once(PATH_LAWS[law], group, device)
    done, start, warm = 0, 0.0, 0
    draw = functools.partial(seeded, path_cases(domain, **fixed), options.seed, times * (options.cases + WARM))
    for batch in batches(draw, most):
        ways = PATH_LAWS[law].variants or (None,)
        runs = [run_of(law, Example(case, None, ways[at % len(ways)])) for at, case in enumerate(batch, done)]
        for run, outcome in zip(runs, ask_all(runs, group, store), strict=True):
            assert outcome.verdict in (Verdict.HOLDS, Verdict.BLIND), (str(run), outcome)
        done += len(runs)
        if not start and done >= times * WARM:
            start, warm = time.perf_counter(), done
    took = time.perf_counter() - start
    result = {"cases": done - warm, "a_second": (done - warm) / took}
    print(f"  {law:<10} {result['a_second']:7.1f} cases a second ({done - warm} cases in {took:.1f} s)", flush=True)
    return result


def soundness(
    domain: PathDomain, run_of: RunOf, options: argparse.Namespace, group: Answering, store: Store, report: dict[str, Any]
) -> int:
    """Run every law that the adapter supports. Returns the number of false alarms."""
    laws = [law for law in options.law or PATH_LAWS if PATH_LAWS[law].needs(domain) is None]
    alarms, counts, start = [], dict[str, int](), time.perf_counter()
    worst: dict[str, float] = {}
    for law in laws:

        def look(example: Example, law: str = law) -> None:
            run = run_of(law, example)
            outcome: Outcome = ask(run, group, store)
            counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
            for name, ratio in outcome.ratios.items():
                worst[name] = max(worst.get(name, 0.0), ratio) if PATH_LAWS[law].kind == "truth" else worst.get(name, 0.0)
            if outcome.verdict in (Verdict.BROKEN, Verdict.UNKNOWN):
                alarms.append(str(run))
                print(
                    f"  {outcome.verdict} {run} {outcome.reason} {[str(finding) for finding in outcome.findings[:2]]}", flush=True
                )

        seeded(PATH_LAWS[law].draw(domain), options.seed, -(-options.soundness // len(laws)), look)
        print(
            f"  {law:<10} {sum(counts.values())} cases so far, {len(alarms)} alarms, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    report["soundness"] = {"counts": counts, "alarms": alarms, "worst": worst}
    print(f"  {counts}; worst error / allowed: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items() if ratio))
    return len(alarms)


if __name__ == "__main__":
    sys.exit(main())
