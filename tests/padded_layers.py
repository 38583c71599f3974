"""Layers that take a mask beside initial states, or with padding at the end of rows: right ones, and wrong ones."""

import dataclasses

import torch
from torch import Tensor

from oracles.operation import Inputs, no_padding
from verify.zoo.base import Layered

Answer = tuple[Tensor, Tensor | None, Tensor | None]


class Padded(Layered):
    """Not wrong."""

    domain = dataclasses.replace(Layered.domain, padded_states=True)


class PaddedEnds(Layered):
    """Not wrong."""

    domain = dataclasses.replace(Layered.domain, right_padding=True)


class PadsGoOn(PaddedEnds):
    """Hidden states of padding are zeros, but the state decays behind the tokens, and the window is that of the zeros."""

    def run(self, x: Inputs) -> Answer:
        if x.pads is None or min(x.pads) >= 0:
            return super().run(x)
        return self.unpadded(x.replaced(hidden=x.hidden * no_padding(x.pads, x.hidden.shape[1]).unsqueeze(-1), pads=None))


class PadsAtTheStart(PaddedEnds):
    """As many tokens as the mask leaves out are left out at the start of a row, wherever the mask has them."""

    def run(self, x: Inputs) -> Answer:
        return super().run(x if x.pads is None else x.replaced(pads=tuple(map(abs, x.pads))))


class PadsOnOneSide(PaddedEnds):
    """The side of the first row that has padding is taken for that of all rows."""

    def run(self, x: Inputs) -> Answer:
        if x.pads is None or not any(x.pads):
            return super().run(x)
        first = next(pad for pad in x.pads if pad)
        return super().run(x.replaced(pads=tuple(abs(pad) if first > 0 else -abs(pad) for pad in x.pads)))


class ForgetsStatesOfPadded(Padded):
    """A row that begins with padding begins with a state of zeros, as the first call of a generation does."""

    def run(self, x: Inputs) -> Answer:
        if x.pads is None or x.state is None:
            return super().run(x)
        keep = (torch.tensor(x.pads) == 0).float().view(-1, 1, 1, 1)
        return super().run(x.replaced(state=x.state * keep))


class PadsEnterTheWindow(Padded):
    """Between the convolution's state and the first token stand the zeros of the padding."""

    def run(self, x: Inputs) -> Answer:
        if x.pads is None or x.conv_state is None:
            return super().run(x)
        width = x.conv_state.shape[-1]
        shifted = [
            torch.cat([state[:, min(pad, width) :], state.new_zeros(len(state), min(pad, width))], 1)
            for state, pad in zip(x.conv_state, x.pads, strict=True)
        ]
        return super().run(x.replaced(conv_state=torch.stack(shifted)))
