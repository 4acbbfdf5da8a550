"""A device that only takes time: commands in, and when each is done, out.

Its model is the simplest that a conversation can be checked against: the next token is the last one plus one.
Owns the lanes on which copies and reads queue, and the chance in what they take; knows no policy and no requests.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import random
from collections.abc import Mapping, Sequence
from typing import Literal

from manylora.config.merging import MergeTimes
from manylora.protocol.commands import Command, EndSequence, ReadAdapter, RunStep, SetMerged, SwapPages
from manylora.protocol.events import AdapterRead, CopyDone, StepDone, SwitchDone
from manylora.types import BASE, AdapterId, SequenceId
from manylora_lab.pricing.costs import IDLE_S, StepCosts, prefill_pairs, step_work
from manylora_lab.sim.cold import NOTHING_COLD, ColdCosts, Landings, link_s

Answer = tuple[float, StepDone | CopyDone | AdapterRead | SwitchDone]
"""When, and what."""

_SEED = 0
Kernel = Literal["shared", "mbgmv", "bgmv"]
NO_SWITCHES = MergeTimes()
"""Of a device on which nothing is merged."""


@dataclasses.dataclass(frozen=True, slots=True)
class MergeCosts:
    """What a step takes on merged weights, by its tokens, as measured with one adapter, beside ``StepCosts``.

    ``change_s``: a switch from one adapter to another. For each of the ascending ``num_tokens``: ``merged``, a
    merged step over one of the base alone by ``StepCosts``. Between two sizes it is between theirs.
    """

    change_s: float
    num_tokens: tuple[int, ...]
    merged: tuple[float, ...]

    def step_s(self, num_tokens: int, base_s: float) -> float:
        """A merged step that takes ``base_s`` on the base alone."""
        sizes = self.num_tokens
        place = bisect.bisect_left(sizes, num_tokens)
        high = min(place, len(sizes) - 1)
        low = max(high - 1, 0) if place < len(sizes) else high
        part = (num_tokens - sizes[low]) / (sizes[high] - sizes[low]) if high > low else 0.0
        part = max(part, 0.0)
        return (self.merged[low] + part * (self.merged[high] - self.merged[low])) * base_s


class SimulatedDevice:
    """Prices commands. Moments are seconds of the caller's clock, which never goes back. A new device that is
    told the same at the same moments takes as long: what is drawn comes from one seed.

    A switch of what is merged takes ``switches`` of the compute timeline. Merged steps read no adapter's
    bytes; ``merging`` says how far that is from what was measured, where it was.

    ``kernel``: which adapters' bytes a step reads. shared: those of each distinct one, once. mbgmv: those of each
    row's, also where rows share one. bgmv: for each row as many as the largest one has (CaraServe §2.3).
    """

    def __init__(
        self,
        costs: StepCosts,
        page_bytes: int,
        adapter_pages: Mapping[AdapterId, int],
        switches: MergeTimes = NO_SWITCHES,
        merging: MergeCosts | None = None,
        kernel: Kernel = "shared",
        copy_limit: int | None = None,
        cold: ColdCosts = NOTHING_COLD,
    ) -> None:
        """``copy_limit``: most bytes a second that copies in either direction move. ``cold``: of cold starts."""
        self._copy_limit = copy_limit
        self._cold = cold
        self._landings = Landings(cold)
        self._costs = costs
        self._merging = merging
        self._switches = switches
        self._kernel = kernel
        self._merged: AdapterId = BASE
        self._page_bytes = page_bytes
        self._adapter_bytes = {adapter: pages * page_bytes for adapter, pages in adapter_pages.items()}
        # By sequence: its adapter with its bytes, and what its last token would be at position 0.
        self._sequences: dict[SequenceId, tuple[AdapterId, int, int]] = {}
        self._lane_free_at = {True: 0.0, False: 0.0}
        self._readers_free_at = [0.0] * costs.reads_at_once
        self._steps_end = 0.0
        self._told_at = {True: 0.0, False: 0.0}
        # Begin and end of each copy, of either lane, that a step may still meet.
        self._copied: collections.deque[tuple[float, float]] = collections.deque()
        self._random = random.Random(_SEED).random

    def obey(self, command: Command, now: float) -> Answer | None:
        """What the command leads to; None for what takes no time."""
        match command:
            case RunStep():
                return self._run_step(command, now)
            case EndSequence():
                self._sequences.pop(command.sequence, None)
            case SwapPages():
                return self._copy(command, now)
            case ReadAdapter():
                return self._read(command, now)
            case SetMerged():
                return self._switch(command, now)
        return None

    def _run_step(self, step: RunStep, now: float) -> Answer:
        sequences = self._sequences
        for start in step.starts:
            token_at_0 = start.tokens[-1] + 1 - len(start.tokens)
            sequences[start.sequence] = start.adapter, self._adapter_bytes.get(start.adapter, 0), token_at_0
        drawn = []
        decodes, prefill, pairs, kv, token_bytes = len(step.rows), 0, 0, 0, 0
        adapters: dict[AdapterId, int] = {}
        served = {name for rows in step.cpu for name in rows.sequences}
        for number, first, num_tokens, num_samples, _ in step.rows:
            adapter, num_bytes, token_at_0 = sequences[number]
            if number in served:
                num_bytes = 0
            end = first + num_tokens
            kv += end
            if num_tokens > 1:
                decodes -= 1
                prefill += num_tokens
                pairs += prefill_pairs(first, num_tokens)
            if num_bytes and step.merged == BASE:
                adapters[adapter] = num_bytes
                token_bytes += num_tokens * num_bytes
            if num_samples:
                drawn.append((number, (token_at_0 + end,) * num_samples))
        num_bytes = sum(adapters.values())
        if self._kernel != "shared" and adapters:
            num_bytes, token_bytes = self._unshared(step, max(adapters.values()), token_bytes)
        work = step_work((decodes, prefill, kv, num_bytes, len(adapters), pairs, token_bytes))
        costs = self._costs
        seconds = costs.step_s(work)
        if step.merged != BASE and self._merging is not None:
            seconds = self._merging.step_s(decodes + prefill, seconds)
        factors = costs.spread.prefills if prefill else costs.spread.decodes
        if factors:
            seconds *= self._drawn(factors)
        if now >= self._steps_end + IDLE_S:
            seconds += costs.wake_s
        overhead_s = costs.overhead_s(len(step.rows), len(step.starts))
        if step.awaits or step.cpu:
            issue_s, beside_s = self._landings.gate_s(step, now)
            overhead_s, seconds = overhead_s + issue_s, seconds + beside_s
        # What is done between steps is hidden by a step that still runs.
        begin = max(now + overhead_s, self._steps_end)
        if costs.copy_drag:
            seconds += costs.copy_drag * self._copied_s(begin, begin + seconds)
        stall_s = busy_s = cpu_s = 0.0
        if step.cpu:
            busy_s, cpu_s = self._cpu(step, begin)
        if step.awaits or step.cpu:
            stall_s = self._landings.stalled_s(step, begin, seconds, cpu_s)
        self._steps_end = begin + seconds + stall_s
        done = StepDone(step.step, True, tuple(drawn), seconds + stall_s, stall_s=stall_s)
        if step.cpu:
            done.cpu_s, done.cpu_workers = busy_s, self._cold.num_workers
        return self._steps_end, done

    def _cpu(self, step: RunStep, begin: float) -> tuple[float, float]:
        """Of the step's rows that the CPU serves: what its busiest worker computes, and how long they take with
        hand-overs and the way of results to the device. Unless the link has room for both, results take turns
        with a copy that is on its way, and copies that are commanded later begin so much later."""
        cold = self._cold
        tokens = {row.sequence: row.num_tokens for row in step.rows}
        served, num_tokens = [], 0
        for rows in step.cpu:
            count = sum(tokens[sequence] for sequence in rows.sequences)
            num_tokens += count
            served.append((count, self._sequences[rows.sequences[0]][1]))
        num_bytes = num_tokens * cold.result_token_bytes
        busy_s = cold.busy_s(served, sum(free_at > begin for free_at in self._readers_free_at))
        if cold.result_bytes_s is not None:
            return busy_s, cold.rates.step_s + busy_s + num_bytes / cold.result_bytes_s
        back_s = link_s(self._costs, num_bytes, self._copy_limit) if num_bytes else 0.0
        is_shared = self._lane_free_at[True] > begin
        self._lane_free_at[True] = max(self._lane_free_at[True], begin) + back_s
        return busy_s, cold.rates.step_s + busy_s + back_s * (1 + is_shared)

    def wait(self, now: float, seconds: float) -> None:
        """The device computes nothing for so long, after the steps issued so far."""
        self._steps_end = max(now, self._steps_end) + seconds

    def _unshared(self, step: RunStep, largest: int, token_bytes: int) -> tuple[int, int]:
        """Bytes that the rows read of adapters, and those that their tokens compute with."""
        if self._kernel == "mbgmv":
            return sum(self._sequences[row.sequence][1] for row in step.rows), token_bytes
        return len(step.rows) * largest, sum(row.num_tokens for row in step.rows) * largest

    def _switch(self, command: SetMerged, now: float) -> Answer:
        """After the steps issued so far; from one adapter to another by way of the base, where that has to come
        from the host."""
        times, after = self._switches, command.adapter
        seconds = times.restore_s if after == BASE else times.merge_s
        if BASE not in (self._merged, after):
            if self._merging is not None:
                seconds = self._merging.change_s
            elif times.steps_wait:
                seconds += times.restore_s
        self._merged = after
        self._steps_end = max(now, self._steps_end) + seconds
        return self._steps_end, SwitchDone(command.switch, True, seconds)

    def _drawn(self, values: Sequence[float]) -> float:
        return values[int(self._random() * len(values))]

    def _copied_s(self, begin: float, end: float) -> float:
        """How long copies that are known by now run beside a step; nothing asks of earlier steps any more."""
        copied = self._copied
        while copied and copied[0][1] <= begin:
            copied.popleft()
        return sum(max(0.0, min(until, end) - max(since, begin)) for since, until in copied)

    def _copy(self, command: SwapPages, now: float) -> Answer:
        to_device = command.to_device
        num_bytes = len(command.pairs) * self._page_bytes
        seconds = self._costs.copy_s(num_bytes, to_device)
        if self._copy_limit is not None:
            seconds = max(seconds, num_bytes / self._copy_limit)
        # What leaves the device may still be written by the steps issued so far; no step touches where others go.
        begin = now if to_device else max(now, self._steps_end)
        end = max(begin, self._lane_free_at[to_device]) + seconds
        self._lane_free_at[to_device] = end
        if self._costs.copy_drag:
            self._copied.append((end - seconds, end))
        landings = self._costs.spread.landings
        if landings:
            # Those of one direction are answered in order.
            end = max(end + self._drawn(landings), self._told_at[to_device])
            self._told_at[to_device] = end
        if command.groups:
            self._landings.forget(now, self._steps_end)
            begun_s = self._lane_free_at[to_device] - seconds
            self._landings.begun(
                command.copy, begun_s, seconds, command.groups, end, now=now, num_bytes=num_bytes
            )
        return end, CopyDone(command.copy, True, seconds)

    def _read(self, command: ReadAdapter, now: float) -> Answer:
        num_bytes = len(command.pages) * self._page_bytes
        seconds = self._costs.read_s(num_bytes, command.tier == "device")
        if self._costs.spread.reads:
            seconds *= self._drawn(self._costs.spread.reads)
        begin = max(now, heapq.heappop(self._readers_free_at))
        end = begin + seconds
        heapq.heappush(self._readers_free_at, end)
        return end, AdapterRead(command.adapter, True, read_s=seconds)
