"""The delta rules with the roundings of the two classes of algorithm that kernels use, many runs at once.

`recurrent` and `chunkwise` round where such algorithms round (oracles/arithmetic/rounding.py), forward and in a backward of their
own. Without rounding, tests/formulas/test_oracles.py shows that both equal the definition.
tests/formulas/test_rounding_recurrence.py shows that the runs of `recurrent` spread like runs of the definition that round every
element at every step, which would take as many steps as there are tokens.

At the sizes of a case, the number of calls decides the time. So tensors that round in the same way at two or three places are
rounded in one call: they are stacked along axis -3, or lie side by side along the last axis.
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.rule.in_chunks import Chunkwise
from oracles.rule.in_steps import Recurrent
from oracles.rule.segments import Form, Restarts, rule

STEPS = 64  # tokens of the recurrence that are computed at once
_PADDED = 96  # padding by this many tokens, or by a quarter, costs less than computing chunks of another size separately
SHORTEST = 16  # tokens of the shortest chunk, as matrix units need them


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    arithmetic: Arithmetic,
    lengths: Sequence[int],
    *,
    linear: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the definition in many runs: o [runs, T, HV, V] and final states [runs, N, HV, K, V] of consecutive sequences.

    q, k [runs, T, HV, K], v [runs, T, HV, V], g [runs, T, HV, 1 or K], beta [runs, T, HV, 1], state [runs, N, HV, K, V].

    Recurrent and decode kernels keep float32 throughout. At every step they round the decay, the state after its decay and after
    its update, the correction that is written, and the two sums over K. Where tokens repeat, the same errors are written again and
    again.

    A run with these errors is nearly the definition on other numbers: one key that recalls, another key that is written, a query,
    and the decay exp(g + e), where e_t is the fraction that channel k of a state loses or gains at step t. So it is computed in
    chunks. With E = cumsum(e), which is tiny, exp(G_i - G_j + E_i - E_j) goes into the operands as exp(E) k and exp(-E) k.

    These errors affect a whole row of the state and are shared by the channels of the values. In sums over these channels they
    might cancel where an implementation's errors do not. Channels of the values never mix in a state. So in every other pair of
    runs, half of them (a different half in each run) are computed with errors of opposite sign.

    An implementation may write beta k v^T and beta k (k^T S)^T separately. Then the cotangents of beta k, dS v and -dS (S^T k), and
    their sums with k, round separately; their errors stay large where the correction v - S^T k is small. Where the correction is
    not small, these errors are those of dS (v - S^T k), which are modelled anyway. Where it is small, both are as large as those of
    dS v. So the errors of dS v are added.

    A backward that sums its states again from stored corrected values (`summed_again`) never corrects the errors of these values.
    Its states S + D drift from those of the forward: D decays like S, and adds each value's error with its key. In calls so large
    that they have several segments, D begins at zero in each.

    `linear` says that an implementation takes the decay itself: g is the exact logarithm of a number that it need not compute. Then
    the decay does not round, only the state after it.
    """
    form = Recurrent(scale, dataclasses.replace(arithmetic, axis=1), linear)
    return _rule(form, (q, k, v, g, beta), state, lengths, alike(lengths, [_short(length, STEPS) for length in lengths]))


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    arithmetic: Arithmetic,
    lengths: Sequence[int],
    chunk: int = 64,
    *,
    channels: bool = False,
    restarts: Restarts = (),
) -> tuple[Tensor, Tensor]:
    """Compute the chunkwise form in many runs; shapes as in `recurrent`. Sequences shorter than a chunk have a smaller chunk.

    `restarts` are as in oracles/rule/segments.py. `channels` says that an implementation decays each channel of
    the key separately, even if there is only one. Padding tokens have k = v = g = beta = 0: they decay nothing and write nothing,
    so the final state is right.
    """
    channels = channels or g.shape[-1] > 1
    sizes = [_short(length, chunk) for length in lengths]
    if channels:  # products that decay by channel need powers of two (oracles/rule/decay.py)
        sizes = [1 << (size - 1).bit_length() for size in sizes]
    if arithmetic.narrow:  # otherwise the bits that sums over a chunk keep depend on its size
        sizes = alike(lengths, sizes)
    form = Chunkwise(scale, dataclasses.replace(arithmetic, axis=1), channels)
    return _rule(form, (q, k, v, g, beta), state, lengths, sizes, restarts)


def _short(length: int, chunk: int) -> int:
    """Return the tokens in the chunks of a sequence: at most the least power of two that holds the sequence, to limit padding."""
    return min(chunk, max(SHORTEST, 1 << max(length - 1, 0).bit_length()))


def alike(lengths: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the chunk sizes, some replaced by larger ones among them if that adds little padding.

    Chunks of one size are computed at once.
    """
    of_size: dict[int, list[int]] = {}
    for length, size in zip(lengths, sizes, strict=True):
        of_size.setdefault(size, []).append(length)

    def padded(size: int, taken: int) -> int:
        return sum(-(-length // taken) * taken for length in of_size[size])

    most, taken, larger = max(_PADDED, sum(padded(size, size) for size in of_size) // 4), dict[int, int](), max(sizes, default=1)
    for size in sorted(of_size, reverse=True):
        more = padded(size, larger) - padded(size, size)
        larger, most = (larger, most - more) if more <= most else (size, most)
        taken[size] = larger
    return [taken[size] for size in sizes]


def _rule(
    form: Form, tokens: tuple[Tensor, ...], state: Tensor, lengths: Sequence[int], sizes: Sequence[int], restarts: Restarts = ()
) -> tuple[Tensor, Tensor]:
    """Apply the rule to tokens and states with the runs first; the form has the runs after chunks and sequences."""
    first = tuple(x.transpose(0, 1) for x in (*tokens, state))
    o, final = rule(form, first[:-1], first[-1], tuple(lengths), tuple(sizes), restarts)
    return o.transpose(0, 1), final.transpose(0, 1)
