"""vLLM's kernels hold, and the adapters show a mistake of their callers. vLLM is fetched once, or its tests are skipped."""

import importlib.util
import pathlib
import sys

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs, sequences
from tests.kills import Fewer
from verify.adapters import vllm_kda, vllm_pools, vllm_rules
from verify.adapters.loader import load
from verify.adapters.packages import installed
from verify.adapters.registry import BUILT_IN, AdapterError
from verify.engine.check import Check
from verify.engine.state import Settings
from verify.findings.store import Store
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

pytestmark = pytest.mark.interpreted
SLOW_FIXTURES = ("vllm_worker",)
HERE = "tests/libraries/test_vllm.py"
ADAPTERS = [
    spec
    for spec, place in BUILT_IN.items()
    if place.partition(":")[0].removeprefix("verify.adapters.") in ("vllm_pools", "vllm_rules", "vllm_kda")
]


@pytest.mark.parametrize("spec", ADAPTERS)
def test_kernel_equals_the_definition(spec: str, vllm_worker: Worker, tmp_path: pathlib.Path) -> None:
    with Check(Settings(spec, ["oracle"], Fewer("short", 2, large=False)), [vllm_worker], Store(tmp_path)) as check:
        (found,) = check.run()
    assert found.verdict is Verdict.HOLDS, found
    assert found.counts[Verdict.HOLDS] >= 2


# Calls with a mistake of the caller, as a server makes them


class NullBlockOwned(vllm_pools.Decode):
    """The pool begins at the null block, so that the first request's slot is taken for padding."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        o, _ = super().run(x.replaced(pool=x.pool[1:], slots=x.slots - 1))
        return o, x.pool


class KeepsTheWholeDraft(vllm_pools.Verify):
    """The state after the last token is kept, as if every token were accepted."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(accepted=None))


class ForgetsTheAcceptedTokens(vllm_pools.Verify):
    """The kernel does not know in which column the state is, so it starts from the first."""

    def call(self, x: Inputs, blocks: Tensor, accepted: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().call(x, blocks, None if accepted is None else torch.ones_like(accepted))


class OneBlockForADraft(vllm_pools.Verify):
    """A draft has the one block of its request, so that its tokens use the blocks of the next requests."""

    def call(self, x: Inputs, blocks: Tensor, accepted: Tensor | None) -> tuple[Tensor, Tensor]:
        drafted = max(sequences(x, "v")) > 1
        padded = torch.cat([x.slots, x.slots.new_zeros(vllm_pools.STEPS)])  # no index is read from foreign memory
        return super().call(x, padded if drafted else blocks, None if drafted else accepted)


class OldStates(vllm_pools.Prefill):
    """The states of requests without history are not set to zeros."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(has_initial_state=None))


class EmptySequenceFirst(vllm_rules.Chunk):
    """A sequence without tokens stands before the others, though vLLM's index of chunks leaves such sequences out."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.cu_seqlens is None:
            return super().run(x)
        state = None if x.state is None else torch.cat([torch.zeros_like(x.state[:1]), x.state])
        o, final = super().run(x.replaced(cu_seqlens=torch.cat([x.cu_seqlens[:1], x.cu_seqlens]), state=state))
        return o, None if final is None else final[1:]


class StatesKeysFirst(vllm_kda.ChunkKda):
    """The caller passes states as [N, HV, K, V]."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(state=x.state.mT))


class SigmoidTwice(vllm_kda.ChunkKdaGated):
    """The caller passes a sigmoid of b, of which the kernel takes the sigmoid again."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(b=x.b.sigmoid()))


class NoLowerBound(vllm_kda.ChunkKdaGated):
    """The caller forgets the model's lower bound of the log-decay."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(lower_bound=None))


class GateWithoutBias(vllm_kda.KdaGate):
    """The caller passes no dt_bias."""

    def run(self, x: Inputs) -> Tensor:
        return super().run(x.replaced(dt_bias=None))


class KdaDraftKept(vllm_kda.RecurrentKda):
    """The state after the last token is kept, as if every token were accepted."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(accepted=None))


class BiasesOfOtherHeads(vllm_kda.PackedDecodeKda):
    """The caller passes each head the dt_bias of the next."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        return super().run(x.replaced(dt_bias=x.dt_bias.roll(1, 0)))


KDA = "op=kda lengths=3 heads=2 value_heads=2 key_dim=4 value_dim=4 dtype=bf16 gate=10 state=random backward=no"
SERVED_KDA = "op=decode heads=2 value_heads=2 packed=yes state=random gate=64 rule=kda in_kernel=both padding_slot=0 qk_norm=yes"
DRAFT = "op=decode lengths=3+2 packed=yes state=random gate=64 padding_slot=0 in_kernel=both"


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("vllm/decode", NullBlockOwned, "op=decode lengths=1+1 state=random padding_slot=0 in_kernel=both"),
        ("vllm/verify", KeepsTheWholeDraft, f"{DRAFT} accepted=some"),
        ("vllm/verify", ForgetsTheAcceptedTokens, DRAFT),
        ("vllm/verify", OneBlockForADraft, DRAFT),
        ("vllm/prefill", OldStates, "op=decode lengths=2 packed=yes dtype=bf16 state=random fresh=all"),
        ("vllm/chunk_kda", StatesKeysFirst, KDA),
        ("vllm/chunk_kda_gated", SigmoidTwice, f"{KDA} in_kernel=both"),
        ("vllm/chunk_kda_gated", NoLowerBound, f"{KDA} in_kernel=both lower_bound=-5"),
        ("vllm/kda_gate", GateWithoutBias, "op=kda_gate lengths=3 beta=no backward=no"),
        ("vllm/recurrent_kda", KdaDraftKept, f"{SERVED_KDA} lengths=3+2 accepted=some"),
        ("vllm/packed_decode_kda", BiasesOfOtherHeads, f"{SERVED_KDA} lengths=1+1"),
        ("vllm/chunk", EmptySequenceFirst, "lengths=5 packed=yes dtype=bf16 state=random backward=no"),
    ],
)
def test_definition_shows_the_mistake_of_a_caller(right: str, wrong: type, line: str, vllm_worker: Worker) -> None:
    verdicts = [
        Outcome.from_json(vllm_worker.ask(RunOne(f"law=oracle adapter={spec} {line}"))).verdict
        for spec in (right, f"{HERE}:{wrong.__name__}")
    ]
    assert verdicts == [Verdict.HOLDS, Verdict.BROKEN]


def test_every_block_size_is_launched(vllm_worker: Worker) -> None:
    line = "op=decode lengths=1+1 packed=yes value_heads=2 key_dim=8 value_dim=40 dtype=bf16 state=random gate=64 padding_slot=0"
    for spec, words in (("decode", "in_kernel=both"), ("packed_decode", "in_kernel=both"), ("recurrent", "")):
        outcome = Outcome.from_json(vllm_worker.ask(RunOne(f"law=blocks adapter=vllm/{spec} {line} {words}".strip())))
        assert outcome.verdict is Verdict.HOLDS, outcome


def test_slot_stands_in_the_column_of_the_accepted_token() -> None:
    """Whatever the draft, the kernel writes one state for each real request, and none for padding and for no tokens."""
    x = Inputs(
        v=torch.zeros(1, 6, 1, 1),
        slots=torch.tensor([5, 0, 2, 7], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 3, 4, 4, 6]),
        accepted=torch.tensor([2, 1, 0, 2], dtype=torch.int32),
    )
    blocks, accepted = vllm_pools.blocks_of_tokens(x)
    assert blocks.tolist() == [[0, 5, 0], [0, 0, 0], [2, 0, 0], [0, 7, 0]]
    assert accepted.tolist() == [2, 1, 1, 2]
    assert vllm_pools.blocks_of_tokens(x.replaced(accepted=None))[1].tolist() == [3, 1, 1, 2]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_its_adapters_say_in_one_line_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not pathlib.Path(folder, "vllm").is_dir()])
    monkeypatch.setattr("verify.adapters.loader.installed", installed.__wrapped__)
    for spec in ADAPTERS:
        with pytest.raises(AdapterError, match=rf"^adapter {spec}: there is no vllm: run `gdn-verify fetch vllm`") as caught:
            load(spec)
        assert "\n" not in str(caught.value)
