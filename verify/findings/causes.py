"""Which broken laws probably have one cause: their smallest cases fail alike."""

import dataclasses
from collections.abc import Mapping, Sequence

from verify.execution.line import Run
from verify.findings.law_report import LawReport
from verify.process.outcome import FailureKind, Verdict

# Words whose values the law or chance decides, and words that only decide which numbers a case has. Neither tell causes apart.
OF_THE_LAW = {"at", "variant", "backward"}
OF_NUMBERS = {"values", "beta", "scale", "seed"}
NUMBERS = (FailureKind.OFF, FailureKind.DIFFERS)  # with or without a tolerance, as the law compares
WIDTHS = {"key_dim", "value_dim", "width", "hidden", "conv_width"}
HEADS = ("heads", "heads value_heads")  # one word, or two words that shrink together
SHORT = 16  # lengths below this do not tell causes apart, since some laws need a sequence to cut, or several tokens
MARGINAL = 2.0  # a case whose error is less than so many times its tolerance may hold with any other numbers


@dataclasses.dataclass(frozen=True)
class Symptoms:
    """How a broken law fails in its smallest case.

    - `outputs`: the outputs and gradients that fail, and `ways`: how they fail
    - `ordinary`: the outputs and gradients that fail with ordinary numbers. Numbers such as a beta of zero hide wrong outputs
    - `gradients`: all gradients of the case
    - `words`: the words of the case; `fails_too`: other values with which it fails; `holds`: values with which it holds
    - `longest`: the length of its longest sequence
    - `by_chance`: whether the case may hold with other numbers
    """

    law: str
    ways: frozenset[str]
    outputs: frozenset[str]
    ordinary: frozenset[str]
    gradients: frozenset[str]
    words: Mapping[str, str]
    holds: frozenset[tuple[str, str]]
    fails_too: frozenset[tuple[str, str]]
    longest: int
    by_chance: bool

    @property
    def needs(self) -> list[str]:
        """The words that tell causes apart and that the failure needs: with another value, the case holds."""
        return sorted({name for name, _ in self.holds if " " not in name} - OF_THE_LAW - OF_NUMBERS - WIDTHS - {"lengths", "heads"})

    @property
    def of_gradients(self) -> bool:
        """Whether only gradients fail with ordinary numbers, so that the outputs are right."""
        return self.ordinary <= self.gradients

    def agree(self, other: "Symptoms") -> bool:
        """Whether one cause probably explains both.

        This is so if both fail in the same way, the outputs that fail in one fail in the other too, at least with ordinary
        numbers, and neither case has a value with which the other one holds. Also, with ordinary numbers, either only gradients
        fail in both, or outputs fail in both.
        """
        if self.ordinary and other.ordinary and self.of_gradients != other.of_gradients:
            return False
        nested = self.outputs <= other.outputs | other.ordinary or other.outputs <= self.outputs | self.ordinary
        return nested and not self.ways.isdisjoint(other.ways) and not self.denies(other) and not other.denies(self)

    def denies(self, other: "Symptoms") -> bool:
        """Whether this case holds with a value that the other case has, or at a size that the other case does not exceed.

        - If this case holds with ordinary values, whatever the random numbers, and the other one fails with them, the answer is
        yes.
        - If this case may hold by chance, its sizes do not count, since other sizes have other numbers.
        - A longer sequence carries a state from token to token. So it does not count if a longer case has no initial state.
        """
        if ("values", "ordinary") in self.holds and ("seed", "0") not in self.holds and other.ordinary:
            return True
        for name, value in self.holds:
            if name in WIDTHS:
                if not self.by_chance and name in other.words and int(other.words[name]) <= int(value):
                    return True
            elif name == "lengths":
                most = max(map(int, value.split("+")))  # a larger one holds because of its remainder
                if not self.by_chance and other.longest <= most < self.longest and self.longest >= SHORT:
                    return True
            elif name in HEADS:
                if not self.by_chance and " ".join(other.words.get(word, "") for word in name.split()) == value:
                    return True
            elif name == "state" and other.longest > self.longest:
                continue
            elif name not in OF_THE_LAW | OF_NUMBERS and (other.words.get(name) == value or (name, value) in other.fails_too):
                return True
        return False


def symptoms(report: LawReport) -> Symptoms:
    """The symptoms of a broken law, from its report."""
    case = Run.parse(report.run, here=False).example.case
    holds = _changes(report.neighbours)
    return Symptoms(
        report.law,
        frozenset("is wrong" if finding.kind in NUMBERS else finding.way for finding in report.findings),
        frozenset(finding.port for finding in report.findings),
        frozenset(report.ordinary),
        frozenset(port.name for port in case.spec.gradients()),
        case.words(),
        holds,
        _changes(report.fails_too),
        max(getattr(case, "lengths", ()), default=0),
        any(name in OF_NUMBERS for name, _ in holds) or max(finding.ratio for finding in report.findings) < MARGINAL,
    )


def _changes(changes: Sequence[str]) -> frozenset[tuple[str, str]]:
    """The words and values in changes such as "gate=forever". Those of "heads=1 value_heads=1" are one word with both values."""
    pairs = [[word.partition("=")[::2] for word in change.split()] for change in changes]
    return frozenset((" ".join(name for name, _ in pair), " ".join(value for _, value in pair)) for pair in pairs)


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
    ways = ", ".join(sorted(first.ways))
    if len(first.outputs) > 1:
        ways = ways.replace("is ", "are ", 1)
    parts = [f"{', '.join(sorted(first.outputs))} {ways}"]
    needs = [name for name in first.needs if all(name in one.needs for one in group)]
    parts += [f"holds with another {' or '.join(needs)}"] if needs else []
    return f"{laws}: {'; '.join(filter(None, parts))}"
