"""What a command line says is a frozen class of its verb: each option is a field, and nothing else reads a parser's namespace."""

import dataclasses
import pathlib

import pytest

from verify.cli.parsers import parser, verbs_of
from verify.cli.verb_options import Cases, RepeatOptions, options_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
READ_BEFORE = {"own", "job", "no_settings", "path"}  # by settings.parse, which sets `adapters` and `settings`, and by main
MADE = {"adapters", "settings", "lines", "after", "given"}  # by settings.parse, by refuse, and by `judge`


def test_each_option_of_a_verb_is_a_field() -> None:
    lost, strange = dict[str, set[str]](), dict[str, set[str]]()
    for name, verb in verbs_of(parser()).items():
        fields = {field.name for field in dataclasses.fields(verb.get_default("kind"))}
        options = {action.dest for action in verb.actions} - {"help"}
        before = READ_BEFORE | ({"adapter"} if "adapters" in fields else set())
        lost |= {name: options - fields - before} if options - fields - before else {}
        strange |= {name: fields - options - MADE} if fields - options - MADE else {}
    assert (lost, strange) == ({}, {})


def test_options_are_frozen_and_complete() -> None:
    namespace = parser().parse_args(["repeat", "law=oracle", "--deadline", "7", "--interpreter", "sequential"])
    namespace.after = []
    options = options_of(RepeatOptions, namespace)
    assert (options.deadline, options.sequential, options.ranks) == (7.0, True, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.deadline = 8.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="'profile'"):
        options_of(Cases, namespace)


def test_a_namespace_goes_no_further_than_the_door() -> None:
    files = {path.name for path in (ROOT / "verify").rglob("*.py") if ": argparse.Namespace" in path.read_text(encoding="utf-8")}
    assert files == {"parsers.py", "settings.py", "verb_options.py"}
