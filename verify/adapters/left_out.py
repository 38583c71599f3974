"""Why built-in adapters leave out parameters of the functions that they call (`omits` of an adapter)."""

from collections.abc import Mapping

IN_FLA: Mapping[str, str] = {
    "backend": "another backend is the package causal-conv1d, which is no part of FLA",
    "cp_context": "it is for ranks that share sequences: fla/chunk_cp, fla/kda_cp and fla/conv_cp pass it",
    "device": "it is where a module creates parameters, which a call replaces by those of the case",
    "gk": "fla/fused_recurrent passes it; requests in a pool have one decay for all channels",
    "gv": "fla/fused_recurrent passes it; requests in a pool have one decay for all channels",
    "lower_bound": "fla/chunk_kda passes it; fla/kda_layer calls the gate without a lower bound",
    "max_num_seqs": "it is for use_graph",
    "mode": "fla/layer_recurrent passes it; other calls run the recurrent rule where they are short and have no gradients",
    "output_attentions": "the layer has no attention weights",
    "output_dtype": "outputs have the dtype that the operation has by default",
    "prenorm": "fla/gated_norm passes it; the operation norm_gate_linear returns no sum",
    "residual": "fla/gated_norm passes it; the operation norm_gate_linear has no residual",
    "residual_in_fp32": "it is the dtype of the sum for a call without a residual, in which the sum is x",
    "return_intermediate_states": "the states between chunks are no output of the operation",
    "safe_gate": "fla/chunk_kda_safe passes it; it promises bounded gates, which other cases do not have",
    "state_v_first": "fla/chunk_v_first and fla/fused_recurrent_v_first pass it",
    "use_gate": "the layer of the operation has an output gate",
    "use_graph": "it is for CUDA graphs, and leaves rows without tokens undefined",
    "use_short_conv": "the layer of the operation has convolutions",
}
IN_FLASHINFER: Mapping[str, str] = {
    "cache_replayssm": "it keeps inputs for a later replay, which is no part of the operation",
    "replayssm_beta": "it is for cache_replayssm",
    "replayssm_g": "it is for cache_replayssm",
    "replayssm_rawk": "it is for cache_replayssm",
    "replayssm_rawv": "it is for cache_replayssm",
}
IN_SGLANG: Mapping[str, str] = {
    "block_table": "it is for windows that lie in blocks of a prefix cache",
    "cache_ring": "it keeps inputs for a later replay, which is no part of the operation",
    "cache_seqlens": "it is for windows that are circular buffers",
    "cache_steps": "sglang/verify passes it",
    "disable_output_calculation": "it computes no outputs, which are then nothing to compare",
    "disable_state_update": "sglang/verify passes it",
    "head_first": "the layout of tokens before heads is the only one that SGLang calls",
    "inplace_update": "without it, the states in the pool would not change",
    "intermediate_conv_window": "sglang/conv_verify passes it",
    "intermediate_state_indices": "sglang/conv_verify and sglang/verify pass it",
    "intermediate_states_buffer": "sglang/verify passes it",
    "is_kda": "sglang/decode_kda passes it",
    "lower_bound": "it selects another formula of the gate",
    "match_cutedsl_decode": "it imitates the rounding of another kernel, which is for a GPU only",
    "metadata": "it has what the function computes from other arguments",
    "num_accept_tokens": "accepted tokens are copied after a verification, as SGLang does",
    "pad_slot_id": "padding has the slot -1, which is the default",
    "replayssm_beta": "it is for cache_ring",
    "replayssm_g": "it is for cache_ring",
    "replayssm_rawk": "it is for cache_ring",
    "replayssm_rawv": "it is for cache_ring",
    "retrieve_next_sibling": "it is for drafts that are trees, which the convolution's cases do not have",
    "retrieve_next_token": "it is for drafts that are trees, which the convolution's cases do not have",
    "retrieve_parent_token": "it is for drafts that are trees: sglang/verify passes it, and the convolution's cases have none",
    "validate_data": "it checks arguments and changes no result",
}
IN_VLLM: Mapping[str, str] = {
    "beta": "it is a parameter of the softplus, which is 1 by definition",
    "chunk_indices": "the function computes it from cu_seqlens",
    "chunk_offsets": "the function computes it from cu_seqlens",
    "core_attn_out": "it is a tensor of the caller's for the outputs",
    "inplace_final_state": "the states in the pool are updated in place, which is the default",
    "is_kda": "vllm/decode_kda passes it",
    "max_query_len": "vllm/conv_verify passes it",
    "metadata": "it has what the function computes from other arguments",
    "null_block_id": "padding has block 0, which is the default",
    "num_accepted_tokens": "vllm/conv_verify and vllm/verify pass it",
    "out": "it is a tensor of the caller's for the outputs",
    "pad_slot_id": "padding has the slot -1, which is the default",
    "query_start_loc": "vllm/conv_verify passes it",
    "threshold": "where the softplus goes over to its argument changes no result beyond rounding",
    "validate_data": "it checks arguments and changes no result",
}


def left_out(reasons: Mapping[str, str], *names: str) -> dict[str, str]:
    """The reasons for these parameters. KeyError for a parameter without a reason."""
    return {name: reasons[name] for name in names}
