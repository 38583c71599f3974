"""The verb `check`: test an adapter against the laws."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import queue
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TextIO

from properties.books import book_of
from properties.paths.domain import PathDomain
from verify import __version__
from verify.adapters.registry import PATHS, AdapterError
from verify.cli.exits import BROKEN, HOLDS, INTERRUPTED, UNDECIDED, USAGE, exit_code
from verify.cli.hosts import (
    backend_of,
    check_installed,
    compilers_of,
    deadline_of,
    device_of,
    ended,
    engine_workers_of,
    gpu_workers_of,
    place_of,
    read_deny_list,
    sanitizer_of,
    tell_ranks,
    workers_of,
)
from verify.cli.options import SWEEP, chosen_laws
from verify.cli.output import JsonLines, print_troubles, progress, stored
from verify.cli.outputs import check_outputs, write_outputs
from verify.cli.sweep_command import sweep
from verify.cli.terminal import marks_of, print_error, print_line, width_of
from verify.cli.verb_options import CheckOptions
from verify.engine.check import Check
from verify.engine.profiles import PROFILES, Profile
from verify.engine.shard import WHOLE
from verify.engine.state import Settings
from verify.execution.sanitizer import PROGRAM, Sanitizer
from verify.findings import causes, coverage, known, outside
from verify.findings import report as text
from verify.findings.law_report import LawReport, left_out
from verify.findings.records.record import End, Head, Record, end_line, head_line, law_line
from verify.gpu.policies import Denied
from verify.process.choices import NoGpu, NoInterpreter, NoSanitizer
from verify.process.messages import Describe, Reaction, Refuse, read
from verify.process.outcome import Verdict
from verify.process.worker import Worker, WorkerLost
from verify.ranks.group import Answering, Group
from verify.ranks.torchrun import Launch, follow, launched
from verify.reach import report as reach_report

WORST = (INTERRUPTED, BROKEN, USAGE, UNDECIDED)  # of several adapters the first of these exit codes is that of the command
IN_WORDS = {
    BROKEN: "broken",
    USAGE: "could not be checked",
    UNDECIDED: "undecided",
    INTERRUPTED: "interrupted",
    None: "not run",
    HOLDS: "hold",
}


def check(options: CheckOptions) -> int:
    """Check adapters, one after the other, and print a line for each law. Returns the exit code."""
    specs, several, codes, began = options.adapters, len(options.adapters) > 1, dict[str, int](), time.time()
    check_outputs(options)
    launch = launched()
    if several and (launch is not None or options.tune == SWEEP):
        one = "torchrun" if launch is not None else "--tune sweep"
        raise ValueError(f"{one} is for one adapter: name one of {', '.join(specs)}")
    for spec in specs:
        with _answering_for(spec, codes) if several else contextlib.nullcontext():
            check_installed(spec)
        known.of(spec, options.known)
    backend = _refuse_combinations(options, launch)
    if launch is not None and launch.rank:
        return follow(launch, backend, sequential=options.sequential)
    denied = read_deny_list(options.deny, new=options.tune == SWEEP)
    out = sys.stderr if options.json == "-" else sys.stdout
    if options.tune == SWEEP:
        device, profile = _place_and_profile(options, backend, None)
        return sweep(options, specs[0], denied, device, _seed(options, profile), stored(options, out)[0], out)
    records, start = list[Record](), time.monotonic()
    left = [spec for spec in specs if spec not in codes]
    with contextlib.ExitStack() as opened:
        lines = opened.enter_context(JsonLines(options.json if several else None))
        for number, spec in enumerate(left):
            now = time.monotonic()
            until = math.inf if options.budget is None else now + max(0.0, start + options.budget - now) / (len(left) - number)
            with _answering_for(spec, codes) if several else contextlib.nullcontext():
                command = _Command(options, spec, denied, launch, backend, until, out)
                if not several:
                    lines = opened.enter_context(JsonLines(options.json))  # after everything that may refuse the command
                codes[spec] = command.run(lines, records, opened)
            if codes[spec] == INTERRUPTED or (options.stop and codes[spec] == BROKEN):
                break
        written = write_outputs(options, records, began) if records else True
        if several:
            print_line(_told_of(specs, codes), out)
        code = next((code for code in WORST if code in codes.values()), HOLDS)
        code = lines.code(code if written or code != HOLDS else UNDECIDED)
        if launch is not None:
            tell_ranks(command.workers, code)
        return code


@contextlib.contextmanager
def _answering_for(spec: str, codes: dict[str, int]) -> Iterator[None]:
    """Tell why one of several adapters cannot be checked, and enter its exit code. The others are checked."""
    try:
        yield
    except (AdapterError, ValueError) as error:
        codes[spec] = USAGE
        print_error(str(error))
    except (NoGpu, NoInterpreter, NoSanitizer) as error:
        codes[spec] = UNDECIDED
        print_error(f"{spec}: {error}")
    except KeyboardInterrupt:
        codes[spec] = INTERRUPTED


def _told_of(specs: Sequence[str], codes: Mapping[str, int]) -> str:
    """A line about several adapters, those that were not checked too."""
    told = {words: [spec for spec in specs if codes.get(spec) == code] for code, words in IN_WORDS.items()}
    parts = [f"{words}: {', '.join(named)}" for words, named in told.items() if named]
    return f"adapters       {'; '.join(parts)}"


def _refuse_combinations(options: CheckOptions, launch: Launch | None) -> str:
    """Refuse options that exclude each other. Returns the backend of ranks, or "" without ranks."""
    for option in ("strict_reach", "strict_domain") if options.tune == SWEEP else ():
        if getattr(options, option):
            raise ValueError(f"--{option.replace('_', '-')} is about the laws of a check: it excludes --tune sweep")
    for option in ("budget", "shard", "html") if options.tune == SWEEP else ():
        if getattr(options, option) is not None:
            raise ValueError(f"--{option} must be left out with --tune sweep, which runs every configuration")
    paths = any(spec in PATHS for spec in options.adapters)
    if options.sanitize and (paths or options.ranks or launch or options.tune == SWEEP or options.device == "cpu"):
        raise ValueError(
            "--sanitize is for one process on a GPU: it excludes parallel paths, --ranks, torchrun, --tune sweep and --device cpu"
        )
    ranks = launch.local_size if launch else options.ranks
    return backend_of(options, ranks, options.device) if ranks else ""


def _place_and_profile(options: CheckOptions, backend: str, sanitizer: Sanitizer | None) -> tuple[str, Profile]:
    """The device on which kernels run, and the profile of the cases."""
    device = {"nccl": "cuda", "gloo": "cpu"}[backend] if backend else device_of("cuda" if sanitizer else options.device)
    return device, PROFILES[options.profile or ("gpu" if device == "cuda" and not sanitizer else "quick")]


def _seed(options: CheckOptions, profile: Profile) -> int:
    if options.seed is not None:
        return options.seed
    return 0 if profile.fixed_seed else random.SystemRandom().randrange(2**32)


class _Command:
    """The check of one adapter, as the options want it. What they may not want is refused before any work."""

    def __init__(
        self,
        options: CheckOptions,
        spec: str,
        denied: Sequence[Denied],
        launch: Launch | None,
        backend: str,
        until: float,
        out: TextIO,
    ) -> None:
        sanitizer = sanitizer_of(options.sanitize)
        device, profile = _place_and_profile(options, backend, sanitizer)
        shard, ranks = options.shard or WHOLE, launch.local_size if launch else options.ranks
        if not shard.whole and (options.climb or profile.climbs or options.strict_reach):
            what = "--strict-reach, which merge decides" if options.strict_reach else "cases that follow from the errors of others"
            raise ValueError(f"--shard {shard} excludes {what}")
        simulated = spec in PATHS and not ranks
        self._options, self._out, self._sanitizer, self._launch, seed = options, out, sanitizer, launch, _seed(options, profile)
        self._store, examples = stored(options, out)
        # Results that are right to the bit do not show what a kernel reads. A line that fails only under a sanitizer would hold in
        # later checks, so no examples are read or kept.
        self._examples = None if sanitizer else examples
        self._settings = Settings(
            spec,
            chosen_laws(options.law),
            profile,
            seed,
            device=device,
            tune=options.tune or (str(seed) if device == "cuda" else ""),
            products=options.products,
            climbs=options.climb or None,
            stop_at_first=options.stop,
            deadline_s=deadline_of(options),
            sequential=options.sequential,
            compilers=0 if simulated or (launch and not launch.one_host) else compilers_of(device),
            ranks=ranks or 0,
            known=options.known,
            denied=denied,
            until=until,
            shard=shard,
            engine_workers=engine_workers_of(options.workers),
            gpu_workers=gpu_workers_of(options.workers),
            given=options.given,
            under=f"--sanitize {sanitizer.tool}" if sanitizer else f"--ranks {launch.size if launch else ranks}" if ranks else "",
        )

    def run(self, lines: JsonLines, records: list[Record], later: contextlib.ExitStack) -> int:
        """Run the check, and add its record to the others. Returns the exit code.

        Ranks of torchrun end `later`, with the command: torchrun may end this process as soon as one of them has failed.
        """
        options, out, sanitizer, told = self._options, self._out, self._sanitizer, End(UNDECIDED, 0.0)
        start = time.monotonic()
        self.workers = workers = workers_of(options, self._launch, self._settings.device, sanitizer)
        checking = Check(self._settings, workers, self._store, examples=self._examples)
        with sanitizer or contextlib.nullcontext(), contextlib.ExitStack() as here, progress() as on_case, checking:
            (here if self._launch is None else later).enter_context(ended(workers))
            checking.on_case = on_case
            texts = text.LawTexts(width_of(out, text.WIDTH), marks_of(out))
            checking.on_report = functools.partial(_print_report, texts, out, lines, on_case)
            try:
                _run(options, checking, sanitizer, out, lines, told)
            except KeyboardInterrupt:
                told.interrupted = True
                checking.stop()
            for report in checking.unfinished:
                if report.counts and not options.stop:
                    checking.on_report(report)
            print_troubles(self._store, self._examples)
            _print_end(checking, time.monotonic() - start, out, told)
            code = _code(options, checking, told)
            if code == UNDECIDED and options.strict_reach and reach_report.gaps_of(checking.reach, _omits(checking)):
                print_line("undecided because of --strict-reach: something was not looked at", out)
            if checking.described is not None:
                told.exit_code, told.wall_s = code, time.monotonic() - start
                told.not_run, told.reach = _not_asked(checking), checking.reach
                lines(end_line(told))
                records.append(Record(_head(checking), [*checking.reports, *checking.unfinished], told))
        return code


def _code(options: CheckOptions, checking: Check, told: End) -> int:
    """The exit code of a check."""
    if told.interrupted:
        return INTERRUPTED
    cut_short = options.budget is not None and any(report.cut_short for report in checking.unfinished)
    missed = bool(_not_asked(checking)) or cut_short
    code = exit_code([*checking.reports, *checking.unfinished], all_asked=options.budget_ok or not missed)
    if options.strict_domain and outside.wrong(told.outside):
        return BROKEN
    gaps = options.strict_reach and reach_report.gaps_of(checking.reach, _omits(checking))
    return UNDECIDED if code == HOLDS and gaps else code


def _omits(checking: Check) -> Mapping[str, str]:
    """What the adapter leaves out; nothing before it is loaded."""
    return checking.described.omits if checking.described is not None else {}


def _run(options: CheckOptions, checking: Check, sanitizer: Sanitizer | None, out: TextIO, lines: JsonLines, told: End) -> None:
    """Print the header, run the check, then print which regimes the cases covered."""
    if sanitizer is not None:
        sanitizer.prove(checking.workers[0])
    spec, described = checking.settings.adapter, checking.describe()
    shared = isinstance(described.domain, PathDomain)
    if sanitizer is not None and shared:
        raise ValueError(f"--sanitize is for kernels on one process, but {spec} is a parallel path")
    if options.ranks and not shared:
        raise ValueError(f"--ranks is for parallel paths, but {spec} is a kernel on one process")
    if shared and not options.profile:  # a path's oracle runs on the CPU, even if its ranks run on GPUs
        checking.settings = dataclasses.replace(checking.settings, profile=PROFILES["quick"])
    where = f", {place_of(checking.workers[0])}" if shared else ""
    where += f", on {described.device}" if described.device else ""
    where += f", under {PROGRAM} --tool {sanitizer.tool}" if sanitizer else ""
    settings = checking.settings
    where += "" if settings.shard.whole else f", shard {settings.shard}"
    lines(head_line(_head(checking)))
    print_line(f"{spec}  {described.versions}  profile {settings.profile.name}, seed {settings.seed}{where}", out)
    from_file = [f"  settings     {options.settings}"] if options.settings else []
    print_line("\n".join([*described.lines(), *from_file, *_files_of(checking.defects)]), out)
    if warning := checking.warning():
        print_line(f"gdn-verify: {warning}", sys.stderr)
    try:
        checking.run(outside=not options.law)
    except ValueError as error:
        raise RuntimeError(str(error)) from error  # an error inside gdn-verify, not bad usage
    stopped = options.stop and any(report.verdict is Verdict.BROKEN for report in checking.reports)
    if options.law:
        told.outside = _outside(checking) if options.strict_domain and not stopped else []
        return
    seen = coverage.counted(checking.cases)
    told.gaps = coverage.missed(seen, described.domain, checking.cases[:200])
    told.regimes = coverage.lines(seen, told.gaps)
    print_line("\n".join(["cases by regime:", *told.regimes]), out)
    if not stopped:
        told.refusals = _print_refusals(spec, checking, out)
        told.outside = _outside(checking)


def _head(checking: Check) -> Head:
    """The beginning of the check's record."""
    settings, described = checking.settings, checking.describe()
    return Head(
        adapter=settings.adapter,
        gdn_verify=__version__,
        versions=described.versions,
        device=described.device,
        profile=settings.profile.name,
        seed=settings.seed,
        laws=checking.asked,
        tune=settings.tune,
        products=settings.products or (described.products if settings.device == "cuda" else "ieee"),
        under=settings.under,
        shard=(settings.shard.number, settings.shard.count),
        declares=described.lines(),
        omits=described.omits,
    )


def _files_of(defects: Iterable[known.Known]) -> list[str]:
    """A line for each file of known defects that is not ours, with the number of its defects."""
    counts = collections.Counter(defect.file for defect in defects if defect.file != known.NAME)
    return [f"  known        {count} defect{'s' if count > 1 else ''} on file in {file}" for file, count in counts.items()]


def _print_report(
    texts: text.LawTexts, out: TextIO, lines: JsonLines, on_case: Callable[[str, int, int], None], report: LawReport
) -> None:
    on_case(report.law, report.planned, report.planned)  # the law is over, also if its last cases were not run
    told = texts(report)
    if told or report.known:
        print_line("\n  ".join(filter(None, [told, *report.known])), out)
    lines(law_line(report))


def _print_end(checking: Check, wall_s: float, out: TextIO, told: End) -> None:
    """Print the reach, the causes, the summary, kernels whose programs could not be interpreted together, and our own failures."""
    reports = checking.reports
    if told.interrupted or any(report.verdict is Verdict.HOLDS for report in reports):
        told.looked_at = reach_report.report(
            checking.reach,
            _omits(checking),
            parameters=checking.settings.laws is None,
            width=width_of(out, reach_report.WIDTH),
        )
    told.left_out, told.causes = left_out([*reports, *checking.unfinished]), causes.lines(reports)
    for part in (told.looked_at, told.left_out, told.causes, outside.lines(told.outside)):
        if part:
            print_line("\n".join(part), out)
    if time.monotonic() >= checking.settings.until and (names := _not_asked(checking)):
        print_line(f"not run, because the time was up: {', '.join(names)}", out)
    print_line(("interrupted: " if told.interrupted else "") + _summary(checking, wall_s), out)
    for part in (text.one_by_one(reports), text.kept_promises(reports)):
        if part:
            print_line("\n".join(part), out)
    if notice := text.fault_notice(reports):
        print_line(notice, out)


def _not_asked(checking: Check) -> list[str]:
    """The laws of which no case was run."""
    begun = {report.law for report in checking.reports} | {report.law for report in checking.unfinished if report.counts}
    return [law for law in checking.laws or () if law not in begun]


def _print_refusals(spec: str, checking: Check, out: TextIO) -> dict[str, list[str]]:
    """Print what the adapter does with illegal input, unless the time is up before all of it is known, and return it."""
    did, ended = dict[str, list[str]](), list[str]()
    domain, until = checking.describe().domain, checking.settings.until
    names = [*filter(checking.settings.shard.owns, book_of(domain).illegal.names(domain.operation))]
    idle = queue.SimpleQueue[Answering]()
    for worker in checking.workers:
        idle.put(worker)

    def ask(name: str) -> str:
        worker = idle.get()
        try:
            answer = "" if time.monotonic() >= until else _reaction(spec, name, checking, worker)
            if time.monotonic() >= until:  # it may have been cut short
                return ""
            if isinstance(worker, Group) and not worker.alive:
                ended.append(name)
            return answer
        finally:
            idle.put(worker)

    pool = concurrent.futures.ThreadPoolExecutor(len(checking.workers))
    try:
        answers = dict(zip(names, pool.map(ask, names), strict=True))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    for name, answer in answers.items():
        if answer:
            did.setdefault(answer, []).append(name)
    if not all(answers.values()):
        print_line("illegal input: not tried in full, because the time was up", out)
        return did
    if did:
        print_line("\n".join(text.refusal_lines(did)), out)
    if ended:
        print_line(f"  the ranks were ended after: {'; '.join(ended)} (each later call had new ranks; the laws ran before)", out)
    return did


def _outside(checking: Check) -> list[outside.Answer]:
    """What the implementation does with calls just outside its domain, as far as there is time."""
    answers, settings = list[outside.Answer](), checking.settings
    for what in checking.outside:
        if time.monotonic() >= settings.until:
            break
        if (answer := checking.ask_outside(what)) is not None:
            answers.append(answer)
    return answers


def _reaction(spec: str, name: str, checking: Check, worker: Answering) -> str:
    """What the adapter does with one illegal input, in words.

    The call before may have ended the process, or a group of ranks. Starting it again and loading the adapter have their own time.
    """
    settings = checking.settings
    left_out = checking.defects.left_out_of_any(settings.device)
    try:
        worker.ask(Describe(spec), min(worker.deadline_s, settings.until - time.monotonic()))
    except WorkerLost as lost:
        return f"not run: loading the adapter again {lost.how} ({lost.detail})"
    try:
        question = Refuse(spec, name, settings.tune, left_out, denied=checking.defects.denied)
        reply = read(Reaction, worker.ask(question, min(30.0, settings.until - time.monotonic())))
    except WorkerLost as lost:
        return f"{lost.how} ({lost.detail})"
    return reply.did if isinstance(reply, Reaction) else f"not run: {reply.error}"


def _summary(checking: Check, wall_s: float) -> str:
    """One line: how many laws have each verdict, and the cases and seconds, also those of laws that were not finished."""
    reports, laws, store = checking.reports, checking.laws or [], checking.store
    every = [*reports, *checking.unfinished]
    cases = sum(sum(report.counts.values()) for report in every)
    line = f"{text.laws_that_hold(reports, len(laws))}; {cases} cases in {wall_s:.0f} s"
    processes = sum(1 if isinstance(worker, Worker) else worker.size for worker in checking.workers[: max(1, len(laws))])
    line += f" {text.times(every, processes)}"
    if any(report.verdict is Verdict.BROKEN for report in reports) and not store.trouble:
        line += f"; findings are in {store.folder}/findings.jsonl"
    return line
