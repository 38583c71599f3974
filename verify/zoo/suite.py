"""Test suites of others: their inputs and acceptance rule for a kernel of the gated delta rule, tried on the zoo.

A suite is a class in any file:

    from verify.zoo.suite import Suite

    class Mine(Suite):
        def cases(self):
            yield {"q": ..., "k": ..., "v": ..., "g": ..., "beta": ..., "cotangents": {"o": ..., "final_state": ...}}

        def accepts(self, got, reference, inputs):
            return torch.allclose(got["o"].double(), reference["o"], rtol=1e-2, atol=1e-2)

`gdn-verify zoo --rule mine.py:Mine` then prints which wrong implementations ("animals") the suite would notice.
"""

import abc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from oracles.operations import OPERATIONS
from oracles.tolerance import bound
from properties.laws.law import Cotangents, Results

OPERATION = "gated_delta_rule"
OWN = {"state": None, "cu_seqlens": None, "scale": None, "qk_norm": False, "output_final_state": True}
SPEC = OPERATIONS[OPERATION]


class Suite(abc.ABC):
    """A test suite: inputs, and a rule that accepts or rejects a kernel's results for them.

    The docstring of a subclass names the suite's source in one line; reports show it. `chunk` is the chunk length that the suite's
    tests pass to kernels, if they set one.
    """

    chunk: int | None = None

    @abc.abstractmethod
    def cases(self) -> Iterable[Mapping[str, Any]]:
        """The calls of the suite, as mappings; the same ones every time.

        Each has q, k [B, T, H, K], v [B, T, HV, V] and g, beta [B, T, HV]. Optional are state [N, HV, K, V] in float32, cu_seqlens
        [N + 1], scale, qk_norm and output_final_state (default True). With `cotangents` of o and final_state, in the dtypes of
        these outputs, gradients are compared too.
        """

    @abc.abstractmethod
    def accepts(self, got: Results, reference: Results, inputs: Inputs) -> bool:
        """Whether the suite's tests would pass. An AssertionError counts as False.

        Both results have o, final_state if the call asks for it, and with cotangents dq, dk, dv, dg, dbeta, dstate.
        """

    def reference(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """The right results, by the same names: those of the float64 oracle, unless the suite overrides this method."""
        return bound.truth(SPEC, inputs, cotangents)


def call(case: Mapping[str, Any]) -> tuple[Inputs, Cotangents]:
    """The inputs and cotangents of a case. ValueError names an argument that is unknown, missing or illegal."""
    arguments = dict(case)
    cotangents: Cotangents = arguments.pop("cotangents", None)
    known = [*(port.name for port in SPEC.inputs), *OWN]
    for name in arguments:
        if name not in known:
            raise ValueError(f"a case must have {', '.join(dict.fromkeys(known))} or cotangents, got {name!r}")
    for name in ("q", "k", "v", "g", "beta"):
        if not isinstance(arguments.get(name), Tensor):
            raise ValueError(f"{name} of a case must be a tensor, got {type(arguments.get(name)).__name__}")  # noqa: TRY004 - one error for all
    inputs = Inputs(**{**OWN, **arguments})
    SPEC.check(inputs)
    if cotangents is not None:
        wanted = ["o", "final_state"] if inputs.output_final_state else ["o"]
        if sorted(cotangents) != sorted(wanted):
            raise ValueError(f"cotangents of a case must be of {', '.join(wanted)}, got {', '.join(cotangents) or 'none'}")
    return inputs, cotangents


def finite(x: Tensor) -> bool:
    """Whether every element is finite."""
    return bool(torch.isfinite(x).all())
