"""What an implementation does with calls just outside its domain, as data and as the lines of a report."""

import dataclasses
from collections.abc import Sequence

WRONG, REFUSES, RIGHT, UNDECIDED = "accepted and wrong", "refused", "right", "undecided"
SAYS = (WRONG, REFUSES, RIGHT, UNDECIDED)  # the answer to several calls is the first of these that one of them has


@dataclasses.dataclass(frozen=True)
class Answer:
    """What an implementation did with something that its domain leaves out.

    - `what` is its name (properties/words/outside.py), and `did` one of SAYS
    - `line`: a line that repeats a call with this answer
    - `detail`: what is wrong with a result, the error of a refusal, or why nothing is decided
    - `cases`: how many calls were made
    """

    what: str
    did: str
    line: str
    detail: str = ""
    cases: int = 1


def lines(answers: Sequence[Answer]) -> list[str]:
    """A line for each answer, and below a wrong one the command that repeats it. Wrong answers come last, as the last word."""
    if not answers:
        return []
    found = ["outside the domain, reported and not judged:"]
    for answer in sorted(answers, key=lambda answer: answer.did == WRONG):
        more = f" ({answer.detail})" if answer.detail else ""
        found.append(f"  {answer.what}: {answer.did}{more}")
        found += [f'    repeat     gdn-verify repeat "{answer.line}"'] if answer.did == WRONG else []
    return found


def wrong(answers: Sequence[Answer]) -> list[str]:
    """What was accepted with a wrong result, by name."""
    return [answer.what for answer in answers if answer.did == WRONG]
