"""SGLang's GDN serving, driven event by event: its pool of states, its slot allocator and its Triton kernels.

The calls and their order are those of SGLang 0.5.23. `GDNAttnBackend.forward_decode` and `forward_extend` are in
sglang/srt/layers/attention/linear/gdn_backend.py, `_forward_metadata`, the snapshots and `update_mamba_state_after_mtp_verify` in
sglang/srt/layers/attention/hybrid_linear_attn_backend.py, the allocation of slots in sglang/srt/mem_cache/memory_pool.py.

Releases from 0.5.13 on have the same calls, but for these:

- Before 0.5.23, the kernels that commit drafts take no rows of their source. Before 0.5.16, one kernel commits states and windows.
- Before 0.5.21, no module plans which states of a prefill go into snapshots, so none are taken.
- Before 0.5.19, chunk kernels take no padding, so neither does a prefill.
"""

import contextlib
import dataclasses
import functools
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from properties.traces.events import PADDING
from verify.adapters.base import Engine, TraceAdapter
from verify.adapters.serving import has_text, names
from verify.adapters.sglang_pools import strays

CHUNK = 64  # of the chunk kernels, and between places where a snapshot may be taken
PADDING_ROWS = 8  # rows of a batch of drafts beside those of requests, for which the pool has room
_BLOCK = 1024  # as the wrappers of the scatter kernels choose it


_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_PLAN = "sglang.srt.layers.attention.mamba.prefill_track_metadata"
# Names that only newer releases have.
NEWER = {
    _SCATTER: (
        "_fused_conv_window_scatter_with_mask_kernel",
        "_prepare_src_rows",
        "scatter_mamba_states_after_mtp_verify",
        "track_mamba_states_if_needed",
    ),
    _PLAN: ("build_prefill_track_plan",),
}


@functools.cache
def sglang() -> types.SimpleNamespace:
    """Return the names that the engine uses, None for those of NEWER that are not there.

    ImportError, in one line, says what else is missing.
    """
    newer = {place: [name for name in found if has_text(place, f"def {name}(")] for place, found in NEWER.items()}
    none = dict.fromkeys(itertools.chain(*NEWER.values()))
    found = names(
        {
            "sglang.kernels.ops.attention.linear.fused_gdn_gating": ("fused_gdn_gating",),
            "sglang.kernels.ops.attention.triton_gdn_fused_proj": ("fused_qkv_split_gdn_prefill",),
            "sglang.kernels.ops.mamba.causal_conv1d_triton": ("causal_conv1d_fn", "causal_conv1d_update"),
            _SCATTER: ("_fused_mamba_state_scatter_with_mask_kernel", "fused_mamba_state_scatter_with_mask", *newer[_SCATTER]),
            "sglang.srt.configs.mamba_utils": ("Mamba2CacheParams", "Mamba2StateDType", "Mamba2StateShape"),
            "sglang.srt.layers.attention.linear.kernels.gdn_triton": ("TritonGDNKernel",),
            **({_PLAN: newer[_PLAN]} if newer[_PLAN] else {}),
            "sglang.srt.mem_cache.allocator.mamba": ("MambaSlotAllocator",),
            "sglang.srt.mem_cache.memory_pool": ("MambaPool",),
        }
    )
    return types.SimpleNamespace(**{**none, **vars(found)})


class _OfCuda(TorchFunctionMode):
    """Puts on the CPU what is to be made on "cuda": before 0.5.21, `MambaPool` names it for the buffers of drafts."""

    def __torch_function__(self, function: Any, kinds: Any, arguments: Any = (), words: Any = None) -> Any:
        words = dict(words or {})
        if words.get("device") == "cuda":
            words["device"] = "cpu"
        return function(*arguments, **words)


class MambaEngine(Engine):
    """One layer of SGLang's hybrid models on its `MambaPool`. Slot 0 is the dummy to which padding rows may write."""

    unowned = (0,)

    def __init__(self, sizes: Sizes) -> None:
        library, device = sglang(), sizes.weight.device
        self.sizes, self.device = sizes, device
        shape = library.Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=sizes.value_heads * sizes.value_dim,
            n_groups=sizes.heads,
            num_heads=sizes.value_heads,
            head_dim=sizes.value_dim,
            state_size=sizes.key_dim,
            conv_kernel=sizes.width,
        )
        dtypes = library.Mamba2StateDType(conv=sizes.dtype, temporal=sizes.state_dtype)
        with _OfCuda() if device.type == "cpu" else contextlib.nullcontext():
            self.pool = library.MambaPool(
                size=sizes.slots,
                spec_state_size=sizes.slots + PADDING_ROWS,
                cache_params=library.Mamba2CacheParams(shape=shape, layers=[0], dtype=dtypes),
                mamba_layer_ids=[0],
                device=str(device),
                speculative_num_draft_tokens=sizes.drafts,
            )
        self.allocator = library.MambaSlotAllocator(sizes.slots, str(device))
        self.kernel = library.TritonGDNKernel()
        self.cache = self.pool.mamba2_layer_cache(0)
        self.states, self.windows = self.cache.temporal.mT, self.cache.conv[0]
        self.owned: dict[str, int] = {}
        self.rows: Tensor | None = None  # the indices of the last drafts

    def slots(self) -> Mapping[str, int]:
        return self.owned

    def take(self) -> Tensor:
        """Take a slot [1] from the allocator. RuntimeError if it has none."""
        slot: Tensor | None = self.allocator.alloc(1)
        if slot is None:
            raise RuntimeError("the allocator has no slot left")
        return slot

    def admit(self, requests: Sequence[str]) -> None:
        # HybridReqToTokenPool.alloc takes the slots, and the forward stream clears them before the first forward.
        slots = [self.take() for _ in requests]
        self.pool.clear_slots(torch.cat(slots))
        self.owned |= {request: int(slot) for request, slot in zip(requests, slots, strict=True)}

    def free(self, request: str) -> None:
        freed = [self.owned.pop(name) for name in (request, f"{request}@") if name in self.owned]
        self.allocator.free(torch.tensor(freed, dtype=torch.int64, device=self.device))

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        source = torch.tensor([self.owned[f"{old}@" if snapshot else old]], device=self.device)
        slot = self.take()
        self.pool.copy_from(source, slot)
        self.owned[new] = int(slot)

    def swap(self, request: str) -> None:
        slot = torch.tensor([self.owned.pop(request)], device=self.device)
        copy = self.pool.get_cpu_copy(slot)
        self.allocator.free(slot)
        slot = self.take()
        self.pool.load_cpu_copy(copy, slot)
        self.owned[request] = int(slot)

    def indices(self, batch: Batch) -> Tensor:
        """Return the pool's index of each row, as `mamba_cache_indices` has them."""
        slots = [self.owned[request] if request != PADDING else self.sizes.padding_slot for request in batch.requests]
        return torch.tensor(slots, dtype=torch.int32, device=self.device)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the gate."""
        return {"A_log": self.sizes.A_log, "dt_bias": self.sizes.dt_bias}

    def decode(self, batch: Batch) -> Tensor:
        """`GDNAttnBackend.forward_decode` with a kernel that has packed decode, and `_track_mamba_state_decode`."""
        sizes, indices = self.sizes, self.indices(batch)
        mixed = sglang().causal_conv1d_update(
            batch.mixed, self.cache.conv[0], sizes.weight, None, "silu", conv_state_indices=indices
        )
        o: Tensor = self.kernel.packed_decode(
            mixed_qkv=mixed,
            a=batch.a,
            b=batch.b,
            **self.parameters(),
            scale=sizes.key_dim**-0.5,
            ssm_states=self.cache.temporal,
            cache_indices=indices,
            num_v_heads=sizes.value_heads,
            head_v_dim=sizes.value_dim,
        )
        mask = [count is not None for count in batch.snapshots]
        if any(mask):
            tracked, targets = torch.tensor(mask, device=self.device), self.snapshot_slots(batch)
            pools = self.cache.conv[0], self.cache.temporal
            sglang().track_mamba_states_if_needed(*pools, indices, tracked, targets, len(mask))
        return o[0]

    def prefill(self, batch: Batch) -> Tensor:
        """`GDNAttnBackend.forward_extend` without drafts, with the snapshots of `_init_track_ssm_indices_from_cpu`."""
        sizes, indices, library = self.sizes, self.indices(batch), sglang()
        starts = self.starts(batch.lengths)
        prefix = torch.tensor(batch.starts, dtype=torch.int32, device=self.device)
        mask = [count is not None for count in batch.snapshots]
        targets = self.snapshot_slots(batch)
        mixed = batch.mixed
        if any(mask):
            # _init_track_conv_indices: the window ends where the last whole chunk of the row ends.
            aligned = torch.tensor([length // CHUNK * CHUNK for length in batch.lengths], device=self.device)
            columns = sizes.width - 1
            first = (starts[:-1] + aligned - columns)[torch.tensor(mask, device=self.device)]
            place = (first.unsqueeze(-1) + torch.arange(columns, device=self.device)).clamp(0, len(mixed) - 1)
            self.cache.conv[0][targets[torch.tensor(mask, device=self.device)]] = mixed[place].transpose(1, 2)
        mixed = library.causal_conv1d_fn(
            mixed.transpose(0, 1),
            sizes.weight,
            None,
            activation="silu",
            conv_states=self.cache.conv[0],
            has_initial_state=prefix > 0,
            cache_indices=indices,
            query_start_loc=starts,
            seq_lens_cpu=list(batch.lengths),
        ).transpose(0, 1)[: len(batch.mixed)]
        q, k, v = self.split(mixed)
        g, beta = library.fused_gdn_gating(sizes.A_log, batch.a, batch.b, sizes.dt_bias)
        o, _, h = self.kernel.extend(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            ssm_states=self.cache.temporal,
            cache_indices=indices,
            query_start_loc=starts,
        )
        if any(mask):
            self.track(batch, mask, indices, targets, h)
        return o[0]  # type: ignore[no-any-return]

    def snapshot_slots(self, batch: Batch) -> Tensor:
        """Return the slot of each row's snapshot; a request that has none gets one."""
        for request, count in zip(batch.requests, batch.snapshots, strict=True):
            if count is not None and f"{request}@" not in self.owned:
                self.owned[f"{request}@"] = int(self.take())
        return torch.tensor([self.owned.get(f"{request}@", 0) for request in batch.requests], device=self.device)

    def track(self, batch: Batch, mask: list[bool], indices: Tensor, targets: Tensor, h: Tensor) -> None:
        """`_track_mamba_state_extend`: from the chunks' states h where the end is not aligned, otherwise from the final state."""
        ends = [start + length for start, length in zip(batch.starts, batch.lengths, strict=True)]
        plan = sglang().build_prefill_track_plan(mask, ends, list(batch.lengths), list(batch.starts), CHUNK, mamba2=False)
        states = self.cache.temporal
        if plan.h_src:
            states[targets[plan.h_rows]] = h.squeeze(0)[plan.h_src].to(states.dtype, copy=False)
        if plan.final_rows:
            states[targets[plan.final_rows]] = states[indices[plan.final_rows].long()]

    def verify(self, batch: Batch) -> Tensor:
        """`GDNAttnBackend.forward_extend` for drafts in a chain, of which the target model verifies each token."""
        sizes, count, drafts = self.sizes, len(batch.requests), batch.lengths[0]
        self.rows = self.indices(batch)
        scratch = torch.arange(count, dtype=torch.int32, device=self.device)
        mixed = sglang().causal_conv1d_update(
            batch.mixed.view(count, drafts, -1).transpose(1, 2),
            self.cache.conv[0],
            sizes.weight,
            None,
            "silu",
            conv_state_indices=self.rows,
            intermediate_conv_window=self.cache.intermediate_conv_window[0],
            intermediate_state_indices=scratch,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_parent_token=None,
        )
        q, k, v = self.split(mixed.transpose(1, 2).reshape(count * drafts, -1))
        o: Tensor = self.kernel.target_verify(
            **self.parameters(),
            q=q,
            k=k,
            v=v,
            a=batch.a,
            b=batch.b,
            ssm_states=self.cache.temporal,
            cache_indices=self.rows,
            query_start_loc=self.starts(batch.lengths),
            intermediate_states_buffer=self.cache.intermediate_ssm,
            intermediate_state_indices=scratch,
            cache_steps=drafts,
            retrieve_parent_token=None,
        )
        return o.reshape(-1, *o.shape[2:])

    def commit(self, accepted: Sequence[int]) -> None:
        """`HybridLinearAttnBackend.update_mamba_state_after_mtp_verify`, where padding rows have the step -1."""
        assert self.rows is not None, "commit comes after verify"
        steps = torch.tensor([count - 1 for count in accepted], dtype=torch.int32, device=self.device)
        caches = self.pool.get_speculative_mamba2_params_all_layers()
        library = sglang()
        of_states = library._fused_mamba_state_scatter_with_mask_kernel
        of_windows = library._fused_conv_window_scatter_with_mask_kernel
        states, windows = (caches.temporal, caches.intermediate_ssm), (caches.conv[0], caches.intermediate_conv_window[0])
        if self.device.type != "cpu":
            if library.scatter_mamba_states_after_mtp_verify is not None:
                library.scatter_mamba_states_after_mtp_verify(caches, self.rows, steps, None, None)
                return
            for target, buffer in (states, windows):
                library.fused_mamba_state_scatter_with_mask(target, buffer, self.rows, steps)
            return
        # The wrappers refuse tensors of a CPU; their kernels do not. The arguments are those of the wrappers.
        source = () if library._prepare_src_rows is None else (library._prepare_src_rows(None, steps),)
        for (target, buffer), kernel, inner in (
            (states, of_states, ()),
            (windows, of_windows or of_states, (3, 4) if of_windows else ()),
        ):
            numbers = target[0, 0].numel()
            sizes: list[Any] = [numbers, *([target.shape[3]] if inner else [])]
            kernel[(len(steps), 1, -(-numbers // _BLOCK))](
                buffer,
                target,
                self.rows,
                steps,
                *source,
                *sizes,
                *(buffer.stride(axis) for axis in (0, 1, 2, *inner)),
                *(target.stride(axis) for axis in (0, 1)),
                *(buffer.shape[1], buffer.shape[2], target.shape[1]),
                BLOCK_SIZE=_BLOCK,
            )

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k [1, T, H, K] and v [1, T, HV, V]."""
        sizes = self.sizes
        heads = sizes.heads, sizes.heads, sizes.value_heads
        q, k, v = sglang().fused_qkv_split_gdn_prefill(mixed, *heads, sizes.key_dim, sizes.key_dim, sizes.value_dim)
        return q, k, v

    def starts(self, lengths: Sequence[int]) -> Tensor:
        """Return `query_start_loc` [rows + 1]."""
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device)


class Pool(TraceAdapter):
    """`MambaEngine`. Prefill runs its chunk kernels, whose chunk states h are rounded to the inputs' dtype."""

    algorithm = "chunkwise"
    products = "tf32"
    chunk = CHUNK
    requires: ClassVar[dict[str, str]] = {"sglang": "0.5.13"}
    domain = TraceDomain(
        events=("prefill", "decode", "save", "verify", "fork", "swap", "preempt", "free"),
        dtypes=("bf16",),
        ragged=False,  # `verify` views the tokens as [rows, drafts]
        none_accepted=False,  # the token before a draft is verified with it, and always stays
        empty=False,  # prepare_chunk_indices counts no sequence of no tokens, so later chunks would belong to an earlier row
        block=0,  # a request has one slot, however many tokens it has
        snapshots=(0, CHUNK),
        alignments=("row",),  # chunks begin with a row
        snapshot_dtype="input",
        indices=("int32",),
        most_padding=PADDING_ROWS,
    )

    def __init__(self) -> None:
        lacks: dict[str, Any] = {"prefill_padding": False} if strays() else {}
        if has_text(_SCATTER, "def") and not has_text(_PLAN, "def build_prefill_track_plan("):
            lacks |= {"snapshots": (0,), "events": tuple(event for event in self.domain.events if event != "save")}
        self.domain = dataclasses.replace(self.domain, **lacks)

    def bring(self) -> None:
        sglang()

    def open(self, sizes: Sizes) -> Engine:
        return MambaEngine(sizes)
