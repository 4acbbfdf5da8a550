"""``manylora bench serve`` as a command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from manylora.cli import main
from tests.e2e.process import MODEL, REPOSITORY

TRACE = REPOSITORY / "benchmarks" / "data" / "chat_5rps.jsonl.gz"


def small_trace(folder: Path) -> str:
    """Two conversations on the shipped adapter that is named adapter-0 here."""
    rows = [
        {"arrival_s": 0.0, "conversation": 0, "turn": 0, "history_tokens": 0},
        {"arrival_s": 0.1, "conversation": 1, "turn": 0, "history_tokens": 0},
        {"arrival_s": 0.2, "conversation": 0, "turn": 1, "history_tokens": 36},
    ]
    common = {"adapter": 0, "rank": 8, "user_tokens": 30, "reply_tokens": 6}
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps({**row, **common}) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def adapters(tmp_path: Path) -> str:
    shutil.copytree(REPOSITORY / "demo" / "adapters" / "german", tmp_path / "adapters" / "adapter-0")
    return str(tmp_path / "adapters")


def test_in_process(tmp_path: Path, adapters: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    code = main(
        [
            "bench", "serve", "--trace-file", small_trace(tmp_path), "--model", MODEL, "--out", str(out),
            "--adapter-dir", adapters, "--device", "cpu", "--device-pool", "16MiB", "--max-num-seqs", "4",
            "--warm-adapters",
        ]
    )  # fmt: skip
    assert code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("turns")
    assert "TTFT ms" in shown
    report = json.loads(out.read_text())
    assert report["summary"]["requests"] == 3
    assert report["summary"]["failed"] == 0
    assert report["engine"]["generated_tokens"] == 18
    assert report["target"]["max_num_seqs"] == 4
    assert report["settings"]["device_pool"] == "16MiB"
    assert [row["cached_tokens"] for row in report["requests"]] == [0, 0, 32]
    assert all(row["ttft_s"] > 0 and row["tpot_s"] > 0 for row in report["requests"])


def test_a_failed_turn_gives_1(tmp_path: Path, adapters: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The pool has 40 pages; the adapter takes 36, and the longest turn's 72 tokens 5.
    code = main(
        [
            "bench", "serve", "--trace-file", small_trace(tmp_path), "--model", MODEL, "--adapter-dir", adapters,
            "--device", "cpu", "--device-pool", "1280KiB", "--host-pool", "0",
        ]
    )  # fmt: skip
    assert code == 1
    assert "3 (1 failed)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--trace-file", str(TRACE)], "--url"),
        (["--trace-file", str(TRACE), "--url", "http://127.0.0.1:1", "--model", MODEL], "--url"),
        (["--trace-file", str(TRACE), "--url", "http://127.0.0.1:1", "--device", "cpu"], "--device is for"),
        (["--trace-file", str(TRACE), "--url", "http://127.0.0.1:1"], "no server answers"),
        (["--trace-file", "none.gz", "--model", MODEL], "cannot read the trace none.gz"),
        (["--trace-file", str(TRACE), "--model", "./nowhere"], "nowhere"),
        (["--trace-file", str(TRACE), "--model", MODEL, "--limit", "0"], "at least 1"),
        (["--trace-file", str(TRACE), "--model", MODEL, "--limit", "x"], "--limit must be a whole number"),
        (["--trace-file", str(TRACE), "--model", MODEL, "--rate-scale", "-1"], "--rate-scale must be"),
        (["--trace-file", str(TRACE), "--model", MODEL, "--out", "no/such/file"], "no such folder"),
        (["--trace-file", str(TRACE), "--model", MODEL, "--device", "cpu"], "not served"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_2(args: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *args]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("manylora: error")]
    assert words in line
