"""Engines of several ranks whose ranks are threads of this process: what they hold can be looked at, and code that
is changed here is changed on all of them. Commands and answers go over the same sockets; exchanges are made in
this process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import pytest
import torch

from manylora.devices.peers import Peers, Purpose
from manylora.executor.ranks import process, start
from manylora.executor.ranks.process import _Rank
from manylora.executor.ranks.wire import Begin, Channel, RankFailed


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
        self._channel.close()

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return 0

    def run(self) -> None:
        begin = self._channel.receive()
        with contextlib.suppress(_Killed):
            try:
                begin = msgspec.structs.replace(begin, peers_file=self._files[begin.peers_file])
                self.rank = rank = _Rank(begin, self._channel)
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


class Meeting:
    """Where the threads of one engine's ranks leave their tensors for each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._posted: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self._changed = threading.Condition()

    def exchanged(
        self, rank: int, tensor: torch.Tensor, owner: RankThread | None = None
    ) -> list[torch.Tensor]:
        """Every rank's tensor of this exchange, in their order, once all are there."""
        with self._changed:
            self._posted[rank].append(tensor.clone())
            number = len(self._posted[rank]) - 1
            self._changed.notify_all()
            while any(len(posted) <= number for posted in self._posted):
                if owner is not None and owner.is_killed:
                    raise _Killed
                self._changed.wait(0.01)
            found = [posted[number] for posted in self._posted]
            if number:
                self._posted[rank][number - 1] = tensor.new_empty(0)  # all have read it
            return found


class ThreadPeers(Peers):
    """Peers of threads of one process. Made by its rank's thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, meeting.count)
        self._meeting = meeting
        thread = threading.current_thread()
        self._owner = thread if isinstance(thread, RankThread) else None

    def add_up(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        if not self.leaves_out:
            self.note(tensor, purpose)
            tensor.copy_(torch.stack(self._meeting.exchanged(self.rank, tensor, self._owner)).sum(0))

    def gather(self, tensor: torch.Tensor, purpose: Purpose) -> list[torch.Tensor]:
        if self.leaves_out:
            return [tensor] * self.count
        self.note(tensor, purpose)
        return self._meeting.exchanged(self.rank, tensor, self._owner)

    def broadcast(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        if not self.leaves_out:
            self.note(tensor, purpose)
            tensor.copy_(self._meeting.exchanged(self.rank, tensor, self._owner)[0])


def _leave() -> NoReturn:
    raise _Killed


@pytest.fixture
def threaded_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankThread]]:
    """Every rank that is started."""
    threads: list[RankThread] = []

    def started(file: int, passed: tuple[int, ...], *_: Any) -> RankThread:
        threads.append(RankThread(file, passed))
        return threads[-1]

    meetings: dict[int, Meeting] = {}
    lock = threading.Lock()

    def peers(begin: Begin, device: object) -> ThreadPeers:
        # The ranks of an engine have descriptors of one file.
        with lock:
            meeting = meetings.setdefault(os.fstat(begin.peers_file).st_ino, Meeting(begin.task.count))
        return ThreadPeers(meeting, begin.rank)

    monkeypatch.setattr(process, "_peers", peers)
    monkeypatch.setattr(start, "_process", started)
    monkeypatch.setattr(process, "_leave", _leave)
    monkeypatch.setattr(_Rank, "_beat", lambda self, parent: None)
    num_threads = torch.get_num_threads()
    yield threads
    for thread in threads:
        thread.kill()
        thread.join(30)
    torch.set_num_threads(num_threads)
