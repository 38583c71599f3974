"""Shells complete verbs, options, and the names of laws, profiles, adapters and files."""

import pathlib
import shutil
import subprocess

import pytest

from verify.adapters.registry import BUILT_IN
from verify.cli import exits
from verify.cli.arguments import SHELLS
from verify.cli.main import main
from verify.cli.parsers import parser, verbs_of
from verify.engine.power import LAWS
from verify.engine.profiles import PROFILES

# Bash completes the last word, with the function that the script has named for the command, and prints what it would offer.
ASK = """
source "$1"; shift
function=$(complete -p gdn-verify | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
compopt() { :; }  # it is an error outside of a completion
"$function"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The script of bash."""
    place = tmp_path_factory.mktemp("completion") / "gdn-verify"
    with pytest.MonkeyPatch.context() as patch, place.open("w") as out:
        patch.setattr("sys.stdout", out)
        assert main(["completion", "bash"]) == exits.HOLDS
    return place


def completed(script: pathlib.Path, *words: str) -> set[str]:
    """What a real bash offers for the last word."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    done = subprocess.run(
        [bash, "--norc", "-c", ASK, "bash", str(script), *words],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def test_bash_completes_verbs_options_and_names(script: pathlib.Path) -> None:
    assert completed(script, "gdn-verify", "che") == {"check"}
    assert completed(script, "gdn-verify", "") == {*verbs_of(parser())}
    assert completed(script, "gdn-verify", "check", "fla/") == {name for name in BUILT_IN if name.startswith("fla/")}
    assert completed(script, "gdn-verify", "check", "--law", "") == {*LAWS}
    assert completed(script, "gdn-verify", "check", "fla/chunk", "--profile", "q") == {"quick"}
    assert completed(script, "gdn-verify", "draw", "--law", "orac") == {"oracle"}
    assert "--law" in completed(script, "gdn-verify", "check", "--l")
    assert {*PROFILES} == completed(script, "gdn-verify", "check", "--profile", "")
    assert completed(script, "gdn-verify", "completion", "") == {*SHELLS}


def test_bash_completes_files_where_an_option_or_an_adapter_is_one(script: pathlib.Path) -> None:
    for name in ("mine.py", "mine.txt"):
        (script.parent / name).touch()
    (script.parent / "minerals").mkdir()
    assert completed(script, "gdn-verify", "check", "min") == {"mine.py", "minerals"}
    assert completed(script, "gdn-verify", "check", "--json", "mine.") == {"mine.py", "mine.txt"}
    assert completed(script, "gdn-verify", "check", "--findings", "min") == {"minerals"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_with_all_names(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == exits.HOLDS
    out = capfd.readouterr().out
    assert all(name in out for name in (*BUILT_IN, *LAWS, *verbs_of(parser())))
    assert "FILE.py:CLASS" not in out, "the colon would end what zsh prints about the option"


def test_another_shell_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "bsh"])
    assert "invalid choice: 'bsh' (did you mean bash?)" in capfd.readouterr().err
