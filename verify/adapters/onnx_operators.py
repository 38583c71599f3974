"""Adapters of ONNX's operators in ONNX Runtime on a CPU, and in the evaluator of the package onnx. They adapt layout only.

The operators of the domain com.microsoft are ONNX Runtime's own. Those of onnx's own domain came with opset 27: ONNX Runtime runs
their definition by other operators. The evaluator computes in NumPy and is what onnx's own tests take for right.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from properties.rules.domain import Domain
from verify.adapters.onnx_adapter import OnnxAdapter

MICROSOFT = "com.microsoft"
ONNX = {"onnx": "1.23.1"}  # it has opset 27
RUNTIME = {"onnxruntime": "1.32.0", **ONNX}
ROWS = {**dict.fromkeys("qk", "B*T H K"), **dict.fromkeys("vo", "B*T HV V"), **dict.fromkeys(("g", "a", "beta", "b"), "B*T HV")}
PACKED = Domain(
    in_kernel=("none", "gate", "beta", "both"),
    dt_bias=False,
    negative_eigenvalues=("given",),
    qk_norm_eps=("1e-12",),
    nothing=False,
    offsets=("int32",),
    views=False,
    backward=False,
)
DENSE = Domain(gate_dtypes=("input",), grouped_heads=False, packed=False, qk_norm=False, views=False, backward=False)
CONV = ModuleDomain("causal_conv1d", packed=False, state_columns="W-1", views=False, backward=False)


def node(kind: str, inputs: str, outputs: str, domain: str = MICROSOFT, **options: Any) -> Any:
    """A node of a model, whose inputs and outputs have the names of the operation's tensors."""
    from onnx import helper

    return helper.make_node(kind, inputs.split(), outputs.split(), domain=domain, **options)


class GatedDeltaNet(OnnxAdapter):
    """GatedDeltaNet of com.microsoft: packed or not, with gates and L2 norm in the kernel. Decay and beta have one dtype.

    Its L2 norm adds 1e-12, but 1e-6 where KDA's gate in the kernel has a lower bound. It refuses a call without tokens.
    """

    algorithm = "recurrent"
    requires = RUNTIME
    rule: ClassVar[str] = "gated_delta"
    layout: ClassVar[Mapping[str, str]] = {**ROWS, "state": "V K", "final_state": "V K"}
    absent: ClassVar[Mapping[str, float]] = {"state": 0.0}
    domain = PACKED

    def model(self, x: Inputs) -> Any:
        gate, beta, bound = x.get("a") is not None, x.get("b") is not None, x.get("lower_bound")
        return node(
            "GatedDeltaNet",
            f"q k v cu_seqlens {'a' if gate else 'g'} {'b' if beta else 'beta'} state A_log dt_bias",
            "o final_state",
            update_rule=self.rule,
            scale=x.scale or 0.0,
            qk_l2_norm=int(x.qk_norm),
            gate_activation="none" if not gate else "softplus" if bound is None else "sigmoid",
            gate_lower_bound=-5.0 if bound is None else bound,
            beta_activation="sigmoid" if beta else "none",
        )

    def run(self, x: Inputs) -> Any:
        if (g := x.get("g")) is not None:
            x = x.replaced(**{name: x[name].to(g.dtype) for name in ("beta", "b") if x.get(name) is not None})
        return super().run(x)


class GatedDeltaNetKda(GatedDeltaNet):
    """GatedDeltaNet with one decay for each key channel."""

    layout: ClassVar[Mapping[str, str]] = {**GatedDeltaNet.layout, "g": "B*T HV K", "a": "B*T HV K"}
    domain = dataclasses.replace(PACKED, operation="kda")


class GatedDeltaNetBounded(GatedDeltaNetKda):
    """GatedDeltaNet with KDA's gate in the kernel, and a lower bound of its decay."""

    domain = dataclasses.replace(
        PACKED, operation="kda", in_kernel=("gate", "both"), lower_bounds=("-5", "-1"), qk_norm_eps=("1e-6",)
    )


class GatedDeltaNetDelta(GatedDeltaNet):
    """GatedDeltaNet with the delta rule."""

    rule = "delta"
    domain = dataclasses.replace(PACKED, operation="delta_rule", in_kernel=("none", "beta"))


class LinearAttention(OnnxAdapter):
    """LinearAttention of com.microsoft: batches whose keys have a head for each value head, in float32 and float16."""

    algorithm = "recurrent"
    requires = RUNTIME
    namespace: ClassVar[str] = MICROSOFT
    rule: ClassVar[str] = "gated_delta"
    layout: ClassVar[Mapping[str, str]] = {**dict.fromkeys("qk", "B T H*K"), **dict.fromkeys("vo", "B T HV*V")}
    absent: ClassVar[Mapping[str, float]] = {"state": 0.0}  # without a state, the final one would have the dtype of q
    domain = dataclasses.replace(DENSE, dtypes=("fp32", "fp16"))

    def model(self, x: Inputs) -> Any:
        heads = {"q_num_heads": x.q.shape[2], "kv_num_heads": x.v.shape[2]}
        options = {"update_rule": self.rule, "scale": x.scale or 0.0}
        return node("LinearAttention", "q k v state g beta", "o final_state", self.namespace, **options, **heads)


class LinearAttentionKda(LinearAttention):
    """LinearAttention of com.microsoft with one decay for each key channel."""

    layout: ClassVar[Mapping[str, str]] = {**LinearAttention.layout, "g": "B T HV*K"}
    domain = dataclasses.replace(LinearAttention.domain, operation="kda")


class LinearAttentionDelta(LinearAttention):
    """LinearAttention of com.microsoft with the delta rule."""

    rule = "delta"
    domain = dataclasses.replace(LinearAttention.domain, operation="delta_rule")


class LinearAttention27(LinearAttention):
    """LinearAttention of onnx in ONNX Runtime, which refuses a call without tokens."""

    namespace = ""
    domain = dataclasses.replace(DENSE, nothing=False)


class LinearAttentionReference(LinearAttention):
    """LinearAttention of onnx in the evaluator."""

    namespace = ""
    runtime = "reference"
    requires = ONNX
    domain = DENSE


class Conv(OnnxAdapter):
    """CausalConvWithState of com.microsoft, in float32 and float16."""

    algorithm = "pointwise"
    requires = RUNTIME
    namespace: ClassVar[str] = MICROSOFT
    layout: ClassVar[Mapping[str, str]] = {"x": "D T", "y": "D T", "weight": "D 1 W"}
    domain = dataclasses.replace(CONV, dtypes=("fp32", "fp16"))

    def model(self, x: Inputs) -> Any:
        options = {"activation": x.activation or "none", "domain": self.namespace}
        return node("CausalConvWithState", "x weight bias state", "y final_state", **options)


class Conv27(Conv):
    """CausalConvWithState of onnx in ONNX Runtime, whose Conv refuses a call without tokens."""

    namespace = ""
    domain = dataclasses.replace(Conv.domain, nothing=False)


class ConvReference(Conv):
    """CausalConvWithState of onnx in the evaluator. Half precision is left out: there it rounds a sum before it adds the bias."""

    namespace = ""
    runtime = "reference"
    requires = ONNX
    domain = dataclasses.replace(CONV, dtypes=("fp32",))


class ConvVarlen(OnnxAdapter):
    """VarlenCausalConvWithState of com.microsoft: packed sequences, each of one token at least."""

    algorithm = "pointwise"
    requires = RUNTIME
    layout: ClassVar[Mapping[str, str]] = {"x": "B*T D", "y": "B*T D", "weight": "D 1 W"}
    absent: ClassVar[Mapping[str, float]] = {"state": 0.0}
    domain = dataclasses.replace(Conv.domain, packed=True, batched=False, empty=False, offsets=("int32",))

    def model(self, x: Inputs) -> Any:
        activation = x.activation or "none"
        return node("VarlenCausalConvWithState", "x weight cu_seqlens bias state", "y final_state", activation=activation)


class Gate(OnnxAdapter):
    """LinearAttentionGate of com.microsoft, which takes -exp(A_log). Its decay has the dtype of a, so a is float32."""

    algorithm = "pointwise"
    requires = RUNTIME
    absent: ClassVar[Mapping[str, float]] = {"dt_bias": 0.0}
    domain = ModuleDomain("gdn_gate", dtypes=("fp32",), negative_eigenvalues=False, views=False, backward=False)

    def model(self, x: Inputs) -> Any:  # noqa: ARG002
        rate = [node("Exp", "A_log", "rate", domain=""), node("Neg", "rate", "decay_scale", domain="")]
        return [*rate, node("LinearAttentionGate", "a dt_bias decay_scale b", "g beta")]


class GatedNorm(OnnxAdapter):
    """GatedRMSNorm of com.microsoft."""

    algorithm = "pointwise"
    requires = RUNTIME
    absent: ClassVar[Mapping[str, float]] = {"weight": 1.0}
    domain = ModuleDomain("gated_rms_norm", eps=("1e-6", "1e-5"), gatings=("silu", "sigmoid"), views=False, backward=False)

    def model(self, x: Inputs) -> Any:
        return node("GatedRMSNorm", "x weight z", "y", epsilon=x.eps, activation=x.get("gating") or "silu")
