"""The law `tags` of serving engines: which token's tag each row of a state and each column of a window must hold."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from properties.laws.law import Breach, Pair
from properties.traces.case import TAG_CHANNELS, TraceCase
from properties.traces.events import Row, number_of
from properties.traces.play import Moment, Slot, TraceBench, named, play
from properties.words.example import Example

EXACT_OUTPUTS = (4, 16, 64, 256)  # key_dim: 1 / sqrt(K) is a power of two


@dataclasses.dataclass
class Ledger:
    """Which token's tag each row of a state and each column of a window must hold."""

    rows: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    columns: list[Tensor] = dataclasses.field(default_factory=list)

    def copy(self) -> "Ledger":
        """Return a copy that can go on by itself."""
        return Ledger(dict(self.rows), list(self.columns))


def tags(bench: TraceBench, example: Example) -> Iterator[Pair]:
    """Keys have one entry, the gate does not decay, beta is one and the convolution copies, so that nothing rounds.

    Row t mod K of a state must hold the tag of the last accepted token t of this row, and the window the last accepted inputs. A
    row that holds another tag names the culprit.
    """
    case: TraceCase = example.case
    ledgers: dict[str, Ledger] = {}
    for moment in play(bench, case, tagged=True):
        step = moment.step
        for place, row in enumerate(step.rows):
            if row.real:
                ledger = Ledger() if row.begins else ledgers[row.request]
                for token in range(row.accepted):
                    _accept(case, ledger, row.request, row.start + token)
                    if token + 1 == row.snapshot:
                        ledgers[f"{row.request}@"] = ledger.copy()
                ledgers[row.request] = ledger
                if case.key_dim in EXACT_OUTPUTS and row.count:
                    yield _tagged_output(case, moment, place, row)
        if step.kind == "k":
            ledgers[step.request] = ledgers[f"{step.source}@" if step.snapshot else step.source].copy()
        if step.kind in ("r", "f"):
            ledgers.pop(step.request)
            ledgers.pop(f"{step.request}@", None)
        for owner, ledger in sorted(ledgers.items()):
            yield from _tagged_slot(case, moment, owner, ledger, moment.after[owner])


def _accept(case: TraceCase, ledger: Ledger, request: str, token: int) -> None:
    number = number_of(request)
    tag = case.tag("tokens", number, token)
    ledger.rows[token % case.key_dim] = tag
    ledger.columns = [*ledger.columns, case.tagged(tag, token)][1 - case.width :]


def _tagged_slot(case: TraceCase, moment: Moment, owner: str, ledger: Ledger, slot: Slot) -> Iterator[Pair]:
    """Compare an owner's state and window with what they must hold. Breach names the first wrong row or column and its culprit."""
    whose = f"{named(owner)}'s"
    state = torch.zeros(case.value_heads, case.key_dim, case.value_dim)
    for row, tag in ledger.rows.items():
        state[:, row] = case.repeated(tag)
    got = slot.state.float()
    if (wrong := (got != state).any(-1).nonzero().tolist()) != []:
        head, row = wrong[0]
        holds, must = (case.untag(x[head, row, :TAG_CHANNELS].tolist()) for x in (got, state))
        raise Breach(
            "a state holds a wrong tag",
            f"{whose} state after {moment.where} of {case.trace} holds in row {row} of head {head} {holds}, must hold {must}",
        )
    yield Pair("state", f"of {owner} after event {moment.step.event}", got, state)
    blank = torch.zeros(case.channels)
    window = torch.stack([*[blank] * (case.width - 1 - len(ledger.columns)), *ledger.columns], -1)
    columns = slot.window.float()
    if (wrong := (columns != window).any(0).nonzero().tolist()) != []:
        column = wrong[0][0]
        at = 2 * case.heads * case.key_dim
        raise Breach(
            "a window holds a wrong tag",
            f"{whose} window after {moment.where} of {case.trace} holds in column {column} "
            f"{case.untag(columns[at : at + TAG_CHANNELS, column].tolist())}, "
            f"must hold {case.untag(window[at : at + TAG_CHANNELS, column].tolist())}",
        )
    yield Pair("window", f"of {owner} after event {moment.step.event}", columns, window)


def _tagged_output(case: TraceCase, moment: Moment, place: int, row: Row) -> Pair:
    """Compare a row's outputs: token t reads row t - 1 of the state, and its scale is a power of two."""
    state = torch.zeros(case.value_heads, case.key_dim, case.value_dim)
    if not row.begins:  # a copy of a state that the law has compared after the step before
        state = moment.before[row.request].state.float().clone()
    want = torch.zeros(row.count, case.value_heads, case.value_dim)
    for token in range(row.count):
        position = row.start + token
        state[:, position % case.key_dim] = case.repeated(case.tag(*case.owner(moment.step, place, token)))
        want[token] = state[:, (position - 1) % case.key_dim] * case.key_dim**-0.5
    got = moment.rows[place].float()
    if (wrong := (got != want).any(-1).nonzero().tolist()) != []:
        (token, head), scale = wrong[0], case.key_dim**0.5
        raise Breach(
            "an output reads a wrong tag",
            f"request {row.request}'s token {token} of {moment.where} of {case.trace} reads "
            f"{case.untag((got[token, head, :TAG_CHANNELS] * scale).tolist())}, "
            f"must read {case.untag((want[token, head, :TAG_CHANNELS] * scale).tolist())}",
        )
    return Pair("o", f"of {row.request} in event {moment.step.event}", got, want)
