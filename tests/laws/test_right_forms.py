"""No false alarm: right implementations in conventions of their own hold, with the declarations that the documentation leads to.

A few cases here; benchmarks/soundness.py asks hundreds of each.
"""

from typing import Any

import pytest

from properties.palette import sample
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import STRENGTHS, Domain
from properties.rules.laws import LAWS
from properties.words.example import Example
from tests import right, right_forms
from tests.together import for_each
from verify.adapters.base import Adapter
from verify.bench import adapter_bench as bench
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict

FORMS = {
    name: kind
    for name, kind in vars(right_forms).items()
    if isinstance(kind, type) and issubclass(kind, Adapter) and kind.__module__ == right_forms.__name__
}


def verdicts(adapter: Adapter, law: str, count: int, domain: Domain, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Verdict]]:
    """What a few small cases of another domain come to."""
    adapter.domain = domain
    monkeypatch.setitem(judging._LOADED, "it", adapter)
    examples: list[Example] = sample(LAWS[law].draw(domain).filter(lambda example: example.case.tokens <= 200), 3, count)
    runs = [Run(law, "it", example) for example in examples]
    return [(str(run), execute(run).verdict) for run in runs]


def test_there_are_enough() -> None:
    assert len(FORMS) >= 14
    assert all(kind.__doc__ for kind in FORMS.values())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.slow_after_first
def test_a_right_form_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(FORMS[name](), "oracle", 2, FORMS[name].domain, monkeypatch)
    assert {verdict for _, verdict in found} == {Verdict.HOLDS}, found


@pytest.mark.slow_after_first
def test_operands_may_be_flushed_where_float32_is_subnormal_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both cases the last token writes nothing, and keys before it have decayed to e^-86 or less when they meet values of 2^30.

    So final states are 0 and not 3e-29, as the product of a subnormal key would be.
    """
    common = "packed=yes heads=3 value_heads=3 dtype=bf16 gate=edges beta=edges values=great backward=no"
    long = f"lengths=178 key_dim=64 value_dim=64 seed=44462 {common}"
    short = f"lengths=2+2+2+2+2+2+2+2 key_dim=16 value_dim=4 seed=21 {common}"
    adapter = right_forms.FlushedKeys()
    monkeypatch.setitem(judging._LOADED, "it", adapter)

    def verdict(words: str) -> Verdict:
        return execute(Run("oracle", "it", Example(Case.parse(words)))).verdict

    assert {verdict(long), verdict(short)} == {Verdict.HOLDS}
    adapter.least = 2.0**-110
    assert verdict(short) is Verdict.BROKEN


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        (right_forms.Factored, "future"),
        (right_forms.NotScaled, "absent"),
        (right_forms.NotScaled, "recall"),
    ],
)
def test_laws_keep_to_the_conventions(kind: type[Adapter], law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(kind(), law, 3, kind.domain, monkeypatch)
    assert {verdict for _, verdict in found} <= {Verdict.HOLDS, Verdict.BLIND}, found
    assert Verdict.HOLDS in {verdict for _, verdict in found}


@pytest.mark.parametrize("kind", [right_forms.Factored, right_forms.NotScaled])
@pytest.mark.slow
def test_without_its_word_a_right_form_has_an_alarm(kind: type[Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(kind(), "oracle", 4, Domain(), monkeypatch)
    assert Verdict.BROKEN in {verdict for _, verdict in found}


@pytest.mark.parametrize("strongest", STRENGTHS)
@pytest.mark.slow_after_first
def test_no_stronger_decay_is_drawn(strongest: str) -> None:
    domain = Domain(strongest_decay=strongest)
    weaker = {"forever", *STRENGTHS[: STRENGTHS.index(strongest) + 1]}
    drawn = {example.case.gate for example in sample(LAWS["oracle"].draw(domain), 5, 60)}
    assert drawn == (weaker | {"mixed", "edges", "runs"} if strongest == "saturated" else weaker)
    assert all(domain.outside(example.case) is None for example in sample(LAWS["cut"].draw(domain), 5, 10))


def test_only_the_scales_of_the_domain_are_drawn() -> None:
    for scales in (("one",), ("default", "half"), ("one", "half")):
        examples = sample(LAWS["oracle"].draw(Domain(scales=scales)), 5, 40)
        assert {example.case.scale for example in examples} == {*scales}
    variants = {example.variant for example in sample(LAWS["absent"].draw(Domain(scales=("one",))), 5, 60)}
    assert "scale" not in variants


@for_each(
    ("words", "message"),
    [
        ({"scales": ()}, r"scales must be a tuple of some of default, one, half, got \(\)"),
        ({"scales": ("two",)}, r"scales must be a tuple of some of default, one, half, got \('two',\)"),
        ({"scales": ("one",), "scale": False}, "scales must contain default with scale=False, got one"),
        ({"strongest_decay": "mixed"}, "strongest_decay must be one of 1000, 64, 10, tenth, saturated, got 'mixed'"),
    ],
)
def test_what_cannot_be_is_refused(words: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Domain(**words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        "law=recurrent at=12 adapter={} lengths=15 heads=2 value_heads=2 key_dim=65 value_dim=65 dtype=fp16 backward=no seed=171",
        "law=untouched adapter={}Decode op=decode lengths=5+5 value_heads=3 key_dim=1 value_dim=1 state=random seed=51602",
    ],
)
def test_no_law_passes_a_part_of_a_tensor_unless_views_are_promised(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and sequences that a law cuts out of a tensor begin anywhere in memory."""
    run = Run.parse(line.format("tests/right.py:Vectorised"))
    assert execute(run).verdict is Verdict.HOLDS
    monkeypatch.setattr(bench, "placed", lambda _, x: x)
    assert execute(run).verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("kind", "case", "promising"),
    [
        (right.Vectorised, Case((5,), state="random", backward=False), Domain(backward=False)),
        (right.VectorisedDecode, PoolCase((1, 1), state="random"), PoolDomain(rule=Domain(backward=False), in_place=False)),
    ],
)
def test_a_call_is_pure_in_memory_of_an_allocator_unless_other_views_are_promised(
    kind: type[Adapter], case: Any, promising: Domain | PoolDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, run = kind(), Run("pure", "it", Example(case))
    monkeypatch.setitem(judging._LOADED, "it", adapter)
    assert execute(run).verdict is Verdict.HOLDS
    adapter.domain = promising
    outcome = execute(run)
    assert outcome.verdict is Verdict.BROKEN
    assert "must begin at a multiple of 16 bytes" in outcome.findings[0].what
