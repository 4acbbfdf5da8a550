"""BurstGPT: synthetic rows, real schema (the columns and log types of its README)."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from manylora_lab.workloads.assembly import Adapters
from manylora_lab.workloads.traces import BURSTGPT, ReadOptions

from manylora.config.declaring import ConfigError
from tests.workloads.damage import refuses

ROWS = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
3,ChatGPT,400,20,420,Conversation log
10.5,GPT-4,1000,230,1230,API log
11,ChatGPT,50,0,50,API log
11,ChatGPT,60,5,65,API log
90,GPT-4,417,276,693,Conversation log
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "BurstGPT_1.csv"
    written.write_text(ROWS)
    return written


def test_rows(path: Path) -> None:
    stream = BURSTGPT.load(path, ReadOptions(adapters=Adapters.named(("ChatGPT", "GPT-4"), (8, 64))))
    assert [(r.arrival_s, r.adapter, r.new_tokens, r.output_tokens) for r in stream.requests] == [
        (0.0, 0, 400, 20),
        (7.5, 1, 1000, 230),
        (8.0, 0, 60, 5),
        (87.0, 1, 417, 276),
    ]
    assert "1 failed requests (no tokens) left out" in stream.notes


def test_cuts(path: Path) -> None:
    cut = BURSTGPT.load(path, ReadOptions(start_s=7.0, duration_s=80.0))
    assert [(request.arrival_s, request.new_tokens) for request in cut.requests] == [(0.5, 1000), (1.0, 60)]
    api = BURSTGPT.load(path, ReadOptions(only="API log"))
    assert [request.new_tokens for request in api.requests] == [1000, 60]
    assert [request.new_tokens for request in BURSTGPT.load(path, ReadOptions(limit=2)).requests] == [
        400,
        1000,
    ]


def test_no_request_comes_before_the_first(tmp_path: Path) -> None:
    path = tmp_path / "mixed.csv"
    path.write_text(ROWS + "2,ChatGPT,1,1,2,API log\n")
    expected = "Timestamp, not before the first line's 3"
    left = refuses(lambda skip: BURSTGPT.load(path, ReadOptions(skip_bad_lines=skip)), path, 7, expected, "2")
    assert len(left.requests) == 4


def test_columns_may_be_more_and_in_another_order(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_3.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,1,2.5,ChatGPT,100,20,120,Conversation log\n"
    )
    assert BURSTGPT.load(path).requests[0].new_tokens == 100


def test_gzip(path: Path) -> None:
    before = BURSTGPT.load(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert BURSTGPT.load(path) == before


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("10.5,GPT-4,1000", "6 columns", "3: 10.5"),
        ("10.5,GPT-4,1000,230,1231,API log", "Total tokens, 1000 + 230", "'1231'"),
        ("10.5,GPT-4,1000,230,1230,Log", "Log Type, Conversation log or API log", "'Log'"),
        ("noon,GPT-4,1000,230,1230,API log", "Timestamp, a number from 0", "'noon'"),
        ("10.5,GPT-4,1e3,230,1230,API log", "Request tokens, a whole number from 0", "'1e3'"),
    ],
)
def test_bad_lines(path: Path, line: str, expected: str, found: str) -> None:
    path.write_text(ROWS.replace("10.5,GPT-4,1000,230,1230,API log", line))
    left = refuses(
        lambda skip: BURSTGPT.load(path, ReadOptions(skip_bad_lines=skip)), path, 3, expected, found
    )
    assert len(left.requests) == 3


def test_another_header(path: Path) -> None:
    path.write_text(ROWS.replace("Log Type", "Type"))
    with pytest.raises(ConfigError, match="line 1: expected a header with Timestamp, Model"):
        BURSTGPT.load(path)
