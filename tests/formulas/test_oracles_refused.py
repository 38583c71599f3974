"""The oracles refuse what they would broadcast, ignore or get wrong, and the message has the rule and the value."""

import math
import re
from typing import Any

import pytest
import torch

from oracles.rule import chunkwise
from oracles.rule.gated_delta import definition, merge, repeat_heads, transition
from tests.oracle_forms import packed
from tests.together import for_each


def test_gradient_of_a_gradient_is_refused() -> None:
    x = packed(3, 1, 1)
    (dq,) = torch.autograd.grad(chunkwise.delta_rule(*x, 0.7, [3])[0].square().sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@for_each(("heads", "value_heads"), [(2, 3), (0, 2), (4, 2)])
def test_heads_that_do_not_divide_are_refused(heads: int, value_heads: int) -> None:
    with pytest.raises(ValueError, match=f"^value_heads must be a multiple of heads {heads}, got {value_heads}$"):
        repeat_heads(torch.zeros(1, heads, 2), value_heads)


def test_a_state_changed_before_backward_is_refused() -> None:
    q, k, v, g, beta, state = packed(7, 2, 1)
    state.requires_grad_()
    start = state * 1.0
    o, _ = chunkwise.delta_rule(q, k, v, g, beta, start, 0.7, [3, 4])
    with torch.no_grad():
        start.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@for_each(("lengths", "text"), [([3, 3], "[3, 3]"), ([8], "[8]"), ([8, -1], "[8, -1]"), ([], "[]"), (7, "7")])
def test_lengths_that_do_not_add_up_are_refused(lengths: Any, text: str) -> None:
    rule = f"lengths must be whole numbers from 0 up that add up to the 7 tokens of k, got {text}"
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        chunkwise.delta_rule(*packed(7, len(lengths) if isinstance(lengths, list) else 1, 1), 0.7, lengths)


HEAD = {"q": (3, 2), "k": (3, 2), "v": (3, 4), "g": (3,), "beta": (3,), "state": (2, 4)}
OF_HEADS = {"q": (3, 1, 2), "k": (3, 1, 2), "v": (3, 2, 4), "g": (3, 2, 1), "beta": (3, 2), "state": (1, 2, 2, 4)}


@for_each(
    ("name", "shape", "message"),
    [
        ("state", (2, 1), "state must have shape (2, 4) for k of (3, 2), got (2, 1)"),
        ("beta", (3, 4), "beta must have shape (3,) for k of (3, 2), got (3, 4)"),
        ("g", (3, 1), "g must have shape (3, 2) for k of (3, 2), got (3, 1)"),
        ("q", (3, 1), "q must have shape (3, 2) for k of (3, 2), got (3, 1)"),
        ("v", (2, 4), "v must have shape (3, 4) for k of (3, 2), got (2, 4)"),
        ("k", (3, 2, 1), "k must be [T, K], got shape (3, 2, 1)"),
    ],
)
def test_the_definition_broadcasts_nothing(name: str, shape: tuple[int, ...], message: str) -> None:
    tensors = {argument: torch.ones(size, dtype=torch.float64) for argument, size in (HEAD | {name: shape}).items()}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        definition(**tensors, scale=1.0)
    if name in ("beta", "g", "v", "k"):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            transition(*(tensors[argument] for argument in ("k", "v", "g", "beta")))


@for_each(
    ("earlier", "later", "message"),
    [
        (((3, 3), (3, 2)), ((3, 3), (1, 2)), "later E must have shape (3, 2), got (1, 2)"),
        (((3, 3), (3, 2)), ((1, 3), (3, 2)), "later M must have shape (3, 3), got (1, 3)"),
        (((3, 1), (3, 2)), ((3, 3), (3, 2)), "M must have shape (3, 3), got (3, 1)"),
        (((3, 3), (3,)), ((3, 3), (3,)), "E must have shape (3,), got (3,)"),
    ],
)
def test_a_merge_broadcasts_nothing(earlier: Any, later: Any, message: str) -> None:
    one, other = (tuple(map(torch.ones, shapes)) for shapes in (earlier, later))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        merge(one, other)  # type: ignore[arg-type]


@for_each(
    ("changed", "message"),
    [
        ({"state": (2, 2, 2, 4)}, "state must have shape (1, 2, 2, 4) and be float64, got (2, 2, 2, 4) and torch.float64"),
        (
            {"v": (3, 3, 4), "g": (3, 3, 1), "beta": (3, 3), "k": (3, 2, 2), "q": (3, 2, 2), "state": (1, 3, 2, 4)},
            "HV must be a multiple of H = 2, got 3",
        ),
        ({"g": (3, 2, 3)}, "g must have shape (3, 2, 1) and be float64, got (3, 2, 3) and torch.float64"),
        ({"k": (3, 2)}, "k must be [T, H, K] and v [T, HV, V], got shapes (3, 2) and (3, 2, 4)"),
    ],
)
def test_chunks_broadcast_nothing(changed: dict[str, tuple[int, ...]], message: str) -> None:
    tensors = [torch.ones(size, dtype=torch.float64) for size in (OF_HEADS | changed).values()]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        chunkwise.delta_rule(*tensors, 1.0, [3])  # type: ignore[arg-type]


def test_chunks_are_of_float64_scaled_by_a_number_and_of_whole_lengths() -> None:
    tensors = [torch.ones(size, dtype=torch.float64) for size in OF_HEADS.values()]
    chunkwise.delta_rule(*tensors, 1.0, [3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^q must have shape \(3, 1, 2\) and be float64, got \(3, 1, 2\) and torch.float32$"):
        chunkwise.delta_rule(tensors[0].float(), *tensors[1:], 1.0, [3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^scale must be a finite number, got nan$"):
        chunkwise.delta_rule(*tensors, math.nan, [3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^lengths must be whole numbers from 0 up .*, got \[3.0\]$"):
        chunkwise.delta_rule(*tensors, 1.0, [3.0])  # type: ignore[arg-type, list-item]
    with pytest.raises(ValueError, match=r"^value_heads must be a whole number from 0 up, got 4.0$"):
        repeat_heads(tensors[0], 4.0)  # type: ignore[arg-type]


@for_each("chunk", [-1, 2.5, "64", None, True])
def test_a_chunk_that_is_no_number_of_tokens_is_refused(chunk: object) -> None:
    with pytest.raises(ValueError, match=f"^chunk must be a whole number from 0 up, got {re.escape(repr(chunk))}$"):
        chunkwise.delta_rule(*packed(7, 1, 1), 0.7, [7], chunk)  # type: ignore[arg-type]
