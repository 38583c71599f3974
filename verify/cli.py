"""The command line. Results go to stdout, progress to stderr; exit codes mean something."""

import argparse
import contextlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oracles.operations import OPERATIONS
from oracles.rounding import PRODUCTS
from properties.books import BOOKS, book_for, every_law
from properties.paths import PathDomain
from verify import coverage, gpu_record, sanitize, soak, tuning
from verify import device as devices
from verify import report as text
from verify.adapter import BUILT_IN, PATHS, AdapterError, check_requirements, check_spec, installed
from verify.check import PROFILES, Asked, Check, LawReport, ask, describe, started
from verify.claims import command as claims
from verify.examples import Examples
from verify.interpreter import SEQUENTIAL
from verify.outcome import Verdict
from verify.ranks import BACKENDS, Launch, RankGroup, TorchrunGroup, follow, launched
from verify.refusal import names_of
from verify.run import DENIED, Run
from verify.store import FOLDER, Store
from verify.sweep import Sweep
from verify.worker import Worker, WorkerLost
from verify.zoo import command

HOLDS, BROKEN, USAGE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130
SWEEP = "sweep"
DEADLINE_S, SLOW_S = 120.0, 1200.0  # kernels take ten times as long under a sanitizer, or a hundred times
COMPILERS = 14  # each holds half a gigabyte of the GPU's memory
EXITS = "exit: 0 every law holds   1 a law is broken   2 bad usage   3 undecided, or nothing was compared   130 interrupted"
TOLD = "exit: 0 all launches agree   1 one stands out, or a call fails   2 bad usage   3 undecided, or no GPU   130 interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    code = UNDECIDED
    try:
        options = _parser().parse_args(arguments)
        _find_in(getattr(options, "path", None))
        if chosen := getattr(options, "interpreter", None):
            os.environ[SEQUENTIAL] = chosen
        code = int(options.act(options))
        sys.stdout.flush()
    except (AdapterError, ValueError) as error:
        print(f"gdn-verify: {error}", file=sys.stderr)
        return USAGE
    except (NoGpu, sanitize.NoSanitizer) as error:
        print(f"gdn-verify: {error}", file=sys.stderr)
        return UNDECIDED
    except KeyboardInterrupt:
        print("gdn-verify: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout is gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:  # ours: it says nothing of the implementation, so it must not look like a broken law
        traceback.print_exc()
        print(f"gdn-verify: {type(error).__name__} in the toolkit, nothing is decided", file=sys.stderr)
        return UNDECIDED
    return code


class NoGpu(Exception):
    """What was asked for needs a GPU, and there is none."""


class _Parser(argparse.ArgumentParser):
    """Bad usage in one line, without the usage block."""

    def error(self, message: str) -> NoReturn:
        print(f"gdn-verify: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE)


def _parser() -> _Parser:
    parser = _Parser(
        prog="gdn-verify",
        description="Is this Gated DeltaNet implementation right on every shape and packing it claims, "
        "and if not, what is the smallest case that shows it?",
        epilog=EXITS,
    )
    verbs = parser.add_subparsers(required=True, metavar="{list,check,repeat,launches,soak,zoo,claims}")
    listing = verbs.add_parser("list", help="operations, laws, adapters, and what this host can run", epilog=EXITS)
    listing.add_argument("--json", action="store_true", help="one JSON object on stdout")
    listing.set_defaults(act=_list)

    check = verbs.add_parser("check", help="check an adapter against the laws", epilog=EXITS)
    check.add_argument("adapter", nargs="?", help=f"{', '.join(BUILT_IN)}, or your own as my_kernel.py:MyKernel")
    check.add_argument("--adapter", dest="own", metavar="FILE.py:CLASS", help="the same, as an option")
    _asking(check, "default quick; gpu on a GPU")
    check.add_argument("--seed", type=_seed, help="what the cases are drawn from (default 0; soak: random, and printed)")
    check.add_argument("--climb", action="store_true", help="half of the cases climb error over bound, as those of soak do")
    _ranks(check)
    _sanitize(check)
    _common(check)
    check.set_defaults(act=_check)

    soaking = verbs.add_parser("soak", help="check adapters round after round, with other cases each, for a time", epilog=EXITS)
    soaking.add_argument("adapter", nargs="+", help="as check has it")
    soaking.add_argument("--minutes", type=_minutes, default=30.0, metavar="M", help="how long (default 30)")
    _asking(soaking, "default: more from round to round")
    soaking.add_argument("--seed", type=_seed, help="what the rounds' seeds are drawn from (default: random, and printed)")
    _common(soaking)
    soaking.set_defaults(act=_soak)

    repeat = verbs.add_parser("repeat", help="run one printed line again", epilog=EXITS)
    repeat.add_argument("line", help='the line after "repeat" in a failure: "law=... adapter=... lengths=..."')
    repeat.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _ranks(repeat)
    _sanitize(repeat)
    _common(repeat, examples=False)
    repeat.set_defaults(act=_repeat)

    narrowing = verbs.add_parser("launches", help="which kernel launch of a GPU's line gives other numbers, and when", epilog=TOLD)
    narrowing.add_argument("line", help="a line with device=cuda, as repeat takes it")
    narrowing.add_argument("--calls", type=_positive, default=4, metavar="N", help="calls with the same inputs (default 4)")
    narrowing.add_argument(
        "--beside",
        type=_tune,
        action="append",
        metavar="NUMBER|native",
        help="also a call with the configurations that this draws (may be repeated); what the line picks stays",
    )
    narrowing.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _common(narrowing, keeps=False, examples=False)
    narrowing.set_defaults(act=_launches)

    zoo = verbs.add_parser("zoo", help="wrong implementations, and which laws kill them", epilog=command.EXITS)
    command.arguments(zoo, _seed, _positive)
    zoo.set_defaults(act=lambda options: command.act(options, _progress))

    measured = verbs.add_parser("claims", help="what published changes claim, measured on this host's GPUs", epilog=claims.EXITS)
    claims.arguments(measured)
    measured.set_defaults(act=claims.act)
    return parser


def _asking(parser: argparse.ArgumentParser, profile: str) -> None:
    """What is asked, and where kernels run."""
    parser.add_argument("--law", action="append", metavar="LAW", help=f"only this law (may be repeated): {', '.join(every_law())}")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        help="cases a law: " + ", ".join(f"{p.name} {p.examples}" for p in PROFILES.values()) + f" ({profile})",
    )
    parser.add_argument("-x", "--stop", "--stop-at-first", action="store_true", help="stop at the first broken law")
    parser.add_argument(
        "--workers",
        type=_positive,
        help="processes that run kernels (default: one a GPU, or as many as cores, at most 4)",
    )
    parser.add_argument(
        "--products",
        choices=PRODUCTS,
        help="how the implementation multiplies float32 matrices (default: on a GPU what its adapter says, else ieee)",
    )
    parser.add_argument(
        "--device", choices=devices.DEVICES, help="where kernels run (default: cuda if there is a GPU, else cpu, interpreted)"
    )
    parser.add_argument(
        "--tune",
        type=_tune,
        metavar="NUMBER|native|sweep",
        help="the configuration of autotuned kernels: drawn from a number (default on a GPU: the seed); native, timed by Triton; "
        "or, of check, sweep: all of them, one after the other",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write a JSON line a law to FILE (- for stdout, and nothing else there)"
    )


def _sanitize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sanitize",
        nargs="?",
        const=sanitize.TOOLS[0],
        choices=sanitize.TOOLS,
        help="run the worker under a tool of NVIDIA's compute-sanitizer: what it reports breaks the law (default memcheck)",
    )


def _common(parser: argparse.ArgumentParser, *, keeps: bool = True, examples: bool = True) -> None:
    parser.add_argument(
        "--deny", metavar="FILE", help="a deny-list: configurations that are not to be used; a sweep adds those that it finds"
    )
    parser.add_argument(
        "--deadline", type=_seconds, metavar="S", help="seconds after which a run is a hang (default 120; under a sanitizer 1200)"
    )
    parser.add_argument(
        "--path", metavar="DIR", help="a checkout in which modules are looked for first, such as Megatron-LM's for megatron/layer"
    )
    parser.add_argument(
        "--interpreter",
        choices=("grid", "sequential"),
        help="how Triton kernels run without a GPU: grid (default) runs all programs together and detects races; "
        "sequential runs one program after another and detects none",
    )
    if keeps:
        parser.add_argument("--findings", default=FOLDER, metavar="FOLDER", help=f"where findings are kept (default {FOLDER})")
    if examples:
        parser.add_argument(
            "--no-examples",
            action="store_true",
            help="do not ask first what broke in earlier checks, nor keep what breaks in this one",
        )


def _find_in(folder: str | None) -> None:
    """Modules are found in `folder` first, after this toolkit's own; workers look where this process does."""
    if folder is None:
        return
    if not os.path.isdir(folder):
        raise ValueError(f"--path must name a folder, got {folder!r}")
    sys.path.insert(1, os.path.abspath(folder))


def _ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=_positive,
        metavar="N",
        help="for a parallel path: processes of this host that share each case (default: simulated ranks; under torchrun: its own)",
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, help="what ranks communicate over (default: nccl if each rank has a GPU, else gloo)"
    )


def _tune(word: str) -> str:
    if word == SWEEP:
        return word
    try:
        return str(tuning.Policy.parse(word))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _deny(path: str | None, *, new: bool = False) -> None:
    """Workers are told of the deny-list by their environment. ValueError names the file and what is wrong with it."""
    os.environ.pop(DENIED, None)
    if path is None or (new and not os.path.exists(path)):
        return
    try:
        tuning.read_denied(path)
    except OSError as error:
        raise ValueError(f"--deny must name a file that can be read, got {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--deny {path}: {error}") from None
    os.environ[DENIED] = os.path.abspath(path)


def _compilers(device: str) -> int:
    """How many processes compile ahead: as many as cores, less the supervisor's and the worker's."""
    return 0 if device == "cpu" else max(0, min(COMPILERS, (os.cpu_count() or 1) - 2))


def _seed(word: str) -> int:
    if not (word.isdecimal() and int(word) < 2**32):
        raise argparse.ArgumentTypeError(f"must be a whole number in 0..{2**32 - 1}, got {word!r}")
    return int(word)


def _positive(word: str) -> int:
    if not (word.isdecimal() and 1 <= int(word) <= 256):
        raise argparse.ArgumentTypeError(f"must be a whole number in 1..256, got {word!r}")
    return int(word)


def _minutes(word: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(word)) < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of minutes over 0, got {word!r}")


def _seconds(word: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(word)) < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of seconds over 0, got {word!r}")


def _list(options: argparse.Namespace) -> int:
    adapters: dict[str, Any] = {}
    with Worker() as worker:
        for name in BUILT_IN:
            try:
                said = describe(name, worker)
                adapters[name] = {
                    "runs": True,
                    "shared": isinstance(said.domain, PathDomain),
                    "algorithm": said.algorithm,
                    "versions": said.versions,
                    "domain": said.domain.to_json(),
                }
            except AdapterError as error:
                adapters[name] = {"runs": False, "reason": str(error)}
    if options.json:
        laws = {law.name: {"kind": law.kind, "says": law.says} for law in every_law().values()}
        books = {book.name: {"operations": book.operations, "laws": list(book.laws)} for book in BOOKS}
        print(
            json.dumps(
                {
                    "operations": list(OPERATIONS),
                    "laws": laws,
                    "books": books,
                    "adapters": adapters,
                    "profiles": {p.name: p.examples for p in PROFILES.values()},
                    "gpu_gate": gpu_record.status(),
                }
            )
        )
        return HOLDS
    print("operations")
    for operation in OPERATIONS.values():
        ports = [f"{port.name} [{', '.join(port.axes.split())}]" for port in operation.inputs]
        oracle_only = "" if any(operation.name in book.operations for book in BOOKS) else "  (oracle and bounds only)"
        print(f"  {operation.name}: {', '.join(ports)} -> {', '.join(port.name for port in operation.outputs)}{oracle_only}")
    for book in BOOKS:
        print(f"\nlaws of {book.name} (truth: row by row against the float64 truth; exact: bit for bit)")
        print(f"  of {', '.join(book.operations)}")
        for law in book.laws.values():
            some = f" ({', '.join(law.about)})" if {*law.about} not in (set(), {*book.operations}) else ""
            print(f"  {law.name:<10} {law.kind:<6} {law.says}{some}")
    print("\nadapters on this host")
    for name, said in adapters.items():
        if said["runs"]:
            backward = "forward and backward" if said["domain"].get("backward") else "forward"
            alone = "--ranks N" if said["domain"].get("processes") else "ranks simulated, or --ranks N"
            where = alone if said["shared"] else "interpreted on the CPU"
            print(f"  {name:<20} {said['algorithm']}, {backward}; {said['versions']}; {where}")
        else:
            print(f"  {name:<20} cannot run: {said['reason']}")
    print(f"  {command.listed()}")
    print("  my_kernel.py:MyKernel  your own, in any file")
    print(f"\n{gpu_record.status()}")
    return HOLDS


def _check(options: argparse.Namespace) -> int:
    if (options.adapter is None) == (options.own is None):
        raise ValueError(f"check needs one adapter: {', '.join(BUILT_IN)}, or your own as my_kernel.py:MyKernel")
    spec = options.adapter or options.own
    check_spec(spec)
    asked = _laws(options)
    _installed(spec)
    launch = launched()
    if options.sanitize and (spec in PATHS or options.ranks or launch or options.tune == SWEEP or options.device == "cpu"):
        raise ValueError(
            "--sanitize is for one process on a GPU: it goes with no parallel path, --ranks, torchrun, --tune sweep or --device cpu"
        )
    ranks = launch.local_size if launch else options.ranks
    backend = _backend(options, ranks, options.device) if ranks else ""
    if launch is not None and launch.rank:
        return follow(launch, backend)
    sanitizer = _sanitizer(options)
    device = {"nccl": "cuda", "gloo": "cpu"}[backend] if backend else _device("cuda" if sanitizer else options.device)
    profile = PROFILES[options.profile or ("gpu" if device == "cuda" and not sanitizer else "quick")]
    _deny(options.deny, new=options.tune == SWEEP)
    seed = options.seed if options.seed is not None else 0 if profile.fixed_seed else random.SystemRandom().randrange(2**32)
    out = sys.stderr if options.json == "-" else sys.stdout
    store, examples = _stored(options, out)
    if options.tune == SWEEP:
        return _sweep(options, spec, device, seed, store, out)
    start, reports, interrupted, workers = time.monotonic(), list[LawReport](), False, _workers(options, launch, device, sanitizer)
    checking = Check(
        spec,
        asked,
        profile,
        seed,
        workers,
        store,
        stop_at_first=options.stop,
        deadline_s=_deadline(options),
        products=options.products,
        device=device,
        tune=options.tune or (str(seed) if device == "cuda" else ""),
        compilers=0 if ranks or spec in PATHS else _compilers(device),
        climbs=options.climb or None,
        examples=None if sanitizer else examples,  # whether it is right to the bit does not show what it reads
        under=f"--sanitize {sanitizer.tool}" if sanitizer else f"--ranks {launch.size if launch else ranks}" if ranks else "",
    )
    with (
        sanitizer or contextlib.nullcontext(),
        _ended(workers),
        _json_lines(options.json) as lines,
        _progress() as on_case,
        checking as check,
    ):
        check.on_case = on_case

        def say(report: LawReport) -> None:
            reports.append(report)
            shown = text.failure(report) if report.verdict is Verdict.BROKEN else text.law_line(report)
            for line in report.known:
                shown += f"\n  {line}"
            _print(shown, out)
            lines(report.to_json())

        check.on_report = say
        try:
            if sanitizer is not None:
                sanitizer.prove(check.workers[0])
            described = check.describe()
            shared = isinstance(described.domain, PathDomain)
            if sanitizer is not None and shared:
                raise ValueError(f"--sanitize is for kernels on one process, {spec} is a parallel path")
            if options.ranks and not shared:
                raise ValueError(f"--ranks is for parallel paths, {spec} is a kernel on one process")
            if shared and not options.profile:  # a path's oracle is on the CPU, whatever its ranks compute on
                check.profile = profile = PROFILES["quick"]
            where = f", {_place(check.workers[0])}" if shared else ""
            where += f", on {described.device}" if described.device else ""
            where += f", under {sanitize.PROGRAM} --tool {sanitizer.tool}" if sanitizer else ""
            _print(f"{spec}  {described.versions}  profile {profile.name}, seed {seed}{where}", out)
            try:
                check.run()
            except ValueError as error:
                raise RuntimeError(str(error)) from error  # the usage was right
            if not options.law:
                seen = coverage.counted(check.cases)
                gaps = coverage.missed(seen, described.domain, check.cases[:200])
                _print("\n".join(["cases by regime:", *coverage.lines(seen, gaps)]), out)
            stopped = options.stop and any(report.verdict is Verdict.BROKEN for report in reports)
            if not stopped and not options.law and not shared:
                _refusals(spec, check, out)
        except KeyboardInterrupt:
            interrupted = True
            check.stop()
    laws = checking.laws or []
    _troubles(store, examples)
    _print(("interrupted: " if interrupted else "") + _summary(reports, laws, time.monotonic() - start, store), out)
    if slow := text.one_by_one(reports):
        _print("\n".join(slow), out)
    if notice := text.fault_notice(reports):
        _print(notice, out)
    return INTERRUPTED if interrupted else exit_code(reports)


def _soak(options: argparse.Namespace) -> int:
    """Rounds of checks of several adapters, and a table."""
    if options.tune == SWEEP:
        raise ValueError("--tune must be a number or native for soak, got sweep")
    if launched() is not None:
        raise ValueError("soak runs on one host without torchrun, check runs under it")
    for spec in options.adapter:
        check_spec(spec)
        _installed(spec)
    asked, place = _laws(options), {spec: _device(options.device) for spec in options.adapter}
    _deny(options.deny)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    out = sys.stderr if options.json == "-" else sys.stdout
    store, examples = _stored(options, out)
    start, interrupted = time.monotonic(), False

    def begun(this: soak.Round) -> None:
        words = [f"--{name} {getattr(options, name)}" for name in ("products", "device", "tune") if getattr(options, name)]
        words += [f"--law {law}" for law in asked or ()]
        _print(" ".join([f"round {this.number}: python -m verify {this}", *words]), sys.stderr)

    with _json_lines(options.json) as lines, _progress() as on_case:
        soaking = soak.Soak(
            options.adapter,
            asked,
            seed=seed,
            place=lambda spec: place[spec],
            workers=lambda device: _count(options, device),
            compilers=_compilers,
            store=store,
            examples=examples,
            profile=PROFILES[options.profile] if options.profile else None,
            stop_at_first=options.stop,
            deadline_s=_deadline(options),
            products=options.products,
            tune=options.tune or "",
            on_round=begun,
            on_case=on_case,
            on_report=lambda report: _print(text.failure(report), out),
        )
        with soaking:
            try:
                for spec, said in soaking.describe().items():
                    where = f", on {said.device}" if said.device else ""
                    _print(f"{spec}  {said.versions}  soak of {options.minutes:g} minutes, seed {seed}{where}", out)
                try:
                    soaking.run(60 * options.minutes)
                except ValueError as error:
                    raise RuntimeError(str(error)) from error  # the usage was right
            except KeyboardInterrupt:
                interrupted = True
        for report in soaking.reports:
            lines(report.to_json())
    _troubles(store, examples)
    _print("\n".join(text.table(soaking.reports)), out)
    told = soak.summary(soaking.reports, soaking.rounds, time.monotonic() - start)
    _print(("interrupted: " if interrupted else "") + told, out)
    if notice := text.fault_notice(soaking.reports):
        _print(notice, out)
    return INTERRUPTED if interrupted else exit_code(soaking.reports)


def _laws(options: argparse.Namespace) -> list[str] | None:
    """The laws that are asked for, None for all. ValueError names an unknown one."""
    return [name for name in dict.fromkeys(options.law or ()) if book_for(name, None)] or None


def _stored(options: argparse.Namespace, out: Any) -> tuple[Store, Examples | None]:
    """Where findings and examples are kept; what an earlier check died of is told."""
    store = Store(options.findings)
    for line in store.left_behind():
        print(f'an earlier check died during: python -m verify repeat "{line}"', file=out)
    return store, None if options.no_examples else Examples(options.findings)


def _troubles(store: Store, examples: Examples | None) -> None:
    for trouble in (store.trouble, examples.trouble if examples else ""):
        if trouble:
            print(f"gdn-verify: {trouble}", file=sys.stderr)


def _deadline(options: argparse.Namespace) -> float:
    return float(options.deadline or (SLOW_S if getattr(options, "sanitize", None) else DEADLINE_S))


def _sanitizer(options: argparse.Namespace) -> sanitize.Sanitizer | None:
    """The sanitizer that is asked for. NoSanitizer or NoGpu where there is none, or nothing to watch."""
    if not options.sanitize:
        return None
    program = sanitize.find()
    if not devices.gpus():
        raise NoGpu("--sanitize needs a GPU, and torch sees none")
    return sanitize.Sanitizer(options.sanitize, program)


def _sweep(options: argparse.Namespace, spec: str, device: str, seed: int, store: Store, out: Any) -> int:
    """Every configuration of every kernel, and the deny-list."""
    count = options.workers or max(1, _compilers(device))
    workers = started(device, count, _deadline(options))
    with contextlib.ExitStack() as undo, _json_lines(options.json) as lines, _progress() as on_case:
        for worker in workers:
            undo.callback(worker.close)
        described = describe(spec, workers[0])
        products = options.products or ("ieee" if device == "cpu" else described.products)
        where = f", on {described.device}" if described.device else ""
        _print(f"{spec}  {described.versions}  sweep, seed {seed}{where}", out)
        start = time.monotonic()
        sweep = Sweep(
            described,
            workers,
            store,
            seed=seed,
            device=device,
            products=products,
            on_run=lambda done, of: on_case("sweep", done, of),
        )
        swept = sweep.run()
        for line in swept.lines():
            _print(line, out)
        place = described.device or "interpreter", installed("triton") or "none"
        wrong = [denied for fault in swept.faults for denied in fault.denied(*place)]
        total = sum(map(len, swept.ran.values()))
        line = f"{len(swept.faults)} wrong of {total} configurations of {len(swept.known)} kernels"
        line += f"; {swept.runs} runs in {time.monotonic() - start:.0f} s"
        if options.deny and wrong:
            tuning.write_denied(options.deny, [*_listed(options.deny), *wrong])
            line += f"; deny-list in {options.deny}"
        _print(line, out)
        lines(swept.to_json())
    store.close()
    return BROKEN if swept.faults else UNDECIDED if swept.undecided else HOLDS


def _listed(path: str) -> list[tuning.Denied]:
    return tuning.read_denied(path) if os.path.exists(path) else []


def exit_code(reports: Sequence[LawReport]) -> int:
    """1 if a law is broken; 3 if one is undecided or none holds; else 0."""
    verdicts = [report.verdict for report in reports]
    if Verdict.BROKEN in verdicts:
        return BROKEN
    return HOLDS if Verdict.UNKNOWN not in verdicts and Verdict.HOLDS in verdicts else UNDECIDED


def _backend(options: argparse.Namespace, ranks: int, device: str | None) -> str:
    """What ranks of this host communicate over: as asked, else NCCL where `device` allows it and there is a GPU for each rank.

    ValueError for a backend that does not go with the device, NoGpu for GPUs that are not there.
    """
    if options.backend and device and (options.backend == "nccl") is not (device == "cuda"):
        raise ValueError(f"--backend must be {'nccl' if device == 'cuda' else 'gloo'} for ranks on {device}, got {options.backend}")
    if device == "cuda" and devices.gpus() < ranks:
        raise NoGpu(f"{ranks} ranks on cuda need a GPU each, and torch sees {devices.gpus() or 'none'}")
    if options.backend:
        return str(options.backend)
    return "nccl" if device != "cpu" and devices.gpus() >= ranks else "gloo"


def _device(asked: str | None) -> str:
    """Where kernels run: as asked, or on a GPU if there is one. NoGpu where one is asked for in vain."""
    if asked == "cuda" and not devices.gpus():
        raise NoGpu("--device cuda needs a GPU, and torch sees none")
    return asked or ("cuda" if devices.gpus() else "cpu")


def _workers(
    options: argparse.Namespace, launch: Launch | None, device: str, sanitizer: sanitize.Sanitizer | None = None
) -> int | list[Asked]:
    """How many processes to start, or those under a sanitizer, or the ranks that answer as one."""
    backend = "nccl" if device == "cuda" else "gloo"
    if launch is not None:
        if options.ranks not in (None, launch.size):
            raise ValueError(f"--ranks must be the {launch.size} that torchrun started, got {options.ranks}")
        return [TorchrunGroup(launch, backend, _deadline(options))]
    if getattr(options, "ranks", None):
        return [RankGroup(options.ranks, backend, _deadline(options))]
    count = _count(options, device)
    return count if sanitizer is None else [sanitizer.worker(_deadline(options), device, each) for each in range(count)]


def _count(options: argparse.Namespace, device: str) -> int:
    return int(getattr(options, "workers", 1) or (devices.gpus() if device == "cuda" else min(os.cpu_count() or 1, 4)))


@contextlib.contextmanager
def _ended(workers: int | list[Asked]) -> Iterator[None]:
    """Ranks end with the command, and those who follow are let go."""
    try:
        yield
    finally:
        for each in workers if isinstance(workers, list) else ():
            each.close()


def _place(asked: Asked) -> str:
    return "ranks simulated" if isinstance(asked, Worker) else f"{asked.size} ranks over {asked.backend}"


def _installed(spec: str) -> None:
    """Refuse at once, before any worker starts, when what a built-in adapter needs is missing or too old."""
    if spec.startswith("fla/"):
        from verify.adapters.fla import REQUIRES

        check_requirements(spec, REQUIRES)


def _refusals(spec: str, check: Check, out: Any) -> None:
    did: dict[str, list[str]] = {}
    for name in names_of(check.describe().domain.operation):
        try:
            answer = check.workers[0].ask({"refuse": [spec, name]}, 30.0)["did"]
        except WorkerLost as lost:
            answer = f"{lost.how} ({lost.detail})"
        did.setdefault(answer, []).append(name)
    if did:
        _print("illegal input, reported and not judged:", out)
    for answer, names in did.items():
        _print(f"  {answer}: {'; '.join(names)}", out)


def _summary(reports: Sequence[LawReport], laws: Sequence[str], wall_s: float, store: Store) -> str:
    counts = {verdict: sum(report.verdict is verdict for report in reports) for verdict in Verdict}
    cases = sum(sum(report.counts.values()) for report in reports)
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    missing = len(laws) - len(reports)
    if missing:
        parts.append(f"{missing} not finished")
    kernel, oracle = (sum(getattr(report, name) for report in reports) for name in ("kernel_s", "oracle_s"))
    line = f"{', '.join(parts)} of {len(laws)} laws; {cases} cases in {wall_s:.0f} s"
    line += f" (kernels {kernel:.0f} s, oracle and bounds {oracle:.0f} s)"
    if counts[Verdict.BROKEN] and not store.trouble:
        line += f"; findings kept in {store.folder}/findings.jsonl"
    return line


def _repeat(options: argparse.Namespace) -> int:
    run = Run.parse(options.line)
    _deny(options.deny)
    _installed(run.adapter)
    launch = launched()
    if ranks := launch.local_size if launch else options.ranks:
        backend = _backend(options, ranks, run.device)
        if launch is not None and launch.rank:
            return follow(launch, backend)
    if options.sanitize and (ranks or run.device == "cpu"):
        raise ValueError("--sanitize is for one process on a GPU: the line must say device=cuda, and there may be no ranks")
    sanitizer = _sanitizer(options)
    if run.device == "cuda" and not devices.gpus():
        raise NoGpu("the line says device=cuda, and torch sees no GPU (without that word it runs interpreted)")
    store, workers = Store(options.findings), _workers(options, launch, run.device, sanitizer)
    alone = Worker(_deadline(options), environment=devices.environment(run.device))
    with sanitizer or contextlib.nullcontext(), alone if isinstance(workers, int) else workers[0] as worker:
        if sanitizer is not None:
            sanitizer.prove(worker)
        versions = describe(run.adapter, worker).versions
        outcome = ask(run, worker, store)
    store.close()
    if outcome.verdict is Verdict.BROKEN:
        store.keep(
            {
                "stage": "repeated",
                "run": str(run),
                "law": run.law,
                "versions": versions,
                "findings": [f.to_json() for f in outcome.findings],
            }
        )
    if store.trouble:
        print(f"gdn-verify: {store.trouble}", file=sys.stderr)
    print(
        json.dumps({"run": str(run), "versions": versions, **outcome.to_json()})
        if options.json
        else text.outcome_text(run, outcome, versions)
    )
    return {Verdict.HOLDS: HOLDS, Verdict.BROKEN: BROKEN}.get(outcome.verdict, UNDECIDED)


def _launches(options: argparse.Namespace) -> int:
    """The launches that stand out among several calls."""
    run, beside = Run.parse(options.line), options.beside or []
    if run.device != "cuda":
        raise ValueError(f"launches needs a line that says device=cuda, got device={run.device}")
    if SWEEP in beside:
        raise ValueError(f"--beside must be a number or native, got {SWEEP}")
    if options.calls == 1 and not beside:
        raise ValueError("--calls must be 2 or more where there is no --beside, got 1: one call is compared with nothing")
    _deny(options.deny)
    _installed(run.adapter)
    if not devices.gpus():
        raise NoGpu("the line says device=cuda, and torch sees no GPU")
    blocking = {**devices.environment(run.device), "CUDA_LAUNCH_BLOCKING": "1"}  # what a launch does wrong is its own
    with Worker(_deadline(options), environment=blocking) as worker:
        try:
            question = {"launches": str(run), "calls": options.calls, "beside": beside}
            said = worker.ask(question, worker.deadline_s * (options.calls + len(beside)))
        except WorkerLost as lost:
            said = {"reason": f"{lost}, and which launch it was is not known"}
    if "error" in said:
        raise AdapterError(said["error"])
    if options.json:
        print(json.dumps({"run": str(run), **said}))
    elif "found" in said:
        left = [f"not called: {words}" for words in said["left"]]
        print("\n  ".join([f"{said['launches']} launches of {said['kernels']} kernels", *said["found"], *left]))
    if not said.get("found") and not said.get("launches"):
        print(f"gdn-verify: {said.get('reason', 'no Triton kernel was launched')}", file=sys.stderr)
        return UNDECIDED
    return BROKEN if said["found"] else HOLDS


@contextlib.contextmanager
def _json_lines(place: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes a JSON line to the place; a file that cannot be opened is bad usage, before any work."""
    if place is None or place == "-":
        yield lambda data: _print(json.dumps(data), sys.stdout) if place else None
        return
    try:
        file = open(place, "wb", buffering=0)  # noqa: SIM115 - closed below, after what it is open for
    except OSError as error:
        raise ValueError(f"--json must name a file that can be written, got {place!r}: {error.strerror}") from None

    def write(data: dict[str, Any]) -> None:
        try:
            file.write((json.dumps(data) + "\n").encode())
        except OSError as error:
            print(f"gdn-verify: cannot write to {place}: {error.strerror}", file=sys.stderr)

    with file:
        yield write


def _print(line: str, out: Any) -> None:
    print(line, file=out, flush=True)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A live bar a law under way, on stderr; a plain line now and then where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        last = [time.monotonic()]

        def plain(law: str, done: int, of: int) -> None:
            if time.monotonic() - last[0] > 20:
                last[0] = time.monotonic()
                print(f"{law}: {done} of {of} cases", file=sys.stderr, flush=True)

        yield plain
        return
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=True) as bar:
        tasks: dict[str, Any] = {}

        def live(law: str, done: int, of: int) -> None:
            if law not in tasks:
                tasks[law] = bar.add_task(law, total=of)
            bar.update(tasks[law], completed=done, total=of, visible=done < of)

        yield live
