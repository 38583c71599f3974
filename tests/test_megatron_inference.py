"""The inference of Megatron-LM's layer, of a Megatron that has it: main has, releases up to 0.19.2 have not.

MEGATRON_PATH names a Megatron, as --path does. Without one, only the refusal is tested.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from tests.test_path_adapters import NAMES, find_megatron, release
from verify.adapters import megatron_inference
from verify.adapters.loader import load
from verify.adapters.registry import AdapterError
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

LAYER = "heads=2 value_heads=4 key_dim=4 value_dim=8 hidden=8 conv_bias=yes parameter_dtype=input backward=no"
LINES = [
    f"law=oracle op=gdn_layer packed=yes lengths=3+7 cached=yes {LAYER}",
    f"law=oracle op=gdn_layer lengths=1+1+1 cached=yes state=random dtype=bf16 {LAYER}",
    f"law=cache variant=steps at=4 lengths=7+7 cached=yes {LAYER}",
]

__all__ = ["release"]  # a fixture


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker that finds a Megatron."""
    if reason := find_megatron():
        pytest.skip(reason)
    with Worker(120.0) as worker:
        yield worker


def asked(worker: Worker, line: str) -> Outcome:
    """The outcome of a line. Skips the test if the Megatron has no inference."""
    answer = worker.ask(RunOne(line))
    if megatron_inference.INFERENCE in str(answer):
        pytest.skip("this Megatron-LM has no inference for its GDN layer")
    return Outcome.from_json(answer)


class _Copied(megatron_inference._Batch):
    def mamba_states_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        windows, states = super().mamba_states_cache(layer)
        return windows.clone(), states


class WindowsLost(megatron_inference.MegatronInference):
    """The inputs of the convolution do not stay in their slots."""

    def batch(self, module: torch.nn.Module, x: Inputs) -> megatron_inference._Batch:
        return _Copied(module, x)


@pytest.mark.parametrize("line", LINES)
def test_megatrons_inference_holds(worker: Worker, line: str) -> None:
    outcome = asked(worker, f"{line} adapter=megatron/inference")
    assert outcome.verdict is Verdict.HOLDS, (outcome.reason, outcome.findings)
    assert outcome.rows > 0


@pytest.mark.parametrize("line", LINES)
def test_lost_windows_are_seen(worker: Worker, line: str) -> None:
    outcome = asked(worker, f"{line} adapter={__file__}:WindowsLost")
    assert outcome.verdict is Verdict.BROKEN, outcome.reason
    assert any(finding.output.startswith("conv_state") for finding in outcome.findings if finding.rows), outcome.findings


def test_a_megatron_without_inference_is_refused_in_one_line(release: Callable[..., None]) -> None:
    release(NAMES["0.18.2"])
    with pytest.raises(AdapterError) as caught:
        load("megatron/inference")
    assert "this Megatron-LM has no inference for its GDN layer: GatedDeltaNet has no ssm_dynamic_inference" in str(caught.value)
