"""The words that options and lines choose from, and the errors of a command, so that a command line is read without torch.

This module uses the standard library alone.
"""

DEVICES = ("cpu", "cuda")  # where kernels run
BACKENDS = ("gloo", "nccl")  # over what ranks communicate
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")  # of NVIDIA's compute-sanitizer


class NoGpu(Exception):
    """The command needs a GPU, and there is none."""


class NoInterpreter(Exception):
    """The installed Triton cannot interpret kernels. The message is one line."""


class NoSanitizer(Exception):
    """There is no compute-sanitizer on this host, or it does not work here. The message is one line."""
