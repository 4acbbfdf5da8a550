"""Builds a rank, or the only worker, from its task to the point where it is ready to run.

Owns the order of the steps: load the share of the weights, take the pools, make the worker, then compile,
capture and measure before the first command. A single rank is built in this process. Several ranks are built
by the same steps, in processes of their own (``ranks.start``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from manylora.adapters.peft import TextCheck
from manylora.adapters.registry import Registry
from manylora.config.cold_start import ColdStartConfig
from manylora.config.policy import PolicyConfig
from manylora.config.sections import EngineSettings
from manylora.devices.device import Device
from manylora.devices.peers import Peers
from manylora.executor.cold_rows import device_handover
from manylora.executor.cpu_lora import CpuLora, tune
from manylora.executor.graphs import GraphLimits, Progress, Rehearse
from manylora.executor.merging import DevicePristine, HostPristine, RankedMerging, pristine_bytes
from manylora.executor.parts import SMALL_MODEL_BYTES, StepParts
from manylora.executor.plan import (
    CopyOfWeights,
    Loaded,
    RankTask,
    attention_shape,
    engine_info,
    planned,
    sized,
)
from manylora.executor.probing import Pretends, measure_merging, warm_up
from manylora.executor.sampling import RankedSampling
from manylora.executor.worker import Worker
from manylora.kernels.select import compiling_ahead, ops_for
from manylora.kernels.shapes import AdapterGeometry, RankPlace
from manylora.memory.budget import in_mib, pool_bytes, pristine_place
from manylora.memory.pool import Arena, HostPool
from manylora.models.config import read_model_config
from manylora.models.decoder import RankedModel
from manylora.models.load import load_model, resolve_dtype, share_bytes
from manylora.models.model import Model
from manylora.models.share import ModelShare
from manylora.models.source import resolve_model
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
    """Load the model, take the pools' memory, and prepare the worker of a single rank.

    Returns the worker, the policy's limits and the engine's information.
    ``progress(done_bytes, total_bytes)`` is called while weights load, ``capture_progress(done, total)``
    while steps are captured. ``registry_path``: the cache of adapter headers, by default in the user's cache
    directory. ``pads_steps``: whether steps run at fixed sizes; with None, they do where the device can
    capture them and the settings allow it. Raises ConfigError or ModelError with a message of one line.
    """
    plan = planned(settings)
    assert plan.device is not None
    rank = RankBuild(plan.task(registry_path, pads_steps), RankPlace(), plan.device, progress=progress)
    loaded = [rank.loaded()]
    limits, copy = sized(plan, loaded)
    worker = rank.worker(limits, copy)
    rank.prepare(worker, limits, capture_progress)
    if limits.cold_start.wanted_workers:
        limits = dataclasses.replace(limits, cold_start=rank.with_cpu_lora(worker, limits.cold_start))
    limits = with_merge_times(worker, limits, rank.max_adapter_rank, copy)
    return worker, limits, engine_info(plan, limits, loaded, copy.num_bytes)


def with_merge_times(
    executor: Pretends, limits: PolicyConfig, max_adapter_rank: int | None, copy: CopyOfWeights
) -> PolicyConfig:
    """Return the limits with the measured times of switches and steps, or unchanged where merging is off."""
    merge = limits.merge
    if not merge.is_on:
        return limits
    times = measure_merging(executor, limits, max_adapter_rank, steps_wait=copy.place == "host")
    return dataclasses.replace(limits, merge=dataclasses.replace(merge, times=times))


def registry_of(task: RankTask, whole: AdapterGeometry, layer_prefix: str) -> Registry:
    """Return a registry that inspects adapters for the task's model. ``whole``: the geometry of all ranks
    together."""
    model = task.settings.model
    texts = TextCheck(resolve_model(model.model), resolve_model(model.tokenizer or model.model))
    path = None if task.registry_path is None else Path(task.registry_path)
    return Registry(whole, layer_prefix, path, texts)


class RankBuild:
    """The construction of one rank: it loads the share of the weights at once, and makes the worker once the
    pools' sizes are known."""

    def __init__(
        self,
        task: RankTask,
        place: RankPlace,
        device: Device,
        peers: Peers | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the share of the weights. ``peers``: the connection to the other ranks, None for a single
        rank. Raises ConfigError or ModelError."""
        self._task = task
        self._device = device
        self._peers = peers
        settings = task.settings
        folder = resolve_model(settings.model.model)
        self._config = read_model_config(folder)
        self._share = ModelShare(self._config, place, task.is_sharded, head_fixed_by=settings.head_fixed_by)
        self._ranked = None if peers is None else RankedModel(self._share, peers)
        self._dtype = resolve_dtype(settings.model.dtype, task.device, self._config.dtype)
        shape = attention_shape(self._share.config, self._dtype, task.max_positions)
        ops = ops_for(device.torch_device, attention=shape)
        if peers is None:
            _log.info("running on %s with %s kernels", device.name, ops.name)
        self._decoder: Model = load_model(
            folder,
            ops=ops,
            device=device.torch_device,
            dtype=self._dtype,
            load_format=settings.model.load_format,
            max_positions=task.max_positions,
            progress=progress,
            ranked=self._ranked,
        )
        device.release_memory()
        self._page_args = settings.cache.page_tokens, self._dtype.itemsize
        self._geometry = self._share.geometry(*self._page_args)

    @property
    def max_adapter_rank(self) -> int | None:
        return self._task.settings.adapters.max_adapter_rank

    def loaded(self) -> Loaded:
        """Return the sizes of the loaded weights, and the room for the pool, for the driver. Raises
        ConfigError where there is no room."""
        task, device, decoder, held = self._task, self._device, self._decoder, 0
        cache = task.settings.cache
        own = None if cache.device_pool is None else -(-cache.device_pool // task.count)
        copy = self._copy_of_weights(own)
        if task.device == "cuda":
            of_copy, share = copy.on_device("cuda"), cache.gpu_memory_utilization
            held = pool_bytes(device, own, task.activation_bytes, of_copy, share)
        ranked = self._ranked
        size = 0 if ranked is None else share_bytes(decoder.config, decoder.ops, ranked, self._dtype)
        return Loaded(size, held, device.name, copy)

    def _copy_of_weights(self, own_pool: int | None) -> CopyOfWeights:
        """Return the place and size of the copy that merging needs of this decoder's weights. ``own_pool``:
        the bytes asked for this rank's pool on the device."""
        merge, device = self._task.settings.scheduler.merge, self._device
        if not merge.is_on:
            return CopyOfWeights()
        size = pristine_bytes(linear.weight for linear in self._decoder.linears)
        place = pristine_place(merge.copy, device, own_pool, self._task.activation_bytes, size)
        _log.info("a copy of the base's weights takes %s (%s)", in_mib(size), place)
        return CopyOfWeights(place, size)

    def worker(self, limits: PolicyConfig, copy: CopyOfWeights) -> Worker:
        """Take the pools' memory and make the worker. Raises ConfigError where the system refuses the
        memory."""
        task, device, dtype, decoder = self._task, self._device, self._dtype, self._decoder
        page = self._share.config.page_shape(*self._page_args)
        # Padded steps need one more page, which receives the writes of padding tokens.
        arena = Arena(limits.num_pages + task.pads_steps, page, dtype, device)
        self._host = HostPool(limits.num_host_pages, page, dtype, device)
        sampling: RankedSampling | None = None
        if self._peers is not None:
            places = [RankPlace(rank, task.count) for rank in range(task.count)]
            vocabs = [ModelShare(self._config, place, task.is_sharded).vocab for place in places]
            sampling = RankedSampling(self._peers, vocabs)
        geometry = self._share.whole_geometry(*self._page_args)
        registry = registry_of(task, geometry, decoder.config.names.layer_prefix)
        worker = Worker(
            decoder, arena, self._host, self._geometry, device, registry, self.max_adapter_rank, sampling
        )
        weights = [linear.weight for linear in decoder.linears]
        num_threads, size = torch.get_num_threads(), sum(weight.data.nbytes for weight in weights)
        runs_eagerly = task.device == "cpu" and not task.pads_steps and self._peers is None
        if runs_eagerly and num_threads > 1 and size <= SMALL_MODEL_BYTES:
            worker.use_parts(StepParts(num_threads))
        if task.settings.scheduler.merge.is_on:
            is_here = copy.place == "device"
            pristine = DevicePristine(weights) if is_here else HostPristine(weights, device)
            merging: RankedMerging | None = None
            if self._peers is not None:
                share = ModelShare(self._config, self._share.place, is_sharded=False)
                merging = RankedMerging(self._peers, share.geometry(*self._page_args), decoder.linears)
            worker.use_merging(pristine, merging)
        return worker

    def prepare(self, worker: Worker, limits: PolicyConfig, progress: Progress | None = None) -> None:
        """Compile kernels, capture steps and warm up. ``progress(done, total)`` is called while steps are
        captured."""
        task, peers, max_rank = self._task, self._peers, self.max_adapter_rank
        with compiling_ahead(self._device.torch_device) as ahead:
            rehearse = ahead if peers is None else in_turn(ahead, peers)
            if task.pads_steps:
                graphs = GraphLimits.of(limits, max_rank, task.graph_bytes)
                worker.use_graphs(graphs, progress, rehearse, peers)
            if task.device == "cuda":
                warm_up(worker, limits, max_rank, rehearse)

    def with_cpu_lora(self, worker: Worker, config: ColdStartConfig) -> ColdStartConfig:
        """Start CPU LoRA's threads for the worker, and return the configuration with their number."""
        geometry, host, device = self._geometry, self._host, self._device
        cpu = CpuLora(geometry, host, config.wanted_workers, config.cores_before)
        worker.use_cpu_lora(cpu, device_handover(cpu, self._decoder.ops, device))
        tune(cpu, geometry, host, device.torch_device)
        _log.info("%d CPU threads serve cold requests, %d tokens each", cpu.num_threads, cpu.slice_tokens)
        return dataclasses.replace(config, num_workers=cpu.num_threads)


def in_turn(rehearse: Rehearse | None, peers: Peers) -> Rehearse | None:
    """Wrap ``rehearse`` for one of several ranks, all of which call the result. The first rank compiles its
    kernels; then each other rank compiles the kernels that it still lacks. The ranks synchronise in between.
    Rehearsals leave out exchanges, since another rank may have nothing to rehearse."""
    if rehearse is None:
        return None

    def rehearsed(steps: Sequence[Callable[[], object]], num_decisive: int) -> bool:
        with peers.leaving_out():
            is_new = peers.rank == 0 and rehearse(steps, num_decisive)
        peers.gather(torch.zeros(1, dtype=torch.int64), "start")[0].item()
        if peers.rank == 0:
            return is_new
        with peers.leaving_out():
            return rehearse(steps, num_decisive)

    return rehearsed
