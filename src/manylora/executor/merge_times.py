"""What switches and steps take with an adapter merged and without, measured before any request.

The policy weighs these against each other, so all are taken the same way: whole steps, issued and waited for one
by one. Decides nothing.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Iterator
from typing import Protocol

from manylora.config import MergeTimes, PolicyConfig, StepTimes
from manylora.executor.direct import DirectExecutor
from manylora.protocol import Executor, RunStep, SequenceStart, SetMerged, StepRow
from manylora.types import BASE, AdapterId, SamplingParams

_log = logging.getLogger(__name__)

_MERGED, _OTHER = -1, -2
"""Adapters that are none."""

RANK = 16
"""Of most adapters that people train."""

_OTHER_RANKS = (32, 64, 128)
"""Kernels may be compiled for each of them: by a switch that is not measured, and not by a request's."""

_ROWS = (1, 4, 16, 64, 256)
"""Decoding rows of the steps that are measured, up to what a step may hold."""

_CONTEXT = 256
"""Tokens of a decoding row's context."""

_CHUNK = 512
"""Tokens of the one prompt that is measured."""

_ROUNDS = 5
"""Of each kind of step, and of switches; their median counts. One more before compiles and captures."""

_MOST_S = 5.0
"""After so many seconds of steps no larger ones are measured. The first may have compiled kernels."""

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


class Pretends(Executor, Protocol):
    """An executor that steps can be measured on."""

    def pretend_adapter(self, adapter: AdapterId, rank: int) -> bool:
        """See Worker."""


def measure_merging(
    worker: Pretends, limits: PolicyConfig, max_adapter_rank: int | None, steps_wait: bool
) -> MergeTimes:
    """Switches and steps with pretended adapters, which change no number. Without times where the pool has no room
    for such an adapter, or something fails. Runs before the policy's first command, as ``warm_up`` does.

    ``steps_wait``: of MergeTimes, which says what else is measured.
    """
    rank = min(RANK, max_adapter_rank or RANK)
    began = time.perf_counter()
    rig = _Rig(worker, limits)
    try:
        if not all(worker.pretend_adapter(adapter, rank) for adapter in (_MERGED, _OTHER)):
            _log.warning("the pool has no room for an adapter of rank %d: merging was not measured", rank)
            return MergeTimes(steps_wait)
        pairs = [(rig.switch(_MERGED), rig.switch(BASE)) for _ in range(1 + _ROUNDS)][1:]
        merge_s, restore_s = (statistics.median(times) for times in zip(*pairs))
        for other in _OTHER_RANKS:
            if other <= (max_adapter_rank or _OTHER_RANKS[-1]) and worker.pretend_adapter(_OTHER, other):
                rig.switch(_OTHER)
        rig.switch(BASE)
        worker.pretend_adapter(_OTHER, rank)
        steps: list[StepTimes] = []
        steps_began = time.perf_counter()  # kernels of switches may have been compiled until now
        for num_rows, num_tokens in _sizes(limits):
            if steps and time.perf_counter() - steps_began > _MOST_S:
                break
            steps.append(_times(rig, num_rows, num_tokens))
    except RuntimeError as error:
        _log.warning("merging was not measured: %s", error)
        return MergeTimes(steps_wait)
    finally:
        rig.switch(BASE)
        for adapter in (_MERGED, _OTHER):
            rig.direct.evict_adapter(adapter)
    _log.info(
        "an adapter is merged in %.1f ms and taken off in %.1f; measured in %.1f s",
        1e3 * merge_s,
        1e3 * restore_s,
        time.perf_counter() - began,
    )
    return MergeTimes(steps_wait, merge_s, restore_s, tuple(steps))


def _sizes(limits: PolicyConfig) -> Iterator[tuple[int, int]]:
    """(rows, tokens) of the steps: decoding ones, and one prompt chunk."""
    most = min(limits.max_num_seqs, limits.max_batch_tokens)
    for rows in sorted({min(rows, most) for rows in _ROWS}):
        yield rows, rows
    chunk = min(_CHUNK, limits.max_batch_tokens, limits.max_model_len)
    if chunk > 1:
        yield 1, chunk


def _times(rig: _Rig, num_rows: int, num_tokens: int) -> StepTimes:
    unmerged_s = rig.steps(num_rows, num_tokens, _MERGED)
    rig.switch(_MERGED)
    merged_s = rig.steps(num_rows, num_tokens, _MERGED)
    rig.switch(BASE)
    return StepTimes(num_rows, num_tokens, unmerged_s, merged_s)


class _Rig:
    """Gives a worker switches and steps, and tells what they took. All rows lie on the same pages: what they write
    is never read for a request."""

    def __init__(self, worker: Pretends, limits: PolicyConfig) -> None:
        self.direct = DirectExecutor(worker)
        self._limits = limits
        self._merged: AdapterId = BASE
        self._numbers = itertools.count(1)

    def switch(self, adapter: AdapterId) -> float:
        """Seconds. Raises RuntimeError where it fails."""
        done = self.direct.set_merged(SetMerged(next(self._numbers), adapter))
        if not done.ok:
            raise RuntimeError(done.error)
        self._merged = adapter
        return done.switch_s

    def steps(self, num_rows: int, num_tokens: int, adapter: AdapterId) -> float:
        """Median seconds of a step of this adapter alone: decoding rows, or one prompt's chunk. Raises
        RuntimeError where one fails."""
        limits = self._limits
        longest = min(limits.max_model_len, limits.num_pages * limits.page_tokens)
        length = min(num_tokens, longest) if num_rows < num_tokens else min(_CONTEXT, longest)
        chunk = length if num_rows < num_tokens else 1
        pages = tuple(range(-(-length // limits.page_tokens)))
        starts = tuple(
            SequenceStart(number, 0, adapter, (0,) * length, length, length - chunk, pages, _GREEDY, ())
            for number in range(1, 1 + num_rows)
        )
        rows = tuple(StepRow(start.sequence, length - chunk, chunk, 1) for start in starts)
        seconds = []
        for round_number in range(1 + _ROUNDS):
            step = RunStep(next(self._numbers), starts, rows, self._merged)
            done = self.direct.run_step(step).done
            for start in starts:
                self.direct.end_sequence(start.sequence)
            if not done.ok:
                raise RuntimeError(done.error)
            if round_number:
                seconds.append(done.device_s)
        return statistics.median(seconds)
