"""Costs that a paper's authors state: steps and switches, whatever the batch, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.shapes import SHAPES
from manylora_lab.sim.analytical import AnalyticalCosts
from manylora_lab.sim.hardware import hardware_named
from manylora_lab.sim.merging import merge_times
from manylora_lab.sim.stated import described_costs

from manylora.cli import main
from manylora.config.declaring import ConfigError

SHAPE = SHAPES["llama-2-7b"]


@pytest.mark.parametrize(
    "work", [StepWork(1, 0, 1), StepWork(16, 0, 9000), StepWork(0, 2000, 2000, 0, 0, 10**6)]
)
def test_steps_take_what_dlora_states_whatever_the_batch(work: StepWork) -> None:
    costs = described_costs(SHAPE, hardware_named("dlora-a800"))
    assert costs.step_s(work) == 15e-3
    assert costs.step_s(work._replace(adapter_bytes=2**21, num_adapters=1)) == 27e-3


@pytest.mark.parametrize("on_host", [False, True])
def test_a_switch_takes_what_dlora_states(on_host: bool) -> None:
    costs = described_costs(SHAPE, hardware_named("dlora-a800"))
    times = merge_times(costs, 2**21, SHAPE.layer_bytes, 16, 2048, on_host=on_host)
    assert (times.merge_s, times.restore_s, times.steps_wait) == (20e-3, 20e-3, on_host)
    assert {(step.unmerged_s, step.merged_s) for step in times.steps} == {(27e-3, 15e-3)}


def test_other_cards_have_their_data_sheet() -> None:
    assert type(described_costs(SHAPE, hardware_named("a10"), 2)) is AnalyticalCosts


def test_what_is_not_stated_is_refused() -> None:
    card = hardware_named("dlora-a800")
    with pytest.raises(ConfigError, match="of llama-2-7b, not of llama-2-13b"):
        described_costs(SHAPES["llama-2-13b"], card)
    with pytest.raises(ConfigError, match="of one card, not of 2"):
        described_costs(SHAPE, card, 2)


SIMULATE = ("bench", "simulate", "--workload", "synthetic:popularity=identical", "--rate", "4", "--adapters", "2",
            "--duration", "5", "--hardware", "dlora-a800")  # fmt: skip


def test_bench_simulate_knows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--merge", "unmerged,merged", "--merge-copy", "device"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    between = {name: float(lines[name][3]) for name in ("manylora", "manylora+merged")}
    assert between["manylora"] == pytest.approx(27, abs=0.1), "TPOT, ms"
    assert between["manylora+merged"] == pytest.approx(15, abs=1)


def test_bench_simulate_refuses_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--shape", "llama-2-13b"]) == 2
    assert "dlora-a800 has times of llama-2-7b" in capsys.readouterr().err
