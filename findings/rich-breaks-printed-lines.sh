#!/bin/sh
# rich 15.0.0: while a progress bar runs, a long line that is printed reaches the terminal in pieces.
#
# A program prints one line of 200 characters to a terminal of 80 columns. Without a progress bar the
# terminal gets the line as it is, wraps it on the screen, and gives it back in one piece when a
# person copies it. Inside `with Progress():`, whose default is redirect_stdout=True, rich writes
# line ends after 80 and 160 characters, so a copied line is three lines. A `sys.stdout` that was
# bound before the bar started writes the line behind the bar, on the same row of the screen.
#
# Seen on 27 November 2026 with Python 3.11. Exits with 0 while this is so, and with 1 if it changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q rich==15.0.0
cat > prints.py <<'END'
import sys
from rich.progress import Progress

bound, line, how = sys.stdout, "x" * 199 + "y", sys.argv[1]
if how == "alone":
    print(line)
else:
    with Progress() as progress:
        progress.add_task("work", total=10)
        print(line, file=bound if how == "bound" else sys.stdout)
END
environment/bin/python - <<'END'
import fcntl, os, pty, re, struct, subprocess, termios


def rows(how):
    """The lengths of the stretches of x and y in what a terminal of 80 columns gets, and what stands right before the first."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        ["environment/bin/python", "prints.py", how], stdin=child, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"}
    )
    os.close(child)
    text = b""
    try:
        while part := os.read(parent, 4096):
            text += part
    except OSError:  # Linux says so at the end of a pseudo-terminal
        pass
    process.wait()
    stretches = [*re.finditer(rb"[xy]{20,}", text)]
    return [len(stretch[0]) for stretch in stretches], b"\r\x1b[2K" == text[: stretches[0].start()][-5:]


found = {how: rows(how) for how in ("alone", "inside", "bound")}
for how, (lengths, cleared) in found.items():
    print(f"{how}: the line of 200 arrives as {lengths}" + (", after the bar is cleared" if cleared else ""))
raise SystemExit(found != {"alone": ([200], False), "inside": ([80, 80, 40], True), "bound": ([200], False)})
END
