"""The kill table as lines of text and as plain data. This module decides nothing and prints nothing."""

import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from verify.adapters.packages import installed
from verify.findings.text_table import text_table
from verify.zoo.hunt import IN_FULL, PROFILE, QUARTER, Fate, Hunt, summary
from verify.zoo.incidents import INCIDENTS, LETTERS
from verify.zoo.trials import Trial

WIDTH = 132


def fate_lines(fate: Fate) -> list[str]:
    """The lines of an animal: name, class, incidents, the laws that kill it and in which case, story, and the smallest case."""
    animal, killers = fate.animal, fate.killers
    rows = " ".join(map(str, animal.incident))
    head = f"{animal.name:<28} {animal.letter}  {rows:<10}"
    if not killers:
        asked = [cell for cell in fate.cells.values() if cell.asked]
        cases = sum(cell.asked for cell in asked)
        what = f"{cases} cases of {len(asked)} laws" if asked else "no law was run on it"
        lines = [f"{head} {fate.verdict.upper():<20} {what}"]
        lines += [f"    {cell.law}: {cell.state}: {cell.reason}" for cell in fate.cells.values() if cell.state == "undecided"]
        return [*lines, *_wrapped(animal.story)]
    first = killers[0]
    by = ", ".join(f"{cell.law} {cell.killed_at}" for cell in killers)
    lines = _wrapped(f"{head} case {first.killed_at:<3} {first.seconds:6.2f} s  {by}", "", " " * 61)
    return [*lines, *_wrapped(animal.story), f"    {fate.smallest or first.run}"]


def _wrapped(text: str, first: str = "    ", rest: str = "    ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False)


def lines(hunt: Hunt) -> list[str]:
    """The lines of the whole table. Survivors come last and are repeated in the summary."""
    order = {"killed": 0, "not asked": 1, "not finished": 2, "SURVIVES": 3}
    output = [f"{'animal':<28} cl rows       first kill           laws that kill it, and in which case"]
    for fate in sorted(hunt.fates, key=lambda fate: order[fate.verdict]):
        output += fate_lines(fate)
    return [*output, "", *summary_lines(hunt)]


def summary_lines(hunt: Hunt) -> list[str]:
    """The summary of a hunt. False alarms and survivors come last, where they are not overlooked."""
    told = summary(hunt)
    median = f"; median {told.median_cases:g} cases to the kill" if told.median_cases is not None else ""
    output = [f"{told.animals} animals: {told.killed} killed, {told.alive} alive{median}; {told.runs} runs in {told.wall_s:.0f} s"]
    if told.not_finished:
        output.append(f"{told.not_finished} not finished: they are alive so far, and some of their cases were not run")
    if told.not_asked:
        output.append(f"{told.not_asked} not asked")
    for book in dict.fromkeys(name.partition("/")[0] for name in told.kills_of_law):
        kills = {name.partition("/")[2]: kills for name, kills in told.kills_of_law.items() if name.startswith(f"{book}/")}
        words = ", ".join(f"{name} {number}" for name, number in kills.items() if number)
        idle = ", ".join(name for name, number in kills.items() if not number)
        output += _wrapped(f"kills of {book}: {words or 'none'}" + (f"; none by {idle}" if idle else ""), "", "  ")
    twins = " ".join(map(str, told.twins)) or "none"
    output += _wrapped(f"incidents that an animal repeats, {len(told.twins)} of {len(INCIDENTS)} rows: {twins}", "", "  ")
    output += _wrapped(f"incidents without an animal: {' '.join(map(str, told.without)) or 'none'}", "", "  ")
    output += _alarms(hunt)
    output += [f"SURVIVES  {fate.animal.spec}: {fate.animal.story}" for fate in hunt.fates if fate.verdict == "SURVIVES"]
    return output


def _alarms(hunt: Hunt) -> list[str]:
    return [f'RIGHT CODE REJECTED  gdn-verify repeat "{alarm}"' for alarm in dict.fromkeys(hunt.alarms)]


def rule_lines(hunt: Hunt, trials: Sequence[Trial]) -> list[str]:
    """A row for each animal that suites can judge: whether our laws kill it, and which case of each suite rejects it."""
    named = {name for trial in trials for name in trial.killed_at}
    rows = [
        (
            fate.animal.name,
            {"killed": "dead", "SURVIVES": "LIVES"}.get(fate.verdict, fate.verdict),
            *(_word(trial, fate.animal.name) for trial in trials),
        )
        for fate in hunt.fates
        if fate.animal.name in named
    ]
    header = ("animal", "ours", *(trial.suite for trial in trials))
    output = [*text_table(header, rows, right=range(2, len(header))), ""]
    for trial in trials:
        output.append(f"{trial.suite}: {_verdict(trial)} · {trial.story}")
        for name, number in trial.killed_at.items():
            if number is None and len(trials) == 1:
                story = next(fate.animal.story for fate in hunt.fates if fate.animal.name == name)
                output += _wrapped(f"LIVES  {name}: {story}", "  ", "         ")
    return output + _alarms(hunt)


def _word(trial: Trial, name: str) -> str:
    if name not in trial.killed_at:
        return "-"
    number = trial.killed_at[name]
    if number is None:
        return "lives" if trial.tried == trial.cases else "?"
    return str(number)


def _verdict(trial: Trial) -> str:
    if trial.error:
        return f"FAILED ({trial.error})"
    text = f"kills {trial.killed} of {len(trial.killed_at)} in {trial.cases} cases, {trial.seconds:.0f} s"
    return text + (f"; REJECTS RIGHT CODE in {trial.rejects_right}, so its kills show nothing" if trial.rejects_right else "")


def to_json(hunt: Hunt, trials: Sequence[Trial] = (), *, interrupted: bool = False) -> dict[str, Any]:
    """The whole table as plain data, from which the page is made too."""
    told = summary(hunt)
    books = {fate.book.name: fate.book for fate in hunt.fates}
    return {
        "seed": hunt.seed,
        "profile": PROFILE.name,
        "asked": {"share": f"1/{QUARTER}", "in_full_until": IN_FULL},
        "versions": {"torch": installed("torch")},
        "interrupted": interrupted,
        "letters": LETTERS,
        "incidents": {str(row): incident.what for row, incident in INCIDENTS.items()},
        "laws": {
            name: [{"name": law.name, "kind": law.kind, "says": law.says} for law in book.laws.values()]
            for name, book in books.items()
        },
        "animals": [fate.to_json() for fate in hunt.fates],
        "suites": [trial.to_json() for trial in trials],
        "alarms": list(dict.fromkeys(hunt.alarms)),
        "summary": {
            "animals": told.animals,
            "killed": told.killed,
            "alive": told.alive,
            "not_finished": told.not_finished,
            "not_asked": told.not_asked,
            "median_cases": told.median_cases,
            "mean_killers": statistics.fmean(len(fate.killers) for fate in hunt.fates) if hunt.fates else 0.0,
            "runs": told.runs,
            "wall_s": round(told.wall_s, 1),
            "twins": list(told.twins),
            "without": list(told.without),
            "kills_of_law": told.kills_of_law,
        },
    }
