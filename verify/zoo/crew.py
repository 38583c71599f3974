"""Workers that share the items of some work: the base of a hunt and of trials."""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from verify.process.worker import Worker


class Crew:
    """Some workers, each of which has one item at a time."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers, self._free = workers, [*workers]
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every worker and start nothing new. Safe to call from any thread."""
        self._stopped.set()
        for worker in self.workers:
            worker.close()

    def _run_all(self, items: Sequence[Any], work: Callable[[Any, Worker], None]) -> None:
        """Call `work(item, worker)` for every item, in their order, on all workers at once."""

        def one(item: Any) -> None:
            with self._lock:
                worker = self._free.pop()
            try:
                if not self._stopped.is_set():
                    work(item, worker)
            finally:
                with self._lock:
                    self._free.append(worker)

        pool = concurrent.futures.ThreadPoolExecutor(len(self.workers))
        futures = [pool.submit(one, item) for item in items]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        finally:
            if not all(future.done() for future in futures):
                self.stop()
            pool.shutdown(wait=True, cancel_futures=True)
