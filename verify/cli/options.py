"""Options that several verbs share, and how their values are read. Nothing that this module imports imports torch."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

from oracles import PRODUCTS
from properties.words.names import unknown
from verify.engine.power import LAWS
from verify.engine.profiles import PROFILES
from verify.engine.shard import Shard
from verify.findings.store import FOLDER
from verify.gpu import policies
from verify.process.choices import BACKENDS, DEVICES, TOOLS

SECONDS = {"s": 1, "m": 60, "h": 3600}
SWEEP = "sweep"
ANNOTATIONS = ("github",)
Release = tuple[tuple[str, str], ...]  # distributions with their versions, which are one place together
PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
MOST_TOKENS = 65536  # of a sequence of `twin`


def add_asking(parser: argparse.ArgumentParser, profile: str) -> None:
    """Add the options about what to check and where kernels run."""
    parser.add_argument(
        "--law",
        type=law_word,
        action="append",
        metavar="LAW",
        help=f"check only this law (may be repeated): {', '.join(LAWS)}",
    )
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        help="cases for each law: " + ", ".join(f"{p.name} {p.examples}" for p in PROFILES.values()) + f" ({profile})",
    )
    parser.add_argument("-x", "--stop", "--stop-at-first", action="store_true", help="stop at the first broken law")
    parser.add_argument(
        "--workers",
        type=positive_word,
        help="number of processes that run kernels (default: on GPUs up to 6 for each; on a CPU one for each core, at most 4)",
    )
    parser.add_argument(
        "--products",
        choices=PRODUCTS,
        help="how the implementation multiplies float32 matrices (default: on a GPU what its adapter declares, else ieee)",
    )
    parser.add_argument(
        "--device", choices=DEVICES, help="where kernels run (default: cuda if there is a GPU, else cpu, interpreted)"
    )
    parser.add_argument(
        "--tune",
        type=tune_word,
        metavar="NUMBER|native|sweep",
        help="configuration of autotuned kernels: a number draws it (default on a GPU: the seed); with native, Triton times them; "
        "with sweep, check runs all of them, one after the other",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write JSON lines to FILE: the check, each law and the end (-: to stdout, which then has nothing else)",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options about settings in pyproject.toml (verify/cli/settings.py reads them)."""
    parser.add_argument("--job", metavar="NAME", help="use the settings of this job in pyproject.toml, [tool.gdn-verify.jobs.NAME]")
    parser.add_argument("--no-settings", action="store_true", help="read no settings from pyproject.toml")


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that name files in which a check is shown elsewhere (verify/cli/outputs.py writes them)."""
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page about the check to FILE, which needs nothing but a browser to be read"
    )
    parser.add_argument("--junit", metavar="FILE", help="also write JUnit XML to FILE, with a test case for each law")
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        help="also write a summary in Markdown to FILE (appended if the variable GITHUB_STEP_SUMMARY names FILE)",
    )
    parser.add_argument(
        "--annotations",
        choices=ANNOTATIONS,
        help="at the end, also print workflow commands that mark broken and undecided laws in the files of a change",
    )


def add_certificate(parser: argparse.ArgumentParser) -> None:
    """Add the options for a certificate, which hashes files of the machine that ran the check. So `merge` has none."""
    parser.add_argument(
        "--certificate",
        metavar="FILE",
        help="also write a certificate of the check to FILE, which gdn-verify certificate verifies",
    )
    parser.add_argument("--sign-key", metavar="FILE", help="sign the certificate with this SSH key (needs ssh-keygen)")


def add_sanitize(parser: argparse.ArgumentParser) -> None:
    """Add the option for a sanitizer."""
    parser.add_argument(
        "--sanitize",
        nargs="?",
        const=TOOLS[0],
        choices=TOOLS,
        help="run the worker under a tool of NVIDIA's compute-sanitizer; its reports break the law (default memcheck)",
    )


def add_common(parser: argparse.ArgumentParser, *, keeps: bool = True, examples: bool = True) -> None:
    """Add the options about where a line runs and what is kept of it."""
    parser.add_argument(
        "--deny", metavar="FILE", help="deny-list of configurations that are not used; a sweep adds the wrong ones that it finds"
    )
    parser.add_argument(
        "--deadline",
        type=seconds_word,
        metavar="S",
        help="seconds after which a run counts as a hang (default 120; under a sanitizer 1200)",
    )
    parser.add_argument(
        "--path", metavar="DIR", help="a checkout in which modules are looked for first, such as Megatron-LM's for megatron/layer"
    )
    parser.add_argument(
        "--interpreter",
        choices=("grid", "sequential"),
        help="how Triton kernels run without a GPU: grid (default) runs all programs together and detects races; "
        "sequential runs one program after another and detects none",
    )
    if keeps:
        parser.add_argument("--findings", default=FOLDER, metavar="FOLDER", help=f"folder for findings (default {FOLDER})")
    if examples:
        parser.add_argument(
            "--no-examples",
            action="store_true",
            help="do not run the lines that failed in earlier checks, and do not store those that fail in this one",
        )


def add_known(parser: argparse.ArgumentParser) -> None:
    """Add the option about further known defects."""
    parser.add_argument(
        "--known",
        action="append",
        default=[],
        metavar="FILE",
        help="count these known defects too (may be repeated); known_defects.toml beside an adapter's file always counts",
    )


def find_in(folder: str | None) -> None:
    """Put `folder` into sys.path after this project's own folder. Workers use the same path. ValueError if it is no folder."""
    if folder is None:
        return
    if not os.path.isdir(folder):
        raise ValueError(f"--path must name a folder, got {folder!r}")
    sys.path.insert(1, os.path.abspath(folder))


RANKS = "for a parallel path: number of processes that share each case (default: simulated ranks; under torchrun: its own)"


def add_ranks(parser: argparse.ArgumentParser, words: str = RANKS) -> None:
    """Add the options about the processes that share a case. `words` says what they do for a verb."""
    parser.add_argument("--ranks", type=positive_word, metavar="N", help=words)
    parser.add_argument(
        "--backend", choices=BACKENDS, help="library over which ranks communicate (default: nccl if each rank has a GPU, else gloo)"
    )


def law_word(word: str) -> str:
    """Parse the name of a law."""
    if word not in LAWS:
        raise argparse.ArgumentTypeError(unknown("law", word, LAWS))
    return word


def tune_word(word: str) -> str:
    """Parse `--tune`, the configuration of autotuned kernels, into the form that lines use."""
    if word == SWEEP:
        return word
    try:
        return str(policies.Policy.parse(word))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seed_word(word: str) -> int:
    """Parse a seed."""
    if not (word.isdecimal() and int(word) < 2**32):
        raise argparse.ArgumentTypeError(f"must be a whole number in 0..{2**32 - 1}, got {word!r}")
    return int(word)


def positive_word(word: str) -> int:
    """Parse a small whole number from 1 up."""
    if not (word.isdecimal() and 1 <= int(word) <= 256):
        raise argparse.ArgumentTypeError(f"must be a whole number in 1..256, got {word!r}")
    return int(word)


def tokens_word(word: str) -> int:
    """Parse a number of tokens."""
    if not (word.isdecimal() and 2 <= int(word) <= MOST_TOKENS):
        raise argparse.ArgumentTypeError(f"must be a whole number in 2..{MOST_TOKENS}, got {word!r}")
    return int(word)


def shard_word(word: str) -> Shard:
    """Parse a shard such as "2/8"."""
    try:
        return Shard.parse(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def duration_word(word: str) -> float:
    """Parse a time such as "90s", "10m" or "2h" into seconds."""
    with contextlib.suppress(KeyError, ValueError, IndexError):
        if 0 < (value := float(word[:-1]) * SECONDS[word[-1]]) < 1e8:
            return value
    raise argparse.ArgumentTypeError(f"must be a time such as 90s, 10m or 2h, got {word!r}")


def minutes_word(word: str) -> float:
    """Parse a time in minutes."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(word)) < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of minutes over 0, got {word!r}")


def seconds_word(word: str) -> float:
    """Parse a time in seconds."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(word)) < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of seconds over 0, got {word!r}")


def package_word(word: str) -> list[str]:
    """Parse names of packages that are joined by commas."""
    if all(PACKAGE.fullmatch(name) for name in word.split(",")):
        return word.split(",")
    raise argparse.ArgumentTypeError(f"must be a package, such as fla-core, or several joined by commas, got {word!r}")


def versions_word(word: str) -> list[str]:
    """Parse versions that are joined by commas. They are returned from old to new."""
    try:
        return sorted(word.split(","), key=Version)
    except InvalidVersion:
        raise argparse.ArgumentTypeError(f"must be versions joined by commas, such as 0.4.0,0.4.1, got {word!r}") from None


def release_word(word: str) -> tuple[str, Release]:
    """Parse the place `fla-core==0.5.2`, or several such joined by commas."""
    pairs = [part.partition("==")[::2] for part in word.split(",")]
    with contextlib.suppress(InvalidVersion):
        if all(PACKAGE.fullmatch(name) and Version(version) for name, version in pairs):
            return "release", tuple(pairs)
    raise argparse.ArgumentTypeError(
        f"must be PACKAGE==VERSION, such as fla-core==0.5.2, or several joined by commas, got {word!r}"
    )


def path_word(word: str) -> tuple[str, str]:
    """Parse a folder as a place."""
    return "path", word


def revision_word(word: str) -> tuple[str, str]:
    """Parse a revision as a place."""
    return "rev", word


def python_word(word: str) -> tuple[str, str]:
    """Parse an interpreter as a place."""
    return "python", word


def chosen_laws(law: Sequence[str] | None) -> list[str] | None:
    """The laws that `--law` names, each once, or None for all."""
    return list(dict.fromkeys(law or ())) or None
