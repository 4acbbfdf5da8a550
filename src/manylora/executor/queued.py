"""Cold rows handed to CPU workers, and results taken, by the device itself in its own order (CaraServe §4.2).

The host launches a step and waits for nothing in it: rows are copied to the board and posted by the device's
stream, and a kernel waits for the workers' words before their results are copied back. Owns the board's memory as
the device sees it, and what its kernels tell. Where operations or the device have no such means the host does both
(``executor.cold_rows``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from manylora.assist.board import Board
from manylora.devices.device import Device
from manylora.kernels.ops import Ops

_log = logging.getLogger(__name__)


@runtime_checkable
class AwaitsWords(Protocol):
    def await_words(
        self, words: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        """What is issued after it begins once each of ``words[:, 0]``, which others write, is at least
        ``wanted[1:]``, or the step's waits have lasted ``wanted[0]`` nanoseconds. ``told`` [2]: how long they
        have, and 1 where that was too long; the first wait begins it anew. All int64; words in pinned memory."""


def device_handover(board: Board, ops: Ops, device: Device, late_s: float) -> DeviceHandover | None:
    """None where the host has to hand rows over."""
    if not isinstance(ops, AwaitsWords):
        return None
    if not device.can_mark():
        _log.warning("the host hands rows to CPU workers: the driver writes no numbers in streams")
        return None
    found: DeviceHandover | None = None
    try:
        found = DeviceHandover(board, ops, device, late_s)
        found.try_out()
        return found
    except (RuntimeError, ValueError) as error:
        _log.warning("the host hands rows to CPU workers: %s", str(error).partition("\n")[0])
        if found is not None:
            found.close()
        return None


class DeviceHandover:
    """Of one step at a time; of the step loop's thread. ``late_s``: how long a step's kernels wait, in all."""

    def __init__(self, board: Board, ops: AwaitsWords, device: Device, late_s: float) -> None:
        """Raises RuntimeError where the device cannot use the board's memory."""
        self.is_busy = False
        """Whether a step has begun that has not ended."""
        self._ops, self._device = ops, device
        self._late_ns = int(late_s * 1e9)
        self._board = board
        self._memory = torch.from_numpy(board.memory)
        device.pin(self._memory)
        self._posted = torch.from_numpy(board.posted_word)
        self._done = torch.from_numpy(board.done_words)
        self._told = device.zeros((2,), torch.int64)
        # Rows of ``_wanted`` begin at multiples of 16 bytes: kernels are compiled anew for what does not.
        self._width = 2 * (1 + len(self._done) // 2)

    def try_out(self) -> None:
        """Before the first step: have the device write a word there, and wait for none. Raises what went wrong."""
        trial = torch.from_numpy(self._board.trial_word)
        self._device.mark(trial, 1)
        nothing = self._device.zeros((self._width,), torch.int64)
        for is_first in (True, False):  # each is a kernel of its own, to be compiled now
            self._ops.await_words(self._done, nothing, self._told, is_first)
        self._device.synchronize()
        if int(trial) != 1:
            raise RuntimeError("numbers that the device writes do not arrive in the host's memory")

    def begin(self, first_job: int, num_jobs: int, workers: Sequence[int]) -> None:
        """A step of these jobs, given to these workers."""
        wanted = np.zeros((num_jobs, self._width), np.int64)
        wanted[:, 0] = self._late_ns
        wanted[:, 1 + np.array(workers)] = first_job + 1 + np.arange(num_jobs)[:, None]
        self._wanted = self._device.upload(wanted)
        self._first_job = first_job
        self.is_busy = True

    def post(self, rows: torch.Tensor, job: int) -> None:
        """Show the workers the rows ``[T, in]`` of a job, once the device has computed them."""
        # Results of the job before have been taken by then.
        target = torch.from_numpy(self._board.rows(*rows.shape))
        if rows.dtype.itemsize == 2:
            rows, target = rows.view(torch.int16), target.view(torch.int16)
        target.copy_(rows, non_blocking=True)
        self._device.mark(self._posted, job)

    def take(self, num_tokens: int, features: int, job: int) -> torch.Tensor:
        """float32 ``[num_tokens, features]`` on the device: what the workers have found of a job, or anything
        where they are late."""
        place = job - self._first_job - 1
        self._ops.await_words(self._done, self._wanted[place], self._told, place == 0)
        found = torch.from_numpy(self._board.results(num_tokens, features))
        return torch.empty_like(found, device=self._device.torch_device).copy_(found, non_blocking=True)

    def issued(self) -> tuple[Callable[[], bool], Callable[[], np.ndarray]]:
        """All of the step has been launched. Gives whether the device has gone through it, and what its kernels
        have told by then."""
        told, issued = self._device.download(self._told), self._device.issued()
        return lambda: self._device.has_passed(issued), told

    def end(self) -> None:
        """The step has ended on the device."""
        self.is_busy = False

    def close(self) -> None:
        """With no step on its way. Idempotent."""
        if len(self._memory):
            try:
                self._device.unpin(self._memory)
            except RuntimeError as error:
                _log.warning("the CPU workers' memory could not be unpinned: %s", error)
            self._memory = self._memory[:0]
