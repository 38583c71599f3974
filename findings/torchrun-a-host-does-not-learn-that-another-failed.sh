#!/bin/sh
# torch 2.13.0: of two hosts under torchrun, the one whose ranks end first reports success.
#
# Two launchers (--nnodes 2, one rank each) stand for two hosts. Rank 1 ends with 0 at once, and
# rank 0 ends with 3 after three seconds. The launcher of rank 0 ends with 1: the code 3 is lost. The
# launcher of rank 1 ends with 0, although the job failed. So a script that looks at the exit code on
# its own host takes a failed job for a success, unless every rank waits for the last one and then
# ends with the job's code.
#
# Seen on 27 November 2026 with Python 3.11 on a CPU: host 0 ends with 1, host 1 with 0.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > work.py <<'END'
import os
import sys
import time

if os.environ["RANK"] == "0":
    time.sleep(3)
    sys.exit(3)
END
port=$(environment/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
host() {
    environment/bin/python -m torch.distributed.run --nnodes 2 --node-rank "$1" --nproc-per-node 1 \
        --master-addr 127.0.0.1 --master-port "$port" work.py > "host-$1.txt" 2>&1
    echo "host $1 ends with $?" > "code-$1.txt"
}
(set +e; host 1) &
(set +e; host 0)
wait
cat code-0.txt code-1.txt
grep -qx 'host 0 ends with 1' code-0.txt && grep -qx 'host 1 ends with 0' code-1.txt
