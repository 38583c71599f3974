"""The command line. Results go to stdout, progress to stderr; verify/cli/exits.py defines the exit codes.

A command line is read without torch, whose import takes seconds. Then the module of the verb is imported, which needs it.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from gdn_verify import Shadowed, check_names
from verify.adapters.registry import AdapterError
from verify.cli import settings
from verify.cli.exits import INTERRUPTED, UNDECIDED, USAGE
from verify.cli.options import find_in
from verify.cli.parsers import parser, refuse
from verify.cli.terminal import Unwritable, print_error
from verify.cli.verb_options import CheckOptions, RepeatOptions, SoakOptions, options_of
from verify.process import prestart
from verify.process.choices import NoGpu, NoInterpreter, NoSanitizer
from verify.process.fork_server import importing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return its exit code."""
    code, is_process = UNDECIDED, arguments is None
    if sys.stderr is None:  # closed: what it is told goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - until this process ends
    if sys.stdout is None:
        print_error("stdout is closed, so no result can be printed; send it to /dev/null if nobody is to read it")
        return UNDECIDED
    try:
        namespace = settings.parse(parser(), arguments)
        refuse(namespace)
        options = options_of(namespace.kind, namespace)
        find_in(vars(namespace).get("path"))
        check_names()
        if is_process:
            _prestart(options)
        with importing() if is_process else contextlib.nullcontext():
            act = _act(namespace.act)
        code = act(options)
        sys.stdout.flush()
    except (AdapterError, Shadowed, ValueError) as error:
        print_error(str(error))
        return USAGE
    except (NoGpu, NoInterpreter, NoSanitizer) as error:
        print_error(str(error))
        return UNDECIDED
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has closed it, as in `... | head`
        _discard_stdout()
    except Unwritable as error:
        _discard_stdout()
        print_error(str(error))
        return UNDECIDED
    except Exception as error:  # an error of gdn-verify must not look like a broken law
        traceback.print_exc()
        print_error(f"{type(error).__name__} inside gdn-verify, so nothing is decided")
        return UNDECIDED
    return code


def _act(place: str) -> Callable[[Any], int]:
    """The function that a parser names as `module:function`, with the module in verify/cli."""
    module, _, function = place.partition(":")
    act: Callable[[Any], int] = getattr(importlib.import_module(f"verify.cli.{module}"), function)
    return act


def _prestart(options: object) -> None:
    """Start the worker that a command will most likely need. With ranks or a sanitizer it needs others."""
    match options:
        case CheckOptions(ranks=None, sanitize=None) | SoakOptions():
            prestart.begin(options.device)
        case RepeatOptions(ranks=None, sanitize=None):
            prestart.begin("cuda" if "device=cuda" in options.line.split() else "cpu")


def _discard_stdout() -> None:
    """Send what is left for stdout to nowhere, so that Python's own flush at the end raises nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
