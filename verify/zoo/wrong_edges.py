"""Wrong implementations whose mistake shows only at the edges of numbers: large values, and log-decays of -inf.

tests/laws/test_edges.py names the laws that detect them.
"""

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.zoo.base import Chunkwise, Outputs
from verify.zoo.modules import Conv, L2Norm

FORGOTTEN = -104.0  # exp of it is 0 in float32


class Forgetting(Chunkwise):
    """The right rule for log-decays of -inf: they are replaced by one whose exp is zero, because -inf minus -inf is NaN."""

    domain = Domain(infinite_gates=True)

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        return super().sequence(q, k, v, self.finite(g), beta, state, scale)

    def finite(self, g: Tensor) -> Tensor:
        return g.masked_fill(g == -torch.inf, FORGOTTEN)


class InfinityMinusInfinity(Forgetting, letter="N"):
    """Cumulative gates are subtracted from each other, so after a gate of -inf the rest of a chunk is NaN."""

    def finite(self, g: Tensor) -> Tensor:
        return g


class InfinityIsNoDecay(Forgetting, letter="N"):
    """A gate of -inf is replaced by zero, so it keeps the state that it should forget."""

    def finite(self, g: Tensor) -> Tensor:
        return g.masked_fill(g == -torch.inf, 0.0)


class ValuesInHalf(Chunkwise, letter="L"):
    """Values of a bf16 kernel pass through fp16, so from 65,520 on they are infinite."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        inside = v if v.dtype == torch.float32 else v.half().to(v.dtype)
        return super().sequence(q, k, inside, g, beta, state, scale)


class ClampsCorrections(Chunkwise, letter="L"):
    """Results are clamped to 10,000 against overflow, as if no value were larger."""

    def answer(self, x: Inputs, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return o.clamp(-1e4, 1e4), state


class ConvClamps(Conv, letter="L"):
    """Inputs of the convolution are clamped to 1,000."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        return super().windows(line.clamp(-1e3, 1e3), x, count)


class NormInHalf(L2Norm, letter="L"):
    """A bf16 input passes through fp16 before the norm, so from 65,520 on it is infinite."""

    def wide(self, x: Inputs) -> Tensor:
        half: Tensor = x.x.half() if x.x.dtype == torch.bfloat16 else x.x
        return half.float()
