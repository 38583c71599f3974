"""What the domains of all books share: what a check adds when it draws, the reasons why a case is outside, checks of fields."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

from properties.words.line import MAX_TOKENS, MAX_WIDTH, Line
from properties.words.options import Options, check_options, outside_options
from properties.words.word import Promise, promises_of

MIXED, INDICES = "mixed", "indices"
KINDS = ("sliced", "transposed", "offset", "expanded", "strided")  # of the strides of one tensor
# Also another kind for each tensor, and index tensors that are not contiguous. The last must be named: kernels that check only the
# offsets that they are used with, which are contiguous, are not wrong, and on a GPU may store outside their tensors otherwise.
VIEWS = (*KINDS, MIXED, INDICES)
LARGEST = ("ordinary", "scaled", "large", "great")  # regimes of values, the smallest first; no other regime has larger ones
LEAST_LONGEST = 64  # the least `longest`: laws need lengths on both sides of a block of 16 or 32 tokens
OFFSETS = ("int64", "int32")
LARGE = ("", "chunks", "power", "most", "sequences", "heads")  # what is large in a case (properties/words/sizes.py)
MOST_REACH = 256  # about 70,000 tokens; check larger sizes with single cases


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How a check draws the cases of a domain. It sets this itself; an implementation promises nothing by it.

    ValueError for a field outside its range.
    """

    reach: int = 1
    """How many times more tokens are drawn than where kernels are interpreted, with wider heads too."""
    long: int = 0
    """The most tokens of long cases; 0 for none."""
    quick: bool = False
    """Whether a token costs little, as in plain torch on a CPU."""
    exact: int = 0
    """The tokens of a sequence whose results are exact, which needs no tolerance; 0 for none."""
    large: str = ""
    """What is large in a case, "" for nothing (properties/words/sizes.py)."""
    chunk: int = 64
    """The chunk of the implementation. Long cases exceed several of them."""
    named: tuple[int, ...] = ()
    """Whole numbers that the implementation's source names, for sizes just over them."""
    forms: tuple[Any, ...] = ()
    """The forms that compiled kernels of a path may have (properties/paths/domain.py); none if any."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("reach", 1, MOST_REACH),
            *((field, int(field == "chunk"), MAX_TOKENS) for field in ("long", "exact", "chunk")),
        ):
            number = getattr(self, name)
            if not isinstance(number, int) or not least <= number <= most:
                raise ValueError(f"{name} must be in {least}..{most}, got {number!r}")
        if self.large not in LARGE:
            raise ValueError(f"large must be empty or one of {', '.join(LARGE[1:])}, got {self.large!r}")


class _Usual:
    """What a domain promises that has no such field."""

    operation: str
    backward: bool = False
    longest: int | None = None
    views: bool | tuple[str, ...] = True
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    options: Options = ()
    exact_options: tuple[str, ...] = ()
    length_step: int = 1
    layout: str | None = None
    in_place: bool = False
    graphs: bool = False
    initial_states: str = "each"
    final_states: str = "each"
    strongest_decay: str = "saturated"
    tf32: tuple[str, ...] = ()
    keeps_outputs: bool = True


@dataclasses.dataclass(frozen=True)
class AnyDomain(_Usual):
    """A domain of any book. CASE is the class of its cases.

    `draws_large` says whether some cases that are drawn are large, and `has_limits` whether some are just over usual limits.
    """

    CASE: ClassVar[type[Line]]
    PROMISES: ClassVar[dict[str, Promise]] = {}
    draws_large: ClassVar[bool] = False
    has_limits: ClassVar[bool] = False

    drawing: Drawing = dataclasses.field(default=Drawing(), kw_only=True, repr=False)

    def __init_subclass__(cls) -> None:
        cls.PROMISES = promises_of(cls)

    @property
    def of_call(self) -> Any:
        """What is promised about the tensors of one call: this domain, or that of a pool's rule."""
        return self

    @property
    def packs(self) -> bool:
        """Whether a call may have packed sequences."""
        return getattr(self, "packed", False)

    @property
    def carries(self) -> bool:
        """Whether a call of a rule, a module or a layer may have initial states."""
        return getattr(self, "initial_state", False)

    def check_fields(self, *, operations: Sequence[str] = ()) -> None:
        """Raise ValueError for a field outside its choices, or unless `packed` or `batched` is True."""
        operations = operations or self.CASE.CHOICES["operation"]
        if self.operation not in operations:
            raise ValueError(f"operation must be {_one_of(operations)}, got {self.operation!r}")
        for name, promise in self.PROMISES.items():
            choices = promise.choices or self.CASE.CHOICES.get(promise.word, ())
            if promise.how == "some" and choices:
                check_tuples(self, (name, choices))
            if promise.how == "one" and getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not (getattr(self, "packed", True) or getattr(self, "batched", True)):
            raise ValueError("packed or batched must be True, got neither")
        check_options(self.options, self.exact_options)

    def outside(self, case: Any) -> str | None:
        """Return why `case` is outside the domain, or None."""
        if case.operation != self.operation:
            return f"op={case.operation} is not {self.operation}"
        for name, promise in self.PROMISES.items():
            word = case.WORDS[promise.word]
            if (not word.of or case.operation in word.of) and word.acts(case) and (reason := promise.outside(name, self, case)):
                return reason
        reason = next((reason for inside, reason in self.reasons(case) if not inside), None)
        return reason or (outside_options(self.options, case.options) if self.options or "options" in case.WORDS else None)

    def reasons(self, case: Any) -> Iterable[tuple[bool, str]]:  # noqa: ARG002
        """Return what else must be true of a case inside the domain, each with what is said if it is not."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Return the domain as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the domain from the data of `to_json`."""
        drawing = Drawing(**{name: frozen(value) for name, value in data["drawing"].items()})
        return cls(**{**{name: frozen(value) for name, value in data.items()}, "drawing": drawing})


def frozen(value: Any) -> Any:
    """Return plain data with tuples in place of lists."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def check_views(domain: Any) -> None:
    """Raise ValueError if `views` is neither True nor False, nor a tuple of kinds of strides."""
    views = domain.views
    if not isinstance(views, bool) and not (isinstance(views, tuple) and views and {*views} <= {*VIEWS}):
        raise ValueError(f"views must be True, False or a tuple of some of {', '.join(VIEWS)}, got {views!r}")


def takes_view(domain: Any, how: str) -> bool:
    """Whether the inputs of a domain's calls may have a kind of strides (VIEWS); True stands for all of them but INDICES."""
    return how in domain.views if isinstance(domain.views, tuple) else domain.views and how != INDICES


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def check_tuples(domain: Any, *fields: tuple[str, Sequence[Any]], least: int = 1) -> None:
    """Raise ValueError for a field, given with its choices, that is not a tuple of `least` or more of these choices."""
    for name, choices in fields:
        values = getattr(domain, name)
        if not isinstance(values, tuple) or len(values) < least or not all(value in choices for value in values):
            raise ValueError(f"{name} must be a tuple of some of {', '.join(map(str, choices))}, got {values!r}")


def check_spans(domain: Any, *names: str, most: int = MAX_WIDTH) -> None:
    """Raise ValueError for a `width_step` below 1, or for a field that is no range with a width of up to `most`."""
    step = domain.width_step
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"width_step must be at least 1, got {step!r}")
    for name in names:
        span = getattr(domain, name)
        if not (isinstance(span, tuple) and len(span) == 2 and all(isinstance(end, int) for end in span)):
            raise ValueError(f"{name} must be a tuple (least, most), got {span!r}")
        if span[0] < 1 or -(-span[0] // step) * step > min(span[1], most):
            raise ValueError(f"{name} must contain a width in steps of {step}, from 1 to {most}, got {span}")


def check_whole(name: str, values: object, most: int) -> None:
    """Raise ValueError for values that are no tuple of whole numbers from 1 to `most`, or that are none."""
    if not (isinstance(values, tuple) and values and all(isinstance(value, int) and 1 <= value <= most for value in values)):
        raise ValueError(f"{name} must be a tuple of whole numbers in 1..{most}, got {values!r}")


def check_widths(name: str, widths: object, span: str, span_left: bool, most: int = MAX_WIDTH) -> None:  # noqa: FBT001
    """Raise ValueError for a list of widths that is wrong, or that stands beside the range which it replaces."""
    if widths != ():
        check_whole(name, widths, most)
    if widths and not span_left:
        raise ValueError(f"{span} and width_step must be left out with {name}, which lists the widths, got {name}={widths}")


def inside(width: int, span: tuple[int, int], step: int) -> bool:
    """Return whether a width is in a range, in steps of `step`."""
    return span[0] <= width <= span[1] and width % step == 0
