"""One test for many values: it fails with the list of the values that are wrong."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest


def for_each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a quick test with each of the values, as one test. With a tuple of names, each value is a tuple.

    This is `pytest.mark.parametrize` for values that take no time: one mistake gives one red test, with a line for each wrong
    value. All values share the test's fixtures, but each has a folder of its own for `tmp_path`, and what it patches by
    `monkeypatch` is as before for the next.
    """
    words = (names,) if isinstance(names, str) else names
    rows = [dict(zip(words, (value,) if isinstance(names, str) else value, strict=True)) for value in values]
    if not rows:
        raise ValueError(f"values must be at least one, got none for {names}")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def together(**fixtures: Any) -> None:
            faults = dict[str, BaseException]()
            for number, row in enumerate(rows):
                try:
                    with _afresh(fixtures, number) as own:
                        test(**row, **own)
                except (Exception, pytest.fail.Exception) as fault:
                    faults[", ".join(f"{name}={repr(value)[:100]}" for name, value in row.items())] = fault
            if faults:
                lines = [f"{row}: {type(fault).__name__}: {fault}" for row, fault in faults.items()]
                raise AssertionError("\n".join([f"{len(faults)} of {len(rows)} fail:", *lines])) from next(iter(faults.values()))

        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in words]
        together.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return together

    return decorate


@contextlib.contextmanager
def _afresh(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures for one value."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = fixtures["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    if "monkeypatch" not in own:
        yield own
        return
    with fixtures["monkeypatch"].context() as own["monkeypatch"]:
        yield own
