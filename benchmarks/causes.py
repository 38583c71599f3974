"""Causes: into how many groups a check sorts the broken laws of one planted defect, and those of two.

    python -m benchmarks.causes --animals 60 --keep reports.jsonl      check wrong implementations, and add their reports to a file
    python -m benchmarks.causes --reports reports.jsonl                group the reports of that file

One wrong implementation of the zoo has one cause, so one group is right. For two causes, we take two wrong implementations that
are derived from the same right one. For each law that one or both of them break, we take the report of one of them, by turns, as
if a check had found the one defect or the other. Then no group may have laws of both.

The program prints how many wrong implementations have one group, two groups and so on, and how many pairs have no common group.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence

from benchmarks import records
from properties.books import book_of
from verify.engine.asking import describe
from verify.engine.law_check import LawCheck
from verify.engine.power import KILLS, by_power
from verify.engine.profiles import PROFILES
from verify.engine.state import CheckState, Settings
from verify.findings import causes
from verify.findings.known import NO_DEFECTS
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.outcome import Finding, Verdict
from verify.process.reach import Reach
from verify.process.worker import Worker
from verify.zoo.animals import animals, right_of

LEAST = 2  # we leave out wrong implementations that break fewer laws, since their groups show nothing


@dataclasses.dataclass(frozen=True)
class Checked:
    """A wrong implementation and the reports of the laws that it breaks."""

    name: str
    reports: tuple[LawReport, ...]

    @property
    def right(self) -> str:
        """The name of the right implementation from which it is derived."""
        return getattr(right_of(animals()[self.name].kind), "__name__", "")


def main() -> int:
    """Check or read, group, print and record. Returns 1 if there is nothing to group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--animals", type=int, default=60)
    parser.add_argument("--after", type=int, default=0, help="leave out so many wrong implementations at the start")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--laws", type=int, default=8, help="check so many laws, the most powerful ones")
    parser.add_argument("--book", action="append", choices=[*KILLS], help="wrong implementations of this group of operations alone")
    parser.add_argument("--profile", default="least", choices=PROFILES)
    parser.add_argument("--keep", type=pathlib.Path, metavar="FILE", help="add the reports to this file")
    parser.add_argument("--reports", type=pathlib.Path, metavar="FILE", help="group the reports of this file, and check nothing")
    options = records.options_of(parser)
    checked = read(options.reports) if options.reports else check(options)
    alone = [one for one in checked if len(one.reports) >= LEAST]
    if not alone:
        print(f"nothing to measure: no wrong implementation breaks {LEAST} laws or more")
        return 1
    laws = [len(one.reports) for one in alone]
    counts = collections.Counter(len(causes.groups(one.reports)) for one in alone)
    print(f"{len(alone)} wrong implementations that break {LEAST} laws or more (median {statistics.median(laws):g}):")
    for groups, count in sorted(counts.items()):
        print(f"  {groups} group{'s' if groups > 1 else ''}: {count}")
    for one in alone:
        if len(causes.groups(one.reports)) > 1:
            print("\n    ".join([f"  {one.name}", *causes.lines(one.reports)]))
    mixed, split = pairs(alone, options)
    print(f"{mixed + split} pairs of wrong implementations: {split} without a group that has laws of both, {mixed} with one")
    value = f"{counts[1]} of {len(alone)}"
    apart = f"{split} of {mixed + split}"
    records.put(
        options,
        "defects",
        {
            "wrong implementations whose broken laws are told as one cause": {"value": value},
            "pairs of wrong implementations whose broken laws are in no common group": {"value": apart},
        },
    )
    return 0


def check(options: argparse.Namespace) -> list[Checked]:
    """Check wrong implementations in a random order. The right implementations from which they are derived take turns."""
    chance = random.Random(options.seed)
    by_right: dict[str, list[str]] = {}
    for name, animal in animals().items():
        right = right_of(animal.kind)
        if right is not None and (not options.book or book_of(animal.kind.domain).name in options.book):
            by_right.setdefault(right.__name__, []).append(name)
    for names in by_right.values():
        chance.shuffle(names)
    turns = (name for names in itertools.zip_longest(*by_right.values()) for name in names if name is not None)
    found: list[Checked] = []
    worker = Worker(20.0)
    try:
        for name in itertools.islice(turns, options.after, options.after + options.animals):
            with tempfile.TemporaryDirectory(prefix="gdn-verify-causes-") as folder:
                reports = broken(animals()[name].spec, Store(folder), worker, options)
            found.append(Checked(name, tuple(reports)))
            if options.keep:
                with options.keep.open("a", encoding="utf-8") as file:
                    print(json.dumps({"name": name, "reports": [report.to_json() for report in reports]}), file=file)
    finally:
        worker.close()
    return found


def broken(spec: str, store: Store, worker: Worker, options: argparse.Namespace) -> list[LawReport]:
    """The reports of the broken laws of an adapter. Its cases are as long as its domain says, without the long ones of a check."""
    described = describe(spec, worker)
    book, domain = book_of(described.domain), described.domain
    laws = [*by_power(book, [law for law in book.laws if not book.laws[law].needs(domain)])][: options.laws]
    settings = Settings(spec, laws, PROFILES[options.profile], options.seed)
    state = CheckState(settings, described, store, NO_DEFECTS, None, threading.Event(), lambda *_: None)
    reports = []
    for law in laws:
        checking = LawCheck(state, law, worker)
        report = checking.run()
        reports.append(checking.explain() if checking.waits else report)
    return [report for report in reports if report.verdict is Verdict.BROKEN]


def read(file: pathlib.Path) -> list[Checked]:
    """The wrong implementations in a file of reports."""

    def report_of(data: dict[str, object]) -> LawReport:
        lists = {name: [Finding.from_json(one) for one in data[name]] for name in ("findings", "first_findings")}  # type: ignore[attr-defined]
        return LawReport(**{**data, **lists, "verdict": Verdict(str(data["verdict"])), "reach": Reach()})  # type: ignore[arg-type]

    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Checked(line["name"], tuple(map(report_of, line["reports"]))) for line in lines]


def pairs(alone: Sequence[Checked], options: argparse.Namespace) -> tuple[int, int]:
    """The number of pairs with a group that has laws of both, and the number of pairs without one."""
    chance = random.Random(options.seed)
    both = [(one, other) for one, other in itertools.combinations(alone, 2) if one.right == other.right]
    mixed = split = 0
    for one, other in chance.sample(both, min(options.pairs, len(both))):
        owners: dict[str, str] = {}
        reports = []
        for law in sorted({report.law for report in (*one.reports, *other.reports)}):
            owner = (one, other)[len(owners) % 2]
            report = next((report for report in owner.reports if report.law == law), None)
            if report is None:
                owner = other if owner is one else one
                report = next(report for report in owner.reports if report.law == law)
            owners[law] = owner.name
            reports.append(report)
        if any(len({owners[symptoms.law] for symptoms in group}) > 1 for group in causes.groups(reports)):
            mixed += 1
        else:
            split += 1
    return mixed, split


if __name__ == "__main__":
    sys.exit(main())
