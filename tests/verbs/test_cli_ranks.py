"""The command line with ranks: who needs a GPU, what torchrun starts, and paths on simulated ranks."""

import functools
import itertools
import pathlib

import pytest

from tests.commands import Command
from tests.processes import SOON_S, family, gone
from tests.ranks.test_ranks import launch_words
from tests.verbs.test_cli import PATH_LINE, RIGHT, run
from verify.cli import check_command, exits, hosts
from verify.cli import main as cli
from verify.ranks import torchrun
from verify.ranks.torchrun import TorchrunGroup, launched


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_ranks_of_torchrun_end_with_the_command(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, this process, draws and prints; the other follows and is let go at the end. Torchrun itself is in test_ranks.py."""
    _store, words = launch_words()
    command, rest = ["check", "gdn/layer", "--law", "exchange", "--profile", "few"], set[int]()
    environment = words | {"RANK": "1", "LOCAL_RANK": "1"}
    monkeypatch.setattr(torchrun, "_exit_on_sigterm", lambda: None)  # this process keeps its own handler
    monkeypatch.setattr(check_command, "launched", lambda: launched({**words, "RANK": "0", "LOCAL_RANK": "0"}))
    with Command(command, tmp_path, imports=[], environment=environment) as follower:
        close = TorchrunGroup.close

        def closing(group: TorchrunGroup) -> None:
            rest.update(family(follower.pid))
            close(group)

        monkeypatch.setattr(TorchrunGroup, "close", closing)
        result = run(capfd, *command)
        out, err = follower.communicate(timeout=30)
    assert (result.code, follower.returncode, out, err) == (0, 0, "", ""), result.err
    assert "2 ranks over gloo" in result.out
    assert result.out.count("HOLDS       exchange") == 1
    assert len(rest) == 2, "the worker of rank 1, and who forked it"
    assert gone(rest, SOON_S)


def test_ranks_have_a_gpu_each_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, gpus, backend in (
        ((), 0, "gloo"),
        ((), 1, "gloo"),
        ((), 2, "nccl"),
        (("--device", "cpu"), 2, "gloo"),
        (("--device", "cuda"), 2, "nccl"),
        (("--backend", "gloo"), 2, "gloo"),
    ):
        monkeypatch.setattr(hosts.devices, "gpus", functools.partial(int, gpus))
        options = cli.parser().parse_args(["check", "gdn/layer", "--ranks", "2", *words])
        assert hosts.backend_of(options, 2, options.device) == backend, (words, gpus)


def test_ranks_on_gpus_that_are_not_there_are_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    on_gpus = ("check", "gdn/layer", "--ranks", "2", "--device", "cuda"), ("repeat", f"{PATH_LINE} device=cuda", "--ranks", "2")
    for words, (gpus, message) in itertools.product(on_gpus, ((0, "torch sees none"), (1, "torch sees 1"))):
        monkeypatch.setattr(hosts.devices, "gpus", functools.partial(int, gpus))
        done = run(capfd, *words)
        assert (done.code, done.out) == (exits.UNDECIDED, "")
        assert done.err == f"gdn-verify: 2 ranks on cuda need a GPU each, and {message}\n"


@pytest.mark.slow
def test_ranks_are_for_parallel_paths(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(capfd, "check", RIGHT, "--ranks", "2")
    assert result.code == 2
    assert "--ranks is for parallel paths" in result.err


@pytest.mark.slow
def test_a_parallel_path_is_checked_on_simulated_ranks_and_repeated_from_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(capfd, "check", "gdn/layer", "--law", "exchange", "--profile", "few")
    assert (result.code, "ranks simulated" in result.out) == (0, True), result.err
    line = "law=exchange variant=heads adapter=gdn/layer lengths=8+0 packed=yes cp=2 heads=2 value_heads=2"
    assert run(capfd, "repeat", line).code == 0
    assert run(capfd, "repeat", line, "--ranks", "2").code == 0
