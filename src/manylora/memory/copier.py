"""Copies pages between the host pool and the device pool, beside compute.

Owns the two lanes, one for each direction, the division of a copy into transfers, and the one answer that
each copy gets. Does not know the contents of pages.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from manylora.devices.device import CopyLane, Device
from manylora.memory.bringing import Bringer
from manylora.memory.gates import CopyGate
from manylora.memory.pool import Arena, HostPool
from manylora.protocol import commands, events
from manylora.types import PageId, first_line

TRANSFER_BYTES = 16 * 2**20
"""The largest transfer, about a third of a millisecond. Closing waits for one transfer, and so do a step's
own small copies where the device's copy engines move them (``devices/staging``)."""

_log = logging.getLogger(__name__)

_CLOSING = "the engine is closing"


class _Lane:
    """One direction of copies. One thread issues transfers; another waits for them and answers, so that the
    next copy is under way while the previous one is being answered."""

    def __init__(self, name: str, copies: CopyLane) -> None:
        self.copies = copies
        self.issuing = ThreadPoolExecutor(1, thread_name_prefix=f"manylora-{name}")
        self.answering = ThreadPoolExecutor(1, thread_name_prefix=f"manylora-{name}-done")
        self.last: Future[None] | None = None
        """The newest task of the issuing thread."""
        self.put_off: list[tuple[ThreadPoolExecutor, Callable[[], object]]] = []
        """The tasks that ``flush`` submits to the threads, in order."""
        for pool in (self.issuing, self.answering):
            pool.submit(lambda: None)  # starts the thread, so that a later submission cannot fail to start it

    def flush(self) -> None:
        """Submit the tasks that were put off."""
        put_off, self.put_off = self.put_off, []
        for pool, work in put_off:
            pool.submit(work)

    def close(self) -> None:
        self.flush()
        self.issuing.shutdown(wait=True)
        self.answering.shutdown(wait=True)


class _Copy(NamedTuple):
    """A copy under way. ``after``: the mark of the work for which it waits. ``landed``, ``done``, ``gate``: as
    in ``Copier.start``. ``bringer``: None where the lane's thread issues the copy."""

    lane: _Lane
    command: commands.SwapPages
    after: object
    landed: Callable[[], None]
    done: Callable[[events.CopyDone], None]
    gate: CopyGate | None
    bringer: Bringer | None


class Copier:
    """Background copies between the pools. Copies of one direction land and are answered in the order in
    which they were started.

    ``start``, ``flush`` and ``close`` belong to the step loop's thread.
    """

    def __init__(self, arena: Arena, host: HostPool, device: Device, *, puts_off: bool = False) -> None:
        """Open the lanes. ``puts_off``: work that no step waits for begins with ``flush``: copies from the
        device, and the answers to copies by a kernel. Otherwise the lanes' threads would compete with the
        step loop for the interpreter while it launches a step."""
        self._arena = arena
        self._host = host
        self._device = device
        self._lanes = {
            True: _Lane("copy-in", device.copy_lane()),
            False: _Lane("copy-out", device.copy_lane()),
        }
        self._settled = device.issued()
        self._puts_off = puts_off
        self._closing = False
        self.bringer: Bringer | None = None
        """The maker of copies with gates, where it can, on the step loop's thread. Set before the first such
        copy."""

    def settle(self) -> None:
        """Make later copies to the device wait for all work issued so far.

        They wait for no step, since the policy gives them pages that no step in flight touches. This is for
        work that the policy does not count as a step, such as copies inside the pool.
        """
        self._settled = self._device.issued()

    def start(
        self,
        command: commands.SwapPages,
        landed: Callable[[], None],
        done: Callable[[events.CopyDone], None],
        gate: CopyGate | None = None,
    ) -> None:
        """Start a copy; from the device it waits for everything issued so far. ``done`` is called once, from
        another thread.

        ``landed`` is called just before, if the copy went well; when it raises, the copy has failed. The copy
        may be put off until ``flush``. Raises RuntimeError after ``close``; then neither function is called.

        ``gate``: the gate of a copy to the device that steps may await; it is answered after ``done``.
        """
        lane = self._lanes[command.to_device]
        after = self._settled if command.to_device else self._device.issued()
        bringer = None if gate is None else self._bringer_for(lane, command)
        copy = _Copy(lane, command, after, landed, done, gate, bringer)
        if bringer is not None:
            with lane.copies.here():
                self._issue(copy)
        elif self._puts_off and not command.to_device and not self._closing:
            lane.put_off.append((lane.issuing, functools.partial(self._issue, copy)))
        else:
            lane.flush()  # keeps the order of answers
            lane.last = lane.issuing.submit(self._issue, copy)

    def move(self, target: torch.Tensor, source: torch.Tensor, issued: object) -> Future[Callable[[], float]]:
        """Copy to the device after the work that ``issued`` marks, in turn with copies of pages. May be
        called from any thread, but not beside copies that have gates. The arguments are as for
        ``CopyLane.copy``; the result is as for ``CopyLane.end``. Raises RuntimeError after ``close``."""
        lane = self._lanes[True]

        def issue() -> Callable[[], float]:
            lane.copies.begin(issued)
            lane.copies.copy(target, source)
            return lane.copies.end()

        return lane.issuing.submit(issue)

    def _bringer_for(self, lane: _Lane, command: commands.SwapPages) -> Bringer | None:
        """Return the bringer for this copy; None where the lane's thread issues the copy, which then lands
        whole. A kernel's copy would overtake copies that the thread has not issued yet, so the lane must be
        idle."""
        bringer, is_idle = self.bringer, lane.last is None or lane.last.done()
        if bringer is None or self._closing or not is_idle or not bringer.can_bring(command.pairs):
            return None
        return bringer

    def flush(self) -> None:
        """Begin the work that was put off. Call it when a step has been launched, or when none will be
        launched now."""
        for lane in self._lanes.values():
            lane.flush()

    def close(self) -> None:
        """Stop copies under way, answer every copy that is left, and end the threads. Idempotent."""
        self._closing = True
        for lane in self._lanes.values():
            lane.close()
        self.bringer = None  # it holds views of the pools

    def _issue(self, copy: _Copy) -> None:
        lane, gate, error, wait = copy.lane, copy.gate, "", None
        try:
            lane.copies.begin(copy.after)
            if gate is not None and copy.bringer is not None:
                copy.bringer.bring(lane.copies, copy.command.pairs, gate)
            else:
                error = self._transfer(lane.copies, copy.command)
                if gate is not None and not error:
                    gate.open(lane.copies.landing())
        except Exception as failure:
            error = one_line(failure)
        try:
            # Also after a failure: the pages get new owners, whose data a late transfer must not overwrite.
            wait = lane.copies.end()
        except Exception as failure:
            error = error or one_line(failure)
        if error and gate is not None:
            gate.fail()
        answer = functools.partial(self._answer, copy, error, wait)
        if self._puts_off and copy.bringer is not None:
            lane.put_off.append((lane.answering, answer))
        else:
            lane.answering.submit(answer)

    def _transfer(self, copies: CopyLane, command: commands.SwapPages) -> str:
        """Start the copy's transfers. Return the reason where they were stopped, else an empty text."""
        most_pages = max(1, TRANSFER_BYTES // self._host.shape.page_bytes)
        runs = merged(command.pairs, command.to_device, most_pages, self._host.chunk_pages)
        for source, destination, count in runs:
            if self._closing:
                return _CLOSING
            if command.to_device:
                copies.copy(self._arena.run(destination, count), self._host.run(source, count))
            else:
                copies.copy(self._host.run(destination, count), self._arena.run(source, count))
        return ""

    def _answer(self, copy: _Copy, error: str, wait: Callable[[], float] | None) -> None:
        seconds = 0.0
        try:
            seconds = wait() if wait else 0.0
            if not error:
                copy.landed()
        except Exception as failure:
            error = error or one_line(failure)
        if error and copy.gate is not None:
            copy.gate.fail()
        if error and error != _CLOSING:
            _log.warning("copy %d failed: %s", copy.command.copy, error)
        copy.done(events.CopyDone(copy.command.copy, not error, seconds, error))
        if copy.gate is not None:
            copy.gate.answer(not error)


def merged(
    pairs: Iterable[tuple[PageId, PageId]], to_device: bool, most_pages: int, chunk_pages: int
) -> list[tuple[PageId, PageId, int]]:
    """Merge pairs into runs of pages that are adjacent in both pools: (first source, first destination,
    count).

    No run has more than ``most_pages``, and none crosses the border between two chunks of the host pool.
    """
    runs: list[tuple[PageId, PageId, int]] = []
    for source, destination in sorted(pairs):
        host = source if to_device else destination
        if runs and host % chunk_pages:
            first_source, first_destination, count = runs[-1]
            follows = (source, destination) == (first_source + count, first_destination + count)
            if follows and count < most_pages:
                runs[-1] = first_source, first_destination, count + 1
                continue
        runs.append((source, destination, 1))
    return runs


def one_line(error: Exception) -> str:
    """Return the error's type and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"
