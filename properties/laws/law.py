"""Laws: what must hold for every right implementation. One law is one sentence and one function.

A law runs the implementation through a Bench and yields what to compare, as a `Pair`. It raises Blind when it finds that its case
could not have shown the defect that the law is about.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from torch import Tensor

from oracles.arithmetic.counter import mix_words
from oracles.operation import Inputs, Operation
from oracles.rule.segments import Restarts
from oracles.tolerance.bound import Bound
from properties.seeds import draw as draw_from
from properties.words.domain import AnyDomain
from properties.words.example import Example
from properties.words.options import all_values
from properties.words.sizes import ONE_BY_ONE, at_limits

Results = dict[str, Tensor]
Cotangents = dict[str, Tensor] | None
CALLS = 3
CROWD = 9  # sequences of a large batch: more than kernels unroll or vectorise for small batches


class Blind(Exception):
    """The case could not have shown the defect that the law is about; the message says why."""


class Breach(Exception):
    """The law is broken in a way that no comparison of tensors shows: `way` says how, and `what` may say more of this case."""

    def __init__(self, way: str, what: str = "") -> None:
        super().__init__(f"{way}: {what}" if what else way)
        self.way = way


class Pair(NamedTuple):
    """A comparison: what the implementation returned, and what was expected.

    If `want` is a Bound, `got` is judged row by row against the float64 truth. If `want` is a tensor, the two are compared bit for
    bit (0 and -0 are equal, NaN never is). `port` is the output or gradient, and `detail` says in words which part or call of it.
    """

    port: str
    detail: str
    got: Tensor
    want: Tensor | Bound

    @property
    def name(self) -> str:
        """The comparison in words, such as "dq of sequence 2 alone"."""
        return self.port + ("" if self.detail.startswith(",") else " ") * bool(self.detail) + self.detail


class Bench(Protocol):
    """Runs one implementation, and knows its domain, the truth and the bounds of its class."""

    domain: Any
    algorithm: str
    products: str
    device: str

    def call(self, case: Any) -> tuple[Inputs, Cotangents]:
        """Return the inputs of a case and, if it has a backward, the cotangents."""

    def run(
        self,
        inputs: Inputs,
        cotangents: Cotangents,
        *,
        counterpart: bool = False,
        poison: float = float("nan"),
        frozen: Collection[str] = (),
        same_objects: bool = False,
        options: str | None = None,
    ) -> Results:
        """Return the outputs and, with cotangents, the gradients; uninitialised memory holds `poison`.

        `counterpart` runs the recurrent form of the implementation. Inputs named in `frozen` require no gradient. With
        `same_objects` the implementation gets the tensors themselves, else new views of them. `options` are options of the
        implementation in place of the case's (properties/words/options.py).
        """

    def replay(self, first: Inputs, second: Inputs, cotangents: Cotangents = None) -> Results:
        """Run `first`, put the numbers of `second` into its tensors, and return the results of a second run of these tensors.

        On a GPU, a call that can be captured in a CUDA graph is captured, and the second run is the graph's replay.
        """

    def renew(self, first: Inputs, second: Inputs, cotangents: Cotangents) -> Results:
        """Run `first`, free its tensors, and return the results of `second` in new tensors, at the same addresses if possible."""

    def attempt(self, inputs: Inputs) -> None:
        """Call the implementation with illegal inputs, and drop what it returns or raises."""

    def under(
        self,
        way: str,
        inputs: Inputs,
        cotangents: Cotangents,
        *,
        frozen: Collection[str] = (),
        others: Sequence[tuple[Inputs, Cotangents]] = (),
        directions: Sequence[Results] = (),
    ) -> Results:
        """Return the results of a call in a way that models call kernels in, such as under checkpointing.

        The forwards of `others` come between forward and backward, and the results of the last but one are returned too, by names
        such as "later dq". With `directions` of the inputs, second derivatives are among the results, unless the implementation
        refuses them with an error.
        """

    def transformed(
        self, transform: str, inputs: Inputs, names: Sequence[str], others: Results, cotangents: Cotangents
    ) -> tuple[Results, tuple[Tensor, ...]] | None:
        """Return the outputs under torch.func.vjp, jvp or vmap and what that returns beside them, or None if it raises an error."""

    def fail(self, inputs: Inputs, cotangents: Cotangents, at: int, *, made: bool = False) -> Inputs | None:
        """Call copies of the inputs, and let operation number `at` fail. Return the copies, or None if there are fewer.

        With `made`, only operations that make a tensor out of nothing are counted.
        """

    def operations(self, inputs: Inputs, cotangents: Cotangents = None) -> int:
        """Return how many operations of torch a call of the implementation has, and its backward with cotangents."""

    def at_once(self, calls: Sequence[tuple[Inputs, Cotangents]], *, streams: bool) -> Iterator[tuple[int, Results]]:
        """Run calls at the same time, in threads or on CUDA streams, and yield each one's number and results, several times."""

    def bounds(
        self, inputs: Inputs, cotangents: Cotangents, algorithm: str | None = None, *, restarts: Restarts = ()
    ) -> dict[str, Bound]:
        """Return the truth and the error allowed to each row, for the implementation's class of algorithm or for `algorithm`.

        If the call is made in parts, `restarts` has for each sequence the tokens at which a part begins.
        """

    def truth(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """Return the truth without tolerances."""

    def note(self, promise: str, got: Results, want: Callable[[], Results]) -> None:
        """Note whether results equal others bit for bit, which the domain does not promise (properties/laws/promises.py)."""


@dataclasses.dataclass(frozen=True)
class Law:
    """One law: `says` is its sentence, `draw` makes its examples, and `check` yields its comparisons.

    Laws of kernels take a Domain, a Bench and Cases; laws of parallel paths take the corresponding classes of
    properties/paths/laws.py. `needs` returns why the law does not apply to a domain, or None. `lacks` returns the words that a case
    lacks for the law to hold for it, or None. `place` returns the possible values of `at` for a case. `about` names the operations
    of the book to which the law applies; empty means all. `outside` returns why a call that the law derives from an example is
    outside the domain, or None. `plain` says that a case without a variant has a meaning too. `of_process` says that earlier cases
    of the process may decide the result, so that a failure must show in a fresh process. `draw_gpu` replaces `draw` on a GPU;
    None if the law draws the same there. `within` returns the part of a domain to which a check keeps the law's cases when it gives
    them other words (properties/palette.py, verify/engine/climb.py); a line may lie outside this part. `always` returns the
    examples of a domain that a check with large cases has for every seed; those of `begins`, which are among them, come in a new
    process, as its first calls. `turns` returns the variants that the examples of a check have in turn, so that a check of few
    examples has them all.

    `base` marks the law of a book that judges one call by the bounds of its case: single calls are drawn for it, and it covers
    the widest space, so it has more cases than other laws. `counterpart` says that the law also calls an implementation's
    one-token form, and `several_heads` that it shows little on one head. A law with `few` shows in almost any case what it shows:
    a check gives it a quarter of the cases of other laws, or `few` if that is more.
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
    outside: Callable[[Any, Example], str | None] = lambda domain, example: None
    plain: bool = False
    of_process: bool = False
    draw_gpu: Callable[[Any], st.SearchStrategy[Example]] | None = None
    within: Callable[[Any], Any] = lambda domain: domain
    always: Callable[[Any], Sequence[Example]] = lambda domain: ()
    begins: Callable[[Any], Sequence[Example]] = lambda domain: ()
    turns: Callable[[Any], Sequence[str]] = lambda domain: ()
    base: bool = False
    counterpart: bool = False
    several_heads: bool = False
    few: int = 0

    def on_gpu(self) -> "Law":
        """Return the law with the examples that it has on a GPU."""
        return dataclasses.replace(self, draw=self.draw_gpu) if self.draw_gpu else self

    def accept(self, example: Example) -> None:
        """Raise ValueError if the law does not apply to an example; the message names the word, its value and the rule."""
        places = self.place(example.case) if self.place else None
        if places is None and example.at is not None:
            raise ValueError(f"law {self.name} takes no at, got at={example.at}")
        if places is not None and (example.at is None or example.at not in places):
            span = f"in {places[0]}..{places[-1]}" if places else "possible, but this case has no place for it"
            raise ValueError(f"at must be {span} for law {self.name} on {example.case}, got {example.at}")
        allowed = (*self.variants, None) if self.plain or not self.variants else self.variants
        if example.variant not in allowed:
            choices = f"one of {', '.join(self.variants)}{', or absent' * self.plain}" if self.variants else "absent"
            raise ValueError(f"variant must be {choices} for law {self.name}, got {example.variant}")
        if lacking := self.lacks(example.case, example.variant):
            raise ValueError(f"law {self.name} needs {lacking}, got {example.case}")


def examples_of(
    strategy: st.SearchStrategy[Any], place: Callable[[Any], range] | None = None, variants: tuple[str, ...] = ()
) -> st.SearchStrategy[Example]:
    """Return a strategy for examples: cases that have a place for the law, each with a place and a variant."""
    return _example(strategy.filter(lambda case: len(place(case)) > 0) if place else strategy, place, variants)


@st.composite
def _example(
    draw: st.DrawFn, strategy: st.SearchStrategy[Any], place: Callable[[Any], range] | None, variants: tuple[str, ...]
) -> Example:
    case = draw(strategy)
    chance = draw(st.randoms(use_true_random=True))
    at = None
    if place:
        places = place(case)
        near = [p for p in (64, 63, 65, 16, 32, 1) if p in places]
        at = chance.choice(near if near and chance.random() < 1 / 2 else places)
    return Example(case, at, chance.choice(variants) if variants else None)


def firm_examples(domain: Any, *strategies: st.SearchStrategy[Example]) -> list[Example]:
    """Return an example of each strategy, the same for every seed, for a law that always has them; none if none has limits."""
    found: list[Example] = []
    for strategy in strategies if at_limits(domain) else ():
        drawn: list[Example] = []
        with contextlib.suppress(Unsatisfiable):
            draw_from(strategy, 0, 2, drawn.append)  # Hypothesis begins with its simplest example
        found += drawn[-1:]
    return found


def firm_with_states(domain: Any, cases: st.SearchStrategy[Any], *variants: str) -> list[Example]:
    """Return a firm example of each variant, with random initial states if the domain has states."""
    drawn = cases.filter(lambda case: case.state == "random") if domain.carries else cases
    return firm_examples(domain, *(examples_of(drawn, None, (variant,)) for variant in variants))


def all_variants(strategy: st.SearchStrategy[Any], variants: Callable[[Any], Sequence[str]]) -> st.SearchStrategy[Example]:
    """Return examples of every variant that a case has, about equally often also where Hypothesis repeats parts of an example."""

    def example(case: Any) -> Example:
        names = variants(case)
        return Example(case, None, names[mix_words(0, str(case)) % len(names)])

    return strategy.map(example)


@st.composite
def either(draw: st.DrawFn, choices: list[st.SearchStrategy[Example]]) -> Example:
    """Draw from one of the strategies, all equally often."""
    return draw(draw(st.randoms(use_true_random=True)).choice(choices))


def axes_of(spec: Operation, name: str) -> list[str]:
    """Return the axes of an input, an output or a gradient, as letters."""
    ports = (*spec.inputs, *spec.outputs, *spec.gradients())
    return next(port for port in ports if port.name == name).axes.split()


def present(spec: Operation, inputs: Inputs, *axes: str) -> list[str]:
    """Return the names of the given inputs whose first axes are `axes`, indices excepted; without `axes`, of all given inputs."""
    return [
        port.name
        for port in spec.inputs
        if inputs.get(port.name) is not None and port.axes.split()[: len(axes)] == list(axes) and port.dtype != "index"
    ]


def along(spec: Operation, name: str, letter: str) -> int | None:
    """Return the position of an axis among those of a tensor, or None."""
    axes = axes_of(spec, name)
    return axes.index(letter) if letter in axes else None


def spread(mask: Tensor, like: Tensor, axis: int) -> Tensor:
    """Return a mask of the axes of `like` from `axis` on, shaped to broadcast over the remaining axes."""
    return mask.reshape(*mask.shape, *[1] * (like.ndim - axis - mask.ndim))


def bits(x: Tensor) -> Tensor:
    """Return the bits of numbers as integers, those of NaN included."""
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def token_output(spec: Operation) -> str:
    """Return the name of the first output that has tokens."""
    return next(port.name for port in spec.outputs if port.axes.startswith("B T"))


def pairs_of(got: Results, want: Mapping[str, Tensor | Bound], detail: str = "") -> Iterator[Pair]:
    """Yield every result with what is expected of it."""
    for name, value in got.items():  # there may be a bound of a final state that the run did not return
        yield Pair(name, detail, value, want[name])


def bounds_as(bench: Bench, inputs: Inputs, cotangents: Cotangents, algorithm: str) -> dict[str, Bound]:
    """Return the bounds of the implementation's class, plus those of `algorithm` if a part is computed in that other class."""
    bounds = bench.bounds(inputs, cotangents)
    if bench.algorithm in (algorithm, "pointwise"):  # pointwise operations compute in float32 in every class
        return bounds
    other = bench.bounds(inputs, cotangents, algorithm)
    return {name: bound.beside(other[name]) for name, bound in bounds.items()}


def in_two_parts(
    bench: Bench, bounds: dict[str, Bound], inputs: Inputs, cotangents: Cotangents, at: int, count: int
) -> dict[str, Bound]:
    """Return the bounds of a call that is made in two parts, the second one from token `at` of each of `count` sequences on.

    `bounds` are those of one call. The second part begins its chunks at `at`, so it rounds elsewhere. What the tolerance of one
    call does not cover is judged by runs that begin a chunk there too. Most calls need no such runs.
    """
    if bench.algorithm != "chunkwise":
        return bounds
    restarted = functools.cache(lambda: bench.bounds(inputs, cotangents, restarts=((at,),) * count))

    def of(name: str) -> Bound:
        return bounds[name].otherwise(lambda: restarted()[name])

    return {name: of(name) for name in bounds}


def many_at_once(bench: Bench, case: Any) -> None:
    """Raise Blind for over ONE_BY_ONE sequences if each of some more of them has operations of torch of its own.

    Such an implementation has no launch over all sequences, and so many would take it long.
    """
    if len(case.lengths) <= ONE_BY_ONE:
        return
    few, more = (bench.operations(bench.call(dataclasses.replace(case, lengths=case.lengths[:count]))[0]) for count in (32, 64))
    if more - few >= 32:
        raise Blind("the implementation takes sequences one by one, and so many would take it long")


def visible(moved: Results, bounds: dict[str, Bound]) -> bool:
    """Whether any row of the outputs differs from the truth by more than twice its tolerance."""
    for name, value in moved.items():
        error, allowed = value - bounds[name].value, bounds[name].settled().allowed
        if bool(((error.abs() if allowed.ndim == error.ndim else error.norm(dim=-1)) > 2 * allowed).any()):
            return True
    return False


def conventional(domain: Any, inputs: Inputs, cotangents: Cotangents) -> tuple[Inputs, Cotangents]:
    """Return a call with zeros in place of the states that a packed call of the domain does not have, and of their cotangents."""
    if inputs.get("cu_seqlens") is None:
        return inputs, cotangents
    if one_initial_state(domain) and inputs.get("state") is not None:
        inputs = inputs.replaced(state=_but_one(inputs.state, 0))
    if one_final_state(domain) and cotangents is not None:
        cotangents = {**cotangents, "final_state": _but_one(cotangents["final_state"], -1)}
    return inputs, cotangents


def one_initial_state(domain: AnyDomain) -> bool:
    """Whether only the first sequence of a packed call has an initial state."""
    return domain.initial_states == "first"


def one_final_state(domain: AnyDomain) -> bool:
    """Whether only the last sequence of a packed call returns a final state."""
    return domain.final_states == "last"


def with_one_state(domain: Any, inputs: Inputs) -> Inputs:
    """Return a call as an implementation gets it: with one initial state if that is the domain's convention for packed calls."""
    state = inputs.get("state")
    one = one_initial_state(domain) and inputs.get("cu_seqlens") is not None and isinstance(state, Tensor)
    return inputs.replaced(state=inputs.state[:1]) if one else inputs


def with_options(domain: Any, inputs: Inputs, text: str = "none") -> Inputs:
    """Return a call as an implementation gets it: with the value of every option of the domain, if it has options.

    `text` is the word `options` of the case. The values of options that the domain lacks are left out.
    """
    if not (known := domain.options):
        return inputs
    values = all_values(known, text)
    return Inputs(**{**inputs, "options": {name: values[name] for name, _ in known}})


def rolled(count: int) -> Tensor:
    """Return the numbers 0..count-1, with the last one first."""
    return torch.arange(count).roll(1)


def reordered(
    case: Any, inputs: Inputs, cotangents: Cotangents, orders: Mapping[str, Callable[[int], Tensor]], rows: Tensor | None
) -> tuple[Inputs, Cotangents, Callable[[str, Tensor], Tensor]]:
    """Return a call in another order, and a function (name, result) that puts a result of the first call into that order.

    `orders` gives the order of an axis by its letter and size. `rows` is the order of the sequences; with None, tokens are rolled
    by one, for operations in which each token is on its own.
    """
    if rows is None:
        tokens = rolled(case.tokens)
    else:
        starts = case.starts()
        tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows.tolist()])
        orders = {**orders, "N": lambda sequences: rows}

    def moved(name: str, x: Tensor) -> Tensor:
        axes = axes_of(case.spec, name)
        for letter, order in orders.items():
            if letter in axes:
                axis = axes.index(letter)
                x = x.index_select(axis, order(x.shape[axis]))
        return x.flatten(0, 1)[tokens].reshape(x.shape) if axes[:2] == ["B", "T"] else x

    reordered_inputs = inputs.replaced(**{name: moved(name, inputs[name]) for name in present(case.spec, inputs)})
    if inputs.cu_seqlens is not None and rows is not None:
        ends = torch.tensor([0, *(case.lengths[row] for row in rows.tolist())]).cumsum(0)
        reordered_inputs = reordered_inputs.replaced(cu_seqlens=ends.to(inputs.cu_seqlens.dtype))
    return reordered_inputs, None if cotangents is None else {name: moved(name, x) for name, x in cotangents.items()}, moved


def _but_one(states: Tensor, row: int) -> Tensor:
    """Return zeros but for one row."""
    kept = torch.zeros_like(states, memory_format=torch.contiguous_format)
    kept[row] = states[row]
    return kept


def with_others(case: Any, domain: Any = None) -> Any:
    """Return the case with the same shapes and other values, also of other magnitudes, so that a shared scale shows.

    If the domain has no values as large as those of "scaled", other magnitudes are smaller ones.
    """
    other = "scaled" if "scaled" in getattr(domain, "values", ("scaled",)) else "small"
    return dataclasses.replace(case, seed=case.seed ^ 1, values=other if case.values != other else "ordinary")
