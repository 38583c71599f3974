"""Rules that compute their gate and replace softplus(x) by x above a threshold: right ones and wrong ones."""

import torch
from torch import Tensor

from properties.rules.domain import Domain
from verify.zoo.wrong_gates import Stepwise


class LinearFromTwenty(Stepwise):
    """As libraries do: log(1 + exp(-20)) is below the rounding of 20 in float32."""

    domain = Domain(in_kernel=("gate",), dtypes=("fp32",))
    threshold = 20.0

    def soft(self, x: Tensor) -> Tensor:
        return torch.where(x > self.threshold, x, x.clamp(max=self.threshold).exp().log1p())


class PlainLogarithm(LinearFromTwenty):
    """log(1 + exp(x)) without log1p, as released kernels compute it."""

    def soft(self, x: Tensor) -> Tensor:
        return torch.where(x > self.threshold, x, (1.0 + x.clamp(max=self.threshold).exp()).log())


class LinearFromEight(LinearFromTwenty):
    """Wrong by 4e-5 of the gate at 8."""

    threshold = 8.0


class LinearFromTwelve(LinearFromTwenty):
    """Wrong by 5e-7 of the gate at 12, and by 6e-6 of its gradient."""

    threshold = 12.0


class LinearFromFifteen(LinearFromTwenty):
    """Wrong by 2e-8 of the gate at 15 and by 3e-7 of its gradient."""

    threshold = 15.0


class ChosenTooLate(LinearFromTwenty):
    """The branch that is not chosen overflows above 88, and its gradient of infinity times zero is NaN."""

    def soft(self, x: Tensor) -> Tensor:
        return torch.where(x > self.threshold, x, x.exp().log1p())


class NeverLinear(LinearFromTwenty):
    """Infinite above 88."""

    def soft(self, x: Tensor) -> Tensor:
        return x.exp().log1p()


class ExpBelowMinusThree(LinearFromTwenty):
    """softplus(x) is exp(x) below -3, which is 2.5% too large there; and the branch that is not chosen overflows above 88."""

    def soft(self, x: Tensor) -> Tensor:
        return torch.where(x < -3.0, x.exp(), super().soft(x))
