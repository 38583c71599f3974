"""Examples: the lines that broke a law in earlier checks, which later ones ask first.

One line of text a run, in a file beside the findings, the newest last, for all adapters, laws and processes. Hypothesis's database
would not serve: it keeps the numbers that were drawn, which make another case in another version; a line is the same everywhere.
The file may come from anywhere: what is no run of ours is left where it is, said once and never asked.
"""

import contextlib
import fcntl
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable, Iterator

from properties.cases.line import split_line
from verify.adapters.loader import AdapterError
from verify.execution.run import Run

FILE = "examples.txt"
MOST = 6  # of one adapter and law: the last three that broke, as found and shrunk
MOST_BYTES = 2**22  # a larger file is not ours


class Examples:
    """The lines in `folder`. Where they are not `asked`, as in a suite that must not depend on what a machine remembers, what
    breaks is kept for checks that do ask. `trouble` says in one line the first thing that is wrong with the file; nothing raises.
    """

    def __init__(self, folder: str | os.PathLike[str], *, asked: bool = True) -> None:
        self.path = pathlib.Path(folder) / FILE
        self.asked, self.trouble = asked, ""
        self._lock = threading.Lock()  # of this process; between processes the folder is locked

    def of(self, adapter: str, law: str, device: str = "cpu") -> list[Run]:
        """The runs to ask of a law of an adapter on a device, the newest first."""
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
            are = "1 line of {} is no run and is" if len(strange) == 1 else f"{len(strange)} lines of {{}} are no runs and are"
            self._say(f"{are.format(self.path)} not asked, {strange[0]}")
        return [run for run in reversed(runs) if run.device == device][:MOST]

    def add(self, run: Run) -> None:
        """Keep a run that broke its law as the newest of its adapter and law; those beyond MOST go, the oldest first."""
        line, own = str(run), (run.adapter, run.law)

        def change(lines: list[str]) -> list[str]:
            lines = [each for each in lines if each != line] + [line]
            places = [place for place, each in enumerate(lines) if _quietly(each, *own)]
            gone = set(places[:-MOST])
            return [each for place, each in enumerate(lines) if place not in gone]

        self._change(change)

    def drop(self, run: Run) -> None:
        """Forget a run, which holds again."""
        self._change(lambda lines: [each for each in lines if each != str(run)])

    def _lines(self) -> list[str]:
        if not self.path.is_file():
            return []
        if self.path.stat().st_size > MOST_BYTES:
            raise OSError(0, f"it has more than {MOST_BYTES >> 20} MiB")
        return self.path.read_text("utf-8", "surrogateescape").removesuffix("\n").split("\n")

    def _change(self, change: Callable[[list[str]], list[str]]) -> None:
        """Write what `change` makes of the lines; whoever reads sees all of the old or all of the new ones."""
        with self._lock, self._trying():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)  # another check may change them too
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
            self._say(f"cannot use {self.path}: {error.strerror}; examples are not kept")

    def _say(self, what: str) -> None:
        self.trouble = self.trouble or what


def _belongs(line: str, adapter: str, law: str) -> bool:
    """Whether a line is a run of that adapter and law. ValueError if it is no line of words."""
    words = split_line(line)
    if "law" not in words or "adapter" not in words:
        raise ValueError(f"a run line must say law=... and adapter=..., got {line!r}")
    return (words["adapter"], words["law"]) == (adapter, law)


def _quietly(line: str, adapter: str, law: str) -> bool:
    try:
        return _belongs(line, adapter, law)
    except ValueError:
        return False


def _plain(text: str) -> str:
    """The beginning of a text from elsewhere, without what would move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:160]
