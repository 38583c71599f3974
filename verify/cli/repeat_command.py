"""The verb `repeat`: run one printed line again."""

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
    """Run a line again and print its outcome. Returns the exit code."""
    if options.line.startswith(WORD):
        return _judge_again(WatchedLine.parse(options.line), options)
    run = Run.parse(options.line)
    denied = read_deny_list(options.deny)
    check_installed(run.adapter)
    launch = launched()
    if ranks := launch.local_size if launch else options.ranks:
        backend = backend_of(options, ranks, run.device)
        if launch is not None and launch.rank:
            return follow(launch, backend, sequential=options.sequential)
    check_writable("--upstream", options.upstream)
    if options.upstream and (ranks or options.sanitize):
        raise ValueError("--upstream is about a call of one process: it excludes --ranks, torchrun and --sanitize")
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
    data = {"run": str(run), "versions": versions, **outcome.to_json()}
    del data["reach"]  # that is about the cases of a whole check
    if options.json:
        print_json(data)
    else:
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
