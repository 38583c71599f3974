"""The layer under test equals the oracle on every mesh and in every choice, moves tokens where they belong, and refuses alike.

Run as a program this file is a process of its own: for Triton's interpreter (python tests/test_gdn_layer.py fla), or as one rank of
a real process group (python tests/test_gdn_layer.py RANK SIZE DIRECTORY).
"""

import copy
import dataclasses
import functools
import importlib
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import bound, parallel, sharding
from oracles.layer import GDN_LAYER, Layer
from oracles.operation import Inputs
from oracles.sharding import AT_REST, Mesh, Shard
from tests.judging import worst
from verify.adapters.gdn import exchange, functions
from verify.adapters.gdn import layer as layers
from verify.adapters.gdn import weights as layer_weights
from verify.adapters.gdn.layer import CHOICES, Choices, GatedDeltaNet
from verify.ranks import collectives
from verify.ranks.collectives import Alone, Distributed, Place, simulate

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEADLINE_S = 300.0
NAMES = {
    "in_proj.weight": "in_proj",
    "conv.weight": "conv",
    "conv.bias": "conv_bias",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm",
    "out_proj.weight": "out_proj",
}
SINGLE = ("A_log", "dt_bias")


LAYER = Layer(hidden=6, heads=4, value_heads=8, key_dim=5, value_dim=3)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the whole layer. `lengths` are the tokens of each sequence, pads included; of SBHD (not packed), of each sample.

    States last about exp(`remembers`) tokens; where q, k and v are `small`, the norms' eps matter.
    """

    layer: Layer = LAYER
    lengths: tuple[int, ...] = (16, 0, 8, 24)
    packed: bool = True
    pads: int = 0
    index: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float32
    bias: bool = True
    eps: float = 1e-6
    allow_neg_eigval: bool = False
    remembers: float = 0.0
    small: float = 1.0
    seed: int = 0

    def tensor(self, number: int, *shape: int) -> Tensor:
        """Uniform in (-1, 1), in float64."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1

    def weights(self) -> dict[str, Tensor]:
        known = sharding.parameters(self.layer)
        fan = {"in_proj.weight": self.layer.hidden, "out_proj.weight": self.layer.sections["v"]}
        every = {name: self.tensor(number, *known[name].shape) * (3 / fan.get(name, 1)) ** 0.5 for number, name in enumerate(known)}
        every["A_log"] -= self.remembers
        every["in_proj.weight"] *= self.small
        every["conv.bias"] *= self.small
        parameters = {name: tensor for name, tensor in every.items() if self.bias or name != "conv.bias"}
        return {name: tensor.to(torch.float32 if name in SINGLE else self.dtype) for name, tensor in parameters.items()}

    @property
    def tokens(self) -> tuple[int, int]:
        """Along the sequence axis, and samples."""
        return (sum(self.lengths), 1) if self.packed else (self.lengths[0], len(self.lengths))

    def hidden(self) -> Tensor:
        return self.tensor(20, *self.tokens, self.layer.hidden).to(self.dtype)

    def cotangent(self) -> Tensor:
        return self.tensor(21, *self.tokens, self.layer.hidden).to(self.dtype)

    def offsets(self, *, pads: bool = True) -> Tensor | None:
        """cu_seqlens with or without the pad tokens; a sequence has up to `pads` of them."""
        if not self.packed:
            return None
        real = [length - (0 if pads else min(self.pads, length)) for length in self.lengths]
        return torch.tensor([0, *itertools.accumulate(real)], dtype=self.index)

    def inputs(self) -> Inputs:
        weights = {NAMES[name]: weight for name, weight in self.weights().items()}
        return Inputs(
            layer=self.layer,
            hidden=self.hidden().transpose(0, 1),
            **{"conv_bias": None, **weights},
            state=None,
            conv_state=None,
            cu_seqlens=self.offsets(),
            eps=self.eps,
            allow_neg_eigval=self.allow_neg_eigval,
        )

    def layout(self, cp: int) -> parallel.Layout:
        """The tokens of each CP rank."""
        lengths = self.lengths if self.packed else self.lengths[:1]
        return parallel.zigzag(lengths, cp) if cp > 1 else (torch.arange(sum(lengths)),)


@functools.lru_cache(maxsize=64)
def limits(call: Call) -> dict[str, bound.Bound]:
    """The truth and the bound of y and every gradient."""
    y = call.cotangent().transpose(0, 1)
    every = bound.bounds(GDN_LAYER, call.inputs(), {"y": y}, "chunkwise")
    return {name: limit for name, limit in every.items() if name not in ("final_state", "conv_state")}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one rank found."""

    rank: sharding.Rank
    y: Tensor
    hidden: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Shard]
    traffic: dict[str, collectives.Traffic]


def cut(module: GatedDeltaNet, whole: dict[str, Tensor]) -> dict[str, Shard]:
    """This rank's shards by the rows that the module says it holds."""
    rank, found = module.place.rank, {}
    for name, about in module.metadata.items():
        rows = about.rows(rank.tp, rank.mesh.tp)
        found[name] = Shard(name, about.shape, about.axis, rank, rows, whole[name].index_select(about.axis, rows))
    return found


def on_rank(call: Call, place: Place, choices: Choices, *, sp: bool) -> Answer:
    """One rank's part of the call, forward and backward."""
    module = layers.GatedDeltaNet(
        call.layer,
        place,
        choices,
        sequence_parallel=sp,
        dtype=call.dtype,
        conv_bias=call.bias,
        eps=call.eps,
        allow_neg_eigval=call.allow_neg_eigval,
    )
    module.load(cut(module, call.weights()))
    layout = call.layout(place.cp.size)
    take = functools.partial(sharding.shard_hidden, layout=layout, rank=place.rank, sequence_parallel=sp)
    hidden = take(call.hidden()).value.requires_grad_()
    y = module(hidden, call.offsets(pads=False), call.offsets() if call.pads else None)
    y.backward(take(call.cotangent()).value)
    local_gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    traffic = {axis: copy.deepcopy(getattr(place, axis).traffic) for axis in ("tp", "cp")}  # without the sums of the gradients
    summed = layer_weights.as_shards(module.summed_gradients(), module.metadata, place.rank)
    assert hidden.grad is not None
    return Answer(place.rank, y.detach(), hidden.grad, local_gradients, summed, traffic)


def answers(call: Call, choices: Choices = Choices(), tp: int = 1, cp: int = 1, *, sp: bool = False) -> list[Answer]:  # noqa: B008
    results = []
    for result in simulate(tp, cp, lambda place: on_rank(call, place, choices, sp=sp)):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def joined(call: Call, ranks: list[Answer], *, sp: bool) -> dict[str, Tensor]:
    """y and every gradient of the whole layer, as the operation has them; replicas must be equal bit for bit."""
    layout, shape = call.layout(ranks[0].rank.mesh.cp), (*call.tokens, call.layer.hidden)

    def tokens(take: Callable[[Answer], Tensor]) -> Tensor:
        shards = []
        for answer in ranks:
            rows = sharding.tokens(layout, answer.rank, sequence_parallel=sp)
            shards.append(Shard("hidden", shape, 0, answer.rank, rows, take(answer)))
        return sharding.assemble(shards).transpose(0, 1)

    found = {"y": tokens(lambda answer: answer.y), "dhidden": tokens(lambda answer: answer.hidden)}
    for name in ranks[0].parameters:
        found[f"d{NAMES[name]}"] = sharding.assemble([answer.parameters[name] for answer in ranks])
    return found


def ratio(call: Call, choices: Choices = Choices(), tp: int = 1, cp: int = 1, *, sp: bool = False) -> tuple[float, str]:  # noqa: B008
    """The worst error over what it may be, and of what."""
    return worst(GDN_LAYER, limits(call), joined(call, answers(call, choices, tp, cp, sp=sp), sp=sp))


# It equals the oracle


MESHES = [(1, False, 1), (2, False, 1), (2, True, 1), (4, True, 1), (1, False, 2), (1, False, 4), (2, False, 2), (2, True, 2)]
CALLS = {
    "packed": Call(),
    "padded": Call(
        Layer(6, 4, 8, 5, 3, conv_width=6),
        lengths=(8, 0, 24, 16),
        pads=3,
        index=torch.int32,
        bias=False,
        eps=1e-3,
        allow_neg_eigval=True,
        seed=1,
    ),
    "batched": Call(lengths=(24, 24, 24), packed=False, allow_neg_eigval=True, small=1e-3, seed=2),
    "long": Call(Layer(5, 4, 4, 3, 7, conv_width=2), lengths=(0, 8, 144), index=torch.int32, remembers=6.0, seed=3),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.slow_after_first
def test_layer_equals_the_oracle_on_every_mesh(name: str, mesh: tuple[int, bool, int]) -> None:
    (tp, sp, cp), call = mesh, CALLS[name]
    over, where = ratio(call, tp=tp, cp=cp, sp=sp)
    assert over < 1.0, where


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mesh", [(1, False, 1), (2, True, 2)], ids=str)
def test_half_precision_layer_equals_the_oracle(dtype: torch.dtype, mesh: tuple[int, bool, int]) -> None:
    (tp, sp, cp), call = mesh, Call(dtype=dtype, seed=4)
    over, where = ratio(call, tp=tp, cp=cp, sp=sp)
    assert over < 1.0, where


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.slow
def test_drawn_calls_equal_the_oracle(data: st.DataObject) -> None:
    tp, cp = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (3, 1)]))
    sp = data.draw(st.booleans())
    heads = tp * cp * data.draw(st.integers(1, 2))
    layer = Layer(
        hidden=data.draw(st.integers(1, 6)),
        heads=heads,
        value_heads=heads * data.draw(st.sampled_from([1, 2])),
        key_dim=data.draw(st.integers(1, 5)),
        value_dim=data.draw(st.integers(1, 5)),
        conv_width=data.draw(st.integers(1, 5)),
    )
    multiple = (2 if cp > 1 else 1) * cp * (tp if sp else 1)
    packed = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)) if packed else [data.draw(st.integers(1, 5))] * 2
    call = Call(
        layer,
        tuple(multiple * length for length in lengths),
        packed=packed,
        pads=data.draw(st.integers(0, 3)) if packed else 0,
        bias=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    choices = Choices(
        qk_norm=data.draw(st.sampled_from(CHOICES["qk_norm"])),
        thd_all_to_all=data.draw(st.sampled_from(CHOICES["thd_all_to_all"])),
        deterministic=data.draw(st.booleans()),
    )
    over, where = ratio(call, choices, tp, cp, sp=sp)
    assert over < 1.0, (call, choices, where)


def test_pad_tokens_change_nothing_before_them() -> None:
    """Padded offsets win, and pads stand at the ends: real tokens' y is that of the sequences without pads."""
    padded = Call(lengths=(8, 0, 24, 16), pads=3)
    (whole,) = answers(padded)
    real = parallel.real_tokens([max(length - 3, 0) for length in padded.lengths], padded.lengths)
    short = dataclasses.replace(padded, lengths=tuple(max(length - 3, 0) for length in padded.lengths), pads=0)
    module = make(short, Place(Alone(), Alone()))
    module.load(cut(module, padded.weights()))
    y = module(padded.hidden()[real], short.offsets()).detach()
    assert torch.allclose(y, whole.y[real], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(whole.y.roll(-3, 0)[real], whole.y[real], rtol=1e-2, atol=1e-2)


# Before equals after


TORCH = [
    Choices(qk_norm=norm, thd_all_to_all=form, deterministic=deterministic)
    for norm, form, deterministic in itertools.product(*(CHOICES[name] for name in ("qk_norm", "thd_all_to_all", "deterministic")))
]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def same_bits(one: list[Answer], two: list[Answer]) -> bool:
    return all(
        torch.equal(bits(got), bits(want))
        for a, b in zip(one, two, strict=True)
        for got, want in zip((a.y, a.hidden, *a.gradients.values()), (b.y, b.hidden, *b.gradients.values()), strict=True)
    )


@pytest.mark.parametrize("choices", TORCH, ids=lambda choices: " ".join(str(value) for value in dataclasses.astuple(choices)))
@pytest.mark.slow_after_first
def test_every_choice_is_within_the_oracle_s_bound(choices: Choices) -> None:
    for name in ("packed", "batched"):
        over, where = ratio(CALLS[name], choices, 1, 2)
        assert over < 1.0, (name, where)


@pytest.mark.parametrize("name", ["packed", "padded"])
@pytest.mark.parametrize("mesh", [(1, False, 2), (1, False, 4), (2, True, 2)], ids=str)
@pytest.mark.slow_after_first
def test_fused_equals_per_sequence_bit_for_bit(name: str, mesh: tuple[int, bool, int]) -> None:
    tp, sp, cp = mesh
    fused, per_sequence = (answers(CALLS[name], Choices(thd_all_to_all=form), tp, cp, sp=sp) for form in ("fused", "per_sequence"))
    assert same_bits(fused, per_sequence)
    assert not same_bits(fused, answers(dataclasses.replace(CALLS[name], seed=9), Choices(), tp, cp, sp=sp))


def test_two_calls_give_the_same_bits() -> None:
    assert same_bits(answers(CALLS["packed"], tp=2, cp=2), answers(CALLS["packed"], tp=2, cp=2))


def test_deterministic_layer_adds_nothing_by_index() -> None:
    """What goes back by index_add is atomic on a GPU; a CPU would not show it."""

    def nodes(choices: Choices, place: Place) -> set[str]:
        module = make(CALLS["packed"], place, choices)
        hidden = CALLS["packed"].hidden()[: 48 // place.cp.size].requires_grad_()
        seen, left = set(), [module(hidden, CALLS["packed"].offsets()).grad_fn]
        while left:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                left += [successor for successor, _ in node.next_functions]
        return {node.name() for node in seen}

    for form in CHOICES["thd_all_to_all"]:
        for choices, adds in ((Choices(thd_all_to_all=form), False), (Choices(thd_all_to_all=form, deterministic=False), True)):
            for names in simulate(1, 2, functools.partial(nodes, choices)):
                assert isinstance(names, set), names
                assert len(names) > 20
                assert any("Index" in name and name != "IndexCopyBackward0" for name in names) == adds


SMALL = {
    "packed": Call(Layer(4, 2, 4, 8, 8), lengths=(4, 0, 8), seed=5),
    "batched": Call(Layer(4, 2, 4, 8, 8), lengths=(8, 8), packed=False, seed=6),
    "padded": Call(Layer(4, 2, 4, 8, 8), lengths=(4, 0, 8), pads=3, index=torch.int32, seed=7),
    "empty": Call(Layer(4, 2, 4, 8, 8), lengths=(0, 0), seed=8),
}
FLA = [
    (Choices(conv="fla"), (1, False, 2), "batched"),
    (Choices(rule="fla"), (1, False, 1), "packed"),
    (Choices(conv="fla", rule="fla", qk_norm="combined", deterministic=False), (2, True, 1), "batched"),
    (Choices(conv="fla", rule="fla", qk_norm="in_kernel", thd_all_to_all="per_sequence"), (1, False, 2), "padded"),
    (Choices(conv="fla", rule="fla"), (1, False, 2), "empty"),
]


@pytest.mark.slow
def test_fla_s_kernels_equal_the_oracle() -> None:
    pytest.importorskip("fla")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "fla"], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(FLA)
    for (choices, mesh, name), (over, where, ran) in zip(FLA, found, strict=True):
        assert over < 1.0, (choices, mesh, name, where)
        ranks = mesh[0] * mesh[2] if name != "empty" else 0
        assert ran == [ranks * (choices.conv == "fla"), ranks * (choices.rule == "fla")], "a fallback is not the kernel"


def counted(module: str, name: str) -> list[str]:
    """The calls of a function from now on, one entry each."""
    home, calls = importlib.import_module(module), []
    plain = getattr(home, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return plain(*arguments, **options)

    setattr(home, name, wrapped)
    return calls


def fla() -> None:
    from verify.interpreter import install

    install()
    kernels = [counted("fla.modules.causal_conv1d", "causal_conv1d"), counted("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")]
    found = []
    for choices, (tp, sp, cp), name in FLA:
        before = [len(calls) for calls in kernels]
        worst_ratio = ratio(SMALL[name], choices, tp, cp, sp=sp)
        found.append((*worst_ratio, [len(calls) - count for calls, count in zip(kernels, before, strict=True)]))
    print(json.dumps(found))


# The exchange


SECTIONS = st.lists(st.integers(1, 3), min_size=1, max_size=6)
FORMS = {"fused": True, "per_sequence": False}


def tagged(rows: int, batch: int, features: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(rows * batch * features).view(rows, batch, features).to(dtype)


def moved(x: Tensor, lengths: list[int], sections: list[int], cp: int, *, fused: bool) -> list[tuple[Tensor, Tensor]]:
    """HP of each rank, and CP again."""
    layout = parallel.zigzag(lengths, cp)

    def work(place: Place) -> tuple[Tensor, Tensor]:
        there = exchange.cp_to_hp(place.cp, x.index_select(0, layout[place.cp.rank]), lengths, sections, fused=fused)
        return there, exchange.hp_to_cp(place.cp, there, lengths, sections, fused=fused)

    results = []
    for result in simulate(1, cp, work):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15)
@given(
    cp=st.sampled_from([2, 3, 4, 8]),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    sections=SECTIONS,
    batch=st.integers(1, 2),
)
@pytest.mark.slow
def test_tagged_tokens_land_where_the_oracle_says(form: str, cp: int, lengths: list[int], sections: list[int], batch: int) -> None:
    check_exchange([2 * cp * length for length in lengths], [cp * section for section in sections], cp, batch, form)


@pytest.mark.parametrize("cp", [16, 64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow_after_first
def test_tagged_tokens_land_at_many_ranks(form: str, cp: int) -> None:
    check_exchange([2 * cp, 0, 4 * cp], [cp, 2 * cp], cp, 1, form)


def check_exchange(lengths: list[int], sections: list[int], cp: int, batch: int, form: str) -> None:
    x = tagged(sum(lengths), batch, sum(sections))
    back = parallel.shard(x, parallel.zigzag(lengths, cp))
    there = parallel.shard(x, parallel.head_parallel(sections, cp), axis=-1)
    for rank, (hp, again) in enumerate(moved(x, lengths, sections, cp, fused=FORMS[form])):
        assert torch.equal(hp, there[rank])
        assert torch.equal(again, back[rank])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_go_back_the_way_values_came(form: str) -> None:
    """The gradient of CP -> HP is HP -> CP of the cotangents, and the other way round; -0.0 stays -0.0."""
    lengths, sections, cp = [8, 0, 16], [4, 8], 4
    x, layout = -tagged(24, 2, 12, torch.float32), parallel.zigzag(lengths, 4)
    slices = parallel.head_parallel(sections, cp)
    tokens, heads = parallel.shard(x, layout), parallel.shard(x, slices, axis=-1)
    assert sum(int((bits(shard) == -(2**31)).sum()) for shard in tokens) == 1, "one entry is -0.0"

    def work(place: Place) -> tuple[Tensor, Tensor]:
        cp_leaf, hp_leaf = (torch.zeros_like(shards[place.cp.rank], requires_grad=True) for shards in (tokens, heads))
        there = exchange.cp_to_hp(place.cp, cp_leaf, lengths, sections, fused=FORMS[form])
        (one,) = torch.autograd.grad(there, cp_leaf, heads[place.cp.rank])
        back = exchange.hp_to_cp(place.cp, hp_leaf, lengths, sections, fused=FORMS[form])
        (two,) = torch.autograd.grad(back, hp_leaf, tokens[place.cp.rank])
        return one, two

    for rank, got in enumerate(simulate(1, cp, work)):
        assert isinstance(got, tuple), got
        assert torch.equal(bits(got[0]), bits(tokens[rank]))
        assert torch.equal(bits(got[1]), bits(heads[rank]))


def unordered(lengths: list[int], cp: int) -> tuple[Tensor, Tensor]:
    """The tokens of rank 0, then of rank 1, ...: zigzag is not undone."""
    order = torch.arange(sum(lengths))
    return order, order


def over_the_batch(lengths: list[int], cp: int) -> tuple[Tensor, Tensor]:
    """The stream is one sequence."""
    return RIGHT_TOKENS([sum(lengths)], cp)


def even(sections: tuple[int, ...], cp: int) -> tuple[Tensor, Tensor]:
    """Features are cut evenly over the whole, across sections."""
    order = torch.arange(sum(sections))
    return order, order


RIGHT_TOKENS = exchange.token_map


@given(st.integers(1, 8), st.lists(st.integers(0, 5), max_size=6))
def test_token_map_is_the_zigzag_layout_of_the_oracle(cp: int, pieces: list[int]) -> None:
    lengths = [2 * cp * tokens for tokens in pieces]
    index, inverse = exchange.token_map(lengths, cp)
    assert inverse.tolist() == (torch.cat(parallel.zigzag(lengths, cp)).tolist() if lengths else [])
    assert index[inverse].tolist() == list(range(sum(lengths)))


@pytest.mark.parametrize(("name", "wrong"), [("token_map", unordered), ("token_map", over_the_batch), ("feature_map", even)])
def test_wrong_maps_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., object]) -> None:
    monkeypatch.setattr(exchange, name, wrong)
    with pytest.raises(AssertionError):
        check_exchange([8, 16], [2, 4], 2, 1, "fused")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [6, 4]}, r"lengths must have sequences of a multiple of 2 \* cp = 4 tokens, got 6 \(\[6, 4\]\)"),
        ({"sections": [3, 3]}, r"sections must be multiples of cp = 2, got 3 \(\[3, 3\]\)"),
        ({"lengths": [4, 8]}, r"x must be \[6, ..., 6\] by lengths and sections, got shape \(4, 6\)"),
        ({"sections": [2, 6]}, r"x must be \[4, ..., 8\] by lengths and sections, got shape \(4, 6\)"),
    ],
)
def test_exchange_refuses_what_does_not_fit(change: dict[str, list[int]], message: str) -> None:
    def work(place: Place) -> None:
        for fused in (True, False):
            with pytest.raises(ValueError, match=message):
                exchange.cp_to_hp(place.cp, torch.zeros(4, 6), **{"lengths": [4, 4], "sections": [2, 4], **change}, fused=fused)
        with pytest.raises(ValueError, match="x must be"):
            exchange.hp_to_cp(place.cp, torch.zeros(4, 6), [4, 4], [2, 4], fused=True)
        assert not place.cp.traffic.calls

    assert simulate(1, 2, work) == [None, None]


# What is sent


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [(16,), (16, 0, 8, 24), (0, 8, 8, 8, 8)])
def test_collectives_and_bytes_are_those_of_the_design(form: str, lengths: tuple[int, ...]) -> None:
    call, cp = Call(lengths=lengths), 2
    wide = sum(call.layer.sections.values())
    calls = 1 + 1 if form == "fused" else sum(length > 0 for length in lengths) * (len(call.layer.sections) + 1)
    sent_bytes = 4 * sum(lengths) // cp * (wide + call.layer.sections["v"]) * (cp - 1) // cp
    for answer in answers(call, Choices(thd_all_to_all=form), 1, cp):
        assert answer.traffic["cp"].calls == {"all_to_all": 2 * calls}, "backward mirrors"
        assert answer.traffic["cp"].sent_bytes == {"all_to_all": 2 * sent_bytes}
        assert not answer.traffic["tp"].calls


def test_batched_layer_exchanges_once_each_way() -> None:
    for answer in answers(CALLS["batched"], Choices(thd_all_to_all="per_sequence"), 1, 2):
        assert answer.traffic["cp"].calls == {"all_to_all": 4}


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_collectives_are_those_of_the_design(sp: object) -> None:
    call = Call()
    nbytes = 4 * sum(call.lengths) * call.layer.hidden
    for answer in answers(call, tp=2, sp=bool(sp)):
        if sp:
            assert answer.traffic["tp"].calls == {"all_gather": 2, "reduce_scatter": 2}
            assert answer.traffic["tp"].sent_bytes == {"all_gather": nbytes, "reduce_scatter": nbytes}
        else:
            assert answer.traffic["tp"].calls == {"all_reduce": 2}
        assert not answer.traffic["cp"].calls


def test_one_rank_says_nothing() -> None:
    (alone,) = answers(Call())
    assert not alone.traffic["tp"].calls and not alone.traffic["cp"].calls


# Parameters


@settings(max_examples=20)
@given(mesh=st.builds(Mesh, st.integers(1, 3), st.integers(1, 3)), bias=st.booleans(), groups=st.integers(1, 2))
def test_metadata_are_the_oracle_s(mesh: Mesh, bias: object, groups: int) -> None:
    layer = Layer(3, mesh.tp * mesh.cp, mesh.tp * mesh.cp * groups, 2, 5)
    about = layer_weights.metadata(layer, conv_bias=bool(bias))
    known = sharding.parameters(layer)
    assert list(about) == [name for name in known if bias or name != "conv.bias"]
    for name, entry in about.items():
        assert (entry.shape, entry.axis, entry.gradient_sum) == (known[name].shape, known[name].axis, known[name].gradient_sum)
        for rank in mesh.ranks():
            assert torch.equal(entry.rows(rank.tp, mesh.tp), sharding.rows(layer, name, rank, AT_REST))


@pytest.mark.parametrize("after", [(1, 1), (2, 2), (1, 4), (4, 1)])
def test_resharded_checkpoint_is_exact(after: tuple[int, int]) -> None:
    """Tagged weights from (2, 2) to another mesh: every rank holds what it would have been given of the whole."""
    call = Call()
    whole = {name: torch.arange(weight.numel()).view(weight.shape).float() for name, weight in call.weights().items()}

    def save(place: Place) -> dict[str, Shard]:
        module = make(call, place)
        module.load(cut(module, whole))
        return module.shards()

    saved = simulate(2, 2, save)
    assert all(isinstance(shards, dict) for shards in saved), saved
    moved = {name: sharding.reshard(call.layer, [shards[name] for shards in saved], Mesh(*after)) for name in whole}  # type: ignore[index]

    def restore(place: Place) -> None:
        number = list(Mesh(*after).ranks()).index(place.rank)
        module = make(call, place)
        module.load({name: shards[number] for name, shards in moved.items()})
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, sharding.shard(call.layer, name, whole[name], place.rank, AT_REST).value)

    assert simulate(*after, restore) == [None] * (after[0] * after[1])


def make(call: Call, place: Place, choices: Choices = Choices(), **changes: Any) -> GatedDeltaNet:  # noqa: B008
    arguments = {"sequence_parallel": False, "dtype": call.dtype, "conv_bias": call.bias, **changes}
    return GatedDeltaNet(call.layer, place, choices, **arguments)


def test_load_refuses_what_is_not_its_own() -> None:
    call = Call()

    def work(place: Place) -> None:
        module = make(call, place)
        mine = cut(module, call.weights())
        other = {**mine, "A_log": dataclasses.replace(mine["A_log"], rows=mine["A_log"].rows.flip(0))}
        with pytest.raises(ValueError, match=r"shard of A_log must have rows \[.*\] along axis 0 of \(8,\), got \["):
            module.load(other)
        with pytest.raises(ValueError, match=r"shards must be of in_proj.weight, .*, got conv.weight"):
            module.load({name: shard for name, shard in mine.items() if name == "conv.weight"})
        half = dataclasses.replace(mine["A_log"], value=mine["A_log"].value.half())
        with pytest.raises(ValueError, match=r"shard of A_log must be torch.float32, got torch.float16"):
            module.load({**mine, "A_log": half})
        assert all(not parameter.any() for parameter in module.parameters()), "what is refused changes nothing"

    assert simulate(2, 1, work) == [None, None]


def test_parameters_that_took_no_part_have_a_gradient_of_zeros() -> None:
    module = make(Call(), Place(Alone(), Alone()))
    assert all(not gradient.any() for gradient in module.summed_gradients().values())
    assert list(module.summed_gradients()) == list(NAMES)


# What is refused


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


TWO_AND_TWO = (2, True, 2)
ILLEGAL: dict[str, tuple[tuple[int, bool, int], dict[str, Any], str]] = {
    "half a zigzag": (
        (1, False, 2),
        {"tokens": 6, "cu_seqlens": offsets(0, 2, 12)},
        "cu_seqlens must have sequences of a multiple of 2 * cp = 4 tokens, got 2 ([2, 10])",
    ),
    "half a zigzag, padded": (
        (1, False, 2),
        {"tokens": 6, "cu_seqlens": offsets(0, 1, 9), "cu_seqlens_padded": offsets(0, 2, 12)},
        "cu_seqlens_padded must have sequences of a multiple of 2 * cp = 4 tokens, got 2 ([2, 10])",
    ),
    "half a zigzag, batched": (
        (1, False, 2),
        {"tokens": 3},
        "hidden must have sequences of a multiple of 2 * cp = 4 tokens, got 6 ([6])",
    ),
    "totals disagree": (
        TWO_AND_TWO,
        {"tokens": 3, "cu_seqlens": offsets(0, 8, 16)},
        "cu_seqlens must add up to the 12 tokens of all ranks, got 16",
    ),
    "real tokens for padded ones": (
        (1, False, 2),
        {"tokens": 8, "cu_seqlens": offsets(0, 4, 12)},
        "cu_seqlens must add up to the 16 tokens of all ranks, got 12",
    ),
    "sequence parallelism cannot cut": (
        (3, True, 2),
        {"tokens": 4, "cu_seqlens": offsets(0, 4, 8)},
        "cu_seqlens must give every CP rank a multiple of tp = 3 tokens to cut, got 4",
    ),
    "decreasing": (
        TWO_AND_TWO,
        {"cu_seqlens": offsets(0, 12, 8)},
        "cu_seqlens must start at 0, have two entries or more and not decrease, got [0, 12, 8]",
    ),
    "not from 0": (TWO_AND_TWO, {"cu_seqlens": offsets(4, 8)}, "cu_seqlens must start at 0, have two entries or more"),
    "no sequence": (TWO_AND_TWO, {"cu_seqlens": offsets(0)}, "cu_seqlens must start at 0, have two entries or more"),
    "float offsets": (
        TWO_AND_TWO,
        {"cu_seqlens": offsets(0, 8, dtype=torch.float32)},
        "cu_seqlens must be a vector of int32 or int64, got torch.float32 of shape (2,)",
    ),
    "no tensor": (TWO_AND_TWO, {"cu_seqlens": [0, 8]}, "cu_seqlens must be a vector of int32 or int64, got [0, 8]"),
    "pads of other sequences": (
        TWO_AND_TWO,
        {"cu_seqlens": offsets(0, 8), "cu_seqlens_padded": offsets(0, 4, 8)},
        "cu_seqlens_padded must hold the sequences of cu_seqlens [8], got [4, 4]",
    ),
    "pads less than nothing": (
        TWO_AND_TWO,
        {"cu_seqlens": offsets(0, 6, 8), "cu_seqlens_padded": offsets(0, 4, 8)},
        "cu_seqlens_padded must hold the sequences of cu_seqlens [6, 2], got [4, 4]",
    ),
    "pads alone": (TWO_AND_TWO, {"cu_seqlens_padded": offsets(0, 8)}, "cu_seqlens_padded needs cu_seqlens, got it alone"),
    "packed batch": (
        TWO_AND_TWO,
        {"batch": 2, "cu_seqlens": offsets(0, 8)},
        "hidden must have batch 1 with cu_seqlens, got shape (2, 2, 6)",
    ),
    "another dtype": (TWO_AND_TWO, {"dtype": torch.float64}, "hidden must be torch.float32, got torch.float64"),
    "another width": (TWO_AND_TWO, {"width": 5}, "hidden must be [tokens, batch, 6], got shape (2, 1, 5)"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_layouts_are_refused_alike_before_any_communication(name: str) -> None:
    (tp, sp, cp), case, message = ILLEGAL[name]
    layer = dataclasses.replace(Call().layer, heads=12, value_heads=12)

    def work(place: Place) -> str:
        module = GatedDeltaNet(layer, place, Choices(), sequence_parallel=sp, dtype=torch.float32, conv_bias=True)
        hidden = torch.zeros(case.get("tokens", 2), case.get("batch", 1), case.get("width", 6), dtype=case.get("dtype"))
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared below
            module(hidden, case.get("cu_seqlens"), case.get("cu_seqlens_padded"))
        assert not place.tp.traffic.calls and not place.cp.traffic.calls
        return str(refused.value)

    messages = simulate(tp, cp, work)
    assert len(set(messages)) == 1, messages
    assert str(messages[0]).startswith(message)


def test_heads_that_do_not_divide_and_dtypes_are_refused_alike() -> None:
    call = Call()

    def work(place: Place) -> None:
        with pytest.raises(ValueError, match=r"^heads must be a multiple of tp \* cp = 2 \* 3, got 4$"):
            make(call, place)

    assert simulate(2, 3, work) == [None] * 6
    with pytest.raises(ValueError, match=r"dtype must be one of torch.float32, .*, got torch.float64"):
        make(call, Place(Alone(), Alone()), dtype=torch.float64)


@pytest.mark.parametrize("name", CHOICES)
def test_unknown_choices_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got 'triton'"):
        Choices(**{name: "triton"})


# Wrong layers


def evenly(about: layer_weights.Metadata, rank: int, tp: int) -> Tensor:
    """Sections are not told apart: each TP rank has an equal part of the whole."""
    return torch.arange(about.shape[about.axis]).view(tp, -1)[rank] if about.cut else torch.arange(about.shape[about.axis])


def wrong_slice(name: str) -> Callable[[GatedDeltaNet, str], Tensor]:
    """A parameter's slice of the next CP rank."""

    def in_use(module: GatedDeltaNet, wanted: str) -> Tensor:
        whole, comm = module.get_parameter(wanted), module.place.cp
        return whole.chunk(comm.size)[(comm.rank + 1) % comm.size] if wanted == name else RIGHT_SLICE(module, wanted)

    return in_use


def unsectioned(module: GatedDeltaNet, name: str) -> Tensor:
    """The convolution's slice is cut evenly over q, k and v."""
    return module.get_parameter(name).chunk(module.place.cp.size)[module.place.cp.rank]


def leaking_conv(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int]) -> Tensor:
    """The last inputs of a sequence are the first of the next."""
    return RIGHT_CONV(x, weight, bias, [sum(lengths)])


def leaking_rule(*arguments: Any, **options: Any) -> Tensor:
    """The state of a sequence goes on into the next."""
    *tensors, lengths = arguments
    return RIGHT_RULE(*tensors, [sum(lengths)], **options)


def tiled_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int], **options: Any) -> Tensor:
    """Value head h reads key head h % H."""
    order = torch.arange(v.shape[2]).view(-1, k.shape[2]).T.flatten()
    o = RIGHT_RULE(q, k, v[:, :, order], g[:, :, order], beta[:, :, order], lengths, **options)
    return o[:, :, order.argsort()]


def unpadded(module: GatedDeltaNet, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:
    """Pad tokens become a sequence with what follows: the kernel takes other offsets than the exchange."""
    shorter = [length - min(3, length) for length in lengths]
    return RIGHT_MIX(module, x, cu_seqlens, [*shorter, sum(lengths) - sum(shorter)])


def summed_over(axes: tuple[str, ...]) -> Callable[..., dict[str, layer_weights.Metadata]]:
    """Every gradient is added over the same axes."""

    def metadata(*arguments: Any, **options: Any) -> dict[str, layer_weights.Metadata]:
        right = RIGHT_METADATA(*arguments, **options)
        return {name: dataclasses.replace(entry, gradient_sum=axes) for name, entry in right.items()}

    return metadata


def alone(place: collectives.Comm, x: Tensor) -> Tensor:
    """The identity, in both directions."""
    return x


def first_block(place: collectives.Comm, x: Tensor) -> Tensor:
    """Cut along tokens, and not added."""
    return x.chunk(place.size)[place.rank]


RIGHT_SLICE, RIGHT_MIX = GatedDeltaNet.in_use, GatedDeltaNet.mix
RIGHT_CONV, RIGHT_RULE, RIGHT_METADATA = functions.causal_conv1d, functions.gated_delta_rule, layer_weights.metadata
# Where it is planted, under which name, what, and the mesh and call that see it.
WRONG: dict[str, tuple[object, str, Callable[..., object], tuple[int, bool, int], str]] = {
    "zigzag not undone": (exchange, "token_map", unordered, (1, False, 2), "packed"),
    "zigzag of the whole stream": (exchange, "token_map", over_the_batch, (1, False, 2), "packed"),
    "features cut evenly over CP ranks": (exchange, "feature_map", even, (1, False, 2), "packed"),
    "sections cut evenly over TP ranks": (layer_weights.Metadata, "rows", evenly, (2, False, 1), "packed"),
    "no all-reduce in backward": (layers, "copy_to", alone, (2, False, 1), "packed"),
    "no all-reduce in forward": (layers, "reduce_from", alone, (2, False, 1), "packed"),
    "no sum under sequence parallelism": (layers, "scatter_to", first_block, (2, True, 1), "packed"),
    "A_log of another rank": (GatedDeltaNet, "in_use", wrong_slice("A_log"), (1, False, 2), "packed"),
    "dt_bias of another rank": (GatedDeltaNet, "in_use", wrong_slice("dt_bias"), (1, False, 2), "packed"),
    "conv cut evenly over q, k and v": (GatedDeltaNet, "in_use", unsectioned, (1, False, 2), "packed"),
    "conv leaks over sequences": (functions, "causal_conv1d", leaking_conv, (1, False, 1), "packed"),
    "conv leaks over samples": (functions, "causal_conv1d", leaking_conv, (1, False, 1), "batched"),
    "state leaks over sequences": (functions, "gated_delta_rule", leaking_rule, (1, False, 1), "packed"),
    "value heads tiled": (functions, "gated_delta_rule", tiled_rule, (1, False, 1), "packed"),
    "pads begin a sequence": (GatedDeltaNet, "mix", unpadded, (1, False, 2), "padded"),
    "norm's gradient not added over tp": (layer_weights, "metadata", summed_over(("cp",)), (2, False, 1), "packed"),
    "gradients not added over cp": (layer_weights, "metadata", summed_over(()), (1, False, 2), "packed"),
    "gradients added over tp": (layer_weights, "metadata", summed_over(("tp", "cp")), (2, False, 1), "packed"),
}

TELLS_REPLICAS_APART = {
    "no all-reduce in backward",
    "no all-reduce in forward",
    "norm's gradient not added over tp",
    "gradients not added over cp",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.slow_after_first
def test_wrong_layer_is_rejected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, wrong, (tp, sp, cp), case = WRONG[name]
    call = CALLS[case]
    assert ratio(call, tp=tp, cp=cp, sp=sp)[0] < 1.0
    monkeypatch.setattr(owner, attribute, wrong)
    found = answers(call, tp=tp, cp=cp, sp=sp)
    if name in TELLS_REPLICAS_APART:
        with pytest.raises(ValueError, match=r"replicas of .* must be equal bit for bit"):
            joined(call, found, sp=sp)
    else:
        assert worst(GDN_LAYER, limits(call), joined(call, found, sp=sp))[0] > 10.0


# Real processes


def two_ranks(place_of: Callable[[str], Place]) -> Iterator[tuple[str, Answer]]:
    """The layer on two ranks, cut over either axis."""
    for axis, sp in (("tp", True), ("tp", False), ("cp", False)):
        yield f"{axis} {sp}", on_rank(CALLS["padded"], place_of(axis), Choices(), sp=sp)


@pytest.mark.slow
def test_real_processes_give_what_simulated_ranks_give(tmp_path: pathlib.Path) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    start = functools.partial(subprocess.Popen, env=environment, stderr=subprocess.PIPE, text=True)
    ranks = [start([sys.executable, __file__, str(rank), "2", str(tmp_path)]) for rank in range(2)]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    compared = 0
    for axis, sp in (("tp", True), ("tp", False), ("cp", False)):
        want = answers(CALLS["padded"], Choices(), *((2, 1) if axis == "tp" else (1, 2)), sp=sp)
        for rank, answer in enumerate(want):
            for name, tensor in tensors(answer).items():
                got = torch.load(tmp_path / f"{rank}.pt")[f"{axis} {sp}"][name]
                assert torch.equal(bits(got), bits(tensor)), (axis, sp, name)
                compared += 1
    assert compared == 3 * 2 * (2 + 6 + 6)


def tensors(answer: Answer) -> dict[str, Tensor]:
    summed = {f"sum {name}": shard.value for name, shard in answer.parameters.items()}
    return {"y": answer.y, "hidden": answer.hidden, **answer.gradients, **summed}


def serve(rank: int, size: int, directory: pathlib.Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), size), rank=rank, world_size=size)

    def place(axis: str) -> Place:
        return Place(Distributed(), Alone()) if axis == "tp" else Place(Alone(), Distributed())

    torch.save({name: tensors(answer) for name, answer in two_ranks(place)}, directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "fla":
        fla()
    else:
        serve(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
