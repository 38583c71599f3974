"""Wrong layers of transformers: the released layer, with one function of its module replaced by a wrong one."""

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters import transformers_kda_layer as kda
from verify.adapters import transformers_layer as gdn
from verify.adapters.transformers_layer import Answer, ModelLayer


class Replaced(ModelLayer):
    """A layer whose module has `wrong(right)` in the place of the function `replaced()`."""

    def replaced(self) -> str:
        """The name of the function."""
        raise NotImplementedError

    def wrong(self, right: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError

    def run(self, x: Inputs) -> Answer:
        module = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        name = self.replaced()
        right = gdn._unwrapped(getattr(module, name))
        with mock.patch.object(module, name, self.wrong(right)):
            return super().run(x)


class DecaysLate(Replaced):
    """The chunkwise rule applies the decay of each token one token late, and that of the last token never."""

    def replaced(self) -> str:
        return next(name for name in self.kernels if "chunk" in name)

    def wrong(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def late(*arguments: Any, g: Tensor, **named: Any) -> Any:
            return right(*arguments, g=torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1), **named)

        return late


class ForgetsConvState(Replaced):
    """The convolution of several tokens begins with zeros, whatever state the cache has."""

    def replaced(self) -> str:
        return "causal_conv1d_fn"

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


class KimiLinearDecaysLate(DecaysLate, kda.KimiLinearLayer):
    """See DecaysLate."""


class KimiLinearForgetsConvState(ForgetsConvState, kda.KimiLinearLayer):
    """See ForgetsConvState."""


class BailingHybridDecaysLate(DecaysLate, kda.BailingHybridLayer):
    """See DecaysLate."""


class BailingHybridForgetsConvState(ForgetsConvState, kda.BailingHybridLayer):
    """See ForgetsConvState."""


class ForgetsLowerBound(kda.BailingHybridLayer):
    """The decay has no lower bound."""

    def run(self, x: Inputs) -> Answer:
        return super().run(x.replaced(lower_bound=None))


class ForgetsGateBias(kda.Glm5NextLayer):
    """The second projection of the output gate adds no bias."""

    def parameters(self, module: torch.nn.Module, x: Inputs) -> dict[str, Tensor]:
        return super().parameters(module, x.replaced(gate_bias=torch.zeros_like(x.gate_bias)))
