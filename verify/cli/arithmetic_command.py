"""The verb `arithmetic`: measure how the device at hand computes, and compare that with what is known of its card."""

import contextlib
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.hosts import backend_of, device_of
from verify.cli.output import check_writable, write_file
from verify.cli.terminal import print_error, print_line, write
from verify.cli.verb_options import ArithmeticOptions
from verify.findings.text_table import text_table
from verify.gpu import device as devices
from verify.gpu.arithmetic.cards import Card, Comparison, Measure, compared, read
from verify.gpu.arithmetic.exchanges import EXCHANGES
from verify.gpu.arithmetic.probes import PROBES
from verify.process.worker import Worker, WorkerLost
from verify.ranks.group import Answering, Group, RankGroup
from verify.ranks.torchrun import TorchrunGroup, follow, launched

SOURCE = "gdn-verify arithmetic --record"
SERVES = "verify.gpu.arithmetic.service:answer"
RANKS = 4  # the most ranks without --ranks: tables have what two and four do
DEADLINE_S = 120.0  # of each probe
RESULTS = ("same", "DIFFERS", "NOT COVERED", "not known", "FAILED")


def act(options: ArithmeticOptions) -> int:
    """Run the probes, print the table, and write what the options name. Returns the exit code."""
    launch, device = launched(), device_of(options.device)
    if launch is not None and options.ranks not in (None, launch.size):
        raise ValueError(f"--ranks must be the {launch.size} that torchrun started, got {options.ranks}")
    ranks = launch.size if launch else options.ranks or min(RANKS, devices.gpus() if device == "cuda" else RANKS)
    backend = backend_of(options, launch.local_size if launch else ranks, device)
    if launch is not None and launch.rank:
        return follow(launch, backend, serves=SERVES)
    for option in ("json", "record"):
        check_writable(f"--{option}", getattr(options, option))
    if launch is None:
        return _measure(options, device, ranks, lambda: RankGroup(ranks, backend, DEADLINE_S, serves=SERVES))
    group = TorchrunGroup(launch, backend, DEADLINE_S, serves=SERVES)  # first, so that other ranks see that this one is alive
    with contextlib.closing(group):
        group.code = _measure(options, device, ranks, lambda: contextlib.nullcontext(group))
        return group.code


def _measure(options: ArithmeticOptions, device: str, ranks: int, group: Callable[[], AbstractContextManager[Group]]) -> int:
    """Ask a worker, and then ranks, for every measure, compare and report them. Returns the exit code."""
    start, measures, failed = time.monotonic(), list[Measure](), dict[str, str]()

    def ask(worker: Answering, probe: str) -> None:
        print_line(f"{time.monotonic() - start:5.1f} s  {probe}", sys.stderr)
        reply = asked(worker, {"probe": probe})
        measures.extend(Measure(**one) for one in reply.get("measures", ()))
        if reason := reply.get("failed") or reply.get("error") or ("" if reply.get("measures") else "it measured nothing"):
            failed[probe] = reason

    with Worker(DEADLINE_S, environment=devices.environment(device), serves=SERVES) as worker:
        host = asked(worker, {})
        if "error" in host:
            print_error(f"the device cannot be used: {host['error']}")
            return UNDECIDED
        for probe in PROBES:
            ask(worker, probe)
    if ranks > 1:
        with group() as joined:
            for probe in EXCHANGES:
                ask(joined, probe)
    today = datetime.date.today().isoformat()
    measured = Card(host["card"], today, SOURCE, host["versions"], {one.name: one.value for one in measures})
    card = read().get(measured.card)
    rows = compared(measures, failed, card)
    code = exit_code(rows)
    _print(measured, card, rows, ranks)
    written = _write(options, measured, card, rows, code)
    return code if written or code != HOLDS else UNDECIDED


def asked(worker: Answering, question: dict[str, Any]) -> dict[str, Any]:
    """What a worker or ranks answer, or {"error": ...} if they cannot."""
    try:
        return worker.ask(question)
    except WorkerLost as lost:
        return {"error": str(lost)}


def exit_code(rows: Sequence[Comparison]) -> int:
    """The exit code: 1 if the tolerances do not cover a measure; 3 if a probe failed or a measure is not known; otherwise 0."""
    if not all(row.covered for row in rows):
        return BROKEN
    return UNDECIDED if any(row.measured is None or row.known is None for row in rows) or not rows else HOLDS


def _print(measured: Card, card: Card | None, rows: Sequence[Comparison], ranks: int) -> None:
    print_line(f"{measured.card}; {_words(measured)}")
    print_line(f"known: {card.date}; {_words(card)}; {card.source}" if card else "known: there is no table for this card")
    cells = [(row.name, _cell(row.measured), _cell(row.known), row.result, row.concerns) for row in rows]
    write("\n".join(text_table(("probe", "measured", "known", "result", "concerns"), cells)), sys.stdout)
    if ranks < 2:
        print_line("collectives were not measured: there is one rank")
    counts = {word: sum(row.result.startswith(word) for row in rows) for word in RESULTS}
    print_line(", ".join(f"{count} {word}" for word, count in counts.items() if count))


def _words(card: Card) -> str:
    return ", ".join(f"{name} {version}" for name, version in card.versions.items())


def _cell(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _write(options: ArithmeticOptions, measured: Card, card: Card | None, rows: Sequence[Comparison], code: int) -> bool:
    """Write the files that the options name. Returns whether that worked."""
    written = True
    if options.json is not None:
        data = {
            "card": measured.card,
            "versions": measured.versions,
            "known_versions": card.versions if card else None,
            "probes": [row.to_json() for row in rows],
            "exit_code": code,
        }
        written &= write_file(options.json, json.dumps(data, indent=1) + "\n")
    if options.record is not None:
        written &= write_file(options.record, measured.text())
    return written
