"""Right implementations whose conventions have words in a domain, and a wrong implementation in each of these conventions.

A right one has an alarm without its word, since it refuses the call, overflows, or returns another dtype than the contract's.
"""

from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from tests.right import Recurrent
from verify.adapters.base import Adapter
from verify.zoo.base import Chunkwise


class InputStates(Chunkwise):
    """States go in and come out in the dtype of q, k and v; in between they are in float32."""

    domain = Domain(state_dtypes=("input",), final_dtype="input")

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        assert x.state is None or x.state.dtype == x.q.dtype
        o, state = super().run(x)
        return o, None if state is None else state.to(x.q.dtype)


class InputStatesByToken(Recurrent):
    """The same, token by token."""

    domain = InputStates.domain

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        assert x.state is None or x.state.dtype == x.q.dtype
        o, state = super().run(x)
        return o, None if state is None else state.to(x.q.dtype)


class HalfInitialStates(Chunkwise):
    """Initial states are bfloat16, final states float32."""

    domain = Domain(state_dtypes=("bf16",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        assert x.state is None or x.state.dtype == torch.bfloat16
        return super().run(x)


class HalfFinalStates(Recurrent):
    """Initial states are float32, final states bfloat16."""

    domain = Domain(final_dtype="bf16")

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        return o, None if state is None else state.bfloat16()


class StatesAsGiven(Recurrent):
    """A final state has the dtype of the initial state, or float32 if there is none."""

    domain = Domain(state_dtypes=("fp32", "bf16", "input"), final_dtype="state")

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        return o, state if state is None or x.state is None else state.to(x.state.dtype)


class OneState(Chunkwise):
    """In a packed call, only the first sequence has an initial state, and only the last one returns its final state."""

    domain = Domain(initial_states="first", final_states="last")

    def initial(self, x: Inputs, row: int) -> Tensor:
        if x.cu_seqlens is not None and x.state is not None:
            assert len(x.state) == 1
            x = x.replaced(state=x.state if row == 0 else None)
            row = 0
        return super().initial(x, row)

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return o, state if state is None or x.cu_seqlens is None else state[-1:]


class NoFinalState(Chunkwise):
    """No final state is returned."""

    domain = Domain(final_states="none")

    def run(self, x: Inputs) -> Tensor:  # type: ignore[override]
        assert not x.output_final_state
        return super().run(x)[0]


class OneInitialState(OneState):
    """The same, but every sequence returns its final state."""

    domain = Domain(initial_states="first")

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return o, state


class WholeChunks(Chunkwise):
    """The length of every sequence must be a multiple of 64."""

    domain = Domain(length_step=64)

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert len(q) % self.size == 0
        return super().sequence(q, k, v, g, beta, state, scale)


class Shorter(Chunkwise):
    """A sequence has at most 150 tokens."""

    domain = Domain(longest=150)

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert len(q) <= 150
        return super().sequence(q, k, v, g, beta, state, scale)


class Saturating(Chunkwise):
    """Operands saturate at 65,504, the largest number of float16."""

    domain = Domain(dtypes=("bf16",), largest_values="large")

    def low(self, x: Tensor, like: Tensor) -> Tensor:
        return super().low(x.clamp(-65504.0, 65504.0), like)


class ShortOffsets(Chunkwise):
    """Offsets must be int32."""

    domain = Domain(offsets=("int32",))

    def boundaries(self, x: Inputs) -> list[tuple[int, int]]:
        assert x.cu_seqlens is None or x.cu_seqlens.dtype == torch.int32
        return super().boundaries(x)


class ListedWidths(Chunkwise):
    """K is 16, 64 or 128, and V is 64 or 128."""

    domain = Domain(key_widths=(16, 64, 128), value_widths=(64, 128))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        assert x.q.shape[-1] in (16, 64, 128)
        assert x.v.shape[-1] in (64, 128)
        return super().run(x)


class ScaleGiven(Chunkwise):
    """It has no default scale."""

    domain = Domain(scales=("one", "half"))

    def scale(self, x: Inputs) -> float:
        return float(x.scale)


class RoundsEveryToken(InputStatesByToken):
    """Wrong: the state is stored in the dtype of the inputs after every token."""

    def write(self, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        return super().write(k, v, beta, state).bfloat16().float()


class DropsTheState(HalfInitialStates):
    """Wrong: one row of an initial state is lost."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        state = super().initial(x, row)
        return torch.cat([state[:, :-1], torch.zeros_like(state[:, -1:])], 1)


class HalfOfTheGradient(HalfInitialStates):
    """Wrong: half of the gradient of an initial state is lost."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x if x.state is None else x.replaced(state=(x.state + x.state.detach()) / 2))


class DtypeOfTheFirstCall(InputStates):
    """Wrong: final states keep the dtype of the first call of the process."""

    _dtype: torch.dtype | None = None

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        self._dtype = self._dtype or x.q.dtype
        o, state = super().run(x)
        return o, None if state is None else state.to(self._dtype)


class LargerState(HalfFinalStates):
    """Wrong: a final state is 2% too large."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        return o, None if state is None else state * 1.02


class DoubledGradient(StatesAsGiven):
    """Wrong: the gradient of an initial state is that of a state twice as large."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x if x.state is None else x.replaced(state=2 * x.state - x.state.detach()))


class StateForEach(OneState):
    """Wrong: every sequence of a packed call starts from the state of the first."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, 0 if x.cu_seqlens is not None else row)


class FinalOfTheFirst(OneState):
    """Wrong: a packed call returns the final state of its first sequence."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return o, state if state is None or x.cu_seqlens is None else state[:1]


class LosesTheLastDecay(WholeChunks):
    """Wrong: a chunk's state does not decay by its last token."""

    def last(self, total: Tensor) -> Tensor:
        return total[..., -2:-1]


class ForgetsEachChunk(Shorter):
    """Wrong: the state after a chunk is zero."""

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        o, state = super().piece(q, k, v, g, beta, state, scale)
        return o, 0.0 * state


class CorrectsTooMuch(Saturating):
    """Wrong: what a token subtracts of the values of earlier tokens is 25% too large."""

    def corrections(self, k: Tensor, beta: Tensor, decays: Tensor) -> Tensor:
        return super().corrections(k, beta, decays) * 1.25


class LeaksTheState(ShortOffsets):
    """Wrong: the state of a sequence goes on into the next one."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.cu_seqlens is None or len(x.cu_seqlens) < 3:
            return super().run(x)
        _, states = super().run(x)
        whole, _ = super().run(x.replaced(cu_seqlens=x.cu_seqlens[[0, -1]], state=None if x.state is None else x.state[:1]))
        return whole, states


class HalfOfTheKeys(ListedWidths):
    """Wrong: scores are sums over the first 64 channels."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return super().dot(a[..., :64], b[..., :64, :]) if a.shape[-1] == b.shape[-2] == 128 else super().dot(a, b)


class NoFinalStateAndNoBeta(NoFinalState):
    """Wrong: beta is always 1."""

    def run(self, x: Inputs) -> Tensor:  # type: ignore[override]
        return super().run(x.replaced(beta=torch.ones_like(x.beta)))


class ScaleOfOne(ScaleGiven):
    """Wrong: the scale is always 1."""

    def scale(self, x: Inputs) -> float:
        return 1.0


# For each right implementation: the words of its domain with defaults, so that it has an alarm; a wrong one; and the law for it.
CONVENTIONS: dict[type[Adapter], tuple[dict[str, Any], type[Adapter], str]] = {
    InputStates: ({"state_dtypes": ("fp32",), "final_dtype": "fp32"}, RoundsEveryToken, "oracle"),
    InputStatesByToken: ({"state_dtypes": ("fp32",), "final_dtype": "fp32"}, RoundsEveryToken, "cut"),
    HalfInitialStates: ({"state_dtypes": ("fp32",)}, DropsTheState, "oracle"),
    HalfFinalStates: ({"final_dtype": "fp32"}, LargerState, "cut"),
    StatesAsGiven: ({"final_dtype": "fp32"}, DoubledGradient, "oracle"),
    OneState: ({"initial_states": "each", "final_states": "each"}, StateForEach, "packed"),
    OneInitialState: ({"initial_states": "each"}, FinalOfTheFirst, "oracle"),
    NoFinalState: ({"final_states": "each"}, NoFinalStateAndNoBeta, "oracle"),
    WholeChunks: ({"length_step": 1}, LosesTheLastDecay, "cut"),
    Shorter: ({"longest": None}, ForgetsEachChunk, "oracle"),
    Saturating: ({"largest_values": "great"}, CorrectsTooMuch, "oracle"),
    ShortOffsets: ({"offsets": ("int64", "int32")}, LeaksTheState, "packed"),
    ListedWidths: ({"key_widths": (), "value_widths": ()}, HalfOfTheKeys, "oracle"),
    ScaleGiven: ({"scales": ("default", "one", "half")}, ScaleOfOne, "oracle"),
}
