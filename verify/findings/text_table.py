"""Tables as lines of text, for pipes and files as well as for terminals."""

import io
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDEST = 10_000  # columns of characters: a line of a table is never broken


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table, its header first. The columns whose numbers are in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(header):
        table.add_column(Text(name), justify="right" if place in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # Text, because brackets in a cell are no markup
    console = Console(file=io.StringIO(), width=WIDEST, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
