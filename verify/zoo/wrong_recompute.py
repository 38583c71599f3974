"""Wrong rules, convolutions and layers that are right in a plain call: they assume how their forward and backward are called.

tests/laws/test_recompute.py names the variant of the law `recompute` that detects each of them, and no other does.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from properties.rules.domain import Domain
from verify.zoo.base import Chunkwise, Layered
from verify.zoo.modules import Conv

Answer = tuple[Tensor, Tensor | None]
Gradients = list[Tensor | None]


class Recomputes(Chunkwise):
    """The right rule as one function of autograd, which saves its inputs and runs the rule again in the backward."""

    later_calls = True  # published suites call in the plain way alone

    def run(self, x: Inputs) -> Answer:
        tensors = {name: t for name, t in x.items() if isinstance(t, Tensor) and t.is_floating_point()}
        answer: Answer = self.function().apply(self, x, tuple(tensors), *tensors.values())
        return answer

    def function(self) -> type[torch.autograd.Function]:
        return _Once

    def rule(self, x: Inputs) -> Answer:
        return super().run(x)

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        """What the forward keeps for the backward."""
        ctx.save_for_backward(*tensors)

    def kept(self, ctx: Any) -> list[Tensor]:
        """The inputs in the backward."""
        return list(ctx.saved_tensors)

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        leaves = [t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            outputs = self.rule(x.replaced(**dict(zip(names, leaves, strict=True))))
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None and c is not None]
        return list(torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True))


class _Rule(torch.autograd.Function):
    """The rule of a `Recomputes`; the gradients come without a graph, and nothing says so."""

    @staticmethod
    def forward(ctx: Any, rule: Recomputes, x: Inputs, names: tuple[str, ...], *tensors: Tensor) -> Answer:
        ctx.rule, ctx.names = rule, names
        ctx.x = x.replaced(**dict.fromkeys(names))
        rule.keep(ctx, tensors)
        return rule.rule(x.replaced(**dict(zip(names, tensors, strict=True))))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        return None, None, None, *ctx.rule.back(ctx.x, ctx.names, ctx.rule.kept(ctx), cotangents)


class _Once(_Rule):
    """The same, which refuses second derivatives."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        return _Rule.backward(ctx, *cotangents)


class SlotsByTurns(Recomputes, letter="F"):
    """Keys are saved in one of two scales, and the graph notes which came last. A checkpoint saves them again in the other one."""

    forwards: ClassVar[int] = 0

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        kind = type(self)
        kind.forwards += 1
        ctx.turn = kind.forwards % 2
        place = ctx.names.index("k")
        ctx.save_for_backward(*(t * 2 if i == place and kind.forwards % 2 else t for i, t in enumerate(tensors)))

    def kept(self, ctx: Any) -> list[Tensor]:
        place = ctx.names.index("k")
        return [t / 2 if i == place and ctx.turn else t for i, t in enumerate(ctx.saved_tensors)]


class GradientsIntoLeaves(Recomputes, letter="F"):
    """The backward runs `backward` on the inputs themselves, so a leaf gets its gradient there and again from autograd."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        ctx.leaves, ctx.versions = tensors, self.versions(tensors)

    def kept(self, ctx: Any) -> list[Tensor]:
        if self.versions(ctx.leaves) != ctx.versions:
            raise RuntimeError("an input was changed between forward and backward")
        return list(ctx.leaves)

    def versions(self, tensors: tuple[Tensor, ...]) -> list[int]:
        return [0 if t.is_inference() else t._version for t in tensors]

    def back(self, x: Inputs, names: tuple[str, ...], tensors: list[Tensor], cotangents: tuple[Tensor | None, ...]) -> Gradients:
        leaves = [t if t.requires_grad and t.is_leaf else t.detach().requires_grad_() for t in tensors]
        for leaf in leaves:
            leaf.grad = None
        with torch.enable_grad():
            outputs = self.rule(x.replaced(**dict(zip(names, leaves, strict=True))))
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None and c is not None]
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
        return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


class GatesByAddress(Recomputes, letter="K"):
    """The backward looks its gates up by the address of the saved ones, and takes zeros where it finds none."""

    gates: ClassVar[dict[tuple[int, torch.Size], Tensor]] = {}

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        g = tensors[ctx.names.index("g")]
        self.gates[g.data_ptr(), g.shape] = g.detach().clone()
        super().keep(ctx, tensors)

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors, place = super().kept(ctx), ctx.names.index("g")
        g = tensors[place]
        tensors[place] = self.gates.get((g.data_ptr(), g.shape), torch.zeros_like(g))
        return tensors


class FreesInBackward(Recomputes, letter="F"):
    """Values are kept in the graph outside save_for_backward, and the backward overwrites them to save memory."""

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        ctx.values = tensors[ctx.names.index("v")].detach().clone()

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors = super().kept(ctx)
        tensors[ctx.names.index("v")] = ctx.values.clone()
        ctx.values.zero_()
        return tensors


class OneBufferForGates(Recomputes, letter="K"):
    """Gates are kept in one buffer for each shape, which the next call's forward overwrites before this call's backward."""

    domain = Domain(threads=False)
    buffers: ClassVar[dict[tuple[torch.Size, torch.dtype], Tensor]] = {}

    def keep(self, ctx: Any, tensors: tuple[Tensor, ...]) -> None:
        super().keep(ctx, tensors)
        g = tensors[ctx.names.index("g")].detach()
        ctx.buffer = self.buffers.setdefault((g.shape, g.dtype), torch.empty_like(g)).copy_(g)

    def kept(self, ctx: Any) -> list[Tensor]:
        tensors = super().kept(ctx)
        tensors[ctx.names.index("g")] = ctx.buffer
        return tensors


class GradientsWithoutGraph(Recomputes, letter="F"):
    """The backward is not marked once_differentiable, so second derivatives lack the part through the rule (FLA 0.6.0)."""

    def function(self) -> type[torch.autograd.Function]:
        return _Rule


class MapsTheFirst(Recomputes, letter="F"):
    """A rule for torch.func.vmap takes the initial states of the first call for all calls."""

    def function(self) -> type[torch.autograd.Function]:
        return _Mapped


class _Mapped(torch.autograd.Function):
    """The rule with a `vmap` of its own, as a loop over the calls."""

    @staticmethod
    def forward(rule: Recomputes, x: Inputs, names: tuple[str, ...], *tensors: Tensor) -> Answer:
        return rule.rule(x.replaced(**dict(zip(names, tensors, strict=True))))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        rule, x, ctx.names, *tensors = inputs
        ctx.rule, ctx.x = rule, x.replaced(**dict.fromkeys(ctx.names))
        rule.keep(ctx, tuple(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        return None, None, None, *ctx.rule.back(ctx.x, ctx.names, ctx.rule.kept(ctx), cotangents)

    @staticmethod
    def vmap(info: Any, dims: Any, rule: Recomputes, x: Inputs, names: tuple[str, ...], *tensors: Tensor) -> Any:
        moved = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims[3:], strict=True)]
        calls = [
            {
                name: t if dim is None else t[0 if name == "state" else call]
                for name, t, dim in zip(names, moved, dims[3:], strict=True)
            }
            for call in range(info.batch_size)
        ]
        answers = [rule.rule(x.replaced(**tensors)) for tensors in calls]
        o, state = (torch.stack(parts) for parts in zip(*answers, strict=True))
        return (o, state), (0, 0)


class ConvOneFunction(Conv):
    """The right convolution as one function of autograd, which runs it again in the backward."""

    def run(self, x: Inputs) -> Any:
        tensors = {name: t for name, t in x.items() if isinstance(t, Tensor) and t.is_floating_point()}
        return _Convolution.apply(self, x, tuple(tensors), *tensors.values())

    def whole(self, x: Inputs) -> Any:
        return super().run(x)

    def needed(self, gradients: Gradients, needs: tuple[bool, ...]) -> Gradients:
        """The gradients in the order of the inputs, None for those that need none."""
        return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


class FrozenQueriesTakeTheGate(Chunkwise, letter="F"):
    """The gate's gradient is computed from that of the queries, which is absent if queries require no gradient."""

    frozen = False

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        self.frozen = x.g.requires_grad and not x.q.requires_grad
        return super().run(x)

    def decays(self, total: Tensor) -> Tensor:
        return super().decays(total.detach() if self.frozen else total)


class ConvAllGradients(ConvOneFunction, letter="F"):
    """The gradients that are needed are returned one after another, as if all of them were."""

    def needed(self, gradients: Gradients, needs: tuple[bool, ...]) -> Gradients:
        some = [gradient for gradient, need in zip(gradients, needs, strict=True) if need]
        return [*some, *[None] * (len(needs) - len(some))]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, conv: ConvOneFunction, x: Inputs, names: tuple[str, ...], *tensors: Tensor) -> Any:
        ctx.conv, ctx.names, ctx.x = conv, names, x.replaced(**dict.fromkeys(names))
        ctx.save_for_backward(*tensors)
        return conv.whole(x.replaced(**dict(zip(names, tensors, strict=True))))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.conv.whole(ctx.x.replaced(**dict(zip(ctx.names, leaves, strict=True))))
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None and c is not None]
        gradients = torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
        return None, None, None, *ctx.conv.needed(list(gradients), ctx.needs_input_grad[3:])


class LayerOfRecomputes(Layered):
    """The right layer, whose rule is one function of autograd."""

    def rule(self, x: Inputs) -> Answer:
        return Recomputes().run(x)


class LayerOfOneBuffer(LayerOfRecomputes, letter="K"):
    """The gates of its rule are kept in one buffer for each shape, so a second layer before the backward replaces them."""

    domain = LayerDomain(threads=False)

    def rule(self, x: Inputs) -> Answer:
        return OneBufferForGates().run(x)
