"""Compares the results that a law yields, row by row or bit for bit, and says where two tensors differ."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from oracles.tolerance.bound import Bound, Decision
from properties.laws.law import Pair
from verify.bench.places import Layout
from verify.execution.picture import drawn
from verify.process.outcome import FailureKind, Finding
from verify.process.picture import Picture

Where = Callable[[Pair, int, torch.Size], str]
LayOut = Callable[[Pair, torch.Size], Layout | None]


@dataclasses.dataclass
class Judgement:
    """The result of one case's comparisons.

    `rows` is the number of rows compared. `ratios` maps each output to its largest error as a multiple of the tolerance.
    `boundless` has the outputs of which some rows were not judged, because their tolerances are not finite (Bound.ratios).
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    rows: int = 0
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    boundless: list[str] = dataclasses.field(default_factory=list)


OFF = "is off by more than rounding explains"
DIFFERS = "differs, but must be equal to the bit"
CHANGED = "was changed after the call had returned it, while the law went on"
INFINITE_FROM = 65_520.0  # the least number that rounds to infinity in float16
LARGE = 2**20  # numbers of a tensor of which copies on a GPU are dear
NEAR = 0.8  # an error above this multiple of its tolerance is measured by more runs, although it is right
NOTHING: Mapping[str, float] = MappingProxyType({})
PICTURES = 4  # so many findings of a case have one: those that a report shows in full


def _unknown(_: Pair, __: torch.Size) -> None:
    """How the rows of a comparison lie, if nobody knows."""


def judge(pairs: Iterable[Pair], where: Where, excused: Mapping[str, float] = NOTHING, lay_out: LayOut = _unknown) -> Judgement:
    """Judge a law's comparisons.

    `where` turns a comparison, a flat index of its rows and their shape into words. `lay_out` says how its rows lie in a picture.

    `excused` maps outputs that a known defect explains to multiples of their tolerance. If an output's largest error is at most
    that multiple, we do not measure it against more disturbed runs. If it is larger, we do so only for rows above the multiple.
    We look at each pair when the law yields it. If something differs, we look at the pair again after the law's last pair. A
    tensor that the implementation changed in between is a finding.

    Raises ArithmeticError if the truth is not finite.
    """
    comparisons = [(pair, _quick_look(pair.got, pair.want)) for pair in pairs]
    glances = iter(_read([glance for _, glance in comparisons if glance is not None]))
    result = Judgement()
    for pair, glance in comparisons:
        port, _, got, want = pair
        worst, whole = (0.0, 0.0) if glance is None else next(glances)
        value = want.value if isinstance(want, Bound) else want
        finding, rows, ratio = None, 0, None
        drawing = lay_out if len(result.findings) < PICTURES else _unknown
        if not _whole(got) or (glance is not None and _changed(got, want, worst)):
            finding = Finding(pair.name, FailureKind.INPUT_CHANGED, CHANGED, port=port)
        elif got.shape != value.shape:
            what = f"has shape {tuple(got.shape)}, must have {tuple(value.shape)}"
            finding = Finding(pair.name, FailureKind.SHAPE, what, port=port)
        elif isinstance(want, Bound):
            if glance is not None and worst <= NEAR and want.decide(worst) is Decision.RIGHT and math.isfinite(whole):
                rows, ratio = want.allowed.numel(), worst
            else:
                finding, rows, ratio = _row_by_row(pair, want, where, drawing, excused.get(port, 0.0))
                if rows < want.allowed.numel():
                    result.boundless.append(pair.name)
        elif worst:
            finding, rows, ratio = _bit_by_bit(pair, want, where, drawing)
        elif glance is not None:
            rows, ratio = got.numel(), 0.0
        result.rows += rows
        if ratio is not None:
            result.ratios[port] = max(ratio, result.ratios.get(port, 0.0))
        if finding is not None:
            result.findings.append(finding)
    return result


def _whole(x: Tensor) -> bool:
    """Whether the memory of a tensor still holds all its elements; its storage may have been made smaller."""
    if x.layout is not torch.strided or not x.numel():
        return True
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() <= x.untyped_storage().nbytes()


def _changed(got: Tensor, want: Tensor | Bound, worst: float) -> bool:
    """Whether a tensor, which differed by `worst` when the law yielded it, no longer has that shape or that difference."""
    if got.shape != (want.value if isinstance(want, Bound) else want).shape:
        return True
    if worst == 0 or (isinstance(want, Bound) and want.decide(worst) is Decision.RIGHT):
        return False
    again = _quick_look(got, want)
    now = math.nan if again is None else again[0].item()
    return now != worst and not (math.isnan(now) and math.isnan(worst) and again is not None)


def _quick_look(got: Tensor, want: Tensor | Bound) -> tuple[Tensor, Tensor] | None:
    """Two scalars, still on the device, that tell whether two tensors differ; None if shapes differ or there are no numbers.

    We do not wait for them yet: on a GPU, each wait delays the launches of a case.

    For a `Bound`, the first is the largest error over its tolerance, or NaN if an error or a tolerance is NaN. The second is the
    sum of the tolerances, which is not finite if one of them is not: under an infinite tolerance every error would count as none.
    For a tensor, both are 1 if any number differs, else 0.
    """
    if not _whole(got):
        return None
    if isinstance(want, Bound):
        if got.shape != want.value.shape or not want.allowed.numel():
            return None
        return (_errors(got, want) / want.allowed).max(), want.allowed.sum()
    if got.shape != want.shape or not got.numel():
        return None
    differs = (got != want).any().double()
    return differs, differs


def _read(glances: list[tuple[Tensor, Tensor]]) -> list[tuple[float, ...]]:
    """Read all glances, with a single wait if they are on one device."""
    numbers = list(itertools.chain(*glances))
    read = torch.stack(numbers).tolist() if len({x.device for x in numbers}) == 1 else [x.item() for x in numbers]
    return list(zip(read[::2], read[1::2], strict=True))


def _errors(got: Tensor, bound: Bound) -> Tensor:
    """The error of each row, in the 2-norm."""
    off = bound.value - _as_numbers(got.detach(), bound.value)  # float64, like the truth
    return off.abs_() if bound.allowed.ndim == got.ndim else torch.linalg.vector_norm(off, dim=-1)


def _as_numbers(got: Tensor, truth: Tensor) -> Tensor:
    """Replace an infinity by the nearest number that rounds to it, if the truth has its sign and is more than half of that number.

    Only float16 has a range that a truth may exceed: from 65,520 on, numbers round to infinity. Other infinities stay.
    """
    if got.dtype != torch.float16:
        return got
    infinite = got.isinf()
    # On a GPU, we wait for the answer only if a tensor is so large that its copies would be dear.
    if (got.device.type == "cpu" or got.numel() > LARGE) and not bool(infinite.any()):
        return got
    truth = truth.double()
    meant = infinite & (got.sign() == truth.sign()) & (truth.abs() > INFINITE_FROM / 2)
    return torch.where(meant, truth.sign() * truth.abs().clamp(min=INFINITE_FROM), got.double())


def _row_by_row(pair: Pair, bound: Bound, where: Where, lay_out: LayOut, spared: float) -> tuple[Finding | None, int, float | None]:
    """Judge an output by its bound. Returns a finding or None, the number of judged rows, and the largest error over its tolerance.

    If the bound comes from fewer runs than the verdict needs, it is replaced by a finer one. Then `_examined` decides. Errors up to
    `spared` times the tolerance need no runs beyond those.
    """
    wide, want = pair.got.detach().double(), bound.value
    error = _errors(pair.got, bound)
    if error.numel() == 0:
        return None, 0, None
    if not bool(want.isfinite().all()):
        # our own failure, not one of the implementation
        raise ArithmeticError(f"the truth of {pair.name} is not finite")
    worst, ratio, bound = _examined(error, bound.sufficient(error), max(1.0, spared))
    over, limited = ratio > 1, bound.allowed.isfinite()
    rows = int(limited.sum())
    if not bool(over.any()):
        return None, rows, float(ratio.flatten()[worst])
    first = int(over.flatten().nonzero()[0])
    begin, got, expected = _some(wide, want, worst, error.ndim)
    bad = not math.isfinite(float(error.flatten()[worst]))
    finding = Finding(
        pair.name,
        FailureKind.NOT_FINITE if bad else FailureKind.OFF,
        "is not finite" if bad else OFF,
        where(pair, worst, error.shape),
        where(pair, first, error.shape),
        error.numel(),
        int(over.sum()),
        float(error.flatten()[worst]),
        float(bound.allowed.flatten()[worst]),
        bound.origin,
        got,
        expected,
        begin=begin,
        port=pair.port,
        picture=_picture(ratio.where(error.isfinite() | ~limited, error), lay_out(pair, error.shape)),
    )
    return finding, rows, float(ratio.flatten()[worst])


def _examined(error: Tensor, bound: Bound, most: float) -> tuple[int, Tensor, Bound]:
    """Take the bound from more runs where an error is more than `most` times its tolerance, until one stays so or none is left.

    We ask about one row at a time, the worst one first. The finer bound has other tolerances for the row's part of the call. If the
    row stays over, the output is broken, and rows of other parts keep the tolerances of fewer runs. A row that is within the finer
    tolerance of another row's part is not asked about.

    If all rows are within it, those near it are asked about once more. They stay right. But where equal rows have equal errors,
    few runs may have small errors only, and the multiple that a report shows would say more about them than about the row.

    Returns the row that decides, each row's error over its tolerance, and the bound.
    """
    start = bound.ratios(error)
    ratio, allowed = start, bound.allowed
    seen = torch.zeros(ratio.shape, dtype=torch.bool, device=ratio.device)
    while bound.decide(float((left := ratio.masked_fill(seen, 0.0)).max()), most) is not Decision.RIGHT:
        worst = int(left.argmax())
        row = torch.zeros_like(seen)
        row.view(-1)[worst] = True
        fine, ratios = bound, start
        while fine.decide(float(ratios.flatten()[worst]), most) is Decision.UNDECIDED:
            fine = fine.refined(row)
            ratios = fine.ratios(error)
        changed = row | ((fine.allowed != bound.allowed) & ~seen)
        ratio, allowed = torch.where(changed, ratios, ratio), torch.where(changed, fine.allowed, allowed)
        if float(ratio.flatten()[worst]) > most:
            return worst, ratio, dataclasses.replace(bound, allowed=allowed)
        seen |= row
    near = (ratio > NEAR) & ~seen
    if most == 1 and bound.finer is not None and bool(near.any()):
        fine = bound.refined(near)
        allowed = torch.maximum(allowed, fine.allowed)
        ratio = torch.where(near, dataclasses.replace(fine, allowed=allowed).ratios(error), ratio)
    return int(ratio.argmax()), ratio, dataclasses.replace(bound, allowed=allowed)


def _bit_by_bit(pair: Pair, want: Tensor, where: Where, lay_out: LayOut) -> tuple[Finding, int, float]:
    """The finding about a tensor that differs in at least one number, the number of numbers, and infinity as the ratio."""
    got = pair.got
    different = got != want  # NaN differs from everything, 0 equals -0
    flat = different.flatten().nonzero().squeeze(-1)
    first = int(flat[0])
    wide_got, wide_want = got.detach().double().flatten(), want.detach().double().flatten()
    error = (wide_got - wide_want).abs().nan_to_num(nan=math.inf, posinf=math.inf).where(different.flatten(), 0.0)
    worst = int(error.argmax())
    nan = bool(wide_got[worst].isnan())
    finding = Finding(
        pair.name,
        FailureKind.NOT_A_NUMBER if nan else FailureKind.DIFFERS,
        "is NaN, but must be equal to the bit" if nan else DIFFERS,
        where(pair, worst, got.shape),
        where(pair, first, got.shape),
        got.numel(),
        len(flat),
        float(error[worst]),
        0.0,
        "equal to the bit",
        tuple(wide_got[worst : worst + 4].tolist()),
        tuple(wide_want[worst : worst + 4].tolist()),
        port=pair.port,
        picture=_picture(torch.where(got.isnan(), math.nan, math.inf).where(different, 0.0), lay_out(pair, got.shape)),
    )
    return finding, got.numel(), math.inf


def _picture(ratio: Tensor, layout: Layout | None) -> Picture | None:
    """The picture of errors over their tolerances; None if nobody knows how they lie."""
    return None if layout is None else drawn(ratio, layout)


def _some(got: Tensor, want: Tensor, row: int, axes: int) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """Return a place in a row, and four numbers from there on of that row and of the expected one.

    The place is 0 or, if the first four hardly differ, that of the largest difference. If each number is a row (`axes` is
    got.ndim), there is one number.
    """
    if axes == got.ndim:
        return 0, (float(got.flatten()[row]),), (float(want.flatten()[row]),)
    rows = [x.flatten(0, -2)[row] for x in (got, want)]
    off = (rows[0] - rows[1]).abs().nan_to_num(torch.inf, torch.inf)
    most = int(off.argmax())
    begin = most if bool(off[:4].max() < off[most] / 16) else 0
    some = [tuple(x[begin : begin + 4].tolist()) for x in rows]
    return begin, some[0], some[1]
