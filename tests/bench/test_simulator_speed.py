"""The simulator's speed, measured: that what is timed is the whole of what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manylora_lab.benchmarks.simulator_speed import main, stream_of


def test_a_small_measurement(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    main(["--requests", "60", "--commit", "abc", "--out", str(out)])
    report = json.loads(out.read_text())
    requests = stream_of(60).requests
    assert (report["requests"], report["commit"]) == (60, "abc")
    # The last request takes a first step and 99 more after its arrival.
    found = report["simulated"]
    assert report["virtual_s"] > requests[-1].arrival_s + 0.5 * 99 * found["tpot_mean_ms"] / 1e3
    assert 0 < found["ttft_mean_ms"] <= found["ttft_p99_ms"]
    assert report["events"] >= 100
    assert report["times_real_time_by_cpu"] * report["cpu_s"] == pytest.approx(report["virtual_s"])


def test_the_requests_are_what_the_text_says() -> None:
    stream = stream_of(4000)
    assert {(sum(piece.num_tokens for piece in r.prompt), r.output_tokens) for r in stream.requests} == {
        (220, 100)
    }
    assert stream.requests[-1].arrival_s == pytest.approx(400, rel=0.05)
    assert len({r.adapter for r in stream.requests}) == 100
    assert stream_of(10).requests == stream.requests[:10]


def test_bad_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in ((["--requests", "0"], "at least 1"), (["--profile", "nobody"], "neither a file")):
        with pytest.raises(SystemExit) as left:
            main(args)
        assert left.value.code == 2
        assert words in capsys.readouterr().err
