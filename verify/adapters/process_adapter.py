"""An adapter whose implementation is a program in any language, which gdn-verify asks over pipes.

docs/how-to/any-language.md has the protocol. This module writes its lines; verify/process/child.py moves the bytes.
"""

import os
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from verify.adapters.foreign import WORDS, Call, FileAdapter, Place
from verify.adapters.interface import Unsupported
from verify.adapters.tensor_files import memory_of
from verify.process import deadline
from verify.process.child import Child

HELLO = "hello 1"  # the version of the protocol


class ProcessError(Exception):
    """The program answered `error`."""


class ProcessAdapter(FileAdapter):
    """A program that computes an operation. It is started once in each worker process, and again after each failure.

    - `command`: the program and its arguments. It runs in `folder`.
    - `inputs`: the names of the tensors that the program gets, in their order. None: all that a call has, in the operation's order.
    - `layout` and `absent` as for a ForeignAdapter.
    - `environment`: variables for the program, besides those of the command.
    - `start_s`: the seconds after which a program that has not answered `hello` is given up.
    """

    command: ClassVar[Sequence[str]] = ()
    inputs: ClassVar[Sequence[str] | None] = None
    environment: ClassVar[Mapping[str, str]] = {}
    start_s: ClassVar[float] = 300.0

    _named_by = "command"
    _child: Child | None = None
    _greeted = False
    _turn: ClassVar[threading.RLock] = threading.RLock()  # a program answers one question at a time

    def bring(self) -> None:
        """Start the program. It may prepare for its questions while the first cases are drawn."""
        with self._turn:
            self._start()

    def close(self) -> None:
        """End the program, also while another thread waits for its answer."""
        if self._turn.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._turn.release()
        elif self._child is not None:
            self._child.kill()

    def _ask(self, call: Call, word: str, sent: Mapping[Place, Tensor], asked: Sequence[Place]) -> list[Tensor]:
        if self.inputs is not None:
            call.check_names(self.inputs, "`inputs`")
            cotangents = [place for place in sent if place.name not in call.tensors]
            by_name = {place.name: place for place in sent}
            sent = {place: sent[place] for place in (*(by_name[name] for name in self.inputs if name in by_name), *cotangents)}
        line = f"{word} {' '.join(map(words_of, sent))} ; {' '.join(map(words_of, asked))} ; {' '.join(options_of(call))}"
        answers = [place.empty() for place in asked]
        self._exchange(line.rstrip(), [place.theirs(x) for place, x in sent.items()], answers)
        return answers

    def _exchange(self, line: str, sent: Sequence[Tensor], answer: Sequence[Tensor]) -> None:
        """Ask the program a question. Its answer fills the tensors of `answer`, which lie on the CPU and are contiguous.

        ProcessDied, WrongAnswer or ProcessError says what went wrong. Unsupported: it refuses.
        """
        with self._turn:
            child = self._start()
            try:
                word, text = self._greet(child)
                if word == "ok":
                    word, text = child.ask(line, map(memory_of, sent), map(memory_of, answer))
            finally:
                if not child.in_step:
                    self._end()
        if word == "refuse":
            raise Unsupported(text or "the program refuses the call")
        if word == "error":
            raise ProcessError(text or "no message")

    def _greet(self, child: Child) -> tuple[str, str]:
        """Wait until a new program can be asked, which may take longer than a case may."""
        if self._greeted:
            return "ok", ""
        with deadline.outside(self.start_s + 1.0):
            word, text = child.ask(HELLO, limit_s=self.start_s)
        self._greeted = word == "ok"
        return word, text

    def _start(self) -> Child:
        if self._child is None:
            self._child, self._greeted = Child(self.command, self.folder, self.environment), False
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.end()

    def _wrong(self) -> str | None:
        if isinstance(self.command, str) or not self.command or not all(isinstance(word, str) and word for word in self.command):
            return f"command must be a list of words, the program and its arguments, got {self.command!r}"
        program = self.command[0]
        if "/" not in program:
            return None if shutil.which(program) else f"there is no program {program} on the PATH"
        if missing := self._missing("program", program):
            return f"{missing}: compile it first"
        found = self._path(program)
        return None if os.access(found, os.X_OK) else f"the program {found} must be executable: chmod +x {found}"


def words_of(place: Place) -> str:
    """A tensor as the line of a question names it."""
    return " ".join(map(str, (place.name, WORDS[place.dtype], len(place.sizes), *place.sizes)))


def options_of(call: Call) -> Iterable[str]:
    """The options of a call as words. Those that are None are left out."""
    for name, value in call.options():
        if value is not None:
            several = value if isinstance(value, tuple | list) else (value,)
            text = ",".join(str(int(one) if isinstance(one, bool) else one) for one in several)
            assert not text.split()[1:], (name, text)
            yield f"{name}={text}"
