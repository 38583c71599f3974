"""Reach: what the cases of a check looked at. It is measured in the worker and travels in each outcome.

Its size is bounded: a reach that would be larger leaves the rest out and is marked `full`.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

MOST_FUNCTIONS, MOST_PARAMETERS, MOST_KINDS = 8, 64, 24
MOST_KERNELS, MOST_BLOCKS = 64, 256
DEFAULT = "its default"
NUMBER = "number"
ON_A_GPU = "lines are recorded only on a CPU"  # a reason why no lines of Python were recorded
MOST_FILES, MOST_LINES = 32, 8192


@dataclasses.dataclass
class Values:
    """The values that one parameter got: their kinds in words, and the least and the largest number.

    A kind is "its default" (also if the default was passed), "None", a dtype of tensors such as "bfloat16" or "bfloat16 strided",
    "number", "True", "False", a string in quotes, or the name of a type.
    """

    kinds: set[str] = dataclasses.field(default_factory=set)
    low: float = math.inf
    high: float = -math.inf

    @property
    def passed(self) -> bool:
        """Whether a value other than the default was passed."""
        return bool(self.kinds - {DEFAULT})

    def add(self, other: "Values") -> bool:
        """Add the values of another record. Returns whether all of them had room."""
        kinds = self.kinds | other.kinds
        self.kinds = kinds if len(kinds) <= MOST_KINDS else self.kinds
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        return len(kinds) <= MOST_KINDS


@dataclasses.dataclass
class Reach:
    """What cases looked at.

    - `sizes`: the largest of each size of the cases, by its name in SIZES.
    - `functions`: for each function under test ("package.module:name"), the values that each of its parameters got. A parameter
      that the function takes in `**kwargs` is there if it was passed.
    - `blocks`: for each interpreted Triton function that ran ("package.module:name"), its blocks that may or may not run (bodies of
      branches and of loops, and branches of conditional expressions) and whether each ran. A block is named by its first line in
      the file, a branch of a conditional expression by its line and column.
    - `lines`: for each file of Python around the kernels, which of its lines ran (verify/reach/lines.py).
    - `unrecorded`: why no lines of Python could be recorded; "" if they could.
    - `trouble`: why the function under test could not be recorded; "" if it could.
    - `full`: whether something was left out because there was too much of it.
    """

    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    functions: dict[str, dict[str, Values]] = dataclasses.field(default_factory=dict)
    blocks: dict[str, dict[str, bool]] = dataclasses.field(default_factory=dict)
    trouble: str = ""
    full: bool = False
    lines: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    unrecorded: str = ""

    def __bool__(self) -> bool:
        return bool(self.sizes or self.functions or self.blocks)

    def add(self, other: "Reach") -> None:
        """Add what other cases looked at."""
        self.full |= other.full
        self.trouble = self.trouble or other.trouble
        self.unrecorded = self.unrecorded or other.unrecorded
        for size, value in other.sizes.items():
            self.sizes[size] = max(value, self.sizes.get(size, 0))
        for function, parameters in other.functions.items():
            self.note_call(function, parameters)
        for kernel, blocks in other.blocks.items():
            self.note_blocks(kernel, blocks, [block for block, ran in blocks.items() if ran])
        for file, lines in other.lines.items():
            self.note_lines(file, lines)

    def note_call(self, function: str, parameters: dict[str, Values]) -> None:
        """Add the values of a call."""
        if function not in self.functions and len(self.functions) == MOST_FUNCTIONS:
            self.full = True
            return
        known, left_out = self.functions.get(function, {}), Values({DEFAULT})
        if function in self.functions:  # what a call does not have in its **kwargs was left out
            for name in known.keys() - parameters.keys():
                known[name].add(left_out)
            parameters = {
                name: Values({*values.kinds, *(() if name in known else (DEFAULT,))}, values.low, values.high)
                for name, values in parameters.items()
            }
        self.functions[function] = known
        for name, values in parameters.items():
            if name not in known and len(known) == MOST_PARAMETERS:
                self.full = True
                continue
            self.full |= not known.setdefault(name, Values()).add(values)

    def note_blocks(self, kernel: str, every: Collection[str], ran: Collection[str]) -> None:
        """Add the blocks of a Triton function, and those of them that ran."""
        if kernel not in self.blocks and len(self.blocks) == MOST_KERNELS:
            self.full = True
            return
        blocks = self.blocks.setdefault(kernel, {})
        for block in every:
            if block not in blocks and len(blocks) == MOST_BLOCKS:
                self.full = True
                continue
            blocks[block] = blocks.get(block, False) or block in ran

    def note_lines(self, file: str, lines: Collection[int]) -> None:
        """Add the lines that ran in a file."""
        if file not in self.lines and len(self.lines) == MOST_FILES:
            self.full = True
            return
        known = self.lines.get(file, set()).union(lines)
        self.full |= len(known) > MOST_LINES
        self.lines[file] = set(sorted(known)[:MOST_LINES])

    def to_json(self) -> dict[str, Any]:
        """Plain data. A parameter without numbers has null as its least and its largest number."""
        functions = {
            function: {
                name: {
                    "kinds": sorted(values.kinds),
                    "low": values.low if math.isfinite(values.low) else None,
                    "high": values.high if math.isfinite(values.high) else None,
                }
                for name, values in parameters.items()
            }
            for function, parameters in self.functions.items()
        }
        return {
            "sizes": self.sizes,
            "functions": functions,
            "blocks": self.blocks,
            "trouble": self.trouble,
            "full": self.full,
            "lines": {file: sorted(lines) for file, lines in self.lines.items()},
            "unrecorded": self.unrecorded,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Reach":
        """The reach from the data of `to_json`."""
        functions = {
            function: {
                name: Values(
                    set(values["kinds"]),
                    math.inf if values["low"] is None else values["low"],
                    -math.inf if values["high"] is None else values["high"],
                )
                for name, values in parameters.items()
            }
            for function, parameters in data["functions"].items()
        }
        blocks = {kernel: dict(ran) for kernel, ran in data["blocks"].items()}
        lines = {file: set(ran) for file, ran in data["lines"].items()}
        return cls(dict(data["sizes"]), functions, blocks, data["trouble"], data["full"], lines, data["unrecorded"])
