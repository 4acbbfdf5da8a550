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
