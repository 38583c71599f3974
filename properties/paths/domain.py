"""The domain of parallel paths: what an implementation that several ranks share promises, and cases drawn from it."""

import dataclasses
import functools
import random
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

from hypothesis import strategies as st

from oracles.arithmetic.counter import mix_words
from oracles.operations import RULES
from properties.modules.case import MAX_CONV_WIDTH
from properties.paths.case import CHOICES, LAYER_LAYOUTS, MAX_RANKS, MOST_WIDTH, ParallelCase
from properties.rules.case import check_gradients, overflows
from properties.words.domain import OFFSETS, AnyDomain, check_tuples, check_whole
from properties.words.line import MAX_TOKENS
from properties.words.names import known_fields
from properties.words.sizes import THREE_EACH, at_limits, with_drawing
from properties.words.word import flag, some_of

COMPILED = 1 / 3  # share of a layer's cases on a GPU with a choice whose kernels are compiled
FORMS = {"gdn_layer": 4}  # number of forms of these cases; FEW_FORMS if kernels of every case are compiled
FEW_FORMS = 2
MODEL_WIDTHS = (64, 128, 96)  # widths of keys and values as in models, and one that is not a power of two
SHORT = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 64, 65, 66)
CHUNKED = 2 / 5  # share of cases in which every rank has two chunks or more
SHARED = 3 / 4  # share of a layer's cases with cp over 1, if there are more than two ranks
LONGEST = 66
MANY_SEQUENCES, MANY_HEADS = (33, 130), 257  # just over usual limits: 32 and 128, and 8 bits
UNEQUAL = (1, 3, 2)  # the lengths of packed sequences, in units that a layout can cut
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
    """The values of each choice of the path, by name."""
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
    """The least number of tokens in each piece that a CP rank holds."""
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
            *((getattr(case, name) in values, f"{name}={getattr(case, name)} is not supported") for name, values in self.choices),
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
    """Return the tokens in each piece that a CP rank holds; for zigzag, whose pieces differ, those of all its pieces together."""
    return len(case.tokens_of_ranks()[0]) // (2 if case.layout == "zigzag_batch" else 1)


def limits(domain: PathDomain) -> list[ParallelCase]:
    """Return cases just over usual limits, cheap because they are narrow and short, as far as the domain allows them.

    These are over 32 and over 128 packed sequences before one that lies over two ranks, an empty sequence exactly between two
    ranks, and over 256 heads. There are none if the check draws no large cases, and on a GPU.
    """
    if not at_limits(domain):
        return []
    words, group = _few(domain), THREE_EACH[1] // THREE_EACH[0] if domain.grouped_heads else 1
    cp, share = words["cp"], words["heads"]
    words |= {"value_heads": group * share}
    cases = []
    for layout in domain.layouts:
        unit = _unit(layout, cp)
        for count in MANY_SEQUENCES if domain.packed else ():
            half = max(2, domain.least_piece)  # tokens of the long sequence on each rank, if ranks cut the tokens of all sequences
            half += -(count - 1 + half) % max(1, unit // 2)
            short = (1,) * (count - 1)
            lengths = (unit,) * (count - 1) + (3 * unit,) if layout == "zigzag" else (*short, 2 * half, *short)
            cases.append(_with_first_norm(domain, ParallelCase(lengths, layout=layout, packed=True, **words)))
        half = unit * max(1, domain.least_piece)
        empty = ParallelCase((half, 0, half), layout=layout, packed=True, **words)
        cases += [_with_first_norm(domain, empty)] if domain.packed else []
        tokens = -(-max(4, domain.least_piece * 2 * cp) // unit) * unit
        heads = -(-(THREE_EACH[0] if group > 1 else MANY_HEADS) // share) * share
        many: dict[str, Any] = {"heads": heads, "value_heads": group * heads, "packed": not domain.batched}
        cases.append(_with_first_norm(domain, ParallelCase((tokens,), layout=layout, **(words | many))))
    return [case for case in cases if domain.outside(case) is None]


def unequal(domain: PathDomain) -> list[ParallelCase]:
    """Return a case of packed sequences of different lengths for each layout, so that other offsets have the same counts and sums.

    There are none if the check draws no large cases, and on a GPU.
    """
    if not (at_limits(domain) and domain.packed):
        return []
    words, cases = _few(domain), []
    for layout in domain.layouts:
        unit = _unit(layout, words["cp"]) * max(1, domain.least_piece)
        lengths = tuple(unit * count for count in UNEQUAL)
        cases.append(_with_first_norm(domain, ParallelCase(lengths, layout=layout, packed=True, **words)))
    return [case for case in cases if domain.outside(case) is None]


def _unit(layout: str, cp: int) -> int:
    """Return the number of tokens whose multiples a layout can cut over so many ranks."""
    return 2 * cp if layout.startswith("zigzag") else cp


def _few(domain: PathDomain) -> dict[str, Any]:
    """Return the words of a narrow case with few heads on two ranks, or on one if the domain has no more."""
    layer, narrow, several = domain.operation == "gdn_layer", min(domain.widths), domain.ranks > 1
    cp = 2 if several and domain.context_parallel else 1
    tp = 2 if several and cp == 1 and domain.tensor_parallel else 1
    share = tp * cp if layer else 1
    words: dict[str, Any] = {
        "operation": domain.operation,
        "tp": tp,
        "cp": cp,
        "key_dim": narrow,
        "value_dim": narrow,
        "heads": share,
        "value_heads": share,
        "conv_width": min(domain.conv_widths, key=lambda width: (width < 2, width)),
        "dtype": domain.dtypes[0],
        "backward": domain.backward,
        **{name: choices[0] for name, choices in domain.choices},
    }
    if domain.operation in RULES:
        words |= {"in_kernel": domain.in_kernel[0], "final_state": domain.final_state}
        words |= {"state": "random" if domain.initial_state else "none"}
    return words


def _with_first_norm(domain: PathDomain, case: ParallelCase) -> ParallelCase:
    """Return the case with the first norm of q and k that the domain has, if the operation normalises them."""
    if not case.WORDS["qk_norm_eps"].acts(case):
        return case
    return dataclasses.replace(case, qk_norm_eps=domain.qk_norm_eps[0], qk_norm_form=domain.qk_norm_forms[0])


@st.composite
def path_cases(
    draw: st.DrawFn, /, domain: PathDomain, tokens: int = 200, *, chunked: float = CHUNKED, exchanges: bool = False, **fixed: Any
) -> ParallelCase:
    """Draw any case of the domain; `fixed` gives fields as a value, or as a tuple of values to choose from.

    A share of `chunked` of the cases has two chunks or more on every rank; the others have about `tokens` tokens. If there are
    several ranks, every case is shared. Most cases of a layer have cp over 1; of two ranks, every other one has tp=2, unless
    `exchanges`: then the cases are for laws about what CP ranks exchange. ValueError if 1000 attempts give no legal case.
    """
    chance = draw(st.randoms(use_true_random=True))
    large = domain.computes and domain.longest >= LONGEST and chance.random() < chunked
    for attempt in range(1000):
        try:
            case = _drawn(chance, domain, tokens if attempt < 500 else 10 * tokens, fixed, large=large, exchanges=exchanges)
        except ValueError:
            continue  # the layout does not divide the tokens: draw again
        if domain.outside(case) is None:
            return case
    raise ValueError(f"no legal case was drawn in 1000 attempts for {domain} with {fixed}")


@functools.cache
def _meshes(ranks: int, *, tensor_parallel: bool, context_parallel: bool) -> tuple[tuple[int, int], ...]:
    """Return the meshes (tp, cp) of up to `ranks` ranks, of one rank only if there are no more."""
    tps, cps = (range(1, ranks + 1) if parallel else (1,) for parallel in (tensor_parallel, context_parallel))
    return tuple((tp, cp) for tp in tps for cp in cps if min(ranks, 2) <= tp * cp <= ranks) or ((1, 1),)


def _drawn(
    chance: random.Random, domain: PathDomain, tokens: int, fixed: dict[str, Any], *, large: bool, exchanges: bool
) -> ParallelCase:
    def field(name: str, choices: Sequence[Any]) -> Any:
        options = fixed.get(name, tuple(choices))
        return chance.choice(options) if isinstance(options, tuple) else options

    layer = domain.operation == "gdn_layer"
    meshes = list(_meshes(domain.ranks, tensor_parallel=layer and domain.tensor_parallel, context_parallel=domain.context_parallel))
    if domain.drawing.forms:
        fixed = _of_a_form(chance, domain, meshes, fixed)
    if (large or chance.random() < SHARED) and (exchanges or domain.ranks > 2):
        meshes = [mesh for mesh in meshes if mesh[1] > 1] or meshes
    wide = [mesh for mesh in meshes if mesh[0] * mesh[1] > domain.ranks // 2]
    tp, cp = field("mesh", wide if wide and chance.random() < 1 / 2 else meshes)
    layout = field("layout", domain.layouts)
    packed = field(
        "packed", [choice for choice, can in ((True, domain.packed), (True, domain.packed), (False, domain.batched)) if can]
    )
    padding = field("padding", ("none", "least", "more")) if packed and domain.padded and layer else "none"
    sp = tp > 1 and domain.sequence_parallel and field("sp", (False, True))
    unit = (2 * cp if layout.startswith("zigzag") else cp) * (tp if sp else 1)
    if large:
        lengths = _of_chunks(chance, domain, layout, unit, cp, packed=packed, padded=padding != "none")
    else:
        lengths = _lengths(chance, domain, layout, unit, tokens, packed=packed, padded=padding != "none")
    share = tp * cp if layer else 1
    heads = share * field("heads_a_rank", (1, 1, 2) if share < 16 and not large else (1,))
    value_heads = heads * (field("group", (1, 2) if large else (1, 2, 2, 3)) if domain.grouped_heads else 1)
    key_dim = field("key_dim", domain.widths)
    values = {}
    for name, choices in domain.choices:
        setting = fixed.get(name)
        several = setting if isinstance(setting, tuple) else _weighted(chance, name, choices, domain, slow=not large)
        values[name] = setting if setting in choices else chance.choice(several)
    case = ParallelCase(
        lengths,
        domain.operation,
        tp=tp,
        cp=cp,
        sp=sp,
        layout=layout,
        packed=packed,
        padding=padding,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=key_dim if domain.equal_widths else field("value_dim", domain.widths),
        hidden=field("hidden", (8, 12, 32)),
        conv_width=field("conv_width", domain.conv_widths),
        dtype=field("dtype", ("fp32", *domain.dtypes) if "fp32" in domain.dtypes else domain.dtypes),
        gate=field("gate", ("long", "ordinary", "mixed")),
        values=field("values", ("ordinary", "scaled")),
        conv_bias=domain.conv_bias and field("conv_bias", (False, True)),
        allow_neg_eigval=layer and domain.negative_eigenvalues and field("allow_neg_eigval", (False, True)),
        offsets=field("offsets", domain.offsets) if packed else "int64",
        backward=domain.backward and field("backward", (True,)),
        deterministic=domain.deterministic and field("deterministic", (False, True)),
        recompute=domain.recomputes and field("recompute", (False, True)),
        seed=chance.randrange(2**16),
        **values,
    )
    usual = (domain.qk_norm_eps, domain.qk_norm_forms) == (PathDomain.qk_norm_eps, PathDomain.qk_norm_forms)
    if not usual and case.WORDS["qk_norm_eps"].acts(case):
        case = _with_norm(chance, domain, case, fixed)
    rare = {
        "in_kernel": domain.in_kernel,
        "state": ("none", "random", "random") if domain.initial_state else ("none",),
        "final_state": (False, True) if domain.final_state else (False,),
    }  # drawn last, as other words came before them
    words = {name: field(name, choices) for name, choices in rare.items() if choices != (getattr(case, name),)}
    case = dataclasses.replace(case, **words) if domain.operation in RULES else case
    if case.in_kernel in ("beta", "both") and domain.negative_eigenvalues:
        case = dataclasses.replace(case, allow_neg_eigval=field("allow_neg_eigval", (False, True)))
    if case.in_kernel in ("gate", "both") and domain.dt_bias:
        case = dataclasses.replace(case, dt_bias=field("dt_bias", (True, True, False)))
    if domain.strong_decays and "gate" not in fixed and chance.random() < 1 / 6:
        case = dataclasses.replace(case, gate="strong")
    return case


def _with_norm(chance: random.Random, domain: PathDomain, case: ParallelCase, fixed: dict[str, Any]) -> ParallelCase:
    """Return the case with a norm of q and k that the domain has, and in half of the cases with q and k near its eps."""
    eps, form = chance.choice(domain.qk_norm_eps), chance.choice(domain.qk_norm_forms)
    words: dict[str, Any] = {"qk_norm_eps": eps, "qk_norm_form": form}
    if "values" not in fixed and chance.random() < 1 / 2:
        words["values"] = "small"
    if case.dtype == "fp16" and overflows(eps, form):
        words["backward"] = False
    return dataclasses.replace(case, **words)


def _of_a_form(chance: random.Random, domain: PathDomain, meshes: list[tuple[int, int]], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the fixed fields of a case on a GPU: a form if its kernels are compiled, else choices without compiled kernels."""
    values: dict[str, tuple[str, ...]] = {}
    if domain.operation == "gdn_layer":
        for name, choices in domain.choices:
            options = fixed.get(name, choices)
            options = options if isinstance(options, tuple) else (options,)
            values[name] = tuple(value for value in options if value in choices) or choices
        plain = {name: tuple(value for value in several if value != "fla") for name, several in values.items()}
        compiled = plain != values and (not all(plain.values()) or chance.random() < COMPILED)
        values = values if compiled else plain
        if not compiled:
            return {**fixed, **values}
    form = chance.choice(domain.drawing.forms)
    shared = tuple(mesh for mesh in meshes if mesh[0] * mesh[1] == form.ranks)
    return {**form._asdict(), "mesh": shared, **fixed, **values}


def _weighted(chance: random.Random, name: str, choices: Sequence[str], domain: PathDomain, *, slow: bool) -> tuple[str, ...]:
    """Return the quick values of a choice, and with `slow` one time in eight also the slow ones."""
    quick = tuple(value for value in choices if f"{name}={value}" not in domain.slow)
    return tuple(choices) if not quick or (slow and chance.random() < 1 / 8) else quick


def _of_chunks(
    chance: random.Random, domain: PathDomain, layout: str, unit: int, cp: int, *, packed: bool, padded: bool
) -> tuple[int, ...]:
    """Return lengths that give every rank two chunks or more, and that end anywhere in a chunk.

    Beside the long sequence, a packed call has up to two short ones, at any place.
    """
    least = 2 * domain.drawing.chunk * cp
    one = chance.randint(least, least + domain.drawing.chunk * cp)
    if not packed:
        return (-(-one // unit) * unit,)
    lengths = [chance.choice(SHORT) for _ in range(chance.choice((0, 1, 2)))]
    lengths.insert(chance.randint(0, len(lengths)), one)
    if padded:
        return tuple(lengths)
    if layout == "zigzag":
        return tuple(-(-length // unit) * unit for length in lengths)
    return (*lengths[:-1], lengths[-1] - sum(lengths) % -unit)


def _lengths(
    chance: random.Random, domain: PathDomain, layout: str, unit: int, tokens: int, *, packed: bool, padded: bool
) -> tuple[int, ...]:
    """Return lengths that the layout can cut: multiples of `unit`, or only their total, or any lengths if they are padded."""
    tokens = max(tokens, 2 * unit)
    if not packed:
        rows = chance.choice((1, 1, 2, 3))
        return (unit * chance.randint(1, max(1, min(domain.longest, tokens // rows) // unit)),) * rows
    count = chance.choice((1, 2, 3, 4, 4, chance.randint(5, 12)))
    if padded:
        drawn = [chance.choice(SHORT) for _ in range(count)]
    elif layout == "zigzag":
        drawn = [unit * chance.choice((1, 1, 2, 3, 5, 8)) for _ in range(count)]
    else:
        total = unit * chance.randint(1, max(1, tokens // unit))
        cuts = sorted(chance.randint(0, total) for _ in range(count - 1))
        drawn = [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
        if not domain.empty:
            drawn = [length for length in drawn if length]
        return tuple(drawn)
    if domain.empty:
        drawn = [0 if chance.random() < 1 / 6 else length for length in drawn]
    while len(drawn) > 1 and sum(drawn) > tokens:
        drawn.pop()
    return tuple(drawn)
