"""The libraries whose kernels or layers we check: the release that we tested, the files that we need of it, and where they are."""

import dataclasses
import importlib.metadata
import os
import re
import sys
from importlib.machinery import PathFinder

FOLDER = ".gdn-verify/libraries"  # in the working directory; `gdn-verify fetch` makes a folder for each library in it
VERSIONS = ("_version.py", "_build_meta.py", "core/package_info.py")  # the files of a package that may have its version
MANIFEST = "gdn-verify.json"  # the file that `gdn-verify fetch` leaves beside what it has unpacked


@dataclasses.dataclass(frozen=True)
class Library:
    """One library.

    - `name` is its package, `distribution` its name for pip, `version` the release that we tested.
    - `files` are patterns, as of fnmatch, of the files in its wheel that we need. A `*` matches slashes too.
    - `needed` are files without which nothing works. A wheel that lacks one is another release.
    - `gates` are modules that can be imported only if all of the library's requirements are there and this host can use them.
    - `whole` are packages whose own `__init__.py` runs even without the requirements, since other modules need its names.
    - `stands_for` are packages that it requires and that stubs replace too, if they are not installed.
    - `moved` has modules and packages that older releases have elsewhere: the name of today, and those before, from new to old.
    - `others` are further releases that we tried, from new to old, and `python` is the version of Python whose wheel is taken.
    """

    name: str
    distribution: str
    version: str
    files: tuple[str, ...]
    needed: tuple[str, ...]
    gates: tuple[str, ...]
    whole: tuple[str, ...] = ()
    stands_for: tuple[str, ...] = ()
    moved: tuple[tuple[str, ...], ...] = ()
    others: tuple[str, ...] = ()
    python: str = "3.11"

    @property
    def fetched(self) -> str:
        """The folder into which `gdn-verify fetch` unpacks the library, and the last in which adapters look for it."""
        return os.path.join(FOLDER, self.name)

    def at(self, release: str | None) -> tuple["Library", str]:
        """The library at one of its releases (None: `version`), and the folder for its files. ValueError for an unknown release."""
        releases = (self.version, *self.others)
        if release in (None, self.version):
            return self, self.fetched
        if release not in releases:
            raise ValueError(f"--release must be one of {', '.join(releases)} for {self.name}, got {release}")
        return dataclasses.replace(self, version=release), f"{self.fetched}-{release}"

    def folder(self) -> str | None:
        """The folder that holds the library's package: one on sys.path, or that of `gdn-verify fetch`. None if neither has it."""
        imported = getattr(sys.modules.get(self.name), "__path__", None)
        spec = None if imported else PathFinder.find_spec(self.name)
        places = [*(imported or ()), *((spec.submodule_search_locations if spec else None) or ())]
        folders = [os.path.dirname(os.path.abspath(place)) for place in places]
        return next(filter(self.is_in, [*folders, os.path.abspath(self.fetched)]), None)

    def is_in(self, folder: str) -> bool:
        """Whether a folder holds the package. A folder of the same name, such as a checkout of the repository, is no package."""
        return any(os.path.isfile(os.path.join(folder, file)) for file in (f"{self.name}/__init__.py", *self.needed))

    def release(self) -> str | None:
        """The version of the files in `folder()`. None if there are none, or if they do not say."""
        folder = self.folder()
        return None if folder is None else self.release_in(folder)

    def release_in(self, folder: str) -> str | None:
        """The version of the files in a folder. None if they do not say."""
        for found in importlib.metadata.distributions(name=self.distribution, path=[folder]):
            return found.version
        for name in VERSIONS:
            try:
                with open(os.path.join(folder, self.name, name), encoding="utf-8") as file:
                    text = file.read(1 << 16)
            except (OSError, UnicodeDecodeError):
                continue
            if numbers := re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)$", text, re.MULTILINE):
                return ".".join(numbers)
            if line := re.search(r"""^__version__ = .*['"]([^'"]+)['"]$""", text, re.MULTILINE):
                return line[1]
        return None

    def home(self, module: str) -> str:
        """The name that the files in `folder()` have for a module: an older one if they do not have it by the name of today."""
        folder = self.folder() or ""
        for names in self.moved:
            if module == names[0] or module.startswith(f"{names[0]}."):
                places = [place + module.removeprefix(names[0]) for place in names]
                return next((place for place in places if _is_module(folder, place)), module)
        return module

    def missing(self) -> str:
        """One line that says how to get the library."""
        return (
            f"there is no {self.name}: run `gdn-verify fetch {self.name}`, or pip install --no-deps "
            f"'{self.distribution}=={self.version}', or name a folder that holds its package with --path"
        )


def _is_module(folder: str, name: str) -> bool:
    """Whether a folder has a module or a package of this name."""
    place = os.path.join(folder, *name.split("."))
    return os.path.isfile(f"{place}.py") or os.path.isdir(place)


_SGLANG_FLA = ("sglang.kernels.ops.attention.fla", "sglang.srt.layers.attention.fla")
_VLLM_FLA = ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.fla.ops")
_OF_EVERY_WHEEL = ("*.dist-info/METADATA", "*.dist-info/licenses/*", "*.dist-info/LICENSE*")
LIBRARIES = {
    library.name: library
    for library in (
        Library(
            "sglang",
            "sglang",
            "0.5.23",
            files=(
                "sglang/_version.py",
                "sglang/kernels/jit/utils/*.py",
                "sglang/kernels/ops/attention/fla/*.py",
                "sglang/kernels/ops/attention/linear/*.py",
                "sglang/kernels/ops/attention/*gdn*.py",
                "sglang/kernels/ops/attention/*kda*.py",
                "sglang/kernels/ops/kvcache/*.py",
                "sglang/kernels/ops/mamba/*.py",
                "sglang/kernels/ops/memory/*.py",
                "sglang/kernels/ops/quantization/*.py",
                "sglang/srt/arg_groups/*.py",
                "sglang/srt/configs/mamba_utils.py",
                "sglang/srt/constants.py",
                "sglang/srt/distributed/utils.py",
                "sglang/srt/environ.py",
                "sglang/srt/layers/attention/*.py",
                "sglang/srt/layers/dcp/*.py",
                "sglang/srt/layers/quantization/*.py",
                "sglang/srt/mem_cache/*.py",
                "sglang/srt/model_executor/*.py",
                "sglang/srt/platforms/*.py",
                "sglang/srt/runtime_context.py",
                "sglang/srt/speculative/*.py",
                "sglang/srt/utils/*.py",
                *_OF_EVERY_WHEEL,
            ),
            needed=(
                "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py",
                "sglang/kernels/ops/attention/fla/chunk.py",
                "sglang/kernels/ops/mamba/causal_conv1d_triton.py",
                "sglang/srt/mem_cache/memory_pool.py",
            ),
            gates=("sglang.srt.utils", "sglang.kernels.jit.utils", "sglang.srt.mem_cache.memory_pool"),
            moved=(
                *(
                    (f"sglang.kernels.ops.attention.linear.{name}", *(f"{place}.{name}" for place in _SGLANG_FLA))
                    for name in ("fused_sigmoid_gating_recurrent", "fused_gdn_gating")
                ),
                _SGLANG_FLA,
                ("sglang.kernels.ops.attention.triton_gdn_fused_proj", "sglang.jit_kernel.triton.gdn_fused_proj"),
                ("sglang.kernels.ops.mamba", "sglang.srt.layers.attention.mamba"),
            ),
        ),
        Library(
            "vllm",
            "vllm",
            "0.33.0",
            files=(
                "vllm/_version.py",
                "vllm/envs.py",
                "vllm/logger.py",
                "vllm/logging_utils/*.py",
                "vllm/model_executor/custom_op.py",
                "vllm/model_executor/layers/attention_layer_base.py",
                "vllm/model_executor/layers/fla/ops/*.py",
                "vllm/model_executor/layers/mamba/*.py",
                "vllm/model_executor/layers/quantization/utils/quant_utils.py",
                "vllm/model_executor/utils.py",
                "vllm/model_executor/warmup/*.py",
                "vllm/models/kimi_k3/nvidia/ops/third_party/*.py",
                "vllm/platforms/*.py",
                "vllm/scalar_type.py",
                "vllm/third_party/flash_linear_attention/*.py",
                "vllm/utils/*.py",
                "vllm/v1/attention/*.py",
                "vllm/v1/core/block_pool.py",
                "vllm/v1/core/kv_cache_utils.py",
                "vllm/v1/kv_cache*.py",
                *_OF_EVERY_WHEEL,
            ),
            needed=(
                "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
                "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
                "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
                "vllm/models/kimi_k3/nvidia/ops/third_party/kda/chunk.py",
                "vllm/v1/attention/backends/gdn_attn.py",
            ),
            gates=("vllm.third_party.flash_linear_attention.ops",),
            whole=("vllm.logging_utils", *_VLLM_FLA),
            moved=(
                ("vllm.models.kimi_k3.nvidia.ops.third_party.kda.chunk", *(f"{place}.kda" for place in _VLLM_FLA)),
                _VLLM_FLA,
            ),
        ),
        Library(
            "flashinfer",
            "flashinfer-python",
            "0.7.4",
            files=("flashinfer/_build_meta.py", "flashinfer/trace/*.py", *_OF_EVERY_WHEEL),
            needed=("flashinfer/trace/templates/gdn.py",),
            gates=("flashinfer.gdn_prefill", "flashinfer.gdn_decode"),
            others=("0.7.2.post1",),
        ),
        Library(
            "megatron",
            "megatron-core",
            "0.19.2",
            files=("megatron/core/*.py", "megatron/training/training.py", *_OF_EVERY_WHEEL),
            needed=("megatron/core/packed_seq_params.py", "megatron/core/transformer/transformer_config.py"),
            gates=(),
            others=("0.18.2", "0.17.1", "0.16.1"),
            python="3.12",
        ),
        Library(
            "torchtitan",
            "torchtitan",
            "0.3.0",
            files=(
                "torchtitan/config/configurable.py",
                "torchtitan/models/common/*.py",
                "torchtitan/models/qwen3_5/model.py",
                "torchtitan/models/qwen3_5/rope.py",
                "torchtitan/protocols/module.py",
                *_OF_EVERY_WHEEL,
            ),
            needed=("torchtitan/models/qwen3_5/model.py", "torchtitan/protocols/module.py"),
            gates=("torchtitan.models.qwen3_5.model",),
            stands_for=("spmd_types",),
        ),
        Library(
            "nemo_automodel",
            "nemo-automodel",
            "0.7.0",
            files=(
                "nemo_automodel/components/models/common/packing.py",
                "nemo_automodel/components/models/qwen3_5_moe/cp_linear_attn.py",
                "nemo_automodel/shared/utils.py",
                *_OF_EVERY_WHEEL,
            ),
            needed=("nemo_automodel/components/models/qwen3_5_moe/cp_linear_attn.py",),
            gates=("nemo_automodel.components.models.qwen3_5_moe.cp_linear_attn",),
        ),
    )
}
BY_DISTRIBUTION = {library.distribution: library for library in LIBRARIES.values()}
