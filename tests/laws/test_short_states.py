"""Convolutions whose states have W - 1 columns, and those that round each product before they add it."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.conv import CAUSAL_CONV1D, CAUSAL_CONV1D_SHORT_STATE, with_oldest, without_oldest
from oracles.tolerance.bound import bounds, truth
from properties.modules.case import ModuleCase
from properties.modules.domain import ModuleDomain
from properties.modules.illegal import MODULE_INPUTS
from properties.words.example import Example
from tests import right_modules
from verify.adapters.loader import load
from verify.adapters.registry import AdapterError
from verify.bench.adapter_bench import AdapterBench
from verify.execution import execute as execute_module
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict

SHORT = "op=causal_conv1d state_columns=W-1"


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple),
    width=st.integers(1, 5),
    state=st.sampled_from(("none", "random")),
    seed=st.integers(0, 2**16),
)
def test_short_states_are_long_ones_without_their_oldest_column(
    lengths: tuple[int, ...], width: int, state: str, seed: int
) -> None:
    case = ModuleCase(
        lengths, "causal_conv1d", packed=True, width=3, conv_width=width, values="whole", bias=True, state=state, seed=seed
    )
    case = dataclasses.replace(case, state_columns="W-1")
    short, cotangents = case.inputs(), case.cotangents()
    got = truth(CAUSAL_CONV1D_SHORT_STATE, short, cotangents)
    long = short if short.state is None else short.replaced(state=with_oldest(short.state))
    want = truth(CAUSAL_CONV1D, long, {**cotangents, "final_state": with_oldest(cotangents["final_state"])})
    assert got["final_state"].shape == (len(lengths), 3, width - 1)
    for name, x in got.items():
        assert torch.equal(x, without_oldest(want[name]) if name in ("final_state", "dh0") else want[name]), name


def test_a_state_of_another_number_of_columns_is_refused() -> None:
    short = ModuleCase.parse(f"lengths=5+5 {SHORT} width=3 state=random").inputs()
    for state, columns in ((with_oldest(short.state), 4), (without_oldest(short.state), 2)):
        with pytest.raises(
            ValueError, match=rf"^state must have W-1 = 3 like weight, got shape \(2, 3, {columns}\) for \[N, D, W-1\]$"
        ):
            CAUSAL_CONV1D_SHORT_STATE.check(short.replaced(state=state))
    with pytest.raises(ValueError, match=r"^state must have W = 4 like weight, got shape \(2, 3, 3\)"):
        CAUSAL_CONV1D.check(short)
    CAUSAL_CONV1D_SHORT_STATE.check(short)
    assert CAUSAL_CONV1D_SHORT_STATE.sizes(short.replaced(state=None)) == {"B": 2, "T": 5, "D": 3, "W": 4, "W-1": 3}


@pytest.mark.parametrize("columns", ["W", "W-1"])
def test_an_illegal_state_lacks_its_oldest_column(columns: str) -> None:
    name = "an initial state without its oldest column"
    domain = ModuleDomain(state_columns=columns, conv_widths=(1, 3))
    case, inputs = MODULE_INPUTS.call(name, domain)  # type: ignore[misc]
    assert domain.outside(case) is None
    with pytest.raises(ValueError, match=r"^state must have W"):
        case.spec.check(inputs)
    alone = dataclasses.replace(domain, conv_widths=(1,))
    lacking = "an initial state with columns is unsupported"
    assert (MODULE_INPUTS.call(name, alone) == lacking) is (columns == "W-1")


def test_a_law_that_runs_short_and_long_states_in_turn_gets_the_truth_of_each() -> None:
    """The inputs of a call without a state are the same, and a remembered truth must be that of the right contract."""
    cases = [ModuleCase.parse(f"lengths=5 op=causal_conv1d width=3 state_columns={columns}") for columns in ("W", "W-1")]
    for case in (*cases, *cases):
        bench = AdapterBench(right_modules.ConvRolls(), None, case)  # type: ignore[arg-type]
        inputs, cotangents = bench.call(case)
        assert bench.truth(inputs, None)["final_state"].shape[-1] == case.columns
        assert bench.bounds(inputs, cotangents)["final_state"].value.shape[-1] == case.columns


# A promise: each product is rounded


class RoundsToEightBits(right_modules.ConvRoundsProducts):
    """Products are rounded to bfloat16, whatever the inputs' dtype is."""

    def terms(self, window: Tensor, weight: Tensor) -> Tensor:
        return (window.float() * weight.float()).bfloat16().float()


class RoundsWeights(right_modules.ConvRoundsProducts):
    """In half precision, weights lose their last four bits, and products are rounded."""

    def terms(self, window: Tensor, weight: Tensor) -> Tensor:
        coarse = weight if weight.dtype == torch.float32 else (weight.view(torch.int16) & ~15).view(weight.dtype)
        return super().terms(window, coarse)


class ForgetsToSay(right_modules.ConvRoundsProducts):
    """It rounds products and does not say so."""

    rounds_products = False


def verdicts(adapter: Any, dtype: str, monkeypatch: pytest.MonkeyPatch, seeds: range = range(40)) -> list[Verdict]:
    """The law `oracle` on wide convolutions of one token, in which some sums cancel."""
    monkeypatch.setattr(execute_module, "adapter_of", lambda spec: adapter)
    lines = [f"lengths=1 {SHORT} width=100 dtype={dtype} state=random backward=no seed={seed}" for seed in seeds]
    return [execute(Run("oracle", "tests/right_modules.py:ConvRolls", Example(ModuleCase.parse(line)))).verdict for line in lines]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.slow_after_first
def test_who_rounds_products_holds_if_it_says_so_and_only_then(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*verdicts(right_modules.ConvRoundsProducts(), dtype, monkeypatch)} == {Verdict.HOLDS}
    assert verdicts(ForgetsToSay(), dtype, monkeypatch).count(Verdict.BROKEN) >= 5


@pytest.mark.parametrize(
    ("wrong", "dtype"), [(RoundsToEightBits, "fp32"), (RoundsToEightBits, "fp16"), (RoundsWeights, "bf16"), (RoundsWeights, "fp16")]
)
@pytest.mark.slow_after_first
def test_the_promise_explains_no_coarser_rounding(wrong: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Verdict.BROKEN in verdicts(wrong(), dtype, monkeypatch)


def test_only_the_promise_widens_a_tolerance() -> None:
    for dtype, wider in (("fp32", False), ("bf16", True), ("fp16", True)):
        case = ModuleCase.parse(f"lengths=9+9 {SHORT} dtype={dtype} state=random backward=no seed=4")
        plain, more = (bounds(case.spec, case.inputs(), None, "pointwise", rounds_products=flag) for flag in (False, True))
        assert torch.equal(plain["final_state"].allowed, more["final_state"].allowed), "states are copies"
        ratio = float((more["y"].allowed / plain["y"].allowed).median())
        assert (1.2 < ratio < 4) if wider else (0.8 < ratio < 1.5), (dtype, ratio)
    assert torch.equal(plain["y"].allowed, bounds(case.spec, case.inputs(), None, "pointwise")["y"].allowed)


def test_a_convolution_with_backward_cannot_promise_it(tmp_path: Any) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("from tests.right_modules import ConvInSteps\nclass Says(ConvInSteps):\n    rounds_products = True\n")
    with pytest.raises(AdapterError, match="rounds_products must be False unless its domain is a convolution with backward=False"):
        load(f"{kernel}:Says")


def test_rows_of_no_numbers_are_right() -> None:
    """W = 1: the states have no columns, so there is nothing in which a final state could be wrong."""
    run = Run.parse(
        f"law=oracle adapter=tests/right_modules.py:ConvRolls lengths=3+3 {SHORT} conv_width=1 state=random backward=no"
    )
    assert execute(run).verdict is Verdict.HOLDS
