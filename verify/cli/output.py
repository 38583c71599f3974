"""The output of commands: lines, JSON and progress."""

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
    """The store of findings and the file of examples. Also prints the lines that were under way when an earlier check died."""
    store = Store(options.findings)
    for line in store.left_behind():
        print(f'an earlier check died during: python -m verify repeat "{line}"', file=out)
    return store, None if options.no_examples else Examples(options.findings)


def print_troubles(store: Store, examples: Examples | None) -> None:
    """Print on stderr what could not be written to disk."""
    for trouble in (store.trouble, examples.trouble if examples else ""):
        if trouble:
            print(f"gdn-verify: {trouble}", file=sys.stderr)


@contextlib.contextmanager
def json_lines(place: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A context with a function that writes one JSON line to `place`: a file, "-" for stdout, or None for nowhere.

    ValueError, before any work, if the file cannot be opened.
    """
    if place is None or place == "-":
        yield lambda data: print_line(json.dumps(data), sys.stdout) if place else None
        return
    try:
        file = open(place, "wb", buffering=0)  # noqa: SIM115 - closed below, after the yield
    except OSError as error:
        raise ValueError(f"--json must name a file that can be written, got {place!r}: {error.strerror}") from None

    def write(data: dict[str, Any]) -> None:
        try:
            file.write((json.dumps(data) + "\n").encode())
        except OSError as error:
            print(f"gdn-verify: cannot write to {place}: {error.strerror}", file=sys.stderr)

    with file:
        yield write


def print_line(line: str, out: Any) -> None:
    """Print a line and flush, so that the reader of a pipe can follow the check."""
    print(line, file=out, flush=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr for each running law. If stderr is no terminal, a plain line every 20 s at most."""
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
