"""Right callables of many kinds, for the laws that need no reference: none of them may raise an alarm."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from oracles.operation import Inputs
from verify import Adapter, CallDomain
from verify.zoo.base import Chunkwise
from verify.zoo.modules import Conv

OFFSETS = {"cu_seqlens": "offsets"}


def spans(x: Inputs, tokens: Tensor) -> Iterator[tuple[int, slice]]:
    """The row and the tokens of each sequence."""
    if x.cu_seqlens is None:
        yield from ((row, slice(None)) for row in range(len(tokens)))
    else:
        yield from ((0, slice(start, end)) for start, end in itertools.pairwise(x.cu_seqlens.tolist()))


def of_each(x: Inputs, tokens: Tensor, results: list[Tensor]) -> Tensor:
    """The results of sequences [T, ...] as a tensor [B, T, ...]."""
    return torch.cat(results).reshape(*tokens.shape[:2], *results[0].shape[1:])


class LinearAttention(Adapter):
    """Causal linear attention with a decay for each token, as one masked product."""

    domain = CallDomain(
        inputs={"q": "B T H K", "k": "B T H K", "v": "B T H V", "g": "B T H fp32 negative", **OFFSETS}, outputs={"o": "B T H V"}
    )

    def run(self, x: Inputs) -> Tensor:
        results = []
        for row, at in spans(x, x.q):
            q, k, v, g = (t[row, at].transpose(0, 1).float() for t in (x.q, x.k, x.v, x.g.unsqueeze(-1)))
            total = g.squeeze(-1).cumsum(-1)
            lower = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
            decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
            results.append(((q @ k.mT * decay) @ v).transpose(0, 1).to(x.v.dtype))
        return of_each(x, x.v, results)


class GatedNorm(Adapter):
    """A gated RMS norm, computed in the inputs' dtype."""

    domain = CallDomain(inputs={"x": "B T H V", "z": "B T H V", "weight": "V", **OFFSETS}, outputs={"y": "B T H V"})

    def run(self, x: Inputs) -> Tensor:
        normed = functional.rms_norm(x.x, (x.x.shape[-1],), x.weight, 1e-6)
        return normed * functional.silu(x.z)


class ShortConvolution(Adapter):
    """torch's convolution of each channel, on a batch; the first tokens see zeros."""

    domain = CallDomain(inputs={"x": "B T D", "weight": "D W", "bias": "D"}, outputs={"y": "B T D"}, sizes={"W": (4, 2, 3)})

    def run(self, x: Inputs) -> Tensor:
        taps = x.weight.shape[1]
        padded = functional.pad(x.x.mT, (taps - 1, 0))
        return functional.silu(functional.conv1d(padded, x.weight.unsqueeze(1), x.bias, groups=x.x.shape[2])).mT


class PackedConvolution(Adapter):
    """The convolution of the zoo, which takes packed sequences and states."""

    domain = CallDomain(
        inputs={"x": "B T D", "weight": "D W", "state": "N D W", **OFFSETS},
        outputs={"y": "B T D", "last": "N D W"},
        sizes={"W": (4, 2)},
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        y, last = Conv().run(Inputs(**x, bias=None, activation="silu", output_final_state=True))
        return y, last


class DeltaRule(Adapter):
    """The gated delta rule in chunks, with states that go in and come out."""

    domain = CallDomain(
        inputs={
            "q": "B T H K normalised",
            "k": "B T H K normalised",
            "v": "B T HV V",
            "state": "N HV K V fp32",
            "g": "B T HV fp32 negative",
            "beta": "B T HV unit",
            **OFFSETS,
        },
        outputs={"o": "B T HV V", "last": "N HV K V"},
        empty=True,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return Chunkwise().run(Inputs(**x, scale=None, qk_norm=False, output_final_state=True))


class Recurrent(Adapter):
    """A tanh RNN in float32, one token at a time."""

    domain = CallDomain(inputs={"x": "B T D", "w": "D E", "u": "E E"}, outputs={"h": "B T E"}, longest=40)

    def run(self, x: Inputs) -> Tensor:
        h, rows = x.x.new_zeros(x.x.shape[0], x.u.shape[0]).float(), []
        for token in x.x.float().unbind(1):
            h = torch.tanh(token @ x.w.float() + h @ (0.5 * x.u.float()))
            rows.append(h)
        return torch.stack(rows, 1).to(x.x.dtype)


class Scan(Adapter):
    """A selective scan as in Mamba, in float32; the last state comes out."""

    domain = CallDomain(
        inputs={"x": "B T D", "dt": "B T D unit", "a": "D S negative", "b": "B T S", "c": "B T S", **OFFSETS},
        outputs={"y": "B T D", "last": "N D S"},
        longest=40,
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        results, states = [], []
        for row, at in spans(x, x.x):
            state, rows = torch.zeros(x.a.shape), []
            for u, dt, b, c in zip(*(t[row, at].float().unbind(0) for t in (x.x, x.dt, x.b, x.c)), strict=True):
                state = (dt.unsqueeze(-1) * x.a.float()).exp() * state + (dt * u).unsqueeze(-1) * b
                rows.append((state * c).sum(-1))
            results.append(torch.stack(rows).to(x.x.dtype))
            states.append(state)
        return of_each(x, x.x, results), torch.stack(states).to(x.x.dtype)


class LongConvolution(Adapter):
    """A causal convolution as long as the sequence, by FFT: later tokens change earlier outputs by rounding."""

    domain = CallDomain(
        inputs={"x": "B T D", "filter": "D W"}, outputs={"y": "B T D"}, sizes={"W": (64,)}, isolated=False, dtypes=("fp32", "bf16")
    )

    def run(self, x: Inputs) -> Tensor:
        size = 2 * max(x.x.shape[1], x.filter.shape[1])
        product = torch.fft.rfft(x.x.float().mT, n=size) * torch.fft.rfft(x.filter.float(), n=size)
        return torch.fft.irfft(product, n=size)[..., : x.x.shape[1]].mT.to(x.x.dtype)


class Projection(Adapter):
    """A linear layer and a softmax over channels, in the inputs' dtype."""

    domain = CallDomain(inputs={"x": "B T D", "w": "E D"}, outputs={"y": "B T E"}, sizes={"D": (64, 130), "E": (8, 33)})

    def run(self, x: Inputs) -> Tensor:
        return functional.linear(x.x, x.w).softmax(-1)
