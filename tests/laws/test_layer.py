"""The GDN layer is its definition, its gradients gradients, its bounds sound and sharp, and released code lies within them.

The definition here is one token of one sequence at a time, head by head, in plain torch; `Reading` says how it can be read wrong.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from oracles import sharding
from oracles.arithmetic.rounding import Arithmetic
from oracles.layer import GDN_LAYER, Layer
from oracles.norm import EPS
from oracles.operation import Inputs, gradient_name, sequences
from oracles.tolerance import evaluation
from oracles.tolerance.bound import Bound, bounds, truth
from tests import judging, right, wrong_backward
from tests.faults import not_refused
from tests.judging import Implementation, Results, gradcheck, relative, remainders, taylor_order
from verify.adapters.fla import decorating_later

SLOW_FIXTURES = ("qwen",)
QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
evaluate, worst = (functools.partial(function, GDN_LAYER) for function in (judging.evaluate, judging.worst))
TENSORS = tuple(port.name for port in GDN_LAYER.inputs)
PARAMETERS = ("in_proj", "conv", "conv_bias", "A_log", "dt_bias", "norm", "out_proj")
NAMES = ("q", "k", "v", "z", "b", "a")


# Calls


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform in (-1, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the layer: structure and options, and a seed for its numbers. `small` is the size of v before the convolution."""

    layer: Layer
    lengths: tuple[int, ...]
    packed: bool = False
    bias: bool = True
    state: bool = True
    conv_state: bool = True
    eps: float | None = None
    allow_neg_eigval: bool = False
    small: float = 1.0
    seed: int = 0

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """In `dtype`, and in float32 where a port says so even of half-precision calls."""
        layer, count = self.layer, len(self.lengths)
        make = functools.partial(rand, torch.Generator().manual_seed(self.seed))
        channels, width = layer.offsets()["z"], layer.sections["v"]
        sizes = torch.ones(sum(layer.sections.values()), 1, dtype=torch.float64)
        sizes[layer.offsets()["v"] : layer.offsets()["z"]] = self.small
        values = {
            "hidden": make(*self.batch, layer.hidden),
            "in_proj": make(len(sizes), layer.hidden) * sizes * (3 / layer.hidden) ** 0.5,
            "conv": make(channels, layer.conv_width),
            "conv_bias": 0.5 * make(channels) * self.small if self.bias else None,
            "A_log": 2 * make(layer.value_heads),
            "dt_bias": 3 * make(layer.value_heads),
            "norm": 2 * make(layer.value_dim),
            "out_proj": make(layer.hidden, width) * (3 / width) ** 0.5,
            "state": make(count, layer.value_heads, layer.key_dim, layer.value_dim) * self.small if self.state else None,
            "conv_state": make(count, channels, layer.conv_width) if self.conv_state else None,
        }
        return Inputs(
            layer=layer,
            **{port.name: cast(values[port.name], dtype, port.dtype) for port in GDN_LAYER.inputs},
            cu_seqlens=torch.tensor([0, *itertools.accumulate(self.lengths)]) if self.packed else None,
            eps=self.eps,
            allow_neg_eigval=self.allow_neg_eigval,
        )

    def cotangents(self, dtype: torch.dtype = torch.float64) -> Results:
        layer, count = self.layer, len(self.lengths)
        make = functools.partial(rand, torch.Generator().manual_seed(self.seed + 2**31))
        values = {
            "y": make(*self.batch, layer.hidden),
            "final_state": make(count, layer.value_heads, layer.key_dim, layer.value_dim),
            "conv_state": make(count, layer.offsets()["z"], layer.conv_width),
        }
        return {port.name: cast(values[port.name], dtype, port.dtype) for port in GDN_LAYER.outputs}

    @property
    def batch(self) -> tuple[int, int]:
        return (1, sum(self.lengths)) if self.packed else (len(self.lengths), max(self.lengths, default=1))


def cast(x: Tensor | None, dtype: torch.dtype, kind: str) -> Any:
    return x if x is None else x.to(torch.float32 if kind in ("fp32", "parameter", "bias") and dtype != torch.float64 else dtype)


# Two value heads a key head, all widths different, an empty sequence and one shorter than the filter between others, and v so
# small that eps matters.
TELLING = Call(
    Layer(10, 2, 4, 5, 3),
    (7, 0, 2, 12),
    packed=True,
    eps=1e-5,
    allow_neg_eigval=True,
    small=0.02,
    seed=3,
)


def calls(narrowest: int = 3) -> st.SearchStrategy[Call]:
    layers = st.builds(
        lambda heads, groups, **widths: Layer(heads=heads, value_heads=heads * groups, **widths),
        heads=st.integers(1, 3),
        groups=st.sampled_from((1, 2, 4)),
        hidden=st.integers(narrowest, 12),
        key_dim=st.integers(narrowest, 8),
        value_dim=st.integers(narrowest, 8),
        conv_width=st.integers(1, 5),
    )
    flag = st.booleans()
    shared = {
        "layer": layers,
        "bias": flag,
        "state": flag,
        "conv_state": flag,
        "eps": st.sampled_from((None, 1e-6, 1e-5)),
        "allow_neg_eigval": flag,
        "small": st.sampled_from((1.0, 0.02)),
        "seed": st.integers(0, 2**16),
    }
    packed = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(tuple)
    batched = st.builds(lambda count, length: (length,) * count, st.integers(1, 3), st.integers(0, 10))
    return st.builds(Call, lengths=batched, **shared) | st.builds(Call, lengths=packed, packed=st.just(True), **shared)


# The definition, and how to read it wrong


def identity(x: Tensor) -> Tensor:
    return x


def l2norm(x: Tensor) -> Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def cut_in_order(x: Tensor, layer: Layer, order: tuple[str, ...] = NAMES) -> Results:
    """The sections of in_proj x, which come in this order."""
    parts = x.split([layer.sections[name] for name in order])
    return dict(zip(order, parts, strict=True))


def cut_by_key_head(x: Tensor, layer: Layer) -> Results:
    """The sections of in_proj x, taken as Qwen3-Next's in_proj_qkvz and in_proj_ba."""
    groups, result = layer.value_heads // layer.heads, {}
    for names, part in (("qkvz", x[: layer.offsets()["b"]]), ("ba", x[layer.offsets()["b"] :])):
        widths = {"q": layer.key_dim, "k": layer.key_dim, "v": groups * layer.value_dim, "z": groups * layer.value_dim}
        pieces = part.view(layer.heads, -1).split([widths.get(name, groups) for name in names], 1)
        result |= {name: piece.flatten() for name, piece in zip(names, pieces, strict=True)}
    return result


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the contract is read; the defaults are right."""

    cut: Callable[[Tensor, Layer], Results] = cut_in_order
    convolved_z: bool = False
    flipped: bool = False
    act: Callable[[Tensor], Tensor] = F.silu
    norm: Callable[[Tensor], Tensor] = l2norm
    speed: Callable[[Tensor], Tensor] = torch.exp
    dt_bias: bool = True
    doubled: bool = True
    swapped: bool = False
    scaled: bool = True
    tiled: bool = False
    gate_first: bool = False
    plus_one: bool = False
    eps: Callable[[float], float] = float
    leaks: bool = False
    leaks_conv: bool = False
    late: bool = False
    stores: Callable[[Tensor], Tensor] = identity


WRONG = {
    "sections in another order": Reading(cut=functools.partial(cut_in_order, order=("z", "q", "k", "v", "b", "a"))),
    "z before v": Reading(cut=functools.partial(cut_in_order, order=("q", "k", "z", "v", "b", "a"))),
    "interleaved weights read as concatenated": Reading(cut=cut_by_key_head),
    "the convolution over z too": Reading(convolved_z=True),
    "flipped taps": Reading(flipped=True),
    "no silu after the convolution": Reading(act=identity),
    "no norm of q and k": Reading(norm=identity),
    "no dt_bias": Reading(dt_bias=False),
    "A as its logarithm": Reading(speed=identity),
    "beta not doubled": Reading(doubled=False),
    "beta of a and g of b": Reading(swapped=True),
    "no scale after the norm": Reading(scaled=False),
    "tiles key heads": Reading(tiled=True),
    "gate before the norm": Reading(gate_first=True),
    "weight + 1": Reading(plus_one=True),
    "eps ten times as large": Reading(eps=lambda eps: 10 * eps),
    "state leaks into the next sequence": Reading(leaks=True),
    "the convolution's state leaks into the next sequence": Reading(leaks_conv=True),
    "the convolution's state without the last input": Reading(late=True),
}


def define(x: Inputs, read: Reading = Reading()) -> Results:
    """The layer in the precision of its tensors, one token at a time."""
    layer, width = x.layer, x.layer.conv_width
    groups, eps = layer.value_heads // layer.heads, read.eps(1e-6 if x.eps is None else x.eps)
    tokens, channels = x.hidden.flatten(0, 1), layer.offsets()["z"]
    rows, finals, ends, start = [], [], [], 0
    for sequence, length in enumerate(sequences(x, "hidden")):
        line = [tokens.new_zeros(channels)] * width if x.conv_state is None else list(x.conv_state[sequence].unbind(-1))
        line = line[:-1] + ends[-1][-1:] if read.leaks_conv and ends and len(ends[-1]) else line
        initial = tokens.new_zeros(layer.value_heads, layer.key_dim, layer.value_dim) if x.state is None else x.state[sequence]
        states = list((initial + finals[-1] if read.leaks and finals else initial).unbind(0))
        gates_of_z: list[Tensor] = []
        for token in tokens[start : start + length]:
            part = read.cut(x.in_proj @ token, layer)
            line.append(torch.cat([part["q"], part["k"], part["v"]]))
            taps = range(width)
            mixed = sum((x.conv[:, w] * line[-1 - w if read.flipped else w - width] for w in taps), tokens.new_zeros(channels))
            mixed = read.act(mixed if x.conv_bias is None else mixed + x.conv_bias)
            q, k, v = mixed.split([layer.sections[name] for name in "qkv"])
            gates_of_z.append(part["z"])
            z = part["z"]
            if read.convolved_z:
                seen = [*[torch.zeros_like(z)] * width, *gates_of_z][-width:]
                z = F.silu(sum((x.conv[-len(z) :, w] * seen[w] for w in taps), torch.zeros_like(z)))
            a, b = (part["b"], part["a"]) if read.swapped else (part["a"], part["b"])
            heads = []
            for head in range(layer.value_heads):
                key = head % layer.heads if read.tiled else head // groups
                query, write = (read.norm(vector.view(layer.heads, -1)[key]) for vector in (q, k))
                g = -read.speed(x.A_log[head]) * softplus(a[head] + (x.dt_bias[head] if read.dt_bias else 0.0))
                beta = torch.sigmoid(b[head]) * (2.0 if x.allow_neg_eigval and read.doubled else 1.0)
                decayed = g.exp() * states[head]
                states[head] = decayed + torch.outer(write, beta * (v.view(layer.value_heads, -1)[head] - write @ decayed))
                o = read.stores((query @ states[head]) * (layer.key_dim**-0.5 if read.scaled else 1.0))
                gate = F.silu(z.view(layer.value_heads, -1)[head])
                o = o * gate if read.gate_first else o
                o = (x.norm + 1.0 if read.plus_one else x.norm) * o / (o.square().mean() + eps).sqrt()
                heads.append(o if read.gate_first else o * gate)
            rows.append(x.out_proj @ torch.cat(heads))
        finals.append(torch.stack(states))
        ends.append(line[-width - 1 : -1] if read.late and length else line[-width:])
        start += length
    y = torch.stack(rows) if rows else tokens @ x.out_proj.new_zeros(layer.hidden, layer.hidden)
    return {
        "y": y.reshape(x.hidden.shape),
        "final_state": torch.stack(finals) if finals else tokens.new_zeros(0, layer.value_heads, layer.key_dim, layer.value_dim),
        "conv_state": torch.stack([torch.stack(end, -1) for end in ends]) if ends else tokens.new_zeros(0, channels, width),
    }


# The oracle is the definition

# Largest error of a tensor / its largest entry, 1,500 calls of three or more channels measured: outputs 1.9e-14, gradients 1e-13,
# but 3e-10 where the only head's decays hardly matter, so that dA_log and ddt_bias are what is left of sums that cancel.
LIMITS = {"y": 1e-13, "final_state": 1e-13, "conv_state": 1e-13, "dA_log": 1e-8, "ddt_bias": 1e-8}
GRADIENT_LIMIT = 5e-13
# Rows against 2^-29 (float32 to float64) of what `bounds` allows float32 there, 600 calls of all widths measured: 4.7. That follows
# the conditioning wherever it goes: of a single channel the norms leave nothing but eps.
ROW_LIMIT = 12.0


def over(got: Results, want: Results) -> dict[str, float]:
    """The tensors of `got` that are further from `want` than their limit, with their relative errors."""
    return {name: error for name, error in relative(got, want).items() if not error <= LIMITS.get(name, GRADIENT_LIMIT)}


def in_single(limits: dict[str, Bound], exact: Results) -> dict[str, Bound]:
    """The float64 truth, and ROW_LIMIT times 2^-29 of what float32 may err."""
    return {name: Bound(exact[name], limit.allowed * ROW_LIMIT * 2.0**-29) for name, limit in limits.items()}


def of_outputs(limits: dict[str, Bound]) -> dict[str, Bound]:
    """Without gradients: what is over these is over all."""
    return {port.name: limits[port.name] for port in GDN_LAYER.outputs}


@functools.cache
def telling(dtype: torch.dtype = torch.float64) -> tuple[Inputs, Results, Results]:
    """The telling call, its cotangents and its truth."""
    inputs, directions = TELLING.inputs(dtype), TELLING.cotangents(dtype)
    return inputs, directions, truth(GDN_LAYER, inputs, directions)


@functools.cache
def telling_bounds(dtype: torch.dtype, algorithm: str) -> dict[str, Bound]:
    inputs, directions, _ = telling(dtype)
    return bounds(GDN_LAYER, inputs, directions, algorithm)


@settings(max_examples=15)
@given(call=calls())
@example(call=TELLING)
@example(call=Call(Layer(6, 1, 1, 3, 4), (0, 0), packed=True, state=False, conv_state=False))
@example(call=Call(Layer(6, 1, 2, 3, 4), (0, 0)))
@example(call=Call(Layer(6, 1, 2, 3, 4), ()))
@example(call=Call(Layer(4, 2, 4, 4, 3, 5), (1, 1, 1), bias=False, state=False, conv_state=False, eps=1e-6))
@pytest.mark.slow
def test_layer_is_its_definition_forward_and_backward(call: Call) -> None:
    inputs, directions = call.inputs(), call.cotangents()
    GDN_LAYER.check(inputs)
    assert over(truth(GDN_LAYER, inputs, directions), evaluate(define, inputs, directions)) == {}


@settings(max_examples=4)
@given(call=calls(narrowest=1))
@example(call=TELLING)
@example(call=Call(Layer(1, 1, 1, 1, 1, 1), (12,), bias=False, state=False, conv_state=False, seed=1))
@example(call=Call(Layer(2, 2, 4, 4, 1, 1), (5, 0), packed=True, eps=1e-5, allow_neg_eigval=True, conv_state=False, seed=62))
@example(call=Call(Layer(6, 1, 2, 3, 4), ()))
@example(call=Call(Layer(3, 1, 1, 3, 7), (2, 10, 3), packed=True, state=False, conv_state=False, small=0.02, seed=150))
@pytest.mark.slow
def test_every_row_is_that_of_the_definition_as_closely_as_the_call_is_conditioned(call: Call) -> None:
    inputs, directions = call.inputs(), call.cotangents()
    limits = in_single(bounds(GDN_LAYER, inputs, directions, "chunkwise"), truth(GDN_LAYER, inputs, directions))
    assert worst(limits, evaluate(define, inputs, directions))[0] <= 1.0


@pytest.mark.slow
def test_wrong_reading_is_not_the_definition() -> None:
    inputs, directions, got = telling()
    limits = in_single(telling_bounds(torch.float64, "chunkwise"), got)
    assert over(got, evaluate(define, inputs, directions)) == {}
    outputs = of_outputs(limits)
    for wrong, read in WRONG.items():
        results = define(inputs, read)
        assert max(relative({name: got[name] for name in results}, results).values()) > 0.1, wrong
        assert worst(outputs, results)[0] > 1e6, wrong


def test_wrong_gradient_is_not_the_definitions() -> None:
    inputs, directions, got = telling()
    want = evaluate(define, inputs, directions)
    for gradient in map(gradient_name, TENSORS):
        largest, wrong = got[gradient].abs().max(), 1 + 10 * LIMITS.get(gradient, GRADIENT_LIMIT)
        off = torch.where(got[gradient].abs() == largest, got[gradient] * wrong, got[gradient])
        assert over({**got, gradient: off}, want).keys() == {gradient}


# Sequences


def added(parts: list[Results], joined: Callable[[str, list[Tensor]], Tensor]) -> Results:
    """The results of several calls as one: gradients of parameters added, the others `joined`."""
    shared = {gradient_name(name) for name in PARAMETERS}
    names = parts[0].keys()
    return {name: (sum if name in shared else functools.partial(joined, name))([part[name] for part in parts]) for name in names}


def separate(inputs: Inputs, directions: Results) -> Results:
    """Every sequence in a call of its own."""
    parts, ends = [], [0, *itertools.accumulate(sequences(inputs, "hidden"))]
    hidden, dy = (x.flatten(0, 1) for x in (inputs.hidden, directions["y"]))
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        one = slice(row, row + 1)
        states = {name: None if inputs[name] is None else inputs[name][one] for name in ("state", "conv_state")}
        call = inputs.replaced(hidden=hidden[None, start:end], cu_seqlens=None, **states)
        parts.append(
            truth(GDN_LAYER, call, {name: direction[one] for name, direction in directions.items()} | {"y": dy[None, start:end]})
        )

    def joined(name: str, tensors: list[Tensor]) -> Tensor:
        shape = inputs.hidden.shape
        return torch.cat([x.flatten(0, 1) for x in tensors]).reshape(shape) if name in ("y", "dhidden") else torch.cat(tensors)

    return added(parts, joined)


@settings(max_examples=25)
@given(call=calls())
@example(call=TELLING)
@pytest.mark.slow
def test_packed_and_batched_equal_separate(call: Call) -> None:
    inputs, directions = call.inputs(), call.cotangents()
    assert over(truth(GDN_LAYER, inputs, directions), separate(inputs, directions)) == {}


def test_one_long_sequence_is_not_two_packed_ones() -> None:
    call = dataclasses.replace(TELLING, lengths=(9, 12), state=False, conv_state=False)
    inputs, directions = call.inputs(), call.cotangents()
    outputs = truth(GDN_LAYER, inputs)
    assert relative({"y": outputs["y"]}, {"y": truth(GDN_LAYER, inputs.replaced(cu_seqlens=None))["y"]})["y"] > 0.1
    assert over(truth(GDN_LAYER, inputs, directions), separate(inputs, directions)) == {}


def halves(inputs: Inputs, directions: Results, at: int, carries: tuple[str, ...] = ("state", "conv_state", "back")) -> Results:
    """Sequences of one length cut before token `at`: states go forward over the cut, their cotangents back."""
    early, late = inputs.hidden.split([at, inputs.hidden.shape[1] - at], 1)
    dearly, dlate = directions["y"].split([at, inputs.hidden.shape[1] - at], 1)
    head = truth(GDN_LAYER, inputs.replaced(hidden=early))
    states = {name: head[of] for name, of in (("state", "final_state"), ("conv_state", "conv_state"))}
    states = {name: state if name in carries else torch.zeros_like(state) for name, state in states.items()}
    tail = truth(GDN_LAYER, inputs.replaced(hidden=late, **states), {**directions, "y": dlate})
    back = {"final_state": tail["dh0"], "conv_state": tail["dconv_state"]}
    back = back if "back" in carries else {name: torch.zeros_like(cotangent) for name, cotangent in back.items()}
    head = truth(GDN_LAYER, inputs.replaced(hidden=early), {"y": dearly, **back})
    ends = {name: tail[name] for name in ("final_state", "conv_state")}
    return (
        added(
            [{name: tail[name] for name in head} if part is tail else head for part in (head, tail)],
            lambda name, tensors: torch.cat(tensors, 1) if name in ("y", "dhidden") else tensors[0],
        )
        | ends
    )


@settings(max_examples=20)
@given(call=calls().filter(lambda call: not call.packed), cut=st.integers(0, 10))
@example(call=Call(Layer(6, 1, 2, 3, 4), (5, 5)), cut=0)
@example(call=Call(Layer(6, 1, 2, 3, 4), (5, 5), state=False, conv_state=False), cut=5)
@example(call=Call(Layer(6, 2, 2, 3, 4, 5), (9,)), cut=2)
@pytest.mark.slow
def test_sequence_may_be_cut_anywhere_if_both_states_are_carried_backward_too(call: Call, cut: int) -> None:
    inputs, directions = call.inputs(), call.cotangents()
    got = halves(inputs, directions, min(cut, call.lengths[0]))
    assert over(got, truth(GDN_LAYER, inputs, directions)) == {}


def test_cut_shows_a_state_that_is_not_carried() -> None:
    call = Call(Layer(10, 2, 4, 5, 3), (9, 9), seed=4)
    inputs, directions = call.inputs(), call.cotangents()
    want = truth(GDN_LAYER, inputs, directions)
    for dropped in ["state", "conv_state", "back"]:
        carried = tuple(name for name in ("state", "conv_state", "back") if name != dropped)
        assert over(halves(inputs, directions, 5), want) == {}, dropped
        wrong = over(halves(inputs, directions, 5, carried), want)
        shown = {"dhidden", "din_proj"} if dropped == "back" else {"y", "dhidden", "din_proj"}
        assert shown <= {name for name, error in wrong.items() if error > 1e-3}, dropped


@pytest.mark.parametrize("call", [TELLING, dataclasses.replace(TELLING, lengths=(6, 6), packed=False)], ids=["packed", "batched"])
def test_absent_argument_is_the_neutral_one_to_the_bit(call: Call) -> None:
    inputs, directions = call.inputs(), call.cotangents()
    for name in ("conv_bias", "state", "conv_state"):
        zeros = torch.zeros_like(inputs[name])
        absent, present = (truth(GDN_LAYER, inputs.replaced(**{name: value}), directions) for value in (None, zeros))
        assert present.keys() - absent.keys() == {gradient_name(name)}
        assert all(torch.equal(absent[key], present[key]) for key in absent)
        assert not torch.equal(absent["y"], truth(GDN_LAYER, inputs)["y"]), "it matters when it is there"
    plain = inputs.replaced(eps=EPS, allow_neg_eigval=False)
    wanted = truth(GDN_LAYER, plain, directions)
    absent = Inputs(**{name: value for name, value in plain.items() if name not in ("eps", "allow_neg_eigval")})
    GDN_LAYER.check(absent)
    for same in (absent, plain.replaced(eps=None)):
        got = truth(GDN_LAYER, same, directions)
        assert all(torch.equal(got[key], wanted[key]) for key in wanted)
    optional = (*[port.name for port in GDN_LAYER.inputs if port.optional], *(() if call.packed else ("cu_seqlens",)))
    without = Inputs(**{name: value for name, value in inputs.items() if name not in optional})
    GDN_LAYER.check(without)
    nothing = inputs.replaced(conv_bias=None, state=None, conv_state=None)
    assert torch.equal(truth(GDN_LAYER, without)["y"], truth(GDN_LAYER, nothing)["y"])


# Gradients


def test_taylor_remainders_of_the_truth_are_of_second_order() -> None:
    call = dataclasses.replace(TELLING, small=1.0)
    inputs, directions = call.inputs(), call.cotangents()
    gradients, found = truth(GDN_LAYER, inputs, directions), remainders(GDN_LAYER, inputs, directions)
    assert taylor_order(found, gradients) > 1.9
    for gradient in (gradient_name(name) for name in TENSORS):
        wrong = {**gradients, gradient: gradients[gradient] * 1.01}
        assert taylor_order(found, wrong) < 1.5, gradient


def test_gradcheck_accepts_every_input() -> None:
    call = Call(Layer(3, 1, 2, 2, 3, 2), (2, 0, 3), packed=True, eps=1e-5, allow_neg_eigval=True, seed=2)
    assert gradcheck(GDN_LAYER, call.inputs())


@functools.cache
def accepted_by_gradcheck() -> Inputs:
    """A small call, which gradcheck accepts as long as no backward is wrong."""
    inputs = Call(Layer(2, 1, 1, 2, 2, 2), (2,), bias=False, conv_state=False, seed=2).inputs()
    assert gradcheck(GDN_LAYER, inputs)
    return inputs


def test_gradcheck_rejects_every_wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = accepted_by_gradcheck()
    for wrong in wrong_backward.WRONG.values():
        with monkeypatch.context() as patch:
            patch.setattr(*wrong)
            with pytest.raises(GradcheckError, match="Jacobian"):
                gradcheck(GDN_LAYER, inputs)


# The bounds


def test_run_0_of_the_disturbed_arithmetic_is_the_truth_and_the_others_are_not() -> None:
    for algorithm, dtype in itertools.product(["chunkwise", "recurrent"], DTYPES):
        inputs, directions, want = telling(DTYPES[dtype])
        got = evaluation.evaluate(GDN_LAYER, inputs, directions, Arithmetic.of(algorithm, dtype, runs=3))
        assert over({name: runs[0] for name, runs in got.items()}, want) == {}, (algorithm, dtype)
        assert {name for name, runs in got.items() if torch.equal(runs[1], runs[0]) or torch.equal(runs[2], runs[1])} == set()


def single(x: Inputs, read: Reading = Reading()) -> Results:
    """The definition in float32, whatever the dtype; only what it returns is stored in it."""
    wide = x.replaced(**{name: x[name].float() for name in TENSORS if x[name] is not None})
    got = define(wide, read)
    return {name: tensor.to(x.hidden.dtype if name != "final_state" else torch.float32) for name, tensor in got.items()}


def stored(x: Inputs, rule: right.Chunkwise | right.Recurrent) -> Results:
    """The layer as models have it: each operation on its own, its result stored in the inputs' dtype."""
    layer, channels, width = x.layer, x.layer.offsets()["z"], x.layer.conv_width
    projected = F.linear(x.hidden, x.in_proj)
    _, _, _, z, b, a = projected.split(tuple(layer.sections.values()), -1)
    tokens, rows, ends, start = projected[..., :channels].flatten(0, 1), [], [], 0
    for sequence, length in enumerate(sequences(x, "hidden")):
        state = tokens.new_zeros(channels, width) if x.conv_state is None else x.conv_state[sequence]
        line = torch.cat([state, tokens[start : start + length].mT], -1)
        if length:
            mixed = F.conv1d(line[None, :, 1:], x.conv.unsqueeze(1), x.conv_bias, groups=channels)
            rows.append(F.silu(mixed[0]).mT)
        ends.append(line[:, -width:])
        start += length
    mixed = torch.cat(rows) if rows else tokens
    keys = layer.heads * layer.key_dim
    q, k, v = mixed.reshape(*x.hidden.shape[:2], channels).split([keys, keys, layer.sections["v"]], -1)
    beta = b.sigmoid()
    o, final = rule.run(
        Inputs(
            q=q.unflatten(-1, (layer.heads, layer.key_dim)),
            k=k.unflatten(-1, (layer.heads, layer.key_dim)),
            v=v.unflatten(-1, (layer.value_heads, layer.value_dim)),
            g=-x.A_log.exp() * F.softplus(a.float() + x.dt_bias),
            beta=2 * beta if x.allow_neg_eigval else beta,
            state=x.state,
            cu_seqlens=x.cu_seqlens,
            scale=None,
            qk_norm=True,
            output_final_state=True,
        )
    )
    assert final is not None
    wide = o.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + (EPS if x.eps is None else x.eps))
    gated = x.norm * normed.to(o.dtype) * F.silu(z.unflatten(-1, (layer.value_heads, layer.value_dim)).float())
    return {"y": F.linear(gated.to(o.dtype).flatten(-2), x.out_proj), "final_state": final, "conv_state": torch.stack(ends)}


RIGHT: dict[str, tuple[str, Implementation]] = {
    "float32 throughout": ("recurrent", single),
    "recurrent": ("recurrent", functools.partial(stored, rule=right.Recurrent())),
    "chunks of 64": ("chunkwise", functools.partial(stored, rule=right.Chunkwise())),
    "chunks of 16": ("chunkwise", functools.partial(stored, rule=right.Chunk16())),
    "rounds elsewhere": ("chunkwise", functools.partial(stored, rule=right.RoundsElsewhere())),
}
SHAPES = (  # few, so that the disturbed runs' grids are made once
    Call(Layer(16, 2, 4, 8, 6), (5, 0, 2, 12), packed=True),
    Call(Layer(24, 1, 2, 16, 16), (40,)),
    Call(Layer(12, 2, 2, 4, 8, 1), (9, 9)),
    Call(Layer(32, 2, 8, 16, 8, 3), (1, 1, 1)),
    Call(Layer(8, 1, 1, 32, 16, 2), (17, 3), packed=True),
)


def drawn(seed: int) -> tuple[str, Call]:
    """A dtype and a call, shapes in turn, options by the seed."""
    coin = torch.randint(0, 2, (5,), generator=torch.Generator().manual_seed(seed), dtype=torch.bool).tolist()
    call = dataclasses.replace(
        SHAPES[seed % len(SHAPES)],
        bias=coin[0],
        state=coin[1],
        conv_state=coin[2],
        allow_neg_eigval=coin[3],
        small=1.0 if coin[4] else 0.02,
        eps=(None, 1e-6, 1e-5)[seed % 7 % 3],
        seed=seed,
    )
    return tuple(DTYPES)[seed // len(SHAPES) % 3], call


def judged(limits: dict[str, Bound], got: Results) -> tuple[float, str]:
    """`worst`, but of finer and finer bounds while it is not clearly over, as a judge does."""
    ratio, name = worst(limits, got)
    finer = {key: limit.finer() for key, limit in limits.items() if limit.finer is not None and 1.0 < ratio < limit.clear}
    return judged(finer, got) if finer else (ratio, name)


@pytest.mark.slow
def test_bounds_hold_for_right_implementations(record_property: Callable[[str, object], None]) -> None:
    found: dict[tuple[str, str], tuple[float, str, int]] = {}
    for seed in range(30):
        dtype, call = drawn(seed)
        algorithm = ("chunkwise", "recurrent")[seed // (3 * len(SHAPES)) % 2]
        inputs, directions = call.inputs(DTYPES[dtype]), call.cotangents(DTYPES[dtype])
        limits = bounds(GDN_LAYER, inputs, directions, algorithm)
        for name, (of, implementation) in RIGHT.items():
            if of == algorithm:
                ratio, where = judged(limits, evaluate(implementation, inputs, directions))
                found[name, dtype] = max(found.get((name, dtype), (0.0, "", 0)), (ratio, where, seed))
    line = "; ".join(f"{name}, {dtype}: {ratio:.2f} ({where}, {seed})" for (name, dtype), (ratio, where, seed) in found.items())
    record_property("error / allowed, layer", line)
    print(f"layer: error / allowed at most {line}")
    assert len(found) == 15
    assert max(ratio for ratio, _, _ in found.values()) <= 1.0, line
    assert min(ratio for ratio, _, _ in found.values()) > 0.01, f"a bound a hundred times too wide: {line}"


@pytest.mark.slow
def test_bound_rejects_every_wrong_reading() -> None:
    for dtype in DTYPES:
        inputs, directions, _ = telling(DTYPES[dtype])
        limits = [telling_bounds(DTYPES[dtype], algorithm) for algorithm in ("chunkwise", "recurrent")]
        got = evaluate(single, inputs, directions)
        assert max(worst(limit, got)[0] for limit in limits) <= 1.0, dtype
        outputs = [of_outputs(limit) for limit in limits]
        for wrong, read in WRONG.items():
            got = single(inputs, read)
            assert min(worst(limit, got)[0] for limit in outputs) > 3.0, wrong


def test_bound_rejects_what_was_stored_in_bfloat16_on_the_way_of_a_float32_call() -> None:
    inputs, directions, _ = telling(torch.float32)
    read = Reading(stores=lambda x: x.bfloat16().float())
    got = evaluate(functools.partial(single, read=read), inputs, directions)
    assert min(worst(telling_bounds(torch.float32, algorithm), got)[0] for algorithm in ("chunkwise", "recurrent")) > 100


def test_bound_rejects_zeros_one_zeroed_row_and_a_shift_by_a_token() -> None:
    for dtype in DTYPES:
        limits = telling_bounds(DTYPES[dtype], "chunkwise")
        exact = {name: limit.value for name, limit in limits.items()}
        assert worst(limits, exact)[0] == 0.0, dtype
        for name, value in exact.items():
            rows = value.unsqueeze(-1) if GDN_LAYER.port(name).scalar_rows else value
            sizes = rows.norm(dim=-1, keepdim=True)
            zeroed = torch.where(sizes == sizes.max(), 0.0, rows).reshape(value.shape)
            token = 1 if GDN_LAYER.port(name).axes.startswith("B T") else 0
            for wrong in (torch.zeros_like(value), zeroed, value.roll(1, token)):
                assert worst(limits, {**exact, name: wrong})[0] > 1.0, name


# Released code

LAYER = Layer(hidden=32, heads=2, value_heads=4, key_dim=8, value_dim=16)


@pytest.fixture(scope="module")
def qwen() -> Iterator[Any]:
    """transformers' Qwen3-Next, its functions those of plain torch: behind their wrappers, which prefer kernels where installed.

    It is imported as if fla were not installed, and without torch's compiler: each would take seconds. Other tests import it anew.
    """
    with pytest.MonkeyPatch.context() as patch, decorating_later():
        patch.setitem(sys.modules, "fla", None)
        module = pytest.importorskip(QWEN, reason="transformers is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "causal_conv1d_fn",
            "causal_conv1d_update",
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
        ):
            function = getattr(module, name)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            patch.setattr(module, name, function)
        yield module
    package, _, name = QWEN.rpartition(".")
    sys.modules.pop(QWEN)
    vars(sys.modules[package]).pop(name)


class Qwen:
    """transformers' layer with the parameters of a call, as an implementation of ours; `spoil` may change the module."""

    def __init__(self, module: Any, layer: Layer, dtype: torch.dtype, eps: float, spoil: Callable[[Any], None] = lambda net: None):
        config = module.Qwen3NextConfig(
            hidden_size=layer.hidden,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=layer.heads,
            linear_num_value_heads=layer.value_heads,
            linear_key_head_dim=layer.key_dim,
            linear_value_head_dim=layer.value_dim,
            linear_conv_kernel_dim=layer.conv_width,
            rms_norm_eps=eps,
        )
        # A_log and dt_bias stay float32 in our contract, whatever the rest is converted to.
        self.net = module.Qwen3NextGatedDeltaNet(config, 0).to(dtype)
        self.net.A_log.data, self.net.dt_bias.data = self.net.A_log.data.float(), self.net.dt_bias.data.float()
        self.cache = lambda: module.DynamicCache(config=config)
        self.layer, self.spoil = layer, spoil

    def load(self, x: Inputs) -> None:
        qkvz, ba = sharding.interleave(self.layer, x.in_proj)
        for parameter, value in (
            (self.net.in_proj_qkvz.weight, qkvz),
            (self.net.in_proj_ba.weight, ba),
            (self.net.conv1d.weight, x.conv.unsqueeze(1)),
            (self.net.A_log, x.A_log),
            (self.net.dt_bias, x.dt_bias),
            (self.net.norm.weight, x.norm),
            (self.net.out_proj.weight, x.out_proj),
        ):
            assert (parameter.shape, parameter.dtype) == (value.shape, value.dtype)
            parameter.data = value.detach().clone()
        self.spoil(self.net)

    def __call__(self, x: Inputs, directions: Results) -> Results:
        """y and every gradient that there is without states; by its own parameters, then laid out as ours."""
        self.load(x)
        net, hidden = self.net, x.hidden.detach().clone().requires_grad_()
        y = net(hidden)
        parameters = dict(net.named_parameters())
        found = torch.autograd.grad(y, [hidden, *parameters.values()], directions["y"])
        of = dict(zip(("hidden", *parameters), found, strict=True))
        assert of.keys() == {"hidden", "A_log", "dt_bias", *(f"{name}.weight" for name in WEIGHTS)}
        return {
            "y": y.detach(),
            "dhidden": of["hidden"],
            "din_proj": sharding.concatenate(self.layer, of["in_proj_qkvz.weight"], of["in_proj_ba.weight"]),
            "dconv": of["conv1d.weight"].squeeze(1),
            "dA_log": of["A_log"],
            "ddt_bias": of["dt_bias"],
            "dnorm": of["norm.weight"],
            "dout_proj": of["out_proj.weight"],
        }

    def prefill(self, x: Inputs, cuts: tuple[int, ...]) -> Results:
        """y and both states after the last token, with the tokens in pieces of these lengths."""
        self.load(x)
        cache = self.cache()
        with torch.no_grad():
            y = torch.cat([self.net(piece, cache_params=cache) for piece in x.hidden.split(cuts, 1)], 1)
        return {
            "y": y,
            "final_state": cache.get_recurrent_state(0, state_idx=0),
            "conv_state": cache.get_conv_state(0, state_idx=0),
        }


WEIGHTS = ("in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj")


def permute_heads(net: Any) -> None:
    net.out_proj.weight.data = net.out_proj.weight.data.roll(net.head_v_dim, 1)


def change_eps(net: Any) -> None:
    net.norm.variance_epsilon *= 10


def flip_taps(net: Any) -> None:
    net.conv1d.weight.data = net.conv1d.weight.data.flip(-1)


def swap_gates(net: Any) -> None:
    net.in_proj_ba.weight.data = net.in_proj_ba.weight.data.unflatten(0, (2, 2, 2)).flip(1).flatten(0, 2)


def of_qwen(dtype: torch.dtype, small: float = 1.0) -> tuple[Inputs, Results]:
    """A call that the layer of transformers can take: a batch, without bias or states; a chunk of 64 tokens and part of another."""
    call = Call(LAYER, (70, 70), bias=False, state=False, conv_state=False, eps=1e-6, small=small, seed=5)
    return call.inputs(dtype), {"y": call.cotangents(dtype)["y"]}


@pytest.mark.slow
def test_layer_of_transformers_lies_within_the_bounds_forward_and_backward(
    qwen: Any, record_property: Callable[[str, object], None]
) -> None:
    for dtype, small in itertools.product(DTYPES, [1.0, 0.02]):
        inputs, directions = of_qwen(DTYPES[dtype], small)
        limits = bounds(GDN_LAYER, inputs, directions, "chunkwise", chunk=64)
        got = Qwen(qwen, LAYER, DTYPES[dtype], 1e-6)(inputs, directions)
        ratio, where = judged({name: limits[name] for name in limits if name not in ("final_state", "conv_state")}, got)
        record_property("error / allowed, transformers", f"{dtype}: {ratio:.2f} ({where})")
        assert 0.01 < ratio <= 1.0, where


def test_bound_rejects_a_wrong_layer_of_transformers(qwen: Any) -> None:
    for dtype in DTYPES:
        inputs, directions = of_qwen(DTYPES[dtype], small=0.02)
        limits = bounds(GDN_LAYER, inputs, None, "chunkwise", chunk=64)
        for spoil in (permute_heads, change_eps, flip_taps, swap_gates):
            got = Qwen(qwen, LAYER, DTYPES[dtype], 1e-6, spoil)(inputs, directions)
            assert worst({"y": limits["y"]}, {"y": got["y"]})[0] > 3.0, spoil.__name__


def test_states_that_transformers_keeps_between_calls_are_ours(qwen: Any) -> None:
    for dtype in DTYPES:
        inputs, _ = of_qwen(DTYPES[dtype])
        limits = bounds(GDN_LAYER, inputs, None, "chunkwise")
        model = Qwen(qwen, LAYER, DTYPES[dtype], 1e-6)
        for cuts in ((70,), (64, 6), (3, 66, 1)):
            assert worst(limits, model.prefill(inputs, cuts))[0] <= 1.0, cuts
        last = model.prefill(inputs.replaced(hidden=inputs.hidden[:, 64:]), (6,))
        y = torch.cat([model.prefill(inputs, (70,))["y"][:, :64], last["y"]], 1)
        assert worst(limits, {**last, "y": y})[0] > 3.0, "states that are not carried"


# Contracts

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layer": None}, r"layer must be a Layer, got NoneType"),
    ({"layer": Layer(10, 2, 4, 5, 3, 3)}, r"W must be 3 for Layer\(.*\), got 4"),
    ({"layer": Layer(11, 2, 4, 5, 3)}, r"D must be 11 for Layer\(.*\), got 10"),
    ({"layer": Layer(10, 1, 4, 5, 3)}, r"E must be 42 for Layer\(.*\), got 52"),
    ({"layer": Layer(10, 1, 4, 10, 3)}, r"K must be 10 for Layer\(.*\), got 5"),
    ({"in_proj": torch.zeros(51, 10)}, r"E must be 52 for Layer\(.*\), got 51"),
    ({"in_proj": torch.zeros(52, 1)}, r"in_proj must have D = 10 like .*, got shape \(52, 1\) for \[E, D\]"),
    ({"hidden": torch.zeros(21, 10)}, r"hidden must have axes \[B, T, D\], got shape \(21, 10\)"),
    ({"hidden": torch.zeros(1, 21, 10, dtype=torch.int64)}, r"hidden must be floating point of 16, 32 or 64 bits, got torch.int64"),
    ({"hidden": None}, r"hidden must be a tensor, got NoneType"),
    ({"conv": torch.zeros(32, 1, 4)}, r"conv must have axes \[C, W\], got shape \(32, 1, 4\)"),
    ({"conv": torch.zeros(44, 4), "conv_bias": None, "conv_state": None}, r"C must be 32 for Layer\(.*\), got 44"),
    ({"conv_bias": torch.zeros(1)}, r"conv_bias must have C = 32 like .*, got shape \(1,\)"),
    ({"A_log": torch.zeros(2), "dt_bias": torch.zeros(2), "state": None}, r"HV must be 4 for Layer\(.*\), got 2"),
    ({"dt_bias": torch.zeros(1)}, r"dt_bias must have HV = 4 like .*, got shape \(1,\)"),
    ({"norm": torch.zeros(12), "state": None}, r"V must be 3 for Layer\(.*\), got 12"),
    ({"out_proj": torch.zeros(10, 3)}, r"P must be 12 for Layer\(.*\), got 3"),
    ({"out_proj": torch.zeros(12, 10)}, r"out_proj must have D = 10 like .*, got shape \(12, 10\)"),
    ({"state": torch.zeros(4, 4, 3, 3)}, r"K must be 5 for Layer\(.*\), got 3"),
    ({"state": torch.zeros(1, 4, 5, 3)}, r"state must have N = 4, one per sequence, got shape \(1, 4, 5, 3\)"),
    ({"conv_state": torch.zeros(1, 32, 4)}, r"conv_state must have N = 4, one per sequence, got shape \(1, 32, 4\)"),
    ({"conv_state": torch.zeros(4, 32, 3)}, r"conv_state must have W = 4 like .*, got shape \(4, 32, 3\)"),
    ({"cu_seqlens": torch.tensor([0, 7, 7, 9, 20])}, r"cu_seqlens must end at the token count 21, got 20"),
    ({"cu_seqlens": torch.tensor([0, 21])}, r"state must have N = 1, one per sequence, got shape \(4, 4, 5, 3\)"),
    ({"cu_seqlens": None}, r"state must have N = 1, one per sequence, got shape \(4, 4, 5, 3\)"),
    ({"cu_seqlens": torch.tensor([0, 21]), "state": None}, r"conv_state must have N = 1, one per .*, got shape \(4, 32, 4\)"),
    ({"cu_seqlens": [0, 7, 7, 9, 21], "state": None}, r"cu_seqlens must be a vector of int32 or int64, got \[0, 7, 7, 9, 21\]"),
    ({"eps": 0.0}, r"eps must be a finite number above 0, got 0.0"),
    ({"allow_neg_eigval": 1}, r"allow_neg_eigval must be True or False, got 1"),
]


def test_illegal_input_is_refused() -> None:
    inputs = TELLING.inputs(torch.float32)
    GDN_LAYER.check(inputs)
    patterns = ((wrong, f"^{message}") for wrong, message in REFUSED)
    assert not_refused(lambda wrong: GDN_LAYER.check(inputs.replaced(**wrong)), patterns) == []


def test_illegal_widths_are_refused() -> None:
    legal = {"hidden": 8, "heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5}
    assert Layer(**legal).sections == {"q": 6, "k": 6, "v": 20, "z": 20, "b": 4, "a": 4}
    rows = [
        ({"value_heads": 3}, r"value_heads must be a multiple of heads 2, got 3"),
        ({"hidden": 0}, r"hidden must be a whole number from 1 up, got 0"),
        ({"heads": True}, r"heads must be a whole number from 1 up, got True"),
        ({"key_dim": 4.0}, r"key_dim must be a whole number from 1 up, got 4.0"),
        ({"conv_width": -1}, r"conv_width must be a whole number from 1 up, got -1"),
    ]
    patterns = ((widths, f"^{message}$") for widths, message in rows)
    assert not_refused(lambda widths: Layer(**{**legal, **widths}), patterns) == []
