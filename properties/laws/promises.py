"""Promises to the bit that few implementations make: a law judges each exactly, and notes where it is kept without being made."""

from collections.abc import Callable, Iterator
from typing import Any

from properties.laws.law import Bench, Pair, Results

# The law that judges each promise. In the book of layers, the law `cache` judges those of `cut` and `recurrent`.
PROMISES = {
    "split_invariant": "cut",
    "packed_equals_dense": "packed",
    "absent_state_equals_zeros": "absent",
    "decode_equals_prefill": "recurrent",
}


def to_the_bit(bench: Bench, promise: str, detail: str, got: Results, want: Callable[[], Results]) -> Iterator[Pair]:
    """Yield that results equal others bit for bit if the domain promises that; else let the bench note whether they do.

    `want` returns the others, perhaps of a further call. Nothing happens if the domain has no such promise.
    """
    made = getattr(bench.domain, promise, None)
    if made:
        others = want()
        for name, value in got.items():
            yield Pair(name, detail, value, others[name])
    elif made is False:
        bench.note(promise, got, want)


def check_promises(domain: Any, lacking: dict[str, str]) -> None:
    """Raise ValueError for a promise that no law judges; `lacking` has what a domain lacks for each of these."""
    for promise, what in lacking.items():
        if what and getattr(domain, promise):
            raise ValueError(f"{promise} must be False with {what}, because no law can judge it, got True")
