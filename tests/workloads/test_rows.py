"""Rows by columns and types: what each type takes, and what is said of what it does not take."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import pytest
from manylora_lab.workloads.rows import Count, Number, Positive, RowType


class Word(msgspec.Struct, frozen=True):
    role: Literal["user", "model"] = msgspec.field(name="from")
    text: str


class Call(msgspec.Struct, frozen=True):
    at: datetime = msgspec.field(name="TIMESTAMP")
    tokens: Positive
    cost: Number
    kind: Literal["a", "b", "c"]
    blocks: list[int]
    words: list[Word]


GOOD: dict[str, Any] = {
    "TIMESTAMP": "2024-05-10 00:00:01+00:00", "tokens": "3", "cost": "0.5", "kind": "c", "blocks": [1, -2],
    "words": [{"from": "user", "text": "hello", "more": 1}], "more": 2,
}  # fmt: skip


def test_a_row_of_text_or_json() -> None:
    row_type = RowType(Call)
    assert row_type.columns == ("TIMESTAMP", "tokens", "cost", "kind", "blocks", "words")
    began = datetime(2024, 5, 10, 0, 0, 1, tzinfo=UTC)
    expected = Call(began, 3, 0.5, "c", [1, -2], [Word("user", "hello")])
    assert row_type(GOOD) == expected
    assert row_type({**GOOD, "TIMESTAMP": "2024-05-10 00:00:01", "tokens": 3, "cost": 0.5}) == expected


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "TIMESTAMP",
            "2024-05-10",
            "expected TIMESTAMP, as in 2023-11-16 18:17:03.9799600, found '2024-05-10'",
        ),
        ("TIMESTAMP", 5, "expected TIMESTAMP, a text, found '5'"),
        ("tokens", "0", "expected tokens, a whole number from 1 to 1000000000, found '0'"),
        ("cost", -1, "expected cost, a number from 0 to 1e+15, found '-1'"),
        ("kind", "d", "expected kind, one of a, b, c, found 'd'"),
        ("kind", None, "expected kind, a text, found 'None'"),
        ("blocks", [1, True], "expected blocks, whole numbers, found '[1, True]'"),
        ("blocks", 1, "expected blocks, an array, found '1'"),
        ("words", ["x"], "expected a JSON object, found 'x'"),
        ("words", [{"from": "me", "text": "x"}], "expected from, user or model, found 'me'"),
        ("words", [{"from": "user"}], "expected text, a text, found nothing"),
    ],
)
def test_what_is_not_of_its_type(name: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        RowType(Call)({**GOOD, name: value})
    assert str(caught.value) == said


def test_the_first_wrong_column_is_named() -> None:
    with pytest.raises(ValueError, match="expected tokens"):
        RowType(Call)({**GOOD, "cost": "x", "tokens": "x"})


def test_dataclasses_are_rows_too() -> None:
    @dataclasses.dataclass(frozen=True)
    class Plain:
        count: Count

    assert RowType(Plain)({"count": "0"}) == Plain(0)
