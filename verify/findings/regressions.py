"""Regressions: the lines that broke a law in earlier checks, which later checks run first.

The file `examples.txt` beside the findings has one line of text for each run, the newest last. All adapters, laws and processes
share it. Hypothesis' database would not serve, because it keeps the drawn numbers, which give another case in another version. A
line gives the same case in every version. The file may come from anywhere: a line that cannot be read as a run stays in the file,
is reported once and is never run.
"""

import contextlib
import fcntl
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable, Iterator

from properties.words.line import split_line
from verify.adapters.registry import AdapterError
from verify.execution.line import Run

FILE = "examples.txt"
MOST = 6  # lines of one adapter and law: the last three failures, each as found and as shrunk
MOST_BYTES = 2**22  # a larger file was not written by us


class Examples:
    """The lines in `folder` that broke a law.

    With `asked=False` no line is run again, but new failures are still written for later checks. That is for test suites whose
    result must not depend on earlier runs on the machine. Problems with the file raise nothing: `trouble` describes the first one
    in one line.
    """

    def __init__(self, folder: str | os.PathLike[str], *, asked: bool = True) -> None:
        self.path = pathlib.Path(folder) / FILE
        self.asked, self.trouble = asked, ""
        self._lock = threading.Lock()  # of this process; between processes the folder is locked

    def of(self, adapter: str, law: str, device: str = "cpu") -> list[Run]:
        """The runs of a law, adapter and device to repeat, the newest first, at most MOST."""
        if not self.asked:
            return []
        runs, strange = [], list[str]()
        with self._trying():
            for number, line in enumerate(self._lines(), 1):
                try:
                    if line.strip() and _belongs(line, adapter, law):
                        runs.append(Run.parse(line))
                except (ValueError, AdapterError) as error:
                    strange.append(f"line {number}: {_plain(str(error))}")
        if strange:
            are = (
                "1 line of {} is no case line and was"
                if len(strange) == 1
                else f"{len(strange)} lines of {{}} are no case lines and were"
            )
            self._note_trouble(f"{are.format(self.path)} not run: {strange[0]}")
        return [run for run in reversed(runs) if run.device == device][:MOST]

    def add(self, run: Run) -> None:
        """Keep a run that broke its law as the newest of its adapter and law. Of more than MOST, the oldest are dropped."""
        line, subject = str(run), (run.adapter, run.law)

        def change(lines: list[str]) -> list[str]:
            lines = [entry for entry in lines if entry != line] + [line]
            places = [place for place, entry in enumerate(lines) if _matches(entry, *subject)]
            gone = set(places[:-MOST])
            return [entry for place, entry in enumerate(lines) if place not in gone]

        self._change(change)

    def drop(self, run: Run) -> None:
        """Remove a run that holds again."""
        self._change(lambda lines: [entry for entry in lines if entry != str(run)])

    def _lines(self) -> list[str]:
        if not self.path.is_file():
            return []
        if self.path.stat().st_size > MOST_BYTES:
            raise OSError(0, f"the file has more than {MOST_BYTES >> 20} MiB")
        return self.path.read_text("utf-8", "surrogateescape").removesuffix("\n").split("\n")

    def _change(self, change: Callable[[list[str]], list[str]]) -> None:
        """Replace the lines by `change(lines)`. A reader sees either all old lines or all new ones."""
        with self._lock, self._trying():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)  # another check may change the file too
                before = self._lines()
                after = change(before)
                if after != before:
                    self._write(after, folder)
            finally:
                os.close(folder)

    def _write(self, lines: list[str], folder: int) -> None:
        descriptor, new = tempfile.mkstemp(prefix=f".{FILE}.", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
            os.fsync(folder)
        except BaseException:
            os.unlink(new)
            raise

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._note_trouble(f"cannot use {self.path}: {error.strerror}; failing lines are not stored")

    def _note_trouble(self, what: str) -> None:
        self.trouble = self.trouble or what


def _belongs(line: str, adapter: str, law: str) -> bool:
    """Whether a line is a run of this adapter and law. ValueError if it does not consist of words with law and adapter."""
    words = split_line(line)
    if "law" not in words or "adapter" not in words:
        raise ValueError(f"a run line must have law=... and adapter=..., got {line!r}")
    return (words["adapter"], words["law"]) == (adapter, law)


def _matches(line: str, adapter: str, law: str) -> bool:
    try:
        return _belongs(line, adapter, law)
    except ValueError:
        return False


def _plain(text: str) -> str:
    """The first 160 characters of a text from outside, without control characters for the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:160]
