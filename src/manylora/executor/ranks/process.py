"""Runs one rank: a process with an ordinary worker on its share of the model, which obeys the driver's
commands.

Started as ``python -m manylora.executor.ranks.process FD``, where FD is a socket to the driver's process.
When the driver's process ends, this process ends too, whatever it is doing. Owns the order build, obey,
answer. Decides nothing.
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
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch

from manylora.adapters.peft import AdapterSpec
from manylora.config.declaring import ConfigError
from manylora.devices.device import Device, open_device
from manylora.devices.peers import GroupPeers, Peers, Purpose
from manylora.devices.preparation import PREPARATION
from manylora.executor.build import RankBuild
from manylora.executor.graphs import Bucket
from manylora.executor.plan import CopyOfWeights
from manylora.executor.ranks import wire
from manylora.executor.worker import Worker
from manylora.kernels.shapes import RankPlace
from manylora.models.spec import ModelError
from manylora.protocol import commands
from manylora.protocol.executor import DeviceEvent, StepResult
from manylora.types import RankTraffic

_log = logging.getLogger(__name__)

_PROGRESS_BYTES = 2**26
"""The bytes of weights between two reports of progress."""
_STATUS_S = 0.25
"""The seconds between two statuses."""
LOG_FORMAT = "%(asctime)s %(levelname)s rank {rank}: %(message)s"


def main(file: int) -> int:
    """Run the rank until it ends, and return the process's exit code: 0, 2 where the settings or the model
    are at fault, 1 for other failures. ``file``: the descriptor of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver's process decides when ranks end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    channel = wire.Channel(socket.socket(fileno=file))
    begin = channel.receive()
    if not isinstance(begin, wire.Begin):
        return 1
    logging.basicConfig(stream=sys.stderr, level=begin.log_level, format=LOG_FORMAT.format(rank=begin.rank))
    try:
        rank = _Rank(begin, channel)
    except (ConfigError, ModelError) as error:
        channel.send(wire.RankFailed(str(error), is_user_error=True))
        return 2
    except Exception as error:
        _log.exception("rank %d could not start", begin.rank)
        channel.send(wire.RankFailed(f"{type(error).__name__}: {error}"))
        return 1
    try:
        rank.obey_all()
    except Exception as error:
        _log.exception("rank %d failed", begin.rank)
        with contextlib.suppress(OSError):
            channel.send(wire.RankFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


class _Begun(NamedTuple):
    """A step in flight. ``bucket``: the bucket in which it runs, None: eagerly. ``num_exchanges``: the step's
    own. ``digest``: a checksum of all exchanges since the start up to the step's last. ``issued``: the
    device's mark for the end of the step's work."""

    step: int
    num_rows: int
    bucket: Bucket | None
    num_exchanges: int
    digest: int
    issued: object


def _peers(begin: wire.Begin, device: Device) -> Peers:
    return GroupPeers(begin.peers_file, begin.rank, begin.task.count, device.torch_device)


class _Rank:
    """A rank's worker, its channel to the driver, and its steps in flight."""

    def __init__(self, begin: wire.Begin, channel: wire.Channel) -> None:
        """Build the rank and exchange messages with the driver until it is ready. Raises ConfigError and
        ModelError where the settings or the model are at fault."""
        self._channel = channel
        self._number = begin.rank
        torch.set_num_threads(begin.num_threads)
        self._device = device = open_device(begin.task.device)
        self._peers = _peers(begin, device)
        self._worker: Worker | None = None
        self._begun: collections.deque[_Begun] = collections.deque()  # oldest first
        os.close(begin.peers_file)
        threading.Thread(target=self._beat, args=(begin.parent,), daemon=True).start()

        place = RankPlace(begin.rank, begin.task.count)
        rank = RankBuild(begin.task, place, device, self._peers, self._progress())
        channel.send(rank.loaded())
        pools = channel.receive()
        if not isinstance(pools, wire.Pools):
            _leave()
        self._worker = worker = rank.worker(pools.limits, CopyOfWeights(pools.copy_place))
        rank.prepare(worker, pools.limits)
        worker.connect(self._report)
        channel.send(wire.RankReady())

    def _progress(self) -> Callable[[int, int], None] | None:
        """Return a function that reports the first rank's progress, once per ``_PROGRESS_BYTES``. Return None
        on other ranks."""
        if self._number:
            return None
        said = 0

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal said
            if done_bytes - said >= _PROGRESS_BYTES or done_bytes == total_bytes:
                said = done_bytes
                self._channel.send(wire.RankLoading(done_bytes, total_bytes))

        return progress

    # ------------------------------------------------------------ work

    def obey_all(self) -> None:
        """Obey commands until ``End``, and answer steps as they end. Ends the process where the driver's has
        ended."""
        worker = self._worker
        assert worker is not None
        while True:
            # Answer the steps in flight as they end, until a command arrives or no step is left.
            while self._begun and not self._channel.has_some():
                if self._device.has_passed(self._begun[0].issued):
                    worker.wait_step()
                else:
                    os.sched_yield()
            command = self._channel.receive()
            match command:
                case None:
                    _leave()
                case commands.RunStep():
                    self._run(worker, command)
                case wire.Learn():
                    worker.inspections.learn(command.adapter, AdapterSpec.from_json(command.spec))
                case wire.Pretend():
                    worker.pretend_adapter(command.adapter, command.rank)
                case wire.ForgetCopies():
                    worker.forget_copies(command.answered)
                case wire.End():
                    worker.close(frees=False)
                    return
                case _:
                    worker.obey(command)
                    worker.flush()

    def _run(self, worker: Worker, step: commands.RunStep) -> None:
        worker.settle_merged()  # a switch's exchanges must not count as the step's
        before = self._peers.num_exchanges
        self._failed: StepResult | None = None
        worker.obey(step)
        exchanges = self._peers.num_exchanges - before, self._peers.digest
        begun = _Begun(step.step, len(step.rows), worker.bucket, *exchanges, self._device.issued())
        if self._failed is None:
            self._begun.append(begun)
        else:
            self._answer(self._failed, begun)

    def _report(self, event: DeviceEvent) -> None:
        if not isinstance(event, StepResult):
            self._channel.send(event)
        elif self._begun and self._begun[0].step == event.done.step:
            self._answer(event, self._begun.popleft())
        else:
            self._failed = event  # the step failed before it was issued

    def _answer(self, result: StepResult, begun: _Begun) -> None:
        done = result.done
        drew = [(sequence, tokens[0]) for sequence, tokens in done.tokens]
        size = f"{begun.num_rows} {begun.bucket}"
        said = f"{done.step} {done.ok} {size} {begun.num_exchanges} {begun.digest} {drew}"
        found = begun.num_exchanges, self._status(), result if self._number == 0 or not done.ok else None
        digest = zlib.crc32(said.encode())
        self._channel.send(wire.StepAnswer(done.step, done.ok, digest, *found, done.invalid, done.stall_s))

    # ------------------------------------------------------------ beside the work

    def _beat(self, parent: int) -> None:
        """Send the status every ``_STATUS_S``, and end this process when the driver's has ended. The socket
        alone does not show that, since a fork of the driver's process may keep it open."""
        with contextlib.suppress(OSError):
            while os.getppid() == parent:
                self._channel.send(self._status())
                time.sleep(_STATUS_S)
        _leave()

    def _status(self) -> wire.RankStatus:
        traffic = self._peers.traffic
        purposes: tuple[Purpose, ...] = ("base", "lora", "sampling", "merging")
        numbers = [(traffic[purpose].count, traffic[purpose].num_bytes) for purpose in purposes]
        worker = self._worker
        pinned = 0 if worker is None else worker.state().host_pages_pinned
        return wire.RankStatus(pinned, PREPARATION.seconds(), RankTraffic(*itertools.chain(*numbers)))


def _leave() -> NoReturn:
    os._exit(1)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(code)
