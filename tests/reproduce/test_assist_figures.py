"""CPU LoRA's ways and invocations: the same numbers by each, and pictures of them, at the smallest size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from manylora_lab.reproduce.assist_rig import WAYS, AssistPool, LayerTimes, beside_device, prefill
from manylora_lab.reproduce.caraserve_assist import layer_times
from manylora_lab.reproduce.experiment import Setup
from manylora_lab.reproduce.registry import experiment


@pytest.fixture(scope="module")
def pool() -> Iterator[AssistPool]:
    pool = AssistPool(256, 3, 8)
    yield pool
    pool.close()


@pytest.mark.parametrize(("way", "count"), [("shared", 1), ("shared", 2), ("socket", 2), ("threads", 1)])
def test_every_way_gives_the_adapters_numbers(pool: AssistPool, way: str, count: int) -> None:
    """Also invoked by a device, in either order."""
    x = torch.randn(7, pool.hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ours = WAYS[way](pool, count)
    try:
        found = prefill(pool, ours, x, repeats=1)
        assert found.error < (0.02 if way == "threads" else 1e-5)
        assert 0 < found.busy_s <= found.seconds
        for is_native in (True, False):
            assert beside_device(pool, ours, x, LayerTimes(0, 0, 0), is_native=is_native) > 0
    finally:
        ours.close()


def test_a_devices_layers_are_the_papers_cards() -> None:
    """A step of Llama-2-7B on an A10 takes about 30 ms."""
    times = layer_times(16)
    assert 0.02 < 32 * (times.before_s + times.product_s) < 0.04
    assert times.product_s < times.before_s


@pytest.mark.parametrize("name", ["caraserve-fig16", "caraserve-fig17", "caraserve-fig18"])
def test_pictures(name: str, tmp_path: Path) -> None:
    report = experiment(name).run(Setup("smoke", "cpu", workers=1))
    experiment(name).draw(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert all(row["ms"] > 0 for row in report.rows)
