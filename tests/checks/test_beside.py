"""Processes that an adapter starts: their environment is the user's, they are closed, and what they wrote is in the finding."""

import os
import pathlib
import time

import pytest

from tests.processes import SOON_S, alive, gone
from verify.engine.asking import ask, describe
from verify.execution.line import Run
from verify.findings.report import finding_lines
from verify.findings.store import Store
from verify.process.environment import OUTER_PATH
from verify.process.outcome import FailureKind, Verdict
from verify.process.worker import Worker

ADAPTER = """
import os, pathlib, subprocess, sys, time
from tests.right import Chunkwise

HERE = pathlib.Path(__file__).parent
SERVER = '''
import os, sys, time
print(os.environ.get("PYTHONPATH"), flush=True)
for line in sys.stdin:
    sys.stderr.write("server: no state for request 7\\\\n")
    sys.exit(3)
'''

class Beside(Chunkwise):
    server = None

    def run(self, x):
        if self.server is None:
            self.server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            (HERE / "path").write_text(self.server.stdout.readline().strip())
            (HERE / "pid").write_text(str(self.server.pid))
        if x.q.shape[1] == 2:
            self.server.stdin.write("fail\\n")
            self.server.stdin.flush()
            if self.server.wait() != 0:
                raise RuntimeError("the server is gone")
        while x.q.shape[1] == 4:
            time.sleep(0.1)
        return super().run(x)

    def close(self):
        (HERE / "closed").write_text("yes")
        self.server.stdin.close()
        self.server.kill()
        self.server.wait()

class Stuck(Beside):
    def close(self):
        super().close()
        time.sleep(60)
"""


def line(folder: pathlib.Path, tokens: int, kind: str = "Beside") -> Run:
    (folder / "beside.py").write_text(ADAPTER)
    return Run.parse(f"law=oracle adapter={folder / 'beside.py'}:{kind} lengths={tokens} key_dim=1 value_dim=1 backward=no")


@pytest.mark.parametrize("path", [None, "elsewhere"])
@pytest.mark.slow
def test_a_process_that_an_adapter_starts_gets_the_path_of_the_command(
    path: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    with Worker() as worker:
        assert ask(line(tmp_path, 1), worker, Store(tmp_path)).verdict is Verdict.HOLDS
    assert (tmp_path / "path").read_text() == str(path)
    assert OUTER_PATH not in os.environ


def test_what_the_process_wrote_is_in_the_finding_of_a_call_that_raised(tmp_path: pathlib.Path) -> None:
    with Worker() as worker:
        (finding,) = ask(line(tmp_path, 2), worker, Store(tmp_path)).findings
        assert (finding.kind, finding.detail) == (FailureKind.RAISED, "RuntimeError")
        assert finding.wrote == ("server: no state for request 7",)
        assert finding_lines([finding])[-1] == "    wrote      server: no state for request 7"
        assert type(finding).from_json(finding.to_json()).wrote == finding.wrote
        assert ask(line(tmp_path, 3), worker, Store(tmp_path)).findings == []


@pytest.mark.parametrize("kind", ["Beside", "Stuck"])
@pytest.mark.slow_after_first
def test_an_adapter_is_closed_before_its_worker_ends(kind: str, tmp_path: pathlib.Path) -> None:
    run, begin = line(tmp_path, 1, kind), time.monotonic()
    with Worker() as worker:
        describe(run.adapter, worker)
        assert ask(run, worker, Store(tmp_path)).verdict is Verdict.HOLDS
        pid = int((tmp_path / "pid").read_text())
        assert alive(pid) and not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()
    assert gone([pid], SOON_S)
    assert time.monotonic() - begin < 60.0


@pytest.mark.slow
def test_an_adapter_is_closed_before_a_worker_that_hangs_is_killed(tmp_path: pathlib.Path) -> None:
    run = line(tmp_path, 4)
    with Worker(deadline_s=3.0) as worker:
        describe(run.adapter, worker)
        (finding,) = ask(run, worker, Store(tmp_path)).findings
        assert finding.kind is FailureKind.HUNG
        assert (tmp_path / "closed").exists()


def test_without_a_close_no_worker_is_waited_for(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plain.py").write_text("from tests.right import Chunkwise as Plain\n")
    with Worker() as worker:
        describe(f"{tmp_path / 'plain.py'}:Plain", worker)
        assert not worker.hang_up()


STRAY = """
import torch, triton, triton.language as tl
from verify import Adapter, ModuleDomain

@triton.jit
def norm_kernel(x, y, D, BD: tl.constexpr):
    d = tl.arange(0, BD)
    b = tl.load(x + tl.program_id(0) * D + d, mask=d < D, other=0.0).to(tl.float32)
    b = tl.dot(b, b)  # of vectors
    tl.store(y + tl.program_id(0) * D + d, b.to(y.dtype.element_ty), mask=d < D)

class Raises(Adapter):
    domain = ModuleDomain(operation="l2norm", backward=False)

    def run(self, x):
        y = torch.empty_like(x.x)
        norm_kernel[(x.x.numel() // x.x.shape[-1],)](x.x, y, x.x.shape[-1], triton.next_power_of_2(x.x.shape[-1]))
        return y
"""


@pytest.mark.interpreted
def test_an_error_inside_an_interpreted_kernel_names_the_kernels_line(tmp_path: pathlib.Path, worker: Worker) -> None:
    pytest.importorskip("triton")
    (tmp_path / "raises.py").write_text(STRAY)
    run = Run.parse(f"law=oracle adapter={tmp_path / 'raises.py'}:Raises lengths=2 op=l2norm width=3 backward=no")
    (finding,) = ask(run, worker, Store(tmp_path)).findings
    assert finding.kind is FailureKind.RAISED
    assert finding.worst == "raises.py:9 in norm_kernel", finding
