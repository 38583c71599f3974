"""Strategies: cases that find bugs, drawn inside a domain. Structure is drawn, values come from the case's seed.

Alternatives are ordered simplest first. Lengths stand on both sides of the block sizes of kernels; gates are drawn by memory.
"""

import dataclasses
from typing import Any

from hypothesis import strategies as st

from oracles.case import BETAS, GATES, VALUES, Case
from properties.domain import Domain

BLOCKS = (64, 16, 32, 128)
EDGES = (1, 2, 15, 17, 31, 33, 63, 65, 66, 80, 127, 129, 130)
WIDTHS = (16, 8, 32, 24, 40, 64, 12, 128, 1, 7)
REMEMBERING = ("forever", "1000", "64", "10")


@dataclasses.dataclass(frozen=True)
class Example:
    """A case, and what a law does with it: a place (`at`) or one of the law's variants, where the law has them."""

    case: Case
    at: int | None = None
    variant: str | None = None


def lengths(
    domain: Domain, sequences: tuple[int, int] = (1, 4), longest: int = 150, total: int = 260
) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths of packed sequences: edges of blocks, anything up to `longest`, empty ones, at most `total` tokens."""
    blocks, edges = (st.sampled_from([n for n in sizes if n <= longest]) for sizes in (BLOCKS, EDGES))
    one = st.one_of(edges, blocks, st.integers(1, longest))
    if domain.empty:
        one = st.one_of(*[one] * (9 if sequences[1] > 1 else 29), st.just(0))

    def fit(drawn: list[int]) -> tuple[int, ...]:
        kept: list[int] = []
        for length in drawn:
            kept.append(min(length, total - sum(kept)) or int(not domain.empty))
        return tuple(kept)

    return st.lists(one, min_size=sequences[0], max_size=sequences[1]).map(fit)


@st.composite
def cases(
    draw: st.DrawFn,
    /,
    domain: Domain,
    sequences: tuple[int, int] = (1, 4),
    longest: int = 150,
    total: int = 260,
    value_heads: int = 4,
    **fixed: Any,
) -> Case:
    """Any case of the domain; `fixed` names fields that are not drawn but given (a value) or drawn as said (a strategy)."""

    def field(name: str, default: st.SearchStrategy[Any]) -> Any:
        chosen = fixed.get(name, default)
        return draw(chosen) if isinstance(chosen, st.SearchStrategy) else chosen

    packed = field(
        "packed", st.sampled_from([choice for choice, can in ((False, domain.batched), (True, domain.packed)) if can])
    )
    if packed:
        sizes = draw(lengths(domain, sequences, longest, total))
    else:
        rows = draw(st.integers(sequences[0], max(sequences[0], min(2, sequences[1]))))
        sizes = draw(lengths(domain, (1, 1), longest, total // rows)) * rows
    groups = [
        (h, hv)
        for h, hv in ((1, 1), (1, 2), (2, 2), (2, 4), (1, 4), (3, 3), (1, 8), (2, 8))
        if hv <= value_heads and (domain.grouped_heads or h == hv)
    ]
    heads, value_heads = field("groups", st.sampled_from(groups))
    widths = [w for w in WIDTHS if domain.key_dims[0] <= w <= domain.key_dims[1] and w % domain.width_step == 0] or [
        domain.key_dims[0]
    ]
    values_widths = [w for w in WIDTHS if domain.value_dims[0] <= w <= domain.value_dims[1] and w % domain.width_step == 0] or [
        domain.value_dims[0]
    ]
    narrow = 64 if value_heads > 2 else 128
    key_dim = field("key_dim", st.sampled_from([w for w in widths if w <= narrow] or widths[:1]))
    value_dim = (
        key_dim
        if domain.equal_widths
        else field("value_dim", st.sampled_from([w for w in values_widths if w <= narrow] or values_widths[:1]))
    )
    return Case(
        lengths=sizes,
        packed=packed,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=field("dtype", st.sampled_from(domain.dtypes)),
        gate=field("gate", st.sampled_from(GATES)),
        gate_dtype=field(
            "gate_dtype", st.sampled_from([d for d in domain.gate_dtypes for _ in range(3 if d == "fp32" else 1)])
        ),
        beta=field("beta", st.sampled_from([b for b in BETAS if domain.negative_eigenvalues or b != "two"])),
        values=field("values", st.sampled_from([v for v in VALUES if v != "one_hot"])),
        state=field("state", st.sampled_from(("none", "zero", "random", "random") if domain.initial_state else ("none",))),
        scale=field("scale", st.sampled_from(("default", "default", "one", "half") if domain.scale else ("default",))),
        qk_norm=field("qk_norm", st.booleans() if domain.qk_norm else st.just(False)),
        offsets=field("offsets", st.sampled_from(("int64", "int32"))) if packed else "int64",
        backward=domain.backward and field("backward", st.just(True)),
        seed=draw(st.integers(0, 2**16 - 1)),
    )
