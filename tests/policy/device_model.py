"""A device made of dictionaries.

It remembers what every page holds, so that a step which reads a page that is not what its sequence believes
fails at once, and its "model" is a hash, so that any schedule must give an undisturbed run's tokens.
"""

from __future__ import annotations

import dataclasses
import zlib

from manylora.protocol import (
    Command,
    CopyPages,
    EndSequence,
    EvictAdapter,
    ReadAdapter,
    RunStep,
    SequenceStart,
    StepDone,
)
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


class DeviceModel:
    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.content: dict[tuple[int, int], object] = {}
        self.adapter_pages: dict[int, tuple[int, ...]] = {}
        self.sequences: dict[int, _Sequence] = {}
        self.reads: list[ReadAdapter] = []
        self.step: RunStep | None = None
        self.running: list[tuple[_Sequence, tuple[int, ...]]] = []

    def obey(self, command: Command) -> None:
        match command:
            case RunStep():
                assert self.step is None, "one step at a time"
                self.step = command
                for start in command.starts:
                    assert start.sequence not in self.sequences
                    self.sequences[start.sequence] = _Sequence(start, list(start.tokens), list(start.pages))
                # A sequence may be told to end while its step runs; its rows still finish.
                # Likewise an adapter may be evicted meanwhile; its pages stay intact until the step's end.
                self.running = [self._resolve(row.sequence) for row in command.rows]
            case EndSequence():
                del self.sequences[command.sequence]
            case CopyPages():
                for source, target in command.pairs:
                    for offset in range(self.page_tokens):
                        self.content[target, offset] = self.content.get((source, offset))
            case ReadAdapter():
                assert command.adapter not in self.adapter_pages
                for page in command.pages:  # the read writes from now on
                    for offset in range(self.page_tokens):
                        self.content[page, offset] = "being read"
                self.reads.append(command)
            case EvictAdapter():
                del self.adapter_pages[command.adapter]

    def _resolve(self, sequence: int) -> tuple[_Sequence, tuple[int, ...]]:
        state = self.sequences[sequence]
        adapter = state.start.adapter
        return state, () if adapter == BASE else self.adapter_pages[adapter]

    def land(self, read: ReadAdapter, ok: bool) -> None:
        self.reads.remove(read)
        if ok:
            self.adapter_pages[read.adapter] = read.pages
            for page in read.pages:
                for offset in range(self.page_tokens):
                    self.content[page, offset] = ("weights", read.adapter)

    def finish_step(self, ok: bool) -> StepDone:
        step = self.step
        assert step is not None
        self.step = None
        drawn = []
        for row, (sequence, weights) in zip(step.rows, self.running, strict=True):
            for page in weights:
                for offset in range(self.page_tokens):
                    assert self.content[page, offset] == ("weights", sequence.start.adapter), (
                        "intact adapters"
                    )
            self._run_row(sequence, row.start, row.num_tokens, row.pages)
            if row.num_samples:
                tokens = tuple(
                    next_token(sequence.start.adapter, tuple(sequence.tokens), sequence.start.sample + i)
                    for i in range(row.num_samples)
                )
                sequence.tokens.append(tokens[0])
                drawn.append((row.sequence, tokens))
        return StepDone(step.step, ok, tuple(drawn) if ok else (), error="" if ok else "made to fail")

    def _run_row(
        self, sequence: _Sequence, start: int, num_tokens: int, updates: tuple[tuple[int, int], ...]
    ) -> None:
        for index, page in updates:
            if index == len(sequence.pages):
                sequence.pages.append(page)
            else:
                sequence.pages[index] = page
        adapter = sequence.start.adapter
        for position in range(start + num_tokens):
            where = (sequence.pages[position // self.page_tokens], position % self.page_tokens)
            value = (adapter, tuple(sequence.tokens[: position + 1]))
            if position >= start:
                self.content[where] = value
            assert self.content.get(where) == value, f"position {position} holds its own KV"
