"""Right implementations in conventions of other runtimes, each of which one word of a domain describes, and wrong ones beside."""

from typing import Any

import torch
from torch import Tensor

from oracles.gates import softplus
from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from tests.right import Recurrent
from verify.zoo.base import Layered, Serving
from verify.zoo.modules import Conv, Gate


def tensors(x: Inputs) -> dict[str, Tensor]:
    """The tensors of a call that are numbers, by name."""
    return {name: value for name, value in x.items() if isinstance(value, Tensor) and value.is_floating_point()}


# No tokens


class RefusesNothing(Recurrent):
    """It refuses a call without any token, and takes empty sequences beside others (ONNX Runtime)."""

    domain = Domain(nothing=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if not x.v.shape[0] * x.v.shape[1]:
            raise ValueError("a call needs a token")
        return super().run(x)


class LosesEmptyStates(RefusesNothing):
    """Wrong: the state of an empty sequence becomes zero."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        if state is None or x.cu_seqlens is None:
            return o, state
        return o, state * (x.cu_seqlens.diff() > 0).reshape(-1, 1, 1, 1)


class ConvRefusesNothing(Conv):
    """A convolution that refuses a call without any token."""

    domain = ModuleDomain(nothing=False)

    def run(self, x: Inputs) -> Any:
        if not x.x.shape[0] * x.x.shape[1]:
            raise ValueError("a call needs a token")
        return super().run(x)


# Strides


class NeighboursLast(Recurrent):
    """It refuses a tensor whose last axis is not contiguous (vLLM on CPUs)."""

    domain = Domain(views=("sliced", "offset"))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        for name, value in tensors(x).items():
            if value.shape[-1] > 1 and value.numel() and value.stride(-1) != 1:
                raise ValueError(f"the last axis of {name} must be contiguous")
        return super().run(x)


class IgnoresStrides(NeighboursLast):
    """Wrong: it reads values as if they were dense."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        dense = x.v.as_strided(x.v.shape, torch.empty(x.v.shape).stride())
        return super().run(x.replaced(v=dense))


class OnlyTransposed(Recurrent):
    """It takes no other strides than those of a tensor whose last two axes are swapped in memory, and dense tensors."""

    domain = Domain(views=("transposed",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        for name, value in tensors(x).items():
            swapped = value.ndim > 1 and value.numel() and value.shape[-1] > 1 and value.stride(-2) in (1, value.shape[-1])
            if not (value.is_contiguous() and value.data_ptr() % 16 == 0) and not swapped:
                raise ValueError(f"{name} has other strides")
        return super().run(x)


# Parameters of two dtypes


class MixedParameters(Recurrent):
    """Its gate has A_log in float32 and dt_bias in the dtype of q (vLLM on CPUs)."""

    domain = Domain(in_kernel=("gate", "both"), parameter_dtypes=("mixed",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.A_log.dtype != torch.float32 or (x.dt_bias is not None and x.dt_bias.dtype != x.q.dtype):
            raise ValueError(f"A_log is {x.A_log.dtype} and dt_bias {None if x.dt_bias is None else x.dt_bias.dtype}")
        raw = x.a.float() if x.dt_bias is None else x.a.float() + x.dt_bias.float()
        beta = x.beta
        if x.get("b") is not None:
            beta = (x.b.float().sigmoid() * (2 if x.allow_neg_eigval else 1)).to(x.q.dtype)
        speed = self.speed(x).reshape(-1, *[1] * (raw.ndim - 3))
        return super().run(x.replaced(g=-speed * softplus(raw), beta=beta))

    def speed(self, x: Inputs) -> Tensor:
        speed: Tensor = x.A_log.exp()
        return speed


class RoundsALog(MixedParameters):
    """Wrong: it rounds A_log to the dtype of q."""

    def speed(self, x: Inputs) -> Tensor:
        return x.A_log.to(x.q.dtype).float().exp()


class RoundsTheGradient(MixedParameters):
    """Wrong: it rounds the gradient of A_log to the dtype of q."""

    def speed(self, x: Inputs) -> Tensor:
        return _Rounded.apply(x.A_log, x.q.dtype).exp()  # type: ignore[no-any-return]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        ctx.dtype = dtype  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, None]:
        return cotangents[0].to(ctx.dtype).float(), None  # type: ignore[attr-defined]


class MixedLayer(Layered):
    """A layer whose A_log is in float32 and whose dt_bias has the dtype of the hidden states."""

    domain = LayerDomain(parameter_dtypes=("mixed",))

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        if x.A_log.dtype != torch.float32 or x.dt_bias.dtype != x.hidden.dtype:
            raise ValueError(f"A_log is {x.A_log.dtype} and dt_bias {x.dt_bias.dtype}")
        return super().decay(x.replaced(dt_bias=x.dt_bias.float()), a)


class ReadsFloats(MixedLayer):
    """Wrong: it reads the memory of dt_bias as float32, which is the dtype of A_log."""

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        if x.dt_bias.element_size() == 4:
            return super().decay(x, a)
        read = torch.cat([x.dt_bias, torch.zeros_like(x.dt_bias)]).detach().view(torch.float32)
        return super().decay(x.replaced(dt_bias=x.dt_bias + (read.to(x.dt_bias.dtype) - x.dt_bias).detach()), a)


class MixedGate(Gate):
    """A gate alone with such parameters."""

    domain = ModuleDomain("gdn_gate", parameter_dtypes=("mixed",))

    def run(self, x: Inputs) -> Any:
        if x.A_log.dtype != torch.float32 or (x.dt_bias is not None and x.dt_bias.dtype != x.a.dtype):
            raise ValueError(f"A_log is {x.A_log.dtype}")
        return super().run(x.replaced(dt_bias=None if x.dt_bias is None else x.dt_bias.float()))


class RoundsALogOfGate(MixedGate):
    """Wrong: it rounds A_log to the dtype of a."""

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(A_log=x.A_log.to(x.a.dtype).float()))


class MixedPool(Serving):
    """Decoding with a gate in the kernel that has such parameters."""

    domain = PoolDomain(rule=Domain(in_kernel=("both",), parameter_dtypes=("mixed",), backward=False))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        if x.A_log.dtype != torch.float32 or (x.dt_bias is not None and x.dt_bias.dtype != x.q.dtype):
            raise ValueError(f"A_log is {x.A_log.dtype}")
        raw = x.a.float() if x.dt_bias is None else x.a.float() + x.dt_bias.float()
        beta = (x.b.float().sigmoid() * (2 if x.allow_neg_eigval else 1)).to(x.q.dtype)
        return super().run(x.replaced(g=-self.speed(x).reshape(-1, *[1] * (raw.ndim - 3)) * softplus(raw), beta=beta))

    def speed(self, x: Inputs) -> Tensor:
        speed: Tensor = x.A_log.exp()
        return speed


class RoundsALogOfPool(MixedPool):
    """Wrong: it rounds A_log to the dtype of q."""

    def speed(self, x: Inputs) -> Tensor:
        return x.A_log.to(x.q.dtype).float().exp()


# Beta over 1


class DoublesGiven(Recurrent):
    """A given beta may be up to 2, and the kernel's own beta is a sigmoid (ONNX Runtime)."""

    domain = Domain(in_kernel=("none", "beta"), negative_eigenvalues=("given",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.get("b") is None:
            return super().run(x)
        if x.allow_neg_eigval:
            raise ValueError("the kernel cannot double its sigmoid")
        return super().run(x.replaced(beta=x.b.float().sigmoid().to(x.q.dtype)))


class ClampsBeta(DoublesGiven):
    """Wrong: a given beta is at most 1."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x if x.beta is None else x.replaced(beta=x.beta.clamp(max=1)))


class DoublesGivenPool(Serving):
    """The same on a pool."""

    domain = PoolDomain(rule=Domain(in_kernel=("none", "beta"), negative_eigenvalues=("given",), backward=False))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        if x.get("b") is None:
            return super().run(x)
        if x.allow_neg_eigval:
            raise ValueError("the kernel cannot double its sigmoid")
        return super().run(x.replaced(beta=x.b.float().sigmoid().to(x.q.dtype)))


# One token


class OneToken(Recurrent):
    """It decodes: no sequence has two tokens."""

    domain = Domain(longest=1)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        lengths = [x.v.shape[1]] if x.cu_seqlens is None else x.cu_seqlens.diff().tolist()
        if max(lengths) > 1:
            raise ValueError(f"a sequence has {max(lengths)} tokens")
        return super().run(x)


class DecaysAfterwards(OneToken):
    """Wrong: the state decays after it was written."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x.replaced(g=torch.zeros_like(x.g)))
        if state is None or x.cu_seqlens is not None or not x.v.shape[1]:
            return o, state
        g = x.g[:, 0].float().exp()
        return o, state * g.reshape(*g.shape, *[1] * (4 - g.ndim))


# Promises to the bit


class Exact(Recurrent):
    """Token by token: each promise to the bit holds."""

    domain = Domain(
        key_dims=(24, 64),
        value_dims=(4, 16),
        split_invariant=True,
        packed_equals_dense=True,
        absent_state_equals_zeros=True,
        decode_equals_prefill=True,
        backward=False,
    )

    def flips(self, x: Inputs) -> bool:
        """Whether a call adds the channels of keys in the other order, so that its bits are others."""
        return False

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if not self.flips(x):
            return super().run(x)
        states = {} if x.state is None else {"state": x.state.flip(-2)}
        channels = {} if x.g is None or x.g.ndim < 4 else {"g": x.g.flip(-1)}
        o, state = super().run(x.replaced(q=x.q.flip(-1), k=x.k.flip(-1), **states, **channels))
        return o, None if state is None else state.flip(-2)


class FlipsLongCalls(Exact):
    """Wrong: calls of more than 16 tokens have other bits."""

    def flips(self, x: Inputs) -> bool:
        return x.v.shape[1] > 16


class FlipsPacked(Exact):
    """Wrong: packed calls have other bits."""

    def flips(self, x: Inputs) -> bool:
        return x.cu_seqlens is not None


class FlipsStates(Exact):
    """Wrong: calls with a state of zeros have other bits."""

    def flips(self, x: Inputs) -> bool:
        return x.state is not None and not x.state.any() and x.v.shape[1] > 1


class FlipsSteps(Exact):
    """Wrong: single tokens have other bits."""

    def flips(self, x: Inputs) -> bool:
        return x.cu_seqlens is None and x.v.shape[1] == 1


class FailsWhole(Recurrent):
    """It fails in calls of more than eight tokens."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.v.shape[1] > 8:
            raise ValueError("too many tokens")
        return super().run(x)


class ExactConv(Conv):
    """A convolution, in which a call without a state begins from zeros."""

    domain = ModuleDomain(absent_state_equals_zeros=True, packed_equals_dense=True)


class ConvSplits(Conv):
    """Wrong: it promises that a call in two parts has the bits of one, and adds other taps together at its beginning."""

    domain = ModuleDomain(split_invariant=True)


class LayerSplits(Layered):
    """Wrong: it promises the bits of one call, but its chunks begin where a call begins."""

    domain = LayerDomain(split_invariant=True)
