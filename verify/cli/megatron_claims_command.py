"""The verb `claims` for pull requests of Megatron-LM: settle what they claim on the released code of their authors."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from verify.adapters.packages import installed
from verify.claims import megatron_claims as claims
from verify.claims.releases import NoRelease, Releases, check_releases, folders_of
from verify.claims.ruling import HEAD, UNDECIDED, Ruling, commands
from verify.claims.setting import FULL_EFFORT, LEAST_EFFORT, QUICK_EFFORT
from verify.claims.table import markdown, table
from verify.cli import exits
from verify.cli.arguments import CONFIGURATIONS, PULLS
from verify.cli.hosts import device_of
from verify.cli.output import check_writable, write_file
from verify.cli.terminal import print_error, print_line, write
from verify.cli.verb_options import ClaimsOptions

WIDTH = 200  # columns of the table, if stdout is no terminal


def act(options: ClaimsOptions) -> int:
    """Settle the claims and report. Returns the exit code. ValueError for a claim that is none of a pull request."""
    chosen = sorted({*(options.claim or PULLS)})
    if others := [claim for claim in chosen if claim not in PULLS]:
        raise ValueError(
            f"--claim must be one of {', '.join(map(str, PULLS))} with --megatron or beside one of them, got {others[0]}"
        )
    check_writable("--json", options.json)
    device, folders = device_of(options.device), folders_of(options.releases)
    try:
        check_releases(folders, sorted({version for claim in chosen for version in claims.NEEDED[claim]}))
    except NoRelease as error:
        print_error(str(error))
        return exits.UNDECIDED
    about, rows = host(device), list[Ruling]()
    start, interrupted, written = time.monotonic(), False, True

    def tell(words: str) -> None:
        print_line(f"{time.monotonic() - start:6.1f} s  {words}", sys.stderr)

    # One configuration is enough to judge results, and saves compilation.
    limits = (0, 0) if device == "cpu" else (1, CONFIGURATIONS if options.quick else 0)
    with Releases(folders, device, *limits) as releases:
        bench = bench_of(releases, tell, options.releases or "", quick=options.quick)
        try:
            for claim in chosen:
                for row in claims.attempted(claim, bench):
                    rows.append(row)
                    written = _write(options.json, {**about, "releases": folders, "interrupted": False}, rows)
        except KeyboardInterrupt:
            interrupted = True
            written = _write(options.json, {**about, "releases": folders, "interrupted": True}, rows)
    _print(about["text"], rows, as_markdown=options.markdown)
    if interrupted:
        print_line("interrupted: not every claim was settled")
        return exits.INTERRUPTED
    code = exit_code(rows)
    return exits.UNDECIDED if code == exits.HOLDS and not written else code


def bench_of(releases: Releases, tell: Callable[[str], None], place: str, *, quick: bool) -> claims.Bench:
    """The sizes and the effort for this host's device."""
    if releases.device == "cpu":
        return claims.Bench(releases, claims.INTERPRETED, LEAST_EFFORT, tell=tell, place=place)
    extent, effort = (claims.QUICKLY, QUICK_EFFORT) if quick else (claims.ON_GPUS, FULL_EFFORT)
    return claims.Bench(releases, extent, effort, torch.cuda.device_count(), tell, place)


def _print(about: str, rows: Sequence[Ruling], *, as_markdown: bool) -> None:
    print_line(about)
    if as_markdown:
        write(markdown(rows, HEAD), sys.stdout)
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table(rows, HEAD))
    print_line(commands(rows))


def exit_code(rows: Sequence[Ruling]) -> int:
    """The exit code: 1 if a claim is wrong; 3 if nothing is decided, or less than this host could decide; otherwise 0."""
    if any(row.broken for row in rows):
        return exits.BROKEN
    failed = any(row.verdict == UNDECIDED and not row.lacking for row in rows)
    return exits.UNDECIDED if failed or all(row.verdict == UNDECIDED for row in rows) else exits.HOLDS


def host(device: str) -> dict[str, Any]:
    """The device and the versions on which the measurements depend."""
    versions = {name: installed(name) for name in ("torch", "triton", "fla-core", "causal-conv1d")}
    name = "a CPU, with interpreted kernels"
    if device == "cuda":
        count = torch.cuda.device_count()
        name = (f"{count} x " if count > 1 else "") + torch.cuda.get_device_name()
    text = f"{name}; " + ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    return {"device": name, "versions": versions, "text": text}


def _write(place: str | None, about: dict[str, Any], rows: Sequence[Ruling]) -> bool:
    """Write the rows so far, if a file was named. Returns whether that worked."""
    return place is None or write_file(place, json.dumps({**about, "rows": [row.to_json() for row in rows]}, indent=1))
