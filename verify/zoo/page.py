"""The HTML page of a kill table: one self-contained file, made from the table's JSON. It needs the extra `zoo`."""

import collections
import io
import math
import pathlib
import re
from typing import Any

from verify.findings.records.page import environment

NEEDS = "--html needs jinja2 and matplotlib, which are not installed: pip install 'gdn-verify[zoo]'"
INK, ACCENT, PALE = "#1d2733", "#0b5d7a", "#d7e6ec"


def check() -> None:
    """Check that the page can be made. ValueError, in one line, if a package is missing."""
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(NEEDS) from None
    assert jinja2


def page(data: dict[str, Any]) -> str:
    """The page of a table's JSON (verify/zoo/kill_table.py). It refers to no other file or address."""
    return (
        environment(pathlib.Path(__file__).parent)
        .get_template("page.html.j2")
        .render(
            data=data,
            matrices=matrices(data),
            rules=rules(data),
            plots=plots(data),
            animals={a["name"]: a for a in data["animals"]},
        )
    )


def matrices(data: dict[str, Any]) -> list[dict[str, Any]]:
    """For each book its laws as columns, and a row for each animal with a cell for each law.

    A cell has a state, a text, a shade from 1 (killed by the first case) down to 0, and a title.
    """
    result = []
    for book, laws in data["laws"].items():
        animals = [animal for animal in data["animals"] if animal["book"] == book]
        asked = {cell["law"] for animal in animals for cell in animal["laws"]}
        columns = [law for law in laws if law["name"] in asked]
        rows = [
            {"animal": animal, "cells": [_cell(next(c for c in animal["laws"] if c["law"] == law["name"])) for law in columns]}
            for animal in animals
        ]
        result.append({"book": book, "columns": columns, "rows": rows})
    return result


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    state = cell["state"]
    if state == "killed":
        title = f"{cell['law']} kills it in case {cell['killed_at']} ({cell['seconds']:.2f} s): {cell['what']}"
        return {"state": state, "text": str(cell["killed_at"]), "shade": shade(cell["killed_at"]), "title": title}
    reason = f": {cell['reason']}" if cell["reason"] else ""
    title = f"{cell['law']}: {state}{reason}, {cell['asked']} cases" if cell["asked"] else f"{cell['law']}: {state}{reason}"
    return {"state": state.replace(" ", "-"), "text": {"alive": "·", "undecided": "?"}.get(state, ""), "shade": 0.0, "title": title}


def shade(number: int) -> float:
    """The shade of a kill: 1 for the first case, 0.1 less for each doubling of the number of cases, at least 0.2."""
    return max(0.2, 1.0 - 0.1 * math.log2(number))


def rules(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each animal that suites judged, with a cell for each suite."""
    rows = []
    for animal in data["animals"]:
        if any(animal["name"] in suite["killed_at"] for suite in data["suites"]):
            cells = []
            for suite in data["suites"]:
                number = suite["killed_at"].get(animal["name"])
                what = suite["what"].get(animal["name"], "")
                title = f"{suite['suite']}: " + (f"rejected in case {number}: {what}" if number else "accepted")
                state = "alive" if not number else "void" if suite["rejects_right"] else "killed"
                dark = shade(number) if state == "killed" else 0.0
                cells.append({"state": state, "text": str(number or "lives"), "shade": dark, "title": title})
            rows.append({"animal": animal, "cells": cells})
    return rows


def plots(data: dict[str, Any]) -> dict[str, str]:
    """The plots by title, as SVG for the page: cases until the kill, laws that kill an animal, and kills of each law."""
    first = [cells[0] for animal in data["animals"] if (cells := sorted(_numbers(animal)))]
    every = [number for animal in data["animals"] for number in _numbers(animal)]
    images = {}
    if first:
        images["Cases to the first kill, and to every kill"] = _cumulative(first, every)
        images["Laws that kill an animal"] = _histogram(collections.Counter(len(_numbers(animal)) for animal in data["animals"]))
        images["Kills by law"] = _bars(data["summary"]["kills_of_law"])
    return images


def _numbers(animal: dict[str, Any]) -> list[int]:
    return [cell["killed_at"] for cell in animal["laws"] if cell["killed_at"] is not None]


def _figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "zoo",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": INK,
            "text.color": INK,
        }
    )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any, label: str) -> str:
    """The figure as SVG inside HTML: without the prologue, the metadata and the namespaces of a separate file."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _cumulative(first: list[int], every: list[int]) -> str:
    figure, axes = _figure(5.2, 2.6)
    for numbers, label, colour in ((first, "an animal's first kill", ACCENT), (every, "every law that kills it", "#c2703d")):
        ordered = sorted(numbers)
        shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step([0.9, *ordered, max(every) * 1.1], [0, *shares, 100], where="post", color=colour, label=label)
    axes.set(xscale="log", xlabel="cases drawn", ylabel="% killed", ylim=(0, 104))
    ticks = [number for number in (1, 2, 4, 8, 16, 32, 64, 128) if number <= max(2, 2 * max(every))]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    return _svg(figure, "share of animals killed by the number of cases")


def _bars(kills: dict[str, int]) -> str:
    figure, axes = _figure(5.2, max(2.0, 0.2 * len(kills) + 0.6))
    names = list(kills)[::-1]
    axes.barh(names, [kills[name] for name in names], color=[ACCENT if kills[name] else PALE for name in names])
    axes.bar_label(axes.containers[0], padding=2)
    axes.set(xlabel="animals killed")
    axes.margins(y=0.01)
    return _svg(figure, "animals killed by each law")


def _histogram(counts: "collections.Counter[int]") -> str:
    figure, axes = _figure(5.2, 2.4)
    axes.bar(list(counts), list(counts.values()), color=["#b3261e" if laws == 0 else ACCENT for laws in counts])
    axes.set(xlabel="laws that kill it", ylabel="animals")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    return _svg(figure, "how many laws kill an animal")
