"""From settings to a worker that is ready to run, and the numbers that the policy is given.

Owns the defaults that depend on the device and on the model, and what happens in which order: everything that
can be refused from config.json alone is refused before weights are read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from manylora.adapters.peft import TextCheck
from manylora.adapters.registry import Registry
from manylora.config import (
    CacheSettings,
    ColdStartConfig,
    ConfigError,
    EngineSettings,
    MergeConfig,
    PolicyConfig,
    check_host_pool,
)
from manylora.devices.device import Device, open_device
from manylora.executor.cold_rows import device_handover
from manylora.executor.cpu_lora import CpuLora, tune
from manylora.executor.graphs import MAX_BYTES as GRAPH_BYTES
from manylora.executor.graphs import GraphLimits, Progress
from manylora.executor.merge_times import measure_merging
from manylora.executor.sizes import (
    Kind,
    activation_bytes,
    attention_shape,
    engine_info,
    policy_limits,
)
from manylora.executor.warm_up import warm_up
from manylora.executor.worker import Worker
from manylora.kernels.ops import Ops
from manylora.kernels.select import compiling_ahead, ops_for
from manylora.kernels.shapes import AdapterGeometry, PageShape, adapter_geometry
from manylora.memory.arena import Arena
from manylora.memory.budget import host_pool_pages, in_mib, pool_bytes, pool_pages, pristine_place
from manylora.memory.host import HostPool
from manylora.memory.pristine import DevicePristine, HostPristine, Pristine, pristine_bytes
from manylora.models.config import read_model_config
from manylora.models.decoder import Decoder
from manylora.models.load import load_model, resolve_dtype
from manylora.models.source import resolve_model
from manylora.models.spec import ModelConfig
from manylora.types import EngineInfo

_log = logging.getLogger(__name__)


def build_worker(
    settings: EngineSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    capture_progress: Progress | None = None,
    registry_path: Path | None = None,
    pads_steps: bool | None = None,
) -> tuple[Worker, PolicyConfig, EngineInfo]:
    """Load the model and take the pools' memory.

    ``progress(done_bytes, total_bytes)``: called while weights load; ``capture_progress(done, total)``: while
    decoding steps are captured. ``registry_path``: the cache of adapter headers, by default in the user's cache
    directory. ``pads_steps``: whether decoding steps run at fixed sizes; None: where the device can capture them
    and the settings allow it. Raises ConfigError or ModelError, in one line.
    """
    plan = _planned(settings)
    settings, device, max_rank = plan.settings, plan.device, plan.settings.adapters.max_adapter_rank
    if pads_steps is None:
        pads_steps = device.captures and settings.cuda_graphs != "off"
    decoder = _loaded(plan, progress)
    worker, host, limits, copy = _with_pools(plan, decoder, registry_path, pads_steps)
    with compiling_ahead(device.torch_device) as rehearse:
        if pads_steps:
            worker.use_graphs(GraphLimits.of(limits, max_rank), limits.num_pages, capture_progress, rehearse)
        if plan.kind == "cuda":
            warm_up(worker, limits, max_rank, rehearse)
    if limits.cold_start.wanted_workers:
        cold_start = _with_cpu_lora(worker, limits.cold_start, host, plan.geometry, device, decoder.ops)
        limits = dataclasses.replace(limits, cold_start=cold_start)
    if limits.merge.is_on:
        times = measure_merging(worker, limits, max_rank, steps_wait=copy.place == "host")
        limits = dataclasses.replace(limits, merge=dataclasses.replace(limits.merge, times=times))
    return worker, limits, engine_info(settings, plan.config, limits, device.name, plan.dtype, copy.num_bytes)


class _Plan(NamedTuple):
    """What follows from settings and config.json alone. ``settings``: as the device can obey them; ``limits``: for
    the largest pool that there could be."""

    settings: EngineSettings
    folder: Path
    config: ModelConfig
    device: Device
    kind: Kind
    dtype: torch.dtype
    page: PageShape
    geometry: AdapterGeometry
    limits: PolicyConfig


def _planned(settings: EngineSettings) -> _Plan:
    """Raises ConfigError or ModelError for all that can be refused before weights are read."""
    folder = resolve_model(settings.model.model)
    config = read_model_config(folder)
    device = open_device(settings.model.device)
    kind: Kind = "cuda" if device.torch_device.type == "cuda" else "cpu"
    settings = with_gates(settings, kind, device.launches_wait)
    dtype = resolve_dtype(settings.model.dtype, kind, config.dtype)
    page = config.page_shape(settings.cache.page_tokens, dtype.itemsize)
    geometry = _geometry(page, config)
    asked_pool = settings.cache.device_pool
    # No pool can be larger than what is free before the weights are there.
    most_pages = pool_pages(device.free_bytes() if asked_pool is None else asked_pool, page.page_bytes)
    limits = policy_limits(settings, config, kind, page, most_pages)
    if config.longest_context > config.max_position_embeddings:
        _log.info(
            "contexts have up to %d tokens, and with --max-model-len up to %d (max_position_embeddings %d)",
            limits.max_model_len, config.longest_context, config.max_position_embeddings,
        )  # fmt: skip
    return _Plan(settings, folder, config, device, kind, dtype, page, geometry, limits)


def _loaded(plan: _Plan, progress: Callable[[int, int], None] | None) -> Decoder:
    """The decoder, with its weights."""
    device, dtype, max_positions = plan.device.torch_device, plan.dtype, plan.limits.max_model_len
    ops = ops_for(device, attention=attention_shape(plan.config, dtype, max_positions))
    _log.info("running on %s with %s kernels", plan.device.name, ops.name)
    decoder = load_model(
        plan.folder,
        ops=ops,
        device=device,
        dtype=dtype,
        load_format=plan.settings.model.load_format,
        max_positions=max_positions,
        progress=progress,
    )
    plan.device.release_memory()
    return decoder


def _with_pools(
    plan: _Plan, decoder: Decoder, registry_path: Path | None, pads_steps: bool
) -> tuple[Worker, HostPool, PolicyConfig, CopyOfWeights]:
    """The worker with its pools, what the policy may use of them, and the copy of the base's weights."""
    settings, device, page, dtype = plan.settings, plan.device, plan.page, plan.dtype
    cache, merge = settings.cache, settings.scheduler.merge
    num_seqs, batch_tokens = plan.limits.max_num_seqs, plan.limits.max_batch_tokens
    activations = activation_bytes(plan.config, dtype, num_seqs, batch_tokens)
    if pads_steps and device.captures:
        activations += GRAPH_BYTES
    copy = copy_of_weights(merge, cache.device_pool, decoder, device, activations)
    num_pages, num_host_pages = _num_pages(cache, device, plan.kind, page, activations, copy)
    limits = policy_limits(settings, plan.config, plan.kind, page, num_pages, num_host_pages)
    # One page more where steps are padded: what padding tokens write goes there.
    arena = Arena(num_pages + pads_steps, page, dtype, device)
    check_host_pool(limits.cold_start, num_host_pages)
    host = HostPool(num_host_pages, page, dtype, device)
    texts = TextCheck(plan.folder, resolve_model(settings.model.tokenizer or settings.model.model))
    worker = Worker(
        decoder,
        arena,
        host,
        plan.geometry,
        device,
        Registry(plan.geometry, decoder.layer_prefix, registry_path, texts),
        settings.adapters.max_adapter_rank,
    )
    if merge.is_on:
        worker.use_merging(copy.made(decoder, device))
    return worker, host, limits, copy


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


def _with_cpu_lora(
    worker: Worker,
    config: ColdStartConfig,
    host: HostPool,
    geometry: AdapterGeometry,
    device: Device,
    ops: Ops,
) -> ColdStartConfig:
    """Start CPU LoRA's threads; what the policy is to know of them."""
    cpu = CpuLora(geometry, host, config.wanted_workers, config.cores_before)
    worker.use_cpu_lora(cpu, device_handover(cpu, ops, device))
    tune(cpu, geometry, host, device.torch_device)
    _log.info("%d CPU threads serve cold requests, %d tokens each", cpu.num_threads, cpu.slice_tokens)
    return dataclasses.replace(config, num_workers=cpu.num_threads)


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

    def made(self, decoder: Decoder, device: Device) -> Pristine:
        weights = [linear.weight for linear in decoder.linears]
        return DevicePristine(weights) if self.place == "device" else HostPristine(weights, device)


def copy_of_weights(
    merge: MergeConfig, asked_pool: int | None, decoder: Decoder, device: Device, activations: int
) -> CopyOfWeights:
    """The one that merging needs of this decoder, beside a pool on this device."""
    if not merge.is_on:
        return CopyOfWeights()
    size = pristine_bytes(linear.weight for linear in decoder.linears)
    place = pristine_place(merge.copy, device, asked_pool, activations, size)
    _log.info("a copy of the base's weights takes %s (%s)", in_mib(size), place)
    return CopyOfWeights(place, size)


def _num_pages(
    cache: CacheSettings, device: Device, kind: Kind, page: PageShape, activations: int, copy: CopyOfWeights
) -> tuple[int, int]:
    """Pages of the device's pool and of the host's."""
    size = page.page_bytes
    beside, share = copy.on_device(kind), cache.gpu_memory_utilization
    num_pages = pool_pages(pool_bytes(device, cache.device_pool, activations, beside, share), size)
    promised = num_pages * size if kind == "cpu" else 0
    machine, of_copy = open_device("cpu"), copy.on_host(kind)
    num_host_pages = host_pool_pages(machine, cache.host_pool, kind, promised, size, of_copy)
    _log.info(
        "the device's pool has %d pages (%s), the host's %d (%s)",
        num_pages,
        in_mib(num_pages * size),
        num_host_pages,
        in_mib(num_host_pages * size),
    )
    return num_pages, num_host_pages


def _geometry(page: PageShape, config: ModelConfig) -> AdapterGeometry:
    try:
        return adapter_geometry(page, config.layer_groups)
    except ValueError as error:
        raise ConfigError(str(error)) from error
