"""A device made of dictionaries.

It remembers what every page of both tiers holds, so that a step which reads a page that is not what its
sequence believes fails at once, and its "model" is a hash, so that any schedule must give an undisturbed run's
tokens.
"""

from __future__ import annotations

import dataclasses
import zlib

from manylora.protocol.commands import (
    Command,
    CopyPages,
    EndSequence,
    EvictAdapter,
    ReadAdapter,
    RunStep,
    SequenceStart,
    SetMerged,
    SwapPages,
)
from manylora.protocol.events import StepDone, SwitchDone
from manylora.types import BASE, SamplingParams

VOCABULARY = 7  # small, so that equal prefixes and stop tokens happen


def next_token(adapter: int, tokens: tuple[int, ...], sample: int) -> int:
    return zlib.crc32(repr((adapter, tokens, sample)).encode()) % VOCABULARY


def undisturbed(
    adapter: int, prompt: tuple[int, ...], params: SamplingParams, stop_ids: tuple[int, ...], sample: int
) -> list[int]:
    """The tokens of one sample when nothing gets in its way."""
    out: list[int] = []
    assert params.max_tokens is not None
    while len(out) < params.max_tokens:
        out.append(next_token(adapter, prompt + tuple(out), sample))
        if out[-1] in stop_ids and len(out) >= params.min_tokens:
            break
    return out


@dataclasses.dataclass
class _Sequence:
    start: SequenceStart
    tokens: list[int]
    pages: list[int]


@dataclasses.dataclass
class _Step:
    """A step in flight: its rows' sequences and adapters' pages, with these pages' tier, and the weights that it
    runs on; None where they are half restored."""

    command: RunStep
    rows: list[tuple[_Sequence, tuple[int, ...], str]]
    weights: int | None
    has_failed_switch: bool


class DeviceModel:
    """Steps end in the order in which they were commanded, at most ``most_steps`` of them in flight.

    What a step reads and writes it reads and writes when it ends: whatever was taken from it too early is seen.

    The base's weights are a state: no adapter is merged into them, or one is, whose rows alone come out right.
    ``steps_wait``: weights are half restored until a switch is answered. A switch fails where ``fails_switch``
    says so; its answer may come late.
    """

    def __init__(self, page_tokens: int, most_steps: int = 1, steps_wait: bool = False) -> None:
        self.page_tokens = page_tokens
        self.long_from: int | None = None  # what ``PolicyConfig`` says
        self.most_steps = most_steps
        self.steps_wait = steps_wait
        self.weights = BASE
        self.fails_switch = False
        self.has_failed_switch = False
        self.switches: list[tuple[SetMerged, bool]] = []  # not answered yet, and whether it has worked
        self.named = BASE  # what the last SetMerged said, BASE from when it is known to have failed
        self.needed: set[int] = set()  # adapters whose weights are merged, or go in or out
        self.num_merged_steps = self.num_switches = 0
        self.content: dict[tuple[int, int], object] = {}
        self.host: dict[tuple[int, int], object] = {}
        self.copies: dict[int, tuple[SwapPages, list[tuple[object, ...]]]] = {}
        self.adapter_pages: dict[int, tuple[int, ...]] = {}
        self.coming: dict[int, tuple[int, ...]] = {}  # adapters that steps may await
        self.failed_copies: set[int] = set()
        self.num_awaiting_steps = self.num_awaited_kv = self.num_served_steps = 0
        self.cpu_workers = 2
        self.sequences: dict[int, _Sequence] = {}
        self.reads: list[ReadAdapter] = []
        self.steps: list[_Step] = []  # in flight, oldest first

    def obey(self, command: Command) -> None:
        match command:
            case RunStep():
                assert len(self.steps) < self.most_steps, "no more steps than it can take"
                for start in command.starts:
                    assert start.sequence not in self.sequences
                    self.sequences[start.sequence] = _Sequence(start, list(start.tokens), list(start.pages))
                # A sequence may be told to end while its step runs; its rows still finish.
                # Likewise an adapter may be evicted meanwhile; its pages stay intact until the step's end.
                self._issue(command)
            case SetMerged():
                self._switch(command)
            case EndSequence():
                del self.sequences[command.sequence]
            case CopyPages():
                for source, target in command.pairs:
                    for offset in range(self.page_tokens):
                        self.content[target, offset] = self.content.get((source, offset))
            case ReadAdapter():
                assert command.adapter not in self.adapter_pages
                assert all(read.adapter != command.adapter for read in self.reads), "one read at a time"
                for page in command.pages:  # the read writes from now on
                    self.fill(self.tier(command.tier), page, "being read")
                self.reads.append(command)
            case SwapPages():
                origin, destination = self.tiers(command)
                before = [self.whole(origin, page) for page, _ in command.pairs]
                for _, page in command.pairs:
                    self.fill(destination, page, ("being copied", command.copy))
                self.copies[command.copy] = (command, before)
                if command.groups and command.adapter is not None:
                    self.coming[command.adapter] = tuple(page for _, page in command.pairs)
            case EvictAdapter():
                assert command.adapter not in self.needed, "a merged adapter stays resident"
                del self.adapter_pages[command.adapter]

    def _issue(self, step: RunStep) -> None:
        assert step.merged == self.named, "a step names what the last SetMerged named"
        weights = None if self.switches and self.steps_wait else self.weights
        needed = [(w.copy, w.sequences) for w in step.awaits] + [(s.copy, s.sequences) for s in step.cpu]
        for copy, sequences in needed:
            assert copy in self.copies, "a step awaits copies that have not been answered"
            assert self.copies[copy][0].groups, "and that steps may await"
            assert set(sequences) <= {row.sequence for row in step.rows}, "for sequences of its own"
        self.num_served_steps += bool(step.cpu)
        self.num_awaiting_steps += bool(step.awaits)
        self.num_awaited_kv += sum(self.copies[wanted.copy][0].adapter is None for wanted in step.awaits)
        awaiting = {sequence for wanted in step.awaits for sequence in wanted.sequences}
        lent: dict[int, tuple[int, ...]] = {}
        for served in step.cpu:
            command = self.copies[served.copy][0]
            assert command.adapter is not None, "the CPU serves adapters"
            for number in served.sequences:
                assert self.sequences[number].start.adapter == command.adapter
                lent[number] = tuple(source for source, _ in command.pairs)
        rows = [
            (self.sequences[row.sequence], lent[row.sequence], "host")
            if row.sequence in lent
            else (*self._resolve(row.sequence, row.sequence in awaiting), "device")
            for row in step.rows
        ]
        beside = {state.start.adapter for state, _, tier in rows if tier == "device"}
        assert not beside & {state.start.adapter for state, _, tier in rows if tier == "host"}, (
            "rows begin alike"
        )
        self.num_merged_steps += step.merged != BASE
        self.steps.append(_Step(step, rows, weights, self.has_failed_switch))

    def _switch(self, command: SetMerged) -> None:
        """It is in order with steps, so those issued from now on run on what it leaves."""
        assert not self.switches, "one switch at a time"
        assert command.adapter == BASE or command.adapter in self.adapter_pages, "what is merged is resident"
        self.needed = {self.named, command.adapter} - {BASE}
        self.named = command.adapter
        self.has_failed_switch = self.fails_switch
        self.weights = BASE if self.fails_switch else command.adapter
        self.switches.append((command, not self.fails_switch))
        self.num_switches += 1

    def end_switch(self, switch_s: float = 0.0) -> SwitchDone:
        """Answer the switch that is under way."""
        command, ok = self.switches.pop()
        for adapter in self.needed:
            self._check_adapter(adapter, self.adapter_pages[adapter])
        if not ok:
            self.named = BASE
        self.needed = {self.named} - {BASE}
        return SwitchDone(command.switch, ok, switch_s, "" if ok else "made to fail")

    def _is_right(self, step: _Step, adapter: int) -> bool:
        """Whether a row of the adapter comes out right."""
        if step.weights is None or (step.weights != step.command.merged and not step.has_failed_switch):
            return False
        return step.weights in (BASE, adapter)

    def _check_adapter(self, adapter: int, pages: tuple[int, ...], tier: str = "device") -> None:
        for index, page in enumerate(pages):
            expected = (("weights", adapter, index),) * self.page_tokens
            assert self.whole(self.tier(tier), page) == expected, "intact adapters"

    def tier(self, name: str) -> dict[tuple[int, int], object]:
        return self.content if name == "device" else self.host

    def tiers(
        self, command: SwapPages
    ) -> tuple[dict[tuple[int, int], object], dict[tuple[int, int], object]]:
        return (self.host, self.content) if command.to_device else (self.content, self.host)

    def whole(self, tier: dict[tuple[int, int], object], page: int) -> tuple[object, ...]:
        return tuple(tier.get((page, offset)) for offset in range(self.page_tokens))

    def fill(self, tier: dict[tuple[int, int], object], page: int, value: object) -> None:
        for offset in range(self.page_tokens):
            tier[page, offset] = value

    def awaited(self) -> list[int]:
        """The copies without an answer that the oldest step awaits."""
        return [wanted.copy for wanted in self.steps[0].command.awaits if wanted.copy in self.copies]

    def end_copy(self, copy: int, ok: bool) -> None:
        """Land a copy, or break it off half way; what it read must have stayed as it was."""
        command, before = self.copies.pop(copy)
        if command.adapter is not None:
            self.coming.pop(command.adapter, None)
        if not ok:
            self.failed_copies.add(copy)
        source, target = self.tiers(command)
        for (origin, page), values in zip(command.pairs, before, strict=True):
            for offset in range(self.page_tokens):
                assert target[page, offset] == ("being copied", copy), "nobody else writes a copy's target"
                is_torn = not ok or source.get((origin, offset)) != values[offset]
                target[page, offset] = ("torn", copy) if is_torn else values[offset]
        if ok and command.adapter is not None:
            assert command.adapter not in self.adapter_pages
            self.adapter_pages[command.adapter] = tuple(page for _, page in command.pairs)

    def _resolve(self, sequence: int, is_awaiting: bool) -> tuple[_Sequence, tuple[int, ...]]:
        state = self.sequences[sequence]
        adapter = state.start.adapter
        if is_awaiting and adapter in self.coming:
            return state, self.coming[adapter]
        return state, () if adapter == BASE else self.adapter_pages[adapter]

    def land(self, read: ReadAdapter, ok: bool) -> None:
        self.reads.remove(read)
        if ok:
            if read.tier == "device":
                self.adapter_pages[read.adapter] = read.pages
            for index, page in enumerate(read.pages):
                self.fill(self.tier(read.tier), page, ("weights", read.adapter, index))

    def draw(self, adapter: int, tokens: tuple[int, ...], sample: int) -> int:
        """The model."""
        return next_token(adapter, tokens, sample)

    def finish_step(self, ok: bool, late: tuple[int, ...] = (), cpu_fails: bool = False) -> StepDone:
        """``late``: of the copies that the step awaits, those that it did not wait for to the end.
        ``cpu_fails``: so do the workers that serve its rows."""
        # Where it awaits what has not been answered it could not be issued: nothing of it is read or written.
        was_issued = not self.awaited()
        assert not ok or was_issued, "what a step awaits is answered before it ends"
        running = self.steps.pop(0)
        step, drawn = running.command, []
        failed = self.failed_copies | set(late)
        invalid = {name for wanted in step.awaits if wanted.copy in failed for name in wanted.sequences}
        invalid |= {name for served in step.cpu if cpu_fails for name in served.sequences}
        for row, (sequence, weights, tier) in zip(step.rows, running.rows, strict=True):
            if not was_issued:
                break
            if row.sequence in invalid:
                self._invalidate_row(sequence, row.start, row.num_tokens)
                if row.num_samples:
                    drawn.append((row.sequence, (VOCABULARY,) * row.num_samples))
                continue
            adapter = sequence.start.adapter
            self._check_adapter(adapter, weights, tier)
            is_right = self._is_right(running, adapter)
            self._run_row(sequence, row.start, row.num_tokens, row.pages, is_right)
            if row.num_samples:
                tokens = tuple(
                    self.draw(adapter, tuple(sequence.tokens), sequence.start.sample + i) + (not is_right)
                    for i in range(row.num_samples)
                )
                sequence.tokens.append(tokens[0])
                drawn.append((row.sequence, tokens))
        done = StepDone(step.step, ok, tuple(drawn) if ok else (), error="" if ok else "made to fail")
        done.invalid = tuple(sorted(invalid)) if ok else ()
        if step.cpu and ok:
            done.cpu_s, done.cpu_workers = 0.001 * (self.cpu_workers > 0), self.cpu_workers
        return done

    def _invalidate_row(self, sequence: _Sequence, start: int, num_tokens: int) -> None:
        for position in range(start, start + num_tokens):
            where = (sequence.pages[position // self.page_tokens], position % self.page_tokens)
            self.content[where] = "invalid"

    def _run_row(
        self,
        sequence: _Sequence,
        start: int,
        num_tokens: int,
        updates: tuple[tuple[int, int], ...],
        is_right: bool,
    ) -> None:
        for index, page in updates:
            if index == len(sequence.pages):
                sequence.pages.append(page)
            else:
                sequence.pages[index] = page
        first_row = sequence.start.first_rotary_row
        if self.long_from is not None:
            is_long = start + num_tokens > self.long_from
            assert first_row == (
                self.long_from if is_long or len(sequence.start.tokens) > self.long_from else 0
            )
        value = hash((sequence.start.adapter, first_row))
        for position, token in enumerate(sequence.tokens[: start + num_tokens]):
            where = (sequence.pages[position // self.page_tokens], position % self.page_tokens)
            value = hash((value, token))  # of all so far: tuples of them would take the square of the memory
            if position >= start:
                self.content[where] = value if is_right else ("wrong", value)
                continue
            held = self.content.get(where)
            assert held == value, f"position {position} holds its own KV, not {held}"
