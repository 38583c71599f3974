"""Collectives among the ranks of a mesh: one rank, processes of torch.distributed, or ranks simulated in one process.

A path that is written against `Comm` runs unchanged on all three. Collectives work along axis 0, with blocks in rank order:

    collective         input                 result on each rank
    all_to_all         x [size * n, ...]     [size * n, ...]: block s is the block that rank s sent to this rank
    all_gather         x [n, ...]            [size * n, ...], the same on every rank
    reduce_scatter     x [size * n, ...]     [n, ...]: block `rank` of the sum over ranks
    all_reduce         x of any shape        the sum over ranks, the same on every rank
    all_max            x of any shape        the largest number over ranks, the same on every rank; a NaN may be lost

The methods of `Comm` work outside autograd. The functions `exchange`, `copy_to`, `reduce_from`, `gather_from` and `scatter_to` are
differentiable: a backward is the transpose of the forward, taken as one linear map over all ranks. In backward, ranks call
collectives in the order in which autograd reaches them, which is the same on ranks that built the same graph.
"""

import abc
import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oracles.sharding import Mesh, Rank
from verify.process.stacks import Mark, mark_module

T = TypeVar("T")


class CollectiveFailed(RuntimeError):
    """A collective that was made to fail on every rank, before anything was sent."""


class Mismatch(Exception):
    """Ranks did not call the same collective together. The message says what each rank called."""


class Abandoned(Exception):
    """A rank waited in a collective for a rank that raised. `rank` is the number in the mesh of the first rank that raised."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclasses.dataclass
class Traffic:
    """The traffic of one rank over one axis, by kind of collective: the number of calls, and the bytes sent to other ranks.

    A block that a rank keeps is not counted. An all_gather sends the block to every other rank. An all_reduce counts as a
    reduce_scatter and an all_gather of its result, as in a ring, and so does an all_max.
    """

    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    sent_bytes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Comm(abc.ABC):
    """The ranks of one axis of a mesh, seen from one of them.

    Collectives return new tensors outside autograd. They raise ValueError if axis 0 cannot be cut into `size` blocks. With size 1
    nothing is sent and `traffic` counts no call.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.traffic = rank, size, Traffic()
        self._left: int | None = None  # collectives until one fails

    @contextlib.contextmanager
    def failing(self, at: int) -> Iterator[list[int]]:
        """Let collective number `at` inside fail, and all after it. Yields a list that is empty until one has failed.

        Every rank must enter this with the same number, so that all of them fail together.
        """
        self._left, failed = at, list[int]()
        try:
            yield failed
        finally:
            failed += [at] * (self._left < 0)
            self._left = None

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

    def all_max(self, x: Tensor) -> Tensor:
        return self._run("all_max", x, 2 * x.nbytes * (self.size - 1) // self.size)

    def _blocks(self, x: Tensor) -> int:
        """The bytes of one of the `size` blocks of x. ValueError if axis 0 cannot be cut into that many."""
        if x.ndim == 0 or len(x) % self.size:
            raise ValueError(f"x must be cut along axis 0 in {self.size} blocks, got shape {tuple(x.shape)}")
        return x.nbytes // self.size

    def _run(self, kind: str, x: Tensor, sent_bytes: int) -> Tensor:
        x = x.detach()
        if self.size == 1:
            return x.clone()
        if self._left is not None:
            self._left -= self._left >= 0
            if self._left < 0:
                raise CollectiveFailed(f"{kind} failed")
        self.traffic.calls[kind] += 1
        self.traffic.sent_bytes[kind] += sent_bytes
        return self._collective(kind, x)

    @abc.abstractmethod
    def _collective(self, kind: str, x: Tensor) -> Tensor:
        """Return the result of the collective `kind`, whose input is legal, among at least two ranks."""


class Alone(Comm):
    """An axis of one rank."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _collective(self, kind: str, x: Tensor) -> Tensor:  # noqa: ARG002 - it is never reached
        raise AssertionError(f"{kind} among one rank")


class Distributed(Comm):
    """A process group of torch.distributed, over gloo or NCCL. None is the group of all processes.

    Tensors on the CPU are reduce-scattered by an all_to_all, which sends as many bytes, and a sum in the order of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group

    def _collective(self, kind: str, x: Tensor) -> Tensor:
        x = x.contiguous()
        if kind in ("all_reduce", "all_max"):
            result = x.clone()
            dist.all_reduce(result, dist.ReduceOp.SUM if kind == "all_reduce" else dist.ReduceOp.MAX, self.group)
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
        if x.is_cuda:  # a rank that waits then shows this frame on its stack, not the place that first needs the result
            torch.cuda.current_stream().synchronize()
        return result


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank of a tp x cp mesh, as its communicators over both axes."""

    tp: Comm
    cp: Comm

    @property
    def rank(self) -> Rank:
        """This rank's coordinates in the mesh. Ranks are numbered as in Mesh.ranks(): cp is the inner axis."""
        return Rank(Mesh(self.tp.size, self.cp.size), self.tp.rank, self.cp.rank)


def exchange(comm: Comm, x: Tensor) -> Tensor:
    """All-to-all. The backward is an all-to-all too."""
    return _apply(comm, "all_to_all", "all_to_all", x)


def copy_to(comm: Comm, x: Tensor) -> Tensor:
    """Return x, which must be the same on every rank. The backward adds the ranks' gradients."""
    return _apply(comm, "", "all_reduce", x)


def reduce_from(comm: Comm, x: Tensor) -> Tensor:
    """Return the sum of the ranks' x on every rank. The backward is the identity."""
    return _apply(comm, "all_reduce", "", x)


def gather_from(comm: Comm, x: Tensor) -> Tensor:
    """Return the ranks' x joined along axis 0, for ranks that then compute different things. The backward is a reduce_scatter."""
    return _apply(comm, "all_gather", "reduce_scatter", x)


def scatter_to(comm: Comm, x: Tensor) -> Tensor:
    """Return this rank's block, along axis 0, of the sum of the ranks' x. The backward is an all_gather."""
    return _apply(comm, "reduce_scatter", "all_gather", x)


def _apply(comm: Comm, there: str, back: str, x: Tensor) -> Tensor:
    result: Tensor = _Collective.apply(x, comm, there, back) if comm.size > 1 else x
    return result


class _Collective(torch.autograd.Function):
    """A linear map that is one collective, `there`, and its transpose, `back`. "" is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, there: str, back: str) -> Tensor:
        ctx.comm, ctx.back = comm, back
        result: Tensor = getattr(comm, there)(x) if there else x.view_as(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return getattr(ctx.comm, ctx.back)(gradient) if ctx.back else gradient, None, None, None


def simulate(tp: int, cp: int, work: Callable[[Place], T]) -> list[T | BaseException]:
    """Run `work` on each rank of a simulated tp x cp mesh, and return what each returned or raised, in the order of Mesh.ranks().

    Each rank is a thread of this process. One thread runs at a time, until it waits in a collective or ends; then the next thread
    that can continue runs. A simulation is therefore as repeatable as `work`. Tensors may lie on any one device. Autograd has one
    thread for each GPU, on which the first collective in a backward would wait for ever, so we make it run each rank's backward on
    the rank's own thread. Grad mode is that of the caller.

    Exceptions that `work` meets in a collective:

    - Abandoned: the rank waited for a rank that raised. It is raised at once.
    - Mismatch: ranks called different collectives, or with different shapes or dtypes; or the rank waited for a rank that has
      returned; or ranks wait for each other.
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
        except BaseException as error:  # SystemExit ends this rank alone, as in a process of its own
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
    """The ranks that share one axis, by their numbers in the mesh, and the calls of the ranks that wait."""

    axis: str
    members: tuple[int, ...]
    calls: dict[int, tuple[str, Tensor]] = dataclasses.field(default_factory=dict)

    def call(self, number: int) -> str:
        kind, x = self.calls[number]
        return f"rank {number} called {kind}({str(x.dtype).removeprefix('torch.')} {list(x.shape)}) over {self.axis}"


class _Simulation:
    """Decides which rank runs. Only the thread that has the turn changes this object, so it needs no other lock."""

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
        """Wait until all ranks of the group have called, and return this rank's result. Raises Mismatch or Abandoned."""
        group.calls[number] = kind, x
        if self.gone and (absent := [member for member in group.members if member in self.gone]):
            self._release(group, absent[0])
        elif len(group.calls) == len(group.members):
            try:
                self._complete(group)
            except BaseException:  # out of memory, for example: this rank continues with the error and waits for no result
                group.calls.pop(number, None)
                raise
        self.switch()
        self.turns[number].acquire()
        answer = self.answers.pop(number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def leave(self, number: int, raised: BaseException | None) -> None:
        """A rank has ended. The ranks that wait for it get an exception."""
        self.gone[number] = raised
        for group in (*self.tp, *self.cp):
            if number in group.members:
                self._release(group, number)
        self.switch()

    def switch(self) -> None:
        """Let the next rank run that can continue. If none can, every waiting rank gets Mismatch."""
        if not self.ready:
            stuck = [(group, number) for group in (*self.tp, *self.cp) for number in group.calls]
            text = "; ".join(group.call(number) for group, number in sorted(stuck, key=lambda pair: pair[1]))
            for group, number in stuck:
                self._answer(group, number, Mismatch(f"ranks wait for each other: {text}"))
        if self.ready:
            self.turns[self.ready.popleft()].release()

    def _complete(self, group: _Group) -> None:
        calls = [group.calls[member] for member in group.members]
        kind, first = calls[0]
        if any((other, x.shape, x.dtype) != (kind, first.shape, first.dtype) for other, x in calls):
            text = "; ".join(group.call(member) for member in group.members)
            for member in group.members:
                self._answer(group, member, Mismatch(f"ranks must call the same: {text}"))
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
                error = Abandoned(f"{raised}, so rank {gone} left where {call}", raised.rank)
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
    """The result for each rank, in memory of its own.

    Views of one tensor would share autograd's version counter, so that a change in place on one rank would raise on another.
    """
    stacked, size = torch.stack(list(xs)), len(xs)
    if kind == "all_gather":
        return [stacked.flatten(0, 1).clone() for _ in xs]
    if kind == "all_reduce":
        return [total.clone() for total in [_added(stacked)] * size]
    if kind == "all_max":  # loses a NaN wherever it is, as NCCL does; gloo loses some
        return [largest.clone() for largest in [functools.reduce(torch.fmax, xs)] * size]
    blocks = stacked.view(size, size, stacked.shape[1] // size, *stacked.shape[2:])
    if kind == "reduce_scatter":
        return [block.clone() for block in _added(blocks)]
    return [column.flatten(0, 1) for column in blocks.unbind(1)]  # a copy: columns of more than one row are strided


def _added(xs: Tensor) -> Tensor:
    """The sum along axis 0, rounded to the dtype only once."""
    return xs.sum(0, dtype=xs.dtype)


mark_module(globals(), Mark.COLLECTIVE)
