"""Rules that compute gate or beta themselves: their oracle is the gates' and then the rule's, by definition; cases of them."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from oracles.operation import Inputs
from oracles.operations import RULES
from oracles.rule.gated_delta import definition, in_kernel
from oracles.tolerance import bound
from properties.rules.case import IN_KERNEL, Case
from tests import wrong_backward
from tests.judging import gradcheck, remainders, taylor_order
from verify.zoo import wrong_gates as zoo

torch.set_num_threads(1)
LINES = [
    f"op={rule} lengths=5+0+3 packed=yes heads=2 value_heads=4 key_dim=3 value_dim=2 state=random {more} in_kernel={inside}"
    for rule, inside in itertools.product(RULES, IN_KERNEL[1:])
    if rule != "delta_rule" or inside == "beta"
    for more in (
        "gate=64 beta=two",
        "gate=mixed beta=edges dt_bias=no scale=half qk_norm=yes dtype=bf16",
        "gate=saturated beta=zero",
    )
]


def plain(x: Inputs, rule: str) -> dict[str, Tensor]:
    """o and the final state by formulas written out here, a head and sequence at a time, in float64."""
    g, beta = x.g, x.beta
    if x.get("a") is not None:
        raw = x.a if x.dt_bias is None else x.a + x.dt_bias
        speed = x.A_log.exp()
        g = -(speed.unsqueeze(-1) if rule == "kda" else speed) * torch.log1p(raw.exp())
    if x.get("b") is not None:
        beta = 1 / (1 + (-x.b).exp()) * (2 if x.allow_neg_eigval else 1)
    heads, group = x.v.shape[2], x.v.shape[2] // x.q.shape[2]
    q, k = x.q, x.k
    if x.qk_norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
    rows, states = [], []
    for row, (start, end) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
        outs, ends = [], []
        for head in range(heads):
            decay = torch.zeros(end - start) if g is None else g[0, start:end, head]
            o, state = definition(
                q[0, start:end, head // group],
                k[0, start:end, head // group],
                x.v[0, start:end, head],
                decay.double(),
                beta[0, start:end, head],
                x.state[row, head],
                scale,
            )
            outs.append(o)
            ends.append(state)
        rows.append(torch.stack(outs, 1))
        states.append(torch.stack(ends))
    return {"o": torch.cat(rows).unsqueeze(0), "final_state": torch.stack(states)}


def far(case: Case, truth: dict[str, Tensor]) -> dict[str, float]:
    """How far each output and gradient of a truth is from the formulas', relative to its largest entry."""
    inputs, cotangents = case.inputs(), case.cotangents()
    names = [port.name for port in case.spec.inputs if inputs[port.name] is not None]
    leaves = {name: inputs[name].double().requires_grad_() for name in names}
    want = plain(inputs.replaced(**leaves), case.operation)
    back = [cotangents[name].double() for name in want]
    gradients = torch.autograd.grad(list(want.values()), list(leaves.values()), back, allow_unused=True)
    whole = {**want, **{f"d{'h0' if name == 'state' else name}": g for name, g in zip(names, gradients, strict=True)}}
    return {
        name: float((truth[name] - value.detach()).abs().max() / value.detach().abs().max().clamp(min=1e-30))
        for name, value in whole.items()
        if value is not None
    }


def test_oracle_is_the_gates_formula_and_then_the_definition() -> None:
    for line in LINES:
        case = Case.parse(line)
        truth = bound.truth(case.spec, case.inputs(), case.cotangents())
        assert set(truth) == {port.name for port in (*case.spec.outputs, *case.spec.gradients()) if port.name in truth}, line
        errors = far(case, truth)
        assert set(errors) >= {"o", "final_state", "dq", "dk", "dv", "dh0"}, line
        assert {name: error for name, error in errors.items() if error > 1e-12} == {}, line


def test_a_wrong_gate_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse(LINES[0])
    monkeypatch.setattr("oracles.gates.softplus", lambda x: torch.nn.functional.softplus(x, threshold=0.5))
    in_kernel.cache_clear()
    errors = far(case, bound.truth(case.spec, case.inputs(), case.cotangents()))
    assert errors["o"] > 1e-6
    in_kernel.cache_clear()


# Gradients


def raw(rule: str, inside: str, lengths: str = "5+0+3", value_heads: int = 4) -> Case:
    """A call whose queries and keys are normalised inside, with what else is computed there."""
    shape = f"lengths={lengths} packed=yes heads={value_heads // 2} value_heads={value_heads} key_dim=2 value_dim=2"
    return Case.parse(f"op={rule} {shape} gate=10 beta=ordinary state=random qk_norm=yes in_kernel={inside} seed=3")


INSIDE = [
    (rule, inside) for rule, inside in itertools.product(RULES, IN_KERNEL) if rule != "delta_rule" or inside in ("none", "beta")
]
BACKWARD = [
    (rule, inside, wrong)
    for rule, inside in (("delta_rule", "beta"), ("gated_delta_rule", "both"), ("kda", "both"))
    for wrong in ("norm", "state", "sigmoid", *(("softplus", "parameter") if inside == "both" else ()))
]


def test_taylor_remainders_of_the_truth_are_of_second_order() -> None:
    for rule, inside in INSIDE:
        case = raw(rule, inside)
        inputs, cotangents = case.inputs(), case.cotangents()
        right, found = bound.truth(case.spec, inputs, cotangents), remainders(case.spec, inputs, cotangents)
        assert taylor_order(found, right) > 1.9, (rule, inside)
        for gradient in (port.name for port in case.spec.gradients() if port.name in right):
            assert taylor_order(found, {**right, gradient: right[gradient] * 1.1}) < 1.5, gradient


def test_taylor_remainders_reject_a_wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule, inside, wrong in BACKWARD:
        case = raw(rule, inside)
        inputs, cotangents = case.inputs(), case.cotangents()
        found = remainders(case.spec, inputs, cotangents)
        with monkeypatch.context() as patch:
            patch.setattr(*wrong_backward.WRONG[wrong])
            assert taylor_order(found, bound.truth(case.spec, inputs, cotangents)) < 1.5, (rule, wrong)


def test_gradcheck_accepts_every_input() -> None:
    for rule, inside in INSIDE:
        case = raw(rule, inside)
        assert gradcheck(case.spec, case.inputs()), (rule, inside)


def test_gradcheck_rejects_a_wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule, inside, wrong in BACKWARD:
        case = raw(rule, inside, "2", 2)
        assert gradcheck(case.spec, case.inputs()), rule
        with monkeypatch.context() as patch:
            patch.setattr(*wrong_backward.WRONG[wrong])
            with pytest.raises(GradcheckError, match="Jacobian"):
                gradcheck(case.spec, case.inputs())


# Cases


def test_contract_refuses_what_the_call_does_not_take() -> None:
    case = Case((4,), in_kernel="both", value_heads=2)
    inputs = case.inputs()
    case.spec.check(inputs)
    assert inputs.g is None and inputs.beta is None
    with pytest.raises(ValueError, match="b must be a tensor, got NoneType"):
        case.spec.check(inputs.replaced(b=None))
    with pytest.raises(ValueError, match="beta is no input of gated_delta_rule with its gate and beta in the kernel"):
        case.spec.check(inputs.replaced(beta=inputs.b))
    with pytest.raises(ValueError, match=r"A_log must have HV = 2 .* got shape \(3,\)"):
        case.spec.check(inputs.replaced(A_log=torch.zeros(3)))
    with pytest.raises(ValueError, match="allow_neg_eigval must be True or False, got 1"):
        case.spec.check(inputs.replaced(allow_neg_eigval=1))
    with pytest.raises(ValueError, match="gate must be False for delta_rule"):
        in_kernel("delta_rule", gate=True, beta=False)
    with pytest.raises(ValueError, match=r"rule must be one of .* got 'conv'"):
        in_kernel("conv", gate=True, beta=False)
    with pytest.raises(ValueError, match="in_kernel must be none or beta for op=delta_rule"):
        Case((4,), operation="delta_rule", in_kernel="gate")
    with pytest.raises(ValueError, match="values=one_hot needs in_kernel=none"):
        Case((4,), values="one_hot", beta="one", in_kernel="beta")


def test_gates_in_the_kernel_have_the_memories_of_given_ones() -> None:
    tokens = {"1000": 1000, "64": 64, "10": 10, "tenth": 0.1}
    for gate in ["forever", "1000", "64", "10", "tenth", "saturated", "mixed"]:
        case = Case((400,), value_heads=6, gate=gate, in_kernel="gate", dtype="bf16")
        inputs = case.inputs()
        g = -inputs.A_log.exp() * torch.nn.functional.softplus(inputs.a.float() + inputs.dt_bias)
        memory = -1 / g.mean((0, 1))
        if gate in tokens:
            assert tokens[gate] / 3 < memory.min() and memory.max() < 3 * tokens[gate], memory
        elif gate == "forever":
            assert memory.min() > 1e30, gate
        elif gate == "mixed":
            assert memory.max() > 1e30 and memory.min() < 0.3, gate
        else:
            assert (g < -1000).any() and (g > -1e-6).any() and not ((g < -1e-6) & (g > -1000)).any(), gate


def test_betas_in_the_kernel_reach_their_ends() -> None:
    for beta, least, most in (("zero", 0, 1e-12), ("one", 1 - 1e-12, 1), ("two", 1.5, 2), ("ordinary", 0.9, 1)):
        inputs = Case((300,), beta=beta, in_kernel="beta", dtype="bf16").inputs()
        got = (2 if inputs.allow_neg_eigval else 1) * inputs.b.double().sigmoid()
        assert least <= got.max() <= most, beta


def test_right_rules_of_the_zoo_have_gates_in_the_kernel() -> None:
    for kind in (zoo.Stepwise, zoo.StepwiseKda, zoo.StepwiseDelta):
        assert "both" in kind.domain.in_kernel or kind.domain.operation == "delta_rule"
