"""Draws that depend on a seed alone: Hypothesis without what it takes from the process, the environment or the user's settings.

About 5% of the numbers that Hypothesis draws are constants that stand in the source of imported modules outside site-packages. With
these, the cases of a seed would change with a clone or an installation, with a module beside the user's kernel, and with an edited
number in the kernel. Wide numbers come from a distribution with logarithms, whose last bits are not the same in every mathematical
library. So each whole number that we draw is uniform. Settings that we do not name would come from the profile that a user has
loaded, or from that of a CI host.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.internal.conjecture import providers

from oracles.arithmetic.counter import mix_words

PLACE = "_maybe_draw_constant"  # the method of Hypothesis' provider that may draw a number in another way: None leaves it to others
_OURS = threading.local()  # .draws: whether this thread draws for us
_GENERATOR = "_hypothesis_global_random"  # where Hypothesis keeps a thread's generator
_UNUSED = random.Random(0)  # noqa: S311 - nothing is drawn from it


def draw(strategy: Any, seed: int, most: int, look: Callable[[Any], None], phases: Collection[Phase] = (Phase.generate,)) -> None:
    """Pass up to `most` examples of a strategy to `look`, of which some may be equal. The same seed gives the same examples.

    That holds for one version of Hypothesis, on any machine and beside any modules. RuntimeError if this version draws constants in
    another way than the versions that we know.
    """

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=most,
        phases=phases,
        backend="hypothesis",
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        stateful_step_count=50,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.normal,
    )
    @hypothesis.given(strategy)
    def drive(example: Any) -> None:
        with _constants(without=False):  # what `look` calls may draw for somebody else
            look(example)

    with _constants(without=True), _with_a_generator():
        drive()


@contextlib.contextmanager
def _with_a_generator() -> Iterator[None]:
    """A context in which this thread has a generator from which Hypothesis would seed a test without a seed.

    Ours have one. Hypothesis would make and register a generator for each thread that draws, and look through all objects of the
    process before it does. That took a fifth of a second for each law in a process with many objects.
    """
    local = getattr(hypothesis.core, "threadlocal", None)
    if getattr(local, _GENERATOR, _UNUSED) is not None:  # this thread has one, or this version keeps them elsewhere
        yield
        return
    setattr(local, _GENERATOR, _UNUSED)
    try:
        yield
    finally:
        setattr(local, _GENERATOR, None)


@contextlib.contextmanager
def _constants(*, without: bool) -> Iterator[None]:
    """A context in which this thread's draws are without constants, or are again as in a user's test."""
    before, _OURS.draws = getattr(_OURS, "draws", False), without
    try:
        if without and getattr(providers.HypothesisProvider, PLACE, None) is not _drawn_constant:
            raise RuntimeError(
                f"Hypothesis {hypothesis.__version__} has no HypothesisProvider.{PLACE}, so a seed would not give its cases; "
                "install a version that this gdn-verify knows, such as 6.170"
            )
        yield
    finally:
        _OURS.draws = before


def _patch() -> Any:
    """Let our draws have no constants. Returns the method that is now in place, or None if there was no such method."""
    provider = providers.HypothesisProvider
    if (plain := provider.__dict__.get(PLACE)) is None:
        return None

    def drawn(self: Any, kind: str, constraints: Any, **options: Any) -> Any:
        if not getattr(_OURS, "draws", False):
            return plain(self, kind, constraints, **options)
        least, most = constraints.get("min_value"), constraints.get("max_value")
        uniform = kind == "integer" and least is not None and most is not None and not constraints.get("weights")
        return self._random.randint(least, most) if uniform else None

    setattr(provider, PLACE, drawn)
    return drawn


_drawn_constant = _patch()


def further_apart(seed: int, count: int) -> list[int]:
    """Return `count` numbers, each larger than the one before: 1, and others that lie close at first and then further apart."""
    numbers, least = list[int](), 1
    for turn in range(count):
        numbers.append(least + mix_words(seed, f"failure {turn}") % (1 + least // 3))
        least += 1 + least // 3
    return numbers
