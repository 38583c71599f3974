"""Writes a script that repeats one call of a library with torch and that library alone, and prints where it is wrong.

The arguments of the function under test are seen by a profile hook. Each must be a tensor of the operation's call, perhaps with
axes swapped, or plain data. The reference in the script is compared with the oracle here; if there is none, the script has the
expected numbers of the worst row.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from oracles.operation import Inputs
from verify.adapters.base import Adapter
from verify.bench.adapter_bench import AdapterBench
from verify.bench.faults import AdapterFault, OutOfMemory
from verify.execution.judging import adapter_of, following
from verify.execution.line import Run
from verify.execution.references import REFERENCES
from verify.process.messages import Script
from verify.process.outcome import FailureKind, Finding
from verify.reach import recorder

SHORT = 64  # numbers of a tensor that is none of the operation's, such as offsets of chunks
AGREE = 1e-9  # of its norm: how near the reference in the script must be to the oracle
UNDECIDED = 0.01  # of its norm: what a row may be off by if the finding has no tolerance, since it is not finite
FORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    ".mT": lambda x: x.mT,
    ".transpose(1, 2)": lambda x: x.transpose(1, 2),
    ".squeeze(0)": lambda x: x.squeeze(0),
    ".unsqueeze(0)": lambda x: x.unsqueeze(0),
    ".flatten(0, 1)": lambda x: x.flatten(0, 1),
}  # of a tensor that an adapter passes on
INTERPRETED = """import os

os.environ["TRITON_INTERPRET"] = "1"  # there is no GPU: interpret the kernels, and time nothing
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, config, **kwargs: [1.0, 1.0, 1.0]
"""
CALL = """from typing import Any

import torch
from torch import Tensor
from {module} import {function}

device, inf, nan = "{device}", float("inf"), float("nan")
torch.manual_seed(0)
x = {{
{inputs}
}}
x = {{name: t.to(device) if isinstance(t, Tensor) else t for name, t in x.items()}}
{gradients}answer = {function}({arguments})
"""
GRADIENTS = "for name in {leaves}:\n    {of}[name].requires_grad_()\n"
WANTED = """

{reference}

exact = {{name: t.detach().double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in x.items()}}
{gradients}want = {last}(exact)
"""
BACKWARD = """
cotangents = {{
{cotangents}
}}
for outputs, inputs in {pairs}:
    names = [name for name in cotangents if outputs[name].requires_grad]
    torch.autograd.backward([outputs[name] for name in names], [cotangents[name].to(outputs[name]) for name in names])
    outputs |= {{"d" + name if name != "state" else "dh0": inputs[name].grad for name in {leaves}}}
"""
COMPARED = """
got, want = got["{port}"].detach().double().cpu(), {want}
row = {row}
allowed = {allowed}
got, want = got[row], want{want_row}
error = float((got - want).norm())
numbers = [[float(f"{{n:.6g}}") for n in t.reshape(-1)[:4].tolist()] for t in (got, want)]
print(f"{port}{{[*row]}}: got {{numbers[0]}}, expected {{numbers[1]}}")
print(f"error {{error:.4g}}, of which rounding explains {{allowed:.4g}}")
raise SystemExit(not error <= allowed)
"""
WORST = "tuple(map(int, torch.unravel_index(((got - want).{size}).nan_to_num(inf).argmax(), got{rows}.shape)))"


class NoScript(Exception):
    """The call cannot be written as a script. The message says why."""


class _Seen:
    """A profile hook that keeps the arguments and the result of the first call of a function."""

    def __init__(self, code: CodeType) -> None:
        self._code, self._frame = code, None
        self.arguments: dict[str, Any] = {}
        self.result: Any = None

    def see(self, frame: FrameType, event: str, value: Any) -> None:
        """Called at each event of the thread."""
        if frame.f_code is self._code and event == "call" and self._frame is None:
            self._frame, self.arguments = frame, dict(frame.f_locals)  # type: ignore[assignment]
        elif frame is self._frame and event == "return":
            self.result = value


def script(run: Run, finding: Finding, most: int) -> Script:
    """The script for a run of which `finding` is a finding about a single call.

    It has the numbers of the call if these are `most` at most; if `most` is 0, torch draws others.
    """
    adapter = adapter_of(run.adapter)
    if not isinstance(adapter, Adapter):
        return Script(reason="the call is spread over ranks, or over the steps of an engine")
    bench = AdapterBench(adapter, None, run.example.case, run.products, run.device)
    try:
        with following(run.tune):
            return _script(bench, finding, most)
    except (NoScript, OutOfMemory) as error:
        return Script(reason=str(error))


def _script(bench: AdapterBench, finding: Finding, most: int) -> Script:
    seeded = not most
    inputs, cotangents = bench.call(bench.case)
    spec, raised = bench.case.spec_of(inputs), finding.kind is FailureKind.RAISED
    place, function, seen, results, interpreted = _observed(bench, inputs, cotangents)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    backward = cotangents is not None and (raised or finding.port not in {port.name for port in spec.outputs})
    steps = cotangents if backward and cotangents else {}
    leaves = [name for name, x in tensors.items() if x.is_floating_point()] if backward else []
    if most and (numbers := sum(x.numel() for x in (*tensors.values(), *steps.values()))) > most:
        raise NoScript(f"the case has {numbers} numbers")
    write = _drawn if seeded else _written
    options = {name: x for name, x in inputs.items() if name not in tensors and x is not None and _plain(x)}
    text = INTERPRETED if interpreted else ""
    text += CALL.format(
        module=place,
        function=function.__name__,
        device=bench.device,
        inputs="\n".join(f'    "{name}": {text},' for name, text in _texts(tensors, write, options)),
        gradients=GRADIENTS.format(leaves=leaves, of="x") if backward else "",
        arguments=", ".join(_arguments(function, seen.arguments, tensors)),
    )
    if raised and seen.result is None:
        return Script(text, f"{place}.{function.__name__}")
    found = {
        name: _named(results[name], _leaves("answer", seen.result)) for name in results if name in {p.name for p in spec.outputs}
    }
    text += "got = {" + ", ".join(f'"{name}": {form}' for name, form in found.items()) + "}\n"
    truth = bench.truth(inputs, steps or None)
    functions = REFERENCES.get(spec.name.partition(" ")[0], ())
    exact = bool(functions) and _agrees(functions[-1], inputs, {name: truth[name] for name in found})
    if exact:
        sources = "\n\n".join(inspect.getsource(one) for one in functions)
        gradients = GRADIENTS.format(leaves=leaves, of="exact") if backward else ""
        text += WANTED.format(reference=sources, gradients=gradients, last=functions[-1].__name__)
    elif seeded:
        raise NoScript(f"there is no short reference of this {spec.name}")
    if backward:
        pairs = "((got, x), (want, exact))" if exact else "((got, x),)"
        lines = "\n".join(f'    "{name}": {write(x)}.to(device),' for name, x in steps.items() if name in found)
        text += BACKWARD.format(cotangents=lines, pairs=pairs, leaves=leaves)
    if finding.port not in results or raised:
        raise NoScript(f"{finding.port} is not among what the call returns")
    scalar = spec.port(finding.port).scalar_rows
    row = _row(results[finding.port], finding, scalar=scalar)
    want = truth[finding.port][row]
    allowed = finding.allowed if math.isfinite(finding.allowed) else UNDECIDED * float(want.norm())
    text += COMPARED.format(
        port=finding.port,
        want=f'want["{finding.port}"].detach().cpu()' if exact else f"torch.tensor({want.tolist()}, dtype=torch.float64)",
        row=WORST.format(size="abs()" if scalar else "norm(dim=-1)", rows="" if scalar else "[..., 0]") if seeded else row,
        allowed=f"{allowed / max(float(want.norm()), 1e-300):.6g} * float(want[row].norm())" if seeded else f"{allowed:.9g}",
        want_row="[row]" if exact else "",
    )
    return Script(text, f"{place}.{function.__name__}")


def _observed(bench: AdapterBench, inputs: Inputs, cotangents: Any) -> tuple[str, Any, _Seen, Mapping[str, Tensor], bool]:
    """The module and the function under test, what it got, the results of the call, and whether it launched interpreted kernels."""
    with recorder.recording(bench.adapter) as reach, contextlib.suppress(AdapterFault):
        bench.run(inputs, cotangents)
    module, _, name = next(iter(reach.functions), "").partition(":")
    function = getattr(sys.modules.get(module), name, None)
    if not callable(function) or isinstance(function, type):
        raise NoScript(f"the function under test is no function of a module: {name or 'none was seen'}")
    if getattr(sys.modules[module], "__file__", "") == inspect.getfile(type(bench.adapter)):
        raise NoScript("the function under test is in the adapter's own file, and of no library")
    results: Mapping[str, Tensor] = {}
    seen = _Seen(inspect.unwrap(function).__code__)
    sys.setprofile(seen.see)
    try:
        with contextlib.suppress(AdapterFault):
            results = bench.run(inputs, cotangents)
    finally:
        sys.setprofile(None)
    return module, function, seen, results, bool(reach.blocks)


def _texts(tensors: Mapping[str, Tensor], write: Callable[[Tensor], str], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, x in tensors.items():
        yield name, write(x) if x.is_floating_point() else _written(x)
    for name, option in options.items():
        yield name, repr(option)


def _written(x: Tensor) -> str:
    """A tensor as an expression that has its numbers, in as few digits as give its bits."""
    texts = []
    for number in x.detach().cpu().reshape(-1).tolist():
        exact = (f"{number:.{digits}g}" for digits in range(1, 18))
        same = (text for text in exact if number != number or torch.tensor(float(text), dtype=x.dtype).item() == number)
        texts.append(next(same) if x.is_floating_point() else str(number))
    return f"torch.tensor([{', '.join(texts)}], dtype={x.dtype}).view({tuple(x.shape)})"


def _drawn(x: Tensor) -> str:
    """A tensor as an expression that draws numbers like its own."""
    low, high = (float(bound) for bound in x.detach().float().aminmax()) if x.numel() else (0.0, 0.0)
    if low == high:
        return f"torch.full({tuple(x.shape)}, {low:.4g}, dtype={x.dtype})"
    if low < 0 < high or not math.isfinite(low + high):
        return f"({float(x.float().nan_to_num(0, 0, 0).std(correction=0)):.4g} * torch.randn{tuple(x.shape)}).to({x.dtype})"
    return f"({low:.4g} + {high - low:.4g} * torch.rand({tuple(x.shape)})).to({x.dtype})"


def _plain(value: Any) -> bool:
    """Whether the repr of a value is an expression."""
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _arguments(function: Any, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The arguments of the call as they are written, without those that have their defaults."""
    named = dict(arguments)
    for name, parameter in inspect.signature(inspect.unwrap(function)).parameters.items():
        value = named.pop(name, None)
        if parameter.kind is parameter.VAR_POSITIONAL and value:
            raise NoScript(f"the function takes {name} without names")
        if parameter.kind is parameter.VAR_KEYWORD:
            pairs = list((value or {}).items())
        else:
            pairs = [] if parameter.kind is parameter.VAR_POSITIONAL or value is parameter.default else [(name, value)]
        for key, item in pairs:
            if isinstance(item, Tensor):
                order = [*([key] if key in tensors else []), *tensors]
                yield f"{key}={_named(item, ((f'x[{one!r}]', tensors[one]) for one in order))}"
            elif _plain(item):
                yield f"{key}={item!r}"
            else:
                raise NoScript(f"argument {key} is a {type(item).__name__}")


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a function returned, each with its expression."""
    if isinstance(value, Tensor):
        yield name, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list | tuple) else ()):
        yield from _leaves(f"{name}[{key!r}]", item)


def _named(x: Tensor, candidates: Iterable[tuple[str, Tensor]]) -> str:
    """The expression of the candidate that has the numbers of `x`, perhaps with other axes."""
    for name, other in candidates:
        for form, change in FORMS.items():
            with contextlib.suppress(RuntimeError, IndexError):
                same = change(other)
                if same.shape == x.shape and same.dtype == x.dtype and torch.equal(same.nan_to_num(), x.nan_to_num()):
                    return f"{name}{form}" + (".contiguous()" if x.is_contiguous() and not same.is_contiguous() else "")
    if not x.is_floating_point() and x.numel() <= SHORT:
        return f"{_written(x)}.to(device)"
    raise NoScript(f"a tensor of shape {tuple(x.shape)} is none of the operation's, so that it cannot be written")


def _agrees(reference: Callable[[dict[str, Any]], dict[str, Tensor]], inputs: Inputs, truth: Mapping[str, Tensor]) -> bool:
    """Whether the reference of the script computes what the oracle does."""
    exact = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    try:
        want = reference(exact)
        return all(float((want[name] - x).norm()) <= AGREE * (float(x.norm()) or 1.0) for name, x in truth.items())
    except (KeyError, RuntimeError, TypeError):
        return False


def _row(x: Tensor, finding: Finding, *, scalar: bool) -> tuple[int, ...]:
    """The index of the row that the finding shows."""
    rows, got = x.detach().double().cpu(), torch.tensor(finding.got, dtype=torch.float64)
    first = (rows.unsqueeze(-1) if scalar else rows)[..., finding.begin : finding.begin + len(got)]
    places = ((first == got) | (first.isnan() & got.isnan())).all(-1).nonzero().tolist()
    if not places or not len(got):
        raise NoScript("the call does not give the same numbers again")
    return tuple(places[0])
