"""Claims about the whole layer on one GPU: all changes of Megatron-LM 3040 together, and FLOPs by formula over measured time."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from oracles.flops import forward_flops, training_flops
from oracles.layer import Layer
from oracles.operation import Inputs
from properties.layers.case import LayerCase
from verify.adapters.gdn.layer import Choices, GatedDeltaNet
from verify.claims.contest import Contest, Form, Tensors, agreement, ready, size_of
from verify.claims.kernel_claims import combined_norm, compared, fla_conv, rule, separate_norms, transposed_conv
from verify.claims.setting import Setting
from verify.claims.table import Row, number
from verify.claims.timing import Call, Spread, measured
from verify.ranks.collectives import Alone, Place

NAMES = {
    "in_proj.weight": "in_proj",
    "conv.weight": "conv",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm",
    "out_proj.weight": "out_proj",
}


class Before(GatedDeltaNet):
    """The layer before 3040: with a transposed convolution and separate norms of q and k.

    It is the layer of verify/adapters/gdn around flash-linear-attention's rule.
    """

    def convolve(self, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:  # noqa: ARG002
        return transposed_conv(x, self.in_use("conv.weight"), None)

    def rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None,  # noqa: ARG002 - one signature
        lengths: list[int],  # noqa: ARG002
    ) -> Tensor:
        return self.normed_rule(q, k, v, g, beta)

    def normed_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The output o of the rule, from q and k as they leave the convolution."""
        return rule(*separate_norms(q, k), v, g, beta, norm=False)


class Refined(Before):
    """The layer after 3040: without a transpose, and with one norm for q and k together."""

    def convolve(self, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:  # noqa: ARG002
        return fla_conv(x, self.in_use("conv.weight"), None)

    def normed_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """See Before."""
        return rule(*combined_norm(q, k), v, g, beta, norm=False)


class InKernel(Refined):
    """The layer after 3040 with the norm in the kernel, that is, with every change that concerns one GPU."""

    def normed_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """See Before."""
        return rule(q, k, v, g, beta, norm=True)


def layer_form(kind: type[GatedDeltaNet]) -> Form:
    """The whole layer as a form that returns y [1, T, hidden]."""

    @functools.cache
    def module(layer: Layer, dtype: torch.dtype, device: torch.device, eps: float) -> GatedDeltaNet:
        # "in_kernel" leaves the norms to `rule`, which the classes above override.
        choices = Choices("fla", "in_kernel", "fused", "fla", deterministic=False)
        place = Place(Alone(), Alone())
        return kind(layer, place, choices, sequence_parallel=False, dtype=dtype, conv_bias=False, eps=eps, device=device)

    def form(x: Inputs) -> Tensors:
        parameters = {name: x[ours] for name, ours in NAMES.items()}
        arguments = (x.hidden.transpose(0, 1),)
        y: Tensor = torch.func.functional_call(module(x.layer, x.hidden.dtype, x.hidden.device, x.eps), parameters, arguments)
        return (y.transpose(0, 1),)

    return form


def layer_contest(setting: Setting, kinds: Mapping[str, type[GatedDeltaNet]]) -> Contest:
    """A contest of whole layers, from hidden states to hidden states."""
    widths = dataclasses.asdict(setting.sizes.layer)

    def case(tokens: int) -> LayerCase:
        return LayerCase((tokens,), dtype=setting.sizes.dtype, **widths)

    forms = {name: layer_form(kind) for name, kind in kinds.items()}
    return Contest(forms, case(setting.sizes.tokens), case(setting.sizes.judged), "chunkwise", chunk=64)


def refined(setting: Setting) -> Iterator[Row]:
    """The rows of the layer before and after all changes of 3040."""
    contest = layer_contest(setting, {"before": Before, "after": Refined})
    claimed = ("1.20: 1.79 to 1.49 ms", "1.08: 3.24 to 3.01 ms")
    yield from compared(setting, 1, "the layer, convolution and norm changed", contest, claimed)


def flops(setting: Setting) -> Iterator[Row]:
    """The rows of the layer with every change, in TFLOP/s: FLOPs by formula divided by the measured time."""
    contest, sizes, clock = layer_contest(setting, {"the layer": InKernel}), setting.sizes, setting.clock
    x, form = ready(contest, contest.timed, setting.device), contest.forms["the layer"]
    leaves = [*x.given.values()]
    calls: dict[str, Call] = {
        "forward": lambda: form(x.inputs),
        "forward and backward": lambda: torch.autograd.grad(form(x.inputs), leaves, x.cotangents),
    }
    with torch.enable_grad():
        first = {name: clock.first(call) for name, call in calls.items()}
        took = measured(calls, clock, setting.effort)
    agreed = agreement(contest, setting.device)
    for name, count in (("forward", forward_flops), ("forward and backward", training_flops)):
        total = count(sizes.layer, sizes.tokens).total
        yield Row(
            6,
            f"the layer with every change, {name}",
            size_of(contest.timed),
            "TFLOP/s",
            after=rate(total, took[name]),
            claimed=f"{number(total / 1e12)} TFLOP by formula",
            answers=agreed.about("the layer"),
            broken=bool(agreed.broken("the layer")),
            first_s=(first[name],),
            case=str(contest.timed),
            note=f"{number(Spread.of(took[name]).median)} ms",
        )


def rate(flops: int, ms: Sequence[float]) -> Spread:
    """The TFLOP/s of `flops` floating-point operations in each of the times `ms`, which are in milliseconds."""
    return Spread.of([flops / duration / 1e9 for duration in ms])
