"""The kernels that merge an adapter into the weights, by their sizes, over all linears of Llama-2-7B, from a copy
on the device.

Every launch is first held against exact sums. ``coarse``: the o and down projections alone, which take a third of
the weights and one variant of a kernel; ``whole``: the best of these over all linears, beside a plain copy of the
same bytes and a pass that restores. From the repository's root:

    python -m manylora_lab.benchmarks.merge_kernels --time-budget 60 --out merge_kernels.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from manylora.kernels.ops import LoraSegments, MergedLayer, MergePlan
from manylora.kernels.shapes import AdapterGeometry, ProjectionGroup, adapter_geometry
from manylora.pricing.shapes import SHAPES
from manylora_lab.bench.dummies import DEMO
from manylora_lab.bench.kernels.pool import (
    adapter_of,
    cells_for,
    groups_of,
    page_of,
    random_pool,
    segments_for,
)
from manylora_lab.bench.rounding import Bounded, accumulator, gamma
from manylora_lab.benchmarks.run_report import Row, RunReport, copy_bandwidth, run_parser

if TYPE_CHECKING:
    from manylora.kernels.triton.merging import MergeLaunch

RANKS = (16, 64, 128)
COARSE = ("o", "down")
ROUNDS = 5
RANK_S, WHOLE_S = 12.0, 6.0
"""What is kept for each further rank, and for all linears."""
BEST = 3
"""Launches of each rank that are timed over all linears."""
BEST_STRIPS = 6
"""Strips are compiled for each rank: so many of the best at rank 16 are at others."""


def launches() -> list[MergeLaunch]:
    """The likeliest first, for there may be no time for all."""
    from manylora.kernels.triton.merging import STRIPS, TILES, MergeLaunch

    strips = [
        MergeLaunch(*sizes)
        for sizes in (
            (64, 128, 4, 4, 2), (16, 256, 4, 8, 3), (64, 128, 4, 16, 3), (64, 64, 4, 8, 3), (32, 256, 4, 4, 2),
            (64, 128, 8, 4, 2), (64, 128, 4, 4, 1), (128, 128, 8, 4, 2),
        )
    ]  # fmt: skip
    tiles = [MergeLaunch(64, 64), MergeLaunch(32)]
    return [TILES, *STRIPS.values(), *strips, *tiles]


class MergeBench:
    """The weights twice, and an adapter of each rank in a pool."""

    def __init__(self, is_toy: bool) -> None:
        self.is_toy = is_toy
        self.device = torch.device("cpu" if is_toy else "cuda")
        self.dtype = torch.float32 if is_toy else torch.bfloat16
        shape = DEMO if is_toy else SHAPES["llama-2-7b"]
        if is_toy:
            shape = dataclasses.replace(shape, layers=2)
        self.ranks = (3, 20) if is_toy else RANKS
        page, groups = page_of(shape, self.dtype), groups_of(shape)
        self.geometry: AdapterGeometry = adapter_geometry(page, (groups,) * shape.layers)
        per_page = self.geometry.cells_per_page
        num_pages = 2 - (-cells_for(self.geometry, list(self.ranks)) // per_page)
        self.pool = random_pool(page, num_pages, self.dtype, self.device)
        lengths = [1] * len(self.ranks)
        self.segments: LoraSegments = segments_for(
            self.geometry, lengths, list(self.ranks), num_pages, self.device
        )
        self.layers = {group.name: self._weights(group, shape.layers) for group in groups}
        self._truths: dict[tuple[int, str], Bounded] = {}
        self.num_bytes = sum(each.merged.nbytes for layers in self.layers.values() for each in layers)

    def _weights(self, group: ProjectionGroup, count: int) -> list[MergedLayer]:
        sizes = (group.offsets[-1], group.in_features)
        made = []
        for layer in range(count):
            pristine = torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(std=0.02)
            made.append(MergedLayer(layer, torch.empty_like(pristine), pristine))
        return made

    def plan(self, rank: int) -> MergePlan:
        """Of all projections; rank 0 restores."""
        segment = self.ranks.index(rank) if rank else 0
        records = self.segments.records[segment]
        return MergePlan(
            np.ones(len(records), bool), records if rank else np.zeros_like(records),
            self.segments.scales[segment], self.segments.cells, self.geometry,
        )  # fmt: skip

    def step(self, rank: int, launch: MergeLaunch, names: Sequence[str]) -> Callable[[], None]:
        """One pass over the groups of these names."""
        from manylora.kernels.triton.merging import merge_linears

        plan, groups = self.plan(rank), [group for group in self.geometry.groups if group.name in names]

        def step() -> None:
            for group in groups:
                merge_linears(self.layers[group.name], self.pool, group, plan, launch)

        return step

    def check(self, rank: int, names: Sequence[str]) -> float:
        """Of what the last pass has written in the last layer, the largest error over what it may be."""
        found = []
        for group in self.geometry.groups:
            if group.name in names:
                _, merged, pristine = self.layers[group.name][-1]
                if not rank:
                    found.append(0.0 if torch.equal(merged, pristine) else float("inf"))
                    continue
                if (rank, group.name) not in self._truths:
                    self._truths = {key: kept for key, kept in self._truths.items() if key[0] == rank}
                    self._truths[rank, group.name] = self._truth(rank, group, pristine)
                found.append(self._truths[rank, group.name].excess(merged))
                merged.fill_(float("nan"))
        return max(found)

    def _truth(self, rank: int, group: ProjectionGroup, pristine: torch.Tensor) -> Bounded:
        exact, error = pristine.double(), torch.zeros_like(pristine, dtype=torch.float64)
        segment, layer = self.ranks.index(rank), self.layers[group.name][-1].layer
        for place, projection in enumerate(group.projections):
            index = self.geometry.projections.index(projection)
            found = adapter_of(self.pool, layer, index, segment, self.segments, self.geometry)
            a, b = (matrix.double() for matrix in found)
            scale = float(self.segments.scales[segment, index, 0, layer])
            rows = slice(group.offsets[place], group.offsets[place + 1])
            largest = exact[rows].abs() + abs(scale) * (b.abs().T @ a.abs())
            exact[rows] += scale * (b.T @ a)
            error[rows] = gamma(rank + 3, accumulator(self.dtype)) * largest
        return Bounded(exact, error).rounded(self.dtype)

    def seconds(self, step: Callable[[], None]) -> float:
        """The median of some passes, on the device's clock; the first has been run."""
        found = []
        for _ in range(1 if self.is_toy else ROUNDS):
            if self.is_toy:
                began_s = time.perf_counter()
                step()
                found.append(time.perf_counter() - began_s)
                continue
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            step()
            ended.record()
            ended.synchronize()
            found.append(begun.elapsed_time(ended) / 1e3)
        return statistics.median(found)

    def copy(self) -> None:
        """The bytes of a pass, by torch."""
        for layers in self.layers.values():
            for _, merged, pristine in layers:
                merged.copy_(pristine)


def timed(bench: MergeBench, rank: int, launch: MergeLaunch, names: Sequence[str]) -> Row:
    """A launch that does not compile, or gives wrong sums, has no time."""
    row: Row = {"rank": rank, **launch._asdict()}
    try:
        step = bench.step(rank, launch, names)
        step()
        row["excess"] = bench.check(rank, names)
        if row["excess"] <= 1:
            row["ms"] = 1e3 * bench.seconds(step)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:200]
    return row


def run(bench: MergeBench, report: RunReport) -> None:
    """Rank by rank, the smallest first."""
    from manylora.kernels.triton.merging import TILES

    everything, names = tuple(bench.layers), tuple(bench.layers) if bench.is_toy else COARSE
    bench.copy()
    copied_ms = 1e3 * bench.seconds(bench.copy)
    report.note("plain", {"copy_ms": copied_ms, **timed(bench, 0, TILES, everything)})
    candidates = launches()[:: 5 if bench.is_toy else 1]
    for number, rank in enumerate(bench.ranks, 1):
        kept_s = RANK_S * (len(bench.ranks) - number) + WHOLE_S
        rows: list[tuple[float, MergeLaunch]] = []
        for launch in candidates:
            if report.has(3.0 + kept_s, f"coarse {rank} {tuple(launch)}"):
                row = timed(bench, rank, launch, names)
                report.note("coarse", row)
                if "ms" in row:
                    rows.append((row["ms"], launch))
        best = [launch for _, launch in sorted(rows, key=lambda row: row[0])]
        for launch in [TILES, *(launch for launch in best if launch != TILES)][: 1 + BEST]:
            if report.has(3.0, f"whole {rank} {tuple(launch)}"):
                report.note("whole", timed(bench, rank, launch, everything))
        strips = [launch for launch in best if launch.strip][:BEST_STRIPS]
        candidates = [TILES, *strips, *(launch for launch in candidates[1:] if not launch.strip)]


def main(argv: Sequence[str] | None = None) -> None:
    """See the module. A toy needs TRITON_INTERPRET=1."""
    parser = run_parser(__doc__, 60.0)
    args = parser.parse_args(argv)
    if args.toy:
        os.environ["TRITON_INTERPRET"] = "1"
    report = RunReport(args, "of weights and of the pool, not fixed")
    bench = MergeBench(args.toy)
    bandwidth = copy_bandwidth("cpu" if args.toy else "cuda")
    report.values |= {"bytes": bench.num_bytes, "floor_ms": round(2e3 * bench.num_bytes / bandwidth, 3)}
    run(bench, report)
    report.save()
    best = {
        rank: [
            {name: value for name, value in row.items() if name not in ("rank", "excess")}
            for row in sorted(report.values.get("whole", []), key=lambda row: row.get("ms", float("inf")))
            if row["rank"] == rank
        ]
        for rank in bench.ranks
    }
    plain = report.values["plain"][0]
    found = {
        "floor_ms": report.values["floor_ms"],
        "copy_ms": plain["copy_ms"],
        "restore_ms": plain.get("ms"),
    }
    print(json.dumps({**found, "best": best}), flush=True)


if __name__ == "__main__":
    main()
