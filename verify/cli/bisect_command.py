"""The verb `bisect`: find by halves the release or the revision that broke a line, or that mended it."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from verify.adapters.libraries import LIBRARIES
from verify.cli import terminal
from verify.cli.across_command import placed_of
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.fetch_command import FetchError
from verify.cli.output import print_json, print_troubles
from verify.cli.places import Repository, allow, release_place, versions_of
from verify.cli.terminal import print_error
from verify.cli.verb_options import BisectOptions
from verify.engine import across as engine
from verify.engine.across import NOT, Site, SiteVerdict, first_change
from verify.execution.line import Run
from verify.findings.store import Store

PACKAGES = {"fla": "fla-core", "nemo": "nemo-automodel", "transformers": "transformers"}  # of built-in adapters, beside LIBRARIES


def bisect(options: BisectOptions) -> int:
    """Run a line with versions between a good and a bad one, and print which changed its verdict. Returns the exit code."""
    run, store = Run.parse(options.line), Store()
    try:
        search = _revisions(options, run) if options.rev else _releases(options, run)
    except FetchError as error:
        print_error(str(error))
        return UNDECIDED
    versions, about = search.versions, search.about
    cells, places = dict[int, SiteVerdict](), dict[int, Site]()

    def cell(number: int) -> SiteVerdict:
        if number not in cells:
            with contextlib.ExitStack() as stack:
                places[number] = place = search.place_of(versions[number], stack)
                with placed_of(options, [place], store)[0] as placed:
                    cells[number] = placed.cell(run)
            if not options.json:
                short = cells[number].short if cells[number].verdict != NOT else f"{NOT}: {cells[number].reason};"
                terminal.print_line(f'{short:<26} {place.name:<18} gdn-verify across "{run}" {place.option}')
        return cells[number]

    last = len(versions) - 1
    ends = (cell(0), cell(last))
    wanted = (engine.HOLDS, engine.BROKEN) if search.forward else (engine.BROKEN, engine.HOLDS)
    change = first_change(len(versions), cell) if tuple(end.verdict for end in ends) == wanted else None
    store.close()
    print_troubles(store, None)
    verb = "brought" if search.forward else "mended"
    if options.json:
        found = change and {
            "before": versions[change.before],
            "after": versions[change.after],
            "unknown": [versions[number] for number in change.unknown],
        }
        steps = [{"name": places[n].name, "option": places[n].option, **cells[n].to_json()} for n in cells]
        print_json({"line": str(run), "change": verb, "found": found, "steps": steps})
    if change is None:
        if NOT in {end.verdict for end in ends}:
            print_error("the line cannot be asked with --good or with --bad")
            return UNDECIDED
        print_error("there is nothing to find: the line must hold with --good and be broken with --bad")
        return BROKEN
    if not options.json:
        before, after = about(versions[change.before]), about(versions[change.after])
        was = "holds" if search.forward else "is broken"
        if change.unknown:
            others = ", ".join(about(versions[number]) for number in change.unknown)
            terminal.print_line(f"{verb} by {after}, or one of those that cannot be asked: {others}; with {before} the line {was}")
        else:
            terminal.print_line(f"{verb} by {after}; with {before}, the one before, the line {was}")
    return UNDECIDED if change.unknown else HOLDS


@dataclasses.dataclass(frozen=True)
class _Search:
    """The versions from the older to the newer of --good and --bad, the place of each, and how it is named.

    `forward` says that the good one is older.
    """

    versions: Sequence[str]
    place_of: Callable[[str, contextlib.ExitStack], Site]
    about: Callable[[str], str]
    forward: bool


def _releases(options: BisectOptions, run: Run) -> _Search:
    """The search among releases."""
    prefix = run.adapter.partition("/")[0]
    of_library = LIBRARIES[prefix].distribution if prefix in LIBRARIES else PACKAGES.get(prefix)
    packages = options.package or (of_library and [of_library])
    if not packages:
        raise ValueError(f"--package must name the package of {run.adapter}, whose releases are searched")
    every = options.releases or versions_of(packages[0])
    for option, version in (("--good", options.good), ("--bad", options.bad)):
        if version not in every:
            raise ValueError(f"{option} must be a release of {packages[0]}: {', '.join(every)}; got {version}")
    good, bad = every.index(options.good), every.index(options.bad)
    versions = every[min(good, bad) : max(good, bad) + 1]
    release_of = {version: tuple((package, version) for package in packages) for version in versions}
    allow(release_of.values(), yes=options.yes)
    return _Search(
        versions,
        lambda version, stack: release_place(release_of[version], stack),
        lambda version: f"{packages[0]} {version}",
        good < bad,
    )


def _revisions(options: BisectOptions, run: Run) -> _Search:
    """The search among revisions."""
    repository = Repository([run.adapter])
    good, bad = repository.commit(options.good), repository.commit(options.bad)
    forward = repository.comes_before(good, bad)
    versions = repository.between(good, bad) if forward else repository.between(bad, good)
    return _Search(versions, lambda commit, stack: repository.place(commit[:10], stack), repository.about, forward)
