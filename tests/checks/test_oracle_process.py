"""A process beside a rank has the bounds ready, the same bit for bit; whatever becomes of it changes no verdict and leaves nobody.

This file is also what the ranks of its tests serve, and has the paths that they run.
"""

import contextlib
import functools
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from oracles.tolerance.bound import Bound
from properties.paths.case import ParallelCase
from tests.commands import Command
from tests.processes import SOON_S, gone
from tests.ranks.test_ranks import OFF, RAISED, SPINS, Rank, dump, of
from tests.together import for_each
from verify.adapters.gdn.adapter import GdnLayer
from verify.bench import oracle_process
from verify.bench.oracle_process import Beside, Work
from verify.engine.asking import ask
from verify.execution import service
from verify.execution.line import Run
from verify.findings.store import Store
from verify.process.environment import ORACLE_PROCESSES
from verify.process.messages import RunOne
from verify.process.outcome import Outcome, Verdict
from verify.process.worker import interrogate
from verify.ranks import group as ranks
from verify.ranks.collectives import Place
from verify.ranks.group import RankGroup, environment

pytestmark = pytest.mark.ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = "tests/checks/test_oracle_process.py"
LINE = "law=parallel adapter={adapter} lengths=8 cp={ranks} heads=2 value_heads=2 backward=no"
WORKS: dict[str, tuple[str, str, str, int | None]] = {
    "layer": ("lengths=6+0+8 packed=yes heads=2 value_heads=4 conv_bias=yes dtype=bf16 seed=3", "chunkwise", "ieee", None),
    "batch": ("lengths=10+10 packed=no heads=1 value_heads=1 allow_neg_eigval=yes seed=5", "recurrent", "ieee", None),
    "tf32": ("lengths=34 dtype=fp32 backward=no seed=7", "chunkwise", "tf32", 16),
    "convolution": ("lengths=40 operation=causal_conv1d conv_bias=yes seed=9", "pointwise", "ieee", None),
    "kda": ("lengths=5+70 packed=yes operation=kda layout=contiguous seed=11", "chunkwise", "ieee", 64),
    "long": ("lengths=600 hidden=32 backward=no seed=13", "chunkwise", "ieee", 64),  # over a pipe's 64 KiB
    "hopeless": ("lengths=8", "guesswork", "ieee", None),
}


def work(name: str) -> Work:
    line, *rest = WORKS[name]
    return Work(ParallelCase.parse(line), *rest)


# What ranks do for these tests


def answer(question: dict[str, Any]) -> dict[str, Any]:
    if "do" in question:
        return DOES[question["do"]](*question["with"], **question.get("how", {}))
    question = dict(question)
    if not question.pop("beside", True):
        process, oracle_process._BESIDE[:] = list(oracle_process._BESIDE), []
        try:
            return service.answer(question)
        finally:
            oracle_process._BESIDE[:] = process
    return service.answer(question)


def process_state() -> dict[str, Any]:
    """The process beside this one, if it is there, and what it has open."""
    pid = oracle_process._BESIDE[0].pid if oracle_process._BESIDE and oracle_process._BESIDE[0]._to >= 0 else 0
    return {"pid": pid, "open": sorted(map(int, os.listdir(f"/proc/{pid}/fd"))) if pid else []}


def stopped() -> dict[str, Any]:
    """The process beside this one, which is stopped: it does not answer before a path has run."""
    os.kill(oracle_process._BESIDE[0].pid, signal.SIGSTOP)
    return process_state()


def bits(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.contiguous().view(torch.int64).flatten().tolist()


def same(one: dict[str, Bound], other: dict[str, Bound]) -> bool:
    def plain(bounds: dict[str, Bound]) -> list[Any]:
        return [(name, bits(bound.value), bits(bound.allowed), bound.origin, bound.clear) for name, bound in bounds.items()]

    return plain(one) == plain(other)


def compared(*names: str, kind: str = "Beside") -> dict[str, Any]:
    """The bounds of the last, if those of the others are never looked at, against those computed here."""
    here: list[Work] = []
    computed = Work.bounds
    beside = oracle_process._BESIDE[0] if kind == "Beside" else globals()[kind]()
    Work.bounds = lambda self: here.append(self) or computed(self)  # type: ignore[method-assign, func-returns-value]
    try:
        pending = [beside.ask(work(name)) for name in names]
        got = pending[-1]()
        count, wanted = len(here), computed(work(names[-1]))
        alike = same(got, wanted)
        finer = alike and all(same({"": got[name].finer()}, {"": wanted[name].finer()}) for name in list(got)[:1])  # type: ignore[misc]
        early = [same(late(), computed(work(name))) for late, name in zip(pending[:-1], names, strict=False)]
    finally:
        Work.bounds = computed  # type: ignore[method-assign]
        if kind != "Beside":
            beside.end()
    return {"same": alike, "finer": finer, "early": early, "here": count}


def refused(name: str) -> dict[str, Any]:
    """What looking at the bounds raises."""
    try:
        oracle_process.ask(work(name))()
    except ValueError as error:
        return {"raised": str(error), **process_state()}
    return {"raised": "", **process_state()}


@functools.cache
def bounds_of_layer() -> dict[str, Bound]:
    """The bounds of the layer's case, computed once in each rank."""
    return work("layer").bounds()


def misled(rubbish: str) -> dict[str, Any]:
    """The bounds, where a process has written this instead of its answer."""
    beside = Beside()
    pending = beside.ask(work("layer"))
    source, to = os.pipe()
    os.write(to, rubbish.encode())
    os.close(to)
    beside._from.close()
    beside._from = open(source, "rb")  # noqa: SIM115 - the process beside closes it
    return {"same": same(pending(), bounds_of_layer()), "ended": gone([beside.pid], 0.0) and beside._to < 0}


class NoNumbers(Beside):
    """It takes the first answer that comes."""

    def ask(self, work: Work) -> Callable[[], dict[str, Bound]]:
        self._number = 0
        return super().ask(work)


DOES: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (process_state, stopped, compared, refused, misled)
}


class Right(GdnLayer):
    """Our layer, as it is."""


class WithoutOracle(GdnLayer):
    """While it runs, the process beside it dies."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        os.kill(oracle_process._BESIDE[0].pid, signal.SIGKILL)
        return super().run(x, place)


class WithSlowOracle(GdnLayer):
    """The process beside it, which was stopped, goes on soon after."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        threading.Timer(0.6, os.kill, (oracle_process._BESIDE[0].pid, signal.SIGCONT)).start()
        return super().run(x, place)


class LeavesTheLastOut(GdnLayer):
    """The last token of the last rank is zero."""

    def run(self, x: Inputs, place: Place) -> Tensor:
        y = super().run(x, place)
        return torch.cat([y[:-1], 0 * y[-1:]]) if place.cp.rank == place.cp.size - 1 else y


# Bounds


@pytest.fixture(scope="module")
def one() -> Iterator[RankGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ORACLE_PROCESSES, "1")
        with RankGroup(1, deadline_s=30.0, serves="tests.checks.test_oracle_process:answer") as group:
            yield group


def do(group: RankGroup, what: str, *arguments: str) -> dict[str, Any]:
    return group.ask({"do": what, "with": arguments})


def outcome(group: RankGroup, adapter: str, deadline_s: float | None = None, *, beside: bool = True) -> Outcome:
    run = LINE.format(adapter=f"{HERE}:{adapter}", ranks=group.size)
    return Outcome.from_json(group.ask({**RunOne(run).to_json(), "beside": beside}, deadline_s))


def without_times(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in outcome.to_json().items() if name not in ("kernel_s", "oracle_s", "cpu_s", "reach")}


@pytest.mark.parametrize("name", ["layer", "batch", "tf32", "convolution", "kda", "long"])
@pytest.mark.slow
def test_bounds_from_beside_are_those_computed_here_bit_for_bit(one: RankGroup, name: str) -> None:
    assert do(one, "compared", name) == {"same": True, "finer": True, "early": [], "here": 0}


@pytest.mark.slow
def test_answer_that_nobody_read_is_not_taken_for_the_next(one: RankGroup) -> None:
    assert do(one, "compared", "long", "kda", "layer") == {"same": True, "finer": True, "early": [True, True], "here": 0}


@pytest.mark.slow
def test_without_numbers_it_would_be(one: RankGroup) -> None:
    reply = one.ask({"do": "compared", "with": ["layer", "kda"], "how": {"kind": "NoNumbers"}})
    assert not reply["same"]


@pytest.mark.slow
def test_what_is_wrong_with_a_case_is_raised_in_the_rank(one: RankGroup) -> None:
    before = do(one, "process_state")
    reply = do(one, "refused", "hopeless")
    assert reply.pop("raised").startswith("algorithm must be one of ")
    assert reply == before
    assert do(one, "compared", "layer")["here"] == 0


@pytest.mark.slow
@for_each(
    "rubbish",
    [
        "",
        "garbage\n",
        "[]\n",
        '{"number": 1',
        '{"number": 1, "bytes": 16, "bounds": [["y", "", [1], [1]]]}\nshort',
        '{"number": 1, "bytes": 8, "bounds": [["y", "", [1], [1]]]}\n12345678',
        '{"number": 1, "bytes": -1, "bounds": []}\n',
        '{"number": 2, "bytes": 0, "bounds": []}\n',
        '{"number": 0, "bytes": 99, "bounds": []}\n',
    ],
)
def test_rubbish_is_no_answer(one: RankGroup, rubbish: str) -> None:
    assert do(one, "misled", rubbish) == {"same": True, "ended": True}


# Verdicts


def test_supervisor_hears_the_rank_alone(one: RankGroup) -> None:
    """Else it would not see the end of a rank whose pipe another process has, and would read two ranks' stacks as one's."""
    assert do(one, "process_state")["open"] == [0, 1, 2]
    interrogate(one._seats)
    end = time.monotonic() + 20.0  # a busy machine may take longer than interrogate waits
    while "Current thread" not in one._seats[0].words() and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.3)
    wrote = one._seats[0].words()
    assert wrote.count("Current thread") == 1


@pytest.mark.slow
def test_waiting_for_the_oracle_counts_as_oracle(one: RankGroup) -> None:
    do(one, "stopped")
    got = outcome(one, "WithSlowOracle")
    assert got.verdict is Verdict.HOLDS
    assert got.oracle_s > max(0.3, got.kernel_s)


@pytest.mark.slow
def test_hang_of_the_oracle_is_none_of_the_implementation(one: RankGroup, tmp_path: pathlib.Path) -> None:
    assert outcome(one, "Right").verdict is Verdict.HOLDS
    pid, before = do(one, "stopped")["pid"], one.deadline_s
    run = Run.parse(LINE.format(adapter=f"{HERE}:Right", ranks=1))
    one.deadline_s = 1.5
    try:
        got = ask(run, one, Store(tmp_path))
    finally:
        one.deadline_s = before
    assert got.verdict is Verdict.UNKNOWN
    assert "the oracle did not finish: rank 0 hung: no answer within 1.5 s, in _answer (oracle_process.py:" in got.reason
    assert got.reason.endswith(f": {run}")
    assert gone([pid], SOON_S)


@pytest.mark.slow
def test_killed_oracle_changes_no_verdict(one: RankGroup) -> None:
    before = do(one, "process_state")["pid"]
    assert before
    wanted = without_times(outcome(one, "Right", beside=False))
    assert wanted["verdict"] == "holds"
    assert without_times(outcome(one, "Right")) == wanted
    assert do(one, "process_state")["pid"] == before
    do(one, "stopped")
    assert without_times(outcome(one, "WithoutOracle")) == wanted
    assert do(one, "process_state")["pid"] == 0
    assert without_times(outcome(one, "Right")) == wanted
    assert not pathlib.Path(f"/proc/{before}").exists()  # not even a zombie


@pytest.mark.slow
def test_broken_path_is_found_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORACLE_PROCESSES, "1")
    with RankGroup(2, deadline_s=30.0, serves="tests.checks.test_oracle_process:answer") as two:
        right, wrong = outcome(two, "Right"), outcome(two, "LeavesTheLastOut")
        assert right.verdict is Verdict.HOLDS
        assert wrong.verdict is Verdict.BROKEN
        assert {finding.place for finding in wrong.findings} == {"rank 1: y", "rank 0: y with tp=1 cp=1"}
        assert without_times(outcome(two, "LeavesTheLastOut", beside=False)) == without_times(wrong)


@pytest.mark.slow
def test_rank_that_waits_for_its_oracle_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike one that stands still elsewhere."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    monkeypatch.setattr(ranks, "LOOK_S", 0.2)
    waits = dump([("/opt/any.py", oracle_process.Beside._answer.__code__.co_name), ("/opt/bench.py", "wait")])
    groups = [of(Rank((0.0, RAISED)), Rank((1.8, OFF), wrote=wrote)) for wrote in (waits, SPINS)]
    found = [Outcome.from_json(group.ask({}, 20.0)).findings for group in groups]
    assert [[finding.place for finding in findings] for findings in found] == [["rank 0: call", "rank 1: o"], ["rank 0: call"]]


# Processes


def test_it_ends_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORACLE_PROCESSES, "1")
    with RankGroup(1, serves="tests.checks.test_oracle_process:answer") as group:
        pid = do(group, "process_state")["pid"]
        assert not gone([pid], 0.0)
    assert gone([pid], SOON_S)


ALONE = """
import itertools, time, torch
torch.set_num_threads(1)
from tests.checks.test_oracle_process import Beside, Work, work
once = Work.bounds
Work.bounds = lambda work: [once(work) for _ in itertools.count()]
beside = Beside()
beside.ask(work("kda"))
print(beside.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_it_ends_with_a_killed_rank_in_the_middle_of_a_case() -> None:
    """On its own: here no supervisor kills the group."""

    def seconds(pid: int) -> float:
        ticks = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]
        return int(ticks) / os.sysconf("SC_CLK_TCK")

    with Command([], ROOT, program=ALONE) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        start = seconds(pid)
        while seconds(pid) < start + 0.3:  # it is at work, and never done
            time.sleep(0.02)
        rank.send_signal(signal.SIGKILL)
        rank.wait(10.0)
        ended = gone([pid], SOON_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert ended


# Where it helps


@for_each(
    ("variables", "cores", "wanted"),
    [
        ({}, 64, 0),  # no rank
        ({"LOCAL_WORLD_SIZE": "4"}, 8, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 7, 0),
        ({"LOCAL_WORLD_SIZE": "4"}, 12, 2),
        ({"LOCAL_WORLD_SIZE": "4"}, 64, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, None, 0),  # not Linux
        ({"LOCAL_WORLD_SIZE": "4", ORACLE_PROCESSES: "1"}, 1, 1),
        ({"LOCAL_WORLD_SIZE": "4", ORACLE_PROCESSES: "3"}, 1, 3),
        ({"LOCAL_WORLD_SIZE": "4", ORACLE_PROCESSES: "0"}, 64, 0),
    ],
)
def test_ranks_have_as_many_as_there_are_cores_left(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cores: int | None, wanted: int
) -> None:
    had: list[object] = []
    if cores is None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(oracle_process, "Beside", object)
    monkeypatch.setattr(oracle_process, "_BESIDE", had)
    oracle_process.start(variables)
    assert len(had) == wanted


@for_each("word", ["many", "-1", "65"])
def test_a_count_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=f"GDN_VERIFY_AHEAD must be .* in 0..64, got '{word}'"):
        oracle_process.start({ORACLE_PROCESSES: word})


class Notes:
    """Keeps the questions."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def ask(self, work: Work) -> object:
        self.works.append(work)
        return (self, work)


def test_questions_of_one_batch_are_begun_in_turns_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, works = [Notes(), Notes()], [work("layer"), work("kda"), work("tf32")]
    monkeypatch.setattr(oracle_process, "_BESIDE", notes)
    monkeypatch.setattr(oracle_process, "_BEGUN", {})
    oracle_process.begin(works)
    assert [beside.works for beside in notes] == [[works[0], works[2]], [works[1]]]
    assert [oracle_process.ask(question) for question in works] == [
        (notes[0], works[0]),
        (notes[1], works[1]),
        (notes[0], works[2]),
    ]
    assert sum(len(beside.works) for beside in notes) == 3
    oracle_process.begin([])
    oracle_process.ask(works[1])
    assert notes[0].works[-1] is works[1], "what was begun before is forgotten"


def test_ranks_of_a_host_know_how_many_they_are_and_leave_the_gpu_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment("gloo", 1, 4, 1, one_host=True)["LOCAL_WORLD_SIZE"] == "4"
    assert "LOCAL_WORLD_SIZE" not in environment("gloo", 1, 16, 1, one_host=False)  # torchrun says it
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment("nccl", 0, 1, 0, one_host=True)["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_bounds_are_made_when_they_are_looked_at() -> None:
    calls: list[int] = []

    def wait() -> dict[str, Bound]:
        calls.append(1)
        return {"y": Bound(torch.ones(1), torch.ones(1))}

    later = oracle_process.Later(wait)
    assert not calls
    assert (list(later), len(later), later["y"].value.item()) == (["y"], 1, 1.0)
    with pytest.raises(KeyError):
        later["o"]
