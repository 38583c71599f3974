"""The patched interpreter computes what a device computes, and the unpatched one is seen not to."""

import os
import re
from pathlib import Path

import pytest
from packaging.version import Version

from tests.alone import answered
from verify.adapters.packages import installed
from verify.interpreter import install
from verify.process.worker import NO_GPU

pytestmark = pytest.mark.interpreted

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tests" / "interpreter_kernels.py"
CHECKS = re.findall(r"^def check_(\w+)", KERNELS.read_text(encoding="utf-8"), re.MULTILINE)
release = Version(installed("triton") or "0")
# What Triton's own interpreter computes rightly: the patches must keep it so.
RIGHT_WITHOUT_US = {
    "atomic_add",
    *(["arguments"] if release >= Version("3.8") else []),
    "cast_fp16_and_fp32",
    "dot_fp16",
    "dot_fp16_adds_in_float32",
    "dot_fp16_output",
    "dot_fp32",
    "exp",
    "max_and_min",
    "shapes",
    "sum_fp32",
    *(["sums_of_one_bit"] if release >= Version("3.9") else []),
}


# In processes of their own: interpreting is decided once, when triton is imported.


@pytest.fixture(scope="module")
def patched() -> dict[str, str]:
    pytest.importorskip("triton")
    return answered("tests.interpreter_kernels", hooked=False)


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    pytest.importorskip("triton")
    return answered("tests.interpreter_kernels", hooked=False, environment={**NO_GPU, "GDN_VERIFY_PLAIN": "1"})


@pytest.mark.slow
def test_kernels_compute_what_a_device_computes(patched: dict[str, str]) -> None:
    assert CHECKS
    assert {name: patched[name] for name in CHECKS if patched[name]} == {}


@pytest.mark.slow
def test_every_check_rejects_the_unpatched_interpreter(plain: dict[str, str]) -> None:
    needless = [name for name in CHECKS if name not in RIGHT_WITHOUT_US and not plain[name]]
    assert needless == [], "what holds without the patches proves nothing about them"


def test_install_refuses_a_triton_that_compiles() -> None:
    triton = pytest.importorskip("triton")
    assert not triton.knobs.runtime.interpret, "the suite itself must not run interpreted"
    with pytest.raises(RuntimeError, match="before the first import of triton"):
        install()
    assert "TRITON_INTERPRET" not in os.environ
