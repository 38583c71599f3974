"""What the laws of paths compare, on every rank.

Every rank runs the law on the same example and is judged on the tensors that it holds. A law must make the same collective calls in
the same order on every rank, so its decisions may depend only on the example.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oracles import parallel as layouts
from oracles import sharding
from oracles.arithmetic.rounding import SINGLE
from oracles.layer import Layer
from oracles.operation import Inputs, gradient_name
from oracles.sharding import AT_REST, Mesh, Rank
from oracles.tolerance.allowance import KAPPA
from oracles.tolerance.bound import ORIGIN, Bound
from properties.laws.law import Blind, Breach, Cotangents, Pair, Results, present, with_others
from properties.laws.other_calls import later_cases, other_kinds, rotated
from properties.laws.recompute import LAST_BUT_ONE
from properties.paths.bench import PathBench
from properties.paths.case import ParallelCase
from properties.paths.domain import PathDomain, case_ranks
from properties.paths.illegal import illegal_of
from properties.words.example import Example

LEAST = 2.0**-100  # an error of a gradient of zero, which has none of its own


def _call(case: ParallelCase) -> tuple[Inputs, Cotangents]:
    return case.inputs(), case.cotangents() if case.backward else None


def _part_bound(bench: PathBench, bounds: dict[str, Bound], name: str) -> Bound:
    """Return the bound of this rank's part. A part of a row may err as much as the whole row."""
    bound, part = bounds[name], bench.part(name)
    if part is None:
        return bound
    axis, rows = part
    finer = bound.finer
    return dataclasses.replace(
        bound,
        value=bound.value.index_select(axis, rows),
        allowed=bound.allowed.index_select(axis, rows) if axis < bound.allowed.ndim else bound.allowed,
        finer=None if finer is None else lambda over=None: _part_bound(bench, {name: finer()}, name),
    )


def parallel(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Shared results are judged by their bounds, and so are those of one rank that has everything.

    The run on one rank shows whether an error comes from sharing.
    """
    inputs, cotangents = _call(example.case)
    bounds = bench.bounds()
    for name, got in bench.run(inputs, cotangents).items():
        yield Pair(name, "", got, _part_bound(bench, bounds, name))
    if bench.rank.mesh != Mesh(1, 1) and bench.rank == Rank(bench.rank.mesh):
        for name, got in bench.run(inputs, cotangents, alone=True).items():
            yield Pair(name, "with tp=1 cp=1", got, bounds[name])


def same(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Judge the results with another choice of how to compute, and those without it, by the same bounds."""
    inputs, cotangents = _call(example.case)
    bounds = bench.bounds()
    name, _, value = (example.variant or "").partition("=")
    changed: dict[str, Any] = {name: value}
    for what, got in bench.run(inputs, cotangents, **changed).items():
        yield Pair(what, f"with {example.variant}", got, _part_bound(bench, bounds, what))
    for what, got in bench.run(inputs, cotangents).items():
        yield Pair(what, "", got, _part_bound(bench, bounds, what))


def _sections(case: ParallelCase) -> tuple[list[int], list[int]]:
    """Return the features of a TP rank by section: those that enter the kernel, and those that leave it."""
    widths = case.layer.sections
    return [width // case.tp for width in widths.values()], [widths["v"] // case.tp]


@functools.lru_cache(4)  # equal on all ranks, of which one process may simulate many
def _tags(case: ParallelCase, features: int) -> tuple[Tensor, Tensor]:
    """Return distinct numbers [T, B, features] to send one way, and others to send the other way.

    No number is sent both ways: a backward that returns numbers of the forward would otherwise look right.
    """
    one, other = case.tagged((2, case.batch[1], case.batch[0], features))
    return one, other


def _rank_parts(bench: PathBench, case: ParallelCase, tags: Tensor, sections: list[int]) -> dict[str, Tensor]:
    """Return what this rank holds of a whole [T, B, features] if it is cut by tokens, and if it is cut by heads."""
    tokens, features = case.tokens_of_ranks()[bench.rank.cp], _features(tuple(sections), case.cp)[bench.rank.cp]
    return {"tokens": tags.index_select(0, tokens), "heads": tags.index_select(-1, features)}


@functools.lru_cache(256)
def _features(sections: tuple[int, ...], cp: int) -> layouts.Layout:
    return layouts.head_parallel(sections, cp)


def exchange(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Send tagged numbers one way, and others back by the backward. They must arrive where the layout puts them."""
    case, target = example.case, example.variant or ""
    source, sections = ("tokens", _sections(case)[0]) if target == "heads" else ("heads", _sections(case)[1])
    tags, back = (_rank_parts(bench, case, numbers, sections) for numbers in _tags(case, sum(sections)))
    got, gradient = bench.move(tags[source], sections, target, back[target])
    yield Pair("from", f"{source} to {target}", got, tags[target])
    yield Pair("gradient", f"from {target} to {source}", gradient, back[source])


def round_trip(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Send tagged numbers to heads and back, forward and backward. Both ways are the identity."""
    case = example.case
    for sections in _sections(case):
        tags, back = (_rank_parts(bench, case, numbers, sections) for numbers in _tags(case, sum(sections)))
        by_heads, _ = bench.move(tags["tokens"], sections, "heads")
        got, gradient = bench.move(by_heads, sections, "tokens", back["tokens"])
        _, gradient = bench.move(tags["tokens"], sections, "heads", gradient)
        yield Pair(str(len(sections)), "sections there and back", got, tags["tokens"])
        yield Pair("gradient", f"of {len(sections)} sections there and back", gradient, back["tokens"])


def fused(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Compare the fused exchange in both directions with an exchange for each sequence."""
    case = example.case
    for direction, sections in zip(("heads", "tokens"), _sections(case), strict=True):
        source, target = ("tokens", "heads") if direction == "heads" else ("heads", "tokens")
        tags, back = (_rank_parts(bench, case, numbers, sections) for numbers in _tags(case, sum(sections)))
        ways = {
            form: bench.move(tags[source], sections, direction, back[target], thd_all_to_all=form)
            for form in ("per_sequence", "fused")
        }
        (once, gradient), (fused, fused_gradient) = ways["per_sequence"], ways["fused"]
        yield Pair("fused", f"to {target}", fused, once)
        yield Pair("gradient", f"of fused to {target}", fused_gradient, gradient)


def traffic(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Count the all-to-alls of a call and their bytes, and compare both with the design."""
    case = example.case
    per_sequence = case.packed and case.thd_all_to_all == "per_sequence"
    sequences = sum(length > 0 for length in case.padded) if per_sequence else 1
    into, out = _sections(case)
    calls = sequences * (len(into) if per_sequence else 1) + sequences
    elements = case.tokens // case.cp * (sum(into) + sum(out)) * (case.cp - 1) // case.cp
    itemsize = 4 if case.dtype == "fp32" else 2
    inputs, cotangents = _call(case)
    ways = 2 if cotangents is not None else 1  # backward mirrors forward
    counted = bench.exchanged(lambda: bench.run(inputs, cotangents))
    want = (ways * calls, ways * elements * itemsize) if case.cp > 1 else (0, 0)
    for name, detail, index in (("all-to-alls", "", 0), ("bytes", "sent in them", 1)):
        yield Pair(name, detail, torch.tensor([counted["all_to_all"][index]]), torch.tensor([want[index]]))


def refused(bench: PathBench, example: Example) -> Iterator[Pair]:
    """The layout must be refused before any communication; otherwise a rank that goes on alone waits for ever."""
    message = bench.refusal(example.variant or "")
    from_every_rank = bench.from_every_rank(message)
    if not message:
        raise Breach(f"accepts an illegal layout ({example.variant})")
    if len(set(from_every_rank)) > 1:
        way = f"refuses an illegal layout ({example.variant}) with several messages"
        raise Breach(way, str(sorted(set(from_every_rank)))[: 298 - len(way)])
    yield Pair("ranks", "that refuse", torch.tensor([len(from_every_rank)]), torch.tensor([case_ranks(example.case)]))


def reshard(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Compare the shards that the path cuts with those of the layer, and load them on the mesh of the variant."""
    case = example.case
    tp, cp = map(int, (example.variant or "").split("x"))
    layer, mesh = case.layer, Mesh(tp, cp)
    whole = {
        name: case.tagged(about.shape)
        for name, about in sharding.parameters(layer).items()
        if case.conv_bias or name != "conv.bias"
    }
    if bench.domain.saves:
        for rank, loaded in bench.resharded(whole, mesh).items():
            yield from _loaded(layer, whole, rank, loaded)
    if not bench.domain.checkpoints:
        return
    rank_shards = {rank: bench.shards(whole, rank) for rank in bench.rank.mesh.ranks()}
    for name, x in whole.items():
        wanted = {rank: sharding.shard(layer, name, x, rank, AT_REST) for rank in rank_shards}
        for rank, shard in wanted.items():
            yield Pair(name, f"of tp rank {rank.tp}, cp rank {rank.cp}", rank_shards[rank][name].to(x.dtype), shard.value)
    ranks = list(mesh.ranks())
    moved = {
        name: sharding.reshard(layer, [sharding.shard(layer, name, x, rank, AT_REST) for rank in rank_shards], mesh)
        for name, x in whole.items()
    }
    for index, rank in enumerate(ranks):
        loaded = bench.loaded({name: shards[index] for name, shards in moved.items()}, rank)
        yield from _loaded(layer, whole, rank, loaded)


def _loaded(layer: Layer, whole: Results, rank: Rank, loaded: Results) -> Iterator[Pair]:
    """Every parameter that a rank of another mesh has loaded is this rank's part of the whole, bit for bit."""
    for name, x in whole.items():
        want = sharding.shard(layer, name, x, rank, AT_REST).value
        how = f"loaded by tp rank {rank.tp}, cp rank {rank.cp} of {rank.mesh.tp}x{rank.mesh.cp}"
        yield Pair(name, how, loaded[name].to(want.dtype), want)


def repeats(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Compare the bits of two runs."""
    inputs, cotangents = _call(example.case)
    once, twice = (bench.run(inputs, cotangents) for _ in range(2))
    for name, got in twice.items():
        yield Pair(name, "", got, once[name])


def replicas(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Without sequence parallelism TP ranks hold the same output and the same gradient of hidden states.

    Nobody compares them later. If they differ in a bit, the ranks' weights and the tokens that they choose drift apart.
    """
    inputs, cotangents = _call(example.case)
    results = bench.run(inputs, cotangents)
    for name in ("y", gradient_name("hidden")):
        if name in results:
            yield Pair(name, "as on the first TP rank", results[name], bench.of_first(results[name]))


def accumulated(bench: PathBench, example: Example) -> Iterator[Pair]:
    """The second micro-batch has twice the cotangent of the first one, so that gradients are those of one, three times over.

    With `frozen`, some inputs of a call require no gradient: the tokens, everything else, and all but one that the seed decides.
    A call that has nothing but tokens is divided into its first input and the others.
    """
    inputs, cotangents = _call(example.case)
    assert cotangents is not None
    bounds = bench.bounds()
    if example.variant == "frozen":
        names, tokens = present(example.case.spec, inputs), present(example.case.spec, inputs, "B", "T")
        if tokens == names:
            tokens = names[:1]
        alone = names[example.case.seed % len(names)]
        for wanted in ([name for name in names if name not in tokens], tokens, [alone]):
            frozen = [name for name in names if name not in wanted]
            what = f"with {', '.join(frozen)} frozen"
            yield from _judged(bench, bench.run(inputs, cotangents, frozen=frozen), bounds, what)
        return
    for name, got in bench.accumulated(inputs, [cotangents, {name: 2 * x for name, x in cotangents.items()}]).items():
        yield Pair(name, "of two micro-batches", got, _times(_part_bound(bench, bounds, name), 3))


def _times(bound: Bound, factor: int) -> Bound:
    """Return the bound of a result so many times over."""
    finer = bound.finer
    return dataclasses.replace(
        bound,
        value=factor * bound.value,
        allowed=factor * bound.allowed,
        finer=None if finer is None else lambda over=None: _times(finer(), factor),
    )


def clipped(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Gradients whose norm is over the limit are scaled to it, and others stay what they are.

    Both are products with a factor that depends on a sum of squares in float32, over all gradients and then over ranks.
    """
    whole = example.case.gradients()
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in whole.values()))
    unit = KAPPA * 2.0**-SINGLE
    for what, factor, error in (
        ("clipped to a third of their norm", 1 / 3, unit * math.sqrt(sum(x.numel() for x in whole.values()))),
        ("whose norm is half the limit", 2.0, unit),
    ):
        if (found := bench.clipped(whole, factor * norm)) is None:
            raise Breach(f"skips a step with finite gradients, {what}")
        for name, x in found.items():
            own = sharding.shard(example.case.layer, name, whole[name], bench.rank, AT_REST).value
            value = min(factor, 1.0) * own.double()
            yield Pair(gradient_name(name), what, x, Bound(value, error * value.abs() + LEAST, ORIGIN))


def skipped(bench: PathBench, example: Example) -> Iterator[Pair]:
    """A number of one TP rank alone is not finite; which one of its parameters and numbers is drawn by the seed."""
    case = example.case
    whole, holder = case.gradients(), Rank(case.mesh, case.seed % case.tp)
    if example.variant != "finite":
        cut = [name for name, about in sharding.parameters(case.layer).items() if "tp" in about.at_rest and name in whole]
        name = cut[case.seed // case.tp % len(cut)]
        rows = sharding.rows(case.layer, name, holder, AT_REST)
        row = whole[name].narrow(sharding.parameters(case.layer)[name].axis, int(rows[case.seed % len(rows)]), 1)
        row[(0,) * row.ndim].fill_(float(example.variant or "nan"))
    skips = bench.clipped(whole, 1.0) is None
    counted = bench.from_every_rank("skips" if skips else "").count("skips")
    want = 0 if example.variant == "finite" else case_ranks(case)
    what = (
        "that skip a step with finite gradients" if not want else f"that skip a step with {example.variant} on tp rank {holder.tp}"
    )
    yield Pair("ranks", what, torch.tensor([counted]), torch.tensor([want]))


def earlier(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Judge a call that comes after other calls on the same ranks, as if it came first.

    - `others`: a call with other numbers and its sequences in another order before, and again, which must not change what the call
      returned. Then calls of other shapes and another dtype.
    - `refill`: the tensors of a call get the numbers of another call in place. Offsets do only with `refills=True`.
    - `freed`: the tensors of a call are freed, and those of the next call get their addresses if the allocator plays along.
    - `gradients`: a call under `no_grad`, then the same tensors with gradients.
    - `in_flight`: LATER calls with other numbers and settings between forward and backward, of which the last but one is the call
      itself again. The backward of the last call comes first, and then those of the call.
    - `refused`: a layout that the domain promises to refuse, before.
    - `failed`: two calls in which a collective raises on every rank, before: the first one, and one of the first FAILING.
    - `alone`: every rank runs the whole call by itself, before.
    """
    case: ParallelCase = example.case
    inputs, cotangents = _call(case)
    bounds, first = bench.bounds(), rotated(case)
    if example.variant == "in_flight":
        if bench.domain.steps:
            raise Blind("the domain has steps=True")
        later = later_cases(case, bench.domain, bench.device, LATER)
        _, one, again = bench.in_flight([case, *later[:-2], case, later[-1]], (LATER, 0, LATER - 1))
        yield from _judged(bench, one, bounds, "with other calls between forward and backward")
        yield from _judged(bench, again, bounds, LAST_BUT_ONE)
        return
    if example.variant == "refused":
        if not bench.domain.refuses:
            raise Blind("the domain has refuses=False")
        bench.refusal(illegal_of(case)[case.seed % len(illegal_of(case))])
    elif example.variant == "failed":
        failed = [bench.fail(inputs, cotangents, at) for at in (0, case.seed % FAILING)]
        if not any(failed):
            raise Blind("no collective failed")
    elif example.variant == "alone":
        bench.run(inputs, cotangents, alone=True)
    elif example.variant == "others":
        bench.run(*_call(first), case=first)
    if example.variant == "refill":
        results = bench.replay(first if bench.domain.refills else with_others(case), inputs, cotangents)
    elif example.variant == "freed":
        results = bench.renew(first, inputs, cotangents)
    elif example.variant == "gradients":
        results = bench.replay(case, inputs, cotangents, gradients=False)
    else:
        results = bench.run(inputs, cotangents)
    yield from _judged(bench, results, bounds, _AFTER[example.variant or ""])
    if example.variant == "others":
        bench.run(*_call(first), case=first)
        yield from _judged(bench, results, bounds, "read after a later call")
    if example.variant == "others" and (others := _other_kinds(bench.domain, case)):
        for _, other in others:
            bench.run(*_call(other), case=other)
        what = " and ".join(kind for kind, _ in others)
        yield from _judged(bench, bench.run(inputs, cotangents), bounds, f"after calls with other {what}")


def _other_kinds(domain: PathDomain, case: ParallelCase) -> list[tuple[str, ParallelCase]]:
    """Return the case in other shapes and in another dtype. All ranks can share twice as many sequences of the same lengths."""
    found, twice = other_kinds(domain, case), dataclasses.replace(with_others(case), lengths=case.lengths * 2)
    if "shapes" not in dict(found) and case.tokens and domain.outside(twice) is None:
        found.append(("shapes", twice))
    return found


LATER = 5  # calls between forward and backward
FAILING = 5  # the first collectives, of which one fails
_AFTER = {
    "others": "after a call with other numbers",
    "refill": "after the call's tensors were filled again",
    "freed": "in memory that an earlier call's tensors had",
    "gradients": "of a call with gradients, after one under no_grad",
    "refused": "after a layout that the path refuses",
    "failed": "after calls in which a collective failed",
    "alone": "after a call on one rank",
}


def _judged(bench: PathBench, results: Results, bounds: dict[str, Bound], what: str) -> Iterator[Pair]:
    for name, value in results.items():
        yield Pair(name, what, value, _part_bound(bench, bounds, name))
