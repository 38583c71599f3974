"""The records of measurements in docs/results.json, from which benchmarks/results.py makes docs/results.md.

A benchmark with --record puts its own records into the file. A record replaces the one with the same table, what, machine and
number of GPUs, and keeps its target, which a person sets.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "results.json"
Record = dict[str, Any]
# The tables of benchmarks/results.md.j2. "limits of KAPPA" has numbers of a paragraph.
TABLES = (
    *("false alarms", "defects", "mutants", "speed", "interpreter", "versions", "oracle", "packed", "tolerances", "accuracy"),
    *("limits of KAPPA", "errors in sigma", "claims", "pull requests", "blocks"),
)
# Those whose values have names, which are the heads of columns.
NAMED = ("mutants", "interpreter", "versions", "tolerances", "errors in sigma", "claims", "pull requests", "blocks")
NEEDED = ("table", "what", "command", "machine", "date", "value")
# The fields of a record, in the order of the file. `shared` says that other programs used the machine, `versions` are those that
# differ from the machine's, and `sample` says on what a value was measured. A spread is the smallest and the largest value, or the
# difference of the two.
FIELDS = (
    *("table", "what", "command", "machine", "gpus", "shared", "versions", "date"),
    *("sample", "cases", "blind", "value", "unit", "spread", "target", "gib", "note"),
)


def read(path: pathlib.Path) -> dict[str, Any]:
    """The machines and records in a file. ValueError, in one line, names the record and what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        machines, records = dict(data["machines"]), list(data["records"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path.name} must have machines and records: {type(error).__name__}: {error}") from None
    for name, about in machines.items():
        if not isinstance(about, dict) or not {"what", "versions"} <= {*about}:
            raise ValueError(f"machine {name} of {path.name} must have what and versions, got {about!r}")
    numbers: dict[tuple[object, ...], int] = {}
    for number, record in enumerate(records, 1):
        name = f"record {number} of {path.name}"
        if wrong := fault(record, machines):
            raise ValueError(f"{name} {wrong}")
        if (first := numbers.setdefault(identity(record), number)) != number:
            raise ValueError(f"{name} must differ from record {first} in table, what, machine or gpus, got what={record['what']!r}")
    return {"machines": machines, "records": records}


def fault(record: object, machines: Mapping[str, Any]) -> str:
    """What is wrong with a record, as the end of a sentence. Empty if nothing is."""
    if not isinstance(record, dict):
        return f"must be an object, got {record!r}"
    name = f"(what={record.get('what')!r})"
    for field in NEEDED:
        if field not in record or record[field] in ("", None):
            return f"must have {field}, got none {name}"
        if field != "value" and not isinstance(record[field], str):
            return f"must have {field} as a text, got {record[field]!r} {name}"
    if unknown := [field for field in record if field not in FIELDS]:
        return f"must have no fields but {', '.join(FIELDS)}, got {unknown[0]} {name}"
    for field, choices in (("table", TABLES), ("machine", machines)):
        if record[field] not in choices:
            return f"must have {field}, one of {', '.join(choices)}, got {record[field]!r} {name}"
    if isinstance(record["value"], dict) != (record["table"] in NAMED):
        kind = "figures by the heads of columns" if record["table"] in NAMED else "a figure, a list of figures or a text"
        return f"must have value, {kind}, got {record['value']!r} {name}"
    if record["table"] == "false alarms" and not isinstance(record.get("cases"), int):
        return f"must have cases, a number, got {record.get('cases')!r} {name}"
    try:
        datetime.date.fromisoformat(record["date"])
    except ValueError:
        return f"must have date as 2026-11-23, got {record['date']!r} {name}"
    return ""


def identity(record: Record) -> tuple[object, ...]:
    """What two records may not have in common."""
    return (*(record[field] for field in ("table", "what", "machine")), record.get("gpus"))


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a benchmark, with those that record and, as `command`, what the record says was run.

    What is wrong with them or with the file is bad usage, before anything is measured.
    """
    recording = argparse.ArgumentParser(add_help=False)
    recording.add_argument("--json")
    recording.add_argument("--what")
    for either in (parser, recording):
        either.add_argument("--record", type=pathlib.Path, metavar="FILE", help="put what was measured into this file of records")
        either.add_argument("--machine", metavar="NAME", help="of the records: a machine of that file")
        either.add_argument("--shared", action="store_true", help="of the records: other programs use the machine")
    options = parser.parse_args()
    options.command = f"`python -m benchmarks.{pathlib.Path(sys.argv[0]).stem} {shlex.join(recording.parse_known_args()[1])}`"
    options.command = options.command.replace(" `", "`")
    if options.record:
        try:
            machines = read(options.record)["machines"]
        except ValueError as error:
            parser.error(str(error))
        if options.machine not in machines:
            parser.error(f"--machine must be one of the machines of --record, {'; '.join(machines)}, got {options.machine}")
    return options


def put(options: argparse.Namespace, table: str, measured: Mapping[str, Record], *, decimals: int = 0, whole: bool = False) -> None:
    """Put records, by what they measure, into the file of --record, if there is one. `whole`: they are all records of the table."""
    if not options.record:
        return
    data = read(options.record)
    records: list[Record] = data["records"]
    about = {"command": options.command, "machine": options.machine, "date": datetime.date.today().isoformat()}
    about |= {"shared": True} if options.shared else {}
    about |= {"versions": others} if (others := other_versions(data["machines"][options.machine]["versions"])) else {}
    targets = {identity(record): {"target": record["target"]} for record in records if "target" in record}
    new: dict[tuple[object, ...], Record] = {}
    for what, fields in measured.items():
        record = {"table": table, "what": what, **about, **rounded(fields, decimals)}
        new[identity(record)] = record | targets.get(identity(record), {})
    places = [place for place, record in enumerate(records) if record["table"] == table] or [len(records)]
    if whole:
        data["records"] = [record for record in records if record["table"] != table]
        data["records"][places[0] : places[0]] = new.values()
    else:
        data["records"] = [new.pop(identity(record), record) for record in records]
        data["records"][places[-1] + 1 : places[-1] + 1] = new.values()  # those that replaced none
    options.record.write_text(text(data), encoding="utf-8")


def rounded(value: Any, decimals: int) -> Any:
    """A value with the numbers in it rounded, except `gib`, whose decimals are its own."""
    if isinstance(value, dict):
        return {name: part if name == "gib" else rounded(part, decimals) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part, decimals) for part in value]
    return round(value, decimals) if isinstance(value, float) else value


def other_versions(listed: Mapping[str, str]) -> dict[str, str]:
    """The versions of this environment that are not those of the machine. A listed version may have fewer digits."""
    found = {name: version(name) for name in listed}
    return {name: now for name, now in found.items() if now != listed[name] and not now.startswith(f"{listed[name]}.")}


def version(name: str) -> str:
    """The version of Python, of CUDA or of a package."""
    if name == "Python":
        return platform.python_version()
    if name == "CUDA":
        import torch

        return torch.version.cuda or "none"
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


def text(data: dict[str, Any]) -> str:
    """The machines and records as JSON, with a line for each field, so that a difference between two files can be read."""

    def lines(fields: Record) -> str:
        return ",\n".join(f"   {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())

    def order(item: tuple[str, Any]) -> int:
        return FIELDS.index(item[0])

    machines = ",\n".join(f"  {json.dumps(name)}: {{\n{lines(fields)}\n  }}" for name, fields in data["machines"].items())
    records = ",\n".join(f"  {{\n{lines(dict(sorted(record.items(), key=order)))}\n  }}" for record in data["records"])
    return f'{{\n "machines": {{\n{machines}\n }},\n "records": [\n{records}\n ]\n}}\n'
