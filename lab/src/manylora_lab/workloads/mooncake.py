"""Mooncake request traces: JSON lines with timestamp (ms), input_length, output_length, hash_ids.

A hash id stands for 512 tokens of the prompt and all before them (FAST 2025 release), so equal ids are equal
prefixes. Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec

from manylora_lab.workloads.rows import Number, Positive, RowType
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest, in_order
from manylora_lab.workloads.text_file import BadLine, TextFile
from manylora_lab.workloads.traces import WHOLE, ReadOptions

BLOCK_TOKENS = 512


class _Row(msgspec.Struct, frozen=True):
    hash_ids: list[int]
    input_length: Positive
    timestamp: Number
    output_length: Positive

    def __post_init__(self) -> None:
        expected = -(-self.input_length // BLOCK_TOKENS)
        if len(self.hash_ids) != expected:
            what = f"{expected} hash_ids for {self.input_length} tokens in blocks of {BLOCK_TOKENS}"
            raise BadLine(what, len(self.hash_ids))

    @property
    def at_s(self) -> float:
        return self.timestamp / 1000

    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Each with its length in tokens; the last has what is left of the prompt."""
        last = self.input_length - BLOCK_TOKENS * (len(self.hash_ids) - 1)
        sizes = [BLOCK_TOKENS] * (len(self.hash_ids) - 1) + [last]
        return tuple(zip(self.hash_ids, sizes))


def load(path: Path | str, options: ReadOptions = WHOLE, spread_s: float = 0.0) -> Stream:
    """The first ``options.limit`` requests, each a conversation of its own whose prompt is pieces of 512 tokens.

    Arrivals count from the earliest of them, as a part cut out of a trace may begin late. The last piece of a
    prompt is what is left of its length. The conversation trace's timestamps come in steps of 3 s: ``spread_s``
    delays each request by a uniform draw below it, by ``options.seed``. Key of a request: its second hash id (its
    first, of a single one). In the conversation trace all requests begin with the same block and the second tells
    conversations apart, so requests that share more than an opening share an adapter. Raises ConfigError for a
    malformed line.
    """
    file = TextFile(path, options.skip_bad_lines)
    draws = random.Random(options.seed)
    rows = list(itertools.islice(file.records(RowType(_Row)), options.limit))
    began_s = min((row.at_s for row in rows), default=0.0)
    seen: dict[tuple[int, int], Piece] = {}
    requests = []
    for number, row in enumerate(rows):
        arrival_s = row.at_s - began_s + draws.random() * spread_s
        adapter = options.adapters.choose(str(row.hash_ids[:2][-1]))
        # Equal pieces are one object: a long trace has many.
        prompt = tuple(
            seen.setdefault((block, size), Piece(("mooncake", block), size)) for block, size in row.blocks()
        )
        requests.append(StreamRequest(arrival_s, adapter, number, 0, prompt, row.output_length))
    notes = ["Mooncake trace, Apache-2.0: real lengths and prefixes by 512-token blocks, no adapters"]
    if spread_s:
        notes.append(f"arrivals: delayed by a uniform draw below {spread_s:g} s, seed {options.seed}")
    return in_order("mooncake", requests, options.adapters.ranks, (*notes, *file.notes))
