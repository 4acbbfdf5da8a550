"""Adapter clustering and virtual token counters: what must hold of the experiments' numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.registry import experiment
from manylora_lab.reproduce.report import ExperimentReport
from manylora_lab.reproduce.s_lora_cells import ServingCase, simulate, stream_of


def smoke(name: str) -> ExperimentReport:
    return experiment(name).run(Setup("smoke", workers=1))


@pytest.fixture(scope="module")
def fig3() -> ExperimentReport:
    return smoke("vtc-fig3")


def test_fcfs_grows_apart_and_vtc_does_not(fig3: ExperimentReport) -> None:
    of = {
        fairness: [row["difference"] for row in fig3.rows if row["fairness"] == fairness]
        for fairness in ("fcfs", "vtc")
    }
    assert of["fcfs"][-1] > 5 * of["vtc"][-1]
    assert of["fcfs"] == sorted(of["fcfs"])


def test_vtc_serves_as_much(fig3: ExperimentReport) -> None:
    fcfs, vtc = (
        [row["served"] for row in fig3.rows if row["fairness"] == fairness][-1]
        for fairness in ("fcfs", "vtc")
    )
    assert vtc == pytest.approx(fcfs, rel=0.05)


def test_all_sizes_get_the_same_requests() -> None:
    report = smoke("s-lora-cluster")
    assert len({row["requests"] for row in report.rows}) == 1
    assert {row["size"] for row in report.rows} == {"1", "32"}
    assert all(row["ttft_spread_s"] >= 0 for row in report.rows)


def test_a_limit_that_cannot_be_reached_changes_nothing() -> None:
    limited = ServingCase("S2", "a10", 12, 6.0, 10.0, adapter_batch_limit="12:hard")
    usual = ServingCase("S2", "a10", 12, 6.0, 10.0)
    stream = stream_of(usual)
    assert [o.end_s for o in simulate(limited, stream)] == [o.end_s for o in simulate(usual, stream)]


@pytest.mark.parametrize("name", ["vtc-fig3", "s-lora-cluster"])
def test_pictures(name: str, tmp_path: Path) -> None:
    found = experiment(name)
    found.draw(smoke(name), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
