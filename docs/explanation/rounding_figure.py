"""The worked example of rounding.md: one call in bfloat16, the tolerance of each row, a right kernel and a wrong one.

    python -m docs.explanation.rounding_figure

Run this in the root of a clone. It prints the numbers of the page and writes rounding.png beside this file, which needs matplotlib.
"""

import dataclasses
import pathlib

import torch
from torch import Tensor

from oracles.arithmetic.rounding import Arithmetic
from oracles.operation import Inputs
from oracles.operations import OPERATIONS
from oracles.tolerance.allowance import FLOOR_ULP, KAPPA, WINDOW
from oracles.tolerance.bound import RUNS, bounds

RULE = OPERATIONS["gated_delta_rule"]
TOKENS, CHUNK, WIDTH = 128, 64, 32
QUIET, QUIETER = 32, 128.0  # from this token on, values are so many times smaller
ULP = 2.0**-7  # the unit in the last place of bfloat16, for numbers in [1, 2)
ROW = CHUNK  # the token that the page follows: the first of the second chunk
RATIO = 0.005  # error / norm, both of the whole tensor: a common tolerance of kernel tests
PICTURE = pathlib.Path(__file__).with_name("rounding.png")


def call() -> Inputs:
    """One sequence and one head. Every number is a whole number over a power of two, so it is the same on every machine."""
    chance = torch.Generator().manual_seed(0)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=chance).double()

    q, k = (whole(-128, 128, 1, TOKENS, 1, WIDTH) / 512 for _ in range(2))
    v = whole(-128, 128, 1, TOKENS, 1, WIDTH) / 128
    v[:, QUIET:] /= QUIETER
    g = -whole(0, 128, 1, TOKENS, 1) / 512
    beta = whole(0, 128, 1, TOKENS, 1) / 128
    q, k, v, beta = (x.bfloat16() for x in (q, k, v, beta))
    return Inputs(q=q, k=k, v=v, g=g.float(), beta=beta, state=None, cu_seqlens=None, scale=None, qk_norm=False)


def kernel(x: Inputs, *, loses_state: bool = False) -> Tensor:
    """o [tokens, width] of a chunkwise kernel that stores what it multiplies in bfloat16.

    The wrong one (`loses_state`) does not read the state in the first token of a chunk.
    """

    def low(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    tokens = [x[name][0, :, 0].float() for name in ("q", "k", "v", "g", "beta")]
    state, rows = torch.zeros(WIDTH, WIDTH), []
    for q, k, v, g, beta in zip(*(tensor.split(CHUNK) for tensor in tokens), strict=True):
        total = g.cumsum(0)
        decay = (total[:, None] - total).tril().exp()
        corrections = (beta[:, None] * (k @ k.T) * decay).tril(-1)
        inverse = low(torch.linalg.inv(torch.eye(CHUNK) + corrections))
        grown = total.exp()[:, None]
        written = low(inverse @ low(beta[:, None] * v)) - low(inverse @ low(beta[:, None] * grown * k)) @ low(state)
        read = low(grown * q)
        if loses_state:
            read[0] = 0
        rows.append(WIDTH**-0.5 * (read @ low(state) + low((q @ k.T * decay).tril()) @ low(written)))
        state = total[-1].exp() * state + low((total[-1] - total).exp()[:, None] * k).T @ low(written)
    return torch.cat(rows).bfloat16().double()


@dataclasses.dataclass(frozen=True)
class Example:
    """Row by row, one a token: the truth, the error of each disturbed run, what follows from it, and the errors of two kernels."""

    truth: Tensor
    runs: Tensor
    mean_square: Tensor
    pooled: Tensor
    floor: Tensor
    allowed: Tensor
    right: Tensor
    wrong: Tensor

    @property
    def sigma(self) -> Tensor:
        """The error scale of each row."""
        return (self.mean_square / 2 + self.pooled / 2).sqrt()

    def of_the_tensor(self, errors: Tensor) -> float:
        """The error of the whole tensor, over the norm of the whole tensor."""
        return float(errors.norm() / self.truth.norm())


def example() -> Example:
    """The worked example. AssertionError if the page's formula does not give the tolerance that the oracle gives."""
    x = call()
    bound = bounds(RULE, x, None, "chunkwise", chunk=CHUNK)["o"]
    truth, allowed = bound.value[0, :, 0], bound.allowed[0, :, 0]
    arithmetic = dataclasses.replace(Arithmetic.of("chunkwise", "bf16"), runs=RUNS, first=1, chunk=CHUNK)
    several = {name: x[name].double().expand(RUNS, *x[name].shape) for name in ("q", "k", "v", "g", "beta")}
    disturbed = RULE.forward(x.replaced(**several), arithmetic)["o"][:, 0, :, 0]
    runs = (disturbed - truth).norm(dim=-1)
    mean_square = runs.square().mean(0)
    pooled = torch.nn.functional.avg_pool1d(mean_square[None], WINDOW, 1, WINDOW // 2, count_include_pad=False)[0]
    floor = FLOOR_ULP * ULP * truth.norm(dim=-1)
    errors = [(kernel(x, loses_state=loses) - truth).norm(dim=-1) for loses in (False, True)]
    result = Example(truth, runs, mean_square, pooled, floor, allowed, *errors)
    assert torch.allclose(torch.maximum(KAPPA * result.sigma, floor), allowed, rtol=1e-9)
    return result


def report(result: Example) -> list[str]:
    """The numbers of the page."""
    row = {
        "norm of the row": result.truth[ROW].norm(),
        **{f"error of disturbed run {number}": error for number, error in enumerate(result.runs[:, ROW], 1)},
        "root of mean_square: their root mean square": result.mean_square[ROW].sqrt(),
        f"pooled: root of the mean over {WINDOW} rows": result.pooled[ROW].sqrt(),
        "sigma": result.sigma[ROW],
        f"{KAPPA:g} sigma": KAPPA * result.sigma[ROW],
        "floor": result.floor[ROW],
        "tolerance": result.allowed[ROW],
        "error of the right kernel": result.right[ROW],
        "error of the wrong kernel": result.wrong[ROW],
    }
    lines = [f"token {ROW}"] + [f"  {what:<40} {float(value):.3g}" for what, value in row.items()]
    for name, errors in (("right", result.right), ("wrong", result.wrong)):
        over = (errors > result.allowed).nonzero().flatten().tolist()
        worst = float((errors / result.allowed).max())
        lines.append(f"{name} kernel: worst row {worst:.2f} of its tolerance; rows over: {over or 'none'}")
        lines.append(f"  error of the whole tensor {result.of_the_tensor(errors):.4f} (a tolerance of {RATIO} is common)")
    loud, quiet = result.allowed[:QUIET], result.allowed[CHUNK:]
    middle = [f"{float(part.median()):.3g}" for part in (loud, quiet)]
    return [*lines, f"median tolerance: {middle[0]} before token {QUIET}, {middle[1]} from token {CHUNK} on"]


def draw(result: Example, path: pathlib.Path = PICTURE) -> None:
    """The picture: what each row may err, and what two kernels err."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    tokens = range(TOKENS)
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        axes = figure.subplots()
        axes.plot(tokens, result.allowed, color="black", linewidth=1.8, label=f"tolerance of the row ({KAPPA:g} sigma)")
        axes.plot(tokens, result.runs.T, color="silver", linewidth=0.7, label=[f"the {RUNS} disturbed runs", *[None] * (RUNS - 1)])
        axes.plot(tokens, result.right, ".", color="tab:blue", markersize=4, label="right kernel")
        axes.scatter(ROW, float(result.wrong[ROW]), s=80, c="tab:red", marker="x", linewidths=2, label=f"wrong kernel, token {ROW}")
        alone = RATIO * float(result.truth.norm())
        axes.axhline(alone, color="tab:orange", linestyle="--", label=f"what {RATIO:.1%} of the whole tensor allows one row")
        axes.set_yscale("log")
        axes.set_xlabel("token")
        axes.set_ylabel("error of the row (2-norm)")
        axes.set_xlim(0, TOKENS - 1)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    """Print the numbers and write the picture."""
    result = example()
    print("\n".join(report(result)))  # noqa: T201
    draw(result)
    print(f"wrote {PICTURE.name}")  # noqa: T201


if __name__ == "__main__":
    main()
