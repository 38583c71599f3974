"""Wrong parallel paths: our layer, each with one mistake that somebody made or could have made."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs
from oracles.sharding import Rank
from properties.paths.case import CHOICES
from verify.adapters.gdn import functions
from verify.adapters.gdn import layer as _layer
from verify.adapters.gdn.adapter import GdnLayer
from verify.adapters.gdn.exchange import cp_to_hp
from verify.adapters.gdn.layer import GatedDeltaNet
from verify.ranks.collectives import Alone, Place, exchange, gather_from, reduce_from
from verify.zoo.base import Right

Choices = dict[str, str]
Lengths = Sequence[int] | None
layer: Any = _layer  # wrong layers rebind names of this module


class Mutant(Right, GdnLayer):
    """Our layer, unchanged, in plain torch. Triton kernels would be interpreted, which takes seconds for a case."""

    domain = dataclasses.replace(
        GdnLayer.domain,
        ranks=4,
        exchange_ranks=8,
        choices=tuple({**CHOICES, "conv": ("torch",), "rule": ("torch",)}.items()),
        slow=(),
        refills=True,
    )


class RankOrder(Mutant, letter="C", incident=(10,)):
    """Zigzag is not undone there and back, so tokens stay in the order of the ranks and a round trip is the identity."""

    def move(self, x: Tensor, lengths: Lengths, sections: Sequence[int], to: str, place: Place, choices: Choices) -> Tensor:
        cp = place.cp.size
        if to == "heads":
            blocks = torch.cat([part for section in x.split(list(sections), -1) for part in section.chunk(cp, -1)], -1)
            parts = blocks.split([width // cp for width in sections for _ in range(cp)], -1)
            return exchange(place.cp, torch.cat([torch.cat(parts[rank::cp], -1) for rank in range(cp)]))
        received = exchange(place.cp, x).chunk(cp)
        slices = [block.split([width // cp for width in sections], -1) for block in received]
        return torch.cat([torch.cat(parts, -1) for parts in zip(*slices, strict=True)], -1)


class SectionsTogether(Mutant, letter="C"):
    """The fused projection is cut evenly over the ranks, not section by section."""

    def move(self, x: Tensor, lengths: Lengths, sections: Sequence[int], to: str, place: Place, choices: Choices) -> Tensor:
        return super().move(x, lengths, [sum(sections)], to, place, choices)


class FusedSkipsTheLast(Mutant, letter="C"):
    """The fused form drops the last sequence's tokens if the one before is empty."""

    def move(self, x: Tensor, lengths: Lengths, sections: Sequence[int], to: str, place: Place, choices: Choices) -> Tensor:
        y = super().move(x, lengths, sections, to, place, choices)
        if choices["thd_all_to_all"] == "fused" and lengths and 0 in lengths[:-1] and len(y):
            y = torch.cat([y[:-1], 0 * y[-1:]])
        return y


class GradientOfOneWay(Mutant, letter="F"):
    """The backward of the exchange returns its input unchanged if the sizes allow it."""

    def move(self, x: Tensor, lengths: Lengths, sections: Sequence[int], to: str, place: Place, choices: Choices) -> Tensor:
        y = super().move(x, lengths, sections, to, place, choices)
        return y.detach() + 0 * x.sum() if y.numel() else y


class GradientOfTheForward(Mutant, letter="F"):
    """The backward of the exchange returns what the forward got, in place of the gradient that it gets."""

    class _Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return ctx.saved_tensors[0].clone(), None

    def move(self, x: Tensor, lengths: Lengths, sections: Sequence[int], to: str, place: Place, choices: Choices) -> Tensor:
        y = super().move(x.detach(), lengths, sections, to, place, choices)
        exchanged: Tensor = self._Exchange.apply(x, y)
        return exchanged


class NoSumOverTp(Mutant, letter="T", incident=(15,)):
    """The input's gradient is not added over TP ranks."""

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, *offsets: Any) -> Tensor:
            tp = self.place.tp
            if self.sequence_parallel or tp.size == 1:
                return super().forward(hidden, *offsets)
            mine = hidden * (tp.rank == 0) + hidden.detach() * (tp.rank != 0)
            return super().forward(mine, *offsets)


class SliceOfTheFirst(Mutant, letter="C"):
    """Every CP rank uses the first rank's heads of A_log."""

    class module(GatedDeltaNet):  # noqa: N801
        def in_use(self, name: str) -> Tensor:
            if name != "A_log" or self.place.cp.size == 1:
                return super().in_use(name)
            return self.get_parameter(name).chunk(self.place.cp.size)[0]


class ConvolvesAcross(Mutant, letter="V", incident=(2,)):
    """The convolution runs from one packed sequence into the next."""

    class module(GatedDeltaNet):  # noqa: N801
        def convolve(self, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:
            whole = [sum(lengths)] if x.shape[0] == 1 else lengths
            return super().convolve(x, None, whole)


class StateAcross(Mutant, letter="V", incident=(1, 2, 3)):
    """The rule runs from one packed sequence into the next."""

    class module(GatedDeltaNet):  # noqa: N801
        def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *packing: Any) -> Tensor:
            whole = [q.shape[1]] if q.shape[0] == 1 else packing[1]
            return super().rule(q, k, v, g, beta, None, whole)


class RealOffsetsWithPads(Mutant, letter="C", incident=(13,)):
    """Offsets do not count pad tokens, so later sequences start too early."""

    class module(GatedDeltaNet):  # noqa: N801
        def mix(self, x: Tensor, cu_seqlens: Tensor | None, lengths: list[int]) -> Tensor:
            if cu_seqlens is not None and len(lengths) > 1 and min(lengths) > 1:
                moved = [lengths[0] - 1, lengths[1] + 1, *lengths[2:]]
                return super().mix(x, torch.tensor([0, *itertools.accumulate(moved)], dtype=cu_seqlens.dtype), moved)
            return super().mix(x, cu_seqlens, lengths)


class NormBeforeItsTime(Mutant, letter="E"):
    """With qk_norm=combined, one norm is taken over q and k side by side, not one of each head of both."""

    class module(GatedDeltaNet):  # noqa: N801
        def rule(self, q: Tensor, k: Tensor, *rest: Any) -> Tensor:
            if self.choices.qk_norm == "combined":
                q, k = functions.l2norm(torch.cat([q, k], -1)).chunk(2, -1)
            return super().rule(q, k, *rest)


class DoubleGradient(Mutant, letter="T", incident=(15,)):
    """norm.weight's gradient is added over TP in the layer already, so the caller's sum counts it twice."""

    class module(GatedDeltaNet):  # noqa: N801
        def get_parameter(self, target: str) -> torch.nn.Parameter:
            found = super().get_parameter(target)
            if target != "norm.weight" or self.place.tp.size == 1:
                return found
            return 2 * found - found.detach()  # type: ignore[return-value]


class ScattersTheWrongSlice(Mutant, letter="T"):
    """With sequence parallelism each rank takes the slice of the rank before it."""

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, *offsets: Any) -> Tensor:
            y = super().forward(hidden, *offsets)
            if not self.sequence_parallel or self.place.tp.size == 1:
                return y
            return gather_from(self.place.tp, y).chunk(self.place.tp.size)[self.place.tp.rank - 1]


class SumsTwice(Mutant, letter="T"):
    """The output of out_proj is added over TP a second time."""

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, *offsets: Any) -> Tensor:
            y = super().forward(hidden, *offsets)
            return y if self.sequence_parallel else reduce_from(self.place.tp, y)


class FusedOneByOne(Mutant, letter="C"):
    """The fused exchange still exchanges section by section: its numbers are right, its count of collectives is wrong."""

    class module(GatedDeltaNet):  # noqa: N801
        def forward(self, hidden: Tensor, *offsets: Any) -> Tensor:
            def sections(comm: Any, x: Tensor, lengths: Any, widths: Sequence[int], *, fused: bool) -> Tensor:
                parts = x.split(list(widths), -1)
                return torch.cat([cp_to_hp(comm, part, lengths, [part.shape[-1]], fused=fused) for part in parts], -1)

            layer.cp_to_hp = sections
            try:
                return super().forward(hidden, *offsets)
            finally:
                layer.cp_to_hp = cp_to_hp  # the original: the name may hold another rank's


class TakesHalfPieces(Mutant, letter="C"):
    """A length that cp divides is accepted, although 2 cp does not divide it."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        cp = place.cp.size
        lengths = [] if x.cu_seqlens is None else x.cu_seqlens.diff().tolist()
        if (
            min(lengths, default=-1) >= 0
            and any(length % (2 * cp) for length in lengths)
            and not any(length % cp for length in lengths)
        ):
            twice: Tensor = 2 * x.hidden
            return twice
        return super().run(x, place)


class SaysWhichRank(Mutant, letter="C"):
    """Each rank refuses an illegal layout with a message of its own."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        try:
            return super().run(x, place)
        except ValueError as error:
            raise ValueError(f"rank {place.cp.rank}: {error}") from None


class RefusesLate(Mutant, letter="R"):
    """An illegal layout is refused only after the ranks have communicated about it."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        place.cp.all_reduce(torch.ones(1))
        return super().run(x, place)


class EvenRows(Mutant, letter="T", incident=(14, 16)):
    """in_proj's rows are cut evenly over TP ranks, so the first rank has q, k and part of v."""

    def shards(self, whole: dict[str, Tensor], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        shards = super().shards(whole, layer, rank)
        return shards | {"in_proj.weight": whole["in_proj.weight"].tensor_split(rank.mesh.tp)[rank.tp]}


class SumsInAnyOrder(Mutant, letter="R", incident=(29,)):
    """Rounding errors are summed in another order in each call."""

    calls: ClassVar[list[int]] = [0]

    def run(self, x: Inputs, place: Place) -> Tensor:
        self.calls[0] += 1
        return super().run(x, place) * (1 + 2**-22 * (self.calls[0] % 7))


class WrongWhenDeterministic(Mutant, letter="C"):
    """With deterministic=yes, the last token is left out."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        return torch.cat([y[:-1], 0 * y[-1:]]) if x.deterministic else y


class LosesTheSecondChunk(Mutant, letter="C"):
    """With CP, a rank's output is zero from its second chunk of 64 tokens on."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        return y * (torch.arange(len(y)) < 64).reshape(-1, 1, 1) if place.cp.size > 1 else y


class SecondChunkEndsEarly(Mutant, letter="C"):
    """With CP, the last token of a rank with two chunks or more is left out if its last chunk is not full."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        early = place.cp.size > 1 and len(y) > 128 and len(y) % 64
        return torch.cat([y[:-1], 0 * y[-1:]]) if early else y


class LastRankIsNaN(Mutant, letter="C"):
    """The first token of the last CP rank is NaN."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        last = place.cp.size > 1 and place.cp.rank == place.cp.size - 1
        return torch.where(torch.arange(len(y)).reshape(-1, 1, 1) == 0, torch.nan, y) if last else y


class OwnShardAlone(Mutant, letter="C", incident=(8, 9)):
    """With CP each rank runs the layer on its own tokens, as if they were the whole (LlamaFactory 10727, rtp-llm 1299)."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        parts = {name: None if x[name] is None else x[name] // place.cp.size for name in ("cu_seqlens", "cu_seqlens_padded")}
        return super().run(x.replaced(**parts), Place(place.tp, Alone()))


class ForgetsRealTokensBeforePads(Mutant, letter="C", incident=(11,)):
    """With CP and padded sequences the output of each sequence's last real token is exactly zero (TransformerEngine 3331)."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        if x.cu_seqlens_padded is None or place.cp.size == 1 or not len(y):
            return y
        keep = torch.ones(len(y), 1, 1)
        keep[-1] = 0
        return y * keep


class CannotBeBuiltWithCp(Mutant, letter="C", incident=(12,)):
    """With CP, the module gets an argument that it does not know (Megatron-LM 4374)."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        if place.cp.size > 1:
            raise TypeError("__init__() got an unexpected keyword argument 'cp_comm_type'")
        return super().run(x, place)


class SkipsOnTheLargestNorm(Mutant, letter="T"):
    """A step is skipped if the largest norm over ranks is not finite. The maximum loses NaN, so all ranks step with a NaN."""

    def skips(self, squares: Tensor, place: Place) -> bool:
        return not bool(place.tp.all_max(squares).isfinite())


class ClipsByAHalfNorm(Mutant, letter="T"):
    """The squared norm of gradients is added over ranks in bf16."""

    def norm(self, squares: Tensor, place: Place) -> Tensor:
        return place.tp.all_reduce(squares.bfloat16()).float().sqrt()
