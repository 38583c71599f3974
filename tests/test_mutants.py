"""Every law has been seen to fail: wrong implementations, each found in the default profile by the law named, and shrunk small."""

import dataclasses
from collections.abc import Iterator

import pytest

from properties.laws import LAWS
from tests import mutants
from verify.check import PROFILES, Check
from verify.judge import Verdict
from verify.run import Run
from verify.store import Store
from verify.worker import Worker


@dataclasses.dataclass(frozen=True)
class Kill:
    """The law that kills a mutant when run alone, and how small its case must get: tokens of the longest sequence, sequences."""

    law: str
    tokens: int
    sequences: int = 1


KILLED_BY = {
    mutants.DropsState: (Kill("oracle", 1), Kill("cut", 66)),
    mutants.LeaksState: (Kill("packed", 2, 2), Kill("samples", 2, 2), Kill("oracle", 2, 2)),
    mutants.PeeksAhead: (Kill("future", 2),),
    mutants.SeesFutureGates: (Kill("future", 32),),
    mutants.TiledHeads: (Kill("oracle", 1), Kill("heads", 1)),
    mutants.ForgetsBetaInErase: (Kill("oracle", 2),),
    mutants.DecayOneTokenEarly: (Kill("oracle", 64), Kill("cut", 66)),
    mutants.TailWithoutGate: (Kill("oracle", 2),),
    mutants.EpsInsideMean: (Kill("norm", 1),),
    mutants.EpsAsFloor: (Kill("norm", 1),),
    mutants.EpsTenTimes: (Kill("norm", 1), Kill("oracle", 1)),
    mutants.ScaleMeansOne: (Kill("absent", 1),),
    mutants.NeedsScaleOnlyWhenGiven: (Kill("absent", 1),),
    mutants.FirstStateForAll: (Kill("oracle", 1, 2),),
    mutants.StateTransposed: (Kill("oracle", 1), Kill("recurrent", 2)),
    mutants.StateInBf16: (Kill("oracle", 1),),
    mutants.NoGradientIntoState: (Kill("oracle", 1, 2),),
    mutants.DropsStateGradient: (Kill("cut", 2), Kill("oracle", 1)),
    mutants.GateGradientLateByOne: (Kill("oracle", 2),),
    mutants.Saturates: (Kill("linear", 1),),
    mutants.ClipsGradient: (Kill("linear", 1),),
    mutants.ChangesBeta: (Kill("pure", 1),),
    mutants.WritesBeforeV: (Kill("pure", 1),),
    mutants.LeavesRowUnwritten: (Kill("memory", 64), Kill("oracle", 64)),
    mutants.ReadsUnwritten: (Kill("memory", 1),),
    mutants.AssumesContiguous: (Kill("strides", 2),),
    mutants.SharesExponentAcrossHeads: (Kill("heads", 1),),
    mutants.SharesExponentAcrossTokens: (Kill("samples", 8, 2), Kill("future", 8)),
    mutants.SlotOneIsOff: (Kill("permuted", 1, 2),),
    mutants.NeverTheSame: (Kill("memory", 1),),
    mutants.Int32Offsets: (Kill("oracle", 2, 2),),
    mutants.SkipsLengthOne: (Kill("oracle", 1),),
    mutants.DropsEmpty: (Kill("oracle", 2, 2),),
    mutants.Overflows: (Kill("oracle", 12),),
    mutants.AlwaysNormalises: (Kill("recall", 1),),
    mutants.SingleTokenForgetsDecay: (Kill("recurrent", 2),),
    mutants.OneHeadOneToken: (Kill("oracle", 71),),
    mutants.ZeroesARow: (Kill("oracle", 34),),
    mutants.AddsStateTwice: (Kill("absent", 1),),
    mutants.WrongWithoutFinalState: (Kill("absent", 2),),
    mutants.HalfSum: (Kill("oracle", 1),),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as one:
        yield one


@pytest.mark.parametrize(
    ("mutant", "kill"),
    [pytest.param(mutant, kill, id=f"{mutant.__name__}-{kill.law}") for mutant, kills in KILLED_BY.items() for kill in kills],
)
def test_law_alone_kills_mutant_and_shows_a_small_case(
    mutant: type, kill: Kill, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = f"tests/mutants.py:{mutant.__name__}"
    store = Store(tmp_path_factory.mktemp("findings"))
    with Check(spec, [kill.law], PROFILES["quick"], workers=[worker], store=store) as check:
        (report,) = check.run()
    assert report.verdict is Verdict.BROKEN, f"{kill.law} lets {mutant.__name__} live: {report.counts}"
    case = Run.parse(report.run).example.case
    assert len(case.lengths) <= kill.sequences, report.run
    assert max(case.lengths) <= kill.tokens, report.run
    kept = (store.folder / "findings.jsonl").read_text()
    assert report.run in kept
    assert report.first_run in kept


def test_every_law_has_a_mutant_that_it_kills_alone() -> None:
    assert {kill.law for kills in KILLED_BY.values() for kill in kills} == set(LAWS)


def test_every_mutant_tells_its_story() -> None:
    for mutant in KILLED_BY:
        assert mutant.__doc__ and mutant.__doc__ != mutants.Chunkwise.__doc__
