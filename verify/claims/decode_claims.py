"""The claim about decoding: the recurrent kernel with other block sizes of value channels (BV) than the released one."""

from collections.abc import Iterator

import torch

from oracles.operation import Inputs
from verify.claims.contest import Agreement, Contest, Form, Tensors, agreement, time_forms
from verify.claims.kernel_claims import rows_of, rule_case
from verify.claims.setting import Setting
from verify.claims.table import Row, number

RELEASED, BLOCKS = 8, (16, 32, 64)
CLAIMED_GAIN, CLAIMED_SHARES = 1.10, (0.15, 0.23)  # end to end, if the kernel took such a share of the time


def recurrent(block: int) -> Form:
    """A form that launches `fused_recurrent_gated_delta_rule_fwd_kernel` as released but with another BV.

    The form returns o and the final state.
    """

    def form(x: Inputs) -> Tensors:
        from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd_kernel as kernel

        (batch, tokens, heads, key_dim), (value_heads, value_dim) = x.q.shape, x.v.shape[-2:]
        o, final_state = torch.empty_like(x.v), torch.empty_like(x.state)
        kernel[(-(-value_dim // block) * batch * value_heads,)](
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            gk=None,
            gv=None,
            beta=x.beta,
            A_log=None,
            dt_bias=None,
            o=o,
            h0=x.state,
            ht=final_state,
            cu_seqlens=None,
            scale=key_dim**-0.5,
            T=tokens,
            H=heads,
            HV=value_heads,
            K=key_dim,
            V=value_dim,
            BK=1 << (key_dim - 1).bit_length(),
            BV=block,
            IS_BETA_HEADWISE=True,
            USE_QK_L2NORM_IN_KERNEL=True,
            APPLY_BETA_SIGMOID=False,
            ALLOW_NEG_EIGVAL=False,
            STATE_V_FIRST=False,
            num_warps=1,
            num_stages=3,
        )
        return o, final_state

    return form


def decode_contest(setting: Setting, requests: int) -> Contest:
    """A contest of the block sizes, with one token for each of `requests` requests."""
    return Contest(
        {f"BV {block}": recurrent(block) for block in (RELEASED, *BLOCKS)},
        rule_case(setting, [1] * requests, "random"),
        rule_case(setting, [1] * setting.sizes.judged_requests, "random"),
        "recurrent",
        outputs=("o", "final_state"),
        backward=False,
    )


def needed(gain: float, share: float) -> float:
    """The speed-up that a kernel needs so that the whole gains a factor `gain`, if the kernel took `share` of the time.

    ValueError if even a kernel that takes no time would gain less.
    """
    left = share - (1 - 1 / gain)
    if not left > 0:
        raise ValueError(f"share must be over {1 - 1 / gain:.3f} for a gain of {gain}, got {share}")
    return share / left


def decode(setting: Setting) -> Iterator[Row]:
    """The rows of each block size against the released one, for each number of requests."""
    high, low = (needed(CLAIMED_GAIN, share) for share in CLAIMED_SHARES)
    claimed = f"{number(low)} to {number(high)}: 10% end to end, if 15 to 23% of it"
    agreed: Agreement | None = None
    for requests in setting.sizes.requests:
        contest = decode_contest(setting, requests)
        setting.tell(f"decoding, {requests} requests")
        times = time_forms(contest, setting.clock, setting.effort, setting.device)
        agreed = agreed or agreement(contest, setting.device)  # only once, because it does not depend on the number of requests
        for block in BLOCKS:
            forms = (f"BV {RELEASED}", f"BV {block}")
            says = (claimed if block == 32 else "", "")
            yield from rows_of(5, f"recurrent kernel, BV {block} for {RELEASED}", contest, times, agreed, forms, says)
