"""On a GPU: whatever a kernel does to it costs one worker and one verdict, and the next case runs. Skipped where there is none."""

import pathlib

import pytest

from verify import device as devices
from verify.check import ask
from verify.judge import Verdict
from verify.run import Run
from verify.store import Store
from verify.worker import Worker

pytestmark = pytest.mark.skipif(not devices.gpus(), reason="torch sees no GPU")

HARM = (
    ("IllegalAccess", "crashed: CUDA error: an illegal memory access was encountered"),
    ("DeviceAssert", "crashed: CUDA error: device-side assert triggered"),
    ("Hang", "hung: no answer within 20 s"),
    ("OutOfMemory", "ran out of memory, with "),
    ("Killed", "crashed: killed by SIGKILL"),
)


@pytest.mark.parametrize(("name", "said"), HARM)
def test_what_a_kernel_does_to_the_device_is_one_verdict(name: str, said: str, tmp_path: pathlib.Path) -> None:
    line = f"law=oracle adapter=tests/gpu_faults.py:{name} device=cuda key_dim=16 value_dim=16 dtype=bf16 lengths="
    store = Store(str(tmp_path / "findings"))
    with Worker(20.0, environment=devices.environment("cuda")) as worker:
        before = ask(Run.parse(line + "32"), worker, store)
        harmed = ask(Run.parse(line + "33"), worker, store)
        after = ask(Run.parse(line + "32"), worker, store)
    assert (before.verdict, harmed.verdict, after.verdict) == (Verdict.HOLDS, Verdict.BROKEN, Verdict.HOLDS)
    assert harmed.findings[0].what.startswith(said)
    assert before.ratios == after.ratios
