"""Decides whether an untested Triton may interpret kernels: a process of its own runs kernels with known results (`known_kernels`).

The answer is kept in the folder of Triton's cache, under a digest of everything that it depends on. Several processes may ask at a
time: one runs the kernels, and the others wait for its answer. If the folder cannot be written, each process runs the kernels.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

FOLDER = "gdn-verify-self-tests"
LIMIT_S = 120.0  # it takes about 4 seconds on a machine that does nothing else
_HERE = pathlib.Path(__file__).resolve().parent
# The releases with which all tests of the interpreter pass, and the release of torch that requires each.
TORCHES = {"3.7.1": "2.13", "3.8.0": "2.14", "3.9.0": "2.15"}
TRITONS = tuple(TORCHES)


def trouble(triton: str) -> str:
    """Why this Triton cannot be used, in words that say what to install instead; "" if its self-test passes."""
    found = failures(triton)
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"kernels cannot be interpreted with Triton {triton}, because its self-test failed: {found[0]}{more}; "
        f"install a version that works: {command()}"
    )


def notice(triton: str) -> str:
    """What to say of an untested Triton whose self-test passes."""
    tested = ", ".join(TRITONS)
    return f"kernels are interpreted with Triton {triton}, which is not tested (tested are {tested}); its self-test passed"


def command() -> str:
    """The command that installs a Triton that was tested: the one that the installed torch requires, or else the newest."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        release = ".".join(importlib.metadata.version("torch").split(".")[:2])
        if fitting := [triton for triton, torch in TORCHES.items() if torch == release]:
            return f"pip install 'torch=={release}.*' 'triton=={fitting[0]}'"
    newest = TRITONS[-1]
    return f"pip install 'torch=={TORCHES[newest]}.*' 'triton=={newest}'"


def failures(triton: str) -> list[str]:
    """What the self-test of this Triton finds wrong. A kept answer is used if there is one."""
    path = triton_cache() / FOLDER / f"{_digest(triton)}.json"
    if (kept := _read(path)) is not None:
        return kept
    with _alone(path):
        if (kept := _read(path)) is not None:  # another process has run the kernels meanwhile
            return kept
        found, decided = run()
        if decided:
            _write(path, found)
        return found


def triton_cache() -> pathlib.Path:
    """The folder of Triton's cache, found in the same way as Triton finds it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return pathlib.Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))


def _digest(triton: str) -> str:
    """A digest of what the answer depends on: versions, and the sources of this package and of Triton, which may be edited."""
    digest = hashlib.sha256()
    for name in ("torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    digest.update(f"triton {triton}\npython {sys.version}\n".encode())
    found = importlib.util.find_spec("triton")
    theirs = [pathlib.Path(place) for place in (found.submodule_search_locations or () if found else ())]
    for path in sorted(_HERE.glob("*.py")) + [path for place in theirs for path in sorted(place.glob("*/*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _read(path: pathlib.Path) -> list[str] | None:
    """The kept answer, or None if there is none that can be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, list) and all(isinstance(line, str) for line in kept) else None


def _write(path: pathlib.Path, found: list[str]) -> None:
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(found, file)
        file.flush()
        os.replace(file.name, path)


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """A context in which one process at a time is, if the folder can be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path.with_suffix(".lock"), "w")), fcntl.LOCK_EX)
        yield


def run() -> tuple[list[str], bool]:
    """What the self-test finds wrong, and whether that is its own answer. If its process dies, the next process tries again."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in [*sys.path, str(_HERE.parents[1])]),
        "TRITON_INTERPRET": "1",
    }
    words = [sys.executable, "-P", "-m", "verify.interpreter.known_kernels"]
    try:
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return [f"no answer within {LIMIT_S:g} s"], False
    except OSError as error:
        return [f"it could not be started: {error.strerror}"], False
    lines = ended.stdout.splitlines()
    if ended.returncode == 0 and lines:
        return list(json.loads(lines[-1])), True
    last = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
    return [last[:200]], ended.returncode > 0
