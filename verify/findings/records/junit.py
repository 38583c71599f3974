"""JUnit XML of checks: a test suite for each adapter, and a test case for each law.

A broken law is a failure, an undecided one an error, and an unsupported one is skipped.
"""

from collections.abc import Sequence

import junitparser

from verify.findings.records.entries import Entry, cleaned, entries, name_of
from verify.findings.records.record import Record
from verify.process.outcome import Verdict

DECLARATION = '<?xml version="1.0" encoding="utf-8"?>\n'


def junit(records: Sequence[Record]) -> str:
    """The XML of some checks."""
    tree = junitparser.JUnitXml("gdn-verify")
    for record in records:
        tree.add_testsuite(_suite(record))
    tree.update_statistics()
    return DECLARATION + str(tree.tostring().decode("utf-8")) + "\n"


def _suite(record: Record) -> junitparser.TestSuite:
    suite, head = junitparser.TestSuite(name_of(record)), record.head
    properties = {
        "gdn-verify": head.gdn_verify,
        "versions": head.versions,
        "device": head.device or "cpu",
        "profile": head.profile,
        "seed": str(head.seed),
        "tune": head.tune,
        "products": head.products,
        "options": head.under,
        "shard": "/".join(map(str, head.shard)),
    }
    for name, value in properties.items():
        suite.add_property(name, cleaned(value))
    suite.add_testcases([_case(record, entry) for entry in entries(record)])
    return suite


def _case(record: Record, entry: Entry) -> junitparser.TestCase:
    case = junitparser.TestCase(entry.name, name_of(record), entry.report.wall_s if entry.report is not None else 0.0)
    result = _result(entry)
    if result is not None:
        result.text = entry.text
        case.result = [result]
    else:
        case.system_out = entry.text
    return case


def _result(entry: Entry) -> junitparser.Failure | junitparser.Error | junitparser.Skipped | None:
    if entry.verdict is Verdict.BROKEN:
        return junitparser.Failure(entry.title, "broken")
    if entry.skipped:
        return junitparser.Skipped(entry.title, str(entry.verdict))
    return junitparser.Error(entry.title, "unknown") if entry.verdict is Verdict.UNKNOWN else None
