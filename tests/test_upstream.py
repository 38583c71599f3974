"""The issue texts for SGLang and vLLM show what they say. `gdn-verify fetch` gets the files; without a GPU they are interpreted."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = {
    library: sorted(path.name for path in (ROOT / "docs" / "upstream").glob(f"{library}-*.md")) for library in ("sglang", "vllm")
}

# Runs the Python block of each page named, after its library was prepared and, without a GPU, Triton's interpreter corrected.
PROGRAM = """
import os, re, sys
import torch
interpreted = not torch.cuda.is_available()
if interpreted:
    os.environ["TRITON_INTERPRET"] = "1"
folder, *pages = sys.argv[1:]
sys.path.insert(0, folder)
from verify import interpreter
from verify.adapters import serving
if interpreted:
    interpreter.install()
for page in pages:
    (block,) = re.findall(r"(?ms)^```python$(.*?)^```$", open(page, encoding="utf-8").read())
    for name in re.findall(r"(?m)^from ((?:sglang|vllm)[.]\\S+) import", block):
        serving.module(name)
    try:
        exec(compile(block, page, "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        print("status", int(stop.code))
"""


def statuses(library: str, folder: pathlib.Path, texts: list[str], place: pathlib.Path) -> list[int]:
    """Run the Python block of each text and return its exit status."""
    pages = [place / f"{number}.md" for number in range(len(texts))]
    for page, text in zip(pages, texts, strict=True):
        page.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *map(str, pages)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{library}: {done.stderr}"
    return [int(status) for status in re.findall(r"^status (\d+)$", done.stdout, re.MULTILINE)]


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("library", PAGES)
def test_reproduction_of_an_issue_shows_the_defect(library: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> None:
    """A script ends with status 1 where the defect shows. With a legal call in place of the defective one it ends with 0."""
    texts = [(ROOT / "docs" / "upstream" / name).read_text(encoding="utf-8") for name in PAGES[library]]
    legal = [text.replace("call([0, 0, 5])", "call([0, 5])") for text in texts if "call([0, 0, 5])" in text]
    assert len(legal) == 1
    folder = request.getfixturevalue(f"{library}_files")
    assert statuses(library, folder, [*texts, *legal], tmp_path) == [1] * len(texts) + [0]
