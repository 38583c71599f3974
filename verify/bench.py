"""The bench: runs an adapter for a law, with probes around every run, and knows the truth and the bounds of its class.

Probes: uninitialised memory is poisoned, inputs must come back unchanged, outputs must have the contract's shape and dtype.
"""

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from oracles import bound
from oracles.bound import Bound
from oracles.case import Case
from oracles.operation import Inputs, gradient_name, sequences
from properties.laws import Cotangents, Results
from verify.adapter import Adapter
from verify.judge import Finding


class AdapterFault(Exception):
    """The implementation raised, or returned what is no answer. `finding` says which."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


class OutOfMemory(Exception):
    """The implementation ran out of memory."""


class Timed:
    """Seconds spent in the implementation and in the oracle."""

    def __init__(self) -> None:
        self.kernel_s = self.oracle_s = 0.0

    @contextlib.contextmanager
    def timed(self, account: str) -> Iterator[None]:
        """Count what is done inside on an account: "kernel_s" or "oracle_s"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, account, getattr(self, account) + time.perf_counter() - start)


class AdapterBench(Timed):
    """A Bench (properties/laws.py) for one adapter and one case."""

    def __init__(self, adapter: Adapter, counterpart: Adapter | None, case: Case, products: str = "ieee") -> None:
        super().__init__()
        self.adapter, self.case, self.products = adapter, case, products
        self.counterpart = counterpart or adapter
        self.domain, self.algorithm = adapter.domain, adapter.algorithm
        self.impure: list[Finding] = []

    def bounds(self, inputs: Inputs, cotangents: Cotangents, algorithm: str | None = None) -> dict[str, Bound]:
        """The truth and bounds for the adapter's class, or for `algorithm`."""
        inputs = contract(self.case, inputs)
        with self.timed("oracle_s"):
            chunk = self.adapter.chunk if algorithm is None else None
            made = bound.bounds(self.case.spec, inputs, cotangents, algorithm or self.adapter.algorithm, self.products, chunk)
        return {name: dataclasses.replace(each, finer=self._finer(each)) for name, each in made.items()}

    def _finer(self, one: Bound) -> Callable[[], Bound]:
        def finer() -> Bound:
            with self.timed("oracle_s"):
                assert one.finer is not None
                return one.finer()

        return finer

    def truth(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """The truth alone."""
        inputs = contract(self.case, inputs)
        with self.timed("oracle_s"):
            return bound.truth(self.case.spec, inputs, cotangents)

    def run(self, inputs: Inputs, cotangents: Cotangents, *, counterpart: bool = False, poison: float = float("nan")) -> Results:
        """One call of the adapter, and with cotangents its backward. AdapterFault if it raises or breaks the contract."""
        contract(self.case, inputs)
        adapter = self.counterpart if counterpart else self.adapter
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        copies = {name: value.clone() for name, value in tensors.items()}
        try:
            with self.timed("kernel_s"), poisoned(poison):
                results = self.call_implementation(adapter, inputs, cotangents)
        except AdapterFault:
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(str(error)) from error
        except Exception as error:
            if "can't allocate memory" in str(error):
                raise OutOfMemory(str(error)) from error
            raise AdapterFault(Finding("call", f"raised {type(error).__name__}: {short(error)}", frame(error))) from error
        finally:
            for name, before in copies.items():
                if not torch.equal(torch.nan_to_num(tensors[name]), torch.nan_to_num(before)):
                    self.impure.append(Finding(f"input {name}", "was changed by the call"))
        return results

    def call_implementation(self, adapter: Adapter, inputs: Inputs, cotangents: Cotangents) -> Results:
        """Outputs and gradients. A worker that hangs is blamed on the implementation if this frame is on its stack."""
        names = [port.name for port in self.case.spec.inputs if inputs[port.name] is not None]
        leaves = {name: inputs[name].detach().requires_grad_(cotangents is not None) for name in names}
        answer = adapter.run(inputs.replaced(**leaves))
        outputs = self._outputs(answer, inputs)
        results = {name: value.detach() for name, value in outputs.items()}
        if cotangents is None:
            return results
        depends = inputs.q.numel() > 0 or inputs.state is not None
        for name, output in outputs.items():
            if depends and output.numel() and not output.requires_grad:
                raise AdapterFault(Finding(name, "carries no gradient, though the domain says backward"))
        targets = [name for name in outputs if outputs[name].requires_grad]
        if targets:
            gradients = torch.autograd.grad(
                [outputs[name] for name in targets],
                list(leaves.values()),
                [cotangents[name] for name in targets],
                allow_unused=True,
            )
        else:
            gradients = tuple(torch.zeros_like(leaf) for leaf in leaves.values())
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            if gradient is None and leaf.numel() and inputs.q.numel():  # without tokens, zeros may be left unsaid
                raise AdapterFault(Finding(gradient_name(name), "is absent: no gradient reached this input"))
            results[gradient_name(name)] = torch.zeros_like(leaf) if gradient is None else gradient.detach()
        return results

    def _outputs(self, answer: Any, inputs: Inputs) -> Results:
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise AdapterFault(Finding("call", f"returned {type(answer).__name__}, must return a tuple (o, final_state)"))
        outputs = {"o": answer[0]} | ({"final_state": answer[1]} if inputs.output_final_state else {})
        count = len(sequences(inputs, "q"))
        shapes = {
            "o": tuple(inputs.v.shape),
            "final_state": (count, inputs.v.shape[2], inputs.k.shape[3], inputs.v.shape[3]),
        }
        dtypes = {"o": inputs.v.dtype, "final_state": torch.float32}
        for name, output in outputs.items():
            if not isinstance(output, Tensor):
                raise AdapterFault(Finding(name, f"is {type(output).__name__}, must be a tensor"))
            if tuple(output.shape) != shapes[name]:
                raise AdapterFault(Finding(name, f"has shape {tuple(output.shape)}, must have {shapes[name]}"))
            if output.dtype != dtypes[name]:
                raise AdapterFault(Finding(name, f"has dtype {output.dtype}, must have {dtypes[name]}"))
        return outputs


def contract(case: Case, inputs: Inputs) -> Inputs:
    """The inputs, refused if illegal: what we feed an implementation is always a legal call."""
    case.spec.check(inputs)
    return inputs


@contextlib.contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Uninitialised tensors made from Python hold `value` (large integers where it cannot be held): what is read before it is
    written shows."""
    names = ("empty", "empty_like", "empty_strided")
    originals = {name: getattr(torch, name) for name in names}
    new_empty = torch.Tensor.new_empty

    def filled(make: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            made: Tensor = make(*args, **kwargs)
            with torch.no_grad():
                if made.is_floating_point():
                    return made.fill_(value)
                return made.fill_(99 if made.dtype in (torch.int8, torch.uint8, torch.bool) else 29999)

        return wrapper

    try:
        for name, make in originals.items():
            setattr(torch, name, filled(make))
        torch.Tensor.new_empty = filled(new_empty)  # type: ignore[method-assign]
        yield
    finally:
        for name, make in originals.items():
            setattr(torch, name, make)
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]


def short(error: BaseException) -> str:
    """The first line of what it says."""
    return (str(error).strip() or "no message").splitlines()[0][:160]


def frame(error: BaseException) -> str:
    """Where it was raised: the innermost frame, file name only, so that the line reads the same on every machine."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
