"""The bench: calls an adapter for a law, checks every call, and provides the truth and the tolerances.

Around every call, uninitialised memory is filled with poison, and we check that inputs are unchanged and that outputs have the
shapes and dtypes of the operation's contract.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from oracles.operation import Inputs, Operation
from oracles.rule.segments import Restarts
from oracles.tolerance import bound
from oracles.tolerance.bound import Bound, Finer
from properties.laws.law import Cotangents, Results, with_one_state, with_options
from properties.rules.case import Case
from verify.adapters.base import Adapter
from verify.bench import ways
from verify.bench.addresses import Spot
from verify.bench.answer import outputs_of
from verify.bench.at_once import TIMES, in_threads, on_streams
from verify.bench.calling import Calling
from verify.bench.failing import Counts, FailingOperation
from verify.bench.faults import AdapterFault, OutOfMemory
from verify.bench.guards import Copies, Guards, changed, poisoned
from verify.bench.memo import MEMO
from verify.bench.placing import between, in_layout, placed, refill, shares_a_slot, tensors_of
from verify.gpu import device as devices
from verify.interpreter import races
from verify.process.outcome import FailureKind
from verify.process.stacks import Mark, marked

T = TypeVar("T")
UNLIKE: weakref.WeakKeyDictionary[Adapter, set[str]] = weakref.WeakKeyDictionary()  # promises that this process saw not kept
WARM = 2  # calls before those that are timed
LEAD_MS = 3.0  # the GPU waits so long while the CPU launches the kernels of a timed call


class Ready(Protocol):
    """The inputs and bounds of a case that were made together with those of others (verify/execution/shared_bounds.py)."""

    @property
    def bytes(self) -> int:
        """The bytes of the tensors of all cases together, as long as the bounds are not made."""

    def call(self) -> tuple[Inputs, Cotangents]:
        """The case's inputs, and its cotangents if it has a backward."""

    def bounds(self, algorithm: str) -> dict[str, Bound]:
        """The case's bounds for a class of algorithm."""


class AdapterBench(Calling):
    """A Bench (properties/laws/law.py) for one adapter and one case."""

    def __init__(
        self, adapter: Adapter, counterpart: Adapter | None, case: Case, products: str = "ieee", device: str = "cpu"
    ) -> None:
        super().__init__(adapter, device)
        self.case, self.products = case, products
        self.law_device = device  # a law creates its tensors where the results are
        self.counterpart = counterpart or adapter
        self.norm: dict[str, Any] = {}  # qk_norm_eps and qk_norm_form in place of those of the case
        self.ready: Ready | None = None

    @property
    def algorithm(self) -> str:
        """The class of algorithm that a run is judged by."""
        return str(self.says("algorithm"))

    def call(self, case: Any) -> tuple[Inputs, Cotangents]:
        """The inputs of a case and, if it has a backward, its cotangents, all on the device."""
        with self.timed("oracle_s"), devices.default("cpu"):
            if self.ready is not None and case is self.case:
                return self.ready.call()
            return self._with_norm(case.inputs(self.device)), case.cotangents(self.device) if case.backward else None

    def _with_norm(self, inputs: Inputs) -> Inputs:
        """The inputs with the norm of q and k that a run is judged by. Laws of pools make their inputs without `call`."""
        normed = inputs.get("qk_norm", "qk_norm_eps" in inputs)  # a layer has a norm in every call
        return inputs.replaced(**self.norm) if self.norm and normed else inputs

    def bounds(
        self, inputs: Inputs, cotangents: Cotangents, algorithm: str | None = None, *, restarts: Restarts = ()
    ) -> dict[str, Bound]:
        """The truth and the tolerances, for the adapter's class of algorithm or for `algorithm`."""
        inputs = self._with_norm(inputs)
        chunk, algorithm_class = self.says("chunk") if algorithm is None else None, algorithm or self.algorithm

        def bounds(name: str) -> dict[str, Bound]:
            if self.ready is not None and not restarts:
                return self.ready.bounds(name)
            spec = self._contract(inputs)
            # Begin with one disturbed run. The judge computes more of them if one cannot decide (Bound.sure). For pointwise
            # operations all runs together take about as long as one, and the errors are nearer to their tolerances.
            asked = (name, self.products, chunk, None if name == "pointwise" else 1)
            flags: dict[str, Any] = {name: self.says(name) and algorithm is None for name in ("stores", "folds", "rounds_products")}
            flags["restarts"] = restarts
            make = functools.partial(bound.bounds, spec, inputs, cotangents, *asked, **flags)
            return MEMO.get(spec, inputs, cotangents, (*asked, *flags.values()), make)

        with self.timed("oracle_s"), devices.default("cpu"):
            result = bounds(algorithm_class)
            if self.says("stores") and algorithm_class == "recurrent":
                other = bounds("chunkwise")  # a chunkwise forward, too, stores normalised keys and corrected values
                result = {name: entry.beside(other[name]) for name, entry in result.items()}
        return {name: dataclasses.replace(entry, finer=self._finer(entry)) for name, entry in result.items()}

    def _finer(self, one: Bound) -> Finer:
        def finer(over: Tensor | None = None) -> Bound:
            with self.timed("oracle_s"), devices.default("cpu"):
                assert one.finer is not None
                found = one.finer(over)
            return found if found.finer is None else dataclasses.replace(found, finer=self._finer(found))

        return finer

    def note(self, promise: str, got: Results, want: Callable[[], Results]) -> None:
        """Note whether results equal others bit for bit, which the domain does not promise.

        After the first difference in this process, nothing more is called for that promise. A call that fails is a difference.
        """
        unlike, impure = UNLIKE.setdefault(self.adapter, set()), list(self.impure)
        self.kept[promise] = False
        if promise not in unlike:
            with contextlib.suppress(AdapterFault, OutOfMemory):
                others = want()
                self.kept[promise] = all(torch.equal(value, others[name]) for name, value in got.items())
            self.impure = impure
        if not self.kept[promise]:
            unlike.add(promise)

    def truth(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """The truth without tolerances."""
        inputs = self._with_norm(inputs)
        spec = self._contract(inputs)
        with self.timed("oracle_s"), devices.default("cpu"):
            return MEMO.get(spec, inputs, cotangents, ("truth",), lambda: bound.truth(spec, inputs, cotangents))

    def _with_options(self, inputs: Inputs, adapter: Adapter, options: str | None = None) -> Inputs:
        """The inputs with the options of the case, or with `options`, as an adapter gets them.

        The one-token form gets only the options that its own domain has.
        """
        return with_options(adapter.domain, inputs, getattr(self.case, "options", "none") if options is None else options)

    def _contract(self, inputs: Inputs) -> Operation:
        """The contract of a call. ValueError if the inputs break it: implementations are only given legal calls."""
        spec: Operation = self.case.spec_of(inputs)
        spec.check(inputs)
        return spec

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
        """Call the adapter and, with cotangents, its backward. Returns outputs and gradients by name.

        `counterpart` calls the one-token form instead. `poison` fills uninitialised memory. No gradients are computed for inputs in
        `frozen`. With `same_objects` the adapter gets the tensors of `inputs` themselves, else new views of them. `options` are
        options in place of the case's. AdapterFault if the call raises or breaks the contract, OutOfMemory if memory runs out. An
        input that was changed is added to `impure`.
        """
        spec, asked, self.absent = self._contract(inputs), (inputs, cotangents), []
        inputs = self._with_options(inputs, self.counterpart if counterpart else self.adapter, options)
        inputs = in_layout(inputs, self.domain.layout)
        if not same_objects:
            inputs = inputs.replaced(**{name: placed(self.domain, x) for name, x in inputs.items() if isinstance(x, Tensor)})
            cotangents = cotangents and {name: placed(self.domain, x) for name, x in cotangents.items()}
        adapter = self.counterpart if counterpart else self.adapter
        guards = Guards(tensors_of(inputs, cotangents), around=adapter.guards and not same_objects)
        inputs, cotangents = between(inputs, cotangents, guards)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        copies, early = Copies(tensors), set[str]()
        updated = {port.name for port in spec.outputs} & tensors.keys() if self.domain.in_place else set()
        try:
            with self.watched(devices.default("cpu"), poisoned(poison), guards.known()):
                with races.accepted(if_=shares_a_slot(inputs)):
                    self._after_forward = functools.partial(self._changed_early, copies, early)
                    results = self._call(adapter, spec, inputs, cotangents, frozen, same_objects=same_objects)
                for name in updated:
                    if (results[name].data_ptr(), results[name].stride()) != (tensors[name].data_ptr(), tensors[name].stride()):
                        what = "is not the tensor that was passed, although the domain declares in_place=True"
                        raise AdapterFault(name, FailureKind.NOT_IN_PLACE, what)
                    results[name] = results[name].clone()
        finally:
            self._after_forward = None
            if not self.lost:
                for name in updated:
                    tensors[name].copy_(copies[name])  # undo the update: its result is kept, and laws pass the same inputs again
                for name in copies.changed():
                    if name not in early:
                        self.impure.append(changed(f"input {name}", "input"))
                for name in guards.written():
                    self.impure.append(changed(f"memory around {name}", "memory"))
        self._need_not_arrive(*asked)
        return results

    def _need_not_arrive(self, inputs: Inputs, cotangents: Cotangents) -> None:
        """AdapterFault if a gradient that did not reach its input has a truth other than zeros.

        A convolution of width 1, for example, need not read its initial state.
        """
        truth = self.truth(inputs, cotangents) if self.absent else {}
        for name in self.absent:
            if bool(truth[name].any()):
                raise AdapterFault(name, FailureKind.NO_GRADIENT, "is absent: no gradient reached this input", detail="input")

    def _changed_early(self, copies: Copies[str], early: set[str]) -> None:
        """Note the inputs that the forward changed, which the backward may change back. `early` gets their names.

        Not on a GPU, where we would wait for the forward, and a backward that does not wait for it would look right.
        """
        if self.device == "cpu":
            names = [name for name in copies.changed() if name not in early]
            self.impure += [changed(f"input {name}", "input", "was changed by the forward") for name in names]
            early.update(names)

    def timings(self, inputs: Inputs, cotangents: Cotangents, count: int) -> tuple[list[float], int]:
        """Call the adapter on a GPU, after a warm-up, with nothing around the calls.

        Returns the milliseconds of each of `count` calls, forward and backward, and the most bytes that they needed.
        """
        spec, times_ms, before = self._contract(inputs), list[float](), 0
        inputs = in_layout(self._with_options(inputs, self.adapter), self.domain.layout)
        with devices.default("cpu"):
            for number in range(WARM + count):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if number == WARM:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                devices.hold(LEAD_MS)
                start.record()
                self.call_implementation(self.adapter, spec, inputs, cotangents)
                end.record()
                devices.settle(self.device)
                times_ms.append(float(start.elapsed_time(end)))
        return times_ms[WARM:], torch.cuda.max_memory_allocated() - before

    def replay(self, first: Inputs, second: Inputs, cotangents: Cotangents = None) -> Results:
        """Run `first`, put the numbers of `second` into its tensors, and return the results of a second run of these tensors.

        On a GPU, a call that can be captured in a CUDA graph is captured, and the second run is the graph's replay.
        """
        spec = self._contract(first)
        first = in_layout(first, self.domain.layout)
        first, _ = between(first, None, Guards(tensors_of(first, None), around=self.adapter.guards))
        tensors = {name: value for name, value in first.items() if isinstance(value, Tensor)}
        if self.device == "cpu" or not self.domain.graphs:
            self.run(first, cotangents, same_objects=True)
            for name, tensor in tensors.items():
                refill(tensor, second[name])
            return self.run(first, cotangents, same_objects=True)
        with self.watched(devices.default("cpu")):
            return self._from_graph(spec, self._with_options(first, self.adapter), tensors, second)

    def renew(self, first: Inputs, second: Inputs, cotangents: Cotangents) -> Results:
        """Run `first`, free its tensors, and return the results of `second` in new tensors, at the same addresses if possible.

        Both calls are copied first, so nothing but the implementation may still hold what the first one got.
        """
        names = [name for name, value in second.items() if isinstance(value, Tensor)]
        places = {name: Spot(second[name]) for name in names}
        for inputs in (first, second):
            copies = inputs.replaced(**{name: place.put(inputs[name]) for name, place in places.items()})
            results = self.run(copies, cotangents, same_objects=True)
            del copies
        return results

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
        """Call the adapter in another way than `run` (verify/bench/ways.py).

        The forwards of `others` come between forward and backward. `directions` are those along which second derivatives are
        taken. Returns the outputs and gradients, and what the way has beside them.
        """
        self.way = ways.WAYS[way]([functools.partial(self._started, *other) for other in others], directions)
        try:
            return self.run(inputs, cotangents, frozen=frozen) | self.way.more
        finally:
            self.way = ways.Plain()

    def _started(self, inputs: Inputs, cotangents: Cotangents) -> Callable[[], Results]:
        """Run a forward in the plain way, in the middle of a call in another way. Returns the function that runs its backward."""
        self.way, way = ways.Plain(), self.way
        try:
            return self._forward(self.adapter, self._contract(inputs), self._with_options(inputs, self.adapter), cotangents)
        finally:
            self.way = way

    @marked(Mark.IMPLEMENTATION)
    def transformed(
        self, transform: str, inputs: Inputs, names: Sequence[str], others: Results, cotangents: Cotangents
    ) -> tuple[Results, tuple[Tensor, ...]] | None:
        """Call the adapter under torch.func.vjp, jvp or vmap of the inputs called `names`. None if that raises an error.

        `others` are the tensors that the transform takes beside the inputs: directions by name, or other inputs, where an input
        that has none is shared by both calls of "vmap along 1". A vjp takes the cotangents. Returns the outputs by name, and what
        the transform returns beside them.
        """
        spec = self._contract(inputs)
        inputs = self._with_options(inputs, self.adapter)
        found: dict[str, None] = {}

        def call(x: Inputs) -> Results:
            outputs = outputs_of(self.adapter.run(with_one_state(self.domain, x)), spec, x, self.domain)
            found.update(dict.fromkeys(outputs))
            return outputs

        function = ways.function_of(call, inputs, names)
        values = tuple(inputs[name].detach().clone() for name in names)
        with self.timed("kernel_s"), devices.default("cpu"), poisoned(float("nan")):
            try:
                if cotangents is not None:
                    given = tuple(cotangents[port.name] for port in spec.outputs if port.name in cotangents)
                else:
                    given = tuple(others[name].to(x.dtype) if name in others else x for name, x in zip(names, values, strict=True))
                outputs, more = ways.TRANSFORMS[transform](function, values, given)
            except Exception:  # whatever is raised, the transform is refused
                return None
        return {name: x.detach() for name, x in zip(found, outputs, strict=True)}, more

    def fail(self, inputs: Inputs, cotangents: Cotangents, at: int, *, made: bool = False) -> Inputs | None:
        """Call the adapter on copies of the inputs, and let operation number `at` of the call fail for lack of memory.

        With `made`, only operations that make a tensor out of nothing are counted. What is returned or raised is dropped. Returns
        the copies as the call left them; None if it has fewer operations.
        """
        copies, fault = self._with_fault(inputs, cotangents, at, "made" if made else "all")
        return copies if fault.failed else None

    def operations(self, inputs: Inputs, cotangents: Cotangents = None) -> int:
        """How many operations of torch the adapter's call on copies of the inputs has, and its backward if there are cotangents.

        What it returns or raises is dropped.
        """
        return self._with_fault(inputs, cotangents, 0)[1].seen

    @marked(Mark.IMPLEMENTATION)
    def _with_fault(
        self, inputs: Inputs, cotangents: Cotangents, at: int, counts: Counts = "all"
    ) -> tuple[Inputs, FailingOperation]:
        """Copies of the inputs as a call with a fault left them, and the fault. What the call returns or raises is dropped."""
        spec = self._contract(inputs)
        inputs = in_layout(self._with_options(inputs, self.adapter), self.domain.layout)
        copies = inputs.replaced(**{name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)})
        if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in copies.values()):
            cotangents = None  # a device has its backward in a thread of torch's, where an error of ours would end the process
        self.way = way = ways.Failing(at, counts)
        shared = shares_a_slot(copies)
        try:
            with self.timed("kernel_s"), devices.default("cpu"), poisoned(float("nan")), races.accepted(if_=shared):
                self.call_implementation(self.adapter, spec, copies, cotangents)
        except Exception:  # noqa: S110 - any error is right, and so is an answer by other means
            pass
        finally:
            self.way = ways.Plain()
        return copies, way.fault

    @marked(Mark.IMPLEMENTATION)
    def attempt(self, inputs: Inputs) -> None:
        """Call the adapter with illegal inputs, and drop what it returns or raises."""
        inputs = self._with_options(inputs, self.adapter)
        whole = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
        with self.timed("kernel_s"), devices.default("cpu"), poisoned(float("nan")), contextlib.suppress(Exception):
            self.adapter.run(with_one_state(self.domain, inputs.replaced(**whole)))

    def at_once(self, calls: Sequence[tuple[Inputs, Cotangents]], *, streams: bool) -> Iterator[tuple[int, Results]]:
        """Run calls at the same time, in threads or on CUDA streams. Yields each one's number and results, TIMES times.

        A tensor that is updated in place is a new copy each time. On streams, each call runs once alone before, unjudged.
        """
        specs = [self._contract(inputs) for inputs, _ in calls]
        calls = [(self._with_options(inputs, self.adapter), cotangents) for inputs, cotangents in calls]
        turns = [
            [
                functools.partial(self.call_implementation, self.adapter, spec, self._fresh(spec, inputs), cotangents)
                for _ in range(TIMES + streams)
            ]
            for spec, (inputs, cotangents) in zip(specs, calls, strict=True)
        ]
        shared = any(shares_a_slot(inputs) for inputs, _ in calls)
        with self.watched(devices.default("cpu"), poisoned(float("nan")), races.accepted(if_=shared)):
            results = on_streams(turns, self.device) if streams else in_threads(turns, self.device)
            devices.settle(self.device)
        yield from results
