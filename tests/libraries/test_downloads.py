"""What tests download: one small wheel. A test that lacks another one says how to get it."""

import pathlib
import shlex

import pytest

from tests import conftest, downloads
from verify.adapters.libraries import LIBRARIES, Library
from verify.cli.fetch_command import FetchError
from verify.cli.parsers import parser

MOST_MB = 3


@pytest.fixture
def fetched(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that has no library, and the names of those that are downloaded."""
    names: list[str] = []
    monkeypatch.setattr(downloads, "MACHINE", tmp_path / "machine")
    monkeypatch.setattr(downloads, "fetch", lambda library, folder: names.append(f"{library.name} {library.version}"))
    return names


class Config:
    """What fixtures read of pytest's configuration."""

    def __init__(self, folder: pathlib.Path, *, downloads: bool) -> None:
        self.cache, self.folder, self.downloads = self, folder, downloads

    def mkdir(self, name: str) -> pathlib.Path:
        return self.folder / name

    def getoption(self, name: str) -> bool:
        assert name == downloads.OPTION
        return self.downloads


def missing(config: Config) -> list[str]:
    """The reasons for which tests of the libraries in pytest's cache are skipped."""
    reasons = []
    for name in LIBRARIES:
        try:
            conftest.fetched(name, config)  # type: ignore[arg-type]
        except pytest.skip.Exception as skipped:
            reasons.append(str(skipped))
    return reasons


def test_the_newest_megatron_is_all_that_is_downloaded_by_default(fetched: list[str], tmp_path: pathlib.Path) -> None:
    assert downloads.lacking_megatron() == ""
    assert len(missing(Config(tmp_path, downloads=False))) == len(LIBRARIES)
    assert fetched == [f"megatron {LIBRARIES['megatron'].version}"]
    assert downloads.SIZES["megatron"] <= MOST_MB


def test_with_downloads_all_is_downloaded(fetched: list[str], tmp_path: pathlib.Path) -> None:
    assert missing(Config(tmp_path, downloads=True)) == []
    assert [name.split()[0] for name in fetched] == [*LIBRARIES]
    assert {*downloads.SIZES} == {*LIBRARIES}


@pytest.mark.parametrize("version", ["0.19.2", "0.18.2"])
def test_the_reason_of_a_skip_is_a_command_that_fetches_what_lacks(fetched: list[str], version: str) -> None:
    reason = downloads.lacking_megatron(version, download=False)
    assert reason.startswith(f"megatron-core {version} is not on this machine: run gdn-verify fetch megatron ")
    words = shlex.split(reason.partition("run gdn-verify ")[2].partition(" (2.6 MB at most), or pytest with --downloads")[0])
    options = parser().parse_args(words)
    library, _ = LIBRARIES[options.library].at(options.release)
    assert (library.version, options.to) == (version, str(downloads.folder_of_megatron(version)))
    assert fetched == []


def test_a_download_that_fails_is_a_reason_if_pip_reaches_nothing(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> None:
        def fetch(library: Library, folder: pathlib.Path) -> None:
            raise error

        monkeypatch.setattr(downloads, "fetch", fetch)

    for error in (FetchError("pip could not download megatron-core: no network"), ValueError("the folder cannot be written")):
        fails(error)
        assert downloads.lacking_megatron() == str(error)
    fails(FetchError("the wheel is damaged"))
    with pytest.raises(FetchError, match="damaged"):
        downloads.lacking_megatron()
