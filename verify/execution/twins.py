"""Calls of one case in ways that change nothing in exact arithmetic, as `twin` compares them, and a file with their results."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracles.operation import DTYPES, NAMES, Inputs, Operation
from properties.laws.in_parts import tokens_of
from properties.laws.law import Results, axes_of, present, token_output
from properties.pools.domain import PoolDomain
from verify.adapters.base import Adapter
from verify.adapters.pooled import called_with
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import AdapterFault, OutOfMemory, short
from verify.execution.judging import adapter_of, following
from verify.execution.line import Run
from verify.execution.norms import norm_in
from verify.gpu import device as devices
from verify.process.messages import Way, Went

Call = Callable[[Inputs], Results]
Carried = Callable[[str, Tensor], Tensor]  # the state that a call gets, from its name and the one that the call before returned
WHOLE, PARTS, STEPS, ALONE, TURNED = "whole", "parts", "steps", "alone", "turned"
WAYS = (WHOLE, TURNED, ALONE, PARTS, STEPS)
PART = 64  # tokens
EXPLAINED = 512  # tokens in which causes are looked for: the oracle with rounded states takes milliseconds for each
TRIED, STEPS_S = 8, 60.0  # calls after which the time of all steps is estimated, and how long they may take


class TooSlow(Exception):
    """Calling all tokens one by one would take too long; the message says how long a token takes."""


def went(asked: Way) -> Went:
    """Call the implementation of a line in one way, and write its results as float64, which is exact, to a file of numpy."""
    run = Run.parse(asked.line)
    case = run.example.case
    gated = "gated" in asked.declared
    adapter = called_with(adapter_of(run.adapter), case, gated=gated)
    assert isinstance(adapter, Adapter), run
    counterpart = (
        called_with(adapter_of(adapter.counterpart), case, gated=gated) if adapter.counterpart and asked.way == STEPS else None
    )
    assert counterpart is None or isinstance(counterpart, Adapter), run
    bench = AdapterBench(adapter, counterpart, case, run.products, run.device)
    bench.norm = norm_in(asked.declared)

    def call(inputs: Inputs) -> Results:
        return bench.run(inputs, None, counterpart=counterpart is not None and inputs.get("state") is not None)

    def carried(name: str, state: Tensor) -> Tensor:  # noqa: ARG001
        return state.to(case.carried_dtype(bench.domain, state.dtype)) if hasattr(case, "carried_dtype") else state

    try:
        inputs, _ = bench.call(case)
        spec = case.spec_of(inputs)
        with following(run.tune):
            pool = adapter_of(run.adapter).domain
            pieces = isinstance(pool, PoolDomain) and pool.most_tokens < PART
            results = in_way(asked.way, call, spec, inputs, carried, pieces=pieces)
    except TooSlow as error:
        return Went(reason=str(error))
    except (AdapterFault, OutOfMemory, torch.OutOfMemoryError) as error:
        return Went(reason=short(error), spent=bool(devices.lost(run.device)))
    arrays: dict[str, Any] = {name: x.detach().double().cpu().numpy() for name, x in results.items()}
    np.savez(asked.file, **arrays)
    return Went({name: NAMES.get(x.dtype, "fp64") for name, x in results.items()})


def read(file: str, dtypes: dict[str, str]) -> Results:
    """The results that `went` wrote, in their dtypes."""
    with np.load(file) as arrays:  # never unpickles
        return {name: torch.from_numpy(arrays[name]).to(DTYPES.get(dtype, torch.float64)) for name, dtype in dtypes.items()}


def in_way(way: str, call: Call, spec: Operation, inputs: Inputs, carried: Carried, *, pieces: bool = False) -> Results:
    """The results of a call made in one of WAYS, in the order of the call; in parts, those of the first EXPLAINED tokens.

    `pieces` says that the kernel gets a few tokens a call in any way. Then a call of fewer tokens makes the first of these calls,
    so other orders of sequences are those of the first EXPLAINED tokens too: each token costs a call.
    """
    if way == WHOLE:
        return call(inputs)
    first = between(spec, inputs, 0, min(EXPLAINED, inputs[present(spec, inputs, "B", "T")[0]].shape[1]))
    if way in (PARTS, STEPS):
        return in_parts(call, spec, first, PART, carried) if way == PARTS else in_parts(call, spec, first, 1, carried, STEPS_S)
    inputs = first if pieces else inputs
    count = inputs[present(spec, inputs, "B", "T")[0]].shape[0]
    orders = [[row] for row in range(count)] if way == ALONE else [[*reversed(range(count))]]
    parts = [call(rows_of(spec, inputs, rows)) for rows in orders]
    back = [row for rows in orders for row in rows]
    index = torch.tensor(sorted(range(count), key=back.__getitem__), device=next(iter(parts[0].values())).device)
    return {name: torch.cat([part[name] for part in parts])[index] for name in parts[0] if axes_of(spec, name)[0] in "BN"}


def rows_of(spec: Operation, inputs: Inputs, rows: Sequence[int]) -> Inputs:
    """The call of some sequences of a batch."""
    names = {*present(spec, inputs, "B"), *present(spec, inputs, "N")}
    return inputs.replaced(**{name: inputs[name][[*rows]] for name in names})


def between(spec: Operation, inputs: Inputs, start: int, stop: int) -> Inputs:
    """The call of some tokens of a batch, or of one packed sequence."""
    part = tokens_of(spec, inputs, slice(start, stop))
    offsets = inputs.get("cu_seqlens")
    return part if offsets is None else part.replaced(cu_seqlens=offsets.clamp(max=stop - start))


def in_parts(call: Call, spec: Operation, inputs: Inputs, size: int, carried: Carried, most_s: float | None = None) -> Results:
    """The results of a call in parts of `size` tokens, between which states are `carried`.

    The call is a batch, or one packed sequence. TooSlow if single tokens would take more than `most_s` seconds.
    """
    y, states = token_output(spec), {"state": "final_state", "conv_state": "conv_state"}
    tokens, got, rows, start = inputs[present(spec, inputs, "B", "T")[0]].shape[1], Results(), [], time.monotonic()
    for at in range(0, tokens, size):
        part = between(spec, inputs, at, min(at + size, tokens))
        got = call(part.replaced(**{name: carried(name, got[other]) for name, other in states.items() if other in got}))
        rows.append(got[y])
        one_s = (time.monotonic() - start) / len(rows)
        if most_s is not None and len(rows) == TRIED and one_s * tokens / size > most_s:
            raise TooSlow(f"a call of {size} tokens takes {one_s:.2g} s")
    return {**got, y: torch.cat(rows, 1)}
