"""The laws of parallel paths: each kills what it is about, shrunk small, on simulated ranks; and right code is right."""

import dataclasses
import functools
import itertools
import pathlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.laws.law import Pair
from properties.paths.case import ParallelCase
from properties.paths.domain import PathDomain, form_of, with_forms
from properties.paths.drawing import path_cases
from properties.paths.laws import PATH_LAWS
from properties.words.domain import Drawing
from properties.words.example import Example
from tests import wrong_ranks
from tests.random_domains import faults
from tests.together import for_each
from verify.adapters.base import PathAdapter
from verify.bench.path_bench import RankBench
from verify.engine.asking import Described
from verify.engine.drawing import seeded
from verify.engine.shrink import shrink
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.ranks import collectives
from verify.ranks.collectives import Alone, Place, simulate
from verify.zoo import wrong_paths as paths

DOMAIN = paths.Mutant.domain
CASES = 32


KILLED_BY: dict[type[PathAdapter], tuple[str, ...]] = {
    paths.RankOrder: ("exchange",),
    paths.SectionsTogether: ("exchange",),
    paths.FusedSkipsTheLast: ("fused", "exchange", "round_trip"),
    paths.GradientOfOneWay: ("exchange", "round_trip"),
    paths.GradientOfTheForward: ("exchange", "round_trip"),
    paths.NoSumOverTp: ("parallel",),
    paths.SliceOfTheFirst: ("parallel",),
    paths.ConvolvesAcross: ("parallel",),
    paths.StateAcross: ("parallel",),
    paths.RealOffsetsWithPads: ("parallel",),
    paths.NormBeforeItsTime: ("same", "parallel"),
    paths.DoubleGradient: ("parallel",),
    paths.ScattersTheWrongSlice: ("parallel",),
    paths.SumsTwice: ("parallel",),
    paths.LastRankIsNaN: ("parallel",),
    paths.FusedOneByOne: ("traffic",),
    paths.TakesHalfPieces: ("refused",),
    paths.SaysWhichRank: ("refused",),
    paths.RefusesLate: ("refused",),
    paths.EvenRows: ("reshard",),
    paths.SumsInAnyOrder: ("repeats",),
    paths.WrongWhenDeterministic: ("parallel",),
    paths.OwnShardAlone: ("parallel",),
    paths.ForgetsRealTokensBeforePads: ("parallel",),
    paths.CannotBeBuiltWithCp: ("parallel",),
    paths.LosesTheSecondChunk: ("parallel",),
    paths.SecondChunkEndsEarly: ("parallel",),
    paths.SkipsOnTheLargestNorm: ("skipped",),
    paths.ClipsByAHalfNorm: ("clipped",),
    wrong_ranks.AddsFromItself: ("replicas",),
    wrong_ranks.RoundsByRank: ("replicas",),
    wrong_ranks.OverwritesTheGradient: ("accumulated",),
}
# How small a case gets: ranks and tokens.
SMALLEST = {
    (paths.RankOrder, "exchange"): (3, 6),
    (paths.FusedSkipsTheLast, "fused"): (2, 4),
    (paths.ConvolvesAcross, "parallel"): (1, 4),
    (paths.SumsTwice, "parallel"): (3, 2),
    (paths.EvenRows, "reshard"): (4, 0),
}


@functools.cache
def drawn(law: str) -> tuple[Example, ...]:
    """As many cases as the default profile has. All mutants have one domain."""
    examples: list[Example] = []
    seeded(PATH_LAWS[law].draw(DOMAIN), 0, CASES, examples.append)
    return tuple(examples)


def spec_of(mutant: type[PathAdapter]) -> str:
    """The adapter of a mutant, in the zoo or in wrong_ranks.py."""
    place = "zoo/" if mutant.__module__ == paths.__name__ else "tests/wrong_ranks.py:"
    return f"{place}{mutant.__name__}"


@functools.cache
def kill(mutant: type[PathAdapter], law: str) -> tuple[Run, Outcome] | None:
    """A broken run of a mutant among as many cases as the default profile has.

    Those in float32 run first, because a wrong result is far over their tolerance, and needs no second look. Of them, and of the
    others, short ones run first, because they take less.
    """
    examples = drawn(law)
    if mutant in (paths.LosesTheSecondChunk, paths.SecondChunkEndsEarly):
        examples = tuple(x for x in examples if x.case.cp > 1 and x.case.tokens >= 2 * DOMAIN.drawing.chunk * x.case.cp)
    for example in sorted(examples, key=lambda example: (example.case.dtype != "fp32", example.case.tokens)):
        run = Run(law, spec_of(mutant), example)
        outcome = execute(run)
        assert outcome.verdict is not Verdict.UNKNOWN, (str(run), outcome.reason)
        if outcome.verdict is Verdict.BROKEN:
            return run, outcome
    return None


@pytest.mark.parametrize(
    ("mutant", "law"),
    [pytest.param(mutant, law, id=f"{mutant.__name__}-{law}") for mutant, laws in KILLED_BY.items() for law in laws],
)
@pytest.mark.slow_after_first
def test_law_alone_kills_mutant(mutant: type[PathAdapter], law: str) -> None:
    found = kill(mutant, law)
    assert found is not None, f"{law} lets {mutant.__name__} live"


@pytest.mark.parametrize(("mutant", "law"), SMALLEST, ids=[f"{mutant.__name__}-{law}" for mutant, law in SMALLEST])
@pytest.mark.slow_after_first
def test_a_killing_case_is_shrunk_small(mutant: type[PathAdapter], law: str) -> None:
    found = kill(mutant, law)
    assert found is not None
    run, outcome = found
    smallest = [run.example]

    def is_small() -> bool:
        case = smallest[0].case
        return (case.tp * case.cp, case.tokens) <= SMALLEST[mutant, law]

    def fails(example: Example) -> bool:
        again = execute(dataclasses.replace(run, example=example))
        if failed := again.verdict is Verdict.BROKEN and again.way == outcome.way:
            smallest[0] = example
        return failed

    small = shrink(run.example, PATH_LAWS[law], fails, lambda runs: runs < 120 and not is_small())
    line = str(dataclasses.replace(run, example=small.example))
    assert small.example == smallest[0]
    assert is_small(), line
    assert str(Run.parse(line)) == line


def _added_at_each_hop(xs: torch.Tensor) -> torch.Tensor:
    """The sum along axis 0 as rings of NCCL and gloo add it: block by block from another rank on, rounded at each hop."""
    blocks = [block.roll(-turn, 0) for turn, block in enumerate(xs.reshape(len(xs), -1).tensor_split(len(xs), 1))]
    return torch.cat([functools.reduce(torch.add, block) for block in blocks], -1).view(xs.shape[1:])


@pytest.mark.parametrize("law", ["clipped", "skipped", "replicas", "parallel", "same"])
@pytest.mark.slow_after_first
def test_right_paths_hold_if_sums_over_ranks_round_at_each_hop(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.tensor([[1.0], [2**-8], [2**-8], [2**-8]], dtype=torch.bfloat16).expand(4, 4)
    assert _added_at_each_hop(ones).tolist() == [1.0, 1.015625, 1.015625, 1.0]  # where the ring begins matters
    monkeypatch.setattr(collectives, "_added", _added_at_each_hop)
    examples = [example for example in drawn(law) if example.case.tp * example.case.cp > 1]
    for example in sorted(examples, key=lambda example: example.case.dtype != "bf16")[:8]:
        outcome = execute(Run(law, "gdn/layer", example))
        assert outcome.verdict in (Verdict.HOLDS, Verdict.BLIND), (str(example), outcome)


@pytest.mark.parametrize(("mutant", "law"), [(paths.SkipsOnTheLargestNorm, "skipped"), (paths.ClipsByAHalfNorm, "clipped")])
@pytest.mark.slow_after_first
def test_one_law_alone_sees_a_wrong_optimizer_step(mutant: type[PathAdapter], law: str) -> None:
    for other in ("clipped", "skipped", "replicas", "accumulated", "parallel"):
        broken = [
            example for example in drawn(other)[:8] if execute(Run(other, spec_of(mutant), example)).verdict is Verdict.BROKEN
        ]
        assert bool(broken) is (other == law), (other, list(map(str, broken)))


@pytest.mark.parametrize("law", ["clipped", "skipped"])
@pytest.mark.slow_after_first
def test_right_optimizer_steps_hold(law: str) -> None:
    for example in drawn(law):
        assert execute(Run(law, "gdn/layer", example)).verdict is Verdict.HOLDS, str(example)


@pytest.mark.parametrize("law", ["replicas", "accumulated", "parallel"])
@pytest.mark.slow_after_first
def test_right_paths_hold_what_ranks_and_micro_batches_show(law: str) -> None:
    for right in (paths.Mutant, wrong_ranks.RoundsAlike):
        for example in drawn(law)[:8]:
            outcome = execute(Run(law, "gdn/layer" if right is paths.Mutant else spec_of(right), example))
            assert outcome.verdict in (Verdict.HOLDS, Verdict.BLIND), (right, law, str(example), outcome)


@pytest.mark.parametrize("mutant", [wrong_ranks.AddsFromItself, wrong_ranks.RoundsByRank, wrong_ranks.OverwritesTheGradient])
@pytest.mark.slow_after_first
def test_no_other_law_of_one_call_sees_what_ranks_together_show(mutant: type[PathAdapter]) -> None:
    for example in drawn("parallel")[:8]:
        assert execute(Run("parallel", spec_of(mutant), example)).verdict is not Verdict.BROKEN


def test_every_law_has_a_mutant_that_it_kills_alone() -> None:
    here = {law.name for law in PATH_LAWS.values() if not law.of_process}  # the others are in tests/laws/test_histories.py
    assert {law for laws in KILLED_BY.values() for law in laws} == here


def test_every_mutant_has_a_story_and_a_test() -> None:
    wrong = {member for member in vars(paths).values() if isinstance(member, type) and issubclass(member, paths.Mutant)}
    elsewhere = {kind for kind in vars(wrong_ranks).values() if isinstance(kind, type) and kind.__module__ == wrong_ranks.__name__}
    assert wrong - {paths.Mutant} == set(KILLED_BY) - elsewhere
    assert all(mutant.__doc__ and mutant.__doc__ != paths.Mutant.__doc__ for mutant in wrong - {paths.Mutant})


@pytest.mark.slow
def test_a_round_trip_alone_would_let_tokens_in_the_order_of_ranks_live() -> None:
    assert kill(paths.RankOrder, "round_trip") is None


# What is drawn


@settings(max_examples=60)
@given(data=st.data())
def test_drawn_cases_are_legal_and_inside_the_domain(data: st.DataObject) -> None:
    domain = dataclasses.replace(
        DOMAIN,
        empty=data.draw(st.booleans()),
        padded=data.draw(st.booleans()),
        sequence_parallel=data.draw(st.booleans()),
        choices=(("conv", ("fla",)), ("rule", ("torch", "fla"))),
        dtypes=data.draw(st.sampled_from([("bf16",), ("fp32", "bf16")])),
    )
    case = data.draw(path_cases(domain, conv="torch"))
    assert domain.outside(case) is None
    assert ParallelCase.parse(str(case)) == case


@pytest.mark.slow
def test_draws_cover_every_mesh_layout_and_choice() -> None:
    seen: dict[str, set[str]] = {}

    def look(case: ParallelCase) -> None:
        for name in case.REGIMES:
            seen.setdefault(name, set()).add(case.words()[name])
        seen.setdefault("empty", set()).add(str(0 in case.lengths))
        seen.setdefault("mesh", set()).add(f"{case.tp}x{case.cp}")

    seeded(path_cases(DOMAIN), 0, 300, look)
    meshes = {f"{tp}x{cp}" for tp, cp in itertools.product(range(1, 5), repeat=2) if 2 <= tp * cp <= 4}
    assert seen["mesh"] == meshes
    for name, values in {
        **dict(DOMAIN.choices),
        "sp": ("yes", "no"),
        "packed": ("yes", "no"),
        "padding": ("none", "least", "more"),
    }.items():
        assert seen[name] == set(values), name
    assert seen["empty"] == {"True", "False"}


@pytest.mark.parametrize(
    "domain",
    [
        DOMAIN,
        PathDomain(
            "gated_delta_rule",
            ranks=2,
            layouts=("contiguous", "zigzag_batch"),
            padded=False,
            batched=False,
            drawing=Drawing(chunk=16),
        ),
    ],
    ids=["a layer", "a rule"],
)
@pytest.mark.slow
def test_a_third_of_the_cases_have_two_chunks_on_every_rank_and_end_anywhere(domain: PathDomain) -> None:
    cases: list[ParallelCase] = []
    seeded(PATH_LAWS["parallel"].draw(domain), 0, 300, lambda example: cases.append(example.case))
    large = [case for case in cases if min(map(len, case.tokens_of_ranks())) >= 2 * domain.drawing.chunk]
    assert len(large) > len(cases) / 3
    ends = {length % domain.drawing.chunk for case in large for length in case.lengths if length >= 2 * domain.drawing.chunk}
    assert len(ends) > min(domain.drawing.chunk, len(large)) / 2
    assert all(case.cp > 1 for case in large)
    alone = [case for case in cases if case.cp == 1]
    assert len(alone) < len(cases) / 4 if domain.operation == "gdn_layer" else not alone
    slow = dataclasses.replace(domain, longest=40)
    cases.clear()
    seeded(PATH_LAWS["parallel"].draw(slow), 0, 60, lambda example: cases.append(example.case))
    assert max(case.tokens for case in cases) < 4 * domain.drawing.chunk + 100


ON_TWO = dataclasses.replace(DOMAIN, ranks=2, exchange_ranks=2, saves=True)


@pytest.mark.parametrize("law", PATH_LAWS)
@pytest.mark.slow_after_first
def test_two_ranks_share_tensors_as_often_as_tokens_and_laws_about_exchanges_mostly_share_tokens(law: str) -> None:
    cases: list[ParallelCase] = []
    seeded(PATH_LAWS[law].draw(ON_TWO), 4, 400, lambda example: cases.append(example.case))
    if law in ("replicas", "clipped", "skipped"):  # they are about ranks that share tensors
        assert {(case.tp, case.cp) for case in cases} == {(2, 1)}
        return
    assert {(case.tp, case.cp) for case in cases} == {(2, 1), (1, 2)}
    share = sum(case.tp == 2 for case in cases) / len(cases)
    assert share < 1 / 4 if law in ("exchange", "round_trip", "fused", "traffic") else 2 / 5 < share < 3 / 5


@pytest.mark.slow
def test_every_drawn_example_is_accepted_and_comes_back_from_its_line() -> None:
    assert faults(DOMAIN, 1, 20) == {}


@for_each(
    ("changes", "line", "reason"),
    [
        ({"ranks": 2, "exchange_ranks": 2}, "cp=4 heads=4 value_heads=4 lengths=8", "tp=1 cp=4 needs 4 ranks, there are 2"),
        ({"tensor_parallel": False}, "tp=2 heads=2 value_heads=2 lengths=8", "tp=2: tensor parallelism is not supported"),
        ({"padded": False}, "packed=yes padding=least lengths=8", "padding=least is not supported"),
        ({"empty": False}, "packed=yes lengths=0+8", "empty sequences are not supported"),
        ({"choices": (("conv", ("fla",)),)}, "lengths=8", "conv=torch is not supported"),
        ({"choices": ()}, "rule=fla lengths=8", "rule=fla is not supported"),
    ],
)
def test_what_lies_outside_a_domain_is_reported(changes: dict[str, object], line: str, reason: str) -> None:
    assert dataclasses.replace(DOMAIN, **changes).outside(ParallelCase.parse(line)) == reason  # type: ignore[arg-type]


# How ranks are judged


def bench(line: str, place: Place) -> RankBench:
    return RankBench(paths.Mutant(), ParallelCase.parse(line), place, dict)


def pair(port: str) -> Pair:
    return Pair(port, "", torch.empty(0), torch.empty(0))


def test_a_row_is_named_by_its_sequence_and_token_in_the_whole() -> None:
    line = "lengths=4+3 packed=yes padding=least cp=2 heads=2 value_heads=2"

    def words(place: Place) -> list[str]:
        one = bench(line, place)
        return [one.where(pair("y"), flat, torch.Size((1, 4))) for flat in range(4)]

    first, second = simulate(1, 2, words)
    assert first == ["sequence 0, token 0", "sequence 0, token 3", "sequence 1, token 0", "sequence 1, token 3, a pad"]
    assert second == ["sequence 0, token 1", "sequence 0, token 2", "sequence 1, token 1", "sequence 1, token 2"]


def test_a_row_of_a_parameter_is_named_by_its_index_in_the_whole() -> None:
    def words(place: Place) -> str:
        one = bench("lengths=4 tp=2 heads=2 value_heads=2 key_dim=1 value_dim=1", place)
        return one.where(pair("din_proj"), 1, torch.Size((6,)))

    assert simulate(2, 1, words) == ["index 2", "index 3"]  # q has two rows, one a rank; then k


def test_what_everyone_says_is_heard_on_every_rank() -> None:
    def say(place: Place) -> list[str]:
        return bench("lengths=8 tp=2 cp=2 heads=4 value_heads=4", place).from_every_rank(f"I am {place.rank.tp} {place.rank.cp}")

    for heard in simulate(2, 2, say):
        assert heard == ["I am 0 0", "I am 0 1", "I am 1 0", "I am 1 1"]


def test_a_rank_that_raises_is_the_finding_and_the_others_are_said_to_wait() -> None:
    outcome = execute(Run.parse("law=parallel adapter=tests/path_faults.py:Raises lengths=8 cp=2 heads=2 value_heads=2"))
    assert outcome.verdict is Verdict.BROKEN
    (finding,) = outcome.findings
    assert finding.place == "rank 1: call"
    assert finding.what == "raised RuntimeError: no such tile; while rank 0 waits for rank 1"


def test_a_path_refuses_a_token_on_ranks_that_have_none() -> None:
    """A legal layout may have no tokens. With a token on each rank, its length is illegal."""
    run = Run.parse(
        "law=refused variant=length adapter=gdn/layer device=cpu tune=0 lengths=0 cp=2 "
        "packed=yes heads=2 value_heads=2 key_dim=4 value_dim=4 conv_width=3 seed=33743"
    )
    assert execute(run).verdict is Verdict.HOLDS
    accepts = dataclasses.replace(run, adapter="zoo/TakesHalfPieces")
    assert execute(accepts).verdict is Verdict.BROKEN


def test_a_law_that_compares_nothing_is_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.parse("law=parallel adapter=gdn/layer lengths=8 cp=2 heads=2 value_heads=2")
    assert execute(run).verdict is Verdict.HOLDS
    monkeypatch.setitem(PATH_LAWS, "parallel", dataclasses.replace(PATH_LAWS["parallel"], check=lambda bench, example: iter(())))
    assert (execute(run).verdict, execute(run).reason) == (Verdict.BLIND, "nothing to compare: no rank has a row")


def test_a_kernel_does_not_run_a_law_of_paths_and_the_reverse() -> None:
    for line in ("law=parallel adapter=tests/right.py:Chunkwise lengths=8", "law=oracle adapter=gdn/layer lengths=8"):
        outcome = execute(Run.parse(line))
        assert outcome.verdict is Verdict.UNSUPPORTED
        assert "is not about" in outcome.reason


def test_alone_is_a_place_too() -> None:
    run = functools.partial(bench, "lengths=4", Place(Alone(), Alone()))
    case = ParallelCase.parse("lengths=4")
    results = run().run(case.inputs(), case.cotangents())
    assert results["y"].shape == (1, 4, 8)
    assert {"dhidden", "din_proj", "dconv", "dA_log", "ddt_bias", "dnorm", "dout_proj"} <= results.keys()


# Forms: what kernels are compiled for on a GPU


@pytest.mark.parametrize(
    "domain",
    [
        PathDomain(ranks=2),
        PathDomain(ranks=8, slow=("conv=fla", "rule=fla")),
        PathDomain("kda", ranks=2, tensor_parallel=False, batched=False, padded=False, choices=(("qk_norm", ("separate",)),)),
        PathDomain(
            ranks=4, choices=(("conv", ("fla",)), ("qk_norm", ("combined",)), ("thd_all_to_all", ("fused",)), ("rule", ("fla",)))
        ),
    ],
    ids=["two ranks", "eight ranks", "a rule", "kernels only"],
)
@pytest.mark.slow_after_first
def test_on_a_gpu_kernels_are_compiled_for_few_forms_and_the_rest_is_drawn_as_ever(domain: PathDomain) -> None:
    formed = with_forms(domain, 5)
    assert formed.drawing.forms == with_forms(domain, 5).drawing.forms != with_forms(domain, 6).drawing.forms
    cases: list[ParallelCase] = []
    seeded(path_cases(formed, tokens=60), 3, 80, cases.append)
    compiled = [case for case in cases if case.operation != "gdn_layer" or "fla" in (case.conv, case.rule)]
    assert {form_of(case) for case in compiled} == set(formed.drawing.forms)
    assert len({form_of(case) for case in cases if case not in compiled}) > 20 or len(compiled) == len(cases)
    assert {case.key_dim for case in compiled} <= set(domain.widths)
    other = dataclasses.replace(compiled[0], conv_width=next(width for width in (2, 3, 4) if width != compiled[0].conv_width))
    assert domain.outside(other) is None
    assert (formed.outside(other) is None) is (form_of(other) in formed.drawing.forms)


def test_compiled_widths_are_those_that_the_domain_says() -> None:
    assert {form.key_dim for form in with_forms(PathDomain(widths=(128,)), 1).drawing.forms} == {128}
    narrow = PathDomain(widths=(8,), compiled_widths=(64, 96))
    assert {form.value_dim for seed in range(9) for form in with_forms(narrow, seed).drawing.forms} == {64, 96}


def test_on_a_gpu_another_choice_needs_no_other_form() -> None:
    formed, found = with_forms(PathDomain(ranks=2), 5), set[str]()

    def look(example: Example) -> None:
        name, _, value = str(example.variant).partition("=")
        assert formed.outside(dataclasses.replace(example.case, **{name: value})) is None
        found.add(str(example.variant))

    seeded(PATH_LAWS["same"].draw(formed), 3, 160, look)
    assert {"rule=fla", "rule=torch", "thd_all_to_all=fused"} <= found


def test_products_are_those_of_the_choice_on_a_gpu_and_exact_on_a_cpu() -> None:
    described = Described("gdn/layer", PathDomain(tf32=("rule=fla",)), "chunkwise", "none")
    plain, fla = ParallelCase((4,)), ParallelCase((4,), rule="fla")
    for case, variant, products in (
        (plain, None, "ieee"),
        (fla, None, "tf32"),
        (plain, "rule=fla", "tf32"),
        (plain, "conv=fla", "ieee"),
    ):
        assert described.products_of(Example(case, None, variant), "cuda") == products
        assert described.products_of(Example(case, None, variant), "cpu") == "ieee"


def test_simulated_ranks_on_a_gpu_that_is_not_there_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.gpu.device.gpus", lambda: 0)
    outcome = execute(Run.parse("law=parallel adapter=gdn/layer device=cuda lengths=4 cp=2 heads=2 value_heads=2"))
    assert (outcome.verdict, outcome.reason.partition(",")[0]) == (Verdict.UNKNOWN, "device=cuda needs a GPU")


def test_a_rank_whose_device_is_lost_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.gpu.device.lost", lambda device: "CUDA error: an illegal memory access was encountered")
    outcome = execute(Run.parse("law=parallel adapter=tests/path_faults.py:Raises lengths=4 cp=2 heads=2 value_heads=2"))
    assert (outcome.verdict, outcome.spent) == (Verdict.BROKEN, True)
    assert outcome.findings[0].what.startswith("crashed: CUDA error: an illegal memory access")


def test_a_collective_that_one_rank_leaves_out_breaks_the_law_and_is_no_fault_of_ours(tmp_path: pathlib.Path) -> None:
    """In backward rank 0 does not call it, so that the next collective of ours meets it on the other ranks."""
    source = pathlib.Path("examples/path_adapter.py").read_text()
    assert "before + 0 * ends[0]" in source
    file = tmp_path / "leaves.py"
    file.write_text(source.replace("before + 0 * ends[0]", "before"))
    line = f"law=parallel adapter={file}:OwnConvolution lengths=12+8 op=causal_conv1d cp=2 layout=contiguous packed=yes seed=1"
    outcome = execute(Run.parse(line))
    assert outcome.verdict is Verdict.BROKEN, outcome.reason
    assert outcome.kind is FailureKind.RANKS_PART
    assert (outcome.fault, outcome.reason) == ("", "")
    right = execute(Run.parse(line.replace(str(file), "examples/path_adapter.py")))
    assert right.verdict is Verdict.HOLDS, right
