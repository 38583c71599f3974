"""Kernels on arrays of other libraries, ONNX models and C libraries: the examples of the page, conversions, wrong declarations."""

import importlib
import importlib.util
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch

from oracles.operation import Inputs
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from tests.pages import prose_and_code, read
from verify.adapters.array_adapter import ArrayAdapter
from verify.adapters.c_library import CError, CLibrary
from verify.adapters.loader import AnyAdapter, load, make
from verify.adapters.onnx_adapter import OnnxAdapter
from verify.adapters.registry import AdapterError
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Outcome, Verdict

BLOCKS = [(block[0].strip("`"), "\n".join(block[1:]) + "\n") for block in prose_and_code(read("docs/how-to/arrays.md"))[1]]
SPEC = f"{__file__}:Mine"
RULE = "law=oracle lengths=5+5 heads=2 value_heads=2 key_dim=4 value_dim=3 gate=mixed gate_dtype=input"
NORM = "law=oracle op=l2norm lengths=3+3 heads=2 width=5"


def need(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install 'gdn-verify[{extra}]'")


def example(folder: pathlib.Path, name: str, *change: str) -> AnyAdapter:
    """The adapter `name` of the page, perhaps with one text in place of another."""
    (text,) = (text for language, text in BLOCKS if language == "python" and f"class {name}" in text)
    (folder / "mine.py").write_text(replaced(text, *change))
    return load(f"{folder / 'mine.py'}:{name}")


def replaced(text: str, old: str = "", new: str = "") -> str:
    assert old in text
    return text.replace(old, new) if old else text


def outcome(adapter: Any, line: str) -> Outcome:
    judging._LOADED[SPEC] = adapter
    try:
        return execute(Run.parse(line.replace(" ", f" adapter={SPEC} ", 1)))
    finally:
        del judging._LOADED[SPEC]


def verdicts(adapter: Any, *lines: str) -> list[Verdict]:
    return [outcome(adapter, line).verdict for line in lines]


# Arrays


def test_the_rule_of_the_page_in_jax(tmp_path: pathlib.Path) -> None:
    need("jax", "arrays")
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles in half the time
    words = RULE.replace(" value_heads=2", " value_heads=4") + " dtype=bf16 state=random scale=half"
    strided = words.replace("law=oracle", "law=strides variant=transposed")
    assert verdicts(example(tmp_path, "MyRule"), words, strided) == [Verdict.HOLDS] * 2
    forgets = example(tmp_path, "MyRule", "jnp.exp(g)", "jnp.exp(0 * g)")
    assert verdicts(forgets, f"{RULE} backward=no") == [Verdict.BROKEN]


def norm(xp: Any, x: Inputs) -> Any:
    numbers = x.x.astype(xp.float32)
    return (numbers / xp.sqrt((numbers * numbers).sum(-1, keepdims=True) + x.eps)).astype(x.x.dtype)


def norm_with_vjp(x: Inputs, names: Sequence[str]) -> Any:
    assert [*names] == ["x"]

    def gradients(cotangents: Any) -> Any:
        numbers, dy = (array.astype("float32") for array in (x.x, *cotangents))
        root = ((numbers * numbers).sum(-1, keepdims=True) + x.eps) ** 0.5
        y = numbers / root
        return ((dy - y * (y * dy).sum(-1, keepdims=True)) / root).astype(x.x.dtype)

    return norm(numpy, x), gradients


def norm_of(library: str, compute: Any = None, **declared: Any) -> AnyAdapter:
    """The L2 norm in a library."""
    need({"numpy": "ml_dtypes"}.get(library, library), "arrays")
    module = {"numpy": "numpy", "jax": "jax.numpy", "mlx": "mlx.core"}[library]
    compute = compute or (lambda x: norm(importlib.import_module(module), x))
    names = {"library": library, "algorithm": "pointwise", "domain": ModuleDomain("l2norm", dtypes=("fp32", "bf16"))}
    names |= {"vjp": lambda self, x, names: norm_with_vjp(x, names)} if library == "numpy" else {}
    return make(type("Norm", (ArrayAdapter,), {**names, "compute": lambda self, x: compute(x), **declared}), "mine")


@pytest.mark.parametrize("library", ["numpy", "mlx"])
def test_a_norm_and_its_gradients(library: str) -> None:
    lines = (f"{NORM} dtype=bf16", NORM, NORM.replace("law=oracle", "law=strides variant=strided"))
    assert verdicts(norm_of(library), *lines) == [Verdict.HOLDS] * len(lines)
    flat = norm_of(library, layout={"x": "B T H*K", "y": "B T H*K"})
    assert verdicts(flat, f"{NORM} backward=no") == [Verdict.BROKEN], "this norm is that of all heads together"


def test_a_wrong_dtype_shape_or_number_of_outputs_is_found() -> None:
    for compute, words in (
        (lambda x: norm(numpy, x).astype("float64"), "has dtype torch.float64, must have torch.float32"),
        (lambda x: norm(numpy, x)[..., :1], "has shape (2, 3, 2, 1), must have (2, 3, 2, 5)"),
        (lambda x: None, "is NoneType, must be a tensor"),
        (lambda x: (norm(numpy, x), x.x), "returned tuple, must return a tuple (y)"),
        (lambda x: {"y": norm(numpy, x)}, "TypeError: can't convert np.ndarray of type numpy.object_"),
    ):
        found = outcome(norm_of("numpy", compute), f"{NORM} backward=no")
        assert found.verdict is Verdict.BROKEN and words in found.findings[0].what, (words, found.findings)
    double = norm_of("numpy", vjp=lambda self, x, names: (norm(numpy, x), lambda cotangents: x.x.astype("float64")))
    found = outcome(double, NORM)
    assert "dx must be torch.float32 of shape (2, 3, 2, 5), got torch.float64" in found.findings[0].what


@pytest.mark.parametrize("library", ["numpy", "jax", "mlx"])
def test_every_array_has_the_numbers_of_its_tensor(library: str) -> None:
    same: Any = norm_of(library, lambda x: x.x)
    numbers = torch.tensor([0.0, -0.0, 1.5, -2.0, float("nan"), float("inf"), 3.0, 4.0]).reshape(1, 2, 2, 2)
    tensors = [numbers, numbers.transpose(1, 3), numbers[..., ::2], numbers[..., :1].expand(1, 2, 2, 3), numbers[:, :0]]
    tensors.append(torch.view_as_complex(numbers).conj().imag.unsqueeze(-1))  # torch negates these numbers where they are read
    assert tensors[-1].is_neg()
    for x in (x.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for x in tensors):
        y = same.run(Inputs(x=x, eps=1e-6))[0]
        assert y.dtype == x.dtype and torch.equal(
            y.float().view(torch.int32), x.resolve_neg().float().contiguous().view(torch.int32)
        )
        assert y.data_ptr() != x.data_ptr() or not x.numel()


def test_arrays_of_numpy_are_the_memory_of_the_call() -> None:
    seen: list[Any] = []
    adapter: Any = norm_of("numpy", lambda x: seen.append(x.x) or x.x)
    x = torch.zeros(1, 2, 4, 3).transpose(1, 2)
    adapter.run(Inputs(x=x, eps=1e-6))
    seen[0][...] = 1.0
    assert x.eq(1).all() and seen[0].strides == tuple(4 * step for step in x.stride())


def test_layouts_and_absent_tensors_reach_the_arrays() -> None:
    seen: list[Any] = []

    def compute(x: Inputs) -> Any:
        seen.append(x)
        return x.v, x.state

    layout = {"q": "K B*T", "state": "V K", "final_state": "V K"}
    adapter: Any = norm_of(
        "numpy", compute, domain=Domain(backward=False), algorithm="recurrent", layout=layout, absent={"state": 0.5}
    )
    tokens = {"q": torch.rand(1, 3, 1, 2), "k": torch.rand(1, 3, 1, 2), "v": torch.rand(1, 3, 2, 4)}
    gates = {"g": -torch.rand(1, 3, 2), "beta": torch.rand(1, 3, 2)}
    _, final = adapter.run(Inputs(**tokens, **gates, state=None, cu_seqlens=None, scale=None, output_final_state=True))
    assert (seen[0].q.shape, seen[0].state.shape, seen[0].cu_seqlens) == ((1, 2, 3), (1, 2, 4, 2), None)
    assert seen[0].q.flags.c_contiguous and numpy.array_equal(seen[0].q[0], tokens["q"][0, :, 0].mT)
    assert (final.shape, float(final.min())) == ((1, 2, 2, 4), 0.5)


def test_an_integer_that_jax_would_cut_is_refused() -> None:
    seen: list[Any] = []
    adapter: Any = norm_of("jax", lambda x: seen.append(x.cu_seqlens) or x.x)
    for last in (3, 2**40):
        x = Inputs(x=torch.zeros(1, 3, 1, 2), eps=1e-6, cu_seqlens=torch.tensor([0, last]))
        if last == 3:
            adapter.run(x)
        else:
            with pytest.raises(ValueError, match="JAX has no int64, and int32 cannot have all numbers of cu_seqlens"):
                adapter.run(x)
    assert (str(seen[0].dtype), seen[0].tolist()) == ("int32", [0, 3])


# ONNX


@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
def test_the_node_of_the_page(runtime: str, tmp_path: pathlib.Path) -> None:
    need("onnx", "onnx")
    need("onnxruntime", "onnx")
    for change, verdict in {(): Verdict.HOLDS, ("**heads", 'update_rule="delta", **heads'): Verdict.BROKEN}.items():
        adapter = example(tmp_path, "MyNode", *change)
        vars(adapter)["runtime"] = runtime
        lines = (f"{RULE} dtype={dtype} {more} backward=no" for dtype, more in (("bf16", "state=random"), ("fp32", "scale=half")))
        assert verdicts(adapter, *lines) == [verdict] * 2


class Model(OnnxAdapter):
    """The L2 norm of a model in a file."""

    model = "norm.onnx"
    algorithm = "pointwise"
    names = {"x": "numbers"}  # noqa: RUF012
    domain = ModuleDomain("l2norm", dtypes=("fp32",), backward=False)


def test_a_model_in_a_file(tmp_path: pathlib.Path) -> None:
    need("onnxruntime", "onnx")
    from onnx import TensorProto, helper, numpy_helper, save

    kind = type("Model", (Model,), {"folder": str(tmp_path)})
    with pytest.raises(AdapterError, match=f"there is no model norm.onnx in {tmp_path}"):
        make(kind, "mine")
    last, eps = (
        numpy_helper.from_array(numpy.array(value), name) for value, name in (([-1], "last"), (numpy.float32(1e-6), "eps"))
    )
    nodes = [
        helper.make_node("Mul", ["numbers", "numbers"], ["squares"]),
        helper.make_node("ReduceSum", ["squares", "last"], ["sum"]),
        helper.make_node("Add", ["sum", "eps"], ["more"]),
        helper.make_node("Sqrt", ["more"], ["root"]),
        helper.make_node("Div", ["numbers", "root"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "T", "H", "K"]) for name in ("numbers", "y")]
    graph = helper.make_graph(nodes, "norm", ports[:1], ports[1:], [last, eps])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "norm.onnx")
    adapter: Any = make(kind, "mine")
    assert verdicts(adapter, f"{NORM} backward=no") == [Verdict.HOLDS]
    assert adapter.run(Inputs(x=torch.zeros(2, 0, 1, 3), eps=1e-6))[0].shape == (2, 0, 1, 3)
    other = outcome(make(type("Other", (kind,), {"names": {}}), "mine"), f"{NORM} backward=no")
    assert "the model has no input x, it has numbers: `names` may rename them" in other.findings[0].what


# C libraries

SOURCE = """
#include <math.h>
#include <stdint.h>
#include <string.h>

void norm(const float *x, const int64_t *shape, const int64_t *step, const char *dtype, float *y, double eps) {
    float *out = y;
    for (int64_t b = 0; b < shape[0]; b++)
        for (int64_t t = 0; t < shape[1]; t++)
            for (int64_t h = 0; h < shape[2]; h++) {
                const float *row = x + b * step[0] + t * step[1] + h * step[2];
                double sum = strcmp(dtype, "fp32") ? NAN : eps;
                for (int64_t i = 0; i < shape[3]; i++) sum += row[i * step[3]] * row[i * step[3]];
                for (int64_t i = 0; i < shape[3]; i++) *out++ = row[i * step[3]] / sqrt(sum);
            }
}

void gradient(const float *x, const float *dy, float *dx, int64_t rows, int64_t T, int64_t H, int64_t K, double eps) {
    for (int64_t r = 0; r < rows * T * H; r++, x += K, dy += K, dx += K) {
        double sum = eps, dot = 0;
        for (int64_t i = 0; i < K; i++) sum += x[i] * x[i], dot += x[i] * dy[i];
        for (int64_t i = 0; i < K; i++) dx[i] = (dy[i] - x[i] * dot / sum) / sqrt(sum);
    }
}

int status(const int64_t *offsets, double scale, int64_t flag, const int64_t *numbers, const char *text) {
    return offsets ? (int)offsets[1] : !isnan(scale) ? 100 : flag != 1 ? 101 : numbers[1] != 7 ? 102 : text ? 103 : 0;
}

void fill(float *pool, const int64_t *shape, float *o) {
    for (int64_t i = 0; i < shape[0] * shape[1] * shape[2] * shape[3]; i++) pool[i] = 1;
    o[0] = 2;
}
"""


def compiled(source: str, file: pathlib.Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, cc or gcc: apt install gcc")
    file.with_suffix(".c").write_text(source)
    words = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(file.with_suffix(".c")), "-o", str(file), "-lm"]
    subprocess.run(words, check=True, capture_output=True)


def test_the_function_of_the_page(tmp_path: pathlib.Path) -> None:
    (text,) = (text for language, text in BLOCKS if language == "c")
    compiled(text, tmp_path / "libkernel.so")
    rule = RULE.replace(" value_heads=2", " value_heads=4")
    lines = (f"{rule} state=random backward=no", f"{rule} scale=half backward=no")
    mine = example(tmp_path, "MyLibrary")
    assert verdicts(mine, *lines) == [Verdict.HOLDS] * 2
    refused = f"law=history variant=refused{rule.removeprefix('law=oracle')} backward=no"  # a call between without a tensor
    assert verdicts(mine, *(f"{refused} seed={seed}" for seed in range(5))) == [Verdict.HOLDS] * 5
    x = Run.parse(lines[0].replace(" ", f" adapter={SPEC} ", 1)).example.case.inputs()
    with pytest.raises(ValueError, match=r"g must have T = 5 like q, got shape \(2, 4, 4\)"):
        mine.run(x.replaced(g=x.g[:, :4]))
    compiled(replaced(text, "h / (HV / H)", "h % H"), tmp_path / "libother.so")
    other = example(tmp_path, "MyLibrary", "libkernel", "libother")
    assert verdicts(other, f"{rule} backward=no") == [Verdict.BROKEN], "value heads in another order"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("c") / "libsome.so"
    compiled(SOURCE, file)
    return file


def in_c(library: pathlib.Path, function: str, arguments: str, **declared: Any) -> Any:
    words = {"library": str(library), "function": function, "arguments": arguments.split()}
    defaults = {"algorithm": "pointwise", "domain": ModuleDomain("l2norm", dtypes=("fp32",), backward=False)}
    return make(type("InC", (CLibrary,), {**defaults, **words, **declared}), "mine")


NORM_IN_C = "x x.shape x.strides x.dtype y eps"


def test_a_function_in_c_gets_strides_and_computes_gradients(library: pathlib.Path) -> None:
    words = {"backward": "gradient", "backward_arguments": ["x", "dy", "dx", "B", "T", "H", "K", "eps"]}
    adapter = in_c(library, "norm", NORM_IN_C, domain=ModuleDomain("l2norm", dtypes=("fp32",)), **words)
    views = [NORM.replace("law=oracle", f"law=strides variant={variant}") for variant in ("strided", "transposed", "expanded")]
    assert verdicts(adapter, NORM, *views) == [Verdict.HOLDS] * 4
    compiled(SOURCE.replace("row[i * step[3]]", "row[i]"), library.with_name("libother.so"))
    ignores = in_c(library.with_name("libother.so"), "norm", NORM_IN_C)
    assert verdicts(ignores, f"{NORM} backward=no", f"{views[0]} backward=no") == [Verdict.HOLDS, Verdict.BROKEN]


def test_words_of_arguments_and_the_status(library: pathlib.Path) -> None:
    adapter = in_c(library, "status", "cu_seqlens scale qk_norm pads activation x y", status=True)
    x = Inputs(x=torch.zeros(1, 3, 1, 2), scale=None, qk_norm=True, pads=(0, 7), activation=None, cu_seqlens=None)
    adapter.run(x)
    with pytest.raises(CError, match="status returned 103"):
        adapter.run(x.replaced(activation="silu"))
    with pytest.raises(CError, match="status returned 100"):
        adapter.run(x.replaced(scale=0.5))
    with pytest.raises(CError, match="status returned 3"):
        adapter.run(x.replaced(cu_seqlens=torch.tensor([0, 3])))
    with pytest.raises(
        ValueError, match=r"arguments must name tensors \(.* x y\), axes \(B T H K N\) and options .* of l2norm, got z"
    ):
        in_c(library, "status", "x y z").run(x)
    with pytest.raises(ValueError, match="the call has x, which `arguments` does not name"):
        in_c(library, "status", "y").run(x)


def test_a_function_in_c_updates_a_pool_in_place(library: pathlib.Path) -> None:
    adapter = in_c(library, "fill", "pool pool.shape o q k v g beta slots", algorithm="recurrent", domain=PoolDomain())
    tokens = {"q": torch.rand(1, 1, 1, 2), "k": torch.rand(1, 1, 1, 2), "v": torch.rand(1, 1, 1, 2)}
    gates = {"g": -torch.rand(1, 1, 1), "beta": torch.rand(1, 1, 1)}
    for pool in (torch.zeros(2, 1, 2, 2), torch.zeros(2, 2, 2, 1).transpose(1, 3)):
        x = Inputs(**tokens, **gates, pool=pool, slots=torch.tensor([1]), padding=-1, cu_seqlens=None)
        o, after = adapter.run(x)
        assert after is pool and pool.eq(1).all() and o[0, 0, 0, 0] == 2


# Declarations

FORWARD = ModuleDomain("l2norm", backward=False)
ARRAY = {"compute": lambda self, x: x.x, "library": "numpy", "domain": FORWARD, "algorithm": "pointwise"}
ONNX = {"model": "norm.onnx", "domain": FORWARD, "algorithm": "pointwise", "folder": "/"}
IN_C = {"library": "libm.so.6", "function": "sqrt", "arguments": ("x", "y"), "domain": FORWARD, "algorithm": "pointwise"}
WRONG: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "library must be one of jax, mlx, numpy, cupy, got 'tinygrad'": (ArrayAdapter, ARRAY, {"library": "tinygrad"}),
    "numpy has no gradients: its domain must have backward=False, or": (ArrayAdapter, ARRAY, {"domain": ModuleDomain("l2norm")}),
    "Mine has layouts = {}; did you mean layout?": (ArrayAdapter, ARRAY, {"layouts": {}}),
    "layout must have a value for each name, such as {'state': 'V K'}, got 'V K'": (ArrayAdapter, ARRAY, {"layout": "V K"}),
    "absent must have a value for each name, such as {'state': 0.0}, got ('x',)": (ArrayAdapter, ARRAY, {"absent": ("x",)}),
    "runtime must be one of onnxruntime, reference, got 'tensorrt'": (OnnxAdapter, ONNX, {"runtime": "tensorrt"}),
    "model must be a path, a model or node of onnx, or a method": (OnnxAdapter, ONNX, {"model": None}),
    "there is no model norm.onnx in /": (OnnxAdapter, ONNX, {}),
    "domain must have backward=False: a model has no gradients": (
        OnnxAdapter,
        ONNX,
        {"model": lambda self, x: None, "domain": ModuleDomain("l2norm")},
    ),
    "there is no library ./libm.so in /nowhere: compile it first": (CLibrary, IN_C, {"library": "./libm.so", "folder": "/nowhere"}),
    "the library libmine.so cannot be loaded: libmine.so: cannot open": (CLibrary, IN_C, {"library": "libmine.so"}),
    "the library libm.so.6 has no function gated_delta": (CLibrary, IN_C, {"function": "gated_delta"}),
    "function must be a name, got ''": (CLibrary, IN_C, {"function": ""}),
    "backward must be a name, got ''": (CLibrary, IN_C, {"domain": ModuleDomain("l2norm")}),
    "arguments must be a list of words, one for each argument, got 'x y'": (CLibrary, IN_C, {"arguments": "x y"}),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_declaration_is_refused_in_one_line(words: str) -> None:
    kind, right, change = WRONG[words]
    need({ArrayAdapter: "ml_dtypes", OnnxAdapter: "onnxruntime"}.get(kind, "torch"), "arrays" if kind is ArrayAdapter else "onnx")
    with pytest.raises(AdapterError) as error:
        make(type("Mine", (kind,), {**right, **change}), "mine.py:Mine")
    assert str(error.value).startswith(f"adapter mine.py:Mine: {words}") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "right", "words"),
    [
        (ArrayAdapter, {**ARRAY, "library": "mlx"}, "mlx needs mlx, which is not installed: pip install 'mlx[cpu]'"),
        (OnnxAdapter, ONNX, "runtime onnxruntime needs onnx, which is not installed: pip install onnx"),
    ],
)
def test_a_missing_package_is_named_with_its_command(kind: Any, right: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AdapterError, match=f"adapter mine: {re.escape(words)}"):
        make(type("Mine", (kind,), dict(right)), "mine")
