"""The law `recompute`: each variant detects a wrong implementation that no other does, and right ones pass."""

import collections
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.operation import Inputs
from properties.books import book_of
from properties.laws import recompute
from properties.laws.law import present
from properties.laws.recompute import VARIANTS
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.example import Example
from tests.drawn import domain_in_a_check, in_a_check
from tests.right import cut
from verify.engine.drawing import of_law
from verify.engine.profiles import PROFILES
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.zoo import wrong_recompute
from verify.zoo.animals import right_of
from verify.zoo.base import Chunkwise, Layered
from verify.zoo.modules import Gate
from verify.zoo.wrong_gates import Stepwise

HERE = "tests/laws/test_recompute.py"
RULE = "lengths=2 key_dim=2 value_dim=2 state=random gate=10"
CONV = "op=causal_conv1d lengths=2 width=2 conv_width=2 bias=yes state=random"
LAYER = "op=gdn_layer lengths=2"
# Each wrong implementation with the only variant that shows it, and a small case.
SEEN_BY = {
    "SlotsByTurns": ("checkpoint", RULE),
    "GradientsIntoLeaves": ("reentrant", RULE),
    "GatesByAddress": ("offloaded", RULE),
    "FreesInBackward": ("twice", RULE),
    "OneBufferForGates": ("between", RULE),
    "GradientsWithoutGraph": ("second", RULE),
    "MapsTheFirst": ("transforms", RULE),
    "FrozenQueriesTakeTheGate": ("frozen", RULE),
    "ConvAllGradients": ("frozen", CONV),
    "LayerOfOneBuffer": ("between", LAYER),
}


SEEN_ELSEWHERE = {"cleared", "one_output", "parts", "sums"}  # in tests/laws/test_uses.py and test_fixed_places.py


def outcome_of(variant: str, adapter: str, words: str) -> Outcome:
    return execute(Run.parse(f"law=recompute variant={variant} adapter={adapter} {words}"))


def variants_of(spec: str) -> tuple[str, ...]:
    return book_of(adapter_of(spec).domain).laws["recompute"].variants


def test_every_variant_and_every_wrong_implementation_is_in_the_table() -> None:
    assert {variant for variant, _ in SEEN_BY.values()} | SEEN_ELSEWHERE == set(VARIANTS)
    assert set(SEEN_BY) == {name for name, kind in vars(wrong_recompute).items() if hasattr(kind, "letter")}


@pytest.mark.parametrize("name", SEEN_BY)
@pytest.mark.slow_after_first
def test_one_variant_alone_shows_it_and_its_right_form_passes_that_variant(name: str) -> None:
    shown, words = SEEN_BY[name]
    verdicts = {variant: outcome_of(variant, f"zoo/{name}", words).verdict for variant in variants_of(f"zoo/{name}")}
    broken = [variant for variant, verdict in verdicts.items() if verdict is Verdict.BROKEN]
    # Under `cleared` saved tensors are copies too, so it may show what `offloaded` shows.
    assert [variant for variant in broken if (variant, shown) != ("cleared", "offloaded")] == [shown]
    assert set(verdicts.values()) == {Verdict.HOLDS, Verdict.BROKEN}
    right = right_of(getattr(wrong_recompute, name))
    assert right is not None
    assert outcome_of(shown, f"zoo/{right.__name__}", words).verdict is Verdict.HOLDS


def examples_of(spec: str, profile: str, seed: int = 0) -> list[Example]:
    domain, found = adapter_of(spec).domain, list[Example]()
    law = book_of(domain).laws["recompute"]
    of_law(law, domain, seed, PROFILES[profile].examples_of(law), found.append)
    return found


@pytest.mark.parametrize("spec", ["Chunkwise", "Conv", "Layered"])
def test_a_check_plays_every_variant_once(spec: str) -> None:
    counts = collections.Counter(example.variant for example in in_a_check("recompute", domain_in_a_check(f"zoo/{spec}"), 0))
    assert {*counts} == {*variants_of(f"zoo/{spec}")}
    assert max(counts.values()) <= 4
    law = book_of(Domain()).laws["recompute"]
    assert [PROFILES[name].examples_of(law) for name in ("least", "few", "quick", "ci")] == [2, 5, 24, 50]


@pytest.mark.parametrize("name", [name for name, (_, words) in SEEN_BY.items() if words != LAYER])
@pytest.mark.slow
def test_the_default_profile_shows_it(name: str) -> None:
    variant, spec = SEEN_BY[name][0], f"zoo/{name}"
    found = (example for seed in range(3) for example in examples_of(spec, "quick", seed) if example.variant == variant)
    assert any(execute(Run("recompute", spec, example)).verdict is Verdict.BROKEN for example in found)


class Half(torch.autograd.Function):
    """The square of x, whose backward takes one of the two factors for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return cotangents[0] * (x.detach() + x)


class Refusing(torch.autograd.Function):
    """The same values, with an error where a second derivative is asked for."""

    forward = staticmethod(Half.forward)  # type: ignore[assignment]
    backward = staticmethod(once_differentiable(Half.backward))  # type: ignore[assignment]


class Squares(Chunkwise):
    """The rule with v replaced by v^2 / v, whose second derivative is wrong although it has a graph."""

    function: ClassVar[type[torch.autograd.Function]] = Half

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        squares: Tensor = self.function.apply(x.v.float())  # type: ignore[no-untyped-call]
        return super().run(x.replaced(v=(squares / x.v.float().where(x.v != 0, 1)).to(x.v.dtype)))


class RefusesSquares(Squares):
    function = Refusing


@pytest.mark.parametrize(("name", "verdict"), [("Squares", Verdict.BROKEN), ("RefusesSquares", Verdict.HOLDS)])
def test_a_second_derivative_with_a_part_left_out_is_found_and_an_error_is_right(name: str, verdict: Verdict) -> None:
    outcome = outcome_of("second", f"{HERE}:{name}", RULE)
    assert outcome.verdict is verdict, outcome
    if verdict is Verdict.BROKEN:
        assert "dv differentiated again along a direction of v" in {finding.output for finding in outcome.findings}


class NeedsAllGradients(wrong_recompute.ConvOneFunction):
    """The convolution, whose backward fails unless every input needs a gradient."""

    def needed(self, gradients: list[Tensor | None], needs: tuple[bool, ...]) -> list[Tensor | None]:
        if not all(needs):
            raise RuntimeError("every input must require a gradient")
        return gradients


def test_a_crash_in_a_way_of_calling_is_a_finding_about_the_call() -> None:
    outcome = outcome_of("frozen", f"{HERE}:NeedsAllGradients", CONV)
    assert [(finding.output, finding.kind) for finding in outcome.findings] == [("call", FailureKind.RAISED)]


class Tangents(torch.autograd.Function):
    """The identity, whose tangent is twice too large."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0].clone()

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return 2 * tangents[0]


class WrongTangents(Chunkwise):
    """The rule, wrong in forward mode only."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(v=Tangents.apply(x.v)))  # type: ignore[no-untyped-call]


def test_a_wrong_tangent_is_found() -> None:
    outcome = outcome_of("transforms", f"{HERE}:WrongTangents", RULE)
    assert {finding.output for finding in outcome.findings} == {"o along a direction of v", "final_state along a direction of v"}


class _Constant(torch.autograd.Function):
    """exp(x), whose backward takes the result for a constant."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.result = output.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0] * ctx.result


class _NoTangent(torch.autograd.Function):
    """The identity, whose tangent is zeros."""

    forward = staticmethod(Tangents.forward)
    setup_context = staticmethod(Tangents.setup_context)  # type: ignore[assignment]
    backward = staticmethod(Tangents.backward)  # type: ignore[assignment]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return 0 * tangents[0]


class GatesHaveNoTangent(Chunkwise):
    """The rule, whose tangent lacks the part of the gate, which is small beside the others if gates are."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(g=_NoTangent.apply(x.g)))  # type: ignore[no-untyped-call]


class GatesAreConstants(Chunkwise):
    """The rule, whose second derivative lacks that of the gate's exponential: small beside what other inputs contribute."""

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        decays: Tensor = _Constant.apply(x.g.float())  # type: ignore[no-untyped-call]
        return super().run(x.replaced(g=decays.log().to(x.g.dtype)))


class _FirstAxis(torch.autograd.Function):
    """The identity, which takes any mapped axis for the first one."""

    forward = staticmethod(Tangents.forward)
    setup_context = staticmethod(Tangents.setup_context)  # type: ignore[assignment]
    backward = staticmethod(Tangents.backward)  # type: ignore[assignment]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int]:
        return x.clone(), 0


class MapsTheFirstAxis(Gate):
    """The gate, wrong where torch.func.vmap maps its tokens along another axis than the first one."""

    def run(self, x: Inputs) -> Any:
        return super().run(x.replaced(a=_FirstAxis.apply(x.a)))  # type: ignore[no-untyped-call]


def test_tokens_that_are_mapped_along_their_second_axis_are_looked_at() -> None:
    words = "lengths=2+2 op=gdn_gate heads=3"
    outcome = outcome_of("transforms", f"{HERE}:MapsTheFirstAxis", words)
    assert outcome.verdict is Verdict.BROKEN
    assert all("along axis 1" in finding.output or "second call" in finding.output for finding in outcome.findings), outcome
    assert outcome_of("transforms", "zoo/Gate", words).verdict is Verdict.HOLDS


SMALL = "lengths=9 key_dim=4 value_dim=4 state=random"


@pytest.mark.parametrize(
    ("name", "variant", "words"),
    [("GatesHaveNoTangent", "transforms", f"{SMALL} gate=1000"), ("GatesAreConstants", "second", f"{SMALL} gate=64")],
)
def test_a_direction_of_one_input_alone_shows_a_part_that_is_small_in_that_of_all(
    name: str, variant: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(variant, f"{HERE}:{name}", words)
    assert outcome.verdict is Verdict.BROKEN
    assert all(finding.output.endswith("along a direction of g") for finding in outcome.findings), outcome
    assert outcome_of(variant, "zoo/Chunkwise", words).verdict is Verdict.HOLDS
    single = recompute._directions

    def together(bench: Any, case: Any, inputs: Inputs) -> dict[str, Any]:
        directions = single(bench, case, inputs)
        return {
            "along a direction": {name: directions[f"along a direction of {name}"][name] for name in present(case.spec, inputs)}
        }

    monkeypatch.setattr(recompute, "_directions", together)
    assert outcome_of(variant, f"{HERE}:{name}", words).verdict is Verdict.HOLDS


class _MovedStates(torch.autograd.Function):
    """The initial states, whose gradient is in another order if what was saved comes back at another address."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, order: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(state, order)
        ctx.address = state.data_ptr()
        return state.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (dstate,), (state, order) = cotangents, ctx.saved_tensors
        return dstate if state.data_ptr() == ctx.address else dstate[order], None


class LongestFirst(Chunkwise):
    """Where saved tensors come back elsewhere, gradients of states are those of the longest sequence first."""

    def run(self, x: Inputs) -> Any:
        if x.state is None or x.cu_seqlens is None:
            return super().run(x)
        order = x.cu_seqlens.diff().argsort(descending=True, stable=True)
        return super().run(x.replaced(state=_MovedStates.apply(x.state, order)))  # type: ignore[no-untyped-call]


def test_packed_sequences_in_no_order_come_under_hooks_in_every_check() -> None:
    """Checkpoint brings them back at another address too, but in its own forward."""
    spec, domain = f"{HERE}:LongestFirst", domain_in_a_check("zoo/Chunkwise")
    law = book_of(domain).laws["recompute"]
    fixed = [example for example in law.always(domain) if example.case.lengths == recompute.UNSORTED]
    assert tuple(example.variant for example in fixed) == recompute.PACKED
    verdicts = [execute(Run("recompute", spec, example)).verdict for example in fixed]
    assert verdicts == [Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS]
    assert {execute(Run("recompute", "zoo/Chunkwise", example)).verdict for example in fixed} == {Verdict.HOLDS}
    for seed in range(3):
        assert [example for example in in_a_check("recompute", domain, seed) if example in fixed] == fixed


class _OneBranch(torch.autograd.Function):
    """g and beta, where beta has a gradient only if g needs one."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return g.clone(), beta.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor]:
        dg, dbeta = cotangents
        return dg, dbeta if ctx.needs_input_grad[0] else torch.zeros_like(dbeta)


class BetaNeedsAGate(Stepwise):
    """Where the gates are inputs, the gradient of beta is computed in the branch of that of g."""

    def run(self, x: Inputs) -> Any:
        if x.get("g") is None or x.get("beta") is None:
            return super().run(x)
        g, beta = _OneBranch.apply(x.g, x.beta)
        return super().run(x.replaced(g=g, beta=beta))


def test_gates_that_are_inputs_are_frozen_in_every_check() -> None:
    domain = domain_in_a_check(f"{HERE}:BetaNeedsAGate")
    assert len(domain.in_kernel) > 1
    fixed = [example for example in book_of(domain).laws["recompute"].always(domain) if example.variant == "frozen"]
    for seed in range(3):
        examples = in_a_check("recompute", domain, seed)
        assert [example for example in examples if example in fixed] == fixed
        assert {example.variant for example in examples} == {*VARIANTS}
    assert [example.case.state for example in fixed] == ["random", "none"]
    assert {execute(Run("recompute", f"{HERE}:BetaNeedsAGate", example)).verdict for example in fixed} == {Verdict.BROKEN}
    assert {execute(Run("recompute", "zoo/Stepwise", example)).verdict for example in fixed} == {Verdict.HOLDS}
    others = [example for example in in_a_check("recompute", domain, 0) if example.variant != "frozen"]
    found = [execute(Run("recompute", f"{HERE}:BetaNeedsAGate", example)).verdict for example in others]
    assert found == [Verdict.HOLDS] * len(others)


class _InTf32(torch.autograd.Function):
    """a @ b of operands that are cut off after 10 stored bits. So are those of its backward, and of the backward of that."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, b)
        return cut(a, 11) @ cut(b, 11)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return _InTf32.apply(cotangents[0], b.mT), _InTf32.apply(a.mT, cotangents[0])  # type: ignore[no-untyped-call]


class LayerInTf32(Layered):
    """The layer, whose projections are in TF32."""

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        flat: Tensor = _InTf32.apply(x.float().flatten(0, -2), weight.float().mT)  # type: ignore[no-untyped-call]
        return flat.unflatten(0, x.shape[:-1]).to(x.dtype)


LAYER_IN_TF32 = (
    "products=tf32 op=gdn_layer lengths=6+0 packed=yes heads=2 value_heads=4 key_dim=4 value_dim=4 conv_width=2 conv_bias=yes "
    "allow_neg_eigval=yes seed=26159"
)


def test_right_products_in_tf32_hold_and_would_not_with_the_directions_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of("second", f"{HERE}:LayerInTf32", LAYER_IN_TF32).verdict is Verdict.HOLDS
    assert outcome_of("second", f"{HERE}:Squares", f"{RULE} products=tf32").verdict is Verdict.BROKEN
    monkeypatch.setattr(recompute, "_precise", lambda bench, case: True)
    assert outcome_of("second", f"{HERE}:LayerInTf32", LAYER_IN_TF32).verdict is Verdict.BROKEN


def test_states_that_a_packed_call_does_not_return_have_no_derivative() -> None:
    words = "lengths=5+3 packed=yes key_dim=4 value_dim=4 gate=64 state=random initial_states=first final_states=last"
    assert outcome_of("transforms", "tests/right_conventions.py:OneState", words).verdict is Verdict.HOLDS


def test_cases_without_a_backward_or_far_from_one_are_refused() -> None:
    law = book_of(Domain()).laws["recompute"]
    for words, variant, message in [
        ("lengths=2 backward=no", "twice", "backward=yes"),
        ("lengths=2 values=large", "second", "values=ordinary"),
        ("lengths=2 dtype=fp16", "transforms", "no fp16"),
        ("lengths=2 gate=saturated", "second", "gate="),
    ]:
        with pytest.raises(ValueError, match=message):
            law.accept(Example(Case.parse(words), None, variant))
    assert law.needs(Domain(backward=False)) == "backward is not supported"
