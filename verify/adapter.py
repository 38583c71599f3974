"""Adapters: one implementation made callable as an operation, and where adapters are found."""

import abc
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs
from oracles.operations import OPERATIONS
from oracles.rounding import PRODUCTS
from oracles.sharding import Rank, Shard
from properties.books import BOOKS
from properties.domain import Domain as Domain
from properties.layers import LayerDomain as LayerDomain
from properties.modules import ModuleDomain as ModuleDomain
from properties.paths import PathDomain as PathDomain
from properties.pools import PoolDomain as PoolDomain
from verify.comm import Place

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
    "transformers/chunk": "verify.adapters.transformers:Chunk",
    "transformers/recurrent": "verify.adapters.transformers:Recurrent",
}
MODULES = {
    "fla/conv": "verify.adapters.fla_modules:Conv",
    "fla/conv_update": "verify.adapters.fla_modules:ConvUpdate",
    "fla/short_convolution": "verify.adapters.fla_modules:ShortConvolution",
    "fla/gdn_gate": "verify.adapters.fla_modules:GdnGate",
    "fla/kda_gate": "verify.adapters.fla_modules:KdaGate",
    "fla/l2norm": "verify.adapters.fla_modules:L2Norm",
    "fla/gated_norm": "verify.adapters.fla_modules:GatedNorm",
    "transformers/conv": "verify.adapters.transformers_modules:Conv",
    "transformers/conv_update": "verify.adapters.transformers_modules:ConvUpdate",
    "transformers/l2norm": "verify.adapters.transformers_modules:L2Norm",
    "transformers/gated_norm": "verify.adapters.transformers_modules:GatedNorm",
}
PATHS = {
    "gdn/layer": "verify.adapters.gdn:GdnLayer",
    "fla/chunk_cp": "verify.adapters.fla_parallel:ChunkCP",
    "fla/kda_cp": "verify.adapters.fla_parallel:KdaCP",
    "fla/conv_cp": "verify.adapters.fla_parallel:ConvCP",
    "megatron/layer": "verify.adapters.megatron:MegatronLayer",
    "megatron/deterministic": "verify.adapters.megatron:MegatronDeterministic",
    "megatron/exchange": "verify.adapters.megatron:MegatronExchange",
}
POOLS = {"fla/decode": "verify.adapters.fla_decode:Decode", "fla/decode_blocks": "verify.adapters.fla_decode:DecodeBlocks"}
LAYERS = {
    "fla/layer": "verify.adapters.fla_layer:Layer",
    "fla/layer_recurrent": "verify.adapters.fla_layer:LayerRecurrent",
    "transformers/qwen3_next_layer": "verify.adapters.transformers_layer:Qwen3NextLayer",
    "transformers/qwen3_5_layer": "verify.adapters.transformers_layer:Qwen35Layer",
}
# By the name of their book (properties/books.py).
BOOKS_OF_BUILT_IN = {"rules": KERNELS, "modules": MODULES, "paths": PATHS, "pools": POOLS, "layers": LAYERS}
BUILT_IN = {spec: place for adapters in BOOKS_OF_BUILT_IN.values() for spec, place in adapters.items()}
ZOO = "zoo/"  # and then the name of a wrong implementation of verify/zoo


class Implementation(abc.ABC):
    """What every adapter declares. `requires` are the distributions it needs, with the least version of each.

    `products` is how float32 matrices are multiplied on a GPU, "ieee" or "tf32"; on the CPU, interpreted or not, it is ieee.
    """

    domain: Any
    algorithm: str = "chunkwise"
    products: str = "ieee"
    requires: ClassVar[dict[str, str]] = {}


class Adapter(Implementation):
    """One implementation of a kernel: signature and layout, no arithmetic, no tolerance.

    `algorithm` names the class whose rounding it may show: "chunkwise" (matrix products of operands in the inputs' dtype) or
    "recurrent" (float32 throughout); `chunk` is the tokens in its chunks, where they are always as many; `stores` says that a
    recurrent one has several kernels, which hand on normalised keys or corrected values in the inputs' dtype, and that its backward
    sums its states again from those; `folds` says that a chunkwise one multiplies a decay that all channels share into queries and
    keys, and stores these, as with KDA's decays it must, where others multiply their products. `domain` is what it promises.
    `counterpart` is the adapter of its one-token form.
    """

    chunk: int | None = None
    stores: bool = False
    folds: bool = False
    domain: Any = Domain()  # of the kind that the operation's book has (properties/books.py)
    counterpart: str | None = None

    def bring(self) -> None:
        """Import what `run` needs, where that takes seconds: it is done while the first cases are drawn. Here nothing."""

    @abc.abstractmethod
    def run(self, x: Inputs) -> Any:
        """The operation's outputs in their order, a tuple where there are several, differentiable where the domain says so.

        Of a rule: o [B, T, HV, V] and final_state [N, HV, K, V] (None if not asked for). x has q, k [B, T, H, K], v [B, T, HV, V],
        g (log-decay; of KDA [B, T, HV, K]), beta [B, T, HV], state [N, HV, K, V] or None, cu_seqlens [N + 1] or None, scale (None:
        K ** -0.5), qk_norm (L2-normalise q and k), output_final_state. Where the domain has it compute its gate, g is None and x
        has a, shaped like g, A_log [HV], dt_bias ([HV] or [HV, K]) or None; where beta, beta is None and x has b and
        allow_neg_eigval. Other operations: their inputs and outputs by name, see `gdn-verify list`.
        """


class PathAdapter(Implementation):
    """One implementation of a path that tp x cp ranks share: signature and layout, seen from one rank.

    `domain` is what it promises, `chunk` the tokens in its rule's chunks, where they are always as many. Ranks reach each other by
    `place` alone: as processes or, on any laptop, simulated.
    """

    chunk: int | None = None
    domain: PathDomain = PathDomain()

    @abc.abstractmethod
    def run(self, x: Inputs, place: Place) -> Tensor:
        """This rank's output, differentiable in what x has of tensors that require a gradient.

        gdn_layer: y [tokens, B, D] of x.hidden [tokens, B, D], tokens in the case's layout (THD: B = 1), and the parameters by
        the names of oracles/sharding.py in x.parameters, this rank's shards at rest. x has also layer (its widths), cu_seqlens and
        cu_seqlens_padded [N + 1] or None, sequence_parallel, eps, allow_neg_eigval, and the case's choices.
        A rule: o [1, tokens, HV, V] of an Adapter's q, k, v, g, beta with tokens on axis 1, the whole's cu_seqlens and layout;
        causal_conv1d: y.
        """

    def move(
        self, x: Tensor, lengths: Sequence[int] | None, sections: Sequence[int], to: str, place: Place, choices: dict[str, str]
    ) -> Tensor:
        """x [tokens / cp, B, F] "to heads" [tokens, B, F / cp], or back "to tokens", where the domain says exchanges.

        `lengths` are the (padded) tokens of each sequence, None for a batch; `sections` the features of each section, before they
        are cut over cp.
        """
        raise NotImplementedError

    def shards(self, whole: dict[str, Tensor], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        """What `rank` holds of the whole parameters, where the domain says checkpoints."""
        raise NotImplementedError

    def loaded(self, shards: dict[str, Shard], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        """The parameters of `rank` after it loaded its shards, where the domain says checkpoints."""
        raise NotImplementedError


class AdapterError(Exception):
    """An adapter cannot be had: unknown, not importable, or lacking a package. The message is one line with the choices."""


def load(spec: str) -> Adapter | PathAdapter:
    """The adapter of a built-in name, of an animal or of `file.py:Class`. AdapterError in one line if it cannot be had."""
    check_spec(spec)
    if spec.startswith(ZOO):
        return make(_animals(spec)[spec], spec)
    place, _, name = BUILT_IN.get(spec, spec).rpartition(":")
    try:
        if spec in BUILT_IN:
            module = importlib.import_module(place)
        else:
            path = pathlib.Path(place).resolve()
            found = importlib.util.spec_from_file_location(path.stem, path)
            assert found is not None and found.loader is not None, path
            module = importlib.util.module_from_spec(found)
            sys.path.insert(0, str(path.parent))  # so that the file may import its neighbours
            sys.modules.setdefault(path.stem, module)
            found.loader.exec_module(module)
    except Exception as error:
        raise AdapterError(f"adapter {spec}: importing {place} failed: {type(error).__name__}: {_first_line(error)}") from error
    made: Any = getattr(module, name, None)
    if not _is_adapter(made):
        names = [key for key, value in vars(module).items() if _is_adapter(value)]
        raise AdapterError(f"adapter {spec}: {place} has no Adapter called {name}; it has {', '.join(names) or 'none'}")
    return make(made, spec)


def _animals(spec: str) -> Mapping[str, type[Adapter] | type[PathAdapter]]:
    from verify.zoo.animals import animals, rights  # not before they are asked for: the zoo stands on this module

    try:
        return {**rights(), **{animal.spec: animal.kind for animal in animals().values()}}
    except Exception as error:
        raise AdapterError(f"adapter {spec}: the zoo cannot be had: {type(error).__name__}: {_first_line(error)}") from error


def _is_adapter(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Adapter | PathAdapter) and value not in (Adapter, PathAdapter)


def make(kind: type[Adapter] | type[PathAdapter], spec: str) -> Adapter | PathAdapter:
    """An instance, its declarations checked. AdapterError names a wrong one and the choices."""
    try:
        adapter = kind()
    except Exception as error:
        raise AdapterError(f"adapter {spec}: {kind.__name__}() failed: {type(error).__name__}: {_first_line(error)}") from error
    if (
        isinstance(adapter, Adapter)
        and adapter.chunk is not None
        and not (isinstance(adapter.chunk, int) and 1 <= adapter.chunk <= 1024)
    ):
        raise AdapterError(f"adapter {spec}: chunk must be None or in 1..1024, got {adapter.chunk!r}")
    kinds: list[Any] = [book.domain for book in BOOKS if (book.domain is PathDomain) is isinstance(adapter, PathAdapter)]
    if not isinstance(adapter.domain, tuple(kinds)):
        names = " or a ".join(each.__name__ for each in kinds)
        raise AdapterError(f"adapter {spec}: domain must be a {names}, got {adapter.domain!r}")
    does: str = getattr(adapter.domain, "operation")  # noqa: B009 - every kind of domain has one
    if (said := getattr(adapter, "operation", does)) != does:
        raise AdapterError(f"adapter {spec}: operation is {said!r}, its domain says {does}: say it there alone")
    if adapter.algorithm not in OPERATIONS[does].classes:
        choices = ", ".join(OPERATIONS[does].classes)
        raise AdapterError(f"adapter {spec}: algorithm must be one of {choices} for {does}, got {adapter.algorithm!r}")
    if adapter.products not in PRODUCTS:
        raise AdapterError(f"adapter {spec}: products must be one of {', '.join(PRODUCTS)}, got {adapter.products!r}")
    for name, wanted in {"folds": "chunkwise", "stores": "recurrent"}.items():
        if getattr(adapter, name, False) and adapter.algorithm != wanted:
            raise AdapterError(f"adapter {spec}: {name} must be False unless algorithm is {wanted}, which is {adapter.algorithm!r}")
    if not all(isinstance(word, str) for item in adapter.requires.items() for word in item):
        raise AdapterError(f"adapter {spec}: requires must map distributions to least versions, as text, got {adapter.requires!r}")
    check_requirements(spec, adapter.requires)
    if isinstance(adapter, Adapter) and adapter.counterpart is not None:
        try:
            check_spec(adapter.counterpart)
        except AdapterError as error:
            raise AdapterError(f"adapter {spec}: its counterpart: {error}") from None
    return adapter


def check_spec(spec: str) -> None:
    """Refuse a name that is no built-in adapter, no animal and no `file.py:Class`, without importing anything of anyone's."""
    if spec in BUILT_IN:
        return
    if spec.startswith(ZOO):
        if spec not in _animals(spec):
            near = ", ".join(difflib.get_close_matches(spec, _animals(spec), 3, 0.3)) or "none"
            raise AdapterError(f"unknown animal {spec!r}: of the zoo's {len(_animals(spec))} the nearest are {near}")
        return
    place, colon, name = spec.rpartition(":")
    if not colon or not place.endswith(".py") or not name.isidentifier():
        raise AdapterError(f"unknown adapter {spec!r}; there are {', '.join(BUILT_IN)}, or your own as my_kernel.py:MyKernel")
    if any(space in spec for space in " \t\n"):
        raise AdapterError(f"adapter {spec!r} must not contain spaces: it is a word of the line that repeats a run")
    if not pathlib.Path(place).is_file():
        raise AdapterError(f"adapter {spec}: there is no file {place}")


def check_requirements(spec: str, requires: dict[str, str]) -> None:
    """Refuse when a distribution is missing or too old, and say what to install."""
    for name, least in requires.items():
        got = installed(name)
        if got is None:
            raise AdapterError(f"adapter {spec} needs {name} >= {least}, which is not installed: pip install '{name}>={least}'")
        if _numbers(got) < _numbers(least):
            raise AdapterError(f"adapter {spec} needs {name} >= {least}, got {got}: pip install '{name}>={least}'")


@functools.cache  # a distribution's metadata is read and parsed every time that it is asked for
def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(adapter: Implementation) -> str:
    """The versions a finding depends on, in one line."""
    names = dict.fromkeys((*adapter.requires, "torch"))
    return " ".join(f"{name} {version}" for name in names if (version := installed(name)))


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:300]
