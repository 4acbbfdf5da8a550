"""A device that only takes time: commands in, and when each is done, out.

Its model is the simplest that a conversation can be checked against: the next token is the last one plus one.
Owns the lanes on which copies and reads queue; knows no policy and no requests.
"""

from __future__ import annotations

import heapq

from manylora.protocol import (
    AdapterRead,
    Command,
    CopyDone,
    EndSequence,
    ReadAdapter,
    RunStep,
    SequenceStart,
    StepDone,
    SwapPages,
)
from manylora.sim.costs import DeviceCosts
from manylora.types import AdapterId, SequenceId

Answer = tuple[float, StepDone | CopyDone | AdapterRead]
"""When, and what."""


class SimulatedDevice:
    """Prices commands. Moments are seconds of the caller's clock, which never goes back."""

    def __init__(self, costs: DeviceCosts, page_bytes: int, adapter_pages: dict[AdapterId, int]) -> None:
        self._costs = costs
        self._page_bytes = page_bytes
        self._adapter_pages = adapter_pages
        self._sequences: dict[SequenceId, SequenceStart] = {}
        self._lane_free_at = {True: 0.0, False: 0.0}
        self._readers_free_at = [0.0] * costs.reads_at_once
        self.busy_until = 0.0

    def obey(self, command: Command, now: float) -> Answer | None:
        """What the command leads to; None for what takes no time."""
        match command:
            case RunStep():
                return self._run_step(command, now)
            case SwapPages():
                return self._copy(command, now)
            case ReadAdapter():
                return self._read(command, now)
            case EndSequence():
                self._sequences.pop(command.sequence, None)
        return None

    def _run_step(self, step: RunStep, now: float) -> Answer:
        for start in step.starts:
            self._sequences[start.sequence] = start
        drawn = []
        decodes = prefill = kv = 0
        adapters = set()
        for row in step.rows:
            start = self._sequences[row.sequence]
            end = row.start + row.num_tokens
            if row.num_tokens == 1:
                decodes += 1
            else:
                prefill += row.num_tokens
            kv += end
            adapters.add(start.adapter)
            if row.num_samples:
                drawn.append((row.sequence, (start.tokens[0] + end,) * row.num_samples))
        pages = sum(self._adapter_pages.get(adapter, 0) for adapter in adapters)
        seconds = self._costs.step_s(decodes, prefill, kv, pages * self._page_bytes)
        self.busy_until = now + seconds
        return self.busy_until, StepDone(step.step, True, tuple(drawn), seconds)

    def _copy(self, command: SwapPages, now: float) -> Answer:
        seconds = self._costs.copy_s(len(command.pairs) * self._page_bytes)
        end = max(now, self._lane_free_at[command.to_device]) + seconds
        self._lane_free_at[command.to_device] = end
        return end, CopyDone(command.copy, True, seconds)

    def _read(self, command: ReadAdapter, now: float) -> Answer:
        seconds = self._costs.read_s(len(command.pages) * self._page_bytes)
        end = max(now, heapq.heappop(self._readers_free_at)) + seconds
        heapq.heappush(self._readers_free_at, end)
        return end, AdapterRead(command.adapter, True, read_s=seconds)
