"""The action and the files in examples/ci: their schemas, their commands, and a user's repository in which their scripts run."""

import functools
import os
import pathlib
import re
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.commands import Command
from tests.pages import prose_and_code, read
from tests.ranks.test_ranks import TORCHRUN
from tests.sources import verbs
from verify.findings.records.record import read as read_records
from verify.process.outcome import Verdict

ROOT = pathlib.Path(__file__).resolve().parents[2]
CI = ROOT / "examples" / "ci"
SCHEMAS = {"action.yml": "github-actions", "github-actions.yml": "github-workflows", "gitlab-ci.yml": "gitlab-ci"}

PLANTED = {
    "action.yml": ("using: composite", "using: compost"),
    "github-actions.yml": ("runs-on:", "runs-off:"),
    "gitlab-ci.yml": ("when: always", "when: sometimes"),
}


def parsed(text: str) -> Any:
    """YAML 1.2, in which `on` is a text."""
    return pytest.importorskip("ruamel.yaml").YAML(typ="safe").load(text)


@functools.cache
def file(name: str) -> Any:
    return parsed((ROOT / name if name == "action.yml" else CI / name).read_text(encoding="utf-8"))


def page_workflow() -> Any:
    """The workflow of ten lines that the page of CI shows."""
    block = next(block for block in prose_and_code(read("docs/how-to/ci.md"))[1] if block[0] == "```yaml")
    return parsed("\n".join(block[1:]))


def fits(path: pathlib.Path, schema: str) -> bool:
    pytest.importorskip("check_jsonschema")
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", SCHEMAS)
def test_files_fit_the_schemas_of_their_services(name: str, tmp_path: pathlib.Path) -> None:
    place = ROOT / name if name == "action.yml" else CI / name
    assert fits(place, SCHEMAS[name])
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(place.read_text().replace(*PLANTED[name]))
    assert not fits(wrong, SCHEMAS[name]), "a planted mistake is seen"


def test_the_workflow_of_the_page_fits_its_schema(tmp_path: pathlib.Path) -> None:
    block = next(block for block in prose_and_code(read("docs/how-to/ci.md"))[1] if block[0] == "```yaml")
    assert len(block) - 1 <= 11
    (tmp_path / "page.yml").write_text("\n".join(block[1:]))
    assert fits(tmp_path / "page.yml", "github-workflows")


def scripts(data: Any) -> Iterator[str]:
    """The shell scripts of a workflow, an action or a pipeline."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key in ("run", "script", "before_script", "after_script"):
                yield from [value] if isinstance(value, str) else value
            else:
                yield from scripts(value)
    elif isinstance(data, list):
        for item in data:
            yield from scripts(item)


def test_the_commands_of_the_files_are_those_of_the_parsers() -> None:
    seen = set()
    for name in SCHEMAS:
        for script in scripts(file(name)):
            text = re.sub(r"\$\{\{.*?\}\}", "1", script.replace("\\\n", " "))
            for found in re.findall(r"(?:gdn-verify|-m verify) (.*)", text):
                words = [word for word in shlex.split(found.partition("||")[0]) if not word.startswith("${arguments")]
                for variable, value in {"PROFILE": "few", "SHARD": "1/2"}.items():
                    words = [value if word == f"${variable}" else word for word in words]
                words = [re.sub(r"\$CI_NODE_(INDEX|TOTAL)|\$CI_PIPELINE_IID", "1", word) for word in words]
                verbs()[words[0]].parse_args(words[1:])
                seen.add((name, words[0]))
    assert seen == {
        ("action.yml", "check"),
        *((name, verb) for name in ("github-actions.yml", "gitlab-ci.yml") for verb in ("check", "merge", "soak")),
    }


def test_the_inputs_of_the_action_are_those_of_the_page() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]*) \|", read("docs/how-to/ci.md").partition("| input |")[2].partition("\n\n")[0], re.MULTILINE
    )
    defaults = {
        name: "must be given" if one.get("required") else f"`{one['default']}`"
        for name, one in file("action.yml")["inputs"].items()
    }
    defaults |= {"arguments": "none", "python": "the Python of the job"}
    assert dict(rows) == defaults
    assert not any(file("action.yml")["inputs"][name]["default"] for name in ("arguments", "python"))


def test_the_page_for_agents_is_short() -> None:
    assert len((CI / "AGENTS.md").read_text().splitlines()) <= 60


# A user's repository

PROJECT = '[project]\nname = "my-kernels"\nversion = "1"\n[tool.setuptools]\npy-modules = ["my_kernel"]\n'
STORE = "tl.store(o + (token * HV + head) * V + values, b_o.to(o.dtype.element_ty), mask=is_value)"
FEWER = "--profile least --law oracle --law packed --workers 1"  # what the command here adds


class Repository:
    """A repository with a kernel and no code of ours. `gdn-verify` is a command there."""

    def __init__(self, folder: pathlib.Path, kernel: str) -> None:
        self.folder, commands = folder / "repository", folder / "commands"
        self.folder.mkdir()
        commands.mkdir()
        (self.folder / "pyproject.toml").write_text(PROJECT)
        (self.folder / "my_kernel.py").write_text(kernel)
        command = commands / "gdn-verify"
        verify = f'exec "{sys.executable}" -m verify "$@"'
        command.write_text(f'#!/bin/sh\n[ "$1" = check ] && {verify} {FEWER}\n{verify}\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        self.summary, self.output = folder / "summary.md", folder / "output"
        self.environment = {
            **os.environ,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_OUTPUT": str(self.output),
        }

    def run(self, script: str, variables: Mapping[str, str]) -> tuple[int, str]:
        """Run a script as a service does: with bash, which ends at the first failure. Returns its exit code and stdout."""
        words = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
        environment = {**self.environment, **variables}
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=170, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout

    def act(self, **inputs: str) -> tuple[int, str]:
        """Run the command of the action with some inputs, the others as by default."""
        action = file("action.yml")
        known = {name: one.get("default", "") for name, one in action["inputs"].items()}
        assert {*inputs} <= {*known}
        (step,) = [step for step in action["runs"]["steps"] if step.get("id") == "check"]
        values = known | inputs
        variables = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: values[found[1]], text) for name, text in step["env"].items()
        }
        return self.run(step["run"], variables)


def kernel() -> str:
    return (ROOT / "examples" / "own_triton_kernel.py").read_text()


@pytest.mark.slow
def test_the_workflow_of_the_page_is_red_at_the_line_of_a_planted_fault(tmp_path: pathlib.Path) -> None:
    wrong = kernel().replace(STORE, STORE.replace(", mask=is_value", ""))
    line = next(number for number, text in enumerate(wrong.splitlines(), 1) if text.strip() == STORE.replace(", mask=is_value", ""))
    repository, (job,) = Repository(tmp_path, wrong), page_workflow()["jobs"].values()
    code, out = repository.act(**job["steps"][-1]["with"])
    assert code == 1, out
    assert re.search(rf"^::error file=my_kernel\.py,line={line},title=gdn-verify%3A oracle is broken", out, re.MULTILINE), out
    assert "a law is broken" in repository.summary.read_text()
    assert repository.output.read_text() == "artifact=gdn-verify-1-of-1\n"
    (record,) = read_records(str(repository.folder / "gdn-verify-results" / "record-1-of-1.jsonl"))
    assert record.verdict is Verdict.BROKEN
    assert "<failure" in (repository.folder / "gdn-verify-results" / "junit-1-of-1.xml").read_text()


@pytest.mark.slow
def test_the_parts_of_the_example_are_green_and_are_merged(tmp_path: pathlib.Path) -> None:
    repository, jobs = Repository(tmp_path, kernel()), file("github-actions.yml")["jobs"]
    inputs = {**jobs["check"]["steps"][-1]["with"], "adapter": "my_kernel.py:MyKernel"}
    for number in (1, 2):
        code, out = repository.act(**inputs | {"shard": f"{number}/2"})
        assert (code, "::error" in out) == (0, False), out
        results = repository.folder / "parts" / f"gdn-verify-{number}-of-2"
        results.mkdir(parents=True)
        (repository.folder / "gdn-verify-results").rename(results / "gdn-verify-results")
    (merge,) = [step["run"] for step in jobs["merge"]["steps"] if "merge" in step.get("run", "")]
    code, out = repository.run(merge, {})
    assert (code, "2 of 2 laws hold" in out) == (0, True), out
    assert repository.summary.read_text().count("every law holds") == 3
    assert (repository.folder / "junit.xml").read_text().count("<testcase") == 2
    # One part of GitLab's pipeline, without the other one.
    check, merge = ("\n".join(file("gitlab-ci.yml")[job]["script"]) for job in ("check", "merge"))
    variables = {"ADAPTER": "my_kernel.py:MyKernel", "CI_NODE_INDEX": "2", "CI_NODE_TOTAL": "2"}
    assert repository.run(check, variables)[0] == 0
    code, out = repository.run(merge, variables)
    assert (code, "shard 1/2 is missing" in out) == (3, True), out
    assert "<error" in (repository.folder / "junit.xml").read_text()
    assert "undecided" in (repository.folder / "summary.md").read_text()


# Several hosts


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1])
def test_two_hosts_end_with_the_same_exit_code(code: int, tmp_path: pathlib.Path) -> None:
    """Two hosts are two folders here, each with a torchrun of its own and one rank."""
    path = (ROOT / "examples" / "path_adapter.py").read_text()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = []
    for node in range(2):
        folder = tmp_path / f"host{node}"
        folder.mkdir()
        (folder / "my_path.py").write_text(
            path.replace("def run(self, x, place):", f"def run(self, x, place):\n        assert {code} == 0")
        )
        words = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        words += ["--master-port", str(port), "-m", "verify", "check", "my_path.py:OwnConvolution", "--law", "parallel"]
        words += ["--profile", "least", "--device", "cpu", "--json", "record.jsonl", "--no-examples"]
        hosts.append(Command(words, folder, program=TORCHRUN))
    try:
        told = [host.communicate(150) for host in hosts]
    finally:
        for host in hosts:
            host.close()
    assert [host.returncode for host in hosts] == [code, code], told
    assert [err.count("exitcode  : 1") > 0 for _, err in told] == [code == 1] * 2, told
    assert not (tmp_path / "host1" / "record.jsonl").exists(), "the host of rank 0 alone writes files"
    (record,) = read_records(str(tmp_path / "host0" / "record.jsonl"))
    assert record.end is not None and record.end.exit_code == code
