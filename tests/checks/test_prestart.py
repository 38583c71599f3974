"""The worker that begins with the command: of the right environment, given away once, and gone when nobody takes it."""

import subprocess
import sys

import pytest

from tests.alone import told
from tests.together import for_each
from verify.adapters.base import Adapter
from verify.cli import main, settings
from verify.cli.parsers import parser, refuse
from verify.cli.verb_options import options_of
from verify.execution import service
from verify.process import prestart
from verify.process.messages import Describe, Tunings
from verify.process.worker import NO_GPU


@pytest.fixture(autouse=True)
def none_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prestart, "_begun", [])
    monkeypatch.delenv("RANK", raising=False)


def begin(words: str) -> None:
    namespace = settings.parse(parser(), words.split())
    refuse(namespace)
    main._prestart(options_of(namespace.kind, namespace))


@for_each("words", ["check fla/chunk --device=cpu", "repeat law=oracle"])
def test_it_answers_as_any_worker_and_is_taken_once(words: str) -> None:
    begin(words)
    assert prestart.take({"CUDA_VISIBLE_DEVICES": "7"}, 60.0) is None  # it sees other devices
    worker = prestart.take(NO_GPU, 60.0)
    assert worker is not None
    with worker:
        assert worker.alive
        assert worker.deadline_s == 60.0
        process = worker._process
        assert worker.ask(Tunings()) == {"known": {}, "infeasible": {}}
        assert worker._process is process
    assert prestart.take(NO_GPU, 60.0) is None


@for_each("words", ["repeat law=oracle --ranks=2", "list", "check fla/conv --ranks=2", "check fla/conv --sanitize"])
def test_nothing_begins_for_commands_that_need_none_or_another(words: str) -> None:
    begin(words)
    assert prestart.take(NO_GPU, 60.0) is None


def test_it_is_not_taken_where_modules_would_be_found_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    begin("check megatron/layer --device cpu --deny list")
    (*_, begun) = prestart._begun[-1]
    monkeypatch.setattr(sys, "path", ["somewhere", *sys.path])
    assert prestart.take(NO_GPU, 60.0) is None
    begun.close()


def test_ranks_of_torchrun_begin_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    begin("check fla/chunk --device cpu")
    assert prestart.take(NO_GPU, 60.0) is None


@pytest.mark.slow
def test_a_command_that_ends_at_once_leaves_no_process() -> None:
    program = (
        "from verify.process import prestart, worker; worker.IMPORTS = ();"  # who forks it imports nothing, and so begins at once
        "prestart.begin('cpu');"
        "print(prestart._begun[0][-1]._process.pid)"
    )
    pid = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    assert subprocess.run(["ps", "-p", pid], check=False, capture_output=True).returncode == 1


def test_torch_is_not_imported_before_the_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import sys
import gdn_verify
from verify.process import prestart
def begun(device):
    print(device, "torch" in sys.modules)
    raise KeyboardInterrupt
prestart.begin = begun
sys.argv[1:] = ["check", "fla/chunk", "--device", "cpu", "--tune", "7", "--law", "oracle"]
gdn_verify.main()
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("cpu False\n", "gdn-verify: interrupted\n")


@pytest.mark.slow
def test_an_adapter_brings_what_it_needs_and_the_rest_can_be_imported_after() -> None:
    program = """
import sys
from verify.adapters.loader import load
load("fla/chunk").bring()
assert "fla.ops.gated_delta_rule" in sys.modules
assert not {"fla.layers", "fla.models", "torch._dynamo"} & set(sys.modules)
from fla import GatedDeltaNet
assert "fla.layers" in sys.modules
load("fla/layer").bring()
assert "fla.models.cache_utils" in sys.modules
assert "fla.models.gla" not in sys.modules
for place in ("fla", "fla.models"):
    try:
        exec(f"from {place} import Nothing")
    except ImportError:
        pass
    else:
        raise AssertionError(place)
import fla.models
from fla.models import GLAConfig
assert fla.models.GLAConfig is GLAConfig and GLAConfig.__module__.startswith("fla.models.gla")
told = "all"
"""
    assert told(program) == "all"


@pytest.mark.parametrize("runs", [True, False])
def test_an_adapter_that_is_only_listed_brings_nothing(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    brought: list[bool] = []
    monkeypatch.setattr(Adapter, "bring", lambda self: brought.append(True))
    assert "error" not in service.answer(Describe("tests/right.py:Chunkwise", runs).to_json())
    service._await_imports()
    assert brought == [True] * runs


@pytest.mark.slow
def test_what_is_decorated_for_the_compiler_is_decorated_when_it_is_called() -> None:
    """`disable` changes nothing while there is no compiler, and what is compiled is compiled at its first call."""
    program = """
import sys
import torch
from verify.adapters.fla import decorating_later
compile_now, disable_now, decorated = torch.compile, torch.compiler.disable, []
torch.compile = lambda function, **options: decorated.append((function.__name__, options)) or (lambda x: x + 10)
torch.compiler.disable = lambda function, recursive=True: decorated.append((function.__name__, recursive)) or (lambda x: x + 20)
with decorating_later():
    @torch.compile(fullgraph=True)
    def one(x):
        return x + 1
    @torch.compiler.disable
    def two(x):
        return x + 2
assert decorated == [] and two.__name__ == "two"
assert two(0) == 2 and decorated == []
assert one(0) == 10 and one(1) == 11 and decorated == [("one", {"fullgraph": True})]
sys.modules["torch._dynamo"] = sys
assert two(0) == 20 and decorated[1:] == [("two", True)]
told = "all"
"""
    assert told(program) == "all"
