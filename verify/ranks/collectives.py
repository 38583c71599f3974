"""The ranks of a mesh and what they say to each other: alone, as processes of torch.distributed, or simulated in one process.

A path that is written against `Comm` runs unchanged on all three. Collectives work along axis 0, blocks in rank order:

    all_to_all         x [size * n, ...]: block r goes to rank r; [size * n, ...], block s from rank s
    all_gather         x [n, ...]: [size * n, ...], the same on every rank
    reduce_scatter     x [size * n, ...], added over ranks: block `rank` [n, ...] of the sum
    all_reduce         x of any shape, added over ranks: the same on every rank

They are raw; the functions below are differentiable, backward being the transpose over all ranks together. In backward, ranks call
collectives in the order in which autograd reaches them, the same on ranks that built the same graph.
"""

import abc
import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oracles.sharding import Mesh, Rank
from verify.process.stacks import Mark, mark_module

T = TypeVar("T")


class Mismatch(Exception):
    """Ranks that were to call one collective together did not: the message says which rank did what."""


class Abandoned(Exception):
    """A rank waited in a collective for one that raised; `rank` is the first that did, by its place in the mesh."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclasses.dataclass
class Traffic:
    """What one rank did over one axis, by kind of collective: how often, and the bytes that left it for other ranks.

    What a rank keeps is not sent. An all_gather sends the block to every other rank; an all_reduce counts as a reduce_scatter and
    an all_gather of its result, as a ring does it.
    """

    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    sent_bytes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Comm(abc.ABC):
    """The ranks of one axis of a mesh, seen from one of them. With size 1 nothing is sent, and no collective counts as one.

    Collectives return new tensors outside autograd. ValueError where axis 0 cannot be cut in `size` blocks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.traffic = rank, size, Traffic()

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._run("all_to_all", x, self._blocks(x) * (self.size - 1))

    def all_gather(self, x: Tensor) -> Tensor:
        if x.ndim == 0:
            raise ValueError("x must have an axis to gather along, got a scalar")
        return self._run("all_gather", x, x.nbytes * (self.size - 1))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._run("reduce_scatter", x, self._blocks(x) * (self.size - 1))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._run("all_reduce", x, 2 * x.nbytes * (self.size - 1) // self.size)

    def _blocks(self, x: Tensor) -> int:
        """The bytes of a block."""
        if x.ndim == 0 or len(x) % self.size:
            raise ValueError(f"x must be cut along axis 0 in {self.size} blocks, got shape {tuple(x.shape)}")
        return x.nbytes // self.size

    def _run(self, kind: str, x: Tensor, sent_bytes: int) -> Tensor:
        x = x.detach()
        if self.size == 1:
            return x.clone()
        self.traffic.calls[kind] += 1
        self.traffic.sent_bytes[kind] += sent_bytes
        return self._collective(kind, x)

    @abc.abstractmethod
    def _collective(self, kind: str, x: Tensor) -> Tensor:
        """The result of a legal collective among more than one rank."""


class Alone(Comm):
    """An axis of one rank."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _collective(self, kind: str, x: Tensor) -> Tensor:  # noqa: ARG002 - it is never reached
        raise AssertionError(f"{kind} among one rank")


class Distributed(Comm):
    """A process group of torch.distributed, over gloo or NCCL; None is the group of all processes.

    Without NCCL a reduce_scatter is an all_to_all, which sends as much, and a sum in the order of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group

    def _collective(self, kind: str, x: Tensor) -> Tensor:
        x = x.contiguous()
        if kind == "all_reduce":
            result = x.clone()
            dist.all_reduce(result, group=self.group)
        elif kind == "all_gather":
            result = x.new_empty(self.size * x.shape[0], *x.shape[1:])
            dist.all_gather_into_tensor(result, x, group=self.group)
        elif kind == "reduce_scatter" and x.is_cuda:
            result = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
            dist.reduce_scatter_tensor(result, x, group=self.group)
        else:
            result = torch.empty_like(x)
            dist.all_to_all_single(result, x, group=self.group)
            if kind == "reduce_scatter":
                result = _added(result.view(self.size, x.shape[0] // self.size, *x.shape[1:]))
        if x.is_cuda:  # so that a rank that waits is found in here, and not wherever it first needs the result
            torch.cuda.current_stream().synchronize()
        return result


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank of a tp x cp mesh: its ranks of both axes."""

    tp: Comm
    cp: Comm

    @property
    def rank(self) -> Rank:
        """Which rank of the mesh it is; ranks are numbered as in Mesh.ranks(), cp innermost."""
        return Rank(Mesh(self.tp.size, self.cp.size), self.tp.rank, self.cp.rank)


def exchange(comm: Comm, x: Tensor) -> Tensor:
    """All-to-all; its backward is one too."""
    return _apply(comm, "all_to_all", "all_to_all", x)


def copy_to(comm: Comm, x: Tensor) -> Tensor:
    """x, which every rank has the same; backward adds the ranks' gradients."""
    return _apply(comm, "", "all_reduce", x)


def reduce_from(comm: Comm, x: Tensor) -> Tensor:
    """The sum of the ranks' x, which every rank goes on with; backward is the identity."""
    return _apply(comm, "all_reduce", "", x)


def gather_from(comm: Comm, x: Tensor) -> Tensor:
    """The ranks' x along axis 0, of which each rank uses all in its own way; backward is a reduce_scatter."""
    return _apply(comm, "all_gather", "reduce_scatter", x)


def scatter_to(comm: Comm, x: Tensor) -> Tensor:
    """This rank's block along axis 0 of the sum of the ranks' x; backward is an all_gather."""
    return _apply(comm, "reduce_scatter", "all_gather", x)


def _apply(comm: Comm, there: str, back: str, x: Tensor) -> Tensor:
    result: Tensor = _Collective.apply(x, comm, there, back) if comm.size > 1 else x
    return result


class _Collective(torch.autograd.Function):
    """A linear map made of one collective ("" is the identity), and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, there: str, back: str) -> Tensor:
        ctx.comm, ctx.back = comm, back
        result: Tensor = getattr(comm, there)(x) if there else x.view_as(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return getattr(ctx.comm, ctx.back)(gradient) if ctx.back else gradient, None, None, None


def simulate(tp: int, cp: int, work: Callable[[Place], T]) -> list[T | BaseException]:
    """What `work` returns or raises on each rank of a tp x cp mesh, in the order of Mesh.ranks(), all in this process.

    Each rank is a thread, and only one runs at a time: until it waits in a collective or ends, then the next that can go on. So a
    simulation is as repeatable as `work`. Tensors may lie on any one device: autograd would run every rank's backward on the one
    thread that it has for a GPU, where the first collective would wait for ever, and is told to run it on the rank's own thread.

    A rank that waits for one that raised gets Abandoned at once. Ranks that call different collectives together, or with different
    shapes or dtypes, and those that wait for one that returned, or for each other, get Mismatch. Grad mode is the caller's.
    """
    simulation = _Simulation(Mesh(tp, cp))
    results: list[T | BaseException] = [AssertionError("rank has not run")] * (tp * cp)
    grad = torch.is_grad_enabled()

    def live(place: Place, number: int) -> None:
        simulation.turns[number].acquire()
        raised: BaseException | None = None
        try:
            with torch.set_grad_enabled(grad), torch.autograd.set_multithreading_enabled(False):
                results[number] = work(place)
        except BaseException as error:  # a rank's exit is its result, as in a process of its own
            results[number] = raised = error
        simulation.leave(number, raised)

    threads = [
        threading.Thread(target=live, args=(place, number), name=f"rank {number}", daemon=True)
        for number, place in enumerate(simulation.places())
    ]
    for thread in threads:
        thread.start()
    simulation.switch()
    for thread in threads:
        thread.join()
    return results


@dataclasses.dataclass(eq=False)
class _Group:
    """The ranks of one axis by their numbers in the mesh, and the calls of those that wait."""

    axis: str
    members: tuple[int, ...]
    calls: dict[int, tuple[str, Tensor]] = dataclasses.field(default_factory=dict)

    def call(self, number: int) -> str:
        kind, x = self.calls[number]
        return f"rank {number} called {kind}({str(x.dtype).removeprefix('torch.')} {list(x.shape)}) over {self.axis}"


class _Simulation:
    """The turns of the ranks. Whoever has the turn owns all of it, so it needs no other lock."""

    def __init__(self, mesh: Mesh) -> None:
        count = mesh.tp * mesh.cp
        numbers = torch.arange(count).view(mesh.tp, mesh.cp)
        self.mesh = mesh
        self.tp = [_Group("tp", tuple(column)) for column in numbers.T.tolist()]
        self.cp = [_Group("cp", tuple(row)) for row in numbers.tolist()]
        self.turns = [threading.Lock() for _ in range(count)]
        for turn in self.turns:
            turn.acquire()
        self.ready = collections.deque(range(count))
        self.answers: dict[int, Tensor | Exception] = {}
        self.gone: dict[int, BaseException | None] = {}

    def places(self) -> list[Place]:
        return [
            Place(
                _Simulated(self, self.tp[rank.cp], number, rank.tp),
                _Simulated(self, self.cp[rank.tp], number, rank.cp),
            )
            for number, rank in enumerate(self.mesh.ranks())
        ]

    def call(self, group: _Group, number: int, kind: str, x: Tensor) -> Tensor:
        """The answer to a rank's call, once all of its group have called."""
        group.calls[number] = kind, x
        if absent := [member for member in group.members if member in self.gone]:
            self._release(group, absent[0])
        elif len(group.calls) == len(group.members):
            try:
                self._complete(group)
            except BaseException:  # no memory, say: this rank goes on with the error, and waits for no answer
                group.calls.pop(number, None)
                raise
        self.switch()
        self.turns[number].acquire()
        answer = self.answers.pop(number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def leave(self, number: int, raised: BaseException | None) -> None:
        """A rank is done, and who waits for it must not any longer."""
        self.gone[number] = raised
        for group in (*self.tp, *self.cp):
            if number in group.members:
                self._release(group, number)
        self.switch()

    def switch(self) -> None:
        """The turn goes to the next rank that can use it, if there is one."""
        if not self.ready:
            stuck = [(group, number) for group in (*self.tp, *self.cp) for number in group.calls]
            said = "; ".join(group.call(number) for group, number in sorted(stuck, key=lambda each: each[1]))
            for group, number in stuck:
                self._answer(group, number, Mismatch(f"ranks wait for each other: {said}"))
        if self.ready:
            self.turns[self.ready.popleft()].release()

    def _complete(self, group: _Group) -> None:
        calls = [group.calls[member] for member in group.members]
        kind, first = calls[0]
        if any((each, x.shape, x.dtype) != (kind, first.shape, first.dtype) for each, x in calls):
            said = "; ".join(group.call(member) for member in group.members)
            for member in group.members:
                self._answer(group, member, Mismatch(f"ranks must call the same: {said}"))
            return
        for member, result in zip(group.members, _results(kind, [x for _, x in calls]), strict=True):
            self._answer(group, member, result)

    def _release(self, group: _Group, gone: int) -> None:
        raised = self.gone[gone]
        for number in tuple(group.calls):
            call = group.call(number)
            if raised is None:
                error: Exception = Mismatch(f"rank {gone} returned where {call}")
            elif isinstance(raised, Abandoned):
                error = Abandoned(f"{raised}, and so rank {gone} left where {call}", raised.rank)
            else:
                error = Abandoned(f"rank {gone} raised {type(raised).__name__} ({raised}) where {call}", gone)
            self._answer(group, number, error)

    def _answer(self, group: _Group, number: int, answer: Tensor | Exception) -> None:
        del group.calls[number]
        self.answers[number] = answer
        self.ready.append(number)


class _Simulated(Comm):
    """An axis of a simulated mesh."""

    def __init__(self, simulation: _Simulation, group: _Group, number: int, rank: int) -> None:
        super().__init__(rank, len(group.members))
        self._simulation, self._group, self._number = simulation, group, number

    def _collective(self, kind: str, x: Tensor) -> Tensor:
        return self._simulation.call(self._group, self._number, kind, x)


def _results(kind: str, xs: Sequence[Tensor]) -> list[Tensor]:
    """What each rank gets, in memory of its own: views of one tensor would share autograd's count of changes in place."""
    stacked, size = torch.stack(list(xs)), len(xs)
    if kind == "all_gather":
        return [stacked.flatten(0, 1).clone() for _ in xs]
    if kind == "all_reduce":
        return [total.clone() for total in [_added(stacked)] * size]
    blocks = stacked.view(size, size, stacked.shape[1] // size, *stacked.shape[2:])
    if kind == "reduce_scatter":
        return [block.clone() for block in _added(blocks)]
    return [column.flatten(0, 1) for column in blocks.unbind(1)]  # a copy: columns of more than one row are strided


def _added(xs: Tensor) -> Tensor:
    """The sum along axis 0, rounded to the dtype once."""
    return xs.sum(0, dtype=xs.dtype)


mark_module(globals(), Mark.COLLECTIVE)
