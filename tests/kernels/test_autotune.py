"""Policies are words that round-trip; draws, sweeps and deny-lists are what they say; kernels run with what a policy decides."""

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.words.line import split_line
from tests.alone import answered
from tests.faults import different, not_refused
from tests.needs import need
from verify.gpu import autotune
from verify.gpu.autotune import here, using
from verify.gpu.policies import (
    NATIVE,
    Denied,
    Policy,
    check_config,
    check_kernel,
    cost,
    narrow,
    plan,
    preference,
    read_denied,
    repeating,
    write_denied,
)
from verify.process.worker import NO_GPU

SLOW_FIXTURES = ("report",)

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tests" / "tuning_kernels.py"
SOURCE = KERNELS.read_text(encoding="utf-8")
CHECKS = re.findall(r"^def check_(\w+)", SOURCE, re.MULTILINE)
FLA_CHECKS = re.findall(r"^        def check_(\w+)", SOURCE, re.MULTILINE)
FLA_O = "fla.ops.common.chunk_o.chunk_fwd_kernel_o"
BK64 = "BK=64:BV=64:num_warps=4:num_stages=2"

# For strategies of text, Hypothesis makes a table of all characters, which takes seconds.
words = st.builds("{}{}".format, st.sampled_from("az_"), st.lists(st.sampled_from("az_09"), max_size=8).map("".join))
names = st.lists(words, min_size=1, max_size=3).map(".".join)
configs = st.builds(
    lambda blocks, warps, stages: ":".join(
        [*(f"{name}={size}" for name, size in blocks.items()), f"num_warps={warps}", f"num_stages={stages}"]
    ),
    st.dictionaries(st.sampled_from(("BK", "BV", "BT", "BLOCK_SIZE", "G", "PRECISION")), st.sampled_from((1, 16, 64, "ieee"))),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 4),
)
numbers = st.one_of(st.integers(0, 99), st.integers(0, 2**63 - 1))
picks = st.dictionaries(names, configs, max_size=4).map(lambda drawn: tuple(drawn.items()))
policies = st.one_of(st.just(NATIVE), st.builds(Policy, numbers, picks))
lists = st.dictionaries(names, st.lists(configs, min_size=1, max_size=6, unique=True).map(tuple), max_size=5)


# In processes of their own: interpreting is decided once, when triton is imported. Strings have other hashes in the second.
OTHER_HASHES = {**NO_GPU, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"}


@pytest.fixture(scope="module")
def report() -> dict[str, str]:
    pytest.importorskip("triton")
    return answered("tests.tuning_kernels", hooked=False, fla=False)


@pytest.fixture(scope="module")
def fla_report() -> dict[str, str]:
    need("fla")
    return answered("tests.tuning_kernels", hooked=False, fla=True, environment=OTHER_HASHES)


def test_kernels_run_as_the_policy_says(report: dict[str, str]) -> None:
    assert CHECKS
    assert {name: report[name] for name in CHECKS if report[name]} == {}


@pytest.mark.slow
def test_released_kernels_run_as_the_policy_says(fla_report: dict[str, str]) -> None:
    assert FLA_CHECKS
    assert {name: fla_report[name] for name in FLA_CHECKS if fla_report[name]} == {}


def test_wrong_ways_to_decide_are_rejected(report: dict[str, str]) -> None:
    faults = {name: message for name, message in report.items() if ": " in name}
    assert len(faults) >= 12
    assert not [name for name, message in faults.items() if not message]


def test_draws_are_the_same_in_every_process(report: dict[str, str], fla_report: dict[str, str]) -> None:
    texts = [f"BLOCK={block}:num_warps={warps}:num_stages=2" for block in (16, 32, 64, 128) for warps in (2, 4)]
    assert report["drawn"] == fla_report["drawn"] == ",".join(preference(texts, 17, "a.kernel"))


@settings(max_examples=50)
@given(policies)
def test_policy_is_its_word(policy: Policy) -> None:
    text = str(policy)
    assert Policy.parse(text) == policy
    assert str(Policy.parse(text)) == text
    assert split_line(f"law=cut tune={text} lengths=3")["tune"] == text


def test_policy_reads_as_documented() -> None:
    assert Policy.parse("native") == Policy() == NATIVE
    assert Policy.parse("17") == Policy(17)
    text = f"17,chunk_fwd_kernel_o:{BK64}"
    assert Policy.parse(text) == Policy(17, (("chunk_fwd_kernel_o", BK64),))
    assert str(Policy(17, (("b", "X=1"), ("a", "Y=2")))) == "17,a:Y=2,b:X=1"


def test_wrong_word_is_refused() -> None:
    rows = [
        ("", "tune must be native or a number"),
        ("fast", "tune must be native or a number that draws, perhaps with picks after it, got 'fast'"),
        ("-1", "tune must be native or a number"),
        ("1.5", "tune must be native or a number"),
        ("\u0661", "tune must be native or a number"),
        (str(2**63), r"from 0 to 2\*\*63 - 1, got 9223372036854775808"),
        ("9" * 30, "tune must be native or a number"),
        ("native,a:B=1", "picks need a number that draws for the other kernels, as in tune=17,a:B=1"),
        ("17,", "a pick must be kernel:NAME=value:..., got ''"),
        ("17,a", "a pick must be kernel:NAME=value:..., got 'a'"),
        ("17,:B=1", "a kernel must be a name such as chunk_fwd_kernel_o, its module perhaps before it, got ''"),
        ("17,a b:B=1", "a kernel must be a name"),
        ("17,a:", "a configuration must be NAME=value words joined by colons, each name once, got ''"),
        ("17,a:B", "a configuration must be"),
        ("17,a:B=", "a configuration must be"),
        ("17,a:B=1:", "a configuration must be"),
        ("17,a:B=1 2", "a configuration must be"),
        ("17,a:B=1:B=2", "each name once, got 'B=1:B=2'"),
        ("17,a:B=1,a:B=2", "tune must pick a once, got it 2 times"),
    ]
    assert not_refused(Policy.parse, rows) == []


def test_names_and_texts_are_checked() -> None:
    assert check_kernel(FLA_O) == FLA_O
    assert check_config(BK64) == BK64
    for wrong in ("a:b", "a,b", "a=b", "é", ""):
        with pytest.raises(ValueError, match="a kernel must be"):
            check_kernel(wrong)
    for wrong in ("BK", "=1", "BK=1,BV=2", "BK=é", "1K=2", "BK=1::BV=2"):
        with pytest.raises(ValueError, match="a configuration must be"):
            check_config(wrong)


def test_most_of_a_name_counts() -> None:
    policy = Policy(1, (("o", "B=1"), ("chunk.o", "B=2"), ("x.chunk.o", "B=3")))
    assert [policy.picked(name) for name in ("o", "a.o", "chunk.o", "y.chunk.o", "x.chunk.o", "z.x.chunk.o")] == [
        "B=1",
        "B=1",
        "B=2",
        "B=2",
        "B=3",
        "B=3",
    ]
    assert [policy.picked(name) for name in ("po", "chunk", "o.chunk", "")] == [None] * 4


def test_missed_picks_did_not_run() -> None:
    policy = Policy(1, (("a", "B=1:C=2"), ("b", "B=1"), ("c", "B=1")))
    assert policy.missed({"m.a": ("C=2:B=1",), "b": ("B=2", "B=1"), "d": ("B=1",)}) == [("c", "B=1")]
    assert policy.missed({"m.a": ("B=1",), "b": ("B=2",)}) == list(policy.picks)
    assert not Policy(1).missed({})


@settings(max_examples=50)
@given(st.dictionaries(names, configs))
@pytest.mark.slow
def test_what_ran_can_be_repeated(ran: dict[str, str]) -> None:
    policy = repeating({kernel: (config, "B=7") for kernel, config in ran.items()}, 5)
    assert policy.tune == 5
    assert {kernel: policy.picked(kernel) for kernel in ran} == ran
    assert not policy.missed({kernel: (config,) for kernel, config in ran.items()})


def test_cost_is_blocks_times_stages_over_warps() -> None:
    rows = [
        ("num_warps=4:num_stages=3", 0.75),
        ("BK=64:BV=32:num_warps=4:num_stages=2", 1024),
        ("BLOCK_SIZE=128:num_warps=8:num_stages=1", 16),
        ("BLOCK=16", 16),
        ("BT=64:NW=4:G=8:DOT_PRECISION=ieee:BF=yes:num_warps=4:num_stages=1", 16),
    ]
    assert different(cost, rows) == []


Prefers = Callable[[Sequence[str], int, str], list[str]]


def unfair(prefers: Prefers, texts: Sequence[str]) -> str:
    """What is wrong with a way to prefer configurations, "" if nothing is."""
    firsts = set()
    for tune in range(100):
        order = prefers(texts, tune, "kernel")
        if sorted(order) != sorted(texts):
            return "some are left out, or come twice"
        if prefers(list(reversed(texts)), tune, "kernel") != order:
            return "the order of the list matters"
        firsts.add(order[0])
    dearer = [text for text in texts if sum(cost(other) < cost(text) for other in texts) > (len(texts) - 1) // 2]
    if firsts & set(dearer):
        return "a dear one is drawn"
    if len(texts) > 1 and firsts != set(texts) - set(dearer):
        return "a cheap one is never drawn"
    if len(firsts) > 2 and all(prefers(texts, tune, "kernel")[0] == prefers(texts, tune, "another")[0] for tune in range(30)):
        return "the kernel's name does not matter"
    return ""


@settings(max_examples=40)
@given(st.lists(configs, min_size=1, max_size=8, unique=True))
def test_any_cheap_configuration_is_drawn(texts: list[str]) -> None:
    assert unfair(preference, texts) == ""


def ranked(texts: Sequence[str]) -> list[str]:
    return sorted(texts, key=lambda text: (cost(text), text))


def test_unfair_draws_are_seen() -> None:
    texts = [f"BK={size}:num_warps={warps}:num_stages=2" for size in (16, 32, 64) for warps in (1, 2, 4)]
    rows = [
        (lambda texts, tune, kernel: ranked(texts), "a cheap one is never drawn"),
        (lambda texts, tune, kernel: list(texts), "the order of the list matters"),
        (lambda texts, tune, kernel: preference(texts, tune, kernel)[:-1], "some are left out, or come twice"),
        (
            lambda texts, tune, kernel: ranked(texts)[tune % len(texts) :] + ranked(texts)[: tune % len(texts)],
            "a dear one is drawn",
        ),
        (lambda texts, tune, kernel: preference(texts, tune, "kernel"), "the kernel's name does not matter"),
    ]
    assert different(lambda prefers: unfair(prefers, texts), rows) == []


def test_nothing_is_preferred_of_nothing() -> None:
    assert preference([], 3, "kernel") == []


Plan = Callable[[Mapping[str, Sequence[str]], int], Iterable[Policy]]


def incomplete(planned: Plan, known: Mapping[str, Sequence[str]], tune: int) -> str:
    """What is wrong with a plan, "" if nothing is."""
    runs = list(planned(known, tune))
    if len(runs) != max(map(len, known.values()), default=0):
        return "too few or too many runs"
    if any(policy.tune != tune for policy in runs):
        return "another number draws"
    for kernel, texts in known.items():
        ran = {policy.picked(kernel) for policy in runs} if len(texts) > 1 else set(texts)
        if ran != set(texts):
            return "some never run"
    return ""


@settings(max_examples=50)
@given(lists, numbers)
@pytest.mark.slow
def test_sweep_runs_everything_in_as_few_runs_as_can_be(known: dict[str, tuple[str, ...]], tune: int) -> None:
    assert incomplete(plan, known, tune) == ""


def stopping_short(known: Mapping[str, Sequence[str]], tune: int) -> Iterator[Policy]:
    for together in zip(*known.values(), strict=False):
        yield Policy(tune, tuple(zip(known, together, strict=True)))


def one_at_a_time(known: Mapping[str, Sequence[str]], tune: int) -> Iterator[Policy]:
    for kernel, texts in known.items():
        yield from (Policy(tune, ((kernel, text),)) for text in texts)


def staying(known: Mapping[str, Sequence[str]], tune: int) -> Iterator[Policy]:
    for _ in range(max(map(len, known.values()))):
        yield Policy(tune, tuple((kernel, texts[0]) for kernel, texts in known.items()))


def drawing(known: Mapping[str, Sequence[str]], tune: int) -> Iterator[Policy]:
    yield from (Policy(tune + step) for step in range(max(map(len, known.values()))))


def test_incomplete_sweeps_are_seen() -> None:
    known = {"a": ("B=1", "B=2", "B=3"), "b": ("C=1", "C=2")}
    rows = [
        (stopping_short, "too few or too many runs"),
        (one_at_a_time, "too few or too many runs"),
        (staying, "some never run"),
        (drawing, "another number draws"),
    ]
    assert different(lambda planned: incomplete(planned, known, 7), rows) == []


def test_other_numbers_meet_in_other_pairs() -> None:
    known = {"a": tuple(f"B={number}" for number in range(6)), "b": tuple(f"C={number}" for number in range(6))}
    pairs = {policy.picks for tune in range(60) for policy in plan(known, tune)}
    assert len(pairs) == 36


class Failing:
    """Fails where a policy has all picks of one of its faults; counts its calls."""

    def __init__(self, *faults: Iterable[tuple[str, str]]) -> None:
        self.faults, self.asked = [set(fault) for fault in faults], 0

    def __call__(self, policy: Policy) -> bool:
        self.asked += 1
        return any(fault <= set(policy.picks) for fault in self.faults)


@st.composite
def failures(draw: st.DrawFn) -> tuple[Policy, list[set[tuple[str, str]]]]:
    """A policy, and faults of it that have no pick in common."""
    policy = Policy(3, tuple((f"k{number}", "B=1") for number in range(draw(st.integers(1, 8)))))
    shuffled, faults = list(draw(st.permutations(policy.picks))), []
    for size in draw(st.lists(st.integers(1, 3), max_size=4)):
        fault, shuffled = shuffled[:size], shuffled[size:]
        faults += [set(fault)] if len(fault) == size else []
    return policy, faults


Narrow = Callable[[Policy, Callable[[Policy], bool]], list[Policy]]


def inexact(narrowed: Narrow, policy: Policy, faults: list[set[tuple[str, str]]]) -> str:
    """What is wrong with what is held at fault, "" if nothing is."""
    found = [set(culprit.picks) for culprit in narrowed(policy, Failing(*faults))]
    if any(fault not in found for fault in faults):
        return "a fault is missed"
    return "" if len(found) == len(faults) else "too much is at fault"


@given(failures())
def test_every_fault_is_found_and_nothing_else(drawn: tuple[Policy, list[set[tuple[str, str]]]]) -> None:
    assert inexact(narrow, *drawn) == ""


def halving(policy: Policy, fails: Callable[[Policy], bool]) -> list[Policy]:
    """As if one kernel were wrong."""
    rest = policy.picks
    while len(rest) > 1:
        half = rest[: len(rest) // 2]
        rest = half if fails(Policy(policy.tune, half)) else rest[len(half) :]
    return [Policy(policy.tune, rest)]


def alone(policy: Policy, fails: Callable[[Policy], bool]) -> list[Policy]:
    return [candidate for pick in policy.picks if fails(candidate := Policy(policy.tune, (pick,)))]


def test_inexact_narrowing_is_seen() -> None:
    policy = Policy(3, tuple((name, "B=1") for name in "abcd"))
    rows = [
        (halving, ["b", "d"], "a fault is missed"),
        (halving, [], "too much is at fault"),
        (alone, ["b", "ac"], "a fault is missed"),
        (lambda policy, fails: [policy] * fails(policy), ["b"], "a fault is missed"),
        (lambda policy, fails: [*alone(policy, fails), policy], ["b"], "too much is at fault"),
    ]

    def problem(narrowed: Narrow, faults: list[str]) -> str:
        return inexact(narrowed, policy, [{(name, "B=1") for name in fault} for fault in faults])

    assert different(problem, rows) == []


def test_narrowing_runs_each_pick_once() -> None:
    policy, fails = Policy(3, tuple((f"k{number}", "B=1") for number in range(14))), Failing([("k3", "B=1")], [("k9", "B=1")])
    assert narrow(policy, fails) == [Policy(3, (("k3", "B=1"),)), Policy(3, (("k9", "B=1"),))]
    assert fails.asked == 1 + 14 + 1


def test_what_does_not_fail_again_has_no_fault() -> None:
    assert narrow(Policy(3, (("a", "B=1"), ("b", "B=1"))), Failing()) == []


def test_base_must_hold() -> None:
    policy = Policy(3, (("a", "B=1"),))
    with pytest.raises(ValueError, match="base must hold, so that a failure shows a pick, but 3 fails itself; try another number"):
        narrow(policy, lambda candidate: True)
    assert narrow(policy, lambda candidate: candidate.tune == 3 or bool(candidate.picks), Policy(4)) == [Policy(4, policy.picks)]
    with pytest.raises(ValueError, match="base must be without picks, got 3,a:B=1"):
        narrow(policy, lambda candidate: False, policy)


ENTRY: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "triton": "3.7.1",
    "kernel": FLA_O,
    "config": BK64,
    "law": "cut",
    "run": f"law=cut at=64 adapter=fla/chunk tune=17,{FLA_O}:{BK64} lengths=130",
    "error": "o: is off by more than rounding explains",
}
characters = st.sampled_from("aZ0 _=:,'\"\\\n\t\x00\x1b\x85\u00e9\u2028\U0001f600")
texts = st.lists(characters, min_size=1, max_size=20).map("".join).filter(lambda text: text.strip() != "")


@settings(max_examples=50)
@given(
    st.lists(
        st.builds(
            lambda gpu, error, config: Denied(**{**ENTRY, "gpu": gpu, "error": error, "config": config}), texts, texts, configs
        )
    )
)
@pytest.mark.slow
def test_deny_list_survives_its_file(tmp_path_factory: pytest.TempPathFactory, denied: list[Denied]) -> None:
    path = tmp_path_factory.mktemp("denied") / "denied.jsonl"
    for _ in range(2):
        write_denied(path, denied)
        assert read_denied(path) == sorted(set(denied))
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert [Denied.from_json(json.loads(json.dumps(entry.to_json()))) for entry in denied] == denied


def test_denied_applies_where_it_was_seen() -> None:
    denied = Denied(**ENTRY)
    assert denied.applies("NVIDIA H200", "3.7.1")
    assert not denied.applies("NVIDIA H100", "3.7.1")
    assert not denied.applies("NVIDIA H200", "3.6.0")


def test_wrong_entry_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "denied.jsonl"
    for data, message in [
        ([], r"a denied configuration must be a table of config, error, gpu, kernel, law, run, triton, got '\[\]'"),
        (ENTRY | {"why": "x"}, "must have config, error, gpu, kernel, law, run, triton, got one with an unknown why"),
        ({name: value for name, value in ENTRY.items() if name != "law"}, "got one with no law"),
        (ENTRY | {"gpu": ""}, "gpu of a denied configuration must be a text that is not empty, got ''"),
        (ENTRY | {"triton": 3.7}, "triton of a denied configuration must be a text that is not empty, got 3.7"),
        (ENTRY | {"error": " "}, "error of a denied configuration must be a text"),
        (ENTRY | {"kernel": "a b"}, "a kernel must be a name"),
        (ENTRY | {"config": "BK"}, "a configuration must be"),
        (ENTRY | {"law": "recall"}, "run of a denied configuration must have law=recall and adapter=..., got 'law=cut"),
        (ENTRY | {"run": "law=cut"}, "run of a denied configuration must have law=cut and adapter="),
        (ENTRY | {"run": "cut"}, "a case line is made of name=value words, got 'cut'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Denied.from_json(data)
        path.write_text(f"{json.dumps(ENTRY)}\n\n{json.dumps(data)}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=f"line 3 of the deny-list: .*{message}"):
            read_denied(path)


def test_line_that_is_no_json_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "denied.jsonl"
    path.write_text('{"gpu": ', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 of the deny-list: "):
        read_denied(path)


def test_place_is_known() -> None:
    gpu, triton = here()
    assert gpu
    assert triton == (autotune.installed("triton") or "none")


def test_policy_without_install_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_installed", False)  # another test may have
    with pytest.raises(RuntimeError, match="install"), using(Policy(17)):
        pass
