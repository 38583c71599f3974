"""Decides from the stacks of a group's ranks which rank hung, and which ranks only waited in a collective."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import torch

from verify.process.outcome import rank_names
from verify.process.stacks import Frame, Mark, frames, in_implementation
from verify.process.worker import TAIL_CHARACTERS, WorkerLost
from verify.ranks.merge import by_rank

_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where a rank is.

    `frame` is the innermost frame, or, in a collective, the frame that called it. `collective` is the name of the collective, or
    "". `wrote` is the text that the stacks were read from.
    """

    frame: Frame | None
    collective: str
    stack: tuple[Frame, ...]
    wrote: str = dataclasses.field(compare=False)

    @classmethod
    def of(cls, wrote: str) -> "Standing":
        """The place that the stacks in `wrote` show."""
        stack = tuple(frames(wrote))
        inner = list(stack)
        while inner and _in_torch(inner[0]) and not _communicates(inner[0]):
            inner.pop(0)  # a collective may wait in torch.cuda
        if not (inner and _communicates(inner[0])):
            return cls(stack[0] if stack else None, "", stack, wrote)
        caller = next((frame for frame in inner if not _communicates(frame) and not _in_torch(frame)), None)
        return cls(caller, inner[0].function, stack, wrote)

    @property
    def oracle(self) -> bool:
        """Whether the rank waits for the oracle. Its stack may then stay the same while a process beside it works."""
        return any(frame.mark is Mark.ORACLE for frame in self.stack)

    def __str__(self) -> str:
        if self.collective:
            return f"in {self.collective}" + (f", called by {self.frame}" if self.frame else "")
        return f"in {self.frame}" if self.frame else "at an unknown place"


def _in_torch(frame: Frame) -> bool:
    return frame.file.startswith(_TORCH) or "/site-packages/torch/" in frame.file


def _communicates(frame: Frame) -> bool:
    return frame.mark is Mark.COLLECTIVE or (_in_torch(frame) and "/torch/distributed/" in frame.file)


def waiting(places: Mapping[int, Standing]) -> str:
    """What ranks without an answer do: "ranks 0, 2 wait in all_to_all_single; rank 3 is in f (kernel.py:7)"."""
    waits: dict[str, list[int]] = {}
    for rank, place in places.items():
        if place.collective:
            waits.setdefault(place.collective, []).append(rank)
    words = [f"{rank_names(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {name}" for name, ranks in waits.items()]
    return "; ".join([*words, *(f"rank {rank} is {place}" for rank, place in places.items() if not place.collective)])


def hung(places: Mapping[int, Standing], answered: Sequence[int], deadline_s: float) -> WorkerLost:
    """The WorkerLost for ranks that did not answer in time. Ranks outside any collective are to blame; without any, all are."""
    culprits = {rank: place for rank, place in places.items() if not place.collective} or places
    late = f"{rank_names(culprits)} hung: no answer within {deadline_s:g} s"
    if len(culprits) == 1:
        words = [f"{late}, {next(iter(culprits.values()))}"]
    else:
        words = [late, by_rank({rank: str(place) for rank, place in culprits.items()}, " ")]
    if victims := {rank: place for rank, place in places.items() if rank not in culprits}:
        words.append(waiting(victims))
    if answered:
        words.append(f"{rank_names(answered)} {'have' if len(answered) > 1 else 'has'} answered")
    tail = "\n".join(f"rank {rank}:\n{place.wrote[-TAIL_CHARACTERS:]}" for rank, place in {**culprits, **places}.items())
    in_kernel = any(place.frame is None or in_implementation(place.wrote) for place in culprits.values())
    return WorkerLost("hung", "; ".join(words), tail, in_kernel=in_kernel)


def crashed(lost: Mapping[int, WorkerLost]) -> WorkerLost:
    """The WorkerLost for ranks that were found dead at the same time."""
    if any(loss.how == "closed" for loss in lost.values()):
        return WorkerLost("closed", "by its supervisor", "")
    first = next(iter(lost.values()))
    detail = "; ".join(f"rank {rank} {loss.detail}" for rank, loss in lost.items())
    return WorkerLost(first.how, detail, first.tail, in_kernel=any(loss.in_kernel for loss in lost.values()))
