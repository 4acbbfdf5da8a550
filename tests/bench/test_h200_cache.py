"""The comparison of cache policies, whole, at the size of a toy; its adapters; its numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_lab.benchmarks import h200_cache
from manylora_lab.benchmarks.plot_cache import POLICIES, VLLM, compare, draw, markdown, measured
from safetensors.torch import load_file


def test_the_toy_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, turns = tmp_path / "cache.json", tmp_path / "turns.jsonl"
    args = ["--toy", "--out", str(out), "--work", str(tmp_path), "--rates", "10", "--commit", "abc"]
    h200_cache.main([*args, "--turns", str(turns), "--rehearse", "4"])
    report = json.loads(out.read_text())
    assert [run["policy"] for run in report["runs"]] == list(POLICIES)
    for run in report["runs"]:
        assert "error" not in run, run
        assert run["summary"]["failed"] == 0
        assert run["engine_info"]["page_tokens"] == (32 if run["policy"] == "static-lru" else 16)
        assert run["engine_info"]["cache_policy"] == run["policy"]
        assert run["counters"]["generated_tokens"] == sum(
            turn.reply_tokens for turn in h200_cache.turns_of("10", h200_cache.TOY)
        )
    by_policy = {run["policy"]: run["summary"]["prefix_hit"] for run in report["runs"]}
    assert by_policy["s-lora"] == 0 < by_policy["lru"] <= report["runs"][0]["summary"]["prefix_bound"]
    lines = [json.loads(line) for line in turns.read_text().splitlines()]
    assert [line["policy"] for line in lines] == list(POLICIES)
    assert report["commit"] == "abc"

    h200_cache.main([*args, "--previous", str(out), "--time-budget", "0", "--order", "lru,fastlibra-wom"])
    shown = capsys.readouterr().out
    assert "no time left for fastlibra-wom" in shown
    assert "for lru" not in shown
    assert len(json.loads(out.read_text())["runs"]) == len(POLICIES)

    text = markdown(report)
    assert all(f"| 10 | {policy} |" in text for policy in POLICIES)
    draw(report, str(tmp_path / "cache.png"))
    assert (tmp_path / "cache.png").stat().st_size > 10_000


def test_adapters_are_whole_and_different(tmp_path: Path) -> None:
    shape = h200_cache.TOY.shape
    h200_cache.write_adapters(tmp_path, shape, [4, 8, 8])
    files = [load_file(tmp_path / f"adapter-{i}" / "adapter_model.safetensors") for i in range(3)]
    assert len(files[0]) == shape["num_hidden_layers"] * 4 * 2
    for tensors, rank in zip(files, (4, 8, 8), strict=True):
        for name, tensor in tensors.items():
            assert tensor.dtype is torch.bfloat16
            assert rank in tensor.shape, name
            assert 0 < tensor.abs().max() < 0.2
    assert all(not torch.equal(files[1][name], files[2][name]) for name in files[1])


def test_ranks_are_the_traces_own() -> None:
    ranks = h200_cache.ranks_of(h200_cache.REAL)
    assert len(ranks) == 100
    for rate in ("5", "10", "20"):
        turns = h200_cache.turns_of(rate, h200_cache.REAL)
        assert all(ranks[turn.adapter] == turn.rank for turn in turns)


def run_of(policy: str, offered: float, ttft: float, tpot: float, failed: int = 0) -> dict[str, Any]:
    summary = {"ttft_ms": {"mean": ttft}, "tpot_ms": {"mean": tpot}, "failed": failed}
    return {"policy": policy, "offered_per_s": offered, "summary": summary}


def test_changes_and_peaks_by_hand() -> None:
    runs = [
        run_of("manylora", 10, 30, 8), run_of("manylora", 20, 400, 12), run_of("manylora", 24, 700, 15),
        run_of("s-lora", 10, 60, 10), run_of("s-lora", 20, 4000, 16), run_of("s-lora", 24, 100, 1),
        run_of("lru", 10, 30, 8, failed=1), {"policy": "lru", "offered_per_s": 20.0, "error": "broke"},
    ]  # fmt: skip
    found = compare({"runs": runs, "reference": {"vllm": VLLM}})
    rows = {(row["against"], row["offered_per_s"]): row for row in found["at_rate"]}
    assert rows["s-lora", 10]["ttft_change"] == pytest.approx(-0.5)
    assert rows["s-lora", 10]["tpot_change"] == pytest.approx(-0.2)
    assert rows["vLLM 0.26.0", 20]["ttft_change"] == pytest.approx(400 / 4594 - 1)
    assert ("lru", 20) not in rows
    assert found["peak_per_s"]["manylora"] == {"borne": 20, "too_much": 24}
    assert found["peak_per_s"]["s-lora"] == {"borne": 10, "too_much": 20}
    assert found["peak_per_s"]["lru"] == {"borne": None, "too_much": 10}
    assert found["peak_per_s"]["vLLM 0.26.0"] == {"borne": 10, "too_much": 20}


def test_repeated_runs_count_by_their_medians() -> None:
    runs = [run_of("manylora", 10, ttft, tpot) for ttft, tpot in ((30, 8), (90, 9), (40, 7))]
    runs.append({**run_of("manylora", 10, 4000, 50), "set_aside": "the machine was busy"})
    runs.append(run_of("s-lora", 10, 80, 16))
    found = {run["policy"]: run for run in measured({"runs": runs, "reference": {"vllm": []}})}
    assert found["manylora"]["num_runs"] == 3
    assert found["manylora"]["ttft_range_ms"] == (30, 90)
    assert found["manylora"]["summary"] == {"ttft_ms": {"mean": 40}, "tpot_ms": {"mean": 8}, "failed": 0}
    changes = compare({"runs": runs, "reference": {"vllm": []}})["at_rate"]
    assert [row["ttft_change"] for row in changes] == [-0.5]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (["--rates", "7"], "no trace of '7'/s"),
        (["--rates", "10*x"], "'x' is not a number"),
        (["--rates", "10*-1"], "must be above 0"),
        (["--order", "best"], "'best' is not one of"),
    ],
)
def test_bad_arguments(bad: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        h200_cache.main(["--toy", "--out", "x", *bad])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
