"""What a worker answers: who an adapter is, and what a run came to."""

import contextlib
import threading
import warnings
from typing import Any

import torch

from properties.books import book_of
from verify import ahead, launches, tuning
from verify import device as devices
from verify.adapter import Adapter, AdapterError, PathAdapter, versions
from verify.forks import importing
from verify.outcome import Outcome, Verdict
from verify.ranks import join, left
from verify.refusal import probe
from verify.run import Run, adapter_of, compiled, execute
from verify.together import together


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The answer, plain data, to {"describe": adapter}, {"run": line}, {"refuse": [adapter, illegal input]} or {"tuned": True}.

    {"join": ...} makes this process a rank, see verify/ranks.py; the answer is {}. {"runs": lines} is many questions in one: the
    outcomes up to the first after which ranks may have parted. There may be {"excused": ...} for each, see verify/judge.py, and
    beside a single line {"declared": ...}, see verify/run.py:execute.
    {"launches": line, "calls": number, "beside": words} is answered as verify/launches.py:told says.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a kernel's warnings are its authors' affair
            _brought()
            if "join" in question:
                ahead.start()  # it forks, and a group has threads and perhaps a GPU
                join(question["join"])
                return {}
            if "describe" in question:
                adapter = adapter_of(question["describe"])
                counterpart = adapter.counterpart if isinstance(adapter, Adapter) else None
                if counterpart:
                    adapter_of(counterpart)
                if isinstance(adapter, Adapter):
                    _bring(adapter)
                return {
                    "book": book_of(adapter.domain).name,
                    "operation": adapter.domain.operation,
                    "domain": adapter.domain.to_json(),
                    "algorithm": adapter.algorithm,
                    "products": adapter.products,
                    "counterpart": counterpart,
                    "versions": versions(adapter),
                    "device": devices.name(),
                }
            if "compile" in question:
                compiled(Run.parse(question["compile"]))
                devices.tidy()
                there = "cuda" if devices.gpus() else "cpu"
                return {"spent": bool(devices.lost(there)) or (devices.crowded(there) and not _CROWDED)}
            if "tuned" in question:
                return {"known": tuning.known(), "infeasible": tuning.infeasible()}
            if "launches" in question:
                return launches.told(Run.parse(question["launches"]), question["calls"], question["beside"])
            if "refuse" in question:
                adapter = adapter_of(question["refuse"][0])
                assert isinstance(adapter, Adapter), question
                there = "cuda" if devices.gpus() else "cpu"  # of a worker that is to use it
                with devices.default(there):
                    did = probe(adapter, question["refuse"][1])
                if reason := devices.lost(there):
                    return {"did": f"crashed ({reason})", "spent": True}
                return {"did": did}
            if "runs" in question:
                runs = [Run.parse(line) for line in question["runs"]]
                _begin(runs)
                outcomes: list[dict[str, Any]] = []
                excused = question.get("excused") or [{}] * len(runs)
                for run, ready, each in zip(runs, together(runs), excused, strict=True):
                    outcomes.append(execute(run, ready, each).to_json())
                    if _ends(outcomes[-1]):
                        break
                devices.tidy()
                return {"outcomes": outcomes, "spent": any(each["spent"] for each in outcomes)}
            outcome = execute(Run.parse(question["run"]), declared=question.get("declared", {})).to_json()
            devices.tidy()
            return outcome
    except AdapterError as error:
        return {"error": str(error)}
    except ValueError as error:
        return Outcome(Verdict.UNKNOWN, reason=str(error)).to_json()


_CROWDED: list[bool] = []  # that the GPU was crowded when this process began: another one would have no more room


_bringing: list[threading.Thread] = []


def _brought() -> None:
    """Wait for what is being imported: who imports the same at the same time may see a part of it."""
    while _bringing:
        _bringing.pop().join()


def _bring(adapter: Adapter) -> None:
    """Have the adapter import what it needs, and its GPU begin, while the check draws its first cases: all take seconds."""

    def bring() -> None:
        with importing(), contextlib.suppress(Exception):  # whatever it is, the first call meets it too
            if devices.gpus():
                torch.zeros(1, device="cuda")
                if devices.crowded("cuda"):
                    _CROWDED.append(True)
            adapter.bring()

    thread = threading.Thread(target=bring, daemon=True)
    thread.start()
    _bringing.append(thread)


def _begin(runs: list[Run]) -> None:
    """Have the bounds of runs that need some made beside this rank, from the first on."""
    from verify.parallel import work_of

    works = []
    for run in runs:
        adapter = adapter_of(run.adapter)
        if isinstance(adapter, PathAdapter) and run.the_law.kind == "truth":
            works.append(work_of(run, adapter))
    ahead.begin(works)


def _ends(outcome: dict[str, Any]) -> bool:
    """Whether its device is gone, or ranks may be at different places; what they decide by the example, they decide alike."""
    return outcome["spent"] or (left(outcome) and outcome.get("verdict") not in (Verdict.BLIND, Verdict.UNSUPPORTED))
