"""What a check has found is on disk before anything else happens, and a bad disk stops no check."""

import errno
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from tests.together import for_each
from verify.findings.store import Store

ROOT = pathlib.Path(__file__).resolve().parents[2]
FINDING = {"stage": "found", "run": "law=oracle adapter=a.py:B lengths=1", "findings": []}


def findings_in(folder: pathlib.Path) -> list[object]:
    return [json.loads(line) for line in (folder / "findings.jsonl").read_text().splitlines()]


def test_findings_are_appended_and_forced_to_the_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store = Store(tmp_path / "new" / "folder")
    store.keep(FINDING)
    store.keep({**FINDING, "stage": "shrunk"})
    assert [line["stage"] for line in findings_in(store.folder)] == ["found", "shrunk"]  # type: ignore[index]
    assert len(synced) == 2
    assert store.trouble is None


def test_run_is_on_disk_while_it_lasts_and_only_then(tmp_path: pathlib.Path) -> None:
    store = Store(tmp_path)
    store.begin("law=oracle lengths=1")
    (path,) = tmp_path.iterdir()
    assert path.read_text() == "law=oracle lengths=1\n"
    assert store.left_behind() == [], "a check that lives has left nothing behind"
    store.end()
    assert path.read_text() == ""
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_runs_of_several_threads_are_under_way_together(tmp_path: pathlib.Path) -> None:
    store, both, done = Store(tmp_path), threading.Barrier(3), threading.Barrier(3)

    def run(line: str) -> None:
        store.begin(line)
        both.wait(10)
        done.wait(10)
        store.end()

    threads = [threading.Thread(target=run, args=(line,)) for line in ("one", "two")]
    for thread in threads:
        thread.start()
    both.wait(10)
    (path,) = tmp_path.glob("under-way-*.txt")
    assert sorted(path.read_text().split()) == ["one", "two"]
    done.wait(10)
    for thread in threads:
        thread.join()
    assert path.read_text() == ""


def test_run_of_a_killed_check_is_reported_once(tmp_path: pathlib.Path) -> None:
    program = (
        "import os, sys; from verify.findings.store import Store; Store(sys.argv[1]).begin('law=cut at=3'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == -9
    assert Store(tmp_path).left_behind() == ["law=cut at=3"]
    assert Store(tmp_path).left_behind() == []
    assert list(tmp_path.iterdir()) == []


def dead_pid() -> int:
    """The id of a process that is no more."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_corrupt_files_of_runs_under_way_are_tolerated_and_the_good_one_is_reported(tmp_path: pathlib.Path) -> None:
    for name in ("under-way-.txt", "under-way-x.txt", "under-way--1.txt", f"under-way-{'9' * 40}.txt", "under-way-²³.txt"):
        (tmp_path / name).write_text("not ours")
    first, second = sorted((str(dead_pid()), str(dead_pid())))
    (tmp_path / f"under-way-{first}.txt").mkdir()
    (tmp_path / f"under-way-{second}.txt").write_bytes(b"law=cut \xff\xfe at=3\n\n\n" + b"again\n" * 1000)
    lines = Store(tmp_path).left_behind()
    assert lines[0] == "law=cut �� at=3"
    assert 1 < len(lines) <= 64


def test_half_a_line_does_not_spoil_the_next_finding(tmp_path: pathlib.Path) -> None:
    (tmp_path / "findings.jsonl").write_bytes(b'{"stage": "fou\xff')
    store = Store(tmp_path)
    store.keep(FINDING)
    store.keep(FINDING)
    lines = (tmp_path / "findings.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines[1:]] == [FINDING, FINDING]


def everything(store: Store) -> None:
    """What a check does with a store, twice: nothing of it may raise."""
    for _ in range(2):
        store.left_behind()
        store.begin("law=oracle lengths=1")
        store.keep(FINDING)
        store.end()
    store.close()


@for_each("folder", ["file/below", "/proc/gdn-verify", "loop"])
def test_folder_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: pathlib.Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    store = Store(tmp_path / folder)
    everything(store)
    assert store.trouble is not None
    assert store.trouble.startswith(f"cannot write to {tmp_path / folder}: ")
    assert store.trouble.endswith("findings are printed and not stored")
    assert "\n" not in store.trouble


def test_full_disk_is_said_in_words(tmp_path: pathlib.Path) -> None:
    (tmp_path / "findings.jsonl").symlink_to("/dev/full")
    store = Store(tmp_path)
    everything(store)
    assert store.trouble == f"cannot write to {tmp_path}: No space left on device; findings are printed and not stored"


def test_disk_that_fills_up_between_two_findings_keeps_the_first(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.keep(FINDING)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        store.keep(FINDING)
    assert store.trouble is not None
    assert "No space left" in store.trouble
    assert findings_in(tmp_path)[0] == FINDING


def test_two_checks_at_once_mix_no_lines(tmp_path: pathlib.Path) -> None:
    program = (
        "import sys; from verify.findings.store import Store; store = Store(sys.argv[1])\n"
        "for i in range(50): store.begin(str(i)); store.keep({'who': sys.argv[2], 'text': 'x' * 20000}); store.end()\n"
        "store.close()"
    )
    checks = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), who], env={**os.environ, "PYTHONPATH": str(ROOT)})
        for who in "ab"
    ]
    assert [check.wait(60) for check in checks] == [0, 0]
    lines = findings_in(tmp_path)
    assert sorted(line["who"] for line in lines) == ["a"] * 50 + ["b"] * 50  # type: ignore[index]
    assert {len(line["text"]) for line in lines} == {20000}  # type: ignore[index]
    assert [path.name for path in tmp_path.iterdir()] == ["findings.jsonl"]
