"""Calls of the convolution, the gates and the norms, some on which every wrong reading shows, and whether two results agree."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.conv import CAUSAL_CONV1D
from oracles.gates import GDN_GATE, KDA_GATE
from oracles.norm import GATED_RMS_NORM, L2NORM, NORM_GATE_LINEAR
from oracles.operation import Inputs, Operation
from tests.judging import Results

OPERATIONS = {
    operation.name: operation for operation in (CAUSAL_CONV1D, GDN_GATE, KDA_GATE, L2NORM, GATED_RMS_NORM, NORM_GATE_LINEAR)
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXACT = Arithmetic.exact()


# Calls


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform in (-1, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


SHAPES: dict[str, tuple[dict[str, Any], ...]] = {  # few, so that the disturbed runs' grids are made once
    "causal_conv1d": (
        {"lengths": (20,), "D": 6, "W": 4},
        {"lengths": (9, 0, 2, 30), "packed": True, "D": 5, "W": 4},
        {"lengths": (1, 1, 1), "D": 7, "W": 4, "bias": False},
        {"lengths": (2, 25), "packed": True, "D": 4, "W": 3, "state": False},
        {"lengths": (40,), "D": 3, "W": 1},
        {"lengths": (12, 12), "D": 4, "W": 2, "bias": False},
    ),
    "gdn_gate": ({"B": 2, "T": 17, "HV": 3}, {"B": 1, "T": 60, "HV": 2, "bias": False}, {"B": 1, "T": 1, "HV": 8}),
    "kda_gate": (
        {"B": 2, "T": 7, "HV": 3, "K": 4},
        {"B": 1, "T": 30, "HV": 2, "K": 5, "bias": False},
        {"B": 1, "T": 1, "HV": 2, "K": 16},
    ),
    "l2norm": ({"B": 2, "T": 9, "H": 2, "K": 8}, {"B": 1, "T": 20, "H": 3, "K": 1}, {"B": 1, "T": 3, "H": 1, "K": 128}),
    "gated_rms_norm": (
        {"B": 2, "T": 9, "HV": 2, "V": 8},
        {"B": 1, "T": 20, "HV": 3, "V": 1, "bias": False},
        {"B": 1, "T": 5, "HV": 2, "V": 64},
    ),
    "norm_gate_linear": (
        {"B": 2, "T": 9, "D": 8, "E": 5},
        {"B": 1, "T": 20, "D": 1, "E": 1, "bias": False},
        {"B": 1, "T": 5, "D": 64, "E": 3},
    ),
}


def drawn(name: str, seed: int, dtype: torch.dtype) -> tuple[Inputs, Results]:
    """A call of operation `name` and cotangents of its outputs: shapes in turn, options and hard values by the seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[name][seed % len(SHAPES[name])]
    make = functools.partial(rand, generator)
    coin = torch.randint(0, 2, (4,), generator=generator, dtype=torch.bool).tolist()
    if name == "causal_conv1d":
        lengths, channels, width = shape["lengths"], shape["D"], shape["W"]
        batch = (1, sum(lengths)) if shape.get("packed") else (len(lengths), lengths[0])
        x = make(*batch, channels) * torch.tensor([1.0, 30.0, 0.02, 0.0])[torch.arange(batch[1]) // 3 % 4, None]
        state = make(len(lengths), channels, width) if shape.get("state", True) else None
        inputs = Inputs(
            x=3 * x if coin[0] else x,
            weight=make(channels, width),
            bias=2 * make(channels) if shape.get("bias", True) else None,
            state=state,
            cu_seqlens=offsets(lengths) if shape.get("packed") else None,
            activation="silu" if coin[1] else None,
            output_final_state=True,
        )
        directions = {"y": make(*batch, channels), "final_state": make(len(lengths), channels, width)}
    elif name in ("gdn_gate", "kda_gate"):
        heads, last = shape["HV"], ((shape["K"],) if "K" in shape else ())
        rows = (shape["B"], shape["T"], heads)
        reach = torch.tensor([1.0, 10.0, 100.0])[torch.randint(0, 3, rows, generator=generator)]
        inputs = Inputs(
            a=make(*rows, *last) * (reach.unsqueeze(-1) if last else reach),
            b=make(*rows) * reach,
            A_log=make(heads) * 3,
            dt_bias=4 * make(heads, *last) if shape.get("bias", True) else None,
            allow_neg_eigval=coin[0],
        )
        directions = {"g": make(*rows, *last), "beta": make(*rows)}
    else:
        full = tuple(size for axis, size in shape.items() if axis not in ("bias", "E"))
        scale = torch.tensor([1.0, 1e-3, 50.0, 1e-4, 0.0])[torch.randint(0, 5, (*full[:-1], 1), generator=generator)]
        values = {"x": make(*full) * scale, "eps": (1e-6, 1e-5)[coin[0]]}
        if name != "l2norm":
            values |= {"z": make(*full) * (20 if coin[1] else 2), "weight": make(full[-1]) * 2 if shape.get("bias", True) else None}
        out = shape.get("E", full[-1])
        if name == "norm_gate_linear":
            values |= {"linear": make(out, full[-1]) / 8, "bias": make(out) if shape.get("bias", True) else None}
        inputs, directions = Inputs(**values), {"y": make(*full[:-1], out)}
    return cast(OPERATIONS[name], inputs, directions, dtype)


def cast(operation: Operation, inputs: Inputs, directions: Results, dtype: torch.dtype) -> tuple[Inputs, Results]:
    """The call in `dtype`, and in float32 where a port says so even of half-precision calls."""

    def kind(name: str) -> torch.dtype:
        return torch.float32 if name == "fp32" and dtype != torch.float64 else dtype

    tensors = {port.name: inputs[port.name].to(kind(port.dtype)) for port in operation.inputs if inputs.get(port.name) is not None}
    return inputs.replaced(**tensors), {
        name: direction.to(kind(operation.port(name).dtype)) for name, direction in directions.items()
    }


def telling(name: str, dtype: torch.dtype) -> tuple[Inputs, Results]:
    """A call on which every wrong reading shows: a sequence shorter than W between others, eps that matters, all arguments."""
    make = functools.partial(rand, torch.Generator().manual_seed(11))
    if name == "causal_conv1d":
        inputs = Inputs(
            x=make(1, 21, 5),
            weight=make(5, 4),
            bias=make(5),
            state=make(3, 5, 4),
            cu_seqlens=torch.tensor([0, 8, 10, 21]),
            activation="silu",
            output_final_state=True,
        )
        directions = {"y": make(1, 21, 5), "final_state": make(3, 5, 4)}
    elif name in ("gdn_gate", "kda_gate"):
        last = (4,) if name == "kda_gate" else ()
        inputs = Inputs(
            a=3 * make(2, 10, 3, *last),
            b=3 * make(2, 10, 3),
            A_log=1 + make(3),
            dt_bias=make(3, *last),
            allow_neg_eigval=True,
        )
        directions = {"g": make(2, 10, 3, *last), "beta": make(2, 10, 3)}
    else:
        x = make(2, 10, 2, 8) * torch.tensor([1.0, 1e-3, 3e-4, 1e-2, 10.0]).repeat(2)[:, None, None]
        if name == "norm_gate_linear":
            more = {"z": 2 * make(2, 10, 8), "weight": make(8), "linear": make(6, 8), "bias": make(6)}
            inputs, directions = Inputs(x=x[:, :, 0], eps=1e-6, **more), {"y": make(2, 10, 6)}
            return cast(OPERATIONS[name], inputs, directions, dtype)
        more = {"z": 2 * make(2, 10, 2, 8), "weight": make(8)} if name == "gated_rms_norm" else {}
        inputs, directions = Inputs(x=x, eps=1e-6, **more), {"y": make(2, 10, 2, 8)}
    return cast(OPERATIONS[name], inputs, directions, dtype)


def named(parameter: object) -> str:
    """The identity of a parameter in a test's name: its words."""
    return parameter if isinstance(parameter, str) else ""


def agree(got: Results, want: Results, *, exactly: bool) -> bool:
    """Equal to the bit, or within 1e-13 of numbers that are of order 1 to 100."""
    assert got.keys() == want.keys()
    pairs = [(got[name], want[name]) for name in want]
    if exactly:
        return all(torch.equal(one, other) for one, other in pairs)
    return all(one.shape == other.shape and torch.allclose(one, other, rtol=1e-13, atol=1e-13) for one, other in pairs)
