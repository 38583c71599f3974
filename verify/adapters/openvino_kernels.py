"""The adapter of OpenVINO's internal operation GatedDeltaNet on its CPU plugin. It adapts dtypes only.

Models contain the operation where OpenVINO has recognised their loop. It is in no opset, so the plugin has to be named.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from oracles.operation import Inputs
from properties.rules.domain import Domain
from verify.adapters.array_adapter import ArrayAdapter

TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@functools.lru_cache(256)
def compiled(dtype: str, norm: bool, eps: float) -> Any:  # noqa: FBT001 - one key of a cache
    """The operation with inputs of one dtype, q, k, v, state, g and beta, and of any sizes."""
    import openvino
    from openvino.utils.node_factory import NodeFactory

    factory = NodeFactory("opset15")
    factory.add_extension(os.path.join(os.path.dirname(openvino.__file__), "libs", "libopenvino_intel_cpu_plugin.so"))
    kind = getattr(openvino.Type, TYPES[dtype])
    inputs = [openvino.op.Parameter(kind, openvino.PartialShape([-1] * rank)) for rank in (4, 4, 4, 4, 3, 3)]
    options = {"fuse_qk_l2norm": norm, "q_l2_norm_eps": eps, "k_l2_norm_eps": eps}
    node = factory.create("GatedDeltaNet", [x.output(0) for x in inputs], options)
    return openvino.Core().compile_model(openvino.Model(node.outputs(), inputs), "CPU")


class GatedDeltaNet(ArrayAdapter):
    """GatedDeltaNet, whose inputs, state and outputs have one dtype. It normalises with an eps of its own choice, and scales."""

    library = "numpy"
    algorithm = "recurrent"
    requires: ClassVar[dict[str, str]] = {"openvino": "2026.4.1", "ml_dtypes": "0.5"}
    absent: ClassVar[Mapping[str, float]] = {"state": 0.0}
    domain = Domain(
        gate_dtypes=("input",),
        state_dtypes=("input",),
        final_dtype="input",
        scales=("default",),
        qk_norm_eps=("1e-6", "1e-12", "1e-5"),
        packed=False,
        backward=False,
    )

    def compute(self, x: Inputs) -> Sequence[Any]:
        import ml_dtypes
        import numpy as np
        import openvino

        dtype = x.q.dtype
        bits = np.dtype(np.float16) if dtype == ml_dtypes.bfloat16 else dtype  # how OpenVINO's arrays have bfloat16
        request = compiled(dtype.name, x.qk_norm, x.qk_norm_eps).create_infer_request()
        arrays = [np.ascontiguousarray(y.astype(dtype)).view(bits) for y in (x.q, x.k, x.v, x.state, x.g, x.beta)]
        request.infer([openvino.Tensor(y, y.shape, getattr(openvino.Type, TYPES[dtype.name])) for y in arrays])
        return tuple(output.data.view(dtype) for output in request.output_tensors)
