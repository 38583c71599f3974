"""The gated rule by KDA's kernels, every channel of which decays alike: right, and with decays folded into what they store."""

from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.fla import core


class Unsaid(Adapter):
    """flash-linear-attention's chunk_kda, by an adapter that does not say that it folds."""

    chunk = 64
    domain = Domain(key_dims=(1, 64), value_dims=(1, 64))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        core()  # or the import below brings fla's layers and models too, which takes seconds
        from fla.ops.kda import chunk_kda as rule

        g = self.decays(x.g.float())[..., None].expand(*x.g.shape, x.k.shape[-1]).contiguous()
        options = {"scale": x.scale, "initial_state": x.state, "output_final_state": x.output_final_state}
        o, state = rule(x.q, x.k, x.v, g, x.beta, use_qk_l2norm_in_kernel=bool(x.qk_norm), cu_seqlens=x.cu_seqlens, **options)
        return o, state

    def decays(self, g: Tensor) -> Tensor:
        return g


class Says(Unsaid):
    folds = True


class LosesAGradient(Says):
    """The gate of a sequence's last token gets no gradient."""

    def decays(self, g: Tensor) -> Tensor:
        return g.index_put((g.new_tensor([0]).long(), g.new_tensor([g.shape[1] - 1]).long()), g[:, -1].detach())
