"""Samples the calls of a running job and writes them as files that `gdn-verify judge` judges (docs/how-to/watch.md).

The job comes first. Whatever fails in here is caught, is said once on stderr, and costs a sample. The thread that calls the
function copies tensors on their device. A thread beside it moves the copies to the CPU and writes them
(verify/adapters/watch_files.py). A call is sampled only if the time that all samples have taken, and the time that this one is
expected to take, are within a share of the time since the job began.
"""

import atexit
import collections
import contextlib
import copy
import functools
import inspect
import os
import queue
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from oracles.operation import FLOATS, Operation
from oracles.operations import OPERATIONS, RULES
from oracles.rule.gated_delta import rule_of
from verify.adapters.watch_files import Folder, Lost, Sample, Stopped

# Arguments that flash-linear-attention and transformers call in another way.
THEIRS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "initial_state": "state",
    "use_qk_l2norm_in_kernel": "qk_norm",
    "transpose_state_layout": "state_v_first",
}
SWITCHES = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")
# These change how a call is computed, and not what it means.
MEANINGLESS = (
    "self",
    "chunk_size",
    "chunk_indices",
    "cu_seqlens_cpu",
    "disable_recompute",
    "use_graph",
    "max_num_seqs",
    "safe_gate",
)
BEGIN_RATE = 2e-9  # seconds a byte, until the first sample has shown how many it takes
FIXED = 2**20  # the bytes that take as long as what a sample takes whatever its size
COPIES = 3  # the bytes of outputs, cotangents and gradients, as a multiple of those of the inputs; an estimate
PATIENCE_S = 60.0  # a call whose backward has not come until then is written without gradients
EXIT_S = 2.0  # for which the end of the process may wait for a sample that is being written
NOT_WRITTEN = "a call was not written: the process ended"
W = TypeVar("W", bound=Callable[..., Any])


def watch(
    watched: W,
    *,
    every: int = 1000,
    out: str | os.PathLike[str],
    share: float = 0.01,
    keep: int = 16,
    gradients: bool = True,
    statistics: bool = False,
    operation: str | None = None,
    algorithm: str | None = None,
    products: str | None = None,
    chunk: int | None = None,
    names: Mapping[str, str | None] = types.MappingProxyType({}),
    layout: Mapping[str, str] = types.MappingProxyType({}),
) -> W:
    """Return a function that calls `watched` and samples its calls, or return the module `watched`, with hooks.

    Of `every` calls at most one is written to a folder of this process in `out`, of which the newest `keep` stay. `share` is the
    part of the job's time, and of the memory of a tensor's device, that samples may take. With `gradients`, a call that autograd
    records is written with its cotangents and gradients. With `statistics`, no values are written.

    `operation` is one of gdn-verify's, by default that in the function's name. `algorithm`, `products` and `chunk` are those of an
    Adapter. `names` maps names of arguments to those of the operation, or to None where an argument does not change results.
    `layout` has, for each tensor, those of its axes that come last, such as {"state": "V K"}.
    ValueError for settings that are none. Nothing that happens later raises.
    """
    if every < 1 or keep < 1 or not 0 < share <= 1:
        raise ValueError(f"every and keep must be at least 1, and share in (0, 1], got every={every}, keep={keep}, share={share}")
    for name, value, choices in (("operation", operation, OPERATIONS), ("products", products, ("ieee", "tf32"))):
        if value is not None and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    module, function = (watched, watched.forward) if isinstance(watched, nn.Module) else (None, watched)
    given = functools.partial(function)  # a partial of a partial is flat
    name = type(watched).__name__ if module is not None else getattr(given.func, "__name__", type(given.func).__name__)
    known = _known(name, getattr(given.func, "__module__", ""))
    operation = operation or known["operation"]
    if operation is None or not _has_signature(given.func):
        why = "its name has no operation, so set operation=..." if operation is None else "Python does not know its arguments"
        sys.stderr.write(f"gdn-verify watch: {name} is not watched: {why}\n")
        return watched
    classes = OPERATIONS[operation].classes
    declares = {
        "algorithm": algorithm or known["algorithm"] or classes[0 if operation in RULES else -1],
        "products": products or known["products"],
        "chunk": chunk or known["chunk"],
    }
    if declares["algorithm"] not in classes:
        raise ValueError(f"algorithm must be one of {', '.join(classes)} for {operation}, got {algorithm!r}")
    reader = _Reader(operation, given, module, names, layout)
    folder = functools.partial(Folder, os.fspath(out), name, operation, declares, keep, statistics=statistics)
    watcher = Watcher(name, reader, folder, every, share, gradients=gradients)
    if module is None:
        return _Function(watched, watcher)  # type: ignore[return-value]
    open_calls = threading.local()
    module.register_forward_pre_hook(_Before(watcher, open_calls), with_kwargs=True)
    module.register_forward_hook(_After(watcher, open_calls), with_kwargs=True, always_call=True)
    return watched


def _has_signature(function: Callable[..., Any]) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        return bool(inspect.signature(function).parameters)
    return False


def _known(name: str, module: str) -> dict[str, Any]:
    """What the name of a function says of it."""
    word = name.lower()
    operation = next((rule for rule in ("kda", "gated_delta_rule", "delta_rule") if rule in word), None)
    if operation is None and word in OPERATIONS:
        operation = word
    algorithm = "recurrent" if "recurrent" in word and operation in RULES else None
    fla = module.startswith("fla.ops.")
    tuned = {"products": "tf32", "chunk": 64} if fla and algorithm is None else {"products": "ieee", "chunk": None}
    return {"operation": operation, "algorithm": algorithm, **tuned}


class _Reader:
    """Reads a call: which tensors and options of the operation its arguments are."""

    def __init__(
        self,
        operation: str,
        given: "functools.partial[Any]",
        module: nn.Module | None,
        names: Mapping[str, str | None],
        layout: Mapping[str, str],
    ) -> None:
        self.operation, self.given, self.layout = operation, given, dict(layout)
        self.signature = inspect.signature(given.func)
        self.module = module
        self.names: dict[str, str | None] = {**THEIRS, **dict.fromkeys(MEANINGLESS), **names}

    def sample(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
        """The call, with its own tensors. Lost says why it is none that we know."""
        try:
            bound = self.signature.bind(*self.given.args, *args, **{**self.given.keywords, **kwargs})
        except TypeError as error:
            raise Lost(f"a call does not fit its signature: {error}") from None
        bound.apply_defaults()
        found, default = dict[str, Any](), dict[str, Any]()
        for name, parameter in self.signature.parameters.items():
            kind = parameter.kind
            value = bound.arguments.get(name)
            if kind is inspect.Parameter.VAR_KEYWORD:
                found |= value or {}
            elif name in bound.arguments:
                found[name], default[name] = value, parameter.default
        ours = {our: (name, value) for name, value in found.items() if (our := self.names.get(name, name)) is not None}
        switched = {name: bool(ours.pop(name, ("", False))[1]) for name in SWITCHES}
        values = {name: value for name, (_, value) in ours.items() if value is not None}
        if switched["use_gate_in_kernel"] and "g" in values:
            values["a"] = values.pop("g")
        elif self.operation in RULES:
            for name in ("A_log", "dt_bias"):
                values.pop(name, None)
        if switched["use_beta_sigmoid_in_kernel"] and "beta" in values:
            values["b"] = values.pop("beta")
        spec = self._spec(values)
        values |= self._of_module(spec, values)
        layout = self.layout | ({"state": "V K", "final_state": "V K"} if switched["state_v_first"] else {})
        known = {*(port.name for port in spec.inputs), *spec.options, "cu_seqlens"}
        for name in values.keys() - known:
            theirs = ours.get(name, (name,))[0]
            usual = default.get(theirs)
            if values[name] is not usual and (isinstance(values[name], Tensor) or values[name] != usual):
                what = f"map it with names={{{theirs!r}: ...}}, to None if it changes nothing"
                raise Lost(f"{self.operation} has no {theirs}: {what}")
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor) and name in known}
        if missing := next((p.name for p in spec.inputs if not p.optional and p.name not in tensors), None):
            raise Lost(f"a call has no {missing}, which {self.operation} needs; its arguments are {', '.join(found)}")
        if "dt_bias" in tensors and self.operation == "kda" and tensors["dt_bias"].ndim == 1:
            tensors["dt_bias"] = tensors["dt_bias"].view(tensors["A_log"].numel(), -1)
        for name, x in tensors.items():
            if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_meta or _wrapped(x):
                raise Lost(f"{name} is no plain tensor of torch: {type(x).__name__}")
        options = {name: value for name, value in values.items() if name in spec.options and not isinstance(value, Tensor)}
        chunk = found.get("chunk_size")
        return Sample(number, spec, tensors, options, layout, chunk if isinstance(chunk, int) else None)

    def _spec(self, values: Mapping[str, Any]) -> Operation:
        if self.operation not in RULES:
            return OPERATIONS[self.operation]
        inside = {"gate": "a" in values, "beta": "b" in values, "linear": "alpha" in values}
        raw = {"gate": ("g", "a", "alpha"), "beta": ("beta", "b")}
        without = tuple(name for name, words in raw.items() if not any(word in values for word in words))
        if self.operation == "delta_rule":
            without = tuple(name for name in without if name != "gate")
        return rule_of(self.operation, **inside, without=without, channels=tuple(name for name in ("gk", "gv") if name in values))

    def _of_module(self, spec: Operation, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a module has of the operation's inputs and options and its call has not: parameters, and numbers such as eps."""
        if self.module is None:
            return {}
        names = {*(port.name for port in spec.inputs), *spec.options} - values.keys()
        found = {name: getattr(self.module, name, None) for name in names}
        return {name: value for name, value in found.items() if isinstance(value, Tensor | bool | int | float)}


def _wrapped(x: Tensor) -> bool:
    """Whether a transform of torch.func or a tracer is at work, in which a tensor has no numbers of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


_ALL: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


class Watcher:
    """Decides which calls are sampled, copies them, and has a thread that writes them."""

    def __init__(
        self, name: str, reader: _Reader, folder: Callable[[], Folder], every: int, share: float, *, gradients: bool
    ) -> None:
        self.name, self._reader, self._make_folder = name, reader, folder
        self.every, self.share, self._gradients = every, share, gradients
        self.calls = self.sampled = self.written = 0
        self.spent_s, self._rate, self._next, self._off = 0.0, BEGIN_RATE, 1, False
        self._begun = self._earliest = time.monotonic()
        self._said, self.lost = set[str](), collections.Counter[str]()
        self._renew()
        _ALL.add(self)

    def _renew(self) -> None:
        """Begin without a thread, a folder and open calls: in a process that a fork has made, nobody opens a lock that was held."""
        self._lock, self._queue = threading.Lock(), queue.SimpleQueue[Sample | None]()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._busy, self._waiting = False, list[Sample]()
        self._folder: Folder | None = None

    def report(self) -> dict[str, Any]:
        """What was called, sampled, written and lost, and which share of the time it has taken so far."""
        elapsed = time.monotonic() - self._begun
        names = ("name", "calls", "sampled", "written", "spent_s")
        return {name: getattr(self, name) for name in names} | {"lost": dict(self.lost), "share": self.spent_s / max(elapsed, 1e-9)}

    def due(self) -> bool:
        """Whether this call is to be sampled. Then `begin` must follow."""
        self.calls += 1
        if self.calls < self._next or self._off or time.monotonic() < self._earliest or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._busy:
                if self._waiting and time.monotonic() - self._waiting[0].begun > PATIENCE_S:
                    self._submit(self._waiting[0])
                return False
            self._busy = True
            return True
        finally:
            self._lock.release()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Sample | None]:
        """Copy the inputs of a call. Returns the arguments with which to call the function, and the sample, if it is one."""
        start = time.perf_counter()
        try:
            sample = self._reader.sample(self.calls, args, kwargs)
            if not self._affordable(sample):
                self._pay(time.perf_counter() - start)
                return args, kwargs, None
            self._next = self.calls + self.every
            self.sampled += 1
            taps = self._copy_inputs(sample)
            sample.cost_s += time.perf_counter() - start
        except Exception as error:
            self._next = self.calls + self.every
            self._lose("a call", error)
            self._pay(time.perf_counter() - start)
            return args, kwargs, None
        else:
            return tuple(taps.get(id(x), x) for x in args), {name: taps.get(id(x), x) for name, x in kwargs.items()}, sample

    def _affordable(self, sample: Sample) -> bool:
        """Whether a sample is expected to stay within its shares. If not, `due` says no until there is time enough."""
        device, need = sample.device, COPIES * sample.bytes_of_call
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Lost("a call in a CUDA graph that is captured is not sampled")
        most, free = _memory(device)
        if need > min(self.share * most, free / 2):
            raise Lost(f"a call of {need >> 20} MiB exceeds {self.share:.2%} of the memory of {device}, or half of what is free")
        self._earliest = self._begun + (self.spent_s + self._rate * (need + FIXED)) / self.share
        return time.monotonic() >= self._earliest

    def _copy_inputs(self, sample: Sample) -> dict[int, Tensor]:
        """Copy the inputs, and make a second copy of those that require gradients. Returns the second copies by id of the input.

        The function gets the second copies, so that their gradients are those of this call alone. They are no views: the function,
        or the job, may change them in place.
        """
        with sample.timed():
            sample.inputs = {name: _copy(x) for name, x in sample.call.items()}
            if self._gradients and torch.is_grad_enabled():
                wanting = {name: x for name, x in sample.call.items() if x.requires_grad and x.dtype in FLOATS}
                if len({id(x) for x in wanting.values()}) == len(wanting):
                    sample.taps = {name: x.clone() for name, x in wanting.items()}
        taps = {id(sample.call[name]): x for name, x in sample.taps.items()}
        sample.call = {}
        return taps

    def end(self, sample: Sample, result: Any) -> None:
        """Copy the outputs of a call, now or when its backward comes, and let them be written. None: the call raised an error."""
        if result is None:
            self._pay(sample.cost_s)
            return
        start = time.perf_counter()
        try:
            outputs = sample.named(result)
            with sample.timed():
                sample.outputs = {name: _copy(x) for name, x in outputs.items()}
            wanting = {name: x for name, x in outputs.items() if x.requires_grad}
            sample.taps = {name: x for name, x in sample.taps.items() if x.requires_grad} if wanting else {}
            sample.cost_s += time.perf_counter() - start
            if not sample.taps:
                self._submit(sample)
                return
            self._waiting.append(sample)
            for name, x in wanting.items():
                x.register_hook(functools.partial(self._cotangent, sample, name))
            taps, sample.taps = sample.taps, {}  # the graph holds them, and the sample must not hold the graph
            torch.autograd.graph.register_multi_grad_hook([*taps.values()], functools.partial(self._gradients_of, sample, [*taps]))
        except Exception as error:
            self._drop(sample, "a call", error)

    def _cotangent(self, sample: Sample, name: str, cotangent: Tensor) -> None:
        """A hook: copy the cotangent of an output."""
        if not sample.submitted:
            start = time.perf_counter()
            try:
                with sample.timed():
                    sample.cotangents[name] = _copy(cotangent)
            except Exception as error:
                self._drop(sample, "a backward", error)
            sample.cost_s += time.perf_counter() - start

    def _gradients_of(self, sample: Sample, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """A hook: copy the gradients, with which the sample is complete."""
        if not sample.submitted:
            start = time.perf_counter()
            try:
                found = {name: x for name, x in zip(names, gradients, strict=True) if x is not None}
                with sample.timed():
                    sample.gradients = {name: _copy(x) for name, x in found.items()}
                sample.cost_s += time.perf_counter() - start
                self._submit(sample)
            except Exception as error:
                self._drop(sample, "a backward", error)

    def _submit(self, sample: Sample) -> None:
        sample.submitted = True
        self._waiting.clear()
        if self._thread is None:
            thread = threading.Thread(target=self._write_all, name="gdn-verify watch", daemon=True)
            thread.start()
            self._thread = thread
        self._queue.put(sample)

    def _write_all(self) -> None:
        """The thread: write samples until there is a None."""
        ending, samples = self._ending, self._queue  # those of this process
        while (sample := samples.get()) is not None:
            start = time.thread_time()
            try:
                if self._folder is None:
                    self._folder = self._make_folder()
                self._folder.write(sample, self.report(), ending.is_set)
                self.written += 1
            except Stopped:
                self._say("exit", NOT_WRITTEN)
            except Exception as error:
                self._off = self._off or isinstance(error, OSError)  # the disk may be full, and the job needs it more than we do
                self._lose("writing", error)
            sample.cost_s += time.thread_time() - start + sample.device_s()
            self._rate = max(0.9 * self._rate, sample.cost_s / (sample.bytes + FIXED))
            self._pay(sample.cost_s, self._rate * (sample.bytes + FIXED))
            sample = None

    def _pay(self, cost_s: float, next_s: float = 0.0) -> None:
        """A sample has cost so much and is at its end. The next one is expected to cost `next_s`."""
        self.spent_s += cost_s
        self._earliest = max(self._earliest, self._begun + (self.spent_s + next_s) / self.share)
        self._busy = False

    def _drop(self, sample: Sample, what: str, error: Exception) -> None:
        """Note that a sample is lost which has cost something."""
        sample.submitted = True
        self._lose(what, error)
        self._pay(sample.cost_s)

    def _lose(self, what: str, error: Exception) -> None:
        """Note that a sample is lost, and say so if nothing was said about this kind yet."""
        self._waiting.clear()
        text = str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            text += "; nothing more is written"
        self._say(f"{what} {type(error).__name__}", f"{what} was lost: {text}")

    def _say(self, kind: str, text: str) -> None:
        self.lost[kind] += 1
        if kind not in self._said:
            self._said.add(kind)
            with contextlib.suppress(Exception):  # stderr may be closed
                sys.stderr.write(f"gdn-verify watch: {self.name}: {' '.join(text.split())[:400]}\n")

    def close(self) -> None:
        """End the thread. A sample that is not written within EXIT_S is lost."""
        _end([self])


class _Function:
    """A function whose calls are sampled. Pickled and copied, it is the function itself, without us."""

    def __init__(self, function: Callable[..., Any], watcher: Watcher) -> None:
        self.function, self.watcher = function, watcher
        functools.update_wrapper(self, function, updated=())
        # One that torch never compiles can be watched between compiled parts; another one is compiled without us.
        self._compiled = torch.compiler.disable(self._sampled) if getattr(function, "_torchdynamo_disable", False) else function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        return self._sampled(*args, **kwargs)

    def _sampled(self, *args: Any, **kwargs: Any) -> Any:
        if not self.watcher.due():
            return self.function(*args, **kwargs)
        args, kwargs, sample = self.watcher.begin(args, kwargs)
        result = None
        try:
            result = self.function(*args, **kwargs)
        finally:
            if sample is not None:
                self.watcher.end(sample, result)
        return result

    def report(self) -> dict[str, Any]:
        """What was called, sampled, written and lost, and which share of the time it has taken so far."""
        return self.watcher.report()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        return copy.copy, (self.function,)  # a copy of a function is the function

    def __copy__(self) -> "_Function":
        return self

    def __deepcopy__(self, memo: Any) -> "_Function":
        return self


class _Hook:
    """A hook of a module. A copy of the module has in its place a function of Python that takes anything and returns None."""

    def __init__(self, watcher: Watcher, calls: threading.local) -> None:
        self.watcher, self.calls = watcher, calls

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        if torch.compiler.is_compiling() or not self.watcher.due():
            return None
        args, kwargs, self.calls.sample = self.watcher.begin(args, kwargs)
        return args, kwargs


class _After(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:  # noqa: ARG002
        if torch.compiler.is_compiling():
            return
        if (sample := getattr(self.calls, "sample", None)) is not None:
            self.calls.sample = None
            self.watcher.end(sample, result)


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _memory(device: torch.device) -> tuple[int, int]:
    """The bytes of a device's memory, and those that are free."""
    if device.type == "cuda":
        free, most = torch.cuda.mem_get_info(device)
        return most, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    most = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:  # there is none but on Linux
        free = int(next(line for line in file if line.startswith("MemAvailable:")).split()[1]) << 10
    return most, free


def _end(watchers: Sequence[Watcher]) -> None:
    """End the threads of all watchers. They may finish what they write within EXIT_S, and then have as long to stop."""
    for watcher in watchers:
        watcher._off = True
        with contextlib.suppress(Exception):
            for sample in [*watcher._waiting]:
                watcher._submit(sample)
        watcher._queue.put(None)
    threads = [(watcher, watcher._thread) for watcher in watchers if watcher._thread is not None]
    for _ in ("finish", "stop"):
        end = time.monotonic() + EXIT_S
        for _, thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        for watcher, _ in threads:
            watcher._ending.set()
    for watcher, thread in threads:
        if thread.is_alive():  # a disk may hang
            watcher._say("exit", NOT_WRITTEN)
    for watcher in watchers:
        if watcher.calls and not watcher.sampled and not watcher.lost:
            what = f"none of {watcher.calls} calls was sampled: it would have taken more than {watcher.share:.2%} of the time"
            watcher._say("none", what)


def _renew_all() -> None:
    for watcher in [*_ALL]:
        watcher._renew()


atexit.register(lambda: _end([*_ALL]))
os.register_at_fork(after_in_child=_renew_all)
