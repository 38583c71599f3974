"""Asks an implementation for a few calls just outside its domain: are they refused, right, or accepted and wrong?"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.words.example import Example
from properties.words.outside import CASES, OUTSIDE, outside_of
from verify.engine.drawing import seeded
from verify.execution.line import Run
from verify.execution.outside import BOOKS, REFUSED
from verify.findings.outside import REFUSES, RIGHT, SAYS, UNDECIDED, WRONG, Answer
from verify.process.outcome import Outcome, Verdict

NARROW = 4
DRAWN = 16  # cases inside the domain, of which the calls are made


def names_of(domain: Any) -> list[str]:
    """What may be asked about a domain, by name."""
    return outside_of(domain) if book_of(domain).name in BOOKS else []


def ask_outside(
    what: str,
    domain: Any,
    seed: int,
    run_of: Callable[[str, Example], Run],
    ask: Callable[[Run], Outcome],
    *,
    of_one_key: bool = False,
) -> Answer | None:
    """What the implementation does with `what`; None if it is not asked, because it has no parameter for it or no such call exists.

    A wrong result counts only if a call like it inside the domain is right. If `of_one_key`, the calls have one compile key.
    """
    law, answers = OUTSIDE[what].law, list[Answer]()
    for case, inside in _cases(what, domain, seed, of_one_key=of_one_key):
        run = dataclasses.replace(run_of(law, Example(case)), outside=what)
        did, detail = _answer(ask(run))
        if did == WRONG and ask(run_of("oracle", Example(inside))).verdict is not Verdict.HOLDS:
            did, detail = UNDECIDED, "a call like it inside the domain is not right either"
        if not did:
            return None
        answers.append(Answer(what, did, str(run), detail))
        if did == WRONG:
            break
    found = min(answers, key=lambda answer: SAYS.index(answer.did), default=None)
    return None if found is None else dataclasses.replace(found, cases=len(answers))


def _cases(what: str, domain: Any, seed: int, *, of_one_key: bool) -> Sequence[tuple[Any, Any]]:
    drawn: list[Example] = []
    base = book_of(domain).base
    assert base is not None, domain
    seeded(base.draw(domain), mix_words(seed, f"outside {what}"), DRAWN, drawn.append)
    cases = sorted((example.case for example in drawn), key=lambda case: (_narrow(case), case.bytes))
    if not of_one_key:
        return [*OUTSIDE[what].cases(domain, cases)]
    every = ([*OUTSIDE[what].cases(domain, [case] * CASES)] for case in cases)
    return next((found for found in every if found), ())


def _narrow(case: Any) -> bool:
    """Whether a state has so few rows or columns that its layout may not show."""
    return min(getattr(case, "key_dim", NARROW), getattr(case, "value_dim", NARROW)) < NARROW


def _answer(outcome: Outcome) -> tuple[str, str]:
    """One of SAYS with its detail; "" if the implementation was not asked."""
    if outcome.verdict is Verdict.HOLDS:
        return RIGHT, ""
    if outcome.verdict is Verdict.UNSUPPORTED:
        refused = outcome.reason.startswith(REFUSED)
        return (REFUSES, outcome.reason.removeprefix(REFUSED)) if refused else ("", outcome.reason)
    if outcome.verdict is Verdict.BROKEN and not outcome.lost:
        finding = outcome.findings[0]
        return WRONG, f"{finding.place} {finding.what}, {finding.worst}"
    return UNDECIDED, outcome.reason or outcome.findings[0].what
