"""A program in Python that answers the questions of a ProcessAdapter with another adapter, the option `adapter` of a question."""

import functools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from oracles.layer import KdaLayer, Layer
from oracles.operation import Inputs, gradient_name
from verify.adapters.contract import contract_of
from verify.adapters.foreign import WORDS
from verify.adapters.loader import load

DTYPES = {word: dtype for dtype, word in WORDS.items()}
LAYERS = {"gdn_layer": Layer, "kda_layer": KdaLayer}
Heads = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def heads(text: str) -> Heads:
    """The dtype and shape of each tensor that a part of a line names."""
    words: Iterator[str] = iter(text.split())
    found: Heads = {}
    for name in words:
        dtype, rank = DTYPES[next(words)], int(next(words))
        found[name] = dtype, tuple(int(next(words)) for _ in range(rank))
    return found


def value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return tuple(map(int, text.split(","))) if "," in text else text


def call_of(domain: Any, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> Inputs:
    """The inputs as an adapter in Python gets them: what the line does not have is None."""
    options: dict[str, Any] = {name: value(text) for name, text in words.items()}
    if layer := LAYERS.get(domain.operation):
        options["layer"] = layer(**{name: options.pop(f"layer.{name}") for name in layer.__dataclass_fields__})
    if isinstance(options.get("pads"), int):
        options["pads"] = (options["pads"],)
    if domain.options:
        options["options"] = {name: words[name] for name, _ in domain.options}
    operation = contract_of(domain, Inputs(**tensors, **options))
    names = (*(port.name for port in operation.inputs), "cu_seqlens", *operation.options, "g", "beta", "state")
    return Inputs(**{**dict.fromkeys(names), **tensors, **options})


def answer(line: str, questions: BinaryIO) -> list[Tensor]:
    word, _, rest = line.partition(" ")
    first, second, third = rest.split(";")
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape) in heads(first).items():
        data = bytearray(questions.read(math.prod(shape) * dtype.itemsize))
        tensors[name] = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    asked = heads(second)
    words = dict(text.split("=", 1) for text in third.split())
    adapter = adapter_of(words.pop("adapter"))
    if word == "call":
        with torch.no_grad():
            return list(named_outputs(adapter, call_of(adapter.domain, tensors, words), asked).values())
    inputs = {name: x for name, x in tensors.items() if f"d{name}" not in tensors or gradient_name(name) in asked}
    outputs = contract_of(adapter.domain, call_of(adapter.domain, inputs, words)).outputs
    cotangents = {port.name: inputs.pop(f"d{port.name}") for port in outputs if f"d{port.name}" in inputs}
    leaves = [x.requires_grad_() for name, x in inputs.items() if gradient_name(name) in asked]
    found = named_outputs(adapter, call_of(adapter.domain, inputs, words), cotangents)
    through = [name for name, x in found.items() if x.requires_grad]
    gradients = torch.autograd.grad([found[name] for name in through], leaves, [cotangents[name] for name in through])
    return [x.to(dtype) for x, (dtype, _) in zip(gradients, asked.values(), strict=True)]


def named_outputs(adapter: Any, x: Inputs, names: Mapping[str, Any]) -> dict[str, Tensor]:
    ports = contract_of(adapter.domain, x).outputs
    result = adapter.run(x)
    results = result if isinstance(result, tuple) else (result,)
    return {port.name: output for port, output in zip(ports, results, strict=False) if port.name in names}


adapter_of = functools.cache(load)


def main() -> None:
    torch.set_num_threads(1)
    questions, answers = sys.stdin.buffer, open(1, "wb", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr
    for line in iter(questions.readline, b""):
        if line.startswith(b"hello"):
            answers.write(b"ok 0\n")
            answers.flush()
            continue
        try:
            results = answer(line.decode(), questions)
            body = b"".join(bytes(x.contiguous().view(-1).view(torch.uint8).numpy()) for x in results)
            answers.write(b"ok %d\n" % len(body) + body)
        except Exception as error:
            answers.write(f"error {type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
