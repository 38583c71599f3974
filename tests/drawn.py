"""The examples that a check draws, and the verdicts of an adapter in drawn examples of a law."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from properties.books import book_of
from properties.palette import sample
from properties.words.example import Example
from properties.words.sizes import MOST, sized
from verify.engine.drawing import of_law
from verify.engine.profiles import PROFILES
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


def spec_of(kind: type) -> str:
    """The spec of an adapter's class in a file of the tests."""
    return f"{kind.__module__.replace('.', '/')}.py:{kind.__name__}"


def domain_in_a_check(spec: str) -> Any:
    """The domain of an adapter of plain torch with the sizes of a check's cases."""
    adapter: Any = judging.adapter_of(spec)
    return sized(adapter.domain, getattr(adapter, "chunk", None), MOST["quick"], adapter.algorithm)


@functools.cache
def in_a_check(law: str, domain: Any, seed: int) -> list[Example]:
    """The examples of a law in a check with the default profile."""
    found: list[Example] = []
    of_law(book_of(domain).laws[law], domain, seed, PROFILES["quick"].examples_of(book_of(domain).laws[law]), found.append)
    return found
