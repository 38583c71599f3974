"""Laws: what must hold of every right implementation. One law, one sentence, one function.

A law runs the implementation through a Bench and yields what to compare: (name, got, want). Where `want` is a Bound, got is
judged row by row against the float64 truth; where it is a tensor, bit for bit (0 and -0 are equal, NaN never is). A law that
finds that its case could not have seen the defect it is about says so by raising Blind.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.bound import Bound
from oracles.case import Case
from oracles.norm import EPS
from oracles.operation import Inputs, sequences
from properties.domain import VIEWS, Domain
from properties.strategies import REMEMBERING, Example, cases

Results = dict[str, Tensor]
Cotangents = dict[str, Tensor] | None
Pair = tuple[str, Tensor, Tensor | Bound]


class Blind(Exception):
    """The case could not have seen what the law is about; the message says why."""


class Breach(Exception):
    """The law is broken in a way that no comparison of tensors shows; the message says how."""


class Bench(Protocol):
    """Runs one implementation, and knows its domain, the truth, and the bounds of its class."""

    domain: Domain
    algorithm: str

    def run(self, inputs: Inputs, cotangents: Cotangents, *, counterpart: bool = False, poison: float = float("nan")) -> Results:
        """Outputs, and with cotangents gradients; uninitialised memory holds `poison`. `counterpart`: its recurrent form."""

    def bounds(self, inputs: Inputs, cotangents: Cotangents, algorithm: str | None = None) -> dict[str, Bound]:
        """The truth with the error allowed to each row, for the implementation's class of algorithm or `algorithm`."""

    def truth(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """The truth alone."""


@dataclasses.dataclass(frozen=True)
class Law:
    """`says` is the law in words, `draw` its examples, `check` its comparisons.

    Laws of kernels are given a Domain, a Bench and Cases, those of parallel paths what properties/paths.py has in their place.
    `needs` says why a domain cannot be asked, `lacks` what words a case lacks for the law to be true of it, or None.
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


def _examples(
    strategy: st.SearchStrategy[Case], place: Callable[[Case], range] | None = None, variants: tuple[str, ...] = ()
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
def _either(draw: st.DrawFn, choices: list[st.SearchStrategy[Example]]) -> Example:
    """One of the strategies, all alike often."""
    return draw(draw(st.randoms(use_true_random=True)).choice(choices))


def _given(case: Case) -> tuple[Inputs, Cotangents]:
    return case.inputs(), case.cotangents() if case.backward else None


def _pairs(got: Results, bounds: dict[str, Bound]) -> Iterator[Pair]:
    for name, bound in bounds.items():
        yield name, got[name], bound


def _with(bench: Bench, inputs: Inputs, cotangents: Cotangents, algorithm: str) -> dict[str, Bound]:
    """The bounds of the implementation's class, with what a part computed in another class may err beside it."""
    own = bench.bounds(inputs, cotangents)
    if bench.algorithm == algorithm:
        return own
    other = bench.bounds(inputs, cotangents, algorithm)
    return {name: each.beside(other[name]) for name, each in own.items()}


def _visible(moved: Results, bounds: dict[str, Bound], names: tuple[str, ...] = ("o", "final_state")) -> bool:
    """Whether any row of the named outputs moved by more than it may err, twice over."""
    for name in names:
        error, allowed = (moved[name] - bounds[name].value).norm(dim=-1), bounds[name].allowed
        if bool((error > 2 * allowed).any()):
            return True
    return False


def _other(case: Case) -> Case:
    """The same shapes with other values, of other magnitudes too: what is shared by their scale shows."""
    return dataclasses.replace(case, seed=case.seed ^ 1, values="scaled" if case.values != "scaled" else "ordinary")


# Equal to the truth


def _oracle(bench: Bench, example: Example) -> Iterator[Pair]:
    inputs, cotangents = _given(example.case)
    yield from _pairs(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents))


def _packed(bench: Bench, example: Example) -> Iterator[Pair]:
    """Blind where a state that leaked from each sequence into the next would stay inside the bound."""
    case, alone = example.case, example.at
    assert alone is not None
    inputs, cotangents = _given(case)
    bounds = bench.bounds(inputs, cotangents)
    leaked = torch.zeros_like(bounds["final_state"].value)
    leaked[1:] = bounds["final_state"].value[:-1]
    if inputs.state is not None:
        leaked = leaked + inputs.state
    if not _visible(bench.truth(inputs.replaced(state=leaked), None), bounds):
        raise Blind("a state leaking into the next sequence would not show")
    yield from _pairs(bench.run(inputs, cotangents), bounds)
    start, end = case.starts()[alone : alone + 2]
    single = _tokens(inputs, slice(start, end)).replaced(
        cu_seqlens=None, state=None if inputs.state is None else inputs.state[alone : alone + 1]
    )
    part = None
    if cotangents is not None:
        part = {"o": cotangents["o"][:, start:end], "final_state": cotangents["final_state"][alone : alone + 1]}
    for name, got in bench.run(single, part).items():
        rows = (slice(alone, alone + 1),) if name in ("final_state", "dh0") else (slice(None), slice(start, end))
        yield f"{name} of sequence {alone} alone", got, bounds[name].at(*rows)


def _tokens(inputs: Inputs, where: slice) -> Inputs:
    """The inputs at some tokens."""
    return inputs.replaced(**{name: inputs[name][:, where] for name in ("q", "k", "v", "g", "beta")})


def _pieces(inputs: Inputs, cotangents: Cotangents, at: int) -> tuple[list[Tensor], list[Inputs], list[Tensor]]:
    """Every sequence cut at token `at`: token indices, inputs and, if any, the output's cotangents before and after."""
    lengths = sequences(inputs, "q")
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
        inputs.replaced(cu_seqlens=offset, **{name: inputs[name][:, index] for name in ("q", "k", "v", "g", "beta")})
        for index, offset in zip(indices, offsets, strict=True)
    ]
    outputs = [] if cotangents is None else [cotangents["o"][:, index] for index in indices]
    return indices, parts, outputs


def _cut(bench: Bench, example: Example) -> Iterator[Pair]:
    """Forward the final state of the head is the initial one of the tail, backward the gradient comes back the same way."""
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = _given(case)
    bounds = bench.bounds(inputs, cotangents)
    (before, after), (head, tail), directions = _pieces(inputs, cotangents, at)
    lost = bench.truth(tail.replaced(state=None), None)
    kept = {"o": bounds["o"].at(slice(None), after), "final_state": bounds["final_state"]}
    if not _visible(lost, kept):
        raise Blind("a state lost at the cut would not show")
    first = bench.run(head, None)
    if cotangents is None:
        got = bench.run(tail.replaced(state=first["final_state"]), None)
        first["final_state"] = got["final_state"]
    else:
        got = bench.run(tail.replaced(state=first["final_state"]), {"o": directions[1], "final_state": cotangents["final_state"]})
        first = bench.run(head, {"o": directions[0], "final_state": got["dh0"]})
        first["final_state"] = got["final_state"]
    order = torch.cat([before, after]).argsort()
    whole = {
        name: value if name in ("final_state", "dh0") else torch.cat([value, got[name]], 1)[:, order]
        for name, value in first.items()
    }
    yield from _pairs(whole, bounds)


def _recurrent(bench: Bench, example: Example) -> Iterator[Pair]:
    """The tokens after the prompt come one at a time, by the implementation's recurrent counterpart where it has one."""
    case, at = example.case, example.at
    assert at is not None
    inputs, _ = _given(case)
    bounds = _with(bench, inputs, None, "recurrent")
    tail = _tokens(inputs, slice(at, None))
    ends = {
        "o": bounds["o"].at(slice(None), slice(at, None)),
        "final_state": bounds["final_state"],
    }
    if not _visible(bench.truth(tail.replaced(state=None), None), ends):
        raise Blind("a state lost after the prompt would not show")
    got = bench.run(_tokens(inputs, slice(0, at)), None)
    rows = [got["o"]]
    for token in range(at, case.lengths[0]):
        step = _tokens(inputs, slice(token, token + 1)).replaced(state=got["final_state"])
        got = bench.run(step, None, counterpart=True)
        rows.append(got["o"])
    yield "o", torch.cat(rows, 1), bounds["o"]
    yield "final_state", got["final_state"], bounds["final_state"]


def _absent(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = _given(case)
    width, lengths = case.key_dim, case.lengths
    neutral = {
        "scale": lambda: inputs.replaced(scale=width**-0.5),
        "state": lambda: inputs.replaced(state=torch.zeros(len(lengths), case.value_heads, width, case.value_dim)),
        "offsets": lambda: inputs.replaced(cu_seqlens=torch.tensor([0, lengths[0]])),
        "final_state": lambda: inputs.replaced(output_final_state=False),
    }[example.variant or ""]()
    if example.variant == "final_state" and cotangents is not None:
        cotangents = {**cotangents, "final_state": torch.zeros_like(cotangents["final_state"])}
    bounds = bench.bounds(inputs, cotangents)
    yield from _pairs(bench.run(inputs, cotangents), bounds)
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
    inputs, cotangents = _given(case)
    yield from _pairs(bench.run(inputs, cotangents), bench.bounds(inputs, cotangents))
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


def _normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


# Equal to the bit


def _recall(bench: Bench, example: Example) -> Iterator[Pair]:
    """Keys are one-hot, beta = 1, g = 0 and v small integers: each write replaces a row of the state, nothing rounds."""
    inputs, _ = _given(example.case)
    got = bench.run(inputs, None)
    for name, want in bench.truth(inputs, None).items():
        yield name, got[name], want


def _future(bench: Bench, example: Example) -> Iterator[Pair]:
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = _given(case)
    place = torch.cat([torch.arange(length) for length in case.lengths]).reshape(inputs.q.shape[:2])
    later = dataclasses.replace(_other(case), gate="saturated" if case.gate != "saturated" else "10").inputs()
    changed = inputs.replaced(
        **{
            name: torch.where((place >= at).reshape(*place.shape, *[1] * (inputs[name].ndim - 2)), later[name], inputs[name])
            for name in ("q", "k", "v", "g", "beta")
        }
    )
    once, twice = bench.run(inputs, cotangents), bench.run(changed, cotangents)
    past = place < at
    for name in ("o", "dq"):
        if name in once:
            yield f"{name} before token {at}", twice[name][past], once[name][past]


def _samples(bench: Bench, example: Example) -> Iterator[Pair]:
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = _given(case)
    sample = torch.cat([torch.full((length,), row) for row, length in enumerate(case.lengths)]).reshape(inputs.q.shape[:2])
    other = _other(case).inputs()
    mixed = {}
    for name in ("q", "k", "v", "g", "beta"):
        mask = (sample == at).reshape(*sample.shape, *[1] * (inputs[name].ndim - 2))
        mixed[name] = torch.where(mask, other[name], inputs[name])
    rows = torch.arange(len(case.lengths)) != at
    if inputs.state is not None:
        mixed["state"] = torch.where(rows.reshape(-1, 1, 1, 1), inputs.state, other.state)
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
    for name, got in twice.items():
        keep = rows if name in ("final_state", "dh0") else sample != at
        yield f"{name} of the other sequences", got[keep], once[name][keep]


def _heads(bench: Bench, example: Example) -> Iterator[Pair]:
    """With one key head only the value head's own inputs change; with several, its key head's whole group does."""
    case, at = example.case, example.at
    assert at is not None
    inputs, cotangents = _given(case)
    group = case.value_heads // case.heads
    other = _other(case).inputs()
    values = torch.arange(case.value_heads)
    touched = values // group == at // group if case.heads > 1 else values == at
    keys = torch.arange(case.heads) == (at // group if case.heads > 1 else -1)
    mixed = {}
    for name in ("q", "k", "v", "g", "beta", "state"):
        if inputs[name] is None:
            continue
        axis = 1 if name == "state" else 2
        mask = keys if name in ("q", "k") else touched
        mixed[name] = torch.where(mask.reshape(-1, *[1] * (inputs[name].ndim - axis - 1)), other[name], inputs[name])
    once, twice = bench.run(inputs, cotangents), bench.run(inputs.replaced(**mixed), cotangents)
    for name, got in twice.items():
        if name in ("dq", "dk"):
            if case.heads > 1:
                yield f"{name} of the other heads", got[:, :, ~keys], once[name][:, :, ~keys]
        else:
            cut = (slice(None), ~touched) if name in ("final_state", "dh0") else (slice(None), slice(None), ~touched)
            yield f"{name} of the other heads", got[cut], once[name][cut]


def _permuted(bench: Bench, example: Example) -> Iterator[Pair]:
    case = example.case
    inputs, cotangents = _given(case)
    group = case.value_heads // case.heads
    keys = torch.arange(case.heads).roll(1)
    values = torch.arange(case.value_heads).reshape(case.heads, group).roll(1, 0).flatten()
    rows = torch.arange(len(case.lengths)).roll(1)
    starts = case.starts()
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows.tolist()])

    def moved(name: str, x: Tensor) -> Tensor:
        if name in ("state", "final_state", "dh0"):
            return x[rows][:, values]
        x = x[:, :, keys] if name in ("q", "k", "dq", "dk") else x[:, :, values]
        return x.flatten(0, 1)[tokens].reshape(x.shape)

    there = inputs.replaced(**{name: moved(name, inputs[name]) for name in ("q", "k", "v", "g", "beta")})
    if inputs.state is not None:
        there = there.replaced(state=moved("state", inputs.state))
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
    inputs, cotangents = _given(example.case)
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
            yield f"{name} with v and state times -2", got, factor * once[name]
    else:
        assert cotangents is not None
        factor = 0 if example.variant == "zero_cotangents" else -2
        twice = bench.run(inputs, {name: factor * x for name, x in cotangents.items()})
        for name, got in twice.items():
            if name.startswith("d"):
                yield f"{name} with cotangents times {factor}", got, factor * once[name]


def _memory(bench: Bench, example: Example) -> Iterator[Pair]:
    inputs, cotangents = _given(example.case)
    once, twice = (bench.run(inputs, cotangents, poison=poison) for poison in (float("nan"), -3.0e4))
    if bench.domain.deterministic:
        for name, got in twice.items():
            yield f"{name} of a second run", got, once[name]
    else:
        bounds = bench.bounds(inputs, cotangents)
        for results in (once, twice):
            yield from _pairs(results, bounds)


def _strides(bench: Bench, example: Example) -> Iterator[Pair]:
    """Not to the bit: copying strided inputs first and computing on them as they lie are both right."""
    inputs, cotangents = _given(example.case)
    names = [name for name in ("q", "k", "v", "g", "beta", "state") if inputs[name] is not None]
    views = {name: view(inputs[name], example.variant or "") for name in names}
    turned = None if cotangents is None else {name: view(x, example.variant or "") for name, x in cotangents.items()}
    inputs = inputs.replaced(**views)
    got = bench.run(inputs, turned)
    for name, bound in bench.bounds(inputs, turned).items():
        yield f"{name} from {example.variant} inputs", got[name], bound


def view(x: Tensor, how: str) -> Tensor:
    """x in other strides, NaN all around it in memory; `expanded` repeats its first head (or token) with stride 0."""
    if how == "transposed":
        return banded(x.transpose(-1, -2), 1).transpose(-1, -2) if x.ndim > 1 else x
    if how == "expanded":
        axis = 2 if x.ndim < 4 or x.shape[1] == 1 else 1
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


def _pure(bench: Bench, example: Example) -> Iterator[Pair]:
    """Checked bit for bit, the memory around the inputs included, which is NaN and must stay so."""
    inputs, cotangents = _given(example.case)
    names = [name for name in ("q", "k", "v", "g", "beta", "state") if inputs[name] is not None]
    views = {name: view(inputs[name], "offset") for name in names}
    turned = None if cotangents is None else {name: view(x, "offset") for name, x in cotangents.items()}
    memory = {f"input {name}": x for name, x in views.items()}
    memory |= {f"cotangent of {name}": x for name, x in (turned or {}).items()}
    if inputs.cu_seqlens is not None:
        memory["input cu_seqlens"] = inputs.cu_seqlens
    copies = {name: _bytes(x).clone() for name, x in memory.items()}
    bench.run(inputs.replaced(**views), turned)
    for name, x in memory.items():
        yield f"bytes of {name}", _bytes(x), copies[name]


def _bytes(x: Tensor) -> Tensor:
    """The whole allocation behind x."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


# The book


def _several(case: Case) -> range:
    """The sequences that have tokens, as a range: those of a case without empty ones, where there are two or more."""
    return range(len(case.lengths)) if len(case.lengths) > 1 and min(case.lengths) > 0 else range(0)


def _inner(case: Case) -> range:
    return range(1, max(case.lengths))


def _value_heads(case: Case) -> range:
    return range(case.value_heads) if case.value_heads > 1 else range(0)


def _steps(case: Case) -> range:
    return range(max(1, case.lengths[0] - 3), case.lengths[0])


def _words(**wanted: str) -> Callable[[Case, str | None], str | None]:
    """What a case lacks of the words wanted."""

    def lacks(case: Case, _: str | None) -> str | None:
        words = case.words()
        return next((f"{name}={value}" for name, value in wanted.items() if words[name] != value), None)

    return lacks


def _absent_lacks(case: Case, variant: str | None) -> str | None:
    if variant == "offsets":
        return _one_batch_row(case, variant)
    wanted = {"scale": {"scale": "default"}, "state": {"state": "none"}}.get(variant or "", {})
    return _words(**wanted)(case, variant)


def _one_batch_row(case: Case, _: str | None) -> str | None:
    return "one sequence, packed=no" if case.packed or len(case.lengths) > 1 else None


def _linear_lacks(case: Case, variant: str | None) -> str | None:
    if variant != "sum":
        if case.dtype == "fp16" or case.gate not in REMEMBERING or case.values in ("small", "scaled", "zero_rows"):
            return "numbers away from underflow (no fp16, gate=" + "|".join(REMEMBERING) + ", ordinary values)"
        if variant != "values" and not case.backward:
            return "backward=yes"
    return None


def _recall_lacks(case: Case, _: str | None) -> str | None:
    if case.values != "one_hot":
        return "values=one_hot"
    exact = case.scale != "default" or case.key_dim in (1, 4, 16, 64, 256, 1024)
    return None if exact else "a scale that is a power of two: scale=one"


def _remember(domain: Domain, **more: Any) -> st.SearchStrategy[Case]:
    options: dict[str, Any] = {"gate": REMEMBERING, "beta": ("ordinary", "edges"), **more}
    options.setdefault("values", ("ordinary", "correlated", "zero_rows", "scaled"))
    return cases(domain, **options)


def _require(**flags: bool) -> Callable[[Domain], str | None]:
    def needs(domain: Domain) -> str | None:
        lacking = [name for name, value in flags.items() if getattr(domain, name) != value]
        return f"{lacking[0].replace('_', ' ')} is not supported" if lacking else None

    return needs


def _absent_examples(domain: Domain) -> st.SearchStrategy[Example]:
    small: dict[str, Any] = {"longest": 80, "total": 160, "value_heads": 2}
    choices = [_examples(cases(domain, **small), None, ("final_state",))]
    if domain.scale:
        choices.append(_examples(cases(domain, scale="default", **small), None, ("scale",)))
    if domain.initial_state:
        choices.append(_examples(cases(domain, state="none", **small), None, ("state",)))
    if domain.packed and domain.batched:
        choices.append(_examples(cases(domain, packed=False, sequences=(1, 1), **small), None, ("offsets",)))
    return _either(choices)


def _linear_examples(domain: Domain) -> st.SearchStrategy[Example]:
    calm: dict[str, Any] = {
        "gate": REMEMBERING,
        "values": ("ordinary", "correlated", "repeated"),
    }
    exact = tuple(dtype for dtype in domain.dtypes if dtype != "fp16")
    small: dict[str, Any] = {"longest": 130, "total": 130, "value_heads": 2}
    choices = [_examples(_remember(domain, **small), None, ("sum",))]
    if exact:  # fp16's subnormals, from 6e-5 down, do round under a factor of two
        variants = ("values", "cotangents", "zero_cotangents") if domain.backward else ("values",)
        choices.append(_examples(cases(domain, dtype=exact, **calm, **small), None, variants))
    return _either(choices)


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
            lambda domain: _examples(cases(domain, longest=260, total=280, value_heads=8)),
            _oracle,
        ),
        Law(
            "recurrent",
            "truth",
            "a prompt at once and then one token at a time gives what one run gives: chunkwise equals recurrent",
            lambda domain: _examples(
                _remember(domain, packed=False, sequences=(1, 1), longest=80, total=80, value_heads=2, backward=False), _steps
            ),
            _recurrent,
            _require(initial_state=True, batched=True),
            place=_steps,
            lacks=_one_batch_row,
        ),
        Law(
            "packed",
            "truth",
            "packed sequences give what each gives alone",
            lambda domain: _examples(
                _remember(domain, packed=True, sequences=(2, 3), longest=100, total=170, value_heads=2), _several
            ),
            _packed,
            _require(packed=True, batched=True),
            place=_several,
            lacks=_words(packed="yes"),
        ),
        Law(
            "cut",
            "truth",
            "a sequence may be cut anywhere if the state is carried over the cut, backward too",
            lambda domain: _examples(
                _remember(
                    domain,
                    longest=130,
                    total=150,
                    value_heads=2,
                    sequences=(1, 2 if domain.empty or domain.batched else 1),
                    **({} if domain.empty or not domain.batched else {"packed": False}),
                ),
                _inner,
            ),
            _cut,
            _require(initial_state=True),
            place=_inner,
        ),
        Law(
            "absent",
            "truth",
            "an optional argument left out means its neutral value",
            _absent_examples,
            _absent,
            variants=("scale", "state", "offsets", "final_state"),
            lacks=_absent_lacks,
        ),
        Law(
            "norm",
            "truth",
            "L2 norm in the kernel equals an explicit one, before or after head repetition, eps included",
            lambda domain: _examples(
                cases(
                    domain,
                    qk_norm=True,
                    longest=80,
                    total=100,
                    sequences=(1, 2),
                    values=("ordinary", "small", "zero_rows"),
                )
            ),
            _norm,
            _require(qk_norm=True),
            lacks=_words(qk_norm="yes"),
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
            lambda domain: _examples(
                _small(
                    domain,
                    values="one_hot",
                    gate="forever",
                    beta="one",
                    qk_norm=False,
                    scale="one" if domain.scale else "default",
                    backward=False,
                    **({} if domain.scale else {"key_dim": _root_widths(domain)}),
                )
            ),
            _recall,
            lambda domain: None if domain.scale or _root_widths(domain) else "scale is not supported",
            lacks=_recall_lacks,
        ),
        Law(
            "future",
            "exact",
            "the past does not see the future: later tokens change no earlier output or query gradient, bit for bit",
            lambda domain: _examples(_small(domain), _inner),
            _future,
            place=_inner,
        ),
        Law(
            "samples",
            "exact",
            "sequences do not interfere: changing one changes nothing of the others, bit for bit",
            lambda domain: _examples(_small(domain, sequences=(2, 3)), _several),
            _samples,
            place=_several,
        ),
        Law(
            "heads",
            "exact",
            "heads do not interfere: changing one changes nothing of the others, bit for bit",
            lambda domain: _examples(_small(domain, groups=_many(domain)), _value_heads),
            _heads,
            place=_value_heads,
        ),
        Law(
            "permuted",
            "truth",
            "permuting sequences and head groups permutes the results, to the bit where that is promised",
            lambda domain: _examples(_small(domain, sequences=(1, 3), groups=_many(domain))),
            _permuted,
        ),
        Law(
            "memory",
            "exact",
            "a second run over other uninitialised memory gives the same bits, where runs are deterministic",
            lambda domain: _examples(_small(domain)),
            _memory,
        ),
        Law(
            "strides",
            "truth",
            "inputs and cotangents may lie in memory in any strides",
            lambda domain: _examples(_small(domain, sequences=(1, 2)), None, VIEWS),
            _strides,
            _require(views=True),
            variants=VIEWS,
        ),
        Law(
            "pure",
            "exact",
            "a call changes neither its inputs nor the memory around them",
            lambda domain: _examples(_small(domain)),
            _pure,
        ),
    )
}


def _root_widths(domain: Domain) -> tuple[int, ...]:
    """The key widths of a domain whose default scale, one over their root, is a power of two."""
    least, most = domain.key_dims
    return tuple(width for width in (1, 4, 16, 64, 256) if least <= width <= most and width % domain.width_step == 0)


def _many(domain: Domain) -> tuple[tuple[int, int], ...]:
    return ((2, 2), (2, 4), (3, 3), (1, 2)) if domain.grouped_heads else ((2, 2), (3, 3))
