"""Cases of serving: one printable line for a decode call, its pool of states, and the slots of its requests.

Tokens and states are those of a case of properties/rules/case.py. Slots come from the same counter, so the same line gives the
same bits everywhere.
"""

import dataclasses
import functools
import itertools
from typing import Annotated

import torch
from torch import Tensor

from oracles.arithmetic.counter import integers, mix_number
from oracles.decode import TOKENS, decode
from oracles.operation import DTYPES, Inputs, Operation
from properties.rules.case import INSIDE, Case
from properties.words.line import Line
from properties.words.options import values_of
from properties.words.word import Word, like

PADDING_SLOTS = ("-1", "0")
SOME = ("none", "some", "all")
FREE = ("zero", "random", "nan")
BLOCK_SIZES = (4, 8, 16, 32, 64)
RULES = ("gated_delta_rule", "kda")
_STREAMS = {name: 48 + index for index, name in enumerate(("slot", "padded", "fresh", "accepted", "free", "nan", "parents"))}
# For each dtype of a pool: the integer type of its bits, a quiet NaN, and the bits that a NaN may have besides.
_NAN = {
    "fp32": (torch.int32, 0x7FC00000, 2**22 - 1),
    "bf16": (torch.int16, 0x7FC0, 2**6 - 1),
    "fp16": (torch.int16, 0x7E00, 2**9 - 1),
}


@dataclasses.dataclass(frozen=True)
class PoolCase(Line):
    """One call of decode. Fields at their defaults, the simplest values, are left out of the line.

    The pool has one slot for each request and `spare` more. If `padding_slot` is 0, slot 0 comes in addition and belongs to no
    request. The seed decides which request has which slot. Fields that a rule's case has too mean the same.

    ValueError for a field outside its choices or range, or for fields that exclude each other.
    """

    lengths: tuple[int, ...]
    """The new tokens of each request (one token, a draft of several, or a prompt), as a batch or packed."""
    operation: Annotated[str, Word(choices=("decode",))] = "decode"
    packed: Annotated[bool, like(Case, "packed")] = False
    heads: Annotated[int, like(Case, "heads")] = 1
    value_heads: Annotated[int, like(Case, "value_heads")] = 1
    key_dim: Annotated[int, like(Case, "key_dim")] = 16
    value_dim: Annotated[int, like(Case, "value_dim")] = 16
    dtype: Annotated[str, like(Case, "dtype")] = "fp32"
    gate: Annotated[str, like(Case, "gate")] = "forever"
    gate_dtype: Annotated[str, like(Case, "gate_dtype")] = "fp32"
    beta: Annotated[str, like(Case, "beta")] = "ordinary"
    values: Annotated[str, like(Case, "values", choices=tuple(value for value in Case.CHOICES["values"] if value != "one_hot"))] = (
        "ordinary"
    )
    state: Annotated[str, like(Case, "state", choices=("zero", "random"), key=False, simplest=("zero",))] = "zero"
    """What the requests' slots hold."""
    scale: Annotated[str, like(Case, "scale")] = "default"
    qk_norm: Annotated[bool, like(Case, "qk_norm")] = False
    offsets: Annotated[str, like(Case, "offsets")] = "int64"
    spare: Annotated[int, Word(span=(0, 2**16))] = 0
    free: Annotated[str, Word(choices=FREE, counted=True, simplest=("zero", "random"))] = "zero"
    """What the other slots hold."""
    padding_slot: Annotated[str, Word(choices=PADDING_SLOTS, key=True, simplest=("-1",))] = "-1"
    padded: Annotated[str, Word(choices=SOME, counted=True, simplest=("none", "all"))] = "none"
    """Which requests are padding."""
    fresh: Annotated[str, Word(choices=SOME, key=True, counted=True, simplest=("none", "all"))] = "none"
    """Which requests begin anew; a kernel depends only on whether there are any."""
    accepted: Annotated[str, Word(choices=("all", "some", "any"), key=True, counted=True, simplest=("all", "some"))] = "all"
    """Which requests keep fewer tokens than they have. With `any`, one at least keeps none."""
    indices: Annotated[str, Word(choices=("int64", "int32"), key=True, simplest=("int64",))] = "int64"
    block_v: Annotated[str, Word(choices=("default", *map(str, BLOCK_SIZES)), key=True, counted=True, simplest=("default",))] = (
        "default"
    )
    """How many value channels an implementation is told to process at a time; it changes no result."""
    rule: Annotated[str, Word(choices=RULES, key=True, simplest=("gated_delta_rule",))] = "gated_delta_rule"
    """The rule that is decoded."""
    in_kernel: Annotated[str, like(Case, "in_kernel")] = "none"
    dt_bias: Annotated[bool, like(Case, "dt_bias")] = True
    state_dtype: Annotated[str, like(Case, "state_dtype", choices=tuple(DTYPES), counted=True)] = "fp32"
    """The dtype of the pool."""
    drafts: Annotated[str, Word(choices=("chain", "tree"), key=True, counted=True, simplest=("chain",))] = "chain"
    """Whether each token follows the one before it, or whether the tokens of a request are a tree that the seed decides."""
    decay: Annotated[str, like(Case, "decay")] = "log"
    parameter_dtype: Annotated[str, like(Case, "parameter_dtype")] = "fp32"
    qk_norm_eps: Annotated[str, like(Case, "qk_norm_eps")] = "1e-6"
    qk_norm_form: Annotated[str, like(Case, "qk_norm_form")] = "inside"
    options: Annotated[str, like(Case, "options")] = "none"
    seed: Annotated[int, like(Case, "seed")] = 0

    def __post_init__(self) -> None:
        self.check_words()
        values_of(self.options)
        self.call()  # raises ValueError for fields that are illegal for the rule
        for name in ("padded", "fresh"):
            if getattr(self, name) == "some" and len(self.lengths) < 2:
                raise ValueError(f"{name}=some needs two requests or more, got {len(self.lengths)}")
        if self.accepted == "some" and max(self.lengths) < 2:
            raise ValueError(f"accepted=some needs a request of two tokens or more, got {max(self.lengths)}")
        if self.accepted == "any" and not self.tokens:
            raise ValueError("accepted=any needs a request with a token, got none")

    def __str__(self) -> str:
        return f"op={self.operation} {super().__str__()}"  # always printed, because it selects the book of the line

    @property
    def spec(self) -> Operation:
        """The operation's contract."""
        call = self.call()
        return decode(self.rule, gate=call.gate_inside, beta=call.beta_inside, linear=call.decay == "linear")

    def spec_of(self, inputs: Inputs) -> Operation:
        """Return the contract of a call like the case's; the call may be given a gate or beta that the case's own call computes."""
        inside = {name: inputs.get(raw) is not None for name, raw in INSIDE.items()}
        return decode(self.rule, **inside)

    @property
    def tokens(self) -> int:
        """The number of tokens of all requests together."""
        return sum(self.lengths)

    @property
    def slots(self) -> int:
        """The number of slots in the pool."""
        return len(self.lengths) + self.spare + (self.padding_slot == "0")

    @property
    def bytes(self) -> int:
        """The bytes of inputs and outputs in float32, a simple measure of the case's size."""
        return self.call().bytes + 8 * self.slots * self.value_heads * self.key_dim * self.value_dim

    def starts(self) -> list[int]:
        """Return the first token of each request, and the end of the last request."""
        return [0, *itertools.accumulate(self.lengths)]

    def call(self) -> Case:
        """Return the rule's call with the same tokens and with the requests' states as initial states."""
        names = [field.name for field in dataclasses.fields(Case) if field.name in _SHARED]
        return Case(operation=self.rule, backward=False, **{name: getattr(self, name) for name in names})

    @functools.cached_property
    def real(self) -> tuple[bool, ...]:
        """Which requests are real, that is, not padding."""
        return tuple(not padded for padded in self._some("padded"))

    @functools.cached_property
    def slot_of(self) -> tuple[int, ...]:
        """The slot of each request; the padding slot for padding requests."""
        first = int(self.padding_slot == "0")
        order = (self._numbers("slot", self.slots - first).argsort() + first).tolist()
        return tuple(slot if real else int(self.padding_slot) for slot, real in zip(order, self.real, strict=False))

    @functools.cached_property
    def beginning(self) -> tuple[bool, ...]:
        """Which requests begin anew, from a state of zeros."""
        return self._some("fresh")

    @functools.cached_property
    def accepted_counts(self) -> tuple[int, ...]:
        """How many tokens of each request are accepted: all, at least one of them, or any number and none of one request."""
        numbers = self._numbers("accepted", len(self.lengths)).tolist()
        if self.accepted == "any":
            rejected = max(range(len(numbers)), key=lambda row: (self.lengths[row] > 1, self.real[row], numbers[row]))
            counts = [number % (length + 1) for number, length in zip(numbers, self.lengths, strict=True)]
            return (*counts[:rejected], 0, *counts[rejected + 1 :])
        some = self.accepted == "some"
        return tuple(
            1 + number % length if some and length else length for number, length in zip(numbers, self.lengths, strict=True)
        )

    @functools.cached_property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """For each token of each request the number of the token that it follows; -1 for the first."""
        numbers = iter(self._numbers("parents", self.tokens).tolist())
        rows = [[next(numbers) for _ in range(length)] for length in self.lengths]
        if self.drafts == "chain":
            return tuple(tuple(range(-1, length - 1)) for length in self.lengths)
        return tuple(tuple(number % token if token else -1 for token, number in enumerate(row)) for row in rows)

    def inputs(self, device: str | None = None) -> Inputs:
        """Return the contiguous inputs of a rule, with pool [P, HV, K, V] and slots [N] in place of the state.

        has_initial_state and accepted are [N] or None. `block_v` is None if the implementation may choose.
        """
        call = self.call().inputs(device)
        index = getattr(torch, self.indices)
        slots = torch.tensor(self.slot_of, dtype=index, device=device)
        real = torch.tensor(self.real, device=device)
        pool = self.filled(self.free, device)
        pool = pool.index_copy(0, slots[real].long(), call.state[real].to(pool.dtype))
        beginning, accepted = ([int(not flag) for flag in self.beginning], self.accepted_counts)
        return Inputs(
            **{name: call[name] for name in (*TOKENS, "A_log", "dt_bias", "allow_neg_eigval") if name in call},
            pool=pool,
            slots=slots,
            padding=int(self.padding_slot),
            has_initial_state=None if self.fresh == "none" else torch.tensor(beginning, dtype=index, device=device),
            accepted=None if self.accepted == "all" else torch.tensor(accepted, dtype=index, device=device),
            **self._tree(index, call.v.shape[:2], device),
            cu_seqlens=call.cu_seqlens,
            scale=call.scale,
            **{name: call[name] for name in ("qk_norm", "qk_norm_eps", "qk_norm_form")},
            block_v=None if self.block_v == "default" else int(self.block_v),
        )

    def _tree(self, dtype: torch.dtype, shape: torch.Size, device: str | None) -> dict[str, Tensor]:
        """Return `parents` [B, T], if the tokens are a tree."""
        if self.drafts == "chain":
            return {}
        flat = [parent for row in self.parents for parent in row]
        return {"parents": torch.tensor(flat, dtype=dtype, device=device).reshape(shape)}

    def filled(self, how: str, device: str | None = None) -> Tensor:
        """Return a pool that holds zeros, random states, or NaN of many bit patterns."""
        shape, dtype = (self.slots, self.value_heads, self.key_dim, self.value_dim), DTYPES[self.state_dtype]
        if how == "zero":
            return torch.zeros(shape, device=device, dtype=dtype)
        numbers = self._numbers(how if how == "nan" else "free", torch.Size(shape).numel(), device).reshape(shape)
        if how == "nan":  # quiet NaN of either sign, because a copy keeps their bits
            whole, quiet, payload = _NAN[self.state_dtype]
            bits = quiet | (numbers & payload)
            return torch.where(numbers < 0, bits - 2 ** (8 * dtype.itemsize - 1), bits).to(whole).view(dtype)
        return ((numbers >> 40).float() * 2.0**-25).to(dtype)  # uniform in [-1/4, 1/4), 24 bits before they are rounded

    def _some(self, what: str) -> tuple[bool, ...]:
        """Return for which requests `what` is true: none, all, or about a third, at least one and not all."""
        count = len(self.lengths)
        if getattr(self, what) != "some":
            return (getattr(self, what) == "all",) * count
        chosen = set(self._numbers(what, count).argsort()[: max(1, count // 3)].tolist())
        return tuple(request in chosen for request in range(count))

    def _numbers(self, name: str, count: int, device: str | None = None) -> Tensor:
        """Return `count` different 64-bit integers."""
        counter = torch.arange(count, dtype=torch.int64, device=device)
        return integers((counter, mix_number(self.seed * 64 + _STREAMS[name]), 64))[0]


# A pool has its own dtype of states, and its own options.
_SHARED = {field.name for field in dataclasses.fields(PoolCase)} - {"operation", "options", "state_dtype"}
