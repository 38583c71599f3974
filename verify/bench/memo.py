"""A cache of what the oracle computed."""

import collections
import ctypes
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from oracles.operation import Inputs, Operation
from properties.laws.law import Cotangents

T = TypeVar("T")


class Memo:
    """A cache of the oracle's results, by the bytes of their inputs. Laws, shrinking and animals often repeat the same inputs.

    `most` is the number of results that are kept, `numbers` the number of elements above which a call is not cached.
    """

    def __init__(self, most: int, numbers: int) -> None:
        self.most, self.numbers = most, numbers
        self.answers: collections.OrderedDict[bytes, Any] = collections.OrderedDict()

    def get(self, spec: Operation, inputs: Inputs, cotangents: Cotangents, asked: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The result of `make` for these inputs, from the cache if it is there."""
        tensors = [x for x in (*inputs.values(), *(cotangents or {}).values()) if isinstance(x, Tensor)]
        if sum(x.numel() for x in tensors) > self.numbers or any(x.device.type != "cpu" for x in tensors):
            return make()  # computing the key would take longer than the result
        # Outputs may differ in their axes alone: a convolution's states have W or W - 1 columns.
        digest = hashlib.sha256(repr((spec.name, spec.outputs, asked)).encode())
        for kind, values in (("input", inputs), ("cotangent", cotangents or {})):
            for name, value in values.items():
                what = (kind, name, value.dtype, value.shape, value.device) if isinstance(value, Tensor) else (kind, name, value)
                digest.update(repr(what).encode())
                if isinstance(value, Tensor):
                    digest.update(_bytes(value))
        key = digest.digest()
        if key in self.answers:
            self.answers.move_to_end(key)
        else:
            self.answers[key] = make()
            if len(self.answers) > self.most:
                self.answers.popitem(last=False)
        answer: T = self.answers[key]
        return answer


def _bytes(x: Tensor) -> bytes:
    """The bytes of a contiguous copy of a tensor, without numpy, which torch may lack."""
    copy = x.detach().contiguous().cpu()
    return ctypes.string_at(copy.data_ptr(), copy.numel() * copy.element_size()) if copy.numel() else b""


MEMO = Memo(64, 2**17)
