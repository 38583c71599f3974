"""Plants races in flash-linear-attention's kernels and answers, in a worker, with the verdict and first finding of a run of each.

Under "right" stand the same runs with the kernels as they are; under "same" a case of each adapter that differs between both
interpreters, if it does.
"""

import contextlib
import importlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

from properties.books import book_of
from verify.adapters.base import Adapter
from verify.adapters.fla import core
from verify.adapters.loader import load
from verify.bench.adapter_bench import AdapterBench
from verify.engine.drawing import seeded
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.interpreter import install, patches

install()

RULE = (
    "law=oracle adapter=fla/chunk lengths=3+70 packed=yes heads=1 value_heads=2 key_dim=40 value_dim=80 gate=64 state=random seed=5"
)
LARGE = RULE.replace("key_dim=40", "key_dim=136")
CONV = "law=oracle adapter=fla/conv lengths=150 op=causal_conv1d width=40 conv_width=4 oldest=no seed=5"
UPDATE = "law=oracle adapter=fla/conv_update lengths=1+1+1 op=causal_conv1d width=40 conv_width=4 state=random backward=no seed=5"
NORM = "law=oracle adapter=fla/gated_norm lengths=90 op=gated_rms_norm heads=4 width=40 seed=5"
OUTPUT, STATE, WY = "fla.ops.common.chunk_o", "fla.ops.common.chunk_delta_h", "fla.ops.gated_delta_rule.wy_fast"

# A run, the module and name of a kernel, what stands there, what is put in its place, and the argument whose bytes are then shared.
RACES = {
    "heads share their outputs": (
        RULE, OUTPUT, "chunk_fwd_kernel_o",
        "o += (bos * HV + i_h) * V",
        "o += bos * HV * V", "o"),
    "key blocks share their gate gradients": (
        LARGE, OUTPUT, "chunk_bwd_kernel_dqkwg",
        "dg += i_k * all * HV",
        "dg += 0", "dg"),
    "value blocks share their states": (
        RULE, STATE, "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "p_h1 = h + i_t_int64 * HV*K*V + o_k1[:, None] * V + o_v[None, :]",
        "p_h1 = h + i_t_int64 * HV*K*V + o_k1[:, None] * V + (o_v - i_v * BV)[None, :]", "h"),
    "heads share their states": (
        RULE, STATE, "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "h += (boh * HV + i_h)",
        "h += (boh * HV)", "h"),
    "key heads share what value heads own": (
        RULE, WY, "recompute_w_u_fwd_kernel",
        "p_w = w + (bos*HV + i_h) * K",
        "p_w = w + (bos*HV + i_h // (HV // H)) * K", "w"),
    "a chunk reads what the one before writes": (
        RULE, WY, "prepare_wy_repr_bwd_kernel",
        "b_dk += tl.load(p_dk, mask=m_k, other=0.0)",
        "b_dk += tl.load(p_dk - BT * HV * K, mask=m_k & (i_t > 0), other=0.0)", "dk"),
    "a sum over blocks without its axis": (
        RULE + " in_kernel=gate", "fla.ops.gated_delta_rule.gate", "gdn_gate_bwd_kernel",
        "tl.store(dA + i_t * H + i_h, b_dA)",
        "tl.store(dA + i_h, b_dA)", "dA"),
    "blocks of tokens that overlap": (
        RULE + " qk_norm=yes", "fla.modules.norm.l2norm", "l2norm_fwd_kernel",
        "p_y = y + o_t[:, None] * D",
        "p_y = y + (o_t - i_t * (BT // 2))[:, None] * D", "y"),
    "a cumulative sum that every chunk writes": (
        RULE, "fla.ops.utils.cumsum", "chunk_local_cumsum_scalar_kernel",
        "p_o = o + bos*H + i_h + o_t * H",
        "p_o = o + bos*H + i_h + (o_t - i_t * BT) * H", "o"),
    "a gradient of weights that every block writes": (
        CONV, "fla.modules.causal_conv1d.ops", "causal_conv1d_bwd_kernel",
        "dw + i_tg * D*W",
        "dw + 0 * D*W", "dw"),
    "a gradient of a norm that every block writes": (
        NORM, "fla.modules.norm.fused_norm_gate", "layer_norm_gated_bwd_kernel",
        "tl.store(dw + i_s * D + o_d",
        "tl.store(dw + o_d", "dw"),
    "a grid with an axis too many": (
        UPDATE, "", "causal_conv1d_update_kernel",
        "",
        "", "cache"),
}  # fmt: skip


@contextlib.contextmanager
def edited(module: str, name: str, old: str, new: str) -> Iterator[None]:
    """A kernel with another source."""
    function = getattr(importlib.import_module(module), name)
    while not isinstance(function, InterpretedFunction):
        function = function.fn
    right, rewriter = function.rewrite(), function.rewriter
    source = rewriter._prepare_source(inspect.getsourcelines(function.fn)[0])
    assert old in source, (name, old)
    wrong = rewriter._compile_and_exec(rewriter._transform_ast(source.replace(old, new)))
    InterpretedFunction.rewritten_fn[function.fn] = wrong
    try:
        yield
    finally:
        InterpretedFunction.rewritten_fn[function.fn] = right


@contextlib.contextmanager
def with_an_axis_more(name: str) -> Iterator[None]:
    """A kernel launched on a grid that does everything twice."""
    plain = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.fn.__name__ == name:
            sizes = self.grid(kwargs) if callable(self.grid) else self.grid
            self.grid = (*sizes, *[1] * (2 - len(sizes)), 2)
        plain(self, *args, **kwargs)

    GridExecutor.__call__ = call
    try:
        yield
    finally:
        GridExecutor.__call__ = plain


def outcome(line: str) -> tuple[str, str]:
    """The verdict, and the first finding."""
    found = execute(Run.parse(line))
    return str(found.verdict), " ".join(f"{finding.what} ({finding.worst})" for finding in found.findings[:1]) or found.reason


def difference(spec: str, line: str) -> str:
    """A case of an adapter if its results are other bits in the other interpreter, or if its programs could not run together.

    Without a line for it the case is drawn.
    """
    adapter, runs = load(spec), list[Run]()
    assert isinstance(adapter, Adapter)
    law = book_of(adapter.domain).laws["oracle"]
    if line:
        runs.append(Run.parse(f"law=oracle adapter={spec} {line} seed=5"))
    else:
        seeded(law.draw(adapter.domain), 7, 8, lambda example: runs.append(Run("oracle", spec, example)))
    run = min(runs, key=lambda run: abs(run.example.case.bytes - SIZE))
    bits: list[list[torch.Tensor]] = []
    for how in ("grid", "sequential"):
        patches.sequential = how == "sequential"
        bits.append([])
        with seeing(bits[-1]):
            outcome = execute(run)
        if outcome.one_by_one:
            return f"{run} {outcome.one_by_one}"
    same = len(bits[0]) == len(bits[1]) > 0 and all(torch.equal(*pair) for pair in zip(*bits, strict=True))
    return "" if same else str(run)


@contextlib.contextmanager
def seeing(results: list[Any]) -> Iterator[None]:
    """The bits of everything that implementations return meanwhile."""
    plain = AdapterBench.call_implementation

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = plain(self, *args, **kwargs)
        results.extend(
            value.detach().contiguous().flatten().view(torch.uint8).clone() for value in answer.values() if value.numel()
        )
        return answer

    AdapterBench.call_implementation = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        AdapterBench.call_implementation = plain  # type: ignore[method-assign]


SIZE = 1 << 14  # bytes of the tensors of a case that is drawn, so that programs one after another take a quarter of a second
# Few tokens and narrow heads, of which each kernel of a rule has several programs: a case that is drawn would take seconds.
SMALL = "lengths=3+2 packed=yes heads=1 value_heads=2 key_dim=7 value_dim=10 state=random"
EVEN = SMALL.replace("heads=1 ", "heads=2 ")
ADAPTERS = {
    "chunk": f"{SMALL} qk_norm=yes in_kernel=both",
    "chunk_v_first": SMALL,
    "chunk_16": SMALL.replace("3+2", "18"),
    "fused_recurrent": f"{SMALL} backward=no",
    "chunk_kda": f"op=kda {EVEN} qk_norm=yes",
    "fused_recurrent_kda": f"op=kda {EVEN} backward=no",
    "chunk_delta_rule": f"op=delta_rule {EVEN} dtype=bf16",
    "fused_recurrent_delta_rule": f"op=delta_rule {EVEN} dtype=bf16",
    "conv": "", "conv_update": "", "gdn_gate": "op=gdn_gate lengths=33 beta=no", "kda_gate": "", "l2norm": "", "gated_norm": "",
    "decode": "",
    "layer": "op=gdn_layer lengths=2+3 packed=yes heads=1 value_heads=2 key_dim=4 value_dim=4 hidden=8 conv_width=2",
}  # fmt: skip


def answer(_: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = {"right": {}, "races": {}, "same": {}}
    core()
    for name, (line, module, kernel, old, new, _) in RACES.items():
        report["right"][line] = report["right"].get(line) or outcome(line)
        with edited(module, kernel, old, new) if module else with_an_axis_more(kernel):
            report["races"][name] = outcome(line)
    for name, line in ADAPTERS.items():
        report["same"][name] = difference(f"fla/{name}", line)
    return report
