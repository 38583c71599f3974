"""A command line is read without torch, and modules of others that have our packages' names are one line."""

import json
import os
import pathlib
import resource
import subprocess
import sys
import types
from typing import Any

import pytest

import gdn_verify
from tests.together import for_each
from verify.cli import exits
from verify.cli.main import main
from verify.cli.pytest_plugin import pytest_generate_tests
from verify.process import worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU_S = 0.6  # it takes 0.2 s on an idle core of an AMD EPYC, and torch alone takes 1.5 s
WORDS = {
    "--help": 0,
    "--version": 0,
    **{
        f"{verb} --help": 0
        for verb in (
            "list",
            "check",
            "soak",
            "repeat",
            "known",
            "launches",
            "arithmetic",
            "across",
            "bisect",
            "compare",
            "twin",
            "export",
            "judge",
            "zoo",
            "claims",
            "fetch",
            "certificate",
        )
    },
    "completion bash": 0,
    "": exits.USAGE,
    "chekc fla/chunk": exits.USAGE,
    "check": exits.USAGE,
    "check fla/chonk --tune 3": exits.USAGE,
    "check kernel.py": exits.USAGE,
    "check zoo/LeaksStat": exits.USAGE,
    "check fla/chunk --law orcale": exits.USAGE,
    "check fla/chunk --lwa oracle": exits.USAGE,
    "check fla/chunk --profile qick": exits.USAGE,
    "check fla/chunk --path nowhere": exits.USAGE,
    "soak fla/chunk fla/chonk": exits.USAGE,
    "repeat law=orcale adapter=fla/chunk lengths=1": exits.USAGE,
    "repeat law=oracle adapter=fla/chonk lengths=1": exits.USAGE,
    "launches law=oracle adapter=fla/chonk lengths=1": exits.USAGE,
    "across law=oracle adapter=fla/chunk lengths=1": exits.USAGE,
    "across fla/chonk --path .": exits.USAGE,
    "bisect law=oracle adapter=fla/chonk lengths=1 --good 1 --bad 2": exits.USAGE,
    "compare fla/chonk --path . --path .": exits.USAGE,
    "twin fla/chunk fla/chonk": exits.USAGE,
    "zoo LeaksStat": exits.USAGE,
    "fetch sglnag": exits.USAGE,
    "certificate nowhere.json": exits.USAGE,
    "completion bsh": exits.USAGE,
}
PROGRAM = """
import json, sys, time
import gdn_verify
codes = []
for words in json.load(sys.stdin):
    sys.argv[1:] = words.split()
    try:
        codes.append(gdn_verify.main())
    except SystemExit as left:
        codes.append(left.code)
from verify.process import prestart
heavy = [name for name in ("torch", "triton", "hypothesis", "numpy", "rich", "fla") if name in sys.modules]
print(json.dumps({"codes": codes, "heavy": heavy, "workers": len(prestart._begun)}))
"""


def python(
    *words: str, folder: pathlib.Path, before: pathlib.Path | None = None, **settings: Any
) -> "subprocess.CompletedProcess[str]":
    """A new interpreter, as a console script starts one. `before` is a folder in which it looks for modules first."""
    path = os.pathsep.join(str(place) for place in (before, ROOT) if place is not None)
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-P", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, **settings
    )


def test_help_and_typos_of_every_verb_import_nothing_heavy_and_start_no_worker(tmp_path: pathlib.Path) -> None:
    done = python("-c", PROGRAM, folder=tmp_path, input=json.dumps([*WORDS]))
    assert json.loads(done.stdout.splitlines()[-1]) == {"codes": [*WORDS.values()], "heavy": [], "workers": 0}, done.stderr
    assert "gdn-verify 0.1.0\n" in done.stdout
    assert done.stderr.count("\n") == sum(code == exits.USAGE for code in WORDS.values())
    planted = python("-c", "import rich\n" + PROGRAM, folder=tmp_path, input="[]")
    assert json.loads(planted.stdout)["heavy"] == ["rich"]


def test_the_command_and_our_packages_come_from_one_folder() -> None:
    """In an installation from a checkout too: a copy of the command in another folder would refuse our packages as another's."""
    command = pathlib.Path(sys.executable).with_name("gdn-verify")
    words = [command] if command.exists() else [sys.executable, "-m", "gdn_verify"]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, cwd=command.anchor)
    assert pathlib.Path(gdn_verify.__file__).parent == ROOT and (done.returncode, done.stderr) == (0, ""), done


@pytest.mark.parametrize("start", [("-m", "verify"), ("-c", "import sys; from gdn_verify import main; sys.exit(main())")])
def test_help_takes_little_time(start: tuple[str, str], tmp_path: pathlib.Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(*start, "--help", folder=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.startswith("usage: gdn-verify ")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_S


@for_each("name", gdn_verify.PACKAGES)
def test_a_module_with_the_name_of_a_package_of_ours_is_one_line(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('it was run')\n")
    line = f"gdn-verify: {tmp_path / name}.py is found in place of gdn-verify's package {name}: rename it, or move it\n"
    starts = [("-c", "import sys; from gdn_verify import main; sys.exit(main())")]
    if name != "verify":
        starts.append(("-m", "verify"))
    for start in starts:
        done = python(*start, "list", folder=tmp_path, before=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (exits.USAGE, "", line)


def test_so_is_one_that_workers_would_find(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: worker.Worker) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker.Worker, "launch", refuse)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "scripts"), *sys.path])  # as of a console script
    (tmp_path / "oracles").mkdir()
    (tmp_path / "oracles" / "__init__.py").touch()
    assert main(["check", "fla/chunk", "--path", str(tmp_path)]) == exits.USAGE
    assert capfd.readouterr().err.startswith(f"gdn-verify: {tmp_path}/oracles/__init__.py is found in place of ")


def test_the_plugin_refuses_only_what_needs_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks, other = (types.SimpleNamespace(fixturenames=[name]) for name in ("gdn_law", "tmp_path"))
    assert gdn_verify.plugin.pytest_generate_tests is pytest_generate_tests
    (tmp_path / "verify.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    refusing = gdn_verify.plugin
    refusing.pytest_load_initial_conftests(["-x", "tests"])
    refusing.pytest_generate_tests(other)
    pytest_generate_tests(other)  # type: ignore[arg-type]
    for refuse in (
        lambda: refusing.pytest_load_initial_conftests(["--gdn-profile", "few"]),
        lambda: refusing.pytest_generate_tests(asks),
        lambda: pytest_generate_tests(asks),
    ):
        with pytest.raises(pytest.UsageError, match=rf"{tmp_path}/verify.py is found in place of gdn-verify's package verify"):
            refuse()


@for_each(("closed", "code", "says"), [(">&-", 3, "gdn-verify: stdout is closed, so no result can be printed; "), ("2>&-", 0, "")])
def test_a_closed_stream_is_one_line_or_nothing(closed: str, code: int, says: str, tmp_path: pathlib.Path) -> None:
    line = "law=oracle adapter=zoo/Chunkwise lengths=1"
    program = "import gdn_verify, sys; sys.argv[1:] = ['repeat', sys.argv[1]]; sys.exit(gdn_verify.main())"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, program, line],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.startswith(says), done.stderr.count("\n")) == (code, True, bool(says))
    assert done.stdout.startswith("HOLDS") is (code == 0)
