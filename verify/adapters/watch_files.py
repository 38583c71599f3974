"""The files of sampled calls: a question and an answer for each, as `gdn-verify export` and a kernel write them, and a manifest."""

import collections
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import verify
from oracles.operation import Inputs, Operation, gradient_name
from oracles.operations import RULES
from verify.adapters.tensor_files import ENDING, FORMAT, MANIFEST, NAMES, PIECE, write, write_bytes

ANSWERS_IN = "answers"  # the folder of the answers, beside the questions
STATISTICS = "statistics.jsonl"
T = TypeVar("T")
SPARE = 10  # a sample is written only if the disk has room for so many of its size


class Lost(Exception):
    """A sample cannot be taken. The message is for people."""


class Stopped(Exception):
    """The process ends while a sample is written."""


class Sample:
    """One call: copies of its inputs, outputs, cotangents and gradients, which lie on its device."""

    def __init__(
        self,
        number: int,
        spec: Operation,
        call: dict[str, Tensor],
        options: Mapping[str, Any],
        layout: Mapping[str, str],
        chunk: int | None,
    ) -> None:
        self.number, self.spec, self.call, self.options, self.layout = number, spec, call, options, layout
        self.chunk = chunk  # its length, if the call says it
        self.begun, self.cost_s, self.submitted = time.monotonic(), 0.0, False
        self.device = next(iter(call.values())).device
        self.inputs, self.outputs = dict[str, Tensor](), dict[str, Tensor]()
        self.cotangents, self.gradients = dict[str, Tensor](), dict[str, Tensor]()
        self.taps = dict[str, Tensor]()
        self._spans = list[tuple[Any, Any]]()  # CUDA events before and after copies

    @property
    def bytes_of_call(self) -> int:
        """The bytes of the inputs."""
        return sum(x.numel() * x.element_size() for x in self.call.values())

    @property
    def bytes(self) -> int:
        """The bytes of all copies."""
        parts = (self.inputs, self.outputs, self.cotangents, self.gradients)
        return sum(x.numel() * x.element_size() for part in parts for x in part.values())

    def named(self, result: Any) -> dict[str, Tensor]:
        """The outputs of the call by name. Lost if there are more than the operation has."""
        several = tuple(result) if isinstance(result, tuple | list) else (result,)
        ports = [port.name for port in self.spec.outputs]
        for place, x in enumerate(several):
            if x is not None and (place >= len(ports) or type(x) not in (Tensor, nn.Parameter)):
                raise Lost(f"output {place} is a {type(x).__name__}, and {self.spec.name} returns {', '.join(ports)}")
        return {name: x for name, x in zip(ports, several, strict=False) if x is not None}

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure how long a GPU works on what is launched inside."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        begin = stream.record_event(torch.cuda.Event(enable_timing=True))
        yield
        self._spans.append((begin, stream.record_event(torch.cuda.Event(enable_timing=True))))

    def await_copies(self, between: Callable[[], None]) -> None:
        """Wait until a GPU has made the copies. It may hang, so `between` is called meanwhile, and may raise."""
        for _, end in self._spans:
            while not end.query():
                between()
                time.sleep(0.001)

    def device_s(self) -> float:
        """The seconds that a GPU worked on the copies, after it has made them."""
        with contextlib.suppress(Exception):
            return sum(float(begin.elapsed_time(end)) for begin, end in self._spans) / 1e3
        return 0.0

    def tensors(self, moved: Callable[[str, Tensor], T]) -> tuple[dict[str, T], dict[str, T]]:
        """The tensors of the question and those of the answer. `moved` gets the name of an input or output, and the tensor."""
        question = {name: moved(name, x) for name, x in self.inputs.items()}
        answer = {name: moved(name, x) for name, x in self.outputs.items()}
        if self.gradients:
            question |= {f"d{name}": moved(name, x) for name, x in self.cotangents.items()}
            answer |= {gradient_name(name): moved(name, x) for name, x in self.gradients.items()}
        return question, answer

    def ours(self, name: str, x: Tensor) -> Tensor:
        """A tensor in the operation's layout. Lost if the declared layout does not fit."""
        ports = (*self.spec.inputs, *self.spec.outputs)
        axes = next((port.axes.split() for port in ports if port.name == name), [])
        last = self.layout.get(name, "").split()
        theirs = [*axes[: len(axes) - len(last)], *last]
        if last and (sorted(theirs) != sorted(axes) or x.ndim != len(axes)):
            raise Lost(f"layout of {name} must have axes of {' '.join(axes)}, got {self.layout[name]!r} for {tuple(x.shape)}")
        return x.permute([theirs.index(axis) for axis in axes]) if last else x


class Folder:
    """The folder of a process: it has the newest `keep` calls, and a manifest. OSError if it cannot be made."""

    def __init__(self, out: str, name: str, operation: str, declares: Mapping[str, Any], keep: int, *, statistics: bool) -> None:
        self._keep, self._statistics, self._streams = keep, statistics, dict[Any, Any]()
        host, number = re.sub(r"[^\w.-]", "-", socket.gethostname()), 0
        os.makedirs(out, exist_ok=True)
        while True:  # a process in a container may have the number of another one
            self.path = os.path.join(out, f"{re.sub(r'[^0-9A-Za-z_.-]', '-', name)}-{host}-{os.getpid()}-{number}")
            try:
                os.makedirs(self.path if statistics else os.path.join(self.path, ANSWERS_IN), exist_ok=False)
                break
            except FileExistsError:
                number += 1
        self._head = {
            "format": FORMAT,
            "gdn_verify": verify.__version__,
            "adapter": name,
            "profile": "watch",
            "seed": 0,
            "laws": [],
            "book": "rules" if operation in RULES else "modules",
            "domain": {"operation": operation},
            "declares": dict(declares),
            "cases": [],
        }
        self._questions = collections.OrderedDict[str, Any]()

    def write(self, sample: Sample, report: Mapping[str, Any], stopped: Callable[[], bool]) -> None:
        """Write a sample, or its statistics. Stopped if the process ends meanwhile. Lost, or OSError, if that fails."""

        def between() -> None:
            if stopped():
                raise Stopped

        sample.await_copies(between)
        about = {"call": sample.number, "time": round(time.time(), 3), "options": _texts(sample.options)}
        about |= {} if sample.chunk is None else {"chunk": sample.chunk}
        about |= {} if sample.device.type == "cuda" else {"products": "ieee"}  # as everywhere but on a GPU
        if self._statistics:
            with self._beside(sample.device):
                counts = sample.tensors(functools.partial(statistics_of, between=between))
            with open(os.path.join(self.path, STATISTICS), "a", encoding="utf-8") as file:
                file.write(json.dumps({**about, "inputs": counts[0], "outputs": counts[1]}) + "\n")
        else:
            self._write(sample, about, between)
        self._put(report)

    def _write(self, sample: Sample, about: dict[str, Any], between: Callable[[], None]) -> None:
        if shutil.disk_usage(self.path).free < SPARE * sample.bytes:
            raise OSError(f"the disk of {self.path} has no room for {SPARE} files of {sample.bytes >> 10} KiB")
        question, answer = sample.tensors(lambda name, x: sample.ours(name, self._to_cpu(x, between)).contiguous())
        offsets = {"cu_seqlens": question["cu_seqlens"]} if "cu_seqlens" in question else {}
        legal = {name: x for name, x in question.items() if name in sample.inputs}
        try:
            sample.spec.check(Inputs(**{**legal, **offsets, **sample.options}))
        except ValueError as error:
            raise Lost(f"a call is none of {sample.spec.name}: {error}") from None

        word = "vjp" if sample.gradients else "call"
        name = f"{word}-{hashlib.blake2b(f'{self.path} {sample.number}'.encode(), digest_size=8).hexdigest()}"
        described = [[_described(name, x) for name, x in part.items()] for part in (question, answer)]
        about |= {"word": word, "inputs": described[0], "outputs": described[1]}
        try:
            for path, tensors in zip(self._paths(name), (question, answer), strict=True):
                write(path, tensors, {"question": json.dumps(about)}, between)
        except BaseException:
            self._remove(name)
            raise
        self._questions[name] = about
        while len(self._questions) > self._keep:
            self._remove(self._questions.popitem(last=False)[0])

    def _paths(self, name: str) -> tuple[str, str]:
        return os.path.join(self.path, name + ENDING), os.path.join(self.path, ANSWERS_IN, name + ENDING)

    def _remove(self, name: str) -> None:
        for path in self._paths(name):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _put(self, report: Mapping[str, Any]) -> None:
        manifest = {**self._head, "questions": self._questions, "watch": report}
        write_bytes(os.path.join(self.path, MANIFEST), [json.dumps(manifest, indent=1).encode(), b"\n"])

    def _to_cpu(self, x: Tensor, between: Callable[[], None]) -> Tensor:
        """A contiguous tensor on the CPU. It is copied in pieces, on a stream beside those of the job."""
        if x.device.type == "cpu":
            return x.resolve_neg()
        moved = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        with self._beside(x.device):
            for piece, there in zip(x.view(-1).split(PIECE), moved.view(-1).split(PIECE), strict=True):
                between()
                there.copy_(piece)
        return moved

    def _beside(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return contextlib.nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return torch.cuda.stream(self._streams[device])


def statistics_of(name: str, x: Tensor, between: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The shape, dtype and statistics of a tensor: how many numbers are NaN, infinite or zero, and of the others the least, the
    largest, the mean and the root mean square. Of `cu_seqlens`, the statistics are those of the lengths."""
    x = x.diff() if name == "cu_seqlens" else x
    counts = dict.fromkeys(("nan", "infinite", "zero"), 0)
    count, least, largest, total, squares = 0, float("inf"), float("-inf"), 0.0, 0.0
    for piece in x.reshape(-1).split(PIECE) if x.numel() else ():
        between()
        nan, infinite = piece.isnan(), piece.isinf()
        finite = piece[~(nan | infinite)].double()
        for word, mask in (("nan", nan), ("infinite", infinite), ("zero", piece == 0)):
            counts[word] += int(mask.sum())
        if finite.numel():
            least, largest = min(least, float(finite.min())), max(largest, float(finite.max()))
            count, total, squares = count + finite.numel(), total + float(finite.sum()), squares + float(finite.square().sum())
    found = {"least": least, "largest": largest, "mean": total / count, "rms": (squares / count) ** 0.5} if count else {}
    return {"shape": [*x.shape], "dtype": NAMES[x.dtype], **counts, **found}


def _described(name: str, x: Tensor) -> dict[str, Any]:
    if x.dtype not in NAMES:
        raise Lost(f"{name} has dtype {x.dtype}, which files do not have")
    return {"name": name, "dtype": NAMES[x.dtype], "shape": [*x.shape]}


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """The options as a question has them: 1 for true, 0 for false."""
    return {name: str(int(x) if isinstance(x, bool) else x) for name, x in options.items() if x is not None}
