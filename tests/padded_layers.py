"""Layers that take a mask beside initial states: one right, and wrong ones that a mask alone, or states alone, do not show."""

import dataclasses

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.zoo.base import Layered

Answer = tuple[Tensor, Tensor | None, Tensor | None]


class Padded(Layered):
    """Not wrong."""

    domain = dataclasses.replace(Layered.domain, padded_states=True)


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
