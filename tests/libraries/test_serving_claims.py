"""The claim about SGLang's decoding kernels: what is wrong, or differs in a bit, in one block size is named.

A library of our own stands in for SGLang: its kernel is the update rule in torch, and faults are planted in it by block size.
SGLang itself is measured where its files can be fetched.
"""

import dataclasses
import functools
import importlib
import itertools
import json
import pathlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.alone import told
from tests.together import for_each
from verify.adapters import serving
from verify.adapters.blocks import in_blocks
from verify.adapters.registry import BUILT_IN
from verify.claims import serving_claims as claims
from verify.claims.setting import FULL_EFFORT, LEAST_EFFORT, QWEN3_NEXT, REAL, TINY, Setting
from verify.claims.table import Row
from verify.claims.timing import Call, Clock, HostClock, Spread
from verify.cli import claims_command as command
from verify.cli.parsers import parser

CPU = torch.device("cpu")
ADAPTERS = (
    *("sglang/recurrent_blocks", "sglang/update", "sglang/decode", "sglang/recurrent_kda_blocks", "sglang/decode_kda"),
    *("sglang/packed_decode", "sglang/packed_decode_kda", "sglang/verify"),
)
UPDATE = next(kernel for kernel in claims.KERNELS if kernel.call is claims.update)
VERIFY = next(kernel for kernel in claims.KERNELS if kernel.call is claims.verify)


def setting(**changes: Any) -> Setting:
    return dataclasses.replace(Setting(TINY, HostClock(), LEAST_EFFORT, CPU), **changes)


class Rule:
    """The update rule as a kernel: launched on a grid, in blocks of BV channels. `left_out` and `backwards` are its faults.

    In blocks of `left_out` channels the last channel is not written; in blocks of `backwards`, sums begin with the last channel.
    """

    def __init__(self, left_out: int = 0, backwards: int = 0) -> None:
        self.left_out, self.backwards = left_out, backwards
        self.grids: list[tuple[tuple[int, ...], int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(x: Inputs, o: Tensor, V: int, BV: int, NP2_T: int) -> None:
            assert NP2_T == 1, "what a tree of drafts needs depends on the batch, and would be compiled anew"
            self.grids.append((grid, BV))
            written = V - (self.left_out == BV)
            states, group = x.states[:, :, :written], x.v.shape[2] // x.k.shape[2]
            for slot, (start, end) in zip(x.slots, itertools.pairwise(x.offsets.tolist()), strict=True):
                state = states[slot].float()
                for token in range(start, end):
                    q, k = (unit(x[name][0, token].float()).repeat_interleave(group, 0)[:, None] for name in "qk")
                    state = state * x.g[0, token].float().exp()[:, None, None]
                    recalled = total(state * k, backwards=self.backwards == BV)
                    v = (x.v[0, token, :, :written].float() - recalled) * x.beta[0, token].float()[:, None]
                    state = state + v[..., None] * k
                    o[0, token, :, :written] = total(state * q * x.k.shape[-1] ** -0.5, backwards=self.backwards == BV).to(o.dtype)
                states[slot] = state.to(states.dtype)

        return launch


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def total(x: Tensor, *, backwards: bool) -> Tensor:
    """The sum of the last axis, one number after the other, each sum rounded to float32."""
    return functools.reduce(torch.add, (x.flip(-1) if backwards else x).unbind(-1))


def library(kernel: Any) -> types.ModuleType:
    """A module with SGLang's name for the update, which launches `kernel` in blocks of 8."""
    module = types.ModuleType("library")

    def update(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state_source: Tensor,
        initial_state_indices: Tensor,
        cu_seqlens: Tensor,
        use_qk_l2norm_in_kernel: bool,
    ) -> Tensor:
        assert use_qk_l2norm_in_kernel
        o, width = torch.empty_like(v), v.shape[-1]
        x = Inputs(
            q=q, k=k, v=v, g=g, beta=beta, states=initial_state_source, slots=initial_state_indices.tolist(), offsets=cu_seqlens
        )
        vars(module)[UPDATE.launched][1, -(-width // 8), len(x.slots)](x=x, o=o, V=width, BV=8, NP2_T=q.shape[1])
        return o

    vars(module).update({"fused_recurrent_gated_delta_rule_update": update, UPDATE.launched: kernel})
    return module


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def put(kernel: Any) -> None:
        monkeypatch.setattr(serving, "module", lambda name: library(kernel))

    return put


# Right or wrong, and the bits


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_a_right_kernel_holds_and_has_equal_bits_in_every_block_size(provide: Callable[[Any], None], state_dtype: str) -> None:
    kernel = Rule()
    provide(kernel)
    row = claims.judged(UPDATE, setting(), state_dtype)
    assert not row.broken and row.measured
    assert row.answers.startswith("hold in 6 cases: 0.") and row.answers.endswith("; equal to the bit in every block size")
    assert {size for _, size in kernel.grids} == {4, 8, 16, 32, 64}
    assert {grid[1] for grid, size in kernel.grids if size == 4} == {1, 2}  # widths of 4 and 8 channels


def test_a_block_size_that_leaves_a_channel_out_is_named(provide: Callable[[Any], None]) -> None:
    provide(Rule(left_out=32))
    row = claims.judged(UPDATE, setting(), "fp32")
    assert row.broken and command.exit_code([row]) == command.BROKEN
    assert row.answers.startswith("BROKEN at 8 tokens in 2 sequences: BV 32: ") and "(op=decode lengths=4+4 " in row.answers
    assert "; equal to the bit: 4, 8, 16, 64 | 32; " in row.answers


def test_a_block_size_that_sums_in_another_order_is_right_and_not_equal(provide: Callable[[Any], None]) -> None:
    provide(Rule(backwards=4))
    row = claims.judged(UPDATE, setting(), "fp32")
    assert not row.broken and row.answers.startswith("hold in 6 cases")
    apart = row.answers.partition("; equal to the bit: 4 | 8, 16, 32, 64; ")[2].removesuffix(" apart")
    assert 0 < float(apart) < 1


def test_a_bit_in_the_buffer_of_verification_counts() -> None:
    """Only the states after the last tokens are judged; the bits are compared after every token."""
    x = Inputs(o=torch.ones(3), buffer=torch.ones(2, 3))
    other = torch.ones(2, 3)
    other[0, 1] = torch.nextafter(other[0, 1], torch.tensor(2.0))
    forms: dict[str, Any] = {"BV 4": lambda x: (x.o, x.buffer), "BV 8": lambda x: (x.o, other), "BV 16": lambda x: (x.o, x.buffer)}
    assert claims.different(forms, (4, 8, 16), x) == {(4, 8), (8, 16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_more_than_values(dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, dtype=dtype)
    assert torch.equal(zeros, -zeros) and not claims.bits_equal(zeros, -zeros)
    nans = zeros / zeros
    assert not torch.equal(nans, nans) and claims.bits_equal(nans, nans.clone())


@for_each(
    ("unequal", "text"),
    [
        (set(), "equal to the bit in every block size"),
        ({(4, 8), (4, 16)}, "equal to the bit: 4 | 8, 16; 0.250 apart"),
        ({(4, 8), (4, 16), (8, 16)}, "equal to the bit: 4 | 8 | 16; 0.250 apart"),
    ],
)
def test_block_sizes_with_equal_bits_stand_together(unequal: set[tuple[int, int]], text: str) -> None:
    assert claims.equality((4, 8, 16), unequal, 0.25) == text


@for_each(("kernel", "adapter"), [*zip(claims.KERNELS, ADAPTERS, strict=True)])
def test_cases_are_inside_what_the_kernel_promises(kernel: claims.Kernel, adapter: str) -> None:
    module, _, name = BUILT_IN[adapter].partition(":")  # without `load`, which needs an installed SGLang
    domain = getattr(importlib.import_module(module), name).domain
    for sizes, state_dtype in itertools.product((REAL, TINY), {*kernel.state_dtypes} & {*domain.state_dtypes}):
        every = claims.cases(kernel, setting(sizes=sizes), state_dtype)
        assert [domain.outside(case) for case in every] == [None] * len(every)
        assert len({str(case) for case in every}) == len(every) == 3 * len(kernel.tokens) * sizes.judged_gates


def test_shares_of_the_layer() -> None:
    assert UPDATE.heads(QWEN3_NEXT, 1) == (16, 32) and UPDATE.heads(QWEN3_NEXT, 4) == (4, 8)
    assert next(kernel for kernel in claims.KERNELS if kernel.rule == "kda").heads(QWEN3_NEXT, 4) == (8, 8)
    assert claims.KERNELS[4].blocks(CPU) == (8, 16, 32, 64) and claims.KERNELS[4].blocks(torch.device("cuda")) == (4, 8, 16, 32, 64)


# Times


class Fixed(Clock):
    """A clock for which the calls take 1, 2, 3 ... milliseconds."""

    def times(self, calls: Sequence[Call]) -> list[float]:
        for call in calls:
            call()
        return [1.0 + place for place in range(len(calls))]

    def settle(self) -> None:
        return


def test_the_times_of_every_block_size_are_in_microseconds(provide: Callable[[Any], None]) -> None:
    provide(Rule())
    row = claims.timed(UPDATE, setting(clock=Fixed()), 1, 2)
    # Two rounds of five sizes, the second one backwards: 1 to 5 and 10 to 6 milliseconds.
    assert row.note == "BV 4 5,500, BV 8 5,500, BV 16 5,500, BV 32 5,500, BV 64 5,500" and row.unit == "us"
    assert row.before == Spread.of([2000.0, 9000.0]) and row.after == Spread.of([4000.0, 7000.0])
    assert row.what == "fused_recurrent_gated_delta_rule_update, BV 32 for 8" and row.size == "2 x 1 token, 1 and 2 heads"


def test_the_operands_are_those_of_a_server() -> None:
    (x,) = claims.operands(VERIFY, QWEN3_NEXT, 4, 3, CPU, "bf16")
    assert x.inputs.q.shape == (1, 12, 4, 128) and x.inputs.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert x.states.shape == (3, 8, 128, 128) and x.buffer is not None and x.buffer.shape == (3, 4, 8, 128, 128)
    assert x.mixed.shape == (12, 2 * 4 * 128 + 8 * 128) and x.inputs.slots.tolist() == [2, 1, 0]


def test_a_row_takes_no_more_rounds_than_it_may() -> None:
    assert claims.limited(FULL_EFFORT) == claims.MOST_EFFORT
    assert claims.limited(LEAST_EFFORT) == LEAST_EFFORT


@pytest.mark.gpu
def test_a_graph_launches_the_kernel_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda x, V, BV: x.states.add_(BV)

    module = types.ModuleType("counting")
    vars(module)["counts"] = Counts()

    def call(module: types.ModuleType, x: claims.Operands) -> tuple[Tensor, Tensor]:
        vars(module)["counts"][1, 2](x=x, V=16, BV=8)
        return x.states, x.states

    monkeypatch.setattr(serving, "module", lambda name: module)
    kernel = dataclasses.replace(UPDATE, call=call, launched="counts")
    layers = claims.operands(kernel, TINY.layer, 1, 2, torch.device("cuda"), "bf16")
    assert len(layers) == claims.MOST_LAYERS
    for x in layers:
        x.states.zero_()
    calls = claims.repeated(kernel, (4, 16), layers)
    for _ in range(3):
        calls["16"]()
    assert [float(x.states.mean()) for x in layers] == [68.0, *[48.0] * (len(layers) - 1)]  # 20 of them before the graphs


def test_other_arguments_are_replaced_only_if_the_kernel_has_them() -> None:
    got: list[dict[str, int]] = []

    class Takes:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **arguments: got.append({**arguments, "blocks": grid[0]})

    module = types.ModuleType("taking")
    vars(module)["takes"] = Takes()
    with in_blocks(module, "takes", 4, 0, {"NP2_T": 1, "BT": 2}):
        vars(module)["takes"][2, 1](V=16, BV=8, NP2_T=64)
    assert got == [{"V": 16, "BV": 4, "NP2_T": 1, "blocks": 4}]


# The parts of the verb


def test_without_sglang_one_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> types.ModuleType:
        raise ImportError("there is no sglang: run `gdn-verify fetch sglang`")

    monkeypatch.setattr(serving, "module", absent)
    rows = [row for part in (claims.right, claims.fast) for row in part(setting())]
    assert [row.reason for row in rows] == ["there is no sglang: run `gdn-verify fetch sglang`"] * 2
    assert all(row.lacking for row in rows)
    assert command.exit_code(rows) == command.UNDECIDED
    assert command.exit_code([*rows, Row(5, "decode", before=Spread.of([1.0]))]) == command.HOLDS


def test_every_kernel_has_its_rows(monkeypatch: pytest.MonkeyPatch, provide: Callable[[Any], None]) -> None:
    provide(Rule())
    monkeypatch.setattr(claims, "KERNELS", (UPDATE,))
    messages: list[str] = []
    rows: Iterator[Row] = itertools.chain(claims.right(setting(tell=messages.append)), claims.fast(setting(tell=messages.append)))
    assert [(row.what.rpartition(", ")[0] or row.what, bool(row.answers)) for row in rows] == [
        ("fused_recurrent_gated_delta_rule_update, fp32 states, BV 4, 8, 16, 32", True),
        ("fused_recurrent_gated_delta_rule_update, bf16 states, BV 4, 8, 16, 32", True),
        ("fused_recurrent_gated_delta_rule_update", False),
    ]
    assert messages == [
        "fused_recurrent_gated_delta_rule_update, fp32 states: right in every block size?",
        "fused_recurrent_gated_delta_rule_update, bf16 states: right in every block size?",
        "fused_recurrent_gated_delta_rule_update, 1/1 of the layer: times",
    ]


def test_the_verb_takes_a_folder_for_sglang() -> None:
    assert parser().parse_args(["claims", "--path", "somewhere"]).path == "somewhere"


@pytest.mark.slow
@pytest.mark.interpreted
def test_sglangs_kernels_are_right_in_every_block_size(sglang_files: pathlib.Path, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "claims.json"
    words = ["claims", "--claim", "5", "--device", "cpu", "--path", str(sglang_files), "--json", str(place)]
    ended = told("from verify.cli.main import main\ntold = main(words)", words=words)
    assert ended == command.HOLDS, place.read_text()
    rows = [row for row in json.loads(place.read_text())["rows"] if row["what"].startswith("fused_")]
    judged = [row for row in rows if row["answers"]]
    assert len(judged) == sum(len(kernel.state_dtypes) for kernel in claims.KERNELS) and len(rows) == len(judged) + len(
        claims.KERNELS
    )
    assert all(row["answers"].startswith("hold in ") and row["answers"].endswith("every block size") for row in judged)
