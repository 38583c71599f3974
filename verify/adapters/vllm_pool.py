"""vLLM's GDN serving, driven event by event: its pool of blocks, its metadata builder and the core of its layer.

The calls and their order are those of vLLM 0.33.0 with model runner V1 and `mamba_cache_mode="none"`. `_prepare_inputs`,
`_build_attention_metadata` and `_update_states_after_model_execute` are in vllm/v1/worker/gpu_model_runner.py. They decide what the
builder gets: the order of rows, which rows are drafts, and how many tokens were accepted before. From there on the code is vLLM's
own: `reorder_batch_to_split_decodes_and_prefills`, `GDNAttentionMetadataBuilder.build` in vllm/v1/attention/backends/gdn_attn.py,
`QwenGatedDeltaNetAttention._forward_core` in vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, and `BlockPool`.

A request has a block for each token of a draft. The state after token t of a draft is in the block t of its table. The window
before the draft, with the draft's inputs behind it, is in the first block. The next step begins at the last accepted token.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from properties.traces.events import PADDING
from verify.adapters.base import Engine, TraceAdapter
from verify.adapters.serving import module, names

CHUNK = 64  # of the chunk kernels
PADDING_ROWS = 8  # rows of a batch beside those of requests, for which a graph has room
_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_ALIGNED = 16  # bytes; a block's state begins at a multiple of so many
NULL = 0  # vLLM's null block


@functools.cache
def vllm() -> types.SimpleNamespace:
    """Return the names that the engine uses. ImportError, in one line, says what is missing."""
    return names(
        {
            "vllm.model_executor.layers.mamba.mamba_utils": ("MambaStateShapeCalculator", "is_conv_state_dim_first"),
            "vllm.third_party.flash_linear_attention.ops": ("chunk_gated_delta_rule",),
            "vllm.v1.attention.backend": ("CommonAttentionMetadata",),
            "vllm.v1.attention.backends.gdn_attn": ("GDNAttentionMetadataBuilder",),
            "vllm.v1.attention.backends.utils": ("reorder_batch_to_split_decodes_and_prefills",),
            "vllm.v1.core.block_pool": ("BlockPool",),
            "vllm.v1.kv_cache_interface": ("MambaSpec",),
            _LAYER: ("QwenGatedDeltaNetAttention",),
        }
    )


class Rows:
    """The rows of a batch as vLLM's reordering takes them: its `InputBatch` has these four attributes and this method."""

    def __init__(self, batch: Batch, prompts: Mapping[str, int]) -> None:
        self.batch = batch
        self.places = [place for place, real in enumerate(batch.real) if real]
        # A prompt of which no end is known goes on at least to the end of its row.
        ends = [prompts.get(batch.requests[place], batch.starts[place] + batch.lengths[place]) for place in self.places]
        self.num_prompt_tokens = torch.tensor(ends, dtype=torch.int32, device="cpu").numpy()
        self.num_computed_tokens_cpu = torch.tensor(
            [batch.starts[place] for place in self.places], dtype=torch.int32, device="cpu"
        ).numpy()

    @property
    def req_ids(self) -> list[str]:
        """The requests in their order."""
        return [self.batch.requests[place] for place in self.places]

    @property
    def counts(self) -> list[int]:
        """The tokens of each row."""
        return [self.batch.lengths[place] for place in self.places]

    def swap_states(self, one: int, other: int) -> None:
        """Let two rows change places."""
        pair, swapped = [one, other], [other, one]
        self.places[one], self.places[other] = self.places[other], self.places[one]
        for numbers in (self.num_prompt_tokens, self.num_computed_tokens_cpu):
            numbers[pair] = numbers[swapped]


class BlockEngine(Engine):
    """One GDN layer of vLLM on blocks of its `BlockPool`. Block 0 is the null block of padding rows."""

    unowned = (NULL,)

    def __init__(self, sizes: Sizes) -> None:
        library, self.sizes, self.device = vllm(), sizes, sizes.weight.device
        self.drafts = sizes.drafts - 1  # vLLM does not count the last accepted token, which is verified with them
        count = 1 + sizes.slots * (1 + self.drafts)
        self.blocks = library.BlockPool(count, enable_caching=False, hash_block_size=CHUNK)
        shapes = library.MambaStateShapeCalculator.gated_delta_net_state_shape(
            1, sizes.heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.width, self.drafts
        )
        dtypes = sizes.dtype, sizes.state_dtype
        self.cache = self.pages(count, shapes, dtypes)
        window = self.cache[0] if library.is_conv_state_dim_first() else self.cache[0].mT
        self.states, self.windows = self.cache[1].mT, window
        self.tables: dict[str, list[Any]] = {}
        self.accepted: dict[str, int] = {}  # tokens of the step before
        self.prompts: dict[str, int] = {}  # tokens of the prompts of requests that have decoded, also after a preemption
        self.drafted: tuple[str, ...] = ()  # the rows of the last drafts
        spec = library.MambaSpec(block_size=1 << 20, shapes=shapes, dtypes=dtypes, num_speculative_blocks=self.drafts)
        self.builder = library.GDNAttentionMetadataBuilder(spec, ["layer"], self.configuration(), self.device)
        self.layer = self.core(sizes)

    def pages(self, count: int, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, Tensor]:
        """Return the windows and the states of all blocks; as in `_reshape_kv_cache_tensors`, a block's two lie side by side."""
        lengths = [
            -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        memory = torch.zeros(count, sum(lengths), dtype=torch.int8, device=self.device)
        windows, states = memory.split(lengths, 1)
        parts = zip((windows, states), shapes, dtypes, strict=True)
        window, state = (
            part[:, : torch.Size(shape).numel() * dtype.itemsize].view(dtype).unflatten(1, shape) for part, shape, dtype in parts
        )
        return window, state

    def configuration(self) -> types.SimpleNamespace:
        """Return those parts of vLLM's configuration that the builder reads. Decodes run in a graph, as by default on a GPU."""
        sizes, space = self.sizes, types.SimpleNamespace
        model = space(linear_key_head_dim=sizes.key_dim, linear_value_head_dim=sizes.value_dim)
        drafts = space(num_speculative_tokens=self.drafts, parallel_drafting=False, use_eagle_block_drop=lambda: False)
        return space(
            compilation_config=space(cudagraph_mode=space(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=None),
            speculative_config=drafts if self.drafts else None,
            additional_config={"gdn_prefill_backend": "triton"},
            model_config=space(hf_text_config=model, dtype=sizes.dtype),
            scheduler_config=space(max_num_seqs=sizes.slots + PADDING_ROWS),
            cache_config=space(mamba_cache_mode="none"),
            parallel_config=space(decode_context_parallel_size=1),
            use_v2_model_runner=False,
            num_hash_lookahead_tokens=0,
        )

    def core(self, sizes: Sizes) -> types.SimpleNamespace:
        """Return what `_forward_core` reads of its layer, with its methods."""
        kind = vllm().QwenGatedDeltaNetAttention
        layer = types.SimpleNamespace(
            prefix="layer",
            enable_packed_recurrent_decode=True,
            conv1d=types.SimpleNamespace(weight=sizes.weight.unsqueeze(1), bias=None),
            activation="silu",
            A_log=sizes.A_log,
            dt_bias=sizes.dt_bias,
            num_k_heads=sizes.heads,
            num_v_heads=sizes.value_heads,
            tp_size=1,
            head_k_dim=sizes.key_dim,
            head_v_dim=sizes.value_dim,
            key_dim=sizes.heads * sizes.key_dim,
            value_dim=sizes.value_heads * sizes.value_dim,
            kv_cache=self.cache,
            # As in ChunkGatedDeltaRule.forward_native.
            chunk_gated_delta_rule=lambda aiter_prefill_metadata=None, **words: vllm().chunk_gated_delta_rule(**words),
        )
        for name in ("rearrange_mixed_qkv", "_forward_core_decode_non_spec"):
            setattr(layer, name, types.MethodType(inspect.unwrap(getattr(kind, name)), layer))
        return layer

    def forward(self, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, o: Tensor) -> None:
        """Call `_forward_core`, whose forward context has this metadata."""
        code = inspect.unwrap(vllm().QwenGatedDeltaNetAttention._forward_core)
        context = types.SimpleNamespace(attn_metadata={"layer": metadata})
        places = {**vars(module(_LAYER)), "get_forward_context": lambda: context}
        types.FunctionType(code.__code__, places)(self.layer, mixed, b, a, o)

    def slots(self) -> Mapping[str, int]:
        return {request: table[0].block_id for request, table in self.tables.items()}

    def scratch(self) -> Sequence[int]:
        return [block.block_id for table in self.tables.values() for block in table[1:]]

    def contents(self, owner: str) -> tuple[Tensor, Tensor]:
        """As the next step reads it: `fused_sigmoid_gating_delta_rule_update` and `causal_conv1d_update` with accepted tokens."""
        table, first = self.tables[owner], self.accepted[owner] - 1
        columns = slice(first, first + self.sizes.width - 1)
        return self.states[table[first].block_id], self.windows[table[0].block_id][:, columns]

    def admit(self, requests: Sequence[str]) -> None:
        # MambaManager.allocate_new_blocks takes one block, and one for each draft. Nothing clears them: a request begins without an
        # initial state. InputBatch.add_request sets the accepted tokens to 1.
        for request in requests:
            self.tables[request] = self.blocks.get_new_blocks(1 + self.drafts)
            self.accepted[request] = 1

    def free(self, request: str) -> None:
        # SingleTypeKVCacheManager.free gives the last block back first.
        self.blocks.free_blocks(reversed(self.tables.pop(request)))
        del self.accepted[request]
        self.prompts.pop(request, None)

    def preempt(self, request: str) -> None:
        """`Scheduler._preempt_request`: the blocks are freed, and the prompt is no longer than it was."""
        prompt = self.prompts.get(request)
        self.free(request)
        if prompt is not None:
            self.prompts[request] = prompt

    def prefill(self, batch: Batch) -> Tensor:
        return self.step(batch)

    def decode(self, batch: Batch) -> Tensor:
        self.end_prompts(batch)
        return self.step(batch)

    def verify(self, batch: Batch) -> Tensor:
        self.end_prompts(batch)
        self.drafted = batch.requests
        return self.step(batch, drafts=True)

    def end_prompts(self, batch: Batch) -> None:
        """Note that the prompts of a batch have ended. A trace may decode before the prompt of a preempted request is complete."""
        for request, start in zip(batch.requests, batch.starts, strict=True):
            if request != PADDING:
                self.prompts[request] = min(self.prompts.get(request, start), start)

    def commit(self, accepted: Sequence[int]) -> None:
        """`_update_states_after_model_execute`: the counts are kept, and the next step reads at them."""
        for request, count in zip(self.drafted, accepted, strict=True):
            if request != PADDING:
                self.accepted[request] = count

    def step(self, batch: Batch, *, drafts: bool = False) -> Tensor:
        """`execute_model` for the rows of a batch in vLLM's order: decodes, parts of prompts, new prompts, padding rows."""
        rows = Rows(batch, self.prompts)
        scheduled = types.SimpleNamespace(num_scheduled_tokens=dict(zip(rows.req_ids, rows.counts, strict=True)))
        vllm().reorder_batch_to_split_decodes_and_prefills(rows, scheduled, self.builder.reorder_batch_threshold)
        padding = [place for place, real in enumerate(batch.real) if not real]
        places = [*rows.places, *padding]
        spans = list(itertools.pairwise([0, *itertools.accumulate(batch.lengths)]))
        tokens = torch.tensor([token for place in places for token in range(*spans[place])], device=self.device)
        metadata = self.metadata(rows, len(padding), len(tokens), drafts=drafts)
        mixed, a, b = (x[tokens] for x in (batch.mixed, batch.a, batch.b))
        o = torch.zeros(len(tokens), self.sizes.value_heads, self.sizes.value_dim, dtype=self.sizes.dtype, device=self.device)
        self.forward(metadata, mixed, b, a, o)
        for request in rows.req_ids:
            self.accepted[request] = 1
        return o[tokens.argsort()]

    def metadata(self, rows: Rows, padding: int, tokens: int, *, drafts: bool) -> Any:
        """Build the metadata as `_prepare_inputs` and `_build_attention_metadata` do. Padding rows have no tokens there."""
        count, counts = len(rows.places), rows.counts
        starts = self.tensor([0, *itertools.accumulate([*counts, *[0] * padding])])
        computed = [int(number) for number in rows.num_computed_tokens_cpu]
        ends = self.tensor([*(start + length for start, length in zip(computed, counts, strict=True)), *[0] * padding])
        prefilling = self.prefilling(rows)
        common = vllm().CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=ends,
            num_reqs=count + padding,
            num_actual_tokens=tokens,
            max_query_len=max(counts),
            max_seq_len=int(ends.max()),
            block_table_tensor=self.tensor(self.table(rows, padding)),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=self.device),
            seq_lens_cpu_upper_bound=ends.cpu(),
            is_prefilling=torch.tensor([*prefilling, *[False] * padding], device="cpu"),
        )
        if not self.drafts:
            return self.builder.build(0, common)
        accepted = [self.accepted[request] for request in rows.req_ids]
        lengths = [*self.draft_lengths(prefilling, counts, drafts=drafts), *[-1] * padding]
        return self.builder.build(
            0,
            common,
            num_accepted_tokens=self.tensor([*accepted, *[1] * padding]),
            num_decode_draft_tokens_cpu=torch.tensor(lengths, dtype=torch.int32, device="cpu"),
        )

    def prefilling(self, rows: Rows) -> list[bool]:
        """Return for each row whether its request still has tokens of its prompt to come."""
        answer: list[bool] = (rows.num_computed_tokens_cpu < rows.num_prompt_tokens).tolist()
        return answer

    def table(self, rows: Rows, padding: int) -> list[list[int]]:
        """Return the blocks of each row; those of padding rows are the null block."""
        table = [[block.block_id for block in self.tables[request]] for request in rows.req_ids]
        return table + [[NULL] * (1 + self.drafts)] * padding

    def draft_lengths(self, prefilling: Sequence[bool], counts: Sequence[int], *, drafts: bool) -> list[int]:
        """Return the tokens of each row's draft, -1 for a part of a prompt.

        A decode is a draft of no tokens, because only the way of drafts begins at the last accepted token.
        """
        if drafts:
            return [count - 1 for count in counts]
        return [-1 if more or count > 1 else 0 for more, count in zip(prefilling, counts, strict=True)]

    def tensor(self, numbers: Sequence[Any]) -> Tensor:
        """Return whole numbers on the device."""
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


class Pool(TraceAdapter):
    """`BlockEngine`. The order of rows and the ways through the layer are vLLM's; forks and swaps of blocks are not driven."""

    algorithm = "chunkwise"
    products = "tf32"
    chunk = CHUNK
    requires: ClassVar[dict[str, str]] = {"vllm": "0.22.1"}
    domain = TraceDomain(
        events=("prefill", "decode", "verify", "preempt", "free"),
        dtypes=("bf16", "fp16"),
        key_dims=(16, 128),  # compiled, tl.dot has at least 16 keys and blocks of 16 values
        value_dims=(9, 128),
        none_accepted=False,  # the token before a draft is verified with it, and always stays
        padding_slots=("0",),
        prefill_padding=False,  # vLLM pads rows in graphs of decodes and of drafts alone
        empty=False,  # a request without tokens has no row
        block=0,  # with mamba_cache_mode="none", blocks are drafts' and not tokens'
        snapshots=(0,),
        indices=("int32",),
        most_padding=PADDING_ROWS,
        later_prompts=False,  # the way of prompts does not begin at the last accepted token
        batch_invariant=False,  # beside a prompt, a decode takes other kernels
    )

    def bring(self) -> None:
        vllm()

    def open(self, sizes: Sizes) -> Engine:
        return BlockEngine(sizes)
