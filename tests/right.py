"""Right implementations in plain torch, none of them used to set the bounds: other chunk sizes, summation orders, rounding places.

`Chunkwise` stands in verify/zoo/base.py: the zoo makes it wrong one step at a time.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.operation import Inputs
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.fla import decorating_later
from verify.zoo.base import Chunkwise


class Prints(Chunkwise):
    """It prints, to stdout and stderr."""

    domain = Domain(backward=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        print("noise {}" * 50)
        return super().run(x)


class Chunk16(Chunkwise):
    """Chunks of 16 tokens, which it does not say."""

    chunk = None
    size = 16


class Chunk128(Chunkwise):
    """Chunks of 128 tokens, twice the size the bounds are computed with."""

    chunk = None
    size = 128


class BackwardSums(Chunkwise):
    """Products summed in the opposite order, in four pieces."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.float().flip(-1), b.float().flip(-2)
        pieces = zip(a.split(max(1, a.shape[-1] // 4), -1), b.split(max(1, b.shape[-2] // 4), -2), strict=True)
        total = torch.zeros(())
        for left, right in pieces:
            total = total + left @ right
        return total


class RoundsElsewhere(Chunkwise):
    """The scale folded into q and rounded there, the correction matrix rounded before it is inverted, k decayed instead of v."""

    chunk = None
    size = 32

    def solve(self, a: Tensor, like: Tensor) -> Tensor:
        return super().solve(self.low(a, like).float(), like)

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q = self.low(scale * q, q)
        total = self.cumulative(g)
        decays = self.decays(total)
        grown = total.exp().unsqueeze(-1)
        solved = self.solve(self.corrections(k, beta, decays), k)
        low_state = self.low(state, k)
        recalled = self.dot(self.low(grown * k, k), low_state)
        fresh = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * (v - recalled), v)), v)
        scores = self.low(self.dot(q, k.mT) * decays, k)
        o = self.dot(self.low(grown * q, q), low_state) + self.dot(scores, fresh)
        last = self.last(total)
        decayed_keys = self.low((last - total).exp().unsqueeze(-1) * k, k)
        return o, last.exp().unsqueeze(-1) * state + self.dot(decayed_keys.mT, fresh)


class Chunk48(Chunkwise):
    """Chunks of 48 tokens, which begin where no power of two does; the decays' exponentials stored in the inputs' dtype."""

    chunk = None
    size = 48

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        total = self.cumulative(g)
        decays, last = self.decays(total), self.last(total)
        grown, left = (self.low(exponent.exp(), k).float().unsqueeze(-1) for exponent in (total, last - total))
        low_state = self.low(state, k)
        recalled = self.dot(self.low(grown * k, k), low_state)
        solved = self.solve(self.corrections(k, beta, decays), k)
        fresh = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * (v - recalled), v)), v)
        scores = self.low(self.masked(self.dot(q, k.mT) * decays), k)
        o = scale * (self.dot(self.low(grown * q, q), low_state) + self.dot(scores, fresh))
        return o, last.exp().unsqueeze(-1) * state + self.dot(self.low(left * k, k).mT, fresh)


class Tf32(Chunkwise):
    """float32 inputs multiplied in TF32, operands truncated to 10 mantissa bits as matrix units may."""

    domain = Domain(dtypes=("fp32",))

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return _Truncated.apply(a) @ _Truncated.apply(b)  # type: ignore[no-any-return]

    def solve(self, a: Tensor, like: Tensor) -> Tensor:
        identity = torch.eye(a.shape[-1])
        return torch.linalg.solve_triangular(identity + a, identity.expand_as(a), upper=False)


class Tf32Gates(Tf32):
    """dG of the scores is q dq - k dk, as kernels compute it: with q and k as they are, where dq and dk are TF32 products."""

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        total = self.cumulative(g)
        decays, last = self.decays(total), self.last(total)
        grown, left = total.exp().unsqueeze(-1), (last - total).exp().unsqueeze(-1)
        solved = self.solve(self.corrections(k, beta, decays), k)
        fresh = self.dot(solved, beta.unsqueeze(-1) * (v - self.dot(grown * k, state)))
        scores = _Scores.apply(q, k, total)
        o = scale * (self.dot(grown * q, state) + self.dot(scores, fresh))  # type: ignore[arg-type]
        return o, last.exp().unsqueeze(-1) * state + self.dot((left * k).mT, fresh)


class Tf32GatesInside(Tf32Gates):
    """The same with the gate in the call."""

    domain = Domain(dtypes=("fp32",), in_kernel=("none", "gate"))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.get("a") is None:
            return super().run(x)
        raw = x.a if x.dt_bias is None else x.a + x.dt_bias
        return super().run(x.replaced(g=-x.A_log.exp() * torch.nn.functional.softplus(raw)))


class _Scores(torch.autograd.Function):
    """sum_c q_ic k_jc exp(G_i - G_j) at and below the diagonal, else 0."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        decays = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        ctx.save_for_backward(q, k, decays)
        return (_Truncated.apply(q) @ _Truncated.apply(k).mT) * decays

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, decays = ctx.saved_tensors
        d = _Truncated.apply(cotangents[0] * decays)
        dq, dk = d @ _Truncated.apply(k), d.mT @ _Truncated.apply(q)
        return dq, dk, (q * dq).sum(-1) - (k * dk).sum(-1)


class Tf32Inverse(Chunkwise):
    """Half precision whose I + A is inverted in float32 by blocks of 16 tokens, merged by products in TF32, as on GPUs."""

    domain = Domain(dtypes=("fp16",))

    def solve(self, a: Tensor, like: Tensor) -> Tensor:
        identity = torch.eye(a.shape[-1])
        cuts = range(0, a.shape[-1], 16)
        rows: list[Tensor] = []
        for cut in cuts:
            end = min(cut + 16, a.shape[-1])
            block, eye = a[..., cut:end, cut:end], identity[: end - cut, : end - cut]
            inverse = torch.linalg.solve_triangular(eye + block, eye.expand_as(block), upper=False)
            before = torch.zeros_like(a[..., cut:end, :cut])
            if cut:
                before = -self.product(inverse, self.product(a[..., cut:end, :cut], torch.cat(rows, -2)[..., :cut]))
            rows.append(torch.cat([before, inverse, torch.zeros_like(a[..., cut:end, end:])], -1))
        return self.low(torch.cat(rows, -2), like).float()

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b of truncated operands."""
        return _Truncated.apply(a) @ _Truncated.apply(b)  # type: ignore[no-any-return]


class _Truncated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        return (x.float().contiguous().view(torch.int32) & ~((1 << 13) - 1)).view(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *cotangents: Tensor) -> Tensor:
        return (cotangents[0].contiguous().view(torch.int32) & ~((1 << 13) - 1)).view(torch.float32)


class Hopper(Chunkwise):
    """Products as matrix units of a Hopper GPU make them: so many at once, and what does not fit is cut off (`matrix_unit`)."""

    products = "tf32"
    bits = 10  # of a TF32 operand

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return _Matrix.apply(a, b, self.bits)  # type: ignore[no-any-return]


class _Matrix(torch.autograd.Function):
    """a @ b, and its gradients as kernels compute them: of operands in the inputs' dtype."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bits: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, b)
        ctx.bits = bits
        return matrix_unit(a, b, bits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        d = cotangents[0].to(a.dtype)
        return matrix_unit(d, b.mT, ctx.bits), matrix_unit(a.mT, d, ctx.bits), None


def matrix_unit(a: Tensor, b: Tensor, bits: int = 10) -> Tensor:
    """a [..., M, K] @ b [..., K, N] in float32, as measured on an H200.

    Of the products of one instruction and the sum so far, each is cut off two bits below float32's last place of the largest. They
    are added exactly, and the sum is cut off to float32. TF32 operands are cut off after `bits` stored bits.
    """
    together = 8 if a.dtype == torch.float32 else 16
    wide, other = (cut(operand.double(), bits + 1) if together == 8 else operand.double() for operand in (a, b))
    total = wide.new_zeros(*wide.shape[:-1], 1, other.shape[-1])
    for left, right in zip(wide.split(together, -1), other.split(together, -2), strict=True):
        terms = torch.cat([left.unsqueeze(-1) * right.unsqueeze(-3), total], -2)
        largest = terms.abs().amax(-2, keepdim=True)
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 26)
        total = cut(((terms / unit).trunc() * unit).sum(-2, keepdim=True), 24)
    return total.squeeze(-2).float()


def cut(x: Tensor, bits: int) -> Tensor:
    """x towards zero to so many significant bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).trunc(), exponent - bits)


class Recurrent(Adapter):
    """Token by token in float32, the sums over K taken one channel after another."""

    algorithm = "recurrent"
    domain = Domain()

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        steps = Chunkwise()
        scale = steps.scale(x)
        q, k = (t.float() for t in (x.q, x.k))
        if x.qk_norm:
            q, k = steps.normalise(q), steps.normalise(k)
        q, k = (steps.repeat(t, x.v.shape[2]).flatten(0, 1) for t in (q, k))
        v, decay, beta = (t.float().flatten(0, 1) for t in (x.v, self.decay(x), x.beta))
        rows, states = [], []
        for row, (start, end) in enumerate(steps.boundaries(x)):
            state = steps.initial(x, row)
            for t in range(start, end):
                state = state * decay[t].reshape(*decay[t].shape, *[1] * (4 - decay.ndim))
                state = self.write(k[t].unsqueeze(-1), v[t].unsqueeze(-2), beta[t, :, None, None], state)
                rows.append(scale * self.sum(q[t].unsqueeze(-1) * state))
            states.append(state)
        o = torch.stack(rows) if rows else v * 0
        return o.to(x.v.dtype).reshape(x.v.shape), torch.stack(states) if x.output_final_state else None

    def decay(self, x: Inputs) -> Tensor:
        return x.g.float().exp()

    def write(self, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        """The state [HV, K, V] after k [HV, K, 1] writes v [HV, 1, V]."""
        return state + k * (beta * (v - self.sum(k * state).unsqueeze(-2)))

    def sum(self, terms: Tensor) -> Tensor:
        return terms.cumsum(-2)[..., -1, :]


class BeginsWithEps(Recurrent):
    """The sum of squares of the L2 norm begins with eps, and squares are added to it one after another."""

    eps = 1e-6

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        if x.qk_norm:
            x = x.replaced(q=self.normalised(x.q.float()), k=self.normalised(x.k.float()), qk_norm=False)
        return super().run(x)

    def normalised(self, x: Tensor) -> Tensor:
        total = torch.full_like(x[..., 0], self.eps)
        for channel in x.unbind(-1):
            total = total + channel.square()
        return x * total.rsqrt().unsqueeze(-1)


class Expanded(Recurrent):
    """The update as the paper expands it, S - beta k (k^T S) + beta k v^T: what is erased and what is written round apart."""

    def write(self, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        return state - (beta * k) * (k.mT @ state) + (beta * k) * v


class AlphaRecurrent(Recurrent):
    """Token by token: it takes the decay alpha, and multiplies the state by it."""

    domain = Domain(decays=("linear",))

    def decay(self, x: Inputs) -> Tensor:
        alpha: Tensor = x.alpha
        return alpha


class AlphaRecurrentKda(AlphaRecurrent):
    """The same for KDA, whose channels decay separately."""

    domain = Domain(operation="kda", decays=("linear",))


class AlphaProducts(Chunkwise):
    """Chunks of 64 tokens: it takes the decay alpha, and multiplies alphas without a logarithm."""

    domain = Domain(decays=("linear",))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return super().run(x.replaced(g=x.alpha))

    def cumulative(self, g: Tensor) -> Tensor:
        return g

    def decays(self, total: Tensor) -> Tensor:
        """The products of alpha_j+1 to alpha_i, 0 above the diagonal; `total` is alpha."""
        inside = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).tril(-1)
        return total.unsqueeze(-1).where(inside, 1.0).cumprod(-2).tril()

    def piece(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        decays, grown = self.decays(g), g.cumprod(-1).unsqueeze(-1)
        solved = self.solve(self.corrections(k, beta, decays), k)
        written = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * v, v)), v)
        erased = self.low(self.dot(solved, self.low(beta.unsqueeze(-1) * grown * k, k)), k)
        low_state = self.low(state, k)
        fresh = self.low(written.float() - self.dot(erased, low_state), v)
        scores = self.low(self.masked(self.dot(q, k.mT) * decays), k)
        o = scale * (grown * self.dot(q, low_state) + self.dot(scores, fresh))
        decayed = self.low(decays[..., -1, :].unsqueeze(-1) * fresh, v)
        return o, grown[..., -1:, :] * state + self.dot(k.mT, decayed)


class SumsAgain(Recurrent):
    """The delta rule token by token, whose backward sums its states again, from corrected values stored in the inputs' dtype."""

    stores = True
    domain = Domain(operation="delta_rule", packed=False, qk_norm=False)
    reads_after = False

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        assert x.cu_seqlens is None and not x.qk_norm
        rows, heads, width = x.q.shape[0], *x.v.shape[2:]
        state = x.state if x.state is not None else torch.zeros(rows, heads, x.k.shape[-1], width)
        q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (x.q, x.k))
        scale = x.k.shape[-1] ** -0.5 if x.scale is None else x.scale
        o, final = _SumsAgain.apply(q, k, x.v, x.beta, state.float(), float(scale), self.reads_after)
        return o, final


class _SumsAgain(torch.autograd.Function):
    """Of q, k, v [B, T, H, ...], beta [B, T, H] and states [B, H, K, V]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, scale: float, after: bool) -> Any:  # noqa: FBT001
        stored, o, first = torch.empty_like(v), torch.empty_like(v), state
        for t in range(q.shape[1]):
            key = k[:, t].float().unsqueeze(-1)
            stored[:, t] = corrected = v[:, t].float() - (key.mT @ state).squeeze(-2)
            state = state + key * (beta[:, t].float().unsqueeze(-1) * corrected).unsqueeze(-2)
            o[:, t] = (scale * q[:, t].float().unsqueeze(-2) @ state).squeeze(-2)
        ctx.save_for_backward(q, k, stored, beta, first)
        ctx.back = scale, after
        return o, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, direction: Tensor) -> Any:  # type: ignore[override]
        (q, k, stored, beta, state), (scale, after) = ctx.saved_tensors, ctx.back
        dq, dk, dv, dbeta = (torch.empty(x.shape) for x in (q, k, stored, beta))
        for t in reversed(range(q.shape[1])):
            direction = direction + scale * q[:, t].float().unsqueeze(-1) * do[:, t].float().unsqueeze(-2)
            values, strength = stored[:, t].float(), beta[:, t].float().unsqueeze(-1)
            dk[:, t] = (direction @ (strength * values).unsqueeze(-1)).squeeze(-1)
            written = (k[:, t].float().unsqueeze(-2) @ direction).squeeze(-2)
            dbeta[:, t], dv[:, t] = (written * values).sum(-1), strength * written
            direction = direction - k[:, t].float().unsqueeze(-1) * dv[:, t].unsqueeze(-2)
        for t in range(q.shape[1]):
            written = k[:, t].float().unsqueeze(-1) * (beta[:, t].float().unsqueeze(-1) * stored[:, t].float()).unsqueeze(-2)
            dk[:, t] -= ((state + written if after else state) @ dv[:, t].unsqueeze(-1)).squeeze(-1)
            state = state + written
            dq[:, t] = scale * (state @ do[:, t].float().unsqueeze(-1)).squeeze(-1)
        return *(gradient.to(q.dtype) for gradient in (dq, dk, dv, dbeta)), direction, None, None


class Gathered(Adapter):
    """Serving with the states gathered, a rule run on them, and a pool returned that is another tensor."""

    algorithm = "recurrent"
    domain = PoolDomain(in_place=False)
    rule: type[Adapter] = Recurrent

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        named = x.slots != x.padding
        goes_on = named if x.has_initial_state is None else named & (x.has_initial_state == 1)
        states = torch.zeros(len(x.slots), *x.pool.shape[1:])
        states[goes_on] = x.pool[x.slots[goes_on].long()]
        names = ("q", "k", "v", "g", "beta")
        call = Inputs(
            **{name: x[name] for name in (*names, "cu_seqlens", "scale", "qk_norm")}, state=states, output_final_state=True
        )
        o, final = self.rule().run(call)
        if x.accepted is not None:  # what is not kept writes nothing and forgets nothing
            starts = torch.tensor([start for start, _ in Chunkwise().boundaries(call)])
            lengths = torch.tensor([end - start for start, end in Chunkwise().boundaries(call)])
            place = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
            gone = (place >= x.accepted.repeat_interleave(lengths)).reshape(x.g.shape[:2]).unsqueeze(-1)
            _, final = self.rule().run(call.replaced(g=x.g.masked_fill(gone, 0), beta=x.beta.masked_fill(gone, 0)))
        return o, x.pool.index_copy(0, x.slots[named].long(), final[named])


class GatheredChunkwise(Gathered):
    """The same with a chunkwise rule."""

    algorithm = "chunkwise"
    chunk = 64
    rule = Chunkwise


class Captured(Adapter):
    """Decoding of single tokens without a number on the host, so that a CUDA graph can hold it. Slot 0 is nobody's."""

    algorithm = "recurrent"
    domain = PoolDomain(
        rule=Domain(empty=False, backward=False), most_tokens=1, padding_slots=("0",), fresh=False, accepts=False, graphs=True
    )

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        steps, slots = Chunkwise(), self.slots(x)
        q, k = (steps.normalise(t.float()) if x.qk_norm else t.float() for t in (x.q, x.k))
        q, k = (steps.repeat(t, x.v.shape[2]).flatten(0, 1) for t in (q, k))
        v, g, beta = (t.float().flatten(0, 1) for t in (x.v, x.g, x.beta))
        before = x.pool.index_select(0, slots)
        state = g.exp()[..., None, None] * before
        new = beta.unsqueeze(-1) * (v - (k.unsqueeze(-1) * state).sum(-2))
        state = state + k.unsqueeze(-1) * new.unsqueeze(-2)
        o = (steps.scale(x) * q.unsqueeze(-1) * state).sum(-2)
        # Padding requests all write to slot 0 what it holds.
        x.pool.index_copy_(0, slots, torch.where((slots != x.padding).reshape(-1, 1, 1, 1), state, before))
        return o.to(x.v.dtype).reshape(x.v.shape), x.pool

    def slots(self, x: Inputs) -> Tensor:
        slots: Tensor = x.slots.long()
        return slots


class Vectorised(Recurrent):
    """As a kernel that loads 16 bytes at once: it takes contiguous tensors as an allocator makes them, and refuses others."""

    domain = Domain(backward=False, views=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        refuse_misaligned(x)
        return super().run(x)


class VectorisedDecode(Gathered):
    """The same, on states in a pool."""

    domain = PoolDomain(rule=Domain(backward=False, views=False), in_place=False)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        refuse_misaligned(x)
        return super().run(x)


def refuse_misaligned(x: Inputs) -> None:
    """ValueError if a tensor of numbers is not contiguous, or begins at an address that 16 does not divide."""
    for name, value in x.items():
        if isinstance(value, Tensor) and not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() and value.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes")


class SlotsOfTheFirstStep(Captured):
    """The slots are copied when a buffer is first seen, and a graph that is replayed has the slots of its first step."""

    seen: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}

    def slots(self, x: Inputs) -> Tensor:
        tensor, slots = self.seen.setdefault(id(x.slots), (x.slots, x.slots.long().clone()))
        return slots if tensor is x.slots else x.slots.long()


class SlotsOnTheHost(Captured):
    """The slots are read on the host, which is right call by call, but no graph can hold it."""

    def slots(self, x: Inputs) -> Tensor:
        return torch.tensor(x.slots.tolist(), device=x.slots.device)


class TransformersChunk(Adapter):
    """transformers' pure-torch chunkwise rule (Qwen3-Next), the function behind its wrapper; it has no packed form."""

    domain = Domain(packed=False, gate_dtypes=("fp32",), scale=False)
    requires: ClassVar[dict[str, str]] = {"transformers": "5.0"}

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        with decorating_later():  # torch.compile would import torch's compiler, which takes seconds
            from transformers.models.qwen3_next import modeling_qwen3_next as module

        rule = module.torch_chunk_gated_delta_rule
        while hasattr(rule, "__wrapped__"):
            rule = rule.__wrapped__
        groups = x.v.shape[2] // x.q.shape[2]
        q, k = (t.repeat_interleave(groups, dim=2) for t in (x.q, x.k))
        o, state = rule(
            q,
            k,
            x.v,
            x.g,
            x.beta,
            initial_state=x.state,
            output_final_state=x.output_final_state,
            use_qk_l2norm_in_kernel=x.qk_norm,
        )
        return o, state
