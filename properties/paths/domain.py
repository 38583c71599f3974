"""The domain of parallel paths: what an implementation that several ranks share promises."""

import dataclasses
import random
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from oracles.arithmetic.counter import mix_words
from properties.modules.case import MAX_CONV_WIDTH
from properties.paths.case import CHOICES, LAYER_LAYOUTS, MAX_RANKS, MOST_WIDTH, ParallelCase
from properties.rules.case import check_gradients
from properties.words.domain import OFFSETS, AnyDomain, check_tuples, check_whole
from properties.words.line import MAX_TOKENS
from properties.words.names import known_fields
from properties.words.sizes import with_drawing
from properties.words.word import flag, some_of

FORMS = {"gdn_layer": 4}  # number of forms of these cases; FEW_FORMS if kernels of every case are compiled
FEW_FORMS = 2
MODEL_WIDTHS = (64, 128, 96)  # widths of keys and values as in models, and one that is not a power of two
LONGEST = 66
MOST_PIECE = 64  # the most tokens of a piece that a domain may demand
OPERATIONS = ("gdn_layer", "gated_delta_rule", "kda", "causal_conv1d", "kda_layer")
MESHES = ("1x1", "2x1", "1x2", "2x2", "4x1", "1x4")


class Form(NamedTuple):
    """What the kernels of a path are compiled for; `ranks` is tp * cp. On a GPU, each new form costs seconds of compilation."""

    ranks: int
    packed: bool
    heads_a_rank: int
    group: int
    key_dim: int
    value_dim: int
    conv_width: int
    conv_bias: bool
    dtype: str
    offsets: str


@known_fields
@dataclasses.dataclass(frozen=True)
class PathDomain(AnyDomain):
    """The calls for which a parallel path promises right results; by default all calls of a layer.

    Fields that Domain has too mean the same. ValueError for a field outside its choices or range, and unless `packed` or `batched`
    is True.
    """

    CASE = ParallelCase
    has_limits = True

    operation: str = "gdn_layer"
    ranks: int = 8
    """The number of available ranks: tp * cp is at most that."""
    exchange_ranks: int = 64
    """The same for exchanges without a layer, which can afford more simulated ranks."""
    processes: bool = False
    """Whether the path needs ranks that are processes."""
    tensor_parallel: bool = True
    """Whether tp may be over 1."""
    context_parallel: bool = True
    """Whether cp may be over 1."""
    sequence_parallel: Annotated[bool, flag("sp")] = True
    layouts: Annotated[tuple[str, ...], some_of("layout")] = ("zigzag",)
    packed: Annotated[bool, flag("packed")] = True
    batched: Annotated[bool, flag("packed", value=False)] = True
    padded: bool = True
    empty: bool = True
    dtypes: Annotated[tuple[str, ...], some_of("dtype")] = ("fp32", "bf16", "fp16")
    offsets: Annotated[tuple[str, ...], some_of("offsets")] = OFFSETS
    grouped_heads: bool = True
    widths: tuple[int, ...] = (8, 16, 4, 12)
    equal_widths: bool = False
    conv_widths: Annotated[tuple[int, ...], some_of("conv_width")] = (4, 2, 3)
    conv_bias: Annotated[bool, flag("conv_bias")] = True
    negative_eigenvalues: Annotated[bool, flag("allow_neg_eigval")] = True
    strong_decays: Annotated[bool, flag("gate", value="strong")] = True
    """Whether a token may decay the state by e^-3 to e^-60."""
    choices: tuple[tuple[str, tuple[str, ...]], ...] = tuple(CHOICES.items())
    """The values of each choice of the path, by name. One that is left out has the first of its values."""
    slow: tuple[str, ...] = ()
    """Values of choices, as name=value, that are drawn seldom, and by the law `same` only for small cases."""
    longest: int = LONGEST
    """The most tokens of a sequence of a batch. If it is below LONGEST, no case has two chunks on every rank."""
    exchanges: bool = True
    """Whether its exchanges, CP -> HP and HP -> CP, can be called alone."""
    counts: bool = True
    """Whether its collectives are counted."""
    refuses: bool = True
    """Whether it promises to refuse illegal layouts."""
    checkpoints: bool = True
    """Whether it reports which parts of the parameters its shards are."""
    saves: bool = False
    """Whether it writes a checkpoint that ranks of another mesh load."""
    steps: bool = False
    """Whether its own training step adds the gradients of parameters over the ranks."""
    clips: bool = False
    """Whether it clips the gradients of an optimizer step to a norm, which is that of all ranks together."""
    skips: bool = False
    """Whether every rank skips an optimizer step in which a gradient on any rank is not finite."""
    recomputes: Annotated[bool, flag("recompute")] = False
    """Whether it can compute activations again in backward."""
    deterministic: Annotated[bool, flag("deterministic")] = True
    in_kernel: Annotated[tuple[str, ...], some_of("in_kernel")] = ("none",)
    """Which of gate and beta a rule can compute itself. A rank adds up the gradients of A_log and dt_bias over its own tokens."""
    dt_bias: Annotated[bool, flag("dt_bias", value=False)] = True
    """Whether a rule can compute its gate without a dt_bias."""
    initial_state: bool = False
    """Whether a rule takes initial states. Every rank gets those of all sequences."""
    final_state: Annotated[bool, flag("final_state")] = False
    """Whether a rule returns final states. Every rank returns those of all sequences; no gradient flows through them."""
    replicas: bool = True
    """Whether results that TP ranks hold together are the same on each of them, to the bit."""
    backward: Annotated[bool, flag("backward")] = True
    refills: bool = True
    """Whether a caller may put other offsets into a `cu_seqlens` that an earlier call had."""
    keeps_outputs: bool = True
    computes: bool = True
    """Whether what is not an exchange can be called."""
    least_piece: int = 0
    """The least number of tokens in each piece that a CP rank holds, of sequences with tokens."""
    tf32: tuple[str, ...] = ()
    """Values of choices, as name=value, whose kernels multiply float32 matrices in TF32 on a GPU."""
    compiled_widths: tuple[int, ...] = ()
    """The widths of cases on a GPU whose kernels are compiled; `widths` if there are none."""
    qk_norm_eps: Annotated[tuple[str, ...], some_of("qk_norm_eps")] = ("1e-6",)
    """The eps of the norm of q and k, of a layer or in a rule's kernel."""
    qk_norm_forms: Annotated[tuple[str, ...], some_of("qk_norm_form")] = ("inside",)

    def __post_init__(self) -> None:
        self.check_fields(operations=OPERATIONS)
        for name, most in (("ranks", MAX_RANKS), ("exchange_ranks", MAX_RANKS), ("longest", MAX_TOKENS)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
                raise ValueError(f"{name} must be in 1..{most}, got {number!r}")
        if self.operation == "gdn_layer" and not {*self.layouts} <= {*LAYER_LAYOUTS}:
            raise ValueError(f"layouts must be zigzag or contiguous for gdn_layer, got {', '.join(self.layouts)}")
        check_whole("widths", self.widths, MOST_WIDTH)
        if self.compiled_widths != ():
            check_whole("compiled_widths", self.compiled_widths, MOST_WIDTH)
        check_whole("conv_widths", self.conv_widths, MAX_CONV_WIDTH)
        _check_choices(self.choices)
        values = tuple(f"{name}={value}" for name, several in CHOICES.items() for value in several)
        check_tuples(self, ("slow", values), ("tf32", values), least=0)
        usual = (self.qk_norm_eps, self.qk_norm_forms) == (PathDomain.qk_norm_eps, PathDomain.qk_norm_forms)
        if not usual and (self.operation == "causal_conv1d" or not self._normalises()):
            raise ValueError(
                f"qk_norm_eps and qk_norm_forms must be left out for {self.operation} unless qk_norm=in_kernel is among its choices"
            )
        if self.operation == "gdn_layer":
            check_gradients(self)
        if self.operation != "gdn_layer" and not self.context_parallel:
            raise ValueError(f"context_parallel must be True for {self.operation}, which ranks share in no other way, got False")
        if isinstance(self.least_piece, bool) or not isinstance(self.least_piece, int) or not 0 <= self.least_piece <= MOST_PIECE:
            raise ValueError(f"least_piece must be in 0..{MOST_PIECE}, got {self.least_piece!r}")
        if not self.packed and self.longest < 4 * self.least_piece:
            raise ValueError(
                f"longest must be at least 4 * least_piece = {4 * self.least_piece} without packed sequences, because two ranks "
                f"have up to four pieces of a sequence, got {self.longest}"
            )

    def _normalises(self) -> bool:
        """Whether the operation of some case normalises q and k itself."""
        return self.operation == "gdn_layer" or "in_kernel" in dict(self.choices).get("qk_norm", ("in_kernel",))

    def reasons(self, case: Any) -> Iterable[tuple[bool, str]]:
        """Return what else must be true of a case inside the domain, each with what is said if it is not."""
        chosen = dict(self.choices)
        return (
            (
                case_ranks(case) <= max(self.ranks, self.exchange_ranks),
                f"tp={case.tp} cp={case.cp} needs {case_ranks(case)} ranks, there are {max(self.ranks, self.exchange_ranks)}",
            ),
            (self.tensor_parallel or case.tp == 1, f"tp={case.tp}: tensor parallelism is not supported"),
            (self.context_parallel or case.cp == 1, f"cp={case.cp}: context parallelism is not supported"),
            (self.padded or case.padding == "none", f"padding={case.padding} is not supported"),
            (self.initial_state or case.state == "none", f"state={case.state}: an initial state is not supported"),
            (self.empty or min(case.lengths) > 0, "empty sequences are not supported"),
            (self.grouped_heads or case.heads == case.value_heads, "heads and value_heads must be equal"),
            (not self.equal_widths or case.key_dim == case.value_dim, "key_dim and value_dim must be equal"),
            (
                not self.drawing.forms or not compiles(case) or form_of(case) in self.drawing.forms,
                "its kernels are compiled for another form than those that this check draws",
            ),
            (_piece(case) >= self.least_piece, f"pieces of {_piece(case)} tokens, under {self.least_piece}, are not supported"),
            *(
                (getattr(case, name) in chosen.get(name, values[:1]), f"{name}={getattr(case, name)} is not supported")
                for name, values in CHOICES.items()
            ),
        )


def _check_choices(choices: object) -> None:
    """Raise ValueError unless choices are pairs of a name of CHOICES and a tuple of some of its values, each name once."""
    pairs = choices if isinstance(choices, tuple) else (None,)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], tuple) for pair in pairs):
        raise ValueError(f"choices must be pairs of a name and a tuple of values, got {choices!r}")
    for name, values in pairs:
        if name not in CHOICES:
            raise ValueError(f"choices must name some of {', '.join(CHOICES)}, got {name!r}")
        if not values or not {*values} <= {*CHOICES[name]}:
            raise ValueError(f"choices must have some of {', '.join(CHOICES[name])} for {name}, got {values!r}")
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError(f"choices must name each choice once, got {', '.join(name for name, _ in pairs)}")


def case_ranks(case: ParallelCase) -> int:
    """Return how many ranks share a case."""
    return case.tp * case.cp


def form_of(case: ParallelCase) -> Form:
    """Return what the kernels of a case are compiled for."""
    share = case_ranks(case) if case.operation == "gdn_layer" else 1
    heads, group = case.heads // share, case.value_heads // case.heads
    widths = (case.key_dim, case.value_dim, case.conv_width, case.conv_bias)
    return Form(case_ranks(case), case.packed, heads, group, *widths, case.dtype, case.offsets)


def with_forms(domain: PathDomain, seed: int) -> PathDomain:
    """Return the domain with a few forms drawn from a seed, for cases whose kernels are compiled; the forms take turns in dtype."""
    chance = random.Random(mix_words(seed, "forms"))  # noqa: S311 - seeded, and not for secrets
    widths, forms = domain.compiled_widths or domain.widths, []
    for number in range(FORMS.get(domain.operation, FEW_FORMS)):
        packed = chance.choice([choice for choice, can in ((True, domain.packed), (False, domain.batched)) if can])
        forms.append(
            Form(
                chance.randint(min(2, domain.ranks), domain.ranks),
                packed,
                chance.choice((1, 2)),
                chance.choice((1, 2)) if domain.grouped_heads else 1,
                key_dim := chance.choice(widths),
                key_dim if domain.equal_widths else chance.choice(widths),
                chance.choice(domain.conv_widths),
                domain.conv_bias and chance.choice((False, True)),
                domain.dtypes[(seed + number) % len(domain.dtypes)],
                chance.choice(domain.offsets) if packed else "int64",
            )
        )
    return with_drawing(domain, forms=tuple(forms))


def compiles(case: ParallelCase) -> bool:
    """Return whether kernels of a case are compiled; in a layer, only those of flash-linear-attention are."""
    return case.operation != "gdn_layer" or "fla" in (case.conv, case.rule)


def _piece(case: ParallelCase) -> int:
    """Return the tokens in the smallest piece that a CP rank holds, of sequences with tokens."""
    if case.layout == "zigzag" and case.cp > 1:
        lengths = case.padded if case.packed else case.lengths
        return min((length for length in lengths if length), default=0) // (2 * case.cp)
    return len(case.tokens_of_ranks()[0]) // (2 if case.layout == "zigzag_batch" else 1)
