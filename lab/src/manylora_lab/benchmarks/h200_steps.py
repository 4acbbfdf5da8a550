"""Decoding steps on one GPU, eager and captured, beside their byte floor, and beside copies between the tiers.

With dummy weights in bfloat16, batches of sequences of 256 tokens, on the base model and over as many adapters
of rank 16: what the kernels of a step take (captured steps replayed back to back), and what a step takes on the
wall clock when it is issued after the step before has ended and while it still runs (part ``steps``). Then the
same while pages of the two pools are copied in, out, or both ways without a pause (``copies``); and, where asked
for, how near such copies, of pages of 8 and 2 MiB, come to one large copy of pinned memory (``rates``). The last
line is JSON. From the repository's root:

    python -m manylora_lab.benchmarks.h200_steps --out steps.json
    python -m manylora_lab.benchmarks.h200_steps --parts rates --out copies.json
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence

import torch

from manylora.executor.graphs import Bucket
from manylora.protocol.commands import SequenceStart
from manylora_lab.benchmarks.copy_runs import PageCopies, beside_copies, raw_rates
from manylora_lab.benchmarks.engine_rig import EngineRig
from manylora_lab.benchmarks.run_report import Row, RunReport, copy_bandwidth, run_parser
from manylora_lab.benchmarks.step_rig import SAMPLED, StepRig, step_bytes

RANK, CONTEXT = 16, 256
BATCHES = {"llama-2-7b": (1, 8, 32, 64, 128), "llama-3-8b": (64,)}
TOY, TOY_BATCHES, TOY_CONTEXT = "toy", (1, 4), 40
COPIED_BATCH = 32
"""Steps beside copies: their rows."""


class StepRun:
    """The steps of one shape: a rig, its worker's steps, their batches."""

    def __init__(self, rig: EngineRig, batches: Sequence[int]) -> None:
        self.rig, self.batches = rig, batches
        self.context = TOY_CONTEXT if rig.is_toy else CONTEXT
        self.steps = StepRig(rig.worker, rig.policy.num_pages)
        adapters = rig.adapters("rank-16", (RANK,), max(batches))
        self.adapters_s = round(self.steps.load(adapters.values()), 2)

    def starts(self, batch: int, adapted: bool, room: int, **params: object) -> list[SequenceStart]:
        return self.steps.sequences([(self.context, 1)] * batch, adapted, room=room, **params)  # type: ignore[arg-type]

    def kernels_ms(self, starts: list[SequenceStart], adapted: bool, repeats: int) -> float:
        """What the captured step's kernels take, replayed back to back."""
        self.steps.run(self.steps.decoding(starts, 1))
        graphs = self.rig.worker._graphs
        assert graphs is not None
        replay = graphs.captured[Bucket(len(starts), len(starts), RANK if adapted else 0)].run
        begin, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
        replay()
        begin.record()
        for _ in range(repeats):
            replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / repeats

    def times(self, batch: int, adapted: bool, steps: int) -> Row:
        """Milliseconds as an engine runs them: captured, where the device can do that."""
        row: Row = {}
        starts = self.starts(batch, adapted, steps)
        for depth in (1, 2):
            found = self.steps.decode_ms(starts, steps, depth)
            row[f"wall{depth}_ms"], row["issue_ms"] = found["wall_ms"], found["issue_ms"]
        sampled = self.starts(batch, adapted, steps, params=SAMPLED)
        row["sampled2_ms"] = self.steps.decode_ms(sampled, steps, 2)["wall_ms"]
        if self.rig.worker._graphs is not None:
            # Of the middle one of the steps above, whose context grows.
            middle = self.steps.sequences([(self.context + 2 + steps // 2, 1)] * batch, adapted)
            row["gpu_ms"] = self.kernels_ms(middle, adapted, 40)
            row["idle2_us"] = 1e3 * (row["wall2_ms"] - row["gpu_ms"])
        return row

    def row(self, batch: int, adapted: bool, bandwidth: float, steps: int) -> Row:
        """One batch: its floor, its times, and those without captures."""
        worker, starts = self.rig.worker, self.starts(batch, adapted, steps)
        num_bytes = step_bytes(
            self.rig.shape, batch, self.context + 2 + steps / 2, [RANK] * batch if adapted else ()
        )
        floor_ms = 1e3 * num_bytes / bandwidth
        lora = f"distinct r{RANK}" if adapted else "none"
        row: Row = {"shape": self.rig.shape.name, "batch": batch, "lora": lora, "floor_ms": floor_ms}
        row |= self.times(batch, adapted, steps)
        row["over_floor"] = row["wall2_ms"] / floor_ms
        graphs, worker._graphs = worker._graphs, None
        for depth in (1, 2):
            row[f"eager{depth}_ms"] = self.steps.decode_ms(starts, steps, depth)["wall_ms"]
        worker._graphs = graphs
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def run(rig: EngineRig, batches: Sequence[int], report: RunReport) -> Row:
    """The parts of one shape."""
    found: Row = {"start_s": rig.build_s}
    graphs, parts, steps = rig.worker._graphs, report.args.parts.split(","), report.args.steps
    if graphs is not None:
        found["captured"] = len(graphs.captured)
        found["captured_mib"] = round(rig.worker._device.captured_bytes() / 2**20)
    bench = StepRun(rig, batches)
    found["adapters_s"] = bench.adapters_s
    if "steps" in parts:
        bandwidth = report.values["bandwidth_bytes_per_s"]
        found["steps"] = []
        for adapted in (False, True):
            for batch in batches:
                found["steps"].append(bench.row(batch, adapted, bandwidth, steps))
                report.say(json.dumps(found["steps"][-1]))
    if "copies" in parts:
        rig.wait_pinned()
        starts = bench.starts(min(COPIED_BATCH, max(batches)), True, 3 * steps)
        found["beside_copies"] = beside_copies(bench.steps, starts, 3 * steps)
        report.say(json.dumps(found["beside_copies"]))
    if "rates" in parts:
        rig.wait_pinned()
        rates = PageCopies(rig, bench.steps.direct).rates()
        for key, row in rates.items():
            row["of_raw"] = row["gb_per_s"] / report.values["raw_pinned_gb_per_s"][key.rpartition("_")[2]]
        report.values["copier"][f"{rig.policy.page_bytes / 2**20:g}MiB"] = rates
        report.say(json.dumps(rates))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = run_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shapes", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument(
        "--batches", type=int, nargs="+", help="instead of a shape's own; one named twice is measured twice"
    )
    parser.add_argument("--parts", default="steps,copies", help="and rates: of the copies themselves")
    args = parser.parse_args(argv)
    report = RunReport(args, "1 of sampled rows; weights and prompts do not depend on one", shapes={})
    report.values["context"] = TOY_CONTEXT if args.toy else CONTEXT
    report.values["bandwidth_bytes_per_s"] = copy_bandwidth("cpu" if args.toy else "cuda")
    if "rates" in args.parts.split(","):
        report.values |= {
            "copier": {},
            "raw_pinned_gb_per_s": raw_rates("cpu" if args.toy else "cuda"),
        }
    gc.collect()
    if not args.toy:
        torch.cuda.empty_cache()
    for name in [TOY] if args.toy else args.shapes:
        batches = args.batches or (TOY_BATCHES if args.toy else BATCHES[name])
        sizes = {
            "max_model_len": 1024, "max_num_seqs": max(batches), "device_pool": "48GiB", "host_pool": "8GiB",
        }  # fmt: skip
        with EngineRig.of(name, args.toy, sizes) as rig:
            report.values["shapes"][name] = run(rig, batches, report)
        report.save()
    print(json.dumps(report.values), flush=True)


if __name__ == "__main__":
    main()
