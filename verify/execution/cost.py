"""The cost of an implementation's tokens, which decides how long the long cases of a check are (properties/sizes.py)."""

import sys

from verify.execution.execute import execute
from verify.execution.run import Run

TIMES = 2  # the first run imports modules
# Seconds for a token. Plain torch takes 0.0001 s, and interpreted kernels take 0.003 s. The limits are far from both, so a busy
# machine does not change the cost.
DEAR, DEAR_INTERPRETED = 0.005, 0.05


def cost_of(run: Run) -> str:
    """Run a short case, and return "quick", "interpreted" (as costly as interpreted kernels) or "slow"."""
    before = _launches()
    seconds = min(execute(run).kernel_s for _ in range(TIMES)) / max(1, run.example.case.tokens)
    if seconds > DEAR_INTERPRETED:
        return "slow"
    return "interpreted" if _launches() > before or seconds > DEAR else "quick"


def _launches() -> int:
    """The number of interpreted launches in this process, so far."""
    launch = sys.modules.get("verify.interpreter.launch")  # imported only where kernels are interpreted
    return sum(launch.launches.values()) if launch else 0
