"""Adapters of runtimes on a CPU, such as ONNX Runtime and OpenVINO. Each is right as it is declared, and wrong otherwise."""

import importlib.metadata
import platform
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from properties.modules.laws import MODULE_LAWS
from properties.palette import sample
from properties.rules.case import Case
from tests.needs import need_adapter
from verify.adapters import contract, ggml, loader, onnx_operators, vllm_cpu
from verify.adapters.foreign import AskedAdapter, Call, Place
from verify.adapters.loader import load, make
from verify.adapters.registry import BUILT_IN, AdapterError
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings import known
from verify.process.outcome import FailureKind, Outcome, Verdict

RUNTIMES = ("onnxruntime", "onnx", "ggml", "mlx", "openvino", "vllm_cpu")
SPECS = [spec for spec in BUILT_IN if spec.partition("/")[0] in RUNTIMES]
SPEC = f"{__file__}:Mine"
SMALL = "key_dim=4 value_dim=4 values=small qk_norm=yes backward=no"
GROUPS = "lengths=5+5 heads=2 value_heads=4 key_dim=4 value_dim=4 state=random backward=no"
CONV = "op=causal_conv1d conv_width=4 state=random state_columns=W-1 activation=silu backward=no"
VLLM_CONV = f"{CONV} dtype=bf16 width=64 bias=yes"
RIGHT = {
    "onnxruntime/gated_delta_net": f"packed=yes offsets=int32 in_kernel=both dtype=bf16 {GROUPS}",
    "onnxruntime/gated_delta_net_kda": f"op=kda packed=yes offsets=int32 dtype=bf16 in_kernel=gate {GROUPS}",
    "onnxruntime/gated_delta_net_bounded": f"op=kda lengths=3+3 in_kernel=both lower_bound=-5 qk_norm_eps=1e-6 {SMALL}",
    "onnxruntime/gated_delta_net_delta_rule": f"op=delta_rule dtype=fp16 {GROUPS}",
    "onnxruntime/linear_attention": f"gate_dtype=input {GROUPS.replace('value_heads=4', 'value_heads=2')}",
    "onnxruntime/linear_attention_kda": f"op=kda gate_dtype=input {GROUPS.replace('value_heads=4', 'value_heads=2')}",
    "onnxruntime/linear_attention_delta_rule": f"op=delta_rule gate_dtype=input {GROUPS.replace('value_heads=4', 'value_heads=2')}",
    "onnxruntime/linear_attention_27": f"dtype=bf16 gate_dtype=input {GROUPS.replace('value_heads=4', 'value_heads=2')}",
    "onnx/linear_attention": f"dtype=bf16 gate_dtype=input {GROUPS.replace('value_heads=4', 'value_heads=2')}",
    "ggml/gated_delta_net": f"qk_norm_form=max qk_norm=yes {GROUPS}",
    "ggml/gated_delta_net_kda": f"op=kda qk_norm_form=max qk_norm=yes {GROUPS}",
    "mlx/gated_delta": f"dtype=bf16 gate_dtype=input decay=linear scale=one {GROUPS}",
    "openvino/gated_delta_net": f"gate_dtype=input state_dtype=input final_dtype=input dtype=bf16 qk_norm=yes {GROUPS}",
    "vllm_cpu/chunk": "lengths=5+70 packed=yes offsets=int32 value_heads=2 key_dim=64 value_dim=64 dtype=bf16 qk_norm=yes"
    " qk_norm_eps=1e-5 state=random final_dtype=state backward=no",
    "onnxruntime/conv": f"lengths=5+5 width=6 bias=yes {CONV}",
    "onnxruntime/conv_27": f"lengths=5+5 width=6 dtype=fp16 {CONV}",
    "onnxruntime/conv_varlen": f"lengths=5+2 packed=yes offsets=int32 width=6 {CONV}",
    "onnxruntime/gdn_gate": "lengths=5+5 op=gdn_gate heads=3 dt_bias=no backward=no",
    "onnxruntime/gated_norm": "lengths=5+5 op=gated_rms_norm heads=3 width=5 dtype=bf16 gating=sigmoid weight=no backward=no",
    "onnx/conv": f"lengths=5+5 width=6 {CONV}",
    "ggml/conv": f"lengths=5+5 width=6 final_state=no {CONV}",
    "vllm_cpu/gdn_gate": "lengths=5+5 op=gdn_gate heads=3 dtype=bf16 parameter_dtype=mixed backward=no",
    "vllm_cpu/conv": f"lengths=5+2 packed=yes {VLLM_CONV}",
    "vllm_cpu/conv_update": f"lengths=1+1 {VLLM_CONV}",
    "vllm_cpu/conv_update_vec": f"lengths=3+3 width=6 {CONV}",
    "vllm_cpu/decode": "op=decode lengths=1+1 value_heads=2 key_dim=8 value_dim=40 dtype=bf16 in_kernel=both parameter_dtype=mixed"
    " indices=int32 qk_norm=yes qk_norm_eps=1e-5 values=small",
}


def verdict(spec: str, words: str, adapter: Any = None) -> Verdict:
    """The verdict of a case of the law `oracle`, also of an adapter that is not in a file."""
    return outcome(spec, words, adapter).verdict


def outcome(spec: str, words: str, adapter: Any = None) -> Outcome:
    judging._LOADED |= {spec: adapter} if adapter else {}
    try:
        return execute(Run.parse(f"law=oracle adapter={spec} {words}"))
    finally:
        if adapter:
            del judging._LOADED[spec]


@pytest.mark.parametrize("spec", SPECS)
def test_a_case_of_each_adapter_holds(spec: str) -> None:
    need_adapter(spec)
    assert verdict(spec, RIGHT[spec]) is Verdict.HOLDS


class Tiled(ggml.GatedDeltaNet):
    """Value heads as ggml has them."""

    run = AskedAdapter.run


class Grows(onnx_operators.Gate):
    """A decay that grows: the model lacks a node."""

    def model(self, x: Inputs) -> Any:
        nodes = super().model(x)
        nodes = super().model(x)
        nodes[2].input[2] = "rate"
        return [nodes[0], nodes[2]]


OFF, RAISED = FailureKind.OFF, FailureKind.RAISED
DECLARED: list[tuple[str, dict[str, Any], str, FailureKind]] = [
    ("onnxruntime/gated_delta_net", {"qk_norm_eps": ("1e-6",)}, f"lengths=3 qk_norm_eps=1e-6 {SMALL}", OFF),
    ("onnxruntime/gated_delta_net", {"nothing": True}, "lengths=0 backward=no", RAISED),
    ("onnxruntime/gated_delta_net", {"negative_eigenvalues": True}, "lengths=5 beta=two in_kernel=beta backward=no", OFF),
    (
        "onnxruntime/gated_delta_net_bounded",
        {"qk_norm_eps": ("1e-12",)},
        f"op=kda lengths=3 in_kernel=both lower_bound=-5 qk_norm_eps=1e-12 {SMALL}",
        OFF,
    ),
    ("ggml/gated_delta_net", {"qk_norm_forms": ("inside",)}, f"lengths=3 {SMALL}", OFF),
    ("mlx/gated_delta", {"nothing": True}, "lengths=0 decay=linear scale=one backward=no", RAISED),
    (
        "openvino/gated_delta_net",
        {"final_dtype": "fp32"},
        f"gate_dtype=input state_dtype=input dtype=bf16 {GROUPS}",
        FailureKind.DTYPE,
    ),
    ("onnxruntime/conv_27", {"nothing": True}, f"lengths=0 width=6 {CONV}", RAISED),
]


@pytest.mark.parametrize(("spec", "change", "words", "kind"), DECLARED)
def test_without_its_declaration_an_adapter_is_broken(spec: str, change: Mapping[str, Any], words: str, kind: FailureKind) -> None:
    need_adapter(spec)
    right: Any = load(spec)
    domain = type(right.domain)(**{**vars(right.domain), **change})
    adapter = make(type("Mine", (type(right),), {"domain": domain}), SPEC)
    assert {finding.kind for finding in outcome(SPEC, words, adapter).findings} == {kind}


@pytest.mark.parametrize(
    ("spec", "kind"), [("ggml/gated_delta_net", Tiled), ("onnxruntime/gdn_gate", Grows)], ids=lambda part: str(part)
)
def test_heads_and_nodes_matter(spec: str, kind: Any) -> None:
    need_adapter(spec)
    words = RIGHT[spec].replace("dt_bias=no ", "")
    assert verdict(spec, words) is Verdict.HOLDS
    assert {finding.kind for finding in outcome(SPEC, words, make(kind, SPEC)).findings} == {FailureKind.OFF}


def test_the_decode_operator_of_vllm_has_its_own_eps_and_leaves_other_slots_alone() -> None:
    need_adapter("vllm_cpu/decode")
    words = RIGHT["vllm_cpu/decode"]
    rule = load("vllm_cpu/decode").domain.rule  # type: ignore[union-attr]
    other = type(rule)(**{**vars(rule), "qk_norm_eps": ("1e-6",)})
    domain = type(vllm_cpu.Decode.domain)(**{**vars(vllm_cpu.Decode.domain), "rule": other})
    adapter = make(type("Mine", (vllm_cpu.Decode,), {"domain": domain}), SPEC)
    assert verdict(SPEC, words.replace(" qk_norm_eps=1e-5", ""), adapter) is Verdict.BROKEN
    untouched = f"law=untouched adapter=vllm_cpu/decode {words}"
    assert execute(Run.parse(untouched)).verdict is Verdict.HOLDS


def test_the_operators_of_vllm_need_neighbours_along_the_last_axis() -> None:
    need_adapter("vllm_cpu/chunk")
    x = Case.parse(RIGHT["vllm_cpu/chunk"]).inputs()
    apart = torch.stack([x.q, x.q], -1)[..., 0]
    assert not apart.is_contiguous()
    with pytest.raises(RuntimeError, match="contiguous"):
        vllm_cpu.Chunk().run(x.replaced(q=apart))


def test_known_defects_of_runtimes_are_there() -> None:
    defects = [defect for defect in known.load() if defect.run.adapter.partition("/")[0] in RUNTIMES]
    assert {defect.run.adapter for defect in defects} == {
        "mlx/gated_delta",
        "openvino/gated_delta_net",
        "onnxruntime/gdn_gate",
        "onnxruntime/gated_norm",
        "onnxruntime/conv_27",
        "vllm_cpu/gdn_gate",
    }
    seen = [defect for defect in defects if defect.applies()]
    assert [str(defect.run) for defect in seen if execute(defect.run).verdict is not Verdict.BROKEN] == []


# What needs no package


class Echo(AskedAdapter):
    """A convolution of nothing: it returns its inputs, and keeps what it was sent."""

    layout: ClassVar[Mapping[str, str]] = {"x": "D T", "y": "D T", "weight": "D 1 W"}
    algorithm = "pointwise"
    domain = ModuleDomain("causal_conv1d", backward=False)

    def _ask(self, call: Call, word: str, sent: Mapping[Place, Tensor], asked: Sequence[Place]) -> Iterable[Tensor]:
        self.sent = {place.name: place.theirs(x) for place, x in sent.items()}
        self.back = {place.name: place.ours(self.sent[place.name], call.device) for place in sent}
        return [self.sent["x"]]

    def _wrong(self) -> None:
        return None


def test_a_layout_may_have_an_axis_of_one_element() -> None:
    adapter: Any = make(Echo, "mine")
    x = Inputs(x=torch.rand(2, 3, 4), weight=torch.rand(4, 5), bias=None, state=None, cu_seqlens=None, output_final_state=False)
    y, _ = adapter.run(x)
    assert torch.equal(y, x.x) and adapter.sent["x"].shape == (2, 4, 3)
    assert adapter.sent["weight"].shape == (4, 1, 5) and torch.equal(adapter.sent["weight"][:, 0], x.weight)
    assert torch.equal(adapter.back["weight"], x.weight)


def test_value_heads_are_sorted_as_ggml_reads_them_and_back() -> None:
    for heads, each in ((2, 3), (3, 2), (1, 4), (4, 1)):
        names = torch.arange(heads * each)
        there = ggml._sorted(names.unsqueeze(0), 1, heads)[0]
        assert [int(name) // each for name in there] == [place % heads for place in range(heads * each)]
        assert torch.equal(ggml._sorted(there.unsqueeze(0), 1, each)[0], names)


@pytest.mark.parametrize(
    ("machine", "has", "name"),
    [
        ("x86_64", ("avx512", "avx512_bf16"), "_C"),
        ("x86_64", ("avx512",), "_C_AVX512"),
        ("AMD64", (), "_C_AVX2"),
        ("aarch64", (), "_C"),
    ],
)
def test_the_library_of_vllm_is_that_of_the_processor(
    machine: str, has: Sequence[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    folder = types.SimpleNamespace(locate_file=lambda file: f"/there/{file}")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda package: folder)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: "avx512" in has)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "avx512_bf16" in has)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    vllm_cpu.operators.__wrapped__()
    assert loaded == [f"/there/vllm/{name}.abi3.so"]


def test_illegal_calls_do_not_reach_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: Any) -> Any:
        raise AssertionError("the operator was reached")

    monkeypatch.setattr(vllm_cpu, "operators", reached)
    monkeypatch.setattr(ggml, "_function", reached)
    x = Case.parse(RIGHT["vllm_cpu/chunk"]).inputs()
    for change, words in (
        ({"state": x.state[:1]}, "state must have N = 2"),
        ({"cu_seqlens": torch.tensor([0, 9, 8], dtype=torch.int32)}, "cu_seqlens"),
    ):
        for adapter in (vllm_cpu.Chunk(), ggml.GatedDeltaNet()):
            with pytest.raises(ValueError, match=words if isinstance(adapter, vllm_cpu.Chunk) else "cu_seqlens|state must"):
                adapter.run(x.replaced(**change))
    with pytest.raises(ValueError, match="ggml's operators take no cu_seqlens"):
        ggml.GatedDeltaNet().run(x)
    with pytest.raises(AssertionError, match="the operator was reached"):
        vllm_cpu.Chunk().run(x)


@pytest.mark.parametrize("spec", SPECS)
def test_a_missing_package_is_named_with_the_command(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(loader, "installed", lambda name: None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    with pytest.raises(AdapterError, match=r"needs .*, which is not installed: pip install \S+$"):
        load(spec)


def test_a_processor_that_vllm_does_not_use_for_convolutions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    for spec in ("vllm_cpu/conv", "vllm_cpu/conv_update"):
        with pytest.raises(AdapterError, match=r"Conv\w* of vllm-cpu needs a processor with AVX-512 BF16"):
            load(spec)


def test_a_call_is_legal_without_what_its_domain_leaves_out() -> None:
    x = Inputs(a=torch.rand(1, 3, 2), A_log=torch.rand(2), dt_bias=None, b=None, allow_neg_eigval=False, cu_seqlens=None)
    contract.check_legal(ModuleDomain("gdn_gate", beta=False), x)
    with pytest.raises(ValueError, match=r"A_log must have HV = 2 like a, got shape \(1,\)"):
        contract.check_legal(ModuleDomain("gdn_gate", beta=False), x.replaced(A_log=x.A_log[:1]))


def test_a_cut_leaves_no_sequence_without_tokens_where_none_is_allowed() -> None:
    law = MODULE_LAWS["cut"]
    for domain, most in ((ModuleDomain(batched=False, empty=False), 1), (ModuleDomain(batched=False), 2)):
        examples = sample(law.draw(domain), 3, 200)
        assert max(len(example.case.lengths) for example in examples) == most
        assert all(law.within(domain).outside(example.case) is None for example in examples)
    two = Run.parse(f"law=cut at=1 adapter=vllm_cpu/conv lengths=2+1 packed=yes {VLLM_CONV}").example
    assert law.outside is not None
    assert law.outside(ModuleDomain(empty=False), two) == "lengths=2+1: cut at 1, a sequence would have no tokens left"
    assert law.outside(ModuleDomain(), two) is None
