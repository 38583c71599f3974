"""Runs: law, adapter, case and configuration as one line, and what one run came to."""

import collections
import contextlib
import copy
import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from oracles.line import split_line
from oracles.rounding import PRODUCTS
from properties.books import book_for, book_of
from properties.laws import Blind, Breach, Law
from properties.strategies import Example
from verify import device as devices
from verify import tuning
from verify.adapter import Adapter, PathAdapter, check_spec, load
from verify.bench import AdapterBench, AdapterFault, Compiling, OutOfMemory, Ready, short
from verify.comm import Abandoned
from verify.interpreter import UnknownTriton
from verify.judge import NOTHING, Where, judge, where
from verify.outcome import FailureKind, Finding, Outcome, Used, Verdict

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Run:
    """What `repeat` takes: a law asked of an adapter about an example, in a configuration."""

    law: str
    adapter: str
    example: Example
    products: str = "ieee"
    device: str = "cpu"
    tune: str = ""  # a Policy of verify/tuning.py; as kernels come without

    def __str__(self) -> str:
        example = self.example
        words = [f"law={self.law}"]
        words += [f"at={example.at}"] if example.at is not None else []
        words += [f"variant={example.variant}"] if example.variant else []
        words += [f"adapter={self.adapter}"]
        words += [f"products={self.products}"] if self.products != "ieee" else []
        words += [f"device={self.device}"] if self.device != "cpu" else []
        words += [f"tune={self.tune}"] if self.tune else []
        return " ".join([*words, str(example.case)])

    @classmethod
    def parse(cls, line: str) -> "Run":
        """The run of a line. ValueError or AdapterError names the word, its value and the choices."""
        words = split_line(line)
        for name in ("law", "adapter"):
            if name not in words:
                raise ValueError(f"a run line must say {name}=..., got {line!r}")
        name = words.pop("law")
        book = book_for(name, words.get("op"))
        adapter = words.pop("adapter")
        check_spec(adapter)
        products = words.pop("products", "ieee")
        if products not in PRODUCTS:
            raise ValueError(f"products must be one of {', '.join(PRODUCTS)}, got {products!r}")
        device = words.pop("device", "cpu")
        if device not in devices.DEVICES:
            raise ValueError(f"device must be one of {', '.join(devices.DEVICES)}, got {device!r}")
        tune = words.pop("tune", "")
        if tune:
            tuning.Policy.parse(tune)
        at = words.pop("at", None)
        if at is not None and not at.isdecimal():
            raise ValueError(f"at must be a whole number, got {at!r}")
        variant = words.pop("variant", None)
        case = book.case.parse(" ".join(f"{word}={value}" for word, value in words.items()))
        example = Example(case, None if at is None else int(at), variant)
        book.laws[name].accept(example)
        return cls(name, adapter, example, products, device, tune)

    @property
    def the_law(self) -> Law:
        """The law, as it is in the book of the run's case."""
        return book_of(self.example.case).laws[self.law]


_LOADED: dict[str, Adapter | PathAdapter] = {}


def adapter_of(spec: str) -> Adapter | PathAdapter:
    """The adapter, made once a process."""
    if spec not in _LOADED:
        _LOADED[spec] = load(spec)
    return _LOADED[spec]


def execute(
    run: Run,
    ready: Ready | None = None,
    excused: Mapping[str, float] = NOTHING,
    declared: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """The outcome of a run, here in this process: the adapter is called, its answers are judged, nothing is printed.

    `ready` has the inputs and bounds of a case that is asked about as it stands (verify/together.py); for `excused` see
    verify/judge.py. What is `declared` is judged by instead of what the adapter says of itself; it is called as it is.
    """
    adapter, law = adapter_of(run.adapter), run.the_law
    if book_of(adapter.domain) is not book_of(run.example.case):
        return Outcome(Verdict.UNSUPPORTED, reason=f"{run.adapter} is no implementation that law {run.law} is about")
    if isinstance(adapter, PathAdapter):
        from verify.parallel import execute_path

        return execute_path(run, adapter)
    counterpart, case = _counterpart(run, adapter), run.example.case
    reason = law.needs(adapter.domain) or adapter.domain.outside(case)
    if reason is None and counterpart is not None:
        reason = counterpart.domain.outside(case)
    if reason is not None:
        return Outcome(Verdict.UNSUPPORTED, reason=reason)
    if run.device == "cuda" and not devices.gpus():
        return Outcome(Verdict.UNKNOWN, reason="device=cuda needs a GPU, and torch sees none")
    bench = AdapterBench(adapter, counterpart, case, run.products, run.device)
    bench.ready = ready
    if declared:
        bench.says = copy.copy(adapter)
        bench.says.__dict__.update(declared)
    with following(run.tune) as used:
        outcome = judged(law, bench, run.example, functools.partial(where, case), case.bytes, excused)
    outcome.tuned = dict(used)
    if outcome.rows == 0 and outcome.verdict is Verdict.HOLDS:
        outcome.verdict, outcome.reason = Verdict.BLIND, "nothing to compare: the case has no rows"
    return outcome


def _counterpart(run: Run, adapter: Adapter) -> Adapter | None:
    """The one-token form of an adapter, where the law is about it."""
    counterpart = adapter_of(adapter.counterpart) if adapter.counterpart and run.law in ("recurrent", "cache") else None
    assert counterpart is None or isinstance(counterpart, Adapter)
    return counterpart


DENIED = "GDN_VERIFY_DENIED"  # in a worker's environment: the file of a deny-list


@contextlib.contextmanager
def following(tune: str) -> Iterator[Used]:
    """Autotuned kernels run with the configurations that `tune` says; those that did are gathered."""
    if not tune:
        yield {}
        return
    tuning.install()
    with tuning.using(tuning.Policy.parse(tune), _denied()) as used:
        yield used


@functools.cache
def _denied() -> tuple[tuning.Denied, ...]:
    return tuple(tuning.read_denied(os.environ[DENIED])) if os.environ.get(DENIED) else ()


def compiled(run: Run) -> None:
    """Launch every kernel that the run will, and look at nothing: what is compiled lies in a cache for all processes."""
    adapter, law, case = adapter_of(run.adapter), run.the_law, run.example.case
    assert isinstance(adapter, Adapter), run
    bench = Compiling(adapter, _counterpart(run, adapter), case, run.products, run.device)
    with contextlib.suppress(Exception), following(run.tune):  # whatever goes wrong, the check will meet it too
        collections.deque(_there(run.device, law.check(bench, run.example)), maxlen=0)


def _there(device: str, pairs: Iterator[T]) -> Iterator[T]:
    """The same, where what a law makes without saying where is made on the device."""
    while True:
        with devices.default(device):
            try:
                pair = next(pairs)
            except StopIteration:
                return
        yield pair


def faulted(error: BaseException) -> Outcome:
    """The outcome of a run in which gdn-verify itself failed: undecided, with the innermost of its own frames."""
    name, place = type(error).__name__, ""
    for frame in traceback.extract_tb(error.__traceback__):
        folder, file = os.path.split(os.path.relpath(frame.filename, _ROOT))
        if folder.split(os.sep)[0] in ("oracles", "properties", "verify"):
            place = f" at {folder}/{file}:{frame.lineno} in {frame.name}"
    return Outcome(Verdict.UNKNOWN, reason=f"gdn-verify failed: {name}: {short(error)}", fault=f"{name}{place}")


_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def judged(law: Law, bench: Any, example: Example, where: Where, need: int, excused: Mapping[str, float] = NOTHING) -> Outcome:
    """What a law's comparisons come to, and what the bench noticed besides; `need` are the bytes of the case's tensors."""
    outcome, before = Outcome(Verdict.HOLDS), _one_by_one()
    try:
        result = judge(_there(bench.law_device, law.check(bench, example)), where, excused)
        outcome.findings, outcome.rows, outcome.ratios = result.findings, result.rows, result.ratios
    except Abandoned:
        raise  # another rank's outcome counts
    except AdapterFault as fault:
        outcome.findings = [fault.finding]
    except Breach as breach:
        outcome.findings = [Finding("call", FailureKind.BREACH, str(breach), detail=str(breach).partition(":")[0])]
    except Blind as blind:
        outcome.verdict, outcome.reason = Verdict.BLIND, str(blind)
    except UnknownTriton as error:
        outcome.verdict, outcome.reason = Verdict.UNKNOWN, str(error)
    except OutOfMemory as error:
        free = devices.free_bytes(bench.device)
        if need < free / 16 and not devices.crowded(bench.device):
            what = f"ran out of memory, with {free >> 20} MiB free for a case of {need >> 20} MiB"
            outcome.findings = [Finding("call", FailureKind.OUT_OF_MEMORY, what)]
        else:
            outcome.verdict, outcome.reason = Verdict.UNKNOWN, f"out of memory: {error}"
    except Exception as error:  # the law, the oracle or the judge failed, which says nothing of the adapter
        outcome = faulted(error)
    outcome.findings = outcome.findings + bench.impure
    if outcome.findings:
        outcome.verdict = Verdict.BROKEN
    outcome.one_by_one = dict(_one_by_one() - before)
    outcome.kernel_s, outcome.oracle_s, outcome.spent = bench.kernel_s, bench.oracle_s, bool(bench.lost)
    return outcome


def _one_by_one() -> collections.Counter[str]:
    """The launches of this process so far whose programs could not be interpreted together."""
    launch = sys.modules.get("verify.interpreter.launch")  # where kernels are interpreted, and only there
    return collections.Counter(launch.one_by_one) if launch else collections.Counter()
