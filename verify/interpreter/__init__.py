"""Triton's CPU interpreter, corrected so that it runs Gated DeltaNet kernels without a GPU, and fast enough to check them.

`patches` corrects what Triton's interpreter does differently from a GPU, with `language`, `arithmetic` and `access`. `launch` runs
all programs of a grid together: `grid` runs their statements, `variables` holds their variables, `operations` runs their
operations, `memory` their reads and writes, and `races` finds conflicts between two programs. If programs cannot run together, they
run one after another, with the same corrections. `repeats` knows the launches that ran before. `internals` has the names of Triton
that all of these use. `self_test` decides with `known_kernels` whether an untested Triton is used.

`launch`, `grid`, `variables`, `operations`, `repeats` and `known_kernels` import Triton; import them after `install()`.
"""

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from verify.interpreter import patches
from verify.interpreter.memory import OutOfBounds
from verify.interpreter.patches import TooManyPrograms, UnknownTriton, patch
from verify.interpreter.races import Race

__all__ = [
    "OutOfBounds",
    "Race",
    "TooManyPrograms",
    "UnknownTriton",
    "has_launched",
    "install",
    "install_with_triton",
]


def install(*, tested: bool = False) -> None:
    """Make this process interpret every Triton kernel, with the rounding of a GPU.

    Call it in a worker process before anything imports triton. It raises RuntimeError if triton is already imported for
    compilation. A second call changes nothing. From then on a launch that accesses memory outside its tensors raises OutOfBounds.
    A race raises Race, unless programs run one after another or inside `races.accepted()`. An untested Triton must pass a self-test
    (`self_test`), which `tested` leaves out. If it fails, every launch raises UnknownTriton.
    """
    if patch(tested=tested):
        from verify.interpreter import launch

        launch.patch()


def has_launched() -> bool:
    """Whether this process has launched an interpreted kernel, or has refused to."""
    launch = sys.modules.get("verify.interpreter.launch")  # imported only where kernels are interpreted
    return patches.refused or bool(launch and launch.launches)


def install_with_triton() -> None:
    """Arrange that `install()` is called when something first imports triton. Implementations in plain torch never import it."""
    patches.choose_interpreter()
    if "triton" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _Installing())


class _Installing(importlib.abc.MetaPathFinder):
    """An import hook that installs the interpreter when triton is imported for the first time."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002 - as finders are called
        if name != "triton":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
