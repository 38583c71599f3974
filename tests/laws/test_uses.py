"""Ways in which callers use an implementation: each finds wrong code that nothing else finds, and leaves right code alone."""

import dataclasses
import pathlib
from typing import Any

import pytest

from properties.books import book_of
from properties.laws.other_calls import CROWDED, later_cases, moved
from properties.paths import checks
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.example import Example
from properties.words.sizes import TILES
from tests import wrong_ranks
from tests import wrong_uses as wrong
from tests import wrong_ways as ways
from tests.drawn import domain_in_a_check, in_a_check, spec_of
from tests.together import for_each
from verify.engine.check import Check
from verify.engine.drawing import seeded
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

# The law that shows each of them, and its variant, or "" if the law has none.
SHOWN_BY: dict[type, tuple[str, str]] = {
    wrong.KeysLikeQueries: ("strides", "mixed"),
    wrong.SectionsInOrder: ("strides", "fused"),
    wrong.RuleOfSectionsInOrder: ("strides", "sliced"),
    wrong.SectionsOfInference: ("strides", "sliced"),
    wrong.BlocksOfValues: ("history", "failed"),
    wrong.BlocksOfHeads: ("history", "failed"),
    wrong.WorkspaceBeforeItIsThere: ("history", "failed"),
    wrong.SumsThatAreCleared: ("history", "failed"),
    wrong.DecaysBeforeItHasMemory: ("history", "failed"),
    wrong.TableBeforeItIsFull: ("history", "failed"),
    wrong.TokensInPlace: ("history", "failed"),
    wrong.SlotsOfSnapshotsFirst: ("history", "retried"),
    wrong.DenseOffsets: ("strides", "indices"),
    wrong.DenseSlots: ("strides", "indices"),
    wrong.DenseAccepted: ("strides", "indices"),
    ways.NoLossOfOutputs: ("recompute", "one_output"),
    ways.NoLossOfStates: ("recompute", "one_output"),
    ways.ValuesOnTheGraph: ("recompute", "cleared"),
    ways.StatesOnTheGraph: ("recompute", "cleared"),
    ways.KeepsTheFirstCotangent: ("recompute", "twice"),
    ways.DecaysWhatItKeeps: ("recompute", "twice"),
    ways.OutputsOnTheGraph: ("recompute", "cleared"),
    wrong.StatelessInference: ("history", "inference"),
    wrong.KnowsVersions: ("history", "inference"),
    ways.UndoubledDecodes: ("history", "inference"),
    wrong.KeepsMasks: ("history", "inference"),
    wrong.SlotsByVersion: ("history", "inference"),
    ways.NormOfTheLastCall: ("recompute", "between"),
    ways.BetaInFour: ("recompute", "between"),
    ways.OneTokenOfASum: ("recompute", "sums"),
    ways.FrozenTaps: ("recompute", "frozen"),
    ways.OutputsInTurn: ("history", "no_grad"),
    ways.TapsByVersion: ("history", "no_grad"),
    ways.WeightIntoTheProjection: ("history", "no_grad"),
    ways.SquaresOfTheLastEvaluation: ("history", "gradients"),
    ways.DecodesInTurn: ("history", "inference"),
    ways.EpsOfTheFirstDecode: ("history", "inference"),
    ways.SumsOfAllThreads: ("history", "threads"),
    ways.TilesInTurn: ("absent", "final_state"),
    wrong.TokensOfTheLastForward: ("earlier", "in_flight"),
    wrong.NothingWithoutTokens: ("accumulated", "frozen"),
    wrong_ranks.NoBackwardWithoutStates: ("accumulated", "frozen"),
    wrong.SpansByPrefix: ("history", "refill"),
    wrong.RequestsByPrefix: ("refill", ""),
}
RIGHT: dict[type, tuple[str, str]] = {
    wrong.SaysDenseOffsets: ("strides", "mixed"),
    ways.AnyLoss: ("recompute", "one_output"),
    ways.ChecksVersions: ("recompute", "cleared"),
    ways.OwnCopyOnTheGraph: ("recompute", "cleared"),
    wrong.KeepsCleanMasks: ("history", "inference"),
    ways.SaysOutputsChange: ("history", "no_grad"),
    ways.TapsByContents: ("history", "no_grad"),
}
# Wrong in what several variants show: the order of backward passes.
ORDERS = (ways.StatesInTurn, ways.StatesOnAStack, ways.ScratchOfTheLastBackward)
OF_PATHS = ("parallel", "repeats", "replicas", "accumulated", "earlier")  # the laws that run a path on few ranks
# Frozen inputs come with a loss of one output too.
BESIDE = {("recompute", "one_output"): ("recompute", "frozen")}
FEW = 2  # examples of each law and variant that do not show it


def domain_of(kind: type) -> Any:
    return domain_in_a_check(spec_of(kind))


def right_form(kind: type) -> str:
    """The spec of its first base that is right: one of the same file that says so, or one of the zoo."""
    ours = [base for base in kind.__mro__ if (base.__doc__ or "").startswith("Right:")]
    known = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("verify.zoo.")]
    return spec_of(ours[0]) if ours else f"zoo/{known[0]}"


def outcome_of(kind: type, law: str, example: Example) -> Outcome:
    return execute(Run(law, spec_of(kind), example))


def of_variant(kind: type, law: str, variant: str, seed: int) -> list[Example]:
    return [example for example in in_a_check(law, domain_of(kind), seed) if (example.variant or "") == variant]


@pytest.mark.parametrize("kind", SHOWN_BY, ids=lambda kind: kind.__name__)
@pytest.mark.slow_after_first
def test_a_default_check_shows_it_with_every_seed_and_the_right_form_holds(kind: type) -> None:
    law, variant = SHOWN_BY[kind]
    for seed in range(3):
        examples = of_variant(kind, law, variant, seed)
        assert any(outcome_of(kind, law, example).verdict is Verdict.BROKEN for example in examples), seed
    for example in of_variant(kind, law, variant, 0):
        assert execute(Run(law, right_form(kind), example)).verdict in (Verdict.HOLDS, Verdict.BLIND), example


@pytest.mark.parametrize("kind", SHOWN_BY, ids=lambda kind: kind.__name__)
@pytest.mark.slow
def test_no_other_law_or_variant_shows_it(kind: type) -> None:
    domain, shown, right = domain_of(kind), SHOWN_BY[kind], right_form(kind)
    book = book_of(domain)
    for law in book.laws.values():
        if law.needs(domain) or (book.name == "paths" and law.name not in OF_PATHS):
            continue
        by = (shown, BESIDE.get(shown))
        others = [example for example in in_a_check(law.name, domain, 0) if (law.name, example.variant or "") not in by]
        for variant in dict.fromkeys(one.variant for one in others if not (one.variant or "").startswith("far_")):
            for example in [example for example in others if example.variant == variant][:FEW]:
                if outcome_of(kind, law.name, example).verdict is Verdict.BROKEN:  # its base fails without tokens
                    assert execute(Run(law.name, right, example)).verdict is Verdict.BROKEN, (law.name, example)


def test_a_gpu_draws_sequences_whose_states_nobody_asks_for() -> None:
    drawn: list[Example] = []
    seeded(book_of(Domain()).laws["absent"].on_gpu().draw(Domain()), 0, 64, drawn.append)
    assert {one.variant for one in drawn if len(one.case.lengths) == TILES and one.case.state == "none"} == {"final_state"}


@pytest.mark.slow
def test_calls_in_flight_have_packings_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "law=earlier variant=in_flight adapter={} lengths=4+8+12 packed=yes cp=2 heads=2 value_heads=2"
    wrong_line = line.format(spec_of(wrong.OffsetsOfFourPackings))
    assert execute(Run.parse(wrong_line)).verdict is Verdict.BROKEN
    assert execute(Run.parse(line.format("zoo/Mutant"))).verdict is Verdict.HOLDS

    def of_one_packing(*sizes: Any) -> list[Any]:
        later = later_cases(*sizes)
        return [dataclasses.replace(one, lengths=later[0].lengths) for one in later]

    monkeypatch.setattr(checks, "later_cases", of_one_packing)
    assert execute(Run.parse(wrong_line)).verdict is Verdict.HOLDS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow_after_first
def test_a_process_begins_with_calls_that_fail(seed: int, worker: Worker, tmp_path: pathlib.Path) -> None:
    """In the process of another law, an earlier call has made the mask already, and no failure shows it."""
    settings = Settings(spec_of(wrong.OneMaskOfAFailure), ["pure", "history"], PROFILES["quick"], seed=seed)
    pure, history = Check(settings, [worker], Store(tmp_path)).run()
    assert (pure.verdict, history.verdict) == (Verdict.HOLDS, Verdict.BROKEN)
    assert any("variant=failed" in line for line in (*history.after, history.run))


@pytest.mark.parametrize("trace", ["p:a5", "p:a5,b6/d:b,a"])
def test_a_batch_belongs_to_the_engine_for_one_step(trace: str) -> None:
    line = f"law=session adapter={{}} op=serving trace={trace} slots=2"
    for kind, verdict in ((wrong.WindowsOfTheBatch, Verdict.BROKEN), (wrong.KeepsItsBatches, Verdict.HOLDS)):
        assert execute(Run.parse(line.format(spec_of(kind)))).verdict is verdict, kind


@pytest.mark.parametrize("values", ["great", "ordinary"])
def test_a_slot_may_overflow_in_a_call_that_fails(values: str) -> None:
    line = "law=history variant=failed adapter={} op=decode lengths=2 dtype=bf16 values={} state=random state_dtype=fp16"
    for kind, verdict in ((wrong.SlotsInHalf, Verdict.HOLDS), (wrong.ClearsSlotsFirst, Verdict.BROKEN)):
        assert execute(Run.parse(line.format(spec_of(kind), values))).verdict is verdict, kind


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
@pytest.mark.slow_after_first
def test_right_code_that_comes_near_holds(kind: type) -> None:
    law, variant = RIGHT[kind]
    examples = [example for seed in range(3) for example in of_variant(kind, law, variant, seed)]
    assert examples
    for example in examples:
        assert outcome_of(kind, law, example).verdict is Verdict.HOLDS, example


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
@pytest.mark.slow_after_first
def test_backward_passes_run_in_no_fixed_order_and_inside_each_other(kind: type) -> None:
    examples = {*of_variant(kind, "recompute", "between", 0)}
    assert {outcome_of(kind, "recompute", example).verdict for example in examples} == {Verdict.BROKEN}
    assert {execute(Run("recompute", right_form(kind), example)).verdict for example in examples} == {Verdict.HOLDS}


def test_a_domain_without_strided_indices_never_gets_them() -> None:
    domain = Domain(views=("sliced", "mixed"))
    variants = {example.variant for seed in range(3) for example in in_a_check("strides", domain, seed)}
    assert {"sliced", "mixed"} <= variants and "indices" not in variants
    law, case = book_of(domain).laws["strides"], Case.parse("lengths=2+1 packed=yes")
    assert law.outside(domain, Example(case, None, "indices")) == "indices inputs are not among sliced, mixed"
    with pytest.raises(ValueError, match="law strides needs packed=yes"):
        law.accept(Example(Case.parse("lengths=2"), None, "indices"))


@for_each(
    ("words", "want"),
    [
        ("lengths=1+1+1+1+1+1+1+1+1+2 packed=yes", (*[1] * 7, 0, 3, 1)),
        ("lengths=1+1+1+1+1+1+1+1+0+0+2 packed=yes", (*[1] * 8, 0, 1, 1)),
        ("lengths=1+1+1+1+1+1+1+1+2 packed=yes", None),
        ("lengths=1+1+1+1+1+1+1+1+0+0 packed=yes", None),
        ("lengths=1+1+1+1+1+1+1+1+1+1", None),
    ],
)
def test_two_late_offsets_move_or_one_and_no_other(words: str, want: tuple[int, ...] | None) -> None:
    other = moved(Case.parse(words), Domain())
    assert (other and other.lengths) == want


def test_moved_offsets_stay_inside_the_domain() -> None:
    case = Case.parse(f"lengths={'+'.join(['8'] * CROWDED)} packed=yes")
    assert moved(case, Domain(length_step=8, empty=False)) is None
    assert moved(case, Domain(length_step=8)).lengths[-3:] == (0, 24, 0)
    pool = PoolCase.parse(f"op=decode lengths={'+'.join(['2'] * CROWDED)} packed=yes accepted=any")
    assert moved(pool, PoolDomain()).lengths[-3:] == (3, 0, 3)
