"""The issue texts for SGLang and vLLM show what they say. `gdn-verify fetch` gets the files; without a GPU they are interpreted.

Two texts for flash-linear-attention are about memory outside a tensor. The interpreter checks that their scripts access none.
"""

import pathlib

import pytest
import torch

from tests.alone import told
from verify.process.worker import NO_GPU

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {
    library: sorted(path.name for path in (ROOT / "docs" / "upstream").glob(f"{library}-*.md")) for library in ("sglang", "vllm")
}

# Runs the Python block of each text, after its library was prepared. It returns the exit statuses.
PROGRAM = """
import re, sys
sys.path.insert(0, folder)
from verify.adapters import serving
told = []
for number, text in enumerate(texts):
    (block,) = re.findall(r"(?ms)^```python$(.*?)^```$", text)
    for name in re.findall(r"(?m)^from ((?:sglang|vllm)[.]\\S+) import", block):
        serving.module(name)
    try:
        exec(compile(block, f"text {number}", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        told.append(int(stop.code))
"""


ABOUT_MEMORY = ("fla-fused-recurrent-beta-left-out.md", "fla-input-checks.md")


@pytest.mark.interpreted
@pytest.mark.slow
def test_reproductions_about_memory_show_the_defect_and_access_none_outside() -> None:
    texts = [(ROOT / "docs" / "upstream" / name).read_text(encoding="utf-8") for name in ABOUT_MEMORY]
    assert told(PROGRAM, folder="", texts=texts) == [1, 1]


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("library", PAGES)
def test_reproduction_of_an_issue_shows_the_defect(library: str, request: pytest.FixtureRequest) -> None:
    """A script ends with status 1 where the defect shows. With a legal call in place of the defective one it ends with 0."""
    texts = [(ROOT / "docs" / "upstream" / name).read_text(encoding="utf-8") for name in PAGES[library]]
    legal = [text.replace("call([0, 0, 5])", "call([0, 5])") for text in texts if "call([0, 0, 5])" in text]
    assert len(legal) == 1
    folder = request.getfixturevalue(f"{library}_files")
    environment = {} if torch.cuda.is_available() else NO_GPU
    statuses = told(PROGRAM, environment=environment, folder=str(folder), texts=[*texts, *legal])
    assert statuses == [1] * len(texts) + [0]
