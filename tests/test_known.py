"""Known defects: the file says what each explains, and an entry that explains too much or nothing is refused."""

import dataclasses
import pathlib

import pytest

from verify.adapters.loader import AdapterError
from verify.adapters.packages import installed
from verify.execution.run import Run
from verify.findings import known
from verify.findings.known import FILE, load
from verify.process.outcome import FailureKind, Finding

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
        monkeypatch.setattr(known, "installed", versions.get)
        assert defect.applies() is applies


def test_defect_explains_its_law_adapter_words_and_versions_only(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (defect,) = load(written(tmp_path, {}))
    monkeypatch.setattr(known, "installed", {"fla-core": "0.6.0", "triton": "3.7.1"}.get)
    assert defect.explains(Run.parse(LINE))
    assert defect.explains(Run.parse(LINE.replace("lengths=3", "lengths=99 heads=2 value_heads=2")))
    for old, new in (
        ("gate=saturated", "gate=10"),
        ("dtype=fp16", "dtype=bf16"),
        ("law=oracle", "law=pure"),
        ("fla/chunk", "fla/fused_recurrent"),
    ):
        assert not defect.explains(Run.parse(LINE.replace(old, new))), new
    monkeypatch.setattr(known, "installed", {"fla-core": "0.7.0", "triton": "3.7.1"}.get)
    assert not defect.explains(Run.parse(LINE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"where": None}, "known defect 1 must have where"),
        ({"reason": None, "versions": None}, "known defect 1 must have reason, versions"),
        ({"where": '""'}, "known defect 1: where must have at least one word"),
        ({"where": '"gate=10"'}, "known defect 1: where must hold for its own run, got gate=10 and saturated"),
        ({"where": '"colour=red"'}, "known defect 1: where must hold for its own run, got colour=red and None"),
        ({"versions": "{}"}, "known defect 1: versions must name a distribution"),
        ({"versions": '"0.6.0"'}, "known defect 1: versions must name a distribution and its versions, got '0.6.0'"),
        ({"run": '"law=oracle adapter=tests/right.py:Chunkwise lengths=3"'}, "known defect 1: adapter must be one of fla/chunk"),
    ],
)
def test_bad_entry_is_named_with_the_rule_it_breaks(tmp_path: pathlib.Path, change: dict[str, str | None], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        load(written(tmp_path, {}, change))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("line", ["law=orcale adapter=fla/chunk lengths=3", "law=oracle adapter=fla/chunk", "nothing"])
def test_bad_run_line_is_refused(tmp_path: pathlib.Path, line: str) -> None:
    with pytest.raises((ValueError, AdapterError), match=r"law|lengths|name=value"):
        load(written(tmp_path, {"run": f'"{line}"'}))


def test_versions_are_those_of_distributions_on_this_host() -> None:
    assert installed("pytest") == pytest.__version__
    assert installed("no-such-distribution") is None


def test_a_defect_of_gpus_up_to_a_width_explains_nothing_else(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "installed", {"fla-core": "0.6.0", "triton": "3.7.1"}.get)
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


def test_a_defect_told_by_its_outputs_explains_no_other_and_no_more(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "installed", {"fla-core": "0.6.0", "triton": "3.7.1"}.get)
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
    assert not defect.explains(run)  # before it is run nobody knows
    assert known.KnownDefects([defect]).explained_outputs(run) == {"dg": 4.0, "da": 4.0}
    assert known.KnownDefects([defect]).explained_outputs(dataclasses.replace(run, adapter="fla/chunk_kda")) == {}


def test_of_defects_that_share_an_output_the_greatest_excuses(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "installed", {"fla-core": "0.6.0", "triton": "3.7.1"}.get)
    (four,) = load(written(tmp_path, {"outputs": '["dg", "da"]', "times": "4"}))
    (two,) = load(written(tmp_path, {"outputs": '["da", "dk"]', "times": "2"}))
    (whatever,) = load(written(tmp_path, {}))  # one that is told by no output excuses none: what is found decides
    (any_,) = load(written(tmp_path, {"outputs": '["dq", "dg"]'}))  # nor one that may be off by any amount
    assert any_.covers(Run.parse(LINE))
    assert known.KnownDefects([four, two, whatever, any_]).explained_outputs(Run.parse(LINE)) == {"dg": 4.0, "da": 4.0, "dk": 2.0}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"most": "{ value_dim = 15 }"}, "most must hold for its own run, got value_dim=15 and 16"),
        ({"most": '{ value_dim = "16" }'}, "most must give words their greatest whole numbers"),
        ({"least": "{ value_dim = 17 }"}, "least must hold for its own run, got value_dim=17 and 16"),
        ({"least": "{ value_dim = 1.5 }"}, "least must give words their least whole numbers"),
        ({"outputs": '["dz"]'}, "outputs must be a list of some of"),
        ({"times": "0.5"}, "times must be a number from 1 up, got 0.5"),
        ({"somewhere": '"yes"'}, "somewhere must be true or false, got 'yes'"),
    ],
)
def test_bounds_of_an_entry_that_make_no_sense_are_refused(
    tmp_path: pathlib.Path, entry: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path, {"run": f'"{LINE} value_dim=16"', **entry}))


def test_a_finding_of_one_rank_is_explained_by_the_output_that_is_wrong(tmp_path: pathlib.Path) -> None:
    (defect,) = load(written(tmp_path, {"outputs": '["dg"]'}))
    finding = Finding("dg with tp=1 cp=1", FailureKind.OFF, "is off", error=2.0, allowed=1.0, ranks=(1,))
    assert defect.explains(defect.run, [finding])
    assert not defect.explains(defect.run, [dataclasses.replace(finding, output="dk")])
