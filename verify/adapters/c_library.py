"""An adapter whose implementation is a function of a shared library that C can call."""

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from oracles.operation import gradient_name
from verify.adapters.foreign import WORDS, Call, FileAdapter, Place

NUMBERS = ("scale", "eps")  # the options that are a number or None


class CError(Exception):
    """The function returned another number than 0, and `status` is True."""


class CLibrary(FileAdapter):
    """A function of a shared library, which gets its arguments in the order of `arguments`.

    - `library`: the path of the library. A name without a slash that no file in `folder` has is searched for by the system.
    - `function`: the name of the function.
    - `arguments`: a word for each argument, see below.
    - `backward`, `backward_arguments`: the same for the gradients, with `do` for the cotangent of `o`, and `dq` for a gradient.
    - `status`: whether the functions return an int, which is 0 if all went well.
    - `folder`, `layout` and `absent` as for a FileAdapter.

    The name of a tensor, an output too, is a pointer to its numbers on the CPU, null if the call does not have it. `q.shape` and
    `q.strides` (in elements) are pointers to int64_t, `q.dtype` is a text such as "bf16". A tensor whose strides the function gets
    lies as the call has it. All others are contiguous. An axis such as `T` is its size, an int64_t. An option is a double, an
    int64_t (also if it is a flag), a text, or a pointer to several int64_t. None is a null pointer, or NaN for `scale` and `eps`.
    """

    library: ClassVar[str] = ""
    function: ClassVar[str] = ""
    arguments: ClassVar[Sequence[str]] = ()
    backward: ClassVar[str] = ""
    backward_arguments: ClassVar[Sequence[str]] = ()
    status: ClassVar[bool] = False
    _named_by = "library"

    def _wrong(self) -> str | None:
        functions = {"function": "arguments", "backward": "backward_arguments"}
        if not self.domain.backward:
            del functions["backward"]
        for name in ("library", *functions):
            if not (isinstance(value := getattr(self, name), str) and value):
                return f"{name} must be a name, got {value!r}"
        for name in functions.values():
            words = getattr(self, name)
            if isinstance(words, str) or not words or not all(isinstance(word, str) for word in words):
                return f"{name} must be a list of words, one for each argument, got {words!r}"
        if "/" in self.library and (missing := self._missing("library", self.library)):
            return f"{missing}: compile it first"
        try:
            library = self._loaded()
        except OSError as error:
            return f"the library {self.library} cannot be loaded: {error}"
        lacking = [getattr(self, name) for name in functions if not hasattr(library, getattr(self, name))]
        return f"the library {self.library} has no function {lacking[0]}" if lacking else None

    def _loaded(self) -> ctypes.CDLL:
        path = self._path(self.library)
        return ctypes.CDLL(path if os.path.isfile(path) else self.library)

    def _ask(self, call: Call, word: str, sent: Mapping[Place, Tensor], asked: Sequence[Place]) -> list[Tensor]:
        call.check_legal()  # C would read beyond inputs of other shapes
        forward = word == "call"
        name, words = (self.function, self.arguments) if forward else (self.backward, self.backward_arguments)
        call.check_names({word.partition(".")[0] for word in words}, "`arguments`" if forward else "`backward_arguments`")
        memory = {place.name: place.theirs(x, strided=f"{place.name}.strides" in words) for place, x in sent.items()}
        answers = [memory.setdefault(place.name, place.empty()) for place in asked]  # what is updated in place is an input too
        arguments = _Arguments(call, memory)
        returned = getattr(self._loaded(), name)(*map(arguments.of, words))
        if self.status and returned:
            raise CError(f"{name} returned {returned}")
        return answers


class _Arguments:
    """The arguments of a function in C."""

    def __init__(self, call: Call, memory: Mapping[str, Tensor]) -> None:
        self._memory, self._operation, self._sizes, self._options = memory, call.operation, call.sizes, dict(call.options())
        outputs = [port.name for port in call.operation.outputs]
        inputs = [port.name for port in call.operation.inputs]
        self._tensors = {
            *inputs,
            *outputs,
            *map(gradient_name, inputs),
            *(f"d{name}" for name in outputs),
            *call.tensors,
            "cu_seqlens",
        }

    def of(self, word: str) -> Any:
        """The argument that a word stands for. ValueError for an unknown word."""
        name, _, part = word.partition(".")
        if name in self._tensors and part in ("", "shape", "strides", "dtype"):
            x = self._memory.get(name)
            if x is None:
                return ctypes.c_void_p(None)
            if part == "dtype":
                return ctypes.c_char_p(WORDS[x.dtype].encode())
            return _numbers(x.shape if part == "shape" else x.stride()) if part else ctypes.c_void_p(x.data_ptr())
        if word in self._sizes:
            return ctypes.c_int64(self._sizes[word])
        if word not in self._options:
            tensors = " ".join(sorted(self._tensors))
            raise ValueError(
                f"arguments must name tensors ({tensors}), axes ({' '.join(self._sizes)}) and options ({' '.join(self._options)})"
                f" of {self._operation.name}, got {word}"
            )
        value = self._options[word]
        if value is None:
            return ctypes.c_double(float("nan")) if word in NUMBERS else ctypes.c_void_p(None)
        if isinstance(value, str):
            return ctypes.c_char_p(value.encode())
        if isinstance(value, tuple | list):
            return _numbers(value)
        return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)


def _numbers(values: Iterable[int]) -> Any:
    numbers = [*values]
    return (ctypes.c_int64 * len(numbers))(*numbers)
