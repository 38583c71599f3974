"""Triton's CPU interpreter, made right enough to run Gated DeltaNet kernels without a GPU, and fast enough to check them.

`patches` corrects operations that Triton's interpreter computes differently from a GPU; both ways of running use it. `launch`
runs all programs of a grid together: `grid` their statements, `operations` their operations, `memory` what they read and write,
`races` what two of them do to the same bytes. `launch`, `grid` and `operations` import Triton; import them after `install()`.
"""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from verify.interpreter.memory import OutOfBounds
from verify.interpreter.patches import SEQUENTIAL, UnknownTriton, patch
from verify.interpreter.races import Race

__all__ = ["SEQUENTIAL", "OutOfBounds", "Race", "UnknownTriton", "install", "install_with_triton"]


def install() -> None:
    """Make this process interpret every Triton kernel, with the rounding of a GPU.

    Call it in a worker process before anything imports triton. Raises RuntimeError where triton is already
    imported for compilation. A second call changes nothing. From then on a launch that accesses memory outside its tensors
    raises OutOfBounds. A race raises Race, unless programs run one after another or inside `races.accepted()`. With a version of
    Triton that is not in `patches.TRITONS`, every launch raises UnknownTriton.
    """
    if patch():
        from verify.interpreter import launch

        launch.patch()


def install_with_triton() -> None:
    """Call `install()` when something first imports triton, which an implementation in plain torch never does."""
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _Installing())


class _Installing(importlib.abc.MetaPathFinder):
    """Finds triton once, and installs the interpreter when it is imported."""

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
