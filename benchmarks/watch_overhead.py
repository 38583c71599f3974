"""The share of a training step's time that `verify.watch` takes: the same steps with and without it, in turns.

    python -m benchmarks.watch_overhead                    on a GPU: flash-linear-attention's chunk rule at the widths of Qwen3-Next
    python -m benchmarks.watch_overhead --device cpu       FLA's rule in plain torch, in small sizes

A step is the forward and the backward of the rule, and products of matrices until it takes about --step-ms.
"""

import argparse
import collections
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from verify import watch


def rule_of(device: str) -> Callable[..., Any]:
    """FLA's chunk rule on a GPU, where Triton runs, and elsewhere FLA's rule in plain torch."""
    if device == "cuda":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule  # type: ignore[no-any-return]
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    return naive_chunk_gated_delta_rule  # type: ignore[no-any-return]


def step_of(device: str, tokens: int, heads: tuple[int, int], width: int, step_ms: float) -> Callable[[Callable[..., Any]], float]:
    """A function that makes one training step with a rule, and returns its seconds. It takes about `step_ms`."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = {"q": (heads[0], width), "k": (heads[0], width), "v": (heads[1], width), "g": (heads[1],), "beta": (heads[1],)}
    x = {name: torch.randn(1, tokens, *sizes, device=device, dtype=dtype) for name, sizes in shape.items()}
    x |= {"g": -x["g"].float().abs(), "beta": x["beta"].sigmoid()}
    if device != "cuda":
        x |= {
            name: torch.nn.functional.normalize(x[name].repeat_interleave(heads[1] // heads[0], 2), dim=-1) for name in ("q", "k")
        }
    more = {"use_qk_l2norm_in_kernel": True} if device == "cuda" else {}
    leaves = {name: y.requires_grad_() for name, y in x.items()}
    square = torch.randn(4096 if device == "cuda" else 512, 4096 if device == "cuda" else 512, device=device, dtype=dtype)
    products = 0

    def step(rule: Callable[..., Any]) -> float:
        start = time.perf_counter()
        o, _ = rule(**leaves, **more)
        y = square
        for _ in range(products):
            y = (y @ square) * 0.01
        o.sum().backward()
        for leaf in leaves.values():
            leaf.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    rule = rule_of(device)
    for _ in range(3):
        step(rule)
    alone = statistics.median(step(rule) for _ in range(5))
    products = 20
    twenty = statistics.median(step(rule) for _ in range(5)) - alone
    products = max(0, int((step_ms / 1e3 - alone) / max(twenty / 20, 1e-6)))
    return step


def main() -> None:
    """Print the seconds of a step with and without watch, and the share that watch says it takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--heads", type=int, nargs=2, help="key heads and value heads")
    parser.add_argument("--width", type=int)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--statistics", action="store_true")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    sizes = (options.tokens or (8192 if gpu else 512), options.heads or ((16, 32) if gpu else (2, 4)))
    step, rule = step_of(options.device, *sizes, options.width or (128 if gpu else 64), options.step_ms), rule_of(options.device)
    with tempfile.TemporaryDirectory() as out:
        watched: Any = watch(rule, every=options.every, out=out, share=options.share, statistics=options.statistics)
        taken = collections.defaultdict[str, list[float]](list)
        begin = time.monotonic()
        while time.monotonic() - begin < options.seconds:
            for name, function in (("without", rule), ("with", watched)):
                taken[name] += [step(function) for _ in range(10)]
        watched.watcher.close()
        report = watched.report()
    print(f"{torch.cuda.get_device_name() if gpu else 'CPU'}, tokens {sizes[0]}, heads {sizes[1]}")
    for name, seconds in taken.items():
        mean, median = 1e3 * statistics.fmean(seconds), 1e3 * statistics.median(seconds)
        print(
            f"step {name:<8} mean {mean:.3f} ms, median {median:.3f} ms, largest {1e3 * max(seconds):.1f} ms, {len(seconds)} steps"
        )
    means = {name: statistics.fmean(seconds) for name, seconds in taken.items()}
    print(f"share of the time: measured {means['with'] / means['without'] - 1:+.3%} of the steps with watch")
    print(f"by its own account {report['spent_s']:.3f} s, {report['spent_s'] / sum(taken['with']):.3%} of the steps with watch")
    print({name: report[name] for name in ("calls", "sampled", "written", "lost")})


if __name__ == "__main__":
    main()
