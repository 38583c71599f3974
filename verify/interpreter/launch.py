"""Launches of kernels: all programs of a grid run together where that is possible, and otherwise one after another.

Programs that run one after another are the reference. If the run of all programs together raises an error, memory is restored,
and the launch runs again in the reference, which raises the error that the user sees.
"""

import ast
import collections
import contextlib
import inspect
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from properties.words.sizes import MOST_ALONG_Y
from verify.interpreter import branches, internals, operations, patches
from verify.interpreter.grid import Function, Machine
from verify.interpreter.internals import get, put
from verify.interpreter.memory import Alone, Memory, Rewatch, Span, Unordered, Untracked, span_of, tensors_of
from verify.interpreter.operations import Diverges, GridBuilder, Unbatchable
from verify.interpreter.patches import TooManyPrograms, UnknownTriton
from verify.interpreter.races import LOAD, STORE, Race, Suspect, Trace, are_accepted, conflicts, writes_the_same
from verify.interpreter.repeats import Repeat

Grid = tuple[int, int, int]
Tensors = dict[Span, dict[str, Tensor]]  # a launch's tensors, by their memory and by the names of the arguments
# The largest number of block elements of all programs that run together: 256 programs with blocks of 64 x 64, whose addresses take
# 8 MiB. More programs were not faster (docs/results.md).
ELEMENTS = 1 << 20
PROGRAMS = 128  # programs that run together while the size of a kernel's blocks is unknown

MOST_ALONE = MOST_ALONG_Y  # programs that run one after another: more would take minutes, and look like a hang
MOST_PROGRAMS = (2**31 - 1, MOST_ALONG_Y, MOST_ALONG_Y)  # the largest grid that CUDA launches, along x, y and z

# Annotations of numbers, as Triton abbreviates them
INTEGERS = frozenset(f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64))
FLOATS = frozenset({"fp16", "fp32", "fp64"})

# Launches whose programs had to run one after another, counted by "kernel: why".
one_by_one: collections.Counter[str] = collections.Counter()
launches: collections.Counter[str] = collections.Counter()  # of each kernel
_blocks: dict[Function, int] = {}  # the number of elements of the largest block that a kernel has had
# The arguments that a kernel has stored to after it had loaded from them. Loads from these are recorded.
_stored_after_loads: dict[Function, set[str]] = {}
NOTHING: Mapping[Span, Trace] = MappingProxyType({})
_one_launch = threading.RLock()  # several threads may launch kernels
_machine: Machine | None = None  # the machine of the current launch


class GridTooLarge(Exception):
    """A launch has more programs along an axis of its grid than CUDA launches."""


def patch() -> None:
    """Make all interpreted launches of this process run through this module."""
    _patch_tensors()
    _patch_reductions()
    _patch_functions()
    put("GridExecutor.__call__", _launch)


def _patch_tensors() -> None:
    truth, number, transposed = get("tensor.__bool__"), get("tensor.__index__"), get("tensor.T").fget
    put("tensor.__bool__", lambda self: operations.truth(self) if _machine else truth(self))
    put("tensor.__index__", lambda self: operations.number(self) if _machine else number(self))
    put("tensor.T", property(lambda self: operations.transposed(self) if _machine else transposed(self)))


def _patch_reductions() -> None:
    plain_reduce, plain_scan = get("core.reduce"), get("core.associative_scan")

    def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **options: Any) -> Any:  # noqa: A002, FBT002 - Triton's
        if not _machine:
            return plain_reduce(input, axis, combine_fn, keep_dims, **options)
        several = isinstance(input, (tuple, tl.tuple))
        results = operations.reduced(
            tuple(input) if several else (input,), _value(axis), combine_fn, keep_dims=bool(_value(keep_dims))
        )
        return results if several or len(results) > 1 else results[0]

    def scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **options: Any) -> Any:  # noqa: A002, FBT002 - Triton's
        if not _machine:
            return plain_scan(input, axis, combine_fn, reverse, **options)
        several = isinstance(input, (tuple, tl.tuple))
        results = operations.scanned(tuple(input) if several else (input,), _value(axis), combine_fn, reverse=bool(_value(reverse)))
        return results if several else results[0]

    tl.reduce, tl.associative_scan = reduce, scan
    put("core.reduce", reduce)
    put("core.associative_scan", scan)


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, tl.constexpr) else argument


def _patch_functions() -> None:
    compile_and_exec, plain_call = get("FunctionRewriter._compile_and_exec"), get("InterpretedFunction.__call__")
    patch_lang = get("interpreter._patch_lang")

    def transformed(self: Any, source: str) -> ast.Module:
        """As Triton does it, but in one walk over the tree, since a kernel's tree has thousands of nodes."""
        tree, line = internals.rewritten(self, source)
        _put_in_file(tree, line - 1)
        return tree

    def compiled(self: Any, tree: Any) -> Any:
        branches.mark(tree, self.fn)
        function = compile_and_exec(self, tree)
        function.gdn_function = Function(tree.body[0], self.filename, function.__globals__, inspect.signature(function))
        # Of the function as written: in the rewritten one, all annotations are text.
        function.gdn_annotations = {name: internals.argument_type(kind) for name, kind in self.fn.__annotations__.items()}
        return function

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Called when a kernel calls a function in Triton's language."""
        machine = _machine
        if machine is None:
            return plain_call(self, *args, **kwargs)
        patch_lang(self.fn)
        python = self.rewrite()
        function: Function | None = getattr(python, "gdn_function", None)
        if function is None or not function.branches or self.fn.__module__.startswith("triton."):
            effects = machine.builder.effects
            try:
                return python(*args, **kwargs)
            except Diverges:
                if function is None or machine.builder.effects != effects:
                    raise Unbatchable(f"programs that part in {self.fn.__name__}") from None
        arguments = function.signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return machine.call(function, arguments.arguments)

    put("FunctionRewriter._transform_ast", transformed)
    put("FunctionRewriter._get_jit_fn_file_line", internals.place_of)
    put("FunctionRewriter._compile_and_exec", compiled)
    put("InterpretedFunction.__call__", call)


def _put_in_file(tree: ast.Module, lines: int) -> None:
    """Count the lines of a tree from so many lines further up. A node without a place gets that of the node around it."""
    todo: list[tuple[Any, tuple[int, int, int | None, int | None]]] = [(tree, (1, 0, 1, 0))]
    while todo:
        node, (line, column, last_line, last_column) = todo.pop()
        fields = vars(node)
        if "lineno" in node._attributes:
            line, column = fields.get("lineno", line), fields.get("col_offset", column)
            last_line, last_column = fields.get("end_lineno") or last_line, fields.get("end_col_offset") or last_column
            node.lineno, node.end_lineno = line + lines, None if last_line is None else last_line + lines
            node.col_offset, node.end_col_offset = column, last_column
        around = line, column, last_line, last_column
        for name in node._fields:
            value = fields.get(name)
            if isinstance(value, list):
                todo += [(part, around) for part in value if isinstance(part, ast.AST)]
            elif isinstance(value, ast.AST):
                todo.append((value, around))


def _launch(self: Any, *positional: Any, **named: Any) -> None:
    """Run a kernel on a grid. Replaces Triton's `GridExecutor.__call__`, and runs all programs together if it can.

    One launch runs at a time, because Triton's interpreter and this module keep the current launch in global variables.
    """
    with _one_launch:
        trace = sys.gettrace()
        measures = type(trace).__module__.partition(".")[0] == "coverage"
        if measures:  # else the trace function would run for each line of the interpreter
            sys.settrace(None)
        try:
            _launched(self, positional, named)
        finally:
            if measures:
                sys.settrace(trace)
                _first_call()


def _first_call() -> None:
    """Do nothing. A trace function that was set sees nothing of the running frames until a function is called."""


def _launched(self: Any, positional: Sequence[Any], named: dict[str, Any]) -> None:
    parameters = inspect.signature(self.fn).parameters
    named = {name: value for name, value in named.items() if name in parameters}
    here = all(tensor.device.type == "cpu" for value in (*positional, *named.values()) for tensor in tensors_of(value))
    hosted, hosted_named = (positional, named) if here else internals.on_host(self, positional, named)
    for hook in self.pre_run_hooks:
        hook(*hosted, **hosted_named)
    get("interpreter._patch_lang")(self.fn)
    values = inspect.getcallargs(self.fn, *hosted, **hosted_named)
    kinds = getattr(self.fn, "gdn_annotations", {})
    arguments = {
        name: value if name in self.constexprs else _argument(value, kinds.get(name, "")) for name, value in values.items()
    }
    sizes = self.grid(arguments) if callable(self.grid) else self.grid
    assert len(sizes) <= 3, "grid must have at most 3 dimensions"
    x, y, z = (int(size) for size in (*sizes, 1, 1, 1)[:3])
    if any(size > most for size, most in zip((x, y, z), MOST_PROGRAMS, strict=True)):
        raise GridTooLarge(
            f"the grid of the kernel {self.fn.__name__} is ({x}, {y}, {z}), but CUDA takes at most {MOST_PROGRAMS} programs"
        )
    if patches.sequential:
        _one_by_one(self.fn, arguments, (x, y, z))
    elif (repeat := Repeat(self.fn, values, (x, y, z))).write():
        pass
    elif reason := _together(self.fn, arguments, (x, y, z), _by_memory(values), repeat):
        _one_by_one(self.fn, arguments, (x, y, z))
        one_by_one[f"{self.fn.__name__}: {reason}"] += 1
    launches[self.fn.__name__] += 1
    if not here:
        internals.back_on_device(self, positional, hosted, named, hosted_named)


def _argument(value: Any, annotation: str) -> Any:
    """Convert an argument as a compiled kernel gets it: a number has the type of the parameter's annotation, and loses high bits.

    Triton's interpreter ignores annotations, so that an offset with a stride that is annotated as `tl.int64` would wrap.
    """
    if annotation in INTEGERS and isinstance(value, int):
        number = np.array([value], np.int64 if annotation.startswith("i") else np.uint64)
    elif annotation in FLOATS and isinstance(value, int | float):
        number = np.array([value], np.float64)
    elif annotation == "u1" and isinstance(value, int):
        number = np.array([value != 0])
    else:
        return get("interpreter._implicit_cvt")(value)
    kind = tl.int1 if annotation == "u1" else tl.str_to_ty(annotation, None)
    return tl.tensor(operations.Handle(number.astype(operations.np_dtype(kind)), kind), kind)


def _by_memory(values: dict[str, Any]) -> Tensors:
    tensors: Tensors = {}
    for name, value in values.items():
        for tensor in tensors_of(value):
            tensors.setdefault(span_of(tensor), {})[name] = tensor
    return tensors


def _one_by_one(function: Any, arguments: dict[str, Any], grid: Grid) -> None:
    if math.prod(grid) > MOST_ALONE:
        raise TooManyPrograms(f"the kernel {function.__name__} has {math.prod(grid)} programs, which would run one after another")
    builder = get("interpreter.interpreter_builder")
    builder.set_grid_dim(*grid)
    try:
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    builder.set_grid_idx(x, y, z)
                    function(**arguments)
    except NotImplementedError as error:
        raise UnknownTriton(f"Triton's interpreter cannot run the kernel {function.__name__}: {error}") from error
    except Exception as error:
        raise InterpreterError(repr(error)) from error


def _together(python: Any, arguments: dict[str, Any], grid: Grid, tensors: Tensors, repeat: Repeat) -> str:
    """Run all programs together. Returns "", or the reason why they could not; memory is then as before the launch.

    Raises Race if two programs race, unless races are accepted.
    """
    function: Function | None = getattr(python, "gdn_function", None)
    if function is None:
        return "a kernel without source"
    watched = _stored_after_loads.setdefault(function, set())
    memory = Memory(span for span, names in tensors.items() if watched & names.keys())
    branches.begin_launch()
    try:
        _run(function, arguments, grid, range(math.prod(grid)), memory)
    except Rewatch as surprise:
        memory.rollback()
        if surprise.span not in tensors:
            return "a store to memory that is no argument's"
        watched.update(tensors[surprise.span])
        return _together(python, arguments, grid, tensors, repeat)
    except Exception as error:
        reason = str(error) if isinstance(error, (Unbatchable, Untracked, Unordered)) else type(error).__name__
        memory.rollback()
    else:
        if not memory.suspects:
            repeat.keep(memory)
            return ""
        reason = "programs that touch the same memory"
        memory.rollback()
    for suspect in () if are_accepted() else memory.suspects:
        _settle(suspect, function, arguments, grid, tensors)
    return reason


def _run(function: Function, arguments: dict[str, Any], grid: Grid, programs: Sequence[int], memory: Memory) -> None:
    builder = GridBuilder(memory)
    builder.set_grid_dim(*grid)
    first = 0
    while first < len(programs):
        count = max(1, ELEMENTS // _blocks[function]) if function in _blocks else PROGRAMS
        numbers = np.array(programs[first : first + count])
        machine, memory.together = Machine(builder, grid, numbers), len(numbers)
        with _running(machine):
            machine.call(function, arguments)
        memory.finish_slice()
        _blocks[function] = max(memory.largest_block, _blocks.get(function, 1))
        first += count


def _settle(suspect: Suspect, function: Function, arguments: dict[str, Any], grid: Grid, tensors: Tensors) -> None:
    """Raise Race if the two programs conflict when each runs alone. Memory is left unchanged."""

    def alone(program: int, after: Mapping[Span, Trace] = NOTHING) -> dict[Span, Trace]:
        """The traces of one program, run on memory as another program leaves it (`after`)."""
        memory = Alone()
        for span, trace in after.items():
            memory.view(span, np.dtype(np.uint8))[:] = trace.after
        try:
            _run(function, arguments, grid, [program], memory)
            return memory.traced()
        finally:
            memory.rollback()
            for span, trace in after.items():
                memory.view(span, np.dtype(np.uint8))[:] = trace.before

    try:
        traces = [alone(program) for program in suspect.programs]
        for span in traces[0].keys() & traces[1].keys():
            for did, does, byte in conflicts(traces[0][span], traces[1][span]):
                if {did, does} == {LOAD, STORE}:
                    reader = (did, does).index(LOAD)
                    written = traces[1 - reader][span]
                    again = alone(suspect.programs[reader], traces[1 - reader])
                    # If the writer later restores the old value, the reader that runs after it does not see the written one.
                    stays = written.after[byte] != written.before[byte]
                    if stays and all(
                        writes_the_same(trace, again[span]) for span, trace in traces[reader].items() if span in again
                    ):
                        continue
                raise Race(_race_text(suspect, grid, did, does, _element(tensors[span], byte)), suspect.place)
    except Race:
        raise
    except Exception:  # the run of one program after another raises it again
        return


def _race_text(suspect: Suspect, grid: Grid, did: str, does: str, element: str) -> str:
    axes = max([axis for axis, size in enumerate(grid, 1) if size > 1], default=1)
    first, second = (tuple(int(part) for part in np.unravel_index(program, grid))[:axes] for program in suspect.programs)
    return (
        f"program {first} and {second} both {did} {element}"
        if did == does
        else f"program {first} {did}s and {second} {does}s {element}"
    )


def _element(named: dict[str, Tensor], byte: int) -> str:
    """The name of the element at a byte of a memory, as `argument[indices]` of the first argument that contains it."""
    for name, tensor in named.items():
        rest, places = (byte - tensor.data_ptr() + span_of(tensor)[0]) // tensor.element_size(), [0] * tensor.dim()
        for axis in sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis]):
            stride = tensor.stride(axis)
            places[axis] = rest // stride if stride else 0
            rest -= places[axis] * stride
        if rest == 0 and all(0 <= place < size for place, size in zip(places, tensor.shape, strict=True)):
            return f"{name}[{', '.join(map(str, places))}]"
    return f"byte {byte} of the memory of {' or '.join(named)}"


@contextlib.contextmanager
def _running(machine: Machine) -> Iterator[None]:
    global _machine
    semantic = operations.SEMANTIC
    builder, outer = semantic.builder, _machine
    semantic.builder, _machine = machine.builder, machine
    try:
        yield
    finally:
        semantic.builder, _machine = builder, outer
