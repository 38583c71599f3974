"""The laws bound to the adapters: released kernels, interpreted. One item a law and adapter."""

import pytest

from verify.adapter import KERNELS
from verify.pytest_plugin import LawItem


@pytest.mark.gdn_adapter(*KERNELS, "gdn/layer")
def test_law_holds(gdn_law: LawItem) -> None:
    gdn_law.assert_holds()
