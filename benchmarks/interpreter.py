"""The interpreter: every launch of some cases, with all programs together and one after another, side by side.

    python -m benchmarks.interpreter fla/chunk fla/chunk_kda --cases 24

It prints, for each kernel and size of its grid, the CPU seconds of both ways and how many launches left other bits. Both ways start
from the same memory. The exit code is 1 if any bit differs, and 3 if programs could not run together.
"""

import argparse
import collections
import dataclasses
import math
import os
import sys
import time
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import records
from properties.books import book_of
from verify.adapters.loader import load
from verify.engine.drawing import seeded
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.interpreter import install, patches
from verify.interpreter.internals import get, put


@dataclasses.dataclass
class Row:
    """The launches of a kernel on grids of about one size."""

    launches: int = 0
    programs: int = 0
    together_s: float = 0.0
    apart_s: float = 0.0
    different: int = 0  # launches that left other bits


def main() -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", nargs="+")
    parser.add_argument("--cases", type=int, default=24, help="cases of the oracle law of each adapter (default 24)")
    parser.add_argument("--seed", type=int, default=0)
    options = records.options_of(parser)
    install()
    torch.set_num_threads(1)
    from verify.interpreter import launch

    rows = measured()
    runs = [run for adapter in options.adapter for run in drawn(adapter, options.cases, options.seed)]
    for run in track(runs, "cases", console=Console(stderr=True)):
        execute(run)
    print_table(rows)
    record(options, rows)
    for reason, count in launch.one_by_one.items():
        print(f"one after another: {reason} ({count} launches)")
    different = sum(row.different for row in rows.values())
    print(f"{len(runs)} cases, {sum(row.launches for row in rows.values())} launches, {different} of them with other bits")
    return 1 if different else 3 if launch.one_by_one else 0


def drawn(adapter: str, cases: int, seed: int) -> list[Run]:
    """Runs of cases of the adapter's law `oracle`."""
    domain, runs = load(adapter).domain, list[Run]()
    law = book_of(domain).laws["oracle"]
    seeded(law.draw(domain), seed, cases, lambda example: runs.append(Run("oracle", adapter, example)))
    return runs


def measured() -> dict[tuple[str, int], Row]:
    """Make every launch run both ways from now on. Returns the measurements by kernel and number of programs.

    The number of programs is rounded down to a power of two.
    """
    plain = get("GridExecutor.__call__")
    rows: dict[tuple[str, int], Row] = collections.defaultdict(Row)

    def timed(how: str, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        patches.sequential = how == "sequential"
        start = time.process_time()
        plain(executor, *args, **kwargs)
        return time.process_time() - start

    def call(executor: Any, *args: Any, **kwargs: Any) -> None:
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in tensors([*args, *kwargs.values()])}
        memories = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
        before = [memory.clone() for memory in memories]
        apart_s = timed("sequential", executor, args, kwargs)
        want = [memory.clone() for memory in memories]
        for memory, old in zip(memories, before, strict=True):
            memory.copy_(old)
        together_s = timed("grid", executor, args, kwargs)
        programs = math.prod(executor.grid)
        row = rows[executor.fn.__name__, programs.bit_length() - 1 if programs else 0]
        row.launches += 1
        row.programs += programs
        row.apart_s += apart_s
        row.together_s += together_s
        row.different += not all(torch.equal(*pair) for pair in zip(memories, want, strict=True))

    put("GridExecutor.__call__", call)
    return rows


def tensors(values: list[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments, and in tuples among them."""
    return [
        part for value in values for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, torch.Tensor)
    ]


def print_table(rows: dict[tuple[str, int], Row]) -> None:
    """Print a line for each kernel and size of grid, and one for the sum."""
    table = Table("kernel", "programs", "launches", "one by one s", "together s", "faster", "other bits", box=None)
    whole = Row()
    for (kernel, power), row in sorted(rows.items()):
        add(table, kernel, f"{1 << power}-{(2 << power) - 1}", row)
        for field in dataclasses.fields(Row):
            setattr(whole, field.name, getattr(whole, field.name) + getattr(row, field.name))
    add(table, "all", "", whole)
    Console(width=140).print(table)


SIZES = {"1 program": (0, 0), "2 to 7": (1, 2), "8 to 31": (3, 4), "32 to 127": (5, 6), "128 and more": (7, 99)}  # by powers of two


def record(options: argparse.Namespace, rows: dict[tuple[str, int], Row]) -> None:
    """Put all kernels and the two that take longest one by one into the file of --record."""
    by_kernel = collections.defaultdict[str, dict[int, list[Row]]](lambda: collections.defaultdict(list))
    every = f"all {len({kernel for kernel, _ in rows})} kernels"
    for (kernel, power), row in rows.items():
        by_kernel[f"`{kernel}`"][power].append(row)
        by_kernel[every][power].append(row)

    def total(powers: dict[int, list[Row]], name: str, low: int = 0, high: int = 99) -> Any:
        return sum(getattr(row, name) for power, several in powers.items() if low <= power <= high for row in several)

    def faster(powers: dict[int, list[Row]], *limits: int) -> float | str:
        together = total(powers, "together_s", *limits)
        return float(total(powers, "apart_s", *limits) / together) if together else ""

    slowest = sorted(by_kernel, key=lambda name: total(by_kernel[name], "apart_s"), reverse=True)
    columns = {"launches": "launches", "one by one, CPU s": "apart_s", "together, CPU s": "together_s"}
    measured = {
        name: {
            "sample": f"{len(options.adapter)} adapter{'s' * (len(options.adapter) > 1)}",
            "value": {column: total(by_kernel[name], field) for column, field in columns.items()}
            | {"faster": faster(by_kernel[name])}
            | {size: faster(by_kernel[name], *limits) for size, limits in SIZES.items()}
            | {"other bytes": total(by_kernel[name], "different")},
        }
        for name in [every, *(name for name in slowest if name != every)][:3]
    }
    records.put(options, "interpreter", measured, decimals=1, whole=True)


def add(table: Table, kernel: str, programs: str, row: Row) -> None:
    """Add a row to the table."""
    faster = f"{row.apart_s / row.together_s:.1f}" if row.together_s else ""
    table.add_row(kernel, programs, str(row.launches), f"{row.apart_s:.2f}", f"{row.together_s:.2f}", faster, str(row.different))


if __name__ == "__main__":
    sys.exit(main())
