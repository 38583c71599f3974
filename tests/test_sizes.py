"""Sizes: a check draws what is large, as far as its tokens are cheap, and implementations that are wrong only there are found."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from oracles.counter import mix_words
from properties.books import book_of
from properties.domain import Domain
from properties.layer_domain import LayerDomain
from properties.module_domain import ModuleDomain
from properties.path_domain import PathDomain
from properties.pool_domain import PoolDomain
from properties.sizes import MOST, MOST_ON_GPU, sized
from properties.strategies import Example
from properties.strategies import crowd as crowd_of
from verify.adapters.base import Adapter
from verify.engine import asking
from verify.engine.asking import Described, with_sizes
from verify.engine.drawing import seeded
from verify.engine.profiles import PROFILES
from verify.execution import cost
from verify.execution.cost import TokenCost
from verify.execution.execute import execute
from verify.execution.run import Run
from verify.process.messages import Cost, Question
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker, WorkerLost
from verify.zoo import wrong_sizes as sizes
from verify.zoo.animals import right_of


def drawn(domain: Any, laws: tuple[str, ...], seed: int = 0) -> list[Any]:
    """The cases of some laws in the default profile."""
    cases: list[Any] = []
    for name in laws:
        law = book_of(domain).laws[name]

        def look(example: Example, law: Any = law) -> None:
            law.accept(example)
            assert domain.outside(example.case) is None
            cases.append(example.case)

        seeded(law.draw(domain), mix_words(seed, name), PROFILES["quick"].examples_of(name), look)
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
def test_checks_draw_what_is_large(domain: Any, laws: tuple[str, ...]) -> None:
    """Three checks together: one draws about four sequences over 512 tokens, and sometimes none over 1024."""
    most = MOST["interpreted"]
    cases = [case for seed in range(3) for case in drawn(sized(domain, 64, most), laws, seed)]
    longest = [max(case.lengths) for case in cases]
    assert max(longest) <= most
    assert sum(length > 8 * 64 for length in longest) >= 6
    assert {power for power in (256, 512, 1024) for length in longest if abs(length - power) <= 1} >= {1024}
    assert sum(length > 1024 for length in longest) >= 1
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
    assert sized(PoolDomain(), 16, 4096) == PoolDomain()
    assert sized(PathDomain(), 16, 4096) == PathDomain(chunk=16)
    assert sized(Domain(), None, 10) == Domain(long=10)
    assert [sized(Domain(), chunk, 4096).long for chunk in (64, 128, 256, 512, 1024)] == [4096, 4096, 4096, 2048, 1024]
    assert [sized(Domain(), chunk, 2**16).long for chunk in (64, 256, 1024)] == [2**16, 4096, 1024]
    assert Domain.from_json(sized(Domain(), 16, 4096).to_json()) == Domain(long=4096, chunk=16)
    longest = ModuleDomain(longest=64, long=4096)
    assert max(max(case.lengths) for case in drawn(longest, ("oracle",))) <= 64


@pytest.mark.parametrize("kind", [Domain, ModuleDomain, LayerDomain])
def test_a_size_outside_its_range_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"long must be in 0\.\.1048576, got -1"):
        kind(long=-1)
    with pytest.raises(ValueError, match=r"long must be in 0\.\.1048576, got 'far'"):
        kind(long="far")
    if kind is not ModuleDomain:
        with pytest.raises(ValueError, match=r"chunk must be in 1\.\.1048576, got 0"):
            kind(chunk=0)


# What a token costs

RUN = Run.parse("law=oracle adapter=zoo/Chunkwise lengths=50")


@pytest.mark.parametrize(
    ("seconds", "launches", "want"),
    [
        ((3.0, 0.01), (0, 0), TokenCost("quick", crowd=False)),  # there is no grid
        ((0.01, 0.01), (1, 0), TokenCost("interpreted", crowd=True)),
        ((0.01, 0.01), (1, 1), TokenCost("interpreted", crowd=False)),  # one program after another
        ((9.0, 0.4), (0, 0), TokenCost("interpreted", crowd=False)),
        ((9.0, 2.0), (3, 0), TokenCost("slow", crowd=False)),
    ],
)
def test_cost_is_that_of_the_faster_run_and_kernels_that_are_interpreted_are_never_quick(
    seconds: tuple[float, float], launches: tuple[int, int], want: TokenCost, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter(seconds)
    monkeypatch.setattr(cost, "execute", lambda run: Outcome(Verdict.HOLDS, kernel_s=next(runs)))
    counts = iter([(7, 2), (7 + launches[0], 2 + launches[1])])
    monkeypatch.setattr(cost, "_launches", lambda: next(counts))
    assert cost.cost_of(RUN) == want


def test_no_large_case_is_predicted_to_take_over_21_seconds() -> None:
    """A case counts as a hang after 120 s."""
    limits = {"quick": cost.DEAR, "interpreted": cost.DEAR_INTERPRETED}
    assert all(seconds * MOST[name] < 21 for name, seconds in limits.items())


class Asked:
    """A worker that answers what a token costs."""

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self.answer, self.questions = answer, list[Question]()

    def ask(self, question: Question) -> dict[str, Any]:
        self.questions.append(question)
        if self.answer is None:
            raise WorkerLost("crashed", "killed", "")
        return self.answer


@pytest.mark.parametrize(
    ("answer", "most", "crowd"),
    [
        ({"cost": "quick", "crowd": True}, 4096, True),
        ({"cost": "quick", "crowd": False}, 4096, False),
        ({"cost": "interpreted", "crowd": True}, 1030, True),
        ({"error": "none"}, 0, False),
        (None, 0, False),
    ],
)
def test_sizes_follow_the_chunk_and_the_cost_which_is_asked_once(answer: dict[str, Any] | None, most: int, *, crowd: bool) -> None:
    worker: Any = Asked(answer)
    described = Described("zoo/Chunkwise", Domain(), "chunkwise", "none", chunk=16)
    for _ in range(2):
        domain: Any = with_sizes(described, worker, "cpu").domain
        assert domain == Domain(chunk=16, long=most, batch_heads=None if crowd else 65_535)
    assert crowd_of(domain) is None or crowd
    assert with_sizes(described, worker, "cuda").domain == Domain(chunk=16, long=MOST_ON_GPU)
    paths = dataclasses.replace(described, domain=PathDomain())
    assert with_sizes(paths, worker, "cpu").domain == PathDomain(chunk=16)
    assert with_sizes(described, worker, "cpu", large=False).domain == Domain(chunk=16)
    (question,) = worker.questions
    assert isinstance(question, Cost)
    assert 20 < Run.parse(question.line).example.case.tokens < 140


@pytest.mark.parametrize(("spec", "want"), [("zoo/Chunkwise", "quick"), ("zoo/Conv", "quick"), ("zoo/Layered", "quick")])
@pytest.mark.slow
def test_plain_torch_is_quick(spec: str, want: str, worker: Worker) -> None:
    described = asking.describe(spec, worker)
    assert with_sizes(described, worker, "cpu").domain.long == MOST[want]


@pytest.mark.interpreted
@pytest.mark.slow
def test_a_triton_kernel_is_interpreted(worker: Worker) -> None:
    described = asking.describe("fla/fused_recurrent", worker)
    assert with_sizes(described, worker, "cpu").domain.long == MOST["interpreted"]


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
def drawn_for(domain: Any) -> list[Example]:
    """What the oracle's law draws of a domain in the default profile."""
    examples: list[Example] = []
    seeded(
        book_of(domain).laws["oracle"].draw(domain),
        mix_words(0, "oracle"),
        PROFILES["quick"].examples_of("oracle"),
        examples.append,
    )
    return examples


@pytest.mark.parametrize("animal", KILLED_BY, ids=lambda animal: animal.__name__)
@pytest.mark.slow_after_first
def test_the_oracle_alone_kills_animal_in_the_default_profile_and_the_right_one_holds(animal: type[Adapter]) -> None:
    large = sorted(
        (x for x in drawn_for(sized(animal.domain, animal.chunk, 1100)) if KILLED_BY[animal](x.case)),
        key=lambda x: x.case.tokens * getattr(x.case, "value_heads", 1),
    )
    broken = next((x for x in large if execute(Run("oracle", f"zoo/{animal.__name__}", x)).verdict is Verdict.BROKEN), None)
    assert broken is not None
    right = right_of(animal)
    assert right is not None
    assert execute(Run("oracle", f"zoo/{right.__name__}", broken)).verdict is Verdict.HOLDS


def test_every_animal_is_killed() -> None:
    found = {kind for kind in vars(sizes).values() if isinstance(kind, type) and hasattr(kind, "letter")}
    assert set(KILLED_BY) == {kind for kind in found if kind.__module__ == sizes.__name__}
