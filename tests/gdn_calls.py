"""Calls of the Gated DeltaNet layer on simulated ranks, what each rank returns, and how far that is from the oracle."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracles import parallel, sharding
from oracles.layer import GDN_LAYER, Layer
from oracles.operation import Inputs
from oracles.sharding import Shard
from oracles.tolerance import bound
from tests.judging import worst
from verify.adapters.gdn import layer as layers
from verify.adapters.gdn import weights as layer_weights
from verify.adapters.gdn.layer import Choices, GatedDeltaNet
from verify.ranks import collectives
from verify.ranks.collectives import Place, simulate

NAMES = {
    "in_proj.weight": "in_proj",
    "conv.weight": "conv",
    "conv.bias": "conv_bias",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm",
    "out_proj.weight": "out_proj",
}
SINGLE = ("A_log", "dt_bias")


LAYER = Layer(hidden=6, heads=4, value_heads=8, key_dim=5, value_dim=3)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the whole layer. `lengths` are the tokens of each sequence, pads included; of SBHD (not packed), of each sample.

    States last about exp(`remembers`) tokens; where q, k and v are `small`, the norms' eps matter.
    """

    layer: Layer = LAYER
    lengths: tuple[int, ...] = (16, 0, 8, 24)
    packed: bool = True
    pads: int = 0
    index: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float32
    bias: bool = True
    eps: float = 1e-6
    allow_neg_eigval: bool = False
    remembers: float = 0.0
    small: float = 1.0
    seed: int = 0

    def tensor(self, number: int, *shape: int) -> Tensor:
        """Uniform in (-1, 1), in float64."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1

    def weights(self) -> dict[str, Tensor]:
        known = sharding.parameters(self.layer)
        fan = {"in_proj.weight": self.layer.hidden, "out_proj.weight": self.layer.sections["v"]}
        every = {name: self.tensor(number, *known[name].shape) * (3 / fan.get(name, 1)) ** 0.5 for number, name in enumerate(known)}
        every["A_log"] -= self.remembers
        every["in_proj.weight"] *= self.small
        every["conv.bias"] *= self.small
        parameters = {name: tensor for name, tensor in every.items() if self.bias or name != "conv.bias"}
        return {name: tensor.to(torch.float32 if name in SINGLE else self.dtype) for name, tensor in parameters.items()}

    @property
    def tokens(self) -> tuple[int, int]:
        """Along the sequence axis, and samples."""
        return (sum(self.lengths), 1) if self.packed else (self.lengths[0], len(self.lengths))

    def hidden(self) -> Tensor:
        return self.tensor(20, *self.tokens, self.layer.hidden).to(self.dtype)

    def cotangent(self) -> Tensor:
        return self.tensor(21, *self.tokens, self.layer.hidden).to(self.dtype)

    def offsets(self, *, pads: bool = True) -> Tensor | None:
        """cu_seqlens with or without the pad tokens; a sequence has up to `pads` of them."""
        if not self.packed:
            return None
        real = [length - (0 if pads else min(self.pads, length)) for length in self.lengths]
        return torch.tensor([0, *itertools.accumulate(real)], dtype=self.index)

    def inputs(self) -> Inputs:
        weights = {NAMES[name]: weight for name, weight in self.weights().items()}
        return Inputs(
            layer=self.layer,
            hidden=self.hidden().transpose(0, 1),
            **{"conv_bias": None, **weights},
            state=None,
            conv_state=None,
            cu_seqlens=self.offsets(),
            eps=self.eps,
            allow_neg_eigval=self.allow_neg_eigval,
        )

    def layout(self, cp: int) -> parallel.Layout:
        """The tokens of each CP rank."""
        lengths = self.lengths if self.packed else self.lengths[:1]
        return parallel.zigzag(lengths, cp) if cp > 1 else (torch.arange(sum(lengths)),)


@functools.lru_cache(maxsize=64)
def limits(call: Call) -> dict[str, bound.Bound]:
    """The truth and the bound of y and every gradient."""
    y = call.cotangent().transpose(0, 1)
    every = bound.bounds(GDN_LAYER, call.inputs(), {"y": y}, "chunkwise")
    return {name: limit for name, limit in every.items() if name not in ("final_state", "conv_state")}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one rank found."""

    rank: sharding.Rank
    y: Tensor
    hidden: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Shard]
    traffic: dict[str, collectives.Traffic]


def cut(module: GatedDeltaNet, whole: dict[str, Tensor]) -> dict[str, Shard]:
    """This rank's shards by the rows that the module says it holds."""
    rank, found = module.place.rank, {}
    for name, about in module.metadata.items():
        rows = about.rows(rank.tp, rank.mesh.tp)
        found[name] = Shard(name, about.shape, about.axis, rank, rows, whole[name].index_select(about.axis, rows))
    return found


def on_rank(call: Call, place: Place, choices: Choices, *, sp: bool) -> Answer:
    """One rank's part of the call, forward and backward."""
    module = layers.GatedDeltaNet(
        call.layer,
        place,
        choices,
        sequence_parallel=sp,
        dtype=call.dtype,
        conv_bias=call.bias,
        eps=call.eps,
        allow_neg_eigval=call.allow_neg_eigval,
    )
    module.load(cut(module, call.weights()))
    layout = call.layout(place.cp.size)
    take = functools.partial(sharding.shard_hidden, layout=layout, rank=place.rank, sequence_parallel=sp)
    hidden = take(call.hidden()).value.requires_grad_()
    y = module(hidden, call.offsets(pads=False), call.offsets() if call.pads else None)
    y.backward(take(call.cotangent()).value)
    local_gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    traffic = {axis: copy.deepcopy(getattr(place, axis).traffic) for axis in ("tp", "cp")}  # without the sums of the gradients
    summed = layer_weights.as_shards(module.summed_gradients(), module.metadata, place.rank)
    assert hidden.grad is not None
    return Answer(place.rank, y.detach(), hidden.grad, local_gradients, summed, traffic)


def answers(call: Call, choices: Choices = Choices(), tp: int = 1, cp: int = 1, *, sp: bool = False) -> list[Answer]:  # noqa: B008
    results = []
    for result in simulate(tp, cp, lambda place: on_rank(call, place, choices, sp=sp)):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def joined(call: Call, ranks: list[Answer], *, sp: bool) -> dict[str, Tensor]:
    """y and every gradient of the whole layer, as the operation has them; replicas must be equal bit for bit."""
    layout, shape = call.layout(ranks[0].rank.mesh.cp), (*call.tokens, call.layer.hidden)

    def tokens(take: Callable[[Answer], Tensor]) -> Tensor:
        shards = []
        for answer in ranks:
            rows = sharding.tokens(layout, answer.rank, sequence_parallel=sp)
            shards.append(Shard("hidden", shape, 0, answer.rank, rows, take(answer)))
        return sharding.assemble(shards).transpose(0, 1)

    found = {"y": tokens(lambda answer: answer.y), "dhidden": tokens(lambda answer: answer.hidden)}
    for name in ranks[0].parameters:
        found[f"d{NAMES[name]}"] = sharding.assemble([answer.parameters[name] for answer in ranks])
    return found


def ratio(call: Call, choices: Choices = Choices(), tp: int = 1, cp: int = 1, *, sp: bool = False) -> tuple[float, str]:  # noqa: B008
    """The worst error over what it may be, and of what."""
    return worst(GDN_LAYER, limits(call), joined(call, answers(call, choices, tp, cp, sp=sp), sp=sp))


CALLS = {
    "packed": Call(),
    "padded": Call(
        Layer(6, 4, 8, 5, 3, conv_width=6),
        lengths=(8, 0, 24, 16),
        pads=3,
        index=torch.int32,
        bias=False,
        eps=1e-3,
        allow_neg_eigval=True,
        seed=1,
    ),
    "batched": Call(lengths=(24, 24, 24), packed=False, allow_neg_eigval=True, small=1e-3, seed=2),
    "long": Call(Layer(5, 4, 4, 3, 7, conv_width=2), lengths=(0, 8, 144), index=torch.int32, remembers=6.0, seed=3),
}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def make(call: Call, place: Place, choices: Choices = Choices(), **changes: Any) -> GatedDeltaNet:  # noqa: B008
    arguments = {"sequence_parallel": False, "dtype": call.dtype, "conv_bias": call.bias, **changes}
    return GatedDeltaNet(call.layer, place, choices, **arguments)
