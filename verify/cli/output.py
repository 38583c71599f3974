"""The output of commands: what they keep, JSON and progress."""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from verify.cli import terminal
from verify.cli.exits import HOLDS, UNDECIDED
from verify.cli.terminal import print_error, print_line
from verify.cli.verb_options import Kept
from verify.findings.regressions import Examples
from verify.findings.store import Store

PLAIN_S = 20.0  # without a terminal there is a line of progress at most every so many seconds


def stored(options: Kept, out: TextIO) -> tuple[Store, Examples | None]:
    """The store of findings and the file of examples. Also prints the lines that were under way when an earlier check died."""
    store = Store(options.findings)
    for line in store.left_behind():
        print_line(f'an earlier check died during: gdn-verify repeat "{line}"', out)
    return store, None if options.no_examples else Examples(options.findings)


def print_troubles(store: Store, examples: Examples | None) -> None:
    """Print on stderr what could not be written to disk."""
    for trouble in (store.trouble, examples.trouble if examples else ""):
        if trouble:
            print_error(trouble)


def print_json(data: dict[str, Any]) -> None:
    """Print JSON on stdout, in one line."""
    terminal.write(json.dumps(data), sys.stdout)


def finite(value: Any) -> Any:
    """Plain data with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """A file of JSON lines: `place` is its name, "-" for stdout, or None for nowhere. `failed`: a line could not be written.

    ValueError, before any work, if the file cannot be opened.
    """

    def __init__(self, place: str | None) -> None:
        self._place, self._file, self.failed = place, None, False
        if place not in (None, "-"):
            try:
                self._file = open(place, "wb", buffering=0)  # noqa: SIM115 - closed in __exit__
            except OSError as error:
                raise ValueError(f"--json must name a file that can be written, got {place!r}: {error.strerror}") from None

    def __call__(self, data: dict[str, Any]) -> None:
        if self._place == "-":
            print_json(data)
        if self._file is not None and not self.failed:
            try:
                line = (json.dumps(data) + "\n").encode()
                while line:
                    line = line[self._file.write(line) :]
            except OSError as error:
                self.failed = True
                print_error(f"cannot write to {self._place}: {error.strerror}")

    def code(self, code: int) -> int:
        """The exit code of a command: `code`, but never 0 if a line is missing in the file."""
        return UNDECIDED if self.failed and code == HOLDS else code

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def check_writable(option: str, place: str | None) -> None:
    """Refuse a file that cannot be written, before any work is done. No file is changed or made. ValueError names the option."""
    if place is not None:
        new = not os.path.lexists(place)
        try:
            with open(place, "a", encoding="utf-8"):
                pass
            if new:
                pathlib.Path(place).unlink(missing_ok=True)  # another rank may have removed it
        except OSError as error:
            raise ValueError(f"{option} must name a file that can be written, got {place!r}: {error.strerror}") from None


def write_file(place: str, text: str) -> bool:
    """Write a file that an option names. Returns whether that worked; if it did not, stderr says why."""
    try:
        pathlib.Path(place).write_text(text, encoding="utf-8")
    except OSError as error:
        print_error(f"cannot write to {place}: {error.strerror}")
        return False
    return True


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr for each running law. If stderr is no terminal, a plain line every 20 s at most."""
    if terminal.is_terminal(sys.stderr):
        with terminal.bars() as move:
            yield move
        return
    last = time.monotonic()

    def plain(law: str, done: int, of: int) -> None:
        nonlocal last
        if done < of and time.monotonic() - last > PLAIN_S:
            last = time.monotonic()
            print_line(f"{law}: {done} of {of} cases", sys.stderr)

    yield plain
