"""Work that needs a process of its own, in a worker: it is forked where torch is already imported, which takes seconds."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verify.process.worker import NO_GPU, Worker

DEADLINE_S = 300.0


def answered(module: str, *, hooked: bool = True, environment: Mapping[str, str] = NO_GPU, **question: Any) -> dict[str, Any]:
    """What the function `answer` of a module says in a process that does nothing before.

    `hooked` says whether the first import of Triton there installs our interpreter, as in every worker.
    """
    with Worker(DEADLINE_S, serves=f"{__name__}:serve", environment=environment) as worker:
        return worker.ask({"module": module, "hooked": hooked, "question": question})


def answered_together(module: str, questions: Sequence[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    """The same of processes that run at the same time, one a question."""
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(lambda question: answered(module, **settings, **question), questions))


def told(program: str, *, environment: Mapping[str, str] = NO_GPU, **names: Any) -> Any:
    """What a program calls `told` in the end, run with these names in a process that does nothing before."""
    return answered(__name__, environment=environment, program=program, names=names)["told"]


def serve(request: dict[str, Any]) -> dict[str, Any]:
    if not request["hooked"]:
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "verify.interpreter"]
    found: dict[str, Any] = importlib.import_module(request["module"]).answer(request["question"])
    return found


def answer(question: dict[str, Any]) -> dict[str, Any]:
    names = {"__name__": "__main__", "told": None, **question["names"]}
    exec(compile(question["program"], "<program>", "exec"), names)
    return {"told": names["told"]}
