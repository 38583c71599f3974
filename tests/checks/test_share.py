"""A server that its supervisor forks, after it has imported what both need, is as one that was started."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.checks.test_fork_server import ROOT, TELLS
from tests.processes import gone
from verify.process import forking

pytestmark = pytest.mark.skipif(not forking.HERE, reason="processes are forked on Linux only")

# Shares its imports, or does not, and prints the reports of three children and how five others end.
PROGRAM = """
import json, os, signal, subprocess, sys, tempfile
from verify.process import forking

path = os.pathsep.join(filter(None, sys.path))
environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "GDN_VERIFY_WORD": "here"}
if HOW != "started":
    forking.share(IMPORTS, environment)
shared = 0 in forking._servers
assert os.environ.get("GDN_VERIFY_WORD") is None

def child(*words, descriptors=(), output=2, **more):
    return forking.start("tells", words, descriptors, {**environment, **more}, output, IMPORTS)

def report(**more):
    source, target = os.pipe()
    one = child("tells", "a word", descriptors=(target,), **more)
    os.close(target)
    with open(source) as pipe:
        found = json.load(pipe)
    assert one.wait(10) == 0
    return found

reports = [report(), report(GDN_VERIFY_WORD="there"), report(LANG="de_DE.UTF-8")]
with tempfile.TemporaryFile() as output:
    ends = [child(*how.split(), output=output.fileno()).wait(10) for how in ("prints", "exits 3", "exits 0", "raises")]
    output.seek(0)
    written = output.read().decode()
waits = child("waits")
os.killpg(waits.pid, signal.SIGTERM)
ends.append(waits.wait(10))
server = forking._servers[0].process
try:
    server.wait(0.05)
except subprocess.TimeoutExpired:
    ends.append("runs")
pid = server.pid if HOW == "started" else server._pid
print(json.dumps({
    "shared": shared, "imported": "colorsys" in sys.modules, "reports": reports, "ends": ends, "written": written,
    "sessions": [os.getsid(pid) == pid], "pid": pid,
}), flush=True)
if LAST == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder: pathlib.Path, how: str, *, imports: tuple[str, ...] = ("colorsys",), last: str = "", options: str = "") -> Any:
    (folder / "tells.py").write_text(TELLS)
    (folder / "broken.py").write_text("raise ImportError('as it is')")
    names = f"HOW, IMPORTS, LAST = {(how, imports, last)!r}\n"
    environment = {name: word for name, word in os.environ.items() if name != "GDN_VERIFY_WORD"}
    done = subprocess.run(
        [sys.executable, *options.split(), "-c", names + PROGRAM],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "PYTHONHASHSEED": "3"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (-signal.SIGKILL if last else 0), done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def test_its_children_are_those_of_a_server_that_was_started(tmp_path: pathlib.Path) -> None:
    shared, started = run(tmp_path, "shared"), run(tmp_path, "started")
    assert (shared["shared"], shared["imported"]) == (True, True)
    assert (started["shared"], started["imported"]) == (False, False)
    assert [report["began"] for report in shared["reports"]] == ["verify.process.fork_server"] * 2 + ["tells"]
    assert shared["reports"][1]["environment"]["GDN_VERIFY_WORD"] == "there"
    for report in (*shared["reports"], *started["reports"]):
        assert len(report.pop("open")) == 5, "the three of every process, the pipe, and the list's own"
    assert shared["reports"] == started["reports"]
    assert shared["ends"] == started["ends"] == [0, 3, 0, 1, -signal.SIGTERM, "runs"]
    for found in (shared, started):
        assert "said\nwarned\n" in found["written"], "nothing is held back in a buffer"
        assert found["written"].endswith("ArithmeticError: as it is\n")
        assert found["sessions"] == [True], "Ctrl-C reaches the supervisor alone"
        assert gone([found["pid"]], 2.0)


def test_it_ends_with_a_supervisor_that_is_killed(tmp_path: pathlib.Path) -> None:
    assert gone([run(tmp_path, "shared", last="killed")["pid"]], 5.0)


def failing_fork() -> None:
    raise BlockingIOError


@pytest.mark.parametrize(
    ("options", "imports", "before"),
    [
        ("-B", "colorsys", ""),  # an option that a server does not have
        ("", "broken", ""),  # which must fail in the worker, that reports it
        ("", "colorsys", "sys.stderr = None"),
        ("", "colorsys", "from tests.checks.test_share import failing_fork; os.fork = failing_fork"),
    ],
)
def test_nothing_is_shared_where_a_server_would_differ(options: str, imports: str, before: str, tmp_path: pathlib.Path) -> None:
    program = f"""
import os, sys
from verify.process import forking
{before}
forking.share([{imports!r}], os.environ)
print(forking._servers, flush=True)
"""
    (tmp_path / "broken.py").write_text("raise ImportError('as it is')")
    done = subprocess.run(
        [sys.executable, *options.split(), "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{}\n"


HANGS = """
import time
from verify import Adapter, Domain


class Hangs(Adapter):
    algorithm = "recurrent"
    domain = Domain(backward=False)

    def run(self, x):
        print("on its way")
        time.sleep(600)
"""


@pytest.mark.slow
def test_a_command_forks_its_workers_and_reads_their_stacks(tmp_path: pathlib.Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    program = """
import sys
from verify.process import forking
shared = forking.share
def share(*words):
    shared(*words)
    print(*(type(server.process).__name__ for server in forking._servers.values()), "torch" in sys.modules, flush=True)
forking.share = share
import gdn_verify
sys.argv[1:] = ["check", "hangs.py:Hangs", "--law", "oracle", "--profile", "least", "--deadline", "2", "--device", "cpu", "-x"]
sys.exit(gdn_verify.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("_ForkedServer True\n")
    assert "hung: no answer within 2 s, in run (hangs.py:12)" in done.stdout
    assert "on its way" in done.stdout
