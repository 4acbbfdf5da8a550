"""``manylora profile`` on the shipped demo model, and which batches it measures."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from manylora_lab.bench.profile_grid import Batch, GridLimits, make_batches
from manylora_lab.pricing.costs import StepWork
from manylora_lab.pricing.fit import fit_profile
from manylora_lab.pricing.profile import ModePoint, SwitchPoint, load_profile
from manylora_lab.sim.cold import measured_cold
from manylora_lab.sim.merging import measured_costs, measured_times
from manylora_lab.sim.shipped import find_profile

from manylora.cli import main
from tests.e2e.process import MODEL

SMALL = [
    "--device", "cpu", "--max-num-seqs", "4", "--max-batch-tokens", "32", "--max-model-len", "64",
    "--device-pool", "16MiB", "--host-pool", "8MiB", "--quick", "--budget", "0.01",
]  # fmt: skip


def profile(*args: str) -> int:
    return main(["profile", "--model", MODEL, *SMALL, *args])


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo.json"
    more = ("--name", "demo", "--adapter-modules", "all", "--commit", "abc", "--pipeline-depth", "2")
    assert profile("--out", str(out), *more) == 0
    shown = capsys.readouterr().out
    assert "held out" in shown
    assert str(out) in shown
    found = load_profile(out)
    assert (found.model.name, found.model.layers, found.model.kv_heads, found.dtype) == (
        "demo",
        4,
        2,
        "float32",
    )
    assert found.model.is_tied
    assert found.machine.startswith("cpu (")
    assert found.commit == "abc"
    assert found.pipeline_depth == 2
    assert {"python", "torch", "numpy"} <= set(found.versions)
    assert len(found.adapter_modules) == 7
    assert max(point.num_decodes for point in found.steps) == 4
    assert max(point.num_prefill_tokens for point in found.steps) == 32
    one = next(point for point in found.steps if point.num_adapters == 1 and point.num_decodes == 4)
    # The first adapter's rank is 64: 4544 numbers a layer for each rank, in float32, then whole pages of 32 KiB.
    assert one.adapter_bytes == -(-64 * 4 * 4544 * 4 // 32768) * 32768
    assert one.adapter_token_bytes == 4 * one.adapter_bytes
    assert {point.num_rows for point in found.overheads} >= {1, 4}
    for factors in (found.spread.decodes, found.spread.prefills):
        assert statistics.fmean(factors) == pytest.approx(1.0, rel=1e-3)
    assert found.spread.landings, "the engine that had too few pages has copied"
    assert {point.num_workers for point in found.cpu_products} >= {1}
    assert min(found.cores, found.handover_s, found.num_products) > 0
    assert sum(found.group_shares) == pytest.approx(1, rel=1e-3)
    assert len(found.gates) > 1
    assert min(point.issue_s for point in found.gates) > 0
    cold = measured_cold(found)
    assert cold is not None
    assert min(cold.rates.step_s, cold.result_token_bytes) > 0
    costs = fit_profile(found)
    assert costs.step_s(StepWork(4, 16, 100, one.adapter_bytes, 1)) > 0


def test_merging_is_measured_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Switches by copy and steps by mode; a simulation has them in place of steps of the base alone."""
    out, report = tmp_path / "demo.json", tmp_path / "report.json"
    assert profile("--out", str(out), "--merging", "--adapter-modules", "all") == 0
    found = load_profile(out)
    kinds = [(point.from_adapter, point.to_adapter, point.on_host) for point in found.switches]
    assert sorted(kinds) == sorted(
        (*way, on_host) for way in ((False, True), (True, False), (True, True)) for on_host in (False, True)
    )
    assert [point.num_rows for point in found.modes] == [1, 4, 1]
    assert all(min(point.seconds, point.merged_s) > 0 for point in found.modes)
    times = measured_times(found, on_host=True)
    assert times is not None
    assert times.steps_wait
    capsys.readouterr()
    workload = (
        "--workload",
        "synthetic:prompt=8,output=8",
        "--rate",
        "50",
        "--adapters",
        "1",
        "--duration",
        "1",
    )
    sizes = (
        "--device-pool",
        "16MiB",
        "--max-num-seqs",
        "4",
        "--max-batch-tokens",
        "32",
        "--max-model-len",
        "64",
    )
    asked = ("--profile", str(out), *sizes, "--merge", "merged", "--out", str(report))
    assert main(["bench", "simulate", *workload, *asked]) == 0
    assert "not measured" not in capsys.readouterr().out
    result = json.loads(report.read_text())["results"]["manylora+merged"]
    assert result["merging"]["priced_by"] == "measured steps"
    assert result["config"]["merge"]["times"]["merge_s"] == found.switches[0].seconds
    assert result["merging"]["clairvoyant"]["steps"] > 0


def test_a_step_with_the_measured_adapter_gains_as_measured() -> None:
    """Merged 2 of 3 ms, whatever the fit says of it."""
    modes = (ModePoint(1, 1, 2**20, 3e-3, 2e-3), ModePoint(8, 8, 2**20, 6e-3, 5e-3))
    switches = tuple(
        SwitchPoint(*way, False, 1, seconds)
        for way, seconds in (((False, True), 0.01), ((True, False), 0.02), ((True, True), 0.03))
    )
    plain = find_profile("cpu-demo")
    found, costs = dataclasses.replace(plain, modes=modes, switches=switches), fit_profile(plain)
    merging = measured_costs(found, costs, on_host=False)
    assert merging is not None
    assert merging.change_s == 0.03
    for mode in modes:
        size = mode.num_rows

        def step_s(num_bytes: int, size: int = size) -> float:
            return costs.step_s(
                StepWork(size, 0, size * 512, num_bytes, min(num_bytes, 1), 0, size * num_bytes)
            )

        unmerged_s, base_s = step_s(2**20), step_s(0)
        assert merging.step_s(size, base_s) == pytest.approx(unmerged_s * mode.merged_s / mode.seconds)
    low, high = (merging.step_s(size, 1.0) for size in (1, 8))
    assert merging.step_s(4, 1.0) == pytest.approx(low + 3 / 7 * (high - low))
    assert merging.step_s(100, 1.0) == pytest.approx(high)
    assert measured_costs(plain, costs, on_host=False) is None, "an older one"
    assert measured_times(found, on_host=True) is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--out", "nowhere/p.json"], "there is no such folder"),
        (["--out", "."], "cannot write .: it is a folder"),
        (["--out", "p.json", "--budget", "long"], "--budget must be a number"),
        (["--out", "p.json", "--budget", "-1"], "--budget must be more than 0"),
        (["--out", "p.json", "--adapter-modules", "some"], "attention or all"),
        (["--out", "p.json", "--model", "./nowhere"], "nowhere"),
        (["--out", "p.json", "--device-pool", "512KiB"], "raise --device-pool"),
        (["--out", "p.json", "--host-pool", "64KiB"], "raise --host-pool"),
        (
            ["--out", "p.json", "--tensor-parallel-size", "3"],
            "--tensor-parallel-size 3 does not fit the model",
        ),
        (["--out", "p.json", "-tp", "0"], "--tensor-parallel-size must be at least 1, got 0"),
        (["--out", "p.json", "-tp", "x"], "-tp must be a whole number, got 'x'"),
    ],
)
def test_what_cannot_work_is_one_line(
    args: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert profile(*args) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


LIMITS = GridLimits(
    max_seqs=64, max_tokens=1024, max_len=1000, num_pages=2000, page_tokens=16, num_adapters=5
)


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_grid_fits_and_covers(is_quick: bool) -> None:
    batches = make_batches(LIMITS, is_quick)
    assert batches == make_batches(LIMITS, is_quick)
    assert all(batch.fits(LIMITS) for batch in batches)
    for some in (
        [batch for batch in batches if batch.is_held_out],
        [batch for batch in batches if not batch.is_held_out],
    ):
        assert any(batch.contexts and not batch.prefills for batch in some)
        assert any(batch.prefills and not batch.contexts for batch in some)
        assert any(batch.prefills and batch.contexts for batch in some)
        assert any(batch.adapters for batch in some)
        assert any(not batch.adapters for batch in some)
    assert max(len(batch.contexts) for batch in batches) == 64
    assert max(sum(tokens for _, tokens in batch.prefills) for batch in batches) >= 1000
    assert any(start for batch in batches for start, _ in batch.prefills)


def test_a_batch_counts_its_pages() -> None:
    batch = Batch((15, 16), ((10, 7),))
    assert batch.num_pages(16) == 1 + 2 + 2
    assert batch.num_tokens == 9


def test_the_smallest_engine_has_batches() -> None:
    limits = GridLimits(max_seqs=1, max_tokens=4, max_len=8, num_pages=4, page_tokens=4, num_adapters=1)
    assert all(batch.fits(limits) for batch in make_batches(limits, True))
