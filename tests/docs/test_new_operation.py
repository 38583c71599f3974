"""The diff in CONTRIBUTING.md adds an operation: applied to a copy of the project, it finds a wrong implementation."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from verify.process.worker import NO_GPU

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("oracles", "properties", "verify")
SUMS = """
import torch

from properties.modules.domain import ModuleDomain
from verify.adapters.base import Adapter


class Right(Adapter):
    algorithm = "pointwise"
    domain = ModuleDomain("cumsum")

    def run(self, x):
        return x.x.float().cumsum(1).to(x.x.dtype)


class RestartsInEachChunk(Right):
    def run(self, x):
        return torch.cat([part.float().cumsum(1) for part in x.x.split(64, 1)], 1).to(x.x.dtype)
"""


def test_the_diff_of_a_new_operation_changes_at_most_four_files() -> None:
    assert len(re.findall(r"^diff --git", diff(), re.MULTILINE)) <= 4


def diff() -> str:
    (text,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.slow
def test_an_operation_that_the_diff_adds_is_checked(tmp_path: pathlib.Path) -> None:
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "gdn_verify.py", tmp_path)
    (tmp_path / "sums.py").write_text(SUMS, encoding="utf-8")
    subprocess.run(["git", "apply", "-"], input=diff(), text=True, cwd=tmp_path, check=True)
    words = ("--profile", "few", "--law", "oracle", "--law", "strides", "--no-examples", "--device", "cpu")

    def check(name: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "verify", "check", f"sums.py:{name}", *words]
        environment = {**os.environ, **NO_GPU, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    right = check("Right")
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = check("RestartsInEachChunk")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "lengths=65 op=cumsum" in wrong.stdout
