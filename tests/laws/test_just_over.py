"""Cases just over usual limits: each has an implementation that it alone shows, and that right code of the same kind passes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from properties.books import book_of
from properties.words.example import Example
from tests import wrong_just_over as wrong
from tests import wrong_just_over_modules as modules
from tests import wrong_just_over_pools as pools
from tests import wrong_just_over_served as served
from tests.drawn import domain_in_a_check, in_a_check, spec_of
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict

OTHERS = 3  # examples of the law that are drawn, with which the implementation holds
# The law that shows each of them, and what the lines have that show it: of the cases of a check at fixed places, no other does.
SHOWN_BY: dict[type, tuple[str, tuple[str, ...]]] = {
    pools.PoolPairsOfValueHeads: ("oracle", ("heads=320 value_heads=960", "heads=16 value_heads=272")),
    pools.TreesInARing: ("oracle", ("drafts=tree",)),
    pools.ParentsOf7Bits: ("oracle", ("lengths=259+259",)),
    pools.FourOfAKeyHead: ("oracle", ("heads=16 value_heads=272",)),
    served.ServedPairsOfValueHeads: ("session", ("heads=320 value_heads=960", "heads=16 value_heads=272")),
    wrong.LayerPairsOfValueHeads: ("oracle", ("heads=16 value_heads=272",)),
    pools.LaunchesOf16Bits: ("oracle", ("heads=64 value_heads=64",)),
    served.StagedByRow: ("session", ("/p:a1,b66,e1,c1,d64/",)),
    modules.StatesOfTheLastTile: ("oracle", ("lengths=193+385+641+769+1025",)),
    wrong.StatesOfLaterLaunches: ("recall", ("heads=1024 value_heads=1024",)),
    wrong.EqualPast1024: ("oracle", ("lengths=1+2+3+1+2+3",)),
    wrong.NumbersInBf16: ("oracle", ("lengths=1+2+3+1+2+3",)),
    modules.ConvNumbersInBf16: ("oracle", ("lengths=1+2+3+1+2+3",)),
    wrong.LayerNumbersInBf16: ("oracle", ("1x259 packed=yes", "1x259 key_dim")),
    wrong.KeyHeadsOf8Bits: ("oracle", ("heads=320 value_heads=960",)),
    wrong.TilesOf64ValueHeads: ("oracle", ("heads=320 value_heads=960", "heads=16 value_heads=272")),
    wrong.RatiosOf6Bits: ("oracle", ("lengths=3 value_heads=257",)),
    wrong.BatchesUpTo128: ("oracle", ("lengths=1x133", "lengths=1x259", "lengths=1x1030 key_dim")),
    wrong.BatchesOf10Bits: ("oracle", ("lengths=1x1030 key_dim",)),
    modules.ConvBatchesOf10Bits: ("oracle", ("lengths=1x1100",)),
    wrong.SecondLongOfABatch: ("oracle", ("lengths=1030+1030 key_dim",)),
    wrong.SecondLongPacked: ("oracle", ("lengths=1030+1030 packed=yes",)),
    wrong.ChunksOf32UpTo1024: ("recall", ("lengths=32800",)),
    wrong.OneTokenIsTheFirst: ("oracle", ("lengths=0+1+0",)),
    modules.ConvOneTokenIsTheFirst: ("oracle", ("lengths=0+1+0",)),
    wrong.LayerOneTokenIsTheFirst: ("oracle", ("lengths=0+1+0",)),
    wrong.OneTokenEach: ("oracle", ("lengths=0+3+0",)),
    wrong.SpeedsOf1024Sequences: ("oracle", ("lengths=1+2+3+1+2+3",)),
    pools.BlocksOf6Bits: ("blocks", ("op=decode",)),
    wrong.ChunksOf11Bits: ("recall", ("lengths=131137",)),
    wrong.PackedChunksOf8Bits: ("recall", ("lengths=16450+3",)),
    wrong.EqualIfTheFirstIsTheMean: ("oracle", ("lengths=3+2+4+3",)),
    modules.ConvEqualIfTheLastIsTheMean: ("oracle", ("lengths=3+2+4+3",)),
    modules.BiasOfAFullBlock: ("oracle", ("out_width=515", "out_width=515 values=small")),
    wrong.WideWorkspace: ("oracle", ("key_dim=129",)),
    wrong.StepsOf15Bits: ("recall", ("lengths=32769",)),
    pools.FreshUpTo1024: ("oracle", ("=1x2060", "heads=64 value_heads=64")),
    pools.FreshUpTo2048: ("oracle", ("=1x2060",)),
    pools.LaunchesOfWholeRequests: ("oracle", ("heads=64 value_heads=64",)),
    pools.FlagsOfTheFirstLaunch: ("oracle", ("heads=64 value_heads=64",)),
    pools.SinglesAreAccepted: ("oracle", ("lengths=1+1+1 ",)),
    pools.NothingToDo: ("oracle", ("lengths=0+0",)),
    served.WholeDraftsAtBlockEnds: ("session", ("/p:a124,b124,c124",)),
    served.WholeDraftsAtEndsOf64: ("session", ("p:a62,b62,c62",)),
    served.FreesByPrefix: ("ledger", ("p:a64,ab64",)),
    pools.AcceptedUpTo64: ("oracle", ("lengths=3x690",)),
    pools.SlabsOf2048: ("oracle", ("lengths=3x690",)),
    pools.PoolHeadsOf7Bits: ("oracle", ("heads=320 value_heads=960", "heads=16 value_heads=272", "lengths=1 value_heads=257")),
    served.StepsInParts: ("session", ("trace=p:a127,b127",)),
    served.StepsUpTo8192: ("session", ("trace=p:a127,b127",)),
    served.RowsUpTo128: ("session", ("slots=260",)),
    served.SlotsOf7Bits: ("session", ("slots=260",)),
    served.RoomFor96PaddingRows: ("session", ("d:_,_,_,_",)),
    served.PositionsOf8Bits: ("session", ("trace=p:a128,b128/p:a128,b128", "/p:a124,b124")),
    served.PositionsUpTo512: ("session", ("trace=p:a128,b128/p:a128,b128",)),
    served.ForkReadsTheSnapshot: ("ledger", ("p:a64/k:b<a@/p:a64/d:b", "p:a5/s:a/k:b<a@/s:a/d:b")),
    served.ForksAtOnce: ("ledger", ("/k:b<a/k:c<b/",)),
    served.ForksReadAFreedRequest: ("ledger", ("/k:d<c/r:a/f:c/",)),
    served.ForksReadAPreemptedRequest: ("ledger", ("/k:d<c/r:a/f:c/",)),
    served.EpsOfEach64Keys: ("session", ("key_dim=128 value_dim=128 width=2 gate=64 values=small",)),
    served.CopiesOfKeyHeads: ("ledger", ("heads=2 value_heads=8",)),
    served.RanksByName: ("ledger", ("heads=11 value_heads=11",)),
    modules.RowsOf17Bits: ("oracle", ("lengths=65600 op=gated_rms_norm heads=2",)),
    modules.ChannelsOf12Bits: ("oracle", ("width=12289",)),
    modules.ChannelsUpTo12288: ("oracle", ("width=12289",)),
    modules.SquaresUpTo8192: ("oracle", ("width=8195 out_width=1 bias",)),
    modules.BiasUpTo16384: ("oracle", ("heads=5 width=8195",)),
    modules.SumsUpTo512: ("oracle", ("heads=5 width=8195",)),
    modules.PartsOfSquaresInHalf: ("oracle", ("values=large",)),
    modules.TapsAddUpInTheirDtype: ("oracle", ("values=growing",)),
    modules.NormAddsUpInItsDtype: ("oracle", ("values=growing",)),
    modules.SpeedsAddUpInTheirDtype: ("oracle", ("values=growing",)),
    modules.OffsetsOf12Bits: ("oracle", ("lengths=4098+5+6+61500",)),
    wrong.NormsOfEachValueHead: ("oracle", ("value_heads=2 key_dim=4 value_dim=1 gate=64 values=small",)),
    modules.UnitRowsOver512: ("oracle", ("width=515 values=small",)),
    pools.KeysOver128OfTheFirstHead: (
        "oracle",
        ("key_dim=129 value_dim=1 gate=64 state", "key_dim=129 value_dim=1 gate=64 values"),
    ),
    wrong.LayerHeadsUpTo64: ("oracle", ("heads=16 value_heads=272",)),
    wrong.BatchesOf8Bits: ("oracle", ("lengths=1x259", "lengths=1x1030 key_dim")),
    wrong.RatiosOf8Bits: ("oracle", ("lengths=3 value_heads=257",)),
    wrong.SumsOf256Chunks: ("oracle", ("lengths=16450",)),
    wrong.DecaysOf13Bits: ("oracle", ("lengths=8195",)),
    wrong.ValuesUpTo512: ("oracle", ("value_dim=515",)),
    pools.SlotsOf16Bits: ("oracle", ("spare=65536",)),
    pools.SlotsOf16BitsWithASign: ("oracle", ("spare=65536",)),
    pools.AcceptedOf7Bits: ("oracle", ("lengths=130+130+130",)),
    pools.AcceptedOfWholeTiles: ("oracle", ("lengths=70+70+70",)),
    pools.DraftsUpTo256: ("oracle", ("lengths=3x690",)),
    served.TransfersOfWholePages: ("ledger", ("key_dim=40 value_dim=40",)),
    served.OneBufferOfGraphs: ("ledger", ("/d:a,b/v2:a1,b1,c1",)),
    served.MaskOf32Rows: ("session", ("slots=260",)),
    served.MaskOf64Rows: ("session", ("slots=260",)),
    served.RowsUpTo256: ("session", ("slots=260",)),
    served.AdmitsUpTo256: ("tags", ("/p:b2,c2,d2,e2,f2/f:b",)),
    served.LeaksForkedSnapshots: ("slots", ("p:a64/k:b<a@/r:a/f:b", "p:a5/s:a/k:b<a@/r:a/f:b")),
    served.ServedHeadsOf8Bits: ("session", ("heads=320 value_heads=960", "heads=16 value_heads=272")),
    modules.GateHeadsUpTo512: ("oracle", ("heads=513",)),
    modules.TailsOfL2: ("oracle", ("op=l2norm width=515", "width=515 values=small", "heads=5 width=8195")),
    modules.TailsOfGatedNorms: ("oracle", ("op=gated_rms_norm width=515", "width=515 values=small", "heads=5 width=8195")),
    modules.ConvTilesOf16Bits: ("whole", ("lengths=524303",)),
    wrong.NormedRowsOf16Bits: ("oracle", ("lengths=1030 heads=64",)),
    modules.ConvStatesOf10Bits: ("oracle", ("lengths=1+2+3+1+2+3",)),
    modules.ConvStartsOf16Bits: ("oracle", ("lengths=4098+5+6+61500",)),
    wrong.LayerSequencesOf8Bits: ("oracle", ("1x259 packed=yes",)),
    wrong.LayerBatchesOf8Bits: ("oracle", ("1x259 key_dim",)),
    wrong.LayerHeadsOf8Bits: ("oracle", ("heads=16 value_heads=272",)),
    served.MapsOf32Sequences: ("parallel", ("=1x32+4", "=1x129+4")),
    served.MapsOf128Sequences: ("parallel", ("=1x129+4",)),
    served.EmptyOnTwoRanks: ("parallel", ("lengths=2+0+2",)),
    served.PathHeadsOf8Bits: ("parallel", ("heads=320 value_heads=960",)),
}
# Right forms outside the zoo.
RIGHT = {
    modules.SpeedsAddUpInTheirDtype: "tests/wrong_just_over_modules.py:GateOfNarrowParameters",
    modules.SumsUpTo512: "tests/wrong_options.py:SumNorm",
    served.EmptyOnTwoRanks: "tests/wrong_just_over_served.py:ReturnsStates",
    pools.ParentsOf7Bits: "tests/wrong_just_over_pools.py:LongTrees",
    wrong.SpeedsOf1024Sequences: "tests/right_interfaces.py:FusedGates",
}


def domain_of(kind: type) -> Any:
    return domain_in_a_check(spec_of(kind))


def fixed(kind: type, law: str) -> Sequence[Example]:
    domain = domain_of(kind)
    found: Sequence[Example] = book_of(domain).laws[law].always(domain)
    return found


def outputs_alone(example: Example) -> Example:
    """The example without a backward, which takes most of the time."""
    if not getattr(example.case, "backward", False):
        return example
    return dataclasses.replace(example, case=dataclasses.replace(example.case, backward=False))


def verdict_of(adapter: str, law: str, example: Example) -> Verdict:
    return execute(Run(law, adapter, example)).verdict


@pytest.mark.parametrize("kind", SHOWN_BY, ids=lambda kind: kind.__name__)
@pytest.mark.slow_after_first
def test_that_case_alone_shows_it_and_the_right_form_holds(kind: type) -> None:
    law, texts = SHOWN_BY[kind]
    examples = fixed(kind, law)
    showing = [example for example in examples if any(text in str(example.case) for text in texts)]
    assert len(showing) == len(texts), [str(example.case)[:200] for example in examples]
    assert {verdict_of(spec_of(kind), law, example) for example in showing} == {Verdict.BROKEN}
    in_outputs = verdict_of(spec_of(kind), law, outputs_alone(showing[0])) is Verdict.BROKEN
    others = [outputs_alone(example) if in_outputs else example for example in examples if example not in showing]
    assert [example for example in others if verdict_of(spec_of(kind), law, example) is Verdict.BROKEN] == []
    zoo = (f"zoo/{base.__name__}" for base in kind.__mro__ if base.__module__.startswith("verify.zoo."))
    right = RIGHT.get(kind) or next(zoo, spec_of(served.GathersAll))
    for example in showing:
        assert verdict_of(right, law, example) is Verdict.HOLDS, example


@pytest.mark.parametrize("kind", SHOWN_BY, ids=lambda kind: kind.__name__)
@pytest.mark.slow
def test_each_seed_draws_it_and_what_else_is_drawn_does_not_show_it(kind: type) -> None:
    law, domain = SHOWN_BY[kind][0], domain_of(kind)
    examples = fixed(kind, law)
    for seed in range(3):
        assert [example for example in in_a_check(law, domain, seed) if example in examples] == list(examples)
    others = [example for example in in_a_check(law, domain, 0) if example not in examples]
    assert Verdict.BROKEN not in [verdict_of(spec_of(kind), law, example) for example in others[:OTHERS]]


@pytest.mark.slow
def test_an_engine_of_few_slots_holds_within_its_domain() -> None:
    examples = fixed(served.FewSlots, "session")
    assert [example.case.slots for example in examples] == [26, 4, 6, 5, 5, 3, 3, 10, 5, 5, 6, 4, 5, 5, 5, 3, 3, 3]
    assert {verdict_of(spec_of(served.FewSlots), "session", example) for example in examples} == {Verdict.HOLDS}


@pytest.mark.parametrize("words", ["padded=some", "accepted=some", "padded=some fresh=some"])
def test_of_very_many_requests_real_ones_are_judged(words: str) -> None:
    """Some of the requests are padding, or keep a part of their tokens. The judged ones are chosen among those that are real."""
    lengths = "+".join(["1", "2"] * 550) if "accepted" in words else "+".join(["1"] * 1100)
    line = f"law=oracle adapter={{}} op=decode lengths={lengths} packed=yes heads=64 value_heads=64 key_dim=1 value_dim=1 {words}"
    right, of_16_bits = (execute(Run.parse(line.format(spec))) for spec in ("zoo/Serving", spec_of(pools.LaunchesOf16Bits)))
    assert (right.verdict, of_16_bits.verdict) == (Verdict.HOLDS, Verdict.BROKEN)
    assert 0 < max(right.ratios.values()) < 1
