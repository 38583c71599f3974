"""What the toolkit's own tests share."""

from collections.abc import Iterator

import pytest

from verify.worker import Worker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """One isolated worker for all tests of this process: it imports torch and each released kernel once, which takes seconds."""
    with Worker() as one:
        yield one
