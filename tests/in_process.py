"""Commands that run in the process of the test."""

import pytest

from verify.cli.main import main


def said(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code of a command, and what it left on stdout and stderr."""
    try:
        code = main(words)
    except SystemExit as left:
        code = int(left.code or 0)
    return code, *capfd.readouterr()
