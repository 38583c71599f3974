"""Right implementations with options and rare arguments, and wrong ones that are right wherever these are left out."""

from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.rules.domain import Domain
from verify.zoo.base import Chunkwise, Layered
from verify.zoo.modules import Conv, Gate, GatedNorm, KdaGate, L2Norm
from verify.zoo.wrong_gates import Stepwise

BOTH = ("fp32", "input")


class Rule(Stepwise):
    """The gated rule with decays of channels, without gate or beta, and with the order of a state's axes as an option."""

    domain = Domain(
        key_dims=(1, 16),
        value_dims=(1, 8),
        in_kernel=("none", "gate"),
        left_out=("none", "gate", "beta", "both"),
        channel_decays=("none", "keys", "values", "both"),
        parameter_dtypes=BOTH,
        options=(("order", ("kv", "vk")), ("offsets_on_host", ("no", "yes"))),
        exact_options=("offsets_on_host",),
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        turned = x.options["order"] == "vk"
        x = x.replaced(state=self.stored(x).mT) if turned and x.state is not None else x
        o, state = self.on_host(x) if x.options["offsets_on_host"] == "yes" else self.rule(x)
        return o, state

    def stored(self, x: Inputs) -> Tensor:
        """The state of a caller that stores its axes as V, K."""
        return x.state.mT.contiguous()

    def on_host(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return self.rule(x)

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.get("gv") is None:
            return super().run(x)
        columns = [self.column(x, column) for column in range(x.v.shape[-1])]
        finals = [final for _, final in columns if final is not None]
        return torch.cat([o for o, _ in columns], -1), torch.cat(finals, -1) if finals else None

    def column(self, x: Inputs, column: int) -> tuple[Tensor, Tensor | None]:
        """The rule of one value channel, whose decay is added to those of the key channels."""
        one = slice(column, column + 1)
        state = None if x.state is None else x.state[..., one]
        return super().run(x.replaced(v=x.v[..., one], state=state, gv=x.gv[..., one]))

    def decay(self, x: Inputs) -> Tensor:
        g = super().decay(x) if x.g is not None or x.get("a") is not None else self.without_gate(x)
        return g + sum((x[name].float() for name in ("gk", "gv") if x.get(name) is not None), torch.zeros(()))

    def without_gate(self, x: Inputs) -> Tensor:
        return torch.zeros(*x.v.shape[:3], 1)

    def log_speed(self, x: Inputs) -> Tensor:
        A_log: Tensor = x.A_log.float()
        return A_log

    def strength(self, x: Inputs) -> Tensor:
        return super().strength(x) if x.beta is not None or x.get("b") is not None else self.without_beta(x)

    def without_beta(self, x: Inputs) -> Tensor:
        return torch.ones(x.v.shape[:3])


class GatesOfInputs(Rule):
    """The rule for gates in the inputs' dtype alone."""

    domain = Domain(gate_dtypes=("input",), left_out=("none", "gate"), options=Rule.domain.options)

    def decay(self, x: Inputs) -> Tensor:
        if x.g is not None and x.g.dtype != x.q.dtype:
            raise ValueError(f"g must be {x.q.dtype}, got {x.g.dtype}")
        return super().decay(x)


class NoGateDecays(Rule):
    """Without a gate, the state decays by 1/e at each token."""

    letter = "D"

    def without_gate(self, x: Inputs) -> Tensor:
        return super().without_gate(x) - 1.0


class BetaOfKeyHeads(Rule):
    """Without beta there are ones for as many heads as the keys have, and the other value heads read zeros."""

    letter = "G"

    def without_beta(self, x: Inputs) -> Tensor:
        return super().without_beta(x) * (torch.arange(x.v.shape[2]) < x.q.shape[2])


class ChannelsReplaceGate(Rule):
    """A decay of key channels replaces the decay of the head."""

    letter = "D"

    def decay(self, x: Inputs) -> Tensor:
        g: Tensor = super().decay(x) if x.get("gk") is None or x.g is None else super().decay(x.replaced(g=x.g * 0))
        return g


class ValueDecayOfTokenBefore(Rule):
    """The decay of a value channel is that of the token before."""

    letter = "D"

    def column(self, x: Inputs, column: int) -> tuple[Tensor, Tensor | None]:
        return super().column(x.replaced(gv=torch.cat([x.gv[:, :1], x.gv[:, :-1]], 1)), column)


class ParametersRounded(Rule):
    """exp(A_log) has the dtype of A_log."""

    letter = "L"

    def speed(self, x: Inputs) -> Tensor:
        speed: Tensor = x.A_log.exp().float()
        return speed


class SquareStatesNotTurned(Rule):
    """A state stored as V, K is read as K, V where both are equal."""

    letter = "L"

    def stored(self, x: Inputs) -> Tensor:
        state: Tensor = x.state if x.state.shape[-1] == x.state.shape[-2] else super().stored(x)
        return state


class HostOffsetsEndEarly(Rule):
    """Offsets on the host are read without the last one, so the last two sequences are one."""

    letter = "V"

    def on_host(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.cu_seqlens is None or len(x.cu_seqlens) < 3:
            return super().on_host(x)
        joined = torch.cat([x.cu_seqlens[:-2], x.cu_seqlens[-1:]])
        o, state = super().on_host(x.replaced(cu_seqlens=joined, state=None if x.state is None else x.state[:-1]))
        return o, None if state is None else torch.cat([state, state[-1:]])


class HostOffsetsOtherBits(Rule):
    """With offsets on the host, the outputs have another last bit, as of another order of a sum."""

    letter = "R"

    def on_host(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().on_host(x)
        return (o.float() * (1 + 2.0**-22)).to(o.dtype) if o.dtype == torch.float32 else o, state


class BoundedGate(KdaGate):
    """The gate of KDA, which may have a lower bound."""

    domain = ModuleDomain("kda_gate", beta=False, lower_bounds=("none", "-5", "-1"), parameter_dtypes=BOTH)

    def decay(self, x: Inputs) -> Tensor:
        return super().decay(x) if x.get("lower_bound") is None else self.bounded(x)

    def bounded(self, x: Inputs) -> Tensor:
        g: Tensor = x.lower_bound * (self.speed(x) * self.raw(x)).sigmoid()
        return g


class BoundClamps(BoundedGate):
    """The lower bound clamps the gate that has none."""

    letter = "N"

    def bounded(self, x: Inputs) -> Tensor:
        return Gate.decay(self, x).clamp(min=x.lower_bound)


class BoundWithoutSpeed(BoundedGate):
    """A gate with a lower bound leaves out exp(A_log)."""

    letter = "N"

    def bounded(self, x: Inputs) -> Tensor:
        g: Tensor = x.lower_bound * (self.speed(x) ** 0 * self.raw(x)).sigmoid()
        return g


class BiasAddedInHalf(BoundedGate):
    """Where dt_bias has the inputs' dtype, the sum with it is rounded to that."""

    letter = "L"

    def raw(self, x: Inputs) -> Tensor:
        raw: Tensor = (x.a + x.dt_bias).float() if x.dt_bias is not None and x.dt_bias.dtype == x.a.dtype else super().raw(x)
        return raw


class SumNorm(GatedNorm):
    """The gated norm of a sum with a residual, which it may return; its gate may be a sigmoid."""

    domain = ModuleDomain(
        "gated_rms_norm",
        residuals=("none", "added", "returned"),
        gatings=("silu", "sigmoid"),
        options=(("training", ("yes", "no")),),
        exact_options=("training",),
    )

    def run(self, x: Inputs) -> Any:
        y = super().run(x)
        return (y, self.total(x).to(x.x.dtype)) if x.get("returns_sum") else y

    def wide(self, x: Inputs) -> Tensor:
        return self.total(x)

    def total(self, x: Inputs) -> Tensor:
        total: Tensor = x.x.float() if x.get("residual") is None else x.x.float() + x.residual.float()
        return total

    def gate(self, x: Inputs) -> Tensor:
        return x.z.float().sigmoid() if x.get("gating") == "sigmoid" else super().gate(x)


class GateIsAlwaysSilu(SumNorm):
    """The gate is silu whatever the caller chooses."""

    letter = "N"

    def gate(self, x: Inputs) -> Tensor:
        return torch.nn.functional.silu(x.z.float())


class ReturnsX(SumNorm):
    """In place of the sum with the residual it returns x, with the sum's gradients."""

    letter = "F"

    def run(self, x: Inputs) -> Any:
        if not x.get("returns_sum"):
            return super().run(x)
        y, total = super().run(x)
        return y, total - x.residual.detach().to(total.dtype)


class ResidualWithoutGradient(SumNorm):
    """A residual that is not returned gets no gradient through the norm."""

    letter = "F"

    def total(self, x: Inputs) -> Tensor:
        if x.get("residual") is None or x.get("returns_sum"):
            return super().total(x)
        total: Tensor = x.x.float() + x.residual.detach().float() + 0 * x.residual.float()
        return total


class EvalWithoutEps(SumNorm):
    """In eval() the norm adds no eps."""

    letter = "E"

    def eps(self, x: Inputs) -> float:
        return super().eps(x) * (x.options["training"] == "yes") + 1e-30


class ResidualConv(Conv):
    """The convolution with a residual that is added to its result."""

    domain = ModuleDomain("causal_conv1d", residuals=("none", "added"))

    def answer(self, x: Inputs, y: Tensor, state: Tensor) -> Any:
        y = y if x.get("residual") is None else (y.float() + x.residual.float()).to(y.dtype)
        return super().answer(x, y, state)


class ResidualShifted(ResidualConv):
    """Each token gets the residual of the one before, from the second row of a batch on."""

    letter = "V"

    def answer(self, x: Inputs, y: Tensor, state: Tensor) -> Any:
        if x.get("residual") is None or len(x.residual) < 2:
            return super().answer(x, y, state)
        return super().answer(x.replaced(residual=torch.cat([x.residual[:1], x.residual[1:].roll(1, 1)])), y, state)


class NormOfAnyAxis(L2Norm):
    """The L2 norm over the last axis, or over another one of a turned x."""

    domain = ModuleDomain("l2norm", options=(("dim", ("last", "second")),))

    def run(self, x: Inputs) -> Tensor:
        if x.options["dim"] == "last":
            return super().run(x)
        turned = x.x.float().transpose(1, -1)
        return self.over_second(turned, self.eps(x)).transpose(1, -1).to(x.x.dtype)

    def over_second(self, x: Tensor, eps: float) -> Tensor:
        return x * (x.square().sum(1, keepdim=True) + eps).rsqrt()


class NormOfLastAxis(NormOfAnyAxis):
    """The norm is over the last axis whatever axis the caller names."""

    letter = "L"

    def over_second(self, x: Tensor, eps: float) -> Tensor:
        return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


class MaskedLayer(Layered):
    """The layer with a mask of pads beside cu_seqlens, parameters in the inputs' dtype, and a gate that may be a sigmoid."""

    domain = LayerDomain(
        gatings=("silu", "sigmoid"), parameter_dtypes=BOTH, options=(("mask", ("none", "ones")), ("training", ("no", "yes")))
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return super().run(self.masked(x) if x.options["mask"] == "ones" else x)

    def masked(self, x: Inputs) -> Inputs:
        return x

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        return super().decay(x.replaced(A_log=x.A_log.float()), a)

    def gate(self, x: Inputs, o: Tensor, z: Tensor) -> Tensor:
        if x.get("gating") != "sigmoid":
            return super().gate(x, o, z)
        return (self.normed(x, o.float()) * z.float().sigmoid()).to(o.dtype)


class MaskReplacesOffsets(MaskedLayer):
    """A mask beside cu_seqlens replaces them: all tokens are one sequence."""

    letter = "V"

    def masked(self, x: Inputs) -> Inputs:
        return x if x.cu_seqlens is None or x.output_final_state else x.replaced(cu_seqlens=x.cu_seqlens[[0, -1]])


class TrainsOnOtherKeys(MaskedLayer):
    """In train() the rule gets keys that are not normalised."""

    letter = "E"
    trains = False

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        self.trains = x.options["training"] == "yes"
        return super().run(x)

    def rule(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return Chunkwise().run(x.replaced(qk_norm=x.qk_norm and not self.trains))


class LayerParametersOfOtherHeads(MaskedLayer):
    """A_log of 16 bits is read in steps of 32, so a head gets the number of another one."""

    letter = "L"

    def decay(self, x: Inputs, a: Tensor) -> Tensor:
        if x.A_log.dtype == torch.float32:
            return super().decay(x, a)
        heads = torch.arange(len(x.A_log)) * 2 % len(x.A_log)
        return super().decay(x.replaced(A_log=x.A_log[heads]), a)
