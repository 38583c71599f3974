"""The released files of Megatron-LM on this host, and the processes that import them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import TracebackType

from verify.adapters.libraries import FOLDER, LIBRARIES
from verify.claims.released import SERVES
from verify.process.messages import Data
from verify.process.worker import NO_GPU, Worker, WorkerLost
from verify.ranks.group import Answering, RankGroup

LIBRARY = LIBRARIES["megatron"]


class NoRelease(Exception):
    """A release is not on this host. The message is one line with the commands that fetch it."""


class Unanswered(Exception):
    """A process of a release could not answer. The message is one line."""


def folders_of(place: str | None) -> dict[str, str]:
    """The folder of each release under `place`, by its version. Without a place: where `gdn-verify fetch` puts them.

    ValueError if the place is no folder.
    """
    if place is not None and not os.path.isdir(place):
        raise ValueError(f"--releases must name a folder, got {place!r}")
    root = os.path.abspath(place or FOLDER)
    under = sorted(os.listdir(root)) if os.path.isdir(root) else []
    folders = [folder for name in under if LIBRARY.is_in(folder := os.path.join(root, name))]
    return {version: folder for folder in folders if (version := LIBRARY.release_in(folder)) is not None}


def check_releases(folders: Mapping[str, str], needed: Sequence[str]) -> None:
    """Raise NoRelease if a needed release is not there."""
    if missing := [version for version in needed if version not in folders]:
        commands = " && ".join(f"gdn-verify fetch {LIBRARY.name} --release {version}" for version in missing)
        raise NoRelease(
            f"there is no {LIBRARY.distribution} {', '.join(missing)}: run {commands}, or name a folder that has a folder for each "
            "release with --releases"
        )


@dataclasses.dataclass
class Releases:
    """The processes of each release: one alone, and groups of ranks. They start when they are first asked.

    - `folders`: where each release is. `device`: "cuda" or "cpu".
    - `judged`, `timed`: how many autotune configurations each kernel may have where results are judged and where calls are timed,
      or 0 for all. If they differ, other processes do the one and the other.
    """

    folders: Mapping[str, str]
    device: str
    judged: int = 0
    timed: int = 0
    deadline_s: float = 300.0
    _processes: dict[tuple[str, int, int], Answering] = dataclasses.field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The library over which ranks communicate."""
        return "nccl" if self.device == "cuda" else "gloo"

    def ask(self, version: str, ask: str, *, ranks: int = 0, **words: object) -> Data:
        """What a release answers (verify/claims/released.py). With `ranks`, so many processes answer as one.

        Unanswered has the reason if it cannot.
        """
        limit = self.timed if ask == "time" else self.judged
        try:
            reply = self._process(version, ranks, limit).ask(
                {"ask": ask, "folder": self.folders[version], "configurations": limit, **words}
            )
        except WorkerLost as lost:
            raise Unanswered(f"{version}: {lost}") from None
        if "error" in reply:
            raise Unanswered(f"{version}: {reply['error']}")
        return reply

    def _process(self, version: str, ranks: int, limit: int) -> Answering:
        key = version, ranks, limit
        if key not in self._processes:
            environment = {} if self.device == "cuda" else NO_GPU
            self._processes[key] = (
                RankGroup(ranks, self.backend, self.deadline_s, serves=SERVES)
                if ranks
                else Worker(self.deadline_s, environment=environment, serves=SERVES)
            )
        return self._processes[key]

    def close(self) -> None:
        """End every process."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def __enter__(self) -> "Releases":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()
