"""Cases of parallel paths: the line, the bits that it makes, and what it refuses."""

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.arithmetic.rounding import BITS
from oracles.operation import DTYPES
from oracles.tolerance.bound import Bound, bounds, truth
from properties.paths.case import ParallelCase
from tests.faults import different
from tests.formulas.test_rule_case import mixed, signed
from tests.together import for_each
from verify.bench import oracle_process

STREAM = {"hidden": 0, "in_proj": 1, "conv": 2, "A_log": 4, "dy": 8}  # part of the lines' format, as the defaults are


def number(seed: int, name: str, position: int, bits: int) -> int:
    """The integer of a position by the published generator, in Python integers."""
    key = mixed(seed * 64 + 32 + STREAM[name])
    return signed(mixed(position + key)) >> (64 - bits)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(tuple(DTYPES)))
def test_every_number_is_that_of_the_published_generator(seed: int, dtype: str) -> None:
    case = ParallelCase.parse(f"lengths=4+8 packed=yes cp=2 heads=2 value_heads=4 hidden=12 dtype={dtype} seed={seed}")
    x, bits = case.inputs(), BITS[dtype]
    hidden = [number(seed, "hidden", place, bits) * 2.0 ** (1 - bits) for place in range(12 * 12)]
    assert torch.equal(x.hidden.double().flatten(), torch.tensor(hidden, dtype=torch.float64))
    a_log = [-4.0 + number(seed, "A_log", place, 24) * 2.0**-23 for place in range(4)]
    assert torch.allclose(x.A_log.double(), torch.tensor(a_log, dtype=torch.float64), rtol=0, atol=2.0**-21)
    ratio = x.in_proj.double().flatten()[:20] / torch.tensor([number(seed, "in_proj", place, bits) or 1 for place in range(20)])
    assert torch.equal(ratio[ratio != 0].log2().frac(), torch.zeros_like(ratio[ratio != 0])), "scaled by a power of two"
    dy = case.cotangents()["y"].double().flatten()
    assert dy[7] == number(seed, "dy", 7, bits) * 2.0 ** (1 - bits)


def test_the_same_line_makes_the_same_call_however_it_is_shared() -> None:
    one = ParallelCase.parse("lengths=8+24 packed=yes heads=4 value_heads=4 seed=5")
    for changes in (
        {"tp": 2},
        {"cp": 2},
        {"tp": 2, "cp": 2, "sp": True},
        {"conv": "fla", "rule": "fla", "thd_all_to_all": "fused"},
    ):
        other = dataclasses.replace(one, **changes)  # type: ignore[arg-type]
        for name, value in one.inputs().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other.inputs()[name]), name


def test_padding_lengthens_sequences_and_leaves_empty_ones_to_be_padded_or_not() -> None:
    for padding, want in (("none", (4, 0, 8)), ("least", (4, 0, 8)), ("more", (8, 4, 12))):
        assert ParallelCase((4, 0, 8), packed=True, cp=2, heads=2, value_heads=2, padding=padding).padded == want
    case = ParallelCase((3, 0, 5), packed=True, cp=2, heads=2, value_heads=2, padding="least")
    assert case.padded == (4, 0, 8)
    assert case.cu_seqlens().tolist() == [0, 4, 4, 12]  # type: ignore[union-attr]
    assert case.cu_seqlens(padded=False).tolist() == [0, 3, 3, 8]  # type: ignore[union-attr]
    assert case.batch == (1, 12)
    assert ParallelCase((8, 8)).cu_seqlens() is None


def test_a_layers_call_has_the_layers_widths_and_ordinary_magnitudes() -> None:
    case = ParallelCase.parse("lengths=64 heads=2 value_heads=4 key_dim=16 value_dim=12 hidden=48 conv_bias=yes gate=mixed seed=2")
    x = case.inputs()
    case.spec.check(x)
    projected = x.hidden @ x.in_proj.mT
    assert 0.1 < float(projected.std()) < 3
    assert x.conv_bias is not None
    assert len(set(x.A_log.sign().tolist())) == 2, "mixed: some heads remember long, some do not"


def test_a_rule_and_a_convolution_are_the_calls_of_their_own() -> None:
    rule = ParallelCase.parse("op=kda lengths=8+8 packed=yes cp=2 layout=contiguous heads=2 value_heads=2 qk_norm=in_kernel")
    assert rule.inputs().qk_norm is True
    assert rule.spec.name == "kda"
    assert torch.equal(rule.inputs().q, rule.call().inputs().q)
    conv = ParallelCase.parse("op=causal_conv1d lengths=8 cp=2 value_heads=2 value_dim=3 conv_bias=yes")
    assert conv.inputs().weight.shape == (6, 4)
    conv.spec.check(conv.inputs())


def test_tagged_numbers_are_distinct_and_exact() -> None:
    tags = ParallelCase((4,)).tagged((3, 5, 7))
    assert sorted(tags.flatten().tolist()) == [float(number) for number in range(-52, 53)]
    with pytest.raises(ValueError, match=r"^tagged numbers must be at most 2\^24, got 16777218$"):
        ParallelCase((4,)).tagged((2, 2**23 + 1))


@for_each(
    ("line", "says"),
    [
        ("", "a case line must have lengths"),
        ("lengths=4 tp=0", "tp must be in 1..1024, got 0"),
        ("lengths=4 cp=x", "cp must be a whole number, got 'x'"),
        ("lengths=6 cp=2 heads=2 value_heads=2", "lengths must be multiples of 2 * cp = 4, got 6 in place 0"),
        ("lengths=4 cp=2", "heads must be a multiple of tp * cp = 2, got 1"),
        ("lengths=4+8", "lengths must all be equal unless packed=yes, got 4+8"),
        ("lengths=4 padding=least", "padding must be none unless packed=yes, got least"),
        ("lengths=4 heads=2", "value_heads must be a multiple of heads 2, got 1"),
        ("lengths=4 tp=4 sp=yes cp=2 heads=8 value_heads=8", "sp=yes needs a multiple of tp = 4 tokens on every CP rank, got 2"),
        ("lengths=4 layout=zigzag_batch", "layout must be zigzag or contiguous for op=gdn_layer, got zigzag_batch"),
        ("lengths=4 op=kda tp=2 heads=2 value_heads=2", "op=kda must have tp=1 sp=no padding=none"),
        ("lengths=4 op=decode", "operation must be one of gdn_layer"),
        ("lengths=4 rule=cuda", "rule must be one of torch, fla, got 'cuda'"),
        ("lengths=4 gates=long", "unknown word 'gates' in the case line; did you mean gate?"),
        ("lengths=4 seed=4294967296", "seed must be in 0..4294967295, got 4294967296"),
        ("lengths=2097152", "lengths must add up to at most 1048576 tokens, got 2097152"),
    ],
)
def test_an_illegal_line_is_refused_by_word_value_and_rule(line: str, says: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(says)):
        ParallelCase.parse(line)


def test_defaults_are_part_of_the_format() -> None:
    case = ParallelCase((4,))
    assert str(case) == "lengths=4"
    assert ParallelCase.parse("lengths=4") == case
    words = " ".join(itertools.starmap("{}={}".format, case.words().items()))
    assert ParallelCase.parse(words) == case


def test_a_rule_begins_chunks_where_pieces_of_ranks_begin() -> None:
    rows = [
        ("lengths=8+0+12 packed=yes op=gated_delta_rule cp=2 layout=contiguous", ((), (), (2,))),
        ("lengths=8+8 op=gated_delta_rule cp=2 layout=contiguous", ((4,), (4,))),
        ("lengths=16 op=kda cp=2 layout=zigzag_batch", ((4, 8, 12),)),
        ("lengths=8+16 packed=yes op=kda cp=2 layout=zigzag_batch", ((6,), (4, 10))),
        ("lengths=8+12 packed=yes op=kda cp=2 layout=zigzag", ((2, 4, 6), (3, 6, 9))),
        ("lengths=16 op=kda layout=contiguous", ()),
        ("lengths=16 cp=2 heads=2 value_heads=2", ()),  # its ranks have whole sequences
        ("lengths=16+16 cp=2 heads=2 value_heads=2 layout=contiguous", ((8,), (8,))),
        ("lengths=16 op=kda_layer cp=2 layout=contiguous", ((8,),)),
    ]
    assert different(lambda line: ParallelCase.parse(line).restarts, rows) == []


def test_what_one_call_does_not_allow_a_path_is_judged_by_runs_that_begin_chunks_as_its_ranks_do() -> None:
    case = ParallelCase.parse("lengths=5+70 packed=yes op=gated_delta_rule layout=contiguous cp=3 dtype=bf16 seed=11")
    inputs = case.inputs()

    def last(bound: Bound) -> Bound:
        return bound if bound.finer is None else last(bound.finer())

    def alone(**restarts: Any) -> Bound:
        return last(bounds(case.spec, inputs, None, "chunkwise", chunk=64, **restarts)["o"])

    judged = oracle_process.Work(dataclasses.replace(case, backward=False), "chunkwise", "ieee", 64).bounds()["o"]
    assert torch.equal(judged.allowed, bounds(case.spec, inputs, None, "chunkwise", chunk=64)["o"].allowed)
    one, parts = alone(), alone(restarts=case.restarts)
    assert torch.equal(last(judged).allowed, torch.maximum(one.allowed, parts.allowed))
    assert bool((parts.allowed > one.allowed).any())
    cut = case.starts()[1] + case.restarts[1][0]
    lost = truth(case.spec, inputs.replaced(cu_seqlens=torch.tensor([0, 5, cut, 75])))["o"]
    assert float(last(judged).ratios((lost - judged.value).norm(dim=-1)).max()) > 10, "a rank without the state of the one before"
