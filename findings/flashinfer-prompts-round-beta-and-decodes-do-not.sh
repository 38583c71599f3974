#!/bin/sh
# FlashInfer 0.7.4, CPU: its references round beta to bfloat16 for a prompt and not for a decoded token.
#
# flashinfer/trace/templates/gdn.py defines what the GDN kernels compute. Both references get beta as a
# logit in bfloat16, here -4. For a prompt of one token, beta is the sigmoid rounded to bfloat16; for a
# decoded token it stays in float32. From the same inputs and a state of zeros, the two float32 states
# differ by a factor of 0.9977. So a request that is computed again as a prompt gets another state. And
# in both references, a scale of 0 means 1 / sqrt(K), so that outputs are not zeros.
#
# Seen on 30 November 2026 with Python 3.11.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6 einops==0.8.2 packaging==26.4 \
    apache-tvm-ffi==0.1.15.post2 click==8.5.1 nvidia-ml-py==13.615.71 requests==2.34.2 tabulate==0.10.0 tqdm==4.70.1
environment/bin/pip install -q --no-deps flashinfer-python==0.7.4
cat > beta.py <<'END'
import torch
from flashinfer.trace.templates.gdn import _gdn_decode_reference, _gdn_prefill_gates_reference

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 128, dtype=torch.bfloat16)
A_log, dt_bias, zeros = torch.zeros(1), torch.zeros(1), torch.zeros(1, 1, 128, 128)
a, b = torch.zeros(1, 1, dtype=torch.bfloat16), torch.full((1, 1), -4.0, dtype=torch.bfloat16)


def prompt(scale):
    gates = {"use_gate_in_kernel": True, "beta_is_logit": True, "output_final_state": True}
    return _gdn_prefill_gates_reference(q, k, v, zeros, A_log, a, dt_bias, b, torch.tensor([0, 1]), scale, **gates)


def decode(scale):
    return _gdn_decode_reference(q[None], k[None], v[None], zeros, A_log, a[None], dt_bias, b[None], scale)


ratio = (prompt(None)[1] / decode(None)[1]).median().item()
print(f"state of a prompt over that of a decoded token: {ratio:.4f}")
print(f"beta in bfloat16 over beta in float32: {(b.float().sigmoid().bfloat16() / b.float().sigmoid()).item():.4f}")
print(f"largest output with scale 0: {prompt(0.0)[0].abs().max().item():.4f} and {decode(0.0)[0].abs().max().item():.4f}")
END
environment/bin/python beta.py | tee seen.txt
grep -q '^state of a prompt over that of a decoded token: 0.9977' seen.txt
grep -q '^beta in bfloat16 over beta in float32: 0.9977' seen.txt
grep -q '^largest output with scale 0: 0.0[0-9]* and 0.0[0-9]*$' seen.txt && ! grep -q 'scale 0: 0.0000' seen.txt
