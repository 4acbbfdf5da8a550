"""Mooncake request traces: JSON lines with timestamp (ms), input_length, output_length, hash_ids.

A hash id stands for 512 tokens of the prompt and all before them (FAST 2025 release), so equal ids are equal
prefixes. Sources and licences: docs/workloads.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.workloads.assembly import Adapters
from manylora.workloads.stream import Piece, Stream, StreamRequest, in_order
from manylora.workloads.text_file import BadLine, TextFile, array, decimal, whole

BLOCK_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def load(
    path: Path | str,
    *,
    adapters: Adapters | None = None,
    spread_s: float = 0.0,
    seed: int = 0,
    limit: int | None = None,
    skip_bad_lines: bool = False,
) -> Stream:
    """The first ``limit`` requests, each a conversation of its own whose prompt is pieces of 512 tokens.

    Arrivals count from the earliest of them, as a part cut out of a trace may begin late. The last piece of a
    prompt is what is left of its length. The conversation trace's timestamps come in steps of 3 s: ``spread_s``
    delays each request by a uniform draw below it, by ``seed``. Key of a request: its second hash id (its first,
    of a single one). In the conversation trace all requests begin with the same block and the second tells
    conversations apart, so requests that share more than an opening share an adapter. Raises ConfigError for a
    malformed line.
    """
    file = TextFile(path, skip_bad_lines)
    adapters = adapters or Adapters()
    draws = random.Random(seed)
    seen: dict[tuple[int, int], Piece] = {}
    rows = list(itertools.islice(file.records(_row), limit))
    began_s = min((row.arrival_s for row in rows), default=0.0)
    requests = []
    for number, row in enumerate(rows):
        arrival_s = row.arrival_s - began_s + draws.random() * spread_s
        adapter = adapters.choose(str(row.blocks[:2][-1]))
        prompt = _pieces(row, seen)
        requests.append(StreamRequest(arrival_s, adapter, number, 0, prompt, row.output_tokens))
    notes = ["Mooncake trace, Apache-2.0: real lengths and prefixes by 512-token blocks, no adapters"]
    if spread_s:
        notes.append(f"arrivals: delayed by a uniform draw below {spread_s:g} s, seed {seed}")
    return in_order("mooncake", requests, adapters.ranks, (*notes, *file.notes))


def _pieces(row: _Row, seen: dict[tuple[int, int], Piece]) -> tuple[Piece, ...]:
    last = row.input_tokens - BLOCK_TOKENS * (len(row.blocks) - 1)
    sizes = [BLOCK_TOKENS] * (len(row.blocks) - 1) + [last]
    return tuple(
        seen.setdefault((block, size), Piece(("mooncake", block), size))
        for block, size in zip(row.blocks, sizes)
    )


def _row(row: Mapping[str, Any]) -> _Row:
    blocks = array(row, "hash_ids")
    if not all(type(block) is int for block in blocks):
        raise BadLine("hash_ids, whole numbers", blocks)
    input_tokens = whole(row, "input_length", 1)
    expected = -(-input_tokens // BLOCK_TOKENS)
    if len(blocks) != expected:
        raise BadLine(
            f"{expected} hash_ids for {input_tokens} tokens in blocks of {BLOCK_TOKENS}", len(blocks)
        )
    return _Row(decimal(row, "timestamp") / 1000, input_tokens, whole(row, "output_length", 1), tuple(blocks))
