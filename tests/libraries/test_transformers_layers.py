"""Layers of transformers: every model's adapter leads to the model's own code, is right, and a wrong layer is found."""

import dataclasses
import functools
import importlib
import inspect
import types
from typing import Any
from unittest import mock

import pytest
import torch

from oracles.tolerance.bound import truth
from properties.layers.case import LayerCase
from tests import needs
from tests import wrong_transformers_layers as wrong
from tests.kills import Fewer, small_ones
from tests.together import for_each
from verify.adapters import transformers_layer
from verify.adapters.interface import Unavailable
from verify.adapters.loader import load
from verify.adapters.registry import LAYERS, AdapterError
from verify.adapters.transformers_layer import ModelLayer
from verify.engine.check import Check
from verify.engine.state import Settings
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings import known
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker

GDN = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini")
KDA = ("kimi_linear", "glm5_next", "bailing_hybrid")
PROMPT = "lengths=5+5 heads=2 value_heads=2 hidden=12 eps=1e-5 cached=yes backward=no"


def adapter_of(model: str) -> ModelLayer:
    """The adapter of a model's layer. Skips the test if the installed transformers lacks the model."""
    needs.need("transformers")
    try:
        adapter = load(f"transformers/{model}_layer")
    except AdapterError as error:
        pytest.skip(str(error))
    assert isinstance(adapter, ModelLayer)
    return adapter


def module_of(model: str) -> types.ModuleType:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def test_every_adapter_of_a_layer_is_tested_here() -> None:
    names = {f"transformers/{model}_layer" for model in (*GDN, *KDA)} | {f"transformers/{model}_packed" for model in KDA}
    assert {name for name in LAYERS if name.startswith("transformers/")} == names


@pytest.mark.parametrize("model", [*GDN, *KDA])
@pytest.mark.slow_after_first
def test_layer_is_its_own_functions_of_torch_and_the_layer_of_the_oracle(model: str) -> None:
    adapter = adapter_of(model)
    line = f"op={adapter.domain.operation} {PROMPT} state=random"
    case, module = LayerCase.parse(line), module_of(model)
    called: list[str] = []

    def watched(name: str, function: Any) -> Any:
        return functools.wraps(function)(lambda *arguments, **named: (called.append(name), function(*arguments, **named))[1])

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was called")

    wrappers = {name: getattr(module, name) for name in adapter.kernels}
    doubles = {name: mock.Mock(side_effect=forbidden) for name in adapter.kernels}
    for name, double in doubles.items():
        double.__wrapped__ = watched(name, inspect.unwrap(wrappers[name]))
        del double.__wrapped__.__wrapped__
    with mock.patch.multiple(module, **doubles):
        y, state, conv_state = adapter.run(case.inputs())
        assert {name: getattr(module, name) for name in adapter.kernels} == doubles, "the names are as they were"
    assert called == ["causal_conv1d_fn", *(name for name in adapter.kernels if "chunk" in name)]
    want = truth(case.spec, case.inputs())
    assert state is not None
    assert conv_state is not None
    torch.testing.assert_close(y.double(), want["y"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), want["final_state"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(conv_state.double(), want["conv_state"], rtol=1e-4, atol=1e-5)


def small(case: LayerCase) -> bool:
    """Whether a case has at most two chunks of 64 a sequence, and few heads and numbers."""
    return max(case.lengths) <= 70 and case.tokens <= 130 and case.tokens * case.value_heads * case.key_dim <= 2**14


@pytest.mark.parametrize("model", [*GDN, *KDA])
@pytest.mark.slow
def test_layer_holds_under_every_law_about_it(model: str, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    adapter_of(model)
    store = Store(tmp_path_factory.mktemp("findings"))
    settings = Settings(f"transformers/{model}_layer", profile=Fewer("few", 2, large=False), seed=7)
    with small_ones(small), Check(settings, [worker], store) as check:
        reports = check.run()
    assert {report.law: report.run or report.reason for report in reports if report.verdict is Verdict.BROKEN} == {}
    assert {report.law for report in reports if report.verdict is Verdict.UNSUPPORTED} == {"packed"}
    assert {report.law for report in reports if report.verdict is Verdict.UNKNOWN} <= {"cache"}, "which may be blind"


LATE, FORGETS = f"law=oracle op={{}} {PROMPT}", f"law=oracle op={{}} {PROMPT} state=random"
WRONG = {
    wrong.Qwen3NextDecaysLate: LATE,
    wrong.Qwen3NextForgetsConvState: FORGETS,
    wrong.OlmoHybridDecaysLate: LATE,
    wrong.OlmoHybridForgetsConvState: FORGETS,
    wrong.ProjectionsSwapped: LATE,
    wrong.KimiLinearDecaysLate: LATE,
    wrong.KimiLinearForgetsConvState: FORGETS,
    wrong.BailingHybridDecaysLate: LATE,
    wrong.BailingHybridForgetsConvState: FORGETS,
    wrong.ForgetsGateBias: LATE,
    wrong.ForgetsLowerBound: f"{LATE} lower_bound=-5",
}


@for_each("kind", WRONG)
def test_wrong_layer_is_broken_where_the_released_one_holds(kind: type[ModelLayer]) -> None:
    needs.need("transformers")
    line = WRONG[kind].format(kind.domain.operation)
    verdicts = [
        execute(Run.parse(f"{line} adapter={spec}")).verdict
        for spec in (f"{wrong.__file__}:{kind.__name__}", f"transformers/{kind.model}_layer")
    ]
    assert verdicts == [Verdict.BROKEN, Verdict.HOLDS]


@pytest.mark.parametrize("model", KDA)
def test_packed_sequences_run_into_each_other_in_kda_layers_and_the_defect_is_known(model: str) -> None:
    adapter_of(model)
    spec = f"transformers/{model}_packed"
    (defect,) = (defect for defect in known.load() if defect.run.adapter == spec)
    outcome = execute(defect.run)
    assert outcome.verdict is Verdict.BROKEN
    assert {finding.output for finding in outcome.findings} == {"y"}
    assert defect.explains(defect.run, outcome.findings) or defect.outdated()
    one = Run.parse(f"law=oracle adapter={spec} op=kda_layer lengths=3 packed=yes")
    assert execute(one).verdict is Verdict.HOLDS
    case = LayerCase((1, 1), "kda_layer", packed=True, seed=3)
    apart = load(spec).run(case.inputs())[0]
    joined = load(spec).run(dataclasses.replace(case, lengths=(2,)).inputs())[0]
    assert torch.equal(apart, joined), "bit for bit what one sequence gives"


def test_a_model_that_the_release_lacks_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    needs.need("transformers")
    monkeypatch.setattr(transformers_layer, "source", lambda _: None)
    with pytest.raises(AdapterError, match=r"^adapter transformers/qwen3_5_layer: transformers \S+ has no model qwen3_5: pip"):
        load("transformers/qwen3_5_layer")


def test_parameters_and_configurations_are_found_by_name() -> None:
    module = torch.nn.ModuleDict({"o_proj": torch.nn.Linear(2, 3, bias=False)})
    weight = torch.zeros(3, 2)
    assert transformers_layer._chosen(module, {"o_proj.weight": weight, "out_proj.weight": weight}) == {"o_proj.weight": weight}
    with pytest.raises(Unavailable, match=r"^ModuleDict has parameters that the adapter does not know: o_proj\.weight$"):
        transformers_layer._chosen(module, {"out_proj.weight": weight})
    needs.need("transformers")
    with pytest.raises(Unavailable, match=r"^no configuration of qwen3_next has the fields colour$"):
        transformers_layer._config_with("qwen3_next", {"colour": 1}, {})


@pytest.mark.parametrize("name", ["cache", "cache_params"])
def test_the_cache_is_passed_by_the_name_that_forward_has(name: str) -> None:
    class Renamed(torch.nn.Module):
        pass

    parameters = [inspect.Parameter(word, inspect.Parameter.POSITIONAL_OR_KEYWORD) for word in ("hidden_states", name)]
    module = Renamed()
    module.forward = mock.Mock(__signature__=inspect.Signature(parameters))
    assert transformers_layer._cache_name(module) == name
