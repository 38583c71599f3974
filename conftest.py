"""Hypothesis settings for the toolkit's own tests; everything else lives in the plugin (verify/pytest_plugin.py)."""

import signal

import hypothesis
import torch

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite in the background ignores Ctrl-C, and what it starts would too
    signal.signal(signal.SIGINT, signal.SIG_DFL)
torch.set_num_threads(1)  # bits are compared with those of workers, which have one; and the suite has a process a core
