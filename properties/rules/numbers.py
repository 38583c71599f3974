"""The numbers of a rule's case: how each tensor is made from the words of the line, bit for bit, on every machine.

Every number comes from a counter: splitmix64 of (seed, tensor, position) in wrapping 64-bit integers, scaled by powers of two and
rounded to the tensor's dtype. There are no library random numbers and no transcendental functions, so CPU and GPU give the same
bits, today and after an upgrade (tests/formulas/test_rule_case.py compares with known numbers).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracles.arithmetic.counter import integers, mix_number
from oracles.arithmetic.rounding import BITS
from oracles.operation import DTYPES, Inputs

# A memory of m tokens is a mean log-decay of -1/m, uniform in (-2/m, 0]; the widths 2/m below are powers of two.
MEMORIES = {"forever": 0.0, "1000": 2.0**-9, "64": 2.0**-5, "10": 2.0**-2, "tenth": 2.0**4}
SCALES = {"default": None, "one": 1.0, "half": 0.5}
LOWER_BOUNDS = {"none": None, "-5": -5.0, "-1": -1.0}
SATURATED = -1000.0
RUN = 64  # tokens, so that whole chunks have one regime, and the next one another
RUNS = ("forever", "tenth", "64")
UNDERFLOW, AROUND = -96.0, 32.0  # in float32 exp is subnormal from -87.4 on, and 0 from -104 on
DOUBLINGS = 10  # exp(g) is nearly (1 + g / 1024)^1024
# For a gate in the kernel: softplus is about 0.85, and exp(A_log) times softplus is one over the memory.
A_LOGS = {"forever": -80.0, "1000": -6.75, "64": -4.0, "10": -2.125, "tenth": 2.5, "saturated": 5.0, "thresholds": -2.25}
A_LOGS["overflow"] = A_LOGS["64"]
# With a lower bound, exp(A_log) is about 1, and a is near the argument whose sigmoid is the memory.
BOUNDED = {"forever": -64.0, "1000": -12.0, "64": -8.0, "10": -5.0, "tenth": 4.0}
OVERFLOW = 100.0  # the exponential of over 88.73 is infinite in float32, that of under -87.34 is subnormal
OPEN = 30.0  # sigmoid(30) is 1 in float32; softplus(30) is 30, and softplus(-30) nearly 0
# Arguments of softplus around which libraries and mistakes replace it by its argument, by exp or by 0.
THRESHOLDS = (4.0, 7.0, 9.0, 11.0, 13.0, 16.0, 20.0, 26.0)
LOG_BITS = 16  # bits of A_log's fraction: more than half precision keeps, and exact in float32 after adding any of A_LOGS
SMALL = 2.0**-13  # about 1e-4: there the L2 norm's eps of 1e-6 is no longer negligible
NORM_EPS = {"1e-6": 1e-6, "1e-12": 1e-12, "1e-5": 1e-5}
# In place of SMALL for another norm, by its form and eps. Rows are shorter than the root of eps (with form "max" shorter than eps),
# and longer than a quarter of it. There no other norm of these gives about the same.
SMALL_OF = {
    ("inside", "1e-12"): 2.0**-20,
    ("inside", "1e-5"): 2.0**-9,
    ("max", "1e-6"): 2.0**-20,
    ("max", "1e-12"): 2.0**-40,
    ("max", "1e-5"): 2.0**-17,
}
LEAST_OF_FP16 = 2.0**-9  # smaller results of a projection would not be normal numbers of fp16
LARGE = 2.0**9  # factor for a q and k that are normalised: their squares overflow fp16
# Factors for v. Outputs and gradients are linear in v. In fp16, sums that right implementations store must stay below 65504: with
# 2^8 and narrow keys they do not.
GREAT = {"fp32": 2.0**30, "bf16": 2.0**30, "fp16": 2.0**5}
SINGLE_PARAMETERS = {"fp32": ("A_log", "dt_bias"), "mixed": ("A_log",), "input": ()}  # those in float32
OF_CHANNELS = {"gk": "keys", "gv": "values"}
_NAMES = (
    *("q", "k", "v", "g", "beta", "state", "do", "dht", "base", "choice", "index", "sign", "a", "A_log", "dt_bias", "b"),
    *("gk", "gv"),
)
_STREAMS = {name: index for index, name in enumerate(_NAMES)}
_CHOOSING = {
    "gate": 1,
    "beta": 2,
    "q": 3,
    "k": 4,
    "v": 5,
    "gk": 6,
    "gv": 7,
}  # salts of the draws that choose a regime for each position
SINGLE_BITS = BITS["fp32"]


def small_factor(case: Any) -> float:
    """Return the factor that makes q and k of a layer, which are of the order of 1, nearly as small as their norm's eps or its
    root."""
    factor = SMALL_OF.get((case.qk_norm_form, case.qk_norm_eps), 2.0**-10)
    return max(factor, LEAST_OF_FP16) if case.dtype == "fp16" else factor


def drawn(cases: Sequence[Any], device: str | None = None, *, backward: bool) -> list[tuple[Inputs, dict[str, Tensor] | None]]:
    """Return the inputs and, with `backward`, the cotangents of each case; the same as case by case, with fewer operations."""
    builders = [_Builder(case, device) for case in cases]
    tensors = iter(_tensors([group for build in builders for group in (build.call(), *([build.cotangents()] if backward else []))]))
    return [(build.inputs(next(tensors)), next(tensors) if backward else None) for build in builders]


def cotangents_of(case: Any, device: str | None = None) -> dict[str, Tensor]:
    """Return a random cotangent for every output of a case, in the output's shape and dtype."""
    return _tensors([_Builder(case, device).cotangents()])[0]


@dataclasses.dataclass(frozen=True)
class _Draw:
    """Integers uniform in [-2^(bits-1), 2^(bits-1)), one for each position of a stream.

    `of_tokens` marks draws for the tokens [B, T, ...] of an input, which may repeat each other.
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    of_tokens: bool = False
    salt: int = 0


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How to make a tensor: a function that computes it exactly in float64 from the integers of its draws.

    The function has one argument for each draw.
    """

    draws: tuple[_Draw, ...]
    tensor: Callable[..., Tensor]


class _Recipes(NamedTuple):
    """The recipes of a case's tensors by name; tensors are made in the case's dtype, or in the one that `dtypes` names."""

    build: "_Builder"
    tensors: dict[str, _Recipe]
    dtypes: Mapping[str, str]


def _tensors(groups: Sequence[_Recipes]) -> list[dict[str, Tensor]]:
    """Return the contiguous tensors of each group of recipes.

    On a GPU an operation costs a launch whatever its size, and a copy from the host costs a wait. So all integers are drawn
    together, and constants are Python numbers. No table of inputs is kept on the GPU for the next case, because a wrong kernel
    might write into it.
    """
    draws = [(recipes.build, draw) for recipes in groups for recipe in recipes.tensors.values() for draw in recipe.draws]
    whole, result = iter(_integers(draws)), []
    for build, tensors, dtypes in groups:
        values = {}
        for name, recipe in tensors.items():
            dtype = DTYPES[dtypes.get(name, build.case.dtype)]
            values[name] = recipe.tensor(*itertools.islice(whole, len(recipe.draws))).to(dtype)
        result.append(values)
    return result


def _integers(draws: Sequence[tuple["_Builder", _Draw]]) -> list[Tensor]:
    """Return the integers of each draw, in its shape."""
    most, device = max(math.prod(draw.shape) for _, draw in draws), draws[0][0].device
    positions = torch.arange(most, dtype=torch.int64, device=device)
    whole = integers(*(build.counted(draw, positions) for build, draw in draws))
    return [numbers.view(draw.shape) for numbers, (_, draw) in zip(whole, draws, strict=True)]


class _Builder:
    """Makes the recipes of the tensors of a case, a `Case` of properties/rules/case.py."""

    def __init__(self, case: Any, device: str | None) -> None:
        self.case = case
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self.bits = BITS[case.dtype]
        self.batch = (1, case.tokens) if case.packed else (len(case.lengths), case.lengths[0])

    def call(self) -> _Recipes:
        """Return the recipes of the inputs."""
        case, axes = self.case, (self.case.value_heads, *((self.case.key_dim,) if self.case.operation == "kda" else ()))
        recipes = {"q": self.vectors("q"), "k": self.vectors("k"), "v": self.values()}
        if case.gate_inside:
            recipes |= {"a": self.raw_gates(axes), "A_log": self.speeds(axes[0])}
            recipes |= {"dt_bias": self.uniform("dt_bias", axes, SINGLE_BITS)} if case.dt_bias else {}
        elif case.operation != "delta_rule" and not case.without_gate:
            recipes |= {"alpha": self.decays(axes)} if case.decay == "linear" else {"g": self.gates(axes)}
        if not case.without_beta:
            recipes |= {"b": self.raw_betas()} if case.beta_inside else {"beta": self.betas()}
        for name, width in (("gk", case.key_dim), ("gv", case.value_dim)):
            if case.channel_decays in (OF_CHANNELS[name], "both"):
                recipes[name] = self.channel_decays(name, (case.value_heads, width))
        recipes |= {"state": self.states_of(self.some(self.state()), 0, case.initial_states)} if case.state != "none" else {}
        single = SINGLE_PARAMETERS[case.parameter_dtype] + ("g", "alpha", "gk", "gv") * (case.gate_dtype == "fp32")
        return _Recipes(self, recipes, {**dict.fromkeys(single, "fp32"), "state": case.dtype_of_states})

    def inputs(self, tensors: Mapping[str, Tensor]) -> Inputs:
        """Return the arguments of a call with these tensors."""
        case = self.case
        inside = ("a", "A_log", "dt_bias") * case.gate_inside + ("b",) * case.beta_inside + ("alpha",) * (case.decay == "linear")
        inside += tuple(name for name, word in OF_CHANNELS.items() if case.channel_decays in (word, "both"))
        offsets = torch.tensor(case.starts(), dtype=getattr(torch, case.offsets), device="cpu")
        return Inputs(
            **{name: tensors.get(name) for name in ("q", "k", "v", "g", "beta", "state")},
            cu_seqlens=self.sent(offsets) if case.packed else None,
            scale=SCALES[case.scale],
            qk_norm=case.qk_norm,
            qk_norm_eps=NORM_EPS[case.qk_norm_eps],
            qk_norm_form=case.qk_norm_form,
            output_final_state=case.final_states != "none",
            **{name: tensors.get(name) for name in inside},
            **({"allow_neg_eigval": case.beta == "two"} if case.beta_inside else {}),
            **({"lower_bound": LOWER_BOUNDS[case.lower_bound]} if case.lower_bound != "none" else {}),
        )

    def cotangents(self) -> _Recipes:
        """Return the recipes of a cotangent for every output."""
        case = self.case
        o = self.uniform("do", (*self.batch, case.value_heads, case.value_dim), self.bits)
        state = self.uniform("dht", (len(case.lengths), case.value_heads, case.key_dim, case.value_dim), self.bits)
        final = {port.name: port.dtype for port in case.spec.outputs if port.name == "final_state"}
        return _Recipes(self, {"o": o, "final_state": self.states_of(state, -1, case.final_states)}, final)

    def vectors(self, name: str) -> _Recipe:
        """Return q or k [B, T, H, K], so short that beta |k|^2 <= 2, or long if they are normalised and `values` is large."""
        case = self.case
        shape, ones = (*self.batch, case.heads, case.key_dim), (*self.batch, case.heads, 1)
        draw = _Draw(name, shape, self.bits, of_tokens=True)
        if case.values == "one_hot":
            channels, draw = torch.arange(case.key_dim, device=self.device), _Draw("index", ones, 31, salt=_STREAMS[name])
            return _Recipe((draw,), lambda index: (channels == index % case.key_dim).to(torch.float64))
        if case.values == "correlated":
            base = _Draw("base", shape[2:], self.bits)
            return _Recipe((draw, base), lambda whole, base: _within_one((3 * base + whole) >> 2))
        if case.values == "one_signed":  # as after SiLU, so that keys are nearly parallel
            return _Recipe((draw,), lambda whole: _within_one((whole + 2 ** (self.bits - 1)) >> 1))
        if case.values == "small":
            small = SMALL_OF.get((case.qk_norm_form, case.qk_norm_eps), SMALL)
            return _Recipe((draw,), lambda whole: _within_one(whole) * small)
        if case.values == "large" and case.qk_norm:
            return _Recipe((draw,), lambda whole: _within_one(whole) * LARGE)
        if case.values == "zero_rows":
            return _Recipe((draw, _choice(name, ones, 2)), lambda whole, choice: _within_one(whole) * (choice != 0))
        return _Recipe((draw,), _within_one)

    def values(self) -> _Recipe:
        """Return v [B, T, HV, V]."""
        case, bits = self.case, self.bits
        shape, ones = (*self.batch, case.value_heads, case.value_dim), (*self.batch, case.value_heads, 1)
        draw = _Draw("v", shape, bits, of_tokens=True)
        if case.values == "one_hot":
            return _Recipe((_Draw("v", shape, 4),), lambda whole: whole.to(torch.float64))
        if case.values == "zero_rows":
            return _Recipe((draw, _choice("v", ones, 2)), lambda whole, choice: _fraction(whole, bits) * (choice != 0))
        if case.values == "one_signed":
            return _Recipe((draw,), lambda whole: _fraction((whole + 2 ** (bits - 1)) >> 1, bits))
        if case.values == "scaled":  # by 2^-6..2^5, for each token and head
            draws = draw, _choice("v", ones, 16)
            return _Recipe(draws, lambda whole, choice: _fraction(whole, bits) * _powers(choice % 12 - 6))
        return self.uniform("v", shape, bits, most=GREAT[case.dtype] if case.values == "great" else 1.0, of_tokens=True)

    def state(self) -> _Recipe:
        """Return the initial states [N, HV, K, V]."""
        case = self.case
        shape = (len(case.lengths), case.value_heads, case.key_dim, case.value_dim)
        if case.state == "zero":
            return self.full(shape, 0.0)
        if case.values == "one_hot":
            return _Recipe((_Draw("state", shape, 4),), lambda whole: whole.to(torch.float64))
        if case.values == "scaled":
            draws = _Draw("state", shape, SINGLE_BITS), _Draw("sign", (*shape[:2], 1, 1), 3)
            return _Recipe(draws, lambda whole, exponent: _fraction(whole, SINGLE_BITS, most=0.25) * _powers(exponent))
        return self.uniform("state", shape, SINGLE_BITS, most=0.25)

    def some(self, states: _Recipe) -> _Recipe:
        """Return the states, with zeros for every second sequence of `state=some`, as of requests that begin beside others."""
        if self.case.state != "some":
            return states
        zeros = torch.arange(len(self.case.lengths), device=self.device) % 2 == self.case.seed % 2
        return _Recipe(states.draws, lambda *whole: states.tensor(*whole) * ~zeros.view(-1, 1, 1, 1))

    def states_of(self, states: _Recipe, row: int, which: str) -> _Recipe:
        """Return the states, or their cotangents, with zeros for those that the call does not have."""
        if which == "each" or (which != "none" and not self.case.packed):
            return states
        row %= len(self.case.lengths)

        def tensor(*whole: Tensor) -> Tensor:
            has_state = (torch.arange(len(self.case.lengths), device=self.device) == row) & (which != "none")
            return states.tensor(*whole) * has_state.view(-1, 1, 1, 1)

        return _Recipe(states.draws, tensor)

    def gates(self, axes: tuple[int, ...]) -> _Recipe:
        """Return the log-decays [B, T, HV], or [B, T, HV, K] if each channel has its own."""
        case, shape = self.case, (*self.batch, *axes)
        draw = _Draw("g", shape, SINGLE_BITS, of_tokens=True)
        widths = [*MEMORIES.values(), 0.0][:: -1 if case.seed % 2 else 1]

        def saturated(whole: Tensor, choice: Tensor) -> Tensor:
            return torch.where(choice == 0, SATURATED, _decay(whole, MEMORIES["1000"]))

        def closed(whole: Tensor, choice: Tensor) -> Tensor:
            return torch.where(choice == 0, -torch.inf, _decay(whole, MEMORIES["1000"]))

        def edges(whole: Tensor, choice: Tensor) -> Tensor:  # 0, where exp underflows, or in between
            under = UNDERFLOW + AROUND / 2 + _decay(whole, AROUND)
            return torch.where(choice == 0, under, torch.where(choice == 1, 0.0, _decay(whole, MEMORIES["64"])))

        def runs(whole: Tensor) -> Tensor:
            turn = ((self.runs[0] + case.seed) % len(RUNS)).view(*self.batch, *[1] * len(axes))
            first, second, third = (MEMORIES[name] for name in RUNS)
            return _decay(whole, 1.0) * torch.where(turn == 0, first, torch.where(turn == 1, second, third))

        def mixed(whole: Tensor) -> Tensor:
            g = _decay(whole, 1.0)
            for kind, width in enumerate(widths[: math.prod(axes)]):
                g.flatten(2)[..., kind :: len(widths)].mul_(width)
            return g

        if case.gate == "forever":
            return self.full(shape, 0.0)
        if (chosen := {"saturated": saturated, "closed": closed, "edges": edges}.get(case.gate)) is not None:
            return _Recipe((draw, _choice("gate", shape, 2)), chosen)
        several = {"runs": runs, "mixed": mixed}.get(case.gate)
        return _Recipe((draw,), several or (lambda whole: _decay(whole, MEMORIES[case.gate])))

    def channel_decays(self, name: str, axes: tuple[int, ...]) -> _Recipe:
        """Return log-decays of channels [B, T, HV, K] or [B, T, HV, V]: those of the gate's regime, or 0 in some channels.

        They remember about 64 tokens if the gate decays completely, is mixed, is left out or is computed in the kernel.
        """
        memory = MEMORIES.get(self.case.gate, MEMORIES["64"]) or MEMORIES["64"]
        shape = (*self.batch, *axes)
        draw = _Draw(name, shape, SINGLE_BITS, of_tokens=True)
        return _Recipe((draw, _choice(name, shape, 2)), lambda whole, choice: torch.where(choice == 0, 0.0, _decay(whole, memory)))

    def decays(self, axes: tuple[int, ...]) -> _Recipe:
        """Return the decays alpha, shaped as the log-decays g of the same case, and near exp(g); 0 where g is SATURATED.

        alpha is (1 + g / 1024)^1024, by products that round in the same way on every machine, as exp does not.
        """
        logs = self.gates(axes)

        def tensor(*whole: Tensor) -> Tensor:
            g = logs.tensor(*whole)
            base = torch.where(g == SATURATED, 0.0, 1.0 + g * _number(2.0**-DOUBLINGS))
            for _ in range(DOUBLINGS):
                base = base * base
            return base

        return _Recipe(logs.draws, tensor)

    def betas(self) -> _Recipe:
        """Return beta [B, T, HV]."""
        case, bits, shape = self.case, self.bits, (*self.batch, self.case.value_heads)
        draw = _Draw("beta", shape, bits + 1, of_tokens=True)

        def inner(whole: Tensor) -> Tensor:
            return _fraction(whole.abs().clamp(max=2**bits - 1), bits + 1, most=2.0 if case.beta == "two" else 1.0)

        def edges(whole: Tensor, edge: Tensor) -> Tensor:  # 0, 1 or in between
            return torch.where(edge < 0, (edge == -1).to(torch.float64), inner(whole))

        if case.beta in ("one", "zero"):
            return self.full(shape, float(case.beta == "one"))
        if case.beta == "runs":
            return _Recipe((draw,), lambda whole: torch.where(self.idle, 0.0, inner(whole)))
        return _Recipe((draw, _choice("beta", shape, 2)), edges) if case.beta == "edges" else _Recipe((draw,), inner)

    def raw_gates(self, axes: tuple[int, ...]) -> _Recipe:
        """Return a [B, T, HV] or [B, T, HV, K]."""
        shape = (*self.batch, *axes)
        if self.case.gate == "saturated":  # decays completely, or not at all
            return _Recipe((_choice("gate", shape, 2),), lambda choice: torch.where(choice == 0, OPEN, -OPEN))
        if self.case.gate == "overflow":
            draw = _Draw("a", shape, self.bits, of_tokens=True)

            def overflow(whole: Tensor, choice: Tensor) -> Tensor:
                return torch.where(choice < 0, torch.where(choice == -1, OVERFLOW, -OVERFLOW), _fraction(whole, self.bits, 2.0))

            return _Recipe((draw, _choice("gate", shape, 2)), overflow)
        if self.case.gate == "thresholds":
            return _Recipe((_Draw("a", shape, self.bits, of_tokens=True), _choice("gate", shape, 4)), self.around_thresholds)
        if self.case.lower_bound != "none":
            names = self.memories

            def around_middles(whole: Tensor) -> Tensor:
                a = _fraction(whole, self.bits, 2.0)
                for kind, name in enumerate(names[: axes[0]]):
                    a[:, :, kind :: len(names)].add_(BOUNDED[name])
                return a

            return _Recipe((_Draw("a", shape, self.bits, of_tokens=True),), around_middles)
        return self.uniform("a", shape, self.bits, most=2.0, of_tokens=True)

    @property
    def memories(self) -> list[str]:
        """The regime of each head's gate, by turns: that of the case or, in mixed, each of MEMORIES."""
        return [*MEMORIES][:: -1 if self.case.seed % 2 else 1] if self.case.gate == "mixed" else [self.case.gate]

    def around_thresholds(self, whole: Tensor, choice: Tensor) -> Tensor:
        """Return numbers at most 2 away from one of THRESHOLDS or, one time in four, from its negative."""
        middles = torch.zeros_like(whole, dtype=torch.float64)
        for index, threshold in enumerate((*THRESHOLDS, *THRESHOLDS[:4], *(-number for number in THRESHOLDS[::2]))):
            middles = torch.where(choice + 8 == index, threshold, middles)
        return middles + _fraction(whole, self.bits, 2.0)

    def speeds(self, heads: int) -> _Recipe:
        """Return A_log [HV], for the same memory in all heads or (mixed) another one in each."""
        case, names = self.case, self.memories

        def tensor(whole: Tensor) -> Tensor:
            A_log = _fraction(whole, LOG_BITS, most=0.5)
            for kind, name in enumerate(names[:heads]):
                A_log[kind :: len(names)].add_(0.0 if case.lower_bound != "none" else A_LOGS[name])
            return A_log

        return _Recipe((_Draw("A_log", (heads,), LOG_BITS),), tensor)

    def raw_betas(self) -> _Recipe:
        """Return b [B, T, HV]; beta is its sigmoid, times two if beta may exceed 1."""
        case, bits, shape = self.case, self.bits, (*self.batch, self.case.value_heads)

        def edges(whole: Tensor, edge: Tensor) -> Tensor:
            return torch.where(edge < 0, torch.where(edge == -1, OPEN, -OPEN), _fraction(whole, bits, most=4.0))

        if case.beta in ("one", "zero"):
            return self.full(shape, OPEN if case.beta == "one" else -OPEN)
        if case.beta == "edges":
            return _Recipe((_Draw("b", shape, bits, of_tokens=True), _choice("beta", shape, 2)), edges)
        if case.beta == "runs":
            draw = _Draw("b", shape, bits, of_tokens=True)
            return _Recipe((draw,), lambda whole: torch.where(self.idle, -OPEN, _fraction(whole, bits, most=4.0)))
        return self.uniform("b", shape, bits, most=4.0, of_tokens=True)

    def uniform(self, name: str, shape: tuple[int, ...], bits: int, *, most: float = 1.0, of_tokens: bool = False) -> _Recipe:
        """Return numbers uniform in [-most, most), on a grid of `bits` bits."""
        return _Recipe((_Draw(name, shape, bits, of_tokens),), lambda whole: _fraction(whole, bits, most))

    def full(self, shape: tuple[int, ...], value: float) -> _Recipe:
        """Return a tensor of one number."""
        return _Recipe((), lambda: torch.full(shape, value, dtype=torch.float64, device=self.device))

    def counted(self, draw: _Draw, positions: Tensor) -> tuple[Tensor, int, int]:
        """Return a draw as a counter, a key and bits; `positions` are 0, 1, ..., of which the counter takes as many as it needs."""
        distinct = self.case.values != "repeated" or not draw.of_tokens
        counter = positions[: math.prod(draw.shape)] if distinct else self.repeated(math.prod(draw.shape[2:]))
        return counter, mix_number(self.case.seed * 64 + _STREAMS[draw.name] + (draw.salt << 40)), draw.bits

    def repeated(self, width: int) -> Tensor:
        """Return the positions of each token's `width` numbers if each token repeats the first one of its sequence."""
        return (self.first.unsqueeze(-1) * width + torch.arange(width, dtype=torch.int64, device=self.device)).flatten()

    @functools.cached_property
    def runs(self) -> Tensor:
        """The number of each token's run of RUN tokens in its sequence, and how many runs that has [2, B, T]."""
        rows = [[place // RUN, -(-length // RUN)] for length in self.case.lengths for place in range(length)]
        runs = self.sent(torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 2).mT)
        return runs.reshape(2, *self.batch)

    @property
    def idle(self) -> Tensor:
        """Whether a token is in a run whose betas are 0, which is every second one of a sequence of several runs [B, T, 1]."""
        run, count = self.runs
        idle: Tensor = (count > 1) & (run % 2 == self.case.seed % 2)
        return idle.unsqueeze(-1)

    @functools.cached_property
    def first(self) -> Tensor:
        """The index of the first token of each token's sequence."""
        starts, lengths = (torch.tensor(numbers, device="cpu") for numbers in (self.case.starts()[:-1], self.case.lengths))
        return self.sent(starts.repeat_interleave(lengths))

    def sent(self, x: Tensor) -> Tensor:
        """Return a host tensor on the device.

        On CUDA this does not wait for the device: a copy from pageable memory has read its source when it returns.
        """
        return x.to(self.device, non_blocking=self.device.type == "cuda")


def _choice(name: str, shape: tuple[int, ...], bits: int) -> _Draw:
    """Return the draw that chooses within a regime of gate, beta, or rows of q, k or v."""
    return _Draw("choice", shape, bits, of_tokens=True, salt=_CHOOSING[name])


def _within_one(whole: Tensor) -> Tensor:
    """Divide rows by the power of two that brings their squared norms into (1/4, 1]; rows of zeros stay zero."""
    bounds = 1 << torch.arange(0, 62, 2, dtype=torch.int64, device=whole.device)
    exponent = torch.bucketize(whole.square().sum(-1, keepdim=True), bounds)  # the least e with sum n^2 <= 4^e
    return torch.div(whole, _powers(exponent))


def _fraction(whole: Tensor, bits: int, most: float = 1.0) -> Tensor:
    """Map integers of `bits` bits to [-most, most), exactly; `most` is a power of two."""
    return whole * _number(most * 2.0 ** (1 - bits))


def _decay(whole: Tensor, width: float) -> Tensor:
    """Map integers of SINGLE_BITS bits to (-width, 0], exactly; the width is a power of two."""
    return torch.mul(whole + 2 ** (SINGLE_BITS - 1), _number(-width * 2.0**-SINGLE_BITS))


def _number(value: float) -> Tensor:
    """Return a float64 tensor on the host; integers times a Python number would get the default dtype."""
    return torch.scalar_tensor(value, dtype=torch.float64, device="cpu")


def _powers(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, made from its bits; |exponent| < 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)
