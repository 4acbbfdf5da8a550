"""What S-LoRA's Table 3 compares with, in simulation: PEFT, one adapter at a time, and vLLM with merged copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from manylora.config.policy import CacheConfig, PolicyConfig
from manylora_lab.pricing.costs import StepWork, prefill_pairs
from manylora_lab.reproduce.report import Row
from manylora_lab.reproduce.s_lora_cells import (
    BATCH_TOKENS,
    PAGE_TOKENS,
    SETTINGS,
    ServingCase,
    stream_of,
    summary,
)
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import HARDWARE
from manylora_lab.sim.replay import Outcome, Replay
from manylora_lab.workloads.stream import Stream, StreamRequest

PACKED_MEMORY_SHARE = 0.95
"""The share of the card for all copies together: --vllm-mem-ratio of the authors' launch_server.py."""
PACKED_RUNNING = 256
PEFT_BATCH = {"llama-2-7b": 50, "llama-2-13b": 35}
"""Requests: as the authors' run_exp_peft.py notes for Table 3, against running out of memory."""
PEFT_LAUNCH_S = 0.08
"""Seconds beside a step's device work, fitted to the authors' result for S1 with 5 adapters, 0.88 requests a
second."""


# ---------------------------------------------------------------- vLLM-packed


def measure_packed(case: ServingCase) -> Row | None:
    """One engine with merged weights for each adapter, side by side on one card; None where they do not fit.

    Each has its share of the memory, of its bandwidth and of the arithmetic, and no LoRA to compute: an ideal
    split, which suits all of them being busy.
    """
    card, shape = HARDWARE[case.hardware], SETTINGS[case.setting].shape
    room = int(PACKED_MEMORY_SHARE * card.memory_bytes / case.num_adapters) - shape.weight_bytes
    num_pages = room // shape.page_bytes(PAGE_TOKENS)
    longest = -(-1024 // PAGE_TOKENS)  # prompt and output of 512 each
    if num_pages < longest:
        return None
    share = dataclasses.replace(
        card, memory_bytes_s=card.memory_bytes_s / case.num_adapters, flops=card.flops / case.num_adapters
    )
    costs = AnalyticalCosts(shape, share)
    config = PolicyConfig(
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        max_model_len=1024,
        max_num_seqs=PACKED_RUNNING,
        max_batch_tokens=BATCH_TOKENS,
        page_bytes=shape.page_bytes(PAGE_TOKENS),
        cache=CacheConfig("lru"),
    )
    outcomes: list[Outcome] = []
    for requests in by_adapter(stream_of(case).requests).values():
        merged = tuple(dataclasses.replace(request, adapter=None) for request in requests)
        replay = Replay(Stream("merged", merged), config, costs, ())
        replay.run()
        outcomes += replay.outcomes
    return summary(outcomes)


def by_adapter(requests: Sequence[StreamRequest]) -> dict[int | None, list[StreamRequest]]:
    """The requests by adapter, in order of each adapter's first request."""
    found: dict[int | None, list[StreamRequest]] = {}
    for request in requests:
        found.setdefault(request.adapter, []).append(request)
    return found


# ---------------------------------------------------------------- PEFT


def measure_peft(case: ServingCase) -> Row:
    """A server like the authors' run_exp_peft.py: all that wait, grouped by adapter; a group's requests in
    batches, each padded to its longest prompt and generated to its last end; then whatever came meanwhile.
    """
    setting = SETTINGS[case.setting]
    shape = setting.shape
    costs = AnalyticalCosts(shape, HARDWARE[case.hardware], launch_s=PEFT_LAUNCH_S)
    waiting = [*stream_of(case).requests]
    outcomes: list[Outcome] = []
    now = 0.0
    while waiting:
        now = max(now, waiting[0].arrival_s)
        queue = [request for request in waiting if request.arrival_s <= now]
        waiting = waiting[len(queue) :]
        for batch in batches(queue, PEFT_BATCH[setting.model]):
            rank = setting.ranks[(batch[0].adapter or 0) % len(setting.ranks)]
            now = _generate(batch, now, costs, shape.adapter_bytes(rank), outcomes)
    return summary(outcomes)


def batches(queue: Sequence[StreamRequest], most: int) -> Iterator[list[StreamRequest]]:
    """Yield batches, each of one adapter and of ``most`` requests at most."""
    for requests in by_adapter(queue).values():
        for first in range(0, len(requests), most):
            yield requests[first : first + most]


def _generate(
    batch: Sequence[StreamRequest],
    now: float,
    costs: AnalyticalCosts,
    adapter_bytes: int,
    outcomes: list[Outcome],
) -> float:
    """Run a batch from its prefill to its last end, where requests leave as they end; returns when it ends."""
    length, count = max(request.new_tokens for request in batch), len(batch)
    pairs = count * prefill_pairs(0, length)
    tokens = count * length
    now += costs.step_s(StepWork(0, tokens, tokens, adapter_bytes, 1, pairs, tokens * adapter_bytes))
    first_s = now
    done = 1
    for request in sorted(batch, key=lambda request: request.output_tokens):
        while done < request.output_tokens:
            now += costs.step_s(
                StepWork(count, 0, count * (length + done), adapter_bytes, 1, 0, count * adapter_bytes)
            )
            done += 1
        count -= 1
        outcomes.append(
            Outcome(
                request, request.new_tokens, request.arrival_s,
                first_s=first_s, end_s=now, num_tokens=request.output_tokens,
            )
        )  # fmt: skip
    return now
