"""Strategies stay inside a domain and reach every regime in it; laws say what they need; views are what they claim."""

import dataclasses
import math
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles.operation import DTYPES
from properties import palette
from properties.books import BOOKS
from properties.laws.views import banded, view
from properties.rules.case import BETAS, GATES, IN_KERNEL, STATES, VALUES, Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from properties.rules.laws import LAWS
from properties.words.domain import VIEWS
from properties.words.example import Example
from properties.words.lengths import BLOCKS, EDGES, lengths
from tests.random_domains import faults
from tests.together import for_each

DOMAINS = {
    "everything": Domain(),
    "bf16 only": Domain(dtypes=("bf16",)),
    "fp16 only": Domain(dtypes=("fp16",)),
    "gates in fp32": Domain(gate_dtypes=("fp32",)),
    "gates in the input's dtype": Domain(gate_dtypes=("input",)),
    "K = V = 128": Domain(key_dims=(128, 128), value_dims=(128, 128)),
    "widths in steps of 16": Domain(width_step=16),
    "widths in steps of 64 up to 256": Domain(key_dims=(64, 256), value_dims=(64, 256), width_step=64),
    "an unusual width": Domain(key_dims=(48, 48), value_dims=(96, 96)),
    "K = V": Domain(equal_widths=True),
    "HV = H": Domain(grouped_heads=False),
    "no packing": Domain(packed=False),
    "no batch": Domain(batched=False),
    "no empty sequence": Domain(empty=False),
    "no batch and no empty sequence": Domain(batched=False, empty=False),
    "no initial state": Domain(initial_state=False),
    "no norm": Domain(qk_norm=False),
    "no scale": Domain(scale=False),
    "no beta over 1": Domain(negative_eigenvalues=False),
    "no strides": Domain(views=False),
    "no backward": Domain(backward=False),
    "not deterministic": Domain(deterministic=False),
    "gates in the kernel too": Domain(in_kernel=IN_KERNEL),
    "gates in the kernel only, with dt_bias": Domain(in_kernel=("both",), dt_bias=False),
    "KDA": Domain(operation="kda", in_kernel=IN_KERNEL),
    "the delta rule": Domain(operation="delta_rule", in_kernel=("none", "beta")),
    "a decode kernel": Domain(
        dtypes=("bf16",),
        gate_dtypes=("fp32",),
        key_dims=(128, 128),
        value_dims=(128, 128),
        packed=False,
        empty=False,
        backward=False,
    ),
    "a narrow training kernel": Domain(
        dtypes=("bf16",),
        key_dims=(128, 128),
        value_dims=(128, 128),
        equal_widths=True,
        grouped_heads=False,
        batched=False,
        empty=False,
        initial_state=False,
        qk_norm=False,
        negative_eigenvalues=False,
        views=False,
    ),
}
# The laws that need something that a domain lacks, and what that is.
NO_GATES = {"gates": "neither gate nor beta is computed in the kernel"}
LACKING = {
    "gates in the kernel only, with dt_bias": {"recall": "explicit gates are not supported"},
    "no packing": {"packed": "packed"},
    "no batch": {"packed": "batched", "recurrent": "batched"},
    "no batch and no empty sequence": {"packed": "batched", "recurrent": "batched"},
    "no initial state": {"cut": "initial state", "recurrent": "initial state"},
    "no norm": {"norm": "qk norm"},
    "no strides": {"strides": "views"},
    "no backward": {"recompute": "backward"},
    "a decode kernel": {"packed": "packed", "recompute": "backward"},
    "a narrow training kernel": {
        "packed": "batched",
        "recurrent": "initial state",
        "cut": "initial state",
        "norm": "qk norm",
        "strides": "views",
    },
}


def lacking(name: str) -> dict[str, str]:
    """What a domain lacks; all but those that compute gates lack these."""
    computes = set(DOMAINS[name].in_kernel) > {"none"}
    return LACKING.get(name, {}) | ({} if computes else NO_GATES)


# Laws draw inside a domain


def drawn(domain: Domain, count: int) -> dict[str, list[Example]]:
    """Examples of every law that needs nothing that the domain lacks, the same in each run."""
    return {law.name: palette.sample(law.draw(domain), 0, count) for law in LAWS.values() if law.needs(domain) is None}


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.slow_after_first
def test_every_law_draws_what_the_domain_promises_and_the_law_accepts(name: str) -> None:
    assert faults(DOMAINS[name], 1, 3) == {}


def test_examples_of_everything_are_outside_a_narrow_domain() -> None:
    narrow = DOMAINS["a narrow training kernel"]
    cases_drawn = [example.case for law_examples in drawn(Domain(in_kernel=IN_KERNEL), 3).values() for example in law_examples]
    assert len(cases_drawn) >= 3 * len(LAWS)
    assert sum(narrow.outside(case) is not None for case in cases_drawn) > 0.9 * len(cases_drawn)


@for_each("name", DOMAINS)
def test_law_says_in_words_what_the_domain_lacks(name: str) -> None:
    reasons = {law.name: law.needs(DOMAINS[name]) for law in LAWS.values()}
    wanted = lacking(name)
    assert {law for law, words in reasons.items() if words} == set(wanted)
    for law, what in wanted.items():
        assert reasons[law] in (what, f"{what} is not supported")


def test_absent_does_not_run_where_no_argument_may_be_left_out() -> None:
    least = Domain(final_states="none", initial_state=False, backward=False, packed=False, scale=False)
    assert LAWS["absent"].needs(least) == "no argument may be left out"
    for words in ({"final_states": "each"}, {"backward": True}, {"initial_state": True}, {"scale": True}, {"packed": True}):
        assert LAWS["absent"].needs(dataclasses.replace(least, **words)) is None, words


@for_each("width", [64, 128])
def test_recall_without_a_scale_runs_only_where_the_root_of_k_is_a_power_of_two(width: int) -> None:
    domain = Domain(key_dims=(width, width), value_dims=(width, width), scale=False)
    possible = LAWS["recall"].needs(domain) is None

    @settings(max_examples=10, phases=[Phase.generate])
    @given(example=LAWS["recall"].draw(domain))
    def run(example: Example) -> None:
        assert domain.outside(example.case) is None

    if possible:
        run()
    assert possible == (width == 64)


def test_laws_of_every_book_have_a_name_a_sentence_and_a_kind() -> None:
    for book in BOOKS:
        for name, law in book.laws.items():
            assert law.name == name
            assert law.kind in ("truth", "exact")
            assert len(law.says.split()) > 5, law.says
            assert not law.says.endswith(".")
        assert len({law.says for law in book.laws.values()}) == len(book.laws)


@pytest.fixture(scope="module")
def examples() -> dict[str, list[Example]]:
    """Examples of every law in the whole domain."""
    return drawn(Domain(in_kernel=IN_KERNEL), 200)


@pytest.mark.slow
def test_variants_are_all_drawn_where_the_domain_allows_them(examples: dict[str, list[Example]]) -> None:
    for name, law in LAWS.items():
        # Streams are drawn on a GPU alone; what a call leaves out, and strided index tensors, only for domains that say so.
        seldom = {"streams", "indices", "far_tokens", "far_heads", "far_sequences", "gate", "beta", "options"}
        drawn = {example.variant for example in examples[name]}
        assert drawn - seldom == set(law.variants or (None,)) - seldom
        assert name != "strides" or drawn & seldom


@pytest.mark.slow
def test_places_are_drawn_at_the_edges_of_blocks_and_between(examples: dict[str, list[Example]]) -> None:
    for name in ("cut", "future"):
        places = {example.at for example in examples[name]}
        assert 1 in places
        assert places & {63, 64, 65}
        assert len(places) > 8
    for name in ("packed", "samples", "heads"):
        assert {example.at for example in examples[name]} >= {0, 1}
    for name, law in LAWS.items():
        assert all((example.at is None) == (law.place is None) for example in examples[name])


# Domains


def outside_of() -> Iterator[tuple[Domain, str, str]]:
    """A domain, a line outside it, and the words that say why."""
    yield Domain(dtypes=("bf16",)), "lengths=5 dtype=fp32", "dtype=fp32 is not among bf16"
    yield Domain(gate_dtypes=("fp32",)), "lengths=5 gate_dtype=input", "gate_dtype=input is not among fp32"
    yield Domain(key_dims=(64, 128)), "lengths=5", "key_dim=16 is not in 64..128"
    yield Domain(value_dims=(1, 8)), "lengths=5", "value_dim=16 is not in 1..8"
    yield Domain(width_step=16), "lengths=5 key_dim=24", "key_dim=24 is not in 1..256 in steps of 16"
    yield Domain(equal_widths=True), "lengths=5 value_dim=32", "key_dim=16 and value_dim=32 must be equal"
    yield Domain(grouped_heads=False), "lengths=5 value_heads=2", "heads=1 and value_heads=2 must be equal"
    yield Domain(packed=False), "lengths=5 packed=yes", "packed=yes is not supported"
    yield Domain(batched=False), "lengths=5", "packed=no is not supported"
    yield Domain(empty=False), "lengths=5+0 packed=yes", "empty sequences are not supported"
    yield Domain(initial_state=False), "lengths=5 state=zero", "state=zero: an initial state is not supported"
    yield Domain(qk_norm=False), "lengths=5 qk_norm=yes", "qk_norm=yes is not supported"
    yield Domain(scale=False), "lengths=5 scale=one", "scale=one is not supported"
    yield Domain(negative_eigenvalues=False), "lengths=5 beta=two", "beta=two: beta over 1 is not supported"
    yield Domain(backward=False), "lengths=5", "backward=yes is not supported"


@for_each(("domain", "line", "reason"), list(outside_of()))
def test_domain_says_why_a_case_is_outside(domain: Domain, line: str, reason: str) -> None:
    assert domain.outside(Case.parse(line)) == reason
    assert Domain().outside(Case.parse(line)) is None


# Strategies reach every regime


@pytest.fixture(scope="module")
def sample() -> list[Case]:
    """Four hundred cases of the whole domain."""
    seen: list[Case] = []

    @settings(max_examples=400)
    @given(case=cases(Domain(), value_heads=8))
    def collect(case: Case) -> None:
        seen.append(case)

    collect()
    return seen


@for_each(
    ("field", "choices"),
    [
        ("dtype", tuple(DTYPES)),
        ("gate", (*GATES, "edges", "runs")),
        ("beta", BETAS),
        ("values", tuple(value for value in VALUES if value != "one_hot")),
        ("state", STATES),
        ("scale", ("default", "one", "half")),
        ("gate_dtype", ("fp32", "input")),
        ("offsets", ("int64", "int32")),
        ("packed", (False, True)),
        ("qk_norm", (False, True)),
    ],
)
def test_each_choice_is_drawn_often_enough(sample: list[Case], field: str, choices: tuple[object, ...]) -> None:
    counts = {choice: sum(getattr(case, field) == choice for case in sample) for choice in choices}
    assert {getattr(case, field) for case in sample} == set(choices)
    assert min(counts.values()) >= len(sample) / len(choices) / 5, counts


def test_shapes_that_find_bugs_are_drawn(sample: list[Case]) -> None:
    shares = {
        "an empty sequence": lambda case: 0 in case.lengths,
        "an empty sequence between others": lambda case: 0 in case.lengths[1:-1],
        "under a chunk": lambda case: 0 < max(case.lengths) < 64,
        "over a chunk": lambda case: max(case.lengths) > 64,
        "several chunks": lambda case: max(case.lengths) > 128,
        "one token": lambda case: 1 in case.lengths,
        "several sequences": lambda case: len(case.lengths) > 1,
        "unequal sequences": lambda case: len(set(case.lengths)) > 1,
        "a batch": lambda case: not case.packed and len(case.lengths) > 1,
        "one packed sequence": lambda case: case.packed and len(case.lengths) == 1,
        "grouped heads": lambda case: case.value_heads > case.heads,
        "several key heads, grouped": lambda case: case.value_heads > case.heads > 1,
        "K over V": lambda case: case.key_dim > case.value_dim,
        "V over K": lambda case: case.key_dim < case.value_dim,
        "K no power of two": lambda case: math.log2(case.key_dim) % 1 > 0,
        "one channel": lambda case: 1 in (case.key_dim, case.value_dim),
        "a state in every sequence of several": lambda case: len(case.lengths) > 1 and case.state == "random",
    }
    counts = {what: sum(map(seen, sample)) for what, seen in shares.items()}
    assert min(counts.values()) >= 8, counts
    every = {length for case in sample for length in case.lengths}
    assert {63, 64, 65, 15, 16, 17, 31, 32, 33, 127, 128, 129, 130, 1, 0} <= every
    assert {case.value_heads // case.heads for case in sample} == {1, 2, 3, 4, 8}
    assert max(case.value_dim for case in sample) == 512
    assert sum(len(case.lengths) > 32 for case in sample) > 1, "more sequences than a warp has threads"
    assert {len(case.lengths) for case in sample if not case.packed} >= {1, 2, 3}
    assert len({case.seed for case in sample}) > 50
    assert max(sum(case.lengths) for case in sample) <= 260


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    empty=st.booleans(),
    many=st.booleans(),
    sequences=st.sampled_from([(1, 1), (1, 4), (2, 3), (5, 8)]),
    longest=st.sampled_from([1, 12, 80, 150]),
    total=st.sampled_from([20, 100, 260]),
)
@pytest.mark.slow
def test_lengths_keep_their_limits(
    *, seed: int, empty: bool, many: bool, sequences: tuple[int, int], longest: int, total: int
) -> None:
    got = lengths(random.Random(seed), sequences, longest, total, empty=empty, many=many)
    assert sequences[0] <= len(got) <= sequences[1] or (many and (5 <= len(got) <= 12 or 33 <= len(got) <= 70))
    assert max(got) <= max(longest, 5 if many else 0)
    assert sum(got) <= total + (0 if empty else len(got)), "where none may be empty, one token each is left"
    assert min(got) >= (0 if empty else 1)


def test_edges_stand_on_both_sides_of_blocks() -> None:
    assert {16, 32, 64, 128} <= {*BLOCKS}
    for block in (16, 32, 64, 128):
        assert {block - 1, block + 1} <= {*EDGES}


@settings(max_examples=50)
@given(
    case=cases(
        Domain(),
        packed=True,
        gate="64",
        groups=((2, 4),),
        key_dim=(8, 16),
        backward=False,
        sequences=(3, 3),
        longest=16,
    )
)
def test_fixed_fields_are_as_given(case: Case) -> None:
    assert (case.packed, case.gate, case.heads, case.value_heads, case.backward) == (True, "64", 2, 4, False)
    assert case.key_dim in (8, 16)
    assert len(case.lengths) == 3
    assert max(case.lengths) <= 16


# Views

SHAPES = ((1, 5, 2, 8), (2, 5, 1, 8), (2, 4, 8, 12), (1, 7, 3), (2, 7, 1), (1, 1, 1, 1), (1, 6, 1), (1, 0, 2, 8), (0, 2, 3))


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.arange(1, math.prod(shape) + 1, dtype=torch.float64) / 8).to(dtype).reshape(shape)


def memory(x: Tensor) -> Tensor:
    """Every element of the allocation behind x."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())


@for_each("how", [how for how in VIEWS if how != "expanded"])
@for_each("shape", SHAPES)
@for_each("dtype", DTYPES.values())
def test_view_is_the_tensor_with_nan_all_around_it(how: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(shape, dtype)
    got = view(x, how)
    assert got.dtype == dtype
    assert torch.equal(got, x)
    around = memory(got)
    assert int(around.isnan().sum()) == around.numel() - x.numel()
    assert around.numel() > x.numel() or not x.numel()
    got.fill_(0)
    assert int(memory(got).isnan().sum()) == around.numel() - x.numel(), "writing it leaves the bands"
    assert torch.equal(x, numbers(shape, dtype)), "and the original"


@for_each("shape", [(1, 5, 2, 8), (2, 5, 3, 8), (2, 4, 8, 12), (2, 7, 3)])
def test_views_have_the_strides_they_claim(shape: tuple[int, ...]) -> None:
    x = numbers(shape, torch.float32)
    views = {how: view(x, how) for how in VIEWS}
    assert views["sliced"].stride(-1) == 1
    assert views["sliced"].stride(-2) == shape[-1] + 4
    assert not views["sliced"].is_contiguous()
    assert views["transposed"].stride(-2) == 1
    assert views["transposed"].stride(-1) == shape[-2] + 2
    assert views["offset"].is_contiguous()
    assert views["offset"].storage_offset() == 3
    assert views["strided"].stride(-1) == 2
    assert not views["strided"].is_contiguous()
    assert 0 in views["expanded"].stride()
    assert len({(tensor.stride(), tensor.storage_offset()) for tensor in (*views.values(), x)}) == 6


@for_each("shape", SHAPES)
def test_expanded_view_repeats_the_first_along_one_axis(shape: tuple[int, ...]) -> None:
    x = numbers(shape, torch.float32)
    got = view(x, "expanded")
    assert got.shape == x.shape
    zero = [axis for axis in range(x.ndim) if got.stride(axis) == 0 and x.shape[axis] > 1]
    for axis in zero:
        assert torch.equal(got, x.narrow(axis, 0, 1).expand_as(x))
        assert not torch.equal(got, x)
    assert len(zero) == (1 if x.numel() and max(x.shape[:-1]) > 1 and shape != (1, 6, 1) else 0)


@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=4), width=st.integers(0, 3))
def test_band_has_the_given_width_on_every_side(shape: list[int], width: int) -> None:
    x = numbers(tuple(shape), torch.float32)
    got = banded(x, width)
    assert torch.equal(got, x)
    assert memory(got).numel() == math.prod(size + 2 * width for size in shape)
    assert int(memory(got).isnan().sum()) == memory(got).numel() - x.numel()


# What a law accepts

REFUSED = {
    "oracle": (Example(Case((5,)), at=3), ("at", "takes no at", "at=3")),
    "cut": (Example(Case((5,))), ("at", "in 1..4", "None")),
    "future": (Example(Case((5,)), at=5), ("at", "in 1..4", "5")),
    "recurrent": (Example(Case((5,)), at=1), ("at", "in 2..4", "1")),
    "heads": (Example(Case((5,)), at=0), ("at", "no place", "lengths=5")),
    "samples": (Example(Case((5, 0), packed=True), at=0), ("at", "no place", "lengths=5+0")),
    "packed": (Example(Case((5, 6), packed=True), at=-1), ("at", "in 0..1", "-1")),
    "strides": (Example(Case((5,)), variant="rolled"), ("variant", "sliced, transposed", "rolled")),
    "absent": (Example(Case((5,))), ("variant", "scale, state, offsets, final_state", "None")),
    "linear": (Example(Case((5,)), variant="scale"), ("variant", "values, cotangents", "scale")),
    "pure": (Example(Case((5,)), variant="sliced"), ("variant", "absent", "sliced")),
}


@for_each("name", REFUSED)
def test_law_refuses_an_example_that_it_cannot_check_in_one_line(name: str) -> None:
    example, words = REFUSED[name]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        LAWS[name].accept(example)
    message = str(refusal.value)
    assert "\n" not in message
    assert name in message
    assert all(word in message for word in words), message


def test_law_accepts_the_ends_of_its_range() -> None:
    for at in (1, 4):
        LAWS["cut"].accept(Example(Case((5, 3), packed=True), at=at))
    for at in (0, 1):
        LAWS["heads"].accept(Example(Case((5,), value_heads=2), at=at))
    for variant in VIEWS:
        LAWS["strides"].accept(Example(Case((5,), packed=variant == "indices"), variant=variant))
    LAWS["oracle"].accept(Example(Case((0,))))
    with pytest.raises(ValueError, match="at must be in 1"):
        LAWS["cut"].accept(dataclasses.replace(Example(Case((5, 3), packed=True)), at=0))


UNANSWERABLE = {
    "recall needs one-hot values": ("recall", Example(Case((5,)))),
    "norm needs the norm": ("norm", Example(Case((5,)))),
    "a given state is not absent": ("absent", Example(Case((5,), state="random"), variant="state")),
    "a given scale is not absent": ("absent", Example(Case((5,), scale="one"), variant="scale")),
    "given offsets are not absent": ("absent", Example(Case((5, 6), packed=True), variant="offsets")),
    "cotangents need a backward": ("linear", Example(Case((5,), backward=False), variant="cotangents")),
    "fp16 rounds under a factor of two": ("linear", Example(Case((5,), dtype="fp16"), variant="values")),
    "a dt_bias is not absent": ("absent", Example(Case((5,), in_kernel="gate"), variant="dt_bias")),
    "gates need some in the kernel": ("gates", Example(Case((5,)))),
    "packed needs packing": ("packed", Example(Case((5, 5)), at=0)),
    "one token at a time needs a batch": ("recurrent", Example(Case((5, 4), packed=True), at=3)),
}


@for_each("what", UNANSWERABLE)
def test_law_refuses_a_case_that_it_says_nothing_about(what: str) -> None:
    name, example = UNANSWERABLE[what]
    with pytest.raises(ValueError, match=name):
        LAWS[name].accept(example)
