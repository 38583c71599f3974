"""A kernel runs for all programs of its grid together: statement by statement, each once for those programs that reach it.

Expressions are run by Python, on values whose first axis is the programs (operations.py). Statements are run here. A statement
that programs disagree about, because it asks for a truth or a number that they have different values of, is run once for each
group of those that agree; after it the groups go on together. Loops over different ranges run to the longest, for fewer and fewer
programs. Assigned values are put together again; nothing else is copied.
"""

import ast
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from verify.interpreter.operations import BlockPointer, Diverges, GridBuilder, Handle, Unbatchable, agreed

SLICE = 64  # programs that run together, before anything is known of their blocks


class Names(dict[str, Any]):
    """The variables of some programs: of all that have run so far together with others, those of `positions`."""

    def __init__(self, outer: "Names | None" = None, positions: Any = None) -> None:
        super().__init__()
        self.outer, self.positions = outer, positions

    def __missing__(self, name: str) -> Any:
        if self.outer is None:
            raise KeyError(name)
        value = self[name] = chosen(self.outer[name], self.positions)
        return value

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (self.outer is not None and name in self.outer)


class Frame:
    """Programs that run together, by their numbers in the slice, and their variables."""

    def __init__(self, programs: Any, names: Names) -> None:
        self.programs, self.names = programs, names

    def part(self, positions: Any) -> "Frame":
        """Some of the programs."""
        return Frame(self.programs[positions], Names(self.names, positions))


# values of some programs, and of several groups together


class Parted:
    """A variable that groups of programs have with values of different types, or that only some of them have."""

    def __init__(self, parts: list[tuple[Any, Any]]) -> None:
        self.parts = parts

    def __getattr__(self, name: str) -> Any:
        raise Unbatchable("a variable that has several types, or that only some programs have")


def chosen(value: Any, positions: Any) -> Any:
    """A variable's value for some of the programs that have it."""
    if isinstance(value, Parted):
        found = [(np.isin(positions, at), at, each) for at, each in value.parts]
        kept = [
            (np.flatnonzero(here), chosen(each, np.searchsorted(at, positions[here]))) for here, at, each in found if here.any()
        ]
        return kept[0][1] if len(kept) == 1 and len(kept[0][0]) == len(positions) else Parted(kept)
    if isinstance(value, tl.tensor):
        handle = _chosen_handle(value.handle, positions)
        return value if handle is value.handle else tl.tensor(handle, value.type)
    if isinstance(value, (tuple, tl.tuple)):
        parts = [chosen(part, positions) for part in value]
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else _like(value, parts)
    return value


def _chosen_handle(handle: Any, positions: Any) -> Any:
    if isinstance(handle, BlockPointer):
        return _rebuilt(handle, [[_chosen_handle(part, positions) for part in group] for group in _groups(handle)])
    if not isinstance(handle, Handle):
        raise Unbatchable(f"a branch with a {type(handle).__name__}")
    if len(handle.data) == 1:
        return handle
    made = Handle(handle.data[positions], handle.dtype)
    made.shape = handle.shape
    return made


def _like(value: Any, parts: list[Any]) -> Any:
    return tl.tuple(parts) if isinstance(value, tl.tuple) else type(value)(parts) if type(value) is tuple else type(value)(*parts)


def _groups(pointer: Any) -> list[list[Any]]:
    return [[pointer.base], list(pointer.shape), list(pointer.strides), list(pointer.offsets)]


def _rebuilt(pointer: Any, groups: Sequence[Sequence[Any]]) -> Any:
    (base,), shape, strides, offsets = groups
    return BlockPointer(base, shape, strides, list(offsets), pointer.block_shape, pointer.order)


def merged(parts: list[tuple[Any, Any]], count: int) -> Any:
    """One value for `count` programs, from the positions and values of groups of them. Unbatchable if they have no common type."""
    values = [value for _, value in parts]
    first = values[0]
    if all(value is first for value in values):
        return first
    if any(isinstance(value, tl.tensor) for value in values) and all(
        isinstance(value, (tl.tensor, int, float)) for value in values
    ):
        values = [interpreter.interpreter_semantic.to_tensor(value) for value in values]
        if any(str(value.type) != str(values[0].type) for value in values):
            values = _of_one_type(values)
        handles = [(at, value.handle) for (at, _), value in zip(parts, values, strict=True)]
        return tl.tensor(_merged_handle(handles, count), values[0].type)
    if all(isinstance(value, (tuple, tl.tuple)) and len(value) == len(first) for value in values):
        columns = zip(*values, strict=True)
        return _like(
            first, [merged([(at, value) for (at, _), value in zip(parts, column, strict=True)], count) for column in columns]
        )
    plain = [getattr(value, "value", value) for value in values]
    if all(type(value) is type(plain[0]) and value == plain[0] for value in plain):
        return first
    raise Unbatchable(f"a variable that is {plain[0]!r} in some programs and {plain[1]!r} in others")


def _of_one_type(values: list[Any]) -> list[Any]:
    """Integers of several widths as the widest, as a compiled kernel has them."""
    if not all(value.dtype.is_int() and list(value.shape) == list(values[0].shape) for value in values):
        raise Unbatchable(f"a variable that is {' and '.join(sorted({str(value.type) for value in values}))}")
    widest = max((value.dtype for value in values), key=lambda dtype: dtype.int_bitwidth)
    return [value.to(widest) for value in values]


def _merged_handle(parts: list[tuple[Any, Any]], count: int) -> Any:
    first = parts[0][1]
    if isinstance(first, BlockPointer):
        groups = [_groups(handle) for _, handle in parts]
        positions = [at for at, _ in parts]
        return _rebuilt(
            first,
            [
                [_merged_handle(list(zip(positions, column, strict=True)), count) for column in zip(*same, strict=True)]
                for same in zip(*groups, strict=True)
            ],
        )
    arrays = [handle.data for _, handle in parts]
    if all(len(data) == 1 and data.size == 1 for data in arrays) and all(data.item() == arrays[0].item() for data in arrays):
        return first
    shape = np.broadcast_shapes(*[data.shape[1:] for data in arrays])
    together = np.empty((count, *shape), dtype=arrays[0].dtype)
    for (at, _), data in zip(parts, arrays, strict=True):
        together[at] = data
    made = Handle(together, first.dtype)
    made.shape = first.shape if first.shape is not None else first.data.shape[1:]
    if first.dtype.is_ptr() and any(getattr(handle.dtype, "spans", ()) != getattr(first.dtype, "spans", ()) for _, handle in parts):
        raise Unbatchable("a pointer that is one tensor's in some programs and another's in others")
    return made


# functions, as statements that can be run one at a time


class Loop:
    """What leaves the body of a loop before its end: programs that break, and those that continue."""

    def __init__(self) -> None:
        self.broken: list[Frame] = []
        self.continued: list[Frame] = []


class Call:
    """One call of a function in Triton's language: what its programs return."""

    def __init__(self, function: "Function", machine: "Machine") -> None:
        self.function, self.machine = function, machine
        self.returned: list[tuple[Frame, Any]] = []


Step = Callable[[Call, Frame, Loop | None], Frame | None]


class _Extremes(ast.NodeTransformer):
    """Python's min and max, which Triton's compiler takes for tl.minimum and tl.maximum, without a question to every program."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            node.func = ast.copy_location(ast.Name(f"_gdn_{node.func.id}", ast.Load()), node.func)
        return node


def _extreme(plain: Callable[..., Any], language: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if len(arguments) != 2 or not any(
            isinstance(argument, tl.tensor) and len(argument.handle.data) > 1 for argument in arguments
        ):
            return plain(*arguments)
        return language(*arguments)

    return call


_EXTREMES = {"_gdn_min": _extreme(min, tl.minimum), "_gdn_max": _extreme(max, tl.maximum)}


class Function:
    """A kernel, or a function that kernels call: its source, rewritten by Triton, statement by statement."""

    def __init__(self, tree: ast.FunctionDef, filename: str, names: dict[str, Any], signature: inspect.Signature) -> None:
        self.names, self._filename = names, filename
        names.update(_EXTREMES)
        tree = _Extremes().visit(copy.deepcopy(tree))
        self.signature = signature
        self.unbatchable = next(
            (type(node).__name__ for node in ast.walk(tree) if node is not tree and _foreign(node)), ""
        )
        self.branches = any(isinstance(node, (ast.If, ast.For, ast.While)) for node in ast.walk(tree))
        self.steps: list[Step] = [] if self.unbatchable else self._steps(tree.body)

    def run(self, machine: "Machine", names: Names, programs: Any) -> Any:
        """The value that it returns to all the programs that call it together."""
        if self.unbatchable:
            raise Unbatchable(f"a {self.unbatchable} statement")
        call = Call(self, machine)
        rest = _run(self.steps, call, Frame(programs, names), None)
        if rest is not None:
            call.returned.append((rest, None))
        machine.enter(programs)
        return merged([(np.searchsorted(programs, frame.programs), value) for frame, value in call.returned], len(programs))

    def _steps(self, body: Sequence[ast.stmt]) -> list[Step]:
        return [self._step(node) for node in body]

    def _step(self, node: ast.stmt) -> Step:
        assigned = _assigned(node)
        if isinstance(node, ast.If):
            step = self._if(node)
        elif isinstance(node, ast.For):
            step = self._for(node, assigned)
        elif isinstance(node, ast.While):
            step = self._while(node, assigned)
        elif isinstance(node, ast.Return):
            step = self._return(node)
        elif isinstance(node, (ast.Break, ast.Continue)):
            step = _leave(broken=isinstance(node, ast.Break))
        else:
            step = self._plain(node)
        return _splitting(step, assigned)

    def _code(self, node: ast.expr | ast.stmt) -> CodeType:
        if isinstance(node, ast.expr):
            return compile(ast.fix_missing_locations(ast.Expression(node)), self._filename, "eval")
        return compile(ast.fix_missing_locations(ast.Module([node], [])), self._filename, "exec")

    def _plain(self, node: ast.stmt) -> Step:
        code, names = self._code(node), self.names

        def step(call: Call, frame: Frame, loop: Loop | None) -> Frame:
            exec(code, names, frame.names)
            return frame

        return step

    def _return(self, node: ast.Return) -> Step:
        code, names = self._code(node.value or ast.copy_location(ast.Constant(None), node)), self.names

        def step(call: Call, frame: Frame, loop: Loop | None) -> None:
            call.returned.append((frame, eval(code, names, frame.names)))

        return step

    def _if(self, node: ast.If) -> Step:
        test, names = self._code(node.test), self.names
        body, orelse = self._steps(node.body), self._steps(node.orelse)

        def step(call: Call, frame: Frame, loop: Loop | None) -> Frame | None:
            return _run(body if eval(test, names, frame.names) else orelse, call, frame, loop)

        return step

    def _while(self, node: ast.While, assigned: frozenset[str]) -> Step:
        test, names, body = self._code(node.test), self.names, self._steps(node.body)

        def step(call: Call, frame: Frame, loop: Loop | None) -> Frame | None:
            inner, done, current = Loop(), [], frame
            while current is not None:
                call.machine.enter(current.programs)
                try:
                    goes_on = bool(eval(test, names, current.names))
                except Diverges as diverging:
                    stays = [current.part(group) for group in diverging.groups]
                    truths = []
                    for part in stays:
                        call.machine.enter(part.programs)
                        truths.append(bool(eval(test, names, part.names)))
                    done += [part for part, goes in zip(stays, truths, strict=True) if not goes]
                    going = [part for part, goes in zip(stays, truths, strict=True) if goes]
                    current = _joined(current, going, assigned)
                    goes_on = True
                if not goes_on:
                    done.append(current)
                    break
                current = _body(body, call, current, inner, assigned)
            return _joined(frame, done + inner.broken, assigned)

        return step

    def _for(self, node: ast.For, assigned: frozenset[str]) -> Step:
        assert isinstance(node.target, ast.Name), "Triton's loops have one variable"
        target, body, names = node.target.id, self._steps(node.body), self.names
        whole = self._code(node.iter)
        parts: list[CodeType] = []
        if isinstance(node.iter, ast.Call) and not any(isinstance(argument, ast.Starred) for argument in node.iter.args):
            parts = [self._code(part) for part in (node.iter.func, *node.iter.args)]
            keywords = {each.arg: self._code(each.value) for each in node.iter.keywords if each.arg is not None}

        def values(frame: Frame) -> tuple[Any, Any]:
            """What the loop's variable is in turn, and how many turns each program takes (None: all of them the same)."""
            if parts:
                function = eval(parts[0], names, frame.names)
                if function in (range, tl.range, tl.static_range):
                    given = [eval(code, names, frame.names) for code in parts[1:]]
                    named = {name: eval(code, names, frame.names) for name, code in keywords.items() if name == "step"}
                    return _ranges(given, named.get("step"))
            return eval(whole, names, frame.names), None

        def step(call: Call, frame: Frame, loop: Loop | None) -> Frame | None:
            turns, counts = values(frame)
            inner, done, current = Loop(), [], frame
            for turn, value in enumerate(turns):
                if counts is not None:
                    left = counts[np.searchsorted(frame.programs, current.programs)]
                    if (left <= turn).any():
                        done.append(current.part(np.flatnonzero(left <= turn)))
                        if (left <= turn).all():
                            current = None
                            break
                        current = current.part(np.flatnonzero(left > turn))
                if callable(value):
                    value = value(np.searchsorted(frame.programs, current.programs))
                current.names[target] = value
                current = _body(body, call, current, inner, assigned)
                if current is None:
                    break
            return _joined(frame, [*done, *([] if current is None else [current]), *inner.broken], assigned)

        return step


_FOREIGN = (
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.FunctionDef, ast.ClassDef, ast.With, ast.Try,
    ast.Delete, ast.Global, ast.Nonlocal, ast.Yield, ast.NamedExpr,
)  # fmt: skip


def _foreign(node: ast.AST) -> bool:
    """Whether a statement or expression has variables of its own, and would not find the program's."""
    if isinstance(node, ast.Lambda):
        names = {each.id for each in ast.walk(node.body) if isinstance(each, ast.Name)}
        return not names <= {argument.arg for argument in node.args.args}
    return isinstance(node, _FOREIGN)


def _assigned(node: ast.stmt) -> frozenset[str]:
    return frozenset(each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))


def _leave(*, broken: bool) -> Step:
    def step(call: Call, frame: Frame, loop: Loop | None) -> None:
        assert loop is not None
        (loop.broken if broken else loop.continued).append(frame)

    return step


def _splitting(step: Step, assigned: frozenset[str]) -> Step:
    """The same, run for each group of programs that agree where they do not all."""

    def run(call: Call, frame: Frame, loop: Loop | None) -> Frame | None:
        effects = call.machine.builder.effects
        call.machine.enter(frame.programs)
        try:
            return step(call, frame, loop)
        except Diverges as diverging:
            if call.machine.builder.effects != effects:
                raise Unbatchable("a store before programs part within one statement") from None
            groups = diverging.groups
        results = [run(call, frame.part(group), loop) for group in groups]
        return _joined(frame, [result for result in results if result is not None], assigned)

    return run


def _run(steps: Sequence[Step], call: Call, frame: Frame, loop: Loop | None) -> Frame | None:
    current: Frame | None = frame
    for step in steps:
        if current is None:
            return None
        current = step(call, current, loop)
    return current


def _body(steps: Sequence[Step], call: Call, frame: Frame, loop: Loop, assigned: frozenset[str]) -> Frame | None:
    """One turn of a loop; programs that continue come back."""
    after = _run(steps, call, frame, loop)
    if loop.continued:
        after = _joined(frame, [*loop.continued, *([] if after is None else [after])], assigned)
        loop.continued = []
    return after


def _joined(frame: Frame, parts: Sequence[Frame], assigned: frozenset[str]) -> Frame | None:
    """The groups of a frame's programs that are left, as one, with what each has assigned. None if no program is left."""
    if not parts:
        return None
    if len(parts) == 1:
        part = parts[0]
        if part is frame or len(part.programs) < len(frame.programs):
            return part
    programs = np.sort(np.concatenate([part.programs for part in parts]))
    if len(programs) == len(frame.programs):
        whole = frame
    else:
        whole = frame.part(np.searchsorted(frame.programs, programs))
    places = [np.searchsorted(programs, part.programs) for part in parts]
    for name in assigned:
        values = [(at, part.names[name]) for at, part in zip(places, parts, strict=True) if name in part.names]
        if not values:
            continue
        try:
            together = merged(values, len(programs)) if len(values) == len(parts) else Parted(values)
        except Unbatchable:
            together = Parted(values)
        whole.names[name] = together
    return whole


def _ranges(given: list[Any], step: Any) -> tuple[Any, Any]:
    """What `range` of some bounds gives in turn, and how many turns each program takes, where they do not take the same."""
    if len(given) == 1:
        bounds = [0, given[0], 1 if step is None else step]
    else:
        bounds = [*given, 1 if step is None else step][:3]
    arrays = [_numbers(bound) for bound in bounds]
    if all(len(array) == 1 or (array == array[0]).all() for array in arrays):
        return range(*[int(array[0]) for array in arrays]), None
    starts, stops, steps = arrays
    by = int(agreed(steps))
    counts = np.maximum(0, -((starts - stops) // by))
    starts, counts = np.broadcast_arrays(starts, counts)
    if (starts == starts[0]).all():
        return itertools.count(int(starts[0]), by), counts

    def varying() -> Iterator[Callable[[Any], Any]]:
        for turn in itertools.count():
            now = starts + turn * by
            kind, width = (tl.int32, np.int32) if abs(now).max() < 2**31 else (tl.int64, np.int64)
            yield lambda positions, now=now, kind=kind, width=width: tl.tensor(Handle(now[positions].astype(width), kind), kind)

    return varying(), counts


def _numbers(bound: Any) -> Any:
    bound = getattr(bound, "value", bound) if isinstance(bound, tl.constexpr) else bound
    if isinstance(bound, tl.tensor):
        return bound.handle.data.reshape(-1).astype(np.int64)
    return np.array([int(bound)], dtype=np.int64)


# a launch


class Machine:
    """One launch on its way: the builder that its operations go to, and the programs that are running."""

    def __init__(self, builder: GridBuilder, grid: tuple[int, int, int], numbers: Any) -> None:
        self.builder = builder
        x, rest = np.divmod(numbers, grid[1] * grid[2])
        y, z = np.divmod(rest, grid[2])
        self._coordinates, self._numbers = [each.astype(np.int32) for each in (x, y, z)], numbers
        self.programs = np.arange(len(numbers))
        self._running: Any = None

    def enter(self, programs: Any) -> None:
        """From now on operations are of these programs."""
        if programs is self._running:
            return
        self.programs = self._running = programs
        self.builder.memory.programs = self._numbers[programs]
        parts = [each[programs] for each in self._coordinates]
        self.builder.coordinates = [each[:1] if (each == each[0]).all() else each for each in parts]

    def call(self, function: Function, arguments: dict[str, Any]) -> Any:
        """Call a function of the language for the programs that are running."""
        names = Names()
        names.update(arguments)
        return function.run(self, names, self.programs)
