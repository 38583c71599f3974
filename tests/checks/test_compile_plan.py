"""Plans: examples from a palette, in an order that lets compiling keep ahead of checking."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import pathlib
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest

from oracles.operation import Inputs
from properties.calls.domain import CallDomain
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.palette import key_of
from properties.paths.case import ParallelCase
from properties.paths.domain import PathDomain
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.rules.laws import LAWS
from properties.words.example import Example
from verify.bench.adapter_bench import UNLIKE
from verify.engine import compile_plan
from verify.engine.compile_plan import FORWARD, REACH, Plan, in_order
from verify.engine.compilers import COMPILE_S, Compilers
from verify.engine.drawing import of_law, seeded
from verify.execution.execute import compiled, execute
from verify.execution.line import Run
from verify.gpu.compiled_keys import Notes
from verify.process.messages import Compile, Describe
from verify.process.outcome import Verdict
from verify.process.worker import Worker, WorkerLost
from verify.zoo.base import Chunkwise


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Exclude the objects that exist now from garbage collection: Hypothesis collects in each plan's new thread."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_palettes() -> Iterator[None]:
    """Palettes of two keys, for tests that make many plans."""
    with mock.patch.object(compile_plan, "SIZE", 2):
        yield


class Recorder(Worker):
    """A worker that runs nothing and remembers its questions."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.questions: list[dict[str, Any]] = []
        self.fails = fails

    def ask(self, question: dict[str, Any], deadline_s: float | None = None) -> dict[str, Any]:
        assert deadline_s == COMPILE_S
        self.questions.append(question)
        if self.fails:
            raise WorkerLost("crashed", "on purpose", "")
        time.sleep(0.001)
        return {}


def run_of(law: str, example: Example) -> Run:
    return Run(law, "fla/chunk", example, "tf32", "cuda", "5")


def plan_of(compilers: Compilers, domain: Any = None, laws: tuple[str, ...] = ("oracle", "cut"), seed: int = 5) -> Plan:
    return Plan(domain or Domain(), laws, seed, lambda _: 20, run_of, compilers)


@pytest.mark.slow
def test_each_key_of_each_law_is_compiled_once_in_the_order_in_which_it_is_needed() -> None:
    worker = Recorder()
    compilers = Compilers([worker], Describe("fla/chunk"))
    plan = plan_of(compilers)
    planned = {law: plan.of(law) for law in ("oracle", "cut")}
    for law, law_plan in planned.items():
        assert len(law_plan.examples) == 20, law
        for example in law_plan.examples:
            law_plan.wait(example)
    lines = [question.line for question in worker.questions[1:]]
    firsts = [Run.parse(line) for line in lines]
    assert worker.questions[0] == Describe("fla/chunk")
    assert len(set(lines)) == len(lines)
    for law, law_plan in planned.items():
        needed = list(dict.fromkeys(compile_plan._key(one) for one in law_plan.examples))
        assert [compile_plan._key(run.example) for run in firsts if run.law == law] == needed
        costs = [
            case.key_dim * case.value_dim * (2 if case.dtype == "fp32" else 1) for case in (one.case for one in law_plan.examples)
        ]
        assert costs == sorted(costs)
    plan.close()
    compilers.close()


def test_what_is_compiled_has_tokens_and_gradients_where_a_case_of_its_key_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a batch of three rows is compiled beside one of two, other shapes and dtypes in both orders, but no tensors far apart."""
    cases = [Case((0,)), Case((3,), backward=False), Case((4,)), Case((5,)), Case((6, 6)), Case((7, 7, 7)), Case((8, 8))]
    examples = {
        "pure": [*map(Example, cases), Example(Case((130,)), None, "far_tokens")],
        "history": [Example(Case((9,), seed=seed), None, "others") for seed in (1, 2, 3, 4)],
    }
    monkeypatch.setattr(compile_plan, "of_law", lambda law, domain, seed, count, look, strategy: [*map(look, examples[law.name])])
    worker = Recorder()
    compilers = Compilers([worker], None)
    plan = plan_of(compilers, laws=("pure", "history"))
    for planned in (plan.of("pure"), plan.of("history")):
        for example in planned.examples:
            planned.wait(example)
    compiled_examples = [Run.parse(question.line).example for question in worker.questions]
    assert sorted((one.case.lengths, one.variant or "", one.case.seed) for one in compiled_examples) == [
        *(((4,), "", 0), ((6, 6), "", 0), ((7, 7, 7), "", 0)),
        *(((9,), "others", 1), ((9,), "others", 2)),
    ]
    compilers.close()


@pytest.mark.slow
def test_a_plan_is_the_same_for_the_same_seed_and_goes_far() -> None:
    none = Compilers([], None)
    drawn = [plan_of(none, laws=("oracle",), seed=seed).of("oracle").examples for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1]
    keys = [{key_of(example.case) for example in examples} for examples in drawn]
    assert keys[0] != keys[2]
    assert max(max(example.case.lengths) for example in drawn[0]) > 300
    assert REACH > 1
    for planned_example in drawn[0]:
        assert LAWS["oracle"].accept(planned_example) is None
        assert Domain().outside(planned_example.case) is None


def test_a_law_that_a_domain_does_not_have_is_not_planned() -> None:
    domain = dataclasses.replace(Domain(), packed=False)
    planned = plan_of(Compilers([], None), domain, ("packed",)).of("packed")
    assert (planned.examples, planned.compiled) == ([], {})


@pytest.mark.slow
def test_modules_have_plans_too() -> None:
    planned = plan_of(Compilers([], None), ModuleDomain("l2norm"), ("oracle",)).of("oracle")
    assert len(planned.examples) == 20


ONE_STREAM = (
    Domain(streams=False),
    ModuleDomain("l2norm", streams=False),
    LayerDomain(streams=False),
    PoolDomain(rule=dataclasses.replace(PoolDomain().rule, streams=False)),
    CallDomain(streams=False),
)


@pytest.mark.usefixtures("small_palettes")
@pytest.mark.slow
def test_two_streams_are_drawn_on_a_gpu_for_domains_that_allow_them() -> None:
    for one in ONE_STREAM:
        two = (
            dataclasses.replace(one, rule=dataclasses.replace(one.rule, streams=True))
            if isinstance(one, PoolDomain)
            else dataclasses.replace(one, streams=True)
        )

        def drawn(domain: Any, device: str) -> bool:
            plan = Plan(domain, ["history"], 6, lambda _: 48, run_of, Compilers([], None), device=device)
            return any(example.variant == "streams" for example in plan.of("history").examples)

        assert [drawn(two, "cuda"), drawn(one, "cuda"), drawn(two, "cpu")] == [True, False, False], one


@pytest.mark.slow
def test_what_cannot_be_compiled_holds_up_nobody() -> None:
    worker = Recorder(fails=True)
    compilers = Compilers([worker], Describe("x"))
    planned = plan_of(compilers, laws=("cut",)).of("cut")
    for example in planned.examples:
        planned.wait(example)
    assert isinstance(worker.questions[1], Compile)
    assert len(worker.questions) == 1 + len(planned.compiled) > 1
    compilers.close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_process_without_work_shares_what_another_one_compiles(*, shared: bool) -> None:
    """But not where Triton chooses by time."""
    both, first, later = threading.Barrier(2, timeout=30.0), Compile("law=oracle"), Compile("law=cut")
    begun = threading.Event()

    class Meets(Recorder):
        def ask(self, question: Any, deadline_s: float | None = None) -> dict[str, Any]:
            self.questions.append(question)
            if question is first:
                begun.set()
                both.wait() if shared else time.sleep(0.3)
            return {}

    workers = [Meets(), Meets()]
    compilers = Compilers(workers, None)
    compilation = compilers.prepare(first, "family", "first", shared=shared)
    assert compilation is not None
    assert begun.wait(30.0)
    other = compilers.prepare(later, "other", "later", shared=shared)  # whoever compiles it is free for the first one then
    assert other is not None
    other.wait()
    compilation.wait()
    asked = [question for worker in workers for question in worker.questions]
    assert asked.count(first) == (2 if shared else 1)
    assert not both.broken
    assert compilers.notes.any is False
    compilers.close()


@pytest.mark.slow
def test_after_the_end_nothing_is_compiled_and_nobody_waits() -> None:
    worker = Recorder()
    compilers = Compilers([worker], Describe("x"))
    compilers.close()
    assert compilers.prepare(Compile("law=oracle"), "family", "key") is None
    planned = plan_of(compilers, laws=("cut",)).of("cut")
    planned.wait(planned.examples[0])
    assert worker.questions in ([], [Describe("x")])


def test_a_plan_that_is_closed_draws_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Example] = []
    begun = threading.Event()

    def draw(law: Any, domain: Any, seed: int, examples: int, look: Any, strategy: Any) -> None:
        def record(example: Example) -> None:
            begun.set()
            look(example)
            drawn.append(example)

        of_law(law, domain, seed, examples, record, strategy)

    monkeypatch.setattr(compile_plan, "of_law", draw)
    plan = Plan(Domain(), ("oracle", "cut"), 5, lambda _: 5000, run_of, Compilers([], None))
    assert begun.wait(60)
    plan.close()
    for law in ("oracle", "cut"):
        with pytest.raises(concurrent.futures.CancelledError):
            plan.of(law)
    assert len(drawn) < 5000


@pytest.mark.usefixtures("small_palettes")
@pytest.mark.slow
def test_what_was_compiled_before_is_not_waited_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def questions(notes: Notes, *, fails: bool = False) -> list[dict[str, Any]]:
        worker = Recorder(fails=fails)
        compilers = Compilers([worker], Describe("fla/chunk"), notes)
        planned = plan_of(compilers, laws=("cut",)).of("cut")
        for example in planned.examples:
            planned.wait(example)
        compilers.close()
        return worker.questions

    lost = questions(Notes("fla/chunk", "5", "one"), fails=True)  # nothing was compiled: nothing is noted
    assert questions(Notes("fla/chunk", "5", "one")) == lost
    assert len(lost) > 1
    assert questions(Notes("fla/chunk", "5", "one")) == []  # nobody even starts
    assert questions(Notes("fla/chunk", "5", "another")) == lost  # another version's kernels are others
    assert questions(Notes("fla/chunk", "6", "one")) == lost
    assert questions(Notes("fla/fused_recurrent", "5", "one")) == lost
    assert questions(Notes()) == questions(Notes()) == lost  # of somebody's own file nothing is noted
    shutil.rmtree(tmp_path / "cache")
    assert questions(Notes("fla/chunk", "5", "one")) == lost


def test_notes_that_cannot_be_written_are_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    notes = Notes("fla/chunk", "5", "one")
    notes.add("words")
    assert not notes.has("words")
    assert not notes.any
    monkeypatch.setattr(pathlib.Path, "exists", None)  # which raises where a folder above may not be entered
    monkeypatch.setattr(pathlib.Path, "is_dir", None)
    assert not Notes("fla/chunk", "5", "one").any
    assert not Notes("fla/chunk", "5", "one").has("words")


def test_laws_that_run_forward_alone_come_first() -> None:
    laws = ["oracle", "recall", "cut", "recurrent", "history"]
    assert in_order(laws) == ["recall", "oracle", "history", "cut", "recurrent"]
    for name in FORWARD:
        assert name in LAWS


@pytest.mark.parametrize("law", FORWARD)
def test_those_laws_do_run_forward_alone(law: str) -> None:
    """Their checks never ask for a gradient, whatever the case says."""

    class Bench:
        domain, algorithm, cotangents = Domain(), "chunkwise", list[Any]()

        def call(self, case: Any) -> Any:
            return case.inputs(), case.cotangents() if case.backward else None

        def run(self, inputs: Any, cotangents: Any, **_: Any) -> Any:
            self.cotangents.append(cotangents)
            raise StopIteration

        def bounds(self, inputs: Any, cotangents: Any, *_: Any) -> Any:
            from oracles.tolerance.bound import bounds

            self.cotangents.append(cotangents)
            return bounds(example.case.spec, inputs, None, "chunkwise")

        def truth(self, inputs: Any, cotangents: Any) -> Any:
            from oracles.tolerance.bound import truth

            return truth(example.case.spec, inputs, None)

    examples: list[Example] = []
    seeded(LAWS[law].draw(Domain()), 1, 6, examples.append)
    for example in examples:
        bench = Bench()
        with contextlib.suppress(Exception):  # it is no bench to finish with
            list(LAWS[law].check(bench, example))
        assert bench.cotangents
        assert all(cotangents is None for cotangents in bench.cotangents)


class Counted(Chunkwise):
    """Right, and it counts its calls."""

    calls: ClassVar[list[Any]] = []

    def run(self, x: Inputs) -> Any:
        self.calls.append((x.q.shape, x.state is None, x.qk_norm, x.q.requires_grad))
        return super().run(x)


@pytest.mark.slow
def test_what_compiles_makes_the_calls_that_the_check_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for cases that are blind, which the check leaves sooner."""
    adapter = Counted()
    monkeypatch.setattr("verify.execution.judging._LOADED", {"mine.py:Counted": adapter})
    for name, law in LAWS.items():
        if law.needs(adapter.domain) is not None:
            continue
        examples, compared = list[Example](), 0
        seeded(law.draw(adapter.domain).filter(lambda example: example.case.tokens <= 100), 3, 2, examples.append)
        for run in (Run(name, "mine.py:Counted", example) for example in examples):
            adapter.calls.clear()
            compiled(run)
            ahead = list(adapter.calls)
            adapter.calls.clear()
            UNLIKE.clear()  # after a difference, a process does not ask about that promise again
            if execute(run).verdict is Verdict.HOLDS:
                assert ahead == adapter.calls, run
                compared += 1
        assert compared, name


@pytest.mark.parametrize("tune", ["5", "native"])
def test_kernels_that_were_passed_over_are_waited_for_in_a_second_pass(tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = list[bool]()

    @contextlib.contextmanager
    def unlaunched(passed: list[str] | None = None) -> Iterator[None]:
        passes.append(passed is not None)
        if passed is not None:
            passed.append("kernel")
        yield

    monkeypatch.setattr("verify.execution.judging._LOADED", {"mine.py:Counted": Counted()})
    monkeypatch.setattr("verify.execution.execute.unlaunched", unlaunched)
    timed = compiled(Run("oracle", "mine.py:Counted", Example(Case((3,))), "ieee", "cpu", tune))
    assert (timed, passes) == ((True, []) if tune == "native" else (False, [True, False]))


def test_what_a_path_launches_is_compiled_once_for_what_triton_sees_of_a_case() -> None:
    """Lengths count as far as Triton compiles for them, and layers without kernels are not compiled."""

    def compiled_of(*cases: ParallelCase) -> list[str]:
        worker = Recorder()
        compilers = Compilers([worker], None)
        drawn = [Example(case) for case in cases]
        with mock.patch.object(compile_plan, "of_law", lambda law, domain, seed, count, look, strategy: [*map(look, drawn)]):
            plan = plan_of(compilers, PathDomain(operation=cases[0].operation), ("parallel",))
            planned = plan.of("parallel")
        for example in planned.examples:
            planned.wait(example)
        compilers.close()
        return [str(Run.parse(question.line).example.case) for question in worker.questions]

    case = functools.partial(ParallelCase, operation="gated_delta_rule", cp=2, packed=True, layout="contiguous")
    cases = [case((3, 5)), case((7, 3), seed=4, gate="mixed"), case((16, 16)), case((32, 64)), case((3, 5), state="random")]
    assert compiled_of(*cases) == [str(cases[number]) for number in (0, 2, 4)]
    layer = functools.partial(ParallelCase, (4, 4), packed=True, cp=2, heads=2, value_heads=2)
    assert compiled_of(layer(), layer(conv="fla")) == [str(layer(conv="fla"))]
