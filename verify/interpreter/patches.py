"""Corrections of Triton's CPU interpreter, so that it computes as a GPU does."""

import contextlib
import gc
import inspect
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verify.interpreter.access import patch_access
from verify.interpreter.arithmetic import patch_arithmetic, patch_reductions
from verify.interpreter.internals import combines, get, put
from verify.interpreter.language import patch_language, patch_operands, patch_types
from verify.interpreter.memory import OutOfBounds, span_of, tensors_of
from verify.interpreter.self_test import TRITONS, trouble

# Wrappers split work among the multiprocessors that the driver reports, and assume one without a driver. With one, the code for
# the second and later parts would never run. With four, parts begin inside blocks of others, as on a device.
MULTIPROCESSORS = 4


sequential = False  # whether the programs of a launch run one after another, and races are not found
kept: dict[Any, Any] | None = None  # the launches that need not run again (`repeats`), None if all run
refusal = ""  # why this process interprets no kernel; each launch raises it
refused = False  # whether a launch was refused


class UnknownTriton(Exception):
    """A kernel cannot be interpreted: not with the installed version of Triton, or not at all."""


class TooManyPrograms(Exception):
    """A launch takes too long without a GPU: its programs are too many, and cannot run together."""


@contextlib.contextmanager
def keeping_launches() -> Iterator[None]:
    """Do not run a launch again that ran before inside this context, in which nobody changes a kernel's source."""
    global kept
    before, kept = kept, {}
    try:
        yield
    finally:
        kept = before


def choose_interpreter() -> None:
    """Set TRITON_INTERPRET: when `triton.jit` decorates a kernel, Triton reads this variable and nothing else."""
    os.environ["TRITON_INTERPRET"] = "1"


def patch(*, tested: bool = False) -> bool:
    """Patch Triton's interpreter so that it computes as a GPU does.

    Returns True if this call patched it, False if it was patched before, or if the installed Triton is not tested and its self-test
    fails. With `tested`, no self-test is run. RuntimeError if Triton is already imported for compilation.
    """
    if "triton" not in sys.modules:
        choose_interpreter()
    import triton

    # Some versions of torch have no device guard for the CPU, but kernels' wrappers enter one around each launch.
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = contextlib.nullcontext  # type: ignore[attr-defined]
    global refusal
    refusal = "" if tested or triton.__version__ in TRITONS else trouble(triton.__version__)
    if refusal:  # this Triton may lack the names that are looked at below
        put("InterpretedFunction.run", _refuse)
        triton.runtime.driver.set_active(_RefusingDriver())
        return False
    if not isinstance(combines("_sum_combine"), get("interpreter.InterpretedFunction")):
        raise RuntimeError("install() must run before the first import of triton, which already compiles here")  # noqa: TRY004
    choose_interpreter()
    if get("interpreter._patch_lang").__module__ == patch_language.__module__:
        return False
    patch_language()
    patch_types()
    patch_operands()
    _patch_launch()
    patch_access()
    patch_arithmetic()
    patch_reductions()
    _patch_driver()
    # A launch makes thousands of objects in no cycle, which are freed without the collector. By default it looks for cycles after
    # every 700 of them.
    gc.set_threshold(10_000)
    return True


def _refuse(*_: Any, **__: Any) -> None:
    global refused
    refused = True
    raise UnknownTriton(refusal)


class _RefusingDriver:
    """A Triton driver for versions that cannot be used. It refuses too, because wrappers look at the device before they launch."""

    def __getattr__(self, name: str) -> Any:
        _refuse()


def _patch_launch() -> None:
    import triton.language as tl
    from triton.runtime.errors import InterpreterError

    # There is no device to time. All configurations tie, and the first one that survives pruning wins.
    put("Autotuner._bench", lambda self, *args, config, **meta: [0.0])

    convert, run, handle = get("interpreter._implicit_cvt"), get("InterpretedFunction.run"), get("interpreter.TensorHandle")

    def implicit_cvt(arg: Any) -> Any:
        # A compiled kernel takes a float argument as a float32 scalar. A Python number would get the type of the tensor that it
        # is combined with, and `scale` times bfloat16 would be rounded twice.
        if isinstance(arg, float):
            return tl.tensor(handle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        if isinstance(arg, bool):
            return tl.tensor(handle(np.array([arg]), tl.int1), tl.int1)
        return convert(arg)

    put("interpreter._implicit_cvt", implicit_cvt)

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if callable(grid) and not warmup:
            # As the compiler's launcher does, pass the caller's own tensors and numbers to the grid function.
            known = {name: value for name, value in kwargs.items() if name in self.arg_names}
            grid = grid(inspect.getcallargs(self.fn, *args, **known))
        try:
            # Lanes that a mask drops overflow and divide by zero, as they do on a device.
            with np.errstate(all="ignore"):
                run(self, *args, grid=grid if warmup else tuple(grid), warmup=warmup, **kwargs)
        except (InterpreterError, OutOfBounds) as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OutOfBounds):
                cause = cause.__cause__
            if cause is None:
                raise
            arguments = inspect.getcallargs(self.fn, *args, **{name: kwargs[name] for name in self.arg_names if name in kwargs})
            raise _named_stray(cause, self.fn.__name__, arguments) from None

    put("InterpretedFunction.run", launch)


def _named_stray(stray: OutOfBounds, kernel: str, arguments: dict[str, Any]) -> OutOfBounds:
    """The same error with the names of the kernel and the argument, and with a traceback that ends at the kernel's line."""
    names = [name for name, value in arguments.items() if stray.span in map(span_of, tensors_of(value))]
    told = OutOfBounds(f"{kernel} {stray} the memory of {' or '.join(names) or 'a tensor'}", stray.span)
    ours = (os.path.dirname(__file__), os.path.dirname(inspect.getfile(sys.modules["triton"])))
    at = kernels = stray.__traceback__
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith(ours):
            kernels = at
        at = at.tb_next
    if kernels is not None:
        kernels.tb_next = None
    return told.with_traceback(stray.__traceback__)


class _NoDevice:
    """A Triton driver that reports the number of multiprocessors and nothing else."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": MULTIPROCESSORS})

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"kernels are interpreted, and there is no device that has {name}")


def _patch_driver() -> None:
    import triton

    triton.runtime.driver.set_active(_NoDevice())
