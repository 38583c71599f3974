"""How interpreted programs run, together or one after another: each verb's option goes with each question to a worker."""

import pathlib

import pytest

from verify.cli.main import main
from verify.process import prestart
from verify.process.worker import NO_GPU, Worker
from verify.ranks.group import RankGroup

ADAPTER = """
import torch
from verify import Adapter, ModuleDomain
from verify.interpreter import patches

class Alone(Adapter):
    domain = ModuleDomain(operation="l2norm", backward=False)

    def run(self, x):
        assert patches.sequential
        rows = x.x.double()
        return (rows * torch.rsqrt((rows**2).sum(-1, keepdim=True) + (x.eps or 1e-6))).to(x.x.dtype)
"""
LINE = "law=oracle adapter=alone.py:Alone lengths=2 op=l2norm width=3 dtype=fp32 backward=no"
ONE_LAW = ("--law", "oracle", "--profile", "least", "--no-examples")
SERVES = f"{__name__}:answer"


def answer(question: dict[str, str]) -> dict[str, bool]:
    from verify.interpreter import patches

    return {"sequential": patches.sequential} if question == {"how": "?"} else {}


def test_each_question_of_a_worker_says_how_programs_run() -> None:
    with Worker(60.0, serves=SERVES, sequential=True) as worker:
        assert worker.ask({"how": "?"}) == {"sequential": True}
        process, worker.sequential = worker._process, False
        assert worker.ask({"how": "?"}) == {"sequential": False}
        assert worker._process is process


def test_a_worker_that_began_with_the_command_learns_it_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(60.0) as begun:
        monkeypatch.setattr(prestart, "_begun", [(NO_GPU, [*prestart.sys.path], begun)])
        assert prestart.take(NO_GPU, 60.0, sequential=True) is begun
        assert begun.sequential


def test_ranks_run_them_as_their_group_says() -> None:
    with RankGroup(1, serves=SERVES, sequential=True) as ranks:
        assert ranks.ask({"how": "?"}) == {"sequential": True}


# The exit codes of the verbs if the adapter's programs run one after another, and if they do not.
COMMANDS = {
    ("repeat", LINE): (0, 1),
    ("check", "alone.py:Alone", *ONE_LAW): (0, 1),
    ("soak", "alone.py:Alone", *ONE_LAW, "--minutes", "0.01"): (0, 1),
    ("known", LINE, "--reason", "it fails", "--known", "known.toml"): (1, 0),
    ("across", LINE, "--path", "."): (0, 1),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_option_of_a_verb_reaches_its_workers(
    command: tuple[str, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alone.py").write_text(ADAPTER)
    monkeypatch.chdir(tmp_path)
    codes = main([*command, "--interpreter", "sequential"]), main([*command])
    assert codes == COMMANDS[command], capfd.readouterr()
