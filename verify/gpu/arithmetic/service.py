"""What runs in a worker: one probe for each question, of its device alone or of the ranks that it has joined."""

import contextlib
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from verify.gpu import device as devices
from verify.gpu.arithmetic.cards import Measure
from verify.gpu.arithmetic.exchanges import EXCHANGES, between_processes
from verify.gpu.arithmetic.probes import PROBES
from verify.process import messages
from verify.process.messages import Join
from verify.ranks.group import join

DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a Join, which is {}; to {}, which is that of `host`; or to the name of a probe, which is that of `probed`."""
    if "probe" in question:
        return probed(question["probe"])
    try:
        if "question" not in question:
            return host()
        how = messages.parse(question)
        assert isinstance(how, Join), question
        join(how)
    except Exception as error:
        return {"error": _reason(error)}
    return {}


def probed(name: str) -> dict[str, Any]:
    """The measures of a probe by name. If it fails, those before it failed, and `failed` has the reason."""
    measures: list[dict[str, Any]] = []
    try:
        for measure in _probe(name):
            finite = isinstance(measure.value, str) or math.isfinite(measure.value)
            value = measure.value if finite else str(measure.value)  # which JSON and TOML write in two ways
            measures.append({**dataclasses.asdict(measure), "value": value})
    except Exception as error:
        lost = not dist.is_initialized() and devices.lost(_device().type) is not None
        return {"measures": measures, "failed": _reason(error), "spent": lost}
    return {"measures": measures}


def _probe(name: str) -> Iterator[Measure]:
    if name in EXCHANGES:
        return EXCHANGES[name](between_processes(_device()), dist.get_world_size())
    from verify.gpu.arithmetic.kernels import Operations  # it imports Triton

    return PROBES[name](Operations(_device()))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def host() -> dict[str, Any]:
    """The card, and the versions on which its arithmetic may depend."""
    import triton  # it may be interpreted, which is decided before

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if _device().type == "cpu":
        return {"card": "CPU with interpreted kernels", "versions": versions}
    versions |= {"cuda": torch.version.cuda or "none", "driver": _driver()}
    with contextlib.suppress(AttributeError, RuntimeError):
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"card": devices.name(), "versions": versions}


def _driver() -> str:
    """The version of the NVIDIA driver."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\d+\.\d+[.\d]*", DRIVER.read_text(encoding="utf-8")):
            return found[0]
    return "unknown"
