"""The page of files has the keys, the files and the environment variables of the code, and no others."""

import re
from collections.abc import Callable
from typing import Any

from tests.pages import code_column, codes, reference, section, table, tables
from tests.sources import SOURCES, definition, dict_keys, fields, needs_a_value

# docs/reference/files.md


def stages() -> set[str]:
    """The stages of findings: in the records themselves, and in calls of a method that makes them."""
    pairs = [re.findall(r'"stage": "([\w ]+)"|\b_keep\([^)\n]*"([\w ]+)"\)', text) for text in SOURCES.values()]
    return {first or second for text in pairs for first, second in text}


KEYS: dict[tuple[str, str], Callable[[], Any]] = {
    ("findings.jsonl", "key"): lambda: dict_keys("stage", "run"),
    ("findings.jsonl", "`stage`"): stages,
    ("A finding", "key"): lambda: fields(definition("Finding")),
    ("A picture", "key of a picture"): lambda: fields(definition("Picture")),
    ("A finding", "`kind`"): lambda: map(str, definition("FailureKind")),
    ("Deny-lists", "key"): lambda: fields(definition("Denied")),
    ("known_defects.toml", "key"): lambda: {*fields(definition("Known"))} - {"file"},
    ("known_defects.toml", "key of a `[[deny]]` table"): lambda: {*fields(definition("Denial"))},
    ("list JSON", "key"): lambda: dict_keys("gpu_gate"),
    ("list JSON", "key of an adapter"): lambda: dict_keys("runs", "shared") | dict_keys("runs", "reason"),
    ("check and soak JSON", "key of `check`"): lambda: {"schema", "record", *fields(definition("Head"))},
    ("check and soak JSON", "key"): lambda: {"schema", "record", *fields(definition("LawReport"))},
    ("check and soak JSON", "key of `end`"): lambda: {"schema", "record", *fields(definition("End", with_field="exit_code"))},
    ("reach", "key of a reach"): lambda: [*({*fields(definition("Reach"))} - {"lines"}), "statements"],
    ("sweep JSON", "key"): lambda: dict_keys("infeasible", "faults"),
    ("repeat JSON", "key"): lambda: {"run", "after", "versions", *fields(definition("Outcome"))} - {"reach"},
    ("launches JSON", "key"): lambda: {"run", *fields(definition("LaunchReport"))},
    ("arithmetic JSON", "key"): lambda: dict_keys("known_versions"),
    ("arithmetic JSON", "key of a measure"): lambda: {*fields(definition("Comparison")), *dict_keys("covered")},
    ("Tables of cards", "key"): lambda: fields(definition("Card")),
    ("across JSON", "key"): lambda: dict_keys("lines", "cells"),
    ("across JSON", "key of a place"): lambda: dict_keys("option", "versions"),
    ("across JSON", "key of a cell"): lambda: fields(definition("SiteVerdict")),
    ("bisect JSON", "key"): lambda: dict_keys("change", "steps"),
    ("bisect JSON", "key of `found`"): lambda: dict_keys("before", "after"),
    ("compare JSON", "key"): lambda: dict_keys("worse", "paragraph"),
    ("compare JSON", "key of a case"): lambda: dict_keys("change", "ratios"),
    ("compare JSON", "key of an output"): lambda: [*fields(definition("Errors")), "word"],
    ("compare JSON", "key of a timing"): lambda: fields(definition("Timing")),
    ("zoo JSON", "key"): lambda: dict_keys("animals", "alarms"),
    ("zoo JSON", "key of an animal"): lambda: dict_keys("killed_by"),
    ("zoo JSON", "key of a law of an animal"): lambda: {*fields(definition("Cell")), "state", "held"} - {"broken", "holding"},
    ("zoo JSON", "key of a suite"): lambda: {*fields(definition("Trial")), "killed"},
    ("zoo JSON", "key of a mutant"): lambda: (
        {*fields(definition("MutantFate", with_field="differed")), *dict_keys("operator", "id"), "diff"} - {"mutant"}
    ),
    ("claims JSON", "key"): lambda: dict_keys("rows", "interrupted") | dict_keys("device", "text"),
    ("claims JSON", "key of a row"): lambda: {*fields(definition("Row")), "measured"},
    ("claims JSON", "key of a decision"): lambda: fields(definition("Ruling")),
    ("Certificates", "key"): lambda: definition("FILE_KEYS"),
    ("Certificates", "key of a certificate"): lambda: fields(definition("Certificate")),
    ("Certificates", "key of a check"): lambda: fields(definition("CheckPart")),
    ("fetch JSON", "key"): lambda: {"folder", "fetched", *dict_keys("sha256", "patterns")},
    ("The record of the GPU tests", "key"): lambda: definition("KINDS"),
}


def test_the_keys_of_files_are_those_of_the_code() -> None:
    for (title, head), keys in KEYS.items():
        assert sorted(code_column(table(section(reference("files"), title), head), head)) == sorted(keys()), (title, head)


def test_the_files_of_findings_are_those_of_the_code() -> None:
    rows = table(section(reference("files"), "The folder .gdn-verify"), "file")
    assert code_column(rows, "file") == ["findings.jsonl", "examples.txt", "under-way-PID.txt"]
    source = "\n".join(SOURCES.values())
    assert all(f'"{name}' in source for name in ("findings.jsonl", "examples.txt", "under-way-"))


def test_the_keys_that_a_known_defect_must_have_are_those_of_the_code() -> None:
    for name, head in (("Known", "key"), ("Denial", "key of a `[[deny]]` table")):
        rows = table(section(reference("files"), "known_defects.toml"), head)
        needed = {name for name, field in fields(definition(name)).items() if needs_a_value(field)}
        assert {codes(row[head])[0] for row in rows if row["must be given"] == "yes"} == needed, name


def test_the_environment_variables_are_those_of_the_code() -> None:
    source = "\n".join(SOURCES.values())
    in_code = {*re.findall(r"environ(?:ment)?(?:\.get\(|\[)['\"]([A-Z_]+)['\"]|\"(GDN_VERIFY_[A-Z]\w*)\"", source)}
    rows = [row for rows in tables(section(reference("files"), "Environment variables")) for row in rows]
    in_page = {*code_column(rows, "variable")}
    assert {first or second for first, second in in_code} - in_page == set()
    assert [name for name in sorted(in_page) if not re.search(rf"\b{name}\b", source)] == []
