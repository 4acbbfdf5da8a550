"""Engines on two GPUs behind the router: what is made of the moments, and the whole of it as a toy on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.bench.targets import TargetResult
from manylora_lab.benchmarks import cluster_gpus
from manylora_lab.benchmarks.cluster_gpus import within
from manylora_lab.benchmarks.cluster_moves import of_moves, pause_of
from manylora_lab.benchmarks.cluster_servers import CASES, TOY, Case


def test_tokens_of_a_window() -> None:
    result = TargetResult()
    for moment in (1.0, 2.0, 3.0, 4.0):
        result.delivered(moment)
    assert within(result, 2.0, 4.0) == 2  # the end is no part of it
    assert within(result, 5.0, 9.0) == 0
    result.reply_length = 6  # some deliveries were of two
    assert within(result, 0.0, 9.0) == 6
    assert within(result, 2.0, 4.0) == 3
    assert within(TargetResult(), 0.0, 9.0) == 0


def test_the_pause_of_a_move() -> None:
    moments = [0.0, 0.1, 0.2, 5.2, 5.3, 5.4, 6.0, 6.1]
    # The long one was over before anything was asked.
    found = pause_of(moments, 5.25)
    assert found.seconds == pytest.approx(0.6)
    assert found.usual_s == pytest.approx(0.1)
    assert found.position == 6


def test_what_moves_cost() -> None:
    rows = [
        {
            "context": 1000, "adapter": None, "there_tokens": 1010 + number, "there_pause_ms": pause,
            "usual_ms": 5.0, "back_pause_ms": 9.0,
        }
        for number, pause in enumerate((30.0, 25.2, 40.0))
    ]  # fmt: skip
    found = of_moves(rows, 100, {"link": 1e6})
    assert found["tokens"] == 1011
    assert found["cost_ms"] == pytest.approx(25.0)
    assert found["cost_ms_per_1000_tokens"] == pytest.approx(25.0 / 1.011)
    assert found["most_pause_ms"] == 40.0
    assert found["kv_bytes"] == 101_100
    assert found["sending_ms_link"] == pytest.approx(101.1)
    assert found["even_bytes_per_s"] == pytest.approx(101_100 / 0.025)


def run(out: Path, *args: str) -> dict[str, Any]:
    cluster_gpus.main(["--toy", "--out", str(out), "--commit", "abc", *args])
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"command", "commit", "device", "torch", "provenance", "asked"} <= set(found)
    return found


def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    found = run(tmp_path / "gpus.json", "--time-budget", "0", "--cases", "two,one")
    assert found["left_out"] == ["two replicas", "one replica"]
    assert found["links"]["through_host"] > 0


def test_a_server_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "one", Case("no such", 0))
    found = run(tmp_path / "gpus.json", "--cases", "one", "--parts", "lone")
    (error,) = found["errors"]
    assert error["part"] == "no such"
    assert "the server does not start" in error["error"]


@pytest.mark.parametrize("bad", [["--cases", "three"], ["--parts", "load,drain"]])
def test_bad_arguments(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cluster_gpus.main(["--toy", "--out", "x.json", *bad])
    assert "no such part or case" in capsys.readouterr().err


@pytest.mark.long
def test_the_whole_as_a_toy(tmp_path: Path) -> None:
    found = run(tmp_path / "gpus.json", "--cases", "two,one,server")
    assert found["left_out"] == []
    assert "errors" not in found
    names = [CASES[case].name for case in ("two", "one", "server")]
    for part in ("starts", "load", "lone"):
        assert [row["case"] for row in found[part]] == names
    for row in found["load"]:
        assert row["errors"] == 0
        assert row["tokens_per_s"] > 0
        replicas = [f"replica {number}" for number in range(row["replicas"] or 0)]
        assert list(row["busy_cores"]) == (["router", "front end 0", *replicas] if replicas else [])
    assert set(found["ratio_to_one_replica"]) == set(found["first_token_later_ms"]) == set(names)
    assert [row["context"] for row in found["moves"]] == [*TOY.contexts, TOY.contexts[1]]
    for row in found["moves"]:
        assert row["tokens"] > row["context"]
        assert row["there_pause_ms"] > 0
    (drain,) = found["drain"]
    assert sum(drain["streams_before"]) == TOY.drained
