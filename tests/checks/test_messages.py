"""What a report keeps of the words of others: the cause of an error, and lines without a terminal's codes."""

import types

import torch

from properties.rules.case import Case
from properties.rules.domain import Domain
from properties.words.example import Example
from tests.together import for_each
from verify.adapters.foreign import Call
from verify.bench.faults import short
from verify.engine.asking import _last_lines
from verify.engine.would_hold import _ways
from verify.execution.line import Run


@for_each(
    ("message", "want"),
    [
        ("no room", "no room"),
        ("", "no message"),
        ("CUDA error: invalid argument\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1", "CUDA error: invalid argument"),
        ("at 5:11:\n    x = tl.load(p)\n        ^\nValueError: wrong shape", "at 5:11: ... ValueError: wrong shape"),
        (
            "backend='inductor' raised:\nCppCompileError: exit 1\n\nCommand:\ng++ x",
            "backend='inductor' raised: ... CppCompileError: exit 1",
        ),
        (
            "compilation failed\nk.cu(3): error: no such name\n1 error detected",
            "compilation failed ... k.cu(3): error: no such name",
        ),
        (
            "incompatible arguments. These are supported:\n  1. (x: int)\nInvoked with: 2",
            "incompatible arguments. These are supported: ... 1. (x: int)",
        ),
        ("one\ntwo", "one"),
    ],
)
def test_the_line_that_says_the_cause_is_kept(message: str, want: str) -> None:
    assert short(RuntimeError(message)) == want


def test_a_long_first_line_leaves_room_for_the_cause() -> None:
    words = short(RuntimeError(f"{'x' * 300}\nValueError: wrong shape"))
    assert words.endswith("xx ... ValueError: wrong shape") and len(words) <= 160
    assert len(short(RuntimeError(f"x\nValueError: {'y' * 300}"))) == 160


def test_lines_that_a_process_wrote_have_no_codes_of_a_terminal() -> None:
    assert _last_lines("\x1b[31merror\x1b[0m: no\n\x1b[2K\n\x1b[1;33mwarning\x1b[m\n") == ("error: no", "warning")


def test_an_absent_tensor_has_the_dtype_that_the_domain_wants() -> None:
    inputs = Case.parse("lengths=1 key_dim=1 value_dim=1 dtype=bf16").inputs()
    for domain, want in [(Domain(), torch.float32), (Domain(state_dtypes=("input",)), torch.bfloat16)]:
        adapter = types.SimpleNamespace(layout={}, absent={"state": 0.0}, domain=domain)
        assert Call(adapter, inputs).tensors["state"].dtype is want  # type: ignore[arg-type]


def test_what_would_hold_begins_with_the_more_specific_words() -> None:
    described = types.SimpleNamespace(domain=Domain(), algorithm="recurrent")
    example = Example(Case.parse("lengths=2 qk_norm=yes"))
    words = [way.words for way in _ways(described, [Run("oracle", "zoo/Recurrent", example)])]  # type: ignore[arg-type]
    assert words[0].startswith("qk_norm_eps") and words[-2:] == ["stores = True", "algorithm = 'chunkwise'"]
