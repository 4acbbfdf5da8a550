"""Figures of clusters: what must hold of their numbers, in runs of seconds."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from manylora_lab.pricing.costs import DeviceCosts, StepWork
from manylora_lab.pricing.shapes import shape_named
from manylora_lab.reproduce.caraserve_cells import (
    DECODE_LINES,
    MEASURED,
    MODULES,
    PRINTED,
    SCHEDULERS,
    DeviceServerCosts,
    ServerCosts,
    ServersCase,
    lines_of,
    popularity,
    slo_s,
    speed_of,
)
from manylora_lab.reproduce.caraserve_cells import stream_of as servers_stream
from manylora_lab.reproduce.caraserve_fits import PAPERS_LINES, device_lines
from manylora_lab.reproduce.dlora_clusters import over_dlora, within_objective
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.registry import experiment
from manylora_lab.reproduce.report import ExperimentReport
from manylora_lab.sim.cluster import VirtualCluster
from manylora_lab.sim.systems import UNIFORM_ROUTER, System, WholeModels, member_of

from manylora.config.routing import RouterConfig
from tests.sim.test_replay import COSTS, config_of, request, stream_of


@functools.cache
def smoke(name: str) -> ExperimentReport:
    found = experiment(name)
    return found.run(Setup("smoke", found.devices[0], workers=1))


def test_rank_aware_routing_keeps_more_within_the_objective() -> None:
    rows = {
        (row["kernel"], row["scheduler"]): row["slo_attainment"]
        for row in smoke("caraserve-fig19").rows
        if row["times"] == PRINTED
    }
    assert set(rows) == {(kernel, name) for kernel in ("mbgmv", "bgmv") for name in SCHEDULERS}
    for kernel in ("mbgmv", "bgmv"):
        assert rows[kernel, "caraserve"] > rows[kernel, "first-fit"]
        assert rows[kernel, "caraserve"] >= rows[kernel, "random"]


@pytest.mark.parametrize("kernel", ["bgmv", "mbgmv"])
def test_the_schedulers_lines_are_the_servers(kernel: str) -> None:
    lines = lines_of(kernel)  # type: ignore[arg-type]
    slope_s, base_s = DECODE_LINES[kernel]
    line = lines.bgmv if kernel == "bgmv" else lines.mbgmv
    assert line.slope_s == pytest.approx(slope_s, rel=0.1)
    assert line.base_s == pytest.approx(base_s, rel=0.03)
    assert line.r2 > 0.99
    other = lines.mbgmv if kernel == "bgmv" else lines.bgmv
    assert other.r2 < line.r2
    assert ServerCosts("bgmv").step_s(StepWork(1, 0, 1)) * 1.5 == pytest.approx(slo_s(), rel=1e-3)


@pytest.mark.parametrize("kernel", ["bgmv", "mbgmv"])
def test_measured_servers_take_the_devices_lines(kernel: str) -> None:
    """A launch for each of the 96 projections, over units of rank, beside the profile's step."""
    costs, line = DeviceServerCosts(kernel), device_lines()[kernel]  # type: ignore[arg-type]
    work, units = StepWork(8, 0, 512), 8 * 64
    num_bytes = units * shape_named("llama-2-7b").adapter_bytes(1, MODULES)
    lora_us = 1e6 * (costs.step_s(work._replace(adapter_bytes=num_bytes)) - costs.step_s(work))
    assert lora_us == pytest.approx(96 * (line.base_us + 1e-3 * line.slopes_ns[0] * units), rel=1e-6)
    assert set(device_lines()) == set(PAPERS_LINES)
    lines = lines_of(kernel, MEASURED)  # type: ignore[arg-type]
    assert (lines.bgmv if kernel == "bgmv" else lines.mbgmv).r2 > 0.9


def test_requests_come_sooner_on_faster_servers() -> None:
    assert speed_of(PRINTED) == 1
    case = ServersCase("bgmv", "random", 2, 100, 8.0, 5.0)
    printed, measured = servers_stream(case), servers_stream(dataclasses.replace(case, times=MEASURED))
    assert [each.arrival_s for each in measured.requests] == [
        each.arrival_s / speed_of(MEASURED) for each in printed.requests
    ]
    assert [each.prompt for each in measured.requests] == [each.prompt for each in printed.requests]
    assert slo_s(MEASURED) == pytest.approx(slo_s() / speed_of(MEASURED))


def test_the_tail_goes_on_from_the_busiest() -> None:
    weights = popularity(1000)
    assert len(weights) == 1000
    assert weights == sorted(weights, reverse=True)
    assert popularity(50) == weights[:50]


def test_punica_uses_fewer_replicas_and_fills_them() -> None:
    totals = smoke("punica-fig13").settings["totals"]
    assert totals["punica"]["replica_hours"] <= totals["most-idle"]["replica_hours"]
    assert totals["punica"]["batch_of_busy"] >= totals["most-idle"]["batch_of_busy"]
    assert len({total["requests"] for total in totals.values()}) == 1


def test_throughput_falls_with_adapters_only_where_batches_have_one() -> None:
    rows = {(row["system"], row["num_adapters"]): row["done_per_s"] for row in smoke("dlora-fig12").rows}
    assert rows["manylora", 16] > 0.9 * rows["manylora", 4]
    assert rows["dlora", 16] > 0.9 * rows["dlora", 4]
    for system in ("peft", "vllm-uniform"):
        assert rows[system, 16] < 0.8 * rows["manylora", 16]
        assert rows[system, 16] < rows[system, 4]


def test_latencies_compare_where_no_rate_is_beyond_the_objective() -> None:
    rows = [
        {
            "model": "m",
            "traffic": "maf1",
            "system": system,
            "rate_per_s": rate,
            "latency_s_token": latency_s * rate,
        }
        for system, latency_s in (("dlora", 0.01), ("peft", 0.03), ("manylora", 0.005))
        for rate in (4.0, 8.0)
    ]
    assert within_objective(rows, "latency_s_token", 0.5) is None
    found = {figure.metric: figure.ours for figure in over_dlora(rows)}
    assert found == {
        "m, maf1, 8 requests/s: peft's latency a token over dlora's": pytest.approx(3.0),
        "m, maf1, 8 requests/s: manylora's latency a token over dlora's": pytest.approx(0.5),
    }


LONG = ("dlora-fig2b", "dlora-fig9", "router-bound")
"""Of the same code as others."""
NAMES = (
    "caraserve-fig19", "caraserve-fig5", "caraserve-fig9", "punica-fig13", "dlora-fig12", "dlora-fig13",
    "router-staleness", "router-moves", "router-size",
)  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_pictures(name: str, tmp_path: Path) -> None:
    experiment(name).draw(smoke(name), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- systems


def run_of(system: System, router: str = "most-idle", count: int = 2) -> VirtualCluster:
    stream = stream_of(
        *(request(0.05 * place, place, 0, place % 4, 12, 4 + 4 * (place % 3)) for place in range(24))
    )
    member = member_of(system, config_of(num_pages=400), COSTS, [4] * 5, weight_bytes=100_000)
    cluster = VirtualCluster(stream, [member] * count, RouterConfig(router), is_warm=False)
    cluster.run()
    assert all(outcome.num_tokens == outcome.request.output_tokens for outcome in cluster.front.outcomes)
    return cluster


@pytest.mark.parametrize("system", ["ours", "peft", "vllm-uniform", "static-batch"])
def test_every_system_serves_every_request(system: System) -> None:
    run_of(system)


def test_nothing_joins_a_static_batch() -> None:
    cluster = run_of("static-batch")
    for outcomes in cluster.front.served.values():
        spans = sorted((outcome.first_s, outcome.end_s) for outcome in outcomes)
        starts = sorted({first for first, _ in spans})
        for (
            first,
            end,
        ) in spans:  # whoever begins while another runs began with it, or its batch had prompts left
            assert not [other for other in starts if first + 0.2 < other < end - 1e-9]


def test_whole_models_are_swapped_where_they_do_not_fit() -> None:
    device = WholeModels(DeviceCosts(), model_bytes=10**9, most_models=2, num_adapters=3)
    assert device.num_swaps == 0
    cluster = run_of("vllm-uniform", UNIFORM_ROUTER)
    for place, outcomes in cluster.front.served.items():
        assert {((outcome.request.adapter or 0) + 1) % 2 for outcome in outcomes} == {place}
