"""Wrong implementations that take the decay alpha in place of its logarithm: rules, and a serving kernel.

tests/laws/test_alpha.py names the laws each of which detects the wrong implementation alone.
"""

import torch
from torch import Tensor

from verify.zoo.base import ByAlpha, Outputs, ServingByAlpha


class AlphaAsLogarithm(ByAlpha, letter="D"):
    """alpha is used as if it were the log-decay."""

    def log(self, alpha: Tensor) -> Tensor:
        return alpha


class AlphaOfTheNextToken(ByAlpha, letter="D"):
    """Each token decays by the alpha of the token after it, and the last token by that of the first."""

    def log(self, alpha: Tensor) -> Tensor:
        return super().log(alpha).roll(-1, 1)


class DecaysAfterTheUpdate(ByAlpha, letter="D"):
    """The state decays after the token's correction is written, and then the token reads it."""

    def sequence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> Outputs:
        rows = []
        for q_t, k_t, v_t, g_t, beta_t in zip(q.float(), k.float(), v.float(), g, beta, strict=True):
            fresh = beta_t.unsqueeze(-1) * (v_t - (k_t.unsqueeze(-1) * state).sum(-2))
            state = g_t.exp()[:, None, None] * (state + k_t.unsqueeze(-1) * fresh.unsqueeze(-2))
            rows.append(scale * (q_t.unsqueeze(-1) * state).sum(-2))
        return torch.stack(rows) if rows else v.float() * 0, state


class ServesAlphaAsLogarithm(ServingByAlpha, letter="D"):
    """In decoding, alpha is used as if it were the log-decay."""

    def decay(self, g: Tensor) -> Tensor:
        return g.exp()
