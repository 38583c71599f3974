"""Runs a parallel path for a law: on this rank of a process group, or on ranks simulated in this process.

The bench cuts the whole call as oracles/parallel.py and oracles/sharding.py define it, gives a rank its part, and adds the
gradients of parameters over the ranks that share them. Every rank judges its own part of the results.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from oracles import sharding
from oracles.operation import DTYPES, Inputs, gradient_name
from oracles.sharding import AT_REST, Mesh, Rank
from oracles.tolerance.bound import Bound
from properties.laws.law import Breach, Cotangents, Pair, Results
from properties.paths.case import CHOICES, ParallelCase
from properties.paths.illegal import CHANGES, JUDGED, IllegalLayout
from verify.adapters.base import PathAdapter
from verify.bench import addresses, oracle_process
from verify.bench.faults import AdapterFault
from verify.bench.guards import Copies, Guards, changed
from verify.bench.places import Layout, indices
from verify.bench.placing import refill
from verify.bench.shared_calls import PARAMETERS, SharedCall, shared_call
from verify.bench.watched import WatchedBench
from verify.gpu import device as devices
from verify.process.outcome import FailureKind
from verify.process.stacks import Mark, marked
from verify.ranks.collectives import Alone, Comm, Distributed, Mismatch, Place
from verify.reach import recorder

T = TypeVar("T")
OFFSETS = ("cu_seqlens", "cu_seqlens_padded")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A rank's part of a call: what the adapter gets, the tensors in it that may have a gradient, and the output's cotangent."""

    shared: SharedCall
    place: Place
    arguments: Inputs
    leaves: Results
    direction: Tensor | None
    guards: tuple[Guards, Guards]
    graded: bool

    @property
    def asked(self) -> Results:
        """The tensors that require a gradient."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}

    def refill(self, other: "_Call") -> None:
        """Put the numbers of another call of the same shapes into the tensors of this one."""
        pairs = [(leaf, other.leaves[name]) for name, leaf in self.leaves.items()]
        pairs += [(self.arguments[name], other.arguments[name]) for name in OFFSETS if self.arguments[name] is not None]
        if self.direction is not None and other.direction is not None:
            pairs.append((self.direction, other.direction))
        for tensor, numbers in pairs:
            refill(tensor, numbers)


def _output(case: ParallelCase) -> str:
    """The name of the output that the ranks share."""
    return next(port.name for port in case.spec.outputs)


class RankBench(WatchedBench):
    """A PathBench (properties/paths/laws.py) for one adapter, one case and one rank."""

    def __init__(
        self, adapter: PathAdapter, case: ParallelCase, place: Place, bounds: Callable[[], dict[str, Bound]], device: str = "cpu"
    ) -> None:
        super().__init__(device)
        self.adapter, self.case, self.place = adapter, case, place
        self.domain, self.rank, self.shared = adapter.domain, place.rank, shared_call(case)
        self._bounds = bounds
        # The whole call, its bounds and all comparisons are on the CPU. Only a rank's own part of the computation is on the device.
        self.law_device = "cpu"

    def bounds(self) -> Mapping[str, Bound]:
        """The bounds of the case. They are waited for when the first one is read, so that the path can run before."""

        def wait() -> dict[str, Bound]:
            with self.timed("oracle_s"):
                return self._bounds()

        return oracle_process.Later(wait)

    def run(
        self,
        inputs: Inputs,
        cotangents: Cotangents,
        *,
        alone: bool = False,
        case: ParallelCase | None = None,
        frozen: Collection[str] = (),
        **choices: Any,
    ) -> Results:
        case, place = dataclasses.replace(case or self.case, **choices), self.place
        if alone:
            # Pads count as tokens here, since their number depends on cp, and both runs must have the same tokens.
            case = dataclasses.replace(case, tp=1, cp=1, sp=False, lengths=case.padded, padding="none")
            place = Place(Alone(), Alone())
        return self._results(self._prepared(case, place, inputs, cotangents, frozen=frozen))

    def fail(self, inputs: Inputs, cotangents: Cotangents, at: int) -> bool:
        axis = self.place.cp if self.place.cp.size > 1 else self.place.tp
        # A device has its backward in a thread of torch's, where an error of ours would end the process.
        call = self._prepared(self.case, self.place, inputs, cotangents if self.device == "cpu" else None)
        with axis.failing(at) as failed, contextlib.suppress(Exception):  # any error is right, and so is an answer by other means
            self._results(call)
        return bool(failed)

    def in_flight(self, cases: Sequence[ParallelCase], backwards: Sequence[int]) -> list[Results]:
        calls = [self._prepared(case, self.place, case.inputs(), case.cotangents()) for case in cases]
        copies = [Copies(call.leaves) for call in calls]

        def forwards_and_backwards() -> list[tuple[Results, list[Tensor | None]]]:
            answers = [self._checked(self.adapter.run(call.arguments, self.place), call) for call in calls]
            return [(answers[number][1], self._backward(answers[number][0], calls[number])) for number in backwards]

        with contextlib.ExitStack() as stack:
            for call in calls:
                for guards in call.guards:
                    stack.enter_context(guards.known())
            found = self.call_implementation(forwards_and_backwards)
        for name in dict.fromkeys(name for copy in copies for name in copy.changed()):
            self.impure.append(changed(name))
        return [self._named(calls[number], *results) for number, results in zip(backwards, found, strict=True)]

    def replay(self, first: ParallelCase, inputs: Inputs, cotangents: Cotangents, *, gradients: bool = True) -> Results:
        call = self._prepared(first, self.place, first.inputs(), cotangents)
        with torch.set_grad_enabled(gradients):
            self._results(dataclasses.replace(call, graded=call.graded and gradients))
        call.refill(self._prepared(self.case, self.place, inputs, cotangents))
        return self._results(call)

    def renew(self, first: ParallelCase, inputs: Inputs, cotangents: Cotangents) -> Results:
        places: dict[str, addresses.Spot] = {}

        def put(name: str, x: Tensor) -> Tensor:
            return places.setdefault(name, addresses.Spot(x)).put(x)

        self._results(self._prepared(first, self.place, first.inputs(), cotangents, put))
        return self._results(self._prepared(self.case, self.place, inputs, cotangents, put))

    def _prepared(
        self,
        case: ParallelCase,
        place: Place,
        inputs: Inputs,
        cotangents: Cotangents,
        put: Callable[[str, Tensor], Tensor] | None = None,
        frozen: Collection[str] = (),
    ) -> "_Call":
        """A rank's part of a call. `put` chooses where its tensors lie; without it, they lie between guards.

        Tensors in `frozen` require no gradient.
        """
        shared = shared_call(case)
        tensors, others = shared.cut(place.rank, inputs)
        around = self.adapter.guards and put is None
        graded = cotangents is not None
        directions = {} if cotangents is None else {"": shared.tokens(cotangents[_output(case)], place.rank).to(self.device)}
        moved = {name: x.to(self.device) for name, x in tensors.items()}
        if put is not None:
            moved = {name: put(name, x) for name, x in moved.items()}
        guards = Guards({**moved, **directions}, around=around)
        leaves: Results = {
            name: torch.nn.Parameter(x, asked) if name in PARAMETERS else x.requires_grad_(asked)
            for name, x in guards.tensors.items()
            if name
            for asked in (graded and name not in frozen,)
        }
        arguments = self._arguments(shared, leaves, others)
        offsets = {name: arguments[name] for name in OFFSETS if arguments[name] is not None}
        if put is not None:
            offsets = {name: put(name, x) for name, x in offsets.items()}
        offset_guards = Guards(offsets, around=around)
        arguments = arguments.replaced(**offset_guards.tensors)
        return _Call(shared, place, arguments, leaves, guards.tensors.get(""), (guards, offset_guards), graded)

    def _results(self, call: "_Call") -> Results:
        """This rank's part of the outputs and the gradients of a call."""
        turned = {} if call.direction is None else {f"cotangent of {_output(call.shared.case)}": call.direction}
        copies = Copies({**call.leaves, **turned})

        def forward_and_backward() -> tuple[Results, list[Tensor | None]]:
            if self.domain.steps and call.direction is not None and call.graded:
                return self._step(call)
            with recorder.arguments(self.adapter):
                answer = self.adapter.run(call.arguments, call.place)
            y, checked = self._checked(answer, call)
            return checked, self._backward(y, call)

        with call.guards[0].known(), call.guards[1].known():
            results, gradients = self.call_implementation(forward_and_backward)
        for name in copies.changed():
            self.impure.append(changed(name))
        for name in call.guards[0].written(call.guards[1]):
            self.impure.append(changed(f"memory around {name or gradient_name(_output(call.shared.case))}", "memory"))
        return self._named(call, results, gradients)

    def _named(self, call: "_Call", results: Results, gradients: list[Tensor | None]) -> Results:
        """This rank's part of the outputs and the gradients of a call, as the oracle has them."""
        for (name, leaf), gradient in zip(call.asked.items(), gradients, strict=False):
            whole = torch.zeros_like(leaf) if gradient is None else gradient.detach()
            results[gradient_name(name)] = whole if self.domain.steps else call.shared.summed(name, whole, call.place)
        return {name: call.shared.as_oracle(name, x).cpu() for name, x in results.items()}

    def accumulated(self, inputs: Inputs, several: Sequence[Results]) -> Results:
        calls = [self._prepared(self.case, self.place, inputs, cotangents) for cotangents in several]
        call, leaves = calls[0], calls[0].leaves
        copies = Copies(leaves)

        def forward_and_backward() -> None:
            for other in calls:
                y, _ = self._checked(self.adapter.run(call.arguments, self.place), call)
                if y.requires_grad:
                    y.backward(other.direction)
                else:
                    self._refuse_without_gradient(y)

        with call.guards[0].known(), call.guards[1].known():
            self.call_implementation(forward_and_backward)
        for name in copies.changed():
            self.impure.append(changed(name))
        results = {}
        for name, leaf in leaves.items():
            whole = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach()
            results[gradient_name(name)] = call.shared.summed(name, whole, self.place)
        return {name: call.shared.as_oracle(name, x).cpu() for name, x in results.items()}

    def clipped(self, whole: Results, limit: float) -> Results | None:
        layer = self.case.layer
        parts = {name: sharding.shard(layer, name, x, self.rank, AT_REST).value.to(self.device) for name, x in whole.items()}
        sizes = {name: x.shape for name, x in parts.items()}
        found = self.call_implementation(lambda: self.adapter.clipped(parts, layer, limit, self.place))
        if found is None:
            return None
        for name, size in sizes.items():
            if name not in found or found[name].shape != size:
                shape = tuple(found[name].shape) if name in found else None
                raise AdapterFault(gradient_name(name), FailureKind.SHAPE, f"has shape {shape}, must have {tuple(size)}")
        return {name: found[name].detach().cpu() for name in sizes}

    def of_first(self, x: Tensor) -> Tensor:
        whole = self.place.tp.all_gather(x.to(self.device).contiguous())
        return whole[: len(x)].cpu()

    def _step(self, call: "_Call") -> tuple[Results, list[Tensor | None]]:
        """The output and the gradients of a training step of the path. AdapterFault if one has a wrong shape."""
        assert call.direction is not None
        with recorder.arguments(self.adapter):
            y, gradients = self.adapter.step(call.arguments, call.direction, call.place)
        named = {name: gradients.get(PARAMETERS.get(name, name)) for name in call.leaves}
        for name, gradient in named.items():
            if gradient is not None and gradient.shape != call.leaves[name].shape:
                what = f"has shape {tuple(gradient.shape)}, must have {tuple(call.leaves[name].shape)}"
                raise AdapterFault(gradient_name(name), FailureKind.SHAPE, what)
        kept = self.domain.keeps_outputs
        return self._checked(y, call)[1], [x if x is None or kept else x.detach().clone() for x in named.values()]

    def _arguments(self, shared: SharedCall, leaves: Results, others: dict[str, Any]) -> Inputs:
        """What the adapter gets."""
        case = shared.case
        arguments: dict[str, Any] = {**others, **leaves, "layout": case.layout, "sequence_parallel": case.sp}
        real, padded = case.cu_seqlens(self.device, padded=False), case.cu_seqlens(self.device)
        arguments |= {"cu_seqlens": real, "cu_seqlens_padded": padded if case.padding != "none" else None}
        return Inputs(**{**arguments, **shared.arguments(leaves)})

    @marked(Mark.IMPLEMENTATION)
    def call_implementation(self, call: Callable[[], T]) -> T:
        """Call the path and return its result (see `watched`)."""
        with self.watched(recorder.launches()):
            result = call()
            devices.settle(self.device)
        return result

    def _checked(self, answer: Any, call: "_Call") -> tuple[Tensor, Results]:
        """The output that ranks share, and all outputs by name, detached. AdapterFault if one breaks the contract."""
        case, name, shape = call.shared.case, _output(call.shared.case), tuple(call.leaves[call.shared.carrier].shape)
        outputs, must = {name: answer}, {name: (shape, DTYPES[case.dtype])}
        if case.final_state:
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise AdapterFault(name, FailureKind.TYPE, f"is {type(answer).__name__}, must be a tuple ({name}, final_state)")
            states = (len(case.lengths), case.value_heads, case.key_dim, case.value_dim)
            outputs, must["final_state"] = dict(zip((name, "final_state"), answer, strict=True)), (states, torch.float32)
        for port, x in outputs.items():
            shape, dtype = must[port]
            if not isinstance(x, Tensor):
                raise AdapterFault(port, FailureKind.TYPE, f"is {type(x).__name__}, must be a tensor")
            if tuple(x.shape) != shape:
                raise AdapterFault(port, FailureKind.SHAPE, f"has shape {tuple(x.shape)}, must have {shape}")
            if x.dtype != dtype:
                raise AdapterFault(port, FailureKind.DTYPE, f"has dtype {x.dtype}, must have {dtype}")
        kept = self.domain.keeps_outputs
        return outputs[name], {port: x.detach() if kept else x.detach().clone() for port, x in outputs.items()}

    def _refuse_without_gradient(self, y: Tensor) -> None:
        if y.numel():
            raise AdapterFault("output", FailureKind.NO_GRADIENT, "carries no gradient, although the domain declares backward=True")

    def _backward(self, y: Tensor, call: "_Call") -> list[Tensor | None]:
        """The gradients that a call asks for; none if it asks for none.

        As a trainer, this calls `backward`. torch.autograd.grad leaves out exchanges that no asked tensor needs, also those
        that other ranks wait for.
        """
        leaves = [*call.asked.values()]
        if call.direction is None or not call.graded:
            return []
        if not y.requires_grad:
            self._refuse_without_gradient(y)
            return [None] * len(leaves)
        for leaf in leaves:
            leaf.grad = None  # a call may be made twice
        y.backward(call.direction)
        return [leaf.grad for leaf in leaves]

    def part(self, name: str) -> tuple[int, Tensor] | None:
        return self.shared.rows(name, self.rank)

    def move(self, x: Tensor, sections: Sequence[int], to: str, dy: Tensor | None = None, **choices: str) -> tuple[Tensor, Tensor]:
        lengths = list(self.case.padded) if self.case.packed else None
        taken = {name: getattr(self.case, name) for name in CHOICES} | choices
        leaf = x.detach().to(self.device, copy=True).requires_grad_(dy is not None)

        def forward_and_backward() -> tuple[Tensor, Tensor]:
            y = self.adapter.move(leaf, lengths, sections, to, self.place, taken)
            if dy is None or not y.requires_grad:
                return y.detach().cpu(), torch.zeros_like(x)
            (dx,) = torch.autograd.grad(y, leaf, dy.to(self.device))
            return y.detach().cpu(), dx.cpu()

        return self.call_implementation(forward_and_backward)

    def exchanged(self, work: Callable[[], object]) -> dict[str, tuple[int, int]]:
        traffic = self.place.cp.traffic
        before = traffic.calls["all_to_all"], traffic.sent_bytes["all_to_all"]
        work()
        return {"all_to_all": (traffic.calls["all_to_all"] - before[0], traffic.sent_bytes["all_to_all"] - before[1])}

    def refusal(self, what: str) -> str:
        case = dataclasses.replace(self.case, sp=False, padding="none", lengths=self.case.padded)
        before = self.collectives()
        try:
            self.attempt(case, CHANGES[JUDGED[what]](case))
        except AdapterFault as fault:
            if isinstance(fault.__cause__, Mismatch):
                return ""
            if before != self.collectives():
                raise Breach(f"refuses an illegal layout ({what}) only after ranks have communicated") from fault
            return fault.finding.what
        return ""

    def collectives(self) -> int:
        """How many collectives this rank has called."""
        return sum(sum(axis.traffic.calls.values()) for axis in (self.place.tp, self.place.cp))

    def attempt(self, case: ParallelCase, wrong: IllegalLayout) -> None:
        """Call the path with an illegal layout in place of that of the case, and drop what it returns."""
        shared = shared_call(case)
        tensors, others = shared.cut(self.rank, case.inputs())
        if wrong.is_longer(self.rank):
            tensors = {name: shared.longer(name, x) for name, x in tensors.items()}
        arguments = self._arguments(shared, {name: x.to(self.device) for name, x in tensors.items()}, others)
        if wrong.heads:
            layer = dataclasses.replace(case.layer, heads=wrong.heads, value_heads=2 * wrong.heads)
            arguments = arguments.replaced(layer=layer)
        if wrong.lengths:
            offsets = torch.tensor(wrong.offsets(), dtype=getattr(torch, case.offsets), device=self.device)
            arguments = arguments.replaced(cu_seqlens=offsets)
        self.call_implementation(lambda: self.adapter.run(arguments, self.place))

    def from_every_rank(self, word: str) -> list[str]:
        codes = torch.tensor([list(word.encode()[:256].ljust(256, b"\0"))], device=self.device)
        answers = self.place.tp.all_gather(self.place.cp.all_gather(codes))
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in answers.tolist()]

    def shards(self, whole: Results, rank: Rank) -> Results:
        return self.call_implementation(lambda: self.adapter.shards(whole, self.case.layer, rank))

    def loaded(self, shards: dict[str, sharding.Shard], rank: Rank) -> Results:
        return self.call_implementation(lambda: self.adapter.loaded(shards, self.case.layer, rank))

    def resharded(self, whole: Results, mesh: Mesh) -> dict[Rank, Results]:
        layer = self.case.layer
        shards = {name: sharding.shard(layer, name, x, self.rank, AT_REST).value.to(self.device) for name, x in whole.items()}
        loaded = self.call_implementation(lambda: self.adapter.resharded(shards, layer, self.place, mesh))
        return {rank: {name: x.cpu() for name, x in parameters.items()} for rank, parameters in loaded.items()}

    def where(self, pair: Pair, flat: int, shape: torch.Size) -> str:
        """The place of a row in words, with the token counted in its whole sequence."""
        index, case = indices(flat, shape), self.case
        part = self._part_of(pair)
        if part is None:
            return "index " + ", ".join(map(str, index))
        axis, rows = part
        if axis >= len(index):
            return f"index {', '.join(map(str, index))}, in part"
        index[axis] = int(rows[index[axis]])
        if axis != 1 or tuple(shape[:1]) != case.batch[:1]:
            return "index " + ", ".join(map(str, index))
        sequence, token = index[0], index[1]
        if case.packed:
            starts = case.starts()
            sequence = max(row for row, start in enumerate(starts[:-1]) if start <= token and case.padded[row])
            token -= starts[sequence]
        words = f"token {token}" + ("" if not case.packed or token < case.lengths[sequence] else ", a pad")
        words += f", head {index[2]}" if len(index) > 2 else ""
        return f"sequence {sequence}, {words}" if len(case.lengths) > 1 else words

    def layout(self, pair: Pair, shape: torch.Size) -> Layout | None:
        """How the rows of a comparison lie in a picture: with tokens as they lie on the rank. None if they are no tokens."""
        part = self._part_of(pair)
        if part is None or part[0] != 1 or len(shape) < 2 or tuple(shape[:1]) != self.case.batch[:1]:
            return None
        group, heads = "row of the batch", ("head", 2) if len(shape) > 2 else ("", None)
        return Layout("local token", (0, 1), (shape[1],) * shape[0], group, *heads)

    def _part_of(self, pair: Pair) -> tuple[int, Tensor] | None:
        """The axis of a comparison of which the rank has a part, and the rows of this part; None if it is not of the whole rank."""
        known = not pair.detail and pair.port in (*map(gradient_name, self._names()), *self._names())
        return self.part(pair.port) if known else None

    def _names(self) -> list[str]:
        return [port.name for port in (*self.case.spec.inputs, *self.case.spec.outputs)]


class Unjudged(RankBench):
    """A RankBench whose results are compared with nothing: every truth is zero, in no particular shape."""

    def bounds(self) -> Mapping[str, Bound]:
        return collections.defaultdict(lambda: Bound(torch.zeros(()), torch.zeros(())))

    def part(self, name: str) -> tuple[int, Tensor] | None:  # noqa: ARG002
        return None


_PLACES: dict[Mesh, Place | None] = {}


def place_of(mesh: Mesh) -> Place | None:
    """The place of this process in a mesh that consists of the first ranks of its group; None if it has no part in the mesh.

    Groups are made once for each mesh. ValueError if the mesh needs more ranks than there are.
    """
    if mesh not in _PLACES:
        mine, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if mesh.tp * mesh.cp > size:
            raise ValueError(f"tp * cp must be at most the {size} ranks that there are, got {mesh.tp} * {mesh.cp}")
        number = torch.arange(mesh.tp * mesh.cp).view(mesh.tp, mesh.cp)
        # Every process makes every group, in the same order: torch tells groups apart by the number that was made before.
        axes = [[_axis(ranks, mine) for ranks in lines.tolist()] for lines in (number.T, number)]
        tp, cp = divmod(mine, mesh.cp)
        _PLACES[mesh] = Place(axes[0][cp], axes[1][tp]) if mine < mesh.tp * mesh.cp else None
    return _PLACES[mesh]


def _axis(ranks: list[int], mine: int) -> Comm:
    """The axis that `ranks` share. It is `Alone` for a single rank and, as a placeholder, if this process is not one of them."""
    group = torch.distributed.new_group(ranks) if len(ranks) > 1 else None
    return Distributed(group) if group is not None and mine in ranks else Alone()
