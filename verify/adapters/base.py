"""The classes of adapters: one implementation made callable as an operation."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs
from oracles.sharding import Rank, Shard
from properties.domain import Domain
from properties.path_domain import PathDomain
from verify.ranks.collectives import Place


class Implementation(abc.ABC):
    """What every adapter declares. `requires` are the distributions it needs, with the least version of each.

    `products` is how float32 matrices are multiplied on a GPU, "ieee" or "tf32"; on the CPU, interpreted or not, it is ieee.
    """

    domain: Any
    algorithm: str = "chunkwise"
    products: str = "ieee"
    requires: ClassVar[dict[str, str]] = {}


class Adapter(Implementation):
    """One implementation of a kernel: signature and layout, no arithmetic, no tolerance.

    `algorithm` names the class whose rounding it may show: "chunkwise" (matrix products of operands in the inputs' dtype) or
    "recurrent" (float32 throughout); `chunk` is the tokens in its chunks, where they are always as many; `stores` says that a
    recurrent one has several kernels, which hand on normalised keys or corrected values in the inputs' dtype, and that its backward
    sums its states again from those; `folds` says that a chunkwise one multiplies a decay that all channels share into queries and
    keys, and stores these, as with KDA's decays it must, where others multiply their products. `domain` is what it promises.
    `counterpart` is the adapter of its one-token form.
    """

    chunk: int | None = None
    stores: bool = False
    folds: bool = False
    domain: Any = Domain()  # of the kind that the operation's book has (properties/books.py)
    counterpart: str | None = None

    def bring(self) -> None:
        """Import what `run` needs, where that takes seconds: it is done while the first cases are drawn. Here nothing."""

    @abc.abstractmethod
    def run(self, x: Inputs) -> Any:
        """The operation's outputs in their order, a tuple where there are several, differentiable where the domain says so.

        Of a rule: o [B, T, HV, V] and final_state [N, HV, K, V] (None if not asked for). x has q, k [B, T, H, K], v [B, T, HV, V],
        g (log-decay; of KDA [B, T, HV, K]), beta [B, T, HV], state [N, HV, K, V] or None, cu_seqlens [N + 1] or None, scale (None:
        K ** -0.5), qk_norm (L2-normalise q and k), output_final_state. Where the domain has it compute its gate, g is None and x
        has a, shaped like g, A_log [HV], dt_bias ([HV] or [HV, K]) or None; where beta, beta is None and x has b and
        allow_neg_eigval. Other operations: their inputs and outputs by name, see `gdn-verify list`.
        """


class PathAdapter(Implementation):
    """One implementation of a path that tp x cp ranks share: signature and layout, seen from one rank.

    `domain` is what it promises, `chunk` the tokens in its rule's chunks, where they are always as many. Ranks reach each other by
    `place` alone: as processes or, on any laptop, simulated.
    """

    chunk: int | None = None
    domain: PathDomain = PathDomain()

    @abc.abstractmethod
    def run(self, x: Inputs, place: Place) -> Tensor:
        """This rank's output, differentiable in what x has of tensors that require a gradient.

        gdn_layer: y [tokens, B, D] of x.hidden [tokens, B, D], tokens in the case's layout (THD: B = 1), and the parameters by
        the names of oracles/sharding.py in x.parameters, this rank's shards at rest. x has also layer (its widths), cu_seqlens and
        cu_seqlens_padded [N + 1] or None, sequence_parallel, eps, allow_neg_eigval, and the case's choices.
        A rule: o [1, tokens, HV, V] of an Adapter's q, k, v, g, beta with tokens on axis 1, the whole's cu_seqlens and layout;
        causal_conv1d: y.
        """

    def move(
        self, x: Tensor, lengths: Sequence[int] | None, sections: Sequence[int], to: str, place: Place, choices: dict[str, str]
    ) -> Tensor:
        """x [tokens / cp, B, F] "to heads" [tokens, B, F / cp], or back "to tokens", where the domain says exchanges.

        `lengths` are the (padded) tokens of each sequence, None for a batch; `sections` the features of each section, before they
        are cut over cp.
        """
        raise NotImplementedError

    def shards(self, whole: dict[str, Tensor], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        """What `rank` holds of the whole parameters, where the domain says checkpoints."""
        raise NotImplementedError

    def loaded(self, shards: dict[str, Shard], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        """The parameters of `rank` after it loaded its shards, where the domain says checkpoints."""
        raise NotImplementedError
