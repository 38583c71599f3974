"""The bench of any callable: what a call may be off by is measured with disturbed inputs, because there is no reference.

docs/explanation/without-a-reference.md says why two right ways to compute a call stay within these bounds.
"""

import torch
from torch import Tensor

from oracles.arithmetic.counter import integers, mix_number
from oracles.operation import Inputs
from oracles.rule.segments import Restarts
from oracles.tolerance.allowance import FLOOR_ULP, KAPPA
from oracles.tolerance.bound import Bound
from properties.laws.law import Cotangents, Results
from verify.bench import afresh
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import AdapterFault
from verify.process.outcome import FailureKind

DISTURBED = 4  # calls with disturbed inputs
AROUND = 4  # how many calls the error scale of the whole tensor counts for, beside those of the row itself
ORIGIN = f"{KAPPA:g} times the spread of {DISTURBED} calls with disturbed inputs"
BITS = 24  # of a disturbance


class CallBench(AdapterBench):
    """A Bench (properties/laws/law.py) for a callable without a reference.

    `spec` is the adapter's name if calls for comparison are made in processes that make no other call (verify/bench/afresh.py).
    """

    spec = ""

    def bounds(
        self,
        inputs: Inputs,
        cotangents: Cotangents,
        algorithm: str | None = None,  # noqa: ARG002
        *,
        restarts: Restarts = (),  # noqa: ARG002
    ) -> dict[str, Bound]:
        """The results of a call of copies of the inputs, and for each row how far disturbed inputs move it.

        A row is the vector along the last axis; each number of a vector of parameters is a row of its own. AdapterFault if a result
        is not finite.
        """
        process = afresh.started() if self.spec and self.device == "cpu" else None
        if process is not None and (found := process.bounds(self.spec, self.case, inputs, cotangents)):
            return found
        once = self.run(_disturbed(inputs, 0), _disturbed_values(cotangents, 0))
        moved = [self.run(_disturbed(inputs, seed), _disturbed_values(cotangents, seed)) for seed in range(1, DISTURBED + 1)]
        for name in once:
            if not all(bool(result[name].isfinite().all()) for result in (once, *moved)):
                raise AdapterFault(name, FailureKind.NOT_FINITE, "is not finite")
        return {name: _bound(name, value, moved) for name, value in once.items()}

    def truth(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """Calls have no truth."""
        raise NotImplementedError("a call has no float64 reference")


def _bound(name: str, once: Tensor, moved: list[Results]) -> Bound:
    value, ulp = once.double(), torch.finfo(once.dtype).eps
    steps = [(result[name].double() - value).square() for result in moved]
    size = value.square()
    if value.ndim > 1:
        steps, size = [step.sum(-1) for step in steps], size.sum(-1)
    own = torch.stack(steps).mean(0) if steps else size
    overall = own.sum() / size.sum().clamp(min=torch.finfo(torch.float64).tiny)
    variance = (len(moved) * own + AROUND * overall * size) / (len(moved) + AROUND)
    return Bound(value, KAPPA * variance.sqrt() + FLOOR_ULP * ulp * size.sqrt() + torch.finfo(once.dtype).tiny, ORIGIN)


def _disturbed(inputs: Inputs, seed: int) -> Inputs:
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    return inputs.replaced(**(_disturbed_values(tensors, seed) or {}))


def _disturbed_values(values: dict[str, Tensor] | None, seed: int) -> dict[str, Tensor] | None:
    """Copies in which every number moves by less than one unit in its last place and is rounded again; seed 0 moves nothing."""
    if values is None:
        return None
    return {name: _moved(x, mix_number(64 * seed + place) if seed else 0) for place, (name, x) in enumerate(values.items())}


def _moved(x: Tensor, stream: int) -> Tensor:
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    if not stream or not x.is_floating_point() or not x.numel():
        return copy
    counter = torch.arange(x.numel(), dtype=torch.int64, device=x.device)
    shares = integers((counter, stream, BITS))[0].view(x.shape).double() * 2.0 ** (1 - BITS)
    return (copy.double() * (1 + torch.finfo(x.dtype).eps * shares)).to(x.dtype)
