"""Pieces from text, turns from dialogs, adapters by key, start times."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from manylora_lab.workloads.assembly import (
    NO_TIMES,
    Adapters,
    Dialog,
    Message,
    TextPieces,
    assign,
    requests_of_dialogs,
    with_arrivals,
)
from manylora_lab.workloads.stream import Stream, in_order, prompt_tokens

from manylora.config.declaring import ConfigError


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def dialog(key: str, *said: str) -> Dialog:
    """'a:' is what the model says, 'u:' is input."""
    return Dialog(key, tuple(Message(text[0] == "a", text[2:]) for text in said))


def stream(*dialogs: Dialog, adapters: Adapters | None = None) -> Stream:
    adapters = adapters or Adapters()
    requests, _ = requests_of_dialogs(dialogs, adapters, TextPieces(letters))
    return in_order("w", requests, adapters.ranks, ["a source", NO_TIMES])


def turns(*said: str) -> list[tuple[str, int]]:
    """Of each turn the prompt's text and the reply's length."""
    found = stream(dialog("k", *said), dialog("k", "u:.", "a:.")).requests[:-1]
    assert [request.turn for request in found] == list(range(len(found)))
    return [
        ("".join(chr(t) for p in r.prompt for t in p.tokens or ()), r.output_tokens)
        for r in found
        if r.conversation == 0
    ]


def test_turns_of_a_dialog() -> None:
    assert turns("u:hello", "a:hi", "u:more", "a:yes") == [("hello", 2), ("more", 3)]
    assert turns("a:welcome", "u:hello", "a:hi") == [("welcomehello", 2)]
    assert turns("u:a", "u:b", "a:x", "a:yz", "u:c", "a:w") == [("ab", 3), ("c", 1)]
    assert turns("u:hello", "a:hi", "u:bye") == [("hello", 2)]
    assert turns("u:hello", "a:", "u:are you there", "a:yes") == [("helloare you there", 3)]
    assert turns("u:hello", "a:hi", "u:", "a:there") == [("hello", 7)]
    assert turns("u:only") == turns("a:only") == turns() == []


def test_a_later_prompt_holds_what_was_said() -> None:
    requests = stream(dialog("k", "a:12", "u:345", "a:6789", "u:0", "a:1")).requests
    assert prompt_tokens(requests) == [5, 5 + 4 + 1]


def test_dialogs_without_an_answer_are_counted() -> None:
    dialogs = [dialog("k", "u:a", "a:b"), dialog("l", "u:unanswered"), dialog("m"), dialog("k", "u:c", "a:d")]
    requests, unanswered = requests_of_dialogs(dialogs, Adapters(), TextPieces(letters))
    assert [request.conversation for request in requests] == [0, 3]
    assert unanswered == 2


def test_lengths_without_a_tokenizer() -> None:
    pieces = TextPieces()
    assert [pieces.length(text) for text in ("", "  ", "a", "abcd", " abcde ", "ありが")] == [
        0,
        0,
        1,
        1,
        2,
        3,
    ]
    assert pieces.pieces("", "hello") == pieces.pieces("hello")
    assert pieces.pieces("hello")[0].tokens is None
    assert "4 UTF-8 bytes" in pieces.notes[0]


def test_equal_texts_are_equal_pieces() -> None:
    pieces = TextPieces(letters)
    assert pieces.pieces("one", "two") == (*pieces.pieces("one"), *pieces.pieces("two"))
    assert pieces.pieces("one")[0].identity != pieces.pieces("two")[0].identity
    assert pieces.pieces("one")[0].tokens == (111, 110, 101)


def test_adapters_by_key() -> None:
    hashed = Adapters.by_hash((8, 16, 32))
    chosen = [hashed.choose(f"client {number}") for number in range(300)]
    assert chosen == [Adapters.by_hash((8, 16, 32)).choose(f"client {number}") for number in range(300)]
    assert all(chosen.count(adapter) > 70 for adapter in range(3))
    assert hashed.choose("vicuna-13b") == 0x0558D515D8B56621 % 3  # what b2sum -l 64 prints

    in_turn = Adapters.in_turn((8, 16))
    assert [in_turn.choose(key) for key in "abcab"] == [0, 1, 0, 0, 1]
    named = Adapters.named(("gpt", "claude"), (8, 16))
    assert [named.choose(key) for key in ("claude", "gpt", "else")] == [1, 0, None]
    assert Adapters().choose("anybody") is None
    for nobody in (Adapters.by_hash, Adapters.in_turn):
        with pytest.raises(ConfigError, match="not over none"):
            nobody(())
    with pytest.raises(ConfigError, match="2 adapters are named, 1 ranks"):
        Adapters.named(("a", "b"), (8,))


def test_a_stream_takes_its_ranks_from_the_adapters() -> None:
    found = stream(
        dialog("x", "u:a", "a:b"), dialog("y", "u:a", "a:b"), adapters=Adapters.in_turn((8, 16, 32))
    )
    assert [request.adapter for request in found.requests] == [0, 1]
    assert found.ranks == (8, 16, 32)


def test_adapters_assigned_afterwards() -> None:
    two_turns = dialog("k", "u:a", "a:b", "u:c", "a:d")
    numbers = iter((1, 0))
    found = assign(stream(two_turns, two_turns), (8, 8), lambda request: next(numbers))
    assert [(r.conversation, r.adapter) for r in found.requests] == [(0, 1), (0, 1), (1, 0), (1, 0)]
    with pytest.raises(ConfigError, match="adapter 2 of 2"):
        assign(stream(two_turns), (8, 8), lambda request: 2)


def test_moments_for_conversations_without_times() -> None:
    two_turns = dialog("k", "u:a", "a:b", "u:c", "a:d")
    three = stream(two_turns, two_turns, two_turns)
    assert all(request.arrival_s == 0 for request in three.requests)

    def laid(moments: Iterable[float], gap_s: float) -> list[tuple[float, int, int]]:
        found = with_arrivals(three, moments, lambda: gap_s)
        assert NO_TIMES not in found.notes
        return [(r.arrival_s, r.conversation, r.turn) for r in found.requests]

    # A turn that waited long enough comes before a new conversation.
    assert laid((1.0, 2.0, 6.0, 6.5), 5.0) == [(1.0, 0, 0), (2.0, 1, 0), (6.0, 0, 1), (6.5, 2, 0)]
    # Where no other can begin, turns come early rather than not at all: every moment has its turn.
    early = laid(itertools.count(1.0), 100.0)
    assert early == [(1.0, 0, 0), (2.0, 1, 0), (3.0, 2, 0), (4.0, 0, 1), (5.0, 1, 1), (6.0, 2, 1)]
    with pytest.raises(ConfigError, match="no requests"):
        laid((), 5.0)
