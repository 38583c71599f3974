#!/bin/sh
# onnxruntime 1.32.0, CPU: Sigmoid in float32 is right absolutely and not relatively, 0 from -18 on.
#
# sigmoid(-15) is 17% too large and sigmoid(-18) is 0, where 3.06e-7 and 1.52e-8 are right; float32
# has numbers down to 1e-38. Softplus, which is nearly the same number there, is right in the same
# release. A forget gate or a beta that is made with Sigmoid is then 0 where a model has a small
# number, and its logarithm is minus infinity.
#
# Seen on 27 November 2026 with Python 3.11, onnx 1.23.2 and numpy 2.4.6.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > gates.py <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

x = np.array([-5, -10, -15, -18], np.float32)


def run(operator):
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [len(x)])
    wanted = helper.make_tensor_value_info("y", TensorProto.FLOAT, [len(x)])
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "gate", [given], [wanted])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0].astype(np.float64)


wide = x.astype(np.float64)
for name, got, right in (("Sigmoid", run("Sigmoid"), 1 / (1 + np.exp(-wide))), ("Softplus", run("Softplus"), np.log1p(np.exp(wide)))):
    print(name, *(f"{relative:.0e}" for relative in np.abs(got / right - 1)))
END
environment/bin/python gates.py | tee seen.txt
grep -q '^Sigmoid .* 2e-01 1e+00$' seen.txt
grep -Eq '^Softplus .* [0-9]e-0[78] [0-9]e-0[78]$' seen.txt
