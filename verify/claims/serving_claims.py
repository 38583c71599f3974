"""The claim about decoding, with SGLang's kernels: blocks of 32 value channels instead of 8, in every kernel of the family.

sgl-project/sglang 17094 raised the block size (BV) of `fused_recurrent_gated_delta_rule_fwd` from 8 to 32. Its review asked whether
the change is right in the sibling kernels too. SGLang 0.5.23 also verifies drafts on Hopper in blocks of 4, and a comment in
`_select_recurrent_launch_config` says that their results are equal to the bit to those in blocks of 32.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from oracles.layer import Layer
from oracles.operation import DTYPES, Inputs, sequences
from properties.pools.case import BLOCK_SIZES, PoolCase
from verify.adapters import serving
from verify.adapters.blocks import in_blocks
from verify.adapters.serving_kernels import side_by_side
from verify.adapters.sglang_blocks import FORWARD_KERNEL, KDA
from verify.adapters.sglang_pools import RECURRENT, SIGMOID
from verify.claims.contest import Contest, Form, Tensors, agreement, size_of
from verify.claims.decode_claims import CLAIMED_GAIN, CLAIMED_SHARES, needed
from verify.claims.setting import Setting
from verify.claims.table import Row, number
from verify.claims.timing import Call, Effort, Spread, measured, ratios

CLAIM = 5
DRAFT = 4  # the tokens of a draft that is verified
MICROSECONDS = 1e3  # in a millisecond
# A graph has a launch for each of many layers, whose states together are more than an L2 cache holds, as in a model.
LEAST_LAYERS, MOST_LAYERS, STATE_BYTES = 8, 36, 2**29
# A constant of the compiled kernel that grows with the batch, but is used only for trees of drafts, which we do not time.
UNUSED = {"NP2_T": 1}
MOST_EFFORT = Effort(budget_s=0.15, least=10, most=40, warm=2)  # for each row, because there are many
GATES = ("64", "mixed", "10", "forever")  # see properties/rules/case.py


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a wrapper is called with: the inputs of decode, and the states [P, HV, V, K], which may be changed.

    Packed decode takes `mixed` [N, 2 H K + HV V], which has q, k and v. Verification writes to `buffer` [N, T, HV, V, K], request n
    to row rows[n].
    """

    inputs: Inputs
    states: Tensor
    mixed: Tensor
    buffer: Tensor | None = None
    rows: Tensor | None = None


Wrapper = Callable[[types.ModuleType, Operands], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One of SGLang's kernels.

    - `place` is the module of its wrapper, and `launched` the name of the Triton kernel there. `axis` is the axis of the grid along
      which blocks lie, on a GPU and on a CPU.
    - `call` calls the wrapper, and returns o and the final states.
    - `before`, `after` are the block sizes that are compared. `claimed` says whether the published gain is about this kernel.
    - `inside` says whether the kernel computes the gate and beta itself, and `pool` whether it takes the slots of its states.
    - `tokens` are the numbers of tokens of a request that are judged. The last one is timed.
    - `state_dtypes` are the dtypes of states that it can write.
    """

    name: str
    place: str
    launched: str
    call: Wrapper
    axis: tuple[int, int] = (1, 1)
    rule: str = "gated_delta_rule"
    inside: bool = True
    pool: bool = True
    before: int = 8
    after: int = 32
    tokens: tuple[int, ...] = (DRAFT, 1)
    state_dtypes: tuple[str, ...] = ("fp32", "bf16")
    claimed: bool = False

    def blocks(self, device: torch.device) -> tuple[int, ...]:
        """The block sizes that the device can launch. For KDA, blocks of 4 may have inline assembly, which needs a GPU."""
        return BLOCK_SIZES[1:] if self.rule == "kda" and self.inside and device.type != "cuda" else BLOCK_SIZES

    def heads(self, layer: Layer, share: int) -> tuple[int, int]:
        """The key heads and value heads of a rank that has one of `share` parts of a layer. In KDA there are equally many."""
        value_heads = layer.value_heads // share
        return (value_heads if self.rule == "kda" else max(1, layer.heads // share)), value_heads

    def run(self, block: int, x: Operands) -> tuple[Tensor, Tensor]:
        """Call the wrapper so that it launches blocks of this size. Returns o and the final states."""
        module = serving.module(self.place)
        with in_blocks(module, self.launched, block, self.axis[x.states.device.type != "cuda"], UNUSED):
            return self.call(module, x)


def recurrent(module: types.ModuleType, x: Operands) -> tuple[Tensor, Tensor]:
    """Call `fused_recurrent_gated_delta_rule_fwd`."""
    y = x.inputs
    o, final = module.fused_recurrent_gated_delta_rule_fwd(
        y.q, y.k, y.v, y.g, y.beta, y.q.shape[-1] ** -0.5, x.states, True, y.qk_norm, y.cu_seqlens
    )
    return o, final


def recurrent_kda(module: types.ModuleType, x: Operands) -> tuple[Tensor, Tensor]:
    """Call `fused_recurrent_kda_fwd`, which replaces the states by the final ones."""
    y = x.inputs
    o, final = module.fused_recurrent_kda_fwd(
        y.q, y.k, y.v, y.g, y.beta, y.q.shape[-1] ** -0.5, x.states, True, y.cu_seqlens, y.qk_norm
    )
    return o, final


def update(module: types.ModuleType, x: Operands) -> tuple[Tensor, Tensor]:
    """Call `fused_recurrent_gated_delta_rule_update`."""
    y = x.inputs
    o = module.fused_recurrent_gated_delta_rule_update(
        *(y.q, y.k, y.v, y.g, y.beta),
        initial_state_source=x.states,
        initial_state_indices=y.slots,
        cu_seqlens=y.cu_seqlens,
        use_qk_l2norm_in_kernel=y.qk_norm,
    )
    return o, x.states


def sigmoid(module: types.ModuleType, x: Operands) -> tuple[Tensor, Tensor]:
    """Call `fused_sigmoid_gating_delta_rule_update` as for decoding; if there is a buffer, as for the verification of drafts."""
    y, buffer = x.inputs, x.buffer
    o = module.fused_sigmoid_gating_delta_rule_update(
        A_log=y.A_log,
        a=y.a,
        dt_bias=y.dt_bias.flatten(),
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=y.q,
        k=y.k,
        v=y.v,
        b=y.b,
        initial_state_source=x.states,
        initial_state_indices=y.slots,
        use_qk_l2norm_in_kernel=y.qk_norm,
        cu_seqlens=y.cu_seqlens,
        is_kda=y.a.dim() == 4,
        disable_state_update=buffer is not None,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=x.rows,
        cache_steps=None if buffer is None else buffer.shape[1],
    )
    return o, x.states


def verify(module: types.ModuleType, x: Operands) -> tuple[Tensor, Tensor]:
    """Call the same for the verification of drafts. The final states are all those in the buffer."""
    assert x.buffer is not None
    return sigmoid(module, x)[0], x.buffer


def packed_decode(module: types.ModuleType, x: Operands) -> tuple[Tensor, Tensor]:
    """Call `fused_recurrent_gated_delta_rule_packed_decode`, or KDA's form of it."""
    y = x.inputs
    form = "kda" if y.a.dim() == 4 else "gated_delta_rule"
    o = y.v.new_empty(len(y.slots), 1, *y.v.shape[2:])
    getattr(module, f"fused_recurrent_{form}_packed_decode")(
        x.mixed,
        y.a.flatten(0, 1).flatten(1),
        y.b.flatten(0, 1),
        A_log=y.A_log,
        dt_bias=y.dt_bias.flatten(),
        scale=y.q.shape[-1] ** -0.5,
        initial_state=x.states,
        out=o,
        ssm_state_indices=y.slots,
        use_qk_l2norm_in_kernel=y.qk_norm,
    )
    return o.reshape(y.v.shape), x.states


_SIGMOID_KERNEL = "fused_sigmoid_gating_delta_rule_update_kernel"
KERNELS = (
    Kernel(
        "fused_recurrent_gated_delta_rule_fwd",
        RECURRENT,
        FORWARD_KERNEL,
        recurrent,
        inside=False,
        pool=False,
        state_dtypes=("fp32",),
        claimed=True,
    ),
    Kernel(
        "fused_recurrent_gated_delta_rule_update",
        RECURRENT,
        "fused_recurrent_gated_delta_rule_update_fwd_kernel",
        update,
        inside=False,
    ),
    Kernel("fused_sigmoid_gating_delta_rule_update", SIGMOID, _SIGMOID_KERNEL, sigmoid, (0, 1)),
    Kernel("fused_recurrent_kda_fwd", KDA, FORWARD_KERNEL, recurrent_kda, rule="kda", inside=False, pool=False),
    Kernel("fused_sigmoid_gating_delta_rule_update of KDA", SIGMOID, _SIGMOID_KERNEL, sigmoid, (0, 1), rule="kda"),
    Kernel(
        "fused_recurrent_gated_delta_rule_packed_decode",
        RECURRENT,
        "fused_recurrent_gated_delta_rule_packed_decode_kernel",
        packed_decode,
        (0, 0),
        tokens=(1,),
    ),
    Kernel(
        "fused_recurrent_kda_packed_decode",
        RECURRENT,
        "fused_recurrent_kda_packed_decode_kernel",
        packed_decode,
        (0, 0),
        rule="kda",
        tokens=(1,),
    ),
    Kernel(
        "fused_sigmoid_gating_delta_rule_update verifying drafts",
        SIGMOID,
        _SIGMOID_KERNEL,
        verify,
        (0, 1),
        before=32,
        after=4,
        tokens=(DRAFT,),
    ),
)


# Whether the results are right, and equal to the bit


def cases(kernel: Kernel, setting: Setting, state_dtype: str) -> list[PoolCase]:
    """The cases with which a kernel is judged: a rank's share of the layer, its widths and half of them, one token and drafts."""
    sizes = setting.sizes
    heads, value_heads = kernel.heads(sizes.layer, sizes.shares[-1])
    key_dim, value_dim = sizes.layer.key_dim, sizes.layer.value_dim
    widths = ((key_dim, value_dim), (key_dim // 2, value_dim), (key_dim, value_dim // 2))
    return [
        PoolCase(
            (tokens,) * sizes.judged_requests,
            packed=True,
            heads=heads,
            value_heads=value_heads,
            key_dim=keys,
            value_dim=values,
            dtype=sizes.dtype,
            gate=gate,
            state="random",
            qk_norm=True,
            offsets="int32",
            rule=kernel.rule,
            in_kernel="both" if kernel.inside else "none",
            state_dtype=state_dtype,
            seed=seed,
        )
        for keys, values in widths
        for tokens in kernel.tokens
        for seed, gate in enumerate(GATES[: sizes.judged_gates])
    ]


def form(kernel: Kernel, block: int) -> Form:
    """The kernel in blocks of one size, on the inputs of a PoolCase. Returns o, the pool and, of verification, the buffer."""

    def run(x: Inputs) -> Tensors:
        slots, lengths = x.slots, sequences(x, "v")
        states = x.pool.detach().mT.clone(memory_format=torch.contiguous_format)
        states = states if kernel.pool else states[slots]
        count = len(slots)
        buffer = states.new_empty(count, max(lengths), *states.shape[1:]) if kernel.call is verify else None
        rows = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=slots.device)
        o, final = kernel.run(block, Operands(x, states, side_by_side(x), buffer, rows))
        if kernel.pool and buffer is None:
            return o, final.mT
        pool = torch.empty_like(x.pool.detach().mT, memory_format=torch.contiguous_format)
        pool[slots] = final.to(pool.dtype) if buffer is None else buffer.flip(0)[:, -1]
        return (o, pool.mT) if buffer is None else (o, pool.mT, buffer)

    return run


def judged(kernel: Kernel, setting: Setting, state_dtype: str) -> Row:
    """The row that says whether a kernel is right in every block size, and which block sizes give equal bits."""
    blocks = kernel.blocks(setting.device)
    forms = {f"BV {block}": form(kernel, block) for block in blocks}
    every, worst, apart, wrong = cases(kernel, setting, state_dtype), 0.0, 0.0, ""
    unequal: set[tuple[int, int]] = set()
    for case in every:
        contest = Contest(forms, case, case, "recurrent", outputs=("o", "pool"), join=_judged_outputs, backward=False)
        agreed = agreement(contest, setting.device)
        worst = max(worst, *agreed.worst.values())
        apart = max(apart, *agreed.apart.values())
        if not wrong and agreed.broken(*forms):
            wrong = f"{agreed.about(*forms)} ({case})"
        unequal |= different(forms, blocks, case.inputs(str(setting.device)))
    verdict = wrong or f"hold in {len(every)} cases: {worst:.2f} of what rounding allows"
    return Row(
        CLAIM,
        f"{kernel.name}, {state_dtype} states, BV {', '.join(map(str, blocks))}",
        f"{len(every)} cases, {size_of(every[0])} and others",
        answers=f"{verdict}; {equality(blocks, unequal, apart)}",
        broken=bool(wrong),
        case=str(every[0]),
    )


def _judged_outputs(parts: Tensors) -> Tensors:
    return parts[:2]


def different(forms: dict[str, Form], blocks: Sequence[int], x: Inputs) -> set[tuple[int, int]]:
    """The pairs of block sizes whose results differ in any bit, those in the buffer of verification included."""
    results = {block: form(x) for block, form in zip(blocks, forms.values(), strict=True)}
    return {
        (one, other)
        for one, other in itertools.combinations(blocks, 2)
        if not all(bits_equal(a, b) for a, b in zip(results[one], results[other], strict=True))
    }


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits."""
    whole = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def equality(blocks: Sequence[int], unequal: set[tuple[int, int]], apart: float) -> str:
    """A text that says which block sizes give equal bits. `apart` is the largest difference, divided by the tolerance."""
    classes: list[list[int]] = []
    for block in blocks:
        for members in classes:
            if (members[0], block) not in unequal:
                members.append(block)
                break
        else:
            classes.append([block])
    if len(classes) == 1:
        return "equal to the bit in every block size"
    return f"equal to the bit: {' | '.join(', '.join(map(str, members)) for members in classes)}; {number(apart)} apart"


def equal_blocks(setting: Setting) -> Iterator[Row]:
    """The rows of every kernel: right or not, and equal to the bit or not."""
    for kernel in KERNELS:
        for state_dtype in kernel.state_dtypes:
            setting.tell(f"{kernel.name}, {state_dtype} states: right in every block size?")
            yield judged(kernel, setting, state_dtype)


# How long they take


def operands(kernel: Kernel, layer: Layer, share: int, requests: int, device: torch.device, dtype: str) -> list[Operands]:
    """Random operands of a timed call for each of several layers: they share the tokens, and each has its own states."""
    (heads, value_heads), tokens = kernel.heads(layer, share), kernel.tokens[-1]
    count, key_dim, value_dim = requests * tokens, layer.key_dim, layer.value_dim

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, count, *shape, device=device).to(DTYPES[dtype])

    per_channel = (value_heads, key_dim) if kernel.rule == "kda" else (value_heads,)
    x = Inputs(
        q=drawn(heads, key_dim),
        k=drawn(heads, key_dim),
        v=drawn(value_heads, value_dim),
        a=drawn(*per_channel),
        b=drawn(value_heads),
        g=-torch.rand(1, count, *per_channel, device=device),
        beta=torch.rand(1, count, value_heads, device=device).to(DTYPES[dtype]),
        A_log=torch.rand(value_heads, device=device),
        dt_bias=torch.rand(per_channel, device=device),
        slots=torch.arange(requests - 1, -1, -1, device=device),  # int64: with int32 KDA's packed decode has another kernel
        cu_seqlens=torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens,
        qk_norm=True,
    )
    numbers = requests * value_heads * value_dim * key_dim
    layers = max(LEAST_LAYERS, min(MOST_LAYERS, -(-STATE_BYTES // (4 * numbers)))) if device.type == "cuda" else 1
    rows, mixed = torch.arange(requests, dtype=torch.int32, device=device), side_by_side(x)
    result = []
    for _ in range(layers):
        states = torch.empty(requests, value_heads, value_dim, key_dim, device=device).uniform_(-1, 1)
        buffer = states.new_empty(requests, tokens, *states.shape[1:]) if kernel.call is verify else None
        result.append(Operands(x, states, mixed, buffer, rows))
    return result


def repeated(kernel: Kernel, blocks: Sequence[int], layers: Sequence[Operands]) -> dict[str, Call]:
    """For each block size, a call of the kernel for each layer.

    On a GPU the launches are in a CUDA graph, as in a server, so that Python takes no time. The graphs share their memory, because
    only one of them runs at a time.
    """

    def launch(block: int) -> list[tuple[Tensor, Tensor]]:
        return [kernel.run(block, x) for x in layers]  # all results live until the end, so that none takes another's memory

    if layers[0].states.device.type != "cuda":
        return {str(block): functools.partial(launch, block) for block in blocks}
    memory, result = torch.cuda.graph_pool_handle(), dict[str, Call]()
    for block in blocks:
        kernel.run(block, layers[0])  # compiles, which must not happen while a graph is captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            launch(block)
        result[str(block)] = graph.replay
    return result


def timed(kernel: Kernel, setting: Setting, share: int, requests: int) -> Row:
    """The row of a kernel's times in every block size at one number of requests."""
    layers = operands(kernel, setting.sizes.layer, share, requests, setting.device, setting.sizes.dtype)
    blocks = kernel.blocks(setting.device)
    milliseconds = measured(repeated(kernel, blocks, layers), setting.clock, limited(setting.effort))
    took = {name: [MICROSECONDS * ms / len(layers) for ms in times] for name, times in milliseconds.items()}
    medians = {name: Spread.of(times).median for name, times in took.items()}
    before, after = took[str(kernel.before)], took[str(kernel.after)]
    heads, value_heads = kernel.heads(setting.sizes.layer, share)
    tokens = kernel.tokens[-1]
    high, low = (needed(CLAIMED_GAIN, part) for part in CLAIMED_SHARES)
    return Row(
        CLAIM,
        f"{kernel.name}, BV {kernel.after} for {kernel.before}",
        f"{requests} x {tokens} token{'s' * (tokens > 1)}, {heads} and {value_heads} heads",
        "us",
        Spread.of(before),
        Spread.of(after),
        ratios(before, after),
        f"{number(low)} to {number(high)}: 10% end to end, if 15 to 23% of it" if kernel.claimed else "",
        note=", ".join(f"BV {name} {number(median)}" for name, median in medians.items()),
    )


def limited(effort: Effort) -> Effort:
    """The effort for one row: as asked for, but at most MOST_EFFORT."""
    return Effort(
        *(min(one, most) for one, most in zip(dataclasses.astuple(effort), dataclasses.astuple(MOST_EFFORT), strict=True))
    )


def block_times(setting: Setting) -> Iterator[Row]:
    """The rows of every kernel's times, for a whole layer and a rank's share of it."""
    for share in setting.sizes.shares:
        for kernel in KERNELS:
            setting.tell(f"{kernel.name}, 1/{share} of the layer: times")
            for requests in setting.sizes.batches:
                yield timed(kernel, setting, share, requests)


def missing(part: Callable[[Setting], Iterator[Row]], name: str) -> Callable[[Setting], Iterator[Row]]:
    """The part, or one row with the reason if this host has no SGLang, which is no failure."""

    @functools.wraps(part)
    def rows(setting: Setting) -> Iterator[Row]:
        try:
            for kernel in KERNELS:
                serving.module(kernel.place)
        except ImportError as error:
            yield Row(CLAIM, name, reason=str(error), lacking=True)
            return
        yield from part(setting)

    return rows


right = missing(equal_blocks, "SGLang's kernels in blocks of every size")
fast = missing(block_times, "SGLang's kernels in blocks of every size: times")
