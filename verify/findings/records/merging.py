"""The shards of a check as one: what the whole check would have said."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from verify.findings import causes, coverage
from verify.findings.law_report import LawReport, left_out, overall
from verify.findings.records.record import End, Head, Record
from verify.process.outcome import Verdict
from verify.process.reach import Reach
from verify.reach import report as reach_report

Placed = tuple[str, Record]  # the file of a record, and the record


def merged(records: Iterable[Placed]) -> list[Record]:
    """Merge the shards of each adapter's check. ValueError if two records are not of one check, or the same shard of it."""
    by_adapter = dict[str, list[Placed]]()
    for place, record in records:
        by_adapter.setdefault(record.head.adapter, []).append((place, record))
    return [_merged(shards) for shards in by_adapter.values()]


def _merged(placed: Sequence[Placed]) -> Record:
    (first_place, first), *others = placed
    for place, record in others:
        _check_alike(first_place, first.head, place, record.head)
    numbers = dict[int, str]()
    for place, record in placed:
        if (number := record.head.shard[0]) in numbers:
            raise ValueError(f"{numbers[number]} and {place} both have shard {_shard(record)} of {record.head.adapter}")
        numbers[number] = place
    count = first.head.shard[1]
    lacks = [f"shard {number}/{count} is missing" for number in range(1, count + 1) if number not in numbers]
    lacks += [f"shard {_shard(record)} never ended: {place}" for place, record in placed if record.end is None]
    lacks += [
        f"shard {_shard(record)} was interrupted: {place}" for place, record in placed if record.end and record.end.interrupted
    ]
    shards = [record for _, record in sorted(placed, key=lambda one: one[1].head.shard)]
    reports = [_law([report for shard in shards for report in shard.reports if report.law == law]) for law in first.head.laws]
    head = dataclasses.replace(first.head, shard=(1, 1))
    decided = [report for report in reports if report is not None]
    return Record(head, decided, dataclasses.replace(_end(head, shards, decided), lacks=lacks))


def _shard(record: Record) -> str:
    return "/".join(map(str, record.head.shard))


def _check_alike(place: str, head: Head, other_place: str, other: Head) -> None:
    """Refuse records of two checks. The GPUs may differ, since machines do."""
    for field in dataclasses.fields(Head):
        mine, theirs = getattr(head, field.name), getattr(other, field.name)
        if field.name == "shard":
            mine, theirs = mine[1], theirs[1]
        if mine != theirs and field.name != "device":
            name = "the number of shards" if field.name == "shard" else field.name
            raise ValueError(f"records must be of one check, but {name} is {mine!r} in {place} and {theirs!r} in {other_place}")


def _law(reports: Sequence[LawReport]) -> LawReport | None:
    """One law's report from those of the shards; None if no shard has one.

    A broken law is told as by the shard with the shortest line that fails again in a fresh process.
    """
    if not reports:
        return None
    ran = [report for report in reports if report.counts] or list(reports[:1])
    broken = [report for report in reports if report.verdict is Verdict.BROKEN]
    told = min(broken, key=lambda report: (report.repeats != "yes", len(report.run), report.run)) if broken else ran[0]
    undecided = [report for report in reports if report.verdict is Verdict.UNKNOWN] or ran
    reason = next((report.reason for report in undecided if report.reason), "")
    total = dataclasses.replace(
        told,
        counts=_sum(report.counts for report in reports),
        regimes=_sum(report.regimes for report in reports),
        left_out=_sum(report.left_out for report in reports),
        one_by_one=_sum(report.one_by_one for report in reports),
        kept=_sum(report.kept for report in reports),
        unkept=_sum(report.unkept for report in reports),
        planned=sum(report.planned for report in ran),
        cut_short=any(report.cut_short for report in reports),
        known=list(dict.fromkeys(line for report in reports for line in report.known)),
        ratios=_largest(report.ratios for report in reports),
        fault=next((report.fault for report in reports if report.fault), ""),
        fault_run=next((report.fault_run for report in reports if report.fault), ""),
        **{name: sum(getattr(report, name) for report in reports) for name in SECONDS},
    )
    if broken:
        return total
    if not any(report.counts for report in reports):
        return total
    verdict, why = overall(total.counts, reason, total.planned)
    return dataclasses.replace(total, verdict=verdict, reason=why)


SECONDS = ("kernel_s", "oracle_s", "wait_s", "started", "start_s", "wall_s", "shrink_s")  # sums over the shards


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = collections.Counter[str]()
    for count in counts:
        total.update(count)
    return dict(total)


def _largest(ratios: Iterable[Mapping[str, float]]) -> dict[str, float]:
    largest = dict[str, float]()
    for ratio in ratios:
        for name, value in ratio.items():
            largest[name] = max(value, largest.get(name, 0.0))
    return largest


def _laws_of(shard: Record) -> set[str]:
    """The laws of which a shard has a report; also one without a case in it has one."""
    return {report.law for report in shard.reports}


def _end(head: Head, shards: Sequence[Record], decided: Sequence[LawReport]) -> End:
    """The end of the whole check. Its exit code is left to the verb, which knows what its options forgive."""
    ends = [shard.end for shard in shards if shard.end is not None]
    reach, refusals = Reach(), dict[str, list[str]]()
    for end in ends:
        reach.add(end.reach)
        for answer, names in end.refusals.items():
            refusals.setdefault(answer, []).extend(names)
    seen = dict[str, dict[str, int]]()
    for regime, count in _sum(report.regimes for report in decided).items():
        name, _, value = regime.partition("=")
        seen.setdefault(name, {})[value] = count
    gaps = [gap for gap in (ends[0].gaps if ends else ()) if all(gap in end.gaps for end in ends)]
    return End(
        exit_code=0,
        wall_s=max((end.wall_s for end in ends), default=0.0),
        interrupted=any(end.interrupted for end in ends),
        not_run=[law for law in head.laws if any(law not in _laws_of(shard) for shard in shards)],
        refusals=refusals,
        outside=[answer for end in ends for answer in end.outside],
        regimes=coverage.lines(seen, gaps) if seen else [],
        gaps=gaps,
        looked_at=reach_report.report(reach, head.omits) if any(report.verdict is Verdict.HOLDS for report in decided) else [],
        left_out=left_out(decided),
        causes=causes.lines(decided),
        reach=reach,
    )
