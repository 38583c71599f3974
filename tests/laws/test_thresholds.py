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
from tests.laws.test_afresh import HERE as RIGHT_CALLS
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
    wrong.PoolHeadsUpTo1000: ("oracle", 1000, "zoo/Serving"),
    wrong.TailsOf140: ("history", 140, f"{RIGHT_CALLS}:WeighsPlaces"),
    wrong.WholeDraftsAtEndsOf96: ("session", 96, "gdn/pool"),
}
SOURCE = '''
"""Numbers in every place."""
import functools
import torch
import other_numbers
import whole.part
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
        other_numbers.of_the_module(whole.part.inside(x))
        return elsewhere(torch.ones(113))
'''
ELSEWHERE = """
import mine  # back again

def elsewhere(x):
    return x.shape[0] <= 0x7FF

def of_the_module(x, *, most=115):
    return mine.helper(x) if x else 0

def never(x):
    return 114
"""


@pytest.fixture
def sources(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "other_numbers.py").write_text(ELSEWHERE)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").write_text("")
    (tmp_path / "whole" / "part.py").write_text("def inside(x):\n    return x[:116]\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "mine.py"


def test_numbers_are_found_where_the_implementation_reaches_them_and_nothing_is_run(
    sources: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.execution.thresholds.MOST", 100)
    assert thresholds_of(load(f"{sources}:Mine")) == [101, 103, 107, 108, 109, 110, 112, 113, 115, 116, 1024, 2047]


def test_the_largest_are_taken_and_ours_have_none(sources: pathlib.Path) -> None:
    found = thresholds_of(load(f"{sources}:Mine"))
    assert found == [109, 110, 112, 113, 115, 116, 1024, 2047]
    assert len(found) == MOST
    assert LEAST <= min(found) <= max(found) <= LARGEST
    assert thresholds_of(load("zoo/Chunkwise")) == thresholds_of(load("gdn/pool")) == []


def test_no_number_is_lost_among_many(sources: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are made for a look at them must not be taken for others that had their addresses."""
    monkeypatch.setattr("verify.execution.thresholds.MOST", 1000)
    functions = [f"def f{number}(x, *, most={number}):\n    return x\n" for number in range(1000, 1400)]
    calls = "".join(f"        f{number}(x)\n" for number in range(1000, 1400))
    head = "from verify import Adapter, Domain\n"
    source = f"{head}{''.join(functions)}class Mine(Adapter):\n    domain = Domain()\n    def run(self, x):\n{calls}"
    file = sources.with_name("many.py")
    file.write_text(source)
    assert thresholds_of(load(f"{file}:Mine")) == [*range(1000, 1400)]


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
