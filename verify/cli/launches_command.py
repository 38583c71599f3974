"""The verb `launches`: find the kernel launch whose numbers differ."""

from verify.adapters.registry import AdapterError
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED
from verify.cli.hosts import check_installed, deadline_of, read_deny_list
from verify.cli.options import SWEEP
from verify.cli.output import print_json
from verify.cli.terminal import print_error, print_line
from verify.cli.verb_options import LaunchesOptions
from verify.engine.asking import describe
from verify.execution.line import Run
from verify.findings import known
from verify.gpu import device as devices
from verify.process.choices import NoGpu
from verify.process.messages import Failure, Launches, LaunchReport, read
from verify.process.worker import Worker, WorkerLost


def launches(options: LaunchesOptions) -> int:
    """Print the launches whose results differ among several calls. Returns the exit code."""
    run, beside = Run.parse(options.line), [*(options.beside or ())]
    if run.device != "cuda":
        raise ValueError(f"launches needs a line with device=cuda, got device={run.device}")
    if SWEEP in beside:
        raise ValueError(f"--beside must be a number or native, got {SWEEP}")
    if options.calls == 1 and not beside:
        raise ValueError("--calls must be 2 or more without --beside, got 1: a single call has nothing to be compared with")
    denied = read_deny_list(options.deny)
    check_installed(run.adapter)
    if not devices.gpus():
        raise NoGpu("the line has device=cuda, but torch sees no GPU")
    blocking = {**devices.environment(run.device), "CUDA_LAUNCH_BLOCKING": "1"}  # an error belongs to the launch that made it
    with Worker(deadline_of(options), environment=blocking) as worker:
        try:
            defects = known.of(run.adapter, denied=denied).on(describe(run.adapter, worker).device)
            question = Launches(str(run), options.calls, beside, defects.left_out(run), denied=defects.denied)
            report = read(LaunchReport, worker.ask(question, worker.deadline_s * (options.calls + len(beside))))
        except WorkerLost as lost:
            report = LaunchReport(reason=f"{lost}; the launch is not known")
    if isinstance(report, Failure):
        raise AdapterError(report.error)
    if options.json:
        print_json({"run": str(run), **report.to_json()})
    elif not report.reason:
        left = [f"not called: {words}" for words in report.left]
        print_line("\n  ".join([f"{report.launches} launches of {report.kernels} kernels", *report.found, *left]))
    if not report.found and not report.launches:
        print_error(report.reason or "no Triton kernel was launched")
        return UNDECIDED
    return BROKEN if report.found else HOLDS
