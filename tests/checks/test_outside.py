"""Calls just outside a domain: refused, right, or accepted and wrong. The adapters are in outside_adapters.py."""

import inspect
import json
import pathlib

import pytest

from properties.books import book_of
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.outside import CASES, OUTSIDE, outside_of
from tests import outside_adapters
from verify.adapters.interface import parameters_of
from verify.adapters.registry import AdapterError
from verify.cli.main import main
from verify.engine.check import Check
from verify.engine.outside import names_of
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.execution.outside import NOT_ASKED
from verify.execution.service import typed_answer
from verify.findings.outside import REFUSES, RIGHT, UNDECIDED, WRONG, Answer, lines
from verify.findings.store import Store
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import Worker

FILE = "tests/outside_adapters.py"


def answers(adapter: str, worker: Worker, folder: pathlib.Path) -> dict[str, Answer]:
    """What an adapter's function did with everything that the adapter's domain leaves out, without what it was not asked."""
    with Check(Settings(f"{FILE}:{adapter}", [], PROFILES["few"]), [worker], Store(folder)) as checking:
        found = {what: checking.ask_outside(what) for what in names_of(checking.describe().domain)}
    return {what: answer for what, answer in found.items() if answer is not None}


@pytest.mark.parametrize(
    ("adapter", "did"),
    [
        ("Right", {"packed": RIGHT, "initial_state": RIGHT, "qk_norm": RIGHT, "scale": RIGHT}),
        ("HandsOn", {"packed": RIGHT, "initial_state": RIGHT, "qk_norm": RIGHT, "scale": RIGHT}),
        ("IgnoresOffsets", {"packed": WRONG}),
        ("IgnoresWhatItReads", {"packed": WRONG}),
        ("IgnoresStates", {"initial_state": WRONG}),
        ("Refuses", {"packed": REFUSES}),
        ("ValuesFirst", {"initial_state": RIGHT, "state_v_first": RIGHT}),
        ("ForgetsToTurn", {"initial_state": RIGHT, "state_v_first": WRONG}),
        ("AlwaysWrong", {"packed": UNDECIDED}),
        ("NothingElse", {}),
        ("ItselfRefuses", {}),
        ("OneByOne", {}),
        ("Everything", {}),
        ("MaskedLayer", {"attention_mask": RIGHT}),
        ("MaskedByOnes", {"attention_mask": RIGHT}),
        ("IgnoresMasks", {"attention_mask": WRONG}),
    ],
)
def test_what_a_function_takes_beyond_its_domain(adapter: str, did: dict[str, str], worker: Worker, tmp_path: pathlib.Path) -> None:
    found = answers(adapter, worker, tmp_path)
    assert {what: answer.did for what, answer in found.items()} == did
    for answer in found.values():
        assert answer.cases <= CASES
        assert answer.did == WRONG or answer.cases == CASES


def test_where_kernels_are_compiled_it_is_asked_beside_the_laws(tmp_path: pathlib.Path) -> None:
    others = [law for law in book_of(Domain()).laws if law != "recall"]
    with Check(Settings(f"{FILE}:Compiled", profile=PROFILES["few"], skip=others), 1, Store(tmp_path)) as checking:
        (report,) = checking.run(outside=True)
        checking.stop()
        found = {what: checking.ask_outside(what) for what in checking.outside}
    assert report.verdict is Verdict.HOLDS
    did = {what: answer.did for what, answer in found.items() if answer is not None}
    assert did == {"packed": RIGHT, "initial_state": RIGHT, "qk_norm": RIGHT, "scale": RIGHT}


def test_a_wrong_answer_has_a_line_that_repeats_it(worker: Worker, tmp_path: pathlib.Path) -> None:
    (answer,) = answers("IgnoresOffsets", worker, tmp_path).values()
    assert str(Run.parse(answer.line)) == answer.line
    outcome = typed_answer(RunOne(answer.line).to_json())
    assert isinstance(outcome, Outcome)
    assert outcome.verdict is Verdict.BROKEN
    assert outcome.findings[0].place in answer.detail
    *others, wrong, repeat = lines([answer, Answer("scale", RIGHT, "law=oracle")])
    assert others == ["outside the domain, reported and not judged:", "  scale: right"]
    assert wrong.startswith("  packed: accepted and wrong (o is off by more than rounding explains, sequence 1")
    assert repeat == f'    repeat     gdn-verify repeat "{answer.line}"'


def test_a_line_says_why_nobody_was_asked() -> None:
    reasons = {
        "ItselfRefuses": "the adapter refuses it (no packed sequences here)",
        "OneByOne": "the function under test does not get all tokens of a call",
        "NothingElse": "the function under test has no parameter for it",
        "Everything": "the domain has packed",
    }
    for adapter, reason in reasons.items():
        line = f"law=oracle adapter={FILE}:{adapter} outside=packed lengths=3+5 packed=yes final_states=none backward=no"
        outcome = typed_answer(RunOne(line).to_json())
        assert isinstance(outcome, Outcome)
        assert (outcome.verdict, outcome.reason) == (Verdict.UNSUPPORTED, NOT_ASKED + reason)


def test_after_a_call_the_function_is_as_it_was() -> None:
    before = dict(vars(outside_adapters))
    line = f"law=oracle adapter={FILE}:IgnoresOffsets outside=packed lengths=3+5 packed=yes final_states=none backward=no"
    for _ in range(2):
        outcome = typed_answer(RunOne(line).to_json())
        assert isinstance(outcome, Outcome)
        assert outcome.verdict is Verdict.BROKEN
    assert dict(vars(outside_adapters)) == before


def test_outside_is_a_known_word() -> None:
    with pytest.raises(ValueError, match=r"outside must be one of packed, initial_state, .*, got 'pakced'"):
        Run.parse(f"law=oracle adapter={FILE}:Right outside=pakced lengths=3")
    with pytest.raises(AdapterError):
        Run.parse("law=oracle adapter=nothing.py:Right outside=packed lengths=3")


def test_domains_leave_out_what_they_exclude() -> None:
    layouts = ["state_v_first", "head_first"]
    assert outside_of(Domain()) == layouts
    assert outside_of(Domain(options=(("state_v_first", ("no", "yes")),))) == ["head_first"]
    assert outside_of(Domain(packed=False, qk_norm=False)) == ["packed", "qk_norm", *layouts]
    assert outside_of(ModuleDomain("causal_conv1d")) == ["attention_mask"]
    assert outside_of(ModuleDomain("causal_conv1d", packed=False, initial_state=False, attention_mask=True)) == [
        "packed",
        "initial_state",
    ]
    assert outside_of(ModuleDomain("l2norm", packed=False, initial_state=False)) == []
    assert outside_of(LayerDomain(packed=False)) == ["packed"]
    assert outside_of(LayerDomain(attention_mask=False)) == ["attention_mask"]


def test_a_case_is_outside_in_one_respect_alone() -> None:
    domain = Domain(packed=False, initial_state=False, length_step=4, longest=64)
    drawn = [Case((8, 8), gate="tenth", values="great", left_out="beta", beta="one"), Case((4,), dtype="bf16"), Case((12,))]
    for what in ("packed", "initial_state"):
        cases = [*OUTSIDE[what].cases(domain, drawn)]
        assert len(cases) == CASES
        for case, inside in cases:
            assert domain.outside(case) is not None
            assert OUTSIDE[what].domain(domain).outside(case) is None
            assert domain.outside(inside) is None
            assert all(length % 4 == 0 and length <= 64 for length in case.lengths)
            assert case.gate == "1000"  # the next sequence shows what this one has left


def swallows(x: int, **rest: int) -> int:
    """A function that reads one name of its further arguments."""
    return x + rest.get("more", 0) + rest.pop("others", 0)


def test_parameters_are_those_that_a_function_reads_too() -> None:
    assert parameters_of(swallows) == {"x", "more", "others"}
    assert parameters_of(outside_adapters.nothing_else) == {*inspect.signature(outside_adapters.nothing_else).parameters}


def check(adapter: str, folder: pathlib.Path, *more: str) -> int:
    words = ["check", f"{FILE}:{adapter}", "--profile", "least", "--law", "oracle", "--workers", "1", "--device", "cpu"]
    return main([*words, "--findings", str(folder / "findings"), *more])


def test_strict_domain_exits_with_1_for_what_is_accepted_and_wrong(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "check.jsonl"
    assert check("IgnoresOffsets", tmp_path, "--strict-domain", "--json", str(place)) == 1
    *_, repeat, summary = capsys.readouterr().out.splitlines()
    assert repeat.startswith('    repeat     gdn-verify repeat "law=oracle ')
    assert summary.startswith("1 of 1 law holds")
    *_, end = map(json.loads, place.read_text().splitlines())
    assert (end["exit_code"], [answer["did"] for answer in end["outside"]]) == (1, [WRONG])
    assert main(["merge", str(place)]) == 0
    assert "packed: accepted and wrong" in capsys.readouterr().out
    assert main(["merge", str(place), "--strict-domain"]) == 1


def test_without_strict_domain_nothing_changes(tmp_path: pathlib.Path) -> None:
    assert check("IgnoresOffsets", tmp_path) == 0
    assert check("Refuses", tmp_path, "--strict-domain") == 0


def test_a_line_outside_the_domain_is_no_known_defect(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = tmp_path / "known.toml"
    line = f"law=oracle adapter={pathlib.Path(FILE).resolve()}:IgnoresOffsets outside=packed lengths=3+5 packed=yes"
    known.write_text(
        f'[[defect]]\nrun = "{line}"\nversions = {{ torch = ["9"] }}\nwhere = "packed=yes"\nreason = "it ignores them"\n'
    )
    assert check("IgnoresOffsets", tmp_path, "--known", str(known)) == 2
    assert "its line must be inside the domain, got outside=packed" in capsys.readouterr().err


def test_strict_domain_and_a_sweep_exclude_each_other(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("Right", tmp_path, "--strict-domain", "--tune", "sweep") == 2
    assert "--strict-domain" in capsys.readouterr().err
