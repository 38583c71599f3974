"""Options of implementations and arguments that few calls have: how they are written, drawn and judged, and who is wrong there."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from oracles.operation import Inputs
from oracles.rule.gated_delta import in_kernel
from oracles.tolerance.bound import bounds, truth
from properties.books import book_of
from properties.laws.common import _later
from properties.laws.law import Law
from properties.layers.case import LayerCase
from properties.layers.domain import LayerDomain
from properties.modules.case import ModuleCase
from properties.modules.domain import ModuleDomain
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.laws import LAWS
from properties.rules.numbers import MEMORIES
from properties.rules.smaller import SMALLER_RULES
from properties.words import options
from properties.words.example import Example
from tests import wrong_options as wrong
from tests.right import Captured
from tests.together import for_each
from verify.adapters import loader
from verify.adapters.registry import BUILT_IN
from verify.engine.drawing import seeded
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Verdict

# Words of options

ORDER: options.Options = (("order", ("kv", "vk")), ("mode", ("a", "b", "c")))
KINDS: tuple[Callable[..., Any], ...] = (Domain, ModuleDomain, LayerDomain, PoolDomain)


def test_options_of_a_line_come_back() -> None:
    case = Case.parse("lengths=3 options=order:vk,mode:b")
    assert str(case) == "lengths=3 options=order:vk,mode:b"
    assert options.values_of(case.options) == {"order": "vk", "mode": "b"}
    assert options.text_of_values({}) == Case((3,)).options == "none"
    assert options.all_values(ORDER, "mode:c") == {"order": "kv", "mode": "c"}


@for_each("text", ["vk", "order:", ":vk", "order:vk,order:kv", "or-der:vk", "order:vk,"])
def test_options_of_another_form_are_refused(text: str) -> None:
    for parse in (Case.parse, LayerCase.parse, PoolCase.parse):
        with pytest.raises(ValueError, match="options must be none, or name:value joined by commas"):
            parse(f"lengths=3 options={text}")
    with pytest.raises(ValueError, match="options must be none"):
        ModuleCase.parse(f"lengths=3 op=l2norm options={text}")


@for_each(
    ("declared", "exact", "match"),
    [
        ((("order", ("kv",)),), (), "two values or more for order"),
        ((("order", ("kv", "kv")),), (), "two values or more for order"),
        ((("order", ("kv", "v k")),), (), "texts without commas and spaces"),
        ((("or-der", ("kv", "vk")),), (), "pairs of a name and a tuple of values"),
        ((*ORDER, ORDER[0]), (), "each option once"),
        (ORDER, ("other",), "exact_options must be a tuple of some of order, mode"),
        ({"order": ("kv", "vk")}, (), "pairs of a name and a tuple of values"),
    ],
)
def test_declared_options_of_another_form_are_refused(declared: Any, exact: Any, match: str) -> None:
    for kind in (Domain, ModuleDomain):
        with pytest.raises(ValueError, match=match):
            kind(options=declared, exact_options=exact)
    for other in (LayerDomain, PoolDomain) if not exact else ():
        with pytest.raises(ValueError, match=match):
            other(options=declared)


def test_only_domains_whose_laws_compare_bits_have_exact_options() -> None:
    for kind in KINDS:
        domain = kind(options=ORDER)
        assert ("exact_options" in {field.name for field in dataclasses.fields(domain)}) is (
            "options" in getattr(book_of(domain).laws.get("absent"), "variants", ())
        )


def test_a_case_with_an_option_that_the_domain_lacks_is_outside() -> None:
    for domain, case in (
        (Domain(options=ORDER), Case((3,))),
        (ModuleDomain("l2norm", options=ORDER), ModuleCase((3,), "l2norm")),
        (LayerDomain(options=ORDER), LayerCase((3,))),
        (PoolDomain(options=ORDER, rule=Domain(backward=False)), PoolCase((3,))),
    ):
        assert domain.outside(dataclasses.replace(case, options="order:vk,mode:c")) is None
        assert "mode:d is not among order:kv" in str(domain.outside(dataclasses.replace(case, options="mode:d")))
        assert "other:x is not among" in str(domain.outside(dataclasses.replace(case, options="other:x")))
        assert type(domain).from_json(domain.to_json()) == domain
    assert Domain().outside(Case((3,), options="a:b")) == "options=a:b is not among none"


@pytest.mark.slow
def test_options_are_drawn_last_and_only_where_a_domain_has_them() -> None:
    def drawn(domain: Any) -> list[Any]:
        examples: list[Example] = []
        seeded(book_of(domain).laws["oracle"].draw(domain), 1, 25, examples.append)
        return [example.case for example in examples]

    for kind in KINDS:
        plain, with_options = drawn(kind()), drawn(kind(options=ORDER))
        assert [dataclasses.replace(case, options="none") for case in with_options] == plain
        seen = {item for case in with_options for item in case.options.split(",")}
        assert seen == {"none", "order:vk", "mode:b", "mode:c"}


def test_rare_words_are_drawn_last_where_a_domain_has_them() -> None:
    domain = Domain(in_kernel=("none", "gate"))
    wide = dataclasses.replace(
        domain, left_out=("none", "gate", "beta", "both"), channel_decays=("none", "both"), parameter_dtypes=("fp32", "input")
    )
    few: list[Case] = []
    many: list[Case] = []
    for into, of in ((few, domain), (many, wide)):
        seeded(book_of(of).laws["oracle"].draw(of), 1, 60, lambda example, into=into: into.append(example.case))
    plain = {"left_out": "none", "channel_decays": "none", "parameter_dtype": "fp32"}
    same = [dataclasses.replace(new, **plain, gate=old.gate, beta=old.beta) == old for new, old in zip(many, few, strict=True)]
    assert all(same)
    assert {case.left_out for case in many} == {"none", "gate", "beta", "both"}
    assert {case.channel_decays for case in many} == {"none", "both"}
    assert {case.parameter_dtype for case in many if case.gate_inside} == {"fp32", "input"}
    assert all(wide.outside(case) is None for case in many)


@pytest.mark.parametrize("strongest", ["64", "10", "tenth", "saturated"])
@pytest.mark.slow_after_first
def test_decays_of_channels_keep_the_promise_of_the_strongest_decay(strongest: str) -> None:
    domain = Domain(strongest_decay=strongest, channel_decays=("none", "keys", "both"), decays=("log", "linear"))
    drawn: list[Case] = []
    for name in ("oracle", "future"):
        seeded(LAWS[name].draw(domain), 1, 60, lambda example: drawn.append(example.case))
    assert all(domain.outside(case) is None for case in drawn)
    assert any(case.channel_decays != "none" for case in drawn)
    small = [case for case in drawn if case.channel_decays != "none" and case.tokens * case.value_heads < 60]
    for case in (case for case in small if strongest != "saturated"):
        for later in (case, _later(case, domain)):
            assert domain.outside(later) is None
            x = later.inputs()
            total = sum(float(x[name].min()) for name in ("g", "gk", "gv") if x.get(name) is not None)
            assert total >= -MEMORIES[strongest], later


@pytest.mark.slow
def test_a_gate_that_a_call_leaves_out_is_given_in_the_dtype_of_gates() -> None:
    line = "law=absent variant=gate lengths=5 key_dim=4 value_dim=4 dtype=bf16 gate_dtype=input left_out=gate backward=no"
    outcome = execute(run_of(wrong.GatesOfInputs, line))
    assert outcome.verdict is Verdict.HOLDS, outcome.findings


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.slow_after_first
def test_no_law_of_rules_raises_for_a_call_that_leaves_out_gate_or_beta(law: Law) -> None:
    domain = dataclasses.replace(wrong.Rule.domain, in_kernel=("none",), qk_norm=True)
    if law.needs(domain) is not None:
        return
    found: dict[str, Run] = {}

    def look(example: Example) -> None:
        size, word = example.case.tokens, example.case.left_out
        # In half precision, autograd rounds the gradient of beta for each value column of this rule, which no tolerance explains.
        exact = example.case.dtype == "fp32"
        if exact and word != "none" and size <= 40 and (word not in found or size < found[word].example.case.tokens):
            found[word] = Run(law.name, "tests/wrong_options.py:Rule", example)

    seeded(law.draw(domain), 1, 120, look)
    assert found or law.name == "recurrent", "no such case was drawn"
    for run in found.values():
        outcome = execute(run)
        assert outcome.verdict in (Verdict.HOLDS, Verdict.BLIND), outcome.reason or outcome.findings


def test_cases_of_the_recurrent_form_of_a_layer_have_no_options() -> None:
    seen: list[Example] = []
    domain = LayerDomain(options=ORDER)
    seeded(book_of(domain).laws["cache"].draw(domain), 1, 25, seen.append)
    assert {example.case.options for example in seen} == {"none"}


@pytest.mark.parametrize("backward", [False, True])
def test_laws_of_norms_without_a_residual_need_a_domain_that_has_them(backward: bool) -> None:  # noqa: FBT001
    domain = ModuleDomain("gated_rms_norm", residuals=("added",), backward=backward)
    linear, scaled = (book_of(domain).laws[name] for name in ("linear", "scaled"))
    assert scaled.needs(domain) == "residual=none is not supported"
    assert linear.needs(domain) == (None if backward else "no output or gradient is linear")
    seen: list[Example] = []
    if backward:
        seeded(linear.draw(domain), 1, 25, seen.append)
    assert all(domain.outside(example.case) is None for example in seen)


def test_options_shrink_one_by_one() -> None:
    case = Case((3,), options="order:vk,mode:b")
    steps = [fields for words, fields in SMALLER_RULES.shapes[-1](case) if words.startswith("options=")]
    assert {step["options"] for step in steps} == {"none", "order:vk", "mode:b"}
    assert not list(SMALLER_RULES.shapes[-1](Case((3,))))
    assert options.draw_options(random.Random(0), ()) == "none"


# Words that exclude each other


@for_each(
    ("words", "match"),
    [
        ("left_out=gate gate=64", "needs a rule with a gate, gate=forever"),
        ("left_out=gate op=delta_rule", "needs a rule with a gate"),
        ("left_out=gate in_kernel=gate", "needs in_kernel without gate"),
        ("left_out=beta", "needs beta=one"),
        ("left_out=both beta=one in_kernel=beta", "needs in_kernel without beta"),
        ("channel_decays=keys op=kda", "needs op=gated_delta_rule"),
        ("channel_decays=keys decay=linear", "needs op=gated_delta_rule decay=log"),
        ("lower_bound=-5", "needs op=kda and in_kernel=gate or both"),
        ("lower_bound=-5 op=kda", "needs op=kda and in_kernel=gate or both"),
        ("parameter_dtype=input", "needs in_kernel=gate or both"),
        ("left_out=all", "left_out must be one of none, gate, beta, both"),
    ],
)
def test_words_that_exclude_each_other_are_refused(words: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Case.parse(f"lengths=3 {words}")


@for_each(
    ("fields", "match"),
    [
        ({"operation": "delta_rule", "left_out": ("none", "gate")}, "left_out must be none or beta for delta_rule"),
        ({"operation": "kda", "channel_decays": ("none", "keys")}, "channel_decays must be none for kda"),
        ({"lower_bounds": ("none", "-5")}, "lower_bounds must be none for gated_delta_rule"),
        ({"left_out": ("none", "gate"), "decays": ("linear",)}, "left_out must be none without"),
        ({"left_out": ("none", "beta"), "in_kernel": ("both",)}, "left_out must be none without"),
        ({"left_out": ("gate",)}, "left_out must contain none"),
        ({"channel_decays": ("keys",)}, "channel_decays must contain none"),
        ({"channel_decays": ("none", "keys"), "strongest_decay": "1000"}, "channel_decays must be none with strongest_decay=1000"),
        ({"parameter_dtypes": ("bf16",)}, "parameter_dtypes must be a tuple of some of fp32, input"),
    ],
)
def test_domains_that_contradict_themselves_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Domain(**fields)


# The oracle


@pytest.mark.slow
def test_decays_of_channels_are_those_of_the_definition() -> None:
    case = Case((12,), value_heads=2, key_dim=3, value_dim=3, gate="64", channel_decays="both", state="random", scale="one")
    x = case.inputs()
    got = truth(case.spec, x, None)
    state = x.state.double().clone()
    for token in range(12):
        k, q = x.k[0, token, 0].double(), x.q[0, token, 0].double()
        for head in range(2):
            keys = x.g[0, token, head].double() + x.gk[0, token, head].double()
            decayed = keys.exp().unsqueeze(-1) * state[0, head] * x.gv[0, token, head].double().exp()
            fresh = x.beta[0, token, head].double() * (x.v[0, token, head].double() - k @ decayed)
            state[0, head] = decayed + torch.outer(k, fresh)
            torch.testing.assert_close(got["o"][0, token, head], q @ state[0, head])
    torch.testing.assert_close(got["final_state"], state)
    for algorithm in ("recurrent", "chunkwise"):
        for name, bound in bounds(case.spec, x, case.cotangents(), algorithm).items():
            assert bool(bound.allowed.isfinite().all()), name


def test_what_a_call_leaves_out_is_no_decay_and_a_beta_of_one() -> None:
    case = Case((30,), value_heads=2, beta="one", left_out="both", state="random")
    x = case.inputs()
    assert x.g is None
    assert x.beta is None
    explicit = x.replaced(g=torch.zeros(1, 30, 2), beta=torch.ones(1, 30, 2))
    got, want = truth(case.spec, x, None), truth(case.spec_of(explicit), explicit, None)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert [port.name for port in case.spec.inputs] == ["q", "k", "v", "state"]


def test_contracts_refuse_what_no_call_can_have() -> None:
    with pytest.raises(ValueError, match="without must not name what the kernel computes"):
        in_kernel("kda", gate=True, beta=False, without=("gate",))
    with pytest.raises(ValueError, match="without must not name what the kernel computes or takes as alpha"):
        in_kernel("kda", gate=False, beta=False, linear=True, without=("gate",))
    with pytest.raises(ValueError, match="channels must be empty for kda"):
        in_kernel("kda", gate=False, beta=False, channels=("gk",))


def test_with_a_lower_bound_mixed_heads_remember_differently() -> None:
    case = Case((50,), "kda", value_heads=6, key_dim=4, in_kernel="gate", lower_bound="-5", gate="mixed")
    means = case.inputs().a.mean((0, 1, 3))
    assert [round(float(mean)) for mean in means] == pytest.approx([-64, -12, -8, -5, 4, -64], abs=1)


def test_a_gate_with_a_lower_bound_is_bounded_and_remembers_as_its_regime_says() -> None:
    for gate, least, most in (("forever", -1e-9, 0.0), ("1000", -0.02, -1e-7), ("10", -0.6, -0.003), ("tenth", -5.0, -4.0)):
        case = Case((200,), "kda", in_kernel="gate", lower_bound="-5", gate=gate, key_dim=4)
        x = case.inputs()
        g = -5.0 * (x.A_log.exp().unsqueeze(-1) * (x.a.float() + x.dt_bias)).sigmoid()
        assert least <= float(g.mean()) <= most, gate
    illegal = x.replaced(lower_bound=1.0)
    with pytest.raises(ValueError, match="lower_bound must be None or a finite number below 0"):
        case.spec.check(illegal)


def test_a_norm_may_add_a_residual_return_the_sum_and_have_another_gate() -> None:
    case = ModuleCase((20,), "gated_rms_norm", width=7, residual="returned", gating="sigmoid")
    x = case.inputs()
    got = truth(case.spec, x, None)
    total = x.x.double() + x.residual.double()
    y = x.weight.double() * total * (total.square().mean(-1, keepdim=True) + x.eps).rsqrt() * x.z.double().sigmoid()
    torch.testing.assert_close(got["y"], y)
    torch.testing.assert_close(got["sum"], total)
    with pytest.raises(ValueError, match="gating must be one of silu, sigmoid"):
        case.spec.check(x.replaced(gating="tanh"))
    with pytest.raises(ValueError, match="residual=returned needs op=gated_rms_norm"):
        ModuleCase((3,), "causal_conv1d", residual="returned")


def test_gradients_of_a_residual_are_those_of_what_it_is_added_to() -> None:
    norm = ModuleCase((20,), "gated_rms_norm", width=7, residual="added")
    got = truth(norm.spec, norm.inputs(), norm.cotangents())
    assert torch.equal(got["dresidual"], got["dx"])
    assert float(got["dx"].abs().max()) > 0
    conv = ModuleCase((9,), "causal_conv1d", width=3, activation="silu", residual="added")
    assert torch.equal(truth(conv.spec, conv.inputs(), conv.cotangents())["dresidual"], conv.cotangents()["y"].double())
    x = conv.inputs()
    plain = truth(conv.spec, x.replaced(residual=None), None)["y"]
    torch.testing.assert_close(truth(conv.spec, x, None)["y"], plain + x.residual.double())


# Who is wrong there: the law alone that finds it, and the words without which it is right

PLAIN = {"left_out": "none", "channel_decays": "none", "parameter_dtype": "fp32", "lower_bound": "none"}
SHORT = "lengths=9+5 packed=yes value_heads=2 key_dim=4 value_dim=4 state=random gate=64"
KILLED_BY: dict[type, str] = {
    wrong.NoGateDecays: "law=oracle lengths=2+2+2 key_dim=8 value_dim=8 beta=edges left_out=gate",
    wrong.BetaOfKeyHeads: "law=absent variant=beta lengths=5 value_heads=2 key_dim=4 value_dim=4 beta=one left_out=beta",
    wrong.ChannelsReplaceGate: f"law=oracle {SHORT} channel_decays=keys",
    wrong.ValueDecayOfTokenBefore: f"law=oracle {SHORT} channel_decays=values",
    wrong.ParametersRounded: f"law=oracle {SHORT} in_kernel=gate dtype=bf16 parameter_dtype=input backward=no",
    wrong.SquareStatesNotTurned: f"law=oracle {SHORT} options=order:vk",
    wrong.HostOffsetsEndEarly: f"law=oracle {SHORT} options=order:vk,offsets_on_host:yes",
    wrong.HostOffsetsOtherBits: f"law=absent variant=options {SHORT} options=offsets_on_host:yes",
    wrong.BoundClamps: "law=oracle op=kda_gate lengths=5 heads=2 width=4 beta=no lower_bound=-1",
    wrong.BoundWithoutSpeed: "law=oracle op=kda_gate lengths=5 heads=2 width=4 beta=no lower_bound=-5",
    wrong.BiasAddedInHalf: "law=oracle op=kda_gate lengths=5 heads=2 width=4 dtype=bf16 beta=no parameter_dtype=input",
    wrong.GateIsAlwaysSilu: "law=oracle op=gated_rms_norm lengths=5 width=4 gating=sigmoid",
    wrong.ReturnsX: "law=oracle op=gated_rms_norm lengths=5 width=4 residual=returned",
    wrong.ResidualWithoutGradient: "law=oracle op=gated_rms_norm lengths=5 width=4 residual=added",
    wrong.EvalWithoutEps: "law=oracle op=gated_rms_norm lengths=5 width=4 values=small options=training:no",
    wrong.ResidualShifted: "law=oracle op=causal_conv1d lengths=3+3 width=4 oldest=no residual=added",
    wrong.NormOfLastAxis: "law=absent variant=options op=l2norm lengths=5+5 heads=2 width=4 options=dim:second",
    wrong.MaskReplacesOffsets: "law=oracle op=gdn_layer lengths=5+3 packed=yes options=mask:ones",
    wrong.TrainsOnOtherKeys: "law=oracle op=gdn_layer lengths=5+3 packed=yes options=training:yes",
    wrong.LayerParametersOfOtherHeads: "law=oracle op=gdn_layer lengths=9 value_heads=4 dtype=bf16 parameter_dtype=input",
}


def run_of(kind: type, line: str) -> Run:
    return Run.parse(f"{line} adapter=tests/wrong_options.py:{kind.__name__}")


def plain(run: Run) -> Run:
    """The run's call without options and rare words; the law `absent` becomes the oracle's where it would have no variant."""
    rare = {"options": "none", "residual": "none", "gating": "silu", **PLAIN}
    case = run.example.case
    usual = dataclasses.replace(case, **{name: value for name, value in rare.items() if hasattr(case, name)})
    return dataclasses.replace(run, law="oracle", example=Example(usual))


@pytest.mark.parametrize("animal", KILLED_BY, ids=lambda animal: animal.__name__)
@pytest.mark.slow_after_first
def test_law_kills_animal_only_with_its_words_and_the_right_one_holds(animal: type) -> None:
    broken = run_of(animal, KILLED_BY[animal])
    assert execute(broken).verdict is Verdict.BROKEN
    assert execute(plain(broken)).verdict is Verdict.HOLDS
    right = next(base for base in animal.__mro__[1:] if base.__module__ == wrong.__name__)
    assert not hasattr(right, "letter")
    outcome = execute(run_of(right, KILLED_BY[animal]))
    assert outcome.verdict is Verdict.HOLDS, outcome.findings


def test_every_wrong_implementation_of_the_file_is_killed() -> None:
    found = {kind for kind in vars(wrong).values() if isinstance(kind, type) and "letter" in vars(kind)}
    assert set(KILLED_BY) == found


# What an adapter gets


def test_an_adapter_gets_every_option_of_its_domain_and_no_other() -> None:
    seen: list[Any] = []

    class Sees(wrong.Rule):
        def run(self, x: Inputs) -> Any:
            seen.append(dict(x.options))
            return super().run(x)

    from verify.bench.adapter_bench import AdapterBench

    case = Case((3,), options="order:vk", backward=False)
    bench = AdapterBench(Sees(), None, case)
    inputs, _ = bench.call(case)
    bench.run(inputs, None)
    bench.run(inputs, None, options="offsets_on_host:yes")
    assert seen == [{"order": "vk", "offsets_on_host": "no"}, {"order": "kv", "offsets_on_host": "yes"}]


def test_a_call_in_a_graph_gets_the_options_too() -> None:
    class Sees(Captured):
        domain = dataclasses.replace(Captured.domain, options=ORDER)

        def run(self, x: Inputs) -> Any:
            assert x.options == {"order": "vk", "mode": "a"}
            return super().run(x)

    from verify.bench import adapter_bench as benches

    case = PoolCase((1, 1), value_heads=2, key_dim=4, value_dim=4, options="order:vk", padding_slot="0")
    bench = benches.AdapterBench(Sees(), None, case)  # type: ignore[arg-type]
    first = case.inputs()
    want = bench.run(first, None)
    bench.device = "cuda"
    names = ("Stream", "current_stream", "stream", "CUDAGraph", "graph")
    with (
        mock.patch.multiple(torch.cuda, **{name: mock.MagicMock() for name in names}),
        mock.patch.object(benches.devices, "settle"),
    ):
        got = bench.replay(first, first)
    assert got["o"].shape == want["o"].shape


def test_options_of_built_in_adapters_are_of_their_form() -> None:
    for spec in ("fla/chunk", "fla/chunk_kda", "fla/chunk_kda_safe", "fla/conv", "fla/layer", "fla/decode"):
        assert spec in BUILT_IN
        domain = loader.load(spec).domain
        assert {*getattr(domain, "exact_options", ())} <= {name for name, _ in domain.options}
        assert domain.options
