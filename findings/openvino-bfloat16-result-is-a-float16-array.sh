#!/bin/sh
# openvino 2026.4.1: a bfloat16 result comes back as a float16 array of the same bits.
#
# A model converts 1.0, 2.0 and 3.0 to bfloat16 and returns them. The output says bfloat16, and the
# array that the call returns says float16: 1.875, 2.0, 2.125. The bits are right (0x3f80, 0x4000,
# 0x4040), so a view as bfloat16 restores the numbers. The wrong ones are plausible, and nothing is
# said.
#
# Seen on 27 November 2026 with Python 3.11 and numpy 2.4.6, CPU plugin.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q openvino==2026.4.1 numpy==2.4.6
cat > convert.py <<'END'
import numpy as np
import openvino
from openvino import opset13 as op

x = op.parameter([3], np.float32, name="x")
compiled = openvino.Core().compile_model(openvino.Model([op.convert(x, "bf16")], [x], "convert"), "CPU")
result = compiled({"x": np.array([1, 2, 3], np.float32)})[compiled.output(0)]
bits = [hex(number) for number in result.view(np.uint16).tolist()]
print(compiled.output(0).element_type.get_type_name(), result.dtype, result.tolist(), *bits)
END
environment/bin/python convert.py | tee seen.txt
grep -qxF 'bf16 float16 [1.875, 2.0, 2.125] 0x3f80 0x4000 0x4040' seen.txt
