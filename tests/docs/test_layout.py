"""The floors of the house: who may import whom, and what nobody may do. Read off the `ast` of every file."""

import ast
import functools
import graphlib
import pathlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALLOWED = {
    "oracles": {"oracles"},
    "properties": {"oracles", "properties"},
    "verify": {"oracles", "properties", "verify"},
    "benchmarks": {"oracles", "properties", "verify", "benchmarks"},
    "tests": {"oracles", "properties", "verify", "benchmarks", "tests"},
}
FLOORS = set(ALLOWED)
LIBRARIES = {
    "oracles": {"torch"},
    "properties": {"torch", "hypothesis"},
    "verify": {
        *(
            "torch",
            "hypothesis",
            "coverage",
            "numpy",
            "pytest",
            "packaging",
            "rich",
            "triton",
            "fla",
            "jinja2",
            "matplotlib",
            "msgspec",
            "shtab",
            "junitparser",
        ),
        "gdn_verify",  # ours, beside the folders: it has a name that no other module has
    },
}
CALLS = ("import_module", "__import__", "eval", "exec", "compile", "load")
SOME_CALL = re.compile(rf"\b(?:{'|'.join(CALLS)})\s*\(")
ADAPTED = {
    "cupy",
    "flashinfer",
    "jax",
    "ml_dtypes",
    "mlx",
    "onnx",
    "onnxruntime",
    "openvino",
    "sglang",
    "transformers",
    "vllm",
}  # besides, what adapters alone may import
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
FILES = sorted(path.relative_to(ROOT) for folder in ALLOWED for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(source: str) -> tuple[list[ast.AST], frozenset[ast.AST]]:
    """The imports and CALLS of a file, and what of it is for types alone: all that these tests look at, found in one walk."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree) if SOME_CALL.search(source) else statements(tree))
    typing = (node for node in nodes if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING")
    kept = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) or called(node) in CALLS]
    return kept, frozenset(inner for node in typing for inner in ast.walk(node))


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """The statements of a block and of the blocks inside it, without the expressions, which are most nodes of a file."""
    for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(block, inner, ()):
            yield statement
            yield from statements(statement)


def imports(nodes: Iterable[ast.AST], path: pathlib.Path) -> list[tuple[int, str]]:
    """Every module that these nodes of a file import, with the line; relative ones in full."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parts[: len(path.parts) - node.level]) if node.level else ""
            base = ".".join(part for part in (package, node.module or "") if part)
            found += [(node.lineno, base)] if base else [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.append((node.lineno, argument.value))
    return found


def called(node: ast.AST) -> str:
    """The name of the function that a node calls, if it is a call."""
    function = getattr(node, "func", None)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def wrong_imports(source: str, path: pathlib.Path) -> list[str]:
    """The imports of a file that go up the house, or to a library that its floor does without."""
    folder, wrong = path.parts[0], []
    for line, name in imports(parsed(source)[0], path):
        top = name.partition(".")[0]
        if top in FLOORS:
            if top not in ALLOWED[folder]:
                wrong.append(f"{path}:{line} imports {name}")
        elif path.parts[:2] == ("verify", "adapters") and top in ADAPTED:
            continue
        elif top not in sys.stdlib_module_names and top not in LIBRARIES.get(folder, {top}):
            wrong.append(f"{path}:{line} imports {name}, which {folder}/ does without")
    return wrong


def forbidden_calls(source: str, path: pathlib.Path) -> list[str]:
    """Calls that would run data as code: pickle, marshal, eval, exec, torch.load."""
    found, (nodes, _) = [], parsed(source)
    for node in nodes:
        if isinstance(node, ast.Call):
            owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
            name = called(node)
            if (name in ("eval", "exec", "compile") and not owner) or (owner, name) == ("torch", "load"):
                found.append(f"{path}:{node.lineno} calls {name}")
    banned = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
    found += [f"{path}:{line} imports {name}" for line, name in imports(nodes, path) if name.split(".")[0] in banned]
    return found


def test_imports_go_down_the_house_only() -> None:
    assert {path.parts[0] for path in FILES} >= {*LIBRARIES, "tests"}, "files of each part are looked at"
    assert [wrong for path in FILES for wrong in wrong_imports((ROOT / path).read_text(encoding="utf-8"), path)] == []


def test_formulas_are_tested_without_what_runs_implementations() -> None:
    here = [path for path in FILES if path.parts[:2] == ("tests", "formulas")]
    assert len(here) > 30
    found = {path: imports(parsed((ROOT / path).read_text(encoding="utf-8"))[0], path) for path in here}
    assert [f"{path}:{line}" for path, names in found.items() for line, name in names if name.split(".")[0] == "verify"] == []


def test_data_are_never_run_as_code() -> None:
    found = {path: forbidden_calls((ROOT / path).read_text(encoding="utf-8"), path) for path in FILES if path.parts[0] in LIBRARIES}
    grid = pathlib.Path("verify/interpreter/grid.py")  # it runs the kernels' own source, as importing them does
    assert found[grid], "the exception in this test is not needed any more"
    found[grid] = [call for call in found[grid] if call.split()[-1] not in ("compile", "exec", "eval")]
    assert [call for calls in found.values() for call in calls] == []


def names_of_modules() -> dict[str, pathlib.Path]:
    """The modules of the project's own packages, by their dotted names."""
    ours = (path for path in FILES if path.parts[0] in LIBRARIES)
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in ours}


def arrows(source: str, path: pathlib.Path, names: Collection[str]) -> set[str]:
    """The modules of ours that a file imports when it runs; what is imported for types alone is none."""
    (nodes, for_types), found = parsed(source), set[str]()
    for node in nodes:
        if node in for_types or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        members = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        bases = [name for _, name in imports([node], path)]
        whole = [name for name in (*members, *bases) if name in names]
        found.update(name for name in whole if not any(other.startswith(f"{name}.") for other in whole))
    return found


def circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Names that lead from one to the next and back to the first; none if there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def upwards(graph: Mapping[str, Collection[str]], order: Sequence[str]) -> list[str]:
    """The imports between rooms that go up the order, which begins at the top."""
    number = {room: place for place, room in enumerate(order)}

    def place(name: str) -> int | None:
        parts = name.split(".")
        return number.get(".".join(parts[:2]))

    pairs = ((name, other, place(name), place(other)) for name, others in graph.items() for other in others)
    return [f"{name} imports {other}" for name, other, one, two in pairs if one is not None and two is not None and one > two]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    names = names_of_modules()
    return {name: arrows((ROOT / path).read_text(encoding="utf-8"), path, names) - {name} for name, path in names.items()}


@pytest.mark.slow
def test_no_import_goes_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert circle(graph) == []
    assert circle({**graph, "oracles.layer": {*graph["oracles.layer"], "oracles.operations"}}) != []


def test_rooms_import_upwards_in_the_map_only(graph: dict[str, set[str]]) -> None:
    order = [
        name.rstrip("/").removesuffix(".py").replace("/", ".") for name in re.findall(r"^\| `(\w+/[\w.]+/?)` \|", MAP, re.MULTILINE)
    ]
    rooms = {".".join(name.split(".")[:2]) for name in names_of_modules() if "." in name} - {"verify.__main__"}
    assert sorted(order) == sorted(rooms)
    assert upwards(graph, order[::-1]) == [], "the map begins at the bottom"
    assert upwards({"verify.process.worker": {"verify.cli.main"}}, order[::-1]) == ["verify.process.worker imports verify.cli.main"]


def test_a_newcomer_sees_at_most_fourteen_things_in_verify() -> None:
    names = [path.name for path in (ROOT / "verify").iterdir() if path.name not in ("__pycache__", "__init__.py", "py.typed")]
    assert len(names) <= 14, names


def test_every_floor_has_files_and_what_is_installed_has_types() -> None:
    assert {path.parts[0] for path in FILES} >= {"oracles", "properties", "verify", "tests"}
    assert [folder for folder in LIBRARIES if not (ROOT / folder / "py.typed").exists()] == []


def test_planted_wrong_import_is_seen() -> None:
    for path, source in [
        ("oracles/x.py", "import properties.laws.law"),
        ("oracles/x.py", "from verify.execution.judge import Finding"),
        ("oracles/x.py", "def f():\n    from tests import right"),
        ("oracles/x.py", "if True:\n    import verify as v"),
        ("oracles/x.py", "import hypothesis"),
        ("properties/x.py", "from verify import worker"),
        ("properties/x.py", "import importlib\nimportlib.import_module('verify.cli.main')"),
        ("properties/x.py", "import fla"),
        ("verify/x.py", "from tests.right import Chunkwise"),
        ("verify/adapters/x.py", "from ...tests import right"),
        ("verify/x.py", "import transformers"),
        ("verify/x.py", "import benchmarks.speed"),
        ("benchmarks/x.py", "from tests import right"),
    ]:
        assert wrong_imports(source, pathlib.Path(path)), source


def test_right_import_is_let_pass() -> None:
    for path, source in [
        (
            "verify/x.py",
            "from properties.rules.case import Case\nfrom properties import laws\nfrom . import judge\nimport os, torch",
        ),
        ("verify/adapters/x.py", "from ..base import Adapter\nimport fla, transformers"),
        ("tests/x.py", "import verify, tests.right, transformers"),
        ("tests/x.py", "from benchmarks import records"),
    ]:
        assert wrong_imports(source, pathlib.Path(path)) == [], path


def test_planted_way_to_run_data_is_seen() -> None:
    for source in [
        "import pickle",
        "from marshal import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "def f(s):\n    exec(s)",
    ]:
        assert forbidden_calls(source, pathlib.Path("verify/x.py")), source


def test_plugin_imports_nothing_heavy_until_it_is_used() -> None:
    path = ROOT / "verify" / "cli" / "pytest_plugin.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.partition(".")[0] for _, name in imports(top, path)}
    assert names <= set(sys.stdlib_module_names) | {"pytest", "gdn_verify"}
