"""What a worker answers: who an adapter is, and what a run came to."""

import warnings
from typing import Any

from verify.adapter import AdapterError, versions
from verify.judge import Verdict
from verify.refusal import probe
from verify.run import Outcome, Run, adapter_of, execute


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The answer, plain data, to {"describe": adapter}, {"run": line} or {"refuse": [adapter, illegal input]}."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a kernel's warnings are its authors' affair
            if "describe" in question:
                adapter = adapter_of(question["describe"])
                if adapter.counterpart:
                    adapter_of(adapter.counterpart)
                return {
                    "domain": adapter.domain.to_json(),
                    "algorithm": adapter.algorithm,
                    "counterpart": adapter.counterpart,
                    "versions": versions(adapter),
                }
            if "refuse" in question:
                return {"did": probe(adapter_of(question["refuse"][0]), question["refuse"][1])}
            return execute(Run.parse(question["run"])).to_json()
    except AdapterError as error:
        return {"error": str(error)}
    except ValueError as error:
        return Outcome(Verdict.UNKNOWN, reason=str(error)).to_json()
