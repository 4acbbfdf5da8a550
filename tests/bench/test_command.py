"""``manylora bench serve`` and ``offline`` as commands, on the demo model."""

from __future__ import annotations

import json
import shutil
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.workloads.chat import TRACES

from manylora.cli import main
from tests.e2e.process import MODEL, REPOSITORY, Server

TRACE = TRACES / "chat_5rps.jsonl.gz"
SYNTHETIC = "synthetic:arrivals=even,prompt=uniform(20,60),output=8,ranks=8"


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


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("adapters")
    for number in range(2):
        shutil.copytree(REPOSITORY / "demo" / "adapters" / "german", root / f"adapter-{number}")
    return str(root)


def inside(adapters: str) -> list[str]:
    """An engine in this process."""
    engine = {"model": MODEL, "adapter-dir": adapters, "device": "cpu", "device-pool": "16MiB"}
    return [word for name, value in engine.items() for word in (f"--{name}", value)]


def check_vllm_names(report: dict[str, Any], requests: int) -> None:
    """What tools that read ``vllm bench serve`` expect, and that it agrees with itself."""
    for name in ("ttft", "tpot", "itl", "e2el"):
        for what in ("mean", "median", "std", "p50", "p90", "p99"):
            assert report[f"{what}_{name}_ms"] >= 0
        assert report[f"p50_{name}_ms"] <= report[f"p90_{name}_ms"] <= report[f"p99_{name}_ms"]
    for name in ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "start_times"):
        assert len(report[name]) == requests, name
    assert (report["completed"], report["failed"], report["num_prompts"]) == (requests, 0, requests)
    assert report["errors"] == [""] * requests
    assert report["total_input_tokens"] == sum(report["input_lens"])
    assert report["total_output_tokens"] == sum(report["output_lens"])
    assert report["request_throughput"] == pytest.approx(requests / report["duration"])
    assert report["output_throughput"] == pytest.approx(report["total_output_tokens"] / report["duration"])
    total = report["total_input_tokens"] + report["total_output_tokens"]
    assert report["total_token_throughput"] == pytest.approx(total / report["duration"])
    assert report["mean_ttft_ms"] == pytest.approx(1e3 * sum(report["ttfts"]) / requests, abs=0.01)
    gaps = [itl for itls in report["itls"] for itl in itls]
    assert report["mean_itl_ms"] == pytest.approx(1e3 * sum(gaps) / len(gaps), abs=0.01)
    assert 1 <= report["max_concurrent_requests"] <= requests
    assert report["start_times"] == [row["handed_s"] for row in report["requests"]]
    assert datetime.strptime(report["date"], "%Y%m%d-%H%M%S")
    assert report["endpoint_type"] == report["backend"]
    assert report["tokenizer_id"] == report["model_id"]
    assert [report[name] for name in ("label", "burstiness", "max_concurrency")] == [None] * 3
    assert report["max_output_tokens_per_s"] <= report["total_output_tokens"]


def test_in_process(tmp_path: Path, adapters: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    args = [
        "--trace-file",
        small_trace(tmp_path),
        "--out",
        str(out),
        "--max-num-seqs",
        "4",
        "--warm-adapters",
    ]
    assert main(["bench", "serve", *inside(adapters), *args]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("requests")
    assert "TTFT ms" in shown
    report = json.loads(out.read_text())
    assert report["summary"]["requests"] == 3
    assert report["summary"]["failed"] == 0
    assert report["engine"]["generated_tokens"] == 18
    assert report["target"]["max_num_seqs"] == 4
    assert report["settings"]["device_pool"] == "16MiB"
    assert report["workload"]["trace_file"] == "trace.jsonl"
    assert (report["is_complete"], report["error"]) == (True, None)
    assert [row["cached_tokens"] for row in report["requests"]] == [0, 0, 32]
    assert all(row["ttft_s"] > 0 and row["tpot_s"] > 0 for row in report["requests"])
    check_vllm_names(report, 3)
    assert report["input_lens"] == [30, 30, 66]
    assert report["output_lens"] == [6, 6, 6]
    assert [len(itls) for itls in report["itls"]] == [5, 5, 5]
    assert (report["backend"], report["request_goodput"]) == ("manylora", None)


def test_a_named_workload_on_a_server(
    tmp_path: Path, adapters: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    with Server("--adapter-dir", adapters, "--device-pool", "16MiB") as server:
        server.wait_ready()
        code = main(
            [
                "bench", "serve", "--workload", SYNTHETIC, "--rate", "10", "--adapters", "2", "--duration", "2",
                "--popularity", "round-robin", "--url", server.url, "--out", str(out), "--plot", str(plot),
                "--goodput", "ttft:60000", "e2el:0", "--client-processes", "2", "--progress",
            ]
        )  # fmt: skip
    assert code == 0
    assert "goodput per s        0.00" in capsys.readouterr().out
    report = json.loads(out.read_text())
    check_vllm_names(report, report["num_prompts"])
    assert 15 <= report["num_prompts"] <= 25
    assert report["model_id"] == "demo"
    assert report["request_goodput"] == 0
    assert set(report["output_lens"]) == {8}
    assert all(20 <= length <= 60 for length in report["input_lens"])
    assert any(report["generated_texts"])
    fair = report["summary"]["fairness"]
    assert list(fair["adapters"]) == ["adapter-0", "adapter-1"]
    assert sum(of["requests"] for of in fair["adapters"].values()) == report["num_prompts"]
    assert 0.5 <= fair["jain_ttft"] <= 1
    arrivals = [row["arrival_s"] for row in report["requests"]]
    assert arrivals == sorted(arrivals)
    assert report["summary"]["client_lag_ms"]["max"] >= 0
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_text_prompts_and_chats_on_a_server(tmp_path: Path, adapters: str, kind: str) -> None:
    out = tmp_path / "out.json"
    with Server("--adapter-dir", adapters, "--device-pool", "16MiB") as server:
        server.wait_ready()
        args = ["--trace-file", small_trace(tmp_path), "--url", server.url, "--out", str(out)]
        assert main(["bench", "serve", *args, "--prompts", kind]) == 0
    report = json.loads(out.read_text())
    assert report["target"]["prompts"] == report["settings"]["prompts"] == kind
    assert report["endpoint_type"] == ("openai" if kind == "text" else "openai-chat")
    first, _, second = report["requests"]
    assert second["prompt_tokens"] > first["prompt_tokens"] >= 30  # a word has a token or more
    assert report["output_lens"] == [6, 6, 6]


def test_offline(tmp_path: Path, adapters: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    workload = ["--workload", SYNTHETIC, "--rate", "4", "--adapters", "2", "--duration", "5", "--all-at-once"]
    assert main(["bench", "offline", *inside(adapters), *workload, "--out", str(out)]) == 0
    assert "output tokens per s" in capsys.readouterr().out
    report = json.loads(out.read_text())
    requests = report["num_prompts"]
    check_vllm_names(report, requests)
    assert {row["arrival_s"] for row in report["requests"]} == {0.0}
    assert report["request_rate"] == "inf"
    assert report["num_requests"] == requests
    assert report["total_num_tokens"] == report["total_input_tokens"] + 8 * requests
    last_s = max(row["end_s"] for row in report["requests"])
    assert report["elapsed_time"] == report["duration"] == pytest.approx(last_s, abs=1e-6)
    assert report["requests_per_second"] == pytest.approx(requests / report["elapsed_time"])
    assert report["tokens_per_second"] == pytest.approx(report["total_num_tokens"] / report["elapsed_time"])


def test_too_long_turns_can_be_left_out(tmp_path: Path, adapters: str) -> None:
    out = tmp_path / "out.json"
    args = [
        *inside(adapters),
        "--trace-file",
        small_trace(tmp_path),
        "--max-model-len",
        "60",
        "--out",
        str(out),
    ]
    assert main(["bench", "serve", *args]) == 2
    assert not out.exists()
    assert main(["bench", "serve", *args, "--skip-too-long"]) == 0
    report = json.loads(out.read_text())
    assert report["input_lens"] == [30, 30]
    assert any("1 of 3 requests left out" in note for note in report["workload"]["notes"])


def test_a_failed_turn_gives_1(tmp_path: Path, adapters: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The pool has 40 pages; the adapter takes 36, and the longest turn's 72 tokens 5.
    args = [*inside(adapters), "--trace-file", small_trace(tmp_path), "--host-pool", "0"]
    code = main(["bench", "serve", *args, "--device-pool", "1280KiB"])
    assert code == 1
    assert "3 (1 failed)" in capsys.readouterr().out


def test_an_interrupt_while_loading_is_not_held_back(
    tmp_path: Path, adapters: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr("manylora.main.build_driver", load)
    assert main(["bench", "offline", *inside(adapters), "--trace-file", small_trace(tmp_path)]) == 130
    assert capsys.readouterr().err == "\nmanylora: interrupted\n"


def test_the_report_is_written_before_the_table(
    tmp_path: Path, adapters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_reads(*_: Any) -> str:
        raise RuntimeError("nobody reads")

    monkeypatch.setattr("manylora_lab.bench.serve.table", nobody_reads)
    out = tmp_path / "out.json"
    with pytest.raises(RuntimeError, match="nobody reads"):
        main(["bench", "serve", *inside(adapters), "--trace-file", small_trace(tmp_path), "--out", str(out)])
    assert json.loads(out.read_text())["completed"] == 3


AT_NOBODY = ["--trace-file", str(TRACE), "--url", "http://127.0.0.1:1"]
ON_DEMO = ["--trace-file", str(TRACE), "--model", MODEL]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--trace-file", str(TRACE)], "--url"),
        ([*AT_NOBODY, "--model", MODEL], "--url"),
        ([*AT_NOBODY, "--device", "cpu"], "--device is for"),
        (AT_NOBODY, "no server answers"),
        (["--trace-file", "none.gz", "--model", MODEL], "cannot read none.gz"),
        (["--model", MODEL], "name either --workload"),
        ([*ON_DEMO, "--workload", "chatbot"], "name either --workload"),
        (["--workload", "chatbots", "--model", MODEL], "did you mean chatbot"),
        (["--trace-file", str(TRACE), "--model", "./nowhere"], "nowhere"),
        ([*ON_DEMO, "--limit", "0"], "at least 1"),
        ([*ON_DEMO, "--rate-scale", "-1"], "above 0"),
        ([*ON_DEMO, "--out", "no/such/file"], "no such folder"),
        ([*ON_DEMO, "--out", "."], "it is a folder"),
        ([*ON_DEMO, "--plot", "picture.txt"], "name it *.png"),
        ([*ON_DEMO, "--goodput", "ttft:fast"], "write ttft:MS"),
        ([*ON_DEMO, "--prompts", "text"], "takes tokens"),
        ([*ON_DEMO, "--prompts", "chat"], "takes tokens"),
        ([*ON_DEMO, "--client-processes", "2"], "a server at --url"),
        ([*ON_DEMO, "--device", "cpu"], "not served"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_2(args: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *args]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("manylora: error")]
    assert words in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", *ON_DEMO, "--limit", "x"], "argument --limit"),
        (["offline", *ON_DEMO, "--url", "http://127.0.0.1:1"], "unrecognized arguments: --url"),
    ],
)
def test_bad_usage_is_one_line_and_2(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *args])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
