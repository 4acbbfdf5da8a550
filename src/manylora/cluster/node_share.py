"""What a replica gets of the machine that it runs on: its share of memory and of CPU threads, its GPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from manylora.config import ConfigError, EngineSettings
from manylora.config.cold_start import num_cores
from manylora.devices.free_memory import free_bytes
from manylora.memory.shares import cpu_pool_bytes, host_pool_bytes

_GPUS = Path("/proc/driver/nvidia/gpus")


def gpus() -> list[str]:
    """The GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    try:
        return [str(number) for number, _ in enumerate(_GPUS.iterdir())]
    except OSError:
        return []


class NodeShare:
    """Measured once, for at most ``most`` replicas."""

    def __init__(self, settings: EngineSettings, most: int, num_at_start: int, per_gpu: int) -> None:
        """Raises ConfigError where there are too few GPUs."""
        self._gpus = [] if settings.model.device == "cpu" else gpus()
        self._per_gpu = per_gpu
        if settings.model.device == "cuda" and num_at_start > per_gpu * len(self._gpus):
            raise ConfigError(
                f"{num_at_start} replicas need {-(-num_at_start // per_gpu)} GPUs, and there are "
                f"{len(self._gpus)}"
            )
        if self._gpus and num_at_start > per_gpu * len(self._gpus):
            raise ConfigError(
                f"{num_at_start} replicas do not fit on {len(self._gpus)} GPUs: --replicas-per-gpu shares them, "
                "--device cpu does without"
            )
        if self._gpus and per_gpu > 1 and settings.cache.device_pool is None:
            raise ConfigError(
                "--replicas-per-gpu above 1 needs --device-pool: each takes most of a GPU otherwise"
            )
        self._cores = num_cores() // most
        self._settings = _shared_out(settings, most, "cuda" if self._gpus else "cpu")

    @property
    def most_replicas(self) -> int | None:
        """How many fit here; None: any number."""
        return self._per_gpu * len(self._gpus) if self._gpus else None

    def settings(self, replica: int) -> EngineSettings:
        """A replica's."""
        scheduler = self._settings.scheduler
        scheduler = dataclasses.replace(
            scheduler, cold_start=scheduler.cold_start.share(replica, self._cores)
        )
        return dataclasses.replace(self._settings, scheduler=scheduler)

    def environment(self, replica: int) -> Mapping[str, str]:
        """What a replica's process is to have in its environment."""
        found = {}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, self._cores))
        if self._gpus:
            found["CUDA_VISIBLE_DEVICES"] = self._gpus[replica // self._per_gpu % len(self._gpus)]
        return found


def _shared_out(settings: EngineSettings, most: int, kind: str) -> EngineSettings:
    """Pools that would take a share of what is free take one replica's part of that share."""
    cache, free = settings.cache, free_bytes()
    device_pool, host_pool = cache.device_pool, cache.host_pool
    if kind == "cpu" and device_pool is None:
        device_pool = cpu_pool_bytes(free) // most
    if host_pool is None:
        host_pool = host_pool_bytes(free, "cpu" if kind == "cpu" else "cuda") // most
    shared = dataclasses.replace(cache, device_pool=device_pool, host_pool=host_pool)
    return dataclasses.replace(settings, cache=shared)
