"""Files that show a check elsewhere. Each is made from the records of the check alone, after its last law."""

import argparse
from collections.abc import Sequence

from verify.findings.records.record import Record


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse a file that cannot be written or made, before any work is done. ValueError names the option."""


def write_outputs(options: argparse.Namespace, records: Sequence[Record]) -> bool:
    """Write the files that the options name. Returns whether all of them could be written; if not, stderr says why."""
    return True
