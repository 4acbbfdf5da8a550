"""Mooncake traces, on real rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manylora_lab.workloads import mooncake
from manylora_lab.workloads.assembly import Adapters
from manylora_lab.workloads.stream import Piece
from manylora_lab.workloads.traces import ReadOptions

from tests.workloads.damage import SAMPLES, refuses, with_line, zipped

TRACE = "mooncake_conversation.jsonl"
ROWS = [json.loads(line) for line in (SAMPLES / TRACE).read_text().splitlines()]


def test_prompts_are_blocks_and_a_rest() -> None:
    stream = mooncake.load(SAMPLES / TRACE)
    assert len(stream.requests) == 40
    first = stream.requests[0]
    # By hand: 2290 tokens are 4 blocks of 512 and 242 more.
    assert first.prompt == (
        Piece(("mooncake", 0), 512),
        Piece(("mooncake", 42), 512),
        Piece(("mooncake", 43), 512),
        Piece(("mooncake", 44), 512),
        Piece(("mooncake", 45), 242),
    )
    assert (first.arrival_s, first.output_tokens) == (0.0, 316)
    assert [request.new_tokens for request in stream.requests] == [row["input_length"] for row in ROWS]
    assert [request.output_tokens for request in stream.requests] == [row["output_length"] for row in ROWS]
    assert [request.arrival_s * 1000 for request in stream.requests] == [row["timestamp"] for row in ROWS]


def test_equal_ids_are_equal_pieces() -> None:
    requests = mooncake.load(SAMPLES / TRACE).requests
    for mine, its in zip(ROWS, requests):
        for other, others in zip(ROWS, requests):
            shared = sum(1 for a, b in zip(mine["hash_ids"], other["hash_ids"]) if a == b)
            assert sum(1 for a, b in zip(its.prompt, others.prompt) if a.identity == b.identity) == shared


def test_arrivals_spread_within_their_step() -> None:
    steps = mooncake.load(SAMPLES / TRACE).requests
    spread = mooncake.load(SAMPLES / TRACE, ReadOptions(seed=4), spread_s=3.0)
    delays = {
        request.conversation: request.arrival_s - steps[request.conversation].arrival_s
        for request in spread.requests
    }
    assert all(0 <= delay < 3 for delay in delays.values())
    assert len(set(delays.values())) == 40
    assert spread.requests == mooncake.load(SAMPLES / TRACE, ReadOptions(seed=4), spread_s=3.0).requests
    assert spread.requests != mooncake.load(SAMPLES / TRACE, ReadOptions(seed=5), spread_s=3.0).requests
    assert any("seed 4" in note for note in spread.notes)


def test_adapters_follow_the_second_block(tmp_path: Path) -> None:
    # Synthetic rows, real schema: an opening for all, two conversations, and a prompt of one block.
    blocks = ([0, 1], [0, 2], [0, 1, 3], [0])
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
            + "\n"
            for ids in blocks
        )
    )
    stream = mooncake.load(path, ReadOptions(adapters=Adapters.in_turn((8, 8, 8))))
    assert [request.adapter for request in stream.requests] == [0, 1, 0, 2]


def test_gzip_and_limit(tmp_path: Path) -> None:
    whole = mooncake.load(zipped(tmp_path, TRACE))
    assert whole.requests == mooncake.load(SAMPLES / TRACE).requests
    assert mooncake.load(SAMPLES / TRACE, ReadOptions(limit=3)).requests == whole.requests[:3]


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ('{"timestamp": 0, "input_length": 1000, "output_len', "one JSON object a line", "output_len"),
        ("[0, 1000, 1, [1, 2]]", "a JSON object", "[0, 1000"),
        (
            '{"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2]}',
            "3 hash_ids for 1025 tokens in blocks of 512",
            "'2'",
        ),
        (
            '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, "2"]}',
            "hash_ids, whole numbers",
            "[1, '2']",
        ),
        (
            '{"timestamp": -1, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}',
            "timestamp, a number from 0",
            "'-1'",
        ),
        (
            '{"timestamp": 0, "output_length": 1, "hash_ids": [1]}',
            "input_length, a whole number from 1",
            "nothing",
        ),
        ('{"timestamp": 0, "input_length": 9, "output_length": 0, "hash_ids": [1]}', "output_length", "'0'"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1}', "hash_ids, an array", "nothing"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, expected: str, found: str) -> None:
    path = with_line(tmp_path, TRACE, 5, line)
    left = refuses(
        lambda skip: mooncake.load(path, ReadOptions(skip_bad_lines=skip)), path, 5, expected, found
    )
    assert len(left.requests) == 39
