"""The FLOPs of a GDN layer by Megatron-LM's own formula, `num_floating_point_operations`.

The formula is in `megatron/training/training.py`, which needs more packages than we have. So we import this one function of the
file, and nothing else of it.
"""

import argparse
import ast
import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable
from importlib.abc import SourceLoader
from typing import Any

from oracles.layer import Layer

FILE, NAME = pathlib.PurePath("megatron", "training", "training.py"), "num_floating_point_operations"
HALVES = ("transformer", "hybrid")  # the two halves of the formula: for transformers, and for models with a pattern of layers
Formula = Callable[[Any, int], float]


class _Function(SourceLoader):
    """Loads one function of a file as a module."""

    def __init__(self, path: pathlib.Path, name: str) -> None:
        self.path, self.name = path, name

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 - the signature of a loader
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                lines = "\n" * (node.lineno - 1)  # so that a traceback names the lines of the file
                return (lines + (ast.get_source_segment(text, node) or "")).encode()
        raise ImportError(f"{path} has no function {self.name}")


def formula_in(folder: str) -> Formula:
    """The formula of the release in a folder. ImportError if the release has none, as 0.16.1.

    The function asks two others which of its halves it takes. The answers are those of Megatron-LM for what `arguments` makes.
    """
    path = pathlib.Path(folder) / FILE
    if not path.is_file():
        raise ImportError(f"there is no {FILE} in {folder}: fetch the release again, unless it has none")
    spec = importlib.util.spec_from_loader("megatron_formula", _Function(path, NAME))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(
        is_hybrid_model=lambda args: args.hybrid_layer_pattern is not None,
        is_linear_attention_variant=lambda variant: variant == "gated_delta_net",
    )
    spec.loader.exec_module(module)
    formula: Formula = getattr(module, NAME)
    return formula


def arguments(layer: Layer, tokens: int, kind: str) -> argparse.Namespace:
    """Megatron-LM's arguments for a model that is one GDN layer: its MLP and its vocabulary have no width."""
    nothing = dict.fromkeys(_ABSENT) | dict.fromkeys(_ZERO, 0)
    return argparse.Namespace(
        **nothing,
        seq_length=tokens,
        hidden_size=layer.hidden,
        num_layers=1,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=1,
        mamba_num_heads=1,
        mamba_head_dim=1,
        group_query_attention=False,
        multi_latent_attention=False,
        attention_output_gate=False,
        swiglu=False,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[1],
        hybrid_layer_pattern=None if kind == "transformer" else "G",
        linear_key_head_dim=layer.key_dim,
        linear_value_head_dim=layer.value_dim,
        linear_num_key_heads=layer.heads,
        linear_num_value_heads=layer.value_heads,
        linear_conv_kernel_dim=layer.conv_width,
    )


_ABSENT = ("num_experts", "mtp_num_layers", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size")
_ZERO = ("ffn_hidden_size", "padded_vocab_size", "moe_router_topk", "mamba_state_dim", "mamba_num_groups")


def terms(formula: Formula, layer: Layer, tokens: int, kind: str) -> dict[str, float]:
    """The training FLOPs of the layer by term: projections, convolution, and the rest, which is the rule.

    The formula returns their sum. Projections are what grows with the hidden size, and the convolution what grows with its width.
    """

    def total(**changes: int) -> float:
        return float(formula(arguments(dataclasses.replace(layer, **changes), tokens, kind), 1))

    whole = total()
    projections = total(hidden=2 * layer.hidden) - whole
    convolution = total(conv_width=2 * layer.conv_width) - whole
    return {"projections": projections, "convolution": convolution, "rule": whole - projections - convolution}
