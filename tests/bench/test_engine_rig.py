"""The runs on whole engines, each as a toy on the CPU: their reports' form, and that tokens came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.benchmarks import (
    h200_aims,
    h200_pairs,
    h200_steps,
)
from manylora_lab.benchmarks.chat_runs import REAL, TOY, RateLoad, turns_of
from manylora_lab.benchmarks.first_runs import FIRST_RUNS
from manylora_lab.benchmarks.offline_runs import OFFLINE_RUNS, PREFILL_RUNS
from manylora_lab.workloads.chat import TRACES, read_turns


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"command", "commit", "device", "torch", "provenance"} <= set(found)
    return found


@pytest.mark.long
def test_the_aims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = aims(tmp_path, "prefill,first,chat")
    assert [row["kind"] for row in found["prefill"]] == list(PREFILL_RUNS)
    for row in found["prefill"]:
        assert row["errors"] == []
        assert row["tokens_per_s"] > 0
    assert [row["kind"] for row in found["first"]] == list(FIRST_RUNS)
    assert all(
        {"issue", "issued", "computed", "delivered"} <= set(row["moments_ms"]) for row in found["first"]
    )
    assert found["first_steps"]["<=64"][0] >= 60
    (chat,) = found["chat"]
    assert chat["summary"]["failed"] == 0
    replies = sum(turn.reply_tokens for turn in turns_of("10", TOY))
    assert chat["counters"]["generated_tokens"] == replies
    assert capsys.readouterr().out.splitlines()[-1].startswith("AIMS {")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_other_aims(tmp_path: Path) -> None:
    """The parts of most seconds; the rig, the engines and the report are those of ``test_the_aims``."""
    found = aims(tmp_path, "offline,many,mixed,churn,conformance,http,start")
    assert [(row["max_num_seqs"], row["popularity"]) for row in found["offline"]] == list(OFFLINE_RUNS)
    for row in (*found["offline"], *found["many"], *found["mixed"]):
        assert row["errors"] == []
        assert row["tokens_per_s"] > 0
    assert [row["kind"] for row in found["mixed"]] == ["base", "mixed"]
    for row in (*found["offline"], *found["many"]):
        assert row["tokens"] > 100
        assert row["steps_by_tokens"]["decode"][0] > 0
    assert {"vllm", "aim", "floor"} < set(found["offline"][0])
    (churned,) = found["churn"]
    assert churned["requests"] > 0
    assert churned["pages_leaked"] == churned["adapter_pages_left"] == churned["running_pages_left"] == 0
    assert [row["pipeline_depth"] for row in found["conformance"]] == [1, 2]
    for row in found["conformance"]:
        assert row["replay_difference"] == row["simulation_difference"] == "None"
        assert row["events"] > 100
    (http,), (start,) = found["http"], found["start"]
    assert http["summary"]["failed"] == 0
    assert http["summary"]["output_tokens_per_s"] > 0
    assert start["again_s"] > 0


def aims(folder: Path, parts: str) -> dict[str, Any]:
    """The report of these parts as a toy."""
    out = folder / "aims.json"
    h200_aims.main(["--toy", "--parts", parts, "--rates", "10", "--out", str(out), "--commit", "abc"])
    found = record(out)
    assert found["left_out"] == []
    return found


def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    out = tmp_path / "aims.json"
    args = ["--toy", "--out", str(out), "--commit", "abc", "--time-budget", "0"]
    h200_aims.main([*args, "--parts", "prefill,first,chat", "--rates", "2,20*0.5"])
    assert record(out)["left_out"] == ["prefill None", "prefill adapters", "first", "chat 2", "chat 10"]


def test_offline_runs_take_turns(tmp_path: Path) -> None:
    out = tmp_path / "aims.json"
    args = ["--toy", "--out", str(out), "--commit", "abc", "--parts", "offline,many", "--repeats", "2"]
    h200_aims.main([*args, "--at-once", "32", "--popularities", "none,distinct"])
    found = record(out)
    rows = [(row["repeat"], row["max_num_seqs"], row["popularity"]) for row in found["offline"]]
    assert rows == [(0, 32, None), (0, 32, "distinct"), (1, 32, None), (1, 32, "distinct")]
    assert [row["repeat"] for row in found["many"]] == [0, 1]
    assert all(row["errors"] == [] and row["tokens"] > 100 for row in (*found["offline"], *found["many"]))


POLICIES = ("s-lora", "lru")


@pytest.mark.long
def test_the_cache_policies(tmp_path: Path) -> None:
    out = tmp_path / "cache.json"
    args = ["--toy", "--parts", "chat", "--rates", "10", "--rehearse", "--policies", ",".join(POLICIES)]
    h200_aims.main([*args, "--out", str(out), "--commit", "abc"])
    runs = record(out)["chat"]
    assert [run["policy"] for run in runs] == list(POLICIES)
    for run in runs:
        assert run["summary"]["failed"] == 0
        assert run["counters"]["generated_tokens"] == sum(turn.reply_tokens for turn in turns_of("10", TOY))
    by_policy = {run["policy"]: run["summary"]["prefix_hit"] for run in runs}
    assert by_policy["s-lora"] == 0 < by_policy["lru"] <= runs[1]["summary"]["prefix_bound"]
    assert runs[0]["vllm"]["ttft_mean_ms"] == 66.4


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (["--rates", "7"], "no trace of '7'/s"),
        (["--rates", "10*x"], "'10*x' is not RATE"),
        (["--rates", "10*0"], "must be above 0"),
        (["--policies", "best"], "best is none of manylora"),
        (["--parts", "prefill,none"], "none is none of offline"),
        (["--at-once", "32,33"], "33 is none of 32, 128"),
        (["--popularities", "all"], "all is none of none, identical"),
        (["--repeats", "0"], "--repeats must be at least 1"),
    ],
)
def test_bad_arguments(bad: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        h200_aims.main(["--toy", "--out", "x", *bad])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.long
def test_the_steps(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    h200_steps.main(["--toy", "--steps", "12", "--out", str(out), "--commit", "abc"])
    found = record(out)["shapes"]["toy"]
    batches = [(row["lora"], row["batch"]) for row in found["steps"]]
    assert batches == [(lora, batch) for lora in ("none", "distinct r16") for batch in h200_steps.TOY_BATCHES]
    for row in found["steps"]:
        assert (
            min(row[name] for name in ("wall1_ms", "wall2_ms", "sampled2_ms", "eager2_ms", "over_floor")) > 0
        )
    assert set(found["beside_copies"]) == {"in", "out", "both"}
    assert all(row["alone_ms"] > 0 and row["pages_per_s"] >= 0 for row in found["beside_copies"].values())


def test_the_copies(tmp_path: Path) -> None:
    out = tmp_path / "copies.json"
    h200_steps.main(["--toy", "--parts", "rates", "--out", str(out), "--commit", "abc"])
    found = record(out)
    assert set(found["raw_pinned_gb_per_s"]) == {"in", "out", "both"}
    (rates,) = found["copier"].values()
    assert len(rates) == 6
    assert all(row["gb_per_s"] > 0 and row["of_raw"] > 0 for row in rates.values())


@pytest.mark.long
def test_a_turn_of_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200_pairs, "STEPS", 12)
    monkeypatch.setattr(h200_pairs, "REPEATS", 1)
    turn = h200_pairs.Turn(["steps", "first", "offline", "chat", "large"], tmp_path, 5.0, is_toy=True)
    turn.run()
    assert set(turn.found) == {"steps", "first", "offline", "chat", "large", "switch"}
    assert {"rank 4 host", "rank 4 warm"} <= set(turn.found["first"])
    assert turn.found["chat"]["10/s ttft mean"] > 0
    turns = [{"tree": tree, "found": turn.found} for tree in ("before", "this")]
    rows = [row for part in h200_pairs.ratios(turns).values() for row in part.values()]
    assert {(row["ratio"], row["noise"]) for row in rows} == {(1.0, 1.0)}


def test_ranks_are_the_traces_own() -> None:
    for rate in ("2", "5", "10", "20"):
        assert turns_of(rate, REAL) == read_turns(TRACES / f"chat_{rate}rps.jsonl.gz")
    assert RateLoad("10").stream(REAL).ranks == (32, 64) * 50
