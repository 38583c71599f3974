"""The verb `zoo`: run the laws against the wrong implementations and print what they find; the exit code says if any survived."""

import json
from collections.abc import Sequence

from properties.books import book_of
from verify.cli.exits import BROKEN, HOLDS, INTERRUPTED, UNDECIDED
from verify.cli.output import check_writable, progress, write_file
from verify.cli.terminal import print_line
from verify.cli.verb_options import ZooOptions
from verify.engine.profiles import PROFILES
from verify.zoo import kill_table as table
from verify.zoo import mutation, page
from verify.zoo.animals import animals, chosen
from verify.zoo.hunt import Hunt
from verify.zoo.trials import Trial, Trials, is_eligible, load, suites


def act(options: ZooOptions) -> int:
    """Run the hunt and report. Returns the exit code."""
    if options.mutate:
        return _mutate(options, options.mutate)
    asked = chosen(options.names, options.letter or ())
    rules = list(dict.fromkeys(name for rule in options.rule or () for name in (suites() if rule == "all" else [rule])))
    for rule in rules:
        load(rule)
    if rules:
        asked = [animal for animal in asked if is_eligible(animal)]
    if not asked:
        raise ValueError(
            "no animal has one of these names and one of these letters" + (" and can be judged by a suite" if rules else "")
        )
    if options.html:
        page.check()
    for option in ("json", "html"):
        check_writable(f"--{option}", getattr(options, option))
    if options.law:
        asked = [animal for animal in asked if set(options.law) & set(book_of(animal.kind.domain).laws)]
        if not asked:
            raise ValueError(f"law {', '.join(options.law)} is about none of the chosen animals")
    hunting = Hunt(
        asked, options.law, options.seed, options.workers, deadline_s=float(options.deadline), until=1 if rules else None
    )
    trials: list[Trial] = []
    interrupted = False
    with hunting as hunt, progress() as on_case:
        hunt.on_case = on_case
        try:
            if rules:
                with Trials(rules, asked, options.workers, deadline_s=float(options.deadline), on_case=on_case) as trying:
                    trials = trying.trials
                    trying.run()
            hunt.run()
        except KeyboardInterrupt:
            interrupted = True
    lines = table.rule_lines(hunt, trials) if rules else table.lines(hunt)
    print_line("\n".join([*lines, *(["interrupted: not every law was run on every animal"] if interrupted else [])]))
    data = table.to_json(hunt, trials, interrupted=interrupted)
    written = not options.json or write_file(options.json, json.dumps(data, indent=1) + "\n")
    if options.html:
        written = write_file(options.html, page.page(data)) and written
    code = INTERRUPTED if interrupted else exit_code(hunt, trials)
    return UNDECIDED if code == HOLDS and not written else code


def _mutate(options: ZooOptions, spec: str) -> int:
    return mutation.mutate(
        spec,
        sample=options.sample,
        seed=options.seed,
        ids=options.id or (),
        grep=options.grep,
        profile=PROFILES[options.profile],
        workers=options.workers,
        deadline_s=float(options.deadline),
        json_to=options.json,
        listing=options.list,
    )


def exit_code(hunt: Hunt, trials: Sequence[Trial]) -> int:
    """The exit code: 1 if a wrong implementation survives its cases, or right code is rejected; otherwise 0."""
    if trials:
        bad = any(trial.error or trial.rejects_right or trial.killed < len(trial.killed_at) for trial in trials)
    else:
        bad = any(fate.verdict != "killed" for fate in hunt.fates)
    return BROKEN if bad or hunt.alarms else HOLDS


def listed() -> str:
    """The line about the zoo that `list` prints."""
    return f"zoo/NAME             {len(animals())} wrong implementations, on which this runs the laws: gdn-verify zoo"
