"""Judges one case: runs the comparisons of its law, and turns what failed into the outcome of the case."""

import collections
import contextlib
import contextvars
import os
import pathlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from properties.laws.law import Blind, Breach, Law
from properties.words.example import Example
from verify.adapters.interface import Lacking, Unavailable, Unsupported
from verify.adapters.loader import AnyAdapter, load
from verify.bench.faults import AdapterFault, NoRoom, OutOfMemory, no_memory, short
from verify.execution.judge import NOTHING, LayOut, Where, judge
from verify.gpu import autotune, policies, warmup
from verify.gpu import device as devices
from verify.interpreter import UnknownTriton
from verify.process.outcome import FailureKind, Finding, Outcome, Used, Verdict
from verify.process.stacks import unmarked
from verify.ranks.collectives import Abandoned, Mismatch

T = TypeVar("T")
_LOADED: dict[str, AnyAdapter] = {}
_denied: contextvars.ContextVar[tuple[policies.Denied, ...]] = contextvars.ContextVar("denied", default=())


def adapter_of(spec: str) -> AnyAdapter:
    """The adapter of a name. Each process creates it once."""
    if spec not in _LOADED:
        _LOADED[spec] = load(spec)
    return _LOADED[spec]


def loaded() -> list[AnyAdapter]:
    """The adapters that this process has created."""
    return list(_LOADED.values())


@contextlib.contextmanager
def following(tune: str) -> Iterator[Used]:
    """Make autotuned kernels follow the policy `tune`. Yields the configurations that ran, which fills up meanwhile."""
    if not tune:
        yield {}
        return
    autotune.install()
    warmup.take_turns()
    with autotune.using(policies.Policy.parse(tune), _denied.get()) as used:
        yield used


@contextlib.contextmanager
def denying(entries: Iterable[object]) -> Iterator[None]:
    """Make every policy that is followed inside deny the entries of a deny-list, given as plain data."""
    token = _denied.set(tuple(map(policies.Denied.from_json, entries)))
    try:
        yield
    finally:
        _denied.reset(token)


def on_device(device: str, pairs: Iterator[T]) -> Iterator[T]:
    """Iterate over `pairs` with `device` as torch's default device, for tensors that a law creates without naming a device."""
    while True:
        with devices.default(device):
            try:
                pair = next(pairs)
            except StopIteration:
                return
        yield pair


def faulted(error: BaseException) -> Outcome:
    """The outcome of a run in which gdn-verify itself failed: UNKNOWN, with the innermost frame of our own code."""
    name, place = type(error).__name__, ""
    for frame in traceback.extract_tb(error.__traceback__):
        folder, file = os.path.split(os.path.relpath(frame.filename, _ROOT))
        if folder.split(os.sep)[0] in ("oracles", "properties", "verify"):
            place = f" at {folder}/{file}:{frame.lineno} in {unmarked(frame.name)}"
    return Outcome(Verdict.UNKNOWN, reason=f"gdn-verify failed: {name}: {short(error)}", fault=f"{name}{place}")


# As Python names the files of frames: a checkout may be reached by a link.
_ROOT = str(pathlib.Path(os.path.abspath(__file__)).parents[2])


def judged(
    law: Law,
    bench: Any,
    example: Example,
    where: Where,
    lay_out: LayOut,
    need: int,
    excused: Mapping[str, float] = NOTHING,
    *,
    patient: bool = False,
) -> Outcome:
    """The outcome of a law's comparisons and of what else the bench found. `need` is the size of the case's tensors, in bytes.

    Abandoned passes through: the outcome of the rank that raised counts. If `patient`, NoRoom is raised where memory ran out on a
    crowded GPU. Otherwise such a case is UNKNOWN.
    """
    outcome, before = Outcome(Verdict.HOLDS), _one_by_one()
    try:
        result = judge(on_device(bench.law_device, law.check(bench, example)), where, excused, lay_out)
        outcome.findings, outcome.rows, outcome.ratios = result.findings, result.rows, result.ratios
        outcome.kept = dict(bench.kept)
        if result.boundless:
            names = ", ".join(result.boundless)
            outcome.verdict, outcome.reason = Verdict.BLIND, f"rounding errors of {names} may grow beyond every number here"
    except Abandoned:
        raise  # the outcome of another rank counts
    except AdapterFault as fault:
        outcome.findings = [fault.finding]
    except Mismatch as error:  # raised in a collective of the bench, because a rank had left out a collective in the call
        outcome.findings = [Finding("call", FailureKind.RANKS_PART, f"parts from the other ranks: {error}")]
    except Breach as breach:
        outcome.findings = [Finding("call", FailureKind.BREACH, str(breach), detail=breach.way)]
    except Blind as blind:
        outcome.verdict, outcome.reason = Verdict.BLIND, str(blind)
    except Lacking as error:
        outcome.verdict, outcome.reason = Verdict.UNSUPPORTED, str(error)
    except (UnknownTriton, Unavailable) as error:
        outcome.verdict, outcome.reason = Verdict.UNKNOWN, str(error)
    except Unsupported as error:
        outcome.verdict, outcome.reason = Verdict.UNSUPPORTED, f"the implementation refuses it: {error}"
    except OutOfMemory as error:
        if patient and devices.crowded(bench.device):
            raise NoRoom from None
        free = devices.free_bytes(bench.device)
        if need < free / 16 and not devices.crowded(bench.device):
            what = f"ran out of memory, with {free >> 20} MiB free for a case of {need >> 20} MiB"
            outcome.findings = [Finding("call", FailureKind.OUT_OF_MEMORY, what)]
        else:
            outcome.verdict, outcome.reason = Verdict.UNKNOWN, f"out of memory: {error}"
    except Exception as error:  # the law, the oracle or the judge failed, so the adapter gets no verdict
        if patient and no_memory(error) and devices.crowded(bench.device):
            raise NoRoom from None
        outcome = faulted(error)
    outcome.findings = outcome.findings + bench.impure
    if outcome.findings:
        outcome.verdict = Verdict.BROKEN
    outcome.one_by_one = dict(_one_by_one() - before)
    outcome.kernel_s, outcome.oracle_s, outcome.spent = bench.kernel_s, bench.oracle_s, bool(bench.lost)
    return outcome


def _one_by_one() -> collections.Counter[str]:
    """The launches in this process, so far, whose programs could not be interpreted together."""
    launch = sys.modules.get("verify.interpreter.launch")  # imported only where kernels are interpreted
    return collections.Counter(launch.one_by_one) if launch else collections.Counter()
