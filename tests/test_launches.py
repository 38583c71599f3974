"""Launches: the first kernel that makes other numbers of the same ones is told, and those that only pass them on are not."""

import math

import pytest
import torch

from benchmarks.launches import APART, Launch, distance, parted


def call(*wrong: str, given: float = 1.0) -> list[Launch]:
    """Three launches, each of which reads what the one before wrote; some are off by a tenth from then on."""
    launches, x = [], torch.full((4,), given)
    for name in ("gate", "scores", "output"):
        y = 2.0 * x * (1.1 if name in wrong else 1.0)
        launches.append(Launch(name, {"num_warps": 4}, {"x": x}, {"y": y}))
        x = y
    return launches


@pytest.mark.parametrize(
    ("wrong", "told"), [((), []), (("scores",), ["launch 1, scores"]), (("gate", "output"), ["launch 0, gate"])]
)
def test_the_launch_that_parts_is_told(wrong: tuple[str, ...], told: list[str]) -> None:
    for apart in (0.0, APART):
        found = list(parted(call(*wrong), call(), apart))
        assert [line.partition(" num_warps")[0] for line in found] == told
    assert all("y by 0.1 of its norm" in line for line in found)


def test_what_rounding_makes_is_no_launch_at_fault() -> None:
    one, other = call(), call()
    other[1].wrote["y"] *= 1.0 + 2.0**-9
    assert list(parted(one, other, APART)) == []
    assert len(list(parted(one, other, 0.0))) == 1


def test_another_kernel_ends_the_comparison() -> None:
    one, other = call(), call()
    other[1] = Launch("merged", {}, {}, {})
    assert list(parted(one, other, 0.0)) == ["launch 1: scores here, merged there"]


def test_numbers_that_are_none_lie_apart() -> None:
    one, other = call(), call()
    one[2].wrote["y"][0] = torch.nan
    (told,) = parted(one, other, APART)
    assert told.endswith("y by nan of its norm")
    assert distance(torch.zeros(3), torch.zeros(2)) == 0.0
    assert math.isclose(distance(torch.full((3,), 3.0), torch.full((3,), 2.0)), 0.5)
    assert distance(torch.ones(1), torch.zeros(1)) == 1.0
