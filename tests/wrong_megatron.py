"""Wrong layers of Megatron-LM for tests/ranks/test_path_adapters.py: each has one mistake around Megatron's kernels."""

import sys
import unittest.mock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oracles.operation import Inputs
from verify.adapters import megatron, megatron_training
from verify.adapters.megatron_training import MegatronTraining, MegatronTrainingDeterministic
from verify.ranks.collectives import Place


class _OtherCheckpoint(MegatronTrainingDeterministic):
    """Puts something else into the sharded state dict."""

    def module(self, *arguments: Any, **named: Any) -> nn.Module:
        module = super().module(*arguments, **named)
        right: Any = module.sharded_state_dict

        def wrong(**named: Any) -> dict[str, Any]:
            shards: dict[str, Any] = right(**named)
            return {**shards, **self.other(module, shards["out_norm.weight"], named["metadata"]["dp_cp_group"].rank())}

        vars(module)["sharded_state_dict"] = wrong
        return module

    def other(self, module: Any, like: Any, replica: int) -> dict[str, Any]:
        """Some entries of the sharded state dict, made as the ShardedTensor `like`."""
        raise NotImplementedError


class SliceAsTheWhole(_OtherCheckpoint):
    """The checkpoint has the A_log of one rank as if it were all of it."""

    def other(self, module: Any, like: Any, replica: int) -> dict[str, Any]:
        copies = (0, module.tp_group.rank(), replica)
        return {"A_log": type(like).from_rank_offsets("A_log", module.A_log, replica_id=copies)}


class CutEvenly(_OtherCheckpoint):
    """The checkpoint has the rows of in_proj as if every rank had one slice of them all, not one of each section."""

    def other(self, module: Any, like: Any, replica: int) -> dict[str, Any]:
        name, place = "in_proj.weight", (0, module.tp_group.rank(), module.tp_group.size())
        shard = type(like).from_rank_offsets(name, module.in_proj.weight, place, replica_id=(0, 0, replica))
        return {name: shard}


class _Unmarked(megatron.OutNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        vars(self.weight)["sequence_parallel"] = False


class NormNotAdded(MegatronTrainingDeterministic):
    """With SP, the gradients of the norm are not added over TP."""

    def parts(self) -> dict[str, type]:
        return {**super().parts(), "out_norm": _Unmarked}


class AddedTwice(MegatronTrainingDeterministic):
    """The gradient of A_log is added over CP a second time."""

    def __init__(self) -> None:
        super().__init__()
        right = self.training.finalize_model_grads

        def wrong(model: list[Any], *, pg_collection: Any) -> None:
            right(model, pg_collection=pg_collection)
            dist.all_reduce(model[0].module.A_log.main_grad, group=pg_collection.dp_cp)

        self.training.finalize_model_grads = wrong


class NotRecomputed(MegatronTrainingDeterministic):
    """On several TP ranks, what backward computes again does not reach the output projection, which reads zeros."""

    def step(self, x: Inputs, dy: Tensor, place: Place) -> tuple[Tensor, dict[str, Tensor]]:
        if place.tp.size == 1:
            return super().step(x, dy, place)
        with unittest.mock.patch.object(megatron_training, "_refill", _zeros):
            return super().step(x, dy, place)


def _zeros(output: Tensor, recomputed: Tensor) -> None:
    output.untyped_storage().resize_(recomputed.untyped_storage().nbytes())
    output.data.zero_()


class _OtherFunction(MegatronTraining):
    """Replaces a function that the module calls, in every call of this adapter."""

    replaced = ""

    def other(self, right: Any, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def step(self, x: Inputs, dy: Tensor, place: Place) -> tuple[Tensor, dict[str, Tensor]]:
        of = sys.modules[self.megatron.GatedDeltaNet.__module__]
        right = getattr(of, self.replaced)
        self.cp = place.cp.size
        with unittest.mock.patch.object(of, self.replaced, lambda *arguments, **named: self.other(right, *arguments, **named)):
            return super().step(x, dy, place)


class OffsetsDivided(_OtherFunction):
    """The rule gets the offsets of packed sequences divided by cp, although each rank has all tokens then."""

    replaced = "chunk_gated_delta_rule"

    def other(self, right: Any, *arguments: Any, **named: Any) -> Any:
        return right(*arguments, **{**named, "cu_seqlens": named["cu_seqlens"] // self.cp})


class UndoneInTheWrongOrder(_OtherFunction):
    """The all-to-all is undone by the order in which it was done, in place of the inverse."""

    replaced = "_build_thd_cp_a2a_perm"

    def other(self, right: Any, *arguments: Any, **named: Any) -> Any:
        order: tuple[torch.Tensor, torch.Tensor] = right(*arguments, **named)
        return order[0], order[0]
