"""Compares two versions of an implementation on the same cases: what became broken, what was mended, and what else differs."""

import dataclasses
import difflib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from properties.books import book_of
from properties.laws.promises import PROMISES
from properties.words.options import text_of_values, values_of
from verify.engine.across import BROKEN, HOLDS, NOT, SiteVerdict, SiteWorkers, everywhere
from verify.execution.line import Run
from verify.execution.refusals import SILENT, STRAYS
from verify.process.messages import Called, Calls, Describe, Description, Reaction, Refuse
from verify.process.outcome import Outcome, Verdict

BROKE, MENDED, REFUSED, UNKNOWN = "became broken", "mended", "now refused", "undecided"
ADDED, FAILS = "new", "new, but broken"
BOTH, NEITHER = {HOLDS: "holds in both", BROKEN: "broken in both"}, "asked in neither"
CHANGES = (BROKE, REFUSED, UNKNOWN, FAILS, MENDED, BOTH[BROKEN], BOTH[HOLDS], ADDED, NEITHER)  # the first one decides for a law
BITS = ("deterministic", "position_independent", *PROMISES)  # promises of a domain about bits
OTHER_BITS = 12  # lines whose bits are compared
TIMED, ROUNDS, CALLS = 2, 5, 5  # lines that are timed, the turns of each version, and the calls of a turn
REFUSAL_S, TIMING_S = 30.0, 600.0  # for one illegal input, and for a turn, in the first of which Triton tunes kernels
APART = 1.25  # errors that differ by more than this factor have grown or shrunk
STEPS = tuple(2.0**power for power in range(-6, 1))  # of a distribution of errors over tolerances: the upper ends of its parts


@dataclasses.dataclass(frozen=True)
class BeforeAfter:
    """A case in both versions, and what changed. `run` is its line in the new version.

    `ratios` has for each output of a case that holds in both the two errors, as multiples of the tolerance.
    """

    run: Run
    old: SiteVerdict
    new: SiteVerdict
    change: str
    ratios: dict[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of one output in the lines that hold in both versions, as multiples of their tolerances.

    `factor` is the median of new over old. In `grew` lines the error is more than APART times the old one, and in `shrank` lines
    the reverse. `line` is the one that grew most.
    """

    output: str
    old: list[float]
    new: list[float]
    factor: float
    grew: int
    shrank: int
    line: str

    @property
    def word(self) -> str:
        """What happened to the errors in a word."""
        more, less = self.factor > APART or self.grew > len(self.old) / 2, self.factor < 1 / APART
        return "grew" if more else "shrank" if less else "same"


@dataclasses.dataclass(frozen=True)
class Timing:
    """The milliseconds and the bytes of a line in each round: those of the old and of the new version took turns."""

    line: str
    old_ms: list[float]
    new_ms: list[float]
    old_bytes: int
    new_bytes: int

    @property
    def factors(self) -> list[float]:
        """New over old, round by round, from the smallest."""
        return sorted(new / old for old, new in zip(self.old_ms, self.new_ms, strict=True))


@dataclasses.dataclass
class Differences:
    """What differs between two versions.

    - `bits`: for each line whose bits were compared, the outputs that differ
    - `unsteady`: outputs that differ in a second call of the new version, and not of the old one
    - `parameters`, `domain`: parameters of the function under test, and fields of the adapter's domain, that differ, in words
    - `gone`: in words, the parameters that the new version lacks, and what only the adapter of the old one promises to the bit
    - `refusals`: for each illegal input with which they do other things, what the old and the new one do
    - `timings`: on a GPU; `untimed` says why there are none
    """

    pairs: list[BeforeAfter]
    errors: list[Errors]
    bits: dict[str, list[str]]
    unsteady: list[str]
    parameters: list[str]
    gone: list[str]
    domain: list[str]
    refusals: dict[str, tuple[str, str]]
    timings: list[Timing] = dataclasses.field(default_factory=list)
    untimed: str = "not measured on a CPU"

    def of(self, change: str) -> list[BeforeAfter]:
        """The lines of one change, the shortest first."""
        return sorted(
            (pair for pair in self.pairs if pair.change == change), key=lambda pair: (pair.run.example.case.tokens, str(pair.run))
        )

    def laws(self) -> dict[str, tuple[str, list[BeforeAfter]]]:
        """For each law what changed, and its lines."""
        lines: dict[str, list[BeforeAfter]] = {}
        for pair in self.pairs:
            lines.setdefault(pair.run.law, []).append(pair)
        return {law: (min((pair.change for pair in pairs), key=CHANGES.index), pairs) for law, pairs in lines.items()}

    @property
    def lost(self) -> list[str]:
        """The promises that the old version keeps and the new one does not, in words."""
        wrong = [name for name, (old, new) in self.refusals.items() if _refuses(old) and not _refuses(new)]
        return [
            *([f"{len(refused)} lines are refused"] if (refused := self.of(REFUSED)) else []),
            *self.gone,
            *(f"{name} is no longer refused" for name in wrong),
            *(f"{name} differs from call to call" for name in self.unsteady),
        ]

    def worse(self, *, same_bits: bool = False) -> bool | None:
        """Whether something became broken or a promise was lost; None if that is undecided."""
        if self.of(BROKE) or self.lost or (same_bits and any(self.bits.values())):
            return True
        compared = any(pair.change in (*BOTH.values(), MENDED) for pair in self.pairs)
        return None if self.of(UNKNOWN) or not compared else False


def compare(
    placed: Sequence[SiteWorkers], runs: Sequence[tuple[Run, Run]], workers: int, tell: Callable[[str, int, int], None]
) -> Differences:
    """Run the old and the new line of each case in its place, and compare what they are. The processes have ended afterwards."""

    def column(one: SiteWorkers) -> tuple[list[SiteVerdict], dict[int, Called], dict[str, str]]:
        cells, bits, lines = list[SiteVerdict](), dict[int, Called](), [pair[placed.index(one)] for pair in runs]
        for number, run in enumerate(lines):
            cells.append(_confirmed(one, run))
            tell(one.place.name, number + 1, len(runs))
        for number in [number for number, run in enumerate(lines) if run.the_law.base][:OTHER_BITS]:
            outcome = one.outcomes.get(lines[number])
            if cells[number].verdict != NOT and outcome and not outcome.lost and (call := _called(one, lines[number])):
                bits[number] = call
        return cells, bits, _reactions(one, lines[0])

    (old, old_bits, old_did), (new, new_bits, new_did) = everywhere(placed, column, workers)
    before, after = placed
    pairs = []
    for (older, newer), was, now in zip(runs, old, new, strict=True):
        outcomes = before.outcomes.get(older), after.outcomes.get(newer)
        change = change_of((was, outcomes[0]), (now, outcomes[1]))
        pairs.append(BeforeAfter(newer, was, now, change, _ratios(newer, *outcomes)))
    both = [number for number in old_bits if number in new_bits]
    signatures = [_signatures(one) for one in placed]
    parameters = parameter_changes(*signatures) if all(signatures) else [("the function under test was not seen", list[str]())]
    return Differences(
        pairs,
        errors_of(pairs),
        {str(runs[n][1]): [name for name, bits in old_bits[n].bits.items() if bits != new_bits[n].bits.get(name)] for n in both},
        sorted({name for n in both for name in {*new_bits[n].unsteady} - {*old_bits[n].unsteady}}),
        [words for words, _ in parameters],
        [*(f"parameter {name} is gone" for _, names in parameters for name in names), *_promised_before(before, after)],
        _domain_changes(before, after),
        {name: (did, new_did[name]) for name, did in old_did.items() if _way(new_did.get(name, did)) != _way(did)},
    )


def _confirmed(one: SiteWorkers, run: Run) -> SiteVerdict:
    """What a line is in a place. If it loses its worker it is run again, because an earlier case or the host may have done that."""
    cell = one.cell(run)
    if run in one.outcomes and one.outcomes[run].lost and one.cell(run).verdict != BROKEN:
        one.outcomes[run] = Outcome(Verdict.UNKNOWN)
        return SiteVerdict(NOT, reason=f"{cell.reason}, but not again in a fresh worker")
    return cell


def change_of(old: tuple[SiteVerdict, Outcome | None], new: tuple[SiteVerdict, Outcome | None]) -> str:
    """What changed in a line, from its verdict and its outcome in each version."""
    (was, before), (now, after) = old, new
    if any(outcome is not None and outcome.verdict is Verdict.BLIND for outcome in (before, after)):
        return NEITHER
    undecided = [outcome is None or outcome.verdict is Verdict.UNKNOWN for outcome in (before, after)]
    if any(undecided):
        return NEITHER if was.verdict == now.verdict == NOT and not all(undecided) else UNKNOWN
    if was.verdict == now.verdict == BROKEN:
        return BROKE if {*now.outputs} - {*was.outputs} and "call" not in was.outputs else BOTH[BROKEN]
    if was.verdict == now.verdict:
        return BOTH.get(was.verdict, NEITHER)
    if now.verdict == BROKEN:
        return BROKE if was.verdict == HOLDS else FAILS
    if was.verdict == BROKEN:
        return MENDED
    return REFUSED if now.verdict == NOT else ADDED


def suited(run: Run, domain: Any) -> Run:
    """A run with choices and options that a domain has, if there is one. They do not change which numbers are right."""
    if domain is None:
        return run
    case = run.example.case
    other = {name: values[0] for name, values in domain.choices if getattr(case, name) not in values}
    if "options" in case.WORDS:
        known = dict(domain.options)
        other["options"] = text_of_values({name: x for name, x in values_of(case.options).items() if x in known.get(name, ())})
    return dataclasses.replace(run, example=dataclasses.replace(run.example, case=dataclasses.replace(case, **other)))


def _ratios(run: Run, old: Outcome | None, new: Outcome | None) -> dict[str, tuple[float, float]]:
    if run.the_law.kind != "truth" or not (old and new and old.verdict is new.verdict is Verdict.HOLDS):
        return {}
    return {name: (ratio, new.ratios[name]) for name, ratio in old.ratios.items() if ratio > 0 and new.ratios.get(name, 0) > 0}


def errors_of(pairs: Iterable[BeforeAfter]) -> list[Errors]:
    """The errors of each output."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for pair in pairs:
        for name, (old, new) in pair.ratios.items():
            found.setdefault(name, []).append((old, new, str(pair.run)))
    errors = []
    for name, rows in found.items():
        factors = [new / old for old, new, _ in rows]
        grew, shrank = sum(factor > APART for factor in factors), sum(factor < 1 / APART for factor in factors)
        line = max(rows, key=lambda row: row[1] / row[0])[2] if grew else ""
        columns = [row[0] for row in rows], [row[1] for row in rows]
        errors.append(Errors(name, *columns, statistics.median(factors), grew, shrank, line))
    return errors


def distribution(ratios: Sequence[float]) -> list[int]:
    """How many ratios are in each part of a scale that STEPS cuts. The first part has all that are smaller."""
    return [sum(low < ratio <= high for ratio in ratios) for low, high in zip((-1.0, *STEPS[:-1]), STEPS, strict=True)]


def _signatures(one: SiteWorkers) -> dict[str, list[str]]:
    """The parameters of each function under test, in their order."""
    found: dict[str, dict[str, None]] = {}
    for outcome in one.outcomes.values():
        for function, values in outcome.reach.functions.items():
            found.setdefault(function.rpartition(":")[2], {}).update(dict.fromkeys(values))
    return {function: list(names) for function, names in found.items()}


def parameter_changes(old: Mapping[str, list[str]], new: Mapping[str, list[str]]) -> list[tuple[str, list[str]]]:
    """For each function whose parameters differ, the difference in words and the parameters that are gone."""
    one = len(old) == len(new) == 1  # then it may have another name
    pairs = list(zip(old, new, strict=True)) if one else [(name, name) for name in old if name in new]
    found = []
    for before, after in pairs:
        words, gone = ([f"is now {after}"] if before != after else []), list[str]()
        for tag, low, high, start, end in difflib.SequenceMatcher(None, old[before], new[after], autojunk=False).get_opcodes():
            was, now = old[before][low:high], new[after][start:end]
            if tag == "replace" and len(was) == len(now):
                words += [f"{name} is now {other}" for name, other in zip(was, now, strict=True)]
                gone += was
            elif tag != "equal":
                gone += [name for name in was if name not in new[after]]
                words += [f"{name} is {'gone' if name not in new[after] else 'elsewhere'}" for name in was]
                words += [f"{name} is new" for name in now if name not in old[before]]
        if words:
            found.append((f"{before}: {', '.join(words)}", gone))
    return found


def _domain_changes(before: SiteWorkers, after: SiteWorkers) -> list[str]:
    """What the adapter's domain has in one place alone, in words."""
    if not (before.described and after.described):
        return []
    old, new = (next(iter(one.described.values())).domain.to_json() for one in (before, after))
    words = []
    for name in [name for name in old if name in new and old[name] != new[name]]:
        was, now = old[name], new[name]
        if isinstance(was, tuple) and isinstance(now, tuple):
            lost, more = [item for item in was if item not in now], [item for item in now if item not in was]
            words.append(f"{name}: " + "; ".join([*(f"without {item}" for item in lost), *(f"also {item}" for item in more)]))
        else:
            words.append(f"{name}: {was} before, {now} now")
    return words


def _promised_before(before: SiteWorkers, after: SiteWorkers) -> list[str]:
    """What only the adapter of the old version promises to the bit, in words."""
    domains = [described.domain for one in (before, after) for described in one.described.values()]
    if len(domains) < 2:
        return []
    lost = [name for name in BITS if getattr(domains[0], name, False) and not getattr(domains[1], name, False)]
    return [f"{name} is no longer promised" for name in lost]


def _called(one: SiteWorkers, run: Run, timed: int = 0) -> Called | None:
    call = one.ask(run.device, Calls(str(one.here(run)), timed), Called, TIMING_S if timed else None)
    return call if isinstance(call, Called) and not call.reason else None


def _reactions(one: SiteWorkers, run: Run) -> dict[str, str]:
    """What the implementation does with each illegal input, by the input's name."""
    if not one.described:
        return {}
    domain = next(iter(one.described.values())).domain
    did = {}
    for name in book_of(domain).illegal.names(domain.operation):
        one.ask(run.device, Describe(one.here(run).adapter), Description)  # the input before may have ended the process
        reply = one.ask(run.device, Refuse(one.here(run).adapter, name, run.tune), Reaction, REFUSAL_S)
        did[name] = reply.did if isinstance(reply, Reaction) else reply
    return did


def _way(did: str) -> str:
    """What an implementation does, without the name of the exception."""
    return did.partition(" (")[0]


def _refuses(did: str) -> bool:
    return did not in (SILENT, STRAYS) and not did.startswith(("crashed", "hung"))


def timed(comparison: Differences, runs: Sequence[tuple[Run, Run]], make: Callable[[int], SiteWorkers]) -> None:
    """Time the longest cases that hold in both versions, on a GPU, in new processes that take turns. Triton tunes their kernels."""
    held = [pair.run for pair in comparison.of(BOTH[HOLDS]) if pair.run.the_law.base][-TIMED:]
    comparison.untimed = "no line could be measured"
    with make(0) as old, make(1) as new:
        for run in [[dataclasses.replace(run, tune="native") for run in pair] for pair in runs if pair[1] in held]:
            turns: dict[int, list[Called]] = {0: [], 1: []}
            for number in range(ROUNDS):
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    if call := _called((old, new)[side], run[side], CALLS):
                        turns[side].append(call)
            if len(turns[0]) == len(turns[1]) == ROUNDS:
                before, after = ([statistics.median(call.times_ms) for call in turns[side]] for side in (0, 1))
                most = [max(call.memory for call in turns[side]) for side in (0, 1)]
                comparison.timings.append(Timing(str(run[1]), before, after, *most))
