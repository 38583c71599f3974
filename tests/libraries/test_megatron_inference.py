"""The inference of Megatron-LM's layer, of a Megatron that has it: main has, releases up to 0.19.2 have not.

The adapter is tested with a stand-in for the layer. If MEGATRON_PATH names a Megatron that has the inference, as --path does, it is
tested with that too.
"""

import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from tests import inference_of_megatron
from tests.ranks.test_path_adapters import NAMES, find_megatron, release
from verify.adapters import megatron_inference
from verify.adapters.loader import load
from verify.adapters.registry import AdapterError
from verify.process.messages import Describe, RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import NO_GPU, Worker

LAYER = "heads=2 value_heads=4 key_dim=4 value_dim=8 hidden=8 conv_bias=yes parameter_dtype=input backward=no"
LINES = [
    f"law=oracle op=gdn_layer packed=yes lengths=3+7 cached=yes {LAYER}",
    f"law=oracle op=gdn_layer lengths=1+1+1 cached=yes state=random dtype=bf16 {LAYER}",
    f"law=cache variant=steps at=4 lengths=7+7 cached=yes {LAYER}",
]

__all__ = ["release"]  # a fixture


@pytest.fixture(scope="module", params=["a stand-in", "Megatron-LM"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that finds a Megatron, or the stand-in for one."""
    environment = {}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "a stand-in":
            patch.syspath_prepend(str(written(tmp_path_factory.mktemp("megatron"))))
            environment = NO_GPU
        elif reason := find_megatron():
            pytest.skip(reason)
        with Worker(120.0, environment=environment) as worker:
            error = worker.ask(Describe("megatron/inference")).get("error", "")
            if request.param == "Megatron-LM" and megatron_inference.INFERENCE in error:
                pytest.skip("this Megatron-LM has no inference for its GDN layer: MEGATRON_PATH must name a checkout of main")
            assert not error
            yield worker


def written(folder: pathlib.Path) -> pathlib.Path:
    """The folder, with the stand-in for a megatron-core in it."""
    for name, text in inference_of_megatron.TREE.items():
        path = folder / "megatron" / "core" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def outcome_of(worker: Worker, line: str) -> Outcome:
    """The outcome of a line."""
    return Outcome.from_json(worker.ask(RunOne(line)))


class _Copied(megatron_inference._Batch):
    def mamba_states_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        windows, states = super().mamba_states_cache(layer)
        return windows.clone(), states


class WindowsLost(megatron_inference.MegatronInference):
    """The inputs of the convolution do not stay in their slots."""

    def batch(self, module: torch.nn.Module, x: Inputs) -> megatron_inference._Batch:
        return _Copied(module, x)


class _Shifted(megatron_inference._Batch):
    def __init__(self, module: torch.nn.Module, x: Inputs) -> None:
        super().__init__(module, x)
        requests = self.slots.roll(1)
        self.mamba_metadata.batch_indices_prefill = self.mamba_metadata.batch_indices_decode = requests


class SlotsOfOthers(megatron_inference.MegatronInference):
    """Each request has the slot of the request before it."""

    def batch(self, module: torch.nn.Module, x: Inputs) -> megatron_inference._Batch:
        return _Shifted(module, x)


@pytest.mark.parametrize("line", LINES)
def test_megatrons_inference_holds(worker: Worker, line: str) -> None:
    outcome = outcome_of(worker, f"{line} adapter=megatron/inference")
    assert outcome.verdict is Verdict.HOLDS, (outcome.reason, outcome.findings)
    assert outcome.rows > 0


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("kind", "output"), [(WindowsLost, "conv_state"), (SlotsOfOthers, "final_state")])
def test_what_is_wrong_in_the_slots_is_seen(worker: Worker, line: str, kind: type, output: str) -> None:
    outcome = outcome_of(worker, f"{line} adapter={__file__}:{kind.__name__}")
    assert outcome.verdict is Verdict.BROKEN, outcome.reason
    assert any(finding.output.startswith(output) for finding in outcome.findings if finding.rows), outcome.findings


def test_a_megatron_without_inference_is_refused_in_one_line(release: Callable[..., None]) -> None:
    release(NAMES["0.18.2"])
    with pytest.raises(AdapterError) as caught:
        load("megatron/inference")
    assert "this Megatron-LM has no inference for its GDN layer: GatedDeltaNet has no ssm_dynamic_inference" in str(caught.value)
