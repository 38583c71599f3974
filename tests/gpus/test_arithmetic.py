"""The verb `arithmetic`: each probe reports an arithmetic that is not the known one, and says whether tolerances cover it.

The devices here are plain torch. The right one adds as the matrix units of the known cards do.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from oracles.arithmetic import rounding
from tests.pages import table
from tests.right import cut, matrix_unit
from verify.cli import arithmetic_command
from verify.cli import main as cli
from verify.gpu.arithmetic import cards, exchanges, probes
from verify.gpu.arithmetic.cards import Card, Comparison, Measure, compared, near
from verify.gpu.arithmetic.probes import exactly
from verify.process.worker import Worker, WorkerLost
from verify.ranks.group import RankGroup

SHORT = 256  # terms of long sums here
LIMIT_OF_LONG_SUMS = probes.LONG / 8


def nearest(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)


class Right:
    """A device that computes as known: TF32 operands are cut, sums are cut, functions round once."""

    points, added = 1 << 12, 256
    atomics = (torch.float32, torch.bfloat16, torch.float16)
    operand_bits, below = 11, 25
    together: ClassVar = {torch.float32: 8}
    rounds: Callable[[Tensor, int], Tensor] = staticmethod(cut)
    operands: Callable[[Tensor, int], Tensor] = staticmethod(cut)

    def dot(self, a: Tensor, b: Tensor, total: Tensor | None = None, precision: str | None = None, rows: int = 64) -> Tensor:
        wide, other = a.double(), b.double()
        if precision is not None:
            return (wide @ other).float()
        if a.dtype == torch.float32:
            wide, other = self.operands(wide, self.operand_bits), self.operands(other, self.operand_bits)
        step = self.together.get(a.dtype, 16)
        out = torch.zeros(len(a), 64, dtype=torch.float64) if total is None else total.double()
        for start in range(0, a.shape[1], step):
            terms = wide[:, start : start + step, None] * other[None, start : start + step]
            out = self.rounds(self.aligned(torch.cat([terms, out[:, None]], 1)), 24)
        return out.float()

    def aligned(self, terms: Tensor) -> Tensor:
        largest = torch.frexp(terms.abs().amax(1, keepdim=True)).exponent - 1
        unit = torch.ldexp(torch.ones_like(terms[:, :1]), largest - self.below)
        return ((terms / unit).trunc() * unit).sum(1)

    def matmul(self, a: Tensor, b: Tensor, *, tf32: bool) -> Tensor:
        a, b = a.double(), b.double()
        return ((nearest(a, 11) @ nearest(b, 11)) if tf32 else a @ b).float()

    def function(self, name: str, x: Tensor, y: Tensor, *, fusion: bool = True) -> Tensor:
        if name != "x*x - y*y":
            return exactly(name, x, y).float()
        return (x.double() ** 2 - (y * y).double()).float() if fusion else x * x - y * y

    def scan(self, x: Tensor, warps: int) -> tuple[Tensor, Tensor]:
        parts = x.view(len(x), warps, -1).sum(-1)
        return x.cumsum(1), parts.sum(1)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def atomic_sum(self, x: Tensor) -> Tensor:
        return x.double().sum().to(x.dtype)


# Devices with one thing wrong. Each has the probe and the measure that report it, and the first words of the report.


class RoundsOperands(Right):
    operands = staticmethod(nearest)


class RoundsToFewerBits(RoundsOperands):
    operand_bits = 9


class CutsToFewerBits(Right):
    operand_bits = 10


class CutsOneSide(Right):
    def dot(self, a: Tensor, b: Tensor, *rest: object, **named: object) -> Tensor:
        return super().dot(a, cut(b.double(), 8).float() if b.dtype == torch.float32 else b, *rest, **named)


class IsNoIeee(Right):
    def dot(self, a: Tensor, b: Tensor, total: Tensor | None = None, precision: str | None = None, rows: int = 64) -> Tensor:
        return super().dot(a, b, total, None if precision == "ieee" else precision, rows)


class NeedsNoPermission(Right):
    def matmul(self, a: Tensor, b: Tensor, *, tf32: bool) -> Tensor:
        return super().matmul(a, b, tf32=True)


class AddsFewerBits(Right):
    below = 21


class AddsMore(Right):
    together: ClassVar = {torch.bfloat16: 32, torch.float32: 8}


class RoundsSums(Right):
    rounds = staticmethod(nearest)

    def aligned(self, terms: Tensor) -> Tensor:
        return terms.sum(1)


class RoundsSumsUp(Right):
    rounds = staticmethod(lambda x, bits: x + (x - cut(x, bits) != 0) * 2.0**-23)


class HasTwoPaths(Right):
    def dot(self, a: Tensor, b: Tensor, total: Tensor | None = None, precision: str | None = None, rows: int = 64) -> Tensor:
        return RoundsSums().dot(a, b, total) if rows == 16 else super().dot(a, b, total, precision, rows)


class AddsInHalf(Right):
    rounds = staticmethod(lambda x, bits: cut(x, 16))


class FlushesProducts(Right):
    def aligned(self, terms: Tensor) -> Tensor:
        return super().aligned(terms * (terms.abs() >= 2.0**-126))


def off_by(ulp: float, wrong: str) -> type[Right]:
    class Off(Right):
        def function(self, name: str, x: Tensor, y: Tensor, *, fusion: bool = True) -> Tensor:
            got = super().function(name, x, y, fusion=fusion)
            return got * (1 + ulp * 2.0**-23) if name == wrong else got

    return Off


class Flushes(Right):
    def function(self, name: str, x: Tensor, y: Tensor, *, fusion: bool = True) -> Tensor:
        got = super().function(name, x, y, fusion=fusion)
        return got * (got.abs() >= 2.0**-126)


class HasNoSmallExp(Right):
    def function(self, name: str, x: Tensor, y: Tensor, *, fusion: bool = True) -> Tensor:
        return super().function(name, x.clamp(min=-88.0) if name == "exp" else x, y, fusion=fusion)


class NeverFuses(Right):
    def function(self, name: str, x: Tensor, y: Tensor, *, fusion: bool = True) -> Tensor:
        return super().function(name, x, y, fusion=False)


class AddsInOneOrder(Right):
    def scan(self, x: Tensor, warps: int) -> tuple[Tensor, Tensor]:
        return super().scan(x, 1)


class AddsInBfloat16(Right):
    def scan(self, x: Tensor, warps: int) -> tuple[Tensor, Tensor]:
        sums, total = super().scan(x, warps)
        return sums.bfloat16().float(), total.bfloat16().float()


class CutsCasts(Right):
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return cut(x.double(), 8).to(dtype) if dtype == torch.bfloat16 else x.to(dtype)


class LosesNan(Right):
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.nan_to_num(0.0, torch.inf, -torch.inf).to(dtype)


class Saturates(Right):
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)


class LosesAdditions(Right):
    def atomic_sum(self, x: Tensor) -> Tensor:
        return super().atomic_sum(x[1:])


class AddsInAnyOrder(Right):
    def __init__(self) -> None:
        self.calls = iter(range(1000))

    def atomic_sum(self, x: Tensor) -> Tensor:
        return super().atomic_sum(x) + next(self.calls) % 2 * (x[0] != 1)


@pytest.fixture(autouse=True)
def short_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LONG", SHORT)


@pytest.fixture(scope="module")
def known() -> Card:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "LONG", SHORT)
        return card_of([one for probe in probes.PROBES.values() for one in probe(Right())])


def card_of(measures: Sequence[Measure]) -> Card:
    return Card("a card", "2026-01-01", "a test", {"torch": "2"}, {one.name: one.value for one in measures})


def test_the_right_device_is_within_the_tolerances_and_as_the_page_says(known: Card) -> None:
    rows = [row for probe in probes.PROBES.values() for row in compared(list(probe(Right())), {}, known)]
    assert [row for row in rows if row.result != "same"] == []
    assert arithmetic_command.exit_code(rows) == 0
    expected = {
        "tl.dot of float32, default: operand a": "10 bits, cut",
        "torch.mm of float32, allow_tf32=True: operand": "10 bits, nearest, ties to even",
        "tl.dot of bfloat16: last bit of an addend beside 1": "2^-25",
        "tl.dot of float16: products in an instruction": "16",
        "tl.dot of TF32: products in an instruction": "8",
        "tl.dot of TF32: rounding of a sum": "cut, addends cut before",
        "x*x - y*y": "one fma",
    }
    assert {name: known.measured[name] for name in expected} == expected


COVERED, BEYOND = "DIFFERS", "NOT COVERED"
WRONG: list[tuple[type[Right], str, str, str]] = [
    (RoundsOperands, "operands", "tl.dot of float32, default: operand a", COVERED),
    (RoundsToFewerBits, "operands", "tl.dot of float32, default: operand b", BEYOND),
    (CutsToFewerBits, "operands", "tl.dot of float32, default: operand a", BEYOND),
    (CutsOneSide, "operands", "tl.dot of float32, default: worst error, in 2^-24 of the terms", BEYOND),
    (IsNoIeee, "operands", "tl.dot of float32, ieee: operand a", BEYOND),
    (IsNoIeee, "operands", "tl.dot of float32, ieee: worst error, in 2^-24 of the terms", BEYOND),
    (NeedsNoPermission, "torch.mm", "torch.mm of float32, allow_tf32=False: operand", BEYOND),
    (AddsFewerBits, "sums of products of bfloat16", "tl.dot of bfloat16: last bit of an addend beside 1", BEYOND),
    (AddsMore, "sums of products of bfloat16", "tl.dot of bfloat16: products in an instruction", COVERED),
    (RoundsSums, "sums of products of TF32", "tl.dot of TF32: rounding of a sum", COVERED),
    (RoundsSumsUp, "sums of products of float16", "tl.dot of float16: rounding of a sum", BEYOND),
    (HasTwoPaths, "sums of products of bfloat16", "tl.dot of bfloat16: equal results of M=16 and M=64", COVERED),
    (
        AddsInHalf,
        "sums of products of bfloat16",
        f"tl.dot of bfloat16: mean error of sums of {SHORT} positive terms, in ulp",
        BEYOND,
    ),
    (FlushesProducts, "sums of products of bfloat16", "tl.dot of bfloat16: subnormal products", COVERED),
    (off_by(100, "exp"), "functions", "tl exp on [-80, 80]: worst error in ulp", BEYOND),
    (off_by(30, "exp"), "functions", "tl exp on [-80, 80]: worst error in ulp", COVERED),
    (off_by(30, "exp"), "functions", "tl exp on [-5, 0]: worst error in ulp", BEYOND),
    (off_by(10, "/"), "functions", "tl / on 2^-60 to 2^60: worst error in ulp", BEYOND),
    (off_by(torch.nan, "log2"), "functions", "tl log2 on normal numbers: worst error in ulp", BEYOND),
    (Flushes, "subnormal numbers", "tl exp2: subnormal numbers", COVERED),
    (HasNoSmallExp, "subnormal numbers", "tl exp: subnormal numbers", BEYOND),
    (NeverFuses, "contraction", "x*x - y*y", COVERED),
    (AddsInOneOrder, "sums", "tl.sum of 1024: warps with equal bits", COVERED),
    (AddsInBfloat16, "sums", "tl.cumsum of 64: worst error, in 2^-24 of the terms", BEYOND),
    (AddsInBfloat16, "sums", "tl.sum of 1024: worst error, in 2^-24 of the terms", BEYOND),
    (CutsCasts, "casts", "float32 to bfloat16", BEYOND),
    (LosesNan, "casts", "float32 to float16", BEYOND),
    (Saturates, "casts", "float32 to float16", BEYOND),
    (LosesAdditions, "atomic additions in bfloat16", "tl.atomic_add of bfloat16", BEYOND),
    (AddsInAnyOrder, "atomic additions in float32", "tl.atomic_add of float32", COVERED),
]


@pytest.mark.parametrize(("device", "probe", "measure", "result"), WRONG)
def test_a_probe_reports_a_wrong_arithmetic(device: type[Right], probe: str, measure: str, result: str, known: Card) -> None:
    rows = compared(list(probes.PROBES[probe](device())), {}, known)
    assert {row.name: row for row in rows}[measure].result.startswith(result)
    assert arithmetic_command.exit_code(rows) == (1 if any(not row.covered for row in rows) else 0)


def test_every_probe_has_a_wrong_arithmetic() -> None:
    def kinds(names: Iterable[str]) -> set[str]:
        return {re.sub(r"\b(b?float\d+|TF32)$", "", name) for name in names}

    assert kinds(probes.PROBES) == kinds(name for _, name, _, _ in WRONG)


# Collectives


def added_in_turn(kind: str, rows: Tensor) -> Tensor:
    """Ranks that add one after the other, round each time, and lose NaN; a reduce_scatter adds in the same order."""
    if kind == "max":
        return rows.nan_to_num(-torch.inf).amax(0).expand_as(rows)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total.view(len(rows), -1) if kind == "reduce_scatter" else total.expand_as(rows)


def keeps_nan(kind: str, rows: Tensor) -> Tensor:
    return rows.amax(0).expand_as(rows) if kind == "max" else added_in_turn(kind, rows)


def scatters_in_another_order(kind: str, rows: Tensor) -> Tensor:
    return added_in_turn(kind, rows.flip(0) if kind == "reduce_scatter" else rows)


def differs_by_rank(kind: str, rows: Tensor) -> Tensor:
    got = added_in_turn(kind, rows).clone()
    got[-1] += 1
    return got


def loses_a_rank(kind: str, rows: Tensor) -> Tensor:
    return added_in_turn(kind, torch.cat([rows[:1] * 0, rows[1:]]))


def rounds_once(kind: str, rows: Tensor) -> Tensor:
    return added_in_turn(kind, rows.double()).to(rows.dtype)


class Varies:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, kind: str, rows: Tensor) -> Tensor:
        self.calls += 1
        return added_in_turn(kind, rows.roll(self.calls, 0))


MERGED = "all_reduce over 4 ranks: bfloat16"


@pytest.mark.parametrize(
    ("reduce", "measure", "result"),
    [
        (keeps_nan, "all_reduce MAX over 4 ranks: NaN on rank 0, 1, ... kept", COVERED),
        (scatters_in_another_order, "reduce_scatter over 4 ranks: bfloat16, equal to all_reduce", COVERED),
        (differs_by_rank, MERGED, BEYOND),
        (Varies(), MERGED, BEYOND),
        (loses_a_rank, f"{MERGED}, worst error in half units of the terms", BEYOND),
        (rounds_once, f"{MERGED}, equal to one rounding", COVERED),
        (rounds_once, f"{MERGED}, 1 on rank 0, 1, ... rounded once", COVERED),
    ],
)
def test_a_probe_of_ranks_reports_other_sums(reduce: exchanges.Reduce, measure: str, result: str) -> None:
    def measures(reduce: exchanges.Reduce) -> Iterator[Measure]:
        for probe in exchanges.EXCHANGES.values():
            yield from probe(reduce, 4)

    right = list(measures(added_in_turn))
    assert {row.result for row in compared(right, {}, card_of(right))} == {"same"}
    rows = {row.name: row for row in compared(list(measures(reduce)), {}, card_of(right))}
    assert rows[measure].result.startswith(result)


# What measures concern


def test_measures_concern_rows_of_the_page_of_rounding_and_names_in_its_module(known: Card) -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "explanation" / "rounding.md"
    rows = [row["operation"].replace("`", "") for row in table(page.read_text(encoding="utf-8"), "operation")]
    measures = [one for probe in probes.PROBES.values() for one in probe(Right())]
    measures += [one for probe in exchanges.EXCHANGES.values() for one in probe(added_in_turn, 3)]
    concerned = {one.concerns.partition(": ")[::2] for one in measures}
    assert sorted({row for row, _ in concerned}) == sorted(rows)
    assert [name for _, names in concerned for name in names.split(", ") if name and not hasattr(rounding, name)] == []


# Tables and the command


def test_numbers_are_near_by_a_factor_and_words_are_equal() -> None:
    assert near(61.0, 60.0)
    assert near(-134.0, -150.0)
    assert near(0.0, 0.2)
    assert near("cut", "cut")
    assert not near(61.0, 40.0)
    assert not near(134.0, -134.0)
    assert not near("cut", "nearest")
    assert not near("nan", 1.0)


def test_a_share_is_0_or_100_only_for_none_or_all() -> None:
    some = torch.arange(1000)
    assert [cards.share(some < count) for count in (0, 1, 254, 999, 1000)] == ["0 %", "1 %", "25 %", "99 %", "100 %"]


def test_a_table_is_read_as_it_was_written(tmp_path, known: Card) -> None:
    (tmp_path / "a-card.toml").write_text(known.text(), encoding="utf-8")
    assert cards.read(tmp_path) == {"a card": known}
    (tmp_path / "b.toml").write_text("card = 1", encoding="utf-8")
    with pytest.raises(ValueError, match=r"b.toml must be the table of a card"):
        cards.read(tmp_path)


def test_the_tables_on_file_have_measures_of_probes_within_the_tolerances() -> None:
    limits = {one.name: one.limit for probe in probes.PROBES.values() for one in probe(Right())}
    for ranks in (2, 4):
        limits |= {one.name: one.limit for probe in exchanges.EXCHANGES.values() for one in probe(added_in_turn, ranks)}
    limits |= {name.replace(str(SHORT), "4096"): LIMIT_OF_LONG_SUMS for name in limits if "positive terms" in name}
    on_file = cards.read()
    assert "NVIDIA H200" in on_file
    for card in on_file.values():
        assert {*card.measured} <= {*limits}, card.card
        rows = [Comparison(name, value, value, limits[name], "") for name, value in card.measured.items()]
        assert {row.result for row in rows} == {"same"}, card.card


def test_the_right_device_adds_as_an_h200(known: Card) -> None:
    """The page of rounding has its arithmetic, and so has the device of these tests."""
    h200 = cards.read()["NVIDIA H200"].measured
    words = {name: value for name, value in h200.items() if name.startswith(("tl.dot", "torch.mm")) and isinstance(value, str)}
    assert len(words) == 21
    assert {name: known.measured[name] for name in words} == words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_so_does_the_right_rule_on_a_hopper(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((64, 72), (72, 64)))
    assert torch.equal(matrix_unit(a, b), Right().dot(a, b))
    assert not torch.equal(matrix_unit(a, b), a.float() @ b.float())


class Stub:
    """A worker or ranks whose probes measure 1, with a limit of 2, or do what `told` says."""

    told: ClassVar[dict[str, Any]] = {}

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def ask(self, question: dict[str, str]) -> dict[str, Any]:
        name = question.get("probe", "host")
        answer = self.told.get(name, 1.0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, dict):
            return answer
        if name == "host":
            return {"card": "a card", "versions": {"torch": "2"}}
        return {"measures": [dataclasses.asdict(Measure(f"measure of {name}", answer, 2.0, "a row"))]}


EVERY = [*probes.PROBES, *exchanges.EXCHANGES]
Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command on a stub, with a table in which every probe measures 1."""
    card = Card("a card", "2026-01-01", "a test", {"torch": "1"}, {f"measure of {name}": 1.0 for name in EVERY})
    monkeypatch.setattr(arithmetic_command, "Worker", Stub)
    monkeypatch.setattr(arithmetic_command, "RankGroup", Stub)

    def run(*words: str, table: bool = True, **told: Any) -> int:
        monkeypatch.setattr(arithmetic_command, "read", lambda: {"a card": card} if table else {})
        monkeypatch.setattr(Stub, "told", told)
        return cli.main(["arithmetic", "--device", "cpu", *words])

    return run


def test_the_exit_code_says_whether_tolerances_cover_the_device(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for code, last, told in (
        (0, f"{len(EVERY)} same", {}),
        (0, f"{len(EVERY) - 1} same, 1 DIFFERS", {"sums": 1.9}),
        (1, f"{len(EVERY) - 1} same, 1 NOT COVERED", {"sums": 2.1}),
        (1, f"{len(EVERY) - 2} same, 1 NOT COVERED, 1 FAILED", {"sums": 2.1, "MAX": WorkerLost("hung", "no answer", "")}),
        (3, f"{len(EVERY) - 1} same, 1 FAILED", {"casts": WorkerLost("crashed", "signal 11", "")}),
        (3, f"{len(EVERY) - 1} same, 1 FAILED", {"casts": {"measures": []}}),
        (3, f"{len(EVERY)} not known", {"table": False}),
    ):
        assert run(**told) == code, told
        assert capsys.readouterr().out.splitlines()[-1] == last
    assert run(host=WorkerLost("crashed", "signal 11", "")) == 3
    assert "the device cannot be used: crashed: signal 11" in capsys.readouterr().err


def test_a_probe_that_fails_is_reported_with_what_it_has_measured(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    some = [dataclasses.asdict(Measure("measure of casts", 3.0, 2.0, "a row"))]
    assert run(casts={"measures": some, "failed": "ValueError: no such cast"}) == 1
    out = capsys.readouterr().out
    assert "NOT COVERED: it must be 2 at most  a row" in out
    assert "FAILED: ValueError: no such cast" in out


def test_one_rank_has_no_collectives(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--ranks", "1") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "collectives were not measured: there is one rank",
        f"{len(probes.PROBES)} same",
    ]


def test_files_have_what_was_measured(run: Run, tmp_path: pathlib.Path) -> None:
    report, record = tmp_path / "a.json", tmp_path / "a.toml"
    assert run("--json", str(report), "--record", str(record), sums=1.9) == 0
    data = json.loads(report.read_text(encoding="utf-8"))
    assert (data["card"], data["versions"], data["known_versions"], data["exit_code"]) == (
        "a card",
        {"torch": "2"},
        {"torch": "1"},
        0,
    )
    differing = [row for row in data["probes"] if row["result"] != "same"]
    assert [(row["name"], row["measured"], row["known"], row["covered"]) for row in differing] == [
        ("measure of sums", 1.9, 1.0, True)
    ]
    (card,) = cards.read(tmp_path).values()
    assert card.versions == {"torch": "2"} and card.measured["measure of sums"] == 1.9
    assert run("--json", str(tmp_path / "none" / "a.json")) == 2


def measured_by(worker: Worker | RankGroup, names: Iterable[str]) -> dict[str, float | str]:
    """What a worker or ranks measure. No probe fails, and tolerances cover every measure."""
    replies = {name: worker.ask({"probe": name}) for name in names}
    assert {name: reply.get("failed") for name, reply in replies.items()} == dict.fromkeys(names)
    rows = compared([Measure(**one) for reply in replies.values() for one in reply["measures"]], {}, None)
    assert [row for row in rows if not row.covered] == []
    return {row.name: row.measured for row in rows}


def test_the_kernels_run_in_a_worker() -> None:
    with Worker(60, serves=arithmetic_command.SERVES) as worker:
        measured = measured_by(worker, probes.PROBES)
        assert worker.ask({"probe": "no probe"})["failed"] == "KeyError: 'no probe'"
        assert worker.ask({})["versions"]["torch"] == torch.__version__
    assert measured["tl.dot of float32, ieee: operand a"] == "exact"
    assert measured["float32 to bfloat16"].startswith("nearest, ties to even")
    assert measured["tl.atomic_add of bfloat16"] == "not there"  # in the interpreter


@pytest.mark.slow
def test_ranks_run_the_collectives() -> None:
    with RankGroup(2, "gloo", 60, serves=arithmetic_command.SERVES) as group:
        measured = measured_by(group, exchanges.EXCHANGES)
    assert measured["all_reduce over 2 ranks: bfloat16, equal to one rounding"] == "100 %"
