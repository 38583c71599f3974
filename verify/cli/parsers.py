"""The parsers of the command line, one for each verb. They need no torch, so that help and refusals are quick."""

import argparse
import re
from typing import Any, NoReturn

import verify
from properties.words.line import split_line
from properties.words.names import did_you_mean
from verify.adapters.registry import ANSWERS, ZOO, check_spec
from verify.cli.arguments import ADAPTER, VERBS
from verify.cli.exits import EXITS, EXITS_OF, USAGE
from verify.cli.options import law_word
from verify.cli.terminal import print_error


class OptionParser(argparse.ArgumentParser):
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

    @property
    def actions(self) -> list[argparse.Action]:
        """Its options and arguments."""
        return list(self._actions)

    def value_of(self, action: argparse.Action, word: str) -> Any:
        """The value of an option for which a command line has a word. ArgumentError if the option does not take it."""
        value = self._get_value(action, word)
        self._check_value(action, value)
        return value

    def takes_several(self, action: argparse.Action) -> bool:
        """Whether an option may be repeated, and adds to a list each time."""
        return isinstance(action, argparse._AppendAction)

    def error(self, message: str) -> NoReturn:
        print_error(f"{message} (see {self.prog} --help)")
        raise SystemExit(USAGE)


def parser() -> OptionParser:
    """The parser of the whole command line.

    Of what it returns, `act` is the module of verify/cli and the function of the verb, and `kind` the class of its options.
    """
    top = OptionParser(
        prog="gdn-verify",
        description="Check whether a Gated DeltaNet implementation is right on every shape and packing\n"
        "that it supports, and find the smallest case that fails.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"gdn-verify {verify.__version__}")
    parsers = top.add_subparsers(required=True, metavar=f"{{{','.join(name for name, *_ in VERBS)}}}", dest="verb")
    for name, kind, act, words, add_arguments in VERBS:
        verb: argparse.ArgumentParser = parsers.add_parser(
            name, help=words, epilog=EXITS_OF.get(name, EXITS), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        verb.set_defaults(act=act, kind=kind)
        add_arguments(verb)
    return top


def verbs_of(top: OptionParser) -> dict[str, OptionParser]:
    """The parser of each verb."""
    return dict(next(action.choices for action in top.actions if isinstance(action, argparse._SubParsersAction)))


def refuse(options: argparse.Namespace) -> None:
    """Refuse unknown laws and adapters before torch is imported. ValueError or AdapterError names the nearest.

    Afterwards `line` is the same however it was written, and `after` has the lines of `repeat` before it.
    """
    if options.verb in ("check", "draw"):
        if not options.adapters or (options.adapter is not None and vars(options).get("own") is not None):
            raise ValueError(f"{options.verb} needs one adapter: {ADAPTER}; or [tool.gdn-verify] in pyproject.toml must list some")
        for spec in options.adapters:
            check_spec(spec)
    for spec in options.adapter if options.verb == "soak" else ():
        check_spec(spec)
    if "line" in options:
        *before, options.line = _lines(" ".join(options.line)) if options.verb == "repeat" else [" ".join(options.line)]
        options.after = before
        for line in (*before, options.line):
            _check_line(line)
    if options.verb == "export" and ("/" in options.adapter or ".py" in options.adapter):  # else it is an operation
        check_spec(options.adapter)
    if options.verb == "judge" and options.answers is not None:
        check_spec(f"{ANSWERS}{options.folder}:{options.answers}")
    if options.verb == "across":
        text = " ".join(options.asked)
        options.lines = _lines(text) if text.startswith("law=") else []
        for line in options.lines:
            _check_line(line)
        if not options.lines:
            check_spec(text)
        if not options.places:
            raise ValueError("across needs a place: --release PACKAGE==VERSION, --path DIR, --rev REVISION or --python EXE")
    if options.verb == "compare":
        for spec in options.adapters:
            check_spec(spec)
        options.places = options.places or []
        count = len(options.adapters), len(options.places)
        if count not in ((1, 2), (2, 0), (2, 1), (2, 2)):
            raise ValueError(
                "compare needs one adapter and two places, the old one first (--release PACKAGE==VERSION, --path DIR, "
                f"--rev REVISION or --python EXE), or two adapters and at most two places; got {count[0]} and {count[1]}"
            )
    if options.verb == "twin":
        for spec in (options.trainer, options.server):
            check_spec(spec)
        options.places = options.places or []
        if len(options.places) > 2:
            raise ValueError(f"twin takes at most two places, that of the trainer first, got {len(options.places)}")
    if options.verb == "zoo":
        for name in options.names:
            check_spec(name if ".py" in name else ZOO + name.removeprefix(ZOO))
        if options.mutate:
            check_spec(options.mutate)


def _lines(text: str) -> list[str]:
    """The lines in a text. Several begin with their laws each; the words of one may have any order."""
    text = text.strip()
    return re.split(r"\s+(?=law=)", text) if text.startswith("law=") else [text]


def _check_line(line: str) -> None:
    words = split_line(line)
    if "law" in words:
        try:
            law_word(words["law"])
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None
    if "adapter" in words:
        check_spec(words["adapter"])
