"""An untested Triton is used if its self-test passes, and refused, once, before any case if not; the names inside Triton."""

import ast
import concurrent.futures
import json
import re
from pathlib import Path

import pytest

from tests.alone import told
from verify.adapters.packages import installed
from verify.cli.main import main
from verify.cli.pytest_plugin import LawItem
from verify.engine import asking
from verify.interpreter import internals, self_test
from verify.process.worker import Worker

ROOT = Path(__file__).resolve().parents[2]

# Faults of an operation that a patch replaces, or of what runs all programs together. The self-test must see each of them.
FAULTS = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from unittest import mock
import numpy as np
from verify.interpreter import known_kernels
from verify.interpreter import arithmetic, grid, memory, operations, races
from verify.interpreter.internals import get
builder, faults = get("interpreter.InterpreterBuilder"), []
told = {"none": [*known_kernels.failures()]}

def wrong(owner, name):
    plain = vars(owner)[name]
    def off_by_one(self, *arguments):
        result = plain(self, *arguments)
        return type(result)(result.data + np.ones(1, result.data.dtype), result.dtype)
    faults.append((f"{owner.__name__}.{name}", owner, name, off_by_one))

for name in ("create_fma", "create_dot", "create_clampf", "create_maxnumf", "create_bitcast", "create_erf", "create_atomic_rmw"):
    wrong(builder, name)
for name in ("create_trans", "create_gather", "create_get_program_id"):
    wrong(operations.GridBuilder, name)
faults += [
    ("two roundings", arithmetic, "fused", lambda x, y, z: (x * y).astype(np.float32).astype(np.float64) + z),
    ("cut numbers", arithmetic, "narrow", lambda values: (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)),
    ("decides for all by the first", operations, "agreed", lambda data: data.reshape(-1)[0]),
    ("forgets who touched what", races.Shadow, "others", lambda self, *_: np.zeros(1, dtype=np.int32)),
    ("updates nothing", memory.Memory, "finish_slice", lambda self: None),
    ("adds nothing", get("interpreter.ReduceOps"), "sum", lambda self, x: x),
]
for fault, owner, name, planted in faults:
    with mock.patch.object(owner, name, planted):
        told[fault] = next(known_kernels.failures(), "")
"""


@pytest.mark.slow
def test_the_self_test_sees_planted_faults() -> None:
    pytest.importorskip("triton")
    found = told(FAULTS)
    assert found.pop("none") == []
    assert len(found) >= 16
    assert [fault for fault, failures in found.items() if not failures] == []


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs of the self-test, which here answers that something is wrong, and does not take seconds."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    made: list[str] = []

    def run() -> tuple[list[str], bool]:
        made.append("run")
        return [f"run {len(made)}"], True

    monkeypatch.setattr(self_test, "run", run)
    return made


def test_an_answer_is_kept_for_what_it_depends_on(runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert [*pool.map(self_test.failures, ["9.9.9"] * 8)] == [["run 1"]] * 8
    assert self_test.failures("9.9.8") == ["run 2"]
    (kept,) = [path for path in tmp_path.glob("cache/*/*.json") if json.loads(path.read_text()) == ["run 1"]]
    for strange in ("", "{", "7", "[1]"):  # a file that is no answer
        kept.write_text(strange)
        assert self_test.failures("9.9.9") == [f"run {len(runs)}"]
    assert len(runs) == 6
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "none"))  # a folder that cannot be made
    assert [self_test.failures("9.9.9") for _ in range(2)] == [["run 7"], ["run 8"]]


def test_a_process_that_dies_is_replaced_and_computes_again(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "run", lambda: (["exit code -9"], False))
    assert self_test.failures("9.9.9") == ["exit code -9"]
    monkeypatch.setattr(self_test, "run", lambda: ([], True))
    assert self_test.failures("9.9.9") == []
    assert self_test.trouble("9.9.9") == ""


@pytest.mark.parametrize(
    ("torch", "command"),
    [
        ("2.14.1+cu130", "pip install 'torch==2.14.*' 'triton==3.8.0'"),
        ("2.99.0", "pip install 'torch==2.15.*' 'triton==3.9.0'"),
    ],
)
def test_the_command_names_the_triton_of_the_installed_torch(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, torch: str, command: str
) -> None:
    monkeypatch.setattr(self_test.importlib.metadata, "version", lambda name: torch)
    told = self_test.trouble("9.9.9")
    assert told == (
        "kernels cannot be interpreted with Triton 9.9.9, because its self-test failed: run 1; "
        f"install a version that works: {command}"
    )


ADAPTERS = """
import torch
from verify import Adapter, ModuleDomain
from verify.interpreter import patches
patches.TRITONS, patches.trouble = (), lambda triton: {trouble!r}
import triton, triton.language as tl

@triton.jit
def norm_kernel(x, y, eps, D, BD: tl.constexpr):
    d = tl.arange(0, BD)
    b = tl.load(x + tl.program_id(0) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(0) * D + d, (b / tl.sqrt(tl.sum(b * b, 0) + eps)).to(y.dtype.element_ty), mask=d < D)

class Interpreted(Adapter):
    domain = ModuleDomain(operation="l2norm", backward=False, widths=(1, 8))

    def run(self, x):
        y = torch.empty_like(x.x)
        rows, width = x.x.numel() // x.x.shape[-1], x.x.shape[-1]
        if rows:
            norm_kernel[(rows,)](x.x, y, x.eps or 1e-6, width, triton.next_power_of_2(width))
        return y

class Plain(Interpreted):
    def run(self, x):
        wide = x.x.float()
        return (wide / (wide.square().sum(-1, keepdim=True) + (x.eps or 1e-6)).sqrt()).to(x.x.dtype)
"""


@pytest.mark.parametrize(
    ("name", "trouble", "code", "told"),
    [
        ("Interpreted", "its self-test failed", 3, "gdn-verify: its self-test failed\n"),
        (
            "Interpreted",
            "",
            0,
            "gdn-verify: kernels are interpreted with Triton {}, which is not tested (tested are 9.9.9); its self-test passed\n",
        ),
        ("Plain", "its self-test failed", 0, ""),
    ],
)
@pytest.mark.slow
def test_a_check_says_once_what_it_makes_of_an_untested_triton(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    trouble: str,
    code: int,
    told: str,
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "adapters.py").write_text(ADAPTERS.format(trouble=trouble))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asking, "TRITONS", ("9.9.9",))
    monkeypatch.setattr(self_test, "TRITONS", ("9.9.9",))
    monkeypatch.setattr(asking, "_WARNINGS", {})
    options = ["--law", "oracle", "--profile", "least", "--workers", "1", "--no-examples", "--device", "cpu"]
    assert main(["check", f"adapters.py:{name}", *options]) == code
    out, err = capfd.readouterr()
    assert [line for line in err.splitlines(keepends=True) if line.startswith("gdn-verify")] == (
        [told.format(installed("triton"))] if told else []
    )
    assert ("HOLDS" in out) == (code == 0)
    assert "UNKNOWN" not in out
    if code:  # the pytest plugin says the same, in each item
        with Worker() as worker, pytest.raises(pytest.fail.Exception, match=r"^its self-test failed$"):
            LawItem(f"adapters.py:{name}", "oracle", "least", 0, worker, str(tmp_path)).assert_holds()


def test_the_map_has_the_names_inside_triton() -> None:
    table = (ROOT / "docs" / "map.md").read_text(encoding="utf-8").split("## Names inside Triton")[1]
    listed = re.findall(r"^\| `([\w.:]+)` \| (.*) \| (.*) \|$", table, re.MULTILINE)
    found = {(owner, name, releases) for owner, names, releases in listed for name in re.findall(r"`(\w+)`", names)}
    owners = {owner: owner.replace(":", ".").rpartition(".")[2] for owner in internals.NAMES}
    only = {name: ", ".join(releases) for name, releases in internals.ONLY.items()}
    assert found == {
        (owner, name, only.get(f"{owners[owner]}.{name}", "all")) for owner, names in internals.NAMES.items() for name in names
    }
    assert f"*All* means Triton {', '.join(self_test.TRITONS[:-1])} and {self_test.TRITONS[-1]}." in table


def test_the_installed_triton_has_the_names_that_are_said_to_be_in_it() -> None:
    triton = pytest.importorskip("triton")
    assert internals.absent() == {name for name, releases in internals.ONLY.items() if triton.__version__ not in releases}


def reaches(source: str) -> list[str]:
    """What a module takes from Triton beside its public language: imports, and names with an underscore."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton"):
            found += [node.module or ""] if (node.module, [alias.name for alias in node.names]) not in PUBLIC else []
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("triton.") and alias.name != "triton.language"]
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"(triton|tl|tensor|semantic|builder)\.?.*", ast.unparse(node.value)):
            found += [ast.unparse(node)] if re.match(r"_[a-z]", node.attr) else []
    return found


PUBLIC = (("triton.runtime.errors", ["InterpreterError"]), ("triton.language.extra", ["libdevice"]))


def test_one_module_reaches_into_triton() -> None:
    files = [*(ROOT / "verify" / "interpreter").glob("*.py"), ROOT / "verify" / "zoo" / "launch_edits.py"]
    assert len(files) > 12
    sources = {path.name: path.read_text(encoding="utf-8") for path in files}
    kernels = [reach for reach in reaches(sources.pop("known_kernels.py")) if not reach.startswith("tl.standard._")]
    assert kernels == []
    sources.pop("internals.py")
    assert {name: found for name, source in sources.items() if (found := reaches(source))} == {}
    assert reaches("from triton.runtime import interpreter\nimport triton.runtime.jit\ntl.core._unwrap_if_constexpr") == [
        "triton.runtime",
        "triton.runtime.jit",
        "tl.core._unwrap_if_constexpr",
    ]
    used = {name for source in sources.values() for name in re.findall(r"\w+", source)}
    named = {name for names in internals.NAMES.values() for name in names}
    inside = set(
        re.findall(
            r"\w+", (ROOT / "verify" / "interpreter" / "internals.py").read_text(encoding="utf-8").split("# What works on")[1]
        )
    )
    assert named - used - inside - DERIVED == set(), "names of the table that nothing uses"


DERIVED = {"_argmax_combine_tie_break_fast", "_argmin_combine_tie_break_fast"}  # the code puts these together
