"""Histories: what an implementation keeps of one call makes a later call wrong, and right implementations pass."""

import dataclasses
import functools
import pathlib
import time
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.books import book_of
from properties.laws.history import HISTORIES
from properties.laws.other_calls import other_kinds, rotated
from properties.paths.laws import PATH_LAWS
from properties.rules.domain import Domain
from properties.words.example import Example
from properties.words.sizes import MOST, sized
from tests.alone import told
from verify.adapters.fla import Chunk
from verify.bench import adapter_bench as benches
from verify.bench import addresses
from verify.bench import at_once as calls_at_once
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import AdapterFault
from verify.engine.asking import ask_afresh
from verify.engine.drawing import of_law
from verify.engine.profiles import PROFILES
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker
from verify.zoo import wrong_histories
from verify.zoo.animals import animals, right_of
from verify.zoo.base import Chunkwise

HERE = "tests/laws/test_histories.py"
# Each wrong implementation with the history that shows it, and a small case.
SEEN_BY = {
    "SpansByIdentity": "refill lengths=0+1 packed=yes key_dim=1 value_dim=1 backward=no",
    "SpansByAddress": "freed lengths=0+1 packed=yes key_dim=1 value_dim=1 backward=no",
    "GatesOfTheFirstShape": "others lengths=1 gate=1000 state=random backward=no",
    "ScratchOfTheFirstBatch": "others lengths=1 packed=yes state=random backward=no",
    "NestedAfterAnError": "refused lengths=0 state=random backward=no",
    "MaskBeforeItIsFull": "failed lengths=2 state=random backward=no",
    "ScratchOfAllThreads": "threads lengths=3 state=random backward=no",
    "ConvWeightByAddress": "refill op=causal_conv1d lengths=1 backward=no",
    "ConvOnesBeforeTheyAreFull": "failed op=causal_conv1d lengths=1 backward=no",
    "SpeedsOfACallThatFailed": "failed op=gdn_layer lengths=2 conv_width=2 backward=no",
    "WeightOfInference": "gradients op=gdn_layer lengths=1 conv_width=2",
    "SlotsByAddress": "freed op=decode lengths=1+1+1+1+1+1+1+1",
    "TakesStatesOut": "failed op=decode lengths=1 state=random",
    "QueueAfterAnError": "refused op=decode lengths=0 state=random",
    "LengthsByIdentity": "refill op=gdn_layer lengths=2+4 packed=yes backward=no",
    "StepsBeforeTheyAreFull": "failed op=serving trace=p:a9",
    "WritesRowByRow": "retried op=serving trace=p:a1,b9 slots=4",
    "AdmissionsThatFailKeepTheirSlot": "retried op=serving trace=p:a1",
    "SwapGivesTheSlotFirst": "retried op=serving trace=p:a1/w:a",
}
# Wrong paths and engines with the history of the default profile that shows them.
SHOWN_BY = {
    "LengthsOfTheFirstShape": "others",
    "LengthsByIdentity": "refill",
    "LengthsByAddress": "freed",
    "ProjectionOfInference": "gradients",
    "OpenAfterARefusal": "refused",
    "OpenAfterACollective": "failed",
    "SlicesOfOneRank": "alone",
    "GatesOfTheFirstEngine": "others",
    "FiltersByAddress": "refill",
    "OneTableForAllEngines": "turns",
    "TableOfTheLastTrace": "again",
    "ZerosAfterAnError": "refused",
    "StepsBeforeTheyAreFull": "failed",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker of these tests' own. They end its process time and again, and the one of all tests would import everything anew."""
    with Worker() as one:
        yield one


def law_of(spec: str) -> str:
    """The law of histories in the adapter's book."""
    return "earlier" if book_of(adapter_of(spec).domain).name == "paths" else "history"


SEEDS = 3  # checks whose examples are looked at in turn: a check has few of each history


@functools.cache
def examples_of(spec: str, seed: int = 0) -> list[Example]:
    """The examples that a check of the default profile draws for the law of histories."""
    domain, found, law = adapter_of(spec).domain, list[Example](), law_of(spec)
    of_law(book_of(domain).laws[law], domain, seed, PROFILES["quick"].examples_of(book_of(domain).laws[law]), found.append)
    return found


def run_of(name: str) -> Run:
    """The run of a wrong implementation's history and small case."""
    variant, _, case = SEEN_BY[name].partition(" ")
    return Run.parse(f"law={law_of(f'zoo/{name}')} variant={variant} adapter=zoo/{name} {case}")


def outcome_of(line: str) -> Outcome:
    return execute(Run.parse(line))


RULES = [name for name in SEEN_BY if hasattr(wrong_histories, name) and name not in SHOWN_BY]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.slow_after_first
def test_the_default_profile_shows_a_history_that_the_right_implementation_survives(name: str) -> None:
    variant = run_of(name).example.variant
    right = right_of(animals()[name].kind)
    assert right is not None
    example = next(
        example
        for seed in range(SEEDS)
        for example in examples_of(f"zoo/{name}", seed)
        if example.variant == variant and execute(Run("history", f"zoo/{name}", example)).verdict is Verdict.BROKEN
    )
    assert execute(Run("history", f"zoo/{right.__name__}", example)).verdict is Verdict.HOLDS


@pytest.mark.parametrize("right", ["SharesAndRemembers", "ServesAndRemembers"])
@pytest.mark.slow
def test_the_default_profile_shows_wrong_paths_and_engines_and_the_right_ones_survive_every_history(right: str) -> None:
    law, shown = law_of(f"zoo/{right}"), dict[str | None, Example]()
    checks = [sorted(examples_of(f"zoo/{right}", seed), key=lambda example: example.case.tokens) for seed in range(SEEDS)]
    for name, variant in SHOWN_BY.items():
        if issubclass(animals()[name].kind, getattr(wrong_histories, right)):
            cases = (example for examples in checks for example in examples if example.variant == variant)
            broken = (case for case in cases if execute(Run(law, f"zoo/{name}", case)).verdict is Verdict.BROKEN)
            shown[variant] = next(broken)
    elsewhere = {"in_flight", "retried"}  # in tests/laws/test_uses.py, and in SEEN_BY
    assert {*shown} == {*book_of(adapter_of(f"zoo/{right}").domain).laws[law].variants} - elsewhere
    for example in shown.values():
        assert execute(Run(law, f"zoo/{right}", example)).verdict is Verdict.HOLDS, example


@pytest.mark.parametrize("name", SEEN_BY)
@pytest.mark.slow_after_first
def test_the_smallest_line_shows_it_in_a_fresh_process(name: str, worker: Worker, tmp_path: pathlib.Path) -> None:
    outcome = ask_afresh(run_of(name), worker, Store(tmp_path))
    assert outcome.verdict is Verdict.BROKEN, outcome


COMPILER = """
import sys
from verify.execution.execute import execute
from verify.execution.line import Run
verdict = str(execute(Run.parse(line)).verdict)
told = [verdict, "torch._dynamo" in sys.modules]
"""


@pytest.mark.slow
def test_a_call_that_fails_brings_no_compiler() -> None:
    """Torch would import its compiler to call a mode with the compiler switched off."""
    assert told(COMPILER, line=str(run_of("MaskBeforeItIsFull"))) == ["broken", False]


class KeepsWhatIsAlive(Chunkwise):
    """Right: spans are kept for as long as cu_seqlens lives, and made again when its numbers change."""

    seen: ClassVar[dict[int, tuple[weakref.ref[Tensor], int, list[tuple[int, int]]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None or x.cu_seqlens.is_inference():  # which has no version
            return super().boundaries(x)
        tensor, version, spans = self.seen.get(id(x.cu_seqlens), (lambda: None, 0, []))
        if tensor() is not x.cu_seqlens or version != x.cu_seqlens._version:
            spans = super().boundaries(x)
            self.seen[id(x.cu_seqlens)] = (weakref.ref(x.cu_seqlens), x.cu_seqlens._version, spans)
        return spans


class HoldsWhatItKeeps(Chunkwise):
    """Right: spans are kept by the address and version of cu_seqlens, which stays alive and so keeps its address."""

    seen: ClassVar[dict[tuple[int, int], tuple[Tensor, list[tuple[int, int]]]]] = {}

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        if x.cu_seqlens is None or x.cu_seqlens.is_inference():  # which has no version
            return super().boundaries(x)
        key = (x.cu_seqlens.data_ptr(), x.cu_seqlens._version)
        return self.seen.setdefault(key, (x.cu_seqlens, super().boundaries(x)))[1]


class SmallerAfterAnError(Chunkwise):
    """Right: after a call that raises, chunks are smaller, which rounds differently."""

    chunk = None
    failed: ClassVar[bool] = False

    def run(self, x: Inputs) -> Any:
        self.size = 16 if self.failed else 64
        try:
            return super().run(x)
        except Exception:
            type(self).failed = True
            raise


class OneAtATime(Chunkwise):
    """Right: attributes are replaced in every call, so two threads must not call it at once, which it declares."""

    domain = Domain(threads=False)

    def low(self, x: Tensor, like: Tensor) -> Tensor:
        self.operand = super().low(x, like)
        like.sum()
        return self.operand


class ReturnsItsBuffer(Chunkwise):
    """Wrong: final states are returned in a buffer that the next call of these shapes fills again."""

    domain = Domain(threads=False, backward=False)
    buffers: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    def run(self, x: Inputs) -> Any:
        o, state = super().run(x)
        return o, self.buffers.setdefault(tuple(state.shape), torch.empty_like(state)).copy_(state)


def test_a_later_call_must_not_change_what_an_earlier_one_returned() -> None:
    words = "lengths=3 state=random backward=no"
    outcome = outcome_of(f"law=history variant=others adapter={HERE}:ReturnsItsBuffer {words}")
    assert outcome.verdict is Verdict.BROKEN
    assert [finding.output for finding in outcome.findings] == ["final_state of the first call, read after the second"]


@pytest.mark.parametrize("kind", [KeepsWhatIsAlive, HoldsWhatItKeeps, SmallerAfterAnError, OneAtATime, Chunkwise])
@pytest.mark.slow
def test_right_implementations_survive_every_history(kind: type[Chunkwise]) -> None:
    for variant in HISTORIES:
        for words in ("lengths=5+3+9 packed=yes state=random", "lengths=7+7 value_heads=2 dtype=bf16 backward=no"):
            if variant == "gradients" and "backward=no" in words:
                continue
            outcome = outcome_of(f"law=history variant={variant} adapter={HERE}:{kind.__name__} {words}")
            blind = variant == "streams" or (variant == "threads" and not kind.domain.threads)
            assert outcome.verdict is (Verdict.BLIND if blind else Verdict.HOLDS), (variant, outcome)


class ScratchOfInference(Chunkwise):
    """Calls without a backward share a scratch tensor for their gates, whatever thread they run in."""

    scratch: ClassVar[dict[Any, Tensor]] = {}

    def run(self, x: Inputs) -> Any:
        if any(isinstance(value, Tensor) and value.requires_grad for value in x.values()):
            return super().run(x)
        g = self.scratch.setdefault((x.g.shape, x.g.dtype), torch.empty_like(x.g)).copy_(x.g)
        time.sleep(0.02)  # so that the other thread overwrites it on a busy machine too
        return super().run(x.replaced(g=g))


@pytest.mark.slow
def test_calls_in_two_threads_are_drawn_without_a_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backward alone, a scratch tensor of inference would not show."""
    drawn: list[Example] = []
    of_law(book_of(Domain()).laws["history"], Domain(), 0, 96, drawn.append)
    threads = [example for example in drawn if example.variant == "threads" and sum(example.case.lengths)]
    adapter = ScratchOfInference()
    monkeypatch.setattr("verify.execution.judging._LOADED", {"it": adapter})
    broken = {example.case.backward for example in threads if execute(Run("history", "it", example)).verdict is Verdict.BROKEN}
    assert {example.case.backward for example in threads} == {True, False}
    assert broken == {False}


def test_histories_that_a_domain_does_not_promise_are_blind() -> None:
    for line, reason in [
        ("law=history variant=turns adapter={here}:OneEngine op=serving trace=p:a1", "the domain has together=False"),
        ("law=history variant=refill adapter={here}:OneEngine op=serving trace=p:a1", "the domain has refills=False"),
        ("law=history variant=retried adapter=zoo/Serves op=serving trace=p:a1", "the domain has retries=False"),
        ("law=history variant=streams adapter={here}:OneStream lengths=4", "the domain has streams=False"),
        ("law=history variant=streams adapter={here}:Chunkwise lengths=4", "streams need a GPU"),
        ("law=history variant=streams adapter=tests/right.py:Gathered op=decode lengths=1", "streams need a GPU"),
        ("law=earlier variant=refused adapter={here}:Accepts lengths=4 heads=2 value_heads=2 cp=2", "the domain has refuses=False"),
    ]:
        outcome = outcome_of(line.format(here=HERE))
        assert (outcome.verdict, outcome.reason) == (Verdict.BLIND, reason), line


class OneStream(Chunkwise):
    """A rule that does not promise that two streams may run it."""

    domain = Domain(streams=False)


class Accepts(wrong_histories.SharesAndRemembers):
    """A layer that does not promise to refuse illegal layouts."""

    domain = dataclasses.replace(wrong_histories.SharesAndRemembers.domain, refuses=False)


class OneEngine(wrong_histories.OneTableForAllEngines):
    """Right: a process has one engine at a time, and its tensors are not filled again, which it declares."""

    domain = dataclasses.replace(wrong_histories.OneTableForAllEngines.domain, together=False, refills=False)


@pytest.mark.slow
def test_an_engine_that_declares_it_is_the_only_one_is_right() -> None:
    for example in examples_of(f"{HERE}:OneEngine")[:3]:
        assert example.variant not in ("turns", "refill")
        assert execute(Run("history", f"{HERE}:OneEngine", example)).verdict is Verdict.HOLDS, example


@pytest.mark.slow
def test_sequences_of_unequal_lengths_alone_show_what_is_kept_by_their_number_and_sum() -> None:
    kept, law = adapter_of("zoo/LengthsOfTheFirstShape").domain, PATH_LAWS["earlier"]
    domain = sized(kept, None, MOST["quick"])
    examples = [example for example in law.always(domain) if example.case.layout == "zigzag"]
    assert [(example.case.lengths, example.variant) for example in examples] == [((4, 12, 8), "others")]
    for name, verdict in (("LengthsOfTheFirstShape", Verdict.BROKEN), ("SharesAndRemembers", Verdict.HOLDS)):
        assert {execute(Run("earlier", f"zoo/{name}", example)).verdict for example in examples} == {verdict}
    assert law.always(dataclasses.replace(domain, packed=False)) == law.always(kept) == []


def test_calls_on_two_streams_are_held_until_both_are_launched_and_waited_for_after_an_error() -> None:
    done: list[str] = []

    class Notes(Chunkwise):
        def run(self, x: Inputs) -> Any:
            done.append("call")
            if done.count("call") > self.most:
                raise ZeroDivisionError
            return super().run(x)

        most = 99

    adapter, case = Notes(), Run.parse("law=oracle adapter=zoo/Chunkwise lengths=4 backward=no").example.case
    bench = AdapterBench(adapter, None, case)  # type: ignore[arg-type]
    current = mock.Mock(wait_stream=lambda stream: done.append("wait"))
    fakes = {"Stream": mock.MagicMock(), "stream": mock.MagicMock(), "current_stream": lambda: current}
    fakes["_sleep"] = lambda cycles: done.append("hold")
    with mock.patch.multiple(torch.cuda, **fakes), mock.patch.object(benches.devices, "settle"):
        numbers = [number for number, _ in bench.at_once([(case.inputs(), None)] * 2, streams=True)]
        assert numbers == [0, 1] * benches.TIMES
        assert done == ["call"] * 2 + ["hold"] + ["call"] * 2 * benches.TIMES + ["wait"] * 2
        done.clear()
        adapter.most = 3
        with pytest.raises(AdapterFault):
            list(bench.at_once([(case.inputs(), None)] * 2, streams=True))
    assert done[-2:] == ["wait"] * 2
    calls_at_once._two_streams.cache_clear()


def test_a_place_gives_the_address_again_when_the_first_tensor_is_gone() -> None:
    for x in [torch.tensor([0, 3, 5]), torch.randn(2, 3, 4), torch.zeros(0, 3), torch.ones(1, dtype=torch.bfloat16)]:
        place = addresses.Spot(x)
        first = place.put(x)
        address = first.data_ptr()
        assert torch.equal(first, x), x
        assert address % addresses.ALIGNMENT == 0, x
        second = place.put(x + 1)
        assert torch.equal(first, x), x
        assert second.data_ptr() != address or not x.numel(), x
        del first, second
        again = place.put(x + 2)
        assert torch.equal(again, x + 2), x
        assert again.shape == x.shape, x
        assert again._version == 0, x


def test_memory_that_only_a_view_holds_is_not_given_again() -> None:
    place = addresses.Spot(torch.arange(4))
    view = place.put(torch.arange(4))[1:3]
    place.put(torch.zeros(4, dtype=torch.int64))
    assert view.tolist() == [1, 2]


@pytest.mark.parametrize("spec", ["zoo/Chunkwise", "zoo/Conv", "zoo/Layered", "transformers/gated_norm"])
@pytest.mark.slow_after_first
def test_other_calls_of_a_history_are_inside_the_domain(spec: str) -> None:
    domain, whats = adapter_of(spec).domain, set[str]()
    for example in examples_of(spec):
        assert domain.outside(example.case) is None
        assert domain.outside(rotated(example.case)) is None
        for what, other in other_kinds(domain, example.case):
            whats.add(what)
            assert domain.outside(other) is None
            assert (other.lengths != example.case.lengths, other.dtype != example.case.dtype) == (
                what == "shapes",
                what == "dtypes",
            )
    assert whats == {"shapes", "dtypes"}


class FilledAgain(Chunk):
    """flash-linear-attention keeps the chunks of a cu_seqlens by its identity, although a caller may fill it again."""

    domain = dataclasses.replace(Chunk.domain, refills=True)


@pytest.mark.interpreted
@pytest.mark.slow
def test_flas_chunks_of_filled_again_offsets_are_those_of_the_first(worker: Worker, tmp_path: pathlib.Path) -> None:
    line = f"law=history variant=refill adapter={HERE}:FilledAgain lengths=1+0 packed=yes key_dim=1 value_dim=1 backward=no"
    assert ask_afresh(Run.parse(line), worker, Store(tmp_path)).verdict is Verdict.BROKEN
