"""The deny-list among the known defects: autotune configurations of released kernels that lose the device. No draw takes them.

A lost device costs a worker its process, and a new one takes about 10 s. A line that picks such a configuration still runs it.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from properties.words.line import split_line
from properties.words.names import did_you_mean
from verify.adapters.packages import installed
from verify.gpu import policies

Versions = dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Denial:
    """The configurations of a kernel that have all words of `config`, and that lose one of `cards` with these versions.

    They are left out of every case but those that cannot be meant: a word of the case differs from `where`, or a number of it is
    less than in `least` or greater than in `most`. A case without such a word may be meant.
    """

    kernel: str
    config: str
    cards: tuple[str, ...]
    versions: Versions
    reason: str
    where: dict[str, str] = dataclasses.field(default_factory=dict)
    least: dict[str, int] = dataclasses.field(default_factory=dict)
    most: dict[str, int] = dataclasses.field(default_factory=dict)

    def applies(self, gpu: str, words: Mapping[str, str]) -> bool:
        """Whether the configurations are left out of a case with these words on a GPU of this name."""
        return is_card(gpu, self.cards) and fit(self.versions) and self._may_mean(words)

    def _may_mean(self, words: Mapping[str, str]) -> bool:
        numbers = {name: int(word) for name, word in words.items() if word.isdecimal()}
        return (
            all(words.get(name, word) == word for name, word in self.where.items())
            and all(numbers.get(name, number) >= number for name, number in self.least.items())
            and all(numbers.get(name, number) <= number for name, number in self.most.items())
        )

    def launched(self, used: Iterable[str]) -> bool:
        """Whether the kernel is among those that ran."""
        return any(policies.is_named(name, self.kernel) for name in used)

    def __str__(self) -> str:
        """The kernel, the configurations, the packages and the reason, in one line."""
        versions = ", ".join(f"{name} {' or '.join(listed)}" for name, listed in self.versions.items())
        return f"{self.kernel} with {self.config}: {self.reason} ({versions} on {' and '.join(self.cards)})"


def is_card(gpu: str, cards: Sequence[str]) -> bool:
    """Whether one of `cards` is the name of a GPU or a word in it."""
    return not {gpu, *gpu.split()}.isdisjoint(cards)


def fit(versions: Versions) -> bool:
    """Whether the installed versions are among the listed ones."""
    return all(installed(name) in listed for name, listed in versions.items())


def denial(what: str, entry: dict[str, object]) -> Denial:
    """The entry of a [[deny]] table. ValueError begins with `what` and names the rule that the entry breaks."""
    needed = {"kernel", "config", "cards", "versions", "reason"}
    if missing := needed - entry.keys():
        raise ValueError(f"{what} must have {', '.join(sorted(missing))}")
    keys = [field.name for field in dataclasses.fields(Denial)]
    if unknown := next((key for key in entry if key not in keys), None):
        raise ValueError(f"{what} has an unknown key {unknown!r}{did_you_mean(unknown, keys)}")
    listed = versions_of(what, entry)
    kernel, config, cards = configuration_of(what, entry, listed)
    least, most = (numbers_of(what, entry, *pair) for pair in (("least", "least"), ("most", "greatest")))
    return Denial(kernel, config, cards, listed, str(entry["reason"]), split_line(str(entry.get("where", ""))), least, most)


def versions_of(what: str, entry: dict[str, object]) -> Versions:
    """The versions of an entry. ValueError unless they name distributions and lists of their versions."""
    versions = entry["versions"]
    if not isinstance(versions, dict) or not versions or not all(map(_are_texts, versions.values())):
        raise ValueError(f"{what}: versions must name a distribution and its versions, got {versions!r}")
    return {name: tuple(choices) for name, choices in versions.items()}


def configuration_of(what: str, entry: dict[str, object], versions: Versions) -> tuple[str, str, tuple[str, ...]]:
    """The kernel, configuration and cards of an entry. ValueError if one of them is missing or wrong."""
    names, cards = [name for name in ("kernel", "config", "cards") if name in entry], entry.get("cards")
    if len(names) < 3 or "triton" not in versions:
        raise ValueError(f"{what}: kernel, config and cards come together, with a version of triton, got {', '.join(names)}")
    try:
        kernel, config = policies.check_kernel(str(entry["kernel"])), policies.check_config(str(entry["config"]))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if not isinstance(cards, list) or not _are_texts(cards):
        raise ValueError(f"{what}: cards must be a list of names of GPUs, or of words in them, got {cards!r}")
    return kernel, config, tuple(cards)


def numbers_of(what: str, entry: dict[str, object], name: str, which: str) -> dict[str, int]:
    """The words of an entry's `least` or `most` with their numbers. ValueError if they are not whole numbers."""
    numbers = entry.get(name, {})
    if not isinstance(numbers, dict) or not all(isinstance(number, int) for number in numbers.values()):
        raise ValueError(f"{what}: {name} must give words their {which} whole numbers, got {numbers!r}")
    return numbers


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) and value for value in values)
