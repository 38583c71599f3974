"""The verbs `across` and `bisect`: lines on releases, folders, revisions and interpreters, and who changed a verdict."""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import zipfile
from typing import Any

import pytest

from tests.commands import Command
from tests.in_process import said
from verify.adapters.libraries import Library
from verify.cli import fetch_command, places
from verify.cli.exits import BROKEN, HOLDS, INTERRUPTED, UNDECIDED, USAGE
from verify.engine.across import BROKEN as IS_BROKEN
from verify.engine.across import HOLDS as DOES_HOLD
from verify.engine.across import NOT, SiteVerdict, cell_of, first_change
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

RIGHT = "def gate(x, A, bias):\n    return -A.exp() * torch.nn.functional.softplus(x + bias)\n"
WRONG = "def gate(x, A, bias):\n    return -A.exp() * torch.nn.functional.softplus(x + 0 * bias)\n"
OTHER = "def decay(x, A, bias):\n    return x\n"  # the adapter does not know this name
ADAPTER = """
from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from verify.adapters.base import Adapter

class Gate(Adapter):
    algorithm = "pointwise"
    domain = ModuleDomain("gdn_gate", beta=False, backward=False, dtypes=("fp32",))

    def __init__(self):
        from orchard import gate

        self.gate = gate

    def run(self, x: Inputs):
        return self.gate(x.a, x.A_log, 0.0 if x.dt_bias is None else x.dt_bias)
"""
WORDS = ("law=oracle", "adapter=kernel.py:Gate", "lengths=3", "op=gdn_gate", "beta=no", "backward=no")
LINE = " ".join(WORDS)
RELEASE = (("orchard-dist", "1.0"),)


@pytest.fixture(autouse=True)
def _here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has an adapter. The environment stays, since workers with another one would start more slowly."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pathlib.Path("kernel.py").write_text(ADAPTER)


@pytest.fixture
def links(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder from which pip reads wheels, and from nowhere else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "links"


def package(folder: pathlib.Path, text: str) -> pathlib.Path:
    """A folder with a version of the package under test."""
    (folder / "orchard").mkdir(parents=True, exist_ok=True)
    (folder / "orchard" / "__init__.py").write_text(f"import torch\n\n{text}")
    return folder


@pytest.fixture
def wheels(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Releases 1.0 (right), 1.1 (right), 1.2 (not to be asked), 1.3 and 1.10 (wrong), as an index would have them. Downloads."""
    loads: list[str] = []

    def download(library: Library, folder: pathlib.Path) -> pathlib.Path:
        loads.append(library.version)
        texts = {"1.0": RIGHT, "1.1": RIGHT, "1.2": OTHER, "1.3": WRONG, "1.10": WRONG}
        folder.mkdir()
        name = f"{library.name.replace('-', '_')}-{library.version}"
        path = folder / f"{name}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("orchard/__init__.py", f"import torch\n\n{texts[library.version]}")
            archive.writestr(f"{name}.dist-info/METADATA", f"Name: {library.name}\nVersion: {library.version}\n")
        return path

    monkeypatch.setattr(fetch_command, "download", download)
    return loads


def answered(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code, out, err = said(capfd, *words, "--json")
    assert out, err
    return code, json.loads(out)


# What a verdict says


def test_a_cell_has_the_worst_output_of_a_line_that_holds_and_all_broken_outputs_of_one_that_does_not() -> None:
    assert cell_of(Outcome(Verdict.HOLDS, ratios={"o": 0.25, "dq": 0.5})).short == "holds 0.5 dq"
    assert cell_of(Outcome(Verdict.HOLDS)).short == "holds"
    off = [Finding(name, FailureKind.OFF, "is off", error=error, allowed=1.0) for name, error in (("dq", 3.0), ("dg", 12.0))]
    broken = cell_of(Outcome(Verdict.BROKEN, off))
    assert (broken.short, broken.reason, broken.ratio) == ("BROKEN dq,dg 12x", "dq: is off", 12.0)
    assert cell_of(Outcome(Verdict.BROKEN, [Finding("call", FailureKind.RAISED, "raised ValueError")])).short == "BROKEN call"
    for verdict in (Verdict.BLIND, Verdict.UNSUPPORTED, Verdict.UNKNOWN):
        assert cell_of(Outcome(verdict)) == SiteVerdict(NOT, reason=f"the case is {verdict}")


def test_a_search_finds_every_change_in_few_steps_and_goes_around_what_cannot_be_asked() -> None:
    for count in range(2, 20):
        for change in range(1, count):
            for hole in (None, *range(1, count - 1)):
                asked = list[int]()

                def cell(version: int, change: int = change, hole: int | None = hole, asked: list[int] = asked) -> SiteVerdict:
                    asked.append(version)
                    return SiteVerdict(NOT if version == hole else IS_BROKEN if version >= change else DOES_HOLD)

                found = first_change(count, cell)
                beside = hole is not None and hole in (change - 1, change)
                assert found.before == (change - 2 if hole == change - 1 else change - 1)
                assert found.after == (change + 1 if hole == change else change)
                assert found.unknown == ((hole,) if beside else ())
                assert len(asked) <= 4 + count.bit_length()


# across


def test_a_release_a_folder_and_a_folder_that_lacks_the_package_stand_in_one_table(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, wheels: list[str]
) -> None:
    package(tmp_path / "new", WRONG)
    for name in ("empty", "verify"):
        (tmp_path / name).mkdir()
    (tmp_path / "verify" / "__init__.py").touch()
    where = ("--release", "orchard-dist==1.0", "--path", str(tmp_path / "new"), "--path", "../empty", "--path", "..")
    code, out, err = said(capfd, "across", *WORDS, *where)
    assert (code, out, err.count("\n")) == (USAGE, "", 1)
    assert "orchard-dist 1.0 must be downloaded with pip into .gdn-verify/libraries: allow it with --yes" in err
    code, out, _ = said(capfd, "across", LINE, *where, "--yes")
    assert code == BROKEN
    assert out.startswith(f"1   {LINE}\n")
    assert re.search(
        r"^line +orchard-dist 1.0 +/.*/new +\.\./empty +\.\.\n1 +holds 0\.\d+ g +BROKEN g .*x +- +-$", out, re.MULTILINE
    )
    assert re.search(r"^orchard-dist 1.0: torch \S+$", out, re.MULTILINE)
    assert "  broken: line 1: g: is off by more than rounding explains\n" in out
    assert "  cannot be asked here: line 1: adapter kernel.py:Gate: Gate() failed: ModuleNotFoundError" in out
    assert f"  cannot be asked here: line 1: {tmp_path} has a package verify, which gdn-verify has too\n" in out
    code, told = answered(capfd, "across", LINE, LINE.replace("lengths=3", "lengths=4"), *where)  # it is there by now
    assert (code, wheels, [*told]) == (BROKEN, ["1.0"], ["lines", "places", "cells"])
    assert [place["option"] for place in told["places"]] == [f"{a} {b}" for a, b in zip(where[::2], where[1::2], strict=True)]
    assert [[cell["verdict"] for cell in row] for row in told["cells"]] == [[DOES_HOLD, IS_BROKEN, NOT, NOT]] * 2
    assert [(0 < cell["ratio"] < 1, cell["outputs"]) for cell in told["cells"][0][:2]] == [(True, ["g"]), (False, ["g"])]


def test_an_adapter_is_asked_with_cases_that_it_draws_and_a_package_that_was_found_elsewhere_is_told(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    where = ("--path", str(package(tmp_path / "one", RIGHT)), "--path", str(package(tmp_path / "two", RIGHT)))
    code, told = answered(capfd, "across", "kernel.py:Gate", *where, "--law", "oracle", "--profile", "least")
    assert len(told["lines"]) >= 2  # those that say nothing in any place are left out
    assert all(line.startswith("law=oracle adapter=kernel.py:Gate ") for line in told["lines"])
    assert (code, {cell["verdict"] for row in told["cells"] for cell in row}) == (HOLDS, {DOES_HOLD})
    code, out, err = said(capfd, "across", "kernel.py:Gate", *where, "--law", "cut")
    assert (code, out) == (USAGE, ""), "no line is not a matrix that holds"
    assert "--law must name a law with cases of kernel.py:Gate, got cut" in err
    package(pathlib.Path(), WRONG)  # beside the adapter's file, whose folder comes first
    code, out, _ = said(capfd, "across", LINE, *where)
    assert code == UNDECIDED
    assert f"{pathlib.Path('orchard', '__init__.py').resolve()} was imported, and not that of {tmp_path / 'one'}" in out


def test_another_interpreter_runs_our_sources_with_its_packages(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    package(pathlib.Path(), RIGHT)
    for name, text in (("good", f'#!/bin/sh\nexec {sys.executable} "$@"\n'), ("bad", "#!/bin/sh\necho no torch >&2\nexit 3\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    where = ("--python", str(tmp_path / "good"), "--python", str(tmp_path / "bad"))
    code, told = answered(capfd, "across", LINE, *where, "--deadline", "60")
    good, bad = told["cells"][0]
    assert (code, good["verdict"], bad["verdict"]) == (UNDECIDED, DOES_HOLD, NOT)
    assert "exited with code 3" in bad["reason"]
    assert "no torch" in bad["reason"]


BAD_USAGE = {
    (): "across needs a place: --release PACKAGE==VERSION, --path DIR, --rev REVISION or --python EXE",
    ("--release", "orchard"): "must be PACKAGE==VERSION, such as fla-core==0.5.2",
    ("--release", "orchard==new"): "must be PACKAGE==VERSION",
    ("--release=-r==1.0",): "must be PACKAGE==VERSION",
    ("--path", "nowhere"): "--path must name a folder, got 'nowhere'",
    ("--python", "nowhere"): "--python must name an interpreter, got 'nowhere'",
    ("--rev", "HEAD"): "--rev: git rev-parse in ",
}


def test_what_is_no_place_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for words, line in BAD_USAGE.items():
        code, out, err = said(capfd, "across", LINE, *words)
        assert (code, out, err.count("\n")) == (USAGE, "", 1), words
        assert line in err, words


@pytest.mark.usefixtures("links")
def test_an_unknown_release_cannot_be_asked(capfd: pytest.CaptureFixture[str]) -> None:
    code, told = answered(capfd, "across", LINE, "--release", "orchard-dist==9.9", "--yes")
    (unknown,) = told["cells"][0]
    assert (code, unknown["verdict"]) == (UNDECIDED, NOT)
    assert unknown["reason"].startswith("pip could not download orchard-dist==9.9: ")
    assert "\n" not in unknown["reason"]


def test_a_wheel_that_is_no_zip_cannot_be_asked(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def download(_: Library, folder: pathlib.Path) -> pathlib.Path:
        folder.mkdir()
        (folder / "orchard.whl").write_text("no zip")
        return folder / "orchard.whl"

    monkeypatch.setattr(fetch_command, "download", download)
    code, out, _ = said(capfd, "across", LINE, "--release", "orchard-dist==1.0", "--yes")
    assert code == UNDECIDED
    assert "  cannot be asked here: line 1: orchard.whl cannot be unpacked: File is not a zip file\n" in out


def test_a_download_needs_a_yes_at_the_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "is_terminal", lambda _: True)
    for answer, allowed in (("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("", False)):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        with contextlib.nullcontext() if allowed else pytest.raises(ValueError, match="may not be downloaded"):
            places.allow([RELEASE, RELEASE], yes=False)
        assert (
            capfd.readouterr().err == "download orchard-dist 1.0 with pip, without dependencies, into .gdn-verify/libraries? [y/N] "
        )


def test_wheels_that_share_a_package_are_one_folder_while_they_are_needed(wheels: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        place = places.release_place((*RELEASE, ("orchard-more", "1.1")), stack)
        (folder,) = map(pathlib.Path, place.folders)
        assert (place.name, place.option) == (
            "orchard-dist 1.0 + orchard-more 1.1",
            "--release orchard-dist==1.0,orchard-more==1.1",
        )
        assert {path.name for path in folder.iterdir()} >= {"orchard", "orchard_dist-1.0.dist-info", "orchard_more-1.1.dist-info"}
    assert not folder.exists()
    assert wheels == ["1.0", "1.1"]


# Revisions


@pytest.fixture
def git() -> Any:
    """A repository in the working directory, with the adapter since its third commit and a wrong kernel in the fourth and fifth."""

    def call(*words: str) -> str:
        identity = ("-c", "user.name=A. Pple", "-c", "user.email=apple@example.com", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout.strip()

    call("init", "--quiet", "--initial-branch=main")
    pathlib.Path(".gitignore").write_text("kernel.py\n.gdn-verify\n__pycache__\n")
    for number, text in enumerate((RIGHT, RIGHT, RIGHT, WRONG, WRONG, RIGHT), 1):
        package(pathlib.Path(), f"# {number}\n{text}")
        if number == 3:
            pathlib.Path(".gitignore").write_text(".gdn-verify\n__pycache__\n")
        call("add", ".")
        call("commit", "--quiet", "-m", f"commit {number}")
    return call


def test_revisions_are_worktrees_that_are_removed_and_uncommitted_changes_are_told(
    capfd: pytest.CaptureFixture[str], git: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    hook = pathlib.Path(".git/hooks/post-checkout")
    hook.write_text("#!/bin/sh\necho it runs >&2\nexit 1\n")
    hook.chmod(0o755)
    package(pathlib.Path(), WRONG)
    code, out, err = said(capfd, "across", LINE, "--rev", "main", "--rev", "HEAD~1", "--rev", "HEAD~5", "--json")
    assert (code, [cell["verdict"] for cell in json.loads(out)["cells"][0]]) == (BROKEN, [DOES_HOLD, IS_BROKEN, DOES_HOLD])
    assert f"{pathlib.Path.cwd()} has changes that are not committed: no revision has them" in err
    assert len(git("worktree", "list").splitlines()) == 1
    assert [*temporary.iterdir()] == []
    code, out, err = said(capfd, "across", LINE, "--rev", "nowhere")
    assert (code, out) == (USAGE, "")
    assert err.splitlines()[-1].endswith("has no revision 'nowhere'")


def test_a_bisection_names_the_commit_that_broke_or_mended_a_line(capfd: pytest.CaptureFixture[str], git: Any) -> None:
    code, out, _ = said(capfd, "bisect", LINE, "--good", "HEAD~5", "--bad", "HEAD~1", "--rev")
    commits = git("log", "--reverse", "--format=%h").split()
    assert code == HOLDS
    assert out.splitlines()[-1].startswith(
        f"brought by {commits[3]} commit 4; with {commits[2]} commit 3, the one before, the line holds"
    )
    assert all(f'gdn-verify across "{LINE}" --rev ' in line for line in out.splitlines()[:-1])
    code, told = answered(capfd, "bisect", LINE, "--good", "HEAD", "--bad", "HEAD~2", "--rev")
    assert (code, told["change"], told["found"]["after"]) == (HOLDS, "mended", git("rev-parse", "HEAD"))
    assert len(git("worktree", "list").splitlines()) == 1
    git("checkout", "--quiet", "-b", "aside", "HEAD~3")
    git("commit", "--quiet", "--allow-empty", "-m", "aside")
    code, out, err = said(capfd, "bisect", LINE, "--good", "aside", "--bad", "main", "--rev")
    assert (code, out) == (USAGE, "")
    assert "comes before the other" in err


def test_ctrl_c_ends_the_run_and_removes_the_worktrees(git: Any, tmp_path: pathlib.Path) -> None:
    pathlib.Path("slow.py").write_text(ADAPTER.replace("return self", "__import__('time').sleep(600)\n        return self"))
    began = tmp_path / "here" / ".gdn-verify"
    words = ("across", LINE.replace("kernel.py", "slow.py"), "--rev", "HEAD", "--rev", "HEAD~1")
    with Command(words, pathlib.Path.cwd()) as command:
        until = time.monotonic() + 60
        while not any("slow.py" in path.read_text() for path in began.glob("under-way-*")) and time.monotonic() < until:
            time.sleep(0.05)
        trees = [pathlib.Path(line.split()[0]) for line in git("worktree", "list").splitlines()]
        assert len(trees) == 3
        assert all(tree.exists() for tree in trees)
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(60)
    assert command.returncode == INTERRUPTED
    assert err.splitlines()[-1] == "gdn-verify: interrupted"
    assert len(git("worktree", "list").splitlines()) == 1
    assert [tree.parent.exists() for tree in trees] == [True, False, False]


# Releases


def test_a_bisection_names_the_release_that_broke_or_mended_a_line(capfd: pytest.CaptureFixture[str], wheels: list[str]) -> None:
    bisect = functools.partial(said, capfd, "bisect", LINE, "--package", "orchard-dist", "--yes", "--releases")
    code, out, _ = bisect("1.0,1.10,1.3", "--good", "1.0", "--bad", "1.10")
    assert (code, wheels) == (HOLDS, ["1.0", "1.10", "1.3"])
    *steps, last = out.splitlines()
    assert last == "brought by orchard-dist 1.3; with orchard-dist 1.0, the one before, the line holds"
    assert [step.partition("gdn-verify ")[2] for step in steps] == [
        f'across "{LINE}" --release orchard-dist=={version}' for version in ("1.0", "1.10", "1.3")
    ]
    code, out, _ = bisect("1.0,1.1,1.2,1.3", "--good", "1.0", "--bad", "1.3")
    assert code == UNDECIDED
    assert out.splitlines()[-1] == (
        "brought by orchard-dist 1.3, or one of those that cannot be asked: orchard-dist 1.2; with orchard-dist 1.1 the line holds"
    )
    for good, bad, expected in (("1.0", "1.1", BROKEN), ("1.0", "1.2", UNDECIDED)):
        code, out, err = bisect("1.0,1.1,1.2,1.3", "--good", good, "--bad", bad)
        assert code == expected, (good, bad)
        why = "there is nothing to find: the line must hold with --good and be broken with --bad"
        assert (why if expected == BROKEN else "the line cannot be asked with --good or with --bad") in err
    code, out, err = bisect("1.0,1.1", "--good", "1.0", "--bad", "1.3")
    assert (code, out, err.count("\n")) == (USAGE, "", 1)
    assert "--bad must be a release of orchard-dist: 1.0, 1.1; got 1.3" in err


@pytest.mark.usefixtures("links")
def test_releases_that_cannot_be_listed_and_packages_that_nobody_named_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capfd, "bisect", LINE, "--package", "orchard-dist", "--good", "1.0", "--bad", "1.1")
    assert (code, out, err.count("\n")) == (UNDECIDED, "", 1)
    assert "pip cannot list the releases of orchard-dist, name some with --releases: " in err
    code, out, err = said(capfd, "bisect", LINE, "--good", "1.0", "--bad", "1.1")
    assert (code, out, err.count("\n")) == (USAGE, "", 1)
    assert "--package must name the package of kernel.py:Gate" in err
