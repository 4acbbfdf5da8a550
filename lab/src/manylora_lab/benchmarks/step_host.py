"""The host's share of a step: what issuing it and taking its tokens in costs the interpreter.

Llama-2-7B shape on the CPU, with the Triton operations' tables and a decoder that computes nothing, so that all
that is left is the host's own work; a GPU's copies and launches are not in it (``h200_steps`` has issue_ms
with them). Microseconds of processor time, of the quickest tenth. From the repository's root:

    python -m manylora_lab.benchmarks.step_host [--profile "decode 128 distinct"]
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch

from manylora.adapters.registry import Registry
from manylora.devices.cpu import CpuDevice
from manylora.devices.device import Tensors
from manylora.executor.direct import DirectExecutor
from manylora.executor.graphs import GraphLimits
from manylora.executor.worker import Worker
from manylora.kernels.ops import AttentionRows, StepBatch
from manylora.kernels.shapes import adapter_geometry
from manylora.kernels.triton.attention_plans import TritonFixedAttention
from manylora.kernels.triton.operations import TritonOps
from manylora.memory.arena import Arena
from manylora.memory.host import HostPool
from manylora.models.config import read_model_config
from manylora.models.decoder import Decoder
from manylora.protocol import RunStep, SequenceStart, StepRow
from manylora.types import BASE, SamplingParams
from manylora_lab.benchmarks.h200 import SHAPES, write_model

PAGE_TOKENS, NUM_PAGES, ROWS, CONTEXT, RANK = 16, 64, 128, 300, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=2000)


class TimedOps(TritonOps):
    """Adds up what the attention's tables take."""

    attention_s = 0.0

    def fixed_attention(self, *args: Any, **kwargs: Any) -> TritonFixedAttention:
        fixed = super().fixed_attention(*args, **kwargs)
        fill = fixed.fill

        def timed(rows: AttentionRows) -> None:
            began = time.thread_time()
            fill(rows)
            self.attention_s += time.thread_time() - began

        fixed.fill = timed  # type: ignore[method-assign]
        return fixed


class NoDecoder:
    """Gives the same logits for whatever is asked."""

    def __init__(self) -> None:
        self.ops = TimedOps()
        self._logits = torch.zeros((ROWS, 8))

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(batch.sample_index)]


class ReplayingDevice(CpuDevice):
    """Runs what it captures once; a replay is nothing."""

    captures = True

    def capture(self, run: Callable[[], Tensors]) -> Callable[[], Tensors]:
        outputs = run()
        return lambda: outputs


def made(folder: Path) -> tuple[Worker, TimedOps]:
    write_model(folder / "model", SHAPES["llama-2-7b"])
    config = read_model_config(folder / "model")
    page = config.page_shape(PAGE_TOKENS, torch.bfloat16.itemsize)
    geometry, device = adapter_geometry(page, config.layer_groups), ReplayingDevice()
    arena = Arena(NUM_PAGES, page, torch.bfloat16, device)
    host = HostPool(0, page, torch.bfloat16, device)
    registry = Registry(geometry, "", folder / "registry.sqlite")
    decoder = NoDecoder()
    worker = Worker(cast(Decoder, decoder), arena, host, geometry, device, registry)
    worker.use_graphs(GraphLimits(ROWS, 4096, 4096, RANK), NUM_PAGES - 1)
    for adapter in range(1, ROWS + 1):
        assert worker.pretend_adapter(adapter, RANK)
    return worker, decoder.ops


def started(sequence: int, adapter: int, length: int, computed: int) -> SequenceStart:
    pages = tuple(range(NUM_PAGES - 1))
    tokens = tuple(range(5, 5 + length))
    return SequenceStart(sequence, 0, adapter, tokens, length, computed, pages, GREEDY, ())


def decoding(num_rows: int, is_adapted: bool, one_less: bool) -> Iterator[RunStep]:
    """Steps of so many rows; every other one without its last row where ``one_less``."""
    numbers = range(1, num_rows + 1)
    starts = tuple(started(n, n if is_adapted else BASE, CONTEXT + 1, CONTEXT) for n in numbers)
    places = dict.fromkeys(numbers, CONTEXT)
    for step in range(PAGE_TOKENS * (NUM_PAGES - 1) - CONTEXT - 1):
        chosen = [n for n in numbers if not (one_less and step % 2 and n == num_rows)]
        rows = tuple(StepRow(n, places[n], 1, 1) for n in chosen)
        for n in chosen:
            places[n] += 1
        yield RunStep(step, starts if step == 0 else (), rows)


def prompts(length: int, is_adapted: bool) -> Iterator[RunStep]:
    """Steps of one new sequence each, which draws once."""
    for n in range(1, 200):
        start = started(n, 1 + n % ROWS if is_adapted else BASE, length, 0)
        yield RunStep(n, (start,), (StepRow(n, 0, length, 1),))


def quick_us(seconds: list[float]) -> float:
    """Below the median: what shares the machine makes steps slower, and never quicker."""
    return 1e6 * statistics.quantiles(seconds[5:], n=10)[0]


def measured(
    worker: Worker, ops: TimedOps, steps: Iterator[RunStep], profiler: cProfile.Profile | None
) -> dict[str, float]:
    """Microseconds to issue a step, of them the attention's tables, and, while the next one is on its way, to take
    its tokens in."""
    direct = DirectExecutor(worker)
    took: dict[str, list[float]] = {"issue": [], "attention": [], "take": []}
    flying, sequences = [], []
    for step in steps:
        sequences += [start.sequence for start in step.starts]
        if profiler is not None:
            profiler.enable()
        ops.attention_s = 0.0
        began = time.thread_time()
        direct.issue_step(step)
        took["issue"].append(time.thread_time() - began)
        took["attention"].append(ops.attention_s)
        flying.append(step)
        if len(flying) == 2:
            began = time.thread_time()
            done = direct.wait_step(flying.pop(0)).done
            took["take"].append(time.thread_time() - began)
            assert done.ok, done.error
        if profiler is not None:
            profiler.disable()
    direct.wait_step(flying.pop())
    for sequence in sequences:
        direct.end_sequence(sequence)
    return {name: quick_us(seconds) for name, seconds in took.items()}


def cases() -> dict[str, Callable[[], Iterator[RunStep]]]:
    found: dict[str, Callable[[], Iterator[RunStep]]] = {}
    for name, is_adapted in (("base", False), ("distinct", True)):
        for num_rows in (1, 32, 128):
            found[f"decode {num_rows} {name}"] = functools.partial(decoding, num_rows, is_adapted, False)
        found[f"decode 128, then 127 {name}"] = functools.partial(decoding, 128, is_adapted, True)
        for length in (64, 600):
            found[f"prompt of {length} {name}"] = functools.partial(prompts, length, is_adapted)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", help="one case, under the profiler")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        worker, ops = made(Path(scratch))
        if args.profile:
            profiler = cProfile.Profile()
            measured(worker, ops, cases()[args.profile](), profiler)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
        else:
            for name, steps in cases().items():
                found = measured(worker, ops, steps(), None)
                print(f"{name:30}", *(f"{part} {us:5.0f} us  " for part, us in found.items()), flush=True)
        worker.close()


if __name__ == "__main__":
    main()
