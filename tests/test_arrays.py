"""Kernels on arrays of other libraries, ONNX models and C libraries: the examples of the page, conversions, wrong declarations."""

import importlib.util
import pathlib
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from tests.pages import prose_and_code, read
from verify.adapters.array_adapter import ArrayAdapter, numpy_of, tensor_of
from verify.adapters.c_library import CError, CLibrary
from verify.adapters.foreign import Call
from verify.adapters.loader import make
from verify.adapters.onnx_adapter import OnnxAdapter
from verify.adapters.registry import AdapterError
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Outcome, Verdict

BLOCKS = [(block[0].strip("`"), "\n".join(block[1:]) + "\n") for block in prose_and_code(read("docs/how-to/arrays.md"))[1]]
SPEC = f"{__file__}:Mine"
NORM = ModuleDomain("l2norm", dtypes=("fp32", "bf16"))


def block(language: str, word: str) -> str:
    """The block of the page that has a word."""
    (text,) = (text for kind, text in BLOCKS if kind == language and word in text)
    return text


def need(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install 'gdn-verify[{extra}]'")


def outcome(adapter: Any, line: str) -> Outcome:
    """The outcome of a line whose adapter is that one."""
    judging._LOADED[SPEC] = adapter
    try:
        return execute(Run.parse(line.replace(" ", f" adapter={SPEC} ", 1)))
    finally:
        del judging._LOADED[SPEC]


def in_file(folder: pathlib.Path, source: str, name: str) -> Any:
    """The adapter `name` of a file with this source."""
    (folder / "mine.py").write_text(source)
    from verify.adapters.loader import load

    return load(f"{folder / 'mine.py'}:{name}")
