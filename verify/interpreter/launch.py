"""Launches: all programs of a grid at once where that is possible, and otherwise one after another, which is the reference."""

import collections
import contextlib
import inspect
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import _normalize_ty

from verify.interpreter import operations
from verify.interpreter.grid import SLICE, Function, Machine
from verify.interpreter.memory import Alone, Memory, Rewatch, Span, Untracked, span_of
from verify.interpreter.memory import tensors as tensors_in
from verify.interpreter.operations import Diverges, GridBuilder, Unbatchable
from verify.interpreter.races import Race, Suspect, conflict

SEQUENTIAL = "GDN_VERIFY_INTERPRETER"  # in a process's environment, "sequential": programs run one after another

fallbacks: collections.Counter[tuple[str, str]] = collections.Counter()  # launches that ran one after another: kernel, why
_machine: Machine | None = None
# The arguments of each kernel that it was seen to store to after it had loaded from them: loads of these are looked at.
_stored_after_loads: dict[Any, set[str]] = {}


def patch() -> None:
    """From now on launches in this process run here."""
    tensor, semantic = tl.tensor, interpreter.interpreter_semantic
    plain = {name: getattr(tensor, name) for name in ("__bool__", "__index__", "T")}
    plain_reduce, plain_scan = tl.reduce, tl.associative_scan

    tensor.__bool__ = lambda self: operations.truth(self) if _machine else plain["__bool__"](self)
    tensor.__index__ = lambda self: operations.number(self) if _machine else plain["__index__"](self)
    tensor.T = property(lambda self: operations.transposed(self) if _machine else plain["T"].__get__(self))

    def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **options: Any) -> Any:  # noqa: A002, FBT002 - Triton's
        if not _machine:
            return plain_reduce(input, axis, combine_fn, keep_dims, **options)
        values = input if isinstance(input, (tuple, tl.tuple)) else (input,)
        made = operations.reduced(tuple(values), _plain(axis), combine_fn, keep_dims=bool(_plain(keep_dims)))
        return made if isinstance(input, (tuple, tl.tuple)) or len(made) > 1 else made[0]

    def scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **options: Any) -> Any:  # noqa: A002, FBT002 - Triton's
        if not _machine:
            return plain_scan(input, axis, combine_fn, reverse, **options)
        values = input if isinstance(input, (tuple, tl.tuple)) else (input,)
        made = operations.scanned(tuple(values), _plain(axis), combine_fn, reverse=bool(_plain(reverse)))
        return made if isinstance(input, (tuple, tl.tuple)) else made[0]

    for language in (tl, tl.core):
        language.reduce, language.associative_scan = reduce, scan

    compile_and_exec = interpreter.FunctionRewriter._compile_and_exec

    def compiled(self: Any, tree: Any) -> Any:
        made = compile_and_exec(self, tree)
        made.gdn_function = Function(tree.body[0], self.filename, made.__globals__, inspect.signature(made))
        return made

    interpreter.FunctionRewriter._compile_and_exec = compiled
    called = interpreter.InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        machine = _machine
        if machine is None:
            return called(self, *args, **kwargs)
        interpreter._patch_lang(self.fn)
        made = self.rewrite()
        function = getattr(made, "gdn_function", None)
        if function is None or not function.branches or self.fn.__module__.startswith("triton."):
            effects = machine.builder.effects
            try:
                return made(*args, **kwargs)
            except Diverges:
                if function is None or machine.builder.effects != effects:
                    raise Unbatchable(f"programs that part in {self.fn.__name__}") from None
        given = function.signature.bind(*args, **kwargs)
        given.apply_defaults()
        return machine.call(function, given.arguments)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = _launch


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _launch(self: Any, *given: Any, **named: Any) -> None:
    """`GridExecutor.__call__`."""
    known = inspect.getfullargspec(self.fn).args
    named = {name: value for name, value in named.items() if name in known}
    hosted, hosted_named = self._init_args_hst(given, named)
    for hook in self.pre_run_hooks:
        hook(*hosted, **hosted_named)
    interpreter._patch_lang(self.fn)
    raw = inspect.getcallargs(self.fn, *hosted, **hosted_named)
    arguments = {name: value if name in self.constexprs else interpreter._implicit_cvt(value) for name, value in raw.items()}
    grid = self.grid(arguments) if callable(self.grid) else self.grid
    assert len(grid) <= 3, "grid must have at most 3 dimensions"
    x, y, z = (int(size) for size in (*grid, 1, 1, 1)[:3])
    tensors: dict[Span, list[str]] = {}
    for name, value in raw.items():
        for tensor in tensors_in(value):
            tensors.setdefault(span_of(tensor), []).append(name)
    if not _together(self.fn, arguments, (x, y, z), tensors):
        _one_by_one(self.fn, arguments, (x, y, z))
    self._restore_args_dev(given, hosted, named, hosted_named)


def _one_by_one(function: Any, arguments: dict[str, Any], grid: tuple[int, int, int]) -> None:
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*grid)
    try:
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    builder.set_grid_idx(x, y, z)
                    function(**arguments)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _together(function: Any, arguments: dict[str, Any], grid: tuple[int, int, int], tensors: dict[Span, list[str]]) -> bool:
    """Whether all programs ran at once. If not, memory is as it was before the launch. Race if two of them race."""
    made = getattr(function, "gdn_function", None)
    if made is None or os.environ.get(SEQUENTIAL) == "sequential":
        return False
    while True:
        watched = _stored_after_loads.setdefault(function, set())
        memory = Memory(span for span, names in tensors.items() if watched.intersection(names))
        try:
            _run(made, arguments, grid, range(math.prod(grid)), memory)
            if not memory.suspects:
                return True
            memory.rollback()
            reason = "programs that may race"
        except Rewatch as surprise:
            memory.rollback()
            watched.update(tensors.get(surprise.span, ()))
            if surprise.span in tensors:
                continue
            reason = "a store to memory that is no argument's"
        except Exception as error:
            # Whatever it was, the reference decides: it raises what the kernel does wrong, in the words and at the place that it has.
            if os.environ.get("GDN_DEBUG"):
                raise
            memory.rollback()
            reason = str(error) if isinstance(error, (Unbatchable, Untracked)) else type(error).__name__
        break
    for suspect in memory.suspects:
        _settle(suspect, function, made, arguments, grid, tensors)
    fallbacks[function.__name__, reason] += 1
    return False


def _run(made: Function, arguments: dict[str, Any], grid: tuple[int, int, int], programs: Sequence[int], memory: Memory) -> None:
    builder = GridBuilder(memory)
    builder.set_grid_dim(*grid)
    for first in range(0, len(programs), SLICE):
        machine = Machine(builder, grid, np.array(programs[first : first + SLICE]))
        with _running(machine):
            machine.call(made, arguments)


def _settle(
    suspect: Suspect,
    function: Any,
    made: Function,
    arguments: dict[str, Any],
    grid: tuple[int, int, int],
    tensors: dict[Span, list[str]],
) -> None:
    """Race if two programs, each run alone, are found to be in conflict; memory is left as it was."""
    traces = []
    for program in suspect.programs:
        memory = Alone()
        try:
            _run(made, arguments, grid, [program], memory)
        except Exception:  # the reference will raise it
            memory.rollback()
            return
        traces.append(memory.finish())
    one, other = traces
    for span in one.keys() & other.keys():
        found = conflict(one[span], other[span])
        if found is not None:
            did, does, byte = found
            names = [f"program {tuple(int(each) for each in np.unravel_index(program, grid))}" for program in suspect.programs]
            both = (
                f"{names[0]} and {names[1]} both {did.removesuffix('s')}"
                if did == does
                else f"{names[0]} {did} and {names[1]} {does}"
            )
            where = f"byte {byte} of {' or '.join(tensors.get(span, ['a tensor']))}"
            raise Race(f"{function.__name__}: {both} {where} ({suspect.place})")


@contextlib.contextmanager
def _running(machine: Machine) -> Iterator[None]:
    global _machine
    semantic = interpreter.interpreter_semantic
    before, outer = semantic.builder, _machine
    semantic.builder, _machine = machine.builder, machine
    try:
        yield
    finally:
        semantic.builder, _machine = before, outer
