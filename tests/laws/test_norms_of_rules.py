"""The eps and form of the L2 norm of q and k: their words are drawn, refused, judged and shrunk.

tests/formulas/test_oracles_norm.py shows that the norms and their gradients are right.
"""

import dataclasses
import itertools
from typing import Any

import pytest

from properties.palette import draw_palette, sample
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain, pool_cases
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from properties.rules.laws import LAWS
from properties.words.example import Example
from tests import right_norms
from tests.right_norms import RIGHT, AsTold, AsToldPool, LargeEpsPool, TinyEps
from tests.together import for_each
from verify.adapters.base import Adapter
from verify.engine import would_hold
from verify.engine.asking import Described
from verify.engine.shrink import shrink
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Outcome, Verdict
from verify.zoo.base import Serving

SEVERAL = AsTold.domain


def verdicts(adapter: Adapter, law: str, domain: Domain, count: int, patch: pytest.MonkeyPatch, **words: Any) -> list[Verdict]:
    """The verdicts of short cases with the norm, drawn in a domain, until one is broken."""
    adapter.domain = domain
    patch.setitem(judging._LOADED, "it", adapter)
    drawn = sample(cases(domain, qk_norm=True, longest=20, total=40, value_heads=2, **words).map(Example), 4, count)
    found: list[Verdict] = []
    for example in drawn:
        found.append(execute(Run(law, "it", example)).verdict)
        if found[-1] is Verdict.BROKEN:
            break
    return found


@pytest.mark.parametrize("kind", [*RIGHT, AsTold])
@pytest.mark.slow_after_first
@for_each("law", ["oracle", "norm"])
def test_a_right_norm_holds(kind: type[Adapter], law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(kind(), law, kind.domain, 8, monkeypatch, values=("small", "zero_rows", "ordinary"))
    assert {*found} <= {Verdict.HOLDS, Verdict.BLIND}
    assert Verdict.HOLDS in found


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.slow
@for_each("law", ["oracle", "norm"])
@for_each("other", RIGHT)
def test_under_another_convention_it_is_broken(
    kind: type[Adapter], other: type[Adapter], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = verdicts(kind(), law, other.domain, 8, monkeypatch, values="small")
    assert (found[-1] is Verdict.BROKEN) == (kind is not other)


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (right_norms.AddsEps, "oracle"),
        (right_norms.AddsEps, "norm"),
        (right_norms.AcrossShortRows, "oracle"),
        (right_norms.EpsTimesWidth, "oracle"),
        (right_norms.ForgetsForm, "oracle"),
        (right_norms.ForgetsForm, "norm"),
    ],
)
@pytest.mark.slow_after_first
def test_a_wrong_norm_is_detected(wrong: type[Adapter], law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(wrong(), law, wrong.domain, 20, monkeypatch, values="small")[-1] is Verdict.BROKEN


@pytest.mark.parametrize("kind", [LargeEpsPool, AsToldPool])
@pytest.mark.slow_after_first
def test_a_right_norm_holds_on_a_pool_and_is_broken_under_another_convention(
    kind: type[Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(kind.domain, rule=Domain(backward=False))
    adapter, found = kind(), dict[str, list[Outcome]]()
    monkeypatch.setitem(judging._LOADED, "it", adapter)
    for name, domain in (("right", kind.domain), ("other", other)):
        adapter.domain = domain
        drawn = sample(pool_cases(domain, most=8, qk_norm=True, values=("small", "zero_rows")).map(Example), 4, 10)
        found[name] = [execute(Run("oracle", "it", example)) for example in drawn]
        assert all(domain.outside(example.case) is None for example in drawn)
    assert {outcome.verdict for outcome in found["right"]} <= {Verdict.HOLDS, Verdict.BLIND}
    assert (Verdict.BROKEN in {outcome.verdict for outcome in found["other"]}) is (kind is LargeEpsPool), "AsTold is told 1e-6"


def test_a_pool_of_another_convention_is_judged_by_a_declared_one(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = LargeEpsPool()
    adapter.domain = PoolDomain(rule=Domain(backward=False))
    monkeypatch.setitem(judging._LOADED, "it", adapter)
    case = "op=decode lengths=2+2 key_dim=4 value_dim=4 values=small state=random qk_norm=yes seed=2"
    run = Run("oracle", "it", Example(PoolCase.parse(case)))
    assert execute(run).verdict is Verdict.BROKEN
    assert execute(run, declared={"qk_norm_eps": "1e-5", "qk_norm_form": "inside"}).verdict is Verdict.HOLDS
    assert execute(run, declared={"qk_norm_eps": "1e-6", "qk_norm_form": "max"}).verdict is Verdict.BROKEN
    says = Described("it", adapter.domain, "recurrent", "none 1.0")
    assert "qk_norm_eps = ('1e-5',) in its domain" in {way.words for way in would_hold._ways(says, [run])}


def test_what_is_drawn() -> None:
    drawn = [example.case for example in sample(LAWS["oracle"].draw(SEVERAL), 5, 300)]
    assert {(case.qk_norm_eps, case.qk_norm_form) for case in drawn if case.qk_norm} == {
        *itertools.product(("1e-6", "1e-12", "1e-5"), ("inside", "max"))
    }
    assert {(case.qk_norm_eps, case.qk_norm_form) for case in drawn if not case.qk_norm} == {("1e-6", "inside")}
    short = [case for case in drawn if case.dtype == "fp16" and case.qk_norm_form == "max"]
    assert short
    assert not any(case.backward for case in short), "gradients of a row of zeros would overflow"
    assert any(case.backward for case in drawn if case.dtype == "fp16" and case.qk_norm_eps == "1e-5" and case not in short)
    x = Case.parse("lengths=3 qk_norm=yes qk_norm_eps=1e-12 qk_norm_form=max").inputs()
    assert (x.qk_norm_eps, x.qk_norm_form) == (1e-12, "max")
    for law in LAWS.values():
        for example in sample(law.draw(TinyEps.domain), 3, 4) if law.needs(TinyEps.domain) is None else ():
            assert TinyEps.domain.outside(example.case) is None, (law.name, example)


@for_each("words", list(itertools.product(("1e-6", "1e-12", "1e-5"), ("inside", "max"))))
def test_small_rows_are_near_the_length_where_eps_matters(words: tuple[str, str]) -> None:
    eps, form = words
    case = Case((50,), key_dim=24, values="small", qk_norm=True, qk_norm_eps=eps, qk_norm_form=form)
    root = float(eps) if form == "max" else float(eps) ** 0.5
    norms = case.inputs().k.norm(dim=-1) / root
    least = 0.06 if words == ("1e-6", "inside") else 0.25
    assert float(norms.min()) >= least
    assert float(norms.max()) <= 1.0


def test_lines_of_earlier_versions_mean_the_same() -> None:
    line = "lengths=5 dtype=bf16 qk_norm=yes seed=3"
    case = Case.parse(line)
    assert str(case) == line
    assert (case.qk_norm_eps, case.qk_norm_form) == ("1e-6", "inside")


@for_each(
    ("line", "message"),
    [
        ("qk_norm_eps=1e-12", "qk_norm_eps=1e-12 qk_norm_form=inside needs qk_norm=yes"),
        ("qk_norm_form=max", "qk_norm_eps=1e-6 qk_norm_form=max needs qk_norm=yes"),
        ("qk_norm=yes qk_norm_eps=1e-7", "qk_norm_eps must be one of 1e-6, 1e-12, 1e-5, got '1e-7'"),
        ("qk_norm=yes qk_norm_form=sum", "qk_norm_form must be one of inside, max, got 'sum'"),
        ("qk_norm=yes qk_norm_form=max dtype=fp16", "needs backward=no or another dtype than fp16"),
    ],
)
def test_what_a_line_cannot_say(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case.parse(f"lengths=3 {line}")


@for_each(
    ("words", "message"),
    [
        ({"qk_norm_eps": ("1e-7",)}, "qk_norm_eps must be a tuple of some of 1e-6, 1e-12, 1e-5"),
        ({"qk_norm_forms": ()}, "qk_norm_forms must be a tuple of some of inside, max"),
        ({"qk_norm_forms": ("max",), "qk_norm": False}, "qk_norm_eps and qk_norm_forms must be left out with qk_norm=False"),
    ],
)
def test_what_a_domain_cannot_be(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Domain(**words)


def test_what_is_outside() -> None:
    assert TinyEps.domain.outside(Case((3,))) is None
    assert TinyEps.domain.outside(Case((3,), qk_norm=True)) == "qk_norm_eps=1e-6 is not among 1e-12"
    case = Case((3,), qk_norm=True, qk_norm_eps="1e-12", qk_norm_form="max")
    assert TinyEps.domain.outside(case) == "qk_norm_form=max is not among inside"


@for_each(
    ("domain", "needs", "smallest"),
    [
        (SEVERAL, lambda case: True, "lengths=0 key_dim=1 value_dim=1 backward=no"),
        (SEVERAL, lambda case: case.qk_norm, "lengths=0 key_dim=1 value_dim=1 qk_norm=yes backward=no"),
        (
            SEVERAL,
            lambda case: case.qk_norm_form == "max",
            "lengths=0 key_dim=1 value_dim=1 qk_norm=yes qk_norm_form=max backward=no",
        ),
        (TinyEps.domain, lambda case: True, "lengths=0 key_dim=1 value_dim=1 backward=no"),
        (TinyEps.domain, lambda case: case.qk_norm, "lengths=0 key_dim=1 value_dim=1 qk_norm=yes qk_norm_eps=1e-12 backward=no"),
    ],
)
def test_cases_shrink_to_the_usual_norm_or_to_none(domain: Domain, needs: Any, smallest: str) -> None:
    form = "max" if "max" in domain.qk_norm_forms else "inside"
    start = Case((33,), key_dim=40, qk_norm=True, qk_norm_eps="1e-12", qk_norm_form=form, values="small")
    found = shrink(Example(start), LAWS["oracle"], lambda example: needs(example.case), lambda runs: runs < 200, domain=domain)
    assert found.finished
    assert str(found.example.case) == smallest


def test_the_call_must_name_a_norm() -> None:
    case = Case((3,), qk_norm=True)
    for words, message in (
        ({"qk_norm_eps": 0.0}, "qk_norm_eps must be a finite number above 0, got 0.0"),
        ({"qk_norm_form": "mean"}, "qk_norm_form must be one of inside, max, got 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            case.spec.check(dataclasses.replace(case).inputs().replaced(**words))


@pytest.mark.slow
def test_palettes_have_norms_of_the_domain_and_suit_the_law_about_them() -> None:
    for domain in (SEVERAL, TinyEps.domain, Domain(dtypes=("fp16",), qk_norm_eps=("1e-12",))):
        drawn = draw_palette(domain, 1, 12, ["oracle", "norm"])
        examples = sample(drawn.examples(LAWS["norm"], domain), 5, 20)
        assert len(examples) == 20
        assert all(domain.outside(example.case) is None for example in examples)
