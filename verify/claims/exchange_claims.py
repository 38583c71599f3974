"""The claim about packed context parallelism: one all-to-all each way instead of one for each sequence, over 2 and 4 ranks.

Ranks are the workers of verify/ranks/group.py; `answer` here answers their questions. The forms are those of
verify/adapters/gdn/exchange.py. Its form "fused" builds the maps along tokens on the CPU at every call; "fused, maps kept" keeps
them on the device. The forms are also judged, with whole numbers: every token and feature must land where the definition puts it,
forward and backward.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oracles.parallel import head_parallel, zigzag
from verify.adapters.gdn.exchange import cp_to_hp, feature_map, hp_to_cp, permuted, token_map
from verify.bench.faults import short
from verify.claims.kernel_claims import ragged
from verify.claims.setting import Setting
from verify.claims.table import Row
from verify.claims.timing import Call, Effort, Spread, clock_of, greatest, measured, own_device, ratios
from verify.process import messages
from verify.process.messages import Join
from verify.process.worker import WorkerLost
from verify.ranks.collectives import Comm, Distributed
from verify.ranks.collectives import exchange as swap
from verify.ranks.group import Answering, RankGroup, join

SERVES = "verify.claims.exchange_claims:answer"
DEADLINE_S = 120.0
WAYS = ("to heads", "to tokens", "to heads, backward", "to tokens, backward")
CLAIMED = "iteration 7 to 10% faster (16K tokens, cp 4)"
Moved = tuple[Tensor, Tensor]
Move = Callable[[Tensor, Tensor], Moved]


class Unwaited(Distributed):
    """A process group on whose all-to-alls the CPU does not wait, as in training."""

    def _collective(self, kind: str, x: Tensor) -> Tensor:
        assert kind == "all_to_all", kind
        x = x.contiguous()
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x, group=self.group)
        return result


@dataclasses.dataclass(frozen=True)
class Load:
    """What an exchange moves, for sequences of `lengths` tokens.

    in_proj's features, with widths `sections`, go from tokens to heads. The rule's features, with widths `back`, go back to tokens.
    """

    lengths: tuple[int, ...]
    sections: tuple[int, ...]
    back: tuple[int, ...]


def per_sequence(comm: Comm, load: Load) -> Move:
    """The form with one all-to-all for each section of each sequence there, and one for each sequence back."""
    return _of_the_layer(comm, load, fused=False)


def fused(comm: Comm, load: Load) -> Move:
    """The form with one all-to-all each way, which builds its maps along tokens at every call."""
    return _of_the_layer(comm, load, fused=True)


def _of_the_layer(comm: Comm, load: Load, *, fused: bool) -> Move:
    def move(x: Tensor, y: Tensor) -> Moved:
        there = cp_to_hp(comm, x, load.lengths, load.sections, fused=fused)
        return there, hp_to_cp(comm, y, load.lengths, load.back, fused=fused)

    return move


def with_maps_kept(comm: Comm, load: Load, device: torch.device) -> Move:
    """The form with one all-to-all each way, whose maps are built once."""
    tokens, there, back = (
        tuple(indices.to(device) for indices in maps)
        for maps in (token_map(load.lengths, comm.size), feature_map(load.sections, comm.size), feature_map(load.back, comm.size))
    )

    def move(x: Tensor, y: Tensor) -> Moved:
        x = permuted(x, (there[0], there[1]), -1)
        x = swap(comm, x.unflatten(-1, (comm.size, -1)).movedim(-2, 0).flatten(0, 1))
        y = swap(comm, permuted(y, (tokens[1], tokens[0]), 0)).unflatten(0, (comm.size, -1))
        return permuted(x, (tokens[0], tokens[1]), 0), permuted(y.movedim(0, -2).flatten(-2), (back[1], back[0]), -1)

    return move


def movers(comm: Comm, load: Load, device: torch.device) -> dict[str, Move]:
    """The forms by name. The one before the change comes first."""
    return {
        "per sequence": per_sequence(comm, load),
        "fused": fused(comm, load),
        "fused, maps kept": with_maps_kept(comm, load, device),
    }


def tagged(load: Load, size: int, rank: int, device: torch.device) -> tuple[Moved, Moved]:
    """What a rank has before the exchange, and what it must have after it.

    Every token and feature has its own whole number, exact in float64.
    """
    every = torch.arange(sum(load.lengths))
    mine = zigzag(load.lengths, size)[rank]

    def numbers(tokens: Tensor, features: Tensor, width: int) -> Tensor:
        return (tokens.to(device).unsqueeze(-1) * width + features.to(device)).double().unsqueeze(1)

    def both(sections: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The numbers as they are shared by tokens, and as they are shared by heads."""
        width = sum(sections)
        return numbers(mine, torch.arange(width), width), numbers(every, head_parallel(sections, size)[rank], width)

    (x, there), (back, y) = both(load.sections), both(load.back)
    return (x, y), (there, back)


def misplaced(move: Move, load: Load, size: int, rank: int, device: torch.device) -> list[str]:
    """The directions, of WAYS, in which a form brings something to a wrong place on this rank."""
    inputs, wanted = tagged(load, size, rank, device)
    x, y = (tensor.requires_grad_() for tensor in inputs)
    there, back = move(x, y)
    # Backward is the inverse exchange. The cotangents are other numbers than the results: a backward that returned its inputs would
    # otherwise look right.
    gradients = torch.autograd.grad([there, back], [x, y], [-1 - want for want in wanted])
    pairs = dict(zip(WAYS, [(there, wanted[0]), (back, wanted[1]), (gradients[0], -1 - x), (gradients[1], -1 - y)], strict=True))
    return [way for way, (got, want) in pairs.items() if not torch.equal(got, want)]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The answer of a rank, the same on all: {} to a Join, and the result of `measure` to a load. "error" if it fails."""
    try:
        if "question" in question:
            how = messages.parse(question)
            assert isinstance(how, Join), question
            join(how)
            return {}
        load = Load(*(tuple(question[name]) for name in ("lengths", "sections", "back")))
        return measure(load, Effort(**question["effort"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {short(error)}"}


def measure(load: Load, effort: Effort) -> dict[str, Any]:
    """Time and judge the forms.

    The result has, for each form, the milliseconds forward and backward (of the slowest rank in each round), the seconds of the
    first calls, and the directions in which something is misplaced on any rank.
    """
    device = own_device()
    comm = Unwaited()
    forms = movers(comm, load, device)
    result = _times(forms, comm, load, effort, device)
    wrong = {name: misplaced(move, load, comm.size, comm.rank, device) for name, move in forms.items()}
    on_any = {name: greatest([float(way in mine) for way in WAYS], device) for name, mine in wrong.items()}
    found = {name: [way for way, bad in zip(WAYS, flags, strict=True) if bad] for name, flags in on_any.items()}
    return {**result, "misplaced": found}


def _times(forms: Mapping[str, Move], comm: Comm, load: Load, effort: Effort, device: torch.device) -> dict[str, Any]:
    meet = torch.zeros(1, device=device)
    clock = clock_of(device, lambda: dist.all_reduce(meet))  # so that all ranks begin together
    tokens, width = sum(load.lengths), sum(load.back) // comm.size
    x = torch.ones(tokens // comm.size, 1, sum(load.sections), dtype=torch.bfloat16, device=device, requires_grad=True)
    y = torch.ones(tokens, 1, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    result: dict[str, Any] = {}

    def timed(way: str, calls: Mapping[str, Call]) -> None:
        result[f"first_{way}_s"] = {name: greatest([clock.first(call)], device)[0] for name, call in calls.items()}
        took = measured(calls, clock, effort, lambda ms: greatest([ms], device)[0])
        result[way] = {name: greatest(times, device) for name, times in took.items()}

    timed("ahead", {name: functools.partial(move, x, y) for name, move in forms.items()})
    graphs = {name: move(x, y) for name, move in forms.items()}
    directions = [torch.ones_like(output) for output in next(iter(graphs.values()))]

    def back(graph: Moved) -> object:
        return torch.autograd.grad(graph, (x, y), directions, retain_graph=True)

    timed("back", {name: functools.partial(back, graph) for name, graph in graphs.items()})
    return result


def exchanged(setting: Setting) -> Iterator[Row]:
    """The rows, forward and backward, for each number of ranks and of sequences.

    Where the host has too few GPUs for the ranks, a row has that as its reason.
    """
    cuda = setting.device.type == "cuda"
    for size in setting.sizes.ranks:
        there = torch.cuda.device_count() if cuda else size
        if there < size:
            what = f"all-to-all over {size} ranks"
            has = f"there {'is' if there == 1 else 'are'} {there}"
            yield Row(4, what, claimed=CLAIMED, reason=f"it needs {size} GPUs, {has}", lacking=True)
            continue
        with RankGroup(size, "nccl" if cuda else "gloo", DEADLINE_S, serves=SERVES) as group:
            for count in setting.sizes.packs:
                yield from packed(setting, group, size, count)


def packed(setting: Setting, group: Answering, size: int, count: int) -> Iterator[Row]:
    """The rows of a group of `size` ranks with `count` sequences."""
    sections, effort = setting.sizes.layer.sections, setting.effort
    # With many sequences, the form with a collective for each sequence and section takes a fifth of a second for a call.
    effort = dataclasses.replace(effort, budget_s=effort.budget_s / 2, least=min(effort.least, 6), warm=min(effort.warm, 1))
    load = Load(tuple(ragged(setting.sizes.moved, count, 2 * size)), tuple(sections.values()), (sections["v"],))
    what, words = f"all-to-all over {size} ranks", f"{sum(load.lengths):,} tokens in {count} sequence{'s' * (count > 1)}"
    setting.tell(f"{what}, {words}")
    try:
        reply = group.ask({**dataclasses.asdict(load), "effort": dataclasses.asdict(effort)})
    except WorkerLost as lost:
        reply = {"error": str(lost)}
    if "error" in reply:
        yield Row(4, what, words, claimed=CLAIMED, reason=str(reply["error"]))
        return
    yield from rows_of_ranks(what, words, reply)


def rows_of_ranks(what: str, words: str, reply: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of the ranks' answer: one for each direction and form."""
    before, *afters = reply["ahead"]
    for way, took, first in (("forward", "ahead", "first_ahead_s"), ("backward", "back", "first_back_s")):
        for after in afters:
            one, other = reply[took][before], reply[took][after]
            wrong = {name: reply["misplaced"][name] for name in (before, after) if reply["misplaced"][name]}
            yield Row(
                4,
                f"{what}: {after}, {way}",
                words,
                "ms",
                Spread.of(one),
                Spread.of(other),
                ratios(one, other),
                CLAIMED,
                "; ".join(f"BROKEN: {name} misplaces {', '.join(ways)}" for name, ways in wrong.items()) or "equal to the bit",
                broken=bool(wrong),
                first_s=(reply[first][before], reply[first][after]),
            )
