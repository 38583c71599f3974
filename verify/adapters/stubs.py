"""Stubs for those modules of serving libraries that need more than torch and Triton.

A stub maps each name to a function without arguments, which computes the name's value when somebody imports it. The functions
among these values answer as the library's own would on this host. Names that are not listed are unusable
(verify/adapters/serving.py).
"""

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from packaging.version import Version

Values = Mapping[str, Callable[[], Any]]


def is_cuda() -> bool:
    """Whether torch sees a GPU of NVIDIA."""
    return torch.cuda.is_available() and torch.version.cuda is not None


def is_hip() -> bool:
    """Whether torch was built for AMD."""
    return torch.version.hip is not None


def is_gfx95() -> bool:
    """Whether the GPU is an AMD gfx95."""
    return is_hip() and torch.cuda.is_available() and "gfx95" in torch.cuda.get_device_properties(0).gcnArchName


def device_sm() -> int:
    """The compute capability as SGLang has it: 90 for 9.0. 0 without a GPU."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return major * 10 + minor


def core_count(device: int = 0) -> int:
    """The multiprocessors of a GPU. 0 without one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 0


def supports(majors: tuple[int, ...], cuda: tuple[int, int]) -> Callable[[], bool]:
    """A function that says whether the GPU's major compute capability is one of these, and torch's CUDA is new enough."""
    return lambda: is_cuda() and device_sm() // 10 in majors and Version(torch.version.cuda or "0").release[:2] >= cuda


def is_fnuz() -> bool:
    """Whether 8-bit floats have no negative zero, as on the GPUs gfx94 of AMD."""
    return bool(torch.version.hip) and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName


def launches_dependents() -> bool:
    """Whether the GPU has programmatic dependent launches (PDL): from compute capability 9.0."""
    return is_cuda() and device_sm() >= 90


def ceiling(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(a // -b)


def _never(*_: object, **__: object) -> bool:
    return False


def _nothing(*_: object, **__: object) -> None:
    return None


def _to_device(numbers: list[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).to(device)


def _constants(*functions: Any, **values: Any) -> Values:
    """Names with values that need no computing. Functions that come without a name have their own."""
    named = {function.__name__: function for function in functions} | values
    return {name: functools.partial(_identity, value) for name, value in named.items()}


def _identity(value: Any) -> Any:
    return value


def _from(place: str, *names: str) -> Values:
    """Names of another module of the library, which needs no stub."""
    return {name: functools.partial(_member, place, name) for name in names}


def _member(place: str, name: str) -> Any:
    return getattr(importlib.import_module(place), name)


def _platform() -> Any:
    """SGLang's own platform object: of CUDA, or on a CPU the base class, whose `synchronize` does nothing."""
    place, kind = ("cuda", "CudaSRTPlatform") if is_cuda() else ("interface", "SRTPlatform")
    return getattr(importlib.import_module(f"sglang.srt.platforms.{place}"), kind)()


def _is_set(name: str, default: str = "false") -> bool:
    return os.getenv(name, default).lower() in ("true", "1")


_OTHER_HARDWARE = ("is_cpu", "is_npu", "is_xpu", "is_hpu", "is_musa", "is_mps", "is_sail", "cpu_has_amx_support")
_SGLANG_UTILS: Values = {
    **_constants(
        is_cuda,
        is_hip,
        **dict.fromkeys(_OTHER_HARDWARE, _never),
        is_cuda_alike=lambda: is_cuda() or is_hip(),
        is_gfx95_supported=is_gfx95,
        is_sm90_supported=supports((9,), (12, 3)),
        is_sm100_supported=supports((10,), (12, 8)),
        is_sm120_supported=supports((12,), (12, 8)),
        is_blackwell=supports((10, 11, 12), (12, 8)),
        is_blackwell_supported=supports((10, 11, 12), (12, 8)),
        get_device_sm=device_sm,
        get_device_core_count=core_count,
        cdiv=ceiling,
        ceil_div=ceiling,
        ceil_align=lambda a, b: ceiling(a, b) * b,
        next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
        async_h2d=_to_device,
        log_info_on_rank0=_nothing,
        get_bool_env_var=_is_set,
        direct_register_custom_op=_nothing,
    ),
    "torch_release": lambda: Version(torch.__version__).release,
}
_SGLANG: Mapping[str, Values] = {
    "sglang.srt.utils": _SGLANG_UTILS,
    "sglang.srt.utils.common": _SGLANG_UTILS,
    "sglang.kernels.jit.utils": {
        **_constants(is_arch_support_pdl=launches_dependents),
        **_from("sglang.kernels.jit.utils.common", "cache_once", "is_hip_runtime", "is_musa_runtime"),
        **_from("sglang.kernels.jit.utils.arch", "get_jit_cuda_arch"),
    },
    "sglang.utils": _constants(is_in_ci=_never),
    "sglang.jit_kernel.utils": _constants(is_arch_support_pdl=launches_dependents),  # its name before 0.5.19
    "sglang.srt.platforms": {"current_platform": _platform},
    # MambaPool's module imports these for the caches of attention layers, which a pool of states does not use.
    "sglang.kernels.ops.kvcache.kvcache": {},
    "sglang.jit_kernel.kvcache": {},  # its name before 0.5.19
    "sglang.kernels.ops.quantization.fp8_kernel": _constants(is_fp8_fnuz=is_fnuz),
    "sglang.srt.layers.quantization.fp8_kernel": _constants(is_fp8_fnuz=is_fnuz),  # its name before 0.5.16
    "sglang.srt.layers.attention.dsa.utils": _constants(aiter_can_use_preshuffle_paged_mqa=_never),
    "sglang.srt.layers.radix_attention": {},
    "sglang.srt.mem_cache.index_key_cache": {},
}


def _vllm_platform() -> Any:
    """A platform derived from vLLM's interface. On a GPU it answers as vLLM's platform for CUDA, which needs vLLM's own libraries.

    On a CPU it is vLLM's platform for hardware that it does not know, so that nothing takes the way of vLLM's own CPU kernels.
    """
    interface = importlib.import_module("vllm.platforms.interface")
    if not is_cuda():

        class Unknown(interface.UnspecifiedPlatform):  # type: ignore[misc,name-defined]
            @classmethod
            def num_compute_units(cls, device_id: int = 0) -> int:  # noqa: ARG003 - as vLLM calls it
                return torch.get_num_threads()  # as in vLLM's platform for CPUs

            @classmethod
            def is_pin_memory_available(cls) -> bool:
                return False

        return Unknown()

    class Cuda(interface.Platform):  # type: ignore[misc,name-defined]
        _enum = interface.PlatformEnum.CUDA
        device_name = device_type = "cuda"
        dispatch_key = "CUDA"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(*torch.cuda.get_device_capability(device_id))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return torch.cuda.get_device_name(device_id)

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return core_count(device_id)

        @classmethod
        def is_arch_support_pdl(cls) -> bool:
            return launches_dependents()

    return Cuda()


def _unchecked(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _no_aiter() -> Any:
    """AMD's kernels, none of which is available."""
    names = ("are_gdn_triton_kernels_available", "is_rdna_gdn_triton_kernels_available", "is_gdn_flydsl_prefill_available")
    return types.SimpleNamespace(**dict.fromkeys(names, _never))


_VLLM: Mapping[str, Values] = {
    "vllm.platforms": {"current_platform": _vllm_platform},
    "vllm.triton_utils": {
        "triton": functools.partial(importlib.import_module, "triton"),
        "tl": functools.partial(importlib.import_module, "triton.language"),
        "tldevice": functools.partial(importlib.import_module, "triton.language.extra.libdevice"),
        **_constants(HAS_TRITON=True, LOG2E=1.4426950408889634, LOGE2=0.6931471805599453),
    },
    "vllm._aiter_ops": {"rocm_aiter_ops": _no_aiter},
    "vllm.distributed": _constants(
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        divide=lambda a, b: a // b,
    ),
    # vLLM's debugging of synchronisation, which is off by default and imports torch's compiler.
    "vllm.utils.gpu_sync_debug": _constants(gpu_sync_allowed=_unchecked),
    # The layer's module decorates methods with this; without a capture, it returns them as they are.
    "vllm.compilation.breakable_cudagraph": _constants(eager_break_during_capture=_identity),
    # Configuration, weights, other layers and other batches, which the convolution, the metadata and the core do not use.
    "vllm.config": {},
    "vllm.config.cache": {},
    "vllm.config.mamba": {},
    "vllm.config.model": {},
    "vllm._custom_ops": {},
    "vllm.distributed.kv_events": _constants(MEDIUM_GPU="GPU", MEDIUM_CPU="CPU"),
    "vllm.distributed.kv_transfer.kv_connector.utils": {},
    "vllm.distributed.parallel_state": {},
    "vllm.forward_context": {},
    "vllm.model_executor.layers.layernorm": {},
    "vllm.model_executor.layers.linear": {},
    "vllm.model_executor.layers.mamba.mamba_mixer2": {},
    "vllm.model_executor.layers.quantization": {},
    "vllm.model_executor.layers.quantization.auto_awq": {},
    "vllm.model_executor.layers.quantization.awq_marlin": {},  # its name in 0.22.1
    "vllm.model_executor.layers.quantization.auto_gptq": {},
    "vllm.model_executor.layers.quantization.inc": {},
    "vllm.model_executor.model_loader.weight_utils": {},
    "vllm.model_executor.models.utils": {},
    "vllm.multimodal.inputs": {},
    "vllm.multimodal.utils": {},
    "vllm.utils.hashing": {},
    "vllm.utils.mem_utils": {},
    "vllm.v1.core.kv_cache_metrics": {},
    "vllm.v1.hisparse.runtime": {},
    "vllm.v1.request": {},
    "vllm.v1.utils": {},
    "vllm.v1.worker.workspace": {},
}


def _as_it_is(*_: object, **__: object) -> Callable[[Any], Any]:
    """A decorator with arguments that returns the function as it is."""
    return _identity


_MODULE: Values = _from("torchtitan.protocols.module", "Module")
_TORCHTITAN: Mapping[str, Values] = {
    "torchtitan.config": _from("torchtitan.config.configurable", "Configurable"),
    "torchtitan.models.common": {
        **_from("torchtitan.models.common.linear", "Linear"),
        **_from("torchtitan.models.common.nn_modules", "Conv1d"),
    },
    "torchtitan.distributed.utils": _constants(get_spmd_backend=lambda: "spmd_types", is_in_batch_invariant_mode=_never),
    "torchtitan.distributed.compile": _constants(maybe_regional_inductor=_as_it_is),
    "torchtitan.observability.structured_logger": _constants(log_trace_span=contextlib.nullcontext),
    # The model and its other layers, and what divides them among ranks, which a layer on one device does not use. Classes of the
    # model's file are derived from two of them, so these are torchtitan's base class.
    "torchtitan.models.common.decoder": {"Decoder": _MODULE["Module"]},
    "torchtitan.models.qwen3_5.vision_encoder": {"Qwen35VisionEncoder": _MODULE["Module"]},
    "torchtitan.distributed.parallel_dims": {},
    "torchtitan.distributed.spmd_types": {},
    "torchtitan.models.common.multimodal": {},
    "torchtitan.models.qwen3_5.sharding": {},
    "torchtitan.models.utils": {},
    "torchtitan.protocols.sharding": {},
    "torchtitan.tools.utils": {},
}
# Annotations of how tensors lie on ranks. Where nothing checks them, decorated functions are called as they are.
_SPMD_TYPES: Mapping[str, Values] = {
    "spmd_types": _constants(
        local_map=_as_it_is,
        no_typecheck=_as_it_is,
        local=contextlib.nullcontext,
        register_local_autograd_function=_nothing,
        is_type_checking=_never,
        S=_nothing,
        **dict.fromkeys("RVIP"),
    ),
    "spmd_types.runtime": {},
    "spmd_types.checker": {},
}
STUBS: Mapping[str, Mapping[str, Values]] = {
    "sglang": _SGLANG,
    "vllm": _VLLM,
    "flashinfer": {},
    "torchtitan": _TORCHTITAN,
    "spmd_types": _SPMD_TYPES,
    "nemo_automodel": {"nemo_automodel.components.models.common.utils": {}},  # choices of attention kernels
}
