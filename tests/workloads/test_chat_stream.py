"""Our own chat traces as streams."""

from __future__ import annotations

import pytest
from manylora_lab.workloads.chat import TRACES, Turn, read_turns, to_stream
from manylora_lab.workloads.stream import prompt_tokens

from manylora.config.declaring import ConfigError

TRACE = TRACES / "chat_5rps.jsonl.gz"


def test_prompts_are_as_long_as_in_the_trace() -> None:
    turns = read_turns(TRACE)
    stream = to_stream(turns, "chat_5rps")
    assert len(stream.requests) == 225
    assert prompt_tokens(stream.requests) == [turn.prompt_tokens for turn in turns]
    assert [r.arrival_s for r in stream.requests] == [turn.arrival_s for turn in turns]
    assert all(stream.ranks[turn.adapter] == turn.rank for turn in turns)
    assert [r.output_tokens for r in stream.requests] == [turn.reply_tokens for turn in turns]


def test_ranks() -> None:
    turns = [Turn(0.0, 0, 0, 3, 64, 0, 5, 5), Turn(1.0, 1, 0, 1, 32, 0, 5, 5)]
    assert to_stream(turns).ranks == (32, 32, 32, 64)
    assert to_stream(turns, ranks=(8, 32, 8, 64, 8)).ranks == (8, 32, 8, 64, 8)
    for ranks, words in (
        ((8, 32, 8, 32), "rank 64 in the trace, 32 given"),
        ((8, 32), "64 in the trace, none given"),
    ):
        with pytest.raises(ConfigError, match=words):
            to_stream(turns, ranks=ranks)
    with pytest.raises(ConfigError, match="no requests"):
        to_stream([])
