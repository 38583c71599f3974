"""Known defects of released code. They are reported but break no law. A defect that no longer fails is reported too.

Among them is a deny-list (deny_list.py): configurations that lose the device, which no draw takes.
"""

import dataclasses
import functools
import math
import os
import pathlib
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

from properties.books import book_of
from properties.rules.case import Case
from properties.words.line import split_line
from properties.words.names import did_you_mean
from verify.adapters.registry import BUILT_IN, AdapterError
from verify.execution.line import Run
from verify.findings import deny_list
from verify.findings.deny_list import Denial, Versions
from verify.gpu import policies
from verify.process.outcome import FailureKind, Finding, Outcome, Used, Verdict

NAME = "known_defects.toml"
FILE = pathlib.Path(__file__).with_name(NAME)
NOTHING_RAN: Used = MappingProxyType({})  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Known:
    """A defect on file: a run that shows it, the versions that have it, and the other cases that it explains.

    A failure is this defect if all of the following hold:

    - It has the same adapter, and the law of `run` or one of the laws in `also`. With `times`, it may have any law: every
      comparison with the truth sees the same error.
    - Its case and variant have all words of `where`, and the number of each word in `least` is at least, in `most` at most, the
      given one.
    - If `outputs` are named, only these outputs are wrong, each by at most `times` its tolerance.
    - If `run` is on a GPU, the failure is on a GPU too.

    A defect of one autotune configuration names its `kernel`, the words of its `config`, and the `cards` that have it. Then any
    adapter and any law may show it, if the kernel ran with such a configuration on such a card. In a case of another book, whose
    outputs have other names, all gradients may be wrong if one of `outputs` is a gradient, and all outputs if one is an output.

    `somewhere`: the defect depends on the processor, so it is no surprise if it does not show. `file`: where the entry is.
    """

    run: Run
    versions: Versions
    where: dict[str, str]
    reason: str
    also: tuple[str, ...] = ()
    least: dict[str, int] = dataclasses.field(default_factory=dict)
    most: dict[str, int] = dataclasses.field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    times: float = math.inf
    somewhere: bool = False
    kernel: str = ""
    config: str = ""
    cards: tuple[str, ...] = ()
    file: str = NAME

    def applies(self, device: str = "cpu", gpu: str = "") -> bool:
        """Whether the installed versions have the defect on this device. A defect shown on a GPU exists on GPUs only.

        `gpu` is the name of the GPU. One of `cards` must be this name or a word in it.
        """
        on_card = not self.cards or deny_list.is_card(gpu, self.cards)
        return self.run.device in ("cpu", device) and on_card and deny_list.fit(self.versions)

    def outdated(self) -> bool:
        """Whether the entry is about other versions than the installed ones."""
        return not deny_list.fit(self.versions)

    def explains(self, run: Run, findings: Sequence[Finding] = (), tuned: Used = NOTHING_RAN, gpu: str = "") -> bool:
        """Whether the findings of `run` are this defect. Without findings: whether any finding of the run would be.

        `tuned` are the configurations that ran in it, and `gpu` is the name of its GPU.
        """
        if not self.covers(run, gpu) or (self.kernel and not self._ran(run, findings, tuned)):
            return False
        outputs = self._outputs_in(run)
        return not outputs or (bool(findings) and all(self._explains(finding, outputs) for finding in findings))

    def _ran(self, run: Run, findings: Sequence[Finding], tuned: Used) -> bool:
        """Whether the kernel ran with the configuration. A process that crashed leaves no record: then only our adapter counts."""
        crashed = not tuned and bool(findings) and all(finding.kind is FailureKind.CRASHED for finding in findings)
        return policies.ran(tuned, self.kernel, self.config) or (crashed and same_adapter(run.adapter, self.run.adapter))

    def covers(self, run: Run, gpu: str = "") -> bool:
        """Whether this defect may show in `run`, judged by its adapter, law, case and device alone."""
        here = bool(self.kernel) or (self._in(run.law) and same_adapter(run.adapter, self.run.adapter))
        return here and self.applies(run.device, gpu) and self._about(run)

    def resembles(self, run: Run, findings: Sequence[Finding]) -> bool:
        """Whether a broken run of any adapter and versions looks like this defect: the same operation, law, words and outputs.

        If the defect needs a sequence without tokens, which its line then has, so does a run that looks like it.
        """
        needed, had = (0 in getattr(case, "lengths", ()) for case in (self.run.example.case, run.example.case))
        if needed and not had:
            return False
        kinds = [(type(case), case.words().get("op")) for case in (run.example.case, self.run.example.case)]
        explained = not self.outputs or all(self._explains(finding, {*self.outputs}) for finding in findings)
        here = kinds[0] == kinds[1] and self._in(run.law)
        return here and not self.kernel and self.run.device in ("cpu", run.device) and self._about(run) and explained

    @property
    def title(self) -> str:
        """The adapter, the versions and the reason, in one line."""
        versions = ", ".join(f"{name} {' or '.join(listed)}" for name, listed in self.versions.items())
        return f"{self.run.adapter} with {versions}: {self.reason}"

    def _in(self, law: str) -> bool:
        return math.isfinite(self.times) or law in (self.run.law, *self.also)

    def _about(self, run: Run) -> bool:
        """Whether the words of a run are among those that the defect is about."""
        words = words_of(run)
        numbers = {name: int(word) for name, word in words.items() if word.isdecimal()}
        return (
            all(words.get(name) == value for name, value in self.where.items())
            and all(numbers.get(name, -1) >= number for name, number in self.least.items())
            and all(numbers.get(name, math.inf) <= number for name, number in self.most.items())
        )

    def _outputs_in(self, run: Run) -> set[str]:
        """The outputs of a run that the defect may make wrong; empty for any."""
        case = run.example.case
        if not self.outputs or book_of(case) is book_of(self.run.example.case):
            return {*self.outputs}
        outputs, gradients = (names(self.run.example.case) for names in (_forward, _gradients))
        same = {"call"} & {*self.outputs}
        same |= _forward(case) if outputs & {*self.outputs} else set()
        return same | (_gradients(case) if gradients & {*self.outputs} else set())

    def _explains(self, finding: Finding, outputs: set[str]) -> bool:
        within = 0 < finding.error <= self.times * finding.allowed  # an exact comparison allows no error
        return finding.port in outputs and (self.times == math.inf or within)


class KnownDefects:
    """The defects on file. Only this class decides whether the outcome of a run is a known defect."""

    def __init__(
        self, defects: Iterable[Known] = (), gpu: str = "", denials: Iterable[Denial] = (), denied: Sequence[dict[str, Any]] = ()
    ) -> None:
        """`gpu` is the name of the GPU on which runs are made. `denied` has the entries of a user's deny-list, as plain data."""
        self._defects, self._gpu, self._denials, self.denied = tuple(defects), gpu, list(denials), list(denied)

    def on(self, gpu: str) -> "KnownDefects":
        """The same defects for runs on a GPU of this name."""
        return KnownDefects(self, gpu, self._denials, self.denied)

    def with_(self, other: "KnownDefects") -> "KnownDefects":
        """These defects and those of another file."""
        return KnownDefects((*self, *other), self._gpu, (*self._denials, *other._denials), self.denied)

    @property
    def deny_list(self) -> "KnownDefects":
        """What no draw takes, alone. It explains nothing."""
        return KnownDefects((), self._gpu, self._denials, self.denied)

    def denials(self, run: Run) -> list[Denial]:
        """The entries of the deny-list that are about a run."""
        if run.device != "cuda" or not self._denials:
            return []
        words = words_of(run)
        return [denial for denial in self._denials if denial.applies(self._gpu, words)]

    def left_out(self, run: Run) -> list[tuple[str, str]]:
        """The configurations that no draw of a run may take: pairs of a kernel and words of its configuration."""
        return [(denial.kernel, denial.config) for denial in self.denials(run)]

    def left_out_of_any(self, device: str) -> list[tuple[str, str]]:
        """The configurations that the draw of some run on a device may not take."""
        entries = self._denials if device == "cuda" else []
        return [(denial.kernel, denial.config) for denial in entries if denial.applies(self._gpu, {})]

    def deny(self, defect: Known) -> None:
        """Leave the configuration of a defect, which has just lost the device, out of all later draws."""
        self._denials.append(
            Denial(
                *(defect.kernel, defect.config, defect.cards, defect.versions, defect.reason),
                *(defect.where, defect.least, defect.most),
            )
        )

    def __iter__(self) -> Iterator[Known]:
        return iter(self._defects)

    def explain(self, run: Run, outcome: Outcome) -> Known | None:
        """The defect that a broken run shows, or None."""
        if outcome.verdict is not Verdict.BROKEN:
            return None
        return next((defect for defect in self if defect.explains(run, outcome.findings, outcome.tuned, self._gpu)), None)

    def explain_any(self, run: Run) -> Known | None:
        """The defect that would explain any failure of this run; None if that depends on the findings. Nothing is run."""
        return next((defect for defect in self if defect.explains(run)), None)

    def covering(self, run: Run) -> list[Known]:
        """The defects that may show in a run."""
        return [defect for defect in self if defect.covers(run)]

    def resembling(self, run: Run, outcome: Outcome, fails_too: Iterable[str] = ()) -> list[Known]:
        """The defects, of any adapter and versions, that look like a broken run. Of several with one title, the first.

        `fails_too` are words, such as "dtype=fp32", with which the run fails in the same way. A defect does not look like it if it
        is about another value of such a word: a kernel that also fails in float32 does not fail because bf16 is rounded.
        """
        others = [split_line(words) for words in fails_too]
        alike = {
            defect.title: defect
            for defect in reversed(self._defects)
            if defect.resembles(run, outcome.findings)
            and all(words.get(name, value) == value for words in others for name, value in defect.where.items())
        }
        return list(alike.values())

    def explained_outputs(self, run: Run) -> dict[str, float]:
        """The outputs that known defects explain in `run`, each with the largest error, in tolerances, that they explain.

        Outputs that a defect may make wrong by any amount are left out, because an error near the tolerance need not come from it.
        """
        times: dict[str, float] = {}
        for defect in self:
            if defect.outputs and math.isfinite(defect.times) and not defect.kernel and defect.covers(run):
                times |= {output: max(defect.times, times.get(output, 0.0)) for output in defect.outputs}
        return times

    def shown_by(self, adapter: str, law: str, device: str) -> list[Known]:
        """The defects whose lines a check of this adapter and law runs again, to see whether they still fail."""
        return [defect for defect in self._about(adapter, law) if defect.applies(device, self._gpu)]

    def outdated(self, adapter: str, law: str) -> list[Known]:
        """The defects of this adapter and law in files of users that are about other versions than the installed ones."""
        return [defect for defect in self._about(adapter, law) if defect.file != NAME and defect.outdated()]

    def _about(self, adapter: str, law: str) -> list[Known]:
        return [defect for defect in self if defect.run.law == law and same_adapter(defect.run.adapter, adapter)]


NO_DEFECTS = KnownDefects()


def same_adapter(one: str, other: str) -> bool:
    """Whether two names are the same adapter, where a file may be named in several ways."""
    return one == other or (".py:" in one and ".py:" in other and _whole(one) == _whole(other))


def _whole(spec: str) -> tuple[str, str]:
    place, _, name = spec.rpartition(":")
    return os.path.realpath(place), name


def words_of(run: Run) -> dict[str, str]:
    """The words of a run's case, and of its variant if it has one."""
    words: dict[str, str] = run.example.case.words()
    return words if run.example.variant is None else {**words, "variant": run.example.variant}


def _forms(case: Any) -> list[Any]:
    """The case, both with gate and beta as inputs and computed in the kernel."""
    if isinstance(case, Case) and case.operation != "delta_rule":
        legal = dataclasses.replace(case, values="ordinary", gate="forever", decay="log")  # with any form
        return [case, *(dataclasses.replace(legal, in_kernel=form) for form in ("none", "both"))]
    return [case]


def _forward(case: Any) -> set[str]:
    return {port.name for form in _forms(case) for port in form.spec.outputs}


def _gradients(case: Any) -> set[str]:
    return {port.name for form in _forms(case) for port in form.spec.gradients()}


def outputs_of(case: Any) -> set[str]:
    """What an entry may name as wrong: the call, and the inputs, outputs and gradients of a case."""
    return {"call", *_forward(case), *_gradients(case), *(port.name for form in _forms(case) for port in form.spec.inputs)}


def load(path: pathlib.Path = FILE) -> KnownDefects:
    """The defects of a TOML file. ValueError names the entry and the rule that the entry breaks."""
    text = path.read_text(encoding="utf-8")
    return _parse_own_file(text, path) if path == FILE else parse(text, path)


@functools.lru_cache(1)
def _parse_own_file(text: str, path: pathlib.Path) -> KnownDefects:
    """Parse the project's own file once a process (9 ms). Its entries do not depend on the current directory."""
    return parse(text, path)


def parse(text: str, path: pathlib.Path) -> KnownDefects:
    """The defects in the text of a TOML file, whose adapters are looked for in the folder of `path`. ValueError as for `load`."""
    data = tomllib.loads(text)
    entries, denied = data.pop("defect", []), data.pop("deny", [])
    tables = [*entries, *denied] if isinstance(entries, list) and isinstance(denied, list) else [None]
    if data or not all(isinstance(entry, dict) for entry in tables):
        raise ValueError(
            "a file of known defects must have [[defect]] and [[deny]] tables alone, "
            f"got {', '.join(data) or 'defect or deny as no table'}"
        )
    denials = [deny_list.denial(f"entry {index} of the deny-list", entry) for index, entry in enumerate(denied)]
    return KnownDefects([_known(index, entry, path) for index, entry in enumerate(entries)], denials=denials)


def beside(spec: str) -> pathlib.Path | None:
    """The file of known defects in the folder of an adapter's file, whether it exists or not. None for a built-in adapter."""
    place, _, _ = spec.rpartition(":")
    return pathlib.Path(place).with_name(NAME) if place.endswith(".py") else None


def of(spec: str, files: Iterable[str] = (), denied: Iterable[policies.Denied] = ()) -> KnownDefects:
    """The defects that count for an adapter: those on file here, beside the adapter's file, and in `files`.

    `denied` are the entries of a user's deny-list. ValueError names the file that cannot be read, or the entry and the rule that it
    breaks.
    """
    near = beside(spec)
    paths = ([near] if near is not None and near.is_file() else []) + [pathlib.Path(file) for file in files]
    defects = KnownDefects(denied=[entry.to_json() for entry in denied]).with_(load())
    for path in {os.path.realpath(path): path for path in paths}.values():
        try:
            defects = defects.with_(load(path))
        except OSError as error:
            raise ValueError(f"known defects: {path} cannot be read: {error.strerror}") from None
        except (ValueError, AdapterError) as error:
            raise ValueError(f"{path}: {error}") from None
    return defects


def _located(line: str, folder: pathlib.Path) -> str:
    """A line whose adapter's file, if it lies in `folder`, is named from the current directory."""
    spec = split_line(line).get("adapter", "")
    place, _, name = spec.rpartition(":")
    if not place.endswith(".py") or not (folder / place).is_file():
        return line
    return line.replace(f"adapter={spec}", f"adapter={os.path.relpath(folder / place)}:{name}", 1)


def _known(index: int, entry: dict[str, object], path: pathlib.Path) -> Known:
    missing = {"run", "versions", "where", "reason"} - entry.keys()
    if missing:
        raise ValueError(f"known defect {index} must have {', '.join(sorted(missing))}")
    keys = [field.name for field in dataclasses.fields(Known) if field.name != "file"]
    if unknown := next((key for key in entry if key not in keys), None):
        raise ValueError(f"known defect {index} has an unknown key {unknown!r}{did_you_mean(unknown, keys)}")
    run = Run.parse(_located(str(entry["run"]), path.parent))
    if run.outside:
        raise ValueError(f"known defect {index}: its line must be inside the domain, got outside={run.outside}")
    if path == FILE and run.adapter not in BUILT_IN:
        raise ValueError(f"known defect {index}: adapter must be one of {', '.join(BUILT_IN)}, got {run.adapter}")
    listed = deny_list.versions_of(f"known defect {index}", entry)
    kernel, config, cards = _configuration(index, entry, run, listed)
    also, laws = entry.get("also", []), book_of(run.example.case).laws
    if not isinstance(also, list) or not set(also) <= laws.keys():
        raise ValueError(f"known defect {index}: also must be a list of laws among {', '.join(laws)}, got {also!r}")
    least, most = (
        deny_list.numbers_of(f"known defect {index}", entry, *pair) for pair in (("least", "least"), ("most", "greatest"))
    )
    outputs, times = entry.get("outputs", []), entry.get("times", math.inf)
    names = outputs_of(run.example.case) if outputs else set()
    if not isinstance(outputs, list) or not set(outputs) <= names:
        raise ValueError(f"known defect {index}: outputs must be a list of some of {', '.join(sorted(names))}, got {outputs!r}")
    if not isinstance(times, int | float) or times < 1:
        raise ValueError(f"known defect {index}: times must be a number from 1 up, got {times!r}")
    where = split_line(str(entry["where"]))
    somewhere = entry.get("somewhere", False)
    if not isinstance(somewhere, bool):
        raise ValueError(f"known defect {index}: somewhere must be true or false, got {somewhere!r}")  # noqa: TRY004
    known = Known(
        run,
        listed,
        where,
        str(entry["reason"]),
        tuple(also),
        least,
        most,
        tuple(outputs),
        float(times),
        somewhere,
        kernel,
        config,
        cards,
        NAME if path == FILE else str(path),
    )
    if not known.where:
        raise ValueError(f"known defect {index}: where must have at least one word, or the defect would hide everything")
    words = words_of(run)
    for what, numbers, sign in (("least", known.least, -1), ("most", known.most, 1)):
        for name, number in numbers.items():
            if not words.get(name, "").isdecimal() or sign * int(words[name]) > sign * number:
                raise ValueError(
                    f"known defect {index}: {what} must hold for its own run, got {name}={number} and {words.get(name)}"
                )
    for name, value in known.where.items():
        if words.get(name) != value:
            raise ValueError(f"known defect {index}: where must hold for its own run, got {name}={value} and {words.get(name)}")
    return known


def _configuration(index: int, entry: dict[str, object], run: Run, versions: Versions) -> tuple[str, str, tuple[str, ...]]:
    """The kernel, configuration and cards of an entry, empty if it has none. ValueError if the entry does not name all of them."""
    if not entry.keys() & {"kernel", "config", "cards"}:
        return "", "", ()
    kernel, config, cards = deny_list.configuration_of(f"known defect {index}", entry, versions)
    if run.device != "cuda" or "also" in entry:
        raise ValueError(f"known defect {index}: an entry with a kernel has a run with device=cuda, and no also")
    picks = {name: (text,) for name, text in policies.Policy.parse(run.tune).picks} if run.tune else {}
    picked = {name for name in picks if name.rpartition(".")[2] == kernel.rpartition(".")[2]}
    if picked and not any(policies.ran({kernel: picks[name]}, kernel, config) for name in picked):
        raise ValueError(f"known defect {index}: config must hold for its own run, got {config} and tune={run.tune}")
    return kernel, config, cards
