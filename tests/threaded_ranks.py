"""Engines of several ranks whose ranks are threads of this process: what they hold can be looked at, and code that
is changed here is changed on all of them. All else is as with processes: the same ring, the same answers,
exchanges through the same memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import pytest
import torch

from manylora.devices.cpu_peers import SharedPeers
from manylora.executor.ranks import process, start
from manylora.executor.ranks.process import _Rank
from manylora.executor.ranks.ring import RingReader
from manylora.executor.ranks.wire import Channel, RankFailed


class _Killed(BaseException):
    """Ends a rank's thread."""


class RankThread(threading.Thread):
    """A rank, with what ``subprocess.Popen`` offers of a process. ``rank``: once it obeys."""

    def __init__(self, file: int, passed: tuple[int, ...]) -> None:
        super().__init__(daemon=True)
        self.pid = os.getpid()
        self.rank: _Rank | None = None
        self.is_killed = False
        # A process would have descriptors of its own.
        self._files = {number: os.dup(number) for number in passed}
        self._channel = Channel(socket.socket(fileno=self._files.pop(file)))
        self.start()

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return 0

    def run(self) -> None:
        begin = self._channel.receive()
        with contextlib.suppress(_Killed):
            try:
                files = {
                    name: self._files[getattr(begin, name)]
                    for name in ("ring_file", "peers_file", "status_file", "wake")
                }
                self.rank = rank = _Rank(msgspec.structs.replace(begin, **files), self._channel)
                rank.obey_all()
            except Exception as error:
                with contextlib.suppress(OSError):
                    self._channel.send(RankFailed(f"{type(error).__name__}: {error}"))
        self._channel.close()


def weights_of(rank: _Rank) -> list[bytes]:
    """Of the linears that adapters may be on, every bit."""
    worker = rank._worker
    assert worker is not None
    assert worker._forward is not None
    linears = worker._forward.decoder.linears
    return [linear.weight.data.view(torch.uint8).numpy().tobytes() for linear in linears]


def _wait_for_peers(peers: Any, rank: int, number: int) -> None:
    """``SharedPeers._wait`` of threads, which may be killed."""
    while peers._numbers[rank * 8] < number:
        _look(peers.owner)


def _wait_for_commands(reader: Any) -> int:
    """``RingReader._wait``, likewise."""
    while not (count := reader._ring.counter(0) - reader._read):
        _look(reader.owner)
    return int(count)


def _look(owner: RankThread) -> None:
    if owner.is_killed:
        raise _Killed
    time.sleep(1e-4)


def _leave() -> NoReturn:
    raise _Killed


@pytest.fixture
def threaded_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankThread]]:
    """Every rank that is started."""
    threads: list[RankThread] = []

    def started(file: int, passed: tuple[int, ...], *_: Any) -> RankThread:
        threads.append(RankThread(file, passed))
        return threads[-1]

    for kind, name, wait in (
        (SharedPeers, "_wait", _wait_for_peers),
        (RingReader, "_wait", _wait_for_commands),
    ):
        monkeypatch.setattr(kind, name, wait)
        # Made by its rank's thread.
        init: Any = kind.__init__

        def noting(self: Any, *args: Any, init: Any = init) -> None:
            self.owner = threading.current_thread()
            init(self, *args)

        monkeypatch.setattr(kind, "__init__", noting)
    monkeypatch.setattr(start, "_process", started)
    monkeypatch.setattr(process, "_leave", _leave)
    monkeypatch.setattr(_Rank, "_beat", lambda self, parent: None)
    monkeypatch.setattr(_Rank, "_end_with_driver", lambda self: None)
    num_threads = torch.get_num_threads()
    yield threads
    for thread in threads:
        thread.kill()
        thread.join(30)
    torch.set_num_threads(num_threads)
