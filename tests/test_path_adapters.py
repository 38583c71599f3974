"""Other people's parallel paths hold the laws on two real ranks, and a law sees what an adapter says wrong of them.

Megatron-LM's run where a megatron-core that has them is installed, or MEGATRON_PATH names a checkout, as --path does.
"""

import functools
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.cases.path_case import ParallelCase
from properties.path_laws import PATH_LAWS
from verify.adapters import fla_parallel, megatron
from verify.adapters.base import PathAdapter
from verify.adapters.loader import AdapterError, load
from verify.cli.main import main
from verify.execution.execute import execute
from verify.execution.run import Run
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.ranks.collectives import Alone, Place
from verify.ranks.group import RankGroup

pytestmark = pytest.mark.ranks

HERE = pathlib.Path(__file__).resolve()
PACKAGE = pathlib.Path("core", "ssm", "gated_delta_net", "common.py")


def _no_megatron() -> str:
    """Why Megatron-LM's paths cannot be run here, or nothing. It is not imported, which takes ten seconds."""
    if (folder := os.environ.get("MEGATRON_PATH")) and folder not in sys.path:
        sys.path.insert(1, folder)
    found = importlib.util.find_spec("megatron")
    if found is not None and any(pathlib.Path(place, PACKAGE).is_file() for place in found.submodule_search_locations or ()):
        return ""
    return "no megatron-core with megatron.core.ssm.gated_delta_net.common: MEGATRON_PATH=DIR names a checkout of Megatron-LM"


needs_megatron = pytest.mark.skipif(bool(_no_megatron()), reason=_no_megatron())


# What an adapter may get wrong


class OtherLayout(fla_parallel.ChunkCP):
    """Says contiguous of FLA's zigzag, and the other way round."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        other = {"contiguous": "zigzag_batch", "zigzag_batch": "contiguous"}[x.layout]
        return super().run(x.replaced(layout=other), place)


def _forgets(of: type[PathAdapter]) -> Any:
    def run(self: PathAdapter, x: Inputs, place: Place) -> Tensor:
        if place.cp.size == 1:
            return of.run(self, x, place)
        tokens = (x.x if self.domain.operation == "causal_conv1d" else x.v).shape[1]
        return of.run(self, x.replaced(cu_seqlens=torch.tensor([0, tokens])), Place(Alone(), Alone()))

    return run


class KdaForgets(fla_parallel.KdaCP):
    """Each rank begins with a state of zeros."""

    run = _forgets(fla_parallel.KdaCP)


class ConvForgets(fla_parallel.ConvCP):
    """Each rank begins with no tokens before its own."""

    run = _forgets(fla_parallel.ConvCP)


class OneSection(megatron.MegatronExchange):
    """Moves all sections as one."""

    def move(
        self, x: Tensor, lengths: Sequence[int] | None, sections: Sequence[int], to: str, place: Place, choices: dict[str, str]
    ) -> Tensor:
        return super().move(x, lengths, [sum(sections)], to, place, choices)


class GlobalZigzag(megatron.MegatronLayer):
    """Takes packed sequences that ranks share for one."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        return super().run(x if place.cp.size == 1 else x.replaced(cu_seqlens=None), place)


class OtherHalfFirst(megatron.MegatronDeterministic):
    """Gives a rank its two pieces in the other order."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        if place.cp.size == 1:
            return super().run(x, place)
        y = super().run(x.replaced(hidden=torch.cat(x.hidden.chunk(2)[::-1])), place)
        return torch.cat(y.chunk(2)[::-1])


# Cases

SHARED = "law=parallel adapter={} op={} cp=2 packed=yes key_dim=4 value_dim=8"
GDR, KDA, CONV = (
    SHARED.format(f"fla/{adapter}", operation)
    for adapter, operation in (("chunk_cp", "gated_delta_rule"), ("kda_cp", "kda"), ("conv_cp", "causal_conv1d"))
)
FUSED = "qk_norm=combined thd_all_to_all=fused"
FLA, TORCH = f"conv=fla rule=fla {FUSED}", FUSED
LAYER = "key_dim=4 value_dim=8 heads=2 value_heads=4"


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    with RankGroup(2, deadline_s=120.0) as group:
        yield group


def asked(two: RankGroup, line: str) -> Outcome:
    return Outcome.from_json(two.ask(RunOne(str(Run.parse(line)))))


def holds(two: RankGroup, line: str) -> None:
    outcome = asked(two, line)
    assert outcome.verdict is Verdict.HOLDS, (outcome.reason, outcome.findings)
    assert outcome.rows > 0


def broken(two: RankGroup, line: str, output: str) -> None:
    """Its values are wrong, those of `output` among them, and on one rank alone they are not."""
    outcome = asked(two, line)
    assert outcome.verdict is Verdict.BROKEN, outcome.reason
    wrong = {finding.output for finding in outcome.findings if finding.rows}
    assert output in wrong, outcome.findings
    assert not any("with tp=1" in name for name in wrong), wrong


def spec_of(kind: type) -> str:
    return f"{HERE}:{kind.__name__}"


@pytest.mark.parametrize(
    "line",
    [
        f"{GDR} layout=contiguous lengths=3+0+5 value_heads=2",
        f"{GDR} layout=zigzag_batch lengths=8 dtype=bf16 qk_norm=in_kernel offsets=int32",
        f"{KDA} layout=contiguous lengths=5+1",
        f"{KDA} layout=zigzag_batch lengths=8 dtype=bf16 qk_norm=in_kernel",
        f"{CONV} layout=contiguous lengths=1+0+9 conv_bias=yes",
        f"{CONV} layout=zigzag_batch lengths=12 dtype=bf16 conv_width=3",
    ],
)
@pytest.mark.slow
def test_flas_context_parallelism_holds(two: RankGroup, line: str) -> None:
    holds(two, line)


@pytest.mark.parametrize(
    ("kind", "operation", "output"),
    [
        (OtherLayout, "gated_delta_rule", "o"),
        (KdaForgets, "kda", "o"),
        (ConvForgets, "causal_conv1d", "y"),
    ],
)
@pytest.mark.slow
def test_the_law_sees_what_is_said_wrong_of_fla(two: RankGroup, kind: type, operation: str, output: str) -> None:
    broken(two, f"{SHARED.format(spec_of(kind), operation)} layout=contiguous lengths=12", output)


@needs_megatron
@pytest.mark.parametrize(
    "line",
    [
        f"law=exchange variant=heads adapter=megatron/exchange cp=2 {LAYER} packed=yes lengths=4+0+8 thd_all_to_all=fused",
        f"law=exchange variant=heads adapter=megatron/exchange cp=2 {LAYER} packed=yes lengths=4+0+8",
        f"law=exchange variant=heads adapter=megatron/exchange cp=2 {LAYER} lengths=8+8 thd_all_to_all=fused",
        f"law=round_trip adapter=megatron/exchange cp=2 {LAYER} lengths=8+8",
        f"law=fused adapter=megatron/exchange cp=2 {LAYER} packed=yes lengths=4+0+8",
        f"law=parallel adapter=megatron/layer cp=2 {LAYER} packed=yes padding=more lengths=3+0+5 conv_bias=yes {FLA}",
        f"law=parallel adapter=megatron/layer tp=2 sp=yes {LAYER} lengths=4+4 dtype=bf16 {FLA}",
        f"law=parallel adapter=megatron/deterministic cp=2 {LAYER} lengths=8+8 {TORCH}",
        f"law=repeats adapter=megatron/deterministic tp=2 {LAYER} lengths=8+8 deterministic=yes {TORCH}",
    ],
)
def test_megatron_holds(two: RankGroup, line: str) -> None:
    holds(two, line)


@needs_megatron
@pytest.mark.parametrize(
    ("kind", "line", "output"),
    [
        (OneSection, "law=exchange variant=heads cp=2 packed=yes lengths=4+8 thd_all_to_all=fused", "from tokens to heads"),
        (GlobalZigzag, f"law=parallel cp=2 packed=yes lengths=4+8 {FLA}", "y"),
        (OtherHalfFirst, f"law=parallel cp=2 lengths=8 {TORCH}", "y"),
    ],
)
def test_laws_see_what_is_said_wrong_of_megatron(two: RankGroup, kind: type, line: str, output: str) -> None:
    broken(two, f"{line} adapter={spec_of(kind)} {LAYER}", output)


@needs_megatron
def test_megatrons_exchange_is_asked_at_more_ranks_than_there_are() -> None:
    line = "law=exchange variant=heads adapter=megatron/exchange cp=16 heads=16 value_heads=32 packed=yes lengths=32+0+64 "
    code = main(["repeat", line, *(["--path", os.environ["MEGATRON_PATH"]] if "MEGATRON_PATH" in os.environ else [])])
    assert code == 0


@pytest.mark.slow
def test_ranks_make_groups_that_others_did_not_need_before() -> None:
    with RankGroup(3, deadline_s=30.0) as three:
        for mesh in ("tp=2 heads=2 value_heads=2", "tp=3 heads=3 value_heads=3"):
            holds(three, f"law=exchange variant=heads adapter=gdn/layer {mesh} lengths=8")


@pytest.mark.slow
def test_ranks_without_a_part_do_not_disagree(two: RankGroup) -> None:
    outcome = asked(two, "law=exchange variant=heads adapter=gdn/layer lengths=0")
    assert (outcome.verdict, outcome.reason) == (Verdict.BLIND, "nothing to compare: no rank has a row")


# What they do not promise


def test_flas_context_parallelism_needs_processes() -> None:
    outcome = execute(Run.parse(f"{KDA} layout=contiguous lengths=8"))
    assert outcome.verdict is Verdict.UNSUPPORTED
    assert outcome.reason == "fla/kda_cp needs ranks that are processes: --ranks N, or torchrun"


@pytest.mark.parametrize(("layout", "tokens"), [("contiguous", 4), ("zigzag_batch", 8)])
def test_pieces_shorter_than_the_convolution_are_outside_the_domain(layout: str, tokens: int) -> None:
    case = functools.partial(ParallelCase, operation="causal_conv1d", cp=2, layout=layout, packed=True)
    outside = fla_parallel.ConvCP.domain.outside
    assert outside(case(lengths=(tokens,))) == "pieces of 2 tokens, under 3, are not supported"
    assert outside(case(lengths=(tokens // 2 * 3,))) is None


def test_what_is_an_exchange_only_is_asked_about_that_alone() -> None:
    domain = megatron.MegatronExchange.domain
    asked = {name for name, law in PATH_LAWS.items() if law.needs(domain) is None}
    assert asked == {"exchange", "round_trip", "fused"}
    assert PATH_LAWS["parallel"].needs(domain) == "computes is not promised"


def test_flags_of_a_kernel_are_no_choices_with_one_result() -> None:
    assert PATH_LAWS["same"].needs(fla_parallel.ChunkCP.domain) == "the operation is not gdn_layer"


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ((), "megatron.core.jit"),
        (("core/jit.py",), "megatron.core.ssm.gated_delta_net.common"),
        (("core/jit.py", str(PACKAGE)), "megatron.core.ssm.gated_delta_net.common.GatedDeltaNetSubmodules"),
    ],
)
def test_a_megatron_without_the_functions_is_refused_in_one_line(
    files: tuple[str, ...], missing: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    for name in ("__init__.py", "core/__init__.py", *files):
        file = tmp_path / "megatron" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def disable_jit_fuser(): pass\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    megatron._modules.cache_clear()
    with pytest.raises(AdapterError) as caught:
        load("megatron/layer")
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    message = str(caught.value)
    assert f"there is no {missing}, neither in an installed megatron-core" in message
    assert "--path DIR names a checkout" in message
    assert "\n" not in message


def test_a_path_that_is_no_folder_is_bad_usage(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert main(["check", "megatron/layer", "--path", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"gdn-verify: --path must name a folder, got '{tmp_path / 'none'}'\n"
