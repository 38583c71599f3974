"""The judge sees every row and every bit, and says in words where two tensors part."""

import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles.tolerance.bound import Bound
from properties.laws.law import Pair
from properties.rules.case import Case
from verify.bench.places import where as where_of
from verify.execution.judge import Judgement
from verify.execution.judge import judge as judge_where
from verify.process.outcome import FailureKind, Finding

PACKED = Case((0, 3, 0, 2, 0), packed=True, heads=1, value_heads=2)
BATCH = Case((4, 4), heads=2, value_heads=2)


def where(name: str, flat: int, shape: torch.Size, case: Case) -> str:
    return where_of(case, Pair(name, "", torch.empty(0), torch.empty(0)), flat, shape)


def judge(pairs: Iterable[Pair], case: Case) -> Judgement:
    return judge_where(pairs, functools.partial(where_of, case))


def bound(value: torch.Tensor, allowed: float = 0.5, *, scalar: bool = False) -> Bound:
    shape = value.shape if scalar else value.shape[:-1]
    return Bound(value.double(), torch.full(shape, allowed, dtype=torch.float64), "half, for a test")


def only(judgement: Judgement) -> Finding:
    (finding,) = judgement.findings
    return finding


def test_row_inside_its_bound_is_no_finding_and_has_a_ratio() -> None:
    want = torch.zeros(1, 5, 2, 3)
    got = want.clone()
    got[0, 1, 1] = torch.tensor([0.3, 0.0, 0.0])
    judgement = judge([Pair("o", "", got, bound(want))], PACKED)
    assert judgement.findings == []
    assert judgement.rows == 10
    assert judgement.ratios["o"] == pytest.approx(0.6)


def test_what_a_law_yields_is_judged_as_it_was_when_all_of_it_is_there() -> None:
    """Shapes that differ, no rows, bits, rows: findings stand in the order of the pairs, and rows and ratios are of all."""
    rows, same, none = torch.zeros(1, 5, 2, 3), torch.ones(4), torch.zeros(0, 3)
    over = rows.clone()
    over[0, 2, 0, 1] = 0.6
    pairs = [
        Pair("bits", "", same, same.clone()),
        Pair("o", "", over, bound(rows)),
        Pair("shape", "", same, torch.ones(5)),
        Pair("nothing", "", none, bound(none)),
        Pair("nobits", "", none, none),
        Pair("differ", "", same, 2.0 * same),
        Pair("within", "", rows, bound(rows)),
    ]
    judgement = judge(iter(pairs), PACKED)
    assert [finding.output for finding in judgement.findings] == ["o", "shape", "differ"]
    assert judgement.rows == 4 + 10 + 4 + 10
    assert judgement.ratios == {"bits": 0.0, "o": pytest.approx(1.2), "differ": math.inf, "within": 0.0}


CHANGES = {
    "equal again": lambda x: x.zero_(),
    "another error": lambda x: x.fill_(9.0),
    "another shape": lambda x: x.resize_(1),
    "no memory": lambda x: x.untyped_storage().resize_(0),
}


@pytest.mark.parametrize(
    ("change", "exact"),
    [*((change, False) for change in CHANGES), *((change, True) for change in CHANGES if change != "another error")],
)
def test_what_is_changed_after_it_was_returned_is_a_finding(change: str, *, exact: bool) -> None:
    want, got = torch.zeros(1, 5, 2, 3), torch.ones(1, 5, 2, 3)

    def pairs() -> Iterator[Pair]:
        yield Pair("o", "", got, want if exact else bound(want))
        CHANGES[change](got)
        yield Pair("final_state", "", want, bound(want))

    finding = only(judge(pairs(), PACKED))
    assert (finding.output, finding.kind) == ("o", FailureKind.INPUT_CHANGED)
    assert "was changed after the call had returned it" in finding.what


def test_what_stays_wrong_was_not_changed() -> None:
    want = torch.zeros(1, 5, 2, 3)
    for exact, bad in itertools.product([True, False], [math.nan, math.inf, 2.0]):
        finding = only(judge([Pair("o", "", torch.full_like(want, bad), want if exact else bound(want))], PACKED))
        assert finding.kind is not FailureKind.INPUT_CHANGED, (exact, bad)


def test_a_truth_that_is_not_finite_is_our_failure() -> None:
    for broken in [math.nan, math.inf, -math.inf]:
        value, allowed = torch.zeros(2, 3), torch.ones(2)
        value[1, 2] = broken
        with pytest.raises(ArithmeticError, match=r"^the truth of o is not finite"):
            judge([Pair("o", "", value.nan_to_num(), Bound(value.double(), allowed.double()))], PACKED)


@pytest.mark.parametrize("few", [False, True])
def test_rows_whose_tolerance_is_not_finite_are_not_judged_and_all_others_are(*, few: bool) -> None:
    """With `few`, only the tolerance of more runs is not finite."""
    for boundless, bad in itertools.product((math.nan, math.inf), (1e9, math.nan)):
        got, allowed = torch.zeros(1, 5, 2, 3), torch.ones(1, 5, 2)
        got[0, 2, 1] = bad
        allowed[0, 2, 1] = boundless
        limit = Bound(torch.zeros(got.shape).double(), allowed.double())
        if few:
            limit = Bound(limit.value, torch.ones(1, 5, 2).double(), finer=lambda _=None, limit=limit: limit, clear=math.inf)
        result = judge([Pair("o", "", got, limit)], PACKED)
        assert (result.findings, result.boundless, result.rows) == ([], ["o"], 9)
        got[0, 4, 0] = 1e9
        finding = only(judge([Pair("o", "", got, limit)], PACKED))
        assert (finding.output, finding.rows_over, finding.worst) == ("o", 1, "sequence 3, token 1, head 0"), finding
        got[0, 4, 0] = 0.0
        result = judge([Pair("o", "", got, limit), Pair("dq", "", got + 9, bound(torch.zeros(got.shape)))], PACKED)
        assert [finding.output for finding in result.findings] == ["dq"]


def test_row_of_small_errors_over_its_bound_is_found_by_its_norm() -> None:
    want = torch.zeros(1, 5, 2, 4)
    got = want.clone()
    got[0, 4, 0] = 0.26  # each element is under the bound, the row's norm 0.52 is not
    finding = only(judge([Pair("o", "", got, bound(want))], PACKED))
    assert (finding.rows, finding.rows_over) == (10, 1)
    assert finding.error == pytest.approx(0.52)
    assert finding.allowed == 0.5
    assert finding.origin == "half, for a test"
    assert finding.worst == finding.first == "sequence 3, token 1, head 0"
    assert finding.got == pytest.approx((0.26,) * 4)
    assert finding.want == (0.0,) * 4


def test_first_and_worst_row_are_both_named() -> None:
    want = torch.zeros(2, 4, 2, 1)
    got = want.clone()
    got[0, 2, 1], got[1, 3, 0], got[1, 3, 1] = 1.0, 3.0, 2.0
    finding = only(judge([Pair("o", "", got, bound(want))], BATCH))
    assert finding.first == "sequence 0, token 2, head 1"
    assert finding.worst == "sequence 1, token 3, head 0"
    assert finding.rows_over == 3
    assert finding.what == "is off by more than rounding explains"


def test_worst_is_by_error_over_allowance_and_not_by_error() -> None:
    want = torch.zeros(1, 4, 1, 1)
    allowed = torch.tensor([1.0, 1.0, 1e-9, 1.0]).reshape(1, 4, 1).double()
    got = torch.tensor([0.0, 50.0, 1e-6, 0.0]).reshape(1, 4, 1, 1)
    finding = only(judge([Pair("o", "", got, Bound(want.double(), allowed))], Case((4,))))
    assert finding.worst == "token 2, head 0"
    assert finding.first == "token 1, head 0"


def test_what_is_not_finite_is_over_every_bound() -> None:
    for scalar, bad in itertools.product([False, True], [math.nan, math.inf, -math.inf]):
        want = torch.zeros(1, 5, 2) if scalar else torch.zeros(1, 5, 2, 3)
        got = want.clone()
        got[(0, 3, 1) if scalar else (0, 3, 1, 2)] = bad
        judgement = judge([Pair("dg" if scalar else "o", "", got, bound(want, 1e300, scalar=scalar))], PACKED)
        finding = only(judgement)
        assert finding.what == "is not finite", (scalar, bad)
        assert finding.worst == "sequence 3, token 0, head 1", (scalar, bad)
        assert finding.rows_over == 1, (scalar, bad)
        assert judgement.ratios == {"dg" if scalar else "o": math.inf}, (scalar, bad)


def test_a_truth_beyond_the_range_of_a_dtype_rounds_to_infinity() -> None:
    for scalar, (dtype, truth, got, right) in itertools.product(
        [False, True],
        [
            (torch.float16, -75_682.8, -math.inf, True),
            (torch.float16, 65_520.0, math.inf, True),
            (torch.float16, 65_470.0, math.inf, True),  # within the tolerance of 65,520, which rounds to infinity
            (torch.float16, 65_410.0, math.inf, False),
            (torch.float16, 75_682.8, 65_504.0, False),
            (torch.float16, 75_682.8, -math.inf, False),
            (torch.float16, 75_682.8, math.nan, False),
            (torch.float16, 40_000.0, math.inf, False),
            (torch.float32, 75_682.8, math.inf, False),
            (torch.bfloat16, 75_682.8, math.inf, False),
        ],
    ):
        want = torch.zeros(1, 5, 2) if scalar else torch.zeros(1, 5, 2, 3)
        place = (0, 3, 1) if scalar else (0, 3, 1, 2)
        value, limit = want.to(dtype), bound(want, 100.0, scalar=scalar)
        value[place], limit.value[place] = got, truth
        judgement = judge([Pair("dg" if scalar else "o", "", value, limit)], PACKED)
        assert not judgement.findings if right else only(judgement).rows_over == 1, (scalar, dtype)


def test_a_right_infinity_hides_nothing_beside_it() -> None:
    want, got = (
        torch.tensor([70_000.0, 1.0, 0.0]).reshape(1, 1, 1, 3),
        torch.tensor([math.inf, 5.0, 0.0]).half().reshape(1, 1, 1, 3),
    )
    finding = only(judge([Pair("o", "", got, bound(want))], Case((1,))))
    assert (finding.kind, finding.error, finding.got) == (FailureKind.OFF, 4.0, (math.inf, 5.0, 0.0))

    def pairs() -> Iterator[Pair]:
        yield Pair("o", "", got, bound(want))
        got[..., 1] = 1.0
        yield Pair("final_state", "", want, bound(want))

    assert only(judge(pairs(), Case((1,)))).kind is FailureKind.INPUT_CHANGED


def test_bits_must_be_equal_though_zero_has_two_signs() -> None:
    want = torch.tensor([0.0, 1.0, -0.0]).reshape(1, 3, 1, 1)
    assert judge([Pair("o", "", -want * torch.tensor([1.0, -1.0, 1.0]).reshape(1, 3, 1, 1), want)], Case((3,))).findings == []
    moved = want.clone()
    moved[0, 1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    finding = only(judge([Pair("o", "", moved, want)], Case((3,))))
    assert finding.what == "differs, but must be equal to the bit"
    assert (finding.worst, finding.rows_over, finding.allowed) == ("token 1, head 0, channel 0", 1, 0.0)
    assert finding.error == pytest.approx(2**-23)


def test_nan_differs_from_nan_bit_for_bit() -> None:
    nan = torch.full((1, 2, 1, 1), math.nan)
    finding = only(judge([Pair("o", "", nan, nan)], Case((2,))))
    assert (finding.rows_over, finding.what) == (2, "is NaN, but must be equal to the bit")


def test_equal_infinities_are_equal_and_are_never_the_worst() -> None:
    want = torch.tensor([math.inf, 1.0]).reshape(1, 2, 1, 1)
    assert judge([Pair("o", "", want, want)], Case((2,))).findings == []
    got = torch.tensor([math.inf, 1.5]).reshape(1, 2, 1, 1)
    finding = only(judge([Pair("o", "", got, want)], Case((2,))))
    assert finding.worst == finding.first == "token 1, head 0, channel 0"
    assert finding.got[0] == 1.5


def test_shape_mismatch_is_a_finding_and_the_rest_is_judged() -> None:
    pairs = [Pair("o", "", torch.zeros(1, 4), torch.zeros(1, 5)), Pair("dq", "", torch.ones(2), torch.zeros(2))]
    judgement = judge(pairs, Case((5,)))
    assert [finding.output for finding in judgement.findings] == ["o", "dq"]
    assert judgement.findings[0].what == "has shape (1, 4), must have (1, 5)"
    assert judgement.findings[1].worst == "index 0"


def test_no_rows_are_counted_as_none() -> None:
    empty = torch.zeros(1, 0, 2, 3)
    judgement = judge([Pair("o", "", empty, empty), Pair("o", "", empty, bound(empty))], Case((0,)))
    assert (judgement.rows, judgement.findings, judgement.ratios) == (0, [], {})


def test_ratios_keep_the_worst_of_every_name() -> None:
    want = torch.zeros(1, 1, 1, 1)
    pairs = [
        Pair("o", detail, torch.full_like(want, error), bound(want))
        for detail, error in (("", 0.1), (", summed", 0.4), ("of sequence 0 alone", 0.2))
    ]
    assert judge(pairs, Case((1,))).ratios == {"o": pytest.approx(0.8)}


def test_place_in_words() -> None:
    for name, shape, index, words in [
        ("o", (1, 5, 2), (0, 0, 1), "sequence 1, token 0, head 1"),
        ("o", (1, 5, 2), (0, 3, 0), "sequence 3, token 0, head 0"),
        ("dg", (1, 5, 2), (0, 4, 0), "sequence 3, token 1, head 0"),
        ("o", (1, 5, 2, 8), (0, 2, 1, 7), "sequence 1, token 2, head 1, channel 7"),
        ("final_state", (5, 2, 8), (4, 1, 6), "sequence 4, head 1, key row 6"),
        ("final_state", (5, 2, 8), (0, 1, 6), "sequence 0, head 1, key row 6"),
        ("dh0", (5, 2, 8, 8), (2, 0, 3, 1), "sequence 2, head 0, key row 3, channel 1"),
        ("o", (2, 2, 8), (1, 0, 3), "index 1, 0, 3"),
        ("bytes", (64,), (63,), "index 63"),
    ]:
        flat = int(torch.arange(math.prod(shape)).reshape(shape)[index])
        assert where(name, flat, torch.Size(shape), PACKED) == words, name


def test_place_of_a_single_sequence_names_no_sequence() -> None:
    assert where("o", 5, torch.Size((1, 4, 2)), Case((4,), value_heads=2)) == "token 2, head 1"


@pytest.mark.parametrize(
    ("detail", "name"), [("", "dq"), ("of sequence 2 alone", "dq of sequence 2 alone"), (", read twice", "dq, read twice")]
)
def test_a_finding_names_its_comparison_and_its_port(detail: str, name: str) -> None:
    finding = only(judge([Pair("dq", detail, torch.ones(1), torch.zeros(1))], PACKED))
    assert (finding.output, finding.port) == (name, "dq")
    data = finding.to_json()
    assert Finding.from_json(data) == finding
    del data["port"]  # as earlier releases wrote it
    assert Finding.from_json(data) == finding


@given(
    st.floats(allow_nan=True, allow_infinity=True),
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=4),
)
def test_finding_survives_strict_json(error: float, numbers: list[float]) -> None:
    finding = Finding(
        "o", FailureKind.OFF, "is off", "token 1", "token 0", 7, 2, error, 0.25, "origin", tuple(numbers), tuple(numbers[::-1])
    )
    text = json.dumps(finding.to_json(), allow_nan=False)
    back = Finding.from_json(json.loads(text))
    assert repr(back) == repr(finding)  # NaN is not equal to itself, its name is
