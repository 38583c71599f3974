"""The verb `list`: operations, laws, adapters, and what this host can run."""

import json
from typing import Any

from oracles.operations import OPERATIONS
from properties.books import BOOKS, every_law
from properties.paths.domain import PathDomain
from verify.adapters.registry import BUILT_IN, AdapterError
from verify.cli import zoo_command as command
from verify.cli.exits import HOLDS
from verify.cli.output import print_json
from verify.cli.terminal import print_line
from verify.cli.verb_options import ListOptions
from verify.engine.asking import describe
from verify.engine.profiles import PROFILES
from verify.findings.records.schema import schema
from verify.gpu import record as gpu_record
from verify.process.worker import Worker


def list_all(options: ListOptions) -> int:
    """Print operations, laws, adapters and the state of this host. Returns the exit code."""
    if options.schema:
        print_line(json.dumps(schema(), indent=2))
        return HOLDS
    adapters: dict[str, Any] = {}
    with Worker() as worker:
        for name in BUILT_IN:
            try:
                description = describe(name, worker, runs=False)
                adapters[name] = {
                    "runs": True,
                    "shared": isinstance(description.domain, PathDomain),
                    "algorithm": description.algorithm,
                    "versions": description.versions,
                    "domain": description.domain.to_json(),
                }
            except AdapterError as error:
                adapters[name] = {"runs": False, "reason": str(error)}
    if options.json:
        laws = {law.name: {"kind": law.kind, "says": law.says} for law in every_law().values()}
        books = {book.name: {"operations": book.operations, "laws": list(book.laws)} for book in BOOKS}
        print_json(
            {
                "operations": list(OPERATIONS),
                "laws": laws,
                "books": books,
                "adapters": adapters,
                "profiles": {p.name: p.examples for p in PROFILES.values()},
                "gpu_gate": gpu_record.status(),
            }
        )
        return HOLDS
    print_line("operations")
    for operation in OPERATIONS.values():
        ports = [f"{port.name} [{', '.join(port.axes.split())}]" for port in operation.inputs]
        oracle_only = "" if any(operation.name in book.operations for book in BOOKS) else "  (oracle and bounds only)"
        print_line(f"  {operation.name}: {', '.join(ports)} -> {', '.join(port.name for port in operation.outputs)}{oracle_only}")
    for book in BOOKS:
        print_line(f"\nlaws of {book.name} (truth: row by row against the float64 truth; exact: bit for bit)")
        print_line(f"  of {', '.join(book.operations)}")
        for law in book.laws.values():
            some = f" ({', '.join(law.about)})" if {*law.about} not in (set(), {*book.operations}) else ""
            print_line(f"  {law.name:<10} {law.kind:<6} {law.says}{some}")
    print_line("\nadapters on this host")
    for name, description in adapters.items():
        if description["runs"]:
            backward = "forward and backward" if description["domain"].get("backward") else "forward"
            alone = "--ranks N" if description["domain"].get("processes") else "ranks simulated, or --ranks N"
            where = alone if description["shared"] else "interpreted on the CPU"
            print_line(f"  {name:<20} {description['algorithm']}, {backward}; {description['versions']}; {where}")
        else:
            print_line(f"  {name:<20} cannot run: {description['reason']}")
    print_line(f"  {command.listed()}")
    print_line("  my_kernel.py:MyKernel  your own, in any file")
    print_line(f"\n{gpu_record.status()}")
    return HOLDS
