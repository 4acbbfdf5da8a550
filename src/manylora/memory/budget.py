"""How large the pools may be.

Owns the rules from free memory to numbers of pages; does not allocate.
"""

from __future__ import annotations

from typing import Literal

from manylora.config import ConfigError
from manylora.devices.device import Device

SMALLEST_POOL_PAGES = 4
"""Room for a small adapter and a few tokens: with less nothing useful runs."""

_CPU_SHARE, _CPU_LARGEST_BYTES = 0.25, 4 * 2**30
_CUDA_SHARE = 0.90
_HOST_SHARE = {"cpu": 0.25, "cuda": 0.5}
_HOST_LARGEST_BYTES = {"cpu": 4 * 2**30, "cuda": 64 * 2**30}


def pool_bytes(device: Device, asked: int | None, activation_bytes: int) -> int:
    """Bytes for the pool: as asked, else the device's default share of what is free now.

    ``activation_bytes``: what a step may need beside the pool. Call it when the weights are loaded. Raises
    ConfigError when more is asked for than is free.
    """
    free = device.free_bytes()
    if asked is not None:
        if asked > free:
            raise ConfigError(
                f"a pool of {in_mib(asked)} does not fit: {in_mib(free)} are free ({device.name})"
            )
        return asked
    if device.torch_device.type == "cpu":
        return min(_CPU_LARGEST_BYTES, int(free * _CPU_SHARE))
    return max(0, int(free * _CUDA_SHARE) - activation_bytes)


def pool_pages(num_bytes: int, page_bytes: int) -> int:
    """How many pages a pool of so many bytes has. Raises ConfigError when that is next to none."""
    pages = num_bytes // page_bytes
    if pages < SMALLEST_POOL_PAGES:
        raise ConfigError(
            f"a pool of {in_mib(num_bytes)} holds {pages} pages of {in_mib(page_bytes)}; "
            f"at least {SMALLEST_POOL_PAGES} are needed, {in_mib(SMALLEST_POOL_PAGES * page_bytes)}"
        )
    return pages


def host_pool_pages(
    machine: Device, asked: int | None, kind: Literal["cpu", "cuda"], promised_bytes: int, page_bytes: int
) -> int:
    """Pages for the host pool: as many as were asked for, else the default share of what is free now.

    ``machine``: the CPU as a device, whatever the engine runs on; ``kind``: what it runs on; ``promised_bytes``:
    what the device's pool will take of the machine's memory as it fills. 0 when not even one page fits. Raises
    ConfigError when more is asked for than is free.
    """
    free = max(0, machine.free_bytes() - promised_bytes)
    if asked is None:
        asked = min(_HOST_LARGEST_BYTES[kind], int(free * _HOST_SHARE[kind]))
    elif asked > free:
        beside = f" beside the device's pool of {in_mib(promised_bytes)}" if promised_bytes else ""
        raise ConfigError(f"a host pool of {in_mib(asked)} does not fit: {in_mib(free)} are free{beside}")
    return asked // page_bytes


def in_mib(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 2**20:.4g} MiB"
