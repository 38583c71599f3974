"""Operations of Triton's language, replayed: the calls of the builder that an operation makes are recorded once.

A compiled kernel's operations run before there is any data. They choose instructions by the types of their operands and by the
values of their constants. So two calls of an operation with equal types and constants make the same calls of the builder, and
return values of the same types. The first such call is recorded here. Later ones call the builder directly, which computes as it
did, and leave out the rest of Triton's code. Statements that only assign are recorded in the same way, as one operation.

A call is not replayed if data decided what it did, or if it used a handle that is not an argument's, a constant's or the result of
one of its calls of the builder. Then all of Triton's code runs each time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from verify.interpreter import branches
from verify.interpreter.internals import get

_Handle, _Function = get("interpreter.TensorHandle"), get("interpreter.InterpretedFunction")
_semantic, _block, _tensor, _constexpr = get("interpreter.interpreter_semantic"), tl.block_type, tl.tensor, tl.constexpr
# Calls of the builder that depend on nothing but their arguments. If these are constants, the result is one.
_CONSTANT = ("get_", "create_make_range", "create_splat", "create_broadcast", "create_expand_dims")
_IGNORE_POINTEE = ("create_splat", "create_bitcast")  # these take the memory of a pointer from its handle, not from a type
_CONSTANTS = frozenset({int, float, bool, str, _constexpr})
_BY_ONE = {("binary_op",), ("unary_op",), ("ternary_op",), ("cast_impl",)}
MOST = 4096  # recorded calls of one operation
_OPAQUE = object()  # in place of a recorded call: it cannot be replayed
_SEEN = object()  # in place of a recorded call: it ran once

ABSENT = object()  # in place of a variable that has no value

builder: Any = None  # that of the launch whose programs run together, or None
line_by_line = False  # whether statements run one after another, so that a stack shows the line of each access
_recording: "_Recording | None" = None
_factories: dict[str, Callable[..., Any]] = {}


class _Unkeyed(Exception):
    """An argument that is neither a tensor nor a constant."""


def replaying(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, replayed when all programs of a grid run together."""
    recorded: dict[Any, Any] = {}

    def call(*arguments: Any, **named: Any) -> Any:
        if builder is None:
            return operation(*arguments, **named)
        tensors: list[Any] = []
        key: list[Any] = []
        try:
            for value in arguments:
                kind = type(value)
                if kind is _tensor:
                    tensors.append(value)
                    key.append(value.type.name)
                else:
                    key.append(value if kind is int else _key(value, tensors))
            for name, value in named.items():
                key += name, _key(value, tensors)
        except _Unkeyed:
            return operation(*arguments, **named)
        whole = tuple(key)
        replay = recorded.get(whole)
        if replay is None:
            if len(recorded) >= MOST:
                return operation(*arguments, **named)
            return _record(operation, arguments, named, tensors, recorded, whole)
        return operation(*arguments, **named) if replay is _OPAQUE else replay(_semantic.builder, *tensors)

    return call


def replaying_block(run: Callable[[Any, tuple[Any, ...]], Any]) -> Callable[[Any, tuple[Any, ...]], Any]:
    """`run(frame, values)`, which runs statements with these values of variables, replayed. Returns the values that they assign.

    The values are recorded when they have come twice, since many come once.
    """
    recorded: dict[Any, Any] = {}

    def call(state: Any, values: tuple[Any, ...]) -> Any:
        if line_by_line:
            return run(state, values)
        tensors: list[Any] = []
        key: list[Any] = []
        try:
            for value in values:
                kind = type(value)
                if kind is _tensor:
                    tensors.append(value)
                    key.append(value.type.name)
                else:
                    key.append(value if kind is int else _key(value, tensors))
        except _Unkeyed:
            return run(state, values)
        whole = tuple(key)
        replay = recorded.get(whole)
        if replay is None:
            if len(recorded) < MOST:
                recorded[whole] = _SEEN
            return run(state, values)
        if replay is _OPAQUE or (replay is _SEEN and _recording is not None):
            return run(state, values)
        if replay is _SEEN:
            return _record(lambda *parts: run(state, parts), values, {}, tensors, recorded, whole)
        return replay(_semantic.builder, *tensors)

    return call


def looks_at_data() -> None:
    """Say that a value of the programs decides what runs next. An operation that does this is not replayed."""
    if _recording is not None:
        _recording._sound = False


def _key(value: Any, tensors: list[Any]) -> Any:
    """What an operation may decide by: the type of a tensor, and the value of anything else. Appends the tensors to `tensors`."""
    kind = type(value)
    if kind is _tensor:
        tensors.append(value)
        return value.type.name
    if kind is int:
        return value
    if kind is _constexpr:
        return kind, _key(value.value, tensors)
    if kind is float:
        return kind, repr(value)  # 0.0 and -0.0 are equal, and NaN is not
    if value is None or value is ABSENT or kind is bool or kind is str or kind is _Function:
        return kind, value
    if kind is slice:
        return kind, *[_key(part, tensors) for part in (value.start, value.stop, value.step)]
    if kind is tuple or kind is list or kind is tl.tuple:
        return kind, *[_key(part, tensors) for part in value]
    if isinstance(value, tl.dtype):
        return kind, value.name
    raise _Unkeyed


def _record(
    operation: Callable[..., Any], arguments: Any, named: dict[str, Any], tensors: list[Any], recorded: dict[Any, Any], key: Any
) -> Any:
    """Run an operation and record it under a key."""
    global _recording
    # Copies, so that equal handles are one argument, and no argument is a constant.
    copies = [_tensor(_copied(tensor.handle), tensor.type) for tensor in tensors]
    rest = iter(copies)
    arguments, named = [_with(value, rest) for value in arguments], {name: _with(value, rest) for name, value in named.items()}
    outer, around, ran = _semantic.builder, _recording, branches.noted
    if around is not None:
        around._also(copies, tensors)
    recording = _Recording(outer, copies)
    _semantic.builder = _recording = recording
    branches.noted = set()
    try:
        result = operation(*arguments, **named)
        recording._ran = frozenset(branches.noted)
    finally:
        _semantic.builder, _recording, branches.noted = outer, around, ran
    recorded[key] = recording._compiled(result)
    if around is not None and not recording._sound:
        around._sound = False
    return recording._own(result, tensors)


def _copied(handle: Any) -> Any:
    if not isinstance(handle, _Handle):
        return handle.copied()
    copy = _Handle(handle.data, handle.dtype)
    copy.shape = handle.shape
    return copy


def _with(value: Any, copies: Iterator[Any]) -> Any:
    """An argument with the copies in place of its tensors."""
    if type(value) is _tensor:
        return next(copies)
    if type(value) in (tuple, list, tl.tuple):
        return type(value)([_with(part, copies) for part in value])
    return value


def _handles_in(value: Any) -> Iterator[Any]:
    if isinstance(value, _Handle) or hasattr(value, "copied"):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _handles_in(part)


def _pointers(handle: Any, shape: Any) -> Any:
    """A tensor of pointers, whose type has the memories that they may point into."""
    kind = handle.dtype
    return _tensor(handle, kind if shape is None else _block(kind, shape))


class _Recording:
    """In place of the builder, while an operation is recorded. It calls the builder, and writes the call as a line of Python."""

    def __init__(self, plain: Any, tensors: list[Any]) -> None:
        self._plain, self._tensors, self._sound, self._ran = plain, tensors, True, frozenset[int]()
        self._words = {id(tensor.handle): f"a{number}.handle" for number, tensor in enumerate(tensors)}
        self._lines: list[str] = []
        self._constants: list[Any] = []
        self._kept: list[Any] = []  # results, so that no two have one id

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._plain, name)
        if not callable(member):
            return member
        if name.startswith("create_") and member.__code__.co_names[:1] in _BY_ONE:  # it calls one method with a function of numpy's
            return lambda *arguments: member.__func__(self, *arguments)
        return lambda *arguments, **named: self._call(name, member, arguments, named)

    def _call(self, name: str, member: Callable[..., Any], arguments: Any, named: dict[str, Any]) -> Any:
        global _recording
        _semantic.builder, _recording = builder, None  # the builder may run operations too
        try:
            result = member(*arguments, **named)
        finally:
            _semantic.builder = _recording = self
        self._kept.append(result)
        handles = [*_handles_in(result)]
        if result is not None and not handles:
            return result  # a type
        used = [*_handles_in([*arguments, *named.values()])]
        if name.startswith(_CONSTANT) and all(self._word(handle).startswith("c") for handle in used):
            for handle in handles:
                handle.data.flags.writeable = False
                handle.constant = True
                self._words[id(handle)] = self._constant(handle)
            return result
        if any(isinstance(value, tl.dtype) and value.scalar.is_ptr() for value in arguments) and name not in _IGNORE_POINTEE:
            self._sound = False
        variable = f"h{len(self._lines)}"
        words = [*map(self._word, arguments), *(f"{key}={self._word(value)}" for key, value in named.items())]
        self._lines.append(f"{variable} = b.{name}({', '.join(words)})")
        for number, handle in enumerate(handles):
            self._words[id(handle)] = variable if handle is result else f"{variable}[{number}]"
        return result

    def _constant(self, value: Any) -> str:
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def _word(self, value: Any) -> str:
        """An argument of the builder, in Python."""
        if word := self._words.get(id(value)):
            return word
        if isinstance(value, (tuple, list)) and [*_handles_in(value)]:
            return f"[{', '.join(map(self._word, value))}]"
        if (isinstance(value, _Handle) and not hasattr(value, "constant")) or hasattr(value, "copied"):
            self._sound = False
        return self._constant(value)

    def _returned(self, value: Any) -> str:
        """What the operation returns, in Python."""
        kind = type(value)
        if kind is _tensor:
            for number, tensor in enumerate(self._tensors):
                if value is tensor:
                    return f"a{number}"
            word, handle = self._word(value.handle), value.handle
            if word.startswith("c"):
                return self._constant(value)
            if not isinstance(handle, _Handle) or not handle.dtype.is_ptr():
                return f"tensor({word}, {self._constant(value.type)})"
            if handle.dtype.name != value.type.scalar.name:
                self._sound = False
            return f"pointers({word}, {self._constant(value.type.shape if value.type.is_block() else None)})"
        if kind is tuple or kind is tl.tuple:
            parts = f"({''.join(self._returned(part) + ', ' for part in value)})"
            return parts if kind is tuple else f"several({parts})"
        if (
            value is not None
            and value is not ABSENT
            and kind not in (int, float, bool, str, _constexpr)
            and not isinstance(value, tl.dtype)
        ):
            self._sound = False
        return self._constant(value)

    def _compiled(self, result: Any) -> Any:
        """The recorded operation, as a function of the builder and the tensors."""
        returned = self._returned(result)
        if not self._sound or (result is None and not self._lines):
            return _OPAQUE
        self._note_branches()
        arguments = ", ".join(["b", *(f"a{number}" for number in range(len(self._tensors)))])
        constants = ", ".join(f"c{number}" for number in range(len(self._constants)))
        body = "".join(f"        {line}\n" for line in [*self._lines, f"return {returned}"])
        text = f"def make({constants}):\n    def replay({arguments}):\n{body}    return replay\n"
        if text not in _factories:
            names = {"tensor": _tensor, "pointers": _pointers, "several": tl.tuple, "ran": branches.ran}
            exec(compile(text, __file__, "exec"), names)
            _factories[text] = names["make"]
        return _factories[text](*self._constants)

    def _note_branches(self) -> None:
        if self._ran:
            self._lines.append(f"ran.update({self._constant(self._ran)})")

    def _own(self, result: Any, tensors: list[Any]) -> Any:
        """The result, with the caller's tensors in place of their copies."""
        if type(result) is tuple:
            return tuple([self._own(part, tensors) for part in result])
        for copy, tensor in zip(self._tensors, tensors, strict=True):
            if result is copy:
                return tensor
        return result

    def _also(self, copies: list[Any], tensors: list[Any]) -> None:
        """Let copies of tensors stand for these tensors."""
        self._kept.append(copies)
        for copy, tensor in zip(copies, tensors, strict=True):
            self._words[id(copy.handle)] = self._word(tensor.handle)
