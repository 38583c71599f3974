"""Laws: what must hold of every right implementation. One law, one sentence, one function.

A law runs the implementation through a Bench and yields what to compare: (name, got, want). Where `want` is a Bound, got is
judged row by row against the float64 truth; where it is a tensor, bit for bit (0 and -0 are equal, NaN never is). A law that
finds that its case could not have seen the defect it is about says so by raising Blind.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.bound import Bound
from oracles.case import Case
from oracles.norm import EPS
from oracles.operation import Inputs, Operation, sequences
from properties.domain import VIEWS, Domain
from properties.strategies import REMEMBERING, Example, cases

Results = dict[str, Tensor]
Cotangents = dict[str, Tensor] | None
Pair = tuple[str, Tensor, Tensor | Bound]


CALLS = 3
CROWD = 9  # sequences of a large batch: more than any unrolling or vector of a small one


class Blind(Exception):
    """The case could not have seen what the law is about; the message says why."""


class Breach(Exception):
    """The law is broken in a way that no comparison of tensors shows; the message says how."""


class Bench(Protocol):
    """Runs one implementation, and knows its domain, the truth, and the bounds of its class."""

    domain: Domain
    algorithm: str

    def call(self, case: Any) -> tuple[Inputs, Cotangents]:
        """The inputs of a case and, where it has a backward, their cotangents."""

    def run(
        self,
        inputs: Inputs,
        cotangents: Cotangents,
        *,
        counterpart: bool = False,
        poison: float = float("nan"),
        frozen: Collection[str] = (),
    ) -> Results:
        """Outputs, and with cotangents gradients; uninitialised memory holds `poison`. `counterpart`: its recurrent form.

        No gradients are asked for of what is `frozen`.
        """

    def bounds(self, inputs: Inputs, cotangents: Cotangents, algorithm: str | None = None) -> dict[str, Bound]:
        """The truth with the error allowed to each row, for the implementation's class of algorithm or `algorithm`."""

    def truth(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """The truth alone."""


@dataclasses.dataclass(frozen=True)
class Law:
    """`says` is the law in words, `draw` its examples, `check` its comparisons.

    Laws of kernels are given a Domain, a Bench and Cases, those of parallel paths what properties/paths.py has in their place.
    `needs` says why a domain cannot be asked, `lacks` what words a case lacks for the law to be true of it, or None; `about` are
    the operations of its book that it says something of, all where there are none.
    """

    name: str
    kind: str
    says: str
    draw: Callable[[Any], st.SearchStrategy[Example]]
    check: Callable[[Any, Example], Iterator[Pair]]
    needs: Callable[[Any], str | None] = lambda domain: None
    variants: tuple[str, ...] = ()
    place: Callable[[Any], range] | None = None
    lacks: Callable[[Any, str | None], str | None] = lambda case, variant: None
    about: tuple[str, ...] = ()

    def accept(self, example: Example) -> None:
        """Refuse an example that the law cannot be asked about: ValueError names the word, its value and the rule."""
        places = self.place(example.case) if self.place else None
        if places is None and example.at is not None:
            raise ValueError(f"law {self.name} takes no at, got at={example.at}")
        if places is not None and (example.at is None or example.at not in places):
            span = f"in {places[0]}..{places[-1]}" if places else "possible, but this case has no place for it"
            raise ValueError(f"at must be {span} for law {self.name} on {example.case}, got {example.at}")
        if example.variant not in (self.variants or (None,)):
            choices = f"one of {', '.join(self.variants)}" if self.variants else "absent"
            raise ValueError(f"variant must be {choices} for law {self.name}, got {example.variant}")
        if lacking := self.lacks(example.case, example.variant):
            raise ValueError(f"law {self.name} needs {lacking}, got {example.case}")


def examples_of(
    strategy: st.SearchStrategy[Any], place: Callable[[Any], range] | None = None, variants: tuple[str, ...] = ()
) -> st.SearchStrategy[Example]:
    """The cases that have a place for the law, each with a place and a variant."""

    @st.composite
    def draw(draw: st.DrawFn) -> Example:
        case = draw(strategy.filter(lambda case: len(place(case)) > 0) if place else strategy)
        chance = draw(st.randoms(use_true_random=True))
        at = None
        if place:
            places = place(case)
            near = [p for p in (64, 63, 65, 16, 32, 1) if p in places]
            at = chance.choice(near if near and chance.random() < 1 / 2 else places)
        return Example(case, at, chance.choice(variants) if variants else None)

    return draw()


@st.composite
def either(draw: st.DrawFn, choices: list[st.SearchStrategy[Example]]) -> Example:
    """One of the strategies, all alike often."""
    return draw(draw(st.randoms(use_true_random=True)).choice(choices))


def axes_of(spec: Operation, name: str) -> list[str]:
    """The axes of an input, an output or a gradient, as letters."""
    ports = (*spec.inputs, *spec.outputs, *spec.gradients())
    return next(port for port in ports if port.name == name).axes.split()


def present(spec: Operation, inputs: Inputs, *axes: str) -> list[str]:
    """The inputs that are given and have those axes first: all of them, without `axes`."""
    return [
        port.name
        for port in spec.inputs
        if inputs.get(port.name) is not None and port.axes.split()[: len(axes)] == list(axes) and port.dtype != "index"
    ]


def along(spec: Operation, name: str, letter: str) -> int | None:
    """The place of an axis among those of a tensor."""
    axes = axes_of(spec, name)
    return axes.index(letter) if letter in axes else None


def spread(mask: Tensor, like: Tensor, axis: int) -> Tensor:
    """A mask of the axes of `like` from `axis` on, shaped to act on all of it."""
    return mask.reshape(*mask.shape, *[1] * (like.ndim - axis - mask.ndim))


def token_output(spec: Operation) -> str:
    """The first output that has tokens."""
    return next(port.name for port in spec.outputs if port.axes.startswith("B T"))


def pairs_of(got: Results, bounds: dict[str, Bound]) -> Iterator[Pair]:
    """All that was got, each to be judged by its bound."""
    for name, value in got.items():  # the bounds may have a final state that was not asked for
        yield name, value, bounds[name]


def _with(bench: Bench, inputs: Inputs, cotangents: Cotangents, algorithm: str) -> dict[str, Bound]:
    """The bounds of the implementation's class, with what a part computed in another class may err beside it."""
    own = bench.bounds(inputs, cotangents)
    if bench.algorithm in (algorithm, "pointwise"):  # pointwise operations keep float32 throughout in every class
        return own
    other = bench.bounds(inputs, cotangents, algorithm)
    return {name: each.beside(other[name]) for name, each in own.items()}


def visible(moved: Results, bounds: dict[str, Bound]) -> bool:
    """Whether any row of the outputs moved by more than it may err, twice over."""
    for name, value in moved.items():
        error, allowed = value - bounds[name].value, bounds[name].settled().allowed
        if bool(((error.abs() if allowed.ndim == error.ndim else error.norm(dim=-1)) > 2 * allowed).any()):
            return True
    return False


def with_others(case: Any) -> Any:
    """The same shapes with other values, of other magnitudes too: what is shared by their scale shows."""
    return dataclasses.replace(case, seed=case.seed ^ 1, values="scaled" if case.values != "scaled" else "ordinary")


# Equal to the truth


def oracle(bench: Bench, example: Example) -> Iterator[Pair]:
    """One run, judged by its bounds."""
    inputs, cotangents = bench.call(example.case)
    yield from pairs_of(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents))


def packed(bench: Bench, example: Example) -> Iterator[Pair]:
    """Blind where a state that leaked from each sequence into the next would stay inside the bound."""
    case, alone = example.case, example.at
    assert alone is not None
    inputs, cotangents = bench.call(case)
    spec, bounds = case.spec, bench.bounds(inputs, cotangents)
    leaked = torch.zeros_like(bounds["final_state"].value)
    leaked[1:] = bounds["final_state"].value[:-1]
    if inputs.state is not None:
        leaked = leaked + inputs.state
    if not visible(bench.truth(inputs.replaced(state=leaked), None), bounds):
        raise Blind("a state leaking into the next sequence would not show")
    yield from pairs_of(bench.run(inputs, cotangents), bounds)
    start, end = case.starts()[alone : alone + 2]

    def own(name: str) -> tuple[slice, ...]:
        axes = axes_of(spec, name)
        return (slice(alone, alone + 1),) if axes[0] == "N" else (slice(None), slice(start, end)) if axes[:2] == ["B", "T"] else ()

    single = inputs.replaced(cu_seqlens=None, **{name: inputs[name][own(name)] for name in present(spec, inputs)})
    part = None if cotangents is None else {name: x[own(name)] for name, x in cotangents.items()}
    for name, got in bench.run(single, part).items():
        if own(name):  # a parameter's gradient is a sum over all sequences
            yield f"{name} of sequence {alone} alone", got, bounds[name].at(*own(name))


def _tokens(spec: Operation, inputs: Inputs, where: slice) -> Inputs:
    """The inputs at some tokens."""
    return inputs.replaced(**{name: inputs[name][:, where] for name in present(spec, inputs, "B", "T")})


def _pieces(spec: Operation, inputs: Inputs, cotangents: Cotangents, at: int) -> tuple[list[Tensor], list[Inputs], list[Tensor]]:
    """Every sequence cut at token `at`: token indices, inputs and, if any, the output's cotangents before and after."""
    names = present(spec, inputs, "B", "T")
    lengths = sequences(inputs, names[0])
    sides: list[list[Tensor]] = [[], []]
    if inputs.cu_seqlens is None:
        indices = [torch.arange(at), torch.arange(at, lengths[0])]
        offsets: list[Tensor | None] = [None, None]
    else:
        start, offsets = 0, []
        for length in lengths:
            middle = start + min(at, length)
            sides[0].append(torch.arange(start, middle))
            sides[1].append(torch.arange(middle, start + length))
            start += length
        indices = [torch.cat(side) for side in sides]
        for side in sides:
            ends = torch.tensor([0, *(len(piece) for piece in side)]).cumsum(0)
            offsets.append(ends.to(inputs.cu_seqlens.dtype))
    parts = [
        inputs.replaced(cu_seqlens=offset, **{name: inputs[name][:, index] for name in names})
        for index, offset in zip(indices, offsets, strict=True)
    ]
    outputs = [] if cotangents is None else [cotangents[token_output(spec)][:, index] for index in indices]
    return indices, parts, outputs


def cut(bench: Bench, example: Example) -> Iterator[Pair]:
    """Forward the final state of the head is the initial one of the tail, backward the gradient comes back the same way."""
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    spec, bounds = case.spec, bench.bounds(inputs, cotangents)
    y = token_output(spec)
    (before, after), (head, tail), directions = _pieces(spec, inputs, cotangents, at)
    lost = bench.truth(tail.replaced(state=None), None)
    kept = {y: bounds[y].at(slice(None), after), "final_state": bounds["final_state"]}
    if not visible(lost, kept):
        raise Blind("a state lost at the cut would not show")
    first = bench.run(head, None)
    if cotangents is None:
        second = bench.run(tail.replaced(state=first["final_state"]), None)
    else:
        second = bench.run(tail.replaced(state=first["final_state"]), {y: directions[1], "final_state": cotangents["final_state"]})
        first = bench.run(head, {y: directions[0], "final_state": second["dh0"]})
    order = torch.cat([before, after]).argsort()
    whole = {}
    for name, value in first.items():
        if axes_of(spec, name)[:2] == ["B", "T"]:
            whole[name] = torch.cat([value, second[name]], 1)[:, order]
        elif name == "final_state":
            whole[name] = second[name]
        elif name == "dh0":
            whole[name] = value
    for name, got in whole.items():  # a parameter's gradient is a sum over the pieces, each stored on its own
        yield name, got, bounds[name]


def recurrent(bench: Bench, example: Example) -> Iterator[Pair]:
    """The tokens after the prompt come one at a time, by the implementation's recurrent counterpart where it has one."""
    case, at = example.case, example.at
    assert at is not None
    inputs, _ = bench.call(case)
    bounds = _with(bench, inputs, None, "recurrent")
    spec, y = case.spec, token_output(case.spec)
    tail = _tokens(spec, inputs, slice(at, None))
    ends = {y: bounds[y].at(slice(None), slice(at, None)), "final_state": bounds["final_state"]}
    if not visible(bench.truth(tail.replaced(state=None), None), ends):
        raise Blind("a state lost after the prompt would not show")
    got = bench.run(_tokens(spec, inputs, slice(0, at)), None)
    rows = [got[y]]
    for token in range(at, case.lengths[0]):
        step = _tokens(spec, inputs, slice(token, token + 1)).replaced(state=got["final_state"])
        got = bench.run(step, None, counterpart=True)
        rows.append(got[y])
    yield y, torch.cat(rows, 1), bounds[y]
    yield "final_state", got["final_state"], bounds["final_state"]


def _halves(names: Sequence[str], number: int) -> tuple[list[str], list[str]]:
    """Some of the names and the others, neither of them none: another choice for another number."""
    chosen = 1 + number % (2 ** len(names) - 2)
    some = [name for place, name in enumerate(names) if chosen >> place & 1]
    return some, [name for name in names if name not in some]


def _absent(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = bench.call(case)
    width, lengths = case.key_dim, case.lengths
    if example.variant == "gradients":
        bounds = bench.bounds(inputs, cotangents)
        with torch.no_grad():
            outputs = bench.run(inputs, None)
        for name, output in outputs.items():
            yield f"{name} under no_grad", output, bounds[name]
        for frozen in _halves(present(case.spec, inputs), case.seed) if cotangents is not None else ():
            for name, value in bench.run(inputs, cotangents, frozen=frozen).items():
                yield f"{name} with {', '.join(frozen)} frozen", value, bounds[name]
        return
    neutral = {
        "scale": lambda: inputs.replaced(scale=width**-0.5),
        "state": lambda: inputs.replaced(state=torch.zeros(len(lengths), case.value_heads, width, case.value_dim)),
        "offsets": lambda: inputs.replaced(cu_seqlens=torch.tensor([0, lengths[0]])),
        "final_state": lambda: inputs.replaced(output_final_state=False),
        "dt_bias": lambda: inputs.replaced(dt_bias=torch.zeros(inputs.a.shape[2:])),
    }[example.variant or ""]()
    if example.variant == "final_state" and cotangents is not None:
        cotangents = {**cotangents, "final_state": torch.zeros_like(cotangents["final_state"])}
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.run(inputs, cotangents), bounds)
    for name, got in bench.run(neutral, cotangents).items():
        if name in bounds:
            yield (
                f"{name} with {example.variant} {'not asked for' if example.variant == 'final_state' else 'given'}",
                got,
                bounds[name],
            )


def _norm(bench: Bench, example: Example) -> Iterator[Pair]:
    """The explicit norm stores its result in the inputs' dtype, as the chunkwise class does, before the implementation rounds."""
    case = example.case
    inputs, cotangents = bench.call(case)
    yield from pairs_of(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents))
    bounds = _with(bench, inputs, cotangents, "chunkwise")
    for when, groups in (("before", 1), ("after", case.value_heads // case.heads)):
        leaves = {name: inputs[name].detach().clone().requires_grad_() for name in ("q", "k")}
        normed = {name: _normalised(leaf.repeat_interleave(groups, dim=-2)) for name, leaf in leaves.items()}
        got = bench.run(inputs.replaced(qk_norm=False, **{name: x.detach() for name, x in normed.items()}), cotangents)
        for name, leaf in leaves.items():
            if cotangents is not None:
                (got[f"d{name}"],) = torch.autograd.grad(normed[name], leaf, got[f"d{name}"])
        for name, value in got.items():
            yield f"{name}, normalised {when} head repetition", value, bounds[name]


def _gates(bench: Bench, example: Example) -> Iterator[Pair]:
    """Gate and beta are computed in float32 outside, as oracles/gates.py says, and given: so are their gradients taken back."""
    case = example.case
    inputs, cotangents = bench.call(case)
    bounds = bench.bounds(inputs, cotangents)
    yield from pairs_of(bench.run(inputs, cotangents), bounds)
    names = [*(["a", "A_log", "dt_bias"] if case.gate_inside else []), *(["b"] if case.beta_inside else [])]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names if inputs[name] is not None}
    outside: dict[str, Tensor] = {}
    if case.gate_inside:
        raw = leaves["a"].float() + leaves.get("dt_bias", torch.zeros(()))
        speed = leaves["A_log"].exp().reshape(-1, *[1] * (raw.ndim - 3))
        outside["g"] = -speed * torch.nn.functional.softplus(raw)
    if case.beta_inside:
        beta = leaves["b"].float().sigmoid() * (2 if inputs.allow_neg_eigval else 1)
        outside["beta"] = beta.to(inputs.q.dtype)
    # What rounds outside may round inside, and the other way round: the explicit call has the errors of both.
    none = dict.fromkeys((*names, "allow_neg_eigval"))
    given = Inputs(**{**inputs, **none, **{name: x.detach() for name, x in outside.items()}})
    got = bench.run(given, cotangents)
    if cotangents is not None and leaves:
        back = [got.pop(f"d{name}") for name in outside]
        gradients = torch.autograd.grad(list(outside.values()), list(leaves.values()), back)
        got |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    explicit = bench.bounds(given, cotangents)
    for name, value in got.items():
        limit = bounds[name].beside(explicit[name]) if name in explicit else bounds[name].beside(bounds[name])
        yield f"{name} with explicit gates", value, limit


def _normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


# Equal to the bit


def _recall(bench: Bench, example: Example) -> Iterator[Pair]:
    """Keys are one-hot, beta = 1, g = 0 and v small integers: each write replaces a row of the state, nothing rounds."""
    inputs, _ = bench.call(example.case)
    got = bench.run(inputs, None)
    for name, want in bench.truth(inputs, None).items():
        yield name, got[name], want


def future(bench: Bench, example: Example) -> Iterator[Pair]:
    """All that comes from token `at` on changes, of all sequences, parameters aside."""
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    spec, names = case.spec, present(case.spec, inputs, "B", "T")
    place = torch.cat([torch.arange(length) for length in case.lengths]).reshape(inputs[names[0]].shape[:2])
    later = _later(case).inputs()
    changed = inputs.replaced(
        **{name: torch.where(spread(place >= at, inputs[name], 0), later[name], inputs[name]) for name in names}
    )
    once, twice = bench.run(inputs, cotangents), bench.run(changed, cotangents)
    past = place < at
    for name in (token_output(spec), "dq"):
        if name in once:
            yield f"{name} before token {at}", twice[name][past], once[name][past]


def _later(case: Any) -> Any:
    """The same shapes with other values, and other decays where there are any."""
    if case.operation == "delta_rule" or not hasattr(case, "gate"):
        return with_others(case)
    return dataclasses.replace(with_others(case), gate="saturated" if case.gate != "saturated" else "10")


def samples(bench: Bench, example: Example) -> Iterator[Pair]:
    """What the changed sequence shares with the others are parameters, whose gradients are not compared."""
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    spec, names = case.spec, present(case.spec, inputs, "B", "T")
    shape = inputs[names[0]].shape[:2]
    sample = torch.cat([torch.full((length,), row) for row, length in enumerate(case.lengths)]).reshape(shape)
    rows, other = torch.arange(len(case.lengths)) != at, with_others(case).inputs()
    mixed = {name: torch.where(spread(sample == at, inputs[name], 0), other[name], inputs[name]) for name in names}
    mixed |= {name: torch.where(spread(rows, inputs[name], 0), inputs[name], other[name]) for name in present(spec, inputs, "N")}
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
    for name, got in twice.items():
        axes = axes_of(spec, name)
        if axes[0] == "N" or axes[:2] == ["B", "T"]:
            keep = rows if axes[0] == "N" else sample != at
            yield f"{name} of the other sequences", got[keep], once[name][keep]


def _heads(bench: Bench, example: Example) -> Iterator[Pair]:
    """With one key head only the value head's own inputs change; with several, its key head's whole group does."""
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    group = case.value_heads // case.heads
    other = with_others(case).inputs()
    values = torch.arange(case.value_heads)
    touched = values // group == at // group if case.heads > 1 else values == at
    keys = torch.arange(case.heads) == (at // group if case.heads > 1 else -1)
    spec, mixed = case.spec, {}

    def own(name: str) -> tuple[int, Tensor] | None:
        """The axis of its heads, and which of them change."""
        for letter, mask in (("H", keys), ("HV", touched)):
            if (axis := along(spec, name, letter)) is not None:
                return axis, mask
        return None

    for name in present(spec, inputs):
        if (mine := own(name)) is not None:
            mixed[name] = torch.where(spread(mine[1], inputs[name], mine[0]), other[name], inputs[name])
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
    for name, got in twice.items():
        mine = own(name)
        if mine is not None and (case.heads > 1 or mine[1] is touched):
            kept: tuple[Any, ...] = (*[slice(None)] * mine[0], ~mine[1])
            yield f"{name} of the other heads", got[kept], once[name][kept]


def _permuted(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = bench.call(case)
    group = case.value_heads // case.heads
    keys = torch.arange(case.heads).roll(1)
    values = torch.arange(case.value_heads).reshape(case.heads, group).roll(1, 0).flatten()
    rows = torch.arange(len(case.lengths)).roll(1)
    starts = case.starts()
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows.tolist()])

    def moved(name: str, x: Tensor) -> Tensor:
        axes = axes_of(case.spec, name)
        for letter, order in (("H", keys), ("HV", values), ("N", rows)):
            if letter in axes:
                x = x.index_select(axes.index(letter), order)
        return x.flatten(0, 1)[tokens].reshape(x.shape) if axes[:2] == ["B", "T"] else x

    there = inputs.replaced(**{name: moved(name, inputs[name]) for name in present(case.spec, inputs)})
    if inputs.cu_seqlens is not None:
        ends = torch.tensor([0, *(case.lengths[row] for row in rows.tolist())]).cumsum(0)
        there = there.replaced(cu_seqlens=ends.to(inputs.cu_seqlens.dtype))
    turned = None if cotangents is None else {name: moved(name, x) for name, x in cotangents.items()}
    got = bench.run(there, turned)
    if bench.domain.position_independent:
        once = bench.run(inputs, cotangents)
        for name, value in got.items():
            yield f"{name} permuted", value, moved(name, once[name])
    else:
        for name, bound in bench.bounds(there, turned).items():
            yield f"{name} permuted", got[name], bound


def _linear(bench: Bench, example: Example) -> Iterator[Pair]:
    """A factor of -2 rounds nothing, so it passes through every product and sum; sums round, so `sum` has a bound."""
    inputs, cotangents = bench.call(example.case)
    if example.variant == "sum":
        odd = torch.arange(inputs.v.shape[1]).reshape(1, -1, 1, 1) % 2 == 1
        parts = [
            inputs.replaced(v=torch.where(odd, inputs.v, 0)),
            inputs.replaced(v=torch.where(odd, 0, inputs.v), state=None),
        ]
        runs, limits = [bench.run(part, None) for part in parts], [bench.bounds(part, None) for part in parts]
        for name in runs[0]:
            got = runs[0][name].double() + runs[1][name].double()
            yield f"{name}, summed over even and odd tokens' values", got, limits[0][name].plus(limits[1][name])
        return
    once = bench.run(inputs, cotangents)
    if example.variant == "values":
        state = None if inputs.state is None else -2 * inputs.state
        twice = bench.run(inputs.replaced(v=-2 * inputs.v, state=state), cotangents)
        for name, got in twice.items():
            factor = 1 if name in ("dv", "dh0") else -2
            yield f"{name} with v and state times -2", _normal(got), _normal(factor * once[name])
    else:
        assert cotangents is not None
        factor = 0 if example.variant == "zero_cotangents" else -2
        twice = bench.run(inputs, {name: factor * x for name, x in cotangents.items()})
        for name, got in twice.items():
            if name.startswith("d"):
                due = factor * once[name]
                pair = (_normal(got), _normal(due)) if factor else (got, due)
                yield f"{name} with cotangents times {factor}", *pair


UNDERFLOW = 2.0**-100  # of which the subnormal step of float32 is 2^-49


def _normal(x: Tensor) -> Tensor:
    """x, zeros for what is so small that subnormal numbers, which do round under a factor of two, went into it."""
    return torch.where(x.abs() < UNDERFLOW, 0.0, x)


def memory(bench: Bench, example: Example) -> Iterator[Pair]:
    """Judged twice by its bounds where runs differ by right."""
    inputs, cotangents = bench.call(example.case)
    once, twice = (bench.run(inputs, cotangents, poison=poison) for poison in (float("nan"), -3.0e4))
    if bench.domain.deterministic:
        for name, got in twice.items():
            yield f"{name} of a second run", got, once[name]
    else:
        bounds = bench.bounds(inputs, cotangents)
        for results in (once, twice):
            yield from pairs_of(results, bounds)


def again(bench: Bench, example: Example) -> Iterator[Pair]:
    """CALLS of them: what the first sets up, and the second records or tunes, serves from the third on.

    Memory holds the same poison in each, so a difference is the implementation's own. Each is judged by its bounds where runs
    differ by right.
    """
    inputs, cotangents = bench.call(example.case)
    runs = [bench.run(inputs, cotangents) for _ in range(CALLS)]
    if bench.domain.deterministic:
        for number, results in enumerate(runs[1:], 2):
            for name, got in results.items():
                yield f"{name} of call {number}, as of the first", got, runs[0][name]
    else:
        bounds = bench.bounds(inputs, cotangents)
        for number, results in enumerate(runs, 1):
            for name, got in results.items():
                yield f"{name} of call {number}", got, bounds[name]


def batch(bench: Bench, example: Example) -> Iterator[Pair]:
    """All calls are of the case's form, packed or not: of two forms a compiler makes two programs, and bits may differ by right.

    A parameter's gradient is a sum over all sequences, and is not compared.
    """
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = bench.call(case)
    few = [*range(len(case.lengths))]
    batches, alone = [few, few * -(-CROWD // len(few))], _sequences_of(case, inputs, cotangents, [at])
    want: Results | dict[str, Bound]
    if bench.domain.position_independent:
        want = bench.run(*alone)
    else:
        want, batches = bench.bounds(*alone), [[at], *batches]
    for rows in batches:
        last = len(rows) - 1 - rows[::-1].index(at)
        end = sum(case.lengths[row] for row in rows[: last + 1])
        for name, x in bench.run(*_sequences_of(case, inputs, cotangents, rows)).items():
            axes = axes_of(case.spec, name)
            if axes[:2] == ["B", "T"]:
                x = x.flatten(0, 1)[end - case.lengths[at] : end].unsqueeze(0)
            elif axes[0] == "N":
                x = x[last : last + 1]
            else:
                continue
            yield f"{name} of sequence {at}, one of {len(rows)}", x, want[name]


def _sequences_of(case: Any, inputs: Inputs, cotangents: Cotangents, rows: list[int]) -> tuple[Inputs, Cotangents]:
    """The call of some of the case's sequences, in that order; one may come several times."""
    starts = case.starts()
    index = torch.tensor(rows)
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
    shape = (1, len(tokens)) if case.packed else (len(rows), case.lengths[0])

    def part(name: str, x: Tensor) -> Tensor:
        axes = axes_of(case.spec, name)
        if axes[:2] == ["B", "T"]:
            return x.flatten(0, 1)[tokens].reshape(*shape, *x.shape[2:])
        return x[index] if axes[0] == "N" else x

    there = inputs.replaced(**{name: part(name, inputs[name]) for name in present(case.spec, inputs)})
    if inputs.cu_seqlens is not None:
        ends = torch.tensor([0, *(case.lengths[row] for row in rows)]).cumsum(0)
        there = there.replaced(cu_seqlens=ends.to(inputs.cu_seqlens.dtype))
    return there, None if cotangents is None else {name: part(name, x) for name, x in cotangents.items()}


def strides(bench: Bench, example: Example) -> Iterator[Pair]:
    """Not to the bit: copying strided inputs first and computing on them as they lie are both right."""
    inputs, cotangents = bench.call(example.case)
    views = {name: view(inputs[name], example.variant or "") for name in present(example.case.spec, inputs)}
    turned = None if cotangents is None else {name: view(x, example.variant or "") for name, x in cotangents.items()}
    inputs = inputs.replaced(**views)
    bounds = bench.bounds(inputs, turned)
    for name, got in bench.run(inputs, turned).items():
        yield f"{name} from {example.variant} inputs", got, bounds[name]


def view(x: Tensor, how: str) -> Tensor:
    """x in other strides, NaN all around it in memory; `expanded` repeats its first head (or token) with stride 0."""
    if how == "transposed":
        return banded(x.transpose(-1, -2), 1).transpose(-1, -2) if x.ndim > 1 else x
    if how == "expanded":
        axis = min(2 if x.ndim < 4 or x.shape[1] == 1 else 1, x.ndim - 1)
        axis = 0 if x.shape[axis] == 1 else axis
        return x.narrow(axis, 0, 1).expand_as(x) if x.numel() else x
    if how == "strided":  # every second element
        wide = x.new_full((*x.shape[:-1], x.shape[-1] * 2), float("nan"))
        wide[..., ::2] = x
        return wide[..., ::2]
    if how == "offset":  # dense, but not where an allocation starts
        flat = x.new_full((x.numel() + 3,), float("nan"))
        flat[3:] = x.flatten()
        return flat[3:].view(x.shape)
    return banded(x, 2)


def banded(x: Tensor, width: int) -> Tensor:
    """x as a slice of a larger tensor whose margins, `width` on each side of every axis, are NaN."""
    wide = x.new_full([size + 2 * width for size in x.shape], float("nan"))
    inner = wide[tuple(slice(width, width + size) for size in x.shape)]
    return inner.copy_(x)


def pure(bench: Bench, example: Example) -> Iterator[Pair]:
    """Checked bit for bit, the memory around the inputs included, which is NaN and must stay so."""
    inputs, cotangents = bench.call(example.case)
    views = {name: view(inputs[name], "offset") for name in present(example.case.spec, inputs)}
    turned = None if cotangents is None else {name: view(x, "offset") for name, x in cotangents.items()}
    memory = {f"input {name}": x for name, x in views.items()}
    memory |= {f"cotangent of {name}": x for name, x in (turned or {}).items()}
    if inputs.cu_seqlens is not None:
        memory["input cu_seqlens"] = inputs.cu_seqlens
    copies = {name: bytes_of(x).clone() for name, x in memory.items()}
    bench.run(inputs.replaced(**views), turned)
    for name, x in memory.items():
        yield f"bytes of {name}", bytes_of(x), copies[name]


def bytes_of(x: Tensor) -> Tensor:
    """The whole allocation behind x."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


# The book


def several(case: Any) -> range:
    """The sequences that have tokens, as a range: those of a case without empty ones, where there are two or more."""
    return range(len(case.lengths)) if len(case.lengths) > 1 and min(case.lengths) > 0 else range(0)


def inner(case: Any) -> range:
    """The tokens at which a sequence can be cut in two."""
    return range(1, max(case.lengths))


def _value_heads(case: Case) -> range:
    return range(case.value_heads) if case.value_heads > 1 else range(0)


def steps(case: Any) -> range:
    """Where a prompt may end so that few tokens are left to step through."""
    return range(max(1, case.lengths[0] - 3), case.lengths[0])


def has_words(**wanted: str) -> Callable[[Any, str | None], str | None]:
    """What a case lacks of the words wanted."""

    def lacks(case: Case, _: str | None) -> str | None:
        words = case.words()
        return next((f"{name}={value}" for name, value in wanted.items() if words[name] != value), None)

    return lacks


def _absent_lacks(case: Case, variant: str | None) -> str | None:
    if variant == "offsets":
        return one_batch_row(case, variant)
    if variant == "dt_bias" and not (case.gate_inside and not case.dt_bias):
        return "in_kernel=gate|both dt_bias=no"
    wanted = {"scale": {"scale": "default"}, "state": {"state": "none"}}.get(variant or "", {})
    return has_words(**wanted)(case, variant)


def one_batch_row(case: Any, _: str | None) -> str | None:
    """What a case lacks to be one sequence that is not packed."""
    return "one sequence, packed=no" if case.packed or len(case.lengths) > 1 else None


def _linear_lacks(case: Case, variant: str | None) -> str | None:
    if variant != "sum":
        if case.dtype == "fp16" or case.gate not in REMEMBERING or case.values in ("small", "scaled", "zero_rows"):
            return "numbers away from underflow (no fp16, gate=" + "|".join(REMEMBERING) + ", ordinary values)"
        if _vanishes(case):
            return "numbers away from underflow (gate=forever in the kernel has gradients of 1e-35 and less)"
        if variant != "values" and not case.backward:
            return "backward=yes"
    return None


def _vanishes(case: Case) -> bool:
    """Whether gradients come with a factor of exp(A_log) that is next to nothing."""
    return case.gate_inside and case.gate == "forever"


def _recall_lacks(case: Case, _: str | None) -> str | None:
    if case.values != "one_hot":
        return "values=one_hot"
    exact = case.scale != "default" or case.key_dim in (1, 4, 16, 64, 256, 1024)
    return None if exact else "a scale that is a power of two: scale=one"


def _near(domain: Domain) -> Domain:
    """The domain with lengths as where kernels are interpreted: tokens one at a time are as slow on a GPU."""
    return dataclasses.replace(domain, reach=1)


def _remember(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    options: dict[str, Any] = {"gate": REMEMBERING, "beta": ("ordinary", "edges"), **more}
    options.setdefault("values", ("ordinary", "correlated", "zero_rows", "scaled"))
    return cases(domain, **options)


def require(**flags: bool) -> Callable[[Any], str | None]:
    """What a domain lacks of the flags wanted."""

    def needs(domain: Any) -> str | None:
        lacking = [name for name, value in flags.items() if getattr(domain, name) != value]
        return f"{lacking[0].replace('_', ' ')} is not supported" if lacking else None

    return needs


def _absent_examples(domain: Domain) -> st.SearchStrategy[Example]:
    small: dict[str, Any] = {"longest": 80, "total": 160, "value_heads": 2}
    choices = [examples_of(cases(domain, **small), None, ("final_state",))]
    if domain.backward:
        choices.append(examples_of(cases(domain, **small), None, ("gradients",)))
    if domain.scale:
        choices.append(examples_of(cases(domain, scale="default", **small), None, ("scale",)))
    if domain.initial_state:
        choices.append(examples_of(cases(domain, state="none", **small), None, ("state",)))
    if domain.packed and domain.batched:
        choices.append(examples_of(cases(domain, packed=False, sequences=(1, 1), **small), None, ("offsets",)))
    inside = tuple(name for name in domain.in_kernel if name in ("gate", "both"))
    if inside and domain.dt_bias:
        choices.append(examples_of(cases(domain, in_kernel=inside, dt_bias=False, **small), None, ("dt_bias",)))
    return either(choices)


def _linear_examples(domain: Domain) -> st.SearchStrategy[Example]:
    calm: dict[str, Any] = {
        "gate": REMEMBERING,
        "values": ("ordinary", "correlated", "repeated"),
    }
    exact = tuple(dtype for dtype in domain.dtypes if dtype != "fp16")
    small: dict[str, Any] = {"longest": 130, "total": 130, "value_heads": 2}
    choices = [examples_of(_remember(domain, **small), None, ("sum",))]
    if exact:  # fp16's subnormals, from 6e-5 down, do round under a factor of two
        variants = ("values", "cotangents", "zero_cotangents") if domain.backward else ("values",)
        normal = cases(domain, dtype=exact, **calm, **small).filter(lambda case: not _vanishes(case))
        choices.append(examples_of(normal, None, variants))
    return either(choices)


def _small(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    options: dict[str, Any] = {"longest": 130, "total": 180, "value_heads": 4, "sequences": (1, 3), **more}
    return cases(domain, **options)


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "oracle",
            "truth",
            "every output and every gradient equals the float64 definition",
            lambda domain: examples_of(cases(domain, longest=260, total=280, value_heads=8)),
            oracle,
        ),
        Law(
            "recurrent",
            "truth",
            "a prompt at once and then one token at a time gives what one run gives: chunkwise equals recurrent",
            lambda domain: examples_of(
                _remember(_near(domain), packed=False, sequences=(1, 1), longest=80, total=80, value_heads=2, backward=False), steps
            ),
            recurrent,
            require(initial_state=True, batched=True),
            place=steps,
            lacks=one_batch_row,
        ),
        Law(
            "packed",
            "truth",
            "packed sequences give what each gives alone",
            lambda domain: examples_of(
                _remember(domain, packed=True, sequences=(2, 3), longest=100, total=170, value_heads=2), several
            ),
            packed,
            require(packed=True, batched=True),
            place=several,
            lacks=has_words(packed="yes"),
        ),
        Law(
            "cut",
            "truth",
            "a sequence may be cut anywhere if the state is carried over the cut, backward too",
            lambda domain: examples_of(
                _remember(
                    domain,
                    longest=130,
                    total=150,
                    value_heads=2,
                    sequences=(1, 2 if domain.empty or domain.batched else 1),
                    **({} if domain.empty or not domain.batched else {"packed": False}),
                ),
                inner,
            ),
            cut,
            require(initial_state=True),
            place=inner,
        ),
        Law(
            "absent",
            "truth",
            "an optional argument left out means its neutral value, and gradients not asked for change nothing else",
            _absent_examples,
            _absent,
            variants=("scale", "state", "offsets", "final_state", "dt_bias", "gradients"),
            lacks=_absent_lacks,
        ),
        Law(
            "norm",
            "truth",
            "L2 norm in the kernel equals an explicit one, before or after head repetition, eps included",
            lambda domain: examples_of(
                cases(
                    domain,
                    qk_norm=True,
                    longest=80,
                    total=100,
                    sequences=(1, 2),
                    values=("ordinary", "small", "zero_rows", "large"),
                )
            ),
            _norm,
            require(qk_norm=True),
            lacks=has_words(qk_norm="yes"),
        ),
        Law(
            "gates",
            "truth",
            "gate and beta computed in the kernel equal explicit ones, with the gradients of A_log, dt_bias, a and b",
            lambda domain: examples_of(cases(domain, in_kernel=_inside(domain), longest=130, total=150, sequences=(1, 2))),
            _gates,
            lambda domain: None if _inside(domain) else "computes no gate and no beta",
            lacks=lambda case, _: None if case.in_kernel != "none" else "in_kernel=gate|beta|both",
        ),
        Law(
            "linear",
            "exact",
            "outputs are linear in (v, state) and gradients in the cotangents; a factor of -2 is exact to the bit",
            _linear_examples,
            _linear,
            variants=("values", "cotangents", "zero_cotangents", "sum"),
            lacks=_linear_lacks,
        ),
        Law(
            "recall",
            "exact",
            "with one-hot keys, beta = 1 and no decay the last value written is read back, bit for bit",
            lambda domain: examples_of(
                _small(
                    domain,
                    values="one_hot",
                    gate="forever",
                    beta="one",
                    in_kernel="none",
                    qk_norm=False,
                    scale="one" if domain.scale else "default",
                    backward=False,
                    **({} if domain.scale else {"key_dim": _root_widths(domain)}),
                )
            ),
            _recall,
            lambda domain: (
                "explicit gates are not supported"
                if "none" not in domain.in_kernel
                else None
                if domain.scale or _root_widths(domain)
                else "scale is not supported"
            ),
            lacks=_recall_lacks,
        ),
        Law(
            "future",
            "exact",
            "the past does not see the future: later tokens change no earlier output or query gradient, bit for bit",
            lambda domain: examples_of(_small(domain), inner),
            future,
            place=inner,
        ),
        Law(
            "samples",
            "exact",
            "sequences do not interfere: changing one changes nothing of the others, bit for bit",
            lambda domain: examples_of(_small(domain, sequences=(2, 3)), several),
            samples,
            place=several,
        ),
        Law(
            "heads",
            "exact",
            "heads do not interfere: changing one changes nothing of the others, bit for bit",
            lambda domain: examples_of(_small(domain, groups=_many(domain)), _value_heads),
            _heads,
            place=_value_heads,
        ),
        Law(
            "permuted",
            "truth",
            "permuting sequences and head groups permutes the results, to the bit where that is promised",
            lambda domain: examples_of(_small(domain, sequences=(1, 3), groups=_many(domain))),
            _permuted,
        ),
        Law(
            "memory",
            "exact",
            "a second run over other uninitialised memory gives the same bits, where runs are deterministic",
            lambda domain: examples_of(_small(domain)),
            memory,
        ),
        Law(
            "again",
            "exact",
            "the same call gives the same bits, the third time too, where runs are deterministic",
            lambda domain: examples_of(_small(domain)),
            again,
        ),
        Law(
            "batch",
            "truth",
            "a sequence alone gives what it gives in a batch of few or many, to the bit where that is promised",
            lambda domain: examples_of(_small(domain, sequences=(2, 3), longest=34, total=48, value_heads=2), several),
            batch,
            place=several,
        ),
        Law(
            "strides",
            "truth",
            "inputs and cotangents may lie in memory in any strides",
            lambda domain: examples_of(_small(domain, sequences=(1, 2)), None, VIEWS),
            strides,
            require(views=True),
            variants=VIEWS,
        ),
        Law(
            "pure",
            "exact",
            "a call changes neither its inputs nor the memory around them",
            lambda domain: examples_of(_small(domain)),
            pure,
        ),
    )
}


def _inside(domain: Domain) -> tuple[str, ...]:
    """What of gate and beta it computes, where it can be given them too."""
    return tuple(name for name in domain.in_kernel if name != "none") if "none" in domain.in_kernel else ()


def _root_widths(domain: Domain) -> tuple[int, ...]:
    """The key widths of a domain whose default scale, one over their root, is a power of two."""
    least, most = domain.key_dims
    return tuple(width for width in (1, 4, 16, 64, 256) if least <= width <= most and width % domain.width_step == 0)


def _many(domain: Domain) -> tuple[tuple[int, int], ...]:
    return ((2, 2), (2, 4), (3, 3), (1, 2)) if domain.grouped_heads else ((2, 2), (3, 3))
