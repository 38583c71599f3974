#!/bin/sh
# onnxruntime 1.32.0, CPU: a float16 value that is infinite as an output is not so for the next node.
#
# A model in float16 takes exp(x) and then log of it, and returns both. For x = 20 the first output
# is infinity, as it must be in float16, and its logarithm is 20. For x = 0.001 the logarithm of the
# output 1.001 is 0.000976, and 0.001 comes back. Nodes without a float16 kernel run in float32, and
# between two of them nothing is rounded, although the model gives the value the type float16. With
# all graph optimisations off, as here, it is the same. The evaluator of onnx itself rounds. So an
# output for watching does not show what the next node gets, and an overflow in float16 stays hidden.
#
# Seen on 28 November 2026 with Python 3.11, onnx 1.23.2 and numpy 2.4.6.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > watch.py <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

x, *outputs = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in "xyz")
nodes = [helper.make_node("Exp", ["x"], ["y"]), helper.make_node("Log", ["y"], ["z"])]
graph = helper.make_graph(nodes, "watched", [x], outputs)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
for name, runner in (("onnxruntime", session), ("onnx.reference", ReferenceEvaluator(model))):
    exponential, logarithm = runner.run(None, {"x": np.array([20, 0.001], np.float16)})
    print(name, "exp", *(f"{v:.4g}" for v in exponential), "log", *(f"{v:.3g}" for v in logarithm))
END
environment/bin/python watch.py 2> errors.txt | tee seen
cat > expected <<'END'
onnxruntime exp inf 1.001 log 20 0.001
onnx.reference exp inf 1.001 log inf 0.000976
END
cmp seen expected
