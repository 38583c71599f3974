"""The files in examples/ do what their docstrings say. The commands here run fewer cases."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.verbs.test_pytest_plugin import Suite
from verify.cli import check_command
from verify.cli import main as cli
from verify.process import worker as process
from verify.process.worker import Worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
FEWEST = ("--profile", "least", "--no-examples", "--device", "cpu")
LAWS = ("--law", "oracle", "--law", "packed", "--law", "cut")
# file: the command in its docstring, what this test adds to the command, the exit code, and a line of the output
EXAMPLES: dict[str, tuple[str, tuple[str, ...], int, str]] = {
    "own_triton_kernel.py": (
        "gdn-verify check examples/own_triton_kernel.py:MyKernel",
        (*FEWEST, *LAWS),
        0,
        "3 of 3 laws hold",
    ),
    "own_torch_extension.py": (
        "gdn-verify check examples/own_torch_extension.py:OwnExtension",
        (*FEWEST, *LAWS),
        0,
        "3 of 3 laws hold",
    ),
    "path_adapter.py": (
        "gdn-verify check examples/path_adapter.py:OwnConvolution",
        FEWEST,
        0,
        "4 of 14 laws hold, 10 unsupported",
    ),
    "own_engine.py": (
        "gdn-verify check examples/own_engine.py:OwnEngine",
        FEWEST,
        0,
        "8 of 8 laws hold",
    ),
    "any_callable.py": (
        "gdn-verify check examples/any_callable.py:CausalAttention",
        FEWEST,
        0,
        "9 of 10 laws hold, 1 unsupported",
    ),
    "zoo_suite.py": (
        "gdn-verify zoo --rule examples/zoo_suite.py:Mine",
        ("TailWithoutGate", "LeaksState", "--law", "packed"),  # one law is enough: the suite decides
        1,
        "examples/zoo_suite.py:Mine: kills 1 of 2 in 2 cases",
    ),
    "test_with_pytest.py": (
        "pytest examples/test_with_pytest.py --gdn-profile least",
        ("-p", "no:cacheprovider", "-p", "no:xdist", "--gdn-device", "cpu"),
        0,
        "5 passed",
    ),
}


class Shared(Worker):
    """A worker that all commands share and cannot close. It imports Triton and torch's compiler once, which takes seconds."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    worker = Shared()
    yield worker
    Worker.close(worker)


def test_every_example_is_run() -> None:
    elsewhere = {"answer_files.py"}  # tests/libraries/test_files.py runs it
    assert sorted({*EXAMPLES, *elsewhere}) == sorted(file.name for file in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.slow
def test_an_example_does_what_its_docstring_says(
    name: str,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    shared: Worker,
) -> None:
    command, more, code, line = EXAMPLES[name]
    assert f"\n    {command}\n" in (FOLDER / name).read_text()
    program, *words = command.split()
    more += {"check": ("--findings", str(tmp_path), "--workers", "1"), "zoo": ("--workers", "1")}.get(words[0], ())
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(check_command, "workers_of", lambda *_: [shared])
    # The plugin's; not that of a module that this test is the first to import.
    monkeypatch.setattr(process, "Worker", lambda *args, **options: Worker(*args, **options) if args else shared)
    # All in this process, which has imported torch.
    if program == "gdn-verify":
        assert cli.main([*words, *more]) == code, capfd.readouterr()
        assert line in capfd.readouterr().out
        return
    suite = Suite(request.getfixturevalue("pytester"), monkeypatch)
    monkeypatch.chdir(ROOT)
    ended, output = suite.run(*words, *more)
    assert ended == code, output
    assert line in output
