"""What the toolkit's own tests share."""

from collections.abc import Iterator

import pytest

from verify.gpu import device as devices
from verify.process.worker import Worker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """One isolated worker for all tests of this process: it imports torch and each released kernel once, which takes seconds."""
    with Worker() as one:
        yield one


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow cases, so that `-m "not slow"` leaves them out.

    Of a test that is `slow_after_first`, all cases but the first are slow. A test is slow too if it needs a fixture that its module
    names in SLOW_FIXTURES. So almost every module keeps quick tests.
    """
    met = set[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        fixtures = {*getattr(item, "fixturenames", ())} & {*getattr(getattr(item, "module", None), "SLOW_FIXTURES", ())}
        if fixtures or (item.get_closest_marker("slow_after_first") and name in met):
            item.add_marker(pytest.mark.slow)
        met.add(name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are: `gpu` needs one, `gpu(2)` two."""
    needed = max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), default=0)
    if devices.gpus() < needed:
        pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}, torch sees {devices.gpus() or 'none'}")
