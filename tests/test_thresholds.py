"""Numbers that an implementation's source names: how they are found, and the cases just over them, which no other shows."""

import functools
import pathlib
from typing import Any

import pytest

from properties.books import book_of
from properties.words.example import Example
from properties.words.sizes import with_drawing
from tests import named_sizes as wrong
from tests.drawn import domain_in_a_check
from tests.test_afresh import HERE as RIGHT_CALLS
from verify.adapters.loader import load
from verify.engine.asking import ask
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.execution.thresholds import LARGEST, LEAST, MOST, thresholds_of
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker

HERE = "tests/named_sizes.py"
# The law and the number that show each, and its right form.
SHOWN_BY: dict[type, tuple[str, int, str]] = {
    wrong.ValuesUpTo600: ("oracle", 600, "zoo/Chunkwise"),
    wrong.SquaresUpTo9000: ("oracle", 9000, "zoo/GatedNorm"),
    wrong.LayerRowsUpTo300: ("oracle", 300, "zoo/Layered"),
    wrong.PoolHeadsUpTo600: ("oracle", 600, "zoo/Serving"),
    wrong.TailsOf140: ("history", 140, f"{RIGHT_CALLS}:WeighsPlaces"),
    wrong.WholeDraftsAtEndsOf96: ("session", 96, "gdn/pool"),
}
SOURCE = '''
"""Numbers in every place."""
import functools
import torch
from verify import Adapter, Domain
from other_numbers import elsewhere

_GLOBAL, _UNREACHED = 101, 102
_TABLE = (103, "104", 105.0, True, 20, 70_000)

def unused():
    return 106

def wrapped(function):
    limit = 107
    @functools.wraps(function)
    def inner(*arguments):
        return function(*arguments) if arguments[0] > limit else None
    return inner

@wrapped
def helper(x, most=108, *, least=109):
    return [y for y in range(_GLOBAL) if y > 110]

class Base(Adapter):
    domain = Domain(longest=111)
    limit = 112

    @property
    def size(self):
        raise RuntimeError("nothing is run")

    @staticmethod
    def blocks(x):
        return x // 2**10 + len(_TABLE)

class Mine(Base):
    def run(self, x):
        helper(x)
        return elsewhere(torch.ones(113))
'''
ELSEWHERE = "def elsewhere(x):\n    return x.shape[0] <= 0x7FF\n\ndef never(x):\n    return 114\n"


@pytest.fixture
def sources(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "other_numbers.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "mine.py"


def test_numbers_are_found_where_the_implementation_reaches_them_and_nothing_is_run(
    sources: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.execution.thresholds.MOST", 100)
    assert thresholds_of(load(f"{sources}:Mine")) == [101, 103, 107, 108, 109, 110, 112, 113, 1024, 2047]


def test_the_largest_are_taken_and_ours_have_none(sources: pathlib.Path) -> None:
    found = thresholds_of(load(f"{sources}:Mine"))
    assert found == [107, 108, 109, 110, 112, 113, 1024, 2047]
    assert len(found) == MOST
    assert LEAST <= min(found) <= max(found) <= LARGEST
    assert thresholds_of(load("zoo/Chunkwise")) == thresholds_of(load("gdn/pool")) == []


@functools.cache
def fixed(kind: type, *numbers: int) -> list[Example]:
    domain = with_drawing(domain_in_a_check(f"{HERE}:{kind.__name__}"), named=numbers)
    found: Any = book_of(domain).laws[SHOWN_BY[kind][0]].always(domain)
    return [*found]


@pytest.mark.parametrize("kind", SHOWN_BY, ids=lambda kind: kind.__name__)
@pytest.mark.slow_after_first
def test_only_a_case_just_over_the_number_shows_it(kind: type, worker: Worker, tmp_path: pathlib.Path) -> None:
    law, number, right = SHOWN_BY[kind]
    others = fixed(kind)
    for example in fixed(kind, number):
        verdict = ask(Run(law, f"{HERE}:{kind.__name__}", example), worker, Store(tmp_path)).verdict
        assert verdict is Verdict.HOLDS or example not in others, example
        assert execute(Run(law, right, example)).verdict is Verdict.HOLDS, example
    shown = [example for example in fixed(kind, number) if example not in others]
    assert Verdict.BROKEN in [ask(Run(law, f"{HERE}:{kind.__name__}", one), worker, Store(tmp_path)).verdict for one in shown]


@pytest.mark.parametrize("kind", SHOWN_BY, ids=lambda kind: kind.__name__)
def test_the_number_is_found_in_its_source(kind: type) -> None:
    assert SHOWN_BY[kind][1] in thresholds_of(load(f"{HERE}:{kind.__name__}"))
