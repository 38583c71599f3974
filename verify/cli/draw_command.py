"""The verb `draw`: print the lines of the cases that a check would run, without running one."""

import dataclasses
import random
import sys

from properties.paths.domain import PathDomain
from verify.cli import terminal
from verify.cli.exits import HOLDS
from verify.cli.hosts import check_installed
from verify.cli.options import chosen_laws
from verify.cli.output import print_json
from verify.cli.verb_options import DrawOptions
from verify.engine.check import Check
from verify.engine.profiles import PROFILES
from verify.engine.shard import WHOLE
from verify.engine.state import Settings
from verify.gpu import device as devices
from verify.process.worker import Worker


def draw(options: DrawOptions) -> int:
    """Print the lines, law by law, in the order in which a check runs the cases of a law. Returns the exit code."""
    for spec in options.adapters:
        check_installed(spec)
    if options.settings:
        terminal.print_line(f"settings {options.settings}", sys.stderr)
    for spec in options.adapters:
        _draw(options, spec)
    return HOLDS


def _draw(options: DrawOptions, spec: str) -> None:
    """Print the lines of one adapter."""
    device = options.device or ("cuda" if devices.gpus() else "cpu")
    profile = PROFILES[options.profile or ("gpu" if device == "cuda" else "quick")]
    seed = options.seed if options.seed is not None else 0 if profile.fixed_seed else random.SystemRandom().randrange(2**32)
    tune = str(seed) if device == "cuda" else ""
    settings = Settings(spec, chosen_laws(options.law), profile, seed, device, tune, climbs=options.climb or None)
    settings = dataclasses.replace(settings, shard=options.shard or WHOLE)
    worker = Worker(environment=devices.environment(device if devices.gpus() else "cpu"))  # it only reads the declarations
    with worker, Check(settings, [worker], defects=()) as check:
        if isinstance(check.describe().domain, PathDomain) and not options.profile:
            check.settings = settings = dataclasses.replace(settings, profile=PROFILES["quick"])
        terminal.print_line(f"profile {settings.profile.name}, seed {seed}", sys.stderr)
        for law, runs, further in check.drawn():
            for number, run in enumerate(runs, 1):
                if options.json:
                    print_json({"law": law, "number": number, "run": str(run)})
                else:
                    terminal.write(str(run), sys.stdout)
            if further:
                terminal.print_line(f"{law}: {further} more cases follow from the errors of these", sys.stderr)
