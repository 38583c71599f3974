"""Launches a library's kernel in blocks of other sizes than its wrapper chooses."""

import contextlib
import dataclasses
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_REPLACED = threading.RLock()  # held while a kernel is replaced, as calls in two threads may want blocks of two sizes


@contextlib.contextmanager
def in_blocks(
    module: types.ModuleType, kernel: str, size: int | None, axis: int = 0, others: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Make the wrappers in `module` launch `kernel` in blocks of `size` value channels inside; None leaves the choice to them.

    The blocks of value channels are along `axis` of the kernel's grid, perhaps multiplied by the number of heads. `others` replace
    other arguments of the kernel, if it has them. RuntimeError if nothing was launched inside.
    """
    if size is None:
        yield
        return
    with _REPLACED:
        original = getattr(module, kernel)
        launcher = Launcher(original, size, axis, others or {})
        setattr(module, kernel, launcher)
        try:
            yield
        finally:
            setattr(module, kernel, original)
    if not launcher.launches:
        raise RuntimeError(f"nothing was launched in blocks of {size}: the wrapper took another path")


@dataclasses.dataclass
class Launcher:
    """Launches a kernel with the arguments of its wrapper, but another block of value channels and the grid that fits it."""

    kernel: Any
    size: int
    axis: int = 0
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    launches: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(**arguments: Any) -> Any:
            width, block = arguments["V"], arguments["BV"]
            heads, rest = divmod(grid[self.axis], _blocks(width, block))
            if rest:
                raise RuntimeError(f"axis {self.axis} of the grid must be blocks of {block} of {width} channels, got {grid}")
            self.launches += 1
            sizes = (*grid[: self.axis], heads * _blocks(width, self.size), *grid[self.axis + 1 :])
            others = {name: value for name, value in self.others.items() if name in arguments}
            return self.kernel[sizes](**{**arguments, **others, "BV": self.size})

        return launch


def _blocks(width: int, size: int) -> int:
    return -(-width // size)
