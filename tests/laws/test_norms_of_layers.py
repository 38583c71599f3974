"""The eps and form of the L2 norm of q and k in layers, on paths and in serving engines: drawn, refused and judged."""

import functools
import itertools
from typing import Any

import pytest

from properties.books import book_of
from properties.layers.case import LayerCase
from properties.layers.domain import LayerDomain
from properties.palette import sample
from properties.paths.case import ParallelCase
from properties.paths.domain import PathDomain
from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from properties.words.example import Example
from tests import right_norms
from tests.drawn import verdicts_of
from tests.random_domains import faults
from tests.together import for_each
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict

NORMS = {*itertools.product(("1e-6", "1e-12", "1e-5"), ("inside", "max"))}
RIGHT = {
    right_norms.AsToldLayer: "oracle",
    right_norms.TinyEpsLayer: "oracle",
    right_norms.AsToldKdaLayer: "oracle",
    right_norms.AsToldPath: "parallel",
    right_norms.AsToldEngine: "session",
}
WRONG = {
    right_norms.ForgetsFormOfLayer: "oracle",
    right_norms.ForgetsEpsOfLayer: "oracle",
    right_norms.ForgetsFormOfKdaLayer: "oracle",
    right_norms.ForgetsEpsOfPath: "parallel",
    right_norms.ForgetsFormOfEngine: "session",
}
LINES = {
    LayerCase: "op=gdn_layer lengths=9 key_dim=16 values=small",
    ParallelCase: "lengths=16 cp=2 heads=2 value_heads=4 values=small qk_norm=in_kernel",
    TraceCase: "op=serving trace=p:a5,b3/d:a,b values=small",
}
KINDS = {LayerDomain: LayerCase, PathDomain: ParallelCase, TraceDomain: TraceCase}


# Of cases whose q and k are near eps.
verdicts = functools.partial(verdicts_of, accept=lambda example: example.case.values == "small", seed=4)


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.slow_after_first
def test_a_right_norm_holds(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(kind(), RIGHT[kind], kind.domain, 4, monkeypatch)
    assert {*found} <= {Verdict.HOLDS, Verdict.BLIND}
    assert Verdict.HOLDS in found


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.slow_after_first
def test_a_wrong_norm_is_detected(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(kind(), WRONG[kind], kind.domain, 12, monkeypatch)[-1] is Verdict.BROKEN


@for_each(("case", "norm"), list(itertools.product(LINES, sorted(NORMS))))
def test_each_norm_is_right_in_its_own_line_alone(case: Any, norm: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    kind, law = {
        LayerCase: (right_norms.AsToldLayer, "oracle"),
        ParallelCase: (right_norms.AsToldPath, "parallel"),
        TraceCase: (right_norms.AsToldEngine, "session"),
    }[case]

    def verdict(adapter: Any) -> Verdict:
        monkeypatch.setitem(judging._LOADED, "it", adapter)
        line = f"{LINES[case]} qk_norm_eps={norm[0]} qk_norm_form={norm[1]}"
        return execute(Run(law, "it", Example(case.parse(line)))).verdict

    assert verdict(kind()) is Verdict.HOLDS
    others = {
        other: verdict(right_norms.always(kind, float(other[0]), other[1])())
        for other in NORMS - {norm}
        if case is LayerCase or other == ("1e-12", "inside")
    }
    assert {*others.values()} <= {Verdict.BROKEN}, others


@for_each("kind", RIGHT)
def test_what_is_drawn(kind: Any) -> None:
    domain, law = kind.domain, RIGHT[kind]
    drawn = [example.case for example in sample(book_of(domain).laws[law].draw(domain), 5, 80)]
    had = {*itertools.product(domain.qk_norm_eps, domain.qk_norm_forms)}
    assert {(case.qk_norm_eps, case.qk_norm_form) for case in drawn} == had
    assert {"small", "ordinary"} <= {case.values for case in drawn}
    if hasattr(drawn[0], "backward"):
        half = [case for case in drawn if case.dtype == "fp16" and (case.qk_norm_form, case.qk_norm_eps) != ("inside", "1e-5")]
        assert not any(case.backward for case in half if case.qk_norm_form == "max" or case.qk_norm_eps == "1e-12")
        assert any(case.backward for case in drawn)
    assert faults(domain, 3) == {}


@for_each(
    ("line", "message"),
    [
        ("op=gdn_layer lengths=3 qk_norm_eps=1e-7", "qk_norm_eps must be one of 1e-6, 1e-12, 1e-5, got '1e-7'"),
        ("op=kda_layer lengths=3 qk_norm_form=sum", "qk_norm_form must be one of inside, max, got 'sum'"),
        ("op=gdn_layer lengths=3 dtype=fp16 qk_norm_form=max", "needs backward=no or another dtype than fp16"),
        ("lengths=4 op=kda qk_norm_eps=1e-12", "needs op=gdn_layer, or a rule with qk_norm=in_kernel"),
        ("lengths=4 op=causal_conv1d qk_norm=in_kernel qk_norm_form=max", "needs op=gdn_layer, or a rule with qk_norm=in_kernel"),
        ("op=serving trace=p:a1 qk_norm_eps=1e-7", "qk_norm_eps must be one of 1e-6, 1e-12, 1e-5, got '1e-7'"),
        ("op=serving trace=p:a1 values=great", "values must be one of ordinary, small, got 'great'"),
    ],
)
def test_what_a_line_cannot_say(line: str, message: str) -> None:
    kind = TraceCase if "serving" in line else LayerCase if "_layer" in line else ParallelCase
    with pytest.raises(ValueError, match=message):
        kind.parse(line)


@for_each(
    ("kind", "words", "message"),
    [
        (LayerDomain, {"qk_norm_eps": ("1e-7",)}, "qk_norm_eps must be a tuple of some of 1e-6, 1e-12, 1e-5"),
        (
            LayerDomain,
            {"dtypes": ("fp16",), "qk_norm_forms": ("max",)},
            "backward must be False for fp16 alone with qk_norm_eps 1e-6 and qk_norm_forms max",
        ),
        (PathDomain, {"dtypes": ("fp16",), "qk_norm_eps": ("1e-12",)}, "backward must be False for fp16 alone"),
        (TraceDomain, {"qk_norm_forms": ()}, "qk_norm_forms must be a tuple of some of inside, max"),
        (PathDomain, {"qk_norm_forms": ("sum",)}, "qk_norm_forms must be a tuple of some of inside, max"),
        (
            PathDomain,
            {"operation": "causal_conv1d", "layouts": ("contiguous",), "qk_norm_eps": ("1e-12",)},
            "qk_norm_eps and qk_norm_forms must be left out for causal_conv1d",
        ),
        (
            PathDomain,
            {"operation": "kda", "choices": (("qk_norm", ("separate",)),), "qk_norm_forms": ("max",)},
            "qk_norm_eps and qk_norm_forms must be left out for kda unless qk_norm=in_kernel is among its choices",
        ),
    ],
)
def test_what_a_domain_cannot_be(kind: Any, words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**words)


@for_each("kind", KINDS)
def test_what_is_outside(kind: Any) -> None:
    case = KINDS[kind].parse(f"{LINES[KINDS[kind]]} qk_norm_eps=1e-12 qk_norm_form=max")
    assert kind().outside(case) == "qk_norm_eps=1e-12 is not among 1e-6"
    assert kind(qk_norm_eps=("1e-12",)).outside(case) == "qk_norm_form=max is not among inside"
    assert kind(qk_norm_eps=("1e-12",), qk_norm_forms=("max",)).outside(case) is None


def test_a_rule_on_a_path_has_the_norm_of_its_kernel() -> None:
    domain = PathDomain(operation="kda", layouts=("contiguous",), qk_norm_eps=("1e-12",))
    drawn = [example.case for example in sample(book_of(domain).laws["parallel"].draw(domain), 5, 40)]
    assert {(case.qk_norm == "in_kernel", case.qk_norm_eps) for case in drawn} == {(True, "1e-12"), (False, "1e-6")}
    case = next(case for case in drawn if case.qk_norm == "in_kernel")
    assert case.inputs().qk_norm_eps == 1e-12
