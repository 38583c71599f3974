"""Wrong uses of SGLang's convolutions: each adapter gives its kernel one argument that is wrong, or reads the wrong state."""

import types
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters.sglang_modules import Conv, ConvUpdate, ConvVerify


class Changes:
    """Mixed into an adapter: the keyword arguments of the kernel's wrapper pass through `changed`."""

    def module(self) -> types.SimpleNamespace:
        library: Any = super().module()  # type: ignore[misc]
        names = ("causal_conv1d_fn", "causal_conv1d_update")
        return types.SimpleNamespace(**{name: self.around(getattr(library, name)) for name in names})

    def around(self, function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **self.changed(kwargs))

    def changed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs


class IgnoresSlots(Changes, ConvUpdate):
    """Sequence n uses slot n, as if there were no slots."""

    def changed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        slots = kwargs["conv_state_indices"]
        return {**kwargs, "conv_state_indices": torch.arange(len(slots), dtype=slots.dtype)}


class NextSlot(Changes, Conv):
    """The slots are counted without the dummy slot: each is one too small."""

    def changed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "cache_indices": kwargs["cache_indices"] - 1}


class StartsFromStale(Changes, Conv):
    """A new request reads what its slot holds."""

    def changed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "has_initial_state": torch.ones_like(kwargs["has_initial_state"])}


class NeverStarts(Changes, Conv):
    """No request has an initial state."""

    def changed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "has_initial_state": torch.zeros_like(kwargs["has_initial_state"])}


class DropsSilu(Changes, Conv):
    """There is never an activation."""

    def changed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "activation": None}


class OneColumnOff(Conv):
    """The final state is read one column late, as from W columns."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        y, state = super().run(x)
        return y, state.roll(-1, -1)


class CommitsTheWholeDraft(Changes, ConvVerify):
    """The state after a draft is that of its last token, whether it was accepted or not."""

    def around(self, function: Any) -> Any:
        def keep(x: Tensor, pool: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            y: Tensor = function(x, pool, *args, **kwargs)
            self.states = pool[kwargs["conv_state_indices"].long()]
            return y

        return keep

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        y, _ = super().run(x)
        return y, self.states
