"""What a check looked at, and what it did not look at, as lines of text for people. This module prints nothing."""

import textwrap
from collections.abc import Iterable, Mapping

from verify.process.reach import DEFAULT, NUMBER, ON_A_GPU, Reach, Values
from verify.reach import statements

WIDTH = 130
MOST_KERNELS = 6  # the report lists so many kernels with branches that never ran, and as many functions with lines that never ran
SIZES = {
    "sequence": "token{s} in a sequence",
    "chunks": "chunk{s} in a sequence",
    "tokens": "token{s} in a call",
    "sequences": "sequence{s} in a call",
    "heads": "head{s}",
    "value_heads": "value head{s} for each key head",
    "rank_tokens": "token{s} on a rank",
    "ranks": "rank{s}",
}
UNSEEN = "no function under test was seen, so its parameters are unknown (an adapter can name it in api)"
UNRECORDED = "lines of Python were not recorded"
FULL = "there was more than a report has room for"


def looked_at(reach: Reach) -> str:
    """The largest sizes of the cases, in one line."""
    sizes = [(reach.sizes[name], words) for name, words in SIZES.items() if name in reach.sizes]
    return "; ".join(f"{size} {words.format(s='' if size == 1 else 's')}" for size, words in sizes)


def not_looked_at(reach: Reach, omits: Mapping[str, str]) -> list[str]:
    """What no case reached, and what a check could not record."""
    unrecorded = [f"{UNRECORDED}: {reach.unrecorded}"] if reach.unrecorded == ON_A_GPU else []
    return [*gaps_of(reach, omits), *unrecorded]


def gaps_of(reach: Reach, omits: Mapping[str, str]) -> list[str]:
    """What no case reached: parameters that were never passed, and branches and lines that never ran.

    What is not known counts too: lines of Python if another tool traces them, and what a report has no room for. Lines on a GPU do
    not count, because no check records them there. Parameters, kernels and functions that `omits` names are left out.
    """
    gaps = [] if reach.functions else [reach.trouble or UNSEEN]
    for function, parameters in reach.functions.items():
        if names := [name for name, values in parameters.items() if not values.passed and name not in omits]:
            of = f" to {function.rpartition(':')[2]}" if len(reach.functions) > 1 else ""
            gaps.append(f"never passed{of} except at the default: {', '.join(names)}")
    gaps += [*_branches(reach, omits), *_never_ran(reach, omits)]
    if reach.unrecorded and reach.unrecorded != ON_A_GPU:
        gaps.append(f"{UNRECORDED}: {reach.unrecorded}")
    return [*gaps, *([FULL] if reach.full else [])]


def _branches(reach: Reach, omits: Mapping[str, str]) -> list[str]:
    gaps = []
    for kernel, blocks in reach.blocks.items():
        name = kernel.rpartition(":")[2]
        if (lines := [block for block, ran in blocks.items() if not ran]) and name not in omits:
            gaps.append(f"{len(lines)} {'branch' if len(lines) == 1 else 'branches'} of {name} never ran ({_lines(lines)})")
    return gaps


def _never_ran(reach: Reach, omits: Mapping[str, str]) -> list[str]:
    """The gap about lines of Python, if there is one."""
    lines = _statements(reach, omits)
    more = f" and {len(lines) - MOST_KERNELS} more functions (--json lists them)" if len(lines) > MOST_KERNELS else ""
    return [f"Python that never ran: {', '.join(lines[:MOST_KERNELS])}{more}"] if lines else []


def _statements(reach: Reach, omits: Mapping[str, str]) -> list[str]:
    return [str(found) for found in statements.statements(reach.lines) if not found.complete and found.function not in omits]


def report(reach: Reach, omits: Mapping[str, str], *, parameters: bool = True, width: int = WIDTH) -> list[str]:
    """The lines about a whole check, of at most `width` columns; none if no case was decided.

    Python that never ran comes first, because a defect there cannot show. With `parameters` each parameter and its values are
    listed.
    """
    if not reach:
        return []
    never_ran = _never_ran(reach, omits)
    lines = [line for gap in never_ran for line in _wrapped("never ran      ", gap.replace(" that never ran:", ":", 1), width)]
    lines += _wrapped("looked at      up to ", looked_at(reach), width)
    constant = [f"{name} always {_words(values)}" for name, values in _parameters(reach) if _is_constant(values)]
    if parameters:
        for function, values_of in reach.functions.items():
            lines.append(f"parameters     of {function}")
            for words, names in _by_words(values_of).items():
                lines += _wrapped(f"  {', '.join(names)}: ", words, width)
    gaps = [gap for gap in not_looked_at(reach, omits) if gap not in never_ran]
    if hidden := _branches(reach, omits)[MOST_KERNELS:]:
        gaps = [gap for gap in gaps if gap not in hidden]
        gaps.append(f"branches of {len(hidden)} more kernels never ran (--json lists them)")
    if constant:
        gaps = [*gaps, f"never varied: {', '.join(constant)}"]
    if "sequence" in reach.sizes:
        gaps = [*gaps, f"sequences of more than {reach.sizes['sequence']} tokens"]
    lines += _wrapped("not looked at  ", "; ".join(gaps), width)
    for name, reason in omits.items():
        lines += _wrapped("left out       ", f"{name}: {reason}{_contradiction(reach, name)}", width)
    return lines


def _parameters(reach: Reach) -> Iterable[tuple[str, Values]]:
    return (pair for parameters in reach.functions.values() for pair in parameters.items())


def _contradiction(reach: Reach, name: str) -> str:
    """What is wrong with leaving out a name: a case passed the parameter, or nothing is called so. "" if nothing is wrong."""
    kernels = {kernel.rpartition(":")[2] for kernel in reach.blocks}
    kernels |= {found.function for found in statements.statements(reach.lines)}
    passed = [values.passed for parameter, values in _parameters(reach) if parameter == name]
    if any(passed):
        return " (but a case passed it)"
    return (
        ""
        if passed or name in kernels or not (reach.functions or reach.blocks)
        else " (but nothing that was looked at is called so)"
    )


def _is_constant(values: Values) -> bool:
    """Whether a flag, number or text was the same in all calls, and not its default. Tensors are what a case varies anyway."""
    (kind, *others) = sorted(values.kinds)
    return not others and values.low >= values.high if kind == NUMBER else not others and (kind in ("True", "False") or "'" in kind)


def _words(values: Values) -> str:
    numbers = f"{values.low:g} to {values.high:g}" if values.low < values.high else f"{values.low:g}"
    return ", ".join(numbers if kind == NUMBER else kind for kind in sorted(values.kinds, key=lambda kind: (kind != DEFAULT, kind)))


def _by_words(parameters: Mapping[str, Values]) -> dict[str, list[str]]:
    """The parameters that got the same kinds of values together, in the order of the signature."""
    names: dict[str, list[str]] = {}
    for name, values in parameters.items():
        names.setdefault(_words(values), []).append(name)
    return names


def _lines(blocks: list[str]) -> str:
    """The lines of blocks, the first few of them: "lines 12, 40 and 3 more"."""
    lines = sorted({int(block.partition(":")[0]) for block in blocks})
    more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:4]))}{more}"


def _wrapped(label: str, words: str, width: int) -> list[str]:
    indent = "                 " if label.startswith(" ") else " " * 15
    return textwrap.wrap(
        words, width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
