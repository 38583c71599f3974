"""An adapter whose implementation is an ONNX model, or a node of ONNX."""

import functools
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from verify.adapters.array_adapter import numpy_of, tensor_of
from verify.adapters.foreign import Call, FileAdapter, Place

RUNTIMES = ("onnxruntime", "reference")
TYPES = {  # the numbers of onnx.TensorProto
    torch.float32: 1,
    torch.int32: 6,
    torch.int64: 7,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}


class OnnxAdapter(FileAdapter):
    """A model that computes an operation. It has no gradients.

    - `model`: the path of a model, an `onnx.ModelProto`, an `onnx.NodeProto` or several in a list, or a method that returns one of
      these for the inputs `x` of a call, which are tensors of torch. A node lists all the inputs that it can have: those that a
      call lacks are left out.
    - `names`: for each tensor that the model calls otherwise, its name there, such as {"state": "past_state"}.
    - `runtime`: "onnxruntime", on a CPU, or "reference", the evaluator of the package onnx.
    - `folder`, `layout` and `absent` as for a FileAdapter.
    """

    model: ClassVar[Any] = None
    names: ClassVar[Mapping[str, str]] = {}
    runtime: ClassVar[str] = "onnxruntime"
    _named_by = "model"

    def bring(self) -> None:
        """Import the runtime."""
        importlib.import_module("onnxruntime" if self.runtime == "onnxruntime" else "onnx.reference")

    def _wrong(self) -> str | None:
        if self.runtime not in RUNTIMES:
            return f"runtime must be one of {', '.join(RUNTIMES)}, got {self.runtime!r}"
        for package in ("onnx", "onnxruntime")[: 2 if self.runtime == "onnxruntime" else 1]:
            if importlib.util.find_spec(package) is None:
                return f"runtime {self.runtime} needs {package}, which is not installed: pip install {package}"
        if self.model is None:
            return "model must be a path, a model or node of onnx, or a method that returns one, got None"
        if isinstance(self.model, str) and (missing := self._missing("model", self.model)):
            return missing
        return "domain must have backward=False: a model has no gradients" if self.domain.backward else None

    def _ask(self, call: Call, word: str, sent: Mapping[Place, Tensor], asked: Sequence[Place]) -> list[Tensor]:
        assert word == "call", word
        inputs = {self.names.get(place.name, place.name): place.theirs(x) for place, x in sent.items()}
        outputs = [self.names.get(place.name, place.name) for place in asked]
        model = self.model(call.x) if callable(self.model) else self.model
        if isinstance(model, str):
            model = self._path(model)
        else:
            nodes = model if isinstance(model, list | tuple) else [model] * hasattr(model, "op_type")
            model = (_model_of_nodes(nodes, inputs, outputs) if nodes else model).SerializeToString()
        runs = _loaded(self.runtime, model)
        for kind, names, there in (("input", inputs, runs.inputs), ("output", outputs, runs.outputs)):
            if lacking := {*names} - {*there}:
                raise ValueError(f"the model has no {kind} {min(lacking)}, it has {', '.join(there)}: `names` may rename them")
        return runs(outputs, inputs)


class _InOnnxruntime:
    """A model in ONNX Runtime on a CPU. Inputs pass by address and outputs by dlpack: NumPy would have no bfloat16."""

    def __init__(self, model: str | bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # each worker has one core
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = [port.name for port in self._session.get_inputs()]
        self.outputs = [port.name for port in self._session.get_outputs()]

    def __call__(self, outputs: Sequence[str], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs of these names."""
        binding = self._session.io_binding()
        for name, x in inputs.items():
            binding.bind_input(name, "cpu", 0, TYPES[x.dtype], [*x.shape], x.data_ptr())
        for name in outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        return [torch.utils.dlpack.from_dlpack(value).clone() for value in binding.get_outputs()]


class _InReference:
    """A model in the evaluator of the package onnx, on arrays of NumPy."""

    def __init__(self, model: str | bytes) -> None:
        import onnx.reference

        self._evaluator = onnx.reference.ReferenceEvaluator(model)
        self.inputs, self.outputs = self._evaluator.input_names, self._evaluator.output_names

    def __call__(self, outputs: Sequence[str], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs of these names."""
        found = self._evaluator.run(outputs, {name: numpy_of(x) for name, x in inputs.items()})
        return [tensor_of(array) for array in found]


@functools.lru_cache(maxsize=16)
def _loaded(runtime: str, model: str | bytes) -> _InOnnxruntime | _InReference:
    """A model in a runtime. `model` is a path, or the bytes of a model."""
    return _InOnnxruntime(model) if runtime == "onnxruntime" else _InReference(model)


def _model_of_nodes(nodes: Sequence[Any], inputs: Mapping[str, Tensor], outputs: Collection[str]) -> Any:
    """The model of these nodes, for inputs of these shapes. Inputs that they list and the call lacks are left out."""
    from onnx import defs, helper

    made = {name for node in nodes for name in node.output}
    copies: list[Any] = []
    versions: dict[str, int] = {}
    for node in nodes:
        copies.append(copy := type(node)())
        copy.CopyFrom(node)
        copy.input[:] = [name if name in inputs or name in made else "" for name in node.input]
        schema = defs.has(node.op_type, node.domain) and defs.get_schema(node.op_type, node.domain)
        versions[node.domain] = max(schema.since_version if schema else 1, versions.get(node.domain, 1))
    shapes = {name: (TYPES[inputs[name].dtype], [*inputs[name].shape]) for copy in copies for name in copy.input if name in inputs}
    takes = [helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items()]
    gives = [helper.make_empty_tensor_value_info(name) for name in outputs if name in made]
    graph = helper.make_graph(copies, nodes[-1].op_type, takes, gives)
    opsets = [helper.make_opsetid(*version) for version in versions.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets, ignore_unknown=True))
