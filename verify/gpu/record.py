"""The record of the last GPU gate: which sources passed, on which GPUs, and when. tests/gate.py writes it to docs/gpu.json.

CI has no GPU. The record therefore has a digest of the sources, by which a reader sees whether they have changed since.
"""

import hashlib
import json
import pathlib
import sysconfig
from collections.abc import Iterator, Mapping
from typing import Any

FOLDERS = ("oracles", "properties", "verify")
ROOT = pathlib.Path(__file__).resolve().parents[2]
# Where the record is in a checkout, and where a wheel installs it.
PLACES = (ROOT / "docs" / "gpu.json", pathlib.Path(sysconfig.get_path("data"), "share", "gdn-verify", "gpu.json"))
COMMAND = "tox -e gpu"
KINDS: dict[str, Any] = {
    "sources": str,
    "date": str,
    "complete": bool,
    "cards": list,
    "versions": dict,
    "counts": dict,
    "seconds": int | float,
    "verdicts": list,
}


def sources(root: pathlib.Path = ROOT) -> str:
    """The SHA-256 of all files under FOLDERS but caches, sorted by path: each path (UTF-8), a zero byte, contents, a zero byte."""
    digest = hashlib.sha256()
    for name, file in sorted(_files(root)):
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _files(root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    for folder in FOLDERS:
        for file in (root / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
                yield file.relative_to(root).as_posix(), file


def read(path: pathlib.Path) -> dict[str, Any]:
    """Read the record in a file. ValueError, in one line, names the file and what is wrong with it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} must be the record of a GPU gate: {type(error).__name__}: {error}") from None
    missing = [name for name, kind in KINDS.items() if not isinstance(record, dict) or not isinstance(record.get(name), kind)]
    if missing:
        raise ValueError(f"{path.name} must be the record of a GPU gate: it has no {missing[0]}")
    return dict(record)


def passed(record: Mapping[str, Any]) -> str:
    """One sentence about what passed, on which GPUs and when. The README has the same sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    part = "" if record["complete"] else " in part (it needs two GPUs)"
    places = " and ".join(f"on {_cards(entry)} in {entry['seconds']:.0f} s" for entry in (record, *record.get("earlier", ())))
    cases = record["counts"].get("distributed cases")
    counts = f", with {cases:,} distributed cases and no false alarm" if cases else ""
    which = f"({versions}); sources {record['sources'][:12]}."
    return f"The GPU gate (`{COMMAND}`) passed{part} on {record['date']} {places}{counts} {which}"


def _cards(record: Mapping[str, Any]) -> str:
    names: list[str] = record["cards"]
    return " and ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def status() -> str:
    """What `gdn-verify list` prints about the last gate: what passed, and whether the sources are still the same."""
    path = next((place for place in PLACES if place.is_file()), None)
    if path is None:
        return f"no record of a GPU gate: run {COMMAND} in a checkout, on a host with two GPUs"
    try:
        record = read(path)
    except ValueError as error:
        return str(error)
    try:
        sentence = passed(record)
    except (AttributeError, KeyError, TypeError, ValueError):
        return f"{path.name} must be the record of a GPU gate: its counts or earlier records are not what the gate writes"
    same = record["sources"] == sources()
    now = "They have not changed since." if same else f"They have CHANGED since: run {COMMAND} before you rely on a GPU."
    return f"{sentence} {now}"
