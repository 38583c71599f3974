"""Adapters of ggml's operators on a CPU, through ctypes. They adapt layout only.

ggml ends the process if a shape does not fit, so our own contract refuses illegal calls before ggml sees them. Tensors are float32.
Their axes are those of torch in the reverse order, in the same memory.
"""

import abc
import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from properties.rules.domain import Domain
from verify.adapters.foreign import AskedAdapter, Call, Place

PACKAGE = "libggml-python"
F32 = 0  # of enum ggml_type
ROOM = 1 << 24  # bytes for the graph and for what operators keep meanwhile


class Pointer(ctypes.c_void_p):
    """A pointer in C. ctypes makes an integer of a plain c_void_p that a function returns, and cuts it where it is passed on."""


class _Parameters(ctypes.Structure):
    """The struct ggml_init_params."""

    _fields_: ClassVar[Any] = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Graph:
    """The tensors of one call in a memory of ggml's."""

    def __init__(self, context: Pointer) -> None:
        self._context = context

    def node(self, function: str, *arguments: Any) -> Pointer:
        """Call a function of ggml that makes a tensor."""
        made: Pointer = _function(function)(self._context, *arguments)
        return made

    def tensor(self, x: Tensor) -> Pointer:
        """A tensor with the numbers of a contiguous one."""
        sizes = (ctypes.c_int64 * x.ndim)(*reversed(x.shape))
        made = self.node("ggml_new_tensor", F32, x.ndim, sizes)
        ctypes.memmove(_function("ggml_get_data")(made), x.data_ptr(), x.nbytes)
        return made

    def computed(self, node: Pointer, count: int) -> Tensor:
        """The first numbers of a tensor, computed with one thread. RuntimeError if ggml says that it failed."""
        graph = self.node("ggml_new_graph")
        _function("ggml_build_forward_expand")(graph, node)
        if status := _function("ggml_graph_compute_with_ctx", ctypes.c_int)(self._context, graph, 1):
            raise RuntimeError(f"ggml_graph_compute_with_ctx returned {status}")
        found = torch.empty(count)
        ctypes.memmove(found.data_ptr(), _function("ggml_get_data")(node), found.nbytes)
        return found


@functools.cache
def _function(name: str, returns: Any = Pointer) -> Any:
    library = importlib.metadata.distribution(PACKAGE).locate_file("libggml/lib64/libggml-cpu.so")
    function = getattr(ctypes.CDLL(str(library)), name)
    function.restype = returns
    return function


@contextlib.contextmanager
def _graph(tensors: Iterable[Tensor]) -> Iterator[Graph]:
    size = ROOM + 8 * sum(x.nbytes for x in tensors)
    context = _function("ggml_init")(_Parameters(size, None, False))
    try:
        yield Graph(context)
    finally:
        _function("ggml_free")(context)


class Operator(AskedAdapter):
    """An operator of ggml, or several."""

    requires: ClassVar[dict[str, str]] = {PACKAGE: "0.20.2"}

    @abc.abstractmethod
    def node(self, graph: Graph, tensors: Mapping[str, Pointer], x: Inputs) -> Pointer:
        """Return the tensor of ggml that has the outputs of call `x` one after the other, from the tensors of the call by name."""

    def _ask(self, call: Call, word: str, sent: Mapping[Place, Tensor], asked: Sequence[Place]) -> Iterable[Tensor]:
        assert word == "call", word
        if call.x.get("cu_seqlens") is not None:
            raise ValueError("ggml's operators take no cu_seqlens")
        call.check_legal()
        inputs = {place.name: place.theirs(x) for place, x in sent.items()}
        sizes = [math.prod(place.sizes) for place in asked]
        with _graph([*inputs.values(), *(place.empty() for place in asked)]) as graph:
            node = self.node(graph, {name: graph.tensor(x) for name, x in inputs.items()}, call.x)
            found = graph.computed(node, sum(sizes))
        return [x.reshape(place.sizes) for place, x in zip(asked, found.split(sizes), strict=True)]

    def _wrong(self) -> None:
        return None


class GatedDeltaNet(Operator):
    """GATED_DELTA_NET after L2_NORM, which divides by max(norm, eps).

    Value head h reads key head h mod H, so value heads are sorted before the call, and back after it.
    """

    algorithm = "recurrent"
    layout: ClassVar[Mapping[str, str]] = {"g": "B T HV 1", "beta": "B T HV 1", "state": "V K", "final_state": "V K"}
    absent: ClassVar[Mapping[str, float]] = {"state": 0.0}
    domain = Domain(
        dtypes=("fp32",),
        key_dims=(1, 256),
        value_dims=(1, 256),
        equal_widths=True,
        packed=False,
        nothing=False,
        scales=("default",),
        qk_norm_eps=("1e-6", "1e-5", "1e-12"),
        qk_norm_forms=("max",),
        views=False,
        backward=False,
    )

    def run(self, x: Inputs) -> Any:
        heads, each = x.q.shape[2], x.v.shape[2] // x.q.shape[2]
        tokens = {name: _sorted(x[name], 2, heads) for name in ("v", "g", "beta")}
        o, final = super().run(x.replaced(**tokens, state=x.state if x.state is None else _sorted(x.state, 1, heads)))
        return _sorted(o, 2, each), None if final is None else _sorted(final, 1, each)

    def node(self, graph: Graph, tensors: Mapping[str, Pointer], x: Inputs) -> Pointer:
        q, k = tensors["q"], tensors["k"]
        if x.qk_norm:
            q, k = (graph.node("ggml_l2_norm", y, ctypes.c_float(x.qk_norm_eps)) for y in (q, k))
        others = (tensors[name] for name in ("v", "g", "beta", "state"))
        return graph.node("ggml_gated_delta_net", q, k, *others, ctypes.c_int64(1))


class GatedDeltaNetKda(GatedDeltaNet):
    """GATED_DELTA_NET with one decay for each key channel."""

    layout: ClassVar[Mapping[str, str]] = {name: axes for name, axes in GatedDeltaNet.layout.items() if name != "g"}
    domain = dataclasses.replace(GatedDeltaNet.domain, operation="kda")


class Conv(Operator):
    """SSM_CONV on the initial state and the tokens, and SILU. The caller keeps the last columns for the final state."""

    algorithm = "pointwise"
    layout: ClassVar[Mapping[str, str]] = {"x": "D T"}
    absent: ClassVar[Mapping[str, float]] = {"state": 0.0}
    domain = ModuleDomain(
        "causal_conv1d",
        dtypes=("fp32",),
        conv_widths=(4, 2, 3, 5, 8),
        bias=False,
        packed=False,
        nothing=False,
        final_state=False,
        state_columns="W-1",
        views=False,
        backward=False,
    )

    def node(self, graph: Graph, tensors: Mapping[str, Pointer], x: Inputs) -> Pointer:
        seen = graph.node("ggml_concat", tensors["state"], tensors["x"], 0)
        y = graph.node("ggml_ssm_conv", seen, tensors["weight"])
        return graph.node("ggml_silu", y) if x.activation else y


def _sorted(x: Tensor, axis: int, heads: int) -> Tensor:
    """The heads on an axis, those that are apart by a multiple of the axis's length over `heads` side by side."""
    apart: Tensor = x.unflatten(axis, (heads, -1))
    return apart.transpose(axis, axis + 1).flatten(axis, axis + 1)
