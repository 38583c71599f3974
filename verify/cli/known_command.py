"""The verb `known`: put a failure on file as a known defect, after having seen it fail."""

import pathlib

from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.hosts import check_installed, deadline_of, read_deny_list
from verify.cli.terminal import print_line
from verify.cli.verb_options import KnownOptions
from verify.engine.asking import ask, describe
from verify.execution.line import Run
from verify.findings import known, known_entry
from verify.findings import report as text
from verify.findings.store import Store
from verify.gpu import device as devices
from verify.process.choices import NoGpu
from verify.process.outcome import Verdict
from verify.process.worker import Worker


def put_on_file(options: KnownOptions) -> int:
    """Run a line, and put it on file if it fails. Returns the exit code."""
    run = Run.parse(options.line)
    near = known.beside(run.adapter)
    if options.known is None and near is None:
        raise ValueError(f"--known must name the file to write, because {run.adapter} is no file, beside which one could be")
    path = pathlib.Path(options.known) if options.known else near
    assert path is not None
    if not options.reason.strip() or not options.reason.isprintable():
        raise ValueError(f"--reason must be one line of text, got {options.reason!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--known must name a file in a folder that exists, got {options.known!r}")
    before = known.of(run.adapter, [options.known] if options.known and path.exists() else [], read_deny_list(options.deny))
    check_installed(run.adapter)
    if run.device == "cuda" and not devices.gpus():
        raise NoGpu("the line has device=cuda, but torch sees no GPU")
    store = Store()
    environment = devices.environment(run.device)
    with Worker(deadline_of(options), environment=environment, sequential=options.sequential) as worker:
        described = describe(run.adapter, worker)
        defects = before.on(described.device)
        outcome = ask(run, worker, store, defects=defects)
    store.close()
    if outcome.verdict is Verdict.HOLDS:
        print_line(f"the line holds, so there is no defect to put on file: {run}")
        return BROKEN
    if outcome.verdict is not Verdict.BROKEN:
        print_line(text.outcome_text(run, outcome, described.versions))
        return UNDECIDED
    if defect := defects.explain(run, outcome):
        print_line(f"already on file in {defect.file}: {defect.reason} ({defect.run})")
        return HOLDS
    words = described.versions.split()
    versions = dict(zip(words[::2], words[1::2], strict=False))
    packages = {name: version for name, version in versions.items() if name != "torch"} or versions
    entry = known_entry.entry_of(
        run,
        outcome,
        packages,
        described.device,
        reason=options.reason,
        where=options.where,
        also=options.also,
        times=options.times,
        kernel=options.kernel,
    )
    defect = known_entry.add(entry, path)
    print_line(f"on file in {path}: {defect.reason}")
    print_line("\n".join(text.finding_lines(outcome.findings)))
    print_line(
        f"  explains     failures of {', '.join(defect.outputs)} in cases with {' '.join(map('='.join, defect.where.items()))}"
    )
    return HOLDS
