"""Streams: what is refused, and what derived numbers mean."""

from __future__ import annotations

import dataclasses

import pytest
from manylora_lab.workloads.stream import Piece, Stream, StreamRequest, in_order, prompt_tokens

from manylora.config.declaring import ConfigError

FIRST = StreamRequest(0.0, 0, 1, 0, (Piece("a", 10),), 5)
SECOND = StreamRequest(2.0, 0, 1, 1, (Piece("b", 3), Piece("c", 4)), 6)
OTHER = StreamRequest(1.0, None, 2, 0, (Piece("a", 10),), 1)


def test_a_prompt_is_what_was_said_and_what_is_new() -> None:
    stream = in_order("w", [FIRST, SECOND, OTHER], [8], [])
    assert [request.conversation for request in stream.requests] == [1, 2, 1]
    assert prompt_tokens(stream.requests) == [10, 10, 10 + 5 + 3 + 4]
    assert stream.duration_s == 2.0
    assert stream.with_rate(4.0).duration_s == 0.5
    assert stream.first(2).requests == (FIRST, OTHER)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "no requests"),
        ([SECOND], "comes where turn 0 should"),
        ([FIRST, dataclasses.replace(SECOND, adapter=None)], "names adapter None, earlier turns 0"),
        ([dataclasses.replace(FIRST, adapter=1)], "adapter 1 of 1"),
        ([dataclasses.replace(FIRST, prompt=())], "empty prompt"),
        ([dataclasses.replace(FIRST, output_tokens=0)], "generates 0 tokens"),
        ([dataclasses.replace(FIRST, arrival_s=float("nan"))], "arrives at nan"),
        ([SECOND, FIRST], "comes where turn 0 should"),
        ([FIRST, dataclasses.replace(OTHER, arrival_s=-1.0)], "arrives at -1.0, after one of 0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(requests: list[StreamRequest], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Stream("w", tuple(requests), (8,))


def test_pieces_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        Piece("a", 0)
    with pytest.raises(ConfigError, match="names 1 ids"):
        Piece("a", 2, (1,))
    with pytest.raises(ConfigError, match="scaled"):
        in_order("w", [FIRST], [8], []).with_rate(0.0)
    with pytest.raises(ConfigError, match="at least 1 request"):
        in_order("w", [FIRST], [8], []).first(0)


def test_lengths_are_scaled_and_what_was_equal_stays_so() -> None:
    shared = Piece("system", 10)
    requests = tuple(
        StreamRequest(0.5 * place, None, place, 0, (shared, Piece(place, 4, (1, 2, 3, 4))), 3)
        for place in range(3)
    )
    stream = Stream("two pieces", requests)
    longer = stream.with_lengths(2.5)
    assert [piece.num_tokens for piece in longer.requests[1].prompt] == [25, 10]
    assert longer.requests[1].output_tokens == 8
    assert longer.requests[0].prompt[0] == longer.requests[2].prompt[0]
    assert [request.arrival_s for request in longer.requests] == [request.arrival_s for request in requests]
    assert stream.with_lengths(0.01).requests[0].output_tokens == 1
    for scale in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="scaled by numbers above 0"):
            stream.with_lengths(scale)
