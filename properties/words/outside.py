"""Calls just outside a domain: what an implementation may take, although its domain leaves it out.

A domain may exclude packed sequences because an implementation has none, or because its author did not need them. If the function
under test nevertheless has a parameter for them, a caller may pass it. Such a call is refused, or right, or accepted and wrong.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MEMORY = ("1000", "forever")  # gates that let one sequence show in the next
SIZES = ((3, 5), (17, 1, 9), (65, 2))  # tokens of packed sequences; a batch has rows of the first number
CASES = len(SIZES)
SEEDS = 64  # so many seeds are tried for a case that has padding


@dataclasses.dataclass(frozen=True)
class Outside:
    """One thing that a domain may leave out.

    - `leaves_out` says whether a domain does so. A layout of the tensors is always left out: no domain has a word for it.
    - `wider` are the fields of a domain that allows it, and `words` those of a case that has it. Fields that a domain or a case
      does not have are skipped.
    - `law` is the law that judges such a case.
    """

    leaves_out: Callable[[Any], bool]
    wider: dict[str, Any] = dataclasses.field(default_factory=dict)
    words: dict[str, Any] = dataclasses.field(default_factory=dict)
    law: str = "oracle"

    def domain(self, domain: Any) -> Any:
        """Return the domain that allows it as well."""
        return dataclasses.replace(domain, **_known(domain, self.wider))

    def cases(self, domain: Any, drawn: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield cases outside the domain, each with one like it inside, CASES altogether at most.

        Each is made of a case that was drawn inside the domain. Whatever would hide the difference is plain in them, such as a gate
        that forgets.
        """
        wide, count = self.domain(domain), 0
        for case in drawn:
            if count == CASES:
                return
            sizes, backward = SIZES[count], case.backward and count == CASES - 1
            found = self._made(wide, case, sizes, backward, self.words)
            if found is not None:
                inside = self._made(domain, case, (sum(sizes),), backward, {})
                yield found, case if inside is None else inside
                count += 1

    def _made(self, domain: Any, case: Any, sizes: Sequence[int], backward: bool, words: dict[str, Any]) -> Any | None:  # noqa: FBT001
        """Return the case with these words, or None if it is then outside the domain or no case at all."""
        step, most = domain.length_step, domain.longest
        sizes = tuple(-(-size // step) * step if most is None else min(most, -(-size // step) * step) for size in sizes)
        packed = words.get("packed", case.packed)
        plain = {
            "packed": packed,
            "lengths": sizes if packed else (max(sizes),) * min(2, len(case.lengths)),
            "gate": next((gate for gate in MEMORY if gate in getattr(domain, "gates", ())), "long"),
            "values": "ordinary",
            "left_out": "none",
            "options": "none",
            "cached": False,
            "state": "random" if not words and getattr(domain, "initial_state", False) else "none",
            "final_states": domain.final_states,
            "backward": backward,
        }
        plain |= {"beta": "ordinary"} if isinstance(getattr(case, "beta", True), str) else {}
        with contextlib.suppress(ValueError):  # the words of the case exclude it
            found = dataclasses.replace(case, **_known(case, plain | words))
            if words and self.law == "left_padding":
                seeds = range(found.seed % 2**15, found.seed % 2**15 + SEEDS)
                padded = (dataclasses.replace(found, seed=seed) for seed in seeds)
                found = next((other for other in padded if any(other.pads())), found)
            return found if domain.outside(found) is None else None
        return None


def _known(record: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(record)}
    return {name: value for name, value in values.items() if name in names}


def _without(field: str) -> Callable[[Any], bool]:
    """Return whether a domain has a field about its cases' word, and does not allow it."""

    def leaves_out(domain: Any) -> bool:
        promise = domain.PROMISES.get(field)
        word = domain.CASE.WORDS[promise.word] if promise else None
        has = word is None or not word.of or domain.operation in word.of
        return has and getattr(domain, field, True) is False

    return leaves_out


def _is_convolution_or_layer(domain: Any) -> bool:
    return domain.operation in ("causal_conv1d", "gdn_layer", "kda_layer")


def _is_rule(domain: Any) -> bool:
    return domain.operation in ("gated_delta_rule", "delta_rule", "kda")


def _in_no_option(layout: str) -> Callable[[Any], bool]:
    """Return whether a domain of rules has no option for a layout."""
    return lambda domain: _is_rule(domain) and layout not in dict(domain.options)


OUTSIDE: dict[str, Outside] = {
    "packed": Outside(
        _without("packed"),
        {"packed": True, "final_states": "none"},
        {"packed": True, "final_states": "none", "final_state": False},
    ),
    "initial_state": Outside(
        lambda domain: (_is_rule(domain) or domain.operation == "causal_conv1d") and not domain.initial_state,
        {"initial_state": True},
        {"state": "random"},
    ),
    "qk_norm": Outside(lambda domain: _is_rule(domain) and not domain.qk_norm, {"qk_norm": True}, {"qk_norm": True}),
    "scale": Outside(
        lambda domain: _is_rule(domain) and not domain.scale,
        {"scale": True, "scales": ("default", "half")},
        {"scale": "half"},
    ),
    "attention_mask": Outside(
        lambda domain: _is_convolution_or_layer(domain) and not domain.attention_mask and domain.batched,
        {"attention_mask": True},
        {"packed": False, "final_state": False},
        law="left_padding",
    ),
    **{name: Outside(_in_no_option(name)) for name in ("state_v_first", "head_first")},
}


def outside_of(domain: Any) -> list[str]:
    """Return what a domain of rules, modules or layers leaves out, by name: keys of OUTSIDE."""
    return [name for name, outside in OUTSIDE.items() if outside.leaves_out(domain)]
