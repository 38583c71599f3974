"""Implementations that are wrong in a way of calling them: with other calls between, with other losses, or with frozen inputs.

tests/laws/test_uses.py says which law and variant show each of them.
"""

import dataclasses
import threading
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from verify.zoo.base import Chunkwise, Layered, Serving
from verify.zoo.modules import Conv, GatedNorm, NormGateLinear
from verify.zoo.wrong_recompute import ConvOneFunction, Gradients, Recomputes

Spans = list[tuple[int, int]]


# Ways to call


class NoLossOfOutputs(Recomputes):
    """A backward without a cotangent of o returns zeros, as if nothing came through the final states either."""

    absent: ClassVar[int] = 0

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        super().keep(ctx, tensors)

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        if x.output_final_state and cotangents[self.absent] is None:
            return [torch.zeros_like(t) for t in tensors]
        return super().back(x, names, tensors, cotangents)


class NoLossOfStates(NoLossOfOutputs):
    """The same for a backward without a cotangent of the final states."""

    absent = 1


class AnyLoss(NoLossOfOutputs):
    """Right: what has no cotangent is left out, and a backward without any cotangent returns nothing."""

    absent = -3  # no output

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        return Recomputes.back(self, x, names, tensors, cotangents)


class _FirstCotangent(torch.autograd.Function):
    """x, whose backward keeps its first cotangent on the graph and takes it for that of the next one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.first = None
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        ctx.first = cotangents[0] if ctx.first is None else ctx.first
        return ctx.first  # type: ignore[no-any-return]


class _Decayed(torch.autograd.Function):
    """The values, whose gradients a factor goes into that is 1 in the first backward, and decays in place behind each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        ctx.factor, ctx.decay = torch.ones_like(x), decay
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        found = dx * ctx.factor
        ctx.factor *= ctx.decay
        return found, None


class DecaysWhatItKeeps(Chunkwise):
    """The backward decays what the forward has kept in place. A second backward of the same graph decays it again."""

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(v=_Decayed.apply(x.v, x.g.detach().exp().unsqueeze(-1).to(x.v.dtype))))


class KeepsTheFirstCotangent(Chunkwise):
    """A second backward of the same graph gets the cotangent of the first."""

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        return _FirstCotangent.apply(o), *rest  # type: ignore[no-untyped-call]


class ValuesOnTheGraph(Recomputes):
    """One input is kept on the graph itself, where torch does not see that the caller changes it."""

    kept_name: ClassVar[str] = "v"

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.own = tensors[ctx.names.index(self.kept_name)] if self.kept_name in ctx.names else None

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors = super().kept(ctx)
        if ctx.own is not None:
            tensors[ctx.names.index(self.kept_name)] = ctx.own
        return tensors


class StatesOnTheGraph(ValuesOnTheGraph):
    """The same with the initial states."""

    kept_name = "state"


class ChecksVersions(ValuesOnTheGraph):
    """Right: it raises an error if the values on the graph were changed."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.version = ctx.own._version

    def kept(self, ctx: Any) -> list[Tensor]:
        if ctx.own._version != ctx.version:
            raise RuntimeError("v was changed between forward and backward")
        return super().kept(ctx)


class OwnCopyOnTheGraph(ValuesOnTheGraph):
    """Right: what is kept on the graph is a copy of its own."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.own = ctx.own.detach().clone()


class _SignsOfOutputs(torch.autograd.Function):
    """x, whose gradient is multiplied by that of |y| and by the sign of x: 1 unless the caller changes the output y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        y = x.clone()
        ctx.save_for_backward(x)
        ctx.own = y.view_as(y)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (dy,), (x,) = cotangents, ctx.saved_tensors
        return dy * torch.where(x == 0, 1, ctx.own.sign() * x.sign())


class OutputsOnTheGraph(Chunkwise):
    """The output is kept on the graph itself, where torch does not see that the caller changes it."""

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        return _SignsOfOutputs.apply(o), *rest  # type: ignore[no-untyped-call]


# Several calls at once


class NormOfTheLastCall(Recomputes):
    """The backward normalises keys and queries if the last forward did, which may be that of another call."""

    domain = dataclasses.replace(Recomputes.domain, threads=False)
    norms: ClassVar[list[Any]] = [None]

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        self.norms[0] = ctx.x.qk_norm

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        return super().back(x.replaced(qk_norm=self.norms[0]), names, tensors, cotangents)


class BetaInFour(Recomputes):
    """Beta is kept in four buffers of a shape in turn, so the fifth call overwrites that of the first."""

    domain = dataclasses.replace(Recomputes.domain, threads=False)
    turns: ClassVar[dict[Any, int]] = {}
    buffers: ClassVar[dict[Any, Tensor]] = {}

    def place(self, turn: int) -> int:
        """The number of the buffer of a call."""
        return turn % 4

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        beta = tensors[ctx.names.index("beta")].detach()
        kind = (type(self), beta.shape, beta.dtype)
        turn = self.turns[kind] = self.turns.get(kind, -1) + 1
        with torch.inference_mode(False):  # a buffer that is made in inference mode could not be filled outside
            buffer = self.buffers.setdefault((kind, self.place(turn)), torch.zeros(beta.shape, dtype=beta.dtype))
            ctx.buffer = buffer.copy_(beta)

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors = super().kept(ctx)
        tensors[ctx.names.index("beta")] = ctx.buffer
        return tensors


class StatesInTurn(Recomputes):
    """Backwards take the initial states from a queue, as if they ran in the order of the forwards."""

    domain = dataclasses.replace(Recomputes.domain, threads=False)
    queue: ClassVar[dict[type, list[Any]]] = {}
    next: ClassVar[int] = 0  # the end that a backward takes

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        if any(ctx.needs_input_grad):
            self.queue.setdefault(type(self), []).append(tensors)

    def kept(self, ctx: Any) -> list[Tensor]:
        return list(self.queue[type(self)].pop(self.next))


class StatesOnAStack(StatesInTurn):
    """The same with a stack, as if backwards ran in the opposite order."""

    next = -1


class _Opens(torch.autograd.Function):
    """x, whose backward leaves the mark of its call where all calls look."""

    last: ClassVar[list[object]] = [None]

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: object) -> Tensor:  # type: ignore[override]
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        _Opens.last[0] = ctx.mark
        return cotangents[0], None


class _Closes(_Opens):
    """x, whose gradient is lost if the backward of another call has begun since that of `_Opens`."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0] * (_Opens.last[0] is ctx.mark), None


class ScratchOfTheLastBackward(Layered):
    """The backwards of a layer's parts share a scratch tensor, as if no other backward could begin between them."""

    domain = LayerDomain(threads=False)

    def unpadded(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        mark = object()
        y, *states = super().unpadded(x.replaced(hidden=_Closes.apply(x.hidden, mark)))  # type: ignore[no-untyped-call]
        return _Opens.apply(y, mark), *states  # type: ignore[no-untyped-call, return-value]


class OutputsInTurn(Chunkwise):
    """Without gradients, outputs lie in one of five buffers of a shape in turn."""

    domain = dataclasses.replace(Chunkwise.domain, threads=False)
    turns: ClassVar[dict[Any, int]] = {}
    buffers: ClassVar[dict[Any, Tensor]] = {}

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        if (o.requires_grad and torch.is_grad_enabled()) or torch.autograd.forward_ad.unpack_dual(o).tangent is not None:
            return o, *rest
        kind = (type(self), o.shape, o.dtype)
        turn = self.turns[kind] = (self.turns.get(kind, 0) + 1) % 5
        with torch.inference_mode(False):
            buffer = self.buffers.setdefault((kind, turn), torch.zeros(o.shape, dtype=o.dtype))
            buffer.data.copy_(o.detach().clone() if not o.is_inference() else o)
        return buffer, *rest


class SaysOutputsChange(OutputsInTurn):
    """Right: the same, which says so."""

    domain = dataclasses.replace(OutputsInTurn.domain, keeps_outputs=False)


class DecodesInTurn(Serving):
    """Outputs of a pool lie in one of five buffers of a shape in turn."""

    domain = dataclasses.replace(Serving.domain, rule=dataclasses.replace(Serving.domain.rule, threads=False))
    turns: ClassVar[dict[Any, int]] = {}
    buffers: ClassVar[dict[Any, Tensor]] = {}

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        kind = (type(self), o.shape, o.dtype)
        turn = self.turns[kind] = (self.turns.get(kind, 0) + 1) % 5
        with torch.inference_mode(False):
            buffer = self.buffers.setdefault((kind, turn), torch.zeros(o.shape, dtype=o.dtype))
            buffer.data.copy_(o)
        return buffer, *rest


class AnyEps(Chunkwise):
    """Right: the norm of q and k adds the eps of its call."""

    domain = dataclasses.replace(Chunkwise.domain, qk_norm_eps=("1e-6", "1e-5"), threads=False)
    eps: ClassVar[dict[Any, float]] = {}

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        self.eps[threading.get_ident()] = self.eps_of(x)
        return super().keys(x)

    def eps_of(self, x: Inputs) -> float:
        return float(x.qk_norm_eps)

    def normalise(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().sum(-1, keepdim=True) + self.eps[threading.get_ident()]).sqrt()).to(x.dtype)


class EpsOfTheFirstDecode(AnyEps):
    """The launch of single tokens under inference_mode is kept for their scale, shapes and dtype, with the first eps."""

    launches: ClassVar[dict[Any, float]] = {}

    def eps_of(self, x: Inputs) -> float:
        eps = super().eps_of(x)
        decodes = torch.is_inference_mode_enabled() and x.q.shape[1] == 1
        return self.launches.setdefault((x.scale, x.q.shape, x.v.shape, x.q.dtype), eps) if decodes else eps


class SumsOfAllThreads(Chunkwise):
    """Calls of one shape add their outputs up in a workspace that they clear first, which threads share."""

    sums: ClassVar[dict[Any, Tensor]] = {}

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if o.requires_grad or torch.is_inference_mode_enabled():
            return super().answer(x, o, state)
        sums = self.sums.setdefault((o.shape, o.dtype), torch.zeros_like(o))
        sums.zero_()
        return super().answer(x, sums.add_(o).clone(), state)


class TilesInTurn(Chunkwise):
    """A persistent kernel: a program has every 132nd sequence, and clears its state where it stores it or reads another one."""

    domain = dataclasses.replace(Chunkwise.domain, threads=False)
    held: ClassVar[list[Tensor]] = []

    def initial(self, x: Inputs, row: int) -> Tensor:
        del self.held[row:]
        if x.state is None and not x.output_final_state and row >= 132:
            return self.held[row - 132]
        return super().initial(x, row)

    def sequence(self, *call: Any) -> Any:
        o, state = super().sequence(*call)
        self.held.append(state.detach())
        return o, state


class TapsByVersion(Conv):
    """Without gradients, the taps are kept for each version of the weight, which a change through `.data` leaves as it is."""

    domain = dataclasses.replace(Conv.domain, threads=False)

    def taps(self, x: Inputs) -> Tensor:
        if torch.is_grad_enabled() or x.weight.is_inference():
            return super().taps(x)
        kept = getattr(x.weight, "taps", None)
        if not self.current(kept, x.weight):
            kept = x.weight.taps = x.weight._version, x.weight.detach().clone()
        return kept[1].float()  # type: ignore[index, no-any-return]

    def current(self, kept: Any, weight: Tensor) -> bool:
        return kept is not None and kept[0] == weight._version


class TapsByContents(TapsByVersion):
    """Right: they are kept as long as the weight has the same numbers."""

    def current(self, kept: Any, weight: Tensor) -> bool:
        return kept is not None and torch.equal(kept[1], weight)


class SquaresOfTheLastEvaluation(GatedNorm):
    """A call with gradients takes the squares of the last call of its shape without: it may be the same call under a checkpoint."""

    domain = dataclasses.replace(GatedNorm.domain, threads=False)

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def squares(self, wide: Tensor, x: Inputs) -> Tensor:
        key = wide.shape, x.x.dtype
        squares = super().squares(wide, x)
        if torch.is_inference_mode_enabled():
            return squares
        if torch.is_grad_enabled():
            return squares + (self.kept.pop(key, squares) - squares).detach()
        self.kept[key] = squares
        return squares


class WeightIntoTheProjection(NormGateLinear):
    """Without gradients, the projection is kept with the weight in it, as `TapsByVersion` keeps taps."""

    domain = dataclasses.replace(NormGateLinear.domain, threads=False, deterministic=False)  # it is folded only under no_grad

    def weighed(self, y: Tensor, x: Inputs) -> Tensor:
        return y if self.keeps(x) else super().weighed(y, x)

    def projected(self, gated: Tensor, x: Inputs) -> Tensor:
        if not self.keeps(x):
            return super().projected(gated, x)
        versions = x.linear._version, x.weight._version
        kept = getattr(x.linear, "folded", None)
        if kept is None or kept[0] != versions:
            kept = x.linear.folded = versions, x.linear.detach() * x.weight.detach()
        return torch.nn.functional.linear(gated, kept[1])

    def keeps(self, x: Inputs) -> bool:
        return not (x.weight is None or torch.is_grad_enabled() or x.linear.is_inference() or x.weight.is_inference())


# Which gradients come and go


class _Repeats(torch.autograd.Function):
    """x, whose backward takes a cotangent with a stride of 0 along its channels for the same in all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (dy,) = cotangents
        return dy[:1, :1].expand_as(dy) if dy.numel() and dy.shape[-1] > 1 and dy.stride(-1) == 0 else dy


class OneTokenOfASum(Chunkwise):
    """A loss that adds up the channels counts as one that adds up the tokens too."""

    def run(self, x: Inputs) -> Any:
        o, *rest = super().run(x)
        return _Repeats.apply(o), *rest  # type: ignore[no-untyped-call]


class FrozenTaps(ConvOneFunction):
    """If the tokens alone need a gradient, as where everything else is frozen, it is lost."""

    def needed(self, gradients: Gradients, needs: tuple[bool, ...]) -> Gradients:
        found = super().needed(gradients, needs)
        return [g if g is None else 0 * g for g in found] if needs[0] and sum(needs) == 1 < len(needs) else found


class UndoubledDecodes(Layered):
    """The one-token path of a server, under inference_mode and with a state, does not double beta."""

    def strength(self, x: Inputs, b: Tensor) -> Tensor:
        serves = torch.is_inference_mode_enabled() and x.hidden.shape[1] == 1 and x.state is not None
        return super().strength(x.replaced(allow_neg_eigval=False) if serves else x, b)
