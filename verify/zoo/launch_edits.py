"""Launches of interpreted Triton kernels: record their arguments, writes and executed statements, and replace a kernel by an edit.

Nothing is written to any file. Triton's interpreter compiles every kernel from text; an edited kernel is compiled in the same way
and replaces the original in the interpreter's table of functions. A recorded launch runs again on copies of its arguments. The
interpreter (verify/interpreter/) refuses every access outside these copies.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.interpreter import internals
from verify.interpreter.internals import get, put
from verify.zoo.edits import Edit, dedented, until_def

# A statement, as (kernel key, line in its file, 0). If the column is not 0, a branch of a conditional expression that begins there.
Place = tuple[str, int, int]
_MARKER = "_gdn_verify_executed"
MOST_BYTES = 2**28  # the memory of a launch with more is not copied: far views reserve more than a machine has


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function in Triton's language that a launch runs: a kernel, or a function that kernels call.

    `first` is the line of its def in the file, `source` its text without decorators.
    """

    name: str
    file: str
    first: int
    source: str
    function: Any = dataclasses.field(compare=False, repr=False)

    @property
    def key(self) -> str:
        """The unique name of the function: file and name."""
        return f"{self.file}:{self.name}"

    def line(self, edit: Edit) -> int:
        """The line in the file of the statement or branch that is edited."""
        return self.first + edit.line - 1

    def place(self, edit: Edit) -> Place:
        """The statement that an edit changes, or the branch of a conditional expression in it."""
        return self.key, self.line(edit), edit.column

    def diff(self, edit: Edit) -> str:
        """The edit as a unified diff without context."""
        first, old, new = edit.lines(self.source)
        at = self.first + first - 1
        head = [f"--- a/{self.file}", f"+++ b/{self.file}", f"@@ -{at},{len(old)} +{at},{len(new)} @@ {self.name}"]
        return "\n".join([*head, *(f"-{line}" for line in old), *(f"+{line}" for line in new)])


@dataclasses.dataclass
class Launch:
    """A recorded launch: its arguments, with each memory's bytes before and after it.

    Tensors among the arguments are stored as (memory, dtype, offset, shape, strides). A launch with over MOST_BYTES of memory is
    recorded without its memory, and cannot be repeated.
    """

    function: Any
    names: list[str]
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    before: list[Tensor]
    after: list[Tensor]
    executed: frozenset[Place]

    @property
    def repeatable(self) -> bool:
        """Whether the launch was recorded with its memory."""
        return bool(self.before)

    @property
    def bytes(self) -> int:
        """The bytes of memory that this record holds."""
        return sum(x.numel() for x in self.before) + sum(x.numel() for x in {id(x): x for x in self.after}.values())

    def differs(self) -> bool:
        """Whether a repeatable launch, repeated on copies with the present functions, writes other bits or raises."""
        memories = [memory.clone() for memory in self.before]
        arguments = {name: _rebuilt(value, memories) for name, value in self.arguments.items()}
        function = get("InterpretedFunction.rewritten_fn")[self.function]
        try:
            with np.errstate(all="ignore"):
                get("interpreter.GridExecutor")(function, self.names, self.grid)(**arguments)
        except Exception:  # any exception is a difference, because the recorded launch raised none
            return True
        return not all(torch.equal(got, want) for got, want in zip(memories, self.after, strict=True))


@dataclasses.dataclass(frozen=True)
class _Tensor:
    memory: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuilt(value: Any, memories: list[Tensor]) -> Any:
    if not isinstance(value, _Tensor):
        return value
    storage = memories[value.memory].untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.offset, value.shape, value.strides)


@functools.cache
def watch() -> "Watch":
    """The only Watch of this process. First call it after verify.interpreter.install() and before any kernel is launched."""
    return Watch()


class Watch:
    """Records the launches of this process: the `kernels` that were called, by key, and the places `executed`.

    Inside `watching`, launches that execute a wanted place are kept in `launches`.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.launches: list[Launch] = []
        self.executed: set[Place] = set()
        self._places: set[Place] = set()
        self._wanted: set[Place] | None = None
        transform, rewrite = get("FunctionRewriter._transform_ast"), get("InterpretedFunction.rewrite")
        launch = get("GridExecutor.__call__")

        def transform_ast(rewriter: Any, source: str) -> ast.Module:
            tree: ast.Module = transform(rewriter, source)
            key = _key(rewriter.fn)
            if key is not None:
                rewriter.fn.__globals__[_MARKER] = self._places.add
                _Marked(key).visit(tree)
                ast.fix_missing_locations(tree)
            return tree

        def rewritten(function: Any) -> Any:
            key = _key(function.fn)
            if key is not None and key not in self.kernels:
                lines, first = inspect.getsourcelines(function.fn)
                file, _, name = key.rpartition(":")
                self.kernels[key] = Kernel(name, file, first + until_def(lines), dedented(lines), function)
            return rewrite(function)

        def call(executor: Any, *args: Any, **kwargs: Any) -> None:
            if self._wanted is None:
                launch(executor, *args, **kwargs)
            else:
                self._launch(launch, executor, args, kwargs)

        put("FunctionRewriter._transform_ast", transform_ast)
        put("InterpretedFunction.rewrite", rewritten)
        put("GridExecutor.__call__", call)

    @contextlib.contextmanager
    def watching(self, wanted: Iterable[Place] = ()) -> Iterator[None]:
        """A context that records launches which execute one of the `wanted` places. It clears the earlier `launches`."""
        self.launches = []
        self._wanted = set(wanted)
        try:
            yield
        finally:
            self._wanted = None

    def _launch(self, plain: Any, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = set(inspect.getfullargspec(executor.fn).args)
        values = inspect.getcallargs(executor.fn, *args, **{name: value for name, value in kwargs.items() if name in known})
        arguments, storages = _described(values)
        copied = storages if sum(storage.nbytes() for storage in storages) <= MOST_BYTES else []
        before = [_bytes(storage).clone() for storage in copied]
        self._places.clear()
        plain(executor, *args, **kwargs)
        executed = frozenset(self._places)
        self.executed |= executed
        if not executed & (self._wanted or set()):
            return
        after = [
            old if torch.equal(old, now := _bytes(storage)) else now.clone() for old, storage in zip(before, copied, strict=True)
        ]
        function = next(fn for fn, rewritten in get("InterpretedFunction.rewritten_fn").items() if rewritten is executor.fn)
        self.launches.append(Launch(function, executor.arg_names, tuple(executor.grid), arguments, before, after, executed))


def exchange(kernel: Kernel, edit: Edit) -> None:
    """Replace a kernel by its edited source in this process. Raises SyntaxError, or what the compilation raises."""
    rewriter = kernel.function.rewriter
    kernel.function.rewrite()  # sets the rewriter's data about the file
    rewritten = internals.compiled(rewriter, edit.of(kernel.source))
    get("InterpretedFunction.rewritten_fn")[kernel.function.fn] = rewritten


def _key(function: Any) -> str | None:
    """A name of a function that is the same on every machine; None for Triton's own functions."""
    module = function.__module__ or ""
    if module.partition(".")[0] == "triton":
        return None
    return f"{module.replace('.', '/')}.py:{function.__name__}"


def _described(values: dict[str, Any]) -> tuple[dict[str, Any], list[torch.UntypedStorage]]:
    """The arguments, with each tensor as a place in a memory, and the list of memories. Tensors may share a memory."""
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
    arguments = dict(values)
    for name, value in values.items():
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            index, _ = storages.setdefault(storage.data_ptr(), (len(storages), storage))
            arguments[name] = _Tensor(
                index, value.dtype, int(value.storage_offset()), tuple(map(int, value.shape)), tuple(map(int, value.stride()))
            )
    return arguments, [storage for _, storage in storages.values()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Marked(ast.NodeVisitor):
    """Inserts a call that records the place before each statement and each branch of a conditional expression."""

    def __init__(self, key: str) -> None:
        self.key = key

    def visit(self, node: ast.AST) -> None:
        self.generic_visit(node)
        if isinstance(node, ast.Module):
            return
        for field in ("body", "orelse"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                marked = [(ast.copy_location(ast.Expr(self._mark(statement)), statement), statement) for statement in statements]
                setattr(node, field, [part for pair in marked for part in pair])
            elif isinstance(node, ast.IfExp) and isinstance(statements, ast.expr):
                told = self._mark(statements, statements.col_offset)  # returns None, so `or` goes on to the branch
                setattr(node, field, ast.copy_location(ast.BoolOp(ast.Or(), [told, statements]), statements))

    def _mark(self, node: ast.stmt | ast.expr, column: int = 0) -> ast.Call:
        place = ast.Tuple([ast.Constant(self.key), ast.Constant(node.lineno), ast.Constant(column)], ast.Load())
        return ast.Call(ast.Name(_MARKER, ast.Load()), [place], [])
