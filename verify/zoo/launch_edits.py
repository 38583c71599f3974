"""Launches: what interpreted Triton kernels are given and what they write, which statements run, and how one is exchanged.

Nothing is written to any file: a mutated kernel is compiled as Triton's interpreter compiles every kernel, from text, and stands in
its table of functions in place of the right one. A launch that was watched runs again on copies of what it was given; the
interpreter (verify/interpreter.py) lets none of its accesses leave them.
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

from verify.zoo.edits import Edit, dedented, until_def

# A kernel and a line of its file: a statement. With a column besides 0, a branch of a conditional expression that begins there.
Place = tuple[str, int, int]
_MARKER = "_gdn_verify_executed"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function in Triton's language that a launch runs: a kernel, or one that kernels call."""

    name: str
    file: str
    first: int
    source: str
    function: Any = dataclasses.field(compare=False, repr=False)

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.file}:{self.name}"

    def line(self, edit: Edit) -> int:
        """The line of the file where what is edited begins."""
        return self.first + edit.line - 1

    def place(self, edit: Edit) -> Place:
        """The statement that an edit changes, or the branch in it."""
        return self.key, self.line(edit), edit.column

    def diff(self, edit: Edit) -> str:
        """The edit as a unified diff without context."""
        first, old, new = edit.lines(self.source)
        at = self.first + first - 1
        head = [f"--- a/{self.file}", f"+++ b/{self.file}", f"@@ -{at},{len(old)} +{at},{len(new)} @@ {self.name}"]
        return "\n".join([*head, *(f"-{line}" for line in old), *(f"+{line}" for line in new)])


@dataclasses.dataclass
class Launch:
    """A launch: the arguments, tensors as (memory, dtype, offset, shape, strides), and each memory's bytes before and after."""

    function: Any
    names: list[str]
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    before: list[Tensor]
    after: list[Tensor]
    executed: frozenset[Place]

    @property
    def bytes(self) -> int:
        """What it holds."""
        return sum(x.numel() for x in self.before) + sum(x.numel() for x in {id(x): x for x in self.after}.values())

    def differs(self) -> bool:
        """Whether it writes other bits on copies of what it was given, with the functions as they are now, or raises."""
        from triton.runtime.interpreter import GridExecutor, InterpretedFunction

        memories = [given.clone() for given in self.before]
        arguments = {name: _rebuilt(value, memories) for name, value in self.arguments.items()}
        function = InterpretedFunction.rewritten_fn[self.function]
        try:
            with np.errstate(all="ignore"):
                GridExecutor(function, self.names, self.grid)(**arguments)
        except Exception:  # whatever it raises, the launch that was watched did not
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
    """The one watch of this process. Ask for it after verify/interpreter.py is installed and before any kernel is launched."""
    return Watch()


class Watch:
    """What the launches of this process do: the `kernels` that were called, by their keys, and the places `executed`.

    What is launched inside `watching` is kept in `launches`, if it executes a place that is wanted.
    """

    def __init__(self) -> None:
        from triton.runtime.interpreter import FunctionRewriter, GridExecutor, InterpretedFunction

        self.kernels: dict[str, Kernel] = {}
        self.launches: list[Launch] = []
        self.executed: set[Place] = set()
        self._places: set[Place] = set()
        self._wanted: set[Place] | None = None
        transform, rewrite, launch = FunctionRewriter._transform_ast, InterpretedFunction.rewrite, GridExecutor.__call__

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

        FunctionRewriter._transform_ast, InterpretedFunction.rewrite, GridExecutor.__call__ = transform_ast, rewritten, call

    @contextlib.contextmanager
    def watching(self, wanted: Iterable[Place] = ()) -> Iterator[None]:
        """Watch what is done inside; `launches` are those of the last time."""
        self.launches = []
        self._wanted = set(wanted)
        try:
            yield
        finally:
            self._wanted = None

    def _launch(self, plain: Any, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        known = set(inspect.getfullargspec(executor.fn).args)
        given = inspect.getcallargs(executor.fn, *args, **{name: value for name, value in kwargs.items() if name in known})
        arguments, storages = _described(given)
        before = [_bytes(storage).clone() for storage in storages]
        self._places.clear()
        plain(executor, *args, **kwargs)
        executed = frozenset(self._places)
        self.executed |= executed
        if not executed & (self._wanted or set()):
            return
        after = [
            old if torch.equal(old, now := _bytes(storage)) else now.clone() for old, storage in zip(before, storages, strict=True)
        ]
        function = next(fn for fn, made in InterpretedFunction.rewritten_fn.items() if made is executor.fn)
        self.launches.append(Launch(function, executor.arg_names, tuple(executor.grid), arguments, before, after, executed))


def exchange(kernel: Kernel, edit: Edit) -> None:
    """From now on this process runs the edited source in place of the kernel's. SyntaxError, or what compiling it raises."""
    from triton.runtime.interpreter import InterpretedFunction

    rewriter = kernel.function.rewriter
    kernel.function.rewrite()  # it sets what the rewriter knows of the file
    made = rewriter._compile_and_exec(rewriter._transform_ast(edit.of(kernel.source)))
    InterpretedFunction.rewritten_fn[kernel.function.fn] = made


def _key(function: Any) -> str | None:
    """A name for a function that is the same on every machine; None for Triton's own."""
    module = function.__module__ or ""
    if module.partition(".")[0] == "triton":
        return None
    return f"{module.replace('.', '/')}.py:{function.__name__}"


def _described(given: dict[str, Any]) -> tuple[dict[str, Any], list[torch.UntypedStorage]]:
    """Arguments with tensors as places in memories, and the memories; tensors may share one."""
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
    arguments = dict(given)
    for name, value in given.items():
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
    """Says before each statement, and each branch of a conditional expression, that it is executed."""

    def __init__(self, key: str) -> None:
        self.key = key

    def visit(self, node: ast.AST) -> None:
        self.generic_visit(node)
        if isinstance(node, ast.Module):
            return
        for field in ("body", "orelse"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                marked = [(ast.copy_location(ast.Expr(self._mark(each)), each), each) for each in statements]
                setattr(node, field, [part for pair in marked for part in pair])
            elif isinstance(node, ast.IfExp) and isinstance(statements, ast.expr):
                told = self._mark(statements, statements.col_offset)  # it returns None
                setattr(node, field, ast.copy_location(ast.BoolOp(ast.Or(), [told, statements]), statements))

    def _mark(self, node: ast.stmt | ast.expr, column: int = 0) -> ast.Call:
        place = ast.Tuple([ast.Constant(self.key), ast.Constant(node.lineno), ast.Constant(column)], ast.Load())
        return ast.Call(ast.Name(_MARKER, ast.Load()), [place], [])
