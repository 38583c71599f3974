"""The pool in which a serving library keeps convolution states, and the adapters of SGLang's and vLLM's convolutions on it."""

import pathlib

import pytest
import torch

from oracles.operation import Inputs
from properties.modules.case import ModuleCase
from tests.kills import Fewer, Kill, assert_killed_alone
from verify.adapters.conv_pools import ConvPool, offsets
from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker

SLOW_FIXTURES = ("vllm_worker",)
FEW = Fewer("few", 2, large=False)
USES = "tests/uses_of_conv_pools.py"


def call(line: str) -> Inputs:
    return ModuleCase.parse(f"op=causal_conv1d width=3 state_columns=W-1 {line}").inputs()


# The pool


@pytest.mark.parametrize("channels_last", [False, True])
def test_states_lie_in_slots_out_of_order_with_nan_around_them(channels_last: bool) -> None:  # noqa: FBT001
    x = call("lengths=4+0+2 packed=yes state=random")
    pool = ConvPool.of(x, cleared=False, channels_last=channels_last)
    assert pool.states.shape == (7, 3, 3)
    assert pool.states.is_contiguous() is not channels_last
    assert pool.slots.tolist() == [6, 4, 2], "the last slot is in use, slot 0 is not, and neither is the order that of sequences"
    assert pool.states[[0, 1, 3, 5]].isnan().all()
    assert torch.equal(pool.final(), x.state)
    assert offsets(x).tolist() == [0, 4, 4, 6]
    assert offsets(call("lengths=2+2+2")).tolist() == [0, 2, 4, 6]


def test_a_new_request_has_a_stale_slot_unless_it_is_cleared_or_has_no_tokens() -> None:
    x = call("lengths=4+0+2 packed=yes")
    assert [bool(state.isnan().all()) for state in ConvPool.of(x, cleared=False).final()] == [True, False, True]
    assert not ConvPool.of(x, cleared=True).final().any()
    assert not ConvPool.of(x, cleared=False).final()[1].any()


def test_a_state_may_begin_at_a_later_column() -> None:
    x, first = call("lengths=4+0+2 packed=yes state=random"), torch.tensor([0, 2, 1])
    pool = ConvPool.of(x, cleared=True, spare=2, first=first)
    assert pool.states.shape == (7, 3, 5)
    assert torch.equal(pool.final(first), x.state)
    assert pool.states[4, :, :2].isnan().all() and torch.equal(pool.states[4, :, 2:], x.state[1])
    assert pool.final().isnan().any(), "at column 0 there is NaN before the state"
    new = ConvPool.of(x.replaced(state=None), cleared=True, spare=2, first=first)
    assert not new.final(first).any() and new.final().isnan().any()


def test_a_state_without_columns_has_a_slot_too() -> None:
    pool = ConvPool.of(call("lengths=4+2 packed=yes conv_width=1 state=random"), cleared=False)
    assert pool.states.shape == (5, 3, 0) and pool.final().shape == (2, 3, 0)


def test_writing_to_a_slot_of_no_sequence_is_an_error() -> None:
    pool = ConvPool.of(call("lengths=4+2 packed=yes state=random"), cleared=False)
    for slot in (3, 0):
        pool.states[slot, 1] = 0.0
        with pytest.raises(RuntimeError, match=f"^the kernel wrote to slot {slot} of the pool, which no sequence has$"):
            pool.final()


# The adapters


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("findings"))


def checked(spec: str, laws: list[str] | None, worker: Worker, store: Store, profile: Profile = FEW) -> list[LawReport]:
    with Check(Settings(spec, laws, profile), [worker], store, defects=[]) as check:
        return check.run()


def assert_holds(spec: str, worker: Worker, store: Store, unsupported: int) -> None:
    reports = checked(spec, None, worker, store)
    assert {report.law: report.run for report in reports if report.verdict is Verdict.BROKEN} == {}
    assert [report.verdict for report in reports].count(Verdict.UNSUPPORTED) == unsupported
    assert sum(report.verdict is Verdict.HOLDS for report in reports) >= 10


LIBRARY_ADAPTERS = [("conv", 1), ("conv_update", 2), ("conv_verify", 1)]


@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "unsupported"), LIBRARY_ADAPTERS)
@pytest.mark.slow
def test_convolutions_of_sglang_hold(name: str, unsupported: int, sglang_worker: Worker, store: Store) -> None:
    assert_holds(f"sglang/{name}", sglang_worker, store, unsupported)


@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "unsupported"), LIBRARY_ADAPTERS)
def test_convolutions_of_vllm_hold(name: str, unsupported: int, vllm_worker: Worker, store: Store) -> None:
    assert_holds(f"vllm/{name}", vllm_worker, store, unsupported)


@pytest.mark.interpreted
@pytest.mark.parametrize("law", ["oracle", "copied"])
@pytest.mark.slow
def test_a_padding_request_changes_nothing_in_sglang(law: str, sglang_worker: Worker, store: Store) -> None:
    (report,) = checked(f"{USES}:Pads", [law], sglang_worker, store, Fewer("some", 4, large=False))
    assert report.verdict is Verdict.HOLDS, report.run


@pytest.mark.interpreted
@pytest.mark.parametrize("law", ["oracle", "copied"])
def test_a_padding_request_changes_nothing_in_vllm(law: str, vllm_worker: Worker, store: Store) -> None:
    (report,) = checked(f"{USES}:VllmPads", [law], vllm_worker, store, Fewer("some", 4, large=False))
    assert report.verdict is Verdict.HOLDS, report.run


KILLED_BY: dict[str, Kill] = {
    "PadsTheLastSlot": Kill("oracle", 1, 1),
    "IgnoresSlots": Kill("oracle", 1, 1),
    "NextSlot": Kill("oracle", 1, 1),
    "StartsFromStale": Kill("oracle", 1, 1),
    "NeverStarts": Kill("oracle", 1, 1),
    "DropsSilu": Kill("oracle", 1, 1),
    "OneColumnOff": Kill("copied", 1, 1),
    "CommitsTheWholeDraft": Kill("oracle", 2, 2),
}


@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "kill"), KILLED_BY.items())
@pytest.mark.slow
def test_a_wrong_use_of_sglangs_convolutions_is_noticed(
    name: str, kill: Kill, sglang_worker: Worker, tmp_path: pathlib.Path
) -> None:
    assert_killed_alone(f"{USES}:{name}", kill, sglang_worker, tmp_path)
