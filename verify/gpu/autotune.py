"""Makes every autotuned Triton kernel run with the configuration that a policy (policies.py) chooses, and records which one ran."""

import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import torch

from verify.adapters.packages import installed
from verify.gpu.policies import NATIVE, Denied, Policy, TuningError, is_named, preference, ran, same_config
from verify.process.outcome import Used

Pairs = tuple[tuple[str, str], ...]  # of a kernel and words of its configuration


@functools.cache
def here() -> tuple[str, str]:
    """The GPU's name ("interpreter" without a GPU) and Triton's version, which decide whether entries of a deny-list apply."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    return gpu, installed("triton") or "none"


def text_of(config: Any) -> str:
    """The text of a triton.Config: its meta-parameters by name, num_warps, num_stages, and other options that are not default."""
    options = config.all_kwargs()
    first = [*sorted(config.kwargs), "num_warps", "num_stages"]
    rest = [name for name in sorted(options) if name not in first and (name, options[name]) != ("num_ctas", 1)]
    words = [f"{name}={quote(str(options[name]), safe='+') or '%'}" for name in [*first, *rest] if name in options]
    if config.pre_hook is not None:
        words.append(f"pre_hook={quote(getattr(config.pre_hook, '__name__', type(config.pre_hook).__name__), safe='')}")
    return ":".join(words)


def offers(configs: Sequence[Any]) -> dict[str, Any]:
    """The configurations by their texts, without duplicates. Different configurations with the same text get a word `nth`."""
    # Triton requires hashable configurations only if a kernel has more than one.
    different = list(dict.fromkeys(configs)) if len(configs) > 1 else configs
    times: collections.Counter[str] = collections.Counter()
    named = {}
    for config in different:
        text = text_of(config)
        times[text] += 1
        named[text if times[text] == 1 else f"{text}:nth={times[text]}"] = config
    return named


def name_of(tuner: Any) -> str:
    """A kernel's module and name, the same on every machine."""
    function = tuner.base_fn
    return f"{quote(function.__module__ or '', safe='')}.{quote(function.__name__, safe='')}"


@dataclasses.dataclass
class _Active:
    """The policy that the process follows at the moment. It is not per thread: a backward pass may run on autograd's threads."""

    policy: Policy = NATIVE
    denied: tuple[Denied, ...] = ()
    left_out: Pairs = ()
    used: Used = dataclasses.field(default_factory=dict)
    error: TuningError | None = None
    orders: dict[tuple[str, tuple[str, ...]], list[str]] = dataclasses.field(default_factory=dict)

    def note(self, kernel: str, text: str) -> None:
        ran = self.used.get(kernel, ())
        if text not in ran:
            self.used[kernel] = (*ran, text)
        _KNOWN[kernel].setdefault(text)

    def about(self, kernel: str) -> tuple[Denied | tuple[str, str], ...]:
        denied = tuple(entry for entry in self.denied if is_named(kernel, entry.kernel))
        return (*denied, *(pair for pair in self.left_out if is_named(kernel, pair[0])))

    def denies(self, kernel: str, text: str) -> bool:
        used = {kernel: (text,)}
        return any(
            ran(used, *entry) if isinstance(entry, tuple) else same_config(entry.config, text) for entry in self.about(kernel)
        )

    def fail(self, message: str) -> TuningError:
        self.error = TuningError(message)
        return self.error

    def all_denied(self, kernel: str, count: int) -> TuningError:
        return self.fail(f"every configuration of {kernel} is denied on this GPU: {count} of {count}")

    def order(self, kernel: str, declared: Iterable[str], offered: Mapping[str, Any]) -> list[str]:
        """The configurations to try for a launch, in order. `offered` are those `declared` that the kernel's own pruning left."""
        asked = (kernel, tuple(offered))
        if asked not in self.orders:
            self.orders[asked] = self._order(kernel, declared, list(offered))
        return self.orders[asked]

    def _order(self, kernel: str, declared: Iterable[str], offered: list[str]) -> list[str]:
        assert self.policy.tune is not None
        drawn = [text for text in preference(offered, self.policy.tune, kernel) if not self.denies(kernel, text)]
        pick = self.policy.picked(kernel)
        # A denied configuration may still be picked, so that the run in a deny-list can be repeated.
        picked = [text for text in offered if pick is not None and same_config(text, pick)]
        choices = dict.fromkeys([*declared, *offered])
        if pick is not None and not any(same_config(text, pick) for text in choices):
            raise self.fail(_no_such(kernel, pick, choices))
        if not picked and not drawn:
            raise self.all_denied(kernel, len(offered))
        return picked + [text for text in drawn if text not in picked]


def _no_such(kernel: str, pick: str, choices: Iterable[str]) -> str:
    choices, words = list(choices), set(pick.split(":"))
    nearest = max(choices, key=lambda text: (len(words & set(text.split(":"))), difflib.SequenceMatcher(None, pick, text).ratio()))
    return f"{kernel} has no configuration {pick} among its {len(choices)}; the nearest is {nearest}"


@dataclasses.dataclass
class _Memory:
    """What we store on an autotuner: its configurations by text, and for each compile key those that the device cannot hold."""

    listed: Sequence[Any] = ()
    size: int = -1
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    constants: frozenset[str] | None = None
    infeasible: dict[Any, set[str]] = dataclasses.field(default_factory=dict)
    caches: dict[tuple[Any, ...], dict[Any, Any]] = dataclasses.field(default_factory=dict)  # by what was denied

    def offers(self, configs: Sequence[Any]) -> dict[str, Any]:
        if self.listed is not configs or self.size != len(configs):
            self.listed, self.size, self.named = configs, len(configs), offers(configs)
        return self.named

    def key(self, tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The compile key of a launch, without the divisibility of integers. A configuration may fit one key and not another."""
        if self.constants is None:
            parameters = inspect.signature(tuner.base_fn).parameters
            self.constants = frozenset(name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation))
        key = []
        for name, value in {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}.items():
            if hasattr(value, "dtype"):
                key.append((name, str(value.dtype)))
            elif value is None or name in self.constants or name in tuner.keys:
                key.append((name, repr(value)))
        return tuple(sorted(key))


_active = _Active()
_left_out: Pairs = ()
_installed = False
_KNOWN: dict[str, dict[str, None]] = collections.defaultdict(dict)
_INFEASIBLE: dict[str, dict[str, str]] = collections.defaultdict(dict)


def known() -> dict[str, tuple[str, ...]]:
    """Every autotuned kernel that ran in this process, with the configurations that its own pruning left. A sweep runs these."""
    return {kernel: tuple(texts) for kernel, texts in _KNOWN.items()}


def infeasible() -> dict[str, dict[str, str]]:
    """The configurations that this process tried but the device could not hold or the compiler refused, with the reasons."""
    return {kernel: dict(texts) for kernel, texts in _INFEASIBLE.items()}


@contextlib.contextmanager
def leaving_out(pairs: Iterable[Sequence[str]]) -> Iterator[None]:
    """Make every policy that is used inside leave out configurations: pairs of a kernel and words of its configuration.

    Neither Triton nor a number chooses them, only a pick.
    """
    global _left_out
    before, _left_out = _left_out, tuple((kernel, config) for kernel, config in pairs)
    try:
        yield
    finally:
        _left_out = before


@contextlib.contextmanager
def using(policy: Policy, denied: Iterable[Denied] = ()) -> Iterator[Used]:
    """Make all autotuned kernels of the process follow a policy inside. Yields the configurations that run, by kernel.

    Entries of `denied` for this GPU and this version of Triton are chosen neither by Triton nor by a number, only by a pick.
    RuntimeError before install(). If a policy cannot be followed, TuningError is raised at the kernel's launch, and again at the
    end in place of any other exception, so that the kernel is not blamed.
    """
    global _active
    if not _installed:
        raise RuntimeError("install() must be called before a policy is used: kernels would not follow it")
    denied = tuple(denied)
    place = here() if denied else ("", "")
    before, active = _active, _Active(policy, tuple(entry for entry in denied if entry.applies(*place)), _left_out)
    _active = active
    try:
        yield active.used
    finally:
        _active = before
        if active.error is not None:
            raise active.error


def install() -> None:
    """Patch Triton so that autotuned kernels of this process follow the active policy; without a policy, Triton decides.

    Call it in a worker process; if kernels are interpreted there, after verify.interpreter.install(). A second call changes
    nothing.
    """
    global _installed
    if not _installed and importlib.util.find_spec("triton") is not None:
        _patch()
    _installed = True


def _patch() -> None:
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError

    # Triton's own timing takes these errors for a configuration that does not fit. All other exceptions pass through.
    unfit = (OutOfResources, PTXASError, CompileTimeAssertionFailure)
    plain_run, plain_prune = Autotuner.run, Autotuner.prune_configs

    def memory_of(tuner: Any) -> _Memory:
        memory: _Memory = vars(tuner).setdefault("_verify_memory", _Memory())
        return memory

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        """The configurations that Triton is about to time, without denied ones."""
        kernel, active = name_of(self), _active
        named = offers(plain_prune(self, kwargs))
        _KNOWN[kernel].update(dict.fromkeys(named))
        allowed = [config for text, config in named.items() if not active.denies(kernel, text)]
        if not allowed:
            raise active.all_denied(kernel, len(named))
        return allowed

    def run_native(self: Any, active: _Active, kernel: str, args: Any, kwargs: Any) -> Any:
        # A copy, since other threads may use `self`. Without `best_config`, so that a choice is known to come from this launch.
        tuner = copy.copy(self)
        vars(tuner).pop("best_config", None)
        denied = active.about(kernel)
        if denied:
            if len(self.configs) == 1 and active.denies(kernel, next(iter(offers(self.configs)))):
                raise active.all_denied(kernel, 1)
            # Choices made under a deny-list are cached apart, since they do not hold without it. Of the autotuner's own choices,
            # those that are not denied were the fastest of all configurations, so they stay; FLA may have read them from a file.
            choices = memory_of(self).caches.setdefault(denied, {})
            allowed = {key: config for key, config in self.cache.items() if not active.denies(kernel, text_of(config))}
            tuner.cache = {**choices, **allowed}
        try:
            return plain_run(tuner, *args, **kwargs)
        finally:
            if denied:
                choices.update(tuner.cache)
            attributes = vars(tuner)
            vars(self).update(
                {name: attributes[name] for name in ("best_config", "configs_timings", "bench_time") if name in attributes}
            )
            if "best_config" in attributes:
                active.note(kernel, text_of(tuner.best_config))

    def run_drawn(self: Any, active: _Active, kernel: str, args: Any, kwargs: Any) -> Any:
        memory = memory_of(self)
        declared = offered = memory.offers(self.configs)
        if len(self.configs) > 1 and (self.early_config_prune or self.perf_model):
            tuner = copy.copy(self)
            tuner.nargs = dict(zip(self.arg_names, args, strict=False))
            offered = offers(plain_prune(tuner, kwargs))
        _KNOWN[kernel].update(dict.fromkeys(offered))
        order = active.order(kernel, declared, offered)
        if memory.infeasible:
            # If none is left, try the first again, so that its error is raised.
            refused = memory.infeasible.get(memory.key(self, args, kwargs), set())
            order = [text for text in order if text not in refused] or order[:1]
        for text in order:
            # An autotuner with a single configuration launches it without timing, and neither reads nor writes cached choices in
            # memory or on disk. So this policy does not see the choices of others, and leaves none to them.
            tuner = copy.copy(self)
            tuner.configs = [offered[text]]
            try:
                answer = plain_run(tuner, *args, **kwargs)
            except unfit as error:
                _INFEASIBLE[kernel].setdefault(text, str(error).strip() or type(error).__name__)
                memory.infeasible.setdefault(memory.key(self, args, kwargs), set()).add(text)
                if text == order[-1]:
                    raise
            except BaseException:
                active.note(kernel, text)
                raise
            else:
                self.best_config = offered[text]
                active.note(kernel, text)
                return answer
        raise AssertionError(f"{kernel} has no configuration")

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        active = _active
        launch = run_native if active.policy.tune is None else run_drawn
        return launch(self, active, name_of(self), args, kwargs)

    Autotuner.run, Autotuner.prune_configs = run, prune_configs
