"""Adapters of Megatron-LM's GatedDeltaNet module as Megatron's training loop runs it. They adapt signatures and layout only.

What `megatron/layer` replaces is Megatron's own here, so the ranks have to be processes:

- The projections are `ColumnParallelLinear` and `RowParallelLinear`. The norm is torch's, marked as Megatron marks Transformer
  Engine's norm.
- The groups are those of `parallel_state`. Megatron numbers ranks by the whole world, so it is told that its world is the mesh.
- Gradients are those after `DistributedDataParallel` and `finalize_model_grads`, in float32. Their sum over CP is not divided by
  the number of ranks, as for a loss that is divided by the number of tokens at the end.
- Checkpoints are those of `sharded_state_dict`, saved and loaded by torch.distributed.checkpoint. Every process gets all files of a
  checkpoint, since ranks may be on several hosts without a file system in common.

On a CPU, `_without_gpu` replaces what Megatron asks a GPU for: streams, random numbers, and the storage of recomputed activations.
"""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
import types
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from oracles.layer import Layer
from oracles.operation import Inputs
from oracles.sharding import Mesh, Rank
from verify.adapters.megatron import (
    NAMES,
    PLACES,
    Group,
    MegatronDeterministic,
    MegatronLayer,
    OutNorm,
    found,
    imported,
    renamed,
    settings,
)
from verify.ranks.collectives import Comm, Place

# Where the names are that Megatron has for training.
TRAINING = {
    "ColumnParallelLinear": "megatron.core.tensor_parallel",
    "RowParallelLinear": "megatron.core.tensor_parallel",
    "DistributedDataParallel": "megatron.core.distributed",
    "DistributedDataParallelConfig": "megatron.core.distributed",
    "finalize_model_grads": "megatron.core.distributed",
    "apply_factories": "megatron.core.dist_checkpointing.mapping",
    "apply_factory_merges": "megatron.core.dist_checkpointing.mapping",
    "ShardedObject": "megatron.core.dist_checkpointing.mapping",
    "ShardedTensorFactory": "megatron.core.dist_checkpointing.mapping",
    "mcore_to_pyt_state_dict": "megatron.core.dist_checkpointing.strategies.torch",
    "_replace_state_dict_keys_with_sharded_keys": "megatron.core.dist_checkpointing.strategies.torch",
    "_replace_sharded_keys_with_state_dict_keys": "megatron.core.dist_checkpointing.strategies.torch",
    "_unwrap_pyt_sharded_tensor": "megatron.core.dist_checkpointing.strategies.torch",
}
ORDER = "cp-tp-ep-dp-pp"  # CP is the inner axis, as in `Mesh.ranks`
# The only activations of the module that Megatron can compute again, those between the rule and the output projection.
RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "selective",
    "recompute_modules": ["gdn_norm_out"],
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 1,
}
_MORE: dict[str, Any] = {"processes": True, "ranks": 4, "steps": True, "saves": True, "recomputes": True, "refills": False}


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Megatron's groups of a mesh, the group of all its ranks, and what `parallel_state` has in its variables then."""

    collection: Any
    everyone: Any
    state: dict[str, Any]


class MegatronTraining(MegatronLayer):
    """`GatedDeltaNet` with Megatron's own tensor parallelism, gradients and checkpoints, and flash-linear-attention's kernels."""

    domain = dataclasses.replace(MegatronLayer.domain, **_MORE)
    api = f"{PLACES[0]}:GatedDeltaNet"

    def __init__(self) -> None:
        super().__init__()
        self.training = types.SimpleNamespace(**{name: found(module, name) for name, module in TRAINING.items()})
        self.state = imported("megatron.core.parallel_state")
        self.random = imported("megatron.core.tensor_parallel.random")
        self.domain = dataclasses.replace(self.domain, recomputes=hasattr(self.megatron.GatedDeltaNet, "_gated_norm_and_a2a"))

    def parts(self) -> dict[str, type]:
        projections = self.training
        return {"in_proj": projections.ColumnParallelLinear, "out_norm": OutNorm, "out_proj": projections.RowParallelLinear}

    def join(self, mesh: Mesh) -> None:
        if not _GROUPS:
            _GROUPS[None] = self._alone()
        if mesh not in _GROUPS:
            _GROUPS[mesh] = self._of_mesh(mesh)
        vars(self.state).update(_GROUPS[mesh].state)

    def run(self, x: Inputs, place: Place) -> Tensor:
        with self._without_gpu(x.hidden.device):
            y: Tensor
            y, _ = self._module(x, place)(x.hidden, None, **self.more_arguments(x))
        return y

    def step(self, x: Inputs, dy: Tensor, place: Place) -> tuple[Tensor, dict[str, Tensor]]:
        m, module, groups = self.training, self._module(x, place), _groups(place).collection
        hidden = x.hidden.detach().requires_grad_()
        reduction = m.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        with self._without_gpu(x.hidden.device):
            model = m.DistributedDataParallel(module.config, reduction, module, pg_collection=groups)
            y: Tensor
            y, _ = model(hidden, None, **self.more_arguments(x))
            y.backward(dy)
            m.finalize_model_grads([model], pg_collection=groups)
        gradients = {name: vars(parameter)["main_grad"] for name, parameter in _parameters(module).items()}
        return y, {"hidden": hidden.grad, **_by_our_names(gradients)}

    def _module(self, x: Inputs, place: Place) -> nn.Module:
        more = RECOMPUTE if x.recompute else {}
        module = self.module(_groups(place).collection, **settings(x), **more, calculate_per_token_loss=True)
        _fill(module, renamed(x.parameters))
        return module

    def resharded(self, shards: dict[str, Tensor], layer: Layer, place: Place, mesh: Mesh) -> dict[Rank, dict[str, Tensor]]:
        everyone = _groups(place).everyone
        shape: dict[str, Any] = {"layer": layer, "conv_bias": "conv.bias" in shards}
        module = self.module(_groups(place).collection, **shape, device=shards["A_log"].device)
        _fill(module, renamed(shards))
        with tempfile.TemporaryDirectory() as folder:
            self._save(module, _groups(place).collection.dp_cp, folder, everyone)
            _share(folder, everyone)
            loaded = {}
            for rank in mesh.ranks():
                tp, cp = (Group(_Seat(getattr(rank, axis), getattr(mesh, axis))) for axis in ("tp", "cp"))
                empty = self.module(self.megatron.ProcessGroupCollection(tp=tp, cp=cp), **shape)
                loaded[rank] = self._load(empty, cp, folder)
        return loaded

    def _save(self, module: nn.Module, dp_cp: Any, folder: str, everyone: Any) -> None:
        m = self.training
        shards = module.sharded_state_dict(metadata={"dp_cp_group": dp_cp})  # type: ignore[operator]
        m.apply_factories(shards)
        keyed, _, _ = m._replace_state_dict_keys_with_sharded_keys(shards, True)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        writer = FileSystemWriter(folder)
        states = m.mcore_to_pyt_state_dict(keyed, False)
        save(states, storage_writer=writer, planner=planner, process_group=everyone, no_dist=everyone.size() == 1)

    def _load(self, module: nn.Module, dp_cp: Any, folder: str) -> dict[str, Tensor]:
        """The parameters of a module after loading, by their names in the layer."""
        m = self.training
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan)  # what nothing is loaded into must not look right
        every = module.sharded_state_dict(metadata={"dp_cp_group": dp_cp})  # type: ignore[operator]
        # A projection has an extra state, which is empty, and no tensor.
        shards = {name: x for name, x in every.items() if not isinstance(x, m.ShardedObject)}
        merges = {name: x for name, x in every.items() if isinstance(x, m.ShardedTensorFactory)}
        m.apply_factories(shards)
        keyed, flat, renames = m._replace_state_dict_keys_with_sharded_keys(shards)
        states = m.mcore_to_pyt_state_dict(keyed, True)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(states, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
        tensors = {name: m._unwrap_pyt_sharded_tensor(x) for name, x in states.items()}
        loaded = m._replace_sharded_keys_with_state_dict_keys(tensors, flat, renames)
        whole = m.apply_factory_merges(loaded, merges)
        return _by_our_names(whole)

    @contextlib.contextmanager
    def _without_gpu(self, device: torch.device) -> Iterator[None]:
        """On a CPU, replace what Megatron does with a GPU around the layer: streams, a GPU's random numbers, a storage.

        It asks for the current stream, in which it then has nothing to wait for. Its C++ function that shares a storage is compiled
        at the first call, which takes half a minute.
        """
        replaced = [(torch.cuda, "current_stream", lambda: None), (torch.cuda.random, "get_rng_state", _no_state)]
        if self.domain.recomputes:
            replaced.append((self.random, "_get_share_storage", lambda: _refill))
        with contextlib.ExitStack() as stack:
            for place, name, function in replaced if device.type == "cpu" else ():
                stack.enter_context(unittest.mock.patch.object(place, name, function))
            if self.domain.recomputes and not self.random.HAVE_TE:
                # Megatron takes fp8=False for fp8, which needs Transformer Engine, and None for no fp8.
                tensor_parallel = imported("megatron.core.tensor_parallel")
                plain = functools.partial(self.random.CheckpointWithoutOutput, fp8=None)
                stack.enter_context(unittest.mock.patch.object(tensor_parallel, "CheckpointWithoutOutput", plain))
            yield

    def _alone(self) -> _Groups:
        """One group of this process alone in place of every group."""
        mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        kind = self.megatron.ProcessGroupCollection
        return _Groups(kind(**{field.name: mine for field in dataclasses.fields(kind)}), mine, _variables(self.state))

    def _of_mesh(self, mesh: Mesh) -> _Groups:
        """The groups of `parallel_state` for a mesh that consists of the first ranks of the world."""
        size = mesh.tp * mesh.cp
        if size == 1:
            return _GROUPS[None]
        vars(self.state).update(_GROUPS[None].state)
        with unittest.mock.patch.object(dist, "get_world_size", lambda group=None: size if group is None else group.size()):
            self.state.initialize_model_parallel(
                mesh.tp, context_parallel_size=mesh.cp, order=ORDER, create_gloo_process_groups=False
            )
        everyone = dist.new_group(list(range(size)))
        inside = dist.get_rank() < size
        collection = self.megatron.ProcessGroupCollection.use_mpu_process_groups() if inside else None
        return _Groups(collection, everyone, _variables(self.state))


class MegatronTrainingDeterministic(MegatronTraining):
    """`MegatronTraining` with `deterministic_mode`, as `MegatronDeterministic`."""

    domain = dataclasses.replace(MegatronDeterministic.domain, **_MORE)
    _deterministic = True


class _Seat(Comm):
    """A rank's place on an axis, for a module that only holds parameters."""

    def _collective(self, kind: str, x: Tensor) -> Tensor:
        raise AssertionError(f"{kind} {tuple(x.shape)} where there are no other ranks")


# The groups of each mesh of this process; those of None are of this process alone. Torch has one world, and so has Megatron.
_GROUPS: dict[Mesh | None, _Groups] = {}


def _groups(place: Place) -> _Groups:
    mesh = place.rank.mesh
    return _GROUPS[mesh if mesh.tp * mesh.cp > 1 else None]


def _variables(state: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if name.isupper()}


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def _fill(module: nn.Module, parameters: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in _parameters(module).items():
            parameter.copy_(parameters[name])


def _by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's tensors by the names of the layer's parameters, in their shapes."""
    names = {theirs: ours for ours, theirs in NAMES.items()}
    return {names.get(name, name): x.squeeze(1) if name == "conv1d.weight" else x for name, x in tensors.items()}


def _no_state(**_: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _refill(output: Tensor, recomputed: Tensor) -> None:
    """Give an output that was discarded the numbers that were computed again."""
    numbers, storage = recomputed.untyped_storage(), output.untyped_storage()
    storage.resize_(numbers.nbytes())
    storage.copy_(numbers)


def _share(folder: str, everyone: Any) -> None:
    """Give every rank the files that the other ranks have written."""
    if everyone.size() == 1:
        return
    files: list[Any] = [None] * everyone.size()
    dist.all_gather_object(files, {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}, group=everyone)
    for written in files:
        for name, data in written.items():
            pathlib.Path(folder, name).write_bytes(data)
