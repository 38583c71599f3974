"""Palettes: the few compile keys that a check draws its cases from, others with another seed.

On a GPU a compile key that is new costs seconds (6 to 30 of a chunked rule, forward and backward), a case of one that is not 5 ms.
A case's class says in KEYS which of its words a compiled kernel depends on, by Triton's rules (tests/test_palette.py asks Triton):

- what is passed as `tl.constexpr` is in the key: heads, widths, flags, whether a tensor is there, and the number of rows of a
  batch, which kernels of flash-linear-attention that sum gates or make the gradients of q, k and g take so. Packed input is one;
- so is every tensor's dtype;
- an integer is in the key as 1, as a multiple of 16 or as neither, unless the kernel asks for it not to be. Rules ask so for the
  number of tokens; a convolution does not, neither for that nor for the stride of rows. Inside a layer keys leave that out, as they
  do the number of elements of small kernels: those are soon compiled;
- a float is not in the key, but KDA's recurrent kernel takes the scale as a constant;
- a call without backward compiles a part of what one with it does, so `backward` is in no key;
- whether a tensor's memory begins at a multiple of 16 bytes is: all tensors of a case do, some views that laws make do not.

A palette is chosen before anything is compiled: a check has as many keys as the palette has entries. Beside them are compiled what
laws make of an entry: no state, explicit gates, a norm outside, sequences of a packed call alone, views at odd places in memory.
"""

import collections
import dataclasses
import hashlib
import itertools
import random
from collections.abc import Iterable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from properties.books import book_of
from properties.cases.module_case import ModuleCase
from properties.cases.pool_case import PoolCase
from properties.cases.rule_case import Case
from properties.laws import Law
from properties.strategies import BLOCKS, EDGES, Example

SIZE = 12
SAMPLES = 24  # examples of each law that are drawn to see what it needs
LEAST = 2  # entries that suit each law and variant
FEW = 3  # entries for examples of laws whose runs have other forms: of fla/chunk 411 kernels in 768 cases, not 522
# Of these words only whether there is one is in a key: the value that says there is none.
ABSENT = {"state": "none", "fresh": "none", "accepted": "all"}
# An example grows by the width of its entry, for the oracle too: to no more than 1,200 tokens at 16 and 32 heads of 128.
MOST_BYTES = 2**27
OF_HEADS = ("heads", "permuted")  # laws that of one head have little to say: several stay several
LARGE = {"heads": 4, "value_heads": 8, "key_dim": 64, "value_dim": 64, "width": 64}
WEIGHTS = {"dtype": 4, "packed": 4, "rows": 4, "in_kernel": 4}  # of which no value may be missing: some laws are about one alone
REAL_TOKENS, REAL_LENGTHS = 2**15, (*BLOCKS, *EDGES, 1000, 2048, 3001, 4096, 6000)

Key = tuple[tuple[str, Any], ...]


def key_of(case: Any) -> Key:
    """What a compiled kernel depends on of a case. ValueError if its class does not say."""
    if not (names := getattr(case, "KEYS", ())):
        raise ValueError(f"a palette needs a case whose class has KEYS, got {type(case).__name__}")
    return (*((name, _compiled(name, getattr(case, name), case)) for name in names), *_layout(case))


@dataclasses.dataclass(frozen=True)
class Palette:
    """The compile keys of a check, each as a case that has it; which of them an example gets goes by the seed."""

    seed: int
    entries: tuple[Any, ...]

    @property
    def keys(self) -> tuple[Key, ...]:
        """The key of each entry, all different."""
        return tuple(key_of(entry) for entry in self.entries)

    def fit(self, law: Law, domain: Any, example: Example) -> Example | None:
        """The example with the key of an entry, or None where none suits: outside the domain, or not what the law is about.

        The oracle's law uses all entries, others the first three that suit an example, in an order of their own. The choice goes by
        a hash of the seed, the law's name and the example, and by nothing else.
        """
        number = number_of(self.seed, law.name, example.at, example.variant, example.case)
        most = len(self.entries) if law.name == "oracle" else FEW
        order = sorted(range(len(self.entries)), key=lambda index: number_of(self.seed, law.name, index))
        suited = (with_key(law, domain, example, self.entries[index], number) for index in order)
        first = list(itertools.islice((fitted for fitted in suited if fitted is not None), most))
        return first[number_of(number) % len(first)] if first else None

    def examples(self, law: Law, domain: Any) -> st.SearchStrategy[Example]:
        """The law's examples with keys of the palette; those that none suits are drawn again."""
        fitted: st.SearchStrategy[Any] = law.draw(domain).map(lambda example: self.fit(law, domain, example))
        return fitted.filter(lambda example: example is not None)


def draw_palette(domain: Any, seed: int, size: int = SIZE, laws: Iterable[str] | None = None) -> Palette:
    """The palette of a domain and a seed: `size` keys that differ as much as they can, and what laws need beside them.

    Keys are those of cases drawn for the oracle's law, the widest there is. A law or variant that fewer than two of them suit adds
    one or two of its own, so that there are at most `size` and two for each law's variant. `laws` are the names of those that will
    be asked, all of the book without. ValueError for a size below 1, an unknown law, or a book whose cases have no keys.
    """
    book = book_of(domain)
    if not hasattr(book.case, "KEYS"):
        raise ValueError(f"a palette needs a book whose cases have KEYS, got {book.name}")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be at least 1, got {size!r}")
    names = list(book.laws) if laws is None else list(laws)
    if unknown := [name for name in names if name not in book.laws]:
        raise ValueError(f"laws must be some of {', '.join(book.laws)}, got {unknown[0]!r}")
    candidates = sample(book.laws["oracle"].draw(domain), number_of(seed, "keys"), 8 * size)
    entries = _spread([example.case for example in candidates], size)
    keys = {key_of(entry) for entry in entries}
    for law in (book.laws[name] for name in names if book.laws[name].needs(domain) is None):
        drawn = sample(law.draw(domain), number_of(seed, "needs", law.name), SAMPLES)
        for variant in law.variants or (None,):
            asked = [example for example in drawn if example.variant == variant]
            suit = sum(any(with_key(law, domain, each, entry, 0) is not None for each in asked) for entry in entries)
            for example in asked:
                if suit < LEAST and key_of(example.case) not in keys:
                    entries.append(example.case)
                    keys.add(key_of(example.case))
                    suit += 1
    return Palette(seed, tuple(entries))


def with_key(law: Law, domain: Any, example: Example, entry: Any, number: int) -> Example | None:
    """The example with an entry's key, None if that is no legal case, outside the domain or not what the law is about.

    Lengths, gates, values and the seed stay; so does the place, if the law has the same ones, else `number` says which it is.
    """
    case = example.case
    if case.packed != entry.packed:  # its lengths were drawn for the one or the other
        return None
    if law.name in OF_HEADS and any(getattr(entry, name, 1) == 1 < getattr(case, name, 1) for name in ("heads", "value_heads")):
        return None
    words = {}
    for name in case.KEYS:
        own, other = getattr(case, name), getattr(entry, name)
        regime = name in ABSENT or (isinstance(case, Case) and name == "beta")
        words[name] = own if regime and _compiled(name, own, entry) == _compiled(name, other, entry) else other
    try:
        fitted = dataclasses.replace(case, **words)
    except ValueError:
        return None
    if key_of(fitted) != key_of(entry) or fitted.bytes > max(MOST_BYTES, case.bytes):
        return None
    at = example.at
    if law.place is not None and (places := law.place(fitted)) != law.place(case):
        at = places[number % len(places)] if places else None
    moved = Example(fitted, at, example.variant)
    return moved if suits(law, domain, moved) else None


def suits(law: Law, domain: Any, example: Example) -> bool:
    """Whether a case is inside the domain and the law can be asked about it."""
    try:
        law.accept(example)
    except ValueError:
        return False
    return domain.outside(example.case) is None


def real_case(seed: int) -> Case:
    """A case at the widths of Qwen3-Next: 16 key and 32 value heads of 128, 32,768 bf16 tokens packed in ragged sequences."""
    chance, lengths = random.Random(number_of(seed, "real")), list[int]()  # noqa: S311 - seeded, and not for secrets
    while (left := REAL_TOKENS - sum(lengths)) > 0:
        lengths.append(min(left, chance.choice(REAL_LENGTHS)))
    chance.shuffle(lengths)
    return Case(
        tuple(lengths),
        packed=True,
        heads=16,
        value_heads=32,
        key_dim=128,
        value_dim=128,
        dtype="bf16",
        gate="mixed",
        state="random",
        qk_norm=True,
        seed=chance.randrange(2**16),
    )


def sample(strategy: st.SearchStrategy[Example], seed: int, count: int) -> list[Example]:
    """As many examples of a strategy, the same ones for the same seed; fewer if it has no more."""
    kept: list[Example] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, phases=(Phase.generate,), database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(strategy)
    def look(example: Example) -> None:
        kept.append(example)

    look()
    return kept


def number_of(*words: object) -> int:
    """A 64-bit number that depends on every word, the same on every machine."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:8], "big")


def _compiled(name: str, value: Any, beside: Any) -> Any:
    """What of a word's value a kernel is compiled for, None for nothing, beside the other words of a case."""
    if name in ABSENT:
        return value != ABSENT[name]
    if name == "offsets" and not beside.packed:
        return None
    if isinstance(beside, Case):
        if name == "beta":
            return beside.beta_inside and value == "two"
        if (name == "gate_dtype" and (beside.gate_inside or beside.operation == "delta_rule")) or (
            name == "dt_bias" and not beside.gate_inside
        ):
            return None
    return value


def _layout(case: Any) -> Key:
    """What of a case's lengths a kernel is compiled for: serving kernels and those of single tokens for nothing."""
    if isinstance(case, PoolCase):
        return ()
    if isinstance(case, ModuleCase):
        if case.operation != "causal_conv1d":
            return ()
        rows, tokens = case.batch
        of_tokens = "one" if tokens == 1 else _of_16(tokens)
        return (("rows", min(rows, 2)), ("tokens", of_tokens), ("row", _of_16(max(tokens, 1) * case.width)))
    return (("rows", 0 if case.packed else min(len(case.lengths), 2)),)


def _of_16(number: int) -> str:
    return "aligned" if number % 16 == 0 else "any"


def _spread(cases: list[Any], size: int) -> list[Any]:
    """Cases of different keys, as many: each next one is that whose traits are the rarest among those before it."""
    left = [(case, _traits(key)) for key, case in {key_of(case): case for case in cases}.items()]
    counts: collections.Counter[tuple[str, Any]] = collections.Counter()
    chosen: list[Any] = []
    while left and len(chosen) < size:
        rarest = min(left, key=lambda each: sum(counts[trait] ** 2 * WEIGHTS.get(trait[0], 1) for trait in each[1]))
        left.remove(rarest)
        chosen.append(rarest[0])
        counts.update(rarest[1])
    return chosen


def _traits(key: Key) -> list[tuple[str, Any]]:
    """What keys are told apart by: each word's value, of widths and heads whether it is a power of two and whether it is large."""
    words, traits = dict(key), list[tuple[str, Any]]()
    for name, value in key:
        if name in LARGE:
            traits += [(name, value.bit_count() == 1), (f"large {name}", value >= LARGE[name])]
        else:
            traits.append((name, value))
    if "value_dim" in words:
        traits.append(("K = V", words["key_dim"] == words["value_dim"]))
    return traits
