#!/bin/sh
# torch 2.13.0: all_reduce and broadcast of a column over gloo take the first row instead.
#
# dist.all_reduce(x[:, 0]) of a contiguous matrix x [2, 2] should add the ranks' columns in place. Over
# gloo it takes as many numbers as the column has, in the order of memory from where the column begins:
# the first row. The column keeps its second number, a number beside it changes, and nothing is raised.
# dist.broadcast(y[:, 0]) does the same. So a gradient that is a view into a larger buffer, such as some
# columns of a fused weight, is not summed over the ranks, and its neighbours are.
#
# Seen on 29 November 2026 with Python 3.11 on a CPU, two processes: [[102, 120], [2, 20]] on rank 0
# after the sum, where the column should be [102, 104], and [[1, 10], [102, 120]] on rank 1 after the
# broadcast, where it should be [1, 2].
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > column.py <<'END'
import sys

import torch
import torch.distributed as dist

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
x = torch.tensor([[1.0, 10.0], [2.0, 20.0]]) + 100 * rank
dist.all_reduce(x[:, 0])
y = torch.tensor([[1.0, 10.0], [2.0, 20.0]]) + 100 * rank
dist.broadcast(y[:, 0], src=0)
print("rank", rank, "all_reduce", x.int().tolist(), "broadcast", y.int().tolist(), flush=True)
dist.barrier()
dist.destroy_process_group()
END
environment/bin/python column.py 1 "$folder/meeting" > one.txt &
environment/bin/python column.py 0 "$folder/meeting" > zero.txt
wait
cat zero.txt one.txt
grep -qF 'rank 0 all_reduce [[102, 120], [2, 20]]' zero.txt
grep -qF 'broadcast [[1, 10], [102, 120]]' one.txt
