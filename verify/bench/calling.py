"""Calls an implementation for a bench: its outputs, and the gradients of its inputs."""

import contextlib
import functools
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from oracles.operation import Inputs, Operation, gradient_name
from properties.laws.law import Cotangents, Results, with_one_state
from verify.adapters.base import Adapter
from verify.bench import ways
from verify.bench.answer import outputs_of
from verify.bench.faults import AdapterFault, no_memory
from verify.bench.placing import in_layout
from verify.bench.watched import WatchedBench
from verify.gpu import device as devices
from verify.process.outcome import FailureKind
from verify.process.stacks import Mark, marked
from verify.reach import recorder


class Calling(WatchedBench):
    """The part of a bench that calls an adapter, `adapter` or its one-token form, without looking at what it returns."""

    def __init__(self, adapter: Adapter, device: str) -> None:
        super().__init__(device)
        self.adapter, self.domain = adapter, adapter.domain
        self.way = ways.Plain()  # how outputs and gradients are computed
        self.absent: list[str] = []  # gradients that did not reach an input in the last call, in place of which it has zeros
        self._after_forward: Callable[[], None] | None = None  # called between the forward and the backward of a run

    def _fresh(self, spec: Operation, inputs: Inputs) -> Inputs:
        """The inputs in the domain's layout, with new copies of those that a call updates in place."""
        inputs = in_layout(inputs, self.domain.layout)
        updated = {port.name for port in spec.outputs} if self.domain.in_place else set()
        return inputs.replaced(**{name: x.clone() for name, x in inputs.items() if name in updated and x is not None})

    @marked(Mark.IMPLEMENTATION)
    def _from_graph(self, spec: Operation, first: Inputs, tensors: dict[str, Tensor], second: Inputs) -> Results:
        """Capture a call of `first` in a CUDA graph, put the numbers of `second` into its tensors, and replay the graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.adapter.run(first)  # compiles what it launches, which a capture must not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = self.adapter.run(first)
        for name, tensor in tensors.items():
            tensor.copy_(second[name])
        graph.replay()
        devices.settle(self.device)
        outputs = outputs_of(answer, spec, first, self.domain)
        return {name: output.detach().clone() for name, output in outputs.items()}

    def _call(
        self,
        adapter: Adapter,
        spec: Operation,
        inputs: Inputs,
        cotangents: Cotangents,
        frozen: Collection[str],
        *,
        same_objects: bool,
    ) -> Results:
        """Call the implementation and wait until the device has the results.

        If memory runs out on a GPU, we release the oracle's memory, which torch caches, and try a second time.
        """
        under_test = adapter is self.adapter  # and not its one-token form
        with recorder.launches() if under_test else contextlib.nullcontext():
            try:
                results = self.call_implementation(adapter, spec, inputs, cotangents, frozen, same_objects=same_objects)
            except RuntimeError as error:
                if self.device == "cpu" or not no_memory(error):
                    raise
                devices.free_bytes(self.device)
                results = self.call_implementation(adapter, spec, inputs, cotangents, frozen, same_objects=same_objects)
            devices.settle(self.device)
        return results

    @marked(Mark.IMPLEMENTATION)
    def call_implementation(
        self,
        adapter: Adapter,
        spec: Operation,
        inputs: Inputs,
        cotangents: Cotangents,
        frozen: Collection[str] = (),
        *,
        same_objects: bool = False,
    ) -> Results:
        """Compute outputs and gradients. If a worker hangs with this frame on its stack, the implementation is to blame."""
        backward = self._forward(adapter, spec, inputs, cotangents, frozen, same_objects=same_objects)
        if self._after_forward is not None and cotangents is not None:
            self._after_forward()
        return backward()

    def _forward(
        self,
        adapter: Adapter,
        spec: Operation,
        inputs: Inputs,
        cotangents: Cotangents,
        frozen: Collection[str] = (),
        *,
        same_objects: bool = False,
    ) -> Callable[[], Results]:
        """Compute outputs. Returns the function that computes the gradients, if there are cotangents, and returns all results."""
        way = self.way
        names = [port.name for port in spec.inputs if inputs.get(port.name) is not None and port.dtype != "index"]
        leaves = {name: inputs[name] if same_objects else inputs[name].detach() for name in names}
        for name, leaf in leaves.items():
            if not leaf.requires_grad:
                leaf.requires_grad_(cotangents is not None and name not in frozen)
        with recorder.arguments(adapter) if adapter is self.adapter else contextlib.nullcontext():
            answer = way.outputs(lambda x: adapter.run(with_one_state(self.domain, inputs.replaced(**x))), leaves)
        outputs = outputs_of(answer, spec, inputs, self.domain)
        results = {name: self._returned(value) for name, value in outputs.items()}
        if cotangents is None:
            return lambda: results
        return functools.partial(self._backward, way, inputs, leaves, outputs, results, cotangents, frozen)

    def _returned(self, x: Tensor) -> Tensor:
        """What a call returned; a copy if a later call may put other numbers there."""
        return x.detach() if self.domain.of_call.keeps_outputs else x.detach().clone()

    def _backward(
        self,
        way: ways.Plain,
        inputs: Inputs,
        leaves: dict[str, Tensor],
        outputs: Results,
        results: Results,
        cotangents: Results,
        frozen: Collection[str],
    ) -> Results:
        """The results of a call with the gradients of the leaves that require one."""
        tokens = inputs[next(iter(leaves))].numel() > 0
        leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        depends = not frozen and (tokens or inputs.get("state") is not None)
        for name, output in outputs.items():
            if depends and output.numel() and not output.requires_grad:
                what = "carries no gradient, although the domain declares backward=True"
                raise AdapterFault(name, FailureKind.NO_GRADIENT, what, detail="output")
        differentiable = [name for name in outputs if outputs[name].requires_grad]
        targets = [name for name in differentiable if name in cotangents]
        if targets:
            given = [cotangents[name].to(outputs[name].dtype) for name in targets]
            gradients = way.gradients([outputs[name] for name in targets], leaves, given)
            if not gradients:
                return results
        else:
            gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            # Without tokens, or with a loss of some outputs alone, an absent gradient stands for zeros.
            if gradient is None and leaf.numel() and tokens and targets == differentiable:
                self.absent.append(gradient_name(name))
            results[gradient_name(name)] = torch.zeros_like(leaf) if gradient is None else self._returned(gradient)
        return results
