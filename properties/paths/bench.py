"""What a law of paths may do with a path: run it on one rank together with the others, and compare what that rank holds."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from torch import Tensor

from oracles import sharding
from oracles.operation import Inputs
from oracles.sharding import Mesh, Rank
from oracles.tolerance.bound import Bound
from properties.laws.law import Cotangents, Results
from properties.paths.case import ParallelCase
from properties.paths.domain import PathDomain


class PathBench(Protocol):
    """Runs a path on one rank together with the other ranks, and knows the truth and its bounds; tensors are this rank's own."""

    domain: PathDomain
    rank: Rank
    device: str

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
        """Return this rank's part of the outputs and, with (whole) cotangents, of every gradient.

        Gradients are summed over the ranks that share them. `alone` runs on one rank that has everything. `inputs` are those of
        `case`, without it those of the bench's case. Inputs in `frozen` require no gradient. `choices` replace those of the case.
        """

    def fail(self, inputs: Inputs, cotangents: Cotangents, at: int) -> bool:
        """Run a call in which collective number `at` of an axis and all after it raise on every rank. Return whether one did."""

    def in_flight(self, cases: Sequence[ParallelCase], backwards: Sequence[int]) -> list[Results]:
        """Run the forwards of all cases, then the backwards of the cases with these numbers, and return the results of these."""

    def replay(self, first: ParallelCase, inputs: Inputs, cotangents: Cotangents, *, gradients: bool = True) -> Results:
        """Run `first`, put the numbers of `inputs` into the same tensors, and return the results of a second run.

        With `gradients=False` the first run is under `no_grad`.
        """

    def renew(self, first: ParallelCase, inputs: Inputs, cotangents: Cotangents) -> Results:
        """Run `first`, free its tensors, and return the results of `inputs` in new tensors, at the same addresses if possible."""

    def move(self, x: Tensor, sections: Sequence[int], to: str, dy: Tensor | None = None, **choices: str) -> tuple[Tensor, Tensor]:
        """Return x moved "to heads" or "to tokens" by the path's own exchange, and dy moved back by its backward."""

    def accumulated(self, inputs: Inputs, several: Sequence[Results]) -> Results:
        """Return the gradients of micro-batches of the same inputs, one for each of `several` cotangents, as autograd adds them.

        Each micro-batch has a forward and a backward of its own, and adds its gradients to what the tensors' own `grad` holds.
        """

    def clipped(self, whole: Results, limit: float) -> Results | None:
        """Return this rank's part of the whole gradients, clipped to the norm `limit`; None if the rank skips the step."""

    def of_first(self, x: Tensor) -> Tensor:
        """Return what the first TP rank has in place of x."""

    def part(self, name: str) -> tuple[int, Tensor] | None:
        """Return the axis and the indices of the whole that this rank has of a result; None if it has all of it."""

    def bounds(self) -> dict[str, Bound]:
        """Return the truth of the whole case, with the error allowed to each row."""

    def exchanged(self, work: Callable[[], object]) -> dict[str, tuple[int, int]]:
        """Return for each kind of collective over cp how many calls `work` made, and the bytes that it sent in them."""

    def refusal(self, what: str) -> str:
        """Return the path's error message for an illegal layout, or an empty string if the path accepts it."""

    def from_every_rank(self, word: str) -> list[str]:
        """Return the word that each rank passed."""

    def shards(self, whole: Results, rank: Rank) -> Results:
        """Return the parameters that `rank` holds, as the path cuts them."""

    def loaded(self, shards: dict[str, sharding.Shard], rank: Rank) -> Results:
        """Return the parameters of `rank` after it loaded the shards."""

    def resharded(self, whole: Results, mesh: Mesh) -> dict[Rank, Results]:
        """Return what each rank of `mesh` loads from a checkpoint that the ranks save from their parts of the parameters."""
