"""Padding stands at the end of each sequence, is undone to the bit, and takes no gradient."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracles import parallel
from oracles.parallel import pad, padded_lengths, unpad

# Padding


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    cp=st.integers(1, 64),
    more=st.integers(0, 2),
    middle=st.sampled_from(((), (2,))),
)
@example(lengths=[0, 0], cp=2, more=0, middle=())
@example(lengths=[0, 9], cp=2, more=1, middle=())
def test_padding_is_undone_and_stands_at_the_end(lengths: list[int], cp: int, more: int, middle: tuple[int, ...]) -> None:
    least = padded_lengths(lengths, 2 * cp)
    assert all(padded % (2 * cp) == 0 and 0 <= padded - length < 2 * cp for padded, length in zip(least, lengths, strict=True))
    padded = [length + 2 * cp * more for length in least]
    x = torch.arange(1, sum(lengths) * torch.Size(middle).numel() + 1).reshape(-1, *middle)
    wide = pad(x, lengths, padded)
    assert wide.shape == (sum(padded), *middle)
    for real, part in zip(x.split(lengths), wide.split(padded), strict=True):
        assert torch.equal(part[: len(real)], real)
        assert not part[len(real) :].any()
    assert torch.equal(unpad(wide, lengths, padded), x)
    pads = parallel.pad_tokens(lengths, padded)
    assert torch.equal(unpad(wide.index_fill(0, pads, -1), lengths, padded), x)
    assert sorted([*pads.tolist(), *parallel.real_tokens(lengths, padded).tolist()]) == list(range(sum(padded)))
    parallel.zigzag(padded, cp)


def test_gradients_pass_through_padding_to_real_tokens_only() -> None:
    lengths, padded = [3, 0, 5], [4, 4, 8]
    x = torch.zeros(8, 2, dtype=torch.float64, requires_grad=True)
    cotangent = torch.arange(1.0, 33.0, dtype=torch.float64).reshape(16, 2)
    (dx,) = torch.autograd.grad(pad(x, lengths, padded), x, cotangent)
    assert torch.equal(dx, cotangent[[0, 1, 2, 8, 9, 10, 11, 12]])
    wide = torch.zeros(16, 2, dtype=torch.float64, requires_grad=True)
    (dwide,) = torch.autograd.grad(unpad(wide, lengths, padded), wide, dx)
    assert torch.equal(dwide[[0, 1, 2, 8, 9, 10, 11, 12]], dx)
    assert not dwide[[3, 4, 5, 6, 7, 13, 14, 15]].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_read_as_lengths(dtype: torch.dtype) -> None:
    assert parallel.lengths_of(torch.tensor([0, 3, 3, 7], dtype=dtype), 7) == [3, 0, 4]
