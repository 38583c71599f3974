"""The verb `zoo`: run the laws against the wrong implementations and print what they find; the exit code says if any survived."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence

from properties.books import book_for, book_of
from verify.cli.exits import BROKEN, HOLDS, INTERRUPTED
from verify.zoo import kill_table as table
from verify.zoo import mutation, page
from verify.zoo.animals import LETTERS, animals, chosen
from verify.zoo.hunt import Hunt
from verify.zoo.trials import Trial, Trials, is_eligible, load, suites

EXITS = "exit: 0 every animal that was run is killed   1 one survives, or right code is rejected   2 bad usage   130 interrupted"
Progress = Callable[[], "contextlib.AbstractContextManager[Callable[[str, int, int], None]]"]


def arguments(parser: argparse.ArgumentParser, seed: Callable[[str], int], positive: Callable[[str], int]) -> None:
    """Add the verb's options. `seed` and `positive` parse their numbers."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="run only these animals, or your own as FILE.py:CLASS (default: all)"
    )
    parser.add_argument("--law", action="append", metavar="LAW", help="check only this law (may be repeated)")
    parser.add_argument(
        "--letter", action="append", choices=LETTERS, help="run only animals of this class of defects (may be repeated)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the cases (default 0)")
    parser.add_argument(
        "--workers",
        type=positive,
        default=min(os.cpu_count() or 1, 4),
        help="number of processes (default: one for each core, at most 4)",
    )
    parser.add_argument(
        "--deadline",
        type=positive,
        default=10,
        metavar="S",
        help="seconds after which a run counts as a hang, which is a kill (default 10)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write one JSON object to FILE")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page to FILE (needs the extra zoo)")
    parser.add_argument(
        "--rule",
        action="append",
        metavar="SUITE",
        help="run a test suite on the animals: your inputs and acceptance rule as FILE.py:NAME, or a published suite: "
        f"{', '.join(suites())}, or all of them (may be repeated)",
    )
    mutants = parser.add_argument_group("mutants of a kernel's own source, in place of animals")
    mutants.add_argument(
        "--mutate", metavar="ADAPTER", help="edit the Triton kernels that this adapter launches, at one place in each mutant"
    )
    mutation.arguments(mutants, positive)


def act(options: argparse.Namespace, progress: Progress) -> int:
    """Run the hunt and report. Returns the exit code."""
    if options.mutate:
        return mutation.act(options, options.mutate)
    for name in options.law or ():
        book_for(name, None)
    asked = chosen(options.names, options.letter or ())
    rules = list(dict.fromkeys(name for rule in options.rule or () for name in (suites() if rule == "all" else [rule])))
    for rule in rules:
        load(rule)
    if rules:
        asked = [animal for animal in asked if is_eligible(animal)]
    if not asked:
        raise ValueError(
            "no animal has one of these names and one of these letters" + (" and can be judged by a suite" if rules else "")
        )
    if options.html:
        page.check()
    for place in (options.json, options.html):
        _writable(place)
    if options.law:
        asked = [animal for animal in asked if set(options.law) & set(book_of(animal.kind.domain).laws)]
        if not asked:
            raise ValueError(f"law {', '.join(options.law)} is about none of the chosen animals")
    hunting = Hunt(
        asked, options.law, options.seed, options.workers, deadline_s=float(options.deadline), until=1 if rules else None
    )
    trials: list[Trial] = []
    interrupted = False
    with hunting as hunt, progress() as on_case:
        hunt.on_case = on_case
        try:
            if rules:
                with Trials(rules, asked, options.workers, deadline_s=float(options.deadline), on_case=on_case) as trying:
                    trials = trying.trials
                    trying.run()
            hunt.run()
        except KeyboardInterrupt:
            interrupted = True
    lines = table.rule_lines(hunt, trials) if rules else table.lines(hunt)
    print("\n".join([*lines, *(["interrupted: not every law was run on every animal"] if interrupted else [])]), flush=True)
    data = table.to_json(hunt, trials, interrupted=interrupted)
    if options.json:
        _write(options.json, json.dumps(data, indent=1) + "\n")
    if options.html:
        _write(options.html, page.page(data))
    return INTERRUPTED if interrupted else exit_code(hunt, trials)


def exit_code(hunt: Hunt, trials: Sequence[Trial]) -> int:
    """The exit code: 1 if a wrong implementation survives its cases, or right code is rejected; otherwise 0."""
    if trials:
        bad = any(trial.error or trial.rejects_right or trial.killed < len(trial.killed_at) for trial in trials)
    else:
        bad = any(fate.verdict != "killed" for fate in hunt.fates)
    return BROKEN if bad or hunt.alarms else HOLDS


def listed() -> str:
    """The line about the zoo that `list` prints."""
    return f"zoo/NAME             {len(animals())} wrong implementations, on which this runs the laws: python -m verify zoo"


def _writable(place: str | None) -> None:
    """Refuse a file that cannot be written, before any work is done. The file is not changed."""
    if place is not None:
        try:
            with open(place, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise ValueError(f"cannot write to {place}: {error.strerror}") from None


def _write(place: str, text: str) -> None:
    try:
        with open(place, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        print(f"gdn-verify: cannot write to {place}: {error.strerror}", file=sys.stderr)
