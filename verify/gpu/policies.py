"""A policy says which autotune configuration every Triton kernel runs with, in one word of a line. Deny-lists name wrong ones.

    tune=native                         Triton times all configurations and chooses, as it does without gdn-verify
    tune=17                             each kernel gets one of its cheap configurations, drawn from 17 and the kernel's name
    tune=17,chunk_fwd_kernel_o:BK=64:BV=64:num_warps=4:num_stages=3
                                        the named kernel gets the named configuration, the others those of 17

There are two reasons. Timing every configuration of FLA's kernels takes over 80 s for the forward pass of one shape, while one
small configuration for each kernel takes 6 s. And a configuration that is wrong is not seen while another one is the fastest.

The name of a kernel is its module and name, `fla.ops.common.chunk_o.chunk_fwd_kernel_o`. A pick may use the end of it:
`chunk_fwd_kernel_o`.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from properties.words.line import split_line

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
        fitting = [(len(name), config) for name, config in self.picks if is_named(kernel, name)]
        return max(fitting)[1] if fitting else None

    def missed(self, used: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
        """The picks that did not run, because their kernel never ran or ran with other configurations."""
        return [
            (name, config)
            for name, config in self.picks
            if not any(is_named(kernel, name) and any(same_config(config, ran) for ran in texts) for kernel, texts in used.items())
        ]


NATIVE = Policy()


def is_timed(tune: str) -> bool:
    """Whether Triton chooses configurations by time under this word of a line; "" leaves kernels as they are."""
    return not tune or Policy.parse(tune).tune is None


def ran(used: Mapping[str, Iterable[str]], kernel: str, config: str) -> bool:
    """Whether a kernel, named by its whole name or the end of it, ran with a configuration that has all words of `config`."""
    words = {*config.split(":")}
    return any(is_named(name, kernel) and any(words <= {*text.split(":")} for text in texts) for name, texts in used.items())


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


def is_named(kernel: str, name: str) -> bool:
    """Whether a name, the whole of it or its end, is that of a kernel."""
    return kernel == name or kernel.endswith(f".{name}")


def same_config(config: str, other: str) -> bool:
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
    from oracles.arithmetic.counter import mix_words  # it imports torch, which a command line without a case does not need

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
