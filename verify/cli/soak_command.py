"""The verb `soak`: check several adapters in rounds."""

import dataclasses
import random
import sys
import time
from typing import TextIO

from verify import __version__
from verify.cli.exits import HOLDS, INTERRUPTED, UNDECIDED, exit_code
from verify.cli.hosts import check_installed, compilers_of, count_of, deadline_of, device_of, read_deny_list
from verify.cli.options import SWEEP, chosen_laws
from verify.cli.output import JsonLines, print_troubles, progress, stored
from verify.cli.outputs import check_outputs, write_outputs
from verify.cli.terminal import marks_of, print_line, width_of
from verify.cli.verb_options import SoakOptions
from verify.engine import soak
from verify.engine.profiles import PROFILES
from verify.findings import known
from verify.findings import report as text
from verify.findings.law_report import LawReport, left_out, reach_of
from verify.findings.records.record import End, Head, Record, lines_of
from verify.ranks.torchrun import launched
from verify.reach import report as reach_report


def soak_all(options: SoakOptions) -> int:
    """Check several adapters in rounds, then print a table. Returns the exit code."""
    if options.tune == SWEEP:
        raise ValueError("--tune must be a number or native for soak, got sweep")
    if launched() is not None:
        raise ValueError("soak cannot run under torchrun, only check can")
    check_outputs(options)
    for spec in options.adapter:
        check_installed(spec)
        known.of(spec, options.known)
    asked, place = chosen_laws(options.law), {spec: device_of(options.device) for spec in options.adapter}
    denied = read_deny_list(options.deny)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    out = sys.stderr if options.json == "-" else sys.stdout
    store, examples = stored(options, out)
    start, interrupted = time.monotonic(), False

    def begun(this: soak.Round) -> None:
        words = [f"--{name} {getattr(options, name)}" for name in ("products", "device", "tune") if getattr(options, name)]
        words += [f"--law {law}" for law in asked or ()]
        print_line(" ".join([f"round {this.number}: gdn-verify {this}", *words]), sys.stderr)

    def ended(report: LawReport) -> None:
        label = f"{report.adapter} " if len(soaking.specs) > 1 else ""
        on_case(label + report.law, report.planned, report.planned)  # the law is over
        if not report.same_as:
            print_line(text.failure(report, width_of(out, text.WIDTH), marks_of(out)), out)

    with JsonLines(options.json) as lines, progress() as on_case:
        soaking = soak.Soak(
            options.adapter,
            asked,
            seed=seed,
            place=lambda spec: place[spec],
            workers=lambda device: count_of(options.workers, device),
            compilers=compilers_of,
            store=store,
            examples=examples,
            profile=PROFILES[options.profile] if options.profile else None,
            stop_at_first=options.stop,
            deadline_s=deadline_of(options),
            sequential=options.sequential,
            products=options.products,
            tune=options.tune or "",
            known=options.known,
            denied=denied,
            on_round=begun,
            on_case=on_case,
            on_report=ended,
        )
        with soaking:
            try:
                for spec, description in soaking.describe().items():
                    where = f", on {description.device}" if description.device else ""
                    print_line(f"{spec}  {description.versions}  soak of {options.minutes:g} minutes, seed {seed}{where}", out)
                for warning in soaking.warnings:
                    print_line(f"gdn-verify: {warning}", sys.stderr)
                try:
                    soaking.run(60 * options.minutes)
                except ValueError as error:
                    raise RuntimeError(str(error)) from error  # an error inside gdn-verify, not bad usage
            except KeyboardInterrupt:
                interrupted = True
        wall_s, looked_at = time.monotonic() - start, {spec: _looked_at(soaking, spec, out) for spec in soaking.described}
        records = list[Record]()
        for spec, told in looked_at.items():
            code = INTERRUPTED if interrupted else exit_code(_reports_of(soaking, spec))
            records.append(_record(options, soaking, spec, End(code, wall_s, interrupted, looked_at=told)))
            for data in lines_of(records[-1]):
                lines(data)
        written = write_outputs(options, records)
    print_troubles(store, examples)
    for spec, told in looked_at.items():
        for line in told:
            print_line(f"{spec}  {line}" if len(soaking.described) > 1 else line, out)
    for line in left_out(soaking.reports):
        print_line(line, out)
    print_line("\n".join(text.table(soaking.reports)), out)
    summary = soak.summary(soaking.reports, soaking.rounds, wall_s, soaking.processes)
    print_line(("interrupted: " if interrupted else "") + summary, out)
    if notice := text.fault_notice(soaking.reports):
        print_line(notice, out)
    code = lines.code(exit_code(soaking.reports))
    return INTERRUPTED if interrupted else code if written or code != HOLDS else UNDECIDED


def _reports_of(soaking: soak.Soak, spec: str) -> list[LawReport]:
    return [report for report in soaking.reports if report.adapter == spec]


def _looked_at(soaking: soak.Soak, spec: str, out: TextIO) -> list[str]:
    """The lines about what the cases of an adapter looked at."""
    return reach_report.report(
        reach_of(_reports_of(soaking, spec)),
        soaking.described[spec].omits,
        parameters=soaking.laws is None,
        width=width_of(out, reach_report.WIDTH),
    )


def _record(options: SoakOptions, soaking: soak.Soak, spec: str, end: End) -> Record:
    """The record of all rounds of an adapter."""
    reports, described = _reports_of(soaking, spec), soaking.described[spec]
    head = Head(
        adapter=spec,
        gdn_verify=__version__,
        versions=described.versions,
        device=described.device,
        profile=options.profile or "soak",
        seed=soaking.seed,
        laws=[report.law for report in reports],
        tune=options.tune or "",
        products=options.products or (described.products if described.device else "ieee"),
        declares=described.lines(),
        omits=dict(described.omits),
    )
    return Record(head, reports, dataclasses.replace(end, left_out=left_out(reports), reach=reach_of(reports)))
