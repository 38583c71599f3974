"""What a program gets and returns, verdicts through a process, and the kernels that `new-process` writes."""

import dataclasses
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from properties.books import book_of
from properties.calls.domain import CallDomain
from properties.layers.domain import LayerDomain
from properties.modules.domain import ModuleDomain
from properties.pools.domain import PoolDomain
from properties.rules.domain import Domain
from tests.dressed import SERVER, dressed
from verify.adapters.contract import contract_of, wanted
from verify.adapters.foreign import Call
from verify.adapters.interface import Unsupported
from verify.adapters.loader import load
from verify.adapters.process_adapter import ProcessAdapter
from verify.cli.arguments import LANGUAGES
from verify.cli.main import main
from verify.cli.new_process_command import OF_LANGUAGES
from verify.engine.drawing import of_law
from verify.execution import judging
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import Outcome, Verdict

DOMAINS = (
    Domain(final_dtype="state", state_dtypes=("fp32", "input", "bf16"), in_kernel=("none", "gate", "beta", "both")),
    Domain(final_dtype="input", state_dtypes=("input",), decays=("log", "linear"), final_states="last", initial_states="first"),
    Domain(channel_decays=("none", "keys", "values", "both"), strongest_decay="10", left_out=("none", "beta", "gate", "both")),
    Domain(operation="kda", in_kernel=("none", "both")),
    Domain(operation="delta_rule", final_states="none"),
    ModuleDomain(residuals=("none", "added")),
    ModuleDomain(state_columns="W-1"),
    ModuleDomain("gdn_gate"),
    ModuleDomain("kda_gate", beta=False),
    ModuleDomain("gated_rms_norm", residuals=("none", "added", "returned")),
    ModuleDomain("norm_gate_linear"),
    PoolDomain(rule=Domain(operation="kda", backward=False), state_dtypes=("fp32", "bf16")),
    LayerDomain(),
    LayerDomain("kda_layer"),
    CallDomain(inputs={"x": "B T H K", "w": "K V fp32", "cu_seqlens": "offsets"}, outputs={"y": "B T H V", "s": "N K fp32"}),
)


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: f"{domain.operation}-{DOMAINS.index(domain)}")
def test_the_outputs_of_a_call_follow_from_the_call_and_the_domain(domain: Any) -> None:
    laws, examples = book_of(domain).laws, list[Any]()
    of_law(laws["oracle" if "oracle" in laws else "future"], domain, 0, 25, examples.append)
    for case in {str(example.case): example.case for example in examples}.values():
        x = case.inputs()
        operation, spec = contract_of(domain, x), case.spec_of(x)
        Call(type("Any", (Recorded,), {"domain": domain})(), x).check_legal()
        assert {port.name for port in spec.inputs} <= {port.name for port in operation.inputs}
        assert [(port.name, port.axes) for port in operation.outputs] == [(port.name, port.axes) for port in spec.outputs]
        found = wanted(operation, x, domain)
        for name, output in wanted(spec, x, domain).items():
            assert (found[name].shape, found[name].missing) == (output.shape, output.missing)
            assert spec.port(name).dtype == "any" or found[name].dtype == output.dtype
        assert found.keys() <= {port.name for port in spec.outputs}


class Recorded(ProcessAdapter):
    """An adapter without a program. It keeps the line and the tensors of the last question, and fills its answers with ones."""

    command = ("true",)
    domain = Domain()
    line = ""
    sent: Sequence[Tensor] = ()

    def _exchange(self, line: str, sent: Sequence[Tensor], answer: Sequence[Tensor]) -> None:
        self.line, self.sent = line, sent
        for place in answer:
            assert place.is_contiguous()
            place.fill_(1.0)


def call(**more: Any) -> Inputs:
    tokens = {"q": torch.rand(1, 3, 1, 2), "k": torch.rand(1, 3, 1, 2), "v": torch.rand(1, 3, 2, 4).bfloat16()}
    gates = {"g": -torch.rand(1, 3, 2), "beta": torch.rand(1, 3, 2), "state": None, "cu_seqlens": None}
    return Inputs(**{**tokens, **gates, "scale": None, "qk_norm": True, "output_final_state": True, **more})


def test_the_line_of_a_question_has_what_the_call_has_and_nothing_else() -> None:
    adapter = Recorded()
    o, final = adapter.run(call(q=torch.rand(1, 3, 1, 2).bfloat16(), options={"layout": "vk"}))
    assert adapter.line == (
        "call q bf16 4 1 3 1 2 k fp32 4 1 3 1 2 v bf16 4 1 3 2 4 g fp32 3 1 3 2 beta fp32 3 1 3 2 ; "
        "o bf16 4 1 3 2 4 final_state fp32 4 1 2 2 4 ; qk_norm=1 output_final_state=1 layout=vk"
    )
    assert (o.dtype, final.shape) == (torch.bfloat16, (1, 2, 2, 4))
    assert adapter.run(call(output_final_state=False, scale=0.5, cu_seqlens=torch.tensor([0, 3])))[1] is None
    assert adapter.line.endswith("cu_seqlens int64 1 2 ; o fp32 4 1 3 2 4 ; scale=0.5 qk_norm=1 output_final_state=0")


def test_names_layouts_and_absent_tensors_are_the_adapters_work() -> None:
    adapter = Recorded()
    kind: Any = type(adapter)
    kind.inputs, kind.absent = ("state", "v", "q", "k", "beta", "g"), {"state": 0.5}
    kind.layout = {"state": "V K", "q": "B H T K", "o": "HV T"}
    try:
        x = call()
        o, _ = adapter.run(x)
        assert adapter.line.startswith("call state fp32 4 1 2 4 2 v bf16 4 1 3 2 4 q fp32 4 1 1 3 2 k fp32 4 1 3 1 2 beta")
        assert " ; o fp32 4 1 4 2 3 final_state fp32 4 1 2 2 4 ; " in adapter.line
        assert (o.shape, o.stride()) == ((1, 3, 2, 4), (24, 1, 3, 6))
        assert torch.equal(adapter.sent[0], torch.full((1, 2, 4, 2), 0.5))
        assert torch.equal(adapter.sent[2], x.q.transpose(1, 2))
        with pytest.raises(ValueError, match="the call has cu_seqlens, which `inputs` does not name"):
            adapter.run(call(cu_seqlens=torch.tensor([0, 3])))
        kind.layout = {"q": "K V"}
        with pytest.raises(ValueError, match="layout of q must name some of the axes B T H K, each once, got 'K V'"):
            adapter.run(call())
        kind.absent = {"states": 0.0}
        with pytest.raises(ValueError, match="absent must name tensors of gated_delta_rule whose sizes the call has, got states"):
            adapter.run(call())
    finally:
        kind.inputs, kind.absent, kind.layout = None, {}, {}


def test_a_backward_asks_for_the_gradients_that_are_needed() -> None:
    adapter, x = Recorded(), call(state=torch.rand(1, 2, 2, 4), v=torch.rand(1, 3, 2, 4))
    x.q.requires_grad_()
    x.state.requires_grad_()
    _, final = adapter.run(x)
    gradients = torch.autograd.grad([final], [x.q, x.state], [2 * torch.ones_like(final)])
    first, asked, _ = adapter.line.split(" ; ")
    assert first.startswith("vjp q fp32 4 1 3 1 2 k ") and first.endswith(" do fp32 4 1 3 2 4 dfinal_state fp32 4 1 2 2 4")
    assert asked == "dq fp32 4 1 3 1 2 dh0 fp32 4 1 2 2 4"
    assert adapter.sent[-2].eq(0).all() and adapter.sent[-1].eq(2).all()
    assert [gradient.shape for gradient in gradients] == [x.q.shape, x.state.shape]


def test_a_pool_is_updated_in_place() -> None:
    adapter, pool = Recorded(), torch.zeros(2, 1, 2, 2)
    vars(adapter)["domain"] = PoolDomain()
    tokens = {"q": torch.rand(1, 1, 1, 2), "k": torch.rand(1, 1, 1, 2), "v": torch.rand(1, 1, 1, 2)}
    gates = {"g": -torch.rand(1, 1, 1), "beta": torch.rand(1, 1, 1)}
    _, after = adapter.run(Inputs(**tokens, **gates, pool=pool, slots=torch.tensor([1]), padding=-1, cu_seqlens=None))
    assert after is pool and pool.eq(1).all()


# Verdicts through a process

LINES = (
    "law=oracle adapter=zoo/Chunkwise lengths=5+0+70 packed=yes value_heads=2 key_dim=8 dtype=bf16 state=random qk_norm=yes",
    "law=cut at=2 adapter=zoo/Chunkwise lengths=5+5 key_dim=3 value_dim=4 gate=mixed state=zero scale=half seed=3",
    "law=recall adapter=zoo/Chunkwise lengths=3 key_dim=4 value_dim=4 beta=one values=one_hot gate=forever",
    "law=oracle adapter=zoo/NeverErases op=delta_rule lengths=9 key_dim=4 value_dim=4 beta=one seed=5",
    "law=oracle adapter=zoo/Serving lengths=1+2 packed=yes op=decode key_dim=4 value_dim=4 dtype=fp16 spare=2",
)


@pytest.fixture(scope="module", autouse=True)
def _the_server_is_ended() -> Iterator[None]:
    yield
    SERVER.close()


def through_a_process(line: str) -> tuple[Outcome, Outcome]:
    """The outcomes of a line in this process, and of the same adapter in a program."""
    run = Run.parse(line)
    other = f"{run.adapter} in a program"
    judging._LOADED[other] = dressed(run.adapter)()
    try:
        return execute(run), execute(dataclasses.replace(run, adapter=other))
    finally:
        del judging._LOADED[other]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.slow_after_first
def test_a_verdict_through_a_process_is_that_of_the_same_code(line: str) -> None:
    here, there = through_a_process(line)
    assert (there.verdict, there.ratios, there.rows) == (here.verdict, here.ratios, here.rows)
    assert there.findings == here.findings
    assert here.verdict is (Verdict.BROKEN if "NeverErases" in line else Verdict.HOLDS)


# The kernels that new-process writes

COMPILERS = {"cpp": "g++", "rust": "rustc", "js": "node", "py": "python3"}
HOLDING = (
    "law=oracle adapter={} lengths=5+0+20 packed=yes heads=2 value_heads=4 key_dim=8 value_dim=4 dtype=bf16 gate_dtype=input "
    "state=random qk_norm=yes backward=no",
    "law=cut at=2 adapter={} lengths=5+5 key_dim=3 value_dim=5 gate=mixed state=zero scale=half backward=no",
    "law=future at=2 adapter={} lengths=4 key_dim=3 value_dim=5 backward=no",
)


def test_every_language_has_a_template() -> None:
    assert {*OF_LANGUAGES} == {*LANGUAGES} == {*COMPILERS}


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_written_kernel_holds_as_it_is(language: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(COMPILERS[language]) is None:
        pytest.skip(f"needs {COMPILERS[language]}, which is not on the PATH")
    monkeypatch.chdir(tmp_path)
    assert main(["new-process", language]) == 0
    if compiled := OF_LANGUAGES[language].compile:
        warnings = ["-Wall", "-Wextra", "-Werror"] if language == "cpp" else ["-D", "warnings"]
        words = [word for word in compiled.split() if not word.startswith("-O")]  # a compiler is quicker if it does not optimise
        subprocess.run([*words, *warnings], check=True, capture_output=True)
    adapter = load("my_kernel.py:MyKernel")
    judging._LOADED["my_kernel.py:MyKernel"] = adapter
    try:
        outcomes = [execute(Run.parse(line.format("my_kernel.py:MyKernel"))) for line in HOLDING]
        assert [outcome.verdict for outcome in outcomes] == [Verdict.HOLDS] * len(HOLDING), outcomes
        assert isinstance(adapter, ProcessAdapter)
        x = call(q=torch.rand(1, 3, 1, 2, requires_grad=True), v=torch.rand(1, 3, 2, 4))
        o, _ = adapter.run(x)
        with pytest.raises(Unsupported, match="this kernel has no backward"):
            o.sum().backward()
    finally:
        judging._LOADED.pop("my_kernel.py:MyKernel").close()


def test_no_file_is_replaced(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert main(["new-process", "py", "--to", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"check    gdn-verify check {folder / 'my_kernel.py'}:MyKernel"
    (folder / "kernel.py").unlink()
    assert main(["new-process", "py", "--to", str(folder)]) == 2
    assert f"{folder / 'my_kernel.py'} exists, and new-process replaces no file" in capsys.readouterr().err
    assert not (folder / "kernel.py").exists()
    (tmp_path / "file").write_text("")
    assert main(["new-process", "py", "--to", str(tmp_path / "file")]) == 2
