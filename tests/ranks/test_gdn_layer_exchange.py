"""The layer's exchange moves tokens and features where the oracle says, and sends what the design says and no more."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import parallel
from tests.gdn_calls import CALLS, Call, answers, bits
from tests.wrong_gdn_layer import even, over_the_batch, unordered
from verify.adapters.gdn import exchange
from verify.adapters.gdn.layer import Choices
from verify.ranks.collectives import Place, simulate

# The exchange


SECTIONS = st.lists(st.integers(1, 3), min_size=1, max_size=6)
FORMS = {"fused": True, "per_sequence": False}


def tagged(rows: int, batch: int, features: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(rows * batch * features).view(rows, batch, features).to(dtype)


def moved(x: Tensor, lengths: list[int], sections: list[int], cp: int, *, fused: bool) -> list[tuple[Tensor, Tensor]]:
    """HP of each rank, and CP again."""
    layout = parallel.zigzag(lengths, cp)

    def work(place: Place) -> tuple[Tensor, Tensor]:
        there = exchange.cp_to_hp(place.cp, x.index_select(0, layout[place.cp.rank]), lengths, sections, fused=fused)
        return there, exchange.hp_to_cp(place.cp, there, lengths, sections, fused=fused)

    results = []
    for result in simulate(1, cp, work):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15)
@given(
    cp=st.sampled_from([2, 3, 4, 8]),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    sections=SECTIONS,
    batch=st.integers(1, 2),
)
@pytest.mark.slow
def test_tagged_tokens_land_where_the_oracle_says(form: str, cp: int, lengths: list[int], sections: list[int], batch: int) -> None:
    check_exchange([2 * cp * length for length in lengths], [cp * section for section in sections], cp, batch, form)


def test_tagged_tokens_land_at_many_ranks() -> None:
    for form, cp in itertools.product(FORMS, [16, 64]):
        check_exchange([2 * cp, 0, 4 * cp], [cp, 2 * cp], cp, 1, form)


def check_exchange(lengths: list[int], sections: list[int], cp: int, batch: int, form: str) -> None:
    x = tagged(sum(lengths), batch, sum(sections))
    back = parallel.shard(x, parallel.zigzag(lengths, cp))
    there = parallel.shard(x, parallel.head_parallel(sections, cp), axis=-1)
    for rank, (hp, again) in enumerate(moved(x, lengths, sections, cp, fused=FORMS[form])):
        assert torch.equal(hp, there[rank])
        assert torch.equal(again, back[rank])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_go_back_the_way_values_came(form: str) -> None:
    """The gradient of CP -> HP is HP -> CP of the cotangents, and the other way round; -0.0 stays -0.0."""
    lengths, sections, cp = [8, 0, 16], [4, 8], 4
    x, layout = -tagged(24, 2, 12, torch.float32), parallel.zigzag(lengths, 4)
    slices = parallel.head_parallel(sections, cp)
    tokens, heads = parallel.shard(x, layout), parallel.shard(x, slices, axis=-1)
    assert sum(int((bits(shard) == -(2**31)).sum()) for shard in tokens) == 1, "one entry is -0.0"

    def work(place: Place) -> tuple[Tensor, Tensor]:
        cp_leaf, hp_leaf = (torch.zeros_like(shards[place.cp.rank], requires_grad=True) for shards in (tokens, heads))
        there = exchange.cp_to_hp(place.cp, cp_leaf, lengths, sections, fused=FORMS[form])
        (one,) = torch.autograd.grad(there, cp_leaf, heads[place.cp.rank])
        back = exchange.hp_to_cp(place.cp, hp_leaf, lengths, sections, fused=FORMS[form])
        (two,) = torch.autograd.grad(back, hp_leaf, tokens[place.cp.rank])
        return one, two

    for rank, got in enumerate(simulate(1, cp, work)):
        assert isinstance(got, tuple), got
        assert torch.equal(bits(got[0]), bits(tokens[rank]))
        assert torch.equal(bits(got[1]), bits(heads[rank]))


@given(st.integers(1, 8), st.lists(st.integers(0, 5), max_size=6))
def test_token_map_is_the_zigzag_layout_of_the_oracle(cp: int, pieces: list[int]) -> None:
    lengths = [2 * cp * tokens for tokens in pieces]
    index, inverse = exchange.token_map(lengths, cp)
    assert inverse.tolist() == (torch.cat(parallel.zigzag(lengths, cp)).tolist() if lengths else [])
    assert index[inverse].tolist() == list(range(sum(lengths)))


@pytest.mark.parametrize(("name", "wrong"), [("token_map", unordered), ("token_map", over_the_batch), ("feature_map", even)])
def test_wrong_maps_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., object]) -> None:
    monkeypatch.setattr(exchange, name, wrong)
    with pytest.raises(AssertionError):
        check_exchange([8, 16], [2, 4], 2, 1, "fused")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [6, 4]}, r"lengths must have sequences of a multiple of 2 \* cp = 4 tokens, got 6 \(\[6, 4\]\)"),
        ({"sections": [3, 3]}, r"sections must be multiples of cp = 2, got 3 \(\[3, 3\]\)"),
        ({"lengths": [4, 8]}, r"x must be \[6, ..., 6\] by lengths and sections, got shape \(4, 6\)"),
        ({"sections": [2, 6]}, r"x must be \[4, ..., 8\] by lengths and sections, got shape \(4, 6\)"),
    ],
)
def test_exchange_refuses_what_does_not_fit(change: dict[str, list[int]], message: str) -> None:
    def work(place: Place) -> None:
        for fused in (True, False):
            with pytest.raises(ValueError, match=message):
                exchange.cp_to_hp(place.cp, torch.zeros(4, 6), **{"lengths": [4, 4], "sections": [2, 4], **change}, fused=fused)
        with pytest.raises(ValueError, match="x must be"):
            exchange.hp_to_cp(place.cp, torch.zeros(4, 6), [4, 4], [2, 4], fused=True)
        assert not place.cp.traffic.calls

    assert simulate(1, 2, work) == [None, None]


# What is sent


def test_collectives_and_bytes_are_those_of_the_design() -> None:
    for lengths, form in itertools.product([(16,), (16, 0, 8, 24), (0, 8, 8, 8, 8)], FORMS):
        call, cp = Call(lengths=lengths), 2
        wide = sum(call.layer.sections.values())
        calls = 1 + 1 if form == "fused" else sum(length > 0 for length in lengths) * (len(call.layer.sections) + 1)
        sent_bytes = 4 * sum(lengths) // cp * (wide + call.layer.sections["v"]) * (cp - 1) // cp
        for answer in answers(call, Choices(thd_all_to_all=form), 1, cp):
            assert answer.traffic["cp"].calls == {"all_to_all": 2 * calls}, "backward mirrors"
            assert answer.traffic["cp"].sent_bytes == {"all_to_all": 2 * sent_bytes}, (lengths, form)
            assert not answer.traffic["tp"].calls, (lengths, form)


def test_batched_layer_exchanges_once_each_way() -> None:
    for answer in answers(CALLS["batched"], Choices(thd_all_to_all="per_sequence"), 1, 2):
        assert answer.traffic["cp"].calls == {"all_to_all": 4}


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_collectives_are_those_of_the_design(sp: object) -> None:
    call = Call()
    nbytes = 4 * sum(call.lengths) * call.layer.hidden
    for answer in answers(call, tp=2, sp=bool(sp)):
        if sp:
            assert answer.traffic["tp"].calls == {"all_gather": 2, "reduce_scatter": 2}
            assert answer.traffic["tp"].sent_bytes == {"all_gather": nbytes, "reduce_scatter": nbytes}
        else:
            assert answer.traffic["tp"].calls == {"all_reduce": 2}
        assert not answer.traffic["cp"].calls


def test_one_rank_says_nothing() -> None:
    (alone,) = answers(Call())
    assert not alone.traffic["tp"].calls and not alone.traffic["cp"].calls
