"""Cache policies on several seeds: the pairs, their intervals, and what is told of loads that are not finished."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from manylora_lab.baselines import ALL_CACHE_POLICIES
from manylora_lab.reproduce.cells import BELADY, BELADY_SEEN, REFERENCE, CellResult
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.fastlibra_seeds import (
    ABLATED,
    ABLATION_EXPERIMENT,
    BY_PAGES,
    BY_TURNS,
    COLUMNS,
    LIMITS,
    LOADS,
    SEEDS_EXPERIMENT,
    SHARES,
    SIMPLE,
    Load,
    cells_of,
    headline,
    interval,
    mean_change,
    rows_of,
    run,
)
from manylora_lab.reproduce.report import ExperimentReport
from manylora_lab.sim.ablation import ABLATIONS


def test_pairs_are_compared_not_means() -> None:
    """Where every pair has the same ratio the interval is that ratio, however far the levels lie apart."""
    theirs = [[10.0, 1000.0, 50.0, 7.0], [400.0, 20.0, 3.0, 90.0]]
    ours = [[0.8 * value for value in values] for values in theirs]
    assert mean_change(ours, theirs) == pytest.approx(-0.2)
    assert interval(ours, theirs) == (-0.2, -0.2)


def test_an_interval_is_as_wide_as_seeds_differ() -> None:
    theirs = [[100.0] * 4]
    low, high = interval([[80.0, 90.0, 100.0, 110.0]], theirs)
    assert -0.2 < low < mean_change([[80.0, 90.0, 100.0, 110.0]], theirs) < high < 0.1
    narrow = interval([[94.0, 95.0, 95.0, 96.0]], theirs)
    assert narrow[1] - narrow[0] < (high - low) / 5
    assert interval([[80.0, 90.0, 100.0, 110.0]], theirs) == (low, high), "the draws are fixed"


def test_shares_of_one_seed_are_drawn_together() -> None:
    """One seed's shares move together: were they drawn apart, the interval would be narrower."""
    theirs = [[100.0] * 4, [100.0] * 4]
    together = interval([[80.0, 80.0, 120.0, 120.0]] * 2, theirs)
    apart = interval([[80.0, 120.0, 80.0, 120.0], [120.0, 80.0, 120.0, 80.0]], theirs)
    assert apart[1] - apart[0] < 0.01 < together[1] - together[0]


def results_of(load: Load, ttft: dict[str, float]) -> dict[tuple[str, float, int, str], CellResult]:
    """A policy's TTFT at every share, ten percent more with each seed."""
    rest = dict.fromkeys(COLUMNS, 0.25)
    return {
        (load.name, share, seed, policy): {"ttft_mean_ms": ttft[policy] * (1 + seed / 10) * share, **rest}
        for share in load.shares
        for seed in load.seeds
        for policy in load.policies
    }


def test_the_headline_is_against_the_best_simple_policy_and_the_gap_to_unlimited_memory() -> None:
    ttft = {"manylora": 70.0, "fastlibra": 80.0, "lru-ahead": 100.0, "lru-drop": 200.0}
    ttft |= {BELADY: 55.0, BELADY_SEEN: 60.0, REFERENCE: 40.0}
    load = dataclasses.replace(LOADS[1], policies=tuple(ttft))
    rows = rows_of(load, results_of(load, ttft))
    assert {row["best_simple"] for row in rows} == {"lru-ahead"}
    assert len(rows) == len(ttft) * (len(SHARES) + 1)
    for row in rows:
        assert row["change_low"] <= row["change"] <= row["change_high"]
        assert row["invalid_share"] == 0.25
    found = {figure.metric.partition(": ")[2]: figure.ours for figure in headline(rows)}
    assert found["manylora against the best simple policy (lru-ahead)"] == pytest.approx(-0.3)
    assert found["manylora against the best other policy (fastlibra)"] == pytest.approx(-0.125)
    assert found["belady-seen against the best other policy"] == pytest.approx(-0.25)
    assert found["share of belady-seen's gain on the best simple policy that manylora has"] == pytest.approx(
        0.75
    )
    assert found["memory is short"] == 1.0
    assert found["share of that gap which manylora closes"] == pytest.approx(0.25)


def test_memory_is_short_by_the_rates_that_the_best_other_policy_sustains() -> None:
    """At the highest rate unlimited memory is far ahead, and there the other policy is past its peak."""
    ttft = {"manylora": 95.0, "lru-ahead": 100.0, REFERENCE: 90.0}
    load = dataclasses.replace(LOADS[1], policies=tuple(ttft))
    results = results_of(load, ttft)
    for seed in load.seeds:
        results[load.name, SHARES[-1], seed, "lru-ahead"]["ttft_mean_ms"] = 9000.0
        results[load.name, SHARES[-1], seed, "manylora"]["ttft_mean_ms"] = 8000.0
    found = {figure.metric.partition(": ")[2]: figure.ours for figure in headline(rows_of(load, results))}
    assert found[f"{REFERENCE} against the best other policy"] < -0.7  # type: ignore[operator]
    assert found[f"{REFERENCE} against the best other policy, at rates that it sustains"] == pytest.approx(
        -0.1
    )
    assert found["memory is short"] == 0.0
    assert found["share of that gap which manylora closes"] == pytest.approx(0.5)
    for key, result in results.items():
        results[key] = {**result, "ttft_mean_ms": 9000.0}
    none = {figure.metric.partition(": ")[2] for figure in headline(rows_of(load, results))}
    assert "memory is short" not in none
    assert f"{REFERENCE} against the best other policy" in none


def test_every_policy_stands_where_adapters_and_kv_compete() -> None:
    first = LOADS[0]
    assert {*first.policies} == {*ALL_CACHE_POLICIES, *LIMITS}
    assert {*BY_TURNS, *BY_PAGES, *SIMPLE, "manylora"} == {*ALL_CACHE_POLICIES}
    assert first.cell.is_whole
    assert first.cell.num_adapters >= 500
    cells = cells_of(Setup(), LOADS)
    assert len(cells) == sum(len(load.policies) * len(load.seeds) for load in LOADS) * len(SHARES)
    for policies in (
        {key[3]: cell for key, cell in cells.items() if key[:3] == found[:3]} for found in cells
    ):
        assert len({dataclasses.replace(cell, policy="") for cell in policies.values()}) == 1, (
            "the same requests"
        )
    assert {*ABLATIONS, "manylora", "lru"} <= {*ABLATED[0].policies}


def test_a_run_goes_on_from_its_store_and_tells_what_is_missing(tmp_path: Path) -> None:
    setup = Setup("smoke", workers=1, store=tmp_path / "cells.jsonl")
    one = Load("one", LOADS[2].cell, ("lru", "lru+room", REFERENCE))
    other = Load("other", LOADS[0].cell, ("lru", "lru-ahead"))
    nothing = run(dataclasses.replace(setup, is_run=False), [one])
    assert (nothing.rows, nothing.settings["missing"]) == ([], {"one": 6})
    found = run(setup, [one])
    assert found.settings["missing"] == {}
    lines = (tmp_path / "cells.jsonl").read_bytes()
    both = run(dataclasses.replace(setup, is_run=False), [one, other])
    assert (both.rows, both.settings["missing"]) == (found.rows, {"other": 4})
    assert run(setup, [one]).rows == found.rows
    assert (tmp_path / "cells.jsonl").read_bytes() == lines


def test_the_effects_of_features_are_told_with_and_without_the_others() -> None:
    (load,) = ABLATED
    ttft = dict.fromkeys(load.policies, 100.0) | {"manylora": 50.0, "manylora-room": 75.0, "lru+room": 60.0}
    figures = ABLATION_EXPERIMENT.headline[0](rows_of(load, results_of(load, ttft)))
    found = {figure.metric: figure.ours for figure in figures}
    assert found["manylora-room against manylora"] == pytest.approx(0.5)
    assert found["lru+room against lru"] == pytest.approx(-0.4)
    assert found["manylora against lru"] == pytest.approx(-0.5)
    assert len(found) == len(ABLATIONS) + 1
    assert ABLATION_EXPERIMENT.headline[0]([]) == []


def test_the_picture(tmp_path: Path) -> None:
    load = Load("one", LOADS[2].cell, ("manylora", "lru-ahead", REFERENCE))
    rows = rows_of(load, results_of(load, {"manylora": 1.0, "lru-ahead": 2.0, REFERENCE: 0.5}))
    report = ExperimentReport("fastlibra-seeds", "of one load", {}, rows, [])
    SEEDS_EXPERIMENT.draw(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
