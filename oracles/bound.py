"""The truth of a call in float64, and the error each row of it may have: the rounding model, run.

Disturbed runs (oracles/rounding.py) surround the truth: RUNS of them, or RUNS / 2 for each of CHUNKS where a chunkwise
implementation does not say how long its chunks are, since where they begin decides where its state rounds and its cumulative gate
restarts; the greatest of their bounds counts. A row is a token and head's vector, a row of a state, or one element of g's and
beta's gradients. Its error scale is

    sigma^2 = 1/2 own + 1/2 mean over the WINDOW rows around it,    own = mean over runs of |disturbed - truth|^2

where the neighbours are those of the same sequence and head (for a state, of the same matrix): one row's own spread over RUNS
runs is a poor estimate. A row is broken when its error exceeds

    allowed = KAPPA sigma

never less than FLOOR_ULP units in the last place of the row, nor than the subnormal step of what is stored on the way to it.
So few runs, where equal values err alike and pooling rows does not help, may all happen to err little: before it calls a row
broken that is over by less than CLEAR, the judge asks what MORE of them allow, those of each number in turn. Beside these, where
operands are coarser than float32, one for each COARSE of them rounds to a bit less. What errs in proportion errs twice as much
there, and half of that is sigma again; but where errors amplify each other, as those of a chunk's transition do from chunk to
chunk, twice the error comes to four times as much or more. The distribution then has tails that sigma knows nothing of, and own is
the greater of both. After several chunks the tails may be all there is: a transition that rounding makes 1.5 where it is 0 takes
errors to its power, and few runs may all have small ones. There nothing is clear from RUNS alone (`Bound.clear`).

On a CPU, and where a call is large, a run is what costs. There the judge may look at one of the RUNS first, at two, and at all only
if an error is over what these are sure of (`Bound.sure`): of the same runs it finds the same broken. What is over is looked at
again in its own part of the call (oracles/parts.py), which goes on with the runs of all of it; later ones round on other grids.

docs/MEASUREMENTS.md derives KAPPA and holds the distribution of error / allowed on right implementations.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from oracles.operation import FLOATS, NAMES, Inputs, Operation, Port, checked_tensor, gradient_name, sequences
from oracles.parts import Cut, Part
from oracles.room import fitting
from oracles.rounding import BITS, EXACT, Arithmetic

RUNS = 4
MORE = (4 * RUNS, 16 * RUNS)
COARSE = 4
CLEAR = 30.0
AMPLIFIED, CLEARLY = 128, 1000.0  # in sequences of more tokens errors may be amplified: it takes MORE to be clear, and so much
LOOKS = (1, 2)  # runs of RUNS that one may look at before the others
CHUNKS = (64, 16, 32, 128, 48)  # 48, since the others all begin a chunk at every 128th token
WINDOW = 9
KAPPA = 12.0
FLOOR_ULP = 2.0
ORIGIN = f"{KAPPA:g} sigma of the disturbed runs"
_NEAR = 1_500_000  # bytes of some runs' inputs: with more, a CPU waits for memory; measured
_WIDE = 9_000_000  # float64 numbers of some runs' inputs that a GPU takes at once, however many runs those are
_FEW, _FEWEST = 8, 4  # runs that a GPU takes at once: so many where there is room, fewer whatever their size
_ROOM = 160_000_000  # float64 numbers of _FEW runs' inputs: 155 million took 22.2 GiB, 8 of it a segment's
_BYTES = {"half": 8, "single": 12, "recurrent": 20}  # an input's, with what comes of it: float32, float64, that for two halves
_BATCH = {"cpu": 2**25, "cuda": 2**28}  # float64 numbers of few runs' inputs: a call that has more is cut into several
_LARGE = 2**24  # numbers of a call's inputs, above which a GPU takes LOOKS too, and looks at parts alone
_TINY = 2.0**-100  # products of what is flushed to zero below 2^-126 with anything up to 6e7, the norm's 1 / 1e-4 included


@dataclasses.dataclass(frozen=True)
class Bound:
    """The truth of one tensor, in float64, and the error allowed to each of its rows (its shape less the row's axis).

    `finer` makes the same bound from more runs: a judge asks for it before it calls a row broken on a near thing, and may say which
    rows those are (`Finer`).

    A bound of fewer runs than RUNS, some of those, is `sure` of less than 1: what RUNS allow is at least so much of what it allows.
    Where no error is over that much, RUNS would find none over theirs; else its `finer` is to be asked, which has more of the runs.
    Errors over what is allowed by more than `clear` are broken whatever more runs allow.
    """

    value: Tensor
    allowed: Tensor
    origin: str = ORIGIN
    finer: "Finer | None" = None
    sure: float = 1.0
    clear: float = CLEAR

    def settled(self) -> "Bound":
        """This bound, or the finer one that has all RUNS."""
        return self if self.sure == 1 or self.finer is None else self.finer().settled()

    def at(self, *index: Any) -> "Bound":
        """The bound of some rows: the value and the allowance indexed alike."""
        finer, allowed = self.finer, self.allowed

        def later(over: Tensor | None = None) -> Bound:
            assert finer is not None
            if over is not None:
                rows = torch.zeros_like(allowed, dtype=torch.bool)
                rows[index] = over
                over = rows
            return finer(over).at(*index)

        made = None if finer is None else later
        return Bound(self.value[index], allowed[index], self.origin, made, self.sure, self.clear)

    def beside(self, other: "Bound") -> "Bound":
        """The bound of the same tensor where both err, one after the other: the allowances add up."""
        return self._and(other, self.value, Bound.beside)

    def plus(self, other: "Bound") -> "Bound":
        """The bound of a sum of two tensors that err on their own."""
        return self._and(other, self.value + other.value, Bound.plus)

    def _and(self, other: "Bound", value: Tensor, join: Callable[["Bound", "Bound"], "Bound"]) -> "Bound":
        """The sum of two allowances; of the two, a look further is taken of that which is less sure, or of both."""
        sure = min(self.sure, other.sure)
        one, two = (each.finer if each.sure == sure else lambda _=None, each=each: each for each in (self, other))
        later = None if one is None or two is None else lambda over=None: join(one(over), two(over))
        return Bound(value, self.allowed + other.allowed, self.origin, later, sure, max(self.clear, other.clear))


class Finer(Protocol):
    """A bound from more runs, for the rows that are `over` at least (shaped as what is allowed); for all, if none are named.

    Rows that nobody asked about may keep what fewer runs allow: who asks must have found them within that.
    """

    def __call__(self, over: Tensor | None = None) -> Bound:
        """The bound."""


def truth(operation: Operation, inputs: Inputs, cotangents: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every output in float64, and with cotangents (of the outputs that have one) every gradient.

    ValueError, as from `bounds`, if the inputs break the operation's contract or a cotangent is not shaped as its output.
    """
    operation.check(inputs)
    _check_cotangents(cotangents)
    return {name: runs[0] for name, runs in _evaluate(operation, inputs, cotangents, Arithmetic.exact()).items()}


def bounds(
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    algorithm: str,
    products: str = "ieee",
    chunk: int | None = None,
    first: int | None = None,
    *,
    stores: bool = False,
    folds: bool = False,
    made: dict[str, Bound] | None = None,
) -> dict[str, Bound]:
    """The truth and the bound of each output, and with cotangents of each gradient.

    `algorithm` is the class of the implementation ("chunkwise", "recurrent", "pointwise"), `products` how it multiplies float32
    matrices ("ieee", "tf32"), `chunk` the tokens in its chunks if known; cotangents are those of the outputs, in their dtypes.
    `first` are the runs that the first bound is of: of MORE, or of LOOKS, which are taken before RUNS on a CPU, and on a GPU of a
    large call; who judges by them must heed what they are `sure` of. `stores` says that a recurrent implementation's
    backward sums its states again, from corrected values that are stored in the inputs' dtype; `folds` that a chunkwise one
    multiplies a decay which all channels share into queries and keys, and stores these. `made` are bounds of RUNS that were made
    with those of other calls: they are given back with finer ones, which are of the part of this call that is asked about.
    """
    if algorithm not in operation.classes:
        raise ValueError(f"algorithm must be one of {', '.join(operation.classes)} for {operation.name}, got {algorithm!r}")
    if first is not None and (isinstance(first, bool) or first not in (*LOOKS, RUNS, *MORE)):
        raise ValueError(f"first must be None or one of {', '.join(map(str, (*LOOKS, RUNS, *MORE)))}, got {first!r}")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk must be None or a whole number from 1 up, got {chunk!r}")
    operation.check(inputs)
    _check_cotangents(cotangents)
    dtypes = _dtype(operation, inputs), _dtype(operation, inputs, "gate")
    inputs, cotangents = _wide(operation, inputs), cotangents and {name: each.double() for name, each in cotangents.items()}
    if made is None:
        exact = {name: runs[0] for name, runs in _evaluate(operation, inputs, cotangents, Arithmetic.exact()).items()}
    else:
        exact = {name: each.value for name, each in made.items()}
    chunks = CHUNKS if algorithm == "chunkwise" and chunk is None else (chunk,)
    plain = Arithmetic.of(algorithm, dtypes[0], products)
    if stores and algorithm == "recurrent":
        plain = dataclasses.replace(plain, summed_again=plain.output)
    if folds and algorithm == "chunkwise":
        plain = dataclasses.replace(plain, folds=True)
    make = functools.partial(_Disturbed, operation, dtypes=dtypes, chunks=chunks, plain=plain)
    sparing = not _on_a_gpu(inputs) or _numbers(operation, inputs) > _LARGE
    counts = [count for count in (*(LOOKS if sparing and first is not None else ()), RUNS, *MORE) if count >= (first or RUNS)]
    looks = _Looks(Cut.of(operation, inputs), (inputs, cotangents, exact), make, counts, parts=sparing or made is not None)
    return looks.bounds() if made is None else {name: looks.with_finer(name, each, 1) for name, each in made.items()}


Given = tuple[Inputs, dict[str, Tensor] | None, dict[str, Tensor]]  # inputs, cotangents, and all that comes of them


class _Looks:
    """What one look after the other allows: the first at the whole call, a later one at the part of it that is asked about.

    `counts` are the runs of each look. Without `parts`, every look is at all of it, once: where a GPU takes as long for a part.
    """

    def __init__(self, cut: Cut, given: Given, make: Callable[..., "_Disturbed"], counts: Sequence[int], *, parts: bool) -> None:
        self.cut, self.given, self.make, self.counts, self.parts = cut, given, make, counts, parts and bool(cut.operation.parallel)
        self.runs: dict[tuple[Part, int], _Disturbed] = {}
        self.made: list[dict[Part, dict[str, Bound]]] = [{} for _ in counts]

    def bounds(self) -> dict[str, Bound]:
        """Those of the first look, with later ones as finer."""
        return {name: self.with_finer(name, bound, 1) for name, bound in self._look(0, self.cut.whole)[1].items()}

    def with_finer(self, name: str, bound: Bound, look: int) -> Bound:
        """A bound of the look before this one."""
        if look == len(self.counts):
            return bound

        def finer(over: Tensor | None = None) -> Bound:
            port, part = self.cut.operation.port(name), self.cut.whole
            if self.parts and over is not None:
                part = self.cut.having(port, over)
            where, made = self._look(look, part)
            found = made[name]
            if where != self.cut.whole:
                allowed = self.cut.put(bound.allowed, port, where, found.allowed)
                found = dataclasses.replace(found, value=bound.value, allowed=allowed)
            return self.with_finer(name, found, look + 1)

        return dataclasses.replace(bound, finer=finer)

    def _look(self, look: int, part: Part) -> tuple[Part, dict[str, Bound]]:
        """What a look came to of some part that has this one: which, and its bounds."""
        made, count = self.made[look], self.counts[look]
        if (there := next((each for each in made if each.has(part)), None)) is None:
            total = RUNS if count <= RUNS else MORE[-1]
            there = self._cheapest(part, total, count)
            made[there] = self._disturbed(there, total).bounds(count)
            if count == total:  # no later look makes more of them
                del self.runs[there, total]
        return there, made[there]

    def _cheapest(self, part: Part, total: int, count: int) -> Part:
        """That part, or a larger one of which so many runs cost less, since an earlier look made some of them."""
        begun = self.runs.get((self.cut.whole, total))
        costs = {part: self.cut.size(part) * (count - (begun.done if begun else 0))}
        for (each, of), runs in self.runs.items():
            if of == total and each.has(part):
                costs[each] = self.cut.size(each) * (count - runs.done)
        return min(costs, key=lambda each: costs[each])

    def _disturbed(self, part: Part, total: int) -> "_Disturbed":
        """The disturbed runs of a part, of which a later look makes more."""
        if (part, total) not in self.runs:
            inputs, cotangents, exact = self.given
            if part != self.cut.whole:
                inputs, exact = self.cut.inputs(inputs, part), self.cut.named(exact, part)
                cotangents = cotangents and self.cut.named(cotangents, part)
            runs = self.runs[part, total] = self.make(inputs, cotangents, exact, total=total)
            if (begun := self.runs.get((self.cut.whole, total))) is not None:
                runs.go_on(begun, lambda name, rows: self.cut.taken(rows, self.cut.operation.port(name), part))
        return self.runs[part, total]


class _Disturbed:
    """The disturbed runs of a call, made as they are asked for: `total`, or half as many for each of several sizes of chunks."""

    def __init__(
        self,
        operation: Operation,
        inputs: Inputs,
        cotangents: dict[str, Tensor] | None,
        exact: dict[str, Tensor],
        *,
        dtypes: tuple[str, str],
        chunks: Sequence[int | None],
        plain: Arithmetic,
        total: int,
    ) -> None:
        self.operation, self.inputs, self.exact, self.dtype, self.chunks = operation, inputs, exact, dtypes[0], chunks
        self.runs = total if len(chunks) == 1 else total // 2
        self.plain = dataclasses.replace(plain, gate=BITS[dtypes[1]], first=1, runs=self.runs)
        self.given = inputs, cotangents, exact
        self.coarse = total in MORE and plain.narrow
        self.ports = {port.name: port for port in (*operation.outputs, *operation.gradients())}
        self.done = 0  # runs of the last bounds
        # By size of chunk and whether they are the coarse ones: how many runs, and sums of squares.
        self.made: dict[tuple[int | None, bool], tuple[int, list[Tensor]]] = {}

    def go_on(self, begun: "_Disturbed", taken: Callable[[str, Tensor], Tensor]) -> None:
        """Have the runs that were made of the whole call, of which this is a part, of whose rows it has what is `taken`."""
        for key, (runs, sums) in begun.made.items():
            self.made[key] = runs, [taken(name, own) for name, own in zip(self.exact, sums, strict=True)]

    def bounds(self, count: int) -> dict[str, Bound]:
        """The bounds of the first `count` runs, of half of them where chunks have several sizes.

        The N runs of RUNS have the n of LOOKS among them: the mean of their squares is at least n / N of the mean of these, and
        what they allow at least the root of n / N of what these allow. Of several sizes the greatest counts: no less than one's.
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
        clear = CLEAR if not self.amplifies else CLEARLY if count in MORE else math.inf
        return {name: Bound(value, result[name], sure=sure, clear=clear) for name, value in self.exact.items()}

    @functools.cached_property
    def amplifies(self) -> bool:
        """Whether errors may be amplified from chunk to chunk: in float32 they are too small for that."""
        tokens = self.operation.inputs[0].name
        return self.plain.narrow and max(sequences(self.inputs, tokens), default=0) > AMPLIFIED

    def allowed(self, size: int | None, runs: int) -> dict[str, Tensor]:
        """What is allowed by the first so many runs in chunks of a size."""
        squares, rows, plain = self.squares(size, runs), [], self.plain
        if self.coarse:
            coarse = self.squares(size, max(1, runs // COARSE), coarse=True)
            squares = list(torch._foreach_maximum(squares, torch._foreach_mul(coarse, 0.25)))
        for (name, value), own in zip(self.exact.items(), squares, strict=True):
            port = self.ports[name]
            step = plain.step if port.dtype == "input" or plain.stored == plain.output else 0.0
            ulp = 2.0 ** (1 - BITS[self.dtype if port.dtype == "input" else "fp32"])
            rows.append(Rows(port, value, own, ulp, step))
        lengths = sequences(self.inputs, self.operation.inputs[0].name) if any(each.along_tokens for each in rows) else []
        return dict(zip(self.exact, allowances(rows, lengths), strict=True))

    def squares(self, size: int | None, runs: int, *, coarse: bool = False) -> list[Tensor]:
        """Each row's squared distance from the truth, its mean over the first so many runs in chunks of a size."""
        before, sums = self.made.get((size, coarse), (0, []))
        if before < runs:
            plain = dataclasses.replace(_coarser(self.plain) if coarse else self.plain, chunk=size, last=self.runs)
            pieces = _pieces(self.operation, self.inputs, runs - before)
            once = _at_once(self.inputs, dataclasses.replace(plain, runs=runs - before), pieces)
            arithmetics = [
                dataclasses.replace(plain, runs=min(once, runs - done), first=done + 1) for done in range(before, runs, once)
            ]
            given = zip(*(_slices(self.operation, each, pieces) for each in self.given), strict=True)
            parts = [_spread(self.ports, self.operation, x, ct, exact, arithmetics) for x, ct, exact in given]
            named = zip(self.exact, *parts, strict=True)
            more = [_joined(self.operation, self.ports[name], list(each)) for name, *each in named]
            sums = list(torch._foreach_add(sums, more)) if sums else more
            self.made[size, coarse] = runs, sums
        return list(torch._foreach_mul(sums, 1.0 / runs))


def _coarser(plain: Arithmetic) -> Arithmetic:
    """The arithmetic with a bit less in what it stores, multiplies and hands out: there it errs twice as much."""
    names = ("stored", "product", "output", "inverse")
    return dataclasses.replace(plain, **{name: getattr(plain, name) - 1 for name in names if getattr(plain, name) < EXACT})


def _check_cotangents(cotangents: object) -> None:
    """Refuse cotangents that are no floating-point tensors by name; `_evaluate` knows their shapes."""
    if cotangents is not None and not isinstance(cotangents, dict):
        raise ValueError(f"cotangents must be None or tensors by name, got {type(cotangents).__name__}")
    for name, each in (cotangents or {}).items():
        if (dtype := checked_tensor(f"cotangent of {name}", each).dtype) not in FLOATS:
            raise ValueError(f"cotangent of {name} must be floating point of 16, 32 or 64 bits, got {dtype}")


def _dtype(operation: Operation, inputs: Inputs, kind: str = "input") -> str:
    """The name of the coarsest dtype that the inputs of a kind have; of float64, which only the truth is asked for, fp32."""
    given = [inputs[port.name] for port in operation.inputs if port.dtype == kind and inputs.get(port.name) is not None]
    return min((NAMES.get(each.dtype, "fp32") for each in given), key=lambda name: BITS[name], default="fp32")


def _wide(operation: Operation, inputs: Inputs) -> Inputs:
    """The inputs in float64; offsets on the CPU, where reading them waits for nothing that a GPU still has to do."""
    names = [port.name for port in operation.inputs if inputs.get(port.name) is not None]
    wide = {name: inputs[name].double() for name in names if inputs[name].is_floating_point()}
    if (offsets := inputs.get("cu_seqlens")) is not None:
        wide["cu_seqlens"] = offsets.cpu()
    return inputs.replaced(**wide)


def _spread(
    ports: dict[str, Port],
    operation: Operation,
    inputs: Inputs,
    cotangents: dict[str, Tensor] | None,
    exact: dict[str, Tensor],
    arithmetics: Sequence[Arithmetic],
) -> list[Tensor]:
    """The sum over the runs of some arithmetics of each row's squared distance from the truth."""
    own: list[Tensor] = []
    for arithmetic in arithmetics:
        runs = _evaluate(operation, inputs, cotangents, arithmetic)
        off = [runs[name] - value for name, value in exact.items()]
        torch._foreach_mul_(off, off)
        each = [x.sum((0,) if ports[name].scalar_rows else (0, -1)) for name, x in zip(exact, off, strict=True)]
        own = list(torch._foreach_add(own, each)) if own else each
    return own


def _device(inputs: Inputs) -> torch.device:
    return next(x.device for x in inputs.values() if isinstance(x, Tensor))


def _on_a_gpu(inputs: Inputs) -> bool:
    return _device(inputs).type != "cpu"


def _at_once(inputs: Inputs, plain: Arithmetic, pieces: int) -> int:
    """How many of the runs are evaluated together: on a CPU what keeps near what they work on, on a GPU what it has room for."""
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    numbers = max(1, sum(x.numel() for x in tensors) // pieces)
    if _on_a_gpu(inputs):
        most = max(_WIDE // numbers, _FEW if _FEW * numbers <= fitting(_ROOM, _device(inputs)) else _FEWEST)
    else:
        most = _NEAR // (_BYTES[_kind(plain)] * numbers)
    return max((count for count in range(1, min(plain.runs, most) + 1) if plain.runs % count == 0), default=1)


def _kind(plain: Arithmetic) -> str:
    """What runs are computed as: chunkwise ones in float32 where operands are coarser, else in float64."""
    return "recurrent" if plain.algorithm == "recurrent" else "half" if plain.narrow else "single"


def _numbers(operation: Operation, inputs: Inputs) -> int:
    """How many numbers a call's inputs have."""
    return sum(inputs[port.name].numel() for port in operation.inputs if inputs.get(port.name) is not None)


def _pieces(operation: Operation, inputs: Inputs, runs: int) -> int:
    """Into how few calls a call is cut along the operation's parallel axes to keep few runs' inputs within _BATCH numbers each."""
    sizes = operation.sizes(inputs)
    most = math.gcd(*(sizes[axis] for axis in operation.parallel)) if operation.parallel else 1
    held = fitting(_BATCH["cuda" if _on_a_gpu(inputs) else "cpu"], _device(inputs))
    wanted = min(runs, _FEW) * _numbers(operation, inputs) / held
    return next(count for count in range(1, most + 1) if most % count == 0 and (count >= wanted or count == most))


def _slices(operation: Operation, tensors: Any, pieces: int) -> list[Any]:
    """Inputs, or tensors by name, cut into pieces along the operation's parallel axes; what has none of them is in each."""
    if tensors is None or pieces == 1:
        return [tensors] * pieces
    ports = {port.name: port for port in (*operation.inputs, *operation.outputs, *operation.gradients())}
    parts: list[dict[str, Any]] = [dict(tensors) for _ in range(pieces)]
    for name, x in tensors.items():
        if isinstance(x, Tensor) and name in ports and (axis := _axis(operation, ports[name])) is not None:
            for part, piece in zip(parts, x.chunk(pieces, axis), strict=True):
                part[name] = piece
    return [Inputs(**part) if isinstance(tensors, Inputs) else part for part in parts]


def _axis(operation: Operation, port: Port) -> int | None:
    axes = port.axes.split()
    return next((axes.index(axis) for axis in operation.parallel if axis in axes), None)


def _joined(operation: Operation, port: Port, parts: list[Tensor]) -> Tensor:
    axis = _axis(operation, port)
    assert axis is not None or len(parts) == 1, port
    return parts[0] if axis is None or len(parts) == 1 else torch.cat(parts, axis)


class Rows(NamedTuple):
    """The rows of a tensor: its truth, each row's mean squared disturbance (`own`), a unit in the last place, a subnormal step."""

    port: Port
    value: Tensor
    own: Tensor
    ulp: float
    step: float

    @property
    def along_tokens(self) -> bool:
        """Whether the neighbours of a row are those of its sequence and head."""
        return self.port.axes.startswith("B T")


def allowances(given: Sequence[Rows], lengths: list[int]) -> list[Tensor]:
    """The error allowed to each row of some tensors; `lengths` are those of the sequences, for tensors with tokens."""
    floors = [rows.value.abs() if rows.port.scalar_rows else torch.linalg.vector_norm(rows.value, dim=-1) for rows in given]
    widths = [1 if rows.port.scalar_rows else rows.value.shape[-1] for rows in given]
    torch._foreach_mul_(floors, [FLOOR_ULP * rows.ulp for rows in given])
    torch._foreach_add_(floors, [(rows.step + _TINY) * width**0.5 for rows, width in zip(given, widths, strict=True)])
    along = iter(_along_tokens([rows.own for rows in given if rows.along_tokens], lengths))
    spread = [next(along) if rows.along_tokens else _allowed(rows.own, _moving_mean(rows.own)) for rows in given]
    return list(torch._foreach_maximum(spread, floors))


def _allowed(own: Tensor, around: Tensor) -> Tensor:
    return (own + around).mul_(0.5 * KAPPA**2).sqrt_()


def _along_tokens(given: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """What is allowed where the neighbours of a row are those of its sequence and head: all tensors [B, T, ...] at once."""
    tokens = sum(lengths)
    if not given or not tokens:
        return given
    parts = [own.flatten(0, 1).reshape(tokens, -1) for own in given]
    # A column of ones counts what each window sees.
    gap, places = WINDOW // 2, _apart(tuple(lengths), given[0].device)
    columns = torch.cat([*parts, parts[0].new_ones(tokens, 1)], -1)
    apart = columns.new_zeros(tokens + gap * len(lengths), columns.shape[-1]).index_copy_(0, places, columns)
    means = torch.nn.functional.avg_pool1d(apart.mT, WINDOW, 1, gap).mT.index_select(0, places)
    each = _allowed(columns, means / means[:, -1:]).split([*(part.shape[-1] for part in parts), 1], -1)
    return [part.reshape(own.shape) for part, own in zip(each, given, strict=False)]


@functools.lru_cache(64)
def _apart(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """The place of each token where so many zeros stand between two sequences that no window sees both."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (torch.arange(sum(lengths)) + WINDOW // 2 * numbers).to(device)


def _moving_mean(rows: Tensor) -> Tensor:
    """The mean over up to WINDOW entries around each along the last axis; fewer at the ends."""
    if not rows.ndim or not rows.numel():
        return rows
    each = rows.reshape(-1, rows.shape[-1])
    return torch.nn.functional.avg_pool1d(each, WINDOW, 1, WINDOW // 2, count_include_pad=False).reshape(rows.shape)


def _evaluate(
    operation: Operation, inputs: Inputs, cotangents: dict[str, Tensor] | None, arithmetic: Arithmetic
) -> dict[str, Tensor]:
    """Every output and gradient with the runs along axis 0, shaped as the call's tensors."""
    names = [port.name for port in operation.inputs if inputs.get(port.name) is not None]
    given = {name: x.detach() for name, x in _wide(operation, inputs).items() if name in names}
    leaves = {name: x.unsqueeze(0).expand(arithmetic.runs, *x.shape) for name, x in given.items()}
    wanted = {name: leaf for name, leaf in leaves.items() if cotangents is not None and leaf.is_floating_point()}
    for leaf in wanted.values():
        leaf.requires_grad_()
    outputs = operation.forward(inputs.replaced(**leaves), arithmetic)
    result = {name: value.detach() for name, value in outputs.items()}
    if cotangents is not None:
        for name, each in cotangents.items():
            if name not in outputs or each.shape != outputs[name].shape[1:]:
                wanted_shape = tuple(outputs[name].shape[1:]) if name in outputs else f"one of {', '.join(outputs)}"
                raise ValueError(f"cotangent of {name} must be {wanted_shape}, got shape {tuple(each.shape)}")
        given = {name: each for name, each in cotangents.items() if each.numel() and outputs[name].requires_grad}
        targets = [outputs[name] for name in given]
        directions = [each.double().unsqueeze(0).expand_as(outputs[name]) for name, each in given.items()]
        gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if targets:
            gradients = torch.autograd.grad(targets, list(wanted.values()), directions, allow_unused=True)
        for (name, leaf), gradient in zip(wanted.items(), gradients, strict=True):
            result[gradient_name(name)] = torch.zeros_like(leaf) if gradient is None else gradient
    return result
