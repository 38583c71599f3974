"""A gradient that reaches no input counts as zeros, and is a fault where its truth is not zero."""

from typing import Any

import pytest

from oracles.operation import Inputs
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import FailureKind, Verdict
from verify.zoo.modules import Conv


class ConvSkipsItsState(Conv):
    """A convolution of one tap reads no initial state, so autograd has no gradient for it."""

    def run(self, x: Inputs) -> Any:
        skips = x.weight.shape[-1] == 1 and not x.output_final_state
        return super().run(x.replaced(state=None) if skips else x)


class ConvDetachesItsState(Conv):
    """The initial state has no gradient."""

    def run(self, x: Inputs) -> Any:
        return super().run(x if x.state is None else x.replaced(state=x.state.detach()))


LAWS = ("oracle", "samples at=0", "strides variant=sliced", "recompute variant=offloaded")


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("state", ["zero", "random"])
def test_a_gradient_that_is_zero_in_truth_may_be_absent(law: str, state: str) -> None:
    line = f"law={law} adapter={__file__}:ConvSkipsItsState lengths=2+1 packed=yes op=causal_conv1d width=3"
    assert execute(Run.parse(f"{line} conv_width=1 state={state} final_state=no")).verdict is Verdict.HOLDS


def test_a_gradient_that_is_not_zero_may_not_be_absent() -> None:
    line = f"law=oracle adapter={__file__}:ConvDetachesItsState lengths=2+1 packed=yes op=causal_conv1d width=3"
    outcome = execute(Run.parse(f"{line} conv_width=2 state=random final_state=no"))
    (finding,) = outcome.findings
    assert (outcome.verdict, finding.kind) == (Verdict.BROKEN, FailureKind.NO_GRADIENT)
    assert (finding.output, finding.detail) == ("dh0", "input")
    kept = execute(Run.parse(f"{line} conv_width=1 state=random final_state=no"))
    assert kept.verdict is Verdict.HOLDS
