"""An adapter whose implementation is a program in any language, which gdn-verify asks over pipes.

docs/how-to/any-language.md has the protocol. This module writes its lines; verify/process/child.py moves the bytes.
"""

import ctypes
import dataclasses
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.layer import Layer
from oracles.operation import DTYPES, NAMES, Inputs, Operation, gradient_name
from verify.adapters.base import Adapter
from verify.adapters.contract import contract_of, sizes_of, wanted
from verify.adapters.interface import Unsupported
from verify.process import deadline
from verify.process.child import Child

HELLO = "hello 1"  # the version of the protocol
WORDS = {**NAMES, torch.float64: "fp64", torch.int32: "int32", torch.int64: "int64"}  # the dtypes, as the program reads them


class ProcessError(Exception):
    """The program answered `error`."""


class ProcessAdapter(Adapter):
    """A program that computes an operation. It is started once in each worker process, and again after each failure.

    - `command`: the program and its arguments. It runs in `folder`, which is that of the file whose class sets `command`.
    - `inputs`: the names of the tensors that the program gets, in their order. None: all that a call has, in the operation's order.
    - `layout`: for each tensor, those of its axes that come last in the program's memory, in their order, such as {"state": "V K"}.
      A gradient has the layout of its input, and the cotangent of an output that of the output.
    - `absent`: what fills a tensor that a call does not have, such as {"state": 0.0}. Other absent tensors are not sent.
    - `environment`: variables for the program, besides those of the command.
    - `start_s`: the seconds after which a program that has not answered `hello` is given up.
    """

    command: ClassVar[Sequence[str]] = ()
    folder: ClassVar[str] = "."
    inputs: ClassVar[Sequence[str] | None] = None
    layout: ClassVar[Mapping[str, str]] = {}
    absent: ClassVar[Mapping[str, float]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    start_s: ClassVar[float] = 300.0

    _child: Child | None = None
    _greeted = False
    _turn: ClassVar[threading.RLock] = threading.RLock()  # a program answers one question at a time

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "command" in vars(cls) and "folder" not in vars(cls):
            cls.folder = _folder_of_class(sys._getframe(1))

    def bring(self) -> None:
        """Start the program. It may prepare for its questions while the first cases are drawn."""
        with self._turn:
            self._start()

    def close(self) -> None:
        """End the program, also while another thread waits for its answer."""
        if self._turn.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._turn.release()
        elif self._child is not None:
            self._child.kill()

    def run(self, x: Inputs) -> Any:
        """Ask the program for the outputs and, in a backward pass, for the gradients."""
        call = _Call(self, x)
        leaves = [name for name in call.names if isinstance(x.get(name), Tensor) and x[name].requires_grad]
        if not (leaves and torch.is_grad_enabled()):
            return self._updated(x, call.outputs())
        return _Differentiable.apply(call, leaves, *(x[name] for name in leaves))

    def _updated(self, x: Inputs, outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The outputs, where those that the domain updates in place are the inputs, with the new numbers."""
        names = [port.name for port in contract_of(self.domain, x).outputs] if self.domain.in_place else []
        for place, name in enumerate(names):
            if isinstance(x.get(name), Tensor) and (output := outputs[place]) is not None:
                outputs = (*outputs[:place], x[name].copy_(output), *outputs[place + 1 :])
        return outputs

    def _exchange(self, line: str, sent: Sequence[Tensor], answer: Sequence[Tensor]) -> None:
        """Ask the program a question. Its answer fills the tensors of `answer`, which lie on the CPU and are contiguous.

        ProcessDied, WrongAnswer or ProcessError says what went wrong. Unsupported: it refuses.
        """
        with self._turn:
            child = self._start()
            try:
                word, text = self._greet(child)
                if word == "ok":
                    word, text = child.ask(line, map(_memory, sent), map(_memory, answer))
            finally:
                if not child.in_step:
                    self._end()
        if word == "refuse":
            raise Unsupported(text or "the program refuses the call")
        if word == "error":
            raise ProcessError(text or "no message")

    def _greet(self, child: Child) -> tuple[str, str]:
        """Wait until a new program can be asked, which may take longer than a case may."""
        if self._greeted:
            return "ok", ""
        with deadline.outside(self.start_s + 1.0):
            word, text = child.ask(HELLO, limit_s=self.start_s)
        self._greeted = word == "ok"
        return word, text

    def _start(self) -> Child:
        if self._child is None:
            self._child, self._greeted = Child(self.command, self.folder, self.environment), False
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.end()


def _folder_of_class(frame: FrameType | None) -> str:
    """The folder of the file in which a class is being made. `frame` is that which makes it, or one of abc that works for it.

    The class's module would not do: a file of the user's may be called like a module that Python has under this name.
    """
    while frame is not None and frame.f_globals.get("__name__") == "abc":
        frame = frame.f_back
    file = frame and frame.f_globals.get("__file__")
    return os.path.dirname(os.path.abspath(file)) if file else os.getcwd()


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A tensor as the program sees it: its name, its shape and dtype there, and the order of its axes there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(map(str, (self.name, WORDS[self.dtype], len(self.shape), *(self.shape[axis] for axis in self.order))))

    def theirs(self, x: Tensor) -> Tensor:
        """The tensor in the program's order of axes, contiguous on the CPU."""
        return x.detach().to("cpu", self.dtype).permute(self.order).resolve_neg().contiguous()

    def empty(self) -> Tensor:
        """Memory for the tensor in the program's order of axes."""
        return torch.empty([self.shape[axis] for axis in self.order], dtype=self.dtype, device="cpu")

    def ours(self, x: Tensor, device: torch.device) -> Tensor:
        """The tensor in our order of axes, from the memory that the program has filled."""
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        return x.permute(places).to(device)


class _Call:
    """The questions of one call."""

    def __init__(self, adapter: ProcessAdapter, x: Inputs) -> None:
        self._adapter, self._operation = adapter, contract_of(adapter.domain, x)
        self._outputs = {name: (must.shape, must.dtype) for name, must in wanted(self._operation, x, adapter.domain).items()}
        given = {name: value for name, value in x.items() if isinstance(value, Tensor)}
        self._device = next(iter(given.values())).device
        if adapter.inputs is not None and (left := given.keys() - {*adapter.inputs}):
            name = min(left)
            raise ValueError(f"the call has {name}, which `inputs` does not name: add it there, or let the domain do without it")
        given |= _filled(adapter.absent, self._operation, x)
        order = adapter.inputs or [*(port.name for port in self._operation.inputs), *given]
        self._x = {name: given[name] for name in order if name in given}
        self._options = " ".join(_words(x))

    @property
    def names(self) -> list[str]:
        """The names of the tensors that the program gets."""
        return [*self._x]

    def outputs(self) -> tuple[Tensor | None, ...]:
        """The outputs of the call, with None for each that it does not return."""
        found = self._ask("call", self._x, {name: self._sent(name, *kind) for name, kind in self._outputs.items()})
        return tuple(found.get(port.name) for port in self._operation.outputs)

    def gradients(self, leaves: Sequence[str], inputs: Iterable[Tensor], cotangents: Iterable[Tensor]) -> list[Tensor]:
        """The gradients of some inputs."""
        named = {f"d{name}": (name, x) for name, x in zip(self._outputs, cotangents, strict=True)}
        tensors = {**self._x, **dict(zip(leaves, inputs, strict=True))}
        asked = {gradient_name(name): self._sent(name, (*tensors[name].shape,), tensors[name].dtype) for name in leaves}
        found = self._ask("vjp", tensors, asked, named)
        return [found[gradient_name(name)] for name in leaves]

    def _ask(
        self, word: str, tensors: Mapping[str, Tensor], asked: Mapping[str, _Sent], cotangents: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        sent = [(self._sent(name, (*x.shape,), x.dtype), x) for name, x in tensors.items()]
        for word_of, (name, x) in (cotangents or {}).items():
            sent.append((dataclasses.replace(self._sent(name, *self._outputs[name]), name=word_of), x))
        answers = {name: dataclasses.replace(place, name=name) for name, place in asked.items()}
        line = f"{word} {' '.join(str(place) for place, _ in sent)} ; {' '.join(map(str, answers.values()))} ; {self._options}"
        places = [place.empty() for place in answers.values()]
        self._adapter._exchange(line.rstrip(), [place.theirs(x) for place, x in sent], places)
        return {name: answers[name].ours(x, self._device) for name, x in zip(answers, places, strict=True)}

    def _sent(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Sent:
        ports = (*self._operation.inputs, *self._operation.outputs)
        axes = next((port.axes.split() for port in ports if port.name == name), [])
        last = self._adapter.layout.get(name, "").split()
        if not {*last} <= {*axes} or len({*last}) < len(last):
            raise ValueError(f"layout of {name} must name some of the axes {' '.join(axes)}, each once, got {' '.join(last)!r}")
        order = (*(axis for axis in axes if axis not in last), *last)
        return _Sent(name, shape, dtype, tuple(map(axes.index, order)) if axes else tuple(range(len(shape))))


class _Differentiable(torch.autograd.Function):
    """A call whose gradients the program computes."""

    @staticmethod
    def forward(ctx: Any, call: _Call, leaves: Sequence[str], *inputs: Tensor) -> Any:
        ctx.call, ctx.leaves = call, leaves
        ctx.save_for_backward(*inputs)
        return call.outputs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        return (None, None, *ctx.call.gradients(ctx.leaves, ctx.saved_tensors, [x for x in cotangents if x is not None]))


def _filled(absent: Mapping[str, float], operation: Operation, x: Inputs) -> dict[str, Tensor]:
    """The tensors that a call does not have but the program gets. ValueError for a name that no such tensor has."""
    found: dict[str, Tensor] = {}
    ports, sizes = {port.name: port for port in operation.inputs}, sizes_of(operation, x)
    first = next(value for value in x.values() if isinstance(value, Tensor))
    for name, number in absent.items():
        if isinstance(x.get(name), Tensor):
            continue
        if name not in ports or not {*ports[name].axes.split()} <= sizes.keys():
            raise ValueError(f"absent must name tensors of {operation.name} whose sizes the call has, got {name}")
        dtype = {**DTYPES, "input": first.dtype}.get(ports[name].dtype, torch.float32)
        shape = [sizes[axis] for axis in ports[name].axes.split()]
        found[name] = torch.full(shape, number, dtype=dtype, device=first.device)
    return found


def _words(x: Inputs) -> Iterable[str]:
    """The options of a call as words. Those that are None are left out."""
    for name, value in x.items():
        if value is None or isinstance(value, Tensor):
            continue
        if isinstance(value, Layer):  # some widths have the name of a tensor
            yield from (f"{name}.{width}={number}" for width, number in dataclasses.asdict(value).items())
            continue
        for key, part in value.items() if isinstance(value, Mapping) else ((name, value),):
            several = part if isinstance(part, tuple | list) else (part,)
            text = ",".join(str(int(one) if isinstance(one, bool) else one) for one in several)
            assert not text.split()[1:], (key, text)
            yield f"{key}={text}"


def _memory(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    if not x.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())).cast("B")


def wrong_command(adapter: ProcessAdapter) -> str | None:
    """What is wrong with the command of an adapter, in words; None if it can be run."""
    command = adapter.command
    if isinstance(command, str) or not command or not all(isinstance(word, str) and word for word in command):
        return f"command must be a list of words, the program and its arguments, got {command!r}"
    program = command[0]
    if "/" not in program:
        return None if shutil.which(program) else f"there is no program {program} on the PATH"
    found = os.path.normpath(os.path.join(adapter.folder, program))
    if not os.path.isfile(found):
        return f"there is no program {program} in {adapter.folder}: compile it first"
    return None if os.access(found, os.X_OK) else f"the program {found} must be executable: chmod +x {found}"
