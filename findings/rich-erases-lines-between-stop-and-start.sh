#!/bin/sh
# rich 15.0.0: lines that are printed between Progress.stop() and Progress.start() are erased.
#
# A progress display of three tasks is stopped, three lines are printed, and it is started again. The
# second and third line disappear from the terminal. With one task all lines stay. The display
# remembers how many rows it had when it was stopped, and start() moves the cursor up by as many,
# over whatever was printed since. It does so with transient=True and without it. Nothing says that a
# display must not be started again, or that nothing may be printed while it is stopped.
#
# Seen on 27 November 2026 with Python 3.11, with pyte 0.8.2 as the terminal.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q rich==15.0.0 pyte==0.8.2
environment/bin/python - <<'END'
import io

import pyte
from rich.console import Console
from rich.progress import Progress


def shown(tasks, transient):
    """The printed lines that a terminal of 60 columns and 20 rows shows in the end."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=20)
    progress = Progress(console=console, transient=transient)
    for task in range(tasks):
        progress.add_task(f"task {task}", total=10)
    progress.start()
    progress.stop()
    for number in range(3):
        console.print(f"line {number}")
    progress.start()
    progress.stop()
    screen = pyte.Screen(60, 20)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    return [row.strip() for row in screen.display if row.startswith("line")]


found = {(tasks, transient): shown(tasks, transient) for tasks in (1, 3) for transient in (True, False)}
for (tasks, transient), lines in found.items():
    print(f"{tasks} tasks, transient={transient}: of line 0, line 1, line 2 the terminal shows {', '.join(lines)}")
every = ["line 0", "line 1", "line 2"]
expected = {(1, True): every, (1, False): every, (3, True): every[:1], (3, False): every[:1]}
raise SystemExit(found != expected)
END
