"""The verb `draw`: print the lines of the cases that a check would run, without running one."""

import argparse
import dataclasses
import json
import random
import sys

from properties.path_domain import PathDomain
from verify.adapters.loader import check_spec
from verify.adapters.registry import BUILT_IN
from verify.cli.exits import HOLDS
from verify.cli.hosts import check_installed
from verify.cli.options import chosen_laws, seed_word
from verify.cli.output import print_line
from verify.engine.check import Check
from verify.engine.law_check import Settings
from verify.engine.profiles import PROFILES
from verify.gpu import device as devices
from verify.process.worker import Worker

EXITS = "exit: 0 the lines are printed   2 bad usage   3 an error inside gdn-verify   130 interrupted"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("adapter", help=f"{', '.join(BUILT_IN)}, or your own as my_kernel.py:MyKernel")
    parser.add_argument("--law", action="append", metavar="LAW", help="print only the cases of this law (may be repeated)")
    parser.add_argument("--profile", choices=PROFILES, help="as for check (default quick; gpu on a GPU)")
    parser.add_argument("--seed", type=seed_word, help="seed of the cases (default 0; with the profile soak random, and printed)")
    parser.add_argument("--climb", action="store_true", help="print what check --climb draws before it climbs")
    parser.add_argument(
        "--device", choices=devices.DEVICES, help="where check would run the cases (default: cuda if there is a GPU, else cpu)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each case: its law, its number and its line")
    parser.add_argument("--path", metavar="DIR", help="a checkout in which modules are looked for first, as for check")


def draw(options: argparse.Namespace) -> int:
    """Print the lines, law by law, in the order in which a check runs the cases of a law. Returns the exit code."""
    check_spec(options.adapter)
    laws = chosen_laws(options)
    check_installed(options.adapter)
    device = options.device or ("cuda" if devices.gpus() else "cpu")
    profile = PROFILES[options.profile or ("gpu" if device == "cuda" else "quick")]
    seed = options.seed if options.seed is not None else 0 if profile.fixed_seed else random.SystemRandom().randrange(2**32)
    tune = str(seed) if device == "cuda" else ""
    settings = Settings(options.adapter, laws, profile, seed, device, tune, climbs=options.climb or None)
    worker = Worker(environment=devices.environment(device if devices.gpus() else "cpu"))  # it only reads the declarations
    with worker, Check(settings, [worker], defects=()) as check:
        if isinstance(check.describe().domain, PathDomain) and not options.profile:
            check.settings = settings = dataclasses.replace(settings, profile=PROFILES["quick"])
        print_line(f"profile {settings.profile.name}, seed {seed}", sys.stderr)
        for law, runs, further in check.drawn():
            for number, run in enumerate(runs, 1):
                data = {"law": law, "number": number, "run": str(run)}
                print_line(json.dumps(data) if options.json else str(run), sys.stdout)
            if further:
                print_line(f"{law}: {further} more cases follow from the errors of these", sys.stderr)
    return HOLDS
