"""Runs steps and switches before any request, to compile kernels, detect a lack of memory, and measure times.

The policy compares the measured times of merging with each other. So all are measured in the same way: whole
steps and switches, issued and awaited one by one. Decides nothing.
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
"""The longest time that an answer may take, in seconds."""


class Pretends(Executor, Protocol):
    """An executor that can enter pretended adapters, so that steps can be measured."""

    def pretend_adapter(self, adapter: AdapterId, rank: int) -> bool:
        """Enter an adapter of scale 0 without pages of its own, until it is evicted. Return False where the
        pool has no room for an adapter of this rank."""


class _Rig:
    """A set-up that sends commands to an executor one by one, and waits for each answer. ``longest``: the tokens
    of the longest prompt."""

    def __init__(self, executor: Executor, limits: PolicyConfig) -> None:
        self.longest = min(limits.max_model_len, limits.num_pages * limits.page_tokens)
        self._executor = executor
        self._page_tokens = limits.page_tokens
        self._merged: AdapterId = BASE
        self._numbers = itertools.count(1)
        self._answers: queue.SimpleQueue[DeviceEvent] = queue.SimpleQueue()
        executor.connect(self._answers.put)

    def run_step(
        self, prompts: Iterable[tuple[AdapterId, int, int]], params: SamplingParams = _GREEDY
    ) -> events.StepDone:
        """Run one step of prompts, each given as (adapter, length, number of tokens at its end to compute), and
        forget its sequences. All prompts share the same pages, since no later request reads what they
        write."""
        starts, rows = [], []
        for sequence, (adapter, length, count) in enumerate(prompts, 1):
            tokens, pages = (0,) * length, tuple(range(-(-length // self._page_tokens)))
            where = length - count, pages
            starts.append(commands.SequenceStart(sequence, 0, adapter, tokens, length, *where, params, ()))
            rows.append(commands.StepRow(sequence, length - count, count, 1))
        step = commands.RunStep(next(self._numbers), tuple(starts), tuple(rows), self._merged)
        self._executor.obey(step)
        if self._answers.empty():  # an answer is there already where the step could not be issued
            self._executor.wait_step()
        answer = self._answer()
        for row in rows:
            self._executor.obey(commands.EndSequence(row.sequence))
        assert isinstance(answer, StepResult)
        return answer.done

    def step_s(self, num_rows: int, num_tokens: int, adapter: AdapterId) -> float:
        """Return the median seconds of a step with this adapter alone: decoding rows, or one prompt chunk.
        Raises RuntimeError where a step fails."""
        is_chunk = num_rows < num_tokens
        length = min(num_tokens if is_chunk else _CONTEXT, self.longest)
        prompts = [(adapter, length, length if is_chunk else 1)] * num_rows
        seconds = []
        for _ in range(1 + _ROUNDS):
            done = self.run_step(prompts)
            if not done.ok:
                raise RuntimeError(done.error)
            seconds.append(done.device_s)
        return statistics.median(seconds[1:])

    def switch(self, adapter: AdapterId) -> float:
        """Merge an adapter into the base's weights, or with BASE restore the weights, and return the seconds
        that it took. Raises RuntimeError where it fails."""
        self._executor.obey(commands.SetMerged(next(self._numbers), adapter))
        self._executor.flush()
        done = self._answer()
        assert isinstance(done, events.SwitchDone)
        if not done.ok:
            raise RuntimeError(done.error)
        self._merged = adapter
        return done.switch_s

    def evict(self, adapters: Iterable[AdapterId]) -> None:
        """Drop the adapters' entries."""
        for adapter in adapters:
            self._executor.obey(commands.EvictAdapter(adapter))

    def _answer(self) -> DeviceEvent:
        """Wait for the next answer. Raises RuntimeError where the executor is lost, and ``queue.Empty`` after
        ``_ANSWER_S``."""
        answer = self._answers.get(timeout=_ANSWER_S)
        if isinstance(answer, ExecutorLost):
            raise RuntimeError(answer.reason)
        return answer


# ---------------------------------------------------------------- warming up

_LONG = 1600
"""The tokens of the smaller warm-up step: more than any captured step holds, so it runs eagerly."""

_LONGER = 2200
"""The tokens of a further step with adapters. It is long enough for the launches of long prompts, which are
divided more finely there than in the largest steps."""

_BESIDE = (100, 1, 1)
"""The tokens of the rows beside the long prompts: a short prompt, and two decoding rows."""

_PRETENDED: dict[AdapterId, int] = {-1: 16, -2: 64}
"""The pretended adapters of a warm-up, and their ranks."""

_SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, max_tokens=1
)


def warm_up(
    worker: Pretends,
    limits: PolicyConfig,
    max_adapter_rank: int | None = None,
    rehearse: Rehearse | None = None,
) -> list[int]:
    """Run eager steps, one of them as large as a step can be, and return their numbers of tokens.

    The steps use the base model, and also adapters, since LoRA's kernels have variants for the size of a step
    and the rank. Call it before the policy's first command, since the steps write to pages that no sequence
    holds yet. A failed step is logged and ends the warm-up, because such a step would fail requests.
    """
    began = time.perf_counter()
    rig = _Rig(worker, limits)
    most = min(limits.max_batch_tokens, limits.max_num_seqs * rig.longest)
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
        # The short prompts have an adapter of their own; else they would share a segment with the long ones.
        long, short = _lengths(size, rig.longest, limits.max_num_seqs)
        prompts = [(adapter, length, length) for length in long]
        return rig.run_step(prompts + [(beside, length, length) for length in short], params)

    try:
        if rehearse is not None:
            # Greedy steps only: a rehearsal's logits are meaningless, so no token can be drawn from them.
            greedy = [functools.partial(run, *step) for step in reversed(steps) if step[1] is _GREEDY]
            rehearse(greedy, 1)
        for step in steps:
            done = run(*step)
            if not done.ok:
                _log.warning("a step of %d tokens failed before serving began: %s", step[0], done.error)
                return sorted(sizes)
    finally:
        rig.evict(_PRETENDED)
    _log.info("warmed up with steps of %s tokens in %.1f s", sorted(sizes), time.perf_counter() - began)
    return sorted(sizes)


def _lengths(size: int, longest: int, most_rows: int) -> tuple[list[int], list[int]]:
    """Return the lengths of prompts with ``size`` tokens in total: the long ones, and ``_BESIDE`` where there
    is room."""
    left = size - sum(_BESIDE)
    if left >= sum(_BESIDE) and -(-left // longest) + len(_BESIDE) <= most_rows:
        return _parts(left, longest), [min(length, longest) for length in _BESIDE]
    return _parts(size, longest), []


def _parts(size: int, longest: int) -> list[int]:
    return [min(longest, size - first) for first in range(0, size, longest)]


# ---------------------------------------------------------------- merging

_MERGED, _OTHER = -1, -2
"""The pretended adapters with which merging is measured."""

RANK = 16
"""The rank of the measured adapters, which is the rank of most adapters that people train."""

_OTHER_RANKS = (32, 64, 128)
"""Ranks for which kernels may need compiling. An unmeasured switch compiles them, so that no request's switch
has to."""

_ROWS = (1, 4, 16, 64, 256)
"""The numbers of decoding rows of the measured steps, each limited to what a step may hold."""

_CONTEXT = 256
"""The tokens of a decoding row's context."""

_CHUNK = 512
"""The tokens of the one measured prompt chunk."""

_ROUNDS = 5
"""The measured rounds of switches and of each kind of step, of which the median counts. One more round comes
first, to compile and capture."""

_MOST_S = 5.0
"""The seconds of measuring steps after which no larger steps are measured. The first size is always measured,
because its time may include the compilation of kernels."""


def measure_merging(
    worker: Pretends, limits: PolicyConfig, max_adapter_rank: int | None, steps_wait: bool
) -> MergeTimes:
    """Measure switches and steps with pretended adapters, which leave every weight as it is. The result has
    no times where the pool has no room for such an adapter, or something fails. Call it before the policy's
    first command, like ``warm_up``.

    ``steps_wait``: the field of ``MergeTimes``, copied to the result.
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
        steps_began = time.perf_counter()  # begins here: until now, switches may have compiled kernels
        for num_rows, num_tokens in _sizes(limits):
            if steps and time.perf_counter() - steps_began > _MOST_S:
                break
            unmerged_s = rig.step_s(num_rows, num_tokens, _MERGED)
            rig.switch(_MERGED)
            merged_s = rig.step_s(num_rows, num_tokens, _MERGED)
            steps.append(StepTimes(num_rows, num_tokens, unmerged_s, merged_s))
            rig.switch(BASE)
    except RuntimeError as error:
        _log.warning("merging was not measured: %s", error)
        return MergeTimes(steps_wait)
    finally:
        rig.switch(BASE)
        rig.evict((_MERGED, _OTHER))
    _log.info(
        "an adapter is merged in %.1f ms and taken off in %.1f; measured in %.1f s",
        1e3 * merge_s,
        1e3 * restore_s,
        time.perf_counter() - began,
    )
    return MergeTimes(steps_wait, merge_s, restore_s, tuple(steps))


def _sizes(limits: PolicyConfig) -> Iterator[tuple[int, int]]:
    """Yield (rows, tokens) of the steps to measure: decoding steps, then one prompt chunk."""
    most = min(limits.max_num_seqs, limits.max_batch_tokens)
    for rows in sorted({min(rows, most) for rows in _ROWS}):
        yield rows, rows
    chunk = min(_CHUNK, limits.max_batch_tokens, limits.max_model_len)
    if chunk > 1:
        yield 1, chunk
