"""A terminal shows every line that a pipe gets, whole, while bars run. The terminal is pyte's, behind a pseudo-terminal."""

import contextlib
import io
import os
import pathlib
import pty
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyte
import pytest

from tests.answering import Answering
from verify.cli import check_command, terminal
from verify.cli.main import main
from verify.cli.terminal import print_line, wrapped
from verify.engine import explaining, soak
from verify.execution.run import Run

ROWS = 24
NAME = "a_kernel_whose_file_has_a_name_so_long_that_no_line_with_it_fits_into_a_hundred_and_forty_columns_of_a_terminal"
LAWS = ("packed", "recall", "strides", "again")  # two at once; the first two are broken


class Screen:
    """What a terminal of some columns shows, with what has scrolled out of it, and the bytes that it was sent."""

    def __init__(self, columns: int) -> None:
        self._screen = pyte.HistoryScreen(columns, ROWS, history=10_000)
        self._stream, self.columns, self.sent = pyte.ByteStream(self._screen), columns, b""
        self._here, self._there = pty.openpty()
        termios.tcsetwinsize(self._there, (ROWS, columns))
        self.file = open(self._there, "w", encoding="utf-8")  # noqa: SIM115 - closed below
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self._here, 4096):
                self.sent += data
                self._stream.feed(data)

    def close(self) -> None:
        self.file.close()
        self._reader.join()
        os.close(self._here)

    @property
    def rows(self) -> list[str]:
        above = ["".join(row[column].data for column in range(self.columns)) for row in self._screen.history.top]
        return [row.rstrip() for row in (*above, *self._screen.display)]

    @property
    def text(self) -> str:
        return squeezed("".join(self.rows))


def squeezed(text: str) -> str:
    """A text without what depends on the width or on the clock: white space, and the seconds of the last line."""
    return re.sub(r"\d+s(?=\(kernels|, |in|\.)|\d+(\.\d+)?asecond|[\d.e+]+asecond", "", "".join(text.split()))


@contextlib.contextmanager
def streams(out: Any, err: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        yield


class Slow(Answering):
    """It takes long enough that the bars are drawn meanwhile, and `at` is called before each case."""

    def __init__(self, at: Callable[[Run], None]) -> None:
        super().__init__(self._ratio)
        self._at = at

    def _ratio(self, run: Run) -> float:
        time.sleep(0.004)
        self._at(run)
        return 4.0 if run.law in LAWS[:2] else 0.5


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[str]:
    """The words that check an adapter which no process runs."""
    (tmp_path / f"{NAME}.py").touch()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 40)
    return [f"{tmp_path}/{NAME}.py:Kernel", "--profile", "few", "--seed", "1", *(word for law in LAWS for word in ("--law", law))]


def run(
    words: Sequence[str], out: Any, err: Any, monkeypatch: pytest.MonkeyPatch, at: Callable[[Run], None] = lambda run: None
) -> int:
    """Run a command whose workers answer at once, with these streams, in a folder of its own."""
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Slow(at), Slow(at)])
    monkeypatch.setattr(soak, "started", lambda *_: [Slow(at), Slow(at)])
    findings = ["--findings", str(pathlib.Path.cwd() / f"findings-{time.monotonic_ns()}")]
    with streams(out, err):
        return main([*words, *findings])


def on_terminal(words: Sequence[str], columns: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[int, Screen]:
    screen = Screen(columns)
    try:
        return run(words, screen.file, screen.file, monkeypatch, **settings), screen
    finally:
        screen.close()


def in_pipe(words: Sequence[str], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[int, str]:
    out = io.StringIO()
    code = run(words, out, out, monkeypatch, **settings)
    return code, re.sub(r"findings-\d+", "findings-0", out.getvalue())


def missing(screen: Screen, text: str) -> list[str]:
    """The lines of a pipe that a screen does not show whole."""
    shown = re.sub(r"findings-\d+", "findings-0", screen.text)
    return [line for line in text.splitlines() if squeezed(line) not in shown]


def check_shown(screen: Screen, text: str) -> None:
    """The screen shows each line of a pipe, and nothing else; no line that is copied, and no other word, is broken by us."""
    assert missing(screen, text) == []
    assert len(re.sub(r"findings-\d+", "findings-0", screen.text)) == len(squeezed(text)), "no bar is left"
    copied = [line for line in text.splitlines() if terminal.COPIED.search(line)]
    assert len(copied) >= 4
    assert max(map(len, copied)) > screen.columns
    assert [line for line in copied if line.encode() not in screen.sent] == []
    words = {word for row in screen.rows for word in row.split()}
    others = {word for line in text.splitlines() if line not in copied for word in line.split() if "/" not in word}
    assert {word for word in others - words if not re.search(r"\d", word)} == set()
    assert b"\x1b[31mBROKEN\x1b[0m" in screen.sent


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_a_terminal_shows_what_a_pipe_gets(columns: int, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = in_pipe(["check", *command], monkeypatch)
    assert (code, text.count("BROKEN   "), text.count("HOLDS   ")) == (1, 2, 2)
    code, screen = on_terminal(["check", *command], columns, monkeypatch)
    assert code == 1
    assert screen.sent.count(b"\x1b[?25l") > 4, "bars were drawn again after each line"
    check_shown(screen, text)


def test_a_screen_on_which_bars_erase_lines_is_seen() -> None:
    screen = Screen(80)
    screen.file.write("HOLDS       first\nBROKEN   second\n\x1b[1A\x1b[2K")
    screen.close()
    assert missing(screen, "HOLDS       first\nBROKEN   second\n") == ["BROKEN   second"]
