"""One rank: a process with an ordinary worker on its share of the model, which obeys what the driver's
process writes.

``python -m manylora.executor.ranks.process FD``: a socket to the driver's process, whose end is this one's
too, whatever it is doing. Owns the order build, obey, answer. Decides nothing.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from manylora.adapters.peft import AdapterSpec
from manylora.adapters.registry import Registry
from manylora.config import ConfigError, PolicyConfig
from manylora.devices.device import Device, open_device
from manylora.devices.group_peers import GroupPeers
from manylora.devices.peers import Peers, Purpose
from manylora.devices.preparation import PREPARATION
from manylora.executor.build import CopyOfWeights, copy_of_weights
from manylora.executor.graphs import Bucket, GraphLimits
from manylora.executor.ranked_merging import RankedMerging
from manylora.executor.ranked_sampling import RankedSampling
from manylora.executor.ranks.rehearsing import in_turn
from manylora.executor.ranks.timing import exchange_seconds
from manylora.executor.ranks.wire import (
    Begin,
    Channel,
    End,
    ExchangeTimed,
    ForgetCopies,
    Learn,
    Loaded,
    Pools,
    Pretend,
    RankFailed,
    RankLoading,
    RankReady,
    RankStatus,
    StepAnswer,
    TimeExchange,
)
from manylora.executor.sizes import attention_shape
from manylora.executor.warm_up import warm_up
from manylora.executor.worker import Worker
from manylora.kernels.select import compiling_ahead, ops_for
from manylora.kernels.shapes import RankPlace
from manylora.memory.arena import Arena
from manylora.memory.budget import pool_bytes
from manylora.memory.host import HostPool
from manylora.models.config import read_model_config
from manylora.models.decoder import Decoder, RankedModel
from manylora.models.load import load_model, resolve_dtype, share_bytes
from manylora.models.share import ModelShare
from manylora.models.source import resolve_model
from manylora.models.spec import ModelConfig, ModelError
from manylora.protocol import DeviceEvent, RunStep, StepResult
from manylora.types import RankTraffic

_log = logging.getLogger(__name__)

_PROGRESS_BYTES = 2**26
_STATUS_S = 0.25
LOG_FORMAT = "%(asctime)s %(levelname)s rank {rank}: %(message)s"


def main(file: int) -> int:
    """The process; gives its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the driver's process, which decides when ranks end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    channel = Channel(socket.socket(fileno=file))
    begin = channel.receive()
    if not isinstance(begin, Begin):
        return 1
    logging.basicConfig(stream=sys.stderr, level=begin.log_level, format=LOG_FORMAT.format(rank=begin.rank))
    try:
        rank = _Rank(begin, channel)
    except (ConfigError, ModelError) as error:
        channel.send(RankFailed(str(error), is_user_error=True))
        return 2
    except Exception as error:
        _log.exception("rank %d could not start", begin.rank)
        channel.send(RankFailed(f"{type(error).__name__}: {error}"))
        return 1
    try:
        rank.obey_all()
    except Exception as error:
        _log.exception("rank %d failed", begin.rank)
        with contextlib.suppress(OSError):
            channel.send(RankFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


class _Begun(NamedTuple):
    """A step on its way: its rows, the bucket that it was captured for, its exchanges, and a checksum of all
    exchanges until its last. ``issued``: of the device."""

    step: int
    num_rows: int
    bucket: Bucket | None
    num_exchanges: int
    digest: int
    issued: object


def _peers(begin: Begin, device: Device) -> Peers:
    return GroupPeers(begin.peers_file, begin.rank, begin.count, device.torch_device)


class _OwnModel(NamedTuple):
    """A rank's share of the model, with its weights. ``config``: of the whole."""

    config: ModelConfig
    ranked: RankedModel
    dtype: torch.dtype
    decoder: Decoder


class _Rank:
    """Raises ConfigError and ModelError where the settings are at fault."""

    def __init__(self, begin: Begin, channel: Channel) -> None:
        self._channel = channel
        self._number = begin.rank
        torch.set_num_threads(begin.num_threads)
        self._device = device = open_device(begin.device)
        self._peers = _peers(begin, device)
        self._worker: Worker | None = None
        self._begun: collections.deque[_Begun] = collections.deque()  # oldest first
        os.close(begin.peers_file)
        threading.Thread(target=self._beat, args=(begin.parent,), daemon=True).start()

        self._is_captured = begin.pads_steps
        loaded = self._loaded(begin)
        self._dtype = loaded.dtype
        channel.send(self._sizes(begin, loaded))
        pools = channel.receive()
        if not isinstance(pools, Pools):
            _leave()
        self._worker = worker = self._made(begin, loaded, pools)
        self._prepare(begin, worker, pools.limits)
        worker.connect(self._tell)
        channel.send(RankReady())

    def _prepare(self, begin: Begin, worker: Worker, limits: PolicyConfig) -> None:
        """Compile, capture and warm up, as one rank does."""
        max_rank = begin.settings.adapters.max_adapter_rank
        with compiling_ahead(self._device.torch_device) as ahead:
            rehearse = in_turn(ahead, self._peers)
            if begin.pads_steps:
                graphs = GraphLimits.of(limits, max_rank, begin.graph_bytes), limits.num_pages
                worker.use_graphs(*graphs, rehearse=rehearse, peers=self._peers)
            if begin.device == "cuda":
                warm_up(worker, limits, max_rank, rehearse)

    def _loaded(self, begin: Begin) -> _OwnModel:
        settings, device = begin.settings, self._device
        folder = resolve_model(settings.model.model)
        config = read_model_config(folder)
        share = ModelShare(config, RankPlace(begin.rank, begin.count), begin.is_sharded)
        ranked = RankedModel(share, self._peers)
        dtype = resolve_dtype(settings.model.dtype, begin.device, config.dtype)
        decoder = load_model(
            folder,
            ops=ops_for(
                device.torch_device,
                attention=attention_shape(share.config, dtype, begin.max_positions),
            ),
            device=device.torch_device,
            dtype=dtype,
            load_format=settings.model.load_format,
            max_positions=begin.max_positions,
            progress=self._progress(),
            ranked=ranked,
        )
        device.release_memory()
        return _OwnModel(config, ranked, dtype, decoder)

    def _sizes(self, begin: Begin, loaded: _OwnModel) -> Loaded:
        """What the driver's process is to know of them. Raises ConfigError where there is no room."""
        device, asked, held = self._device, begin.settings.cache.device_pool, 0
        own = None if asked is None else -(-asked // begin.count)
        merge = begin.settings.scheduler.merge
        copy = copy_of_weights(merge, own, loaded.decoder, device, begin.activation_bytes)
        if begin.device == "cuda":
            share = begin.settings.cache.gpu_memory_utilization
            held = pool_bytes(device, own, begin.activation_bytes, copy.on_device("cuda"), share)
        size = share_bytes(loaded.decoder.config, loaded.decoder.ops, loaded.ranked, loaded.dtype)
        return Loaded(size, held, device.name, copy.place, copy.num_bytes)

    def _made(self, begin: Begin, loaded: _OwnModel, pools: Pools) -> Worker:
        settings, device, limits = begin.settings, self._device, pools.limits
        decoder, dtype, share = loaded.decoder, loaded.dtype, loaded.ranked.share
        lies = settings.cache.page_tokens, dtype.itemsize
        page, geometry = share.page_shape(*lies), share.geometry(*lies)
        registry_path = None if begin.registry_path is None else Path(begin.registry_path)
        places = [RankPlace(rank, begin.count) for rank in range(begin.count)]
        vocabs = [ModelShare(loaded.config, place, begin.is_sharded).vocab for place in places]
        worker = Worker(
            decoder,
            # One page more where steps are padded: what padding tokens write goes there.
            Arena(limits.num_pages + begin.pads_steps, page, dtype, device),
            HostPool(limits.num_host_pages, page, dtype, device),
            geometry,
            device,
            Registry(share.whole_geometry(*lies), decoder.layer_prefix, registry_path),
            settings.adapters.max_adapter_rank,
            ranked=RankedSampling(self._peers, vocabs),
        )
        if settings.scheduler.merge.is_on:
            as_linears = ModelShare(loaded.config, share.place, is_sharded=False).geometry(*lies)
            merging = RankedMerging(self._peers, as_linears, decoder.linears)
            worker.use_merging(CopyOfWeights(pools.copy_place).made(decoder, device), merging)
        return worker

    def _progress(self) -> Any:
        """The first rank's, now and then."""
        if self._number:
            return None
        said = 0

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal said
            if done_bytes - said >= _PROGRESS_BYTES or done_bytes == total_bytes:
                said = done_bytes
                self._channel.send(RankLoading(done_bytes, total_bytes))

        return progress

    # ------------------------------------------------------------ work

    def obey_all(self) -> None:
        """Until the end is commanded."""
        worker = self._worker
        assert worker is not None
        while True:
            self._end_steps(worker)
            command = self._channel.receive()
            match command:
                case None:
                    _leave()
                case RunStep():
                    self._run(worker, command)
                case Learn():
                    worker.inspections.learn(command.adapter, AdapterSpec.from_json(command.spec))
                case Pretend():
                    worker.pretend_adapter(command.adapter, command.rank)
                case ForgetCopies():
                    worker.forget_copies(command.answered)
                case TimeExchange():
                    exchange = self._peers, self._device, self._dtype, command.num_bytes, self._is_captured
                    self._channel.send(ExchangeTimed(exchange_seconds(*exchange)))
                case End():
                    worker.close(frees=False)
                    return
                case _:
                    worker.obey(command)
                    worker.flush()

    def _run(self, worker: Worker, step: RunStep) -> None:
        worker.settle_merged()  # which exchanges, too
        before = self._peers.num_exchanges
        self._failed: StepResult | None = None
        worker.obey(step)
        begun = _Begun(
            step.step,
            len(step.rows),
            worker.bucket,
            self._peers.num_exchanges - before,
            self._peers.digest,
            self._device.issued(),
        )
        if self._failed is None:
            self._begun.append(begun)
        else:
            self._answer(self._failed, begun)

    def _end_steps(self, worker: Worker) -> None:
        """Answer the steps in flight as they end, until there is a command or there are none."""
        while self._begun and not self._channel.has_some():
            if self._device.has_passed(self._begun[0].issued):
                worker.wait_step()
            else:
                os.sched_yield()

    def _tell(self, event: DeviceEvent) -> None:
        if not isinstance(event, StepResult):
            self._channel.send(event)
        elif self._begun and self._begun[0].step == event.done.step:
            self._answer(event, self._begun.popleft())
        else:
            self._failed = event  # as it was to be issued

    def _answer(self, result: StepResult, begun: _Begun) -> None:
        done = result.done
        drew = [(sequence, tokens[0]) for sequence, tokens in done.tokens]
        size = f"{begun.num_rows} {begun.bucket}"
        said = f"{done.step} {done.ok} {size} {begun.num_exchanges} {begun.digest} {drew}"
        tells = self._number == 0 or not done.ok
        self._channel.send(
            StepAnswer(
                done.step,
                done.ok,
                zlib.crc32(said.encode()),
                begun.num_exchanges,
                self._status(),
                result if tells else None,
                done.spoilt,
                done.stall_s,
            )
        )

    # ------------------------------------------------------------ beside the work

    def _beat(self, parent: int) -> None:
        """Say how things stand, and end with the driver's process: a fork of it may hold the socket open."""
        with contextlib.suppress(OSError):
            while os.getppid() == parent:
                self._channel.send(self._status())
                time.sleep(_STATUS_S)
        _leave()

    def _status(self) -> RankStatus:
        traffic = self._peers.traffic
        purposes: tuple[Purpose, ...] = ("base", "lora", "sampling", "merging")
        numbers = [(traffic[purpose].count, traffic[purpose].num_bytes) for purpose in purposes]
        worker = self._worker
        pinned = 0 if worker is None else worker.state().host_pages_pinned
        return RankStatus(pinned, PREPARATION.seconds(), RankTraffic(*itertools.chain(*numbers)))


def _leave() -> NoReturn:
    os._exit(1)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(code)
