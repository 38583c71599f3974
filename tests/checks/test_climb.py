"""A climb comes nearer to the bound than as many drawn cases do, by legal cases only, and repeats itself."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.laws.law import Law
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.palette import draw_palette, key_of, suits
from properties.paths.domain import PathDomain
from properties.pools.domain import PoolDomain
from properties.rules.case import BETAS, GATES, VALUES, Case
from properties.rules.domain import Domain
from properties.rules.laws import LAWS
from properties.traces.domain import TraceDomain
from properties.words.example import Example
from tests.answering import Answering
from verify.engine import climb as climb_module
from verify.engine.check import Check
from verify.engine.climb import LEAST, climb, climbed
from verify.engine.drawing import of_law, seeded
from verify.engine.profiles import BASE, PROFILES, Profile
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.outcome import Verdict

RIGHT = f"{pathlib.Path(__file__).parents[1]}/right.py:Chunkwise"
SEEDS = range(6)
DOMAIN = Domain()


def corner(example: Example) -> float:
    """An error over bound, at most 0.9, that grows towards a rare corner: strong decay, beta at its edges, mixed scales, long
    sequences of wide keys, and some seeds more than others."""
    case = example.case
    near = (
        min(1.0, Case.CHOICES["gate"].index(case.gate) / (len(GATES) - 1)),
        BETAS.index(case.beta) / (len(BETAS) - 1),
        VALUES.index(case.values) / (len(VALUES) - 1),
        min(1.0, max(case.lengths, default=0) / 150),
        min(1.0, case.key_dim / 128),
        case.seed % 64 / 63,
    )
    ratio = 0.9
    for nearness in near:
        ratio *= 0.3 + 0.7 * nearness
    return ratio


def drawn(law: Law, seed: int, count: int, domain: Any = DOMAIN) -> list[Example]:
    examples: list[Example] = []
    of_law(law, domain, seed, count, examples.append)
    return examples


def greatest(seed: int, tmp_path: pathlib.Path, *, climbs: bool, ratio: Callable[[Example], float] = corner) -> float:
    """The greatest error over bound that a check of 96 cases comes to."""
    worker = Answering(lambda run: ratio(run.example))
    with Check(Settings(RIGHT, ["oracle"], Profile("some", 96 // BASE), seed, climbs=climbs), [worker], Store(tmp_path)) as check:
        (report,) = check.run()
    assert (report.verdict, len(worker.asked), sum(report.counts.values())) == (Verdict.HOLDS, 96, 96)
    assert len(set(worker.asked)) == 96, "no case is run twice"
    return report.ratios["o"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What drawn cases alone come to, by seed."""
    return [greatest(seed, tmp_path_factory.mktemp("plain"), climbs=False) for seed in SEEDS]


@pytest.mark.slow
def test_a_climb_comes_nearer_to_the_bound_than_as_many_drawn_cases(plain: list[float], tmp_path: pathlib.Path) -> None:
    pairs = [(ratio, greatest(seed, tmp_path, climbs=True)) for seed, ratio in zip(SEEDS, plain, strict=True)]
    nearer = sum(climbing > drawing for drawing, climbing in pairs)
    assert nearer >= len(pairs) - 1, pairs  # with seed 0 a drawn case is nearer
    assert sum(climbing for _, climbing in pairs) > 1.3 * sum(plain), pairs


@pytest.mark.slow
def test_a_climb_without_scores_comes_no_nearer(plain: list[float], tmp_path: pathlib.Path) -> None:
    """What a climb without its target comes to: the test above would see it."""
    blind = []
    for seed in SEEDS:
        best = [0.0]

        def blindly(example: Example, best: list[float] = best) -> float:
            best[0] = max(best[0], corner(example))
            return 0.5

        greatest(seed, tmp_path, climbs=True, ratio=blindly)
        blind.append(best[0])
    assert sum(blind) < 1.3 * sum(plain), (plain, blind)


@pytest.mark.slow
def test_a_law_that_a_climb_breaks_is_reported_as_one_that_drawing_breaks(tmp_path: pathlib.Path) -> None:
    best = max(corner(example) for example in drawn(LAWS["cut"], 0, 60))
    worker = Answering(lambda run: 0.99 * corner(run.example) / best)  # no drawn case is over the bound
    with Check(Settings(RIGHT, ["cut"], Profile("some", 120), 0, climbs=True), [worker], Store(tmp_path)) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.BROKEN
    assert 60 < sum(report.counts.values()) <= 120, "drawn cases come first"
    assert corner(Run.parse(report.first_run).example) > best
    assert report.shrunk


@pytest.mark.parametrize("name", ["oracle", "cut", "packed", "strides", "norm"])
@pytest.mark.slow_after_first
def test_every_case_of_a_climb_is_legal_new_and_no_larger(name: str) -> None:
    law, known = LAWS[name], {example: corner(example) for example in drawn(LAWS[name], 1, 40)}
    climbed_for: list[Example] = []

    def score(example: Example) -> float:
        climbed_for.append(example)
        return corner(example)

    climb(law, DOMAIN, known, 7, 40, score)
    assert len(climbed_for) == len(set(climbed_for)) == 40
    assert not set(climbed_for) & known.keys()
    assert all(suits(law, DOMAIN, example) for example in climbed_for)
    assert max(example.case.bytes for example in climbed_for) <= max(example.case.bytes for example in known)
    assert all(Run.parse(str(Run(name, RIGHT, example))).example == example for example in climbed_for)


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        ("oracle", ModuleDomain("causal_conv1d")),
        ("oracle", ModuleDomain("gated_rms_norm")),
        ("oracle", PoolDomain()),
        ("oracle", LayerDomain()),
        ("session", TraceDomain()),
        ("parallel", PathDomain()),
        ("oracle", Domain(operation="kda", in_kernel=("none", "both"))),
    ],
    ids=lambda value: getattr(value, "operation", value),
)
@pytest.mark.slow_after_first
def test_cases_of_every_book_can_be_climbed(name: str, domain: Any) -> None:
    law = book_of(domain).laws[name]
    known = {example: mix_words(0, str(example)) / 2**63 for example in drawn(law, 1, 24, domain)}
    met: list[Example] = []
    climb(law, domain, known, 7, 24, lambda example: (met.append(example), mix_words(0, str(example)) / 2**63)[1])
    assert len(set(met) - known.keys()) == 24
    assert all(suits(law, domain, example) for example in met)


@pytest.mark.slow
def test_the_same_seed_and_scores_climb_the_same_way() -> None:
    law, known = LAWS["oracle"], {example: corner(example) for example in drawn(LAWS["oracle"], 1, 30)}

    def way(seed: int) -> list[Example]:
        examples: list[Example] = []
        climb(law, DOMAIN, known, seed, 30, lambda example: (examples.append(example), corner(example))[1])
        return examples

    assert way(3) == way(3)
    assert way(3) != way(4)


@pytest.mark.slow
def test_a_climb_stays_with_the_compiled_kernels_if_it_must() -> None:
    law = LAWS["oracle"]
    palette = draw_palette(DOMAIN, 3, 4, ["oracle"])
    known: dict[Example, float] = {}
    seeded(palette.examples(law, DOMAIN), 5, 24, lambda example: known.__setitem__(example, corner(example)))
    keys = {key_of(example.case) for example in known}

    def way(*, same_key: bool) -> set[object]:
        met = set()
        climb(law, DOMAIN, known, 3, 40, lambda example: (met.add(key_of(example.case)), corner(example))[1], same_key=same_key)
        return met

    assert way(same_key=True) <= keys
    assert not way(same_key=False) <= keys, "without it other kernels are needed"


def test_a_climb_ends_at_a_score_of_none() -> None:
    law, known = LAWS["oracle"], {example: corner(example) for example in drawn(LAWS["oracle"], 1, 16)}
    calls = itertools.count(1)
    climb(law, DOMAIN, known, 3, 40, lambda example: None if next(calls) == 5 else 0.1)
    assert next(calls) == 6


def test_an_error_while_a_case_is_run_is_the_callers_and_is_not_shrunk() -> None:
    law, known = LAWS["oracle"], {example: corner(example) for example in drawn(LAWS["oracle"], 1, 16)}

    class Lost(Exception):
        pass

    def fail(example: Example) -> float:
        raise Lost

    with pytest.raises(Lost):
        climb(law, DOMAIN, known, 3, 40, fail)


def test_from_nothing_no_climb_begins_and_from_one_case_its_numbers_change() -> None:
    climb(LAWS["oracle"], DOMAIN, {}, 0, 9, lambda example: pytest.fail("nothing may be scored"))
    (one,) = drawn(LAWS["oracle"], 1, 1)
    met: list[Example] = []
    climb(LAWS["oracle"], DOMAIN, {one: 0.5}, 0, 9, lambda example: (met.append(example), 0.5)[1])
    assert len(met) == 9
    assert {dataclasses.replace(example.case, seed=one.case.seed) for example in met} == {one.case}


def test_laws_to_the_bit_and_short_ones_are_drawn_only() -> None:
    assert climbed(200, "truth") == 100
    assert climbed(200, "exact") == 0
    assert climbed(2 * LEAST - 1, "truth") == 0
    assert {name for name, profile in PROFILES.items() if profile.climbs} == {"soak"}


@pytest.mark.slow
def test_half_of_a_climbing_check_is_drawn_and_all_of_a_law_to_the_bit(tmp_path: pathlib.Path) -> None:
    worker = Answering(lambda run: corner(run.example))
    with Check(Settings(RIGHT, ["cut", "pure"], Profile("some", 40), 3, climbs=True), [worker], Store(tmp_path)) as check:
        check.run()
    examples = {
        law: [Run.parse(line).example for line in worker.asked if line.startswith(f"law={law} ")] for law in ("cut", "pure")
    }
    assert examples["cut"][:20] == drawn(LAWS["cut"], 3, 20)
    assert len(examples["cut"]) == 40
    assert examples["pure"] == drawn(LAWS["pure"], 3, 40)


def test_a_stage_has_room_for_a_climb() -> None:
    assert climb_module.STAGE // 2 >= 10, "Hypothesis climbs after half of its cases, and not before the tenth"
