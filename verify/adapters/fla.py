"""Adapters of flash-linear-attention's rules. They adapt signatures and layout only."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.rules.domain import Domain
from properties.words.sizes import MOST_ALONG_Y
from verify.adapters.base import Adapter
from verify.adapters.interface import Lacking, has_text, signature
from verify.adapters.left_out import IN_FLA, left_out
from verify.adapters.packages import installed

REQUIRES = {"fla-core": "0.4.0", "triton": "3.7.1"}
INSIDE = ("none", "gate", "beta", "both")
SWITCH = ("no", "yes")
# Options of FLA's rules. The first two are tensors that a caller may compute once for several calls. The third keeps results for
# the backward, which otherwise computes them again. The last is the order of a state's axes.
ON_HOST = (("cu_seqlens_cpu", SWITCH),)
INDICES = (("chunk_indices", SWITCH),)
KEPT = (("disable_recompute", SWITCH),)
V_FIRST = (("state_v_first", SWITCH),)
KDA_OPTIONS = (*ON_HOST, *KEPT, *V_FIRST)
CHUNKED: dict[str, Any] = {
    "key_dims": (1, 256),
    "in_kernel": INSIDE,
    "refills": False,
    "batch_heads": MOST_ALONG_Y,
    "parameter_dtypes": ("fp32", "input"),
    "options": (*ON_HOST, *INDICES),
    "exact_options": ("cu_seqlens_cpu", "chunk_indices"),
}
RECURRENT: dict[str, Any] = {
    "key_dims": (1, 256),
    "position_independent": True,
    "backward": False,
    "in_kernel": INSIDE,
    "parameter_dtypes": ("fp32", "input"),
    "left_out": ("none", "gate"),  # without beta the kernel reads outside a tensor if value heads share keys (docs/FINDINGS.md)
    "channel_decays": ("none", "keys", "values", "both"),
}
# The recurrent kernels before 0.6.0 load decays of channels without a mask. Each is found by its module and that line.
UNMASKED = (
    ("fla.ops.gated_delta_rule.fused_recurrent", "tl.load(p_gk)"),
    ("fla.ops.kda.fused_recurrent", "tl.load(p_g, eviction_policy"),
)
POWERS = tuple(1 << power for power in range(9))


class FlaAdapter(Adapter):
    """Base of adapters that need fla-core alone: rules, modules and serving kernels."""

    requires = REQUIRES

    def bring(self) -> None:
        core()


class FlaRule(FlaAdapter):
    """Base of adapters of a rule. The domain is narrowed to what the installed release takes.

    `place` is the rule, as `package.module:function`. `switches` are its parameters that are True in every call. With `transposed`,
    its states are [V, K] in every call, and otherwise in calls with the option `state_v_first`.
    """

    place: ClassVar[str]
    switches: ClassVar[tuple[str, ...]] = ()
    transposed: ClassVar[bool] = False

    def __init__(self) -> None:
        self.domain = narrowed(self.domain, self.place)

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        # A release without a parameter would swallow it in **kwargs.
        more: dict[str, Any] = {_parameter(self.place, name): True for name in self.switches}
        if self.chunk not in (None, 64):
            more[_parameter(self.place, "chunk_size")] = self.chunk
        more |= given_options(x, self.chunk or 0)
        module, _, name = self.place.partition(":")
        rule = getattr(importlib.import_module(module), name)
        turned = self.transposed or chosen(x, "state_v_first")
        return v_first(rule, x, self.place, **more) if turned else call(rule, x, **more)


class Chunk(FlaRule):
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`: chunkwise, forward and backward."""

    place = "fla.ops.gated_delta_rule.chunk:chunk_gated_delta_rule"
    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    # Not position independent: torch sums dg over blocks of key channels, and on a CPU that sum depends on the place in memory.
    omits = left_out(IN_FLA, "state_v_first", "cp_context")
    domain = Domain(**CHUNKED)
    counterpart = "fla/fused_recurrent"


class Chunk16(Chunk):
    """`Chunk` with chunks of 16 tokens."""

    chunk = 16


class Chunk32(Chunk):
    """`Chunk` with chunks of 32 tokens."""

    chunk = 32


class ChunkVFirst(Chunk):
    """`Chunk` with states stored as [V, K]."""

    omits = left_out(IN_FLA, "cp_context")
    transposed = True
    counterpart = "fla/fused_recurrent_v_first"


class FusedRecurrent(FlaRule):
    """`fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule`: token by token in float32. It has no backward."""

    place = "fla.ops.gated_delta_rule.fused_recurrent:fused_recurrent_gated_delta_rule"
    algorithm = "recurrent"
    omits = left_out(IN_FLA, "state_v_first")
    domain = Domain(**RECURRENT)


class FusedRecurrentVFirst(FusedRecurrent):
    """`FusedRecurrent` with states stored as [V, K]."""

    omits = left_out(IN_FLA)
    transposed = True


class ChunkKda(FlaRule):
    """`fla.ops.kda.chunk_kda`: chunkwise, forward and backward."""

    place = "fla.ops.kda.chunk:chunk_kda"
    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    omits = left_out(IN_FLA, "safe_gate", "return_intermediate_states", "cp_context", "use_graph", "max_num_seqs")
    domain = Domain(
        operation="kda",
        key_dims=(1, 256),
        in_kernel=INSIDE,
        refills=False,
        batch_heads=MOST_ALONG_Y,
        lower_bounds=("none", "-5", "-1"),
        parameter_dtypes=("fp32", "input"),
        options=KDA_OPTIONS,
        exact_options=("cu_seqlens_cpu",),
    )
    counterpart = "fla/fused_recurrent_kda"


class ChunkKdaSafe(ChunkKda):
    """`ChunkKda` with `safe_gate`: the caller promises log-decays of -5 or more, and a gate in the kernel has a lower bound."""

    omits = left_out(IN_FLA, "return_intermediate_states", "cp_context", "use_graph", "max_num_seqs")
    domain = dataclasses.replace(ChunkKda.domain, strongest_decay="10", lower_bounds=("-5", "-1"))
    switches = ("safe_gate",)


class FusedRecurrentKda(FlaRule):
    """`fla.ops.kda.fused_recurrent_kda`: token by token in float32, forward only."""

    place = "fla.ops.kda.fused_recurrent:fused_recurrent_kda"
    algorithm = "recurrent"
    domain = Domain(
        operation="kda",
        key_dims=(1, 256),
        position_independent=True,
        backward=False,
        in_kernel=INSIDE,
        lower_bounds=("none", "-5", "-1"),
        parameter_dtypes=("fp32", "input"),
        options=V_FIRST,
    )


class ChunkDeltaRule(FlaRule):
    """`fla.ops.delta_rule.chunk_delta_rule`: chunkwise.

    It asserts that no input is float32, and that there are as many value heads as key heads.
    """

    place = "fla.ops.delta_rule.chunk:chunk_delta_rule"
    algorithm = "chunkwise"
    products = "tf32"
    chunk = 64
    domain = Domain(
        operation="delta_rule",
        dtypes=("bf16", "fp16"),
        key_dims=(1, 256),
        grouped_heads=False,
        refills=False,
        batch_heads=MOST_ALONG_Y,
        options=ON_HOST,
        exact_options=("cu_seqlens_cpu",),
    )
    counterpart = "fla/fused_recurrent_delta_rule"


class FusedRecurrentDeltaRule(FlaRule):
    """`fla.ops.delta_rule.fused_recurrent_delta_rule`: token by token in float32, forward and backward."""

    place = "fla.ops.delta_rule.fused_recurrent:fused_recurrent_delta_rule"
    algorithm = "recurrent"
    stores = True
    domain = Domain(operation="delta_rule", key_dims=(1, 256), grouped_heads=False, left_out=("none", "beta"))


class _CoreOnly(importlib.abc.MetaPathFinder):
    """An import finder that hides fla's layers and models, as if fla-core alone were installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - as finders are called
        if name in ("fla.layers", "fla.models"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _public(name: str) -> Any:
    """A layer or model by the name under which `fla` exports it, imported on first use. AttributeError if there is none."""
    if name[:1].isupper():
        for part in ("fla.layers", "fla.models"):
            module = importlib.import_module(part)
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'fla' has no attribute {name!r}")


def core() -> None:
    """Import `fla` without its layers and models, and without torch's compiler, which take most of the time.

    Layers and models can still be imported by their names, and the compiler is imported when something is compiled.
    """
    if "fla" not in sys.modules:
        with core_only(), decorating_later():
            importlib.import_module("fla.ops")


@contextlib.contextmanager
def core_only() -> Iterator[None]:
    """A context in which whoever imports `fla` gets it without its layers and models."""
    if "fla" in sys.modules:
        yield
        return
    finder = _CoreOnly()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if "fla" in sys.modules:
            vars(sys.modules["fla"])["__getattr__"] = _public


@contextlib.contextmanager
def decorating_later() -> Iterator[None]:
    """Delay the decorators torch.compile and torch.compiler.disable inside until the first call that needs them.

    Both import torch's compiler, which takes a second, when a module that uses them is imported. As long as the compiler is not
    imported, nothing is being compiled, so a function under torch.compiler.disable can be called as it is.
    """
    decorators = torch.compile, torch.compiler.disable
    torch.compile = _later(torch.compile, always=True)
    torch.compiler.disable = _later(torch.compiler.disable, always=False)
    try:
        yield
    finally:
        torch.compile, torch.compiler.disable = decorators


def _later(decorator: Any, *, always: bool) -> Any:
    """A decorator that decorates at the first call or, unless `always`, at the first call after torch's compiler is imported."""

    def decorate(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        if function is None:
            return lambda target: decorate(target, *args, **kwargs)

        @functools.cache
        def decorated() -> Any:
            return decorator(function, *args, **kwargs)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return (decorated() if always or "torch._dynamo" in sys.modules else function)(*arguments, **named)

        return call

    return decorate


def narrowed(domain: Domain, place: str) -> Domain:
    """A domain without what the rule at `place` has no parameter for. Older releases ignore parameters that they do not know."""
    if (rule := signature(place)) is None:
        return domain
    needs = {"gate": {"use_gate_in_kernel"}, "beta": {"use_beta_sigmoid_in_kernel", "allow_neg_eigval"}, "none": set[str]()}
    needs["both"] = needs["gate"] | needs["beta"]
    inside = tuple(word for word in domain.in_kernel if needs[word] <= rule.parameters)
    takes = rule.parameters | ({"state_v_first"} if "transpose_state_layout" in rule.parameters else set())
    options = tuple((name, values) for name, values in domain.options if name in takes)
    strays = domain.operation == "kda" and reads_beyond_gates()
    return dataclasses.replace(
        domain,
        in_kernel=inside,
        grouped_heads=domain.grouped_heads and "HV" in rule.doc,
        channel_decays=domain.channel_decays if {"gk", "gv"} <= takes and not has_text(*UNMASKED[0]) else ("none",),
        key_dims=Domain.key_dims if strays else domain.key_dims,
        key_widths=POWERS if strays else domain.key_widths,
        lower_bounds=domain.lower_bounds if "lower_bound" in takes else ("none",),
        options=options,
        exact_options=tuple(name for name in domain.exact_options if name in dict(options)),
    )


def reads_beyond_gates() -> bool:
    """Whether the recurrent kernel of KDA reads beyond the gates, unless the number of key channels is a power of two."""
    (rule, load), kda = UNMASKED
    borrowed = "from fla.ops.gated_delta_rule.fused_recurrent import"  # KDA of 0.4.0 has no kernel of its own
    return has_text(*kda) or (has_text(kda[0], borrowed) and has_text(rule, load))


def _parameter(place: str, *names: str) -> str:
    """The first of these names that is a parameter of the rule at `place`. Lacking if none is."""
    rule = signature(place)
    found = next((name for name in names if rule is None or name in rule.parameters), None)
    if found is None:
        raise Lacking(f"{place.replace(':', '.')} of fla-core {installed('fla-core')} has no parameter {names[0]}")
    return found


def call(rule: Any, x: Inputs, **more: Any) -> tuple[Tensor, Tensor | None]:
    """Call a rule of FLA on a rule's inputs, with the arguments `more` added.

    If the kernel computes the gate or beta, FLA takes their inputs a and b in the arguments `g` and `beta`.
    """
    if (a := x.get("a")) is not None:
        more |= {
            "g": a,
            "use_gate_in_kernel": True,
            "A_log": x.A_log,
            "dt_bias": x.dt_bias.flatten() if x.dt_bias is not None else None,
        }
    elif x.g is not None:
        more["g"] = x.g
    if (b := x.get("b")) is not None:
        more |= {"beta": b, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": x.allow_neg_eigval}
    elif x.beta is not None:
        more["beta"] = x.beta
    more |= {name: x[name] for name in ("gk", "gv", "lower_bound") if x.get(name) is not None}
    o, state = rule(
        q=x.q,
        k=x.k,
        v=x.v,
        scale=x.scale,
        initial_state=x.state,
        output_final_state=x.output_final_state,
        use_qk_l2norm_in_kernel=x.qk_norm,
        cu_seqlens=x.cu_seqlens,
        **more,
    )
    return o, state


def chosen(x: Inputs, option: str) -> bool:
    """Whether the call has this option of the adapter's domain."""
    return bool(x.get("options", {}).get(option) == "yes")


def given_options(x: Inputs, chunk: int) -> dict[str, Any]:
    """The arguments of a rule or convolution for the options of a call, without the order of a state's axes.

    FLA computes cu_seqlens_cpu and chunk_indices itself if a caller does not.
    """
    more: dict[str, Any] = {"disable_recompute": True} if chosen(x, "disable_recompute") else {}
    if x.cu_seqlens is not None and chosen(x, "cu_seqlens_cpu"):
        more["cu_seqlens_cpu"] = x.cu_seqlens.cpu()
    if x.cu_seqlens is not None and chosen(x, "chunk_indices"):  # for every chunk, its sequence and its number in the sequence
        chunks = [-(-length // chunk) for length in x.cu_seqlens.diff().tolist()]
        pairs = [(row, number) for row, count in enumerate(chunks) for number in range(count)]
        more["chunk_indices"] = x.cu_seqlens.new_tensor(pairs).reshape(-1, 2)
    return more


def v_first(rule: Any, x: Inputs, place: str, **more: Any) -> tuple[Tensor, Tensor | None]:
    """Like `call`, but the rule, which is found at `place`, gets and returns states as [N, HV, V, K]. They are transposed here."""
    turned = x.replaced(state=None if x.state is None else x.state.mT.contiguous())
    o, state = call(rule, turned, **{_parameter(place, "state_v_first", "transpose_state_layout"): True}, **more)
    return o, None if state is None else state.mT
