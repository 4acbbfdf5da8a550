"""From settings to ranks that obey, and the numbers that the policy is given.

Owns what is decided once for all ranks: sizes, kernels, how adapters are cut. The driver's process loads no
model. Sizes that users give are of all ranks together: each holds 1/N of every page, under the same page ids,
so the policy decides as for one. Nothing is left behind: memory that is shared has no name, sockets are pairs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from manylora import processes
from manylora.adapters.peft import TextCheck
from manylora.adapters.registry import Registry
from manylora.config import ConfigError, EngineSettings, PolicyConfig, lora_sharding_of
from manylora.devices.cuda import cuda_is_available, launches_wait, visible_gpus
from manylora.devices.device import open_device
from manylora.executor.build import CopyOfWeights, with_gates
from manylora.executor.graphs import graph_bytes
from manylora.executor.inspections import Inspections
from manylora.executor.merge_times import measure_merging
from manylora.executor.ranks.executor import RankedExecutor, RankProcess
from manylora.executor.ranks.watch import LOOK_S, StoppedProcesses
from manylora.executor.ranks.wire import (
    Begin,
    Channel,
    Loaded,
    Pools,
    RankFailed,
    RankLoading,
    RankReady,
    RankStatus,
)
from manylora.executor.sizes import Kind, activation_bytes, engine_info, policy_limits
from manylora.kernels.shapes import AdapterGeometry, PageShape, RankPlace
from manylora.memory.budget import host_pool_pages, in_mib, pool_bytes, pool_pages
from manylora.models.config import read_model_config
from manylora.models.load import resolve_dtype
from manylora.models.share import ModelShare, check_count
from manylora.models.source import resolve_model
from manylora.models.spec import ModelConfig
from manylora.types import EngineInfo, RankInfo

_log = logging.getLogger(__name__)

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_MIXING_SUPPORT": "0", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
"""What every rank runs with: no multicast between GPUs; and captured exchanges without memory and ordering of
their own, which they do not need, since a rank issues all its exchanges on one stream. Ranks are of one host."""


_LARGEST_GPU_BYTES = 2**40
"""No GPU has more: what is free on the ranks' is known when they have loaded."""

_START_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def build_ranks(
    settings: EngineSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    registry_path: Path | None = None,
) -> tuple[RankedExecutor, PolicyConfig, EngineInfo]:
    """Start the ranks and have each load its share. Raises ConfigError or ModelError, in one line.

    ``progress(done_bytes, total_bytes)``: called while the first rank's weights load; the other arguments as of
    ``build_worker``.
    """
    plan = _planned(settings)
    settings, count, merge = plan.settings, plan.num_ranks, plan.settings.scheduler.merge
    with contextlib.ExitStack() as undo:
        ranks = _start(_begin(plan, registry_path), undo)
        loaded: list[Loaded] = _hear_all(ranks, Loaded, progress)
        limits, copy = _sized(plan, loaded)
        for rank in ranks:
            rank.channel.send(Pools(limits, copy.place))
        _hear_all(ranks, RankReady, None)
        model = settings.model
        texts = TextCheck(resolve_model(model.model), resolve_model(model.tokenizer or model.model))
        registry = Registry(plan.whole, plan.config.names.layer_prefix, registry_path, texts)
        max_rank = settings.adapters.max_adapter_rank
        inspections = Inspections(registry, plan.geometry, plan.dtype, max_rank)
        step_timeout_s, num_pages = settings.step_timeout_s, limits.num_pages
        executor = RankedExecutor(ranks, registry, inspections, step_timeout_s, plan.geometry, num_pages)
        undo.pop_all()
        undo.callback(executor.close)
        if merge.is_on:
            times = measure_merging(executor, limits, max_rank, steps_wait=copy.place == "host")
            limits = dataclasses.replace(limits, merge=dataclasses.replace(merge, times=times))
        undo.pop_all()
    held = tuple(RankInfo(one.weight_bytes, limits.page_bytes // count) for one in loaded)
    name = f"{loaded[0].device}, {count} ranks"
    sizes = copy.num_bytes, held, plan.sharding
    return executor, limits, engine_info(settings, plan.config, limits, name, plan.dtype, *sizes)


class _Plan(NamedTuple):
    """What follows from settings and config.json alone, for all ranks. ``settings``: as the devices can obey them;
    ``page``, ``whole``: of all ranks together; ``geometry``: of the first rank's part of adapters; ``limits``: for
    the largest pool that there could be."""

    settings: EngineSettings
    config: ModelConfig
    kind: Kind
    num_ranks: int
    dtype: torch.dtype
    sharding: Literal["sharded", "replicated"]
    page: PageShape
    whole: AdapterGeometry
    geometry: AdapterGeometry
    limits: PolicyConfig


def _planned(settings: EngineSettings) -> _Plan:
    """Raises ConfigError or ModelError for all that can be refused before a rank is started."""
    count = settings.tensor_parallel_size
    config = read_model_config(resolve_model(settings.model.model))
    check_count(config, count)
    kind = kind_of(settings.model.device, count)
    settings = with_gates(settings, kind, kind == "cuda" and launches_wait())
    dtype = resolve_dtype(settings.model.dtype, kind, config.dtype)
    sharding = lora_sharding_of(settings.lora_sharding, count)
    share = ModelShare(config, RankPlace(0, count), sharding == "sharded")
    lies = settings.cache.page_tokens, dtype.itemsize
    page = share.whole_page(*lies)
    try:
        whole, geometry = share.whole_geometry(*lies), share.geometry(*lies)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    most_bytes = settings.cache.device_pool
    if most_bytes is None:
        most_bytes = open_device("cpu").free_bytes() if kind == "cpu" else count * _LARGEST_GPU_BYTES
    limits = policy_limits(settings, config, kind, page, pool_pages(most_bytes, page.page_bytes))
    return _Plan(settings, config, kind, count, dtype, sharding, page, whole, geometry, limits)


def pads_steps(settings: EngineSettings, kind: Kind) -> bool:
    """Whether ranks run steps at fixed sizes and capture them."""
    return kind != "cpu" and settings.cuda_graphs != "off"


def _begin(plan: _Plan, registry_path: Path | None) -> Begin:
    """What every rank is to build, but for what is its own."""
    config, dtype, limits = plan.config, plan.dtype, plan.limits
    is_padded, activations = pads_steps(plan.settings, plan.kind), 0
    captured = graph_bytes(config.num_layers, plan.num_ranks)
    if plan.kind == "cuda":
        activations = activation_bytes(config, dtype, limits.max_num_seqs, limits.max_batch_tokens)
        activations += captured if is_padded else 0
    return Begin(
        settings=plan.settings,
        device=plan.kind,
        rank=0,
        count=plan.num_ranks,
        is_sharded=plan.sharding == "sharded",
        pads_steps=is_padded,
        max_positions=limits.max_model_len,
        activation_bytes=activations,
        graph_bytes=captured,
        num_threads=max(1, torch.get_num_threads() // plan.num_ranks),
        log_level=logging.getLogger("manylora").getEffectiveLevel(),
        peers_file=-1,
        parent=os.getpid(),
        registry_path=None if registry_path is None else str(registry_path),
    )


def _sized(plan: _Plan, loaded: list[Loaded]) -> tuple[PolicyConfig, CopyOfWeights]:
    """What the policy may use, now that the ranks' weights are loaded; where the copy of the base's weights goes.
    Raises ConfigError."""
    machine, cache, count = open_device("cpu"), plan.settings.cache, plan.num_ranks
    is_on_host = any(one.copy_place == "host" for one in loaded)
    copy = CopyOfWeights("host" if is_on_host else "device", sum(one.copy_bytes for one in loaded))
    pool = count * min(one.pool_bytes for one in loaded)
    if plan.kind == "cpu":
        pool = pool_bytes(machine, cache.device_pool, 0, copy.on_device("cpu"))
    size = plan.page.page_bytes
    num_pages = pool_pages(pool, size)
    promised = num_pages * size if plan.kind == "cpu" else 0
    of_copy = copy.on_host(plan.kind)
    num_host_pages = host_pool_pages(machine, cache.host_pool, plan.kind, promised, size, of_copy)
    limits = policy_limits(plan.settings, plan.config, plan.kind, plan.page, num_pages, num_host_pages)
    _log.info(
        "%d ranks, adapters %s; the pool has %d pages (%s), the host's %d (%s), 1/%d of each on every rank",
        count,
        plan.sharding,
        num_pages,
        in_mib(num_pages * size),
        num_host_pages,
        in_mib(num_host_pages * size),
        count,
    )
    return limits, copy


def kind_of(wanted: str, count: int) -> Kind:
    """The kind of device. Raises ConfigError where there are too few."""
    if wanted == "cpu" or (wanted == "auto" and not cuda_is_available()):
        return "cpu"
    if not cuda_is_available():
        open_device(wanted)  # which says why
    if count > len(visible_gpus()):
        raise ConfigError(
            f"--tensor-parallel-size {count} needs as many GPUs, and {len(visible_gpus())} can be seen here"
        )
    return "cuda"


def _start(begin: Begin, undo: contextlib.ExitStack) -> list[RankProcess]:
    """Start all; ``undo`` ends them again."""
    ranks: list[RankProcess] = []
    undo.callback(_end, ranks)
    # Descriptors are this process's only until the ranks have theirs; nothing here has a name to be left behind.
    with contextlib.ExitStack() as files:
        peers_file = os.memfd_create("manylora", os.MFD_CLOEXEC)  # where they meet
        files.callback(os.close, peers_file)
        for number in range(begin.count):
            ours, theirs = socket.socketpair()
            files.callback(theirs.close)
            passed = theirs.fileno(), peers_file
            gpu = visible_gpus()[number] if begin.device == "cuda" else None
            process = _process(theirs.fileno(), passed, begin.num_threads, gpu)
            ranks.append(RankProcess(number, process, Channel(ours)))
        for rank in ranks:
            rank.channel.send(msgspec.structs.replace(begin, rank=rank.rank, peers_file=peers_file))
    return ranks


def _process(
    file: int, passed: tuple[int, ...], num_threads: int, gpu: str | None
) -> subprocess.Popen[bytes]:
    """``gpu``: the only one that the rank sees."""
    root = Path(__file__).parents[3]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    # Blocked until the rank ignores them: a terminal signals all processes, and this one decides when ranks end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _START_ENDS)
    try:
        return processes.start(
            "manylora.executor.ranks.process",
            str(file),
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.process.wait()
        rank.channel.close()


def _hear_all(
    ranks: list[RankProcess], kind: type[Any], progress: Callable[[int, int], None] | None
) -> list[Any]:
    """Every rank's next message of this kind. Raises ConfigError where one cannot go on for its
    settings, and RuntimeError where it cannot for another reason: it has ended, or is stopped."""
    heard: dict[int, Any] = {}
    watch, looks_s = StoppedProcesses([rank.process.pid for rank in ranks]), time.monotonic() + LOOK_S
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.channel.sock, selectors.EVENT_READ, rank)
        while len(heard) < len(ranks):
            spoken = selector.select(max(0.0, looks_s - time.monotonic()))
            if time.monotonic() >= looks_s:
                looks_s = time.monotonic() + LOOK_S
                stopped = watch.look()
                if stopped is not None:
                    raise RuntimeError(f"rank {stopped} has been stopped")
            for key, _ in spoken:
                rank = key.data
                messages = rank.channel.arrived()
                if messages is None:
                    raise RuntimeError(f"rank {rank.rank} ended before it was ready")
                for message in messages:
                    match message:
                        case RankFailed(text, True):
                            raise ConfigError(text)
                        case RankFailed(text):
                            raise RuntimeError(f"rank {rank.rank} could not start: {text}")
                        case RankLoading(done_bytes, total_bytes):
                            if progress is not None:
                                progress(done_bytes, total_bytes)
                        case RankStatus():
                            pass
                        case _:
                            assert isinstance(message, kind), message
                            heard[rank.rank] = message
    return [heard[rank.rank] for rank in ranks]
