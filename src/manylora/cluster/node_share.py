"""What a replica gets of the machine that it runs on: its share of memory and of CPU threads, its GPUs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from manylora.config import ConfigError, EngineSettings, check_workers
from manylora.config.cold_start import num_cores
from manylora.devices.free_memory import free_bytes
from manylora.memory.shares import cpu_pool_bytes, host_pool_bytes

_GPUS, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")


def gpus() -> list[str]:
    """The GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    # A container may have one of them alone, or see in one the GPUs of the whole machine.
    counts = [len(list(_GPUS.glob("*"))), len(list(_DEVICES.glob("nvidia[0-9]*")))]
    return [str(number) for number in range(min(filter(None, counts), default=0))]


class NodeShare:
    """Measured once, for at most ``most`` replicas."""

    def __init__(self, settings: EngineSettings, most: int, num_at_start: int, per_gpu: int) -> None:
        """Raises ConfigError where there are too few GPUs, or cores for CPU workers."""
        self._ranks = settings.tensor_parallel_size
        self._gpus = [] if settings.model.device == "cpu" else gpus()
        self._per_gpu = per_gpu
        needed = gpus_needed(num_at_start, self._ranks, per_gpu)
        if settings.model.device == "cuda" and needed > len(self._gpus):
            raise ConfigError(f"{num_at_start} replicas need {needed} GPUs, and there are {len(self._gpus)}")
        if self._gpus and needed > len(self._gpus):
            raise ConfigError(
                f"{num_at_start} replicas do not fit on {len(self._gpus)} GPUs: --replicas-per-gpu shares them, "
                "--device cpu does without"
            )
        if self._gpus and per_gpu > 1 and settings.cache.device_pool is None:
            raise ConfigError(
                "--replicas-per-gpu above 1 needs --device-pool: each takes most of a GPU otherwise"
            )
        self._cores = num_cores() // most
        check_workers(settings.scheduler.cold_start, self._cores)
        self._pools = shared_pools(settings, free_bytes(), most, "cuda" if self._gpus else "cpu")

    @property
    def _room(self) -> int:
        """For so many replicas there are GPUs."""
        return self._per_gpu * (len(self._gpus) // self._ranks)

    @property
    def most_replicas(self) -> int | None:
        """How many fit here; None: any number."""
        return self._room if self._gpus else None

    def share(self, settings: EngineSettings, replica: int) -> EngineSettings:
        """A replica's settings with its own pools and CPU workers."""
        return with_share(settings, self._pools, replica, self._cores)

    def environment(self, replica: int) -> Mapping[str, str]:
        """What a replica's process is to have in its environment; its ranks share the threads and the GPUs."""
        found = {}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, self._cores))
        if self._gpus:
            first = self._ranks * (replica % self._room // self._per_gpu)
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[first : first + self._ranks])
        return found


def gpus_needed(replicas: int, ranks: int, per_gpu: int) -> int:
    """How many GPUs so many replicas of so many ranks take where ``per_gpu`` replicas share each."""
    return ranks * -(-replicas // per_gpu)


def shared_pools(
    settings: EngineSettings, free: int, count: int, kind: Literal["cpu", "cuda"]
) -> tuple[int | None, int]:
    """The pools, on the device and the host, of one of ``count`` replicas where this many bytes are free: those
    that are given, else its part of what one alone would take. None: it measures its GPU itself."""
    device_pool, host_pool = settings.cache.device_pool, settings.cache.host_pool
    if kind == "cpu" and device_pool is None:
        device_pool = cpu_pool_bytes(free) // count
    if host_pool is None:
        host_pool = host_pool_bytes(free, kind) // count
    return device_pool, host_pool


def with_share(
    settings: EngineSettings, pools: tuple[int | None, int], replica: int, cores: int
) -> EngineSettings:
    """The same settings with these pools, and with the CPU workers of a replica that has so many cores."""
    scheduler = settings.scheduler
    return dataclasses.replace(
        settings,
        cache=dataclasses.replace(settings.cache, device_pool=pools[0], host_pool=pools[1]),
        scheduler=dataclasses.replace(scheduler, cold_start=scheduler.cold_start.share(replica, cores)),
    )
