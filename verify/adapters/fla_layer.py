"""Adapters of flash-linear-attention's layers GatedDeltaNet and KimiDeltaAttention. They adapt signatures and layout only."""

import dataclasses
import importlib
import importlib.util
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.layer import Layer as Widths
from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from verify.adapters.base import Adapter
from verify.adapters.fla import POWERS, REQUIRES, SWITCH, chosen, core, decorating_later, reads_beyond_gates
from verify.adapters.interface import Lacking, has_text, source
from verify.adapters.left_out import IN_FLA, left_out
from verify.adapters.padding import padding_mask

MASK = (("mask", ("none", "ones")),)  # a mask of ones, which excludes no token; it may stand beside cu_seqlens
SWISH = (("swish", SWITCH),)  # FLA's norm has a branch for each of the names swish and silu of one function
ALWAYS_SHORT = "mode = 'fused_recurrent' if q_len <= 64 else self.mode"  # before 0.4.2 also in training, which then fails
SHORT_IN_EVAL = "if (q_len <= 64 and not self.training) else self.mode"  # before 0.6.0, also with gradients, which then fails
SHORT = 64  # tokens
Answer = tuple[Tensor, Tensor | None, Tensor | None]


class Layer(Adapter):
    """`fla.layers.GatedDeltaNet` as in training: the chunkwise rule, forward and backward, with final states.

    In the backward of a call without any tokens, its norm divides by the number of tokens and raises ZeroDivisionError.
    """

    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    api = "fla.layers:GatedDeltaNet"
    omits = left_out(IN_FLA, "mode", "use_gate", "use_short_conv", "output_attentions")
    domain = LayerDomain(
        nothing=False,
        right_padding=True,
        refills=False,
        gatings=("silu", "sigmoid"),
        parameter_dtypes=("fp32", "input"),
        options=(("training", SWITCH), *MASK, *SWISH),
    )
    counterpart: str | None = "fla/layer_recurrent"
    requires = REQUIRES
    source: ClassVar[str] = "fla.layers.gated_deltanet"

    def __init__(self) -> None:
        if source(self.source) is not None and not has_text(self.source, "output_gate_activation"):
            self.domain = dataclasses.replace(self.domain, gatings=LayerDomain.gatings)  # older releases ignore the argument

    def bring(self) -> None:
        core()
        with decorating_later():
            importlib.import_module("fla.layers")
            _import_cache()

    def run(self, x: Inputs) -> Answer:
        module, cache = self.module(x.layer, x), _cache(x)
        graded, short = x.hidden.requires_grad, x.hidden.shape[1] <= SHORT
        if short and (module.training or graded) and has_text(self.source, ALWAYS_SHORT):
            raise Lacking(f"this release of FLA trains on more than {SHORT} tokens at a time")
        if short and graded and not module.training and has_text(self.source, SHORT_IN_EVAL):
            raise Lacking(f"this release of FLA has a backward of up to {SHORT} tokens in training alone")
        parameters = self.parameters(x.layer, x)
        mask = padding_mask(x, x.hidden)
        options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": x.output_final_state}
        y = torch.func.functional_call(module, parameters, (x.hidden,), {**options, "cu_seqlens": x.cu_seqlens})[0]
        if cache is None:
            return y, None, None
        left = cache[0]
        return y, left["recurrent_state"].mT, torch.cat(left["conv_state"], 1)

    def module(self, layer: Widths, x: Inputs) -> torch.nn.Module:
        """The module, whose parameters are replaced by those of the call."""
        return _gdn(layer, x)

    def parameters(self, layer: Widths, x: Inputs) -> dict[str, Tensor]:
        """The parameters of the call by FLA's names."""
        return _parameters(layer, x, {"z": "g_proj.weight"})


class LayerRecurrent(Layer):
    """`Layer` as in serving, without gradients: it computes up to 64 tokens one by one, and more with the chunkwise rule."""

    omits = left_out(IN_FLA, "use_gate", "use_short_conv", "output_attentions")
    domain = LayerDomain(
        backward=False,
        refills=False,
        right_padding=True,
        gatings=("silu", "sigmoid"),
        parameter_dtypes=("fp32", "input"),
        options=(("mode", ("chunk", "fused_recurrent")), *MASK, *SWISH),
    )
    counterpart = None

    def run(self, x: Inputs) -> Answer:
        with torch.no_grad():
            return super().run(x)


class KdaLayer(Layer):
    """`fla.layers.KimiDeltaAttention` as in training: the chunkwise rule, forward and backward, with final states.

    In the backward of a call without any tokens, its norm divides by the number of tokens and raises ZeroDivisionError.
    """

    api = "fla.layers:KimiDeltaAttention"
    source = "fla.layers.kda"
    omits = left_out(IN_FLA, "mode", "use_short_conv", "safe_gate", "lower_bound", "output_attentions")
    domain = LayerDomain("kda_layer", nothing=False, refills=False, right_padding=True)
    counterpart: str | None = "fla/kda_layer_recurrent"

    def module(self, layer: Widths, x: Inputs) -> torch.nn.Module:
        from fla.layers import KimiDeltaAttention

        if layer.key_dim not in POWERS and reads_beyond_gates():
            raise Lacking(f"this release of FLA reads beyond the gates unless key_dim is a power of two, got {layer.key_dim}")

        module: torch.nn.Module = KimiDeltaAttention(**_widths(layer, x))
        return module.train(mode=False)

    def parameters(self, layer: Widths, x: Inputs) -> dict[str, Tensor]:
        names = {"z": "g_proj.0.weight", "f": "f_proj.0.weight"}
        second = {"f_proj.1.weight": x.decay_proj, "g_proj.1.weight": x.gate_proj, "g_proj.1.bias": x.gate_bias}
        return {**_parameters(layer, x, names), **second, "dt_bias": x.dt_bias.flatten()}


class KdaLayerRecurrent(KdaLayer):
    """`KdaLayer` as in serving, without gradients: it computes up to 64 tokens one by one, and more with the chunkwise rule."""

    domain = LayerDomain("kda_layer", backward=False, refills=False, right_padding=True)
    counterpart = None

    def run(self, x: Inputs) -> Answer:
        with torch.no_grad():
            return super().run(x)


def _gdn(layer: Widths, x: Inputs) -> torch.nn.Module:
    from fla.layers import GatedDeltaNet

    module: torch.nn.Module = GatedDeltaNet(
        **_widths(layer, x),
        mode=x.get("options", {}).get("mode", "chunk"),
        output_gate_activation="sigmoid" if x.get("gating") == "sigmoid" else "swish" if chosen(x, "swish") else "silu",
    )
    return module.train(chosen(x, "training"))


def _widths(layer: Widths, x: Inputs) -> dict[str, Any]:
    """The arguments that FLA's two layers share."""
    return {
        "hidden_size": layer.hidden,
        "expand_v": layer.value_dim / layer.key_dim,
        "head_dim": layer.key_dim,
        "num_heads": layer.heads,
        "num_v_heads": layer.value_heads,
        "allow_neg_eigval": x.allow_neg_eigval,
        "conv_size": layer.conv_width,
        "conv_bias": x.conv_bias is not None,
        "layer_idx": 0,
        "norm_eps": x.eps,
    }


def _parameters(layer: Widths, x: Inputs, names: dict[str, str]) -> dict[str, Tensor]:
    """The layer's parameters by FLA's names. Each section of in_proj is a projection there; q, k and v have a convolution each.

    `names` has the names of the projections that are not named after their section.
    """
    sections = dict(zip(layer.sections, x.in_proj.split([*layer.sections.values()]), strict=True))
    filters = [layer.sections[name] for name in "qkv"]
    parameters = {names.get(name, f"{name}_proj.weight"): weight for name, weight in sections.items()}
    parameters |= {f"{name}_conv1d.weight": weight.unsqueeze(1) for name, weight in zip("qkv", x.conv.split(filters), strict=True)}
    if x.conv_bias is not None:
        parameters |= {f"{name}_conv1d.bias": bias for name, bias in zip("qkv", x.conv_bias.split(filters), strict=True)}
    return {**parameters, "A_log": x.A_log, "dt_bias": x.dt_bias, "o_norm.weight": x.norm, "o_proj.weight": x.out_proj}


def _import_cache() -> Any:
    """FLA's cache, imported without the models in its package, which take seconds. The package is filled when one is asked for."""
    spec = importlib.util.find_spec("fla.models")
    if spec is not None and spec.loader is not None and "fla.models" not in sys.modules:
        package, load = importlib.util.module_from_spec(spec), spec.loader.exec_module

        def model(name: str) -> Any:
            if name.startswith("_"):  # asked by whoever looks through all modules
                raise AttributeError(f"module 'fla.models' has no attribute {name!r}")
            del vars(package)["__getattr__"]
            load(package)
            return getattr(package, name)

        vars(package)["__getattr__"] = model
        sys.modules["fla.models"] = vars(sys.modules["fla"])["models"] = package
    old, new = "fla.models.utils", "fla.models.cache_utils"
    return importlib.import_module(old if importlib.util.find_spec(new) is None else new).Cache


def _cache(x: Inputs) -> Any:
    """A cache with the call's states, V first; empty without initial states, and None if no final states are wanted."""
    if not x.output_final_state:
        return None
    cache = _import_cache()()
    missing = getattr(sys.modules[type(cache).__module__], "FLALayer", Any)
    if names := sorted(getattr(missing, "__abstractmethods__", ())):
        raise Lacking(f"the cache of this release of FLA lacks {', '.join(names)}, which this transformers asks for")
    if x.state is not None:
        filters = [x.layer.sections[name] for name in "qkv"]
        # Copies, since the convolutions' single-token updates write to their caches in place.
        conv = tuple(state.clone() for state in x.conv_state.split(filters, 1))
        cache.update(recurrent_state=x.state.mT.contiguous(), conv_state=conv, layer_idx=0, offset=1)
    return cache
