"""Writes an entry of a file of known defects from a run that was seen to fail."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

from properties.words.line import split_line
from verify.adapters.packages import installed
from verify.execution.line import Run
from verify.findings import known
from verify.findings.known import Known
from verify.gpu import policies
from verify.process.outcome import Outcome


def entry_of(
    run: Run,
    outcome: Outcome,
    packages: Mapping[str, str],
    gpu: str,
    *,
    reason: str,
    where: str = "",
    also: Sequence[str] = (),
    times: float | None = None,
    kernel: str = "",
) -> dict[str, object]:
    """An entry, as plain data, that explains a broken run and other runs like it.

    - `packages` are the packages of the adapter with their installed versions, and `gpu` is the name of the GPU of the run.
    - `where` are the words that every case of the defect has. By default a case must have all options of the run's case, and
      without `also` and `kernel` its variant, but may have any sizes and any seed.
    - The entry explains only the outputs that are wrong in this run, each by at most `times` its tolerance if that is given.
    - `kernel` is a kernel and words of its configuration, KERNEL:NAME=VALUE:..., which must have run.

    ValueError names the argument that does not fit the run, and the rule.
    """
    case = run.example.case
    options = {
        case.LONG.get(field.name, field.name)
        for field in dataclasses.fields(case)
        if isinstance(getattr(case, field.name), bool | str) and field.name not in case.NEEDED
    }
    options |= set() if also or kernel else {"variant"}  # other laws have other variants
    words = split_line(where) if where else {name: word for name, word in known.words_of(run).items() if name in options}
    ports = {finding.port for finding in outcome.findings}
    if strange := sorted(ports - known.outputs_of(case)):
        raise ValueError(f"a known defect is about outputs, gradients, inputs and calls, but this run fails in {strange[0]}")
    versions = {name: [version] for name, version in packages.items()}
    entry: dict[str, object] = {"run": str(run), "versions": versions}
    if kernel:
        name, _, config = kernel.partition(":")
        if not config or not policies.ran(outcome.tuned, name, config):
            ran = ", ".join(f"{kernel}:{text}" for kernel, texts in outcome.tuned.items() for text in texts) or "none"
            raise ValueError(f"--kernel must be KERNEL:NAME=VALUE:... of a kernel that ran, got {kernel}; there ran {ran}")
        versions["triton"] = [installed("triton") or "none"]
        entry |= {"kernel": name, "config": config, "cards": [gpu]}
    entry["where"] = " ".join(f"{name}={word}" for name, word in words.items())
    entry |= {"also": list(also)} if also else {}
    entry["outputs"] = sorted(ports)
    entry |= {"times": times} if times is not None else {}
    return entry | {"reason": reason}


def add(entry: Mapping[str, object], path: pathlib.Path) -> Known:
    """Append an entry to a file, which need not exist, and return it as it is read back.

    The file is replaced at once. ValueError if the file or the entry breaks a rule; the file is then unchanged.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    text = "\n".join(["[[defect]]", *(f"{name} = {_toml(value)}" for name, value in _beside(entry, path).items())]) + "\n"
    whole = f"{before.rstrip()}\n\n{text}" if before.strip() else text
    *_, defect = known.parse(whole, path)
    new = path.with_name(f"{path.name}.new")
    new.write_text(whole, encoding="utf-8")
    os.replace(new, path)
    return defect


def _beside(entry: Mapping[str, object], path: pathlib.Path) -> dict[str, object]:
    """The entry, with its adapter's file named from the folder of `path`."""
    line = str(entry["run"])
    spec = split_line(line)["adapter"]
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        line = line.replace(f"adapter={spec}", f"adapter={os.path.relpath(place, path.parent)}:{name}", 1)
    return {**entry, "run": line}


def _toml(value: object) -> str:
    """A text, number, list of texts or table of lists in TOML, whose texts are written as in JSON."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(str(name))} = {_toml(item)}" for name, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
