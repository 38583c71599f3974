"""Notes of what was compiled: beside Triton's cache, and lost with it.

A check whose kernels are all in the cache waits for nobody to compile them. A note that is wrong (somebody took one kernel out of
the cache) costs the seconds that the worker takes to compile it; one that is missing, those that another process takes to see that
there is nothing to do.
"""

import contextlib
import hashlib
import os
import pathlib
from typing import Any

FOLDER = "gdn-verify-notes"


class Notes:
    """What was launched before, of one adapter with one word of tuning. `versions` are all that its kernels depend on besides."""

    def __init__(self, adapter: str = "", tune: str = "", versions: str = "") -> None:
        """Without an adapter nothing is noted: of somebody's own file it is not known what it imports."""
        self._folder = triton_cache() / FOLDER / _digest(adapter, tune) if adapter else None
        self.versions = versions

    @property
    def any(self) -> bool:
        """Whether there are notes, of whatever versions."""
        return self._folder is not None and os.path.isdir(self._folder)

    def has(self, *words: Any) -> bool:
        """Whether what `words` say was launched before."""
        return self._folder is not None and os.path.exists(self._file(self._folder, words))

    def add(self, *words: Any) -> None:
        """Note that what `words` say was launched. A cache that cannot be written has no notes."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file(self._folder, words).touch()

    def _file(self, folder: pathlib.Path, words: tuple[Any, ...]) -> pathlib.Path:
        return folder / _digest(self.versions, *words)


def triton_cache() -> pathlib.Path:
    """The folder where Triton keeps what it compiled, found as Triton finds it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return pathlib.Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))


def _digest(*words: Any) -> str:
    return hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()[:32]
