"""Traces that name adapters: synthetic rows of the columns that they have."""

from __future__ import annotations

import collections
import gzip
from pathlib import Path

import pytest
from manylora_lab.workloads.assembly import Adapters
from manylora_lab.workloads.lora_traces import load_genai, load_toppings
from manylora_lab.workloads.named import named
from manylora_lab.workloads.traces import ReadOptions

from manylora.config.declaring import ConfigError

ARRIVALS = "num_loras,t_s\n" + "".join(f"3,{5 + 0.25 * n}\n" for n in range(400)) + "5,0.5\n"
POPULARITY = "num_loras,lora_id,probability\n3,0,0.1\n3,1,0.7\n3,2,0.2\n" + "".join(
    f"5,{n},0.2\n" for n in range(5)
)
JOBS = """\
seq,time,t_s,group,prompt_chars,loras
0,,,g,54,
1,,,g,14,L0252
2,2024-11-15,0.0,g,9,L0001;L0002
3,2024-11-15,7.0,g,,
4,2024-11-15,7.0,h,40,L0003
5,2024-11-15,90.5,g,41,L0001
"""


@pytest.fixture
def toppings(tmp_path: Path) -> Path:
    (tmp_path / "arrivals.csv").write_text(ARRIVALS)
    (tmp_path / "lora_popularity.csv").write_text(POPULARITY)
    return tmp_path


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    written = tmp_path / "lora_requests.csv.gz"
    written.write_bytes(gzip.compress(JOBS.encode()))
    return written


def test_toppings_draws_adapters_by_popularity(toppings: Path) -> None:
    stream = load_toppings(toppings, (8, 8, 16))
    assert (stream.requests[0].arrival_s, stream.requests[-1].arrival_s) == (0.0, 0.25 * 399)
    counts = collections.Counter(request.adapter for request in stream.requests)
    assert counts[0] == pytest.approx(280, abs=30), "the most popular is adapter 0"
    assert counts[2] == pytest.approx(40, abs=20)
    assert stream == load_toppings(toppings / "arrivals.csv", (8, 8, 16))
    assert all(request.new_tokens and request.output_tokens for request in stream.requests)
    assert {request.adapter for request in load_toppings(toppings).requests} == {None}
    assert len(load_toppings(toppings, (8,) * 5).requests) == 1


def test_toppings_in_the_catalogue(toppings: Path) -> None:
    stream = named(str(toppings), file_format="toppings-maf-lora", num_adapters=3, rate=2.0, duration_s=50.0)
    assert len(stream.requests) == 100
    assert len(stream.ranks) == 3
    with pytest.raises(ConfigError, match="is of 3 or 5 adapters, not 4"):
        named(str(toppings), file_format="toppings-maf-lora", num_adapters=4)
    (toppings / "lora_popularity.csv").unlink()
    with pytest.raises(ConfigError, match=r"has no lora_popularity.csv"):
        named(str(toppings), file_format="toppings-maf-lora", num_adapters=3)


@pytest.mark.parametrize("rows", ["3,0,0.5\n", "".join(f"3,{number},0.2\n" for number in range(4))])
def test_toppings_with_too_few_or_too_many_probabilities(toppings: Path, rows: str) -> None:
    (toppings / "lora_popularity.csv").write_text("num_loras,lora_id,probability\n" + rows)
    with pytest.raises(ConfigError, match=r"lora_popularity.csv has \d probabilities for 3 adapters"):
        load_toppings(toppings, (8, 8, 16))


def test_genai_has_times_prompts_and_first_adapters(jobs: Path) -> None:
    stream = load_genai(jobs, ReadOptions(adapters=Adapters.in_turn((8, 16))))
    assert [(r.arrival_s, r.adapter, r.new_tokens) for r in stream.requests] == [
        (0.0, 0, 3), (7.0, None, 1), (7.0, 1, 10), (90.5, 0, 11),
    ]  # fmt: skip
    assert "2 requests without a time left out" in stream.notes
    assert len(load_genai(jobs, ReadOptions(duration_s=60.0)).requests) == 3
    assert len(load_genai(jobs, ReadOptions(limit=2)).requests) == 2
    many = named(str(jobs), file_format="genai-lora-trace", num_adapters=2, rate=4.0)
    assert many.duration_s < 1.1


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("6,x,91,g,-1,L1", "prompt_chars"),
        ("6,x,soon,g,4,L1", "t_s"),
        ("6,x,91,g,4,;L1", "loras"),
        ("6,x", "columns"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, bad: str, expected: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS + bad + "\n")
    with pytest.raises(ConfigError, match=rf"line 8: expected .*{expected}"):
        load_genai(path)
    assert "1 malformed lines left out" in " ".join(load_genai(path, ReadOptions(skip_bad_lines=True)).notes)


@pytest.mark.parametrize("line", ["0,1", "3,-1", "3,x", "3"])
def test_malformed_arrivals_are_named(toppings: Path, line: str) -> None:
    with (toppings / "arrivals.csv").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=r"arrivals.csv, line 403: expected"):
        load_toppings(toppings)
