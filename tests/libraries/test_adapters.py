"""The laws bound to the adapters: released kernels, interpreted. One item a law and adapter of two, one for each other adapter.

Modules, pools and layers are checked so in tests of their own (test_modules.py, test_pools.py, test_layers.py). So are the kernels
of serving libraries, whose files are fetched first (test_sglang.py, test_vllm.py).
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import pytest

from properties.rules.laws import LAWS
from tests.kills import Fewer, small_ones
from tests.needs import need_adapter
from verify.adapters.libraries import LIBRARIES
from verify.adapters.registry import KERNELS
from verify.cli.pytest_plugin import LawItem
from verify.engine.check import Check
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker

pytestmark = pytest.mark.interpreted

MAIN = ("transformers/chunk", "gdn/layer")
LONG = "fla/chunk"  # interpreted, each case is a second or two
OTHERWISE = (
    "fla/chunk_16",
    "fla/chunk_32",
    "fla/chunk_kda_safe",
    "fla/chunk_v_first",
    "fla/fused_recurrent_v_first",
)  # other chunks, layouts
VARIANTS = [name for name in KERNELS if name not in (*MAIN, *OTHERWISE) and name.partition("/")[0] not in LIBRARIES]
OFTEN = ("again", "batch", "memory", "samples")  # laws of several calls a case, which run on the kernels above
PLAIN = ("future", "heads", "linear", "permuted")  # laws for which no kernel has a branch of its own
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


@pytest.mark.gdn_adapter(*MAIN)
@pytest.mark.slow
def test_law_holds(gdn_law: LawItem, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two cases a law, and four of the law oracle."""
    monkeypatch.setitem(PROFILES, TWO.name, TWO)
    with small_ones(on_few_ranks):
        dataclasses.replace(gdn_law, profile=TWO.name).assert_holds()


@pytest.fixture
def failing(gdn_device: str, gdn_worker: Worker, tmp_path: pathlib.Path) -> Callable[..., dict[str, str]]:
    """Checks laws of an adapter with one small case, or two of the law oracle. Returns the laws that are broken or undecided.

    Laws get five cases where most cases show a known defect. `tox -e verify` takes more and larger cases.
    """

    def check(adapter: str, laws: Collection[str]) -> dict[str, str]:
        strides = {"strides"} if adapter == "fla/fused_recurrent_delta_rule" else set()
        often = {
            "fla/chunk": {"recompute"},
            "fla/chunk_kda": {"recompute"},
            "mlx/gated_delta": {*laws},
        }  # laws whose cases often show a known defect
        absent = {"absent"} if adapter.startswith("fla/fused_recurrent") else often.get(adapter, set())
        found = {}
        for names, profile, fits in (
            ({*laws} - strides - absent, FEWEST, quick),
            ({*laws} & absent, PROFILES["few"], quick),
            ({*laws} & strides, dataclasses.replace(PROFILES["few"], examples=12), None),
        ):
            settings = Settings(adapter, sorted(names), profile, device=gdn_device)
            with small_ones(fits) if fits else contextlib.nullcontext(), Check(settings, [gdn_worker], Store(tmp_path)) as checking:
                found |= {report.law: report for report in (checking.run() if names else ())}
        fine = Verdict.HOLDS, Verdict.UNSUPPORTED
        assert {*found} == {*laws}
        return {law: report.run or report.reason for law, report in found.items() if report.verdict not in fine}

    return check


@pytest.mark.parametrize("adapter", VARIANTS)
@pytest.mark.slow
def test_laws_hold_of_a_variant(adapter: str, failing: Callable[..., dict[str, str]]) -> None:
    need_adapter(adapter)
    assert failing(adapter, [name for name in LAWS if adapter == LONG or name not in (*OFTEN, *PLAIN)]) == {}


@pytest.mark.parametrize("adapter", OTHERWISE)
@pytest.mark.slow
def test_laws_hold_of_other_chunks_and_layouts(adapter: str, failing: Callable[..., dict[str, str]]) -> None:
    """Of sequences whole and cut, and absent arguments. The variants above have the same kernels."""
    assert failing(adapter, ["oracle", "cut", "absent"]) == {}
