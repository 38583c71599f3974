"""What a process answers that has one release of Megatron-LM: results, times and memory of its layer.

Two releases cannot be imported into one process. So each has workers of its own, whose questions name the folder of the release.
verify/claims/megatron_claims.py asks them. The ranks of a group answer alike.
"""

import collections
import copy
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oracles.layer import Layer
from oracles.operation import Inputs
from properties.layers.case import LayerCase
from properties.paths.case import ParallelCase
from verify.adapters.base import PathAdapter
from verify.adapters.megatron import PLACES, MegatronLayer
from verify.bench.faults import short
from verify.bench.path_bench import RankBench, place_of
from verify.bench.shared_calls import PARAMETERS
from verify.claims.contest import Contest, Form, Tensors, agreement, allocated_bytes, saved_bytes
from verify.claims.formula import HALVES, formula_in, terms
from verify.claims.timing import Call, Clock, clock_of, greatest, own_device
from verify.claims.tuning import limit_tuning
from verify.execution import service
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.process.messages import Data, RunMany
from verify.ranks.collectives import Alone, Place, simulate

SERVES = f"{__name__}:answer"


def answer(question: Data) -> Data:
    """The answer to a question, as plain data. {"error": why} if there is none.

    `ask` says what is asked: the function of that name below. `folder` is that of the release, and `configurations` limits
    autotuning, if it is not 0.
    """
    try:
        if "question" in question:
            return service.answer(question)  # to join a group of ranks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _find(question["folder"], question["configurations"])
            return _ANSWERS[question["ask"]](question)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {short(error)}"}


def close() -> None:
    """Close the adapters of this process."""
    service.close()


@functools.cache
def _find(folder: str, configurations: int) -> None:
    """Let modules be found in the folder of a release first. ValueError if this process has the modules of another release."""
    if _FOUND and folder not in _FOUND:
        raise ValueError(f"folder must stay {_FOUND[0]} in this process, got {folder}")
    _FOUND.append(folder)
    sys.path.insert(1, folder)
    if configurations:
        limit_tuning(configurations)


_FOUND: list[str] = []


def choices(question: Data) -> Data:
    """The words of the choices that an adapter has in this release, the newest of each, and whose convolution the release takes."""
    adapter = adapter_of(question["adapter"])
    assert isinstance(adapter, PathAdapter), adapter
    names = vars(sys.modules[PLACES[0]])
    conv = (
        "causal-conv1d" if names.get("causal_conv1d_fn") else "torch" if "causal_conv1d_fn" in names else "flash-linear-attention"
    )
    return {"words": [f"{name}={values[-1]}" for name, values in adapter.domain.choices], "conv": conv}


def outcomes(question: Data) -> Data:
    """The outcomes of lines."""
    return service.answer(RunMany(question["lines"]).to_json())


def results(question: Data) -> Data:
    """The results of a line, of each simulated rank: its part of the outputs and of all gradients, as numbers."""
    run = Run.parse(question["line"])
    adapter, case = adapter_of(run.adapter), run.example.case
    assert isinstance(adapter, PathAdapter) and isinstance(case, ParallelCase), run
    inputs, cotangents = case.inputs(), case.cotangents()

    def work(place: Place) -> dict[str, list[float]]:
        found = RankBench(adapter, case, place, dict, run.device).run(inputs, cotangents)
        return {name: x.double().flatten().tolist() for name, x in found.items()}

    found = simulate(case.tp, case.cp, work)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return {"results": found}


@dataclasses.dataclass(frozen=True)
class ReadyLayer:
    """The layer with the inputs of a case on this rank, ready to be timed."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    direction: Tensor
    clock: Clock

    def backward_of(self, y: Tensor) -> Call:
        """The call that computes the gradients of every input and parameter. It frees the graph, so it can be made once.

        On a GPU, parts of the layer are compiled by torch, which then refuses a second backward of one graph.
        """
        return lambda: torch.autograd.grad(y, self.leaves, self.direction, allow_unused=True)


def time(question: Data) -> Data:
    """The milliseconds of `calls` calls of a line's layer, forward and backward. Of ranks, each time is that of the slowest."""
    ready = _ready(question["line"])
    ahead = ready.clock.times([ready.forward] * question["calls"])
    back = [ready.clock.times([ready.backward_of(ready.forward())])[0] for _ in range(question["calls"])]
    return {"ahead": greatest(ahead, own_device()), "back": greatest(back, own_device())}


def memory(question: Data) -> Data:
    """The bytes that the graph of a line's layer saves for backward, and on a GPU those that stay allocated.

    What is saved is counted without torch.compile: it traces with tensors that have no memory, which cannot be counted.
    """
    ready = _ready(question["line"])
    with torch.compiler.set_stance("force_eager"):
        saved = saved_bytes(ready.forward, ready.leaves)
    return {"saved": saved, "allocated": allocated_bytes(ready.forward, own_device())}


@functools.lru_cache(4)
def _ready(line: str) -> ReadyLayer:
    run = Run.parse(line)
    adapter, case = adapter_of(run.adapter), run.example.case
    assert isinstance(adapter, MegatronLayer) and isinstance(case, ParallelCase), run
    device, here = own_device(), dist.is_initialized()
    place = place_of(case.mesh) if here else Place(Alone(), Alone())
    assert place is not None, case
    kept = keeping_its_module(adapter)
    bench = RankBench(kept, case, place, dict, str(device))
    call = bench._prepared(case, place, case.inputs(), case.cotangents())
    assert call.direction is not None, case
    meet = torch.zeros(1, device=device)
    clock = clock_of(device, lambda: dist.all_reduce(meet) if here else None)  # so that all ranks begin together
    ready = ReadyLayer(lambda: kept.run(call.arguments, place), [*call.leaves.values()], call.direction, clock)
    ready.backward_of(ready.forward())()  # it compiles and tunes
    return ready


def keeping_its_module(adapter: MegatronLayer) -> MegatronLayer:
    """The adapter, but with one module for all calls, as a model has. Each call passes the parameters anew."""
    kept, modules = copy.copy(adapter), collections.deque[nn.Module](maxlen=1)

    def module(*groups: Any, **settings: Any) -> nn.Module:
        if not modules:
            modules.append(adapter.module(*groups, **settings))
        return modules[0]

    vars(kept)["module"] = module
    return kept


def contest(question: Data) -> Data:
    """How the layers of several adapters agree with the truth and with each other, on a case of one rank."""
    case = LayerCase.parse(question["case"])
    forms = {name: layer_form(adapter_of(name)) for name in question["adapters"]}
    agreed = agreement(Contest(forms, case, case, "chunkwise", chunk=64), own_device())
    first, *others = forms
    apart = max((agreed.apart[first, other] for other in others), default=0.0)
    return {"worst": agreed.worst, "broken": agreed.broken(*forms), "about": agreed.about(*forms), "apart": apart}


def layer_form(adapter: Any) -> Form:
    """The layer of a path's adapter on one rank, as a form of a case of one layer."""
    assert isinstance(adapter, PathAdapter), adapter

    def form(x: Inputs) -> Tensors:
        parameters = {theirs: x[ours] for ours, theirs in PARAMETERS.items() if x.get(ours) is not None}
        others = {"parameters": parameters, "cu_seqlens_padded": None, "sequence_parallel": False}
        call = Inputs(**{**dict(x.items()), **others, "hidden": x.hidden.transpose(0, 1)})
        y = adapter.run(call, Place(Alone(), Alone()))
        assert isinstance(y, Tensor), "a layer returns one output"
        return (y.transpose(0, 1),)

    return form


def flops(question: Data) -> Data:
    """The training FLOPs of a layer by term, by both halves of the release's formula."""
    formula, layer = formula_in(question["folder"]), Layer(**question["layer"])
    return {kind: terms(formula, layer, question["tokens"], kind) for kind in HALVES}


_ANSWERS: dict[str, Callable[[Data], Data]] = {
    function.__name__: function for function in (choices, outcomes, results, time, memory, contest, flops)
}
