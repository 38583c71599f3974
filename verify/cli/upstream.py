"""The text of an issue for the authors of a library, about one line that fails."""

import contextlib
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
from verify.findings.known import KnownDefects
from verify.findings.store import Store
from verify.process.messages import Failure, Reproduce, Script, read
from verify.process.outcome import FailureKind, Outcome, Verdict
from verify.process.worker import WorkerLost
from verify.ranks.group import Answering

SCRIPT_S = 300.0  # for a script
WRITTEN, DRAWN, MOST = 400, 0, 4000  # numbers in a script, first to last; with 0 torch draws others. An issue has 65,536 characters
EFFECTS = {FailureKind.OFF: "wrong numbers", FailureKind.NOT_FINITE: "wrong numbers", FailureKind.RAISED: "an error"}
# A call that ends like this may harm the process or memory of who runs it.
HARMFUL = (FailureKind.CRASHED, FailureKind.HUNG, FailureKind.RACE, FailureKind.OUT_OF_MEMORY, FailureKind.SANITIZER)
TEXT = """# {function}: {finding.output} {finding.what}

| | |
| --- | --- |
| versions | {versions} |
| device | {device} |
| effect | {effect} |

## What happens

{finding.output} {finding.what}.
{particulars}
## Expected

{expected}

## Reproduction

{reproduction}
"""
SHOWN = """The script ends with exit status 1 while the defect is there.

```python
{script}
```

## Observed

```text
{told}
```"""


def issue(
    run: Run, outcome: Outcome, worker: Answering, store: Store, versions: str, folder: str | None, defects: KnownDefects
) -> str:
    """The text of an issue in Markdown about a broken run. Its script has been run here, and shows the defect."""
    run, outcome = _of_one_call(run, outcome, worker, store, defects)
    finding, case = outcome.findings[0], run.example.case
    script, told = _that_shows(run, outcome, worker, folder, defects)
    particulars = [f"- where: {finding.worst}"] if finding.worst else []
    if finding.got:
        got, want = ([float(f"{number:.6g}") for number in numbers] for numbers in (finding.got, finding.want))
        particulars.append(f"- rows: {finding.rows_over} of {finding.rows} are wrong")
        particulars.append(f"- error: {finding.error:.4g}, of which rounding explains {finding.allowed:.4g}")
        particulars += [f"- got: {json.dumps(got)}", f"- expected: {json.dumps(want)}"]
    if is_harmful(outcome):
        particulars += ["", f"The call is a {case.words()['op']} in {case.dtype}."]
    else:
        particulars += ["", f'The case is `{case}`. It was found with `gdn-verify repeat "{run}"`.']
    return TEXT.format(
        function=script.function or run.adapter,
        finding=finding,
        versions=versions,
        device=run.device,
        effect=EFFECTS.get(finding.kind, finding.kind),
        particulars="\n".join([*particulars, ""]),
        expected="What the operation gives in float64, up to rounding." if finding.got else "A result: the call is legal.",
        reproduction=SHOWN.format(script=script.text.rstrip(), told=told) if script.text else script.reason,
    )


def _of_one_call(run: Run, outcome: Outcome, worker: Answering, store: Store, defects: KnownDefects) -> tuple[Run, Outcome]:
    """The same case under the law `oracle`, which is about a single call, if that is broken too."""
    example = dataclasses.replace(run.example, at=None, variant=None)
    with contextlib.suppress(ValueError, KeyError):
        alone = Run.parse(str(dataclasses.replace(run, law="oracle", example=example)))
        if run.law != "oracle" and not is_harmful(outcome):
            found = ask(alone, worker, store, defects=defects)
            return (alone, found) if found.verdict is Verdict.BROKEN else (run, outcome)
    return run, outcome


def is_harmful(outcome: Outcome) -> bool:
    """Whether anything that was found is about a crash, a hang, memory or the device."""
    memory = any(finding.detail in FROM_US or finding.port == "memory" for finding in outcome.findings)
    return outcome.spent or memory or any(finding.kind in HARMFUL for finding in outcome.findings)


def _that_shows(run: Run, outcome: Outcome, worker: Answering, folder: str | None, defects: KnownDefects) -> tuple[Script, str]:
    """A script that shows the first finding, and what it printed here; or why there is none."""
    finding = outcome.findings[0]
    if is_harmful(outcome):
        return Script(reason="There is no script, because such a call may harm who runs it."), ""
    if run.law != "oracle" or finding.kind not in EFFECTS:
        return Script(reason=f"There is no script: the law {run.law} finds this, and no wrong number of a single call."), ""
    reasons = []
    for most in (WRITTEN, DRAWN, MOST):
        try:
            script = read(Script, worker.ask(Reproduce(str(run), finding.to_json(), most, denied=defects.denied)))
        except WorkerLost as lost:
            return Script(reason=f"There is no script: the call {lost.how}."), ""
        if isinstance(script, Failure) or not script.text:
            reasons.append(script.error if isinstance(script, Failure) else script.reason)
            continue
        code, told = _printed(script.text, folder)
        if code == 1 and (finding.kind is FailureKind.RAISED or "got " in told):
            return script, told
        reasons.append(f"a script of the call does not show it here ({told or 'it printed nothing'})")
    words = f"There is no script: {'; '.join(dict.fromkeys(reasons))}."
    return Script(reason=words + " A line with device=cuda gives one for a GPU." * ("InterpreterError" in words)), ""


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
