"""The page of commands has the verbs, options, defaults, choices and exit codes of the parsers, and no others."""

import os
import re
import shlex

import pytest

from tests.pages import Row, code_column, codes, headings, prose_and_code, reference, section, table
from tests.sources import definition, options, verbs

# docs/reference/commands.md


def option_rows(verb: str) -> dict[tuple[str, ...], Row]:
    rows = table(section(reference("commands"), verb), "option")
    return {tuple(code.split()[0] for code in codes(row["option"])): row for row in rows}


def test_the_page_of_commands_has_a_row_and_a_section_for_every_verb_and_no_other() -> None:
    page = reference("commands")
    rows = code_column(table(page.partition("\n## ")[0], "verb"), "verb")
    assert sorted(rows) == sorted(verbs())
    assert [words for _, level, words in headings(page) if level == 2] == ["Exit codes", *rows, "pytest"]


@pytest.mark.parametrize("verb", [*verbs(), "pytest"])
def test_the_options_of_a_verb_are_those_of_its_parser(verb: str) -> None:
    rows = option_rows(verb)
    assert {*rows} == {*options(verb)}
    for names, action in options(verb).items():
        assert {len(code.split()) > 1 for code in codes(rows[names]["option"])} == {action.nargs != 0}, names
        assert ("[" in rows[names]["option"]) is (action.nargs == "?"), names


@pytest.mark.parametrize("verb", [*verbs(), "pytest"])
def test_the_defaults_of_options_are_those_of_the_parser(verb: str) -> None:
    for names, action in options(verb).items():
        cell = option_rows(verb)[names]["default"]
        if action.default is False:
            assert cell == "off", names
        elif action.required:
            assert cell == "must be given", names
        elif action.default in (None, [], ""):  # the page says in words what happens; values in the words are also in the help
            assert all(code in (action.help or "") for code in codes(cell) if not code.startswith("-")), names
            assert action.const is None or action.const in codes(cell), names
        elif action.dest == "workers":  # the default depends on the machine
            assert action.default == min(os.cpu_count() or 1, 4), names
            assert "cores, at most 4" in cell, names
        else:
            (code,) = codes(cell)
            assert type(action.default)(code) == action.default, names


@pytest.mark.parametrize("verb", [*verbs(), "pytest"])
def test_the_choices_of_options_are_those_of_the_parser(verb: str) -> None:
    for names, action in options(verb).items():
        meaning = option_rows(verb)[names]["meaning"]
        sentence = re.search(r"One of ((?:`[^`]+`(?:, )?)+)", meaning)
        if sentence:
            assert codes(sentence[1]) == [*map(str, action.choices or ())], names
        else:  # they may be in a table of the same page
            assert not action.choices or re.search(r"\]\(#[\w-]+\)", meaning), names


@pytest.mark.parametrize("verb", [*verbs(), "pytest"])
def test_every_option_of_a_verb_has_an_example(verb: str) -> None:
    blocks = prose_and_code(section(reference("commands"), verb))[1]
    words = {word.partition("=")[0] for block in blocks for line in block[1:] for word in shlex.split(line, comments=True)}
    assert [names for names in options(verb) if not {*names} & words] == []


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


@pytest.mark.parametrize("verb", verbs())
def test_the_exit_codes_of_a_verb_are_in_both_pages(verb: str) -> None:
    in_help = {*re.findall(r"(?:^exit:|  ) ?(\d+) ", verbs()[verb].epilog or "")}
    meanings = {row["exit code"]: row["meaning"] for row in table(section(reference("commands"), verb), "exit code")}
    summary = {row["verb"]: row for row in table(section(reference("files"), "Exit codes of every verb"), "verb")}
    assert in_help <= {*meanings}
    assert {*meanings} == {"0", "1", "2", "3", "130"}
    for code, meaning in meanings.items():
        assert (summary[f"`{verb}`"][code] == "") is (meaning == "does not occur"), code
