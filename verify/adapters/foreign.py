"""What adapters of implementations outside torch share: the tensors of a call by name, their layouts, and gradients."""

import abc
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oracles.layer import Layer
from oracles.operation import DTYPES, NAMES, Inputs, gradient_name
from verify.adapters.base import Adapter
from verify.adapters.contract import check_legal, contract_of, sizes_of, wanted

WORDS = {**NAMES, torch.float64: "fp64", torch.int32: "int32", torch.int64: "int64"}  # the dtypes, as the other side reads them
Outputs = tuple[Tensor | None, ...]
Pullback = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor]]  # gradients from inputs and cotangents


class ForeignAdapter(Adapter):
    """An implementation that gets other things than tensors of torch, by the operation's names.

    - `layout`: for each tensor, those of its axes that come last on the other side, in their order, such as {"state": "V K"}. Axes
      that are joined by `*` are one axis there, such as {"q": "B T H*K"}, and `1` is an axis of one element, such as
      {"weight": "D 1 W"}. A gradient has the layout of its input, and the cotangent of an output that of the output.
    - `absent`: what fills a tensor that a call does not have, such as {"state": 0.0}. Other absent tensors are not passed.
    """

    layout: ClassVar[Mapping[str, str]] = {}
    absent: ClassVar[Mapping[str, float]] = {}

    def run(self, x: Inputs) -> Any:
        """Compute the outputs and, in a backward pass, the gradients."""
        call = Call(self, x)
        leaves = [name for name, value in call.tensors.items() if value.requires_grad]
        if not (leaves and torch.is_grad_enabled()):
            return self._updated(x, self._outputs(call))
        return _Differentiable.apply(self, call, leaves, *(call.tensors[name] for name in leaves))

    @abc.abstractmethod
    def _outputs(self, call: "Call") -> Outputs:
        """The outputs of a call in the operation's order, with None for each that it does not return."""

    @abc.abstractmethod
    def _with_pullback(self, call: "Call", leaves: Sequence[str]) -> tuple[Outputs, Pullback]:
        """The outputs of a call, and the function that computes the gradients of the inputs called `leaves`."""

    @abc.abstractmethod
    def _wrong(self) -> str | None:
        """What is wrong with the declarations of this kind of adapter, in words; None if they can be used."""

    def _wrong_declaration(self) -> str | None:
        """What is wrong with the declarations, in words; None if they can be used."""
        for name, kind, sample in (("layout", str, {"state": "V K"}), ("absent", int | float, {"state": 0.0})):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(isinstance(part, kind) for part in value.values()):
                return f"{name} must have a value for each name, such as {sample}, got {value!r}"
        return self._wrong()

    def _updated(self, x: Inputs, outputs: Outputs) -> Outputs:
        """The outputs, where those that the domain updates in place are the inputs, with the new numbers."""
        names = [port.name for port in contract_of(self.domain, x).outputs] if self.domain.in_place else []
        for place, (name, output) in enumerate(zip(names, outputs, strict=False)):
            pool = x.get(name)
            if isinstance(pool, Tensor) and output is not None and (output.shape, output.dtype) == (pool.shape, pool.dtype):
                outputs = (*outputs[:place], pool.copy_(output), *outputs[place + 1 :])
        return outputs


class AskedAdapter(ForeignAdapter):
    """An implementation that is asked for outputs and for gradients, whose shapes and dtypes the contract of the call says."""

    @abc.abstractmethod
    def _ask(self, call: "Call", word: str, sent: Mapping["Place", Tensor], asked: Sequence["Place"]) -> Iterable[Tensor]:
        """The answers to a question: the outputs ("call") or the gradients ("vjp"), in the layout of the other side."""

    def _outputs(self, call: "Call") -> Outputs:
        answers = self._ask(call, "call", call.sent(), [*call.outputs.values()])
        found = {place.name: place.ours(x, call.device) for place, x in zip(call.outputs.values(), answers, strict=True)}
        return tuple(found.get(port.name) for port in call.operation.outputs)

    def _with_pullback(self, call: "Call", leaves: Sequence[str]) -> tuple[Outputs, Pullback]:
        def pullback(inputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
            sent = call.sent(dict(zip(leaves, inputs, strict=True)))
            asked = [place.called(gradient_name(place.name)) for name in leaves for place in sent if place.name == name]
            given = (x for x in cotangents if x is not None)
            sent |= {place.called(f"d{place.name}"): x for place, x in zip(call.outputs.values(), given, strict=True)}
            answers = self._ask(call, "vjp", sent, asked)
            return [place.ours(x, call.device) for place, x in zip(asked, answers, strict=True)]

        return self._outputs(call), pullback


class FileAdapter(AskedAdapter):
    """An implementation in a file that the class names. Relative paths begin in `folder`, by default that of the class's file."""

    folder: ClassVar[str] = "."
    _named_by: ClassVar[str]  # the attribute that names the file

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not {"folder", "_named_by"} & vars(cls).keys() and cls._named_by in vars(cls):
            cls.folder = _folder_of_class(sys._getframe(1))

    def _missing(self, what: str, name: str) -> str | None:
        """That there is no such file, in words; None if there is one."""
        return None if os.path.isfile(self._path(name)) else f"there is no {what} {name} in {self.folder}"

    def _path(self, name: str) -> str:
        return os.path.normpath(os.path.join(self.folder, name))


def _folder_of_class(frame: FrameType | None) -> str:
    """The folder of the file in which a class is being made. `frame` is that which makes it, or one of abc that works for it.

    The class's module would not do: a file of the user's may be called like a module that Python has under this name.
    """
    while frame is not None and frame.f_globals.get("__name__") == "abc":
        frame = frame.f_back
    file = frame and frame.f_globals.get("__file__")
    return os.path.dirname(os.path.abspath(file)) if file else os.getcwd()


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor as the other side sees it: its name, its shape and dtype here, and which of its axes each axis there has."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    groups: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Our axes in the order of the other side."""
        return tuple(axis for group in self.groups for axis in group)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape on the other side."""
        return tuple(math.prod(self.shape[axis] for axis in group) for group in self.groups)

    def called(self, name: str) -> "Place":
        """The same under another name."""
        return dataclasses.replace(self, name=name)

    def theirs(self, x: Tensor, *, strided: bool = False) -> Tensor:
        """The tensor in the other side's layout on the CPU: contiguous or, with `strided`, as it lies if the layout is ours."""
        x = x.detach().to("cpu", self.dtype).resolve_neg()
        if strided and self.sizes == self.shape and self.order == (*range(x.ndim),):
            return x
        return x.permute(self.order).contiguous().reshape(self.sizes)

    def empty(self) -> Tensor:
        """Memory for the tensor in the other side's layout."""
        return torch.empty(self.sizes, dtype=self.dtype, device="cpu")

    def ours(self, x: Tensor, device: torch.device) -> Tensor:
        """The tensor in our layout. One of another shape stays as it is: the contract finds it."""
        if (*x.shape,) == self.sizes:
            places = sorted(range(len(self.order)), key=self.order.__getitem__)
            x = x.reshape([self.shape[axis] for axis in self.order]).permute(places)
        return x.to(device)


class Call:
    """One call of an adapter: its operation, its tensors (also those that fill absent ones), and the outputs that it must have."""

    def __init__(self, adapter: ForeignAdapter, x: Inputs) -> None:
        self._layout, self._domain, self.x = adapter.layout, adapter.domain, x
        self.operation = contract_of(adapter.domain, x)
        tensors = {name: value for name, value in x.items() if isinstance(value, Tensor)}
        self.device = next(iter(tensors.values())).device
        self.sizes = sizes_of(self.operation, x)
        tensors |= self._filled(adapter.absent, self.device)
        order = [*(port.name for port in self.operation.inputs), *tensors]
        self.tensors = {name: tensors[name] for name in order if name in tensors}
        outputs = wanted(self.operation, x, adapter.domain)
        self.outputs = {name: self.place(name, must.shape, must.dtype) for name, must in outputs.items()}

    def place(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Place:
        """Where an input or an output lies on the other side. ValueError if its layout is none."""
        ports = (*self.operation.inputs, *self.operation.outputs)
        axes = next((port.axes.split() for port in ports if port.name == name), [])
        last: list[list[str]] = [[] if word == "1" else word.split("*") for word in self._layout.get(name, "").split()]
        named = [axis for group in last for axis in group]
        if not {*named} <= {*axes} or len({*named}) < len(named):
            raise ValueError(f"layout of {name} must name some of the axes {' '.join(axes)}, each once, got {self._layout[name]!r}")
        groups = [*([axis] for axis in axes if axis not in named), *last]
        if len(axes) != len(shape):
            axes, groups = [*map(str, range(len(shape)))], [[str(axis)] for axis in range(len(shape))]
        return Place(name, (*shape,), dtype, tuple(tuple(map(axes.index, group)) for group in groups))

    def sent(self, inputs: Mapping[str, Tensor] | None = None) -> dict[Place, Tensor]:
        """The tensors of the call, some of them perhaps replaced, with their places."""
        tensors = {**self.tensors, **(inputs or {})}
        return {self.place(name, x.shape, x.dtype): x for name, x in tensors.items()}

    def check_names(self, names: Collection[str], where: str) -> None:
        """Check that the call has no tensor beside those with these names, which the adapter's author has written somewhere."""
        if left := {name for name, x in self.x.items() if isinstance(x, Tensor)} - {*names}:
            raise ValueError(
                f"the call has {min(left)}, which {where} does not name: add it there, or let the domain do without it"
            )

    def check_legal(self) -> None:
        """Raise ValueError for a call with illegal shapes or offsets, or without a tensor that it must have."""
        check_legal(self._domain, self.x)

    def options(self) -> Iterator[tuple[str, Any]]:
        """The options of the call, also those that are None. The widths of a layer are called layer.hidden and so on."""
        for name, value in self.x.items():
            if isinstance(value, Layer):  # some widths have the name of a tensor
                yield from ((f"{name}.{width}", number) for width, number in dataclasses.asdict(value).items())
            elif isinstance(value, Mapping):
                yield from value.items()
            elif not isinstance(value, Tensor):
                yield name, value

    def _filled(self, absent: Mapping[str, float], device: torch.device) -> dict[str, Tensor]:
        """The tensors that a call does not have but the other side gets. ValueError for a name that no such tensor has."""
        found: dict[str, Tensor] = {}
        ports = {port.name: port for port in self.operation.inputs}
        first = next(value for value in self.x.values() if isinstance(value, Tensor))
        for name, number in absent.items():
            if isinstance(self.x.get(name), Tensor):
                continue
            if name not in ports or not {*ports[name].axes.split()} <= self.sizes.keys():
                raise ValueError(f"absent must name tensors of {self.operation.name} whose sizes the call has, got {name}")
            kinds = {"state": "state_dtypes"}.get(name) or {"gate": "gate_dtypes"}.get(ports[name].dtype, "")
            kind = getattr(self._domain, kinds, (ports[name].dtype,))[0]  # the domain says what the contract leaves open
            dtype = {**DTYPES, "input": first.dtype}.get(kind, torch.float32)
            shape = [self.sizes[axis] for axis in ports[name].axes.split()]
            found[name] = torch.full(shape, number, dtype=dtype, device=device)
        return found


class _Differentiable(torch.autograd.Function):
    """A call whose gradients the other side computes."""

    @staticmethod
    def forward(ctx: Any, adapter: ForeignAdapter, call: Call, leaves: Sequence[str], *inputs: Tensor) -> Any:
        outputs, ctx.pullback = adapter._with_pullback(call, leaves)
        ctx.save_for_backward(*inputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        return (None, None, None, *ctx.pullback(ctx.saved_tensors, cotangents))
