"""The verb `completion`: print a script with which a shell completes verbs, options, and names of laws, profiles and adapters."""

import sys

import shtab

from verify.adapters.registry import BUILT_IN
from verify.cli import terminal
from verify.cli.exits import HOLDS
from verify.cli.options import law_word
from verify.cli.parsers import OptionParser, parser, verbs_of
from verify.cli.verb_options import CompletionOptions
from verify.engine.power import LAWS

# The function of a shell that completes adapters. shtab's script of bash treats what it yields as files, because of its name.
NAME = "_gdn_verify_file_or_adapter"
# A name is one of ours, or the file of one's own.
ADAPTERS = {
    "bash": NAME,
    "zsh": NAME,
    "tcsh": f"({' '.join(BUILT_IN)})",
    "preamble": {
        "bash": f"""
{NAME}() {{
  compgen -W "{" ".join(BUILT_IN)}" -- "$1"
  compgen -f -X '!*.py' -- "$1"
  compgen -d -- "$1"
}}
""",
        "zsh": f"""
{NAME}() {{
  local -a names
  names=({" ".join(BUILT_IN)})
  compadd -a names
  _files -g '*.py'
}}
""",
    },
}
PLACES = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "DIR": shtab.DIRECTORY}  # by what an option calls its value


def complete(options: CompletionOptions) -> int:
    """Print the script of a shell. Returns the exit code."""
    top = parser()
    for verb in verbs_of(top).values():
        _describe(verb)
    terminal.write(shtab.complete(top, options.shell), sys.stdout)
    return HOLDS


def _describe(verb: OptionParser) -> None:
    """Say what a verb's options and arguments take, where the parser itself has no list of choices."""
    for action in verb.actions:
        if isinstance(action.metavar, str):
            action.metavar = action.metavar.replace(":", " ")  # which parts the words of zsh's descriptions
        if action.choices is not None:
            action.choices = tuple(action.choices)  # shtab takes a mapping for verbs
        elif action.type is law_word:
            action.choices = LAWS
        elif action.dest in ("adapter", "own", "mutate"):
            setattr(action, "complete", ADAPTERS)  # noqa: B010 - shtab reads this attribute, which argparse does not know
        elif isinstance(action.metavar, str) and action.metavar in PLACES:
            setattr(action, "complete", PLACES[action.metavar])  # noqa: B010
