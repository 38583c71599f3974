"""Files that show a check elsewhere. Each is made from the records of the check alone, after its last law."""

import os
import pathlib
import sys
from collections.abc import Sequence

from verify.cli.options import SWEEP
from verify.cli.output import check_writable, write_file
from verify.cli.terminal import print_error, write
from verify.cli.verb_options import CheckOptions, Outputs
from verify.findings.records import certificate, page, signature
from verify.findings.records.github import annotations
from verify.findings.records.junit import junit
from verify.findings.records.markdown import markdown
from verify.findings.records.record import Record

MADE = {"junit": junit, "markdown": markdown}  # options that name a file, and what makes its text


def check_outputs(options: Outputs) -> None:
    """Refuse a file that cannot be written or made, before any work is done. ValueError names the option."""
    if isinstance(options, CheckOptions) and options.tune == SWEEP:
        for option in (*MADE, "annotations"):
            if getattr(options, option) is not None:
                raise ValueError(f"--{option} must be left out with --tune sweep, which gives no verdict on laws")
    for option in MADE:
        check_writable(f"--{option}", getattr(options, option))
    if isinstance(options, CheckOptions):
        _check_certificate(options)
    if options.html:
        page.check()
        check_writable("--html", options.html)


def write_outputs(options: Outputs, records: Sequence[Record], began: float = 0.0) -> bool:
    """Write the files that the options name. Returns whether all of them could be written; if not, stderr says why.

    `began` is when a check began, in seconds since 1970, which its certificate needs.
    """
    if options.annotations:
        for line in annotations(records):
            write(line, sys.stderr if options.json == "-" else sys.stdout)
    written = not isinstance(options, CheckOptions) or _write_certificate(options, records, began)
    for option, made in MADE.items():
        if (place := getattr(options, option)) is not None:
            written &= write_file(place, _before(place) + made(records))
    if options.html:
        written &= write_file(options.html, page.page(records))
    return written


def _before(place: str) -> str:
    """What stays in a file: GitHub collects the summaries of several commands in one file."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    try:
        return pathlib.Path(place).read_text(encoding="utf-8") if summary and os.path.samefile(place, summary) else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _check_certificate(options: CheckOptions) -> None:
    if options.certificate is None:
        if options.sign_key is not None:
            raise ValueError("--sign-key is for --certificate, which is not given")
        return
    if options.tune == SWEEP or options.shard is not None:
        raise ValueError("--certificate is for a whole check: it excludes --shard and --tune sweep")
    if options.sign_key is not None:
        if not os.path.isfile(options.sign_key):
            raise ValueError(f"--sign-key must name an SSH key, got {options.sign_key!r}: there is no such file")
        try:
            signature.sign(b"", options.sign_key)
        except (ValueError, signature.NoProgram) as error:
            raise ValueError(f"--sign-key: {error}") from None
    check_writable("--certificate", options.certificate)


def _write_certificate(options: CheckOptions, records: Sequence[Record], began: float) -> bool:
    if options.certificate is None:
        return True
    try:
        data = certificate.certificate_of(records, began)
        signed = signature.sign(certificate.canonical(data), options.sign_key) if options.sign_key is not None else ""
    except (ValueError, signature.NoProgram) as error:
        print_error(f"no certificate is written: {error}")
        return False
    return write_file(options.certificate, certificate.text_of(data, signed))
