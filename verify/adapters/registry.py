"""The built-in adapters: their names, and the module and class of each, which is imported when it is needed."""

KERNELS = {
    "fla/chunk": "verify.adapters.fla:Chunk",
    "fla/fused_recurrent": "verify.adapters.fla:FusedRecurrent",
    "fla/chunk_16": "verify.adapters.fla:Chunk16",
    "fla/chunk_32": "verify.adapters.fla:Chunk32",
    "fla/chunk_v_first": "verify.adapters.fla:ChunkVFirst",
    "fla/fused_recurrent_v_first": "verify.adapters.fla:FusedRecurrentVFirst",
    "fla/chunk_kda": "verify.adapters.fla:ChunkKda",
    "fla/fused_recurrent_kda": "verify.adapters.fla:FusedRecurrentKda",
    "fla/chunk_delta_rule": "verify.adapters.fla:ChunkDeltaRule",
    "fla/fused_recurrent_delta_rule": "verify.adapters.fla:FusedRecurrentDeltaRule",
    "sglang/recurrent": "verify.adapters.sglang_rules:Recurrent",
    "sglang/recurrent_kda": "verify.adapters.sglang_rules:RecurrentKda",
    "vllm/chunk": "verify.adapters.vllm_rules:Chunk",
    "transformers/chunk": "verify.adapters.transformers:Chunk",
    "transformers/recurrent": "verify.adapters.transformers:Recurrent",
    "flashinfer/prefill": "verify.adapters.flashinfer_kernels:Prefill",
    "flashinfer/prefill_reference": "verify.adapters.flashinfer_references:PrefillReference",
}
MODULES = {
    "fla/conv": "verify.adapters.fla_modules:Conv",
    "fla/conv_update": "verify.adapters.fla_modules:ConvUpdate",
    "fla/short_convolution": "verify.adapters.fla_modules:ShortConvolution",
    "fla/short_convolution_steps": "verify.adapters.fla_modules:ShortConvolutionSteps",
    "fla/gdn_gate": "verify.adapters.fla_modules:GdnGate",
    "fla/kda_gate": "verify.adapters.fla_modules:KdaGate",
    "fla/l2norm": "verify.adapters.fla_modules:L2Norm",
    "fla/gated_norm": "verify.adapters.fla_modules:GatedNorm",
    "fla/norm_gate_linear": "verify.adapters.fla_modules:NormGateLinear",
    "sglang/conv": "verify.adapters.sglang_modules:Conv",
    "sglang/conv_update": "verify.adapters.sglang_modules:ConvUpdate",
    "sglang/conv_verify": "verify.adapters.sglang_modules:ConvVerify",
    "vllm/conv": "verify.adapters.vllm_modules:Conv",
    "vllm/conv_update": "verify.adapters.vllm_modules:ConvUpdate",
    "vllm/conv_verify": "verify.adapters.vllm_modules:ConvVerify",
    "transformers/conv": "verify.adapters.transformers_modules:Conv",
    "transformers/conv_update": "verify.adapters.transformers_modules:ConvUpdate",
    "transformers/l2norm": "verify.adapters.transformers_modules:L2Norm",
    "transformers/gated_norm": "verify.adapters.transformers_modules:GatedNorm",
}
PATHS = {
    "gdn/layer": "verify.adapters.gdn.adapter:GdnLayer",
    "fla/chunk_cp": "verify.adapters.fla_parallel:ChunkCP",
    "fla/kda_cp": "verify.adapters.fla_parallel:KdaCP",
    "fla/conv_cp": "verify.adapters.fla_parallel:ConvCP",
    "megatron/layer": "verify.adapters.megatron:MegatronLayer",
    "megatron/deterministic": "verify.adapters.megatron:MegatronDeterministic",
    "megatron/exchange": "verify.adapters.megatron:MegatronExchange",
}
POOLS = {
    "fla/decode": "verify.adapters.fla_decode:Decode",
    "fla/decode_blocks": "verify.adapters.fla_decode:DecodeBlocks",
    "sglang/decode": "verify.adapters.sglang_pools:Decode",
    "sglang/decode_kda": "verify.adapters.sglang_pools:DecodeKda",
    "sglang/verify": "verify.adapters.sglang_pools:Verify",
    "sglang/verify_half": "verify.adapters.sglang_pools:VerifyHalf",
    "sglang/update": "verify.adapters.sglang_pools:Update",
    "sglang/packed_decode": "verify.adapters.sglang_pools:PackedDecode",
    "sglang/packed_decode_kda": "verify.adapters.sglang_pools:PackedDecodeKda",
    "sglang/chunk": "verify.adapters.sglang_pools:ChunkInPlace",
    "sglang/recurrent_blocks": "verify.adapters.sglang_blocks:RecurrentBlocks",
    "sglang/recurrent_kda_blocks": "verify.adapters.sglang_blocks:RecurrentKdaBlocks",
    "flashinfer/decode": "verify.adapters.flashinfer_kernels:Decode",
    "flashinfer/mtp": "verify.adapters.flashinfer_kernels:Mtp",
    "flashinfer/decode_reference": "verify.adapters.flashinfer_references:DecodeReference",
    "flashinfer/mtp_reference": "verify.adapters.flashinfer_references:MtpReference",
    "vllm/decode": "verify.adapters.vllm_pools:Decode",
    "vllm/decode_kda": "verify.adapters.vllm_pools:DecodeKda",
    "vllm/verify": "verify.adapters.vllm_pools:Verify",
    "vllm/recurrent": "verify.adapters.vllm_pools:Recurrent",
    "vllm/packed_decode": "verify.adapters.vllm_pools:PackedDecode",
    "vllm/prefill": "verify.adapters.vllm_pools:Prefill",
}
LAYERS = {
    "fla/layer": "verify.adapters.fla_layer:Layer",
    "fla/layer_recurrent": "verify.adapters.fla_layer:LayerRecurrent",
    "fla/kda_layer": "verify.adapters.fla_layer:KdaLayer",
    "fla/kda_layer_recurrent": "verify.adapters.fla_layer:KdaLayerRecurrent",
    "transformers/qwen3_next_layer": "verify.adapters.transformers_layer:Qwen3NextLayer",
    "transformers/qwen3_5_layer": "verify.adapters.transformers_layer:Qwen35Layer",
}
TRACES = {
    "gdn/pool": "verify.adapters.gdn.pool:Pool",
    "sglang/pool": "verify.adapters.sglang_pool:Pool",
    "vllm/pool": "verify.adapters.vllm_pool:Pool",
}
# The adapters by the name of their book (properties/books.py).
BOOKS_OF_BUILT_IN = {"rules": KERNELS, "modules": MODULES, "paths": PATHS, "pools": POOLS, "layers": LAYERS, "traces": TRACES}
BUILT_IN = {spec: place for adapters in BOOKS_OF_BUILT_IN.values() for spec, place in adapters.items()}
ZOO = "zoo/"  # the prefix of the names of wrong implementations in verify/zoo
ZOO_PLACE = "verify.zoo.animals:by_spec"  # a function that returns the zoo's adapters by name
