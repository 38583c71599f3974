"""A kernel on a pool of states, called as a rule: the states of a call lie in a pool of its own."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from oracles.decode import TOKENS
from oracles.operation import DTYPES, Inputs, sequences
from properties.pools.domain import PoolDomain
from properties.rules.case import Case
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
from verify.adapters.interface import Unsupported

PASSED = (*TOKENS, "A_log", "dt_bias", "allow_neg_eigval", "cu_seqlens", "scale", "qk_norm", "qk_norm_eps", "qk_norm_form")


def rule_domain(domain: PoolDomain) -> Domain:
    """The calls of a rule that a kernel with such a domain takes."""
    states = "fp32" if "fp32" in domain.state_dtypes else domain.state_dtypes[0]
    return dataclasses.replace(domain.rule, backward=False, views=False, state_dtypes=(states,), final_dtype=states)


class Pooled(Adapter):
    """An adapter of a pool as one of a rule. Prompts are passed in calls of at most `most_tokens` tokens."""

    def __init__(self, pool: Adapter) -> None:
        self.pool, self.domain, self.algorithm, self.chunk = pool, rule_domain(pool.domain), pool.algorithm, pool.chunk
        for name in ("products", "requires", "api", "omits", "cost"):
            setattr(self, name, getattr(pool, name))

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
        if x.cu_seqlens is not None and max(lengths) > domain.most_tokens:
            raise Unsupported(f"packed requests of more than {domain.most_tokens} tokens")
        rows, most = [], tokens if x.cu_seqlens is not None else domain.most_tokens
        for at in range(0, tokens, most):
            part = {name: call[name][:, at : at + most] for name in TOKENS if call.get(name) is not None}
            o, pool = self.pool.run(call.replaced(**part, pool=pool))
            rows.append(o)
        return torch.cat(rows, 1), pool[owned].contiguous()


_pooled = functools.cache(Pooled)


def called_with(adapter: Any, case: Any) -> Any:
    """The adapter of a case's calls: a kernel on a pool is called as a rule if the case is one of a rule."""
    return _pooled(adapter) if isinstance(case, Case) and isinstance(adapter.domain, PoolDomain) else adapter
