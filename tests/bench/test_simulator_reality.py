"""The simulator against reality, whole, at the size of a toy; its streams and its comparison by hand."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_lab.bench.profile import machine_name
from manylora_lab.benchmarks import simulator_reality
from manylora_lab.benchmarks.chat_runs import TOY, RateLoad, loads_from
from manylora_lab.benchmarks.plot_reality import compare, lines_of, medians
from manylora_lab.benchmarks.reality_runs import WINDOW_S, AsItWas
from manylora_lab.pricing.costs import DeviceCosts, StepWork
from manylora_lab.pricing.profile import FORMAT, load_profile, save_profile
from manylora_lab.sim.shipped import find_profile
from manylora_lab.workloads.stream import prompt_tokens

from manylora.config.declaring import ConfigError
from tests.sim.test_replay import config_of


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the command sets it, and until the test ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread", "remembered_fits")
def test_the_toy_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a profile that is given: one of the same model, said to be of this machine."""
    path = tmp_path / "given.json"
    save_profile(dataclasses.replace(find_profile("cpu-demo"), machine=machine_name("cpu")), path)
    check_the_toy(tmp_path, capsys, "--profile", str(path))


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_the_toy_that_measures_its_own_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, between and after the streams; tests/bench/test_profile_command.py profiles in less time."""
    check_the_toy(tmp_path, capsys)
    assert load_profile(tmp_path / "reality.profile.json").format == FORMAT


def check_the_toy(tmp_path: Path, capsys: pytest.CaptureFixture[str], *given: str) -> None:
    """``given``: the profile; without it one is measured."""
    out = tmp_path / "reality.json"
    args = ["--toy", "--rates", "10", "--out", str(out), "--commit", "abc", *given]
    # A policy whose hits do not hang on what copies and prefills are seen to take.
    simulator_reality.main([*args, "--policy", "lru", "--profile-budget", "0.01"])
    report = json.loads(out.read_text())
    (run,) = report["runs"]
    requests = RateLoad("10", 1, 1).stream(TOY).requests
    assert run["summary"]["failed"] == 0
    assert run["summary"]["requests"] == len(requests)
    assert report["commit"] == "abc"

    (log,) = json.loads(gzip.decompress((tmp_path / "reality.log.json.gz").read_bytes()))
    steps = [dict(zip(log["step_columns"], step, strict=True)) for step in log["steps"]]
    # Every prompt token that was not reused is in a step, and so is every generated token but the first.
    computed = sum(prompt_tokens(requests)) - sum(request["cached_tokens"] for request in log["requests"])
    later = sum(request.output_tokens - 1 for request in requests)
    assert sum(step["num_decodes"] + step["num_prefill_tokens"] for step in steps) == computed + later
    assert all(step["took_s"] > 0 and step["num_rows"] >= step["num_decodes"] for step in steps)
    ends = [step["began_s"] + step["took_s"] for step in steps]
    for before, step in zip(ends, steps[1:]):
        assert step["gap_s"] is None or step["gap_s"] == pytest.approx(step["began_s"] - before, abs=5e-6)

    # The same decisions lead to the same hits; both sides generate all that was asked for.
    metrics = report["comparison"][0]["metrics"]
    assert metrics["prefix_hit"]["ratio"] == pytest.approx(1, abs=0.1)
    assert metrics["num_steps"]["simulated"] <= later + len(requests)
    assert (tmp_path / "reality.png").stat().st_size > 10_000

    capsys.readouterr()
    second = tmp_path / "second.json"
    simulator_reality.main(["--again", str(out), "--out", str(second), *given])
    assert json.loads(second.read_text())["comparison"] == report["comparison"]
    assert "mean time to the first token" in capsys.readouterr().out
    for others in (["--again", str(out)], ["--toy", "--rates", "10"]):
        with pytest.raises(SystemExit):
            simulator_reality.main([*others, "--profile", "h200-llama-2-7b", "--out", str(second)])
        assert "the profile is of " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "cannot read the report {}/run.json: No such file"),
        ({"run.json": b"{"}, "cannot read the report {}/run.json: Expecting property name"),
        ({"run.json": b"{}"}, "cannot read the report's log {}/run.log.json.gz: No such file"),
        ({"run.json": b"{}", "run.log.json.gz": b"[]"}, "run.log.json.gz: Not a gzipped file"),
        (
            {"run.json": b"{}", "run.log.json.gz": gzip.compress(b"[]")[:-9]},
            "run.log.json.gz: Compressed file",
        ),
        ({"run.json": b"{}", "run.log.json.gz": gzip.compress(b"[]")}, "run.json is no report of"),
        (
            {
                "run.json": b'{"kind": "toy", "device": "cpu", "policy": {}, "runs": []}',
                "run.log.json.gz": gzip.compress(b"[1]"),
            },
            "run.log.json.gz is the log of 1 runs, its report has 0",
        ),
    ],
)
def test_an_earlier_report_that_is_not_there(
    files: dict[str, bytes], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SystemExit) as left:
        simulator_reality.main(
            ["--again", str(tmp_path / "run.json"), "--out", str(tmp_path / "second.json")]
        )
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says.format(tmp_path) in line


def test_a_report_without_streams_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the time was too short for the first one."""
    machine, policy = find_profile("cpu-demo").machine, dataclasses.asdict(config_of())
    head = {"kind": "toy", "device": machine, "policy": policy, "runs": []}
    (tmp_path / "run.json").write_text(json.dumps(head))
    (tmp_path / "run.log.json.gz").write_bytes(gzip.compress(b"[]"))
    second = tmp_path / "second.json"
    simulator_reality.main(
        ["--again", str(tmp_path / "run.json"), "--out", str(second), "--profile", "cpu-demo"]
    )
    assert "no stream was served" in capsys.readouterr().out
    assert json.loads(second.read_text())["comparison"] == []


def test_a_trace_is_repeated_in_new_conversations() -> None:
    once, twice = RateLoad("10", 1, 1).stream(TOY), RateLoad("10", 1, 2).stream(TOY)
    count = len(once.requests)
    assert twice.requests[:count] == once.requests
    for first, second in zip(once.requests, twice.requests[count:], strict=True):
        assert (first.turn, first.adapter, first.output_tokens) == (
            second.turn,
            second.adapter,
            second.output_tokens,
        )
        assert second.arrival_s > once.duration_s
    assert not {r.conversation for r in once.requests} & {r.conversation for r in twice.requests[count:]}


def test_rates_are_read() -> None:
    assert loads_from("5x2,10,20*0.6,20*0.5x3") == [
        RateLoad("5", 1.0, 2), RateLoad("10", 1.0, 1), RateLoad("20", 0.6, 1), RateLoad("20", 0.5, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["7", "10*x", "10*-1", "10x0", "10xx", ""])
def test_bad_rates(text: str) -> None:
    with pytest.raises(ConfigError):
        loads_from(text)


def test_the_comparison_by_hand() -> None:
    ms = {"mean": 30.0, "p50": 25.0, "p99": 80.0}
    part = {"mean": 2.0}
    run: dict[str, Any] = {
        "offered_per_s": 10.0,
        "summary": {
            "ttft_ms": ms, "tpot_ms": {"mean": 8.0}, "output_tokens_per_s": 100.0, "done_per_s": 1.0,
            "prefix_hit": 0.5, "ttft_parts_ms": {"queue_s": part, "adapter_s": part, "kv_s": part},
        },
        "counters": {"pages_swapped_in": 4, "pages_swapped_out": 0},
        "simulated": {"ttft_mean_ms": 24.0, "ttft_p50_ms": 25.0, "ttft_p99_ms": 100.0, "tpot_mean_ms": 8.0,
                      "pages_in": 5, "pages_out": 0, "output_tokens_per_s": 100.0, "done_per_s": 9.0},
        "as_it_was": {"ttft_mean_ms": 29.0, "ttft_p99_ms": 81.0, "output_tokens_per_s": 100.0, "done_per_s": 9.0},
    }  # fmt: skip
    steps = [
        [0.0, 0.010, None, 1, 1, *StepWork(0, 100, 100), 0.007],
        [0.011, 0.007, 0.001, 3, 2, *StepWork(3, 0, 300), 0.003],
        [0.020, 0.009, 0.002, 2, 0, *StepWork(2, 0, 200), 0.003],
    ]
    costs = DeviceCosts(step_base_s=4e-3, decode_row_s=0, prefill_token_s=1e-5, kv_token_s=0)
    (row,) = compare([run], [{"step_columns": ["cpu_s"], "steps": steps}], costs)
    assert row["metrics"]["ttft_mean_ms"] == {
        "measured": 30.0, "simulated": 24.0, "ratio": 0.8, "as_it_was": 29.0,
    }  # fmt: skip
    assert row["wall_per_cpu"] == 2.0
    assert row["metrics"]["ttft_p99_ms"]["ratio"] == 1.25
    assert row["metrics"]["pages_out"]["ratio"] is None
    assert row["metrics"]["gap_mean_ms"]["measured"] == 1.5
    assert [
        (step["kind"], step["rows"], step["measured_ms"], step["simulated_ms"]) for step in row["steps"]
    ] == [
        ("decode only", "2-3", 8.0, 4.0),
        ("with prefill", "1-1", 10.0, 5.0),
    ]
    assert "| mean time to the first token, ms | 30 | 24 | 0.80 | 29 |" in lines_of([row])

    other = {
        **row,
        "metrics": {**row["metrics"], "ttft_mean_ms": {**row["metrics"]["ttft_mean_ms"], "measured": 18.0}},
    }
    (median,) = medians([row, other])
    assert (median["offered_per_s"], median["num_runs"]) == (10.0, 2)
    assert median["metrics"]["ttft_mean_ms"] == {
        "measured": 24.0, "simulated": 24.0, "as_it_was": 29.0, "lowest": 18.0, "highest": 30.0, "ratio": 1.0,
    }  # fmt: skip
    assert "| 10 | mean time to the first token, ms | 24 | 18-30 | 24 | 1.00 | 29 |" in lines_of([row, other])


def test_a_run_gives_its_own_speed_back() -> None:
    costs = DeviceCosts(step_base_s=4e-3, decode_row_s=0, prefill_token_s=1e-5, kv_token_s=0)
    work = StepWork(2, 0, 200)
    # 4 and 12 ms where the costs say 4: 8 on average; in the next window 2.
    took = [(0.0, 0.004), (WINDOW_S - 1e-3, 0.012), (WINDOW_S, 0.002)]
    log = {
        "steps": [[began_s, took_s, None, 2, 0, *work] for began_s, took_s in took],
        "reads": [[0.0, 0.3, 0.2, 0, 1000], [0.0, 0.3, 0.4, 0, 2000]],
    }
    own = AsItWas(costs, log)
    now = 1.0
    own.now = lambda: now
    assert own.step_s(work) == pytest.approx(8e-3)
    assert own.step_s(StepWork(0, 400, 400)) == pytest.approx(2 * costs.step_s(StepWork(0, 400, 400)))
    now = WINDOW_S
    assert own.step_s(work) == pytest.approx(2e-3)
    now = 10 * WINDOW_S
    assert own.step_s(work) == pytest.approx(4e-3)
    assert own.read_s(500, False) == pytest.approx(0.1)
    assert own.read_s(500, True) == costs.read_s(500, True)
