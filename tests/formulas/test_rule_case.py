"""A case line rebuilds the same bits everywhere, its regimes are what they say, and a wrong line is refused in one clear line."""

import dataclasses
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from oracles.arithmetic.counter import integers, mix, mix_number, mix_words
from oracles.arithmetic.rounding import BITS
from oracles.operation import DTYPES
from oracles.operations import RULES
from properties.rules.case import BETAS, GATES, GIVEN_GATES, IN_KERNEL, STATES, VALUES, Case
from properties.rules.domain import Domain
from properties.rules.drawing import cases
from properties.rules.laws import LAWS
from properties.rules.numbers import MEMORIES, _Builder, _integers, _Recipe, drawn
from properties.words.line import MAX_HEADS, MAX_SEQUENCES, MAX_TOKENS, MAX_WIDTH
from tests.together import for_each

KNOWN = (
    ("lengths=65", "fb8eb30aafcb66e5"),
    ("lengths=2+0+130 packed=yes heads=2 value_heads=4 gate=64 state=random seed=17", "cf1560ad02c0280b"),
    ("lengths=33+33 dtype=bf16 gate=1000 gate_dtype=input beta=two values=correlated qk_norm=yes seed=1", "4b960e873c210ace"),
    ("lengths=63 dtype=fp16 gate=10 beta=edges values=scaled state=random scale=half seed=2", "d45e892c3470ecbf"),
    ("lengths=17+64 packed=yes dtype=bf16 gate=tenth beta=one values=repeated offsets=int32 seed=3", "a1633c2d1bfa0730"),
    (
        "lengths=66 heads=3 value_heads=3 key_dim=7 value_dim=12 gate=saturated values=zero_rows state=zero seed=4",
        "0e0e0cfec71c6472",
    ),
    ("lengths=40 dtype=fp16 value_heads=8 gate=mixed gate_dtype=input values=small qk_norm=yes seed=5", "abd6919f760dd69e"),
    ("lengths=19+30 packed=yes heads=2 value_heads=2 gate=64 values=one_signed qk_norm=yes seed=8", "25c2f79f5948a067"),
    ("lengths=31 dtype=bf16 beta=one values=one_hot state=random scale=one seed=6", "2acf6c13a27fbbb9"),
    ("lengths=129 dtype=fp16 key_dim=128 value_dim=64 gate=saturated beta=zero state=random seed=4294967295", "66850dd34a1ebd45"),
    (
        "lengths=16 value_heads=2 key_dim=1 value_dim=1 gate=mixed beta=two values=scaled state=random seed=65535",
        "290b74798eec3df9",
    ),
    ("lengths=1 dtype=bf16 key_dim=256 value_dim=24 gate=10 values=small state=random backward=no seed=7", "4253c25eb2f8f599"),
    (
        "lengths=15+0+0 packed=yes value_heads=2 gate=1000 gate_dtype=input beta=edges values=zero_rows seed=123456789",
        "76e6156804da9472",
    ),
    ("lengths=9+20 packed=yes heads=2 value_heads=6 key_dim=24 dtype=fp16 values=large qk_norm=yes seed=21", "474bd87d0309c270"),
    ("lengths=7+0+12 packed=yes value_heads=2 gate=edges values=great state=random seed=11", "6eae85ad1eb064e0"),
    ("lengths=9+9 op=kda key_dim=4 dtype=fp16 gate=closed values=great seed=12", "ee4beb2d9750156f"),
    ("lengths=150+0+70 packed=yes value_heads=2 gate=runs beta=runs state=some seed=13", "6cbb512aae4a9130"),
    ("lengths=9+9+9 op=kda key_dim=4 dtype=bf16 gate=runs beta=runs state=some seed=14", "fbbc03ce44d9fd13"),
)


def tensors(case: Case, device: str | None = None) -> dict[str, Tensor]:
    """Every tensor of the case by name, in a fixed order."""
    inputs = case.inputs(device)
    named = {name: inputs[name] for name in ("q", "k", "v", "g", "beta", "state", "cu_seqlens") if inputs[name] is not None}
    return named | {f"cotangent of {name}": cotangent for name, cotangent in case.cotangents(device).items()}


def fingerprint(case: Case, device: str | None = None) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors(case, device).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# Bits


@for_each(("line", "known"), KNOWN)
def test_line_makes_the_known_bits(line: str, known: str) -> None:
    case = Case.parse(line)
    assert fingerprint(case) == known
    assert fingerprint(dataclasses.replace(case, seed=case.seed ^ 1)) != known


def test_known_bits_cover_every_regime() -> None:
    seen = [Case.parse(line) for line, _ in KNOWN]
    for field, choices in (
        ("dtype", DTYPES),
        ("gate", (*GATES, *GIVEN_GATES)),
        ("beta", BETAS),
        ("values", VALUES),
        ("state", STATES),
    ):
        assert {getattr(case, field) for case in seen} == set(choices)


def splitmix64(seed: int) -> Iterator[int]:
    """The published generator (Vigna, splitmix64.c) in Python integers."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def mixed(number: int) -> int:
    return next(splitmix64(number % 2**64))


def signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


def test_splitmix64_gives_its_published_numbers() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    stream = splitmix64(1234567)
    assert [next(stream) for _ in published] == published


@given(word=st.integers(-(2**63), 2**63 - 1))
@example(word=0)
@example(word=-1)
@example(word=2**63 - 1)
@example(word=-(2**63))
def test_mix_is_splitmix64_in_wrapping_integers(word: int) -> None:
    assert int(mix(torch.tensor(word))) == mix_number(word) == signed(mixed(word))


@given(number=st.integers())
def test_number_is_mixed_modulo_two_to_the_64(number: int) -> None:
    assert mix_number(number) == signed(mixed(number))


COUNTERS = torch.tensor([0, 1, 2**62, -1, -(2**63), 2**63 - 1]), torch.arange(7), torch.arange(0)


@for_each("keys", [(0, 0, 0), (mix_number(5), -(2**63), 2**63 - 1)])
@for_each("bits", [*range(1, 65), None])
def test_integers_drawn_together_are_the_first_bits_of_mix(bits: int | None, keys: tuple[int, ...]) -> None:
    draws = [(counter, key, bits or some) for counter, key, some in zip(COUNTERS, keys, (3, 24, 40), strict=True)]
    before = [counter.clone() for counter in COUNTERS]
    numbers = integers(*draws)
    for (counter, key, some), got in zip(draws, numbers, strict=True):
        assert got.tolist() == [signed(mixed(position + key)) >> (64 - some) for position in counter.tolist()]
        assert torch.equal(got, mix(counter + key) >> (64 - some))
        assert torch.equal(got, integers((counter, key, some))[0])
    assert all(torch.equal(*pair) for pair in zip(COUNTERS, before, strict=True)), "which other draws may share"
    last = numbers[1].clone()
    numbers[0].zero_()
    assert torch.equal(numbers[1], last), "they lie beside each other, and nowhere do two"


def test_the_last_step_of_mix_left_out_would_be_seen_from_32_bits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = torch.arange(2**10)
    monkeypatch.setattr("oracles.arithmetic.counter._LAST", 64)  # no draw has more bits than that
    for bits in (31, 32, 64):
        same = torch.equal(integers((counter, 0, bits))[0], torch.tensor([signed(mixed(n)) >> (64 - bits) for n in range(2**10)]))
        assert same == (bits == 31)


@for_each("bits", [0, 65, -1])
def test_integers_of_no_draw_or_of_no_such_width_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"^bits must be in 1..64, got {bits}$"):
        integers((torch.arange(3), 0, 8), (torch.arange(3), 0, bits))
    with pytest.raises(ValueError, match=r"^draws must be at least one, got none$"):
        integers()


def test_seed_of_a_law_depends_on_every_byte() -> None:
    texts = ("cut", "cuu", "cu", "tuc", *LAWS)
    numbers = (*range(20), 2**40, 2**62)
    seen = {mix_words(number, text) for number in numbers for text in set(texts)}
    assert len(seen) == len(numbers) * len(set(texts))
    assert all(0 <= number < 2**63 for number in seen)
    assert mix_words(7, "cut") == 6824011867687354106


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_seed_outside_64_bits_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=rf"^number must be in -2\^63..2\^63 - 1, got {number}$"):
        mix_words(number, "cut")
    assert mix_words(2**63 - 1, "cut") != mix_words(-(2**63), "cut")


def test_entries_equal_their_definition_in_python_integers() -> None:
    case = Case.parse("lengths=3+2 packed=yes heads=2 value_heads=2 key_dim=3 value_dim=5 dtype=bf16 gate=64 seed=11")
    streams = {"q": 0, "k": 1, "v": 2, "g": 3, "beta": 4}
    inputs = case.inputs()

    def integer(name: str, position: int, bits: int) -> int:
        return signed(mixed(position + mixed(case.seed * 64 + streams[name]))) >> (64 - bits)

    for token in range(case.tokens):
        for head in range(2):
            row = token * 2 + head
            want = [integer("v", row * 5 + column, 8) / 2**7 for column in range(5)]
            assert inputs.v[0, token, head].double().tolist() == want
            for name in ("q", "k"):
                whole = [integer(name, row * 3 + column, 8) for column in range(3)]
                power = next(e for e in range(31) if sum(n * n for n in whole) <= 4**e)
                assert inputs[name][0, token, head].double().tolist() == [n / 2**power for n in whole]
            assert float(inputs.g[0, token, head]) == -(integer("g", row, 24) + 2**23) / 2**24 / 32
            assert float(inputs.beta[0, token, head]) == min(abs(integer("beta", row, 9)), 255) / 256


@for_each("operation", ["gated_delta_rule", "kda"])
@for_each("gate", GATES)
@for_each("seed", [11, 12])
def test_gates_of_heads_and_of_channels_equal_their_definition_in_python_integers(operation: str, gate: str, seed: int) -> None:
    case = Case.parse(f"op={operation} lengths=3+2 packed=yes heads=2 value_heads=2 key_dim=5 gate={gate} seed={seed}")
    names, channels = ("q", "k", "v", "g", "beta", "state", "do", "dht", "base", "choice"), 5 if operation == "kda" else 1
    widths = {"forever": 0.0, "1000": 2 / 1024, "64": 2 / 64, "10": 2 / 8, "tenth": 2 / 0.125, "saturated": 2 / 1024}
    memories = [0.0, 2 / 1024, 2 / 64, 2 / 8, 2 / 0.125, 0.0][:: 1 - 2 * (seed % 2)]

    def integer(name: str, position: int, bits: int, salt: int = 0) -> int:
        return signed(mixed(position + mixed(seed * 64 + names.index(name) + (salt << 40)))) >> (64 - bits)

    def log_decay(position: int) -> float:
        gone = gate == "saturated" and integer("choice", position, 2, salt=1) == 0
        width = memories[position % (2 * channels) % 6] if gate == "mixed" else widths[gate]
        return -1000.0 if gone else -(integer("g", position, 24) + 2**23) / 2**24 * width

    g = case.inputs().g
    assert g.shape == (1, 5, 2, 5)[: 4 if operation == "kda" else 3]
    assert g.flatten().tolist() == [log_decay(position) for position in range(5 * 2 * channels)]


@for_each("operation", ["gated_delta_rule", "kda"])
@for_each(("gate", "beta"), [*((gate, "ordinary") for gate in GATES), *(("64", beta) for beta in BETAS)])
@for_each("seed", [11, 12])
def test_what_kernels_make_gates_and_betas_of_equals_its_definition(operation: str, gate: str, beta: str, seed: int) -> None:
    words = f"heads=2 value_heads=2 key_dim=5 dtype=bf16 gate={gate} beta={beta} in_kernel=both seed={seed}"
    case, channels = Case.parse(f"op={operation} lengths=3+2 packed=yes {words}"), 5 if operation == "kda" else 1
    streams = {"choice": 9, "a": 12, "A_log": 13, "dt_bias": 14, "b": 15}
    logs = {"forever": -80.0, "1000": -6.75, "64": -4.0, "10": -2.125, "tenth": 2.5, "saturated": 5.0}
    order = ["forever", "1000", "64", "10", "tenth"][:: 1 - 2 * (seed % 2)] if gate == "mixed" else [gate, gate]

    def integer(name: str, position: int, bits: int = 8, salt: int = 0) -> int:
        return signed(mixed(position + mixed(seed * 64 + streams[name] + (salt << 40)))) >> (64 - bits)

    def a(position: int) -> float:
        return (-30.0, 30.0)[integer("choice", position, 2, 1) == 0] if gate == "saturated" else integer("a", position) / 2**6

    def b(position: int) -> float:
        edge = {"one": -1, "zero": -2, "edges": integer("choice", position, 2, 2)}.get(beta, 0)
        return {-1: 30.0, -2: -30.0}.get(edge, integer("b", position) / 2**5)

    inputs = case.inputs()
    assert inputs.a.flatten().tolist() == [a(position) for position in range(5 * 2 * channels)]
    assert inputs.b.flatten().tolist() == [b(position) for position in range(5 * 2)]
    assert inputs.A_log.tolist() == [logs[order[head]] + integer("A_log", head, 16) / 2**16 for head in range(2)]
    assert inputs.dt_bias.flatten().tolist() == [integer("dt_bias", position, 24) / 2**23 for position in range(2 * channels)]
    assert {name: inputs[name].dtype for name in ("a", "b", "A_log", "dt_bias")} == {
        **dict.fromkeys(("a", "b"), torch.bfloat16),
        **dict.fromkeys(("A_log", "dt_bias"), torch.float32),
    }


@settings(max_examples=25)
@given(case=cases(Domain(), longest=60, total=100), operation=st.sampled_from(tuple(RULES)))
def test_operations_of_a_line_differ_in_their_gates_only(case: Case, operation: str) -> None:
    gated, other = tensors(case), tensors(dataclasses.replace(case, operation=operation))
    assert gated.keys() - other.keys() == ({"g"} if operation == "delta_rule" else set())
    assert all(torch.equal(tensor, gated[name]) for name, tensor in other.items() if (operation, name) != ("kda", "g"))


@settings(max_examples=25)
@given(case=cases(Domain(), longest=60, total=100), operation=st.sampled_from(tuple(RULES)), seed=st.integers(0, 2**32 - 1))
def test_global_state_is_neither_used_nor_changed(case: Case, operation: str, seed: int) -> None:
    case = dataclasses.replace(case, operation=operation)
    want = fingerprint(case)
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64 if seed % 2 else torch.bfloat16)
        before = torch.get_rng_state(), random.getstate()
        with torch.inference_mode(seed % 3 == 0):
            assert fingerprint(case) == want
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(generator)
    assert torch.get_num_threads() == threads


@for_each("operation", RULES)
def test_two_calls_share_no_memory(operation: str) -> None:
    case = Case.parse(f"op={operation} lengths=5 gate=10 state=random")
    first, names = (
        case.inputs(),
        [name for name in ("q", "k", "v", "g", "beta", "state") if (operation, name) != ("delta_rule", "g")],
    )
    for name in names:
        first[name].zero_()
    assert all(bool(case.inputs()[name].ne(0).any()) for name in names)


# Devices


class Launches(TorchFunctionMode):
    """Counts what a device is sent from the host, but for scalar arguments, and the rounds of splitmix64 that run there."""

    sent = 0
    rounds = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "meta":
            self.sent += func is torch.tensor or any(isinstance(x, Tensor) and x.device.type == "cpu" and x.ndim for x in args)
            self.rounds += func is Tensor.mul_ and isinstance(args[1], int)
        return out


@for_each("packed", ["yes", "no"])
@for_each("values", VALUES)
@pytest.mark.slow
def test_device_mixes_once_a_call_and_is_sent_offsets_repeated_tokens_and_runs_only(values: str, packed: str) -> None:
    """Of ordinary values every gate with every beta, in and outside of the kernel; of others each of these once."""
    regimes = itertools.chain(itertools.product(GATES, BETAS, IN_KERNEL), [("runs", "ordinary", "none"), ("runs", "runs", "beta")])
    if values == "one_hot":
        regimes = [("forever", "one", "none")]
    elif values != "ordinary":
        regimes = zip(GATES, itertools.cycle(BETAS), itertools.cycle(IN_KERNEL), strict=False)
    for (gate, beta, inside), state in zip(regimes, itertools.cycle(STATES), strict=False):
        words = f"packed={packed} heads=2 value_heads=6 gate={gate} beta={beta} in_kernel={inside} state={state} values={values}"
        case = Case.parse(f"lengths=4+4 {words}")
        with Launches() as inputs:
            case.inputs("meta")
        with Launches() as cotangents:
            case.cotangents("meta")
        assert (inputs.sent, inputs.rounds) == ((packed == "yes") + (values == "repeated") + ("runs" in (gate, beta)), 2)
        assert (cotangents.sent, cotangents.rounds) == (0, 2)


def test_another_round_and_another_copy_would_be_seen() -> None:
    with Launches() as seen:
        torch.tensor([0.5], device="meta")
        torch.tensor([0.5]).to("meta", non_blocking=True)
        integers((torch.arange(3, device="meta"), 0, 8))
    assert (seen.sent, seen.rounds) == (2, 2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@for_each(("line", "known"), KNOWN)
def test_gpu_makes_the_known_bits_and_nobody_waits_for_it(line: str, known: str) -> None:
    case, mode = Case.parse(line), torch.cuda.get_sync_debug_mode()
    case.inputs("cuda")  # a first use of the device may wait
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.tensor([0.5], device="cuda")
        case.inputs("cuda")
        case.cotangents("cuda")
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert fingerprint(case, "cuda") == known


@given(several=st.lists(cases(Domain(), longest=40, total=60), min_size=1, max_size=4), backward=st.booleans())
@pytest.mark.slow
def test_cases_drawn_together_have_what_each_has_alone(several: list[Case], *, backward: bool) -> None:
    """And memory of their own, since a kernel may write into it."""
    memory: list[int] = []
    for case, (inputs, cotangents) in zip(several, drawn(several, "cpu", backward=backward), strict=True):
        alone = case.inputs("cpu"), case.cotangents("cpu") if backward else {}
        for got, want in zip((inputs, cotangents or {}), alone, strict=True):
            assert list(got) == list(want)
            for name, value in got.items():
                if not isinstance(value, Tensor):
                    assert value == want[name], (case, name)
                    continue
                assert torch.equal(value, want[name]), (case, name)
                assert value.dtype == want[name].dtype
                memory += [value.untyped_storage().data_ptr()] * (value.numel() > 0)
    assert len(memory) == len(set(memory))


# Values


def builder(case: Case) -> _Builder:
    return _Builder(case, "cpu")


def exact(build: _Builder, recipe: _Recipe) -> Tensor:
    """The tensor of a recipe before it is rounded."""
    return recipe.tensor(*_integers([(build, draw) for draw in recipe.draws]))


@for_each("dtype", DTYPES)
@for_each("values", [kind for kind in VALUES if kind != "one_hot"])
def test_every_number_is_exact_in_its_dtype(dtype: str, values: str) -> None:
    case = Case.parse(f"lengths=80 heads=2 value_heads=4 key_dim=40 dtype={dtype} values={values} gate=10 state=random seed=3")
    build, inputs = builder(case), case.inputs()
    recipes = {"v": build.values(), "beta": build.betas(), "g": build.gates((4,)), "state": build.state()}
    recipes |= {name: build.vectors(name) for name in ("q", "k")}
    wide = {name: exact(build, recipe) for name, recipe in recipes.items()}
    channels = dataclasses.replace(case, operation="kda").inputs().g
    assert torch.equal(channels.double(), exact(build, build.gates((4, 40))))
    for name, tensor in wide.items():
        same = inputs[name].double() == tensor
        assert tensor.dtype == torch.float64
        assert tensor.shape == inputs[name].shape
        assert inputs[name].dtype == (torch.float32 if name in ("g", "state") else DTYPES[dtype])
        assert bool(same.all()) or (dtype, values) == ("fp16", "small"), "only fp16 has subnormals there"
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(case).values() if tensor.is_floating_point())


def test_a_mantissa_too_long_for_the_dtype_would_be_seen() -> None:
    case = Case.parse("lengths=80 dtype=bf16")
    wide = dataclasses.replace(case, dtype="fp32").inputs().v
    assert not torch.equal(wide.bfloat16().float(), wide)


@settings(max_examples=100)
@given(case=cases(Domain(key_dims=(2, 256)), longest=60, total=100, values=("ordinary", "correlated", "repeated", "scaled")))
def test_keys_have_a_squared_norm_in_a_quarter_to_one(case: Case) -> None:
    for name in ("q", "k"):
        rows = exact(builder(case), builder(case).vectors(name))
        squares = rows.square().sum(-1)
        assert ((squares > 0.25) & (squares <= 1 + 1e-12)).all()


@settings(max_examples=100)
@given(case=cases(Domain(), longest=60, total=100), operation=st.sampled_from(tuple(RULES)))
def test_writing_is_stable_for_every_drawn_case(case: Case, operation: str) -> None:
    inputs = dataclasses.replace(case, operation=operation).inputs()
    squares = inputs.k.double().square().sum(-1).repeat_interleave(case.value_heads // case.heads, 2)
    if case.qk_norm:
        squares = squares.clamp(max=1.0)
    assert (inputs.beta.double() * squares <= 2 * (1 + 1e-9)).all()
    assert (inputs.beta >= 0).all()
    assert inputs.g is None or (inputs.g <= 0).all()


def test_keys_of_one_channel_are_a_quarter_to_one_too_or_zero() -> None:
    keys = Case.parse("lengths=3000 key_dim=1 dtype=bf16").inputs().k.double().abs()
    assert ((keys > 0.5) | (keys == 0)).all()
    assert (keys > 0.5).double().mean() > 0.98


@for_each(("gate", "memory"), [("1000", 1000.0), ("64", 64.0), ("10", 10.0), ("tenth", 0.1)])
def test_gate_has_the_memory_it_names(gate: str, memory: float) -> None:
    g = Case.parse(f"lengths=4096 value_heads=2 gate={gate} seed=5").inputs().g.double()
    width = MEMORIES[gate]
    assert ((g <= 0) & (g > -width)).all()
    deviation = width / math.sqrt(12 * g.numel())
    assert abs(float(g.mean()) + width / 2) < 5 * deviation
    assert abs(float(g.std()) - width / math.sqrt(12)) < 5 * deviation
    assert 0.75 * memory <= 2 / width <= 1.3 * memory


@for_each(
    ("beta", "low", "high"), [("ordinary", 0.0, 1.0), ("one", 1.0, 1.0), ("zero", 0.0, 0.0), ("two", 0.0, 2.0), ("edges", 0.0, 1.0)]
)
def test_beta_lies_where_it_says(beta: str, low: float, high: float) -> None:
    drawn = Case.parse(f"lengths=4096 beta={beta} dtype=bf16 seed=7").inputs().beta.double().flatten()
    assert ((drawn >= low) & (drawn <= high)).all()
    assert abs(float(drawn.mean()) - (low + high) / 2) < 0.05 or beta == "edges"
    if beta == "two":
        assert (drawn > 1).double().mean() > 0.4
    if beta == "edges":
        shares = [float((drawn == edge).double().mean()) for edge in (0.0, 1.0)]
        assert all(0.2 < share < 0.35 for share in shares)


def cosines(case: Case) -> Tensor:
    """Cosines of every two tokens' keys of the first head."""
    k = case.inputs().k.double()[0, :, 0]
    k = k / k.norm(dim=-1, keepdim=True)
    return (k @ k.mT)[~torch.eye(len(k), dtype=torch.bool)]


def test_correlated_keys_are_and_ordinary_ones_are_not() -> None:
    line = "lengths=200 key_dim=64 seed=8"
    assert cosines(Case.parse(f"{line} values=correlated")).mean() > 0.85
    assert cosines(Case.parse(line)).mean().abs() < 0.02


@pytest.mark.parametrize("operation", ["gated_delta_rule", "kda"])
def test_repeated_tokens_repeat_the_first_of_their_sequence(operation: str) -> None:
    case = Case.parse(f"op={operation} lengths=9+0+30 packed=yes heads=2 value_heads=4 gate=10 values=repeated seed=9")
    inputs = case.inputs()
    for name in ("q", "k", "v", "g", "beta"):
        first, second = inputs[name][0, :9], inputs[name][0, 9:]
        assert torch.equal(first, first[:1].expand_as(first))
        assert torch.equal(second, second[:1].expand_as(second))
        assert not torch.equal(first[0], second[0])
        plain = dataclasses.replace(case, values="ordinary").inputs()[name][0]
        assert torch.equal(plain[[0, 9]], inputs[name][0, [0, 9]])
        assert not torch.equal(plain[0], plain[1])


def test_zero_rows_are_zero_and_fall_independently() -> None:
    inputs = Case.parse("lengths=2000 heads=2 value_heads=2 values=zero_rows seed=10").inputs()
    gone = {name: (inputs[name] == 0).all(-1) for name in ("q", "k", "v")}
    for name, mask in gone.items():
        assert 0.2 < mask.double().mean() < 0.3
        assert torch.equal(
            mask.unsqueeze(-1).expand_as(inputs[name]) & (inputs[name] != 0), torch.zeros_like(inputs[name], dtype=torch.bool)
        )
    both = (gone["q"] & gone["k"]).double().mean()
    assert 0.03 < both < 0.1, "a quarter of a quarter"


def test_scaled_values_spread_over_a_thousandfold_and_small_ones_are_small() -> None:
    v = Case.parse("lengths=500 value_dim=64 values=scaled seed=11").inputs().v.double().abs().amax(-1)
    assert v.max() / v.min() > 500
    assert len({round(math.log2(size)) for size in v.flatten().tolist()}) >= 11
    k = Case.parse("lengths=500 key_dim=64 values=small seed=11").inputs().k.double()
    norms = k.norm(dim=-1)
    assert ((norms > 2.0**-14) & (norms <= 2.0**-13)).all()
    assert (norms**2 < 1e-6).all(), "eps of the norm dominates"


def test_one_hot_keys_have_one_channel_and_values_are_small_integers() -> None:
    inputs = Case.parse("lengths=400 heads=2 value_heads=2 key_dim=7 beta=one values=one_hot state=random seed=12").inputs()
    for name in ("q", "k"):
        assert torch.equal(inputs[name].sum(-1), torch.ones(1, 400, 2))
        assert ((inputs[name] == 0) | (inputs[name] == 1)).all()
        assert inputs[name].sum((0, 1, 2)).min() > 60, "every channel is drawn"
    assert not torch.equal(inputs.q, inputs.k)
    for name in ("v", "state"):
        assert torch.equal(inputs[name], inputs[name].round())
        assert 4 <= inputs[name].abs().max() <= 8


def test_zero_state_is_zero_and_no_state_is_none() -> None:
    assert Case.parse("lengths=3").inputs().state is None
    assert not Case.parse("lengths=3 state=zero").inputs().state.any()
    drawn = Case.parse("lengths=3+3 value_heads=2 state=random").inputs().state
    assert drawn.shape == (2, 2, 16, 16)
    assert 0.1 < drawn.abs().max() <= 0.25


def correlation(a: Tensor, b: Tensor) -> float:
    a, b = (tensor.double().flatten() - tensor.double().mean() for tensor in (a, b))
    return abs(float(a @ b / (a.norm() * b.norm())))


def test_seeds_tensors_tokens_heads_and_channels_are_uncorrelated() -> None:
    case = Case.parse("lengths=64+64 packed=yes heads=4 value_heads=4 key_dim=16 value_dim=16 seed=20")
    limit = 5 / math.sqrt(128 * 4 * 16)
    streams = {name: tensor for name, tensor in tensors(case).items() if name in ("q", "k", "v", "cotangent of o")}
    for number in (1, 2, 63, 64, 65, 4096):
        other = tensors(dataclasses.replace(case, seed=case.seed + number))
        assert all(correlation(tensor, other[name]) < limit for name, tensor in streams.items())
    names = list(streams)
    for one in names:
        for two in names[names.index(one) + 1 :]:
            assert correlation(streams[one], streams[two]) < limit
        x = streams[one][0]
        assert correlation(x[1:], x[:-1]) < 1.1 * limit
        assert correlation(x[64:], x[:64]) < 1.5 * limit, "sequences"
        assert correlation(x[:, 1:], x[:, :-1]) < 1.2 * limit, "heads"
        assert correlation(x[..., 1:], x[..., :-1]) < 1.1 * limit, "channels"
        assert correlation(x, x) > 0.99


def test_cotangents_are_random_for_every_output_in_its_dtype() -> None:
    case = Case.parse("lengths=10+20 packed=yes value_heads=2 value_dim=24 dtype=bf16")
    cotangents = case.cotangents()
    assert {name: (cotangent.dtype, tuple(cotangent.shape)) for name, cotangent in cotangents.items()} == {
        "o": (torch.bfloat16, (1, 30, 2, 24)),
        "final_state": (torch.float32, (2, 2, 16, 24)),
    }
    for cotangent in cotangents.values():
        assert cotangent.double().abs().max() <= 1
        assert len(cotangent.unique()) > 100
        assert abs(float(cotangent.double().mean())) < 0.1


@settings(max_examples=60)
@given(case=cases(Domain(), longest=60, total=100), operation=st.sampled_from(tuple(RULES)))
def test_shapes_and_dtypes_follow_the_contract(case: Case, operation: str) -> None:
    case = dataclasses.replace(case, operation=operation)
    assert case.spec is RULES[operation]
    inputs = case.inputs()
    case.spec.check(inputs)
    batch, tokens = (1, case.tokens) if case.packed else (len(case.lengths), case.lengths[0])
    assert inputs.q.shape == inputs.k.shape == (batch, tokens, case.heads, case.key_dim)
    assert inputs.v.shape == (batch, tokens, case.value_heads, case.value_dim)
    assert inputs.beta.shape == (batch, tokens, case.value_heads)
    if operation == "delta_rule":
        assert inputs.g is None
    else:
        assert inputs.g.shape == (*inputs.beta.shape, case.key_dim)[: 4 if operation == "kda" else 3]
        assert inputs.g.dtype == (torch.float32 if case.gate_dtype == "fp32" else DTYPES[case.dtype])
    assert {inputs[name].dtype for name in ("q", "k", "v", "beta")} == {DTYPES[case.dtype]}
    if case.packed:
        assert inputs.cu_seqlens.tolist() == case.starts()
        assert inputs.cu_seqlens.dtype == getattr(torch, case.offsets)
    assert all(tensor.is_contiguous() for tensor in tensors(case).values())
    assert BITS[case.dtype] == {"bf16": 8, "fp16": 11, "fp32": 24}[case.dtype]


# Lines

ANY_CASE = st.builds(
    Case,
    operation=st.sampled_from(tuple(RULES)),
    lengths=st.lists(st.integers(0, 2000), min_size=1, max_size=6).map(tuple),
    packed=st.just(True),
    heads=st.just(3),
    value_heads=st.sampled_from((3, 6, 1023)),
    key_dim=st.integers(1, MAX_WIDTH),
    value_dim=st.integers(1, MAX_WIDTH),
    dtype=st.sampled_from(tuple(DTYPES)),
    gate=st.sampled_from(GATES),
    gate_dtype=st.sampled_from(("fp32", "input")),
    beta=st.sampled_from(BETAS),
    values=st.sampled_from([kind for kind in VALUES if kind != "one_hot"]),
    state=st.sampled_from(STATES),
    scale=st.sampled_from(("default", "one", "half")),
    qk_norm=st.booleans(),
    offsets=st.sampled_from(("int64", "int32")),
    backward=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


@given(case=st.one_of(cases(Domain()), ANY_CASE), order=st.randoms())
@example(case=Case((1,), beta="one", values="one_hot"), order=random.Random(0))
@example(case=Case((1,) * MAX_SEQUENCES, packed=True), order=random.Random(0))
@example(case=Case((MAX_TOKENS,), heads=MAX_HEADS, value_heads=MAX_HEADS, seed=2**32 - 1), order=random.Random(0))
def test_line_is_the_case(case: Case, order: random.Random) -> None:
    line = str(case)
    assert Case.parse(line) == case
    assert "\n" not in line
    assert hash(Case.parse(line)) == hash(case)
    words = line.split()
    order.shuffle(words)
    assert Case.parse("\t" + " \n ".join(words) + "\r\n") == case
    assert Case.parse(" ".join(f"{word}={text}" for word, text in case.words().items())) == case


def test_defaults_are_left_out_and_the_operation_is_called_op() -> None:
    assert str(Case((65,))) == "lengths=65"
    assert str(Case((0, 65), packed=True, qk_norm=True, backward=False)) == "lengths=0+65 packed=yes qk_norm=yes backward=no"
    assert Case.parse("op=gated_delta_rule lengths=65") == Case((65,))
    assert str(Case((65,), operation="kda")) == "lengths=65 op=kda"
    assert Case.parse("op=delta_rule lengths=65") == Case((65,), operation="delta_rule")
    assert "op" in Case((65,)).words()


REFUSED = {
    "": ("lengths", "must have lengths"),
    "   ": ("lengths", "must have lengths"),
    "seed=3": ("lengths", "must have lengths", "seed"),
    "lengths": ("'lengths'", "name=value"),
    "lengths=": ("'lengths='", "name=value"),
    "=5": ("'=5'", "name=value"),
    "lengths = 5": ("'lengths'", "name=value"),
    "lengths=5 junk": ("'junk'", "name=value"),
    "lenghts=5": ("'lenghts'", "did you mean lengths?"),
    "lengths=5 key_dims=16": ("'key_dims'", "did you mean key_dim?"),
    "lengths=5 op=gated_delta_rule operation=gated_delta_rule": ("op",),
    "lengths=5 zzzzzz=1": ("'zzzzzz'", "there are", "lengths", "seed", "op"),
    "lengths=5 spec=1": ("'spec'", "unknown word"),
    "lengths=5 __class__=1": ("'__class__'", "unknown word"),
    "lengths=5 lengths=6": ("lengths", "once", "lengths=5", "lengths=6"),
    "lengths=5 seed=1 seed=1": ("seed", "once", "seed=1"),
    "lengths=5=6": ("lengths", "whole numbers", "'5=6'"),
    "lengths=five": ("lengths", "whole numbers", "'five'"),
    "lengths=-5": ("lengths", "whole numbers", "'-5'"),
    "lengths=5+": ("lengths", "whole numbers", "'5+'"),
    "lengths=+": ("lengths", "whole numbers", "'+'"),
    "lengths=1.5": ("lengths", "whole numbers", "'1.5'"),
    "lengths=5,6": ("lengths", "whole numbers", "'5,6'"),
    "lengths=1_0": ("lengths", "whole numbers", "'1_0'"),
    "lengths=٣": ("lengths", "whole numbers", "'٣'"),
    "lengths=\uff11\uff16": ("lengths", "whole numbers", "'\uff11\uff16'"),
    "lengths=5 seed=²": ("seed", "whole number", "'²'"),
    "lengths=5 seed=1e3": ("seed", "whole number", "'1e3'"),
    "lengths=5 seed=0x10": ("seed", "whole number", "'0x10'"),
    "lengths=5 seed=-1": ("seed", "whole number", "'-1'"),
    "lengths=5 seed=4294967296": ("seed", "0..4294967295", "4294967296"),
    "lengths=5 seed=" + "9" * 40: ("seed", "whole number", "9" * 40),
    "lengths=5 key_dim=0": ("key_dim", "1..1024", "0"),
    "lengths=5 key_dim=1025": ("key_dim", "1..1024", "1025"),
    "lengths=5 value_dim=0": ("value_dim", "1..1024", "0"),
    "lengths=5 heads=0": ("heads", "1..1024", "0"),
    "lengths=5 heads=2 value_heads=3": ("value_heads", "multiple of heads 2", "3"),
    "lengths=5 heads=2": ("value_heads", "multiple of heads 2", "1"),
    "lengths=5 value_heads=2000": ("value_heads", "1..1024", "2000"),
    "lengths=1048577": ("lengths", "1048576", "1048577"),
    "lengths=999999999999999": ("lengths", "1048576", "999999999999999"),
    "lengths=5+6": ("lengths", "equal unless packed=yes", "5+6"),
    "lengths=5 packed=true": ("packed", "yes or no", "'true'"),
    "lengths=5 qk_norm=1": ("qk_norm", "yes or no", "'1'"),
    "lengths=5 dtype=float32": ("dtype", "fp32, bf16, fp16", "'float32'"),
    "lengths=5 dtype=BF16": ("dtype", "fp32, bf16, fp16", "'BF16'"),
    "lengths=5 gate=100": ("gate", "forever, 1000, 64, 10, tenth, saturated, mixed", "'100'"),
    "lengths=5 beta=three": ("beta", "ordinary, one, zero, two, edges", "'three'"),
    "lengths=5 values=random": ("values", "ordinary, correlated, one_signed, repeated", "'random'"),
    "lengths=5 state=ones": ("state", "none, zero, random", "'ones'"),
    "lengths=5 scale=2": ("scale", "default, one, half", "'2'"),
    "lengths=5 offsets=int16": ("offsets", "int64, int32", "'int16'"),
    "lengths=5 gate_dtype=bf16": ("gate_dtype", "fp32, input", "'bf16'"),
    "lengths=5 op=mamba": ("operation", "gated_delta_rule, delta_rule, kda", "'mamba'"),
    "lengths=5 op=decode": ("operation", "gated_delta_rule, delta_rule, kda", "'decode'"),
    "lengths=5 op=kda values=one_hot beta=one gate=10": ("values=one_hot", "gate=forever"),
    f"packed=yes lengths={'+'.join(['1'] * (2**17 + 1))}": ("lengths", "at most 131072 sequences", "131073"),
    "packed=yes lengths=1x131072+1": ("lengths", "at most 131072 sequences", "131073"),
    "packed=yes lengths=1x99999999999999999": ("lengths", "joined by +", "1x99999999999999999"),
    "packed=yes lengths=3x0": ("lengths", "joined by +", "3x0"),
    "packed=yes lengths=3x": ("lengths", "joined by +", "3x"),
    "lengths=5 values=one_hot": ("values=one_hot", "beta=one", "qk_norm=no"),
}


@for_each(("line", "parts"), REFUSED.items())
def test_wrong_line_is_refused_in_one_line_that_names_word_value_and_rule(line: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        Case.parse(line)
    message = str(refusal.value)
    assert "\n" not in message
    missing = [part for part in parts if part not in message]
    assert not missing, message


HUGE = {
    "a word": "x" * 2**20,
    "a name": "x" * 2**20 + "=1",
    "digits": "lengths=5 seed=" + "9" * 2**20,
    "a value": "lengths=5 dtype=" + "y" * 2**20,
    "lengths": "lengths=" + "+".join("7" * 2**19),
    "words": "seed=1 " * 2**17,
    "unknown words": "lengths=5 " + " ".join(f"w{n}=1" for n in range(2**17)),
}


@for_each("what", HUGE)
def test_line_of_a_megabyte_is_refused_in_a_short_line(what: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        Case.parse(HUGE[what])
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 2000


def test_megabyte_of_spaces_is_no_harm() -> None:
    assert Case.parse("lengths=5" + " " * 2**20 + "seed=2") == Case((5,), seed=2)


# For strategies of text, Hypothesis makes a table of all characters, which takes seconds.
characters = st.one_of(st.integers(32, 126), st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF)).map(chr)


@given(line=st.lists(characters, max_size=60).map("".join))
@example(line="lengths=5\x00")
@example(line="lengths=5 se\u0065d=1\u2028seed=2")
@example(line="lengths=5 gate=\x1b[31m")
def test_any_text_is_a_case_or_a_value_error_of_one_line(line: str) -> None:
    try:
        case = Case.parse(line)
    except ValueError as refusal:
        assert len(str(refusal).splitlines()) == 1  # noqa: PT017
    else:
        assert Case.parse(str(case)) == case
