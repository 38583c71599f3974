"""The verb `repeat`: run a printed line again, or several lines in one process."""

import contextlib
from typing import Any

from verify.cli import upstream
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.hosts import (
    backend_of,
    check_installed,
    deadline_of,
    read_deny_list,
    sanitizer_of,
    tell_ranks,
    workers_of,
)
from verify.cli.output import check_writable, print_json, print_troubles, write_file
from verify.cli.terminal import print_error, print_line
from verify.cli.verb_options import RepeatOptions
from verify.engine.asking import ask, ask_line, describe, interpreted
from verify.execution.line import Run
from verify.execution.watched import WORD, WatchedLine
from verify.findings import known
from verify.findings import report as text
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.process import prestart
from verify.process.choices import NoGpu
from verify.process.messages import RunOne
from verify.process.outcome import Verdict
from verify.process.worker import Worker
from verify.ranks.torchrun import follow, launched


def repeat(options: RepeatOptions) -> int:
    """Run a line again, perhaps after others in the same process, and print its outcome. Returns the exit code."""
    if options.line.startswith(WORD):
        return _judge_again(WatchedLine.parse(options.line), options)
    run, others = Run.parse(options.line), [Run.parse(line) for line in options.after]
    if devices_of := {other.device for other in others} - {run.device}:
        raise ValueError(f"lines that one process runs must have one device, got {run.device} and {', '.join(devices_of)}")
    denied = read_deny_list(options.deny)
    for one in (*others, run):
        check_installed(one.adapter)
    launch = launched()
    if ranks := launch.local_size if launch else options.ranks:
        backend = backend_of(options, ranks, run.device)
        if launch is not None and launch.rank:
            return follow(launch, backend, sequential=options.sequential)
    check_writable("--upstream", options.upstream)
    if options.upstream and (ranks or options.sanitize or others):
        raise ValueError("--upstream is about one call of one process: it excludes several lines, --ranks, torchrun and --sanitize")
    if options.sanitize and (ranks or run.device == "cpu"):
        raise ValueError("--sanitize is for one process on a GPU: the line must have device=cuda and no ranks")
    sanitizer = sanitizer_of(options.sanitize)
    if run.device == "cuda" and not devices.gpus():
        raise NoGpu("the line has device=cuda, but torch sees no GPU (without that word the line runs interpreted)")
    store, workers = Store(options.findings), workers_of(options, launch, run.device, sanitizer)
    alone = _worker(options, run.device)
    with sanitizer or contextlib.nullcontext(), alone if isinstance(workers, int) else workers[0] as worker:
        if sanitizer is not None:
            sanitizer.prove(worker)
        described = describe(run.adapter, worker)
        if warning := interpreted(described, run.device, deadline_of(options)):
            print_error(warning)
        versions, defects = described.versions, known.of(run.adapter, denied=denied).on(described.device)
        before = [ask(other, worker, store, defects=defects.deny_list) for other in others]
        outcome = ask(run, worker, store, defects=defects.deny_list)
        issue = ""
        if options.upstream and outcome.verdict is Verdict.BROKEN:
            issue = upstream.issue(run, outcome, worker, store, described.versions, options.path, defects.deny_list)
        code = {Verdict.HOLDS: HOLDS, Verdict.BROKEN: BROKEN}.get(outcome.verdict, UNDECIDED)
        tell_ranks(workers, code)
    store.close()
    if outcome.verdict is Verdict.BROKEN:
        store.keep(
            {
                "stage": "repeated",
                "run": str(run),
                "law": run.law,
                "versions": versions,
                "findings": [f.to_json() for f in outcome.findings],
            }
        )
    print_troubles(store, None)
    if options.upstream and not (issue and write_file(options.upstream, issue)):
        print_error(f"--upstream: {options.upstream} is not written" + ("" if issue else ", because the line is not broken"))
    first = [{"run": str(other), "verdict": str(earlier.verdict)} for other, earlier in zip(others, before, strict=True)]
    data = {"run": str(run), "versions": versions, **outcome.to_json(), **({"after": first} if first else {})}
    del data["reach"]  # that is about the cases of a whole check
    if options.json:
        print_json(data)
    else:
        for other, earlier in zip(others, before, strict=True):
            print_line(f"{text.WORDS[earlier.verdict]:<8} {other}")
        print_line(text.outcome_text(run, outcome, versions))
    return code


def _worker(options: RepeatOptions, device: str) -> Worker:
    settings: dict[str, Any] = {"environment": devices.environment(device), "deadline_s": deadline_of(options)}
    settings["sequential"] = options.sequential
    return prestart.take(**settings) or Worker(**settings)


def _judge_again(line: WatchedLine, options: RepeatOptions) -> int:
    """Judge a part of a watched call again: its stored results, or those of a new call of the adapter in the line."""
    if line.adapter:
        check_installed(line.adapter)
    store = Store(options.findings)
    with _worker(options, "cuda" if devices.gpus() else "cpu") as worker:
        outcome = ask_line(RunOne(str(line)), worker, store)
    store.close()
    if options.json:
        print_json({"watched": str(line), **outcome.to_json()})
    else:
        print_line(
            "\n".join([f"{outcome.verdict.upper():<12}{line}  {outcome.reason}".rstrip(), *text.finding_lines(outcome.findings)])
        )
    return {Verdict.HOLDS: HOLDS, Verdict.BROKEN: BROKEN}.get(outcome.verdict, UNDECIDED)
