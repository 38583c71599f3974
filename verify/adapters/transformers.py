"""Adapters of Hugging Face transformers' gated delta rule in plain torch. They adapt signatures and layout only.

The public names call flash-linear-attention if it is installed, even on a CPU. We unwrap them to get the functions in torch.
"""

import dataclasses
import importlib
import inspect
from typing import Any, ClassVar

from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.fla import decorating_later
from verify.adapters.interface import signature, source

REQUIRES = {"transformers": "4.57"}
MODELING = "transformers.models.qwen3_next.modeling_qwen3_next"
_DOMAIN: dict[str, Any] = {"packed": False, "scale": False}


class ModelAdapter(Adapter):
    """Base of adapters of a model's module. If FLA is installed, the module imports FLA, and with it torch's compiler."""

    model: ClassVar[str] = "qwen3_next"

    def bring(self) -> None:
        with decorating_later():
            importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")


class Rule(ModelAdapter):
    """Base of the two rules. Older releases repeat the key heads before they call them."""

    name: ClassVar[str]

    def __init__(self) -> None:
        found = signature(f"{MODELING}:{self.name}")
        if found is not None and "repeat_interleave" not in found.calls:
            self.domain = dataclasses.replace(self.domain, grouped_heads=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return _call(self.name, x)


class Chunk(Rule):
    """`torch_chunk_gated_delta_rule` of modeling_qwen3_next: chunkwise, in float32 for inputs of any dtype."""

    name = "torch_chunk_gated_delta_rule"
    algorithm = "chunkwise"
    chunk = 64
    domain = Domain(**_DOMAIN)
    counterpart = "transformers/recurrent"
    requires = REQUIRES

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return _call(self.name, x, **({} if self.chunk == 64 else {"chunk_size": self.chunk}))


class Chunk16(Chunk):
    """`Chunk` with chunks of 16 tokens."""

    chunk = 16


class Recurrent(Rule):
    """`torch_recurrent_gated_delta_rule` of modeling_qwen3_next: token by token in float32, forward and backward."""

    name = "torch_recurrent_gated_delta_rule"
    algorithm = "recurrent"
    domain = Domain(**_DOMAIN)
    requires = REQUIRES

    def __init__(self) -> None:
        super().__init__()
        self.stores = normalises_first(MODELING, self.name)


def normalises_first(module: str, name: str) -> bool:
    """Whether a function normalises q and k in the inputs' dtype, before it makes them float32. False if it is not there."""
    file = source(module)
    body = "" if file is None else file.read_text(encoding="utf-8").partition(f"\ndef {name}(")[2].partition("\ndef ")[0]
    return 0 <= body.find("l2norm(") < body.find("torch.float32")


def _call(name: str, x: Inputs, **more: Any) -> tuple[Tensor, Tensor | None]:
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule = inspect.unwrap(getattr(modeling_qwen3_next, name))
    o, state = rule(
        x.q,
        x.k,
        x.v,
        g=x.g,
        beta=x.beta,
        initial_state=x.state,
        output_final_state=x.output_final_state,
        use_qk_l2norm_in_kernel=x.qk_norm,
        **more,
    )
    return o, state
