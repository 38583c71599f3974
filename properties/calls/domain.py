"""What any callable promises, and cases drawn inside that. The inputs and outputs are named with their axes."""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from oracles.operation import DTYPES
from properties.calls.case import OFFSETS, VALUES, CallCase, arguments_of, operation_of, sizes_of
from properties.words.lengths import BLOCKS, EDGES, lengths
from properties.words.names import known_fields

SIZES = (8, 16, 1, 24, 33, 64)
HEADS = (1, 2, 4, 3)
LONGEST, FURTHER = 80, 1030  # the longest sequence of most cases, and that of all cases; a domain may allow less
Named = Mapping[str, str] | tuple[tuple[str, str], ...]


@known_fields
@dataclasses.dataclass(frozen=True)
class CallDomain:
    """The calls for which a callable promises right results.

    `inputs` and `outputs` map names to axes, such as {"q": "B T H K"}. B and T are the axes of tokens, N is that of sequences; a
    tensor with neither is a parameter. Behind the axes may stand the kind of the numbers: "fp32" (whatever the dtype of the case),
    "negative" (-1 to 0, as log-decays), "unit" (0 to 1) or "normalised" (rows of 2-norm 1). {"cu_seqlens": "offsets"} are the
    offsets of packed sequences, None in a batch. `sizes` maps an axis to the sizes that are drawn; HV is drawn as a multiple of H.

    `causal` says that no output of a token depends on later tokens. `isolated` says that this and the independence of sequences are
    exact to the bit; an FFT over tokens is not. `empty` says whether a sequence may have no tokens, and `longest` is the most
    tokens of a sequence. The other fields mean the same as in Domain.

    ValueError for a field outside its choices or range.
    """

    operation: str = "call"
    inputs: Any = (("x", "B T D"),)
    outputs: Any = (("y", "B T D"),)
    sizes: Any = ()
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    batched: bool = True
    empty: bool = False
    longest: int = 150
    causal: bool = True
    isolated: bool = True
    views: bool = True
    deterministic: bool = True
    position_independent: bool = False
    backward: bool = True
    refills: bool = True
    threads: bool = True
    streams: bool = True

    def __post_init__(self) -> None:
        if self.operation != "call":
            raise ValueError(f"operation must be call, got {self.operation!r}")
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
        if not isinstance(self.dtypes, tuple) or not self.dtypes or not set(self.dtypes) <= set(DTYPES):
            raise ValueError(f"dtypes must be a tuple of some of {', '.join(DTYPES)}, got {self.dtypes!r}")
        for axis, choices in self.sizes:
            if axis not in self.axes or not choices or not all(isinstance(size, int) and size > 0 for size in choices):
                raise ValueError(f"sizes must map axes among {', '.join(self.axes)} to numbers from 1 up, got {axis}: {choices!r}")
        if {"H", "HV"} <= {*self.axes} and not self.head_pairs:
            raise ValueError(
                f"sizes must have a multiple of a size of H for HV, got H: {self.choices('H')!r} and HV: {self.choices('HV')!r}"
            )
        if not isinstance(self.longest, int) or self.longest < 1:
            raise ValueError(f"longest must be at least 1, got {self.longest!r}")
        if not (self.packed or self.batched):
            raise ValueError(f"batched must be True unless there is the input {OFFSETS}, got False")

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
        return [(heads, value) for heads in self.choices("H") for value in self.choices("HV") if value % heads == 0]

    def choices(self, axis: str) -> tuple[int, ...]:
        """Return the sizes that are drawn for an axis."""
        named: dict[str, tuple[int, ...]] = dict(self.sizes)
        return named.get(axis, HEADS if axis == "H" else SIZES)

    def outside(self, case: CallCase) -> str | None:
        """Return why `case` is outside the domain, or None."""
        sizes = sizes_of(case.sizes)
        limits = [axis for axis in sizes if not (axis == "HV" and "H" in sizes) or "HV" in dict(self.sizes)]
        checks = (
            ((case.takes, case.gives) == (self.takes, self.gives), "the line has other inputs or outputs than the adapter"),
            (case.dtype in self.dtypes, f"dtype={case.dtype} is not among {', '.join(self.dtypes)}"),
            (
                all(min(self.choices(axis)) <= sizes[axis] <= max(self.choices(axis)) for axis in limits if axis in self.axes),
                f"sizes={case.sizes} are not within the sizes of the domain",
            ),
            ("HV" not in sizes or sizes["HV"] % sizes.get("H", 1) == 0, f"sizes={case.sizes}: HV must be a multiple of H"),
            (self.packed or not case.packed, "packed=yes is not supported"),
            (self.batched or case.packed, "packed=no is not supported"),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (max(case.lengths) <= self.longest, f"lengths={max(case.lengths)}: more than {self.longest} tokens are not supported"),
            (self.backward or not case.backward, "backward=yes is not supported"),
        )
        return next((reason for inside, reason in checks if not inside), None)

    def to_json(self) -> dict[str, Any]:
        """Return the domain as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "CallDomain":
        """Return the domain from the data of `to_json`."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        for name in ("inputs", "outputs", "sizes"):
            fields[name] = tuple((key, value) for key, value in data[name])
        return cls(**fields)


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
    sizes = {axis: chance.choice(domain.choices(axis)) for axis in domain.axes}
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
