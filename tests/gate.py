"""The GPU gate: everything that only a GPU can show, run and judged in one go, with a record of what passed.

    tox -e gpu                                  or, in an environment that has all packages: python -m tests.gate

It wants two GPUs. On one, steps that need two are not run. Steps whose kernels take long to compile run first, side by side. Then
rates are measured, one at a time. The other steps of all GPUs run last. Progress goes to stderr, a table to stdout; logs stay in
.gdn-verify/gate. Where nothing failed, docs/gpu.json is written: `gdn-verify list` and the README say from it which sources passed
last.
Exit: 0 passed, 1 a step failed, 3 there is no GPU.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from verify.findings.law_report import LawReport
from verify.findings.records import record
from verify.gpu import device as devices
from verify.gpu import record as gpu_record
from verify.process.outcome import Verdict

LOGS = gpu_record.ROOT / ".gdn-verify" / "gate"
RECORD = gpu_record.PLACES[0]
PYTHON = sys.executable
# Targets of ours. One H200 took 18.9 s, 10.2 s and 66 cases a second. A slow host passes; twice as slow again fails.
COLD_S, WARM_S, STEADY = 60.0, 25.0, 35.0
# How many times as long as the implementation's own calls a case may take. This depends less on the host than a rate: on two H100
# hosts with 32 to 38 cases a second, it was 3.1 to 3.3 in every pass.
TIMES = 4.0
WHOLE_S = 240.0  # of a whole check. Alone on a host, an H200 takes at most 180 s and an H100 240 s; here other steps run beside it
LAYERS, LAYOUTS, DISTRIBUTED = 10.0, 250.0, 2000  # a second, a second, cases in all
DEADLINE_S = 240.0  # of a step
# The files with tests marked gpu.
GPU_TESTS = tuple(
    f"tests/{folder}/test_{name}.py"
    for folder, names in {
        "formulas": ("rule_case", "rounding", "rounding_bounds"),
        "gpus": ("gpu", "sanitizer"),
        "libraries": ("serving_claims",),
    }.items()
    for name in names
)
DISTRIBUTED_STEPS = ("chunk_cp", "kda_cp", "conv_cp", "rates", "exact", "torchrun", "layer")
RATES = {"exchange": ("layout cases a second", LAYOUTS), "parallel": ("layer cases a second", LAYERS)}  # by law
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: its subject, its verdict, the figure and what it must be."""

    what: str
    verdict: str
    figure: str = ""
    must: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Done:
    """A step's process after its end: exit code, seconds, and each line of its stdout with the seconds after which it came."""

    step: "Step"
    code: int
    seconds: float
    lines: list[tuple[float, str]]

    @property
    def file(self) -> pathlib.Path:
        """What the step wrote for machines: the file that stood for {file} in its command."""
        return LOGS / f"{self.step.name}.out"

    @property
    def reports(self) -> list[LawReport]:
        """The laws' reports of a check that wrote its record. None of a check that never ended: a law may lack there."""
        try:
            checks = record.read(str(self.file))
        except ValueError:
            return []
        return [report for check in checks if check.end is not None for report in check.reports]

    @property
    def rates(self) -> dict[str, Any]:
        """What benchmarks/distributed.py measured."""
        try:
            measured: dict[str, Any] = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return measured

    @property
    def cases(self) -> int:
        """How many cases held: of a check's laws, or of the rates that benchmarks/distributed.py measured."""
        return sum(report.counts.get(Verdict.HOLDS, 0) for report in self.reports) + sum(
            self.rates[law]["cases"] for law in RATES if law in self.rates
        )

    def row(self, *, good: bool, figure: str, must: str, what: str = "") -> Row:
        """A row about this step."""
        return Row(what or self.step.what, PASSED if good else FAILED, figure, must, self.seconds)


@dataclasses.dataclass(frozen=True)
class Step:
    """A process of the gate: what it shows, its command, whether it needs all GPUs, and how its end is judged."""

    name: str
    what: str
    command: tuple[str, ...]
    judge: Callable[[Done], list[Row]]
    cold: bool = False  # with a cache of kernels of its own, empty before
    after: str = ""  # the step whose cache it has
    deadline_s: float = DEADLINE_S


def check(done: Done) -> list[Row]:
    """A check: every law of it holds, and none is undecided."""
    counts = collections.Counter[str]()
    for report in done.reports:
        counts.update(report.counts)
    figure = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    laws = [report.law for report in done.reports if report.verdict is not Verdict.UNSUPPORTED]
    good = done.code == 0 and bool(laws)
    return [done.row(good=good, figure=f"{len(laws)} laws: {figure}", must="all hold")]


def whole(done: Done) -> list[Row]:
    """A whole check with a seed of the day comes to its end in time, and every law is decided.

    A law that such a seed breaks is news about the kernel. The figure has it, and it does not fail the gate, which is about us.
    """
    verdicts = [report.verdict for report in done.reports]
    figure = ", ".join(f"{verdicts.count(name)} {name}" for name in sorted(set(verdicts))) or "nothing"
    good = done.code in (0, 1) and bool(verdicts) and "unknown" not in verdicts and done.seconds <= WHOLE_S
    return [done.row(good=good, figure=f"{figure} in {done.seconds:.0f} s", must=f"all decided in {WHOLE_S:.0f} s")]


def first_verdict(most_s: float) -> Callable[[Done], list[Row]]:
    """A check's first verdict comes in time."""

    def judge(done: Done) -> list[Row]:
        first = next((at for at, line in done.lines if line.startswith("HOLDS")), None)
        figure = "none" if first is None else f"{first:.1f} s"
        return [done.row(good=done.code == 0 and first is not None and first <= most_s, figure=figure, must=f"{most_s:.0f} s")]

    return judge


def passes(done: Done) -> tuple[list[tuple[float, float]], bool]:
    """Two numbers for each pass of benchmarks/steady.py, and whether the step succeeded with no case broken or undecided.

    The numbers are cases a second, and the time of the pass as a multiple of the time of the implementation's calls.
    """
    lines = [re.match(r"([\d.]+) cases a second: ([\d.]+) s, kernels ([\d.]+)", line) for _, line in done.lines]
    rates = [(float(found[1]), float(found[2]) / float(found[3])) for found in lines if found]
    return rates, done.code == 0 and not any("broken" in line or "unknown" in line for _, line in done.lines)


def steady(done: Done) -> list[Row]:
    """The medians over the passes once all is compiled: the rate, and the time as a multiple of that of the calls."""
    rates, right = passes(done)
    rate, times = (statistics.median(column) for column in zip(*rates, strict=True)) if rates else (0.0, math.inf)
    figure, must = f"{rate:.1f} a second, {times:.1f} x the calls", f"{STEADY:.0f}, {TIMES:.0f} x"
    return [done.row(good=right and rate >= STEADY and times <= TIMES, figure=figure, must=must)]


def no_alarm(done: Done) -> list[Row]:
    """The same cases while their kernels are compiled: no case is broken or undecided. The rate does not matter."""
    rates, right = passes(done)
    figure = f"{len(rates)} pass" if right else f"code {done.code}, or a case is broken or unknown"
    return [done.row(good=right and bool(rates), figure=figure, must="1 pass")]


def rates(done: Done) -> list[Row]:
    """Exchanges and whole layers a second, over NCCL."""
    rows = []
    for law, (what, least) in RATES.items():
        rate = done.rates.get(law, {}).get("a_second", 0.0)
        rows.append(done.row(good=done.code == 0 and rate >= least, figure=f"{rate:.1f}", must=f"{least:.0f}", what=what))
    return rows


def tests(done: Done) -> list[Row]:
    """Tests, a row a function: how many of its items passed. One that was skipped is not run."""
    if not done.file.is_file():
        return [done.row(good=False, figure="no report", must="all pass")]
    found: dict[str, list[bool]] = {}
    for item in ElementTree.parse(done.file).iter("testcase"):
        if item.find("skipped") is None:
            good = item.find("failure") is None and item.find("error") is None
            found.setdefault(item.attrib["name"].partition("[")[0], []).append(good)
    rows = []
    for name, passes in found.items():
        what = name.removeprefix("test_").replace("_", " ")
        rows.append(done.row(good=all(passes), figure=f"{sum(passes)} of {len(passes)}", must="all pass", what=what))
    if not rows or (done.code and all(row.verdict == PASSED for row in rows)):
        rows.append(done.row(good=False, figure=f"{len(rows)} rows, code {done.code}", must="all pass"))
    return rows


def verify(*words: str) -> tuple[str, ...]:
    """A command of gdn-verify that keeps no examples and writes its JSON."""
    return (PYTHON, "-m", "verify", *words, "--no-examples", "--findings", "{findings}", "--json", "{file}")


def pytest(*words: str) -> tuple[str, ...]:
    """The tests that need a GPU."""
    return (
        PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-m",
        "gpu",
        *words,
        "--junitxml",
        "{file}",
    )


def lanes(cards: int) -> tuple[tuple[tuple[str, tuple[Step, ...]], ...], ...]:
    """The steps in stages, one after the other; of a stage the lanes, side by side, each with the GPUs that it sees.

    Rates are measured alone, because ranks that wait for each other in NCCL take turns with whatever else runs on their GPUs.
    Compiling takes longest. So the kernels of the steady rate and those of the paths of flash-linear-attention are compiled beside
    other steps: the paths one after the other, since the first verdict with no kernel compiled is timed meanwhile.
    """
    first = ("check", "fla/chunk", "--law", "recall", "--seed", "5", "--device", "cuda")
    measured = (PYTHON, "-m", "benchmarks.steady", "fla/chunk", "--cases", "200", "--passes")
    blocks = ("check", "fla/decode_blocks", "--profile", "few", "--device", "cuda", "--law", "blocks", "--law", "oracle")
    graphs = ("check", "tests/right.py:Captured", "--profile", "few", "--device", "cuda", "--law", "refill", "--law", "oracle")
    timed = (
        Step("cold", "first verdict, no kernel compiled", verify(*first), first_verdict(COLD_S), cold=True),
        Step("warm", "first verdict, kernels compiled", verify(*first), first_verdict(WARM_S), after="cold"),
    )
    alone = Step("steady", "steady rate of one GPU", (*measured, "3"), steady)
    others = (
        Step("tests", "tests on one GPU", pytest("-n", "6", *GPU_TESTS), tests),
        Step("decode", "decode in every size of block", verify(*blocks), check),
        Step("graphs", "decode in a CUDA graph", verify(*graphs), check),
        Step(
            "simulated", "simulated ranks on one GPU", verify("check", "gdn/layer", "--profile", "few", "--device", "cuda"), check
        ),
    )
    day = datetime.date.today().strftime("%Y%m%d")
    check_all = Step(
        "whole",
        f"whole check of fla/chunk, no kernel compiled, seed {day}",
        verify("check", "fla/chunk", "--seed", day, "--device", "cuda"),
        whole,
        cold=True,
        deadline_s=WHOLE_S + 60,
    )
    compiled = Step("compiled", "kernels of the steady rate compiled", (*measured, "1"), no_alarm)
    if cards == 1:
        return (("0", (*timed, compiled)), ("0", others)), (("0", (alone,)),), (("0", (check_all,)),)
    every, ranks = ",".join(map(str, range(cards))), ("--ranks", str(cards), "--deadline", str(DEADLINE_S))
    rate = (PYTHON, "-m", "benchmarks.distributed", "--ranks", str(cards), "--cases", "250", "--json", "{file}")
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cards))
    exact = [word for law in ("exchange", "round_trip", "fused", "traffic", "refused", "reshard") for word in ("--law", law)]
    laws = [word for law in ("parallel", "same", "repeats") for word in ("--law", law)]

    def path(name: str, profile: str, *words: str) -> Step:
        return Step(name, f"fla/{name} over NCCL", verify("check", f"fla/{name}", *ranks, "--profile", profile, *words), check)

    return (
        (
            ("0", (*timed, compiled)),
            ("1", others),
            (every, (path("chunk_cp", "few"), path("kda_cp", "few"))),
        ),
        ((every, (Step("rates", "rates over NCCL", rate, rates),)),),
        (("0", (alone,)),),
        (
            (
                every,
                (
                    Step("exact", "exact laws over NCCL", verify("check", "gdn/layer", *ranks, "--profile", "ci", *exact), check),
                    Step("ranks", "tests on all GPUs", pytest("-k", "nccl", "tests/gpus/test_gpu.py"), tests),
                    path("conv_cp", "few"),
                ),
            ),
            ("1", (check_all,)),
            (
                every,
                (
                    Step("layer", "whole layers over NCCL", verify("check", "gdn/layer", *ranks, *laws), check),
                    Step(
                        "torchrun",
                        "gdn/layer under torchrun",
                        (*torchrun, *verify("check", "gdn/layer", "--profile", "quick", "--deadline", str(DEADLINE_S))[1:]),
                        check,
                    ),
                ),
            ),
        ),
    )


class Gate:
    """Runs steps, in lanes side by side, and keeps their rows."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.rows, self.done = folder, list[Row](), dict[str, Done]()
        self.start = time.monotonic()
        self._lock = threading.Lock()
        self._running, self._ended = set[int](), False

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for process in tuple(self._running):  # after Ctrl-C
            kill(process)

    def stage(self, lanes: Sequence[tuple[str, Sequence[Step]]]) -> None:
        """Run lanes side by side, each on its cards, a lane's steps one after the other."""
        pool = concurrent.futures.ThreadPoolExecutor(len(lanes))
        futures = [pool.submit(self._lane, steps, cards) for cards, steps in lanes]
        try:
            for future in futures:
                future.result()
        except BaseException:
            self.__exit__()
            raise
        finally:
            pool.shutdown()

    def _lane(self, steps: Sequence[Step], cards: str) -> None:
        for step in steps:
            if self._ended:
                return
            done = self._run(step, cards)
            try:
                rows = step.judge(done)
            except Exception as error:  # a file that no judge expects; the other steps' rows are not lost for it
                rows = [done.row(good=False, figure=f"{type(error).__name__}: {error}", must="a file to be judged")]
            with self._lock:
                self.done[step.name] = done
                self.rows += rows
            for row in rows:
                self.tell(f"{row.verdict}: {row.what}: {row.figure}")
            if any(row.verdict == FAILED for row in rows):
                tail = (LOGS / f"{step.name}.log").read_text(errors="replace")[-3000:]
                self.tell(f"{step.name} ended with code {done.code}; the end of its log:\n{tail}")

    def _run(self, step: Step, cards: str) -> Done:
        out, log = LOGS / f"{step.name}.out", LOGS / f"{step.name}.log"
        words = [word.format(file=out, findings=self.folder / f"findings-{step.name}") for word in step.command]
        cache = self.folder / (step.name if step.cold else step.after or "kernels")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": cards, "TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
        self.tell(f"begins: {step.what} ({' '.join(words[1:])})")
        start, lines = time.monotonic(), list[tuple[float, str]]()
        with log.open("wb") as errors:
            process = subprocess.Popen(
                words, cwd=gpu_record.ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
            self._running.add(process.pid)
            clock = threading.Timer(step.deadline_s, kill, (process.pid,))
            clock.start()
            assert process.stdout is not None
            with process.stdout as stdout:
                for line in stdout:
                    lines.append((time.monotonic() - start, line.decode(errors="replace").rstrip("\n")))
            code = process.wait()
            clock.cancel()
            self._running.discard(process.pid)
            errors.write("\n".join(["", "stdout:", *(f"{at:7.1f} {line}" for at, line in lines)]).encode())
        return Done(step, code, time.monotonic() - start, lines)

    def tell(self, words: str) -> None:
        """Progress."""
        print(f"[{time.monotonic() - self.start:5.0f} s] {words}", file=sys.stderr, flush=True)


def kill(process: int) -> None:
    """End a step's process and what it started; its workers end with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def host() -> dict[str, Any]:
    """The cards and versions of this host, from a process of its own: this one opens no GPU."""
    program = (
        "import json, platform, torch; from verify.adapters.packages import installed; "
        "names = ('triton', 'fla-core', 'hypothesis'); "
        "cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]; "
        "print(json.dumps({'cards': cards, 'versions': {'python': platform.python_version(), 'torch': torch.__version__, "
        "'cuda': torch.version.cuda, **{name: installed(name) for name in names}}}))"
    )
    done = subprocess.run([PYTHON, "-c", program], cwd=gpu_record.ROOT, capture_output=True, text=True, check=True)
    description: dict[str, Any] = json.loads(done.stdout)
    return description


def main() -> int:
    """Run the gate; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=pathlib.Path, default=RECORD, help="where the record is written (default docs/gpu.json)")
    options = parser.parse_args()
    count = devices.gpus()
    if not count:
        print("gdn-verify: the GPU gate needs a GPU, and torch sees none", file=sys.stderr)
        return 3
    about, digest = host(), gpu_record.sources()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, Gate(pathlib.Path(folder)) as gate:
        for stage in lanes(count):
            gate.stage(stage)
    if count == 1:
        missing = {step.what for stage in lanes(2) for _, steps in stage for step in steps} - {
            step.step.what for step in gate.done.values()
        }
        gate.rows += [Row(what, NOT_RUN, "needs two GPUs") for what in sorted(missing)]
    seconds = time.monotonic() - gate.start
    cases = sum(done.cases for name, done in gate.done.items() if name in DISTRIBUTED_STEPS)
    if count > 1:
        gate.rows.append(
            Row("distributed cases, no false alarm", PASSED if cases >= DISTRIBUTED else FAILED, str(cases), str(DISTRIBUTED))
        )
    shown(gate.rows, seconds, about)
    if any(row.verdict == FAILED for row in gate.rows):
        return 1
    complete = not any(row.verdict == NOT_RUN for row in gate.rows)
    passed = {
        "sources": digest,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "complete": complete,
        **about,
        "seconds": round(seconds, 1),
        "counts": {"distributed cases": cases, "rows": len(gate.rows)} if count > 1 else {"rows": len(gate.rows)},
        "verdicts": [{**dataclasses.asdict(row), "seconds": round(row.seconds, 1)} for row in gate.rows],
    }
    written(passed, options.record)
    return 0


def shown(rows: Sequence[Row], seconds: float, about: dict[str, Any]) -> None:
    """The table."""
    table = Table("what", "verdict", "figure", "must", "seconds", title=f"GPU gate on {', '.join(about['cards'])}: {seconds:.0f} s")
    for row in rows:
        table.add_row(row.what, row.verdict, row.figure, row.must, f"{row.seconds:.0f}")
    Console(width=140).print(table)


def written(record: dict[str, Any], path: pathlib.Path) -> None:
    """The record in its file, beside those of the same sources on other cards; one of everything is not replaced by a part."""
    try:
        before = gpu_record.read(path)
    except ValueError:
        before = {}
    if before.get("sources") == record["sources"]:
        if before["complete"] and not record["complete"]:
            print(f"{path} keeps the record of a gate with all steps, of the same sources", file=sys.stderr)
            return
        earlier = [entry for entry in (before, *before.pop("earlier", [])) if entry["cards"] != record["cards"]]
        record = {**record, "earlier": earlier} if earlier else record
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
