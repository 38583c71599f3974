"""Published suites: the inputs and acceptance rules with which projects test Gated DeltaNet kernels, written anew as our own code.

Distributions, tolerances and shapes are those of the projects' default branches of August 2026. We keep only shapes that plain
torch on a CPU computes in a second. Of the longest shape with the longest memory we keep one batch row and one head.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from oracles.operation import Inputs
from properties.laws.law import Results
from verify.zoo.suite import Suite, finite

Made = dict[str, Any]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class _Draws:
    """Random float32 tensors from one generator: uniform in 0..1, or normal."""

    def __init__(self, seed: int) -> None:
        self.generator = _generator(seed)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def _offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def _rms_ratio(got: Tensor, reference: Tensor, floor: float) -> float:
    error = (got.double() - reference).square().mean().sqrt()
    return float(error / (reference.square().mean().sqrt() + floor))


class FlaLocal(Suite):
    """flash-linear-attention's test_gdn.py: RMS error over RMS of the reference, one ratio an output."""

    ratios: ClassVar[dict[str, float]] = {"o": 0.005, "final_state": 0.005, "dg": 0.02, "dbeta": 0.02}
    ratio = 0.008  # for the other gradients

    def cases(self) -> Iterator[Made]:
        # B, T, H, HV, D, scale, divisor of the gate, share of gates that are zero, L2 norm in the kernel
        for b, t, h, hv, d, scale, divisor, masked, normed in (
            (2, 75, 4, 4, 64, 1.0, 0.01, 0.0, False),
            (2, 256, 2, 4, 64, 1.0, 1.0, 0.0, False),
            (2, 500, 3, 3, 60, 1.0, 1.0, 0.0, False),
            (2, 512, 2, 8, 64, 1.0, 0.1, 0.0, True),
            (2, 1000, 3, 3, 64, 0.1, 1.0, 0.5, False),
            (1, 1024, 1, 1, 128, 0.1, 1.0, 1.0, False),
            (1, 1500, 1, 1, 128, 0.1, 10.0, 0.0, False),
        ):
            draw = _Draws(42)
            q, k, v = (draw.rand(b, t, heads, d).half() for heads in (h, h, hv))
            beta = draw.rand(b, t, hv).sigmoid()
            g = logsigmoid(draw.rand(b, t, hv)) / divisor
            g = g * (draw.rand(b, t, hv) > masked)
            if not normed:
                q, k = (normalize(x, dim=-1) for x in (q, k))
            state = torch.zeros(b, hv, d, d)
            cotangents = {"o": draw.randn(b, t, hv, d).half(), "final_state": draw.randn(b, hv, d, d)}
            yield {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, "scale": scale, "qk_norm": normed,
                   "cotangents": cotangents}  # fmt: skip
        for h, hv, d, masked, offsets in (
            (4, 4, 60, 0.0, [0, 15]),
            (2, 4, 64, 0.0, [0, 256, 500, 1000]),
            (4, 4, 64, 0.5, [0, 256, 500, 1000]),
        ):
            draw, t, n = _Draws(42), offsets[-1], len(offsets) - 1
            q, v = draw.randn(1, t, h, d).half(), draw.randn(1, t, hv, d).half()
            k = normalize(draw.randn(1, t, h, d), dim=-1).half()
            g = logsigmoid(draw.rand(1, t, hv).half())
            g = g * (draw.rand(1, t, hv) > masked)
            state = draw.randn(n, hv, d, d).half().float()
            cotangents = {"o": draw.randn(1, t, hv, d).half(), "final_state": draw.rand(n, hv, d, d)}
            yield {"q": q, "k": k, "v": v, "g": g, "beta": draw.rand(1, t, hv).sigmoid(), "state": state,
                   "cu_seqlens": torch.tensor(offsets), "cotangents": cotangents}  # fmt: skip

    def accepts(self, got: Results, reference: Results, inputs: Inputs) -> bool:
        return all(self.close(got[name], want, self.ratios.get(name, self.ratio)) for name, want in reference.items())

    def close(self, got: Tensor, reference: Tensor, ratio: float) -> bool:
        if float((got.double() - reference).abs().max()) <= 1e-6:
            return True
        return not bool(torch.isnan(got).any()) and _rms_ratio(got, reference, 1e-8) < ratio


class FlaCi(FlaLocal):
    """The same under its CI's environment variable: a ratio under 0.01, or an error up to 0.3 anywhere, is a warning."""

    def close(self, got: Tensor, reference: Tensor, ratio: float) -> bool:
        if super().close(got, reference, ratio):
            return True
        if bool(torch.isnan(got).any()):
            return False
        return _rms_ratio(got, reference, 1e-8) < 0.01 or float((got.double() - reference).abs().max()) <= 0.3


class Flashinfer(Suite):
    """flashinfer's test_prefill_delta_rule.py: assert_close of outputs and states, decays and beta uniform in 0..1."""

    tolerances: ClassVar[dict[torch.dtype, dict[str, tuple[float, float]]]] = {  # atol, rtol
        torch.bfloat16: {"o": (1e-2, 1e-2), "final_state": (5e-3, 1e-3)},
        torch.float16: {"o": (2e-3, 1e-3), "final_state": (1e-3, 1e-4)},
    }

    def cases(self) -> Iterator[Made]:
        lengths = ([64], [128], [256], [256, 256], [31], [61], [121], [251], [31, 63, 93, 123, 150])
        for number, (sizes, dtype) in enumerate(itertools.product(lengths, (torch.float16, torch.bfloat16))):
            h, hv = ((1, 1), (1, 2), (2, 4))[number % 3]
            scale = (None, 1.0)[number % 2]
            draw, t, d = _Draws(0), sum(sizes), 128
            q, k, v = (self.uniform(draw, t, heads, d).to(dtype) for heads in (h, h, hv))
            yield {"q": q, "k": normalize(k, dim=-1), "v": v, "g": draw.rand(1, t, hv).log(), "beta": draw.rand(1, t, hv),
                   "cu_seqlens": _offsets(sizes), "scale": scale}  # fmt: skip
        # Gates near 1, because a kernel was found to read a block's decay at the wrong token.
        sizes, draw = [64, 111, 192], _Draws(0)
        q, k, v = (self.uniform(draw, sum(sizes), 1, 128).half() for _ in range(3))
        decay, beta = (0.99 + 0.01 * draw.rand(1, sum(sizes), 1) for _ in range(2))
        yield {
            "q": q,
            "k": normalize(k, dim=-1),
            "v": v,
            "g": decay.log(),
            "beta": beta,
            "cu_seqlens": _offsets(sizes),
            "scale": 1.0,
        }

    @staticmethod
    def uniform(draw: _Draws, tokens: int, heads: int, width: int) -> Tensor:
        """Uniform values, where each token and head has its own mean."""
        mean = 0.05 * draw.randn(1, tokens, heads, 1)
        return mean + 0.5 * draw.rand(1, tokens, heads, width) - 0.25

    def accepts(self, got: Results, reference: Results, inputs: Inputs) -> bool:
        for name, (atol, rtol) in self.tolerances[inputs.q.dtype].items():
            torch.testing.assert_close(got[name], reference[name].to(got[name].dtype), atol=atol, rtol=rtol)
        return True


class FlashinferBench(Suite):
    """flashinfer-bench on its GDN prefill inputs: an element fails if it is over 1e-2 both absolutely and relatively."""

    tolerance = 1e-2

    def cases(self) -> Iterator[Made]:
        lengths = [[t] * b for b, t in itertools.product((1, 2, 4), (16, 64, 128))] + [[32, 32], [16, 32, 8, 64]]
        h, hv, d = 4, 8, 128
        for sizes in lengths:
            draw, t = _Draws(0), sum(sizes)
            q, k, v = (draw.randn(1, t, heads, d).bfloat16() for heads in (h, h, hv))
            a_log, dt_bias = 0.1 * draw.randn(hv), 0.1 * draw.randn(hv)
            a, b = (draw.randn(1, t, hv).bfloat16().float() for _ in range(2))
            state = 0.1 * draw.randn(len(sizes), hv, d, d) if sizes == [32, 32] else None
            yield {"q": q, "k": normalize(k, dim=-1), "v": v, "g": -a_log.exp() * softplus(a + dt_bias), "beta": b.sigmoid(),
                   "state": state, "cu_seqlens": _offsets(sizes)}  # fmt: skip

    def accepts(self, got: Results, reference: Results, inputs: Inputs) -> bool:
        return all(finite(got[name]) and not self.over(got[name], reference[name]) for name in reference)

    def over(self, got: Tensor, reference: Tensor) -> bool:
        """Whether an element is over the tolerance both absolutely and relatively."""
        reference = reference.to(got.dtype).float()
        error = (got.float() - reference).abs()
        return bool(((error > self.tolerance) & (error / (reference.abs() + 1e-8) > self.tolerance)).any())


class TransformerEngine(Suite):
    """Transformer Engine's test_gdn_attention.py: RMS error over RMS of the float64 reference, one ratio a dtype."""

    tolerances: ClassVar[dict[torch.dtype, tuple[float, float]]] = {torch.bfloat16: (2e-2, 4e-2), torch.float16: (1e-2, 2e-2)}

    def cases(self) -> Iterator[Made]:
        for (k, v), normed in itertools.product(((64, 64), (128, 128), (64, 128)), (False, True)):
            yield self.packed_call([128, 128], k, v, torch.bfloat16, qk_norm=normed, state=0.05, backward=True)
        for dtype in (torch.bfloat16, torch.float16):
            yield self.packed_call([128], 64, 64, dtype, qk_norm=True) | {"cu_seqlens": None, "output_final_state": False}
        for lengths in ([48, 112], [0, 64, 96]):
            yield self.packed_call(lengths, 64, 64, torch.bfloat16, state=1.0)

    @staticmethod
    def packed_call(
        lengths: Sequence[int],
        k: int,
        v: int,
        dtype: torch.dtype,
        *,
        qk_norm: bool = False,
        state: float = 0.0,
        backward: bool = False,
    ) -> Made:
        """A packed call with two heads; `state` scales its initial states."""
        draw, t, h, n = _Draws(1234), sum(lengths), 2, len(lengths)
        case: Made = {
            "q": draw.randn(1, t, h, k).to(dtype),
            "k": normalize(draw.randn(1, t, h, k), dim=-1).to(dtype),
            "v": draw.randn(1, t, h, v).to(dtype),
            "g": draw.rand(1, t, h).log(),
            "beta": draw.rand(1, t, h),
            "cu_seqlens": _offsets(lengths, torch.int32),
            "qk_norm": qk_norm,
        }
        if state:
            case["state"] = state * draw.randn(n, h, k, v)
        if backward:
            case["cotangents"] = {"o": draw.randn(1, t, h, v).to(dtype), "final_state": draw.randn(n, h, k, v)}
        return case

    def accepts(self, got: Results, reference: Results, inputs: Inputs) -> bool:
        forward, backward = self.tolerances[inputs.q.dtype]
        for name, want in reference.items():
            ratio = _rms_ratio(got[name], want, 1e-12)
            if not ratio < (forward if name in ("o", "final_state") else backward):
                return False
        return True


class Transformers(Suite):
    """transformers' Qwen3-Next test of the chunked rule against the recurrent one, chunks of 4 tokens, in float32."""

    chunk = 4

    def cases(self) -> Iterator[Made]:
        shapes = [(t, 3, 3, started) for t, started in itertools.product((3, 12, 13), (False, True))] + [(13, 2, 6, True)]
        for t, h, hv, started in shapes:
            draw, b, k, v = _Draws(0), 2, 8, 16
            case: Made = {
                "q": draw.randn(b, t, h, k),
                "k": draw.randn(b, t, h, k),
                "v": draw.randn(b, t, hv, v),
                "g": -draw.rand(b, t, hv),
                "beta": draw.rand(b, t, hv),
                "qk_norm": True,
            }
            yield case | ({"state": draw.randn(b, hv, k, v)} if started else {})

    def accepts(self, got: Results, reference: Results, inputs: Inputs) -> bool:
        for name in reference:
            torch.testing.assert_close(got[name].double(), reference[name], atol=1e-5, rtol=1e-4)
        return True


class AssertClose(Suite):
    """Plain normal inputs of three dtypes, outputs and gradients by torch.testing.assert_close's defaults."""

    def cases(self) -> Iterator[Made]:
        for dtype, t in itertools.product((torch.float32, torch.bfloat16, torch.float16), (64, 100)):
            draw, b, h, d = _Draws(0), 2, 2, 32
            q, k, v = (draw.randn(b, t, h, d).to(dtype) for _ in range(3))
            cotangents = {"o": draw.randn(b, t, h, d).to(dtype), "final_state": draw.randn(b, h, d, d)}
            yield {"q": q, "k": k, "v": v, "g": logsigmoid(draw.randn(b, t, h)), "beta": draw.rand(b, t, h), "qk_norm": True,
                   "state": draw.randn(b, h, d, d), "cotangents": cotangents}  # fmt: skip

    def accepts(self, got: Results, reference: Results, inputs: Inputs) -> bool:
        for name in reference:
            torch.testing.assert_close(got[name], reference[name].to(got[name].dtype))
        return True


SUITES: Mapping[str, type[Suite]] = {
    "fla-local": FlaLocal,
    "fla-ci": FlaCi,
    "flashinfer": Flashinfer,
    "flashinfer-bench": FlashinferBench,
    "te": TransformerEngine,
    "transformers": Transformers,
    "assert-close": AssertClose,
}
