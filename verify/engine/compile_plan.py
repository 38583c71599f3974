"""Plans: the examples that a check of compiled kernels will run, drawn from few compile keys, on a GPU compiled ahead by others.

A case with a new compile key takes 6 s or more, a case with a compiled key 20 ms. So the palette has few keys, drawn from the
check's seed. Other processes compile what a case of each law and key launches before the checking worker reaches it. Their compiled
kernels are in Triton's cache, where the worker finds them. Their answers are ignored.
"""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from properties.books import book_of
from properties.laws.far_views import is_far
from properties.laws.history import order_of
from properties.laws.law import Law
from properties.palette import compile_cost, draw_palette, kernels_of, key_of
from properties.paths.case import ParallelCase
from properties.paths.domain import PathDomain, compiles, form_of, with_forms
from properties.rules.domain import Domain
from properties.words.example import Example
from properties.words.sizes import with_drawing
from verify.engine.compilers import Compiler, Need, Pending
from verify.engine.drawing import Enough, of_law
from verify.engine.shard import WHOLE, Shard
from verify.execution.line import Run
from verify.findings.known import NO_DEFECTS, KnownDefects
from verify.gpu.policies import is_timed
from verify.process.messages import Compile

SIZE = 8
REACH = 4  # lengths up to 512, about a thousand tokens in a case
FORWARD = ("recall",)
LONG = ("oracle", "history")  # the first has four times the cases, and a case of the other makes up to six calls


@dataclasses.dataclass
class Planned:
    """A law's examples, in order, and for each compile key and variant its compilation. `drawn`: those of other shards too."""

    examples: list[Example]
    compiled: dict[Any, Pending]
    drawn: list[Example] = dataclasses.field(default_factory=list)

    def pending(self, example: Example) -> Pending | None:
        """The compilation of the example's kernels, if a process has to end it before the example runs."""
        compilation = self.compiled.get(_key(example)) if self.compiled else None
        return None if compilation is None or compilation.done else compilation

    def wait(self, example: Example) -> None:
        """Wait until the kernels of the example are compiled."""
        if (compilation := self.pending(example)) is not None:
            compilation.wait()


class Plan:
    """The examples of a check's laws, drawn law by law in a separate thread while the first examples already run."""

    def __init__(
        self,
        domain: Any,
        laws: Iterable[str],
        seed: int,
        examples_of: Callable[[str], int],
        run_of: Callable[[str, Example], Run],
        compilers: Compiler,
        *,
        adapter: str = "",
        device: str = "cuda",
        shapes: bool = False,
        defects: KnownDefects = NO_DEFECTS,
        shard: Shard = WHOLE,
    ) -> None:
        """With `shapes`, kernels are compiled for every new shape, so that examples have few lengths too.

        The lines of `defects` are compiled first, since laws begin with them.
        """
        self.domain, laws = domain if device == "cpu" else on_gpu(domain, seed), list(laws)
        self._gpu = device != "cpu"
        palette = draw_palette(self.domain, seed, SIZE, laws) if has_keys(domain) else None
        self.palette = dataclasses.replace(palette, shapes=shapes) if palette is not None else None
        self._seed, self._examples_of, self._run_of = seed, examples_of, run_of
        self._compilers, self._defects, self._shard = compilers, defects, shard
        self._hurried: set[tuple[Any, ...]] = set()
        lines = [defect.run for law in laws for defect in defects.shown_by(adapter, law, device)]
        lines = [run for run in lines if shard.owns(run.everywhere)]
        self._known = {run: compilation for run in lines if (compilation := self._prepare(run)) is not None}
        self._thread, self._closed = concurrent.futures.ThreadPoolExecutor(1), threading.Event()
        self._planned = {law: self._thread.submit(self._plan, law) for law in laws}

    def of(self, law: str) -> Planned:
        """The examples of a law, which begins. Waits until they are drawn; CancelledError if the plan is closed before."""
        planned = self._planned[law].result()
        for compilation in planned.compiled.values():
            compilation.need = Need.BY_LAW
        return planned

    def close(self) -> None:
        """Stop drawing."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _plan(self, name: str) -> Planned:
        law = book_of(self.domain).laws[name]
        planned = Planned([], {})
        if law.needs(self.domain) is not None:
            return planned

        def look(example: Example) -> None:
            if self._closed.is_set():
                raise Enough
            planned.drawn.append(example)

        try:
            of_law(law, self.domain, self._seed, self._examples_of(name), look, self.strategy)
        except Enough:
            raise concurrent.futures.CancelledError from None
        if self.palette is not None:
            # Sorted by compile key, the cheapest to compile first: its cases run while other keys are compiled. Cases whose
            # tolerances can be computed in one call are neighbours.
            planned.drawn.sort(key=_order)
        planned.examples += [example for example in planned.drawn if self._shard.owns(self._run_of(name, example).everywhere)]
        if self.palette is None and not isinstance(self.domain, PathDomain):
            return planned
        first = dict[Any, Example]()
        for example in planned.examples:
            # Tensors that are far apart take gigabytes, which the checking worker needs.
            if _compiles(example.case) and not is_far(example.variant) and _fuller(example, first.get(_key(example))):
                first[_key(example)] = example
        for key, example in first.items():
            compilation = self._prepare(self._run_of(name, example))
            planned.compiled |= {} if compilation is None else {key: compilation}
        return planned

    def hurry(self, run: Run) -> None:
        """Let all processes together compile the kernels of a run that was not planned, and wait for them. Each key comes once."""
        example = run.example
        if not self._gpu or not _compiles(example.case) or is_far(example.variant):
            return
        if (words := self._words(run)) not in self._hurried and (pending := self._prepare(run)) is not None:
            self._compilers.hurry(pending)
        self._hurried.add(words)

    def _words(self, run: Run) -> tuple[Any, ...]:
        """What the kernels of a run depend on."""
        return (run.law, run.products, run.tune, _key(run.example), *self._defects.left_out(run))

    def _prepare(self, run: Run) -> Pending | None:
        left_out, words = self._defects.left_out(run), self._words(run)
        shared = not is_timed(run.tune)  # Triton's timing would be wrong beside others, and launches kernels
        question = Compile(str(run), left_out, denied=self._defects.denied)
        return self._compilers.prepare(question, _family(run.example.case), *words, shared=shared)

    def pending(self, run: Run) -> Pending | None:
        """The compilation of the kernels of a known defect's line, if a process has to end it before the line runs."""
        compilation = self._known.get(run)
        return None if compilation is None or compilation.done else compilation

    def strategy(self, law: Law, domain: Any) -> Any:
        """The strategy for examples of a law and a domain. On a GPU their compile keys are those of the palette."""
        law = law.on_gpu() if self._gpu else law
        return law.draw(domain) if self.palette is None else self.palette.examples(law, domain)


def has_keys(thing: Any) -> bool:
    """Whether the cases of this case's or domain's book have compile keys."""
    return bool(book_of(thing).case.KEYS)


def on_gpu(domain: Any, seed: int) -> Any:
    """The domain from which cases for a GPU are drawn: rules get longer sequences, paths get few forms that need compilation."""
    if isinstance(domain, PathDomain):
        return with_forms(domain, seed)
    return with_drawing(domain, reach=REACH) if isinstance(domain, Domain) else domain


def in_order(laws: Iterable[str]) -> list[str]:
    """The laws, with forward-only laws first: they have fewer kernels to compile, so the first results come sooner.

    Laws that take long come next, so that no worker is left with one at the end.
    """
    return sorted(laws, key=lambda law: (law not in FORWARD, law not in LONG))


def _order(example: Example) -> tuple[Any, ...]:
    case = example.case
    return compile_cost(case), str(key_of(case)), getattr(case, "scale", "")


def _fuller(example: Example, other: Example | None) -> bool:
    """Whether an example launches kernels that an earlier one with its compile key does not: those of tokens, or of gradients."""
    return other is None or _launches(example) > _launches(other)


def _launches(example: Example) -> tuple[bool, bool]:
    case = example.case
    return any(getattr(case, "lengths", (1,))), getattr(case, "backward", False)


def _key(example: Example) -> Any:
    """What has a compilation of its own.

    Of a path, lengths count as far as Triton compiles for them: whether a rank's tokens and the sequences are one or divide by 16.
    """
    case = example.case
    if not isinstance(case, ParallelCase):
        return kernels_of(case), example.variant, order_of(example)
    counts = len(case.tokens_of_ranks()[0]), len(case.lengths)
    words = [getattr(case, name) for name in case.WORDS if name not in ("lengths", "gate", "values", "seed")]
    return *words, *((count == 1, count % 16 == 0) for count in counts), example.variant


def _family(case: Any) -> Hashable:
    return form_of(case) if isinstance(case, ParallelCase) else key_of(case)


def _compiles(case: Any) -> bool:
    return compiles(case) if isinstance(case, ParallelCase) else True
