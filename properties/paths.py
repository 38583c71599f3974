"""What parallel paths promise, the cases drawn inside that, and the laws of what ranks do together.

Every rank asks the law of the same example and is judged on what it holds itself. A law must take the same way through its
collectives on every rank: whatever it decides, it decides by the example.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles import parallel, sharding
from oracles.bound import Bound
from oracles.counter import mix_words
from oracles.operation import Inputs
from oracles.parallel_case import CHOICES, ParallelCase
from oracles.sharding import AT_REST, Mesh, Rank
from properties.laws import Breach, Cotangents, Law, Pair, Results
from properties.strategies import Example

COMPILED = 1 / 3  # how many of a layer's cases, on a GPU, have a choice whose kernels are compiled
FORMS = {"gdn_layer": 4}  # forms that such cases are drawn from: few where every case's kernels are compiled
FEW_FORMS = 2
MODEL_WIDTHS = (64, 128, 96)  # of keys and values, as models have them, and one that is no power of two
SHORT = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 64, 65, 66)
MESHES = ("1x1", "2x1", "1x2", "2x2", "4x1", "1x4")
WAYS = ("heads", "tokens")
ILLEGAL = ("length", "total", "order", "heads")


class Form(NamedTuple):
    """What the kernels of a path are compiled for, `ranks` being tp * cp: on a GPU a new form costs seconds of compilation."""

    ranks: int
    packed: bool
    heads_a_rank: int
    group: int
    key_dim: int
    value_dim: int
    conv_width: int
    conv_bias: bool
    dtype: str
    offsets: str


@dataclasses.dataclass(frozen=True)
class PathDomain:
    """The calls that a parallel path promises to answer rightly; the defaults promise everything that a layer can be asked.

    `ranks` are those at hand, tp * cp being at most as many, and `exchange_ranks` those for exchanges without a layer: simulated,
    more of these are affordable. `processes`: it needs ranks that are processes. `choices` are the values that the path has of each
    choice, by name; those in `slow` are drawn seldom and small. `exchanges`: its CP -> HP and HP -> CP can be called alone;
    `computes`: so can the rest. `counts`: its collectives are counted; `refuses`: it promises to refuse illegal layouts;
    `checkpoints`: it says what its shards are of. `least_piece` are the fewest tokens in each piece that a CP rank holds.

    `tf32` are values of choices, as name=value, whose kernels multiply float32 matrices in TF32 on a GPU. `forms` is set by a check
    on a GPU (see `with_forms`): cases whose kernels are compiled have one of these, with widths out of `compiled_widths`, or of
    `widths` where that is empty.
    """

    operation: str = "gdn_layer"
    ranks: int = 8
    exchange_ranks: int = 64
    processes: bool = False
    tensor_parallel: bool = True
    sequence_parallel: bool = True
    layouts: tuple[str, ...] = ("zigzag",)
    packed: bool = True
    batched: bool = True
    padded: bool = True
    empty: bool = True
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    offsets: tuple[str, ...] = ("int64", "int32")
    grouped_heads: bool = True
    widths: tuple[int, ...] = (8, 16, 4, 12)
    equal_widths: bool = False
    conv_widths: tuple[int, ...] = (4, 2, 3)
    conv_bias: bool = True
    negative_eigenvalues: bool = True
    choices: tuple[tuple[str, tuple[str, ...]], ...] = tuple(CHOICES.items())
    slow: tuple[str, ...] = ()
    longest: int = 66
    exchanges: bool = True
    counts: bool = True
    refuses: bool = True
    checkpoints: bool = True
    deterministic: bool = True
    backward: bool = True
    computes: bool = True
    least_piece: int = 0
    tf32: tuple[str, ...] = ()
    compiled_widths: tuple[int, ...] = ()
    forms: tuple[Form, ...] = ()

    def outside(self, case: ParallelCase) -> str | None:
        """Why `case` is outside the domain, or None."""
        checks = (
            (case.operation == self.operation, f"op={case.operation} is not {self.operation}"),
            (
                case_ranks(case) <= max(self.ranks, self.exchange_ranks),
                f"tp={case.tp} cp={case.cp} needs {case_ranks(case)} ranks, there are {max(self.ranks, self.exchange_ranks)}",
            ),
            (self.tensor_parallel or case.tp == 1, f"tp={case.tp}: tensor parallelism is not supported"),
            (self.sequence_parallel or not case.sp, "sp=yes is not supported"),
            (case.layout in self.layouts, f"layout={case.layout} is not among {', '.join(self.layouts)}"),
            (self.packed or not case.packed, "packed=yes is not supported"),
            (self.batched or case.packed, "packed=no is not supported"),
            (self.padded or case.padding == "none", f"padding={case.padding} is not supported"),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (case.dtype in self.dtypes, f"dtype={case.dtype} is not among {', '.join(self.dtypes)}"),
            (case.offsets in self.offsets, f"offsets={case.offsets} is not among {', '.join(self.offsets)}"),
            (self.grouped_heads or case.heads == case.value_heads, "heads and value_heads must be equal"),
            (not self.equal_widths or case.key_dim == case.value_dim, "key_dim and value_dim must be equal"),
            (
                case.conv_width in self.conv_widths,
                f"conv_width={case.conv_width} is not among {', '.join(map(str, self.conv_widths))}",
            ),
            (self.conv_bias or not case.conv_bias, "conv_bias=yes is not supported"),
            (self.negative_eigenvalues or not case.allow_neg_eigval, "allow_neg_eigval=yes is not supported"),
            (self.backward or not case.backward, "backward=yes is not supported"),
            (self.deterministic or not case.deterministic, "deterministic=yes is not supported"),
            (
                not self.forms or not _compiles(case) or form_of(case) in self.forms,
                "its kernels are compiled for another form than those that this check draws",
            ),
            (_piece(case) >= self.least_piece, f"pieces of {_piece(case)} tokens, under {self.least_piece}, are not supported"),
            *((getattr(case, name) in values, f"{name}={getattr(case, name)} is not supported") for name, values in self.choices),
        )
        return next((reason for inside, reason in checks if not inside), None)

    def to_json(self) -> dict[str, Any]:
        """The domain as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PathDomain":
        """The domain of `to_json`'s data."""

        def frozen(value: Any) -> Any:
            return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value

        return cls(**{name: frozen(value) for name, value in data.items()})


def form_of(case: ParallelCase) -> Form:
    """What the kernels of a case are compiled for."""
    share = case_ranks(case) if case.operation == "gdn_layer" else 1
    heads, group = case.heads // share, case.value_heads // case.heads
    widths = (case.key_dim, case.value_dim, case.conv_width, case.conv_bias)
    return Form(case_ranks(case), case.packed, heads, group, *widths, case.dtype, case.offsets)


def with_forms(domain: PathDomain, seed: int) -> PathDomain:
    """The domain with a few forms drawn from a seed, of one dtype after the other, for cases whose kernels are compiled."""
    chance = random.Random(mix_words(seed, "forms"))  # noqa: S311 - seeded, and not for secrets
    widths, forms = domain.compiled_widths or domain.widths, []
    for number in range(FORMS.get(domain.operation, FEW_FORMS)):
        packed = chance.choice([choice for choice, can in ((True, domain.packed), (False, domain.batched)) if can])
        forms.append(
            Form(
                chance.randint(min(2, domain.ranks), domain.ranks),
                packed,
                chance.choice((1, 2)),
                chance.choice((1, 2)) if domain.grouped_heads else 1,
                key_dim := chance.choice(widths),
                key_dim if domain.equal_widths else chance.choice(widths),
                chance.choice(domain.conv_widths),
                domain.conv_bias and chance.choice((False, True)),
                domain.dtypes[(seed + number) % len(domain.dtypes)],
                chance.choice(domain.offsets) if packed else "int64",
            )
        )
    return dataclasses.replace(domain, forms=tuple(forms))


def _compiles(case: ParallelCase) -> bool:
    """Whether kernels of a case are compiled: of a layer those of flash-linear-attention alone."""
    return case.operation != "gdn_layer" or "fla" in (case.conv, case.rule)


def _piece(case: ParallelCase) -> int:
    """The tokens of each piece of the whole that a CP rank holds; of zigzag, whose pieces differ, of all of its pieces together."""
    return len(case.tokens_of_ranks()[0]) // (2 if case.layout == "zigzag_batch" else 1)


class PathBench(Protocol):
    """Runs a path on one rank, together with the others, and knows the truth and its bounds. Tensors are this rank's own."""

    domain: PathDomain
    rank: Rank

    def run(self, inputs: Inputs, cotangents: Cotangents, *, alone: bool = False, **choices: Any) -> Results:
        """This rank's part of the outputs and, with cotangents (whole), of every gradient, added over the ranks that share it.

        `alone`: on one rank that has everything. `choices` take the place of the case's.
        """

    def move(self, x: Tensor, sections: Sequence[int], to: str, dy: Tensor | None = None, **choices: str) -> tuple[Tensor, Tensor]:
        """x moved "to heads" or "to tokens" by the path's own exchange, and dy moved back by its backward."""

    def part(self, name: str) -> tuple[int, Tensor] | None:
        """The axis and the indices of the whole that this rank's part of a result is; None for all of it."""

    def bounds(self) -> dict[str, Bound]:
        """The truth of the whole case, with the error allowed to each row."""

    def exchanged(self, work: Callable[[], object]) -> dict[str, tuple[int, int]]:
        """How many all-to-alls `work` made over cp, and the bytes it sent in them."""

    def refusal(self, what: str) -> str:
        """What the path says to an illegal layout; empty where it takes it."""

    def everyone(self, word: str) -> list[str]:
        """What each rank says."""

    def shards(self, whole: Results, rank: Rank) -> Results:
        """The parameters that `rank` holds, as the path cuts them."""

    def loaded(self, shards: dict[str, sharding.Shard], rank: Rank) -> Results:
        """The parameters of `rank`, after it loaded shards."""


# Cases


@st.composite
def path_cases(draw: st.DrawFn, /, domain: PathDomain, tokens: int = 200, **fixed: Any) -> ParallelCase:
    """Any case of the domain; `fixed` names fields that are given, as a value or a tuple of values to choose from."""
    chance = draw(st.randoms(use_true_random=True))
    for attempt in range(1000):
        try:
            case = _drawn(chance, domain, tokens if attempt < 500 else 10 * tokens, fixed)
        except ValueError:
            continue  # a layout that does not divide: draw another
        if domain.outside(case) is None:
            return case
    raise ValueError(f"no legal case was drawn in 1000 attempts for {domain} with {fixed}")


def _drawn(chance: random.Random, domain: PathDomain, tokens: int, fixed: dict[str, Any]) -> ParallelCase:
    def field(name: str, choices: Sequence[Any]) -> Any:
        given = fixed.get(name, tuple(choices))
        return chance.choice(given) if isinstance(given, tuple) else given

    layer = domain.operation == "gdn_layer"
    meshes = [
        (tp, cp)
        for tp, cp in itertools.product(range(1, domain.ranks + 1), repeat=2)
        if tp * cp <= domain.ranks and (tp == 1 or (layer and domain.tensor_parallel))
    ]
    if domain.forms:
        fixed = _of_a_form(chance, domain, meshes, fixed)
    large = [mesh for mesh in meshes if mesh[0] * mesh[1] > domain.ranks // 2]
    tp, cp = field("mesh", large if chance.random() < 1 / 2 else meshes)
    layout = field("layout", domain.layouts)
    packed = field(
        "packed", [choice for choice, can in ((True, domain.packed), (True, domain.packed), (False, domain.batched)) if can]
    )
    padding = field("padding", ("none", "least", "more")) if packed and domain.padded and layer else "none"
    sp = tp > 1 and domain.sequence_parallel and field("sp", (False, True))
    unit = (2 * cp if layout.startswith("zigzag") else cp) * (tp if sp else 1)
    lengths = _lengths(chance, domain, layout, unit, tokens, packed=packed, padded=padding != "none")
    share = tp * cp if layer else 1
    heads = share * field("heads_a_rank", (1, 1, 2) if share < 16 else (1,))
    value_heads = heads * (field("group", (1, 2, 2, 3)) if domain.grouped_heads else 1)
    key_dim = field("key_dim", domain.widths)
    values = {}
    for name, choices in domain.choices:
        given = fixed.get(name)
        several = given if isinstance(given, tuple) else _weighted(chance, name, choices, domain)
        values[name] = given if given in choices else chance.choice(several)
    return ParallelCase(
        lengths,
        domain.operation,
        tp=tp,
        cp=cp,
        sp=sp,
        layout=layout,
        packed=packed,
        padding=padding,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=key_dim if domain.equal_widths else field("value_dim", domain.widths),
        hidden=field("hidden", (8, 12, 32)),
        conv_width=field("conv_width", domain.conv_widths),
        dtype=field("dtype", ("fp32", *domain.dtypes) if "fp32" in domain.dtypes else domain.dtypes),
        gate=field("gate", ("long", "ordinary", "mixed")),
        values=field("values", ("ordinary", "scaled")),
        conv_bias=domain.conv_bias and field("conv_bias", (False, True)),
        allow_neg_eigval=layer and domain.negative_eigenvalues and field("allow_neg_eigval", (False, True)),
        offsets=field("offsets", domain.offsets) if packed else "int64",
        backward=domain.backward and field("backward", (True,)),
        deterministic=domain.deterministic and field("deterministic", (False, True)),
        seed=chance.randrange(2**16),
        **values,
    )


def _of_a_form(chance: random.Random, domain: PathDomain, meshes: list[tuple[int, int]], fixed: dict[str, Any]) -> dict[str, Any]:
    """What is fixed of a case on a GPU: a form where kernels are compiled, else choices for which none are."""
    values: dict[str, tuple[str, ...]] = {}
    if domain.operation == "gdn_layer":
        for name, choices in domain.choices:
            given = fixed.get(name, choices)
            values[name] = given if isinstance(given, tuple) else (given,)
        plain = {name: tuple(value for value in several if value != "fla") for name, several in values.items()}
        compiled = plain != values and (not all(plain.values()) or chance.random() < COMPILED)
        values = values if compiled else plain
        if not compiled:
            return {**fixed, **values}
    form = chance.choice(domain.forms)
    shared = tuple(mesh for mesh in meshes if mesh[0] * mesh[1] == form.ranks)
    return {**form._asdict(), "mesh": shared, **fixed, **values}


def _weighted(chance: random.Random, name: str, choices: Sequence[str], domain: PathDomain) -> tuple[str, ...]:
    """The quick values of a choice; one time in eight the slow ones too."""
    quick = tuple(value for value in choices if f"{name}={value}" not in domain.slow)
    return tuple(choices) if not quick or chance.random() < 1 / 8 else quick


def _lengths(
    chance: random.Random, domain: PathDomain, layout: str, unit: int, tokens: int, *, packed: bool, padded: bool
) -> tuple[int, ...]:
    """Sequences that the layout cuts: of multiples of `unit` tokens each, or as a whole, or of any length where they are padded."""
    tokens = max(tokens, 2 * unit)
    if not packed:
        rows = chance.choice((1, 1, 2, 3))
        return (unit * chance.randint(1, max(1, min(domain.longest, tokens // rows) // unit)),) * rows
    count = chance.choice((1, 2, 3, 4, 4, chance.randint(5, 12)))
    if padded:
        drawn = [chance.choice(SHORT) for _ in range(count)]
    elif layout == "zigzag":
        drawn = [unit * chance.choice((1, 1, 2, 3, 5, 8)) for _ in range(count)]
    else:
        total = unit * chance.randint(1, max(1, tokens // unit))
        cuts = sorted(chance.randint(0, total) for _ in range(count - 1))
        drawn = [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
        if not domain.empty:
            drawn = [length for length in drawn if length]
        return tuple(drawn)
    if domain.empty:
        drawn = [0 if chance.random() < 1 / 6 else length for length in drawn]
    while len(drawn) > 1 and sum(drawn) > tokens:
        drawn.pop()
    return tuple(drawn)


# Laws


def _given(case: ParallelCase) -> tuple[Inputs, Cotangents]:
    return case.inputs(), case.cotangents() if case.backward else None


def _held(bench: PathBench, bounds: dict[str, Bound], name: str) -> Bound:
    """The bound of this rank's part. A row that is cut may err as much as the whole row."""
    bound, part = bounds[name], bench.part(name)
    if part is None:
        return bound
    axis, rows = part
    finer = bound.finer
    return dataclasses.replace(
        bound,
        value=bound.value.index_select(axis, rows),
        allowed=bound.allowed.index_select(axis, rows) if axis < bound.allowed.ndim else bound.allowed,
        finer=None if finer is None else lambda over=None: _held(bench, {name: finer()}, name),
    )


def _parallel(bench: PathBench, example: Example) -> Iterator[Pair]:
    """With one rank besides, which has everything: what differs is then shown to come from sharing, or not."""
    inputs, cotangents = _given(example.case)
    bounds = bench.bounds()
    for name, got in bench.run(inputs, cotangents).items():
        yield name, got, _held(bench, bounds, name)
    if bench.rank.mesh != Mesh(1, 1) and bench.rank == Rank(bench.rank.mesh):
        for name, got in bench.run(inputs, cotangents, alone=True).items():
            yield f"{name} with tp=1 cp=1", got, bounds[name]


def _same(bench: PathBench, example: Example) -> Iterator[Pair]:
    inputs, cotangents = _given(example.case)
    bounds = bench.bounds()
    name, _, value = (example.variant or "").partition("=")
    changed: dict[str, Any] = {name: value}
    for what, got in bench.run(inputs, cotangents, **changed).items():
        yield f"{what} with {example.variant}", got, _held(bench, bounds, what)
    for what, got in bench.run(inputs, cotangents).items():
        yield what, got, _held(bench, bounds, what)


def _sections(case: ParallelCase) -> tuple[list[int], list[int]]:
    """The features of a TP rank, section by section, into the kernel and out of it."""
    widths = case.layer.sections
    return [width // case.tp for width in widths.values()], [widths["v"] // case.tp]


@functools.lru_cache(4)  # the same on every rank, and ranks may be many and in one process
def _tags(case: ParallelCase, features: int) -> tuple[Tensor, Tensor]:
    """Distinct numbers [T, B, features], and their negatives in reverse, to send the other way."""
    tags = case.tagged((case.batch[1], case.batch[0], features))
    return tags, -tags.flatten().flip(0).reshape(tags.shape) - 1


def _ways(bench: PathBench, case: ParallelCase, tags: Tensor, sections: list[int]) -> dict[str, Tensor]:
    """What this rank holds of a whole [T, B, features] by tokens and by heads."""
    tokens, features = case.tokens_of_ranks()[bench.rank.cp], _features(tuple(sections), case.cp)[bench.rank.cp]
    return {"tokens": tags.index_select(0, tokens), "heads": tags.index_select(-1, features)}


@functools.lru_cache(16)
def _features(sections: tuple[int, ...], cp: int) -> parallel.Layout:
    return parallel.head_parallel(sections, cp)


def _exchange(bench: PathBench, example: Example) -> Iterator[Pair]:
    case, there = example.case, example.variant or ""
    here, sections = ("tokens", _sections(case)[0]) if there == "heads" else ("heads", _sections(case)[1])
    tags, back = (_ways(bench, case, each, sections) for each in _tags(case, sum(sections)))
    got, gradient = bench.move(tags[here], sections, there, back[there])
    yield f"from {here} to {there}", got, tags[there]
    yield f"gradient from {there} to {here}", gradient, back[here]


def _round_trip(bench: PathBench, example: Example) -> Iterator[Pair]:
    case = example.case
    for sections in _sections(case):
        tags, back = (_ways(bench, case, each, sections) for each in _tags(case, sum(sections)))
        there, _ = bench.move(tags["tokens"], sections, "heads", back["heads"])
        got, gradient = bench.move(there, sections, "tokens", back["tokens"])
        _, gradient = bench.move(tags["tokens"], sections, "heads", gradient)
        yield f"{len(sections)} sections there and back", got, tags["tokens"]
        yield f"gradient of {len(sections)} sections there and back", gradient, back["tokens"]


def _fused(bench: PathBench, example: Example) -> Iterator[Pair]:
    case = example.case
    for direction, sections in zip(("heads", "tokens"), _sections(case), strict=True):
        here, there = ("tokens", "heads") if direction == "heads" else ("heads", "tokens")
        tags, back = (_ways(bench, case, each, sections) for each in _tags(case, sum(sections)))
        ways = {
            form: bench.move(tags[here], sections, direction, back[there], thd_all_to_all=form)
            for form in ("per_sequence", "fused")
        }
        for name, once, twice in zip(("", "gradient of "), ways["per_sequence"], ways["fused"], strict=True):
            yield f"{name}fused to {there}", twice, once


def _traffic(bench: PathBench, example: Example) -> Iterator[Pair]:
    case = example.case
    per_sequence = case.packed and case.thd_all_to_all == "per_sequence"
    sequences = sum(length > 0 for length in case.padded) if per_sequence else 1
    into, out = _sections(case)
    calls = sequences * (len(into) if per_sequence else 1) + sequences
    elements = case.tokens // case.cp * (sum(into) + sum(out)) * (case.cp - 1) // case.cp
    itemsize = 4 if case.dtype == "fp32" else 2
    inputs, cotangents = _given(case)
    ways = 2 if cotangents is not None else 1  # backward mirrors forward
    counted = bench.exchanged(lambda: bench.run(inputs, cotangents))
    want = (ways * calls, ways * elements * itemsize) if case.cp > 1 else (0, 0)
    for name, index in (("all-to-alls", 0), ("bytes sent in them", 1)):
        yield name, torch.tensor([counted["all_to_all"][index]]), torch.tensor([want[index]])


def _refused(bench: PathBench, example: Example) -> Iterator[Pair]:
    """Refused before any communication: a rank that goes on alone would wait for ever."""
    said = bench.refusal(example.variant or "")
    everyone = bench.everyone(said)
    if not said:
        raise Breach(f"takes an illegal layout ({example.variant})")
    if len(set(everyone)) > 1:
        raise Breach(f"refuses an illegal layout ({example.variant}) in other words on other ranks: {sorted(set(everyone))}"[:300])
    yield "ranks that refuse", torch.tensor([len(everyone)]), torch.tensor([case_ranks(example.case)])


def case_ranks(case: ParallelCase) -> int:
    """How many ranks share a case."""
    return case.tp * case.cp


def _reshard(bench: PathBench, example: Example) -> Iterator[Pair]:
    case = example.case
    tp, cp = map(int, (example.variant or "").split("x"))
    layer, mesh = case.layer, Mesh(tp, cp)
    whole = {
        name: case.tagged(about.shape)
        for name, about in sharding.parameters(layer).items()
        if case.conv_bias or name != "conv.bias"
    }
    held = {rank: bench.shards(whole, rank) for rank in bench.rank.mesh.ranks()}
    for name, x in whole.items():
        wanted = {rank: sharding.shard(layer, name, x, rank, AT_REST) for rank in held}
        for rank, each in wanted.items():
            yield f"{name} of tp rank {rank.tp}, cp rank {rank.cp}", held[rank][name].to(x.dtype), each.value
    ranks = list(mesh.ranks())
    moved = {
        name: sharding.reshard(layer, [sharding.shard(layer, name, x, rank, AT_REST) for rank in held], mesh)
        for name, x in whole.items()
    }
    for index, rank in enumerate(ranks):
        for name, x in bench.loaded({name: shards[index] for name, shards in moved.items()}, rank).items():
            want = sharding.shard(layer, name, whole[name], rank, AT_REST).value
            yield f"{name} loaded by tp rank {rank.tp}, cp rank {rank.cp} of {example.variant}", x.to(want.dtype), want


def _repeats(bench: PathBench, example: Example) -> Iterator[Pair]:
    inputs, cotangents = _given(example.case)
    once, twice = (bench.run(inputs, cotangents) for _ in range(2))
    for name, got in twice.items():
        yield name, got, once[name]


# The book


def _paths(strategy: st.SearchStrategy[ParallelCase], variants: Callable[[ParallelCase], Sequence[str]] | None = None) -> Any:
    """Examples of a strategy, each with one of the variants that its case has."""

    @st.composite
    def draw(draw: st.DrawFn) -> Example:
        case = draw(strategy if variants is None else strategy.filter(lambda case: bool(variants(case))))
        chance = draw(st.randoms(use_true_random=True))
        return Example(case, None, chance.choice(list(variants(case))) if variants else None)

    return draw()


def _many(domain: PathDomain) -> PathDomain:
    """The domain with all the ranks that exchanges without a layer may have."""
    return dataclasses.replace(domain, ranks=domain.exchange_ranks)


def _needs(**wanted: bool) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        return next((f"{name} is not promised" for name, value in wanted.items() if getattr(domain, name) is not value), None)

    return needs


def _needs_layer(**wanted: bool) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        return "it is no layer" if domain.operation != "gdn_layer" else _needs(**wanted)(domain)

    return needs


def _has(name: str, *values: str) -> Callable[[PathDomain], str | None]:
    def needs(domain: PathDomain) -> str | None:
        had = dict(domain.choices).get(name, ())
        return None if set(values) <= set(had) else f"{name} has no {' and '.join(sorted(set(values) - set(had)))}"

    return needs


def _alternatives(domain: PathDomain) -> tuple[str, ...]:
    """Every value of every choice that has another, as a variant."""
    return tuple(f"{name}={value}" for name, values in domain.choices if len(values) > 1 for value in values)


def _others(domain: PathDomain) -> Callable[[ParallelCase], Sequence[str]]:
    def others(case: ParallelCase) -> Sequence[str]:
        words = case.words()
        every = [each for each in _alternatives(domain) if words[each.partition("=")[0]] != each.partition("=")[2]]
        if domain.forms:  # whose kernels are compiled is as quick as others
            return [each for each in every if domain.outside(_with_choice(case, each)) is None]
        quick = [each for each in every if each not in domain.slow]
        return quick + [each for each in every if each in domain.slow][: 1 if case.tokens <= 40 else 0]

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
    if variant == "length" and case.cp == 1:
        return "cp over 1"
    if variant == "heads" and case_ranks(case) == 1:
        return "more than one rank"
    return None


# Where no layer is run, or only counted, one way to compute it serves.
_QUICK = {"conv": "torch", "qk_norm": "separate", "rule": "torch"}
LAYOUT_ONLY = {**_QUICK, "hidden": 1, "conv_bias": False, "values": "ordinary", "key_dim": (1, 2, 3), "value_dim": (1, 2, 3)}
EVERY_CHOICE = tuple(f"{name}={value}" for name, values in CHOICES.items() for value in values)

PATH_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "parallel",
            "truth",
            "shared by tp x cp ranks, with sequence parallelism or without: outputs and every gradient as on one, and true",
            lambda domain: _paths(path_cases(domain, tokens=100)),
            _parallel,
            _needs(computes=True),
        ),
        Law(
            "same",
            "truth",
            "a choice of how to compute changes nothing but rounding: before equals after",
            lambda domain: _paths(path_cases(domain, tokens=60), _others(domain)),
            _same,
            lambda domain: _needs_layer(computes=True)(domain) or (None if _alternatives(domain) else "it has no choices"),
            variants=EVERY_CHOICE,
            lacks=_changes,
        ),
        Law(
            "exchange",
            "exact",
            "tagged numbers land where the layout says, from tokens to heads or back, and so do their gradients",
            lambda domain: _paths(path_cases(_many(domain), tokens=400, dtype="fp32", **LAYOUT_ONLY), lambda case: WAYS),
            _exchange,
            _needs_layer(exchanges=True),
            variants=WAYS,
        ),
        Law(
            "round_trip",
            "exact",
            "from tokens to heads and back is the identity, forward and backward, bit for bit",
            lambda domain: _paths(path_cases(_many(domain), tokens=400, dtype="fp32", **LAYOUT_ONLY)),
            _round_trip,
            _needs_layer(exchanges=True),
        ),
        Law(
            "fused",
            "exact",
            "the fused exchange equals that of each sequence, forward and backward, bit for bit",
            lambda domain: _paths(path_cases(_many(domain), tokens=400, dtype="fp32", packed=True, **LAYOUT_ONLY)),
            _fused,
            lambda domain: _needs_layer(exchanges=True)(domain) or _has("thd_all_to_all", "fused", "per_sequence")(domain),
        ),
        Law(
            "traffic",
            "exact",
            "as many all-to-alls as designed: fused one each way, else one a section of a sequence; and as many bytes",
            lambda domain: _paths(path_cases(domain, tokens=60, dtype="fp32", **_QUICK)),
            _traffic,
            _needs_layer(counts=True),
        ),
        Law(
            "refused",
            "exact",
            "an illegal layout is refused on every rank with the same message, before any communication",
            lambda domain: _paths(
                path_cases(domain, tokens=60, dtype="fp32", **_QUICK),
                lambda case: [each for each in ILLEGAL if _illegal(case, each) is None],
            ),
            _refused,
            _needs_layer(refuses=True),
            variants=ILLEGAL,
            lacks=_illegal,
        ),
        Law(
            "reshard",
            "exact",
            "a checkpoint is cut as the layer's sections say, and loads on any other mesh, bit for bit",
            lambda domain: _paths(
                path_cases(domain, tokens=16, dtype="fp32", **_QUICK),
                lambda case: [mesh for mesh in MESHES if _divides(case, mesh) is None],
            ),
            _reshard,
            _needs_layer(checkpoints=True),
            variants=MESHES,
            lacks=_divides,
        ),
        Law(
            "repeats",
            "exact",
            "a second run has the same bits, where deterministic=yes asks for it",
            lambda domain: _paths(path_cases(domain, tokens=60, deterministic=True)),
            _repeats,
            _needs(deterministic=True),
            lacks=lambda case, _: None if case.deterministic else "deterministic=yes",
        ),
    )
}
