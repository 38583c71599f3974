"""The page of commands has the verbs, options, defaults, choices and exit codes of the parsers, and no others."""

import argparse
import re
import shlex
from collections.abc import Iterator

from tests.pages import Row, code_column, codes, headings, prose_and_code, reference, section, table
from tests.sources import definition, options, verbs
from verify.process.cores import cores

# docs/reference/commands.md


def option_rows(verb: str) -> dict[tuple[str, ...], Row]:
    rows = table(section(reference("commands"), verb), "option") if options(verb) else []
    return {tuple(code.split()[0] for code in codes(row["option"])): row for row in rows}


def every_option() -> Iterator[tuple[str, argparse.Action, Row]]:
    """Each option of each verb by name, as its parser and as its row of the page describe it."""
    for verb in (*verbs(), "pytest"):
        rows = option_rows(verb)
        assert {*rows} == {*options(verb)}, verb
        yield from ((f"{verb} {names[0]}", action, rows[names]) for names, action in options(verb).items())


def test_the_page_of_commands_has_a_row_and_a_section_for_every_verb_and_no_other() -> None:
    page = reference("commands")
    rows = code_column(table(page.partition("\n## ")[0], "verb"), "verb")
    assert sorted(rows) == sorted(verbs())
    assert [words for _, level, words in headings(page) if level == 2] == ["Exit codes", *rows, "pytest"]


def test_the_options_of_a_verb_are_those_of_its_parser() -> None:
    for name, action, row in every_option():
        assert {len(code.split()) > 1 for code in codes(row["option"])} == {action.nargs != 0}, name
        assert ("[" in row["option"]) is (action.nargs == "?"), name


def test_the_defaults_of_options_are_those_of_the_parser() -> None:
    for name, action, row in every_option():
        cell = row["default"]
        if action.default is False:
            assert cell == "off", name
        elif action.required:
            assert cell == "must be given", name
        elif action.default in (None, [], ""):  # the page says in words what happens; values in the words are also in the help
            assert all(code in (action.help or "") for code in codes(cell) if not code.startswith("-")), name
            assert action.const is None or action.const in codes(cell), name
        elif action.dest == "workers":  # the default depends on the machine
            assert action.default == min(cores(), 4), name
            assert "cores, at most 4" in cell, name
        else:
            (code,) = codes(cell)
            assert type(action.default)(code) == action.default, name


def test_the_choices_of_options_are_those_of_the_parser() -> None:
    for name, action, row in every_option():
        meaning = row["meaning"]
        sentence = re.search(r"One of ((?:`[^`]+`(?:, )?)+)", meaning)
        if sentence:
            assert codes(sentence[1]) == [*map(str, action.choices or ())], name
        else:  # they may be in a table of the same page
            assert not action.choices or re.search(r"\]\(#[\w-]+\)", meaning), name


def test_every_option_of_a_verb_has_an_example() -> None:
    def words(verb: str) -> set[str]:
        blocks = prose_and_code(section(reference("commands"), verb))[1]
        return {word.partition("=")[0] for block in blocks for line in block[1:] for word in shlex.split(line, comments=True)}

    examples = {verb: words(verb) for verb in (*verbs(), "pytest")}
    assert [(verb, names) for verb in examples for names in options(verb) if not {*names} & examples[verb]] == []


def test_every_flag_in_the_page_of_commands_exists() -> None:
    code = "".join(re.findall(r"`[^`\n]+`|```.*?```", reference("commands"), re.DOTALL))
    flags = {*re.findall(r"(?<![\w-])--?[a-z][a-z-]*", code)}
    existing = {flag for verb in [*verbs(), "pytest"] for names in options(verb) for flag in names}
    assert flags - existing == {"-h", "--help", "--version", "-m", "--nproc-per-node"}


def test_profiles_letters_suites_and_claims_are_those_of_the_code() -> None:
    page = reference("commands")
    profiles = [
        (
            f"`{profile.name}`",
            str(profile.examples),
            *("yes" if has else "no" for has in (profile.large, profile.climbs)),
            "0" if profile.fixed_seed else "random",
        )
        for profile in definition("PROFILES").values()
    ]
    assert [tuple(row.values()) for row in table(section(page, "Profiles"), "profile")] == profiles
    assert code_column(table(section(page, "Classes of defects"), "letter"), "letter") == [*definition("LETTERS")]
    assert code_column(table(section(page, "Suites"), "suite"), "suite") == [*definition("SUITES")]
    assert code_column(table(section(page, "Published claims"), "number"), "number") == [*map(str, definition("PARTS"))]


def test_the_exit_codes_of_every_verb_are_in_both_pages() -> None:
    summary = {row["verb"]: row for row in table(section(reference("files"), "Exit codes of every verb"), "verb")}
    for verb, parser in verbs().items():
        meanings = {row["exit code"]: row["meaning"] for row in table(section(reference("commands"), verb), "exit code")}
        assert {*re.findall(r"(?:^exit:|  ) ?(\d+) ", parser.epilog or "")} <= {*meanings}, verb
        assert {*meanings} == {"0", "1", "2", "3", "130"}, verb
        assert {code for code in meanings if not summary[f"`{verb}`"][code]} == {
            code for code, meaning in meanings.items() if meaning == "does not occur"
        }, verb
