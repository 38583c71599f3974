"""Kernels are compiled without being launched, and each by one process only."""

import multiprocessing
import pathlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from verify.gpu import locks, turns, warmup

triton = pytest.importorskip("triton")


def kernel(x, n):  # type: ignore[no-untyped-def]
    """A source for triton.JITFunction."""


class Kernel:
    """What a launch returns: reading `run` loads it."""

    def __init__(self, *, fits: bool = True) -> None:
        self.fits, self.loaded = fits, 0

    @property
    def run(self) -> Any:
        self.loaded += 1
        if not self.fits:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        return lambda *_: pytest.fail("it was launched")


def test_a_launch_compiles_and_loads_and_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, made = list[tuple[Any, ...]](), Kernel()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        calls.append((args, grid, warmup, kwargs))
        return made

    monkeypatch.setattr(triton.JITFunction, "run", run)
    with warmup.unlaunched():
        assert triton.JITFunction(kernel)[(2,)](1, n=3) is made
    assert (calls, made.loaded) == ([((1,), (2,), True, {"n": 3})], 1)
    assert triton.JITFunction.run is run


def test_a_kernel_that_the_gpu_cannot_hold_is_refused_as_in_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *args, **kwargs: Kernel(fits=False))
    with warmup.unlaunched(), pytest.raises(triton.runtime.errors.OutOfResources):
        triton.JITFunction(kernel)[(1,)]()


def compiles(cache: str, source: str, begin: Any, times: Any) -> None:
    """Compile a kernel in a process of its own, which takes 0.4 s, and tell when."""
    import os

    from triton import compiler

    os.environ["TRITON_CACHE_DIR"] = cache

    def slow(src: Any, target: str) -> str:
        begin_s = time.monotonic()
        time.sleep(0.4)
        times.put((begin_s, time.monotonic()))
        return f"{src.hash()} {target}"

    compiler.compile = slow
    warmup.take_turns()
    warmup.take_turns()
    begin.wait()
    assert compiler.compile(SimpleNamespace(hash=lambda: source), target="sm90") == f"{source} sm90"


@pytest.mark.parametrize(("other", "beside"), [("one", False), ("two", True)])
def test_only_the_same_kernel_waits_for_another_process(tmp_path: pathlib.Path, *, other: str, beside: bool) -> None:
    fresh = multiprocessing.get_context("spawn")
    begin, times = fresh.Barrier(2), fresh.Queue()
    processes = [fresh.Process(target=compiles, args=(str(tmp_path), name, begin, times)) for name in ("one", other)]
    for process in processes:
        process.start()
    (first, end), (second, _) = sorted(times.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert first <= second
    assert (second < end) is beside


def holds(cache: str, held: Any, release: Any) -> None:
    """Compile the kernel "one" in a process of its own, until it gets the signal to end."""
    import os

    from triton import compiler

    os.environ["TRITON_CACHE_DIR"] = cache
    compiler.compile = lambda src: held.set() or release.wait(60)
    warmup.take_turns()
    compiler.compile(SimpleNamespace(hash=lambda: "one"))


def test_a_kernel_that_another_process_compiles_can_be_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    locks._file.cache_clear()
    made = dict[str, Kernel]()
    monkeypatch.setattr(triton.compiler, "compile", lambda src: made.setdefault(src.hash(), Kernel()))
    warmup.take_turns.__wrapped__()

    def run(self: Any, name: str, **_: Any) -> Any:
        return triton.compiler.compile(SimpleNamespace(hash=lambda: name))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    fresh = multiprocessing.get_context("spawn")
    held, release = fresh.Event(), fresh.Event()
    other = fresh.Process(target=holds, args=(str(tmp_path), held, release))
    other.start()
    assert held.wait(60)
    passed = list[str]()
    with warmup.unlaunched(passed):
        assert triton.JITFunction(kernel)[(1,)]("one") is None
        assert triton.JITFunction(kernel)[(1,)]("two") is made["two"]
    assert (passed, [*made]) == (["kernel"], ["two"])
    release.set()
    with warmup.unlaunched():
        assert triton.JITFunction(kernel)[(1,)]("one") is made["one"]
    other.join(60)
    locks._file().close()
    locks._file.cache_clear()


def test_a_cache_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(locks, "triton_cache", lambda: tmp_path / "file")
    locks._file.cache_clear()
    compiled = []
    with warmup._alone(b"kernel"):
        compiled.append("kernel")
    assert compiled == ["kernel"]
    assert turns.taken([1], 0.0) is None


def takes(cache: str, places: tuple[int, ...], held: Any, release: Any) -> None:
    """Hold the first free one of the places in a process of its own, until it gets the signal to end."""
    import os

    os.environ["TRITON_CACHE_DIR"] = cache
    held.put(turns.taken(places, 60.0))
    release.wait(60)


def test_large_cases_of_several_processes_take_turns_and_small_ones_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    locks._file.cache_clear()
    fresh = multiprocessing.get_context("spawn")
    held, release = fresh.Queue(), fresh.Event()
    others = [fresh.Process(target=takes, args=(str(tmp_path), (1, 2), held, release)) for _ in range(2)]
    for other in others:
        other.start()
    assert {held.get(timeout=60) for _ in others} == {1, 2}
    assert turns.taken((1, 2), 0.1) is None
    assert turns.taken((1, 2, 3), 0.0) == 3
    locks.unlock(3)
    monkeypatch.setattr(turns, "WAIT_S", 0.2)
    asked = list[str]()

    def places() -> tuple[int, ...]:
        asked.append("places")
        return 1, 2

    monkeypatch.setattr(turns, "_places", places)
    with turns.turn("cuda", turns.LARGE - 1), turns.turn("cpu", turns.LARGE):
        assert not asked
    with turns.turn("cuda", turns.LARGE):  # nobody releases a place, so it goes on without
        assert asked == ["places"]
    release.set()
    for other in others:
        other.join(60)
    monkeypatch.setattr(turns, "WAIT_S", 60.0)
    with turns.turn("cuda", turns.LARGE):
        taker = fresh.Process(target=takes, args=(str(tmp_path), (1, 2), held, release))
        taker.start()
        assert held.get(timeout=60) == 2
    assert turns.taken((1,), 0.0) == 1, "it was released"
    taker.join(60)
    locks._file().close()
    locks._file.cache_clear()
