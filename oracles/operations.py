"""Every operation by name."""

from oracles.conv import CAUSAL_CONV1D
from oracles.decode import DECODE
from oracles.gates import GDN_GATE, KDA_GATE
from oracles.layer import GDN_LAYER, KDA_LAYER
from oracles.norm import GATED_RMS_NORM, L2NORM, NORM_GATE_LINEAR
from oracles.operation import Operation
from oracles.rule.gated_delta import DELTA_RULE, GATED_DELTA_RULE, KDA
from oracles.serving import SERVING

RULES = {operation.name: operation for operation in (GATED_DELTA_RULE, DELTA_RULE, KDA)}  # the operations of Case
OPERATIONS: dict[str, Operation] = RULES | {
    operation.name: operation
    for operation in (
        DECODE,
        CAUSAL_CONV1D,
        GDN_GATE,
        KDA_GATE,
        L2NORM,
        GATED_RMS_NORM,
        NORM_GATE_LINEAR,
        GDN_LAYER,
        KDA_LAYER,
        SERVING,
    )
}
