"""Wrong layers of transformers: the released layer, with one function of its module replaced by a wrong one."""

import importlib
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters import transformers_layer as gdn
from verify.adapters.transformers_layer import Answer, ModelLayer


class Replaced(ModelLayer):
    """A layer whose module has `wrong(right)` in the place of the function called `replaced`."""

    replaced: ClassVar[str]

    def wrong(self, right: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError

    def run(self, x: Inputs) -> Answer:
        module = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        right = gdn._unwrapped(getattr(module, self.replaced))
        with mock.patch.object(module, self.replaced, self.wrong(right)):
            return super().run(x)


class DecaysLate(Replaced):
    """The chunkwise rule applies the decay of each token one token late, and that of the last token never."""

    replaced = "torch_chunk_gated_delta_rule"

    def wrong(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def late(*arguments: Any, g: Tensor, **named: Any) -> Any:
            return right(*arguments, g=torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1), **named)

        return late


class ForgetsConvState(Replaced):
    """The convolution of several tokens begins with zeros, whatever state the cache has."""

    replaced = "causal_conv1d_fn"

    def run(self, x: Inputs) -> Answer:
        self._tokens = x.hidden.shape[1]
        return super().run(x)

    def wrong(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def forgetful(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
            earlier, new = hidden_states.split([hidden_states.shape[-1] - self._tokens, self._tokens], -1)
            return right(torch.cat([torch.zeros_like(earlier), new], -1), *arguments, **named)

        return forgetful


class Qwen3NextDecaysLate(DecaysLate, gdn.Qwen3NextLayer):
    """See DecaysLate."""


class Qwen3NextForgetsConvState(ForgetsConvState, gdn.Qwen3NextLayer):
    """See ForgetsConvState."""


class OlmoHybridDecaysLate(DecaysLate, gdn.OlmoHybridLayer):
    """See DecaysLate."""


class OlmoHybridForgetsConvState(ForgetsConvState, gdn.OlmoHybridLayer):
    """See ForgetsConvState."""


class ProjectionsSwapped(gdn.Qwen35Layer):
    """The projections of a and b, which have one width, are exchanged."""

    def parameters(self, module: torch.nn.Module, x: Inputs) -> dict[str, Tensor]:
        names = {"in_proj_a.weight": "in_proj_b.weight", "in_proj_b.weight": "in_proj_a.weight"}
        return {names.get(name, name): parameter for name, parameter in super().parameters(module, x).items()}
