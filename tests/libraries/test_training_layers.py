"""The layers of torchtitan and NeMo AutoModel hold, and wrong uses are found. Both are fetched once, or their tests are skipped."""

import importlib.util
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from tests import needs
from verify.adapters import nemo_layer, transformers_layer
from verify.adapters.base import Adapter
from verify.adapters.loader import load
from verify.adapters.packages import installed
from verify.adapters.registry import AdapterError
from verify.adapters.torchtitan_layer import Qwen35Layer
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

pytestmark = pytest.mark.interpreted
SLOW_FIXTURES = ("layer_worker",)
HERE = "tests/libraries/test_training_layers.py"
INSTALLED = [name for name in ("torchtitan", "nemo_automodel") if importlib.util.find_spec(name) is not None]
TITAN, NEMO = "torchtitan/qwen3_5_layer", "nemo/qwen3_5_moe_layer"


@pytest.fixture(scope="module")
def layer_worker(torchtitan_files: pathlib.Path, nemo_files: pathlib.Path) -> Iterator[Worker]:
    """A worker that finds both libraries where --path would put them."""
    needs.need("fla")
    needs.need("transformers")
    with pytest.MonkeyPatch.context() as patch, Worker() as worker:
        patch.syspath_prepend(str(torchtitan_files))
        patch.syspath_prepend(str(nemo_files))
        yield worker


class WithoutOffsets(Qwen35Layer):
    """The caller passes no offsets, so that the rows of a batch are one sequence."""

    def offsets(self, x: Inputs) -> None:
        return None


class OffsetsOfOneSequence(Qwen35Layer):
    """The caller passes the offsets of one sequence in place of those of all."""

    def offsets(self, x: Inputs) -> Any:
        metadata, ends = super().offsets(x), [0, x.hidden.shape[0] * x.hidden.shape[1]]
        return metadata._replace(cu_seq_q=metadata.cu_seq_q.new_tensor(ends), cu_seq_q_host=(*ends,))


class GatesExchanged(Qwen35Layer):
    """The projections of a and b, which have one width, are exchanged."""

    def run(self, x: Inputs) -> tuple[Tensor, None, None]:
        rows = [*x.in_proj.split([*x.layer.sections.values()])]
        names = [*x.layer.sections]
        a, b = names.index("a"), names.index("b")
        rows[a], rows[b] = rows[b], rows[a]
        return super().run(x.replaced(in_proj=torch.cat(rows)))


class NemoGatesExchanged(nemo_layer.Qwen35MoeLayer):
    """The same in NeMo AutoModel."""

    def parameters(self, module: torch.nn.Module, x: Inputs) -> dict[str, Tensor]:
        names = {"in_proj_a.weight": "in_proj_b.weight", "in_proj_b.weight": "in_proj_a.weight"}
        return {names.get(name, name): parameter for name, parameter in super().parameters(module, x).items()}


class NemoWithoutMask(nemo_layer.Qwen35MoeLayer):
    """The caller passes no mask for rows that begin with padding."""

    def run(self, x: Inputs) -> transformers_layer.Answer:
        return super().run(x.replaced(pads=None, options={**x.options, "mask": "none"}))


@pytest.mark.parametrize("spec", [TITAN, NEMO])
def test_layer_is_the_layer_of_the_oracle_with_its_gradients(spec: str, layer_worker: Worker) -> None:
    line = "op=gdn_layer lengths=70+70 heads=2 value_heads=4 key_dim=8 value_dim=16 hidden=12 dtype=bf16 parameter_dtype=input"
    outcome = Outcome.from_json(layer_worker.ask(RunOne(f"law=oracle adapter={spec} {line}")))
    assert outcome.verdict is Verdict.HOLDS, outcome


BATCH = "op=gdn_layer lengths=5+5 heads=2 value_heads=4 hidden=12 backward=no"


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        (TITAN, WithoutOffsets, f"law=oracle {BATCH}"),
        (TITAN, OffsetsOfOneSequence, f"law=oracle {BATCH}"),
        (TITAN, OffsetsOfOneSequence, f"law=oracle {BATCH.replace('5+5', '3+7 packed=yes')}"),
        (TITAN, GatesExchanged, f"law=oracle {BATCH}"),
        (NEMO, NemoGatesExchanged, f"law=oracle {BATCH}"),
        (NEMO, NemoWithoutMask, f"law=left_padding {BATCH}"),
    ],
)
def test_law_shows_a_wrong_use_of_the_layer(right: str, wrong: type[Adapter], line: str, layer_worker: Worker) -> None:
    verdicts = [
        Outcome.from_json(layer_worker.ask(RunOne(f"{line} adapter={spec}"))).verdict
        for spec in (right, f"{HERE}:{wrong.__name__}")
    ]
    assert verdicts == [Verdict.HOLDS, Verdict.BROKEN]


@pytest.mark.parametrize(("spec", "library"), [(TITAN, "torchtitan"), (NEMO, "nemo_automodel")])
def test_without_the_library_its_adapter_says_in_one_line_how_to_get_it(
    spec: str, library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    if library in INSTALLED:
        pytest.skip(f"{library} is installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not pathlib.Path(folder, library).is_dir()])
    monkeypatch.setattr("verify.adapters.loader.installed", installed.__wrapped__)
    with pytest.raises(AdapterError, match=rf"^adapter {spec}: there is no {library}: run `gdn-verify fetch {library}`"):
        load(spec)
