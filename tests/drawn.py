"""The verdicts of an adapter in drawn examples of a law."""

from collections.abc import Callable
from typing import Any

import pytest

from properties.books import book_of
from properties.palette import sample
from properties.words.example import Example
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict


def verdicts_of(
    adapter: Any, law: str, domain: Any, count: int, patch: pytest.MonkeyPatch, accept: Callable[[Example], bool], seed: int
) -> list[Verdict]:
    """The verdicts of an adapter with a domain, in so many examples that `accept` takes, until one is broken."""
    adapter.domain = domain
    patch.setitem(judging._LOADED, "it", adapter)
    found: list[Verdict] = []
    for example in sample(book_of(domain).laws[law].draw(domain).filter(accept), seed, count):
        assert domain.outside(example.case) is None
        found.append(execute(Run(law, "it", example)).verdict)
        if found[-1] is Verdict.BROKEN:
            break
    return found
