"""A terminal shows every line that a pipe gets, whole, while bars run. The terminal is pyte's, behind a pseudo-terminal."""

import contextlib
import io
import os
import pty
import re
import shutil
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
from tests.together import for_each
from verify.cli import check_command, exits, output, terminal
from verify.cli.main import main
from verify.cli.terminal import print_line, wrapped
from verify.engine import explaining, soak
from verify.execution.line import Run
from verify.findings import report

ROWS = 24
BARS = b"\x1b[?25l"  # rich hides the cursor before it draws bars
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
    return re.sub(r"\d+s(?=[(,i])", "", "".join(text.split()))


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


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The words that check an adapter which no process runs."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / f"{NAME}.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module in (report, soak):  # a part of less than a second goes unmentioned, and no two runs take as long
            patch.setattr(module, "times", lambda reports, processes: "(in so many seconds)")
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        patch.setattr(explaining, "SHRINK_RUNS", 20)
        yield [f"{folder}/{NAME}.py:Kernel", "--profile", "few", "--seed", "1", *(word for law in LAWS for word in ("--law", law))]


@pytest.fixture(scope="module")
def piped(command: list[str]) -> str:
    """What the check prints into a pipe."""
    code, text = in_pipe(["check", *command])
    assert (code, text.count("BROKEN   "), text.count("HOLDS   ")) == (1, 2, 2)
    return text


def run(words: Sequence[str], out: Any, err: Any, at: Callable[[Run], None] = lambda run: None) -> int:
    """Run a command whose workers answer at once, with these streams, and without the findings of earlier ones."""
    shutil.rmtree(".gdn-verify", ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch, streams(out, err):
        patch.setattr(check_command, "workers_of", lambda *_: [Slow(at), Slow(at), Slow(at)])
        patch.setattr(soak, "started", lambda *_, **__: [Slow(at), Slow(at), Slow(at)])
        return main(words)


def on_terminal(words: Sequence[str], columns: int, **settings: Any) -> tuple[int, Screen]:
    screen = Screen(columns)
    try:
        return run(words, screen.file, screen.file, **settings), screen
    finally:
        screen.close()


def in_pipe(words: Sequence[str], **settings: Any) -> tuple[int, str]:
    out = io.StringIO()
    return run(words, out, out, **settings), out.getvalue()


def missing(screen: Screen, text: str) -> list[str]:
    """The lines of a pipe that a screen does not show whole."""
    return [line for line in text.splitlines() if squeezed(line) not in screen.text]


def check_shown(screen: Screen, text: str) -> None:
    """The screen shows each line of a pipe, and nothing else; no line that is copied, and no other word, is broken by us."""
    assert missing(screen, text) == []
    assert len(screen.text) == len(squeezed(text)), "no bar is left"
    copied = [line for line in text.splitlines() if terminal.COPIED.search(line)]
    assert len(copied) >= 4
    assert max(map(len, copied)) > screen.columns
    assert [line for line in copied if line.encode() not in screen.sent] == []
    words = {word for row in screen.rows for word in row.split()}
    others = {word for line in text.splitlines() if line not in copied for word in line.split() if "/" not in word}
    assert {word for word in others - words if not re.search(r"\d", word)} == set()
    assert b"\x1b[31mBROKEN\x1b[0m" in screen.sent


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_a_terminal_shows_what_a_pipe_gets(columns: int, command: list[str], piped: str) -> None:
    code, screen = on_terminal(["check", *command], columns)
    assert code == exits.BROKEN
    check_shown(screen, piped)
    assert screen.sent.count(BARS) > 4, "bars were drawn again after each line"


def test_each_stream_may_be_a_terminal_alone(command: list[str], piped: str) -> None:
    for stdout in (True, False):
        screen, other = Screen(100), io.StringIO()
        out, err = (screen.file, other) if stdout else (other, screen.file)
        try:
            assert run(["check", *command], out, err) == exits.BROKEN
        finally:
            screen.close()
        if stdout:
            check_shown(screen, piped)
            assert BARS not in screen.sent
            assert other.getvalue() == ""
        else:
            assert sorted(map(squeezed, other.getvalue().splitlines())) == sorted(map(squeezed, piped.splitlines()))
            assert BARS in screen.sent
            assert screen.text == "", "the bars are erased in the end"


def test_a_soak_on_a_terminal_shows_its_rounds(command: list[str]) -> None:
    words = ["soak", command[0], "--minutes", "1", *command[1:9]]  # until both laws are broken
    _, text = in_pipe(words)
    assert re.search(r"^round 1: gdn-verify check .*--law packed --law recall$", text, re.MULTILINE)
    _, screen = on_terminal(words, 80)
    assert BARS in screen.sent
    reports = [line for line in text.splitlines() if re.match(r"round|BROKEN|  (repeat|found|holds with|versions)", line)]
    assert len(reports) >= 6
    assert missing(screen, "\n".join(reports)) == []


def test_after_ctrl_c_a_terminal_shows_what_was_decided(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when three laws are reported and the fourth has begun, which a stopped check lets go on."""
    report, reports, begun, stopped = check_command._print_report, list[str](), threading.Event(), threading.Event()

    def before(run: Run) -> None:
        if run.law == "again":
            begun.set()
            assert stopped.wait(60)

    def reported(*words: Any) -> None:
        report(*words)
        reports.append("one")
        if len(reports) == 3:
            assert begun.wait(60)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(check_command, "_print_report", reported)
    monkeypatch.setattr(Slow, "close", lambda _: stopped.set())
    code, text = in_pipe(["check", *command], at=before)
    assert code == exits.INTERRUPTED
    assert text.splitlines()[-1].startswith("interrupted: 1 of 4 laws holds, 2 broken, 1 not finished")
    for state in (reports, begun, stopped):
        state.clear()
    code, screen = on_terminal(["check", *command], 80, at=before)
    assert code == exits.INTERRUPTED
    check_shown(screen, text)


class Cut(io.StringIO):
    """A terminal on which Ctrl-C is pressed in the middle of each line."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("it has no number")

    def write(self, text: str) -> int:
        super().write(text[:3])
        signal.raise_signal(signal.SIGINT)
        return 3 + super().write(text[3:])


def test_ctrl_c_acts_after_the_line() -> None:
    out = Cut()
    with pytest.raises(KeyboardInterrupt):
        print_line("law=oracle adapter=a.py:B lengths=1", out)
    assert out.getvalue() == "law=oracle adapter=a.py:B lengths=1\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_lines_are_wrapped_behind_their_label_unless_they_are_copied() -> None:
    words = " ".join(f"word{number}" for number in range(30))
    for line, indent in (
        (f"HOLDS       cut  {words}", 12),
        (f"  versions     {words}", 15),
        (f"  o: is off {words}", 6),
        (words, 4),
    ):
        first, *others = wrapped(line, 60)
        assert " ".join([first, *(other.strip() for other in others)]) == line
        assert all(len(row) <= 60 and len(row) - len(row.lstrip()) == indent for row in others)
        assert len(others) > 2
    for line in (
        f'  repeat       gdn-verify repeat "law=cut at=1 adapter=a.py:B {words}"',
        f"  found        in case 5, as law=cut at=1 adapter=a.py:B {words}",
        f"  {words}: pip install 'fla-core>=0.4.0'",
        "x" * 100,
    ):
        assert wrapped(line, 60) == [line]


@for_each(
    ("variables", "wants"),
    [({}, ("colours", "bars")), ({"NO_COLOR": "1"}, ("bars",)), ({"TERM": "dumb"}, ())],
)
def test_colours_and_bars_are_for_terminals_that_want_them(
    variables: dict[str, str], wants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    text = "HOLDS       a\nBROKEN   b\nUNKNOWN     c\nunsupported d\n  HOLDS"
    screen = Screen(80)
    with streams(screen.file, screen.file), output.progress() as move:
        move("oracle", 1, 2)
        print_line(text)
    screen.close()
    colours = re.findall(rb"\x1b\[(\d+)m(\w+)\x1b\[0m +[a-d]", screen.sent)
    verdicts = [(b"32", b"HOLDS"), (b"31", b"BROKEN"), (b"33", b"UNKNOWN"), (b"2", b"unsupported")]
    assert colours == (verdicts if "colours" in wants else [])
    assert (BARS in screen.sent) is ("bars" in wants)
    assert missing(screen, text) == []
    plain = io.StringIO()
    with streams(plain, plain), output.progress() as move:
        move("oracle", 1, 2)
        print_line(text)
    assert plain.getvalue() == f"{text}\n"


@for_each("bars", [1, 3, 40])
def test_lines_stay_beside_any_number_of_bars(bars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(80)
    lines = [f"line {number}" for number in range(30)]
    with streams(screen.file, screen.file), output.progress() as move:
        for number, line in enumerate(lines):
            for bar in range(bars):
                move(f"law{bar}", number, 100)
            print_line(line, sys.stdout if number % 2 else sys.stderr)
            if number == 15:
                time.sleep(0.2)  # until the bars are drawn by themselves
    screen.close()
    assert [row for row in screen.rows if row] == lines
    assert b"law0" in screen.sent


def test_a_screen_on_which_bars_erase_lines_is_seen() -> None:
    screen = Screen(80)
    screen.file.write("HOLDS       first\nBROKEN   second\n\x1b[1A\x1b[2K")
    screen.close()
    assert missing(screen, "HOLDS       first\nBROKEN   second\n") == ["BROKEN   second"]
