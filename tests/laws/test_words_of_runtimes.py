"""Words that describe other runtimes: each is drawn, refused, and judged with a right and a wrong implementation of its own."""

import dataclasses
import functools
from typing import Any

import pytest

from properties.books import book_of
from properties.layers.domain import LayerDomain
from properties.modules.case import ModuleCase
from properties.modules.domain import ModuleDomain
from properties.palette import sample
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.example import Example
from tests import right_words
from tests.drawn import verdicts_of
from tests.random_domains import faults, laws_of
from tests.right import Recurrent
from tests.together import for_each
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict

RIGHT = [
    right_words.RefusesNothing,
    right_words.ConvRefusesNothing,
    right_words.NeighboursLast,
    right_words.OnlyTransposed,
    right_words.MixedParameters,
    right_words.MixedLayer,
    right_words.MixedGate,
    right_words.MixedPool,
    right_words.DoublesGiven,
    right_words.DoublesGivenPool,
    right_words.OneToken,
]
WITHOUT_GIVEN = Domain(in_kernel=("none", "beta"), negative_eigenvalues=False)
INPUTS = Domain(in_kernel=("gate", "both"), parameter_dtypes=("input",))


verdicts = functools.partial(verdicts_of, accept=lambda example: example.case.tokens <= 60, seed=5)  # of small cases


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.slow_after_first
def test_a_right_implementation_holds_under_every_law(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        law.name: verdicts(kind(), law.name, kind.domain, 2, monkeypatch)
        for law in laws_of(kind.domain)
        if law.name not in ("recompute",)
    }
    assert {verdict for those in found.values() for verdict in those} <= {Verdict.HOLDS, Verdict.BLIND}, found
    assert sum(Verdict.HOLDS in those for those in found.values()) > len(found) / 2
    assert faults(kind.domain, 3) == {}


@pytest.mark.parametrize(
    ("wrong", "law", "blind"),
    [
        (right_words.LosesEmptyStates, "oracle", Domain(empty=False)),
        (right_words.IgnoresStrides, "strides", Domain(views=("offset",))),
        (right_words.ReadsFloats, "oracle", LayerDomain(parameter_dtypes=("mixed",), dtypes=("fp32",))),
        (right_words.RoundsALogOfGate, "oracle", ModuleDomain("gdn_gate", parameter_dtypes=("mixed",), dtypes=("fp32",))),
        (right_words.RoundsALog, "oracle", dataclasses.replace(right_words.RoundsALog.domain, dtypes=("fp32",))),
        (right_words.RoundsTheGradient, "oracle", dataclasses.replace(right_words.RoundsALog.domain, dtypes=("fp32",))),
        (
            right_words.RoundsALogOfPool,
            "oracle",
            PoolDomain(rule=dataclasses.replace(right_words.MixedPool.domain.rule, dtypes=("fp32",))),
        ),
        (right_words.ClampsBeta, "oracle", WITHOUT_GIVEN),
        (right_words.DecaysAfterwards, "oracle", Domain(longest=1, strongest_decay="1000", infinite_gates=False)),
    ],
)
@pytest.mark.slow_after_first
def test_a_wrong_implementation_is_detected_with_the_word(
    wrong: Any, law: str, blind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdicts(wrong(), law, wrong.domain, 60, monkeypatch)[-1] is Verdict.BROKEN
    if wrong is not right_words.DecaysAfterwards:
        assert Verdict.BROKEN not in verdicts(wrong(), law, blind, 12, monkeypatch), "another domain does not show it"


@pytest.mark.parametrize(
    ("kind", "law", "other"),
    [
        (right_words.RefusesNothing, "oracle", Domain()),
        (right_words.NeighboursLast, "strides", Domain()),
        (right_words.OnlyTransposed, "strides", Domain(views=("sliced",))),
        (right_words.MixedParameters, "oracle", INPUTS),
        (right_words.DoublesGiven, "oracle", Domain(in_kernel=("none", "beta"))),
        (right_words.OneToken, "oracle", Domain(longest=64)),
    ],
)
@pytest.mark.slow_after_first
def test_without_the_word_a_right_implementation_is_broken(
    kind: Any, law: str, other: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdicts(kind(), law, other, 200, monkeypatch)[-1] is Verdict.BROKEN


def drawn(domain: Any, law: str, count: int) -> list[Example]:
    return sample(book_of(domain).laws[law].draw(domain), 5, count)


def test_calls_without_tokens_are_not_drawn_and_empty_sequences_are() -> None:
    for domain in (Domain(nothing=False), Domain(nothing=False, length_step=16), ModuleDomain(nothing=False)):
        cases = [example.case for example in drawn(domain, "oracle", 300)]
        assert all(case.tokens > 0 for case in cases)
        assert any(0 in case.lengths for case in cases)
        without = dataclasses.replace(domain, nothing=True)
        assert any(not example.case.tokens for example in drawn(without, "oracle", 300))


def test_the_views_of_a_domain_are_drawn_and_no_others() -> None:
    domain = Domain(views=("sliced", "offset"))
    variants = {example.variant for example in drawn(domain, "strides", 80)}
    assert variants == {"sliced", "offset", "far_tokens", "far_sequences"}
    assert {example.variant for example in drawn(Domain(views=("transposed",)), "strides", 30)} == {"transposed"}
    assert "far_heads" in {example.variant for example in drawn(Domain(views=("strided",)), "strides", 60)}


def test_a_beta_over_1_is_drawn_where_it_is_given() -> None:
    for domain, cases in (
        (right_words.DoublesGiven.domain, [example.case for example in drawn(right_words.DoublesGiven.domain, "oracle", 200)]),
        (right_words.DoublesGivenPool.domain, [x.case for x in drawn(right_words.DoublesGivenPool.domain, "oracle", 200)]),
    ):
        assert {case.in_kernel for case in cases if case.beta == "two"} == {"none"}, domain
        assert {case.in_kernel for case in cases} == {"none", "beta"}


def test_mixed_parameters_have_two_dtypes() -> None:
    for line, kind in (
        ("lengths=3 dtype=bf16 in_kernel=gate parameter_dtype=mixed", Case),
        ("op=gdn_gate lengths=3 dtype=bf16 parameter_dtype=mixed", ModuleCase),
        ("op=decode lengths=2 dtype=bf16 in_kernel=both parameter_dtype=mixed", PoolCase),
    ):
        x = kind.parse(line).inputs()  # type: ignore[attr-defined]
        assert [str(x[name].dtype) for name in ("A_log", "dt_bias")] == ["torch.float32", "torch.bfloat16"]


@for_each(
    ("words", "message"),
    [
        ({"views": ()}, r"a tuple of some of sliced, transposed, offset, expanded, strided, mixed, indices, got \(\)"),
        ({"views": ("fused",)}, "views must be True, False or a tuple of some of sliced"),
        ({"views": "sliced"}, "views must be True, False or a tuple of some of sliced"),
        ({"negative_eigenvalues": ("kernel",)}, r"negative_eigenvalues must be True, False or \('given',\), got \('kernel',\)"),
        (
            {"negative_eigenvalues": ("given",), "in_kernel": ("both",)},
            "negative_eigenvalues must be True or False without a beta that is given",
        ),
        ({"parameter_dtypes": ("half",)}, "parameter_dtypes must be a tuple of some of fp32, input, mixed"),
        ({"longest": 2}, "longest must be None, 1 or at least 64, got 2"),
        ({"longest": 1, "length_step": 16}, "longest must be None or at least 64 and a multiple of length_step=16, got 1"),
        ({"longest": True}, "longest must be None, 1 or at least 64, got True"),
        ({"nothing": "no"}, "nothing must be True or False, got 'no'"),
    ],
)
def test_what_a_domain_cannot_be(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Domain(**words)


def test_the_rule_of_a_pool_has_no_views_of_its_own() -> None:
    with pytest.raises(ValueError, match="views of rule must be True or False, because a PoolDomain has views itself"):
        PoolDomain(rule=Domain(views=("sliced",), backward=False))


def test_what_is_outside() -> None:
    assert Domain(nothing=False).outside(Case((0, 0))) == "a call without tokens is not supported"
    assert Domain(nothing=False).outside(Case((0, 1), packed=True)) is None
    assert ModuleDomain(nothing=False).outside(ModuleCase((0,), "causal_conv1d")) == "a call without tokens is not supported"
    domain = right_words.DoublesGiven.domain
    assert domain.outside(Case((3,), beta="two")) is None
    reason = "beta=two: beta over 1 is not supported, but where it is given"
    assert domain.outside(Case((3,), beta="two", in_kernel="beta")) == reason
    assert Domain(longest=1).outside(Case((2,))) == "lengths=2: sequences of more than 1 tokens are not supported"
    laws = book_of(Domain()).laws
    for law in ("cut", "recurrent", "future"):
        assert laws[law].needs(Domain(longest=1)) == "longest=1: no sequence has two tokens"
    far = Example(Case((3,)), None, "far_heads")
    assert laws["strides"].outside(Domain(views=("sliced",)), far) == "far_heads inputs are not among sliced"
    assert laws["strides"].needs(Domain(views=False)) == "views is not supported"


def test_tensors_that_a_domain_does_not_take_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict[str, set[bool]]()

    class Watches(Recurrent):
        def run(self, x: Any) -> Any:
            for value in right_words.tensors(x).values():
                seen.setdefault("dense", set()).add(value.is_contiguous())
                seen.setdefault("aligned", set()).add(value.data_ptr() % 16 == 0)
            return super().run(x)

    adapter = Watches()
    run = Run("recurrent", "it", Example(Case((4,), key_dim=3, value_dim=5, backward=False), 2))
    for views, aligned in ((("transposed",), {True}), (("offset",), {True, False})):
        adapter.domain = Domain(views=views)
        monkeypatch.setitem(judging._LOADED, "it", adapter)
        seen.clear()
        assert execute(run).verdict is Verdict.HOLDS
        assert seen == {"dense": {True}, "aligned": aligned}
