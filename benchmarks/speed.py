"""Speed: how soon `check` says something, how long it takes, and what the oracle costs beside the kernel it judges.

    python -m benchmarks.speed fla/chunk --runs 3

It runs `check` with its default profile several times, and prints the median and spread of the seconds until the first verdict and
until the end. It also prints the median, over cases of the law `oracle`, of the time of the oracle divided by that of the kernel.
"""

import argparse
import statistics
import subprocess
import sys
import time

from properties.rule_laws import LAWS
from properties.strategies import Example
from verify.engine.asking import ask, describe
from verify.engine.drawing import seeded
from verify.engine.profiles import PROFILES
from verify.execution.run import Run
from verify.findings.store import Store
from verify.process.worker import Worker


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    first, whole, exits = [], [], []
    for _ in range(options.runs):
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "verify", "check", options.adapter], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        seen = [time.monotonic() - start for line in process.stdout if line.split(" ")[0] in ("HOLDS", "BROKEN", "UNKNOWN")]
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
    return 0


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

        seeded(LAWS["oracle"].draw(domain), 0, PROFILES["quick"].examples_of("oracle"), look)
    store.close()
    return shares


if __name__ == "__main__":
    sys.exit(main())
