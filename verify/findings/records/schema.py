"""The JSON Schema of the lines that `--json` writes, made from the classes of records.

A later release may add keys to an object. The number in `schema` goes up if the meaning of a key changes, or a key goes.
"""

from typing import Any

import msgspec

from verify.findings.law_report import LawReport
from verify.findings.records.record import CHECK, END, LAW, SCHEMA, End, Head

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "A line of JSON that gdn-verify check and soak write"
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}  # JSON lacks the others
CLASSES = {CHECK: Head, LAW: LawReport, END: End}
TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
# Of a reach, what its JSON form has (Reach.to_json and LawReport.to_json).
VALUES = {
    "type": "object",
    "properties": {"kinds": TEXTS, "low": {"type": ["number", "null"]}, "high": {"type": ["number", "null"]}},
    "required": ["kinds", "low", "high"],
}
LINES = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer", "minimum": 1}}}
STATEMENTS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "properties": {"ran": TEXT, "never_ran": TEXT},
        "required": ["ran", "never_ran"],
    },
}


def schema() -> dict[str, Any]:
    """The schema of one line: the object of a check's beginning, of a law or of its end."""
    _, parts = msgspec.json.schema_components(CLASSES.values(), ref_template="#/$defs/{name}")
    del parts["Reach"], parts["Values"]
    parts = {name: _written(part) for name, part in sorted(parts.items())}
    for record, kind in CLASSES.items():
        part = parts[kind.__name__]
        part["properties"] = {"schema": {"const": SCHEMA}, "record": {"const": record}, **part["properties"]}
        part["required"] = [*part["properties"]]
    parts[LawReport.__name__]["properties"]["reach"] = _reach("statements", STATEMENTS)
    parts[End.__name__]["properties"]["reach"] = _reach("lines", LINES)
    choices = [{"$ref": f"#/$defs/{kind.__name__}"} for kind in CLASSES.values()]
    return {"$schema": DIALECT, "title": TITLE, "oneOf": choices, "$defs": parts}


def _written(part: Any) -> Any:
    """A part of msgspec's schema as our JSON is: every key of an object is written, and numbers may be strings."""
    if isinstance(part, list):
        return [_written(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "number":
        return dict(NUMBER)
    made = {key: _written(value) for key, value in part.items() if key not in ("default", "description", "title")}
    if "properties" in made:
        made["required"] = [*made["properties"]]
    return made


def _reach(name: str, lines: dict[str, Any]) -> dict[str, Any]:
    """The schema of a reach, in which `name` says which lines of Python ran."""
    properties = {
        "sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
        "functions": {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": VALUES}},
        "blocks": {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": {"type": "boolean"}}},
        "trouble": TEXT,
        "full": {"type": "boolean"},
        "unrecorded": TEXT,
        name: lines,
    }
    return {"type": "object", "properties": properties, "required": [*properties]}
