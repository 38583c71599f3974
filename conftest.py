"""Hypothesis settings for the toolkit's own tests; everything else lives in the plugin (verify/pytest_plugin.py)."""

import hypothesis
import torch

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")
torch.set_num_threads(1)  # bits are compared with those of workers, which have one; and the suite has a process a core
