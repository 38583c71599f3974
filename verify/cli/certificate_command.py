"""The verb `certificate`: verify the certificate of a check. Only --again imports torch, and runs something."""

import contextlib
import math
import os
import pathlib

from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.terminal import print_line
from verify.cli.verb_options import CertificateOptions
from verify.findings.records import signature
from verify.findings.records.certificate import (
    Certificate,
    CheckPart,
    Compared,
    Read,
    SamplePart,
    canonical,
    compare,
    read,
    sha256,
    shown,
    versions,
)
from verify.process.outcome import Verdict

CLOSE = 1e-6  # a ratio of the same versions on the same processor may differ by so much: another number of cores rounds otherwise


def certificate(options: CertificateOptions) -> int:
    """Verify a certificate and print what differs. Returns the exit code."""
    if options.allowed_signers is not None and not os.path.isfile(options.allowed_signers):
        raise ValueError(f"--allowed-signers must name a file of allowed signers, got {options.allowed_signers!r}")
    found = read(options.file)
    compared = compare(found, options.path)
    _compare_signature(found, options.allowed_signers, compared)
    for check in found.certificate.checks if found.certificate is not None else ():
        print_line("\n".join(_lines_of(check)))
        _judge(check, compared)
    if options.again and found.certificate is not None:
        if compared.differs or compared.unknown:
            compared.unknown.append("no line was run again, because that runs only what is certified")
        else:
            _run_again(found.certificate, compared)
    for label, lines in (("as certified", compared.same), ("NOT COMPARED", compared.unknown), ("DIFFERS", compared.differs)):
        for line in lines:
            print_line(f"{label:<15}{line}")
    code = BROKEN if compared.differs else UNDECIDED if compared.unknown else HOLDS
    print_line({HOLDS: "the certificate is right", BROKEN: "the certificate is NOT right", UNDECIDED: "undecided"}[code])
    return code


def _lines_of(check: CheckPart) -> list[str]:
    """What was checked, with the laws of each verdict."""
    where = f", on {shown(check.device)}" if check.device else ""
    head = f"{shown(check.adapter)}  {shown(check.packages)}  profile {shown(check.profile)}, seed {check.seed}{where}"
    named = {verdict: [name for name, law in check.laws.items() if law.verdict == verdict] for verdict in Verdict}
    parts = {**{str(verdict): names for verdict, names in named.items()}, "not run": check.not_run}
    laws = [f"  {label:<13}{', '.join(map(shown, names))}" for label, names in parts.items() if names]
    return [f"{head}: {shown(check.verdict)}, {check.cases} cases", *laws]


def _judge(check: CheckPart, compared: Compared) -> None:
    """A certificate of a check that did not hold is none that the kernel is right."""
    broken = [name for name, law in check.laws.items() if law.verdict == "broken"]
    if broken or check.verdict == "broken":
        compared.differs.append(f"{shown(check.adapter)} was broken when it was checked: {shown(', '.join(broken))}")
    elif check.verdict != "holds" or check.exit_code:
        compared.unknown.append(f"{shown(check.adapter)} was undecided when it was checked (exit code {check.exit_code})")
    elif not any(law.verdict == "holds" and law.counts for law in check.laws.values()):
        compared.unknown.append(f"no law of {shown(check.adapter)} had a case that held")


def _compare_signature(found: Read, allowed: str | None, compared: Compared) -> None:
    if not found.signature:
        (compared.same if allowed is None else compared.differs).append(
            "there is no signature, so that anybody can have written this"
        )
        return
    try:
        right, words = signature.verify(canonical(found.data), found.signature, allowed)
    except signature.NoProgram as error:
        compared.unknown.append(f"the signature: {error}")
        return
    (compared.same if right else compared.differs).append(words)


def _run_again(certificate: Certificate, compared: Compared) -> None:
    """Run the lines of the sample, and compare their outcomes."""
    for check in certificate.checks:
        if not check.sample:
            compared.unknown.append(f"no line of {shown(check.adapter)} is in the certificate, so none was run again")
            continue
        if check.under:
            compared.unknown.append(f"the lines of {shown(check.adapter)} need {shown(check.under)}, which only repeat has")
            continue
        same_versions = versions() == certificate.versions
        _run_sample(check, compared, same_versions=same_versions)


def _run_sample(check: CheckPart, compared: Compared, *, same_versions: bool) -> None:
    from verify.adapters.registry import AdapterError  # these need torch
    from verify.engine.asking import ask, describe
    from verify.execution.line import Run
    from verify.findings import known
    from verify.findings.store import Store
    from verify.gpu import device as devices
    from verify.process.worker import Worker

    place = check.adapter.rpartition(":")[0]
    try:
        if place.endswith(".py") and sha256(pathlib.Path(place)) != check.sources.get(check.kernel):
            raise ValueError(f"{place} is not the file that is certified")
        runs = {part.run: Run.parse(part.run) for part in check.sample}
        if any(run.adapter != check.adapter for run in runs.values()):
            raise ValueError("a line of the sample is about another adapter")
        gpu = any(run.device == "cuda" for run in runs.values())
        if gpu and not devices.gpus():
            compared.unknown.append(f"the lines of {shown(check.adapter)} need a GPU, and torch sees none")
            return
        with Worker(environment=devices.environment("cuda" if gpu else "cpu")) as worker, contextlib.closing(Store()) as store:
            described = describe(check.adapter, worker)
            same = same_versions and (described.versions, described.device) == (check.packages, check.device) and not gpu
            defects = known.of(check.adapter).on(described.device).deny_list
            for part in check.sample:
                outcome = ask(runs[part.run], worker, store, defects=defects)
                ratio = max(outcome.ratios.values(), default=0.0)
                _compare_again(part, str(outcome.verdict), ratio, compared, exactly=same)
    except (AdapterError, OSError, ValueError) as error:
        compared.unknown.append(f"the lines of {shown(check.adapter)} could not be run: {shown(str(error))}")
        return
    how = "with the same ratios" if same else "whose ratios may differ with other versions, or on a GPU"
    compared.same.append(f"{len(check.sample)} lines of {shown(check.adapter)} were run again, {how}")


def _compare_again(part: SamplePart, verdict: str, ratio: float, compared: Compared, *, exactly: bool) -> None:
    if verdict != "holds":
        compared.differs.append(f"a line that held is now {verdict}: {shown(part.run)}")
    elif exactly and not math.isclose(ratio, part.ratio, rel_tol=CLOSE):
        compared.differs.append(f"a line has another ratio: {ratio:g}, certified {part.ratio:g}: {shown(part.run)}")
