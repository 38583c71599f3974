"""The verb `claims`: measure and judge published changes, and print the table."""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console

from verify.adapters.fla import core
from verify.adapters.packages import installed
from verify.bench.faults import short
from verify.claims import decode_claims as decode
from verify.claims import exchange_claims as exchange
from verify.claims import kernel_claims as kernels
from verify.claims import layer_claims as layers
from verify.claims import serving_claims as serving
from verify.claims.setting import FULL_EFFORT, LEAST_EFFORT, QUICK, QUICK_EFFORT, REAL, TINY, Setting
from verify.claims.table import Row, markdown, rounds_of, table
from verify.claims.timing import clock_of
from verify.claims.tuning import limit_tuning
from verify.cli import megatron_claims_command as megatron
from verify.cli.arguments import CLAIMS, CONFIGURATIONS, PULLS
from verify.cli.exits import BROKEN, HOLDS, INTERRUPTED, UNDECIDED
from verify.cli.output import check_writable, write_file
from verify.cli.terminal import print_error, print_line, write
from verify.cli.verb_options import ClaimsOptions

WIDTH = 220  # columns of the table, if stdout is no terminal
Part = Callable[[Setting], Iterator[Row]]
PARTS: dict[int, tuple[tuple[str, Part], ...]] = {
    1: (
        (CLAIMS[1], kernels.conv),
        ("convolution of packed sequences", kernels.packed_conv),
        ("the layer, convolution and norm changed", layers.refined),
    ),
    2: ((CLAIMS[2], kernels.norms), ("one norm for two, heads repeated", kernels.repeated_norms)),
    3: ((CLAIMS[3], kernels.in_kernel),),
    4: ((CLAIMS[4], exchange.exchanged),),
    5: (
        (CLAIMS[5], decode.decode),
        ("blocks of SGLang's kernels, equal bits", serving.right),
        ("blocks of SGLang's kernels, times", serving.fast),
    ),
    6: ((CLAIMS[6], layers.flops),),
}


def act(options: ClaimsOptions) -> int:
    """Measure and report. Returns the exit code."""
    if options.megatron or {*(options.claim or ())} & {*PULLS}:
        return megatron.act(options)
    device = options.device or "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print_error("claims need a GPU, and torch sees none")
        return UNDECIDED
    check_writable("--json", options.json)
    _prepare_kernels(device, quick=options.quick)
    rows: list[Row] = []
    properties = host(device)
    start, interrupted, written = time.monotonic(), False, True

    def tell(words: str) -> None:
        print_line(f"{time.monotonic() - start:6.1f} s  {words}", sys.stderr)

    setting = _setting(device, tell, quick=options.quick)
    try:
        for claim in sorted(set(options.claim or PARTS)):
            for name, part in PARTS[claim]:
                tell(f"claim {claim}: {name}")
                rows += attempted(claim, name, part, setting)
                written = _write(options.json, properties, rows, interrupted=False)
    except KeyboardInterrupt:
        interrupted = True
        written = _write(options.json, properties, rows, interrupted=True)
    print_line(f"{properties['text']}{', quick' if options.quick else ''}")
    if options.markdown:
        write(markdown(rows), sys.stdout)
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table(rows))
    print_line("\n".join(filter(None, [rounds_of(rows), "interrupted: not every claim was measured" if interrupted else ""])))
    code = INTERRUPTED if interrupted else exit_code(rows)
    return UNDECIDED if code == HOLDS and not written else code


def attempted(claim: int, name: str, part: Part, setting: Setting) -> list[Row]:
    """The rows of a part. If the part fails, the last row has the reason."""
    rows: list[Row] = []
    try:
        for row in part(setting):
            rows.append(row)  # noqa: PERF402 - those before a failure are kept
    except Exception as error:
        memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        what = "out of memory" if memory else f"{type(error).__name__}: {short(error)}"
        rows.append(Row(claim, name, reason=what))
        setting.tell(f"claim {claim}: {name}: {what}")
    if setting.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def exit_code(rows: Sequence[Row]) -> int:
    """The exit code: 1 if a form is wrong; 3 if nothing was measured or a part failed; otherwise 0."""
    if any(row.broken for row in rows):
        return BROKEN
    failed = any(not row.measured and not row.lacking for row in rows)
    return UNDECIDED if failed or not any(row.measured for row in rows) else HOLDS


def host(device: str) -> dict[str, Any]:
    """The properties of this host on which the measured numbers depend."""
    versions = {name: installed(name) for name in ("torch", "triton", "fla-core", "sglang")}
    name = (
        torch.cuda.get_device_name() if device == "cuda" else "a CPU, with interpreted kernels: these times do not hold for a GPU"
    )
    text = f"{name}; " + ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    return {"device": name, "versions": versions, "text": text}


def _setting(name: str, tell: Callable[[str], None], *, quick: bool) -> Setting:
    device = torch.device(name, 0) if name == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        return Setting(TINY, clock_of(device), LEAST_EFFORT, device, tell)
    sizes, effort = (QUICK, QUICK_EFFORT) if quick else (REAL, FULL_EFFORT)
    return Setting(sizes, clock_of(device), effort, device, tell)


def _prepare_kernels(device: str, *, quick: bool) -> None:
    """Prepare kernels: interpret them on a CPU, and with `quick` limit autotuning to few configurations."""
    if device == "cpu":
        from verify.interpreter import install

        install()
    if installed("fla-core"):
        core()
        if quick and device != "cpu":
            limit_tuning(CONFIGURATIONS)


def _write(place: str | None, properties: dict[str, Any], rows: Sequence[Row], *, interrupted: bool) -> bool:
    """Write the rows so far, if a file was named. Returns whether that worked."""
    data = {**properties, "interrupted": interrupted, "rows": [row.to_json() for row in rows]}
    return place is None or write_file(place, json.dumps(data, indent=1))
