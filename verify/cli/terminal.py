"""Lines on a terminal: whole and copyable while progress bars run, and wrapped to its width where nobody copies them.

The bars are on stderr. A line may be on stdout, on the same terminal. Who prints it erases the bars, writes the line to the real
stream, and draws the bars again. rich can redirect stdout itself, but it puts line feeds into long lines, so that nobody can copy
them.
"""

import contextlib
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from verify.findings.blocks import ASCII, BLOCKS

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import TaskID
    from rich.table import Table

# A line that a person copies, or a part of it: a run, or a command. It gets no line feed from us.
COPIED = re.compile(r"\blaw=\S+ .*\badapter=\S|\bgdn-verify [a-z]+ \S|\bpip install ")
LABEL = re.compile(r" *\S+(?: \S+)*? {2,}(?=\S)")  # what stands before the first gap of a line
COLOURS = {"HOLDS": "32", "BROKEN": "31", "UNKNOWN": "33", "unsupported": "2"}  # of the verdict at the start of a line
_VERDICT = re.compile(rf"^({'|'.join(COLOURS)})(?= )", re.MULTILINE)
NARROWEST = 20  # columns: a terminal that reports fewer is not believed
_lock = threading.RLock()  # held while a line is written or the bars change
_bars: "list[Bars]" = []  # those that are drawn


class Unwritable(Exception):
    """A stream or a file that was asked for cannot be written. The message is one line."""


def is_terminal(out: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


def width_of(out: TextIO, otherwise: int) -> int:
    """The columns of a stream that is a terminal; of another `otherwise`."""
    if not out.isatty():
        return otherwise
    try:
        columns = os.get_terminal_size(out.fileno()).columns
    except OSError:
        return otherwise
    return columns if columns >= NARROWEST else 80


def marks_of(out: TextIO) -> str:
    """The characters that draw pictures on a stream: ASCII if its encoding has no blocks."""
    try:
        BLOCKS.encode(out.encoding or "ascii")
    except UnicodeEncodeError:
        return ASCII
    return BLOCKS


def write(text: str, out: TextIO) -> None:
    """Write whole lines as they are, from any thread, and flush. Characters that the stream cannot encode become question marks.

    Unwritable if the stream cannot take the lines.
    """
    with _lock, _erased(out):
        try:
            try:
                out.write(text + "\n")
            except UnicodeEncodeError as error:  # the encoding lacks a character
                out.write(text.encode(error.encoding, "replace").decode(error.encoding) + "\n")
            out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            name = {1: "stdout", 2: "stderr"}.get(out.fileno(), out.name)
            raise Unwritable(f"cannot write to {name}: {error.strerror}") from None


def print_line(text: str, out: TextIO | None = None) -> None:
    """Print lines for a person on a stream, by default stdout. On a terminal they are wrapped and coloured."""
    out = out or sys.stdout
    write(fitted(text, out), out)


def print_error(message: str) -> None:
    """Print a line about what went wrong on stderr."""
    print_line(f"gdn-verify: {message}", sys.stderr)


def fitted(text: str, out: TextIO) -> str:
    """The text as it is, or for a terminal: wrapped to its width, with a colour for each verdict."""
    if not out.isatty():
        return text
    width = width_of(out, 80)
    lines = "\n".join(line for whole in text.split("\n") for line in wrapped(whole, width))
    if not is_terminal(out) or os.environ.get("NO_COLOR"):
        return lines
    return _VERDICT.sub(lambda found: f"\x1b[{COLOURS[found[1]]}m{found[1]}\x1b[0m", lines)


def wrapped(line: str, width: int) -> list[str]:
    """A line in pieces of at most `width` columns; those after the first are indented as what follows the label of the line.

    A line that a person copies stays whole, and so does a word that is longer than the width.
    """
    if len(line) <= width or COPIED.search(line):
        return [line]
    label = LABEL.match(line)
    indent = len(line) - len(line.lstrip()) + 4
    if label is not None and len(label[0]) <= width // 2:
        indent = len(label[0])
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False, replace_whitespace=False
    )


class Bars:
    """Progress bars on stderr, one for each name."""

    def __init__(self) -> None:
        from rich.console import Console  # only a terminal needs it
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(file=sys.stderr, force_terminal=True)
        columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console)  # it only makes the table
        self._tasks: dict[str, TaskID] = {}
        self._live: Live | None = None

    def move(self, name: str, done: int, of: int) -> None:
        """Set how many cases are done. A bar goes when all of them are."""
        with _lock:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=of)
            self._progress.update(self._tasks[name], completed=done, total=of, visible=done < of)

    def draw(self) -> None:
        """Draw the bars below the lines, again and again until they are erased."""
        from rich.live import Live

        # A new one each time: one that was stopped would, when it is started again, erase as many lines as it had bars.
        self._live = Live(
            get_renderable=self._table,
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=10,
        )
        self._live.start()

    def erase(self) -> None:
        """Erase the bars."""
        if self._live is not None:
            self._live.stop()

    def _table(self) -> "Table":
        """The bars that fit on the screen. Those that have scrolled out of it could not be erased."""
        shown = [task for task in self._progress.tasks if task.visible]
        return self._progress.make_tasks_table(shown[: max(1, self._console.height - 2)])


@contextlib.contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """Bars that are drawn in this context, and the function that moves them: its arguments are a name, the cases done, and all."""
    new = Bars()
    with _lock, _uninterrupted():
        _bars.append(new)
        new.draw()
    try:
        yield new.move
    finally:
        with _lock, _uninterrupted():
            _bars.remove(new)
            new.erase()


@contextlib.contextmanager
def _erased(out: TextIO) -> Iterator[None]:
    """A context in which no bar is on the screen, if `out` may be that screen."""
    if not out.isatty():
        yield
        return
    with _uninterrupted():
        for bar in _bars:
            bar.erase()
        try:
            yield
        finally:
            for bar in _bars:
                bar.draw()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A context at whose end Ctrl-C acts. In the middle of a line, it would cut the line off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
