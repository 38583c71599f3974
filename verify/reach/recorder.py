"""Records what a case looks at: its sizes, the arguments of the function under test, and the blocks of Triton functions that run.

The function under test is the adapter's `api` or, without one, the first function of a library that the adapter calls with a
tensor. It is found by a profile hook, which is taken away once it has seen the call, so that a kernel does not run under it. The
hook only reads. Functions of torch, Triton, numpy, einops, the standard library and gdn-verify are no functions under test. If an
adapter calls no other library, the first function of its own file that gets a tensor counts. A wrapper that only passes its
arguments on counts as the function that it wraps. A function that its module does not have by its name must be named in `api`.
"""

import collections
import contextlib
import enum
import functools
import inspect
import math
import os
import pathlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from verify.adapters.base import Implementation
from verify.interpreter import branches
from verify.process.reach import DEFAULT, NUMBER, Reach, Values
from verify.reach import lines

# Events of the hook in one call, after which it gives up. With `api`, other functions may run before the one that is looked for.
EVENTS, EVENTS_OF_API = 20_000, 50_000
EVENTS_OF_CANDIDATE = 100  # after a function of the adapter's own file was found, before it counts
# After so many calls in a row in which nothing was found, only calls whose number is a power of two are looked at.
MISSES = 8
OF_THE_ZOO = "verify.zoo."  # the modules of wrong implementations; this module does not import them
HELPERS = ("torch", "triton", "numpy", "einops")
UNSEEN = "no function under test was seen"
_reach: Reach | None = None  # of the case that runs in this process
_lock = threading.Lock()
_misses: collections.Counter[type] = collections.Counter()
# For each adapter: the files and the packages of functions under test, and the number of loaded modules when we found its files.
_tested: dict[type, tuple[set[str], set[str], int]] = {}
_around: dict[type, frozenset[str]] = {}  # for each adapter, the files of Python around its kernels


@contextlib.contextmanager
def recording(adapter: Implementation | None = None) -> Iterator[Reach]:
    """Record the reach of everything inside, in all threads. With an adapter, the lines of Python that run are recorded too.

    Lines of the zoo's wrong implementations are not recorded: no report has them, and recording would triple the time of their
    loops over tokens.
    """
    global _reach
    _reach = reach = Reach()
    found: dict[str, set[int]] = {}
    adapter = None if type(adapter).__module__.startswith(OF_THE_ZOO) else adapter
    if adapter is not None:
        reach.unrecorded = lines.hindered()
    with contextlib.ExitStack() as stack:
        stack.callback(_end)
        if adapter is not None and not reach.unrecorded:
            found = stack.enter_context(lines.recorded(_around.get(type(adapter))))
        yield reach
    if found:
        files = _files_around(type(adapter), reach)
        for file in files & found.keys():
            reach.note_lines(file, found[file])


def _end() -> None:
    global _reach
    _reach = None


def _files_around(kind: type, reach: Reach) -> frozenset[str]:
    """The files of Python around the kernels that an adapter calls.

    They are the adapter's own file, the files of functions under test, and the files of their packages that have Triton kernels.
    Once a function under test was found, later cases record these files alone.
    """
    own, packages, modules = _tested.get(kind, ({file for file in _files(kind) if not _place(file)}, set(), 0))
    known = len(own), len(packages), len(sys.modules)
    for function in reach.functions:
        module = function.partition(":")[0]
        own.add(getattr(sys.modules.get(module), "__file__", None) or "")
        packages.add(module.partition(".")[0])
    if kind not in _around or known != (len(own), len(packages), modules):
        with_kernels = (file for package in packages for file in _with_kernels(package))
        around = frozenset(filter(None, (*own, *with_kernels)))
        _tested[kind] = own, packages, len(sys.modules)
        if not packages:
            return around
        _around[kind] = around
    return _around[kind]


def _with_kernels(package: str) -> Iterator[str]:
    """The files of those modules of a package that have functions in Triton's language."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) if name.partition(".")[0] == package else None
        members = [*vars(module).values()] if file and not _place(file) else []
        if file and any(type(member).__module__.partition(".")[0] == "triton" for member in members):
            yield file


@contextlib.contextmanager
def launches() -> Iterator[None]:
    """Record which blocks of interpreted Triton functions run inside."""
    if _reach is None:
        yield
        return
    with branches.recorded() as found, lines.called():
        yield
    with _lock:
        for kernel, (every, ran) in found.items() if _reach is not None else ():
            _reach.note_blocks(kernel, every, ran)


@contextlib.contextmanager
def arguments(adapter: Implementation) -> Iterator[None]:
    """Record the arguments of the adapter's function under test, if it is called inside and no other profiler runs."""
    kind = type(adapter)
    seldom = _misses[kind] > MISSES and _misses[kind] & (_misses[kind] - 1)
    _misses[kind] += 1
    if _reach is None or sys.getprofile() is not None or seldom:
        yield
        return
    hook = _Hook(adapter)
    sys.setprofile(hook.see)
    try:
        yield
    finally:
        sys.setprofile(None)
        if _reach is not None:
            _reach.trouble = hook.trouble
        if (call := hook.found or hook.candidate) and _reach is not None:
            _misses[kind] = 0
            with _lock:
                for function, values in call.items():
                    _reach.note_call(function, values)


@contextlib.contextmanager
def tested(adapter: Implementation) -> Iterator[list[FunctionType]]:
    """Yield a list that has, afterwards, the functions under test that the adapter has called inside, without constructors."""
    hook, found, other = _Hook(adapter), list[FunctionType](), sys.getprofile()
    sys.setprofile(hook.see)
    try:
        yield found
    finally:
        sys.setprofile(other)
        called = (*hook.found, *(() if hook.found else hook.candidate))
        found += [hook.functions[name] for name in called if not name.endswith(".__init__")]


def object_of(name: str) -> Any:
    """What `module:name` is, or None."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def helps(module: str) -> bool:
    """Whether a module, by its name, belongs to the standard library or to one of HELPERS, which have no function under test."""
    top = module.partition(".")[0]
    return top in HELPERS or top in sys.stdlib_module_names


def sizes_of(case: Any, adapter: Any) -> dict[str, int]:
    """The sizes of a case, by their names in verify/reach/report.py."""
    if (steps := getattr(case, "plan", None)) is not None:  # a trace: the rows of its steps
        counts = [[row.count for row in step.rows] for step in steps]
        lengths = [count for rows in counts for count in rows]
        sizes = {"tokens": max(map(sum, counts), default=0), "sequences": max(map(len, counts), default=0)}
        sizes["sequence"] = max((row.start + row.count for step in steps for row in step.rows), default=0)
    else:
        lengths = case.lengths
        sizes = {"tokens": sum(lengths), "sequences": len(lengths), "sequence": max(lengths, default=0)}
    if hasattr(case, "heads"):
        sizes["heads"] = case.heads
    if hasattr(case, "value_heads"):
        sizes["value_heads"] = case.value_heads // case.heads
    if chunk := adapter.chunk:
        sizes["chunks"] = math.ceil(max(lengths, default=0) / chunk)  # in a trace, chunks begin with a row
    if hasattr(case, "cp"):
        sizes |= {"ranks": case.tp * case.cp, "rank_tokens": max(len(tokens) for tokens in case.tokens_of_ranks())}
    return sizes


class _Hook:
    """A profile hook for one call of an adapter: the values of the function under test in `found`, or else in `candidate`."""

    def __init__(self, adapter: Implementation) -> None:
        self.found: dict[str, dict[str, Values]] = {}
        self.candidate: dict[str, dict[str, Values]] = {}
        self.functions: dict[str, FunctionType] = {}  # those in `found` and `candidate`, by the same names
        self._adapter, self._files = adapter, _files(type(adapter))
        self._api = vars(adapter).get("api", type(adapter).api)  # as an attribute of the adapter, a function would be a method
        self._wanted, self._seen = dict[CodeType, FunctionType](), set[CodeType]()
        self._nameless = ""  # the function of a library that its module does not have by its name
        self._import: FrameType | None = None  # of the import that runs
        self._left = EVENTS if self._api is None else EVENTS_OF_API

    @property
    def trouble(self) -> str:
        """Why the function under test could not be recorded, or ""."""
        if self._api is not None and not (self._wanted or _named(self._api)):
            return f"api {self._api!r} names no function or class in Python that the adapter imports"
        return f"{self._nameless} is no name in its module: name the function under test in api" if self._nameless else ""

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Called at each event of the thread. An error in here must not reach the implementation."""
        if self._import is not None:  # modules may call anything while they are imported
            self._import = None if event == "return" and frame is self._import else self._import
            return
        self._left -= 1
        try:
            if self._left < 0 or (event == "call" and self._ends(frame)):
                sys.setprofile(None)
        except Exception:
            sys.setprofile(None)

    def _ends(self, frame: FrameType) -> bool:
        """Look at a call. Returns whether no further call is looked for."""
        code = frame.f_code
        if code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib"):
            self._import = frame
            return False
        if self._api is not None:
            self._wanted = self._wanted or _named(self._api)  # its module may be imported in the middle of the call
            if code in self._wanted:
                self._seen.add(code)
                self.found |= self._call(frame, self._wanted[code])
            return bool(self._wanted) and self._seen == self._wanted.keys()
        if code.co_name.startswith("<"):
            return False
        place = _place(code.co_filename)
        if code.co_filename in self._files:
            is_method = frame.f_locals.get("self") is self._adapter
            if place != "ours" and not (self.candidate or is_method) and _has_tensor(frame):
                self.candidate = self._call(frame, _function_of(frame))
                self._left = min(self._left, EVENTS_OF_CANDIDATE) if self.candidate else self._left
        elif not place and _has_tensor(frame):
            self.found = self._call(frame, _function_of(frame))
            if not self.found and not _passes_on(code):
                self._nameless = f"{frame.f_globals.get('__name__')}:{code.co_qualname}"
            return bool(self.found or self._nameless)
        return False

    def _call(self, frame: FrameType, function: FunctionType | None) -> dict[str, dict[str, Values]]:
        """A function whose frame begins, or the one that it wraps, and the values of its parameters. Empty if nothing is known."""
        function, values = _call(frame, function)
        if function is None:
            return {}
        name = f"{function.__module__}:{function.__qualname__}"
        self.functions[name] = function
        return {name: _described(values, _signature(function)[1], function.__code__)}


@functools.cache
def _files(kind: type) -> frozenset[str]:
    """The files in which an adapter's class and its bases are defined."""
    files = (getattr(sys.modules.get(base.__module__), "__file__", None) for base in kind.__mro__)
    methods = (member.__code__.co_filename for base in kind.__mro__ for member in vars(base).values() if inspect.isfunction(member))
    return frozenset(filter(None, (*files, *methods)))


_OURS = tuple(
    str(pathlib.Path(os.path.abspath(__file__)).parents[2] / name) + os.sep for name in ("oracles", "properties", "verify")
)
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


@functools.cache
def _place(file: str) -> str:
    """Whose file it is: "ours", "helper" for the standard library and HELPERS, "" for everything else."""
    if file.startswith(_OURS):
        return "ours"
    parts = pathlib.PurePath(file).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            rest = parts[len(parts) - parts[::-1].index(folder) :]
            return "helper" if rest and rest[0].removesuffix(".py") in HELPERS else ""
    return "helper" if file.startswith(("<", *_STANDARD, os.path.dirname(torch.__file__) + os.sep)) else ""


def _named(api: str | Callable[..., Any]) -> dict[CodeType, FunctionType]:
    """The function under test by its code, or of a class: its constructor, its `forward` and its `__call__`.

    Empty if its module is not imported, or if it is not written in Python.
    """
    target: Any = object_of(api) if isinstance(api, str) else api
    members = [
        vars(target)[name] for name in ("__init__", "forward", "__call__") if isinstance(target, type) and name in vars(target)
    ]
    functions = [unwrapped(function) for function in members or [target]]
    return {function.__code__: function for function in functions if isinstance(function, FunctionType)}


def _passes_on(code: CodeType) -> bool:
    """Whether a function has the parameters *args and **kwargs and no other."""
    both = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return code.co_flags & both == both and not code.co_argcount and not code.co_kwonlyargcount


def unwrapped(function: Any) -> Any:
    """The function behind wrappers, by `__wrapped__` or by the one function that a wrapper's closure has."""
    function = inspect.unwrap(function)
    while isinstance(function, FunctionType) and _passes_on(function.__code__):
        inner = [cell.cell_contents for cell in function.__closure__ or () if isinstance(_contents(cell), FunctionType)]
        if len(inner) != 1:
            break
        function = inspect.unwrap(inner[0])
    return function


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _call(frame: FrameType, function: FunctionType | None) -> tuple[FunctionType | None, Mapping[str, Any]]:
    """A function whose frame begins, or the one that it wraps, and its arguments. None if it is not known."""
    code, local = frame.f_code, frame.f_locals
    if not _passes_on(code):
        return function, {name: local[name] for name in code.co_varnames[: _parameters(code)] if name in local}
    inner = [local[name] for name in code.co_freevars if isinstance(local.get(name), FunctionType)]
    function = unwrapped(inner[0]) if len(inner) == 1 else None
    if function is None or _passes_on(function.__code__):
        return None, {}
    place = code.co_varnames
    bound = _signature(function)[0].bind_partial(*local[place[0]], **local[place[1]])
    bound.apply_defaults()
    return function, bound.arguments


@functools.lru_cache(64)
def _signature(function: FunctionType) -> tuple[inspect.Signature, dict[str, Any]]:
    """A function's signature, and the defaults of its parameters."""
    signature = inspect.signature(function)
    defaults = {name: one.default for name, one in signature.parameters.items() if one.default is not one.empty}
    return signature, defaults


def _parameters(code: CodeType) -> int:
    """How many local variables of a function are parameters."""
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + stars


def _function_of(frame: FrameType) -> FunctionType | None:
    """The function that a frame runs, by its name in its module. None if its module has another one by that name, or none."""
    named: Any = sys.modules.get(frame.f_globals.get("__name__", ""))
    for part in frame.f_code.co_qualname.split("."):
        named = getattr(named, part, None)
    function = inspect.unwrap(named) if callable(named) else None
    return function if isinstance(function, FunctionType) and function.__code__ is frame.f_code else None


def _has_tensor(frame: FrameType) -> bool:
    """Whether a tensor is among the arguments of a call, or in a list, tuple or dict among them."""
    code = frame.f_code
    values = (frame.f_locals.get(name) for name in code.co_varnames[: _parameters(code)])
    return any(isinstance(item, Tensor) for value in values for item in (value, *_items(value)))


def _items(value: Any) -> tuple[Any, ...]:
    if type(value) is dict:
        return tuple(value.values())
    return tuple(value) if type(value) in (list, tuple) else ()


def _described(values: Mapping[str, Any], defaults: Mapping[str, Any], code: CodeType) -> dict[str, Values]:
    """The values of a call's parameters by name. What comes in `**kwargs` is a parameter of its own; `self` is none."""
    stars = _parameters(code) - code.co_argcount - code.co_kwonlyargcount
    last = code.co_varnames[_parameters(code) - 1] if stars and code.co_flags & inspect.CO_VARKEYWORDS else None
    first = code.co_varnames[0] if code.co_argcount else None
    found: dict[str, Values] = {}
    for name, value in values.items():
        if name == first and name in ("self", "cls", "ctx"):
            continue
        if name == last and isinstance(value, dict):
            found |= {str(key): _values(item) for key, item in value.items()}
        else:
            found[name] = Values({DEFAULT}) if name in defaults and _equal(value, defaults[name]) else _values(value)
    return found


def _equal(value: Any, default: Any) -> bool:
    """Whether a value is the default: the same object, or an equal value of a plain type."""
    return value is default or (type(value) is type(default) and isinstance(value, bool | int | float | str) and value == default)


def _values(value: Any) -> Values:
    """The kind of one value."""
    if isinstance(value, Tensor):
        return Values({str(value.dtype).removeprefix("torch.") + ("" if value.is_contiguous() else " strided")})
    if value is None or isinstance(value, bool | enum.Enum | torch.dtype):
        return Values({str(value)[:40]})
    if isinstance(value, int | float):
        number = float(value)
        return Values({NUMBER}, number, number) if math.isfinite(number) else Values({str(number)})
    return Values({repr(value[:40]) if isinstance(value, str) else type(value).__name__[:40]})
