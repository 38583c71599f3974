"""Faults of the world: an operation in the middle of a call fails, as an allocation does when memory runs out."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGE = "out of memory, as the law makes it in the middle of a call"
# Which operations of torch are counted: all; those that return new tensors, as one that writes to a tensor which is there needs no
# memory for that; or those that make a tensor out of nothing, as of a workspace or a table.
Counts = Literal["all", "allocations", "made"]
MAKING = ("empty", "zeros", "ones", "full", "arange", "eye", "scalar_tensor")


class FailingOperation(TorchDispatchMode):
    """A context in which operation number `at` of torch raises torch.OutOfMemoryError, once. `failed` says whether it did.

    Every allocation of torch is an operation, and so is every kernel of torch. A kernel of another compiler gets memory of torch.
    Views allocate nothing and are not counted. `counts` says which others are. `seen` says how many of them there were. With 0 for
    `at`, none fails.
    """

    def __init__(self, at: int, counts: Counts = "all") -> None:
        super().__init__()
        self.at, self.counts, self.seen, self.failed = at, counts, 0, False

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
        counts = not getattr(function, "is_view", False) and (self.counts == "all" or _allocates(function, self.counts))
        self.seen += counts
        if counts and self.seen == self.at:
            self.failed = True
            raise torch.OutOfMemoryError(MESSAGE)
        return function(*args, **(kwargs or {}))


@functools.cache
def _allocates(function: Any, counts: Counts) -> bool:
    """Whether an operation that is no view counts as an allocation. One without a schema may do anything, and is not counted."""
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable or not any("Tensor" in str(result.type) for result in schema.returns):
        return False
    name = schema.name.partition("::")[2].removeprefix("new_").removesuffix("_like").removesuffix("_strided")
    return counts == "allocations" or name in MAKING
