"""A seed gives the same cases on any machine, in any folder, in any installation, and `draw` prints those that a check runs."""

import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import Phase, Verbosity
from hypothesis import strategies as st
from hypothesis.internal import entropy
from hypothesis.internal.conjecture import providers

from properties import seeds
from properties.books import BOOKS, book_of
from tests.answering import Answering
from tests.lines_of_seeds import CASES, DOMAINS, digest, lines
from tests.together import for_each
from verify.cli.main import main
from verify.engine.check import Check
from verify.engine.climb import climb
from verify.engine.drawing import of_law
from verify.engine.profiles import PROFILES, Profile
from verify.engine.state import Settings
from verify.findings.store import Store

ROOT = pathlib.Path(__file__).parents[2]
WIDE = st.integers(0, 2**64 - 1)  # what Hypothesis draws for each case


def numbers(count: int = 150) -> list[int]:
    """What we draw."""
    found: list[int] = []
    seeds.draw(WIDE, 3, count, found.append)
    return found


def theirs(count: int = 150) -> list[int]:
    """What a user's own test draws in this process, with the same seed."""
    found: list[int] = []

    @hypothesis.seed(3)
    @hypothesis.settings(max_examples=count, database=None, phases=(Phase.generate,))
    @hypothesis.given(WIDE)
    def drive(number: int) -> None:
        found.append(number)

    drive()
    return found


CONSTANTS = tuple(10**6 + 7919 * number for number in range(300))


@pytest.fixture
def constants(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that imports a local module full of constants. It leaves nothing behind in Hypothesis."""
    (tmp_path / "kernel_sizes.py").write_text(f"SIZES = {CONSTANTS}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = providers._local_constants
    monkeypatch.setattr(providers, "_local_constants", type(before)())
    monkeypatch.setattr(providers, "_sys_modules_len", None)
    yield lambda: importlib.import_module("kernel_sizes") and None
    sys.modules.pop("kernel_sizes", None)
    providers.CONSTANTS_CACHE.cache.clear()


def test_constants_of_local_modules_reach_a_users_draws_and_not_ours(constants: Callable[[], None]) -> None:
    ours, before = numbers(), theirs()
    constants()
    after = theirs()
    assert {*after} & {*CONSTANTS}, "or this test would show nothing"
    assert not {*before} & {*CONSTANTS}
    assert numbers() == ours

    inside: list[list[int]] = []
    at_once = threading.Thread(target=lambda: inside.append(theirs()))

    def look(_: int) -> None:
        if not inside:
            inside.append(theirs())
            at_once.start()
            at_once.join()

    seeds.draw(WIDE, 3, 3, look)
    assert inside == [after, after], "a user's test that draws inside ours, and one in another thread"


def test_a_thread_that_draws_looks_through_no_objects_and_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis would look through all objects of the process, for a generator that ours do not use."""
    registered: list[Any] = []
    monkeypatch.setattr(entropy, "register_random", registered.append)
    found: list[list[int]] = []

    def work(draws: Callable[[int], list[int]]) -> None:
        found.append(draws(5))
        found.append([hypothesis.core.threadlocal._hypothesis_global_random is None])

    for draws in (numbers, theirs):
        thread = threading.Thread(target=work, args=[draws])
        thread.start()
        thread.join()
    assert found[:2] == [numbers(5), [True]]
    assert (found[3], len(registered)) == ([False], 1), "or this test would show nothing"


def test_a_climb_takes_no_constants_either(constants: Callable[[], None]) -> None:
    def climbed() -> list[str]:
        known: list[Any] = []
        law = book_of(DOMAINS[0]).laws["oracle"]
        of_law(law, DOMAINS[0], 0, 20, known.append)
        found: list[str] = []

        def score(example: Any) -> float:
            found.append(str(example))
            return float(example.case.tokens)

        climb(law, DOMAINS[0], {example: float(example.case.tokens) for example in known}, 5, 40, score)
        return found

    before = climbed()
    constants()
    theirs()  # Hypothesis finds the constants
    assert climbed() == before
    assert len(before) == 40


def test_no_setting_of_a_users_profile_decides_what_we_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, profile = numbers(60), hypothesis.settings.get_current_profile_name()
    theirs_all: dict[str, Any] = {
        "backend": "hypothesis-urandom",
        "database": hypothesis.database.InMemoryExampleDatabase(),
        "deadline": 1,
        "derandomize": False,
        "max_examples": 3,
        "phases": (Phase.explicit,),
        "print_blob": True,
        "report_multiple_bugs": True,
        "stateful_step_count": 7,
        "suppress_health_check": (),
        "verbosity": Verbosity.quiet,
    }
    assert {*theirs_all} == {*hypothesis._settings.all_settings}, "a new setting must be named in properties/seeds.py"
    monkeypatch.setattr(hypothesis.core, "global_force_seed", 17)  # pytest --hypothesis-seed=17
    for derandomize in (False, True):
        database = None if derandomize else theirs_all["database"]
        hypothesis.settings.register_profile("theirs", **{**theirs_all, "derandomize": derandomize, "database": database})
        hypothesis.settings.load_profile("theirs")
        try:
            assert numbers(60) == ours
        finally:
            hypothesis.settings.load_profile(profile)


def test_a_hypothesis_that_draws_constants_elsewhere_is_named_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails with a new release of Hypothesis, properties/seeds.py must find the place where it draws them now."""
    assert seeds._drawn_constant is not None
    drawn: list[int] = []
    monkeypatch.delattr(providers.HypothesisProvider, seeds.PLACE)
    with pytest.raises(RuntimeError, match=rf"Hypothesis {hypothesis.__version__} has no HypothesisProvider\.{seeds.PLACE}"):
        seeds.draw(WIDE, 3, 5, drawn.append)
    assert drawn == []
    assert seeds._patch() is None


ELSEWHERE = """
import sys
import kernel_sizes
from tests_of_seeds import digest, lines
assert "/site-packages/" in sys.modules["properties"].__file__
print(digest(lines(7)))
"""


@pytest.mark.slow
def test_an_installation_beside_a_module_of_constants_has_the_cases_of_a_clone(tmp_path: pathlib.Path) -> None:
    """Hypothesis takes constants of modules whose paths do not contain site-packages: here, of all of ours."""
    installed, beside = tmp_path / "site-packages", tmp_path / "beside"
    beside.mkdir()
    for folder in ("oracles", "properties", "verify", "tests"):
        shutil.copytree(ROOT / folder, installed / folder)
    (beside / "kernel_sizes.py").write_text(f"SIZES = {CONSTANTS}\nCHUNK = 48\n")
    (beside / "tests_of_seeds.py").write_text("from tests.lines_of_seeds import digest, lines\n")
    environment = {**os.environ, "PYTHONPATH": f"{installed}:{beside}", "PYTHONHASHSEED": "77", "CI": "true"}
    result = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], env=environment, cwd=beside, capture_output=True, text=True, check=False
    )
    found = lines(7)
    assert len(found) == len({*found}) >= 400
    assert result.stdout.strip() == digest(found), result.stderr[-2000:]


# The verb `draw`


@for_each("domain", DOMAINS)
def test_draw_prints_what_a_check_runs(domain: Any, tmp_path: pathlib.Path) -> None:
    settings = Settings("zoo/Chunkwise", None, Profile("some", 2), 11)
    checked, drawn = Answering(domain=domain, cost="quick"), Answering(domain=domain, cost="quick")
    with Check(settings, [checked], Store(tmp_path / "check"), defects=[]) as check:  # type: ignore[list-item]
        check.run()
    with Check(settings, [drawn], Store(tmp_path / "draw"), defects=[]) as check:  # type: ignore[list-item]
        printed = {law: [str(run) for run in runs] for law, runs, _ in check.drawn()}
    ran: dict[str, list[str]] = {}
    for line in checked.asked:
        ran.setdefault(line.partition(" ")[0].removeprefix("law="), []).append(line)
    assert {law: runs for law, runs in printed.items() if runs} == ran
    assert drawn.asked == []
    assert list(printed) == book_of(domain).about(domain.operation)


NEVER = """
from properties.rules.domain import Domain
from verify.adapters.base import Adapter
class Kernel(Adapter):
    domain = Domain(backward=False, packed=False)
    def run(self, x):
        open(__file__ + ".ran", "w").close()
"""


@pytest.mark.slow
def test_draw_runs_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "never.py"
    file.write_text(NEVER)
    assert main(["draw", f"{file}:Kernel", "--law", "norm", "--law", "again", "--profile", "few", "--seed", "3"]) == 0
    text, note = capsys.readouterr()
    assert note == "profile few, seed 3\n"
    printed = text.splitlines()
    assert [line.partition(" ")[0] for line in printed] == ["law=norm"] * 5 + ["law=again"] * 5
    assert main(["draw", f"{file}:Kernel", "--law", "norm", "--profile", "quick", "--climb", "--json"]) == 0
    text, note = capsys.readouterr()
    objects = [json.loads(line) for line in text.splitlines()]
    assert [(entry["law"], entry["number"]) for entry in objects] == [("norm", number) for number in range(1, 17)]
    assert objects[0]["run"].startswith(f"law=norm adapter={file}:Kernel lengths=")
    assert "norm: 16 more cases follow from the errors of these" in note
    assert list(tmp_path.iterdir()) == [file] or {path.name for path in tmp_path.iterdir()} == {"never.py", "__pycache__"}
    assert main(["draw", f"{file}:Kernle"]) == 2


def test_every_book_is_among_the_domains() -> None:
    assert {book_of(domain).name for domain in DOMAINS} | {"calls"} == {book.name for book in BOOKS}
    assert PROFILES["quick"].examples > CASES
