"""The verb `compare`: judge an old and a new version of an implementation on the same cases, and print what differs."""

import contextlib
import dataclasses
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from verify.adapters.registry import AdapterError
from verify.cli import terminal
from verify.cli.across_command import drawn, placed_of, places_of
from verify.cli.exits import BROKEN as EXIT_BROKEN
from verify.cli.exits import HOLDS as EXIT_HOLDS
from verify.cli.exits import UNDECIDED
from verify.cli.hosts import deadline_of, device_of
from verify.cli.options import chosen_laws
from verify.cli.output import print_json, print_troubles, progress
from verify.cli.terminal import marks_of, print_error, print_line
from verify.cli.verb_options import CompareOptions
from verify.engine import compare as engine
from verify.engine.across import BROKEN, HOLDS, NOT, Site, SiteVerdict, SiteWorkers
from verify.engine.asking import describe
from verify.engine.compare import (
    APART,
    BOTH,
    BROKE,
    CHANGES,
    FAILS,
    MENDED,
    NEITHER,
    REFUSED,
    STEPS,
    UNKNOWN,
    BeforeAfter,
    Differences,
    Errors,
    Timing,
    distribution,
)
from verify.execution.line import Run
from verify.findings import known
from verify.findings.store import Store
from verify.findings.text_table import text_table
from verify.process.cores import cores

SHOWN = 3  # lines of each change
TOLD = tuple(change for change in CHANGES if change not in (BOTH[HOLDS], NEITHER))  # the changes of which lines are shown
WIDTH = 100


def compare(options: CompareOptions) -> int:
    """Compare two versions and print what differs. Returns the exit code."""
    device, deadline_s, store = device_of(options.device), deadline_of(options), Store()
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        sites = _sites(options, places_of(options, options.adapters, stack))
        placed = placed_of(options, sites, store)
        for one in placed:
            stack.callback(one.close)
        runs = _drawn(options, placed, device)
        with progress() as tell:
            found = engine.compare(placed, runs, min(cores(), 2), tell)
        if device == "cuda":
            engine.timed(found, runs, lambda number: SiteWorkers(sites[number], deadline_s, store))
    print_troubles(store, None)
    told = _Told(options, device, placed, found)
    if options.json:
        print_json(_data(told))
    else:
        _print(told)
    return {True: EXIT_BROKEN, False: EXIT_HOLDS, None: UNDECIDED}[told.worse]


@dataclasses.dataclass(frozen=True)
class _Told:
    """A comparison, and what it was made from."""

    options: CompareOptions
    device: str
    placed: Sequence[SiteWorkers]
    found: Differences

    @property
    def worse(self) -> bool | None:
        """Whether the new version is worse; None if that is undecided."""
        return self.found.worse(same_bits=self.options.same_bits)


def _sites(options: CompareOptions, places: Sequence[Site]) -> list[Site]:
    """The places of the old and the new version; where there are two adapters, they are in the names too."""
    specs, sites = ([*options.adapters] * 2)[:2], ([*places] * 2)[:2] or [Site("here", "")] * 2
    if len(options.adapters) == 1:
        return sites
    words = [f" in {site.name}" if places else "" for site in sites]
    return [dataclasses.replace(site, name=spec + word) for site, spec, word in zip(sites, specs, words, strict=True)]


def _drawn(options: CompareOptions, placed: Sequence[SiteWorkers], device: str) -> list[tuple[Run, Run]]:
    """The cases that a check of the old version would run, and those of known defects, each as a line of both versions.

    If the old version cannot be loaded, they are those of the new one.
    """
    specs, domains, runs, laws = ([*options.adapters] * 2)[:2], list[Any](), list[Run](), chosen_laws(options.law)
    for one, spec in zip(placed, specs, strict=True):
        try:
            if one.place.trouble:
                raise AdapterError(one.place.trouble)
            one.described[spec] = describe(one.place.adapters.get(spec, spec), one.worker(device))
            domains.append(one.described[spec].domain)
            runs = runs or drawn(options, spec, one.place, one.worker(device), device)
        except AdapterError as error:
            domains.append(None)
            print_error(f"{one.place.name}: {error}")
    if len(operations := {domain.operation for domain in domains if domain}) > 1:
        raise ValueError(f"both versions must be of one operation, got {' and '.join(sorted(operations))}")
    shown = (defect.run for spec in dict.fromkeys(specs) for defect in known.of(spec) if not defect.kernel)
    runs += [run for run in shown if run.adapter in specs and run.device == device and (laws is None or run.law in laws)]
    if not runs:
        raise ValueError("there is no case to compare: no version can be loaded, or --law names no law with cases of the adapter")
    sides = [
        [engine.suited(dataclasses.replace(run, adapter=spec), domain) for run in runs]
        for spec, domain in zip(specs, domains, strict=True)
    ]
    return list(dict.fromkeys(zip(*sides, strict=True)))


def _data(told: _Told) -> dict[str, Any]:
    """The comparison as plain data."""
    found, placed = told.found, told.placed
    sides = [{"name": one.place.name, "option": one.place.option, "versions": one.versions} for one in placed]
    return {
        "places": sides,
        "device": told.device,
        "worse": told.worse,
        "lost": found.lost,
        "laws": {law: change for law, (change, _) in found.laws().items()},
        "lines": [
            {
                "line": str(pair.run),
                "change": pair.change,
                "old": pair.old.to_json(),
                "new": pair.new.to_json(),
                "ratios": pair.ratios,
            }
            for pair in found.pairs
        ],
        "errors": [{**dataclasses.asdict(one), "word": one.word} for one in found.errors],
        "bits": found.bits,
        "unsteady": found.unsteady,
        "parameters": found.parameters,
        "domain": found.domain,
        "refusals": found.refusals,
        "timings": [dataclasses.asdict(timing) for timing in found.timings],
        "untimed": "" if found.timings else found.untimed,
        "paragraph": _paragraph(told),
    }


def _print(told: _Told) -> None:
    found = told.found
    for word, one in zip(("old", "new"), told.placed, strict=True):
        print_line(f"{word}         {one.place.name}: {one.versions or 'nothing could be loaded'}")
    rows = [(law, _counts(pairs, "old"), _counts(pairs, "new"), change) for law, (change, pairs) in found.laws().items()]
    tables = [text_table(("law", "old", "new", "change"), rows)]
    if found.errors:
        marks = marks_of(sys.stdout)
        scale = f"error / tolerance, 1/{1 / STEPS[0]:g} to 1: old, new"
        header = ("output", "lines", scale, "median new / old", "largest", "errors")
        tables.append(text_table(header, [_row(one, marks) for one in found.errors]))
    terminal.write("\n".join(["", *(line for table in tables for line in (*table, ""))]), sys.stdout)
    for change in TOLD:
        for number, pair in enumerate(pairs := found.of(change)):
            if number < SHOWN:
                print_line(f"{change}: {pair.run}\n  old: {_told(pair.old)}\n  new: {_told(pair.new)}")
        if len(pairs) > SHOWN:
            print_line(f"{change}: and {len(pairs) - SHOWN} more lines, which --json lists")
    for error in found.errors:
        if error.line and (error.word == "grew" or max(error.new) > APART * max(error.old)):
            print_line(f"errors of {error.output} grew most in: {error.line}")
    for label, text in _facts(found):
        print_line(f"{label:<14}{text}")
    for timing in found.timings:
        print_line(f"timed: {timing.line}")
    terminal.write("\nto paste:\n\n" + textwrap.fill(_paragraph(told), WIDTH), sys.stdout)


def _counts(pairs: Iterable[BeforeAfter], side: str) -> str:
    """How many lines of a law have each verdict on a side."""
    cells = [getattr(pair, side).verdict for pair in pairs]
    words = {HOLDS: "hold", BROKEN: "broken", NOT: "not asked"}
    return ", ".join(f"{cells.count(verdict)} {word}" for verdict, word in words.items() if verdict in cells)


def _row(one: Errors, marks: str) -> tuple[str, ...]:
    """The row of an output in the table of errors, with a picture of each distribution."""
    pictures = []
    for ratios in (one.old, one.new):
        counts = distribution(ratios)
        pictures.append("".join(marks[-(-count * (len(marks) - 1) // max(1, *counts))] for count in counts))
    words = [f"{count} {word}" for count, word in ((one.grew, "grew"), (one.shrank, "shrank")) if count]
    largest, word = f"{max(one.old):.2g} -> {max(one.new):.2g}", f"{one.word} ({', '.join(words)})" if words else one.word
    return one.output, str(len(one.old)), "  ".join(pictures), f"{one.factor:.2f}", largest, word


def _told(cell: SiteVerdict) -> str:
    return f"{cell.short}: {cell.reason}" if cell.reason else cell.short


def _facts(found: Differences) -> list[tuple[str, str]]:
    """What differs beside the verdicts: a label and a sentence each."""
    differ = [name for names in found.bits.values() for name in names]
    outputs = ", ".join(f"{name} in {differ.count(name)}" for name in dict.fromkeys(differ))
    equal = sum(not names for names in found.bits.values())
    bits = f"equal in {equal} of {len(found.bits)} calls" + (f"; they differ in {outputs}" if differ else "")
    facts = [("bits", bits)] if found.bits else []
    facts += [("promise lost", text) for text in found.lost]
    facts += [("parameters", text) for text in found.parameters or ["the same"]]
    facts += [("domain", text) for text in found.domain]
    facts += [("refusals", f"{name}: {old} before, {new} now") for name, (old, new) in found.refusals.items()]
    facts += [("time, memory", _time(timing)) for timing in found.timings]
    return facts if found.timings else [*facts, ("time, memory", found.untimed)]


def _time(timing: Timing) -> str:
    low, *_, high = timing.factors
    middle = statistics.median(timing.factors)
    memory = f"{timing.old_bytes / 2**20:.1f} MiB before, {timing.new_bytes / 2**20:.1f} MiB now"
    ms = [statistics.median(times) for times in (timing.old_ms, timing.new_ms)]
    return f"{ms[0]:.3f} ms before, {ms[1]:.3f} ms now, {middle:.2f} times ({low:.2f} to {high:.2f}); {memory}"


def _paragraph(told: _Told) -> str:
    """What a reviewer must know, as a paragraph of Markdown."""
    options, placed, found = told.options, told.placed, told.found
    verdict = {True: "**The new version is worse.**", False: "**Nothing is worse.**", None: "**This is undecided.**"}[told.worse]
    counts = {change: found.of(change) for change in CHANGES}
    laws = {change: list(dict.fromkeys(pair.run.law for pair in pairs)) for change, pairs in counts.items()}
    compared = [pair for pair in found.pairs if pair.change != NEITHER]
    count, names = len(found.laws()), " and ".join(dict.fromkeys(options.adapters))
    parts = [
        f"gdn-verify judged `{placed[0].place.name}` and `{placed[1].place.name}` by a float64 oracle on the same {len(compared)} "
        f"cases of {count} law{'s' * (count > 1)} ({names}, profile {options.profile}, seed {options.seed}, {told.device}; "
        f"{placed[1].versions}). {verdict}"
    ]
    for change in (BROKE, FAILS, MENDED, REFUSED, UNKNOWN, BOTH[BROKEN]):
        if pairs := counts[change]:
            line = f": `{pairs[0].run}`" if change in (BROKE, FAILS, MENDED) else ""
            cases = "1 case" if len(pairs) == 1 else f"{len(pairs)} cases"
            parts.append(f"{change.capitalize()}: {cases} of {', '.join(laws[change])}{line}.")
    errors = {word: [one.output for one in found.errors if one.word == word] for word in ("grew", "shrank")}
    parts += [f"Errors {word} in {', '.join(outputs)}." for word, outputs in errors.items() if outputs]
    if found.errors and not any(errors.values()):
        parts.append("Errors within the tolerances are as large as before.")
    parts += [f"{label.capitalize()}: {text}." for label, text in _facts(found) if label not in ("domain", "refusals")]
    words = [*options.adapters, *dict.fromkeys(one.place.option for one in placed), *(f"--law {law}" for law in options.law or ())]
    words += [f"--profile {options.profile} --seed {options.seed}", "--same-bits" * options.same_bits]
    if found.refusals:
        parts.append(f"Illegal inputs that are treated otherwise: {', '.join(found.refusals)}.")
    return " ".join([*parts, f"Command: `gdn-verify compare {' '.join(filter(None, words))}`."])
