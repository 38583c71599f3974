"""Wrong implementations whose failures do not repeat in each process."""

import itertools

from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.zoo.base import Chunkwise


class FailsOnce(Chunkwise):
    """The third call of a process is wrong, as if one in a hundred were."""

    domain = Domain(backward=False)
    wrong = 3

    def __init__(self) -> None:
        self.calls = itertools.count(1)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        return (o + 1 if next(self.calls) == self.wrong else o), state


class FailsFirst(FailsOnce):
    """The first call of a process is wrong, as if something were not set up yet."""

    wrong = 1
