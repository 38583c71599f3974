"""The truth of a call in float64, and the tolerance of each row, computed from disturbed runs.

Disturbed runs (oracles/arithmetic/rounding.py) are rounded evaluations around the truth. There are RUNS of them. If a chunkwise
implementation does not declare its chunk length, there are RUNS / 2 for each length in CHUNKS, and the largest tolerance counts:
chunk boundaries decide where the state rounds and where the cumulative gate restarts. A row is the vector of one token and head,
one row of a state, or one element of the gradients of g and beta. Its error scale sigma is

    sigma^2     = 1/2 mean_square + 1/2 mean of mean_square over the WINDOW rows around it
    mean_square = mean over runs of |disturbed - truth|^2

The neighbours belong to the same sequence and head (for a state, to the same matrix). They are pooled because RUNS runs estimate
the spread of a single row poorly. A row is broken when its error exceeds

    allowed = KAPPA sigma

`allowed` is never less than FLOOR_ULP units in the last place of the row, nor than the subnormal step of the values that are stored
on the way to the row.

A few runs may all have small errors by chance, and where equal values have equal errors, pooling rows does not help. If an error
exceeds `allowed` by less than the factor CLEAR, the judge therefore takes the tolerance from more runs (first 16, then 64: MORE)
before it calls the row broken. After 16 runs the factor is CLEAR_OF_MORE, because tolerances grow less from 16 to 64 runs
(docs/explanation/rounding.md has the measurement). Where operands are coarser than float32, these come with one more run for each
COARSE runs, which rounds to one bit less. Errors that grow in proportion double there, and half of the double is sigma again.
Errors that amplify each other, as those of a chunk's transition do from chunk to chunk, grow four times or more. The distribution
of errors then has tails that sigma of the ordinary runs does not show, so `mean_square` is the larger of both estimates. After
several chunks a few runs may miss the tails altogether: if rounding turns a transition that should be 0 into 1.5, later chunks
multiply errors by powers of it, and few runs may happen to have small errors only. In such calls no error is clearly broken by RUNS
runs alone (`Bound.clear`).

On a CPU, and for large calls on a GPU, the runs dominate the cost. There the judge may compute one of the RUNS runs first, then
two, and all of them only if an error is above what the fewer runs guarantee (`Bound.sure`). The verdict is always that of RUNS
runs. Errors above that are examined again in their own part of the call (oracles/tolerance/parts.py). The part reuses the runs of
the whole call; later runs round on other grids.

oracles/tolerance/allowance.py computes the tolerances from `mean_square`. docs/results.md says how KAPPA was derived and holds the
distribution of error / allowed on right implementations.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from oracles.arithmetic.rounding import BITS, EXACT, FP16_STEP, SINGLE, Arithmetic
from oracles.operation import FLOATS, NAMES, Inputs, Operation, Port, checked_tensor, sequences
from oracles.rule.segments import Restarts
from oracles.tolerance import evaluation
from oracles.tolerance.allowance import KAPPA, Rows, allowances
from oracles.tolerance.parts import Cut, Part

RUNS = 4
MORE = (4 * RUNS, 16 * RUNS)
COARSE = 4
CLEAR, CLEAR_OF_MORE = 30.0, 12.0
NOTHING = 1e12  # a finite error so many times over a tolerance says that there is hardly a tolerance: few runs may have no error
AMPLIFIED, CLEARLY = 128, 1000.0  # longer sequences may amplify errors; then CLEARLY replaces CLEAR, and needs MORE runs
LOOKS = (1, 2)  # how many of the RUNS runs may be judged before all of them
ANY = 1e200  # the tolerance of a row whose value means nothing: every finite number is within it, NaN is not
CHUNKS = (64, 16, 32, 128, 48)  # 48, because all other lengths begin a chunk at every 128th token
ORIGIN = f"{KAPPA:g} times the expected rounding error"
_LARGE = 2**24  # numbers in a call's inputs above which a GPU, too, uses LOOKS and judges parts alone


class Decision(enum.Enum):
    """What a bound says of a row: it is right, it is wrong, or only more runs can tell."""

    RIGHT = enum.auto()
    WRONG = enum.auto()
    UNDECIDED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Bound:
    """The float64 truth of one tensor, and the error allowed to each of its rows.

    `allowed` has the shape of `value` without the axis of a row. `finer` makes the same bound from more runs. A judge needs it
    before it calls a row broken whose error is near the tolerance (`decide`), and may name the rows in question (see `Finer`).

    `sure` is 1 for RUNS runs or more. A bound of fewer runs has `sure` below 1: the tolerance of RUNS runs is at least `sure` times
    this `allowed`. If no error exceeds that product, RUNS runs would find none broken either; otherwise more runs are needed.

    An error that exceeds `allowed` by more than the factor `clear`, and not by NOTHING, is broken, whatever more runs would allow;
    none is, not even NaN, if `clear` is infinite.
    """

    value: Tensor
    allowed: Tensor
    origin: str = ORIGIN
    finer: "Finer | None" = None
    sure: float = 1.0
    clear: float = CLEAR

    def settled(self) -> "Bound":
        """Return this bound if it has all RUNS runs, otherwise the finer one that has."""
        return self if self.sure == 1 or self.finer is None else self.finer().settled()

    def ratios(self, error: Tensor) -> Tensor:
        """Return each row's error as a multiple of its tolerance. NaN counts as infinite.

        It is 0 in rows whose tolerance is not finite: rounding errors may grow there beyond every number, so nothing is wrong.
        """
        ratios = (error / self.allowed).nan_to_num(nan=math.inf, posinf=math.inf)
        return ratios.masked_fill(~self.allowed.isfinite(), 0.0)

    def decide(self, ratio: float, most: float = 1.0) -> Decision:
        """Return what is known of a row whose error is `ratio` times its tolerance, if it may be `most` times the tolerance."""
        if ratio <= (most if self.sure == 1 else self.sure):
            return Decision.RIGHT
        clear = math.isfinite(self.clear) and ratio >= most * self.clear and not NOTHING < ratio < math.inf
        return Decision.WRONG if self.finer is None or (self.sure == 1 and clear) else Decision.UNDECIDED

    def refined(self, rows: Tensor) -> "Bound":
        """Return the bound from more runs for the marked rows, which are undecided."""
        assert self.finer is not None
        return self.finer(rows)

    def sufficient(self, error: Tensor) -> "Bound":
        """Return this bound, or the first finer one that says of these errors what all RUNS runs say."""
        over = self.ratios(error) > self.sure
        return self if self.sure == 1 or self.finer is None or not bool(over.any()) else self.refined(over).sufficient(error)

    def at(self, *index: Any) -> "Bound":
        """Return the bound of some rows; the value and the tolerance are indexed alike."""
        finer, allowed = self.finer, self.allowed

        def later(over: Tensor | None = None) -> Bound:
            assert finer is not None
            if over is not None:
                rows = torch.zeros_like(allowed, dtype=torch.bool)
                rows[index] = over
                over = rows
            return finer(over).at(*index)

        finer_at = None if finer is None else later
        return Bound(self.value[index], allowed[index], self.origin, finer_at, self.sure, self.clear)

    def otherwise(self, other: Callable[[], "Bound"]) -> "Bound":
        """Return this bound for what it finds right. What it does not is judged by another bound of the same tensor."""
        right = self.sure * self.allowed

        def joined(bound: Bound) -> Bound:
            finer = bound.finer
            later = None if finer is None else lambda over=None: joined(finer(over))
            return dataclasses.replace(bound, allowed=torch.maximum(bound.allowed, right), finer=later)

        return dataclasses.replace(self, finer=lambda _over=None: joined(other()), clear=math.inf)

    def then(self, other: Callable[[], "Bound"]) -> "Bound":
        """Return this bound. What the last of its finer ones does not find right is judged by another bound of the same tensor."""
        if (finer := self.finer) is None:
            return self.otherwise(other)
        return dataclasses.replace(self, finer=lambda over=None: finer(over).then(other))

    def beside(self, other: "Bound") -> "Bound":
        """Return the bound of the same tensor when two computations err one after the other: the tolerances add up."""
        return self._and(other, self.value, Bound.beside)

    def plus(self, other: "Bound") -> "Bound":
        """Return the bound of the sum of two tensors with independent errors."""
        return self._and(other, self.value + other.value, Bound.plus)

    def _and(self, other: "Bound", value: Tensor, join: Callable[["Bound", "Bound"], "Bound"]) -> "Bound":
        """Add two tolerances; `finer` of the sum refines the bound that is less sure, or both if they are equally sure."""
        sure = min(self.sure, other.sure)
        one, two = (bound.finer if bound.sure == sure else lambda _=None, bound=bound: bound for bound in (self, other))
        later = None if one is None or two is None else lambda over=None: join(one(over), two(over))
        return Bound(value, self.allowed + other.allowed, self.origin, later, sure, max(self.clear, other.clear))


class Finer(Protocol):
    """Makes a bound from more runs, at least for the rows marked in `over` (shaped as `Bound.allowed`); None marks all rows.

    Rows that are not marked may keep the tolerance of fewer runs, so mark every row whose error is not within it.
    """

    def __call__(self, over: Tensor | None = None) -> Bound:
        """Return the bound."""


def truth(operation: Operation, inputs: Inputs, cotangents: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return every output in float64 and, with cotangents, every gradient.

    `cotangents` has a tensor for each output that has one. ValueError, as from `bounds`, if the inputs break the operation's
    contract or a cotangent has another shape than its output.
    """
    operation.check(inputs)
    _check_cotangents(cotangents)
    return {name: runs[0] for name, runs in evaluation.evaluate(operation, inputs, cotangents, Arithmetic.exact()).items()}


def bounds(
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    algorithm: str,
    products: str = "ieee",
    chunk: int | None = None,
    first: int | None = None,
    *,
    restarts: Sequence[Sequence[int]] = (),
    stores: bool = False,
    folds: bool = False,
    rounds_products: bool = False,
    shared_bounds: dict[str, Bound] | None = None,
) -> dict[str, Bound]:
    """Return the truth and the bound of each output and, with cotangents, of each gradient.

    `algorithm` is the class of the implementation ("chunkwise", "recurrent", "pointwise"). `products` is how it multiplies float32
    matrices ("ieee", "tf32"). `chunk` is the number of tokens in its chunks, if known. If the call is made in parts, `restarts`
    has for each sequence the tokens at which a part begins, and with it a chunk. `cotangents` belong to outputs and have their
    dtypes.

    `first` is the number of runs of the first bound: one of MORE or of LOOKS. LOOKS come before RUNS on a CPU and, for a large
    call, on a GPU; a judge that uses them must heed `Bound.sure`. `stores` says that the backward of a recurrent implementation
    sums its states again from corrected values that are stored in the inputs' dtype. `folds` says that a chunkwise implementation
    multiplies a decay that all channels share into queries and keys, and stores these. `rounds_products` says that a convolution
    rounds each product of an input and a weight to the inputs' dtype before it adds it. `shared_bounds` are bounds of RUNS runs
    that were computed together with those of other calls; they are returned with a `finer` that examines only the marked part of
    this call.
    ValueError for illegal inputs, or for an unknown `algorithm`, `first`, `chunk` or `restarts`.
    """
    if algorithm not in operation.classes:
        raise ValueError(f"algorithm must be one of {', '.join(operation.classes)} for {operation.name}, got {algorithm!r}")
    if first is not None and (isinstance(first, bool) or first not in (*LOOKS, RUNS, *MORE)):
        raise ValueError(f"first must be None or one of {', '.join(map(str, (*LOOKS, RUNS, *MORE)))}, got {first!r}")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk must be None or a whole number from 1 up, got {chunk!r}")
    operation.check(inputs)
    cut = Cut.of(operation, inputs)
    _check_restarts(restarts, len(cut.lengths))
    _check_cotangents(cotangents)
    dtypes = {kind: _dtype(operation, inputs, kind) for kind in ("input", "gate", "state", "parameter", "bias")}
    inputs = evaluation.wide(operation, inputs)
    cotangents = cotangents and {name: evaluation.dense(tensor) for name, tensor in cotangents.items()}
    if shared_bounds is None:
        exact = {name: runs[0] for name, runs in evaluation.evaluate(operation, inputs, cotangents, Arithmetic.exact()).items()}
    else:
        exact = {name: bound.value for name, bound in shared_bounds.items()}
    chunks = CHUNKS if algorithm == "chunkwise" and chunk is None else (chunk,)
    plain = Arithmetic.of(algorithm, dtypes["input"], products)
    pool = BITS[dtypes["state"]]
    gate, parameter, bias = (BITS[dtypes[kind]] for kind in ("gate", "parameter", "bias"))
    pool = pool if pool < SINGLE else EXACT
    plain = dataclasses.replace(plain, gate=gate, parameter=parameter, bias=bias, pool=pool)
    if stores and algorithm == "recurrent":
        plain = dataclasses.replace(plain, summed_again=plain.output)
    if folds and algorithm == "chunkwise":
        plain = dataclasses.replace(plain, folds=True)
    if rounds_products and algorithm == "pointwise":
        plain = dataclasses.replace(plain, term=plain.output)
    make = functools.partial(_Disturbed, operation, dtypes=dtypes, chunks=chunks, plain=plain)
    sparing = not evaluation.on_a_gpu(inputs) or evaluation.numbers_of(operation, inputs) > _LARGE
    counts = [count for count in (*(LOOKS if sparing and first is not None else ()), RUNS, *MORE) if count >= (first or RUNS)]
    call, parts = (inputs, cotangents, exact), sparing or shared_bounds is not None
    looks = _Looks(cut, call, make, counts, tuple(map(tuple, restarts)), parts=parts)
    return (
        looks.bounds()
        if shared_bounds is None
        else {name: looks.with_finer(name, bound, 1) for name, bound in shared_bounds.items()}
    )


Call = tuple[Inputs, dict[str, Tensor] | None, dict[str, Tensor]]  # inputs, cotangents, exact outputs and gradients


class _Looks:
    """The bounds of one call after each look; the first look is at the whole call, a later one at the part in question.

    `counts` has the number of runs of each look. Without `parts` every look is at the whole call and happens once; this is for a
    GPU, which takes as long for a part as for all.
    """

    def __init__(
        self, cut: Cut, call: Call, make: Callable[..., "_Disturbed"], counts: Sequence[int], restarts: Restarts, *, parts: bool
    ) -> None:
        self.cut, self.call, self.make, self.counts, self.restarts = cut, call, make, counts, restarts
        self.parts = parts and bool(cut.operation.parallel)
        self.runs: dict[tuple[Part, int], _Disturbed] = {}
        self.results: list[dict[Part, dict[str, Bound]]] = [{} for _ in counts]

    def bounds(self) -> dict[str, Bound]:
        """Return the bounds of the first look, with the later looks as `finer`."""
        return {name: self.with_finer(name, bound, 1) for name, bound in self._look(0, self.cut.whole)[1].items()}

    def with_finer(self, name: str, bound: Bound, look: int) -> Bound:
        """Return a bound of the look before `look`, with `look` as its `finer`."""
        if look == len(self.counts):
            return bound

        def finer(over: Tensor | None = None) -> Bound:
            port, part = self.cut.operation.port(name), self.cut.whole
            if self.parts and over is not None:
                part = self.cut.having(port, over)
            where, results = self._look(look, part)
            found = results[name]
            if where != self.cut.whole:
                allowed = self.cut.put(bound.allowed, port, where, found.allowed)
                found = dataclasses.replace(found, value=bound.value, allowed=allowed)
            return self.with_finer(name, found, look + 1)

        return dataclasses.replace(bound, finer=finer)

    def _look(self, look: int, part: Part) -> tuple[Part, dict[str, Bound]]:
        """Take a look at a part that contains `part`, or reuse one; return that part and its bounds."""
        results, count = self.results[look], self.counts[look]
        if (known := next((other for other in results if other.has(part)), None)) is None:
            total = RUNS if count <= RUNS else MORE[-1]
            known = self._cheapest(part, total, count)
            results[known] = self._disturbed(known, total).bounds(count)
            if count == total:  # no later look needs more of these runs
                del self.runs[known, total]
        return known, results[known]

    def _cheapest(self, part: Part, total: int, count: int) -> Part:
        """Return `part`, or a larger part that is cheaper because an earlier look has computed some of its runs."""
        begun = self.runs.get((self.cut.whole, total))
        costs = {part: self.cut.size(part) * (count - (begun.done if begun else 0))}
        for (other, of), runs in self.runs.items():
            if of == total and other.has(part):
                costs[other] = self.cut.size(other) * (count - runs.done)
        return min(costs, key=lambda candidate: costs[candidate])

    def _disturbed(self, part: Part, total: int) -> "_Disturbed":
        """Return the disturbed runs of a part; a later look adds runs to them."""
        if (part, total) not in self.runs:
            inputs, cotangents, exact = self.call
            if part != self.cut.whole:
                inputs, exact = self.cut.inputs(inputs, part), self.cut.named(exact, part)
                cotangents = cotangents and self.cut.named(cotangents, part)
            restarts = self.restarts and tuple(self.restarts[row] for row in part.sequences)
            runs = self.runs[part, total] = self.make(inputs, cotangents, exact, total=total, restarts=restarts)
            if (begun := self.runs.get((self.cut.whole, total))) is not None:
                runs.go_on(begun, lambda name, rows: self.cut.taken(rows, self.cut.operation.port(name), part))
        return self.runs[part, total]


class _Disturbed:
    """The disturbed runs of a call, computed when needed: `total`, or half as many for each of several chunk lengths."""

    def __init__(
        self,
        operation: Operation,
        inputs: Inputs,
        cotangents: dict[str, Tensor] | None,
        exact: dict[str, Tensor],
        *,
        dtypes: dict[str, str],
        chunks: Sequence[int | None],
        plain: Arithmetic,
        total: int,
        restarts: Restarts,
    ) -> None:
        self.operation, self.inputs, self.exact, self.dtypes, self.chunks = operation, inputs, exact, dtypes, chunks
        self.runs = total if len(chunks) == 1 else total // 2
        self.plain = dataclasses.replace(plain, first=1, runs=self.runs, restarts=restarts)
        self.call = inputs, cotangents, exact
        self.coarse = total in MORE and plain.narrow
        self.ports = {port.name: port for port in (*operation.outputs, *operation.gradients())}
        self.done = 0  # runs of the last bounds
        # For each chunk length, and for ordinary and coarse runs: the number of runs, and their sums of squares.
        self.sums: dict[tuple[int | None, bool], tuple[int, list[Tensor]]] = {}

    def go_on(self, begun: "_Disturbed", taken: Callable[[str, Tensor], Tensor]) -> None:
        """Start from the runs of the whole call, of which this is a part; `taken` selects the part's rows."""
        for key, (runs, sums) in begun.sums.items():
            self.sums[key] = runs, [taken(name, rows) for name, rows in zip(self.exact, sums, strict=True)]

    def bounds(self, count: int) -> dict[str, Bound]:
        """Return the bounds of the first `count` runs, or of half as many for each chunk length if there are several.

        The N = RUNS runs contain the n runs of a look, so their mean square is at least n / N times that of the n runs, and their
        tolerance is at least the root of n / N times that of the n runs. With several chunk lengths the largest tolerance counts,
        which is at least that of one length.
        """
        sizes, runs = self.chunks, count
        if len(sizes) > 1:
            sizes, runs = sizes[: None if count > 1 else 1], max(1, count // 2)
        result: dict[str, Tensor] = {}
        for size in sizes:
            for name, allowed in self.allowed(size, runs).items():
                result[name] = torch.maximum(allowed, result[name]) if name in result else allowed
        sure = (runs / self.runs) ** 0.5 if count in LOOKS else 1.0
        self.done = count
        few, more = (math.inf, CLEARLY) if self.amplifies else (CLEAR, CLEAR_OF_MORE)
        clear = more if count in MORE else few
        for name in self.operation.unjudged.keys() & result.keys():
            free = self.operation.unjudged[name](self.inputs)
            result[name] = result[name].masked_fill(free if self.ports[name].scalar_rows else free.any(-1), ANY)
        return {name: Bound(value, result[name], sure=sure, clear=clear) for name, value in self.exact.items()}

    @functools.cached_property
    def amplifies(self) -> bool:
        """Whether errors may be amplified from chunk to chunk; float32 errors are too small for that."""
        tokens = self.operation.inputs[0].name
        return self.plain.narrow and max(sequences(self.inputs, tokens), default=0) > AMPLIFIED

    def allowed(self, size: int | None, runs: int) -> dict[str, Tensor]:
        """Return the tolerance from the first `runs` runs in chunks of `size` tokens."""
        squares, rows, plain = self.squares(size, runs), [], self.plain
        if self.coarse:
            coarse = self.squares(size, max(1, runs // COARSE), coarse=True)
            squares = list(torch._foreach_maximum(squares, torch._foreach_mul(coarse, 0.25)))
        for (name, value), square in zip(self.exact.items(), squares, strict=True):
            port = self.ports[name]
            known = port.dtype in ("input", "state", "parameter", "bias")
            dtype = self.dtypes[port.dtype] if known else port.dtype if port.dtype in BITS else "fp32"
            step = plain.step if port.dtype == "input" or plain.stored == plain.output else FP16_STEP * (dtype == "fp16")
            step = max(step, FP16_STEP * (port.dtype == "fp16"))
            ulp = 2.0 ** (1 - BITS[dtype])
            rows.append(Rows(port, value, square, ulp, step))
        lengths = sequences(self.inputs, self.operation.inputs[0].name) if any(tensor.along_tokens for tensor in rows) else []
        return dict(zip(self.exact, allowances(rows, lengths), strict=True))

    def squares(self, size: int | None, runs: int, *, coarse: bool = False) -> list[Tensor]:
        """Return each row's mean squared distance from the truth, over the first `runs` runs in chunks of `size` tokens."""
        before, sums = self.sums.get((size, coarse), (0, []))
        if before < runs:
            plain = dataclasses.replace(_coarser(self.plain) if coarse else self.plain, chunk=size, last=self.runs)
            pieces = evaluation.pieces_of(self.operation, self.inputs, runs - before)
            once = evaluation.at_once(self.inputs, dataclasses.replace(plain, runs=runs - before), pieces)
            arithmetics = [
                dataclasses.replace(plain, runs=min(once, runs - done), first=done + 1) for done in range(before, runs, once)
            ]
            calls = zip(*(evaluation.slices(self.operation, tensors, pieces) for tensors in self.call), strict=True)
            parts = [_spread(self.ports, self.operation, x, ct, exact, arithmetics) for x, ct, exact in calls]
            named = zip(self.exact, *parts, strict=True)
            more = [evaluation.joined(self.operation, self.ports[name], list(slices)) for name, *slices in named]
            sums = list(torch._foreach_add(sums, more)) if sums else more
            self.sums[size, coarse] = runs, sums
        return list(torch._foreach_mul(sums, 1.0 / runs))


def _coarser(plain: Arithmetic) -> Arithmetic:
    """Return the arithmetic with one bit less in stored, multiplied and output values, so that their errors double."""
    names = ("stored", "product", "output", "inverse")
    return dataclasses.replace(plain, **{name: getattr(plain, name) - 1 for name in names if getattr(plain, name) < EXACT})


def _check_restarts(restarts: Any, count: int) -> None:
    """Raise ValueError if `restarts` are not token numbers for each of `count` sequences."""
    good = isinstance(restarts, list | tuple) and (not restarts or len(restarts) == count)
    for each in restarts if good else ():
        whole = isinstance(each, list | tuple) and all(type(at) is int and at >= 0 for at in each)
        good = good and whole and sorted({*each}) == [*each]
    if not good:
        rule = f"restarts must be empty or have increasing token numbers from 0 up for each of {count} sequences"
        raise ValueError(f"{rule}, got {restarts!r}")


def _check_cotangents(cotangents: object) -> None:
    """Raise ValueError if a cotangent is not a floating-point tensor; `evaluation.evaluate` checks the shapes."""
    if cotangents is not None and not isinstance(cotangents, dict):
        raise ValueError(f"cotangents must be None or tensors by name, got {type(cotangents).__name__}")
    for name, cotangent in (cotangents or {}).items():
        if (dtype := checked_tensor(f"cotangent of {name}", cotangent).dtype) not in FLOATS:
            raise ValueError(f"cotangent of {name} must be floating point of 16, 32 or 64 bits, got {dtype}")


def _dtype(operation: Operation, inputs: Inputs, kind: str = "input") -> str:
    """Return the name of the coarsest dtype among the inputs of a kind; float64, which only `truth` takes, counts as fp32."""
    tensors = [inputs[port.name] for port in operation.inputs if port.dtype == kind and inputs.get(port.name) is not None]
    return min((NAMES.get(tensor.dtype, "fp32") for tensor in tensors), key=lambda name: BITS[name], default="fp32")


def _spread(
    ports: dict[str, Port],
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    exact: dict[str, Tensor],
    arithmetics: Sequence[Arithmetic],
) -> list[Tensor]:
    """Return each row's squared distance from the truth, summed over the runs of several arithmetics."""
    sums: list[Tensor] = []
    for arithmetic in arithmetics:
        runs = evaluation.evaluate(operation, inputs, cotangents, arithmetic)
        off = [runs[name] - value for name, value in exact.items()]
        torch._foreach_mul_(off, off)
        squares = [x.sum((0,) if ports[name].scalar_rows else (0, -1)) for name, x in zip(exact, off, strict=True)]
        sums = list(torch._foreach_add(sums, squares)) if sums else squares
    return sums
