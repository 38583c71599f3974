"""The next check runs first what broke, until it holds again; the file may be shared, torn or somebody else's."""

import fcntl
import os
import pathlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from properties.rules.case import Case
from properties.words.example import Example
from tests.alone import told
from tests.answering import Answering
from tests.together import for_each
from tests.verbs.test_pytest_plugin import ASKS, Suite
from verify.cli import exits
from verify.cli import main as cli
from verify.cli.pytest_plugin import LawItem
from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings.regressions import FILE, MOST, Examples
from verify.findings.store import Store
from verify.process.outcome import Verdict

ROOT = pathlib.Path(__file__).resolve().parents[2]
RIGHT = f"{ROOT}/tests/right.py:Chunkwise"
# Right but for one length, which no profile draws.
AT_77 = """
from tests.right import Chunkwise
class Kernel(Chunkwise):
    def run(self, x):
        o, state = super().run(x)
        return (2 * o if x.q.shape[1] == 77 else o), state
"""

LINE_77 = "law=recall adapter=kernel.py:Kernel lengths=77 beta=one values=one_hot backward=no"


def run(law: str = "oracle", adapter: str = RIGHT, length: int = 3, **more: str) -> Run:
    return Run(law, adapter, Example(Case((length,))), **more)


def test_what_is_kept_runs_newest_first_and_only_for_its_law_adapter_and_device(tmp_path: pathlib.Path) -> None:
    examples = Examples(tmp_path / "new")
    assert examples.of(RIGHT, "oracle") == []
    for entry in (run(length=1), run("pure"), run(adapter="zoo/Hangs"), run(length=2), run(device="cuda", length=9), run(length=1)):
        examples.add(entry)
    assert Examples(tmp_path / "new").of(RIGHT, "oracle") == [run(length=1), run(length=2)]
    assert examples.of(RIGHT, "oracle", "cuda") == [run(device="cuda", length=9)]
    assert examples.of(RIGHT, "pure") == [run("pure")]
    assert examples.of(RIGHT, "recall") == []
    assert examples.trouble == ""
    assert examples.path.read_text().splitlines()[-1] == str(run(length=1)), "a line of text a run"


def test_only_the_newest_few_of_an_adapter_and_law_stay(tmp_path: pathlib.Path) -> None:
    examples = Examples(tmp_path)
    examples.add(run("pure"))
    for length in range(MOST + 5):
        examples.add(run(length=length))
    assert [entry.example.case.lengths[0] for entry in examples.of(RIGHT, "oracle")] == list(range(MOST + 4, 4, -1))
    assert examples.of(RIGHT, "pure") == [run("pure")]


def test_what_is_dropped_is_gone_and_the_rest_stays(tmp_path: pathlib.Path) -> None:
    examples = Examples(tmp_path)
    examples.add(run(length=1))
    examples.add(run(length=2))
    examples.drop(run(length=1))
    examples.drop(run(length=5))
    assert examples.of(RIGHT, "oracle") == [run(length=2)]


STRANGE = (
    b"\x00\xff\xfe\x80 \xc3(",
    b"\x1b[2J\x1b]0;title\x07",
    b"law=oracle",
    b"just some words",
    b"{" + b'"a": [' * 5000,
    b"law=oracle law=oracle adapter=a",
    f"law=oracle adapter={RIGHT}".encode(),
    f"law=oracle adapter={RIGHT} lengths={'9' * 400}".encode(),
    f"law=oracle adapter={RIGHT} lengths=3 colour=red".encode(),
    f"law=oracle adapter={RIGHT} lengths=3 seed=-1".encode(),
    f"law=oracle variant=sliced adapter={RIGHT} lengths=3".encode(),
    f"law=oracle adapter={RIGHT} lengths=3 tune=$(reboot)".encode(),
    f"law=oracle adapter={RIGHT} lengths=3 device=tpu".encode(),
)


@for_each("strange", STRANGE)
def test_a_line_that_is_no_run_costs_one_line_of_warning_and_stays_where_it_is(tmp_path: pathlib.Path, strange: bytes) -> None:
    good = str(run()).encode()
    (tmp_path / FILE).write_bytes(good + b"\n\n" + strange + b"\n")
    examples = Examples(tmp_path)
    for _ in range(3):
        assert examples.of(RIGHT, "oracle") == [run()]
    assert examples.trouble.startswith(f"1 line of {tmp_path / FILE} is no case line and was not run: line 3: ")
    assert examples.trouble.isprintable()
    assert len(examples.trouble) < 400
    examples.add(run(length=7))
    examples.drop(run())
    assert (tmp_path / FILE).read_bytes() == b"\n" + strange + b"\n" + str(run(length=7)).encode() + b"\n"


def test_lines_of_others_are_left_to_them(tmp_path: pathlib.Path) -> None:
    """An adapter whose file is gone, a law of another version: they do not run here."""
    (tmp_path / FILE).write_text("law=oracle adapter=gone.py:Kernel lengths=3\nlaw=newer adapter=fla/chunk lengths=3 shape=round\n")
    examples = Examples(tmp_path)
    assert (examples.of(RIGHT, "oracle"), examples.trouble) == ([], "")


@pytest.mark.slow
def test_no_bytes_that_a_file_may_hold_raise(tmp_path: pathlib.Path) -> None:
    chance, good = random.Random(0), str(run()).encode() + b"\n"
    for _ in range(300):
        data = bytearray(good * 3)
        for _ in range(chance.randrange(1, 12)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (tmp_path / FILE).write_bytes(data)
        examples = Examples(tmp_path)
        assert all(isinstance(entry, Run) for entry in examples.of(RIGHT, "oracle"))
        examples.add(run(length=9))
        assert examples.of(RIGHT, "oracle")[0] == run(length=9)


@for_each("where", ["file/below", "loop", "/proc/gdn-verify"])
def test_a_folder_that_cannot_be_used_is_said_once_and_stops_nothing(tmp_path: pathlib.Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    examples = Examples(tmp_path / where)
    for _ in range(2):
        examples.add(run())
        assert examples.of(RIGHT, "oracle") == []
        examples.drop(run())
    assert examples.trouble.startswith(f"cannot use {examples.path}: ")
    assert examples.trouble.count("\n") == 0


def test_what_is_no_file_of_lines_is_not_read(tmp_path: pathlib.Path) -> None:
    """A pipe would never end, and a file of that size is not ours."""
    os.mkfifo(tmp_path / FILE)
    assert Examples(tmp_path).of(RIGHT, "oracle") == []
    (tmp_path / FILE).unlink()
    large = f"{run()}\n".encode() * 100000
    (tmp_path / FILE).write_bytes(large)
    examples = Examples(tmp_path)
    assert examples.of(RIGHT, "oracle") == []
    examples.add(run())
    assert "the file has more than 4 MiB" in examples.trouble
    assert (tmp_path / FILE).read_bytes() == large


def test_a_full_disk_leaves_the_old_lines(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Examples(tmp_path)
    examples.add(run())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    examples.add(run(length=4))
    assert "No space left on device" in examples.trouble
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert examples.of(RIGHT, "oracle") == [run()]


def both_write(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines after two checks wrote at once: the second begins while the first has read, and has not yet written."""
    reading, go = threading.Event(), threading.Event()
    first, second = Examples(folder), Examples(folder)
    write = first._write

    def slowly(lines: list[str], descriptor: int) -> None:
        reading.set()
        go.wait(10)
        write(lines, descriptor)

    monkeypatch.setattr(first, "_write", slowly)
    threads = [
        threading.Thread(target=first.add, args=(run(length=1),)),
        threading.Thread(target=second.add, args=(run(length=2),)),
    ]
    threads[0].start()
    assert reading.wait(10)
    threads[1].start()
    time.sleep(0.2)  # as long as a writer that does not wait takes many times over
    go.set()
    for thread in threads:
        thread.join(10)
    return (folder / FILE).read_text().splitlines()


def test_two_who_write_at_once_lose_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both_write(tmp_path, monkeypatch) == [str(run(length=1)), str(run(length=2))]


def test_writers_that_do_not_wait_would_lose_a_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before this one sees it."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert both_write(tmp_path, monkeypatch) == [str(run(length=1))]


@pytest.mark.slow
def test_processes_that_write_together_lose_and_tear_no_line(tmp_path: pathlib.Path) -> None:
    program = (
        "from verify.findings.regressions import Examples; from verify.execution.line import Run\n"
        "examples, laws = Examples(folder), ('oracle', 'pure', 'again', 'memory')\n"
        "for i in range(24):\n"
        "    law, words = laws[i % 4], f'adapter=zoo/{name} lengths={i + 1}'\n"
        "    examples.add(Run.parse(f'law={law} {words}'))\n"
        "assert not examples.trouble\n"
        "told = 'wrote'\n"
    )
    names = ("DropsState", "ChangesBeta")
    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(told, program, folder=str(tmp_path), name=name) for name in names]
        while not all(writer.done() for writer in writers):
            lines = (tmp_path / FILE).read_text().splitlines() if (tmp_path / FILE).exists() else []
            assert all(Run.parse(line) for line in lines)
            time.sleep(0.05)
    assert [writer.result() for writer in writers] == ["wrote", "wrote"]
    for name in names:
        for place, law in enumerate(("oracle", "pure", "again", "memory")):
            lengths = [entry.example.case.lengths[0] for entry in Examples(tmp_path).of(f"zoo/{name}", law)]
            assert lengths == [place + 1 + 4 * step for step in range(5, -1, -1)]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def checked(worker: Answering, folder: pathlib.Path, examples: Examples | None, seed: int = 0) -> Verdict:
    with Check(Settings(RIGHT, ["cut"], Profile("some", 12), seed), [worker], Store(folder), examples=examples) as check:
        (report,) = check.run()
    return report.verdict


def broken_when_long(run: Run) -> float:
    return 2.0 if run.example.case.tokens > 100 else 0.5


def test_what_broke_runs_first_and_is_forgotten_when_it_holds(tmp_path: pathlib.Path) -> None:
    worker = Answering(broken_when_long)
    assert checked(worker, tmp_path, Examples(tmp_path)) is Verdict.BROKEN
    entries = Examples(tmp_path).of(RIGHT, "cut")
    assert len(entries) == 2
    assert [str(entry) in worker.asked for entry in entries] == [True, True]
    assert entries[0].example.case.tokens == 101, "as shrunk, and before it as found"

    again = Answering(broken_when_long)
    with Check(Settings(RIGHT, ["cut"], Profile("some", 12), 5), [again], Store(tmp_path), examples=Examples(tmp_path)) as check:
        (report,) = check.run()
    assert (report.verdict, report.remembered, sum(report.counts.values())) == (Verdict.BROKEN, True, 1)
    assert again.asked[0] == str(entries[0]) == report.first_run

    mended = Answering()
    assert checked(mended, tmp_path, Examples(tmp_path)) is Verdict.HOLDS
    assert mended.asked[:2] == [str(entry) for entry in entries]
    assert len(mended.asked) == 14, "they run in addition to what is drawn"
    assert Examples(tmp_path).of(RIGHT, "cut") == []


def test_no_examples_are_read_with_the_option_against_them(tmp_path: pathlib.Path) -> None:
    plain = Answering()
    checked(plain, tmp_path / "none", None)
    checked(Answering(broken_when_long), tmp_path, Examples(tmp_path, asked=False))
    assert len(Examples(tmp_path).of(RIGHT, "cut")) == 2, "it is kept for those who ask"
    for examples in (None, Examples(tmp_path, asked=False)):
        mended = Answering()
        checked(mended, tmp_path, examples)
        assert mended.asked == plain.asked, "a result does not depend on what is kept"
    assert len(Examples(tmp_path).of(RIGHT, "cut")) == 2


def test_a_check_that_is_over_drops_nothing(tmp_path: pathlib.Path) -> None:
    checked(Answering(broken_when_long), tmp_path, Examples(tmp_path))
    mended = Answering()
    settings = Settings(RIGHT, ["cut"], Profile("some", 12), until=time.monotonic())
    with Check(settings, [mended], Store(tmp_path), examples=Examples(tmp_path)) as check:
        assert check.run() == []
    assert mended.asked == []
    assert len(Examples(tmp_path).of(RIGHT, "cut")) == 2


@pytest.mark.slow
def test_the_command_line_runs_what_it_kept_and_warns_in_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(AT_77)
    (tmp_path / ".gdn-verify").mkdir()
    (tmp_path / ".gdn-verify" / FILE).write_text(f"{LINE_77}\nnothing of ours\n")
    words = ("check", "kernel.py:Kernel", "--law", "recall", "--profile", "few", "--workers", "1")
    code = cli.main(words)
    out, err = capfd.readouterr()
    assert code == exits.BROKEN
    assert "found        in an earlier check, and run first in this one" in out
    assert "repeat       gdn-verify repeat" in out
    rule = "a case line is made of name=value words, got 'nothing'"
    assert err == f"gdn-verify: 1 line of .gdn-verify/{FILE} is no case line and was not run: line 2: {rule}\n"
    assert cli.main((*words, "--no-examples")) == exits.HOLDS
    assert capfd.readouterr().err == ""


def test_an_item_of_a_suite_uses_examples_only_where_the_suite_does(tmp_path: pathlib.Path) -> None:
    checked(Answering(broken_when_long), tmp_path, Examples(tmp_path))
    line = str(Examples(tmp_path).of(RIGHT, "cut")[0])
    for remembers in (False, True):
        mended = Answering()
        LawItem(RIGHT, "cut", "few", 0, mended, str(tmp_path), remembers=remembers).assert_holds()  # type: ignore[arg-type]
        assert (mended.asked[0] == line) is remembers


@pytest.mark.slow
def test_a_suite_runs_what_was_kept_with_the_option_for_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite(pytester, monkeypatch)
    (suite.folder / "kernel.py").write_text(AT_77)
    (suite.folder / ".gdn-verify").mkdir()
    (suite.folder / ".gdn-verify" / FILE).write_text(f"{LINE_77}\n")
    asks = ASKS.format(adapters="'kernel.py:Kernel', profile='least'")
    code, output = suite.run("-q", "--gdn-law", "recall", "--gdn-examples", test_kernel=asks)
    assert (code, "in an earlier check" in output) == (1, True), output
