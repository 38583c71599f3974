"""Right implementations whose L2 norm of q and k has another eps or form than most, and wrong ones in these conventions."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.operation import Inputs
from oracles.rule.gated_delta import repeat_heads
from properties.layers.domain import LayerDomain
from properties.paths.domain import PathDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from properties.traces.domain import TraceDomain
from tests.right import Recurrent
from verify.adapters.gdn import functions
from verify.adapters.gdn.adapter import GdnLayer
from verify.adapters.gdn.layer import GatedDeltaNet
from verify.ranks.collectives import Place
from verify.zoo.base import Chunkwise, KdaLayered, Layered, Serving
from verify.zoo.wrong_traces import Serves


def inside(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def least(x: Tensor, eps: float) -> Tensor:
    """Rows divided by their norm, or by eps if that is larger."""
    rows: Tensor = torch.nn.functional.normalize(x, dim=-1, eps=eps)
    return rows


class Normed(Chunkwise):
    """Base of rules in chunks: `norm` gets rows in float32."""

    def norm(self, x: Tensor) -> Tensor:
        return inside(x, 1e-6)

    def normalise(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).to(x.dtype)


class TinyEps(Normed):
    """eps is 1e-12, inside the root (ONNX Runtime)."""

    domain = Domain(qk_norm_eps=("1e-12",))

    def norm(self, x: Tensor) -> Tensor:
        return inside(x, 1e-12)


class LargeEps(Recurrent):
    """Token by token; eps is 1e-5, inside the root (vLLM on CPUs)."""

    domain = Domain(qk_norm_eps=("1e-5",))

    def norm(self, x: Tensor) -> Tensor:
        return inside(x, 1e-5)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if not x.qk_norm:
            return super().run(x)
        return super().run(x.replaced(q=self.norm(x.q.float()), k=self.norm(x.k.float()), qk_norm=False))


class LeastNorm(LargeEps):
    """Token by token; the norm is at least 1e-6 (executorch)."""

    domain = Domain(qk_norm_forms=("max",))

    def norm(self, x: Tensor) -> Tensor:
        return least(x, 1e-6)


class LeastNormOfTorch(Normed):
    """The norm is at least 1e-12, as by default in torch.nn.functional.normalize."""

    domain = Domain(qk_norm_eps=("1e-12",), qk_norm_forms=("max",))

    def norm(self, x: Tensor) -> Tensor:
        return least(x, 1e-12)


class LeastNormLarge(Normed):
    """The norm is at least 1e-5, which a kernel compares with the root of the sum; it repeats heads before."""

    domain = Domain(qk_norm_eps=("1e-5",), qk_norm_forms=("max",))

    def norm(self, x: Tensor) -> Tensor:
        squares = x.square().sum(-1, keepdim=True)
        return x * squares.clamp(min=1e-10).rsqrt()

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        q, k = (repeat_heads(t, x.v.shape[2], axis=2) for t in (x.q, x.k))
        return super().keys(x.replaced(q=q, k=k))


class AsTold(Normed):
    """It has both forms and takes eps from the call (OpenVINO takes eps)."""

    domain = Domain(qk_norm_eps=("1e-6", "1e-12", "1e-5"), qk_norm_forms=("inside", "max"))

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        form = {"inside": inside, "max": least}[x.qk_norm_form]
        q, k = (form(t.float(), x.qk_norm_eps).to(t.dtype) if x.qk_norm else t for t in (x.q, x.k))
        return super().keys(x.replaced(q=q, k=k, qk_norm=False))


class Usual(Normed):
    """eps is 1e-6, inside the root (flash-linear-attention)."""

    domain = Domain()


class AddsEps(LeastNorm):
    """Wrong: eps is added to the norm."""

    def norm(self, x: Tensor) -> Tensor:
        return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-6)


class AcrossShortRows(LeastNorm):
    """Wrong: the gradient of a row shorter than eps is across it, as that of a longer row."""

    def norm(self, x: Tensor) -> Tensor:
        return _AcrossShortRows.apply(x, 1e-6)  # type: ignore[no-any-return]


class _AcrossShortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=eps).reciprocal()
        ctx.save_for_backward(x * rstd, rstd)
        return x * rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, None]:
        y, rstd = ctx.saved_tensors  # type: ignore[attr-defined]
        (dy,) = cotangents
        return rstd * (dy - y * (y * dy).sum(-1, keepdim=True)), None


class EpsTimesWidth(TinyEps):
    """Wrong: eps is added to the mean of squares."""

    def norm(self, x: Tensor) -> Tensor:
        return inside(x, 1e-12 * x.shape[-1])


class ForgetsForm(AsTold):
    """Wrong: eps is inside the root in both forms."""

    def keys(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().keys(x.replaced(qk_norm_form="inside"))


class LargeEpsPool(Serving):
    """Requests in a pool; eps is 1e-5, inside the root (vLLM on CPUs)."""

    domain = PoolDomain(rule=Domain(qk_norm_eps=("1e-5",), backward=False))

    def norm(self, x: Tensor) -> Tensor:
        return inside(x, 1e-5)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        if not x.qk_norm:
            return super().run(x)
        return super().run(x.replaced(q=self.norm(x.q.float()), k=self.norm(x.k.float()), qk_norm=False))


class AsToldPool(LargeEpsPool):
    """The same with both forms, and eps from the call."""

    domain = PoolDomain(rule=dataclasses.replace(AsTold.domain, backward=False))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        form = {"inside": inside, "max": least}[x.qk_norm_form]
        q, k = (form(t.float(), x.qk_norm_eps) if x.qk_norm else t for t in (x.q, x.k))
        return super().run(x.replaced(q=q, k=k, qk_norm=False))


RIGHT = (Usual, TinyEps, LargeEps, LeastNorm, LeastNormOfTorch, LeastNormLarge)


def told(x: Tensor, eps: float, form: str) -> Tensor:
    """Rows in the norm of a call, in their own dtype."""
    return {"inside": inside, "max": least}[form](x.float(), eps).to(x.dtype)


class AsToldLayer(Layered):
    """A GDN layer with both forms, and eps from the call."""

    domain = LayerDomain(qk_norm_eps=("1e-6", "1e-12", "1e-5"), qk_norm_forms=("inside", "max"))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        self.norm = x.qk_norm_eps, x.qk_norm_form
        return super().run(x)

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        q, k = (told(t, *self.norm) for t in (x.q, x.k))
        return super().rule(x.replaced(q=q, k=k, qk_norm=False))


class TinyEpsLayer(AsToldLayer):
    """Its eps is 1e-12 in every call."""

    domain = LayerDomain(qk_norm_eps=("1e-12",))

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        self.norm = 1e-12, "inside"
        return super().rule(x)


class AsToldKdaLayer(KdaLayered):
    """A KDA layer with both forms, and eps from the call."""

    domain = LayerDomain("kda_layer", qk_norm_eps=("1e-6", "1e-12", "1e-5"), qk_norm_forms=("inside", "max"))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        self.norm = x.qk_norm_eps, x.qk_norm_form
        return super().run(x)

    def unit(self, y: Tensor) -> Tensor:
        return told(y, *self.norm)


class _ToldModule(GatedDeltaNet):
    """A rank's layer whose rule normalises q and k in the norm that the class has."""

    told: tuple[float, str]

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, lengths: list[int]
    ) -> Tensor:
        q, k = (told(t.float(), *self.told) for t in (q, k))
        return functions.gated_delta_rule(q, k, v, g, beta, lengths, qk_norm=False, deterministic=self.choices.deterministic)


class AsToldPath(GdnLayer):
    """A GDN layer that ranks share, with both forms, and eps from the call."""

    domain = PathDomain(
        choices=(("conv", ("torch",)), ("qk_norm", ("in_kernel",)), ("rule", ("torch",))),
        qk_norm_eps=("1e-6", "1e-12", "1e-5"),
        qk_norm_forms=("inside", "max"),
    )

    def run(self, x: Inputs, place: Place) -> Tensor:
        self.module = type("Told", (_ToldModule,), {"told": (x.qk_norm_eps, x.qk_norm_form)})
        return super().run(x, place)


class AsToldEngine(Serves):
    """A serving engine with both forms, and eps from the sizes."""

    domain = TraceDomain(qk_norm_eps=("1e-6", "1e-12", "1e-5"), qk_norm_forms=("inside", "max"))

    def normed(self, x: Tensor) -> Tensor:
        rows = told(x, self.sizes.qk_norm_eps, self.sizes.qk_norm_form)
        return rows.repeat_interleave(self.sizes.value_heads // self.sizes.heads, -2)


class ForgetsFormOfLayer(AsToldLayer):
    """Wrong: eps is inside the root in both forms."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        self.norm = self.norm[0], "inside"
        return super().rule(x)


class ForgetsEpsOfLayer(AsToldLayer):
    """Wrong: eps is always 1e-6."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        self.norm = 1e-6, self.norm[1]
        return super().rule(x)


class ForgetsFormOfKdaLayer(AsToldKdaLayer):
    """Wrong: eps is inside the root in both forms."""

    def unit(self, y: Tensor) -> Tensor:
        return told(y, self.norm[0], "inside")


class ForgetsEpsOfPath(AsToldPath):
    """Wrong: eps is always 1e-6."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        return super().run(x.replaced(qk_norm_eps=1e-6), place)


class ForgetsFormOfEngine(AsToldEngine):
    """Wrong: eps is inside the root in both forms."""

    def normed(self, x: Tensor) -> Tensor:
        rows = told(x, self.sizes.qk_norm_eps, "inside")
        return rows.repeat_interleave(self.sizes.value_heads // self.sizes.heads, -2)


def always(kind: type[Any], eps: float, form: str) -> type[Any]:
    """A class whose calls have this norm, whatever they are told."""
    if issubclass(kind, AsToldEngine):

        def normed(self: Any, x: Tensor) -> Tensor:
            return told(x, eps, form).repeat_interleave(self.sizes.value_heads // self.sizes.heads, -2)

        return type("Always", (kind,), {"normed": normed})

    def run(self: Any, x: Inputs, *place: Any) -> Any:
        return kind.run(self, x.replaced(qk_norm_eps=eps, qk_norm_form=form), *place)

    return type("Always", (kind,), {"run": run})


class LeastNormEngine(AsToldEngine):
    """A serving engine whose norm is at least 1e-6 in every call."""

    domain = TraceDomain(qk_norm_forms=("max",))

    def normed(self, x: Tensor) -> Tensor:
        return told(x, 1e-6, "max").repeat_interleave(self.sizes.value_heads // self.sizes.heads, -2)


class AddsEpsLayer(AsToldLayer):
    """Wrong: eps is added to the norm."""

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        q, k = ((t.float() / (t.float().norm(dim=-1, keepdim=True) + 1e-6)).to(t.dtype) for t in (x.q, x.k))
        return Layered.rule(self, x.replaced(q=q, k=k, qk_norm=False))
