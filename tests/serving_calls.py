"""What the tests of serving libraries do in a worker process: import their modules, and call their kernels on tiny inputs."""

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from oracles.decode import DECODE
from oracles.operation import Inputs
from oracles.tolerance.bound import truth
from verify.adapters import serving, stubs
from verify.adapters.libraries import LIBRARIES
from verify.adapters.packages import installed

N, P, H, HV, K, V, W = 3, 5, 1, 2, 16, 8, 4  # requests, slots, heads, value heads, channels, width of the convolution
SLOTS = [4, 2, 1]


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Import the modules that a question names, or make the call that it names."""
    try:
        if "call" in question:
            return CALLS[question["call"]]()
        modules = [serving.module(name) for name in question["modules"]]
        release = installed(LIBRARIES[question["modules"][0].partition(".")[0]].distribution)
        return {"files": [module.__file__ for module in modules], "release": release, "words": sys.orig_argv}
    except ImportError as error:
        return {"error": str(error)}


def decode_inputs() -> dict[str, Tensor]:
    """One token for each of N requests, whose states are in a pool [P, HV, V, K], and gates before their activations."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": (N, H, K), "k": (N, H, K), "v": (N, HV, V), "a": (N, HV), "b": (N, HV), "A_log": (HV,), "dt_bias": (HV,)}
    inputs = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return inputs | {"pool": torch.randn(P, HV, V, K, generator=generator), "slots": torch.tensor(SLOTS, dtype=torch.int32)}


def compared(o: Tensor, pool: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The largest errors of a call, and how far it is from the rule without a decay."""
    g = -inputs["A_log"].double().exp() * torch.nn.functional.softplus(inputs["a"].double() + inputs["dt_bias"].double())
    call = Inputs(
        **{name: inputs[name].unsqueeze(1) for name in ("q", "k", "v")},
        g=g.float().unsqueeze(1),
        beta=inputs["b"].sigmoid().unsqueeze(1),
        pool=inputs["pool"].transpose(-1, -2).contiguous(),
        slots=inputs["slots"],
        padding=-1,
        scale=None,
        qk_norm=True,
    )
    want, without = truth(DECODE, call), truth(DECODE, call.replaced(g=torch.zeros_like(call.g)))
    o, pool = o.reshape(N, HV, V), pool.transpose(-1, -2)
    return {
        "o": float((o - want["o"][:, 0]).abs().max()),
        "pool": float((pool - want["pool"]).abs().max()),
        "o_without_decay": float((o - without["o"][:, 0]).abs().max()),
        "pool_without_decay": float((pool - without["pool"]).abs().max()),
    }


def sglang_update() -> dict[str, Any]:
    update = serving.names(
        {"sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent": ("fused_sigmoid_gating_delta_rule_update",)}
    ).fused_sigmoid_gating_delta_rule_update
    inputs = decode_inputs()
    pool = inputs["pool"].clone()
    o = update(
        **{name: inputs[name] for name in ("A_log", "a", "dt_bias", "b")},
        **{name: inputs[name].unsqueeze(0) for name in ("q", "k", "v")},
        softplus_beta=1.0,
        softplus_threshold=20.0,
        initial_state_source=pool,
        initial_state_indices=inputs["slots"],
        scale=K**-0.5,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(N + 1, dtype=torch.int32),
    )
    return compared(o, pool, inputs)


def vllm_update() -> dict[str, Any]:
    update = serving.module("vllm.third_party.flash_linear_attention.ops").fused_sigmoid_gating_delta_rule_update
    inputs = decode_inputs()
    pool = inputs["pool"].clone()
    o, _ = update(
        **{name: inputs[name] for name in ("A_log", "a", "dt_bias", "b")},
        **{name: inputs[name].unsqueeze(0) for name in ("q", "k", "v")},
        initial_state=pool,
        inplace_final_state=True,
        cu_seqlens=torch.arange(N + 1, dtype=torch.int32),
        ssm_state_indices=inputs["slots"],
        use_qk_l2norm_in_kernel=True,
    )
    return compared(o, pool, inputs)


def sglang_pool() -> dict[str, Any]:
    """SGLang's own pool: a slot is cleared, copied, and swapped out and in to another slot."""
    found = serving.names(
        {
            "sglang.srt.mem_cache.memory_pool": ("MambaPool",),
            "sglang.srt.mem_cache.allocator.mamba": ("MambaSlotAllocator",),
            "sglang.srt.configs.mamba_utils": ("Mamba2CacheParams", "Mamba2StateShape"),
        }
    )
    shape = found.Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=HV * V, n_groups=H, num_heads=HV, head_dim=V, state_size=K, conv_kernel=W
    )
    pool = found.MambaPool(
        size=4,
        spec_state_size=4,
        cache_params=found.Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        device="cpu",
        speculative_num_draft_tokens=2,
    )
    slots = found.MambaSlotAllocator(4, device="cpu").alloc(4)
    state = pool.mamba_cache.temporal.normal_()
    first, second, third, last = (slot.unsqueeze(0) for slot in slots)
    pool.clear_slots(second)
    pool.copy_from(first, third)
    pool.load_cpu_copy(pool.get_cpu_copy(third), last)
    return {
        "slots": slots.tolist(),
        "shape": [*state.shape],
        "cleared": not state[:, second].any(),
        "copied": torch.equal(state[:, first], state[:, last]) and bool(state[:, first].any()),
    }


def vllm_core() -> dict[str, Any]:
    """vLLM's metadata builder and the core of its layer: a prompt of three tokens at once, and token by token."""
    backend = serving.module("vllm.v1.attention.backends.gdn_attn")
    layers = serving.module("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn")
    kernels = serving.module("vllm.third_party.flash_linear_attention.ops")
    width = 2 * H * K + HV * V
    builder = backend.GDNAttentionMetadataBuilder(
        serving.module("vllm.v1.kv_cache_interface").MambaSpec(
            block_size=16, shapes=((width, W - 1), (HV, V, K)), dtypes=(torch.bfloat16, torch.float32)
        ),
        ["layer"],
        _vllm_config(),
        torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(7)
    hidden, b, a, weight = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, width), (3, HV), (3, HV), (width, 1, W))
    )
    kind = layers.QwenGatedDeltaNetAttention
    layer = types.SimpleNamespace(
        prefix="layer",
        enable_packed_recurrent_decode=True,
        conv1d=types.SimpleNamespace(weight=weight, bias=None),
        activation="silu",
        A_log=torch.randn(HV, generator=generator),
        dt_bias=torch.randn(HV, generator=generator),
        num_k_heads=H,
        num_v_heads=HV,
        tp_size=1,
        head_k_dim=K,
        head_v_dim=V,
        key_dim=H * K,
        value_dim=HV * V,
        chunk_gated_delta_rule=lambda aiter_prefill_metadata, **words: kernels.chunk_gated_delta_rule(**words),
    )
    for method in ("rearrange_mixed_qkv", "_forward_core_decode_non_spec"):
        setattr(layer, method, types.MethodType(getattr(kind, method), layer))

    def run(steps: list[list[int]]) -> tuple[Tensor, Tensor, list[int]]:
        layer.kv_cache = (torch.zeros(P, W - 1, width, dtype=torch.bfloat16), torch.zeros(P, HV, V, K))
        o, prefills = torch.zeros(3, HV, V, dtype=torch.bfloat16), []
        for rows in steps:
            metadata = builder.build(0, _vllm_batch(len(rows), rows[0]))
            prefills.append(metadata.num_prefills)
            layers.get_forward_context = lambda metadata=metadata: types.SimpleNamespace(attn_metadata={"layer": metadata})
            out = torch.zeros(len(rows), HV, V, dtype=torch.bfloat16)
            kind._forward_core(layer, hidden[rows].clone(), b[rows], a[rows], out)
            o[rows] = out
        return o.float(), layer.kv_cache[1], prefills

    (o, pool, prefills), (o_one, pool_one, prefills_one) = run([[0, 1, 2]]), run([[0], [1], [2]])
    return {
        "prefills": [*prefills, *prefills_one],
        "backend": builder.gdn_prefill_backend,
        "error": max(float((o - o_one).abs().max()), float((pool - pool_one).abs().max())),
        "size": float(o.abs().max()),
        "written": [slot for slot in range(P) if pool[slot].any()],
    }


def _vllm_config() -> types.SimpleNamespace:
    space = types.SimpleNamespace
    return space(
        compilation_config=space(cudagraph_mode=space(has_full_cudagraphs=lambda: False), max_cudagraph_capture_size=None),
        speculative_config=None,
        additional_config={},
        model_config=space(hf_text_config=space(linear_key_head_dim=K, linear_value_head_dim=V), dtype=torch.bfloat16),
        scheduler_config=space(max_num_seqs=4),
        cache_config=space(mamba_cache_mode="none"),
        parallel_config=space(decode_context_parallel_size=1),
        use_v2_model_runner=False,
        num_hash_lookahead_tokens=0,
    )


def _vllm_batch(tokens: int, done: int) -> Any:
    """A batch with one request in block 2, which has `tokens` tokens after `done` others."""
    starts, length = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens + done], dtype=torch.int32)
    return serving.module("vllm.v1.attention.backend").CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=length,
        num_reqs=1,
        num_actual_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens + done,
        block_table_tensor=torch.tensor([[2]], dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        seq_lens_cpu_upper_bound=length,
        is_prefilling=torch.tensor([done == 0]),
    )


def flashinfer_reference() -> dict[str, Any]:
    """FlashInfer's torch reference of decoding, whose outputs are bfloat16."""
    reference = serving.module("flashinfer.trace.templates.gdn")._gdn_decode_reference
    inputs = decode_inputs()
    states = inputs["pool"][inputs["slots"].long()]
    o, final = reference(
        *(torch.nn.functional.normalize(inputs[name], dim=-1).unsqueeze(1) for name in ("q", "k")),
        inputs["v"].unsqueeze(1),
        states,
        inputs["A_log"],
        inputs["a"].unsqueeze(1),
        inputs["dt_bias"],
        inputs["b"].unsqueeze(1),
        K**-0.5,
    )
    pool = inputs["pool"].index_copy(0, inputs["slots"].long(), final)
    return compared(o.float(), pool, inputs)


def platforms() -> dict[str, Any]:
    """What the libraries' platforms answer on this host, and as if torch saw a GPU of compute capability 9.0."""
    serving.module("sglang.kernels.ops.attention.fla.chunk")
    serving.module("vllm.third_party.flash_linear_attention.ops")
    sglang, vllm = (
        stubs.STUBS[name][f"{name}{place}"]["current_platform"]
        for name, place in (("sglang", ".srt.platforms"), ("vllm", ".platforms"))
    )
    sglang().synchronize()
    here = vllm()
    stubs.is_cuda = lambda: True
    torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda device=None: (9, 0)
    there = vllm()
    return {
        "sglang": type(sglang()).__name__,
        "here": [here.is_cuda(), here.is_cpu(), here.is_arch_support_pdl(), here.has_device_capability(80)],
        "there": [there.is_cuda(), there.is_cpu(), there.is_arch_support_pdl(), there.has_device_capability(80)],
        "families": [there.is_device_capability_family(90), there.is_device_capability_family(100), there.is_device_capability(90)],
    }


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    call.__name__: call for call in (sglang_update, sglang_pool, vllm_update, vllm_core, flashinfer_reference, platforms)
}
