"""Steps run before any request: kernels are compiled and loaded, and memory that is short shows at the start."""

from __future__ import annotations

import functools
import logging
import time

from manylora.config import PolicyConfig
from manylora.executor.direct import DirectExecutor
from manylora.executor.graphs import Rehearse
from manylora.executor.worker import Worker
from manylora.protocol import RunStep, SequenceStart, StepDone, StepRow
from manylora.types import BASE, AdapterId, SamplingParams

_log = logging.getLogger(__name__)

_LONG = 1600
"""Tokens of a step: more than a captured one holds."""

_LONGER = 2200
"""With an adapter: enough for launches of long prompts alone, cut finer there than in the largest steps."""

_BESIDE = (100, 1, 1)
"""Rows beside the long prompts: a short one, and decoding."""

_PRETENDED: dict[AdapterId, int] = {-1: 16, -2: 64}
"""Adapters that are none, and their ranks."""

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
_SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, max_tokens=1
)


def warm_up(
    worker: Worker,
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
    direct = DirectExecutor(worker)
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

    def run(size: int, params: SamplingParams, adapter: AdapterId, beside: AdapterId) -> StepDone:
        lengths = _lengths(size, longest, limits.max_num_seqs)
        starts = _prompts(lengths, limits.page_tokens, params, adapter, beside)
        rows = tuple(StepRow(start.sequence, 0, len(start.tokens), 1) for start in starts)
        done = direct.run_step(RunStep(0, starts, rows)).done
        for start in starts:
            direct.end_sequence(start.sequence)
        return done

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


def _prompts(
    lengths: tuple[list[int], list[int]],
    page_tokens: int,
    params: SamplingParams,
    adapter: AdapterId,
    beside: AdapterId,
) -> tuple[SequenceStart, ...]:
    """Prompts, all on the same pages: what they write is never read. The prompts beside the long ones have an
    adapter of their own, or they would be one run with them."""
    each = [(adapter, length) for length in lengths[0]] + [(beside, length) for length in lengths[1]]
    return tuple(
        SequenceStart(
            number, 0, whose, (0,) * length, length, 0, tuple(range(-(-length // page_tokens))), params, ()
        )
        for number, (whose, length) in enumerate(each, 1)
    )
