"""Drives a worker by hand-made commands: scattered pages, page tables that grow step by step, no policy."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import Any

from manylora_lab.bench.direct import DirectExecutor

from manylora.config.policy import PolicyConfig
from manylora.config.sections import EngineSettings
from manylora.executor.build import build_worker
from manylora.executor.worker import Worker
from manylora.protocol.commands import (
    ReadAdapter,
    RunStep,
    SequenceStart,
    SetMerged,
    StepRow,
    SwapPages,
    Tier,
)
from manylora.protocol.events import AdapterRead, CopyDone, SwitchDone
from manylora.protocol.executor import StepResult
from manylora.types import BASE, EngineInfo, SamplingParams
from tests.executor.tiny import settings_for

LATE = -1
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


@dataclasses.dataclass
class Sequence:
    """What the driver believes of a sequence; ``tokens``: prompt and generated."""

    adapter: int
    tokens: list[int]
    num_prompt: int
    pages: list[int]
    num_computed: int
    start: SequenceStart | None

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Rig:
    """A worker on a tiny model, and the pages that nobody holds."""

    def __init__(self, model: Path, cache: Path, *, pads_steps: bool | None = None, **settings: Any) -> None:
        self.worker, self.policy, self.facts = self.built(
            settings_for(model, **settings), registry_path=cache / "adapters.sqlite", pads_steps=pads_steps
        )
        self.direct = DirectExecutor(self.worker)
        self.free = list(range(self.policy.num_pages))
        random.Random(0).shuffle(self.free)
        self.free_host = list(range(self.policy.num_host_pages))
        random.Random(1).shuffle(self.free_host)
        self.on_host: dict[int, list[int]] = {}  # where adapters lie, of tests that keep some there
        self.sequences: dict[int, Sequence] = {}
        self.num_steps = 0
        self.num_copies = 0
        self.num_switches = 0
        self.merged = BASE

    def built(self, settings: EngineSettings, **how: Any) -> tuple[Worker, PolicyConfig, EngineInfo]:
        return build_worker(settings, **how)

    def connect(self) -> None:
        """Hear the worker's answers again, where others have heard them since."""
        self.direct = DirectExecutor(self.worker)

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def take_host(self, count: int) -> list[int]:
        return [self.free_host.pop() for _ in range(count)]

    # ------------------------------------------------------------ adapters

    def serve(self, adapter: int, path: Path) -> tuple[int, ...]:
        """Add an adapter and bring it into pages of its own."""
        num_pages = self.direct.add_adapter(adapter, str(path)).num_pages
        pages = tuple(self.take(num_pages))
        answer = self.read(adapter, pages)
        assert answer.ok, answer.error
        return pages

    def read(self, adapter: int, pages: tuple[int, ...], tier: Tier = "device") -> AdapterRead:
        """Read and wait for the one answer."""
        return self.direct.read_adapter(ReadAdapter(adapter, pages, tier))

    def swap(
        self, to_device: bool, sources: Ordered[int], destinations: Ordered[int], adapter: int | None = None
    ) -> CopyDone:
        """Copy pages between the tiers and wait for the one answer."""
        self.num_copies += 1
        pairs = tuple(zip(sources, destinations, strict=True))
        return self.direct.swap_pages(SwapPages(self.num_copies, to_device, pairs, adapter))

    def merge(self, adapter: int) -> SwitchDone:
        """Switch and wait for the one answer. The next steps name the adapter, whether or not it went well."""
        self.num_switches += 1
        self.merged = adapter
        return self.direct.set_merged(SetMerged(self.num_switches, adapter))

    def settle(self) -> None:
        """Whatever goes on beside the step loop has ended."""
        if self.worker._merging is not None:
            self.worker._merging.settle()

    # ------------------------------------------------------------ sequences

    def open(
        self,
        sequence: int,
        tokens: list[int],
        adapter: int = BASE,
        *,
        num_prompt: int | None = None,
        num_computed: int = 0,
        pages: list[int] | None = None,
        params: SamplingParams = GREEDY,
        sample: int = 0,
    ) -> Sequence:
        """A sequence that starts with the next step. ``pages`` hold at least ``num_computed`` positions."""
        num_prompt = len(tokens) if num_prompt is None else num_prompt
        held = list(pages or ())
        start = SequenceStart(
            sequence, sample, adapter, tuple(tokens), num_prompt, num_computed, tuple(held), params, ()
        )
        opened = Sequence(adapter, list(tokens), num_prompt, held, num_computed, start)
        self.sequences[sequence] = opened
        return opened

    def row(self, sequence: int, num_tokens: int | None = None, num_samples: int | None = None) -> StepRow:
        """Everything not yet computed, or that many tokens of it; takes pages as they are needed."""
        held = self.sequences[sequence]
        left = len(held.tokens) - held.num_computed
        num_tokens = left if num_tokens is None else num_tokens
        changes = []
        while len(held.pages) * self.policy.page_tokens < held.num_computed + num_tokens:
            changes.append((len(held.pages), self.free.pop()))
            held.pages.append(changes[-1][1])
        if num_samples is None:
            num_samples = 1 if num_tokens == left else 0
        return StepRow(sequence, held.num_computed, num_tokens, num_samples, tuple(changes))

    def command(self, *rows: StepRow) -> RunStep:
        starts = []
        for row in rows:
            held = self.sequences[row.sequence]
            if held.start is not None:
                starts.append(held.start)
        self.num_steps += 1
        return RunStep(self.num_steps, tuple(starts), rows, self.merged)

    def step(self, *rows: StepRow) -> StepResult:
        """Run the rows; on success the sequences advance."""
        return self.run(self.command(*rows))

    def run(self, command: RunStep) -> StepResult:
        self.direct.issue_step(command)
        return self.finish(command)

    def issue(self, *rows: StepRow) -> RunStep:
        """Start a step. The sequences advance by its rows at once, and know of its tokens that they are coming:
        ``LATE`` stands for each of them until ``finish``."""
        command = self.command(*rows)
        self.direct.issue_step(command)
        for row in rows:
            held = self.sequences[row.sequence]
            held.num_computed += row.num_tokens
            held.start = None
            if row.num_samples:
                held.tokens.append(LATE)
        return command

    def arrive(self, command: RunStep) -> StepResult:
        """Wait for a step that ``issue`` started."""
        result = self.direct.wait_step(command)
        assert result.done.ok, result.done.error
        for row in command.rows:
            if row.num_samples:
                self.sequences[row.sequence].tokens[row.start + row.num_tokens] = dict(result.done.tokens)[
                    row.sequence
                ][0]
        return result

    def finish(self, command: RunStep) -> StepResult:
        """Wait for a step; on success the sequences advance."""
        result = self.direct.wait_step(command)
        if result.done.ok:
            for row in command.rows:
                self.sequences[row.sequence].num_computed += row.num_tokens
                self.sequences[row.sequence].start = None
            for sequence, tokens in result.done.tokens:
                self.sequences[sequence].tokens.append(tokens[0])
        return result

    def decode_overlapped(self, steps: int, *sequences: int) -> None:
        """As ``decode``, each step but the first issued while the one before it is on its way."""
        before = None
        for _ in range(steps):
            issued = self.issue(*(self.row(sequence) for sequence in sequences))
            if before is not None:
                self.arrive(before)
            before = issued
        if before is not None:
            self.arrive(before)

    def decode(self, steps: int, *sequences: int) -> None:
        """So many steps in which each sequence computes what it has left."""
        for _ in range(steps):
            result = self.step(*(self.row(sequence) for sequence in sequences))
            assert result.done.ok, result.done.error
