"""Mutation of real kernel source: make every single edit of an adapter's Triton kernels, and find which law sees each.

    gdn-verify zoo --mutate fla/chunk --sample 60

Some forward and backward calls show which kernels are launched and which of their statements run. Only these kernels are edited
(verify/zoo/edits.py). The cases are those that `check` draws, law by law; verify/zoo/mutants.py runs them on the mutants.
"""

import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from properties.books import book_of
from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.example import Example
from properties.words.sizes import MOST, sized
from verify.adapters.base import Adapter
from verify.adapters.loader import versions
from verify.adapters.packages import installed
from verify.adapters.registry import AdapterError
from verify.bench import memo
from verify.engine.drawing import of_law, seeded
from verify.engine.profiles import PROFILES, Profile
from verify.execution.execute import execute
from verify.execution.judging import adapter_of
from verify.execution.line import Run
from verify.findings import known as known_defects
from verify.findings.text_table import text_table
from verify.zoo.edits import OPERATORS, edits
from verify.zoo.launch_edits import Watch, watch
from verify.zoo.mutants import Mutant, MutantFate, MutantHunt

ARGUED = pathlib.Path(__file__).with_name("equivalent.json")
# Cases of rules that together take every branch that depends on the call.
WIDE = (
    "lengths=130 heads=2 value_heads=4 key_dim=24 value_dim=40 gate=64 state=random qk_norm=yes in_kernel=both",
    "lengths=66+0+17+128 packed=yes key_dim=100 value_dim=100 dtype=bf16 gate=64 state=random in_kernel=gate dt_bias=no",
    "lengths=66 key_dim=160 value_dim=160 dtype=fp16 gate=64 state=random in_kernel=beta",
    "lengths=66+66 key_dim=256 value_dim=16 gate=64 gate_dtype=input state=random",
)
DRAWN = 8  # further cases, drawn from the first law of the book
MEMO = 256  # oracle results that are kept in memory, so that the cases that are run together do not compute them again
COLUMNS = ("made", "uncovered", "asked", "killed", "argued", "survived", "undecided")


def discovered(spec: str, adapter: Adapter, seen: Watch) -> list[Mutant]:
    """Every mutant of the kernels that the adapter launches in some calls. `seen` records the statements that these calls execute.

    AdapterError if the adapter launches no Triton kernel.
    """
    seen.executed.clear()
    for run in _wide(spec, adapter.domain):
        with seen.watching():
            execute(run)
    kernels = [seen.kernels[key] for key in {place[0] for place in seen.executed}]
    if not kernels:
        raise AdapterError(f"adapter {spec} launches no kernel in Triton's language")
    pairs = [
        (kernel, edit) for kernel in sorted(kernels, key=lambda entry: (entry.file, entry.first)) for edit in edits(kernel.source)
    ]
    return [Mutant(number, kernel, edit) for number, (kernel, edit) in enumerate(pairs)]


def _wide(spec: str, domain: Any) -> Iterator[Run]:
    book = book_of(domain)
    first, *_ = book.about(domain.operation)
    if isinstance(domain, Domain):
        for line in WIDE:
            case = dataclasses.replace(Case.parse(line), operation=domain.operation, backward=domain.backward)
            if domain.outside(case):
                case = dataclasses.replace(case, in_kernel="none", dt_bias=True)
            if domain.outside(case) is None:
                yield Run(first, spec, Example(case))
    drawn: list[Example] = []
    seeded(book.laws[first].draw(domain), 0, DRAWN, drawn.append)
    yield from (Run(first, spec, example) for example in drawn)


def sampled(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of the mutants in their order, drawn so that each kernel and operator has the same share as among all."""
    if count >= len(mutants):
        return list(mutants)
    chance = random.Random(seed)  # noqa: S311 - no secret
    strata: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        strata.setdefault((mutant.kernel.key, mutant.edit.operator), []).append(mutant)
    ordered = [mutant for _, stratum in sorted(strata.items()) for mutant in chance.sample(stratum, len(stratum))]
    step = len(ordered) / count
    start = chance.random() * step
    return sorted((ordered[int(start + turn * step)] for turn in range(count)), key=lambda mutant: mutant.number)


def runs_by_law(spec: str, domain: Any, profile: Profile, seed: int = 0) -> list[Run]:
    """The runs of a check with a profile, law by law. The first law's cases are sorted by their work, the least first."""
    runs: list[Run] = []
    book = book_of(domain)
    for name in book.about(domain.operation):
        law = book.laws[name]
        if law.needs(domain) is None:
            drawn: list[Example] = []
            of_law(law, domain, seed, profile.examples_of(law), drawn.append)
            if not runs:
                drawn.sort(key=lambda example: _work(example.case))
            runs += [Run(name, spec, example) for example in drawn]
    return runs


def _work(case: Any) -> int:
    """An estimate of a case's work: for a rule, chunks times value heads times blocks of the state; otherwise its bytes."""
    if not isinstance(case, Case):
        return int(case.bytes)
    chunks = sum(max(1, -(-length // 64)) for length in case.lengths)
    return chunks * case.value_heads * -(-case.key_dim // 64) * -(-case.value_dim // 64)


def argue(fates: Sequence[MutantFate], adapter: str, file: pathlib.Path = ARGUED) -> None:
    """Fill in the arguments on file that an edit is no defect. A law that kills it refutes one.

    An argument holds for the versions that its group lists and, if the group lists `adapters`, only where one of these is mutated.
    """
    known: dict[tuple[str, ...], tuple[str, str]] = {}
    for group in json.loads(file.read_text(encoding="utf-8")):
        listed = all(installed(name) in versions for name, versions in group["versions"].items())
        if listed and adapter in group.get("adapters", [adapter]):
            known |= {tuple(edit): (group["class"], group["reason"]) for edit in group["edits"]}
    for fate in fates:
        fate.argued, fate.reason = known.get((fate.mutant.kernel.name, *fate.mutant.changed), ("", ""))


def _column(fate: MutantFate) -> str:
    return "argued" if fate.state == "survived" and fate.argued else fate.state


def table(fates: Sequence[MutantFate], all_mutants: Sequence[Mutant], uncovered: Sequence[Mutant]) -> str:
    """A table of the mutants' fates, by kernel and by operator."""
    lines: list[str] = []
    kernels = list(dict.fromkeys(mutant.kernel.name for mutant in all_mutants))
    for title, names, name_of in (
        ("kernel", kernels, lambda mutant: mutant.kernel.name),
        ("operator", list(OPERATORS), lambda mutant: mutant.edit.operator),
    ):
        counts = {name: collections.Counter[str]() for name in names}
        for what, mutants in (("made", all_mutants), ("uncovered", uncovered)):
            for mutant in mutants:
                counts[name_of(mutant)][what] += 1
        for fate in fates:
            counts[name_of(fate.mutant)].update({"asked": 1, _column(fate): 1})
        rows = [(name, *(str(counts[name][column] or "-") for column in COLUMNS)) for name in names]
        lines += [*text_table((title, *COLUMNS), rows, right=range(1, len(COLUMNS) + 1)), ""]
    return "\n".join(lines)


def summary(fates: Sequence[MutantFate]) -> str:
    """Lines that tell how many mutants were killed, by which laws, and after how many cases."""
    killed = [fate for fate in fates if fate.state == "killed"]
    argued = [fate for fate in fates if _column(fate) == "argued"]
    real = [fate for fate in fates if _column(fate) in ("killed", "survived", "undecided")]
    lines = []
    if killed:
        for title, counts in (
            ("killed by", collections.Counter(fate.law for fate in killed)),
            ("seen as", collections.Counter(fate.how for fate in killed)),
        ):
            lines.append(f"{title:<10} " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))
        cases, seconds = sorted(fate.cases for fate in killed), [fate.seconds for fate in killed]
        soon = f"median case {statistics.median(cases):g}, {statistics.median(seconds):.1f} s into a check on one worker"
        lines.append(f"killed at  {soon}; 9 of 10 by case {cases[(9 * len(cases) - 1) // 10]}, the last at case {cases[-1]}")
    share = f" ({len(killed) / len(real):.1%})" if real else ""
    quiet = [fate for fate in real if not fate.how.startswith(("crashed", "hung", "raised"))]
    seen = sum(fate.state == "killed" for fate in quiet)
    classes = collections.Counter(fate.argued for fate in argued)
    why = f": {', '.join(f'{name} {count}' for name, count in classes.most_common())}" if argued else ""
    kills = f"{len(killed)} of {len(real)} mutants killed{share}"
    lines.append(f"{kills}, and {len(argued)} survivors with an argument that they are no defects{why}")
    lines.append(f"without those that crash, hang or raise, {seen} of {len(quiet)}")
    return "\n".join(lines)


def description(fate: MutantFate) -> str:
    """The lines of a mutant that a person should look at: a survivor, an undecided one, or a kill that refutes an argument."""
    lines = [f"{'REFUTED' if fate.state == 'killed' else fate.state.upper():<12}{fate.mutant.id}  {fate.mutant.edit.operator}"]
    lines += [f"  {line}" for line in fate.mutant.diff.split("\n")]
    if fate.state == "undecided":
        lines += [f"  {line}" for line in fate.how.splitlines()[-1:]]
    else:
        unknown = f", {fate.unknown} not judged" if fate.unknown else ""
        lines.append(f"  {fate.ran} cases run it, {fate.differed} of them with other bits{unknown}")
    if fate.argued:
        lines.append(f"  argued: {fate.argued}: {fate.reason}")
    if fate.state == "killed":
        lines.append(f"  {fate.how}: {fate.run}")
    return "\n".join(lines)


def left_out(lines: Sequence[str]) -> list[str]:
    """Lines about runs that do not hold on the unedited kernels: how many each known defect explains, and each other run."""
    defects, explained = known_defects.load(), collections.Counter[str]()
    report = []
    for line in lines:
        known = defects.explain_any(Run.parse(line))
        if known is None:
            report.append(f"left out, because the unchanged kernels break it: {line}")
        else:
            explained[known.reason] += 1
    return report + [f"left out, {count} cases of a known defect: {reason}" for reason, count in explained.items()]


def mutate(
    spec: str,
    *,
    sample: int | None = None,
    seed: int = 0,
    ids: Sequence[str] = (),
    grep: str | None = None,
    profile: Profile = PROFILES["quick"],
    workers: int = 2,
    deadline_s: float = 30.0,
    json_to: str | None = None,
    listing: bool = False,
) -> int:
    """Mutate an adapter's kernels, run the laws on the mutants, and print the results.

    By default all mutants are tried whose statement some call runs; or those in `ids`, or those whose list line matches the regular
    expression `grep`. Of these, `sample` are drawn with `seed`. `listing` only prints the mutants. From here on this process
    interprets Triton kernels. AdapterError or ValueError if the adapter or an option is not usable.

    Returns 0 if every mutant is killed or argued to be no defect, 1 if not, 3 if the file `json_to` could not be written, 130 if
    interrupted.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # kernels are interpreted on the CPU
    from verify import interpreter

    start = time.monotonic()
    torch.set_num_threads(1)  # a forked child process has only one thread
    interpreter.install()
    memo.MEMO.most = MEMO
    adapter = adapter_of(spec)
    if not isinstance(adapter, Adapter):
        raise AdapterError(f"adapter {spec} is a path that ranks share, but mutants are made of kernels on one process")
    if adapter.counterpart:
        adapter_of(adapter.counterpart)
    if json_to:
        _write(json_to, "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the kernels do not matter here
        seen = watch()
        mutants = discovered(spec, adapter, seen)
        uncovered = [mutant for mutant in mutants if mutant.place not in seen.executed]
        if listing:
            for mutant in mutants:
                _print(f"{mutant.id} {mutant}" + ("" if mutant.place in seen.executed else "  (no call runs it)"))
            return 0
        covered = [mutant for mutant in mutants if mutant.place in seen.executed]
        chosen = _chosen(mutants, ids) if ids else [mutant for mutant in covered if grep is None or re.search(grep, str(mutant))]
        if not chosen:
            raise ValueError(f"grep must match what --list prints of a mutant, got {grep!r}")
        chosen = chosen if sample is None else sampled(chosen, sample, seed)
        most = MOST["interpreted"] if profile.large else 0  # tokens of the longest sequence, as in a check of interpreted kernels
        domain = sized(adapter.domain, adapter.chunk, most, adapter.algorithm)
        runs = runs_by_law(spec, domain, profile)
        _print(f"{spec}  {versions(adapter)}  profile {profile.name}, {len(runs)} cases")
        kernels = len({mutant.kernel.key for mutant in mutants})
        _print(
            f"{len(mutants)} mutants of {kernels} kernels, {len(uncovered)} of them in code that no case runs; "
            f"{len(chosen)} are checked"
        )
        fates = [MutantFate(mutant) for mutant in chosen]
        hunt, interrupted = MutantHunt(seen, runs, workers, deadline_s, _progress()), False
        try:
            hunt(fates)
        except KeyboardInterrupt:
            interrupted = True
    argue(fates, spec)
    _print(f"\n{table(fates, mutants, uncovered)}")
    for fate in fates:
        if fate.state in ("survived", "undecided") or (fate.state == "killed" and fate.argued):
            _print(description(fate))
    for line in left_out(hunt.left_out):
        _print(line)
    _print(f"{'interrupted: ' if interrupted else ''}{summary(fates)}; {time.monotonic() - start:.0f} s")
    written = True
    if json_to:
        data = [fate.to_json() for fate in (*fates, *(MutantFate(mutant, "uncovered") for mutant in uncovered))]
        try:
            _write(json_to, "".join(json.dumps(entry) + "\n" for entry in data))
        except ValueError as error:
            written = False
            sys.stderr.write(f"gdn-verify: {error}\n")
    if interrupted:
        return 130
    survived = any(_column(fate) not in ("killed", "argued") or (fate.state == "killed" and fate.argued) for fate in fates)
    return 1 if survived else 0 if written else 3


def _chosen(mutants: Sequence[Mutant], ids: Sequence[str]) -> list[Mutant]:
    known = {mutant.id: mutant for mutant in mutants}
    for mutant_id in ids:
        if mutant_id not in known:
            raise ValueError(
                f"id must be one that --list prints for the installed source, such as {next(iter(known))}, got {mutant_id!r}"
            )
    return [known[key] for key in dict.fromkeys(ids)]


def _write(place: str, text: str) -> None:
    try:
        pathlib.Path(place).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--json must name a file that can be written, got {place!r}: {error.strerror}") from None


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _progress() -> Callable[[str], None]:
    """A function that prints a line on stderr, at most every ten seconds."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            sys.stderr.write(line + "\n")

    return say
