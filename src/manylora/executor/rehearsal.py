"""Steps run before anybody asks: kernels are compiled and loaded, and memory that is short shows at the start."""

from __future__ import annotations

import logging
import time

from manylora.config import PolicyConfig
from manylora.executor.worker import Worker
from manylora.protocol import RunStep, SequenceStart, StepRow
from manylora.types import BASE, AdapterId, SamplingParams

_log = logging.getLogger(__name__)

_LONG = 600
"""Tokens of a prompt: more than a captured step of the base model holds."""

_LONGER = 1600
"""The same with an adapter."""

_PRETENDED: dict[AdapterId, int] = {-1: 16, -2: 64}
"""Adapters that are none, and their ranks."""

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
_SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, max_tokens=1
)


def rehearse(worker: Worker, limits: PolicyConfig, max_adapter_rank: int | None = None) -> list[int]:
    """Run eager steps, one as large as a step can be; returns their tokens. Of the base model and, since LoRA's
    kernels have variants by the size of a step and the rank, with adapters.

    Before the policy's first command, since the steps write to pages that nobody holds yet. A step that fails is
    logged: it would fail requests.
    """
    began = time.perf_counter()
    longest = min(limits.max_model_len, limits.num_pages * limits.page_tokens)
    most = min(limits.max_batch_tokens, limits.max_num_seqs * longest)
    sizes = {min(_LONG, most), most}
    steps = [(size, params, BASE) for size in sorted(sizes) for params in (_GREEDY, _SAMPLED)]
    for adapter, rank in _PRETENDED.items():
        if worker.pretend_adapter(adapter, min(rank, max_adapter_rank or rank)):
            sizes |= {min(_LONGER, most)}
            steps += [(size, _GREEDY, adapter) for size in sorted({min(_LONGER, most), most})]
    try:
        for size, params, adapter in steps:
            starts = _prompts(size, longest, limits.page_tokens, params, adapter)
            rows = tuple(StepRow(start.sequence, 0, len(start.tokens), 1) for start in starts)
            done = worker.run_step(RunStep(0, starts, rows)).done
            for start in starts:
                worker.end_sequence(start.sequence)
            if not done.ok:
                _log.warning("a step of %d tokens failed before serving began: %s", size, done.error)
                return sorted(sizes)
    finally:
        for adapter in _PRETENDED:
            worker.evict_adapter(adapter)
    _log.info("rehearsed steps of %s tokens in %.1f s", sorted(sizes), time.perf_counter() - began)
    return sorted(sizes)


def _prompts(
    size: int, longest: int, page_tokens: int, params: SamplingParams, adapter: AdapterId
) -> tuple[SequenceStart, ...]:
    """Prompts of ``size`` tokens together, all on the same pages: nobody will read what is written."""
    lengths = [min(longest, size - first) for first in range(0, size, longest)]
    return tuple(
        SequenceStart(
            number, 0, adapter, (0,) * length, length, 0, tuple(range(-(-length // page_tokens))), params, ()
        )
        for number, length in enumerate(lengths, 1)
    )
