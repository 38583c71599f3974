"""The bench that compiles: it calls the implementation so that its kernels are launched, and judges nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

from oracles.operation import Inputs
from oracles.rule.segments import Restarts
from oracles.tolerance.bound import Bound
from properties.laws.law import Cotangents, Results
from verify.adapters.contract import sizes_of
from verify.bench.adapter_bench import AdapterBench


class Compiling(AdapterBench):
    """A bench that calls the implementation only so that its kernels are compiled. Truths and tolerances are placeholders."""

    def bounds(
        self,
        inputs: Inputs,
        cotangents: Cotangents,
        algorithm: str | None = None,  # noqa: ARG002
        *,
        restarts: Restarts = (),  # noqa: ARG002
    ) -> dict[str, Bound]:
        """Zeros with tolerances of -1, which every error exceeds, so that no law gives up because its case is blind."""
        ports = {port.name: port for port in (*self._contract(inputs).outputs, *self._contract(inputs).gradients())}
        return {
            name: Bound(value, torch.full(value.shape if ports[name].scalar_rows else value.shape[:-1], -1.0, device=value.device))
            for name, value in self.truth(inputs, cotangents).items()
        }

    def note(self, promise: str, got: Results, want: Callable[[], Results]) -> None:  # noqa: ARG002
        """Make the further calls that a law compares with to the bit."""
        want()

    def truth(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """Zeros in the shape of each output and gradient."""
        spec = self._contract(inputs)
        sizes = sizes_of(spec, inputs)
        ports = [*spec.outputs, *(spec.gradients() if cotangents is not None else ())]
        device = next(x.device for x in inputs.values() if isinstance(x, Tensor))
        shapes = {
            port.name: [sizes[axis] for axis in port.axes.split()] for port in ports if set(port.axes.split()) <= sizes.keys()
        }
        return {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
