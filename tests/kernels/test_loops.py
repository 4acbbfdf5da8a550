"""Compiled loops: kept where that can be, compiled anew where it cannot."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from manylora.kernels import loops


def total(values: np.ndarray) -> float:
    found = 0.0
    for value in values:
        found += value
    return found


def test_a_loop_is_compiled_where_no_folder_may_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in a container that is read-only starts all the same."""
    njit = numba.njit

    def without_folders(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'total': no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", without_folders)
    for decorate in (loops.loop, loops.fast_loop):
        compiled: Any = decorate(total)
        assert compiled(np.arange(4.0)) == 6.0
        assert compiled.signatures, "by Numba"
        assert not loops.is_kept(compiled)


def test_what_an_earlier_run_has_kept_is_known() -> None:
    from manylora.kernels.triton.lora_tables import write_runs

    runs = np.empty((3, 3), dtype=np.int64)
    assert write_runs(np.array([1], np.int32), np.array([2], np.int32), 4, runs) == 3
    assert runs.T.tolist() == [[1, 2, 0], [0, 1, -1], [3, 1, -1]]
    assert loops.is_kept(write_runs)
