"""Hypothesis settings for the toolkit's own tests; everything else lives in the plugin (verify/cli/pytest_plugin.py)."""

import gc
import os
import signal
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

pytest_plugins = ["pytester"]  # a suite within the suite: tests/verbs/test_pytest_plugin.py
hypothesis.settings.register_profile("suite", max_examples=50, deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite in the background ignores Ctrl-C, and what it starts would too
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# Tests start a few hundred Python processes. Without bytecode each of them would compile every module of ours again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the toolkit's own tests; those of the plugin are in verify/cli/pytest_plugin.py."""
    parser.addoption("--downloads", action="store_true", help="download every released library that a test needs")


def pytest_collection_finish() -> None:
    """What is there before the first test is no garbage: Hypothesis looks through it in each thread that draws, 0.2 s a law.

    Torch is imported here, and not above, because the process of pytest-xdist that hands out tests needs none of it.
    """
    import torch

    torch.set_num_threads(1)  # bits are compared with those of workers, which have one; and the suite has a process a core
    hypothesis.given(st.none())(lambda nothing: None)()  # what Hypothesis sets up once must be there before, or it warns
    gc.collect()
    gc.freeze()
