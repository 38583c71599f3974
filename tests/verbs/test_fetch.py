"""The verb `fetch`: it unpacks what adapters need of a wheel, all or nothing, runs none of it, and says in a line why it cannot."""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import shutil
import sys
import time
import venv
import zipfile
from typing import Any

import pytest

from tests.libraries.test_serving import ORCHARD
from verify.adapters import libraries
from verify.adapters.libraries import MANIFEST
from verify.cli import fetch_command
from verify.cli.exits import HOLDS, INTERRUPTED, UNDECIDED, USAGE
from verify.cli.fetch_command import FetchError, chosen, unpack
from verify.cli.main import main

WHEEL = "orchard_dist-1.2.3-py3-none-any.whl"
INFO = "orchard_dist-1.2.3.dist-info"
FILES = {
    "orchard/__init__.py": "raise RuntimeError('it runs')\n",
    "orchard/trees/apple.py": "RIPE = True\n",
    "orchard/trees/apple.so": "no Python\n",
    "setup.py": "raise RuntimeError('it runs')\n",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: orchard-dist\nVersion: 1.2.3\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": "",
    f"{INFO}/licenses/LICENSE": "Apache-2.0\n",
    f"{INFO}/entry_points.txt": "[console_scripts]\norchard = orchard:main\n",
}
UNPACKED = ["orchard/__init__.py", "orchard/trees/apple.py", f"{INFO}/METADATA", f"{INFO}/licenses/LICENSE"]
LIBRARY = dataclasses.replace(ORCHARD, files=("orchard/*.py", "*.dist-info/METADATA", "*.dist-info/licenses/*"))


@pytest.fixture(autouse=True)
def _offline(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip reads wheels from a folder and nothing else, and the working directory is empty."""
    monkeypatch.setitem(libraries.LIBRARIES, "orchard", LIBRARY)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def wheel(tmp_path: pathlib.Path) -> pathlib.Path:
    return build(tmp_path / "wheels" / WHEEL, FILES)


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch, wheel: pathlib.Path) -> pathlib.Path:
    """The wheel is copied where pip would have put it."""

    def download(library: libraries.Library, folder: pathlib.Path) -> pathlib.Path:
        assert library is LIBRARY
        folder.mkdir()
        return pathlib.Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(fetch_command, "download", download)
    return wheel


def build(path: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def files_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def names_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fetched(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["fetch", "orchard", "--json", *words]) == HOLDS
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def failed(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """The one line, besides the progress, of a fetch that fails with this code. It prints no result."""
    assert main(["fetch", "orchard", *words]) == code
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = [line for line in output.err.splitlines() if not line.startswith(("downloading", "unpacking"))]
    return line


def test_fetch_unpacks_what_is_needed_and_a_second_run_does_nothing(
    wheel: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here" / ".gdn-verify" / "libraries" / "orchard"
    assert main(["fetch", "orchard"]) == HOLDS
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        f"orchard 1.2.3 is now in {folder} (4 files)",
        f"use it with: --path {folder}",
        "commands in this directory need no --path: adapters look there if the library is not installed",
    ]
    assert output.err.splitlines() == ["downloading orchard-dist 1.2.3 with pip", f"unpacking {WHEEL} (0 MB)"]
    assert files_in(folder) == sorted([*UNPACKED, MANIFEST])
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (manifest["library"], manifest["version"], manifest["wheel"], manifest["files"]) == ("orchard", "1.2.3", WHEEL, 4)
    assert names_in(folder.parent) == ["orchard"], "nothing else is left"

    monkeypatch.setattr(fetch_command, "download", None)
    assert main(["fetch", "orchard"]) == HOLDS
    output = capsys.readouterr()
    assert output.out.splitlines()[0] == f"orchard 1.2.3 is already in {folder} (4 files)"
    assert output.err == ""


def test_an_older_release_has_a_folder_of_its_own(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(libraries.LIBRARIES, "orchard", dataclasses.replace(LIBRARY, others=("1.2.2",)))
    files = {name.replace("1.2.3", "1.2.2"): text.replace("1.2.3", "1.2.2") for name, text in FILES.items()}
    build(tmp_path / "wheels" / WHEEL.replace("1.2.3", "1.2.2"), files)
    folder = tmp_path / "here" / ".gdn-verify" / "libraries" / "orchard-1.2.2"
    assert main(["fetch", "orchard", "--release", "1.2.2"]) == HOLDS
    assert capsys.readouterr().out.splitlines() == [
        f"orchard 1.2.2 is now in {folder} (4 files)",
        f"use it with: --path {folder}",
    ]
    assert failed(capsys, USAGE, "--release", "1.2.1") == (
        "gdn-verify: --release must be one of 1.2.3, 1.2.2 for orchard, got 1.2.1"
    )


def test_json_says_whether_it_fetched(no_pip: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = fetched(capsys, "--to", "there"), fetched(capsys, "--to", "there")
    assert (first["folder"], first["fetched"]) == (str(tmp_path / "here" / "there"), True)
    assert second == first | {"fetched": False}
    assert pathlib.Path("there").stat().st_mode & 0o777 == 0o777 & ~umask(), "others may read it as any other folder"


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("change", ["another release", "another choice of files", "a file is gone"])
def test_what_is_out_of_date_is_replaced(no_pip: pathlib.Path, capsys: pytest.CaptureFixture[str], change: str) -> None:
    fetched(capsys, "--to", "there")
    manifest = pathlib.Path("there") / MANIFEST
    if change == "a file is gone":
        pathlib.Path("there/orchard/trees/apple.py").unlink()
    else:
        fields = {"version": "1.2.2"} if change == "another release" else {"patterns": ["orchard/*.py"]}
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))
    pathlib.Path("there/old.py").write_text("")
    assert fetched(capsys, "--to", "there")["fetched"]
    assert files_in(pathlib.Path("there")) == sorted([*UNPACKED, MANIFEST])
    assert names_in(pathlib.Path()) == ["there"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../evil.py", "is outside the folder"),
        ("orchard/../../evil.py", "is outside the folder"),
        ("/evil.py", "is outside the folder"),
        ("orchard\\..\\evil.py", "is outside the folder"),
        ("C:/orchard/evil.py", "is outside the folder"),
        ("orchard//evil.py", "is outside the folder"),
        ("orchard/trees/apple.py", "it has 2 files"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_wheel_is_refused(
    no_pip: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    with zipfile.ZipFile(no_pip, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), "x = 1\n")
        if "\\" in name:  # zipfile itself would write a slash on a system that has the other one
            archive.infolist()[-1].filename = name
    line = failed(capsys, UNDECIDED, "--to", "there")
    assert line.startswith("gdn-verify: the wheel of orchard is refused: ")
    assert reason in line
    assert names_in(tmp_path) == ["here", "wheels"]
    assert names_in(tmp_path / "here") == []


def test_a_wheel_that_is_too_large_is_refused() -> None:
    members = [zipfile.ZipInfo("orchard/trees/apple.py"), zipfile.ZipInfo("orchard/huge.py"), zipfile.ZipInfo("orchard/huge.bin")]
    members[2].file_size = 1 << 40  # is not unpacked
    assert len(chosen(LIBRARY, members)) == 2
    members[1].file_size = 1 << 30
    with pytest.raises(FetchError, match=r"refused: 1024 MB to unpack, the most is 256 MB$"):
        chosen(LIBRARY, members)


def test_a_link_in_a_wheel_becomes_a_plain_file(no_pip: pathlib.Path, tmp_path: pathlib.Path) -> None:
    link = zipfile.ZipInfo("orchard/link.py")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(no_pip, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    unpack(LIBRARY, no_pip, tmp_path / "files")
    assert not (tmp_path / "files/orchard/link.py").is_symlink()
    assert (tmp_path / "files/orchard/link.py").read_text() == "/etc/passwd"


def test_a_wheel_that_lacks_what_is_needed_or_is_none_is_one_line(
    no_pip: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(no_pip, {name: text for name, text in FILES.items() if "apple" not in name})
    assert failed(capsys, UNDECIDED) == "gdn-verify: the wheel of orchard 1.2.3 lacks orchard/trees/apple.py"
    no_pip.write_text("no archive")
    assert failed(capsys, UNDECIDED).startswith(f"gdn-verify: {WHEEL} cannot be unpacked: ")
    build(no_pip, FILES)
    no_pip.write_bytes(no_pip.read_bytes().replace(b"RIPE = True", b"RIPE = None"))
    assert failed(capsys, UNDECIDED).startswith(f"gdn-verify: {WHEEL} cannot be unpacked: Bad CRC-32")
    assert names_in(tmp_path / "here" / ".gdn-verify" / "libraries") == []


def test_a_damaged_stream_is_one_line(no_pip: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(no_pip, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in FILES.items():
            archive.writestr(name, text * 50)
    data = bytearray(no_pip.read_bytes())
    start = data.index(b"orchard/trees/apple.py") + len("orchard/trees/apple.py")
    data[start : start + 8] = b"\xff" * 8
    no_pip.write_bytes(data)
    assert failed(capsys, UNDECIDED).startswith(f"gdn-verify: {WHEEL} cannot be unpacked: Error -3 while decompressing data")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"library": "orchard", "version": "1.2.3", "patterns": []}'])
def test_a_damaged_manifest_is_no_traceback(text: str, no_pip: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pathlib.Path("there").mkdir()
    pathlib.Path("there", MANIFEST).write_text(text)
    if text.startswith("["):
        assert failed(capsys, USAGE, "--to", "there").startswith("gdn-verify: --to must name a folder that is empty")
    else:
        assert fetched(capsys, "--to", "there")["fetched"]


def test_a_folder_called_like_a_pattern_leaves_others_alone(no_pip: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pathlib.Path(".mine-fetching-notes")
    folder.mkdir()
    os.utime(folder, (time.time() - 2 * fetch_command.STALE_S,) * 2)
    assert fetched(capsys, "--to", "*")["fetched"]
    assert folder.is_dir()


def test_a_full_disk_is_one_line(no_pip: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    line = failed(capsys, UNDECIDED, "--to", "there")
    assert line == f"gdn-verify: cannot write {pathlib.Path('there').absolute()}: No space left on device"
    assert names_in(pathlib.Path()) == []


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_downloaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_command, "download", None)
    pathlib.Path("mine").mkdir()
    pathlib.Path("mine/notes.txt").write_text("mine")
    pathlib.Path("file").write_text("")
    pathlib.Path("other").mkdir()
    pathlib.Path("other", MANIFEST).write_text(json.dumps({"library": "sglang", "version": "1.2.3"}))
    for name in ("mine", "file", "other"):
        assert failed(capsys, USAGE, "--to", name) == (
            "gdn-verify: --to must name a folder that is empty, does not exist, or holds orchard from an earlier fetch, "
            f"got {pathlib.Path(name).absolute()}"
        )
    line = failed(capsys, USAGE, "--to", "file/there")
    assert line.startswith(
        f"gdn-verify: --to must name a folder that can be written, got {pathlib.Path('file/there').absolute()}: "
    )
    assert pathlib.Path("mine/notes.txt").read_text() == "mine"


def test_an_interrupted_run_leaves_nothing(
    no_pip: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", interrupt)
        assert main(["fetch", "orchard", "--to", "there"]) == INTERRUPTED
    assert names_in(pathlib.Path()) == []
    capsys.readouterr()
    assert fetched(capsys, "--to", "there")["fetched"]


def test_what_a_killed_run_left_does_no_harm(no_pip: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age_s in (("old", 2 * fetch_command.STALE_S), ("young", 60.0)):
        folder = pathlib.Path(f".there-fetching-{name}")
        folder.mkdir()
        (folder / "orchard.py").write_text("half a file")
        os.utime(folder, (time.time() - age_s,) * 2)
    assert fetched(capsys, "--to", "there")["fetched"]
    assert names_in(pathlib.Path()) == [".there-fetching-young", "there"], "a young one may be of a run that goes on"


def test_another_run_that_was_quicker_at_the_last_moment_wins(no_pip: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, staging = pathlib.Path("there").absolute(), pathlib.Path("staging").absolute()
    rename = pathlib.Path.rename

    def late(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        if not folder.exists():
            unpack(LIBRARY, no_pip, folder)
            (folder / "mark").write_text("")
        return rename(path, target)

    unpack(LIBRARY, no_pip, staging / "files")
    monkeypatch.setattr(pathlib.Path, "rename", late)
    present = fetch_command._publish(LIBRARY, staging, folder)
    assert present is not None
    assert present["library"] == "orchard"
    assert (folder / "mark").exists()


def test_another_run_that_was_quicker_wins(
    no_pip: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, runs = fetch_command.download, []

    def download(library: libraries.Library, folder: pathlib.Path) -> pathlib.Path:
        runs.append(folder)
        if len(runs) == 1:
            fetch_command.fetch(library, pathlib.Path("there").absolute())
            pathlib.Path("there/mark").write_text("")
        return slow(library, folder)

    monkeypatch.setattr(fetch_command, "download", download)
    fetched(capsys, "--to", "there")
    assert pathlib.Path("there/mark").exists()
    assert names_in(pathlib.Path()) == ["there"]


def test_without_pip_the_line_says_so(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", python)
    line = failed(capsys, UNDECIDED)
    assert line == f"gdn-verify: fetch needs pip, which this Python lacks: run {python} -m ensurepip"


@pytest.mark.slow
def test_what_pip_cannot_find_is_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = failed(capsys, UNDECIDED)
    assert line == (
        "gdn-verify: pip could not download orchard-dist==1.2.3: ERROR: No matching distribution found for orchard-dist==1.2.3"
    )


@pytest.mark.slow
def test_a_wheel_for_this_machine_alone_is_taken(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    # Not among the tags that we ask for first, and any Linux can use it.
    build(tmp_path / "wheels" / f"orchard_dist-1.2.3-cp{version}-cp{version}-linux_{os.uname().machine}.whl", FILES)
    assert fetched(capsys)["wheel"].endswith(f"linux_{os.uname().machine}.whl")


@pytest.mark.slow
def test_a_network_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    line = failed(capsys, UNDECIDED)
    assert line.startswith("gdn-verify: pip could not download orchard-dist==1.2.3: ")
    assert "Connection refused" in line


def test_patterns_name_every_file_that_is_needed() -> None:
    for library in libraries.LIBRARIES.values():
        assert chosen(library, [zipfile.ZipInfo(name) for name in library.needed]), library.name
        for pattern in library.files:
            assert pattern.endswith(".py") or ".dist-info/" in pattern, "code in other forms is not unpacked"
