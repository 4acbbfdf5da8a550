"""ShareGPT and LMSYS conversations: synthetic rows, real schema. ShareGPT's lengths: real rows."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.workloads.assembly import NO_TIMES, Adapters
from manylora_lab.workloads.conversations import LMSYS, SHAREGPT, LengthPair, load_arena, read_lengths
from manylora_lab.workloads.traces import ReadOptions

from tests.workloads.damage import SAMPLES, refuses, with_line, zipped

LENGTHS = "sharegpt_lengths.csv"


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def sharegpt(name: str, *said: tuple[str, str]) -> dict[str, Any]:
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in said]}


SHAREGPT_ROWS = [
    sharegpt("one_0", ("human", "hello"), ("gpt", "hi"), ("human", "and now?"), ("gpt", "bye")),
    sharegpt("one_1", ("gpt", "as I said"), ("human", "yes"), ("gpt", "so")),
    sharegpt("empty"),
    sharegpt("two_0", ("system", "be brief"), ("user", "hello"), ("chatgpt", "hello to you")),
]


def lmsys(name: str, model: str, language: str, *said: tuple[str, str]) -> dict[str, Any]:
    turns = [{"role": who, "content": text} for who, text in said]
    return {
        "conversation_id": name,
        "model": model,
        "conversation": turns,
        "turn": len(said) // 2,
        "language": language,
        "openai_moderation": [],
        "redacted": False,
    }


LMSYS_ROWS = [
    lmsys("a", "vicuna-13b", "English", ("user", "hello"), ("assistant", "hi")),
    lmsys("b", "koala-13b", "German", ("user", "hallo"), ("assistant", "guten Tag")),
    lmsys("c", "vicuna-13b", "English", ("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", "w")),
]


def an_array(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "array.json"
    path.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]")
    return path


def by_line(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "lines.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(record) for record in records).encode()))
    return path


def test_sharegpt(tmp_path: Path) -> None:
    stream = SHAREGPT.load(an_array(tmp_path, SHAREGPT_ROWS), ReadOptions(encode=letters))
    assert [(r.conversation, r.turn, r.new_tokens, r.output_tokens) for r in stream.requests] == [
        (0, 0, 5, 2),
        (0, 1, 8, 3),
        (1, 0, 9 + 3, 2),
        (3, 0, 8 + 5, 12),
    ]
    assert stream.requests[0].prompt[0] == stream.requests[3].prompt[1]  # both say hello
    assert stream.notes[1:] == (
        "lengths: counted by the given tokenizer",
        NO_TIMES,
        "1 dialogs without an answer left out",
    )
    assert SHAREGPT.load(by_line(tmp_path, SHAREGPT_ROWS), ReadOptions(encode=letters)) == stream


def test_sharegpt_adapters_by_conversation_and_limit(tmp_path: Path) -> None:
    path = an_array(tmp_path, SHAREGPT_ROWS)
    stream = SHAREGPT.load(path, ReadOptions(adapters=Adapters.named(("one_1",), (8,)), limit=2))
    assert [request.adapter for request in stream.requests] == [None, None, 0]


@pytest.mark.parametrize(
    ("record", "expected", "found"),
    [
        ({"conversations": []}, "id, a text", "nothing"),
        ({"id": "x"}, "conversations, an array", "nothing"),
        ({"id": "x", "conversations": ["hello"]}, "a JSON object", "hello"),
        (sharegpt("x", ("moderator", "hello")), "from, one of gpt", "'moderator'"),
        ({"id": "x", "conversations": [{"from": "human"}]}, "value, a text", "nothing"),
    ],
)
def test_sharegpt_bad_records(tmp_path: Path, record: dict[str, Any], expected: str, found: str) -> None:
    path = an_array(tmp_path, [SHAREGPT_ROWS[0], record, SHAREGPT_ROWS[3]])
    left = refuses(
        lambda skip: SHAREGPT.load(path, ReadOptions(skip_bad_lines=skip)), path, 3, expected, found
    )
    assert len(left.requests) == 3


def test_lmsys(tmp_path: Path) -> None:
    stream = LMSYS.load(
        by_line(tmp_path, LMSYS_ROWS), ReadOptions(encode=letters, adapters=Adapters.in_turn((8, 16)))
    )
    assert [(r.conversation, r.turn, r.adapter, r.new_tokens, r.output_tokens) for r in stream.requests] == [
        (0, 0, 0, 5, 2),
        (1, 0, 1, 5, 9),
        (2, 0, 0, 1, 1),
        (2, 1, 0, 1, 1),
    ]
    path = an_array(tmp_path, LMSYS_ROWS)
    assert LMSYS.load(path, ReadOptions(encode=letters, adapters=Adapters.in_turn((8, 16)))) == stream
    english = LMSYS.load(path, ReadOptions(only="English"))
    assert [(request.conversation, request.turn) for request in english.requests] == [(0, 0), (1, 0), (1, 1)]
    assert len(LMSYS.load(path, ReadOptions(only="English", limit=1)).requests) == 1


@pytest.mark.parametrize(
    ("name", "value", "expected", "found"),
    [
        ("model", None, "model, a text", "'None'"),
        ("conversation", "hello", "conversation, an array", "'hello'"),
        (
            "conversation",
            [{"role": "human", "content": "x"}],
            "role, one of assistant, user, system",
            "'human'",
        ),
        ("conversation", [{"role": "user", "content": 1}], "content, a text", "'1'"),
        ("language", 0, "language, a text", "'0'"),
    ],
)
def test_lmsys_bad_records(tmp_path: Path, name: str, value: object, expected: str, found: str) -> None:
    path = an_array(tmp_path, [LMSYS_ROWS[0], {**LMSYS_ROWS[1], name: value}, LMSYS_ROWS[2]])
    left = refuses(lambda skip: LMSYS.load(path, ReadOptions(skip_bad_lines=skip)), path, 3, expected, found)
    assert len(left.requests) == 3


def arena(tstamp: float, a: str, b: str, language: str = "English") -> dict[str, Any]:
    """Both models are asked hello and how; they answer with their names."""
    record: dict[str, Any] = {
        "question_id": "q",
        "winner": "tie",
        "judge": "arena_user_1",
        "turn": 2,
        "anony": True,
    }
    for side, model in (("a", a), ("b", b)):
        record[f"model_{side}"] = model
        record[f"conversation_{side}"] = [
            {"role": role, "content": text}
            for role, text in (("user", "hello"), ("assistant", model), ("user", "how"), ("assistant", model))
        ]
    return {**record, "language": language, "tstamp": tstamp}


def test_arena(tmp_path: Path) -> None:
    rows = [arena(1682351591.5, "koala", "gpt"), arena(1682351590.0, "gpt", "t5", "German")]
    stream = load_arena(
        by_line(tmp_path, rows), ReadOptions(encode=letters, adapters=Adapters.in_turn((8, 16, 32)))
    )
    assert [
        (r.arrival_s, r.conversation, r.turn, r.adapter, r.new_tokens, r.output_tokens)
        for r in stream.requests
    ] == [
        (0.0, 0, 0, 0, 5, 3),
        (0.0, 0, 1, 0, 3, 3),
        (0.0, 1, 0, 1, 5, 2),
        (0.0, 1, 1, 1, 3, 2),
        (1.5, 2, 0, 2, 5, 5),
        (1.5, 2, 1, 2, 3, 5),
        (1.5, 3, 0, 0, 5, 3),
        (1.5, 3, 1, 0, 3, 3),
    ]
    english = load_arena(an_array(tmp_path, rows), ReadOptions(only="English"))
    assert [(request.arrival_s, request.conversation) for request in english.requests] == [
        (0.0, 0),
        (0.0, 0),
        (0.0, 1),
        (0.0, 1),
    ]


@pytest.mark.parametrize(
    ("name", "value", "expected", "found"),
    [
        ("tstamp", "yesterday", "tstamp, a number from 0", "'yesterday'"),
        ("model_b", 5, "model_b, a text", "'5'"),
        ("conversation_a", None, "conversation_a, an array", "'None'"),
    ],
)
def test_arena_bad_records(tmp_path: Path, name: str, value: object, expected: str, found: str) -> None:
    path = an_array(
        tmp_path, [arena(1.0, "a", "b"), {**arena(2.0, "a", "b"), name: value}, arena(3.0, "a", "b")]
    )
    left = refuses(lambda skip: load_arena(path, ReadOptions(skip_bad_lines=skip)), path, 3, expected, found)
    assert len(left.requests) == 8


def test_lengths(tmp_path: Path) -> None:
    found = read_lengths(SAMPLES / LENGTHS)
    assert found.pairs[:3] == (LengthPair(74, 918), LengthPair(290, 905), LengthPair(1402, 711))
    rows = list(csv.DictReader((SAMPLES / LENGTHS).open()))
    assert [sum(pair) for pair in found.pairs] == [int(row["num_total_tokens"]) for row in rows]
    assert read_lengths(zipped(tmp_path, LENGTHS), ReadOptions(limit=3)).pairs == found.pairs[:3]


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("74,918,992", "4 columns", "3: 74"),
        ("0,918,918,0", "num_prefill_tokens, a whole number from 1", "'0'"),
        ("74,x,992,0.1", "num_decode_tokens, a whole number from 1", "'x'"),
    ],
)
def test_lengths_bad_lines(tmp_path: Path, line: str, expected: str, found: str) -> None:
    path = with_line(tmp_path, LENGTHS, 2, line)
    left = refuses(
        lambda skip: read_lengths(path, ReadOptions(skip_bad_lines=skip)), path, 2, expected, found
    )
    assert len(left.pairs) == 39
