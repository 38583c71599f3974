"""The causal depthwise convolution with short filters, in float64.

    y_t = act(bias + sum_w weight[:, w] x_{t-W+1+w}) + residual_t      w = 0 ... W - 1; act is silu, or nothing

for each channel. The residual, if there is one, has the shape of x. The initial state has the W inputs before the sequence's start,
oldest first, or zeros. Sequences never mix. The final state has the last W columns of the initial state and the inputs together, so
it keeps columns of the initial state if a sequence is shorter than W.

A state has W columns in flash-linear-attention and transformers (CAUSAL_CONV1D). SGLang and vLLM keep W - 1 columns
(CAUSAL_CONV1D_SHORT_STATE), because only the final state of a sequence without tokens depends on column 0. If W = 1, such a state
has no columns.

`update` computes one token, and `definition` is a loop over it; their states have W columns, and `without_oldest` and `with_oldest`
convert. `forward` computes all sequences at once: it puts the states' columns and the tokens of all sequences into one line, and y
is the sum of W shifted products.
"""

import dataclasses

import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic, summed
from oracles.gates import rounded_silu, shared, sigmoid
from oracles.operation import Inputs, Operation, Port, at_least_one, flag, one_a_sequence, padding_of_rows, sequences

ACTIVATIONS = (None, "silu")


def update(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> tuple[Tensor, Tensor]:
    """Return y [..., D] of the next token x [..., D], and the state [..., D, W] after it.

    state [..., D, W], weight [D, W], bias [D] or None. ValueError for other shapes or another activation.
    """
    _check_token(x, state, weight, bias, activation)
    state = torch.cat([state[..., 1:], x.unsqueeze(-1)], -1)
    y = (weight * state).sum(-1)
    y = y if bias is None else bias + y
    return y * sigmoid(y) if activation == "silu" else y, state


def definition(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return y [T, D] and the final state [D, W] of one sequence.

    x [T, D], state [D, W], weight [D, W], bias [D] or None. ValueError as in `update`.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [T, D], got shape {tuple(x.shape)}")
    _check_token(x.new_zeros(x.shape[1:]), state, weight, bias, activation)
    rows = []
    for x_t in x:
        y, state = update(x_t, state, weight, bias, activation)
        rows.append(y)
    return torch.stack(rows) if rows else torch.zeros_like(x), state


def _check_token(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    if x.ndim < 1 or weight.ndim != 2:
        raise ValueError(f"x must be [..., D] and weight [D, W], got shapes {tuple(x.shape)} and {tuple(weight.shape)}")
    for name, got, want in (
        ("state", state.shape, (*x.shape, weight.shape[-1])),
        ("weight", weight.shape, (x.shape[-1], weight.shape[-1])),
        ("bias", weight.shape[:1] if bias is None else bias.shape, (x.shape[-1],)),
    ):
        if got != want:
            raise ValueError(f"{name} must have shape {tuple(want)} for x of {tuple(x.shape)}, got {tuple(got)}")
    _check_activation(activation)


def without_oldest(state: Tensor) -> Tensor:
    """Return the W - 1 columns [..., D, W - 1] that SGLang and vLLM keep of a state [..., D, W]."""
    return state[..., 1:]


def with_oldest(columns: Tensor) -> Tensor:
    """Return a state [..., D, W] from the W - 1 columns that SGLang and vLLM keep; column 0, which no output reads, is zero."""
    return torch.nn.functional.pad(columns, (1, 0))


def forward(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return y [runs, B, T, D] and final_state [runs, N, D, W]; x has the runs of `arithmetic` along axis 0.

    x has x [B, T, D] and weight [D, W]. It may have bias [D], residual [B, T, D], state [N, D, W], cu_seqlens [N + 1] and
    activation (None or "silu").
    """
    return _forward(x, arithmetic, x.weight.shape[-1])


def forward_short_state(x: Inputs, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Return y [runs, B, T, D] and final_state [runs, N, D, W - 1]; the inputs are those of `forward`, but state [N, D, W - 1]."""
    return _forward(x, arithmetic, x.weight.shape[-1] - 1)


def _forward(x: Inputs, arithmetic: Arithmetic, state_width: int) -> dict[str, Tensor]:
    """Return y and final_state; states have the `state_width` newest columns, W or W - 1."""
    lengths = sequences(Inputs(cu_seqlens=x.get("cu_seqlens"), x=x.x[0]), "x")
    (channels, width), device = x.weight.shape[-2:], x.x.device
    tokens, weight = arithmetic.input(x.x.flatten(1, 2), "x"), arithmetic.input(x.weight, "weight")
    state = x.get("state")
    state = (
        tokens.new_zeros(len(tokens), len(lengths), channels, state_width) if state is None else arithmetic.input(state, "state")
    )

    # The line: the columns of a sequence's state, its tokens, the next sequence's state, ...
    sizes, sequence = torch.tensor(lengths, dtype=torch.int64, device=device), torch.arange(len(lengths), device=device)
    ends = sizes.cumsum(0) + (sequence + 1) * state_width
    columns = (ends - sizes).unsqueeze(-1) + torch.arange(-state_width, 0, device=device)
    places = torch.arange(tokens.shape[1], device=device) + (sequence.repeat_interleave(sizes) + 1) * state_width
    line = torch.cat([state.mT.flatten(1, 2), tokens], 1).index_select(1, torch.cat([columns.flatten(), places]).argsort())

    # An implementation may store in the inputs' dtype: the cotangents of x from y and from the final state before it adds them,
    # and, if silu is a separate step, the sum and its cotangent.
    storage = dataclasses.replace(arithmetic, stored=arithmetic.output)
    windows: Tensor = _Windows.apply(storage.use(line, "dx from y"), weight, arithmetic)
    y = windows.index_select(1, places - width + 1)
    if (bias := x.get("bias")) is not None:
        y = y + shared(arithmetic.input(bias, "bias").unsqueeze(1), y.shape, arithmetic, "dbias")
    y = arithmetic.single(y, "sum", width + 1)
    if x.get("activation") == "silu":
        y = rounded_silu(storage.operand(y, "sum stored"), arithmetic, "silu")
    if (residual := x.get("residual")) is not None:
        y = arithmetic.single(storage.operand(y, "y stored") + arithmetic.input(residual.flatten(1, 2), "residual"), "y + residual")
    last = (ends.unsqueeze(-1) + torch.arange(-state_width, 0, device=device)).flatten()
    final = line.index_select(1, last).unflatten(1, (len(lengths), state_width)).mT
    return {"y": arithmetic.result(y, "y").unflatten(1, x.x.shape[1:3]), "final_state": final}


class _Windows(torch.autograd.Function):
    """y_i = sum_w weight[:, w] line_{i+w} for each window of W entries of the line [runs, L, D]: [runs, L - W + 1, D].

    One factor of the terms is rounded to the bits that a float32 sum of them keeps. That gives each sum an error in proportion to
    the root of the summed squares of its terms. The rounded factors are the line's entries in y, dy in dx, and dy again in dweight,
    which is a sum over all tokens.

    An implementation that says `rounds_products` also rounds each product of y before it adds it (`Arithmetic.term`).
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, line: Tensor, weight: Tensor, arithmetic: Arithmetic) -> Tensor:
        ctx.save_for_backward(line, weight)
        ctx.arithmetic = arithmetic  # type: ignore[attr-defined]
        width = weight.shape[-1]
        count, seen = max(line.shape[1] - width + 1, 0), arithmetic.dither(line, "x in y", summed(width + 1))
        y = line.new_zeros(len(line), count, line.shape[-1])
        for tap in range(width):
            term = weight[:, None, :, tap] * seen[:, tap : tap + count]
            y += arithmetic.dither(term, f"product {tap}", arithmetic.term)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> tuple[Tensor, Tensor, None]:
        line, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        arithmetic, (dy,) = ctx.arithmetic, cotangents  # type: ignore[attr-defined]
        width, count = weight.shape[-1], dy.shape[1]
        near, far = (arithmetic.dither(dy, f"dy in {name}", summed(n)) for name, n in (("dx", width), ("dweight", count)))
        dline, taps = torch.zeros_like(line), []
        for tap in range(width):
            dline[:, tap : tap + count] += weight[:, None, :, tap] * near
            taps.append((far * line[:, tap : tap + count]).sum(1))
        # If the terms have one sign, the roundings of the partial sums are as large as this; rounding the terms gives less.
        return dline, arithmetic.dither(torch.stack(taps, -1), "dweight", summed(count)), None


def known_activation(inputs: Inputs, sizes: dict[str, int]) -> None:  # noqa: ARG001
    """Rule: the activation is one of ACTIVATIONS; absent means None."""
    _check_activation(inputs.get("activation"))


def _check_activation(activation: object) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")


CAUSAL_CONV1D = Operation(
    "causal_conv1d",
    (
        Port("x", "B T D", scalar_rows=True),
        Port("weight", "D W"),
        Port("bias", "D", optional=True, scalar_rows=True),
        Port("residual", "B T D", optional=True, scalar_rows=True),
        Port("state", "N D W", optional=True),
    ),
    (Port("y", "B T D", scalar_rows=True), Port("final_state", "N D W")),
    forward,
    (at_least_one("D", "W"), one_a_sequence("state"), known_activation, flag("output_final_state"), padding_of_rows),
    ("activation", "output_final_state", "pads"),
    parallel=("D",),
)
CAUSAL_CONV1D_SHORT_STATE = dataclasses.replace(
    CAUSAL_CONV1D,
    inputs=tuple(dataclasses.replace(port, axes="N D W-1") if port.name == "state" else port for port in CAUSAL_CONV1D.inputs),
    outputs=(CAUSAL_CONV1D.outputs[0], Port("final_state", "N D W-1")),
    forward=forward_short_state,
)
