"""A fork server imports this module. It does once what each worker would do in its first case, 0.1 s of CPU time.

torch starts no threads here, because workers and their server have OMP_NUM_THREADS=1. A forked process would lack them.
"""

import verify.execution.service  # noqa: F401 - what workers run
from oracles.arithmetic import grids
from verify.reach import lines

grids.prepare()
lines.prepare()
