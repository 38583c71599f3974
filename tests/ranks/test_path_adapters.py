"""Other people's parallel paths hold the laws on two real ranks, and a law sees what an adapter says wrong of them.

Megatron-LM's are of the release that `gdn-verify fetch megatron` downloads. MEGATRON_PATH names other files, as --path does.
"""

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.layer import Layer
from oracles.operation import Inputs
from properties.paths.case import ParallelCase
from properties.paths.domain import PathDomain
from properties.paths.laws import PATH_LAWS
from tests import wrong_megatron
from tests.downloads import folder_of_megatron, lacking_megatron
from verify.adapters import fla_parallel, megatron, megatron_norm, megatron_training
from verify.adapters.base import PathAdapter
from verify.adapters.loader import load
from verify.adapters.registry import AdapterError
from verify.cli.main import main
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.ranks.collectives import Alone, Place
from verify.ranks.group import RankGroup

pytestmark = pytest.mark.ranks

HERE = pathlib.Path(__file__).resolve()


@functools.cache
def find_megatron() -> str:
    """Puts Megatron-LM's files on sys.path. Returns why that cannot be done, or nothing.

    They are those under MEGATRON_PATH, or the newest release that adapters were tried with.
    """
    if folder := os.environ.get("MEGATRON_PATH"):
        sys.path.insert(1, folder)
        return ""
    if reason := lacking_megatron():
        return reason
    sys.path.append(str(folder_of_megatron()))
    return ""


@pytest.fixture(scope="module")
def megatrons() -> Iterator[RankGroup]:
    """Two ranks that find Megatron-LM."""
    if reason := find_megatron():
        pytest.skip(reason)
    with RankGroup(2, deadline_s=120.0) as group:
        yield group


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


class Unnormalised(megatron_norm.MegatronNormInKernel):
    """Leaves the norm out before the kernel and in it."""

    def module(self, groups: Any, layer: Layer, **settings: Any) -> nn.Module:
        module = megatron.MegatronLayer.module(self, groups, layer, **settings)
        vars(module).update(use_qk_l2norm=False)
        return module


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
IN_KERNEL = FLA.replace("combined", "in_kernel")
LAYER = "key_dim=4 value_dim=8 heads=2 value_heads=4"
TRAINED = f"adapter=megatron/training {LAYER} {FLA}"
TRAINED_IN_TORCH = f"adapter=megatron/training_deterministic {LAYER} {TORCH}"


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    with RankGroup(2, deadline_s=120.0) as group:
        yield group


def outcome_of(two: RankGroup, line: str) -> Outcome:
    return Outcome.from_json(two.ask(RunOne(str(Run.parse(line)))))


def holds(two: RankGroup, line: str) -> None:
    outcome = outcome_of(two, line)
    assert outcome.verdict is Verdict.HOLDS, (outcome.reason, outcome.findings)
    assert outcome.rows > 0


def broken(two: RankGroup, line: str, output: str, *, alone: bool = False) -> None:
    """Its values are wrong, those of `output` among them, and on one rank alone they are only with `alone`."""
    outcome = outcome_of(two, line)
    assert outcome.verdict is Verdict.BROKEN, outcome.reason
    wrong = {finding.output for finding in outcome.findings if finding.rows}
    assert output in wrong, outcome.findings
    assert any("with tp=1" in name for name in wrong) is alone, wrong


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


@pytest.mark.parametrize(
    "line",
    [
        f"law=exchange variant=heads adapter=megatron/exchange cp=2 {LAYER} packed=yes lengths=4+0+8 thd_all_to_all=fused",
        f"law=exchange variant=heads adapter=megatron/exchange cp=2 {LAYER} packed=yes lengths=4+0+8",
        f"law=exchange variant=heads adapter=megatron/exchange cp=2 {LAYER} lengths=8+8 thd_all_to_all=fused",
        f"law=round_trip adapter=megatron/exchange cp=2 {LAYER} lengths=8+8",
        f"law=fused adapter=megatron/exchange cp=2 {LAYER} packed=yes lengths=4+0+8",
        f"law=parallel adapter=megatron/layer cp=2 {LAYER} packed=yes padding=more lengths=3+0+5 conv_bias=yes {FLA}",
        f"law=parallel adapter=megatron/norm_in_kernel cp=2 {LAYER} packed=yes lengths=4+0+8 {IN_KERNEL}",
        f"law=parallel adapter=megatron/layer tp=2 sp=yes {LAYER} lengths=4+4 dtype=bf16 {FLA}",
        f"law=parallel adapter=megatron/deterministic cp=2 {LAYER} lengths=8+8 {TORCH}",
        f"law=repeats adapter=megatron/deterministic tp=2 {LAYER} lengths=8+8 deterministic=yes {TORCH}",
    ],
)
def test_megatron_holds(megatrons: RankGroup, line: str) -> None:
    holds(megatrons, line)


@pytest.mark.parametrize(
    ("kind", "line", "output"),
    [
        (OneSection, "law=exchange variant=heads cp=2 packed=yes lengths=4+8 thd_all_to_all=fused", "from tokens to heads"),
        (GlobalZigzag, f"law=parallel cp=2 packed=yes lengths=4+8 {FLA}", "y"),
        (Unnormalised, f"law=parallel cp=2 packed=yes lengths=4+8 {IN_KERNEL}", "y"),
        (OtherHalfFirst, f"law=parallel cp=2 lengths=8 {TORCH}", "y"),
    ],
)
def test_laws_see_what_is_said_wrong_of_megatron(megatrons: RankGroup, kind: type, line: str, output: str) -> None:
    broken(megatrons, f"{line} adapter={spec_of(kind)} {LAYER}", output, alone=kind is Unnormalised)


@pytest.mark.parametrize(
    "line",
    [
        f"law=parallel {TRAINED} cp=2 packed=yes padding=more lengths=3+5 dtype=bf16 conv_bias=yes",
        f"law=parallel {TRAINED_IN_TORCH} tp=2 sp=yes lengths=4+4",
        f"law=parallel {TRAINED_IN_TORCH} cp=2 lengths=8 recompute=yes",
        f"law=reshard variant=1x2 {TRAINED_IN_TORCH} tp=2 lengths=8 conv_bias=yes",
        f"law=reshard variant=2x1 {TRAINED_IN_TORCH} cp=2 lengths=8",
        f"law=earlier variant=alone {TRAINED_IN_TORCH} tp=2 sp=yes lengths=8",
        f"law=repeats {TRAINED_IN_TORCH} cp=2 lengths=8 deterministic=yes",
    ],
)
def test_megatrons_training_holds(megatrons: RankGroup, line: str) -> None:
    holds(megatrons, line)


@pytest.mark.parametrize(
    ("kind", "line", "output"),
    [
        (wrong_megatron.SliceAsTheWhole, "law=reshard variant=2x1 tp=2 lengths=8", "A_log loaded by tp rank 1, cp rank 0 of 2x1"),
        (
            wrong_megatron.CutEvenly,
            "law=reshard variant=1x1 tp=2 lengths=8",
            "in_proj.weight loaded by tp rank 0, cp rank 0 of 1x1",
        ),
        (wrong_megatron.NormNotAdded, "law=parallel tp=2 sp=yes lengths=8", "dnorm"),
        (wrong_megatron.AddedTwice, "law=parallel cp=2 lengths=8", "dA_log"),
        (wrong_megatron.NotRecomputed, "law=parallel tp=2 sp=yes lengths=8 recompute=yes", "dout_proj"),
        (wrong_megatron.OffsetsDivided, "law=parallel cp=2 packed=yes lengths=4+8", "y"),
        (wrong_megatron.UndoneInTheWrongOrder, "law=parallel cp=2 packed=yes lengths=4+8", "y"),
    ],
)
def test_laws_see_what_is_wrong_around_megatrons_layer(megatrons: RankGroup, kind: type, line: str, output: str) -> None:
    deterministic = issubclass(kind, megatron_training.MegatronTrainingDeterministic)
    spec = f"{wrong_megatron.__file__}:{kind.__name__}"
    broken(megatrons, f"{line} adapter={spec} {LAYER} {TORCH if deterministic else FLA}", output)


@pytest.mark.usefixtures("megatrons")
def test_megatrons_exchange_is_checked_with_more_ranks_than_there_are() -> None:
    line = "law=exchange variant=heads adapter=megatron/exchange cp=16 heads=16 value_heads=32 packed=yes lengths=32+0+64 "
    assert main(["repeat", line]) == 0


@pytest.mark.slow
def test_ranks_make_groups_that_others_did_not_need_before() -> None:
    with RankGroup(3, deadline_s=30.0) as three:
        for mesh in ("tp=2 heads=2 value_heads=2", "tp=3 heads=3 value_heads=3"):
            holds(three, f"law=exchange variant=heads adapter=gdn/layer {mesh} lengths=8")


@pytest.mark.slow
def test_ranks_without_a_part_do_not_disagree(two: RankGroup) -> None:
    outcome = outcome_of(two, "law=exchange variant=heads adapter=gdn/layer lengths=0")
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


def test_an_adapter_of_the_exchange_runs_only_the_laws_about_the_exchange() -> None:
    domain = megatron.MegatronExchange.domain
    possible = {name for name, law in PATH_LAWS.items() if law.needs(domain) is None}
    assert possible == {"exchange", "round_trip", "fused"}
    assert PATH_LAWS["parallel"].needs(domain) == "computes is not promised"


def test_flags_of_a_kernel_are_no_choices_with_one_result() -> None:
    assert PATH_LAWS["same"].needs(fla_parallel.ChunkCP.domain) == "the operation is not gdn_layer"


# Releases of Megatron-LM

NAMES = {
    "0.16.1": ("GatedDeltaNet", "GatedDeltaNetSubmodules"),
    "0.18.2": ("GatedDeltaNet", "GatedDeltaNetSubmodules", "tensor_a2a_cp2hp", "tensor_a2a_hp2cp"),
    "0.19.2": (
        *("GatedDeltaNet", "GatedDeltaNetSubmodules", "tensor_a2a_cp2hp", "tensor_a2a_hp2cp"),
        *("_build_head_perm_for_split_sections", "_build_thd_cp_a2a_perm"),
    ),
}
OTHERS = {
    "jit": "def disable_jit_fuser(): pass",
    "packed_seq_params": "PackedSeqParams = None",
    "process_groups_config": "ProcessGroupCollection = None",
    "transformer/__init__": "TransformerConfig = None",
    "transformer/transformer_config": "",
    "tensor_parallel/__init__": "",
    "tensor_parallel/mappings": "all_to_all = get_tensor_model_parallel_group_if_none = None",
    "ssm/__init__": "",
    "ssm/mamba_context_parallel": "all_to_all = None",
    "package_info": "MAJOR = 0\nMINOR = 19\nPATCH = 2\n",
}


@pytest.fixture
def release(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a megatron-core that has some names in ssm/gated_delta_net and nothing else, as `gdn-verify fetch` would leave it."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not megatron.LIBRARY.is_in(entry)])
    monkeypatch.setattr(torch.cuda, "current_device", torch.cuda.current_device)
    monkeypatch.setattr("verify.adapters.loader.installed", lambda name: "9.0")
    megatron._modules.cache_clear()

    def make(names: Sequence[str], others: Mapping[str, str] = OTHERS, package: str = "") -> None:
        core = pathlib.Path(megatron.LIBRARY.fetched, "megatron", "core")
        for file, text in {**others, f"ssm/gated_delta_net{package}": "\n".join(f"{name} = None" for name in names)}.items():
            (core / file).parent.mkdir(parents=True, exist_ok=True)
            (core / f"{file}.py").write_text(text)

    yield make
    megatron._modules.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("version", "cp", "exchange", "layer"),
    [
        ("0.16.1", False, ("per_sequence",), {"conv": ("torch",), "qk_norm": ("separate",), "thd_all_to_all": ("per_sequence",)}),
        ("0.18.2", True, ("per_sequence",), {"conv": ("fla",), "qk_norm": ("combined",), "thd_all_to_all": ("per_sequence",)}),
        ("0.19.2", True, ("per_sequence", "fused"), {"conv": ("fla",), "qk_norm": ("combined",), "thd_all_to_all": ("fused",)}),
    ],
)
def test_an_adapter_promises_what_its_release_has(
    release: Callable[..., None], version: str, *, cp: bool, exchange: tuple[str, ...], layer: dict[str, tuple[str, ...]]
) -> None:
    release(NAMES[version])
    domain, moves = load("megatron/layer").domain, load("megatron/exchange").domain
    assert isinstance(domain, PathDomain) and isinstance(moves, PathDomain)
    assert (domain.context_parallel, domain.packed, moves.exchanges, moves.packed) == (cp, cp, cp, cp)
    assert dict(moves.choices) == {"thd_all_to_all": exchange}
    assert dict(domain.choices) == {**layer, "rule": ("fla",)}
    outside = domain.outside(ParallelCase((8, 8), cp=2, heads=2, value_heads=2))
    assert (outside == "cp=2: context parallelism is not supported") is not cp
    assert megatron.LIBRARY.release() == "0.19.2"


TRAINING = {
    **OTHERS,
    "parallel_state": "",
    "tensor_parallel/random": "",
    "tensor_parallel/__init__": "ColumnParallelLinear = RowParallelLinear = None",
    "distributed": "DistributedDataParallel = DistributedDataParallelConfig = finalize_model_grads = None",
    "dist_checkpointing/__init__": "",
    "dist_checkpointing/mapping": "apply_factories = apply_factory_merges = ShardedObject = ShardedTensorFactory = None",
    "dist_checkpointing/strategies/__init__": "",
    "dist_checkpointing/strategies/torch": "\n".join(
        f"{name} = None" for name, module in megatron_training.TRAINING.items() if module.endswith("strategies.torch")
    ),
}


@pytest.mark.parametrize(
    ("layer", "recomputes"),
    [("GatedDeltaNet = None", False), ("class GatedDeltaNet:\n    def _gated_norm_and_a2a(self): pass", True)],
)
def test_what_a_release_cannot_recompute_is_outside_the_domain(
    release: Callable[..., None], layer: str, *, recomputes: bool
) -> None:
    release(NAMES["0.19.2"], {**TRAINING, "ssm/gated_delta_net/gdn": layer, "ssm/gated_delta_net/common": ""}, "/__init__")
    domain = load("megatron/training").domain
    assert isinstance(domain, PathDomain)
    assert (domain.recomputes, domain.steps, domain.saves) == (recomputes, True, True)
    outside = domain.outside(dataclasses.replace(ParallelCase.parse(f"{FLA} tp=2 heads=2 value_heads=2 lengths=8"), recompute=True))
    assert outside == (None if recomputes else "recompute=yes is not supported")


def test_a_megatron_without_what_training_needs_is_refused_in_one_line(release: Callable[..., None]) -> None:
    release(NAMES["0.19.2"], {**TRAINING, "distributed": "DistributedDataParallel = DistributedDataParallelConfig = None"})
    with pytest.raises(AdapterError, match=r"there is no megatron\.core\.distributed\.finalize_model_grads, neither in"):
        load("megatron/training")


@pytest.mark.parametrize(
    ("names", "others", "missing"),
    [
        ((), {"packed_seq_params": "", "transformer/transformer_config": ""}, "megatron.core.jit"),
        ((), OTHERS, "megatron.core.ssm.gated_delta_net.GatedDeltaNet"),
        (NAMES["0.16.1"], {"jit": OTHERS["jit"]}, "megatron.core.packed_seq_params"),
    ],
)
def test_a_megatron_without_the_names_is_refused_in_one_line(
    release: Callable[..., None], names: Sequence[str], others: dict[str, str], missing: str
) -> None:
    release(names, others)
    sys.path.append(os.path.abspath(megatron.LIBRARY.fetched))
    with pytest.raises(AdapterError) as caught:
        load("megatron/layer")
    message = str(caught.value)
    assert f"there is no {missing}, neither in an installed megatron-core" in message
    assert "gdn-verify fetch megatron" in message
    assert "\n" not in message


def test_a_path_that_is_no_folder_is_bad_usage(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert main(["check", "megatron/layer", "--path", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"gdn-verify: --path must name a folder, got '{tmp_path / 'none'}'\n"
