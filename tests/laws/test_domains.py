"""A domain is refused when it is made, or every law that applies to it draws cases inside it."""

import dataclasses
import random
import re
from typing import Any

import pytest

from properties.books import BOOKS, book_of
from properties.calls.domain import CallDomain
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.paths.domain import PathDomain, with_forms
from properties.pools.case import PoolCase
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from tests.faults import not_refused
from tests.random_domains import as_checked, changed, faults, laws_of, random_domain
from verify.engine.drawing import seeded

LAYER = ("zigzag", "zigzag_batch", "contiguous")
OTHERS: dict[str, Any] = {"layouts": ("contiguous",), "choices": (), "refuses": False}
Made = type[Any]


@pytest.mark.parametrize("kind", [book.domain for book in BOOKS])
def test_a_random_domain_is_refused_or_every_law_draws_inside_it(kind: Made) -> None:
    chance = random.Random(20)
    for changes in (2, 7):
        domain = as_checked(random_domain(kind, chance, changes), chance)
        assert faults(domain, changes) == {}, changed(domain)


def test_what_cannot_be_drawn_is_refused_in_one_line() -> None:
    rows = [
        (
            PathDomain,
            {"operation": "decode"},
            "operation must be one of gdn_layer, gated_delta_rule, kda, causal_conv1d, kda_layer, got 'deco",
        ),
        (
            PathDomain,
            {"operation": "delta_rule"},
            "operation must be one of gdn_layer, gated_delta_rule, kda, causal_conv1d, kda_layer, got 'delt",
        ),
        (
            PathDomain,
            {"layouts": LAYER},
            "layouts must be zigzag or contiguous for gdn_layer, got zigzag, zigzag_batch, contiguous",
        ),
        (PathDomain, {"layouts": ()}, "layouts must be a tuple of some of zigzag, zigzag_batch, contiguous, got ()"),
        (PathDomain, {"ranks": 0}, "ranks must be in 1..1024, got 0"),
        (PathDomain, {"exchange_ranks": 2048}, "exchange_ranks must be in 1..1024, got 2048"),
        (PathDomain, {"dtypes": ("fp64",)}, "dtypes must be a tuple of some of fp32, bf16, fp16, got ('fp64',)"),
        (PathDomain, {"offsets": "int32"}, "offsets must be a tuple of some of int64, int32, got 'int32'"),
        (PathDomain, {"widths": ()}, "widths must be a tuple of whole numbers in 1..1024, got ()"),
        (PathDomain, {"compiled_widths": (0,)}, "compiled_widths must be a tuple of whole numbers in 1..1024, got (0,)"),
        (PathDomain, {"conv_widths": (65,)}, "conv_widths must be a tuple of whole numbers in 1..64, got (65,)"),
        (PathDomain, {"packed": False, "batched": False}, "packed or batched must be True, got neither"),
        (
            PathDomain,
            {"operation": "kda", "context_parallel": False, "layouts": ("contiguous",)},
            "context_parallel must be True for kda, which ranks share in no other way, got False",
        ),
        (PathDomain, {"least_piece": 65}, "least_piece must be in 0..64, got 65"),
        (
            PathDomain,
            {"packed": False, "least_piece": 20},
            "longest must be at least 4 * least_piece = 80 without packed sequences",
        ),
        (PathDomain, {"longest": 0}, "longest must be in 1..1048576, got 0"),
        (PathDomain, {"choices": ("conv",)}, "choices must be pairs of a name and a tuple of values, got ('conv',)"),
        (
            PathDomain,
            {"choices": (("conv2", ("fla",)),)},
            "choices must name some of conv, qk_norm, thd_all_to_all, rule, got 'conv2'",
        ),
        (PathDomain, {"choices": (("conv", ("cuda",)),)}, "choices must have some of torch, fla for conv, got ('cuda',)"),
        (PathDomain, {"choices": (("conv", ("fla",)),) * 2}, "choices must name each choice once, got conv, conv"),
        (PathDomain, {"slow": ("conv=cuda",)}, "slow must be a tuple of some of conv=torch, conv=fla, qk_norm=separate"),
        (PathDomain, {"tf32": "rule=fla"}, "tf32 must be a tuple of some of conv=torch, conv=fla"),
        (PathDomain, {"packed": "no"}, "packed must be True or False, got 'no'"),
        (Domain, {"views": 1}, "views must be True, False or a tuple of some of"),
        (Domain, {"batch_heads": 4}, "batch_heads must be None or at least 512, because laws call batches of as many, got 4"),
        (Domain, {"key_dims": (2000, 4000)}, "key_dims must contain a width in steps of 1, from 1 to 1024, got (2000, 4000)"),
        (Domain, {"width_step": True}, "width_step must be at least 1, got True"),
        (ModuleDomain, {"conv_widths": (9, 100)}, "conv_widths must be a tuple of whole numbers in 1..64, got (9, 100)"),
        (ModuleDomain, {"operation": "l2norm", "batched": False}, "batched must be True for l2norm, which has no packed sequences"),
        (LayerDomain, {"conv_widths": (65,)}, "conv_widths must be a tuple of whole numbers in 1..64, got (65,)"),
        (LayerDomain, {"widths": (2000,)}, "widths must be a tuple of whole numbers in 1..1024, got (2000,)"),
        (TraceDomain, {"key_widths": (512,)}, "key_widths must be a tuple of whole numbers in 1..256, got (512,)"),
        (
            CallDomain,
            {"inputs": {"q": "B T H K", "v": "B T HV K"}, "outputs": {"y": "B T K"}, "sizes": {"HV": (3,), "H": (2,)}},
            "sizes must have a multiple of a size of H for HV, got H: (2,) and HV: (3,)",
        ),
    ]
    patterns = ((kind, words, f"^{re.escape(message)}[^\n]*$") for kind, words, message in rows)
    assert not_refused(lambda kind, words: kind(**words), patterns) == []


@pytest.mark.parametrize(
    "domain",
    [
        with_forms(PathDomain(dtypes=("bf16",), offsets=("int32",), packed=False), 3),
        with_forms(PathDomain(choices=(("conv", ("fla",)), ("rule", ("fla",))), ranks=2), 3),
        PathDomain(ranks=1, packed=False),
        PathDomain("causal_conv1d", **OTHERS, packed=False, least_piece=16),
        LayerDomain(offsets=("int32",), conv_widths=(1,)),
        PoolDomain(most_tokens=2, rule=Domain(strongest_decay="1000", backward=False)),
        PoolDomain(rule=Domain(in_kernel=("gate",), parameter_dtypes=("input",), backward=False), state_dtypes=("input",)),
        TraceDomain(most_tokens=1, value_widths=(3, 2, 1, 8)),
        TraceDomain(value_dims=(1, 9), width_step=3),
        ModuleDomain(longest=1),
        ModuleDomain(longest=1, attention_mask=True, state_columns="W-1"),
        CallDomain(inputs={"q": "B T H K", "v": "B T HV K"}, outputs={"y": "B T K"}, sizes={"HV": (3, 8)}, longest=1),
        Domain(length_step=1024),
        Domain(value_dims=(64, 128), equal_widths=True, scale=False),
    ],
    ids=lambda domain: f"{type(domain).__name__}-{'-'.join(changed(domain))}"[:60],
)
def test_what_a_domain_takes_is_drawn(domain: Any) -> None:
    assert faults(domain, 5) == {}


def test_a_domain_that_takes_what_it_cannot_draw_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ModuleDomain, "__post_init__", lambda self: None)
        wide = ModuleDomain(conv_widths=(100,))
        assert {*faults(wide, 1)} >= {law.name for law in laws_of(wide) if law.name != "whole"}
    monkeypatch.setattr(ModuleDomain, "outside", lambda self, case: "of no use")
    assert {*faults(ModuleDomain("kda_gate"), 1).values()} == {"outside the domain: of no use"}


def test_a_decode_only_convolution_has_no_law_that_cuts_a_sequence() -> None:
    domain = ModuleDomain(longest=1)
    laws = book_of(domain).laws
    for name in ("cut", "recurrent", "future"):
        assert laws[name].needs(domain) == "longest=1: no sequence has two tokens"
    lengths = set[int]()
    for law in laws_of(domain):
        seeded(law.draw(domain), 1, 4, lambda example: lengths.update(example.case.lengths))
    assert lengths <= {0, 1}


def test_the_dtype_of_a_pool_may_be_that_of_its_tokens() -> None:
    domain, drawn = PoolDomain(state_dtypes=("input",)), list[PoolCase]()
    seeded(book_of(domain).laws["oracle"].draw(domain), 1, 12, lambda example: drawn.append(example.case))
    assert {case.dtype for case in drawn} == {"fp32", "bf16", "fp16"}
    assert all(case.state_dtype == case.dtype for case in drawn)
    assert domain.outside(dataclasses.replace(drawn[0], dtype="bf16", state_dtype="fp32")) == "state_dtype=fp32 is not among input"


def test_a_pool_has_parameters_in_the_dtype_of_its_tokens() -> None:
    rule = Domain(in_kernel=("none", "gate", "both"), parameter_dtypes=("fp32", "input"), backward=False)
    drawn = list[PoolCase]()
    seeded(book_of(PoolDomain()).laws["oracle"].draw(PoolDomain(rule=rule)), 1, 24, lambda example: drawn.append(example.case))
    outside_the_kernel = {case.parameter_dtype for case in drawn if case.in_kernel == "none"}
    assert outside_the_kernel == {"fp32"} and {case.parameter_dtype for case in drawn} == {"fp32", "input"}
    case = next(case for case in drawn if case.parameter_dtype == "input" and case.dtype == "bf16")
    assert {case.inputs()[name].dtype for name in ("A_log", "dt_bias") if case.inputs()[name] is not None} == {
        case.inputs().q.dtype
    }
    assert PoolCase.parse(str(case)) == case
    other = PoolDomain(rule=dataclasses.replace(rule, parameter_dtypes=("fp32",)))
    assert other.outside(case) == "parameter_dtype=input is not among fp32"


def test_a_pool_without_rejected_drafts_has_cases_without_any_token() -> None:
    assert PoolDomain(rejects=False).outside(PoolCase((0, 0), packed=True)) is None


def test_a_law_that_copies_states_sees_short_sequences_in_its_first_cases() -> None:
    domain = ModuleDomain()
    law = book_of(domain).laws["copied"]
    for seed in range(3):
        drawn = list[Any]()
        seeded(law.draw(domain), seed, 12, drawn.append)
        cases = [example.case for example in drawn]
        assert any(case.state == "random" and min(case.lengths) < case.conv_width - 1 for case in cases[:5]), seed
        assert any(max(case.lengths) > case.conv_width for case in cases), "long sequences are drawn too"


def test_padding_rows_of_a_trace_have_no_more_tokens_than_the_domain_allows() -> None:
    domain, drawn = TraceDomain(most_tokens=1), list[TraceCase]()
    seeded(book_of(domain).laws["tags"].draw(domain), 2, 12, lambda example: drawn.append(example.case))
    assert any(not row.real for case in drawn for step in case.plan if step.kind == "p" for row in step.rows)
