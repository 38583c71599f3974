"""Wrong implementations whose failures do not repeat in each process."""

import itertools
import os
import pathlib
from typing import Any, ClassVar

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


class BreaksInTheEnd(Chunkwise):
    """Call number 130 of a process and all later ones are wrong, so no single line of fewer calls shows it."""

    calls: ClassVar[int] = 0

    def run(self, x: Inputs) -> Any:
        type(self).calls += 1
        o, state = super().run(x)
        return (o + 1, state) if self.calls >= 130 else (o, state)


class BreaksInOneProcess(BreaksInTheEnd):
    """As BreaksInTheEnd, and only if no file of that name is there yet, so that no other process can show it."""

    def run(self, x: Inputs) -> Any:
        if self.calls == 128:
            try:
                pathlib.Path(os.environ["ONE_PROCESS"]).touch(exist_ok=False)
            except FileExistsError:
                type(self).calls = -1000
        return super().run(x)
