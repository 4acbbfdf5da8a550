"""What given batches take on the real executor, for a model shape with dummy weights."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from manylora.executor.build import build_worker
from manylora.flags import build_settings
from manylora_lab.bench.dummies import dtype_name, write_model
from manylora_lab.bench.kernels.timing import one_thread
from manylora_lab.bench.profile_grid import Batch
from manylora_lab.bench.profile_rig import ProfileRig
from manylora_lab.pricing.shapes import ModelShape

_PAGE_TOKENS = 16


def step_seconds(
    shape: ModelShape, device: str, batches: Sequence[Batch], repeats: int, show: Callable[[str], None]
) -> tuple[list[float], str]:
    """The median time of each batch, and the device's name; on a CPU of one thread.

    Batches take turns, ``repeats`` times, after one run each that does not count. Raises ConfigError.
    """
    with one_thread() if device == "cpu" else contextlib.nullcontext():
        return _step_seconds(shape, device, batches, repeats, show)


def _step_seconds(
    shape: ModelShape, device: str, batches: Sequence[Batch], repeats: int, show: Callable[[str], None]
) -> tuple[list[float], str]:
    longest = max(max([c + 1 for c in b.contexts] + [sum(row) for row in b.prefills]) for b in batches)
    num_pages = max(batch.num_pages(_PAGE_TOKENS) for batch in batches)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / shape.name, shape, longest)
        settings, _ = build_settings(
            {
                "model": str(model), "device": device, "dtype": dtype_name(shape), "load_format": "dummy",
                "max_model_len": longest, "page_tokens": _PAGE_TOKENS, "host_pool": 0, "cold_start": "wait",
                "max_num_seqs": max(len(batch.contexts) + len(batch.prefills) for batch in batches),
                "max_batch_tokens": max(batch.num_tokens for batch in batches),
                "device_pool": num_pages * shape.page_bytes(_PAGE_TOKENS),
            }
        )  # fmt: skip
        worker, policy, info = build_worker(settings, registry_path=Path(scratch) / "registry.sqlite")
        try:
            rig = ProfileRig(worker, policy)
            for done, batch in enumerate(batches):
                show(f"rehearsal {done} of {len(batches)}")
                rig.rehearse(batch)
            times: list[list[float]] = [[] for _ in batches]
            for number in range(repeats):
                show(f"repeat {number} of {repeats}")
                for batch, found in zip(batches, times):
                    found.append(rig.time(batch))
        finally:
            worker.close()
    return [statistics.median(found) for found in times], info.device
