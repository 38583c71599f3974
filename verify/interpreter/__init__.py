"""Triton's CPU interpreter, made right enough to run Gated DeltaNet kernels without a GPU, and fast enough to check them.

`patches` corrects what Triton's own interpreter computes otherwise than a device, for programs that run one after another.
`launch` runs all programs of a grid together: `grid` their statements, `operations` their operations, `memory` what they read and
write, `races` what two of them do to the same bytes. Only `memory` and `races` may be imported before Triton.
"""

from verify.interpreter.memory import OutOfBounds
from verify.interpreter.patches import SEQUENTIAL, UnknownTriton, patch
from verify.interpreter.races import Race

__all__ = ["SEQUENTIAL", "OutOfBounds", "Race", "UnknownTriton", "install"]


def install() -> None:
    """The process interprets every Triton kernel, with the arithmetic of the device.

    Call it in a worker process before anything imports triton. Raises RuntimeError where triton is already
    imported for compilation. A second call changes nothing. From then on a launch that leaves its tensors raises OutOfBounds,
    one whose programs race raises Race, and with a version of Triton that is not in `patches.TRITONS` every launch raises
    UnknownTriton.
    """
    if patch():
        from verify.interpreter import launch

        launch.patch()
