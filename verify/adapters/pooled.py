"""Kernels called as a rule that they are not by themselves: on a pool of states, and with gates that are computed before.

The states of a call lie in a pool of its own. Gates and beta are computed in float32 by torch.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from oracles.decode import TOKENS
from oracles.operation import DTYPES, Inputs, sequences
from properties.pools.domain import PoolDomain
from properties.rules.case import IN_KERNEL, Case
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.interface import Unsupported

DECLARED = ("algorithm", "chunk", "products", "requires", "api", "omits", "cost", "folds", "stores")
PASSED = (*TOKENS, "A_log", "dt_bias", "allow_neg_eigval", "cu_seqlens", "scale", "qk_norm", "qk_norm_eps", "qk_norm_form")


def rule_domain(domain: PoolDomain) -> Domain:
    """The calls of a rule that a kernel with such a domain takes."""
    states = "fp32" if "fp32" in domain.state_dtypes else domain.state_dtypes[0]
    return dataclasses.replace(domain.rule, backward=False, views=False, state_dtypes=(states,), final_dtype=states)


class Pooled(Adapter):
    """An adapter of a pool as one of a rule. Prompts are passed in calls of at most `most_tokens` tokens."""

    def __init__(self, pool: Adapter) -> None:
        self.pool, self.domain = pool, rule_domain(pool.domain)
        self.__dict__.update({name: getattr(pool, name) for name in DECLARED})

    def bring(self) -> None:
        self.pool.bring()

    def run(self, x: Inputs) -> tuple[Tensor, Tensor]:
        domain, lengths, (tokens, heads, width) = self.pool.domain, sequences(x, "v"), x.v.shape[1:]
        padding = int(domain.padding_slots[0]) if domain.padding_slots else -1
        owned = slice(int(padding == 0), len(lengths) + int(padding == 0))
        dtype = DTYPES.get(self.domain.final_dtype, x.v.dtype)
        shape = (owned.stop, heads, *((width, x.k.shape[-1]) if domain.layout == "vk" else (x.k.shape[-1], width)))
        pool = x.v.new_zeros(shape, dtype=dtype)
        pool = pool.mT if domain.layout == "vk" else pool
        if x.state is not None:
            pool[owned] = x.state
        slots = torch.arange(owned.start, owned.stop, dtype=getattr(torch, domain.indices[0]), device=x.v.device)
        call = Inputs(
            **{name: x[name] for name in PASSED if name in x},
            **dict.fromkeys(("has_initial_state", "accepted", "block_v")),
            pool=pool,
            slots=slots,
            padding=padding,
        )
        several = x.cu_seqlens is not None and len(lengths) > 1
        if several and max(lengths) > domain.most_tokens:
            raise Unsupported(f"several packed requests of more than {domain.most_tokens} tokens")
        rows, most = [], tokens if several else domain.most_tokens
        for at in range(0, max(tokens, 1), max(most, 1)):
            # Of several sequences, some tokens of each do not lie side by side, and a kernel need not take such views.
            part = {name: call[name][:, at : at + most].contiguous() for name in TOKENS if call.get(name) is not None}
            part |= {} if x.cu_seqlens is None or several else {"cu_seqlens": x.cu_seqlens.clamp(max=min(most, tokens - at))}
            o, pool = self.pool.run(call.replaced(**part, pool=pool))
            rows.append(o)
        return torch.cat(rows, 1), pool[owned].contiguous()


def gated_domain(domain: Domain) -> Domain:
    """The calls that a kernel with such a domain takes if gates and beta may be computed before."""
    return dataclasses.replace(domain, backward=False, in_kernel=IN_KERNEL)


class Gated(Adapter):
    """An adapter of a rule that is given its gates, as one that computes them."""

    def __init__(self, rule: Adapter) -> None:
        self.rule, self.domain = rule, gated_domain(rule.domain)
        self.__dict__.update({name: getattr(rule, name) for name in DECLARED})

    def bring(self) -> None:
        self.rule.bring()

    def run(self, x: Inputs) -> Any:
        given = {name: x[name] for name in x if name not in ("a", "b", "A_log", "dt_bias", "allow_neg_eigval")}
        if x.get("a") is not None:
            a = x.a.float() if x.get("dt_bias") is None else x.a.float() + x.dt_bias.float()
            speed = x.A_log.float().exp()
            g = -(speed if a.ndim == 3 else speed.unsqueeze(-1)) * torch.nn.functional.softplus(a)
            given["g"] = g if "fp32" in self.rule.domain.gate_dtypes else g.to(x.q.dtype)
        if x.get("b") is not None:
            given["beta"] = (x.b.float().sigmoid() * (2 if x.allow_neg_eigval else 1)).to(x.b.dtype)
        return self.rule.run(Inputs(**given))


_pooled, _gated = functools.cache(Pooled), functools.cache(Gated)


def called_with(adapter: Any, case: Any, *, gated: bool = False) -> Any:
    """The adapter of a case's calls: a kernel on a pool is called as a rule if the case is one of a rule.

    If `gated`, the adapter of a rule that is given its gates is called where they must be computed.
    """
    adapter = _pooled(adapter) if isinstance(case, Case) and isinstance(adapter.domain, PoolDomain) else adapter
    return _gated(adapter) if gated else adapter
