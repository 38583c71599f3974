"""Merges the answers of ranks into one."""

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verify.process.messages import Answer
from verify.process.outcome import Finding, Outcome, Verdict, rank_names
from verify.process.reach import Reach

IDLE = "this rank takes no part in the case"  # the reason in the outcome of a rank that the case does not need


def failed(answer: Answer) -> bool:
    """Whether a rank with this answer may have left others waiting."""
    if "outcomes" in answer:
        return any(map(failed, answer["outcomes"]))
    return "error" in answer or bool(answer.get("left")) or answer.get("verdict", Verdict.HOLDS) != Verdict.HOLDS


def left(answer: Answer) -> bool:
    """Whether a rank with this answer may have left the case early. It has not if all its findings come from comparisons."""
    return failed(answer) and not (answer.get("findings") and all(finding["rows"] for finding in answer["findings"]))


def parted(answers: Sequence[Answer]) -> bool:
    """Whether ranks may have left a case at different places. They have not if all went to its end, or if all answers agree."""
    if any("outcomes" in answer for answer in answers):
        lists = [answer.get("outcomes", []) for answer in answers]
        return len({len(one) for one in lists}) > 1 or any(parted(run_answers) for run_answers in zip(*lists, strict=True))

    def contents(answer: Answer) -> Any:
        return [answer.get(key) for key in ("error", "verdict", "reason", "findings", "did")]

    return any(map(left, answers)) and any(contents(answer) != contents(answers[0]) for answer in answers)


def merge(answers: Mapping[int, Answer], waited: str = "") -> Answer:
    """Merge the answers of ranks. Findings name their ranks; `waited` says what the ranks without an answer did.

    The verdict is BROKEN if any rank has it, and any other verdict if all ranks agree on it. Otherwise it is UNKNOWN, and the
    reason lists the verdict of each rank.
    """
    answers = dict(sorted(answers.items()))
    first = next(iter(answers.values()))
    if any("outcomes" in answer for answer in answers.values()):
        lists = [answer.get("outcomes", []) for answer in answers.values()]
        whole = 0 if waited else min(map(len, lists))
        runs = zip(*(one[:whole] for one in lists), strict=True)
        return {
            "outcomes": [merge(dict(zip(answers, run_answers, strict=True))) for run_answers in runs],
            "spent": any(answer.get("spent") for answer in answers.values()),
        }
    if all("did" in answer for answer in answers.values()):
        return {"did": reaction({rank: str(answer["did"]) for rank, answer in busy(answers).items()}, waited)}
    if not any("verdict" in answer for answer in answers.values()):
        if all(answer == first for answer in answers.values()) and not waited:
            return first
        text = by_rank({rank: str(answer.get("error", answer)) for rank, answer in answers.items()})
        return {"error": "; ".join([f"ranks disagree: {text}" if len(answers) > 1 else text, *([waited] if waited else [])])}
    outcomes = {rank: _outcome(answer) for rank, answer in busy(answers).items()}
    found: dict[str, tuple[Finding, list[int]]] = {}
    for rank, outcome in outcomes.items():
        for finding in outcome.findings:  # compared as text, since NaN is not equal to NaN
            found.setdefault(json.dumps(finding.to_json()), (finding, []))[1].append(rank)
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
    ).to_json()


def busy(answers: Mapping[int, Answer]) -> Mapping[int, Answer]:
    """The answers of the ranks that have a part in the case, or all answers if no rank has."""
    return {rank: answer for rank, answer in answers.items() if answer.get("reason") != IDLE} or answers


def reaction(did: Mapping[int, str], waited: str = "") -> str:
    """What ranks did with an illegal layout, such as "refuses (ValueError) on rank 0, hangs on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, words in did.items():
        ranks.setdefault(words, []).append(rank)
    if len(ranks) == 1 and not waited:
        return next(iter(ranks))
    text = ", ".join(f"{words} on {rank_names(who)}" for words, who in ranks.items())
    return text + (f", while {waited}" if waited else "")


def _outcome(answer: Answer) -> Outcome:
    return Outcome.from_json(answer) if "verdict" in answer else Outcome(Verdict.UNKNOWN, reason=str(answer.get("error", answer)))


def by_rank(texts: Mapping[int, str], between: str = ": ") -> str:
    """The texts of ranks in one line, equal texts together: "ranks 0, 2: holds; rank 1: blind: no rows"."""
    ranks: dict[str, list[int]] = {}
    for rank, words in texts.items():
        ranks.setdefault(words, []).append(rank)
    return "; ".join(f"{rank_names(who)}{between}{words}" for words, who in ranks.items())
