"""Right code that rounds in a way of its own is within its bounds: false alarms that the rounding model avoids."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.gates import KDA_GATE
from oracles.operation import Inputs
from oracles.rule import in_chunks
from oracles.rule import scan as in_scan
from oracles.tolerance.bound import Bound, bounds
from properties.rules.case import Case
from tests import right
from tests.judging import evaluate
from tests.over_bounds import broken, limits_of
from tests.right_rules import ScaledState, Transitions
from tests.together import for_each


def of_head(head: int, inputs: Inputs, cotangents: dict[str, Tensor]) -> tuple[Inputs, dict[str, Tensor]]:
    """The call with key head `head` alone, and the value heads that share it."""
    groups = inputs.v.shape[2] // inputs.k.shape[2]
    keys, values = slice(head, head + 1), slice(groups * head, groups * (head + 1))
    tensors = {name: inputs[name][:, :, keys] for name in ("q", "k")}
    tensors |= {name: inputs[name][:, :, values] for name in ("v", "g", "beta") if inputs[name] is not None}
    tensors |= {"state": inputs.state[:, values]} if inputs.state is not None else {}
    return inputs.replaced(**tensors), {"o": cotangents["o"][:, :, values], "final_state": cotangents["final_state"][:, values]}


def test_what_is_stored_once_decayed_errs_by_a_whole_subnormal_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of A, in fp16 as small as 1e-6, decayed and then stored: dA_log of a right kernel was 26 sigma off."""
    case = Case.parse("lengths=15+15 value_heads=4 key_dim=12 value_dim=12 dtype=fp16 gate=10 in_kernel=gate dt_bias=no seed=7")
    inputs, gate = case.inputs(), -2.0
    a_log = torch.full_like(inputs.A_log, math.log(-gate / math.log(2.0)))  # softplus(0) is log 2
    inputs = inputs.replaced(v=inputs.v / 2048, a=torch.zeros_like(inputs.a), A_log=a_log)
    cotangents = {"o": case.cotangents()["o"] / 8, "final_state": torch.zeros(2, 4, 12, 12)}
    off, wrong = torch.zeros(2, 4, dtype=torch.float64)  # of dA_log, what dg errs by times g, right and where it forgets to decay
    total = torch.full((4, 15, 1), gate, dtype=torch.float64).cumsum(1)
    decay = (total - total.mT).tril().exp().tril()
    for row in range(2):
        q, k, v, do = (x[row].double().transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v, cotangents["o"]))
        plain = inputs.beta[row].double().mT.unsqueeze(-1) * (k @ k.mT)
        corrections = (plain * decay).tril(-1).requires_grad_()
        right_side = inputs.beta[row].double().mT.unsqueeze(-1) * v
        unit = torch.eye(15, dtype=torch.float64)
        written = torch.linalg.solve_triangular(unit + corrections, right_side, upper=False, unitriangular=True)
        o = 12**-0.5 * ((q @ k.mT) * decay) @ written
        (gradient,) = torch.autograd.grad(o, corrections, do)
        decayed = gradient.tril(-1) * decay
        for sums, stored in ((off, decayed.half().double()), (wrong, gradient.tril(-1))):
            errors = (stored - decayed) * plain
            sums += gate * (errors.sum(-1) - errors.sum(-2)).flip(-1).cumsum(-1).sum(-1)

    def worst(errors: Tensor = off) -> float:
        limit = bounds(case.spec, inputs, cotangents, "chunkwise", "ieee", 64, 64)["dA_log"]
        return float((errors / limit.allowed).abs().max())

    assert worst() < 0.5
    assert worst(wrong) > 3
    right_one = Arithmetic.stacked

    def left_out(rule: Arithmetic, x: Tensor, places: tuple[str, ...], *more: Any, **named: Any) -> Tensor:
        return x if places[0].endswith("decayed") else right_one(rule, x, places, *more, **named)

    monkeypatch.setattr(Arithmetic, "stacked", left_out)
    assert worst() > 1


@pytest.mark.parametrize("algorithm", ["pointwise", "chunkwise"])
def test_a_sigmoid_below_the_smallest_number_of_float32_may_be_zero(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it a factor of 2^40: da of flash-linear-attention's KDA was up to 9 times its tolerance where values are great."""
    a = torch.tensor([-95.0, -91.0, -88.9, -80.0]).reshape(1, 4, 1, 1)
    inputs = Inputs(a=a, b=torch.zeros(1, 4, 1), A_log=torch.zeros(1), lower_bound=-1.0)
    cotangents = {"g": torch.full_like(a, 2.0**40), "beta": torch.zeros(1, 4, 1)}

    def over(least: float) -> list[bool]:
        """The tokens whose da is over its bound where a float32 sigmoid is zero below `least`."""
        y = torch.sigmoid(a)
        y = y.where(y >= least, 0.0)
        limit = bounds(KDA_GATE, inputs, cotangents, algorithm)["da"]
        error = (-(2.0**40) * y * (1.0 - y)).double() - limit.value
        return (error.norm(dim=-1) > limit.allowed).flatten().tolist()

    assert not any(over(2.0**-126))
    assert over(2.0**-110) == [False, False, False, True]  # which is wrong, since float32 has these numbers
    monkeypatch.setattr(Arithmetic, "flushed", lambda arithmetic, x: x)
    assert any(over(2.0**-126))


def test_exponentials_of_a_gpu_add_up_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is written, a state decays by the same factor chunk after chunk, which may err by 2^-22 of itself."""
    case = Case.parse("lengths=304 key_dim=8 gate=1000 beta=zero values=repeated state=random backward=no seed=4472")
    inputs = case.inputs()
    state = inputs.state.double()
    for row in inputs.g.double().reshape(-1, 16).sum(1):
        state = state * row.exp() * (1.0 + 2.0**-22)

    def over(got: Tensor) -> bool:
        limit = bounds(case.spec, inputs, None, "chunkwise", "tf32", 16, 64)["final_state"]
        return bool(((got - limit.value).norm(dim=-1) > limit.allowed).any())

    forgets_a_token = state * (-inputs.g.double()[:, 0, :, None, None]).exp()
    assert not over(state)
    assert over(forgets_a_token)
    monkeypatch.setattr(in_scan, "DRIFT", 0.0)
    assert over(state)


@pytest.mark.slow
def test_states_that_a_backward_sums_again_drift() -> None:
    """Of a kernel on a GPU dq was over what the recurrence that knows its states allows, and the kernel is right."""
    line = "lengths=462 op=delta_rule heads=3 value_heads=3 key_dim=1 value_dim=1 dtype=bf16 values=scaled seed=63636"
    case = Case.parse(line)
    inputs, cotangents = of_head(0, case.inputs(), case.cotangents())

    @functools.cache
    def gradients(kind: type[right.SumsAgain]) -> tuple[Tensor, ...]:
        q, k = (x.detach().requires_grad_() for x in (inputs.q, inputs.k))
        o, state = kind().run(inputs.replaced(q=q, k=k))
        assert state is not None
        return torch.autograd.grad([o, state], [q, k], [cotangents["o"], cotangents["final_state"]])

    @functools.cache
    def limits_of_one_that(stores: bool) -> dict[str, Bound]:  # noqa: FBT001
        return bounds(case.spec, inputs, cotangents, "recurrent", first=64, stores=stores)

    def worst(kind: type[right.SumsAgain], *, stores: bool) -> float:
        """The greatest error of dq and dk, over their bounds."""
        got, limits = gradients(kind), limits_of_one_that(stores)
        off = {name: (x.double() - limits[name].value).norm(dim=-1) for name, x in zip(("dq", "dk"), got, strict=True)}
        return max(float((error / limits[name].allowed).max()) for name, error in off.items())

    class ReadsAfter(right.SumsAgain):
        reads_after = True

    found = [worst(right.SumsAgain, stores=False), worst(right.SumsAgain, stores=True), worst(ReadsAfter, stores=True)]
    assert found[0] > 1
    assert found[1] < 0.6
    assert found[2] > 3


def test_errors_of_the_recurrence_do_not_cancel_over_the_values_channels() -> None:
    case = Case.parse("lengths=32+92 packed=yes value_heads=8 key_dim=8 gate=tenth values=scaled state=zero seed=38169")
    assert broken(right.Recurrent(), case) == set()


@pytest.mark.slow
def test_what_float64_loses_of_a_gates_gradient_is_no_error_of_a_recurrence() -> None:
    """The last token's dg is 1e-17, what is left of terms of 0.01 in the truth: it may well be 0 there."""
    line = "lengths=57+64+16+3 packed=yes heads=2 value_heads=8 key_dim=64 value_dim=64 dtype=fp16 gate=tenth beta=edges"
    case = Case.parse(f"{line} values=correlated state=random scale=half qk_norm=yes offsets=int32 seed=22985")
    assert broken(right.Recurrent(), case) == set()


class CoarseTransitions(Transitions):
    """Wrong for inputs in float32: the matrices are in bfloat16."""

    def transition(self, matrix: Tensor) -> Tensor:
        return matrix.bfloat16().float()


def test_cotangents_of_w_may_come_from_o_and_from_the_next_state_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel scan has matrices between chunks. Where its cotangents cancel, dbeta was 11 times its tolerance."""
    case = Case.parse("lengths=1x357 packed=yes key_dim=1 value_dim=1 state=random")
    assert broken(Transitions(), case) == set()
    assert "dbeta" in broken(CoarseTransitions(), case)
    whole = Arithmetic.stacked

    def left_out(rule: Arithmetic, x: Tensor, places: tuple[str, ...], *more: Any, **named: Any) -> Tensor:
        return x.clone() if places == in_scan.ERASED else whole(rule, x, places, *more, **named)

    limits_of.cache_clear()
    monkeypatch.setattr(Arithmetic, "stacked", left_out)
    assert broken(Transitions(), case) == {"dbeta"}
    limits_of.cache_clear()


class CoarseScales(ScaledState):
    """Wrong: the gradient of the factor is summed from outputs in bfloat16."""

    def scaled(self, factor: Tensor, x: Tensor) -> Tensor:
        return factor.detach() * x + (factor - factor.detach()) * x.detach().bfloat16().float()


def test_a_gates_gradient_may_come_from_sums_over_the_values_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes before the first token of a sequence, so its dg is 0. There it is what rounding leaves of o do - v dv."""
    case = Case.parse("lengths=1x24 packed=yes key_dim=12 value_dim=64 gate=10 seed=1")
    inputs, cotangents = case.inputs(), case.cotangents()
    v, do = inputs.v.double(), cotangents["o"].double()
    do = do - v * (v * do).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True)  # so that the sums over the keys' channels vanish
    cotangents = {"o": do.float(), "final_state": torch.zeros_like(cotangents["final_state"])}

    def worst(kind: type[ScaledState]) -> float:
        """The greatest error of dg over its bound."""
        g = inputs.g.detach().requires_grad_()
        o, state = kind().run(inputs.replaced(g=g))
        assert state is not None
        (dg,) = torch.autograd.grad([o, state], [g], [cotangents["o"], cotangents["final_state"]])
        limit = bounds(case.spec, inputs, cotangents, "chunkwise", chunk=32, first=64)["dg"]
        return float(((dg.double() - limit.value).abs() / limit.allowed).max())

    assert worst(ScaledState) < 0.5
    assert worst(CoarseScales) > 100
    whole = Arithmetic.stacked

    def left_out(rule: Arithmetic, x: Tensor, places: tuple[str, ...], *more: Any, **named: Any) -> Tensor:
        return x.clone() if places == in_chunks.OF_VALUES else whole(rule, x, places, *more, **named)

    monkeypatch.setattr(Arithmetic, "stacked", left_out)
    assert worst(ScaledState) > 1.5


class AddsTokens(right.Chunkwise):
    """The tokens of a chunk are added to the state one after another."""

    def onto(self, state: Tensor, k: Tensor, decayed: Tensor) -> Tensor:
        for key, value in zip(k.unbind(1), decayed.unbind(1), strict=True):
            state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        return state


class StatesInHalf(AddsTokens):
    """Wrong for inputs in float32: states are stored in float16 between chunks."""

    def between(self, state: Tensor) -> Tensor:
        return state.half().float()


@pytest.mark.slow
def test_what_a_chunk_adds_to_a_state_may_round_with_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens repeat, and the correction is small: dg and dq of the first form were 4.9 times their tolerance, o of both over it."""
    case = Case.parse("lengths=1848 key_dim=7 value_dim=12 gate=1000 values=repeated state=zero seed=5")
    assert broken(AddsTokens(), case) == broken(Transitions(), case) == set()
    assert {"o", "dg"} <= broken(StatesInHalf(), case)
    limits_of.cache_clear()
    monkeypatch.setattr(in_scan, "DRIFT", 0.0)
    assert {"o", "dq", "dg"} <= broken(AddsTokens(), case)
    assert {"o", "dg"} <= broken(Transitions(), case)
    limits_of.cache_clear()


class ScaledInHalf(ScaledState):
    """Wrong for inputs in float32: what a token reads of the state is in float16."""

    def scaled(self, factor: Tensor, x: Tensor) -> Tensor:
        return (factor * x).half().float()


@for_each(
    ("line", "name", "left_out", "output"),
    [
        # What a token reads of dS
        ("lengths=1001 key_dim=16 value_dim=8 gate=forever beta=one state=random", "SINGLE", None, "dbeta"),
        ("lengths=1001 key_dim=16 value_dim=8 gate=forever beta=edges state=random seed=6", "DRIFT", 0.0, "dg"),
    ],
)
def test_a_state_drifts_where_each_token_is_added_alike(
    line: str, name: str, left_out: float | None, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are equal, and so are their cotangents. The state and its cotangent are rounded with each."""
    case = Case.parse(line)
    inputs, cotangents = case.inputs(), case.cotangents()
    inputs = inputs.replaced(**{name: inputs[name][:, :1].expand_as(inputs[name]).clone() for name in "qkv"})
    cotangents["o"] = cotangents["o"][:, :1].expand_as(cotangents["o"]).clone()

    def worst(kind: type[ScaledState]) -> float:
        """The greatest error of the output over its bound."""
        got = evaluate(case.spec, lambda x: dict(zip(("o", "final_state"), kind().run(x), strict=True)), inputs, cotangents)[output]
        limit = bounds(case.spec, inputs, cotangents, "chunkwise", chunk=16, first=16)[output]
        return float(((got.double() - limit.value).abs() / limit.allowed).max())

    assert worst(ScaledState) < 0.75
    assert worst(ScaledInHalf) > 10
    monkeypatch.setattr(in_scan, name, left_out)
    assert worst(ScaledState) > 1


class TotalSummedApart(right.Chunkwise):
    """Sums the gates of a chunk once more for its total, in float32, where others take the last cumulative gate."""

    size = chunk = 16

    def cumulative(self, g: Tensor) -> Tensor:
        self.total = functools.reduce(torch.add, g.unbind(-1)).unsqueeze(-1)
        return super().cumulative(g)

    def last(self, total: Tensor) -> Tensor:
        return self.total


class TotalInBfloat16(TotalSummedApart):
    """The same total, stored in bf16."""

    def last(self, total: Tensor) -> Tensor:
        return super().last(total).bfloat16().float()


STRONG = (
    "lengths=34 heads=2 value_heads=4 key_dim=1 value_dim=1 gate=edges beta=edges values=scaled seed=2",
    "lengths=48 key_dim=24 value_dim=7 gate=tenth values=small scale=one seed=1",  # without errors of G_C, 4.6 times the tolerance
)


@pytest.mark.parametrize("more", STRONG)
def test_a_total_gate_may_be_summed_in_another_order_than_the_cumulative_gate(more: str) -> None:
    case = Case.parse(more)
    for implementation in (right.Chunk16(), TotalSummedApart()):
        assert broken(implementation, case) == set(), implementation
    assert broken(TotalInBfloat16(), case) >= {"final_state"}


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
def test_a_total_gate_of_zero_has_no_error_of_its_own(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((70,), operation, gate="forever", state="random")
    limits = limits_of(case, "chunkwise", 16)
    dither = Arithmetic.dither

    def alike(self: Arithmetic, x: Tensor, place: str, bits: int | None = None) -> Tensor:
        return dither(self, x, "G" if place == "G_C" else place, bits)

    monkeypatch.setattr(Arithmetic, "dither", alike)
    again = bounds(case.spec, case.inputs(), case.cotangents(), "chunkwise", chunk=16)
    assert all(torch.equal(limits[name].allowed, again[name].allowed) for name in limits)


class Bf16Inverse(right.Tf32Inverse):
    """The same by products in bf16: three bits too few."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a.bfloat16().float() @ b.bfloat16().float()


@pytest.mark.slow
def test_an_inverse_by_tf32_products_errs_as_its_bound_says() -> None:
    """The case, of a kernel on a GPU, had dk over the bound of float32 products, in its first head, and is right."""
    case = Case.parse(
        "lengths=2+451+107 packed=yes heads=4 value_heads=8 key_dim=24 value_dim=32 dtype=fp16 gate=1000 beta=one values=repeated "
        "state=random scale=one seed=12644"
    )
    x, cotangents = of_head(0, case.inputs(), case.cotangents())
    allowed = {products: bounds(case.spec, x, cotangents, "chunkwise", products, 64, 16)["dk"] for products in ("ieee", "tf32")}

    @functools.cache
    def gradient(kind: type[right.Chunkwise]) -> Tensor:
        k = x.k.detach().requires_grad_()
        o, state = kind().run(x.replaced(k=k))
        assert state is not None
        return torch.autograd.grad([o, state], [k], [cotangents["o"], cotangents["final_state"]])[0]

    def worst(kind: type[right.Chunkwise], products: str) -> float:
        dk = gradient(kind)
        return float(((dk.double() - allowed[products].value).norm(dim=-1) / allowed[products].allowed).max())

    assert worst(right.Tf32Inverse, "ieee") > 1.5 * worst(right.Tf32Inverse, "tf32")
    assert 0.1 < worst(right.Tf32Inverse, "tf32") < 0.8
    assert worst(right.Chunkwise, "tf32") < 0.5


@pytest.mark.slow
def test_an_inverse_by_bf16_products_errs_by_more_than_the_bound_of_tf32() -> None:
    case = Case.parse(
        "lengths=260 heads=2 value_heads=2 key_dim=24 value_dim=32 dtype=fp16 gate=64 beta=one values=repeated state=random seed=2"
    )
    x, cotangents = case.inputs(), case.cotangents()
    allowed = bounds(case.spec, x, cotangents, "chunkwise", "tf32", 64, 16)["dbeta"]

    def worst(kind: type[right.Chunkwise]) -> float:
        beta = x.beta.detach().requires_grad_()
        outputs = kind().run(x.replaced(beta=beta))
        (dbeta,) = torch.autograd.grad([*outputs], [beta], [cotangents["o"], cotangents["final_state"]])
        return float(((dbeta.double() - allowed.value).abs() / allowed.allowed).max())

    assert worst(right.Tf32Inverse) < 0.5
    assert worst(Bf16Inverse) > 1.5
