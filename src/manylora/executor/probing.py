"""Steps and switches run before any request: they compile kernels, show memory that is short, and are measured.

The policy weighs what is measured of merging against each other, so all is taken the same way: whole steps, issued
and waited for one by one. Decides nothing.
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from manylora.config.merging import MergeTimes, StepTimes
from manylora.config.policy import PolicyConfig
from manylora.executor.graphs import Rehearse
from manylora.protocol import commands, events
from manylora.protocol.executor import DeviceEvent, Executor, ExecutorLost, StepResult
from manylora.types import BASE, AdapterId, SamplingParams

_log = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)

_ANSWER_S = 600.0
"""How long an answer may take."""


class _Direct:
    """Gives commands to an executor, which it connects to itself, one by one, and waits for each answer."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._answers: queue.SimpleQueue[DeviceEvent] = queue.SimpleQueue()
        executor.connect(self._answers.put)

    def run_step(self, step: commands.RunStep) -> events.StepDone:
        """Run a step and forget its sequences."""
        self._executor.obey(step)
        if self._answers.empty():  # else it could not be issued
            self._executor.wait_step()
        answer = self._answer()
        for row in step.rows:
            self._executor.obey(commands.EndSequence(row.sequence))
        assert isinstance(answer, StepResult)
        return answer.done

    def set_merged(self, command: commands.SetMerged) -> events.SwitchDone:
        """Merge an adapter into the base's weights, or none."""
        self._executor.obey(command)
        self._executor.flush()
        answer = self._answer()
        assert isinstance(answer, events.SwitchDone)
        return answer

    def evict_adapter(self, adapter: AdapterId) -> None:
        """Forget where the adapter lies."""
        self._executor.obey(commands.EvictAdapter(adapter))

    def _answer(self) -> DeviceEvent:
        """Raises RuntimeError where the executor is lost."""
        answer = self._answers.get(timeout=_ANSWER_S)
        if isinstance(answer, ExecutorLost):
            raise RuntimeError(answer.reason)
        return answer


class Pretends(Executor, Protocol):
    """An executor that steps can be measured on."""

    def pretend_adapter(self, adapter: AdapterId, rank: int) -> bool:
        """See Worker."""


def _run_step(
    direct: _Direct,
    page_tokens: int,
    prompts: Iterable[tuple[AdapterId, int, int]],
    params: SamplingParams = _GREEDY,
    number: int = 0,
    merged: AdapterId = BASE,
) -> events.StepDone:
    """Run one step of prompts: (adapter, length, tokens at its end that are computed). All lie on the same pages:
    what they write is never read."""
    starts, rows = [], []
    for sequence, (adapter, length, count) in enumerate(prompts, 1):
        tokens, pages = (0,) * length, tuple(range(-(-length // page_tokens)))
        where = length - count, pages
        starts.append(commands.SequenceStart(sequence, 0, adapter, tokens, length, *where, params, ()))
        rows.append(commands.StepRow(sequence, length - count, count, 1))
    return direct.run_step(commands.RunStep(number, tuple(starts), tuple(rows), merged))


# ---------------------------------------------------------------- warming up

_LONG = 1600
"""Tokens of a step: more than a captured one holds."""

_LONGER = 2200
"""With an adapter: enough for launches of long prompts alone, cut finer there than in the largest steps."""

_BESIDE = (100, 1, 1)
"""Rows beside the long prompts: a short one, and decoding."""

_PRETENDED: dict[AdapterId, int] = {-1: 16, -2: 64}
"""Adapters that are none, and their ranks."""

_SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, max_tokens=1
)


def warm_up(
    worker: Pretends,
    limits: PolicyConfig,
    max_adapter_rank: int | None = None,
    rehearse: Rehearse | None = None,
) -> list[int]:
    """Run eager steps, one as large as a step can be; returns their tokens. Of the base model and, since LoRA's
    kernels have variants by the size of a step and the rank, with adapters.

    Runs before the policy's first command, since the steps write to pages that no sequence holds yet. A step that
    fails is logged: it would fail requests.
    """
    began = time.perf_counter()
    direct = _Direct(worker)
    longest = min(limits.max_model_len, limits.num_pages * limits.page_tokens)
    most = min(limits.max_batch_tokens, limits.max_num_seqs * longest)
    sizes = {min(_LONG, most), most}
    steps = [(size, params, BASE, BASE) for size in sorted(sizes) for params in (_GREEDY, _SAMPLED)]
    pretended = [
        adapter
        for adapter, rank in _PRETENDED.items()
        if worker.pretend_adapter(adapter, min(rank, max_adapter_rank or rank))
    ]
    if pretended:
        sizes |= {min(_LONGER, most)}
    for adapter, beside in zip(pretended, reversed(pretended)):
        steps += [(size, _GREEDY, adapter, beside) for size in sorted(sizes)]

    def run(size: int, params: SamplingParams, adapter: AdapterId, beside: AdapterId) -> events.StepDone:
        # Those beside the long ones have an adapter of their own, or they would be one run with them.
        long, short = _lengths(size, longest, limits.max_num_seqs)
        each = [(adapter, length) for length in long] + [(beside, length) for length in short]
        prompts = [(whose, length, length) for whose, length in each]
        return _run_step(direct, limits.page_tokens, prompts, params)

    try:
        if rehearse is not None:
            # What a rehearsal computes is no probability that anything could be drawn by.
            greedy = [functools.partial(run, *step) for step in reversed(steps) if step[1] is _GREEDY]
            rehearse(greedy, 1)
        for step in steps:
            done = run(*step)
            if not done.ok:
                _log.warning("a step of %d tokens failed before serving began: %s", step[0], done.error)
                return sorted(sizes)
    finally:
        for adapter in _PRETENDED:
            direct.evict_adapter(adapter)
    _log.info("warmed up with steps of %s tokens in %.1f s", sorted(sizes), time.perf_counter() - began)
    return sorted(sizes)


def _lengths(size: int, longest: int, most_rows: int) -> tuple[list[int], list[int]]:
    """The lengths of prompts of ``size`` tokens together: long ones, and ``_BESIDE`` where there is room."""
    left = size - sum(_BESIDE)
    if left >= sum(_BESIDE) and -(-left // longest) + len(_BESIDE) <= most_rows:
        return _parts(left, longest), [min(length, longest) for length in _BESIDE]
    return _parts(size, longest), []


def _parts(size: int, longest: int) -> list[int]:
    return [min(longest, size - first) for first in range(0, size, longest)]


# ---------------------------------------------------------------- merging

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
    """Gives a worker switches and steps, and tells what they took."""

    def __init__(self, worker: Pretends, limits: PolicyConfig) -> None:
        self.direct = _Direct(worker)
        self._limits = limits
        self._merged: AdapterId = BASE
        self._numbers = itertools.count(1)

    def switch(self, adapter: AdapterId) -> float:
        """Seconds. Raises RuntimeError where it fails."""
        done = self.direct.set_merged(commands.SetMerged(next(self._numbers), adapter))
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
        prompts = [(adapter, length, chunk)] * num_rows
        seconds = []
        for round_number in range(1 + _ROUNDS):
            number = next(self._numbers)
            done = _run_step(self.direct, limits.page_tokens, prompts, number=number, merged=self._merged)
            if not done.ok:
                raise RuntimeError(done.error)
            if round_number:
                seconds.append(done.device_s)
        return statistics.median(seconds)
