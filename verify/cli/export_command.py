"""The verbs `export` and `judge`: a check whose implementation runs elsewhere. Questions and answers are files."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from oracles.operations import OPERATIONS
from properties.books import BOOKS, Book, book_of
from properties.words.example import Example
from properties.words.names import unknown
from verify import __version__
from verify.adapters.files_adapter import FilesAdapter, Writer, declared_by, kind_of, manifest_of
from verify.adapters.loader import make
from verify.adapters.registry import ANSWERS, AdapterError
from verify.adapters.tensor_files import ENDING, FORMAT, MANIFEST, one_line, write_bytes
from verify.cli.check_command import check
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.hosts import check_installed
from verify.cli.options import chosen_laws
from verify.cli.output import JsonLines
from verify.cli.parsers import parser
from verify.cli.terminal import print_line
from verify.cli.verb_options import CheckOptions, ExportOptions, JudgeOptions, options_of
from verify.engine.asking import Described, describe
from verify.engine.check import Check
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.execution.dumps import dumps_in, judged_dump
from verify.execution.exporting import EXPORTED, questions_of
from verify.execution.line import Run
from verify.execution.watched import is_watched, judged_by_heads, watched_in
from verify.findings.report import finding_lines
from verify.gpu import device as devices
from verify.process.outcome import Verdict
from verify.process.worker import Worker

MOST_BYTES = 2**32  # of a case that `judge` judges: a manifest may be anybody's
SHOWN = 3  # names of missing answers that are printed


def export(options: ExportOptions) -> int:
    """Write the questions of a check's cases into a folder, and a manifest. Returns the exit code."""
    try:
        return _export(options)
    except OSError as error:
        raise ValueError(f"{options.out} cannot be written: {error.strerror}") from None


def _export(options: ExportOptions) -> int:
    folder, spec, profile = options.out, options.adapter, PROFILES[options.profile]
    with Worker(environment=devices.environment("cpu")) as worker:  # it only reads declarations
        is_adapter = "/" in spec or ".py" in spec
        if is_adapter:
            check_installed(spec)
        described = describe(spec, worker, runs=False) if is_adapter else _of_operation(spec)
        book = book_of(described.domain)
        laws = _laws(book, described.domain.operation, options)
        settings = Settings(spec, laws, profile, options.seed)
        head = {
            "format": FORMAT,
            "gdn_verify": __version__,
            "adapter": spec,
            "profile": profile.name,
            "seed": options.seed,
            "laws": laws,
            "book": book.name,
            "domain": described.domain.to_json(),
            "declares": described.declares,
        }
        _begin(folder, head)
        writer = make(kind_of(head, Writer, folder), spec)
        assert isinstance(writer, Writer)
        cases = []
        with Check(settings, [worker], defects=()) as checking:
            checking.described = described
            for law, runs, _ in checking.drawn():
                cases += [{"law": law, "line": str(run), "questions": questions_of(run, writer)} for run in runs]
    _put(folder, {**head, "cases": cases, "questions": writer.written})
    left = [law for law in book.about(described.domain.operation) if law not in EXPORTED]
    print_line(f"{len(cases)} cases, {len(writer.written)} questions, {writer.bytes / 1e6:.0f} MB in {folder}", sys.stdout)
    if not options.law:
        print_line(f"not exported, because files cannot show a defect of them: {', '.join(left)}", sys.stdout)
    print_line(f"next: answer each file of {folder}, then gdn-verify judge {folder} ANSWERS", sys.stdout)
    return HOLDS


def _of_operation(name: str) -> Described:
    """The declarations of an operation without an adapter: those that its kind of domain has by default."""
    if name not in OPERATIONS:
        raise ValueError(unknown("operation", name, OPERATIONS))
    book = next(book for book in BOOKS if name in book.operations)
    if book.name not in ("rules", "modules"):
        raise ValueError(f"{name} needs a FilesAdapter that declares its domain: gdn-verify export FILE.py:CLASS --out DIR")
    algorithm = OPERATIONS[name].classes[0]
    kind = type("Exported", (FilesAdapter,), {"domain": book.domain(operation=name), "algorithm": algorithm})
    adapter = make(kind, name)
    return Described(name, adapter.domain, adapter.algorithm, "", declares=declared_by(adapter))


def _laws(book: Book, operation: str, options: ExportOptions) -> list[str]:
    """The laws to export. ValueError for one that files cannot show."""
    if book.name in ("paths", "traces", "calls"):
        raise ValueError(f"export is for one call of a known operation, and {options.adapter} is none of {book.name}")
    about = [law for law in book.about(operation) if law in EXPORTED]
    laws = chosen_laws(options.law) or about
    if wrong := next((law for law in laws if law not in about), None):
        raise ValueError(f"law {wrong} is not exported; choose from {', '.join(about)}")
    return laws


def _begin(folder: str, head: Mapping[str, Any]) -> None:
    """Make the folder, or go on with it. ValueError if it has something else, or if `judge` could not name it in a line."""
    if ":" in folder or len(folder.split()) != 1:
        raise ValueError(f"--out must have no colons and no spaces, since lines name it: got {folder!r}")
    os.makedirs(folder, exist_ok=True)
    if os.path.lexists(os.path.join(folder, MANIFEST)):
        found, plain = manifest_of(folder), json.loads(json.dumps(head))
        if changed := next((name for name in plain if found.get(name) != plain[name]), None):
            raise ValueError(f"{folder} has another export: its {changed} is not the same; name another folder")
    elif os.listdir(folder):
        raise ValueError(f"{folder} has files, but no {MANIFEST}; name another folder")
    else:
        _put(folder, {**head, "cases": [], "questions": {}})


def _put(folder: str, manifest: Mapping[str, Any]) -> None:
    write_bytes(os.path.join(folder, MANIFEST), [json.dumps(manifest, indent=1).encode(), b"\n"])


def judge(options: JudgeOptions) -> int:
    """Judge answers to an export, as `check` judges an adapter. Returns the exit code."""
    folder, answers = options.folder, options.answers
    if answers is None:
        return _judge_dumps(options)
    spec = f"{ANSWERS}{folder}:{answers}"
    manifest = manifest_of(folder)
    given = _given(manifest, folder)
    names = manifest["questions"]
    missing = [name for name in names if not os.path.lexists(os.path.join(answers, name + ENDING))]
    there = f"answers      {len(names) - len(missing)} of {len(names)}, {len(missing)} missing"
    more = "".join(f", {name}{ENDING}" for name in missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
    print_line(there + more.replace(",", ":", 1), sys.stderr if options.json == "-" else sys.stdout)
    laws = chosen_laws(options.law) or [*given]
    if wrong := next((law for law in laws if law not in given), None):
        raise ValueError(f"law {wrong} was not exported; choose from {', '.join(given)}")
    cases = {"law": laws, "profile": manifest["profile"], "seed": manifest["seed"], "given": given}
    words = parser().parse_args(["check", spec, "--no-examples", "--device", "cpu"])
    vars(words).update({**vars(options), **cases, "adapters": [spec], "settings": ""})
    return check(options_of(CheckOptions, words))


def _given(manifest: Mapping[str, Any], folder: str) -> dict[str, list[Example]]:
    """The examples of each law. AdapterError if the manifest has lines that are none, or that are too large to be judged."""
    given = dict[str, list[Example]]()
    try:
        if manifest["profile"] not in PROFILES:
            raise ValueError(f"unknown profile {manifest['profile']!r}")
        for case in manifest["cases"]:
            run = Run.parse(case["line"], here=False)
            if run.law not in EXPORTED or run.example.case.bytes > MOST_BYTES:
                raise ValueError(f"{run.law} is not exported, or the case is too large: {case['line'][:100]}")
            given.setdefault(run.law, []).append(run.example)
    except Exception as error:  # whatever stands in the file
        what = f"{type(error).__name__}: {one_line(error)}"
        raise AdapterError(f"{os.path.join(folder, MANIFEST)} has a case that cannot be judged: {what}") from None
    if not given:
        raise AdapterError(f"{os.path.join(folder, MANIFEST)} has no cases: run gdn-verify export again, which goes on")
    return given


def _judge_dumps(options: JudgeOptions) -> int:
    """Judge calls that FlashInfer has dumped, or that `watch` has written. Returns the exit code."""
    if ignored := next((name for name in ("law", "html", "junit", "markdown", "annotations") if getattr(options, name)), None):
        raise ValueError(f"--{ignored} is for answers to an export: name ANSWERS too")
    watched = is_watched(options.folder)
    found = watched_in if watched else dumps_in
    if not (names := found(options.folder) if os.path.isdir(options.folder) else []):
        what = "has statistics alone" if watched else "has no calls that FlashInfer has dumped or verify.watch has written"
        raise ValueError(f"{options.folder} {what}; to judge an export, name its ANSWERS too")
    verdicts, out = list[Verdict](), sys.stderr if options.json == "-" else sys.stdout
    with JsonLines(options.json) as lines:
        for name in names:
            line, outcome = judged_by_heads(name) if watched else (None, judged_dump(os.path.join(options.folder, name)))
            verdicts.append(outcome.verdict)
            worst = ", ".join(f"{port} {ratio:.2f}" for port, ratio in outcome.ratios.items())
            print_line(
                "\n".join(
                    [
                        f"{outcome.verdict.upper():<12}{one_line(name)}  {outcome.reason or worst}",
                        *finding_lines(outcome.findings),
                        *([f'  repeat       gdn-verify repeat "{line}"'] if line and outcome.findings else []),
                    ]
                ),
                out,
            )
            lines(({"dump": name} if line is None else {"watched": str(line)}) | outcome.to_json())
        print_line(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)), out)
        decided = Verdict.UNKNOWN not in verdicts and Verdict.HOLDS in verdicts
        return lines.code(BROKEN if Verdict.BROKEN in verdicts else HOLDS if decided else UNDECIDED)
