#!/bin/sh
# torch 2.13.0, gloo: all_reduce of equal elements gives two different values, and MAX loses a NaN.
#
# Four processes sum bfloat16 tensors with all_reduce. Process 0 has 1.0 everywhere and the others
# 0.00257568359375, so every element has the same four addends. Half of the elements become
# 1.0078125 and half 1.0: each piece of a tensor is added in another order, and the partial sum is
# rounded at each hop. For the same reason a maximum of NaN and 1.0 is NaN only where the NaN comes
# last: a quarter of the elements. So a gradient sum depends on where an element lies, and MAX over
# processes is no test for NaN. All processes hold the same bits, and nothing is said.
#
# Seen on 27 November 2026 with Python 3.11 on a CPU: 2048 of 4096, and 1024 of 4096.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > reduce.py <<'END'
import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def work(rank, size, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    x = torch.full((4096,), 1.0 if rank == 0 else 0.00257568359375, dtype=torch.bfloat16)
    dist.all_reduce(x)
    y = torch.full((4096,), float("nan") if rank == 0 else 1.0)
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    if rank == 0:
        values, counts = x.unique(return_counts=True)
        print(f"sum {dict(zip(values.tolist(), counts.tolist()))}, NaN in {int(y.isnan().sum())} of 4096", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.spawn(work, args=(4, __file__ + ".store"), nprocs=4)
END
environment/bin/python reduce.py 2> errors.txt | tee seen.txt
grep -qx 'sum {1.0: 2048, 1.0078125: 2048}, NaN in 1024 of 4096' seen.txt
