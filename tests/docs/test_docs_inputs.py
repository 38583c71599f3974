"""The pages of domains and of illegal input have the fields of domains and the inputs of every operation, legal and illegal."""

import pathlib
import re
import sys
import typing
from typing import Any

import pytest
import torch

from properties.books import BOOKS, Book
from tests.pages import Row, code_column, codes, headings, reference, section, table
from tests.sources import BOOK_BY_DOMAIN, BOOK_BY_NAME, definition, fields, keyword_arguments, short_repr

# docs/reference/domains.md: the fields of domains

HEADS = "heads=2 value_heads=4 key_dim=5 value_dim=6"
PACKED = "lengths=3+4 packed=yes dtype=bf16"
ONE = "lengths=3 dtype=bf16"
# Cases of each operation that together have every input in every dtype, and leave out everything optional.
CASES = {
    "rules": [
        f"{PACKED} {HEADS} state=random in_kernel=INSIDE offsets=int32 scale=one",
        f"lengths=3+3 dtype=bf16 {HEADS} gate_dtype=input in_kernel=INSIDE dt_bias=no",
        f"{PACKED} {HEADS}",
        f"{ONE} gate_dtype=input",
        f"{PACKED} {HEADS} decay=LINEAR",
        f"{ONE} gate_dtype=input decay=LINEAR",
    ],
    "causal_conv1d": [
        f"{PACKED} width=5 conv_width=3 bias=yes state=random offsets=int32 activation=silu",
        f"{PACKED} width=5",
        ONE,
    ],
    "gdn_gate": ["lengths=3+3 dtype=bf16 heads=4", f"{ONE} dt_bias=no beta=no"],
    "kda_gate": ["lengths=3+3 dtype=bf16 heads=4 width=5", f"{ONE} dt_bias=no beta=no"],
    "l2norm": ["lengths=3+3 dtype=bf16 heads=2 width=5", f"{ONE} eps=default"],
    "gated_rms_norm": ["lengths=3+3 dtype=bf16 heads=4 width=6", f"{ONE} eps=default weight=no"],
    "norm_gate_linear": ["lengths=3+3 dtype=bf16 width=6 out_width=5 bias=yes", f"{ONE} eps=default weight=no"],
    "decode": [
        f"{PACKED} {HEADS} fresh=some accepted=some block_v=8 offsets=int32 indices=int32 scale=one",
        f"{PACKED} fresh=some accepted=some gate_dtype=input",
        f"{PACKED} {HEADS} in_kernel=INSIDE state_dtype=bf16 drafts=tree indices=int32",
        f"{PACKED} {HEADS} drafts=tree",
        f"{PACKED} {HEADS} in_kernel=INSIDE dt_bias=no state_dtype=fp16",
        f"{PACKED} {HEADS} decay=LINEAR",
        f"{PACKED} gate_dtype=input decay=LINEAR",
        ONE,
    ],
    "gdn_layer": [f"{PACKED} {HEADS} conv_bias=yes cached=yes state=random offsets=int32", PACKED, ONE],
    "kda_layer": [f"{PACKED} {HEADS} conv_bias=yes cached=yes state=random offsets=int32", f"{PACKED} lower_bound=-5", ONE],
}
DTYPES = {
    "input": torch.bfloat16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
}
SINGLE_PROCESS = [
    (book, operation) for book in BOOKS if book.name not in ("paths", "traces", "calls") for operation in book.operations
]


def test_the_fields_of_a_domain_are_in_the_page_with_type_default_and_example() -> None:
    for name in BOOK_BY_DOMAIN:
        domain = BOOK_BY_DOMAIN[name].domain
        rows, types = table(section(reference("domains"), name), "field"), typing.get_type_hints(domain)
        promised = {field: known for field, known in fields(domain).items() if field != "drawing"}  # a check sets that
        assert code_column(rows, "field") == [*promised], name
        for row, field in zip(rows, promised.values(), strict=True):
            kind = types[field.name]
            type_name = kind.__name__ if type(kind) is type else re.sub(r"\b[\w.]+\.(\w+)", r"\1", str(kind))
            assert codes(row["type"]) == [type_name], field.name
            assert codes(row["default"]) == [short_repr(field.default)], field.name
            assert row["meaning"], field.name
            (code,) = codes(row["example"])
            assert [*keyword_arguments(code)] == [field.name], name
            domain(**keyword_arguments(code))


def input_rows(prefix: str, operation: str) -> dict[str, Row]:
    """The rows by field of the section whose title is the prefix and a list of operations."""
    page = reference("domains")
    titles = [words for *_, words in headings(page) if words.startswith(prefix)]
    (title,) = (title for title in titles if operation in title.removeprefix(prefix).split(", "))
    return {name: row for row in table(section(page, title), "field") for name in codes(row["field"])}


def calls(book: Book, operation: str) -> list[tuple[Any, dict[str, Any]]]:
    """Cases of an operation with their inputs."""
    gated = operation != "delta_rule"
    inside, linear = ("both", "linear") if gated else ("beta", "log")
    words = [
        line.replace("INSIDE", inside).replace("LINEAR", linear) for line in CASES["rules" if book.name == "rules" else operation]
    ]
    cases = [book.case.parse(f"{line} op={operation}") for line in words]
    return [(case, dict(case.inputs())) for case in cases]


def test_the_inputs_of_an_operation_are_those_of_the_page() -> None:
    for book, operation in SINGLE_PROCESS:
        rows, inputs = input_rows("Inputs of ", operation), [call for _, call in calls(book, operation)]
        for name in ("a", "A_log", "dt_bias", "alpha") if operation == "delta_rule" else ():  # it has no gate, and shares its table
            del rows[name]
        assert {*rows} == {name for call in inputs for name in call}, operation
        for name, row in rows.items():
            values = [call[name] for call in inputs if name in call]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            types = {type(value).__name__ for value in values if value is not None} - {"Tensor"}
            if operation != "delta_rule":
                states = {"None": any(value is None for value in values), "absent": len(values) < len(inputs)}
                assert row["may be"] == ", ".join(state for state, occurs in states.items() if occurs), (operation, name)
            if tensors:
                dtypes = {DTYPES[word] for word in row["dtype"].split(" or ")}
                assert {tensor.dtype for tensor in tensors} == dtypes, (operation, name)
            if types:
                assert codes(row["shape or type"]) == [*types], (operation, name)


def test_every_input_has_the_shape_of_the_page() -> None:
    for book, operation in SINGLE_PROCESS:
        for name, row in input_rows("Inputs of ", operation).items():
            shapes = codes(row["shape or type"])
            for case, call in calls(book, operation):
                if isinstance(tensor := call.get(name), torch.Tensor):
                    sizes = {**case.spec.sizes(case.inputs()), "N": len(case.lengths), "1": 1}
                    shape = shapes[shapes.index(operation) + 1] if operation in shapes else shapes[0]
                    terms = [axis.split(" + ") for axis in shape[1:-1].split(", ")]
                    assert tensor.shape == tuple(sum(sizes[term] for term in axis) for axis in terms), (operation, name)


RECORDER = """
import pathlib

from verify import PathAdapter, PathDomain


class Recorder(PathAdapter):
    domain = PathDomain(operation="{operation}")

    def run(self, x, place):
        names = [*x, *(f"parameters {{name}}" for name in x.get("parameters") or ())]
        pathlib.Path(__file__).with_suffix(".txt").write_text("\\n".join(names))
"""


@pytest.mark.parametrize("operation", BOOK_BY_NAME["paths"].operations)
def test_the_inputs_on_a_rank_are_those_of_the_page(
    operation: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"recorder_of_{operation}.py"
    file.write_text(RECORDER.format(operation=operation))
    monkeypatch.setattr(sys, "path", [*sys.path])
    case = f"op={operation} lengths=4+4 packed=yes conv_bias=yes deterministic=yes backward=no"
    definition("execute")(definition("Run").parse(f"law=repeats adapter={file}:Recorder {case}"))
    monkeypatch.delitem(sys.modules, file.stem)
    names = file.with_suffix(".txt").read_text().splitlines()
    rows = input_rows("Inputs on a rank: ", operation)
    assert sorted(rows) == sorted(name for name in names if " " not in name)
    parameters = codes(rows["parameters"]["meaning"]) if "parameters" in rows else []
    assert sorted(parameters) == sorted(name.removeprefix("parameters ") for name in names if " " in name)


# docs/reference/illegal-input.md


def test_the_illegal_inputs_of_a_book_are_in_the_page_and_no_other() -> None:
    for book in [book for book in BOOKS if book.name != "calls"]:
        text = section(reference("illegal-input"), book.name.capitalize())
        names = {name for operation in book.operations for name in book.illegal.names(operation)}
        assert names <= {*codes(text)}, book.name
        if book.name == "modules":
            rows = table(text, "operation")
            page = {operation: codes(row["illegal inputs"]) for row in rows for operation in codes(row["operation"])}
            assert page == {name: book.illegal.names(name) for name in book.operations if book.illegal.names(name)}, book.name
        else:
            assert {name for row in table(text, "illegal input") for name in codes(row["illegal input"])} <= names, book.name
