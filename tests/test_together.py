"""Bounds of several cases at once: each case has its own truth, bit by bit nearly, and a bound of its own size."""

import dataclasses

import pytest

from oracles.bound import Bound, bounds
from oracles.case import Case
from properties.domain import Domain
from properties.strategies import Example, cases
from verify.adapter import Adapter
from verify.check import seeded
from verify.judge import Verdict
from verify.run import Run, adapter_of, execute
from verify.together import MOST, TOKENS, together

RIGHT = "tests/right.py:Chunkwise"


def runs_of(*several: Case, law: str = "oracle", adapter: str = RIGHT) -> list[Run]:
    return [Run(law, adapter, Example(case)) for case in several]


def alike(**words: object) -> list[Case]:
    """A batch, packed sequences, an empty one and some that repeat a length, of one kind."""
    shared = {"heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 4, "state": "random", "gate": "10", **words}
    kinds = (
        {"lengths": (70, 70)},
        {"lengths": (3, 0, 66), "packed": True},
        {"lengths": (17,), "seed": 7},
        {"lengths": (64, 65, 2, 2), "packed": True, "offsets": "int32", "values": "correlated"},
    )
    return [Case(**{**shared, **kind}) for kind in kinds]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"dtype": "bf16", "qk_norm": True},
        {"operation": "kda", "dtype": "fp16"},
        {"operation": "delta_rule", "gate": "forever", "state": "none"},
        {"in_kernel": "beta", "backward": False},
    ],
    ids=str,
)
def test_each_case_has_its_own_truth_and_a_bound_of_its_size(words: dict[str, object]) -> None:
    several = alike(**words)
    ready = together(runs_of(*several))
    for case, make in zip(several, ready, strict=True):
        assert make is not None
        got = make("chunkwise")
        adapter = adapter_of(RIGHT)
        assert isinstance(adapter, Adapter)
        want = bounds(case.spec, case.inputs(), case.cotangents() if case.backward else None, "chunkwise", chunk=adapter.chunk)
        assert got.keys() == want.keys()
        for name, one in want.items():
            both = got[name]
            assert (both.value.shape, both.allowed.shape) == (one.value.shape, one.allowed.shape)
            if one.value.numel():
                assert (both.value - one.value).norm() <= 1e-12 * one.value.norm() + 1e-30, name
                assert both.finer is not None
                assert one.finer is not None
                ratio = (both.finer().allowed.square().mean() / one.finer().allowed.square().mean()).sqrt()
                assert 1 / 2 < ratio < 2, (name, float(ratio))  # 64 runs each, on other grids


def test_a_finer_bound_is_the_cases_own() -> None:
    several = alike(dtype="bf16")
    for case, make in zip(several, together(runs_of(*several)), strict=True):
        assert make is not None
        for name, each in make("chunkwise").items():
            assert each.finer is not None
            finer = each.finer()
            assert (finer.value - each.value).norm() <= 1e-12 * each.value.norm() + 1e-30, (case, name)
            assert finer.allowed.shape == each.allowed.shape


def test_only_what_is_alike_shares_a_call() -> None:
    case = Case(lengths=(20,), gate="10")
    others = [
        dataclasses.replace(case, **{name: value})  # type: ignore[arg-type]
        for name, value in {
            "scale": "one",
            "dtype": "bf16",
            "qk_norm": True,
            "state": "zero",
            "backward": False,
            "key_dim": 8,
        }.items()
    ]
    assert together(runs_of(case, *others)) == [None] * 7
    assert together(runs_of(case)) == [None]
    shared = together(runs_of(case, others[0], dataclasses.replace(case, seed=3)))
    assert [each is not None for each in shared] == [True, False, True]
    assert together(runs_of(*[dataclasses.replace(case, in_kernel="gate", seed=seed) for seed in (1, 2)])) == [None, None]
    assert together([Run("cut", RIGHT, Example(dataclasses.replace(case, seed=seed), at=4)) for seed in (1, 2)]) == [None, None]


def test_calls_are_no_larger_than_they_may_be() -> None:
    many = [Case(lengths=(5,), seed=seed) for seed in range(MOST + 2)]
    made = together(runs_of(*many))
    assert all(made)
    calls = [make.func.__self__ for make in made]  # type: ignore[union-attr]
    assert [len({id(call): call for call in calls}), len(calls[0].cases), len(calls[-1].cases)] == [2, MOST, 2]
    long = [Case(lengths=(TOKENS // 2 + 1,), seed=seed) for seed in range(2)]
    assert together(runs_of(*long)) == [None, None]


def test_a_wrong_implementation_is_seen_whoever_shares_its_call() -> None:
    """And a right one is not blamed: of the cases only those over their bound are broken, which are asked alone again."""
    examples: list[Example] = []
    one_kind = {
        "groups": ((1, 2),),
        "key_dim": 8,
        "value_dim": 8,
        "dtype": "fp32",
        "scale": "default",
        "qk_norm": False,
        "state": "random",
    }
    seeded(cases(Domain(), gate="64", values="ordinary", gate_dtype="fp32", **one_kind).map(Example), 3, 12, examples.append)
    for adapter, broken in ((RIGHT, False), ("zoo/DecayOneTokenEarly", True)):
        runs = [Run("oracle", adapter, example) for example in examples]
        ready = together(runs)
        assert sum(make is not None for make in ready) >= 10
        apart = [execute(run).verdict for run in runs]
        assert [execute(run, make).verdict for run, make in zip(runs, ready, strict=True)] == apart
        assert (Verdict.BROKEN in apart) == broken


def test_a_bound_of_another_case_would_be_noticed() -> None:
    """The planted fault: rows of a call handed out one case too far."""
    several = [Case(lengths=(20,), gate="10", seed=seed) for seed in range(3)]
    ready = together(runs_of(*several))
    shifted: list[dict[str, Bound]] = [make("chunkwise") for make in ready[1:] if make is not None]
    verdicts = [execute(run, lambda _, bound=bound: bound).verdict for run, bound in zip(runs_of(*several), shifted, strict=False)]
    assert verdicts == [Verdict.BROKEN] * 2
