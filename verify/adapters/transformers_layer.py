"""Adapters of the GDN layers of Hugging Face transformers' models in plain torch. They adapt signatures and layout only.

The modules call flash-linear-attention's kernels if they are installed. Here they call transformers' own functions in torch.

One class has the code for all models. It asks the layer, not the release, for the names of its parameters and of its cache.
"""

import abc
import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs
from properties.layers.domain import LayerDomain
from verify.adapters.interface import Unavailable, Unsupported, has_text, source
from verify.adapters.packages import installed
from verify.adapters.padding import padding_mask
from verify.adapters.transformers import REQUIRES, ModelAdapter

KERNELS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update")
OPTIONS = (("training", ("yes", "no")), ("mask", ("none", "ones")))
CACHES = "transformers.cache_utils"
Answer = tuple[Tensor, Tensor | None, Tensor | None]


class ModelLayer(ModelAdapter):
    """Base of adapters of a model's layer, which is the class `api`. `kernels` are the functions that its module may replace.

    Creating the adapter raises Unavailable if the installed transformers does not have the model.
    """

    algorithm = "chunkwise"
    chunk = 64
    requires = REQUIRES
    api: ClassVar[str]
    kernels: ClassVar[Sequence[str]]

    def __init__(self) -> None:
        release = installed("transformers")
        if release is not None and source(f"transformers.models.{self.model}.modeling_{self.model}") is None:
            raise Unavailable(f"transformers {release} has no model {self.model}: pip install --upgrade transformers")
        if source(CACHES) is not None and not has_text(CACHES, "def get_recurrent_state("):  # older caches do not give states back
            self.domain = dataclasses.replace(self.domain, caches=False)

    def run(self, x: Inputs) -> Answer:
        config = self.config(x)
        module, cache = self.module(config), _cache(config, x)
        module.train(x.get("options", {}).get("training") != "no")
        options = {_cache_name(module): cache, "attention_mask": padding_mask(x, x.hidden), **self.further_options(x)}
        with _torch_only(self.model, self.kernels):
            y: Tensor = torch.func.functional_call(module, _chosen(module, self.parameters(module, x)), (x.hidden,), options)
        if cache is None:
            return y, None, None
        return y, cache.get_recurrent_state(0), cache.get_conv_state(0)

    def config(self, x: Inputs) -> Any:
        """The configuration of a model of two layers, of which the first is the layer of the call."""
        fields = {"num_hidden_layers": 2, "hidden_size": x.layer.hidden, "rms_norm_eps": x.eps}
        return _config_with(self.model, {**fields, **self.fields(x)}, self.optional_fields(x))

    def module(self, config: Any) -> torch.nn.Module:
        """The layer, whose parameters are replaced by those of the call."""
        place, _, name = self.api.partition(":")
        module: torch.nn.Module = getattr(importlib.import_module(place), name)(config, 0)
        return module

    def further_options(self, x: Inputs) -> dict[str, Any]:  # noqa: ARG002 - one signature for all layers
        """What `forward` gets beside the cache and the mask."""
        return {}

    @abc.abstractmethod
    def fields(self, x: Inputs) -> dict[str, Any]:
        """The fields that the model's configuration must have."""

    def optional_fields(self, x: Inputs) -> dict[str, Any]:  # noqa: ARG002 - one signature for all layers
        """The fields that the model's configuration gets if it has them."""
        return {}

    @abc.abstractmethod
    def parameters(self, module: torch.nn.Module, x: Inputs) -> dict[str, Tensor]:
        """The parameters of the call by all names that a model's layer may have for them."""


class GdnLayer(ModelLayer):
    """Base of adapters of GDN layers.

    The layers take no packed sequences without other packages, and no convolution bias. They write to their cache in place, so that
    no gradient passes through states.

    Packed sequences are refused by what transformers puts around its functions in torch, which the adapters take away.
    """

    kernels = KERNELS
    domain = LayerDomain(
        packed=False,
        conv_bias=False,
        negative_eigenvalues=False,
        empty=False,
        nothing=False,
        state_gradients=False,
        parameter_dtypes=("fp32", "input"),
        options=OPTIONS,
    )

    def run(self, x: Inputs) -> Answer:
        if x.cu_seqlens is not None:
            raise Unsupported("without other packages, transformers raises a ValueError for packed sequences")
        return super().run(x)

    def fields(self, x: Inputs) -> dict[str, Any]:
        return {
            "linear_num_value_heads": x.layer.value_heads,
            "linear_num_key_heads": x.layer.heads,
            "linear_key_head_dim": x.layer.key_dim,
            "linear_value_head_dim": x.layer.value_dim,
            "linear_conv_kernel_dim": x.layer.conv_width,
        }

    def optional_fields(self, x: Inputs) -> dict[str, Any]:
        return {"linear_allow_neg_eigval": x.allow_neg_eigval, "output_gate_type": x.get("gating", "silu")}

    def parameters(self, module: torch.nn.Module, x: Inputs) -> dict[str, Tensor]:  # noqa: ARG002 - one signature for all layers
        sections = sections_of(x)
        apart = {"g" if name == "z" else name: section for name, section in sections.items()}
        return {
            **_by_key_head(x.layer, sections),
            "in_proj_qkv.weight": torch.cat([sections[name] for name in "qkv"]),
            **{f"in_proj_{name}.weight": sections[name] for name in "zba"},
            **{f"{name}_proj.weight": section for name, section in apart.items()},
            "conv1d.weight": x.conv.unsqueeze(1),
            "A_log": x.A_log,
            "dt_bias": x.dt_bias,
            **{f"{name}.weight": x.norm for name in ("norm", "o_norm")},
            **{f"{name}.weight": x.out_proj for name in ("out_proj", "o_proj")},
        }


class Qwen3NextLayer(GdnLayer):
    """`Qwen3NextGatedDeltaNet`. One projection has q, k, v and z of each key head side by side; another has b and a."""

    model = "qwen3_next"
    api = "transformers.models.qwen3_next.modeling_qwen3_next:Qwen3NextGatedDeltaNet"


class Qwen35Layer(GdnLayer):
    """`Qwen3_5GatedDeltaNet`. One projection has q, k and v; z, b and a have one each."""

    model = "qwen3_5"
    api = "transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5GatedDeltaNet"


class Qwen35MoeLayer(GdnLayer):
    """`Qwen3_5MoeGatedDeltaNet`, with the projections of Qwen3.5."""

    model = "qwen3_5_moe"
    api = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeGatedDeltaNet"


class Qwen4ExpLayer(GdnLayer):
    """`Qwen4ExpTextGatedDeltaNet`, with the projections of Qwen3.5. The norm's gate is a silu or a sigmoid."""

    model = "qwen4_exp"
    api = "transformers.models.qwen4_exp.modeling_qwen4_exp:Qwen4ExpTextGatedDeltaNet"
    domain = dataclasses.replace(GdnLayer.domain, gatings=("silu", "sigmoid"))


class OlmoHybridLayer(GdnLayer):
    """`OlmoHybridGatedDeltaNet`. Each section has a projection, beta may be doubled, and the eps of the norm is always 1e-5."""

    model = "olmo_hybrid"
    api = "transformers.models.olmo_hybrid.modeling_olmo_hybrid:OlmoHybridGatedDeltaNet"
    domain = dataclasses.replace(GdnLayer.domain, negative_eigenvalues=True, eps=("1e-5",))


class LaraMiniLayer(GdnLayer):
    """`LaraMiniGatedDeltaNet`, with the projections of Qwen3.5."""

    model = "lara_mini"
    api = "transformers.models.lara_mini.modeling_lara_mini:LaraMiniGatedDeltaNet"


def sections_of(x: Inputs) -> dict[str, Tensor]:
    """The rows of in_proj of each section, by name."""
    sections: dict[str, int] = x.layer.sections
    return dict(zip(sections, x.in_proj.split([*sections.values()]), strict=True))


def _by_key_head(layer: Layer, sections: dict[str, Tensor]) -> dict[str, Tensor]:
    """The projections in which the sections of each key head lie side by side."""
    heads = {name: section.unflatten(0, (layer.heads, -1)) for name, section in sections.items()}
    return {
        "in_proj_qkvz.weight": torch.cat([heads[name] for name in "qkvz"], 1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat([heads[name] for name in "ba"], 1).flatten(0, 1),
    }


def _chosen(module: torch.nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the parameters that the module has. Unavailable if it has others."""
    names = [name for name, _ in module.named_parameters()]
    if unknown := [name for name in names if name not in parameters]:
        raise Unavailable(f"{type(module).__name__} has parameters that the adapter does not know: {', '.join(unknown)}")
    return {name: parameters[name] for name in names}


def _config_with(model: str, fields: dict[str, Any], optional: dict[str, Any]) -> Any:
    """A configuration of the class that has all of `fields`, with those of `optional` that it has. Unavailable if none has them."""
    module = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            known = {*dir(kind), *inspect.signature(kind).parameters}
            if fields.keys() <= known:
                return kind(**fields, **{name: value for name, value in optional.items() if name in known})
    raise Unavailable(f"no configuration of {model} has the fields {', '.join(fields)}")


def _cache_name(module: torch.nn.Module) -> str:
    """The name of `forward`'s parameter for the cache. It was `cache_params` in transformers before 5.24."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "cache_params"


def _cache(config: Any, x: Inputs) -> Any:
    """A cache with the call's states; empty without initial states, and None if no final states are wanted."""
    if not x.output_final_state:
        return None
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionLayer  # noqa: F401 - releases without it have caches of another kind

    cache = DynamicCache(config=config)
    if x.state is not None:
        cache.update_conv_state(x.conv_state.clone(), 0)
        cache.update_recurrent_state(x.state, 0)
    return cache


@contextlib.contextmanager
def _torch_only(model: str, kernels: Sequence[str]) -> Iterator[None]:
    """Make the model's module use transformers' own functions in torch as its kernels, inside."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    with mock.patch.multiple(module, **{name: _unwrapped(getattr(module, name)) for name in kernels}):
        yield


@functools.cache
def _unwrapped(function: Any) -> Any:
    return inspect.unwrap(function)
