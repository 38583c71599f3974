"""The pages about Rust and browsers: their kernels compile and run where rustc and node are installed, and hold."""

import pathlib
import re
import shutil
import subprocess

import pytest

from verify.cli.exits import BROKEN, HOLDS
from verify.cli.main import main

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def read(page: str) -> str:
    return (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def command(page: str, begin: str) -> str:
    return next(line for line in read(page).splitlines() if line.startswith(begin))


@pytest.mark.skipif(shutil.which("rustc") is None, reason="the page about Rust needs rustc")
@pytest.mark.parametrize("wrong", [False, True])
def test_the_library_in_rust_holds_and_a_wrong_one_is_broken(
    wrong: bool,  # noqa: FBT001
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((kernel,), (adapter,)) = blocks("rust", "rust"), blocks("rust", "python")
    edited = kernel.replace("head / (hv / h)", "head % h") if wrong else kernel
    assert (edited != kernel) == wrong
    (tmp_path / "kernel.rs").write_text(edited)
    (tmp_path / "my_crate.py").write_text(adapter)
    monkeypatch.chdir(tmp_path)
    subprocess.run(command("rust", "rustc -O").split(), check=True, timeout=300)
    words = ("--profile", "least", "--no-examples", "--device", "cpu", "--workers", "1")
    laws = [word for law in ("oracle", "heads", "strides", "memory") for word in ("--law", law)]
    assert main(["check", "my_crate.py:MyCrate", *words, *laws]) == (BROKEN if wrong else HOLDS)


@pytest.mark.skipif(shutil.which("node") is None, reason="the example of the page about browsers needs node")
@pytest.mark.parametrize("wrong", [False, True])
def test_the_example_in_javascript_holds_and_a_wrong_one_is_broken(
    wrong: bool,  # noqa: FBT001
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (adapter,) = blocks("browser", "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_kernel.py").write_text(adapter)
    example = (ROOT / "examples" / "answer_files.mjs").read_text(encoding="utf-8")
    edited = example.replace("Math.floor(h / (HV / H))", "(h % H)") if wrong else example
    assert (edited != example) == wrong
    (tmp_path / "answer_files.mjs").write_text(edited)
    laws = [word for law in ("oracle", "linear", "recall") for word in ("--law", law)]
    assert main(["export", "my_kernel.py:MyKernel", "--out", "questions", "--profile", "few", *laws]) == HOLDS
    subprocess.run(["node", "answer_files.mjs", "questions", "answers"], check=True, timeout=300)
    assert main(["judge", "questions", "answers", "--workers", "1"]) == (BROKEN if wrong else HOLDS)


@pytest.mark.skipif(shutil.which("node") is None, reason="the code of the page about browsers is parsed by node")
def test_the_code_of_the_page_in_a_browser_is_javascript(tmp_path: pathlib.Path) -> None:
    for number, code in enumerate(blocks("browser", "js")):
        (path := tmp_path / f"{number}.mjs").write_text(code)
        subprocess.run(["node", "--check", path], check=True, timeout=60)
