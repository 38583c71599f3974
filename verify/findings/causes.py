"""Which broken laws probably have one cause: their smallest cases fail alike."""

import dataclasses
import re
from collections.abc import Sequence

from verify.execution.run import Run
from verify.findings.law_report import LawReport
from verify.process.outcome import FailureKind, Verdict, port_of

# Words whose values a law decides, or chance. They do not tell causes apart.
OF_THE_LAW = {"at", "variant", "lengths", "packed", "seed", "backward", "offsets"}
NUMBERS = (FailureKind.OFF, FailureKind.DIFFERS)  # with or without a tolerance, as the law compares
WIDTHS = ("heads", "value_heads", "key_dim", "value_dim", "width", "hidden", "conv_width")


@dataclasses.dataclass(frozen=True)
class Symptoms:
    """How a broken law fails in its smallest case.

    - `outputs`: the outputs and gradients that fail, and `way`: how the first of them fails
    - `dtypes`: the dtypes in which the case fails, of those that were tried
    - `longest`, `widths`: the longest sequence and the widths of the case
    - `needs`: the words without whose values the case holds
    """

    law: str
    way: str
    outputs: frozenset[str]
    dtypes: frozenset[str]
    longest: int
    widths: tuple[int, ...]
    needs: frozenset[str]

    def agree(self, other: "Symptoms") -> bool:
        """Whether one cause probably explains both.

        The same outputs fail, or those of one are among those of the other, which may lack gradients. Both fail in some dtype.
        Widths are equal, and the longest sequences are equal or both shorter than 16 tokens, since some laws need a sequence to
        cut. The same words make both cases hold.
        """
        return (
            (self.way, self.widths, self.needs) == (other.way, other.widths, other.needs)
            and not self.dtypes.isdisjoint(other.dtypes)
            and (self.outputs <= other.outputs or other.outputs <= self.outputs)
            and (self.longest == other.longest or max(self.longest, other.longest) < 16)
        )


def symptoms(report: LawReport) -> Symptoms:
    """The symptoms of a broken law, from its report."""
    case, first = Run.parse(report.run).example.case, report.findings[0]
    words = {name for change in report.neighbours for name in re.findall(r"(\w+)=", change)}
    return Symptoms(
        report.law,
        "is wrong" if first.kind in NUMBERS else first.way,
        frozenset(port_of(finding.output) for finding in report.findings),
        frozenset([str(getattr(case, "dtype", "")), *re.findall(r"dtype=(\w+)", "; ".join(report.fails_too))]),
        max(getattr(case, "lengths", ()), default=0),
        tuple(getattr(case, name) for name in WIDTHS if hasattr(case, name)),
        frozenset(words - OF_THE_LAW - {*WIDTHS}),
    )


def groups(reports: Sequence[LawReport]) -> list[list[Symptoms]]:
    """The broken laws in groups of probably one cause each, the largest group first. A law joins a group if it agrees with all."""
    found: list[list[Symptoms]] = []
    broken = [report for report in reports if report.verdict is Verdict.BROKEN and report.findings and not report.same_as]
    for one in sorted(map(symptoms, broken), key=lambda symptom: -len(symptom.outputs)):
        group = next((group for group in found if all(one.agree(other) for other in group)), None)
        if group is None:
            found.append([one])
        else:
            group.append(one)
    return sorted(found, key=len, reverse=True)


def lines(reports: Sequence[LawReport]) -> list[str]:
    """What to say about the causes of several broken laws. Empty if at most one law is broken."""
    found = groups(reports)
    laws = sum(map(len, found))
    if laws < 2:
        return []
    if len(found) == 1:
        return [f"probably one cause: {_line(found[0])}"]
    return [f"{laws} broken laws fail in {len(found)} ways; laws that fail in the same way probably have one cause:"] + [
        f"  {_line(group)}" for group in found
    ]


def _line(group: Sequence[Symptoms]) -> str:
    first = group[0]
    laws = f"{len(group)} law{'s' if len(group) > 1 else ''} ({', '.join(sorted(one.law for one in group))})"
    parts = [f"{', '.join(sorted(first.outputs))} {first.way}"]
    parts += [f"holds with another {' or '.join(sorted(first.needs))}"] if first.needs else []
    return f"{laws}: {'; '.join(filter(None, parts))}"
