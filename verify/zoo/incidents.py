"""The classes of defects, and the record of published incidents, by which the zoo's wrong implementations are ordered."""

import dataclasses

# Classes of defects, as in the record of incidents; "-" stands for a mistake that occurs in no recorded incident.
LETTERS = {
    "S": "serving state",
    "C": "context-parallel layout and state",
    "V": "packing, tails and padding",
    "X": "compiler and autotune per GPU",
    "N": "gates, NaN and causality",
    "I": "int32, out of bounds, grid limits",
    "T": "tensor parallel, fused in_proj, resharding",
    "L": "state layout and dtype",
    "R": "races and hangs",
    "E": "L2-norm eps",
    "Q": "non-contiguous inputs",
    "G": "head mapping",
    "K": "stale host caches",
    "F": "autodiff plumbing",
    "D": "decay index",
    "-": "no published defect yet",
}


@dataclasses.dataclass(frozen=True)
class Incident:
    """A published incident: what went wrong, and the issues and pull requests that report it, as owner/repository#number."""

    what: str
    reports: tuple[str, ...]


# The rows of the record of incidents.
INCIDENTS = {
    1: Incident("recurrent state leaks between packed samples", ("THUDM/slime#1686",)),
    2: Incident("layer called without cu_seqlens", ("NVIDIA-NeMo/Automodel#2147",)),
    3: Incident("packing with the state visible across samples", ("modelscope/ms-swift#9565", "huggingface/transformers#46093")),
    4: Incident("context parallel built from an invented cu_seqlens", ("PrimeIntellect-ai/prime-rl#3003",)),
    5: Incident("final state without the gate in a partial chunk", ("gittensor-ai-lab/sparkinfer#604",)),
    6: Incident("left padding not masked before conv and recurrence", ("AI-Hypercomputer/maxtext#5295",)),
    7: Incident("varlen call reads out of bounds", ("vllm-project/vllm-ascend#14192", "vllm-project/vllm-ascend#10707")),
    8: Incident("context parallel leaves the GDN layers out", ("hiyouga/LlamaFactory#10727",)),
    9: Incident("zigzag without relaying the state between shards", ("alibaba/rtp-llm#1299",)),
    10: Incident("contiguous layout, zigzag undone by the all-to-all", ("NVIDIA/Megatron-LM#5664",)),
    11: Incident("context parallel with tail padding: real rows zero", ("NVIDIA/TransformerEngine#3331",)),
    12: Incident("context parallel cannot be built by the public path", ("NVIDIA/Megatron-LM#4374", "modelscope/mcore-bridge#48")),
    13: Incident("sequence parallel: wrong lengths with padding", ("modelscope/mcore-bridge#162",)),
    14: Incident(
        "fused in_proj cut evenly over tensor-parallel ranks",
        ("NVIDIA/Megatron-LM#1989", "NVIDIA-NeMo/Megatron-Bridge#1690", "NVIDIA-NeMo/Megatron-Bridge#1694"),
    ),
    15: Incident("tensor-parallel gradients too large", ("modelscope/ms-swift#7941",)),
    16: Incident("fused in_proj not split per component to reshard", ("NVIDIA-NeMo/Megatron-Bridge#2899",)),
    17: Incident("weights converted raw in a sync", ("radixark/miles#1578",)),
    18: Incident("state not passed on where a prefix is cached", ("sgl-project/sglang#16053",)),
    19: Incident(
        "freed slots not zeroed, has_initial_state ignored", ("vllm-project/tpu-inference#2408", "vllm-project/tpu-inference#2431")
    ),
    20: Incident(
        "state write skipped by a decode graph replayed for prefill", ("vllm-project/vllm#53051", "vllm-project/vllm#47123")
    ),
    21: Incident("speculation reads the wrong state after acceptance", ("vllm-project/vllm#39273", "vllm-project/vllm#40738")),
    22: Incident("speculation and prefix cache poison later requests", ("vllm-project/vllm#53912", "noonghunna/club-3090#720")),
    23: Incident("checkpoint of the state taken at the wrong index", ("sgl-project/sglang#33515",)),
    24: Incident("padding slot -1 used as an address", ("vllm-project/vllm#33326", "sgl-project/sglang#33431")),
    25: Incident("state read and written transposed where K = V", ("sgl-project/sgl-kernel-npu#640",)),
    26: Incident("state written back in bf16", ("ollama/ollama#15865",)),
    27: Incident("fp32 state walked with a 2-byte stride", ("sgl-project/sglang#40419",)),
    28: Incident("backward wrong on one GPU with one compiler", ("fla-org/flash-linear-attention#640",)),
    29: Incident(
        "identical inputs, different outputs",
        ("fla-org/flash-linear-attention#945", "triton-lang/triton#10590", "fla-org/flash-linear-attention#1228"),
    ),
    30: Incident("lengths of 1 sent to the chunk kernel", ("vllm-project/vllm#50649",)),
    31: Incident("state decayed by another token's gate", ("flashinfer-ai/flashinfer#4311",)),
    32: Incident(
        "deadlock with an initial state and a long tail", ("flashinfer-ai/flashinfer#3698", "flashinfer-ai/flashinfer#3565")
    ),
    33: Incident("a prefix depends on future gates", ("fla-org/flash-linear-attention#1240",)),
    34: Incident(
        "l2norm eps inside the mean, or as a floor",
        ("ml-explore/mlx-lm#1624", "ggml-org/llama.cpp#28068", "huggingface/transformers#40842"),
    ),
    35: Incident("non-contiguous inputs read as contiguous", ("sgl-project/sglang#22312", "sgl-project/sglang#21836")),
    36: Incident("cached offsets served for a recycled address", ("QwenLM/FlashQLA#23",)),
}
