"""Autotuning: which configuration every Triton kernel runs with is decided, known, and repeated from a word of the run's line.

    tune=native                         Triton times all configurations and decides, as released
    tune=17                             each kernel has one of its cheap configurations, drawn from 17 and the kernel's name
    tune=17,chunk_fwd_kernel_o:BK=64:BV=64:num_warps=4:num_stages=3
                                        the named kernel has the named one, the others those of 17

Timing every configuration of FLA's kernels takes over 80 s for one shape's forward pass, one small configuration a kernel 6 s; and
what is wrong in one configuration only is not seen while another one is the fastest. A kernel is known by its module and name,
`fla.ops.common.chunk_o.chunk_fwd_kernel_o`, and may be picked by the end of it: `chunk_fwd_kernel_o`.
"""

import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import torch

from oracles.counter import mix_words
from properties.cases.line import split_line
from verify.adapters.packages import installed
from verify.process.outcome import Used

_KERNEL = re.compile(r"[\w.%~-]+", re.ASCII)
_CONFIG = re.compile(r"[A-Za-z_]\w*=[\w.%~+-]+(:[A-Za-z_]\w*=[\w.%~+-]+)*", re.ASCII)
_BLOCK = re.compile(r"B[A-Z0-9]{0,2}|.*(BLOCK|TILE|CHUNK).*")  # FLA's BK, BV, BT, BS, BD; Triton's BLOCK_SIZE


class TuningError(ValueError):
    """A policy cannot be followed: a pick is no configuration of its kernel, or every one is denied. The kernel is not to blame."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which configuration every autotuned kernel runs with, as one word of a run's line.

    `tune` None lets Triton decide. Else it draws for every kernel but those of `picks`, which are (kernel, configuration). A pick
    that its kernel's own pruning drops, or that the device cannot hold, gives way to the draw: see `missed`.
    """

    tune: int | None = None
    picks: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.tune is None:
            if self.picks:
                raise ValueError(f"picks need a number that draws for the other kernels, as in tune=17,{_joined(self.picks[0])}")
        elif not 0 <= self.tune < 2**63:
            raise ValueError(f"tune must be native or a number from 0 to 2**63 - 1, got {self.tune}")
        object.__setattr__(self, "picks", tuple(sorted(self.picks)))
        names = [check_kernel(kernel) for kernel, _ in self.picks]
        for kernel, config in self.picks:
            check_config(config)
            if names.count(kernel) > 1:
                raise ValueError(f"tune must pick {kernel} once, got it {names.count(kernel)} times")

    def __str__(self) -> str:
        return "native" if self.tune is None else ",".join([str(self.tune), *map(_joined, self.picks)])

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """The policy of its word. ValueError names the part, its value and the rule."""
        first, *picks = text.split(",")
        if first == "native":
            tune = None
        elif first.isascii() and first.isdecimal() and len(first) < 20:
            tune = int(first)
        else:
            raise ValueError(f"tune must be native or a number that draws, perhaps with picks after it, got {text[:80]!r}")
        pairs = []
        for pick in picks:
            kernel, colon, config = pick.partition(":")
            if not colon:
                raise ValueError(f"a pick must be kernel:NAME=value:..., got {pick[:80]!r}")
            pairs.append((kernel, config))
        return cls(tune, tuple(pairs))

    def picked(self, kernel: str) -> str | None:
        """The configuration picked for a kernel, None if there is no pick; that with the most of its name counts."""
        fitting = [(len(name), config) for name, config in self.picks if _named(kernel, name)]
        return max(fitting)[1] if fitting else None

    def missed(self, used: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
        """The picks that did not run: their kernel never did, or not with them."""
        return [
            (name, config)
            for name, config in self.picks
            if not any(_named(kernel, name) and any(_same(config, ran) for ran in texts) for kernel, texts in used.items())
        ]


NATIVE = Policy()


def repeating(used: Mapping[str, Sequence[str]], tune: int = 0) -> Policy:
    """The policy that runs every kernel with what it ran with, native runs too; of several configurations, with the first."""
    return Policy(tune, tuple((kernel, texts[0]) for kernel, texts in used.items() if texts))


def check_kernel(name: str) -> str:
    """The name, if it can be that of a kernel. ValueError says the rule."""
    if not _KERNEL.fullmatch(name):
        raise ValueError(f"a kernel must be a name such as chunk_fwd_kernel_o, its module perhaps before it, got {name[:80]!r}")
    return name


def check_config(text: str) -> str:
    """The text, if it can be that of a configuration. ValueError says the rule."""
    words = text.split(":")
    names = [word.partition("=")[0] for word in words]
    if not _CONFIG.fullmatch(text) or len(set(names)) < len(names):
        raise ValueError(f"a configuration must be NAME=value words joined by colons, each name once, got {text[:80]!r}")
    return text


def _joined(pick: tuple[str, str]) -> str:
    return ":".join(pick)


def _named(kernel: str, name: str) -> bool:
    return kernel == name or kernel.endswith(f".{name}")


def _same(config: str, other: str) -> bool:
    """Whether two texts are one configuration: the order of words says nothing."""
    return sorted(config.split(":")) == sorted(other.split(":"))


@functools.cache
def cost(config: str) -> float:
    """How dear a configuration is to compile, roughly: block sizes multiplied, times num_stages, over num_warps.

    A kernel's loops are unrolled over the elements of a block that each of its threads holds, and repeated for every stage of the
    pipeline ahead of them: the instructions that ptxas has to place.
    """
    words = dict(word.split("=", 1) for word in config.split(":"))
    blocks = [int(value) for name, value in words.items() if _BLOCK.fullmatch(name) and value.isdecimal() and int(value) > 0]
    stages, warps = (int(words.get(name, "1")) if words.get(name, "1").isdecimal() else 1 for name in ("num_stages", "num_warps"))
    return math.prod(blocks) * max(1, stages) / max(1, warps)


def preference(configs: Iterable[str], tune: int, kernel: str) -> list[str]:
    """A kernel's configurations as `tune` prefers them: one of the cheaper half first, drawn, and what to try if it does not fit.

    It depends on the set of configurations, the number and the name alone. Next come the others of the cheaper half and then the
    dearer ones, cheapest first.
    """
    ranked = sorted(configs, key=lambda text: (cost(text), text))
    if not ranked:
        return []
    # Draws are to be quick, so that the dearer half, which takes four times as long to compile (27 s instead of 6 s for the kernels
    # of one shape), is left to the sweep, which runs everything. Those that cost as much as the middle one are all among the cheap.
    cheap = [text for text in ranked if cost(text) <= cost(ranked[(len(ranked) - 1) // 2])]
    start = _drawn(tune, kernel) % len(cheap)
    return cheap[start:] + cheap[:start] + ranked[len(cheap) :]


@functools.lru_cache(4096)  # a number takes about a millisecond, a launch some microseconds
def _drawn(tune: int, kernel: str) -> int:
    return mix_words(tune, kernel)


def plan(known: Mapping[str, Sequence[str]], tune: int) -> Iterator[Policy]:
    """Policies that together run every configuration of every kernel: as many as the longest list has.

    All kernels step at once, each from a place in its list that `tune` draws, so that other numbers meet in other pairs.
    """
    steps = max(map(len, known.values()), default=0)
    chosen = {kernel: texts for kernel, texts in sorted(known.items()) if len(texts) > 1}
    for step in range(steps):
        yield Policy(tune, tuple((name, texts[(_drawn(tune, name) + step) % len(texts)]) for name, texts in chosen.items()))


def narrow(failing: Policy, fails: Callable[[Policy], bool], base: Policy | None = None) -> list[Policy]:
    """The smallest policies that still fail, each the base with picks of `failing`: usually one pick, a configuration at fault.

    `base`, by default `failing` without its picks, must hold. Every pick is tried alone, so that two wrong kernels are two answers.
    If what is left fails as well, that is picks which only fail together: an answer that holds without any one of its picks. No
    answer at all means that `failing` does not fail again. ValueError if the base fails: then the picks are not at fault.
    """
    base = Policy(failing.tune) if base is None else base
    if base.picks:
        raise ValueError(f"base must be without picks, got {base}")
    if fails(base):
        raise ValueError(f"base must hold, or no pick can be told from it, but {base} fails itself; try another number")
    alone = [pick for pick in failing.picks if fails(Policy(base.tune, (pick,)))]
    found = [Policy(base.tune, (pick,)) for pick in alone]
    rest = [pick for pick in failing.picks if pick not in alone]
    while len(rest) > 1 and fails(Policy(base.tune, tuple(rest))):
        together = list(rest)
        for pick in rest:
            fewer = [other for other in together if other != pick]
            if fails(Policy(base.tune, tuple(fewer))):
                together = fewer
        found.append(Policy(base.tune, tuple(together)))
        rest = [pick for pick in rest if pick not in together]
    return found


@dataclasses.dataclass(frozen=True, order=True)
class Denied:
    """A configuration that is wrong: on which GPU, with which Triton, by which law, and the run that shows it."""

    gpu: str
    triton: str
    kernel: str
    config: str
    law: str
    run: str
    error: str

    def __post_init__(self) -> None:
        for name, value in self.to_json().items():
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} of a denied configuration must be a text that says something, got {value!r}")
        check_kernel(self.kernel)
        check_config(self.config)
        words = split_line(self.run)
        if "adapter" not in words or words.get("law") != self.law:
            raise ValueError(f"run of a denied configuration must say law={self.law} and adapter=..., got {self.run[:80]!r}")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "Denied":
        """The entry of `to_json`'s data. ValueError names the field and the rule."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, dict):
            raise ValueError(f"a denied configuration must be a table of {', '.join(sorted(names))}, got {str(data)[:80]!r}")  # noqa: TRY004
        if wrong := sorted(names ^ data.keys()):
            given = ", ".join(f"{'no' if name in names else 'an unknown'} {str(name)[:80]}" for name in wrong)
            raise ValueError(f"a denied configuration must have {', '.join(sorted(names))}, got one with {given}")
        return cls(**data)

    def applies(self, gpu: str, triton: str) -> bool:
        """Whether it is about this GPU and this Triton."""
        return (self.gpu, self.triton) == (gpu, triton)


def write_denied(path: str | os.PathLike[str], denied: Iterable[Denied]) -> None:
    """Put a deny-list in a file, one entry a line of JSON, sorted, each once; it is the old or the new list at any time."""
    path = pathlib.Path(path)
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(json.dumps(each.to_json(), ensure_ascii=False) + "\n" for each in sorted(set(denied))), encoding="utf-8")
    os.replace(new, path)


def read_denied(path: str | os.PathLike[str]) -> list[Denied]:
    """The deny-list of a file. ValueError names the line and the rule it breaks."""
    entries = []
    for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            entries.append(Denied.from_json(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"line {number} of the deny-list: {error}") from error
    return entries


@functools.cache
def here() -> tuple[str, str]:
    """The GPU's name, "interpreter" without one, and Triton's version: where a denied configuration applies."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    return gpu, installed("triton") or "none"


def text_of(config: Any) -> str:
    """The text of a triton.Config: its meta-parameters by name, num_warps, num_stages, and what else is not as usual."""
    given = config.all_kwargs()
    first = [*sorted(config.kwargs), "num_warps", "num_stages"]
    rest = [name for name in sorted(given) if name not in first and (name, given[name]) != ("num_ctas", 1)]
    words = [f"{name}={quote(str(given[name]), safe='+') or '%'}" for name in [*first, *rest] if name in given]
    if config.pre_hook is not None:
        words.append(f"pre_hook={quote(getattr(config.pre_hook, '__name__', type(config.pre_hook).__name__), safe='')}")
    return ":".join(words)


def offers(configs: Sequence[Any]) -> dict[str, Any]:
    """The configurations by their texts. Different ones that read the same are told apart by `nth`; equal ones are one."""
    # Triton asks that configurations can be hashed only where it has a choice.
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
    """What rules the process at this moment. Not the thread: a backward pass may run on one of autograd's own."""

    policy: Policy = NATIVE
    denied: tuple[Denied, ...] = ()
    used: Used = dataclasses.field(default_factory=dict)
    error: TuningError | None = None
    orders: dict[tuple[str, tuple[str, ...]], list[str]] = dataclasses.field(default_factory=dict)

    def note(self, kernel: str, text: str) -> None:
        ran = self.used.get(kernel, ())
        if text not in ran:
            self.used[kernel] = (*ran, text)
        _KNOWN[kernel].setdefault(text)

    def about(self, kernel: str) -> tuple[Denied, ...]:
        return tuple(each for each in self.denied if _named(kernel, each.kernel))

    def denies(self, kernel: str, text: str) -> bool:
        return any(_same(each.config, text) for each in self.about(kernel))

    def fail(self, message: str) -> TuningError:
        self.error = TuningError(message)
        return self.error

    def all_denied(self, kernel: str, count: int) -> TuningError:
        return self.fail(f"every configuration of {kernel} is denied on this GPU: {count} of {count}")

    def order(self, kernel: str, declared: Iterable[str], offered: Mapping[str, Any]) -> list[str]:
        """What to launch a kernel with, the first that fits; `offered` is what its own pruning left of those it declares."""
        asked = (kernel, tuple(offered))
        if asked not in self.orders:
            self.orders[asked] = self._order(kernel, declared, list(offered))
        return self.orders[asked]

    def _order(self, kernel: str, declared: Iterable[str], offered: list[str]) -> list[str]:
        assert self.policy.tune is not None
        drawn = [text for text in preference(offered, self.policy.tune, kernel) if not self.denies(kernel, text)]
        pick = self.policy.picked(kernel)
        # A denied configuration may be picked: that is how it is shown again.
        picked = [text for text in offered if pick is not None and _same(text, pick)]
        choices = dict.fromkeys([*declared, *offered])
        if pick is not None and not any(_same(text, pick) for text in choices):
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
    """What is kept of one autotuner, on it: its configurations by text, and by compile key those that the device cannot hold."""

    listed: Sequence[Any] = ()
    size: int = -1
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    constants: frozenset[str] | None = None
    infeasible: dict[Any, set[str]] = dataclasses.field(default_factory=dict)
    caches: dict[tuple[Denied, ...], dict[Any, Any]] = dataclasses.field(default_factory=dict)

    def offers(self, configs: Sequence[Any]) -> dict[str, Any]:
        if self.listed is not configs or self.size != len(configs):
            self.listed, self.size, self.named = configs, len(configs), offers(configs)
        return self.named

    def key(self, tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a kernel is compiled for, but for the divisibility of numbers: what fits for one may not fit for another."""
        if self.constants is None:
            parameters = inspect.signature(tuner.base_fn).parameters
            self.constants = frozenset(name for name, each in parameters.items() if "constexpr" in str(each.annotation))
        key = []
        for name, value in {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}.items():
            if hasattr(value, "dtype"):
                key.append((name, str(value.dtype)))
            elif value is None or name in self.constants or name in tuner.keys:
                key.append((name, repr(value)))
        return tuple(sorted(key))


_active = _Active()
_installed = False
_KNOWN: dict[str, dict[str, None]] = collections.defaultdict(dict)
_INFEASIBLE: dict[str, dict[str, str]] = collections.defaultdict(dict)


def known() -> dict[str, tuple[str, ...]]:
    """Every autotuned kernel that ran in this process, with the configurations that its own pruning left it: what to sweep."""
    return {kernel: tuple(texts) for kernel, texts in _KNOWN.items()}


def infeasible() -> dict[str, dict[str, str]]:
    """The configurations that this process tried and the device could not hold or the compiler refused, and why."""
    return {kernel: dict(texts) for kernel, texts in _INFEASIBLE.items()}


@contextlib.contextmanager
def using(policy: Policy, denied: Iterable[Denied] = ()) -> Iterator[Used]:
    """While it lasts, autotuned kernels of the whole process run as the policy says; what each ran with is gathered.

    Of `denied`, the entries for this GPU and this Triton count: neither Triton nor a number chooses them, a pick may. RuntimeError
    before install(). A policy that cannot be followed is a TuningError at the kernel's launch, and again at the end, in place of
    whatever became of it in between, so that the kernel is not blamed.
    """
    global _active
    if not _installed:
        raise RuntimeError("install() must be called before a policy is used: kernels would not follow it")
    denied = tuple(denied)
    place = here() if denied else ("", "")
    before, active = _active, _Active(policy, tuple(each for each in denied if each.applies(*place)))
    _active = active
    try:
        yield active.used
    finally:
        _active = before
        if active.error is not None:
            raise active.error


def install() -> None:
    """The active policy decides which configuration every autotuned kernel of this process runs with; until there is one, Triton.

    Call it in a worker process, where kernels are interpreted after verify.interpreter.install(). A second call changes nothing.
    """
    global _installed
    if not _installed and importlib.util.find_spec("triton") is not None:
        _patch()
    _installed = True


def _patch() -> None:
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError

    # Those that Triton's own timing takes for a configuration that does not fit; whatever else is raised goes up.
    unfit = (OutOfResources, PTXASError, CompileTimeAssertionFailure)
    plain_run, plain_prune = Autotuner.run, Autotuner.prune_configs

    def memory_of(tuner: Any) -> _Memory:
        memory: _Memory = vars(tuner).setdefault("_verify_memory", _Memory())
        return memory

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        """What Triton is about to time, less what is denied."""
        kernel, active = name_of(self), _active
        named = offers(plain_prune(self, kwargs))
        _KNOWN[kernel].update(dict.fromkeys(named))
        kept = [config for text, config in named.items() if not active.denies(kernel, text)]
        if not kept:
            raise active.all_denied(kernel, len(named))
        return kept

    def run_native(self: Any, active: _Active, kernel: str, args: Any, kwargs: Any) -> Any:
        # A copy, since other threads may be in `self`; it has no choice yet, so that the one it makes is seen to be of this launch.
        tuner = copy.copy(self)
        vars(tuner).pop("best_config", None)
        denied = active.about(kernel)
        if denied:
            if len(self.configs) == 1 and active.denies(kernel, next(iter(offers(self.configs)))):
                raise active.all_denied(kernel, 1)
            # What was fastest beside a configuration that is denied now says little, and what is fastest of the rest nothing of
            # later. But a choice that is not denied was the best of all; FLA may have read it from a file.
            own = memory_of(self).caches.setdefault(denied, {})
            allowed = {key: config for key, config in self.cache.items() if not active.denies(kernel, text_of(config))}
            tuner.cache = {**own, **allowed}
        try:
            return plain_run(tuner, *args, **kwargs)
        finally:
            if denied:
                own.update(tuner.cache)
            made = vars(tuner)
            vars(self).update({name: made[name] for name in ("best_config", "configs_timings", "bench_time") if name in made})
            if "best_config" in made:
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
            # If none is left, the first is tried again, for its error to be raised.
            refused = memory.infeasible.get(memory.key(self, args, kwargs), set())
            order = [text for text in order if text not in refused] or order[:1]
        for text in order:
            # An autotuner of one configuration launches it without timing, and neither reads nor writes choices, in memory or on
            # disk: this policy sees no other's and leaves none to another.
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
