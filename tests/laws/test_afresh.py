"""Calls for comparison are made in a process that has made no other call, and what an earlier call spoilt shows."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest
import torch

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.books import book_of
from properties.calls.case import CallCase
from properties.laws.law import Cotangents
from properties.words.example import Example
from tests import wrong_afresh as wrong
from tests.drawn import domain_in_a_check, in_a_check
from tests.processes import SOON_S, gone
from tests.right_calls import PackedConvolution
from verify.bench import afresh
from verify.bench.afresh import Afresh
from verify.bench.call_bench import CallBench
from verify.engine.asking import ask
from verify.engine.check import Check
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.outcome import Verdict
from verify.process.worker import Worker

HERE = "tests/wrong_afresh.py"
# The cases of the law `history` that show each of them, in this order. Earlier ones only spoil what a later one has.
SHOWN_BY: dict[type, list[tuple[str, str]]] = {
    wrong.TableOfTheFirstDtype: [("others", "lengths=5 dtype=bf16 seed=1")],
    wrong.PlanOfABucket: [("others", "lengths=17 seed=1"), ("others", "lengths=17+20 packed=yes seed=1")],
    wrong.FilledTooLate: [("failed", "lengths=11 backward=no seed=2")],
}


def case_of(kind: str, words: str) -> CallCase:
    domain = adapter_of(f"{HERE}:{kind}").domain
    return CallCase.parse(f"op=call takes={domain.takes} gives={domain.gives} sizes=D:8 {words}")


def run_of(kind: str, variant: str, words: str) -> Run:
    return Run("history", f"{HERE}:{kind}", Example(case_of(kind, words), None, variant))


@pytest.mark.parametrize("kind", SHOWN_BY, ids=lambda kind: kind.__name__)
@pytest.mark.slow_after_first
def test_what_the_first_call_spoilt_shows_beside_a_fresh_process_only(kind: type, worker: Worker, tmp_path: pathlib.Path) -> None:
    runs = [run_of(kind.__name__, *words) for words in SHOWN_BY[kind]]
    assert Verdict.BROKEN in [ask(run, worker, Store(tmp_path)).verdict for run in runs]
    assert {execute(run).verdict for run in runs} == {Verdict.HOLDS}, "without the process"
    right = [run_of(name, *words) for name in ("Talks", "WeighsPlaces") for words in SHOWN_BY[kind]]
    assert {ask(run, worker, Store(tmp_path)).verdict for run in right} == {Verdict.HOLDS}


@pytest.mark.parametrize(
    ("kind", "law", "text"),
    [
        ("FilledTooLateByBucket", "history", "lengths=150+150+150+150"),
        ("SequencesOf8Bits", "packed", "lengths=1+2+1+1+2+1"),
        ("NumbersOfSequencesInFp16", "packed", "lengths=1+2+1+1+2+1"),
        ("NoTailWithoutGradients", "history", "lengths=129"),
        ("RowsOf8Bits", "batch", "lengths=3x"),
    ],
)
@pytest.mark.slow_after_first
def test_a_fixed_case_shows_it_and_the_right_form_holds(
    kind: str, law: str, text: str, worker: Worker, tmp_path: pathlib.Path
) -> None:
    """A call of a size that no other case has fails, and over 1,024 sequences have lengths that differ."""
    domain = domain_in_a_check(f"{HERE}:{kind}")
    examples = list(book_of(domain).laws[law].always(domain))
    verdicts = [ask(Run(law, f"{HERE}:{kind}", example), worker, Store(tmp_path)).verdict for example in examples]
    showing = [str(example.case) for example, verdict in zip(examples, verdicts, strict=True) if verdict is Verdict.BROKEN]
    assert showing
    assert all(text in case for case in showing)
    right = [ask(Run(law, f"{HERE}:WeighsPlaces", example), worker, Store(tmp_path)).verdict for example in examples]
    assert {*right} == {Verdict.HOLDS}
    drawn = [example for seed in range(2) for example in in_a_check(law, domain, seed) if example not in examples]
    assert Verdict.BROKEN not in [execute(Run(law, f"{HERE}:{kind}", example)).verdict for example in drawn]


@pytest.mark.parametrize(("kind", "variant"), [("TableOfTheFirstDtype", "others"), ("TableOfTheFirstMode", "inference")])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow_after_first
def test_a_check_begins_processes_with_calls_in_16_bits_and_in_inference_mode(
    kind: str, variant: str, seed: int, worker: Worker, tmp_path: pathlib.Path
) -> None:
    """Elsewhere a case of another seed may be the first call, in any dtype and mode, which decides what shows."""
    settings = Settings(f"{HERE}:{kind}", ["history"], PROFILES["quick"], seed=seed)
    (report,) = Check(settings, [worker], Store(tmp_path)).run()
    assert report.verdict is Verdict.BROKEN
    assert f"variant={variant}" in report.run


# The process itself. It is forked from the tests' own, in which other tests may have started threads of autograd: torch refuses a
# backward in such a child. So these calls have none; those above are made in a worker and have one.


def bring(spec: str) -> None:
    adapter_of(spec)


def bounds_of(spec: str, case: CallCase, inputs: Inputs, cotangents: Cotangents) -> dict[str, Bound]:
    return CallBench(adapter_of(spec), None, case).bounds(inputs, cotangents)  # type: ignore[arg-type]


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has 2 s."""
    monkeypatch.setattr(afresh, "MOST_S", 2)


@pytest.fixture
def process() -> Iterator[Afresh]:
    type(adapter_of(f"{HERE}:PlanOfABucket")).kept.clear()  # type: ignore[attr-defined] # another test calls it in this process
    one = Afresh(bring, bounds_of)
    yield one
    with contextlib.suppress(ChildProcessError):
        one.end()


def answered(process: Afresh, spec: str, case: CallCase) -> dict[str, Bound]:
    return process.bounds(spec, case, *CallBench(adapter_of(spec), None, case).call(case))  # type: ignore[arg-type]


WORDS = [
    (f"{HERE}:WeighsPlaces", "lengths=4+7 packed=yes sizes=D:8 dtype=bf16 backward=no"),
    (f"{HERE}:WeighsPlaces", "lengths=5+5 sizes=D:8 dtype=fp16 backward=no"),
    (f"{HERE}:Talks", "lengths=2+4 packed=yes sizes=D:8 backward=no"),
    ("tests/right_calls.py:PackedConvolution", "lengths=3+1+6 packed=yes sizes=D:5,W:4 backward=no seed=3"),
    ("tests/right_calls.py:DeltaRule", "lengths=4+0+3 packed=yes sizes=H:1,HV:2,K:8,V:4 backward=no seed=3"),
]


def test_its_bounds_are_those_of_this_process(process: Afresh) -> None:
    for spec, words in WORDS:
        domain = adapter_of(spec).domain
        case = CallCase.parse(f"op=call takes={domain.takes} gives={domain.gives} {words}")
        call = CallBench(adapter_of(spec), None, case).call(case)  # type: ignore[arg-type]
        there, here = process.bounds(spec, case, *call), bounds_of(spec, case, *call)
        assert list(there) == list(here), spec
        for name, bound in here.items():
            assert torch.equal(there[name].value, bound.value), (spec, name)
            assert torch.equal(there[name].allowed, bound.allowed), (spec, name)
            assert (there[name].origin, there[name].clear) == (bound.origin, bound.clear), (spec, name)


def test_an_input_that_a_law_changed_or_left_out_is_the_one_that_is_called(process: Afresh) -> None:
    spec, case = (
        "tests/right_calls.py:PackedConvolution",
        CallCase((4,), takes=PackedConvolution.domain.takes, gives=PackedConvolution.domain.gives, sizes="D:5,W:4"),
    )
    inputs, _ = CallBench(PackedConvolution(), None, case).call(case)
    packed = inputs.replaced(x=inputs.x.mT.contiguous().mT * 2, cu_seqlens=torch.tensor([0, 1, 4]), state=torch.ones(2, 5, 4))
    for changed in (inputs, packed, inputs.replaced(x=inputs.x[:, :0])):
        there, here = process.bounds(spec, case, changed, None), bounds_of(spec, case, changed, None)
        assert {*there} == {*here} == {"y", "last"}
        assert all(torch.equal(there[name].value, here[name].value) for name in here)


@pytest.mark.parametrize("kind", ["FailsInAChild", "EndsInAChild", "HangsInAChild"])
def test_a_child_that_fails_gives_nothing_and_the_next_question_is_answered(
    kind: str, short_deadline: None, process: Afresh
) -> None:
    spec = f"{HERE}:{kind}"
    for lengths, names in [("3", set()), ("4", {"y"}), ("3", set()), ("2", {"y"})]:
        assert {*answered(process, spec, case_of(kind, f"lengths={lengths} backward=no"))} == names


def test_every_question_has_a_child_of_its_own(process: Afresh) -> None:
    """The bounds of a call are the same after calls of other lengths and dtypes."""
    kind = "PlanOfABucket"
    for words in ("lengths=17", "lengths=20", "lengths=31", "lengths=20 dtype=bf16"):
        there = answered(process, f"{HERE}:{kind}", case_of(kind, f"{words} backward=no"))
        want = answered(process, f"{HERE}:WeighsPlaces", case_of(kind, f"{words} backward=no"))
        assert torch.equal(there["y"].value, want["y"].value), words


def test_a_process_that_is_gone_gives_nothing(process: Afresh) -> None:
    case = case_of("WeighsPlaces", "lengths=4 backward=no")
    assert answered(process, f"{HERE}:WeighsPlaces", case)
    os.kill(process.pid, signal.SIGKILL)
    for _ in range(3):
        assert answered(process, f"{HERE}:WeighsPlaces", case) == {}


def test_it_ends_when_it_is_told_to() -> None:
    one = Afresh(bring, bounds_of)
    assert answered(one, f"{HERE}:WeighsPlaces", case_of("WeighsPlaces", "lengths=4 backward=no"))
    one.end()
    assert gone([one.pid], SOON_S)
    with pytest.raises(ChildProcessError):
        os.waitpid(one.pid, 0)
