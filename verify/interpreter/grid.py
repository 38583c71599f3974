"""Run a kernel for all programs of its grid together, statement by statement.

Python evaluates the expressions, on values whose first axis is the programs (operations.py). This module runs the statements. Where
programs have different values of a condition or of a number that decides what runs next, `Diverges` names the groups of programs
that agree. The statement then runs once for each group, and afterwards the groups go on together. A loop over ranges of different
lengths runs to the longest range, for fewer and fewer programs. A group copies its part of each variable that it reads. Afterwards
only the variables that the statement assigns are merged.
"""

import ast
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import numpy as np
import triton.language as tl

from verify.interpreter.operations import Diverges, GridBuilder, Handle, Unbatchable, agreed
from verify.interpreter.variables import Frame, Names, joined, merged, selected


class Loop:
    """The programs that have left the body of a loop before its end."""

    def __init__(self) -> None:
        self.broken: list[Frame] = []
        self.continued: list[Frame] = []


class Call:
    """One call of a function, with the return values of the programs that have returned so far."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.returned: list[tuple[Frame, Any]] = []


TURNS = 100_000  # a while loop with more turns, in a kernel that reads memory, is taken to wait for another program
# A step runs one statement for the programs of a frame. Its result is the frame of the programs that go on to the next statement.
Step = Callable[[Call, Frame, Loop | None], Frame | None]


class Function:
    """A function in Triton's language: a kernel, or one that kernels call.

    `tree` is its source as Triton's interpreter rewrites it, `names` are the globals, and `signature` has the parameters.
    Statements are compiled before they first run, since a process runs few of the branches of most kernels.
    """

    def __init__(self, tree: ast.FunctionDef, filename: str, names: dict[str, Any], signature: inspect.Signature) -> None:
        self.signature, self._names, self._filename, self._name = signature, names, filename, tree.name
        self.branches = any(isinstance(node, (ast.If, ast.For, ast.While)) for node in ast.walk(tree))
        self._body = tree.body

    def run(self, machine: "Machine", names: Names, programs: Any) -> Any:
        """Run the function for `programs`; the value that it returns to all of them."""
        call, frame = Call(machine), Frame(programs, names)
        rest = _run(self._steps, call, frame, None)
        if rest is not None:
            call.returned.append((rest, None))
        machine.enter(programs)
        return merged([(frame.positions(part), value) for part, value in call.returned], len(programs))

    @functools.cached_property
    def _steps(self) -> list[Step]:
        return self._steps_of(self._body)

    def _steps_of(self, body: Sequence[ast.stmt]) -> list[Step]:
        return [_splitting(self._step(node), node) for node in body]

    def _step(self, node: ast.stmt) -> Step:
        if isinstance(node, (ast.For, ast.While)) and node.orelse:
            return _refusing("a loop with else")
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.For):
            return self._for(node)
        if isinstance(node, ast.While):
            return self._while(node)
        if isinstance(node, ast.Return):
            return self._return(node)
        if isinstance(node, (ast.Break, ast.Continue)):
            return _leave(broken=isinstance(node, ast.Break))
        return self._plain(node)

    def _compiled(self, node: ast.Module | ast.Expression) -> CodeType:
        mode = "exec" if isinstance(node, ast.Module) else "eval"
        code: CodeType = compile(node, self._filename, mode)
        return code.replace(co_name=self._name)

    def _expression(self, node: ast.expr) -> Callable[[Frame], Any]:
        """Evaluates an expression with the variables of a frame."""
        if foreign := _with_own_names(node):
            return _refusing(foreign)
        code, names = self._compiled(ast.Expression(node)), self._names
        return lambda frame: eval(code, names, frame.names)

    def _plain(self, node: ast.stmt) -> Step:
        if foreign := _with_own_names(node):
            return _refusing(foreign)
        code, names = self._compiled(ast.Module([node], [])), self._names

        def step(_: Call, frame: Frame, __: Loop | None) -> Frame:
            exec(code, names, frame.names)
            return frame

        return step

    def _return(self, node: ast.Return) -> Step:
        value = self._expression(node.value or ast.copy_location(ast.Constant(None), node))

        def step(call: Call, frame: Frame, _: Loop | None) -> None:
            call.returned.append((frame, value(frame)))

        return step

    def _if(self, node: ast.If) -> Step:
        test = self._expression(node.test)
        steps_of = functools.cache(lambda taken: self._steps_of(node.body if taken else node.orelse))

        def step(call: Call, frame: Frame, loop: Loop | None) -> Frame | None:
            return _run(steps_of(bool(test(frame))), call, frame, loop)

        return step

    def _while(self, node: ast.While) -> Step:
        test, body = self._expression(node.test), self._steps_of(node.body)

        def going(call: Call, frame: Frame, done: list[Frame]) -> Frame | None:
            """The programs for which the condition is true; the others are done."""
            call.machine.enter(frame.programs)
            try:
                if test(frame):
                    return frame
            except Diverges as diverging:
                parts = [going(call, frame.part(group), done) for group in diverging.groups]
                return joined(frame, [part for part in parts if part is not None], assigned_in(node))
            done.append(frame)
            return None

        def step(call: Call, frame: Frame, _: Loop | None) -> Frame | None:
            loop, done, memory = Loop(), list[Frame](), call.machine.builder.memory
            assigned = assigned_in(node)
            current: Frame | None = frame
            turns = 0
            while current is not None:
                turns, loads, before = turns + 1, memory.loads, _bits_of(current, assigned)
                current = going(call, current, done)
                if current is not None:
                    current = _turn(body, call, current, loop, assigned)
                # A loop that reads memory and changes nothing waits for another program, which here would never continue.
                waits = current is not None and memory.loads != loads and _bits_of(current, assigned) == before
                if waits or (turns > TURNS and memory.loads):
                    raise Unbatchable("a loop that waits for another program")
            return joined(frame, done + loop.broken, assigned)

        return step

    def _for(self, node: ast.For) -> Step:
        assert isinstance(node.target, ast.Name), "loops of Triton's language have one variable"
        target, body = node.target.id, self._steps_of(node.body)
        iterator, bounds = self._expression(node.iter), self._bounds(node.iter)

        def step(call: Call, frame: Frame, _: Loop | None) -> Frame | None:
            limits = bounds(frame)
            values, counts = (iterator(frame), None) if limits is None else ranges(*limits)
            loop, done, current, assigned = Loop(), list[Frame](), frame, assigned_in(node)
            for turn, value in enumerate(values):
                if counts is not None:
                    left = counts[frame.positions(current)] - turn
                    if (left <= 0).any():
                        done.append(current.part(np.flatnonzero(left <= 0)))
                        current = current.part(np.flatnonzero(left > 0))
                        if not len(current.programs):
                            return joined(frame, done + loop.broken, assigned)
                current.names[target] = value(frame.positions(current)) if callable(value) else value
                after = _turn(body, call, current, loop, assigned)
                if after is None:
                    return joined(frame, done + loop.broken, assigned)
                current = after
            return joined(frame, [*done, current, *loop.broken], assigned)

        return step

    def _bounds(self, node: ast.expr) -> Callable[[Frame], tuple[list[Any], Any] | None]:
        """Evaluates the arguments and the keyword `step` of a `range`; None if a loop is over something else."""
        if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
            return lambda _: None
        function, arguments = self._expression(node.func), [self._expression(argument) for argument in node.args]
        steps = [self._expression(keyword.value) for keyword in node.keywords if keyword.arg == "step"]

        def bounds(frame: Frame) -> tuple[list[Any], Any] | None:
            if function(frame) not in (range, tl.range, tl.static_range):
                return None
            return [argument(frame) for argument in arguments], steps[0](frame) if steps else 1

        return bounds


_FOREIGN = (
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.FunctionDef, ast.ClassDef, ast.With, ast.Try, ast.Delete,
    ast.Global, ast.Nonlocal, ast.Yield, ast.NamedExpr,
)  # fmt: skip


def _with_own_names(node: ast.AST) -> str:
    """A description of the part of a statement or expression that has its own scope; "" if there is none.

    Such a part would not find the variables of a frame.
    """
    for part in ast.walk(node):
        if isinstance(part, ast.Lambda):
            names = {name.id for name in ast.walk(part.body) if isinstance(name, ast.Name)}
            if not names <= {argument.arg for argument in part.args.args}:
                return "a lambda"
        elif isinstance(part, _FOREIGN):
            return f"a statement of Python's: {type(part).__name__}"
    return ""


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise Unbatchable(what)

    return refuse


@functools.cache
def assigned_in(node: ast.stmt) -> frozenset[str]:
    """The names that a statement may assign."""
    return frozenset(name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))


def _bits_of(frame: Frame, names: frozenset[str]) -> list[Any]:
    """The bits of a frame's variables."""
    values = [frame.names[name] for name in sorted(names) if name in frame.names]
    return [value.handle.data.tobytes() if isinstance(getattr(value, "handle", None), Handle) else value for value in values]


def _leave(*, broken: bool) -> Step:
    def step(_: Call, frame: Frame, loop: Loop | None) -> None:
        assert loop is not None
        (loop.broken if broken else loop.continued).append(frame)

    return step


def _splitting(step: Step, node: ast.stmt) -> Step:
    """The step, but if programs diverge, it runs once for each group of programs that agree."""

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
        return joined(frame, [result for result in results if result is not None], assigned_in(node))

    return run


def _run(steps: Sequence[Step], call: Call, frame: Frame, loop: Loop | None) -> Frame | None:
    current: Frame | None = frame
    for step in steps:
        if current is None:
            return None
        current = step(call, current, loop)
    return current


def _turn(steps: Sequence[Step], call: Call, frame: Frame, loop: Loop, assigned: frozenset[str]) -> Frame | None:
    """One turn of a loop: the frame of the programs that have not left the loop."""
    after = _run(steps, call, frame, loop)
    if loop.continued:
        after = joined(frame, [*loop.continued, *([] if after is None else [after])], assigned)
        loop.continued = []
    return after


def ranges(arguments: list[Any], step: Any) -> tuple[Any, Any]:
    """The values of a loop's variable in each turn, and the number of turns of each program (None if all are equal).

    If programs differ in the variable, its value is given as a function of the programs' positions.
    """
    bounds = ([0, *arguments] if len(arguments) == 1 else arguments)[:3]
    starts, stops, steps = [_integers(bound) for bound in (*bounds, step)[:3]]
    if all((bound == bound[0]).all() for bound in (starts, stops, steps)):
        return range(int(starts[0]), int(stops[0]), int(steps[0])), None
    by = int(agreed(steps))
    starts, counts = np.broadcast_arrays(starts, np.maximum(0, -((starts - stops) // by)))
    if (starts == starts[0]).all():
        return itertools.count(int(starts[0]), by), counts
    return _varying(starts, by), counts


def _varying(starts: Any, by: int) -> Iterator[Callable[[Any], Any]]:
    for turn in itertools.count():
        now = starts + turn * by
        kind, width = (tl.int32, np.int32) if abs(now).max() < 2**31 else (tl.int64, np.int64)
        handle = Handle(now.astype(width), kind)
        yield functools.partial(selected, tl.tensor(handle, kind))


def _integers(bound: Any) -> Any:
    value = bound.value if isinstance(bound, tl.constexpr) else bound
    return value.handle.data.reshape(-1).astype(np.int64) if isinstance(value, tl.tensor) else np.array([int(value)])


class Machine:
    """The state of one slice of a launch: the builder of its operations, and the programs that run at present.

    `numbers` are the programs' numbers in the grid; the last axis of the grid counts fastest.
    """

    def __init__(self, builder: GridBuilder, grid: tuple[int, int, int], numbers: Any) -> None:
        self.builder, self._numbers = builder, numbers
        self._coordinates = [axis.astype(np.int32) for axis in np.unravel_index(numbers, grid)]
        self.programs = np.arange(len(numbers))
        self._running: Any = None

    def enter(self, programs: Any) -> None:
        """Make these programs the ones that operations act on."""
        if programs is self._running:
            return
        self.programs = self._running = programs
        self.builder.memory.programs = self._numbers[programs]
        coordinates = [axis[programs] for axis in self._coordinates]
        self.builder.coordinates = [axis[:1] if (axis == axis[0]).all() else axis for axis in coordinates]

    def call(self, function: Function, arguments: dict[str, Any]) -> Any:
        """Call a function for the programs that run at present."""
        names = Names()
        names.update(arguments)
        return function.run(self, names, self.programs)
