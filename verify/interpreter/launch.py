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
from verify.interpreter.patches import SEQUENTIAL
from verify.interpreter.races import Race, Suspect, conflict

# Launches whose programs ran one after another though they were to run together: "kernel: why".
one_by_one: collections.Counter[str] = collections.Counter()
Grid = tuple[int, int, int]
Tensors = dict[Span, dict[str, Any]]  # a launch's tensors, by their memory and the names of its arguments
_machine: Machine | None = None
# The arguments of each kernel that it was seen to store to after it had loaded from them: loads of these are looked at.
_stored_after_loads: dict[Function, set[str]] = {}


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
    known = inspect.signature(self.fn).parameters
    named = {name: value for name, value in named.items() if name in known}
    hosted, hosted_named = self._init_args_hst(given, named)
    for hook in self.pre_run_hooks:
        hook(*hosted, **hosted_named)
    interpreter._patch_lang(self.fn)
    raw = inspect.getcallargs(self.fn, *hosted, **hosted_named)
    arguments = {name: value if name in self.constexprs else interpreter._implicit_cvt(value) for name, value in raw.items()}
    sizes = self.grid(arguments) if callable(self.grid) else self.grid
    assert len(sizes) <= 3, "grid must have at most 3 dimensions"
    x, y, z = (int(size) for size in (*sizes, 1, 1, 1)[:3])
    tensors: Tensors = {}
    for name, value in raw.items():
        for tensor in tensors_in(value):
            tensors.setdefault(span_of(tensor), {})[name] = tensor
    grid = (x, y, z)
    reason = "sequential" if os.environ.get(SEQUENTIAL) == "sequential" else _together(self.fn, arguments, grid, tensors)
    if reason:
        _one_by_one(self.fn, arguments, grid)
    if reason not in ("", "sequential"):
        one_by_one[f"{self.fn.__name__}: {reason}"] += 1
    self._restore_args_dev(given, hosted, named, hosted_named)


def _one_by_one(function: Any, arguments: dict[str, Any], grid: Grid) -> None:
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


def _together(function: Any, arguments: dict[str, Any], grid: Grid, tensors: Tensors) -> str:
    """Run all programs at once; why they could not, with memory as it was before the launch, else "". Race if two of them race."""
    made: Function | None = getattr(function, "gdn_function", None)
    if made is None:
        return "no source"
    watched = _stored_after_loads.setdefault(made, set())
    memory = Memory(span for span, named in tensors.items() if watched & named.keys())
    try:
        _run(made, arguments, grid, range(math.prod(grid)), memory)
    except Rewatch as surprise:
        memory.rollback()
        if surprise.span not in tensors:
            return "a store to memory that is no argument's"
        watched.update(tensors[surprise.span])
        return _together(function, arguments, grid, tensors)
    except Exception as error:
        # Whatever it was, the reference decides: it raises what the kernel does wrong, in the words and at the place that it has.
        memory.rollback()
        if os.environ.get("GDN_DEBUG"):
            raise
        return str(error) if isinstance(error, (Unbatchable, Untracked)) else type(error).__name__
    if not memory.suspects:
        return ""
    memory.rollback()
    for suspect in memory.suspects:
        _settle(suspect, made, arguments, grid, tensors)
    return "programs that touch the same memory"


def _run(made: Function, arguments: dict[str, Any], grid: Grid, programs: Sequence[int], memory: Memory) -> None:
    builder = GridBuilder(memory)
    builder.set_grid_dim(*grid)
    for first in range(0, len(programs), SLICE):
        machine = Machine(builder, grid, np.array(programs[first : first + SLICE]))
        with _running(machine):
            machine.call(made, arguments)


def _settle(suspect: Suspect, made: Function, arguments: dict[str, Any], grid: Grid, tensors: Tensors) -> None:
    """Race if two programs, each run alone, are found to be in conflict; memory is left as it was."""
    traces = []
    programs = sorted(suspect.programs)
    for program in programs:
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
            axes = max(1, len(grid) - next((at for at, size in enumerate(reversed(grid)) if size > 1), len(grid)))
            names = [tuple(int(each) for each in np.unravel_index(program, grid))[:axes] for program in programs]
            did, does = found[:2]
            verbs = f"program {names[0]} and {names[1]} both {did}" if did == does else f"program {names[0]} {did}s and {names[1]} {does}s"
            raise Race(f"{verbs} {_element(tensors[span], found[2])}", suspect.place)


def _element(named: dict[str, Any], byte: int) -> str:
    """What lies at a byte of a memory, as an element of the first argument that has it."""
    for name, tensor in named.items():
        rest, index = byte // tensor.element_size() - tensor.storage_offset(), []
        for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: -axis[1]):
            index.append(rest // stride if stride else 0)
            rest -= index[-1] * stride
            if not 0 <= index[-1] < size:
                break
        else:
            strides = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
            places = [index[strides.index(axis)] for axis in range(tensor.dim())]
            return f"{name}[{', '.join(map(str, places))}]"
    return f"byte {byte} of the memory of {' or '.join(named)}"


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
