"""The cost of an implementation's tokens, which decides how large the large cases of a check are (properties/sizes.py)."""

import dataclasses
import os
import sys

from verify.execution.execute import execute
from verify.execution.run import Run
from verify.process.choices import SEQUENTIAL

TIMES = 2  # the first run imports modules
# Seconds for a token. Plain torch takes 0.0001 s, loops over tokens 0.0005 s, and interpreted kernels 0.003 s. The longest cases
# take at most 20 s with these limits, and a case counts as a hang after 120 s.
DEAR, DEAR_INTERPRETED = 0.0025, 0.02


@dataclasses.dataclass(frozen=True)
class TokenCost:
    """What a token costs: "quick", "interpreted" (as costly as interpreted kernels) or "slow"; whether a crowd is affordable."""

    cost: str
    crowd: bool


def cost_of(run: Run) -> TokenCost:
    """Run a short case, and return what a token costs.

    A crowd is affordable if kernels are interpreted with all programs together. Plain torch has no grid that a crowd could exceed.
    """
    launches, alone = _launches()
    seconds = min(execute(run).kernel_s for _ in range(TIMES)) / max(1, run.example.case.tokens)
    more, more_alone = (after - before for before, after in zip((launches, alone), _launches(), strict=True))
    if seconds > DEAR_INTERPRETED:
        return TokenCost("slow", crowd=False)
    together = more > 0 and not more_alone and os.environ.get(SEQUENTIAL) != "sequential"
    return TokenCost("interpreted" if more or seconds > DEAR else "quick", together)


def _launches() -> tuple[int, int]:
    """The number of interpreted launches in this process so far, and of those whose programs could not run together."""
    launch = sys.modules.get("verify.interpreter.launch")  # imported only where kernels are interpreted
    return (sum(launch.launches.values()), sum(launch.one_by_one.values())) if launch else (0, 0)
