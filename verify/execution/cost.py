"""The cost of an implementation's tokens, which decides how large the large cases of a check are (properties/sizes.py)."""

import dataclasses
import os
import sys

from verify.execution.execute import execute
from verify.execution.run import Run

TIMES = 2  # the first run imports modules
# A case counts as a hang after 120 s. With the limits below, the largest cases (properties/sizes.py) take about 10 s at most, so
# they do not count as hangs on a busy machine.
# Seconds for a token. Plain torch takes 0.0001 s, a loop over tokens 0.0005 s, and interpreted kernels 0.003 s. A quick
# implementation gets up to 4,096 tokens, the others up to 1,030.
DEAR, DEAR_INTERPRETED = 0.002, 0.01
# Seconds for a token of one head, in an implementation that may loop over heads. A crowd has 66,560 of them.
DEAR_CROWD = 0.00015
SEQUENTIAL = "GDN_VERIFY_INTERPRETER"  # environment variable of workers: "sequential" runs one program after another


@dataclasses.dataclass(frozen=True)
class TokenCost:
    """What a token costs: "quick", "interpreted" (as costly as interpreted kernels) or "slow"; whether a crowd is affordable."""

    cost: str
    crowd: bool


def cost_of(run: Run) -> TokenCost:
    """Run a short case, and return what a token costs.

    A crowd is affordable if a loop over its sequences and heads would be fast enough, or if all programs of an interpreted launch
    run together.
    """
    case = run.example.case
    launches, alone = _launches()
    seconds = min(execute(run).kernel_s for _ in range(TIMES)) / max(1, case.tokens)
    more, more_alone = (after - before for before, after in zip((launches, alone), _launches(), strict=True))
    together = more > 0 and not more_alone and os.environ.get(SEQUENTIAL) != "sequential"
    crowd = together or (more == 0 and seconds / getattr(case, "value_heads", 1) <= DEAR_CROWD)
    if seconds > DEAR_INTERPRETED:
        return TokenCost("slow", crowd=False)
    return TokenCost("interpreted" if more or seconds > DEAR else "quick", crowd)


def _launches() -> tuple[int, int]:
    """The number of interpreted launches in this process so far, and of those whose programs could not run together."""
    launch = sys.modules.get("verify.interpreter.launch")  # imported only where kernels are interpreted
    return (sum(launch.launches.values()), sum(launch.one_by_one.values())) if launch else (0, 0)
