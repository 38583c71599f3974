"""Every law has been seen to fail: wrong implementations, each found in the default profile by the law named, and shrunk small."""

import pathlib

import pytest

from properties.rules.laws import LAWS
from tests.kills import Kill, assert_killed_alone, rows
from verify.process.worker import Worker
from verify.zoo import wrong_gates as gates
from verify.zoo import wrong_rules as rules

KILLED_BY = {
    rules.DropsState: (Kill("oracle", 65), Kill("cut", 66)),
    rules.LeaksState: (Kill("packed", 2, 2), Kill("samples", 2, 2), Kill("oracle", 2, 2)),
    rules.PeeksAhead: (Kill("future", 2),),
    rules.SeesFutureGates: (Kill("future", 32),),
    rules.TiledHeads: (Kill("oracle", 2), Kill("heads", 1)),
    rules.ForgetsBetaInErase: (Kill("oracle", 2),),
    rules.DecayOneTokenEarly: (Kill("oracle", 65), Kill("cut", 66)),
    rules.DecayTokenByThread: (Kill("oracle", 123), Kill("cut", 69)),
    rules.TailWithoutGate: (Kill("oracle", 2),),
    rules.EpsInsideMean: (Kill("norm", 1),),
    rules.EpsAsFloor: (Kill("norm", 2),),
    rules.EpsTenTimes: (Kill("norm", 8), Kill("oracle", 6)),
    rules.ScaleMeansOne: (Kill("absent", 1),),
    rules.NeedsScaleOnlyWhenGiven: (Kill("absent", 1),),
    rules.FirstStateForAll: (Kill("oracle", 1, 2),),
    rules.StateTransposed: (Kill("oracle", 1), Kill("recurrent", 2)),
    rules.StateInBf16: (Kill("oracle", 1),),
    rules.NoGradientIntoState: (Kill("oracle", 1, 2),),
    rules.DropsStateGradient: (Kill("cut", 2), Kill("oracle", 1)),
    rules.GateGradientLateByOne: (Kill("oracle", 2),),
    rules.Saturates: (Kill("linear", 1),),
    rules.ClipsGradient: (Kill("linear", 1, shown=(0, 7)),),
    rules.ChangesBeta: (Kill("pure", 1),),
    rules.WritesBeforeV: (Kill("pure", 1),),
    rules.LeavesRowUnwritten: (Kill("memory", 64), Kill("oracle", 64)),
    rules.ReadsUnwritten: (Kill("memory", 1),),
    rules.AssumesContiguous: (Kill("strides", 2),),
    rules.AddressesIn32Bits: (Kill("strides", 1, shown=(0, 18)),),
    rules.SharesExponentAcrossHeads: (Kill("heads", 1),),
    rules.SharesExponentAcrossTokens: (Kill("samples", 8, 2), Kill("future", 8)),
    rules.SlotOneIsOff: (Kill("permuted", 1, 2),),
    rules.NeverTheSame: (Kill("memory", 1),),
    rules.TunesOnTheThirdCall: (Kill("again", 1),),
    rules.LargeBatchesDiffer: (Kill("batch", 1, 2),),
    rules.OneSequenceDiffers: (Kill("batch", 1, 2),),
    rules.LargeBatchesLoseAState: (Kill("batch", 1, 2),),
    rules.Int32Offsets: (Kill("oracle", 2, 2),),
    rules.SkipsLengthOne: (Kill("oracle", 1),),
    rules.DropsEmpty: (Kill("oracle", 2, 2),),
    rules.Overflows: (Kill("oracle", 12),),
    rules.AlwaysNormalises: (Kill("recall", 1),),
    rules.SingleTokenForgetsDecay: (Kill("recurrent", 2),),
    rules.OneHeadOneToken: (Kill("oracle", 71),),
    rules.ZeroesARow: (Kill("oracle", 34),),
    rules.AddsStateTwice: (Kill("absent", 1),),
    rules.WrongWithoutFinalState: (Kill("absent", 2, shown=(0, 19)),),
    rules.HalfSum: (Kill("oracle", 1),),
    rules.GroupsByShift: (Kill("oracle", 2),),
    rules.WideValuesDoNotDecay: (Kill("strides", 1, seeds=4, shown=(1, 24)),),
    rules.InferenceForgetsTheTail: (Kill("absent", 1),),
    rules.SquaresInHalf: (Kill("norm", 1, shown=(0, 17)),),
    gates.ForgetsDtBias: (Kill("gates", 6),),
    gates.BiasInHalf: (Kill("gates", 9),),
    gates.SpeedOfTwoRows: (Kill("oracle", 2, 3),),
}


@pytest.mark.parametrize(("name", "kill"), rows(KILLED_BY))
@pytest.mark.slow_after_first
def test_law_alone_kills_mutant_and_shows_a_small_case(name: str, kill: Kill, worker: Worker, tmp_path: pathlib.Path) -> None:
    assert_killed_alone(name, kill, worker, tmp_path)


def test_every_law_has_a_mutant_that_it_kills_alone() -> None:
    others = {"history", "recompute"}  # tests/laws/test_histories.py and tests/laws/test_recompute.py
    assert {kill.law for kills in KILLED_BY.values() for kill in kills} == set(LAWS) - others


def test_every_mutant_has_a_story() -> None:
    for mutant in KILLED_BY:
        assert mutant.__doc__ and mutant.__doc__ != rules.Chunkwise.__doc__
