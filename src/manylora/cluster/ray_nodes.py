"""What Ray's nodes have for replicas, measured once, on each of them, before anything is placed there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from manylora._version import VERSION
from manylora.cluster.adapter_files import model_digest
from manylora.cluster.local import gpus_needed, shared_pools, with_share
from manylora.config import ConfigError, EngineSettings
from manylora.config.cold_start import num_cores
from manylora.devices.free_memory import free_bytes
from manylora.models.errors import ModelError
from manylora.models.source import resolve_model


class RayNodeFacts(msgspec.Struct):
    """A node, by Ray's id. ``model``: the digest of the model's files there, or why there are none, after "?"."""

    id: str
    address: str
    gpus: int
    version: str = ""
    model: str = ""
    free_bytes: int = 0
    threads: int = 1


def measure(node: RayNodeFacts, model: str, folder: str) -> RayNodeFacts:
    """The rest of what is to be known of the node that this runs on. ``folder``: where paths begin."""
    try:
        inside = Path(folder, model)
        digest = model_digest(inside if inside.is_dir() else resolve_model(model))
    except (ConfigError, ModelError, OSError) as error:
        digest = f"?{error}"
    return msgspec.structs.replace(
        node, version=VERSION, model=digest, free_bytes=free_bytes(), threads=num_cores()
    )


class RayNodes:
    """The nodes that replicas may be placed on. Raises ConfigError where these cannot all serve the same model, or
    have too few GPUs."""

    def __init__(
        self,
        nodes: Sequence[RayNodeFacts],
        model: str,
        settings: EngineSettings,
        *,
        most: int,
        at_start: int,
        per_gpu: int,
    ) -> None:
        """``most``: replicas, at any time; ``at_start``: replicas that there must be room for."""
        self._nodes = {node.id: node for node in nodes}
        self._most = most
        self._ranks = settings.tensor_parallel_size
        self._per_gpu = per_gpu
        self._settings = settings
        if not nodes:
            raise ConfigError("Ray has no node that replicas may run on")
        for node in nodes:
            if node.version != VERSION:
                raise ConfigError(
                    f"node {node.address} has manylora {node.version}, and this machine {VERSION}"
                )
            if node.model.startswith("?"):
                raise ConfigError(f"node {node.address} cannot serve the model: {node.model[1:]}")
            if node.model != model:
                raise ConfigError(f"the model on node {node.address} is another one: its files differ")
        if self.most is not None and at_start > self.most:
            needed = gpus_needed(at_start, self._ranks, per_gpu)
            together = f", {self._ranks} of one node each" if self._ranks > 1 else ""
            raise ConfigError(
                f"{at_start} replicas need {needed} GPUs{together}, and Ray has {self.num_gpus}"
            )
        if self.uses_gpus and per_gpu > 1 and self._ranks > 1:
            raise ConfigError(
                "--replicas-per-gpu above 1 does not work with --tensor-parallel-size above 1 on Ray, which gives "
                "parts of one GPU only"
            )
        if self.uses_gpus and per_gpu > 1 and settings.cache.device_pool is None:
            raise ConfigError(
                "--replicas-per-gpu above 1 needs --device-pool: each takes most of a GPU otherwise"
            )

    @property
    def num_gpus(self) -> int:
        return sum(node.gpus for node in self._nodes.values())

    @property
    def uses_gpus(self) -> bool:
        device = self._settings.model.device
        return device == "cuda" or (device == "auto" and self.num_gpus > 0)

    @property
    def most(self) -> int | None:
        """Replicas that there is room for; None: any number."""
        return sum(map(self._room, self._nodes.values())) if self.uses_gpus else None

    def _room(self, node: RayNodeFacts) -> int:
        """For so many replicas the node has GPUs: those of one lie on one node."""
        return self._per_gpu * (node.gpus // self._ranks)

    @property
    def gpus_each(self) -> float:
        """What Ray is to keep for a replica."""
        return self._ranks / self._per_gpu if self.uses_gpus else 0

    def share(self, settings: EngineSettings, node: str, replica: int) -> tuple[EngineSettings, int]:
        """A replica's settings with what is its own on that node, and its CPU threads. Without GPUs all may come
        to be on one node, when the others are gone: the share is for so many."""
        found = self._nodes.get(node) or min(self._nodes.values(), key=lambda each: each.free_bytes)
        count, cores = self._count_and_cores(found)
        kind: Literal["cpu", "cuda"] = "cuda" if self.uses_gpus else "cpu"
        pools = shared_pools(settings, found.free_bytes, count, kind)
        return with_share(settings, pools, replica % count, cores), max(1, cores)

    def _count_and_cores(self, node: RayNodeFacts) -> tuple[int, int]:
        """For how many replicas a node's share is, and the cores of each."""
        count = min(self._most, max(1, self._room(node))) if self.uses_gpus else self._most
        return count, node.threads // count

    @property
    def workerless(self) -> list[str]:
        """Nodes, by address, whose replicas have no cores for CPU workers, where --cold-start cpu needs some."""
        cold_start = self._settings.scheduler.cold_start
        if cold_start.mode != "cpu":
            return []
        nodes = self._nodes.values()
        return sorted(
            node.address for node in nodes if not cold_start.workers_of(self._count_and_cores(node)[1])
        )
