"""Claims of four pull requests of Megatron-LM, settled on the authors' own code: releases before and after the change.

| pull request | before | after |
| --- | --- | --- |
| 1989: the layer, with TP and SP, and its FLOPs | | 0.16.1; the formula is in the wheels from 0.17.1 on |
| 3040: convolution of flash-linear-attention, one norm for two | 0.17.1 | 0.18.2 |
| 4913: one all-to-all for one a sequence | 0.18.2 | 0.19.2 |
| 5396: the norm in the kernel | 0.19.2 | 0.19.2 with the change, which no release has |

Each release runs in processes of its own (verify/claims/releases.py). A release has other changes than those of the pull request
too. Results are judged by the laws of every check, on lines that `gdn-verify repeat` takes.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from oracles.flops import training_flops
from oracles.layer import Layer
from properties.paths.case import ParallelCase
from verify.claims.kernel_claims import MIB, ragged
from verify.claims.releases import Releases, Unanswered
from verify.claims.ruling import RIGHT, UNDECIDED, WRONG, Ruling, gain, verdict_on
from verify.claims.setting import QWEN3_NEXT
from verify.claims.table import number
from verify.claims.timing import Effort, Spread, ratios
from verify.process.messages import Data
from verify.process.outcome import Outcome, Verdict

T = TypeVar("T")
# The releases that each pull request needs.
NEEDED = {1989: ("0.16.1", "0.17.1", "0.19.2"), 3040: ("0.17.1", "0.18.2"), 4913: ("0.18.2", "0.19.2"), 5396: ("0.19.2",)}
LAYER, EXCHANGE, NORM = "megatron/layer", "megatron/exchange", "megatron/norm_in_kernel"
MESHES = ("tp=1", "tp=2", "tp=2 sp=yes", "tp=4", "tp=4 sp=yes")
# Packed cases are for 2 and 4 context-parallel ranks: ragged, with an empty sequence, and with pads. On a GPU all cases are bf16,
# since kernels are compiled for each dtype.
CASES = ("lengths=68+68", "lengths=132 dtype=bf16 gate=mixed", "lengths=68+68 values=scaled gate=ordinary")
PACKED = ("lengths=40+8+0+24 packed=yes", "lengths=37+5+21 packed=yes padding=least dtype=bf16", "lengths=72 packed=yes gate=mixed")
IN_BF16 = tuple(tuple(f"{words.replace(' dtype=bf16', '')} dtype=bf16" for words in several) for several in (CASES, PACKED))
CP_MESHES = ("cp=2", "cp=4", "tp=2 cp=2")
EXCHANGE_RANKS = (2, 4, 8, 16)
# Widths with equal and with different widths of keys and values.
WIDTHS = (QWEN3_NEXT, dataclasses.replace(QWEN3_NEXT, key_dim=64))
BOTH_WAYS, LOSSLESS = "both directions and the round trip are right", "numerically lossless"
ON_A_CPU = "times on a CPU do not hold for a GPU"


@dataclasses.dataclass(frozen=True)
class Extent:
    """The sizes of a measurement.

    - `widths`: words of the judged layers. `cases`, `packed`: their cases. `layer`, `dtype`, `tokens`: the timed layer.
    - `moved`: the tokens of the timed packed layer, in as many sequences as each number of `packs`, over as many ranks as `ranks`.
    - `layouts`: how many layouts of packed sequences are exchanged for each number of ranks.
    """

    widths: str = "heads=4 value_heads=8 hidden=64 key_dim=64 value_dim=64"
    cases: tuple[str, ...] = IN_BF16[0]
    packed: tuple[str, ...] = IN_BF16[1]
    layer: Layer = QWEN3_NEXT
    dtype: str = "bf16"
    tokens: int = 4096
    moved: int = 16384
    packs: tuple[int, ...] = (1, 4, 16, 64, 256)
    ranks: tuple[int, ...] = (2, 4)
    layouts: int = 8


ON_GPUS = Extent()
QUICKLY = dataclasses.replace(ON_GPUS, packs=(1, 16, 256), layouts=4)
INTERPRETED = Extent(
    "heads=4 value_heads=8 hidden=16",
    CASES,
    PACKED,
    Layer(hidden=16, heads=2, value_heads=4, key_dim=8, value_dim=8),
    tokens=32,
    moved=64,
    packs=(1, 4),
    ranks=(2,),
    layouts=8,
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where and how claims are measured.

    `gpus` is the number of GPUs of this host, `tell` gets lines about the progress, and `place` is what `--releases` says, if it
    says something.
    """

    releases: Releases
    extent: Extent
    effort: Effort
    gpus: int = 0
    tell: Callable[[str], None] = lambda words: None
    place: str = ""

    @property
    def cuda(self) -> bool:
        """Whether layers run on a GPU."""
        return self.releases.device == "cuda"

    def again(self, claim: int) -> str:
        """The command that repeats a claim."""
        return f"gdn-verify claims --claim {claim}" + (f" --releases {self.place}" if self.place else "")

    def line(self, version: str, adapter: str, words: str, *, ranks: int = 0) -> str:
        """A line about an adapter in a release, with the choices that the release has made."""
        chosen = self.releases.ask(version, "choices", ranks=ranks, adapter=adapter)["words"]
        where = "device=cuda " if self.cuda and not ranks and adapter != EXCHANGE else ""
        return f"{words.partition(' ')[0]} adapter={adapter} {where}{words.partition(' ')[2]} {' '.join(chosen)}"

    def outcomes(self, version: str, lines: Sequence[str], *, ranks: int = 0) -> list[Outcome]:
        """The outcomes of lines in a release, as many as were run."""
        reply = self.releases.ask(version, "outcomes", ranks=ranks, lines=[*lines])
        if "outcomes" not in reply:
            raise Unanswered(f"{version}: {reply.get('reason')}")
        return [Outcome.from_json(outcome) for outcome in reply["outcomes"]]


@dataclasses.dataclass(frozen=True)
class Judged:
    """What the laws say about lines in a release: a verdict, what was measured in words, and the line that shows it."""

    verdict: str
    words: str
    line: str


def judged(lines: Sequence[str], outcomes: Sequence[Outcome]) -> Judged:
    """The verdict of the laws on lines. It is RIGHT if every line holds and has rows to compare."""
    for line, outcome in zip(lines, outcomes, strict=False):
        if outcome.verdict is Verdict.BROKEN:
            finding = outcome.findings[0]
            return Judged(WRONG, f"{finding.place} {finding.what}", line)
    for line, outcome in zip(lines, outcomes, strict=False):
        if outcome.verdict is not Verdict.HOLDS or not outcome.rows:
            return Judged(UNDECIDED, outcome.reason or str(outcome.verdict), line)
    if len(outcomes) < len(lines) or not lines:
        return Judged(UNDECIDED, f"{len(outcomes)} of {counted(lines)} were run", lines[-1] if lines else "")
    worst, line = max((max(outcome.ratios.values(), default=0.0), line) for line, outcome in zip(lines, outcomes, strict=True))
    said = f"largest error {number(worst)} of what rounding allows" if worst else "equal to the bit"
    return Judged(RIGHT, f"{said}, {counted(lines)}", line)


def counted(lines: Sequence[str]) -> str:
    """How many cases there are, in words."""
    return f"{len(lines)} case{'s' * (len(lines) != 1)}"


def repeat(folder: str, line: str, ranks: int = 0) -> str:
    """The command that repeats a line in a release."""
    return f'gdn-verify repeat "{line}" --path {folder}' + (f" --ranks {ranks}" if ranks else "")


def ruled(
    bench: Bench, claim: int, what: str, claimed: str, version: str, adapter: str, words: Sequence[str], *, ranks: int = 0
) -> Ruling:
    """The row of lines that must hold in one release."""
    bench.tell(f"{claim}: {what}, {version}")
    lines = [bench.line(version, adapter, word, ranks=ranks) for word in words]
    found = judged(lines, bench.outcomes(version, lines, ranks=ranks))
    size = counted(lines) + (f", {ranks} processes" if ranks else "")
    again = repeat(bench.releases.folders[version], found.line, ranks)
    return Ruling(claim, what, size, claimed, f"{version}: {found.words}", found.verdict, again)


def same(bench: Bench, claim: int, what: str, claimed: str, versions: Sequence[str], words: Sequence[str]) -> Ruling:
    """The row of lines that must hold in two releases, with the difference between the results of both."""
    bench.tell(f"{claim}: {what}, {' and '.join(versions)}")
    found, results = {}, {}
    for version, lines in of_each(versions, lambda version: [bench.line(version, LAYER, word) for word in words]).items():
        found[version] = judged(lines, bench.outcomes(version, lines))
        results[version] = [bench.releases.ask(version, "results", line=line)["results"] for line in lines]
    verdicts = {result.verdict for result in found.values()}
    verdict = WRONG if WRONG in verdicts else UNDECIDED if UNDECIDED in verdicts else RIGHT
    worst = next((version for version in versions if found[version].verdict == verdict), versions[1])
    texts = [f"{version}: {result.words}" for version, result in found.items()]
    measured = "; ".join([*texts, difference(*(results[version] for version in versions))])
    again = repeat(bench.releases.folders[worst], found[worst].line)
    return Ruling(claim, what, counted(words), claimed, measured, verdict, again)


def of_each(versions: Sequence[str], ask: Callable[[str], T]) -> dict[str, T]:
    """What `ask` returns for each release. Their processes start at the same time."""
    with ThreadPoolExecutor(len(versions)) as pool:
        return dict(zip(versions, pool.map(ask, versions), strict=True))


Results = Sequence[Sequence[Mapping[str, Sequence[float]]]]  # of each line and rank, the numbers of each output and gradient


def difference(before: Results, after: Results) -> str:
    """The largest difference between results in words, relative to the largest entry of the same output or gradient."""
    worst, where = 0.0, ""
    for ranks, others in zip(before, after, strict=True):
        for rank, other in zip(ranks, others, strict=True):
            for name, numbers in rank.items():
                pairs = zip(numbers, other[name], strict=True)
                error = max((abs(one - two) if math.isfinite(one - two) else math.inf for one, two in pairs), default=0.0)
                if error and (relative := error / (max(map(abs, numbers)) or 1.0)) > worst:
                    worst, where = relative, name
    return f"differ by up to {worst:.0e} of the largest entry, in {where}" if worst else "the same bits in both"


# 1989


def layer(bench: Bench) -> Iterator[Ruling]:
    """The rows of the layer of 1989: it is the oracle's on every mesh."""
    claimed = "a unit test of the layer and its parallel form"
    for mesh in MESHES:
        words = [f"law=parallel {mesh} {bench.extent.widths} {case}" for case in bench.extent.cases]
        yield ruled(bench, 1989, f"the layer is the oracle's at {mesh}", claimed, "0.16.1", LAYER, words)
    # Elsewhere A_log and dt_bias are float32. Megatron-LM creates them in the dtype of all parameters.
    case = f"op=gdn_layer lengths=132 {bench.extent.widths} dtype=bf16 gate=mixed parameter_dtype=input"
    yield agreeing(bench, 1989, "the same with every parameter in bf16", claimed, "0.16.1", case, LAYER)


def layer_on_gpus(bench: Bench) -> Iterator[Ruling]:
    """The row of the layer of 1989 on ranks that have a GPU each."""
    claimed = "a unit test of the layer and its parallel form"
    if bench.cuda and bench.gpus > 1:
        words = [f"law=parallel {mesh} {bench.extent.widths} {case}" for mesh in MESHES[1:3] for case in bench.extent.cases]
        yield ruled(bench, 1989, "the same on 2 GPUs at tp=2 with and without SP", claimed, "0.16.1", LAYER, words, ranks=2)


def flops(bench: Bench) -> Iterator[Ruling]:
    """The rows of the formula: each of its terms against the count of the definition, at two pairs of widths."""
    versions, tokens = NEEDED[1989][1:], 4096
    bench.tell(f"1989: FLOPs, {' and '.join(versions)}")
    for widths in WIDTHS:
        layer = dataclasses.asdict(widths)
        told = {version: bench.releases.ask(version, "flops", layer=layer, tokens=tokens) for version in versions}
        yield from formula_rows(told, widths, tokens, bench.again(1989))


def formula_rows(told: Mapping[str, Mapping[str, Mapping[str, float]]], widths: Layer, tokens: int, again: str) -> Iterator[Ruling]:
    """The rows of what the formulas of releases say about a layer, by release and half of the formula. `again` repeats them."""
    counted = training_flops(widths, tokens)
    wanted = {
        "projections": counted.in_proj + counted.out_proj,
        "convolution": counted.conv1d,
        "rule": counted.gated_delta_rule,
    }
    size = f"K {widths.key_dim}, V {widths.value_dim}"
    for term, want in wanted.items():
        found = {(version, kind): said[term] for version, kinds in told.items() for kind, said in kinds.items()}
        several = dict.fromkeys(found.values())
        words = ", ".join(f"{number(value / want)} of the count" if value != want else "the count" for value in several)
        worst = max(several, key=lambda value: abs(value - want))
        share = f"; {100 * (worst - want) / counted.total:+.2f}% of the layer" if worst != want else ""
        yield Ruling(
            1989,
            f"FLOPs of the {term}, {' and '.join(told)}",
            size,
            "the formula counts the layer's FLOPs",
            f"{words} ({number(want / 1e9)} GFLOP in training, {tokens:,} tokens){share}",
            RIGHT if [*several] == [want] else WRONG,
            again,
        )


# 3040


def refined(bench: Bench) -> Iterator[Ruling]:
    """The row of 3040's results, which are the same before and after."""
    words = [f"law=parallel tp=1 {bench.extent.widths} {case}" for case in bench.extent.cases]
    yield same(bench, 3040, "convolution and norm: the layer's results", "the same results", NEEDED[3040], words)


def refined_packs(bench: Bench) -> Iterator[Ruling]:
    """The row of packed sequences after 3040."""
    words = [f"law=parallel tp=1 {bench.extent.widths} {case}" for case in bench.extent.packed]
    yield ruled(bench, 3040, "packed sequences (cu_seqlens)", "future work", "0.18.2", LAYER, words)


def refined_times(bench: Bench) -> Iterator[Ruling]:
    """The rows of the layer's times before and after 3040."""
    conv = bench.releases.ask("0.17.1", "choices", adapter=LAYER)["conv"]
    lacking = "" if conv == "causal-conv1d" else f"0.17.1 took {conv}'s convolution, because causal-conv1d is not installed"
    case = timed(bench, (bench.extent.tokens,))
    claimed = {"forward": ("1.20: 1.79 to 1.49 ms", 1.79 / 1.49), "backward": ("1.08: 3.24 to 3.01 ms", 3.24 / 3.01)}
    yield from faster(bench, 3040, "time of the layer", case, NEEDED[3040], claimed, lacking)


# 4913


def exchanged(bench: Bench) -> Iterator[Ruling]:
    """The rows of where the exchange of packed sequences puts everything, before and after 4913, on simulated ranks."""
    words = layouts(bench.extent.layouts, EXCHANGE_RANKS)
    sizes = "ragged layouts, cp " + ", ".join(map(str, EXCHANGE_RANKS))
    for version in NEEDED[4913]:
        yield ruled(bench, 4913, f"every token and feature, {sizes}", BOTH_WAYS, version, EXCHANGE, words)


def exchanged_layers(bench: Bench) -> Iterator[Ruling]:
    """The row of the results of packed layers before and after 4913."""
    what = f"packed layer, gradients too, at {', '.join(CP_MESHES)}"
    yield same(bench, 4913, what, "the same results", NEEDED[4913], packed_lines(bench))


def exchanged_over_ranks(bench: Bench) -> Iterator[Ruling]:
    """The rows of 4913 over ranks that are processes: where everything is put, and the layer's times by number of sequences."""
    gains = {"forward": ("iteration 7 to 10% faster", 1.0), "backward": ("iteration 7 to 10% faster", 1.0)}
    for size in bench.extent.ranks:
        what = f"over {size} ranks"
        if bench.cuda and bench.gpus < size:
            reason = f"it needs {size} GPUs, there {'is' if bench.gpus == 1 else 'are'} {bench.gpus}"
            yield Ruling(4913, what, claimed=BOTH_WAYS, measured=reason, repeat=bench.again(4913), lacking=True)
            continue
        lines = layouts(bench.extent.layouts, (size,))
        for version in NEEDED[4913]:
            yield ruled(bench, 4913, f"every token and feature, {what}", BOTH_WAYS, version, EXCHANGE, lines, ranks=size)
        for count in bench.extent.packs:
            case = timed(bench, tuple(ragged(bench.extent.moved, count, 2 * size)), size)
            yield from faster(bench, 4913, f"time of the packed layer {what}", case, NEEDED[4913], gains, ranks=size)


def packed_lines(bench: Bench) -> list[str]:
    """Words of packed layers: the first mesh of CP_MESHES with all cases of PACKED, and each other mesh with one of them."""
    pairs = [(CP_MESHES[0], case) for case in bench.extent.packed] + [*zip(CP_MESHES[1:], bench.extent.packed, strict=False)]
    return [f"law=parallel {mesh} {bench.extent.widths} {case}" for mesh, case in pairs]


def layouts(count: int, sizes: Sequence[int]) -> list[str]:
    """Words of exchanges, each way, of `count` layouts of packed sequences for each number of ranks.

    The first layouts are one sequence, an empty one between others, and many short ones. The others are drawn.
    """
    draw = random.Random(4913)  # noqa: S311 - the same layouts in every run
    words = []
    for cp in sizes:
        unit = 2 * cp
        lengths = [(3 * unit,), (unit, 0, 2 * unit), (unit,) * 9]
        lengths += [tuple(unit * draw.randrange(6) for _ in range(draw.randrange(1, 8))) for _ in range(count)]
        for index, several in enumerate([some for some in lengths if any(some)][:count]):
            group, width = (1, 2, 3)[index % 3], (4, 8, 6)[index % 3]
            heads = f"heads={cp} value_heads={cp * group} key_dim={width} value_dim={2 * width}"
            text = "+".join(map(str, several))
            words += [f"law=exchange variant={to} cp={cp} {heads} packed=yes lengths={text}" for to in ("heads", "tokens")]
    return words


# 5396


def in_kernel(bench: Bench) -> Iterator[Ruling]:
    """The rows of 5396's results on one rank: the norm in the kernel is the norm before it."""
    dtype = "bf16" if bench.cuda else "fp32"
    regimes = (
        ("grouped heads", "", "normalising repeated heads is normalising heads"),
        ("q and k as small as eps's root", " values=small", "eps is 1e-6 on both paths"),
        ("packed, grouped heads", " packed=yes", LOSSLESS),
    )
    for what, regime, says in regimes:
        lengths = "33+35+64" if "packed" in regime else "132"
        case = f"op=gdn_layer lengths={lengths} {bench.extent.widths} dtype={dtype}{regime}"
        yield agreeing(bench, 5396, what, says, "0.19.2", case, LAYER, NORM)


def in_kernel_over_ranks(bench: Bench) -> Iterator[Ruling]:
    """The row of 5396's results with packed sequences over ranks."""
    what = f"packed and context-parallel, at {', '.join(CP_MESHES)}"
    yield ruled(bench, 5396, what, LOSSLESS, "0.19.2", NORM, packed_lines(bench))


def agreeing(bench: Bench, claim: int, what: str, claimed: str, version: str, case: str, *adapters: str) -> Ruling:
    """The row of forms of the layer that are judged together, on a case of one rank."""
    bench.tell(f"{claim}: {what}")
    reply = bench.releases.ask(version, "contest", case=case, adapters=[*adapters])
    size = f"{case.split()[1].removeprefix('lengths=')} tokens"
    verdict = WRONG if reply["broken"] else RIGHT
    return Ruling(claim, what, size, claimed, f"{version}: {reply['about']}", verdict, bench.again(claim))


def kept(bench: Bench) -> Iterator[Ruling]:
    """The row of the memory that the layer keeps for backward."""
    bench.tell("5396: memory")
    case = timed(bench, (bench.extent.tokens,))
    lines = {name: timed_line(bench, "0.19.2", name, case) for name in (LAYER, NORM)}
    found = {name: bench.releases.ask("0.19.2", "memory", line=line) for name, line in lines.items()}
    yield memory_row(found[LAYER], found[NORM], case, bench.again(5396))


def memory_row(before: Data, after: Data, case: ParallelCase, again: str) -> Ruling:
    """The row of the bytes saved with the norm before the kernel and in it.

    The claim says what becomes less: q and k of H heads after the norm, and what becomes more: the norms' factors, one float32 for
    each token and head, now of HV heads and not of H.
    """
    layer, element = case.layer, 4 if case.dtype == "fp32" else 2
    factors = 2 * case.tokens * (layer.value_heads - layer.heads) * 4
    want = 2 * case.tokens * layer.heads * layer.key_dim * element - factors
    less = before["saved"] - after["saved"]
    measured = f"0.19.2: {number(before['saved'] / MIB)} MiB, in the kernel {number(less / MIB)} MiB less"
    if before["allocated"] is not None and after["allocated"] is not None:
        measured += f", by the allocator {number((before['allocated'] - after['allocated']) / MIB)}"
    return Ruling(
        5396,
        "memory that the layer keeps for backward",
        f"{case.tokens:,} tokens",
        f"{number(want / MIB)} MiB less: no normalised q and k, but factors of {layer.value_heads} heads for {layer.heads}",
        measured,
        RIGHT if less >= want else WRONG,
        again,
    )


# Times


def timed(bench: Bench, lengths: tuple[int, ...], cp: int = 1) -> ParallelCase:
    """The timed case: a batch of one sequence, or with `cp` ranks packed sequences."""
    widths = dataclasses.asdict(bench.extent.layer)
    return ParallelCase(lengths, cp=cp, packed=cp > 1, dtype=bench.extent.dtype, **widths)


def timed_line(bench: Bench, version: str, adapter: str, case: ParallelCase, ranks: int = 0) -> str:
    """The line of a timed case in a release."""
    return bench.line(version, adapter, f"law=parallel {case}", ranks=ranks)


def faster(
    bench: Bench,
    claim: int,
    what: str,
    case: ParallelCase,
    versions: Sequence[str],
    claimed: Mapping[str, tuple[str, float]],
    lacking: str = "",
    ranks: int = 0,
) -> Iterator[Ruling]:
    """The rows of a layer's times in two releases, forward and backward. `claimed` has the words and the least gain of each.

    `lacking` says why the gain cannot be compared with the claimed one.
    """
    count = len(case.lengths)
    size = f"{case.tokens:,} tokens" + (f" in {count} sequence{'s' * (count > 1)}" if case.packed else "")
    bench.tell(f"{claim}: {what}, {size}")
    lines = of_each(versions, lambda version: timed_line(bench, version, LAYER, case, ranks))
    times = alternating(bench, lines, ranks)
    for way, took in times.items():
        text, least = claimed[way]
        before, after = (took[version] for version in versions)
        one, other, ratio = Spread.of(before), Spread.of(after), ratios(before, after)
        why = lacking if bench.cuda else ON_A_CPU
        yield Ruling(
            claim,
            f"{what}, {way}",
            size,
            text,
            "; ".join(filter(None, [gain(one, other, ratio), why])),
            UNDECIDED if why else verdict_on(ratio, least),
            bench.again(claim),
            one,
            other,
            ratio,
            lacking=bool(why),
        )


def alternating(bench: Bench, lines: Mapping[str, str], ranks: int = 0) -> dict[str, dict[str, list[float]]]:
    """The milliseconds of each release's line, forward and backward, in rounds. Releases take turns, each second round reversed."""
    result: dict[str, dict[str, list[float]]] = {way: {version: [] for version in lines} for way in ("forward", "backward")}

    def ask(version: str, calls: int) -> Data:
        return bench.releases.ask(version, "time", ranks=ranks, line=lines[version], calls=calls)

    effort = bench.effort
    warm = [ask(version, max(1, effort.warm)) for version in lines]
    rounds = effort.rounds(sum(max(reply["ahead"]) + max(reply["back"]) for reply in warm))
    for turn in range(rounds):
        for version in lines if turn % 2 == 0 else reversed([*lines]):
            reply = ask(version, 1)
            result["forward"][version] += reply["ahead"]
            result["backward"][version] += reply["back"]
    return result


Part = Callable[[Bench], Iterator[Ruling]]
PULL_REQUESTS: dict[int, tuple[Part, ...]] = {
    1989: (layer, layer_on_gpus, flops),
    3040: (refined, refined_packs, refined_times),
    4913: (exchanged, exchanged_layers, exchanged_over_ranks),
    5396: (in_kernel, in_kernel_over_ranks, kept),
}


def attempted(claim: int, bench: Bench) -> Iterator[Ruling]:
    """The rows of a pull request. If a process cannot answer, the last row of that part has the reason."""
    for part in PULL_REQUESTS[claim]:
        try:
            yield from part(bench)
        except Unanswered as error:
            bench.tell(f"{claim}: {error}")
            yield Ruling(claim, f"{part.__name__.replace('_', ' ')}: what follows", measured=str(error), repeat=bench.again(claim))
