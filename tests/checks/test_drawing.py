"""Drawing gives the examples of a seed in one order, in whatever thread, and stops with the last one or when nobody wants more."""

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st

from properties.books import book_of
from properties.layers.domain import LayerDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.traces.domain import TraceDomain
from properties.words.example import Example
from properties.words.pairs import pairs_of
from verify.engine import drawing
from verify.engine.drawing import batches, of_law, paired, seeded


def test_batches_have_the_order_of_drawing_and_at_most_their_size() -> None:
    want: list[int] = []
    seeded(st.integers(0, 10**6), 3, 40, want.append)
    got = list(batches(partial(seeded, st.integers(0, 10**6), 3, 40), 7))
    assert [number for batch in got for number in batch] == want
    assert 0 < min(map(len, got)) <= max(map(len, got)) <= 7


def test_nothing_is_drawn_after_the_last_example() -> None:
    drawn: list[int] = []
    seeded(st.integers(0, 10**6).map(lambda number: drawn.append(number) or number), 3, 40, lambda _: None)
    assert len(set(drawn)) == 41, "and the one with which Hypothesis begins for every seed"
    assert drawn[-1] not in drawn[:-1]


def test_a_thread_that_has_drawn_draws_again() -> None:
    drew: set[threading.Thread] = set()  # a first drawing in a thread takes long

    def draw(number: int) -> int:
        drew.add(threading.current_thread())
        return number

    for seed in range(10):
        assert list(batches(partial(seeded, st.integers(0, 10**6).map(draw), seed, 3), 2))
    assert threading.current_thread() not in drew
    assert len(drew) < 10


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12: a fork beside threads
def test_a_fork_of_this_process_draws_in_threads_of_its_own() -> None:
    assert list(batches(partial(seeded, st.integers(0, 10**6), 0, 3), 2))
    source, target = os.pipe()
    if not os.fork():
        signal.alarm(20)
        os.write(target, str(sum(map(len, batches(partial(seeded, st.integers(0, 10**6), 1, 3), 2)))).encode())
        os._exit(0)
    os.close(target)
    os.wait()
    with open(source) as pipe:
        assert pipe.read() == "3"


def test_nothing_is_drawn_for_who_has_left() -> None:
    count, more = [0], threading.Event()

    def draw(number: int) -> int:
        count[0] += 1
        if count[0] > 5:
            more.wait(10)
        return number

    wanted = batches(partial(seeded, st.integers(0, 10**6).map(draw), 0, 10**5), 2)
    next(wanted)
    wanted.close()
    more.set()
    before = -1
    while before != count[0]:
        before = count[0]
        time.sleep(0.1)
    assert count[0] < 20


def test_a_drawing_that_fails_fails_its_caller() -> None:
    def refuse(number: int) -> int:
        raise ArithmeticError(f"not {number}")

    with pytest.raises(ArithmeticError, match=r"^not "):
        list(batches(partial(seeded, st.integers(0, 9).map(refuse), 0, 5), 2))


def _pairs(examples: list[Example]) -> int:
    return len({pair for example in examples for pair in pairs_of(example)})


@pytest.mark.parametrize(
    ("law", "domain", "more"),
    [("oracle", Domain(), 1.03), ("strides", Domain(), 1.03), ("oracle", LayerDomain(), 1.03), ("session", TraceDomain(), 1.005)],
)
def test_of_a_few_examples_more_words_come_together(law: str, domain: Any, more: float) -> None:
    for seed in range(3):
        chosen, drawn = list[Example](), list[Example]()
        strategy = book_of(domain).laws[law].draw(domain)
        paired(strategy, seed, 32, chosen.append)
        seeded(strategy, seed, 32, drawn.append)
        assert len(chosen) == len({*chosen}) == len(drawn) == 32
        assert _pairs(chosen) > more * _pairs(drawn), seed


def test_of_a_law_with_few_examples_all_come_once_and_none_that_was_seen() -> None:
    few = st.sampled_from([Example(Case((length,))) for length in range(1, 8)])
    for count, seen in ((5, 0), (7, 0), (9, 0), (9, 2)):
        examples: list[Example] = []
        paired(few, 0, count, examples.append, [Example(Case((length,))) for length in range(1, seen + 1)])
        assert len(examples) == len({*examples}) == min(count, 7 - seen)
        assert all(example.case.lengths[0] > seen for example in examples)


def test_laws_that_compare_with_the_truth_and_have_few_examples_are_drawn_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(drawing, "paired", lambda strategy, seed, examples, look, seen: asked.append(examples))
    for law, count in (("oracle", 96), ("oracle", 97), ("heads", 32)):
        of_law(book_of(Domain()).laws[law], Domain(), 0, count, lambda _: None)
    assert len(asked) == 1
