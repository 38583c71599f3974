"""FlashInfer: its torch references hold under laws, and the adapters of its kernels pass the right arguments.

The kernels need a GPU and a compiler package, so a module of plain functions stands in for them here. It has the names and the
parameters of FlashInfer's functions, and checks what those check.
"""

import pathlib
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.operation import Inputs
from oracles.tolerance import bound
from properties.pools.case import PoolCase
from properties.rules.case import Case
from tests import right
from tests.faults import not_refused
from tests.judging import worst
from verify.adapters import flashinfer_kernels as kernels
from verify.adapters import flashinfer_references as references
from verify.adapters import loader
from verify.adapters.base import Adapter
from verify.adapters.registry import AdapterError
from verify.cli.exits import HOLDS
from verify.cli.main import main
from verify.zoo.base import Chunkwise

SLOW_FIXTURES = ("flashinfer_files",)
WIDE = "key_dim=128 value_dim=128 dtype=bf16"
PREFILL = f"lengths=5+3 packed=yes value_heads=2 {WIDE} state=random qk_norm=yes gate=10 decay=linear backward=no"
DECODE = f"op=decode lengths=1+1+1 value_heads=2 {WIDE} state=random qk_norm=yes gate=10 in_kernel=both spare=2 padded=some"
MTP = DECODE.replace("lengths=1+1+1", "lengths=3+3+3")


def contiguous(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    *,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
) -> Any:
    """[T, H, D]; g is alpha. A final state needs a tensor of states, K last, to be written into."""
    contiguous(q, k, v, g, beta)
    assert g.dtype == beta.dtype == torch.float32
    assert cu_seqlens is not None
    assert output is None
    assert output_final_state == (output_state is not None)
    x = Inputs(
        **{name: tensor.unsqueeze(0) for name, tensor in (("q", q), ("k", k), ("v", v), ("alpha", g), ("beta", beta))},
        state=None if initial_state is None else initial_state.mT,
        cu_seqlens=cu_seqlens,
        scale=scale,
        qk_norm=use_qk_l2norm_in_kernel,
        output_final_state=output_final_state,
    )
    o, final = right.AlphaRecurrent().run(x)
    if output_state is None:
        return o[0]
    assert final is not None
    contiguous(output_state)
    output_state.copy_(final.mT)
    return o[0], output_state


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    *,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """A pool of states, K last, and gates before their activations; a negative index is padding."""
    assert q.dtype == a.dtype == b.dtype == torch.bfloat16
    assert initial_state.dtype == A_log.dtype == dt_bias.dtype == torch.float32
    assert initial_state.is_contiguous()
    assert initial_state.shape[-2:] == (v.shape[-1], q.shape[-1])
    assert output is None
    assert ssm_state_indices is None
    assert disable_state_update is not None, "its default will change"
    q, k = (Chunkwise().normalise(x.float()) if use_qk_l2norm else x.float() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    alpha = (-A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)).exp()
    beta, o = b.float().sigmoid(), torch.zeros_like(v)
    for row, slot in enumerate(initial_state_indices.tolist()):
        if slot < 0:
            continue
        state = initial_state[slot].clone()
        for t in range(v.shape[1]):
            state = alpha[row, t, :, None, None] * state
            fresh = beta[row, t].unsqueeze(-1) * (v[row, t].float() - (state * k[row, t].unsqueeze(-2)).sum(-1))
            state = state + fresh.unsqueeze(-1) * k[row, t].unsqueeze(-2)
            scaled = (q.shape[-1] ** -0.5 if scale is None else scale) * q[row, t]
            o[row, t] = (state * scaled.unsqueeze(-2)).sum(-1).to(o.dtype)
            if intermediate_states_buffer is not None:
                intermediate_states_buffer[row, t] = state
        if not disable_state_update:
            initial_state[slot] = state
    return o, initial_state


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    *,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token for each row of a batch."""
    assert q.shape[1] == k.shape[1] == v.shape[1] == a.shape[1] == b.shape[1] == 1
    assert state is None
    assert initial_state is not None
    assert initial_state_indices is not None
    assert len(q) == len(initial_state_indices)
    gates = A_log, a, dt_bias, b
    how: dict[str, Any] = {"scale": scale, "output": output, "disable_state_update": False, "use_qk_l2norm": use_qk_l2norm}
    return gated_delta_rule_mtp(q, k, v, initial_state, initial_state_indices, *gates, **how)


STAND_IN = types.SimpleNamespace(
    chunk_gated_delta_rule=chunk_gated_delta_rule,
    gated_delta_rule_mtp=gated_delta_rule_mtp,
    gated_delta_rule_decode_pretranspose=gated_delta_rule_decode_pretranspose,
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    module = types.SimpleNamespace(**vars(STAND_IN))
    monkeypatch.setattr(kernels, "imported", lambda place: module)
    return module


def error(adapter: Adapter, line: str, **changes: Any) -> float:
    """The worst error over its tolerance of the outputs that mean something: those of real requests."""
    case: Any = (PoolCase if "op=decode" in line else Case).parse(line)
    assert adapter.domain.outside(case) is None
    x = case.inputs().replaced(**changes)
    limits = bound.bounds(case.spec, x, None, adapter.algorithm, chunk=adapter.chunk)
    if "pool" in x:
        x = x.replaced(pool=x.pool.mT.contiguous().mT)
    results = dict(zip(limits, adapter.run(x), strict=True))
    for name, result in results.items():
        assert result.shape == limits[name].value.shape
        assert result.dtype == (torch.bfloat16 if name == "o" else torch.float32)
    if "pool" in x:
        assert (results["pool"].data_ptr(), results["pool"].stride()) == (x.pool.data_ptr(), x.pool.stride())
        real = torch.tensor(case.real).repeat_interleave(torch.tensor(case.lengths)).reshape(x.v.shape[:2])
        results["o"] = results["o"].where(real[..., None, None], 0.0)
    return worst(case.spec, limits, results)[0]


def test_adapters_pass_what_the_kernels_take(stand_in: types.SimpleNamespace) -> None:
    for kind, line in [
        (kernels.Prefill, PREFILL),
        (kernels.Prefill, PREFILL.replace("state=random", "state=none") + " scale=half"),
        (kernels.Decode, DECODE),
        (kernels.Decode, DECODE + " packed=yes scale=half"),
        (kernels.Mtp, DECODE),
        (kernels.Mtp, MTP),
        (kernels.Mtp, MTP + " accepted=some seed=3"),
        (kernels.Mtp, DECODE + " accepted=any seed=3"),
    ]:
        assert error(kind(), line) < 1, kind


def test_a_prefill_without_a_final_state_returns_the_output_alone(stand_in: types.SimpleNamespace) -> None:
    x = Case.parse(PREFILL).inputs()
    o, final = kernels.Prefill().run(x.replaced(output_final_state=False))
    assert final is None
    assert torch.equal(o, kernels.Prefill().run(x)[0])


def test_a_draft_of_one_token_that_is_rejected_leaves_the_state(stand_in: types.SimpleNamespace) -> None:
    class Decodes(kernels.Mtp):
        def decoded(self, x: Inputs) -> tuple[Tensor, Tensor]:
            return super().decoded(x.replaced(accepted=None))

    assert error(Decodes(), DECODE + " accepted=any seed=3") > 1


@pytest.mark.parametrize("wrong", ["norm", "layout", "alpha", "late"])
def test_a_wrong_argument_shows(wrong: str, stand_in: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that forgets the norm, transposes states, passes a logarithm, or commits one token late is over its tolerance."""
    original = dict(vars(stand_in))
    if wrong in ("norm", "layout"):

        def decode(*args: Any, **named: Any) -> Any:
            if wrong == "norm":
                return original["gated_delta_rule_decode_pretranspose"](*args, **{**named, "use_qk_l2norm": False})
            pool = named["initial_state"]
            o, turned = original["gated_delta_rule_decode_pretranspose"](*args, **{**named, "initial_state": pool.mT.contiguous()})
            return o, pool.copy_(turned.mT)

        stand_in.gated_delta_rule_decode_pretranspose = decode
        assert error(kernels.Decode(), DECODE) > 1
    elif wrong == "alpha":
        stand_in.chunk_gated_delta_rule = lambda *args, g, **named: original["chunk_gated_delta_rule"](*args, g=g.exp(), **named)
        assert error(kernels.Prefill(), PREFILL) > 1
    else:
        late = references.committed
        monkeypatch.setattr(kernels, "committed", lambda pool, buffer, x: late(pool, buffer.roll(1, 1), x))
        assert error(kernels.Mtp(), MTP + " accepted=some seed=3") > 1


def test_without_a_gpu_the_kernels_say_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    need = r"FlashInfer's kernels need a GPU and the library with its requirements \(pip install flashinfer-python\)"
    patterns = (
        (name, rf"^adapter flashinfer/{name}: \w+\(\) failed: RuntimeError: {need}: torch sees no GPU$")
        for name in ["prefill", "decode", "mtp"]
    )
    assert not_refused(lambda name: loader.load(f"flashinfer/{name}"), patterns, AdapterError) == []


def test_without_the_whole_library_the_kernels_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        RuntimeError, match=r"^FlashInfer's kernels need a GPU .*: importing not_there\.gdn failed: No module named"
    ):
        kernels.imported("not_there.gdn")


def test_references_hold(
    flashinfer_files: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ["prefill_reference", "decode_reference", "mtp_reference"]:
        words = ["check", f"flashinfer/{name}", "--path", str(flashinfer_files), "--profile", "least", "--workers", "1"]
        code = main(words)
        assert code == HOLDS, capsys.readouterr().err


def test_the_references_lose_what_the_findings_say(flashinfer_files: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/FINDINGS.md: the state of an empty sequence, arguments of the traced functions, and the norm."""
    monkeypatch.syspath_prepend(str(flashinfer_files))
    names = references.serving.names({references.TEMPLATES: ("_gdn_prefill_reference", "_gdn_prefill_init", "_gdn_decode_init")})
    x = Case.parse("lengths=0+2 packed=yes key_dim=4 value_dim=4 dtype=bf16 state=random in_kernel=both backward=no").inputs()
    _, final = names._gdn_prefill_reference(
        x.q[0], x.k[0], x.v[0], x.state.mT, x.A_log, x.a[0], x.dt_bias, x.b[0], x.cu_seqlens, None
    )
    assert bool((final[0] == 0).all())
    assert bool((x.state[0] != 0).any())
    with pytest.raises(TypeError, match="unexpected keyword argument 'g'"):
        names._gdn_prefill_reference(**names._gdn_prefill_init(total_seq_len=2, num_seqs=1, device="cpu"))
    assert "use_qk_l2norm" not in names._gdn_decode_init(batch_size=1, device="cpu")
