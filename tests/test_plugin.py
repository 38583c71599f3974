"""The pytest plugin: one item a law where it is asked for, nothing at all where it is not."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import pytest

from verify import device as devices

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
INSTALLED = any(entry.name == "gdn_verify" for entry in importlib.metadata.entry_points(group="pytest11"))
RIGHT = f"{ROOT}/tests/right.py:Chunkwise"
ASKS = """
import pytest

from verify import device as devices
@pytest.mark.gdn_adapter({adapters})
def test_kernel(gdn_law):
    gdn_law.assert_holds()
"""
FEW = """
import dataclasses
def pytest_configure(config):
    from verify.check import PROFILES, Profile
    PROFILES["quick"] = Profile("quick", 6)
"""


def suite(folder: pathlib.Path, *options: str, **files: str) -> "subprocess.CompletedProcess[str]":
    """pytest in a folder of its own, with the plugin, warnings as errors and unknown markers refused."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\nfilterwarnings = error\n")
    plugin = [] if INSTALLED else ["-p", "verify.pytest_plugin"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *options],
        cwd=folder, env=ENVIRONMENT,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_foreign_suite_is_untouched_and_imports_nothing(tmp_path: pathlib.Path) -> None:
    text = """
import sys
def test_light():
    heavy = {"torch", "triton", "fla", "hypothesis.strategies", "numpy", "rich", "verify.worker", "properties", "oracles"}
    assert "verify.pytest_plugin" in sys.modules
    assert not heavy & set(sys.modules)
"""
    done = suite(tmp_path, "-p", "no:hypothesispytest", test_foreign=text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert not (tmp_path / ".gdn-verify").exists()


def test_one_item_a_law_and_adapter(tmp_path: pathlib.Path) -> None:
    asks = ASKS.format(adapters=f"{RIGHT!r}, 'fla/chunk'")
    done = suite(tmp_path, "--collect-only", "-q", "--gdn-law", "pure", "--gdn-law", "cut", test_kernel=asks)
    assert done.returncode == 0, done.stdout + done.stderr
    items = [line for line in done.stdout.splitlines() if "::" in line]
    assert items == [f"test_kernel.py::test_kernel[{adapter}-{law}]" for adapter in (RIGHT, "fla/chunk") for law in ("pure", "cut")]
    done = suite(tmp_path, "--collect-only", "-q", "--gdn-adapter", "fla/fused_recurrent", test_kernel=asks)
    items = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(items) > 10
    assert all("[fla/fused_recurrent-" in line for line in items), "the option replaces the marks"


def test_verdicts_become_passed_failed_and_skipped(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernel.py").write_text(
        "from verify.zoo.rules import ChangesBeta\nfrom tests.right import Chunkwise\nfrom verify import Domain\n"
        "class Unpacked(Chunkwise):\n    domain = Domain(packed=False)\nclass Wrong(ChangesBeta): pass\n"
    )
    asks = ASKS.format(adapters="'kernel.py:Unpacked', 'kernel.py:Wrong'")
    done = suite(
        tmp_path, "-rs", "-v", "--gdn-law", "packed", "--gdn-law", "pure", "--deselect",
        "test_kernel.py::test_kernel[kernel.py:Wrong-packed]", conftest=FEW, test_kernel=asks,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 1 skipped" in done.stdout
    assert "packed: packed is not supported" in done.stdout
    assert "BROKEN   pure · kernel.py:Wrong" in done.stdout
    assert 'repeat       python -m verify repeat "law=pure adapter=kernel.py:Wrong' in done.stdout
    assert "Traceback" not in done.stdout
    assert (tmp_path / ".gdn-verify" / "findings.jsonl").read_text().count("\n") == 2


def test_undecided_law_fails(tmp_path: pathlib.Path) -> None:
    conftest = FEW + "    from verify import check\n    check.ENOUGH = 10**6\n    PROFILES['quick'] = Profile('quick', 10)\n"
    conftest += "    check.overall = lambda counts, reason='': (check.Verdict.UNKNOWN, 'nothing was seen')\n"
    done = suite(tmp_path, "--gdn-law", "pure", conftest=conftest, test_kernel=ASKS.format(adapters=repr(RIGHT)))
    assert done.returncode == 1
    assert "UNKNOWN     pure" in done.stdout
    assert "nothing was seen" in done.stdout


SAID = (
    (("--gdn-law", "orcale"), "unknown law 'orcale'; there are oracle"),
    (("--gdn-adapter", "fla/chonk"), "unknown adapter 'fla/chonk'; there are fla/chunk"),
    (("--gdn-adapter", "gone.py:Kernel"), "there is no file gone.py"),
    (("--gdn-profile", "fast"), "--gdn-profile must be one of least, few, quick, ci, gpu, soak, got 'fast'"),
    (("--gdn-seed", "-1"), "--gdn-seed must be in 0.."),
    (("--gdn-seed", "x"), "argument --gdn-seed: invalid int value: 'x'"),
    (("--bad-mark",), "gdn_adapter takes profile=least|few|quick|ci|gpu|soak and laws=names, got {'profile': 'tiny'}"),
    (("--bad-law-mark",), "unknown law 'orcale'; there are oracle"),
    (("--no-law-mark",), "and laws=names, got {'laws': ()}"),
    (("--one-law-mark",), "and laws=names, got {'laws': 'cut'}"),
    (("--other-law-mark",), "laws of gdn_adapter must be those of fla/chunk, got 'parallel'"),
    (("--no-mark",), "test_unmarked asks for gdn_law: mark it gdn_adapter(...) or give --gdn-adapter"),
)
EACH = """
import contextlib, io, json, pytest
for options in json.loads(OPTIONS):
    said = io.StringIO()
    file = options[0].strip("-").replace("-", "_") + ".py" if "-mark" in options[0] else "test_kernel.py"
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([file, "-p", "no:cacheprovider", *(word for word in options if "-mark" not in word)])
    print(json.dumps([int(code), said.getvalue()]))
"""


def test_bad_option_is_a_usage_error_before_anything_runs(tmp_path: pathlib.Path) -> None:
    """One process asks for them all: each would import torch again."""
    (tmp_path / "no_mark.py").write_text("def test_unmarked(gdn_law):\n    gdn_law.assert_holds()\n")
    (tmp_path / "test_kernel.py").write_text(ASKS.format(adapters=repr(RIGHT)))
    for name, said in {
        "bad_mark": "profile='tiny'",
        "bad_law_mark": "laws=('cut', 'orcale')",
        "no_law_mark": "laws=()",
        "one_law_mark": "laws='cut'",
        "other_law_mark": "laws=('parallel',)",
    }.items():
        (tmp_path / f"{name}.py").write_text(ASKS.format(adapters=f"'fla/chunk', {said}"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n" + ("" if INSTALLED else "addopts = -p verify.pytest_plugin\n"))
    program = EACH.replace("OPTIONS", repr(json.dumps([options for options, _ in SAID])))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (code, text), (options, said) in zip(answers, SAID, strict=True):
        assert code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED), options
        assert said in text
        assert "passed" not in text
        assert "Traceback" not in text


def test_items_run_in_two_processes(tmp_path: pathlib.Path) -> None:
    options = ("-n", "2", "--gdn-law", "pure", "--gdn-law", "recall")
    done = suite(tmp_path, *options, conftest=FEW, test_kernel=ASKS.format(adapters=repr(RIGHT)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_mark_may_ask_for_fewer_cases(tmp_path: pathlib.Path) -> None:
    asks = ASKS.format(adapters=f"{RIGHT!r}, profile='least'").replace(
        "gdn_law.assert", "assert gdn_law.profile == 'least'; gdn_law.assert"
    )
    done = suite(tmp_path, "-q", "--gdn-law", "pure", "--gdn-profile", "few", test_kernel=asks)
    assert done.returncode == 0, done.stdout
    more = suite(
        tmp_path,
        "-q",
        "--gdn-law",
        "pure",
        "--gdn-profile",
        "least",
        test_kernel=asks.replace("profile='least')", "profile='soak')"),
    )
    assert more.returncode == 0, more.stdout


def test_a_mark_may_ask_for_some_laws(tmp_path: pathlib.Path) -> None:
    """Of these the option's, where there are both; without it see test_adapters.py."""
    asks = ASKS.format(adapters=f"{RIGHT!r}, laws=('cut', 'oracle')")
    done = suite(tmp_path, "--collect-only", "-q", "--gdn-law", "cut", "--gdn-law", "pure", test_kernel=asks)
    assert [line.rpartition("-")[2] for line in done.stdout.splitlines() if "::" in line] == ["cut]"]


def test_a_gpu_that_is_not_there_ends_the_session_with_one_line(tmp_path: pathlib.Path) -> None:
    if devices.gpus():
        pytest.skip("is about hosts without a GPU")
    done = suite(tmp_path, "--gdn-device", "cuda", test_kernel=ASKS.format(adapters=repr(RIGHT)))
    assert done.returncode == 3
    assert "--gdn-device cuda needs a GPU, and torch sees none" in done.stdout
