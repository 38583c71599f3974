"""Views whose last token, head, sequence or slot lies 2^31 elements or more behind the first."""

import dataclasses
import resource
from collections.abc import Iterator

import pytest
import torch

from properties.books import book_of
from properties.laws import far_views
from properties.laws.far_views import LEAST, LEAST_TOKENS, SPAN, apart, far, far_rows
from properties.laws.law import Blind
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.palette import draw_palette, sample
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def test_views_are_far_along_their_axis_dense_along_the_others_and_keep_every_number() -> None:
    shapes = {"q": (2, 5, 3, 8), "g": (2, 5, 6), "half": (1, 9, 2, 4)}
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16 if name == "half" else None) for name, shape in shapes.items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    views = apart(tensors, dict.fromkeys(tensors, 1))
    for name, x in tensors.items():
        view = views[name]
        assert view.equal(x) and view.dtype == x.dtype
        assert (x.shape[1] - 1) * view.stride(1) >= SPAN and view.stride(1) >= SPAN // x.shape[1]
        assert view.select(1, 0).is_contiguous()
    views["q"].fill_(7)  # no number of another view is among these
    assert all(views[name].equal(tensors[name]) for name in ("g", "half"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB of the 17 GiB that are reserved


def test_tokens_of_a_batch_lie_equally_far_apart_and_the_last_rows_first_token_wraps() -> None:
    for batch in [1, 2, 3]:
        tensors = {"q": torch.randn(batch, LEAST_TOKENS, 3, 8), "b": torch.randn(batch, LEAST_TOKENS, 3, dtype=torch.float64)}
        for name, view in far_rows(tensors).items():
            assert view.equal(tensors[name]), batch
            assert view.stride(0) == LEAST_TOKENS * view.stride(1), batch
            assert view[0, 0].is_contiguous(), batch
            assert (batch - 1) * view.stride(0) + (LEAST_TOKENS - 1 if batch == 1 else 0) * view.stride(1) >= SPAN, batch
            assert 127 * view.stride(1) + 24 < 2**31, batch  # two tokens of a block of 128


def test_an_offset_that_wraps_stays_inside_the_memory_and_finds_zeros() -> None:
    view = apart({"x": torch.ones(LEAST, 3)}, {"x": 0})["x"]
    place = view.storage_offset() + (LEAST - 1) * view.stride(0) - 2**32
    assert place >= 0
    assert not view.as_strided((3,), (1,), place).any()


def test_tensors_with_few_indices_stay_where_they_are_and_without_a_far_one_the_law_is_blind() -> None:
    case = Case((5, 2), packed=True, heads=1, value_heads=LEAST, state="random")
    tensors = {name: case.inputs()[name] for name in ("q", "v", "state")}
    views = far(Domain(), case.spec, tensors, "far_heads")
    assert views["q"] is tensors["q"] and views["v"].stride(2) >= SPAN // LEAST and views["state"].stride(1) >= SPAN // LEAST
    with pytest.raises(Blind, match="no tensor has 5 sequences"):
        far(Domain(), case.spec, tensors, "far_sequences")


def test_memory_that_the_system_refuses_makes_the_law_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_views, "SPAN", 2**62)
    with pytest.raises(Blind, match="cannot be reserved"):
        apart({"x": torch.ones(LEAST, 3)}, {"x": 0})


def assert_wide_alone_holds(worker: Worker, wide: str, narrow: str, variant: str, words: str) -> None:
    """Of two implementations in tests/far_kernels.py, one with offsets in 64 bits holds and one with offsets in 32 is broken."""
    for name, verdict in ((wide, Verdict.HOLDS), (narrow, Verdict.BROKEN)):
        line = f"law=strides variant={variant} adapter=tests/far_kernels.py:{name} {words}"
        outcome = Outcome.from_json(worker.ask(RunOne(line)))
        assert outcome.verdict is verdict, (name, outcome)
        assert outcome.rows


@pytest.mark.interpreted
@pytest.mark.slow
def test_a_kernels_offsets_wrap_in_32_bits_and_not_in_64(worker: Worker) -> None:
    for variant, words in [
        ("far_tokens", "lengths=130"),
        ("far_heads", "lengths=1 heads=5"),
        ("far_sequences", "lengths=1+1+1+1+1"),
    ]:
        assert_wide_alone_holds(worker, "OffsetsIn64Bits", "OffsetsIn32Bits", variant, f"{words} op=l2norm backward=no")


@pytest.mark.interpreted
def test_offsets_in_a_block_of_128_tokens_may_have_32_bits_and_its_first_token_may_not(worker: Worker) -> None:
    words = "lengths=130 op=l2norm backward=no"
    assert_wide_alone_holds(worker, "BlocksIn64Bits", "BlocksIn32Bits", "far_tokens", words)


def test_a_decode_that_knows_the_stride_of_tokens_alone_is_right_in_64_bits_and_wrong_in_32(worker: Worker) -> None:
    for lengths in ["130", "130+130", "130 packed=yes", "1+128+1 packed=yes"]:
        assert_wide_alone_holds(worker, "OneStride", "OneStrideIn32Bits", "far_tokens", f"op=decode lengths={lengths}")


def test_a_view_that_a_pools_domain_does_not_promise_is_blind(worker: Worker) -> None:
    line = "law=strides variant=far_heads adapter=tests/far_kernels.py:OneStride op=decode lengths=1 heads=5 value_heads=5"
    outcome = Outcome.from_json(worker.ask(RunOne(line)))
    assert (outcome.verdict, outcome.reason) == (Verdict.BLIND, "far_heads inputs are not among offset, fused")


@pytest.mark.slow
def test_far_tokens_are_drawn_inside_the_domain_also_with_the_keys_of_a_palette() -> None:
    for domain in [
        Domain(length_step=64),
        Domain(longest=130, empty=False),
        ModuleDomain("causal_conv1d"),
        LayerDomain(),
        PoolDomain(trees=True),
        PoolDomain(rule=Domain(batched=False, backward=False), empty_first=False, apart=False),
    ]:
        law = book_of(domain).laws["strides"]
        palette = dataclasses.replace(draw_palette(domain, 1, 8, ["oracle", "strides"]), shapes=True)
        far_ones = [example for example in sample(law.draw(domain), 3, 200) if example.variant == "far_tokens"]
        fitted = [example for example in (palette.fit(law, domain, example) for example in far_ones) if example is not None]
        assert len(far_ones) > 1, domain
        assert fitted, domain
        for example in (*far_ones, *fitted):
            law.accept(example)
            assert domain.outside(example.case) is None, example
        drafts = {getattr(example.case, "drafts", "chain") for example in far_ones}  # a palette's entry may have trees
        assert drafts == {"chain"}, domain


def test_of_short_sequences_only_slots_are_drawn_far_apart() -> None:
    for domain, far_ones in [
        (Domain(longest=129), set()),
        (Domain(longest=195, length_step=65), {"far_tokens", "far_heads", "far_sequences"}),
        (ModuleDomain("l2norm", longest=129), set()),
        (PoolDomain(most_tokens=129), {"far_slots"}),
        (PoolDomain(), {"far_slots", "far_tokens", "far_heads"}),
    ]:
        drawn = {str(example.variant) for example in sample(book_of(domain).laws["strides"].draw(domain), 3, 200)}
        assert {variant for variant in drawn if variant.startswith("far")} == far_ones, domain


@pytest.mark.interpreted
def test_memory_that_is_too_large_to_be_watched_is_not_copied_and_its_programs_run_one_by_one(worker: Worker) -> None:
    line = "law=oracle adapter=tests/far_kernels.py:StoresToLargeMemory lengths=6 op=l2norm backward=no"
    outcome = Outcome.from_json(worker.ask(RunOne(line)))
    assert outcome.verdict is Verdict.HOLDS
    assert [*outcome.one_by_one] == ["norm_kernel: memory of 3 GiB"]
