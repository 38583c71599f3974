"""Which blocks of interpreted Triton functions ran: bodies of branches and of loops, and branches of conditional expressions.

A call that records the block is put before its first statement when Triton's interpreter compiles a function. It is there whether
all programs run together or one after another. A branch of a conditional expression counts if it computes something. Triton's own
functions are left out.
"""

import ast
import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

_MARK = "_gdn_verify_block"
Node = TypeVar("Node", bound=ast.AST)
Block = tuple[str, str]  # a function, as "module:name", and a block: its line, or line and column; "" for the function itself
_blocks: list[Block] = []
_numbers: dict[Block, int] = {}
_ran: set[int] = set()
_of_launch: set[int] = set()  # of the current launch; one launch runs at a time
_lock = threading.Lock()
_depth = 0


def mark(tree: ast.Module, function: Any) -> None:
    """Mark the blocks of a function's tree, whose lines are those of its file, and let the function find the recorder."""
    module = function.__module__ or ""
    if module.partition(".")[0] == "triton":
        return
    key, body = f"{module}:{function.__qualname__}", tree.body[0]
    assert isinstance(body, ast.FunctionDef)
    marker = _Marker(key)
    for statement in body.body:
        marker.visit(statement)
    if marker.found:
        after_docstring = 1 if ast.get_docstring(body) is not None else 0
        body.body.insert(after_docstring, _located(ast.Expr(_call((key, ""))), body.body[0]))
        function.__globals__[_MARK] = _note


def _note(number: int) -> None:
    _ran.add(number)
    _of_launch.add(number)


def begin_launch() -> None:
    """Begin to collect the blocks of one launch."""
    _of_launch.clear()


def of_launch() -> frozenset[int]:
    """The blocks that the current launch ran so far, by their numbers."""
    return frozenset(_of_launch)


def ran(numbers: frozenset[int]) -> None:
    """Record that these blocks ran."""
    _ran.update(numbers)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, tuple[list[str], list[str]]]]:
    """Yields a dict that is filled at the end: for each function that ran inside, all of its blocks and those that ran.

    Several threads may be inside together, as simulated ranks are. Each then gets what all of them ran so far.
    """
    global _depth
    with _lock:
        if not _depth:
            _ran.clear()
        _depth += 1
    found: dict[str, tuple[list[str], list[str]]] = {}
    try:
        yield found
    finally:
        with _lock:
            _depth -= 1
            if done := {_blocks[number] for number in [*_ran]}:
                entered = {key for key, _ in done}
                for block in _blocks:
                    if block[0] in entered and block[1]:
                        every, those = found.setdefault(block[0], ([], []))
                        every.append(block[1])
                        those += [block[1]] if block in done else []


def _located(node: Node, place: ast.AST) -> Node:
    """Give a new node, and the nodes inside it that have no line, the line of `place`. Nodes from Triton's parser have theirs."""
    return ast.fix_missing_locations(ast.copy_location(node, place))


def _call(block: Block) -> ast.Call:
    """A call that records a block. It returns None."""
    if block not in _numbers:
        _numbers[block] = len(_blocks)
        _blocks.append(block)
    return ast.Call(ast.Name(_MARK, ast.Load()), [ast.Constant(_numbers[block])], [])


class _Marker(ast.NodeVisitor):
    def __init__(self, key: str) -> None:
        self.key, self.found = key, False

    def visit(self, node: ast.AST) -> None:
        self.generic_visit(node)
        if isinstance(node, ast.If | ast.For | ast.While):
            node.body = self._marked(node.body)
            is_elif = isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
            if isinstance(node, ast.If) and not is_elif:
                node.orelse = self._marked(node.orelse)
        elif isinstance(node, ast.IfExp):
            node.body, node.orelse = self._computed(node.body), self._computed(node.orelse)

    def _marked(self, body: list[ast.stmt]) -> list[ast.stmt]:
        if not body or all(isinstance(statement, ast.Pass) for statement in body):
            return body
        self.found = True
        return [_located(ast.Expr(_call((self.key, str(body[0].lineno)))), body[0]), *body]

    def _computed(self, branch: ast.expr) -> ast.expr:
        if not any(isinstance(part, ast.Call | ast.BinOp | ast.Subscript) for part in ast.walk(branch)):
            return branch
        self.found = True
        call = _call((self.key, f"{branch.lineno}:{branch.col_offset}"))  # returns None, so `or` goes on to the branch
        return _located(ast.BoolOp(ast.Or(), [call, branch]), branch)
