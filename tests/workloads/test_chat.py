"""Chat traces: what is read, what is refused and how."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.workloads.chat import TRACES, conversations, prefix_bound, read_turns, shrunk

from manylora.config.declaring import ConfigError


def row(**changes: Any) -> dict[str, Any]:
    return {
        "arrival_s": 0.5, "conversation": 3, "turn": 0, "adapter": 7, "rank": 32, "history_tokens": 0,
        "user_tokens": 10, "reply_tokens": 20, **changes,
    }  # fmt: skip


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows))
    return path


@pytest.mark.parametrize(("rate", "num_turns"), [(5, 225), (10, 450), (20, 900)])
def test_the_shipped_traces(rate: int, num_turns: int) -> None:
    turns = read_turns(TRACES / f"chat_{rate}rps.jsonl.gz")
    assert len(turns) == num_turns
    assert {turn.rank for turn in turns} == {32, 64}
    assert all(0 <= turn.adapter < 100 for turn in turns)
    assert 0.84 < prefix_bound(turns) < 0.86
    assert max(turn.prompt_tokens + turn.reply_tokens for turn in turns) < 4096


def test_a_limit_keeps_whole_beginnings() -> None:
    turns = read_turns(TRACES / "chat_5rps.jsonl.gz", 100)
    assert len(turns) == 100
    assert [turn.arrival_s for turn in turns] == sorted(turn.arrival_s for turn in turns)
    for its_turns in conversations(turns).values():
        assert [turn.turn for turn in its_turns] == list(range(len(its_turns)))


def test_shrunk_lengths_add_up() -> None:
    small = shrunk(read_turns(TRACES / "chat_5rps.jsonl.gz"), 16)
    for its_turns in conversations(small).values():
        history = 0
        for turn in its_turns:
            assert turn.history_tokens == history
            assert turn.user_tokens >= 1
            assert turn.reply_tokens >= 1
            history += turn.user_tokens + turn.reply_tokens
    assert max(turn.prompt_tokens for turn in small) < 120


def test_plain_and_gzipped_files_and_any_order(tmp_path: Path) -> None:
    rows = [row(turn=1, arrival_s=2, history_tokens=30), row(), row(conversation=4, arrival_s=1.0)]
    plain = write(tmp_path / "plain.jsonl", *rows)
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_turns(plain) == read_turns(packed)
    assert [turn.conversation for turn in read_turns(plain)] == [3, 4, 3]
    assert prefix_bound(read_turns(plain)) == 30 / (10 + 10 + 40)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "found an empty file"),
        (["[]"], "is empty"),
        (["not JSON\n"], "line 1: expected one JSON object a line, found 'not JSON'"),
        ([row(), "[1]\n"], "line 2: expected a JSON object, found '[1]'"),
        ([{k: v for k, v in row().items() if k != "rank"}], "line 1: expected rank, a whole number"),
        ([row(user_tokens=0)], "expected user_tokens, a whole number from 1"),
        ([row(user_tokens=10**400)], "expected user_tokens, a whole number from 1 to 1000000000"),
        ([row(adapter="x")], "expected adapter, a whole number"),
        ([row(), row(adapter=10**9)], "line 2: expected adapter, a whole number from 0 to 999999"),
        ([row(rank=10**9)], "expected rank, a whole number from 1 to 65536"),
        ([row(turn=True)], "expected turn, a whole number"),
        ([row(arrival_s=-1)], "expected arrival_s, a number from 0"),
        ([row(arrival_s=float("nan"))], "expected arrival_s, a number from 0"),
        ([row(), row(arrival_s=1e308)], "line 2: expected arrival_s, a number from 0 to 1e+15"),
        ([row(turn=1, history_tokens=30)], "line 1: conversation 3 has turn 1 where turn 0"),
        (
            [row(), row(turn=1, arrival_s=1, history_tokens=30, adapter=8)],
            "line 2: conversation 3 changes its adapter from 7 to 8",
        ),
        (
            [row(arrival_s=2), row(conversation=4, arrival_s=1, rank=64)],
            "line 1: conversation 3: expected rank 64",
        ),
        (
            [row(), row(turn=1, arrival_s=1, history_tokens=29)],
            "line 2: conversation 3, turn 1: expected history_tokens 30",
        ),
    ],
)
def test_bad_traces_in_one_line(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_turns(write(tmp_path / "trace.jsonl", *rows))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_turns(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot read"):
        read_turns(tmp_path)
    cut = tmp_path / "cut.gz"
    cut.write_bytes((TRACES / "chat_5rps.jsonl.gz").read_bytes()[:500])
    with pytest.raises(ConfigError, match=r"cut.gz, line \d+: expected gzip data to the end of the file"):
        read_turns(cut)
    with pytest.raises(ConfigError, match="at least 1"):
        read_turns(TRACES / "chat_5rps.jsonl.gz", 0)
