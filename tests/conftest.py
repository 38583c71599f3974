"""What the toolkit's own tests share.

What imports torch is imported inside functions: the process of pytest-xdist that hands out tests needs none of it, and no test
begins before that process is ready.
"""

import gc
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from verify.findings.store import Store
    from verify.process.worker import Worker

# A collection visits the objects that tests made. With Python's default it took 0.5 of 10.7 s in three files of tests.
gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session")
def worker(gdn_device: str, gdn_worker: "Worker") -> Iterator["Worker"]:
    """One isolated worker for all tests of this process: it imports torch and each released kernel once, which takes seconds.

    On a CPU this is the plugin's worker: a second one would import everything again.
    """
    from verify.process.worker import Worker

    if gdn_device == "cpu":
        yield gdn_worker
        return
    with Worker() as one:
        yield one


@pytest.fixture(scope="module")
def workers() -> Iterator[list["Worker"]]:
    """Two workers for the checks of a module."""
    from verify.process.worker import Worker

    with Worker(20.0) as one, Worker(20.0) as other:
        yield [one, other]


@pytest.fixture
def store(tmp_path: pathlib.Path) -> "Store":
    """A store of findings of its own."""
    from verify.findings.store import Store

    return Store(tmp_path / "findings")


def fetched(name: str, config: pytest.Config) -> pathlib.Path:
    """The files of a library, in pytest's cache. Skips where they are not there and may not or cannot be downloaded."""
    from tests.downloads import OPTION, lacking
    from verify.adapters.libraries import LIBRARIES

    assert config.cache is not None
    folder = config.cache.mkdir("libraries") / name
    if reason := lacking(LIBRARIES[name], folder, download=config.getoption(OPTION)):
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def sglang_files(pytestconfig: pytest.Config) -> pathlib.Path:
    """A folder for --path that holds SGLang."""
    return fetched("sglang", pytestconfig)


@pytest.fixture(scope="session")
def vllm_files(pytestconfig: pytest.Config) -> pathlib.Path:
    """The same of vLLM."""
    return fetched("vllm", pytestconfig)


@pytest.fixture(scope="session")
def flashinfer_files(pytestconfig: pytest.Config) -> pathlib.Path:
    """The same of FlashInfer."""
    return fetched("flashinfer", pytestconfig)


@pytest.fixture(scope="session")
def torchtitan_files(pytestconfig: pytest.Config) -> pathlib.Path:
    """The same of torchtitan."""
    return fetched("torchtitan", pytestconfig)


@pytest.fixture(scope="session")
def nemo_files(pytestconfig: pytest.Config) -> pathlib.Path:
    """The same of NeMo AutoModel."""
    return fetched("nemo_automodel", pytestconfig)


@pytest.fixture(scope="session")
def library_workers() -> Iterator[dict[str, "Worker"]]:
    """A worker for each serving library: importing one takes seconds."""
    from verify.process.worker import Worker

    with Worker() as sglang, Worker() as vllm:
        yield {"sglang": sglang, "vllm": vllm}


@pytest.fixture(scope="module")
def sglang_worker(sglang_files: pathlib.Path, library_workers: dict[str, "Worker"]) -> Iterator["Worker"]:
    """A worker that finds SGLang where --path would put it."""
    _need("einops", "msgspec")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(sglang_files))
        yield library_workers["sglang"]


@pytest.fixture(scope="module")
def vllm_worker(vllm_files: pathlib.Path, library_workers: dict[str, "Worker"]) -> Iterator["Worker"]:
    """A worker that finds vLLM where --path would put it."""
    _need("einops", "regex", "transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(vllm_files))
        yield library_workers["vllm"]


def _need(*modules: str) -> None:
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install {name}")


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow cases, so that `-m "not slow"` leaves them out, and put tests that share a slow fixture before all others.

    Of a test that is `slow_after_first`, all cases but the first are slow. A test is slow too if it needs a fixture that its module
    names in SLOW_FIXTURES. So almost every module keeps quick tests. Processes of pytest-xdist take the last tests of each other,
    and would each make the fixture of a module whose tests they divide.
    """
    met = set[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if _slow_fixtures(item) or (item.get_closest_marker("slow_after_first") and name in met):
            item.add_marker(pytest.mark.slow)
        met.add(name)
    items.sort(key=lambda item: not _slow_fixtures(item))


def _slow_fixtures(item: pytest.Item) -> bool:
    """Whether a test needs a fixture that its module names in SLOW_FIXTURES."""
    return bool({*getattr(item, "fixturenames", ())} & {*getattr(getattr(item, "module", None), "SLOW_FIXTURES", ())})


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are: `gpu` needs one, `gpu(2)` two."""
    from verify.gpu import device as devices

    needed = max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), default=0)
    if devices.gpus() < needed:
        pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}, torch sees {devices.gpus() or 'none'}")
