"""Figures of cold starts: what must hold of their numbers, in runs of seconds."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from manylora_lab.reproduce.caraserve_cold import (
    QUANTILES,
    SYSTEMS,
    ColdCase,
    Loader,
    System,
    costs_of,
    measure,
    simulate,
)
from manylora_lab.reproduce.caraserve_cold_figures import LOADS, is_in_order
from manylora_lab.reproduce.cold_start_map import MapCase, best_of
from manylora_lab.reproduce.cold_start_map import measure as measure_cell
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.registry import experiment
from manylora_lab.reproduce.report import ExperimentReport, Row

THEIRS = ColdCase("cached", "theirs", 9.0, 64, 10.0)


@functools.cache
def smoke(name: str) -> ExperimentReport:
    found = experiment(name)
    return found.run(Setup("smoke", found.devices[0], workers=1))


@functools.cache
def measured(system: System, loader: Loader) -> Row:
    return measure(dataclasses.replace(THEIRS, system=system, loader=loader))


@pytest.mark.parametrize("loader", ["theirs", "pinned"])
def test_systems_are_asked_the_same_and_end_in_order(loader: Loader) -> None:
    of: dict[str, Row] = {system: measured(system, loader) for system in SYSTEMS}
    assert len({row["requests"] for row in of.values()}) == 1
    assert all(of["cached"]["ttft_mean_ms"] <= row["ttft_mean_ms"] for row in of.values())
    assert is_in_order(of) is (loader == "theirs"), (
        "from pinned memory block gains what wait loses between steps"
    )
    assert all(len(row["ttft_ms"]) == len(QUANTILES) for row in of.values())


def test_what_is_cached_has_no_cold_start_and_waits_for_nothing() -> None:
    replay = simulate(THEIRS)
    before = replay.counters_at_start.cold_starts
    assert replay.report().counters.cold_starts == before
    assert all(outcome.adapter_s == 0 for outcome in replay.outcomes)


def test_on_demand_steps_with_prompts_are_longer_by_their_loads() -> None:
    block, cached = measured("block", "theirs"), measured("cached", "theirs")
    load_ms = 1e3 * costs_of(THEIRS).copy_s(THEIRS.shape.page_bytes(16) * 12)
    assert block["prefill_step_mean_ms"] > cached["prefill_step_mean_ms"] + 0.9 * load_ms
    assert block["decode_step_mean_ms"] < 1.1 * cached["decode_step_mean_ms"]


def test_the_papers_numbers_are_of_three_systems() -> None:
    assert all(
        len(numbers) == 3 for loads in LOADS.values() for load in loads for numbers in load.paper.values()
    )


@pytest.mark.parametrize("link", [4, 52])
def test_a_choice_is_near_the_best_way(link: int) -> None:
    """Of a prompt of 16 tokens and an adapter of rank 256."""
    ways = ("wait", "block", "layerwise", "cpu", "auto")
    found = {way: measure_cell(MapCase(way, link, 256, 16, "assumed")) for way in ways}
    rows = [
        {"cores": "assumed", "link_gb_s": link, "rank": 256, "prompt": 16, "way": way, **row}
        for way, row in found.items()
    ]
    (best,) = best_of(rows, ways[:-1]).values()
    assert best["way"] == "layerwise"
    assert found["auto"]["ttft_ms"] <= 1.1 * best["ttft_ms"]


@pytest.mark.parametrize("name", ["caraserve-fig3", "caraserve-fig11", "caraserve-fig14", "cold-start-map"])
def test_pictures(name: str, tmp_path: Path) -> None:
    experiment(name).draw(smoke(name), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
