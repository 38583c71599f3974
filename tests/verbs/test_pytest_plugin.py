"""The pytest plugin: one item a law where a suite uses it, nothing at all elsewhere."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

from tests.kernels.test_sequential import ADAPTER
from verify.engine import law_check
from verify.engine.profiles import PROFILES, Profile
from verify.gpu import device as devices

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
INSTALLED = any(entry.name == "gdn_verify" for entry in importlib.metadata.entry_points(group="pytest11"))
RIGHT = f"{ROOT}/tests/right.py:Chunkwise"
ASKS = """
import pytest
@pytest.mark.gdn_adapter({adapters})
def test_kernel(gdn_law):
    gdn_law.assert_holds()
"""
INI = """
[pytest]
addopts = --strict-markers --strict-config
filterwarnings =
    error
    ignore:Module already imported:pytest.PytestAssertRewriteWarning
"""
# For sessions in new processes. Each uses one worker, so its server need not import first what all workers share.
QUICKLY = """
from verify.process import worker
from verify.process.fork_server import importing
worker.IMPORTS = ()
with importing():
    import verify.engine.check
"""
PLUGIN = [] if INSTALLED else ["-p", "verify.cli.pytest_plugin"]


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "quick", Profile("quick", 6))


class Suite:
    """A suite of somebody else's, which uses the plugin."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester, self.folder = pytester, pytester.path
        pytester.makeini(INI)
        for name in ("HOME", "PY_COLORS", "USERPROFILE"):  # another environment, and no worker could be forked
            if name in ENVIRONMENT:
                monkeypatch.setenv(name, ENVIRONMENT[name])
            else:
                monkeypatch.delenv(name, raising=False)

    def run(self, *options: str, **files: str) -> tuple[int, str]:
        """The exit code of `pytest options` on these files, and what it says. In this process, which has imported torch."""
        if files:
            self._pytester.makepyfile(**files)
        done = self._pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN, *options)
        return int(done.ret), f"{done.stdout}\n{done.stderr}"

    def run_alone(self, *options: str, **files: str) -> tuple[int, str]:
        """The same in a process of its own."""
        self._pytester.makepyfile(**files)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, *options]
        done = subprocess.run(command, cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return Suite(pytester, monkeypatch)


@pytest.mark.slow
def test_foreign_suite_is_untouched_and_imports_nothing(suite: Suite) -> None:
    text = """
import sys
def test_light():
    heavy = {"torch", "triton", "fla", "hypothesis.strategies", "numpy", "rich", "verify.process.worker", "properties", "oracles"}
    assert "verify.cli.pytest_plugin" in sys.modules
    assert not heavy & set(sys.modules)
"""
    code, output = suite.run_alone("-p", "no:hypothesispytest", test_foreign=text)
    assert code == 0, output
    assert "1 passed" in output
    assert not (suite.folder / ".gdn-verify").exists()


def test_one_item_a_law_and_adapter(suite: Suite) -> None:
    asks = ASKS.format(adapters=f"{RIGHT!r}, 'fla/chunk'")
    code, output = suite.run("--collect-only", "-q", "--gdn-law", "pure", "--gdn-law", "cut", test_kernel=asks)
    assert code == 0, output
    items = [line for line in output.splitlines() if "::" in line]
    assert items == [f"test_kernel.py::test_kernel[{adapter}-{law}]" for adapter in (RIGHT, "fla/chunk") for law in ("pure", "cut")]
    _, output = suite.run("--collect-only", "-q", "--gdn-adapter", "fla/fused_recurrent", test_kernel=asks)
    items = [line for line in output.splitlines() if "::" in line]
    assert len(items) > 10
    assert all("[fla/fused_recurrent-" in line for line in items), "the option replaces the marks"


@pytest.mark.usefixtures("few_cases")
@pytest.mark.slow
def test_verdicts_become_passed_failed_and_skipped(suite: Suite) -> None:
    (suite.folder / "kernel.py").write_text(
        "from verify.zoo.wrong_rules import ChangesBeta\nfrom tests.right import Chunkwise\nfrom verify import Domain\n"
        "class Unpacked(Chunkwise):\n    domain = Domain(packed=False)\nclass Wrong(ChangesBeta): pass\n"
    )
    asks = ASKS.format(adapters="'kernel.py:Unpacked', 'kernel.py:Wrong'")
    code, output = suite.run(
        "-rs", "-v", "--gdn-law", "packed", "--gdn-law", "pure", "--deselect",
        "test_kernel.py::test_kernel[kernel.py:Wrong-packed]", test_kernel=asks,
    )  # fmt: skip
    assert code == 1, output
    assert "1 failed, 1 passed, 1 skipped" in output
    assert "packed: packed is not supported" in output
    assert "BROKEN   pure · kernel.py:Wrong" in output
    assert 'repeat       gdn-verify repeat "law=pure adapter=kernel.py:Wrong' in output
    assert "Traceback" not in output
    assert (suite.folder / ".gdn-verify" / "findings.jsonl").read_text().count("\n") == 2


@pytest.mark.slow
def test_undecided_law_fails(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "quick", Profile("quick", 10))
    monkeypatch.setattr(law_check, "ENOUGH", 10**6)
    monkeypatch.setattr(
        law_check, "overall", lambda counts, reason="", planned=None: (law_check.Verdict.UNKNOWN, "nothing was seen")
    )
    code, output = suite.run("--gdn-law", "pure", test_kernel=ASKS.format(adapters=repr(RIGHT)))
    assert code == 1
    assert "UNKNOWN     pure" in output
    assert "nothing was seen" in output


SAID = (
    (("--gdn-law", "orcale"), "unknown law 'orcale' (did you mean oracle?); there are oracle"),
    (("--gdn-adapter", "fla/chonk"), "unknown adapter 'fla/chonk' (did you mean fla/chunk?): `gdn-verify list` shows"),
    (("--gdn-adapter", "gone.py:Kernel"), "there is no file gone.py"),
    (("--gdn-profile", "fast"), "--gdn-profile must be one of least, few, quick, ci, gpu, soak, got 'fast'"),
    (("--gdn-seed", "-1"), "--gdn-seed must be in 0.."),
    (("--gdn-seed", "x"), "argument --gdn-seed: invalid int value: 'x'"),
    (("--bad-mark",), "gdn_adapter takes profile=least|few|quick|ci|gpu|soak and laws=names, got {'profile': 'tiny'}"),
    (("--bad-law-mark",), "unknown law 'orcale' (did you mean oracle?); there are oracle"),
    (("--no-law-mark",), "and laws=names, got {'laws': ()}"),
    (("--one-law-mark",), "and laws=names, got {'laws': 'cut'}"),
    (("--other-law-mark",), "laws of gdn_adapter must be those of fla/chunk, got 'parallel'"),
    (("--no-mark",), "test_unmarked uses gdn_law: mark it gdn_adapter(...) or pass --gdn-adapter"),
)


@pytest.mark.parametrize(("options", "want"), SAID, ids=[" ".join(options) for options, _ in SAID])
@pytest.mark.slow_after_first
def test_bad_option_is_a_usage_error_before_anything_runs(suite: Suite, options: tuple[str, ...], want: str) -> None:
    marks = {
        "--bad-mark": "profile='tiny'",
        "--bad-law-mark": "laws=('cut', 'orcale')",
        "--no-law-mark": "laws=()",
        "--one-law-mark": "laws='cut'",
        "--other-law-mark": "laws=('parallel',)",
    }
    asks = ASKS.format(adapters=f"'fla/chunk', {marks[options[0]]}" if options[0] in marks else repr(RIGHT))
    if options == ("--no-mark",):
        asks = "def test_unmarked(gdn_law):\n    gdn_law.assert_holds()\n"
    code, output = suite.run(*(word for word in options if "-mark" not in word), test_kernel=asks)
    assert code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)
    assert want in output
    assert "passed" not in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_items_run_in_two_processes(suite: Suite) -> None:
    """The session that hands out the items is in this process. Those that run them are new, and so are their workers."""
    asks = ASKS.format(adapters=f"{RIGHT!r}, 'zoo/Chunkwise'")
    options = ("-n", "2", "--gdn-profile", "least", "--gdn-law", "recall")  # a law without a backward pass, which imports more
    code, output = suite.run(*options, conftest=QUICKLY, test_kernel=asks)
    assert code == 0, output
    assert "2 passed" in output


@pytest.mark.slow
def test_a_mark_may_set_fewer_cases(suite: Suite) -> None:
    asks = ASKS.format(adapters=f"{RIGHT!r}, profile='least'").replace(
        "gdn_law.assert", "assert gdn_law.profile == 'least'; gdn_law.assert"
    )
    code, output = suite.run("-q", "--gdn-law", "pure", "--gdn-profile", "few", test_kernel=asks)
    assert code == 0, output
    more = asks.replace("profile='least')", "profile='soak')")
    code, output = suite.run("-q", "--gdn-law", "pure", "--gdn-profile", "least", test_kernel=more)
    assert code == 0, output


def test_a_mark_may_name_some_laws(suite: Suite) -> None:
    """Of these the option's, where there are both; without it see test_adapters.py."""
    asks = ASKS.format(adapters=f"{RIGHT!r}, laws=('cut', 'oracle')")
    _, output = suite.run("--collect-only", "-q", "--gdn-law", "cut", "--gdn-law", "pure", test_kernel=asks)
    assert [line.rpartition("-")[2] for line in output.splitlines() if "::" in line] == ["cut]"]


@pytest.mark.slow
def test_the_option_of_the_interpreter_reaches_the_worker(suite: Suite) -> None:
    suite.folder.joinpath("alone.py").write_text(ADAPTER)
    words = ("--gdn-device", "cpu", "--gdn-law", "oracle", "--gdn-profile", "least")
    asks = ASKS.format(adapters=repr(f"{suite.folder}/alone.py:Alone"))
    assert suite.run(*words, "--gdn-interpreter", "sequential", test_kernel=asks)[0] == 0
    code, output = suite.run(*words, test_kernel=asks)
    assert (code, "AssertionError" in output) == (1, True), output


@pytest.mark.slow
def test_a_gpu_that_is_not_there_ends_the_session_with_one_line(suite: Suite) -> None:
    if devices.gpus():
        pytest.skip("is about hosts without a GPU")
    code, output = suite.run("--gdn-device", "cuda", test_kernel=ASKS.format(adapters=repr(RIGHT)))
    assert code == 3
    assert "--gdn-device cuda needs a GPU, and torch sees none" in output
