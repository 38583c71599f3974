"""Megatron-LM's layer with the change of pull request 5396, which no release has: the L2 norm of q and k in the rule's kernel.

The change is made on a released layer by two attributes of its own. `use_qk_l2norm` leaves out the norm before the kernel, and
`gated_delta_rule` is the kernel, which is called with `use_qk_l2norm_in_kernel`.
"""

import dataclasses
import functools
import types
from typing import Any

from torch import nn

from oracles.layer import Layer
from properties.paths.domain import PathDomain
from verify.adapters.interface import Unavailable
from verify.adapters.megatron import MegatronLayer


class MegatronNormInKernel(MegatronLayer):
    """`MegatronLayer` whose kernel normalises q and k. It gets them as they leave the convolution, repeated to HV heads."""

    domain: PathDomain = dataclasses.replace(
        MegatronLayer.domain,
        choices=(("conv", ("fla",)), ("qk_norm", ("in_kernel",)), ("thd_all_to_all", ("fused",)), ("rule", ("fla",))),
    )

    def choices(self, m: types.SimpleNamespace) -> dict[str, tuple[str, ...]]:
        if not m.shares:
            raise Unavailable("the rule of this megatron-core cannot be replaced: 0.18.2 is the first release whose rule can")
        return {**super().choices(m), "qk_norm": ("in_kernel",)}

    def module(self, groups: Any, layer: Layer, **settings: Any) -> nn.Module:
        module = super().module(groups, layer, **settings)
        rule = functools.partial(_normalising, module.gated_delta_rule)
        vars(module).update(use_qk_l2norm=False, gated_delta_rule=rule)
        return module


def _normalising(rule: Any, *operands: Any, **settings: Any) -> Any:
    """Call a rule so that its kernel normalises q and k, whatever the layer says about that."""
    return rule(*operands, **{**settings, "use_qk_l2norm_in_kernel": True})
