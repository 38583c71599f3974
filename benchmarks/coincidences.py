"""Coincidences: in how many drawn traces of the default domain an event meets a circumstance, in percent.

    python -m benchmarks.coincidences

Prints the table of docs/reference/laws.md. The same seed gives the same traces, so a test compares the table with the page.
"""

from collections import Counter
from collections.abc import Iterator

from properties.traces.case import TraceCase
from properties.traces.domain import TraceDomain
from properties.traces.drawing import trace_cases
from properties.traces.events import Roll, Row, Step
from verify.engine.drawing import seeded

TRACES, SEED, BLOCK = 1000, 0, 64
EVENTS = (
    "prompt of a new request",
    "prompt that goes on",
    "one token beside a prompt",
    "decode",
    "decode with a snapshot",
    "drafts of one length",
    "drafts of several lengths",
    "draft of which nothing is accepted",
    "fork",
    "swap",
    "transfer",
    "preemption",
)
CIRCUMSTANCES = (
    "any",
    "padding",
    "snapshot",
    "full pool",
    "block end",
    "over a block end",
    "after a rejection",
    "after a move",
)


def pairs(case: TraceCase) -> set[tuple[str, str]]:
    """Return which events of a trace meet which circumstances.

    A snapshot is taken in the same step. A block has 64 tokens, at whose end the row ends or which it passes. A rejection is a
    draft of the same request that was not accepted as a whole, in its last step, and a move is a fork, swap or transfer of it.
    """
    found = set[tuple[str, str]]()
    roll, last, tokens = Roll(case.slots, case.snapshots, case.aligned), dict[str, str](), dict[str, int]()
    plan = {step.event: step for step in case.plan}
    for number, event in enumerate(case.trace.split("/"), 1):
        roll.step(number, event)
        if number not in plan:
            continue
        step = plan[number]
        for name, row in _events(step):
            request = row.request if row else step.source or step.request
            start = row.start if row else tokens.get(request, 0)
            end = start + row.accepted if row else start
            holds = {
                "any": True,
                "padding": any(not other.real for other in step.rows),
                "snapshot": any(other.snapshot is not None for other in step.rows) or step.snapshot,
                "full pool": not roll.room(),
                "block end": end > 0 and end % BLOCK == 0 and (row is None or row.accepted > 0),
                "over a block end": start // BLOCK < end // BLOCK and end % BLOCK > 0,
                "after a rejection": last.get(request) == "rejection",
                "after a move": last.get(request) == "move",
            }
            found |= {(name, circumstance) for circumstance, true in holds.items() if true}
        tokens = dict(roll.tokens)
        for row in step.rows:
            last[row.request] = "rejection" if row.accepted < row.count else ""
        if not step.rows:
            last[step.request] = "move" if step.kind in "kwt" else ""
    return found


def _events(step: Step) -> Iterator[tuple[str, Row | None]]:
    """Yield the names of what a step is about, with its row if it has one."""
    if not step.rows:
        names = {"k": "fork", "w": "swap", "t": "transfer", "r": "preemption"}
        if step.kind in names:
            yield names[step.kind], None
    several = len({row.count for row in step.rows}) > 1
    prompts = any(row.real and row.count > 1 for row in step.rows)
    for row in step.rows:
        if row.real and row.count:
            if step.kind == "p" and row.count == 1 and not row.begins and prompts:
                yield "one token beside a prompt", row
            elif step.kind == "p":
                yield "prompt of a new request" if row.begins else "prompt that goes on", row
            elif step.kind == "v":
                yield "drafts of several lengths" if several else "drafts of one length", row
                if not row.accepted:
                    yield "draft of which nothing is accepted", row
            else:
                yield "decode" if step.kind == "d" else "decode with a snapshot", row


def counted(traces: int = TRACES) -> Counter[tuple[str, str]]:
    """Return in how many of so many traces each pair occurs."""
    counts = Counter[tuple[str, str]]()
    seeded(trace_cases(TraceDomain()), SEED, traces, lambda case: counts.update(pairs(case)))
    return counts


def table(counts: Counter[tuple[str, str]], traces: int = TRACES) -> str:
    """Return the table, in percent of the traces."""
    lines = [f"| event | {' | '.join(CIRCUMSTANCES)} |", f"| {' | '.join(['---'] * (len(CIRCUMSTANCES) + 1))} |"]
    for event in EVENTS:
        numbers = [counts[event, circumstance] * 100 / traces for circumstance in CIRCUMSTANCES]
        lines.append(f"| {event} | {' | '.join(f'{number:.0f}' for number in numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(counted()))
