"""On a GPU: cases have the same bits there as on the CPU, and FLA's compiled chunkwise kernels stay within the bounds.

    python -m benchmarks.gpu --cases 60

Widths are fixed so that each dtype compiles once, and every kernel keeps its first autotune configuration. float32 inputs are multiplied in
TF32 on the device, so their bounds are those of TF32. Prints the greatest error in sigma by dtype and output; exit 1 if a bit or a bound
is broken, 3 without a GPU.
"""

import argparse
import collections
import itertools
import sys
import time

import torch
from hypothesis import strategies as st

from oracles.bound import KAPPA, bounds
from oracles.case import Case
from oracles.operation import GATED_DELTA_RULE, Inputs
from properties.domain import Domain
from properties.strategies import cases
from verify.check import seeded
from verify.judge import judge


def main() -> int:
    """Measure; 1 if a bit differs or a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60, help="a dtype and form")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was compared", file=sys.stderr)
        return 3
    import triton

    keep_first_configuration(triton)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    different = sum(not same_bits(case) for case in drawn(Domain(), 300))
    print(f"{different} of 300 cases have other bits on the device")
    alarms = 0
    for dtype, qk_norm in itertools.product(("bf16", "fp16", "fp32"), (False, True)):
        start, worst = time.monotonic(), collections.defaultdict(float)
        chosen = drawn(
            Domain(),
            options.cases,
            packed=True,
            groups=st.just((2, 4)),
            key_dim=64,
            value_dim=64,
            dtype=dtype,
            gate_dtype="fp32",
            state="random",
            qk_norm=qk_norm,
            longest=300,
            total=600,
        )
        for case in chosen:
            inputs, cotangents = case.inputs(), case.cotangents()
            there = Inputs(**{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()})
            got = run(chunk_gated_delta_rule, there, {name: x.cuda() for name, x in cotangents.items()})
            limits = bounds(GATED_DELTA_RULE, inputs, cotangents, "chunkwise", "tf32" if dtype == "fp32" else "ieee", 64)
            judged = judge(((name, got[name], limit) for name, limit in limits.items()), case)
            for name, ratio in judged.ratios.items():
                worst[name] = max(worst[name], ratio * KAPPA)
            if judged.findings:
                alarms += 1
                said = "; ".join(f"{f.output} {f.what} ({f.error:.3g} of {f.allowed:.3g})" for f in judged.findings)
                print(f"  alarm: {said}: {case}")
        line = "  ".join(f"{name} {value:.1f}" for name, value in worst.items())
        print(f"{dtype}{' l2norm' if qk_norm else '':<7} {len(chosen)} cases, {time.monotonic() - start:.0f} s, most sigma: {line}", flush=True)
    print(f"{alarms} alarms, bound at {KAPPA:g} sigma")
    return 1 if alarms or different else 0


def drawn(domain: Domain, count: int, **fixed: object) -> list[Case]:
    """Cases of the domain, with some fields fixed."""
    found: list[Case] = []
    seeded(cases(domain, **fixed), 3, count, lambda case: found.append(case) if case.tokens else None)  # type: ignore[arg-type]
    return found


def same_bits(case: Case) -> bool:
    """Whether the case's tensors are the same, bit for bit, made on the device."""
    here = {**case.inputs(), **case.cotangents()}
    there = {**case.inputs("cuda"), **case.cotangents("cuda")}
    return all(torch.equal(x, there[name].cpu()) for name, x in here.items() if isinstance(x, torch.Tensor))


def run(rule, x: Inputs, cotangents: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """Outputs and gradients of one call, on the CPU."""
    leaves = {name: x[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta", "state")}
    o, state = rule(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        g=leaves["g"],
        beta=leaves["beta"],
        scale=x.scale,
        initial_state=leaves["state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=x.qk_norm,
        cu_seqlens=x.cu_seqlens,
    )
    gradients = torch.autograd.grad([o, state], list(leaves.values()), list(cotangents.values()))
    names = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
    answers = {"o": o, "final_state": state, **dict(zip(names, gradients, strict=True))}
    return {name: value.detach().cpu() for name, value in answers.items()}


def keep_first_configuration(triton) -> None:  # type: ignore[no-untyped-def]
    """Autotuned kernels made from here on compile their first configuration only."""
    plain = triton.runtime.Autotuner.__init__

    def init(self, fn, arg_names, configs, *args, **kwargs):  # type: ignore[no-untyped-def]
        plain(self, fn, arg_names, configs[:1], *args, **kwargs)

    triton.runtime.Autotuner.__init__ = init


if __name__ == "__main__":
    sys.exit(main())
