#!/bin/sh
# torch 2.13.0: bool(x.isnan().any()) of a DTensor says on each rank what holds for this rank's shard.
#
# DTensor promises the abstraction of a single device. A tensor of four numbers lies on two ranks, and
# rank 1 has a NaN. any() and sum() return pending reductions, of which bool(), float() and item()
# read the local part, silently: rank 0 finds no NaN, and the sum is 3 there. But bool(x.sum() == 10)
# and torch.equal(x, y) are right on both ranks. torch.testing.assert_close(x, y) compares the shards
# of its rank. So a test that reports what rank 0 finds, passes. full_tensor() makes all of them right.
#
# Seen on 28 November 2026 with Python 3.11 and gloo on a CPU.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > shards.py <<'END'
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def close(x, y):
    try:
        torch.testing.assert_close(x, y)
    except AssertionError:
        return False
    return True


def work(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    x, y, nan = (distribute_tensor(torch.tensor([1.0, 2.0, 3.0, last]), mesh, [Shard(0)]) for last in (4.0, 9.0, torch.nan))
    found = bool(nan.isnan().any()), bool(nan.isnan().any().full_tensor())
    sums = float(x.sum()), x.sum().full_tensor().item(), bool(x.sum() == 10)
    with open(f"rank-{rank}", "w") as file:
        print(f"rank {rank}: NaN {found}, sum {sums}, equal {torch.equal(x, y)}, close {close(x, y)}", file=file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.spawn(work, args=(__file__ + ".store",), nprocs=2)
END
environment/bin/python shards.py 2> errors.txt
cat rank-0 rank-1 | tee seen
cat > expected <<'END'
rank 0: NaN (False, True), sum (3.0, 10.0, True), equal False, close True
rank 1: NaN (True, True), sum (7.0, 10.0, True), equal False, close False
END
cmp seen expected
