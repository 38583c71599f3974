"""The convolution, the gates and the norms refuse what they would broadcast or ignore, with the rule and the value."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracles.conv import definition, update
from oracles.norm import gated_rms_norm, l2norm, norm_gate_linear
from tests.pointwise_calls import OPERATIONS, telling
from tests.together import for_each

# Contracts

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("causal_conv1d", {"weight": torch.zeros(1, 4)}, r"weight must have D = 5 like .*, got shape \(1, 4\) for \[D, W\]"),
    ("causal_conv1d", {"weight": torch.zeros(5, 1, 4)}, r"weight must have axes \[D, W\], got shape \(5, 1, 4\)"),
    ("causal_conv1d", {"weight": torch.zeros(5, 0), "state": None}, r"W must be at least 1, got 0"),
    ("causal_conv1d", {"bias": torch.zeros(1)}, r"bias must have D = 5 like .*, got shape \(1,\)"),
    ("causal_conv1d", {"state": torch.zeros(3, 5, 3)}, r"state must have W = 4 like .*, got shape \(3, 5, 3\)"),
    ("causal_conv1d", {"state": torch.zeros(2, 5, 4)}, r"state must have N = 3, one per sequence, got shape \(2, 5, 4\)"),
    ("causal_conv1d", {"cu_seqlens": torch.tensor([0, 8, 20])}, r"cu_seqlens must end at the token count 21, got 20"),
    ("causal_conv1d", {"x": torch.zeros(2, 21, 5)}, r"cu_seqlens needs B = 1, .* got B = 2"),
    (
        "causal_conv1d",
        {"x": torch.zeros(1, 21, 5, dtype=torch.int64)},
        r"x must be floating point of 16, 32 or 64 bits, got torch.int64",
    ),
    ("causal_conv1d", {"x": None}, r"x must be a tensor, got NoneType"),
    ("causal_conv1d", {"activation": "swish"}, r"activation must be None or 'silu', got 'swish'"),
    ("causal_conv1d", {"output_final_state": 1}, r"output_final_state must be True or False, got 1"),
    ("gdn_gate", {"A_log": torch.zeros(1)}, r"A_log must have HV = 3 like .*, got shape \(1,\)"),
    ("gdn_gate", {"dt_bias": torch.zeros(1)}, r"dt_bias must have HV = 3 like .*, got shape \(1,\)"),
    ("gdn_gate", {"b": torch.zeros(2, 1, 3)}, r"b must have T = 10 like .*, got shape \(2, 1, 3\)"),
    ("gdn_gate", {"allow_neg_eigval": "yes"}, r"allow_neg_eigval must be True or False, got 'yes'"),
    ("kda_gate", {"dt_bias": torch.zeros(12)}, r"dt_bias must have axes \[HV, K\], got shape \(12,\)"),
    ("kda_gate", {"dt_bias": torch.zeros(3, 1)}, r"dt_bias must have K = 4 like .*, got shape \(3, 1\)"),
    ("kda_gate", {"a": torch.zeros(2, 10, 3, 0), "dt_bias": None}, r"K must be at least 1, got 0"),
    ("l2norm", {"eps": 0.0}, r"eps must be a finite number above 0, got 0.0"),
    ("l2norm", {"eps": math.nan}, r"eps must be a finite number above 0, got nan"),
    ("l2norm", {"eps": math.inf}, r"eps must be a finite number above 0, got inf"),
    ("l2norm", {"eps": True}, r"eps must be a finite number above 0, got True"),
    ("l2norm", {"eps": "1e-6"}, r"eps must be a finite number above 0, got '1e-6'"),
    ("l2norm", {"x": torch.zeros(2, 10, 2, 0)}, r"K must be at least 1, got 0"),
    ("gated_rms_norm", {"z": torch.zeros(2, 10, 1, 8)}, r"z must have HV = 2 like .*, got shape \(2, 10, 1, 8\)"),
    ("gated_rms_norm", {"weight": torch.zeros(1)}, r"weight must have V = 8 like .*, got shape \(1,\)"),
    ("gated_rms_norm", {"eps": -1e-6}, r"eps must be a finite number above 0, got -1e-06"),
    ("norm_gate_linear", {"z": torch.zeros(2, 10, 1)}, r"z must have D = 8 like .*, got shape \(2, 10, 1\)"),
    ("norm_gate_linear", {"linear": torch.zeros(6, 1)}, r"linear must have D = 8 like .*, got shape \(6, 1\)"),
    ("norm_gate_linear", {"bias": torch.zeros(1)}, r"bias must have E = 6 like .*, got shape \(1,\)"),
    ("norm_gate_linear", {"linear": torch.zeros(0, 8), "bias": None}, r"E must be at least 1, got 0"),
]


def test_plain_functions_refuse_shapes_that_would_broadcast() -> None:
    x, state, weight, bias = torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(3, 4), torch.ones(3)
    update(x, state, weight, bias)
    for wrong, message in (
        ((x, state[:1], weight, bias), r"state must have shape \(2, 3, 4\) for x of \(2, 3\), got \(1, 3, 4\)"),
        ((x, state, weight[:1], bias), r"weight must have shape \(3, 4\) for x of \(2, 3\), got \(1, 4\)"),
        ((x, state, weight, bias[:1]), r"bias must have shape \(3,\) for x of \(2, 3\), got \(1,\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            update(*wrong)
    gated_rms_norm(x, x, bias)
    with pytest.raises(ValueError, match=r"^z must have the shape of x, \(2, 3\), got \(2, 1\)$"):
        gated_rms_norm(x, x[:, :1], bias)
    with pytest.raises(ValueError, match=r"^weight must have shape \(3,\), got \(1,\)$"):
        gated_rms_norm(x, x, bias[:1])


DEFINITIONS: list[tuple[Callable[[], object], str]] = [
    (lambda: update(*COLUMNS, None, "relu"), "activation must be None or 'silu', got 'relu'"),
    (
        lambda: definition(torch.ones(0, 2), torch.ones(2, 3), torch.ones(2, 4), None),
        "state must have shape (2, 4) for x of (2,)",
    ),
    (lambda: definition(torch.ones(2), *COLUMNS[1:], None), "x must be [T, D], got shape (2,)"),
    (lambda: update(*COLUMNS[:2], torch.ones(4), None), "x must be [..., D] and weight [D, W], got shapes (2,) and (4,)"),
    (lambda: l2norm(torch.ones(2), math.nan), "eps must be a finite number above 0, got nan"),
    (lambda: l2norm(torch.ones(2), torch.ones(2)), "eps must be a finite number above 0, got tensor([1., 1.])"),  # type: ignore[arg-type]
    (
        lambda: norm_gate_linear(torch.ones(2), torch.ones(2), None, torch.ones(3, 1)),
        "linear must have shape (E, 2), got (3, 1)",
    ),
    (
        lambda: norm_gate_linear(torch.ones(2), torch.ones(2), None, torch.ones(3, 2), torch.ones(1)),
        "bias must have shape (3,), got (1,)",
    ),
    (lambda: gated_rms_norm(torch.ones(2), torch.ones(2), None, -1e-6), "eps must be a finite number above 0, got -1e-06"),
]
COLUMNS = torch.ones(2), torch.ones(2, 4), torch.ones(2, 4)


@for_each(("call", "message"), DEFINITIONS)
def test_definitions_refuse_what_they_would_broadcast_or_ignore(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


@for_each(("name", "wrong", "message"), REFUSED)
def test_illegal_input_is_refused(name: str, wrong: dict[str, Any], message: str) -> None:
    inputs, _ = telling(name, torch.float32)
    OPERATIONS[name].check(inputs)
    with pytest.raises(ValueError, match=f"^{message}"):
        OPERATIONS[name].check(inputs.replaced(**wrong))
