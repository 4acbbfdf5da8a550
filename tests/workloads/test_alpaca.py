"""Alpaca: synthetic rows, real schema (the data set's licence keeps its own rows out)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from manylora_lab.workloads import alpaca
from manylora_lab.workloads.assembly import NO_TIMES, Adapters
from manylora_lab.workloads.traces import ReadOptions

from manylora.config.declaring import ConfigError
from tests.workloads.damage import refuses

ROWS = [
    {"instruction": "Name a colour.", "input": "", "output": "Red"},
    {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"},
    {"instruction": "Say nothing.", "input": "", "output": ""},
    {"instruction": "Name a colour.", "input": "", "output": "Blue and green."},
]


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "alpaca_data.json"
    written.write_text(json.dumps(ROWS, indent=4))
    return written


def test_rows(path: Path) -> None:
    stream = alpaca.load(path, ReadOptions(encode=letters, adapters=Adapters.in_turn((8, 16))))
    prompts = ["".join(map(chr, request.prompt[0].tokens or ())) for request in stream.requests]
    assert prompts == ["Name a colour.", "Add the numbers.\n\n2 and 3", "Name a colour."]
    assert [request.output_tokens for request in stream.requests] == [3, 1, 15]
    assert [request.conversation for request in stream.requests] == [0, 1, 3]
    assert [request.adapter for request in stream.requests] == [0, 1, 0]
    assert stream.requests[0].prompt == stream.requests[2].prompt
    assert "1 records without an answer left out" in stream.notes
    assert NO_TIMES in stream.notes
    assert any("CC BY-NC 4.0" in note for note in stream.notes)


def test_lengths_without_a_tokenizer(path: Path) -> None:
    stream = alpaca.load(path)
    # By hand: 14, 25 and 14 characters; 3, 1 and 15.
    assert [request.new_tokens for request in stream.requests] == [4, 7, 4]
    assert [request.output_tokens for request in stream.requests] == [1, 1, 4]


def test_one_record_a_line_gzipped(path: Path, tmp_path: Path) -> None:
    lines = tmp_path / "alpaca.jsonl.gz"
    lines.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in ROWS).encode()))
    assert alpaca.load(lines) == alpaca.load(path)
    assert len(alpaca.load(path, ReadOptions(limit=2)).requests) == 2


@pytest.mark.parametrize(
    ("name", "value", "expected", "found"),
    [
        ("instruction", 7, "instruction, a text", "'7'"),
        ("instruction", " ", "instruction, a text that is not empty", "''"),
        ("input", None, "input, a text", "'None'"),
        ("output", ["5"], "output, a text", "5"),
    ],
)
def test_bad_records(path: Path, name: str, value: object, expected: str, found: str) -> None:
    path.write_text(json.dumps([ROWS[0], {**ROWS[1], name: value}, ROWS[3]], indent=4))
    left = refuses(lambda skip: alpaca.load(path, ReadOptions(skip_bad_lines=skip)), path, 7, expected, found)
    assert len(left.requests) == 2


def test_a_file_cut_short(path: Path) -> None:
    path.write_text(path.read_text()[:-60])
    refuses(
        lambda skip: alpaca.load(path, ReadOptions(skip_bad_lines=skip)),
        path,
        17,
        "a whole JSON object in the array",
        "{",
    )


def test_a_file_without_records(path: Path) -> None:
    path.write_text("[]")
    with pytest.raises(ConfigError, match="alpaca has no requests"):
        alpaca.load(path)
