"""Decides and records which autotune configuration every Triton kernel runs with. One word of a run's line repeats the choice.

    tune=native                         Triton times all configurations and chooses, as it does without gdn-verify
    tune=17                             each kernel gets one of its cheap configurations, drawn from 17 and the kernel's name
    tune=17,chunk_fwd_kernel_o:BK=64:BV=64:num_warps=4:num_stages=3
                                        the named kernel gets the named configuration, the others those of 17

There are two reasons. Timing every configuration of FLA's kernels takes over 80 s for the forward pass of one shape, while one
small configuration for each kernel takes 6 s. And a configuration that is wrong is not seen while another one is the fastest.

The name of a kernel is its module and name, `fla.ops.common.chunk_o.chunk_fwd_kernel_o`. A pick may use the end of it:
`chunk_fwd_kernel_o`.
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
    """A policy cannot be followed: a pick is no configuration of its kernel, or all are denied. The kernel is not to blame."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which configuration every autotuned kernel runs with. It is one word of a run's line.

    With `tune` None, Triton decides. Otherwise the number draws a configuration for every kernel that is not in `picks`, which are
    pairs of a kernel and a configuration. If the kernel's own pruning drops a pick, or the device cannot hold it, the kernel gets
    the drawn configuration instead (see `missed`).
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
        """Parse the word of a policy. ValueError names the wrong part, its value and the rule."""
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
        """The configuration picked for a kernel, or None. If several picks fit, the one with the longest name counts."""
        fitting = [(len(name), config) for name, config in self.picks if _named(kernel, name)]
        return max(fitting)[1] if fitting else None

    def missed(self, used: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
        """The picks that did not run, because their kernel never ran or ran with other configurations."""
        return [
            (name, config)
            for name, config in self.picks
            if not any(_named(kernel, name) and any(_same(config, ran) for ran in texts) for kernel, texts in used.items())
        ]


NATIVE = Policy()


def ran(used: Mapping[str, Iterable[str]], kernel: str, config: str) -> bool:
    """Whether a kernel, named by its whole name or the end of it, ran with a configuration that has all words of `config`."""
    words = {*config.split(":")}
    return any(_named(name, kernel) and any(words <= {*text.split(":")} for text in texts) for name, texts in used.items())


def repeating(used: Mapping[str, Sequence[str]], tune: int = 0) -> Policy:
    """The policy that repeats the configurations in `used`, also those of native runs. If a kernel ran with several, the first."""
    return Policy(tune, tuple((kernel, texts[0]) for kernel, texts in used.items() if texts))


def check_kernel(name: str) -> str:
    """Return `name` if it can be the name of a kernel. ValueError says the rule."""
    if not _KERNEL.fullmatch(name):
        raise ValueError(f"a kernel must be a name such as chunk_fwd_kernel_o, its module perhaps before it, got {name[:80]!r}")
    return name


def check_config(text: str) -> str:
    """Return `text` if it can be the text of a configuration. ValueError says the rule."""
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
    """Whether two texts are the same configuration. The order of their words does not matter."""
    return sorted(config.split(":")) == sorted(other.split(":"))


@functools.cache
def cost(config: str) -> float:
    """The rough cost of compiling a configuration: the product of its block sizes, times num_stages, over num_warps.

    A kernel's loops are unrolled over the elements of a block that each thread holds, and repeated for every stage of the pipeline.
    The product is proportional to the instructions that ptxas then has to place.
    """
    words = dict(word.split("=", 1) for word in config.split(":"))
    blocks = [int(value) for name, value in words.items() if _BLOCK.fullmatch(name) and value.isdecimal() and int(value) > 0]
    stages, warps = (int(words.get(name, "1")) if words.get(name, "1").isdecimal() else 1 for name in ("num_stages", "num_warps"))
    return math.prod(blocks) * max(1, stages) / max(1, warps)


def preference(configs: Iterable[str], tune: int, kernel: str) -> list[str]:
    """A kernel's configurations in the order in which `tune` tries them until one fits.

    First comes one of the cheaper half, which is drawn; then the others of the cheaper half; then the more expensive ones, cheapest
    first. The order depends only on the set of configurations, the number and the kernel's name.
    """
    ranked = sorted(configs, key=lambda text: (cost(text), text))
    if not ranked:
        return []
    # The more expensive half takes four times as long to compile (27 s instead of 6 s for the kernels of one shape). It is left to
    # the sweep, which runs everything. All configurations that cost as much as the middle one count as cheap.
    cheap = [text for text in ranked if cost(text) <= cost(ranked[(len(ranked) - 1) // 2])]
    start = _drawn(tune, kernel) % len(cheap)
    return cheap[start:] + cheap[:start] + ranked[len(cheap) :]


@functools.lru_cache(4096)  # computing the number takes about a millisecond, a launch some microseconds
def _drawn(tune: int, kernel: str) -> int:
    return mix_words(tune, kernel)


def plan(known: Mapping[str, Sequence[str]], tune: int) -> Iterator[Policy]:
    """Policies that together run every configuration of every kernel, as many as the longest list has.

    Each policy moves all kernels one step on. Each kernel starts at a place in its list that `tune` draws, so that another number
    combines the configurations in other ways.
    """
    steps = max(map(len, known.values()), default=0)
    chosen = {kernel: texts for kernel, texts in sorted(known.items()) if len(texts) > 1}
    for step in range(steps):
        yield Policy(tune, tuple((name, texts[(_drawn(tune, name) + step) % len(texts)]) for name, texts in chosen.items()))


def narrow(failing: Policy, fails: Callable[[Policy], bool], base: Policy | None = None) -> list[Policy]:
    """The smallest policies that still fail. Each is the base with some picks of `failing`, usually one: the wrong configuration.

    `base`, by default `failing` without its picks, must not fail; ValueError if it does, since the picks are then not at fault.
    Every pick is tried alone, so two wrong kernels give two policies. If the remaining picks also fail, they only fail together,
    and give a policy that no longer fails without any one of its picks. An empty list means that `failing` does not fail again.
    """
    base = Policy(failing.tune) if base is None else base
    if base.picks:
        raise ValueError(f"base must be without picks, got {base}")
    if fails(base):
        raise ValueError(f"base must hold, so that a failure shows a pick, but {base} fails itself; try another number")
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
    """An entry of a deny-list: a wrong configuration, its GPU and Triton version, the law that it breaks, a run that shows it."""

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
                raise ValueError(f"{name} of a denied configuration must be a text that is not empty, got {value!r}")
        check_kernel(self.kernel)
        check_config(self.config)
        words = split_line(self.run)
        if "adapter" not in words or words.get("law") != self.law:
            raise ValueError(f"run of a denied configuration must have law={self.law} and adapter=..., got {self.run[:80]!r}")

    def to_json(self) -> dict[str, Any]:
        """The entry as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "Denied":
        """The entry from the data of `to_json`. ValueError names the wrong field and the rule."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, dict):
            raise ValueError(f"a denied configuration must be a table of {', '.join(sorted(names))}, got {str(data)[:80]!r}")  # noqa: TRY004
        if wrong := sorted(names ^ data.keys()):
            faults = ", ".join(f"{'no' if name in names else 'an unknown'} {str(name)[:80]}" for name in wrong)
            raise ValueError(f"a denied configuration must have {', '.join(sorted(names))}, got one with {faults}")
        return cls(**data)

    def applies(self, gpu: str, triton: str) -> bool:
        """Whether the entry is about this GPU and this version of Triton."""
        return (self.gpu, self.triton) == (gpu, triton)


def write_denied(path: str | os.PathLike[str], denied: Iterable[Denied]) -> None:
    """Write a deny-list to a file, one entry a line of JSON, sorted and without duplicates.

    The file is replaced at once: at any time it holds the whole old or the whole new list.
    """
    path = pathlib.Path(path)
    new = path.with_name(f"{path.name}.new")
    new.write_text(
        "".join(json.dumps(entry.to_json(), ensure_ascii=False) + "\n" for entry in sorted(set(denied))), encoding="utf-8"
    )
    os.replace(new, path)


def read_denied(path: str | os.PathLike[str]) -> list[Denied]:
    """Read the deny-list in a file. ValueError names the line and the rule that it breaks."""
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
    used: Used = dataclasses.field(default_factory=dict)
    error: TuningError | None = None
    orders: dict[tuple[str, tuple[str, ...]], list[str]] = dataclasses.field(default_factory=dict)

    def note(self, kernel: str, text: str) -> None:
        ran = self.used.get(kernel, ())
        if text not in ran:
            self.used[kernel] = (*ran, text)
        _KNOWN[kernel].setdefault(text)

    def about(self, kernel: str) -> tuple[Denied, ...]:
        return tuple(entry for entry in self.denied if _named(kernel, entry.kernel))

    def denies(self, kernel: str, text: str) -> bool:
        return any(_same(entry.config, text) for entry in self.about(kernel))

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
    """What we store on an autotuner: its configurations by text, and for each compile key those that the device cannot hold."""

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
    before, active = _active, _Active(policy, tuple(entry for entry in denied if entry.applies(*place)))
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
