"""The zoo: every animal is found, hunted as `check` would ask, and reported; what survives, laws or a suite, is said."""

import ast
import contextlib
import json
import pathlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from properties.rules.laws import LAWS
from tests.in_process import said
from tests.together import for_each
from verify.adapters.loader import load
from verify.adapters.registry import AdapterError, check_spec
from verify.cli import exits
from verify.cli import main as cli
from verify.cli import zoo_command as command
from verify.engine.drawing import of_law
from verify.engine.profiles import BASE, Profile
from verify.engine.shrink import Shrunk
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process import worker
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.zoo import animals as registry
from verify.zoo import base, hunt, page, trials
from verify.zoo import kill_table as table
from verify.zoo import wrong_rules as rules
from verify.zoo.animals import animals, chosen, labelled, of_module, right_of, rights
from verify.zoo.hunt import Hunt, summary

FOLDER = pathlib.Path(registry.__file__).parent
OWN = '''
import os
import torch
from verify.zoo.base import Chunkwise
from verify.zoo.wrong_rules import DropsState as _DropsState

class Harmless(Chunkwise):
    """It is right, and called an animal."""
    letter = "-"

class LeavesADoorOpen(Chunkwise):
    """It makes every other implementation of the process wrong."""
    letter = "K"
    def run(self, x):
        Chunkwise.between = _DropsState.between
        Chunkwise.last = lambda self, total: total[..., :1]
        return super().run(x)

class Nameless(Chunkwise):
    letter = "-"

class Lost(Chunkwise):
    """Its class is none."""
    letter = "?"
'''


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(hunt, "PROFILE", Profile("quick", 8))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def own_file(tmp_path: pathlib.Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return "own.py"


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: worker.Worker) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker.Worker, "launch", refuse)


# Who is there


def test_every_class_with_a_letter_in_the_package_is_found_and_no_other() -> None:
    written = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                written[node.name] = (
                    "letter" in {keyword.arg for keyword in node.keywords},
                    {getattr(parent, "id", getattr(parent, "attr", "")) for parent in node.bases},
                )

    def lettered(name: str) -> bool:
        has_letter, bases = written.get(name, (False, set()))
        return has_letter or any(lettered(parent) for parent in bases)

    assert set(animals()) == {name for name in written if lettered(name)}
    assert len(animals()) >= 66


@pytest.mark.slow
def test_every_animal_is_made_of_a_right_implementation_and_both_are_adapters_by_name() -> None:
    for animal in animals().values():
        right = right_of(animal.kind)
        assert right is not None, animal.name
        assert f"zoo/{right.__name__}" in rights()
        assert type(load(animal.spec)) is animal.kind
    assert type(load("zoo/Chunkwise")) is base.Chunkwise


def test_rows_of_incidents_are_those_of_the_record() -> None:
    assert list(registry.INCIDENTS) == list(range(1, 37))
    assert {letter for animal in animals().values() for letter in animal.letter} <= set(registry.LETTERS)


@for_each(
    ("attributes", "message"),
    [
        ({"letter": "?", "__doc__": "x"}, "letter of Wrong must be one of S C V X N I T L R E Q G K F D -, got '?'"),
        ({"letter": "S", "incident": (37,), "__doc__": "x"}, r"incident of Wrong must be a tuple of rows in 1..36, got \(37,\)"),
        ({"letter": "S", "incident": 3, "__doc__": "x"}, "incident of Wrong must be a tuple of rows in 1..36, got 3"),
        ({"letter": "S"}, "Wrong must have a docstring that says what is wrong"),
    ],
)
def test_what_is_not_labelled_is_refused(attributes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labelled(type("Wrong", (base.Chunkwise,), attributes))


def test_two_animals_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"wrong_{name}.py").touch()
        module = types.ModuleType(f"verify.zoo.wrong_{name}")
        module.Twice = type("Twice", (base.Chunkwise,), {"letter": "S", "__doc__": "x", "__module__": module.__name__})  # type: ignore[attr-defined]
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "animals.py"))
    with pytest.raises(ValueError, match=r"two animals are called Twice, in verify.zoo.wrong_one and verify.zoo.wrong_two"):
        animals.__wrapped__()


def test_helpers_and_bases_of_a_module_are_no_animals() -> None:
    names = [animal.name for animal in of_module(rules)]
    assert "LeaksState" in names
    assert not {"Chunkwise", "Domain", "_Clipped"} & set(names)


def test_unknown_animal_is_refused_by_name_as_an_adapter_and_in_a_run_line() -> None:
    with pytest.raises(AdapterError, match=r"^unknown animal 'zoo/LeaksStates': the nearest in the zoo are zoo/LeaksState, "):
        check_spec("zoo/LeaksStates")
    with pytest.raises(AdapterError, match="unknown animal"):
        Run.parse("law=oracle adapter=zoo/Unicorn lengths=3")
    with pytest.raises(AdapterError, match="unknown animal 'zoo/Suite'"):  # a class of the zoo's modules, and no adapter
        load("zoo/Suite")


def test_a_zoo_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no module named unicorn")

    monkeypatch.setattr(registry, "animals", broken)
    registry.by_spec.cache_clear()
    with pytest.raises(
        AdapterError, match=r"^adapter zoo/LeaksState: the zoo cannot be imported: ImportError: no module named unicorn$"
    ):
        load("zoo/LeaksState")


def test_animals_are_chosen_by_name_letter_and_file(own_file: str) -> None:
    assert [animal.name for animal in chosen(["zoo/EvenRows", "LeaksState", "EvenRows"])] == ["EvenRows", "LeaksState"]
    assert {animal.letter for animal in chosen(letters=["E", "G"])} == {"E", "G"}
    (mine,) = chosen([f"{own_file}:Harmless"])
    assert (mine.name, mine.spec, mine.story) == ("Harmless", "own.py:Harmless", "It is right, and called an animal.")
    assert chosen() == list(animals().values())


# What runs


def stub(monkeypatch: pytest.MonkeyPatch, says: Callable[[Run, int], Verdict]) -> dict[tuple[str, str], list[Run]]:
    """No worker: what a run comes to is said by law, animal and how often that pair ran before."""
    runs: dict[tuple[str, str], list[Run]] = {}

    def ask(run: Run, *_: object) -> Outcome:
        done = runs.setdefault((run.law, run.adapter), [])
        done.append(run)
        verdict = says(run, len(done))
        return Outcome(verdict, [Finding("o", FailureKind.DIFFERS, "differs")] if verdict is Verdict.BROKEN else [], oracle_s=0.0)

    monkeypatch.setattr(hunt, "ask", ask)
    monkeypatch.setattr(hunt, "explain", lambda law, run, outcome, *rest: (Shrunk(run.example, (), 0, True), outcome))
    return runs


def hunted(names: list[str], **options: Any) -> Hunt:
    with Hunt(chosen(names), workers=1, **options) as hunting:
        hunting.run()
    return hunting


@pytest.mark.usefixtures("no_work")
@pytest.mark.slow
def test_every_law_runs_a_quarter_and_an_animal_that_three_kill_runs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(run: Run, times: int) -> Verdict:
        weak = run.adapter == "zoo/LeaksState" and run.law in ("packed", "cut", "recall")
        late = run.adapter == "zoo/PeeksAhead" and run.law == "future" and times == 6
        return Verdict.BROKEN if (weak and times == 2) or late else Verdict.HOLDS

    runs = stub(monkeypatch, says)
    leaks, peeks = hunted(["LeaksState", "PeeksAhead"], laws=[*LAWS]).fates
    assert {cell.law: cell.killed_at for cell in leaks.killers} == {"packed": 2, "cut": 2, "recall": 2}
    assert {leaks.cells[law].asked for law in LAWS if leaks.cells[law].asked} == {2, 2 * BASE}  # a quarter
    assert [(cell.law, cell.killed_at) for cell in peeks.killers] == [("future", 6)]
    assert {peeks.cells[law].asked for law in LAWS if peeks.cells[law].asked} == {6, 8, 8 * BASE}
    drawn: list[Any] = []
    law = LAWS["strides"]
    of_law(law, peeks.domain, 0, 8, drawn.append)
    assert [run.example for run in runs["strides", "zoo/PeeksAhead"]] == drawn, "the cases are those of check"
    assert [run.example for run in runs["strides", "zoo/LeaksState"]] == drawn[:2]


@pytest.mark.usefixtures("no_work")
@pytest.mark.slow
def test_an_animal_that_crashes_under_three_laws_runs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(run: Run, times: int) -> Verdict:
        return Verdict.BROKEN if run.adapter == "zoo/Exits" else Verdict.HOLDS

    stub(monkeypatch, says)
    monkeypatch.setattr(Outcome, "lost", property(lambda outcome: outcome.verdict is Verdict.BROKEN))
    (fate,) = hunted(["Exits"], laws=["oracle", "packed", "cut", "recall", "linear", "absent"]).fates
    assert len(fate.cells) > hunt.LOST + 1
    assert len(fate.killers) == hunt.LOST
    assert fate.smallest == fate.killers[0].run, "its case is not shrunk"


@pytest.mark.usefixtures("no_work")
@pytest.mark.slow
def test_cells_say_blind_undecided_and_why_nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {"packed": Verdict.BLIND, "cut": Verdict.UNKNOWN}
    stub(monkeypatch, lambda run, times: verdicts.get(run.law, Verdict.HOLDS))
    hunting = hunted(["LeaksState", "Exits"], laws=["oracle", "packed", "cut", "linear"])
    leaks, leaves = hunting.fates
    states = {law: cell.state for law, cell in leaks.cells.items()}
    assert (states["packed"], states["cut"], states["oracle"]) == ("blind", "undecided", "alive")
    assert leaves.cells["linear"].state == "alive"
    assert leaks.verdict == "SURVIVES"
    assert "    cut: undecided: " in "\n".join(table.fate_lines(leaks))
    nobody = Hunt([], workers=1)
    assert (summary(nobody).animals, summary(nobody).median_cases) == (0, None)


@pytest.mark.usefixtures("no_work")
def test_an_interrupted_hunt_says_of_nobody_that_it_survives_whose_cases_were_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(run: Run, times: int) -> Verdict:
        if run.law == "linear" and times == 3:
            raise KeyboardInterrupt
        return Verdict.BROKEN if run.adapter == "zoo/PeeksAhead" and run.law == "packed" else Verdict.HOLDS

    stub(monkeypatch, says)
    with Hunt(chosen(["LeaksState", "PeeksAhead", "TailWithoutGate"]), laws=["packed", "linear", "recall"], workers=1) as hunting:
        with pytest.raises(KeyboardInterrupt):
            hunting.run()
        leaks, peeks, tail = hunting.fates
    assert (leaks.verdict, peeks.verdict, tail.verdict) == ("not finished", "killed", "not finished")
    lines = table.lines(hunting)
    assert not any("SURVIVES" in line for line in lines)
    assert "2 not finished: they are alive so far, and some of their cases were not run" in lines
    assert command.exit_code(hunting, []) == exits.BROKEN, "after Ctrl-C the command has code 130 all the same"
    trial = trials.Trial("mine", "ours", cases=3, tried=2, killed_at={"LeaksState": None, "PeeksAhead": 1})
    rows = "\n".join(table.rule_lines(hunting, [trial]))
    assert re.search(r"LeaksState +not finished +\?", rows)
    assert re.search(r"PeeksAhead +dead +1", rows)
    trial.tried = 3
    assert re.search(r"LeaksState +not finished +lives", "\n".join(table.rule_lines(hunting, [trial])))


@pytest.mark.usefixtures("no_work")
@pytest.mark.slow
def test_a_kill_of_right_code_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, lambda run, times: Verdict.BROKEN if run.law == "pure" else Verdict.HOLDS)
    hunting = hunted(["LeaksState", "EvenRows"], laws=["pure", "recall", "reshard"])
    assert [fate.verdict for fate in hunting.fates] == ["SURVIVES", "SURVIVES"]
    assert hunting.alarms
    assert all("law=pure adapter=zoo/Chunkwise " in alarm for alarm in hunting.alarms)
    assert hunting.fates[0].cells["pure"].state == "undecided"
    assert "right code is rejected too" in hunting.fates[0].cells["pure"].reason
    assert any(line.startswith("RIGHT CODE REJECTED  gdn-verify repeat") for line in table.lines(hunting))


# The verb


@pytest.mark.slow
def test_a_few_animals_are_killed_and_shown_as_text_json_and_page(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    names = ["LeaksState", "zoo/FirstStateForAll", "EvenRows", "Exits"]
    laws = [word for law in ("samples", "permuted", "reshard", "recall") for word in ("--law", law)]
    code, out, err = said(capfd, "zoo", *names, *laws, "--workers", "1", "--json", "table.json", "--html", "page.html")
    assert code == exits.HOLDS, err
    assert "4 animals: 4 killed, 0 alive; median " in out
    assert "kills of paths: reshard 1\n" in out
    assert re.search(r"^LeaksState +V  1 2 3 +case +\d+ +[\d.]+ s  .*samples \d", out, re.MULTILINE), out
    assert "    The state of one packed sequence flows into the next (slime 1686)." in out
    data = json.loads((tmp_path / "table.json").read_text())
    assert [animal["name"] for animal in data["animals"]] == ["LeaksState", "FirstStateForAll", "EvenRows", "Exits"]
    leaks, _, rows, dies = data["animals"]
    assert (leaks["verdict"], rows["book"], rows["killed_by"]) == ("killed", "paths", ["reshard"])
    assert {cell["law"]: cell["what"] for cell in dies["laws"]}["recall"].startswith("call: crashed: exited with code 7")
    assert data["summary"]["twins"] == [1, 2, 3, 14, 16]
    for animal in (leaks, rows):
        assert f"    {animal['smallest']}" in out
        outcome = execute(Run.parse(animal["smallest"]))
        assert outcome.verdict is Verdict.BROKEN
    assert Run.parse(leaks["smallest"]).example.case.tokens <= 4
    html = (tmp_path / "page.html").read_text()
    for animal in data["animals"]:
        assert animal["name"] in html
        assert animal["smallest"] in html
    assert html.count("<svg") == 3
    for outside in ("http", "//", "<script", "<link", "<img", "src=", "@import"):
        assert outside not in html, outside
    assert not re.search(r"url\((?!#)", html)


@pytest.mark.slow
def test_a_survivor_is_reported_loudly_and_decides_the_exit_code(capfd: pytest.CaptureFixture[str], own_file: str) -> None:
    code, out, _ = said(capfd, "zoo", f"{own_file}:Harmless", "ChangesBeta", "--law", "pure", "--workers", "1")
    assert code == exits.BROKEN
    assert "2 animals: 1 killed, 1 alive" in out
    assert "SURVIVES             8 cases of 1 laws" in out
    assert out.endswith("SURVIVES  own.py:Harmless: It is right, and called an animal.\n")


@pytest.mark.slow
def test_an_animal_that_spoils_its_process_kills_no_other(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_file: str
) -> None:
    monkeypatch.setattr(hunt, "PROFILE", Profile("quick", 1))
    code, out, _ = said(capfd, "zoo", f"{own_file}:LeavesADoorOpen", "--law", "cut", "--workers", "1")
    assert code == exits.BROKEN
    assert re.search(r'^RIGHT CODE REJECTED  gdn-verify repeat "law=cut at=\d+ adapter=zoo/Chunkwise ', out, re.MULTILINE), out


@pytest.mark.slow
def test_interrupted_it_prints_what_is_known(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stub(
        monkeypatch, lambda run, times: Verdict.BROKEN if run.law == "oracle" and "Chunkwise" not in run.adapter else Verdict.HOLDS
    )

    @contextlib.contextmanager
    def progress() -> Iterator[Callable[[str, int, int], None]]:
        def progress(what: str, done: int, of: int) -> None:
            if what != "oracle":
                raise KeyboardInterrupt

        yield progress

    monkeypatch.setattr(command, "progress", progress)
    assert cli.main(["zoo", "LeaksState", "--workers", "1", "--json", "table.json"]) == exits.INTERRUPTED
    out = capfd.readouterr().out
    assert "LeaksState" in out
    assert "oracle 1" in out
    assert out.endswith("interrupted: not every law was run on every animal\n")
    assert json.loads(pathlib.Path("table.json").read_text())["interrupted"] is True


@pytest.mark.usefixtures("no_work")
def test_a_table_that_cannot_be_written_is_no_success(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, lambda run, times: Verdict.HOLDS if "Chunkwise" in run.adapter else Verdict.BROKEN)
    code, out, err = said(capfd, "zoo", "LeaksState", "--law", "oracle", "--json", "/dev/full")
    assert (code, err) == (exits.UNDECIDED, "gdn-verify: cannot write to /dev/full: No space left on device\n")
    assert "LeaksState" in out


@pytest.mark.usefixtures("no_work")
@for_each(
    ("words", "message"),
    [
        (["Unicorn"], "unknown animal 'zoo/Unicorn': the nearest in the zoo are "),
        (["LeaksState", "--letter", "C"], "no animal has one of these names and one of these letters"),
        (["LeaksState", "--law", "gravity"], "unknown law 'gravity'; there are "),
        (["LeaksState", "--law", "reshard"], "law reshard is about none of the chosen animals"),
        (["--letter", "Z"], "argument --letter: invalid choice: 'Z'"),
        (["own.py:Nameless"], "Nameless must have a docstring that says what is wrong"),
        (["own.py:Lost"], "letter of Lost must be one of"),
        (
            ["LeaksState", "--json", "no/such/folder.json"],
            "--json must name a file that can be written, got 'no/such/folder.json': No such file",
        ),
        (["LeaksState", "--rule", "fla"], "--rule must be all, one of fla-local, fla-ci, "),
        (["LeaksState", "--rule", "none.py:Mine"], "--rule none.py:Mine: there is no file none.py"),
        (["LeaksState", "--rule", "own.py:Mine"], "--rule own.py:Mine: own.py has no Suite called Mine; it has none"),
        (["EvenRows", "--rule", "te"], "no animal has one of these names and one of these letters and can be judged by a suite"),
    ],
)
def test_bad_usage_is_one_line_before_any_work(
    capfd: pytest.CaptureFixture[str], own_file: str, words: list[str], message: str
) -> None:
    code, out, err = said(capfd, "zoo", *words)
    assert (code, out) == (exits.USAGE, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("no_work")
def test_a_page_that_cannot_be_made_here_is_said_before_any_work(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, _, err = said(capfd, "zoo", "LeaksState", "--html", "page.html")
    assert code == exits.USAGE
    assert "pip install 'gdn-verify[zoo]'" in err


def test_list_says_how_many_there_are_in_one_line_and_help_says_the_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.listed().startswith(f"zoo/NAME             {len(animals())} wrong implementations")
    code, out, _ = said(capfd, "zoo", "--help")
    words = " ".join(out.split())
    assert code == 0
    for text in ("0 every animal that was run is killed", "1 one survives", "2 bad usage", "130 interrupted"):
        assert text in words


def test_the_page_shows_survivors_alarms_and_what_did_not_run() -> None:
    animal = chosen(["LeaksState"])[0]
    hunting = Hunt([animal], ["oracle", "linear"], workers=1)
    hunting.alarms.append("law=oracle adapter=zoo/Chunkwise lengths=3")
    fate = hunting.fates[0]
    fate.cells["oracle"].asked = fate.cells["oracle"].holding = 4
    assert "Survives: " not in page.page(table.to_json(hunting)), "some of its cases were not run"
    fate.cells["oracle"].planned, fate.cells["linear"].reason = 4, "linear is not supported"
    html = page.page(table.to_json(hunting))
    assert "Survives: " in html
    assert "Right code was rejected" in html
    assert 'class="cell alive"' in html
    assert 'class="cell not-asked"' in html
    assert "<svg" not in html, "nothing was killed, there is nothing to plot"


def test_a_kill_is_shaded_the_darker_the_sooner() -> None:
    shades = [page.shade(number) for number in (1, 2, 8, 32, 128, 10_000)]
    assert shades == sorted(shades, reverse=True)
    assert (shades[0], shades[-1]) == (1.0, 0.2)
