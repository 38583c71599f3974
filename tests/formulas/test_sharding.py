"""Shards are who holds what: proved by who owns a row's head, by integers moved and moved back, and by computing with them.

Parameters are tagged, each element with an integer of its own, so a move is right only if every element lands where it must. The
computation is a polynomial layer (sections, convolution, GVA, a state, gates and a norm as the GDN layer has them) on small
integers in float64, hence exact: ranks that hold the shards make the whole's outputs and, summed as stated, its gradients.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.layer import Layer
from oracles.sharding import (
    AT_REST,
    IN_USE,
    STAGES,
    Mesh,
    Rank,
    Shard,
    assemble,
    concatenate,
    features,
    heads,
    interleave,
    interleaved,
    parameters,
    reduce_gradients,
    reshard,
    rows,
    shard,
    shard_hidden,
    tokens,
)
from tests.together import for_each

Cut = Callable[[Layer, str, Rank, str], Tensor]
KeyOf = Callable[[int, int, int], int]
LAYER = Layer(hidden=3, heads=4, value_heads=8, key_dim=2, value_dim=3, conv_width=2)
MESH = Mesh(2, 2)
NAMES = tuple(parameters(LAYER))
SECTIONS = {
    "in_proj.weight": "qkvzba",
    "conv.weight": "qkv",
    "conv.bias": "qkv",
    "A_log": "a",
    "dt_bias": "a",
    "out_proj.weight": "v",
}
KERNEL = ("conv.weight", "conv.bias", "A_log", "dt_bias")
WIDTHS = st.integers(1, 3)
LAYERS = st.builds(
    lambda hidden, heads, group, key_dim, value_dim, conv: Layer(hidden, heads, heads * group, key_dim, value_dim, conv),
    *(WIDTHS, st.sampled_from([1, 2, 3, 4, 6, 8]), WIDTHS, WIDTHS, WIDTHS, WIDTHS),
)


def meshes(layer: Layer) -> list[Mesh]:
    """Every mesh whose ranks divide the layer's heads."""
    sizes = range(1, layer.heads + 1)
    return [Mesh(tp, cp) for tp, cp in itertools.product(sizes, sizes) if layer.heads % (tp * cp) == 0]


def with_meshes(count: int) -> st.SearchStrategy[tuple[Layer, tuple[Mesh, ...]]]:
    return LAYERS.flatmap(lambda layer: st.tuples(st.just(layer), st.tuples(*[st.sampled_from(meshes(layer))] * count)))


def tagged(layer: Layer, name: str) -> Tensor:
    """The parameter, each element an integer of its own."""
    shape = parameters(layer)[name].shape
    return torch.arange(torch.Size(shape).numel()).view(shape)


def shards(layer: Layer, name: str, mesh: Mesh, stage: str = AT_REST) -> list[Shard]:
    return [shard(layer, name, tagged(layer, name), rank, stage) for rank in mesh.ranks()]


def same(one: Sequence[Shard], other: Sequence[Shard]) -> bool:
    """Whether each rank holds the same."""
    pairs = zip(one, other, strict=True)
    return all(
        (a.name, a.shape, a.axis, a.rank) == (b.name, b.shape, b.axis, b.rank)
        and torch.equal(a.rows, b.rows)
        and torch.equal(a.value, b.value)
        for a, b in pairs
    )


# Who holds what


def key_heads_of(layer: Layer, sections: str) -> list[int]:
    """The key head that each row of some sections in a row belongs to."""
    group = layer.value_heads // layer.heads
    owners = []
    for name in sections:
        count = layer.heads if name in "qk" else layer.value_heads
        width = layer.sections[name] // count
        owners += [head if name in "qk" else head // group for head in range(count) for _ in range(width)]
    return owners


def owned(layer: Layer, name: str, rank: Rank, stage: str) -> list[int]:
    """The rows of a rank by definition: those of the key heads it owns, in the whole's order."""
    if name == "norm.weight":
        return list(range(layer.value_dim))
    index, parts = rank.tp, rank.mesh.tp
    if stage == IN_USE and name in KERNEL:
        index, parts = rank.tp * rank.mesh.cp + rank.cp, rank.mesh.tp * rank.mesh.cp
    return [row for row, head in enumerate(key_heads_of(layer, SECTIONS[name])) if head // (layer.heads // parts) == index]


def misplaced(layer: Layer, mesh: Mesh, cut: Cut) -> set[str]:
    """The parameters whose rows some rank does not hold by definition."""
    return {
        name
        for name, rank, stage in itertools.product(parameters(layer), mesh.ranks(), STAGES)
        if cut(layer, name, rank, stage).tolist() != owned(layer, name, rank, stage)
    }


@settings(max_examples=60)
@given(case=with_meshes(1))
@example(case=(LAYER, (MESH,)))
def test_a_rank_holds_the_rows_of_its_heads(case: tuple[Layer, tuple[Mesh]]) -> None:
    layer, (mesh,) = case
    assert misplaced(layer, mesh, rows) == set()
    for rank, stage in itertools.product(mesh.ranks(), STAGES):
        index, parts = (rank.tp, mesh.tp) if stage == AT_REST else (rank.tp * mesh.cp + rank.cp, mesh.tp * mesh.cp)
        mine = [row for row, head in enumerate(key_heads_of(layer, "qkvzba")) if head // (layer.heads // parts) == index]
        assert features(layer, rank, stage).tolist() == mine


@given(case=with_meshes(1))
def test_value_heads_stay_with_their_key_head(case: tuple[Layer, tuple[Mesh]]) -> None:
    layer, (mesh,) = case
    group = layer.value_heads // layer.heads
    for stage in STAGES:
        pairs = [heads(layer, rank, stage) for rank in mesh.ranks()]
        assert all({head // group for head in values} == set(keys) for keys, values in pairs)
        copies = mesh.cp if stage == AT_REST else 1
        for which, count in ((0, layer.heads), (1, layer.value_heads)):
            indices = sorted(head for pair in pairs for head in pair[which])
            assert indices == sorted([*range(count)] * copies)


def test_tiled_value_heads_would_leave_their_key_head() -> None:
    pairs = [heads(LAYER, rank, IN_USE) for rank in MESH.ranks()]
    assert not all({head % LAYER.heads for head in values} == set(keys) for keys, values in pairs)


@given(case=with_meshes(1))
def test_a_rank_uses_what_it_holds(case: tuple[Layer, tuple[Mesh]]) -> None:
    layer, (mesh,) = case
    for name, rank in itertools.product(parameters(layer), mesh.ranks()):
        assert set(rows(layer, name, rank, IN_USE).tolist()) <= set(rows(layer, name, rank, AT_REST).tolist())


@given(layer=LAYERS)
def test_parameters_have_the_shapes_of_the_layer(layer: Layer) -> None:
    widths, described = layer.sections, parameters(layer)
    channels = widths["q"] + widths["k"] + widths["v"]
    assert {name: parameter.shape for name, parameter in described.items()} == {
        "in_proj.weight": (channels + widths["z"] + widths["b"] + widths["a"], layer.hidden),
        "conv.weight": (channels, layer.conv_width),
        "conv.bias": (channels,),
        "A_log": (layer.value_heads,),
        "dt_bias": (layer.value_heads,),
        "norm.weight": (layer.value_dim,),
        "out_proj.weight": (layer.hidden, layer.value_heads * layer.value_dim),
    }
    assert all(sum(parameter.sections) == parameter.shape[parameter.axis] for parameter in described.values())


# Moved and moved back


@settings(max_examples=40)
@given(case=with_meshes(1), name=st.sampled_from(NAMES), stage=st.sampled_from(STAGES))
def test_every_element_lands_once_and_comes_back(case: tuple[Layer, tuple[Mesh]], name: str, stage: str) -> None:
    layer, (mesh,) = case
    whole, pieces, described = tagged(layer, name), shards(layer, name, mesh, stage), parameters(layer)[name]
    assert torch.equal(assemble(pieces), whole)
    assert torch.equal(assemble(pieces[::-1]), whole)
    over = described.at_rest if stage == AT_REST else described.in_use
    copies = (1 if "tp" in over else mesh.tp) * (1 if "cp" in over else mesh.cp)
    landed = torch.cat([piece.value.flatten() for piece in pieces]).sort().values
    assert torch.equal(landed, torch.arange(whole.numel()).repeat_interleave(copies))


@given(layer=LAYERS, name=st.sampled_from(NAMES), stage=st.sampled_from(STAGES))
def test_one_rank_holds_the_whole(layer: Layer, name: str, stage: str) -> None:
    (only,) = shards(layer, name, Mesh(), stage)
    assert torch.equal(only.value, tagged(layer, name))


@settings(max_examples=40)
@given(case=with_meshes(3), name=st.sampled_from(NAMES), start=st.sampled_from(STAGES), stage=st.sampled_from(STAGES))
def test_resharding_is_sharding_the_whole_and_composes(
    case: tuple[Layer, tuple[Mesh, ...]], name: str, start: str, stage: str
) -> None:
    layer, (a, b, c) = case
    source = shards(layer, name, a, start)
    there = reshard(layer, source, b, stage)
    assert same(there, shards(layer, name, b, stage))
    assert same(there, [shard(layer, name, assemble(source), rank, stage) for rank in b.ranks()])
    assert same(reshard(layer, there, c), reshard(layer, source, c))
    assert same(reshard(layer, there, a, start), source)


def joined_and_cut_again(layer: Layer, source: Sequence[Shard], mesh: Mesh) -> list[Shard]:
    """Resharding that lays whole shards end to end and cuts what comes out."""
    axis = source[0].axis
    whole = torch.cat([piece.value for piece in source if piece.rank.cp == 0], axis)
    return [shard(layer, source[0].name, whole, rank, AT_REST) for rank in mesh.ranks()]


def cut_in_one_block(layer: Layer, source: Sequence[Shard], mesh: Mesh) -> list[Shard]:
    """Resharding that knows no sections."""
    whole, axis = assemble(source), source[0].axis
    right = [shard(layer, source[0].name, whole, rank, AT_REST) for rank in mesh.ranks()]
    return [dataclasses.replace(piece, value=whole.chunk(mesh.tp, axis)[piece.rank.tp]) for piece in right]


@for_each("name", ["in_proj.weight", "conv.weight", "conv.bias"])
@for_each("wrong", [joined_and_cut_again, cut_in_one_block])
def test_resharding_without_sections_is_rejected(name: str, wrong: Callable[..., list[Shard]]) -> None:
    source, other = shards(LAYER, name, Mesh(2, 2)), Mesh(4, 1)
    assert same(reshard(LAYER, source, other), shards(LAYER, name, other))
    assert not same(wrong(LAYER, source, other), shards(LAYER, name, other))


def test_source_cut_in_another_way_is_resharded_by_its_rows() -> None:
    whole = tagged(LAYER, "in_proj.weight")
    pieces = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).split([7, 31, len(whole) - 38])
    source = [
        Shard("in_proj.weight", tuple(whole.shape), 0, rank, piece, whole[piece])
        for rank, piece in zip(Mesh(3, 1).ranks(), pieces, strict=True)
    ]
    assert same(reshard(LAYER, source, MESH), shards(LAYER, "in_proj.weight", MESH))


# Computed


def grouped(head: int, key_heads: int, value_heads: int) -> int:
    return head // (value_heads // key_heads)


def tiled(head: int, key_heads: int, value_heads: int) -> int:
    return head % key_heads


def kernel(layer: Layer, mixed: Tensor, p: dict[str, Tensor], key_of: KeyOf) -> Tensor:
    """All but the projections of a layer with these heads, a polynomial: in_proj's outputs [T, q k v z b a] to [T, HV V]."""
    q, k, v, z, b, a = mixed.split(list(layer.sections.values()), 1)
    x, taps = torch.cat([q, k, v], 1), layer.conv_width
    x = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    x = sum((p["conv.weight"][:, w] * x[w : w + len(q)] for w in range(taps)), p["conv.bias"])
    q, k, v = x.split(list(layer.sections.values())[:3], 1)
    keys = [key_of(head, layer.heads, layer.value_heads) for head in range(layer.value_heads)]
    q, k = (tensor.unflatten(1, (layer.heads, -1))[:, keys] for tensor in (q, k))
    v, z = (tensor.unflatten(1, (layer.value_heads, -1)) for tensor in (v, z))
    state = torch.einsum("th,thk,thv->thkv", b, k, v).cumsum(0)
    gate = p["A_log"] * (a + p["dt_bias"])
    o = torch.einsum("th,thk,thkv->thv", gate, q, state)
    return (p["norm.weight"] * o * z).flatten(1)


def part_of(layer: Layer, parts: int) -> Layer:
    """A layer of one part of the heads."""
    return dataclasses.replace(layer, heads=layer.heads // parts, value_heads=layer.value_heads // parts)


@dataclasses.dataclass
class Problem:
    """A layer's parameters and inputs in small integers, the ranks that compute it, and which tokens each CP rank holds."""

    layer: Layer
    mesh: Mesh
    tokens_each: int
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-1, 2, shape, generator=generator).double()

        count = self.mesh.cp * self.tokens_each
        self.layout = torch.randperm(count, generator=generator).chunk(self.mesh.cp)
        self.weights = {name: integers(*parameter.shape) for name, parameter in parameters(self.layer).items()}
        self.hidden, self.cotangent = integers(count, self.layer.hidden), integers(count, self.layer.hidden)

    def whole(self, key_of: KeyOf = grouped) -> tuple[Tensor, dict[str, Tensor]]:
        """The output and the gradients of the parameters and of the hidden states, on one rank."""
        x = {name: tensor.clone().requires_grad_() for name, tensor in (self.weights | {"hidden": self.hidden}).items()}
        mixed = x["hidden"] @ x["in_proj.weight"].T
        output = kernel(self.layer, mixed, x, key_of) @ x["out_proj.weight"].T
        gradients = torch.autograd.grad(output, list(x.values()), self.cotangent)
        assert max(float(value.detach().abs().max()) for value in (mixed, output, *gradients)) < 2**40, (
            "float64 must hold every sum"
        )
        return output.detach(), dict(zip(x, gradients, strict=True))

    def on_ranks(self, cut: Cut = rows, key_of: KeyOf = grouped) -> tuple[dict[Rank, Tensor], dict[str, dict[Rank, Tensor]]]:
        """Each rank's partial output and its own gradients, ranks exchanging tokens for heads before the kernel and back after."""
        layer, mesh, every = self.layer, self.mesh, list(self.mesh.ranks())
        x: dict[str, dict[Rank, Tensor]] = {"hidden": {rank: self.hidden[self.layout[rank.cp]].requires_grad_() for rank in every}}
        for name, weight in self.weights.items():
            axis = parameters(layer)[name].axis
            x[name] = {rank: weight.index_select(axis, cut(layer, name, rank, IN_USE)).requires_grad_() for rank in every}
        outputs = {}
        part = part_of(layer, mesh.tp * mesh.cp)
        for tp in range(mesh.tp):
            group = [Rank(mesh, tp, cp) for cp in range(mesh.cp)]
            mixed = torch.cat([x["hidden"][rank] @ x["in_proj.weight"][rank].T for rank in group])
            mixed = mixed[torch.cat(self.layout).argsort()]
            sections = mixed.split([width // mesh.tp for width in layer.sections.values()], 1)
            inner = torch.cat(
                [
                    kernel(
                        part,
                        torch.cat([section.chunk(mesh.cp, 1)[rank.cp] for section in sections], 1),
                        {name: x[name][rank] for name in self.weights},
                        key_of,
                    )
                    for rank in group
                ],
                1,
            )
            for rank in group:
                outputs[rank] = inner[self.layout[rank.cp]] @ x["out_proj.weight"][rank].T
        leaves = [(name, rank) for name in x for rank in every]
        gradients = torch.autograd.grad(
            [outputs[rank] for rank in every],
            [x[name][rank] for name, rank in leaves],
            [self.cotangent[self.layout[rank.cp]] for rank in every],
        )
        rank_gradients: dict[str, dict[Rank, Tensor]] = {name: {} for name in x}
        for (name, rank), gradient in zip(leaves, gradients, strict=True):
            rank_gradients[name][rank] = gradient
        return {rank: output.detach() for rank, output in outputs.items()}, rank_gradients

    def joined(self, partial: dict[Rank, Tensor]) -> Tensor:
        """Hidden states, their parts on TP ranks added and those of CP ranks back in the tokens' order."""
        by_cp = [sum(partial[Rank(self.mesh, tp, cp)] for tp in range(self.mesh.tp)) for cp in range(self.mesh.cp)]
        return torch.cat(by_cp)[torch.cat(self.layout).argsort()]

    def summed(self, name: str, rank_gradients: dict[Rank, Tensor], axes: Sequence[str]) -> dict[Rank, Tensor]:
        """A parameter's gradient on every rank after an all-reduce over some axes of the mesh, zero at first outside its slice."""
        axis, local = parameters(self.layer)[name].axis, {}
        for rank, gradient in rank_gradients.items():
            stored_rows = rows(self.layer, name, rank, AT_REST)
            place = torch.searchsorted(stored_rows, rows(self.layer, name, rank, IN_USE))
            shape = (*gradient.shape[:axis], len(stored_rows), *gradient.shape[axis + 1 :])
            local[rank] = gradient.new_zeros(shape).index_copy(axis, place, gradient)
        apart = [mesh_axis for mesh_axis in ("tp", "cp") if mesh_axis not in axes]
        groups = {rank: [other for other in local if all(getattr(other, x) == getattr(rank, x) for x in apart)] for rank in local}
        return {rank: torch.stack([local[other] for other in group]).sum(0) for rank, group in groups.items()}


PROBLEMS = with_meshes(1).flatmap(
    lambda case: st.builds(Problem, st.just(case[0]), st.just(case[1][0]), st.integers(1, 3), st.integers(0, 2**16))
)
TELLING = Problem(LAYER, MESH, tokens_each=3, seed=1)


@settings(max_examples=30)
@given(problem=PROBLEMS)
@example(problem=TELLING)
@pytest.mark.slow
def test_ranks_compute_the_whole_forward_and_backward(problem: Problem) -> None:
    output, whole = problem.whole()
    partial, rank_gradients = problem.on_ranks()
    assert torch.equal(problem.joined(partial), output)
    assert torch.equal(problem.joined(rank_gradients["hidden"]), whole["hidden"])
    for rank in problem.mesh.ranks():
        piece = shard_hidden(output, problem.layout, rank, sequence_parallel=False)
        assert torch.equal(sum(partial[Rank(problem.mesh, tp, rank.cp)] for tp in range(problem.mesh.tp)), piece.value)
    for name, described in parameters(problem.layer).items():
        added = problem.summed(name, rank_gradients[name], described.gradient_sum)
        unreduced_shards = [
            Shard(name, described.shape, described.axis, rank, rows(problem.layer, name, rank, IN_USE), rank_gradients[name][rank])
            for rank in problem.mesh.ranks()
        ]
        for reduced in reduce_gradients(problem.layer, unreduced_shards):
            want = shard(problem.layer, name, whole[name], reduced.rank, AT_REST)
            assert torch.equal(added[reduced.rank], want.value), name
            assert same([reduced], [want]), name


@settings(max_examples=30)
@given(problem=PROBLEMS)
def test_sections_are_projected_apart(problem: Problem) -> None:
    layer, hidden, weight = problem.layer, problem.hidden, problem.weights["in_proj.weight"]
    outputs = hidden @ weight.T
    for rank in problem.mesh.ranks():
        piece = shard(layer, "in_proj.weight", weight, rank, AT_REST)
        assert torch.equal(hidden @ piece.value.T, outputs[:, features(layer, rank, AT_REST)])
        mine = set(features(layer, rank, IN_USE).tolist())
        assert mine <= set(features(layer, rank, AT_REST).tolist())


def in_one_block(layer: Layer, name: str, rank: Rank, stage: str) -> Tensor:
    """in_proj as one matrix: an equal share of its rows."""
    if name != "in_proj.weight":
        return rows(layer, name, rank, stage)
    return torch.arange(parameters(layer)[name].shape[0]).chunk(rank.mesh.tp)[rank.tp]


def conv_in_one_block(layer: Layer, name: str, rank: Rank, stage: str) -> Tensor:
    """The kernel takes an equal share of the convolution's channels."""
    if not name.startswith("conv") or stage == AT_REST:
        return rows(layer, name, rank, stage)
    return rows(layer, name, rank, AT_REST).chunk(rank.mesh.cp)[rank.cp]


def cp_first(layer: Layer, name: str, rank: Rank, stage: str) -> Tensor:
    """Parts of the heads counted cp first."""
    turned = Rank(Mesh(rank.mesh.cp, rank.mesh.tp), rank.cp, rank.tp)
    return rows(layer, name, turned if stage == IN_USE and name in KERNEL else rank, stage)


def keys_as_value_heads(layer: Layer, name: str, rank: Rank, stage: str) -> Tensor:
    """q and k cut where the value heads are cut."""
    right = rows(layer, name, rank, stage)
    if name not in ("in_proj.weight", "conv.weight", "conv.bias"):
        return right
    width, key_dim = layer.sections["q"], layer.key_dim
    keys, values = heads(layer, rank, IN_USE if name in KERNEL and stage == IN_USE else AT_REST)
    wrong = [(values[0] + index) % layer.heads for index in range(len(keys))]
    moved = torch.tensor([head * key_dim + channel for head in wrong for channel in range(key_dim)])
    return torch.cat([moved, moved + width, right[2 * len(moved) :]])


def scattered(layer: Layer, name: str, rank: Rank, stage: str) -> Tensor:
    """Every tp-th head of a gate to a rank, and not a stretch of them."""
    if name not in ("A_log", "dt_bias"):
        return rows(layer, name, rank, stage)
    described = parameters(layer)[name]
    index, parts = rank.part(described.at_rest if stage == AT_REST else described.in_use)
    return torch.arange(index, layer.value_heads, parts)


WRONG_CUTS: dict[Cut, set[str]] = {
    in_one_block: {"in_proj.weight"},
    conv_in_one_block: {"conv.weight", "conv.bias"},
    cp_first: set(KERNEL),
    keys_as_value_heads: {"in_proj.weight", "conv.weight", "conv.bias"},
    scattered: {"A_log", "dt_bias"},
}


@for_each("wrong", WRONG_CUTS)
def test_wrong_cut_is_rejected_by_definition_and_by_computation(wrong: Cut) -> None:
    output, _ = TELLING.whole()
    assert misplaced(LAYER, MESH, rows) == set()
    assert misplaced(LAYER, MESH, wrong) == WRONG_CUTS[wrong]
    assert torch.equal(TELLING.joined(TELLING.on_ranks()[0]), output)
    assert not torch.equal(TELLING.joined(TELLING.on_ranks(wrong)[0]), output)


def test_tiled_value_heads_are_rejected_by_computation() -> None:
    problem = dataclasses.replace(TELLING, mesh=Mesh(2, 1))
    output, _ = problem.whole()
    assert torch.equal(problem.joined(problem.on_ranks()[0]), output)
    by_tiles = problem.joined(problem.on_ranks(key_of=tiled)[0])
    assert not torch.equal(by_tiles, output)
    assert not torch.equal(by_tiles, problem.whole(tiled)[0]), "tiles of the whole are no tiles of the ranks"


@for_each("name", NAMES)
def test_gradients_reduced_over_other_axes_are_rejected(name: str) -> None:
    _, whole = TELLING.whole()
    _, rank_gradients = TELLING.on_ranks()
    right = {rank: shard(LAYER, name, whole[name], rank, AT_REST).value for rank in MESH.ranks()}
    accepted = []
    for axes in ((), ("tp",), ("cp",), ("tp", "cp")):
        got = TELLING.summed(name, rank_gradients[name], axes)
        if all(torch.equal(got[rank], right[rank]) for rank in right):
            accepted.append(axes)
    assert accepted == [parameters(LAYER)[name].gradient_sum]


# The layouts of in_proj


def by_key_head(layer: Layer) -> tuple[list[int], list[int]]:
    """The rows of q k v z b a, key head by key head."""
    group, starts = layer.value_heads // layer.heads, layer.offsets()
    qkvz, ba = [], []
    for head in range(layer.heads):
        values = range(head * group, (head + 1) * group)
        for name in "qk":
            qkvz += [starts[name] + head * layer.key_dim + channel for channel in range(layer.key_dim)]
        for name in "vz":
            qkvz += [starts[name] + value * layer.value_dim + channel for value in values for channel in range(layer.value_dim)]
        for name in "ba":
            ba += [starts[name] + value for value in values]
    return qkvz, ba


@settings(max_examples=40)
@given(layer=LAYERS)
@example(layer=LAYER)
def test_interleaving_is_a_permutation_key_head_by_key_head(layer: Layer) -> None:
    qkvz, ba = interleaved(layer)
    assert (qkvz.tolist(), ba.tolist()) == by_key_head(layer)
    assert sorted([*qkvz.tolist(), *ba.tolist()]) == list(range(sum(layer.sections.values())))
    weight = tagged(layer, "in_proj.weight")
    apart = interleave(layer, weight)
    assert torch.equal(apart[0], weight[qkvz])
    assert torch.equal(apart[1], weight[ba])
    assert torch.equal(concatenate(layer, *apart), weight)


def per_key_head(layer: Layer, qkvz: Tensor, ba: Tensor) -> list[Tensor]:
    """q, k, v, z, b, a of outputs of the interleaved projections, as Qwen3-Next's layer takes them apart."""
    group = layer.value_heads // layer.heads
    values = group * layer.value_dim
    first = qkvz.view(len(qkvz), layer.heads, -1).split([layer.key_dim, layer.key_dim, values, values], 2)
    second = ba.view(len(ba), layer.heads, -1).split([group, group], 2)
    return [section.flatten(1) for section in (*first, *second)]


def not_at_all(layer: Layer, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sections as they are."""
    gates = 2 * layer.value_heads
    return weight[:-gates], weight[-gates:]


def value_head_by_value_head(layer: Layer, weight: Tensor) -> tuple[Tensor, Tensor]:
    """b and a alternate with every value head."""
    starts = layer.offsets()
    return interleave(layer, weight)[0], weight[[starts[name] + value for value in range(layer.value_heads) for name in "ba"]]


@pytest.mark.parametrize("wrong", [not_at_all, value_head_by_value_head])
def test_interleaved_projections_make_the_same_sections(wrong: Callable[[Layer, Tensor], tuple[Tensor, Tensor]]) -> None:
    hidden, weight = TELLING.hidden, TELLING.weights["in_proj.weight"]
    want = list((hidden @ weight.T).split(list(LAYER.sections.values()), 1))

    def right(split: Callable[[Layer, Tensor], tuple[Tensor, Tensor]]) -> bool:
        got = per_key_head(LAYER, *(hidden @ projection.T for projection in split(LAYER, weight)))
        return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))

    assert right(interleave)
    assert not right(wrong)


@given(case=with_meshes(1))
def test_equal_blocks_of_the_interleaved_weights_are_the_shards(case: tuple[Layer, tuple[Mesh]]) -> None:
    layer, (mesh,) = case
    weight = tagged(layer, "in_proj.weight")
    qkvz, ba = interleave(layer, weight)
    for rank in mesh.ranks():
        part = part_of(layer, mesh.tp)
        result = concatenate(part, qkvz.chunk(mesh.tp)[rank.tp], ba.chunk(mesh.tp)[rank.tp])
        assert torch.equal(result, shard(layer, "in_proj.weight", weight, rank, AT_REST).value)


# Hidden states


@settings(max_examples=40)
@given(
    mesh=st.builds(Mesh, st.integers(1, 4), st.integers(1, 4)),
    per_rank=st.integers(0, 3),
    trailing=st.sampled_from([(1,), (2, 3)]),
    sequence_parallel=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_hidden_states_are_cut_along_tokens_over_cp_then_over_tp(
    mesh: Mesh,
    per_rank: int,
    trailing: tuple[int, ...],
    sequence_parallel: bool,  # noqa: FBT001
    seed: int,
) -> None:
    count = mesh.tp * mesh.cp * per_rank
    layout = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).view(mesh.cp, -1).unbind()
    hidden = torch.arange(count * torch.Size(trailing).numel()).view(count, *trailing)
    pieces = [shard_hidden(hidden, layout, rank, sequence_parallel=sequence_parallel) for rank in mesh.ranks()]
    assert torch.equal(assemble(pieces), hidden)
    for piece in pieces:
        mine = layout[piece.rank.cp].tolist()
        if sequence_parallel:
            mine = mine[piece.rank.tp * per_rank : (piece.rank.tp + 1) * per_rank]
        assert piece.rows.tolist() == mine
        assert torch.equal(piece.value, hidden[mine])


def test_tokens_cut_over_tp_before_cp_are_rejected() -> None:
    layout = (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5]))
    want = [tokens(layout, rank, sequence_parallel=True).tolist() for rank in MESH.ranks()]
    assert want == [[0, 1], [2, 3], [6, 7], [4, 5]]
    over_tp_first = [torch.arange(8).chunk(2)[rank.tp].chunk(2)[rank.cp].tolist() for rank in MESH.ranks()]
    assert over_tp_first != want


def test_layout_may_give_ranks_unlike_shares() -> None:
    layout = (torch.tensor([4, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 3, 2]))
    hidden = torch.arange(10).view(5, 2)
    pieces = [shard_hidden(hidden, layout, rank, sequence_parallel=False) for rank in Mesh(2, 3).ranks()]
    assert [piece.rows.tolist() for piece in pieces] == [[4, 0], [], [1, 3, 2]] * 2
    assert torch.equal(assemble(pieces), hidden)


# What is refused


def of(name: str, mesh: Mesh = MESH, stage: str = AT_REST) -> list[Shard]:
    return shards(LAYER, name, mesh, stage)


def changed(pieces: list[Shard], index: int, **changes: object) -> list[Shard]:
    return [dataclasses.replace(piece, **changes) if piece is pieces[index] else piece for piece in pieces]


def shifted() -> list[Shard]:
    """The second TP rank's rows of A_log begin one early."""
    pieces = of("A_log", Mesh(2, 1))
    return changed(pieces, 1, rows=pieces[1].rows - 1)


def short() -> list[Shard]:
    """The second TP rank lacks its last row of A_log."""
    pieces = of("A_log", Mesh(2, 1))
    return changed(pieces, 1, rows=pieces[1].rows[:-1], value=pieces[1].value[:-1])


def gradients() -> list[Shard]:
    return of("A_log", MESH, IN_USE)


THREE = Layer(hidden=3, heads=3, value_heads=6, key_dim=2, value_dim=3)
WEIGHT = tagged(LAYER, "in_proj.weight")
HIDDEN = torch.arange(8).view(4, 2)
PAIR = (torch.tensor([0, 3]), torch.tensor([1, 2]))
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Mesh(0, 1), "tp must be a whole number from 1 up, got 0"),
    (lambda: Mesh(1, 0.5), "cp must be a whole number from 1 up, got 0.5"),
    (lambda: Mesh(True, 1), "tp must be a whole number from 1 up, got True"),
    (lambda: Rank(MESH, 2, 0), "tp rank must be a whole number from 0 up to 1, got 2"),
    (lambda: Rank(MESH, 0, -1), "cp rank must be a whole number from 0 up to 1, got -1"),
    (lambda: Rank(MESH, 0, True), "cp rank must be a whole number from 0 up to 1, got True"),
    (lambda: Rank(MESH, 0.0, 0), "tp rank must be a whole number from 0 up to 1, got 0.0"),
    (lambda: heads(LAYER, Rank(MESH), "used"), "stage must be one of at rest, in use, got 'used'"),
    (lambda: rows(LAYER, "A_log", Rank(MESH), ""), "stage must be one of at rest, in use, got ''"),
    (lambda: rows(LAYER, "z", Rank(MESH), AT_REST), f"name must be one of {', '.join(NAMES)}, got 'z'"),
    (lambda: heads(THREE, Rank(MESH), AT_REST), "heads must be a multiple of the 2 ranks that share them, got 3"),
    (lambda: heads(LAYER, Rank(Mesh(2, 4)), IN_USE), "heads must be a multiple of the 8 ranks that share them, got 4"),
    (lambda: rows(THREE, "A_log", Rank(MESH), AT_REST), "heads must be a multiple of the 2 ranks that share them, got 3"),
    (lambda: rows(LAYER, "A_log", Rank(Mesh(1, 8)), IN_USE), "heads must be a multiple of the 8 ranks that share them, got 4"),
    (lambda: features(THREE, Rank(MESH), IN_USE), "heads must be a multiple of the 4 ranks that share them, got 3"),
    (lambda: shard(LAYER, "A_log", torch.zeros(7), Rank(MESH), AT_REST), "A_log must have shape (8,), got (7,)"),
    (lambda: Shard("x", (2,), 1, Rank(MESH), PAIR[0], HIDDEN), "axis of x must be one of its 1, got 1"),
    (
        lambda: Shard("x", (4,), 0, Rank(MESH), torch.zeros(2), torch.zeros(2)),
        "rows of x must be a vector of int64, got torch.float32, shape (2,)",
    ),
    (
        lambda: Shard("x", (4,), 0, Rank(MESH), HIDDEN, torch.zeros(2)),
        "rows of x must be a vector of int64, got torch.int64, shape (4, 2)",
    ),
    (
        lambda: Shard("x", (4,), 0, Rank(MESH), torch.tensor([1, 1]), torch.zeros(2)),
        "rows of x must be distinct and from 0 up to 3, got 1 2 times",
    ),
    (
        lambda: Shard("x", (3,), 0, Rank(MESH), PAIR[0], torch.zeros(2)),
        "rows of x must be distinct and from 0 up to 2, got 3 1 times",
    ),
    (
        lambda: Shard("x", (4, 2), 0, Rank(MESH, 1, 0), PAIR[0], torch.zeros(2, 3)),
        "x of tp rank 1, cp rank 0 must have shape (2, 2) by its rows, got (2, 3)",
    ),
    (lambda: assemble([]), "shards must be those of every rank, got none"),
    (lambda: assemble([*of("A_log")[:3], *of("dt_bias")[3:]]), "shards must be of one tensor, got name A_log and dt_bias"),
    (
        lambda: assemble(
            [*of("norm.weight")[:3], Shard("norm.weight", (2,), 0, Rank(MESH, 1, 1), torch.arange(2), torch.zeros(2))]
        ),
        "shards must be of one tensor, got shape (3,) and (2,)",
    ),
    (
        lambda: assemble(
            changed([Shard("x", (2, 2), 0, rank, torch.arange(2), torch.zeros(2, 2)) for rank in MESH.ranks()], 1, axis=1)
        ),
        "shards must be of one tensor, got axis 0 and 1",
    ),
    (
        lambda: assemble([*of("A_log")[:3], of("A_log", Mesh(2, 1))[1]]),
        "shards must be of one mesh, got Mesh(tp=2, cp=2) and Mesh(tp=2, cp=1)",
    ),
    (
        lambda: assemble(changed(of("A_log"), 1, value=of("A_log")[1].value.float())),
        "shards must be of one dtype, got torch.int64 and torch.float32",
    ),
    (lambda: assemble(of("A_log")[:3]), "shards must be one of every rank, got 0 of tp rank 1, cp rank 1"),
    (lambda: assemble([*of("A_log"), of("A_log")[2]]), "shards must be one of every rank, got 2 of tp rank 1, cp rank 0"),
    (
        lambda: assemble(changed(of("A_log"), 1, rank=Rank(MESH, 0, 0))),
        "shards must be one of every rank, got 2 of tp rank 0, cp rank 0",
    ),
    (
        lambda: assemble(shifted()),
        "shards of A_log must share all their rows in one order or none, got tp rank 0, cp rank 0 and tp rank 1, cp rank 0",
    ),
    (lambda: assemble(short()), "shards of A_log must have every row up to 7, got none with row 7"),
    (
        lambda: assemble(changed(of("A_log"), 1, value=of("A_log")[1].value + 1)),
        "replicas of A_log must be equal bit for bit, got another value on tp rank 0, cp rank 0 and tp rank 0, cp rank 1",
    ),
    (lambda: reshard(LAYER, of("A_log")[1:], MESH), "shards must be one of every rank, got 0 of tp rank 0, cp rank 0"),
    (
        lambda: reshard(LAYER, shifted(), MESH),
        "shards of A_log must share all their rows in one order or none, got tp rank 0, cp rank 0 and tp rank 1, cp rank 0",
    ),
    (lambda: reshard(LAYER, of("A_log"), Mesh(8, 1)), "heads must be a multiple of the 8 ranks that share them, got 4"),
    (
        lambda: reshard(LAYER, [shard_hidden(HIDDEN, PAIR, rank, sequence_parallel=False) for rank in MESH.ranks()], MESH),
        f"name must be one of {', '.join(NAMES)}, got 'hidden'",
    ),
    (lambda: reshard(THREE, of("A_log"), Mesh()), "A_log must be (6,) cut along axis 0, got (8,) cut along axis 0"),
    (lambda: reduce_gradients(THREE, gradients()), "A_log must be (6,) cut along axis 0, got (8,) cut along axis 0"),
    (
        lambda: reduce_gradients(LAYER, [shard_hidden(HIDDEN, PAIR, rank, sequence_parallel=False) for rank in MESH.ranks()]),
        f"name must be one of {', '.join(NAMES)}, got 'hidden'",
    ),
    (lambda: reduce_gradients(LAYER, gradients()[:3]), "shards must be one of every rank, got 0 of tp rank 1, cp rank 1"),
    (
        lambda: reduce_gradients(LAYER, of("A_log")),
        "rows of A_log of tp rank 0, cp rank 0 must be its rows in use, got [0, 1, 2, 3]",
    ),
    (lambda: interleave(LAYER, WEIGHT[:-1]), "in_proj.weight must have shape (80, 3), got (79, 3)"),
    (lambda: concatenate(LAYER, WEIGHT[:63], WEIGHT[64:]), "in_proj_qkvz.weight must have shape (64, 3), got (63, 3)"),
    (lambda: concatenate(LAYER, WEIGHT[:64], WEIGHT[64:, :2]), "in_proj_ba.weight must have shape (16, 3), got (16, 2)"),
    (lambda: tokens(PAIR[:1], Rank(MESH), sequence_parallel=False), "layout must have the tokens of each of cp = 2 ranks, got 1"),
    (
        lambda: tokens((PAIR[0], torch.zeros(2)), Rank(MESH), sequence_parallel=False),
        "layout must have vectors of int64, got torch.float32, shape (2,)",
    ),
    (
        lambda: tokens((PAIR[0], PAIR[0]), Rank(MESH), sequence_parallel=False),
        "layout must have every token from 0 up once, got [0, 0, 3, 3]",
    ),
    (
        lambda: tokens((PAIR[0], PAIR[1] + 2), Rank(MESH), sequence_parallel=False),
        "layout must have every token from 0 up once, got [0, 3, 3, 4]",
    ),
    (
        lambda: tokens(PAIR, Rank(Mesh(3, 2)), sequence_parallel=True),
        "sequence_parallel needs a multiple of tp = 3 tokens on every CP rank, got 2",
    ),
    (
        lambda: shard_hidden(HIDDEN[:3], PAIR, Rank(MESH), sequence_parallel=False),
        "hidden must be [4 tokens, ..., hidden] as the layout has, got shape (3, 2)",
    ),
    (lambda: Rank((2, 1)), "mesh must be a Mesh, got tuple"),
    (lambda: reshard(LAYER, [], (2, 1)), "mesh must be a Mesh, got tuple"),
    (lambda: rows(None, "A_log", Rank(MESH), AT_REST), "layer must be a Layer, got NoneType"),
    (lambda: heads(None, Rank(MESH), AT_REST), "layer must be a Layer, got NoneType"),
    (lambda: interleaved(None), "layer must be a Layer, got NoneType"),
    (lambda: heads(LAYER, (0, 0), AT_REST), "rank must be a Rank, got tuple"),
    (lambda: rows(LAYER, "A_log", 0, AT_REST), "rank must be a Rank, got int"),
    (lambda: shard(LAYER, "A_log", [0.0] * 8, Rank(MESH), AT_REST), "A_log must be a Tensor, got list"),
    (lambda: Shard("x", (2,), 0, Rank(MESH), torch.arange(2), [0, 1]), "x must be a Tensor, got list"),
    (lambda: Shard("x", (2,), 0, Rank(MESH), [0, 1], torch.zeros(2)), "rows of x must be a Tensor, got list"),
    (lambda: assemble(None), "shards must be a Sequence, got NoneType"),
    (lambda: assemble([torch.zeros(2)]), "each of shards must be a Shard, got Tensor"),
    (lambda: interleave(LAYER, None), "in_proj.weight must be a Tensor, got NoneType"),
    (
        lambda: concatenate(LAYER, interleave(LAYER, WEIGHT)[0], interleave(LAYER, WEIGHT)[1].double()),
        f"in_proj_ba.weight must have the dtype of in_proj_qkvz.weight, {WEIGHT.dtype}, got torch.float64",
    ),
    (lambda: shard_hidden(HIDDEN, PAIR, Rank(MESH), sequence_parallel="no"), "sequence_parallel must be a bool, got str"),
    (lambda: shard_hidden([0], PAIR, Rank(MESH), sequence_parallel=False), "hidden must be a Tensor, got list"),
    (lambda: shard_hidden(HIDDEN, 2, Rank(MESH), sequence_parallel=False), "layout must be a Sequence, got int"),
    (
        lambda: shard_hidden(HIDDEN[:, 0], PAIR, Rank(MESH), sequence_parallel=False),
        "hidden must be [4 tokens, ..., hidden] as the layout has, got shape (4,)",
    ),
]


@for_each(("call", "message"), REFUSED)
def test_illegal_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_replicas_are_compared_as_bits() -> None:
    whole = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    pieces = [shard(LAYER, "norm.weight", whole, rank, AT_REST) for rank in MESH.ranks()]
    assert torch.equal(assemble(pieces).view(torch.int16), whole.view(torch.int16))
    with pytest.raises(ValueError, match=r"^replicas of norm\.weight must be equal bit for bit"):
        assemble(changed(pieces, 3, value=torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.bfloat16)))
