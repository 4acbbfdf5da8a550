"""Azure LLM traces, on real rows of both years."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_lab.workloads.assembly import Adapters
from manylora_lab.workloads.traces import AZURE_LLM, ReadOptions

from manylora.config.declaring import ConfigError
from tests.workloads.damage import SAMPLES, refuses, with_line, zipped

CONV = "azure_llm_2023_conv.csv"


def test_2023() -> None:
    stream = AZURE_LLM.load(SAMPLES / CONV)
    assert len(stream.requests) == 30
    first, second = stream.requests[:2]
    assert (first.arrival_s, first.new_tokens, first.output_tokens, first.adapter) == (0.0, 374, 44, None)
    # 18:15:46.6805900 to 18:15:50.9951690, cut to microseconds
    assert second.arrival_s == pytest.approx(4.314579)
    assert (second.new_tokens, second.output_tokens) == (396, 109)
    rows = [
        line.split(",")
        for line in (SAMPLES / CONV).read_text().split()[1::1]
        if "," in line and line[0] == "1"
    ]
    assert [(r.new_tokens, r.output_tokens) for r in stream.requests] == [
        (int(r[1]), int(r[2])) for r in rows
    ]
    assert any("CC BY 4.0" in note for note in stream.notes)


def test_2024(tmp_path: Path) -> None:
    stream = AZURE_LLM.load(SAMPLES / "azure_llm_2024_code.csv")
    assert [round(request.arrival_s, 6) for request in stream.requests] == [
        0,
        0.007405,
        0.012384,
        0.027915,
        0.07396,
    ]
    assert [request.new_tokens for request in stream.requests] == [2162, 2399, 76, 2376, 7670]
    # The other spelling of 2024; synthetic row, real schema.
    path = with_line(tmp_path, "azure_llm_2024_code.csv", 6, "2024-05-10 00:00:01+00:00,7670,8")
    assert AZURE_LLM.load(path).duration_s == pytest.approx(0.99007)


def test_a_cut_in_time_and_number() -> None:
    whole = AZURE_LLM.load(SAMPLES / CONV).requests
    cut = AZURE_LLM.load(SAMPLES / CONV, ReadOptions(start_s=4.0, duration_s=5.0)).requests
    expected = [request for request in whole if 4.0 <= request.arrival_s < 9.0]
    assert 1 < len(expected) < 30
    assert [request.new_tokens for request in cut] == [request.new_tokens for request in expected]
    assert cut[0].arrival_s == pytest.approx(expected[0].arrival_s - 4.0)
    assert len(AZURE_LLM.load(SAMPLES / CONV, ReadOptions(limit=7)).requests) == 7
    with pytest.raises(ConfigError, match="no requests"):
        AZURE_LLM.load(SAMPLES / CONV, ReadOptions(start_s=1e6))


def test_adapters_and_gzip(tmp_path: Path) -> None:
    stream = AZURE_LLM.load(zipped(tmp_path, CONV), ReadOptions(adapters=Adapters.in_turn((8, 16))))
    assert [request.adapter for request in stream.requests] == [0, 1] * 15
    assert len({request.prompt for request in stream.requests}) == 30


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("2023-11-16 18:15:50.9951690,396", "3 columns", "2"),
        ("2023-11-16 18:15:50.9951690,,109", "ContextTokens, a whole number from 1", "''"),
        ("2023-11-16 18:15:50.9951690,396,0", "GeneratedTokens, a whole number from 1", "'0'"),
        ("yesterday,396,109", "TIMESTAMP, as in", "'yesterday'"),
        ("2023-11-16,396,109", "TIMESTAMP, as in", "'2023-11-16'"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, expected: str, found: str) -> None:
    path = with_line(tmp_path, CONV, 3, line)
    left = refuses(
        lambda skip: AZURE_LLM.load(path, ReadOptions(skip_bad_lines=skip)), path, 3, expected, found
    )
    assert len(left.requests) == 29


def test_another_header(tmp_path: Path) -> None:
    path = with_line(tmp_path, CONV, 1, "time,in,out")
    with pytest.raises(ConfigError, match="line 1: expected a header with TIMESTAMP, ContextTokens"):
        AZURE_LLM.load(path)


def test_a_request_before_the_first_is_refused(tmp_path: Path) -> None:
    early = "2023-11-16 18:00:00.0000000,5,6"
    path = with_line(tmp_path, "azure_llm_2023_conv.csv", 5, early)
    expected = "TIMESTAMP, not before the first line's 2023-11-16 18:15:46"
    left = refuses(
        lambda skip: AZURE_LLM.load(path, ReadOptions(skip_bad_lines=skip)), path, 5, expected, "18:00:00"
    )
    assert len(left.requests) == 29
