"""The layer under test equals the oracle on every mesh and in every choice, and wrong layers do not."""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import parallel
from oracles.layer import GDN_LAYER, Layer
from tests.gdn_calls import CALLS, Answer, Call, answers, bits, cut, joined, limits, make, ratio
from tests.judging import worst
from tests.wrong_gdn_layer import TELLS_REPLICAS_APART, WRONG
from verify.adapters.gdn.layer import CHOICES, Choices
from verify.ranks.collectives import Alone, Place, simulate

# It equals the oracle


MESHES = [(1, False, 1), (2, False, 1), (2, True, 1), (4, True, 1), (1, False, 2), (1, False, 4), (2, False, 2), (2, True, 2)]


@pytest.mark.slow
def test_layer_equals_the_oracle_on_every_mesh() -> None:
    for (tp, sp, cp), (name, call) in itertools.product(MESHES, CALLS.items()):
        over, where = ratio(call, tp=tp, cp=cp, sp=sp)
        assert over < 1.0, (name, tp, sp, cp, where)


def test_half_precision_layer_equals_the_oracle() -> None:
    for (tp, sp, cp), dtype in itertools.product([(1, False, 1), (2, True, 2)], [torch.bfloat16, torch.float16]):
        over, where = ratio(Call(dtype=dtype, seed=4), tp=tp, cp=cp, sp=sp)
        assert over < 1.0, (dtype, tp, sp, cp, where)


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.slow
def test_drawn_calls_equal_the_oracle(data: st.DataObject) -> None:
    tp, cp = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (3, 1)]))
    sp = data.draw(st.booleans())
    heads = tp * cp * data.draw(st.integers(1, 2))
    layer = Layer(
        hidden=data.draw(st.integers(1, 6)),
        heads=heads,
        value_heads=heads * data.draw(st.sampled_from([1, 2])),
        key_dim=data.draw(st.integers(1, 5)),
        value_dim=data.draw(st.integers(1, 5)),
        conv_width=data.draw(st.integers(1, 5)),
    )
    multiple = (2 if cp > 1 else 1) * cp * (tp if sp else 1)
    packed = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)) if packed else [data.draw(st.integers(1, 5))] * 2
    call = Call(
        layer,
        tuple(multiple * length for length in lengths),
        packed=packed,
        pads=data.draw(st.integers(0, 3)) if packed else 0,
        bias=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    choices = Choices(
        qk_norm=data.draw(st.sampled_from(CHOICES["qk_norm"])),
        thd_all_to_all=data.draw(st.sampled_from(CHOICES["thd_all_to_all"])),
        deterministic=data.draw(st.booleans()),
    )
    over, where = ratio(call, choices, tp, cp, sp=sp)
    assert over < 1.0, (call, choices, where)


def test_pad_tokens_change_nothing_before_them() -> None:
    """Padded offsets win, and pads stand at the ends: real tokens' y is that of the sequences without pads."""
    padded = Call(lengths=(8, 0, 24, 16), pads=3)
    (whole,) = answers(padded)
    real = parallel.real_tokens([max(length - 3, 0) for length in padded.lengths], padded.lengths)
    short = dataclasses.replace(padded, lengths=tuple(max(length - 3, 0) for length in padded.lengths), pads=0)
    module = make(short, Place(Alone(), Alone()))
    module.load(cut(module, padded.weights()))
    y = module(padded.hidden()[real], short.offsets()).detach()
    assert torch.allclose(y, whole.y[real], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(whole.y.roll(-3, 0)[real], whole.y[real], rtol=1e-2, atol=1e-2)


# Before equals after


TORCH = [
    Choices(qk_norm=norm, thd_all_to_all=form, deterministic=deterministic)
    for norm, form, deterministic in itertools.product(*(CHOICES[name] for name in ("qk_norm", "thd_all_to_all", "deterministic")))
]


def same_bits(one: list[Answer], two: list[Answer]) -> bool:
    return all(
        torch.equal(bits(got), bits(want))
        for a, b in zip(one, two, strict=True)
        for got, want in zip((a.y, a.hidden, *a.gradients.values()), (b.y, b.hidden, *b.gradients.values()), strict=True)
    )


def test_every_choice_is_within_the_oracle_s_bound() -> None:
    for choices in TORCH:
        for name in ("packed", "batched"):
            over, where = ratio(CALLS[name], choices, 1, 2)
            assert over < 1.0, (name, where)


def test_fused_equals_per_sequence_bit_for_bit() -> None:
    for (tp, sp, cp), name in itertools.product([(1, False, 2), (1, False, 4), (2, True, 2)], ["packed", "padded"]):
        fused, per_sequence = (
            answers(CALLS[name], Choices(thd_all_to_all=form), tp, cp, sp=sp) for form in ("fused", "per_sequence")
        )
        assert same_bits(fused, per_sequence), (name, tp, sp, cp)
        assert not same_bits(fused, answers(dataclasses.replace(CALLS[name], seed=9), Choices(), tp, cp, sp=sp))


def test_two_calls_give_the_same_bits() -> None:
    assert same_bits(answers(CALLS["packed"], tp=2, cp=2), answers(CALLS["packed"], tp=2, cp=2))


def test_deterministic_layer_adds_nothing_by_index() -> None:
    """What goes back by index_add is atomic on a GPU; a CPU would not show it."""

    def nodes(choices: Choices, place: Place) -> set[str]:
        module = make(CALLS["packed"], place, choices)
        hidden = CALLS["packed"].hidden()[: 48 // place.cp.size].requires_grad_()
        seen, left = set(), [module(hidden, CALLS["packed"].offsets()).grad_fn]
        while left:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                left += [successor for successor, _ in node.next_functions]
        return {node.name() for node in seen}

    for form in CHOICES["thd_all_to_all"]:
        for choices, adds in ((Choices(thd_all_to_all=form), False), (Choices(thd_all_to_all=form, deterministic=False), True)):
            for names in simulate(1, 2, functools.partial(nodes, choices)):
                assert isinstance(names, set), names
                assert len(names) > 20
                assert any("Index" in name and name != "IndexCopyBackward0" for name in names) == adds


def test_every_wrong_layer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (owner, attribute, wrong, (tp, sp, cp), case) in WRONG.items():
        call = CALLS[case]
        assert ratio(call, tp=tp, cp=cp, sp=sp)[0] < 1.0, name
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, wrong)
            found = answers(call, tp=tp, cp=cp, sp=sp)
            if name in TELLS_REPLICAS_APART:
                with pytest.raises(ValueError, match=r"replicas of .* must be equal bit for bit"):
                    joined(call, found, sp=sp)
            else:
                assert worst(GDN_LAYER, limits(call), joined(call, found, sp=sp))[0] > 10.0, name
