"""Settings of checks in the pyproject.toml of a user's project: the table `[tool.gdn-verify]`, and jobs, which override it.

A key is the name of an option of `check`, and its value is read as the option's word is. So there is one list of options, and one
set of rules. An option on the command line overrides both tables. Nothing here imports torch, and nothing of the file is run.
"""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from properties.words.names import unknown
from verify.adapters.registry import AdapterError, check_spec
from verify.cli.parsers import OptionParser, verbs_of

FILE, TABLE = "pyproject.toml", "gdn-verify"
ADAPTERS, JOBS, JOB = "adapters", "jobs", "job"
VERBS = ("check", "draw")
# Options that are no settings: those that choose among settings, and the adapter, which is in the list `adapters`.
NO_SETTINGS = ("help", "own", JOB, "no_settings")
LISTS = {"laws": "law"}  # names of keys with several values; their option has one at a time
PLACES = ("FILE", "FOLDER", "DIR")  # what options whose value is a path call it
Table = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ProjectSettings:
    """The settings of a project for one job: `values` by the attribute that the option sets. `job` is "" without one."""

    file: str
    job: str = ""
    adapters: tuple[str, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        place = os.path.relpath(self.file)
        return f"{place}, job {self.job}" if self.job else place


def parse(top: OptionParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line. Options that it does not give are those of the project's settings.

    Afterwards `adapters` has the adapters of `check` and `draw`, and `settings` says where settings come from, or "". ValueError
    names the file, the key, its value and what is wrong.
    """
    options: argparse.Namespace = top.parse_args(arguments)
    if options.verb not in VERBS:
        return options
    spec = options.adapter or vars(options).get("own")
    options.adapters, options.settings = [spec] if spec else [], ""
    if options.no_settings:
        if options.job:
            raise ValueError("--job must be left out with --no-settings, which reads no job")
        return options
    verbs = verbs_of(top)
    settings = find(os.getcwd(), options.job, verbs["check"])
    if settings is None:
        if options.job:
            raise ValueError(f"--job {options.job} needs [tool.{TABLE}] in a {FILE} of this folder or of one above it")
        return options
    if not options.adapters:
        options.adapters = _checked(settings)
    own = {action.dest: action for action in verbs["check"].actions}
    same = [action.dest for action in verbs[options.verb].actions if _kind(action) == _kind(own.get(action.dest, action))]
    values = {name: value for name, value in settings.values.items() if name in same}
    verbs[options.verb].set_defaults(**dict.fromkeys(values))
    given = top.parse_args(arguments)  # None where the command line gives nothing
    vars(options).update({name: value for name, value in values.items() if getattr(given, name) is None})
    options.settings = str(settings)
    return options


def find(folder: str, job: str | None, check: OptionParser) -> ProjectSettings | None:
    """The settings of the nearest pyproject.toml from a folder upwards. None if there is none, or if it has no table of ours."""
    while not os.path.isfile(file := os.path.join(folder, FILE)):
        if folder == (folder := os.path.dirname(folder)):
            return None
    return read(file, job, check)


def read(file: str, job: str | None, check: OptionParser) -> ProjectSettings | None:
    """The settings of a file, for a job or for none. None if it has no table of ours. Other jobs are read too."""
    import tomllib  # only a check needs it

    try:
        with open(file, "rb") as opened:
            tables = tomllib.load(opened).get("tool", {})
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no TOML: {' '.join(str(error).split())}") from None
    table = tables.get(TABLE) if isinstance(tables, dict) else None
    if table is None:
        return None
    place = f"{file}: [tool.{TABLE}]"
    if not isinstance(table, dict):
        raise ValueError(f"{place} must be a table, got {table!r}")  # noqa: TRY004 - bad usage is a ValueError
    jobs = table.get(JOBS, {})
    if not (isinstance(jobs, dict) and all(isinstance(each, dict) for each in jobs.values())):
        raise ValueError(f"{place} {JOBS} must have a table for each job, got {jobs!r}")
    base = _values(place, check, {key: value for key, value in table.items() if key != JOBS}, file)
    named = {name: _values(f"{file}: [tool.{TABLE}.{JOBS}.{name}]", check, each, file) for name, each in jobs.items()}
    if job and job not in named:
        raise ValueError(f"{file}: {unknown(JOB, job, named) if named else f'--job {job}: there are no jobs'}")
    values = {**base, **named.get(job or "", {})}
    return ProjectSettings(file, job or "", tuple(values.pop(ADAPTERS, ())), values)


def _values(place: str, check: OptionParser, table: Table, file: str) -> dict[str, Any]:
    """The values of a table by the attribute that their options set."""
    actions, values = keys_of(check), dict[str, Any]()
    for key, value in table.items():
        if key != ADAPTERS and key not in actions:
            raise ValueError(f"{place}: {unknown('key', key, [ADAPTERS, *actions])}")
        try:
            if key == ADAPTERS:
                values[ADAPTERS] = _adapters(value, os.path.dirname(file))
            else:
                values[actions[key].dest] = _value(check, actions[key], value, os.path.dirname(file))
        except argparse.ArgumentError as error:
            raise ValueError(f"{place} {key} = {_shown(value)}: {error.message}") from None
        except ValueError as error:
            raise ValueError(f"{place} {key} = {_shown(value)}: {error}") from None
    return values


def keys_of(check: OptionParser) -> dict[str, argparse.Action]:
    """The option of each key besides `adapters`."""
    actions = [action for action in check.actions if action.option_strings and action.dest not in NO_SETTINGS]
    named = {word[2:]: action for action in actions for word in action.option_strings if word.startswith("--")}
    lists = {option: key for key, option in LISTS.items()}
    return {lists.get(name, name): action for name, action in named.items()}


def _adapters(value: Any, folder: str) -> list[str]:
    if not (isinstance(value, list) and all(isinstance(spec, str) for spec in value)):
        raise ValueError("must be a list of adapters, as texts")
    return list(dict.fromkeys(_spec(folder, spec) for spec in value))


def _spec(folder: str, spec: str) -> str:
    """An adapter's name; the file of one's own is relative to a folder."""
    place, colon, name = spec.rpartition(":")
    return f"{_place(folder, place)}:{name}" if colon and place.endswith(".py") else spec


def _value(check: OptionParser, action: argparse.Action, value: Any, folder: str) -> Any:
    """What a value means for an option. ArgumentError or ValueError if the option does not take it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if check.takes_several(action):
        return [_one(check, action, each, folder) for each in (value if isinstance(value, list) else [value])]
    if action.nargs == "?" and isinstance(value, bool):
        return action.const if value else None
    return _one(check, action, value, folder)


def _one(check: OptionParser, action: argparse.Action, value: Any, folder: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a text or a number")  # noqa: TRY004 - bad usage is a ValueError
    word = str(value)
    return check.value_of(action, _place(folder, word) if action.metavar in PLACES and word != "-" else word)


def _place(folder: str, word: str) -> str:
    """A path that is relative to a folder, from the current one. So a line that repeats a run is the same as without settings."""
    return word if os.path.isabs(word) else os.path.relpath(os.path.join(folder, word))


def _checked(settings: ProjectSettings) -> list[str]:
    """The adapters of settings. ValueError if one of them is unknown, or its file is not there."""
    for spec in settings.adapters:
        try:
            check_spec(spec)
        except AdapterError as error:
            raise ValueError(f"{settings.file}: [tool.{TABLE}] {ADAPTERS}: {error}") from None
    return list(settings.adapters)


def _kind(action: argparse.Action) -> tuple[Any, ...]:
    return type(action), action.type, action.nargs


def _shown(value: Any) -> str:
    """A value of TOML as one writes it there, if it is short."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
