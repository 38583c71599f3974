"""Coverage counts what was drawn, and says what was not though it could have been."""

import pytest

from properties.books import BOOKS
from properties.rules.case import GATES, Case
from properties.rules.domain import Domain
from properties.rules.laws import LAWS
from verify.adapters.registry import BOOKS_OF_BUILT_IN
from verify.engine.check import Check
from verify.engine.drawing import seeded
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.findings import coverage
from verify.findings.store import Store

CASES = [Case((5,), gate=gate, dtype="bf16") for gate in GATES if gate != "saturated"] + [Case((7,), gate="64", state="random")]


def test_cases_are_counted_by_word() -> None:
    seen = coverage.counted(CASES)
    assert seen["dtype"] == {"bf16": len(GATES) - 1, "fp32": 1}
    assert seen["gate"] == {gate: 1 + (gate == "64") for gate in GATES if gate != "saturated"}
    assert sum(seen["state"].values()) == len(CASES)
    assert coverage.counted([]) == {}


def test_what_the_domain_allows_and_no_case_had_is_missed() -> None:
    for domain, gaps, none in [
        (Domain(), {"gate=saturated", "dtype=fp16", "state=zero", "beta=two"}, {"in_kernel=both", "gate=64", "values=one_hot"}),
        (Domain(dtypes=("bf16", "fp32"), negative_eigenvalues=False), {"gate=saturated"}, {"dtype=fp16", "beta=two"}),
        (Domain(initial_state=False), {"gate=saturated"}, {"state=zero"}),
        (Domain(in_kernel=("none", "both")), {"in_kernel=both"}, {"in_kernel=gate"}),
    ]:
        got = set(coverage.missed(coverage.counted(CASES), domain, CASES))
        assert got >= gaps, domain
        assert not got & none, domain


def test_lines_say_so() -> None:
    seen = coverage.counted(CASES)
    text = "\n".join(coverage.lines(seen, ["gate=saturated"]))
    assert "dtype: bf16 " in text
    assert "never drawn, although the domain allows it: gate=saturated" in text
    assert "every value that the domain allows was drawn" in "\n".join(coverage.lines(seen, []))


def test_every_kind_of_case_is_counted() -> None:
    for book in BOOKS:
        assert BOOKS_OF_BUILT_IN.get(book.name) or book.name == "calls", book  # type: ignore[attr-defined] - no call is built in
        assert book.case.REGIMES, book  # type: ignore[attr-defined]
        assert book.case.CHOICES, book  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_default_profile_of_everything_misses_nothing() -> None:
    cases: list[Case] = []
    from properties.rules.laws import LAWS

    domain = Domain(in_kernel=("none", "gate", "beta", "both"))
    for law in LAWS.values():
        seeded(law.draw(domain), 0, PROFILES["quick"].examples_of(law) // 2, lambda example: cases.append(example.case))
    assert coverage.missed(coverage.counted(cases), domain, cases[:200]) == []


@pytest.mark.slow
def test_a_check_keeps_its_cases(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("findings"))
    with Check(Settings("tests/right.py:RoundsElsewhere", ["pure"], PROFILES["few"]), store=store) as check:
        check.run()
    assert len(check.cases) == PROFILES["few"].examples_of(LAWS["pure"])
