"""Speed of the oracles: forward and backward at real lengths, beside the references that others use, and the cost of a bound.

    python -m benchmarks.oracles                    two cores: 4,096 tokens, 4 heads, K = V = 128
    python -m benchmarks.oracles --device cuda      one GPU: 65,536 and 131,072 tokens, Hk = 16, Hv = 32, K = V = 128

It prints tables of seconds (median and spread over runs, after one run of warm-up) and, on a GPU, of the memory beyond inputs and
gradients. The references of others compute in float32. They run at the case's lengths only if that does not take many minutes.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import records
from oracles.operation import Inputs
from oracles.rule.chunkwise import delta_rule
from oracles.tolerance.bound import MORE, RUNS, Bound, bounds, truth
from properties.rules.case import Case

Call = Callable[[], object]
# Columns of the recorded tolerances, and the calls that they are of (bound_cost). On a GPU the oracle's own run is not counted.
ON_A_CPU = {
    "chunkwise, one disturbed run": "of 1 runs, chunkwise",
    "chunkwise, four": "bound, chunkwise",
    "recurrent, one": "of 1 runs, recurrent",
    "recurrent, four": "bound, recurrent",
}
ON_A_GPU = {"chunkwise, four runs alone": "bound, chunkwise", "recurrent, four runs alone": "bound, recurrent"}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", help="write every row there, a line each")
    parser.add_argument("--only", choices=("peers", "lengths", "packed", "bounds"), action="append")
    options = records.options_of(parser)
    cuda = options.device == "cuda"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else f'{torch.get_num_threads()} CPU threads'}")
    rows: list[dict[str, Any]] = []
    for name, part in (("peers", peers), ("lengths", lengths), ("packed", packed), ("bounds", bound_cost)):
        if not options.only or name in options.only:
            before = len(rows)
            part(options.device, options.runs, rows)
            record(options, name, rows[before:])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def record(options: argparse.Namespace, part: str, rows: list[dict[str, Any]]) -> None:
    """Put the rows of a part into the file of --record."""
    if part == "peers":
        seconds: dict[str, records.Record] = {}
        for row in rows:
            memory = {"gib": round(row["gib"], 1)} if row["gib"] else {}
            name = f"{row['what']}, {row['tokens']:,} tokens"
            seconds[name] = {"value": row["median_s"], "unit": "s", "spread": row["spread_s"], **memory}
        records.put(options, "oracle", seconds, decimals=4)
    elif part == "packed":
        ratios = [many["median_s"] / one["median_s"] for one, many in zip(rows[::2], rows[1::2], strict=True)]
        what = "1,000 packed sequences of 8 to 130 tokens / one sequence of the same total"
        records.put(options, "packed", {what: {"value": [min(ratios), max(ratios)]}}, decimals=2)
    elif part == "bounds":
        columns, reference = (ON_A_CPU, 0.0) if options.device == "cpu" else (ON_A_GPU, 1.0)
        times = {(row["call"], row["name"]): row["times"] - reference for row in rows}
        calls = dict.fromkeys(row["call"] for row in rows)
        values = {call: {"value": {column: times[call, name] for column, name in columns.items()}} for call in calls}
        records.put(options, "tolerances", values, decimals=1)


def timed(call: Call, device: str, runs: int) -> tuple[float, float, float]:
    """The median and spread of a call's seconds, and the most GiB that it held beyond those held before."""
    return figures_of([once(call, device) for _ in range(runs + 1)])


def figures_of(rounds: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The median and spread of the seconds of all rounds but the first, and the most GiB of all rounds."""
    seconds = [duration for duration, _ in rounds[1:]]
    return statistics.median(seconds), max(seconds) - min(seconds), max(gib for _, gib in rounds)


def once(call: Call, device: str) -> tuple[float, float]:
    """The seconds of a call, and the most GiB that it held beyond those held before."""
    gib = 0.0
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
        result_bytes = sum(x.nbytes for x in result) if isinstance(result, tuple) else 0
        gib = (torch.cuda.max_memory_allocated() - before - result_bytes) / 2**30
    return time.perf_counter() - start, gib


def report(rows: list[dict[str, object]], what: str, tokens: int, figures: tuple[float, float, float], **more: object) -> None:
    """Add a row and print it at once."""
    median, spread, gib = figures
    rows.append({"what": what, "tokens": tokens, "median_s": median, "spread_s": spread, "gib": gib, **more})
    memory = f"  {gib:6.1f} GiB" if gib else ""
    print(f"  {what:<76} {tokens:>7} tokens  {median:8.4f} s  (spread {spread:.4f}){memory}", flush=True)


def inputs(tokens: int, heads: int, value_heads: int, width: int, device: str, rows: int = 1) -> list[Tensor]:
    """q, k, v, g, beta and state in float64, with unit keys and gates that remember about 64 tokens."""
    generator = torch.Generator(device).manual_seed(1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64, device=device)

    q, k = (torch.nn.functional.normalize(uniform(tokens, heads, width) - 0.5, dim=-1) for _ in range(2))
    v, g, beta = uniform(tokens, value_heads, width), uniform(tokens, value_heads, 1) / -32, uniform(tokens, value_heads)
    return [x.requires_grad_() for x in (q, k, v, g, beta, uniform(rows, value_heads, width, width))]


def both(x: list[Tensor], sizes: list[int]) -> tuple[Tensor, ...]:
    """The oracle's outputs and all gradients."""
    o, state = delta_rule(*x, x[0].shape[-1] ** -0.5, sizes)  # type: ignore[misc]
    return o.detach(), state.detach(), *torch.autograd.grad([o, state], x, [torch.ones_like(o), torch.ones_like(state)])


def peers(device: str, runs: int, rows: list[dict[str, object]]) -> None:
    """Measure the oracle and the references of FLA and transformers in one run, forward and backward."""
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    plain = torch_chunk_gated_delta_rule
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    cuda = device == "cuda"
    heads, value_heads = (16, 32) if cuda else (4, 4)
    print("forward and backward, K = V = 128, float64 oracle against float32 references")
    for tokens in (512, 4096, 65536, 131072) if cuda else (512, 4096):
        x = inputs(tokens, heads, value_heads, 128, device)
        report(rows, "gdn-verify oracle, float64", tokens, timed(lambda x=x, n=tokens: both(x, [n]), device, runs))
        del x
    for name, rule, tokens, dtype in (
        ("flash-linear-attention `naive_chunk_gated_delta_rule`, float32", naive_chunk_gated_delta_rule, 4096, torch.float32),
        ("transformers `torch_chunk_gated_delta_rule`, float32", plain, 4096, torch.float32),
        (
            "flash-linear-attention `naive_recurrent_gated_delta_rule`, float32",
            naive_recurrent_gated_delta_rule,
            512,
            torch.float32,
        ),
    ):
        q, k, v, g, beta, _ = inputs(tokens, value_heads, value_heads, 128, device)
        leaves = [y.detach().unsqueeze(0).to(dtype).requires_grad_() for y in (q, k, v, g.squeeze(-1), beta)]

        def call(rule=rule, leaves=leaves) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
            q, k, v, g, beta = leaves
            o = rule(q=q, k=k, v=v, g=g, beta=beta)[0] if "naive" in rule.__name__ else rule(q, k, v, g=g, beta=beta)[0]
            return torch.autograd.grad(o, leaves, torch.ones_like(o))

        report(rows, name, tokens, timed(call, device, runs))


def lengths(device: str, runs: int, rows: list[dict[str, object]]) -> None:
    """Measure the cost by length. A linear cost is a constant time per token."""
    heads, value_heads, width = (16, 32, 128) if device == "cuda" else (1, 2, 64)
    print(f"cost against length, Hk = {heads}, Hv = {value_heads}, K = V = {width}")
    for tokens in (1024, 4096, 16384, 65536, 131072):
        x = inputs(tokens, heads, value_heads, width, device)
        figures = timed(lambda x=x, n=tokens: both(x, [n]), device, runs)
        report(rows, f"{1e6 * figures[0] / tokens:.2f} us a token", tokens, figures)
        del x


def packed(device: str, runs: int, rows: list[dict[str, object]]) -> None:
    """Measure a thousand packed sequences, and one sequence with the same number of tokens."""
    heads, value_heads, width = (16, 32, 128) if device == "cuda" else (1, 2, 64)
    generator = torch.Generator().manual_seed(2)
    ragged = torch.randint(1, 131, (1000,), generator=generator).tolist()
    print(f"packed against whole, Hk = {heads}, Hv = {value_heads}, K = V = {width}")
    even = [(f"1,000 sequences of {length}", [length] * 1000) for length in (8, 16, 65)]
    for name, sizes in (*even, ("1,000 sequences of 1 to 130", ragged)):
        total = sum(sizes)
        many, one = inputs(total, heads, value_heads, width, device, rows=1000), inputs(total, heads, value_heads, width, device)
        report(rows, "one sequence", total, whole := timed(lambda: both(one, [total]), device, runs))  # noqa: B023
        report(rows, name, total, parts := timed(lambda: both(many, sizes), device, runs))  # noqa: B023
        print(f"  ratio {parts[0] / whole[0]:.2f}")


class Launches(TorchDispatchMode):
    """Counts operations but no views or allocations: about the number of kernel launches, though some operations take several."""

    plain = ("view", "_unsafe_view", "expand", "transpose", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes")
    plain += ("unbind", "detach", "permute", "alias", "as_strided", "diagonal", "empty", "new_empty", "empty_like")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        self.count += function.overloadpacket.__name__ not in self.plain
        return function(*args, **kwargs or {})


def launches(call: Call, device: str) -> str:
    """The number of launches of a call after its first, as text; empty on a CPU, where it does not decide the time."""
    if device == "cpu":
        return ""
    call()
    with Launches() as counted:
        call()
    return f", {counted.count} launches"


def bound_cost(device: str, runs: int, rows: list[dict[str, object]]) -> None:
    """Measure the tolerance and the truth alone, on cases as they are drawn.

    On a CPU the tolerance of one disturbed run is measured too, on a GPU those of more runs. All are timed alternately, and the
    ratio to the truth is the median of the ratios of each round, because a host's speed changes over time.
    """
    print(f"cost of a bound ({RUNS} disturbed runs and the exact one) beside the truth alone, in turn")
    for line in (
        "lengths=130 heads=2 value_heads=4 key_dim=32 value_dim=32 dtype=bf16 gate=64",
        "lengths=512 heads=2 value_heads=4 key_dim=64 value_dim=64 dtype=bf16 gate=64",
        "lengths=512 heads=2 value_heads=4 key_dim=128 value_dim=128 dtype=fp32 gate=64",
    ):
        case = Case.parse(line)
        x, cotangents = case.inputs(device), case.cotangents(device)
        calls = {"truth": functools.partial(truth, case.spec, x, cotangents)}
        for algorithm in ("chunkwise", "recurrent"):
            calls |= {f"{name}, {algorithm}": call for name, call in looks(case, x, cotangents, algorithm, device).items()}
        rounds = [{name: once(call, device) for name, call in calls.items()} for _ in range(runs + 1)]
        for name, call in calls.items():
            figures, note = figures_of([measurement[name] for measurement in rounds]), launches(call, device)
            times = statistics.median(measurement[name][0] / measurement["truth"][0] for measurement in rounds[1:])
            what = f"{name}, K = V = {case.key_dim} {case.dtype}"
            if name != "truth":
                what = f"{name}: {times:.1f} times the truth, its runs {times - 1:.1f}"
            call_name = f"{case.tokens} tokens, K = V = {case.key_dim}, {case.dtype}"
            report(rows, what + note, case.tokens, figures, call=call_name, name=name, times=times)


def looks(case: Case, x: Inputs, cotangents: dict[str, Tensor], algorithm: str, device: str) -> dict[str, Call]:
    """The calls that a judge may make: the tolerance, and also that of one disturbed run on a CPU, or of more runs on a GPU."""

    def make(first: int | None) -> dict[str, Bound]:
        return bounds(case.spec, x, cotangents, algorithm, chunk=64, first=first)

    counts = (1,) if device == "cpu" else MORE
    return {"bound": lambda: make(None), **{f"of {count} runs": functools.partial(make, count) for count in counts}}


if __name__ == "__main__":
    sys.exit(main())
