"""Every rank refuses an illegal call in the same words, before it communicates."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.faults import not_refused
from tests.gdn_calls import Call, make
from verify.adapters.gdn.layer import CHOICES, Choices, GatedDeltaNet
from verify.ranks.collectives import Alone, Place, simulate

# What is refused


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


TWO_AND_TWO = (2, True, 2)
ILLEGAL: dict[str, tuple[tuple[int, bool, int], dict[str, Any], str]] = {
    "half a zigzag": (
        (1, False, 2),
        {"tokens": 6, "cu_seqlens": offsets(0, 2, 12)},
        "cu_seqlens must have sequences of a multiple of 2 * cp = 4 tokens, got 2 ([2, 10])",
    ),
    "half a zigzag, padded": (
        (1, False, 2),
        {"tokens": 6, "cu_seqlens": offsets(0, 1, 9), "cu_seqlens_padded": offsets(0, 2, 12)},
        "cu_seqlens_padded must have sequences of a multiple of 2 * cp = 4 tokens, got 2 ([2, 10])",
    ),
    "half a zigzag, batched": (
        (1, False, 2),
        {"tokens": 3},
        "hidden must have sequences of a multiple of 2 * cp = 4 tokens, got 6 ([6])",
    ),
    "totals disagree": (
        TWO_AND_TWO,
        {"tokens": 3, "cu_seqlens": offsets(0, 8, 16)},
        "cu_seqlens must add up to the 12 tokens of all ranks, got 16",
    ),
    "real tokens for padded ones": (
        (1, False, 2),
        {"tokens": 8, "cu_seqlens": offsets(0, 4, 12)},
        "cu_seqlens must add up to the 16 tokens of all ranks, got 12",
    ),
    "sequence parallelism cannot cut": (
        (3, True, 2),
        {"tokens": 4, "cu_seqlens": offsets(0, 4, 8)},
        "cu_seqlens must give every CP rank a multiple of tp = 3 tokens to cut, got 4",
    ),
    "decreasing": (
        TWO_AND_TWO,
        {"cu_seqlens": offsets(0, 12, 8)},
        "cu_seqlens must start at 0, have two entries or more and not decrease, got [0, 12, 8]",
    ),
    "not from 0": (TWO_AND_TWO, {"cu_seqlens": offsets(4, 8)}, "cu_seqlens must start at 0, have two entries or more"),
    "no sequence": (TWO_AND_TWO, {"cu_seqlens": offsets(0)}, "cu_seqlens must start at 0, have two entries or more"),
    "float offsets": (
        TWO_AND_TWO,
        {"cu_seqlens": offsets(0, 8, dtype=torch.float32)},
        "cu_seqlens must be a vector of int32 or int64, got torch.float32 of shape (2,)",
    ),
    "no tensor": (TWO_AND_TWO, {"cu_seqlens": [0, 8]}, "cu_seqlens must be a vector of int32 or int64, got [0, 8]"),
    "pads of other sequences": (
        TWO_AND_TWO,
        {"cu_seqlens": offsets(0, 8), "cu_seqlens_padded": offsets(0, 4, 8)},
        "cu_seqlens_padded must hold the sequences of cu_seqlens [8], got [4, 4]",
    ),
    "pads less than nothing": (
        TWO_AND_TWO,
        {"cu_seqlens": offsets(0, 6, 8), "cu_seqlens_padded": offsets(0, 4, 8)},
        "cu_seqlens_padded must hold the sequences of cu_seqlens [6, 2], got [4, 4]",
    ),
    "pads alone": (TWO_AND_TWO, {"cu_seqlens_padded": offsets(0, 8)}, "cu_seqlens_padded needs cu_seqlens, got it alone"),
    "packed batch": (
        TWO_AND_TWO,
        {"batch": 2, "cu_seqlens": offsets(0, 8)},
        "hidden must have batch 1 with cu_seqlens, got shape (2, 2, 6)",
    ),
    "another dtype": (TWO_AND_TWO, {"dtype": torch.float64}, "hidden must be torch.float32, got torch.float64"),
    "another width": (TWO_AND_TWO, {"width": 5}, "hidden must be [tokens, batch, 6], got shape (2, 1, 5)"),
}


def test_illegal_layouts_are_refused_alike_before_any_communication() -> None:
    layer = dataclasses.replace(Call().layer, heads=12, value_heads=12)

    def refusal(place: Place, case: dict[str, Any], *, sp: bool) -> str:
        module = GatedDeltaNet(layer, place, Choices(), sequence_parallel=sp, dtype=torch.float32, conv_bias=True)
        hidden = torch.zeros(case.get("tokens", 2), case.get("batch", 1), case.get("width", 6), dtype=case.get("dtype"))
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared below
            module(hidden, case.get("cu_seqlens"), case.get("cu_seqlens_padded"))
        assert not place.tp.traffic.calls and not place.cp.traffic.calls
        return str(refused.value)

    for name, ((tp, sp, cp), case, message) in ILLEGAL.items():
        messages = simulate(tp, cp, functools.partial(refusal, case=case, sp=sp))
        assert len(set(messages)) == 1, (name, messages)
        assert str(messages[0]).startswith(message), name


def test_heads_that_do_not_divide_and_dtypes_are_refused_alike() -> None:
    call = Call()

    def work(place: Place) -> None:
        with pytest.raises(ValueError, match=r"^heads must be a multiple of tp \* cp = 2 \* 3, got 4$"):
            make(call, place)

    assert simulate(2, 3, work) == [None] * 6
    with pytest.raises(ValueError, match=r"dtype must be one of torch.float32, .*, got torch.float64"):
        make(call, Place(Alone(), Alone()), dtype=torch.float64)


def test_unknown_choices_are_refused() -> None:
    patterns = ((name, f"{name} must be one of .*, got 'triton'") for name in CHOICES)
    assert not_refused(lambda name: Choices(**{name: "triton"}), patterns) == []
