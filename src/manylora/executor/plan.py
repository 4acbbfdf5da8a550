"""What follows from settings and config.json, before weights are read; and what the policy may use once they are.

Owns the defaults that depend on the device and on the model, and all that is decided once for every rank. What can
be refused from config.json alone is refused here. Sizes that users give are of all ranks together: each holds 1/N
of every page, under the same page ids. Does not load or allocate.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from manylora.config import (
    ColdStartConfig,
    ConfigError,
    EngineSettings,
    PolicyConfig,
    check_host_pool,
    lora_sharding_of,
)
from manylora.devices.cuda import cuda_is_available, launches_wait, visible_gpus
from manylora.devices.device import Device, open_device
from manylora.executor.graphs import graph_bytes
from manylora.kernels.flashinfer_attention import AttentionShape
from manylora.kernels.shapes import AdapterGeometry, PageShape, RankPlace
from manylora.memory.budget import host_pool_pages, in_mib, pool_bytes, pool_pages
from manylora.models.config import read_model_config
from manylora.models.load import resolve_dtype
from manylora.models.share import ModelShare, check_count
from manylora.models.source import resolve_model
from manylora.models.spec import ModelConfig
from manylora.types import EngineInfo, RankInfo

Kind = Literal["cpu", "cuda"]

_log = logging.getLogger(__name__)

_LARGEST_GPU_BYTES = 2**40
"""No GPU has more: what is free on the ranks' is known when they have loaded."""

_WORKSPACE_BYTES = 512 * 2**20
"""Libraries' own workspaces, kernels' partial results, fragmentation."""

_SAMPLER_BYTES = 48
"""Per logit: float32 logits and their copies, int64 weights and running sums, a sort's values and indices."""


class RankTask(msgspec.Struct):
    """What a rank is to build, the same for all. ``settings``: as the device can obey them; ``count``: of ranks;
    ``activation_bytes``: what a step takes beside weights and pool, 0 on a CPU; ``graph_bytes``: what captures may
    hold."""

    settings: EngineSettings
    device: Kind
    count: int
    is_sharded: bool
    pads_steps: bool
    max_positions: int
    activation_bytes: int
    graph_bytes: int
    registry_path: str | None


class Plan(NamedTuple):
    """``settings``: as the device can obey them; ``device``: this process's, None where each rank has a GPU of its
    own; ``page``, ``whole``: of all ranks together; ``geometry``: of the first rank's part of adapters;
    ``limits``: for the largest pool that there could be."""

    settings: EngineSettings
    config: ModelConfig
    kind: Kind
    num_ranks: int
    device: Device | None
    dtype: torch.dtype
    sharding: Literal["sharded", "replicated"]
    page: PageShape
    whole: AdapterGeometry
    geometry: AdapterGeometry
    limits: PolicyConfig

    def task(self, registry_path: Path | None = None, pads: bool | None = None) -> RankTask:
        """``pads``: see ``build_worker``."""
        config, limits = self.config, self.limits
        if pads is None:
            pads = pads_steps(self.settings, self.device is None or self.device.captures)
        captured, activations = graph_bytes(config.num_layers, self.num_ranks), 0
        if self.kind == "cuda":
            activations = activation_bytes(config, self.dtype, limits.max_num_seqs, limits.max_batch_tokens)
            activations += captured if pads else 0
        return RankTask(
            self.settings,
            self.kind,
            self.num_ranks,
            self.sharding == "sharded",
            pads,
            limits.max_model_len,
            activations,
            captured,
            None if registry_path is None else str(registry_path),
        )


class CopyOfWeights(NamedTuple):
    """Where the copy of the base's weights goes that merging needs, and what it takes."""

    place: Literal["device", "host"] = "device"
    num_bytes: int = 0

    def on_device(self, kind: Kind) -> int:
        """What it takes of the memory that the device's pool is taken from."""
        return self.num_bytes if self.place == "device" or kind == "cpu" else 0

    def on_host(self, kind: Kind) -> int:
        """What it takes of the memory that the host's pool is taken from."""
        return self.num_bytes if self.place == "host" or kind == "cpu" else 0


class Loaded(msgspec.Struct, tag=True):
    """What a rank's weights take, and ``pool_bytes``: what its part of the pool may take, where each rank has
    memory of its own. ``weight_bytes``: of one of several ranks; ``device``: its name; ``copy_place``,
    ``copy_bytes``: of the copy of the base's weights."""

    weight_bytes: int
    pool_bytes: int
    device: str
    copy_place: Literal["device", "host"]
    copy_bytes: int


def planned(settings: EngineSettings) -> Plan:
    """Raises ConfigError or ModelError for all that can be refused before weights are read."""
    count = settings.tensor_parallel_size
    config = read_model_config(resolve_model(settings.model.model))
    device, kind = _device(settings, config)
    settings = with_gates(
        settings, kind, kind == "cuda" and launches_wait() if device is None else device.launches_wait
    )
    dtype = resolve_dtype(settings.model.dtype, kind, config.dtype)
    sharding = lora_sharding_of(settings.lora_sharding, count)
    share = ModelShare(
        config, RankPlace(0, count), sharding == "sharded", head_fixed_by=settings.head_fixed_by
    )
    lies = settings.cache.page_tokens, dtype.itemsize
    page = share.whole_page(*lies)
    try:
        whole, geometry = share.whole_geometry(*lies), share.geometry(*lies)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    most_bytes = settings.cache.device_pool
    if most_bytes is None:
        # No pool can be larger than what is free before the weights are there.
        most_bytes = count * _LARGEST_GPU_BYTES if device is None else device.free_bytes()
    limits = policy_limits(settings, config, kind, page, pool_pages(most_bytes, page.page_bytes))
    if count == 1 and config.longest_context > config.max_position_embeddings:
        _log.info(
            "contexts have up to %d tokens, and with --max-model-len up to %d (max_position_embeddings %d)",
            limits.max_model_len, config.longest_context, config.max_position_embeddings,
        )  # fmt: skip
    return Plan(settings, config, kind, count, device, dtype, sharding, page, whole, geometry, limits)


def _device(settings: EngineSettings, config: ModelConfig) -> tuple[Device | None, Kind]:
    """``Plan.device``, and its kind. Raises ConfigError, and ModelError where there are too many ranks."""
    count, wanted = settings.tensor_parallel_size, settings.model.device
    if count > 1:
        check_count(config, count)
        if kind_of(wanted, count) == "cuda":
            return None, "cuda"
        wanted = "cpu"
    device = open_device(wanted)
    return device, "cuda" if device.torch_device.type == "cuda" else "cpu"


def kind_of(wanted: str, count: int) -> Kind:
    """The kind of device of several ranks. Raises ConfigError where there are too few."""
    if wanted == "cpu" or (wanted == "auto" and not cuda_is_available()):
        return "cpu"
    if not cuda_is_available():
        open_device(wanted)  # which says why
    if count > len(visible_gpus()):
        raise ConfigError(
            f"--tensor-parallel-size {count} needs as many GPUs, and {len(visible_gpus())} can be seen here"
        )
    return "cuda"


def pads_steps(settings: EngineSettings, captures: bool) -> bool:
    """Whether decoding steps run at fixed sizes: where the device can capture them and the settings allow it."""
    return captures and settings.cuda_graphs != "off"


def with_gates(settings: EngineSettings, kind: Kind, launches_wait: bool) -> EngineSettings:
    """With the way of cold starts that the device can obey: where each launch waits for its end, no step waits for
    what comes later. Captured steps alone see copies land in groups of layers."""
    scheduler = settings.scheduler
    found = scheduler.cold_start.on_device(kind == "cuda" and not launches_wait and not scheduler.merge.is_on)
    if launches_wait and found.num_groups:
        _log.warning("--cold-start is wait, not %s: CUDA_LAUNCH_BLOCKING is set", found.mode)
        found = ColdStartConfig("wait")
    if found.num_groups > 1 and (kind == "cpu" or settings.cuda_graphs == "off"):
        found = dataclasses.replace(found, lands_whole=True)
    return dataclasses.replace(settings, scheduler=dataclasses.replace(scheduler, cold_start=found))


def sized(plan: Plan, loaded: Sequence[Loaded]) -> tuple[PolicyConfig, CopyOfWeights]:
    """What the policy may use, now that all weights are loaded; where the copy of the base's weights goes.
    Raises ConfigError."""
    cache, kind, count, size = plan.settings.cache, plan.kind, plan.num_ranks, plan.page.page_bytes
    is_on_host = any(one.copy_place == "host" for one in loaded)
    copy = CopyOfWeights("host" if is_on_host else "device", sum(one.copy_bytes for one in loaded))
    pool = count * min(one.pool_bytes for one in loaded)
    if kind == "cpu":
        assert plan.device is not None
        pool = pool_bytes(plan.device, cache.device_pool, 0, copy.on_device(kind))
    num_pages = pool_pages(pool, size)
    promised, of_copy = num_pages * size if kind == "cpu" else 0, copy.on_host(kind)
    machine = open_device("cpu")
    num_host_pages = host_pool_pages(machine, cache.host_pool, kind, promised, size, of_copy)
    pools = num_pages, in_mib(num_pages * size), num_host_pages, in_mib(num_host_pages * size)
    if count == 1:
        _log.info("the device's pool has %d pages (%s), the host's %d (%s)", *pools)
    else:
        way = "%d ranks, adapters %s; the pool has %d pages (%s), the host's %d (%s), 1/%d of each on every rank"
        _log.info(way, count, plan.sharding, *pools, count)
    limits = policy_limits(plan.settings, plan.config, kind, plan.page, num_pages, num_host_pages)
    check_host_pool(limits.cold_start, num_host_pages)
    return limits, copy


def activation_bytes(config: ModelConfig, dtype: torch.dtype, num_seqs: int, batch_tokens: int) -> int:
    """A generous estimate of what a step takes beside weights and pool: the widest layer's tensors, the
    sampler's, and workspaces."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = 6 * config.hidden_size + 3 * qkv + 4 * config.intermediate_size
    layer = batch_tokens * widest * max(dtype.itemsize, 4)
    return layer + num_seqs * config.vocab_size * _SAMPLER_BYTES + _WORKSPACE_BYTES


def policy_limits(
    settings: EngineSettings,
    config: ModelConfig,
    kind: Kind,
    page: PageShape,
    num_pages: int,
    num_host_pages: int = 0,
) -> PolicyConfig:
    """What the policy may use of pools of so many pages."""
    num_seqs, batch_tokens, pipeline_depth = settings.scheduler.limits_on(kind)
    return PolicyConfig(
        num_pages=num_pages,
        page_tokens=page.page_tokens,
        max_model_len=_model_len(settings.model.max_model_len, config, num_pages, page),
        max_num_seqs=num_seqs,
        max_batch_tokens=batch_tokens,
        num_host_pages=num_host_pages,
        page_bytes=page.page_bytes,
        cache=settings.cache.policy,
        admission=settings.scheduler.admission,
        slo_ttft_s=settings.scheduler.slo_ttft_s,
        max_waiting=settings.scheduler.max_waiting,
        max_prefills_per_step=settings.scheduler.max_prefills,
        kept_share=settings.scheduler.kept_share,
        pipeline_depth=pipeline_depth,
        queue=settings.scheduler.queue,
        merge=settings.scheduler.merge,
        cold_start=settings.scheduler.cold_start,
        long_from=config.long_from,
    )


def _model_len(asked: int | None, config: ModelConfig, num_pages: int, page: PageShape) -> int:
    """The longest context: as asked, else the model's own, cut to what one base request finds in the pool.

    Raises ConfigError when what was asked for is more than the model or the pool can hold.
    """
    in_pool = num_pages * page.page_tokens
    if asked is None:
        return min(config.context, in_pool)
    if asked > config.longest_context:
        scaling = "" if config.rope is None else f" (rope type {config.rope.kind})"
        raise ConfigError(
            f"max_model_len {asked} is more than the model's {config.longest_context} positions{scaling}"
        )
    if asked > in_pool:
        pages = -(-asked // page.page_tokens)
        raise ConfigError(
            f"max_model_len {asked} needs a pool of {in_mib(pages * page.page_bytes)}, but it has "
            f"{in_mib(num_pages * page.page_bytes)}, for {in_pool} tokens: lower max_model_len or raise "
            "device_pool"
        )
    return asked


def engine_info(
    plan: Plan, limits: PolicyConfig, loaded: Sequence[Loaded], pristine_bytes: int
) -> EngineInfo:
    """What stays true while the engine lives; see EngineInfo."""
    settings, config, count, device = plan.settings, plan.config, plan.num_ranks, loaded[0].device
    held = [RankInfo(one.weight_bytes, limits.page_bytes // count) for one in loaded]
    return EngineInfo(
        model=settings.model.name,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        max_model_len=limits.max_model_len,
        num_pages=limits.num_pages,
        page_tokens=limits.page_tokens,
        page_bytes=limits.page_bytes,
        device=device if count == 1 else f"{device}, {count} ranks",
        dtype=str(plan.dtype).removeprefix("torch."),
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=limits.max_batch_tokens,
        num_host_pages=limits.num_host_pages,
        cache_policy=limits.cache.policy,
        has_priorities=limits.queue.has_priorities,
        priority_floor=limits.queue.priority_floor,
        pristine_bytes=pristine_bytes,
        ranks=() if count == 1 else tuple(held),
        lora_sharding="" if count == 1 else plan.sharding,
        cold_start=limits.cold_start.mode,
        cold_start_kinds=limits.cold_start.begins(limits.num_host_pages > 0),
        seed=settings.seed,
    )


def attention_shape(config: ModelConfig, dtype: torch.dtype, max_model_len: int) -> AttentionShape:
    """A window as long as the longest context is none."""
    windows = [layer.attention.window for layer in config.layers]
    sees_all = any(window is None or window >= max_model_len for window in windows)
    return AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        dtype,
        sees_all,
        config.own_attention_scale,
        config.score_cap,
    )
