"""``manylora profile`` on the shipped demo model, and which batches it measures."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from manylora_lab.bench.profile_grid import Batch, GridLimits, make_batches

from manylora.cli import main
from manylora.pricing.costs import StepWork
from manylora.pricing.fit import fit_profile
from manylora.pricing.profile import load_profile
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
    costs = fit_profile(found)
    assert costs.step_s(StepWork(4, 16, 100, one.adapter_bytes, 1)) > 0


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
