"""Plans an engine from its settings and config.json, before and after the weights are loaded.

Before loading, it makes the decisions that hold for all ranks, and refuses all that config.json alone shows
to be wrong. After loading, it derives what the policy may use. Owns the defaults that depend on the device
and on the model. Sizes that users give are for all ranks together: each rank holds 1/N of every page, under
the same page ids. Does not load or allocate.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

from manylora.config.cold_start import ColdStartConfig, check_host_pool
from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.config.sections import EngineSettings, lora_sharding_of
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
"""An upper bound on a GPU's memory. The free memory of the ranks' GPUs is known only once they have
loaded."""

_WORKSPACE_BYTES = 512 * 2**20
"""The device memory set aside for libraries' workspaces, kernels' partial results, and fragmentation."""

_SAMPLER_BYTES = 48
"""The sampler's bytes per logit: float32 logits and their copies, int64 weights and running sums, and a
sort's values and indices."""


class RankTask(msgspec.Struct):
    """The task of building a rank, the same for all ranks. ``settings``: adjusted to what the device can do;
    ``count``: the number of ranks; ``activation_bytes``: the memory that a step takes beside weights and
    pool, with captures included, 0 on a CPU; ``graph_bytes``: the memory that captures may hold."""

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
    """The decisions made before weights are read. ``settings``: adjusted to what the device can do;
    ``device``: this process's device, None where each rank has a GPU of its own; ``page``, ``whole``: the
    page shape and the adapter geometry of all ranks together; ``geometry``: that of the first rank's part of
    adapters; ``limits``: the policy's limits with the largest possible pool."""

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
        """Return the task for every rank. ``pads``: whether steps run at fixed sizes; with None, they do
        where the device can capture them and the settings allow it."""
        config, limits = self.config, self.limits
        if pads is None:
            captures = self.device is None or self.device.captures
            pads = captures and self.settings.cuda_graphs != "off"
        captured, activations = graph_bytes(config.num_layers, self.num_ranks), 0
        if self.kind == "cuda":
            activations = activation_bytes(config, self.dtype, limits.max_num_seqs, limits.max_batch_tokens)
            activations += captured if pads else 0
        sizes = limits.max_model_len, activations, captured
        path = None if registry_path is None else str(registry_path)
        is_sharded = self.sharding == "sharded"
        return RankTask(self.settings, self.kind, self.num_ranks, is_sharded, pads, *sizes, path)


class CopyOfWeights(NamedTuple):
    """The place and the size of the copy of the base's weights that merging needs."""

    place: Literal["device", "host"] = "device"
    num_bytes: int = 0

    def on_device(self, kind: Kind) -> int:
        """Return the bytes that the copy takes of the memory from which the device's pool is taken."""
        return self.num_bytes if self.place == "device" or kind == "cpu" else 0

    def on_host(self, kind: Kind) -> int:
        """Return the bytes that the copy takes of the memory from which the host's pool is taken."""
        return self.num_bytes if self.place == "host" or kind == "cpu" else 0


class Loaded(msgspec.Struct, tag=True):
    """A rank's report once its weights are loaded. ``weight_bytes``: the size of its weights, 0 for a single
    rank; ``pool_bytes``: the bytes that its part of the pool may take on a GPU, 0 on a CPU; ``device``: the
    device's name."""

    weight_bytes: int
    pool_bytes: int
    device: str
    copy: CopyOfWeights


def planned(settings: EngineSettings) -> Plan:
    """Plan the engine. Raises ConfigError or ModelError for everything that can be refused before weights are
    read."""
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
    page_args = settings.cache.page_tokens, dtype.itemsize
    page = share.whole_page(*page_args)
    try:
        whole, geometry = share.whole_geometry(*page_args), share.geometry(*page_args)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    most_bytes = settings.cache.device_pool
    if most_bytes is None:
        # No pool can be larger than the memory that is free before the weights are loaded.
        most_bytes = count * _LARGEST_GPU_BYTES if device is None else device.free_bytes()
    limits = policy_limits(settings, config, kind, page, pool_pages(most_bytes, page.page_bytes))
    if count == 1 and config.longest_context > config.max_position_embeddings:
        _log.info(
            "contexts have up to %d tokens, and with --max-model-len up to %d (max_position_embeddings %d)",
            limits.max_model_len, config.longest_context, config.max_position_embeddings,
        )  # fmt: skip
    return Plan(settings, config, kind, count, device, dtype, sharding, page, whole, geometry, limits)


def _device(settings: EngineSettings, config: ModelConfig) -> tuple[Device | None, Kind]:
    """Return ``Plan.device`` and the kind of device. Raises ConfigError where there is no such device or
    there are too few GPUs. Raises ModelError where the model cannot be divided among so many ranks."""
    count, wanted = settings.tensor_parallel_size, settings.model.device
    if count > 1:
        check_count(config, count)
    if count == 1 or wanted == "cpu" or not cuda_is_available():
        device = open_device(wanted)  # raises the reason where there is no such device
        return device, "cuda" if device.torch_device.type == "cuda" else "cpu"
    if count > len(visible_gpus()):
        raise ConfigError(
            f"--tensor-parallel-size {count} needs as many GPUs, and {len(visible_gpus())} can be seen here"
        )
    return None, "cuda"


def with_gates(settings: EngineSettings, kind: Kind, launches_wait: bool) -> EngineSettings:
    """Return the settings with a mode of cold starts that the device supports. Where the user gave no mode,
    the device and the merging mode decide it. Where each launch waits for its end, no step can wait on the
    device for later work, so the mode becomes ``wait``. Copies land in groups of layers only for captured
    steps; without captures they land whole."""
    scheduler = settings.scheduler
    found = scheduler.cold_start.on_device(kind == "cuda" and not launches_wait and not scheduler.merge.is_on)
    if launches_wait and found.num_groups:
        _log.warning("--cold-start is wait, not %s: CUDA_LAUNCH_BLOCKING is set", found.mode)
        found = ColdStartConfig("wait")
    if found.num_groups > 1 and (kind == "cpu" or settings.cuda_graphs == "off"):
        found = dataclasses.replace(found, lands_whole=True)
    return dataclasses.replace(settings, scheduler=dataclasses.replace(scheduler, cold_start=found))


def sized(plan: Plan, loaded: Sequence[Loaded]) -> tuple[PolicyConfig, CopyOfWeights]:
    """Return the policy's limits, now that all weights are loaded, and the place and total size of the copy
    of the base's weights. Raises ConfigError where a pool does not fit or is too small."""
    cache, kind, count, size = plan.settings.cache, plan.kind, plan.num_ranks, plan.page.page_bytes
    is_on_host = any(one.copy.place == "host" for one in loaded)
    copy = CopyOfWeights("host" if is_on_host else "device", sum(one.copy.num_bytes for one in loaded))
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
    """Estimate, generously, the bytes that a step takes beside weights and pool: the widest layer's tensors,
    the sampler's tensors, and workspaces."""
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
    """Return the policy's limits with pools of ``num_pages`` and ``num_host_pages`` pages."""
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
    """Return the longest context in tokens: as asked, else the model's own, limited to what the pool holds
    for one base request.

    Raises ConfigError where the asked length is more than the model or the pool can hold.
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
    """Return the facts that do not change while the engine runs."""
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
    """Return the model's attention shape. A window at least as long as the longest context counts as no
    window."""
    windows = [layer.attention.window for layer in config.layers]
    sees_all = any(window is None or window >= max_model_len for window in windows)
    return AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        dtype,
        sees_all,
        config.attention_scale,
        config.score_cap,
    )
