"""Illegal input of pools, layers, paths and traces: our contract refuses all of it, and what an implementation does is reported.

The illegal inputs of rules and modules are in tests/laws/test_refusals.py and tests/laws/test_modules.py.
"""

import dataclasses
import io
import math
import os
import threading
import types
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from oracles.operation import Inputs
from properties.books import Book, book_named
from properties.layers.domain import LayerDomain
from properties.paths.domain import PathDomain
from properties.paths.illegal import CHANGES, JUDGED, IllegalLayout, check_layout
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from properties.traces.case import Sizes
from properties.traces.domain import TraceDomain
from properties.traces.illegal import check_step
from properties.traces.laws import TRACE_LAWS
from properties.words.example import Example
from verify.adapters.base import Adapter, Engine, PathAdapter, TraceAdapter
from verify.adapters.gdn.pool import Pool, PoolEngine
from verify.cli import check_command
from verify.engine.drawing import seeded
from verify.engine.shard import WHOLE
from verify.execution.refusals import probe
from verify.execution.service import answer
from verify.process.messages import Describe, Reaction, Refuse
from verify.process.worker import WorkerLost
from verify.ranks.collectives import Place
from verify.ranks.group import RankGroup
from verify.ranks.merge import IDLE, failed, merge, parted

RULES_OF_PATHS: dict[str, Any] = {
    "layouts": ("contiguous", "zigzag", "zigzag_batch"),
    "choices": (("qk_norm", ("separate", "in_kernel")),),
    "refuses": False,
}
DOMAINS: dict[str, list[Any]] = {
    "pools": [
        PoolDomain(trees=True),
        PoolDomain(trees=True, padding_slots=("0",), layout="vk", rule=Domain(packed=False, backward=False)),
        PoolDomain(most_tokens=1, rule=Domain(operation="kda", in_kernel=("both",), backward=False)),
        PoolDomain(rule=Domain(decays=("linear",), grouped_heads=False, backward=False)),
    ],
    "layers": [LayerDomain(), LayerDomain("kda_layer", conv_widths=(1, 4)), LayerDomain(packed=False, grouped_heads=False)],
    "paths": [
        PathDomain(refuses=False),
        PathDomain(refuses=False, packed=False),
        *(PathDomain(operation, **RULES_OF_PATHS) for operation in ("gated_delta_rule", "kda")),
        PathDomain("causal_conv1d", **RULES_OF_PATHS | {"choices": (), "layouts": ("contiguous",)}),
        PathDomain("kda_layer", **RULES_OF_PATHS | {"choices": (), "layouts": ("contiguous",)}),
    ],
    "traces": [TraceDomain(), TraceDomain(padding_slots=("0",), key_widths=(24,), value_dims=(40, 96))],
}
# How many illegal inputs do not exist for the domains above.
NOT_RUN = {"pools": [0, 3, 2, 2], "layers": [0, 0, 3], "paths": [0, 5, 0, 0, 4, 4], "traces": [0, 0]}


def calls(book: Book, domain: Any) -> dict[str, tuple[Any, Any] | str]:
    return {name: book.illegal.call(name, domain) for name in book.illegal.names(domain.operation)}


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.slow_after_first
def test_our_contract_refuses_what_is_wrong_and_nothing_else_is_wrong(name: str) -> None:
    book = book_named(name)
    for domain, absent in zip(DOMAINS[name], NOT_RUN[name], strict=True):
        found = calls(book, domain)
        assert sum(isinstance(call, str) for call in found.values()) == absent, found
        for what, call in found.items():
            if isinstance(call, str):
                assert call.endswith("is unsupported"), (what, call)
                continue
            case, wrong = call
            assert domain.outside(case) is None, what
            if name in ("pools", "layers"):
                book.illegal.check(case, case.inputs())
            with pytest.raises(ValueError, match=r"must|needs") as refused:
                book.illegal.check(case, wrong)
            assert "\n" not in str(refused.value), what


def test_every_operation_of_the_books_has_illegal_inputs() -> None:
    for name, domains in DOMAINS.items():
        assert {domain.operation for domain in domains} == {*book_named(name).operations}
    assert book_named("calls").illegal.names("call") == []


def test_layouts_of_a_legal_case_are_legal() -> None:
    for domain in DOMAINS["paths"]:
        for what, call in calls(book_named("paths"), domain).items():
            if not isinstance(call, str):
                check_layout(call[0], IllegalLayout(call[0].lengths if call[0].packed else ())), what


def test_steps_of_drawn_traces_are_legal() -> None:
    def look(example: Example) -> None:
        case = example.case
        events = case.trace.split("/")
        for step in case.plan:
            if step.event > 1:
                check_step(dataclasses.replace(case, trace="/".join(events[: step.event - 1])), step)

    seeded(TRACE_LAWS["ledger"].draw(TraceDomain()), 0, 12, look)


# What implementations do


class Refuses(Adapter):
    def run(self, x: Inputs) -> Any:
        raise TypeError("not like this")


class Silent(Adapter):
    def run(self, x: Inputs) -> Any:
        assert x.options == {"mode": "fast"}, "options reach an illegal call too"


OPTIONS: dict[str, Any] = {"options": (("mode", ("fast", "slow")),)}


@pytest.mark.parametrize(
    "domain",
    [PoolDomain(layout="vk", **OPTIONS), LayerDomain(**OPTIONS), LayerDomain("kda_layer", **OPTIONS)],
    ids=lambda domain: domain.operation,
)
@pytest.mark.slow_after_first
def test_probe_distinguishes_refusing_from_silent(domain: Any) -> None:
    for kind, did in ((Refuses, "refuses (TypeError)"), (Silent, "returns numbers without an error")):
        adapter = kind()
        adapter.domain = domain
        for name in calls(book_named("pools" if isinstance(domain, PoolDomain) else "layers"), domain):
            answer = probe(adapter, name)
            assert answer in (did, "not run: drafts=tree is unsupported"), name


class Path(PathAdapter):
    """Each rank does what `does` has for it."""

    domain = PathDomain(refuses=False)
    does = ("silent", "silent")

    def run(self, x: Inputs, place: Place) -> Tensor:
        what = self.does[place.rank.tp + place.rank.cp]
        if what == "late":
            place.cp.all_reduce(x.hidden.sum())
        if what in ("refuse", "late"):
            raise TypeError("not like this")
        if what == "wait":
            place.cp.all_reduce(x.hidden.sum())
        if what == "gather":
            place.cp.all_gather(x.hidden[:1])
        return x.hidden


def test_probe_reports_what_each_rank_does() -> None:
    for does, did in [
        (("silent", "silent"), "returns numbers without an error"),
        (("refuse", "refuse"), "refuses (TypeError)"),
        (("late", "late"), "refuses (TypeError)"),
        (("refuse", "silent"), "refuses (TypeError) on rank 0, returns numbers without an error on rank 1"),
        (("refuse", "wait"), "refuses (TypeError) on rank 0, waits for a rank that has raised an error on rank 1"),
        (("gather", "wait"), "calls other collectives than the other ranks"),
        (("silent", "wait"), "returns numbers without an error on rank 0, calls other collectives than the other ranks on rank 1"),
    ]:
        adapter = Path()
        adapter.does = does
        assert probe(adapter, "tokens that cp does not divide") == did, does


def test_ranks_get_what_is_wrong_and_only_the_longer_ones_a_token_more() -> None:
    seen: dict[int, Inputs] = {}

    class Sees(Path):
        def run(self, x: Inputs, place: Place) -> Tensor:
            seen[place.rank.cp + place.rank.tp] = x
            return x.hidden

    wanted = {
        "tokens that cp does not divide": ([11, 10], [0, 1, 9, 21]),
        "tokens that 2 cp does not divide": ([11, 11], [0, 2, 10, 22]),
        "tokens that tp does not divide": ([11, 10], [0, 1, 9, 21]),
        "cu_seqlens that end before the tokens do": ([10, 10], [0, 8, 16]),
        "cu_seqlens that do not start at 0": ([10, 10], [4, 8, 20]),
        "cu_seqlens that decrease": ([10, 10], [0, 8, 20, 24, 20]),
        "cu_seqlens_padded with less room than a sequence needs": ([10, 10], [0, 9, 20]),
    }
    for name, (tokens, offsets) in wanted.items():
        assert probe(Sees(), name) == "returns numbers without an error"
        assert [len(x.hidden) for _, x in sorted(seen.items())] == tokens, name
        assert [x.cu_seqlens.tolist() for x in seen.values()] == [offsets] * 2, name
    probe(Sees(), "heads that the ranks do not divide")
    assert seen[0].layer.heads == 3


def test_what_a_law_judges_is_not_reported_and_what_it_does_not_judge_is() -> None:
    adapter = Path()
    adapter.domain = PathDomain()
    judged = "not run: the law refused judges this, because the domain has refuses=True"
    for name in CHANGES:
        assert probe(adapter, name) == (judged if name in JUDGED.values() else "returns numbers without an error"), name
    adapter.domain = PathDomain(packed=False)
    assert probe(adapter, "tokens that 2 cp does not divide") == "returns numbers without an error", (
        "the law judges packed calls alone"
    )


def test_path_that_needs_processes_says_how_to_start_them() -> None:
    adapter = Path()
    adapter.domain = PathDomain(processes=True, refuses=False)
    assert probe(adapter, "cu_seqlens that decrease") == "not run: it needs 2 ranks that are processes, as with --ranks 2"


def test_answers_of_ranks_that_are_processes_are_merged() -> None:
    refuses, silent = Reaction("refuses (ValueError)", left=True), Reaction("returns numbers without an error")
    assert merge({0: refuses, 1: refuses, 2: Reaction(IDLE, idle=True)}) == Reaction("refuses (ValueError)")
    both = Reaction("refuses (ValueError) on rank 0, returns numbers without an error on rank 1")
    assert merge({1: silent, 0: refuses}) == both
    waits = "rank 1 waits in all_gather"
    assert merge({0: refuses}, waits) == Reaction("refuses (ValueError) on rank 0, while rank 1 waits in all_gather")
    assert (failed(refuses), failed(silent)) == (True, False)
    assert (parted([refuses, silent]), parted([refuses, refuses]), parted([silent, silent])) == (True, False, False)


class RefusesOrWaits(Path):
    does = ("refuse", "wait")


def test_worker_says_whether_a_rank_left_its_call() -> None:
    name = "tokens that cp does not divide"
    did = "refuses (TypeError) on rank 0, waits for a rank that has raised an error on rank 1"
    assert answer(Refuse(f"{__file__}:RefusesOrWaits", name).to_json()) == Reaction(did, left=True).to_json()
    assert answer(Refuse(f"{__file__}:Path", name).to_json()) == Reaction("returns numbers without an error").to_json()


@pytest.mark.slow
def test_rank_that_waits_for_one_that_refuses_is_reported_and_the_group_goes_on() -> None:
    name = "tokens that cp does not divide"
    with RankGroup(2) as group:
        found = group.ask(Refuse(f"{__file__}:RefusesOrWaits", name), 20.0)
        assert found["did"] == "refuses (TypeError) on rank 0, while rank 1 waits in all_reduce"
        for illegal in (name, "tokens that tp does not divide"):
            assert group.ask(Refuse(f"{__file__}:Path", illegal), 20.0)["did"] == "returns numbers without an error"


def checking_of(worker: Any, domain: Any, device: str = "cpu", tune: str = "") -> Any:
    """What `_print_refusals` reads of a check."""
    return types.SimpleNamespace(
        describe=lambda: types.SimpleNamespace(domain=domain),
        settings=types.SimpleNamespace(shard=WHOLE, until=math.inf, device=device, tune=tune),
        defects=types.SimpleNamespace(
            left_out_of_any=lambda device: [("dqkwg", "num_warps=4")] if device == "cuda" else [],
            denied=[{"config": "BT=64"}] if device == "cuda" else [],
        ),
        workers=worker if isinstance(worker, list) else [worker],
    )


def test_an_error_of_ranks_is_printed_as_a_reason() -> None:
    class Ranks:
        deadline_s, loads = 120.0, 0

        def ask(self, question: Describe | Refuse, deadline_s: float) -> dict[str, Any]:
            if isinstance(question, Describe):  # before each call, with the time of a first start
                assert deadline_s == self.deadline_s
                self.loads += 1
                if self.loads == 3:
                    raise WorkerLost("crashed", "rank 0 killed by SIGABRT", "")
                return {}
            assert deadline_s <= 30
            assert (question.tune, question.left_out) == ("7", [("dqkwg", "num_warps=4")])  # as in the cases of the check
            assert question.denied == [{"config": "BT=64"}]
            if question.illegal == "cu_seqlens that decrease":
                raise WorkerLost("hung", "rank 1 hung", "")
            return {"error": "ranks disagree"}

    out = io.StringIO()
    domain = PathDomain("kda", **RULES_OF_PATHS)
    check_command._print_refusals("adapter", checking_of(Ranks(), domain, "cuda", "7"), out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "illegal input, reported and not judged:"
    assert lines[1].startswith("  not run: ranks disagree: tokens that 2 cp does not divide (zigzag); ")
    assert lines[2] == (
        "  not run: loading the adapter again crashed (rank 0 killed by SIGABRT): tokens that 2 cp does not divide (zigzag_batch)"
    )
    assert lines[3:] == ["  hung (rank 1 hung): cu_seqlens that decrease"]


def test_all_workers_are_asked_and_answers_are_printed_in_the_order_of_the_inputs() -> None:
    names = book_named("rules").illegal.names("gated_delta_rule")
    both = threading.Barrier(2, timeout=30.0)

    class Meets:
        deadline_s = 120.0

        def __init__(self) -> None:
            self.asked = list[str]()

        def ask(self, question: Describe | Refuse, deadline_s: float) -> dict[str, Any]:
            if isinstance(question, Describe):
                return {}
            if not self.asked:
                both.wait()
            self.asked.append(question.illegal)
            return {"did": f"does {len(names) - names.index(question.illegal)}"}

    workers, out = [Meets(), Meets()], io.StringIO()
    domain = Domain()
    did = check_command._print_refusals("adapter", checking_of(workers, domain), out)
    assert [name for several in did.values() for name in several] == list(names)
    assert sorted(name for worker in workers for name in worker.asked) == sorted(names)
    lines = out.getvalue().splitlines()
    assert lines[1:] == [f"  does {len(names) - place}: {name}" for place, name in enumerate(names)]


class Aborts(Path):
    """Ends the second rank if cu_seqlens end early, and refuses everything else on both ranks."""

    domain = PathDomain(ranks=2, processes=True, refuses=False, tensor_parallel=False)

    def run(self, x: Inputs, place: Place) -> Tensor:
        if x.cu_seqlens is not None and int(x.cu_seqlens[-1]) < 20 and place.rank.cp == 1:
            os.abort()
        raise TypeError("not like this")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_check_says_which_calls_ended_its_ranks_and_the_others_have_new_ranks() -> None:
    out = io.StringIO()
    with RankGroup(2) as group:
        check_command._print_refusals(f"{__file__}:Aborts", checking_of(group, Aborts.domain), out)
    lines = out.getvalue().splitlines()
    (ended,) = (line for line in lines if "SIGABRT" in line)
    name = "cu_seqlens that end before the tokens do"
    assert ended.startswith("  crashed (rank 1 killed by SIGABRT") and ended.endswith(f"): {name}")
    assert lines[-1] == f"  the ranks were ended after: {name} (each later call had new ranks; the laws ran before)"
    (refused,) = (line for line in lines if line.startswith("  refuses (TypeError): "))
    assert refused.endswith(
        "cu_seqlens that do not start at 0; cu_seqlens that decrease; "
        "cu_seqlens_padded with less room than a sequence needs; heads that the ranks do not divide"
    )


class SilentEngine(PoolEngine):
    """Takes every event: a request that it does not know has slot 0."""

    def slot(self, request: str) -> int:
        return self.owned.get(request, 0)

    def take(self) -> int:
        return self.unused.popleft() if self.unused else 0

    def free(self, request: str) -> None:
        self.owned.pop(request, None)

    def swap(self, request: str) -> None:
        self.slot(request)

    transfer = swap

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        self.owned[new] = self.owned.get(f"{old}@" if snapshot else old, 0)

    def commit(self, accepted: Sequence[int]) -> None:
        pass


class Silently(Pool):
    engine = SilentEngine


class Fails(TraceAdapter):
    def open(self, sizes: Sizes) -> Engine:
        raise TypeError("not like this")


def test_probe_reports_what_an_engine_does() -> None:
    names = book_named("traces").illegal.names("serving")
    assert {probe(Silently(), name) for name in names} == {"returns numbers without an error"}
    assert {probe(Fails(), name) for name in names} == {"not run: the legal events before it fail (TypeError)"}
    did = {name: probe(Pool(), name) for name in names}
    assert did["a request that is freed twice"] == "refuses (KeyError)"
    assert did["more requests than slots"] == "refuses (IndexError)"
    adapter = Pool()
    adapter.domain = TraceDomain(events=("prefill", "verify"), most_drafts=1)
    did = {name: probe(adapter, name) for name in names}
    assert did["a request that is freed twice"] == "not run: the event free is unsupported"
    assert did["more accepted tokens than drafted"] == "not run: drafts of two tokens are unsupported"
