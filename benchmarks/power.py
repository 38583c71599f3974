"""Which laws find most, and how long their cases take: writes verify/engine/power.json, which orders a check in limited time.

    gdn-verify zoo --json zoo.json
    gdn-verify check fla/chunk --profile few --device cpu --json chunk.jsonl
    python -m benchmarks.power --zoo zoo.json --check chunk.jsonl

Laws that were not run keep their numbers, and a new law has none. So a new law needs no more than `python -m benchmarks.power`.
"""

import argparse
import collections
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from properties.books import BOOKS
from verify.engine import power
from verify.findings.records.record import read

FILE = pathlib.Path(power.__file__).with_name("power.json")
FIRST = 2  # cases of a law that count; four times as many of a base law, as in a check


def killed(zoo: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """For each book, how many wrong implementations each law kills in its first cases, in what `zoo --json` wrote."""
    kills: dict[str, collections.Counter[str]] = {book.name: collections.Counter() for book in BOOKS}
    most = {book.name: {law.name: FIRST * (4 if law.base else 1) for law in book.laws.values()} for book in BOOKS}
    for animal in zoo["animals"]:
        for cell in animal["laws"]:
            if cell["asked"]:
                kills[animal["book"]][cell["law"]] += 0 < (cell["killed_at"] or 0) <= most[animal["book"]][cell["law"]]
    return {book: dict(counts) for book, counts in kills.items()}


def seconds(files: Sequence[pathlib.Path]) -> dict[str, float]:
    """The seconds of a case of each law, in those of a case of the oracle: means over the checks of `check --json`."""
    times = collections.defaultdict[str, list[float]](list)
    for file in files:
        for record in read(str(file)):
            cases = {report.law: report for report in record.reports if sum(report.counts.values())}
            each = {name: (law.kernel_s + law.oracle_s) / sum(law.counts.values()) for name, law in cases.items()}
            for name, took_s in each.items():
                times[name].append(took_s / each["oracle"])
    return {name: round(statistics.fmean(values), 2) for name, values in times.items() if name != "oracle"}


def merged(zoo: Mapping[str, Any] | None, files: Sequence[pathlib.Path]) -> dict[str, Any]:
    """The numbers of all laws: the new ones, else the old ones, else None."""
    new = killed(zoo) if zoo else {}
    kills = {
        book.name: {law: new.get(book.name, {}).get(law, power.KILLS.get(book.name, {}).get(law)) for law in book.laws}
        for book in BOOKS
    }
    every = {law for book in BOOKS for law in book.laws}
    return {"kills": kills, "seconds": {law: s for law, s in sorted((power.SECONDS | seconds(files)).items()) if law in every}}


def main() -> None:
    """Write the file, and print the laws whose numbers it changes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", type=pathlib.Path, metavar="FILE", help="what `gdn-verify zoo --json` wrote, of all laws or some")
    parser.add_argument("--check", type=pathlib.Path, metavar="FILE", nargs="*", default=[], help="what `check --json` wrote")
    options = parser.parse_args()
    numbers = merged(json.loads(options.zoo.read_text(encoding="utf-8")) if options.zoo else None, options.check)
    for book, laws in numbers["kills"].items():
        for law, count in laws.items():
            if (law, count) not in power.KILLS.get(book, {}).items():
                print(f"{book:<10}{law:<14}{power.KILLS.get(book, {}).get(law)} -> {count}")
    FILE.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
