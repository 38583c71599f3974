"""Judges calls that `verify.watch` has written, whole or in parts, from their stored results or by calling an adapter again.

A line such as `watched=DIR/vjp-0123456789abcdef sequence=1 head=2 tokens=65` names a part of a call: one sequence, one key head
with its value heads, and the first tokens. Sequences and heads share nothing and later tokens change no earlier output, so the
stored results of the part are right if those of the call are.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from oracles.operation import NAMES, Inputs, Operation, gradient_name, sequences
from oracles.operations import OPERATIONS, RULES
from oracles.rule.gated_delta import rule_of
from oracles.tolerance.bound import bounds
from properties.laws.law import Pair
from properties.words.line import split_line
from verify.adapters.base import Adapter
from verify.adapters.files_adapter import QUESTION, manifest_of
from verify.adapters.registry import AdapterError
from verify.adapters.tensor_files import ENDING, MANIFEST, WrongFile, one_line, read
from verify.adapters.tensor_files import NAMES as DTYPES_IN_FILES
from verify.adapters.watch_files import ANSWERS_IN
from verify.bench.answer import outputs_of
from verify.bench.faults import AdapterFault
from verify.bench.places import WORDS, indices
from verify.execution.judge import judge
from verify.execution.judging import adapter_of, faulted
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

WORD = "watched="
NUMBERS = ("scale", "eps", "qk_norm_eps", "lower_bound")  # options that are no flags
PLACES = {**WORDS, "B": "row", "T": "token"}
OPTIONAL = ("g", "alpha", "a", "A_log", "dt_bias", "beta", "b", "gk", "gv", "state", "cu_seqlens", "scale", "allow_neg_eigval")


@dataclasses.dataclass(frozen=True)
class WatchedLine:
    """A part of a watched call: one sequence, one key head, the first `tokens`, or all where that is None.

    With `adapter`, the results are those of a new call of this adapter, and not those in the file.
    """

    path: str
    sequence: int | None = None
    head: int | None = None
    tokens: int | None = None
    adapter: str = ""

    @classmethod
    def parse(cls, line: str) -> Self:
        """The part that a line names. ValueError if it names none."""
        words = split_line(line)
        path, adapter = words.pop("watched", ""), words.pop("adapter", "")
        if not QUESTION.fullmatch(os.path.basename(path)):
            raise ValueError(f"watched must name a call, such as DIR/call-0123456789abcdef, got {path!r}")
        for name, value in words.items():
            if name not in ("sequence", "head", "tokens") or not value.isdecimal():
                raise ValueError(f"sequence, head and tokens must be whole numbers from 0 up, got {name}={value}")
        return cls(path, **{name: int(value) for name, value in words.items()}, adapter=adapter)

    def __str__(self) -> str:
        words = ((name, getattr(self, name)) for name in ("sequence", "head", "tokens"))
        text = [f"{WORD}{self.path}", *(f"{name}={value}" for name, value in words if value is not None)]
        return " ".join([*text, *([f"adapter={self.adapter}"] if self.adapter else [])])


@dataclasses.dataclass(frozen=True)
class WatchedCall:
    """A call, or a part of one, in our terms."""

    spec: Operation
    x: Inputs
    cotangents: dict[str, Tensor]
    results: dict[str, Tensor]
    declares: Mapping[str, Any]

    def part(self, line: WatchedLine) -> "WatchedCall":
        """The part that a line names. ValueError if the call does not have it."""
        found = self
        for axes, number in (("sequence", line.sequence), ("head", line.head), ("tokens", line.tokens)):
            if number is not None:
                found = getattr(found, f"_{axes}")(number)
        return found

    @property
    def divides(self) -> bool:
        """Whether every result is a head's own. The gradient of a parameter that heads share, as a norm's weight, is none's."""
        ports = (*self.spec.outputs, *self.spec.gradients())
        return all({"H", "HV"} & {*port.axes.split()} for port in ports if port.name in self.results)

    @property
    def heads(self) -> int:
        """The number of key heads, or 0 if the operation has none that a call can be cut along."""
        return self._size("H") or self._size("HV")

    def _sequence(self, number: int) -> "WatchedCall":
        lengths = sequences(self.x, self.spec.inputs[0].name)
        if number >= len(lengths):
            raise ValueError(f"sequence must be below {len(lengths)}, got {number}")
        packed, begin = self.x.get("cu_seqlens") is not None, sum(lengths[:number])

        def cut(axes: list[str], x: Tensor) -> Tensor | None:
            if axes[:2] == ["B", "T"]:
                return x[:, begin : begin + lengths[number]] if packed else x[number : number + 1]
            return x[number : number + 1] if axes[0] == "N" else None

        offsets = {"cu_seqlens": self.x.cu_seqlens.new_tensor([0, lengths[number]])} if packed else {}
        return self._cut(cut, **offsets)

    def _head(self, number: int) -> "WatchedCall":
        if number >= self.heads:
            raise ValueError(f"head must be below {self.heads}, got {number}")
        each = {axis: self._size(axis) // self.heads for axis in ("H", "HV")}

        def cut(axes: list[str], x: Tensor) -> Tensor | None:
            axis = next((axis for axis in each if axis in axes), None)
            return None if axis is None else x.narrow(axes.index(axis), number * each[axis], each[axis])

        return self._cut(cut)

    def _tokens(self, count: int) -> "WatchedCall":
        lengths = sequences(self.x, self.spec.inputs[0].name)
        if len(lengths) != 1 or not 1 <= count <= lengths[0]:
            raise ValueError(f"tokens must be in 1..{lengths[0]} of one sequence, got {count} of {len(lengths)}")
        offsets = {"cu_seqlens": self.x.cu_seqlens.new_tensor([0, count])} if self.x.get("cu_seqlens") is not None else {}
        found = self._cut(lambda axes, x: x[:, :count] if axes[:2] == ["B", "T"] else None, **offsets)
        outputs = {port.name for port in self.spec.outputs}  # gradients depend on later tokens
        return dataclasses.replace(found, cotangents={}, results={name: x for name, x in found.results.items() if name in outputs})

    def _cut(self, cut: Any, **more: Tensor) -> "WatchedCall":
        """The parts of all tensors. Of those that are of the whole call, inputs stay, and results are left out."""
        axes = {port.name: port.axes.split() for port in (*self.spec.inputs, *self.spec.outputs, *self.spec.gradients())}
        values = {name: x for name, x in self.x.items() if name in axes and isinstance(x, Tensor)}
        cuts = {name: found for name, x in values.items() if (found := cut(axes[name], x)) is not None}
        cotangents = {name: found for name, x in self.cotangents.items() if (found := cut(axes[name], x)) is not None}
        results = {name: found for name, x in self.results.items() if (found := cut(axes[name], x)) is not None}
        return WatchedCall(self.spec, self.x.replaced(**cuts, **more), cotangents, results, self.declares)

    def _size(self, axis: str) -> int:
        tensors = ((port.axes.split(), self.x.get(port.name)) for port in self.spec.inputs)
        return next((x.shape[axes.index(axis)] for axes, x in tensors if x is not None and axis in axes), 0)


def watched_in(folder: str) -> list[str]:
    """The calls in a folder, or in its subfolders, each as DIR/NAME. AdapterError if a manifest cannot be used."""
    folders = [folder, *(os.path.join(folder, name) for name in sorted(os.listdir(folder)))]
    found = [place for place in folders if os.path.lexists(os.path.join(place, MANIFEST))]
    return [os.path.join(place, name) for place in found for name in _manifest(place)["questions"]]


def is_watched(folder: str) -> bool:
    """Whether a folder has what `watch` has written."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    places = (os.path.join(folder, name) for name in ("", *names))
    return any(_has_report(place) for place in places if os.path.lexists(os.path.join(place, MANIFEST)))


def _has_report(folder: str) -> bool:
    try:
        return "watch" in manifest_of(folder)
    except AdapterError:
        return False


def _manifest(folder: str) -> dict[str, Any]:
    manifest = manifest_of(folder)
    if not isinstance(manifest.get("watch"), dict):
        raise AdapterError(f"{os.path.join(folder, MANIFEST)} is none that verify.watch has written")
    return manifest


def read_call(path: str) -> WatchedCall:
    """The call DIR/NAME. ValueError, WrongFile or FileNotFoundError says what is wrong with its files."""
    folder, name = os.path.split(path)
    manifest = _manifest(folder)
    about = manifest["questions"].get(name)
    operation = manifest["domain"].get("operation")
    if not isinstance(about, dict) or operation not in OPERATIONS:
        raise ValueError(f"{MANIFEST} has no call {name} of a known operation")
    question = read(os.path.join(folder, name + ENDING), _must(about, "inputs"))
    results = read(os.path.join(folder, ANSWERS_IN, name + ENDING), _must(about, "outputs"))
    options = about.get("options")
    values: dict[str, Any] = {key: _option(key, text) for key, text in options.items()} if isinstance(options, dict) else {}
    cotangents = {name: question.pop(f"d{name}") for name in results if f"d{name}" in question}
    spec = OPERATIONS[operation]
    if operation in RULES:
        defaults = {"qk_norm": False} | ({"allow_neg_eigval": False} if "b" in question else {})
        values = {**dict.fromkeys(OPTIONAL), **defaults, **values, "output_final_state": "final_state" in results}
        spec = _rule(operation, question, results)
    x = Inputs(**{**values, **question})
    spec.check(x)
    said = {name: about[name] for name in ("chunk", "products") if name in about}
    return WatchedCall(spec, x, cotangents, results, {**manifest["declares"], **said})


def _rule(operation: str, question: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> Operation:
    inside = {"gate": "a" in question, "beta": "b" in question, "linear": "alpha" in question}
    without = ("gate",) * (operation != "delta_rule" and not {"a", "g", "alpha"} & question.keys())
    without += ("beta",) * (not {"b", "beta"} & question.keys())
    channels = tuple(name for name in ("gk", "gv") if name in question)
    initial, final = (
        NAMES.get(parts[name].dtype, "fp32") if name in parts else "fp32"
        for parts, name in ((question, "state"), (results, "final_state"))
    )
    return rule_of(operation, **inside, without=without, channels=channels, initial=initial, final=final)


def _must(about: Mapping[str, Any], part: str) -> dict[str, tuple[torch.dtype, list[int]]]:
    dtypes = {word: dtype for dtype, word in DTYPES_IN_FILES.items()}
    return {entry["name"]: (dtypes[entry["dtype"]], entry["shape"]) for entry in about[part]}


def _option(name: str, text: str) -> Any:
    return float(text) if name in NUMBERS else text == "1" if text in ("0", "1") else text


def judged(line: WatchedLine) -> Outcome:
    """The outcome of a part of a call. What cannot be judged is UNKNOWN."""
    try:
        call = read_call(line.path).part(line)
        if line.adapter:
            call = dataclasses.replace(call, results=_results(line.adapter, call))
        return _judged(call)
    except AdapterFault as fault:
        return Outcome(Verdict.BROKEN, [fault.finding])
    except FileNotFoundError as error:
        return Outcome(Verdict.UNKNOWN, reason=f"there is no {os.path.basename(str(error.filename))}")
    except (ValueError, KeyError, TypeError, WrongFile, AdapterError) as error:
        return Outcome(Verdict.UNKNOWN, reason=f"cannot be judged: {one_line(error)}")
    except Exception as error:  # whatever stands in the files
        return faulted(error)


def _judged(call: WatchedCall) -> Outcome:
    for name, x in call.x.items():
        if isinstance(x, Tensor) and (count := int(x.isnan().sum())):
            return Outcome(Verdict.UNKNOWN, reason=f"input {name} has {count} numbers that are NaN")
    algorithm, products, chunk = (call.declares.get(name) for name in ("algorithm", "products", "chunk"))
    gradients = {gradient_name(name) for name in call.x} & call.results.keys()
    allowed = bounds(call.spec, call.x, call.cotangents if gradients else None, str(algorithm), str(products), chunk)
    axes = {port.name: port.axes.split() for port in (*call.spec.outputs, *call.spec.gradients())}

    def where(pair: Pair, flat: int, shape: torch.Size) -> str:
        places = zip(axes[pair.port], indices(flat, shape), strict=False)
        return ", ".join(f"{PLACES.get(axis, axis)} {at}" for axis, at in places)

    pairs = [Pair(name, "", x, allowed[name]) for name, x in call.results.items()]
    found = judge(pairs, where)
    verdict = Verdict.BROKEN if found.findings else Verdict.HOLDS if found.rows else Verdict.BLIND
    return Outcome(verdict, found.findings, rows=found.rows, ratios=found.ratios)


def judged_by_heads(path: str) -> tuple[WatchedLine, Outcome]:
    """The outcome of a call, and the smallest part that is found broken.

    If every result is a head's own, the call is judged head by head until one is broken, and whole otherwise.
    """
    line = WatchedLine(path)
    try:
        call = read_call(path)
        heads = call.heads if call.divides else 1
    except Exception:
        return line, judged(line)
    whole = Outcome(Verdict.HOLDS)
    for head in range(heads) if heads > 1 else [None]:
        part = dataclasses.replace(line, head=head)
        outcome = judged(part)
        if outcome.verdict is not Verdict.HOLDS:
            return _smallest(part, outcome) if outcome.verdict is Verdict.BROKEN else (part, outcome)
        whole.rows += outcome.rows
        whole.ratios = {name: max(ratio, whole.ratios.get(name, 0.0)) for name, ratio in outcome.ratios.items()}
    return line, whole


def _smallest(line: WatchedLine, outcome: Outcome) -> tuple[WatchedLine, Outcome]:
    """The first of ever larger parts of a broken part that is broken too."""
    for smaller in _smaller(line, outcome.findings[0]):
        found = judged(smaller)
        if found.verdict is Verdict.BROKEN:
            return smaller, found
    return line, outcome


def _smaller(line: WatchedLine, finding: Finding) -> Iterator[WatchedLine]:
    """Parts of a part: the sequence of its first wrong row, up to that row's token or whole."""
    places = (text.rpartition(" ") for text in finding.first.split(", "))
    at = {word: int(number) for word, _, number in places if number.isdecimal()}
    call = read_call(line.path)
    lengths = sequences(call.x, call.spec.inputs[0].name)
    sequence, token = at.get("row", at.get("sequence")), at.get("token")
    if sequence is None:
        return
    if call.x.get("cu_seqlens") is not None and token is not None:
        while token >= lengths[sequence]:
            token, sequence = token - lengths[sequence], sequence + 1
    alone = dataclasses.replace(line, sequence=sequence if len(lengths) > 1 else None)
    if token is not None:
        yield dataclasses.replace(alone, tokens=token + 1)
    yield alone


def _results(spec: str, call: WatchedCall) -> dict[str, Tensor]:
    """What an adapter returns for a call: the outputs and gradients that the file has too."""
    adapter = adapter_of(spec)
    if not isinstance(adapter, Adapter):
        raise AdapterError(f"{spec} is no adapter of one call")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gradients = {name: gradient_name(name) for name in call.x if gradient_name(name) in call.results}
    tensors = {name: x.to(device).contiguous() for name, x in call.x.items() if isinstance(x, Tensor)}
    x = call.x.replaced(**{name: x.requires_grad_(name in gradients) for name, x in tensors.items()})
    try:
        answer = adapter.run(x)
    except Exception as error:
        name = type(error).__name__
        raise AdapterFault("call", FailureKind.RAISED, f"raised {name}: {one_line(error)}", detail=name) from error
    outputs = outputs_of(answer, call.spec, x, adapter.domain)
    given = [(outputs[name], cotangent.to(device).contiguous()) for name, cotangent in call.cotangents.items()]
    wanting = [x[name] for name in gradients]
    found: Sequence[Tensor] = ()
    if gradients:
        ends, cotangents = zip(*given, strict=True)
        found = torch.autograd.grad(ends, wanting, cotangents)
    results = {name: outputs[name] for name in call.results if name in outputs}
    return {name: y.detach().cpu() for name, y in (results | dict(zip(gradients.values(), found, strict=True))).items()}
