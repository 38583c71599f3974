"""Probes of collectives: how the ranks at hand add, and what becomes of NaN.

A probe takes `Reduce`, a function that runs a collective on the rows of a tensor, one row for each rank, and returns the results of
all ranks as rows. Every rank calls it with the same tensor.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from oracles.arithmetic.rounding import BITS
from verify.gpu.arithmetic.cards import Measure, share
from verify.gpu.arithmetic.probes import normal
from verify.ranks.collectives import Distributed

Reduce = Callable[[str, Tensor], Tensor]
Probe = Callable[[Reduce, int], Iterator[Measure]]
SIZES = (8, 4096)
REPEATS = 5
HOPS = "sums over ranks"


def between_processes(device: torch.device) -> Reduce:
    """The collectives of this process and the other ranks, which have joined a group."""
    comm = Distributed()

    def reduce(kind: str, rows: Tensor) -> Tensor:
        mine = rows[comm.rank].to(device)
        if kind == "max":
            result = mine.clone()
            dist.all_reduce(result, op=dist.ReduceOp.MAX)
        else:
            result = comm.all_reduce(mine) if kind == "all_reduce" else comm.reduce_scatter(mine)
        return comm.all_gather(result.unsqueeze(0)).cpu()

    return reduce


def added(reduce: Reduce, ranks: int) -> Iterator[Measure]:
    """Where all_reduce rounds, and whether its results are the same on all ranks and again."""
    name = f"all_reduce over {ranks} ranks"
    shares = []
    for size in SIZES:  # the exact sum rounds to another number than a sum that begins with the 1
        for holder in range(ranks):
            rows = torch.full((ranks, size), 2.0**-9)
            rows[holder] = 1.0
            want = rows.double().sum(0).to(torch.bfloat16)
            shares.append(share(reduce("all_reduce", rows.to(torch.bfloat16))[0] == want))
    yield Measure(f"{name}: bfloat16, 1 on rank 0, 1, ... rounded once", ", ".join(shares), None, HOPS)
    for kind, bits in (("bfloat16", BITS["bf16"]), ("float16", BITS["fp16"]), ("float32", BITS["fp32"])):
        dtype: torch.dtype = getattr(torch, kind)
        rows = normal(10, ranks, SIZES[-1] // ranks * ranks).to(dtype)
        got = [reduce("all_reduce", rows) for _ in range(REPEATS)]
        ranks_agree = "same on all ranks" if all(torch.equal(row, one[0]) for one in got for row in one) else "RANKS DIFFER"
        again = "repeats" if all(torch.equal(one, got[0]) for one in got) else "VARIES"
        yield Measure(f"{name}: {kind}", f"{ranks_agree}, {again}", "same on all ranks, repeats", HOPS)
        truth, terms = rows.double().sum(0), rows.double().abs().sum(0)
        off = float(((got[0][0].double() - truth).abs() / (2.0**-bits * terms)).max())
        yield Measure(f"{name}: {kind}, worst error in half units of the terms", off, ranks - 1.0, HOPS)
        yield Measure(f"{name}: {kind}, equal to one rounding", share(got[0][0] == truth.to(dtype)), None, HOPS)
        scattered = share(reduce("reduce_scatter", rows).flatten() == got[0][0])
        yield Measure(f"reduce_scatter over {ranks} ranks: {kind}, equal to all_reduce", scattered, None, HOPS)


def greatest(reduce: Reduce, ranks: int) -> Iterator[Measure]:
    """Whether the greatest value over ranks is NaN if one rank has NaN."""
    shares = []
    for holder in range(ranks):
        rows = torch.ones(ranks, SIZES[-1])
        rows[holder] = torch.nan
        shares.append(share(reduce("max", rows)[0].isnan()))
    yield Measure(f"all_reduce MAX over {ranks} ranks: NaN on rank 0, 1, ... kept", ", ".join(shares), None, HOPS)


EXCHANGES: dict[str, Probe] = {"all_reduce": added, "MAX": greatest}
