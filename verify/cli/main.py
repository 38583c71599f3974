"""The command line. Results go to stdout, progress to stderr; verify/cli/exits.py defines the exit codes."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from properties.names import did_you_mean
from verify.adapters.loader import AdapterError
from verify.adapters.registry import BUILT_IN
from verify.cli import claims_command as claims
from verify.cli import draw_command, fetch_command, known_command
from verify.cli import zoo_command as command
from verify.cli.check_command import check as check_adapter
from verify.cli.exits import EXITS, INTERRUPTED, TOLD, UNDECIDED, USAGE, NoGpu
from verify.cli.launches_command import launches as tell_launches
from verify.cli.list_command import list_all
from verify.cli.options import (
    add_asking,
    add_common,
    add_known,
    add_ranks,
    add_sanitize,
    find_in,
    minutes_word,
    positive_word,
    seed_word,
    tune_word,
)
from verify.cli.output import progress
from verify.cli.repeat_command import repeat as repeat_line
from verify.cli.soak_command import soak_all
from verify.execution import sanitizer
from verify.interpreter import SEQUENTIAL


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    code = UNDECIDED
    try:
        options = parser().parse_args(arguments)
        find_in(getattr(options, "path", None))
        if chosen := getattr(options, "interpreter", None):
            os.environ[SEQUENTIAL] = chosen
        code = int(options.act(options))
        sys.stdout.flush()
    except (AdapterError, ValueError) as error:
        print(f"gdn-verify: {error}", file=sys.stderr)
        return USAGE
    except (NoGpu, sanitizer.NoSanitizer) as error:
        print(f"gdn-verify: {error}", file=sys.stderr)
        return UNDECIDED
    except KeyboardInterrupt:
        print("gdn-verify: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has closed it, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:  # an error of gdn-verify must not look like a broken law
        traceback.print_exc()
        print(f"gdn-verify: {type(error).__name__} inside gdn-verify, so nothing is decided", file=sys.stderr)
        return UNDECIDED
    return code


class _Parser(argparse.ArgumentParser):
    """A parser that reports bad usage in one line, without the usage block, and names what may have been meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            text = f"invalid choice: {value!r}{did_you_mean(str(value), choices)}; choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, text)

    def parse_known_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse an unknown option here, where the options of the verb are known."""
        result, left = super().parse_known_args(arguments, namespace)
        if unknown := next((word.partition("=")[0] for word in left if word.startswith("-")), None):
            options = {option.lstrip("-"): option for option in self._option_string_actions}
            near = did_you_mean(unknown.lstrip("-"), options).replace("mean ", "mean --")
            self.error(f"unknown option {unknown}{near}")
        return result, left

    def error(self, message: str) -> NoReturn:
        print(f"gdn-verify: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = _Parser(
        prog="gdn-verify",
        description="Check whether a Gated DeltaNet implementation is right on every shape and packing that it supports, "
        "and find the smallest case that fails.",
        epilog=EXITS,
    )
    verbs = top.add_subparsers(required=True, metavar="{list,check,draw,repeat,known,launches,soak,zoo,claims,fetch}")
    listing = verbs.add_parser("list", help="print operations, laws, adapters, and what this host can run", epilog=EXITS)
    listing.add_argument("--json", action="store_true", help="one JSON object on stdout")
    listing.set_defaults(act=list_all)

    check = verbs.add_parser("check", help="check an adapter against the laws", epilog=EXITS)
    check.add_argument("adapter", nargs="?", help=f"{', '.join(BUILT_IN)}, or your own as my_kernel.py:MyKernel")
    check.add_argument("--adapter", dest="own", metavar="FILE.py:CLASS", help="the adapter, as an option")
    add_asking(check, "default quick; gpu on a GPU")
    check.add_argument("--seed", type=seed_word, help="seed of the cases (default 0; with the profile soak random, and printed)")
    check.add_argument(
        "--climb",
        action="store_true",
        help="draw half of the cases as variations of those with the largest errors so far, as soak does",
    )
    check.add_argument(
        "--minutes",
        type=minutes_word,
        metavar="M",
        help="begin no case after M minutes (default: no limit); the laws that find most come first",
    )
    check.add_argument(
        "--strict-reach",
        action="store_true",
        help="exit with 3 if every law holds but a parameter was never passed, or a branch of an interpreted kernel never ran",
    )
    add_ranks(check)
    add_sanitize(check)
    add_common(check)
    add_known(check)
    check.set_defaults(act=check_adapter)

    drawing = verbs.add_parser("draw", help="print the lines of the cases that check would run", epilog=draw_command.EXITS)
    draw_command.arguments(drawing)
    drawing.set_defaults(act=draw_command.draw)

    soaking = verbs.add_parser("soak", help="check adapters in rounds with other cases, until a time is over", epilog=EXITS)
    soaking.add_argument("adapter", nargs="+", help="adapters, as for check")
    soaking.add_argument(
        "--minutes", type=minutes_word, default=30.0, metavar="M", help="minutes that the rounds may take (default 30)"
    )
    add_asking(soaking, "default: more from round to round")
    soaking.add_argument("--seed", type=seed_word, help="seed of the rounds (default: random, and printed)")
    add_common(soaking)
    add_known(soaking)
    soaking.set_defaults(act=soak_all)

    repeat = verbs.add_parser("repeat", help="run one printed line again", epilog=EXITS)
    repeat.add_argument("line", help='the line after "repeat" in a failure: "law=... adapter=... lengths=..."')
    repeat.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_ranks(repeat)
    add_sanitize(repeat)
    add_common(repeat, examples=False)
    repeat.add_argument(
        "--no-examples",
        action="store_true",
        help="accepted as for check; without effect, because repeat runs and stores no examples",
    )
    repeat.set_defaults(act=repeat_line)

    filing = verbs.add_parser("known", help="put a failure on file as a known defect", epilog=known_command.EXITS)
    known_command.arguments(filing)
    add_common(filing, keeps=False, examples=False)
    filing.set_defaults(act=known_command.put_on_file)

    narrowing = verbs.add_parser("launches", help="find the kernel launch that gives other numbers in another call", epilog=TOLD)
    narrowing.add_argument("line", help="a line with device=cuda, as repeat takes it")
    narrowing.add_argument("--calls", type=positive_word, default=4, metavar="N", help="calls with the same inputs (default 4)")
    narrowing.add_argument(
        "--beside",
        type=tune_word,
        action="append",
        metavar="NUMBER|native",
        help="also call with the configurations that this number draws (may be repeated); those that the line names stay",
    )
    narrowing.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_common(narrowing, keeps=False, examples=False)
    narrowing.set_defaults(act=tell_launches)

    zoo = verbs.add_parser("zoo", help="run wrong implementations, and print which laws kill them", epilog=command.EXITS)
    command.arguments(zoo, seed_word, positive_word)
    zoo.set_defaults(act=lambda options: command.act(options, progress))

    measured = verbs.add_parser(
        "claims", help="measure what published changes claim, on the GPUs of this host", epilog=claims.EXITS
    )
    claims.arguments(measured)
    measured.set_defaults(act=claims.act)

    fetching = verbs.add_parser(
        "fetch", help="download the files of a serving library that adapters import", epilog=fetch_command.EXITS
    )
    fetch_command.arguments(fetching)
    fetching.set_defaults(act=fetch_command.act)
    return top
