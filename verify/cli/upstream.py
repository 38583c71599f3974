"""The text of an issue for the authors of a library, about one line that fails."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from verify.engine.asking import ask
from verify.execution.line import Run
from verify.execution.refusals import FROM_US
from verify.findings.store import Store
from verify.process.messages import Reproduce, Script, read
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict
from verify.process.worker import WorkerLost
from verify.ranks.group import Answering

SCRIPT_S = 300.0  # for a script
NUMBERS = (
    400,
    0,
    4000,
)  # how many a script may have: torch draws others before a script gets long, and an issue has at most 65,536 characters
HARMLESS = (FailureKind.OFF, FailureKind.NOT_FINITE, FailureKind.RAISED)  # failures that a script may show
MEMORY = "The call may crash, hang or leave its tensors, so there is no script."


def issue(run: Run, outcome: Outcome, worker: Answering, store: Store, versions: str, folder: str | None) -> str:
    """The text of an issue in Markdown about a broken run. Its script has been run here, and shows the defect."""
    run, outcome = _of_one_call(run, outcome, worker, store)
    finding = outcome.findings[0]
    script, told = Script(reason=MEMORY), ""
    if _is_harmless(outcome):
        script, told = _that_shows(run, finding, worker, folder)
    words = {FailureKind.RAISED: "an error", **dict.fromkeys((FailureKind.OFF, FailureKind.NOT_FINITE), "wrong numbers")}
    effect = words.get(finding.kind, str(finding.kind))
    lines = [f"# {script.function or run.adapter}: {finding.output} {finding.what}", "", "| | |", "| --- | --- |"]
    lines += [f"| versions | {versions} |", f"| device | {run.device} |", f"| effect | {effect} |", "", "## What happens", ""]
    lines += [f"{finding.output} {finding.what}.", *([f"- where: {finding.worst}"] if finding.worst else [])]
    if finding.rows:
        lines.append(f"- rows: {finding.rows_over} of {finding.rows} are wrong")
    if finding.got:
        lines.append(f"- error: {finding.error:.4g}, of which rounding explains {finding.allowed:.4g}")
        lines += [
            f"- {word}: {json.dumps([float(f'{n:.6g}') for n in numbers])}"
            for word, numbers in (("got", finding.got), ("expected", finding.want))
        ]
    lines += ["", f'The case is `{run.example.case}`. It was found with `gdn-verify repeat "{run}"`.', "", "## Expected", ""]
    lines += [
        "What the operation gives in float64, up to rounding."
        if finding.kind is not FailureKind.RAISED
        else "No error: the call is legal."
    ]
    lines += ["", "## Reproduction", ""]
    if script.text:
        lines += ["The script ends with exit status 1 while the defect is there.", "", "```python", script.text.rstrip(), "```"]
        lines += ["", "## Observed", "", "```text", told, "```"]
    else:
        lines += [script.reason]
    return "\n".join(lines) + "\n"


def _of_one_call(run: Run, outcome: Outcome, worker: Answering, store: Store) -> tuple[Run, Outcome]:
    """The same case under the law `oracle`, which is about a single call, if that is broken too."""
    if run.law == "oracle" or not _is_harmless(outcome):
        return run, outcome
    try:
        alone = Run.parse(
            str(dataclasses.replace(run, law="oracle", example=dataclasses.replace(run.example, at=None, variant=None)))
        )
    except ValueError:
        return run, outcome
    found = ask(alone, worker, store)
    return (alone, found) if found.verdict is Verdict.BROKEN and _is_harmless(found) else (run, outcome)


def _is_harmless(outcome: Outcome) -> bool:
    """Whether nothing that was found is about a crash, a hang, memory or the device."""
    ours = [finding.detail in FROM_US for finding in outcome.findings]
    return not outcome.spent and not any(ours) and all(finding.kind in HARMLESS for finding in outcome.findings)


def _that_shows(run: Run, finding: Finding, worker: Answering, folder: str | None) -> tuple[Script, str]:
    """A script that shows the finding, and what it printed here; or why there is none."""
    if run.law != "oracle":
        return Script(reason=f"The law {run.law} compares several calls, and no single one of them is wrong."), ""
    reasons = []
    for most in NUMBERS:
        try:
            script = read(Script, worker.ask(Reproduce(str(run), finding.to_json(), most)))
        except WorkerLost as lost:
            return Script(reason=f"There is no script: the call {lost.how}."), ""
        if isinstance(script, Script) and script.text:
            code, told = _printed(script.text, folder)
            if code == 1 and (finding.kind is FailureKind.RAISED or "got " in told):
                return script, told
            reasons.append(f"a script of the call does not show it here ({told or 'it printed nothing'})")
        else:
            reasons.append(script.reason if isinstance(script, Script) else script.error)
    words = f"There is no script: {'; '.join(dict.fromkeys(reasons))}."
    on_gpu = " A line with device=cuda gives one for a GPU." if "InterpreterError" in words else ""
    return Script(reason=words + on_gpu), ""


def _printed(text: str, folder: str | None) -> tuple[int, str]:
    """The exit status of a script, and what it printed; of an error its last line."""
    path = os.pathsep.join(filter(None, (folder and os.path.abspath(folder), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="gdn-verify-") as place:
        file = pathlib.Path(place, "repro.py")
        file.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run(  # noqa: S603 - what this module has written
                [sys.executable, str(file)],
                cwd=place,
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=SCRIPT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124, ""
    return done.returncode, done.stdout.strip() or (done.stderr.strip().splitlines() or [""])[-1]
