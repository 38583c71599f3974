"""The places of `across` and `bisect`: releases of a package, folders, revisions of a repository, and other interpreters.

A release is downloaded and unpacked as by `fetch`, without its dependencies; nothing is installed. A revision is a worktree in a
temporary folder, which is removed at the end.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence

from packaging.version import Version

from gdn_verify import HERE, PACKAGES
from verify.adapters.libraries import BY_DISTRIBUTION, FOLDER, Library
from verify.cli.fetch_command import FetchError, fetch, last_line, manifest_in, pip
from verify.cli.options import Release
from verify.cli.terminal import is_terminal, print_error
from verify.engine.across import Site


def allow(several: Iterable[Release], *, yes: bool) -> None:
    """Ask at the terminal whether missing releases may be downloaded, unless `--yes` allows it. ValueError if they may not."""
    missing = [library for release in several for library, folder in map(_library, release) if not _is_there(library, folder)]
    names = ", ".join(dict.fromkeys(f"{library.distribution} {library.version}" for library in missing))
    if not missing or yes:
        return
    if not (sys.stdin.isatty() and is_terminal(sys.stderr)):
        raise ValueError(f"{names} must be downloaded with pip into {FOLDER}: allow it with --yes")
    sys.stderr.write(f"download {names} with pip, without dependencies, into {FOLDER}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ValueError(f"{names} may not be downloaded")


def _library(pair: tuple[str, str]) -> tuple[Library, pathlib.Path]:
    """A release as a library of which everything is unpacked, or what adapters need if we know it, and its folder."""
    distribution, version = pair
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    default = Library(distribution, distribution, "", files=("*",), needed=(), gates=(), python=ours)
    library = BY_DISTRIBUTION.get(distribution, default)
    place = library.fetched if library.version == version else f"{library.fetched}-{version}"
    return dataclasses.replace(library, version=version, needed=()), pathlib.Path(os.path.abspath(place))


def _is_there(library: Library, folder: pathlib.Path) -> bool:
    with contextlib.suppress(ValueError):
        return manifest_in(folder, library) is not None
    return False


def release_place(release: Release, stack: contextlib.ExitStack) -> Site:
    """The place of a release, which is downloaded if it is not there."""
    parts = [_library(pair) for pair in release]
    name = " + ".join(" ".join(pair) for pair in release)
    option = "--release " + ",".join("==".join(pair) for pair in release)
    try:
        for library, folder in parts:
            if not _is_there(library, folder):
                fetch(library, folder)
    except (FetchError, ValueError) as error:
        return Site(name, option, trouble=str(error))
    if len(parts) == 1:
        return _in_folders(name, option, [str(parts[0][1])])
    whole = stack.enter_context(tempfile.TemporaryDirectory(prefix="gdn-verify-"))  # wheels that share a package
    for _, folder in parts:
        shutil.copytree(folder, whole, dirs_exist_ok=True)
    return _in_folders(name, option, [whole])


def path_place(folder: str) -> Site:
    """The place of a folder. ValueError if it is none."""
    if not os.path.isdir(folder):
        raise ValueError(f"--path must name a folder, got {folder!r}")
    return _in_folders(folder, f"--path {folder}", [os.path.abspath(folder)])


def python_place(program: str, stack: contextlib.ExitStack) -> Site:
    """The place of another interpreter. Its workers run these sources of gdn-verify with the packages of that environment."""
    if not (found := shutil.which(program)):
        raise ValueError(f"--python must name an interpreter, got {program!r}")
    ours = stack.enter_context(tempfile.TemporaryDirectory(prefix="gdn-verify-"))
    for name in (*PACKAGES, "gdn_verify.py"):
        os.symlink(os.path.join(HERE, name), os.path.join(ours, name))
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))}
    return Site(program, f"--python {program}", environment=environment, python=os.path.abspath(found))


def _in_folders(name: str, option: str, folders: Sequence[str], adapters: dict[str, str] | None = None) -> Site:
    for folder in folders:
        if shadowing := [package for package in PACKAGES if os.path.exists(os.path.join(folder, package, "__init__.py"))]:
            return Site(name, option, trouble=f"{folder} has a package {shadowing[0]}, which gdn-verify has too")
    path = os.pathsep.join(dict.fromkeys([*folders, *(entry or os.getcwd() for entry in sys.path), HERE]))
    return Site(name, option, tuple(folders), {"PYTHONPATH": path}, adapters=adapters or {})


class Repository:
    """The git repository of an adapter's file; of a built-in adapter, that of the current folder. ValueError if there is none."""

    def __init__(self, specs: Iterable[str]) -> None:
        files = {spec: spec.rpartition(":")[0] for spec in specs}
        self.files = {spec: os.path.realpath(file) for spec, file in files.items() if file.endswith(".py")}
        self.root = os.path.dirname(next(iter(self.files.values()), os.path.join(os.getcwd(), "here")))
        self.root = self.git("rev-parse", "--show-toplevel")
        if self.git("status", "--porcelain", "--untracked-files=no"):
            print_error(f"{self.root} has changes that are not committed: no revision has them")

    def git(self, *words: str) -> str:
        """What git prints. ValueError, in one line, if it fails."""
        command = ["git", "-c", f"core.hooksPath={os.devnull}", "-C", self.root, *words]
        try:
            done = subprocess.run(  # noqa: S603 - revisions come after "--end-of-options" or "--verify"
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False, process_group=0
            )
        except OSError as error:
            raise ValueError(f"--rev needs git, which cannot be run: {error.strerror}") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it exited with code {done.returncode}"]
            raise ValueError(f"--rev: git {words[0]} in {self.root}: {lines[-1]}")
        return done.stdout.strip()

    def commit(self, revision: str) -> str:
        """The hash of a revision. ValueError if there is none."""
        with contextlib.suppress(ValueError):
            return self.git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        raise ValueError(f"--rev: {self.root} has no revision {revision!r}")

    def comes_before(self, older: str, newer: str) -> bool:
        """Whether one commit is an ancestor of another."""
        with contextlib.suppress(ValueError):  # two histories without a common commit
            return older != newer and self.git("merge-base", older, newer) == older
        return False

    def between(self, older: str, newer: str) -> list[str]:
        """The commits from `older` to `newer`, along first parents. ValueError if the one does not come before the other."""
        if not self.comes_before(older, newer):
            raise ValueError(f"--rev: neither of {older[:10]} and {newer[:10]} comes before the other")
        return [older, *self.git("rev-list", "--reverse", "--first-parent", f"{older}..{newer}").split()]

    def about(self, commit: str) -> str:
        """A commit in words: its short hash and its subject."""
        return self.git("show", "--no-patch", "--format=%h %s", commit)

    def place(self, revision: str, stack: contextlib.ExitStack) -> Site:
        """The place of a revision: a worktree, until the stack ends. An adapter's file that it lacks is copied into it."""
        commit = self.commit(revision)
        short = commit[:10]
        holder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gdn-verify-"))
        tree = os.path.join(holder, short)
        stack.callback(self._remove, tree)
        self.git("worktree", "add", "--detach", "--force", tree, commit)
        adapters = {}
        for spec, file in self.files.items():
            inside = os.path.relpath(file, self.root)
            if inside.startswith(os.pardir):
                continue
            there = os.path.join(tree, inside)
            if not os.path.exists(there):
                os.makedirs(os.path.dirname(there), exist_ok=True)
                shutil.copy(file, there)
            adapters[spec] = f"{there}:{spec.rpartition(':')[2]}"
        folders = [folder for folder in (os.path.join(tree, "src"), tree) if os.path.isdir(folder)]
        name = revision if commit.startswith(revision) else f"{revision} ({short})"
        return _in_folders(name[:40], f"--rev {revision}", folders, adapters)

    def _remove(self, tree: str) -> None:
        with contextlib.suppress(ValueError):
            self.git("worktree", "remove", "--force", tree)


def versions_of(package: str) -> list[str]:
    """The releases of a package that pip finds, from old to new. FetchError if it cannot list them."""
    done = pip("index", "versions", "--disable-pip-version-check", package)  # a name that release_word or the parser has checked
    if found := re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE):
        return sorted(found[1].split(", "), key=Version)
    raise FetchError(f"pip cannot list the releases of {package}, name some with --releases: {last_line(done.stdout)}")
