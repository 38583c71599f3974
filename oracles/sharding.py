"""Who holds what of the GDN layer under tensor, sequence and context parallelism (TP, SP, CP), and how to move it, exactly.

tp * cp ranks share the layer's key heads, and the value heads that use them (value head h uses key head h // (HV // H)), in
contiguous slices. Each TP rank has a slice of the heads. Inside the kernel, under head parallelism, each CP rank has a slice of its
TP rank's heads: part tp_rank * cp + cp_rank of tp * cp.

    parameter          global shape             cut along       at rest   in use     its gradient is the sum over
    in_proj.weight     [q k v z b a, hidden]    each section    tp        tp         cp
    conv.weight        [q k v, W]               each section    tp        tp, cp     cp
    conv.bias          [q k v]                  each section    tp        tp, cp     cp
    A_log, dt_bias     [HV]                     heads           tp        tp, cp     cp
    norm.weight        [V]                      -               -         -          tp, cp
    out_proj.weight    [hidden, HV V]           value heads     tp        tp         cp

Sections lie one after another, so a rank's rows are one slice of each section, not one slice of the whole. At rest (in memory, in a
checkpoint), ranks that differ only in cp hold the same values. In use, the kernel of a CP rank takes its heads' slice of what the
rank holds.

Reasons for these sums: A CP rank projects its own tokens, so its gradients of the projections are partial sums over tokens. In the
kernel it has all tokens and its own heads. There the gradients of conv, A_log and dt_bias are complete for its heads and zero in
the slices of the other heads, which a sum over cp fills. All heads share norm.weight, so each rank, TP ranks included, has the part
of its heads. Sequence parallelism changes none of this, because the tokens of a CP rank are together wherever these parameters are
used. At the ends of the layer, out_proj of a TP rank makes a partial sum of the output, and in_proj a partial sum of the input's
gradient. Both are added over tp, or with SP reduced and scattered along tokens.

Hidden states [tokens, ..., hidden] are cut along tokens: over cp by a token layout (contiguous, zigzag, ...), and with SP the
tokens of each CP rank in tp contiguous slices. Without SP, the TP ranks of a CP rank hold the same tokens.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oracles.layer import Layer

AT_REST, IN_USE = "at rest", "in use"
STAGES = (AT_REST, IN_USE)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A mesh of tp x cp ranks. ValueError for a size below 1."""

    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("cp", self.cp)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a whole number from 1 up, got {size!r}")

    def ranks(self) -> Iterator["Rank"]:
        """Yield every rank, in the order of their parts of the heads."""
        return itertools.starmap(Rank, itertools.product((self,), range(self.tp), range(self.cp)))


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank of a mesh, given by its two coordinates. ValueError for a coordinate outside the mesh."""

    mesh: Mesh
    tp: int = 0
    cp: int = 0

    def __post_init__(self) -> None:
        _check_is("mesh", self.mesh, Mesh)
        for name, rank, size in (("tp", self.tp, self.mesh.tp), ("cp", self.cp, self.mesh.cp)):
            if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < size:
                raise ValueError(f"{name} rank must be a whole number from 0 up to {size - 1}, got {rank!r}")

    def part(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return this rank's index among the parts of a thing that is cut over `axes` of the mesh, and the number of parts.

        The first axis is outermost.
        """
        index, parts = 0, 1
        for axis in axes:
            size = getattr(self.mesh, axis)
            index, parts = index * size + getattr(self, axis), parts * size
        return index, parts


@dataclasses.dataclass(frozen=True)
class Parameter:
    """How one parameter is cut: each of `sections` along `axis`, in contiguous slices over axes of the mesh, at rest and in use.

    `gradient_sum` names the mesh axes over which the ranks' gradients are added.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    sections: tuple[int, ...]
    at_rest: tuple[str, ...] = ("tp",)
    in_use: tuple[str, ...] = ("tp",)
    gradient_sum: tuple[str, ...] = ("cp",)


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """What one rank holds of a tensor; `rows` maps each index of the shard along `axis` to its index in the whole tensor.

    `shape` is the shape of the whole. ValueError if rows are not distinct indices of the whole, or if the value's shape does not
    follow from `shape` and `rows`.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    rank: Rank
    rows: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        _check_is("rank", self.rank, Rank)
        _check_is(f"rows of {self.name}", self.rows, Tensor)
        _check_is(self.name, self.value, Tensor)
        if not 0 <= self.axis < len(self.shape):
            raise ValueError(f"axis of {self.name} must be one of its {len(self.shape)}, got {self.axis}")
        if self.rows.dtype != torch.int64 or self.rows.ndim != 1:
            raise ValueError(f"rows of {self.name} must be a vector of int64, got {self.rows.dtype}, shape {_shape(self.rows)}")
        size = self.shape[self.axis]
        for row, count in zip(*(tensor.tolist() for tensor in self.rows.unique(return_counts=True)), strict=True):
            if not 0 <= row < size or count > 1:
                raise ValueError(f"rows of {self.name} must be distinct and from 0 up to {size - 1}, got {row} {count} times")
        local = (*self.shape[: self.axis], len(self.rows), *self.shape[self.axis + 1 :])
        if _shape(self.value) != local:
            raise ValueError(f"{self.name} of {_place(self.rank)} must have shape {local} by its rows, got {_shape(self.value)}")


def parameters(layer: Layer) -> dict[str, Parameter]:
    """Return the layer's parameters by name; conv.bias is included, although not every model has it."""
    _check_is("layer", layer, Layer)
    widths, heads = layer.sections, (layer.value_heads,)
    convolved = (widths["q"], widths["k"], widths["v"])
    kernel = ("tp", "cp")
    every = (
        Parameter("in_proj.weight", (sum(widths.values()), layer.hidden), 0, tuple(widths.values())),
        Parameter("conv.weight", (sum(convolved), layer.conv_width), 0, convolved, in_use=kernel),
        Parameter("conv.bias", (sum(convolved),), 0, convolved, in_use=kernel),
        Parameter("A_log", heads, 0, heads, in_use=kernel),
        Parameter("dt_bias", heads, 0, heads, in_use=kernel),
        Parameter("norm.weight", (layer.value_dim,), 0, (layer.value_dim,), (), (), ("tp", "cp")),
        Parameter("out_proj.weight", (layer.hidden, widths["v"]), 1, (widths["v"],)),
    )
    return {parameter.name: parameter for parameter in every}


def heads(layer: Layer, rank: Rank, stage: str) -> tuple[range, range]:
    """Return a rank's key heads and value heads: those of its TP rank at rest, its own in the kernel in use.

    ValueError for an unknown stage, or if the ranks do not divide the key heads; value heads are a multiple of these.
    """
    _check_is("rank", rank, Rank)
    index, parts = rank.part(_axes(stage, ("tp",), ("tp", "cp")))
    _check_heads(layer, parts)
    keys, values = (range(index * n // parts, (index + 1) * n // parts) for n in (layer.heads, layer.value_heads))
    return keys, values


def features(layer: Layer, rank: Rank, stage: str) -> Tensor:
    """Return which of in_proj's outputs a rank has, in its order.

    At rest means before CP ranks exchange tokens for heads, in use means after. ValueError as in `heads`.
    """
    return _slices(layer, tuple(layer.sections.values()), rank, _axes(stage, ("tp",), ("tp", "cp")))


def rows(layer: Layer, name: str, rank: Rank, stage: str) -> Tensor:
    """Return the index in the whole for each index of a rank's shard along the parameter's axis.

    ValueError for an unknown name or stage, or if the ranks do not divide the key heads.
    """
    parameter = _parameter(layer, name)
    return _slices(layer, parameter.sections, rank, _axes(stage, parameter.at_rest, parameter.in_use))


def shard(layer: Layer, name: str, whole: Tensor, rank: Rank, stage: str) -> Shard:
    """Return what `rank` holds of the parameter `whole`.

    ValueError as in `rows`, or if `whole` has another shape than the parameter.
    """
    parameter = _parameter(layer, name)
    _check_is(name, whole, Tensor)
    if _shape(whole) != parameter.shape:
        raise ValueError(f"{name} must have shape {parameter.shape}, got {_shape(whole)}")
    return _selected(name, whole, parameter.axis, rank, rows(layer, name, rank, stage))


def assemble(shards: Sequence[Shard]) -> Tensor:
    """Return the whole tensor from the shards of every rank of a mesh, in any order.

    ValueError for shards of different tensors or meshes, for a missing or repeated rank, for replicas (shards with the same rows)
    whose bits differ, for shards that overlap without being replicas, and for rows that no shard has.
    """
    return _collected(_without_replicas(shards), torch.arange(shards[0].shape[shards[0].axis]))


def reshard(layer: Layer, shards: Sequence[Shard], mesh: Mesh, stage: str = AT_REST) -> list[Shard]:
    """Return a parameter's shards on the ranks of another mesh, in their order; each row comes from a source shard that has it.

    The sources may be at rest or in use, or cut in any other way that their rows describe. ValueError as in `assemble`, for a
    source that is not a parameter of the layer, or if `mesh` does not divide the key heads.
    """
    _check_is("mesh", mesh, Mesh)
    sources = _without_replicas(shards)
    parameter = _parameter_of(layer, sources[0])
    result = []
    for rank in mesh.ranks():
        wanted = rows(layer, parameter.name, rank, stage)
        result.append(Shard(parameter.name, parameter.shape, parameter.axis, rank, wanted, _collected(sources, wanted)))
    return result


def reduce_gradients(layer: Layer, gradients: Sequence[Shard]) -> list[Shard]:
    """Return a parameter's gradient as each rank must hold it at rest, from every rank's own gradient of its slice in use.

    Each gradient is taken as zero outside its slice, and the gradients are added over the parameter's `gradient_sum`. ValueError
    for a missing or repeated rank, for a tensor that is not a parameter of the layer, or for rows that are not the rank's rows in
    use.
    """
    mesh = _check_ranks(gradients)
    parameter = _parameter_of(layer, gradients[0])
    for gradient in gradients:
        if not torch.equal(gradient.rows, rows(layer, parameter.name, gradient.rank, IN_USE)):
            raise ValueError(
                f"rows of {parameter.name} of {_place(gradient.rank)} must be its rows in use, got {gradient.rows.tolist()}"
            )
    result = []
    for rank in mesh.ranks():
        rest_rows = rows(layer, parameter.name, rank, AT_REST)
        shape = (*parameter.shape[: parameter.axis], len(rest_rows), *parameter.shape[parameter.axis + 1 :])
        total = gradients[0].value.new_zeros(shape)
        place = {row: index for index, row in enumerate(rest_rows.tolist())}
        for gradient in gradients:
            if all(getattr(gradient.rank, axis) == getattr(rank, axis) or axis in parameter.gradient_sum for axis in ("tp", "cp")):
                where = torch.tensor([place[row] for row in gradient.rows.tolist()], device=total.device)
                total = total.index_add(parameter.axis, where, gradient.value)
        result.append(Shard(parameter.name, parameter.shape, parameter.axis, rank, rest_rows, total))
    return result


def interleaved(layer: Layer) -> tuple[Tensor, Tensor]:
    """Return the rows of in_proj.weight (q k v z b a, as in Megatron and Qwen3.5) in the order of Qwen3-Next's two weights.

    in_proj_qkvz has for each key head its q, its k, the v of its value heads and their z; in_proj_ba has their b and their a. So
    in_proj.weight[interleaved(layer)[0]] is in_proj_qkvz.weight, as in transformers.
    """
    _check_is("layer", layer, Layer)
    starts, widths = layer.offsets(), layer.sections
    by_head = {name: torch.arange(widths[name]).view(layer.heads, -1) + starts[name] for name in widths}
    qkvz, ba = (torch.cat([by_head[name] for name in names], 1).flatten() for names in ("qkvz", "ba"))
    return qkvz, ba


def interleave(layer: Layer, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return Qwen3-Next's in_proj_qkvz.weight and in_proj_ba.weight from in_proj.weight. ValueError for another shape."""
    shape = _parameter(layer, "in_proj.weight").shape
    _check_is("in_proj.weight", weight, Tensor)
    if _shape(weight) != shape:
        raise ValueError(f"in_proj.weight must have shape {shape}, got {_shape(weight)}")
    qkvz, ba = (weight.index_select(0, order.to(weight.device)) for order in interleaved(layer))
    return qkvz, ba


def concatenate(layer: Layer, qkvz: Tensor, ba: Tensor) -> Tensor:
    """Return in_proj.weight from Qwen3-Next's in_proj_qkvz.weight and in_proj_ba.weight.

    ValueError for other shapes, or if the dtypes differ.
    """
    orders = interleaved(layer)
    for name, value in (("qkvz", qkvz), ("ba", ba)):
        _check_is(f"in_proj_{name}.weight", value, Tensor)
    if qkvz.dtype != ba.dtype:
        raise ValueError(f"in_proj_ba.weight must have the dtype of in_proj_qkvz.weight, {qkvz.dtype}, got {ba.dtype}")
    for name, value, order in zip(("qkvz", "ba"), (qkvz, ba), orders, strict=True):
        if _shape(value) != (len(order), layer.hidden):
            raise ValueError(f"in_proj_{name}.weight must have shape {(len(order), layer.hidden)}, got {_shape(value)}")
    return torch.cat([qkvz, ba]).index_select(0, torch.cat(orders).argsort().to(qkvz.device))


def tokens(layout: Sequence[Tensor], rank: Rank, *, sequence_parallel: bool) -> Tensor:
    """Return the tokens of a rank's hidden states, in its order; `layout` has for each CP rank the int64 tokens that it holds.

    ValueError if the layout does not have one vector for each CP rank, or does not name every token once; with `sequence_parallel`,
    also if tp does not divide the tokens of the CP rank.
    """
    _check_is("rank", rank, Rank)
    _check_is("sequence_parallel", sequence_parallel, bool)
    _check_is("layout", layout, Sequence)
    if len(layout) != rank.mesh.cp:
        raise ValueError(f"layout must have the tokens of each of cp = {rank.mesh.cp} ranks, got {len(layout)}")
    for vector in layout:
        _check_is("each of layout", vector, Tensor)
        if vector.dtype != torch.int64 or vector.ndim != 1:
            raise ValueError(f"layout must have vectors of int64, got {vector.dtype}, shape {_shape(vector)}")
    every = torch.cat(list(layout)).sort().values
    if not torch.equal(every, torch.arange(len(every), device=every.device)):
        raise ValueError(f"layout must have every token from 0 up once, got {every.tolist()}")
    mine = layout[rank.cp]
    if not sequence_parallel:
        return mine
    if len(mine) % rank.mesh.tp:
        raise ValueError(f"sequence_parallel needs a multiple of tp = {rank.mesh.tp} tokens on every CP rank, got {len(mine)}")
    return mine.view(rank.mesh.tp, len(mine) // rank.mesh.tp)[rank.tp]


def shard_hidden(hidden: Tensor, layout: Sequence[Tensor], rank: Rank, *, sequence_parallel: bool) -> Shard:
    """Return what a rank holds of the hidden states [tokens, ..., hidden], before in_proj or after out_proj's sum over tp.

    `assemble` is the inverse. ValueError as in `tokens`, or if the layout has another number of tokens.
    """
    mine = tokens(layout, rank, sequence_parallel=sequence_parallel)
    total = sum(len(vector) for vector in layout)
    _check_is("hidden", hidden, Tensor)
    if hidden.ndim < 2 or len(hidden) != total:
        raise ValueError(f"hidden must be [{total} tokens, ..., hidden] as the layout has, got shape {_shape(hidden)}")
    return _selected("hidden", hidden, 0, rank, mine)


def _axes(stage: str, at_rest: tuple[str, ...], in_use: tuple[str, ...]) -> tuple[str, ...]:
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    return at_rest if stage == AT_REST else in_use


def _parameter(layer: Layer, name: str) -> Parameter:
    known = parameters(layer)
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _parameter_of(layer: Layer, shard: Shard) -> Parameter:
    """Return the parameter of which `shard` is a shard."""
    parameter = _parameter(layer, shard.name)
    if (shard.shape, shard.axis) != (parameter.shape, parameter.axis):
        what = f"{parameter.shape} cut along axis {parameter.axis}"
        raise ValueError(f"{shard.name} must be {what}, got {shard.shape} cut along axis {shard.axis}")
    return parameter


def _check_is(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")  # noqa: TRY004 - one kind of error


def _check_heads(layer: Layer, parts: int) -> None:
    _check_is("layer", layer, Layer)
    if layer.heads % parts:
        raise ValueError(f"heads must be a multiple of the {parts} ranks that share them, got {layer.heads}")


def _slices(layer: Layer, sections: Sequence[int], rank: Rank, axes: Sequence[str]) -> Tensor:
    """Return a rank's contiguous slice of each section."""
    _check_is("rank", rank, Rank)
    index, parts = rank.part(axes)
    _check_heads(layer, parts)
    starts = itertools.accumulate(sections, initial=0)
    return torch.cat(
        [
            torch.arange(start + index * width // parts, start + (index + 1) * width // parts)
            for start, width in zip(starts, sections, strict=False)
        ]
    )


def _selected(name: str, whole: Tensor, axis: int, rank: Rank, wanted: Tensor) -> Shard:
    return Shard(name, _shape(whole), axis, rank, wanted, whole.index_select(axis, wanted.to(whole.device)))


def _check_ranks(shards: Sequence[Shard]) -> Mesh:
    """Return the mesh of the shards; ValueError unless they are one shard of every rank, of one tensor."""
    _check_is("shards", shards, Sequence)
    if not shards:
        raise ValueError("shards must be those of every rank, got none")
    for piece in shards:
        _check_is("each of shards", piece, Shard)
    first = shards[0]
    for piece in shards:
        for what in ("name", "shape", "axis"):
            if getattr(piece, what) != getattr(first, what):
                raise ValueError(f"shards must be of one tensor, got {what} {getattr(first, what)} and {getattr(piece, what)}")
        if piece.rank.mesh != first.rank.mesh:
            raise ValueError(f"shards must be of one mesh, got {first.rank.mesh} and {piece.rank.mesh}")
        if piece.value.dtype != first.value.dtype:
            raise ValueError(f"shards must be of one dtype, got {first.value.dtype} and {piece.value.dtype}")
    ranks = [item.rank for item in shards]
    for rank in first.rank.mesh.ranks():
        if ranks.count(rank) != 1:
            raise ValueError(f"shards must be one of every rank, got {ranks.count(rank)} of {_place(rank)}")
    return first.rank.mesh


def _without_replicas(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards without replicas, so that every row of the whole is in exactly one of them."""
    _check_ranks(shards)
    owner: dict[int, Shard] = {}
    originals: list[Shard] = []
    for piece in shards:
        other = next((owner[row] for row in piece.rows.tolist() if row in owner), None)
        if other is None:
            originals.append(piece)
            owner |= dict.fromkeys(piece.rows.tolist(), piece)
        elif not torch.equal(other.rows, piece.rows):
            both = f"{_place(other.rank)} and {_place(piece.rank)}"
            raise ValueError(f"shards of {piece.name} must share all their rows in one order or none, got {both}")
        elif not torch.equal(_bits(other.value), _bits(piece.value)):
            both = f"{_place(other.rank)} and {_place(piece.rank)}"
            raise ValueError(f"replicas of {piece.name} must be equal bit for bit, got another value on {both}")
    size = shards[0].shape[shards[0].axis]
    if missing := sorted(set(range(size)) - owner.keys()):
        raise ValueError(f"shards of {shards[0].name} must have every row up to {size - 1}, got none with row {missing[0]}")
    return originals


def _collected(shards: Sequence[Shard], wanted: Tensor) -> Tensor:
    """Return the wanted rows of the whole, in this order, from shards that have each row once."""
    axis = shards[0].axis
    place = torch.cat([piece.rows for piece in shards]).argsort()
    value = torch.cat([piece.value for piece in shards], axis)
    return value.index_select(axis, place[wanted].to(value.device))


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _place(rank: Rank) -> str:
    return f"tp rank {rank.tp}, cp rank {rank.cp}"
