"""Decides how large the pools may be.

Owns the rules from free memory to numbers of pages; does not allocate. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from manylora.config.declaring import ConfigError

if TYPE_CHECKING:
    from manylora.devices.device import Device  # imports torch

SMALLEST_POOL_PAGES = 4
"""The fewest pages of a pool: room for a small adapter and a few tokens. With fewer, nothing useful runs."""

PRISTINE_SHARE = 0.15
"""Where a copy of the base's weights takes more than this share of the pool, it goes to the host by
default."""

_COPY = "a copy of the base's weights"
_CUDA_SHARE = 0.90
_CPU_SHARE, _CPU_LARGEST_BYTES = 0.25, 4 * 2**30
_HOST_SHARE = {"cpu": 0.25, "cuda": 0.5}
_HOST_LARGEST_BYTES = {"cpu": 4 * 2**30, "cuda": 64 * 2**30}


def pool_bytes(
    device: Device,
    asked: int | None,
    activation_bytes: int,
    pristine_bytes: int = 0,
    share: float | None = None,
) -> int:
    """Return the bytes for the pool. They are the bytes asked for; else the rest of ``share`` of the GPU's
    whole memory; else the device's default share of the free memory.

    ``activation_bytes``: the bytes that a step may need beside the pool. ``pristine_bytes``: the bytes that a
    copy of the base's weights will take on this device. On CUDA both reduce a default. Call it when the
    weights are loaded. Raises ConfigError when the pool that was asked for, or its share, does not fit in the
    free memory.
    """
    free = device.free_bytes()
    if asked is None and share is not None and device.torch_device.type != "cpu":
        asked = max(0, device.share_bytes(share) - activation_bytes - pristine_bytes)
    if asked is not None:
        if asked + pristine_bytes > free:
            beside = f"{_COPY} of {in_mib(pristine_bytes)} beside " if pristine_bytes else ""
            raise ConfigError(
                f"{beside}a pool of {in_mib(asked)} does not fit: {in_mib(free)} are free ({device.name})"
            )
        return asked
    if device.torch_device.type == "cpu":
        return cpu_pool_bytes(free)
    return max(0, int(free * _CUDA_SHARE) - activation_bytes - pristine_bytes)


def pristine_place(
    wanted: str, device: Device, asked_pool: int | None, activation_bytes: int, pristine_bytes: int
) -> Literal["device", "host"]:
    """Decide where a copy of the base's weights goes; ``wanted`` is ``device``, ``host`` or ``auto``. With
    ``auto`` it goes to the device if it takes at most PRISTINE_SHARE of the pool and fits beside it, else to
    the host. On a CPU ``auto`` is the device. Call it when ``pool_bytes`` is due."""
    if wanted == "host":
        return "host"
    if wanted == "device" or device.torch_device.type == "cpu":
        return "device"
    pool = pool_bytes(device, asked_pool, activation_bytes)
    fits = asked_pool is None or asked_pool + pristine_bytes <= device.free_bytes()
    return "device" if fits and pristine_bytes <= PRISTINE_SHARE * pool else "host"


def pool_pages(num_bytes: int, page_bytes: int) -> int:
    """Return how many pages a pool of ``num_bytes`` has. Raises ConfigError for fewer than
    SMALLEST_POOL_PAGES."""
    pages = num_bytes // page_bytes
    if pages < SMALLEST_POOL_PAGES:
        raise ConfigError(
            f"a pool of {in_mib(num_bytes)} holds {pages} pages of {in_mib(page_bytes)}; "
            f"at least {SMALLEST_POOL_PAGES} are needed, {in_mib(SMALLEST_POOL_PAGES * page_bytes)}"
        )
    return pages


def host_pool_pages(
    machine: Device,
    asked: int | None,
    kind: Literal["cpu", "cuda"],
    promised_bytes: int,
    page_bytes: int,
    pristine_bytes: int = 0,
) -> int:
    """Return the pages for the host pool: as many as were asked for, else the default share of the free
    memory.

    ``machine``: the CPU as a device, whatever the engine runs on. ``kind``: the device that the engine runs
    on. ``promised_bytes``: the machine's memory that the device's pool will take as it fills.
    ``pristine_bytes``: the machine's memory that a copy of the base's weights will take; it reduces a default
    where the engine runs on CUDA. Returns 0 when not even one page fits. Raises ConfigError when more is
    asked for than is free, or the copy does not fit.
    """
    free = max(0, machine.free_bytes() - promised_bytes)
    if pristine_bytes > free:
        raise ConfigError(f"{_COPY} of {in_mib(pristine_bytes)} does not fit: {in_mib(free)} are free")
    if asked is None:
        default = host_pool_bytes(free, kind)
        return max(0, default - (pristine_bytes if kind == "cuda" else 0)) // page_bytes
    free -= pristine_bytes
    if asked > free:
        others = [f"the device's pool of {in_mib(promised_bytes)}"] * bool(promised_bytes)
        others += [f"{_COPY} of {in_mib(pristine_bytes)}"] * bool(pristine_bytes)
        beside = f" beside {' and '.join(others)}" if others else ""
        raise ConfigError(f"a host pool of {in_mib(asked)} does not fit: {in_mib(free)} are free{beside}")
    return asked // page_bytes


def in_mib(num_bytes: int) -> str:
    """Format a size for messages."""
    return f"{num_bytes / 2**20:.4g} MiB"


def cpu_pool_bytes(free: int) -> int:
    """Return the default size of the device's pool where the device is a CPU."""
    return min(_CPU_LARGEST_BYTES, int(free * _CPU_SHARE))


def host_pool_bytes(free: int, kind: Literal["cpu", "cuda"]) -> int:
    """Return the default size of the host's pool beside a device of this kind."""
    return min(_HOST_LARGEST_BYTES[kind], int(free * _HOST_SHARE[kind]))
