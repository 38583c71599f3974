"""The verb `compare`: an old and a new version on the same cases. Both are tiny packages, or two adapters of one file."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pytest

from properties.books import book_of
from properties.paths.domain import PathDomain
from properties.rules.domain import Domain
from properties.words.example import Example
from tests.verbs.test_across import ADAPTER, RIGHT, WRONG, answered, package, said
from verify.adapters.loader import load
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED, USAGE
from verify.engine import compare as engine
from verify.engine.across import BROKEN as IS_BROKEN
from verify.engine.across import HOLDS as DOES_HOLD
from verify.engine.across import NOT, SiteVerdict
from verify.engine.compare import (
    ADDED,
    BOTH,
    BROKE,
    FAILS,
    MENDED,
    NEITHER,
    REFUSED,
    UNKNOWN,
    BeforeAfter,
    Differences,
    change_of,
    distribution,
    errors_of,
    parameter_changes,
    suited,
    timed,
)
from verify.engine.drawing import seeded
from verify.execution.line import Run
from verify.process.messages import Called
from verify.process.outcome import Outcome, Verdict

RUN = Run.parse("law=oracle adapter=fla/chunk lengths=3")
COARSER = RIGHT.replace("return", "return (1 + 2**-22) *")  # other bits, and twice the error
UNSTEADY = "CALLS = __import__('itertools').count()\n" + RIGHT.replace("return", "return (1 + next(CALLS) % 2 * 2**-22) *")
RENAMED = "def gate(x, A, shift=0.0, chunk=64):\n    return -A.exp() * torch.nn.functional.softplus(x + shift)\n"
FEW = ("--law", "oracle", "--profile", "least")


@pytest.fixture(autouse=True)
def _here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pathlib.Path("kernel.py").write_text(ADAPTER)


def places(tmp_path: pathlib.Path, old: str, new: str) -> tuple[str, ...]:
    return ("--path", str(package(tmp_path / "old", old)), "--path", str(package(tmp_path / "new", new)))


# What changed


def side(verdict: str, outcome: Verdict | None, *outputs: str) -> tuple[SiteVerdict, Outcome | None]:
    return SiteVerdict(verdict, outputs=outputs), outcome and Outcome(outcome)


HELD, LOST = side(DOES_HOLD, Verdict.HOLDS), side(NOT, None)
WRONG_O, WRONG_BOTH = side(IS_BROKEN, Verdict.BROKEN, "o"), side(IS_BROKEN, Verdict.BROKEN, "o", "dq")
CRASHED = side(IS_BROKEN, Verdict.BROKEN, "call")
NO, BLIND, OPEN = side(NOT, Verdict.UNSUPPORTED), side(NOT, Verdict.BLIND), side(NOT, Verdict.UNKNOWN)


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        (HELD, HELD, BOTH[DOES_HOLD]),
        (HELD, WRONG_O, BROKE),
        (HELD, CRASHED, BROKE),
        (HELD, NO, REFUSED),
        (HELD, BLIND, NEITHER),
        (HELD, LOST, UNKNOWN),
        (HELD, OPEN, UNKNOWN),
        (WRONG_O, HELD, MENDED),
        (WRONG_O, NO, MENDED),
        (WRONG_O, WRONG_O, BOTH[IS_BROKEN]),
        (WRONG_O, WRONG_BOTH, BROKE),
        (WRONG_BOTH, WRONG_O, BOTH[IS_BROKEN]),
        (CRASHED, WRONG_O, BOTH[IS_BROKEN]),
        (NO, HELD, ADDED),
        (NO, WRONG_O, FAILS),
        (NO, NO, NEITHER),
        (NO, LOST, NEITHER),
        (LOST, LOST, UNKNOWN),
        (OPEN, WRONG_O, UNKNOWN),
    ],
)
def test_what_changed_in_a_line(old: Any, new: Any, change: str) -> None:
    assert change_of(old, new) == change


def comparison(*changes: str, **more: Any) -> Differences:
    lists = dict[str, Any].fromkeys(("errors", "unsteady", "parameters", "gone", "domain"), [])
    pairs = [BeforeAfter(RUN, HELD[0], HELD[0], change, {}) for change in changes]
    return Differences(pairs, **{**lists, "bits": {}, "refusals": {}, **more})


def test_the_new_version_is_worse_if_something_became_broken_or_a_promise_was_lost() -> None:
    refuses, silent = "refuses (ValueError)", "returns numbers without an error"
    held = BOTH[DOES_HOLD]
    assert comparison(held, MENDED, ADDED, FAILS, BOTH[IS_BROKEN], NEITHER).worse() is False
    assert comparison(held, BROKE, UNKNOWN).worse() is True
    assert comparison(held, REFUSED).worse() is True
    assert comparison(held, gone=["parameter scale is gone"]).worse() is True
    assert comparison(held, unsteady=["o"]).worse() is True
    assert comparison(held, refusals={"no tokens": (refuses, silent)}).worse() is True
    assert comparison(held, refusals={"no tokens": (refuses, "crashed (signal 11)")}).worse() is True
    assert comparison(held, refusals={"no tokens": (silent, refuses)}).worse() is False
    assert comparison(held, bits={"line": ["o"]}).worse() is False
    assert comparison(held, bits={"line": ["o"]}).worse(same_bits=True) is True
    assert comparison(held, bits={"line": []}).worse(same_bits=True) is False
    assert comparison(held, UNKNOWN).worse() is None
    assert comparison(ADDED, NEITHER).worse() is None, "nothing was compared"
    assert comparison().worse() is None


def test_the_parameters_that_differ_are_named() -> None:
    old = {"rule": ["q", "k", "scale", "kernel", "head_first"], "other": ["x"]}
    new = {"rule": ["q", "k", "scale", "chunk", "kernel"], "other": ["x"]}
    assert parameter_changes(old, new) == [("rule: chunk is new, head_first is gone", ["head_first"])]
    assert parameter_changes(old, old) == []
    assert parameter_changes({"f": ["x", "bias"]}, {"g": ["x", "shift"]}) == [("f: is now g, bias is now shift", ["bias"])]
    assert parameter_changes({"f": ["x", "y", "z"]}, {"f": ["z", "x", "y"]})[0][1] == []


def test_errors_are_compared_line_by_line() -> None:
    def pairs(*ratios: tuple[float, float]) -> list[BeforeAfter]:
        runs = [Run.parse(f"law=oracle adapter=fla/chunk lengths={number}") for number in range(1, len(ratios) + 1)]
        return [BeforeAfter(run, HELD[0], HELD[0], BOTH[DOES_HOLD], {"o": each}) for run, each in zip(runs, ratios, strict=True)]

    (grew,) = errors_of(pairs((0.1, 0.2), (0.1, 0.4), (0.1, 0.1)))
    assert (grew.word, grew.factor, grew.grew, grew.shrank, grew.old) == ("grew", 2.0, 2, 0, [0.1] * 3)
    assert "lengths=2" in grew.line
    (same,) = errors_of(pairs((0.1, 0.1), (0.2, 0.21), (0.1, 0.9)))
    assert (same.word, same.grew) == ("same", 1)
    (shrank,) = errors_of(pairs((0.4, 0.1), (0.2, 0.1)))
    assert (shrank.word, shrank.shrank, shrank.line) == ("shrank", 2, "")
    assert distribution([1e-9, 2**-6, 0.02, 0.3, 0.5, 1.0]) == [2, 1, 0, 0, 0, 2, 1]


def test_a_choice_or_an_option_that_a_version_lacks_is_left_out() -> None:
    run = Run.parse("law=parallel adapter=megatron/layer lengths=8 cp=2 packed=yes heads=2 value_heads=2")
    domain = dataclasses.replace(PathDomain(), choices=(("thd_all_to_all", ("fused",)),))
    assert "thd_all_to_all=fused" in str(suited(run, domain))
    assert suited(run, PathDomain()) == run
    assert suited(RUN, None) == RUN
    options = "options=cu_seqlens_cpu:yes,chunk_indices:yes"
    rule = dataclasses.replace(Domain(), options=(("cu_seqlens_cpu", ("no", "yes")),))
    assert str(suited(Run.parse(f"{RUN} {options}"), rule)) == f"{RUN} options=cu_seqlens_cpu:yes"
    assert suited(RUN, rule) == RUN


def test_a_line_of_a_described_callable_stays_what_it_is() -> None:
    """Its domain has no choices of how to compute."""
    spec, examples = f"{pathlib.Path(__file__).parents[1] / 'right_calls.py'}:DeltaRule", list[Example]()
    adapter = load(spec)
    seeded(book_of(adapter.domain).laws["pure"].draw(adapter.domain), 0, 1, examples.append)
    run = Run("pure", spec, examples[0])
    assert suited(run, adapter.domain) == run


# The command


def test_a_new_version_that_is_wrong_is_worse_and_one_that_is_right_is_better(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    where = places(tmp_path, RIGHT, WRONG)
    code, out, _ = said(capfd, "compare", "kernel.py:Gate", *where, *FEW)
    assert code == BROKEN
    assert re.search(r"^law +old +new +change\noracle +\d+ hold.* \d+ broken.* became broken$", out, re.MULTILINE)
    (line,) = re.findall(
        r"^became broken: (law=oracle .+)\n  old: holds 0\.\d+ g\n  new: BROKEN g .*x: g: is off by", out, re.MULTILINE
    )[:1]
    assert Run.parse(line, here=False).law == "oracle"
    assert "time, memory  not measured on a CPU" in out
    paragraph = " ".join(out.partition("to paste:")[2].split())
    assert f"`{where[1]}` and `{where[3]}` by a float64 oracle" in paragraph
    assert "**The new version is worse.** Became broken: " in paragraph
    assert f": `{line}`." in paragraph
    code, told = answered(capfd, "compare", "kernel.py:Gate", *where[2:], *where[:2], *FEW)
    assert (code, told["worse"], told["laws"]) == (HOLDS, False, {"oracle": MENDED})
    assert {row["change"] for row in told["lines"]} <= {MENDED, BOTH[DOES_HOLD], NEITHER}
    assert [place["option"] for place in told["places"]] == [f"--path {where[3]}", f"--path {where[1]}"]
    assert "**Nothing is worse.** Mended: " in told["paragraph"]


def test_other_bits_are_told_and_are_a_lost_promise_if_they_were_promised(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    where = places(tmp_path, RIGHT, COARSER)
    code, told = answered(capfd, "compare", "kernel.py:Gate", *where, *FEW)
    assert (code, told["unsteady"], told["lost"]) == (HOLDS, [], [])
    assert len(told["bits"]) >= 2
    assert all(names == ["g"] for names in told["bits"].values())
    (errors,) = [row for row in told["errors"] if row["output"] == "g"]
    assert errors["word"] == "grew"
    assert errors["line"] in {row["line"] for row in told["lines"]}
    assert len(errors["old"]) == len(errors["new"]) == len([row for row in told["lines"] if row["ratios"].get("g")])
    assert said(capfd, "compare", "kernel.py:Gate", *where, *FEW, "--same-bits")[0] == BROKEN
    code, told = answered(capfd, "compare", "kernel.py:Gate", *places(tmp_path, RIGHT, UNSTEADY), *FEW)
    assert (code, told["unsteady"], told["lost"]) == (BROKEN, ["g"], ["g differs from call to call"])
    code, told = answered(capfd, "compare", "kernel.py:Gate", *places(tmp_path, RIGHT, RIGHT), *FEW, "--same-bits")
    assert (code, {*map(tuple, told["bits"].values())}) == (HOLDS, {()})
    assert {row["word"] for row in told["errors"]} == {"same"}


def test_parameters_and_refusals_that_differ_are_told(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    code, told = answered(capfd, "compare", "kernel.py:Gate", *places(tmp_path, RIGHT, RENAMED), *FEW)
    assert (code, told["parameters"]) == (BROKEN, ["gate: bias is gone, shift is new, chunk is new"])
    assert "parameter bias is gone" in told["lost"]
    picky = RIGHT.replace("return", "assert A.shape[0] == x.shape[-1]\n    return")
    code, told = answered(capfd, "compare", "kernel.py:Gate", *places(tmp_path, picky, RIGHT), *FEW)
    reactions = {pair for pair in map(tuple, told["refusals"].values()) if pair[0].startswith("refuses")}
    assert (code, reactions) == (BROKEN, {("refuses (AssertionError)", "returns numbers without an error")})
    assert any(words.endswith("is no longer refused") for words in told["lost"])


def test_two_adapters_are_compared_and_a_lost_worker_is_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    package(pathlib.Path(), RIGHT)
    more = "\n\nclass Dies(Gate):\n    def run(self, x):\n        __import__('os')._exit(3)\n"
    pathlib.Path("kernel.py").write_text(ADAPTER + more)
    code, told = answered(capfd, "compare", "kernel.py:Gate", "kernel.py:Dies", *FEW)
    assert (code, [place["name"] for place in told["places"]]) == (BROKEN, ["kernel.py:Gate", "kernel.py:Dies"])
    broke = [row for row in told["lines"] if row["change"] == BROKE]
    assert len(broke) >= 2
    assert all("adapter=kernel.py:Dies" in row["line"] and row["new"]["outputs"] == ["call"] for row in broke)
    assert "crashed" in broke[0]["new"]["reason"]


def test_a_promise_that_only_the_old_adapter_makes_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    package(pathlib.Path(), RIGHT)
    text = ADAPTER.replace("class Gate", "class Loose").replace("beta=False", "beta=False, deterministic=False")
    pathlib.Path("kernel.py").write_text(ADAPTER + text)
    code, told = answered(capfd, "compare", "kernel.py:Gate", "kernel.py:Loose", *FEW)
    assert (code, told["lost"]) == (BROKEN, ["deterministic is no longer promised"])
    assert "deterministic: True before, False now" in told["domain"]
    assert answered(capfd, "compare", "kernel.py:Loose", "kernel.py:Gate", *FEW)[0] == HOLDS


def test_a_worker_that_is_lost_once_decides_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    package(pathlib.Path(), RIGHT)
    once = "\n\nclass Dies(Gate):\n    def run(self, x):\n        import os\n\n        if not os.path.exists('died'):\n"
    once += "            open('died', 'w').close()\n            os._exit(3)\n        return super().run(x)\n"
    pathlib.Path("kernel.py").write_text(ADAPTER + once)
    code, told = answered(capfd, "compare", "kernel.py:Gate", "kernel.py:Dies", *FEW)
    (row,) = [row for row in told["lines"] if row["change"] == UNKNOWN]
    assert (code, told["worse"]) == (UNDECIDED, None)
    assert row["new"]["reason"].endswith(", but not again in a fresh worker")


def test_a_version_that_cannot_be_loaded_leaves_it_undecided(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    where = ("--path", str(package(tmp_path / "old", RIGHT)), "--path", str(tmp_path / "empty"))
    code, out, err = said(capfd, "compare", "kernel.py:Gate", *where, *FEW)
    assert code == UNDECIDED
    assert "ModuleNotFoundError" in err
    assert "**This is undecided.** Undecided: " in " ".join(out.split())


def test_what_cannot_be_compared_is_refused_in_one_line(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    one = ("--path", str(tmp_path))
    for words in (("kernel.py:Gate",), ("kernel.py:Gate", *one), ("kernel.py:Gate", *one * 3), ("kernel.py:Gate",) * 3):
        code, out, err = said(capfd, "compare", *words)
        assert (code, out, err.count("\n")) == (USAGE, "", 1), words
        assert "compare needs one adapter and two places" in err, words
    other = ADAPTER.replace("class Gate", "class Norm").replace('"gdn_gate", beta=False', '"l2norm"')
    pathlib.Path("kernel.py").write_text(ADAPTER + other)
    package(pathlib.Path(), RIGHT)
    code, out, err = said(capfd, "compare", "kernel.py:Gate", "kernel.py:Norm")
    assert (code, out, err.count("\n")) == (USAGE, "", 1)
    assert "both versions must be of one operation, got gdn_gate and l2norm" in err


# Time


def test_versions_take_turns_where_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    class Workers:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> "Workers":
            return self

        def __exit__(self, *_: object) -> None:
            turns.append(f"{self.name} ends")

    def called(one: Workers, run: Run, count: int) -> Called:
        assert (run.adapter, count) == ("fla/chunk", engine.CALLS)
        turns.append(one.name)
        ms = [1.0, 1.0, 9.0] if one.name == "old" else [2.0, 2.0, 2.0]
        return Called(times_ms=ms, memory=100 if one.name == "old" else 200)

    monkeypatch.setattr(engine, "_called", called)
    found = comparison(BOTH[DOES_HOLD], BROKE)
    made: Sequence[Any] = (Workers("old"), Workers("new"))
    timed(found, [(RUN, RUN)], lambda number: made[number])
    assert turns[:4] == ["old", "new", "new", "old"]
    assert turns[2 * engine.ROUNDS :] == ["new ends", "old ends"]
    (timing,) = found.timings
    assert (timing.factors, timing.old_bytes, timing.new_bytes) == ([2.0] * engine.ROUNDS, 100, 200)
    json.dumps(dataclasses.asdict(timing))
