"""The host's share of a step: what issuing it and taking its tokens in costs the interpreter.

Llama-2-7B shape on the CPU, with the Triton operations' tables and a decoder that computes nothing, so that all
that is left is the host's own work; a GPU's copies and launches are not in it (``h200_steps`` has issue_ms
with them). Microseconds of processor time, of the quickest tenth. From the repository's root:

    python -m manylora_lab.benchmarks.step_host [--profile "decode 128 distinct"]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch

from manylora.adapters.registry import Registry
from manylora.devices.cpu import CpuDevice
from manylora.devices.device import Tensors
from manylora.executor.graphs import GraphLimits
from manylora.executor.worker import Worker
from manylora.kernels.ops import StepBatch
from manylora.kernels.shapes import adapter_geometry
from manylora.kernels.triton.operations import TritonOps
from manylora.memory.arena import Arena
from manylora.memory.host import HostPool
from manylora.models.config import read_model_config
from manylora.models.decoder import Decoder
from manylora.pricing.shapes import SHAPES
from manylora.protocol import RunStep
from manylora_lab.bench.dummies import write_model
from manylora_lab.benchmarks.engine_rig import POSITIONS
from manylora_lab.benchmarks.step_rig import PAGE_TOKENS, StepRig, StepTiming

ROWS, CONTEXT, RANK, STEPS = 128, 300, 16, 200
NUM_PAGES = ROWS * -(-(CONTEXT + 1 + STEPS) // PAGE_TOKENS)


class NoDecoder:
    """Gives the same logits for whatever is asked."""

    def __init__(self) -> None:
        self.ops = TritonOps()
        self._logits = torch.zeros((ROWS, 8))

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(batch.sample_index)]


class ReplayingDevice(CpuDevice):
    """Runs what it captures once; a replay is nothing."""

    captures = True

    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        outputs = run()
        return lambda: outputs


def worker_in(folder: Path) -> Worker:
    config = read_model_config(write_model(folder / "model", SHAPES["llama-2-7b"], POSITIONS))
    # Fewer pages than the sequences name: nothing is computed in them.
    page = config.page_shape(PAGE_TOKENS, torch.bfloat16.itemsize)
    geometry, device = adapter_geometry(page, config.layer_groups), ReplayingDevice()
    arena = Arena(64, page, torch.bfloat16, device)
    host = HostPool(0, page, torch.bfloat16, device)
    registry = Registry(geometry, "", folder / "registry.sqlite")
    worker = Worker(cast(Decoder, NoDecoder()), arena, host, geometry, device, registry)
    worker.use_graphs(GraphLimits(ROWS, POSITIONS, POSITIONS, RANK), 63)
    for adapter in range(1, ROWS + 1):
        assert worker.pretend_adapter(adapter, RANK)
    return worker


def cases(rig: StepRig) -> Iterator[tuple[str, Iterator[RunStep]]]:
    """Steps by name."""
    for name, adapted in (("base", False), ("distinct", True)):
        for num_rows in (1, 32, 128):
            starts = rig.sequences([(CONTEXT, 1)] * num_rows, adapted, room=STEPS)
            yield f"decode {num_rows} {name}", rig.decoding(starts, STEPS)
        yield f"decode 128, then 127 {name}", rig.decoding(starts, STEPS, one_less=True)
        for length in (64, 600):
            yield f"prompt of {length} {name}", rig.fresh([(0, length)], adapted, STEPS)


def quick_us(found: Sequence[StepTiming], name: str) -> float:
    """Below the median: what shares the machine makes steps slower, and never quicker."""
    seconds: list[float] = [getattr(one, name) for one in found[5:]]
    return 1e6 * statistics.quantiles(seconds, n=10)[0]


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", help="one case, under the profiler")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        worker = worker_in(Path(scratch))
        rig = StepRig(worker, NUM_PAGES, time.thread_time)
        if args.profile:
            profiler = cProfile.Profile()
            profiler.runcall(rig.run, dict(cases(rig))[args.profile], 2)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
        else:
            for name, steps in cases(rig):
                found = rig.run(steps, 2)
                issue, take = quick_us(found, "issue_s"), quick_us(found, "take_s")
                print(f"{name:30} issue {issue:5.0f} us   take {take:5.0f} us", flush=True)
        worker.close()


if __name__ == "__main__":
    main()
