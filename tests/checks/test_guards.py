"""Guards: inputs lie between NaN, reads and writes there are found, and right implementations notice nothing."""

import dataclasses

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.books import book_of
from properties.rules.case import Case
from verify.adapters.base import Adapter
from verify.bench import guards as module
from verify.bench.adapter_bench import AdapterBench
from verify.bench.guards import GUARD, Copies, Guards
from verify.engine.drawing import seeded
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.interpreter import memory
from verify.process.environment import UNPOISONED
from verify.process.outcome import FailureKind, Verdict
from verify.zoo import base
from verify.zoo import wrong_reads as reads
from verify.zoo.animals import right_of

TENSORS = {
    "plain": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).mT,
    "half": torch.arange(12.0).bfloat16(),
    "indices": torch.arange(5, dtype=torch.int32),
    "part": torch.arange(12.0)[3:],
    "repeated": torch.ones(1).expand(4),
    "empty": torch.zeros(2, 0),
    "number": torch.tensor(3.0),
}
WITHOUT = {"part", "repeated", "empty"}


def test_copies_have_the_numbers_and_strides_of_a_tensor_and_nan_on_both_sides() -> None:
    guards = Guards(TENSORS)
    for name, x in TENSORS.items():
        there = guards[name]
        assert torch.equal(there, x)
        assert there.stride() == x.stride()
        assert (there is x) == (name in WITHOUT), name
        if name not in WITHOUT:
            assert there.data_ptr() % 64 == 0, "aligned as new tensors are"
            around = there.as_strided((there.numel() + 2 * GUARD,), (1,), 0)
            sides = torch.cat([around[:GUARD], around[-GUARD:]])
            assert bool((sides.isnan() if x.is_floating_point() else sides == 29999).all())
    assert guards.written() == []


def test_a_write_on_either_side_is_seen() -> None:
    for name, at in (("plain", GUARD - 1), ("half", GUARD + 12), ("indices", GUARD + 5 + 70)):
        guards = Guards(TENSORS)
        guards[name].as_strided((1,), (1,), at).fill_(1)
        assert guards.written() == [name]


def test_inputs_that_a_call_changed_are_named() -> None:
    """A bit, a shape, a number that became none; and nothing that was no number before, nor a zero that lost its sign."""
    now = {name: torch.arange(6.0) for name in ("kept", "bit", "shape", "lost", "none")}
    now |= {"whole": torch.arange(6), "flag": torch.zeros(2, dtype=torch.bool), "half": torch.zeros(3).half()}
    now |= {"turned": torch.arange(6.0).reshape(2, 3).mT, "repeated": torch.ones(1).expand(4), "empty": torch.zeros(2, 0)}
    now["none"][2] = torch.nan
    copies = Copies(now)
    assert copies.changed() == []
    assert all(torch.equal(copies[name].nan_to_num(), x.nan_to_num()) for name, x in now.items())
    now["none"][2] = -torch.tensor(torch.nan)
    now["kept"][0] = -0.0
    assert copies.changed() == []
    now["bit"][5] += 1e-6
    now["lost"][0] = torch.nan
    now["turned"][1, 0] = 7.0
    assert copies.changed() == ["bit", "lost", "turned"]
    now["shape"].resize_(5)
    now["flag"][1] = True
    assert copies.changed() == ["bit", "shape", "lost", "flag", "turned"]


def test_no_guards_are_where_an_adapter_or_a_sanitizer_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Guards(TENSORS, around=False)["plain"] is TENSORS["plain"]
    monkeypatch.setenv(UNPOISONED, "1")
    assert Guards(TENSORS)["plain"] is TENSORS["plain"]


def test_the_interpreter_knows_the_memory_between_guards_while_a_call_runs() -> None:
    guards = Guards(TENSORS)
    x = guards["plain"]
    storage = x.untyped_storage()
    with guards.known():
        assert memory.span_of(x) == (x.data_ptr(), x.data_ptr() + 48)
        assert memory.span_of(x[1:]) == (x.data_ptr(), x.data_ptr() + 48)
    assert memory.span_of(x) == (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    assert not memory.INNER


class WritesBehind(base.Chunkwise):
    """It writes one number behind its gates."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        answer = super().run(x)
        x.g.detach().as_strided((1,), (1,), int(x.g.storage_offset()) + x.g.numel()).zero_()
        return answer


class MayRead(reads.LoadsWholeTiles):
    """It documents that it reads a tile."""

    guards = False


def test_a_write_behind_an_input_is_a_finding() -> None:
    case = Case((5,))
    bench = AdapterBench(WritesBehind(), None, case)
    bench.run(*bench.call(case))
    assert [(finding.output, finding.kind) for finding in bench.impure] == [("memory around input g", FailureKind.INPUT_CHANGED)]


def test_an_implementation_that_says_so_may_read_beyond_its_inputs() -> None:
    case = Case((5,))
    for kind, finite in ((reads.LoadsWholeTiles, False), (MayRead, True), (base.Chunkwise, True)):
        bench = AdapterBench(kind(), None, case)
        assert bool(bench.run(*bench.call(case))["o"].isfinite().all()) == finite


KILLED_BY: dict[type, str] = {
    reads.LoadsWholeTiles: "oracle",
    reads.CotangentTile: "oracle",
    reads.ConvLoadsWholeBlocks: "oracle",
    reads.GatesBehindTheBatch: "oracle",
    reads.HiddenBehind: "oracle",
    reads.ShardBehind: "parallel",
    reads.PromptsBehind: "session",
}


@pytest.mark.parametrize("animal", KILLED_BY, ids=lambda animal: animal.__name__)
@pytest.mark.slow_after_first
def test_law_alone_kills_animal_which_is_right_without_guards(animal: type[Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    law, runs = KILLED_BY[animal], list[Run]()
    strategy = book_of(animal.domain).laws[law].draw(animal.domain)
    seeded(strategy, 0, 4, lambda example: runs.append(Run(law, f"zoo/{animal.__name__}", example)))
    broken = next(run for run in runs if execute(run).verdict is Verdict.BROKEN)
    right = right_of(animal)
    assert right is not None
    assert execute(dataclasses.replace(broken, adapter=f"zoo/{right.__name__}")).verdict is Verdict.HOLDS
    monkeypatch.setattr(module, "_between", lambda *_: None)
    assert execute(broken).verdict is Verdict.HOLDS


def test_every_animal_is_killed() -> None:
    found = {kind for kind in vars(reads).values() if isinstance(kind, type) and hasattr(kind, "letter")}
    assert set(KILLED_BY) == {kind for kind in found if kind.__module__ == reads.__name__}
