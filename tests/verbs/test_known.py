"""Known defects: the file says what each explains, and an entry that explains too much or nothing is refused."""

import dataclasses
import itertools
import math
import pathlib
import re
from typing import Any

import pytest

from tests.answering import Answering
from tests.faults import not_refused
from verify.adapters.packages import installed
from verify.adapters.registry import AdapterError
from verify.cli import exits, known_command
from verify.cli.main import main
from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.execution.line import Run
from verify.findings import known
from verify.findings.known import FILE, KnownDefects, load
from verify.findings.law_report import left_out
from verify.findings.store import Store
from verify.process.messages import Describe, Question, RunOne
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

LINE = "law=oracle adapter=fla/chunk lengths=3 gate=saturated dtype=fp16"
ENTRY = {
    "run": f'"{LINE}"',
    "versions": '{ fla-core = ["0.6.0", "0.6.1"], triton = ["3.7.1"] }',
    "where": '"gate=saturated dtype=fp16"',
    "reason": '"it overflows, issue 7"',
}


def written(folder: pathlib.Path, *entries: dict[str, str | None]) -> pathlib.Path:
    path = folder / "defects.toml"
    texts = [
        "[[defect]]\n" + "".join(f"{name} = {value}\n" for name, value in {**ENTRY, **entry}.items() if value is not None)
        for entry in entries
    ]
    path.write_text("\n".join(texts))
    return path


def test_the_file_that_comes_with_the_toolkit_loads() -> None:
    assert FILE.is_file()
    for defect in load():
        assert defect.reason
        assert defect.where


def test_entry_is_read_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (defect,) = load(written(tmp_path, {}))
    assert str(defect.run) == str(Run.parse(LINE))
    assert defect.where == {"gate": "saturated", "dtype": "fp16"}
    for versions, applies in (
        ({"fla-core": "0.6.1", "triton": "3.7.1"}, True),
        ({"fla-core": "0.6.2", "triton": "3.7.1"}, False),
        ({"fla-core": "0.6.0"}, False),
    ):
        monkeypatch.setattr(known.deny_list, "installed", versions.get)
        assert defect.applies() is applies


@pytest.mark.usefixtures("released")
def test_defect_explains_its_law_adapter_words_and_versions_only(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (defect,) = load(written(tmp_path, {}))
    assert defect.explains(Run.parse(LINE))
    assert defect.explains(Run.parse(LINE.replace("lengths=3", "lengths=99 heads=2 value_heads=2")))
    for old, new in (
        ("gate=saturated", "gate=10"),
        ("dtype=fp16", "dtype=bf16"),
        ("law=oracle", "law=pure"),
        ("fla/chunk", "fla/fused_recurrent"),
    ):
        assert not defect.explains(Run.parse(LINE.replace(old, new))), new
    monkeypatch.setattr(known.deny_list, "installed", {"fla-core": "0.7.0", "triton": "3.7.1"}.get)
    assert not defect.explains(Run.parse(LINE))


@pytest.mark.usefixtures("released")
def test_a_defect_of_one_variant_explains_no_other(tmp_path: pathlib.Path) -> None:
    line = LINE.replace("law=oracle", "law=strides variant=sliced")
    (defect,) = load(written(tmp_path, {"run": f'"{line}"', "where": '"variant=sliced dtype=fp16"'}))
    assert defect.explains(Run.parse(line))
    assert not defect.explains(Run.parse(line.replace("sliced", "offset")))
    assert not defect.explains(Run.parse(line.replace("dtype=fp16", "dtype=bf16")))


def test_bad_entry_is_named_with_the_rule_it_breaks(tmp_path: pathlib.Path) -> None:
    for change, message in [
        ({"where": None}, "known defect 1 must have where"),
        ({"reason": None, "versions": None}, "known defect 1 must have reason, versions"),
        ({"where": '""'}, "known defect 1: where must have at least one word"),
        ({"where": '"gate=10"'}, "known defect 1: where must hold for its own run, got gate=10 and saturated"),
        ({"where": '"colour=red"'}, "known defect 1: where must hold for its own run, got colour=red and None"),
        ({"where": '"variant=sliced"'}, "known defect 1: where must hold for its own run, got variant=sliced and None"),
        ({"versions": "{}"}, "known defect 1: versions must name a distribution"),
        ({"versions": '"0.6.0"'}, "known defect 1: versions must name a distribution and its versions, got '0.6.0'"),
        ({"versions": '{ fla-core = "0.6.0" }'}, "known defect 1: versions must name a distribution and its versions, got {'fla"),
        ({"outpust": '["dg"]'}, "known defect 1 has an unknown key 'outpust' (did you mean outputs?)"),
    ]:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
            load(written(tmp_path, {}, change))
        assert str(error.value).startswith(message), change


def test_bad_run_line_is_refused(tmp_path: pathlib.Path) -> None:
    patterns = (
        (line, r"law|lengths|name=value")
        for line in ["law=orcale adapter=fla/chunk lengths=3", "law=oracle adapter=fla/chunk", "nothing"]
    )
    assert not_refused(lambda line: load(written(tmp_path, {"run": f'"{line}"'})), patterns, (ValueError, AdapterError)) == []


def test_versions_are_those_of_distributions_on_this_host() -> None:
    assert installed("pytest") == pytest.__version__
    assert installed("no-such-distribution") is None


@pytest.mark.usefixtures("released")
def test_a_defect_of_gpus_up_to_a_width_explains_nothing_else(tmp_path: pathlib.Path) -> None:
    line = f"{LINE} device=cuda value_dim=16"
    (defect,) = load(written(tmp_path, {"run": f'"{line}"', "most": "{ value_dim = 16 }"}))
    assert defect.applies("cuda")
    assert not defect.applies()
    assert defect.explains(Run.parse(line))
    assert defect.explains(Run.parse(line.replace("value_dim=16", "value_dim=3")))
    assert not defect.explains(Run.parse(line.replace("value_dim=16", "value_dim=17")))
    assert not defect.explains(Run.parse(line.replace(" device=cuda", "")))
    (defect,) = load(written(tmp_path, {"run": f'"{line}"', "least": "{ value_dim = 16 }"}))
    assert defect.explains(Run.parse(line.replace("value_dim=16", "value_dim=17")))
    assert not defect.explains(Run.parse(line.replace("value_dim=16", "value_dim=15")))


def test_a_defect_with_a_decay_that_is_given_may_name_its_outputs(tmp_path: pathlib.Path) -> None:
    """A kernel that computes its own gate takes no decay, so the outputs of that form are looked up without it."""
    for gate, words in [("saturated", "decay=linear backward=no"), ("edges", "backward=no")]:
        line = LINE.replace("gate=saturated", f"gate={gate} {words}")
        (defect,) = load(written(tmp_path, {"run": f'"{line}"', "where": f'"gate={gate}"', "outputs": '["o", "final_state"]'}))
        assert defect.outputs == ("o", "final_state"), gate


@pytest.mark.usefixtures("released")
def test_a_defect_that_names_outputs_explains_no_other_and_no_more(tmp_path: pathlib.Path) -> None:
    (defect,) = load(written(tmp_path, {"outputs": '["dg", "da"]', "times": "4"}))
    run = Run.parse(LINE)

    def explains(*found: tuple[str, float]) -> bool:
        return defect.explains(
            run, [Finding(output, FailureKind.OFF, "is off", error=error, allowed=1.0) for output, error in found]
        )

    assert explains(("dg", 3.9))
    assert explains(("dg", 2.0), ("da", 4.0))
    assert not explains(("dg", 4.1))
    assert not explains(("dg", 2.0), ("dk", 1.1))
    assert not explains(("dg", float("nan")))
    assert not explains()
    other = dataclasses.replace(run, law="recompute")
    off = Finding("dg", FailureKind.OFF, "is off", error=2.0, allowed=1.0)
    assert defect.explains(other, [off])  # every law that compares with the truth sees the same error
    for exact in (dataclasses.replace(off, allowed=0.0), dataclasses.replace(off, error=0.0, allowed=0.0)):
        assert not defect.explains(other, [exact])
    anything = dataclasses.replace(defect, times=math.inf)
    assert not anything.explains(other, [off])
    assert not defect.explains(run)  # before it is run nobody knows
    assert known.KnownDefects([defect]).explained_outputs(run) == {"dg": 4.0, "da": 4.0}
    assert known.KnownDefects([defect]).explained_outputs(dataclasses.replace(run, adapter="fla/chunk_kda")) == {}


def test_a_failure_of_any_adapter_and_version_may_resemble_a_defect(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known.deny_list, "installed", {"fla-core": "0.7.0", "triton": "3.7.1"}.get)
    (defect,) = load(written(tmp_path, {"outputs": '["dg", "da"]', "times": "4"}))
    defects, run = known.KnownDefects([defect]), dataclasses.replace(Run.parse(LINE), adapter="zoo/DropsState")

    def resembling(run: Run, output: str = "dg", error: float = 2.0) -> list[known.Known]:
        findings = [Finding(output, FailureKind.OFF, "is off", error=error, allowed=1.0)]
        return defects.resembling(run, Outcome(Verdict.BROKEN, findings))

    assert resembling(run) == [defect]
    assert defect.title.startswith("fla/chunk with fla-core 0.6.0")
    assert not resembling(run, "dk")
    assert not resembling(run, error=5.0)
    broken = Outcome(Verdict.BROKEN, [Finding("dg", FailureKind.OFF, "is off", error=2.0, allowed=1.0)])
    assert "dtype" in defect.where
    assert defects.resembling(run, broken, ["values=ordinary", "packed=yes"]) == [defect]
    assert not defects.resembling(run, broken, ["values=ordinary", "dtype=fp32"])  # then half precision is not the reason
    exact = Outcome(Verdict.BROKEN, [Finding("dg", FailureKind.OFF, "is off", error=2.0)])
    assert resembling(dataclasses.replace(run, law="recompute"))
    assert not defects.resembling(dataclasses.replace(run, law="recompute"), exact)
    assert not resembling(Run.parse(str(run).replace("dtype=fp16", "dtype=bf16")))
    behind = dataclasses.replace(defect, run=Run.parse(f"{with_lengths(LINE, '0+3')} packed=yes"))
    for lengths, alike in (("2+0+1", [behind]), ("3", []), ("2+1", [])):
        like = Run.parse(f"{with_lengths(str(run), lengths)} packed=yes")
        assert known.KnownDefects([behind]).resembling(like, broken) == alike, lengths
    elsewhere = dataclasses.replace(defect, run=dataclasses.replace(defect.run, device="cuda"))
    assert not known.KnownDefects([elsewhere]).resembling(run, Outcome(Verdict.BROKEN, []))


def with_lengths(line: str, lengths: str) -> str:
    return re.sub(r"lengths=\S+", f"lengths={lengths}", line)


@pytest.mark.usefixtures("released")
def test_of_defects_that_share_an_output_the_greatest_excuses(tmp_path: pathlib.Path) -> None:
    (four,) = load(written(tmp_path, {"outputs": '["dg", "da"]', "times": "4"}))
    (two,) = load(written(tmp_path, {"outputs": '["da", "dk"]', "times": "2"}))
    (whatever,) = load(written(tmp_path, {}))  # one that names no output excuses none: what is found decides
    (any_,) = load(written(tmp_path, {"outputs": '["dq", "dg"]'}))  # nor one that may be off by any amount
    assert any_.covers(Run.parse(LINE))
    assert known.KnownDefects([four, two, whatever, any_]).explained_outputs(Run.parse(LINE)) == {"dg": 4.0, "da": 4.0, "dk": 2.0}


def test_bounds_of_an_entry_that_make_no_sense_are_refused(tmp_path: pathlib.Path) -> None:
    rows = [
        ({"most": "{ value_dim = 15 }"}, "most must hold for its own run, got value_dim=15 and 16"),
        ({"most": '{ value_dim = "16" }'}, "most must give words their greatest whole numbers"),
        ({"least": "{ value_dim = 17 }"}, "least must hold for its own run, got value_dim=17 and 16"),
        ({"least": "{ value_dim = 1.5 }"}, "least must give words their least whole numbers"),
        ({"outputs": '["dz"]'}, "outputs must be a list of some of"),
        ({"times": "0.5"}, "times must be a number from 1 up, got 0.5"),
        ({"somewhere": '"yes"'}, "somewhere must be true or false, got 'yes'"),
    ]
    assert not_refused(lambda entry: load(written(tmp_path, {"run": f'"{LINE} value_dim=16"', **entry})), rows) == []


def test_a_finding_of_one_rank_is_explained_by_the_output_that_is_wrong(tmp_path: pathlib.Path) -> None:
    (defect,) = load(written(tmp_path, {"outputs": '["dg"]'}))
    finding = Finding("dg with tp=1 cp=1", FailureKind.OFF, "is off", error=2.0, allowed=1.0, ranks=(1,), port="dg")
    assert defect.explains(defect.run, [finding])
    assert not defect.explains(defect.run, [dataclasses.replace(finding, output="dk", port="dk")])


# Defects of one configuration of a kernel

DQKWG = "fla.ops.common.chunk_o.chunk_bwd_kernel_dqkwg"
H100 = "NVIDIA H100 80GB HBM3"
DELTA_RULE = (
    "law=oracle adapter=fla/chunk_delta_rule products=tf32 device=cuda tune=7 lengths=3 op=delta_rule heads=2 value_heads=2 "
    "key_dim=24"
)
RULE = "law=oracle adapter=fla/chunk device=cuda tune=7 lengths=3"
RELEASED = {"fla-core": "0.6.0", "triton": "3.7.1"}
OF_KERNEL = {
    "run": '"law=oracle adapter=fla/chunk products=tf32 device=cuda tune=1 lengths=3 key_dim=24"',
    "versions": '{ fla-core = ["0.6.0"], triton = ["3.7.1"] }',
    "where": '"backward=yes"',
    "most": "{ key_dim = 32 }",
    "outputs": '["call", "dk", "dq", "dg"]',
    "kernel": f'"{DQKWG}"',
    "config": '"num_warps=4"',
    "cards": '["H100", "H200"]',
}


def broken(tuned: dict[str, tuple[str, ...]], *outputs: str) -> Outcome:
    findings = [Finding(output, FailureKind.OFF, "is off", error=63.0, allowed=1.0) for output in outputs]
    return Outcome(Verdict.BROKEN, findings, tuned=tuned)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known.deny_list, "installed", RELEASED.get)


@pytest.fixture
def of_kernel(tmp_path: pathlib.Path, released: None) -> KnownDefects:
    """A defect of one configuration."""
    return load(written(tmp_path, OF_KERNEL))


def test_a_kernels_configuration_on_file_explains_every_adapter_that_launched_it(of_kernel: KnownDefects) -> None:
    run, defects, drawn = Run.parse(DELTA_RULE), of_kernel.on(H100), "num_warps=4:num_stages=3"
    defect = defects.explain(run, broken({DQKWG: (drawn,)}, "dq"))
    assert defect is not None
    assert (defect.kernel, defect.config, defect.run.adapter) == (DQKWG, "num_warps=4", "fla/chunk")
    for line in (
        DELTA_RULE.replace("law=oracle", "law=memory"),
        DELTA_RULE.replace("fla/chunk_delta_rule", "fla/chunk_v_first").replace(" op=delta_rule", ""),
    ):
        assert defects.explain(Run.parse(line), broken({DQKWG: (drawn,)}, "dq", "call")) is defect, line


def test_a_kernels_configuration_explains_nothing_else(of_kernel: KnownDefects) -> None:
    for line, tuned, outputs, gpu in [
        (DELTA_RULE, {DQKWG: ("num_warps=2:num_stages=2",)}, ["dq"], H100),
        (DELTA_RULE, {f"{DQKWG}_other": ("num_warps=4:num_stages=2",)}, ["dq"], H100),
        (DELTA_RULE, {}, ["dq"], H100),
        (DELTA_RULE, {DQKWG: ("num_warps=4:num_stages=2",)}, ["dq"], "NVIDIA B200"),
        (DELTA_RULE, {DQKWG: ("num_warps=4:num_stages=2",)}, ["dq"], "NVIDIA GH200 480GB"),
        (DELTA_RULE, {DQKWG: ("num_warps=4:num_stages=2",)}, ["dq"], ""),
        (DELTA_RULE, {DQKWG: ("num_warps=4:num_stages=2",)}, ["dq", "o"], H100),
        (DELTA_RULE.replace("key_dim=24", "key_dim=64"), {DQKWG: ("num_warps=4:num_stages=2",)}, ["dq"], H100),
        (f"{DELTA_RULE} backward=no", {DQKWG: ("num_warps=4:num_stages=2",)}, ["dq"], H100),
        (DELTA_RULE.replace("device=cuda tune=7 ", ""), {DQKWG: ("num_warps=4:num_stages=2",)}, ["dq"], ""),
    ]:
        assert of_kernel.on(gpu).explain(Run.parse(line), broken(tuned, *outputs)) is None, line


def test_a_process_that_crashed_left_no_record_and_is_explained_for_the_adapter_of_the_entry_alone(of_kernel: KnownDefects) -> None:
    crash = Outcome(Verdict.BROKEN, [Finding("call", FailureKind.CRASHED, "crashed: killed by SIGABRT")])
    defects = of_kernel.on(H100)
    line = "law=packed at=0 adapter=fla/chunk products=tf32 device=cuda tune=1 lengths=9+9 packed=yes key_dim=24 dtype=bf16"
    assert defects.explain(Run.parse(line), crash) is not None
    assert defects.explain(Run.parse(line.replace("fla/chunk", "fla/chunk_16")), crash) is None
    hung = Outcome(Verdict.BROKEN, [Finding("call", FailureKind.HUNG, "hung: no answer within 5 s")])
    assert defects.explain(Run.parse(line), hung) is None


def test_before_a_run_nobody_knows_which_configuration_it_gets(of_kernel: KnownDefects) -> None:
    defects = of_kernel.on(H100)
    assert defects.explain_any(Run.parse(DELTA_RULE)) is None
    assert defects.explained_outputs(Run.parse(DELTA_RULE)) == {}
    assert [defect.kernel for defect in defects.shown_by("fla/chunk", "oracle", "cuda")][-1] == DQKWG
    assert KnownDefects(defects, "NVIDIA B200").shown_by("fla/chunk", "oracle", "cuda") == []


def test_in_a_layer_a_wrong_gradient_of_a_rule_makes_all_gradients_wrong(tmp_path: pathlib.Path) -> None:
    line = "law=oracle adapter=fla/chunk device=cuda lengths=3"
    entry = {
        "run": f'"{line}"',
        "versions": f'{{ triton = ["{installed("triton")}"] }}',
        "where": '"backward=yes"',
        "kernel": '"dqkwg"',
        "config": '"num_warps=4"',
        "cards": '["H100"]',
        "outputs": '["dq", "call"]',
    }
    (defect,) = load(written(tmp_path, entry))
    layer, ran = Run.parse("law=oracle adapter=fla/layer device=cuda lengths=3 op=gdn_layer"), {"fla.dqkwg": ("BK=16:num_warps=4",)}
    for output, explained in (("dhidden", True), ("din_proj", True), ("call", True), ("y", False)):
        finding = broken(ran, output).findings
        assert defect.explains(layer, finding, ran, H100) is explained, output
    (forward,) = load(written(tmp_path, {**entry, "outputs": '["o"]'}))
    assert forward.explains(layer, broken(ran, "y").findings, ran, H100)
    assert not forward.explains(layer, broken(ran, "dhidden").findings, ran, H100)


def test_an_entry_about_a_configuration_names_all_of_it(tmp_path: pathlib.Path) -> None:
    entry: dict[str, str | None] = {
        "run": f'"{LINE} device=cuda tune=1,dq:num_warps=4:num_stages=3"',
        "kernel": '"fla.dq"',
        "config": '"num_warps=4"',
        "cards": '["H100"]',
    }
    assert load(written(tmp_path, entry))
    rows = [
        ({"cards": None}, "kernel, config and cards come together"),
        ({"versions": '{ fla-core = ["0.6.0"] }'}, "with a version of triton"),
        ({"run": f'"{LINE} backward=yes"'}, "a run with device=cuda"),
        ({"also": '["cut"]'}, "and no also"),
        ({"cards": '"H100"'}, "cards must be a list"),
        ({"config": '"four"'}, "a configuration must be NAME=value words"),
        ({"config": '"num_warps=2"'}, "config must hold for its own run, got num_warps=2 and tune=1,dq:num_warps=4:num_stages=3"),
    ]
    patterns = ((change, f"known defect 0: .*{message}") for change, message in rows)
    assert not_refused(lambda change: load(written(tmp_path, {**entry, **change})), patterns) == []


# Configurations that lose the device

DENY = """
[[deny]]
kernel = "dqkwg"
config = "num_warps=4"
cards = ["H200"]
versions = { fla-core = ["0.6.0"], triton = ["3.7.1"] }
where = "backward=yes"
most = { key_dim = 32 }
reason = "it is lost"
"""


@pytest.mark.usefixtures("released")
def test_the_deny_list_is_about_cards_versions_and_cases(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, {})
    path.write_text(path.read_text() + DENY)
    defects, run, gpu = load(path), Run.parse(DELTA_RULE), "NVIDIA H200"
    assert [defect.run for defect in defects] == [Run.parse(LINE)]
    assert defects.on(gpu).left_out(run) == [("dqkwg", "num_warps=4")]
    assert not defects.on(H100).left_out(run)
    for name, other in (("wide", "key_dim=64"), ("forward", "key_dim=24 backward=no")):
        assert not defects.on(gpu).left_out(Run.parse(DELTA_RULE.replace("key_dim=24", other))), name
    assert not defects.on(gpu).left_out(Run.parse(DELTA_RULE.replace("device=cuda tune=7 ", "")))
    call = Run.parse("law=again adapter=tests/right_calls.py:Rolled device=cuda lengths=3")
    assert defects.on(gpu).left_out(call), "a case without these words may launch the kernel in any way"
    assert defects.on(gpu).left_out_of_any("cuda") == [("dqkwg", "num_warps=4")]
    assert not defects.on(gpu).left_out_of_any("cpu") and not defects.on(H100).left_out_of_any("cuda")
    alone = defects.on(gpu).deny_list
    assert not list(alone) and alone.left_out(run) == [("dqkwg", "num_warps=4")]
    both = load(written(tmp_path, {})).with_(defects).on(gpu)
    assert len(list(both)) == 2 and both.left_out(run)
    (denial,) = defects.on(gpu).denials(run)
    assert str(denial) == "dqkwg with num_warps=4: it is lost (fla-core 0.6.0, triton 3.7.1 on H200)"
    assert denial.launched({"fla.ops.dqkwg": ("num_warps=2",)}) and not denial.launched({"fla.ops.dqkwg2": ()})
    monkeypatch.setattr(known.deny_list, "installed", {"fla-core": "0.6.1", "triton": "3.7.1"}.get)
    assert not defects.on(gpu).left_out(run)


@pytest.mark.usefixtures("released")
def test_what_the_toolkit_denies_leaves_a_configuration_for_every_shape() -> None:
    defects = load().on("NVIDIA H200")
    for key_dim, value_dim, dtype in itertools.product(
        (1, 16, 32, 33, 64, 256), (1, 64, 65, 127, 128, 256), ("fp32", "fp16", "bf16")
    ):
        denied = defects.left_out(Run.parse(f"{RULE} key_dim={key_dim} value_dim={value_dim} dtype={dtype}"))
        kernels = [kernel for kernel, _ in denied]
        assert len(kernels) == len({*kernels}) >= 3, "no kernel is denied both two and four warps"
        assert ((DQKWG, "num_warps=4") in denied) is (key_dim <= 32)
        assert ((DQKWG, "num_warps=2") in denied) is (key_dim > 32 and 64 < value_dim < 128 and dtype == "fp32")


def test_a_bad_entry_of_the_deny_list_is_named_with_the_rule_it_breaks(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "defects.toml"
    for old, new, message in [
        ('cards = ["H200"]', "", "entry 0 of the deny-list must have cards"),
        ("most", "mots", "entry 0 of the deny-list has an unknown key 'mots' (did you mean most?)"),
        (', triton = ["3.7.1"]', "", "entry 0 of the deny-list: kernel, config and cards come together, with a version of triton"),
        ('["H200"]', '"H200"', "entry 0 of the deny-list: cards must be a list of names of GPUs"),
        ("num_warps=4", "four", "entry 0 of the deny-list: a configuration must be NAME=value words"),
        ("{ key_dim = 32 }", '{ key_dim = "32" }', "entry 0 of the deny-list: most must give words their greatest whole numbers"),
        ("[[deny]]", "[deny]", "a file of known defects must have [[defect]] and [[deny]] tables alone"),
    ]:
        path.write_text(DENY.replace(old, new))
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
            load(path)
        assert str(error.value).startswith(message), old


class LosesItsGpu(Answering):
    """It loses the device in a case of 2 tokens or more, until the configuration is left out. It is wrong from 7 tokens on."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        if isinstance(question, Describe):
            return {**super().ask(question), "device": "NVIDIA H200"}
        if not isinstance(question, RunOne):
            return super().ask(question)
        tokens = Run.parse(question.line).example.case.tokens
        outcome = Outcome(Verdict.HOLDS, rows=1, tuned={"fla.dqkwg": ("num_warps=2",)})
        if tokens > 1 and ("dqkwg", "num_warps=4") not in question.left_out:
            self.lost += 1
            crash = Finding("call", FailureKind.CRASHED, "crashed")
            outcome = Outcome(Verdict.BROKEN, [crash], tuned={"fla.dqkwg": ("num_warps=4",)})
        elif tokens >= 7:
            off = Finding("o", FailureKind.OFF, "is off", error=9.0, allowed=1.0)
            outcome = dataclasses.replace(outcome, verdict=Verdict.BROKEN, findings=[off])
        return outcome.to_json()


def lossy(defects: KnownDefects) -> tuple[LosesItsGpu, Check]:
    """A check of one law on a GPU that is none, with a worker that loses it."""
    settings = Settings("fla/chunk", ["oracle"], Profile("some", 20, False), device="cuda", tune="3")
    worker = LosesItsGpu()
    with Check(settings, [worker], defects=defects) as check:
        check.run()
    return worker, check


@pytest.mark.usefixtures("released")
def test_a_configuration_that_loses_the_device_is_confirmed_once_and_then_left_out(tmp_path: pathlib.Path) -> None:
    entry = {**OF_KERNEL, "kernel": '"dqkwg"', "most": None, "where": '"op=gated_delta_rule"'}
    worker, check = lossy(load(written(tmp_path, entry)))
    assert worker.lost == 1, "in the line on file"
    (report,) = check.reports
    assert report.counts[Verdict.BROKEN] == 1 and Verdict.KNOWN not in report.counts
    assert report.run.split(" tune=")[1].startswith("3,fla.dqkwg:num_warps=2 "), "the line names what ran instead"
    (line,) = left_out(check.reports)
    assert line.startswith("not drawn      dqkwg with num_warps=4: it overflows, issue 7 (") and line.endswith(" in 1 case")


@pytest.mark.usefixtures("released")
def test_a_configuration_whose_line_is_not_run_is_confirmed_in_a_drawn_case(tmp_path: pathlib.Path) -> None:
    entry = {**OF_KERNEL, "kernel": '"dqkwg"', "most": None, "where": '"op=gated_delta_rule"'}
    path = written(tmp_path, {**entry, "run": entry["run"].replace("law=oracle", "law=cut at=1")})
    worker, check = lossy(load(path))
    assert worker.lost == 2, "in the case that was drawn, and again in a process of its own"
    assert check.reports[0].counts[Verdict.KNOWN] == 1
    assert left_out(check.reports)


@pytest.mark.usefixtures("released")
def test_a_configuration_of_the_deny_list_is_never_drawn(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "defects.toml"
    path.write_text(DENY.replace('where = "backward=yes"\nmost = { key_dim = 32 }\n', ""))
    worker, check = lossy(load(path))
    assert worker.lost == 0
    assert left_out(check.reports)
    path.write_text("")
    worker, check = lossy(load(path))
    assert worker.lost > 2 and not left_out(check.reports)


# Files of users


class Failing(Answering):
    """Every case with an initial state of zeros is 2 times its tolerance off in o, and others are right."""

    def __init__(self) -> None:
        super().__init__(lambda run: 2.0 if run.example.case.state == "zero" else 0.5)

    def ask(self, question: Question, deadline_s: float | None = None) -> dict[str, Any]:
        answer = super().ask(question, deadline_s)
        return {**answer, "versions": f"torch {installed('torch')}"} if isinstance(question, Describe) else answer

    def __enter__(self) -> "Failing":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def kernel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an adapter in a folder below the current one."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "kernel.py").write_text("from tests.right import Chunkwise as Kernel\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(known_command, "Worker", lambda *_, **__: Failing())
    return "own/kernel.py:Kernel"


def verdict_of(spec: str, **settings: object) -> tuple[Verdict, list[str], dict[str, int]]:
    with Check(Settings(spec, ["oracle"], Profile("some", 8), **settings), [Failing()], Store()) as check:  # type: ignore[arg-type,list-item]
        (report,) = check.run()
    return report.verdict, report.known, report.counts


def put(*words: str) -> int:
    return main(["known", *words, "--reason", "zeros are read as ones, issue 3"])


def test_a_failure_is_put_on_file_beside_its_adapter_and_fails_no_check_from_anywhere(
    kernel: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict_of(kernel)[0] is Verdict.BROKEN
    line = f"law=oracle adapter={kernel} lengths=3 state=zero"
    assert put(line, "--where", "state=zero") == exits.HOLDS
    assert "on file in own/known_defects.toml: zeros are read as ones, issue 3" in capsys.readouterr().out
    assert "adapter=kernel.py:Kernel lengths=3" in (tmp_path / "own" / "known_defects.toml").read_text()
    sentence = f"known defect, still there: zeros are read as ones, issue 3 ({line})"
    verdict, lines, counts = verdict_of(kernel)
    assert (verdict, lines) == (Verdict.HOLDS, [sentence])
    assert counts[Verdict.KNOWN] > 0
    assert verdict_of(f"{tmp_path}/own/../own/kernel.py:Kernel")[0] is Verdict.HOLDS
    monkeypatch.chdir(tmp_path / "own")
    assert verdict_of("kernel.py:Kernel")[0] is Verdict.HOLDS
    assert put("law=oracle adapter=kernel.py:Kernel lengths=9 state=zero") == exits.HOLDS
    assert "already on file in known_defects.toml" in capsys.readouterr().out


@pytest.mark.parametrize(("also", "explained"), [((), False), (("recurrent",), True)])
def test_without_where_an_entry_explains_the_variant_of_its_line_alone(
    also: tuple[str, ...],
    explained: bool,  # noqa: FBT001 - a parameter
    kernel: str,
    tmp_path: pathlib.Path,
) -> None:
    words = f"adapter={kernel} lengths=3 state=zero"
    further = [word for law in also for word in ("--also", law)]
    assert put(f"law=strides variant=sliced {words}", "--known", "mine.toml", *further) == exits.HOLDS
    (defect,) = load(tmp_path / "mine.toml")
    found = broken({}, "o").findings
    assert defect.explains(Run.parse(f"law=strides variant=sliced {words} seed=4"), found)
    assert defect.explains(Run.parse(f"law=strides variant=offset {words}"), found) is explained


def test_without_where_an_entry_explains_the_options_of_its_line_in_any_size(kernel: str, tmp_path: pathlib.Path) -> None:
    line = f"law=oracle adapter={kernel} lengths=3 state=zero dtype=bf16"
    assert put(line, "--known", "mine.toml", "--also", "cut") == exits.HOLDS
    (defect,) = load(tmp_path / "mine.toml")
    assert (defect.outputs, defect.also) == (("o",), ("cut",))
    for words, explained in (
        ("law=oracle lengths=70 state=zero dtype=bf16 heads=2 value_heads=4 key_dim=5 seed=7", True),
        ("law=cut at=1 lengths=70 state=zero dtype=bf16", True),
        ("law=recurrent at=69 lengths=70 state=zero dtype=bf16", False),
        ("law=oracle lengths=3+4 packed=yes state=zero dtype=bf16", False),
        ("law=oracle lengths=3 state=zero", False),
    ):
        run = Run.parse(f"adapter={kernel} {words}")
        assert defect.explains(run, broken({}, "o").findings) is explained, words
        assert not defect.explains(run, broken({}, "o", "dq").findings), words
    assert verdict_of(kernel, known=["mine.toml"])[0] is Verdict.BROKEN, "it explains bf16 alone"


def test_what_holds_is_not_put_on_file(kernel: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert put(f"law=oracle adapter={kernel} lengths=3") == exits.BROKEN
    assert "the line holds, so there is no defect to put on file" in capsys.readouterr().out
    assert not (tmp_path / "own" / "known_defects.toml").exists()


def test_an_entry_that_would_break_a_rule_is_not_written(
    kernel: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in [
        (("law=oracle adapter=fla/chunk lengths=3 state=zero",), "--known must name the file to write"),
        (("law=oracle adapter=KERNEL lengths=3 state=zero", "--known", "no/such.toml"), "in a folder that exists"),
        (("law=oracle adapter=KERNEL lengths=3 state=zero", "--where", "state=random"), "where must hold for its own run"),
        (("law=oracle adapter=KERNEL lengths=3 state=zero", "--also", "orcale"), "also must be a list of laws among"),
        (("law=oracle adapter=KERNEL lengths=3 state=zero", "--times", "0.5"), "times must be a number from 1 up"),
        (("law=oracle adapter=KERNEL lengths=3 state=zero", "--kernel", "dq:num_warps=4"), "of a kernel that ran, got dq:num_war"),
        (("law=oracle adapter=KERNEL lengths=3 state=zero", "--reason", "two\nlines"), "--reason must be one line"),
    ]:
        reason = () if "--reason" in words else ("--reason", "issue 3")
        assert main(["known", *(word.replace("KERNEL", kernel) for word in words), *reason]) == exits.USAGE, words
        assert message in capsys.readouterr().err, words
        assert list(tmp_path.rglob("*.toml*")) == [], words


def test_a_file_with_a_fault_is_bad_usage_before_any_work(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    near = pathlib.Path("own/known_defects.toml")
    for text, message in (
        ("[[defects]]\n", "a file of known defects must have [[defect]] and [[deny]] tables alone, got defects"),
        ("[[defect]]\nrun = 3\n", "own/known_defects.toml: known defect 0 must have reason, versions, where"),
        ("not toml", "own/known_defects.toml: "),
    ):
        near.write_text(text)
        assert main(["check", kernel]) == exits.USAGE
        assert message in capsys.readouterr().err
    near.unlink()
    assert main(["check", kernel, "--known", "missing.toml"]) == exits.USAGE
    assert "known defects: missing.toml cannot be read: No such file" in capsys.readouterr().err


def test_an_entry_of_a_user_about_other_versions_or_that_holds_now_is_said(kernel: str) -> None:
    near = pathlib.Path("own/known_defects.toml")
    run = 'run = "law=oracle adapter=kernel.py:Kernel lengths=3"'
    entry = f'[[defect]]\n{run}\nwhere = "state=none"\nreason = "issue 3"\nversions = {{ torch = ["VERSION"] }}\n'
    near.write_text(entry.replace("VERSION", "0.1"))
    lines = verdict_of(kernel)[1]
    assert lines == ["known defect of torch 0.1 alone, so not looked for (own/known_defects.toml): issue 3"]
    near.write_text(entry.replace("VERSION", str(installed("torch"))))
    (line,) = verdict_of(kernel)[1]
    assert line.startswith("known defect NO LONGER FAILS, remove it from own/known_defects.toml: issue 3")
