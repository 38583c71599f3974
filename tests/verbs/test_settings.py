"""Settings in pyproject.toml: they mean what the options mean, options come first, and a wrong one is one line before any work."""

import argparse
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import pytest

from tests.answering import Answering
from tests.together import for_each
from verify.adapters.registry import AdapterError
from verify.cli import check_command, exits, settings
from verify.cli.main import main
from verify.cli.parsers import parser, verbs_of
from verify.cli.verb_options import CheckOptions
from verify.engine import explaining

RIGHT, OTHER = "zoo/ChangesBeta", "zoo/DecayOneTokenEarly"  # names alone: nothing of them is run here
BASE = """
[tool.gdn-verify]
adapters = ["fla/chunk", "kernels/mine.py:Mine", "fla/chunk"]
profile = "ci"
laws = ["cut", "packed"]
known = "known.toml"
deny = "lists/deny.jsonl"
workers = 2
seed = 7
deadline = 30.5
budget = "10m"
strict-reach = true
sanitize = true
tune = 17
device = "cpu"

[tool.gdn-verify.jobs.nightly]
profile = "few"
strict-reach = false
laws = ["oracle"]

[tool.gdn-verify.jobs.'on a GPU']
adapters = ["fla/chunk_kda"]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A project: its file of settings, and a folder inside, which is the current one."""
    (tmp_path / "kernels" / "deep").mkdir(parents=True)
    (tmp_path / "kernels" / "mine.py").touch()
    (tmp_path / "pyproject.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path / "kernels" / "deep")
    return tmp_path


def parsed(*words: str) -> argparse.Namespace:
    return settings.parse(parser(), words)


def one_line(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The line with which a command is refused."""
    assert main(words) == exits.USAGE
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    return err


# What they mean


def test_settings_mean_what_the_options_mean() -> None:
    words = "--profile ci --law cut --law packed --known ../../known.toml --deny ../../lists/deny.jsonl --workers 2 --seed 7"
    more = "--deadline 30.5 --budget 10m --strict-reach --sanitize --tune 17 --device cpu"
    by_words = vars(parsed("check", "fla/chunk", "--no-settings", *words.split(), *more.split()))
    by_file = vars(parsed("check", "fla/chunk"))
    assert by_file.pop("settings") == "../../pyproject.toml"
    assert by_words.pop("settings") == ""
    assert by_words.pop("no_settings") is not by_file.pop("no_settings")
    assert by_file == by_words


def test_a_check_without_an_adapter_is_of_those_in_the_file_relative_to_its_folder() -> None:
    assert parsed("check").adapters == ["fla/chunk", "../mine.py:Mine"]
    assert parsed("draw").adapters == ["fla/chunk", "../mine.py:Mine"]
    assert parsed("check", "fla/chunk_kda").adapters == parsed("check", "--adapter", "fla/chunk_kda").adapters == ["fla/chunk_kda"]


def test_a_job_overrides_the_base_and_an_option_both() -> None:
    job = parsed("check", "--job", "nightly")
    assert (job.profile, job.strict_reach, job.law, job.seed) == ("few", False, ["oracle"], 7)
    assert job.settings == "../../pyproject.toml, job nightly"
    assert parsed("check", "--job", "on a GPU").adapters == ["fla/chunk_kda"]
    options = parsed(
        "check", "--job", "nightly", "--profile", "least", "--law", "pure", "--seed", "0", "--known", "x", "--strict-reach"
    )
    assert (options.profile, options.law, options.seed, options.known) == ("least", ["pure"], 0, ["x"])
    assert options.strict_reach
    assert parsed("check", "-x").stop


def test_draw_takes_the_options_that_it_shares_with_check() -> None:
    options = parsed("draw", "--seed", "9")
    assert (options.profile, options.law, options.seed, options.device) == ("ci", ["cut", "packed"], 9, "cpu")
    assert "workers" not in options


def test_without_a_table_nothing_changes(folder: pathlib.Path) -> None:
    plain = vars(parsed("check", "fla/chunk", "--no-settings"))
    for text in ("", "[project]\nname = 'x'\n", "[tool.other]\nprofile = 'x'\n"):
        (folder / "pyproject.toml").write_text(text)
        assert {**vars(parsed("check", "fla/chunk")), "no_settings": True} == plain
    (folder / "pyproject.toml").write_text(BASE)
    (folder / "kernels" / "pyproject.toml").write_text("")
    assert parsed("check", "fla/chunk").settings == "", "the nearest file is the project's"


def test_every_option_of_check_has_a_key_and_its_paths_are_known_as_paths() -> None:
    check = verbs_of(parser())["check"]
    keys = settings.keys_of(check)
    assert {"laws", "profile", "known", "deny", "device", "workers", "seed", "deadline", "budget", "strict-reach"} <= {*keys}
    assert {*keys} & {"adapter", "job", "no-settings", "help", "law"} == set()
    words = {name for name, action in keys.items() if action.nargs != 0 and not action.choices and action.type is None}
    assert all(keys[name].metavar in settings.PLACES for name in words), words


# What is refused


@for_each(
    ("table", "line"),
    [
        ("profil = 'ci'", "[tool.gdn-verify]: unknown key 'profil' (did you mean profile?); there are adapters, "),
        ("law = 'cut'", "[tool.gdn-verify]: unknown key 'law' (did you mean laws?); there are adapters, "),
        ("job = 'nightly'", "[tool.gdn-verify]: unknown key 'job'"),
        ("profile = 'cii'", "[tool.gdn-verify] profile = 'cii': invalid choice: 'cii' (did you mean ci?); choose from least, "),
        ("laws = ['cut', 'orcale']", "laws = ['cut', 'orcale']: unknown law 'orcale' (did you mean oracle?); there are "),
        ("laws = [['cut']]", "laws = [['cut']]: must be a text or a number"),
        ("workers = 0", "[tool.gdn-verify] workers = 0: must be a whole number in 1..256, got '0'"),
        ("workers = 2.0", "workers = 2.0: must be a whole number in 1..256, got '2.0'"),
        ("workers = true", "workers = true: must be a text or a number"),
        ("workers = [2]", "workers = [2]: must be a text or a number"),
        ("deadline = nan", "deadline = nan: must be a number of seconds over 0, got 'nan'"),
        ("seed = 2026-01-01", "must be a text or a number"),
        ("strict-reach = 'yes'", "strict-reach = 'yes': must be true or false"),
        ("adapters = 'fla/chunk'", "adapters = 'fla/chunk': must be a list of adapters, as texts"),
        ("adapters = ['fla/chonk']", "adapters: unknown adapter 'fla/chonk' (did you mean fla/chunk?)"),
        ("adapters = ['kernels/my.py:Mine']", "adapters: adapter ../my.py:Mine: there is no file ../my.py"),
        ("jobs = 3", "[tool.gdn-verify] jobs must have a table for each job, got 3"),
        ("jobs.nightly = 3", "[tool.gdn-verify] jobs must have a table for each job, got {'nightly': 3}"),
        ("jobs.x.seed = -1", "[tool.gdn-verify.jobs.x] seed = -1: must be a whole number in 0..4294967295, got '-1'"),
        (f"jobs.x.jobs = {'[' * 900}{']' * 900}", "pyproject.toml"),
        ("seed = ", "pyproject.toml is no TOML: "),
        ("\ufffe\x00", "pyproject.toml is no TOML: "),
    ],
)
def test_what_is_wrong_is_one_line_with_the_file_the_key_and_the_rule(
    table: str, line: str, folder: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "kernels" / "deep").mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f"[tool.gdn-verify]\n{table}\n")
    told = one_line(capfd, "check")
    assert line in told
    assert "/pyproject.toml" in told


def test_a_table_that_is_none_and_an_unreadable_file_are_one_line(folder: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    for data, line in ((b"[tool]\ngdn-verify = 3\n", "must be a table, got 3"), (b"\xff\xfe", "is no TOML")):
        (folder / "pyproject.toml").write_bytes(data)
        assert line in one_line(capfd, "check", "fla/chunk")


def test_a_job_that_is_not_there_is_one_line(folder: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "unknown job 'nihgtly' (did you mean nightly?); there are nightly, on a GPU" in one_line(
        capfd, "check", "--job", "nihgtly"
    )
    assert "--job must be left out with --no-settings" in one_line(capfd, "check", "fla/chunk", "--job", "x", "--no-settings")
    (folder / "pyproject.toml").unlink()
    assert "--job x needs [tool.gdn-verify] in a pyproject.toml of this folder" in one_line(capfd, "check", "--job", "x")
    assert "check needs one adapter: " in one_line(capfd, "check")
    assert "draw needs one adapter: " in one_line(capfd, "draw")
    (folder / "pyproject.toml").write_text("[tool.gdn-verify]\nseed = 1\n")
    assert "there are no jobs" in one_line(capfd, "check", "fla/chunk", "--job", "x")


# Several adapters


@pytest.fixture
def three(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A project with three adapters. The workers only say how large errors are."""
    specs = [RIGHT, OTHER, "fla/chunk"]
    table = f"[tool.gdn-verify]\nadapters = {json.dumps(specs)}\nprofile = 'few'\nlaws = ['pure', 'recall']\n"
    (folder / "pyproject.toml").write_text(table)
    monkeypatch.setattr(explaining, "SHRINK_RUNS", 0)
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering()])
    return specs


def breaking(monkeypatch: pytest.MonkeyPatch, *specs: str) -> None:
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [Answering(lambda run: 4.0 if run.adapter in specs else 0.5)])


def records(file: str) -> list[Any]:
    return [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()]


def headers(out: str, specs: Iterable[str]) -> list[str]:
    """The adapters whose header was printed, in order."""
    return [spec for line in out.splitlines() for spec in specs if line.startswith(f"{spec}  none 1.0")]


def test_several_adapters_are_checked_one_after_the_other(three: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "laws.jsonl"]) == exits.HOLDS
    out = capfd.readouterr().out
    assert headers(out, three) == three
    assert out.count("  settings     ../../pyproject.toml\n") == 3
    assert out.endswith(f"adapters       hold: {', '.join(three)}\n")
    parts = ["check", "law", "law", "end"]
    assert [record["record"] for record in records("laws.jsonl")] == 3 * parts
    assert [record["adapter"] for record in records("laws.jsonl") if record["record"] == "check"] == three
    assert main(["check", OTHER]) == exits.HOLDS
    assert headers(capfd.readouterr().out, three) == [OTHER]


def test_output_files_get_all_records_once(three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[str]] = []

    def write(options: CheckOptions, records: Any, began: float) -> bool:
        written.append([record.head.adapter for record in records])
        return len(written) > 1

    monkeypatch.setattr(check_command, "write_outputs", write)
    assert main(["check"]) == exits.UNDECIDED, "a file could not be written"
    assert main(["check"]) == exits.HOLDS
    assert written == [three, three]


def test_a_broken_adapter_is_told_and_the_others_are_checked(
    three: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    breaking(monkeypatch, RIGHT)
    assert main(["check"]) == exits.BROKEN
    assert capfd.readouterr().out.endswith(f"adapters       broken: {RIGHT}; hold: {OTHER}, fla/chunk\n")
    assert main(["check", "-x"]) == exits.BROKEN
    assert capfd.readouterr().out.endswith(f"adapters       broken: {RIGHT}; not run: {OTHER}, fla/chunk\n")


def test_an_adapter_that_cannot_be_loaded_is_told_and_the_others_are_checked(
    three: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def check(spec: str) -> None:
        if spec == OTHER:
            raise AdapterError(f"adapter {spec} needs more")

    monkeypatch.setattr(check_command, "check_installed", check)
    assert main(["check"]) == exits.USAGE
    out, err = capfd.readouterr()
    assert err == f"gdn-verify: adapter {OTHER} needs more\n"
    assert out.endswith(f"adapters       could not be checked: {OTHER}; hold: {RIGHT}, fla/chunk\n")
    breaking(monkeypatch, "fla/chunk")
    assert main(["check"]) == exits.BROKEN
    assert main(["check", OTHER]) == exits.USAGE


def test_after_an_interruption_the_rest_is_not_run(
    three: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check_command, "_run", interrupt)
    assert main(["check"]) == exits.INTERRUPTED
    assert capfd.readouterr().out.endswith(f"adapters       interrupted: {RIGHT}; not run: {OTHER}, fla/chunk\n")
    monkeypatch.setattr(check_command, "workers_of", interrupt)
    assert main(["check"]) == exits.INTERRUPTED


def test_the_time_is_shared_and_a_sweep_is_of_one_adapter(
    three: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    until: list[float] = []
    plain = check_command.Settings

    def noted(*values: Any, **fields: Any) -> Any:
        until.append(fields["until"])
        return plain(*values, **fields)

    monkeypatch.setattr(check_command, "Settings", noted)
    monkeypatch.setattr(check_command, "_run", lambda *_: None)
    main(["check", "--budget", "30m"])
    first, second, third = (later - until[0] for later in until)
    assert (first, round(second / 60), round(third / 60)) == (0, 5, 20), "what the first adapters left is for the others"
    capfd.readouterr()
    assert "--tune sweep is for one adapter: name one of " in one_line(capfd, "check", "--tune", "sweep")
