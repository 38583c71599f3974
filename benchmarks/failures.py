"""Failures: the time from the command `check` to the first printed failure, of wrong implementations in a file.

    python -m benchmarks.failures --animals 30

The zoo's wrong implementations of the rules are put into a file, one class each, as a user's adapter would be. Each is checked
with `gdn-verify check FILE:CLASS`, with no other option about laws or cases. We read what the command prints. When the
first line with BROKEN comes, the case has been shrunk and explained. We note the seconds and the CPU seconds of all processes of
the command, and interrupt it.
"""

import argparse
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks import records
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.zoo.animals import animals

TARGET_S = 40.0
TICK = os.sysconf("SC_CLK_TCK")
GIVEN_UP_S = 1200.0


def main() -> int:
    """Measure, print and record. Returns 1 if the median of the seconds is over the target, or if no law was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--animals", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = records.options_of(parser)
    names = [
        name for name, animal in animals().items() if issubclass(animal.kind, Adapter) and isinstance(animal.kind.domain, Domain)
    ]
    walls, cpus, silent = [], [], 0
    for name in random.Random(options.seed).sample(names, min(options.animals, len(names))):
        with tempfile.TemporaryDirectory(prefix="gdn-verify-failures-") as folder:
            wall, cpu, law = first_failure(name, pathlib.Path(folder))
        if not law:
            silent += 1
        else:
            walls.append(wall)
            cpus.append(cpu)
        print(f"{name:<40} {wall:6.1f} s, CPU {cpu:6.1f} s  {law or 'no law is broken'}", flush=True)
    if not walls:
        print(f"nothing to measure: no law was broken in {silent} wrong implementations")
        return 1
    wall, cpu = statistics.median(walls), statistics.median(cpus)
    print(
        f"{len(walls)} wrong implementations: median {wall:.1f} s, CPU {cpu:.1f} s; "
        f"longest {max(walls):.1f} s, CPU {max(cpus):.1f} s; {silent} without a broken law"
    )
    for kind, values in (("seconds", walls), ("CPU seconds", cpus)):
        value = {"value": statistics.median(values), "unit": "s", "spread": [min(values), max(values)]}
        value["sample"] = f"{len(values)} rules"
        records.put(options, "speed", {f"{kind} from the command to the first failure, wrong rules in a file": value}, decimals=1)
    return int(wall > TARGET_S)


def first_failure(name: str, folder: pathlib.Path) -> tuple[float, float, str]:
    """The seconds and the CPU seconds until the first failure is printed, and its law; "" if there is none."""
    kind = animals()[name].kind
    file = folder / "wrong.py"
    file.write_text(
        f"from {kind.__module__} import {kind.__name__}\n\n\nclass Wrong({kind.__name__}):\n    pass\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "verify", "check", f"{file}:Wrong", "--no-examples", "--findings", str(folder / "findings")]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    assert process.stdout is not None
    given_up = threading.Timer(GIVEN_UP_S, process.send_signal, [signal.SIGINT])  # then the command prints its last line
    given_up.daemon = True
    given_up.start()
    law, cpu = "", 0.0
    for line in process.stdout:
        if line.startswith("BROKEN"):
            law = line.split("·")[0].split()[-1]
            break
        cpu = cpu_of(process.pid) or cpu
    given_up.cancel()
    wall, cpu = time.monotonic() - start, max(cpu, cpu_of(process.pid))
    process.send_signal(signal.SIGINT)  # nothing happens to a process that has ended
    try:
        process.communicate(timeout=60)  # this closes the pipe
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return wall, cpu, law


def cpu_of(pid: int) -> float:
    """The CPU seconds of a process and of all processes that it started, including those that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))

    def below(one: int) -> bool:
        while one and one != pid:
            one = parents.get(one, 0)
        return one == pid

    return sum(count for one, count in ticks.items() if below(one)) / TICK


if __name__ == "__main__":
    sys.exit(main())
