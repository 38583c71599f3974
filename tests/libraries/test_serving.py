"""Serving libraries: their modules are imported whether or not their requirements are there, and what is missing is one line."""

import dataclasses
import importlib
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from verify.adapters import libraries, packages, serving, stubs
from verify.adapters.libraries import MANIFEST, Library
from verify.adapters.loader import check_requirements, load
from verify.adapters.registry import AdapterError

ORCHARD = Library(
    "orchard",
    "orchard-dist",
    "1.2.3",
    files=("orchard/*.py",),
    needed=("orchard/trees/apple.py",),
    gates=("orchard.utils",),
)
FILES = {
    "__init__.py": "import not_installed_at_all",
    "trees/__init__.py": "raise RuntimeError('the package runs')",
    "trees/apple.py": "from orchard.utils import is_ripe, pick\nfrom orchard.trees.pear import PEAR\nRIPE = is_ripe()",
    "trees/pear.py": "PEAR = 'pear'",
    "utils/__init__.py": "from not_installed_at_all import is_ripe, pick",
    "utils/baskets.py": "BASKETS = 2",
    "astray.py": "from orchard.trees.pear import QUINCE",
    "raising.py": "from orchard.utils import pick\n@pick\ndef apple(): pass",
}


def test_a_module_is_found_where_an_older_release_has_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = (("orchard.new.one", "orchard.middle.one", "orchard.old.one"), ("orchard.new", "orchard.old"))
    library = dataclasses.replace(ORCHARD, needed=("orchard/old/one.py",), moved=moved)
    forget()
    write(tmp_path, {"old/one.py": "def rule(q, k): ...", "old/two.py": ""})
    monkeypatch.setattr(sys, "path", [str(tmp_path), *without_orchards()])
    importlib.invalidate_caches()
    monkeypatch.setitem(libraries.LIBRARIES, "orchard", library)
    assert [library.home(f"orchard.{name}") for name in ("new.one", "new.two", "new.six", "other")] == [
        *("orchard.old.one", "orchard.old.two", "orchard.new.six", "orchard.other")
    ]
    assert [serving.takes(f"orchard.new.one:{rule}", "beta") for rule in ("rule", "not_there")] == [False, True]
    assert serving.takes("orchard.new.one:rule", "k") and serving.takes("orchard.new.six:rule", "k")
    write(tmp_path, {"middle/one.py": "def rule(q, beta): ..."})
    assert library.home("orchard.new.one") == "orchard.middle.one"
    assert serving.takes("orchard.new.one:rule", "beta")


@pytest.fixture
def orchard(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder with a library whose packages cannot be imported, and which is on sys.path. Leaves nothing of it behind."""
    folder = tmp_path / "site"
    write(folder, FILES)
    monkeypatch.setitem(libraries.LIBRARIES, "orchard", ORCHARD)
    monkeypatch.setitem(libraries.BY_DISTRIBUTION, "orchard-dist", ORCHARD)
    monkeypatch.setitem(stubs.STUBS, "orchard", {"orchard.utils": {"is_ripe": lambda: lambda: "stub"}})
    monkeypatch.setattr(sys, "path", [*without_orchards(), str(folder)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(serving, "_prepared", {})
    monkeypatch.chdir(tmp_path)
    forget()
    importlib.invalidate_caches()
    yield folder
    forget()


def without_orchards() -> list[str]:
    """sys.path without libraries of this name. A verb with --path that another test ran in this process has left its own there."""
    return [entry for entry in sys.path if not pathlib.Path(entry, "orchard").exists()]


def forget() -> None:
    """Nobody has imported an orchard, or looked up what is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "orchard"]:
        del sys.modules[name]
    packages.installed.cache_clear()


def write(folder: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / "orchard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def install(folder: pathlib.Path, *requirements: str) -> None:
    """Write what pip leaves beside an installed package."""
    lines = ["Metadata-Version: 2.1", "Name: orchard-dist", "Version: 1.2.4"]
    (folder / "orchard_dist-1.2.4.dist-info").mkdir()
    (folder / "orchard_dist-1.2.4.dist-info" / "METADATA").write_text(
        "\n".join([*lines, *(f"Requires-Dist: {text}" for text in requirements)]) + "\n"
    )


WHOLE = {"__init__.py": "", "trees/__init__.py": "WHOLE = True", "utils/__init__.py": "is_ripe = pick = lambda: 'own'"}


def test_a_library_without_its_requirements_is_imported_without_its_packages(orchard: pathlib.Path) -> None:
    apple = serving.module("orchard.trees.apple")
    assert (apple.RIPE, apple.PEAR) == ("stub", "pear")
    assert apple.__file__ == str(orchard / "orchard" / "trees" / "apple.py")
    assert serving.module("orchard.utils.baskets").BASKETS == 2  # what a stub does not replace


def test_a_whole_library_is_imported_as_it_is(orchard: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, serving.Finder)])
    write(orchard, WHOLE)
    install(orchard, "pytest", "not-installed-at-all; extra == 'more'")
    assert serving.module("orchard.trees.apple").RIPE == "own"
    assert sys.modules["orchard.trees"].WHOLE
    assert not any(isinstance(finder, serving.Finder) for finder in sys.meta_path)


@pytest.mark.parametrize("reason", ["unpacked", "a requirement is missing", "fetched", "the host cannot use it"])
def test_a_library_that_is_not_whole_gets_stubs(orchard: pathlib.Path, reason: str) -> None:
    write(orchard, {**WHOLE, **({"utils/__init__.py": "x = 1 / 0"} if reason == "the host cannot use it" else {})})
    if reason != "unpacked":
        install(orchard, "not-installed-at-all" if reason == "a requirement is missing" else "pytest")
    if reason == "fetched":
        (orchard / MANIFEST).write_text("{}")
    assert serving.module("orchard.trees.apple").RIPE == "stub"
    assert not hasattr(sys.modules["orchard.trees"], "WHOLE")


def test_a_library_that_somebody_imported_stays_as_it_is(orchard: pathlib.Path) -> None:
    write(orchard, WHOLE)
    importlib.import_module("orchard.trees")
    assert serving.module("orchard.trees.apple").RIPE == "own"


def test_a_name_that_a_stub_lacks_cannot_be_used(orchard: pathlib.Path) -> None:
    pick = serving.module("orchard.trees.apple").pick
    with pytest.raises(serving.Unavailable, match=r"orchard\.utils\.pick is a stub: orchard is here without its requirements"):
        pick()
    assert issubclass(type("Picker", (pick,), {}), pick)
    assert not hasattr(sys.modules["orchard.utils"], "__wrapped__"), "a module that has every name is a builtin for Triton"


def test_a_stub_needs_no_files_around_it(orchard: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stubs.STUBS, "orchard", {"orchard.cellar.cider": {"AGE": lambda: 3}})
    assert serving.module("orchard.cellar.cider").AGE == 3
    with pytest.raises(ImportError, match=r"^there is no orchard\.cellar\.perry in orchard"):
        serving.module("orchard.cellar.perry")


def test_only_names_of_the_library_are_found(orchard: pathlib.Path) -> None:
    finder = serving.Finder("orchard", str(orchard), {})
    assert finder.find_spec("orchard") is not None
    for name in ("json", "orchardist", "trees", "trees.orchard"):
        assert finder.find_spec(name, [str(orchard / "orchard")] if "." in name else None) is None


def test_a_package_may_stay_as_it_is(orchard: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(orchard, {"trees/__init__.py": "WHOLE = True"})
    monkeypatch.setitem(libraries.LIBRARIES, "orchard", dataclasses.replace(ORCHARD, whole=("orchard.trees",)))
    assert serving.module("orchard.trees").WHOLE
    assert serving.module("orchard.trees.apple").RIPE == "stub"


@pytest.mark.parametrize("there", [False, True])
def test_a_requirement_is_replaced_where_it_is_not_installed(
    there: bool,  # noqa: FBT001 - a parameter
    orchard: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(orchard, {"trees/pear.py": "from ladders import STEPS"})
    if there:
        (orchard / "ladders.py").write_text("STEPS = 'installed'")
    monkeypatch.setitem(libraries.LIBRARIES, "orchard", dataclasses.replace(ORCHARD, stands_for=("ladders",)))
    monkeypatch.setitem(stubs.STUBS, "ladders", {"ladders": {"STEPS": lambda: "stub"}})
    steps = serving.module("orchard.trees.pear").STEPS
    del sys.modules["ladders"]
    assert steps == ("installed" if there else "stub")


def test_a_module_beside_a_folder_of_its_name_is_no_package(orchard: pathlib.Path) -> None:
    write(orchard, {"trees/pear/seeds.txt": ""})
    assert serving.module("orchard.trees.pear").PEAR == "pear"


def test_names_are_looked_up(orchard: pathlib.Path) -> None:
    found = serving.names({"orchard.trees.pear": ("PEAR",), "orchard.utils.baskets": ("BASKETS",)})
    assert vars(found) == {"PEAR": "pear", "BASKETS": 2}


def test_what_another_release_lacks_is_one_line(orchard: pathlib.Path) -> None:
    install(orchard, "not-installed-at-all")
    line = rf"in orchard 1\.2\.4 under {orchard}: the release that we tested is 1\.2\.3$"
    with pytest.raises(ImportError, match=rf"^there is no orchard\.trees\.plum {line}"):
        serving.module("orchard.trees.plum")
    with pytest.raises(ImportError, match=rf"^there is no orchard\.trees\.pear\.plum {line}"):
        serving.names({"orchard.trees.pear": ("PEAR", "plum")})
    with pytest.raises(ImportError, match=r"^importing orchard\.astray from .*: ImportError: cannot import name 'QUINCE'"):
        serving.module("orchard.astray")
    with pytest.raises(ImportError, match=r"^importing orchard\.raising from .*: Unavailable: orchard\.utils\.pick is a stub"):
        serving.module("orchard.raising")


def test_what_fetch_does_not_unpack_is_said_to_be_missing(orchard: pathlib.Path) -> None:
    write(orchard, {"_version.py": "__version__ = version = '1.2.3'\n"})
    (orchard / MANIFEST).write_text("{}")
    line = f"in orchard 1.2.3 under {orchard}: `gdn-verify fetch` has only what runs without its requirements, "
    with pytest.raises(ImportError, match=re.escape(f"there is no orchard.trees.plum {line}pip install 'orchard-dist==1.2.3'")):
        serving.module("orchard.trees.plum")


@pytest.mark.parametrize(("missing", "hint"), [("not_installed_either", ""), ("msgspec", ": pip install msgspec")])
def test_a_requirement_of_one_module_is_named(
    orchard: pathlib.Path, monkeypatch: pytest.MonkeyPatch, missing: str, hint: str
) -> None:
    write(orchard, {"broken.py": f"import {missing}"})
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    line = f"orchard.broken needs the module {missing}, which is not installed{hint}"
    with pytest.raises(ImportError, match=rf"^{re.escape(line)}$"):
        serving.module("orchard.broken")


def test_the_extra_of_the_project_has_what_the_hints_name() -> None:
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [Requirement(text).name for text in project["optional-dependencies"]["serving"]] == [*serving.EXTRAS]


def test_a_module_of_no_library_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^name must be a module of sglang.*, got 'json\.decoder'$"):
        serving.module("json.decoder")


def test_a_library_that_is_not_there_is_one_line_of_its_adapter(orchard: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (orchard / "orchard").rename(tmp_path / "elsewhere")
    (orchard / "orchard" / "python").mkdir(parents=True)  # as a checkout has it: a folder of that name which is no package
    (tmp_path / "mine.py").write_text(
        "from verify import Adapter\nfrom verify.adapters.serving import module\n\n"
        "class Mine(Adapter):\n"
        "    def __init__(self):\n        module('orchard.trees.apple')\n"
        "    def run(self, x):\n        return x.v, x.state\n"
    )
    with pytest.raises(AdapterError) as error:
        load(f"{tmp_path / 'mine.py'}:Mine")
    assert str(error.value).endswith(
        ": there is no orchard: run `gdn-verify fetch orchard`, or pip install --no-deps 'orchard-dist==1.2.3', "
        "or name a folder that holds its package with --path"
    )
    assert packages.installed("orchard-dist") is None


def test_requirements_of_an_adapter_may_name_the_library(orchard: pathlib.Path, tmp_path: pathlib.Path) -> None:
    check_requirements("mine", {"orchard-dist": "1.2.3"})  # as in a checkout, which says no version
    install(orchard)
    check_requirements("mine", {"orchard-dist": "1.2.3"})
    packages.installed.cache_clear()
    check_requirements("mine", {"orchard-dist": "1.2.4"})
    with pytest.raises(AdapterError, match=r"^adapter mine needs orchard-dist >= 1\.2\.5, got 1\.2\.4"):
        check_requirements("mine", {"orchard-dist": "1.2.5"})
    (orchard / "orchard").rename(tmp_path / "elsewhere")
    importlib.invalidate_caches()
    packages.installed.cache_clear()
    with pytest.raises(AdapterError, match=r"^adapter mine: there is no orchard: run `gdn-verify fetch orchard`, or pip install"):
        check_requirements("mine", {"orchard-dist": "1.2.3"})


def test_what_fetch_unpacked_is_found_last(orchard: pathlib.Path, tmp_path: pathlib.Path) -> None:
    fetched = tmp_path / ORCHARD.fetched
    write(fetched, {**FILES, "trees/pear.py": "PEAR = 'fetched'", "_version.py": "__version__ = version = '1.2.5'\n"})
    assert ORCHARD.folder() == str(orchard)
    (orchard / "orchard").rename(tmp_path / "elsewhere")
    importlib.invalidate_caches()
    assert packages.installed("orchard-dist") == "1.2.5"
    assert serving.module("orchard.trees.apple").PEAR == "fetched"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch saw a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def answers(library: str, place: str, *functions: str) -> list[object]:
    values = stubs.STUBS[library][place]
    return [values[name]()() for name in functions]


ASKED = ("is_cuda", "get_device_sm", "is_sm90_supported", "is_sm100_supported", "is_gfx95_supported", "is_cpu", "is_npu")


@pytest.mark.usefixtures("hopper")
def test_stubs_answer_for_the_gpu() -> None:
    assert answers("sglang", "sglang.srt.utils", *ASKED) == [True, 90, True, False, False, False, False]
    assert answers("sglang", "sglang.kernels.jit.utils", "is_arch_support_pdl") == [True]


def test_stubs_answer_for_a_cuda_that_is_too_old(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    assert answers("sglang", "sglang.srt.utils.common", *ASKED)[:3] == [True, 90, False]


def test_stubs_answer_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert answers("sglang", "sglang.srt.utils", *ASKED) == [False, 0, False, False, False, False, False]
    assert answers("sglang", "sglang.kernels.jit.utils", "is_arch_support_pdl") == [False]
    utilities = {name: value() for name, value in stubs.STUBS["sglang"]["sglang.srt.utils"].items()}
    assert utilities["torch_release"] == Version(torch.__version__).release
    assert [utilities["cdiv"](n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [utilities["next_power_of_2"](n) for n in (0, 1, 3, 4, 5)] == [1, 1, 4, 4, 8]
