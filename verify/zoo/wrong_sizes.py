"""Wrong implementations whose mistake shows only if something is large: a sequence, or the number of sequences or heads.

tests/checks/test_sizes.py names the laws that detect them.
"""

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.zoo.base import Chunkwise, Layered, Outputs
from verify.zoo.modules import Conv, L2Norm

Answer = tuple[Tensor, Tensor | None]


class GatesInNineBits(Chunkwise, letter="I"):
    """The index of a token in its sequence has nine bits, so from token 512 on gates are read from the beginning again."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        return super().sequence(q, k, v, g[torch.arange(len(g)) % 512], beta, state, scale)


class InitialStateReturns(Chunkwise, letter="S"):
    """After 1,024 tokens of a sequence with an initial state, the initial state is added again."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        self.left, self.again = 1024 // self.size, state
        return super().sequence(q, k, v, g, beta, state, scale)

    def between(self, state: Tensor) -> Tensor:
        self.left -= 1
        return state + self.again if self.left == 0 else state


class SixtyFourSequences(Chunkwise, letter="V"):
    """Two warps read the table of sequences, so the 65th starts from the first one's state."""

    def initial(self, x: Inputs, row: int) -> Tensor:
        return super().initial(x, row % 64)


class HeadsInFourBits(Chunkwise, letter="G"):
    """The index of a value head has four bits, so from head 16 on beta is that of the first heads."""

    def run(self, x: Inputs) -> Answer:
        heads = torch.arange(x.v.shape[2]) % 16
        return super().run(x.replaced(beta=x.beta[:, :, heads]))


class ConvBeginsAgain(Conv, letter="I"):
    """A block of 512 tokens does not read the tokens before it, so the convolution begins again at token 512 of a sequence."""

    def windows(self, line: Tensor, x: Inputs, count: int) -> Tensor:
        taps = x.weight.shape[-1]
        y = super().windows(line, x, count)
        if count <= 512 or taps == 1:
            return y
        later = torch.cat([0 * line[: taps - 1], line[512 + taps - 1 :]])
        return torch.cat([y[:512], super().windows(later, x, count - 512)])


class NormsAThousandRows(L2Norm, letter="I"):
    """A grid has at most 1,024 programs, so later rows pass through without their norm."""

    def divided(self, wide: Tensor, squares: Tensor, eps: float) -> Tensor:
        y = super().divided(wide, squares, eps)
        late = torch.arange(y[..., 0].numel()).reshape(*y.shape[:-1], 1) >= 1024
        return torch.where(late, wide, y)


class LayerForgetsAt512(Layered, letter="I"):
    """The rule of a layer starts from zeros again at token 512 of a sequence."""

    class Rule(Chunkwise):
        """The rule without the state after eight chunks."""

        def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
            self.left = 512 // self.size
            return super().sequence(q, k, v, g, beta, state, scale)

        def between(self, state: Tensor) -> Tensor:
            self.left -= 1
            return state * 0 if self.left == 0 else state

    def rule(self, x: Inputs) -> Answer:
        return self.Rule().run(x)
