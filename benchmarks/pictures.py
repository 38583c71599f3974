"""The pictures of the pages, beside the figure of docs/explanation/rounding_figure.py.

    python -m benchmarks.pictures           draw all of them
    python -m benchmarks.pictures holds     draw one

Run this in the root of a clone. It needs matplotlib, the extra `zoo`; `page` needs the extra `browser` and a Chromium. Pictures
have a white background of their own, so they can be read in a dark theme too.
"""

import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

from benchmarks.records import ROOT
from docs.explanation import rounding_figure

INK, LINE, PAPER = "#1d2733", "#6b7885", "#ffffff"
BLUE, GREEN, RED, AMBER, GREY = "#d7e6ec", "#d8ecd9", "#f6d5d0", "#f8e8c4", "#ebedf0"
DOCS = ROOT / "docs"
KILLS = DOCS / "zoo.json"  # which laws noticed the wrong implementation of each incident, and in which case


def canvas(width: float, height: float, columns: float, rows: float) -> tuple[Figure, Any]:
    """A figure of so many inches, whose axes count from the upper left corner and have no ticks."""
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.axis("off")
    return figure, axes


def box(axes: Any, x: float, y: float, width: float, height: float, words: str, colour: str = BLUE, **style: Any) -> None:
    """A box whose upper left corner is at x, y, with words in its middle."""
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=colour, edgecolor=LINE, linewidth=0.8))
    axes.text(x + width / 2, y + height / 2, words, ha="center", va="center", color=INK, **{"fontsize": 9, **style})


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], words: str = "", **style: Any) -> None:
    """An arrow, with words at its middle. `dx` and `dy` move the words."""
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": LINE, "linewidth": 1.2})
    if words:
        x, y = (start[0] + end[0]) / 2 + style.pop("dx", 0), (start[1] + end[1]) / 2 + style.pop("dy", 0)
        axes.text(x, y, words, color=INK, **{"fontsize": 8.5, "ha": "center", "va": "center", **style})


def row() -> Figure:
    """README: the error of each row over its tolerance, in a call of which one ratio for the whole tensor sees nothing."""
    example = rounding_figure.example()
    ratios = example.wrong / example.allowed
    figure = Figure(figsize=(7.2, 2.5), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    wrong = rounding_figure.ROW
    right = [token for token in range(rounding_figure.TOKENS) if token != wrong]
    axes.plot(right, ratios[right], ".", color="#0b5d7a", markersize=5)
    axes.plot([wrong], [ratios[wrong]], "X", color="#b3261e", markersize=9)
    axes.axhline(1, color=INK, linewidth=1)
    axes.text(127, 1.25, "tolerance of each row", ha="right", va="bottom", fontsize=9, color=INK)
    axes.annotate(
        f"token {wrong}: {float(ratios[wrong]):.0f} times its tolerance",
        (wrong, float(ratios[wrong])),
        xytext=(wrong + 3, float(ratios[wrong])),
        va="center",
        fontsize=9,
        color="#b3261e",
    )
    whole = example.of_the_tensor(example.wrong)
    title = f"One ratio for the whole tensor: {whole:.2%} of its norm, so a limit of {rounding_figure.RATIO:.1%} accepts it"
    axes.set_title(title, fontsize=9.5, color=INK, loc="left")
    axes.set(yscale="log", xlabel="token", ylabel="error / tolerance", xlim=(-2, 129), ylim=(0.02, 40))
    axes.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def rooms() -> Figure:
    """map.md: the rooms in the order of their imports, as the tables of that page have them."""
    page = (DOCS / "map.md").read_text(encoding="utf-8")
    floors = {
        "oracles/": ("what is right", BLUE),
        "properties/": ("what must hold", GREEN),
        "verify/": ("who is checked, where and how", AMBER),
    }
    names = {floor: re.findall(rf"(?m)^\| `{floor}(\S+)` \|", page) for floor in floors}
    most = max(map(len, names.values()))
    figure, axes = canvas(8.4, 5.0, 8.4, most * 0.3 + 1.25)
    for number, (floor, (words, colour)) in enumerate(floors.items()):
        left = 0.25 + 2.75 * number
        axes.text(left + 1.2, 0.2, floor, ha="center", fontsize=11, color=INK, weight="bold")
        axes.text(left + 1.2, 0.42, words, ha="center", fontsize=8.5, color=INK)
        for place, name in enumerate(names[floor]):
            box(axes, left, 0.58 + 0.3 * place, 2.4, 0.25, name, colour, fontsize=8)
        if number:
            arrow(axes, (left - 0.03, 0.7), (left - 0.32, 0.7))
    words = "A room imports only rooms above it in its column, and rooms of the columns to its left."
    axes.text(4.2, most * 0.3 + 0.95, words, ha="center", va="center", fontsize=9, color=INK)
    return figure


def workers() -> Figure:
    """workers.md: the processes of a check and what passes between them."""
    figure, axes = canvas(8.4, 4.3, 8.4, 4.3)
    box(axes, 0.2, 0.5, 2.2, 1.6, "supervisor\n\ndraws cases,\nholds the clock,\nwrites the report", GREEN)
    box(axes, 0.2, 2.85, 2.2, 0.75, "fork server\nhas imported torch", GREY)
    box(axes, 5.6, 0.2, 2.6, 1.25, "worker\n\ncalls the implementation,\njudges it with the oracle", BLUE)
    box(axes, 5.6, 1.75, 2.6, 0.75, "worker with a GPU,\nstarted by itself", BLUE)
    box(axes, 5.6, 2.85, 2.6, 0.75, "more workers without a GPU,\nranks of a path", BLUE)
    arrow(axes, (2.45, 0.6), (5.55, 0.6), "pipe: a question, the line of a case", dy=-0.13)
    arrow(axes, (5.55, 1.05), (2.45, 1.05), "second pipe: the answer", dy=0.14)
    arrow(axes, (2.45, 1.9), (5.55, 1.9), "the same two pipes for each worker", dy=0.14)
    arrow(axes, (1.3, 2.15), (1.3, 2.8), "asks for a worker", dx=0.12, ha="left")
    arrow(axes, (2.45, 3.22), (5.55, 3.22), "forks, in 0.011 s", dy=-0.13)
    words = "A crash or a hang ends one worker. The supervisor replaces it and goes on."
    axes.text(4.2, 4.0, words, ha="center", va="center", fontsize=9, color=INK)
    return figure


def holds() -> Figure:
    """holds.md: the questions that give a case its verdict."""
    figure, axes = canvas(8.4, 6.0, 8.4, 6.0)
    questions = (
        ("Is the case in the domain?", "unsupported", GREY, "no"),
        ("Did gdn-verify itself work,\nwith enough memory and time?", "UNKNOWN", AMBER, "no"),
        ("Could the case have shown\na defect of the law?", "BLIND", GREY, "no"),
        ("Is every row within its tolerance,\nor equal bit for bit?", "HOLDS", GREEN, "yes"),
        ("If it crashed or hung:\ndoes it do so again in a fresh worker?", "UNKNOWN", AMBER, "no"),
        ("Does a known defect explain it?", "KNOWN", GREY, "yes"),
    )
    step = 0.85
    for number, (question, verdict, colour, answer) in enumerate(questions):
        top = 0.2 + step * number
        box(axes, 0.3, top, 4.3, 0.6, question, BLUE)
        box(axes, 6.3, top + 0.08, 1.8, 0.44, verdict, colour, weight="bold")
        arrow(axes, (4.65, top + 0.3), (6.25, top + 0.3), answer, dy=-0.13)
        other = "yes" if answer == "no" else "no"
        arrow(axes, (2.45, top + 0.63), (2.45, top + step - 0.02), other, dx=0.12, ha="left")
    box(axes, 1.55, 0.2 + step * len(questions), 1.8, 0.44, "BROKEN", RED, weight="bold")
    return figure


def zoo() -> Figure:
    """zoo.md: the laws that notice the wrong implementation of each incident, and in which case."""
    kills: Mapping[str, Mapping[str, int]] = json.loads(KILLS.read_text(encoding="utf-8"))["animals"]
    counts: dict[str, int] = {}
    for found in kills.values():
        for law in found:
            counts[law] = counts.get(law, 0) + 1
    laws = sorted(counts, key=lambda law: (-counts[law], law))
    names = list(kills)
    figure = Figure(figsize=(0.235 * len(laws) + 2.3, 0.19 * len(names) + 1.5), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    shades = matplotlib.colormaps["YlGnBu"]
    for down, name in enumerate(names):
        for across, law in enumerate(laws):
            case = kills[name].get(law)
            colour = GREY if case is None else shades(max(0.25, 0.95 - 0.1 * case.bit_length()))
            axes.add_patch(Rectangle((across - 0.45, down - 0.45), 0.9, 0.9, facecolor=colour))
    axes.set(xlim=(-0.6, len(laws) - 0.4), ylim=(len(names) - 0.4, -0.6))
    axes.set_xticks(range(len(laws)), laws, rotation=90, fontsize=8, color=INK)
    axes.set_yticks(range(len(names)), names, fontsize=8, color=INK)
    axes.tick_params(length=0, labeltop=True, labelbottom=False, top=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("dark: noticed in the first case; lighter: in a later one; grey: not noticed, or not run", fontsize=8.5)
    return figure


def page() -> Image.Image:
    """read-a-report.md: the upper part of the page of a check, in a browser. The check takes about two minutes."""
    from playwright.sync_api import sync_playwright  # only this picture needs it

    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "page.html")
        words = [word for law in PAGE_LAWS for word in ("--law", law)]
        files = ["--html", str(file), "--findings", folder, "--no-examples"]
        subprocess.run(
            [sys.executable, "-m", "verify", "check", PAGE_ADAPTER, *words, "--seed", "3", *files], cwd=ROOT, check=False
        )
        with sync_playwright() as play, play.chromium.launch(executable_path=shutil.which("chromium")) as browser:
            view = browser.new_page(viewport={"width": 920, "height": 1560}, color_scheme="light")
            view.goto(file.as_uri())
            return Image.open(io.BytesIO(view.screenshot()))


PAGE_ADAPTER, PAGE_LAWS = "zoo/DecayOneTokenEarly", ("heads", "packed", "pure")


# The pictures by the names of their functions, with their files. The pages embed these.
PICTURES: dict[str, tuple[Callable[[], Figure | Image.Image], pathlib.Path]] = {
    "row": (row, DOCS / "one-wrong-row.png"),
    "rooms": (rooms, DOCS / "rooms.png"),
    "workers": (workers, DOCS / "explanation" / "workers.png"),
    "holds": (holds, DOCS / "explanation" / "holds.png"),
    "zoo": (zoo, DOCS / "zoo.png"),
    "page": (page, DOCS / "page.png"),
}


def main() -> int:
    """Draw the pictures that the command names, or all. Returns the exit code."""
    names = sys.argv[1:] or [*PICTURES]
    if unknown := [name for name in names if name not in PICTURES]:
        print(f"benchmarks.pictures: no picture {unknown[0]}, but {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    for name in names:
        draw, path = PICTURES[name]
        image = io.BytesIO()
        with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
            drawn = draw()
            if isinstance(drawn, Figure):
                drawn.savefig(image, dpi=120)
                drawn = Image.open(image)
        drawn.convert("RGB").quantize(64).save(path, optimize=True)
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
