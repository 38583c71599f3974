"""Stacks say what a process was doing, and by the marks of functions whose code that was."""

import faulthandler
import math
import tempfile
import time
from typing import Any

import pytest

from tests.together import for_each
from verify.bench import oracle_process
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import frame
from verify.bench.path_bench import RankBench
from verify.process.stacks import Frame, Mark, frames, in_implementation, innermost, marked, unmarked
from verify.process.worker import DUMP_S, interrogate
from verify.ranks import collectives


class Writes:
    """Who writes the stack of its reader, and after `late` looks that of its main thread."""

    READER = 'Thread 0x1 (most recent call first):\n  File "reader.py", line 1 in read\n\n'
    MAIN = 'Current thread 0x2 (most recent call first):\n  File "kernel.py", line 7 in run\n'
    OUTERMOST = '  File "<frozen runpy>", line 8 in _run_module_as_main\n'

    def __init__(self, late: float) -> None:
        self.late, self.looks = late, 0

    def interrogate(self) -> None:
        pass

    def words(self) -> str:
        self.looks += 1
        return self.READER + (self.MAIN + self.OUTERMOST if self.looks > self.late else self.MAIN[:60])


@pytest.mark.slow
def test_stacks_are_waited_for_until_they_are_whole() -> None:
    """A busy host writes them line by line; half of them would name the thread that reads questions."""
    start = time.monotonic()
    assert [innermost(wrote) for wrote in interrogate([Writes(0), Writes(5)])] == ["run (kernel.py:7)"] * 2
    assert time.monotonic() - start < DUMP_S
    assert innermost(interrogate([Writes(math.inf)])[0]) == "read (reader.py:1)"
    assert DUMP_S <= time.monotonic() - start < 2 * DUMP_S


def test_mark_of_a_function_arrives_with_its_stack() -> None:
    """Wherever its file lies: faulthandler writes the name of the function, which has the mark."""

    @marked(Mark.IMPLEMENTATION)
    def dumps(place: int) -> None:
        faulthandler.dump_traceback(place, all_threads=True)

    with tempfile.TemporaryFile() as file:
        dumps(file.fileno())
        file.seek(0)
        wrote = file.read().decode()
    assert in_implementation(wrote)
    assert [(frame.function, frame.mark) for frame in frames(wrote)][:1] == [("dumps", Mark.IMPLEMENTATION)]
    assert not in_implementation(wrote.replace(f" <{Mark.IMPLEMENTATION}>", ""))
    assert frames(wrote.replace("<implementation>", "<lambda>"))[0].mark is None


def test_people_read_the_names_of_functions_without_their_marks() -> None:
    @marked(Mark.COLLECTIVE)
    def raises() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        raises()
    assert frame(raised.value).endswith(" in raises")
    assert unmarked("<lambda>") == "<lambda>"


def test_functions_that_decide_whose_fault_a_hang_is_are_marked() -> None:
    marks: dict[Mark, tuple[Any, ...]] = {
        Mark.IMPLEMENTATION: (AdapterBench.call_implementation, RankBench.call_implementation),
        Mark.COLLECTIVE: (
            collectives.exchange,
            collectives.Comm.all_to_all,
            collectives.Distributed._collective,
            collectives._Collective.backward,
        ),
        Mark.ORACLE: (oracle_process.Beside._answer,),
    }
    for mark, functions in marks.items():
        assert [function.__code__.co_name.partition(" ")[2] for function in functions] == [f"<{mark}>"] * len(functions)


@for_each(
    "wrote",
    [
        "",
        "Current thread 0x01 (most recent call first):\n",
        "Current thread 0x01 (most recent call first):\n  <no Python frame>\n",
        "Thread 0x01 (most recent call first):\n  File ???, line ??? in f\n",
        'Current thread 0x01 (most recent call first):\n  File "a.py", line ??? in f\n',
    ],
)
def test_stack_that_says_nothing_has_no_frames(wrote: str) -> None:
    assert frames(wrote) == []
    assert innermost(wrote) == ""


def test_frames_are_those_of_the_current_thread_or_of_the_last_one() -> None:
    main = '  File "/a/kernel.py", line 7 in run\n  File "/a/run.py", line 9 in <module>\n'
    other = '  File "/a/reader.py", line 1 in read\n'
    ran = [Frame("/a/kernel.py", 7, "run"), Frame("/a/run.py", 9, "<module>")]
    assert (
        frames(f"noise\nCurrent thread 0x1 (most recent call first):\n{main}\nThread 0x2 [pt] (most recent call first):\n{other}")
        == ran
    )
    assert frames(f"Thread 0x2 (most recent call first):\n{other}\nThread 0x1 (most recent call first):\n{main}noise") == ran
