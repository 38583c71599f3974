"""Ways to compute outputs and gradients: as one plain call, under checkpointing, with saved tensors moved away, and others.

`AdapterBench.under` calls an implementation in a way that a law names. Models call kernels in all of them.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oracles.operation import Inputs, gradient_name
from properties.laws.law import Results
from verify.bench.failing import Counts, FailingOperation

Call = Callable[[dict[str, Tensor]], Any]  # from the tensors of a call by name to what the implementation returns
Gradients = Sequence[Tensor | None]
Backward = Callable[[], Results]
ALIGNMENT = 64  # bytes, as torch's allocator aligns tensors on a CPU


class Plain:
    """One call, and one backward pass of torch.autograd.grad. `more` are results beside outputs and gradients.

    Each of `others` runs the forward of another call, and returns the function that runs its backward and returns its results.
    """

    def __init__(self, others: Sequence[Callable[[], Backward]] = (), directions: Sequence[Results] = ()) -> None:
        self.others, self.directions, self.more = others, directions, dict[str, Tensor]()

    def outputs(self, call: Call, leaves: dict[str, Tensor]) -> Any:
        """What the implementation returns."""
        return call(leaves)

    def gradients(self, outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Gradients:
        """The gradients of the leaves; None where none arrives."""
        return torch.autograd.grad(outputs, [*leaves.values()], cotangents, allow_unused=True)


class Checkpoint(Plain):
    """The forward runs again in the backward, whose saved tensors are those of the second forward."""

    reentrant = False

    def outputs(self, call: Call, leaves: dict[str, Tensor]) -> Any:
        def again(*values: Tensor) -> Any:
            return call(dict(zip(leaves, values, strict=True)))

        return checkpoint(again, *leaves.values(), use_reentrant=self.reentrant)


class Reentrant(Checkpoint):
    """The forward runs without gradients, and again in the backward, which is a backward pass inside a backward pass.

    Such a checkpoint refuses torch.autograd.grad, so gradients are those that `backward` adds to the leaves.
    """

    reentrant = True

    def gradients(self, outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Gradients:
        torch.autograd.backward(outputs, cotangents)
        return [leaf.grad for leaf in leaves.values()]


class Offloaded(Plain):
    """Saved tensors are copied to the CPU, and copied back for the backward."""

    def copied(self, x: Tensor, device: torch.device) -> Tensor:
        """A copy of a saved tensor on a device."""
        return _copied(x, device)

    def outputs(self, call: Call, leaves: dict[str, Tensor]) -> Any:
        def pack(x: Tensor) -> tuple[torch.device, Tensor]:
            return x.device, self.copied(x, torch.device("cpu"))

        def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
            device, copy = packed
            return self.copied(copy, device)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return call(leaves)


class Dense(Offloaded):
    """The copies are contiguous, as those of torch.autograd.graph.save_on_cpu(pin_memory=True) are."""

    def copied(self, x: Tensor, device: torch.device) -> Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format).to(device)


class Twice(Plain):
    """The graph is retained, and the gradients are those of a later backward, behind two with other cotangents.

    Those of the first stay as they are. Those of the last are new tensors in the memory of the second ones, as an allocator may
    place them; their versions are the same.
    """

    def gradients(self, outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Gradients:
        memory = [torch.empty_like(x) for x in cotangents]

        def placed(factor: float) -> list[Tensor]:
            for place, x in zip(memory, cotangents, strict=True):
                place.copy_(factor * x)
            return [x.new_empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride()) for x in memory]

        for others in ([-2 * x for x in cotangents], placed(-4.0)):
            torch.autograd.grad(outputs, [*leaves.values()], others, allow_unused=True, retain_graph=True)
        return super().gradients(outputs, leaves, placed(1.0))


class Between(Plain):
    """The forwards of all other calls come before the first backward, as those of a model's layers or of micro-batches do.

    The backward of the last call runs inside that of the first, as soon as that has a gradient of an input, so two passes are
    interleaved where a backward has several functions. Then comes that of the last call but one, whose results are `more`, by
    names such as "later dq". So backwards run neither in the order of the forwards nor in the opposite order.
    """

    def outputs(self, call: Call, leaves: dict[str, Tensor]) -> Any:
        answer = call(leaves)
        *_, self.later, last = [start() for start in self.others]
        self.last = functools.cache(last)
        return answer

    def gradients(self, outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Gradients:
        def inside(_: Tensor) -> None:
            self.last()

        hooks = [leaf.register_hook(inside) for leaf in leaves.values()]
        found = super().gradients(outputs, leaves, cotangents)
        for hook in hooks:
            hook.remove()
        self.last()  # no gradient may have arrived
        self.more = {f"later {name}": value for name, value in self.later().items()}
        return found


class Cleared(Plain):
    """The caller clears the inputs between forward and backward. What was saved are copies, as under offloading.

    So torch never raises its error about a saved tensor that was changed, and what an implementation keeps in another way shows. If
    the implementation raises an error, there are no gradients.
    """

    def outputs(self, call: Call, leaves: dict[str, Tensor]) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: _copied(x, x.device), lambda x: x):
            return call(leaves)

    def changed(self, outputs: list[Tensor], leaves: dict[str, Tensor]) -> Sequence[Tensor]:  # noqa: ARG002
        """What the caller clears."""
        return [*leaves.values()]

    def gradients(self, outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Gradients:
        tensors = [x.detach() for x in self.changed(outputs, leaves)]
        before = [x.clone() for x in tensors]
        for x in tensors:
            x.zero_()
        try:
            return super().gradients(outputs, leaves, cotangents)
        except Exception:  # any error is right: the caller then knows
            return ()
        finally:
            for x, numbers in zip(tensors, before, strict=True):
                x.copy_(numbers)


class ClearedOutputs(Cleared):
    """The same with the outputs. Torch may refuse to go on where outputs are views."""

    def changed(self, outputs: list[Tensor], leaves: dict[str, Tensor]) -> Sequence[Tensor]:  # noqa: ARG002
        return outputs


class Second(Plain):
    """Gradients with create_graph=True. `more` has the gradients of their products with `directions`, by names as "second 0 dq".

    If any error is raised, `more` stays empty. A gradient without a graph is taken for a constant, as torch takes it.
    """

    def gradients(self, outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Gradients:
        inputs, first = [*leaves.values()], None
        try:
            # Cotangents without a gradient would hide once_differentiable: torch then leaves its error out.
            turned = [x.detach().clone().requires_grad_() for x in cotangents]
            first = torch.autograd.grad(outputs, inputs, turned, allow_unused=True, create_graph=True)
            graphs = {name: x for name, x in zip(leaves, first, strict=True) if x is not None and x.requires_grad}
            for number, direction in enumerate(self.directions):
                if products := [(x.double() * direction[name].double()).sum() for name, x in graphs.items()]:
                    torch.autograd.backward(products, retain_graph=True)  # torch.autograd.grad hides once_differentiable's error
                for name, leaf in leaves.items():
                    self.more[f"second {number} {gradient_name(name)}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    leaf.grad = None
        except Exception:  # whatever is raised, second derivatives are refused
            self.more.clear()
            return super().gradients(outputs, leaves, cotangents) if first is None else first
        return first


class Failing(Plain):
    """Operation number `at` of the call, of those counted, fails as if memory had run out (verify/bench/failing.py)."""

    def __init__(self, at: int, counts: Counts) -> None:
        super().__init__()
        self.fault = FailingOperation(at, counts)

    def outputs(self, call: Call, leaves: dict[str, Tensor]) -> Any:
        with self.fault:
            return super().outputs(call, leaves)

    def gradients(self, outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Gradients:
        with self.fault:
            return super().gradients(outputs, leaves, cotangents)


WAYS: Mapping[str, type[Plain]] = {
    "checkpoint": Checkpoint,
    "reentrant": Reentrant,
    "offloaded": Offloaded,
    "dense": Dense,
    "twice": Twice,
    "between": Between,
    "cleared": Cleared,
    "cleared outputs": ClearedOutputs,
    "second": Second,
    "frozen": Plain,
}


def _copied(x: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides and, on a CPU, the same alignment. With others, a product of matrices may round differently."""
    x = x.detach()
    if not x.numel():
        return x.clone().to(device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    lead = x.data_ptr() % ALIGNMENT // x.element_size()
    memory = torch.zeros(lead + span, dtype=x.dtype, device=device)
    memory[lead:] = x.as_strided((span,), (1,))
    return memory.as_strided(x.shape, x.stride(), lead)


Function = Callable[..., tuple[Tensor, ...]]
Tensors = tuple[Tensor, ...]


def by_vjp(function: Function, values: Tensors, cotangents: Tensors) -> tuple[Tensors, Tensors]:
    """The outputs, and the gradients that torch.func.vjp gives."""
    outputs, back = cast("tuple[Tensors, Callable[[Tensors], Tensors]]", torch.func.vjp(function, *values))
    return outputs, back(tuple(x.to(output.dtype) for x, output in zip(cotangents, outputs, strict=True)))


def by_jvp(function: Function, values: Tensors, directions: Tensors) -> tuple[Tensors, Tensors]:
    """The outputs, and their derivatives along the directions that torch.func.jvp gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch imports what it deprecates
        return cast("tuple[Tensors, Tensors]", torch.func.jvp(function, values, directions))


def by_vmap(function: Function, values: Tensors, others: Tensors) -> tuple[Tensors, Tensors]:
    """The outputs of two calls that torch.func.vmap makes in one, mapped along the first axis of every tensor."""
    results = torch.func.vmap(function)(*map(torch.stack, zip(values, others, strict=True)))
    return tuple(x[0] for x in results), tuple(x[1] for x in results)


def by_vmap_along_1(function: Function, values: Tensors, others: Tensors) -> tuple[Tensors, Tensors]:
    """As `by_vmap`, along the second axis. Tensors that are the same object in both calls are shared and not mapped."""
    pairs = list(zip(values, others, strict=True))
    axes = tuple(None if one is other else 1 for one, other in pairs)
    both = [one if axis is None else torch.stack((one, other), axis) for (one, other), axis in zip(pairs, axes, strict=True)]
    results = torch.func.vmap(function, in_dims=axes)(*both)
    return tuple(x[0] for x in results), tuple(x[1] for x in results)


TRANSFORMS: Mapping[str, Callable[[Function, Tensors, Tensors], tuple[Tensors, Tensors]]] = {
    "vjp": by_vjp,
    "jvp": by_jvp,
    "vmap": by_vmap,
    "vmap along 1": by_vmap_along_1,
}


def function_of(call: Callable[[Inputs], Results], inputs: Inputs, names: Sequence[str]) -> Function:
    """A function from the tensors of some inputs to the outputs, in their order, for torch.func."""

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(inputs.replaced(**dict(zip(names, values, strict=True)))).values())

    return function
