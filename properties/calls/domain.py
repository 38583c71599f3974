"""What any callable promises, and cases drawn inside that. The inputs and outputs are named with their axes."""

import dataclasses
import random
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from hypothesis import strategies as st

from properties.calls.case import OFFSETS, VALUES, CallCase, arguments_of, operation_of, sizes_of
from properties.words.domain import AnyDomain, check_views
from properties.words.lengths import BLOCKS, EDGES, lengths
from properties.words.names import known_fields
from properties.words.word import flag, some_of

SIZES = (8, 16, 1, 24, 33, 64)
HEADS = (1, 2, 4, 3)
LONGEST, FURTHER = 80, 1030  # the longest sequence of most cases, and that of all cases; a domain may allow less
Named = Mapping[str, str] | tuple[tuple[str, str], ...]


@known_fields
@dataclasses.dataclass(frozen=True)
class CallDomain(AnyDomain):
    """The calls for which a callable promises right results. Fields that Domain has too mean the same.

    ValueError for a field outside its choices or range.
    """

    CASE = CallCase
    has_limits = True

    operation: str = "call"
    inputs: Any = (("x", "B T D"),)
    """Names and axes, such as {"q": "B T H K"}. B and T are the axes of tokens, N is that of sequences; a tensor with neither is a
    parameter. Behind the axes may stand the kind of the numbers: "fp32" (whatever the dtype of the case), "negative" (-1 to 0, as
    log-decays), "unit" (0 to 1) or "normalised" (rows of 2-norm 1). {"cu_seqlens": "offsets"} are the offsets of packed sequences,
    None in a batch."""
    outputs: Any = (("y", "B T D"),)
    """Names and axes."""
    sizes: Any = ()
    """The sizes that are drawn for an axis, by axis; HV is drawn as a multiple of H."""
    dtypes: Annotated[tuple[str, ...], some_of("dtype")] = ("fp32", "bf16", "fp16")
    batched: Annotated[bool, flag("packed", value=False)] = True
    empty: bool = False
    """Whether a sequence may have no tokens."""
    longest: int = 150
    """The most tokens of a sequence."""
    causal: bool = True
    """Whether no output of a token depends on later tokens."""
    isolated: bool = True
    """Whether this and the independence of sequences are exact to the bit; an FFT over tokens is not."""
    views: bool | tuple[str, ...] = True
    deterministic: bool = True
    position_independent: bool = False
    backward: Annotated[bool, flag("backward")] = True
    refills: bool = True
    threads: bool = True
    streams: bool = True
    keeps_outputs: bool = True

    def __post_init__(self) -> None:
        check_views(self)
        for name in ("inputs", "outputs", "sizes"):
            value: Any = getattr(self, name)
            pairs: Any = list(value.items()) if isinstance(value, Mapping) else value
            entry = tuple if name == "sizes" else str
            if not isinstance(pairs, list | tuple) or not all(
                isinstance(axes, str) and isinstance(found, entry | list) for axes, found in pairs
            ):
                raise ValueError(f"{name} must map names to {'tuples' if entry is tuple else 'axes'}, got {value!r}")
            frozen: Any = tuple((axes, tuple(found)) if entry is tuple else (axes, found) for axes, found in pairs)
            object.__setattr__(self, name, frozen)
        operation_of(self.takes, self.gives)
        if not (self.packed or self.batched):
            raise ValueError(f"batched must be True unless there is the input {OFFSETS}, got False")
        self.check_fields()
        for axis, choices in self.sizes:
            if axis not in self.axes or not choices or not all(isinstance(size, int) and size > 0 for size in choices):
                raise ValueError(f"sizes must map axes among {', '.join(self.axes)} to numbers from 1 up, got {axis}: {choices!r}")
        if {"H", "HV"} <= {*self.axes} and not self.head_pairs:
            raise ValueError(
                f"sizes must have a multiple of a size of H for HV, got H: {self.sizes_for('H')!r} and HV: {self.sizes_for('HV')!r}"
            )
        if not isinstance(self.longest, int) or self.longest < 1:
            raise ValueError(f"longest must be at least 1, got {self.longest!r}")

    @property
    def packed(self) -> bool:
        """Whether the callable takes packed sequences."""
        return OFFSETS in dict(self.inputs)

    @property
    def takes(self) -> str:
        """The inputs, as a case has them."""
        return _text(self.inputs)

    @property
    def gives(self) -> str:
        """The outputs, as a case has them."""
        return _text(self.outputs)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes whose sizes are drawn, in the order in which they first come."""
        found = (axis for text in (self.takes, self.gives) for argument in arguments_of(text) for axis in argument.axes)
        return tuple(axis for axis in dict.fromkeys(found) if axis not in ("B", "T", "N"))

    @property
    def head_pairs(self) -> list[tuple[int, int]]:
        """The sizes of H and HV that go together, of those that are drawn for the two axes."""
        return [(heads, value) for heads in self.sizes_for("H") for value in self.sizes_for("HV") if value % heads == 0]

    def sizes_for(self, axis: str) -> tuple[int, ...]:
        """Return the sizes that are drawn for an axis."""
        named: dict[str, tuple[int, ...]] = dict(self.sizes)
        return named.get(axis, HEADS if axis == "H" else SIZES)

    def reasons(self, case: Any) -> Iterable[tuple[bool, str]]:
        """Return what else must be true of a case inside the domain, each with what is said if it is not."""
        sizes = sizes_of(case.sizes)
        limits = [axis for axis in sizes if not (axis == "HV" and "H" in sizes) or "HV" in dict(self.sizes)]
        return (
            ((case.takes, case.gives) == (self.takes, self.gives), "the line has other inputs or outputs than the adapter"),
            (
                all(min(self.sizes_for(axis)) <= sizes[axis] <= max(self.sizes_for(axis)) for axis in limits if axis in self.axes),
                f"sizes={case.sizes} are not within the sizes of the domain",
            ),
            ("HV" not in sizes or sizes["HV"] % sizes.get("H", 1) == 0, f"sizes={case.sizes}: HV must be a multiple of H"),
            (self.packed or not case.packed, "packed=yes is not supported"),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (max(case.lengths) <= self.longest, f"lengths={max(case.lengths)}: more than {self.longest} tokens are not supported"),
        )


def _far(chance: random.Random, longest: int) -> int:
    """Draw a length of more than half of `longest`: next to a block size, or any such length."""
    longest = min(longest, FURTHER)
    edges = [length for length in (*BLOCKS, *EDGES) if longest // 2 < length <= longest]
    return chance.choice(edges) if edges and chance.random() < 1 / 2 else chance.randint(longest // 2 + 1, longest)


def _with(chance: random.Random, length: int, lengths: tuple[int, ...], places: range) -> tuple[int, ...]:
    """Return the lengths with `length` in place of one of them, at one of the places."""
    place = chance.choice(places)
    return (*lengths[:place], length, *lengths[place + 1 :])


def _text(named: Named) -> str:
    return ",".join(f"{name}:{'.'.join(axes.split())}" for name, axes in dict(named).items())


@st.composite
def call_cases(
    draw: st.DrawFn,
    /,
    domain: CallDomain,
    sequences: tuple[int, int] = (1, 4),
    longest: int = LONGEST,
    total: int = 160,
    **fixed: Any,
) -> CallCase:
    """Draw any case of the domain; `fixed` gives fields as a value, or as a tuple of values to choose from.

    If `longest` is not given and the domain allows longer sequences, one case in three has a sequence of more than half of the
    domain's longest, or a batch of up to two of these. If sequences may be empty, one packed case in three has an empty one
    between others.
    """
    chance: random.Random = draw(st.randoms(use_true_random=True))

    def field(name: str, choices: tuple[Any, ...]) -> Any:
        options = fixed.get(name, choices)
        return chance.choice(options) if isinstance(options, tuple) else options

    packed = field("packed", tuple(choice for choice, can in ((True, domain.packed), (False, domain.batched)) if can))
    further = longest == LONGEST < domain.longest and chance.random() < 1 / 3
    longest = min(longest, domain.longest)
    if packed:
        drawn = lengths(chance, sequences, longest, total, empty=domain.empty, many=sequences[1] >= 4)
        if domain.empty and len(drawn) > 2 and chance.random() < 1 / 3:
            drawn = _with(chance, 0, drawn, range(1, len(drawn) - 1))
        if further:
            drawn = _with(chance, _far(chance, domain.longest), drawn, range(len(drawn)))
    else:
        rows = chance.randint(*sequences)
        drawn = lengths(chance, (1, 1), min(longest, max(1, total // rows)), total, empty=domain.empty, many=False) * rows
        if further:
            drawn = (_far(chance, domain.longest),) * min(rows, 2)
    sizes = {axis: chance.choice(domain.sizes_for(axis)) for axis in domain.axes}
    if "H" in sizes and "HV" in sizes:
        groups = tuple(sizes["H"] * times for times in (1, 2, 3)) if "HV" not in dict(domain.sizes) else ()
        sizes["H"], sizes["HV"] = chance.choice([(sizes["H"], size) for size in groups] or domain.head_pairs)
    return CallCase(
        drawn,
        takes=domain.takes,
        gives=domain.gives,
        sizes=",".join(f"{axis}:{size}" for axis, size in sizes.items()),
        packed=packed,
        dtype=field("dtype", domain.dtypes),
        values=field("values", VALUES),
        offsets=field("offsets", ("int64", "int32")) if packed else "int64",
        backward=domain.backward and field("backward", (True,)),
        seed=chance.randrange(2**16),
    )
