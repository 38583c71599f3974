"""Sizes: a check draws what is large, as far as its tokens are cheap, and implementations that are wrong only there are found."""

import dataclasses
import functools
import itertools
import pathlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from oracles.arithmetic.counter import mix_words
from properties.books import book_of
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.paths.domain import PathDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from properties.rules.drawing import MOST_SEQUENCES, exact_limits, limits
from properties.rules.drawing import crowd as crowd_of
from properties.rules.laws import LAWS
from properties.words.domain import Drawing
from properties.words.example import Example
from properties.words.sizes import AT_ONCE, KINDS, MOST, MOST_ON_GPU, ONE_BY_ONE, TURNS, places, sized
from tests.together import for_each
from verify.adapters.base import Adapter
from verify.adapters.loader import load
from verify.adapters.registry import AdapterError
from verify.engine import asking
from verify.engine.asking import Described, with_sizes
from verify.engine.drawing import of_law
from verify.engine.profiles import PROFILES
from verify.execution.cost import cost_of
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.interpreter import install
from verify.process.outcome import Verdict
from verify.process.worker import Worker
from verify.zoo import wrong_sizes as sizes
from verify.zoo.animals import right_of

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "own_triton_kernel.py"


def drawn(domain: Any, laws: tuple[str, ...], seed: int = 0) -> list[Any]:
    """The cases of some laws in the default profile."""
    cases: list[Any] = []
    for name in laws:
        law = book_of(domain).laws[name]

        def look(example: Example, law: Any = law) -> None:
            law.accept(example)
            assert domain.outside(example.case) is None
            cases.append(example.case)

        of_law(law, domain, seed, PROFILES["quick"].examples_of(law), look)
    return cases


# What is drawn


@pytest.mark.parametrize(
    ("domain", "laws"),
    [
        (Domain(), ("oracle", "cut", "again", "norm", "recall", "future", "linear")),
        (Domain(batched=False), ("oracle", "cut", "again", "norm", "recall", "future", "samples")),
        (ModuleDomain(), ("oracle", "cut", "recurrent", "absent", "future")),
        (ModuleDomain("l2norm"), ("oracle", "absent", "tokens", "heads", "memory")),
        (LayerDomain(), ("oracle", "future", "memory")),
    ],
    ids=["rules", "packed rules", "convolutions", "norms", "layers"],
)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_check_draws_what_is_large(domain: Any, laws: tuple[str, ...], seed: int) -> None:
    most = MOST["interpreted"]
    cases = drawn(sized(domain, 64, most), laws, seed)
    longest = [max(case.lengths) for case in cases]
    assert max(longest) <= most
    assert sum(length > 8 * 64 for length in longest) >= 4
    assert any(abs(length - power) <= 1 for power in (256, 512, 1024) for length in longest if length > 250)
    assert max(longest) >= most - 10
    counts = [len(case.lengths) for case in cases]
    assert any(33 <= count < 65 for count in counts)
    assert any(count >= 65 for count in counts)
    if isinstance(domain, Domain):
        assert max(case.value_heads for case in cases) >= 32


@pytest.mark.slow
def test_nothing_is_large_where_tokens_are_dear_and_lengths_follow_the_chunk() -> None:
    assert max(max(case.lengths) for case in drawn(sized(Domain(), 64, MOST["slow"]), ("oracle",))) <= 260
    short = {max(case.lengths) for seed in range(3) for case in drawn(sized(Domain(), 8, 300), ("oracle", "again"), seed)}
    assert any(64 < length < 255 for length in short)
    assert max(short) >= 290


def test_the_sizes_of_other_domains_stay() -> None:
    assert sized(PathDomain(), 16, 4096).drawing == Drawing(chunk=16, long=4096, quick=True, exact=32_769)
    assert sized(PoolDomain(), 16, 4096).drawing == Drawing(chunk=16, long=4096, quick=True, exact=32_769)
    assert sized(Domain(), None, 10) == Domain(drawing=Drawing(long=10))
    assert [sized(Domain(), chunk, 4096).drawing.long for chunk in (64, 128, 256, 512, 1024)] == [4096, 4096, 4096, 2048, 1024]
    assert [sized(Domain(), chunk, 2**16).drawing.long for chunk in (64, 256, 1024)] == [2**16, 4096, 1024]
    assert Domain.from_json(sized(Domain(), 16, 4096).to_json()) == Domain(
        drawing=Drawing(long=4096, chunk=16, quick=True, exact=32_769)
    )
    longest = ModuleDomain(longest=64, drawing=Drawing(long=4096))
    assert max(max(case.lengths) for case in drawn(longest, ("oracle",))) <= 64


@for_each(
    ("chunk", "algorithm", "tokens"),
    [
        (None, "recurrent", 32_769),
        (None, "chunkwise", 0),
        (16, "chunkwise", 32_769),
        (32, "chunkwise", 32_800),
        (48, "chunkwise", 49_200),
        (64, "recurrent", 65_600),
        (64, "chunkwise", 131_137),
        (128, "chunkwise", 131_137),
        (256, "chunkwise", 0),
    ],
)
def test_the_sequence_of_exact_results_follows_the_chunk_and_the_algorithm(chunk: int | None, algorithm: str, tokens: int) -> None:
    for most in MOST.values():
        domain = sized(Domain(), chunk, most, algorithm)
        assert domain.drawing.exact == tokens * (most == MOST["quick"])
        long = [case.tokens for case in exact_limits(domain) if len(case.lengths) < 3]
        assert long == [tokens, 16_453] * bool(domain.drawing.exact)


@for_each(("field", "value", "range_"), [("long", -1, "0..1048576"), ("long", "far", "0..1048576"), ("chunk", 0, "1..1048576")])
def test_a_size_outside_its_range_is_refused(field: str, value: Any, range_: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be in {re.escape(range_)}, got {value!r}"):
        Drawing(**{field: value})


# The places of large cases


@pytest.mark.parametrize("most", [MOST["quick"], MOST["interpreted"]])
def test_large_cases_have_places_that_follow_from_the_number_of_cases(most: int) -> None:
    every = 16
    assert places(every // 2, most) == places(200, 0) == {}
    assert [*places(32, most)] == list(range(every // 2, 32, every))
    assert {*places(6 * every, most).values()} == {*places(6 * every, most, 7).values()} == {*KINDS}
    assert [places(4 * every, most, first)[every // 2] for first in range(6)] == [*TURNS]
    domain, many = sized(Domain(), 64, most), {"sequences": 32, "heads": 15}
    for seed, count in ((0, 20), (3, 40), (3, 41)):
        cases: list[Any] = []
        of_law(LAWS["again"], domain, seed, count, lambda example, into=cases: into.append(example.case))
        found = places(count, most, mix_words(seed, "again"))
        for place, case in enumerate(cases):
            kind, longest = found.get(place, ""), max(case.lengths)
            numbers = {"sequences": len(case.lengths), "heads": case.value_heads}
            assert numbers[kind] > many[kind] if kind in many else (longest > 150) == bool(kind), (place, kind, case)
        assert len(cases) == len({*cases}) == count


def test_the_first_case_of_a_law_is_small() -> None:
    tokens: dict[tuple[str, int], int] = {}
    for law, seed in itertools.product(("oracle", "cut", "norm", "again"), range(4)):
        look = functools.partial(tokens.setdefault, (law, seed))
        of_law(LAWS[law], sized(Domain(), 64, 4096), seed, 10, lambda example, look=look: look(example.case.tokens))
    assert min(tokens.values()) > 0
    assert max(tokens.values()) <= 70


# What a token costs


class Costs(Adapter):
    """Plain torch, in a module of tests that knows no kernel."""

    def run(self, x: Any) -> Any:
        raise NotImplementedError


@for_each(("cost", "most"), MOST.items())
def test_sizes_follow_the_chunk_and_the_declared_cost(cost: str, most: int) -> None:
    described = Described("zoo/Chunkwise", Domain(), "chunkwise", "none", chunk=16, cost=cost)
    domain: Any = with_sizes(described, "cpu").domain
    assert domain == Domain(drawing=Drawing(chunk=16, long=most, quick=cost == "quick", exact=32_769 * (cost == "quick")))
    assert (crowd_of(domain) is not None) == (cost != "slow")
    assert (crowd_of(domain, backward=False) in limits(domain)) == (cost == "interpreted")
    assert len(exact_limits(domain)) == 6 * (cost == "quick")
    counts = [len(case.lengths) for case in exact_limits(sized(Domain(), 64, MOST["quick"]))]
    assert counts == [65, ONE_BY_ONE, MOST_SEQUENCES, AT_ONCE, 1, 2]
    assert with_sizes(described, "cuda").domain == Domain(drawing=Drawing(chunk=16, long=MOST_ON_GPU))
    paths = dataclasses.replace(described, domain=PathDomain())
    assert with_sizes(paths, "cpu").domain == PathDomain(drawing=domain.drawing)
    assert with_sizes(described, "cpu", large=False).domain == Domain(drawing=Drawing(chunk=16))


def test_a_token_costs_what_the_adapter_declares_or_has_imported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cost_of(Costs()) == "quick"
    assert cost_of(type("Declared", (Costs,), {"cost": "slow"})()) == "slow"
    assert cost_of(type("Requiring", (Costs,), {"requires": {"triton": "3.7.1"}})()) == "interpreted"
    kernels, between = ModuleType("some_kernels"), ModuleType("between")
    between.__dict__["launcher"] = type("Launcher", (), {"__module__": "some_kernels"})
    monkeypatch.setitem(sys.modules, "some_kernels", kernels)
    monkeypatch.setitem(sys.modules, "between", between)
    monkeypatch.setitem(globals(), "between", between)
    assert cost_of(Costs()) == "quick"
    if "triton" not in sys.modules:  # another test of this process may have imported it for compilation
        install()
    from triton import KernelInterface

    kernels.__dict__["kernel"] = KernelInterface()
    assert cost_of(Costs()) == "interpreted", "the module of the adapter imports one that has a function of one with a kernel"
    file = tmp_path / "costly.py"
    file.write_text("from tests.right import Chunkwise\nclass Kernel(Chunkwise): cost = 'dear'")
    with pytest.raises(AdapterError, match="cost must be None or one of quick, interpreted, slow, got 'dear'"):
        load(f"{file}:Kernel")


def test_a_long_case_has_more_time_than_others() -> None:
    """So that an implementation is not called hung because it is slow."""
    lines = ("lengths=1024", "lengths=4096", "lengths=4096 device=cuda")
    with Worker(100.0) as worker:
        runs = [Run.parse(f"law=oracle adapter=zoo/Chunkwise {words}") for words in lines]
        assert [asking._deadline(run, worker) for run in runs] == [(), (400.0,), ()]


@pytest.mark.parametrize(("spec", "want"), [("zoo/Chunkwise", "quick"), ("zoo/Conv", "quick"), ("zoo/Layered", "quick")])
@pytest.mark.slow
def test_plain_torch_is_quick(spec: str, want: str, worker: Worker) -> None:
    described = asking.describe(spec, worker)
    assert with_sizes(described, "cpu").domain.drawing.long == MOST[want]


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["fla/fused_recurrent", f"{EXAMPLE}:MyKernel"])
def test_a_triton_kernel_is_interpreted(spec: str, worker: Worker) -> None:
    assert with_sizes(asking.describe(spec, worker), "cpu").domain.drawing.long == MOST["interpreted"]


# What is wrong only where something is large

KILLED_BY: dict[type[Adapter], Callable[[Any], bool]] = {
    sizes.GatesInNineBits: lambda case: max(case.lengths) > 320,
    sizes.InitialStateReturns: lambda case: max(case.lengths) > 320,
    sizes.SixtyFourSequences: lambda case: len(case.lengths) > 32,
    sizes.HeadsInFourBits: lambda case: case.value_heads >= 16,
    sizes.ConvBeginsAgain: lambda case: max(case.lengths) > 320,
    sizes.NormsAThousandRows: lambda case: max(case.lengths) > 320,
    sizes.LayerForgetsAt512: lambda case: max(case.lengths) > 320,
}


@functools.cache
def large_of(domain: Any, fits: Callable[[Any], bool], seed: int) -> list[Example]:
    """What fits of the cases that the oracle's law has in the default profile, the smallest first."""
    examples: list[Example] = []
    law = book_of(domain).laws["oracle"]
    of_law(law, domain, seed, PROFILES["quick"].examples_of(law), examples.append)
    return sorted((x for x in examples if fits(x.case)), key=lambda x: x.case.tokens * getattr(x.case, "value_heads", 1))


@pytest.mark.parametrize("animal", KILLED_BY, ids=lambda animal: animal.__name__)
@pytest.mark.slow_after_first
def test_the_oracle_alone_kills_animal_in_the_default_profile_and_the_right_one_holds(animal: type[Adapter]) -> None:
    """The default profile has sequences of 4,096 tokens. They take long here, so these are shorter and of three seeds."""
    domain = sized(animal.domain, animal.chunk, 1100)
    large = (x for seed in range(3) for x in large_of(domain, KILLED_BY[animal], seed))
    broken = next((x for x in large if execute(Run("oracle", f"zoo/{animal.__name__}", x)).verdict is Verdict.BROKEN), None)
    assert broken is not None
    right = right_of(animal)
    assert right is not None
    assert execute(Run("oracle", f"zoo/{right.__name__}", broken)).verdict is Verdict.HOLDS


def test_every_animal_is_killed() -> None:
    found = {kind for kind in vars(sizes).values() if isinstance(kind, type) and hasattr(kind, "letter")}
    assert set(KILLED_BY) == {kind for kind in found if kind.__module__ == sizes.__name__}
