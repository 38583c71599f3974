"""`verify.watch`: what it writes, what `judge` and `repeat` find in it, and that nothing of it reaches the job."""

import copy
import functools
import io
import json
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gdn_verify
from tests.files_kernels import example
from tests.libraries.test_files import hostile, joined, parts_of
from verify import watch
from verify.adapters.watch_files import Folder, Lost, statistics_of
from verify.cli.exits import BROKEN, HOLDS, UNDECIDED, USAGE
from verify.cli.main import main
from verify.execution.watched import WatchedLine, judged, judged_by_heads, watched_in
from verify.process.outcome import Verdict

ROOT = pathlib.Path(__file__).resolve().parents[2]


def my_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,  # noqa: FBT001, FBT002 - as FLA has them
    use_qk_l2norm_in_kernel: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": initial_state, "cu_seqlens": cu_seqlens}
    options = {"qk_norm": str(int(use_qk_l2norm_in_kernel)), "qk_norm_eps": "1e-6", "qk_norm_form": "inside"}
    options |= {} if scale is None else {"scale": str(scale)}
    found = example().rule({name: x for name, x in tensors.items() if x is not None}, options)
    return found["o"].to(q.dtype), found["final_state"] if output_final_state else None


def arguments(seed: int = 0, tokens: int = 20, batch: int = 1, *, grad: bool = True) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(batch, tokens, *sizes, generator=numbers)

    x = {"q": draw(2, 8), "k": draw(2, 8) / 8**0.5, "v": draw(4, 8), "g": -draw(4).abs(), "beta": draw(4).sigmoid()}
    return {name: y.requires_grad_(grad) for name, y in x.items()}


def at_once(rule: Any, out: pathlib.Path, **words: Any) -> Any:
    """A rule every call of which is sampled, whatever that costs."""
    watched = watch(rule, every=1, share=1.0, out=out, **words)
    patient(watched.watcher)
    return watched


def patient(watcher: Any) -> None:
    watcher._rate, watcher._begun = 0.0, time.monotonic() - 1e6
    watcher._earliest = 0.0


def settle(watcher: Any) -> None:
    """Wait until a sample is written or lost."""
    end = time.monotonic() + 20
    while watcher._busy:
        assert time.monotonic() < end, watcher.report()
        time.sleep(0.01)


def train(watched: Any, x: dict[str, Any], **words: Any) -> dict[str, Tensor]:
    o, state = watched(**x, **words)
    total = (o * torch.sin(torch.arange(o.numel()).view(o.shape))).sum() + (state.square().sum() if state is not None else 0)
    total.backward()
    settle(watched.watcher)
    return {name: y.grad for name, y in x.items()}


def test_a_training_call_is_written_and_holds_with_its_gradients(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path)
    state = torch.randn(2, 4, 8, 8)
    packed = {"cu_seqlens": torch.tensor([0, 7, 20]), "initial_state": state, "output_final_state": True, "scale": 0.5}
    with_watch = train(watched, arguments(), **packed)
    x = arguments()
    o, final = my_gated_delta_rule(**x, **packed)
    assert final is not None
    ((o * torch.sin(torch.arange(o.numel()).view(o.shape))).sum() + final.square().sum()).backward()
    assert all(torch.equal(with_watch[name], y.grad) for name, y in x.items()), "the job's gradients are the same bits"
    with torch.no_grad():
        watched(**arguments(1, batch=2), use_qk_l2norm_in_kernel=True)
        settle(watched.watcher)
    paths = watched_in(str(tmp_path))
    assert [os.path.basename(path)[:4] for path in paths] == ["vjp-", "call"]
    outcomes = [judged_by_heads(path)[1] for path in paths]
    assert [(x.verdict, {*x.ratios}) for x in outcomes] == [
        (Verdict.HOLDS, {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta"}),
        (Verdict.HOLDS, {"o"}),
    ]
    capsys.readouterr()
    assert main(["judge", str(tmp_path)]) == HOLDS
    assert capsys.readouterr().out.endswith("2 holds\n")
    assert main(["judge", str(tmp_path), "--law", "oracle"]) == USAGE
    report = watched.report()
    assert (report["calls"], report["sampled"], report["written"], report["lost"]) == (2, 2, 2, {})
    assert 0 < report["spent_s"] < 20


def wrong_row(x: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    o, state = my_gated_delta_rule(**x)
    row = torch.zeros(o.shape[:3], dtype=torch.bool)
    row[-1, 13, 2] = True
    return torch.where(row.unsqueeze(-1), 1.5 * o, o), state


def test_a_wrong_row_is_broken_shrunk_and_repeated(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor | None]:
        return wrong_row({"q": q, "k": k, "v": v, "g": g, "beta": beta})

    watched = at_once(gated_delta_rule, tmp_path)
    train(watched, arguments(batch=2))
    capsys.readouterr()
    assert main(["judge", str(tmp_path), "--json", "-"]) == BROKEN
    out, err = capsys.readouterr()
    (record,) = map(json.loads, out.splitlines())
    line = WatchedLine.parse(record["watched"])
    assert (line.sequence, line.head, line.tokens) == (1, 1, 14), "the last row of the smallest part is the wrong one"
    assert record["findings"][0]["rows_over"] == 1 and f'repeat       gdn-verify repeat "{line}"' in err
    assert main(["repeat", str(line), "--findings", str(tmp_path.parent / "found")]) == BROKEN
    assert "token 13, head 0" in capsys.readouterr().out
    assert main(["repeat", f"{line} adapter=transformers/chunk", "--findings", str(tmp_path.parent / "found")]) == HOLDS
    other = str(line).replace("sequence=1", "sequence=0")
    assert main(["repeat", other, "--findings", str(tmp_path.parent / "found")]) == HOLDS
    assert main(["repeat", f"{line} adapter=zoo/IgnoresBeta", "--findings", str(tmp_path.parent / "found")]) != HOLDS


def test_a_wrong_gradient_is_broken_and_outputs_are_not_blamed(tmp_path: pathlib.Path) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dx: Tensor) -> Tensor:
            return 1.1 * dx

    def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor | None]:
        return my_gated_delta_rule(q, Wrong.apply(k), v, g, beta)

    watched = at_once(gated_delta_rule, tmp_path)
    train(watched, arguments(batch=2))
    line, outcome = judged_by_heads(watched_in(str(tmp_path))[0])
    assert [finding.port for finding in outcome.findings] == ["dk"]
    assert (line.head, line.sequence, line.tokens) == (0, 0, None), "a gradient depends on later tokens"


def test_a_gradient_of_all_heads_together_is_judged(tmp_path: pathlib.Path) -> None:
    """The weight of a norm is shared by the heads, so that no part of one head has its gradient."""

    def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight * torch.nn.functional.silu(z)

    def doubled(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(x, z, 2 * weight - weight.detach())

    for function, wrong in ((gated_rms_norm, []), (doubled, ["dweight"])):
        watched = at_once(function, tmp_path / function.__name__, operation="gated_rms_norm")
        x, z, weight = (torch.randn(*sizes, requires_grad=True) for sizes in ((1, 5, 3, 8), (1, 5, 3, 8), (8,)))
        watched(x, z, weight).square().sum().backward()
        settle(watched.watcher)
        _, outcome = judged_by_heads(watched_in(str(tmp_path / function.__name__))[0])
        assert {*outcome.ratios} == {"y", "dx", "dz", "dweight"}
        assert [finding.port for finding in outcome.findings] == wrong


@pytest.mark.parametrize("cut", ["head=0", "sequence=1", "sequence=0 tokens=3", "sequence=1 head=1 tokens=7", ""])
def test_parts_of_right_calls_hold_and_parts_that_are_none_are_refused(cut: str, tmp_path: pathlib.Path) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path)
    offsets = torch.tensor([0, 5, 20])
    train(watched, arguments(), cu_seqlens=offsets, initial_state=torch.randn(2, 4, 8, 8), output_final_state=True)
    (path,) = watched_in(str(tmp_path))
    outcome = judged(WatchedLine.parse(f"watched={path} {cut}"))
    assert outcome.verdict is Verdict.HOLDS
    assert outcome.ratios.keys() == ({"o"} if "tokens" in cut else {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta"})
    for wrong in ("head=2", "sequence=2", "tokens=3", "sequence=0 tokens=6", "sequence=0 tokens=0"):
        assert judged(WatchedLine.parse(f"watched={path} {wrong}")).reason.startswith("cannot be judged: "), wrong
    for wrong in (f"watched={tmp_path}", f"watched={path} head=-1", f"watched={path} law=oracle"):
        with pytest.raises(ValueError, match=r"watched must|must be whole"):
            WatchedLine.parse(wrong)


def test_arguments_that_are_not_known_are_said_once_and_never_guessed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path)
    for _ in range(3):
        watched(**arguments(grad=False), mask=torch.ones(1, 20))
    err = capsys.readouterr().err
    assert err.count("gdn-verify watch") == 1 and "gated_delta_rule has no mask: map it with names={'mask': ...}" in err
    assert watched_in(str(tmp_path)) == []
    named = at_once(my_gated_delta_rule, tmp_path, names={"mask": None})
    named(**arguments(grad=False), mask=torch.ones(1, 20))
    settle(named.watcher)
    assert len(watched_in(str(tmp_path))) == 1

    def thing(x: Tensor) -> Tensor:
        return x

    assert watch(thing, out=tmp_path) is thing
    assert "thing is not watched: its name has no operation" in capsys.readouterr().err
    assert watch(thing, out=tmp_path, operation="kda")(torch.ones(1)) == 1
    with pytest.raises(ValueError, match="operation must be one of"):
        watch(thing, out=tmp_path, operation="softmax")


def test_defaults_and_partial_arguments_are_part_of_the_call(tmp_path: pathlib.Path) -> None:
    normed = functools.partial(my_gated_delta_rule, use_qk_l2norm_in_kernel=True)
    watched = at_once(normed, tmp_path)
    train(watched, arguments())
    assert judged_by_heads(watched_in(str(tmp_path))[0])[1].verdict is Verdict.HOLDS

    def with_default(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, qk_norm: bool = True) -> Any:
        return normed(q, k, v, g, beta)

    out = tmp_path / "default"
    watched = at_once(with_default, out, operation="gated_delta_rule")
    train(watched, arguments())
    assert judged_by_heads(watched_in(str(out))[0])[1].verdict is Verdict.HOLDS


def test_the_name_of_a_function_says_how_it_rounds(tmp_path: pathlib.Path) -> None:
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    from fla.ops.kda import chunk_kda

    rule: Any = watch(fla.chunk_gated_delta_rule, out=tmp_path)
    found = rule.watcher._make_folder.args
    assert found[1:4] == (
        "chunk_gated_delta_rule",
        "gated_delta_rule",
        {"algorithm": "chunkwise", "products": "tf32", "chunk": 64},
    )
    recurrent: Any = watch(fla.fused_recurrent_gated_delta_rule, out=tmp_path)
    assert recurrent.watcher._make_folder.args[3] == {"algorithm": "recurrent", "products": "ieee", "chunk": None}
    kda: Any = watch(chunk_kda, out=tmp_path)
    x = {**arguments(grad=False), "g": -torch.rand(1, 20, 4, 8)}
    raw = {"use_gate_in_kernel": True, "A_log": torch.rand(4), "dt_bias": torch.rand(32), "state_v_first": True}
    sample = kda.watcher._reader.sample(1, (), {**x, **raw, "initial_state": torch.rand(1, 4, 8, 8)})
    assert {"a", "A_log", "dt_bias", "state"} <= sample.call.keys() and "g" not in sample.call
    assert (sample.call["dt_bias"].shape, sample.layout) == ((4, 8), {"state": "V K", "final_state": "V K"})
    with pytest.raises(Lost, match="kda has no return_intermediate_states"):
        kda.watcher._reader.sample(1, (), {**x, "return_intermediate_states": True})


def test_layouts_of_the_function_are_stored_in_ours(tmp_path: pathlib.Path) -> None:
    def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        o, final = my_gated_delta_rule(q.transpose(1, 2), k, v, g, beta, initial_state=state.mT, output_final_state=True)
        assert final is not None
        return o, final.mT

    x = arguments()
    x["q"] = x["q"].detach().transpose(1, 2).requires_grad_()
    x["state"] = torch.randn(1, 4, 8, 8).requires_grad_()
    layout = {"q": "H T K", "state": "V K", "final_state": "V K"}
    watched = at_once(gated_delta_rule, tmp_path, layout=layout)
    train(watched, x)
    outcome = judged_by_heads(watched_in(str(tmp_path))[0])[1]
    assert (outcome.verdict, {"dh0", "dq"} <= outcome.ratios.keys()) == (Verdict.HOLDS, True)


class Rule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor | None]:
        if q.isnan().any():
            raise KeyError("mine")
        return my_gated_delta_rule(q, k, self.gain.detach() * v, g, beta)


def test_a_module_is_watched_copied_and_saved(tmp_path: pathlib.Path) -> None:
    module = Rule()
    assert watch(module, every=1, share=1.0, out=tmp_path, operation="gated_delta_rule") is module
    (hook,) = module._forward_pre_hooks.values()
    patient(hook.watcher)
    x = arguments()
    module(**x)[0].sum().backward()
    settle(hook.watcher)
    assert judged_by_heads(watched_in(str(tmp_path))[0])[1].verdict is Verdict.HOLDS
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.gain.data.fill_(2.0)
        assert torch.equal(other(**arguments())[0], Rule.forward(other, **arguments())[0]), "a copy has its own parameters"
    assert (hook.watcher.calls, len(module.state_dict())) == (1, 1)
    with pytest.raises(TypeError):
        module(1)
    with pytest.raises(KeyError):
        module(**arguments() | {"q": torch.full((1, 20, 2, 8), torch.nan)})
    module(**arguments(grad=False))
    settle(hook.watcher)
    assert (hook.watcher.calls, hook.watcher.written) == (4, 2), "a call that fails does not end the watching"


def test_a_watched_function_is_pickled_and_bound_as_itself(tmp_path: pathlib.Path) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path)
    assert pickle.loads(pickle.dumps(watched)) is my_gated_delta_rule
    assert copy.deepcopy(watched) is watched and watched.__name__ == "my_gated_delta_rule"

    class Layer:
        rule = watched

        def gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
            return my_gated_delta_rule(q, k, v, g, beta)

    Layer.gated_delta_rule = at_once(Layer.gated_delta_rule, tmp_path)  # type: ignore[method-assign]
    Layer().gated_delta_rule(*arguments(grad=False).values())
    settle(Layer.__dict__["gated_delta_rule"].watcher)
    assert len(watched_in(str(tmp_path))) == 1
    assert gdn_verify.watch is watch
    buffer = io.BytesIO()
    torch.save({"rule": watched}, buffer)


def test_compiled_code_runs_without_us(tmp_path: pathlib.Path) -> None:
    def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return q * beta[..., :1, None] + g.sum()

    watched = at_once(gated_delta_rule, tmp_path)

    def step(x: dict[str, Tensor]) -> Tensor:
        return watched(**x) * 2

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    x = arguments(grad=False)
    for y in x.values():
        y.requires_grad_(False)
    x["beta"] = x["beta"][..., :2]
    assert torch.equal(compiled(x), 2 * gated_delta_rule(**x))
    assert watched.watcher.sampled == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_and_transforms_are_as_without_us(reentrant: bool, tmp_path: pathlib.Path) -> None:  # noqa: FBT001
    watched = at_once(my_gated_delta_rule, tmp_path)

    def loss(rule: Any, x: dict[str, Tensor]) -> Tensor:
        def part(*values: Tensor) -> Tensor:
            return rule(*values)[0]

        o: Tensor = checkpoint(part, *x.values(), use_reentrant=reentrant)
        return (o * torch.sin(torch.arange(o.numel()).view(o.shape))).sum()

    x, y = arguments(), arguments()
    for _ in range(2):
        loss(watched, x).backward()
        loss(my_gated_delta_rule, y).backward()
    assert all(torch.equal(x[name].grad, y[name].grad) for name in x)  # type: ignore[arg-type]
    x, y = arguments(grad=False), {name: z[:1, :3] for name, z in arguments(grad=False).items()}
    gradient = torch.func.grad(lambda v: watched(**{**y, "v": v})[0].sum())(y["v"])
    assert torch.equal(gradient, torch.func.grad(lambda v: my_gated_delta_rule(**{**y, "v": v})[0].sum())(y["v"]))
    watched.watcher.close()
    assert {judged_by_heads(path)[1].verdict for path in watched_in(str(tmp_path))} <= {Verdict.HOLDS}


def refuse(error: BaseException) -> Callable[..., Any]:
    def raising(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raising


FAILURES: dict[str, tuple[str, Any]] = {
    "a full disk": ("verify.adapters.watch_files.write", refuse(OSError(28, "No space left on device"))),
    "little room": ("verify.adapters.watch_files.shutil.disk_usage", lambda path: type("", (), {"free": 0})),
    "no folder": ("verify.adapters.watch_files.os.makedirs", refuse(PermissionError(13, "Permission denied"))),
    "no memory": ("verify.adapters.watch._memory", lambda device: (1000, 1000)),
    "no thread": ("verify.adapters.watch.threading.Thread.start", refuse(RuntimeError("can't start new thread"))),
    "no copy": ("verify.adapters.watch.Watcher._copy_inputs", refuse(torch.OutOfMemoryError("CUDA out of memory"))),
    "a mistake of ours in a hook": ("verify.adapters.watch.Watcher._submit", refuse(AssertionError("ours"))),
}


@pytest.mark.parametrize("name", FAILURES)
def test_no_failure_of_ours_reaches_the_job(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(*FAILURES[name])
        for _ in range(3):
            x, y = arguments(), arguments()
            o, _ = watched(**x)
            o.sum().backward()
            my_gated_delta_rule(**y)[0].sum().backward()
            assert all(torch.equal(x[key].grad, y[key].grad) for key in x)
            settle(watched.watcher)
    err = capsys.readouterr().err
    assert err.count("gdn-verify watch: my_gated_delta_rule: ") == 1 and "lost" in err, err
    assert watched.report()["written"] == 0 and sum(watched.report()["lost"].values()) >= 1
    assert [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".part"] == []


def test_an_error_of_the_function_is_the_jobs(tmp_path: pathlib.Path) -> None:
    def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        if float(q[0, 0, 0, 0]) > 1e9:
            raise KeyError("mine")
        return my_gated_delta_rule(q, k, v, g, beta)[0]

    watched = at_once(gated_delta_rule, tmp_path)
    with pytest.raises(KeyError, match="mine"):
        watched(**{**arguments(grad=False), "q": torch.full((1, 20, 2, 8), 1e10)})
    watched(**arguments(grad=False))
    settle(watched.watcher)
    assert watched.watcher.written == 1


def test_nan_inputs_are_written_and_undecided(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path)
    x = arguments(grad=False)
    x["v"][0, 3, 1, 2] = torch.nan
    watched(**x)
    settle(watched.watcher)
    assert main(["judge", str(tmp_path)]) == UNDECIDED
    assert "input v has 1 numbers that are NaN" in capsys.readouterr().out


def test_outputs_that_are_changed_in_place_are_stored_as_they_were(tmp_path: pathlib.Path) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path)
    x = arguments()
    inner = {name: y * 1.0 for name, y in x.items()}
    o, _ = watched(**inner)
    with torch.no_grad():
        for y in inner.values():
            y.mul_(3.0)
    o.mul_(2.0).sum().backward()
    settle(watched.watcher)
    assert judged_by_heads(watched_in(str(tmp_path))[0])[1].verdict is Verdict.HOLDS


def test_a_call_without_a_backward_is_written_later_without_gradients(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path)
    watched(**arguments())
    watched(**arguments())
    assert watched.watcher.sampled == 1, "one call at a time"
    monkeypatch.setattr("verify.adapters.watch.PATIENCE_S", 0.0)
    watched(**arguments())
    settle(watched.watcher)
    assert [os.path.basename(path)[:4] for path in watched_in(str(tmp_path))] == ["call"]


def test_the_share_is_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(my_gated_delta_rule, every=1, share=0.05, out=tmp_path, gradients=False)
    watcher: Any = watched.watcher  # type: ignore[attr-defined]
    usual = Folder.write

    def slow(self: Folder, *args: Any) -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        usual(self, *args)

    monkeypatch.setattr(Folder, "write", slow)
    watcher._rate = 0.0
    begin, x = time.monotonic(), arguments(grad=False)
    # On a busy machine the first sample may cost the share of many seconds.
    while (took := time.monotonic() - begin) < 3 or (watcher.report()["written"] < 2 and took < 60):
        watched(**x)
        time.sleep(0.001)
    settle(watcher)
    report = watcher.report()
    assert report["written"] >= 2 and report["share"] < 0.05 + 0.03 / 3, report
    assert report["sampled"] < report["calls"] / 5


def test_calls_that_cannot_be_sampled_cost_no_more_than_the_share(tmp_path: pathlib.Path) -> None:
    def gated_delta_rule(q: Tensor, mask: Tensor) -> None:
        time.sleep(1e-4)

    watched: Any = watch(gated_delta_rule, every=1, share=0.02, out=tmp_path)
    begin = time.monotonic()
    # On a busy machine the first loss may cost the share of many seconds.
    while (took := time.monotonic() - begin) < 2 or (watched.report()["share"] >= 0.03 and took < 30):
        watched(torch.ones(1), torch.ones(1))
    report = watched.report()
    assert report["lost"] and 0 < report["share"] < 0.03, report
    assert sum(report["lost"].values()) < report["calls"] / 2


def test_only_the_newest_calls_are_kept(tmp_path: pathlib.Path) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path, keep=2, gradients=False)
    for seed in range(4):
        watched(**arguments(seed, grad=False))
        settle(watched.watcher)
    (folder,) = tmp_path.iterdir()
    questions = json.loads((folder / "manifest.json").read_text())["questions"]
    assert [about["call"] for about in questions.values()] == [3, 4]
    assert len([*folder.glob("*.safetensors")]) == len([*folder.glob("answers/*.safetensors")]) == 2


def test_statistics_have_no_values(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path, statistics=True)
    train(watched, arguments(), cu_seqlens=torch.tensor([0, 5, 20]))
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "statistics.jsonl"]
    line = json.loads((folder / "statistics.jsonl").read_text())
    assert line["inputs"]["q"].keys() == {"shape", "dtype", "nan", "infinite", "zero", "least", "largest", "mean", "rms"}
    assert (line["inputs"]["cu_seqlens"]["least"], line["inputs"]["cu_seqlens"]["largest"]) == (5, 15)
    assert {"o", "dq"} <= line["outputs"].keys()
    assert main(["judge", str(tmp_path)]) == USAGE
    assert "has statistics alone" in capsys.readouterr().err
    found = statistics_of("x", torch.tensor([0.0, torch.nan, torch.inf, -3.0, 4.0]))
    numbers = {"least": -3.0, "largest": 4.0, "mean": pytest.approx(1 / 3), "rms": pytest.approx((25 / 3) ** 0.5)}
    assert found == {"shape": [5], "dtype": "F32", "nan": 1, "infinite": 1, "zero": 1} | numbers


def test_many_threads_call_at_once(tmp_path: pathlib.Path) -> None:
    watched = at_once(my_gated_delta_rule, tmp_path, gradients=False)
    right, wrong = my_gated_delta_rule(**arguments(grad=False))[0], list[Any]()

    def work() -> None:
        for _ in range(30):
            if not torch.equal(watched(**arguments(grad=False))[0], right):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(watched.watcher)
    assert not wrong and watched.watcher.written >= 1
    assert {judged_by_heads(path)[1].verdict for path in watched_in(str(tmp_path))} == {Verdict.HOLDS}


JOB = """
import os, sys, time, torch
sys.path.insert(0, {root!r})
from tests.verbs.test_watch import at_once, arguments, my_gated_delta_rule, settle
from verify.adapters import watch_files
watched = at_once(my_gated_delta_rule, {out!r}, gradients=False)
{body}
print("done")
"""
BODIES = {
    "fork": """
watched(**arguments(grad=False)); settle(watched.watcher)
watched.watcher._lock.acquire()
if (child := os.fork()) == 0:
    watched(**arguments(1, grad=False)); settle(watched.watcher)
    os._exit(0 if watched.watcher.written == 2 else 9)
assert os.waitpid(child, 0)[1] == 0
""",
    "exit while writing": """
usual = watch_files.write
def slow(path, tensors, about, between):
    while True: between(); time.sleep(0.01)
watch_files.write = slow
watched(**arguments(grad=False)); time.sleep(0.2)
""",
    "exit while a disk hangs": """
watch_files.write = lambda *words: time.sleep(600)
watched(**arguments(grad=False)); time.sleep(0.2)
""",
    "exit at once": """
watched(**arguments(grad=False))
""",
    "closed stderr": """
os.close(2); sys.stderr.close()
watched(**arguments(grad=False), mask=torch.ones(1))
""",
    "killed": """
watch_files.write = lambda *words: time.sleep(600)
watched(**arguments(grad=False)); print("done", flush=True); os.kill(os.getpid(), 9)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_a_job_ends_as_without_us(name: str, tmp_path: pathlib.Path) -> None:
    code = JOB.format(root=str(ROOT), out=str(tmp_path), body=BODIES[name])
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
    assert done.returncode == (-signal.SIGKILL if name == "killed" else 0), done.stderr
    assert time.monotonic() - begin < 60
    written = {"fork": 2, "exit at once": 1}.get(name, 0)
    assert len(watched_in(str(tmp_path))) == written
    if name.startswith("exit while"):
        assert done.stderr.count("gdn-verify watch: my_gated_delta_rule: a call was not written: the process ended") == 1
    assert all(judged_by_heads(path)[1].verdict is Verdict.HOLDS for path in watched_in(str(tmp_path)))


@pytest.fixture
def one(tmp_path: pathlib.Path) -> pathlib.Path:
    watched = at_once(my_gated_delta_rule, tmp_path)
    train(watched, arguments())
    return pathlib.Path(watched_in(str(tmp_path))[0])


@pytest.mark.parametrize("part", ["", "answers"])
def test_hostile_files_are_no_verdict(part: str, one: pathlib.Path) -> None:
    path, chance = one.parent / part / f"{one.name}.safetensors", random.Random(0)
    header, body = parts_of(path.read_bytes())
    data = joined(json.dumps({name: entry for name, entry in header.items() if name != "__metadata__"}).encode(), body)
    for _ in range(60):
        path.write_bytes(hostile(data, chance))
        outcome = judged(WatchedLine(str(one)))
        assert (outcome.verdict, outcome.fault) == (Verdict.UNKNOWN, ""), path.read_bytes()[:200]
    path.unlink()
    assert judged(WatchedLine(str(one))).reason == f"there is no {one.name}.safetensors"


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": None},
        {"inputs": [7]},
        {"inputs": [{"name": "q", "dtype": "F99", "shape": []}]},
        {"outputs": []},
        {"options": {"scale": "x"}},
        {"options": 7},
        {"chunk": "64"},
        {"products": ["ieee"]},
    ],
)
def test_a_hostile_manifest_is_no_verdict(change: dict[str, Any], one: pathlib.Path) -> None:
    path = one.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["questions"][one.name] |= change
    path.write_text(json.dumps(manifest))
    outcome = judged(WatchedLine(str(one)))
    assert outcome.verdict is Verdict.UNKNOWN or change == {"options": 7}, outcome
    assert outcome.fault == ""
