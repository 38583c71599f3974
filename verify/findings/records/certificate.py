"""The certificate of a check: what was checked and found, with digests of the sources that ran, so that others can compare them.

A certificate is a JSON file with three keys: `certificate` is what it says, `sha256` the digest of its canonical form, and
`signature` a signature of that form (verify/findings/records/signature.py) or "". Nothing here imports torch or what was checked.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

import msgspec

from verify import __version__
from verify.adapters.packages import installed
from verify.gpu import record as own

if TYPE_CHECKING:
    from verify.findings.law_report import LawReport
    from verify.findings.records.record import Record

SCHEMA = 1  # goes up whenever a reader of the last form would misread the new one
FILE_KEYS = {"certificate", "sha256", "signature"}
MOST_BYTES, MOST_NAME = 16 * 2**20, 1024
OF_MODULES = (".py", ".so", ".pyd")  # files of modules: of Python, and compiled
LARGEST = 1e300  # JSON has no infinity
# Their versions are in a certificate, and gdn-verify has a digest of its own. So their files are left out.
LEFT_OUT = ("oracles", "properties", "verify", "torch", "triton")


@dataclasses.dataclass(frozen=True)
class LawPart:
    """A law: its verdict, the count of each outcome, and for each output the largest error over its tolerance."""

    verdict: str
    counts: dict[str, int]
    ratios: dict[str, float]
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class ReachPart:
    """What the cases looked at, in short.

    - `sizes`: the largest sizes of the cases
    - `functions`: the functions under test
    - `branches`, `branches_run`: how many branches the interpreted kernels have, and how many of them ran
    - `unrecorded`: why lines of Python were not recorded, or ""
    - `full`: whether something was left out for lack of room
    """

    sizes: dict[str, int]
    functions: list[str]
    branches: int
    branches_run: int
    unrecorded: str
    full: bool


@dataclasses.dataclass(frozen=True)
class SamplePart:
    """A line that held, and its largest error over the tolerance."""

    law: str
    run: str
    ratio: float


@dataclasses.dataclass(frozen=True)
class CheckPart:
    """The check of one adapter. The fields without a remark are those of the record.

    - `kernel`: the name of the adapter's file in `sources`, or "" for a built-in adapter
    - `packages`: the packages under test, in words
    - `sources`: for each file that ran, its SHA-256. A name is relative to a folder in which Python looks for modules
    - `without_source`: functions of which no file was found
    - `sample`: lines to run again
    """

    adapter: str
    kernel: str
    packages: str
    device: str
    profile: str
    seed: int
    tune: str
    products: str
    under: str
    verdict: str
    exit_code: int
    cases: int
    not_run: list[str]
    laws: dict[str, LawPart]
    reach: ReachPart
    sources: dict[str, str]
    without_source: list[str]
    sample: list[SamplePart]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What a certificate says. `gdn_verify` is our version, `own_sha256` the digest of our files, `versions` those of libraries."""

    schema: int
    gdn_verify: str
    own_sha256: str
    versions: dict[str, str]
    checks: list[CheckPart]


def canonical(data: Any) -> bytes:
    """The canonical form of plain data, which is hashed and signed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(data: Any) -> str:
    """The SHA-256 of the canonical form of plain data."""
    return hashlib.sha256(canonical(data)).hexdigest()


def versions() -> dict[str, str]:
    """The versions of Python, torch and Triton here."""
    return {"python": platform.python_version(), **{name: installed(name) or "none" for name in ("torch", "triton")}}


def certificate_of(records: Sequence["Record"], began: float = float("inf")) -> dict[str, Any]:
    """The certificate of checks that have ended, as plain data. ValueError if a source is newer than `began`, a time.time()."""
    checks = [_check(record, began) for record in records if record.end is not None]
    if not checks:
        raise ValueError("no check has ended")
    return dataclasses.asdict(Certificate(SCHEMA, __version__, own.sources(), versions(), checks))


def text_of(certificate: Any, signature: str) -> str:
    """The text of a certificate's file."""
    data = {"certificate": certificate, "sha256": digest(certificate), "signature": signature}
    return json.dumps(data, sort_keys=True, indent=1, allow_nan=False) + "\n"


def _check(record: "Record", began: float) -> CheckPart:
    head, end = record.head, record.end
    assert end is not None
    files = _Files(head.adapter, began)
    modules = dict.fromkeys((*end.reach.functions, *end.reach.blocks))
    files.add_modules(name for name in modules if name.partition(".")[0].partition(":")[0] not in LEFT_OUT)
    for file in end.reach.lines:
        files.add(pathlib.Path(file))
    blocks = [ran for branches in end.reach.blocks.values() for ran in branches.values()]
    reach = end.reach
    return CheckPart(
        adapter=head.adapter,
        kernel=files.kernel,
        packages=head.versions,
        device=head.device,
        profile=head.profile,
        seed=head.seed,
        tune=head.tune,
        products=head.products,
        under=head.under,
        verdict=str(record.verdict),
        exit_code=end.exit_code,
        cases=record.cases,
        not_run=list(end.not_run),
        laws={report.law: _law(report) for report in record.reports},
        reach=ReachPart(dict(reach.sizes), [*reach.functions], len(blocks), sum(blocks), reach.unrecorded, reach.full),
        sources=dict(sorted(files.digests.items())),
        without_source=files.missing,
        sample=[SamplePart(report.law, run, _finite(ratio)) for report in record.reports for run, ratio in report.sample.items()],
    )


def _law(report: "LawReport") -> LawPart:
    counts = {str(verdict): count for verdict, count in report.counts.items()}
    return LawPart(str(report.verdict), counts, {name: _finite(ratio) for name, ratio in report.ratios.items()}, report.reason)


def _finite(ratio: float) -> float:
    return float(ratio) if ratio < LARGEST else LARGEST


# Sources


class _Files:
    """The files of a check by their names, with their digests. `missing` has functions of which there is none."""

    def __init__(self, adapter: str, began: float) -> None:
        place, colon, _ = adapter.rpartition(":")
        self.digests: dict[str, str] = {}
        self.missing: list[str] = []
        self._began = began
        self._folder = pathlib.Path(place).resolve().parent if colon and place.endswith(".py") else None
        self.kernel = "" if self._folder is None else self.add(pathlib.Path(place))

    def add(self, file: pathlib.Path) -> str:
        """Add a file, and return its name. A file that is not there any more is missing."""
        file = pathlib.Path(os.path.abspath(file))
        name = self._name(file)
        try:
            if file.stat().st_mtime > self._began:
                raise ValueError(f"{file} has changed while the check ran, so that there is no certificate of it")
            self.digests[name] = sha256(file)
        except OSError:
            self.missing.append(name)
        return name

    def add_modules(self, functions: Iterable[str]) -> None:
        """Add the files of functions, whose names are `package.module:name`."""
        folders = [*([str(self._folder)] if self._folder else []), *map(str, roots())]
        for function in functions:
            file = _file_of(function.partition(":")[0], folders)
            if file is None:
                self.missing.append(function)
            else:
                self.add(file)

    def _name(self, file: pathlib.Path) -> str:
        """The name from the nearest folder in which Python looks for modules, or from that of the adapter."""
        above = [root for root in roots() if root in file.parents]
        if above:
            return file.relative_to(max(above, key=lambda root: len(root.parts))).as_posix()
        inside = self._folder is not None and self._folder in file.parents
        return file.relative_to(self._folder).as_posix() if self._folder is not None and inside else file.name


def roots() -> list[pathlib.Path]:
    """The current folder, and those in which Python looks for modules."""
    places = (pathlib.Path(os.path.abspath(place or os.curdir)) for place in (os.curdir, *sys.path))
    return [place for place in dict.fromkeys(places) if place.is_dir()]


def _file_of(module: str, folders: Sequence[str]) -> pathlib.Path | None:
    """The file of a module, found without importing anything. None if there is none."""
    found, places = None, list(folders)
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        try:
            found = PathFinder.find_spec(".".join(parts[:count]), places)
        except (ImportError, ValueError):
            return None
        if found is None:
            return None
        places = list(found.submodule_search_locations or ())
    return pathlib.Path(found.origin) if found is not None and found.origin and found.origin.endswith(OF_MODULES) else None


def sha256(file: pathlib.Path) -> str:
    """The digest of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# Reading and comparing


@dataclasses.dataclass(frozen=True)
class Read:
    """A certificate's file: what it says as plain data, the digest that it has, its signature, and the parts if they are right."""

    data: Any
    sha256: str
    signature: str
    certificate: Certificate | None

    @property
    def unchanged(self) -> bool:
        """Whether the digest is that of what the certificate says."""
        return digest(self.data) == self.sha256


def read(place: str) -> Read:
    """Read the file of a certificate. ValueError, in one line, if it is none, or has not what a certificate has.

    If the digest shows that something has changed, parts may be missing: then `certificate` may be None.
    """
    try:
        with open(place, "rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror}") from None
    if len(text) > MOST_BYTES:
        raise ValueError(f"{place} is no certificate: it is larger than {MOST_BYTES >> 20} MiB")
    try:
        data = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_refused)
        if not isinstance(data, dict) or {*data} != FILE_KEYS:
            raise ValueError(f"it must have the keys {', '.join(sorted(FILE_KEYS))} and no others")
        read = Read(data["certificate"], data["sha256"], data["signature"], None)
        if not (isinstance(read.sha256, str) and isinstance(read.signature, str)):
            raise ValueError("sha256 and signature must be texts")  # noqa: TRY004 - as for other mistakes
        unchanged = read.unchanged
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no certificate: {_line(error)}") from None
    try:
        return dataclasses.replace(read, certificate=_parts(read.data))
    except (ValueError, RecursionError) as error:
        if unchanged:
            raise ValueError(f"{place} is no certificate: {_line(error)}") from None
        return read


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without keys that come twice."""
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return data


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _parts(data: Any) -> Certificate:
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise ValueError(f"its schema must be {SCHEMA}: another release of gdn-verify wrote it")
    certificate = msgspec.convert(data, Certificate)
    if not certificate.checks:
        raise ValueError("it is about no check")
    for check in certificate.checks:
        for name in check.sources:
            path = pathlib.PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not name.endswith(OF_MODULES) or "\0" in name or len(name) > MOST_NAME:
                raise ValueError(f"a source must be a file of a module below a folder, got {shown(name)}")
        if check.kernel and check.kernel not in check.sources:
            raise ValueError(f"the sources must have the kernel {shown(check.kernel)}")
    return certificate


@dataclasses.dataclass
class Compared:
    """What differs from a certificate, what could not be compared, and what is as it was, in words."""

    differs: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    same: list[str] = dataclasses.field(default_factory=list)


def compare(read: Read, first: str | None = None) -> Compared:
    """Compare a certificate with its digest, the sources at hand and this release. `first` is a folder to look in first."""
    compared = Compared()
    if not read.unchanged:
        compared.differs.append(f"the record has changed: its sha256 is {digest(read.data)}, and the file has {shown(read.sha256)}")
    if read.certificate is None:
        return compared
    for check in read.certificate.checks:
        _compare_sources(check, first, compared)
    certificate = read.certificate
    if certificate.gdn_verify != __version__:
        compared.unknown.append(f"gdn-verify {shown(certificate.gdn_verify)} is not at hand: this is {__version__}")
    elif (sources := own.sources()) != certificate.own_sha256:
        compared.differs.append(f"gdn-verify itself has changed: sha256 {sources}, certified {shown(certificate.own_sha256)}")
    else:
        compared.same.append(f"gdn-verify {__version__} is as it was")
    return compared


def _compare_sources(check: CheckPart, first: str | None, compared: Compared) -> None:
    folders = [*([pathlib.Path(first)] if first else []), *roots()]
    same = 0
    for name, wanted in check.sources.items():
        what = f"{'the kernel' if name == check.kernel else 'the source'} {shown(name)}"
        file = _at_hand(name, folders)
        try:
            found = sha256(file) if file is not None else ""
        except OSError:
            found = ""
        if not found:
            compared.unknown.append(f"{what} is not at hand: --path names the folder in which it is")
        elif found != wanted:
            compared.differs.append(f"{what} has changed: sha256 {found}, certified {shown(wanted)}")
        else:
            same += 1
    if not check.sources:
        compared.unknown.append(f"no source of {shown(check.adapter)} is certified")
    compared.unknown += [f"{shown(name)} has no source that a certificate could have" for name in check.without_source]
    compared.same += [f"{same} source{'s are' if same > 1 else ' is'} as certified for {shown(check.adapter)}"] if same else []


def _at_hand(name: str, folders: Iterable[pathlib.Path]) -> pathlib.Path | None:
    """The first file of that name below the folders."""

    def files() -> Iterator[pathlib.Path]:
        for folder in folders:
            try:
                if (folder / name).is_file():
                    yield folder / name
            except (OSError, ValueError):
                continue

    return next(files(), None)


def shown(text: str) -> str:
    """A text of a certificate for a terminal: in one line, without what a terminal obeys, and not too long."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _line(error: BaseException) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else shown(" ".join(str(error).split()))
