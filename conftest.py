"""Hypothesis settings for the toolkit's own tests; everything else lives in the plugin (verify/pytest_plugin.py)."""

import hypothesis

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")
