"""What meets in drawn traces: the counts, and the table of the page."""

import pytest

from benchmarks import coincidences
from properties.traces.case import TraceCase
from tests.pages import reference, section


def test_the_pairs_of_a_trace() -> None:
    found = coincidences.pairs(TraceCase("p:a62,_3/v4:a2/w:a/p:a1,b70/k:c<a", slots=3, snapshots=64))
    assert {pair for pair in found if pair[0] != "prompt of a new request"} == {
        ("drafts of one length", "any"),
        ("drafts of one length", "block end"),
        ("swap", "any"),
        ("swap", "block end"),
        ("swap", "after a rejection"),
        ("one token beside a prompt", "any"),
        ("one token beside a prompt", "snapshot"),
        ("one token beside a prompt", "full pool"),
        ("one token beside a prompt", "after a move"),
    }
    assert ("prompt of a new request", "padding") in found
    assert ("prompt of a new request", "over a block end") in found
    assert ("draft of which nothing is accepted", "any") in coincidences.pairs(TraceCase("p:a1,b1/v:a0:2,b1:1"))


def test_rare_pairs_occur() -> None:
    counts = coincidences.counted(200)
    assert counts["one token beside a prompt", "snapshot"] >= 6
    assert counts["drafts of one length", "over a block end"] >= 6
    assert counts["swap", "after a rejection"] >= 6


@pytest.mark.slow
def test_the_page_has_the_table() -> None:
    assert coincidences.table(coincidences.counted()) in section(reference("laws"), "What meets in drawn traces")
