"""The gated norm of x and a residual: rstd may come from the sum before it is stored, and wrong norms of a sum are rejected."""

import pathlib

import pytest
from torch import Tensor

from oracles.operation import Inputs
from tests import right_modules
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import FailureKind, Verdict

HERE = pathlib.Path(__file__).resolve()
RIGHT = f"{right_modules.__file__}:GatedNormOfTwoSums"


def test_a_norm_of_the_sum_before_it_is_stored_is_right() -> None:
    """With one channel dx is a difference of equal numbers, so what storing the sum changes is all that is left of it."""
    line = "law=oracle adapter={} op=gated_rms_norm lengths=17+17 heads=8 width=1 dtype=bf16 values=great residual=added seed=29153"
    assert execute(Run.parse(line.format(RIGHT))).verdict is Verdict.HOLDS


class NormOfXAlone(right_modules.GatedNormOfTwoSums):
    """rstd is that of x without the residual."""

    def normalised(self, total: Tensor, x: Inputs) -> Tensor:
        return right_modules.norm_of_two_sums(total, x.x.float(), self.eps(x))


class SumInBf16(right_modules.GatedNormOfTwoSums):
    """The sum that backward reads is stored in bf16, whatever the inputs' dtype is."""

    def stored(self, x: Inputs) -> Tensor:
        return super().stored(x).bfloat16().to(x.x.dtype)


class NoProjection(right_modules.GatedNormOfTwoSums):
    """dx keeps the component of dy along the sum."""

    def normalised(self, total: Tensor, x: Inputs) -> Tensor:
        rstd = (self.kept(x).detach().square().mean(-1, keepdim=True) + self.eps(x)).rsqrt()
        return total.float() * rstd


WRONG = {f"{HERE}:{kind.__name__}": outputs for kind, outputs in ((NormOfXAlone, "y"), (SumInBf16, "dx"), (NoProjection, "dx"))}


@pytest.mark.parametrize("width", [1, 24])
def test_a_wrong_norm_of_a_sum_is_rejected(width: int) -> None:
    """By the tolerance that lets rstd and the stored sum differ, also where dx is small."""
    line = f"law=oracle op=gated_rms_norm lengths=9 heads=2 width={width} residual=added seed=3 adapter="
    assert execute(Run.parse(line + RIGHT)).verdict is Verdict.HOLDS
    for adapter, output in WRONG.items():
        findings = {finding.output: finding.kind for finding in execute(Run.parse(line + adapter)).findings}
        assert findings.get(output) is FailureKind.OFF, (adapter, findings)
