"""Releases of torch and Triton: under each, two checks, the self-test of the interpreter, and the bits of many lines.

    python -m benchmarks.versions                                     make an environment for each pair, and one as pip chooses
    python -m benchmarks.versions --python A/bin/python --python B/bin/python     use these environments

It prints a row for each environment. Lines are compared with those of the first environment: verdict, error over tolerance, and the
bits of all outputs and gradients. The exit code is 1 if something differs or fails, and 3 if an environment could not be made.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import records
from verify.interpreter.self_test import TORCHES

EXAMPLE = "examples/own_triton_kernel.py:MyKernel"
CHECKS = {"example kernel": [EXAMPLE, "--profile", "few"], "`fla/chunk`": ["fla/chunk", "--profile", "least"]}
MOST_TOKENS = 64  # of a line: interpreted kernels take milliseconds a token
SELF_TEST = "from verify.interpreter import self_test; print(self_test.run())"
ABOUT = "import torch, triton; print(torch.__version__.partition('+')[0], triton.__version__)"


def main() -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], metavar="FILE", help="an environment to use (may be repeated)")
    parser.add_argument("--lines", type=int, default=300, help="lines whose results are compared (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=pathlib.Path, metavar="FILE", help="run the lines of a file here, and print their results")
    options = records.options_of(parser)
    if options.run:
        print(json.dumps([result(line) for line in options.run.read_text(encoding="utf-8").splitlines()]))
        return 0
    rows, first = dict[str, dict[str, str]](), list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "lines.txt"
        file.write_text("\n".join(drawn(options.lines, options.seed)), encoding="utf-8")
        places = options.python or made(pathlib.Path(folder))
        total = len(options.python) or len(TORCHES) + 1
        for number, place in enumerate(track(places, "environments", total=total, console=Console(stderr=True))):
            name, row, results = measured(place, file)
            name += ", as pip chooses" if number == len(TORCHES) and not options.python else ""
            rows[name] = row
            if results:
                first = first or results
                row["lines alike"] = f"{sum(one == other for one, other in zip(first, results, strict=True))} of {len(first)}"
                for line, one, other in zip(file.read_text(encoding="utf-8").splitlines(), first, results, strict=True):
                    if one != other:
                        print(f"{name} differs: {line}\n  {one}\n  {other}")
    print_table(rows)
    records.put(options, "versions", {name: {"value": row} for name, row in rows.items()}, whole=True)
    if any("not installed" in row.values() for row in rows.values()):
        return 3
    return (
        0
        if all(cell in ("holds", "passes", f"{len(first)} of {len(first)}") for row in rows.values() for cell in row.values())
        else 1
    )


def drawn(count: int, seed: int) -> list[str]:
    """Lines of short cases, as many of each adapter."""
    from benchmarks.interpreter import drawn as runs_of
    from verify.adapters.registry import BUILT_IN, PATHS

    adapters = [EXAMPLE, *(name for name in BUILT_IN if name.startswith("fla/") and name not in PATHS)]
    each = -(-count // len(adapters))
    lines = []
    for place, adapter in enumerate(adapters):
        runs = [run for run in runs_of(adapter, 6 * each, seed + place) if run.example.case.tokens <= MOST_TOKENS]
        lines += [str(run) for run in runs[:each]]
    return lines[:count]


def made(folder: pathlib.Path) -> Iterator[str]:
    """Make an environment with each tested pair, and one with what pip chooses. Yields its Python, or what is not installed."""
    pairs = [[f"torch=={torch}.*", f"triton=={triton}"] for triton, torch in TORCHES.items()]
    for number, wanted in enumerate([*pairs, []]):
        place = folder / str(number)
        venv.create(place, with_pip=True)
        python = str(place / "bin" / "python")
        words = [python, "-m", "pip", "install", "--quiet", *wanted, str(records.ROOT)]
        installed = subprocess.run(words, env={**os.environ, "PIP_CONSTRAINT": ""}, check=False).returncode == 0
        yield python if installed else "torch {}, Triton {}".format(*[word.rpartition("=")[2] for word in wanted or "??"])


def measured(python: str, lines: pathlib.Path) -> tuple[str, dict[str, str], list[Any]]:
    """The name of an environment, its row, and the results of the lines."""
    if not os.path.exists(python):
        return python, dict.fromkeys([*CHECKS, "self-test", "lines alike"], "not installed"), []
    torch, triton = ran(python, "-c", ABOUT).stdout.split()
    row = {}
    for what, words in CHECKS.items():
        code = ran(python, "-m", "verify", "check", *words, "--device", "cpu", "--no-examples").returncode
        row[what] = {0: "holds", 1: "broken"}.get(code, f"exit code {code}")
    row["self-test"] = "passes" if ran(python, "-c", SELF_TEST).stdout.strip() == "([], True)" else "fails"
    answer = ran(python, "-m", "benchmarks.versions", "--run", str(lines))
    return f"torch {torch}, Triton {triton}", row, json.loads(answer.stdout) if answer.returncode == 0 else []


def ran(python: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in the root of the clone, without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, *words], cwd=records.ROOT, env=environment, capture_output=True, text=True, check=False)


def result(line: str) -> list[Any]:
    """Verdict, errors over tolerances, and a digest of every tensor that is compared, when a line runs here."""
    from verify.execution import judging
    from verify.execution.execute import execute
    from verify.execution.judge import judge
    from verify.execution.line import Run
    from verify.interpreter import install

    install()
    digest = hashlib.sha256()

    def noted(pairs: Iterable[Any]) -> Iterator[Any]:
        for pair in pairs:
            got = pair.got
            digest.update(f"{pair.name} {got.dtype} {tuple(got.shape)}".encode())
            digest.update(got.detach().cpu().contiguous().flatten().view(dtype=torch.uint8).numpy().tobytes())
            yield pair

    import torch

    torch.set_num_threads(1)
    with mock.patch.object(judging, "judge", lambda pairs, *settings: judge(noted(pairs), *settings)):
        outcome = execute(Run.parse(line))
    return [str(outcome.verdict), outcome.ratios, digest.hexdigest()[:16]]


def print_table(rows: dict[str, dict[str, str]]) -> None:
    """Print a row for each environment."""
    table = Table("environment", *next(iter(rows.values()), {}), box=None)
    for name, row in rows.items():
        table.add_row(name, *row.values())
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
