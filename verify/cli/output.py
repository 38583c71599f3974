"""What commands print and write: lines, JSON, progress."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verify.findings.regressions import Examples
from verify.findings.store import Store


def stored(options: argparse.Namespace, out: Any) -> tuple[Store, Examples | None]:
    """Where findings and examples are kept; what an earlier check died of is told."""
    store = Store(options.findings)
    for line in store.left_behind():
        print(f'an earlier check died during: python -m verify repeat "{line}"', file=out)
    return store, None if options.no_examples else Examples(options.findings)


def tell_troubles(store: Store, examples: Examples | None) -> None:
    """Say on stderr what could not be kept."""
    for trouble in (store.trouble, examples.trouble if examples else ""):
        if trouble:
            print(f"gdn-verify: {trouble}", file=sys.stderr)


@contextlib.contextmanager
def json_lines(place: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes a JSON line to the place; a file that cannot be opened is bad usage, before any work."""
    if place is None or place == "-":
        yield lambda data: say(json.dumps(data), sys.stdout) if place else None
        return
    try:
        file = open(place, "wb", buffering=0)  # noqa: SIM115 - closed below, after what it is open for
    except OSError as error:
        raise ValueError(f"--json must name a file that can be written, got {place!r}: {error.strerror}") from None

    def write(data: dict[str, Any]) -> None:
        try:
            file.write((json.dumps(data) + "\n").encode())
        except OSError as error:
            print(f"gdn-verify: cannot write to {place}: {error.strerror}", file=sys.stderr)

    with file:
        yield write


def say(line: str, out: Any) -> None:
    """Print at once: a reader of a pipe follows the check."""
    print(line, file=out, flush=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A live bar a law under way, on stderr; a plain line now and then where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        last = [time.monotonic()]

        def plain(law: str, done: int, of: int) -> None:
            if time.monotonic() - last[0] > 20:
                last[0] = time.monotonic()
                print(f"{law}: {done} of {of} cases", file=sys.stderr, flush=True)

        yield plain
        return
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=True) as bar:
        tasks: dict[str, Any] = {}

        def live(law: str, done: int, of: int) -> None:
            if law not in tasks:
                tasks[law] = bar.add_task(law, total=of)
            bar.update(tasks[law], completed=done, total=of, visible=done < of)

        yield live
