"""The KDA layer: equal to a definition written token by token, its gradients gradients, its laws held by right code."""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from oracles import layer as oracle
from oracles.layer import KDA_LAYER, KdaLayer
from oracles.operation import Inputs, gradient_name
from oracles.tolerance.bound import truth
from properties.layers.case import LayerCase
from properties.layers.domain import LayerDomain
from properties.layers.laws import LAYER_LAWS
from properties.words.example import Example
from tests import right_layers
from tests.faults import not_refused
from tests.judging import Results, evaluate, gradcheck, relative, remainders, taylor_order
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict
from verify.zoo import base

LINES = (
    "op=kda_layer lengths=5+0+2 packed=yes value_heads=2 key_dim=3 value_dim=5 hidden=7 conv_bias=yes cached=yes state=random",
    "op=kda_layer lengths=4+4 heads=2 value_heads=2 key_dim=5 value_dim=3 hidden=4 gate=ordinary eps=1e-5 seed=1",
    "op=kda_layer lengths=1 key_dim=4 value_dim=4 hidden=6 cached=yes allow_neg_eigval=yes seed=2",
    "op=kda_layer lengths=6 heads=2 value_heads=2 key_dim=3 value_dim=4 hidden=5 gate=mixed lower_bound=-5 seed=3",
)
LIMIT = 1e-9  # relative to a tensor's largest entry: 3e-12 found, in dA_log


def single(line: str) -> tuple[Inputs, Results]:
    """The inputs and cotangents of a case in float64."""
    case = LayerCase.parse(line)
    inputs = case.inputs()
    wide = {name: x.double() for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return inputs.replaced(**wide), {name: x.double() for name, x in case.cotangents().items()}


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def define(x: Inputs, wrong: str = "") -> Results:
    """The layer by its formulas, one token and one head at a time; `wrong` names a formula that is read wrong."""
    heads, value_heads, keys, values, taps = (
        getattr(x.layer, name) for name in ("heads", "value_heads", "key_dim", "value_dim", "conv_width")
    )
    widths = [heads * keys, heads * keys, value_heads * values, values, values, value_heads]
    channels, tokens = sum(widths[:3]), x.hidden.flatten(0, 1)
    length = x.hidden.shape[1]
    ends = [length * row for row in range(len(x.hidden) + 1)] if x.cu_seqlens is None else x.cu_seqlens.tolist()
    rows, states, lines = [], [], []
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        state = tokens.new_zeros(value_heads, keys, values) if x.state is None else x.state[row]
        line = list((tokens.new_zeros(channels, taps) if x.conv_state is None else x.conv_state[row]).unbind(-1))
        for token in tokens[start:end]:
            projected = x.in_proj @ token
            *_, z, f, b = projected.split(widths)
            z, f = (f, z) if wrong == "gates" else (z, f)
            line.append(projected[:channels])
            mixed = sum(x.conv[:, tap] * line[tap - taps] for tap in range(taps))
            mixed = mixed if x.conv_bias is None else mixed + x.conv_bias
            q, k, v = (mixed * sigmoid(mixed)).split(widths[:3])
            raw = (x.decay_proj @ f).view(value_heads, keys) + x.dt_bias
            speed = x.A_log.exp().unsqueeze(-1)
            bounded = x.get("lower_bound") is not None and wrong != "bound"
            g = x.lower_bound * sigmoid(speed * raw) if bounded else -speed * (1 + raw.exp()).log()
            g = g.mean(-1, keepdim=True).expand_as(g) if wrong == "decay" else g
            beta = sigmoid(b) * (2 if x.allow_neg_eigval else 1)
            gate = (x.gate_proj @ z if wrong == "bias" else x.gate_proj @ z + x.gate_bias).view(value_heads, values)
            gate = gate * sigmoid(gate) if wrong == "silu" else sigmoid(gate)
            outputs, after = [], []
            for head in range(value_heads):
                of_key = head // (value_heads // heads)
                query, key = (part.view(heads, keys)[of_key] for part in (q, k))
                query, key = (part / (part.square().sum() + 1e-6).sqrt() for part in (query, key))
                decayed = g[head].exp().unsqueeze(-1) * state[head]
                seen = state[head] if wrong == "late" else decayed
                after.append(decayed + torch.outer(key, beta[head] * (v.view(value_heads, values)[head] - key @ seen)))
                o = query @ after[-1] / keys**0.5
                outputs.append(x.norm * o / (o.square().mean() + x.eps).sqrt() * gate[head])
            state = torch.stack(after)
            rows.append(x.out_proj @ torch.cat(outputs))
        states.append(state)
        lines.append(torch.stack(line[len(line) - taps :], -1))
    return {"y": torch.stack(rows).reshape(x.hidden.shape), "final_state": torch.stack(states), "conv_state": torch.stack(lines)}


def test_layer_is_its_definition_forward_and_backward() -> None:
    for line in LINES:
        inputs, directions = single(line)
        KDA_LAYER.check(inputs)
        errors = relative(truth(KDA_LAYER, inputs, directions), evaluate(KDA_LAYER, define, inputs, directions))
        assert {"ddecay_proj", "dgate_proj", "dgate_bias", "ddt_bias", "dhidden"} <= errors.keys(), line
        assert max(errors.values()) <= LIMIT, errors


def test_wrong_reading_is_not_the_definition() -> None:
    inputs, directions = single(LINES[0])
    got = truth(KDA_LAYER, inputs, directions)
    for wrong in ["gates", "decay", "bias", "silu", "late"]:
        errors = relative(got, evaluate(KDA_LAYER, functools.partial(define, wrong=wrong), inputs, directions))
        assert errors["y"] > 1e-3, wrong


def test_without_the_lower_bound_it_is_not_the_definition() -> None:
    inputs, directions = single(LINES[3])
    errors = relative(
        truth(KDA_LAYER, inputs, directions), evaluate(KDA_LAYER, functools.partial(define, wrong="bound"), inputs, directions)
    )
    assert min(errors[name] for name in ("y", "dA_log", "ddecay_proj")) > 1e-2


def test_a_lower_bound_leaves_the_memory_that_the_regime_says() -> None:
    for bound, gate, least, most in (
        ("-5", "long", 20, 300),
        ("-5", "ordinary", 0.5, 6),
        ("-1", "long", 100, 1500),
        ("-1", "ordinary", 2.5, 30),
    ):
        x = LayerCase((4,), "kda_layer", value_heads=64, gate=gate, lower_bound=bound).inputs()
        memory = -1 / (x.lower_bound * sigmoid(x.A_log.exp().unsqueeze(-1) * x.dt_bias))
        assert least < float(memory.median()) < most, (bound, gate)
    for case in ("op=gdn_layer lengths=1 lower_bound=-5", "op=kda_layer lengths=1 lower_bound=-2"):
        with pytest.raises(ValueError, match="lower_bound"):
            LayerCase.parse(case)
    with pytest.raises(ValueError, match="lower_bounds must be none for gdn_layer, got -5"):
        LayerDomain(lower_bounds=("-5",))
    assert LayerDomain("kda_layer").outside(LayerCase.parse(LINES[3])) == "lower_bound=-5 is not among none"


@pytest.mark.slow
def test_gradients_are_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, directions = single(LINES[1])
    found, right = remainders(KDA_LAYER, inputs, directions), truth(KDA_LAYER, inputs, directions)
    assert taylor_order(found, right) > 1.9
    for name in ("decay_proj", "gate_proj", "gate_bias", "dt_bias"):
        gradient = gradient_name(name)
        assert taylor_order(found, {**right, gradient: right[gradient] * 2}) < 1.5, gradient
    assert gradcheck(KDA_LAYER, inputs)
    shared = oracle.gates.shared
    monkeypatch.setattr(oracle.gates, "shared", lambda *of: shared(of[0].detach(), *of[1:]) + 0 * of[0])
    with pytest.raises(GradcheckError, match="Jacobian"):
        gradcheck(KDA_LAYER, inputs)


def test_illegal_input_is_refused() -> None:
    inputs = LayerCase.parse(LINES[0]).inputs()
    KDA_LAYER.check(inputs)
    rows = [
        ({"layer": oracle.Layer(7, 1, 2, 3, 5)}, "layer must be a KdaLayer, got Layer"),
        ({"decay_proj": torch.zeros(3, 5)}, "G must be 6 for KdaLayer"),
        ({"gating": "sigmoid"}, "gating is no input of kda_layer, must be None or absent, got 'sigmoid'"),
        ({"lower_bound": 1.0}, "lower_bound must be None or a finite number below 0, got 1.0"),
        ({"gate_bias": torch.zeros(1)}, "gate_bias must have P = 10 like gate_proj"),
        ({"dt_bias": torch.zeros(2, 1)}, "dt_bias must have K = 3|K must be 3 for KdaLayer|state must have K = 1"),
    ]
    patterns = ((changed, f"^({message})") for changed, message in rows)
    assert not_refused(lambda changed: KDA_LAYER.check(Inputs(**{**inputs, **changed})), patterns) == []


def test_lines_of_both_layers_are_of_one_book_and_share_what_both_have() -> None:
    kda = LayerCase.parse(LINES[0])
    gdn = dataclasses.replace(kda, operation="gdn_layer")
    assert str(LayerCase.parse(str(kda))) == str(kda) and str(gdn).startswith("op=gdn_layer ")
    assert isinstance(kda.layer, KdaLayer) and not isinstance(gdn.layer, KdaLayer)
    one, other = kda.inputs(), gdn.inputs()
    for name in ("hidden", "conv", "conv_bias", "A_log", "norm", "out_proj", "state", "conv_state"):
        assert torch.equal(one[name], other[name]), name
    assert LayerDomain().outside(kda) == "op=kda_layer is not gdn_layer"
    assert LayerDomain("kda_layer").outside(gdn) == "op=gdn_layer is not kda_layer"


RIGHT = (f"{base.__file__}:KdaLayered", *(f"{right_layers.__file__}:{name}" for name in ("KdaLayerByMaps", "KdaLayerInSingle")))


def short(example: Example) -> bool:
    """Whether a case has few tokens, because the layers go token by token, and few numbers."""
    case = example.case
    return case.tokens <= 40 and case.tokens * case.value_heads * case.key_dim <= 2**12


@functools.cache
def drawn(law: str) -> list[Example]:
    """A few examples of a law, the same for all right layers."""
    examples: list[Example] = []

    @settings(max_examples=4 if law == "oracle" else 2, phases=[Phase.generate])
    @given(example=LAYER_LAWS[law].draw(LayerDomain("kda_layer")).filter(short))
    def collect(example: Example) -> None:
        examples.append(example)

    collect()
    return examples


@pytest.mark.parametrize("spec", RIGHT, ids=lambda spec: spec.rpartition(":")[2])
@pytest.mark.slow
def test_right_layer_holds_under_every_law(spec: str) -> None:
    for law in LAYER_LAWS:
        verdicts = {str(run): execute(run).verdict for run in (Run(law, spec, example) for example in drawn(law))}
        assert {run for run, verdict in verdicts.items() if verdict not in (Verdict.HOLDS, Verdict.BLIND)} == set()
