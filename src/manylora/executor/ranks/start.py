"""Starts the ranks from the settings, and derives the policy's limits.

Owns the start of the ranks' processes, and the order of the messages to them. The driver's process loads no
model. Nothing is left behind on the system: files have no name, and sockets are pairs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manylora import processes
from manylora.config.declaring import ConfigError
from manylora.config.policy import PolicyConfig
from manylora.config.sections import EngineSettings
from manylora.devices.cuda import visible_gpus
from manylora.executor.build import registry_of, with_merge_times
from manylora.executor.plan import Loaded, RankTask, engine_info, planned, sized
from manylora.executor.ranks.executor import LOOK_S, RankedExecutor, RankProcess, StoppedProcesses
from manylora.executor.ranks.wire import Begin, Channel, Pools, RankFailed, RankLoading, RankReady, RankStatus
from manylora.executor.reading import Inspections
from manylora.types import EngineInfo

_log = logging.getLogger(__name__)

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_MIXING_SUPPORT": "0", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
"""Environment variables of every rank. They turn off multicast between GPUs. They also turn off the separate
memory and ordering of captured exchanges, which a rank does not need, since it issues all its exchanges on
one stream. Gloo uses the loopback interface, since all ranks are on one host."""

_START_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def build_ranks(
    settings: EngineSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    registry_path: Path | None = None,
) -> tuple[RankedExecutor, PolicyConfig, EngineInfo]:
    """Start the ranks, and return their executor, the policy's limits and the engine's information.

    ``progress(done_bytes, total_bytes)`` is called while the first rank's weights load. ``registry_path``:
    the cache of adapter headers, by default in the user's cache directory. Raises ConfigError or ModelError
    with a message of one line, and RuntimeError where a rank ends, is stopped or fails for another reason.
    """
    plan = planned(settings)
    task = plan.task(registry_path)
    with contextlib.ExitStack() as undo:
        ranks = _start(task, undo)
        loaded: list[Loaded] = _receive_all(ranks, Loaded, progress)
        limits, copy = sized(plan, loaded)
        for rank in ranks:
            rank.channel.send(Pools(limits, copy.place))
        _receive_all(ranks, RankReady, None)
        registry = registry_of(task, plan.whole, plan.config.names.layer_prefix)
        max_rank = plan.settings.adapters.max_adapter_rank
        inspections = Inspections(registry, plan.geometry, plan.dtype, max_rank)
        step_timeout_s, num_pages = plan.settings.step_timeout_s, limits.num_pages
        executor = RankedExecutor(ranks, registry, inspections, step_timeout_s, plan.geometry, num_pages)
        undo.pop_all()
        undo.callback(executor.close)
        limits = with_merge_times(executor, limits, max_rank, copy)
        undo.pop_all()
    return executor, limits, engine_info(plan, limits, loaded, copy.num_bytes)


def _start(task: RankTask, undo: contextlib.ExitStack) -> list[RankProcess]:
    """Start all ranks and send each its task. ``undo`` receives a callback that ends them."""
    ranks: list[RankProcess] = []
    num_threads = max(1, torch.get_num_threads() // task.count)
    log_level = logging.getLogger("manylora").getEffectiveLevel()
    undo.callback(_end, ranks)
    # This process keeps the descriptors only until the ranks have theirs. None of the files has a name.
    with contextlib.ExitStack() as files:
        peers_file = os.memfd_create("manylora", os.MFD_CLOEXEC)  # by which the ranks find each other
        files.callback(os.close, peers_file)
        for number in range(task.count):
            ours, theirs = socket.socketpair()
            files.callback(theirs.close)
            passed = theirs.fileno(), peers_file
            gpu = visible_gpus()[number] if task.device == "cuda" else None
            process = _process(theirs.fileno(), passed, num_threads, gpu)
            ranks.append(RankProcess(number, process, Channel(ours)))
        for rank in ranks:
            rank.channel.send(Begin(task, rank.rank, num_threads, log_level, peers_file, os.getpid()))
    return ranks


def _process(
    file: int, passed: tuple[int, ...], num_threads: int, gpu: str | None
) -> subprocess.Popen[bytes]:
    """Start a rank's process. ``file``: the descriptor of its end of the socket pair; ``passed``: all
    descriptors that it inherits; ``gpu``: the only GPU that it sees, None without GPUs."""
    root = Path(__file__).parents[3]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    # These signals are blocked until the rank ignores them. A terminal sends them to all processes, but this
    # process decides when ranks end.
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
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        rank.channel.close()


def _receive_all(
    ranks: list[RankProcess], kind: type[Any], progress: Callable[[int, int], None] | None
) -> list[Any]:
    """Wait for every rank's next message of this kind. Return the messages in the order of the ranks. Raises
    ConfigError where a rank reports that the settings or the model are at fault. Raises RuntimeError where a
    rank fails for another reason, has ended, or is stopped."""
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
