"""What a check looked at is measured where the kernel runs, travels with each outcome, and what was not looked at has a name."""

import dataclasses
import importlib
import json
import pathlib
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.paths.case import ParallelCase
from properties.rules.case import Case
from properties.traces.case import TraceCase
from tests import reach_adapters as adapters
from tests import reach_library as library
from tests.together import for_each
from verify.adapters import loader
from verify.adapters.base import Adapter
from verify.adapters.registry import AdapterError
from verify.cli.main import main
from verify.engine.check import Check
from verify.engine.profiles import PROFILES
from verify.engine.state import Settings
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.findings.law_report import LawReport, reach_of
from verify.findings.store import Store
from verify.process import reach as reaches
from verify.process.outcome import Outcome, Verdict
from verify.process.reach import DEFAULT, NUMBER, Reach, Values
from verify.process.worker import Worker
from verify.ranks.merge import merge_outcomes
from verify.reach import recorder
from verify.reach import report as reach_report

GATE = "tests.reach_library:gate"
A, A_LOG = torch.zeros(1, 2, 3), torch.zeros(3)


def seen(*calls: Any, adapter: Adapter | None = None) -> Reach:
    """The reach of an adapter that makes these calls."""

    class Calling(Adapter):
        def run(self, x: Inputs) -> Any:
            return [call() for call in calls]

    tested = adapter or Calling()
    with recorder.recording() as reach, recorder.arguments(tested):
        tested.run(Inputs())
    return reach


def kinds(reach: Reach, function: str = GATE) -> dict[str, set[str]]:
    return {name: values.kinds for name, values in reach.functions[function].items()}


# The function under test, and the values that it gets


def test_the_kinds_of_values_are_those_of_the_call() -> None:
    strided, bias = torch.zeros(1, 3, 2).mT, torch.zeros(3, dtype=torch.bfloat16)
    reach = seen(lambda: library.gate(strided, A_LOG, bias, floor=0.25, extra=1))
    gates = {"a": {"float32 strided"}, "A_log": {"float32"}, "dt_bias": {"bfloat16"}}
    assert kinds(reach) == {**gates, "fast": {DEFAULT}, "floor": {NUMBER}, "extra": {NUMBER}}
    assert (reach.functions[GATE]["floor"].low, reach.functions[GATE]["floor"].high) == (0.25, 0.25)


def test_a_default_that_is_passed_is_no_other_value() -> None:
    passed = {name for name, values in seen(lambda: library.gate(A, A_LOG, None, False)).functions[GATE].items() if values.passed}
    assert passed == {"a", "A_log"}
    assert seen(lambda: library.gate(A, A_LOG, None, True)).functions[GATE]["fast"].kinds == {"True"}


def test_a_wrapper_that_passes_everything_on_counts_as_what_it_wraps() -> None:
    assert kinds(seen(lambda: library.wrapped_gate(A, A_log=A_LOG))) == kinds(seen(lambda: library.gate(A, A_LOG)))


def test_the_first_function_of_a_library_that_gets_a_tensor_is_the_one_under_test() -> None:
    def helpers() -> None:
        torch.nn.functional.softplus(A)
        json.dumps([1])
        library.accepts(3)

    assert [*seen(helpers, lambda: library.gate(A, A_LOG), lambda: library.l2norm).functions] == [GATE]


def test_api_names_the_function_if_it_is_another_one() -> None:
    class Second(Adapter):
        api = "tests.reach_library:gate"

        def run(self, x: Inputs) -> Any:
            library.Norm()
            library.accepts(A)
            return library.wrapped_gate(A, A_LOG)

    class Same(Second):
        api = library.wrapped_gate

    class Module(Second):
        api = library.Norm

    assert [*seen(adapter=Second()).functions] == [*seen(adapter=Same()).functions] == [GATE]
    assert [*seen(adapter=Module()).functions] == ["tests.reach_library:Norm.__init__"]


@for_each("api", ["tests.reach_library:gait", "no.such.module:gate", "math:sqrt"])
def test_an_api_that_names_nothing_is_reported_and_is_no_fault_of_the_implementation(api: str) -> None:
    adapter = adapters.UnpassedOption()
    adapter.api = api  # type: ignore[misc]
    with recorder.recording() as reach, recorder.arguments(adapter):
        library.gate(A, A_LOG)
    assert not reach.functions
    assert api in reach_report.not_looked_at(reach, {})[0]


def test_a_function_that_its_module_does_not_name_must_be_named_in_api(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = library.gate
    monkeypatch.setattr(library, "gate", library.long_gate)
    reach = seen(lambda: gate(A, A_LOG), lambda: library.long_gate(A, A_LOG))
    assert not reach.functions
    (gap,) = reach_report.gaps_of(reach, {})
    assert GATE in gap
    assert gap.endswith("in api")


@for_each(
    ("name", "wrong"),
    [("api", "gate"), ("api", 3), ("omits", ["fast"]), ("omits", {"fast": ""}), ("omits", {"fast": 1})],
)
def test_a_wrong_declaration_is_refused_by_name(name: str, wrong: object) -> None:
    kind = type("Wrong", (adapters.UnpassedOption,), {name: wrong})
    with pytest.raises(AdapterError, match=f"{name} must"):
        loader.make(kind, "my.py:Wrong")


def test_the_hook_goes_before_the_function_runs_and_leaves_another_profiler_alone() -> None:
    during: list[Any] = []
    inner = library.torch.nn.functional.softplus
    library.torch.nn.functional.softplus = lambda x: (during.append(sys.getprofile()), inner(x))[1]  # type: ignore[assignment]
    try:
        assert seen(lambda: library.gate(A, A_LOG)).functions
    finally:
        library.torch.nn.functional.softplus = inner
    assert during == [None]
    assert sys.getprofile() is None
    events: list[str] = []

    def profiler(_: Any, event: str, __: Any) -> None:
        events.append(event)

    sys.setprofile(profiler)
    try:
        assert not seen(lambda: library.gate(A, A_LOG)).functions
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


def test_what_the_hook_cannot_read_does_not_reach_the_implementation() -> None:
    class Strange(dict[str, Tensor]):
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise RuntimeError("no class")

    assert seen(lambda: library.accepts(Strange(), A)).functions == {}


def test_an_adapter_in_which_nothing_is_found_is_looked_at_seldom() -> None:
    class Quiet(Adapter):
        hooks = 0

        def run(self, x: Inputs) -> None:
            self.hooks += sys.getprofile() is not None

    quiet = Quiet()
    for _ in range(100):
        seen(adapter=quiet)
    assert recorder.MISSES <= quiet.hooks < 2 * recorder.MISSES


def test_what_is_imported_in_the_middle_of_a_call_is_no_function_under_test(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import torch\n\ndef other(x):\n    return x\n\nfor _ in range(5000):\n    other(torch)\nother(torch.zeros(1))\n"
    (tmp_path / "imported_late.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def late() -> None:
        importlib.import_module("imported_late")
        library.gate(A, A_LOG)

    assert [*seen(late).functions] == [GATE]


def test_nothing_is_recorded_outside_of_a_case() -> None:
    with recorder.arguments(adapters.UnpassedOption()), recorder.launches():
        assert sys.getprofile() is None


# Merging, limits and the way back


def test_what_a_call_leaves_out_of_its_keywords_was_left_out() -> None:
    with_extra, without = seen(lambda: library.gate(A, A_LOG, extra=2.0)), seen(lambda: library.gate(A, A_LOG))
    both = Reach()
    for reach in (with_extra, without, with_extra):
        both.add(reach)
    assert both.functions[GATE]["extra"].kinds == {DEFAULT, NUMBER}
    assert with_extra.functions[GATE]["extra"].kinds == {NUMBER}
    both = Reach()
    both.add(without)
    both.add(with_extra)
    assert both.functions[GATE]["extra"].kinds == {DEFAULT, NUMBER}


def test_a_reach_comes_back_from_plain_data() -> None:
    reach = seen(lambda: library.gate(A, A_LOG, floor=0.5))
    reach.sizes, reach.trouble = {"tokens": 3}, "none"
    reach.note_blocks("m:k", ["3", "5:7"], ["3"])
    outcome = Outcome(Verdict.HOLDS, reach=reach)
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_the_size_of_a_reach_is_bounded_and_what_does_not_fit_is_reported() -> None:
    reach = Reach()
    for number in range(2 * reaches.MOST_FUNCTIONS):
        reach.note_call(f"m:f{number}", {f"p{name}": Values({f"'{number}'"}) for name in range(2 * reaches.MOST_PARAMETERS)})
        reach.note_call("m:f0", {"p0": Values({f"'{2 * number}'", f"'{2 * number + 1}'", "None"})})
    for number in range(2 * reaches.MOST_KERNELS):
        reach.note_blocks(f"m:k{number}", [str(line) for line in range(2 * reaches.MOST_BLOCKS)], [])
    assert len(reach.functions) == reaches.MOST_FUNCTIONS
    assert {len(parameters) for parameters in reach.functions.values()} == {reaches.MOST_PARAMETERS}
    assert len(reach.functions["m:f0"]["p0"].kinds) <= reaches.MOST_KINDS
    assert len(reach.blocks) == reaches.MOST_KERNELS
    assert {len(blocks) for blocks in reach.blocks.values()} == {reaches.MOST_BLOCKS}
    assert reach_report.FULL in reach_report.gaps_of(reach, {})


def test_ranks_answer_with_what_all_of_them_looked_at() -> None:
    first, second = Reach({"tokens": 3, "heads": 2}), Reach({"tokens": 5})
    first.note_blocks("m:k", ["3", "5"], ["3"])
    second.note_blocks("m:k", ["3", "5"], ["5"])
    outcomes = {rank: Outcome(Verdict.HOLDS, rows=1, reach=reach) for rank, reach in enumerate((first, second))}
    whole = merge_outcomes(outcomes).reach
    assert whole.sizes == {"tokens": 5, "heads": 2}
    assert whole.blocks == {"m:k": {"3": True, "5": True}}


def test_only_decided_cases_count() -> None:
    run = Run.parse("law=oracle adapter=fla/chunk lengths=3")
    report = LawReport("oracle", "fla/chunk", Verdict.UNKNOWN)
    for tokens, verdict in enumerate(("holds", "broken", "known", "blind", "unknown", "unsupported"), 1):
        report.count(run, Outcome(Verdict(verdict), reach=Reach({"tokens": tokens})))
    assert reach_of([report]).sizes == {"tokens": 3}
    assert report.to_json()["reach"]["sizes"] == {"tokens": 3}


# Sizes


def test_sizes_are_those_of_the_case() -> None:
    adapter = loader.load("fla/chunk")
    sizes = recorder.sizes_of(Case.parse("lengths=130+0+64 packed=yes heads=2 value_heads=6"), adapter)
    assert sizes == {"tokens": 194, "sequences": 3, "sequence": 130, "heads": 2, "value_heads": 3, "chunks": 3}
    path = recorder.sizes_of(ParallelCase.parse("lengths=16 cp=2 heads=2 value_heads=2"), loader.load("gdn/layer"))
    assert path["ranks"] == 2
    assert path["rank_tokens"] == 8
    trace = recorder.sizes_of(TraceCase.parse("op=serving trace=p:a5,b70/d:a,b"), loader.load("gdn/pool"))
    assert trace | {"heads": 1} == trace
    sizes = {name: trace[name] for name in ("sequence", "tokens", "sequences")}
    assert sizes == {"sequence": 71, "tokens": 75, "sequences": 2}, "b has 71 tokens in the end"


def test_every_size_has_words() -> None:
    line = reach_report.looked_at(Reach(dict.fromkeys(reach_report.SIZES, 7)))
    assert line.count("7 ") == len(reach_report.SIZES)
    assert reach_report.looked_at(Reach({"sequence": 1, "heads": 2})) == "1 token in a sequence; 2 heads"


# Blocks of kernels


def test_the_blocks_that_no_program_ran_are_those_that_are_wrong(worker: Worker) -> None:
    answers = [
        ask(worker, f"law=oracle adapter=tests/reach_adapters.py:UnrunBranch op=l2norm lengths=3 width={width} backward=no")
        for width in (5, 8)
    ]
    for answer in answers:
        assert answer.verdict is Verdict.HOLDS
        (kernel,) = answer.reach.blocks
        assert kernel == "tests.reach_library:l2norm_kernel"
        lines = pathlib.Path(library.__file__).read_text().splitlines()
        blocks = {
            lines[int(block.partition(":")[0]) - 1].strip(): ran
            for block, ran in answer.reach.blocks[kernel].items()
            if ":" not in block
        }
        assert blocks == {"b_y = b_x": False, "b_y = b_x / tl.sqrt(total + eps)": True}
        assert sorted(ran for block, ran in answer.reach.blocks[kernel].items() if ":" in block) == [False, True]


def ask(worker: Worker, line: str) -> Outcome:
    from verify.process.messages import RunOne

    return Outcome.from_json(worker.ask(RunOne(line)))


def test_one_program_after_another_runs_the_same_blocks(worker: Worker) -> None:
    line = "law=oracle adapter=tests/reach_adapters.py:UnrunBranch op=l2norm lengths=3 width=5 backward=no"
    together = ask(worker, line)
    with Worker(60.0, sequential=True) as other:
        alone = ask(other, line)
    assert dataclasses.replace(together.reach, lines={}) == dataclasses.replace(alone.reach, lines={})
    assert {*alone.reach.blocks["tests.reach_library:l2norm_kernel"].values()} == {False, True}


# The report and the exit code


REACH = Reach({"sequence": 300, "tokens": 900})
REACH.note_call(
    "fla.m:chunk",
    {"q": Values({"bfloat16"}), "transpose": Values({DEFAULT}), "size": Values({NUMBER}, 64, 64), "flag": Values({"True"})},
)
REACH.note_blocks("fla.o:kernel_o", ["7", "9", "9:4"], ["7"])


def test_a_line_in_words_says_what_was_not_looked_at() -> None:
    text = " ".join(" ".join(reach_report.report(REACH, {})).split())
    assert "looked at up to 300 tokens in a sequence; 900 tokens in a call" in text
    assert "never passed except at the default: transpose; 2 branches of kernel_o never ran (line 9)" in text
    assert "never varied: size always 64, flag always True; sequences of more than 300 tokens" in text
    assert reach_report.report(Reach(), {}) == []


def test_what_is_left_out_has_its_reason_and_no_excuse_for_the_rest() -> None:
    omits = {"transpose": "on Hopper only", "q": "wrong: it is passed", "kernel_p": "wrong: there is none"}
    assert reach_report.not_looked_at(REACH, omits) == ["2 branches of kernel_o never ran (line 9)"]
    assert reach_report.not_looked_at(REACH, {"kernel_o": "for other GPUs"}) == ["never passed except at the default: transpose"]
    lines = [line for line in reach_report.report(REACH, omits) if line.startswith("left out")]
    assert lines[0].endswith("transpose: on Hopper only")
    assert lines[1].endswith("(but a case passed it)")
    assert "nothing that was looked at" in lines[2]


def check(adapter: str, folder: pathlib.Path, *more: str) -> int:
    words = [
        "check",
        f"tests/reach_adapters.py:{adapter}",
        "--profile",
        "least",
        "--law",
        "oracle",
        "--workers",
        "1",
        "--device",
        "cpu",
    ]
    return main([*words, "--findings", str(folder / "findings"), *more])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "gap", "functions"),
    [
        ("UnpassedOption", "never passed except at the default: fast, floor", [GATE]),
        (
            "UnrunBranch",
            "2 branches of l2norm_kernel never ran",
            ["tests.reach_library:Norm.__init__", "tests.reach_library:Norm.forward"],
        ),
        ("OwnMethod", "no function under test", []),
        ("OmittedOption", "", [GATE]),
    ],
)
def test_every_law_holds_and_strict_reach_tells_what_was_not_looked_at(
    adapter: str, gap: str, functions: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "laws.jsonl"
    assert check(adapter, tmp_path, "--strict-reach", "--json", str(place)) == (3 if gap else 0)
    text = " ".join(capsys.readouterr().out.split())
    assert "HOLDS oracle" in text
    assert gap in text
    assert ("--strict-reach" in text) is bool(gap)
    _, law, end = map(json.loads, place.read_text().splitlines())
    assert end["exit_code"] == (3 if gap else 0)
    assert law["reach"]["sizes"]["sequence"] >= 1
    assert [*law["reach"]["functions"]] == functions


@pytest.mark.slow
def test_without_strict_reach_a_check_that_holds_exits_with_0(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("UnpassedOption", tmp_path) == 0
    assert "not looked at" in capsys.readouterr().out


def test_strict_reach_and_a_sweep_exclude_each_other(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("UnpassedOption", tmp_path, "--strict-reach", "--tune", "sweep") == 2
    assert "--strict-reach" in capsys.readouterr().err


def test_an_interrupted_check_has_the_reach_of_what_it_decided(worker: Worker, tmp_path: pathlib.Path) -> None:
    stopping = threading.Event()

    def on_case(law: str, done: int, of: int) -> None:
        stopping.set()
        running.stop()

    settings = Settings("tests/reach_adapters.py:UnpassedOption", ["oracle"], PROFILES["few"])
    with Worker(60.0) as own, Check(settings, [own], Store(tmp_path), on_case=on_case) as running:
        assert running.run() == []
    assert stopping.is_set()
    assert [*running.reach.functions] == [GATE]


def test_the_options_that_are_wrong_are_found_when_they_are_passed() -> None:
    """What the reach names is indeed wrong: the same library, with the option, breaks the oracle's law."""
    right = execute(
        Run.parse("law=oracle adapter=tests/reach_adapters.py:UnpassedOption op=gdn_gate lengths=5 beta=no backward=no seed=3")
    )
    wrong = execute(
        Run.parse("law=oracle adapter=tests/reach_adapters.py:PassedOption op=gdn_gate lengths=5 beta=no backward=no seed=3")
    )
    assert (right.verdict, wrong.verdict) == (Verdict.HOLDS, Verdict.BROKEN)


# Built-in adapters: each parameter is passed in a case of this table, or left out with a reason

RULE = "lengths=3+2 packed=yes heads=1 value_heads=2 beta=two scale=half state=random qk_norm=yes"
HOST = "options=cu_seqlens_cpu:yes,chunk_indices:yes"
KDA = "op=kda in_kernel=both lower_bound=-5 parameter_dtype=input"
CONV = "op=causal_conv1d bias=yes activation=silu state=random backward=no residual=added"
PASSING = {
    "fla/chunk": (f"{RULE} in_kernel=both backward=no {HOST}",),
    "fla/fused_recurrent": (f"{RULE} in_kernel=both channel_decays=both backward=no",),
    "fla/fused_recurrent_kda": (f"{RULE} {KDA} backward=no options=state_v_first:yes",),
    "fla/chunk_kda": (f"{RULE} {KDA} backward=no options=cu_seqlens_cpu:yes,disable_recompute:yes,state_v_first:yes",),
    "fla/chunk_kda_safe": (f"{RULE} {KDA} backward=no options=cu_seqlens_cpu:yes,disable_recompute:yes,state_v_first:yes",),
    "fla/conv": (f"{CONV} lengths=3+2 packed=yes {HOST},swish:yes",),
    "fla/conv_update": (f"{CONV} lengths=3",),
    "fla/short_convolution": (f"{CONV} lengths=3+2 packed=yes {HOST},training:no", f"{CONV} lengths=3 options=mask:ones,swish:yes"),
    "fla/gdn_gate": ("op=gdn_gate lengths=3 beta=no backward=no",),
    "fla/kda_gate": ("op=kda_gate lengths=3 beta=no lower_bound=-1 backward=no",),
    "fla/l2norm": ("op=l2norm lengths=3 eps=1e-5 backward=no", "op=l2norm lengths=3 eps=default backward=no"),
    "fla/gated_norm": (
        "op=gated_rms_norm lengths=3 eps=1e-6 residual=returned gating=sigmoid backward=no",
        "op=gated_rms_norm lengths=3 weight=no backward=no",
    ),
    "fla/decode": (f"op=decode {RULE} in_kernel=both options=state_v_first:yes",),
}


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("spec", PASSING)
def test_every_parameter_is_passed_or_left_out_with_a_reason(spec: str, worker: Worker) -> None:
    reach, omits = Reach(), loader.load(spec).omits
    for line in PASSING[spec]:
        outcome = ask(worker, f"law=oracle adapter={spec} {line}")
        assert outcome.verdict in (Verdict.HOLDS, Verdict.KNOWN), (outcome.reason, outcome.findings)
        reach.add(outcome.reach)
    assert reach.functions
    assert [gap for gap in reach_report.not_looked_at(reach, omits) if "branch" not in gap and "Python" not in gap] == []
    assert not [line for line in reach_report.report(reach, omits) if "(but" in line], (
        "a name in omits is of a parameter, and it is not passed"
    )
