"""Batches of more sequences and heads than CUDA launches programs along the second and third axis of a grid."""

import dataclasses
import pathlib

import pytest

from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.drawing import MANY, MANY_OF_A_KEY, MANY_ROWS, MOST_ROWS, crowd, limits
from properties.rules.laws import LAWS
from properties.words.domain import Drawing
from properties.words.example import Example
from properties.words.lengths import MEAN
from properties.words.sizes import CROWD, MANY_EACH, MANY_SEQUENCES, MOST, THREE_EACH, places, sized
from verify.adapters import loader
from verify.engine.drawing import of_law
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.messages import RunOne
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.process.worker import Worker

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "own_triton_kernel.py"
SIZED = sized(Domain(key_dims=(1, 128), value_dims=(1, 256), backward=False), None, MOST["interpreted"])


def drawn(domain: Domain, count: int) -> list[Case]:
    examples: list[Example] = []
    of_law(LAWS["oracle"], domain, 0, count, examples.append)
    return [example.case for example in examples]


def test_a_check_draws_such_a_batch_once_and_with_every_seed_at_one_place() -> None:
    for count in [20, 128]:
        cases = drawn(SIZED, count)
        assert cases.count(crowd(SIZED)) == 1, count
        assert cases[min(places(count, SIZED.drawing.long)) + 1] == crowd(SIZED), count
        assert len(cases) == count, count


def test_the_backward_of_such_a_batch_has_no_tolerances() -> None:
    """They would take over a minute and 5 GB."""
    domain = dataclasses.replace(SIZED, backward=True)
    case = crowd(domain)
    assert case is not None
    assert case.backward
    oracle = [one for one in limits(domain) if one.lengths == case.lengths]
    assert oracle == [dataclasses.replace(case, backward=False)]
    assert LAWS["pure"].always(domain) == [Example(case)]
    assert LAWS["pure"].always(SIZED) == []
    wrong = "tests/wrong_corners.py:BackwardOnTheSecondAxis"
    assert execute(Run("pure", wrong, Example(case))).verdict is Verdict.BROKEN
    assert execute(Run("pure", wrong, Example(dataclasses.replace(case, backward=False)))).verdict is Verdict.HOLDS
    assert execute(Run("pure", "zoo/Recomputes", Example(case))).verdict is Verdict.HOLDS


def test_each_usual_limit_is_passed_once_and_by_little() -> None:
    cases = drawn(SIZED, 128)
    assert [cases.count(case) for case in limits(SIZED)] == [1] * 25
    _, many, mean, one, step, heads, three, seventeen, ratio, six, eleven, small, batch, largest, stateless, *runs = limits(SIZED)
    runs, two = runs[:4], runs[4:]
    some = [case for case in runs if case.beta != "runs"]
    words = (small.lengths, small.packed, small.heads, small.value_heads, small.values, small.qk_norm)
    assert words == ((1, 1), False, 1, 2, "small", True)
    assert {case.state for case in limits(SIZED) if case not in (stateless, *some)} == {"random"}
    assert [(case.value_heads, case.heads, case.tokens) for case in (six, eleven)] == [(6, 1, 3), (11, 1, 3)]
    assert [case.state for case in (stateless, *some)] == ["none", "some", "some"]
    assert [(case.seed, case.gate, case.beta) for case in runs] == [
        (0, "runs", "runs"),
        (0, "64", "ordinary"),
        (1, "runs", "runs"),
        (1, "64", "ordinary"),
    ]
    assert {(case.lengths, case.packed) for case in some} == {((3, 2, 3), True)}
    assert (len(stateless.lengths), stateless.packed, stateless.backward) == (MOST_ROWS, True, False)
    assert [case.in_kernel for case in limits(dataclasses.replace(SIZED, in_kernel=("none", "gate", "both")))[5:9]] == [
        "none",
        "none",
        "none",
        "both",
    ]
    assert limits(dataclasses.replace(SIZED, initial_state=False))[0].state == "none"
    assert (len(many.lengths), many.packed, {*many.lengths}) == (MANY_SEQUENCES, True, {1, 2, 3})
    assert (mean.lengths, mean.packed) == (MEAN, True)
    assert [(case.lengths, case.packed) for case in (one, step)] == [((0, 1, 0), True), ((0, 3, 0), True)]
    assert [(case.heads, case.value_heads, case.tokens) for case in (heads, three, seventeen, ratio)] == [
        (MANY, MANY, 3),
        (*THREE_EACH, 3),
        (*MANY_EACH, 3),
        (1, MANY_OF_A_KEY, 3),
    ]
    assert (len(batch.lengths), batch.packed, batch.backward) == (MANY_ROWS, False, SIZED.backward)
    assert (len(largest.lengths), largest.packed, largest.backward) == (MOST_ROWS, False, False)
    sizes = [(len(case.lengths), case.tokens, case.value_heads, case.key_dim, case.value_dim) for case in two]
    assert sizes == [
        (41, 520, 1, 33, 1),
        (133, 133, 1, 1, 129),
        (1, 130, 65, 1, 1),
        (1, 3, 65, 1, 129),
        (3, 192, 1, 1, 1),
        (1, 0, 2, 1, 1),
    ]
    dense = limits(dataclasses.replace(SIZED, packed=False, grouped_heads=False))
    alone = dataclasses.replace(stateless, packed=False)
    assert dense[1:] == [heads, dataclasses.replace(small, value_heads=1), batch, largest, alone, *runs[::2], *two[1:4]]
    short = limits(dataclasses.replace(SIZED, longest=1))
    counts = [65, MANY_SEQUENCES, 3, *[1] * 6, 2, MANY_ROWS, MOST_ROWS, MOST_ROWS, 1, 3, 1, 3, 41, 133, 1, 1, 3, 1]
    assert [len(case.lengths) for case in short] == counts
    assert limits(dataclasses.replace(SIZED, length_step=16))[3].heads == MANY, "one token is no multiple of 16"
    assert limits(Domain()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "number"), [("At1024Sequences", 1), ("At1024States", 1), ("At256Heads", 5)])
def test_a_kernel_that_stops_at_a_limit_is_broken_by_that_case_alone(wrong: str, number: int, worker: Worker) -> None:
    spec = f"{pathlib.Path(__file__).parents[1] / 'wrong_limits.py'}:{wrong}"
    below = [
        dataclasses.replace(PACKED, lengths=(1,) * 1024),
        dataclasses.replace(PACKED, lengths=(3,), heads=256, value_heads=256),
    ]
    verdicts = [
        Outcome.from_json(worker.ask(RunOne(f"law=oracle adapter={spec} {case}"))).verdict
        for case in (limits(dataclasses.replace(SIZED, backward=False))[number], *below)
    ]
    assert verdicts == [Verdict.BROKEN, Verdict.HOLDS, Verdict.HOLDS]


@pytest.mark.slow
def test_a_wrong_number_of_a_head_in_the_gate_is_broken_by_the_case_with_gates_in_the_kernel(worker: Worker) -> None:
    spec = f"{pathlib.Path(__file__).parents[1] / 'wrong_limits.py'}:SpeedsOf256Heads"
    given, computed = limits(dataclasses.replace(SIZED, in_kernel=("none", "both")))[5:9:3]
    below = dataclasses.replace(computed, heads=256, value_heads=256)
    outcomes = [Outcome.from_json(worker.ask(RunOne(f"law=oracle adapter={spec} {case}"))) for case in (given, computed, below)]
    assert [outcome.verdict for outcome in outcomes] == [Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS]


PACKED = Case((1,), packed=True, key_dim=1, value_dim=1, gate="64", backward=False)


def test_the_batch_is_as_small_as_the_domain_allows() -> None:
    case = crowd(SIZED)
    assert case is not None
    assert len(case.lengths) * case.value_heads > 65_535
    assert (case.lengths, case.value_heads, case.key_dim, case.value_dim) == ((1,) * CROWD[0], CROWD[1], 2, 1)
    one_key = crowd(dataclasses.replace(SIZED, key_widths=(1, 128), key_dims=Domain.key_dims))
    assert one_key is not None
    assert one_key.key_dim == 1
    narrow = crowd(dataclasses.replace(SIZED, key_dims=(16, 64), value_dims=(20, 64), width_step=4, equal_widths=True))
    assert narrow is not None
    assert (narrow.key_dim, narrow.value_dim) == (20, 20)
    assert SIZED.outside(case) is None


def test_what_a_domain_excludes_is_not_drawn() -> None:
    for without in [
        {"drawing": Drawing(long=0)},
        {"drawing": dataclasses.replace(SIZED.drawing, reach=4)},
        {"batched": False},
        {"batch_heads": 65_535},
        {"key_dims": (128, 128)},
    ]:
        assert crowd(dataclasses.replace(SIZED, **without)) is None, without  # type: ignore[arg-type]


def test_in_kernel_gates_alone_and_each_operation_have_such_a_batch() -> None:
    narrow = dataclasses.replace(SIZED, key_dims=Domain.key_dims, key_widths=(4, 8))
    for domain in (
        dataclasses.replace(SIZED, in_kernel=("both",), decays=("linear",)),
        dataclasses.replace(narrow, final_dtype="input"),
        dataclasses.replace(narrow, value_dims=Domain.value_dims, value_widths=(8,), equal_widths=True),
        dataclasses.replace(SIZED, operation="kda", in_kernel=("gate",), lower_bounds=("-5",), parameter_dtypes=("input",)),
        dataclasses.replace(SIZED, operation="kda", scales=("one",), decays=("linear",)),
        dataclasses.replace(SIZED, operation="delta_rule", dtypes=("bf16",), gate_dtypes=("input",)),
    ):
        case = crowd(domain)
        assert case is not None
        assert domain.outside(case) is None


def test_more_heads_than_a_domain_promises_are_outside() -> None:
    domain = Domain(batch_heads=512)
    assert domain.outside(Case((1,) * 128, value_heads=4)) is None
    assert "batch_heads=512" in str(domain.outside(Case((1,) * 129, value_heads=4)))
    assert domain.outside(Case((1,) * 129, value_heads=4, packed=True)) is None
    with pytest.raises(ValueError, match="batch_heads must be None or at least 512, because laws call batches of as many, got 12"):
        Domain(batch_heads=12)


def test_chunk_kernels_have_a_limit() -> None:
    for name in ["fla/chunk", "fla/chunk_16", "fla/chunk_v_first", "fla/chunk_kda", "fla/chunk_delta_rule"]:
        assert loader.load(name).domain.batch_heads == 65_535, name


@pytest.mark.interpreted
@pytest.mark.slow
def test_a_grid_that_cuda_does_not_launch_is_found_and_the_same_kernel_along_another_axis_holds(tmp_path: pathlib.Path) -> None:
    source, wrong = EXAMPLE.read_text(), tmp_path / "crowded_along_y.py"
    for right, axes in (
        (
            "tl.program_id(0) // HV, tl.program_id(0) % HV, tl.program_id(1)",
            "tl.program_id(1) // HV, tl.program_id(1) % HV, tl.program_id(0)",
        ),
        ("sequences * value_heads, triton.cdiv(value_dim, block)", "triton.cdiv(value_dim, block), sequences * value_heads"),
    ):
        assert right in source
        source = source.replace(right, axes)
    wrong.write_text(source)
    case = crowd(SIZED)
    with Worker(300.0) as worker:

        def ask(place: pathlib.Path, case: Case) -> Outcome:
            return Outcome.from_json(worker.ask(RunOne(f"law=oracle adapter={place}:MyKernel {case}")))

        assert case is not None
        assert ask(EXAMPLE, case).verdict is Verdict.HOLDS
        assert ask(wrong, dataclasses.replace(case, lengths=(1, 1))).verdict is Verdict.HOLDS
        outcome = ask(wrong, case)
    assert outcome.verdict is Verdict.BROKEN
    (finding,) = outcome.findings
    assert finding.kind is FailureKind.RAISED
    assert "the grid of the kernel gated_delta_rule_kernel is (1, 66560, 1)" in finding.what + finding.detail
