"""Claims about a training step on one GPU: the layout of the convolution, one norm instead of two, and the norm in the kernel.

Each form does what the changed code does around released kernels (flash-linear-attention's and torch's). It begins with a slice of
a projection and ends with contiguous operands for the next kernel.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs, sequences
from properties.modules.case import ModuleCase
from properties.rules.case import Case
from verify.claims.contest import (
    Agreement,
    Contest,
    Tensors,
    Times,
    agreement,
    allocated_bytes,
    ready,
    saved_bytes,
    size_of,
    time_forms,
)
from verify.claims.setting import Setting
from verify.claims.table import Row, number
from verify.claims.timing import Call, Spread, ratios

MIB = 2.0**20
JUDGED_SEQUENCES = 5


def transposed_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU(causal conv1d) of x [B, T, C] by torch, which needs [B, C, T]. The result is a transposed view.

    Megatron-LM did this if the package causal-conv1d, which takes [B, C, T] too, was not installed.
    """
    turned = x.transpose(1, 2).contiguous()
    y = F.conv1d(turned, weight.unsqueeze(1), bias, padding=weight.shape[-1] - 1, groups=len(weight))
    return F.silu(y[..., : x.shape[1]]).transpose(1, 2)


def fla_conv(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """SiLU(causal conv1d) by flash-linear-attention's kernel, which takes [B, T, C] with any strides, and packed sequences."""
    from fla.modules.causal_conv1d import causal_conv1d

    y: Tensor = causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=cu_seqlens)[0]
    return y


def conv_contest(setting: Setting, lengths: Sequence[int], judged: Sequence[int]) -> Contest:
    """A contest of conv1d from in_proj's output to contiguous q, k and v. More than one sequence are packed."""
    layer = setting.sizes.layer
    widths = [layer.sections[name] for name in "qkv"]

    def before(x: Inputs) -> Tensors:
        # Torch has no packed sequences, so each sequence needs a call.
        rows = [transposed_conv(sequence, x.weight, x.bias) for sequence in x.x.split(x.lengths, 1)]
        y = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
        return tuple(part.contiguous() for part in y.split(widths, -1))

    def after(x: Inputs) -> Tensors:
        return tuple(part.contiguous() for part in fla_conv(x.x, x.weight, x.bias, x.cu_seqlens).split(widths, -1))

    def prepare(x: Inputs) -> Inputs:
        # Lengths are read once here, because reading them in each call would wait for the GPU.
        others = sum(layer.sections.values()) - sum(widths)
        return Inputs(**{**sliced(x, ("x",), others), "lengths": sequences(x, "x")})

    def case(sizes: Sequence[int]) -> ModuleCase:
        return ModuleCase(
            tuple(sizes),
            "causal_conv1d",
            packed=len(sizes) > 1,
            width=sum(widths),
            conv_width=layer.conv_width,
            dtype=setting.sizes.dtype,
            activation="silu",
            final_state=False,
        )

    return Contest(
        {"transposed": before, "[b, s, d]": after},
        case(lengths),
        case(judged),
        "pointwise",
        split=lambda directions: directions[0].split(widths, -1),
        join=lambda parts: (torch.cat(parts, -1),),
        prepare=prepare,
    )


def conv(setting: Setting) -> Iterator[Row]:
    """The rows of the convolution of one sequence, with and without transposes."""
    sizes = setting.sizes
    yield from compared(
        setting, 1, "conv1d: FLA's on [b, s, d] for torch's and a transpose", conv_contest(setting, [sizes.tokens], [sizes.judged])
    )


def packed_conv(setting: Setting) -> Iterator[Row]:
    """The rows of the convolution of packed sequences, with one call for each sequence and with one call for all."""
    lengths, judged = ragged(setting.sizes.tokens, setting.sizes.sequences), ragged(setting.sizes.judged, JUDGED_SEQUENCES)
    yield from compared(
        setting, 1, "conv1d: FLA's with cu_seqlens for torch's, a call a sequence", conv_contest(setting, lengths, judged)
    )


def l2norm(x: Tensor) -> Tensor:
    """flash-linear-attention's norm of each head's vector."""
    from fla.modules.l2norm import l2norm as norm

    y: Tensor = norm(x)
    return y


def combined_norm(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k normalised by one call. The results are views."""
    first, second = l2norm(torch.cat([q, k], 2)).chunk(2, 2)
    return first, second


def separate_norms(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k normalised by separate calls."""
    return l2norm(q.contiguous()), l2norm(k.contiguous())


def norms_contest(setting: Setting, *, repeated: bool) -> Contest:
    """A contest of L2 norms from conv1d's output to the rule's contiguous operands.

    With `repeated`, each operand is repeated to HV heads, as Megatron-LM passes them.
    """
    layer = setting.sizes.layer
    group = layer.value_heads // layer.heads

    def operands(heads: Tensors) -> Tensors:
        return tuple(x.repeat_interleave(group, 2) if repeated else x.contiguous() for x in heads)

    def split(directions: Tensors) -> Tensors:
        halves = directions[0].chunk(2, 2)
        if not repeated:
            return halves
        # Only the first copy of a head gets a cotangent, so that the sum over the copies is exactly the head's cotangent.
        first = torch.zeros(group, 1, dtype=halves[0].dtype, device=halves[0].device)
        first[0] = 1
        return tuple((half.unsqueeze(3) * first).flatten(2, 3) for half in halves)

    def case(tokens: int) -> ModuleCase:
        return ModuleCase((tokens,), "l2norm", heads=2 * layer.heads, width=layer.key_dim, dtype=setting.sizes.dtype)

    return Contest(
        {
            "a norm each": lambda x: operands(separate_norms(*x.x.chunk(2, 2))),
            "one norm": lambda x: operands(combined_norm(*x.x.chunk(2, 2))),
        },
        case(setting.sizes.tokens),
        case(setting.sizes.judged),
        "pointwise",
        split=split,
        join=lambda parts: (torch.cat([x[:, :, :: group if repeated else 1] for x in parts], 2),),
        prepare=lambda x: sliced(x, ("x",), layer.sections["v"]),
    )


def norms(setting: Setting) -> Iterator[Row]:
    """The rows of one norm over q and k together."""
    yield from compared(setting, 2, "L2 norm: one for two", norms_contest(setting, repeated=False))


def repeated_norms(setting: Setting) -> Iterator[Row]:
    """The rows of one norm, followed by a repetition of heads for a kernel without GVA."""
    yield from compared(setting, 2, "L2 norm: one for two, then heads repeated", norms_contest(setting, repeated=True))


def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, norm: bool) -> Tensor:
    """The output o of flash-linear-attention's chunk kernels, which copy strided operands to contiguous memory."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    o: Tensor = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=norm)[0]
    return o


def in_kernel_contest(setting: Setting) -> Contest:
    """A contest of the rule from conv1d's output on.

    Its norms are explicit (one call for both, as in Megatron-LM, or two calls) or inside the kernel.
    """
    return Contest(
        {
            "one explicit": lambda x: (rule(*combined_norm(x.q, x.k), x.v, x.g, x.beta, norm=False),),
            "two explicit": lambda x: (rule(*separate_norms(x.q, x.k), x.v, x.g, x.beta, norm=False),),
            "in the kernel": lambda x: (rule(x.q, x.k, x.v, x.g, x.beta, norm=True),),
        },
        rule_case(setting, [setting.sizes.tokens]),
        rule_case(setting, [setting.sizes.judged]),
        "chunkwise",
        chunk=64,
        outputs=("o",),
        prepare=lambda x: sliced(x, ("q", "k", "v")),
    )


def rule_case(setting: Setting, lengths: Sequence[int], state: str = "none") -> Case:
    """A case of the rule at the layer's widths, with the norm in the kernel."""
    layer = setting.sizes.layer
    return Case(
        tuple(lengths),
        heads=layer.heads,
        value_heads=layer.value_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        dtype=setting.sizes.dtype,
        gate="64",
        state=state,
        qk_norm=True,
    )


def in_kernel(setting: Setting) -> Iterator[Row]:
    """The rows of the norm in the kernel: its time, and the memory that is saved for backward."""
    contest = in_kernel_contest(setting)
    times, agreed = settled(setting, contest)
    x = ready(contest, contest.timed, setting.device)
    calls: dict[str, Call] = {name: functools.partial(form, x.inputs) for name, form in contest.forms.items()}
    saved = {name: saved_bytes(call, [*x.given.values()]) for name, call in calls.items()}
    allocated = {name: allocated_bytes(call, setting.device) for name, call in calls.items()}
    promised = predicted_bytes(setting.sizes.layer, setting.sizes.tokens, x.inputs.q.element_size())
    for before in ("one explicit", "two explicit"):
        what, forms = f"L2 norm: in the kernel for {before}", (before, "in the kernel")
        yield from rows_of(3, what, contest, times, agreed, forms)
        yield Row(
            3,
            f"{what}, kept for backward",
            size_of(contest.timed),
            "MiB",
            Spread.of([saved[before] / MIB]),
            Spread.of([saved["in the kernel"] / MIB]),
            Spread.of([saved[before] / saved["in the kernel"]]),
            f"{number(promised / MIB)} MiB less" if before == "one explicit" else "",
            case=str(contest.timed),
            note=saving(*((saved[name], allocated[name]) for name in forms)),
        )


def predicted_bytes(layer: Layer, tokens: int, element_bytes: int) -> int:
    """The bytes that the change claims to save: normalised q and k, [T, 2 H, K]."""
    return tokens * 2 * layer.heads * layer.key_dim * element_bytes


def saving(before: tuple[int, int | None], after: tuple[int, int | None]) -> str:
    """A text about the saved MiB: by tensors saved for backward, and on a GPU also by the allocator."""
    text = f"{number((before[0] - after[0]) / MIB)} MiB less"
    if before[1] is not None and after[1] is not None:
        text += f", by the allocator {number((before[1] - after[1]) / MIB)}"
    return text


def sliced(inputs: Inputs, names: Sequence[str], extra: int = 0) -> Inputs:
    """The inputs, with those of `names` as slices of one tensor that has `extra` more channels, as slices of a projection are."""
    flat = [inputs[name].flatten(2) for name in names]
    whole = torch.cat([*flat, flat[0].new_zeros(*flat[0].shape[:2], extra)], -1)
    parts = whole.split([*(x.shape[-1] for x in flat), extra], -1)
    return inputs.replaced(**{name: part.view(inputs[name].shape) for name, part in zip(names, parts, strict=False)})


def ragged(total: int, count: int, multiple: int = 1) -> list[int]:
    """`count` lengths with the sum `total`, alternately 1.5 and 0.5 times the mean, all multiples of `multiple`.

    ValueError if the total is no multiple of `multiple`, or too small.
    """
    whole, left = divmod(total, multiple)
    if count < 1 or left or whole < count:
        raise ValueError(f"total must be {count} or more times {multiple} and a multiple of it, got {total}")
    lengths = [(index + 1) * whole // count - index * whole // count for index in range(count)]
    for index in range(0, count - 1, 2):
        moved = lengths[index + 1] // 2
        lengths[index : index + 2] = lengths[index] + moved, lengths[index + 1] - moved
    return [multiple * length for length in lengths]


def settled(setting: Setting, contest: Contest) -> tuple[Times, Agreement]:
    """The times and the agreement of a contest. It is timed first, so that kernels are autotuned at the timed size."""
    return time_forms(contest, setting.clock, setting.effort, setting.device), agreement(contest, setting.device)


def compared(setting: Setting, claim: int, what: str, contest: Contest, claimed: tuple[str, str] = ("", "")) -> Iterator[Row]:
    """The rows of a contest of two forms, before and after: one for each direction."""
    before, after = contest.forms
    yield from rows_of(claim, what, contest, *settled(setting, contest), (before, after), claimed)


def rows_of(
    claim: int,
    what: str,
    contest: Contest,
    times: Times,
    agreed: Agreement,
    forms: tuple[str, str],
    claimed: tuple[str, str] = ("", ""),
) -> Iterator[Row]:
    """The rows of two of a contest's forms: one for each direction."""
    ways = [("forward", times.ahead, times.first_ahead_s), ("backward", times.back, times.first_back_s)]
    for (way, took, first), says in zip(ways, claimed, strict=True):
        if took:
            before, after = (took[name] for name in forms)
            yield Row(
                claim,
                f"{what}, {way}" if contest.backward else what,
                size_of(contest.timed),
                "ms",
                Spread.of(before),
                Spread.of(after),
                ratios(before, after),
                says,
                agreed.about(*forms),
                broken=bool(agreed.broken(*forms)),
                first_s=tuple(first[name] for name in forms),
                case=str(contest.timed),
            )
