"""The released serving libraries, as `fetch` unpacks them: workers import them, and tiny calls give the right numbers."""

import importlib.util
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from verify.adapters.libraries import LIBRARIES
from verify.cli.main import main
from verify.process.worker import Worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLOW_FIXTURES = ("vllm", "flashinfer")
SERVES = "tests.serving_calls:answer"
SGLANG = (
    "sglang.kernels.ops.attention.fla.chunk",
    "sglang.kernels.ops.attention.fla.fused_recurrent",
    "sglang.kernels.ops.attention.fla.kda",
    "sglang.kernels.ops.attention.kda_packed_decode",
    "sglang.kernels.ops.attention.linear.fused_gdn_gating",
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
    "sglang.srt.layers.attention.linear.kernels.gdn_triton",
    "sglang.srt.layers.attention.mamba.prefill_track_metadata",
    "sglang.srt.mem_cache.allocator.mamba",
    "sglang.srt.mem_cache.mamba_slot_fused",
)
POOLS = (  # these need msgspec too
    "sglang.srt.configs.mamba_utils",
    "sglang.srt.mem_cache.allocation_sizing",
    "sglang.srt.mem_cache.layout.token_major",
    "sglang.srt.mem_cache.memory_pool",
)
VLLM = (
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
    "vllm.model_executor.layers.mamba.ops.causal_conv1d",
    "vllm.third_party.flash_linear_attention.ops",
    "vllm.third_party.flash_linear_attention.ops.chunk",
    "vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv",
    "vllm.third_party.flash_linear_attention.ops.fused_recurrent",
    "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating",
    "vllm.third_party.flash_linear_attention.ops.kda",
    "vllm.v1.attention.backends.gdn_attn",
)
NEEDED = {"sglang": ("einops",), "vllm": ("einops", "regex", "transformers"), "flashinfer": ()}
Ask = Callable[..., dict[str, Any]]


def asking(library: str, folder: pathlib.Path, **settings: Any) -> Iterator[Ask]:
    """A function that runs a question in a worker of its own, which finds the library where --path would put it."""
    for name in NEEDED[library]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install {name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with Worker(serves=SERVES, **settings) as worker:
            yield lambda **question: worker.ask(question)


@pytest.fixture(scope="module")
def sglang(sglang_files: pathlib.Path) -> Iterator[Ask]:
    yield from asking("sglang", sglang_files)


@pytest.fixture(scope="module")
def vllm(vllm_files: pathlib.Path) -> Iterator[Ask]:
    yield from asking("vllm", vllm_files)


@pytest.fixture(scope="module")
def flashinfer(flashinfer_files: pathlib.Path) -> Iterator[Ask]:
    yield from asking("flashinfer", flashinfer_files)


def assert_imported(answer: dict[str, Any], names: tuple[str, ...], folder: pathlib.Path) -> None:
    """Every module is the library's own: it comes from its own file. A namespace package or a stub has none."""
    assert answer.get("error") is None
    places = [str(folder.joinpath(*name.split("."))) for name in names]
    assert [file.removesuffix(".py").removesuffix("/__init__") for file in answer["files"]] == places
    assert answer["release"] == LIBRARIES[names[0].partition(".")[0]].version


@pytest.mark.interpreted
@pytest.mark.slow
def test_modules_of_sglang_are_imported_in_a_forked_worker(sglang: Ask, sglang_files: pathlib.Path) -> None:
    assert_imported(sglang(modules=SGLANG), SGLANG, sglang_files)


@pytest.mark.interpreted
@pytest.mark.slow
def test_modules_of_sglang_are_imported_in_a_new_process(sglang_files: pathlib.Path) -> None:
    for ask in asking("sglang", sglang_files, under=lambda: ["env"]):
        answer = ask(modules=SGLANG)
        assert "verify.process.worker" in answer["words"], "a forked worker has the words of the process that forked it"
        assert_imported(answer, SGLANG, sglang_files)


@pytest.mark.interpreted
def test_what_sglang_lacks_is_one_line(sglang: Ask, sglang_files: pathlib.Path) -> None:
    assert sglang(modules=["sglang.kernels.ops.attention.fla.plum"])["error"] == (
        f"there is no sglang.kernels.ops.attention.fla.plum in sglang 0.5.23 under {sglang_files}: "
        "`gdn-verify fetch` has only what runs without its requirements, pip install 'sglang==0.5.23'"
    )


def adapter_of_the_page() -> str:
    """The adapter in docs/how-to/serving.md."""
    page = (ROOT / "docs" / "how-to" / "serving.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_decode\.py\n.*?)```", page, re.DOTALL)
    return str(code)


Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Check:
    """A function that checks the adapter of the page in a folder of its own: the exit code, and what is printed."""
    (tmp_path / "my_decode.py").write_text(adapter_of_the_page())
    monkeypatch.chdir(tmp_path)
    # Workers of other tests find the libraries there, and --path adds to it.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not pathlib.Path(entry, "sglang").is_dir()])

    def check(*words: str) -> tuple[int, str, str]:
        return main(["check", "my_decode.py:Decode", "--law", "oracle", "--profile", "least", *words]), *capfd.readouterr()

    return check


@pytest.mark.interpreted
@pytest.mark.slow
def test_the_adapter_of_the_page_holds_with_what_fetch_unpacked(
    check: Check, tmp_path: pathlib.Path, sglang_files: pathlib.Path
) -> None:
    place = tmp_path / LIBRARIES["sglang"].fetched
    place.parent.mkdir(parents=True)
    place.symlink_to(sglang_files)
    code, out, err = check("--workers", "1")
    assert code == 0, err
    assert re.search(r"^my_decode\.py:Decode  sglang 0\.5\.23 torch .*\n(.*\n)*HOLDS +oracle", out)


@pytest.mark.interpreted
@pytest.mark.slow
def test_the_adapter_of_the_page_holds_with_a_path(check: Check, sglang_files: pathlib.Path) -> None:
    code, out, err = check("--workers", "1", "--path", str(sglang_files))
    assert code == 0, err
    assert "sglang 0.5.23" in out


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="sglang is installed")
@pytest.mark.slow
def test_without_sglang_the_adapter_of_the_page_is_refused_in_one_line(check: Check) -> None:
    code, out, err = check()
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert ": there is no sglang: run `gdn-verify fetch sglang`, or pip install" in line


def assert_decodes(answer: dict[str, Any], o: float = 1e-6) -> None:
    """The errors against the float64 rule are those of float32, and the same call is far from a rule that does not decay."""
    assert answer["o"] < o
    assert answer["pool"] < 1e-6
    assert answer["o_without_decay"] > 10 * o
    assert answer["pool_without_decay"] > 0.01


@pytest.mark.interpreted
def test_sglang_decodes_as_the_rule_says(sglang: Ask) -> None:
    assert_decodes(sglang(call="sglang_update"))


@pytest.mark.interpreted
def test_the_pool_of_sglang_is_its_own(sglang: Ask, sglang_files: pathlib.Path) -> None:
    pytest.importorskip("msgspec")
    assert_imported(sglang(modules=POOLS), POOLS, sglang_files)
    answer = sglang(call="sglang_pool")
    assert answer == {"slots": [1, 2, 3, 4], "shape": [1, 5, 2, 8, 16], "cleared": True, "copied": True}


@pytest.mark.interpreted
def test_modules_of_vllm_are_imported_in_a_worker(vllm: Ask, vllm_files: pathlib.Path) -> None:
    assert_imported(vllm(modules=VLLM), VLLM, vllm_files)


@pytest.mark.interpreted
def test_vllm_decodes_as_the_rule_says(vllm: Ask) -> None:
    assert_decodes(vllm(call="vllm_update"))


@pytest.mark.interpreted
def test_the_core_of_vllms_layer_runs_with_the_metadata_of_its_builder(vllm: Ask) -> None:
    answer = vllm(call="vllm_core")
    assert (answer["prefills"], answer["backend"], answer["written"]) == ([1, 1, 0, 0], "triton", [2])
    assert answer["size"] > 0.05
    assert answer["error"] < 0.01  # both forms round keys, values and outputs to bfloat16


@pytest.mark.interpreted
@pytest.mark.slow
def test_platforms_answer_for_this_host_and_for_a_gpu(sglang_files: pathlib.Path, vllm_files: pathlib.Path) -> None:
    pytest.importorskip("msgspec")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(sglang_files))
        for ask in asking("vllm", vllm_files):
            assert ask(call="platforms") == {
                "sglang": "CudaSRTPlatform",
                "here": [False, False, False, False],
                "there": [True, False, True, True],
                "families": [True, False, True],
            }


def test_the_reference_of_flashinfer_is_the_rule(flashinfer: Ask, flashinfer_files: pathlib.Path) -> None:
    names = ("flashinfer.trace.templates.gdn",)
    assert_imported(flashinfer(modules=names), names, flashinfer_files)
    assert_decodes(flashinfer(call="flashinfer_reference"), o=4e-3)  # it rounds its outputs to bfloat16
