"""Which law of traces detects which wrong engine when it is run alone, within the cases of the default profile."""

import functools

import pytest

from properties.laws.law import Blind, Breach
from properties.traces.domain import TraceDomain
from properties.traces.laws import TRACE_LAWS
from properties.words.example import Example
from verify.bench.faults import AdapterFault
from verify.bench.trace_bench import EngineBench, place_of
from verify.engine.drawing import of_law
from verify.engine.profiles import PROFILES
from verify.engine.under_tags import add_tags
from verify.execution.execute import execute
from verify.execution.judge import judge
from verify.execution.line import Run
from verify.findings.law_report import LawReport
from verify.findings.report import failure
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker
from verify.zoo import wrong_traces as traces
from verify.zoo.animals import animals

KILLED_BY = {
    traces.PaddingIsTheLastSlot: "tags",
    traces.PaddingTakesTheFirstSlot: "tags",
    traces.PaddingKeepsTheLastIndex: "ledger",
    traces.PaddingInTheMiddle: "tags",
    traces.StateIsNotCleared: "session",
    traces.WindowIsNotCleared: "session",
    traces.ClearsByZeroTimes: "tags",
    traces.ClearsWhenFreed: "renamed",
    traces.ClearsItsNeighbour: "ledger",
    traces.GivesASlotTwice: "slots",
    traces.LeaksSnapshots: "slots",
    traces.HandsOutTheDummy: "slots",
    traces.HandsOutTheNullSlot: "slots",
    traces.StateKeepsTheDraft: "tags",
    traces.AcceptsOneLess: "tags",
    traces.WindowKeepsTheDraft: "dropped",
    traces.WindowMissesTheDraft: "tags",
    traces.AcceptedOfRequestsAlone: "tags",
    traces.AcceptedOfTheStepBefore: "alone",
    traces.DraftsFromTheBuffer: "dropped",
    traces.NoWriteAfterFour: "session",
    traces.OneWidthForAllDrafts: "tags",
    traces.AcceptedOfDraftsAlone: "tags",
    traces.NoneAcceptedIsOne: "tags",
    traces.VerifyWithoutDecay: "session",
    traces.OneTokenIsADecode: "session",
    traces.PromptForgetsItsPrefix: "tags",
    traces.PromptForgetsItsWindow: "session",
    traces.ShortPromptsDropTheWindow: "tags",
    traces.NoTokensMeanZeros: "alone",
    traces.RowsChangeStates: "tags",
    traces.MixedStepsTakeNoSnapshot: "tags",
    traces.SnapshotHalfWay: "tags",
    traces.SnapshotOfTheEnd: "tags",
    traces.SnapshotWindowOfTheEnd: "tags",
    traces.ShortRowsSaveAnEmptyWindow: "tags",
    traces.SnapshotIsNotRenewed: "tags",
    traces.SnapshotOfItsNeighbour: "tags",
    traces.ForkSharesTheSlot: "slots",
    traces.ForkForgetsTheWindow: "ledger",
    traces.ForkOfTheRequest: "ledger",
    traces.DraftsSpoilTheSnapshot: "tags",
    traces.SwapLosesTheWindow: "ledger",
    traces.SwapBringsBackTheSlot: "slots",
    traces.SwapTransposes: "ledger",
    traces.SwapRoundsToHalf: "ledger",
    traces.TransferJoinsRanks: "ledger",
    traces.TransferSendsTheFirstRank: "tags",
    traces.TransferDealsHeads: "tags",
    traces.TransferJoinsTheEndsFirst: "ledger",
    traces.PreemptionKeepsTheState: "tags",
    traces.PreemptionLosesTheSlot: "slots",
    traces.SavesBeforeTheToken: "tags",
    traces.SavesTheFirstRows: "tags",
    traces.StatesRoundToHalf: "session",
    traces.WindowsAfterRelu: "session",
    traces.WindowsRoundToHalf: "session",
    traces.WindowsLoseTheirSign: "session",
    traces.NegatesALog: "session",
    traces.OneBiasForAllHeads: "session",
    traces.SlotsDecideTheRounding: "renamed",
    traces.SharedScale: "alone",
    traces.ScaleOfTheDraft: "dropped",
    traces.ScaleOfThePool: "dropped",
}
# Wrong engines that one law sees, and no other law does in as many cases. What `tags` sees, `session` sees too: `tags` names the
# token whose state or window is in the wrong place.
SEEN_BY_ONE_LAW = {
    traces.VerifyWithoutDecay: "session",
    traces.WindowsRoundToHalf: "session",
    traces.NegatesALog: "session",
    traces.ClearsItsNeighbour: "ledger",
    traces.ScaleOfTheDraft: "dropped",
    traces.SharedScale: "alone",
    traces.HandsOutTheDummy: "slots",
    traces.SlotsDecideTheRounding: "renamed",
}
OTHER_CASES = 2
WITHOUT_THE_FORM = 32  # examples of a domain that lacks a form; with it, these engines are broken in as many
# Wrong engines that only one form of step shows, with the domain that lacks it, in which they hold.
SHOWN_BY_ONE_FORM = {
    traces.OneWidthForAllDrafts: TraceDomain(ragged=False),
    traces.AcceptedOfDraftsAlone: TraceDomain(ragged=False),
    traces.NoneAcceptedIsOne: TraceDomain(none_accepted=False),
    traces.MixedStepsTakeNoSnapshot: TraceDomain(mixed=False),
    traces.ShortRowsSaveAnEmptyWindow: TraceDomain(alignments=("row",)),
    traces.TransferDealsHeads: TraceDomain(grouped_heads=False),
}


@functools.cache
def examples(law: str, domain: TraceDomain = traces.Serves.domain, count: int | None = None) -> list[Example]:
    """The examples that a check draws for a law, by default as many as in the default profile."""
    found: list[Example] = []
    of_law(TRACE_LAWS[law], domain, 0, count or PROFILES["quick"].examples_of(TRACE_LAWS[law]), found.append)
    return found


@functools.cache
def broken(animal: type[traces.Serves], law: str, most: int | None = None) -> int | None:
    """The number of the first example in which a law finds the animal broken, or None.

    Without `most`, examples in float32 come first, because a wrong result is far over their tolerance, and needs no second look. Of
    them, and of the others, short ones come first, because they take less.
    """
    drawn = examples(law)
    chosen = drawn[:most] if most else sorted(drawn, key=lambda example: (example.case.dtype != "fp32", example.case.tokens))
    return next((number for number, example in enumerate(chosen, 1) if is_broken(animal, law, example)), None)


def is_broken(animal: type[traces.Serves], law: str, example: Example) -> bool:
    try:
        return bool(judge(TRACE_LAWS[law].check(EngineBench(animal(), example.case), example), place_of).findings)
    except (Breach, AdapterFault):
        return True
    except Blind:
        return False


@pytest.mark.parametrize(("animal", "law"), KILLED_BY.items(), ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.slow_after_first
def test_law_alone_kills_the_wrong_engine(animal: type[traces.Serves], law: str) -> None:
    assert broken(animal, law) is not None


def test_every_law_has_an_engine_and_every_engine_a_law() -> None:
    here = {law.name for law in TRACE_LAWS.values() if not law.of_process}  # the others are in tests/laws/test_histories.py
    assert set(KILLED_BY.values()) == {*SEEN_BY_ONE_LAW.values(), "tags"} == here
    assert {kind.__name__ for kind in KILLED_BY} == {
        name for name, animal in animals().items() if animal.kind.__module__ == traces.__name__
    }
    assert len(KILLED_BY) >= 25


@pytest.mark.parametrize(("animal", "law"), SEEN_BY_ONE_LAW.items(), ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.slow
def test_what_one_law_alone_sees_the_others_do_not(animal: type[traces.Serves], law: str) -> None:
    assert broken(animal, law) is not None
    others = [name for name, other in TRACE_LAWS.items() if name != law and not other.of_process]
    assert {name: broken(animal, name, OTHER_CASES) for name in others} == dict.fromkeys(others)


@pytest.mark.parametrize(("animal", "without"), SHOWN_BY_ONE_FORM.items(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.slow
def test_only_its_form_shows_the_wrong_engine(animal: type[traces.Serves], without: TraceDomain) -> None:
    assert KILLED_BY[animal] == "tags"
    for domain, shows in ((traces.Serves.domain, True), (without, False)):
        drawn = examples("tags", domain, WITHOUT_THE_FORM)
        assert any(is_broken(animal, "tags", example) for example in drawn) is shows


@pytest.mark.slow
def test_a_check_shows_a_small_trace_and_its_culprit(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    from verify.engine.check import Check
    from verify.engine.state import Settings

    store = Store(tmp_path_factory.mktemp("findings"))
    with Check(Settings("zoo/StateKeepsTheDraft", ["tags"], PROFILES["few"]), [worker], store, defects=[]) as check:
        (report,) = check.run()
    assert report.run is not None
    assert report.run.endswith("op=serving trace=p:a1/v:a0:2 slots=1 key_dim=4 value_dim=4 width=2")
    assert "of head 0 the tag of request a's rejected draft 0 in event 2" in report.findings[0].what


def test_a_broken_session_has_tags_too() -> None:
    def findings_of(animal: str, case: str, domain: TraceDomain | None = None) -> list[str]:
        run = Run.parse(f"law=session adapter=zoo/{animal} {case}")
        report = LawReport("session", run.adapter, Verdict.BROKEN, run=str(run))
        add_tags(report, domain or TraceDomain(), execute)
        return [line.removeprefix("  tags         ") for line in failure(report).splitlines() if line.startswith("  tags ")]

    what, command = findings_of("StateKeepsTheDraft", "trace=p:a5,b3/v4:a2,b4/d:a slots=2 value_dim=2")
    assert what == (
        "a state holds a wrong tag: request a's state after event 2 (v4:a2,b4) of p:a5,b3/v4:a2,b4/d:a holds in row 7 of "
        "head 0 the tag of request a's rejected draft 2 in event 2, must hold zeros"
    )
    run = Run.parse(command.removeprefix('gdn-verify repeat "').rstrip('"'))
    assert (run.law, run.example.case.value_dim, execute(run).verdict) == ("tags", 4, Verdict.BROKEN)
    what, _ = findings_of("OneWidthForAllDrafts", "trace=p:a5,b3/v:b1:2,a2:4 slots=2 gate=10")
    assert what.endswith("holds in row 7 of head 0 the tag of request a's rejected draft 2 in event 2, must hold zeros")
    what, _ = findings_of("AcceptedOfDraftsAlone", "trace=p:a5,b3/v:b1:1,a2:4 slots=2 gate=10")
    assert what.endswith("must hold the tag of request a's token 6")
    what, _ = findings_of("NoneAcceptedIsOne", "trace=p:a5/v:a0:4 slots=1 gate=10")
    assert what.endswith("holds in row 5 of head 0 the tag of request a's rejected draft 0 in event 2, must hold zeros")
    what, _ = findings_of("MixedStepsTakeNoSnapshot", "trace=p:a1/p:b64,a1 snapshots=64 gate=10")
    assert what.startswith("a state holds a wrong tag: request b's snapshot's state after event 2 (p:b64,a1)")
    what, _ = findings_of("ShortRowsSaveAnEmptyWindow", "trace=p:a62/p:a3 snapshots=64 aligned=request gate=10")
    assert what.endswith("holds in column 0 zeros, must hold the tag of request a's token 61")
    (numbers,) = findings_of("StatesRoundToHalf", "trace=p:a5/d:a slots=1")
    assert numbers == "every token is where it belongs, so the numbers that are computed from it are wrong"
    assert findings_of("StatesRoundToHalf", "trace=p:a5/d:a slots=1", TraceDomain(value_widths=(2,))) == [], "too narrow for tags"
    ledger = LawReport("ledger", "zoo/X", Verdict.BROKEN, run="x")
    add_tags(ledger, TraceDomain(), execute)
    assert (ledger.tags, ledger.tags_run) == ([], "")
