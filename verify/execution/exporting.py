"""Which questions a case asks, without an implementation: what `gdn-verify export` writes."""

import collections

from verify.adapters.files_adapter import Writer
from verify.bench.compiling import Compiling
from verify.execution.judging import on_device
from verify.execution.line import Run

# Laws whose questions do not depend on answers, and in which the answers can show a defect. The others relate calls in which one
# gets what another returned (cut), or are about what a file does not show: memory, strides, earlier calls, threads.
EXPORTED = (
    *("oracle", "packed", "absent", "norm", "gates", "linear", "recall", "future", "samples", "heads", "permuted"),  # rules
    *("scaled", "whole", "copied", "left_padding", "tokens", "channels", "repeated"),  # modules and layers
    *("untouched", "padding", "poison", "fresh", "slots", "requests"),  # pools
)


def questions_of(run: Run, writer: Writer) -> list[str]:
    """The names of the questions of a run, in their order, which are written. None if the domain does not have the case."""
    writer.asked.clear()
    law, example = run.the_law, run.example
    if law.needs(writer.domain) or writer.domain.outside(example.case) or law.outside(writer.domain, example):
        return []
    collections.deque(on_device("cpu", law.check(Compiling(writer, None, example.case), example)), maxlen=0)
    return [*writer.asked]
