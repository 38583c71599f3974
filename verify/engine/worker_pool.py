"""The workers of a check, which its laws take and give back."""

import threading
from collections.abc import Iterable, Sequence

from verify.ranks.group import Answering

LOOK_S = 0.5  # how often a law that waits for a worker looks whether the check was stopped


class WorkerPool:
    """Workers that nobody has. Of the laws that wait for one, that with the lowest place gets the next."""

    def __init__(self, workers: Iterable[Answering], stopped: threading.Event) -> None:
        self._free, self._stopped = list(workers), stopped
        self._waiting: list[int] = []
        self._changed = threading.Condition()
        self.size = len(self._free)

    def add(self, workers: Sequence[Answering]) -> None:
        """Add workers that have not started. Those that have go out first."""
        with self._changed:
            self._free = [*workers, *self._free]
            self.size += len(workers)

    def take(self, place: int) -> Answering | None:
        """The worker that was given back last, once there is one for the law at this place; None if the check is stopped."""
        with self._changed:
            self._waiting.append(place)
            try:
                while not self._free or min(self._waiting) < place:
                    if self._stopped.is_set():
                        return None
                    self._changed.wait(LOOK_S)
                return self._free.pop()
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()

    def give(self, worker: Answering) -> None:
        """Give a worker back."""
        with self._changed:
            self._free.append(worker)
            self._changed.notify_all()
