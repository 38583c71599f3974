"""The verb `across`: run lines in several places, each with another version of the implementation, and print a table."""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence

from verify.cli import terminal
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.hosts import deadline_of
from verify.cli.options import chosen_laws
from verify.cli.output import print_json, print_troubles, progress
from verify.cli.places import Repository, allow, path_place, python_place, release_place
from verify.cli.verb_options import AcrossOptions, Cases, Places, Versions
from verify.engine import across as engine
from verify.engine.across import NOT, Site, SiteVerdict, SiteWorkers
from verify.engine.check import Check
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings.store import Store
from verify.findings.text_table import text_table
from verify.process.cores import cores
from verify.process.worker import Worker


def across(options: AcrossOptions) -> int:
    """Run all lines in all places and print what each is in each. Returns the exit code."""
    runs, store = [Run.parse(line) for line in options.lines], Store()
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        places = places_of(options, [run.adapter for run in runs] or options.asked, stack)
        runs = runs or _lines(options, places[-1])
        placed = placed_of(options, places, store)
        with progress() as tell:
            columns = engine.matrix(placed, runs, options.workers or min(cores(), 4), tell)
    print_troubles(store, None)
    if not options.lines:
        runs, columns = _that_say_something(runs, columns)
    if options.json:
        about = [{"name": one.place.name, "option": one.place.option, "versions": one.versions} for one in placed]
        cells = [[cell.to_json() for cell in row] for row in zip(*columns, strict=True)]
        print_json({"lines": [str(run) for run in runs], "places": about, "cells": cells})
    else:
        _print(runs, placed, columns)
    verdicts = {cell.verdict for column in columns for cell in column}
    return BROKEN if engine.BROKEN in verdicts else UNDECIDED if NOT in verdicts else HOLDS


def places_of(options: Places, specs: Sequence[str], stack: contextlib.ExitStack) -> list[Site]:
    """The places in the order of the command line. ValueError if one is not there, or may not be downloaded."""
    allow([word for kind, word in options.places if kind == "release"], yes=options.yes)
    repository = Repository(specs) if any(kind == "rev" for kind, _ in options.places) else None
    places = []
    for kind, word in options.places:
        if kind == "rev":
            assert repository is not None
            places.append(repository.place(word, stack))
        elif kind == "path":
            places.append(path_place(word))
        else:
            places.append((release_place if kind == "release" else python_place)(word, stack))
    return places


def placed_of(options: Versions, places: Sequence[Site], store: Store) -> list[SiteWorkers]:
    """The processes of each place."""
    deadline_s, sequential = deadline_of(options), options.sequential
    return [SiteWorkers(place, deadline_s, store, number, sequential=sequential) for number, place in enumerate(places)]


def drawn(options: Cases, spec: str, place: Site, worker: Worker, device: str) -> list[Run]:
    """The lines that a check of an adapter would run on a device, drawn from what it declares in a place."""
    tune = str(options.seed) if device == "cuda" else ""
    name, profile = place.adapters.get(spec, spec), PROFILES[options.profile]
    settings = Settings(name, chosen_laws(options.law), profile, options.seed, device, tune)
    with Check(settings, [worker], defects=()) as check:
        return [dataclasses.replace(run, adapter=spec) for _, runs, _ in check.drawn() for run in runs]


def _lines(options: AcrossOptions, place: Site) -> list[Run]:
    """The lines of an adapter, drawn in the last place."""
    (spec,) = options.asked
    if place.trouble:
        raise ValueError(f"{spec} cannot be loaded in {place.name}, the last place: {place.trouble}")
    with place.worker("cpu", deadline_of(options)) as worker:
        if lines := drawn(options, spec, place, worker, "cpu"):
            return lines
    raise ValueError(f"--law must name a law with cases of {spec}, got {', '.join(options.law or ['none'])}")


def _that_say_something(runs: list[Run], columns: list[list[SiteVerdict]]) -> tuple[list[Run], list[list[SiteVerdict]]]:
    """The lines that can be asked in some place, with their verdicts; all of them if there are none."""
    kept = [number for number, _ in enumerate(runs) if any(column[number].verdict != NOT for column in columns)]
    if kept and (others := len(runs) - len(kept)):
        terminal.print_line(f"{others} of {len(runs)} drawn lines can be asked in no place, and are left out", sys.stderr)
        return [runs[number] for number in kept], [[column[number] for number in kept] for column in columns]
    return runs, columns


def _print(runs: Sequence[Run], placed: Sequence[SiteWorkers], columns: Sequence[Sequence[SiteVerdict]]) -> None:
    """Print the lines by number, the table, what is broken, and what cannot be asked."""
    for number, run in enumerate(runs, 1):
        terminal.print_line(f"{number:<4}{run}")
    names = [one.place.name for one in placed]
    rows = [(str(number), *(column[number - 1].short for column in columns)) for number, _ in enumerate(runs, 1)]
    terminal.write("\n".join(["", *text_table(("line", *names), rows), ""]), sys.stdout)
    for one, column in zip(placed, columns, strict=True):
        terminal.print_line(f"{one.place.name}: {one.versions or 'nothing could be loaded'}")
        reasons: dict[tuple[str, str], list[str]] = {}
        for number, cell in enumerate(column, 1):
            if cell.reason:
                reasons.setdefault((cell.verdict, cell.reason), []).append(str(number))
        for (verdict, reason), numbers in reasons.items():
            terminal.print_line(f"  {verdict}: line{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {reason}")
