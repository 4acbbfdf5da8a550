"""Which share of free memory the pools take where nothing else is said. Needs no torch."""

from __future__ import annotations

from typing import Literal

_CPU_SHARE, _CPU_LARGEST_BYTES = 0.25, 4 * 2**30
_HOST_SHARE = {"cpu": 0.25, "cuda": 0.5}
_HOST_LARGEST_BYTES = {"cpu": 4 * 2**30, "cuda": 64 * 2**30}


def cpu_pool_bytes(free: int) -> int:
    """The device's pool where that is a CPU."""
    return min(_CPU_LARGEST_BYTES, int(free * _CPU_SHARE))


def host_pool_bytes(free: int, kind: Literal["cpu", "cuda"]) -> int:
    """The host's pool, beside such a device."""
    return min(_HOST_LARGEST_BYTES[kind], int(free * _HOST_SHARE[kind]))
