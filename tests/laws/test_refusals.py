"""Illegal input: our own contract refuses all of it, and the probe distinguishes what implementations do."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.books import book_of
from properties.modules.domain import ModuleDomain
from properties.rules.domain import Domain
from properties.rules.illegal import OF_RULES, PACKED
from tests.right import Chunkwise
from tests.together import for_each
from verify.execution.refusals import probe
from verify.execution.service import answer
from verify.gpu import autotune
from verify.interpreter import OutOfBounds, Race
from verify.process.messages import Refuse
from verify.process.worker import Worker, WorkerLost

SAID = {
    "cu_seqlens that decrease": r"must not decrease, got \[0, 12, 5, 17\]",
    "cu_seqlens that end before the tokens do": r"must end at the token count 17, got 16",
    "cu_seqlens that do not start at 0": r"must start at 0 .* got \[1, 5, 17\]",
    "one initial state for two sequences": r"state must have N = 2, one per sequence, got shape \(1, 4, 16, 16\)",
    "HV not a multiple of H": r"HV must be a multiple of H = 2, got 3",
    "g of another length": r"g must have T = 17 .* got shape \(1, 16, 4\)",
    "q and k of different widths": r"k must have K = 8 .* got shape \(1, 17, 2, 16\)",
}


class Refuses(Chunkwise):
    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        raise TypeError("not like this")


class Silent(Chunkwise):
    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        return torch.zeros_like(x.v), None


class Races(Chunkwise):
    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        raise Race("program (0, 0) and (0, 3) both write o[0]", "kernel.py:7")


class Strays(Chunkwise):
    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        raise OutOfBounds("a load outside its tensor")


class Unpacked(Chunkwise):
    domain = Domain(packed=False)


class ReadsOptions(Silent):
    domain = Domain(options=(("order", ("kv", "vk")),))

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        assert x.options == {"order": "kv"}
        return super().run(x)


class Crashes(Chunkwise):
    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        os._exit(11)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(20.0) as one:
        yield one


def test_the_call_that_is_made_wrong_is_right_before() -> None:
    PACKED.spec.check(PACKED.inputs())


def test_every_illegal_input_has_its_message_here() -> None:
    assert set(SAID) == set(OF_RULES)


@for_each(
    "domain",
    [
        ModuleDomain(activations=("silu",), fixed_widths=(17,), offsets=("int32",)),
        ModuleDomain("norm_gate_linear", widths=(64, 256), eps=("1e-5",), residuals=("added",), gatings=("sigmoid",)),
        ModuleDomain("gated_rms_norm", fixed_widths=(24,), eps=("1e-5",)),
        ModuleDomain("gdn_gate", parameter_dtypes=("input",)),
        ModuleDomain("kda_gate", lower_bounds=("-5",)),
        Domain(length_step=4, key_widths=(24,), value_widths=(40,), decays=("linear",), state_dtypes=("bf16",), offsets=("int32",)),
        Domain(
            "kda",
            in_kernel=("none", "gate"),
            decays=("linear",),
            gate_dtypes=("input",),
            initial_states="first",
            final_states="last",
        ),
        Domain("delta_rule", equal_widths=True, grouped_heads=False, scales=("one",), final_dtype="state"),
    ],
)
def test_the_call_before_it_is_made_wrong_is_in_the_conventions_of_the_domain(domain: Any) -> None:
    illegal, said = book_of(domain).illegal, 0
    for name in illegal.names(domain.operation):
        call = illegal.call(name, domain)
        if isinstance(call, str):
            assert "unsupported" in call or "has no gate" in call, call
            continue
        case, wrong = call
        assert domain.outside(case) is None
        case.spec.check(case.inputs())
        with pytest.raises(ValueError, match="must"):
            illegal.check(case, wrong)
        said += 1
    assert said >= 2


@for_each("name", OF_RULES)
def test_our_contract_refuses_and_names_value_and_rule(name: str) -> None:
    with pytest.raises(ValueError, match=SAID[name]):
        PACKED.spec.check(OF_RULES[name](PACKED.inputs()))


@for_each("name", OF_RULES)
def test_probe_distinguishes_refused_and_silent(name: str) -> None:
    assert probe(Refuses(), name) == "refuses (TypeError)"
    assert probe(Silent(), name) == "returns numbers without an error"
    assert probe(Unpacked(), name).startswith("not run: ")
    assert probe(Races(), name) == "lets its programs race for the same memory"
    assert probe(Strays(), name) == "reads or writes outside its tensors"


def test_probe_passes_the_options_of_the_domain() -> None:
    assert probe(ReadsOptions(), "g of another length") == "returns numbers without an error"


class FollowsANumber(Refuses):
    """Raises an error that names configurations, in place of a kernel that Triton would time for a minute."""

    def run(self, x: Inputs) -> Any:
        assert autotune._left_out == (("kernel", "BK=4"),)
        raise KeyError if autotune._active.policy.tune is not None else TypeError


@pytest.mark.parametrize(("tune", "raised"), [("7", "KeyError"), ("native", "TypeError")])
def test_a_kernel_with_illegal_input_follows_the_configurations_of_the_check(tune: str, raised: str) -> None:
    question = Refuse(f"{__file__}:FollowsANumber", "g of another length", tune, [("kernel", "BK=4")])
    assert answer(question.to_json())["did"] == f"refuses ({raised})"
    assert autotune._left_out == ()


def test_probe_that_kills_its_process_costs_a_worker(worker: Worker) -> None:
    with pytest.raises(WorkerLost, match="exited with code 11"):
        worker.ask(Refuse(f"{__file__}:Crashes", "cu_seqlens that decrease"))
    assert worker.ask(Refuse(f"{__file__}:Refuses", "cu_seqlens that decrease"))["did"] == "refuses (TypeError)"
