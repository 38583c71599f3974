"""The releases of other libraries that tests use: those on this machine, and those that may be downloaded.

By default, tests download the wheel of the newest megatron-core alone, once a machine. A test that needs another wheel is skipped,
and the reason has the command that fetches it. With --downloads, the tests download every wheel that they need.
"""

import os
import pathlib

from verify.adapters.libraries import LIBRARIES, Library
from verify.cli.fetch_command import FetchError, fetch, manifest_in

OPTION = "--downloads"
# The most MB of a wheel of any release that we take.
SIZES = {"sglang": 39, "vllm": 336, "flashinfer": 96, "torchtitan": 1, "nemo_automodel": 4, "megatron": 2.6}
MACHINE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "gdn-verify")
MEGATRON = LIBRARIES["megatron"]


def lacking(library: Library, folder: pathlib.Path, *, download: bool) -> str:
    """Download a library into a folder, if it is not there and if that is allowed. Returns why it is not there, or nothing."""
    try:
        if manifest_in(folder, library):
            return ""
        if download:
            fetch(library, folder)
            return ""
    except FetchError as error:
        if "pip could not download" not in str(error):
            raise
        return str(error)
    except ValueError as error:  # the folder cannot be written
        return str(error)
    release = "" if library.version == LIBRARIES[library.name].version else f" --release {library.version}"
    command = f"gdn-verify fetch {library.name}{release} --to {folder}"
    return (
        f"{library.distribution} {library.version} is not on this machine: run {command} ({SIZES[library.name]} MB at most), "
        f"or pytest with {OPTION}"
    )


def lacking_megatron(version: str = MEGATRON.version, *, download: bool = True) -> str:
    """The same for a release of megatron-core, in `folder_of_megatron`."""
    return lacking(MEGATRON.at(version)[0], folder_of_megatron(version), download=download)


def folder_of_megatron(version: str = MEGATRON.version) -> pathlib.Path:
    """The folder of a release of megatron-core, which all checkouts on this machine use."""
    return MACHINE / version
