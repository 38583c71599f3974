"""Adapters find out what the installed release of a library takes. What it lacks is not tested, and is no defect."""

import pathlib
import re
import sys
import types

import pytest
import torch

from oracles.operation import Inputs
from properties.rules.domain import Domain
from tests.needs import need
from verify.adapters import fla, transformers
from verify.adapters.interface import Signature, Unavailable, signature
from verify.execution.execute import execute
from verify.execution.line import Run
from verify.process.outcome import FailureKind, Verdict

RULE = '''
def rule(q, /, k, *, beta, cu_seqlens=None, **kwargs):
    """v is [B, T, HV, V]."""
    size = kwargs.pop("chunk_size", 64)
    if kwargs.get("use_gate_in_kernel"):
        size = other.get("nothing")
    return size
'''


@pytest.fixture
def orchard(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that raises if it is imported."""
    (tmp_path / "orchard" / "ops").mkdir(parents=True)
    for place in ("__init__.py", "ops/__init__.py"):
        (tmp_path / "orchard" / place).write_text("raise AssertionError\n")
    (tmp_path / "orchard" / "ops" / "chunk.py").write_text("raise AssertionError\n" + RULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    signature.cache_clear()
    return "orchard.ops.chunk:rule"


def test_parameters_are_read_without_an_import(orchard: str) -> None:
    found = signature(orchard)
    assert found is not None
    assert found.parameters == {"q", "k", "beta", "cu_seqlens", "chunk_size", "use_gate_in_kernel"}
    assert found.doc == "v is [B, T, HV, V]."
    assert found.calls == {"pop", "get"}


@pytest.mark.usefixtures("orchard")
def test_what_is_not_there_has_no_signature() -> None:
    for place in ["orchard.ops.chunk:other", "orchard.ops.sum:rule", "orchard:rule", "no_such_package.ops:rule"]:
        assert signature(place) is None, place


def test_a_domain_has_only_what_the_release_takes(orchard: str) -> None:
    every = Domain(in_kernel=("none", "gate", "beta", "both"))
    assert fla.narrowed(every, orchard) == Domain(in_kernel=("none", "gate"))
    assert fla.narrowed(every, "orchard.ops.sum:rule") == every
    assert fla._parameter(orchard, "state_v_first", "chunk_size") == "chunk_size"
    with pytest.raises(Unavailable, match=r"orchard\.ops\.chunk\.rule of fla-core \S+ has no parameter state_v_first"):
        fla._parameter(orchard, "state_v_first", "transpose_state_layout")


def test_a_release_without_safe_gate_is_not_called_with_it(orchard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla.ChunkKdaSafe, "place", orchard)
    with pytest.raises(Unavailable, match=r"has no parameter safe_gate"):
        fla.ChunkKdaSafe().run(Inputs(options={}))


def test_a_release_without_grouped_heads_gets_none(orchard: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "orchard" / "ops" / "chunk.py"
    file.write_text(file.read_text().replace("HV", "H"))
    assert not fla.narrowed(Domain(), orchard).grouped_heads


def test_the_installed_release_takes_everything() -> None:
    need("fla")
    signature.cache_clear()
    for kind in (fla.Chunk, fla.ChunkVFirst, fla.FusedRecurrent, fla.ChunkKda, fla.FusedRecurrentKda):
        assert signature(kind.place) is not None
        assert kind().domain == kind.domain


def test_older_rules_of_transformers_get_no_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    for calls, grouped in (("repeat_interleave", True), ("split", False)):
        monkeypatch.setattr(transformers, "signature", lambda _, calls=calls: Signature(frozenset(), "", frozenset({calls})))
        assert transformers.Chunk().domain.grouped_heads is grouped
        assert transformers.Recurrent().domain.grouped_heads is grouped


FIRST = "    q = l2norm(q)\n    q = q.to(torch.float32)\n"
LATER = "    q = q.to(torch.float32)\n    q = l2norm(q)\n"


@pytest.mark.parametrize(("body", "stores"), [(FIRST, True), (LATER, False), ("    return q\n", False)])
def test_a_norm_before_float32_is_in_the_dtype_of_the_inputs(
    body: str, *, stores: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grove").mkdir()
    other = "def other(q):\n    q = l2norm(q)\n    return q.to(torch.float32)\n"
    (tmp_path / "grove" / "model.py").write_text(f"import torch\n\ndef rule(q):\n{body}\n{other}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert transformers.normalises_first("grove.model", "rule") is stores
    assert not transformers.normalises_first("grove.model", "no_such_rule")
    assert not transformers.normalises_first("grove.no_such_model", "rule")


NORM = "law=oracle adapter=fla/l2norm lengths=3 op=l2norm width=8 backward=no"


def with_norm(monkeypatch: pytest.MonkeyPatch, **names: object) -> None:
    """Let FLA be a package whose module of norms has these names alone."""
    for place in ("fla", "fla.modules", "fla.modules.l2norm"):
        monkeypatch.setitem(sys.modules, place, types.ModuleType(place))
    vars(sys.modules["fla.modules.l2norm"]).update(names)


def without_eps(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def wrong_inside(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x.no_such_method(eps)  # type: ignore[no-any-return, attr-defined]


def test_a_name_that_a_release_lacks_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    need("fla")
    with_norm(monkeypatch)
    outcome = execute(Run.parse(NORM))
    assert outcome.verdict is Verdict.UNSUPPORTED
    assert re.fullmatch(
        r"this release cannot be asked: cannot import name 'l2norm' .*\(fla_modules\.py:\d+ in run\)", outcome.reason
    )
    monkeypatch.delitem(sys.modules, "fla.modules.l2norm")
    monkeypatch.delattr(sys.modules["fla.modules"], "l2norm", raising=False)
    outcome = execute(Run.parse(NORM))
    assert (outcome.verdict, "No module named 'fla.modules.l2norm'" in outcome.reason) == (Verdict.UNSUPPORTED, True)


def test_a_requirement_of_a_release_that_is_not_there_decides_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("fla")
    (tmp_path / "needy.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fla.Chunk, "place", "needy:rule")  # `run` imports it by its name
    outcome = execute(Run.parse("law=oracle adapter=fla/chunk lengths=3 backward=no"))
    assert (outcome.verdict, "No module named 'not_installed_at_all'" in outcome.reason) == (Verdict.UNKNOWN, True)


def test_what_an_adapter_says_is_lacking_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    need("fla")
    monkeypatch.setattr(fla.Chunk16, "chunk", 16)
    monkeypatch.setattr(fla, "signature", lambda _: Signature(frozenset(), ""))
    outcome = execute(Run.parse("law=oracle adapter=fla/chunk_16 lengths=3 backward=no"))
    assert (outcome.verdict, outcome.reason.endswith("has no parameter chunk_size")) == (Verdict.UNSUPPORTED, True)


@pytest.mark.parametrize(
    ("recurrent", "kda", "strays"),
    [
        ("tl.load(p_gk, mask=mask_k)", "tl.load(p_g, mask=mask_k, eviction_policy='evict_last')", False),
        ("tl.load(p_gk)", "tl.load(p_g, mask=mask_k, eviction_policy='evict_last')", False),
        ("tl.load(p_gk, mask=mask_k)", "tl.load(p_g, eviction_policy='evict_last')", True),
        ("tl.load(p_gk)", "from fla.ops.gated_delta_rule.fused_recurrent import rule", True),
        ("tl.load(p_gk, mask=mask_k)", "from fla.ops.gated_delta_rule.fused_recurrent import rule", False),
    ],
)
def test_kernels_that_read_beyond_the_gates_get_widths_that_fill_their_blocks(
    recurrent: str, kda: str, *, strays: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, load in (("gated_delta_rule", recurrent), ("kda", kda)):
        folder = tmp_path / "fla" / "ops" / name
        folder.mkdir(parents=True)
        (folder / "fused_recurrent.py").write_text(f"{load}\ndef fused_recurrent_kda(q, gk, gv): ...\n")
    (tmp_path / "fla" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    signature.cache_clear()
    assert fla.reads_beyond_gates() is strays
    narrow = fla.narrowed(Domain(operation="kda", key_dims=(1, 256)), "fla.ops.kda.fused_recurrent:fused_recurrent_kda")
    assert [narrow.has_key(width) for width in (16, 24, 256)] == [True, not strays, True]
    signature.cache_clear()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"l2norm": None}, r"this release cannot be asked: 'NoneType' object is not callable \(fla_modules\.py:\d+ in run\)"),
        ({"l2norm": without_eps}, r"this release cannot be asked: without_eps\(\) got an unexpected keyword argument 'eps' .*"),
    ],
)
def test_an_interface_that_is_missing_decides_nothing(
    names: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("fla")
    with_norm(monkeypatch, **names)
    outcome = execute(Run.parse(f"{NORM} eps=1e-5"))
    assert outcome.verdict is Verdict.UNKNOWN
    assert re.fullmatch(reason, outcome.reason), outcome.reason


def test_a_library_that_cannot_be_imported_decides_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("fla")
    with_norm(monkeypatch)
    monkeypatch.delitem(sys.modules, "fla.modules.l2norm")
    (tmp_path / "l2norm.py").write_text("import no_such_requirement\n")
    sys.modules["fla.modules"].__path__ = [str(tmp_path)]
    monkeypatch.setattr("verify.bench.faults.uses_stubs", lambda: False)  # another test may have brought stubs
    outcome = execute(Run.parse(NORM))
    assert outcome.verdict is Verdict.UNKNOWN
    assert outcome.reason == "this release cannot be asked: No module named 'no_such_requirement' (l2norm.py:1 in <module>)"


def test_an_error_inside_the_implementation_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    need("fla")
    with_norm(monkeypatch, l2norm=wrong_inside)
    (finding,) = execute(Run.parse(NORM)).findings
    assert (finding.kind, finding.detail) == (FailureKind.RAISED, "AttributeError")
