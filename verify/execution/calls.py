"""Calls the implementation of a line without judging what it returns: for its bits, and on a GPU for its time and memory."""

import hashlib

import torch
from torch import Tensor

from properties.calls.case import CallCase
from verify.adapters.base import Adapter
from verify.bench.adapter_bench import AdapterBench
from verify.bench.call_bench import CallBench
from verify.bench.faults import AdapterFault, OutOfMemory, short
from verify.execution.judging import adapter_of, following
from verify.execution.line import Run
from verify.gpu import device as devices
from verify.process.messages import Called


def called(run: Run, timed: int) -> Called:
    """Call the implementation of a run twice with the same inputs, and then `timed` times on a GPU, without any check."""
    adapter = adapter_of(run.adapter)
    if not isinstance(adapter, Adapter):
        return Called(reason="only calls of one process are measured")
    bench = (CallBench if isinstance(run.example.case, CallCase) else AdapterBench)(
        adapter, None, run.example.case, run.products, run.device
    )
    times_ms, memory = list[float](), 0
    try:
        inputs, cotangents = bench.call(run.example.case)
        with following(run.tune):
            bits, again = ({name: _hash(x) for name, x in bench.run(inputs, cotangents).items()} for _ in range(2))
            if timed and run.device == "cuda":
                times_ms, memory = bench.timings(inputs, cotangents, timed)
    except (AdapterFault, OutOfMemory, torch.OutOfMemoryError) as error:
        return Called(reason=short(error), spent=bool(devices.lost(run.device)))
    return Called(bits, [name for name in bits if bits[name] != again[name]], times_ms, memory)


def _hash(x: Tensor) -> str:
    """A hash of a tensor's bits."""
    return hashlib.blake2b(x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
