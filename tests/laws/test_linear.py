"""Law `linear` of the rules: a factor of -2 is exact but for subnormal numbers, and zero cotangents give exact zeros."""

import functools

import pytest
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.case import ModuleCase
from properties.modules.laws import MODULE_LAWS
from properties.rules.case import Case
from properties.rules.laws import LAWS
from properties.words.example import Example
from tests import right
from tests.faults import different
from verify.bench.adapter_bench import AdapterBench
from verify.bench.places import where
from verify.execution.judge import judge


class Touched(right.Recurrent):
    """A right implementation, but for one output, which goes by the sign of v and not by its size."""

    amount: float | None = None

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        o, state = super().run(x)
        if self.amount is not None:
            o = o.clone()
            o[0, 0, 0, 0] = self.amount if x.v.flatten()[0] > 0 else 0.0
        return o, state


def broken(variant: str, amount: float | None) -> set[str]:
    case = Case.parse("lengths=6 key_dim=4 value_dim=4 gate=10 seed=3")
    adapter = Touched()
    adapter.amount = amount
    pairs = LAWS["linear"].check(AdapterBench(adapter, None, case), Example(case, None, variant))
    judgement = judge(pairs, functools.partial(where, case))
    assert judgement.rows > 20
    return {finding.port for finding in judgement.findings}


def test_a_factor_of_two_is_exact_of_a_right_implementation() -> None:
    assert broken("values", None) == set()
    assert broken("cotangents", None) == set()


def test_what_subnormal_numbers_may_have_gone_into_is_left_out() -> None:
    rows = [(1e-40, set()), (2.0**-110, set()), (2.0**-90, {"o"}), (1e-3, {"o"})]
    assert different(lambda amount: broken("values", amount), rows) == []


class Leaks(right.Recurrent):
    """dq has an offset, which no cotangent explains."""

    _offset = 1e-38

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        q = x.q.clone()
        q.register_hook(lambda gradient: gradient + self._offset)
        return super().run(x.replaced(q=q))


def test_zero_cotangents_give_zeros_however_small_what_else_they_give() -> None:
    case = Case.parse("lengths=6 key_dim=4 value_dim=4 gate=10 seed=3")

    def findings(adapter: right.Recurrent) -> list[str]:
        pairs = LAWS["linear"].check(AdapterBench(adapter, None, case), Example(case, None, "zero_cotangents"))
        return [finding.port for finding in judge(pairs, functools.partial(where, case)).findings]

    assert findings(right.Recurrent()) == []
    assert findings(Leaks()) == ["dq"]


def test_a_convolution_that_returns_no_state_need_not_go_on_from_it() -> None:
    """A palette gives cases the words of others: the law's own draw returns states."""
    law = MODULE_LAWS["recurrent"]
    line = "lengths=5 op=causal_conv1d width=4 conv_width=3 state=random backward=no"
    law.accept(Example(ModuleCase.parse(line), 2))
    with pytest.raises(ValueError, match="final_state=yes"):
        law.accept(Example(ModuleCase.parse(f"{line} final_state=no"), 2))
