"""Calls like another one: with other numbers, packings, settings, shapes or dtypes, or with every parameter.

Laws make them before, after or between the calls that they judge. All are inside the domain.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from oracles.operation import NAMES
from properties.laws.law import with_others

LATER = 33  # calls after the first one: an implementation may keep what 32 calls of a shape need
# Words of a case that a call has beside its tensors, which differ between calls that are in flight at the same time. On a GPU these
# are words for which no kernel is compiled.
SETTINGS_ON_GPU = ("eps", "qk_norm_eps", "allow_neg_eigval")
SETTINGS = (*SETTINGS_ON_GPU, "scale", "activation", "qk_norm", "qk_norm_form", "gating", "lower_bound")
OPTIONAL = ("weight", "bias", "dt_bias")  # words that say whether a call has this parameter
CROWDED = 10  # sequences, so that an offset can move behind the first eight, by which an implementation may know the others


def rotated(case: Any, domain: Any = None) -> Any:
    """Return the case with other numbers and, if it is packed, with other lengths; all shapes stay.

    The lengths are those of the case in another order. With a domain, they are in every other case lengths whose offsets have the
    same sum, if the domain has such lengths.
    """
    other = with_others(case, domain)
    if not other.packed:
        return other
    lengths = (*case.lengths[1:], case.lengths[0])
    if domain is not None and (case.seed % 2 or lengths == case.lengths):
        lengths = next(_others_inside(case, domain, range(2, len(case.lengths)), (1, -2, 1)), lengths)
    return dataclasses.replace(other, lengths=lengths)


def moved(case: Any, domain: Any) -> Any | None:
    """Return the case with late offsets elsewhere and as many sequences and tokens; None if it has no such offset.

    These are two whose sum stays, or one if there are none.
    """
    places = range(len(case.lengths) - 1, CROWDED - 2, -1) if case.packed else range(0)
    ways = (lengths for changes in ((1, -2, 1), (-1, 1)) for lengths in _others_inside(case, domain, places, changes))
    lengths = next(ways, None)
    return None if lengths is None else dataclasses.replace(case, lengths=lengths)


def _others_inside(case: Any, domain: Any, places: Sequence[int], changes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the case's lengths with the changes added to those that end at each place, and subtracted, where that is in the domain.

    Changes are in steps of the domain.
    """
    for place in places:
        for step in (domain.length_step, -domain.length_step):
            lengths = [*case.lengths]
            for number, change in enumerate(changes, place - len(changes) + 1):
                lengths[number] += step * change
            with contextlib.suppress(ValueError):
                if domain.outside(dataclasses.replace(case, lengths=tuple(lengths))) is None:
                    yield tuple(lengths)


def later_cases(case: Any, domain: Any, device: str, count: int = LATER) -> list[Any]:
    """Return `count` cases of the same shapes, with other numbers, packings and settings, as far as these are inside the domain.

    On a GPU, words for which kernels would be compiled stay.
    """
    other, found = rotated(case, domain), list[Any]()
    for number, lengths in zip(range(1, count + 1), itertools.cycle(_packings(other, domain, count)), strict=False):
        one = dataclasses.replace(other, lengths=lengths, seed=case.seed ^ number)
        found.append(with_settings(one, case, domain, device, number))
    return found


def _packings(case: Any, domain: Any, count: int) -> list[tuple[int, ...]]:
    """Return up to `count` ways to have the case's tokens in as many sequences, beginning with its own."""
    found = [case.lengths]
    if case.packed and len(case.lengths) > 1:
        places = range(1, len(case.lengths))
        steps = range(1, max(case.lengths) + 1)
        others = (one for step in steps for one in _others_inside(case, domain, places, (step, -step)))
        found += itertools.islice((one for one in others if one != case.lengths), count - 1)
    return [*dict.fromkeys(found)]


def with_settings(other: Any, case: Any, domain: Any, device: str, number: int, names: Sequence[str] = SETTINGS) -> Any:
    """Return the case `other` with another value than `case` in every setting of `names` that has one; `number` decides which."""
    for name in names if device == "cpu" else SETTINGS_ON_GPU:
        word = case.WORDS.get(name)
        if word is None or (word.key and device != "cpu"):
            continue
        values = [value for value in word.choices or (False, True) if value != getattr(case, name)]
        for turn in range(len(values)):
            with contextlib.suppress(ValueError):
                changed = dataclasses.replace(other, **{name: values[(number + turn) % len(values)]})
                if changed.spec == case.spec and domain.outside(changed) is None:
                    other = changed
                    break
    return other


def settings_of(case: Any, domain: Any) -> list[Any]:
    """Return the case with each of SETTINGS at another value alone, and with all of them, as far as these are inside the domain."""
    found = [with_settings(case, case, domain, "cpu", 0, names) for names in (*((name,) for name in SETTINGS), SETTINGS)]
    return [other for number, other in enumerate(found) if other not in (case, *found[:number])]


def complete(case: Any, domain: Any, names: Sequence[str] = OPTIONAL) -> Any:
    """Return the case with every one of these words, of parameters or of the norm, that it and the domain can have."""
    for name in names:
        if getattr(case, name, True) is False:
            with contextlib.suppress(ValueError):
                changed = dataclasses.replace(case, **{name: True})
                case = case if domain.outside(changed) else changed
    return case


def other_kinds(domain: Any, case: Any) -> list[tuple[str, Any]]:
    """Return the case in other shapes and in another dtype, as far as that is inside the domain, each with what is other."""
    lengths, other, step = case.lengths, with_others(case, domain), domain.length_step
    more = 2 if step == 1 else step
    longer = (*lengths, lengths[0] + more) if case.packed else tuple(length + more for length in lengths)
    fewer = lengths[1:] if len(lengths) > 1 else (max(1, lengths[0] // 2 // step) * step,)
    changes = [("shapes", {"lengths": sizes}) for sizes in (longer, fewer)]
    changes += [("dtypes", {"dtype": dtype}) for dtype in NAMES.values() if dtype != case.dtype]
    found: dict[str, Any] = {}
    for what, change in changes[:: 1 if case.seed % 2 else -1]:  # one of each, so that a history is short
        try:
            changed = dataclasses.replace(other, **change)
        except ValueError:
            continue
        if change.get("lengths") != lengths and domain.outside(changed) is None:
            found.setdefault(what, changed)
    return [*found.items()]


def later_in_float32(case: Any, domain: Any) -> bool:
    """Return whether a case is in 16 bits, and the history `others` calls it in float32 too."""
    return case.dtype != "fp32" and any(other.dtype == "fp32" for _, other in other_kinds(domain, case))
