"""Suites: somebody's own inputs and acceptance rule for a kernel of the gated delta rule, and which animals they let live.

A suite is a class in any file:

    from verify.zoo.suite import Suite

    class Mine(Suite):
        def cases(self):
            yield {"q": ..., "k": ..., "v": ..., "g": ..., "beta": ..., "cotangents": {"o": ..., "final_state": ...}}

        def accepts(self, got, reference, inputs):
            return torch.allclose(got["o"].double(), reference["o"], rtol=1e-2, atol=1e-2)

and `python -m verify zoo --rule mine.py:Mine` says what it would notice.
"""

import abc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from oracles import bound
from oracles.operation import Inputs
from oracles.operations import OPERATIONS
from properties.laws import Cotangents, Results

OPERATION = "gated_delta_rule"
OWN = {"state": None, "cu_seqlens": None, "scale": None, "qk_norm": False, "output_final_state": True}
SPEC = OPERATIONS[OPERATION]


class Suite(abc.ABC):
    """Inputs, and a rule that accepts or rejects what a kernel made of them. Its docstring says whose it is, in one line.

    `chunk` is the length of chunks that its tests ask kernels for, where they set one.
    """

    chunk: int | None = None

    @abc.abstractmethod
    def cases(self) -> Iterable[Mapping[str, Any]]:
        """Calls, the same ones every time: q, k [B, T, H, K], v [B, T, HV, V], g, beta [B, T, HV], and as needed state
        [N, HV, K, V] in float32, cu_seqlens [N + 1], scale, qk_norm, output_final_state (default True); with cotangents of o and
        final_state, of the outputs' dtypes, gradients are compared too.
        """

    @abc.abstractmethod
    def accepts(self, got: Results, reference: Results, inputs: Inputs) -> bool:
        """Whether the tests would pass; an AssertionError says no. Both have o, final_state if asked for, and with cotangents dq,
        dk, dv, dg, dbeta, dstate.
        """

    def reference(self, inputs: Inputs, cotangents: Cotangents) -> Results:
        """What is right, by the same names: the float64 oracle's answer, unless the suite has a reference of its own."""
        return bound.truth(SPEC, inputs, cotangents)


def call(case: Mapping[str, Any]) -> tuple[Inputs, Cotangents]:
    """A case as the kernel's inputs and the cotangents. ValueError names what a legal call has not, or lacks."""
    given = dict(case)
    cotangents: Cotangents = given.pop("cotangents", None)
    known = [*(port.name for port in SPEC.inputs), *OWN]
    for name in given:
        if name not in known:
            raise ValueError(f"a case must have {', '.join(dict.fromkeys(known))} or cotangents, got {name!r}")
    for name in ("q", "k", "v", "g", "beta"):
        if not isinstance(given.get(name), Tensor):
            raise ValueError(f"{name} of a case must be a tensor, got {type(given.get(name)).__name__}")  # noqa: TRY004 - one error for all
    inputs = Inputs(**{**OWN, **given})
    SPEC.check(inputs)
    if cotangents is not None:
        wanted = ["o", "final_state"] if inputs.output_final_state else ["o"]
        if sorted(cotangents) != sorted(wanted):
            raise ValueError(f"cotangents of a case must be of {', '.join(wanted)}, got {', '.join(cotangents) or 'none'}")
    return inputs, cotangents


def finite(x: Tensor) -> bool:
    """Whether every element is a number."""
    return bool(torch.isfinite(x).all())
