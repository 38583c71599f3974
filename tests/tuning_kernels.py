"""Runs autotuned kernels in the interpreter under policies; answers, in a worker, what each check fails with, "" if it holds.

Checks are run again under faults, planted wrong ways to decide: "fault: check". With `fla` it runs those of flash-linear-attention.
"""

import contextlib
import json
import os
import pathlib
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

from verify import interpreter
from verify.adapters.fla import core
from verify.gpu import autotune, policies
from verify.gpu.autotune import infeasible, known, using
from verify.gpu.policies import NATIVE, Denied, Policy, TuningError, narrow, plan, preference

times_each = Autotuner._bench  # before the interpreter lets all configurations tie
interpreter.install()
with_triton_alone = Autotuner.run
autotune.install()
ours = Autotuner.run
autotune.install()
assert Autotuner.run is ours is not with_triton_alone, "a second install() changes nothing"

BLOCKS = (16, 32, 64, 128)
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps, num_stages=2) for block in BLOCKS for warps in (2, 4)]
HERE = f"{__name__}."
DENIED = {"gpu": "interpreter", "law": "oracle", "run": "law=oracle adapter=mine.py:Mine lengths=3", "error": "o is off"}


@triton.autotune(list(CONFIGS), key=["n"])
@triton.jit
def double_kernel(x, y, seen, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
    tl.store(seen, BLOCK)


@triton.autotune(list(CONFIGS), key=["n"])
@triton.jit
def wrong_at_64_kernel(x, y, seen, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    extra = 1 if BLOCK == 64 else 0
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2 + extra, mask=i < n)
    tl.store(seen, BLOCK)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 32, 128)], key=["n"])
@triton.jit
def wrong_at_16_kernel(x, y, seen, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    extra = 1 if BLOCK == 16 else 0
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2 + extra, mask=i < n)
    tl.store(seen, BLOCK)


@triton.autotune(list(CONFIGS), key=["n"])
@triton.jit
def right_kernel(x, y, seen, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
    tl.store(seen, BLOCK)


@triton.heuristics({"FULL": lambda args: args["n"] % 128 == 0})
@triton.autotune(list(CONFIGS), key=["n"])
@triton.heuristics({"HALF": lambda args: args["BLOCK"] // 2})
@triton.jit
def heuristic_kernel(x, y, seen, n, FULL: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FULL:
        tl.store(y + i, tl.load(x + i) * 2)
    else:
        tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
    tl.store(seen, HALF * 2)


@triton.autotune(
    list(CONFIGS),
    key=["n"],
    prune_configs_by={"early_config_prune": lambda configs, named, **rest: [c for c in configs if c.kwargs["BLOCK"] <= named["n"]]},
)
@triton.jit
def pruned_kernel(x, y, seen, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
    tl.store(seen, BLOCK)


@triton.jit
def add_kernel(x, y, seen, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(y + i, mask=i < n) + tl.load(x + i, mask=i < n), mask=i < n)
    tl.store(seen, BLOCK)


class Timed(Autotuner):
    """Times its configurations as on a device, by a clock of the test's."""

    _bench = times_each


class Holds(KernelInterface):
    """A kernel of which the device holds some blocks; it keeps the sizes of the launches."""

    def __init__(self, fn: Any, fitting: Callable[[dict[str, Any]], set[int]]) -> None:
        self.fn, self.arg_names, self.fitting = fn, fn.arg_names, fitting
        self.requested: list[int] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.requested.append(kwargs["BLOCK"])
        if kwargs["BLOCK"] not in self.fitting(dict(zip(self.arg_names, args, strict=False))):
            raise OutOfResources(kwargs["BLOCK"], 0, "shared memory")
        return self.fn.run(*args, **kwargs)


def config(block: int, warps: int = 4, stages: int = 2) -> str:
    return f"BLOCK={block}:num_warps={warps}:num_stages={stages}"


ALL = tuple(config(block, warps) for block in BLOCKS for warps in (2, 4))


def launch(kernel: Any, size: int = 200) -> tuple[bool, int]:
    """Whether a kernel doubled its numbers, and the block size that it says it ran with."""
    x, seen = torch.arange(size, dtype=torch.float32), torch.zeros(1, dtype=torch.int32)
    y = torch.zeros(3 * 128 * 4)
    kernel[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, y, seen, size)
    return torch.equal(y[:size], 2 * x), int(seen)


def doubles(kernels: list[Any]) -> list[bool]:
    return [launch(kernel)[0] for kernel in kernels]


def ran(kernel: Any, policy: Policy, denied: tuple[Denied, ...] = (), size: int = 200) -> str:
    """The configuration of one launch, which `used` and the kernel itself must agree on."""
    with using(policy, denied) as used:
        right, seen = launch(kernel, size)
    (text,) = used.pop(autotune.name_of(kernel if isinstance(kernel, Autotuner) else kernel.fn))
    assert right and not used, (right, used)
    assert f"BLOCK={seen}:" in text, (text, seen)
    return text


def refused(kernel: Any, policy: Policy, denied: tuple[Denied, ...] = ()) -> str:
    """What is said of a policy that cannot be followed."""
    with pytest.raises(TuningError) as error, using(policy, denied):
        launch(kernel)
    return str(error.value)


def deny(kernel: str, text: str, **fields: str) -> Denied:
    return Denied(**{**DENIED, "triton": autotune.here()[1], "kernel": kernel, "config": text, **fields})


def check_texts_tell_configurations_apart() -> None:
    def hook(arguments: dict[str, Any]) -> None: ...

    several = [
        (triton.Config({"BV": 32, "BK": 64}, num_warps=4, num_stages=2), "BK=64:BV=32:num_warps=4:num_stages=2"),
        (triton.Config({}), "num_warps=4:num_stages=3"),
        (triton.Config({}, num_ctas=2), "num_warps=4:num_stages=3:num_ctas=2"),
        (triton.Config({}, maxnreg=128), "num_warps=4:num_stages=3:maxnreg=128"),
        (triton.Config({}, pre_hook=hook), "num_warps=4:num_stages=3:pre_hook=hook"),
        (triton.Config({}, pre_hook=lambda arguments: None), "num_warps=4:num_stages=3:pre_hook=%3Clambda%3E"),
        (triton.Config({}, pre_hook=lambda arguments: 0), "num_warps=4:num_stages=3:pre_hook=%3Clambda%3E:nth=2"),
        (triton.Config({"P": "tf32 x3,a:b='1'"}), "P=tf32%20x3%2Ca%3Ab%3D%271%27:num_warps=4:num_stages=3"),
        (triton.Config({"P": ""}), "P=%:num_warps=4:num_stages=3"),
        (triton.Config({"P": tl.float16}), "P=fp16:num_warps=4:num_stages=3"),
        (triton.Config({"P": True}), "P=True:num_warps=4:num_stages=3"),
        (triton.Config({"P": 64}), "P=64:num_warps=4:num_stages=3"),
        (triton.Config({"P": "64"}), "P=64:num_warps=4:num_stages=3:nth=2"),
        (triton.Config({"P": -1}), "P=-1:num_warps=4:num_stages=3"),
    ]
    named = autotune.offers([configuration for configuration, _ in several] + [several[0][0], triton.Config({"P": True})])
    assert [*named] == [text for _, text in several]
    assert all(named[text] is configuration for configuration, text in several)
    assert [policies.check_config(text) for text in named] == [*named]
    assert [*autotune.offers([triton.Config({"P": [1]})])] == ["P=%5B1%5D:num_warps=4:num_stages=3"], "not hashed where it is alone"


def check_native_is_what_triton_decides() -> None:
    assert ran(right_kernel, NATIVE) == ALL[0]  # where all tie, the first
    assert launch(right_kernel) == (True, 16)  # without a policy too
    assert known()[HERE + "right_kernel"] == ALL


def check_number_decides() -> None:
    runs = {tune: ran(double_kernel, Policy(tune)) for tune in range(12)}
    for tune, text in runs.items():
        assert text == preference(ALL, tune, HERE + "double_kernel")[0]
        assert ran(double_kernel, Policy(tune)) == text
    assert set(runs.values()) == {config(16, 2), config(16), config(32, 2), config(32), config(64)}, runs


def check_policies_leave_nothing_behind() -> None:
    tune = next(tune for tune in range(99) if preference(ALL, tune, HERE + "double_kernel")[0] != ALL[0])
    before = list(double_kernel.configs)
    assert ran(double_kernel, Policy(tune)) != ALL[0] == ran(double_kernel, NATIVE)
    assert ran(double_kernel, Policy(tune)) != ALL[0]
    assert autotune.text_of(double_kernel.best_config) == preference(ALL, tune, HERE + "double_kernel")[0]
    assert double_kernel.configs == before
    assert set(double_kernel.cache.values()) == {double_kernel.configs[0]}


def check_innermost_policy_rules() -> None:
    with using(Policy(1, (("double_kernel", ALL[3]),))) as outer:
        launch(double_kernel)
        with using(Policy(1, (("double_kernel", ALL[5]),))) as inner:
            launch(double_kernel)
        launch(double_kernel)
        launch(wrong_at_16_kernel)
    assert outer.pop(HERE + "double_kernel") == (ALL[3],)
    assert list(outer) == [HERE + "wrong_at_16_kernel"]
    assert inner == {HERE + "double_kernel": (ALL[5],)}


def check_other_threads_follow() -> None:
    results: list[Any] = []
    with using(Policy(3, (("double_kernel", ALL[6]),))) as used:
        thread = threading.Thread(target=lambda: results.append(launch(double_kernel)))
        thread.start()
        thread.join()
    assert results == [(True, 128)] and used == {HERE + "double_kernel": (ALL[6],)}


def check_picks_decide() -> None:
    for text in ALL:
        for name in ("double_kernel", HERE + "double_kernel"):
            assert ran(double_kernel, Policy(17, ((name, text),))) == text
    assert ran(double_kernel, Policy(17, (("double_kernel", "num_stages=2:BLOCK=128:num_warps=2"),))) == config(128, 2)
    assert ran(double_kernel, Policy(17, (("le_kernel", ALL[7]), ("other.double_kernel", ALL[7])))) == ran(
        double_kernel, Policy(17)
    )
    both = (("double_kernel", ALL[7]), (HERE + "double_kernel", ALL[0]))
    assert ran(double_kernel, Policy(17, both)) == ALL[0]


def check_wrong_pick_is_named() -> None:
    message = refused(double_kernel, Policy(17, (("double_kernel", "BLOCK=48:num_warps=4:num_stages=2"),)))
    assert message.startswith(
        f"{HERE}double_kernel has no configuration BLOCK=48:num_warps=4:num_stages=2 among its 8; the nearest is "
    )
    assert message.rpartition(" ")[2] in {config(block) for block in BLOCKS}, message
    near = config(32, 2).replace("stages=2", "stages=3")
    assert refused(double_kernel, Policy(17, (("double_kernel", near),))).endswith(f"the nearest is {config(32, 2)}")


@contextlib.contextmanager
def wrapping() -> Iterator[None]:
    """Whatever a kernel raises is said to be its own."""
    try:
        yield
    except Exception as error:
        raise RuntimeError("the kernel raised") from error


def check_wrong_pick_is_not_the_kernels_fault() -> None:
    policy = Policy(17, (("double_kernel", "BLOCK=48"),))
    with pytest.raises(TuningError, match="BLOCK=48"), using(policy), contextlib.suppress(Exception):
        launch(double_kernel)
    with pytest.raises(TuningError, match="BLOCK=48"), using(policy), wrapping():
        launch(double_kernel)
    with using(NATIVE):
        launch(double_kernel)


def check_missed_picks_are_known() -> None:
    policy = Policy(17, (("double_kernel", ALL[1]), ("pruned_kernel", ALL[7]), ("nobody", ALL[0])))
    with using(policy) as used:
        launch(double_kernel)
        launch(pruned_kernel, 20)
    assert policy.missed(used) == [("nobody", ALL[0]), ("pruned_kernel", ALL[7])]


def check_heuristics_run() -> None:
    for size in (200, 256):
        for text in (ALL[2], ALL[7]):
            assert ran(heuristic_kernel, Policy(17, (("heuristic_kernel", text),)), size=size) == text


def check_own_pruning_comes_first() -> None:
    for tune in range(9):
        assert ran(pruned_kernel, Policy(tune), size=20) in (config(16), config(16, 2))
    assert set(known()[HERE + "pruned_kernel"]) in ({config(16, 2), config(16)}, set(ALL))  # the second time, all
    draw = ran(pruned_kernel, Policy(4), size=20)
    pick = Policy(4, (("pruned_kernel", config(64)),))
    assert ran(pruned_kernel, pick, size=20) == draw
    assert ran(pruned_kernel, pick, size=70) == config(64)
    assert ran(pruned_kernel, pick, size=20) == draw
    assert "has no configuration" in refused(pruned_kernel, Policy(4, (("pruned_kernel", config(48)),)))


def check_what_does_not_fit_is_left_out() -> None:
    holds = Holds(double_kernel.fn, lambda arguments: {32, 128} if arguments["n"] < 1000 else {16})
    kernel = Autotuner(holds, holds.arg_names, list(CONFIGS), ["n"], None, None)
    tune = next(tune for tune in range(99) if "BLOCK=64" in preference(ALL, tune, HERE + "double_kernel")[0])
    order = preference(ALL, tune, HERE + "double_kernel")
    blocks = [int(text.split(":")[0].removeprefix("BLOCK=")) for text in order]
    fits = order[blocks.index(32)]
    assert ran(kernel, Policy(tune)) == fits
    assert holds.requested == blocks[: blocks.index(32) + 1]
    assert len(holds.requested) > 2
    holds.requested.clear()
    assert ran(kernel, Policy(tune)) == fits
    assert holds.requested == [32], "it is remembered what does not fit"
    assert ran(kernel, Policy(tune), size=1001) == order[blocks.index(16)]
    assert ran(kernel, Policy(tune)) == fits, "it is remembered by key"
    assert "out of resource" in infeasible()[HERE + "double_kernel"][order[0]]
    assert ran(kernel, Policy(tune, (("double_kernel", config(64)),))) == fits, "a pick that does not fit gives way"


def check_nothing_fits() -> None:
    holds = Holds(double_kernel.fn, lambda arguments: set())
    kernel = Autotuner(holds, holds.arg_names, list(CONFIGS), ["n"], None, None)
    for attempts in (8, 1):
        holds.requested.clear()
        with pytest.raises(OutOfResources), using(Policy(5)):
            launch(kernel)
        assert len(holds.requested) == attempts


def check_other_errors_go_up() -> None:
    def fail(arguments: dict[str, Any]) -> set[int]:
        raise ZeroDivisionError("the compiler fell over")

    holds = Holds(double_kernel.fn, fail)
    kernel = Autotuner(holds, holds.arg_names, list(CONFIGS), ["n"], None, None)
    with using(Policy(5)) as used, pytest.raises(ZeroDivisionError):
        launch(kernel)
    assert len(holds.requested) == 1
    assert list(used) == [HERE + "double_kernel"], "it is known what was about to run"


def check_hooks_are_tritons() -> None:
    def zero(arguments: dict[str, Any]) -> None:
        arguments["y"].zero_()
        assert arguments["BLOCK"] in BLOCKS

    x, seen = torch.ones(200), torch.zeros(1, dtype=torch.int32)
    cleared = [triton.Config({"BLOCK": block}, pre_hook=zero) for block in BLOCKS]
    for configs, options, want in (
        (cleared, {}, [1, 1]),  # a configuration's own hook comes before every launch
        (list(CONFIGS), {"reset_to_zero": ["y"]}, [6, 7]),  # what cleans up after timing has nothing to clean up
        (list(CONFIGS), {"restore_value": ["y"]}, [6, 7]),
        (list(CONFIGS), {"pre_hook": lambda arguments, reset_only=False: zero(arguments)}, [6, 7]),
    ):
        for policy in (Policy(3), Policy(4)):
            kernel = triton.autotune(configs, key=["n"], **options)(add_kernel)
            y, sums = torch.full((200,), 5.0), []
            for _ in want:
                with using(policy):
                    kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, y, seen, 200)
                assert (y == y[0]).all()
                sums.append(int(y[0]))
            assert sums == want, (options, sums)


def timed(fastest: list[int], **options: Any) -> tuple[Any, list[int], torch.Tensor]:
    """A kernel that is timed, the blocks that were, and what it adds to."""
    seen, tried = torch.zeros(1, dtype=torch.int32), []

    def clock(call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        tried.append(int(seen))
        return [float(fastest.index(int(seen)))]

    kernel = Timed(
        add_kernel,
        add_kernel.arg_names,
        [triton.Config({"BLOCK": block}) for block in BLOCKS],
        ["n"],
        options.get("reset_to_zero"),
        options.get("restore_value"),
        do_bench=clock,
    )
    return kernel, tried, seen


def added(kernel: Any, seen: torch.Tensor, policy: Policy, denied: tuple[Denied, ...] = ()) -> tuple[int, int, str]:
    """What 5 becomes, by which block, and the configuration that is said to have run."""
    x, y = torch.ones(200), torch.full((200,), 5.0)
    with using(policy, denied) as used:
        kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, y, seen, 200)
    assert (y == y[0]).all()
    ((text,),) = used.values()
    return int(y[0]), int(seen), text


def check_timing_is_tritons() -> None:
    fast = [64, 16, 32, 128]
    for options, first in (({"restore_value": ["y"]}, 6), ({"reset_to_zero": ["y"]}, 1)):
        kernel, tried, seen = timed(fast, **options)
        assert added(kernel, seen, NATIVE) == (first, 64, config(64, 4, 3)), options
        assert tried == list(BLOCKS)
        for tune in range(6):
            total, block, text = added(kernel, seen, Policy(tune))
            assert (total, text) == (6, config(block, 4, 3))
        assert added(kernel, seen, NATIVE) == (6, 64, config(64, 4, 3))
        assert tried == list(BLOCKS), "its choice is remembered, and a number times nothing"
        assert kernel.best_config.kwargs == {"BLOCK": 64} and len(kernel.configs_timings) == 4


def check_drawn_runs_touch_no_cache() -> None:
    kernel, tried, seen = timed([16, 32, 64, 128], restore_value=["y"])

    def touched(*arguments: Any) -> None:
        raise AssertionError("the choices on disk were read")

    kernel.cache_results, kernel.check_disk_cache = True, touched
    for tune in range(6):
        added(kernel, seen, Policy(tune))
    assert not tried and not kernel.cache
    with pytest.raises(AssertionError, match="on disk"):  # there Triton does
        added(kernel, seen, NATIVE)


def check_denied_is_not_chosen() -> None:
    kernel, tried, seen = timed([64, 16, 32, 128], restore_value=["y"])
    name = autotune.name_of(kernel)
    wrong, also = deny("add_kernel", config(64, 4, 3)), deny(name, "num_stages=3:num_warps=4:BLOCK=16")
    elsewhere = (deny(name, config(16, 4, 3), gpu="NVIDIA H200"), deny(name, config(16, 4, 3), triton="3.6.0"))
    other = deny("d_kernel", config(16, 4, 3))
    assert added(kernel, seen, NATIVE)[1] == 64
    assert added(kernel, seen, NATIVE, (wrong,))[1] == 16
    assert added(kernel, seen, NATIVE, (wrong, also))[1] == 32
    times = len(tried)
    assert added(kernel, seen, NATIVE, (wrong, other, *elsewhere))[1] == 16
    assert len(tried) == times, "what is denied of others changes nothing"
    assert added(kernel, seen, NATIVE)[1] == 64, "what is not denied any longer is chosen again"
    assert added(kernel, seen, NATIVE, (also,))[1] == 64
    times = len(tried)
    assert added(kernel, seen, NATIVE, (wrong,))[1] == 16 and len(tried) == times
    texts = [config(block, 4, 3) for block in BLOCKS]
    for tune in range(9):
        first, *_ = (text for text in preference(texts, tune, name) if text not in (texts[2], texts[0]))
        assert added(kernel, seen, Policy(tune), (wrong, also))[2] == first
    assert added(kernel, seen, Policy(3, ((name, texts[2]),)), (wrong,))[2] == texts[2], "it is picked to be shown again"
    with autotune.leaving_out([("add_kernel", "BLOCK=64:num_warps=4"), [name, "BLOCK=16"], ("d_kernel", "num_warps=4")]):
        assert added(kernel, seen, NATIVE)[1] == 32
        for tune in range(9):
            first, *_ = (text for text in preference(texts, tune, name) if text not in (texts[2], texts[0]))
            assert added(kernel, seen, Policy(tune))[2] == first
        assert added(kernel, seen, Policy(3, ((name, texts[2]),)))[2] == texts[2]
    assert added(kernel, seen, NATIVE)[1] == 64
    everything = tuple(deny(name, text) for text in texts)
    for policy in (NATIVE, Policy(3)):
        with pytest.raises(TuningError, match=r"^every configuration of .*add_kernel is denied on this GPU: 4 of 4$"):
            added(kernel, seen, policy, everything)


def check_pick_that_is_pruned_does_not_let_denied_ones_run() -> None:
    pick, denied = Policy(3, (("pruned_kernel", config(64)),)), tuple(deny("pruned_kernel", text) for text in ALL[:2])
    assert ran(pruned_kernel, pick, denied) == config(64)
    assert ran(pruned_kernel, Policy(3), denied[:1], size=20) == ALL[1]
    with pytest.raises(TuningError, match="2 of 2"), using(pick, denied):
        launch(pruned_kernel, 20)


def check_only_configuration_can_be_denied() -> None:
    kernel = triton.autotune([triton.Config({"BLOCK": 32})], key=[])(double_kernel.fn)
    text = config(32, 4, 3)
    for policy in (NATIVE, Policy(3), Policy(3, (("double_kernel", text),))):
        assert ran(kernel, policy) == text
    for policy in (NATIVE, Policy(3)):
        assert refused(kernel, policy, (deny("double_kernel", text),)).endswith("is denied on this GPU: 1 of 1")
    assert ran(kernel, Policy(3, (("double_kernel", text),)), (deny("double_kernel", text),)) == text


def check_sweep_finds_what_is_wrong_in_one_configuration() -> None:
    names = [HERE + name for name in ("wrong_at_64_kernel", "right_kernel", "wrong_at_16_kernel")]
    kernels = [wrong_at_64_kernel, right_kernel, wrong_at_16_kernel]

    def fails(policy: Policy) -> bool:
        with using(policy):
            return not all(doubles(kernels))

    with using(NATIVE):
        for kernel in kernels:
            launch(kernel)
    lists = {name: known()[name] for name in names}
    assert [len(texts) for texts in lists.values()] == [8, 8, 3]
    # Both wrong kernels have more right configurations than wrong ones among the cheap.
    tune = next(tune for tune in range(99) if not fails(Policy(tune)))
    policies, found, covered = list(plan(lists, tune)), set(), {name: set() for name in names}
    for policy in policies:
        with using(policy) as used:
            wrong = not all(doubles(kernels))
        for name, texts in used.items():
            covered[name].update(texts)
        if wrong:
            found |= {pick for culprit in narrow(policy, fails) for pick in culprit.picks}
    assert len(policies) == 8
    assert covered == {name: set(texts) for name, texts in lists.items()}
    assert found == {(names[0], config(64, 2)), (names[0], config(64)), (names[2], config(16, 4, 3))}, found


def fla_checks() -> Iterator[tuple[str, Callable[[], None]]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(FLA_CACHE_MODE="full", FLA_CONFIG_DIR=folder)
        chosen = {"kwargs": {"BLOCK": 64}, "num_warps": 4, "num_stages": 2, "num_ctas": 1}
        pathlib.Path(folder, "add_kernel.json").write_text(json.dumps(chosen), encoding="utf-8")
        core()
        from fla.ops.utils.cache import fla_cache_autotune

        def check_configurations_on_file() -> None:
            kernel, seen = fla_cache_autotune(list(CONFIGS), key=["n"])(add_kernel), torch.zeros(1, dtype=torch.int32)
            name = autotune.name_of(kernel)
            assert added(kernel, seen, NATIVE) == (6, 64, config(64)), "as released: FLA reads it from a file"
            runs = {tune: added(kernel, seen, Policy(tune))[2] for tune in range(12)}
            assert runs == {tune: preference(ALL, tune, name)[0] for tune in runs}
            assert len(set(runs.values())) > 2
            assert added(kernel, seen, NATIVE, (deny(name, config(32)),))[2] == config(64), "it is still Triton's choice"
            assert added(kernel, seen, NATIVE, (deny(name, config(64)),))[2] == ALL[0]
            assert added(kernel, seen, NATIVE)[2] == config(64)

        yield "configurations_on_file", check_configurations_on_file

        def check_chunk_kernels() -> None:
            from verify.execution.execute import execute
            from verify.execution.line import Run
            from verify.process.outcome import Verdict

            line = "law=oracle adapter=fla/chunk lengths=65 heads=1 value_heads=1 key_dim=24 value_dim=40 dtype=fp16 state=random"
            runs = []
            for policy in (NATIVE, Policy(1), Policy(2), Policy(1)):
                with using(policy) as used:
                    outcome = execute(Run.parse(line))
                assert outcome.verdict is Verdict.HOLDS, outcome
                runs.append(dict(used))
            native, one, two, again = runs
            lists = known()
            assert set(native) == set(one) == set(two) == {name for name in lists if name.startswith("fla.")}
            assert one == again != two
            several = [name for name, texts in lists.items() if name.startswith("fla.") and len(texts) > 1]
            assert len(several) >= 6, lists
            for name in several:
                for tune, drawn in ((1, one), (2, two)):
                    assert drawn[name] == (preference(lists[name], tune, name)[0],), (name, tune)
            assert sum(one[name] != two[name] for name in several) >= 2

        yield "chunk_kernels", check_chunk_kernels


class Shared(dict):  # type: ignore[type-arg]
    """One cache, whatever is denied."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault("", default)


def instead(owner: Any, name: str, wrong: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, wrong)


@contextlib.contextmanager
def in_both(name: str, wrong: Any) -> Iterator[None]:
    """Replace a function in the module of policies, and where the hook into Triton has imported it."""
    with mock.patch.object(policies, name, wrong), mock.patch.object(autotune, name, wrong):
        yield


order, memory = autotune._Active.order, autotune._Memory
FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], tuple[str, ...]]] = {
    "the first configuration always runs": (
        instead(autotune._Active, "order", lambda self, kernel, declared, offered: list(offered)),
        ("number_decides", "picks_decide", "sweep_finds_what_is_wrong_in_one_configuration"),
    ),
    "a sweep that stays with one number's draws": (
        instead(Policy, "picked", lambda self, kernel: None),
        ("picks_decide", "sweep_finds_what_is_wrong_in_one_configuration"),
    ),
    "nothing else is tried": (
        instead(autotune._Active, "order", lambda self, *args: order(self, *args)[:1]),
        ("what_does_not_fit_is_left_out",),
    ),
    "what does not fit is forgotten": (
        instead(autotune._Memory, "key", lambda *args: object()),
        ("what_does_not_fit_is_left_out", "nothing_fits"),
    ),
    "what does not fit once never does": (instead(autotune._Memory, "key", lambda *args: ()), ("what_does_not_fit_is_left_out",)),
    "one deny-list's choices serve another": (
        instead(autotune, "_Memory", lambda: memory(caches=Shared())),
        ("denied_is_not_chosen",),
    ),
    "denied on every GPU": (instead(Denied, "applies", lambda *args: True), ("denied_is_not_chosen",)),
    "denied for kernels with the same end": (
        lambda: in_both("is_named", lambda kernel, name: kernel.endswith(name)),
        ("denied_is_not_chosen", "picks_decide"),
    ),
    "words in another order are another configuration": (
        lambda: in_both("same_config", lambda one, other: one == other),
        ("denied_is_not_chosen", "picks_decide"),
    ),
    "the kernel is blamed": (
        instead(autotune._Active, "fail", lambda self, message: TuningError(message)),
        ("wrong_pick_is_not_the_kernels_fault",),
    ),
    "a policy of the thread": (
        instead(
            Autotuner,
            "run",
            lambda self, *args, **kwargs: (ours if threading.current_thread() is threading.main_thread() else with_triton_alone)(
                self, *args, **kwargs
            ),
        ),
        ("other_threads_follow",),
    ),
    "Triton decides": (
        instead(Autotuner, "run", with_triton_alone),
        ("native_is_what_triton_decides", "number_decides", "own_pruning_comes_first", "timing_is_tritons", "hooks_are_tritons"),
    ),
}


def failure(check: Callable[[], None]) -> str:
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc(limit=-3)
    return ""


def answer(question: dict[str, Any]) -> dict[str, str]:
    report = {"drawn": ",".join(preference(ALL, 17, "a.kernel"))}
    if question["fla"]:
        report |= {name: failure(check) for name, check in fla_checks()}
    else:
        checks = {name.removeprefix("check_"): value for name, value in globals().items() if name.startswith("check_")}
        report |= {name: failure(check) for name, check in checks.items()}
        for fault, (planted, names) in FAULTS.items():
            for name in names:
                with planted():
                    report[f"{fault}: {name}"] = failure(checks[name])
        # That they failed was the faults' doing, not what was left behind.
        report |= {name: report[name] or failure(check) for name, check in checks.items()}
    return report
