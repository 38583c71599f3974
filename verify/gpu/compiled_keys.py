"""Notes which compile keys are in Triton's cache. The notes are files inside that cache, and are deleted with it.

If all kernels of a check are in the cache, the check need not wait for processes that compile them. A wrong note (the kernel has
been removed from the cache) costs the seconds that the worker takes to compile the kernel. A missing note costs the seconds that a
compiling process takes to see that there is nothing to do.
"""

import contextlib
import hashlib
import os
import pathlib
from typing import Any

from verify.interpreter.self_test import triton_cache

FOLDER = "gdn-verify-notes"


class Notes:
    """Notes of what has been launched, for one adapter and one tuning word.

    `versions` names everything else that its kernels depend on.
    """

    def __init__(self, adapter: str = "", tune: str = "", versions: str = "") -> None:
        """Without an adapter nothing is noted. This is for adapters in users' files, since we do not know what they import."""
        self._folder = triton_cache() / FOLDER / _digest(adapter, tune) if adapter else None
        self.versions = versions

    @property
    def any(self) -> bool:
        """Whether there are notes, for any versions."""
        return self._folder is not None and os.path.isdir(self._folder)

    def has(self, *words: Any) -> bool:
        """Whether the launch that `words` describe has been noted."""
        return self._folder is not None and os.path.exists(self._file(self._folder, words))

    def add(self, *words: Any) -> None:
        """Note the launch that `words` describe. If the cache cannot be written, nothing is noted."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file(self._folder, words).touch()

    def _file(self, folder: pathlib.Path, words: tuple[Any, ...]) -> pathlib.Path:
        return folder / _digest(self.versions, *words)


def _digest(*words: Any) -> str:
    return hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()[:32]
