"""The built-in adapters: their names, and the module and class of each, which is imported when it is needed.

This module uses the standard library and `properties.words.names` alone, so that a wrong name is refused before torch is imported.
"""

import difflib
import functools
import pathlib
import re
from collections.abc import Sequence

from properties.words.names import did_you_mean

KERNELS = {
    "fla/chunk": "verify.adapters.fla:Chunk",
    "fla/fused_recurrent": "verify.adapters.fla:FusedRecurrent",
    "fla/chunk_16": "verify.adapters.fla:Chunk16",
    "fla/chunk_32": "verify.adapters.fla:Chunk32",
    "fla/chunk_v_first": "verify.adapters.fla:ChunkVFirst",
    "fla/fused_recurrent_v_first": "verify.adapters.fla:FusedRecurrentVFirst",
    "fla/chunk_kda": "verify.adapters.fla:ChunkKda",
    "fla/chunk_kda_safe": "verify.adapters.fla:ChunkKdaSafe",
    "fla/fused_recurrent_kda": "verify.adapters.fla:FusedRecurrentKda",
    "fla/chunk_delta_rule": "verify.adapters.fla:ChunkDeltaRule",
    "fla/fused_recurrent_delta_rule": "verify.adapters.fla:FusedRecurrentDeltaRule",
    "sglang/recurrent": "verify.adapters.sglang_rules:Recurrent",
    "sglang/recurrent_kda": "verify.adapters.sglang_rules:RecurrentKda",
    "sglang/chunk_kda_gated": "verify.adapters.sglang_kda:ChunkKdaGated",
    "vllm/chunk": "verify.adapters.vllm_rules:Chunk",
    "vllm/chunk_kda": "verify.adapters.vllm_kda:ChunkKda",
    "vllm/chunk_kda_gated": "verify.adapters.vllm_kda:ChunkKdaGated",
    "transformers/chunk": "verify.adapters.transformers:Chunk",
    "transformers/chunk_16": "verify.adapters.transformers:Chunk16",
    "transformers/recurrent": "verify.adapters.transformers:Recurrent",
    "flashinfer/prefill": "verify.adapters.flashinfer_kernels:Prefill",
    "flashinfer/prefill_reference": "verify.adapters.flashinfer_references:PrefillReference",
    "onnxruntime/gated_delta_net": "verify.adapters.onnx_operators:GatedDeltaNet",
    "onnxruntime/gated_delta_net_kda": "verify.adapters.onnx_operators:GatedDeltaNetKda",
    "onnxruntime/gated_delta_net_bounded": "verify.adapters.onnx_operators:GatedDeltaNetBounded",
    "onnxruntime/gated_delta_net_delta_rule": "verify.adapters.onnx_operators:GatedDeltaNetDelta",
    "onnxruntime/linear_attention": "verify.adapters.onnx_operators:LinearAttention",
    "onnxruntime/linear_attention_kda": "verify.adapters.onnx_operators:LinearAttentionKda",
    "onnxruntime/linear_attention_delta_rule": "verify.adapters.onnx_operators:LinearAttentionDelta",
    "onnxruntime/linear_attention_27": "verify.adapters.onnx_operators:LinearAttention27",
    "onnx/linear_attention": "verify.adapters.onnx_operators:LinearAttentionReference",
    "ggml/gated_delta_net": "verify.adapters.ggml:GatedDeltaNet",
    "ggml/gated_delta_net_kda": "verify.adapters.ggml:GatedDeltaNetKda",
    "mlx/gated_delta": "verify.adapters.mlx_kernels:GatedDelta",
    "openvino/gated_delta_net": "verify.adapters.openvino_kernels:GatedDeltaNet",
    "vllm_cpu/chunk": "verify.adapters.vllm_cpu:Chunk",
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
    "vllm/kda_gate": "verify.adapters.vllm_kda:KdaGate",
    "transformers/conv": "verify.adapters.transformers_modules:Conv",
    "transformers/conv_update": "verify.adapters.transformers_modules:ConvUpdate",
    "transformers/l2norm": "verify.adapters.transformers_modules:L2Norm",
    "transformers/gated_norm": "verify.adapters.transformers_modules:GatedNorm",
    "onnxruntime/conv": "verify.adapters.onnx_operators:Conv",
    "onnxruntime/conv_27": "verify.adapters.onnx_operators:Conv27",
    "onnxruntime/conv_varlen": "verify.adapters.onnx_operators:ConvVarlen",
    "onnxruntime/gdn_gate": "verify.adapters.onnx_operators:Gate",
    "onnxruntime/gated_norm": "verify.adapters.onnx_operators:GatedNorm",
    "onnx/conv": "verify.adapters.onnx_operators:ConvReference",
    "ggml/conv": "verify.adapters.ggml:Conv",
    "vllm_cpu/gdn_gate": "verify.adapters.vllm_cpu:Gate",
    "vllm_cpu/conv": "verify.adapters.vllm_cpu:Conv",
    "vllm_cpu/conv_update": "verify.adapters.vllm_cpu:ConvUpdate",
    "vllm_cpu/conv_update_vec": "verify.adapters.vllm_cpu:ConvUpdateVec",
}
PATHS = {
    "gdn/layer": "verify.adapters.gdn.adapter:GdnLayer",
    "fla/chunk_cp": "verify.adapters.fla_parallel:ChunkCP",
    "fla/kda_cp": "verify.adapters.fla_parallel:KdaCP",
    "fla/conv_cp": "verify.adapters.fla_parallel:ConvCP",
    "megatron/layer": "verify.adapters.megatron:MegatronLayer",
    "megatron/norm_in_kernel": "verify.adapters.megatron_norm:MegatronNormInKernel",
    "megatron/deterministic": "verify.adapters.megatron:MegatronDeterministic",
    "megatron/training": "verify.adapters.megatron_training:MegatronTraining",
    "megatron/training_deterministic": "verify.adapters.megatron_training:MegatronTrainingDeterministic",
    "megatron/exchange": "verify.adapters.megatron:MegatronExchange",
}
POOLS = {
    "fla/decode": "verify.adapters.fla_decode:Decode",
    "fla/decode_blocks": "verify.adapters.fla_decode:DecodeBlocks",
    "sglang/decode": "verify.adapters.sglang_pools:Decode",
    "sglang/decode_kda": "verify.adapters.sglang_pools:DecodeKda",
    "sglang/chunk_kda": "verify.adapters.sglang_kda:ChunkKda",
    "sglang/verify_kda": "verify.adapters.sglang_kda:VerifyKda",
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
    "vllm/recurrent_kda": "verify.adapters.vllm_kda:RecurrentKda",
    "vllm/packed_decode_kda": "verify.adapters.vllm_kda:PackedDecodeKda",
    "vllm/prefill": "verify.adapters.vllm_pools:Prefill",
    "vllm_cpu/decode": "verify.adapters.vllm_cpu:Decode",
}
LAYERS = {
    "fla/layer": "verify.adapters.fla_layer:Layer",
    "fla/layer_recurrent": "verify.adapters.fla_layer:LayerRecurrent",
    "fla/kda_layer": "verify.adapters.fla_layer:KdaLayer",
    "fla/kda_layer_recurrent": "verify.adapters.fla_layer:KdaLayerRecurrent",
    "megatron/inference": "verify.adapters.megatron_inference:MegatronInference",
    "torchtitan/qwen3_5_layer": "verify.adapters.torchtitan_layer:Qwen35Layer",
    "nemo/qwen3_5_moe_layer": "verify.adapters.nemo_layer:Qwen35MoeLayer",
    "transformers/qwen3_next_layer": "verify.adapters.transformers_layer:Qwen3NextLayer",
    "transformers/qwen3_5_layer": "verify.adapters.transformers_layer:Qwen35Layer",
    "transformers/qwen3_5_moe_layer": "verify.adapters.transformers_layer:Qwen35MoeLayer",
    "transformers/qwen4_exp_layer": "verify.adapters.transformers_layer:Qwen4ExpLayer",
    "transformers/olmo_hybrid_layer": "verify.adapters.transformers_layer:OlmoHybridLayer",
    "transformers/lara_mini_layer": "verify.adapters.transformers_layer:LaraMiniLayer",
    "transformers/kimi_linear_layer": "verify.adapters.transformers_kda_layer:KimiLinearLayer",
    "transformers/glm5_next_layer": "verify.adapters.transformers_kda_layer:Glm5NextLayer",
    "transformers/bailing_hybrid_layer": "verify.adapters.transformers_kda_layer:BailingHybridLayer",
    "transformers/kimi_linear_packed": "verify.adapters.transformers_kda_layer:KimiLinearPacked",
    "transformers/glm5_next_packed": "verify.adapters.transformers_kda_layer:Glm5NextPacked",
    "transformers/bailing_hybrid_packed": "verify.adapters.transformers_kda_layer:BailingHybridPacked",
}
TRACES = {
    "gdn/pool": "verify.adapters.gdn.pool:Pool",
    "sglang/pool": "verify.adapters.sglang_pool:Pool",
    "vllm/pool": "verify.adapters.vllm_pool:Pool",
}
# The adapters by the name of their book (properties/books.py).
BOOKS_OF_BUILT_IN = {"rules": KERNELS, "modules": MODULES, "paths": PATHS, "pools": POOLS, "layers": LAYERS, "traces": TRACES}
BUILT_IN = {spec: place for adapters in BOOKS_OF_BUILT_IN.values() for spec, place in adapters.items()}
ANSWERS = "answers:"  # answers:DIR:ANSWERS answers the questions in one folder with the files in another
ZOO = "zoo/"  # the prefix of the names of wrong implementations in verify/zoo
ZOO_PLACE = "verify.zoo.animals:by_spec"  # a function that returns the zoo's adapters by name
OWN = "your own as my_kernel.py:MyKernel"


class AdapterError(Exception):
    """An adapter cannot be loaded: it is unknown, cannot be imported, lacks a package, or declares something wrong.

    The message is one line.
    """


def check_spec(spec: str) -> None:
    """Check that a name is a built-in adapter, a class of the zoo or an existing `file.py:Class`. AdapterError if it is not.

    Neither a library's implementation nor the zoo or a user's file is imported.
    """
    if spec in BUILT_IN:
        return
    if spec.startswith(ZOO):
        if spec not in _zoo_specs():
            raise AdapterError(unknown_animal(spec))
        return
    if spec.startswith(ANSWERS):
        folders = spec.removeprefix(ANSWERS).split(":")
        if len(folders) != 2 or not all(folders) or len(spec.split()) != 1:
            raise AdapterError(f"adapter {spec!r} must be {ANSWERS}DIR:ANSWERS, of two folders without colons and spaces")
        if missing := [folder for folder in folders if not pathlib.Path(folder).is_dir()]:
            raise AdapterError(f"adapter {spec}: there is no folder {missing[0]}")
        return
    place, colon, name = spec.rpartition(":")
    if (file := spec.removesuffix(":")).endswith(".py"):
        raise AdapterError(f"adapter {spec!r}: the class is missing, as in {file}:MyKernel")
    if not colon or not place.endswith(".py") or not name.isidentifier():
        near = did_you_mean(spec, BUILT_IN)
        raise AdapterError(f"unknown adapter {spec!r}{near}: `gdn-verify list` shows the built-in ones; name {OWN}")
    if any(space in spec for space in " \t\n"):
        raise AdapterError(f"adapter {spec!r} must not contain spaces: it is a word of the line that repeats a run")
    if not pathlib.Path(place).is_file():
        raise AdapterError(f"adapter {spec}: there is no file {place}")


def unknown_animal(spec: str) -> str:
    """The line about a name that no wrong implementation of the zoo has."""
    near = ", ".join(difflib.get_close_matches(spec, _zoo_specs(), 3, 0.3)) or "none"
    return f"unknown animal {spec!r}: the nearest in the zoo are {near}"


@functools.cache
def _zoo_specs() -> Sequence[str]:
    """The names of all classes in the zoo's modules, read from their text: those of its adapters are among them."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((pathlib.Path(__file__).parent.parent / "zoo").glob("*.py"))]
    return [ZOO + name for text in texts for name in re.findall(r"^class ([A-Z]\w*)", text, re.MULTILINE)]
