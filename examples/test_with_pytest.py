"""The laws as pytest items: one item for each law of each adapter.

    pytest examples/test_with_pytest.py --gdn-profile least

`pytest -n auto` runs the items in several processes.
"""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.gdn_adapter(f"{HERE}/own_triton_kernel.py:MyKernel", laws=("oracle", "packed", "cut"))
def test_the_kernel(gdn_law):
    """The marker names the laws. Without `laws` every law is an item."""
    gdn_law.assert_holds()


@pytest.mark.gdn_adapter(f"{HERE}/own_torch_extension.py:OwnExtension", profile="least", laws=("oracle", "absent"))
def test_the_extension(gdn_law):
    """Its Python loop is slow, so it is checked on the fewest cases, whatever --gdn-profile says."""
    gdn_law.assert_holds()
