"""`check --tune sweep`: run every configuration of every autotuned kernel, and write the deny-list."""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TextIO

from verify.adapters.packages import installed
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.hosts import compilers_of, deadline_of
from verify.cli.output import JsonLines, progress
from verify.cli.terminal import print_line
from verify.cli.verb_options import CheckOptions
from verify.engine.asking import describe, started
from verify.engine.sweep import Sweep
from verify.findings import known
from verify.findings.store import Store
from verify.gpu import policies


def sweep(
    options: CheckOptions, spec: str, denied: Sequence[policies.Denied], device: str, seed: int, store: Store, out: TextIO
) -> int:
    """Sweep every configuration of every kernel and write the deny-list. Returns the exit code."""
    count = options.workers or max(1, compilers_of(device))
    workers = started(device, count, deadline_of(options), sequential=options.sequential)
    with contextlib.ExitStack() as undo, JsonLines(options.json) as lines, progress() as on_case:
        for worker in workers:
            undo.callback(worker.close)
        described = describe(spec, workers[0])
        products = options.products or ("ieee" if device == "cpu" else described.products)
        where = f", on {described.device}" if described.device else ""
        print_line(f"{spec}  {described.versions}  sweep, seed {seed}{where}", out)
        start = time.monotonic()
        sweep = Sweep(
            described,
            workers,
            store,
            seed=seed,
            device=device,
            products=products,
            defects=known.of(spec, options.known, denied).on(described.device),
            on_run=lambda done, of: on_case("sweep", done, of),
        )
        swept = sweep.run()
        for line in swept.lines():
            print_line(line, out)
        place = described.device or "interpreter", installed("triton") or "none"
        wrong = [entry for fault in swept.faults for entry in fault.denied(*place)]
        total = sum(map(len, swept.ran.values()))
        line = f"{len(swept.faults)} wrong of {total} configurations of {len(swept.known)} kernels"
        line += f"; {swept.runs} runs in {time.monotonic() - start:.0f} s"
        if options.deny and wrong:
            policies.write_denied(options.deny, [*_denied_before(options.deny), *wrong])
            line += f"; deny-list in {options.deny}"
        print_line(line, out)
        lines(swept.to_json())
    store.close()
    return lines.code(BROKEN if swept.faults else UNDECIDED if swept.undecided else HOLDS)


def _denied_before(path: str) -> list[policies.Denied]:
    return policies.read_denied(path) if os.path.exists(path) else []
