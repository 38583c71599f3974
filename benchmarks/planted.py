"""Implementations with two planted defects: two wrong implementations of the zoo in one class, made from its name.

    benchmarks/planted.py:DropsState__LeaksState              both defects
    benchmarks/planted.py:DropsState__LeaksState__no_state    the second defect only in calls without an initial state
    benchmarks/planted.py:Chunkwise__LeaksState__no_state     the same, with the first defect mended

A second defect that only simple calls have is the worst case for shrinking: every step towards a simple case leads to this defect.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from oracles.operation import Inputs
from verify.adapters.base import Adapter
from verify.zoo.animals import animals, right_of, rights

FIRST = {"x", "q", "a", "hidden"}  # the names of an operation's first input


def _first(x: Inputs) -> torch.Tensor:
    tensor: torch.Tensor = next(x[name] for name in FIRST if name in x)
    return tensor


CONDITIONS: dict[str, Callable[[Inputs], bool]] = {
    "no_state": lambda x: x.get("state") is None,
    "fp32": lambda x: _first(x).dtype == torch.float32,
    "unpacked": lambda x: x.get("cu_seqlens") is None,
    "one_row": lambda x: x.get("cu_seqlens") is None and _first(x).shape[0] == 1,
    "one_head": lambda x: _first(x).ndim > 3 and _first(x).shape[2] == 1,
    "no_scale": lambda x: x.get("scale") is None,
    "no_norm": lambda x: not x.get("qk_norm"),
    "no_bias": lambda x: x.get("bias") is None,
    "no_activation": lambda x: x.get("activation") in (None, "none"),
    "short": lambda x: _first(x).shape[1] <= 64,
}


def _edits(kind: type[Any], right: type[Any]) -> dict[str, Any]:
    """The methods that a wrong implementation has in place of those of the right one."""
    classes = itertools.takewhile(lambda base: base is not right, kind.__mro__)
    return {name: value for base in classes for name, value in vars(base).items() if callable(value)}


@functools.cache
def kinds() -> dict[str, type[Any]]:
    """The zoo's implementations by name: the right ones and the wrong ones."""
    return {**{kind.__name__: kind for kind in rights().values()}, **{name: animal.kind for name, animal in animals().items()}}


def join(first: str, second: str) -> type[Any] | None:
    """A class with both defects, or None if the two do not fit: of other right classes or domains, or editing the same step.

    Both may edit a step if the edit of the first begins with the step of its base class, which is then the edit of the second.
    """
    one, other = kinds()[first], kinds()[second]
    if issubclass(one, other) or issubclass(other, one):
        return one if issubclass(one, other) else other
    right = right_of(one)
    if right is None or right is not right_of(other) or one.domain != other.domain:
        return None
    edits, others = _edits(one, right), _edits(other, right)
    if any("__class__" not in edits[name].__code__.co_freevars for name in edits.keys() & others.keys()):
        return None
    try:
        return type(f"{first}__{second}", (one, other), {"__module__": __name__})
    except TypeError:  # no order of the bases suits both
        return None


def sometimes(first: type[Any], both: type[Any], condition: str) -> type[Any]:
    """A class with both defects in calls that meet the condition, and with the first one alone in others."""

    def run(self: Adapter, x: Inputs) -> Any:
        return (self.both if CONDITIONS[condition](x) else self.first).run(x)  # type: ignore[attr-defined]

    name = f"{both.__name__}__{condition}"
    return type(name, (first,), {"__module__": __name__, "run": run, "both": both(), "first": first()})


def __getattr__(name: str) -> type[Any]:
    first, _, rest = name.partition("__")
    second, _, condition = rest.partition("__")
    if {first, second} <= {*kinds()} and (not condition or condition in CONDITIONS):
        alone = join(first, first)
        both = join(first, second)
        if both is not None and alone is not None:
            return sometimes(alone, both, condition) if condition else both
    raise AttributeError(name)


def fits(first: str, second: str) -> bool:
    """Whether two wrong implementations fit together, with the first in the first place."""
    kind = join(first, second)
    return kind is not None and "__" in kind.__name__
