#!/bin/sh
# onnx 1.23.2 with numpy 2.4.6: its reference evaluator adds bfloat16 numbers in bfloat16.
#
# The mean of 5,000 ones is 0.0513 and their sum 256, where float16 gives 1 and 5,000. The evaluator
# calls NumPy's reductions, which know float16 and add it with wider sums in blocks. bfloat16 comes
# from ml_dtypes, whose addition NumPy repeats one number at a time, and 256 + 1 rounds to 256. So a
# mean of squares, as in an RMS norm, is wrong in the reference from 257 channels on. A product of
# matrices is right.
#
# Seen on 30 November 2026 with Python 3.11 and ml_dtypes 0.6.0.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q onnx==1.23.2 numpy==2.4.6 ml_dtypes==0.6.0
cat > sums.py <<'END'
import ml_dtypes
import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def answer(op, kind, *inputs, **attributes):
    names = [f"x{place}" for place in range(len(inputs))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)],
        "one",
        [helper.make_tensor_value_info(name, kind, x.shape) for name, x in zip(names, inputs)],
        [helper.make_tensor_value_info("y", kind, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    return ReferenceEvaluator(model).run(None, dict(zip(names, inputs)))[0]


for kind, dtype in ((TensorProto.FLOAT16, np.float16), (TensorProto.BFLOAT16, ml_dtypes.bfloat16)):
    ones = np.ones(5000, dtype)
    for op in ("ReduceSum", "ReduceMean", "ReduceSumSquare"):
        print(np.dtype(dtype).name, op, f"{float(answer(op, kind, ones, keepdims=0)):.3g}")
    print(np.dtype(dtype).name, "MatMul", f"{float(answer('MatMul', kind, ones[None], ones[:, None])[0, 0]):.3g}")
END
environment/bin/python sums.py | tee seen
cat > expected <<'END'
float16 ReduceSum 5e+03
float16 ReduceMean 1
float16 ReduceSumSquare 5e+03
float16 MatMul 5e+03
bfloat16 ReduceSum 256
bfloat16 ReduceMean 0.0513
bfloat16 ReduceSumSquare 256
bfloat16 MatMul 4.99e+03
END
cmp seen expected
