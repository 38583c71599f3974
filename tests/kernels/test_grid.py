"""The interpreter runs all programs of a grid together with the same bits as one after another, and sees races between them."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from properties.books import book_of
from properties.words.example import Example
from tests.alone import answered, told
from tests.needs import need
from verify.adapters.packages import installed
from verify.cli.main import main
from verify.engine.asking import ask, describe
from verify.engine.drawing import seeded
from verify.execution.line import Run
from verify.findings.store import Store
from verify.interpreter.self_test import TRITONS
from verify.process.outcome import Verdict
from verify.process.worker import Worker

SLOW_FIXTURES = ("found", "planted")

pytestmark = pytest.mark.interpreted

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tests" / "grid_kernels.py"
RACES = ROOT / "tests" / "planted_races.py"
SOURCE = KERNELS.read_text(encoding="utf-8")
CHECKS = re.findall(r"^def check_(\w+)", SOURCE, re.MULTILINE)
PLANTED = dict(re.findall(r'^    "([\w ]+)": \(.*?, "(\w+)"\),$', RACES.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
FAULTS = re.findall(r'^    "([\w\' ]+)": \(', SOURCE, re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("triton")
    return answered("tests.grid_kernels")


def test_programs_together_do_what_they_do_one_after_another(found: dict[str, Any]) -> None:
    assert CHECKS
    assert {name: found[name] for name in CHECKS if found[name]} == {}


def test_every_planted_fault_of_the_interpreter_is_seen(found: dict[str, Any]) -> None:
    assert FAULTS
    assert [fault for fault in FAULTS if not found["faults"][fault]] == [], "no check fails though the interpreter does this"


@pytest.fixture(scope="module")
def planted() -> dict[str, Any]:
    need("fla")
    return answered("tests.planted_races")


def test_every_race_planted_in_a_released_kernel_is_a_finding(planted: dict[str, Any]) -> None:
    assert PLANTED
    for name, argument in PLANTED.items():
        verdict, what = planted["races"][name]
        assert verdict == "broken", (name, what)
        assert re.fullmatch(rf"race: program \(.*\) (both \w+|\w+s) {argument}\[[\d, ]+\] \(\w+\.py:\d+\)", what), (name, what)


def test_released_kernels_do_not_race(planted: dict[str, Any]) -> None:
    assert planted["right"], "no run"
    assert {line: found for line, found in planted["right"].items() if found != ["holds", ""]} == {}


def test_results_of_every_adapter_are_the_same_bits(planted: dict[str, Any]) -> None:
    assert len(planted["same"]) >= 16
    assert {name: different for name, different in planted["same"].items() if different} == {}


# What the patches stand on: Triton's interpreter as it is in the versions with which these tests have passed.
INTERPRETERS = {
    "3.7.1": "cdeca087f97ed6aa",
    "3.8.0": "a17550ad6c58a2d9",
    "3.9.0": "5af8debc8c2a858e",
}


def test_triton_is_one_that_the_interpreter_was_tested_with() -> None:
    triton = pytest.importorskip("triton")
    assert tuple(INTERPRETERS) == TRITONS
    source = Path(triton.__file__).parent / "runtime" / "interpreter.py"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    assert INTERPRETERS.get(triton.__version__) == digest, f"Triton {triton.__version__} has another interpreter: {digest}"


UNKNOWN = """
from verify.interpreter import patches
patches.TRITONS, patches.trouble = (), "Triton {} cannot be used".format
import triton
from verify.execution.execute import execute
from verify.execution.line import Run
outcome = execute(Run.parse("law=oracle adapter=fla/l2norm lengths=3 op=l2norm width=8"))
told = {"verdict": str(outcome.verdict), "reason": outcome.reason}
"""


@pytest.mark.slow
def test_with_a_triton_that_fails_its_self_test_nothing_is_decided() -> None:
    need("fla")
    assert told(UNKNOWN) == {
        "verdict": "unknown",
        "reason": f"Triton {installed('triton')} cannot be used",
    }


RACY = """
import torch, triton, triton.language as tl
from verify import Adapter, ModuleDomain

@triton.jit
def norm_kernel(x, y, D, BD: tl.constexpr):
    d = tl.arange(0, BD)
    b = tl.load(x + tl.program_id(0) * D + d, mask=d < D, other=0.0).to(tl.float32)
    b = b / tl.sqrt(tl.sum(b * b, 0) + 1e-6) * tl.program_id(1)  # first zeros, then what is right
    tl.store(y + tl.program_id(0) * D + d, b.to(y.dtype.element_ty), mask=d < D)

class Racy(Adapter):
    domain = ModuleDomain(operation="l2norm", backward=False)

    def run(self, x):
        y = torch.empty_like(x.x)
        norm_kernel[(x.x.numel() // x.x.shape[-1], 2)](x.x, y, x.x.shape[-1], triton.next_power_of_2(x.x.shape[-1]))
        return y
"""


@pytest.mark.parametrize(("how", "code"), [("grid", 1), ("sequential", 0)])
@pytest.mark.slow
def test_the_command_reports_a_race_that_one_program_after_another_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str, code: int
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "racy.py").write_text(RACY)
    monkeypatch.chdir(tmp_path)
    ended = main(["repeat", "law=oracle adapter=racy.py:Racy lengths=2 op=l2norm width=3 backward=no", "--interpreter", how])
    out, err = capfd.readouterr()
    assert ended == code, out + err
    race = "call: race: program (0, 0) and (0, 1) both write y[0, 0, 0, 0] (racy.py:10)"
    assert (race in out) == (how == "grid"), out


PADDED = """
import torch, triton, triton.language as tl
from verify.zoo.base import Serving

@triton.jit
def padding_kernel(pool, slots, padding, N, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    slot = tl.load(slots + i)
    if slot == padding:  # what the slot of padding holds means nothing, and every padding request writes there
        at = tl.arange(0, BLOCK)
        tl.store(pool + slot * N + at, i + at, mask=at < N)

class WritesPadding(Serving):
    def run(self, x):
        o, pool = super().run(x)
        if x.padding >= 0:
            size = pool[0].numel()
            padding_kernel[(len(x.slots),)](pool, x.slots, x.padding, size, triton.next_power_of_2(max(1, size)))
        return o, pool
"""


@pytest.mark.parametrize(("law_name", "variant"), [("padding", None), ("history", "threads")])
@pytest.mark.slow_after_first
def test_programs_may_all_write_to_the_slot_of_padding(tmp_path: Path, law_name: str, variant: str | None, worker: Worker) -> None:
    pytest.importorskip("triton")
    (tmp_path / "padded.py").write_text(PADDED)
    adapter = f"{tmp_path / 'padded.py'}:WritesPadding"
    domain, runs = describe(adapter, worker).domain, list[Run]()

    def shared(example: Example) -> bool:
        case = example.case
        return case.padding_slot == "0" and case.real.count(False) > 1 and variant in (None, example.variant)

    drawn = book_of(domain).laws[law_name].draw(domain).filter(shared)
    seeded(drawn, 0, 5, lambda example: runs.append(Run(law_name, adapter, example)))
    outcomes = [ask(run, worker, Store(tmp_path)) for run in runs]
    assert len(outcomes) >= 3
    assert {outcome.verdict for outcome in outcomes} <= {Verdict.HOLDS, Verdict.BLIND}, [outcome.findings for outcome in outcomes]
    assert sum(outcome.verdict is Verdict.HOLDS for outcome in outcomes) >= 3
    assert all("programs that touch the same memory" in " ".join(outcome.one_by_one) for outcome in outcomes if outcome.rows)
