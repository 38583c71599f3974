"""Speed: how soon `check` says something, how long it takes, and what the oracle costs beside the kernel it judges.

    python -m benchmarks.speed fla/chunk --runs 3

It runs `check` with its default profile several times, and prints the median and spread of the seconds until the first verdict and
until the end. It also prints the median, over cases of the law `oracle`, of the time of the oracle divided by that of the kernel.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time

from benchmarks import records
from properties.rules.laws import LAWS
from properties.words.example import Example
from verify.engine.asking import ask, describe
from verify.engine.drawing import of_law
from verify.engine.profiles import PROFILES
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.worker import Worker


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter")
    parser.add_argument("--runs", type=int, default=3)
    options = records.options_of(parser)
    first, whole, exits, last = [], [], [], ""
    for _ in range(options.runs):
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "verify", "check", options.adapter], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        seen = []
        for last in process.stdout:
            seen += [time.monotonic() - start] if last.split(" ")[0] in ("HOLDS", "BROKEN", "UNKNOWN") else []
        exits.append(process.wait())
        first.append(seen[0])
        whole.append(time.monotonic() - start)
    for name, values in (("first verdict", first), ("whole check", whole)):
        spread = f"{min(values):.1f} to {max(values):.1f} s, {options.runs} runs"
        print(f"{options.adapter} {name}: median {statistics.median(values):.1f} s ({spread})")
    print(f"exit codes {exits}")
    shares = share(options.adapter)
    middle = statistics.quantiles(shares, n=4)
    print(
        f"oracle and bounds / kernel: median {statistics.median(shares):.2f}, quartiles {middle[0]:.2f} and {middle[2]:.2f}, "
        f"{len(shares)} cases of the oracle law"
    )
    record(options, first, whole, shares, last)
    return 0


def record(options: argparse.Namespace, first: list[float], whole: list[float], shares: list[float], last: str) -> None:
    """Put the seconds, the shares and the counts in the last line of the check into the file of --record."""
    values = {"first law decided": first, "whole check": whole}
    measured: dict[str, records.Record] = {
        f"`{options.adapter}`: {what}": {"value": statistics.median(seconds), "unit": "s", "spread": [min(seconds), max(seconds)]}
        for what, seconds in values.items()
    }
    if counts := re.search(r"of (\d+ laws) .*?; (\d+ cases)", last):
        measured[f"`{options.adapter}`: whole check"]["sample"] = ", ".join(counts.groups())
    low, middle, high = statistics.quantiles(shares, n=4)
    share = f"`{options.adapter}`: oracle and tolerances / interpreted kernel, median and quartiles over cases"
    records.put(options, "speed", measured, decimals=1)
    records.put(options, "speed", {share: {"value": middle, "spread": [low, high]}}, decimals=2)


def share(adapter: str) -> list[float]:
    """For each case of the law `oracle` in the default profile, the seconds of the oracle divided by those of the kernel."""
    shares: list[float] = []
    store = Store()
    with Worker() as worker:
        domain = describe(adapter, worker).domain

        def look(example: Example) -> None:
            outcome = ask(Run("oracle", adapter, example), worker, store)
            if outcome.kernel_s:
                shares.append(outcome.oracle_s / outcome.kernel_s)

        of_law(LAWS["oracle"], domain, 0, PROFILES["quick"].examples_of(LAWS["oracle"]), look)
    store.close()
    return shares


if __name__ == "__main__":
    sys.exit(main())
