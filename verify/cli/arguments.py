"""The verbs of the command line, and the arguments of each."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from verify.adapters.libraries import FOLDER, LIBRARIES
from verify.adapters.registry import OWN
from verify.cli import verb_options as kinds
from verify.cli.options import (
    add_asking,
    add_certificate,
    add_common,
    add_known,
    add_outputs,
    add_ranks,
    add_sanitize,
    add_settings,
    duration_word,
    law_word,
    minutes_word,
    package_word,
    path_word,
    positive_word,
    python_word,
    release_word,
    revision_word,
    seconds_word,
    seed_word,
    shard_word,
    tokens_word,
    tune_word,
    versions_word,
)
from verify.engine.profiles import PROFILES
from verify.findings.store import FOLDER as FINDINGS
from verify.process.choices import DEVICES
from verify.process.cores import cores
from verify.zoo.incidents import LETTERS

# The first part of each published change, by the change's number.
CLAIMS = {
    1: "convolution on [b, s, d]",
    2: "one norm for two",
    3: "norm in the kernel",
    4: "one all-to-all for one a sequence",
    5: "blocks of the decode kernel",
    6: "FLOPs of the layer",
}
# Pull requests of Megatron-LM, whose claims are settled on releases before and after them.
PULLS = {
    1989: "the layer, TP, SP and FLOPs",
    3040: "convolution and norm",
    4913: "one all-to-all for one a sequence",
    5396: "norm in the kernel",
}
SHARD = "run the K-th of N parts of the cases; each case is in one of them, and `gdn-verify merge` joins what --json wrote"
SHELLS = ("bash", "zsh", "tcsh")
LANGUAGES = ("cpp", "rust", "js", "py")  # in which new-process writes a kernel
CONFIGURATIONS = 3  # over which `claims --quick` tunes kernels
ADAPTER = f"a built-in adapter (`gdn-verify list` shows them), or {OWN}"


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--schema", action="store_true", help="the JSON Schema of the lines that check and soak --json write")


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", nargs="?", help=f"{ADAPTER} (default: those that pyproject.toml lists)")
    parser.add_argument("--adapter", dest="own", metavar="FILE.py:CLASS", help="the adapter, as an option")
    add_settings(parser)
    add_asking(parser, "default quick; gpu on a GPU")
    parser.add_argument("--seed", type=seed_word, help="seed of the cases (default 0; with the profile soak random, and printed)")
    parser.add_argument(
        "--climb",
        action="store_true",
        help="draw half of the cases as variations of those with the largest errors so far, as soak does",
    )
    parser.add_argument(
        "--budget",
        type=duration_word,
        metavar="TIME",
        help="begin no case after this time, such as 90s, 10m or 2h (default: no limit); the laws that find most in it come first",
    )
    parser.add_argument("--budget-ok", action="store_true", help="do not exit with 3 for what the budget did not reach")
    parser.add_argument("--shard", type=shard_word, metavar="K/N", help=SHARD)
    parser.add_argument(
        "--strict-reach",
        action="store_true",
        help="exit with 3 if every law holds but a parameter was never passed, or a branch of an interpreted kernel never ran",
    )
    parser.add_argument(
        "--strict-domain",
        action="store_true",
        help="exit with 1 if a call just outside the domain, such as packed sequences that it excludes, is accepted and wrong",
    )
    add_outputs(parser)
    add_certificate(parser)
    add_ranks(parser)
    add_sanitize(parser)
    add_common(parser)
    add_known(parser)


def _merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", nargs="+", metavar="FILE", help="what `check --shard K/N --json FILE` wrote")
    parser.add_argument("--json", metavar="FILE", help="also write the record of the whole check to FILE (-: to stdout)")
    parser.add_argument("--budget-ok", action="store_true", help="do not exit with 3 for what the shards' budgets did not reach")
    parser.add_argument("--strict-reach", action="store_true", help="as for check; it counts what any shard passed or ran")
    parser.add_argument("--strict-domain", action="store_true", help="as for check; it counts what any shard asked")
    add_outputs(parser)


def _draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", nargs="?", help=f"{ADAPTER} (default: those that pyproject.toml lists)")
    add_settings(parser)
    parser.add_argument(
        "--law", type=law_word, action="append", metavar="LAW", help="print only the cases of this law (may be repeated)"
    )
    parser.add_argument("--profile", choices=PROFILES, help="as for check (default quick; gpu on a GPU)")
    parser.add_argument("--seed", type=seed_word, help="seed of the cases (default 0; with the profile soak random, and printed)")
    parser.add_argument("--climb", action="store_true", help="print what check --climb draws before it climbs")
    parser.add_argument(
        "--device", choices=DEVICES, help="where check would run the cases (default: cuda if there is a GPU, else cpu)"
    )
    parser.add_argument("--shard", type=shard_word, metavar="K/N", help="print the cases of the K-th of N parts, as for check")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each case: its law, its number and its line")
    parser.add_argument("--path", metavar="DIR", help="a checkout in which modules are looked for first, as for check")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="OPERATION|ADAPTER", help=f"an operation, whose domain has its defaults; or {ADAPTER}")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write; one that is partly written is completed")
    _cases(parser, "quick", "")
    parser.add_argument("--path", metavar="DIR", help="a checkout in which modules are looked for first, as for check")


def _judge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        help="the folder that export has written; or calls that FlashInfer has dumped, or that verify.watch has written",
    )
    parser.add_argument(
        "answers",
        nargs="?",
        metavar="ANSWERS",
        help="a folder of answers: for each file of DIR, one of the same name; none for dumps and watched calls",
    )
    parser.add_argument("--law", type=law_word, action="append", metavar="LAW", help="judge only this law (may be repeated)")
    parser.add_argument("-x", "--stop", "--stop-at-first", action="store_true", help="stop at the first broken law")
    parser.add_argument("--workers", type=positive_word, help="processes that judge (default: one for each core, at most 4)")
    parser.add_argument("--json", metavar="FILE", help="also write JSON lines to FILE, as for check (-: to stdout)")
    parser.add_argument(
        "--deadline", type=seconds_word, metavar="S", help="after how many seconds a case counts as a hang (default 120)"
    )
    parser.add_argument("--findings", default=FINDINGS, metavar="FOLDER", help=f"folder for findings (default {FINDINGS})")
    add_outputs(parser)


def _soak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", nargs="+", help="adapters, as for check")
    parser.add_argument(
        "--minutes", type=minutes_word, default=30.0, metavar="M", help="minutes that the rounds may take (default 30)"
    )
    add_asking(parser, "default: more from round to round")
    parser.add_argument("--seed", type=seed_word, help="seed of the rounds (default: random, and printed)")
    add_outputs(parser)
    add_common(parser)
    add_known(parser)


def _line(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("line", nargs="+", metavar="LINE", help=f"{words}; in quotes or not")


def _repeat(parser: argparse.ArgumentParser) -> None:
    _line(parser, 'the line after "repeat" in a failure: law=... adapter=... lengths=...; several run in one process, in order')
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--upstream",
        metavar="FILE",
        help="if the line is broken, also write an issue for the library's authors to FILE, with a script that shows it",
    )
    add_ranks(parser)
    add_sanitize(parser)
    add_common(parser, examples=False)
    parser.add_argument(
        "--no-examples",
        action="store_true",
        help="accepted as for check; without effect, because repeat runs and stores no examples",
    )


def _known(parser: argparse.ArgumentParser) -> None:
    _line(parser, "a line that fails, as repeat takes it")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="what is wrong, and where it is reported")
    parser.add_argument("--known", metavar="FILE", help="the file to write (default: known_defects.toml beside the adapter's file)")
    parser.add_argument(
        "--where",
        default="",
        metavar="WORDS",
        help="words that every case of the defect has, such as 'dtype=fp16 state=zero' (default: all options of the line's case, "
        "and without --also and --kernel its variant, but no sizes)",
    )
    parser.add_argument("--also", action="append", default=[], metavar="LAW", help="another law that it breaks (may be repeated)")
    parser.add_argument("--times", type=float, metavar="X", help="explain errors up to X times their tolerance (default: any)")
    parser.add_argument(
        "--kernel",
        default="",
        metavar="KERNEL:NAME=VALUE",
        help="the defect is in this autotune configuration of a kernel, so that every adapter that launches it may show it",
    )
    add_common(parser, keeps=False, examples=False)


def _launches(parser: argparse.ArgumentParser) -> None:
    _line(parser, "a line with device=cuda, as repeat takes it")
    parser.add_argument("--calls", type=positive_word, default=4, metavar="N", help="calls with the same inputs (default 4)")
    parser.add_argument(
        "--beside",
        type=tune_word,
        action="append",
        metavar="NUMBER|native",
        help="also call with the configurations that this number draws (may be repeated); those that the line names stay",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_common(parser, keeps=False, examples=False)


def _arithmetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=DEVICES, help="the device to measure (default: cuda if there is a GPU, else cpu)")
    add_ranks(parser, "number of processes for the collectives (default: the GPUs, at most 4; 4 on a CPU; under torchrun: its own)")
    parser.add_argument("--json", metavar="FILE", help="also write one JSON object to FILE")
    parser.add_argument("--record", metavar="FILE", help="also write what was measured to FILE, as the table of a known card")


def _across(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("asked", nargs="+", metavar="LINE|ADAPTER", help=f"lines as repeat takes them; or {ADAPTER}")
    _places(parser)
    _cases(parser, "least", "of an adapter: ")
    parser.add_argument(
        "--workers", type=positive_word, help="places that are asked at a time (default: the number of cores, at most 4)"
    )
    _of_places(parser)


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER", help=f"{ADAPTER}; or two of them, that of the old version first")
    _places(parser)
    _cases(parser, "few", "")
    parser.add_argument("--device", choices=DEVICES, help="where kernels run (default: cuda if there is a GPU, else cpu)")
    parser.add_argument(
        "--same-bits", action="store_true", help="the new version promises the bits of the old one: exit with 1 where they differ"
    )
    _of_places(parser)


def _twin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trainer", metavar="TRAINER", help=f"the implementation in training: {ADAPTER}")
    parser.add_argument("server", metavar="SERVER", help="the implementation in serving, of the same operation")
    _places(parser)
    parser.add_argument(
        "--tokens",
        type=tokens_word,
        metavar="N",
        help="tokens of a sequence, 2 to 65536 (default: 4096 on a GPU; on a CPU 1024, or 192 if kernels are interpreted)",
    )
    parser.add_argument("--seed", type=seed_word, default=0, help="seed of the cases (default 0)")
    parser.add_argument("--device", choices=DEVICES, help="where kernels run (default: cuda if there is a GPU, else cpu)")
    _of_places(parser)


def _cases(parser: argparse.ArgumentParser, profile: str, when: str) -> None:
    parser.add_argument(
        "--law", type=law_word, action="append", metavar="LAW", help=f"{when}only cases of this law (may be repeated)"
    )
    parser.add_argument("--profile", default=profile, choices=PROFILES, help=f"{when}how many cases (default {profile})")
    parser.add_argument("--seed", type=seed_word, default=0, help=f"{when}seed of the cases (default 0)")


def _places(parser: argparse.ArgumentParser) -> None:
    places: dict[str, Any] = {"action": "append", "dest": "places"}
    parser.add_argument(
        "--release",
        **places,
        type=release_word,
        metavar="PACKAGE==VERSION",
        help="a release, without its dependencies; several wheels of one package are joined by commas (may be repeated)",
    )
    parser.add_argument(
        "--path", **places, type=path_word, metavar="DIR", help="a folder of modules, or a checkout (may be repeated)"
    )
    parser.add_argument(
        "--rev",
        **places,
        type=revision_word,
        metavar="REVISION",
        help="a revision of the repository of the adapter's file; of a built-in adapter, of the current folder (may be repeated)",
    )
    parser.add_argument("--python", **places, type=python_word, metavar="EXE", help="another environment (may be repeated)")


def _bisect(parser: argparse.ArgumentParser) -> None:
    _line(parser, "a line that holds with one version and is broken with another, as repeat takes it")
    parser.add_argument("--good", required=True, metavar="VERSION", help="a release or revision with which the line holds")
    parser.add_argument("--bad", required=True, metavar="VERSION", help="a release or revision with which it is broken")
    parser.add_argument(
        "--package",
        type=package_word,
        metavar="PACKAGE",
        help="whose releases are searched; several of the same version are joined by commas (default: that of a built-in adapter)",
    )
    parser.add_argument(
        "--releases", type=versions_word, metavar="VERSIONS", help="search these, joined by commas (default: all that pip finds)"
    )
    parser.add_argument(
        "--rev", action="store_true", help="search revisions of the repository of the adapter's file, as for across"
    )
    _of_places(parser)


def _of_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="download missing releases with pip, without a question")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--deadline", type=seconds_word, metavar="S", help="seconds after which a run counts as a hang (default 120)"
    )
    parser.add_argument(
        "--interpreter", choices=("grid", "sequential"), help="how Triton kernels run without a GPU, as for repeat: grid (default)"
    )


def _zoo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="run only these animals, or your own as FILE.py:CLASS (default: all)"
    )
    parser.add_argument("--law", type=law_word, action="append", metavar="LAW", help="check only this law (may be repeated)")
    parser.add_argument(
        "--letter", action="append", choices=LETTERS, help="run only animals of this class of defects (may be repeated)"
    )
    parser.add_argument("--seed", type=seed_word, default=0, help="seed of the cases (default 0)")
    parser.add_argument(
        "--workers",
        type=positive_word,
        default=min(cores(), 4),
        help="number of processes (default: one for each core, at most 4)",
    )
    parser.add_argument(
        "--deadline",
        type=positive_word,
        default=10,
        metavar="S",
        help="seconds after which a run counts as a hang, which is a kill (default 10)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write one JSON object to FILE")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page to FILE (needs the extra zoo)")
    parser.add_argument(
        "--rule",
        action="append",
        metavar="SUITE",
        help="run a test suite on the animals: your inputs and acceptance rule as FILE.py:NAME, the name of a published suite, "
        "or all of those (may be repeated)",
    )
    mutants = parser.add_argument_group("mutants of a kernel's own source, in place of animals")
    mutants.add_argument(
        "--mutate", metavar="ADAPTER", help="edit the Triton kernels that this adapter launches, at one place in each mutant"
    )
    mutants.add_argument(
        "--sample", type=positive_word, metavar="N", help="check only so many mutants, spread over all kernels and operators"
    )
    mutants.add_argument("--id", action="append", metavar="ID", help="check only this mutant (may be repeated)")
    mutants.add_argument("--grep", type=_expression, metavar="RE", help="check only mutants whose lines in --list match")
    mutants.add_argument(
        "--profile", default="quick", choices=PROFILES, help="use the cases of this profile of check (default quick)"
    )
    mutants.add_argument("--list", action="store_true", help="print every mutant and check none")


def _expression(word: str) -> str:
    try:
        re.compile(word)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"must be a regular expression, got {word!r}: {error}") from None
    return word


def _claims(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--claim",
        type=int,
        choices=(*CLAIMS, *PULLS),
        action="append",
        help="only this claim (may be repeated): "
        + ", ".join(f"{claim} {name}" for claim, name in CLAIMS.items())
        + "; or of this pull request of Megatron-LM, on its releases: "
        + ", ".join(f"{pull} {name}" for pull, name in PULLS.items()),
    )
    parser.add_argument(
        "--megatron",
        action="store_true",
        help="settle the claims of all these pull requests, on the authors' released code",
    )
    parser.add_argument(
        "--releases",
        metavar="DIR",
        help=f"for pull requests: a folder that has a folder for each release of Megatron-LM (default {FOLDER})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"use fewer sizes and rounds, and tune kernels over at most {CONFIGURATIONS} configurations",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="cpu: interpreted, with tiny sizes, whose times mean nothing (default cuda; for pull requests cpu without a GPU)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write one JSON object to FILE, again after each part")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument("--path", metavar="DIR", help="look for modules in this folder first, such as SGLang's files")


def _fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("library", choices=LIBRARIES, help="the library")
    parser.add_argument(
        "--release", metavar="VERSION", help="a release that we tried, such as 0.18.2 of megatron (default: the newest of them)"
    )
    parser.add_argument(
        "--to",
        metavar="DIR",
        help="the folder for its files (default .gdn-verify/libraries/LIBRARY, with -VERSION at the end for an older release)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def _certificate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file that check --certificate has written")
    parser.add_argument(
        "--allowed-signers",
        metavar="FILE",
        help="the signers whom you trust, as ssh-keygen reads them (default: any key may have signed, and the report says so)",
    )
    parser.add_argument("--again", action="store_true", help="also run the lines that the certificate has as a sample")
    parser.add_argument("--path", metavar="DIR", help="a folder in which source files are looked for first")


def _new_process(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("language", choices=LANGUAGES, help="the language of the kernel")
    parser.add_argument("--to", default=".", metavar="DIR", help="the folder for the two files (default: this one)")


# Each verb with the class of its options, its module in verify/cli and function, what it does, and its arguments.
VERBS: tuple[tuple[str, type[Any], str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("list", kinds.ListOptions, "list_command:list_all", "print operations, laws, adapters, and what this host can run", _list),
    ("check", kinds.CheckOptions, "check_command:check", "check an adapter against the laws", _check),
    ("merge", kinds.MergeOptions, "merge_command:act", "join the records of a check's shards into one verdict", _merge),
    ("draw", kinds.DrawOptions, "draw_command:draw", "print the lines of the cases that check would run", _draw),
    (
        "export",
        kinds.ExportOptions,
        "export_command:export",
        "write the calls of a check's cases as files, for what no process can ask",
        _export,
    ),
    ("judge", kinds.JudgeOptions, "export_command:judge", "judge the answers to what export has written, as check does", _judge),
    ("repeat", kinds.RepeatOptions, "repeat_command:repeat", "run one printed line again", _repeat),
    ("known", kinds.KnownOptions, "known_command:put_on_file", "put a failure on file as a known defect", _known),
    (
        "launches",
        kinds.LaunchesOptions,
        "launches_command:launches",
        "find the kernel launch that gives other numbers in another call",
        _launches,
    ),
    (
        "arithmetic",
        kinds.ArithmeticOptions,
        "arithmetic_command:act",
        "measure how the device computes, and compare it with its known table",
        _arithmetic,
    ),
    (
        "across",
        kinds.AcrossOptions,
        "across_command:across",
        "run lines on several releases, folders, revisions or environments",
        _across,
    ),
    ("bisect", kinds.BisectOptions, "bisect_command:bisect", "find the release or revision that broke or mended a line", _bisect),
    ("compare", kinds.CompareOptions, "compare_command:compare", "judge an old and a new version on the same cases", _compare),
    (
        "twin",
        kinds.TwinOptions,
        "twin_command:twin",
        "compare an implementation for training with one for serving, token by token",
        _twin,
    ),
    ("soak", kinds.SoakOptions, "soak_command:soak_all", "check adapters in rounds with other cases, until a time is over", _soak),
    ("zoo", kinds.ZooOptions, "zoo_command:act", "run wrong implementations, and print which laws kill them", _zoo),
    (
        "claims",
        kinds.ClaimsOptions,
        "claims_command:act",
        "measure what published changes claim, on the GPUs of this host",
        _claims,
    ),
    ("fetch", kinds.FetchOptions, "fetch_command:act", "download the files of a library that adapters import", _fetch),
    (
        "completion",
        kinds.CompletionOptions,
        "completion_command:complete",
        "print a script with which a shell completes command lines",
        _completion,
    ),
    (
        "certificate",
        kinds.CertificateOptions,
        "certificate_command:certificate",
        "verify the certificate that check has written",
        _certificate,
    ),
    (
        "new-process",
        kinds.NewProcessOptions,
        "new_process_command:write",
        "write a kernel in another language, and the adapter for it",
        _new_process,
    ),
)
