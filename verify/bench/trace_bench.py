"""The bench of serving engines: opens an engine for a law, guards every call of it, and provides truths and tolerances."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from oracles.serving import SERVING
from oracles.tolerance import bound
from oracles.tolerance.bound import Bound
from properties.laws.law import Pair
from properties.traces.case import Batch, Sizes, TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.play import Slot
from verify.adapters.base import Engine, TraceAdapter
from verify.bench.failing import FailingOperation
from verify.bench.faults import AdapterFault
from verify.bench.guards import Guards, poisoned
from verify.bench.places import ALONG, Layout, indices, lay_out
from verify.bench.watched import WatchedBench
from verify.gpu import device as devices
from verify.interpreter import races
from verify.process.outcome import FailureKind
from verify.process.stacks import Mark, marked
from verify.reach import recorder

AXES = {
    "o": ("token", "head"),
    "state": ("head", "key row", "channel"),
    "snapshot": ("head", "key row", "channel"),
    "window": ("channel", "column"),
}


class EngineBench(WatchedBench):
    """A TraceBench (properties/traces/play.py) for one adapter and one case."""

    def __init__(self, adapter: TraceAdapter, case: TraceCase, products: str = "ieee", device: str = "cpu") -> None:
        super().__init__(device)
        self.adapter, self.case, self.products = adapter, case, products
        self.law_device = "cpu"  # laws compare copies
        self.domain: TraceDomain = adapter.domain
        self.norm: dict[str, Any] = {}  # qk_norm_eps and qk_norm_form in place of those of the case
        self.padding_rows = 0  # of the last batch, if they have a slot
        self.fault: FailingOperation | None = None  # in which the engine is called

    def open(self, sizes: Sizes, *, buffers: dict[Any, Guards] | None = None) -> "Guarded":
        """Open an engine. AdapterFault if that raises, or if its pool has another shape or dtype.

        With `buffers`, parameters and batches are in tensors that are kept there, those of one shape in the same tensors.
        """
        moved = {name: getattr(sizes, name).to(self.device, non_blocking=True) for name in ("weight", "A_log", "dt_bias")}
        guards = self.guarded(moved, buffers)
        sizes = dataclasses.replace(sizes, weight=guards["weight"], A_log=guards["A_log"], dt_bias=guards["dt_bias"])
        return Guarded(self, self.call("open", self.adapter.open, sizes), sizes, guards, buffers)

    def guarded(self, tensors: Mapping[str, Tensor], buffers: dict[Any, Guards] | None) -> Guards:
        """The tensors between guards. Tensors of the same shapes that are in `buffers` get the numbers instead."""
        shapes = tuple((name, x.shape, x.dtype) for name, x in tensors.items())
        if buffers is None or shapes not in buffers:
            guards = Guards({name: x.clone() for name, x in tensors.items()}, around=self.adapter.guards)
            return guards if buffers is None else buffers.setdefault(shapes, guards)
        for name, x in tensors.items():
            buffers[shapes][name].copy_(x)
        return buffers[shapes]

    def attempt(self, engine: "Guarded", batch: Batch) -> None:
        """Let an engine prefill requests that it has not admitted, and drop what it returns or raises."""
        moved = {key: getattr(batch, key).to(self.device, copy=True) for key in ("mixed", "a", "b")}
        with contextlib.suppress(AdapterFault):
            self.call("prefill", engine.engine.prefill, dataclasses.replace(batch, **moved))

    @contextlib.contextmanager
    def failing(self, at: int, *, allocations: bool = False) -> Iterator[FailingOperation]:
        """Let operation `at` of the engine's calls inside fail as if memory had run out, and drop what is raised."""
        self.fault = fault = FailingOperation(at, "allocations" if allocations else "all")
        try:
            yield fault
        except Exception:  # any error is right, and so is an answer by other means
            if self.lost:
                raise
        finally:
            self.fault = None

    def bounds(self, inputs: Inputs, kind: str) -> dict[str, Bound]:
        """Return the truth and the tolerances of rows. Those of a decode and of a verification are judged as recurrent."""
        algorithm, chunk = (self.says("algorithm"), self.says("chunk")) if kind == "p" else ("recurrent", None)
        with self.timed("oracle_s"), devices.default("cpu"):
            inputs = inputs.replaced(**self.norm)
            return bound.bounds(SERVING, inputs, None, algorithm, self.products, chunk, 1)

    def ask(self, name: str, method: Any) -> Any:
        """Ask the engine something that it only has to look up, without the contexts in which it computes."""
        with self.watched(output=name):
            return self.call_engine(method)

    def call(self, name: str, method: Any, *args: Any, **options: Any) -> Any:
        """Call the engine (see `watched`)."""
        shared = self.padding_rows > 1  # several programs may then write to the slot of padding rows
        contexts = (devices.default("cpu"), poisoned(float("nan")), races.accepted(if_=shared), recorder.launches())
        with self.watched(*contexts, output=name):
            with self.fault or contextlib.nullcontext():
                answer = self.call_engine(method, *args, **options)
            devices.settle(self.device)
        return answer

    @marked(Mark.IMPLEMENTATION)
    def call_engine(self, method: Any, *args: Any, **options: Any) -> Any:
        """Call a method. If a worker hangs with this frame on its stack, the implementation is to blame."""
        with recorder.arguments(self.adapter):
            return method(*args, **options)


class Guarded:
    """An engine whose calls are timed and checked."""

    def __init__(
        self, bench: EngineBench, engine: Engine, sizes: Sizes, guards: Guards, buffers: dict[Any, Guards] | None = None
    ) -> None:
        self.bench, self.engine, self.sizes, self.guards, self.buffers = bench, engine, sizes, guards, buffers
        self.given: list[Tensor] = []  # the tensors of the batch that the engine has
        if not isinstance(engine, Engine):
            raise AdapterFault(
                "open", FailureKind.TYPE, f"returned {type(engine).__name__}, must return an Engine", detail="engine"
            )
        layer = (sizes.value_heads, sizes.key_dim, sizes.value_dim)
        for name, shape, dtype in (
            ("states", layer, sizes.state_dtype),
            ("windows", (sizes.channels, sizes.width - 1), sizes.dtype),
        ):
            pool = getattr(engine, name, None)
            if not isinstance(pool, Tensor):
                raise AdapterFault(name, FailureKind.TYPE, f"is {type(pool).__name__}, must be a tensor", detail="pool")
            if name == "windows" and pool.dim() == 3:
                shape = (sizes.channels, max(sizes.width - 1, pool.shape[2]))  # `contents` selects the columns of an owner
            if tuple(pool.shape[1:]) != shape:
                raise AdapterFault(name, FailureKind.SHAPE, f"has slots of shape {tuple(pool.shape[1:])}, must have {shape}")
            if pool.dtype != dtype:
                raise AdapterFault(name, FailureKind.DTYPE, f"has dtype {pool.dtype}, must have {dtype}")

    @property
    def states(self) -> Tensor:
        """The states of all slots."""
        return self.engine.states

    @property
    def windows(self) -> Tensor:
        """The windows of all slots."""
        return self.engine.windows

    @property
    def unowned(self) -> tuple[int, ...]:
        """The slots that belong to nobody and that padding rows may write to."""
        return self.engine.unowned

    def slots(self) -> Mapping[str, int]:
        """The slot of every owner."""
        slots: Mapping[str, int] = self.bench.ask("slots", self.engine.slots)
        return slots

    def scratch(self) -> Sequence[int]:
        """The slots that requests have beside their own."""
        slots: Sequence[int] = self.bench.ask("scratch", self.engine.scratch)
        return slots

    def copies(self, owners: Sequence[str], slots: Sequence[int]) -> list[Slot]:
        """Copies, on the CPU, of what each owner has and of what slots hold. AdapterFault for another shape of an owner's."""
        return self.bench.call("contents", self._copies, owners, slots) if owners or slots else []

    def _copies(self, owners: Sequence[str], slots: Sequence[int]) -> list[Slot]:
        sizes, found = self.sizes, list[Tensor]()
        layer = (sizes.value_heads, sizes.key_dim, sizes.value_dim)
        for owner in owners:
            state, window = self.engine.contents(owner)
            for name, x, shape in (("state", state, layer), ("window", window, (sizes.channels, sizes.width - 1))):
                if tuple(x.shape) != shape:
                    what = f"has shape {tuple(x.shape)}, must have {shape}"
                    raise AdapterFault(f"{name} of contents", FailureKind.SHAPE, what, port=name)
                found.append(x.detach().clone())  # at once: an engine may return the same tensors for every owner
        found += [pool[slot].detach() for slot in slots for pool in (self.states, self.windows)]
        copied = iter(on_cpu(found))
        return [Slot(state, window) for state, window in zip(copied, copied, strict=True)]

    def admit(self, requests: Sequence[str]) -> None:
        """Give new requests slots."""
        if requests:
            self.bench.call("admit", self.engine.admit, requests)

    def prefill(self, batch: Batch) -> Tensor:
        """Process prompts."""
        o = self._rows("prefill", batch)
        self._reuse()
        return o

    def decode(self, batch: Batch) -> Tensor:
        """Process a token of each row."""
        o = self._rows("decode", batch)
        self._reuse()
        return o

    def verify(self, batch: Batch) -> Tensor:
        """Process drafts."""
        return self._rows("verify", batch)

    def commit(self, accepted: Sequence[int]) -> None:
        """Keep the accepted tokens."""
        self.bench.call("commit", self.engine.commit, accepted)
        self._reuse()

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        """Begin a request from another one."""
        self.bench.call("fork", self.engine.fork, new, old, snapshot=snapshot)

    def swap(self, request: str) -> None:
        """Take a request out of the pool and bring it back."""
        self.bench.call("swap", self.engine.swap, request)

    def transfer(self, request: str) -> None:
        """Cut what a request has for the ranks of another TP size, and put it together again."""
        self.bench.call("transfer", self.engine.transfer, request)

    def preempt(self, request: str) -> None:
        """Give the slots of a request back until it is admitted again."""
        self.bench.call("preempt", self.engine.preempt, request)

    def free(self, request: str) -> None:
        """Give the slots of a request back."""
        self.bench.call("free", self.engine.free, request)

    def _reuse(self) -> None:
        """Clear the tensors of the batch, as a server fills them again for its next step."""
        for x in self.given if self.bench.domain.refills else ():
            x.zero_()
        self.given = []

    def _rows(self, name: str, batch: Batch) -> Tensor:
        """Call the engine with a batch and check the outputs. AdapterFault for another type, shape or dtype."""
        tensors = {key: getattr(batch, key).to(self.bench.device, non_blocking=True) for key in ("mixed", "a", "b")}
        guards = self.bench.guarded(tensors, self.buffers)
        self.bench.padding_rows = batch.real.count(False) if self.sizes.padding_slot >= 0 else 0
        self.given = [guards[key] for key in tensors]
        batch = dataclasses.replace(batch, mixed=guards["mixed"], a=guards["a"], b=guards["b"])
        with guards.known(), self.guards.known():
            o = self.bench.call(name, getattr(self.engine, name), batch)
        for key in guards.written(self.guards):
            raise AdapterFault(
                f"memory around {key} of {name}", FailureKind.INPUT_CHANGED, "was changed by the call", port="memory"
            )
        shape = (sum(batch.lengths), self.sizes.value_heads, self.sizes.value_dim)
        if not isinstance(o, Tensor):
            what = f"is {type(o).__name__}, must be a tensor"
            raise AdapterFault(f"o of {name}", FailureKind.TYPE, what, detail="output", port="o")
        if tuple(o.shape) != shape:
            what = f"has shape {tuple(o.shape)}, must have {shape}"
            raise AdapterFault(f"o of {name}", FailureKind.SHAPE, what, port="o")
        if o.dtype != self.sizes.dtype:
            what = f"has dtype {o.dtype}, must have {self.sizes.dtype}"
            raise AdapterFault(f"o of {name}", FailureKind.DTYPE, what, port="o")
        return o.detach().to("cpu", copy=True)


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the CPU. All that is on a GPU is copied as one block of bytes, because each copy waits for the GPU."""
    copies: dict[int, Tensor] = {}
    for device in {x.device for x in tensors}:
        on_device = [(place, x) for place, x in enumerate(tensors) if x.device == device]
        if device.type == "cpu":
            copies |= {place: x.clone() for place, x in on_device}
            continue
        on_device.sort(key=lambda item: -item[1].element_size())  # a number begins at a multiple of its size
        block = torch.cat([x.contiguous().flatten().view(torch.uint8) for _, x in on_device]).cpu()
        parts = block.split([x.numel() * x.element_size() for _, x in on_device])
        copies |= {place: part.view(x.dtype).view(x.shape) for (place, x), part in zip(on_device, parts, strict=True)}
    return [copies[place] for place in range(len(tensors))]


def place_of(pair: Pair, flat: int, shape: torch.Size) -> str:
    """The place of a flat index in words: token and head of an output, head and key row of a state."""
    words = zip(AXES.get(pair.port, ()), indices(flat, shape), strict=False)
    return ", ".join(f"{word} {index}" for word, index in words) or f"index {', '.join(map(str, indices(flat, shape)))}"


def layout_of(pair: Pair, shape: torch.Size) -> Layout | None:
    """How the rows of a comparison lie in a picture; None if it has no such rows."""
    names = {word: name for name, word in ALONG.items()}
    return lay_out([names.get(word, "") for word in AXES.get(pair.port, ())][: len(shape)], shape)
