"""`repeat --upstream`: an issue for a library's authors, whose script shows the defect with torch and the library alone."""

import contextlib
import io
import json
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.tolerance.bound import truth
from tests.verbs.test_across import ADAPTER, RIGHT, WRONG, package, said
from verify.cli import upstream
from verify.cli.exits import BROKEN, HOLDS, USAGE
from verify.execution.line import Run
from verify.execution.references import REFERENCES
from verify.execution.reproduction import NoScript, _agrees, _drawn, _named, _written
from verify.process.outcome import FailureKind, Finding, Outcome, Verdict

GATE = "law=oracle adapter=kernel.py:Gate lengths=3 op=gdn_gate beta=no backward=no"
RULE = "law=oracle adapter=rule.py:Rule lengths=2+3 packed=yes heads=2 value_heads=4 key_dim=3 value_dim=2 state=random"
KERNEL = '''
def rule(q, k, v, decay, beta, scale, start=None, offsets=None, unit=False):
    """Heads come before tokens in q and k, and the last axis of a state is the key's."""
    if unit:
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[1], 1) for t in (q, k))
    ends = offsets.tolist() if offsets is not None else None
    spans = [(b, 0, v.shape[1]) for b in range(len(v))] if ends is None else [(0, *span) for span in zip(ends, ends[1:])]
    states = torch.zeros(len(spans), v.shape[2], v.shape[3], q.shape[-1]) if start is None else start
    rows, last = [], []
    for S, (b, low, high) in zip(states, spans):
        for t in range(low, high):
            S = decay[b, t].exp()[:, None, None] * S
            S = S + (beta[b, t, :, None] * (v[b, t] - (S * k[b, :, t, None]).sum(-1)))[..., None] * k[b, :, t, None]
            rows.append(scale * (S * q[b, :, t, None]).sum(-1))
        last.append(S)
    o = torch.stack(rows) if rows else v.new_zeros(0, *v.shape[2:])
    return {"o": o.view(v.shape), "states": torch.stack(last)}
'''
RULE_ADAPTER = """
from properties.rules.domain import Domain
from verify.adapters.base import Adapter

class Rule(Adapter):
    algorithm = "recurrent"
    domain = Domain(dtypes=("fp32",))

    def run(self, x):
        from orchard import rule

        scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
        start = None if x.state is None else x.state.mT
        q, k = x.q.transpose(1, 2), x.k.transpose(1, 2).contiguous()
        answer = rule(q, k, x.v, x.g, x.beta, scale, start, offsets=x.cu_seqlens, unit=x.qk_norm)
        return answer["o"], answer["states"].mT if x.output_final_state else None
"""
WRONG_FORWARD = KERNEL.replace("(v[b, t] - ", "(0.99 * v[b, t] - ")
# The state is cut from the graph, so that all outputs are right and gradients are not.
WRONG_BACKWARD = KERNEL.replace(
    "        last.append(S)", "            S = S.detach() + 0.9 * (S - S.detach())\n        last.append(S)"
)


@pytest.fixture(autouse=True)
def _here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The working directory has two adapters. Scripts run in this process, where a test does not ask for another one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pathlib.Path("kernel.py").write_text(ADAPTER)
    pathlib.Path("rule.py").write_text(RULE_ADAPTER)
    if "own_process" not in request.node.name:
        monkeypatch.setattr(upstream, "_printed", lambda script, folder: ran(f"```python\n{script}```", pathlib.Path(folder)))


def issue(capfd: pytest.CaptureFixture[str], line: str, folder: pathlib.Path) -> tuple[str, list[dict[str, Any]]]:
    """The text of the issue about a line that fails with a release, and the findings."""
    code, out, err = said(capfd, "repeat", line, "--path", str(folder), "--upstream", "issue.md", "--json")
    assert code == BROKEN, err
    return pathlib.Path("issue.md").read_text(), json.loads(out)["findings"]


def ran(text: str, folder: pathlib.Path) -> tuple[int, str]:
    """The exit status and the output of the script of an issue with a release."""
    (block,) = re.findall(r"(?ms)^```python$(.*?)^```$", text)
    assert not re.search(r"\b(verify|oracles|properties|gdn_verify)\b", block)
    pathlib.Path("repro.py").write_text(block)
    out, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "orchard", raising=False)
        try:
            runpy.run_path("repro.py", run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        except AssertionError as error:
            code = 1
            out.write(f"AssertionError: {error}")
        sys.modules.pop("orchard", None)
    return code, out.getvalue().strip()


def shows(out: str, port: str, findings: Sequence[dict[str, Any]]) -> None:
    """The numbers that a script has printed are those of the finding."""
    finding = next(finding for finding in findings if finding["port"] == port)
    got, want = (json.loads(numbers) for numbers in re.findall(r"(?:got|expected) (\[.*?\])", out))
    assert out.startswith(f"{port}[")
    assert got == [float(f"{number:.6g}") for number in finding["got"]]
    assert want == pytest.approx(finding["want"], rel=1e-5)
    assert got != pytest.approx(want, rel=1e-5)
    assert f"error {finding['error']:.4g}, of which rounding explains {finding['allowed']:.4g}" in out


def test_the_script_runs_in_an_own_process_that_has_the_library_alone(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    text, findings = issue(capfd, GATE, package(tmp_path / "new", WRONG))
    (told,) = re.findall(r"(?ms)^```text$\n(.*?)\n^```$", text)
    shows(told, "g", findings)
    (block,) = re.findall(r"(?ms)^```python$(.*?)^```$", text)
    where = str(package(tmp_path / "old", RIGHT))
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {where!r}); exec(sys.stdin.read())"]
    done = subprocess.run(command, input=block, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert upstream._printed("import nothing_of_this_name", None) == (
        1,
        "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    )


@pytest.mark.parametrize(
    ("line", "right", "wrong", "port"),
    [
        (RULE, KERNEL, WRONG_FORWARD, "o"),
        (f"{RULE} gate=10 qk_norm=yes", KERNEL, WRONG_BACKWARD, "dk"),
        (
            RULE.replace("law=oracle", "law=cut at=2").replace("lengths=2+3 packed=yes", "lengths=3"),
            KERNEL,
            WRONG_FORWARD,
            "o",
        ),
    ],
    ids=("rule", "gradient", "other law"),
)
def test_the_script_shows_the_numbers_of_the_finding(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, line: str, right: str, wrong: str, port: str
) -> None:
    old, new = package(tmp_path / "old", right), package(tmp_path / "new", wrong)
    text, findings = issue(capfd, line, new)
    code, out = ran(text, new)
    assert code == 1, out
    assert f"```text\n{out}\n```" in text
    assert "want = exact_" in text
    if "law=oracle" in line:
        shows(out, port, findings)
    code, out = ran(text, old)
    assert code == 0, out


def test_torch_draws_the_numbers_of_a_longer_case(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    old, new = package(tmp_path / "old", KERNEL), package(tmp_path / "new", WRONG_FORWARD)
    text, _ = issue(capfd, "law=oracle adapter=rule.py:Rule lengths=40 value_heads=2 gate=10", new)
    assert "torch.randn" in text
    assert "torch.tensor(" not in text
    assert (ran(text, new)[0], ran(text, old)[0]) == (1, 0)


def test_an_error_of_the_library_is_repeated(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    new = package(tmp_path / "new", RIGHT.replace("return", "assert len(A) > 1, 'one head'\n    return"))
    text, _ = issue(capfd, GATE, new)
    code, out = ran(text, new)
    assert code == 1
    assert "AssertionError: one head" in out
    assert "| effect | an error |" in text
    assert ran(text, package(tmp_path / "old", RIGHT))[0] == 0


@pytest.mark.parametrize("what", ["__import__('os')._exit(3)", "__import__('time').sleep(60)"])
def test_what_crashes_or_hangs_has_no_script_and_no_line(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path, what: str
) -> None:
    new = package(tmp_path / "new", WRONG.replace("return", f"{what}\n    return"))
    assert said(capfd, "repeat", GATE, "--path", str(new), "--upstream", "issue.md", "--deadline", "5")[0] == BROKEN
    text = pathlib.Path("issue.md").read_text()
    assert "There is no script, because such a call may harm who runs it." in text
    assert "```" not in text
    assert "adapter=" not in text
    assert "torch.tensor" not in text


def test_what_is_about_a_process_or_memory_is_harmful() -> None:
    def harmful(*findings: Finding, **more: Any) -> bool:
        return upstream.is_harmful(Outcome(Verdict.BROKEN, [*findings], **more))

    off = Finding("o", FailureKind.OFF, "is off")
    assert {kind for kind in FailureKind if harmful(off, Finding("o", kind, "fails"))} == {*upstream.HARMFUL}
    assert harmful(off, spent=True)
    assert harmful(off, Finding("memory around input q", FailureKind.INPUT_CHANGED, "was changed", port="memory"))
    assert harmful(Finding("call", FailureKind.RAISED, "raised OutOfBounds", detail="OutOfBounds"))


def test_what_is_no_call_of_a_library_has_a_reason_in_place_of_a_script(
    capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    pathlib.Path("kernel.py").write_text(ADAPTER.replace("from orchard import gate", "") + "\nimport torch\n" + WRONG)
    text, _ = issue(capfd, GATE, tmp_path)
    assert "the function under test is in the adapter's own file, and of no library" in text
    pathlib.Path("kernel.py").write_text(ADAPTER.replace("x.A_log,", "2 * x.A_log,"))
    text, _ = issue(capfd, GATE, package(tmp_path / "new", WRONG))
    assert "a tensor of shape (1,) is none of the operation's" in text
    assert "```" not in text


def test_a_line_that_holds_gives_no_issue(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    old = package(tmp_path / "old", RIGHT)
    code, _, err = said(capfd, "repeat", GATE, "--path", str(old), "--upstream", "issue.md")
    assert (code, pathlib.Path("issue.md").exists()) == (HOLDS, False)
    assert "issue.md is not written, because the line is not broken" in err
    for more in (("--upstream", "nowhere/issue.md"), ("--upstream", "issue.md", "--ranks", "2")):
        code, out, err = said(capfd, "repeat", GATE, "--path", str(old), *more)
        assert (code, out, err.count("\n")) == (USAGE, "", 1), more


# The parts of a script

FORMS = (
    "lengths=5 heads=2 value_heads=4 gate=10 state=random",
    "lengths=3+0+4 packed=yes gate=10 scale=half qk_norm=yes",
    "lengths=3+3 qk_norm=yes qk_norm_form=max qk_norm_eps=1e-12 gate=mixed decay=linear",
    "lengths=4 in_kernel=both gate=10 value_heads=2",
    "lengths=4 in_kernel=both dt_bias=no gate=10 beta=two",
    "lengths=4 left_out=both beta=one",
    "lengths=4 op=delta_rule in_kernel=beta",
    "lengths=4 op=kda gate=10 heads=2 value_heads=2",
    "lengths=4 op=kda gate=10 in_kernel=gate lower_bound=-5 key_dim=3",
    "lengths=4 op=gdn_gate",
    "lengths=4 op=kda_gate",
    "lengths=4 op=l2norm",
)


@pytest.mark.parametrize("words", FORMS)
def test_the_references_of_scripts_are_the_oracle(words: str) -> None:
    case = Run.parse(f"law=oracle adapter=fla/chunk {words} seed=3").example.case
    inputs = case.inputs()
    spec = case.spec_of(inputs)
    want, reference = truth(spec, inputs), REFERENCES[spec.name.partition(" ")[0]][-1]
    assert _agrees(reference, inputs, want)
    assert not _agrees(reference, inputs, {name: x + 1e-6 for name, x in want.items()})


def test_an_option_that_a_reference_does_not_know_is_noticed() -> None:
    case = Run.parse("law=oracle adapter=fla/chunk lengths=4 channel_decays=keys seed=3").example.case
    inputs = case.inputs()
    assert not _agrees(REFERENCES["gated_delta_rule"][-1], inputs, truth(case.spec_of(inputs), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_a_tensor_is_written_with_all_its_bits(dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)) * 100
    x = values.to(dtype)
    if x.is_floating_point():
        x[0, 0], x[0, 1], x[0, 2] = float("-inf"), float("nan"), 1e-7
    again: Tensor = eval(_written(x), {"torch": torch, "inf": float("inf"), "nan": float("nan")})
    assert (again.dtype, again.shape) == (x.dtype, x.shape)
    assert torch.equal(again.double().nan_to_num(nan=7), x.double().nan_to_num(nan=7))


def test_numbers_are_drawn_like_those_of_the_case() -> None:
    def again(x: Tensor) -> Tensor:
        drawn: Tensor = eval(_drawn(x), {"torch": torch})
        assert (drawn.dtype, drawn.shape) == (x.dtype, x.shape)
        return drawn

    assert bool((again(-torch.rand(50)) <= 0).all())
    assert bool(((again(torch.rand(50)) > 0) & (again(torch.rand(50)) < 1)).all())
    assert 20 < float(again((30 * torch.randn(1000)).bfloat16()).float().std()) < 40
    assert torch.equal(again(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_a_tensor_is_named_by_its_numbers_and_its_axes() -> None:
    x, y = torch.arange(24.0).view(1, 2, 3, 4), torch.ones(24)
    named: Sequence[tuple[str, Tensor]] = (("y", y), ("x", x))
    forms = {
        "x": x,
        "x.mT": x.mT,
        "x.mT.contiguous()": x.mT.contiguous(),
        "x.transpose(1, 2)": x.transpose(1, 2),
        "x.squeeze(0)": x[0],
    }
    assert {form: _named(value, named) for form, value in forms.items()} == {form: form for form in forms}
    assert "torch.tensor([3, 4]" in _named(torch.tensor([3, 4]), named)
    with pytest.raises(NoScript, match="is none of the operation's"):
        _named((2 * x).requires_grad_() * 1, named)
