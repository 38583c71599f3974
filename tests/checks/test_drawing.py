"""Drawing gives the examples of a seed in one order, in whatever thread, and stops with the last one or when nobody wants more."""

import os
import signal
import threading
import time
from functools import partial

import pytest
from hypothesis import strategies as st

from verify.engine.drawing import batches, seeded


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
