"""SGLang's kernels hold, and the adapters show a mistake of their callers. SGLang is fetched once, or its tests are skipped."""

import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import sys

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.kills import Fewer, unexplained
from verify.adapters import serving, sglang_kda, sglang_pools
from verify.adapters.loader import load
from verify.adapters.packages import installed
from verify.adapters.registry import BUILT_IN, AdapterError
from verify.engine.check import Check
from verify.engine.state import Settings
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.messages import RunOne
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.process.worker import Worker

pytestmark = pytest.mark.interpreted
SLOW_FIXTURES = ("sglang_worker",)
HERE = "tests/libraries/test_sglang.py"
ADAPTERS = [
    spec
    for spec, place in BUILT_IN.items()
    if place.partition(":")[0].removeprefix("verify.adapters.") in ("sglang_pools", "sglang_rules", "sglang_kda")
]


def report(spec: str, law: str, worker: Worker, folder: pathlib.Path, cases: int) -> LawReport:
    defects = contextlib.nullcontext() if spec in BUILT_IN else unexplained()
    with defects, Check(Settings(spec, [law], Fewer("short", cases, large=False)), [worker], Store(folder)) as check:
        (one,) = check.run()
    return one


@pytest.mark.parametrize("spec", ADAPTERS)
def test_kernel_equals_the_definition(spec: str, sglang_worker: Worker, tmp_path: pathlib.Path) -> None:
    cases = 1 if spec == "sglang/chunk_kda_gated" else 3  # whose cases are larger than those of pools
    found = report(spec, "oracle", sglang_worker, tmp_path, cases)
    assert found.verdict is Verdict.HOLDS, found
    assert found.counts[Verdict.HOLDS] >= cases


# Calls with a mistake of the caller, as a server makes them


class SlotsOfTheNextRequest(sglang_pools.Decode):
    """Every request has the slot of the next one."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(slots=x.slots.roll(1)))


class CommitsOneTokenLess(sglang_pools.Verify):
    """Of a draft of several tokens, the state of the token before the accepted one is kept (vLLM 40738)."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        accepted = x.accepted
        return super().run(x if accepted is None else x.replaced(accepted=torch.where(accepted > 1, accepted - 1, accepted)))


class ParentsOfAChain(sglang_pools.Verify):
    """Trees are verified as chains."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(Inputs(**{name: value for name, value in x.items() if name != "parents"}))


class UpdatesACopy(sglang_pools.Update):
    """The pool's slots lie apart, which `input_guard` copies: the new states are lost."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        apart = torch.stack([x.pool.mT, x.pool.mT], 1)[:, 0].mT
        o, _ = super().run(x.replaced(pool=apart))
        x.pool.copy_(apart)
        return o, x.pool


class FilledAgain(sglang_pools.ChunkInPlace):
    """A server fills `cu_seqlens` again in place, for which SGLang keeps the chunks of the first call."""

    domain = dataclasses.replace(sglang_pools.ChunkInPlace.domain, refills=True)


class EmptyPromptsFirst(sglang_pools.ChunkInPlace):
    """A prompt without tokens stands before the others, though SGLang's index of chunks leaves such prompts out."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        offsets = torch.cat([x.cu_seqlens[:1], x.cu_seqlens])
        slots = torch.cat([x.slots.new_tensor([-1]), x.slots])
        return super().run(x.replaced(cu_seqlens=offsets, slots=slots))


class KdaPromptsOfTheNextSlot(sglang_kda.ChunkKda):
    """Every prompt has the slot of the next one."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(slots=x.slots.roll(1)))


class KdaCommitsOneTokenLess(CommitsOneTokenLess, sglang_kda.VerifyKda):
    """The same for drafts of KDA."""


class SigmoidTwice(sglang_kda.ChunkKdaGated):
    """The caller passes a sigmoid of b, of which the kernel takes the sigmoid again."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x if x.get("b") is None else x.replaced(b=x.b.sigmoid()))


class NoLowerBound(sglang_kda.ChunkKdaGated):
    """The caller forgets the model's lower bound of the log-decay."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(lower_bound=None) if x.get("a") is not None else x)


GATED = "op=kda lengths=3 dtype=bf16 gate=10 in_kernel=both lower_bound=-5 state=random backward=no"
STRONG = "op=decode lengths=12 packed=yes dtype=bf16 gate=tenth rule=kda"


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        (
            "sglang/chunk_kda",
            f"{HERE}:KdaPromptsOfTheNextSlot",
            "op=decode lengths=3+2 packed=yes dtype=bf16 state=random rule=kda",
        ),
        ("sglang/chunk_kda_gated", f"{HERE}:SigmoidTwice", GATED),
        ("sglang/chunk_kda_gated", f"{HERE}:NoLowerBound", GATED),
        ("sglang/chunk_kda", "sglang/chunk_kda", f"{STRONG} options=fused:yes"),
    ],
)
def test_kda_shows_the_mistake_of_a_caller_and_strong_decays(right: str, wrong: str, line: str, sglang_worker: Worker) -> None:
    """The kernels of large calls take decays that are too strong for the kernel of small ones (docs/FINDINGS.md)."""
    lines = (f"adapter={right} {line.replace('fused:yes', 'fused:no')}", f"adapter={wrong} {line}")
    verdicts = [Outcome.from_json(sglang_worker.ask(RunOne(f"law=oracle {line}"))).verdict for line in lines]
    assert verdicts == [Verdict.HOLDS, Verdict.BROKEN]


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        (KdaCommitsOneTokenLess, "accept"),
        (SlotsOfTheNextRequest, "oracle"),
        (CommitsOneTokenLess, "accept"),
        (ParentsOfAChain, "oracle"),
        (UpdatesACopy, "oracle"),
        (EmptyPromptsFirst, "oracle"),
    ],
)
def test_law_alone_sees_the_mistake(kind: type, law: str, sglang_worker: Worker, tmp_path: pathlib.Path) -> None:
    found = report(f"{HERE}:{kind.__name__}", law, sglang_worker, tmp_path, cases=32)
    assert found.verdict is Verdict.BROKEN, found


def test_chunks_of_an_earlier_call_are_seen_where_they_stay_inside_the_states(sglang_worker: Worker) -> None:
    """The first of two requests has two chunks, as the second had before. No other lengths: some make the kernel store outside."""
    line = f"law=refill adapter={HERE}:FilledAgain op=decode lengths=65+1 packed=yes key_dim=1 value_dim=1 dtype=bf16"
    outcome = Outcome.from_json(sglang_worker.ask(RunOne(line)))
    assert outcome.verdict is Verdict.BROKEN
    assert [finding.kind for finding in outcome.findings] == [FailureKind.RACE], outcome.findings


class NeedsMore(sglang_pools.Decode):
    """A module that this release of SGLang does not have."""

    source = "sglang.kernels.ops.attention.linear.next_year"


class NeedsARequirement(sglang_pools.Decode):
    """The call imports a requirement of SGLang, as some of its functions do."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        super().run(x)
        importlib.import_module("sgl_kernel")
        raise AssertionError


class CallsAStub(sglang_pools.Decode):
    """The call uses a name that SGLang has only with its requirements."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        serving.module("sglang.srt.utils").get_bool_env_var("HOME")
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NeedsMore, "there is no sglang.kernels.ops.attention.linear.next_year"),
        (NeedsARequirement, "No module named 'sgl_kernel'"),
        (CallsAStub, "sglang.srt.utils.get_bool_env_var is a stub"),
    ],
)
def test_what_the_library_lacks_gives_no_verdict(kind: type, reason: str, sglang_worker: Worker) -> None:
    line = f"law=oracle adapter={HERE}:{kind.__name__} op=decode lengths=1 in_kernel=both"
    outcome = Outcome.from_json(sglang_worker.ask(RunOne(line)))
    assert outcome.verdict is Verdict.UNKNOWN, outcome
    assert reason in outcome.reason


def test_every_block_size_is_launched(sglang_worker: Worker) -> None:
    line = "op=decode lengths=2+1 packed=yes value_heads=2 key_dim=8 value_dim=40 dtype=bf16 state=random gate=64 in_kernel=both"
    for spec, requests in (("sglang/decode", "lengths=2+1"), ("sglang/packed_decode", "lengths=1+1")):
        outcome = Outcome.from_json(sglang_worker.ask(RunOne(f"law=blocks adapter={spec} {line.replace('lengths=2+1', requests)}")))
        assert outcome.verdict is Verdict.HOLDS, outcome


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="sglang is installed")
def test_without_sglang_its_adapters_say_in_one_line_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not pathlib.Path(folder, "sglang").is_dir()])
    monkeypatch.setattr("verify.adapters.loader.installed", installed.__wrapped__)
    for spec in ADAPTERS:
        with pytest.raises(AdapterError, match=rf"^adapter {spec}: there is no sglang: run `gdn-verify fetch sglang`") as caught:
            load(spec)
        assert "\n" not in str(caught.value)
