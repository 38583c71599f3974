"""Hands arguments on that a domain leaves out: to the function under test, where it has a parameter by a usual name for them.

An adapter's `run` maps a case to a call, so it knows nothing of what its domain leaves out. Here the adapter is called as it is,
and the argument is added on its way into the function under test. An adapter may pass the argument itself instead, or raise
Unsupported.
"""

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters.base import Adapter
from verify.adapters.interface import Unsupported, parameters_of
from verify.adapters.padding import padding_mask
from verify.reach import recorder

Value = Callable[[Inputs], Any]
# Takes the arguments of a call by name, and returns a function that is applied to what the call returns.
Turn = Callable[[dict[str, Any]], Callable[[Any], Any]]


def _tokens(x: Inputs) -> Tensor:
    """The tensor with the tokens of a call."""
    tokens: Tensor = next(x[name] for name in ("q", "x", "hidden") if x.get(name) is not None)
    return tokens


def _owners(x: Inputs) -> Tensor:
    """The number of the sequence of each token, [1, T]."""
    lengths = x.cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths).int().unsqueeze(0)


def _state(x: Inputs) -> Any:
    return x.state


def _without_oldest(x: Inputs) -> Any:
    return x.state[..., 1:]


def _turned(x: Inputs) -> Any:
    return x.state.mT.contiguous()


def _mask(x: Inputs) -> Any:
    return padding_mask(x, _tokens(x))


def _padding(x: Inputs) -> Any:
    """A mask that has ones where a row is padding."""
    mask = padding_mask(x, _tokens(x))
    return None if mask is None else 1 - mask


def _yes(_: Inputs) -> bool:
    return True


_OFFSETS: dict[str, Value] = {
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k"),
        lambda x: x.cu_seqlens,
    ),
    "query_start_loc": lambda x: x.cu_seqlens.int(),
}
_STATES = ("initial_state", "initial_states", "state", "h0", "recurrent_state", "conv_state")
_MASKS = ("attention_mask", "padding_mask", "mask")
# For each thing that a domain may leave out (properties/words/outside.py): the ways to hand it on, each with the usual names of the
# parameter. Libraries differ in what they take, so a call is right if it is so in one of the ways.
WAYS: Mapping[str, tuple[Mapping[str, Value], ...]] = {
    "packed": ({**_OFFSETS, "seq_idx": _owners}, _OFFSETS),
    "initial_state": tuple(dict.fromkeys(_STATES, way) for way in (_state, _turned, _without_oldest)),
    "qk_norm": (
        dict.fromkeys(("use_qk_l2norm_in_kernel", "use_qk_l2norm", "use_qk_norm_in_kernel", "qk_l2norm", "qk_norm"), _yes),
    ),
    "scale": (dict.fromkeys(("scale", "softmax_scale", "sm_scale"), lambda x: x.scale),),
    "attention_mask": (dict.fromkeys(_MASKS, _mask), dict.fromkeys(_MASKS, _padding)),
    "state_v_first": (dict.fromkeys(("state_v_first", "transpose_state_layout"), _yes),),
    "head_first": ({"head_first": _yes},),
}


def _values_first(arguments: dict[str, Any]) -> Callable[[Any], Any]:
    """States have the values' axis before the keys'."""
    for name in _STATES:
        if isinstance(arguments.get(name), Tensor):
            arguments[name] = arguments[name].mT.contiguous()

    def back(answer: Any) -> Any:
        if not (isinstance(answer, tuple) and len(answer) > 1 and isinstance(answer[1], Tensor)):
            return answer
        return (answer[0], answer[1].mT, *answer[2:])

    return back


def _heads_first(arguments: dict[str, Any]) -> Callable[[Any], Any]:
    """Every tensor with tokens has the heads' axis before the tokens'."""
    tokens = next((value.shape[:2] for value in arguments.values() if isinstance(value, Tensor) and value.ndim == 4), None)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name not in _STATES and value.ndim > 2 and value.shape[:2] == tokens:
            arguments[name] = value.transpose(1, 2).contiguous()

    def back(answer: Any) -> Any:
        return (answer[0].transpose(1, 2), *answer[1:]) if isinstance(answer, tuple) else answer.transpose(1, 2)

    return back


_TURNS: Mapping[str, Turn] = {"state_v_first": _values_first, "head_first": _heads_first}


class Handing:
    """Calls an adapter with something that its domain leaves out, in one of the ways to hand it on.

    - `adapter` is the adapter with the wider domain; its `run` hands the argument on.
    - `not_asked` says why the implementation was not asked, or "".
    - `raised` says whether the function under test raised an error, and `returned` whether it returned.
    """

    def __init__(self, adapter: Adapter, domain: Any, what: str, way: int) -> None:
        self._class, self._what, self._values = type(adapter), what, WAYS[what][way]
        self._functions: list[FunctionType] | None = None
        self._inside = False
        self.not_asked, self.raised, self.returned = "", False, False
        self.adapter = copy.copy(adapter)
        self.adapter.domain = domain
        self.adapter.run = self._run  # type: ignore[method-assign]

    def _run(self, x: Inputs) -> Any:
        call = functools.partial(self._class.run, self.adapter)
        if self._functions is None:
            self._functions = self._found(x, call)
        taking = {function: self._names(function) for function in self._functions}
        taking = {function: names for function, names in taking.items() if names}
        if len(taking) != 1:
            self._refuse("the function under test has no parameter for it" if self._functions else recorder.UNSEEN)
        ((function, names),) = taking.items()
        calls = [0]
        with _replaced(function, self._class, functools.partial(self._passing, function, names, x, calls)):
            answer = call(x)
        if calls[0] != 1:
            self._refuse(f"the adapter calls {function.__qualname__} {calls[0]} times")
        return answer

    def _found(self, x: Inputs, call: Callable[[Inputs], Any]) -> list[FunctionType]:
        """The functions under test. They are seen in a call without the argument, unless the adapter itself passes it."""
        copies = x.replaced(**{name: value.detach().clone() for name, value in x.items() if isinstance(value, Tensor)})
        refused = None
        with torch.no_grad(), recorder.tested(self.adapter) as functions:
            try:
                call(copies)
            except Exception as error:  # the call lacks the argument, so any error is right
                refused = error
        if refused is not None and not functions:
            kind = "" if isinstance(refused, Unsupported) else f"{type(refused).__name__}: "
            self._refuse(f"the adapter refuses it ({kind}{refused})"[:200])
        return functions

    def _refuse(self, reason: str) -> None:
        self.not_asked = reason
        raise Unsupported(reason)

    def _names(self, function: FunctionType) -> list[str]:
        """The parameters that take the argument: of several names for the same, the first one. Offsets may need several."""
        names = [name for name in self._values if name in parameters_of(function)]
        return names if self._what == "packed" else names[:1]

    def _passing(self, function: FunctionType, names: list[str], x: Inputs, calls: list[int], value: Callable[..., Any]) -> Any:
        """A function that calls `value`, which is the function under test or wraps it, with the argument."""
        signature = inspect.signature(function)

        @functools.wraps(value)
        def passing(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return value(*args, **kwargs)
            calls[0] += 1
            self._inside = True
            try:
                args, kwargs, back = self._with(signature, names, x, args, kwargs)
                try:
                    answer = value(*args, **kwargs)
                except Exception:
                    self.raised = True
                    raise
                self.returned = True
                return back(answer)
            finally:
                self._inside = False

        passing.__signature__ = signature  # type: ignore[attr-defined]
        if hasattr(value, "__wrapped__"):  # an adapter may unwrap what it calls
            passing.__wrapped__ = self._passing(function, names, x, calls, value.__wrapped__)
        else:
            del passing.__wrapped__
        return passing

    def _with(
        self, signature: inspect.Signature, names: list[str], x: Inputs, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
        """The arguments of a call with the one that is handed on, and a function for what the call returns."""
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            self._refuse("the adapter calls the function under test in another way than its signature says")
        total = _tokens(x).shape[:2].numel()
        if not any(isinstance(value, Tensor) and _has_tokens(value, total) for value in bound.arguments.values()):
            self._refuse("the function under test does not get all tokens of a call")
        rest = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")
        arguments = {**bound.arguments, **bound.arguments.get(rest, {})}
        for name in names:
            value, passed = self._values[name](x), arguments.get(name)
            default = signature.parameters[name].default if name in signature.parameters else None
            if self._what in _TURNS and (passed or (passed is None and default is True)):
                self._refuse(f"the adapter calls with {name} already")
            if passed is None or passed is default or passed is False:
                arguments[name] = value
            elif not _equal(passed, value):
                self._refuse(f"the adapter passes a {name} of its own")
        back = _TURNS.get(self._what, lambda _: lambda answer: answer)(arguments)
        for name in signature.parameters.keys() & arguments.keys() - {rest}:
            bound.arguments[name] = arguments[name]
        more = {name: value for name, value in arguments.items() if name not in signature.parameters}
        if rest:
            bound.arguments[rest] = more
        ordered = {name: bound.arguments[name] for name in signature.parameters if name in bound.arguments}
        bound = inspect.BoundArguments(signature, ordered)
        return bound.args, bound.kwargs, back


def _has_tokens(x: Tensor, total: int) -> bool:
    return total in x.shape or (x.ndim > 1 and total in (x.shape[:2].numel(), x.shape[0] * x.shape[-2]))


def _equal(passed: Any, value: Any) -> bool:
    if isinstance(passed, Tensor) and isinstance(value, Tensor):
        return passed.shape == value.shape and bool((passed == value).all())
    return type(passed) is type(value) and bool(passed == value)


@contextlib.contextmanager
def _replaced(function: FunctionType, kind: type, passing: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function, and what wraps it, by what `passing` makes of it, wherever a module, its class or an adapter has it."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in [*_places(function, kind)]:
            undo.append((owner, name, value))
            new = staticmethod(passing(value.__func__)) if isinstance(value, staticmethod) else passing(value)
            _set(owner, name, new)
        yield
    finally:
        for owner, name, value in undo:
            _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, MutableMapping):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _places(function: FunctionType, kind: type) -> Iterator[tuple[Any, str, Any]]:
    """Where a function lies: the owner, which is a class or the names of a module, the name there, and what has the name."""
    for base in kind.__mro__[:-1]:
        for name, value in [*vars(base).items()]:
            if isinstance(value, staticmethod) and _is(value.__func__, function):
                yield base, name, value
    path, _, last = function.__qualname__.rpartition(".")
    if path:
        owner = recorder.object_of(f"{function.__module__}:{path}")
        if isinstance(owner, type) and last in vars(owner):
            yield owner, last, vars(owner)[last]
        return
    methods = [member for base in kind.__mro__ for member in vars(base).values() if isinstance(member, FunctionType)]
    modules = [vars(module) for name, module in [*sys.modules.items()] if hasattr(module, "__dict__") and not recorder.helps(name)]
    spaces = {id(space): space for space in (*modules, *(method.__globals__ for method in methods))}
    for space in spaces.values():
        for name, value in [*space.items()]:
            if _is(value, function):
                yield space, name, value


def _is(value: Any, function: FunctionType) -> bool:
    """Whether a value is a function or wraps it."""
    return isinstance(value, FunctionType | functools._lru_cache_wrapper) and recorder.unwrapped(value) is function
