"""A forked process is as one of its own: what differs, how it ends, and who ends with whom."""

import contextlib
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.processes import alive, children, gone, opened
from verify.process import fork_server, forking
from verify.process.forking import Forked

ROOT = pathlib.Path(__file__).resolve().parents[2]
TELLS = """
import json, os, signal, sys
def main(words):
    how = words[0]
    if how == "tells":
        with open(int(words[-1]), "w") as report:
            import colorsys
            json.dump({
                "words": words[:-1], "argv": sys.argv[1:-1], "path": sys.path, "where": os.getcwd(),
                "began": sys.modules["__main__"].__spec__.name, "group": os.getpgrp() == os.getpid(),
                "environment": dict(os.environ), "colorsys": colorsys.__file__, "open": os.listdir("/proc/self/fd"),
                "hash": hash("a word"), "input": os.readlink("/proc/self/fd/0"), "buffer": type(sys.stdout.buffer).__name__,
                "buries": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            }, report)
    elif how == "prints":
        print("said")
        print("warned", file=sys.stderr)
    elif how == "exits":
        sys.exit(int(words[1]))
    elif how == "raises":
        raise ArithmeticError("as it is")
    else:
        signal.pause()
if __name__ == "__main__":
    main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def _server() -> Iterator[None]:
    """A process that forks, of this module's own: it imports next to nothing."""
    before = dict(forking._servers)
    forking._servers.clear()
    try:
        yield
    finally:
        forking._end()
        forking._retired.clear()
        forking._servers.clear()
        forking._servers.update(before)


@pytest.fixture
def another(_server: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """No process that forks is there yet. The environment for one."""
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setattr(forking, "_servers", {})
    yield {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    for server in forking._servers.values():
        server.end()


Begin = Callable[..., Forked]


@pytest.fixture
def begin(_server: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forking, "_odd", {})
    server = forking._servers.get(0)
    if server is not None and server.early != fork_server.early_variables(os.environ):  # a test before had another environment
        forking._servers.pop(0).retire()
    with contextlib.ExitStack() as ends:

        def started(*words: str, path: str = "", output: int = 2, descriptors: tuple[int, ...] = (), **more: str) -> Forked:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path or str(tmp_path), str(ROOT)]), **more}
            one = forking.start("tells", words, descriptors, environment, output, ["colorsys"])

            def end() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()

            ends.callback(end)
            return one

        yield started


def report_of(begin: Begin, **more: Any) -> dict[str, Any]:
    source, target = os.pipe()
    one = begin("tells", "a word", descriptors=(target,), **more)
    os.close(target)
    with open(source) as pipe:
        report: dict[str, Any] = json.load(pipe)
    assert one.wait(10) == 0
    return report


def test_a_child_has_its_words_its_environment_its_folder_and_nothing_else_open(begin: Begin, tmp_path: pathlib.Path) -> None:
    report = report_of(begin, GDN_VERIFY_WORD="\udcff here")
    assert report["began"] == "verify.process.fork_server"
    assert report["words"] == report["argv"] == ["tells", "a word"]
    assert report["where"] == str(tmp_path)
    assert report["group"]
    assert report["environment"]["GDN_VERIFY_WORD"] == "\udcff here"
    assert len(report["open"]) == 5, "the three of every process, the pipe, and the list's own"
    assert report["buries"], "its own children are its own affair"
    assert "GDN_VERIFY_WORD" not in report_of(begin)["environment"]


def test_a_child_finds_modules_where_a_process_of_its_own_does(begin: Begin, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tells.py").write_text(TELLS.replace('"words": words[:-1]', '"words": ["other"]'))
    command = "import json, sys; print(json.dumps(sys.path))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(other), str(ROOT)])}
    want = json.loads(
        subprocess.run([sys.executable, "-P", "-c", command], env=environment, capture_output=True, check=True).stdout
    )
    report = report_of(begin, path=str(other))
    assert report["began"] == "verify.process.fork_server"
    assert report["words"] == ["other"]
    assert report["path"] == want


@pytest.mark.parametrize("what", ["a variable", "a module", "a program"])
def test_a_child_in_which_something_would_differ_is_a_process_of_its_own(
    begin: Begin, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    assert report_of(begin)["began"] == "verify.process.fork_server"
    if what == "a variable":
        report = report_of(begin, PYTHONHASHSEED="7")
        assert report["environment"]["PYTHONHASHSEED"] == "7"
    elif what == "a module":
        (tmp_path / "colorsys.py").write_text("")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "tells.py").write_text(TELLS)
        (elsewhere / "colorsys.py").write_text("")
        report = report_of(begin, path=str(elsewhere))
        assert report["colorsys"] == str(elsewhere / "colorsys.py")
    else:
        program = tmp_path / "python"
        program.symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(program))
        report = report_of(begin)
    assert report["began"] == "tells"
    assert report["words"] == report["argv"] == ["tells", "a word"]
    assert len(report["open"]) == 5


@pytest.mark.parametrize("more", [{}, {"PYTHONHASHSEED": "7"}], ids=["forked", "its own"])
def test_it_ends_as_a_process_of_its_own_does(begin: Begin, more: dict[str, str]) -> None:
    with tempfile.TemporaryFile() as output:
        ends = {how: begin(*how.split(), output=output.fileno(), **more).wait(10) for how in ("prints", "exits 3", "raises")}
        output.seek(0)
        text = output.read().decode()
    assert ends == {"prints": 0, "exits 3": 3, "raises": 1}
    assert "said\n" in text
    assert "warned\n" in text
    assert "ArithmeticError: as it is" in text


def test_it_is_polled_waited_for_and_killed_as_another_process_is(begin: Begin) -> None:
    one, other = begin("waits"), begin("waits")
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.05)
    assert alive(one.pid)
    assert one.pid != other.pid
    os.killpg(one.pid, signal.SIGTERM)
    assert one.wait(5) == one.poll() == one.wait() == -signal.SIGTERM
    assert other.poll() is None
    assert not alive(one.pid)


@pytest.mark.slow
def test_twenty_at_once_end_and_leave_nothing_open(begin: Begin) -> None:
    begin("prints").wait()
    before, family = opened(), children()
    several = [begin("exits", str(code)) for code in range(20)]
    assert [one.wait(20) for one in several] == list(range(20))
    assert opened() <= before
    assert children() <= family


def test_a_child_whose_server_dies_goes_on_and_the_next_has_another(begin: Begin) -> None:
    one, other = begin("waits"), begin("waits")
    assert alive(one.pid)
    assert alive(other.pid)
    server = forking._servers[0].process
    server.kill()
    server.wait()
    assert one.poll() is None
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.2)
    one.kill()
    assert one.wait(5) == -signal.SIGKILL
    other.signal(signal.SIGTERM)
    assert other.wait(5) == -signal.SIGKILL, "nobody can say how it ended"
    assert begin("exits", "4").wait(10) == 4
    assert forking._servers[0].process is not server


def test_another_environment_that_stays_gets_a_server_of_its_own(begin: Begin, another: dict[str, str]) -> None:
    first = begin("waits")
    assert first.poll() is None
    server = forking._servers[0]
    assert report_of(begin, PYTHONHASHSEED="7")["began"] == "tells"
    assert report_of(begin)["began"] == "verify.process.fork_server", "one alone is no reason"
    assert report_of(begin, PYTHONHASHSEED="7")["began"] == "tells"
    assert report_of(begin, PYTHONHASHSEED="7")["began"] == "verify.process.fork_server"
    assert forking._servers[0] is not server
    assert first.poll() is None, "what the other forked goes on"
    assert server.process.poll() is None
    os.killpg(first.pid, signal.SIGTERM)
    assert first.wait(5) == -signal.SIGTERM
    assert server.process.wait(5) == 0


def test_a_child_that_is_killed_before_it_began_never_runs(another: dict[str, str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(1.0)")
    source, target = os.pipe()
    one = forking.start("tells", ["tells"], [target], another, 2, ["slow"])
    os.close(target)
    began = time.monotonic()
    one.kill()
    assert one.poll() == one.wait() == -signal.SIGKILL
    assert time.monotonic() - began < 0.5, "it does not wait for what the server imports"
    with open(source) as pipe:
        assert not pipe.read(), "the server kills what nobody listens for"
    assert forking.start("tells", ["exits", "6"], [], another, 2, []).wait(10) == 6


FAILS = """
import errno, os
fork, left = os.fork, [True, False]
def failing():
    if left and left.pop():
        raise OSError(errno.EAGAIN, "no process is left")
    return fork()
os.fork = failing
"""


def test_a_fork_that_fails_is_an_error_and_costs_no_other_child(another: dict[str, str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    first = forking.start("tells", ["waits"], [], another, 2, ["fails"])
    none = forking.start("tells", ["waits"], [], another, 2, ["fails"])
    with pytest.raises(OSError, match="no process could be forked"):
        none.wait(10)
    assert none.wait() == none.poll() == os.EX_OSERR
    none.kill()
    assert first.poll() is None
    first.kill()
    assert first.wait(5) == -signal.SIGKILL
    one = forking.start("tells", ["exits", "7"], [], another, 2, [])
    assert one.wait(10) == 7


NARROW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, 1024))
"""


@pytest.mark.parametrize("limit", [6, 8])
@pytest.mark.slow
def test_a_server_without_room_for_descriptors_says_so(
    another: dict[str, str], tmp_path: pathlib.Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own are below 6, but for the socket, which has any number: nothing fits, or two of the four that a child needs."""
    monkeypatch.setattr(forking, "GONE_S", 0.3)  # this server lives, however long we wait for its end
    (tmp_path / "narrow.py").write_text(NARROW.replace("MOST", str(limit)))
    for _ in range(2):
        one = forking.start("tells", ["exits", "3"], [], another, 2, ["narrow"])
        with pytest.raises(OSError, match="no process could be forked: Too many open files"):
            one.wait(10)
        assert one.wait() == os.EX_OSERR
    assert forking._servers[0].process.poll() is None


def test_it_is_killed_while_another_thread_waits_for_it(another: dict[str, str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(3.0)")
    for imports in ([], ["slow"]):
        one = forking.start("tells", ["waits"], [], another, 2, imports, len(imports))
        ends: list[int] = []
        waiting = threading.Thread(target=lambda one=one, ends=ends: ends.append(one.wait()))
        waiting.start()
        time.sleep(0.2)
        one.kill()
        waiting.join(1.0)
        assert ends == [-signal.SIGKILL]


def test_an_interrupt_in_the_middle_loses_no_number(another: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = forking.start("tells", ["exits", "1"], [], another, 2, [])
    read = os.read

    def interrupted(descriptor: int, count: int) -> bytes:
        read(descriptor, count)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = one.pid
    assert one.wait(10) in (1, -signal.SIGKILL)
    assert one._number is None or one._number > 1, "an exit code is no process"
    one.kill()


def test_places_have_servers_and_hash_seeds_of_their_own(another: dict[str, str]) -> None:
    another.pop("PYTHONHASHSEED", None)  # tox sets it
    hashes = []
    for place in (0, 1, 0, 1):
        source, target = os.pipe()
        one = forking.start("tells", ["tells"], [target], another, 2, ["colorsys"], place)
        os.close(target)
        with open(source) as pipe:
            report = json.load(pipe)
        assert one.wait(10) == 0
        assert report["began"] == "verify.process.fork_server"
        hashes.append(report["hash"])
    assert hashes[:2] == hashes[2:]
    assert hashes[0] != hashes[1]


def test_what_was_missing_when_the_server_began_is_found_by_a_child(another: dict[str, str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "optional.py").write_text("try:\n    import extra\nexcept ImportError:\n    extra = None\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "extra.py").write_text("")
    says = "import sys, optional\ndef main(words):\n    sys.exit(4 if optional.extra else 5)\nif __name__ == '__main__': main([])\n"
    (tmp_path / "says.py").write_text(says)
    assert forking.start("says", [], [], another, 2, ["optional"]).wait(10) == 5
    more = {**another, "PYTHONPATH": f"{tmp_path}/more{os.pathsep}{another['PYTHONPATH']}"}
    assert forking.start("says", [], [], more, 2, ["optional"]).wait(10) == 4


def test_a_descriptor_too_many_costs_a_call_and_not_the_server(another: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert forking.start("tells", ["exits", "3"], [], another, 2, []).wait(10) == 3
    server = forking._servers[0]

    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", none_left)
        for place in (0, 1):  # a server that is there, and one that cannot be started: no socket of it is left open
            with pytest.raises(OSError, match="too many open files"):
                forking.start("tells", ["exits", "3"], [], another, 2, [], place)
    assert forking._servers == {0: server}
    assert forking.start("tells", ["exits", "4"], [], another, 2, []).wait(10) == 4


def test_a_server_that_dies_while_it_imports_says_how(another: dict[str, str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "dies.py").write_text("import os; os._exit(9)")
    one = forking.start("tells", ["prints"], [], another, 2, ["dies"])
    assert one.wait(10) == 9
    with pytest.raises(ProcessLookupError):
        _ = one.pid


def test_what_cannot_be_imported_ahead_is_the_childs_to_report(another: dict[str, str]) -> None:
    assert forking.start("tells", ["exits", "5"], [], another, 2, ["no_such_module"]).wait(10) == 5
    with tempfile.TemporaryFile() as output:
        assert forking.start("no_such_module", [], [], another, output.fileno(), []).wait(10) == 1
        output.seek(0)
        assert b"no_such_module" in output.read()


HOLDER = """
import os, sys, time
from verify.process import fork_server, forking as forks
one = forks.start("tells", ["waits"], [], dict(os.environ), 2, [])
print(one.pid, forks._servers[0].process.pid, flush=True)
if sys.argv[1] == "waits":
    time.sleep(100)
"""


@pytest.mark.parametrize("how", ["ends", "waits"])
def test_the_server_ends_with_its_supervisor(tmp_path: pathlib.Path, how: str) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with subprocess.Popen([sys.executable, "-c", HOLDER, how], env=environment, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child, server = map(int, holder.stdout.readline().split())
        try:
            if how == "waits":
                holder.kill()
            holder.wait(10)
            assert gone([server], 5 if how == "waits" else 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12: a fork beside threads
def test_a_fork_of_the_supervisor_has_a_server_of_its_own(begin: Begin) -> None:
    begin("prints").wait()
    source, target = os.pipe()
    if not os.fork():
        os.write(target, str(forking._servers).encode())
        os._exit(0)
    os.wait()
    assert os.read(source, 100) == b"{}"
    for descriptor in (source, target):
        os.close(descriptor)


def test_several_threads_may_ask(begin: Begin) -> None:
    ends: list[int] = []
    threads = [threading.Thread(target=lambda code=code: ends.append(begin("exits", str(code)).wait(20))) for code in range(8)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == list(range(8))
    assert time.monotonic() - start < 20
