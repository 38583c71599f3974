"""Merges the answers of ranks into one."""

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from verify.process.messages import Answer, Failure, OfRank, Outcomes, Reaction
from verify.process.outcome import Finding, Outcome, Verdict, rank_names
from verify.process.reach import Reach

IDLE = "this rank takes no part in the case"
Ranked = TypeVar("Ranked", bound=OfRank)


def failed(answer: OfRank) -> bool:
    """Whether a rank with this answer may have left others waiting."""
    match answer:
        case Outcomes():
            return any(map(failed, answer.outcomes))
        case Outcome():
            return answer.verdict is not Verdict.HOLDS
        case Reaction():
            return answer.left
    return isinstance(answer, Failure)


def left(answer: OfRank) -> bool:
    """Whether a rank with this answer may have left the case early. It has not if all its findings come from comparisons."""
    compared = isinstance(answer, Outcome) and answer.findings and all(finding.rows for finding in answer.findings)
    return failed(answer) and not compared


def parted(answers: Sequence[OfRank]) -> bool:
    """Whether ranks may have left a case at different places. They have not if all went to its end, or if all answers agree."""
    if any(isinstance(answer, Outcomes) for answer in answers):
        lists = list(map(_outcomes, answers))
        return len({len(one) for one in lists}) > 1 or any(parted(run_answers) for run_answers in zip(*lists, strict=True))
    return any(map(left, answers)) and any(_contents(answer) != _contents(answers[0]) for answer in answers)


def _outcomes(answer: OfRank) -> list[Outcome]:
    return answer.outcomes if isinstance(answer, Outcomes) else []


def _contents(answer: OfRank) -> Any:
    """What must be the same on ranks that are at the same place. Findings are compared as text, since NaN is not equal to NaN."""
    if isinstance(answer, Outcome):
        return answer.verdict, answer.reason, _text(answer.findings)
    return answer.did if isinstance(answer, Reaction) else answer


def _text(findings: Sequence[Finding]) -> str:
    """The findings as text, without their pictures and their source: hosts may keep the code in different folders."""
    return json.dumps([dataclasses.replace(finding, picture=None, source="").to_json() for finding in findings])


def merge(answers: Mapping[int, OfRank], waited: str = "") -> OfRank:
    """Merge the answers of ranks. Findings name their ranks; `waited` says what the ranks without an answer did.

    The verdict is BROKEN if any rank has it, and any other verdict if all ranks agree on it. Otherwise it is UNKNOWN, and the
    reason lists the verdict of each rank.
    """
    answers = dict(sorted(answers.items()))
    first = next(iter(answers.values()))
    if any(isinstance(answer, Outcomes) for answer in answers.values()):
        lists = {rank: _outcomes(answer) for rank, answer in answers.items()}
        whole = 0 if waited else min(map(len, lists.values()))
        runs = [merge_outcomes({rank: one[place] for rank, one in lists.items()}) for place in range(whole)]
        return Outcomes(runs, any(isinstance(answer, Outcomes) and answer.spent for answer in answers.values()))
    reactions = {rank: answer for rank, answer in answers.items() if isinstance(answer, Reaction)}
    if len(reactions) == len(answers):
        return Reaction(reaction({rank: answer.did for rank, answer in busy(reactions).items()}, waited))
    if any(isinstance(answer, Outcome) for answer in answers.values()):
        return merge_outcomes({rank: _as_outcome(answer) for rank, answer in answers.items()}, waited)
    if all(answer == first for answer in answers.values()) and not waited:
        return first
    text = by_rank({rank: _as_text(answer) for rank, answer in answers.items()})
    return Failure("; ".join([f"ranks disagree: {text}" if len(answers) > 1 else text, *([waited] if waited else [])]))


def merge_outcomes(every: Mapping[int, Outcome], waited: str = "") -> Outcome:
    """Merge the outcomes of ranks (see `merge`). Those of ranks without a part in the case do not count."""
    outcomes = busy(every)
    found: dict[str, tuple[Finding, list[int]]] = {}
    for rank, outcome in outcomes.items():
        for finding in outcome.findings:
            ranks = found.setdefault(_text([finding]), (finding, []))[1]
            ranks += [rank] * (rank not in ranks)  # several runs of a case may have the same failure
    while_waiting = f"; while {waited}" if waited else ""
    findings = [
        dataclasses.replace(finding, ranks=tuple(ranks), what=finding.what + while_waiting) for finding, ranks in found.values()
    ]
    verdicts = {outcome.verdict for outcome in outcomes.values()}
    reasons = {rank: outcome.reason for rank, outcome in outcomes.items()}
    if Verdict.BROKEN in verdicts:
        verdict, reason = Verdict.BROKEN, by_rank({rank: reason for rank, reason in reasons.items() if reason})
    elif len(verdicts) == 1 and not waited:
        verdict = verdicts.pop()
        reason = next(iter(reasons.values())) if len(set(reasons.values())) == 1 else by_rank(reasons)
    else:
        verdict = Verdict.UNKNOWN
        text = by_rank({rank: ": ".join(filter(None, [outcome.verdict, outcome.reason])) for rank, outcome in outcomes.items()})
        reason = f"ranks disagree: {text}" + (f"; {waited}" if waited else "")
    rows = sum(outcome.rows for outcome in outcomes.values())
    if verdict is Verdict.HOLDS and rows == 0:
        verdict, reason = Verdict.BLIND, "nothing to compare: no rank has a row"
    reach = Reach()
    for outcome in outcomes.values():
        reach.add(outcome.reach)
    names = {name for outcome in outcomes.values() for name in outcome.ratios}
    one_by_one = sum((collections.Counter(outcome.one_by_one) for outcome in outcomes.values()), collections.Counter[str]())
    return Outcome(
        verdict,
        findings,
        reason,
        rows,
        {name: max(outcome.ratios.get(name, 0.0) for outcome in outcomes.values()) for name in sorted(names)},
        max(outcome.kernel_s for outcome in outcomes.values()),
        max(outcome.oracle_s for outcome in outcomes.values()),
        max(outcome.cpu_s for outcome in outcomes.values()),
        spent=any(outcome.spent for outcome in outcomes.values()),
        tuned=next((outcome.tuned for outcome in outcomes.values() if outcome.tuned), {}),
        fault=next((outcome.fault for outcome in outcomes.values() if outcome.fault), ""),
        one_by_one=dict(one_by_one),
        reach=reach,
    )


def busy(answers: Mapping[int, Ranked]) -> Mapping[int, Ranked]:
    """The answers of the ranks that have a part in the case, or all answers if no rank has."""
    return {
        rank: answer for rank, answer in answers.items() if not (isinstance(answer, Outcome | Reaction) and answer.idle)
    } or answers


def reaction(did: Mapping[int, str], waited: str = "") -> str:
    """What ranks did with an illegal layout, such as "refuses (ValueError) on rank 0, hangs on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, words in did.items():
        ranks.setdefault(words, []).append(rank)
    if len(ranks) == 1 and not waited:
        return next(iter(ranks))
    text = ", ".join(f"{words} on {rank_names(who)}" for words, who in ranks.items())
    return text + (f", while {waited}" if waited else "")


def _as_outcome(answer: OfRank) -> Outcome:
    return answer if isinstance(answer, Outcome) else Outcome(Verdict.UNKNOWN, reason=_as_text(answer))


def _as_text(answer: OfRank) -> str:
    return answer.error if isinstance(answer, Failure) else str(answer.to_json() if isinstance(answer, Answer) else answer)


def by_rank(texts: Mapping[int, str], between: str = ": ") -> str:
    """The texts of ranks in one line, equal texts together: "ranks 0, 2: holds; rank 1: blind: no rows"."""
    ranks: dict[str, list[int]] = {}
    for rank, words in texts.items():
        ranks.setdefault(words, []).append(rank)
    return "; ".join(f"{rank_names(who)}{between}{words}" for words, who in ranks.items())
