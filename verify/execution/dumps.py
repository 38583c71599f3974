"""Judges calls that FlashInfer has written to FLASHINFER_DUMP_DIR, at its log level 10.

Each call has a folder with metadata.jsonl, inputs.safetensors and outputs.safetensors (FLASHINFER_DUMP_SAFETENSORS=1). Positional
arguments are called arg_0, arg_1 and so on, others kwarg_NAME, and results `result`, or result_0, result_1.
"""

import functools
import os
from typing import Any

import torch

from oracles.operation import Inputs
from oracles.tolerance.bound import bounds
from properties.laws.law import Pair
from verify.adapters.contract import contract_of, wanted
from verify.adapters.flashinfer_kernels import Prefill
from verify.adapters.tensor_files import WrongFile, one_line, opened, parsed, read
from verify.bench.places import indices
from verify.execution.judge import judge
from verify.execution.judging import faulted
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

ABOUT = "metadata.jsonl"
MOST_ABOUT = 2**20  # bytes
FUNCTION = "chunk_gated_delta_rule"
# Its parameters, as far as they decide results.
PARAMETERS = ("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens", "use_qk_l2norm_in_kernel")


def dumps_in(folder: str) -> list[str]:
    """The names of the folders of calls, from old to new."""
    return sorted(name for name in os.listdir(folder) if os.path.lexists(os.path.join(folder, name, ABOUT)))


def judged_dump(folder: str) -> Outcome:
    """The outcome of a dumped call. A dump that cannot be read is UNKNOWN, and so is one of pickled tensors, which are not read."""
    try:
        about = _about(folder)
        if about.get("function_name") != FUNCTION:
            return Outcome(Verdict.UNSUPPORTED, reason=f"only calls of {FUNCTION} are judged")
        for name in ("inputs", "outputs"):
            if os.path.lexists(os.path.join(folder, f"{name}.pt")):
                return Outcome(Verdict.UNKNOWN, reason=f"{name}.pt is pickled and is not read: set FLASHINFER_DUMP_SAFETENSORS=1")
        given = _arguments(about, read(os.path.join(folder, "inputs.safetensors")))
        results = read(os.path.join(folder, "outputs.safetensors"))
        return _judged(_inputs(given), [results.get("result", results.get("result_0")), results.get("result_1")])
    except FileNotFoundError as error:
        return Outcome(Verdict.UNKNOWN, reason=f"there is no {os.path.basename(str(error.filename))}")
    except (ValueError, WrongFile) as error:
        return Outcome(Verdict.UNKNOWN, reason=f"cannot be judged: {one_line(error)}")
    except Exception as error:  # whatever stands in the files
        return faulted(error)


def _about(folder: str) -> dict[str, Any]:
    file, _ = opened(os.path.join(folder, ABOUT))
    with file:
        lines = file.read(MOST_ABOUT).splitlines()
    about = parsed(lines[-1] if lines else b"", fractions=True)
    if not isinstance(about, dict):
        raise WrongFile(f"{ABOUT} has no object")
    return about


def _arguments(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The arguments of the call by parameter."""
    plain = about.get("input_metadata")
    given = {**(plain if isinstance(plain, dict) else {}), **tensors}
    names = {f"arg_{place}": name for place, name in enumerate(PARAMETERS)} | {f"kwarg_{name}": name for name in PARAMETERS}
    return {names[key]: value for key, value in given.items() if key in names}


def _inputs(given: dict[str, Any]) -> Inputs:
    """The call in our terms. ValueError if it is none that we can judge."""
    found: dict[str, Any] = {name: given.get(name) for name in PARAMETERS}
    kinds = {"scale": float | int | None, "output_final_state": bool | None, "use_qk_l2norm_in_kernel": bool | None}
    for name, value in found.items():
        absent = value is None and name in ("g", "beta", "initial_state")
        if not (absent or isinstance(value, kinds.get(name, torch.Tensor))):
            raise ValueError(f"{name} is {repr(value)[:40]}")
    q, k, v, state = found["q"], found["k"], found["v"], found["initial_state"]
    one = functools.partial(torch.ones, v.shape[:2], dtype=torch.float32)
    alpha, beta = (one() if found[name] is None else found[name] for name in ("g", "beta"))
    named = {name: x.unsqueeze(0) for name, x in {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}.items()}
    return Inputs(
        **named,
        state=None if state is None else state.mT.contiguous(),
        cu_seqlens=found["cu_seqlens"],
        scale=found["scale"] or None,  # 0 is the default there
        qk_norm=bool(found["use_qk_l2norm_in_kernel"]),
        output_final_state=bool(found["output_final_state"]),
    )


def _judged(x: Inputs, results: list[torch.Tensor | None]) -> Outcome:
    """The outcome of a call whose results are in FlashInfer's layout: o [tokens, HV, V] and the final state [N, HV, V, K]."""
    spec, pairs = contract_of(Prefill.domain, x), list[Pair]()
    spec.check(x)
    allowed = bounds(spec, x, None, Prefill.algorithm, Prefill.products, Prefill.chunk)
    for (name, must), got in zip(wanted(spec, x, Prefill.domain).items(), results, strict=False):
        moved = None if got is None else got.unsqueeze(0) if name == "o" else got.mT
        if moved is None or moved.dtype != must.dtype:
            what = f"has dtype {None if moved is None else moved.dtype}, must have {must.dtype}"
            return Outcome(Verdict.BROKEN, [Finding(name, FailureKind.DTYPE, what, port=name)])
        pairs.append(Pair(name, "", moved, allowed[name]))
    found = judge(pairs, lambda pair, flat, shape: f"index {', '.join(map(str, indices(flat, shape)))}")
    return Outcome(Verdict.BROKEN if found.findings else Verdict.HOLDS, found.findings, rows=found.rows, ratios=found.ratios)
