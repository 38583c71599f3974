"""Suites on the zoo: published ones accept right code and let subtle errors pass, and yours is tried too."""

import json
import pathlib
import re
from typing import Any

import pytest
import torch

from oracles.operation import Inputs
from properties.rules.case import Case
from tests.in_process import said
from tests.together import for_each
from verify.bench.memo import Memo
from verify.cli import exits
from verify.engine.profiles import Profile
from verify.zoo import base, hunt, suite, trials
from verify.zoo import wrong_rules as rules
from verify.zoo.animals import animals
from verify.zoo.published_suites import SUITES


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(hunt, "PROFILE", Profile("quick", 8))
    monkeypatch.chdir(tmp_path)


CALLS = Memo(64, 2**24)


@pytest.fixture
def calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references and the results of animals are kept, since two suites have the same cases and differ in what they accept."""
    called, reference = trials.called, suite.Suite.reference

    def call(adapter: Any, inputs: Inputs, cotangents: Any, chunk: int | None) -> Any:
        return CALLS.get(
            trials.SPEC, inputs, cotangents, (type(adapter), chunk), lambda: called(adapter, inputs, cotangents, chunk)
        )

    def of_truth(self: suite.Suite, inputs: Inputs, cotangents: Any) -> Any:
        return CALLS.get(trials.SPEC, inputs, cotangents, ("reference",), lambda: reference(self, inputs, cotangents))

    monkeypatch.setattr(trials, "called", call)
    monkeypatch.setattr(suite.Suite, "reference", of_truth)


def accepted(name: str, *several: str) -> list[list[bool]]:
    """Whether a suite accepts some animals, case by case: all run a case at a time, whose reference they share."""
    count = trials.answer({"suite": name})["cases"]
    answers = [[trials.answer({"suite": name, "animal": animal, "case": index}) for animal in several] for index in range(count)]
    assert not [answer for case in answers for answer in case if "error" in answer]
    return [[case[place]["accepted"] for case in answers] for place in range(len(several))]


@pytest.mark.parametrize("name", [name for name in SUITES if name != "assert-close"])
@pytest.mark.usefixtures("calls_are_kept")
@pytest.mark.slow
def test_published_suites_accept_right_code_and_reject_gross_but_not_subtle_errors(name: str) -> None:
    right, subtle = accepted(name, trials.RIGHT, "zoo/EpsTenTimes")
    assert all(right), f"{name} rejects right code"
    gross = ({"suite": name, "animal": "zoo/DropsState", "case": index} for index in range(len(right)))
    assert not all(trials.answer(case)["accepted"] for case in gross), f"{name} does not notice that the state is dropped"
    assert all(subtle), f"{name} notices an eps that is ten times as large"


@pytest.mark.slow
def test_a_suite_notices_the_decay_of_another_token_only_by_what_was_added_when_it_was_found() -> None:
    assert accepted("flashinfer", "zoo/DecayTokenByThread") == [[True] * 18 + [False]]


def test_twin_of_a_decay_by_the_thread_errs_as_much_as_its_fix_reports() -> None:
    """On the regression test's inputs: states off by up to 1.01e-2, in 6,361 elements (flashinfer 4311, of draws of its own)."""
    fixed = SUITES["flashinfer"]()
    inputs, _ = suite.call([*fixed.cases()][-1])
    want = fixed.reference(inputs, None)["final_state"]
    error = (trials.called(rules.DecayTokenByThread(), inputs, None, None)["final_state"].double() - want).abs()
    assert 0.8e-2 < float(error.max()) < 1.2e-2
    over = error > 1e-3 + 1e-4 * want.abs()
    assert 5500 < int(over.sum()) < 7200
    counts = [int(over[..., channel::4].sum()) for channel in range(4)]
    assert counts == sorted(counts, reverse=True)
    assert counts[2] > 0 == counts[3], "of four threads one took the last token"


@for_each(
    ("words", "channels"),
    [
        ("lengths=64 gate=64", []),  # no state comes in
        ("lengths=65 gate=forever state=random", []),
        ("lengths=58 gate=64 state=random", []),
        ("lengths=59 gate=64 state=random", [0, 4]),
        ("lengths=61 gate=64 state=random", [0, 1, 4, 5]),
        ("lengths=64 gate=64 state=random", [0, 1, 2, 4, 5, 6]),
        ("lengths=65 gate=64", []),  # one does, into a chunk of one token
        ("lengths=128 gate=64", [0, 1, 2, 4, 5, 6]),
    ],
)
def test_twin_of_a_decay_by_the_thread_is_wrong_in_the_channels_of_the_wrong_threads(words: str, channels: list[int]) -> None:
    inputs = Case.parse(f"{words} value_dim=8").inputs()
    (_, want), (_, got) = (kind().run(inputs) for kind in (base.Chunkwise, rules.DecayTokenByThread))
    assert want is not None and got is not None
    assert [channel for channel in range(8) if not torch.equal(got[..., channel], want[..., channel])] == channels


def test_suites_are_about_the_rule_of_an_explicit_gate_alone() -> None:
    asked_for = {name for name, animal in animals().items() if trials.is_eligible(animal)}
    assert {"LeaksState", "Hangs"} <= asked_for
    assert not asked_for & {"EvenRows", "ForgetsDtBias", "NeverErases", "ConvLeaks", "WritesBf16"}


def test_assert_close_by_its_defaults_rejects_right_code_in_half_precision() -> None:
    (right,) = accepted("assert-close", trials.RIGHT)
    assert right[:2] == [True, True], "float32"
    assert not any(right[2:])


def test_suites_are_the_same_every_time_and_legal() -> None:
    for name, kind in SUITES.items():
        first, second = ([suite.call(case)[0] for case in kind().cases()] for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a if isinstance(a[key], torch.Tensor)), name
        assert kind.__doc__


def test_fla_ci_lets_pass_what_fla_locally_rejects() -> None:
    inputs, reference = Inputs(), {"o": torch.full((8,), 0.2, dtype=torch.float64)}
    zeros = {"o": torch.zeros(8)}
    assert not SUITES["fla-local"]().accepts(zeros, reference, inputs)
    assert SUITES["fla-ci"]().accepts(zeros, reference, inputs), "an output of zeros is a warning where values are under 0.3"
    assert not SUITES["fla-ci"]().accepts({"o": torch.full((8,), torch.nan)}, reference, inputs)


@for_each(
    ("change", "message"),
    [
        ({"query": 1}, "a case must have q, k, v, g, beta, state, cu_seqlens, .* or cotangents, got 'query'"),
        ({"q": None}, "q of a case must be a tensor, got NoneType"),
        ({"beta": torch.zeros(1, 3, 9)}, "beta"),
        ({"cotangents": {"o": torch.zeros(1)}}, "cotangents of a case must be of o, final_state, got o"),
    ],
)
def test_an_illegal_case_is_refused(change: dict[str, object], message: str) -> None:
    case = next(iter(SUITES["transformers"]().cases()))
    with pytest.raises(ValueError, match=message):
        suite.call({**case, **change})


def test_chunks_have_the_length_of_the_suite_and_no_more() -> None:
    seen: list[int] = []

    class Looks(base.Chunkwise):
        def run(self, x: Inputs) -> Any:
            seen.append(self.size)
            return super().run(x)

    one = Looks()
    inputs, cotangents = suite.call(next(iter(SUITES["transformers"]().cases())))
    trials.called(one, inputs, cotangents, 4)
    trials.called(one, inputs, cotangents, None)
    assert seen == [4, 64]


MINE = '''
import torch
from verify.zoo.suite import Suite

def case(**more):
    x = torch.arange(1.0, 9.0).reshape(1, 4, 1, 2) / 8
    return {"q": x, "k": x, "v": x, "g": -torch.ones(1, 4, 1), "beta": torch.ones(1, 4, 1), **more}

class Mine(Suite):
    """Ours."""
    def cases(self):
        yield case()
        yield case(state=torch.ones(1, 1, 2, 2))
    def accepts(self, got, reference, inputs):
        assert torch.allclose(got["o"].double(), reference["o"], rtol=1e-3), "o is off"
        return True

class Strict(Mine):
    """Too strict."""
    def accepts(self, got, reference, inputs):
        return bool((got["o"].double() == reference["o"]).all())

class Falls(Mine):
    """It falls over."""
    def accepts(self, got, reference, inputs):
        return got["nothing"]

class Empty(Mine):
    """It has none."""
    def cases(self):
        return []
'''


@pytest.mark.slow
def test_your_own_suite_is_tried_on_the_animals(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    rules_ = [word for name in ("Mine", "Strict", "Falls", "Empty") for word in ("--rule", f"mine.py:{name}")]
    words = ["ForgetsBetaInErase", "AddsStateTwice", "PeeksAhead", "EvenRows", "TailWithoutGate", "--law", "absent"]
    words += ["--law", "future", "--law", "reshard"]  # which no suite's verdict depends on
    code, out, _ = said(capfd, "zoo", *words, *rules_, "--workers", "1", "--json", "table.json", "--html", "page.html")
    assert code == exits.BROKEN
    assert re.search(r"^AddsStateTwice +dead +1 ", out, re.MULTILINE), out
    assert re.search(r"^PeeksAhead +dead +lives ", out, re.MULTILINE), out
    assert "EvenRows" not in out, "suites are about kernels of the rule"
    assert re.search(r"^mine.py:Mine: kills \d of 4 in 2 cases, \d s · Ours\.$", out, re.MULTILINE), out
    assert re.search(r"^mine.py:Strict: .*REJECTS RIGHT CODE in case \d, so its kills show nothing", out, re.MULTILINE), out
    assert "mine.py:Falls: FAILED (case 1: KeyError: 'nothing')" in out
    assert "mine.py:Empty: FAILED (it has no cases)" in out
    mine = json.loads((tmp_path / "table.json").read_text())["suites"][0]
    assert (mine["killed_at"]["PeeksAhead"], mine["killed_at"]["AddsStateTwice"], mine["rejects_right"]) == (None, 1, "")
    assert mine["what"]["AddsStateTwice"] == "o is off"
    html = (tmp_path / "page.html").read_text()
    assert "Would these suites notice?" in html
    assert "rejects right code" in html


@pytest.mark.slow
def test_an_animal_that_crashes_is_rejected_by_a_suite_and_the_others_go_on(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "wild.py").write_text(
        "import os\nfrom verify.zoo.base import Chunkwise\nclass Bolts(Chunkwise):\n    '''Gone.'''\n    letter = 'R'\n"
        "    def run(self, x):\n        os._exit(9)\n"
    )
    code, out, _ = said(
        capfd, "zoo", "wild.py:Bolts", "AddsStateTwice", "--rule", "mine.py:Mine", "--law", "absent", "--workers", "1"
    )
    assert code == exits.HOLDS, out
    assert re.search(r"^Bolts +dead +1$", out, re.MULTILINE), out
    assert "mine.py:Mine: kills 2 of 2 in 2 cases" in out
