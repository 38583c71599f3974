"""The verb `fetch`: download a library's wheel with pip and unpack the Python files that adapters import.

The wheel is data: nothing in it runs here, and only files that the library's patterns name are unpacked.
"""

import collections
import contextlib
import fnmatch
import glob
import hashlib
import json
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from verify.adapters.libraries import LIBRARIES, MANIFEST, Library
from verify.cli.exits import HOLDS, UNDECIDED
from verify.cli.output import print_json
from verify.cli.terminal import print_error, print_line
from verify.cli.verb_options import FetchOptions

DAMAGED = (  # what zipfile raises for a damaged or unusual file
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError, UnicodeError),
    *(NotImplementedError, RuntimeError, EOFError),
)
# The platforms of the wheels that we tested. Their Python files are the same for every machine, so any machine may take them.
PLATFORMS = ("--platform=manylinux_2_34_x86_64", "--platform=manylinux_2_28_x86_64")
MOST_BYTES = 1 << 28  # unpacked; the largest library needs a tenth of this
STALE_S = 3600.0  # a run that takes an hour is dead


class FetchError(Exception):
    """The files could not be had. The message is one line."""


def act(options: FetchOptions) -> int:
    """Fetch a library, unless it is there already, and print where it is. Returns the exit code."""
    library, place = LIBRARIES[options.library].at(options.release)
    folder = pathlib.Path(os.path.abspath(options.to or place))
    try:
        present = manifest_in(folder, library)
        manifest = present or fetch(library, folder)
    except FetchError as error:
        print_error(str(error))
        return UNDECIDED
    if options.json:
        print_json({"folder": str(folder), "fetched": present is None, **manifest})
        return HOLDS
    print_line(
        f"{library.name} {manifest['version']} {'is already' if present else 'is now'} in {folder} ({manifest['files']} files)"
    )
    print_line(f"use it with: --path {folder}")
    if options.to is None and place == library.fetched:
        print_line("commands in this directory need no --path: adapters look there if the library is not installed")
    return HOLDS


def manifest_in(folder: pathlib.Path, library: Library) -> dict[str, Any] | None:
    """The manifest of a folder that holds all that `fetch` would unpack. None if there is something to fetch.

    ValueError if the folder cannot be used: it holds something else, or it is no folder.
    """
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return None
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["library"] != library.name:
            raise ValueError(f"it holds {manifest['library']}")
        same = (manifest["version"], manifest["patterns"]) == (library.version, [*library.files])
        return manifest if same and manifest["files"] and all((folder / name).is_file() for name in library.needed) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"--to must name a folder that is empty, does not exist, or holds {library.name} from an earlier fetch, got {folder}"
        ) from None


def fetch(library: Library, folder: pathlib.Path) -> dict[str, Any]:
    """Download the library and unpack it into the folder, which appears at once and complete. Returns its manifest.

    FetchError if pip, the wheel or the disk fails. ValueError if the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        staging = pathlib.Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
    except OSError as error:
        raise ValueError(f"--to must name a folder that can be written, got {folder}: {error.strerror}") from None
    try:
        with _told_of_the_disk(folder):
            print_line(f"downloading {library.distribution} {library.version} with pip", sys.stderr)
            wheel = download(library, staging / "wheel")
            print_line(f"unpacking {wheel.name} ({wheel.stat().st_size >> 20} MB)", sys.stderr)
            manifest = unpack(library, wheel, staging / "files")
            return _publish(library, staging, folder) or manifest
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(library: Library, staging: pathlib.Path, folder: pathlib.Path) -> dict[str, Any] | None:
    """Move the unpacked files to their folder. If another run was quicker, nothing moves, and its manifest is returned."""
    if present := manifest_in(folder, library):
        return present
    if folder.exists() and any(folder.iterdir()):
        folder.rename(staging / "replaced")
    try:
        (staging / "files").rename(folder)
    except OSError:  # another run has put its files there just now
        if present := manifest_in(folder, library):
            return present
        raise
    return None


@contextlib.contextmanager
def _told_of_the_disk(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FetchError(f"cannot write {error.filename or folder}: {error.strerror or error}") from None


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pip with these words, which must be ours or checked. Its output is in `stdout`, errors too."""
    return subprocess.run(  # noqa: S603 - see above
        [sys.executable, "-m", "pip", "--no-input", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def download(library: Library, folder: pathlib.Path) -> pathlib.Path:
    """Download the library's wheel into a folder with pip. Returns its path. FetchError has the last line of pip's output."""
    requirement = f"{library.distribution}=={library.version}"
    output, python = "", library.python
    of_python = (f"--python-version={python}", "--implementation=cp", f"--abi=cp{python.replace('.', '')}")
    for tags in ([*of_python, *PLATFORMS], []):  # then the wheel for this machine
        options = ("--no-deps", "--only-binary=:all:", "--progress-bar=off", *tags, f"--dest={folder}")
        done = pip("download", *options, requirement)
        if done.returncode == 0:
            return _wheel(library, folder)
        output = done.stdout
        if output.rstrip().endswith("No module named pip"):
            raise FetchError(f"fetch needs pip, which this Python lacks: run {sys.executable} -m ensurepip")
        if "No matching distribution" not in output or "Retrying" in output:
            break  # another machine's wheel would not be found either
    raise FetchError(f"pip could not download {requirement}: {last_line(output)}")


def _wheel(library: Library, folder: pathlib.Path) -> pathlib.Path:
    wheels = [path for path in folder.iterdir() if path.suffix == ".whl"]
    for path in wheels:
        with contextlib.suppress(InvalidWheelFilename):
            name, version, _, _ = parse_wheel_filename(path.name)
            if name == canonicalize_name(library.distribution) and str(version) == library.version:
                return path
    raise FetchError(f"pip downloaded no wheel of {library.distribution} {library.version}, but {[path.name for path in wheels]}")


def last_line(output: str) -> str:
    """The last line of pip's output that reports an error, or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("[notice]")]
    errors = [line for line in lines if line.startswith("ERROR:")]
    retries = [line for line in lines if "Retrying" in line]  # without a network, these have the reason
    return (retries or errors or lines or ["it printed nothing"])[-1][:300]


def unpack(library: Library, wheel: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Unpack the files of a wheel that the library's patterns name into a new folder, with a manifest. Returns the manifest.

    FetchError if the file is no wheel, names a file outside the folder, or lacks a file that is needed.
    """
    try:
        with open(wheel, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with zipfile.ZipFile(wheel) as archive:
            members = chosen(library, archive.infolist())
            for member in members:
                path = folder / member.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(path, "xb") as target:
                    shutil.copyfileobj(source, target)
    except DAMAGED as error:
        raise FetchError(f"{wheel.name} cannot be unpacked: {error}") from None
    manifest = {
        "library": library.name,
        "version": library.version,
        "wheel": wheel.name,
        "sha256": digest,
        "files": len(members),
        "patterns": [*library.files],
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def chosen(library: Library, members: Sequence[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """The members of a wheel that the library's patterns name.

    FetchError if any member is outside the folder or has the name of another, if a needed one is missing, or if they are too large.
    """
    names = collections.Counter(member.filename for member in members)
    for name, count in names.items():
        parts = name.rstrip("/").split("/")
        if name.startswith("/") or "\\" in name or ":" in parts[0] or not {"", ".", ".."}.isdisjoint(parts):
            raise FetchError(f"the wheel of {library.name} is refused: its file {name!r} is outside the folder")
        if count > 1:
            raise FetchError(f"the wheel of {library.name} is refused: it has {count} files {name!r}")
    if lacking := [name for name in library.needed if name not in names]:
        raise FetchError(f"the wheel of {library.name} {library.version} lacks {lacking[0]}")
    plain = [member for member in members if not member.is_dir()]
    files = [member for member in plain if any(fnmatch.fnmatchcase(member.filename, pattern) for pattern in library.files)]
    if (size := sum(member.file_size for member in files)) > MOST_BYTES:
        raise FetchError(f"the wheel of {library.name} is refused: {size >> 20} MB to unpack, the most is {MOST_BYTES >> 20} MB")
    return files


def _prefix(folder: pathlib.Path) -> str:
    return f".{folder.name}-fetching-"


def _sweep(folder: pathlib.Path) -> None:
    """Remove what interrupted runs have left beside the folder."""
    for path in folder.parent.glob(f"{glob.escape(_prefix(folder))}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)
