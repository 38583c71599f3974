"""In processes of their own, the layer with FLA's kernels equals the oracle, and real ranks give what simulated ranks give."""

import importlib
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oracles.layer import Layer
from tests.alone import answered, answered_together
from tests.gdn_calls import CALLS, Answer, Call, answers, bits, on_rank, ratio
from tests.needs import need
from verify.adapters.gdn.layer import Choices
from verify.process.worker import NO_GPU
from verify.ranks.collectives import Alone, Distributed, Place

SMALL = {
    "packed": Call(Layer(4, 2, 4, 8, 8), lengths=(4, 0, 8), seed=5),
    "batched": Call(Layer(4, 2, 4, 8, 8), lengths=(8, 8), packed=False, seed=6),
    "padded": Call(Layer(4, 2, 4, 8, 8), lengths=(4, 0, 8), pads=3, index=torch.int32, seed=7),
    "empty": Call(Layer(4, 2, 4, 8, 8), lengths=(0, 0), seed=8),
}
FLA = [
    (Choices(conv="fla"), (1, False, 2), "batched"),
    (Choices(rule="fla"), (1, False, 1), "packed"),
    (Choices(conv="fla", rule="fla", qk_norm="combined", deterministic=False), (2, True, 1), "batched"),
    (Choices(conv="fla", rule="fla", qk_norm="in_kernel", thd_all_to_all="per_sequence"), (1, False, 2), "padded"),
    (Choices(conv="fla", rule="fla"), (1, False, 2), "empty"),
]


@pytest.mark.slow
def test_fla_s_kernels_equal_the_oracle() -> None:
    need("fla")
    found = answered("tests.ranks.test_gdn_layer_processes")["found"]
    assert len(found) == len(FLA)
    for (choices, mesh, name), (over, where, ran) in zip(FLA, found, strict=True):
        assert over < 1.0, (choices, mesh, name, where)
        ranks = mesh[0] * mesh[2] if name != "empty" else 0
        assert ran == [ranks * (choices.conv == "fla"), ranks * (choices.rule == "fla")], "a fallback is not the kernel"


def counted(module: str, name: str) -> list[str]:
    """The calls of a function from now on, one entry each."""
    home, calls = importlib.import_module(module), []
    plain = getattr(home, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return plain(*arguments, **options)

    setattr(home, name, wrapped)
    return calls


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What a rank of a real process group does, or what FLA's kernels give in Triton's interpreter."""
    return serve(**question) if question else {"found": fla()}


def fla() -> list[tuple[float, str, list[int]]]:
    from verify.adapters.fla import core

    core()
    kernels = [counted("fla.modules.causal_conv1d", "causal_conv1d"), counted("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")]
    found = []
    for choices, (tp, sp, cp), name in FLA:
        before = [len(calls) for calls in kernels]
        worst_ratio = ratio(SMALL[name], choices, tp, cp, sp=sp)
        found.append((*worst_ratio, [len(calls) - count for calls, count in zip(kernels, before, strict=True)]))
    return found


# Real processes


def two_ranks(place_of: Callable[[str], Place]) -> Iterator[tuple[str, Answer]]:
    """The layer on two ranks, cut over either axis."""
    for axis, sp in (("tp", True), ("tp", False), ("cp", False)):
        yield f"{axis} {sp}", on_rank(CALLS["padded"], place_of(axis), Choices(), sp=sp)


@pytest.mark.slow
def test_real_processes_give_what_simulated_ranks_give(tmp_path: pathlib.Path) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    ranks = [{"rank": rank, "size": 2, "directory": str(tmp_path)} for rank in range(2)]
    answered_together("tests.ranks.test_gdn_layer_processes", ranks, environment={**NO_GPU, "GLOO_SOCKET_IFNAME": loopback})
    compared = 0
    for axis, sp in (("tp", True), ("tp", False), ("cp", False)):
        want = answers(CALLS["padded"], Choices(), *((2, 1) if axis == "tp" else (1, 2)), sp=sp)
        for rank, answer in enumerate(want):
            for name, tensor in tensors(answer).items():
                got = torch.load(tmp_path / f"{rank}.pt")[f"{axis} {sp}"][name]
                assert torch.equal(bits(got), bits(tensor)), (axis, sp, name)
                compared += 1
    assert compared == 3 * 2 * (2 + 6 + 6)


def tensors(answer: Answer) -> dict[str, Tensor]:
    summed = {f"sum {name}": shard.value for name, shard in answer.parameters.items()}
    return {"y": answer.y, "hidden": answer.hidden, **answer.gradients, **summed}


def serve(rank: int, size: int, directory: str) -> dict[str, Any]:
    folder = pathlib.Path(directory)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)

    def place(axis: str) -> Place:
        return Place(Distributed(), Alone()) if axis == "tp" else Place(Alone(), Distributed())

    torch.save({name: tensors(answer) for name, answer in two_ranks(place)}, folder / f"{rank}.pt")
    dist.destroy_process_group()
    return {}
