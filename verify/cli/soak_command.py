"""The verb `soak`: check several adapters in rounds."""

import argparse
import random
import sys
import time

from verify.cli.exits import INTERRUPTED, exit_code
from verify.cli.hosts import check_installed, compilers_of, count_of, deadline_of, device_of, read_deny_list
from verify.cli.options import SWEEP, chosen_laws
from verify.cli.output import JsonLines, print_troubles, progress, stored
from verify.cli.terminal import marks_of, print_line, width_of
from verify.engine import soak
from verify.engine.profiles import PROFILES
from verify.findings import known
from verify.findings import report as text
from verify.findings.law_report import LawReport, left_out, reach_of
from verify.ranks.torchrun import launched
from verify.reach import report as reach_report


def soak_all(options: argparse.Namespace) -> int:
    """Check several adapters in rounds, then print a table. Returns the exit code."""
    if options.tune == SWEEP:
        raise ValueError("--tune must be a number or native for soak, got sweep")
    if launched() is not None:
        raise ValueError("soak cannot run under torchrun, only check can")
    for spec in options.adapter:
        check_installed(spec)
        known.of(spec, options.known)
    asked, place = chosen_laws(options), {spec: device_of(options.device) for spec in options.adapter}
    read_deny_list(options.deny)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    out = sys.stderr if options.json == "-" else sys.stdout
    store, examples = stored(options, out)
    start, interrupted = time.monotonic(), False

    def begun(this: soak.Round) -> None:
        words = [f"--{name} {getattr(options, name)}" for name in ("products", "device", "tune") if getattr(options, name)]
        words += [f"--law {law}" for law in asked or ()]
        print_line(" ".join([f"round {this.number}: gdn-verify {this}", *words]), sys.stderr)

    def told(report: LawReport) -> None:
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
            workers=lambda device: count_of(options, device),
            compilers=compilers_of,
            store=store,
            examples=examples,
            profile=PROFILES[options.profile] if options.profile else None,
            stop_at_first=options.stop,
            deadline_s=deadline_of(options),
            products=options.products,
            tune=options.tune or "",
            known=options.known,
            on_round=begun,
            on_case=on_case,
            on_report=told,
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
        for report in soaking.reports:
            lines(report.to_json())
    print_troubles(store, examples)
    for spec, description in soaking.described.items():
        reach = reach_of(report for report in soaking.reports if report.adapter == spec)
        width = width_of(out, reach_report.WIDTH)
        for line in reach_report.report(reach, description.omits, parameters=asked is None, width=width):
            print_line(f"{spec}  {line}" if len(soaking.described) > 1 else line, out)
    for line in left_out(soaking.reports):
        print_line(line, out)
    print_line("\n".join(text.table(soaking.reports)), out)
    summary = soak.summary(soaking.reports, soaking.rounds, time.monotonic() - start, soaking.processes)
    print_line(("interrupted: " if interrupted else "") + summary, out)
    if notice := text.fault_notice(soaking.reports):
        print_line(notice, out)
    return INTERRUPTED if interrupted else lines.code(exit_code(soaking.reports))
