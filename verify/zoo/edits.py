"""Edits: every change of a kernel's source at a single point, of the kinds that people make by mistake.

The source is parsed to find nodes, but the edit replaces a node's text in place, so that a diff shows the line as its author wrote
it. An edit belongs to the statement that it changes, or to a branch of a conditional expression in that statement. If no call runs
this place, no test can see the edit.

Some edits are not made because no run could show them, or because they cannot run: shapes and ranges of blocks (the compiler
refuses them), precisions of products and barriers (the interpreter has none), the cast of a stored value (the store casts anyway),
and pointers without their base.
"""

import ast
import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterator

OPERATORS = {
    "accumulation": "x += e left out, or its sign turned; x *= e left out",
    "accumulator": "a product that does not add to what it should: tl.dot(a, b, c) -> tl.dot(a, b)",
    "axis": "a sum or scan along the other axis",
    "boundary check": "a boundary_check removed",
    "cast": "x.to(dtype) -> x; .to(tl.float32) -> .to(tl.bfloat16)",
    "comparison": "< and <=, > and >= exchanged; == and != too",
    "constant": "a number one up or down; 0.0 -> 1.0; a small number tenfold",
    "exponential": "exp2 and exp exchanged",
    "factor": "a factor left out of a product",
    "flag": "if FLAG -> if not FLAG",
    "head map": "// and % exchanged, or the divisor dropped; h // (HV // H) -> h % H",
    "index name": "i_b, i_t, i_h, ... for one another; bos and eos",
    "integer cast": "a cast of integers removed",
    "loop bound": "the last turn of a loop left out",
    "mask": "a conjunct dropped, or one mask for another",
    "mask removed": "a load or store without its mask",
    "min and max": "min and max exchanged, or one side alone; a division rounded down",
    "operands": "a - b -> b - a; a / b -> b / a; tl.dot(a, b) -> tl.dot(b, a)",
    "reverse": "a scan in the other direction",
    "sibling": "a numbered block for another: b_h1, b_h2; m_tc0, m_tc1",
    "sign": "+ and - exchanged; a minus removed",
    "store": "a store removed",
    "term": "a term left out of a sum or difference",
    "transpose": "tl.trans(x) -> x",
    "where": "tl.where with its branches exchanged, or without its condition",
    "width name": "H and HV, K and V, BK and BV for one another",
}
_COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
_SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
_WIDTHS = (("H", "HV"), ("K", "V"), ("BK", "BV"), ("BT", "BC"))
_SMALL = 1e-3  # a smaller constant is taken for an eps
_UNMOVED = ("arange", "zeros", "full", "debug_barrier", "static_assert", "static_print", "device_assert", "multiple_of")
_ALONG = ("sum", "cumsum", "cumprod")  # functions with an axis
_UNSEEN = ("input_precision", "allow_tf32", "dtype", "fp_downcast_rounding", "axis", "reverse")  # not edited, or by another rule


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replaces source[start:end] by `text`. `line` is the line of the statement, where the first line of the source is 1.

    In a branch of a conditional expression, `line` and `column` are those of the branch; otherwise `column` is 0.
    """

    operator: str
    start: int
    end: int
    text: str
    line: int
    column: int = 0

    def of(self, source: str) -> str:
        """The edited source."""
        return source[: self.start] + self.text + source[self.end :]

    def lines(self, source: str) -> tuple[int, list[str], list[str]]:
        """The number of the first changed line, and the changed lines before and after the edit."""
        first = source.count("\n", 0, self.start)
        count = source.count("\n", self.start, self.end) + 1
        old, new = source.split("\n"), self.of(source).split("\n")
        after = new[first : first + count + len(new) - len(old)]
        return first + 1, old[first : first + count], after


def edits(source: str) -> list[Edit]:
    """Every edit of a function's source, in the order of the text. ValueError if the source is not exactly one function."""
    body = ast.parse(source).body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise ValueError(f"source must be one function, got {source[:40]!r}")
    found = {(edit.start, edit.end, edit.text): edit for edit in reversed(list(_Finder(source, body[0]).all()))}
    return sorted((edit for edit in found.values() if _another(source, edit)), key=lambda e: (e.start, e.end, e.operator, e.text))


def _another(source: str, edit: Edit) -> bool:
    """Whether the edit changes more than white space."""
    _, old, new = edit.lines(source)
    return [line.split() for line in old] != [line.split() for line in new]


class _Finder:
    """Walks over a function's nodes and yields the edits."""

    def __init__(self, source: str, function: ast.FunctionDef) -> None:
        self.source, self.function = source, function
        self._lines = [line.encode() for line in source.split("\n")]
        self._starts = [0]
        for line in source.split("\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._place = (0, 0)  # the line and column of the place that an edit belongs to
        self._stored: list[ast.expr] = []
        self._widths = self._exchanged([argument.arg for argument in function.args.args])
        self._known = [argument.arg for argument in function.args.args]  # the names assigned so far, in order
        self._bases = {argument.arg for argument in function.args.args if argument.annotation is None}

    @staticmethod
    def _exchanged(names: list[str]) -> dict[str, str]:
        pairs = [pair for pair in _WIDTHS if set(pair) <= set(names)]
        return {one: other for pair in pairs for one, other in (pair, pair[::-1])}

    def all(self) -> Iterator[Edit]:
        """Every edit; some occur twice."""
        yield from self._block(self.function.body)

    def _block(self, body: list[ast.stmt]) -> Iterator[Edit]:
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            yield from self._statement(statement)

    def _statement(self, node: ast.stmt) -> Iterator[Edit]:
        self._place = (node.lineno, 0)
        if isinstance(node, ast.If | ast.While):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
                yield self._edit("flag", node.test, f"not {node.test.id}")
            yield from self._expression(node.test)
            yield from self._block(node.body)
            yield from self._block(node.orelse)
        elif isinstance(node, ast.For):
            yield from self._expression(node.iter)
            self._bind(node.target)
            yield from self._block(node.body)
            yield from self._block(node.orelse)
        elif isinstance(node, ast.AugAssign):
            yield self._edit("accumulation", node, "pass")
            if type(node.op) in _SIGNS:
                sign, other = _SIGNS[type(node.op)]
                yield self._operator("accumulation", node.target, node.value, f"{sign}=", f"{other}=")
            yield from self._expression(node.value)
        elif isinstance(node, ast.Expr) and _called(node.value) == "store":
            yield self._edit("store", node, "pass")
            yield from self._expression(node.value)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", None), ast.Store):
                    yield from self._expression(child)
            for target in getattr(node, "targets", []):
                self._bind(target)

    def _bind(self, target: ast.expr) -> None:
        names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
        self._known += [name for name in names if name not in self._known]

    def _expression(self, node: ast.AST) -> Iterator[Edit]:
        make: Callable[[ast.AST], Iterator[Edit]] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        if make is not None:
            yield from make(node)
        if _called(node) in _UNMOVED:
            return
        if isinstance(node, ast.IfExp):
            yield from self._expression(node.test)
            place = self._place
            for branch in (node.body, node.orelse):
                self._place = (branch.lineno, branch.col_offset)
                yield from self._expression(branch)
            self._place = place
            return
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.Attribute) or field in ("func", "ctx"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.keyword) and child.arg in _UNSEEN:
                    continue
                if _called(node) in _ALONG and isinstance(child, ast.Constant):
                    continue
                if isinstance(child, ast.AST) and not (isinstance(node, ast.Subscript) and field == "slice"):
                    yield from self._expression(child)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from self._expression(node.func.value)

    # One method for each kind of node

    def _binop(self, node: ast.BinOp) -> Iterator[Edit]:
        left, right = self._text_of(node.left), self._text_of(node.right)
        if type(node.op) in _SIGNS:
            sign, other = _SIGNS[type(node.op)]
            yield self._operator("sign", node.left, node.right, sign, other)
            yield self._edit("term", node, left)
            if sign == "-" or left not in self._bases:
                yield self._edit("term", node, right if sign == "+" else f"(-{right})")
        if isinstance(node.op, ast.Sub | ast.Div):
            yield self._edit("operands", node, f"({right} {'-' if isinstance(node.op, ast.Sub) else '/'} {left})")
        if isinstance(node.op, ast.Mult):
            yield self._edit("factor", node, left)
            yield self._edit("factor", node, right)
        if isinstance(node.op, ast.FloorDiv | ast.Mod):
            floor = isinstance(node.op, ast.FloorDiv)
            yield self._operator("head map", node.left, node.right, "//" if floor else "%", "%" if floor else "//")
            yield self._edit("head map", node, left)
            if floor and isinstance(node.right, ast.BinOp) and isinstance(node.right.op, ast.FloorDiv):
                yield self._edit("head map", node, f"({left} % {self._text_of(node.right.right)})")
        if isinstance(node.op, ast.BitAnd):
            yield self._edit("mask", node, left)
            yield self._edit("mask", node, right)

    def _compare(self, node: ast.Compare) -> Iterator[Edit]:
        if len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            old, new = _COMPARED[type(node.ops[0])]
            yield self._operator("comparison", node.left, node.comparators[0], old, new)

    def _unaryop(self, node: ast.UnaryOp) -> Iterator[Edit]:
        if isinstance(node.op, ast.USub):
            yield self._edit("sign", node, self._text_of(node.operand))

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if isinstance(value, int):
            yield self._edit("constant", node, str(value + 1))
            if value > 0:
                yield self._edit("constant", node, str(value - 1))
        elif 0 < abs(value) < _SMALL:
            yield self._edit("constant", node, f"{10 * value:g}")
        else:
            yield self._edit("constant", node, "1.0" if value != 1 else "2.0")

    def _name(self, node: ast.Name) -> Iterator[Edit]:
        name = node.id
        if name in self._widths:
            yield self._edit("width name", node, self._widths[name])
        if name in ("bos", "eos"):
            yield self._edit("index name", node, "eos" if name == "bos" else "bos")
        for prefix, operator in (("i_", "index name"), ("m_", "mask")):
            if name.startswith(prefix) and (other := self._next(name, lambda candidate: candidate.startswith(prefix))):  # noqa: B023
                yield self._edit(operator, node, other)
        pattern = re.sub(r"\d+", "#", name)
        if pattern != name and (other := self._next(name, lambda candidate: re.sub(r"\d+", "#", candidate) == pattern)):
            yield self._edit("sibling", node, other)

    def _next(self, name: str, alike: Callable[[str], bool]) -> str | None:
        """The next name after this one, cyclically, among the assigned names for which `alike` is true; None without another."""
        names = [candidate for candidate in self._known if alike(candidate)]
        return names[(names.index(name) + 1) % len(names)] if name in names and len(names) > 1 else None

    def _call(self, node: ast.Call) -> Iterator[Edit]:
        called, texts = _called(node), [self._text(argument) for argument in node.args]
        named = {keyword.arg: keyword for keyword in node.keywords}
        if called in ("load", "store"):
            self._stored += node.args[1:] if called == "store" else []
            if "mask" in named:
                yield self._without("mask removed", node, ("mask", "other"))
            if "boundary_check" in named:
                yield self._without("boundary check", node, ("boundary_check", "padding_option"))
        if called == "to" and isinstance(node.func, ast.Attribute) and texts:
            operator = "integer cast" if texts[0] in ("tl.int32", "tl.int64") else "cast"
            if node not in self._stored:
                yield self._edit(operator, node, self._text_of(node.func.value))
            if texts[0] == "tl.float32":
                yield self._edit("cast", node.args[0], "tl.bfloat16")
        if called == "dot" and len(texts) >= 2:
            start, end = self._span(node.args[0])[0], self._span(node.args[1])[1]
            yield Edit("operands", start, end, f"{texts[1]}, {texts[0]}", *self._place)
            if len(texts) == 3:
                yield Edit("accumulator", end, self._span(node.args[2])[1], "", *self._place)
        if called == "trans" and len(texts) == 1:
            yield self._edit("transpose", node, self._text_of(node.args[0]))
        if called in ("exp", "exp2") and len(texts) == 1:
            yield self._edit("exponential", node.func, "tl.exp2" if called == "exp" else "tl.exp")
        if called == "where" and len(texts) == 3:
            start, end = self._span(node.args[1])[0], self._span(node.args[2])[1]
            yield Edit("where", start, end, f"{texts[2]}, {texts[1]}", *self._place)
            yield self._edit("where", node, self._text_of(node.args[1]))
        if called in ("cumsum", "cumprod"):
            if "reverse" in named:
                yield self._without("reverse", node, ("reverse",))
            else:
                yield self._edit("reverse", node, f"{self._text(node)[:-1]}, reverse=True)")
        if called in _ALONG:
            axes = [keyword.value for keyword in node.keywords if keyword.arg == "axis"] + node.args[1:2]
            for axis in axes:
                if isinstance(axis, ast.Constant) and axis.value in (0, 1):
                    yield self._edit("axis", axis, str(1 - axis.value))
        if isinstance(node.func, ast.Name) and called in ("min", "max") and len(texts) == 2:
            yield self._edit("min and max", node.func, "max" if called == "min" else "min")
            yield self._edit("min and max", node, self._text_of(node.args[0]))
            yield self._edit("min and max", node, self._text_of(node.args[1]))
        if called == "cdiv" and len(texts) == 2:
            yield self._edit("min and max", node, f"({self._text_of(node.args[0])} // {self._text_of(node.args[1])})")
        if called in ("range", "static_range") and texts:
            stop = node.args[0] if len(texts) == 1 else node.args[1]
            step = node.args[2] if len(texts) == 3 else None
            back = isinstance(step, ast.UnaryOp)
            yield self._edit("loop bound", stop, f"{self._text_of(stop)} {'+' if back else '-'} 1")

    # Text

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end]

    def _text_of(self, part: ast.expr) -> str:
        """The text of a part that replaces the whole or moves within it, in parentheses if it needs them."""
        text = self._text(part)
        return text if isinstance(part, ast.Name | ast.Call | ast.Subscript | ast.Attribute | ast.Constant) else f"({text})"

    def _edit(self, operator: str, node: ast.AST, text: str) -> Edit:
        return Edit(operator, *self._span(node), text, *self._place)

    def _operator(self, operator: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Edit:
        """An edit that replaces the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), self.source[start:end])
        at = start + between.index(old)
        return Edit(operator, at, at + len(old), new, *self._place)

    def _without(self, operator: str, node: ast.Call, names: tuple[str, ...]) -> Edit:
        """An edit that removes some named arguments of a call."""
        parts = [self._text(argument) for argument in node.args]
        parts += [f"{keyword.arg}={self._text(keyword.value)}" for keyword in node.keywords if keyword.arg not in names]
        return self._edit(operator, node, f"{self._text(node.func)}({', '.join(parts)})")


def _called(node: ast.AST) -> str:
    """The last name of the called function, or "" if the node is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def until_def(lines: list[str]) -> int:
    """The number of lines before a function's def, that is, of its decorators."""
    return next(number for number, line in enumerate(lines) if line.lstrip().startswith("def "))


def dedented(lines: list[str]) -> str:
    """The source of a function from its def on, without decorators and indentation, as Triton reads it."""
    return textwrap.dedent("".join(lines[until_def(lines) :])).rstrip("\n") + "\n"
