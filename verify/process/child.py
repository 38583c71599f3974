"""A program beside a worker that answers questions: one line and raw bytes each way. docs/how-to/any-language.md has the protocol.

The program may do anything: die, hang, print what is no answer, close its pipes, write without end to stderr, start processes. Each
of these is one error, nothing that it sends makes us allocate memory, and `end` leaves none of its processes behind.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence

from verify.process.environment import CHILD

STDERR = 2
WORDS = ("ok", "error", "refuse")
LINE_BYTES = 4096  # the longest line of an answer
STALL_S = 10.0  # an answer that has begun is given up after so long without a byte
GRACE_S = 1.0  # for a program that has closed a pipe, to end
TICK_MS = 50  # how soon the end of a program is seen if a process of its own keeps its pipes open
READ_BYTES = 1 << 16
STDERR_BYTES = 1 << 18  # of stderr are passed on at once in each question; of more, only the end, if the question fails
TAIL_BYTES = 4096
LAST_READS = 16  # of stderr, after a question failed
KILL_S = 2.0  # for all processes that a program has started, to end


class ProcessDied(Exception):
    """The program ended, or could not be started."""


class WrongAnswer(Exception):
    """What a program, or a file, says is no answer to the question."""


class Child:
    """One run of a program. After ProcessDied or WrongAnswer it is of no use any more: `end` it and start another."""

    def __init__(self, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        """Start the program in a folder, with variables besides those of this process. ProcessDied if there is no such program."""
        self.name, self._token = command[0], uuid.uuid4().hex
        self._mute = False  # it has closed its stderr
        self.in_step = True  # the program has read every question to its end, so that it can be asked another
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the words are those of the adapter's author; no shell sees them
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=folder,
                env={**os.environ, **environment, CHILD: self._token},
            )
        except OSError as error:
            raise ProcessDied(f"{self.name} cannot be started in {folder}: {error.strerror}") from None
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in, self._out, self._err = (
            pipe.fileno() for pipe in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        for pipe in (self._in, self._out, self._err):
            os.set_blocking(pipe, False)

    def ask(
        self, line: str, sent: Iterable[memoryview] = (), into: Iterable[memoryview] = (), limit_s: float | None = None
    ) -> tuple[str, str]:
        """Send a line and bytes. Returns the first word of the answer and the rest of its line; of "ok", `into` has the bytes.

        Without `limit_s` we wait for ever: the supervisor of this process knows the deadline.
        """
        self._tail, self._passed = b"", 0  # of stderr: its end, and how many bytes there were
        self.in_step = False
        try:
            return self._asked(line, list(sent), list(into), limit_s)
        except (ProcessDied, WrongAnswer):
            for _ in range(LAST_READS):
                if self._mute or not self._hear():
                    break
            if self._passed > STDERR_BYTES:
                _write_stderr(b"\n" + self._tail + b"\n")
            raise

    def _asked(self, line: str, sent: list[memoryview], into: list[memoryview], limit_s: float | None) -> tuple[str, str]:
        if beyond := self._more():
            raise WrongAnswer(f"wrote {beyond[:40]!r} before it was asked, or beyond its last answer")
        sending = _Bytes([memoryview(f"{line}\n".encode()), *sent])
        answer = _Bytes(into)
        head, complete, ended = b"", False, False
        start = moved = time.monotonic()
        while not (complete and answer.done):
            ready = self._await_program(sending)
            if self._in in ready and not sending.done:
                self._send(sending)
            if self._err in ready:
                self._hear()
            if self._out in ready:
                moved = time.monotonic()
                if complete:
                    self._receive(answer)
                    continue
                head += self._read()
                first, end, rest = head.partition(b"\n")
                complete = self._is_line(first, whole=bool(end))
                if complete and first.split()[0] != b"ok":
                    answer = _Bytes([])
                if complete:
                    self._check_length(first, answer, line)
                    answer.take(rest)
                    head = first
            elif ended:  # and it has written nothing more
                self._await_end()
                raise WrongAnswer("closed its stdin before it had answered")
            else:
                ended = bool(ready.get(self._in, 0) & select.POLLERR) or self._process.poll() is not None
            now = time.monotonic()
            if head and now - moved > STALL_S:
                had = f"{answer.passed} of the {answer.total} bytes of its answer" if complete else f"{head[:40]!r}"
                raise WrongAnswer(f"wrote {had}, and then nothing for {STALL_S:g} s")
            if limit_s is not None and now - start > limit_s:
                raise WrongAnswer(f"did not answer {line!r} within {limit_s:g} s")
        if beyond := self._more():
            raise WrongAnswer(f"wrote {beyond[:40]!r} beyond its answer")
        self.in_step = sending.passed == sending.total
        word, _, text = head.decode(errors="replace").partition(" ")
        return word, text.strip()

    def _await_program(self, sending: "_Bytes") -> dict[int, int]:
        """The pipes that can be used, or have been closed, after at most TICK_MS, each with the events of select.poll."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if not self._mute:
            poll.register(self._err, select.POLLIN)
        poll.register(self._in, 0 if sending.done else select.POLLOUT)  # that it is closed is reported in any case
        return dict(poll.poll(TICK_MS))

    def _send(self, sending: "_Bytes") -> None:
        try:
            sending.advance(os.writev(self._in, sending.left()))
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it may have answered all the same
            sending.drop()

    def _receive(self, answer: "_Bytes") -> None:
        with contextlib.suppress(BlockingIOError):
            if not (count := os.readv(self._out, answer.left())):
                self._await_end()
                raise WrongAnswer(f"closed its stdout after {answer.passed} of the {answer.total} bytes of its answer")
            answer.advance(count)

    def _read(self) -> bytes:
        """What the program has written to stdout, at most READ_BYTES."""
        try:
            data = os.read(self._out, READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self._await_end()
            raise WrongAnswer("closed its stdout before it had answered")
        return data

    def _more(self) -> bytes:
        """What the program has written to stdout without being asked."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._out, READ_BYTES)
        return b""

    def _hear(self) -> bool:
        """Read what the program has written to stderr, and pass the first of it on to ours. Returns whether there was something."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._err, READ_BYTES)
            self._mute = not data
        if self._passed <= STDERR_BYTES:
            _write_stderr(data)
        self._passed += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        return bool(data)

    def _is_line(self, first: bytes, *, whole: bool) -> bool:
        """Whether an answer's line is complete. WrongAnswer if it is none, or cannot become one."""
        word = first.split(b" ")[0].decode(errors="replace")
        known = word in WORDS if whole or b" " in first else any(other.startswith(word) for other in WORDS)
        if not known or len(first) > LINE_BYTES:
            raise WrongAnswer(f"wrote {first[:60]!r} where the line of an answer belongs: {', '.join(WORDS[:-1])} or {WORDS[-1]}")
        return whole

    def _check_length(self, first: bytes, answer: "_Bytes", question: str) -> None:
        if first.split()[0] == b"ok" and first.partition(b" ")[2].strip() != b"%d" % answer.total:
            words, asked = first[:40].decode(errors="replace"), question.partition(";")[2].partition(";")[0].strip()
            raise WrongAnswer(f"answered {words!r}, where the answer has {answer.total} bytes: {asked or 'none'}")

    def _await_end(self) -> None:
        """Wait a moment for the end of a program that has closed a pipe. ProcessDied if it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
            raise self._died()

    def _died(self) -> ProcessDied:
        code = self._process.returncode
        if code >= 0:
            return ProcessDied(f"{self.name} exited with code {code}")
        with contextlib.suppress(ValueError):
            return ProcessDied(f"{self.name} was killed by {signal.Signals(-code).name}")
        return ProcessDied(f"{self.name} was killed by signal {-code}")

    def kill(self) -> None:
        """Kill the program and every process that it started. Any thread may call this, also while another one asks."""
        self._process.kill()
        end = time.monotonic() + KILL_S
        while (relatives := _with_variable(f"{CHILD}={self._token}")) and time.monotonic() < end:
            for pid in relatives:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    def end(self) -> None:
        """Kill as `kill` does, and close the pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


class _Bytes:
    """Places of bytes in memory, one after the other, that are written or filled little by little."""

    def __init__(self, places: Iterable[memoryview]) -> None:
        self._places = [place for place in places if place.nbytes]
        self.total, self.passed = sum(place.nbytes for place in self._places), 0

    @property
    def done(self) -> bool:
        """Whether no byte is left."""
        return not self._places

    def drop(self) -> None:
        """Give up what is left."""
        self._places = []

    def left(self) -> list[memoryview]:
        """The next places, as many as one call of the system takes."""
        return self._places[:64]

    def advance(self, count: int) -> None:
        """Leave the next bytes behind."""
        self.passed += count
        while count:
            first = self._places[0]
            step = min(count, first.nbytes)
            count -= step
            self._places[:1] = [first[step:]] if step < first.nbytes else []

    def take(self, data: bytes) -> None:
        """Fill the next bytes. WrongAnswer if there are more than places."""
        if len(data) > self.total - self.passed:
            raise WrongAnswer(f"wrote {data[self.total - self.passed :][:40]!r} beyond its answer")
        while data:
            first = self._places[0]
            step = min(len(data), first.nbytes)
            first[:step] = data[:step]
            data = data[step:]
            self.advance(step)


def _write_stderr(data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(STDERR, data)


def _with_variable(word: str) -> list[int]:
    """The running processes that have a variable in the environment with which they started. Empty where there is no /proc."""
    found: list[int] = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if name.isdecimal() and int(name) != os.getpid():
                with open(f"/proc/{name}/environ", "rb") as file:
                    if word.encode() in file.read().split(b"\0"):
                        found.append(int(name))
    return found
