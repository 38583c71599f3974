"""What parallel paths promise, the cases drawn inside that, and the laws of several ranks together.

Every rank runs the law on the same example and is judged on the tensors that it holds. A law must make the same collective calls in
the same order on every rank, so its decisions may depend only on the example.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles import parallel, sharding
from oracles.arithmetic.rounding import SINGLE
from oracles.layer import Layer
from oracles.operation import Inputs, gradient_name
from oracles.sharding import AT_REST, Mesh, Rank
from oracles.tolerance.allowance import KAPPA
from oracles.tolerance.bound import ORIGIN, Bound
from properties.laws.history import LATER, later_cases, other_kinds, rotated
from properties.laws.law import Blind, Breach, Cotangents, Law, Pair, Results, all_variants, either, present, with_others
from properties.laws.recompute import LAST_BUT_ONE, separations
from properties.paths.case import CHOICES, ParallelCase
from properties.paths.domain import (
    MESHES,
    PathDomain,
    case_ranks,
    limits,
    path_cases,
)
from properties.paths.illegal import JUDGED
from properties.words.example import Example

WAYS = ("heads", "tokens")
ILLEGAL = tuple(JUDGED)
NUMBERS = ("finite", "nan", "inf")
LEAST = 2.0**-100  # an error of a gradient of zero, which has none of its own
HISTORIES = ("others", "refill", "freed", "gradients", "in_flight", "refused", "alone")


class PathBench(Protocol):
    """Runs a path on one rank together with the other ranks, and knows the truth and its bounds; tensors are this rank's own."""

    domain: PathDomain
    rank: Rank
    device: str

    def run(
        self,
        inputs: Inputs,
        cotangents: Cotangents,
        *,
        alone: bool = False,
        case: ParallelCase | None = None,
        frozen: Collection[str] = (),
        **choices: Any,
    ) -> Results:
        """Return this rank's part of the outputs and, with (whole) cotangents, of every gradient.

        Gradients are summed over the ranks that share them. `alone` runs on one rank that has everything. `inputs` are those of
        `case`, without it those of the bench's case. Inputs in `frozen` require no gradient. `choices` replace those of the case.
        """

    def in_flight(self, cases: Sequence[ParallelCase], backwards: Sequence[int]) -> list[Results]:
        """Run the forwards of all cases, then the backwards of the cases with these numbers, and return the results of these."""

    def replay(self, first: ParallelCase, inputs: Inputs, cotangents: Cotangents, *, gradients: bool = True) -> Results:
        """Run `first`, put the numbers of `inputs` into the same tensors, and return the results of a second run.

        With `gradients=False` the first run is under `no_grad`.
        """

    def renew(self, first: ParallelCase, inputs: Inputs, cotangents: Cotangents) -> Results:
        """Run `first`, free its tensors, and return the results of `inputs` in new tensors, at the same addresses if possible."""

    def move(self, x: Tensor, sections: Sequence[int], to: str, dy: Tensor | None = None, **choices: str) -> tuple[Tensor, Tensor]:
        """Return x moved "to heads" or "to tokens" by the path's own exchange, and dy moved back by its backward."""

    def accumulated(self, inputs: Inputs, several: Sequence[Results]) -> Results:
        """Return the gradients of micro-batches of the same inputs, one for each of `several` cotangents, as autograd adds them.

        Each micro-batch has a forward and a backward of its own, and adds its gradients to what the tensors' own `grad` holds.
        """

    def clipped(self, whole: Results, limit: float) -> Results | None:
        """Return this rank's part of the whole gradients, clipped to the norm `limit`; None if the rank skips the step."""

    def of_first(self, x: Tensor) -> Tensor:
        """Return what the first TP rank has in place of x."""

    def part(self, name: str) -> tuple[int, Tensor] | None:
        """Return the axis and the indices of the whole that this rank has of a result; None if it has all of it."""

    def bounds(self) -> dict[str, Bound]:
        """Return the truth of the whole case, with the error allowed to each row."""

    def exchanged(self, work: Callable[[], object]) -> dict[str, tuple[int, int]]:
        """Return for each kind of collective over cp how many calls `work` made, and the bytes that it sent in them."""

    def refusal(self, what: str) -> str:
        """Return the path's error message for an illegal layout, or an empty string if the path accepts it."""

    def from_every_rank(self, word: str) -> list[str]:
        """Return the word that each rank passed."""

    def shards(self, whole: Results, rank: Rank) -> Results:
        """Return the parameters that `rank` holds, as the path cuts them."""

    def loaded(self, shards: dict[str, sharding.Shard], rank: Rank) -> Results:
        """Return the parameters of `rank` after it loaded the shards."""

    def resharded(self, whole: Results, mesh: Mesh) -> dict[Rank, Results]:
        """Return what each rank of `mesh` loads from a checkpoint that the ranks save from their parts of the parameters."""


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


def _parallel(bench: PathBench, example: Example) -> Iterator[Pair]:
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


def _same(bench: PathBench, example: Example) -> Iterator[Pair]:
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
def _features(sections: tuple[int, ...], cp: int) -> parallel.Layout:
    return parallel.head_parallel(sections, cp)


def _exchange(bench: PathBench, example: Example) -> Iterator[Pair]:
    case, target = example.case, example.variant or ""
    source, sections = ("tokens", _sections(case)[0]) if target == "heads" else ("heads", _sections(case)[1])
    tags, back = (_rank_parts(bench, case, numbers, sections) for numbers in _tags(case, sum(sections)))
    got, gradient = bench.move(tags[source], sections, target, back[target])
    yield Pair("from", f"{source} to {target}", got, tags[target])
    yield Pair("gradient", f"from {target} to {source}", gradient, back[source])


def _round_trip(bench: PathBench, example: Example) -> Iterator[Pair]:
    case = example.case
    for sections in _sections(case):
        tags, back = (_rank_parts(bench, case, numbers, sections) for numbers in _tags(case, sum(sections)))
        by_heads, _ = bench.move(tags["tokens"], sections, "heads")
        got, gradient = bench.move(by_heads, sections, "tokens", back["tokens"])
        _, gradient = bench.move(tags["tokens"], sections, "heads", gradient)
        yield Pair(str(len(sections)), "sections there and back", got, tags["tokens"])
        yield Pair("gradient", f"of {len(sections)} sections there and back", gradient, back["tokens"])


def _fused(bench: PathBench, example: Example) -> Iterator[Pair]:
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


def _traffic(bench: PathBench, example: Example) -> Iterator[Pair]:
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


def _refused(bench: PathBench, example: Example) -> Iterator[Pair]:
    """The layout must be refused before any communication; otherwise a rank that goes on alone waits for ever."""
    message = bench.refusal(example.variant or "")
    from_every_rank = bench.from_every_rank(message)
    if not message:
        raise Breach(f"accepts an illegal layout ({example.variant})")
    if len(set(from_every_rank)) > 1:
        way = f"refuses an illegal layout ({example.variant}) with several messages"
        raise Breach(way, str(sorted(set(from_every_rank)))[: 298 - len(way)])
    yield Pair("ranks", "that refuse", torch.tensor([len(from_every_rank)]), torch.tensor([case_ranks(example.case)]))


def _reshard(bench: PathBench, example: Example) -> Iterator[Pair]:
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


def _repeats(bench: PathBench, example: Example) -> Iterator[Pair]:
    inputs, cotangents = _call(example.case)
    once, twice = (bench.run(inputs, cotangents) for _ in range(2))
    for name, got in twice.items():
        yield Pair(name, "", got, once[name])


def _replicas(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Without sequence parallelism TP ranks hold the same output and the same gradient of hidden states.

    Nobody compares them later. If they differ in a bit, the ranks' weights and the tokens that they choose drift apart.
    """
    inputs, cotangents = _call(example.case)
    results = bench.run(inputs, cotangents)
    for name in ("y", gradient_name("hidden")):
        if name in results:
            yield Pair(name, "as on the first TP rank", results[name], bench.of_first(results[name]))


def _goes_back(case: ParallelCase) -> bool:
    """Whether a case has a backward; norms of q and k whose gradients overflow in fp16 have none."""
    return case.backward


def _accumulated(bench: PathBench, example: Example) -> Iterator[Pair]:
    """The second micro-batch has twice the cotangent of the first one, so that gradients are those of one, three times over.

    With `frozen`, some inputs of one call require no gradient: the tokens, everything else, or a part that the seed decides.
    """
    inputs, cotangents = _call(example.case)
    assert cotangents is not None
    bounds = bench.bounds()
    if example.variant == "frozen":
        tokens, others, *parts = separations(present(example.case.spec, inputs))
        for frozen in (tokens, others, *parts[example.case.seed % max(1, len(parts)) :][:1]):
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


def _clipped(bench: PathBench, example: Example) -> Iterator[Pair]:
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


def _skipped(bench: PathBench, example: Example) -> Iterator[Pair]:
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


def _earlier(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Judge a call that comes after other calls on the same ranks, as if it came first.

    - `others`: a call with other numbers and its sequences in another order before, then calls of other shapes and another dtype.
    - `refill`: the tensors of a call get the numbers of another call in place. Offsets do only with `refills=True`.
    - `freed`: the tensors of a call are freed, and those of the next call get their addresses if the allocator plays along.
    - `gradients`: a call under `no_grad`, then the same tensors with gradients.
    - `in_flight`: LATER calls with other numbers and settings between forward and backward, of which the last but one is the call
      itself again. The backward of the last call comes first, and then those of the call.
    - `refused`: a layout that the domain promises to refuse, before.
    - `alone`: every rank runs the whole call by itself, before.
    """
    case: ParallelCase = example.case
    inputs, cotangents = _call(case)
    bounds, first = bench.bounds(), rotated(case)
    if example.variant == "in_flight":
        if bench.domain.steps:
            raise Blind("the domain has steps=True")
        later = later_cases(case, bench.domain, bench.device)
        _, one, again = bench.in_flight([case, *later[:-2], case, later[-1]], (LATER, 0, LATER - 1))
        yield from _judged(bench, one, bounds, "with other calls between forward and backward")
        yield from _judged(bench, again, bounds, LAST_BUT_ONE)
        return
    if example.variant == "refused":
        if not bench.domain.refuses:
            raise Blind("the domain has refuses=False")
        bench.refusal(_illegal_of(case)[case.seed % len(_illegal_of(case))])
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


_AFTER = {
    "others": "after a call with other numbers",
    "refill": "after the call's tensors were filled again",
    "freed": "in memory that an earlier call's tensors had",
    "gradients": "of a call with gradients, after one under no_grad",
    "refused": "after a layout that the path refuses",
    "alone": "after a call on one rank",
}


def _judged(bench: PathBench, results: Results, bounds: dict[str, Bound], what: str) -> Iterator[Pair]:
    for name, value in results.items():
        yield Pair(name, what, value, _part_bound(bench, bounds, name))


def _paths(
    strategy: st.SearchStrategy[ParallelCase], variants: Callable[[ParallelCase], Sequence[str | None]] | None = None
) -> Any:
    """Return a strategy for examples, each with one of the variants that its case has."""
    return _path(strategy if variants is None else strategy.filter(lambda case: bool(variants(case))), variants)


@st.composite
def _path(
    draw: st.DrawFn, strategy: st.SearchStrategy[ParallelCase], variants: Callable[[ParallelCase], Sequence[str | None]] | None
) -> Example:
    case = draw(strategy)
    chance = draw(st.randoms(use_true_random=True))
    return Example(case, None, chance.choice(list(variants(case))) if variants else None)


def _with_tp(domain: PathDomain) -> tuple[tuple[int, int], ...]:
    """Return the meshes (tp, cp) of a domain whose ranks share heads: in half of the draws three TP ranks or more, if there are.

    Of two numbers the order does not matter to their sum.
    """
    every = range(2, domain.ranks + 1)
    meshes = [(tp, cp) for tp in every for cp in range(1, domain.ranks // tp + 1 if domain.context_parallel else 2)]
    more = [mesh for mesh in meshes if mesh[0] > 2]
    return tuple(meshes + more)


def _sharing_heads(domain: PathDomain) -> str | None:
    return None if domain.tensor_parallel and domain.ranks > 1 else "no ranks share the heads"


def _of_gradients(domain: PathDomain) -> st.SearchStrategy[ParallelCase]:
    """Return cases whose ranks share heads. No layer runs, and gradients are in float32 whatever the dtype is."""
    return path_cases(domain, tokens=16, sp=False, mesh=_with_tp(domain), dtype=_plainest(domain), **_QUICK)


def _many(domain: PathDomain) -> PathDomain:
    """Return the domain with all the ranks that exchanges without a layer may have. Nothing is compiled for them."""
    return dataclasses.replace(domain, ranks=domain.exchange_ranks, drawing=dataclasses.replace(domain.drawing, forms=()))


def _plainest(domain: PathDomain) -> str | tuple[str, ...]:
    """Return float32, which is enough for laws about layouts, or the dtypes of a domain without it."""
    return "fp32" if "fp32" in domain.dtypes else domain.dtypes


def _needs(**wanted: bool) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        name = next((name for name, value in wanted.items() if getattr(domain, name) is not value), None)
        return name and f"{name} is {'not promised' if wanted[name] else 'declared'}"

    return needs


def _needs_layer(**wanted: bool) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        return "the operation is not gdn_layer" if domain.operation != "gdn_layer" else _needs(**wanted)(domain)

    return needs


def _has(name: str, *values: str) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        had = dict(domain.choices).get(name, ())
        return None if set(values) <= set(had) else f"{name} has no {' and '.join(sorted(set(values) - set(had)))}"

    return needs


def _alternatives(domain: PathDomain) -> tuple[str, ...]:
    """Return every value of every choice that has more than one value, as a variant."""
    return tuple(f"{name}={value}" for name, values in domain.choices if len(values) > 1 for value in values)


def _others(domain: PathDomain) -> Callable[[ParallelCase], Sequence[str]]:
    def others(case: ParallelCase) -> Sequence[str]:
        words = case.words()
        every = [choice for choice in _alternatives(domain) if words[choice.partition("=")[0]] != choice.partition("=")[2]]
        if domain.drawing.forms:  # with compiled kernels all choices are equally quick
            return [choice for choice in every if domain.outside(_with_choice(case, choice)) is None]
        quick = [choice for choice in every if choice not in domain.slow]
        return quick + [choice for choice in every if choice in domain.slow][: 1 if case.tokens <= 40 else 0]

    return others


def _with_choice(case: ParallelCase, choice: str) -> ParallelCase:
    name, _, value = choice.partition("=")
    changed: dict[str, Any] = {name: value}
    return dataclasses.replace(case, **changed)


def _changes(case: ParallelCase, variant: str | None) -> str | None:
    name, _, value = (variant or "").partition("=")
    return f"{name} other than {value}" if case.words().get(name) == value else None


def _divides(case: ParallelCase, variant: str | None) -> str | None:
    tp, cp = map(int, (variant or "1x1").split("x"))
    return None if case.heads % (tp * cp) == 0 else f"heads that {tp} * {cp} ranks can share"


def _illegal(case: ParallelCase, variant: str | None) -> str | None:
    if variant in ("length", "total", "order") and not case.packed:
        return "packed=yes"
    if variant == "length" and (case.cp == 1 or case.layout != "zigzag"):
        return "cp over 1 and layout=zigzag"
    if variant == "heads" and case_ranks(case) == 1:
        return "more than one rank"
    return None


def _illegal_of(case: ParallelCase) -> list[str]:
    """Return the illegal layouts that can be made of a case."""
    return [variant for variant in ILLEGAL if _illegal(case, variant) is None]


def _kinds(domain: PathDomain) -> list[str]:
    """Return the histories that can happen to calls of a domain."""
    can = {"refused": domain.refuses and domain.operation == "gdn_layer", "in_flight": domain.backward and not domain.steps}
    return [kind for kind in HISTORIES if can.get(kind, True)]


def _histories(domain: PathDomain) -> st.SearchStrategy[Example]:
    """Return examples of every history that can happen to calls of a domain. A cache may keep the lengths of packed sequences."""

    def possible(case: ParallelCase) -> list[str]:
        kinds = _kinds(domain)
        return [kind for kind in kinds if _lacks_history(case, kind) is None]

    drawn = [path_cases(domain, tokens=40, chunked=0.0)]
    if any(form.packed for form in domain.drawing.forms) if domain.drawing.forms else domain.packed:
        several = path_cases(domain, tokens=40, chunked=0.0, packed=True)
        drawn.append(several.filter(lambda case: len({*case.lengths}) > 1))
    return either([all_variants(cases, possible) for cases in drawn])


def _lacks_history(case: ParallelCase, variant: str | None) -> str | None:
    if variant in ("gradients", "in_flight") and not case.backward:
        return "backward=yes"
    if variant == "alone" and case_ranks(case) == 1:
        return "more than one rank"
    if variant == "refused" and (case.operation != "gdn_layer" or not _illegal_of(case)):
        return "op=gdn_layer with packed=yes or more than one rank"
    return None


# For laws that run no layer, or only count its collectives, one way to compute it is enough.
_QUICK: dict[str, Any] = {"conv": "torch", "qk_norm": "separate", "rule": "torch", "chunked": 0.0}
_IN_TORCH: dict[str, Any] = {"conv": "torch", "rule": "torch", "chunked": 0.0}  # what it shows does not depend on kernels
_EXCHANGES: dict[str, Any] = {**_QUICK, "exchanges": True}
LAYOUT_ONLY = {**_EXCHANGES, "hidden": 1, "conv_bias": False, "values": "ordinary", "key_dim": (1, 2, 3), "value_dim": (1, 2, 3)}
EVERY_CHOICE = tuple(f"{name}={value}" for name, values in CHOICES.items() for value in values)
PATH_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "parallel",
            "truth",
            "outputs and every gradient equal the float64 definition, on tp x cp ranks and on one rank",
            lambda domain: _paths(path_cases(domain, tokens=100)),
            _parallel,
            _needs(computes=True),
            always=lambda domain: [Example(case) for case in limits(domain)],
        ),
        Law(
            "same",
            "truth",
            "a choice of how to compute changes nothing but rounding",
            lambda domain: _paths(path_cases(domain, tokens=60), _others(domain)),
            _same,
            lambda domain: _needs_layer(computes=True)(domain) or (None if _alternatives(domain) else "the path has no choices"),
            variants=EVERY_CHOICE,
            lacks=_changes,
        ),
        Law(
            "exchange",
            "exact",
            "tagged numbers arrive where the layout puts them, from tokens to heads or back, and so do their gradients",
            lambda domain: _paths(path_cases(_many(domain), tokens=400, dtype=_plainest(domain), **LAYOUT_ONLY), lambda case: WAYS),
            _exchange,
            _needs_layer(exchanges=True),
            variants=WAYS,
            within=_many,
        ),
        Law(
            "round_trip",
            "exact",
            "the exchange from tokens to heads and back is the identity, forward and backward, bit for bit",
            lambda domain: _paths(path_cases(_many(domain), tokens=400, dtype=_plainest(domain), **LAYOUT_ONLY)),
            _round_trip,
            _needs_layer(exchanges=True),
            within=_many,
        ),
        Law(
            "fused",
            "exact",
            "the fused exchange equals a separate exchange for each sequence, forward and backward, bit for bit",
            lambda domain: _paths(
                path_cases(_many(domain), tokens=400, dtype=_plainest(domain), packed=True, **LAYOUT_ONLY).filter(
                    lambda case: case.tokens > 0
                )
            ),
            _fused,
            lambda domain: (
                _needs_layer(exchanges=True, packed=True)(domain) or _has("thd_all_to_all", "fused", "per_sequence")(domain)
            ),
            within=_many,
        ),
        Law(
            "traffic",
            "exact",
            "the number and bytes of all-to-alls are as designed: one each way if fused, else one for each section of a sequence",
            lambda domain: _paths(path_cases(domain, tokens=60, dtype=_plainest(domain), **_EXCHANGES)),
            _traffic,
            _needs_layer(counts=True),
        ),
        Law(
            "refused",
            "exact",
            "an illegal layout is refused on every rank with the same message, before any communication",
            lambda domain: _paths(
                path_cases(domain, tokens=60, dtype=_plainest(domain), **_QUICK),
                _illegal_of,
            ),
            _refused,
            lambda domain: (
                _needs_layer(refuses=True)(domain)
                or (None if domain.packed or domain.ranks > 1 else "one rank can split no batch in an illegal way")
            ),
            variants=ILLEGAL,
            lacks=_illegal,
        ),
        Law(
            "reshard",
            "exact",
            "a checkpoint is cut section by section, and loads on any other mesh, bit for bit",
            lambda domain: _paths(
                path_cases(domain, tokens=16, dtype=_plainest(domain), **_QUICK),
                lambda case: [mesh for mesh in MESHES if _divides(case, mesh) is None],
            ),
            _reshard,
            lambda domain: _needs_layer(**({} if domain.saves else {"checkpoints": True}))(domain),
            variants=MESHES,
            lacks=_divides,
        ),
        Law(
            "repeats",
            "exact",
            "a second run gives the same bits in cases with deterministic=yes",
            lambda domain: _paths(path_cases(domain, tokens=60, deterministic=True)),
            _repeats,
            _needs(deterministic=True),
            lacks=lambda case, _: None if case.deterministic else "deterministic=yes",
        ),
        Law(
            "replicas",
            "exact",
            "TP ranks that hold the same output, or the same gradient of hidden states, hold the same bits",
            lambda domain: _paths(path_cases(domain, tokens=40, sp=False, mesh=_with_tp(domain), **_IN_TORCH)),
            _replicas,
            lambda domain: _needs_layer(computes=True, replicas=True)(domain) or _sharing_heads(domain),
            lacks=lambda case, _: None if case.tp > 1 and not case.sp else "tp over 1 and sp=no",
        ),
        Law(
            "accumulated",
            "truth",
            "gradients of several micro-batches add up in place, and are right where some inputs require none",
            lambda domain: _paths(
                path_cases(domain, tokens=40, values="ordinary", **_IN_TORCH).filter(_goes_back), lambda case: ("frozen", None)
            ),
            _accumulated,
            _needs(computes=True, backward=True, steps=False),
            variants=("frozen",),
            plain=True,
            lacks=lambda case, _: None if case.backward else "backward=yes",
            turns=lambda domain: ("frozen",),
        ),
        Law(
            "clipped",
            "truth",
            "gradients are clipped to their norm over all ranks, and are left alone if it is below the limit",
            lambda domain: _paths(_of_gradients(domain)),
            _clipped,
            lambda domain: _needs_layer(clips=True)(domain) or _sharing_heads(domain),
            lacks=lambda case, _: None if case.tp > 1 else "tp over 1",
        ),
        Law(
            "skipped",
            "exact",
            "every rank skips a step in which a gradient on any rank is not finite, and no other step",
            lambda domain: _paths(_of_gradients(domain), lambda case: NUMBERS),
            _skipped,
            lambda domain: _needs_layer(skips=True)(domain) or _sharing_heads(domain),
            variants=NUMBERS,
            lacks=lambda case, _: None if case.tp > 1 else "tp over 1",
        ),
        Law(
            "earlier",  # not `history`: a line with op=gdn_layer and that law is one of layers
            "truth",
            "a call gives what it gives in a fresh process, whatever calls its ranks ran before it, and in any memory",
            _histories,
            _earlier,
            _needs(computes=True),
            variants=HISTORIES,
            lacks=_lacks_history,
            of_process=True,
            turns=_kinds,
        ),
    )
}
