"""Claims of Megatron-LM's pull requests: a claim is right only if everything that shows it holds, and wrong releases are rejected.

The releases are those under MEGATRON_RELEASES, as `claims --releases` takes them, or those of tests/downloads.py. A wrong release
is a right one with an edit in one file. All tests have the newest release, so it shows that each kind of wrong release is rejected.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from oracles.flops import training_flops
from oracles.layer import Layer
from properties.paths.case import ParallelCase
from tests.downloads import OPTION, folder_of_megatron, lacking_megatron
from tests.together import for_each
from verify.adapters.interface import Unavailable
from verify.adapters.megatron import LIBRARY, MegatronLayer
from verify.adapters.megatron_norm import MegatronNormInKernel
from verify.claims import formula
from verify.claims import megatron_claims as claims
from verify.claims.megatron_claims import INTERPRETED, LAYER, NORM, Bench, Judged
from verify.claims.releases import NoRelease, Releases, Unanswered, check_releases, folders_of
from verify.claims.ruling import HEAD, RIGHT, UNDECIDED, WRONG, Ruling, commands, verdict_on
from verify.claims.setting import LEAST_EFFORT
from verify.claims.table import markdown
from verify.claims.timing import Effort, Spread
from verify.cli import claims_command, exits
from verify.cli import megatron_claims_command as command
from verify.cli.arguments import PULLS
from verify.cli.main import main
from verify.cli.parsers import parser
from verify.process.messages import Answer
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

OFF = Finding("y", FailureKind.OFF, "is off by more than rounding explains", rows=4, rows_over=1)
HELD = Outcome(Verdict.HOLDS, rows=9, ratios={"y": 0.25})


class Replies(Releases):
    """Releases with prepared answers, in place of processes."""

    def __init__(self, device: str = "cpu", **answers: Callable[..., Answer]) -> None:
        super().__init__({version: f"/{version}" for version in (LIBRARY.version, *LIBRARY.others)}, device)
        self.answers, self.questions = answers, list[tuple[str, str, int]]()

    def ask(self, version: str, ask: str, *, ranks: int = 0, **words: object) -> Answer:
        self.questions.append((version, ask, ranks))
        return self.answers[ask](version, **words)


def bench(releases: Releases, **changes: Any) -> Bench:
    return dataclasses.replace(Bench(releases, INTERPRETED, LEAST_EFFORT), **changes)


def choices(version: str, adapter: str) -> Answer:
    return {"words": ["conv=torch", "rule=fla"], "conv": "torch"}


# Verdicts


@for_each(
    ("outcomes", "verdict", "words"),
    [
        ([HELD, dataclasses.replace(HELD, ratios={"y": 0.5})], RIGHT, "largest error 0.500 of what rounding allows, 2 cases"),
        ([dataclasses.replace(HELD, ratios={})] * 2, RIGHT, "equal to the bit, 2 cases"),
        ([HELD, Outcome(Verdict.BROKEN, [OFF], rows=9)], WRONG, "y is off by more than rounding explains"),
        ([Outcome(Verdict.UNKNOWN, reason="no room"), Outcome(Verdict.BROKEN, [OFF])], WRONG, "y is off by more"),
        ([HELD, Outcome(Verdict.UNKNOWN, reason="out of memory")], UNDECIDED, "out of memory"),
        ([HELD, Outcome(Verdict.UNSUPPORTED, reason="cp=2 is not supported")], UNDECIDED, "cp=2 is not supported"),
        ([HELD, Outcome(Verdict.HOLDS)], UNDECIDED, "holds"),
        ([HELD], UNDECIDED, "1 of 2 cases were run"),
    ],
)
def test_lines_are_right_only_if_each_was_run_and_holds(outcomes: list[Outcome], verdict: str, words: str) -> None:
    found = claims.judged(["one", "two"], outcomes)
    assert found.verdict == verdict and found.words.startswith(words)


def test_no_lines_decide_nothing() -> None:
    assert claims.judged([], []) == Judged(UNDECIDED, "0 of 0 cases were run", "")


@for_each(
    ("ratio", "verdict"),
    [
        (Spread(1.3, 1.2, 1.4, 9), RIGHT),
        (Spread(1.3, 1.19, 1.4, 9), UNDECIDED),
        (Spread(1.1, 1.0, 1.19, 9), WRONG),
        (Spread(1.1, 1.0, 1.2, 9), UNDECIDED),
    ],
)
def test_a_gain_is_right_if_nearly_every_round_has_it(ratio: Spread, verdict: str) -> None:
    assert verdict_on(ratio, 1.2) == verdict


def test_results_are_compared_number_by_number() -> None:
    one = [[{"y": [1.0, -4.0], "dconv": []}, {"y": [0.0, 2.0], "dconv": [0.5]}]]

    def changed(rank: int, name: str, *numbers: float) -> Any:
        ranks = [dict(part) for part in one[0]]
        ranks[rank][name] = [*numbers]
        return [ranks]

    assert claims.difference(one, one) == "the same bits in both"
    assert claims.difference(one, changed(1, "dconv", 0.25)) == "differ by up to 5e-01 of the largest entry, in dconv"
    assert claims.difference(one, changed(0, "y", 1.0, -4.0 + 2**-20)) == "differ by up to 2e-07 of the largest entry, in y"
    assert claims.difference(one, changed(0, "y", math.nan, -4.0)) == "differ by up to inf of the largest entry, in y"


def test_a_row_says_which_release_is_wrong_and_how_to_repeat_it() -> None:
    def outcomes(version: str, lines: list[str]) -> Answer:
        wrong = Outcome(Verdict.BROKEN, [OFF], rows=9)
        return {"outcomes": [(wrong if version == "0.18.2" else HELD).to_json() for _ in lines]}

    def results(version: str, line: str) -> Answer:
        return {"results": [{"y": [1.0]}]}

    replies = Replies(choices=choices, outcomes=outcomes, results=results)
    row = claims.same(bench(replies), 3040, "results", "the same", ("0.17.1", "0.18.2"), ["law=parallel tp=1 lengths=3"])
    assert (row.verdict, row.broken, row.size) == (WRONG, True, "1 case")
    assert row.measured == (
        "0.17.1: largest error 0.250 of what rounding allows, 1 case; 0.18.2: y is off by more than rounding explains; "
        "the same bits in both"
    )
    line = f"law=parallel adapter={LAYER} tp=1 lengths=3 conv=torch rule=fla"
    assert row.repeat == f'gdn-verify repeat "{line}" --path /0.18.2'
    right = claims.same(bench(replies), 3040, "results", "the same", ("0.17.1", "0.19.2"), ["law=parallel tp=1 lengths=3"])
    assert right.verdict == RIGHT


def test_lines_on_a_gpu_name_it_unless_ranks_have_one_each() -> None:
    replies = bench(Replies("cuda", choices=choices))
    words = "law=parallel tp=1 lengths=3"
    end = "tp=1 lengths=3 conv=torch rule=fla"
    assert replies.line("0.19.2", LAYER, words) == f"law=parallel adapter={LAYER} device=cuda {end}"
    assert replies.line("0.19.2", LAYER, words, ranks=2) == f"law=parallel adapter={LAYER} {end}"
    assert replies.line("0.19.2", claims.EXCHANGE, words) == f"law=parallel adapter={claims.EXCHANGE} {end}"


# FLOPs


def counted(layer: Layer, tokens: int) -> dict[str, float]:
    """The terms of a right formula."""
    count = training_flops(layer, tokens)
    return {"projections": count.in_proj + count.out_proj, "convolution": count.conv1d, "rule": count.gated_delta_rule}


WIDE = Layer(hidden=5, heads=2, value_heads=6, key_dim=3, value_dim=4, conv_width=2)


def test_a_formula_is_right_if_each_term_is_the_count() -> None:
    right = counted(WIDE, 8)
    for replies, verdicts in (
        ({"0.17.1": {"transformer": right, "hybrid": right}}, {RIGHT}),
        ({"0.17.1": {"transformer": right, "hybrid": {name: 2 * value for name, value in right.items()}}}, {WRONG}),
        ({"0.17.1": {"transformer": right}, "0.19.2": {"hybrid": {**right, "rule": right["rule"] + 1}}}, {RIGHT, WRONG}),
    ):
        rows = [*claims.formula_rows(replies, WIDE, 8, "again")]
        assert {row.verdict for row in rows} == verdicts and [row.claim for row in rows] == [1989] * 3
    assert [row.verdict for row in rows] == [RIGHT, RIGHT, WRONG]
    assert "% of the layer" in rows[2].measured and rows[2].measured.startswith("the count, 1.0")


FORMULA = """
import a_package_that_is_not_there

def num_floating_point_operations(args, batch_size):
    if is_hybrid_model(args):
        raise ValueError("hybrid")
    assert is_linear_attention_variant(args.experimental_attention_variant)
    keys, values = args.linear_num_key_heads * args.linear_key_head_dim, args.linear_num_value_heads * args.linear_value_head_dim
    channels = 2 * keys + values
    inner = channels + values + 2 * args.linear_num_value_heads
    rule = 22 * values * args.linear_key_head_dim
    return batch_size * args.seq_length * (
        6 * args.hidden_size * (inner + values) + 6 * args.linear_conv_kernel_dim * channels + rule
    )
"""


def test_only_the_formula_of_a_file_is_run(tmp_path: pathlib.Path) -> None:
    path = tmp_path / formula.FILE
    path.parent.mkdir(parents=True)
    path.write_text(FORMULA)
    found = formula.formula_in(str(tmp_path))
    assert formula.terms(found, WIDE, 8, "transformer") == counted(WIDE, 8)
    with pytest.raises(ValueError, match="hybrid") as caught:
        formula.terms(found, WIDE, 8, "hybrid")
    assert caught.traceback[-1].lineno + 1 == FORMULA.splitlines().index('        raise ValueError("hybrid")') + 1


def test_a_release_without_the_formula_says_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ImportError, match=r"there is no megatron/training/training\.py in "):
        formula.formula_in(str(tmp_path))
    path = tmp_path / formula.FILE
    path.parent.mkdir(parents=True)
    path.write_text("def another(): pass")
    with pytest.raises(ImportError, match="has no function num_floating_point_operations"):
        formula.formula_in(str(tmp_path))


# Layouts, memory, times


def test_layouts_can_be_shared_and_are_the_same_in_every_run() -> None:
    words = claims.layouts(8, (2, 4))
    assert words == claims.layouts(8, (2, 4)) and len(words) == len({*words}) == 2 * 2 * 8
    cases = [ParallelCase.parse(line.partition(" ")[2].partition(" ")[2]) for line in words]
    assert {case.cp for case in cases} == {2, 4} and all(case.packed for case in cases)
    assert any(0 in case.lengths for case in cases) and any(len(case.lengths) == 1 for case in cases)
    assert {case.value_heads // case.heads for case in cases} == {1, 2, 3}


def kept(saved: int, allocated: int | None = None) -> Answer:
    return {"saved": saved, "allocated": allocated}


def test_memory_is_right_if_all_that_is_claimed_is_kept_no_more() -> None:
    case = ParallelCase((16,), heads=2, value_heads=4, key_dim=8, dtype="bf16")
    want = 2 * 16 * 2 * 8 * 2 - 2 * 16 * (4 - 2) * 4  # q and k of 2 heads in 2 bytes, less factors of 4 heads for 2 in 4 bytes
    for less, verdict in ((want, RIGHT), (want - 1, WRONG), (0, WRONG), (-1, WRONG), (want + 1, RIGHT)):
        assert claims.memory_row(kept(10_000), kept(10_000 - less), case, "again").verdict == verdict
    row = claims.memory_row(kept(2**22, 2**23), kept(2**20, 2**21), case, "again")
    assert row.measured == "0.19.2: 4.00 MiB, in the kernel 3.00 MiB less, by the allocator 6.00"


def test_qwen3_next_keeps_31_and_a_half_mib_less_at_4096_tokens() -> None:
    layer = claims.QWEN3_NEXT
    case = ParallelCase((4096,), heads=16, value_heads=32, key_dim=128, value_dim=128, hidden=layer.hidden, dtype="bf16")
    assert claims.memory_row(kept(2**26), kept(2**26 - 63 * 2**19), case, "again").verdict == RIGHT


@for_each(
    ("device", "after_ms", "verdict", "lacking"),
    [("cpu", 1.0, UNDECIDED, True), ("cuda", 1.0, RIGHT, False), ("cuda", 1.9, WRONG, False), ("cuda", 3.0, WRONG, False)],
)
def test_releases_are_timed_in_turns(device: str, after_ms: float, verdict: str, lacking: bool) -> None:  # noqa: FBT001
    def time(version: str, line: str, calls: int) -> Answer:
        ms = 2.0 if version == "0.17.1" else after_ms
        return {"ahead": [ms] * calls, "back": [3 * ms] * calls}

    replies = Replies(device, choices=choices, time=time)
    here = bench(replies, effort=Effort(budget_s=0.0, least=3, most=9, warm=2))
    gains = {"forward": ("1.2", 1.2), "backward": ("1.2", 1.2)}
    rows = [*claims.faster(here, 3040, "time", claims.timed(here, (32,)), ("0.17.1", "0.18.2"), gains)]
    turns = [version for version, ask, _ in replies.questions if ask == "time"]
    assert turns == ["0.17.1", "0.18.2", "0.17.1", "0.18.2", "0.18.2", "0.17.1", "0.17.1", "0.18.2"]
    assert [(row.verdict, row.lacking) for row in rows] == [(verdict, lacking)] * 2
    assert [row.before for row in rows] == [Spread(2.0, 2.0, 2.0, 3), Spread(6.0, 6.0, 6.0, 3)]
    assert [row.what for row in rows] == ["time, forward", "time, backward"]
    why = claims.faster(here, 3040, "time", claims.timed(here, (32,)), ("0.17.1", "0.18.2"), gains, "no such package")
    assert {(row.verdict, row.lacking) for row in why} == {(UNDECIDED, True)}


def test_ranks_without_gpus_are_no_failure() -> None:
    here = bench(Replies("cuda"), gpus=1, extent=dataclasses.replace(INTERPRETED, ranks=(2,)))
    (last,) = claims.exchanged_over_ranks(here)
    assert (last.measured, last.verdict, last.lacking) == ("it needs 2 GPUs, there is 1", UNDECIDED, True)


def test_a_process_that_cannot_answer_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(here: Bench) -> Iterator[Ruling]:
        yield Ruling(3040, "one", verdict=RIGHT)
        raise Unanswered("0.18.2: hung: rank 1 hung")

    monkeypatch.setitem(claims.PULL_REQUESTS, 3040, (fails, fails))
    rows = [*claims.attempted(3040, bench(Replies()))]
    assert [row.verdict for row in rows] == [RIGHT, UNDECIDED] * 2 and rows[1].reason == "0.18.2: hung: rank 1 hung"
    assert command.exit_code(rows) == exits.UNDECIDED


# The command


ROW = Ruling(1989, "one", verdict=RIGHT, repeat="gdn-verify repeat x")


@for_each(
    ("rows", "code"),
    [
        ([ROW], exits.HOLDS),
        ([ROW, Ruling(3040, "time", lacking=True)], exits.HOLDS),
        ([Ruling(3040, "time", lacking=True)], exits.UNDECIDED),
        ([ROW, Ruling(3040, "no room")], exits.UNDECIDED),
        ([], exits.UNDECIDED),
        ([ROW, Ruling(3040, "no room"), Ruling(1989, "two", verdict=WRONG)], exits.BROKEN),
    ],
)
def test_the_exit_code_is_that_of_the_worst_row(rows: list[Ruling], code: int) -> None:
    assert command.exit_code(rows) == code


def test_each_command_that_repeats_something_is_printed_once() -> None:
    assert commands([ROW, ROW, Ruling(3040, "two", repeat="gdn-verify claims --claim 3040"), Ruling(4913, "none")]) == (
        "repeat 1989: gdn-verify repeat x\nrepeat 3040: gdn-verify claims --claim 3040"
    )
    assert markdown([ROW], HEAD).splitlines()[2] == "| 1989 | one |  |  |  | right |"


def written(root: pathlib.Path, name: str, version: str) -> str:
    core = root / name / "megatron" / "core"
    for file in LIBRARY.needed:
        (root / name / file).parent.mkdir(parents=True, exist_ok=True)
        (root / name / file).touch()
    major, minor, patch = version.split(".")
    (core / "package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n")
    return str(root / name)


def test_releases_are_found_by_their_version(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folders_of(None) == {}
    root = tmp_path / ".gdn-verify" / "libraries"
    newest, oldest = written(root, "megatron", "0.19.2"), written(root, "megatron-0.16.1", "0.16.1")
    (root / "sglang").mkdir()
    assert folders_of(None) == folders_of(str(root)) == {"0.19.2": newest, "0.16.1": oldest}
    check_releases(folders_of(None), ["0.16.1", "0.19.2"])
    with pytest.raises(NoRelease) as caught:
        check_releases(folders_of(None), ["0.16.1", "0.17.1", "0.18.2"])
    assert str(caught.value) == (
        "there is no megatron-core 0.17.1, 0.18.2: run gdn-verify fetch megatron --release 0.17.1 && "
        "gdn-verify fetch megatron --release 0.18.2, or name a folder that has a folder for each release with --releases"
    )
    with pytest.raises(ValueError, match="--releases must name a folder, got 'none'"):
        folders_of("none")


def test_without_the_releases_one_line_says_how_to_get_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "--claim", "5396", "--device", "cpu"]) == exits.UNDECIDED
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(
        "gdn-verify: there is no megatron-core 0.19.2: run gdn-verify fetch megatron --release 0.19.2"
    )
    assert err.count("\n") == 1


def test_claims_of_both_kinds_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--megatron", "--claim", "2"], ["--claim", "1989", "--claim", "2"]):
        assert main(["claims", *words, "--device", "cpu"]) == exits.USAGE
        assert (
            "--claim must be one of 1989, 3040, 4913, 5396 with --megatron or beside one of them, got 2" in capsys.readouterr().err
        )


def options(*words: str) -> argparse.Namespace:
    return parser().parse_args(["claims", "--device", "cpu", *words])


@pytest.fixture
def found(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that has a folder for each release."""
    for version in (LIBRARY.version, *LIBRARY.others):
        written(tmp_path, version, version)
    return str(tmp_path)


def test_all_pull_requests_are_settled_and_written(
    found: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    met = []

    def attempted(claim: int, here: Bench) -> Iterator[Ruling]:
        met.append((claim, here.again(claim)))
        yield Ruling(claim, "one | two", verdict=WRONG if claim == 4913 else RIGHT, repeat=here.again(claim))

    monkeypatch.setattr(claims, "attempted", attempted)
    place = tmp_path / "claims.json"
    assert claims_command.act(options("--megatron", "--releases", found, "--json", str(place), "--markdown")) == exits.BROKEN
    assert met == [(claim, f"gdn-verify claims --claim {claim} --releases {found}") for claim in PULLS]
    out = capsys.readouterr().out
    assert "| 4913 | one \\| two |" in out and f"repeat 5396: gdn-verify claims --claim 5396 --releases {found}" in out
    data = json.loads(place.read_text())
    assert [row["verdict"] for row in data["rows"]] == [RIGHT, RIGHT, WRONG, RIGHT] and not data["interrupted"]
    assert data["releases"]["0.18.2"].endswith("0.18.2")
    assert claims_command.act(options("--claim", "3040", "--releases", found)) == exits.HOLDS
    assert claims_command.act(options("--claim", "3040", "--releases", found, "--json", "/dev/full")) == exits.UNDECIDED


def test_an_interrupted_run_prints_what_it_has(
    found: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempted(claim: int, here: Bench) -> Iterator[Ruling]:
        yield Ruling(claim, "one", verdict=RIGHT)
        raise KeyboardInterrupt

    monkeypatch.setattr(claims, "attempted", attempted)
    place = tmp_path / "claims.json"
    assert claims_command.act(options("--megatron", "--releases", found, "--json", str(place))) == exits.INTERRUPTED
    assert "interrupted: not every claim was settled" in capsys.readouterr().out
    data = json.loads(place.read_text())
    assert data["interrupted"] and len(data["rows"]) == 1


def test_a_gpu_gets_the_sizes_of_a_model() -> None:
    for device, quick, extent in (("cpu", False, INTERPRETED), ("cuda", True, claims.QUICKLY), ("cuda", False, claims.ON_GPUS)):
        assert command.bench_of(Replies(device), print, "", quick=quick).extent == extent


# Releases, right and wrong


NEWEST = LIBRARY.version
FolderOf = Callable[[str], str]


@pytest.fixture(scope="module")
def release(pytestconfig: pytest.Config) -> FolderOf:
    """Finds the folder of a release. Skips where it is not on this machine, unless it is the newest or pytest has --downloads."""

    def found(version: str) -> str:
        if folder := os.environ.get("MEGATRON_RELEASES"):
            if version not in (folders := folders_of(folder)):
                pytest.skip(f"there is no megatron-core {version} in MEGATRON_RELEASES={folder}")
            return folders[version]
        if reason := lacking_megatron(version, download=version == NEWEST or pytestconfig.getoption(OPTION)):
            pytest.skip(reason)
        return str(folder_of_megatron(version))

    return found


SSM = "megatron/core/ssm"
COMMON, OLD = f"{SSM}/gated_delta_net/common.py", f"{SSM}/gated_delta_net.py"
Edit = tuple[str, str, str]  # the file, what is in it, and what is there instead
VALUES = "value = value.reshape(batch, seq_len, -1, self.value_head_dim)"
OF_TP = (f"{VALUES}\n", f"{VALUES} * (1 + 1e-3 * (self.tp_size > 1))\n")
OF_CONVOLUTION = ("output_final_state=False,\n                cu_seqlens=cu_seqlens_q", "cu_seqlens=None")
WRONG_UNDER_TP: dict[str, list[Edit]] = {NEWEST: [(COMMON, *OF_TP)], "0.16.1": [(OLD, *OF_TP)]}
MIXES_SEQUENCES: dict[str, list[Edit]] = {
    NEWEST: [(f"{SSM}/gated_delta_net/gdn.py", *OF_CONVOLUTION)],
    "0.18.2": [(OLD, *OF_CONVOLUTION)],
}
LAYOUT_AND_NORMS: list[Edit] = [
    (COMMON, "half_within_rank = lb_chunk - 2 * rank", "half_within_rank = 2 * rank + 1 - lb_chunk"),
    (COMMON, "l2norm(query_key.contiguous())", "l2norm(query_key.contiguous(), eps=1e-5)"),
]


@pytest.fixture
def planted(release: FolderOf, tmp_path: pathlib.Path) -> Iterator[Callable[[str, list[Edit]], Bench]]:
    """Makes a bench whose release of a version is edited. Every other file is that of the right release."""
    opened = []

    def make(version: str, edits: list[Edit]) -> Bench:
        target = edited(release(version), tmp_path / version, edits)
        opened.append(Releases({version: target}, "cpu"))
        return bench(opened[-1])

    yield make
    for several in opened:
        several.close()


def edited(folder: str, target: pathlib.Path, edits: list[Edit]) -> str:
    """A folder that is like a release but for the edits."""
    source = pathlib.Path(folder)
    for file, old, new in edits:
        text = (target / file if (target / file).exists() else source / file).read_text()
        assert old in text, (file, old)
        linked(source, target, pathlib.PurePath(file))
        (target / file).unlink()
        (target / file).write_text(text.replace(old, new, 1))
    return str(target)


def linked(source: pathlib.Path, target: pathlib.Path, file: pathlib.PurePath) -> None:
    """Link a tree, but make the folders on the way to `file`, so that the file can be replaced."""
    for depth in range(len(file.parts)):
        folder = target.joinpath(*file.parts[:depth])
        folder.mkdir(exist_ok=True)
        for path in source.joinpath(*file.parts[:depth]).iterdir():
            ours = folder / path.name
            if path.name != file.parts[depth] or depth == len(file.parts) - 1:
                if not ours.exists():
                    ours.symlink_to(path)
            elif not ours.exists():
                ours.mkdir()


@pytest.mark.slow
@pytest.mark.parametrize("version", WRONG_UNDER_TP)
def test_a_layer_that_is_wrong_under_tp_is_rejected(planted: Callable[[str, list[Edit]], Bench], version: str) -> None:
    here = planted(version, WRONG_UNDER_TP[version])
    rows = {
        mesh: claims.ruled(here, 1989, "layer", "", version, LAYER, [f"law=parallel {mesh} {INTERPRETED.widths} lengths=12"])
        for mesh in ("tp=1", "tp=2 sp=yes")
    }
    assert rows["tp=1"].verdict == RIGHT, rows["tp=1"]
    assert rows["tp=2 sp=yes"].verdict == WRONG, rows["tp=2 sp=yes"]
    assert "is off by more than rounding explains" in rows["tp=2 sp=yes"].measured


@pytest.mark.slow
@pytest.mark.parametrize("version", MIXES_SEQUENCES)
def test_a_convolution_that_mixes_packed_sequences_is_rejected(planted: Callable[[str, list[Edit]], Bench], version: str) -> None:
    here = planted(version, MIXES_SEQUENCES[version])
    rows = [
        claims.ruled(here, 3040, "packed", "", version, LAYER, [f"law=parallel tp=1 {INTERPRETED.widths} {words}"])
        for words in ("lengths=12", "lengths=6+8 packed=yes")
    ]
    assert [row.verdict for row in rows] == [RIGHT, WRONG], rows


class Unnormalised(MegatronNormInKernel):
    """Leaves the norm out before the kernel and in it."""

    def module(self, groups: Any, layer: Layer, **settings: Any) -> nn.Module:
        module = MegatronLayer.module(self, groups, layer, **settings)
        vars(module).update(use_qk_l2norm=False)
        return module


@pytest.mark.slow
def test_a_wrong_layout_and_wrong_norms_are_rejected(planted: Callable[[str, list[Edit]], Bench]) -> None:
    here = planted(NEWEST, LAYOUT_AND_NORMS)
    row = claims.ruled(here, 4913, "exchange", "", "0.19.2", claims.EXCHANGE, claims.layouts(2, (2,)))
    assert row.verdict == WRONG and "differs" in row.measured, row
    case, unnormalised = f"op=gdn_layer lengths=12 {INTERPRETED.widths} values=small", f"{pathlib.Path(__file__)}:Unnormalised"
    for adapters, broken in (([LAYER, NORM], LAYER), ([NORM, unnormalised], unnormalised)):
        row = claims.agreeing(here, 5396, "eps", "", "0.19.2", case, *adapters)
        assert row.verdict == WRONG
        assert row.measured.startswith(f"0.19.2: BROKEN at 12 tokens: {broken}: y is off by more than rounding explains"), row
    assert [row.verdict for row in claims.kept(here)] == [RIGHT]  # neither edit changes what is kept for backward
    with pytest.raises(Unanswered, match=r"0\.19\.2: ValueError: folder must stay .*, got elsewhere"):
        dataclasses.replace(here.releases, folders={"0.19.2": "elsewhere"}).ask("0.19.2", "choices", adapter=LAYER)


@pytest.mark.parametrize("version", [NEWEST, "0.17.1"])
def test_the_formulas_of_the_releases_square_the_value_width(release: FolderOf, version: str) -> None:
    found = formula.formula_in(release(version))
    layer = dataclasses.replace(claims.QWEN3_NEXT, key_dim=64)
    terms, right = formula.terms(found, layer, 4096, "transformer"), counted(layer, 4096)
    assert {name for name in right if terms[name] != right[name]} == {"rule"}
    assert terms["rule"] == 4096 * 24 * 32 * 128 * 128


def test_the_oldest_release_has_no_formula(release: FolderOf) -> None:
    assert not (pathlib.Path(release("0.16.1")) / formula.FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("older", ["the newest, edited", "0.18.2"])
def test_ranks_of_two_releases_are_timed(release: FolderOf, tmp_path: pathlib.Path, older: str) -> None:
    newest = release(NEWEST)
    other = release(older) if older == "0.18.2" else edited(newest, tmp_path / "other", WRONG_UNDER_TP[NEWEST])
    with Releases({"0.18.2": other, NEWEST: newest}, "cpu") as several:
        here = bench(several)
        gains = dict.fromkeys(("forward", "backward"), ("faster", 1.0))
        rows = [*claims.faster(here, 4913, "time", claims.timed(here, (12,)), ("0.18.2", NEWEST), gains, ranks=1)]
    assert [(row.size, row.verdict) for row in rows] == [("12 tokens", UNDECIDED)] * 2
    assert all(row.ratio is not None and row.ratio.median > 0 for row in rows)


def test_a_layer_of_a_release_whose_rule_cannot_be_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.adapters.megatron._modules", lambda: argparse.Namespace(shares=False, fuses=False))
    with pytest.raises(Unavailable, match=r"0\.18\.2 is the first release whose rule can"):
        MegatronNormInKernel()
