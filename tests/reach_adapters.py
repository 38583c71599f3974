"""Adapters whose implementation is wrong where no case looks: every law holds, and only the reach shows what was not looked at."""

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import softplus

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from tests import reach_library as library
from verify.adapters.base import Adapter


class UnpassedOption(Adapter):
    """The gate of a library that is wrong with `fast`, which the adapter does not pass."""

    algorithm = "pointwise"
    domain = ModuleDomain("gdn_gate", beta=False, backward=False)

    def run(self, x: Inputs) -> Tensor:
        return library.wrapped_gate(x.a, x.A_log, x.dt_bias)


class OmittedOption(UnpassedOption):
    """The same, but the adapter says why it does not pass the option."""

    omits: ClassVar[dict[str, str]] = {"fast": "it rounds elsewhere, and nobody uses it", "floor": "of another operation"}


class PassedOption(UnpassedOption):
    """The same gate with the option, which a law finds."""

    def run(self, x: Inputs) -> Tensor:
        return library.wrapped_gate(x.a, x.A_log, x.dt_bias, fast=True)


class UnrunLine(UnpassedOption):
    """A gate that is wrong in lines of Python that no case runs."""

    def run(self, x: Inputs) -> Tensor:
        return library.long_gate(x.a, x.A_log, x.dt_bias)


class UnrunBranch(Adapter):
    """The norm of a library that is wrong for rows that are wider than those of any case."""

    algorithm = "pointwise"
    domain = ModuleDomain("l2norm", backward=False)
    api = library.Norm

    def run(self, x: Inputs) -> Tensor:
        return library.Norm(**({} if x.eps is None else {"eps": x.eps}))(x.x)


def own_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None, unused: int = 3) -> Tensor:
    """A function in the adapter's own file."""
    return -A_log.exp() * softplus(a.float() + (0 if dt_bias is None else dt_bias)) * (0 if unused == 0 else 1)


class OwnFunction(Adapter):
    """The implementation is a function of this file."""

    algorithm = "pointwise"
    domain = ModuleDomain("gdn_gate", beta=False, backward=False)

    def run(self, x: Inputs) -> Tensor:
        return own_gate(x.a, x.A_log, x.dt_bias)


class OwnMethod(OwnFunction):
    """The implementation is the adapter itself."""

    def run(self, x: Inputs) -> Tensor:
        return self.gate(x.a, x.A_log, x.dt_bias)

    def gate(self, a: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
        return -A_log.exp() * softplus(a.float() + (0 if dt_bias is None else dt_bias))
