"""The verb `twin`: may two implementations train and serve the same model? Prints how far they are apart, and why."""

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from verify.adapters.registry import AdapterError
from verify.cli import terminal
from verify.cli.across_command import drawn, placed_of, places_of
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.hosts import device_of
from verify.cli.output import finite, print_json, print_troubles, progress
from verify.cli.terminal import print_line
from verify.cli.verb_options import Cases, TwinOptions
from verify.engine.across import Site, SiteWorkers
from verify.engine.asking import describe
from verify.engine.twin.cases import cases_of, comparable, declared_for
from verify.engine.twin.causes import SIDES
from verify.engine.twin.measures import VOCABULARY, Drift, stretches
from verify.engine.twin.pairs import EXPLAINS, Relation, Side, Twins, run_of, shared_promises, twins
from verify.execution.twins import EXPLAINED
from verify.findings.store import Store
from verify.findings.text_table import text_table
from verify.process.cores import cores

TOKENS = {"quick": 1024, "interpreted": 192, "slow": 64}  # on a CPU, by what a token costs
ON_GPU = 4096
PROBED = 16  # tokens of a call that shows where modules come from; as 4096, a multiple of 16, for which Triton compiles anew
VISIBLE = 0.005  # a smaller share is printed as a dash
CODES = {Relation.SAME: HOLDS, Relation.ROUNDING: HOLDS, Relation.WRONG: BROKEN, Relation.UNDECIDED: UNDECIDED}


def twin(options: TwinOptions) -> int:
    """Compare two implementations and print what was found. Returns the exit code."""
    device, store, specs = device_of(options.device), Store(), (options.trainer, options.server)
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        places = places_of(options, specs, stack) or [Site("here", "")]
        places = places if len(places) == 2 else [dataclasses.replace(places[0], shared=True)] * 2
        placed = placed_of(options, places, store)
        for one in placed:
            stack.callback(one.close)
        sides = [_side(one, spec, device) for one, spec in zip(placed, specs, strict=True)]
        domains = [side.domain for side in sides]
        if domains[0].operation != domains[1].operation:
            words = " and ".join(f"{domain.operation} of {spec}" for domain, spec in zip(domains, specs, strict=True))
            raise ValueError(f"both must be of one operation, got {words}")
        costs = [one.described[spec].cost for one, spec in zip(placed, specs, strict=True)]
        tokens = options.tokens or (ON_GPU if device == "cuda" else min(TOKENS[cost] for cost in costs))
        cases = cases_of(domains, tokens, device, options.seed)
        laws = sorted({*shared_promises(sides).values()})
        asked = Cases(laws, "few", options.seed)
        lines = [drawn(asked, side.spec, side.workers.place, side.workers.worker(device), device) if laws else [] for side in sides]
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gdn-verify-"))
        runs = (device, str(options.seed) if device == "cuda" else "")
        if places[0].shared and places[0].folders:
            _check_place(sides, cases_of(domains, min(tokens, PROBED), device, options.seed)[0], runs)
        with progress() as tell:
            found = twins(sides, cases, lines, runs, folder, min(cores(), 2), tell)
    print_troubles(store, None)
    if options.json:
        print_json(_data(sides, device, found))
    else:
        _print(sides, found)
    return CODES[found.answer]


def _side(one: SiteWorkers, spec: str, device: str) -> Side:
    if one.place.trouble:
        raise AdapterError(f"{spec} cannot be loaded in {one.place.name}: {one.place.trouble}")
    one.described[spec] = describe(one.place.adapters.get(spec, spec), one.worker(device))
    return Side(one, spec, comparable(one.described[spec].domain))


def _check_place(sides: Sequence[Side], case: Any, runs: tuple[str, str]) -> None:
    """Call both sides, which share a place. AdapterError if neither imports anything from the place's folders."""
    for side in sides:
        side.workers.cell(run_of(side, case, runs), declared_for(case, side.domain))
    if all(side.workers.inside is False for side in sides):
        specs = [*dict.fromkeys(side.spec for side in sides)]
        what = f"{' and '.join(specs)} import{'s' * (len(specs) == 1)}"
        raise AdapterError(f"nothing was imported from {sides[0].workers.place.folders[0]}: it lacks what {what}")


def _sentence(found: Twins) -> str:
    """The verdict in a sentence."""
    if found.wrong:
        return f"the {' and the '.join(found.wrong)} {'are' if len(found.wrong) > 1 else 'is'} wrong"
    return str(found.answer)


def _print(sides: Sequence[Side], found: Twins) -> None:
    for name, side in zip(SIDES, sides, strict=True):
        place = f" in {side.workers.place.name}" if side.workers.place.option else ""
        print_line(f"{name:<14}{side.spec}{place}: {side.workers.versions or 'nothing could be loaded'}")
    pair = found.widest
    for name, line in zip(SIDES, pair.lines, strict=True):
        print_line(f"{name:<14}{line}")
    if pair.drift:
        drift, header = pair.drift, ("tokens", "|trainer - server| / |truth|", "unequal numbers", "log-probabilities")
        rows = [
            (f"{first}" if last == first + 1 else f"{first} to {last - 1}", *_row(drift, slice(first, last)))
            for first, last in stretches(len(drift.tokens))
        ]
        terminal.write("\n".join(["", *text_table(header, rows, {1, 2, 3}), ""]), sys.stdout)
        for label, text in _about(pair.unequal, drift):
            print_line(f"{label:<14}{text}")
    if found.causes:
        known = [(cause, cause.share >= VISIBLE) for cause in found.causes]
        rows = [(cause.knob, f"{cause.share:.0%}" if seen else "-", cause.switch * seen) for cause, seen in known]
        terminal.write("\n".join(["", *text_table(("switched", "explains", "best switch"), rows, {1}), ""]), sys.stdout)
    for words in (words for pair in found.pairs for words in pair.left):
        print_line(f"{'not called':<14}{words}")
    for number, name in enumerate(SIDES):
        cell = found.distance(number)
        print_line(f"{'distance':<14}{name}: {cell.short}" + (f": {cell.reason}" if cell.reason else " of the tolerance"))
    for kept in found.promises:
        told = [cell.short + (f" ({cell.reason})" if cell.reason else "") for cell in kept.cells]
        words = ", ".join(f"{name} {what}" for name, what in zip(SIDES, told, strict=True))
        print_line(f"{'promise':<14}{kept.promise} (law {kept.law}): {words}")
    cause = found.cause
    print_line(f"{'cause':<14}{_cause(found)}")
    print_line(f"{'verdict':<14}{_sentence(found)}" + (f": {cause.knob}" if cause and found.wrong else ""))


def _row(drift: Drift, where: slice) -> tuple[str, ...]:
    """The largest difference, the share of unequal numbers, and the mean difference of log-probabilities of some tokens."""
    unequal, logs = drift.unequal[where], drift.log_tokens[where]
    return f"{max(drift.tokens[where]):.1e}", f"{sum(unequal) / len(unequal):.1%}", f"{sum(logs) / len(logs):.1e}"


def _about(unequal: dict[str, float], drift: Drift) -> list[tuple[str, str]]:
    shares = ", ".join(f"{name} {share:.2%}" for name, share in unequal.items())
    first = "no token differs" if drift.first is None else f"the first token that differs is {drift.first}"
    logs = f"mean {drift.log_mean:.2g}, largest {drift.log_max:.2g} over {VOCABULARY} tokens of a fixed random head"
    return [("unequal", f"{shares}; {first}"), ("log-probs", f"{logs}; the most likely token differs at {drift.changed:.2%}")]


def _cause(found: Twins) -> str:
    if found.cause:
        return f"{found.cause.knob}: {found.cause.switch} explains {found.cause.share:.0%} of the squared difference"
    if found.causes:
        return f"no single switch explains {EXPLAINS:.0%}"
    if absent := found.widest.absent:
        return f"not looked for: the {' and the '.join(absent)} did not run"
    equal = not found.widest.unequal.get(found.widest.y)
    return "there is no difference" if equal else f"not looked for: the first {EXPLAINED} tokens are equal, or not numbers"


def _data(sides: Sequence[Side], device: str, found: Twins) -> dict[str, Any]:
    """What was found, as plain data. Numbers that are not finite are null."""
    return {
        "sides": [
            {"name": name, "adapter": side.spec, "place": side.workers.place.name, "versions": side.workers.versions}
            for name, side in zip(SIDES, sides, strict=True)
        ],
        "device": device,
        "answer": str(found.answer),
        "wrong": found.wrong,
        "cause": dataclasses.asdict(found.cause) if found.cause else None,
        "causes": [finite(dataclasses.asdict(cause)) for cause in found.causes],
        "cases": [finite({**dataclasses.asdict(pair), "cells": [cell.to_json() for cell in pair.cells]}) for pair in found.pairs],
        "promises": [
            {"promise": kept.promise, "law": kept.law, "cells": [cell.to_json() for cell in kept.cells]} for kept in found.promises
        ],
    }
