"""The pytest plugin: each law is a test item. In suites that do not use `gdn_law` it does nothing and imports nothing heavy.

    @pytest.mark.gdn_adapter("my_kernel.py:MyKernel")
    def test_my_kernel(gdn_law):
        gdn_law.assert_holds()

gives one test item for each law and adapter, under `pytest` and under `pytest -n auto`.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

from gdn_verify import Shadowed, check_names

if TYPE_CHECKING:
    from verify.process.worker import Worker


@dataclasses.dataclass(frozen=True)
class LawItem:
    """One law checked on one adapter, as one test."""

    adapter: str
    law: str
    profile: str
    seed: int
    worker: "Worker"
    findings: str
    device: str = "cpu"
    remembers: bool = False

    def assert_holds(self) -> None:
        """Fail with the report if the law is broken or undecided; skip with the reason if it is unsupported."""
        __tracebackhide__ = True
        from verify.engine.check import Check
        from verify.engine.profiles import PROFILES
        from verify.engine.state import Settings
        from verify.findings import report as text
        from verify.findings.regressions import Examples
        from verify.findings.store import Store
        from verify.process.choices import NoInterpreter
        from verify.process.outcome import Verdict
        from verify.reach import report as reach_report

        store, examples = Store(self.findings), Examples(self.findings, asked=self.remembers)
        tune = str(self.seed) if self.device == "cuda" else ""
        settings = Settings(self.adapter, [self.law], PROFILES[self.profile], self.seed, self.device, tune)
        with Check(settings, [self.worker], store, examples=examples) as check:
            try:
                warning = check.warning()
            except NoInterpreter as error:
                pytest.fail(str(error), pytrace=False)
            (report,) = check.run()
        looked_at = [f"looked at: up to {reach_report.looked_at(report.reach)}"] if report.reach else []
        for line in (*report.known, *looked_at, *filter(None, (warning, store.trouble, examples.trouble))):
            print(line)
        if report.verdict is Verdict.BROKEN:
            pytest.fail(text.failure(report), pytrace=False)
        if report.verdict is Verdict.UNKNOWN:
            pytest.fail("\n".join([text.law_line(report), text.fault_notice([report])]).rstrip(), pytrace=False)
        if report.verdict is Verdict.UNSUPPORTED:
            pytest.skip(f"{self.law}: {report.reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("gdn-verify", "laws of kernels and parallel paths as test items (gdn_law)")
    group.addoption(
        "--gdn-adapter",
        action="append",
        default=[],
        metavar="ADAPTER",
        help="check this adapter instead of the marked ones (may be repeated)",
    )
    group.addoption("--gdn-law", action="append", default=[], metavar="LAW", help="check only this law (may be repeated)")
    group.addoption(
        "--gdn-profile", default="quick", metavar="PROFILE", help="cases for each law: least, few, quick, ci, gpu or soak"
    )
    group.addoption(
        "--gdn-device", choices=("cpu", "cuda"), help="where kernels run (default: cuda if there is a GPU, else cpu, interpreted)"
    )
    group.addoption(
        "--gdn-interpreter",
        choices=("grid", "sequential"),
        default="grid",
        help="how Triton kernels run without a GPU: all programs together, which detects races (grid, the default), or one after "
        "another (sequential)",
    )
    group.addoption("--gdn-seed", default=0, type=int, metavar="SEED", help="seed of the cases (default 0)")
    group.addoption(
        "--gdn-examples",
        action="store_true",
        help="first run the lines that failed in earlier checks (without this option, results do not depend on stored lines)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker gdn_adapter."""
    config.addinivalue_line(
        "markers",
        "gdn_adapter(*names, profile=..., laws=...): the adapters that the gdn_law items of a test check, the largest profile, "
        "and the names of laws, if not all of --gdn-law",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that use gdn_law with each pair of adapter and law. Bad options are a UsageError before anything runs."""
    if "gdn_law" not in metafunc.fixturenames:
        return
    try:
        check_names()
    except Shadowed as error:
        raise pytest.UsageError(f"gdn-verify: {error}") from None
    _import_once()
    from properties.books import book_for
    from verify.adapters.registry import AdapterError, check_spec
    from verify.engine.profiles import PROFILES

    config = metafunc.config
    marks = list(metafunc.definition.iter_markers("gdn_adapter"))
    # The laws of a mark apply to the adapters of the same mark. Adapters named by --gdn-adapter get the laws that all marks share.
    asked: list[tuple[str, list[pytest.Mark]]] = [(name, [mark]) for mark in marks for name in mark.args]
    asked = [(name, marks) for name in config.getoption("--gdn-adapter")] or asked
    if not asked:
        raise pytest.UsageError(f"{metafunc.function.__name__} uses gdn_law: mark it gdn_adapter(...) or pass --gdn-adapter")
    try:
        laws = [name for name in config.getoption("--gdn-law") if book_for(name, None)]
        for adapter, _ in asked:
            check_spec(adapter)
        if config.getoption("--gdn-profile") not in PROFILES:
            raise ValueError(f"--gdn-profile must be one of {', '.join(PROFILES)}, got {config.getoption('--gdn-profile')!r}")
        for keywords in (mark.kwargs for mark in marks):
            named = keywords.get("laws", ("oracle",))
            right = isinstance(named, tuple | list) and named and all(isinstance(name, str) for name in named)
            if keywords.keys() - {"profile", "laws"} or keywords.get("profile", "quick") not in PROFILES or not right:
                raise ValueError(f"gdn_adapter takes profile={'|'.join(PROFILES)} and laws=names, got {keywords}")
            for name in named:
                book_for(name, None)
        if not 0 <= config.getoption("--gdn-seed") < 2**32:
            raise ValueError(f"--gdn-seed must be in 0..{2**32 - 1}, got {config.getoption('--gdn-seed')}")
        pairs = []
        for adapter, adapter_marks in asked:
            few = [mark.kwargs["laws"] for mark in adapter_marks if "laws" in mark.kwargs]
            if strange := [name for names in few for name in names if name not in _laws(adapter)]:
                raise ValueError(f"laws of gdn_adapter must be those of {adapter}, got {strange[0]!r}")
            pairs += [(adapter, law) for law in laws or _laws(adapter) if all(law in names for names in few)]
    except (AdapterError, ValueError) as error:
        raise pytest.UsageError(str(error)) from None
    metafunc.parametrize("gdn_law", pairs, indirect=True, ids=[f"{adapter}-{law}" for adapter, law in pairs])


@functools.cache
def _import_once() -> None:
    """Import what law items need, without garbage collection, which would take a third of the time."""
    from verify.process.fork_server import importing

    with importing():
        import verify.engine.check  # noqa: F401


@functools.cache
def _laws(adapter: str) -> "Iterable[str]":
    """The laws of an adapter's book. If the adapter cannot be loaded, the laws of rules, so that the tests fail when they run."""
    from properties.books import book_named, book_of
    from properties.rules.laws import LAWS
    from verify.adapters.registry import BOOKS_OF_BUILT_IN, AdapterError
    from verify.engine.asking import describe
    from verify.process.worker import Worker

    for book, adapters in BOOKS_OF_BUILT_IN.items():
        if adapter in adapters:
            return book_named(book).laws
    with contextlib.suppress(AdapterError), Worker() as worker:
        return book_of(describe(adapter, worker).domain).laws
    return LAWS


@pytest.fixture(scope="session")
def gdn_device(request: pytest.FixtureRequest) -> str:
    """The device on which kernels run: --gdn-device, or a GPU if there is one, or the CPU."""
    from verify.gpu.device import gpus

    asked: str | None = request.config.getoption("--gdn-device")
    if asked == "cuda" and not gpus():
        pytest.exit("--gdn-device cuda needs a GPU, and torch sees none", 3)
    return asked or ("cuda" if gpus() else "cpu")


@pytest.fixture(scope="session")
def gdn_worker(request: pytest.FixtureRequest, gdn_device: str) -> "Iterator[Worker]":
    """One worker process for all items of this pytest process. The processes of pytest-xdist take the GPUs in turn."""
    from verify.gpu.device import environment
    from verify.process.worker import Worker

    place = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    sequential = request.config.getoption("--gdn-interpreter") == "sequential"
    with Worker(environment=environment(gdn_device, int(place) if place.isdecimal() else 0), sequential=sequential) as worker:
        yield worker


@pytest.fixture
def gdn_law(request: pytest.FixtureRequest, gdn_worker: "Worker", gdn_device: str) -> LawItem:
    """The law and adapter of this test item; call its assert_holds()."""
    from verify.engine.profiles import PROFILES
    from verify.findings.store import FOLDER

    adapter, law = request.param
    option = request.config.getoption
    marks = [mark.kwargs for mark in request.node.iter_markers("gdn_adapter")]
    asked = [option("--gdn-profile"), *(keywords["profile"] for keywords in marks if "profile" in keywords)]
    profile = min(asked, key=lambda name: PROFILES[name].examples)
    findings = str(request.config.rootpath / FOLDER)
    return LawItem(adapter, law, profile, option("--gdn-seed"), gdn_worker, findings, gdn_device, option("--gdn-examples"))
