"""Rows of a table that are not as they should be are named, and no others."""

import pytest

from tests.faults import different, not_refused


def test_what_is_accepted_or_refused_for_another_reason_is_named() -> None:
    assert not_refused(int, [("x", "invalid literal"), ("", "base 10: ''$")]) == []
    faults = not_refused(int, [("1", "invalid"), ("x", "invalid"), ("y", "too large")])
    assert faults[0] == "['1'] is accepted"
    assert faults[1].startswith("['y']: invalid literal")
    assert len(faults) == 2
    with pytest.raises(TypeError):
        not_refused(int, [(None, "")])


def test_what_differs_is_named() -> None:
    assert different(len, [("a", 1), ("ab", 2)]) == []
    assert different(len, [("a", 1), ("ab", 3)]) == ["['ab']: 2 is not 3"]


def test_a_table_without_rows_is_no_success() -> None:
    assert not_refused(lambda compare: compare(len, []), [(not_refused, "at least one row"), (different, "at least one row")]) == []
