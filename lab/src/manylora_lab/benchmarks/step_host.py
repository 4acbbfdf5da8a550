"""The host's share of a step: what issuing it and taking its tokens in costs the interpreter.

Llama-2-7B shape on the CPU, with the Triton operations' tables and a decoder that computes nothing, so that all
that is left is the host's own work; a GPU's copies and launches are not in it (``h200_steps`` has issue_ms
with them). Microseconds of processor time, of the quickest tenth: back to back, and of prompts a second time after
something else has had the processor's caches, as after a pause. The adapter of a ``cold`` prompt is in host
memory, and its copy, by layer groups, is commanded with the step. From the repository's root:

    python -m manylora_lab.benchmarks.step_host [--profile "decode 128 distinct"]
    python -m manylora_lab.benchmarks.step_host --threads --out threads.json

``--threads``: what else this process works on meanwhile. Microseconds by the clock to issue a cold prompt after a
pause, alone and behind a copy from the device, where the threads of copies begin with the command, and where what
no step waits for is put off until the step is launched; in turns.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import itertools
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from manylora.adapters.peft import AdapterSpec
from manylora.adapters.registry import Registry
from manylora.adapters.tensorfile import FileStamp
from manylora.devices.cpu import CpuDevice
from manylora.devices.device import Tensors
from manylora.executor.graphs import GraphLimits
from manylora.executor.worker import Worker
from manylora.kernels.ops import StepBatch
from manylora.kernels.shapes import AdapterGeometry, adapter_geometry
from manylora.kernels.triton.operations import TritonOps
from manylora.memory.arena import Arena
from manylora.memory.bringing import Bringer
from manylora.memory.host import HostPool
from manylora.models.config import read_model_config
from manylora.models.decoder import Decoder
from manylora.pricing.shapes import SHAPES
from manylora.protocol import Await, EvictAdapter, RunStep, SwapPages
from manylora_lab.bench.dummies import write_model
from manylora_lab.bench.provenance import add_flags
from manylora_lab.benchmarks.engine_rig import POSITIONS
from manylora_lab.benchmarks.run_report import RunReport
from manylora_lab.benchmarks.step_rig import PAGE_TOKENS, StepRig, StepTiming

ROWS, CONTEXT, RANK, STEPS, PAUSES = 128, 300, 16, 200, 60
COLD, GROUPS = (1001, 1002), 8
"""Adapters of cold prompts; groups of layers in which they land."""
LEAVING = tuple(zip(range(40, 44), range(11, 15)))
PROMPTS, TURNS, PAUSE_S = 12, 12, 0.03
_OTHERS = np.zeros(2**23)
NUM_PAGES = ROWS * -(-(CONTEXT + 1 + STEPS) // PAGE_TOKENS)


class NoKernels(TritonOps):
    """Copies in layer groups are over when they are launched, and no gate is ever shut."""

    def pass_gate(
        self, landed: torch.Tensor, wanted: torch.Tensor, told: torch.Tensor, is_first: bool
    ) -> None:
        return

    def bring_groups(self, *tensors: torch.Tensor) -> None:
        return


class NoDecoder:
    """Gives the same logits for whatever is asked."""

    def __init__(self) -> None:
        self.ops = NoKernels()
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
    host = HostPool(16, page, torch.bfloat16, device)
    registry = Registry(geometry, "", folder / "registry.sqlite")
    decoder = NoDecoder()
    worker = Worker(cast(Decoder, decoder), arena, host, geometry, device, registry)
    worker.use_graphs(GraphLimits(ROWS, POSITIONS, POSITIONS, RANK, num_groups=GROUPS), 63)
    words = worker._copier._words
    assert words is not None
    worker._copier.tell_landed(words, Bringer(decoder.ops, words, arena, host, device))
    for adapter in range(1, ROWS + 1):
        assert worker.pretend_adapter(adapter, RANK)
    for adapter in COLD:
        worker.inspections.learn(adapter, spec_of(geometry))
    return worker


def spec_of(geometry: AdapterGeometry) -> AdapterSpec:
    """Of an adapter that has no files."""
    stamp, layers = FileStamp(0, 0), geometry.page.layers
    ranks, scales = (RANK,) * layers, (1.0,) * layers
    count = len(geometry.projections)
    return AdapterSpec(
        "", None, stamp, stamp, "BF16", RANK, False, (), (ranks,) * count, (scales,) * count, "", "", "",
    )  # fmt: skip


class HostRig(StepRig):
    """``StepRig`` by processor time, with cold prompts."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, NUM_PAGES, time.thread_time)
        self._worker = worker
        self._swap: SwapPages | None = None
        self._outs = itertools.count(2**32)
        self.copies_out = False
        """Whether four pages leave before an adapter comes."""

    def puts_off(self, puts_off: bool) -> None:
        """Whether what no step waits for is put off."""
        self._worker._copier._puts_off = puts_off

    def cold(self, length: int, steps: int) -> Iterator[RunStep]:
        """Steps of one prompt each, with two adapters in turn that come from the host."""
        count = self._worker.inspections.layout(COLD[0]).num_pages
        for copy, step in enumerate(self.fresh([(0, length)], True, steps)):
            (start,), adapter = step.starts, COLD[copy % 2]
            pages = range(copy % 2 * count, (1 + copy % 2) * count)
            self._swap = SwapPages(copy, True, tuple(enumerate(pages)), adapter, GROUPS)
            yield dataclasses.replace(
                step,
                starts=(dataclasses.replace(start, adapter=adapter),),
                awaits=(Await(copy, (start.sequence,)),),
            )
        self._swap = None

    def issue(self, step: RunStep) -> None:
        """With the copy that it awaits."""
        if self._swap is not None and self._swap.adapter is not None:
            self._worker.obey(EvictAdapter(self._swap.adapter))
            if self.copies_out:
                self._worker.obey(SwapPages(next(self._outs), False, LEAVING))
            self._worker.obey(self._swap)
        super().issue(step)


def cases(rig: HostRig) -> Iterator[tuple[str, Iterator[RunStep]]]:
    """Steps by name."""
    for name, adapted in (("base", False), ("distinct", True)):
        for num_rows in (1, 32, 128):
            starts = rig.sequences([(CONTEXT, 1)] * num_rows, adapted, room=STEPS)
            yield f"decode {num_rows} {name}", rig.decoding(starts, STEPS)
        yield f"decode 128, then 127 {name}", rig.decoding(starts, STEPS, one_less=True)
        yield from ((f"{case} {name}", steps) for case, steps in prompts(rig, adapted, STEPS))
    yield "prompt of 64 cold", rig.cold(64, STEPS)


def prompts(rig: HostRig, adapted: bool, steps: int) -> Iterator[tuple[str, Iterator[RunStep]]]:
    for length in (64, 600):
        yield f"prompt of {length}", rig.fresh([(0, length)], adapted, steps)


def after_pauses(rig: HostRig) -> Iterator[tuple[str, Iterator[RunStep]]]:
    """The same of prompts, fewer."""
    for name, adapted in (("base", False), ("distinct", True)):
        for case, steps in prompts(rig, adapted, PAUSES):
            yield f"{case} {name}, after a pause", steps
    yield "prompt of 64 cold, after a pause", rig.cold(64, PAUSES)


def pause() -> None:
    """Something else has the processor's caches."""
    np.add(_OTHERS, 1.0, out=_OTHERS)


def beside_threads(rig: HostRig, report: RunReport, turns: int) -> None:
    """Issuing cold prompts while threads of copies work, and while they wait."""

    def rest() -> None:
        time.sleep(PAUSE_S)
        pause()

    rig.clock = time.perf_counter
    taken: dict[tuple[bool, bool], list[float]] = {}
    for turn in range(turns):
        ways = list(itertools.product((False, True), repeat=2))
        for puts_off, copies_out in ways if turn % 2 else reversed(ways):
            rig.puts_off(puts_off)
            rig.copies_out = copies_out
            timed = rig.run(rig.cold(64, 2 + PROMPTS), 1, rest)[2:]
            taken.setdefault((copies_out, puts_off), []).extend(1e6 * one.issue_s for one in timed)
    for (copies_out, puts_off), each in sorted(taken.items()):
        found = {"issue_us": tenth(each), "median_us": statistics.median(each)}
        put_off = taken[copies_out, True]
        over = {
            "over_put_off": found["issue_us"] / tenth(put_off),
            "median_over_put_off": found["median_us"] / statistics.median(put_off),
        }
        row = {"behind_a_copy": copies_out, "puts_off": puts_off, **found, **over, "count": len(each)}
        report.note("threads", row)


def tenth(found: Sequence[float]) -> float:
    """The quickest tenth's end: what shares the machine makes steps slower, and never quicker."""
    return statistics.quantiles(found, n=10)[0]


def quick_us(found: Sequence[StepTiming], name: str) -> float:
    return 1e6 * tenth([getattr(one, name) for one in found[5:]])


def show(name: str, found: Sequence[StepTiming]) -> None:
    issue, take = quick_us(found, "issue_s"), quick_us(found, "take_s")
    print(f"{name:36} issue {issue:5.0f} us   take {take:5.0f} us", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", help="one case, under the profiler")
    parser.add_argument("--threads", action="store_true", help="beside threads of copies; needs --out")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", help="a JSON file")
    add_flags(parser)
    args = parser.parse_args(argv)
    if args.threads and args.out is None:
        parser.error("--threads needs --out")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        worker = worker_in(Path(scratch))
        rig = HostRig(worker)
        if args.profile:
            profiler = cProfile.Profile()
            profiler.runcall(rig.run, dict(cases(rig))[args.profile], 2)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
        elif args.threads:
            report = RunReport(args, "none: prompts have fixed tokens", "cpu")
            beside_threads(rig, report, args.turns)
        else:
            for name, steps in cases(rig):
                show(name, rig.run(steps, 2))
            for name, steps in after_pauses(rig):
                show(name, rig.run(steps, 1, pause))
        worker.close()


if __name__ == "__main__":
    main()
