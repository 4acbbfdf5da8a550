"""FastLibra's experiments at smoke scale: fields, figures of the paper, what must hold, files, errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from manylora_lab.reproduce.cells import REFERENCE, Cell, cell_replay, peak_rate, run_cell, run_cells
from manylora_lab.reproduce.command import reproduce
from manylora_lab.reproduce.decision_times import measure
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.fastlibra_fig5 import entries, ranks, spearman
from manylora_lab.reproduce.fastlibra_grid import POLICIES, cases, rate_shares, run_grid, scenario_rows
from manylora_lab.reproduce.registry import EXPERIMENTS, experiment

from manylora.cli import main

Report = dict[str, Any]

PAPER = {
    "fastlibra-fig2": {
        "chatbot: mean TTFT, ms": 1032.4, "translation: mean TTFT, ms": 1905.1, "agent: mean TTFT, ms": 730.8,
        "translation: TTFT in the worst window, 700-1100 s, ms": 5036.1,
        "translation: TTFT in the worst window, 1100-1800 s, ms": 8617.9,
    },
    "fastlibra-fig4": {
        "LoRA part in use, 700-1100 s": 0.589, "adapters asked for before 1100 s": 41,
        "adapters asked for after 1100 s": 75,
    },
    "fastlibra-fig5": {},
    "fastlibra-fig9": {},
    "fastlibra-fig11": {
        "fastlibra: TTFT against vLLM, mean rates": -0.603, "fastlibra: TPOT against vLLM, mean rates": -0.339,
        "fastlibra: peak over vLLM's": 1.7, "fastlibra: TTFT against S-LoRA, mean rates": -0.501,
        "fastlibra: TPOT against S-LoRA, mean rates": -0.286, "fastlibra: peak over S-LoRA's": 1.6,
        "fastlibra: TTFT against vLLM, translation": -0.689,
        "fastlibra: TTFT against vLLM, without translation": -0.525,
        "fastlibra: TTFT against S-LoRA, agent": -0.811,
        "fastlibra: TTFT against S-LoRA, without agent": -0.346,
    },
    "fastlibra-fig12": {},
    "fastlibra-fig13": {
        "fastlibra: memory use over vLLM's": 1.2, "fastlibra: hit rate over vLLM's": 1.3,
        "fastlibra: memory use over S-LoRA's": 2.6, "fastlibra: hit rate over S-LoRA's": 3.2,
        "static-lru: invalid share of history": 0.481,
    },
    "fastlibra-fig14": {"static-lru: KV at most, share of memory, 900-1300 s": 0.8},
    "fastlibra-fig15": {
        "fastlibra-wom: TTFT ratio": 1.27, "fastlibra-wom: TPOT ratio": 1.18, "fastlibra-wom: peak change": -0.198,
        "fastlibra-wos: TTFT ratio": 1.24, "fastlibra-wos: TPOT ratio": 1.15, "fastlibra-wos: peak change": -0.172,
        "fastlibra-wol: TTFT ratio": 1.13, "fastlibra-wol: TPOT ratio": 1.11, "fastlibra-wol: peak change": -0.131,
        "fastlibra-wom: invalid share of history": 0.486,
    },
    "fastlibra-fig16": {"fastlibra: TTFT against both": -0.554, "fastlibra: TPOT against both": -0.162},
    "fastlibra-overhead": {"fastlibra: match and update, mean ms": 0.5, "fastlibra: a decision, mean ms": 5.0},
}  # fmt: skip
"""Every number that the paper's text states for them (§2.2, §2.3, §6.3 to §6.10), and no other."""

SMOKE = Setup("smoke", workers=1)
SMALL = Cell("chatbot", "fastlibra", 8.0, 20, 4.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """All of them, as the command leaves them."""
    folder = tmp_path_factory.mktemp("reproduced")
    for name in PAPER:
        reproduce(name, folder, "smoke", workers=1)
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in PAPER}


def rows_of(report: Report, **where: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if all(row[field] == value for field, value in where.items())]


def test_all_are_registered() -> None:
    # The table of all has tests of its own, and so have the runs on several seeds.
    others = {"fastlibra-table", "fastlibra-seeds", "fastlibra-ablation"}
    assert {name for name in EXPERIMENTS if name.startswith("fastlibra-")} == {*PAPER, *others}


@pytest.mark.parametrize("name", PAPER)
def test_headline_has_the_papers_numbers_and_no_others(found: dict[str, Report], name: str) -> None:
    report = found[name]
    assert report["experiment"] == name
    assert report["rows"]
    assert report["notes"]
    assert report["settings"]["scale"] == "smoke"
    stated = {f["metric"]: f["paper"] for f in report["headline"] if f["paper"] is not None}
    assert stated == PAPER[name]
    assert len({f["metric"] for f in report["headline"]}) == len(report["headline"])


def test_fig2_watches_three_scenarios_over_time(found: dict[str, Report]) -> None:
    report = found["fastlibra-fig2"]
    for scenario in ("chatbot", "translation", "agent"):
        cell = report["settings"]["cells"][scenario]
        assert (cell["policy"], cell["num_adapters"], cell["adapter_share"]) == ("static-lru", 100, 0.2)
        windows = rows_of(report, scenario=scenario)
        assert [row["at_s"] for row in windows] == sorted({row["at_s"] for row in windows})
        ours = {f["metric"]: f["ours"] for f in report["headline"]}
        worst = ours[f"{scenario}: TTFT in the worst window, ms"]
        mean_ms = ours[f"{scenario}: mean TTFT, ms"]
        assert min(row["ttft_mean_ms"] for row in windows) <= mean_ms <= worst
        assert 0 < ours[f"{scenario}: mean TTFT with all cached (a reference), ms"] <= mean_ms


def test_fig4_fills_parts_that_start_empty(found: dict[str, Report]) -> None:
    report = found["fastlibra-fig4"]
    rows = report["rows"]
    assert rows[0]["lora_use"] < rows[-1]["lora_use"] <= 1, "nothing was asked for before the start"
    for row in rows:
        assert 0 <= row["running_kv_use"] <= row["kv_use"] <= 1
        assert row["running_adapters"] <= 100
    asked = [f["ours"] for f in report["headline"] if f["metric"].startswith("adapters asked for")]
    assert all(1 <= number <= 100 for number in asked)


def test_ranks_and_their_correlation() -> None:
    assert ranks([30, 10, 20, 10]).tolist() == [3, 0.5, 2, 0.5]
    assert spearman([1, 2, 3], [10, 20, 25]) == 1
    assert spearman([1, 2, 3], [5, 1, 0]) == -1
    # By hand, without ties: 1 - 6 * (1 + 1 + 1 + 1) / (4 * 15).
    assert spearman([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    assert spearman([1, 2, 3], [7, 7, 7]) is None


def test_fig5_counts_what_was_used(found: dict[str, Report]) -> None:
    rows = found["fastlibra-fig5"]["rows"]
    for field in ("visits_rank", "cost_rank", "unused_rank"):
        assert sum(row[field] for row in rows) == pytest.approx(len(rows) * (len(rows) - 1) / 2, abs=1)
    replay = cell_replay(SMALL)
    replay.run()
    counted = entries(SMALL, replay.outcomes, replay.stream.ranks)
    requests = replay.stream.requests
    assert sum(entry.visits for entry in counted if entry.kind == "LoRA") == len(requests)
    turns: dict[int, int] = {}
    for request in requests:
        turns[request.conversation] = turns.get(request.conversation, 0) + 1
    # A turn is used by itself and by all that follow.
    assert sum(e.visits for e in counted if e.kind == "KV") == sum(n * (n + 1) // 2 for n in turns.values())
    assert min(entry.unused for entry in counted) == 0


def test_fig9_more_room_for_adapters_means_more_hits(found: dict[str, Report]) -> None:
    for number in ("50 adapters", "100 adapters"):
        hits = [row["adapter_hit_device"] for row in rows_of(found["fastlibra-fig9"], adapters=number)]
        assert hits == sorted(hits)
        assert hits[0] < hits[-1]


def test_fig12_parts_add_up(found: dict[str, Report]) -> None:
    report = found["fastlibra-fig12"]
    for row in report["rows"]:
        parts = row["queue_ms"] + row["adapter_ms"] + row["kv_ms"] + row["steps_ms"]
        assert parts == pytest.approx(row["ttft_ms"], abs=0.01)
    for row in rows_of(report, policy=REFERENCE):
        assert row["adapter_ms"] == row["kv_ms"] == 0


@pytest.mark.parametrize("name", ["fastlibra-fig11", "fastlibra-fig15"])
def test_rows_tell_where_the_first_token_waits(found: dict[str, Report], name: str) -> None:
    for row in found[name]["rows"]:
        parts = [row[f"ttft_{part}_ms"] for part in ("queue", "adapter", "kv", "steps")]
        assert sum(parts) == pytest.approx(row["ttft_mean_ms"], abs=0.01)


def test_fig13_use_is_what_it_is_made_of(found: dict[str, Report]) -> None:
    report = found["fastlibra-fig13"]
    for row in report["rows"]:
        assert row["used"] == pytest.approx(row["running"] + row["history"] + row["adapters"], abs=1e-3)
        assert 0 < row["used"] <= 1
        assert row["hit"] == pytest.approx((row["kv_hit"] + row["adapter_hit"]) / 2)
    for row in rows_of(report, policy="s-lora"):
        assert row["history"] == row["kv_hit"] == 0, "S-LoRA keeps no history"


def test_fig14_areas_stay_within_memory(found: dict[str, Report]) -> None:
    report = found["fastlibra-fig14"]
    for row in report["rows"]:
        assert 0 <= row["running"] + row["adapters"] + row["history"] <= 1.001
    assert all(row["history"] == 0 for row in rows_of(report, policy="s-lora"))
    static = rows_of(report, policy="static-lru")
    assert max(row["adapters"] for row in static) <= 0.2


def test_fig15_is_normalised_to_fastlibra(found: dict[str, Report]) -> None:
    report = found["fastlibra-fig15"]
    for row in rows_of(report, policy="fastlibra"):
        assert (row["ttft_ratio"], row["tpot_ratio"], row["peak_change"], row["invalid_share"]) == (
            1,
            1,
            0,
            0,
        )
    for policy in ("fastlibra-wos", "fastlibra-wol"):
        assert all(row["invalid_share"] == 0 for row in rows_of(report, policy=policy))


def test_fig16_has_every_policy_in_every_case(found: dict[str, Report]) -> None:
    rows = found["fastlibra-fig16"]["rows"]
    assert [(row["case"], row["policy"]) for row in rows] == [
        ("200 uniform", policy) for policy in (*POLICIES, REFERENCE)
    ]


def test_grid_runs_all_policies_at_shares_of_fastlibras_peak() -> None:
    grid = run_grid(SMOKE, cases(SMOKE), ("fastlibra", "s-lora"))
    (case,) = grid.cases
    assert grid.rates[case] == [share * grid.peaks[case, "fastlibra"] for share in rate_shares(SMOKE)]
    assert list(grid.peaks) == [(case, "fastlibra")]
    (row,) = scenario_rows(grid, ["s-lora"], {"ttft": "ttft_mean_ms"})
    assert row == {
        "scenario": "chatbot",
        "policy": "s-lora",
        "ttft": grid.mean(case, "s-lora", "ttft_mean_ms"),
    }


def test_the_full_grid_is_the_papers() -> None:
    full = Setup("full")
    found = cases(full)
    assert len(found) == 27
    assert {(cell.model, cell.cards) for cell in found.values()} == {
        ("llama-2-7b", 1), ("llama-2-13b", 2), ("codellama-34b", 4),
    }  # fmt: skip
    assert found["agent 34B-50"].num_adapters == 50
    assert rate_shares(full) == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert {cell.duration_s for cell in found.values()} == {1800}


def test_a_peak_is_the_highest_rate_that_is_borne() -> None:
    limit_ms, tolerance = 45.0, 0.2
    peak = peak_rate(SMALL, limit_ms, tolerance)

    def ttft_ms(rate: float) -> float:
        return float(run_cell(dataclasses.replace(SMALL, rate=rate))["ttft_mean_ms"])

    assert ttft_ms(peak) < limit_ms
    assert ttft_ms(1.3 * peak) >= limit_ms


def test_the_reference_waits_for_nothing() -> None:
    result = run_cell(dataclasses.replace(SMALL, policy=REFERENCE))
    assert result["ttft_adapter_ms"] == result["ttft_kv_ms"] == 0
    assert result["adapter_hit_device"] == 1


def test_workers_change_nothing() -> None:
    cells = [dataclasses.replace(SMALL, policy=policy) for policy in ("s-lora", "fastlibra", "static-lru")]
    lines: list[str] = []
    together = run_cells(cells, 2, lines.append)
    assert list(together) == cells
    assert together == run_cells(cells, 1, lambda line: None)
    assert lines == [f"{number} of 3 simulations done" for number in (1, 2, 3)]


@pytest.mark.parametrize("name", ["fastlibra-fig4", "fastlibra-fig12"])
def test_equal_seeds_give_equal_reports(found: dict[str, Report], name: str) -> None:
    again = experiment(name).run(SMOKE)
    assert again.rows == found[name]["rows"]
    assert experiment(name).run(Setup("smoke", seed=1, workers=1)).rows != again.rows


def test_overhead_measures_both_policies(found: dict[str, Report]) -> None:
    report = found["fastlibra-overhead"]
    assert report["settings"]["device"] == "cpu"
    assert {row["policy"] for row in report["rows"]} == {"fastlibra", "manylora"}
    measured = measure("lru", 6000, True, num_requests=10, num_decisions=2)
    assert all(value > 0 for name, value in measured.items() if name.endswith("_ms"))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fastlibra-fig99"], "there is no experiment 'fastlibra-fig99'"),
        (["fastlibra-fig11", "--device", "cuda"], "fastlibra-fig11 runs on sim, not on cuda"),
        (["fastlibra-overhead", "--device", "sim"], "fastlibra-overhead runs on cpu, not on sim"),
    ],
)
def test_bad_input_ends_with_one_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments, "--out", str(tmp_path)]) == 2
    last = capsys.readouterr().err.strip().splitlines()
    assert len(last) == 1
    assert expected in last[0]
