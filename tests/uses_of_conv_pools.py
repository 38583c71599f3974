"""Uses of SGLang's and vLLM's convolutions: with padding requests, which is right, and with one argument or state that is wrong."""

import types
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters import vllm_modules
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


class Pads(Changes, ConvUpdate):
    """Each call has a padding request at its end, whose slot is -1 and whose tokens are NaN."""

    def around(self, function: Any) -> Any:
        def pad(x: Tensor, pool: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            slots = kwargs["conv_state_indices"]
            tokens = torch.cat([x, x.new_full((1, *x.shape[1:]), float("nan"))])
            padded = {**kwargs, "conv_state_indices": torch.cat([slots, slots.new_tensor([self.padding(pool)])])}
            y: Tensor = function(tokens, pool, *args, **padded)
            return y[:-1]

        return pad

    def padding(self, pool: Tensor) -> int:
        return -1


class VllmPads(Changes, vllm_modules.ConvUpdate):
    """The same with vLLM, where slot 0 is padding."""

    around = Pads.around

    def padding(self, pool: Tensor) -> int:
        return 0


# Wrong uses


class PadsTheLastSlot(Pads):
    """-1 is read as an index of Python: the padding request has the last slot of the pool, which is in use."""

    def padding(self, pool: Tensor) -> int:
        return len(pool) - 1


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
