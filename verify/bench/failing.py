"""Faults of the world: an operation in the middle of a call fails, as an allocation does when memory runs out."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGE = "out of memory, as the law makes it in the middle of a call"


class FailingOperation(TorchDispatchMode):
    """A context in which operation number `at` of torch raises torch.OutOfMemoryError, once. `failed` says whether it did.

    Every allocation of torch is an operation, and so is every kernel of torch. A kernel of another compiler gets memory of torch.
    Views allocate nothing and are not counted. With `allocations`, only operations that return new tensors are counted: one that
    writes to a tensor which is there needs no memory for that. `seen` says how many there were. With 0 for `at`, none fails.
    """

    def __init__(self, at: int, *, allocations: bool = False) -> None:
        super().__init__()
        self.at, self.allocations, self.seen, self.failed = at, allocations, 0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch calls `__torch_dispatch__` with its compiler switched off, for which it imports the compiler first.

        That import takes two seconds, and torch compiles nothing inside a mode.
        """
        return False

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, or raise instead of it."""
        counts = not getattr(function, "is_view", False) and (not self.allocations or _allocates(function))
        self.seen += counts
        if counts and self.seen == self.at:
            self.failed = True
            raise torch.OutOfMemoryError(MESSAGE)
        return function(*args, **(kwargs or {}))


@functools.cache
def _allocates(function: Any) -> bool:
    """Whether an operation that is no view returns new tensors. One without a schema may do anything, and is not counted."""
    schema = getattr(function, "_schema", None)
    return schema is not None and not schema.is_mutable and any("Tensor" in str(result.type) for result in schema.returns)
