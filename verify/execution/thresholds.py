"""Whole numbers that an implementation's source names. Its sizes may have limits there, so a check has sizes just over them.

They are read from compiled code, and nothing is run: constants, what is folded of them such as `2**10`, defaults, attributes of
classes, and the globals that a function reads, modules among them. Python of other packages is followed; what a function imports
itself, compiled code and kernels are not seen.
"""

import contextlib
import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

LEAST, LARGEST = 33, 16_384  # smaller sizes are ordinary, and larger ones take too long
MOST = 8  # so many of the largest
OTHERS = ("triton", "torch", "numpy", "oracles", "properties", "verify")  # packages that are not under test


def thresholds_of(adapter: object) -> list[int]:
    """The largest MOST whole numbers from LEAST to LARGEST in the source of the adapter's classes and of what they reach."""
    found, seen = set[int](), dict[int, Any]()  # what was seen stays alive, so that no other value gets its id
    left: list[Any] = [kind for kind in type(adapter).__mro__ if _own(kind)]
    while left:
        value = left.pop()
        if type(value) is int:
            found |= {value} if LEAST <= value <= LARGEST else set()
        elif id(value) not in seen:
            seen[id(value)] = value
            left += _parts(value)
    return sorted(found)[-MOST:]


def _own(value: Any) -> bool:
    """Whether a class, function or module belongs to what is under test."""
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] not in (*OTHERS, *sys.stdlib_module_names)


def _parts(value: Any) -> list[Any]:
    """What a value of Python names: the numbers, functions and classes in it."""
    if isinstance(value, tuple | list):
        return [*value]
    if isinstance(value, staticmethod | classmethod | MethodType):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type) and _own(value):
        return [*vars(value).values()]
    if not isinstance(value, FunctionType) or not _own(value):
        return []
    codes = [*_codes(value.__code__)]
    names = {name for code in codes for name in code.co_names}
    read = [value.__globals__[name] for name in names & value.__globals__.keys()]
    for one in read:  # which grows, by what is read of modules
        if isinstance(one, ModuleType) and _own(one):
            parts = [vars(one)[name] for name in names & vars(one).keys()]
            read += [part for part in parts if not any(part is other for other in read)]
    found = [value.__defaults__ or (), tuple((value.__kwdefaults__ or {}).values())]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return [*found, *read, *(number for code in codes for number in _constants(code))]


def _constants(code: CodeType) -> list[Any]:
    """What the instructions of a code load: from Python 3.14 on, small numbers are no longer among its constants."""
    loads = (one for one in dis.get_instructions(code) if one.opcode in dis.hasconst or one.opname == "LOAD_SMALL_INT")
    return [one.argval for one in loads]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those that it contains."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
