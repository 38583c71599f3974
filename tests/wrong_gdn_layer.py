"""Wrong Gated DeltaNet layers: the wrong step, where it is planted, and the mesh and call that see it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verify.adapters.gdn import exchange, functions
from verify.adapters.gdn import layer as layers
from verify.adapters.gdn import weights as layer_weights
from verify.adapters.gdn.layer import GatedDeltaNet
from verify.ranks import collectives

# Wrong layers


def unordered(lengths: list[int], cp: int) -> tuple[Tensor, Tensor]:
    """The tokens of rank 0, then of rank 1, ...: zigzag is not undone."""
    order = torch.arange(sum(lengths))
    return order, order


def over_the_batch(lengths: list[int], cp: int) -> tuple[Tensor, Tensor]:
    """The stream is one sequence."""
    return RIGHT_TOKENS([sum(lengths)], cp)


def even(sections: tuple[int, ...], cp: int) -> tuple[Tensor, Tensor]:
    """Features are cut evenly over the whole, across sections."""
    order = torch.arange(sum(sections))
    return order, order


RIGHT_TOKENS = exchange.token_map


def evenly(about: layer_weights.Metadata, rank: int, tp: int) -> Tensor:
    """Sections are not distinguished: each TP rank has an equal part of the whole."""
    return torch.arange(about.shape[about.axis]).view(tp, -1)[rank] if about.cut else torch.arange(about.shape[about.axis])


def wrong_slice(name: str) -> Callable[[GatedDeltaNet, str], Tensor]:
    """A parameter's slice of the next CP rank."""

    def in_use(module: GatedDeltaNet, wanted: str) -> Tensor:
        whole, comm = module.get_parameter(wanted), module.place.cp
        return whole.chunk(comm.size)[(comm.rank + 1) % comm.size] if wanted == name else RIGHT_SLICE(module, wanted)

    return in_use


def unsectioned(module: GatedDeltaNet, name: str) -> Tensor:
    """The convolution's slice is cut evenly over q, k and v."""
    return module.get_parameter(name).chunk(module.place.cp.size)[module.place.cp.rank]


def leaking_conv(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int]) -> Tensor:
    """The last inputs of a sequence are the first of the next."""
    return RIGHT_CONV(x, weight, bias, [sum(lengths)])


def leaking_rule(*arguments: Any, **options: Any) -> Tensor:
    """The state of a sequence goes on into the next."""
    *tensors, lengths = arguments
    return RIGHT_RULE(*tensors, [sum(lengths)], **options)


def tiled_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int], **options: Any) -> Tensor:
    """Value head h reads key head h % H."""
    order = torch.arange(v.shape[2]).view(-1, k.shape[2]).T.flatten()
    o = RIGHT_RULE(q, k, v[:, :, order], g[:, :, order], beta[:, :, order], lengths, **options)
    return o[:, :, order.argsort()]


def unpadded(module: GatedDeltaNet, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:
    """Pad tokens become a sequence with what follows: the kernel takes other offsets than the exchange."""
    shorter = [length - min(3, length) for length in lengths]
    return RIGHT_MIX(module, x, cu_seqlens, [*shorter, sum(lengths) - sum(shorter)])


def summed_over(axes: tuple[str, ...]) -> Callable[..., dict[str, layer_weights.Metadata]]:
    """Every gradient is added over the same axes."""

    def metadata(*arguments: Any, **options: Any) -> dict[str, layer_weights.Metadata]:
        right = RIGHT_METADATA(*arguments, **options)
        return {name: dataclasses.replace(entry, gradient_sum=axes) for name, entry in right.items()}

    return metadata


def alone(place: collectives.Comm, x: Tensor) -> Tensor:
    """The identity, in both directions."""
    return x


def first_block(place: collectives.Comm, x: Tensor) -> Tensor:
    """Cut along tokens, and not added."""
    return x.chunk(place.size)[place.rank]


RIGHT_SLICE, RIGHT_MIX = GatedDeltaNet.in_use, GatedDeltaNet.mix
RIGHT_CONV, RIGHT_RULE, RIGHT_METADATA = functions.causal_conv1d, functions.gated_delta_rule, layer_weights.metadata
# Where it is planted, under which name, what, and the mesh and call that see it.
WRONG: dict[str, tuple[object, str, Callable[..., object], tuple[int, bool, int], str]] = {
    "zigzag not undone": (exchange, "token_map", unordered, (1, False, 2), "packed"),
    "zigzag of the whole stream": (exchange, "token_map", over_the_batch, (1, False, 2), "packed"),
    "features cut evenly over CP ranks": (exchange, "feature_map", even, (1, False, 2), "packed"),
    "sections cut evenly over TP ranks": (layer_weights.Metadata, "rows", evenly, (2, False, 1), "packed"),
    "no all-reduce in backward": (layers, "copy_to", alone, (2, False, 1), "packed"),
    "no all-reduce in forward": (layers, "reduce_from", alone, (2, False, 1), "packed"),
    "no sum under sequence parallelism": (layers, "scatter_to", first_block, (2, True, 1), "packed"),
    "A_log of another rank": (GatedDeltaNet, "in_use", wrong_slice("A_log"), (1, False, 2), "packed"),
    "dt_bias of another rank": (GatedDeltaNet, "in_use", wrong_slice("dt_bias"), (1, False, 2), "packed"),
    "conv cut evenly over q, k and v": (GatedDeltaNet, "in_use", unsectioned, (1, False, 2), "packed"),
    "conv leaks over sequences": (functions, "causal_conv1d", leaking_conv, (1, False, 1), "packed"),
    "conv leaks over samples": (functions, "causal_conv1d", leaking_conv, (1, False, 1), "batched"),
    "state leaks over sequences": (functions, "gated_delta_rule", leaking_rule, (1, False, 1), "packed"),
    "value heads tiled": (functions, "gated_delta_rule", tiled_rule, (1, False, 1), "packed"),
    "pads begin a sequence": (GatedDeltaNet, "mix", unpadded, (1, False, 2), "padded"),
    "norm's gradient not added over tp": (layer_weights, "metadata", summed_over(("cp",)), (2, False, 1), "packed"),
    "gradients not added over cp": (layer_weights, "metadata", summed_over(()), (1, False, 2), "packed"),
    "gradients added over tp": (layer_weights, "metadata", summed_over(("tp", "cp")), (2, False, 1), "packed"),
}

TELLS_REPLICAS_APART = {
    "no all-reduce in backward",
    "no all-reduce in forward",
    "norm's gradient not added over tp",
    "gradients not added over cp",
}
