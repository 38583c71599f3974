"""Triton's CPU interpreter, made right enough to run Gated DeltaNet kernels without a GPU, and fast enough to check them."""

from verify.interpreter.patches import OutOfBounds, install

__all__ = ["OutOfBounds", "install"]
