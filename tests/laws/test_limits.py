"""A report says what a domain might declare so that a broken run would hold, or lie outside it: norms of layers, and limits."""

import dataclasses
import pathlib
from typing import Any

import pytest

from properties.layers.domain import LayerDomain
from properties.rules.domain import Domain
from properties.traces.domain import TraceDomain
from tests.together import for_each
from verify.engine.asking import Described, ask
from verify.engine.would_hold import would_hold, would_hold_within
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker

LAYER = "op=gdn_layer lengths=9 key_dim=16 values=small backward=no"
TRACE = "op=serving trace=p:a5,b3/d:a,b gate=64 values=small"
IN_KERNEL = Domain(in_kernel=("none", "beta"))
GATES = Domain(in_kernel=("gate", "both"))


def described(domain: Any, kernel: pathlib.Path) -> Described:
    return Described(f"{kernel}:Unsaid", domain, "recurrent", "none 1.0")


def unsaid(tmp_path: pathlib.Path, of: str, kind: str, domain: str) -> pathlib.Path:
    """The file of an adapter that does not declare what its domain is."""
    kernel = tmp_path / f"unsaid_{kind}.py"
    kernel.write_text(
        f"import tests.{of} as right\nfrom properties.layers.domain import LayerDomain\n"
        "from properties.rules.domain import Domain\nfrom properties.traces.domain import TraceDomain\n"
        f"class Unsaid(right.{kind}):\n    domain = {domain}\n"
    )
    return kernel


@pytest.mark.parametrize(
    ("kind", "law", "line", "domain", "declarations"),
    [
        ("TinyEpsLayer", "oracle", LAYER, LayerDomain(), ["qk_norm_eps = ('1e-12',) in its domain"]),
        ("LeastNormEngine", "session", TRACE, TraceDomain(), ["qk_norm_forms = ('max',) in its domain"]),
        ("AddsEpsLayer", "oracle", LAYER, LayerDomain(), []),
    ],
)
@pytest.mark.slow_after_first
def test_another_norm_of_a_layer_or_an_engine_is_named(
    kind: str, law: str, line: str, domain: Any, declarations: list[str], worker: Worker, tmp_path: pathlib.Path
) -> None:
    kernel = unsaid(tmp_path, "right_norms", kind, f"{type(domain).__name__}()")
    run = Run.parse(f"law={law} adapter={kernel}:Unsaid {line}")
    store = Store(str(tmp_path))
    assert ask(run, worker, store).verdict is Verdict.BROKEN
    found = would_hold(dataclasses.replace(described(domain, kernel), algorithm="pointwise"), [run], worker, store)
    assert found == declarations


LIMITS = [
    ("RefusesNothing", "Domain()", "law=oracle", "lengths=0+0 key_dim=4 value_dim=4 backward=no", "nothing = False"),
    (
        "NeighboursLast",
        "Domain()",
        "law=strides variant=strided",
        "lengths=5 key_dim=4 value_dim=4 backward=no",
        "views = ('sliced', 'offset')",
    ),
    (
        "DoublesGiven",
        "Domain(in_kernel=('none', 'beta'))",
        "law=oracle",
        "lengths=5 key_dim=4 value_dim=4 beta=two in_kernel=beta backward=no",
        "negative_eigenvalues = ('given',)",
    ),
    (
        "MixedParameters",
        "Domain(in_kernel=('gate', 'both'))",
        "law=oracle",
        "lengths=5 key_dim=4 value_dim=4 dtype=bf16 in_kernel=gate backward=no",
        "parameter_dtypes = ('mixed',)",
    ),
    ("OneToken", "Domain()", "law=oracle", "lengths=2 key_dim=4 value_dim=4 backward=no", "longest = 1"),
]
DOMAINS = {
    "Domain()": Domain(),
    "Domain(in_kernel=('none', 'beta'))": IN_KERNEL,
    "Domain(in_kernel=('gate', 'both'))": GATES,
}


@for_each(("kind", "domain", "law", "line", "limit"), LIMITS)
def test_a_limit_is_named_if_all_that_it_allows_holds(
    kind: str, domain: str, law: str, line: str, limit: str, worker: Worker, tmp_path: pathlib.Path
) -> None:
    kernel = unsaid(tmp_path, "right_words", kind, domain)
    run = Run.parse(f"{law} adapter={kernel}:Unsaid {line}")
    store, says = Store(str(tmp_path)), described(DOMAINS[domain], kernel)
    outcome = ask(run, worker, store)
    assert outcome.verdict is Verdict.BROKEN
    assert would_hold_within(says, [run], outcome, worker, store) == [f"{limit} in its domain"]
    assert would_hold_within(says, [run], outcome, worker, store, lambda: False) == []
    if limit == "longest = 1":
        longer = Run.parse(str(run).replace("lengths=2", "lengths=5"))
        assert would_hold_within(says, [longer], outcome, worker, store) == [], "perhaps it raises in longer calls only"
    inside = Run.parse(f"law=oracle adapter={kernel}:Unsaid lengths=1 key_dim=4 value_dim=4 state=random backward=no")
    if domain == "Domain()":
        assert would_hold_within(says, [run, inside], outcome, worker, store) == [], "it does not exclude every broken run"


def test_a_limit_is_not_named_if_something_that_it_allows_is_broken(worker: Worker, tmp_path: pathlib.Path) -> None:
    kernel = unsaid(tmp_path, "right_words", "NeighboursLast", "Domain()")
    run = Run.parse(f"law=strides variant=strided adapter={kernel}:Unsaid lengths=5 key_dim=4 value_dim=4 backward=no")
    store, says = Store(str(tmp_path)), described(Domain(), kernel)
    outcome = ask(run, worker, store)
    broken = Run.parse(str(run).replace(f"{kernel}:Unsaid", "tests/right_words.py:IgnoresStrides").replace("strided", "sliced"))
    assert ask(broken, worker, store).verdict is Verdict.BROKEN
    assert would_hold_within(says, [run], outcome, worker, store, others=lambda: [run]) != []
    assert would_hold_within(says, [run], outcome, worker, store, others=lambda: [broken]) == []
