"""The laws bound to the adapters: released kernels, interpreted. One item a law and adapter.

Modules, pools and layers are checked so in tests of their own (test_modules.py, test_pools.py, test_layers.py). So are the kernels
of serving libraries, whose files are fetched first (test_sglang.py, test_vllm.py).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from properties.rules.laws import LAWS
from tests.kills import Fewer, small_ones
from verify.adapters.libraries import LIBRARIES
from verify.adapters.registry import KERNELS
from verify.cli.pytest_plugin import LawItem
from verify.engine.profiles import PROFILES

pytestmark = pytest.mark.interpreted

MAIN = ("transformers/chunk", "gdn/layer")
LONG = ("fla/chunk",)  # interpreted, each case is a second or two
OTHERWISE = (
    "fla/chunk_16",
    "fla/chunk_32",
    "fla/chunk_kda_safe",
    "fla/chunk_v_first",
    "fla/fused_recurrent_v_first",
)  # other chunks, layouts
KNOWN = "fla/fused_recurrent_delta_rule"  # most cases of its law strides show a known defect, so that law needs more of them
OFTEN = ("again", "batch", "memory", "samples")  # laws of several calls a case, asked of the kernels above
PLAIN = ("future", "heads", "linear", "permuted")  # and of those what no kernel has a branch of its own for
FEWEST = Fewer("fewest", 1, large=False)
TWO = Fewer("two", 2, large=False)


def quick(case: Any) -> bool:
    """Whether a case takes an interpreted kernel little time: at most four chunks of 64, counted for each head, of narrow ones."""
    chunks = sum(-(-length // 64) for length in case.lengths)
    state = getattr(case, "key_dim", 1) * getattr(case, "value_dim", 1)
    return case.tokens <= 130 and chunks * getattr(case, "value_heads", 1) <= 4 and state <= 64 * 64


def on_few_ranks(case: Any) -> bool:
    """Whether a case has at most 16 ranks and 250 tokens."""
    return case.tokens <= 250 and getattr(case, "tp", 1) * getattr(case, "cp", 1) <= 16


@pytest.fixture
def small() -> Iterator[None]:
    """Cases take little time. `tox -e verify` asks larger ones."""
    with small_ones(quick):
        yield


@pytest.fixture
def asked_least(gdn_law: LawItem, small: None, monkeypatch: pytest.MonkeyPatch) -> LawItem:
    """The law with one case, or two of the law oracle: `tox -e verify` asks more.

    It has five cases where most show a known defect, after which a law with fewer would not be decided.
    """
    if gdn_law.law == "absent" and gdn_law.adapter.startswith("fla/fused_recurrent"):
        return dataclasses.replace(gdn_law, profile="few")
    monkeypatch.setitem(PROFILES, FEWEST.name, FEWEST)
    return dataclasses.replace(gdn_law, profile=FEWEST.name)


@pytest.mark.gdn_adapter(*MAIN)
@pytest.mark.slow
def test_law_holds(gdn_law: LawItem, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two cases a law, and four of the law oracle."""
    monkeypatch.setitem(PROFILES, TWO.name, TWO)
    with small_ones(on_few_ranks):
        dataclasses.replace(gdn_law, profile=TWO.name).assert_holds()


@pytest.mark.gdn_adapter(*LONG, profile="least")
@pytest.mark.slow
def test_law_holds_of_a_long_one(asked_least: LawItem) -> None:
    asked_least.assert_holds()


@pytest.mark.gdn_adapter(
    *(name for name in KERNELS if name not in (*MAIN, *LONG, *OTHERWISE, KNOWN) and name.partition("/")[0] not in LIBRARIES),
    profile="least",
    laws=[name for name in LAWS if name not in (*OFTEN, *PLAIN)],
)
@pytest.mark.slow
def test_law_holds_of_a_variant(asked_least: LawItem) -> None:
    asked_least.assert_holds()


@pytest.mark.gdn_adapter(KNOWN, profile="least", laws=[name for name in LAWS if name not in (*OFTEN, *PLAIN, "strides")])
@pytest.mark.slow
def test_law_holds_of_one_with_known_defects(asked_least: LawItem) -> None:
    asked_least.assert_holds()


@pytest.mark.gdn_adapter(KNOWN, profile="few", laws=("strides",))
@pytest.mark.slow
def test_law_holds_beside_known_defects(gdn_law: LawItem) -> None:
    gdn_law.assert_holds()


@pytest.mark.gdn_adapter(*OTHERWISE, profile="least", laws=("oracle", "cut", "absent"))
@pytest.mark.slow
def test_law_holds_of_other_chunks_and_layouts(asked_least: LawItem) -> None:
    """Of sequences whole and cut, and what they are given; the rest is asked of the same kernels above."""
    asked_least.assert_holds()
