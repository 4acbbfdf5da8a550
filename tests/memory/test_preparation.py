"""The meter of time spent on compiling and capturing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manylora.devices.preparation import PREPARATION, PreparationMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_it_counts_what_goes_on_once_however_it_is_nested() -> None:
    clock = Clock()
    meter = PreparationMeter(clock)
    assert meter.seconds() == 0
    with meter.running():
        clock.now_s += 1
        assert meter.seconds() == 1
        with meter.running():
            clock.now_s += 1
        meter.begin()
        clock.now_s += 1
        # A compiler that fails does not say so: the block's end ends it.
    clock.now_s += 5
    assert meter.seconds() == 3
    meter.begin()
    clock.now_s += 1
    meter.give_up()
    meter.give_up()
    meter.end()
    clock.now_s += 5
    assert meter.seconds() == 4


def test_threads_that_prepare_side_by_side_count_once() -> None:
    clock = Clock()
    meter = PreparationMeter(clock)
    begun, may_end = threading.Barrier(3), threading.Event()

    def prepare() -> None:
        with meter.running():
            begun.wait()
            may_end.wait()

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    clock.now_s += 3
    may_end.set()
    for thread in threads:
        thread.join()
    clock.now_s += 3
    assert meter.seconds() == 3


def test_triton_reports_what_it_compiles_and_other_hooks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    from manylora.kernels.triton import launch

    seen: list[str] = []

    def hook(name: str) -> Callable[..., bool]:
        def called(**what: Any) -> bool:
            seen.append(name)
            return False

        return called

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook("before"))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook("after"))
    launch.report_compilation.__wrapped__()
    before = PREPARATION.seconds()
    assert knobs.runtime.jit_cache_hook(key="k") is False
    knobs.runtime.jit_post_compile_hook(key="k")
    assert PREPARATION.seconds() > before
    after = PREPARATION.seconds()
    assert after == PREPARATION.seconds()
    assert seen == ["before", "after"]


def test_numba_reports_what_it_compiles() -> None:
    import numba

    import manylora.kernels.loops  # noqa: F401  # registers

    @numba.njit  # type: ignore[untyped-decorator]  # numba has no types
    def double(values: np.ndarray) -> np.ndarray:
        return values * 2

    before = PREPARATION.seconds()
    double(np.ones(3))
    assert PREPARATION.seconds() > before
    after = PREPARATION.seconds()
    double(np.ones(4))
    assert after == PREPARATION.seconds()
