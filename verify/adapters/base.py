"""The base classes of adapters. An adapter makes one implementation callable as an operation."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from oracles.layer import Layer
from oracles.operation import Inputs
from oracles.sharding import Mesh, Rank, Shard
from properties.paths.domain import PathDomain
from properties.rules.domain import Domain
from properties.traces.case import Batch, Sizes
from properties.traces.domain import TraceDomain
from verify.ranks.collectives import Place


class Implementation(abc.ABC):
    """What every adapter declares.

    - `domain` is what the implementation promises to support. Each kind of operation has its own class (properties/books.py).
    - `algorithm` is the class of algorithm, which decides where the implementation may round.
    - `products` is how the implementation multiplies float32 matrices on a GPU: "ieee" or "tf32". On a CPU, with or without
      Triton's interpreter, products are always ieee.
    - `requires` maps each distribution that the implementation needs to its least version.
    - `api` is the function or class under test, as "package.module:name" or as itself. With None it is the first function of a
      library that the adapter calls with a tensor.
    - `omits` maps each parameter of the function under test that no case passes to the reason. It may also name a Triton kernel
      or a Python function some of whose branches or lines no case runs.
    - `guards`: around its inputs there is memory full of NaN. An implementation that says in its documentation how far it reads
      beyond its inputs, and that drops what it reads there, sets this to False.
    """

    domain: Any
    algorithm: str = "chunkwise"
    products: str = "ieee"
    requires: ClassVar[dict[str, str]] = {}
    api: ClassVar[str | Callable[..., Any] | None] = None
    omits: ClassVar[Mapping[str, str]] = {}
    guards: bool = True

    def close(self) -> None:  # noqa: B027 - most adapters start nothing
        """End what the adapter has started, such as a process beside it; by default it does nothing.

        Called once, before the worker process ends, also where the worker is to be killed while `run` is running: then from another
        thread. It may take three seconds. Where the worker crashes it is not called.
        """


class Adapter(Implementation):
    """One implementation of a kernel: it adapts signature and layout, and has no arithmetic and no tolerance.

    - `algorithm`: "chunkwise" (matrix products of operands in the inputs' dtype), "recurrent" (float32 throughout) or "pointwise"
      (float32 inside). An operation accepts those in its `classes` (see OPERATIONS in oracles/operations.py).
    - `chunk`: the number of tokens in a chunk, if it is always the same; else None.
    - `stores`: a recurrent implementation of several kernels sets this to True if they pass normalised keys or corrected values on
      in the inputs' dtype, and if its backward computes the states again from them.
    - `folds`: a chunkwise implementation sets this to True if it multiplies a decay that all channels share into queries and keys,
      and stores the results. Other implementations multiply the decay into the products of queries and keys. A KDA kernel has to
      fold, since each channel has its own decay.
    - `rounds_products`: a convolution without backward sets this to True if it rounds each product of an input and a weight to the
      inputs' dtype before it adds it in float32. Other implementations multiply in float32.
    - `counterpart`: the name of the adapter of its one-token form.
    - `compiles`: an implementation that compiles every new shape of its inputs, also on a CPU, sets this to True, as JAX does. A
      check then draws its cases from few compile keys and lengths. This changes no tolerance.
    - `cost`: what a token costs on a CPU, which limits the long cases of a check: "quick", "interpreted" (Triton kernels) or "slow"
      (no long cases). With None it is "interpreted" if the adapter requires Triton or its modules have imported a Triton kernel.
    """

    chunk: int | None = None
    compiles: bool = False
    cost: str | None = None
    stores: bool = False
    folds: bool = False
    rounds_products: bool = False
    domain: Any = Domain()
    counterpart: str | None = None

    def bring(self) -> None:
        """Import what `run` needs, if that takes seconds. Called while the first cases are drawn; by default it does nothing."""

    @abc.abstractmethod
    def run(self, x: Inputs) -> Any:
        """Call the implementation and return the operation's outputs in their order, as a tuple if there are several.

        The outputs must be differentiable if the domain has backward=True.

        For a rule the outputs are o [B, T, HV, V] and final_state [N, HV, K, V] (None unless output_final_state). x has:

        - q, k [B, T, H, K] and v [B, T, HV, V]
        - g, the log-decay: [B, T, HV], or [B, T, HV, K] for KDA
        - beta [B, T, HV]
        - state [N, HV, K, V] or None, cu_seqlens [N + 1] or None
        - scale (None means K ** -0.5), qk_norm (whether to L2-normalise q and k), output_final_state
        - qk_norm_eps (a number) and qk_norm_form ("inside" or "max"), as the domain allows

        If the kernel takes the decay itself (`decays` of the domain), g is None and x has alpha, shaped like g. If it computes the
        gate (`in_kernel` of the domain), g is None and x has a (shaped like g), A_log [HV] and dt_bias
        ([HV], [HV, K] or None). If it computes beta, beta is None and x has b and allow_neg_eigval. Other operations get and return
        their own inputs and outputs by name; `gdn-verify list` prints them.
        """


class PathAdapter(Implementation):
    """One implementation of a path that tp x cp ranks share: it adapts signature and layout, and is called on every rank.

    `chunk` is the number of tokens in a chunk of its rule, if it is always the same. Ranks communicate through `place` alone, so
    the same adapter runs on ranks that are processes and on simulated ranks in one process.
    """

    chunk: int | None = None
    domain: PathDomain = PathDomain()

    @abc.abstractmethod
    def run(self, x: Inputs, place: Place) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's output, differentiable with respect to every tensor in x that requires a gradient.

        - gdn_layer returns y [tokens, B, D]. x has hidden [tokens, B, D] with this rank's tokens in the case's layout (B = 1 if
          packed), and `parameters`: this rank's shards at rest, by their names in oracles/sharding.py. x also has layer (its
          widths), cu_seqlens and cu_seqlens_padded ([N + 1] or None), sequence_parallel, eps, allow_neg_eigval, recompute, and the
          choices of the case.
        - kda_layer returns y too. Of its `parameters`, which every rank has whole, three are beside those of gdn_layer:
          decay_proj.weight, gate_proj.weight and gate_proj.bias.
        - A rule returns o [B, tokens, HV, V]. x has q, k, v, g and beta as for an `Adapter`, with this rank's tokens on axis 1, and
          the layout and cu_seqlens of the whole call. If it computes its gate (`in_kernel` of the domain), x has a, A_log and
          dt_bias in place of g. x has state [N, HV, K, V], or None: the initial states of all sequences, on every rank. If
          x.output_final_state, it returns a tuple (o, final_state), with the final states of all sequences on every rank.
        - causal_conv1d returns y, with this rank's tokens of x on axis 1.
        """

    def join(self, mesh: Mesh) -> None:
        """Make the process groups that the path needs for cases on `mesh`; by default none.

        Called before each call on every process, also on those that have no part in the mesh: torch makes a group only if all
        processes make it.
        """

    def step(self, x: Inputs, dy: Tensor, place: Place) -> tuple[Tensor | tuple[Tensor, Tensor], dict[str, Tensor]]:
        """Return what `run` returns, and this rank's gradients after a training step's backward with the cotangent `dy`.

        The gradients are those of `hidden` and of every parameter by its name in `x.parameters`; of a rule, those of its inputs.
        The path itself adds the gradients of what ranks share over the ranks. Needed if the domain has steps=True.
        """
        raise NotImplementedError

    def clipped(self, gradients: dict[str, Tensor], layer: Layer, limit: float, place: Place) -> dict[str, Tensor] | None:
        """Return this rank's gradients as its optimizer takes them, or None if it skips the step.

        `gradients` are those of this rank's shards by name, in float32, already added over the ranks that share them; they may be
        changed in place. If the norm of all gradients of the layer, on all ranks, is over `limit`, they are scaled to this norm.
        Needed if the domain has clips=True or skips=True.
        """
        raise NotImplementedError

    def move(
        self, x: Tensor, lengths: Sequence[int] | None, sections: Sequence[int], to: str, place: Place, choices: dict[str, str]
    ) -> Tensor:
        """Move x between shared tokens and shared heads. Needed if the domain has exchanges=True.

        With `to` "heads", x [tokens / cp, B, F] becomes [tokens, B, F / cp]; with `to` "tokens", the reverse. `lengths` are the
        padded lengths of the sequences, in tokens, or None for a batch. `sections` are the features of each section before they are
        cut over cp. `choices` maps each choice of the case to its value.
        """
        raise NotImplementedError

    def shards(self, whole: dict[str, Tensor], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        """Return the part of the whole parameters that `rank` holds, by name. Needed if the domain has checkpoints=True."""
        raise NotImplementedError

    def loaded(self, shards: dict[str, Shard], layer: Layer, rank: Rank) -> dict[str, Tensor]:
        """Return the parameters of `rank` after it has loaded its shards, by name. Needed if the domain has checkpoints=True."""
        raise NotImplementedError

    def resharded(self, shards: dict[str, Tensor], layer: Layer, place: Place, mesh: Mesh) -> dict[Rank, dict[str, Tensor]]:
        """Save a checkpoint together with the other ranks, and return what each rank of `mesh` loads from it, by name.

        `shards` are this rank's parameters. Needed if the domain has saves=True.
        """
        raise NotImplementedError


class Engine(abc.ABC):
    """A serving engine that is driven event by event: a pool of slots, and the requests that own them.

    A request is a name of one or two letters. Its snapshot is called like the request with `@` behind. The engine's own allocator
    decides which slot a request gets. Laws read and fill the pool between two calls.

    - `states` [P, HV, K, V] and `windows` [P, D, W - 1] are all slots of the pool. They are the engine's own memory or views of it
      (a pool of [P, HV, V, K] returns `.mT`), so that a law can fill slots that nobody owns. Windows may have more columns than
      W - 1 if `contents` selects those of an owner.
    - `unowned` are the slots that belong to nobody and that padding rows may write to.

    If the domain has `retries`, a call that raises because memory ran out has changed nothing that an owner has, and no slot.
    """

    states: Tensor
    windows: Tensor
    unowned: tuple[int, ...] = ()

    @abc.abstractmethod
    def slots(self) -> Mapping[str, int]:
        """Return the slot of every request and of every snapshot.

        Owners with the same tokens, such as a request and its forks, may have one slot until one of them goes on.
        """

    def scratch(self) -> Sequence[int]:
        """Return the slots that requests have beside their own, for example one for each token of a draft; by default none."""
        return ()

    def contents(self, owner: str) -> tuple[Tensor, Tensor]:
        """Return the state [HV, K, V] and the window [D, W - 1] of a request or a snapshot; by default those in its slot."""
        slot = self.slots()[owner]
        return self.states[slot], self.windows[slot]

    @abc.abstractmethod
    def admit(self, requests: Sequence[str]) -> None:
        """Give each of these new requests a slot. Their state and their window are zeros when their first tokens come."""

    @abc.abstractmethod
    def prefill(self, batch: Batch) -> Tensor:
        """Process the tokens of each row after those that its request has, and return o [T, HV, V] of all tokens.

        Where `batch.snapshots` is a number, keep the state and the window after that many tokens of the row in the request's
        snapshot, which gets a slot if it has none. A row may have no tokens. Outputs of padding rows are not judged.
        """

    @abc.abstractmethod
    def decode(self, batch: Batch) -> Tensor:
        """Process one token of each row, and return o [T, HV, V].

        Where `batch.snapshots` is 1, the request's snapshot is its state and its window after that token, as for `prefill`.
        """

    def verify(self, batch: Batch) -> Tensor:
        """Return o [T, HV, V] of drafts. `commit` follows with the accepted tokens.

        All rows have the same number of tokens, unless the domain has `ragged`. A row of one token is then a plain decode.
        """
        raise NotImplementedError

    def commit(self, accepted: Sequence[int]) -> None:
        """Keep the first `accepted` tokens of each row of the last `verify`.

        They are 0 for padding rows and, if the domain has `none_accepted`, for drafts that are rejected as a whole; otherwise at
        least 1.
        """
        raise NotImplementedError

    def fork(self, new: str, old: str, *, snapshot: bool) -> None:
        """Let a new request begin from the state and window of request `old` or, with `snapshot`, of its snapshot."""
        raise NotImplementedError

    def swap(self, request: str) -> None:
        """Take a request's state and window out of the pool, give its slot back, and bring both into a slot again."""
        raise NotImplementedError

    def transfer(self, request: str) -> None:
        """Cut a request's state and window as for the ranks of another TP size, and put them together in a slot again.

        The heads of a state, and each of the sections q, k and v of a window, are cut over the ranks.
        """
        raise NotImplementedError

    def preempt(self, request: str) -> None:
        """Give the slots of a request and of its snapshot back; by default as `free` does.

        The request may be admitted again. Its tokens are then processed again, from the first one on.
        """
        self.free(request)

    @abc.abstractmethod
    def free(self, request: str) -> None:
        """Give the slots of a finished request and of its snapshot back to the pool."""


class TraceAdapter(Implementation):
    """One serving engine: `open` returns it with an empty pool. `algorithm` is the class of its prefill.

    Decoding and verification are judged as "recurrent", whatever the class of the prefill. `chunk` is the number of tokens in a
    chunk of the prefill, if it is always the same.
    """

    algorithm = "recurrent"
    chunk: int | None = None
    domain: TraceDomain = TraceDomain()

    def bring(self) -> None:
        """Import what `open` needs, if that takes seconds. Called while the first cases are drawn; by default it does nothing."""

    @abc.abstractmethod
    def open(self, sizes: Sizes) -> Engine:
        """Return an engine of these sizes, with the layer's parameters that `sizes` has. Nobody owns a slot yet."""
