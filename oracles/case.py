"""Cases: one printable line of plain data that rebuilds an example, bit for bit, on every machine.

Every number comes from a counter: splitmix64 of (seed, tensor, position), in wrapping 64-bit integers, then scaled by powers
of two and rounded to the tensor's dtype. No library random numbers and no transcendental functions: the same bits on CPU and
GPU, today and after an upgrade (tests/test_case.py holds known ones).
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oracles.counter import mix
from oracles.gated_delta import in_kernel
from oracles.line import Line, check_choices, text_of
from oracles.operation import DTYPES, Inputs, Operation
from oracles.operations import RULES
from oracles.rounding import BITS

# A memory of m tokens is a mean log-decay of -1/m, uniform in (-2/m, 0]; the widths 2/m below are powers of two.
MEMORIES = {"forever": 0.0, "1000": 2.0**-9, "64": 2.0**-5, "10": 2.0**-2, "tenth": 2.0**4}
GATES = (*MEMORIES, "saturated", "mixed")
BETAS = ("ordinary", "one", "zero", "two", "edges")
VALUES = ("ordinary", "correlated", "repeated", "zero_rows", "small", "scaled", "one_hot")
STATES = ("none", "zero", "random")
SCALES = {"default": None, "one": 1.0, "half": 0.5}
IN_KERNEL = ("none", "gate", "beta", "both")
SATURATED = -1000.0
# For a gate in the kernel: softplus is 0.85 or so, and exp(A_log) times that one over the memory.
A_LOGS = {"forever": -80.0, "1000": -6.75, "64": -4.0, "10": -2.125, "tenth": 2.5, "saturated": 5.0}
OPEN = 30.0  # sigmoid(30) is 1 in float32; softplus(30) is 30, softplus(-30) as good as 0
SMALL = 2.0**-13  # about 1e-4: there the L2 norm's eps of 1e-6 is no longer negligible
MAX_TOKENS, MAX_SEQUENCES, MAX_WIDTH, MAX_HEADS = 2**20, 2**16, 1024, 1024

_CHOICES: dict[str, Sequence[str]] = {
    "operation": tuple(RULES),
    "dtype": tuple(DTYPES),
    "gate": GATES,
    "beta": BETAS,
    "values": VALUES,
    "state": STATES,
    "scale": tuple(SCALES),
    "offsets": ("int64", "int32"),
    "gate_dtype": ("fp32", "input"),
    "in_kernel": IN_KERNEL,
}


@dataclasses.dataclass(frozen=True)
class Case(Line):
    """One mathematical example. Fields at their defaults, the simplest values, are left out of the line.

    `lengths` are tokens per sequence; packed (THD, `cu_seqlens`) or, when all are equal, a batch. `gate` is the memory in
    tokens, `beta` the strength of writing, `values` the regime of q, k, v, `qk_norm` whether the operation normalises q and k,
    `in_kernel` which of gate and beta it computes itself, from a, A_log and perhaps `dt_bias`, and from b.
    """

    LONG: ClassVar[dict[str, str]] = {"operation": "op"}
    REGIMES: ClassVar[tuple[str, ...]] = ("dtype", "gate", "beta", "values", "state", "in_kernel")
    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = _CHOICES
    # The words that a compiled kernel depends on: of state and beta only whether it is none, and two (properties/palette.py).
    KEYS: ClassVar[tuple[str, ...]] = (
        *("packed", "heads", "value_heads", "key_dim", "value_dim", "dtype", "gate_dtype", "state", "scale", "qk_norm"),
        *("in_kernel", "dt_bias", "beta", "offsets"),
    )

    lengths: tuple[int, ...]
    operation: str = "gated_delta_rule"
    packed: bool = False
    heads: int = 1
    value_heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    dtype: str = "fp32"
    gate: str = "forever"
    gate_dtype: str = "fp32"
    beta: str = "ordinary"
    values: str = "ordinary"
    state: str = "none"
    scale: str = "default"
    qk_norm: bool = False
    in_kernel: str = "none"
    dt_bias: bool = True
    offsets: str = "int64"
    backward: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        if not self.lengths or min(self.lengths) < 0:
            raise ValueError(f"lengths must name at least one sequence, none negative, got {text_of(self.lengths)}")
        if len(self.lengths) > MAX_SEQUENCES:
            raise ValueError(f"lengths must name at most {MAX_SEQUENCES} sequences, got {len(self.lengths)}")
        if sum(self.lengths) > MAX_TOKENS:
            raise ValueError(f"lengths must add up to at most {MAX_TOKENS} tokens, got {sum(self.lengths)}")
        for name, most in (
            ("heads", MAX_HEADS),
            ("value_heads", MAX_HEADS),
            ("key_dim", MAX_WIDTH),
            ("value_dim", MAX_WIDTH),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be in 1..{most}, got {getattr(self, name)}")
        if self.value_heads % self.heads:
            raise ValueError(f"value_heads must be a multiple of heads {self.heads}, got {self.value_heads}")
        if not self.packed and len(set(self.lengths)) > 1:
            raise ValueError(f"lengths must all be equal unless packed=yes, got {text_of(self.lengths)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in 0..{2**32 - 1}, got {self.seed}")
        if self.values == "one_hot" and (self.gate, self.beta, self.qk_norm) != ("forever", "one", False):
            raise ValueError("values=one_hot needs gate=forever beta=one qk_norm=no: only then is the answer exact")
        if self.values == "one_hot" and self.in_kernel != "none":
            raise ValueError(f"values=one_hot needs in_kernel=none: only then is the answer exact, got {self.in_kernel}")
        if self.operation == "delta_rule" and self.gate_inside:
            raise ValueError(f"in_kernel must be none or beta for op=delta_rule, which has no gate, got {self.in_kernel}")

    @property
    def gate_inside(self) -> bool:
        """Whether the operation computes its gate."""
        return self.in_kernel in ("gate", "both")

    @property
    def beta_inside(self) -> bool:
        """Whether the operation computes its beta."""
        return self.in_kernel in ("beta", "both")

    @property
    def spec(self) -> Operation:
        """The operation's contract."""
        return in_kernel(self.operation, gate=self.gate_inside, beta=self.beta_inside)

    def spec_of(self, inputs: Inputs) -> Operation:
        """The contract of a call like the case's, which may be given the gate or beta that the case's own call computes."""
        inside = {name: inputs.get(raw) is not None for name, raw in (("gate", "a"), ("beta", "b"))}
        return in_kernel(self.operation, **inside)

    @property
    def tokens(self) -> int:
        """Tokens in all sequences together."""
        return sum(self.lengths)

    @property
    def bytes(self) -> int:
        """Bytes of the inputs, outputs and gradients in float32, a plain measure of the case's size."""
        tokens = self.tokens * (2 * self.heads * self.key_dim + self.value_heads * (2 * self.value_dim + 2))
        return 8 * (tokens + 2 * len(self.lengths) * self.value_heads * self.key_dim * self.value_dim)

    def starts(self) -> list[int]:
        """The first token of each sequence, and the end of the last."""
        return [0, *itertools.accumulate(self.lengths)]

    def inputs(self, device: str | None = None) -> Inputs:
        """The inputs, contiguous: q, k [B, T, H, K], v [B, T, HV, V], g, beta [B, T, HV], state [N, HV, K, V], ...

        g is [B, T, HV, K] for KDA and None for the delta rule. Where the kernel computes its gate, g is None and there are a, as
        g would be, A_log [HV] and dt_bias [HV] or [HV, K]; where it computes beta, beta is None and there is b [B, T, HV].
        """
        build = _Builder(self, device)
        rows, single = len(self.lengths), DTYPES["fp32"]
        batch = (1, self.tokens) if self.packed else (rows, self.lengths[0])
        work, gates = DTYPES[self.dtype], single if self.gate_dtype == "fp32" else DTYPES[self.dtype]
        q, k = build.vectors("q", self.heads, self.key_dim), build.vectors("k", self.heads, self.key_dim)
        state: Tensor | None = None
        if self.state != "none":
            state = build.state() if self.state == "random" else torch.zeros_like(build.state())
            state = state.to(single)
        g, decays = None, (self.value_heads, self.key_dim) if self.operation == "kda" else (self.value_heads,)
        inside: dict[str, Tensor | None] = {}
        if self.gate_inside:
            a, A_log, dt_bias = build.raw_gates(decays)
            inside |= {"a": a.to(work).unflatten(0, batch), "A_log": A_log.to(single), "dt_bias": None}
            inside |= {"dt_bias": dt_bias.to(single)} if self.dt_bias else {}
        elif self.operation != "delta_rule":
            g = build.gates(decays).to(gates).unflatten(0, batch)
        if self.beta_inside:
            inside["b"] = build.raw_betas().to(work).unflatten(0, batch)
        offsets = torch.tensor(self.starts(), dtype=getattr(torch, self.offsets), device=device) if self.packed else None
        return Inputs(
            q=q.to(work).unflatten(0, batch),
            k=k.to(work).unflatten(0, batch),
            v=build.values().to(work).unflatten(0, batch),
            g=g,
            beta=None if self.beta_inside else build.betas().to(work).unflatten(0, batch),
            state=state,
            cu_seqlens=offsets,
            scale=SCALES[self.scale],
            qk_norm=self.qk_norm,
            output_final_state=True,
            **inside,
            **({"allow_neg_eigval": self.beta == "two"} if self.beta_inside else {}),
        )

    def cotangents(self, device: str | None = None) -> dict[str, Tensor]:
        """A random cotangent for every output, the final state included, in the output's shape and dtype."""
        build = _Builder(self, device)
        batch = (1, self.tokens) if self.packed else (len(self.lengths), self.lengths[0])
        o = build.uniform("do", (self.tokens, self.value_heads, self.value_dim)).to(DTYPES[self.dtype])
        state = build.uniform("dht", (len(self.lengths), self.value_heads, self.key_dim, self.value_dim))
        return {"o": o.unflatten(0, batch), "final_state": state.to(DTYPES["fp32"])}


_NAMES = ("q", "k", "v", "g", "beta", "state", "do", "dht", "base", "choice", "index", "sign", "a", "A_log", "dt_bias", "b")
_STREAMS = {name: index for index, name in enumerate(_NAMES)}


class _Builder:
    """The tensors of a case in float64, exact, tokens flattened along axis 0."""

    def __init__(self, case: Case, device: str | None) -> None:
        self.case, self.device = case, device
        self.bits = BITS[case.dtype]
        token = torch.arange(case.tokens, dtype=torch.int64, device=device)
        if case.values == "repeated":  # each token repeats the first of its sequence
            starts = torch.tensor(case.starts()[:-1], dtype=torch.int64, device=device)
            token = starts.repeat_interleave(torch.tensor(case.lengths, device=device))
        self.token = token

    def vectors(self, name: str, heads: int, width: int) -> Tensor:
        """Rows of squared norm in (1/4, 1], so that beta |k|^2 <= 2: integers over the power of two that makes it so."""
        case = self.case
        if case.values == "one_hot":
            hot = self.integers("index", (case.tokens, heads, 1), 31, salt=_STREAMS[name]) % width
            return (torch.arange(width, device=self.device) == hot.abs()).to(torch.float64)
        whole = self.integers(name, (case.tokens, heads, width), self.bits, rows=self.token)
        if case.values == "correlated":
            base = self.integers("base", (1, heads, width), self.bits)
            whole = (3 * base + whole) >> 2
        squared = whole.square().sum(-1, keepdim=True)
        bounds = torch.tensor([4**power for power in range(31)], dtype=torch.int64, device=self.device)
        exponent = torch.bucketize(squared, bounds)  # the least e with sum n^2 <= 4^e
        rows = whole * self.powers(-exponent)
        if case.values == "small":
            rows = rows * SMALL
        return self.regime(rows, name)

    def values(self) -> Tensor:
        case = self.case
        shape = (case.tokens, case.value_heads, case.value_dim)
        if case.values == "one_hot":
            return self.integers("v", shape, 4).to(torch.float64)
        return self.regime(self.uniform("v", shape, rows=self.token), "v")

    def state(self) -> Tensor:
        case = self.case
        shape = (len(case.lengths), case.value_heads, case.key_dim, case.value_dim)
        if case.values == "one_hot":
            return self.integers("state", shape, 4).to(torch.float64)
        rows = self.uniform("state", shape, bits=SINGLE_BITS) / 4
        return rows * self.powers(self.integers("sign", (*shape[:2], 1, 1), 3)) if case.values == "scaled" else rows

    def gates(self, axes: tuple[int, ...]) -> Tensor:
        """Log-decays [tokens, HV], or [tokens, HV, K] where each channel has its own."""
        case = self.case
        shape = (case.tokens, *axes)
        whole = self.integers("g", shape, SINGLE_BITS, rows=self.token)
        fraction = (whole + 2 ** (SINGLE_BITS - 1)).to(torch.float64) * 2.0**-SINGLE_BITS  # [0, 1)
        if case.gate == "mixed":
            widths = [*MEMORIES.values(), 0.0][:: -1 if case.seed % 2 else 1]
            width = torch.tensor(widths, dtype=torch.float64, device=self.device)
            kinds = torch.arange(math.prod(axes), device=self.device).reshape(axes) % len(widths)
            return torch.mul(-fraction, width[kinds])
        if case.gate == "saturated":
            gone = self.integers("choice", shape, 2, rows=self.token, salt=1) == 0
            return torch.where(gone, SATURATED, -fraction * MEMORIES["1000"])
        return -fraction * MEMORIES[case.gate] if MEMORIES[case.gate] else torch.zeros_like(fraction)

    def betas(self) -> Tensor:
        case = self.case
        shape = (case.tokens, case.value_heads)
        if case.beta in ("one", "zero"):
            return torch.full(shape, float(case.beta == "one"), dtype=torch.float64, device=self.device)
        whole = self.integers("beta", shape, self.bits + 1, rows=self.token)
        fraction = whole.abs().clamp(max=2**self.bits - 1).to(torch.float64) * 2.0**-self.bits
        if case.beta == "two":
            return 2 * fraction
        if case.beta == "edges":  # 0, 1 or in between
            edge = self.integers("choice", shape, 2, rows=self.token, salt=2)
            return torch.where(edge < 0, (edge == -1).to(torch.float64), fraction)
        return fraction

    def raw_gates(self, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """a [tokens, HV] or [tokens, HV, K], A_log [HV] and dt_bias [HV] or [HV, K]: memories by A_log, a head (mixed) or all."""
        case, heads = self.case, axes[0]
        a = 2 * self.uniform("a", (case.tokens, *axes), rows=self.token)
        if case.gate == "saturated":  # nothing decays, or all does
            gone = self.integers("choice", (case.tokens, *axes), 2, rows=self.token, salt=1) == 0
            a = torch.where(gone, OPEN, -OPEN)
        names = [*MEMORIES] if case.gate == "mixed" else [case.gate]
        names = names[:: -1 if case.seed % 2 else 1]
        centres = torch.tensor([A_LOGS[names[head % len(names)]] for head in range(heads)], dtype=torch.float64, device=self.device)
        return a, centres + self.uniform("A_log", (heads,), bits=8) / 2, self.uniform("dt_bias", axes, bits=8)

    def raw_betas(self) -> Tensor:
        """b [tokens, HV]: beta is its sigmoid, twice that where beta may be over 1."""
        case, shape = self.case, (self.case.tokens, self.case.value_heads)
        b = 4 * self.uniform("b", shape, rows=self.token)
        if case.beta in ("one", "zero"):
            return torch.full_like(b, OPEN if case.beta == "one" else -OPEN)
        if case.beta == "edges":
            edge = self.integers("choice", shape, 2, rows=self.token, salt=2)
            return torch.where(edge < 0, torch.where(edge == -1, OPEN, -OPEN), b)
        return b

    def regime(self, rows: Tensor, name: str) -> Tensor:
        salt = 3 + _STREAMS[name]
        if self.case.values == "zero_rows":
            return rows * (self.integers("choice", rows.shape[:2], 2, rows=self.token, salt=salt) != 0).unsqueeze(-1)
        if self.case.values == "scaled" and name == "v":  # over 2^-6..2^5, per token and head
            exponent = self.integers("choice", rows.shape[:2], 16, rows=self.token, salt=salt) % 12 - 6
            return rows * self.powers(exponent).unsqueeze(-1)
        return rows

    def uniform(self, name: str, shape: tuple[int, ...], bits: int | None = None, rows: Tensor | None = None) -> Tensor:
        """Uniform in [-1, 1), on a grid of `bits` bits (default: as many as the dtype holds)."""
        bits = self.bits if bits is None else bits
        return self.integers(name, shape, bits, rows=rows).to(torch.float64) * 2.0 ** (1 - bits)

    def integers(self, name: str, shape: tuple[int, ...], bits: int, rows: Tensor | None = None, salt: int = 0) -> Tensor:
        """Integers uniform in [-2^(bits-1), 2^(bits-1)), one a position; `rows` renumbers axis 0."""
        width = math.prod(shape[1:])
        first = torch.arange(shape[0], dtype=torch.int64, device=self.device) if rows is None else rows
        counter = first.unsqueeze(-1) * width + torch.arange(width, dtype=torch.int64, device=self.device)
        key = mix(torch.tensor(self.case.seed * 64 + _STREAMS[name] + (salt << 40), dtype=torch.int64))
        return (mix(counter + key.to(self.device)) >> (64 - bits)).reshape(shape)

    def powers(self, exponent: Tensor) -> Tensor:
        """2^exponent in float64, exactly, by table: |exponent| < 64."""
        table = torch.tensor([2.0**power for power in range(-64, 65)], dtype=torch.float64, device=self.device)
        return table[exponent + 64]


SINGLE_BITS = BITS["fp32"]
