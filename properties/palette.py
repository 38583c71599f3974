"""Palettes: the few compile keys that a check on a GPU uses for its cases; another seed gives other keys.

On a GPU, a case with a new compile key costs seconds (6 to 30 for a chunked rule, forward and backward); a case with a compiled key
costs 5 ms. The class of a case lists in KEYS the words on which a compiled kernel depends. They follow Triton's rules, which
tests/checks/test_palette.py compares with Triton:

- A `tl.constexpr` argument is in the key: heads, widths, flags, whether a tensor is given, and in some kernels the number of rows
  of a batch: those of flash-linear-attention that sum gates or make the gradients of q, k and g. Packed input has one row.
- The dtype of every tensor is in the key.
- An integer is in the key as 1, as a multiple of 16, or as neither, unless the kernel opts out. Rules opt out for the number of
  tokens. A convolution does not, neither for that nor for the stride of rows. Keys inside a layer leave these out, and also the
  number of elements of small kernels, because those compile quickly.
- A float is not in the key, but KDA's recurrent kernel takes the scale as a constant.
- A call without backward compiles a part of what a call with backward compiles, so `backward` is in no key.
- Whether a tensor's memory begins at a multiple of 16 bytes is in the key. It does for all tensors of a case, but not for some
  views that laws make.

A palette is chosen before anything is compiled, so a check has as many keys as the palette has entries. In addition, kernels are
compiled for the calls that laws make from an entry: without a state, with explicit gates, with a norm outside, with one sequence of
a packed call alone, with views at odd places in memory.
"""

import collections
import dataclasses
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from properties.books import book_of
from properties.laws.law import Law
from properties.modules.case import ModuleCase
from properties.pools.case import PoolCase
from properties.rules.case import Case
from properties.seeds import draw
from properties.words.example import Example
from properties.words.lengths import BLOCKS, EDGES
from properties.words.sizes import EVERY_ON_GPU, KINDS, with_drawing

SIZE = 12
SAMPLES = 24  # examples of each law that are drawn to see which keys it needs
LEAST = 2  # least number of entries that suit each law and variant
FEW = 3  # entries for each law but the oracle's: 768 cases of fla/chunk then compile 411 kernels instead of 522
# Wider keys, by `compile_cost`, compile for a minute. It is the cost of 128 key and value channels in float32.
WIDE = 2**15
# Words of which a key has only whether the value differs from this one.
ABSENT = {"state": "none", "fresh": "none", "accepted": "all"}
# An example may grow with the widths of its entry, for the oracle too; the limit is 1,200 tokens at 16 and 32 heads of 128.
MOST_BYTES = 2**27
LARGE = {"heads": 4, "value_heads": 8, "key_dim": 64, "value_dim": 64, "width": 64}
WEIGHTS = {"dtype": 4, "packed": 4, "rows": 4, "in_kernel": 4}  # no value of these may be missing: some laws need a certain one
REAL_TOKENS, REAL_LENGTHS = 2**15, (*BLOCKS, *EDGES, 1000, 2048, 3001, 4096, 6000)

Key = tuple[tuple[str, Any], ...]


def key_of(case: Any) -> Key:
    """Return what a compiled kernel depends on in a case. ValueError if the class of the case has no KEYS."""
    if not (names := getattr(case, "KEYS", ())):
        raise ValueError(f"a palette needs a case whose class has KEYS, got {type(case).__name__}")
    return (*((name, _compiled(name, getattr(case, name), case)) for name in names), *_layout(case))


def kernels_of(case: Any) -> Key:
    """Return the key of a case with the number of rows of its batch, because kernels that take it as a constant differ by it.

    Keys of a palette have only whether there are several rows.
    """
    key = key_of(case)
    several = dict(key).get("rows") == 2 and not isinstance(case, ModuleCase)
    return (*key, ("batch", len(case.lengths))) if several else key


@dataclasses.dataclass(frozen=True)
class Palette:
    """The compile keys of a check, each as a case that has it; the seed decides which of them an example gets.

    With `shapes`, an example gets the lengths of the entry too, and a law acts at one place of each entry. Some laws need certain
    lengths: tokens that lie far apart, for one, must be many. If the entry's lengths are no such lengths, an example keeps its own.
    """

    seed: int
    entries: tuple[Any, ...]
    shapes: bool = False

    @property
    def keys(self) -> tuple[Key, ...]:
        """The key of each entry, all different."""
        return tuple(key_of(entry) for entry in self.entries)

    def fit(self, law: Law, domain: Any, example: Example) -> Example | None:
        """Return the example with the key of an entry, or None if no entry suits.

        An entry does not suit if the example would be outside the domain or the law would not apply to it. The oracle's law uses
        all entries; other laws use the first three that suit an example, in an order of their own. Truth laws launch kernels of
        their own. So a truth law takes wide entries like others in one of four seeds, and else only if no other suits. The choice
        depends only on a hash of the seed, the law's name and the example.
        """
        number = number_of(self.seed, law.name, example.at, example.variant, example.case)
        most = len(self.entries) if law.base else FEW
        narrow = law.kind == "truth" and not law.base and number_of(self.seed, law.name, "wide") % 4 > 0
        wide = [narrow and compile_cost(entry) > WIDE for entry in self.entries]
        order = sorted(range(len(self.entries)), key=lambda index: (wide[index], number_of(self.seed, law.name, index)))
        suited = ((wide[index], self._with_key(law, domain, example, index, number)) for index in order)
        first = list(itertools.islice((pair for pair in suited if pair[1] is not None), most))
        chosen = [fitted for late, fitted in first if late is first[0][0]]
        return chosen[number_of(number) % len(chosen)] if chosen else None

    def _with_key(self, law: Law, domain: Any, example: Example, index: int, number: int) -> Example | None:
        entry = self.entries[index]
        if not self.shapes:
            return with_key(law, domain, example, entry, number)
        if example.case.packed != entry.packed:
            return None
        try:
            case = dataclasses.replace(example.case, lengths=entry.lengths)
        except ValueError:
            return None
        if law.lacks(case, example.variant):
            case = example.case
        return with_key(law, domain, Example(case, None, example.variant), entry, number_of(self.seed, law.name, index))

    def examples(self, law: Law, domain: Any) -> st.SearchStrategy[Example]:
        """Return a strategy for the law's examples with keys of the palette; examples that no entry suits are drawn again."""
        fitted: st.SearchStrategy[Any] = law.draw(domain).map(lambda example: self.fit(law, domain, example))
        return fitted.filter(lambda example: example is not None)


def draw_palette(domain: Any, seed: int, size: int = SIZE, laws: Iterable[str] | None = None) -> Palette:
    """Return the palette of a domain and a seed: `size` keys that differ as much as possible, and further keys that laws need.

    Keys come from cases drawn for the oracle's law, which has the widest range. A law or variant that fewer than two of these keys
    suit adds one or two of its own. So there are at most `size` keys and two for each law's variant. `laws` names the laws to be
    checked, by default all of the book. ValueError for a size below 1, an unknown law, or a book whose cases have no KEYS.
    """
    book = book_of(domain)
    if not book.case.KEYS:
        raise ValueError(f"a palette needs a book whose cases have KEYS, got {book.name}")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be at least 1, got {size!r}")
    names = list(book.laws) if laws is None else list(laws)
    if unknown := [name for name in names if name not in book.laws]:
        raise ValueError(f"laws must be some of {', '.join(book.laws)}, got {unknown[0]!r}")
    assert book.base is not None, book.name
    candidates = _sample(book.base, domain, number_of(seed, "keys"), 8 * size)
    entries = _spread([example.case for example in candidates], size)
    keys = {key_of(entry) for entry in entries}
    for law in (book.laws[name] for name in names if book.laws[name].needs(domain) is None):
        drawn = _sample(law, domain, number_of(seed, "needs", law.name), SAMPLES)
        for variant in law.variants or (None,):
            asked = [example for example in drawn if example.variant == variant]
            suit = sum(any(with_key(law, domain, candidate, entry, 0) is not None for candidate in asked) for entry in entries)
            for example in asked:
                if suit < LEAST and key_of(example.case) not in keys:
                    entries.append(example.case)
                    keys.add(key_of(example.case))
                    suit += 1
    return Palette(seed, tuple(entries))


def with_key(law: Law, domain: Any, example: Example, entry: Any, number: int) -> Example | None:
    """Return the example with an entry's key.

    None if that is not a legal case, is outside the domain, or if the law does not apply to it. Lengths, gates, values and the seed
    stay. The place stays if the law has the same places for the new case; otherwise `number` selects it.
    """
    case = example.case
    if case.packed != entry.packed:  # the lengths were drawn for one of the two
        return None
    if law.several_heads and any(getattr(entry, name, 1) == 1 < getattr(case, name, 1) for name in ("heads", "value_heads")):
        return None
    words = {}
    for name in case.KEYS:
        value, other = getattr(case, name), getattr(entry, name)
        regime = name in ABSENT or (isinstance(case, Case | PoolCase) and name == "beta")
        words[name] = value if regime and _compiled(name, value, entry) == _compiled(name, other, entry) else other
    try:
        fitted = dataclasses.replace(case, **words)
    except ValueError:
        return None
    if key_of(fitted) != key_of(entry) or fitted.bytes > max(MOST_BYTES, case.bytes):
        return None
    at = example.at
    if law.place is not None and ((places := law.place(fitted)) != law.place(case) or at is None):
        allowed = [place for place in places if law.outside(domain, Example(fitted, place, example.variant)) is None]
        at = allowed[number % len(allowed)] if allowed else None
    moved = Example(fitted, at, example.variant)
    return moved if suits(law, domain, moved) else None


def compile_cost(case: Any) -> int:
    """Return a number that orders compile keys by their compile time, estimated from the widths; float32 counts twice."""
    widths = [getattr(case, name, 1) for name in ("key_dim", "value_dim", "width")]
    return math.prod(widths) * (2 if case.dtype == "fp32" else 1)


def suits(law: Law, domain: Any, example: Example) -> bool:
    """Whether the case is inside the law's part of the domain and the law applies to the example."""
    try:
        law.accept(example)
    except ValueError:
        return False
    return law.within(domain).outside(example.case) is None and law.outside(domain, example) is None


def real_case(seed: int) -> Case:
    """Return a case at the widths of Qwen3-Next: 16 key and 32 value heads of 128, 32,768 packed bf16 tokens, ragged lengths."""
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
    """Return `count` examples of a strategy, fewer if it has no more; the same seed gives the same examples."""
    examples: list[Example] = []
    draw(strategy, seed, count, examples.append)
    return examples


def _sample(law: Law, domain: Any, seed: int, count: int) -> list[Example]:
    """Return examples of a law on a GPU: `count` ordinary ones, and about one in EVERY_ON_GPU more that are large, of each kind."""
    strategy, kinds = law.on_gpu().draw, KINDS if domain.drawing.long and domain.draws_large else ()
    examples = _drawn(strategy, domain, seed, count + 1)[1:]  # the first one is the same for every seed
    for kind in kinds:
        large, more = with_drawing(domain, large=kind), max(1, count // (EVERY_ON_GPU * len(KINDS)))
        examples += _drawn(strategy, large, number_of(seed, kind), more + 1)[1:]
    return examples


def _drawn(draw: Callable[[Any], st.SearchStrategy[Example]], domain: Any, seed: int, count: int) -> list[Example]:
    """Return the examples of `sample`, or none if they cannot be drawn: the check of that law says why, and other laws go on."""
    try:
        return sample(draw(domain), seed, count)
    except Exception:
        return []


def number_of(*words: object) -> int:
    """Return a 64-bit number that depends on every word and is the same on every machine."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:8], "big")


def _compiled(name: str, value: Any, beside: Any) -> Any:
    """Return what a kernel is compiled for in a word's value, given the other words of the case; None for nothing."""
    if name in ABSENT:
        return value != ABSENT[name]
    if name == "offsets" and not beside.packed:
        return None
    if isinstance(beside, PoolCase):
        beside = beside.call()
    if isinstance(beside, Case):
        if name == "state_dtype" and beside.state == "none":
            return None
        if name == "beta":
            return beside.beta_inside and value == "two"
        if (name == "gate_dtype" and (beside.gate_inside or beside.operation == "delta_rule")) or (
            name == "dt_bias" and not beside.gate_inside
        ):
            return None
    return value


def _layout(case: Any) -> Key:
    """Return what a kernel is compiled for in a case's lengths; nothing for serving kernels and for operations on single tokens."""
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
    """Return up to `size` cases of different keys; each next case is the one whose traits are the rarest so far."""
    left = [(case, _traits(key)) for key, case in {key_of(case): case for case in cases}.items()]
    counts: collections.Counter[tuple[str, Any]] = collections.Counter()
    chosen: list[Any] = []
    while left and len(chosen) < size:
        rarest = min(left, key=lambda pair: sum(counts[trait] ** 2 * WEIGHTS.get(trait[0], 1) for trait in pair[1]))
        left.remove(rarest)
        chosen.append(rarest[0])
        counts.update(rarest[1])
    return chosen


def _traits(key: Key) -> list[tuple[str, Any]]:
    """Return the traits by which keys are compared: the value of each word.

    For widths and heads, these are whether the number is a power of two, and whether it is large.
    """
    words, traits = dict(key), list[tuple[str, Any]]()
    for name, value in key:
        if name in LARGE:
            traits += [(name, value.bit_count() == 1), (f"large {name}", value >= LARGE[name])]
        else:
            traits.append((name, value))
    if "value_dim" in words:
        traits.append(("K = V", words["key_dim"] == words["value_dim"]))
    return traits
